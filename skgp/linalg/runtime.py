"""What the machine gives a fit: memory, threads, and tensors that pickle without a device.

A fit and a prediction have a budget of bytes (`memory_limit`), which whatever they call asks for:
what is stored and not made anew (`memory_budget`), the rows of a tile (`tile_rows`), and whether
there is room at all (`require_memory`).

They run in one thread (`one_thread`), the pools of BLAS and OpenMP included, and take up those they
found for a `large_operation`, which lasts longer than a pool's barriers: with two threads on two
processors that four processes share, a Cholesky factor of 200 rows took 8 ms in place of 0.2.
"""

import contextlib
import copy
import functools
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import effective_n_jobs
from threadpoolctl import ThreadpoolController
from torch import Tensor

from skgp.linalg import defaults

#: Called with the number of an iteration and what is known by then, by name; True ends the search.
Callback = Callable[[int, dict], bool | None]

# (limit, in use) of the control groups that containers are kept in, versions 2 and 1
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

# Bytes of the fit or prediction under way; None outside of `memory_limit`.
_budget: ContextVar[float | None] = ContextVar("budget", default=None)


class MemoryBudgetError(ValueError, MemoryError):
    """What was asked for does not fit in memory."""


@contextlib.contextmanager
def memory_limit(asked: float | None, device: torch.device | str = "cpu") -> Iterator[None]:
    """Set the `memory_budget` of what runs within, in bytes; of nested calls the outermost decides.

    None takes 70% of `free_memory`, rounded down to a step of a quarter octave, so that equal fits
    meet equal budgets though some megabytes come and go.
    """
    if _budget.get() is not None:
        yield
        return
    token = _budget.set(_share_of_free(device) if asked is None else float(asked))
    try:
        yield
    finally:
        _budget.reset(token)


def memory_budget(device: torch.device | str = "cpu") -> float:
    """Bytes that a fit or a prediction may take beyond its data and its model.

    Outside of `memory_limit` 70% of what is free on the device.
    """
    budget = _budget.get()
    return _share_of_free(device) if budget is None else budget


def tile_rows(row_bytes: float, cap: float = defaults.LARGE_TILE) -> int:
    """Rows of a tile, at least one: in `cap` bytes, chosen for speed, and a share of the budget.

    Where there is memory enough the cap decides: tiles, and last digits, do not depend on what
    happens to be free.
    """
    budget = _budget.get()
    size = cap if budget is None else min(cap, defaults.TILE_SHARE * budget)
    return max(1, math.floor(size / max(row_bytes, 1)))


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Refuse what takes more bytes than the budget: `what`, with its sizes, and a remedy."""
    budget = memory_budget()
    if needed > budget:
        raise MemoryBudgetError(
            f"{what} takes {needed / 1e9:.3g} GB, and the budget is {budget / 1e9:.3g} GB. "
            f"{remedy}, or raise memory_budget (None: 70% of what is free)."
        )


class WithinBudget:
    """A function that keeps to this budget, which jobs of joblib share, wherever it runs."""

    def __init__(self, function: Callable, n_jobs: int | None = None) -> None:
        budget, n_workers = _budget.get(), effective_n_jobs(n_jobs)
        self._function, self._share = function, None if budget is None else budget / n_workers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        with contextlib.nullcontext() if self._share is None else memory_limit(self._share):
            return self._function(*args, **kwargs)


def _share_of_free(device: torch.device | str) -> float:
    return 2.0 ** (math.floor(4 * math.log2(defaults.MEMORY_SHARE * free_memory(device))) / 4)


def free_memory(device: torch.device | str = "cpu") -> float:
    """Bytes free on a device; of the CPU also within the container that the process is in."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return float(torch.cuda.mem_get_info(device)[0])
    tick = math.floor(time.monotonic() / defaults.MEMORY_TICK)
    reads = [(_free_of_machine,), *((_free_of_group, paths) for paths in _CONTROL_GROUPS)]
    known = [bound for read in reads if (bound := _read(tick, *read)) is not None]
    return max(min(known, default=defaults.MEMORY_UNKNOWN), 2.0**20)


@functools.lru_cache(maxsize=2**3)
def _read(tick: int, read: Callable, *args: Any) -> float | None:
    """What the system says, once a tick: a prediction of one row takes no longer than to ask it."""
    return read(*args)


