"""What every ``fit`` obeys: a transaction, in few threads, under callbacks and Ctrl-C.

A warm start goes on from the last fit where that was asked for the same model of the same columns
and classes, and begins anew elsewhere: where it began, how long it ran and what it learned from may
all be others. The ``optimizer`` may change too: None keeps the hyper-parameters where the last fit
left them.

A model (``skgp.models``) knows one thing only: after each iteration it calls
``callback(iteration, info)`` and stops, keeping its state, when that returns True. A `FitSession`
makes these callbacks. The tasks that a scikit-learn callback sees are a tree of three levels::

    fit                          the root: one task a fit
    +-- hyperparameters          a stage: one task a call of `FitSession.stage`
    |   +-- iteration            a leaf: one task a call of the model's callback
    |   +-- ...
    +-- solve
        +-- ...

A callback that returns True at the end of an iteration stops its stage; the next stage runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import joblib
import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._parameters import is_one_of_many_fits, validated_context, warn_of_idle_options
from skgp.estimators.defaults import FEW_PREDICTED, LEAST_GPU_ROWS, MANY_ROWS, SECONDS_A_LINE
from skgp.linalg import warn_caller
from skgp.linalg.runtime import memory_limit, one_thread

#: What defines the model; an estimator has some of them.
_MODEL = (
    "kernel",
    "time",
    "covariates",
    "trend",
    "likelihood",
    "heteroscedastic",
    "link",
    "degrees_of_freedom",
    "method",
    "basis",
    "projection",
    "warp_inputs",
    "normalize_y",
    "n_features_in_",
    "classes_",
)


def fit_context(*, prefer_skip_nested_validation: bool) -> Callable[[Callable], Callable]:
    """Decorate ``fit`` or ``partial_fit`` as scikit-learn does, and make it a transaction.

    The method runs on a draft, a copy of the estimator, whose state replaces the estimator's in one
    assignment at the very end. Until then the estimator is as it was: where the method raises, or
    is aborted at any point by Ctrl-C, it answers for the fit before, or is not fitted. What a
    ``partial_fit`` or a warm start changes in place (``_updated_in_place``) is copied first. It
    takes the threads of `skgp.linalg.runtime` and the memory of `skgp.linalg.runtime`.
    """
    validated = validated_context(prefer_skip_nested_validation=prefer_skip_nested_validation)

    def decorator(method: Callable) -> Callable:
        run = validated(_limited(method, _threads_of))
        streams = method.__name__ == "partial_fit"

        @functools.wraps(method)
        def transaction(estimator, *args, **kwargs):
            draft = object.__new__(type(estimator))
            draft.__dict__.update(estimator.__dict__)
            if streams or getattr(estimator, "warm_start", False):
                inherited = estimator._updated_in_place & vars(estimator).keys()
                draft.__dict__.update({n: copy.deepcopy(vars(estimator)[n]) for n in inherited})
            run(draft, *args, **kwargs)
            estimator.__dict__ = draft.__dict__
            return estimator

        return transaction

    return decorator


def within_limits(method: Callable) -> Callable:
    """Decorate a public method that predicts: few threads, and the budget of memory."""
    return _limited(method, _threads_of_prediction)


def _limited(method: Callable, threads_of: Callable) -> Callable:
    """The same of a method that fits, whose threads are others."""

    @functools.wraps(method)
    def limited(self, *args, **kwargs):
        X = args[0] if args else kwargs.get("X", ())
        if X is None:
            raise ValueError(
                "X is None, which methods with inplace=True return; give a table of numbers (n, d)."
            )
        threads = threads_of(self, X)
        with threads, memory_limit(self.memory_budget, _memory_device(self, X)):
            return method(self, *args, **kwargs)

    return limited


def _threads_of(estimator, X) -> AbstractContextManager[None]:
    """One thread, or for many rows as many as ``n_jobs`` asks for in joblib's count."""
    asked = getattr(estimator, "_n_threads", estimator.n_jobs)
    if asked is None:
        return one_thread()
    n_jobs = joblib.effective_n_jobs(asked)
    n_rows = shape_of(X)[0]  # of a dask data frame it is not known
    return one_thread(n_jobs, throughout=MANY_ROWS <= n_rows < math.inf)


