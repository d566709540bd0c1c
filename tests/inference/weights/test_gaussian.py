"""The chevron Gaussian against its dense covariance; its optima against exact inference."""

import math

import numpy as np
import pytest
import torch

from skgp.inference.weights.gram import optimal_gaussian, optimal_std
from skgp.inference.weights.posterior import WeightGaussian
from tests.reference import qsgp as reference

N, M, NOISE = 11, 7, 0.4
STRUCTURES = pytest.mark.parametrize("n_dense", [0, 2, M], ids=["diagonal", "chevron", "full"])
PRIORS = pytest.mark.parametrize("prior", ["diagonal", "dense"])


def make(n_dense, *, dtype=torch.float64):
    rng = np.random.default_rng(0)
    columns = np.tril(rng.standard_normal((M, M)))
    columns[np.diag_indices(M)] = rng.uniform(0.5, 2, M)
    tensors = rng.standard_normal(M), columns[:, :n_dense], rng.uniform(0.5, 2, M - n_dense)
    return WeightGaussian(*(torch.as_tensor(tensor, dtype=dtype) for tensor in tensors))


def problem(prior="diagonal"):
    """Arrays Phi, y, S (dense) and what the library is given: gram, projection, noise, S."""
    rng = np.random.default_rng(0)
    Phi, y = rng.standard_normal((N, M)), rng.standard_normal(N)
    root = rng.standard_normal((M, M))
    given = root @ root.T + np.eye(M) if prior == "dense" else rng.uniform(0.3, 3, M)
    S = given if prior == "dense" else np.diag(given)
    arrays = Phi.T @ Phi, Phi.T @ y, given
    gram, projection, precision = (torch.as_tensor(A) for A in arrays)
    return (Phi, y, S), (gram, projection, NOISE, precision)


@STRUCTURES
def test_gaussian_equals_its_dense_covariance(n_dense, rng):
    q = make(n_dense)
    C = np.zeros((M, M))
    C[:, :n_dense] = q.columns.numpy()
    C[range(n_dense, M), range(n_dense, M)] = q.tail_std.numpy()
    np.testing.assert_array_equal(q.factor(), C)
    np.testing.assert_array_equal(q.factor().diagonal(), np.diag(C))
    assert q.n_features == M and q.n_dense == n_dense
    np.testing.assert_allclose(q.log_det(), np.linalg.slogdet(C @ C.T)[1], rtol=1e-12, atol=1e-12)
    Phi = rng.standard_normal((5, M))
    expected = Phi @ C @ C.T @ Phi.T
    np.testing.assert_allclose(q.covariance(torch.as_tensor(Phi)), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(q.variance(torch.as_tensor(Phi)), np.diag(expected), rtol=1e-12)
    assert make(n_dense, dtype=torch.float32).variance(torch.ones(2, M)).dtype == torch.float32


@pytest.mark.parametrize(
    ("mean", "columns", "tail_std", "message"),
    [
        (torch.zeros(2), -torch.eye(2), torch.ones(0), "positive"),
        (torch.zeros(2), torch.zeros(2, 0), torch.tensor([1.0, math.nan]), "positive"),
    ],
)
def test_weight_gaussian_refuses_what_is_not_a_factor(mean, columns, tail_std, message):
    with pytest.raises(ValueError, match=message):
        WeightGaussian(mean, columns, tail_std)


@PRIORS
def test_full_optimum_equals_the_exact_posterior_and_attains_the_evidence(prior):
    (Phi, y, S), given = problem(prior)
    before = given[0].clone()
    q, jitter = optimal_gaussian(*given, n_dense=M)
    mean, Sigma = reference.posterior(Phi, S, y, NOISE)
    assert jitter == 0.0 and torch.equal(given[0], before)
    np.testing.assert_allclose(q.mean, mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(q.factor() @ q.factor().T, Sigma, rtol=1e-10, atol=1e-12)
    elbo = reference.elbo_by_definition(q.mean.numpy(), q.factor().numpy(), Phi, y, NOISE, S)
    assert elbo == pytest.approx(reference.log_evidence(Phi, S, y, NOISE), abs=1e-9)


@pytest.mark.parametrize("n_dense", [0, 1, 3, M - 1, M])
@PRIORS
def test_optimum_equals_a_numerical_optimiser(prior, n_dense):
    (Phi, y, S), given = problem(prior)
    q, _ = optimal_gaussian(*given, n_dense=n_dense)
    found, C = reference.minimise_covariance_objective(Phi, NOISE, S, n_dense)
    value = reference.loss_sigma(Phi, S, q.factor().numpy(), NOISE)
    assert value == pytest.approx(found, abs=1e-8)
    np.testing.assert_allclose(q.factor(), C, atol=1e-5)
    np.testing.assert_allclose(q.mean, reference.posterior(Phi, S, y, NOISE)[0], rtol=1e-10)


def test_optimal_std_is_proposition_1():
    (Phi, _, S), (gram, _, _, given) = problem()
    expected = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    np.testing.assert_allclose(optimal_std(gram.diagonal() / NOISE + given), expected, rtol=1e-12)


def test_optimal_gaussian_reports_jitter():
    # Rank one, no prior: the precision is singular.
    ones = torch.ones(M, dtype=torch.float64)
    q, jitter = optimal_gaussian(torch.outer(ones, ones), ones, 1.0, 0 * ones, n_dense=1)
    assert jitter > 0 and q.mean.isfinite().all()
