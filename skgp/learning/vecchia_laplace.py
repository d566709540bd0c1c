r"""Hyper-parameters of latent Vecchia models by Laplace's evidence.

Labels and counts have no density of their own given neighbours' alone, f has: the evidence is of
the observations taken, with their neighbours among these (:mod:`skgp.inference.vecchia.laplace`).
L-BFGS-B maximises it on a random subset; its probes are the same at every theta, and so is the
mode's start, in f. Labels are for :mod:`skgp.learning.vecchia_labels`.

Counts and other numbers (`fit_latent_numbers`) tell of all length scales, which move with the
parameters of the likelihood. The search begins at a dense GP of numbers that stand for f.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import LATENT_DRAWS, LATENT_JITTER
from skgp.inference.vecchia.conditionals import Conditionals, VecchiaRoot
from skgp.inference.vecchia.hessian import probes
from skgp.inference.vecchia.laplace import (
    EvidenceTerms,
    LatentMode,
    LatentPosterior,
    evidence,
    find_mode,
)
from skgp.kernels.expression import split_noise
from skgp.learning import defaults
from skgp.learning.classification_hyperparameters import bounds_along
from skgp.learning.local.hyperparameters import search_hyperparameters
from skgp.learning.search import HyperparameterFit, SearchSettings
from skgp.learning.vecchia import VecchiaSettings, choose_inducing, neighbors_of
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_within
from skgp.optim.stopping import LossRecorder


class LatentEvidence:
    """Minus Laplace's log evidence an observation, in nats, at many theta.

    ``O(n H^2 (H + d + m) + k c n H)`` an evaluation with k probes and iterations.
    """

    def __init__(
        self,
        kernel,  # without noise
        data: Data,  # in their order; y (n, c)
        index: Tensor,  # (n, H), neighbours; the own index in places left
        Z: Tensor,  # (m, d), inducing points
        likelihood: Any,
        offset: Tensor,  # (c,), prior means
        generator: torch.Generator,  # of the probes
        start: Tensor | None = None,  # (n, c), f near the first mode
    ) -> None:
        own = torch.arange(len(data), device=index.device)[:, None]
        self.kernel, self.data, self.group = kernel, data, torch.cat([index, own], 1)
        self.Z, self._likelihood, self.offset = Z, likelihood, offset
        self._generator, self._probes = generator, tuple[Tensor, ...]()
        self.start = start  # then f at the last mode

    def some(self, kernel, rows: Tensor) -> LatentEvidence:
        """Of sorted rows alone, with the neighbours that this kernel sees among them.

        Of the inducing points, which leave less and less variance, the first `VECCHIA_INDUCING`.
        """
        data, Z = self.data.take(rows), self.Z[: defaults.VECCHIA_INDUCING]
        index = neighbors_of(kernel, data.X, self.group.shape[1] - 1, Z)
        model = self._likelihood, self.offset, self._generator
        start = None if self.start is None else self.start[rows]
        return LatentEvidence(kernel, data, index, Z, *model, start)

    def conditionals(self, theta: np.ndarray) -> Conditionals:
        """Of f at theta."""
        X = self.data.X
        noise = X.new_full((len(X),), LATENT_JITTER)
        return Conditionals(self.kernel, X, self.group, noise, self.Z, X.new_tensor(theta))

    def likelihood(self, parameters: Tensor) -> Any:
        """That of the observations, at the logarithms of its free parameters (p,)."""
        return self._likelihood.with_parameters(parameters).at(self.data.offset)

    def mode(
        self,
        conditionals: Conditionals,
        callback: Callback | None = None,
        parameters: Tensor | None = None,
        **options: float,
    ) -> LatentMode:
        """From that of the last theta; without `parameters` (p,) at the likelihood's first ones.

        Options are those of `find_mode`.
        """
        root, data = VecchiaRoot(conditionals), self.data
        if parameters is None:
            parameters = self._likelihood.initial(data.X)
        mode = find_mode(
            root,
            data.y,
            self.likelihood(parameters),
            self.offset,
            data.weight,
            start=self.start,
            callback=callback,
            **options,
        )
        self.start = mode.latent
        return mode

    def probes(self, root: VecchiaRoot) -> tuple[Tensor, Tensor]:
        """The same at every theta."""
        if not self._probes:
            n, c = self.data.y.shape  # many observations have many terms each
            n_probes = math.ceil(
                defaults.VECCHIA_PROBES / c * min(1.0, defaults.VECCHIA_PROBED / n)
            )
            self._probes = probes(root, n_probes, self._generator)
        return self._probes  # type: ignore[return-value]

    def posterior(
        self,
        mode: LatentMode,
        kernel,
        n_neighbors: int,
        seed: int | None = None,  # of the draws; that of the generator by default
        most_draws: int = LATENT_DRAWS,
    ) -> LatentPosterior:
        """Predictions from `n_neighbors` of the points, given their mode under this kernel."""
        if seed is None:
            seed = int(torch.randint(2**31, (), generator=self._generator))
        data, Z = self.data, self.Z
        return LatentPosterior(
            kernel,
            data.X,
            mode.latent - self.offset,
            data.X.new_full((len(data),), LATENT_JITTER),
            Z,
            mode.weights[: len(Z)],
            torch.eye(len(Z)).to(Z),
            n_neighbors,
            self.offset,
            self.group.to(torch.int32),
            mode.curvature,
            seed,
            most_draws,
        )

    def __call__(self, place: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss, less the log prior of the likelihood's parameters, and its gradient.

        At theta (n_theta,), followed by the logarithms of these parameters (p,).
        """
        theta, rest = np.split(place, [self.kernel.n_dims])
        conditionals, parameters = self.conditionals(theta), self.data.X.new_tensor(rest)
        with warnings.catch_warnings():  # a search may pass through hyper-parameters of no use
            warnings.simplefilter("ignore", NumericalWarning)
            mode = self.mode(conditionals, parameters=parameters)
            values, terms = evidence(mode, self.probes(mode.root))
        gradient, _ = conditionals.gradient(terms.cotangents)
        prior, of_parameters = self._of_parameters(terms, parameters)
        gradient, total = torch.cat([gradient, of_parameters]), self.data.total
        return -float(values.sum() + prior) / total, -gradient.cpu().numpy() / total

    def _of_parameters(self, terms: EvidenceTerms, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The log prior of the likelihood's parameters; gradient (p,) of it and the evidence."""
        parameters = parameters.clone().requires_grad_()
        with torch.enable_grad():
            prior = self._likelihood.log_prior(parameters)
            total = prior + terms.of_likelihood(self.likelihood(parameters))
        if not total.requires_grad:
            return prior, torch.zeros_like(parameters)
        return prior.detach(), torch.autograd.grad(total, parameters, materialize_grads=True)[0]


def fit_latent_numbers(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    likelihood: Any,
    offset: Tensor,
    *,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> tuple[HyperparameterFit, Tensor]:
    """Learn the kernel, without noise, and the free parameters (p,) of a likelihood of numbers.

    `data` are float64, in the order of the approximation, y (n, 1). The first of the kernels, which
    have WhiteKernels, is fitted to numbers that stand for f
    (:func:`skgp.learning.local.hyperparameters.search_hyperparameters`); from there all are fitted
    by the evidence of some observations, and the likeliest by that of more. The callback is
    called with (evaluation, {"loss": nats per observation}); True ends the search.
    """
    recorder = LossRecorder(callback)
    found = search_hyperparameters(
        kernels[:1],
        replace(data, y=data.y[:, 0]).some(SearchSettings.subset_size, generator),
        likelihood,
        generator=generator,
        callback=recorder,
    )
    kernel, white = split_noise(found.kernel)
    parameters, recorder.history = likelihood.initial(data.X), list(found.history)
    if likelihood.is_additive and len(parameters) and white is not None:
        parameters[0] = math.log(white.noise_level)
    if recorder.stopped:
        return replace(found, kernel=kernel), parameters

    model = likelihood, offset, generator
    if len(kernels) > 1:
        others = [split_noise(other)[0] for other in kernels]
        begun = [other.clone_with_theta(kernel.theta) for other in others]
        few = data.some(defaults.VECCHIA_START_ROWS, generator)
        brief = replace(
            settings,
            n_inducing=0,
            n_stages=1,
            max_iter=defaults.VECCHIA_FAMILY_ITER,
            tol=max(settings.tol, defaults.VECCHIA_FAMILY_TOL),
        )
        trials = [staged(each, parameters, few, model, brief, recorder) for each in begun]
        kernel, parameters, _ = min(trials, key=lambda trial: trial[2])
    if not recorder.stopped:
        some = data if settings.n_rows is None else data.some(settings.n_rows, generator)
        kernel, parameters, _ = staged(kernel, parameters, some, model, settings, recorder)
    found = replace(found, kernel=kernel, method="Laplace evidence", history=recorder.history)
    return found, parameters


def staged(
    kernel,
    parameters: Tensor,
    data: Data,
    model: tuple[Any, Tensor, torch.Generator],
    settings: VecchiaSettings,
    recorder: LossRecorder,
    moves: np.ndarray | None = None,
) -> tuple[Any, Tensor, float]:
    """Kernel and parameters (p,) of the likelihood of the greatest evidence, and its loss.

    Each with inducing points and neighbours as the kernel before sees them. `model` are likelihood,
    offset and generator of `LatentEvidence`; `moves` (n_theta + p, n_moves) of zeros and ones, by
    default of each alone.
    """
    place = np.append(kernel.theta, parameters.cpu().numpy())
    moves = np.eye(len(place)) if moves is None else moves
    (likelihood, _, generator), loss = model, math.inf
    box = np.stack([end.cpu().numpy() for end in likelihood.box(parameters)], 1)
    limits = np.concatenate([kernel.bounds.reshape(-1, 2), box])
    for _ in range(settings.n_stages):
        before = place
        kernel = kernel.clone_with_theta(place[: kernel.n_dims])
        Z = choose_inducing(kernel, data.X, settings.n_inducing or 0, generator)
        index = neighbors_of(kernel, data.X, settings.n_neighbors, Z)
        objective = LatentEvidence(kernel, data, index, Z, *model)
        place, loss = _climbed(place, limits, objective, moves, settings, recorder.tell)
        if recorder.stopped or np.abs(place - before).max(initial=0.0) < defaults.VECCHIA_MOVED:
            break
    theta, rest = np.split(place, [kernel.n_dims])
    return kernel.clone_with_theta(theta), parameters.new_tensor(rest), loss


def _climbed(
    start: np.ndarray,
    limits: np.ndarray,
    objective: LatentEvidence,
    moves: np.ndarray,
    settings: VecchiaSettings,
    tell: Callable[[float], bool],
) -> tuple[np.ndarray, float]:
    """Where L-BFGS-B along the moves (p, n_moves) finds the least loss within limits (p, 2)."""
    start = start.clip(*limits.T)
    bounds = np.array(bounds_along(moves, *(limits.T - start)))

    def loss(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(start + moves @ z)
        return value, moves.T @ gradient

    least, idle = math.inf, 0

    def heard(value: float) -> bool:
        nonlocal least, idle
        idle = 0 if value < least - settings.tol * max(1.0, abs(value)) else idle + 1
        least = min(least, value)
        return tell(value) or idle == defaults.VECCHIA_TRIALS

    z, _ = minimize_within(
        loss,
        np.zeros(moves.shape[1]),
        bounds.reshape(-1, 2),
        max_iter=settings.max_iter,
        tol=settings.tol,
        tell=heard,
    )
    return start + moves @ z, least
