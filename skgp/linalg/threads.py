"""How many threads a fit takes.

A pool of threads meets at a barrier after every operation. Where that takes microseconds, the
barrier takes longer than the second thread saves, and on a busy machine, where the scheduler has
given the other thread's processor away, a whole time slice: with two threads on two processors that
four processes share, the Cholesky factor of a matrix of 200 rows took 8 ms in place of 0.2 and one
of 60 rows 0.25 ms in place of 0.04; a fit has thousands of them. L-BFGS-B of SciPy, on vectors of
three numbers, took half of a fit's time by its BLAS alone.

So a fit and a prediction run in one thread (`one_thread`), the pools of NumPy's and SciPy's BLAS
and of OpenMP included, and take up the threads they found for a single operation that lasts longer
than such waits (`large_operation`): a product or a factor of large matrices.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from threadpoolctl import ThreadpoolController

from skgp.linalg.defaults import LARGE_FLOPS

# Threads that a large operation may take; 0 outside of `one_thread`, where nothing is changed.
_available: ContextVar[int] = ContextVar("available", default=0)  # mathematical


@contextlib.contextmanager
def one_thread(
    n_threads: int | None = None,  # of large operations; by default as many as torch has
    *,
    throughout: bool = False,  # not in large operations alone
    pools: bool = True,  # those of NumPy's and SciPy's BLAS and of OpenMP, too, which takes 0.05 ms
) -> Iterator[None]:
    """Work in one thread, save in large operations; restore what was found.

    Of nested calls the outermost decides.
    """
    if _available.get():
        yield
        return
    found = torch.get_num_threads()
    token = _available.set(n_threads or found)
    n_threads = n_threads if throughout and n_threads else 1
    try:
        with _pools.limit(n_threads) if pools else contextlib.nullcontext():
            torch.set_num_threads(n_threads)
            yield
    finally:
        torch.set_num_threads(found)
        _available.reset(token)


@contextlib.contextmanager
def large_operation(flops: float) -> Iterator[None]:
    """Give torch all threads that a fit may take, if an operation of so many flops is large."""
    found = torch.get_num_threads()
    if flops < LARGE_FLOPS or _available.get() <= found:
        yield
        return
    torch.set_num_threads(_available.get())
    try:
        yield
    finally:
        torch.set_num_threads(found)


class _Pools:
    """The pools of libraries besides torch.

    Those of OpenMP have a size for each thread of Python that calls them. Those of BLAS have one
    for the process: the first fit to begin sets it, and the last to end restores it.
    """

    def __init__(self) -> None:
        self._lock, self._n_users, self._n_modules = threading.Lock(), 0, 0
        self._libraries: dict[str, ThreadpoolController] = {}
        self._blas: contextlib.AbstractContextManager = contextlib.nullcontext()

    def _find(self) -> dict[str, ThreadpoolController]:
        """The libraries that are loaded, by kind; looked for anew (3 ms) after an import."""
        if self._n_modules != len(sys.modules):
            found = ThreadpoolController()
            self._libraries = {kind: found.select(user_api=kind) for kind in ("openmp", "blas")}
            self._n_modules = len(sys.modules)
        return self._libraries

    @contextlib.contextmanager
    def limit(self, n_threads: int) -> Iterator[None]:
        """Limit all pools to so many threads; the last user restores them."""
        with self._lock:
            openmp = self._find()["openmp"].limit(limits=n_threads)
            if not self._n_users:
                self._blas = self._libraries["blas"].limit(limits=n_threads)
            self._n_users += 1
        try:
            with openmp:
                yield
        finally:
            with self._lock:
                self._n_users -= 1
                if not self._n_users:
                    self._blas.__exit__(None, None, None)


_pools = _Pools()
