"""Sampling without replacement: distinct, uniform, seeded, and cheap whatever n."""

import itertools
import time

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.optim import sample_without_replacement


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (10, 0), (10, 3), (10, 4), (10, 10), (10**9, 500)])
def test_sample_is_distinct_sorted_and_in_range(n, size):
    indices = sample_without_replacement(n, size, generator=generator())
    assert indices.shape == (size,) and indices.dtype == torch.int64
    assert (indices.diff() > 0).all()
    assert size == 0 or (0 <= indices[0] and indices[-1] < n)


@pytest.mark.parametrize("size", [2, 4])  # redrawing (2 <= 7 // 3) and permutation
def test_sample_is_uniform_over_subsets(size):
    n, n_draws = 7, 6000
    stream = generator(1)
    subsets = {subset: 0 for subset in itertools.combinations(range(n), size)}
    for _ in range(n_draws):
        subsets[tuple(sample_without_replacement(n, size, generator=stream).tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-3


def test_sample_follows_its_generator_and_no_other():
    before = torch.get_rng_state()
    first, second = (sample_without_replacement(1000, 50, generator=generator(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    other = sample_without_replacement(1000, 50, generator=generator(4))
    assert not torch.equal(first, other)


def test_sample_time_does_not_depend_on_n():
    def seconds(n):
        stream, times = generator(), []
        for _ in range(30):
            start = time.perf_counter()
            sample_without_replacement(n, 500, generator=stream)
            times.append(time.perf_counter() - start)
        return np.median(times)

    assert seconds(10**10) < 5 * seconds(10**4)


@pytest.mark.parametrize("size", [-1, 6])
def test_sample_refuses_bad_sizes(size):
    with pytest.raises(ValueError, match=f"between 0 and n=5, got {size}"):
        sample_without_replacement(5, size, generator=generator())
