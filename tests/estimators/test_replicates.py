"""Observations of equal inputs, which Gaussian noise allows to merge, against all of them."""

import numpy as np
import pytest
from scipy.stats import multivariate_normal
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor, SWSGPRegressor

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
        kernel, n_inducing=15, normalize_y=False, max_iter=100, random_state=0, **options
    ).fit(X, y)
    means = y.reshape(30, 12).mean(axis=1).repeat(12)
    within = ((y - means) ** 2).sum() / (12 - 1) / 30
    assert fit.noise_variance_ == pytest.approx(within, rel=0.15)


@pytest.mark.parametrize("basis", ["fourier", "inducing"])
@pytest.mark.parametrize("solver", ["cg", "gauss-seidel"])
def test_qsgp_is_calibrated_by_observations(basis, solver, replicated):
    X, y = replicated
    fit = QSGPRegressor(
        RBF() + WhiteKernel(NOISE),
        basis=basis,
        n_basis=200 if basis == "fourier" else 20,
        solver=solver,
        max_iter=200,
        optimizer=None,
        normalize_y=False,
        random_state=0,
    ).fit(X, y)
    # Rasmussen and Williams (2006), eqs. 5.10-5.12: each observation given all others
    P = np.linalg.inv(np.exp(-0.5 * (X - X.T) ** 2) + NOISE * np.eye(len(X)))
    assert fit.calibration_ == pytest.approx(np.mean((P @ y) ** 2 / P.diagonal()), abs=0.1)
