"""QSGPRegressor with Laplace noise: the contracts, its predictive distribution, outliers."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.linalg import NumericalWarning
from tests.contracts.estimators import RegressorPredictions, rbf_kernel


def make(**params):
    """An estimator with hyper-parameters kept."""
    defaults = dict(likelihood="laplace", kernel=rbf_kernel(), optimizer=None, random_state=0)
    return QSGPRegressor(**{**defaults, **params})


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    return X, 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.laplace(size=60))


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-3, 3, (7, 2))


class TestContract(RegressorPredictions):
    gaussian = False
    offers_state = False  # a posterior exists only when the passes have ended

    def make(self, **params):
        return QSGPRegressor(**{"likelihood": "laplace", "random_state": 0, **params})


# ---- the predictive distribution ---------------------------------------------------------------


def test_noise_variance_is_twice_the_square_of_the_scale(data):
    fit = make(kernel=None, optimizer="auto").fit(*data)
    assert fit.noise_variance_ == pytest.approx(2 * fit.likelihood_scale_**2, rel=1e-12)
    level = fit.kernel_.k2.noise_level * fit.y_scale_**2
    assert level == pytest.approx(fit.noise_variance_, rel=1e-12)
    assert fit.likelihood_scale_ == pytest.approx(0.8, rel=0.35)
    assert np.isfinite(fit.elbo_) and not hasattr(fit, "log_marginal_likelihood_value_")


@pytest.mark.parametrize("bounds", ["fixed", (1e-5, 10.0)])
def test_scale_is_kept_where_the_noise_is(bounds, data):
    kernel = RBF(1.5) + WhiteKernel(0.08, bounds)
    fit = make(kernel=kernel, optimizer="auto").fit(*data)
    kept = fit.likelihood_scale_ == pytest.approx(0.2 * fit.y_scale_, rel=1e-12)
    assert kept == (bounds == "fixed")
    assert make(kernel=kernel).fit(*data).kernel_ == kernel


def test_samples_have_the_tails_of_laplace_noise(data, X_new):
    fit = make(kernel=RBF(1.5) + WhiteKernel(1.0)).fit(*data)
    draws = fit.sample_y(X_new, 20_000, random_state=0)
    quantiles = fit.predict_quantiles(X_new, [0.01, 0.99])
    share = ((draws < quantiles[:, :1]) | (draws > quantiles[:, 1:])).mean(1)
    z = (share - 0.02) / np.sqrt(0.02 * 0.98 / 20_000)
    assert np.abs(z).max() < 4
    # Two rows nearly at one place share f, and not the noise.
    pair = fit.sample_y(X_new[:1] + [[0.0, 0.0], [1e-6, 0.0]], 20_000, random_state=1)
    z = (np.var(pair[0] - pair[1]) / (2 * fit.noise_variance_) - 1) / np.sqrt(3.5 / 20_000)
    assert abs(z) < 4


# ---- outliers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"n_basis": 30}, {"basis": "fourier", "n_basis": 60}])
def test_outliers_leave_the_fit_alone(options):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (150, 1))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(150)
    wrong = np.where(rng.permutation(150) < 9, rng.choice([-1, 1], 150) * 20.0, 0.0)
    grid = np.linspace(-2.8, 2.8, 100)[:, None]
    truth = np.sin(2 * grid[:, 0])

    def fit(likelihood, targets):
        kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
        model = QSGPRegressor(kernel, likelihood=likelihood, random_state=0, **options)
        return model.fit(X, targets)

    def error(model):
        return np.sqrt(np.mean((model.predict(grid) - truth) ** 2))

    robust, plain = fit("laplace", y + wrong), fit("gaussian", y + wrong)
    assert error(robust) < 0.1 < 5 * error(robust) < error(plain)
    scores = [m.log_predictive_density(grid, truth).mean() for m in (robust, plain)]
    assert scores[0] > scores[1] + 1


def test_outliers_pull_no_harder_from_further_away():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (80, 1))
    y, wrong = np.sin(2 * X[:, 0]), 20.0 * (np.arange(80) < 4)
    near, far = (
        make(kernel=RBF() + WhiteKernel(0.05)).fit(X, y + k * wrong).predict(X) for k in (1, 1000)
    )
    np.testing.assert_allclose(far, near, atol=1e-3)
    assert np.abs(near - y).max() < 0.3


def test_standardisation_ignores_outliers_and_counts_weights():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-2, 2, (60, 1)), 5 + 2 * rng.standard_normal(60)
    y[:3] = 1e4
    fit = make(kernel=RBF() + WhiteKernel(0.1)).fit(X, y)
    assert fit.y_mean_ == pytest.approx(y[3:].mean()) and fit.y_scale_ == pytest.approx(y[3:].std())
    weights = np.arange(60) % 3 + 1
    weighted = make(kernel=RBF() + WhiteKernel(0.1)).fit(X, y, weights)
    kept = np.repeat(y[3:], weights[3:])
    assert weighted.y_mean_ == pytest.approx(kept.mean())
    assert weighted.y_scale_ == pytest.approx(kept.std())


# ---- bases --------------------------------------------------------------------------------------


def test_augmentation_returns_the_variance_to_the_prior(data):
    far = np.full((1, 2), 100.0)
    for augment in (True, False):
        fit = make(n_basis=10, augment=augment).fit(*data)
        variance = fit.latent_mean_and_variance(far)[1] / fit.y_scale_**2
        assert variance[0] == pytest.approx(1.0 if augment else 0.0, abs=1e-6)


def test_passes_that_run_out_warn(data):
    with pytest.warns(NumericalWarning, match="max_iter=1 passes .* Raise max_iter or tol"):
        assert make(max_iter=1).fit(*data).n_iter_ == 1


def test_partial_fit_needs_gaussian_noise(data):
    assert hasattr(make(likelihood="gaussian"), "partial_fit")
    with pytest.raises(AttributeError) as caught:
        make().partial_fit(*data)
    assert "needs likelihood='gaussian'" in str(caught.value.__cause__)
