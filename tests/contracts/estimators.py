"""What every estimator obeys. A test module inherits it::

class TestMyRegressor(RegressorContract):
    def make(self, **params):
        return MyRegressor(**{"max_iter": 5, "random_state": 0, **params})

test_sklearn = sklearn_checks(MyRegressor(max_iter=5, random_state=0))
"""

import itertools
import pickle
import signal
import threading
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.callback import ProgressBar, ScoringMonitor
from sklearn.datasets import make_friedman1
from sklearn.exceptions import ConvergenceWarning, DataConversionWarning, NotFittedError
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    PairwiseKernel,
    WhiteKernel,
)
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import (
    check_dataframe_column_names_consistency,
    check_param_validation,
    parametrize_with_checks,
)

from skgp.estimators import log_predictive_density_scorer


def sklearn_checks(*estimators, expected_failed_checks=None):
    """Return a test function that runs every check of scikit-learn on each estimator."""

    @parametrize_with_checks(
        list(estimators),
        expected_failed_checks=lambda estimator: expected_failed_checks or {},
        xfail_strict=True,
    )
    def test_sklearn_check(estimator, check):
        check(estimator)

    return test_sklearn_check


class Recorder:
    """A callback of ``sklearn.callback`` that records its calls and may stop a stage."""

    def __init__(self, stop_after=None, on_iteration=None):
        self.stop_after = stop_after
        self.on_iteration = on_iteration
        self.begun = []
        self.ended = []

    def setup(self, estimator, context):
        self.begun.clear()
        self.ended.clear()

    def teardown(self, estimator, context):
        pass

    def on_fit_task_begin(self, estimator, context):
        self.begun.append(context.task_name)

    def on_fit_task_end(self, estimator, context):
        self.ended.append(context.task_name)
        if context.task_name != "iteration":
            return False
        if self.on_iteration is not None:
            self.on_iteration()
        return self.stop_after is not None and context.task_id + 1 >= self.stop_after


def rbf_kernel(n_columns=2):
    """Return a kernel with fixed noise that suits `RegressorContract.data`."""
    return ConstantKernel(1.0) * RBF([1.5] * n_columns) + WhiteKernel(0.05)


