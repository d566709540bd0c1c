"""Merged rows against the raw ones, row by row."""

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.data import Data, merge_replicates, n_observations
from tests.same import assert_same

CPU = torch.device("cpu")
NOISE = 0.3


def repeated_rows(seed=0):
    """Five inputs seen 3, 1, 2, 1 and 4 times, shuffled; targets and weights of every row."""
    rng = np.random.default_rng(seed)
    X = np.repeat(rng.normal(size=(5, 2)), [3, 1, 2, 1, 4], axis=0)
    X = X[rng.permutation(len(X))]
    return X, rng.normal(size=len(X)), rng.uniform(0.2, 3.0, size=len(X))


def raw_log_likelihood(X, y, weight, f, noise):
    """Sum over the raw rows of w log N(y; f(x), noise), for f a function of a row."""
    values = np.array([f(x) for x in X])
    return np.sum(weight * stats.norm(values, np.sqrt(noise)).logpdf(y))


def merged_log_likelihood(data, f, noise):
    """log N(y_bar; f, noise / W) and `log_power`, over the distinct rows."""
    values = np.array([f(x) for x in data.X.numpy()])
    noise = torch.tensor(noise, dtype=torch.float64)
    std = data.row_noise(noise).sqrt().numpy()
    density = stats.norm(values, std).logpdf(data.y.numpy())
    return density.sum() + float(data.log_power(noise).sum())


