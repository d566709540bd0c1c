"""What every regressor obeys. A test module inherits it::

class TestMyRegressor(RegressorContract):
    def make(self, **params):
        return MyRegressor(**{"max_iter": 5, "random_state": 0, **params})

test_sklearn = sklearn_checks(MyRegressor(max_iter=5, random_state=0))

Other likelihoods and solvers of an estimator class inherit `RegressorPredictions`, or
`CountRegressorPredictions`, which leave out what is of the class; for the checks of scikit-learn,
whose targets are fractions, give it a subclass that rounds them::

class RoundedRegressor(RoundTargets, MyRegressor):
    pass
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

from skgp.datasets import make_counts
from skgp.estimators import log_predictive_density_scorer
from tests.contracts.common import EstimatorPredictions, InputContract, Recorder, sklearn_checks
from tests.same import assert_same

__all__ = [
    "CountRegressorPredictions",
    "Recorder",
    "RegressorContract",
    "RegressorPredictions",
    "RoundTargets",
    "rbf_kernel",
    "sklearn_checks",
]


def rbf_kernel(n_columns=2):
    """Return a kernel with fixed noise that suits `RegressorContract.data`."""
    return ConstantKernel(1.0) * RBF([1.5] * n_columns) + WhiteKernel(0.05)


class PredictiveContract(EstimatorPredictions):
    """What regressors obey whatever their likelihood."""

    #: Least R^2 of the defaults on 200 rows of easy data, inputs of any scale.
    easy_r2 = 0.9
    #: Whether the variance has no variance of its own by which draws could be judged.
    heavy_tailed = False

    scoring = "r2"
    least_score = 0.5

    def outputs(self, estimator, X):
        return np.column_stack(estimator.predict(X, return_std=True))

    def methods(self, X, y):
        return {
            "predict": (X, False, True),
            "latent_mean_and_variance": (X,),
            "predict_quantiles": (X, 0.5),
            "predict_interval": (X,),
            "sample_y": (X, 2),
            "sample_f": (X, 2),
            "latent_mean_and_covariance": (X,),
            "log_predictive_density": (X, y),
            "score": (X, y),
        }

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

    def test_sample_y_has_the_predicted_moments(self, fitted, X_new):
        n_samples = 4000
        mean, cov = fitted.predict(X_new, return_cov=True)
        draws = fitted.sample_y(X_new, n_samples, random_state=3)
        assert draws.shape == (7, n_samples) and draws.dtype == np.float64
        residual = draws - mean[:, None]
        assert np.abs(z_scores(residual, 0)).max() < 4
        z_cov = z_scores(residual[:, None] * residual, cov)
        if self.heavy_tailed:
            np.fill_diagonal(z_cov, 0)
        assert np.abs(z_cov).max() < 4

    def test_sample_y_depends_on_its_random_state_only(self, fitted, X_new):
        default = fitted.sample_y(X_new)
        assert default.shape == (7, 1)
        assert_same(default, fitted.sample_y(X_new, 1, random_state=0))
        assert not np.allclose(default, fitted.sample_y(X_new, 1, random_state=1))

    # ---- the latent function, and gradients in X ---------------------------------------------

    def test_joint_covariance_of_f_has_its_variances(self, fitted, X_new):
        mean, covariance = fitted.latent_mean_and_covariance(X_new)
        expected, var = fitted.latent_mean_and_variance(X_new)
        np.testing.assert_allclose(mean, expected, rtol=1e-10)
        np.testing.assert_allclose(covariance.diagonal(), var, rtol=1e-7)
        np.testing.assert_allclose(covariance, covariance.T, rtol=1e-10, atol=1e-12)

    def test_sample_f_has_the_moments_of_f(self, fitted, X_new):
        mean, covariance = fitted.latent_mean_and_covariance(X_new)
        draws = fitted.sample_f(X_new, 4000, random_state=5)
        assert draws.shape == (7, 4000) and draws.dtype == np.float64
        residual = draws - mean[:, None]
        assert np.abs(z_scores(residual, 0)).max() < 4
        assert np.abs(z_scores(residual[:, None] * residual, covariance)).max() < 4
        assert_same(fitted.sample_f(X_new, 2), fitted.sample_f(X_new, 2, random_state=0))

    def test_gradients_are_those_of_finite_differences(self, fitted, X_new):
        found = fitted.predict(X_new, True, return_mean_grad=True, return_std_grad=True)
        slopes, step = np.empty((2, 7, 2)), 1e-4
        for column, move in enumerate(step * np.eye(2)):
            ends = (fitted.predict(X_new + sign * move, True) for sign in (1, -1))
            slopes[:, :, column] = np.subtract(*ends) / (2 * step)
        for gradient, slope in zip(found[2:], slopes, strict=True):
            np.testing.assert_allclose(gradient, slope, atol=1e-5 * np.abs(slope).max())
        for value, expected in zip(found, fitted.predict(X_new, True), strict=False):
            np.testing.assert_allclose(value, expected, rtol=1e-8)

    def test_gradients_come_as_asked_for(self, fitted, X_new):
        asked = dict(return_std=True, return_mean_grad=True, return_std_grad=True)
        mean, std, d_mean, d_std = fitted.predict(X_new, **asked)
        for found, expected in (
            (fitted.predict(X_new, return_mean_grad=True), (mean, d_mean)),
            (fitted.predict(X_new, True, return_std_grad=True), (mean, std, d_std)),
            (fitted.predict(X_new[:1], **asked), (mean[:1], std[:1], d_mean[:1], d_std[:1])),
        ):
            for value, same in zip(found, expected, strict=True):
                assert_same(value, same)
        with pytest.raises(ValueError, match="return_std_grad=True needs return_std=True"):
            fitted.predict(X_new, return_std_grad=True)
        with pytest.raises(ValueError, match="not with return_cov=True"):
            fitted.predict(X_new, return_cov=True, return_mean_grad=True)

    def test_gradients_far_from_the_data_are_finite(self, fitted):
        X = [[1e4, -1e3], [1e30, 0.0], [-1e120, 1e120]]
        asked = dict(return_std=True, return_mean_grad=True, return_std_grad=True)
        for values in fitted.predict(X, **asked):
            assert np.isfinite(values).all()

    # ---- bad and awkward input -----------------------------------------------------------

    def test_one_row_is_accepted(self, X_new):
        estimator = self.make().fit([[1.0, 2.0]], [3.0])
        mean, std = estimator.predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all()


class RegressorInputContract(InputContract):
    """What regressors refuse, and what is around them."""

    def test_predict_refuses_std_and_cov_together(self, fitted, X_new):
        with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
            fitted.predict(X_new, return_std=True, return_cov=True)

    @pytest.mark.parametrize("quantiles", [0.0, 1.0, [0.5, 1.2], [], [[0.5]], np.nan])
    def test_quantiles_refuse_bad_probabilities(self, fitted, X_new, quantiles):
        with pytest.raises(ValueError, match="quantiles must be"):
            fitted.predict_quantiles(X_new, quantiles)

    @pytest.mark.parametrize("coverage", [0, 1, 95, -0.1])
    def test_interval_refuses_bad_coverage(self, fitted, X_new, coverage):
        with pytest.raises(ValueError, match="coverage must lie"):
            fitted.predict_interval(X_new, coverage=coverage)

    def test_score_is_weighted_r2(self, fitted, data):
        X, y = data
        weights = np.arange(len(y), dtype=float)
        expected = r2_score(y, fitted.predict(X), sample_weight=weights)
        assert fitted.score(X, y, sample_weight=weights) == pytest.approx(expected)

    def test_pipeline_passes_std_through(self, data):
        X, y = data
        pipeline = make_pipeline(StandardScaler(), self.make()).fit(X, y)
        mean, std = pipeline.predict(X, return_std=True)
        assert mean.shape == std.shape == y.shape
        assert pipeline.score(X, y) > self.least_score

    def test_several_targets_are_taken_or_refused_with_a_remedy(self, data):
        X, y = data
        if self.make().__sklearn_tags__().target_tags.multi_output:
            return  # tests/estimators/test_targets.py
        with pytest.raises(ValueError, match="should be a 1d array.*takes one target.*MultiOutput"):
            self.make().fit(X, np.column_stack([y, y]))


class RegressorPredictions(PredictiveContract):
    """What a regressor predicts; a subclass gives `make` and may lower a threshold."""

    #: Whether the predictive distribution is Gaussian.
    gaussian = True

    scalar_kernel = 1.0 * RBF(1.0) + WhiteKernel(0.05)
    length_scale = "kernel__k1__k2__length_scale"

    def kernel(self, n_columns=2):
        return rbf_kernel(n_columns)

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls):
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, (40, 2))
        y = 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40))
        return X, y

    # ---- the predictive interface ------------------------------------------------------------

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

    def test_quantiles_hold_the_mass_of_the_density(self, fitted, X_new):
        levels = np.array([0.001, 0.02, 0.2, 0.5, 0.8, 0.98, 0.999])
        nodes, weights = np.polynomial.legendre.leggauss(40)
        for x in X_new[:2]:
            edges = fitted.predict_quantiles(x[None], levels)[0]
            half = np.diff(edges)[:, None] / 2
            y = (edges[:-1, None] + half * (1 + nodes)).ravel()
            density = np.exp(fitted.log_predictive_density(np.tile(x, (len(y), 1)), y))
            mass = (half * weights * density.reshape(len(half), -1)).sum(1)
            np.testing.assert_allclose(mass, np.diff(levels), atol=1e-6)

    def test_draws_fall_below_the_quantiles_as_often_as_they_say(self, fitted, X_new):
        levels, n_samples = np.array([0.05, 0.5, 0.95]), 4000
        draws = fitted.sample_y(X_new, n_samples, random_state=4)
        below = draws[:, None] <= fitted.predict_quantiles(X_new, levels)[..., None]
        z = (below.mean(2) - levels) / np.sqrt(levels * (1 - levels) / n_samples)
        assert np.abs(z).max() < 4

    def test_log_predictive_density_is_that_of_y_in_its_units(self, fitted, data):
        if not self.gaussian:
            pytest.skip("the predictive distribution is not Gaussian")
        X, y = data
        expected = stats.norm.logpdf(y, *fitted.predict(X, return_std=True))
        np.testing.assert_allclose(fitted.log_predictive_density(X, y), expected, rtol=1e-10)
        assert log_predictive_density_scorer(fitted, X, y) == pytest.approx(expected.mean())

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

    # ---- bad and awkward input -----------------------------------------------------------

    def test_inputs_of_any_scale_and_offset(self):
        X, y = make_friedman1(200, n_features=5, noise=0.1, random_state=0)
        X = X * [1e-3, 1e6, 1.0, 10.0, 1e-3] + 1e4 * np.array([0, 1e6, 1.0, 1.0, 0])
        estimator = self.make().fit(X[:70], y[:70])
        assert estimator.score(X[70:], y[70:]) > self.easy_r2

    @pytest.mark.parametrize("value", [0.1, -1e6])
    def test_constant_y_is_predicted(self, data, X_new, value):
        X, _ = data
        mean, std = self.make().fit(X, np.full(40, value)).predict(X_new, return_std=True)
        np.testing.assert_allclose(mean, value, rtol=1e-8, atol=1e-8)
        assert np.isfinite(std).all()


class RegressorContract(RegressorInputContract, RegressorPredictions):
    """The whole contract of a regressor."""


class CountRegressorPredictions(PredictiveContract):
    """What a regressor of counts predicts; a subclass gives `make` and ``link``.

    `make` returns an estimator that takes counts, whose rate is a link of f: the exponential or the
    softplus.
    """

    #: Of the rate to f: "exp" or "softplus".
    link = "exp"

    scalar_kernel = 1.0 * RBF(1.0)
    length_scale = "kernel__k2__length_scale"

    def kernel(self, n_columns=2):
        return ConstantKernel(1.0) * RBF([1.0] * n_columns)

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls):
        return make_counts(40, 2, mean=20.0, dispersion=50.0, length_scale=1.0, random_state=7)

    @pytest.fixture(scope="class")
    @classmethod
    def X_new(cls):
        return np.random.default_rng(1).uniform(-1.5, 1.5, (7, 2))

    def rate(self, f):
        return np.exp(f) if self.link == "exp" else np.logaddexp(0, f)

    def probabilities(self, estimator, x):
        """Return the probabilities of 0, 1, ... up to where those left are below 1e-9 or so."""
        n_counts = 2 * int(estimator.predict_quantiles(x[None], 1 - 1e-9)[0]) + 100
        rows = np.tile(x, (n_counts, 1))
        return np.exp(estimator.log_predictive_density(rows, np.arange(n_counts)))

    # ---- the predictive distribution ---------------------------------------------------------

    def test_predictions_average_over_the_latent_function(self, fitted, X_new):
        mean, std = fitted.predict(X_new, return_std=True)
        z = np.linspace(-10, 10, 2001)
        density = stats.norm.pdf(z) * (z[1] - z[0])
        latent_mean, latent_var = fitted.latent_mean_and_variance(X_new)
        rate = self.rate(latent_mean[:, None] + np.sqrt(latent_var)[:, None] * z)
        np.testing.assert_allclose(mean, rate @ density, rtol=1e-6)
        var = ((rate - mean[:, None]) ** 2 + rate) @ density
        np.testing.assert_allclose(std, np.sqrt(var), rtol=1e-6)
        assert (latent_var > 0).all()

    def test_probabilities_sum_to_one_and_have_the_predicted_moments(self, fitted, X_new):
        mean, std = fitted.predict(X_new, return_std=True)
        for row, x in enumerate(X_new[:3]):
            probabilities = self.probabilities(fitted, x)
            counts = np.arange(len(probabilities))
            assert probabilities.sum() == pytest.approx(1, abs=1e-7)
            assert probabilities @ counts == pytest.approx(mean[row], rel=1e-5)
            second = probabilities @ (counts - mean[row]) ** 2
            assert second == pytest.approx(std[row] ** 2, rel=1e-3)

    def test_quantiles_are_the_least_counts_of_enough_probability(self, fitted, X_new):
        levels = np.array([1e-4, 0.1, 0.5, 0.9, 0.999])
        quantiles = fitted.predict_quantiles(X_new, levels)
        assert quantiles.dtype == np.float64
        np.testing.assert_array_equal(quantiles, np.rint(quantiles))
        assert_same(fitted.predict_quantiles(X_new, 0.9), quantiles[:, 3])
        for row, x in enumerate(X_new[:3]):
            below = np.append(self.probabilities(fitted, x).cumsum(), 0.0)  # the last is P(y < 0)
            at = quantiles[row].astype(int)
            assert (below[at] >= levels - 1e-7).all()
            assert (below[at - 1] < levels + 1e-7).all()

    def test_interval_holds_at_least_its_coverage(self, fitted, X_new):
        for coverage in (0.5, 0.95):
            lower, upper = fitted.predict_interval(X_new, coverage=coverage)
            for row, x in enumerate(X_new[:3]):
                inside = slice(int(lower[row]), int(upper[row]) + 1)
                assert self.probabilities(fitted, x)[inside].sum() >= coverage - 1e-7
            assert (lower <= upper).all()

    def test_sample_y_draws_counts_as_often_as_predicted(self, fitted, X_new):
        n_samples = 4000
        draws = fitted.sample_y(X_new, n_samples, random_state=4)
        assert (draws >= 0).all() and (draws == np.rint(draws)).all()
        for row, x in enumerate(X_new[:3]):
            below = self.probabilities(fitted, x).cumsum()
            ends = fitted.predict_quantiles(x[None], [0.05, 0.3, 0.7, 0.95])[0].astype(int)
            p = below[ends]
            share = (draws[row] <= ends[:, None]).mean(1)
            assert np.abs((share - p) / np.sqrt(p * (1 - p) / n_samples)).max() < 4

    def test_score_by_log_probability_is_their_mean(self, fitted, data):
        density = fitted.log_predictive_density(*data)
        assert density.shape == data[1].shape and (density < 0).all()
        assert log_predictive_density_scorer(fitted, *data) == pytest.approx(density.mean())

    def test_counts_have_no_units(self, fitted, data, X_new):
        X, y = data
        assert (fitted.y_mean_, fitted.y_scale_) == (0, 1)
        assert not hasattr(fitted, "noise_variance_")
        raw = clone(fitted).set_params(normalize_y=False).fit(X, y)
        assert_same(self.outputs(raw, X_new), self.outputs(fitted, X_new))

    # ---- bad and awkward input ---------------------------------------------------------------

    @pytest.mark.parametrize("value", [0, 3, 10_000])
    def test_constant_counts_are_predicted(self, data, value):
        X, _ = data
        mean, std = self.make().fit(X, np.full(40, value)).predict(X, return_std=True)
        np.testing.assert_allclose(mean, value, rtol=0.3, atol=0.7)
        assert np.isfinite(std).all() and (std > 0).all()

    def test_whole_numbers_of_any_type_give_the_same_fit(self, fitted, data, X_new):
        X, y = data
        expected = self.outputs(fitted, X_new)
        for dtype in (np.uint8, np.float32):
            other = clone(fitted).fit(X, y.astype(dtype))
            assert_same(self.outputs(other, X_new), expected)

    @pytest.mark.parametrize("value", [-1, 2.5])
    def test_what_is_no_count_is_refused(self, fitted, data, X_new, value):
        X, y = data
        y = y.astype(float)
        y[3] = value
        message = f"y must hold counts, .*got {float(value)} in row 3 "
        with pytest.raises(ValueError, match=message):
            clone(fitted).fit(X, y)
        with pytest.raises(ValueError, match=message):
            clone(fitted).fit(X, y, sample_weight=(np.arange(40) > 0).astype(float))
        with pytest.raises(ValueError, match=message):
            fitted.log_predictive_density(X, y)

    def test_white_kernel_is_refused(self, data):
        with pytest.raises(ValueError, match="WhiteKernel, which is the noise of a Gaussian"):
            self.make(kernel=self.kernel() + WhiteKernel(0.1)).fit(*data)


class RoundTargets:
    """Makes counts of the targets that the checks of scikit-learn draw."""

    def _checked_target(self, y):
        assert self._counts
        return self.counts(y)

    def score(self, X, y, sample_weight=None):
        return super().score(X, self.counts(y), sample_weight)

    def counts(self, y):
        """Return counts that increase with real numbers of any size."""
        return np.maximum(np.rint(20 + 5 * np.arcsinh(y)), 0)


def z_scores(samples, expected):
    """Return how many standard errors the means over the last axis are from what is expected."""
    error = samples.std(-1) / np.sqrt(samples.shape[-1])
    return (samples.mean(-1) - expected) / error