class RegressorContract:
    """The contract of a regressor; a subclass gives `make` and may lower a threshold."""

    #: Least R^2 of the defaults on 200 rows of easy data, inputs of any scale.
    easy_r2 = 0.9
    #: Greatest pickle of an estimator fitted to 40 rows of 2 columns, in bytes.
    pickle_bytes = 50_000
    #: Whether callbacks receive a ready ``fitted_estimator`` in an iteration.
    offers_state = True
    #: Whether the predictive distribution is Gaussian.
    gaussian = True

    def make(self, **params):
        """Return an unfitted estimator that fits 40 rows in milliseconds, ``random_state=0``."""
        raise NotImplementedError

    def make_iterative(self, **params):
        """Return one whose fit iterates three times or more on `data`."""
        return self.make(**params)

    @pytest.fixture
    def data(self):
        rng = np.random.default_rng(0)
        X = rng.uniform(-2, 2, (40, 2))
        y = 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40))
        return X, y

    @pytest.fixture
    def fitted(self, data):
        return self.make(kernel=rbf_kernel(), optimizer=None).fit(*data)

    @pytest.fixture
    def X_new(self):
        return np.random.default_rng(1).uniform(-3, 3, (7, 2))

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

    @pytest.mark.parametrize(
        ("method", "arguments"),
        [
            ("predict", ()),
            ("latent_mean_and_variance", ()),
            ("predict_quantiles", (0.5,)),
            ("predict_interval", ()),
            ("sample_y", ()),
            ("log_predictive_density", ([0.0] * 7,)),
            ("score", ([0.0] * 7,)),
        ],
    )
    def test_methods_check_that_the_estimator_is_fitted(self, method, arguments, fitted, X_new):
        with pytest.raises(NotFittedError):
            getattr(self.make(), method)(X_new, *arguments)
        with pytest.raises(ValueError, match="features"):
            getattr(fitted, method)(X_new[:, :1], *arguments)

    def test_methods_leave_the_estimator_alone(self, fitted, X_new, data):
        before = {k: pickle.dumps(v) for k, v in vars(fitted).items()}
        fitted.predict(X_new, return_cov=True)
        fitted.latent_mean_and_variance(X_new)
        fitted.predict_interval(X_new)
        fitted.sample_y(X_new, 2)
        fitted.log_predictive_density(*data)
        assert {k: pickle.dumps(v) for k, v in vars(fitted).items()} == before

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

    def test_parameters_are_validated(self):
        check_param_validation(type(self.make()).__name__, self.make())

    def test_dataframe_columns_are_checked(self):
        pytest.importorskip("pandas")
        check_dataframe_column_names_consistency(type(self.make()).__name__, self.make())

    def test_dataframe_and_array_give_the_same_fit(self, fitted, data, X_new):
        pandas = pytest.importorskip("pandas")
        X, y = data
        frame = pandas.DataFrame(X, columns=["a", "b"])
        other = clone(fitted).fit(frame, pandas.Series(y, name="target"))
        assert list(other.feature_names_in_) == ["a", "b"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mean = other.predict(pandas.DataFrame(X_new, columns=["a", "b"]))
        np.testing.assert_array_equal(mean, fitted.predict(X_new))

    def test_pipeline_passes_std_through(self, data):
        X, y = data
        pipeline = make_pipeline(StandardScaler(), self.make()).fit(X, y)
        mean, std = pipeline.predict(X, return_std=True)
        assert mean.shape == std.shape == y.shape
        assert pipeline.score(X, y) > 0.5

    @pytest.mark.parametrize("scoring", [None, log_predictive_density_scorer])
    def test_grid_search_reaches_into_the_kernel(self, data, scoring):
        grid = {"kernel__k1__k2__length_scale": [0.01, 2.0]}
        search = GridSearchCV(
            self.make(kernel=1.0 * RBF(1.0) + WhiteKernel(0.05), optimizer=None),
            grid,
            scoring=scoring,
            cv=3,
        ).fit(*data)
        assert search.best_params_ == {"kernel__k1__k2__length_scale": 2.0}
        assert search.best_estimator_.kernel_.k1.k2.length_scale == 2.0

    def test_pickle_predicts_the_same_and_is_small(self, fitted, X_new):
        text = pickle.dumps(fitted)
        assert len(text) < self.pickle_bytes
        np.testing.assert_array_equal(pickle.loads(text).predict(X_new), fitted.predict(X_new))

    def test_fitted_state_holds_no_tensor(self, fitted):
        tensors = [name for name, value in vars(fitted).items() if isinstance(value, torch.Tensor)]
        assert not tensors

    @pytest.mark.parametrize("optimizer", ["auto", None])
    def test_fit_leaves_parameters_alone(self, data, optimizer):
        kernel = rbf_kernel()
        estimator = self.make(kernel=kernel, optimizer=optimizer)
        before = str(estimator.get_params())
        estimator.fit(*data)
        assert estimator.kernel is kernel and str(estimator.get_params()) == before
        assert estimator.kernel_ is not kernel
        assert clone(estimator).get_params()["kernel"] == kernel

    def test_fit_keeps_no_reference_to_the_data(self, data, X_new):
        X, y = data[0].copy(), data[1].copy()
        estimator = self.make(kernel=rbf_kernel(), optimizer=None).fit(X, y)
        before = estimator.predict(X_new)
        X[:], y[:] = 0, 0
        np.testing.assert_array_equal(estimator.predict(X_new), before)

    def test_optimizer_none_keeps_the_kernel(self, fitted):
        np.testing.assert_allclose(fitted.kernel_.theta, rbf_kernel().theta, rtol=1e-12)

    def test_same_random_state_gives_the_same_fit(self, data, X_new):
        first, second = (self.make_iterative(random_state=5).fit(*data) for _ in range(2))
        np.testing.assert_array_equal(first.kernel_.theta, second.kernel_.theta)
        np.testing.assert_array_equal(first.predict(X_new), second.predict(X_new))

    def test_fit_and_predict_touch_no_global_state(self, data):
        before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
        numpy_before = np.random.get_state()[1].copy()
        estimator = self.make_iterative(random_state=5).fit(*data)
        estimator.sample_y(data[0], 2)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]
        np.testing.assert_array_equal(np.random.get_state()[1], numpy_before)

    # ---- callbacks and Ctrl-C --------------------------------------------------------------

    def test_callbacks_hear_every_task_once(self, data):
        recorder = Recorder()
        estimator = self.make_iterative().set_callbacks(recorder)
        estimator.fit(*data)
        assert recorder.ended.count("iteration") >= 3
        assert recorder.begun.count("fit") == recorder.ended.count("fit") == 1
        assert sorted(recorder.begun) == sorted(recorder.ended)
        assert recorder.begun[0] == recorder.ended[-1] == "fit"
        assert not estimator.interrupted_

    def test_callbacks_do_not_change_the_fit(self, data, X_new):
        plain = self.make_iterative().fit(*data)
        watched = self.make_iterative().set_callbacks(Recorder()).fit(*data)
        np.testing.assert_array_equal(watched.predict(X_new), plain.predict(X_new))

    def test_callback_stops_each_stage_early(self, data, X_new):
        recorder = Recorder(stop_after=2)
        estimator = self.make_iterative().set_callbacks(recorder).fit(*data)
        n_stages = len(recorder.ended) - recorder.ended.count("iteration") - 1
        assert recorder.ended.count("iteration") <= 2 * n_stages
        assert np.isfinite(estimator.predict(X_new)).all()

    def test_scoring_monitor_sees_the_fit_at_each_iteration(self, data):
        monitor = ScoringMonitor(scoring="r2")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            estimator = self.make_iterative().set_callbacks(monitor).fit(*data)
        log = monitor.get_logs().data
        final = [row["r2"] for row in log if row["task_name"] == "fit"]
        assert final == [pytest.approx(estimator.score(*data))]
        if self.offers_state:
            assert len([row for row in log if row["task_name"] == "iteration"]) >= 3

    def test_progress_bar_runs_and_leaves_a_picklable_estimator(self, data, capsys):
        pytest.importorskip("rich")
        estimator = self.make_iterative().set_callbacks(ProgressBar()).fit(*data)
        assert type(estimator).__name__ in capsys.readouterr().out
        pickle.dumps(estimator.set_callbacks())

    def test_verbose_prints_a_line_an_iteration(self, data, capsys):
        self.make_iterative(verbose=2).fit(*data)
        lines = capsys.readouterr().out.splitlines()
        assert sum("iteration 1," in line for line in lines) >= 1
        assert all(line.startswith("[") for line in lines)

    def test_ctrl_c_leaves_a_usable_estimator_and_says_so(self, data, X_new):
        handler = signal.getsignal(signal.SIGINT)
        once = itertools.count()

        def press():
            if next(once) == 0:
                signal.raise_signal(signal.SIGINT)

        recorder = Recorder(on_iteration=press)
        estimator = self.make_iterative().set_callbacks(recorder)
        with pytest.warns(ConvergenceWarning, match="interrupted by Ctrl-C"):
            estimator.fit(*data)
        assert estimator.interrupted_
        n_stages = len(recorder.ended) - recorder.ended.count("iteration") - 1
        assert recorder.ended.count("iteration") <= n_stages
        mean, std = estimator.predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and (std > 0).all()
        assert signal.getsignal(signal.SIGINT) is handler

    def test_second_ctrl_c_aborts(self, data):
        handler = signal.getsignal(signal.SIGINT)

        def press_twice():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        estimator = self.make_iterative().set_callbacks(Recorder(on_iteration=press_twice))
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(*data)
        assert signal.getsignal(signal.SIGINT) is handler

    def test_fit_works_outside_the_main_thread(self, data, X_new):
        result = []
        thread = threading.Thread(target=lambda: result.append(self.make().fit(*data)))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(
            result[0].predict(X_new), self.make().fit(*data).predict(X_new)
        )

    # ---- bad and awkward input -----------------------------------------------------------

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_fit_refuses_values_that_are_not_finite(self, data, value):
        X, y = data
        X_bad, y_bad = X.copy(), y.copy()
        X_bad[3, 1] = y_bad[3] = value
        with pytest.raises(ValueError, match="X contains (NaN|infinity)"):
            self.make().fit(X_bad, y)
        with pytest.raises(ValueError, match="y contains (NaN|infinity)"):
            self.make().fit(X, y_bad)

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ([-1.0] + [1.0] * 39, "[Nn]egative"),
            ([0.0] * 40, "at least one non-zero"),
            ([1.0] * 39, "sample_weight.shape"),
            ([np.nan] + [1.0] * 39, "NaN"),
        ],
    )
    def test_fit_refuses_bad_weights(self, data, weights, message):
        with pytest.raises(ValueError, match=message):
            self.make().fit(*data, sample_weight=np.array(weights))

    def test_fit_refuses_kernels_it_cannot_read(self, data):
        compound = CompoundKernel([RBF(), RBF()])
        for kernel in (compound, PairwiseKernel() + WhiteKernel()):
            with pytest.raises(TypeError, match=type(compound).__name__ + "|PairwiseKernel"):
                self.make(kernel=kernel).fit(*data)

    def test_fit_refuses_noise_inside_a_product(self, data):
        with pytest.raises(ValueError, match="WhiteKernel"):
            self.make(kernel=RBF() * WhiteKernel()).fit(*data)

    def test_fit_refuses_length_scales_of_another_number_of_columns(self, data):
        with pytest.raises(ValueError, match="kernel=.* does not fit X of 2 columns"):
            self.make(kernel=rbf_kernel(3)).fit(*data)

    def test_fit_refuses_unknown_devices(self, data):
        with pytest.raises(ValueError, match="device='abacus'"):
            self.make(device="abacus").fit(*data)

    def test_column_y_warns(self, data):
        X, y = data
        with pytest.warns(DataConversionWarning):
            self.make().fit(X, y[:, None])

    def test_weight_zero_is_absence(self, data, X_new):
        X, y = data
        weights = (np.arange(40) % 3 > 0).astype(float)
        weighted = self.make().fit(X, y, sample_weight=weights)
        without = self.make().fit(X[weights > 0], y[weights > 0])
        np.testing.assert_allclose(weighted.predict(X_new), without.predict(X_new), rtol=1e-7)

    def test_inputs_of_any_scale_and_offset(self):
        X, y = make_friedman1(260, n_features=5, noise=0.1, random_state=0)
        X = X * [1e-3, 1e6, 1.0, 10.0, 1e-3] + 1e4 * np.array([0, 1e6, 1.0, 1.0, 0])
        estimator = self.make().fit(X[:200], y[:200])
        assert estimator.score(X[200:], y[200:]) > self.easy_r2

    def test_constant_column_changes_little(self, data, X_new):
        X, y = data
        estimator = self.make().fit(np.column_stack([X, np.full(40, 1e4)]), y)
        assert estimator.score(np.column_stack([X, np.full(40, 1e4)]), y) > 0.5

    def test_duplicated_rows_are_accepted(self, data, X_new):
        X, y = data
        estimator = self.make().fit(np.repeat(X[:10], 4, axis=0), np.repeat(y[:10], 4))
        mean, std = estimator.predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all()

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

    def test_read_only_memory_map_is_accepted(self, data, X_new, tmp_path):
        X, y = data
        np.save(tmp_path / "X.npy", X)
        np.save(tmp_path / "y.npy", y)
        X_map = np.load(tmp_path / "X.npy", mmap_mode="r")
        y_map = np.load(tmp_path / "y.npy", mmap_mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", ConvergenceWarning)
            mapped = self.make().fit(X_map, y_map)
            mean = mapped.predict(X_map)
        np.testing.assert_array_equal(mean, self.make().fit(X, y).predict(X))

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_predictions_do_not_depend_on_the_batch(self, data, dtype):
        X, y = data
        estimator = self.make(dtype=dtype).fit(X, y)
        mean, std = estimator.predict(X, return_std=True)
        rows = [estimator.predict(row[None], return_std=True) for row in X]
        assert mean.dtype == std.dtype == np.float64
        np.testing.assert_allclose(np.concatenate([row[0] for row in rows]), mean, rtol=1e-7)
        np.testing.assert_allclose(np.concatenate([row[1] for row in rows]), std, rtol=1e-7)
