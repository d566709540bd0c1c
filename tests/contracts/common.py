"""What regressors and classifiers obey alike: see `EstimatorPredictions` and `InputContract`."""

import inspect
import itertools
import pickle
import re
import signal
import threading
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, PairwiseKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import parametrize_with_checks

from skgp.estimators import log_predictive_density_scorer
from tests.same import assert_same


def sklearn_checks(*estimators, expected_failed_checks=lambda estimator: {}, variants=True, but=()):
    """Return a test function that runs every check of scikit-learn on each estimator.

    Without ``variants`` what it runs in memory and on read-only maps, in float64 and in float32,
    runs once for each class: on read-only maps and in float32; and none whose name is in ``but``.
    The regressors, and the classifiers, then take turns at the checks that fit: all others are
    slow.
    """
    known = inspect.signature(parametrize_with_checks).parameters
    strict = {"xfail_strict": True} if "xfail_strict" in known else {}  # since scikit-learn 1.8
    mark = parametrize_with_checks(
        list(estimators), expected_failed_checks=expected_failed_checks, **strict
    )
    names, cases = mark.args[0], list(mark.args[1])
    if not variants:
        kept = {}  # of the variants the last, which is the one furthest from plain arrays
        for case in cases:
            estimator, check = getattr(case, "values", case)
            if check.func.__name__ not in but:
                kept[type(estimator), check.func] = case
        cases = _in_turn(kept)

    @pytest.mark.parametrize(names, cases, **mark.kwargs)
    def test_sklearn_check(estimator, check):
        check(estimator)

    return test_sklearn_check


def _in_turn(cases):
    """Return the cases, by class and check, of which most of those that fit are marked slow."""
    found, alike = [], {}
    for (kind, check), case in cases.items():
        alike.setdefault((check, is_classifier(kind())), []).append(case)
    for turn, ((check, _), group) in enumerate(alike.items()):
        if re.search("init|param|clone|repr|mixin|tag", check.__name__):
            found += group
            continue
        for k, case in enumerate(group):
            marks = [*getattr(case, "marks", ()), *[pytest.mark.slow] * (k != turn % len(group))]
            found.append(pytest.param(*getattr(case, "values", case), marks=marks))
    return found


class Recorder:
    """A callback of ``sklearn.callback`` that records its calls and may stop a stage."""

    def __init__(self, stop_after=None, on_iteration=None):
        pytest.importorskip("sklearn.callback", reason="callbacks need scikit-learn 1.9")
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

    def iterations(self):
        """How many iterations each stage had, in the order in which the stages ended."""
        counts = [0]
        for name in self.ended:
            counts[-1] += name == "iteration"
            counts += [0] * (name not in ("iteration", "fit"))
        return counts[:-1]