def shape_of(X: Any) -> tuple[float, float]:
    """Rows and columns of X as given, not validated yet; infinite where they are not known."""
    shape = getattr(X, "shape", None)
    if isinstance(X, list | tuple):
        shape = (len(X), len(X[0]) if X and hasattr(X[0], "__len__") else math.inf)
    known = [size if isinstance(size, int) else math.inf for size in shape or ()]
    rows, columns, *_ = *known, math.inf, math.inf
    return rows, columns


def _threads_of_prediction(estimator, X) -> AbstractContextManager[None]:
    """As of a fit; those of few rows have no operation for which a pool would wake its threads."""
    if 0 < shape_of(X)[0] <= FEW_PREDICTED:
        return one_thread(pools=False)
    return _threads_of(estimator, X)


def _memory_device(estimator: Any, X: Any) -> torch.device | str:
    """The device whose memory counts: the CPU where a fit from a GPU is used without one.

    Of device="auto" that of the last fit, or that which a fit to X would take.
    """
    device = estimator.device
    if str(device) == "cpu" or not torch.cuda.is_available():
        return "cpu"
    if device != "auto":
        return device
    rows, columns = shape_of(X)
    least = getattr(estimator, "_least_gpu_rows", lambda n_columns: LEAST_GPU_ROWS)(columns)
    return getattr(estimator, "_latent_device", "cuda" if rows >= least else "cpu")


def asked_model(estimator: object) -> dict[str, Any]:
    """Return what defines the model that a fit is asked for, as plain values that compare."""
    return {name: _plain(getattr(estimator, name, None)) for name in _MODEL}


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        parameters = value.get_params(deep=False).items()
        return type(value).__name__, {name: _plain(part) for name, part in parameters}
    return np.asarray(value).tolist()


Callback = Callable[[int, Mapping[str, Any]], bool]
State = Callable[[], dict[str, Any]]


class InterruptFlag:
    """Whether Ctrl-C was pressed since the fit began."""

    def __init__(self) -> None:
        self.requested = False


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[InterruptFlag]:
    """Turn the first Ctrl-C into a flag; leave the second to the handler that was there before.

    Signals reach the main thread of Python only: in any other thread, and where SIGINT is ignored
    or handled outside Python, this does nothing. The handler found is restored at the end.

    Yields
    ------
    InterruptFlag
        Its ``requested`` turns True at the first Ctrl-C.
    """
    flag = InterruptFlag()
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT)
    if not in_main_thread or not callable(previous):
        yield flag
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        if flag.requested:
            previous(signum, frame)  # Python's own raises KeyboardInterrupt
            return
        flag.requested = True
        # A handler may run in the middle of another write to the same stream.
        with contextlib.suppress(RuntimeError):
            print("Stopping after this iteration (Ctrl-C again to abort).", file=sys.stderr)

    signal.signal(signal.SIGINT, handle)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, previous)


