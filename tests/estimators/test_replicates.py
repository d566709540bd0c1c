"""Observations of equal inputs, which Gaussian noise allows to merge, against all of them."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import SWSGPRegressor

NOISE = 0.25


@pytest.fixture(scope="module")
def replicated():
    """Twelve observations each of 30 inputs."""
    X = np.repeat(np.linspace(0, 10, 30), 12)[:, None]
    noise = np.sqrt(NOISE) * np.random.default_rng(0).standard_normal(len(X))
    return X, np.sin(X[:, 0]) + noise


def test_swsgp_elbo_of_all_neighbours_is_the_log_marginal_likelihood(replicated):
    X, y = replicated
    fit = SWSGPRegressor(RBF() + WhiteKernel(NOISE), optimizer=None, normalize_y=False).fit(X, y)
    K = np.exp(-0.5 * (X - X.T) ** 2) + NOISE * np.eye(len(X))
    assert fit.elbo_ == pytest.approx(multivariate_normal.logpdf(y, cov=K), abs=1e-5)


@pytest.mark.parametrize("options", [{"solver": "adam"}, {"polish": True}])
def test_swsgp_minibatches_learn_the_noise_of_an_observation(options, replicated):
    X, y = replicated
    kernel = RBF() + WhiteKernel(NOISE)
    fit = SWSGPRegressor(
        kernel, n_inducing=15, normalize_y=False, max_iter=200, random_state=0, **options
    ).fit(X, y)
    means = y.reshape(30, 12).mean(axis=1).repeat(12)
    within = ((y - means) ** 2).sum() / (12 - 1) / 30
    assert fit.noise_variance_ == pytest.approx(within, rel=0.15)