class EstimatorPredictions:
    """The part of the contract that regressors and classifiers share.

    `RegressorPredictions` and `ClassifierPredictions` say what is abstract here. The tests of an
    estimator derive from them for each likelihood and solver, and once from the whole contract.
    """

    #: Greatest pickle of an estimator fitted to 40 rows of 2 columns, in bytes.
    pickle_bytes = 50_000
    #: Whether callbacks receive a ready ``fitted_estimator`` in an iteration.
    offers_state = True
    #: Name of ``score`` among the scoring strings, and its least value on `data`.
    scoring: str
    least_score: float
    #: A kernel with one length scale, and the path of that in a grid.
    scalar_kernel: object
    length_scale: str

    def make(self, **params):
        """Return an unfitted estimator that fits 40 rows in milliseconds, ``random_state=0``."""
        raise NotImplementedError

    def make_iterative(self, **params):
        """Return one whose fit iterates three times or more on `data`."""
        return self.make(**params)

    def kernel(self, n_columns=2):
        """Return a kernel that suits `data`."""
        raise NotImplementedError

    def outputs(self, estimator, X):
        """Return all of the prediction at the rows of X, one along the first axis."""
        raise NotImplementedError

    def methods(self, X, y):
        """Return the arguments of every public method that predicts, by name."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def data(cls):
        """Forty rows of two columns, and their targets."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls, data):
        return cls().make(kernel=cls().kernel(), optimizer=None).fit(*data)

    @pytest.fixture(scope="class")
    @classmethod
    def iterated(cls, data):
        """Fitted from ``random_state=5``."""
        return cls().make_iterative(random_state=5).fit(*data)

    @pytest.fixture(scope="class")
    @classmethod
    def X_new(cls):
        return np.random.default_rng(1).uniform(-3, 3, (7, 2))

    # ---- methods ---------------------------------------------------------------------------

    def test_methods_leave_the_estimator_alone(self, fitted, data):
        before = {k: pickle.dumps(v) for k, v in vars(fitted).items()}
        for method, arguments in self.methods(*data).items():
            getattr(fitted, method)(*arguments)
        assert {k: pickle.dumps(v) for k, v in vars(fitted).items()} == before

    # ---- scikit-learn around it ----------------------------------------------------------

    def test_pickle_predicts_the_same_and_is_small(self, fitted, X_new):
        text = pickle.dumps(fitted)
        assert len(text) < self.pickle_bytes
        found = self.outputs(pickle.loads(text), X_new)
        assert_same(found, self.outputs(fitted, X_new))

    def test_fit_keeps_no_reference_to_the_data(self, data, X_new):
        X, y = data[0].copy(), data[1].copy()
        estimator = self.make(kernel=self.kernel(), optimizer=None).fit(X, y)
        before = self.outputs(estimator, X_new)
        X[:], y[:] = 0, y[0]
        assert_same(self.outputs(estimator, X_new), before)

    def test_optimizer_none_keeps_the_kernel(self, fitted):
        np.testing.assert_allclose(fitted.kernel_.theta, self.kernel().theta, rtol=1e-12)

    # ---- callbacks ---------------------------------------------------------------------------

    def test_callbacks_hear_every_task_once_and_change_nothing(self, data, iterated, X_new):
        """Nor does anything else, where ``random_state`` is the same; and global state stays."""
        before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
        numpy_before = np.random.get_state()
        recorder = Recorder()
        watched = self.make_iterative(random_state=5).set_callbacks(recorder).fit(*data)
        for method, arguments in self.methods(*data).items():
            getattr(watched, method)(*arguments)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == before[1:]
        np.testing.assert_equal(np.random.get_state(), numpy_before)
        assert_same(watched.kernel_.theta, iterated.kernel_.theta)
        assert_same(self.outputs(watched, X_new), self.outputs(iterated, X_new))
        assert recorder.ended.count("iteration") >= 3
        assert recorder.begun.count("fit") == recorder.ended.count("fit") == 1
        assert sorted(recorder.begun) == sorted(recorder.ended)
        assert recorder.begun[0] == recorder.ended[-1] == "fit"
        assert not watched.interrupted_

    # ---- bad and awkward input -----------------------------------------------------------

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_predictions_do_not_depend_on_the_batch(self, data, dtype):
        X, y = data
        estimator = self.make(kernel=self.kernel(), optimizer=None, dtype=dtype).fit(X, y)
        whole = self.outputs(estimator, X)
        rows = [self.outputs(estimator, row[None]) for row in X[::4]]
        assert whole.dtype == np.float64
        np.testing.assert_allclose(np.concatenate(rows), whole[::4], rtol=1e-7)


