"""The chevron Gaussian against its dense covariance."""

import math

import numpy as np
import pytest
import torch

from skgp.inference.variational import WeightGaussian

M = 6
STRUCTURES = pytest.mark.parametrize("n_dense", [0, 2, M], ids=["diagonal", "chevron", "full"])


def make(n_dense, *, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    columns = np.tril(rng.standard_normal((M, M)))
    columns[np.diag_indices(M)] = rng.uniform(0.5, 2, M)
    mean = rng.standard_normal(M)
    tail_std = rng.uniform(0.5, 2, M - n_dense)
    tensors = (mean, columns[:, :n_dense], tail_std)
    return WeightGaussian(*(torch.as_tensor(tensor, dtype=dtype) for tensor in tensors))


def dense_factor(q):
    C = np.zeros((q.n_features, q.n_features))
    C[:, : q.n_dense] = q.columns
    for r in range(q.n_dense, q.n_features):
        C[r, r] = q.tail_std[r - q.n_dense]
    return C


@pytest.fixture
def Phi(rng):
    return torch.as_tensor(rng.standard_normal((5, M)))


@STRUCTURES
def test_factor_is_lower_triangular_with_the_parameters_in_place(n_dense):
    q = make(n_dense)
    np.testing.assert_array_equal(q.factor(), dense_factor(q))
    np.testing.assert_array_equal(q.factor_diagonal, np.diag(dense_factor(q)))
    assert q.n_features == M and q.n_dense == n_dense


@STRUCTURES
def test_log_det_equals_numpy(n_dense):
    q = make(n_dense)
    Sigma = dense_factor(q) @ dense_factor(q).T
    np.testing.assert_allclose(q.log_det(), np.linalg.slogdet(Sigma)[1], rtol=1e-12, atol=1e-12)


@STRUCTURES
def test_variance_and_covariance_equal_dense(n_dense, Phi):
    q = make(n_dense)
    C = dense_factor(q)
    expected = Phi.numpy() @ C @ C.T @ Phi.numpy().T
    np.testing.assert_allclose(q.covariance(Phi), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(q.variance(Phi), np.diag(expected), rtol=1e-12)


@STRUCTURES
@pytest.mark.parametrize("edges", [(0, 1, 5, 6), (0, 2, 4, 6), (0, 3, 6), (0, 6)])
def test_accumulator_does_not_depend_on_the_blocks(n_dense, edges, Phi):
    q = make(n_dense)
    blocks = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    for full_cov in (False, True):
        accumulator = q.accumulator(len(Phi), full_cov=full_cov)
        for block in reversed(blocks):
            accumulator.add(Phi[:, block], block)
        torch.testing.assert_close(accumulator.mean(), Phi @ q.mean, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(accumulator.variance(), q.variance(Phi), rtol=1e-13, atol=0)
    torch.testing.assert_close(accumulator.covariance(), q.covariance(Phi), rtol=0, atol=1e-12)


def test_accumulator_promotes_float32_features(Phi):
    value = make(2).variance(Phi.float())
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, make(2).variance(Phi), rtol=1e-6, atol=0)


def test_accumulator_refuses_misuse(Phi):
    accumulator = make(2).accumulator(5)
    with pytest.raises(ValueError, match=r"shape \(5, 2\) for the features 0:2; got \(5, 3\)"):
        accumulator.add(Phi[:, :3], slice(0, 2))
    accumulator.add(Phi[:, :4], slice(0, 4))
    for read in (accumulator.mean, accumulator.variance, accumulator.covariance):
        with pytest.raises(ValueError, match="4 features were added but q has 6"):
            read()
    accumulator.add(Phi[:, 4:], slice(4, None))
    with pytest.raises(ValueError, match="full_cov=True"):
        accumulator.covariance()


@STRUCTURES
def test_sample_has_the_moments_of_q(n_dense, generator):
    q = make(n_dense)
    n_samples = 20_000
    draws = q.sample(n_samples, generator).numpy()
    assert draws.shape == (n_samples, M)
    Sigma = dense_factor(q) @ dense_factor(q).T
    std = np.sqrt(np.diag(Sigma))
    z_mean = (draws.mean(0) - q.mean.numpy()) / std * math.sqrt(n_samples)
    assert np.abs(z_mean).max() < 4
    # The variance of a sample covariance entry is (S_ii S_jj + S_ij^2) / n.
    error = np.cov(draws.T) - Sigma
    z_cov = error / np.sqrt((np.outer(std, std) ** 2 + Sigma**2) / n_samples)
    assert np.abs(z_cov).max() < 4


def test_sample_is_reproducible():
    q = make(2)
    first, second = (q.sample(3, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)


@STRUCTURES
def test_results_keep_dtype_and_device(n_dense):
    q = make(n_dense, dtype=torch.float32)
    results = [q.variance(torch.ones(2, M)), q.log_det(), q.sample(1)]
    assert {result.dtype for result in results} == {torch.float32}


@STRUCTURES
def test_results_are_differentiable_in_the_parameters(n_dense, Phi):
    q = make(n_dense)
    leaves = [q.mean, q.columns, q.tail_std]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def value(mean, columns, tail_std):
        # gradcheck perturbs the zeros above the diagonal as well
        q = WeightGaussian(mean, columns.tril(), tail_std)
        return q.variance(Phi), q.covariance(Phi), q.factor()

    assert torch.autograd.gradcheck(value, leaves)


def test_named_constructors_give_the_same_gaussian(Phi):
    q = make(M)
    torch.testing.assert_close(
        WeightGaussian.full(q.mean, q.factor()).variance(Phi), q.variance(Phi)
    )
    q = make(0)
    same = WeightGaussian.diagonal(q.mean, q.tail_std)
    torch.testing.assert_close(same.variance(Phi), q.variance(Phi))
    assert same.columns.shape == (M, 0)


@pytest.mark.parametrize(
    ("mean", "columns", "tail_std", "message"),
    [
        (torch.zeros(3), torch.zeros(3, 0), torch.ones(2), "shapes"),
        (torch.zeros(3), torch.zeros(2, 1), torch.ones(2), "shapes"),
        (torch.zeros(2), torch.ones(2, 3), torch.ones(0), "shapes"),
        (torch.zeros(2), torch.ones(2, 2), torch.ones(0), "lower triangular"),
        (torch.zeros(2), -torch.eye(2), torch.ones(0), "positive"),
        (torch.zeros(2), torch.zeros(2, 0), torch.tensor([1.0, 0.0]), "positive"),
        (torch.zeros(2), torch.zeros(2, 0), torch.tensor([1.0, math.nan]), "positive"),
    ],
)
def test_weight_gaussian_refuses_what_is_not_a_factor(mean, columns, tail_std, message):
    with pytest.raises(ValueError, match=message):
        WeightGaussian(mean, columns, tail_std)
