r"""Hyper-parameters of latent Vecchia models by Laplace's evidence.

Labels have no density of their own given neighbours' labels alone, f has: the evidence is of the
observations taken, with their neighbours among these (:mod:`skgp.inference.vecchia.laplace`).
L-BFGS-B maximises it on a random subset; its probes are the same at every theta, and so is the
mode's start, in f. A dense Laplace approximation of up to 1000 observations, by which kernels are
chosen (:mod:`skgp.learning.classification_hyperparameters`), is where it begins; its ratios of
length scales stay, as they do not gain: of 10000 rows of kin40k above the median the mean log-loss
rises from .203 to .223 where each moves by the evidence of 2000. Up to `SearchSettings.exact_rows`
observations it decides alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import LATENT_JITTER
from skgp.inference.vecchia.conditionals import Conditionals
from skgp.inference.vecchia.hessian import probes
from skgp.inference.vecchia.laplace import LatentMode, evidence, find_mode
from skgp.inference.vecchia.root import VecchiaRoot
from skgp.learning.classification_hyperparameters import (
    directions,
    fit_classification_hyperparameters,
    stratified_order,
)
from skgp.learning.defaults import VECCHIA_MOVED, VECCHIA_PROBES
from skgp.learning.search import HyperparameterFit, SearchSettings
from skgp.learning.vecchia import VecchiaSettings, choose_inducing, neighbors_of
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_within
from skgp.optim.stopping import StopRecorder


class LatentEvidence:
    """Minus Laplace's log evidence an observation, in nats, at many theta.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    data : Data
        Ordered observations; y of shape (n, c).
    index : Tensor of int64, shape (n, H)
        Neighbours; the own index in places left.
    Z : Tensor of shape (m, d)
        Inducing points.
    likelihood : Likelihood
    offset : Tensor of shape (c,)
        Prior means.
    generator : torch.Generator
        Of the probes.

    Notes
    -----
    ``O(n H^2 (H + d + m) + k c n H)`` an evaluation with k probes and iterations.
    """

    def __init__(
        self,
        kernel,
        data: Data,
        index: Tensor,
        Z: Tensor,
        likelihood: Any,
        offset: Tensor,
        generator: torch.Generator,
    ) -> None:
        own = torch.arange(len(data), device=index.device)[:, None]
        self.kernel, self.data, self.group = kernel, data, torch.cat([index, own], 1)
        self.Z, self._likelihood, self.offset = Z, likelihood, offset
        self._generator, self._probes = generator, tuple[Tensor, ...]()
        self._last: tuple[Tensor, Tensor] | None = None  # f without offset (n, c) and u (m, c)

    def some(self, kernel, rows: Tensor) -> LatentEvidence:
        """Of sorted rows alone, with the neighbours that this kernel sees among them."""
        data = self.data.take(rows)
        index = neighbors_of(kernel, data.X, self.group.shape[1] - 1, self.Z)
        model = self._likelihood, self.offset, self._generator
        return LatentEvidence(kernel, data, index, self.Z, *model)

    def conditionals(self, theta: np.ndarray) -> Conditionals:
        """Of f at theta."""
        X = self.data.X
        noise = X.new_full((len(X),), LATENT_JITTER)
        return Conditionals(self.kernel, X, self.group, noise, self.Z, X.new_tensor(theta))

    def mode(self, conditionals: Conditionals, callback: Callback | None = None) -> LatentMode:
        """From that of the last theta."""
        root, data = VecchiaRoot(conditionals), self.data
        start = None if self._last is None else root.whitened(*self._last)
        mode = find_mode(
            root,
            data.y,
            self._likelihood,
            self.offset,
            data.weight,
            start=start,
            callback=callback,
        )
        self._last = mode.latent - self.offset, mode.weights[: root.n_inducing]
        return mode

    def probes(self, root: VecchiaRoot) -> tuple[Tensor, Tensor]:
        """The same at every theta."""
        if not self._probes:
            n_probes = -(-VECCHIA_PROBES // self.data.y.shape[1])
            self._probes = probes(root, n_probes, self._generator)
        return self._probes  # type: ignore[return-value]

    def __call__(self, theta: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and its gradient (n_theta,)."""
        conditionals = self.conditionals(theta)
        mode = self.mode(conditionals)
        values, terms = evidence(mode, self.probes(mode.root))
        gradient, _ = conditionals.gradient(terms.cotangents)
        total = self.data.total
        return -float(values.sum()) / total, -gradient.cpu().numpy() / total


def fit_latent_likelihood(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or of the best of several, from labels.

    `data` are float64, in the order of the approximation, y (n, c) of -1 and 1. The callback is
    called with (evaluation, {"loss": nats an observation}); True ends the search with what it has.
    """
    recorder = StopRecorder(callback)
    found = fit_classification_hyperparameters(
        kernels,
        data.X,
        data.y,
        offset=offset,
        likelihood=likelihood,
        generator=generator,
        row_weight=data.weight,
        callback=recorder,
    )
    kernel: Any = found.kernel
    history = list(found.history)
    if recorder.stopped or kernel.n_dims == 0 or len(data) <= SearchSettings.exact_rows:
        return found
    order = stratified_order(data.y, generator)
    some = data.take(order[: settings.n_rows].sort().values)

    def tell(loss: float) -> bool:
        history.append(-float(loss))
        return bool(recorder(len(history), {"loss": float(loss)}))

    moves = directions(kernel, max_free=1)
    for _ in range(settings.n_stages):
        before = kernel.theta
        Z = choose_inducing(kernel, some.X, settings.n_inducing or 0, generator)
        index = neighbors_of(kernel, some.X, settings.n_neighbors, Z)
        objective = LatentEvidence(kernel, some, index, Z, likelihood, offset, generator)
        kernel = _climbed(kernel, objective, moves, settings, tell)
        if recorder.stopped or np.abs(kernel.theta - before).max() < VECCHIA_MOVED:
            break
    return replace(found, kernel=kernel, method="Laplace evidence", history=history)


def _climbed(
    kernel, objective: LatentEvidence, moves: np.ndarray, settings: VecchiaSettings, tell: Any
) -> Any:
    """The kernel where L-BFGS-B along the moves (n_theta, p) finds the least loss."""
    start = kernel.theta
    gaps = kernel.bounds - start[:, None]
    bounds = np.array([(gaps[on, 0].max(), gaps[on, 1].min()) for on in (moves > 0).T])

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(start + moves @ z)
        return value, moves.T @ gradient

    z, _ = minimize_within(
        loss,
        np.zeros(moves.shape[1]),
        bounds,
        max_iter=settings.max_iter,
        tol=settings.tol,
        tell=tell,
    )
    return kernel.clone_with_theta(start + moves @ z)