@pytest.mark.parametrize("noise", [1e-3, NOISE, 20.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_merge_replicates_keeps_the_log_likelihood_of_any_function(weighted, noise):
    X, y, weight = repeated_rows()
    data = merge_replicates(X, y, weight if weighted else None, CPU)
    assert data.X.shape == (5, 2)
    for f in (lambda x: 0.0, lambda x: 3 * x[0] - x[1] ** 2, lambda x: np.sin(9 * x[0])):
        expected = raw_log_likelihood(X, y, weight if weighted else np.ones(len(y)), f, noise)
        np.testing.assert_allclose(merged_log_likelihood(data, f, noise), expected, rtol=1e-12)


def test_merge_replicates_counts_a_weight_of_two_as_the_row_twice():
    X, y, _ = repeated_rows()
    weight = np.array([1.0, 2, 1, 3, 1, 1, 2, 1, 1, 1, 2])
    counts = weight.astype(int)
    weighted = merge_replicates(X, y, weight, CPU)
    repeated = merge_replicates(np.repeat(X, counts, axis=0), np.repeat(y, counts), None, CPU)
    for name in ("X", "y", "weight", "scatter"):
        torch.testing.assert_close(
            getattr(weighted, name), getattr(repeated, name), rtol=1e-13, atol=1e-13
        )


def test_merge_replicates_computes_mean_weight_and_scatter_of_each_group():
    X, y, weight = repeated_rows()
    data = merge_replicates(X, y, weight, CPU)
    for row, mean, total, scatter in zip(data.X, data.y, data.weight, data.scatter, strict=True):
        group = (row.numpy() == X).all(axis=1)
        expected = np.average(y[group], weights=weight[group])
        np.testing.assert_allclose(float(mean), expected, rtol=1e-13)
        np.testing.assert_allclose(float(total), weight[group].sum(), rtol=1e-13)
        deviation = np.sum(weight[group] * (y[group] - expected) ** 2)
        np.testing.assert_allclose(float(scatter), deviation, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeated"])
def test_merge_replicates_sorts_rows_lexicographically_with_their_targets(repeats):
    rng = np.random.default_rng(1)
    X = np.stack([rng.integers(0, 3, size=12), rng.permutation(12)], axis=1).astype(float)
    y = 100 * X[:, 0] + X[:, 1]
    if repeats:
        X, y = np.concatenate([X, X[:4]]), np.concatenate([y, y[:4]])
    data = merge_replicates(X, y, None, CPU)
    keys = [tuple(row) for row in data.X.tolist()]
    assert keys == sorted(keys) and len(keys) == 12
    assert_same(data.y, 100 * data.X[:, 0] + data.X[:, 1])


def test_merge_replicates_of_distinct_rows_has_no_weights():
    _, y, weight = repeated_rows()
    X = np.random.default_rng(2).normal(size=(len(y), 2))
    plain = merge_replicates(X, y, None, CPU)
    assert plain.weight is None and plain.scatter is None
    noise = torch.tensor(0.1, dtype=torch.float64)
    assert torch.equal(plain.log_power(noise), torch.zeros_like(plain.y))
    assert torch.equal(plain.row_noise(noise), torch.full_like(plain.y, 0.1))
    weighted = merge_replicates(X, y, weight, CPU)
    np.testing.assert_allclose(weighted.scatter.numpy(), 0, atol=1e-30)
    assert_same(weighted.weight.numpy(), weight[np.lexsort(X.T[::-1])])


def test_merge_replicates_reads_read_only_arrays_and_copies_them():
    X, y, weight = repeated_rows()
    copies = X.copy(), y.copy(), weight.copy()
    for array in (X, y, weight):
        array.setflags(write=False)
    data = merge_replicates(X, y, weight, CPU)
    distinct = merge_replicates(X[:1], y[:1], None, CPU)
    for tensor in (data.X, data.y, data.weight, distinct.X, distinct.y):
        tensor.zero_()
    for array, copy in zip((X, y, weight), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_merge_replicates_computes_in_float64():
    X, y, _ = repeated_rows()
    data = merge_replicates(X.astype(np.float32), y.astype(np.float32), None, CPU)
    assert {data.X.dtype, data.y.dtype, data.weight.dtype} == {torch.float64}


def test_log_power_gradient_in_the_noise_matches_finite_differences():
    X, y, weight = repeated_rows()
    data = merge_replicates(X, y, weight, CPU)
    noise = torch.tensor(NOISE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(data.log_power, noise)


def test_data_take_selects_every_field():
    X, y, weight = repeated_rows()
    data = merge_replicates(X, y, weight, CPU)
    index = torch.tensor([3, 0])
    part = data.take(index)
    for name in ("X", "y", "weight", "scatter"):
        assert torch.equal(getattr(part, name), getattr(data, name)[index])
    bare = Data(data.X, data.y).take(index)
    assert bare.weight is None and bare.scatter is None and torch.equal(bare.y, data.y[index])


# ---- rows of equal inputs and equal targets -----------------------------------------------------


def observations(*arrays):
    return Data(*map(torch.from_numpy, arrays))


def test_distinct_observations_merge_equal_pairs_only():
    X = np.array([[1.0], [0.0], [1.0], [1.0]])
    y = np.array([2.0, 0.1, 3.0, 2.0])
    data = observations(X, y).merged(any_likelihood=True)
    np.testing.assert_array_equal(data.X[:, 0], [0, 1, 1])
    np.testing.assert_array_equal(data.y, [0.1, 2, 3])
    np.testing.assert_array_equal(data.weight, [1, 2, 1])
    np.testing.assert_array_equal(data.scatter, [0, 0, 0])
    weighted = observations(X, y, np.array([0.5, 1.0, 2.0, 4.0])).merged(any_likelihood=True)
    np.testing.assert_array_equal(weighted.weight, [1, 4.5, 2])
    assert observations(X[:3], y[:3]).merged(any_likelihood=True).weight is None


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_distinct_observations_keep_any_sum_over_the_rows(weighted):
    """Of targets and inputs alike: no likelihood sees a difference."""
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 3, (60, 2)).astype(float), rng.integers(0, 2, 60).astype(float)
    weight = rng.uniform(0.2, 3.0, 60) if weighted else np.ones(60)
    data = observations(X, y, *[weight] * weighted).merged(any_likelihood=True)
    assert len(data.y) == len(np.unique(np.column_stack([X, y]), axis=0)) < 60
    assert data.X.shape == (len(data.y), 2) and data.X.is_contiguous() and data.y.is_contiguous()
    for values in (lambda x, y: np.abs(x[:, 0] - y), lambda x, y: np.sin(3 * y + x[:, 1])):
        expected = weight @ values(X, y)
        found = data.weight.numpy() @ values(data.X.numpy(), data.y.numpy())
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_copies_are_one_observation():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 2)), rng.normal(size=30)
    assert n_observations(X, y) == 30
    chosen = rng.integers(30, size=90)
    assert n_observations(X[chosen], y[chosen]) == len(np.unique(chosen))
    copies = np.repeat(np.arange(30), 3)  # of three targets as many numbers as rows
    assert n_observations(X[copies], rng.normal(size=(30, 3))[copies]) == 30


def test_replicates_are_observations_each():
    X, y, _ = repeated_rows()
    assert n_observations(X, y) == len(y)


def test_discrete_targets_tie_without_being_copies():
    rng = np.random.default_rng(0)
    X = np.repeat(np.arange(10.0), 50)[:, None]
    assert n_observations(X, rng.integers(0, 4, size=500)) == 500
    assert n_observations(X, np.repeat(np.arange(10.0) % 2, 50)) == 10  # one value at each input
