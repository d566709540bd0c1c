"""The threads of a fit or a prediction (see `skgp.linalg.threads`)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import joblib

from skgp.linalg.threads import one_thread

__all__ = ["in_few_threads"]

#: Rows from which ``n_jobs`` holds throughout. A fit of 80 rows in two threads took ten to fifty
#: times its seconds on two processors that other processes shared, in waits at barriers.
_MANY_ROWS = 2000


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
    return one_thread(n_jobs, throughout=n_rows >= _MANY_ROWS)
