"""What every fit obeys: transactions, warm starts, sources of randomness, counts of iterations."""

import os
import pickle
import signal
import sys

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

import skgp
from tests.contracts.catalogue import CHEAP, cheap, rows, streaming
from tests.contracts.common import Recorder
from tests.covering import covering

PACKAGE = os.path.dirname(skgp.__file__)
pytestmark = pytest.mark.filterwarnings("ignore")
all_estimators = pytest.mark.parametrize("make", CHEAP, ids=lambda c: c.__name__)
streams = pytest.mark.parametrize(
    "make", [c for c in CHEAP if hasattr(c, "partial_fit")], ids=lambda c: c.__name__
)
WARM = [c for c in CHEAP if "warm_start" in c().get_params()]
warm_estimators = pytest.mark.parametrize("make", WARM, ids=lambda c: c.__name__)


# ---- a fit replaces the fitted state as a whole, or leaves the estimator exactly as it was ----


def state(estimator):
    """Everything the estimator holds, inner objects included, by name."""
    return {name: pickle.dumps(value) for name, value in vars(estimator).items()}


BUDGET = {"memory_budget": 1e9}


class Abort:
    """Context that raises KeyboardInterrupt when skgp calls its `at`-th function; None counts."""

    def __init__(self, at=None):
        self.at = at
        self.n_calls = 0

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.n_calls += 1
            if self.n_calls == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)


def assert_abort_changes_nothing(estimator, method, arguments, n_points=3):
    """Abort `method` at several points, the last call among them, and compare the state."""
    before = state(estimator)
    first, other = (pickle.loads(pickle.dumps(estimator)) for _ in range(2))
    getattr(first, method)(*arguments)  # fills caches
    with Abort() as abort:
        getattr(other, method)(*arguments)
    for at in np.linspace(1, abort.n_calls, n_points).astype(int):
        with pytest.raises(KeyboardInterrupt), Abort(at):
            getattr(estimator, method)(*arguments)
        assert state(estimator) == before, f"aborted at call {at} of {abort.n_calls}"


@all_estimators
def test_aborted_fit_changes_nothing(make):
    X, y = rows(make)
    new = np.hstack([X, X[::-1]]), rows(make, seed=1, scale=1e3)[1]
    # What is free is read anew after a while: with a budget every fit makes the same calls.
    assert_abort_changes_nothing(cheap(make, **BUDGET).fit(X, y), "fit", new)


@streams
def test_aborted_partial_fit_changes_nothing(make):
    estimator = streaming(make).set_params(**BUDGET).partial_fit(*rows(make))
    assert_abort_changes_nothing(estimator, "partial_fit", rows(make, 9, seed=1, scale=1e3))


@pytest.mark.parametrize("make", list(CHEAP)[:2], ids=lambda c: c.__name__)
def test_aborted_warm_start_of_sgd_changes_nothing(make):
    estimator = cheap(make, solver="sgd", warm_start=True, optimizer=None, max_iter=5, **BUDGET)
    estimator.fit(*rows(make))
    assert_abort_changes_nothing(estimator, "fit", rows(make))


@all_estimators
def test_failed_first_fit_does_not_count_as_fitted(make):
    X, y = rows(make)

    def fail():
        raise RuntimeError("from a callback")

    estimator = cheap(make).set_callbacks(Recorder(on_iteration=fail))
    before = vars(estimator).copy()
    with pytest.raises(RuntimeError, match="from a callback"):
        estimator.fit(X, y)
    assert vars(estimator) == before
    for method, arguments in {"predict": (X,), "log_predictive_density": (X, y)}.items():
        with pytest.raises(NotFittedError):
            getattr(estimator, method)(*arguments)
    estimator.set_callbacks().fit(X, y).predict(X)


