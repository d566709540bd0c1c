"""Divergence and evidence lower bound against their definitions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.inference.variational import WeightGaussian, elbo, kl_to_prior
from tests.inference.variational.test_gaussian import STRUCTURES, M, make
from tests.inference.variational.test_optimum import PRIORS
from tests.reference import variational as reference


def prior_precision(kind, seed=4):
    """S as a dense array, and as the library takes it."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((M, M))
    if kind == "identity":
        return np.eye(M), None
    if kind == "diagonal":
        S = rng.uniform(0.3, 3, M)
        return np.diag(S), torch.as_tensor(S)
    S = root @ root.T + np.eye(M)
    return S, torch.as_tensor(S)


@STRUCTURES
@PRIORS
def test_kl_to_prior_equals_dense(n_dense, prior):
    q = make(n_dense)
    S, given = prior_precision(prior)
    C = q.factor().numpy()
    expected = reference.kl_to_prior(q.mean.numpy(), C @ C.T, S)
    assert float(kl_to_prior(q, given)) == pytest.approx(expected, rel=1e-11)


@STRUCTURES
def test_kl_to_prior_equals_monte_carlo(n_dense, generator):
    q = make(n_dense)
    S, given = prior_precision("dense")
    draws = q.sample(20_000, generator).numpy()
    C = q.factor().numpy()
    log_q = stats.multivariate_normal(q.mean, C @ C.T).logpdf(draws)
    log_p = stats.multivariate_normal(np.zeros(M), np.linalg.inv(S)).logpdf(draws)
    ratio = log_q - log_p
    z = (ratio.mean() - float(kl_to_prior(q, given))) / (ratio.std() / math.sqrt(len(ratio)))
    assert abs(z) < 4


def test_kl_to_prior_is_zero_at_the_prior():
    S, given = prior_precision("dense")
    prior = torch.as_tensor(np.linalg.cholesky(np.linalg.inv(S)))
    q = WeightGaussian.full(torch.zeros(M, dtype=torch.float64), prior)
    assert float(kl_to_prior(q, given)) == pytest.approx(0, abs=1e-12)


@STRUCTURES
@PRIORS
def test_elbo_equals_its_definition(n_dense, prior, rng):
    # Any q, not only the optimum.
    q = make(n_dense)
    Phi, y, noise = rng.standard_normal((9, M)), rng.standard_normal(9), 0.3
    S, given = prior_precision(prior)
    gram, projection = torch.as_tensor(Phi.T @ Phi), torch.as_tensor(Phi.T @ y)
    value = elbo(q, gram, projection, y @ y, 9, noise, given)
    C = q.factor().numpy()
    expected = reference.elbo_by_definition(q.mean.numpy(), C, Phi, y, noise, S)
    assert float(value) == pytest.approx(expected, rel=1e-11)
    assert expected <= reference.log_marginal_likelihood(Phi, y, noise, S)


@PRIORS
def test_elbo_and_kl_gradients_equal_finite_differences(prior, rng):
    q = make(2)
    Phi = torch.as_tensor(rng.standard_normal((9, M)))
    y = torch.as_tensor(rng.standard_normal(9))
    _, S = prior_precision(prior)
    S = torch.ones(M, dtype=torch.float64) if S is None else S

    def value(mean, columns, tail_std, noise, scale):
        p = WeightGaussian(mean, columns.tril(), tail_std)
        given = S * scale
        bound = elbo(p, Phi.T @ Phi, Phi.T @ y, y @ y, 9, noise, given)
        return bound, kl_to_prior(p, given)

    scalars = [torch.tensor(x, dtype=torch.float64) for x in (0.3, 1.2)]
    leaves = [x.clone().requires_grad_() for x in (q.mean, q.columns, q.tail_std, *scalars)]
    assert torch.autograd.gradcheck(value, leaves)
