"""The bridge from models to ``sklearn.callback``, and Ctrl-C."""

import signal

import numpy as np
import pytest
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV

from skgp.estimators._fitting import fit_context, fit_session, stop_on_interrupt
from skgp.estimators._parameters import is_one_of_many_fits
from tests.contracts.estimators import Recorder

callback = pytest.importorskip("sklearn.callback", reason="callbacks need scikit-learn 1.9")


class Counter(callback.CallbackSupportMixin, BaseEstimator):
    """Two stages that count; fits nothing."""

    _parameter_constraints: dict = {}

    def __init__(self, max_iter=4, verbose=0, action=None):
        self.max_iter = max_iter
        self.verbose = verbose
        self.action = action

    n_jobs = memory_budget = None
    device = "cpu"
    _n_stages = 2

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y=None):
        self.counts_ = {}
        with fit_session(self, X, y) as session:
            for name in ("first", "second"):
                with session.stage(name, max_iter=self.max_iter) as callback:
                    self.counts_[name] = self._count(callback)
        return self

    def _count(self, callback):
        for iteration in range(self.max_iter):
            if self.action is not None:
                self.action()
            if callback(iteration, {"loss": np.float64(0.5), "state": np.ones(3)}):
                return iteration + 1
        return self.max_iter

    def score(self, X, y=None):
        return 0.0


def press():
    signal.raise_signal(signal.SIGINT)


def test_fit_session_builds_a_tree_of_three_levels():
    recorder = Recorder()
    Counter(max_iter=2).set_callbacks(recorder).fit([[0]])
    expected = ["iteration", "iteration", "first", "iteration", "iteration", "second", "fit"]
    assert recorder.ended == expected


def test_fit_session_stops_one_stage_at_a_time():
    counter = Counter().set_callbacks(Recorder(stop_after=3)).fit([[0]])
    assert counter.counts_ == {"first": 3, "second": 3}


def test_fit_session_passes_raw_data_weights_and_state():
    heard = {}

    class Hearing(Recorder):
        def on_fit_task_end(
            self, estimator, context, *, X=None, y=None, metadata=None, fitted_estimator=None
        ):
            heard[context.task_name] = (X, y, metadata, fitted_estimator)

    class Stated(Counter):
        @fit_context(prefer_skip_nested_validation=True)
        def fit(self, X, y, sample_weight=None):
            state = {"coef_": 1}
            with fit_session(self, X, y, sample_weight=sample_weight) as session:
                with session.stage("s", state=lambda: dict(state)) as callback:
                    callback(0, {})
                self.coef_ = 2
            return self

    X, y, weights = [[0]], [1], [2]
    Stated().set_callbacks(Hearing()).fit(X, y, weights)
    for task, coef in {"iteration": 1, "s": 1, "fit": 2}.items():
        assert heard[task][0] is X and heard[task][1] is y
        assert heard[task][2] == {"sample_weight": weights}
        assert heard[task][3].coef_ == coef


def test_fit_session_without_callbacks_builds_no_contexts(monkeypatch):
    from sklearn.callback import CallbackContext

    monkeypatch.delattr(CallbackContext, "subcontext")
    assert Counter().fit([[0]]).counts_ == {"first": 4, "second": 4}


@pytest.mark.parametrize(("verbose", "n_lines"), [(0, 0), (1, 3), (2, 11)])
def test_verbose_says_as_much_as_asked(capsys, verbose, n_lines):
    Counter(verbose=verbose).fit([[0]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == n_lines
    if verbose:
        assert lines[0] == "[Counter] fit of 1"
        assert lines[-1].startswith("[Counter] second: 4 iterations, loss 0.5, ")


def test_verbose_says_something_in_a_long_stage(capsys, monkeypatch):
    now = iter(range(0, 1000, 4))  # seconds
    monkeypatch.setattr("skgp.estimators._fitting.time.perf_counter", lambda: next(now))
    Counter(verbose=1, max_iter=8).fit([[0]])
    lines = capsys.readouterr().out.splitlines()
    assert "[Counter] first: iteration 1, loss 0.5" in lines
    assert len(lines) < 3 + 8


def test_ctrl_c_ends_every_stage_and_warns():
    calls = []

    def press_at_the_second():
        calls.append(1)
        if len(calls) == 2:
            press()

    with pytest.warns(ConvergenceWarning, match="Counter was interrupted by Ctrl-C"):
        counter = Counter(action=press_at_the_second).fit([[0]])
    assert counter.interrupted_
    assert counter.counts_ == {"first": 2, "second": 1}


def test_ctrl_c_in_a_search_ends_the_search():
    fits = []

    def press_at_the_third():
        fits.append(1)
        if len(fits) == 3:
            press()

    search = GridSearchCV(Counter(max_iter=1), {"action": [press_at_the_third]}, cv=5)
    with pytest.raises(KeyboardInterrupt):
        search.fit(np.zeros((10, 1)), np.zeros(10))
    assert len(fits) == 3


def test_is_one_of_many_fits_is_false_alone():
    assert not is_one_of_many_fits(Counter())


def test_stop_on_interrupt_hands_the_second_press_to_the_previous_handler():
    calls = []
    original = signal.signal(signal.SIGINT, lambda signum, frame: calls.append(signum))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with stop_on_interrupt() as flag:
            press()
            assert flag.requested and not calls
            press()
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, original)


def test_stop_on_interrupt_respects_an_ignored_signal():
    original = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_on_interrupt() as flag:
            press()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert not flag.requested
    finally:
        signal.signal(signal.SIGINT, original)


def test_stop_on_interrupt_restores_the_handler_after_an_error():
    with pytest.raises(ZeroDivisionError), stop_on_interrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