class InputContract:
    """What does not depend on a likelihood or solver: once for each estimator class."""

    def test_methods_check_that_the_estimator_is_fitted(self, fitted, data, X_new):
        for method, arguments in self.methods(X_new, data[1][:7]).items():
            with pytest.raises(NotFittedError):
                getattr(self.make(), method)(*arguments)
            with pytest.raises(ValueError, match="features"):
                getattr(fitted, method)(X_new[:, :1], *arguments[1:])

    def test_dataframe_and_array_give_the_same_fit(self, fitted, data, X_new):
        pandas = pytest.importorskip("pandas")
        X, y = data
        frame = pandas.DataFrame(X, columns=["a", "b"])
        other = clone(fitted).fit(frame, pandas.Series(y, name="target"))
        assert list(other.feature_names_in_) == ["a", "b"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = self.outputs(other, pandas.DataFrame(X_new, columns=["a", "b"]))
        assert_same(found, self.outputs(fitted, X_new))

    def test_grid_search_reaches_into_the_kernel(self, data):
        search = GridSearchCV(
            self.make(kernel=self.scalar_kernel, optimizer=None),
            {self.length_scale: [0.01, 2.0]},
            scoring={"score": self.scoring, "density": log_predictive_density_scorer},
            refit="density",
            cv=2,
        ).fit(*data)
        assert search.best_params_ == {self.length_scale: 2.0}
        assert search.cv_results_["rank_test_score"].tolist() == [2, 1]
        parameters = search.best_estimator_.kernel_.get_params()
        assert parameters[self.length_scale.removeprefix("kernel__")] == 2.0

    def test_fit_leaves_parameters_alone(self, data):
        kernel = self.kernel()
        estimator = self.make(kernel=kernel)
        before = str(estimator.get_params())
        estimator.fit(*data)
        assert estimator.kernel is kernel and str(estimator.get_params()) == before
        assert estimator.kernel_ is not kernel
        assert clone(estimator).get_params()["kernel"] == kernel

    def test_scoring_monitor_sees_the_fit_at_each_iteration(self, data):
        monitor = pytest.importorskip("sklearn.callback").ScoringMonitor(scoring=self.scoring)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            estimator = self.make_iterative().set_callbacks(monitor).fit(*data)
        log = monitor.get_logs().data
        final = [row[self.scoring] for row in log if row["task_name"] == "fit"]
        assert final == [pytest.approx(estimator.score(*data))]
        if self.offers_state:
            assert len([row for row in log if row["task_name"] == "iteration"]) >= 3

    def test_progress_bar_runs_and_leaves_a_picklable_estimator(self, data, capsys):
        pytest.importorskip("rich")
        bar = pytest.importorskip("sklearn.callback").ProgressBar()
        estimator = self.make_iterative().set_callbacks(bar).fit(*data)
        assert type(estimator).__name__ in capsys.readouterr().out
        pickle.dumps(estimator.set_callbacks())

    def test_fit_outside_the_main_thread_prints_a_line_an_iteration(
        self, data, iterated, X_new, capsys
    ):
        result, model = [], self.make_iterative(random_state=5, verbose=2)
        thread = threading.Thread(target=lambda: result.append(model.fit(*data)))
        thread.start()
        thread.join()
        assert_same(self.outputs(result[0], X_new), self.outputs(iterated, X_new))
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
        assert max(recorder.iterations()) <= 1
        assert np.isfinite(self.outputs(estimator, X_new)).all()
        assert signal.getsignal(signal.SIGINT) is handler

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
            self.make(kernel=self.kernel(3)).fit(*data)

    def test_fit_refuses_unknown_devices(self, data):
        with pytest.raises(ValueError, match="device='abacus'"):
            self.make(device="abacus").fit(*data)

    def test_read_only_memory_map_is_accepted(self, data, tmp_path):
        X, y = data
        np.save(tmp_path / "X.npy", X)
        np.save(tmp_path / "y.npy", y)
        X_map = np.load(tmp_path / "X.npy", mmap_mode="r")
        y_map = np.load(tmp_path / "y.npy", mmap_mode="r")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.filterwarnings("ignore", message=".* no effect with optimizer=None")
            options = {"kernel": self.kernel(), "optimizer": None}
            found = self.outputs(self.make(**options).fit(X_map, y_map), X_map)
        assert_same(found, self.outputs(self.make(**options).fit(X, y), X))