@all_estimators
def test_second_ctrl_c_keeps_the_fit_before(make):
    X, y = rows(make)
    estimator = cheap(make).fit(X, y)
    expected, handler = estimator.predict(X), signal.getsignal(signal.SIGINT)

    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    estimator.set_callbacks(Recorder(on_iteration=press_twice))
    X_new, y_new = rows(make, seed=1, scale=1e3)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(np.hstack([X_new, X_new]), y_new)
    np.testing.assert_array_equal(estimator.predict(X), expected)
    assert estimator.n_features_in_ == 1 and not estimator.interrupted_
    assert signal.getsignal(signal.SIGINT) is handler


@streams
def test_warnings_of_a_fit_name_the_line_of_the_caller(make):
    X, y = rows(make)
    presses = iter([signal.SIGINT])
    recorder = Recorder(on_iteration=lambda: [signal.raise_signal(key) for key in presses])
    estimator = streaming(make).set_callbacks(recorder)
    with pytest.warns(ConvergenceWarning, match="interrupted by Ctrl-C") as caught:
        estimator.partial_fit(X, y)
    assert {w.filename for w in caught if "Ctrl-C" in str(w.message)} == {__file__}


# ---- a warm start goes on from the last fit of the same model, and begins anew elsewhere ----


def one_kernel(make, length_scale):
    """A kernel that the estimator takes; state-space kernels have no length scale near 0."""
    noise = WhiteKernel(0.05) if hasattr(make, "predict_interval") else None
    kernel = 2.0 * RBF(length_scale, (1e-3, 1e3))
    return kernel if noise is None else kernel + noise


def assert_same(first, second, X):
    np.testing.assert_allclose(first.kernel_.theta, second.kernel_.theta, rtol=1e-6, atol=1e-8)
    found, expected = (e.latent_mean_and_variance(X) for e in (first, second))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@covering(make=WARM, optimizer=["auto", None])
def test_warm_start_takes_a_changed_kernel(make, optimizer):
    X, y = rows(make)
    # Equal to three digits, as they print.
    kernels = one_kernel(make, 1.0), one_kernel(make, 1.0004 if optimizer is None else 0.5)
    warm = cheap(make, kernel=kernels[0], optimizer=optimizer, warm_start=True).fit(X, y)
    warm.set_params(kernel=kernels[1]).fit(X, y)
    assert_same(warm, cheap(make, kernel=kernels[1], optimizer=optimizer).fit(X, y), X)


@warm_estimators
def test_warm_start_takes_another_number_of_columns(make):
    X, y = rows(make)
    warm = cheap(make, warm_start=True).fit(X, y)
    X = np.hstack([X, X[::-1] ** 2])
    assert_same(warm.fit(X, y), cheap(make).fit(X, y), X)


@pytest.mark.parametrize("make", [c for c in WARM if hasattr(c, "predict_proba")])
def test_warm_start_takes_other_classes(make):
    X, y = rows(make)
    options = {"kernel": one_kernel(make, 1.0), "optimizer": None}
    warm = cheap(make, warm_start=True, **options).fit(X, y)
    y = np.where(X[:, 0] > 3, "c", y)
    cold = cheap(make, **options).fit(X, y)
    np.testing.assert_allclose(
        warm.fit(X, y).predict_proba(X), cold.predict_proba(X), rtol=1e-5, atol=1e-7
    )


@warm_estimators
def test_warm_start_without_optimizer_keeps_what_was_learned(make):
    X, y = rows(make)
    kernel = one_kernel(make, 0.7)
    warm = cheap(make, kernel=kernel, warm_start=True).fit(X, y)
    theta = warm.kernel_.theta
    assert abs(theta - kernel.theta).max() > 0.01
    warm.set_params(optimizer=None).fit(X, y)
    np.testing.assert_allclose(warm.kernel_.theta, theta, rtol=1e-8, atol=1e-8)
    warm.set_params(warm_start=False).fit(X, y)
    np.testing.assert_allclose(warm.kernel_.theta, kernel.theta, rtol=1e-8, atol=1e-8)


