"""Rows sorted and merged by time, against plain loops."""

import math

import numpy as np
import pytest
import torch

from skgp.inference.markov.series import make_series


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


def test_gaussian_sites_and_their_constant_are_the_likelihood(rows):
    series = make_series(*rows)
    noise, f = 0.3, tensor([0.2, -0.4, 1.1])
    beta, omega = series.gaussian_sites(noise)
    found = float(beta @ f - 0.5 * omega @ f**2) + series.gaussian_constant(noise)
    residual = series.y - series.at_rows(f)
    log_density = -0.5 * (math.log(2 * math.pi * noise) + residual**2 / noise)
    assert found == pytest.approx(float(series.weight @ log_density), rel=1e-13)


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
