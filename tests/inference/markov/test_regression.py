"""A series with terms against the joint Gaussian of f, coefficients and observations."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.columns import SeriesColumns, columns_of
from skgp.inference.markov.regression import RegressionPosterior
from skgp.inference.markov.series import Lags
from skgp.kernels.sde import state_space
from tests.reference.series_regression import dense_regression
from tests.reference.state_space import by_finite_differences, model_covariance

KERNEL = 1.3 * Matern(0.7, nu=1.5) + 0.4 * Matern(3.0, nu=0.5)
SIZES = [1, 3, 2]


def problem(n=70, seed=0):
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(0.2, n)
    gaps[[3, 4]] = 0.0
    x = np.cumsum(gaps)
    Phi = np.column_stack([np.ones(n), x / x.max(), rng.normal(size=(n, 4))])
    y = np.sin(x) + Phi @ rng.normal(size=6) + 0.3 * rng.normal(size=n)
    return x, Phi, y, rng.uniform(0.05, 0.3, n), np.array([9.0, 0.7, 0.7, 0.7, 2.0, 1e-3])


def posterior(parameters, log_scales, data, route):
    x, Phi, y, noise, _ = data
    dynamics = state_space(KERNEL).at(parameters)
    gaps, weight = torch.tensor(np.diff(x, prepend=x[0])), torch.tensor(1 / noise)
    columns = (
        columns_of(dynamics, gaps, weight, Lags.between(gaps))
        if route == "dense"
        else SeriesColumns(dynamics, gaps, weight)
    )
    Psi = torch.tensor(Phi) * log_scales.exp()
    return RegressionPosterior(columns, Psi, torch.tensor(y), weight, SIZES)


@pytest.mark.parametrize("route", ["dense", "series"])
def test_posterior_equals_the_joint_gaussian(route):
    data = x, Phi, y, noise, sd = problem()
    form = state_space(KERNEL)
    parameters, log_scales = form.parameters(), torch.tensor(sd).log()
    found = posterior(parameters, log_scales, data, route)
    K = model_covariance(form.at(), x)
    dense = dense_regression(K, Phi, y, noise, sd, K, K, Phi)
    constant = 0.5 * np.log(2 * np.pi * noise).sum()
    np.testing.assert_allclose(found.log_normalizer - constant, dense.log_evidence, rtol=1e-11)
    np.testing.assert_allclose(found.mean, dense.mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.var, np.diag(dense.cov), rtol=1e-9)
    np.testing.assert_allclose(sd * found.u.numpy(), dense.mean_beta, rtol=1e-9, atol=1e-12)
    root = found.by_root(torch.diag(torch.tensor(sd)))
    np.testing.assert_allclose(root @ root.T, dense.cov_beta, rtol=1e-8, atol=1e-12)

    of_dynamics, *of_scales = found.gradients()
    of_scales = torch.cat(of_scales)
    by_differences = by_finite_differences(
        lambda at: posterior(at, log_scales, data, route).log_normalizer, parameters
    )
    torch.testing.assert_close(of_dynamics, by_differences, rtol=1e-6, atol=1e-6)
    by_differences = by_finite_differences(
        lambda at: posterior(parameters, at, data, route).log_normalizer, log_scales
    )
    torch.testing.assert_close(of_scales, by_differences, rtol=1e-6, atol=1e-6)
    assert [len(each) for each in found.gradients()[1:]] == SIZES