# ---- what another fit leaves ----

STUDENT_T, COUNTS, RELEVANCE = (
    {"likelihood": "student_t"},
    {"likelihood": "poisson"},
    {"basis": "relevance"},
)
#: Parameters of a fit, and those of the next.
REFITS = [
    (skgp.QSGPRegressor, {}, {"solver": "cg"}),
    (skgp.QSGPRegressor, {"likelihood": "laplace"}, {}),
    (skgp.QSGPRegressor, RELEVANCE, {}),
    (skgp.QSGPClassifier, {}, {"solver": "sgd", "max_iter": 5}),
    (skgp.QSGPClassifier, {"solver": "sgd", "max_iter": 5}, {"covariance": "diagonal"}),
    (skgp.QSGPClassifier, RELEVANCE, {}),
    (skgp.DLMGPRegressor, STUDENT_T, {}),
    (skgp.DLMGPRegressor, {}, {**COUNTS, "kernel": RBF()}),
    (skgp.SWSGPRegressor, STUDENT_T, {}),
    (skgp.StateSpaceGPRegressor, STUDENT_T, {}),
    (skgp.VecchiaGPRegressor, STUDENT_T, {}),
    (skgp.GaussianProcessRegressor, {"method": "exact"}, {"method": "state_space"}),
    (skgp.GaussianProcessRegressor, {"method": "state_space"}, {"method": "exact"}),
]


@pytest.mark.parametrize(("make", "first", "then"), REFITS, ids=lambda v: getattr(v, "__name__", v))
def test_a_refit_is_a_first_fit(make, first, then):
    """Whose attributes are those of its own parameters, with none of the fit before."""
    X, y = rows(make)
    y = y if hasattr(make, "predict_proba") else np.rint(3 + 2 * y)
    fresh = cheap(make, **then, optimizer=None).fit(X, y)
    again = cheap(make, **first, optimizer=None).fit(X, y)
    again.set_params(**fresh.get_params(deep=False)).fit(X, y)
    assert vars(again).keys() == vars(fresh).keys()
    found, expected = (each.latent_mean_and_variance(X) for each in (again, fresh))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


# ---- precision ----


@pytest.mark.parametrize("make", list(CHEAP)[:6], ids=lambda c: c.__name__)
def test_a_fit_in_single_precision_is_near_that_in_double_and_another(make):
    X, y = rows(make)
    options = {"basis": "fourier", "n_basis": 20} if make is skgp.QSGPRegressor else {}
    double, single = (
        cheap(make, optimizer=None, dtype=dtype, **options).fit(X, y).latent_mean_and_variance(X)
        for dtype in ("float64", "float32")
    )
    assert not np.array_equal(single, double)
    np.testing.assert_allclose(single, double, rtol=0, atol=1e-2 * np.abs(double[0]).max())


# ---- what fits draw, and from where ----


@pytest.fixture
def global_state():
    """NumPy's global generator, put back afterwards."""
    before = np.random.get_state()
    np.random.seed(0)
    yield
    np.random.set_state(before)


def position():
    _, key, index, *_ = np.random.get_state()
    return key.tobytes(), index


@pytest.mark.usefixtures("global_state")
@all_estimators
def test_random_state_none_draws_one_seed_at_most_of_the_global_generator(make):
    X, y = rows(make)
    estimator = cheap(make, random_state=None)
    before = position()
    estimator.fit(X, y)
    draws_nothing = make in (skgp.StateSpaceGPRegressor, skgp.StateSpaceGPClassifier)
    after = position()
    found = estimator.latent_mean_and_variance(X)
    estimator.predict(X)
    estimator.log_predictive_density(X, y)
    assert position() == after  # predictions draw nothing
    np.random.seed(0)
    again = cheap(make, random_state=None).fit(X, y).latent_mean_and_variance(X)
    np.testing.assert_allclose(again, found, rtol=1e-10)
    np.random.seed(0)
    if not draws_nothing:
        np.random.randint(2**31 - 1)
    assert after == position()
    assert draws_nothing == (after == before)


