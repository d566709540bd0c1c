"""Rows sorted and merged by time, against plain loops; transitions between the times."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.series import Chunks, Transitions, make_series
from skgp.kernels.sde import state_space


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def rows():
    x = tensor([3.0, 1.0, 3.0, 2.0, 1.0, 3.0])
    y = tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return x, y, tensor([1.0, 0.5, 2.0, 1.0, 3.0, 0.1])


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_at_each_time_are_those_of_a_loop(rows, weighted):
    x, y, weight = rows
    series = make_series(x, y, weight if weighted else None)
    w = weight if weighted else torch.ones(6, dtype=torch.float64)
    assert series.times.tolist() == [1.0, 2.0, 3.0]
    expected = [[float((w * v)[x == t].sum()) for t in series.times] for v in (y, torch.ones(6))]
    np.testing.assert_allclose(series.totals, expected[0], rtol=1e-12)
    np.testing.assert_allclose(series.counts, expected[1], rtol=1e-12)
    assert series.squares == pytest.approx(float((w * y**2).sum()))
    assert series.total == pytest.approx(float(w.sum()))
    order = x.argsort(stable=True)
    np.testing.assert_array_equal(series.y, y[order])
    np.testing.assert_array_equal(series.at_rows(series.times), x[order])


def test_distinct_times_need_no_index(rows):
    series = make_series(tensor([2.0, -1.0, 0.5]), tensor([1.0, 2.0, 3.0]))
    assert series.index is None and series.gaps.tolist() == [0.0, 1.5, 1.5]
    values = tensor([7.0, 8.0, 9.0])
    assert series.at_rows(values) is values and series.sums(values) is values


def test_gaussian_sites_are_the_likelihood_but_for_a_constant(rows):
    series, noise = make_series(*rows), 0.3
    beta, omega = series.gaussian_sites(noise)

    def left_out(f):
        residual = series.y - series.at_rows(f)
        log_density = -0.5 * (math.log(2 * math.pi * noise) + residual**2 / noise)
        return float(series.weight @ log_density - (beta @ f - 0.5 * omega @ f**2))

    assert left_out(tensor([0.2, -0.4, 1.1])) == pytest.approx(left_out(torch.zeros(3).double()))


def test_stretches_are_apart_and_thinned_rows_are_not():
    x = torch.arange(100, dtype=torch.float64)
    series = make_series(x, x)
    thin = series.thinned(20)
    assert thin.times.tolist() == x[::5].tolist() and bool((thin.gaps[1:] == 5).all())
    parts = series.stretches(20, 5)
    assert len(parts.y) == 20 and parts.gaps.isinf().nonzero()[:, 0].tolist() == [5, 10, 15]
    assert parts.times[0] == 0 and parts.times[-1] == 99
    assert bool((parts.gaps[[1, 6, 11]] == 1).all())


def test_stretch_that_begins_within_a_time_begins_with_the_time():
    series = make_series(tensor([0.0, 1.0, 1.0, 1.0, 2.0]), torch.arange(5.0).double())
    part = series.rows(torch.tensor([0, 1, 2, 4]), torch.tensor([2]))
    assert part.times.tolist() == [0.0, 1.0, 2.0]
    assert part.gaps.isinf().tolist() == [False, True, False]


def test_rows_are_copied(rows):
    x, y, weight = rows
    series = make_series(x, y, weight)
    before = series.times.clone(), series.y.clone()
    x.zero_(), y.zero_()
    assert torch.equal(series.times, before[0]) and torch.equal(series.y, before[1])


# Transitions: computed once for gaps that are equal but for rounding -----------------------------


class Counting:
    """Dynamics that note how many gaps they are asked for."""

    def __init__(self):
        self.dynamics, self.asked = state_space(Matern(1.0, nu=1.5)).at(), []

    origin = None

    def transition(self, gaps):
        self.asked.append(len(gaps))
        return self.dynamics.transition(gaps)


def transitions(times):
    """Transitions over the gaps of times (n,), and how many were computed."""
    gaps = torch.from_numpy(np.diff(times, prepend=times[0]))
    counting, chunks = Counting(), Chunks(len(times), 2)
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
