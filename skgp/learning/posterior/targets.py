"""Stochastic gradients of the log posterior as samplers ask for them.

A sampler names a realisation of the noise by a number, so that it can ask for the same one at
several places; a chain remembers the last solution, to start the next from; workers need a field
each, since it holds the kernel matrix of its last u.
"""

import copy
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.learning.posterior.anchored_gradient import AnchoredGradient
from skgp.learning.posterior.set_up import SetUp
from skgp.learning.posterior.stochastic_gradient import (
    GradientEstimate,
    Probes,
    StochasticGradient,
)
from skgp.linalg.exceptions import NotPositiveDefiniteError, NumericalWarning

__all__ = ["SEEDS", "BankGradient", "Memory", "SeededGradient", "make_target"]

SEEDS = 2**31 - 1
_BANK, _LARGEST_BANK = 32, 128
_BANK_ERROR = 0.005  # variance of the mean over the bank, whitened, that decides between them
_MEAN_ERROR, _MOST_PROBES = 0.0005, 4096  # likewise of the mean gradient at the anchor
_BANK_MEMORY = 0.25  # of the budget


@dataclass
class Memory:
    """What a chain remembers of its gradients."""

    warm: Tensor | None = None
    n_products: int = 0
    n_unsolved: int = 0
    entry: int = -1
    probes: Probes | None = None


class SeededGradient:
    """Gradients for a sampler; picklable. Each thread has a field of its own: a kernel matrix."""

    n_entries = SEEDS

    def __init__(self, field: StochasticGradient) -> None:
        self.field = field
        self._own = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._own = threading.local()

    def __call__(
        self, u: np.ndarray, entry: int, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[np.ndarray, Memory]:
        """See :class:`~skgp.samplers.NoisyGradient`; NaN where the kernel matrix is singular."""
        memory = Memory() if memory is None else memory
        coins = torch.Generator().manual_seed(int(rng.integers(SEEDS)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # counted instead
                at = self._estimate(u, entry, coins, memory)
        except (NotPositiveDefiniteError, torch.linalg.LinAlgError):
            return np.full(len(u), np.nan), memory
        memory.warm = at.warm if bool(torch.isfinite(at.warm).all()) else None
        memory.n_products += at.n_iter
        memory.n_unsolved += not at.converged
        return at.gradient, memory

    def _own_field(self) -> StochasticGradient:
        if not hasattr(self._own, "field"):
            self._own.field = copy.copy(self.field)
            self._own.field.operator = copy.copy(self.field.operator)  # leaves its matrix behind
        return self._own.field

    def _estimate(self, u, entry, coins, memory) -> GradientEstimate:
        """With the probes of a seed: the gradients of [1]_."""
        field = self._own_field()
        if memory.entry != entry:
            memory.probes = field.draw_probes(torch.Generator().manual_seed(entry))
            memory.entry = entry
        return field.estimate(u, memory.probes, coins, warm=memory.warm)


class BankGradient(SeededGradient):
    """Gradients anchored at the mode."""

    def __init__(self, anchored: AnchoredGradient) -> None:
        super().__init__(anchored.field)
        self.anchored, self.n_entries = anchored, anchored.n_entries

    def _estimate(self, u, entry, coins, memory) -> GradientEstimate:
        if not hasattr(self._own, "anchored"):
            self._own.anchored = copy.copy(self.anchored)
            self._own.anchored.field = self._own_field()
        return self._own.anchored.estimate(u, coins, entry=entry, warm=memory.warm)


def make_target(
    sampler: str,
    start: SetUp,
    generator: torch.Generator,
    dtype: torch.dtype,
    memory_budget: float,
    tell: Callable[[dict], None] | None = None,
) -> tuple[SeededGradient, float]:
    """The gradients, and the variance of the mean at their anchor, whitened.

    `tell` is that of :class:`AnchoredGradient`.
    """
    field = start.field
    if sampler == "sgld":
        plain = StochasticGradient(
            field.posterior,
            rank=0,
            n_probes=field.n_probes,
            dtype=dtype,
            memory_budget=memory_budget,
        )
        plain.solver = dict(field.solver)
        return SeededGradient(plain), 0.0
    size = field.n_probes * (len(field.posterior.data.y) + field.rank)
    affordable = int(_BANK_MEMORY * memory_budget / (size * dtype.itemsize))
    noise = start.noise if math.isfinite(start.noise) else math.inf
    n_entries = math.ceil(min(max(noise / _BANK_ERROR, _BANK), _LARGEST_BANK, max(affordable, 2)))
    n_probes = math.ceil(min(field.n_probes * noise / _MEAN_ERROR, _MOST_PROBES))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # the error measured tells
        anchored = AnchoredGradient(
            field, start.mode, generator, n_entries=n_entries, n_probes=n_probes, tell=tell
        )
    factor = np.linalg.cholesky(start.covariance)
    error = np.linalg.eigvalsh(factor.T @ anchored.mean_covariance @ factor)[-1]
    return BankGradient(anchored), float(error)
