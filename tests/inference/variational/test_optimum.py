"""Closed-form optima against exact inference and a numerical optimiser."""

import numpy as np
import pytest
import torch

from skgp.inference.variational import (
    WeightGaussian,
    optimal_gaussian,
    optimal_std,
    posterior_precision,
)
from tests.reference import variational as reference

N, M, NOISE = 11, 7, 0.4
PRIORS = pytest.mark.parametrize("prior", ["identity", "diagonal", "dense"])


def problem(prior="diagonal", seed=0):
    """Arrays Phi, y, S (dense) and what the library is given: gram, projection, S."""
    rng = np.random.default_rng(seed)
    Phi, y = rng.standard_normal((N, M)), rng.standard_normal(N)
    root = rng.standard_normal((M, M))
    S = {
        "identity": np.eye(M),
        "diagonal": np.diag(rng.uniform(0.3, 3, M)),
        "dense": root @ root.T + np.eye(M),
    }[prior]
    given = {"identity": None, "diagonal": np.diag(S).copy(), "dense": S}[prior]
    given = None if given is None else torch.as_tensor(given)
    statistics = (torch.as_tensor(Phi.T @ Phi), torch.as_tensor(Phi.T @ y))
    return (Phi, y, S), (*statistics, NOISE, given)


def negative_elbo_terms(q, given):
    """Eq. (2): what of -2 ELBO depends on q."""
    gram, projection, noise, S = given
    G, C = posterior_precision(gram, noise, S), q.factor()
    mean = q.mean @ G @ q.mean - 2 / noise * projection @ q.mean
    return mean + torch.trace(C.T @ G @ C) - 2 * C.diagonal().log().sum()


@PRIORS
def test_full_optimum_equals_the_exact_posterior(prior):
    (Phi, y, S), given = problem(prior)
    q, jitter = optimal_gaussian(*given, n_dense=M)
    mean, Sigma = reference.posterior(Phi, y, NOISE, S)
    assert jitter == 0.0
    np.testing.assert_allclose(q.mean, mean, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(q.factor() @ q.factor().T, Sigma, rtol=1e-10, atol=1e-12)


@PRIORS
def test_elbo_of_the_full_optimum_is_the_log_marginal_likelihood(prior):
    (Phi, y, S), given = problem(prior)
    q = optimal_gaussian(*given, n_dense=M).q
    value = reference.elbo_by_definition(q.mean.numpy(), q.factor().numpy(), Phi, y, NOISE, S)
    expected = reference.log_marginal_likelihood(Phi, y, NOISE, S)
    assert float(value) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("n_dense", [0, 1, 3, M - 1, M])
@PRIORS
def test_optimum_equals_a_numerical_optimiser(prior, n_dense):
    (Phi, _, S), given = problem(prior)
    q = optimal_gaussian(*given, n_dense=n_dense).q
    found, C = reference.minimise_covariance_objective(Phi, NOISE, S, n_dense)
    value = reference.covariance_objective(q.factor().numpy(), Phi, NOISE, S)
    assert value == pytest.approx(found, abs=1e-8)
    np.testing.assert_allclose(q.factor(), C, atol=1e-5)


@pytest.mark.parametrize("n_dense", [0, 3, M])
def test_optimum_has_zero_gradient(n_dense):
    _, given = problem()
    q = optimal_gaussian(*given, n_dense=n_dense).q
    leaves = [leaf.requires_grad_() for leaf in (q.mean, q.columns, q.tail_std)]
    negative_elbo_terms(WeightGaussian(*leaves), given).backward()
    assert leaves[0].grad.abs().max() < 1e-12
    if n_dense:
        assert leaves[1].grad.tril().abs().max() < 1e-12
    if n_dense < M:
        assert leaves[2].grad.abs().max() < 1e-12


def test_chevron_columns_are_those_of_the_full_optimum():
    _, given = problem("dense")
    full = optimal_gaussian(*given, n_dense=M).q
    chevron = optimal_gaussian(*given, n_dense=3).q
    torch.testing.assert_close(chevron.columns, full.columns[:, :3], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chevron.mean, full.mean)


def test_more_dense_columns_never_lower_the_elbo():
    (Phi, y, S), given = problem()
    optima = [optimal_gaussian(*given, n_dense=k).q for k in range(M + 1)]
    bounds = [
        reference.elbo_by_definition(q.mean.numpy(), q.factor().numpy(), Phi, y, NOISE, S)
        for q in optima
    ]
    # The last diagonal column is dense already, hence the last step is equality.
    assert np.all(np.diff(bounds)[:-1] > 0) and bounds[-1] == pytest.approx(bounds[-2])


def test_optimal_std_is_proposition_1():
    (Phi, _, S), given = problem()
    expected = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    G = posterior_precision(given[0], NOISE, given[3])
    np.testing.assert_allclose(optimal_std(G.diagonal()), expected, rtol=1e-12)


@PRIORS
def test_posterior_precision_equals_numpy_and_keeps_its_input(prior):
    (Phi, _, S), (gram, _, noise, given) = problem(prior)
    before = gram.clone()
    G = posterior_precision(gram, noise, given)
    np.testing.assert_allclose(G, Phi.T @ Phi / NOISE + S, rtol=1e-12)
    assert torch.equal(gram, before)


def test_optimal_gaussian_is_differentiable_in_the_noise_variance():
    _, (gram, projection, _, S) = problem()

    def parameters(log_noise):
        q = optimal_gaussian(gram, projection, log_noise.exp(), S, n_dense=2).q
        return q.mean, q.columns, q.tail_std

    log_noise = torch.tensor(-0.9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(parameters, log_noise)


def test_optimal_gaussian_float32_is_close_to_float64():
    _, (gram, projection, noise, S) = problem()
    q = optimal_gaussian(gram.float(), projection.float(), noise, S.float(), n_dense=2).q
    exact = optimal_gaussian(gram, projection, noise, S, n_dense=2).q
    assert q.mean.dtype == torch.float32
    torch.testing.assert_close(q.columns.double(), exact.columns, rtol=1e-4, atol=1e-6)


def test_optimal_gaussian_reports_jitter():
    # Rank one, no prior: the precision is singular.
    ones = torch.ones(M, dtype=torch.float64)
    q, jitter = optimal_gaussian(torch.outer(ones, ones), ones, 1.0, 0 * ones, n_dense=1)
    assert jitter > 0 and q.mean.isfinite().all()


@pytest.mark.parametrize("n_dense", [-1, M + 1])
def test_optimal_gaussian_refuses_n_dense_out_of_range(n_dense):
    _, given = problem()
    with pytest.raises(ValueError, match=f"n_dense must lie between 0 .* got {n_dense}"):
        optimal_gaussian(*given, n_dense=n_dense)
