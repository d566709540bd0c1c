"""What every regressor obeys. A test module inherits it::

class TestMyRegressor(RegressorContract):
    def make(self, **params):
        return MyRegressor(**{"max_iter": 5, "random_state": 0, **params})

test_sklearn = sklearn_checks(MyRegressor(max_iter=5, random_state=0))
"""

import numpy as np
import pytest
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import make_friedman1
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp.estimators import log_predictive_density_scorer
from tests.contracts.common import EstimatorContract, Recorder, sklearn_checks

__all__ = ["Recorder", "RegressorContract", "rbf_kernel", "sklearn_checks"]


def rbf_kernel(n_columns=2):
    """Return a kernel with fixed noise that suits `RegressorContract.data`."""
    return ConstantKernel(1.0) * RBF([1.5] * n_columns) + WhiteKernel(0.05)


class RegressorContract(EstimatorContract):
    """The contract of a regressor; a subclass gives `make` and may lower a threshold."""

    #: Least R^2 of the defaults on 200 rows of easy data, inputs of any scale.
    easy_r2 = 0.9
    #: Whether the predictive distribution is Gaussian.
    gaussian = True

    scoring = "r2"
    least_score = 0.5
    scalar_kernel = 1.0 * RBF(1.0) + WhiteKernel(0.05)
    length_scale = "kernel__k1__k2__length_scale"

    def kernel(self, n_columns=2):
        return rbf_kernel(n_columns)

    def outputs(self, estimator, X):
        return np.column_stack(estimator.predict(X, return_std=True))

    def methods(self, X, y):
        return {
            "predict": (X, False, True),
            "latent_mean_and_variance": (X,),
            "predict_quantiles": (X, 0.5),
            "predict_interval": (X,),
            "sample_y": (X, 2),
            "log_predictive_density": (X, y),
            "score": (X, y),
        }

    @pytest.fixture
    def data(self):
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, (40, 2))
        y = 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40))
        return X, y

    # ---- the predictive interface ------------------------------------------------------------

    def test_predict_mean_does_not_depend_on_what_is_returned(self, fitted, X_new):
        mean = fitted.predict(X_new)
        assert mean.shape == (7,) and mean.dtype == np.float64
        np.testing.assert_allclose(fitted.predict(X_new, return_std=True)[0], mean, rtol=1e-10)
        np.testing.assert_allclose(fitted.predict(X_new, return_cov=True)[0], mean, rtol=1e-10)

    def test_predict_std_is_the_diagonal_of_cov(self, fitted, X_new):
        std = fitted.predict(X_new, return_std=True)[1]
        cov = fitted.predict(X_new, return_cov=True)[1]
        assert cov.shape == (7, 7)
        np.testing.assert_allclose(np.diag(cov), std**2, rtol=1e-8)
        np.testing.assert_allclose(cov, cov.T, rtol=1e-10, atol=1e-12)
        assert np.linalg.eigvalsh(cov).min() > 0

    def test_predict_refuses_std_and_cov_together(self, fitted, X_new):
        with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
            fitted.predict(X_new, return_std=True, return_cov=True)

    def test_predict_describes_latent_plus_noise(self, fitted, X_new):
        mean, std = fitted.predict(X_new, return_std=True)
        latent_mean, latent_var = fitted.latent_mean_and_variance(X_new)
        np.testing.assert_allclose(latent_mean, mean, rtol=1e-10)
        np.testing.assert_allclose(std**2, latent_var + fitted.noise_variance_, rtol=1e-10)
        assert fitted.noise_variance_ > 0 and (latent_var >= 0).all()

    def test_quantiles_and_interval_match_the_gaussian(self, fitted, X_new):
        if not self.gaussian:
            pytest.skip("the predictive distribution is not Gaussian")
        normal = stats.norm(*fitted.predict(X_new, return_std=True))
        quantiles = fitted.predict_quantiles(X_new, [0.1, 0.5, 0.9])
        expected = np.column_stack([normal.ppf(q) for q in (0.1, 0.5, 0.9)])
        np.testing.assert_allclose(quantiles, expected, rtol=1e-10)
        np.testing.assert_allclose(fitted.predict_quantiles(X_new, 0.1), expected[:, 0], rtol=1e-10)
        interval = fitted.predict_interval(X_new, coverage=0.8)
        np.testing.assert_allclose(interval, expected[:, [0, 2]].T, rtol=1e-10)

    def test_interval_and_quantiles_are_ordered_and_wider_with_coverage(self, fitted, X_new):
        lower, upper = fitted.predict_interval(X_new)
        inner_lower, inner_upper = fitted.predict_interval(X_new, coverage=0.5)
        assert (lower < inner_lower).all()
        assert (inner_lower < inner_upper).all()
        assert (inner_upper < upper).all()

    @pytest.mark.parametrize("quantiles", [0.0, 1.0, [0.5, 1.2], [], [[0.5]], np.nan])
    def test_quantiles_refuse_bad_probabilities(self, fitted, X_new, quantiles):
        with pytest.raises(ValueError, match="quantiles must be"):
            fitted.predict_quantiles(X_new, quantiles)

    @pytest.mark.parametrize("coverage", [0, 1, 95, -0.1])
    def test_interval_refuses_bad_coverage(self, fitted, X_new, coverage):
        with pytest.raises(ValueError, match="coverage must lie"):
            fitted.predict_interval(X_new, coverage=coverage)

    def test_log_predictive_density_is_that_of_y_in_its_units(self, fitted, data):
        if not self.gaussian:
            pytest.skip("the predictive distribution is not Gaussian")
        X, y = data
        expected = stats.norm.logpdf(y, *fitted.predict(X, return_std=True))
        np.testing.assert_allclose(fitted.log_predictive_density(X, y), expected, rtol=1e-10)
        assert log_predictive_density_scorer(fitted, X, y) == pytest.approx(expected.mean())

    def test_sample_y_has_the_predicted_moments(self, fitted, X_new):
        n_samples = 4000
        mean, cov = fitted.predict(X_new, return_cov=True)
        draws = fitted.sample_y(X_new, n_samples, random_state=3)
        assert draws.shape == (7, n_samples)
        var = np.diag(cov)
        z_mean = (draws.mean(1) - mean) / np.sqrt(var / n_samples)
        assert np.abs(z_mean).max() < 4
        # Variance of an empirical covariance of Gaussian draws: (C_ii C_jj + C_ij^2) / n.
        z_cov = (np.cov(draws) - cov) / np.sqrt((np.outer(var, var) + cov**2) / n_samples)
        assert np.abs(z_cov).max() < 4

    def test_sample_y_depends_on_its_random_state_only(self, fitted, X_new):
        default = fitted.sample_y(X_new)
        assert default.shape == (7, 1)
        np.testing.assert_array_equal(default, fitted.sample_y(X_new, 1, random_state=0))
        assert not np.allclose(default, fitted.sample_y(X_new, 1, random_state=1))

    def test_score_is_weighted_r2(self, fitted, data):
        X, y = data
        weights = np.arange(len(y), dtype=float)
        expected = r2_score(y, fitted.predict(X), sample_weight=weights)
        assert fitted.score(X, y, sample_weight=weights) == pytest.approx(expected)

    def test_predictions_are_equivariant_to_the_units_of_y(self, fitted, data, X_new):
        X, y = data
        other = clone(fitted).fit(X, 1e5 - 0.01 * y)
        mean, std = fitted.predict(X_new, return_std=True)
        other_mean, other_std = other.predict(X_new, return_std=True)
        np.testing.assert_allclose((1e5 - other_mean) / 0.01, mean, rtol=1e-6)
        np.testing.assert_allclose(other_std / 0.01, std, rtol=1e-6)
        density = fitted.log_predictive_density(X, y) - np.log(0.01)
        np.testing.assert_allclose(
            other.log_predictive_density(X, 1e5 - 0.01 * y), density, atol=1e-5
        )

    def test_normalize_y_false_keeps_the_kernel_in_units_of_y(self, data, X_new):
        X, y = data
        raw = self.make(kernel=rbf_kernel(), optimizer=None, normalize_y=False).fit(X, y - 30)
        assert raw.y_mean_ == 0 and raw.y_scale_ == 1
        mean, std = raw.predict(X_new + 1e3, return_std=True)
        np.testing.assert_allclose(mean, 0, atol=1e-3)
        assert np.isfinite(std).all()

    # ---- scikit-learn around it ----------------------------------------------------------

    def test_pipeline_passes_std_through(self, data):
        X, y = data
        pipeline = make_pipeline(StandardScaler(), self.make()).fit(X, y)
        mean, std = pipeline.predict(X, return_std=True)
        assert mean.shape == std.shape == y.shape
        assert pipeline.score(X, y) > 0.5

    # ---- bad and awkward input -----------------------------------------------------------

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_fit_refuses_targets_that_are_not_finite(self, data, value):
        X, y = data[0], data[1].copy()
        y[3] = value
        with pytest.raises(ValueError, match="y contains (NaN|infinity)"):
            self.make().fit(X, y)

    def test_inputs_of_any_scale_and_offset(self):
        X, y = make_friedman1(260, n_features=5, noise=0.1, random_state=0)
        X = X * [1e-3, 1e6, 1.0, 10.0, 1e-3] + 1e4 * np.array([0, 1e6, 1.0, 1.0, 0])
        estimator = self.make().fit(X[:200], y[:200])
        assert estimator.score(X[200:], y[200:]) > self.easy_r2

    @pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
    def test_constant_y_is_predicted(self, data, X_new, value):
        X, _ = data
        mean, std = self.make().fit(X, np.full(40, value)).predict(X_new, return_std=True)
        np.testing.assert_allclose(mean, value, rtol=1e-8, atol=1e-8)
        assert np.isfinite(std).all()

    def test_one_row_is_accepted(self, X_new):
        estimator = self.make().fit([[1.0, 2.0]], [3.0])
        mean, std = estimator.predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all()
