"""Transitions of a series are computed once for gaps that are equal but for rounding."""

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.chunks import Chunks, Transitions
from skgp.kernels.sde import state_space


class Counting:
    """Dynamics that note how many gaps they are asked for."""

    def __init__(self):
        self.dynamics, self.asked = state_space(Matern(1.0, nu=1.5)).at(), []

    def transition(self, gaps):
        self.asked.append(len(gaps))
        return self.dynamics.transition(gaps)


def transitions(times):
    """Transitions over the gaps of times (n,), and how many were computed."""
    gaps = torch.from_numpy(np.diff(times, prepend=times[0]))
    counting, chunks = Counting(), Chunks(len(times))
    steps = Transitions(counting, gaps, chunks).over(slice(0, chunks.count))
    F = torch.stack([steps[j][0].expand(2, 2, chunks.count) for j in range(chunks.length)])
    expected = counting.dynamics.transition(gaps)[0]
    found = torch.stack([torch.stack([chunks.gather(F[:, a, b]) for b in (0, 1)]) for a in (0, 1)])
    torch.testing.assert_close(found[..., 1:], expected[..., 1:], rtol=1e-6, atol=1e-9)
    return sum(counting.asked)


def test_a_regular_grid_needs_one_transition():
    times = 0.1 * np.arange(600)  # rounded, and so are the gaps between them
    assert len(np.unique(np.diff(times))) > 1
    assert transitions(times) == 1


def test_few_distinct_gaps_are_looked_up(rng):
    gaps = rng.choice([0.1, 0.25, 0.7], 600)
    assert transitions(1e6 + gaps.cumsum()) <= 6  # a rounding may fall on either side


def test_gaps_that_differ_by_more_than_rounding_stay_apart():
    gaps = 0.1 + 1e-6 * (np.arange(600) % 3)
    assert 3 <= transitions(gaps.cumsum()) <= 6


def test_irregular_gaps_are_computed_one_by_one(rng):
    assert transitions(rng.exponential(size=2000).cumsum()) >= 2000
