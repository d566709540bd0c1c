"""The threads of a fit or a prediction (see `skgp.linalg.threads`)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import joblib

from skgp.linalg.threads import one_thread

__all__ = ["in_few_threads", "threads_of"]


def threads_of(estimator) -> AbstractContextManager[None]:
    """One thread, or as many as ``n_jobs`` asks for in joblib's count, for a while."""
    n_jobs = estimator._n_threads
    return one_thread(None if n_jobs is None else joblib.effective_n_jobs(n_jobs))


def in_few_threads(method: Callable) -> Callable:
    """Decorate a public method that predicts."""

    @functools.wraps(method)
    def limited(self, *args, **kwargs):
        with threads_of(self):
            return method(self, *args, **kwargs)

    return limited