# ---- what max_iter bounds and n_iter_ counts ----

#: Settings under which `max_iter` bounds something.
ITERATIVE = [
    *((make, {"objective": o}) for make in list(CHEAP)[2:4] for o in ("log_loss", "elbo")),
    (list(CHEAP)[2], {"objective": "square_loss"}),
    (list(CHEAP)[2], {"batch_size": 8}),
    (list(CHEAP)[2], {"beta": "auto"}),
    *((make, {"solver": "sgd"}) for make in list(CHEAP)[:2]),
    (list(CHEAP)[0], {"likelihood": "laplace"}),
    *((make, {}) for make in list(CHEAP)[4:8]),
    *((make, {"solver": "adam"}) for make in list(CHEAP)[4:6]),
]


@pytest.mark.parametrize(
    ("make", "params"), ITERATIVE, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_n_iter_is_at_most_max_iter(make, params):
    X, y = rows(make)
    estimator = cheap(make, **{"max_iter": 2, **params}).fit(X, y)
    assert 1 <= estimator.n_iter_ <= 2


#: Routes whose fit reports iterations, beside those.
REPORTED = [
    *(
        (list(CHEAP)[0], {"solver": s, "basis": "fourier", "n_basis": 8})
        for s in ("cg", "gauss-seidel")
    ),
    (list(CHEAP)[0], {"solver": "cg"}),
    *((list(CHEAP)[0], {"basis": "relevance", "solver": s}) for s in ("auto", "sgd")),
    *((list(CHEAP)[1], options) for options in ({}, {"basis": "relevance"})),
    *(
        (skgp.BayesianGPRegressor, {"optimizer": "auto", "sampler": s})
        for s in ("importance", "hmc")
    ),
    (skgp.BayesianGPRegressor, {"solver": "cg", "optimizer": "auto"}),
    *((make, {}) for make in list(CHEAP)[9:]),
]


@pytest.mark.parametrize(
    ("make", "params"), ITERATIVE + REPORTED, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_a_callback_stops_every_stage_and_leaves_a_usable_fit(make, params):
    X, y = rows(make)
    recorder = Recorder(stop_after=1)
    model = cheap(make, **params).set_callbacks(recorder).fit(X, y)
    assert max(recorder.iterations()) == 1
    # What the solvers did, for the callback is not asked again; of Bayesian fits two stages in one,
    # of series nothing where it ended the choice of a kernel.
    longest = max(model.n_iter_, *map(len, model.history_.values()))
    if make is skgp.VecchiaGPClassifier:  # its mode is told once it is there
        longest = len(model.history_["hyperparameters"])
    chooses = type(model) is skgp.StateSpaceGPRegressor and model.kernel is None
    assert longest == 1 - chooses + isinstance(model, skgp.BayesianGPRegressor)
    assert np.isfinite(model.latent_mean_and_variance(X)).all()


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("SWSGPRegressor", {"likelihood": "student_t"}),
        ("DLMGPRegressor", {"likelihood": "student_t"}),
        ("StateSpaceGPRegressor", {"likelihood": "poisson"}),
        ("SWSGPClassifier", {"likelihood": "logit"}),
    ],
)
def test_partial_fit_refuses_another_model(name, changed):
    X = np.linspace(0, 5, 30)[:, None]
    y = (np.sin(X[:, 0]) > 0).astype(int)
    model = getattr(skgp, name)(random_state=0, optimizer=None).partial_fit(X[:25], y[:25])
    (parameter,) = changed
    with pytest.raises(ValueError, match=f"another {parameter} than"):
        model.set_params(**changed).partial_fit(X[25:], y[25:])
    back = {parameter: type(model)().get_params()[parameter]}
    model.set_params(**back).partial_fit(X[25:], y[25:])
