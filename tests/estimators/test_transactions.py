"""A fit replaces the fitted state as a whole, or leaves the estimator exactly as it was."""

import os
import pickle
import signal
import sys

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning, NotFittedError

import skgp
from tests.contracts.catalogue import CHEAP, cheap, rows
from tests.contracts.common import Recorder

PACKAGE = os.path.dirname(skgp.__file__)
pytestmark = pytest.mark.filterwarnings("ignore")
all_estimators = pytest.mark.parametrize("make", CHEAP, ids=lambda c: c.__name__)
streaming = pytest.mark.parametrize(
    "make", [c for c in CHEAP if hasattr(c, "partial_fit")], ids=lambda c: c.__name__
)


def state(estimator):
    """Everything the estimator holds, inner objects included, by name."""
    return {name: pickle.dumps(value) for name, value in vars(estimator).items()}


class Abort:
    """Context that raises KeyboardInterrupt when skgp calls its `at`-th function; None counts."""

    def __init__(self, at=None):
        self.at = at
        self.n_calls = 0

    def __call__(self, frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.n_calls += 1
            if self.n_calls == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)


def assert_abort_changes_nothing(estimator, method, arguments, n_points=4):
    """Abort `method` at several points, the last call among them, and compare the state."""
    before = state(estimator)
    for _ in range(2):  # the first fills caches
        other = pickle.loads(pickle.dumps(estimator))
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
    for estimator in (cheap(make), cheap(make).fit(X, y)):
        assert_abort_changes_nothing(estimator, "fit", new)


@streaming
def test_aborted_partial_fit_changes_nothing(make):
    estimator = cheap(make).partial_fit(*rows(make))
    assert_abort_changes_nothing(estimator, "partial_fit", rows(make, 9, seed=1, scale=1e3))


@pytest.mark.parametrize("make", list(CHEAP)[:2], ids=lambda c: c.__name__)
def test_aborted_warm_start_of_sgd_changes_nothing(make):
    estimator = cheap(make, solver="sgd", warm_start=True, optimizer=None, max_iter=20)
    estimator.fit(*rows(make))
    assert_abort_changes_nothing(estimator, "fit", rows(make))


@all_estimators
def test_failed_first_fit_does_not_count_as_fitted(make):
    X, y = rows(make)

    def fail():
        raise RuntimeError("from a callback")

    estimator = cheap(make).set_callbacks(Recorder(on_iteration=fail))
    with pytest.raises(RuntimeError, match="from a callback"):
        estimator.fit(X, y)
    for method, arguments in {"predict": (X,), "log_predictive_density": (X, y)}.items():
        with pytest.raises(NotFittedError):
            getattr(estimator, method)(*arguments)
    estimator.set_callbacks().fit(X, y).predict(X)


@all_estimators
def test_second_ctrl_c_keeps_the_fit_before(make):
    X, y = rows(make)
    estimator = cheap(make).fit(X, y)
    expected = estimator.predict(X)

    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    estimator.set_callbacks(Recorder(on_iteration=press_twice))
    X_new, y_new = rows(make, seed=1, scale=1e3)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(np.hstack([X_new, X_new]), y_new)
    np.testing.assert_array_equal(estimator.predict(X), expected)
    assert estimator.n_features_in_ == 1 and not estimator.interrupted_


@all_estimators
def test_fit_returns_the_estimator_itself(make):
    estimator = cheap(make)
    assert estimator.fit(*rows(make)) is estimator
    assert not hasattr(estimator, "_callback_fit_ctx")


@streaming
def test_warnings_of_a_fit_name_the_line_of_the_caller(make):
    X, y = rows(make)
    presses = iter([signal.SIGINT])
    recorder = Recorder(on_iteration=lambda: [signal.raise_signal(key) for key in presses])
    estimator = cheap(make).set_callbacks(recorder)
    with pytest.warns(ConvergenceWarning, match="interrupted by Ctrl-C") as caught:
        estimator.partial_fit(X, y)
    assert {w.filename for w in caught if "Ctrl-C" in str(w.message)} == {__file__}