def _free_of_machine() -> float | None:
    """What could be had without swapping, caches of files included."""
    try:
        with open("/proc/meminfo", "rb") as lines:
            found = next(line for line in lines if line.startswith(b"MemAvailable:"))
        return 1024.0 * float(found.split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        pass
    try:
        return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_of_group(paths: tuple[str, str]) -> float | None:
    try:
        limit, used = (float(Path(path).read_bytes()) for path in paths)
    except (OSError, ValueError):  # there is none, or its limit is "max"
        return None
    return max(limit - used, 0.0)


def asks_for_gradients(X: Tensor) -> bool:
    """Whether what is made of X is to be differentiable in it."""
    return X.requires_grad and torch.is_grad_enabled()


def differentiable_in_rows(predict: Callable) -> Callable:
    """Decorate a method of a posterior: a graph only where the rows X (n, d) ask for gradients."""

    @functools.wraps(predict)
    def recorded(self: Any, X: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(asks_for_gradients(X)):
            return predict(self, X, *args, **kwargs)

    return recorded


def constant(
    values: Any, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """A few numbers on a device, where they stay: equal ones cross once. Not to be changed."""
    device = torch.device("cpu" if device is None else device)
    if device.type == "cpu" or isinstance(values, Tensor):
        return torch.as_tensor(values, dtype=dtype, device=device)
    array = np.asarray(values, dtype=np.float64)
    return _kept(array.tobytes(), array.shape, dtype, device)


def constant_like(values: Any, x: Tensor) -> Tensor:
    """`constant` in the dtype and on the device of x."""
    return constant(values, dtype=x.dtype, device=x.device)


def standard_normal(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draws on the generator's device."""
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)


@functools.lru_cache(maxsize=defaults.KEPT_CONSTANTS)
@torch.inference_mode(False)  # whatever the mode of who asks first
def _kept(numbers: bytes, shape: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(np.frombuffer(numbers).reshape(shape), dtype=dtype, device=device)


def namespace(x: Tensor | np.ndarray) -> Any:
    """NumPy of an array, which is how few numbers take less than overheads of torch; else torch."""
    return np if isinstance(x, np.ndarray) else torch


def to_arrays(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """Arrays of some tensors of one device, in a single transfer; of the CPU without a copy."""
    tensors = tuple(tensor.detach() for tensor in tensors)
    if len(tensors) > 1 and tensors[0].device.type != "cpu":
        flat = torch.cat([t.double().reshape(-1) for t in tensors]).cpu()
        parts = flat.split([t.numel() for t in tensors])
        tensors = tuple(p.reshape(t.shape).to(t.dtype) for p, t in zip(parts, tensors, strict=True))
    return tuple(tensor.cpu().numpy() for tensor in tensors)


@dataclass(frozen=True)
class TensorArray:
    """Stands for a tensor."""

    array: np.ndarray


@dataclass(frozen=True)
class DTypeName:
    """Stands for a ``torch.dtype``."""

    name: str


class TensorState:
    """Stores tensors as NumPy arrays: small whatever storage they view, loadable without a GPU.

    Tensors and dtypes inside lists, tuples and dictionaries too. Deep copies keep their devices.
    Cached properties are worked out anew; a subclass says in `_lasting` what else is.
    """

    def _lasting(self) -> dict[str, Any]:
        """The attributes that a pickle or a copy elsewhere keeps; a new dictionary."""
        own = type(self)
        return {
            name: value
            for name, value in self.__dict__.items()
            if not isinstance(getattr(own, name, None), functools.cached_property)
        }

    def __getstate__(self) -> dict[str, Any]:
        return _stored(self._lasting())

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_restored(state))

    @property
    def device(self) -> torch.device:
        """Where its tensors lie; the CPU where it has none."""
        return next(_devices(self._lasting()), torch.device("cpu"))

    def _copy(self, **changes: Any) -> Any:
        """The same, all attributes shared but those given."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, **changes)
        return other

    def to(self, *args: Any) -> Any:
        """A copy with every tensor on a device or in a dtype, as ``Tensor.to``; shares the rest.

        What is not lasting is worked out anew.
        """
        other = object.__new__(type(self))
        other.__setstate__(_moved(self._lasting(), args))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def _stored(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorArray(value.detach().cpu().numpy())
    if isinstance(value, torch.dtype):
        return DTypeName(str(value).removeprefix("torch."))
    return _mapped(_stored, value)


def _restored(value: Any) -> Any:
    if isinstance(value, TensorArray):
        with warnings.catch_warnings():  # what joblib's workers map stays read only
            warnings.filterwarnings("ignore", ".*not writable", UserWarning)
            return torch.from_numpy(value.array)
    if isinstance(value, DTypeName):
        return getattr(torch, value.name)
    return _mapped(_restored, value)


def _moved(value: Any, args: tuple) -> Any:
    if isinstance(value, Tensor | TensorState):
        return value.to(*args)
    return _mapped(lambda part: _moved(part, args), value)


def _devices(value: Any) -> Iterator[torch.device]:
    """Devices of the tensors in states and plain containers."""
    if isinstance(value, Tensor):
        yield value.device
    elif isinstance(value, TensorState):
        yield from _devices(value._lasting())
    elif type(value) in (list, tuple, dict):
        for part in value.values() if type(value) is dict else value:
            yield from _devices(part)


def _mapped(function: Any, value: Any) -> Any:
    """Apply a function to what a plain container holds."""
    if type(value) is dict:
        return {key: function(part) for key, part in value.items()}
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value


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
    """Give torch and BLAS all threads that a fit may take, if so many flops are large."""
    found = torch.get_num_threads()
    if flops < defaults.LARGE_FLOPS or _available.get() <= found:
        yield
        return
    torch.set_num_threads(_available.get())
    try:
        with _pools.lift(_available.get()):
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

    @contextlib.contextmanager
    def limit(self, n_threads: int) -> Iterator[None]:
        """Limit all pools to so many threads; the last user restores them."""
        with self._lock:
            if self._n_modules != len(sys.modules):  # libraries are looked for anew (3 ms)
                found = ThreadpoolController()
                self._libraries = {kind: found.select(user_api=kind) for kind in ("openmp", "blas")}
                self._n_modules = len(sys.modules)
            openmp = self._libraries["openmp"].limit(limits=n_threads)
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

    def lift(self, n_threads: int) -> contextlib.AbstractContextManager:
        """Give BLAS so many threads for a while, where one fit alone limits it."""
        if self._n_users != 1:
            return contextlib.nullcontext()
        return self._libraries["blas"].limit(limits=n_threads)


_pools = _Pools()
