"""Joint laws of f against an independent dense GP: on the data, between and far off them."""

import warnings
from functools import cache

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, DotProduct, WhiteKernel

from skgp import DLMGPRegressor, QSGPRegressor, SWSGPRegressor, VecchiaGPRegressor
from skgp.likelihoods import Gaussian
from tests.reference.gaussian import process

NOISE = 0.01
SIGNAL = 1.0 * RBF(1.0)
KERNEL = SIGNAL + WhiteKernel(NOISE)
ROUTES = {
    "dense": dict(),
    "inducing": dict(n_basis=15),
    "inducing, samples": dict(n_basis=15, covariance="samples"),
    "inducing, cg": dict(n_basis=15, solver="cg"),
    "pathwise": dict(covariance="samples"),
    "cg": dict(solver="cg", tol=1e-6),
    "diagonal": dict(covariance="diagonal"),
    "chevron": dict(covariance="chevron"),
    "laplace": dict(likelihood="laplace", n_basis=15),
    "sgd": dict(basis="inducing", solver="sgd", n_basis=80, max_iter=20),
}
OTHERS = {
    "dlm": lambda: DLMGPRegressor(
        KERNEL, n_inducing=15, optimizer=None, normalize_y=False, random_state=0
    ),
    "dlm, elbo": lambda: DLMGPRegressor(
        KERNEL, n_inducing=40, objective="elbo", optimizer=None, normalize_y=False, random_state=0
    ),
    "swsgp": lambda: SWSGPRegressor(
        KERNEL, n_inducing=15, n_neighbors=15, optimizer=None, normalize_y=False, max_iter=30
    ),
    "vecchia": lambda: VecchiaGPRegressor(
        KERNEL, n_neighbors=20, optimizer=None, normalize_y=False, random_state=0
    ),
    "vecchia, inducing": lambda: VecchiaGPRegressor(
        KERNEL, n_neighbors=5, n_inducing=15, optimizer=None, normalize_y=False, random_state=0
    ),
    "vecchia, latent": lambda: VecchiaGPRegressor(
        SIGNAL,
        likelihood=Gaussian(NOISE),
        n_neighbors=20,
        n_inducing=15,
        optimizer=None,
        normalize_y=False,
        random_state=0,
    ),
}
ON, BETWEEN, OFF = np.array([1.0, 1.05]), np.array([4.9, 4.95]), np.array([9.0, 9.05, 9.1, 10.5])


def data(n=80, seed=0):
    """A sine with a gap between 4 and 6; nothing beyond 8."""
    rng = np.random.default_rng(seed)
    x = np.sort(np.concatenate([rng.uniform(0, 4, n - n // 4), rng.uniform(6, 8, n // 4)]))
    return x[:, None], np.sin(x) + NOISE**0.5 * rng.standard_normal(n)


def dense(x, kernel=SIGNAL):
    """Mean and covariance of f under the exact GP."""
    return process(kernel, *data(), NOISE, x[:, None])


def fit(name, kernel=KERNEL):
    make = OTHERS.get(name) or (
        lambda: QSGPRegressor(
            kernel,
            optimizer=None,
            normalize_y=False,
            random_state=0,
            **dict(dict(basis="inducing"), **ROUTES[name]),
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return make().fit(*data())


fitted = cache(fit)  # models that are not to be changed


def latent_covariance(model, x):
    mean, covariance = model._latent_mean_and_covariance(x[:, None])
    np.testing.assert_allclose(
        covariance.diagonal(), model.latent_mean_and_variance(x[:, None])[1], rtol=1e-6, atol=1e-9
    )
    return mean, covariance


def correlations(covariance):
    std = np.sqrt(covariance.diagonal())
    return covariance / std[:, None] / std


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "inducing",
        "dlm, elbo",
        "vecchia",
        "vecchia, inducing",
        "vecchia, latent",
    ],
)
def test_joint_covariance_is_that_of_the_dense_gp(name):
    x = np.concatenate([ON, BETWEEN, OFF])
    mean, covariance = dense(x)
    found_mean, found = latent_covariance(fitted(name), x)
    # 15 or 40 inducing points on an interval of 8 length scales; 40 neighbours of 80.
    np.testing.assert_allclose(found_mean, mean, atol=0.1)
    np.testing.assert_allclose(found, covariance, atol=0.03)


@pytest.mark.parametrize("name", [*ROUTES, *OTHERS])
def test_near_points_off_the_data_are_correlated_as_in_the_prior(name):
    model = fitted(name)
    covariance = latent_covariance(model, OFF)[1]
    expected = correlations(dense(OFF)[1])
    # Of 32 or so draws, a correlation r has a standard error of (1 - r^2) / sqrt(32).
    tolerance = 4 * (1 - expected**2) / 5 + 0.01
    assert (np.abs(correlations(covariance) - expected) < tolerance).all()
    far = latent_covariance(model, OFF + 50)[1] / getattr(model, "calibration_", 1.0)
    exact = name not in ("pathwise", "cg")  # of which the variance has a standard error of 25%
    np.testing.assert_allclose(far.diagonal(), 1.0, atol=1e-3 if exact else 0.8)
    assert (correlations(far)[0, :3] > 0.98).all()


@pytest.mark.parametrize("name", [*ROUTES, *OTHERS])
def test_draws_off_the_data_are_smooth(name):
    """Second differences at a step h of an RBF with unit scale: 3 h^4 in variance, not 6."""
    x, h = np.arange(9.0, 10.0, 0.05)[:, None], 0.05
    model = fitted(name)
    f = model._latent_samples(x, 200, np.random.RandomState(0))
    assert np.diff(f, n=2, axis=0).std() < 3 * 3**0.5 * h**2
    y = model.sample_y(x, 400, random_state=1)
    noise = np.diff(y, n=2, axis=0).std()
    np.testing.assert_allclose(noise, (6 * model.noise_variance_) ** 0.5, rtol=0.1)


def test_draws_of_a_kernel_without_spectral_density_return_to_the_prior():
    signal = 1.0 * RBF(1.0) + 0.1 * DotProduct(1.0)
    model = fit("pathwise", signal + WhiteKernel(NOISE))
    x = np.array([30.0, 30.05, 33.0])
    expected = dense(x, signal)[1]
    found = latent_covariance(model, x)[1]
    np.testing.assert_allclose(found.diagonal() / expected.diagonal(), 1.0, atol=0.8)
    assert correlations(found)[0, 1] > 0.98


def test_covariance_of_a_product_without_spectral_density_returns_to_the_prior():
    """Its draws come from inducing points, which explain nothing far off."""
    signal = RBF(1.0) * DotProduct(1.0)
    model = fit("pathwise", signal + WhiteKernel(NOISE))
    x = np.array([30.0, 30.05, 33.0])
    found = latent_covariance(model, x)[1] / model.calibration_
    np.testing.assert_allclose(found, signal(x[:, None]), rtol=1e-3, atol=0.5)
