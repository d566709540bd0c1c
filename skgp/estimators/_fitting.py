"""What every ``fit`` obeys: it is a transaction, in few threads, and warm starts have one rule.

A warm start goes on from the last fit where that was asked for the same model of the same columns
and classes, and begins anew elsewhere: where it began, how long it ran and what it learned from may
all be others. The ``optimizer`` may change too: None keeps the hyper-parameters where the last fit
left them.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import joblib
import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._compat import validated_context
from skgp.estimators.defaults import MANY_ROWS
from skgp.linalg.runtime import one_thread

__all__ = ["asked_model", "fit_context", "in_few_threads"]

#: What defines the model; an estimator has some of them.
_MODEL = (
    "kernel",
    "likelihood",
    "link",
    "degrees_of_freedom",
    "method",
    "basis",
    "projection",
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
    takes the threads that `skgp.linalg.runtime` says.
    """
    validated = validated_context(prefer_skip_nested_validation=prefer_skip_nested_validation)

    def decorator(method: Callable) -> Callable:
        run = validated(in_few_threads(method))
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


def in_few_threads(method: Callable) -> Callable:
    """Decorate a public method that fits or predicts."""

    @functools.wraps(method)
    def limited(self, *args, **kwargs):
        with _threads_of(self, args[0] if args else kwargs.get("X", ())):
            return method(self, *args, **kwargs)

    return limited


def _threads_of(estimator, X) -> AbstractContextManager[None]:
    """One thread, or for many rows as many as ``n_jobs`` asks for in joblib's count."""
    if estimator._n_threads is None:
        return one_thread()
    n_jobs = joblib.effective_n_jobs(estimator._n_threads)
    shape = getattr(X, "shape", None)
    n_rows = shape[0] if shape else len(X) if hasattr(X, "__len__") else 0
    return one_thread(n_jobs, throughout=n_rows >= MANY_ROWS)


def asked_model(estimator: object) -> dict[str, Any]:
    """Return what defines the model that a fit is asked for, as plain values that compare."""
    return {name: _plain(getattr(estimator, name, None)) for name in _MODEL}


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        parameters = value.get_params(deep=False).items()
        return type(value).__name__, {name: _plain(part) for name, part in parameters}
    return np.asarray(value).tolist()
