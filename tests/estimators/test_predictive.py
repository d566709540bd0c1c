"""The distribution of an observation given that of f, for every likelihood."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF

from skgp import SWSGPRegressor
from skgp.datasets import make_counts
from skgp.estimators import _base
from skgp.estimators._predictive import (
    LikelihoodPredictive,
    by_elements,
    exponential_covariance,
    link_covariance,
)
from skgp.estimators._validation import check_counts
from skgp.likelihoods import Laplace, Poisson, StudentT
from tests.contracts.estimators import rbf_kernel
from tests.same import assert_same

LIKELIHOODS = {
    "gaussian": None,
    "laplace": Laplace(0.4),
    "student": StudentT(0.4, 3.0),
    "exp": Poisson("exp"),
    "softplus": Poisson("softplus"),
}
COUNTS = ("exp", "softplus")


class Predictive(LikelihoodPredictive):
    """The mixin alone."""

    def __init__(self, likelihood, noise_variance=0.3):
        self._likelihood = likelihood
        self._noise_variance = noise_variance


def softplus(f):
    return np.logaddexp(0, f)


@pytest.fixture
def latent():
    """Mean (6,) and covariance (6, 6) of f: every sign of correlation, one pair of equal rows."""
    rng = np.random.default_rng(0)
    A = rng.standard_normal((6, 6)) * [0.3, 0.5, 1.0, 1.0, 1.5, 2.0]
    A[3] = A[2]
    return np.array([-2.0, 0.0, 1.0, 1.0, 2.0, 4.0]), A @ A.T / 4


def dense_covariance(function, mean, covariance):
    """Covariance of function(f), by a sum over a grid in two dimensions for every pair."""
    z = np.linspace(-9, 9, 721)
    weights = stats.norm.pdf(z) * (z[1] - z[0])
    std = np.sqrt(covariance.diagonal())
    expected = [weights @ function(m + s * z) for m, s in zip(mean, std, strict=True)]
    out = np.empty_like(covariance)
    for i, j in np.ndindex(out.shape):
        rho = np.clip(covariance[i, j] / max(std[i] * std[j], 1e-300), -1, 1)
        other = rho * z[:, None] + np.sqrt(1 - rho**2) * z
        first = function(mean[i] + std[i] * z) - expected[i]
        second = function(mean[j] + std[j] * other) - expected[j]
        out[i, j] = (weights * first) @ (second @ weights)
    return out


# ---- the covariance of functions of f --------------------------------------------------------


def test_link_covariance_equals_a_dense_sum(latent):
    mean, covariance = latent
    found = link_covariance(softplus, mean, covariance)
    np.testing.assert_allclose(found, dense_covariance(softplus, mean, covariance), atol=1e-9)
    np.testing.assert_allclose(found, found.T, rtol=1e-13)
    assert np.linalg.eigvalsh(found).min() > -1e-12


@pytest.mark.parametrize(("std", "rtol"), [(0.01, 1e-9), (1.0, 1e-9), (3.0, 2e-8), (10.0, 5e-5)])
@pytest.mark.parametrize("rho", [1.0, 0.7, -0.9])
def test_link_covariance_is_precise_at_every_width(std, rtol, rho):
    mean = np.array([-1.0, 2.0])
    covariance = std**2 * np.array([[1, rho], [rho, 1]])
    expected = dense_covariance(softplus, mean, covariance)
    scale = np.sqrt(np.multiply.outer(*2 * [expected.diagonal()]))
    error = np.abs(link_covariance(softplus, mean, covariance) - expected) / scale
    assert error.max() < rtol


def test_link_covariance_of_known_functions(latent):
    mean, covariance = latent
    linear = link_covariance(lambda f: 3 * f - 1, mean, covariance)
    np.testing.assert_allclose(linear, 9 * covariance, rtol=1e-12, atol=1e-13)
    square = link_covariance(np.square, mean, covariance)
    expected = 2 * covariance**2 + 4 * np.outer(mean, mean) * covariance
    np.testing.assert_allclose(square, expected, rtol=1e-11, atol=1e-11)


def test_link_covariance_without_variance_is_zero():
    covariance = np.diag([0.0, 1.0, 0.0])
    found = link_covariance(softplus, np.array([1e6, 0.0, 2.0]), covariance)
    assert found[1, 1] > 0.1
    found[1, 1] = 0
    np.testing.assert_array_equal(found, 0)


def test_link_covariance_keeps_small_variances_beside_large_means():
    found = link_covariance(softplus, np.array([1e6, 1e6]), np.full((2, 2), 1e-8))
    np.testing.assert_allclose(found, 1e-8, rtol=1e-5)


def test_exponential_covariance_equals_a_dense_sum(latent):
    mean, covariance = latent
    found = exponential_covariance(mean, covariance)
    scale = np.sqrt(found.diagonal())
    expected = dense_covariance(np.exp, mean, covariance)
    np.testing.assert_allclose(
        found / np.outer(scale, scale), expected / np.outer(scale, scale), atol=1e-9
    )
    series = link_covariance(np.exp, mean, 0.01 * covariance)
    np.testing.assert_allclose(exponential_covariance(mean, 0.01 * covariance), series, rtol=1e-10)


def test_exponential_covariance_neither_overflows_nor_is_nan(recwarn):
    covariance = np.array([[1.0, 0.0, 1e-300], [0.0, 1.0, -1e-300], [1e-300, -1e-300, 1.0]])
    found = exponential_covariance(np.array([900.0, -900.0, 400.0]), covariance)
    assert found[0, 1] == found[1, 0] == 0 == found[1, 1] and found[0, 0] > 1e277
    assert found[0, 2] == pytest.approx(np.exp(1301 - 300 * np.log(10)), rel=1e-10)
    assert found[1, 2] == 0 and np.isfinite(found).all()
    assert not recwarn


@pytest.mark.parametrize(
    "route", [exponential_covariance, lambda *f: link_covariance(softplus, *f)]
)
def test_covariances_do_not_depend_on_the_blocks(route, latent, monkeypatch):
    whole = route(*latent)
    monkeypatch.setattr("skgp.estimators.defaults.COVARIANCE_ELEMENTS", 13)
    np.testing.assert_allclose(route(*latent), whole, rtol=1e-12)


# ---- the mixin --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["laplace", "student"])
def test_added_noise_adds_to_the_variance_only(name, latent):
    mean, covariance = latent
    predictive = Predictive(LIKELIHOODS[name])
    noise = {"laplace": 2 * 0.4**2, "student": 3 * 0.4**2}[name]
    assert predictive._additive_variance() == pytest.approx(noise)
    found_mean, found = predictive._predictive_covariance(mean, covariance)
    assert_same(found_mean, mean)
    np.testing.assert_allclose(found, covariance + noise * np.eye(6), rtol=1e-12)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_vary_with_their_rates_and_for_themselves(name, latent):
    mean, covariance = latent
    covariance = 0.2 * covariance
    rate = np.exp if name == "exp" else softplus
    predictive = Predictive(LIKELIHOODS[name])
    found_mean, found = predictive._predictive_covariance(mean, covariance)
    expected_mean, expected_var = predictive._predictive_moments(mean, covariance.diagonal())
    assert_same(found_mean, expected_mean)
    assert_same(found.diagonal(), expected_var)
    of_rates = dense_covariance(rate, mean, covariance)
    np.testing.assert_allclose(found, of_rates + np.diag(expected_mean), rtol=1e-6, atol=1e-9)
    with pytest.raises(AttributeError, match="Predictive has no noise_variance_: .* Poisson "):
        predictive._additive_variance()


def test_by_elements_broadcasts_and_holds_few_at_once(monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.LIKELIHOOD_ELEMENTS", 4)
    sizes = []

    def function(x, y):
        sizes.append(len(x))
        return x + y, x * y

    x, y = np.arange(5.0)[:, None], np.arange(3.0)
    total, product = by_elements(function, x, y)
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_array_equal(product, x * y)
    assert sizes == [4, 4, 4, 3]
    assert_same(by_elements(torch.exp, y), np.exp(y))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_draws_follow_their_random_state_and_leave_the_global_one(name):
    predictive, f = Predictive(LIKELIHOODS[name]), np.linspace(-1, 3, 12).reshape(4, 3)
    before = torch.get_rng_state()
    rng = np.random.RandomState(5)
    first, second = (predictive._sample_observations(f, rng) for _ in range(2))
    again = predictive._sample_observations(f, np.random.RandomState(5))
    assert first.shape == f.shape and first.dtype == np.float64
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


# ---- noise without a variance -----------------------------------------------------------------


@pytest.mark.parametrize("df", [2.0, 1.0, 0.7])
def test_student_noise_of_few_degrees_of_freedom_has_infinite_std(df, recwarn):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (30, 2))
    y = 30 + 4 * np.sin(X[:, 0]) + 0.1 * rng.standard_normal(30)
    options = dict(likelihood="student_t", degrees_of_freedom=df, optimizer=None, random_state=0)
    estimator = SWSGPRegressor(rbf_kernel(), **options).fit(X, y)
    mean, std = estimator.predict(X, return_std=True)
    assert_same(mean, estimator.predict(X))
    assert_same(mean, estimator.latent_mean_and_variance(X)[0])
    assert np.isinf(std).all() and estimator.noise_variance_ == np.inf
    covariance = estimator.predict(X, return_cov=True)[1]
    assert np.isinf(covariance.diagonal()).all() and np.isinf(covariance).sum() == 30
    lower, upper = estimator.predict_interval(X)
    assert (lower < mean).all() and (mean < upper).all() and np.isfinite(upper - lower).all()
    assert np.isfinite(estimator.log_predictive_density(X, y)).all()
    assert not recwarn


# ---- counts ------------------------------------------------------------------------------------


def test_predictions_of_counts_do_not_depend_on_the_chunks(monkeypatch):
    X, y = make_counts(30, random_state=0)
    estimator = SWSGPRegressor(RBF(0.5), likelihood="poisson", optimizer=None).fit(X, y)
    whole = estimator.predict(X)
    monkeypatch.setattr(_base, "PREDICTION_MEMORY", 7 * estimator._bytes_per_row())
    monkeypatch.setattr("skgp.estimators.defaults.LIKELIHOOD_ELEMENTS", 4)
    np.testing.assert_allclose(estimator.predict(X), whole, rtol=1e-12)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.nan, "got nan in row 2 .* Drop or impute"),
        (np.inf, "got inf in row 2 .* Drop or impute"),
        (-1.0, r"got -1.0 in row 2 \(2 of 5 rows hold no count\). Correct or drop"),
        (0.5, "got 0.5 in row 2 .* Round them"),
    ],
)
def test_check_counts_names_the_first_bad_value_and_the_remedy(bad, message):
    y = np.array([0.0, 1.0, bad, 4.0, -7.0])
    with pytest.raises(ValueError, match="counts must hold counts, whole numbers .*" + message):
        check_counts(y, "counts")