class FitSession:
    """What a running fit tells the callbacks of its estimator, and what they answer.

    Made by `fit_session`; used as::

        with fit_session(self, X, y) as session:
            with session.stage("hyperparameters", max_iter=100) as callback:
                model.learn(..., callback=callback)
            with session.stage("solve", state=lambda: {"weights_": model.weights()}) as callback:
                model.solve(..., callback=callback)
            self.weights_ = ...

    ``estimator.verbose`` is 1 for a line as the fit begins, as a stage ends and after every ten
    seconds of a stage, 2 for a line an iteration as well; ``data`` holds ``X``, ``y`` and
    ``metadata`` as the hooks of ``sklearn.callback`` receive them.
    """

    def __init__(self, estimator, context, data: dict[str, Any], interrupt: InterruptFlag) -> None:
        self.estimator = estimator
        self.context = context
        self.data = data
        self.interrupt = interrupt
        self.has_callbacks = bool(getattr(estimator, "_skl_callbacks", None))
        self.verbose = int(getattr(estimator, "verbose", 0))

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C was pressed since the fit began."""
        return self.interrupt.requested

    @contextlib.contextmanager
    def stage(
        self, name: str, *, max_iter: int | None = None, state: State | None = None
    ) -> Iterator[_Report]:
        """Open one iterative part of the fit.

        ``name`` is what the progress bar shows, ``max_iter`` the most iterations (None if not
        known). ``state`` returns the fitted attributes that make a copy of the estimator predict as
        if the fit stopped now. It is called only if a callback asks for the fitted estimator
        (``ScoringMonitor``); without it, such a callback skips the iterations. Yields
        ``callback(iteration, info) -> bool`` for the model; True asks it to stop.
        """
        context = None
        if self.has_callbacks:
            context = self.context.subcontext(task_name=name, max_subtasks=max_iter)
            context.call_on_fit_task_begin(estimator=self.estimator, **self.data)
        report = _Report(self, name, context, state)
        start = time.perf_counter()
        yield report
        if self.verbose:
            self.print(f"{name}: {report.summary()}, {time.perf_counter() - start:.1f} s")
        if context is not None:
            context.call_on_fit_task_end(
                estimator=self.estimator, **self.data, reconstruction_attributes=state
            )

    def print(self, message: str) -> None:
        """Print a line that begins with the name of the estimator, as scikit-learn does."""
        print(f"[{type(self.estimator).__name__}] {message}")


class _Report:
    """The callback handed to a model during one stage."""

    def __init__(self, session: FitSession, name: str, context, state: State | None) -> None:
        self.session = session
        self.name = name
        self.context = context
        self.state = state
        self.n_iter = 0
        self.info: Mapping[str, Any] = {}
        self.printed = time.perf_counter()

    def __call__(self, iteration: int, info: Mapping[str, Any]) -> bool:
        session = self.session
        self.n_iter += 1
        self.info = info
        is_due = time.perf_counter() - self.printed > SECONDS_A_LINE
        if session.verbose > 1 or (session.verbose and is_due):
            session.print(f"{self.name}: iteration {iteration}{_format(info)}")
            self.printed = time.perf_counter()
        asked = self.context is not None and self._ask()
        return asked or session.interrupted

    def _ask(self) -> bool:
        """Tell the callbacks that an iteration ended; return whether one of them says stop.

        A model reports an iteration when it is over, so both hooks run here.
        """
        session = self.session
        context = self.context.subcontext(task_name="iteration")
        context.call_on_fit_task_begin(estimator=session.estimator, **session.data)
        return context.call_on_fit_task_end(
            estimator=session.estimator, **session.data, reconstruction_attributes=self.state
        )

    def summary(self) -> str:
        """Return the number of iterations and the last values reported."""
        return f"{self.n_iter} iterations{_format(self.info)}"


def _size(X: Any) -> str:
    """The shape of X as text, not validated yet; dask does not know the rows of a data frame."""
    shape = getattr(X, "shape", (len(X),) if hasattr(X, "__len__") else ())
    return " x ".join(f"{n}" if isinstance(n, int) else "?" for n in shape)


def _format(info: Mapping[str, Any]) -> str:
    """Return the scalars of ``info`` as text; what else a model reports is left out."""
    return "".join(
        f", {key} {float(v):.4g}"
        for key, v in info.items()
        if isinstance(v, int | float) or getattr(v, "ndim", None) == 0
    )


@contextlib.contextmanager
def fit_session(estimator, X, y, *, sample_weight=None) -> Iterator[FitSession]:
    """Run the body of a fit under its callbacks and under `stop_on_interrupt`.

    The fitted attributes must be set before the end of the ``with`` block: it is there that the
    callbacks hear that the fit is over. The method that opens the session must be decorated by
    ``fit_context`` of `skgp.estimators._parameters`, which tears the callbacks down.

    Within ``GridSearchCV`` and its like Ctrl-C is left alone, so that it ends the search and not
    one of its fits. ``cross_validate`` does not make itself known: there, press it twice.

    Sets ``interrupted_``, and warns if Ctrl-C stopped the fit. X and y are as the user gave them: a
    callback may score on them.
    """
    metadata = {} if sample_weight is None else {"sample_weight": sample_weight}
    data = {"X": X, "y": y, "metadata": metadata}
    context = estimator._init_callback_context(max_subtasks=estimator._n_stages)
    context.call_on_fit_task_begin(estimator=estimator, **data)
    guard = (
        contextlib.nullcontext(InterruptFlag())
        if is_one_of_many_fits(estimator)
        else stop_on_interrupt()
    )
    with guard as interrupt:
        session = FitSession(estimator, context, data, interrupt)
        if session.verbose:
            session.print(f"fit of {_size(X)}")
        yield session
    estimator.interrupted_ = session.interrupted
    warn_of_idle_options(estimator, fitted=True)
    if session.interrupted:
        warn_caller(
            f"The fit of {type(estimator).__name__} was interrupted by Ctrl-C. It keeps what it "
            "had learnt by then and can predict; fit again for the full training.",
            ConvergenceWarning,
        )
    context.call_on_fit_task_end(estimator=estimator, **data, reconstruction_attributes={})
