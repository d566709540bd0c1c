r"""Mixtures of Gaussian processes, one for each sample of the hyper-parameters.

Given a sample :math:`u_s` f is a Gaussian process, so that predictions average over the S samples
kept, of weights :math:`w_s`:

.. math:: p(f_* \mid y) \approx \sum_s w_s N(f_*; m_s, v_s).

A kind of process (:mod:`skgp.inference.mixture`, :mod:`skgp.inference.vecchia.posterior`) says what
the moments of one are; a series has a state for each value (`AveragedState`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.special import log_ndtr, logsumexp, ndtri
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.markov.series import Series
from skgp.inference.markov.states import SeriesState
from skgp.kernels.expression import split_noise, summands, theta_places
from skgp.kernels.sde import StateSpace
from skgp.kernels.series_parts import has_waves
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import semidefinite_root
from skgp.linalg.runtime import TensorState, to_arrays

_TINY = np.finfo(np.float64).tiny  # mathematical
RNG = np.random.Generator | np.random.RandomState


class GPMixture(TensorState):
    """What all have."""

    def __init__(
        self,
        kernel: Any,  # with a WhiteKernel summand at the top level
        data: Data,  # training rows, float64
        u: np.ndarray,  # (S, kernel.n_dims), logarithms of the hyper-parameters of each sample
        weights: np.ndarray | None,  # (S,), positive, in any scale; None for equal ones
    ) -> None:
        u = np.asarray(u, dtype=float)
        weights = np.ones(len(u)) if weights is None else np.asarray(weights, dtype=float)
        places, noise_place, level = theta_places(kernel)
        self._signal, self._data = split_noise(kernel)[0], data
        self._theta = data.X.new_tensor(u[:, places])
        self.weights = weights / weights.sum()  # (S,), of sum one
        self._shares = data.X.new_tensor(self.weights)  # the same
        #: Variances (S,).
        self.noise = np.full(len(u), level) if noise_place is None else np.exp(u[:, noise_place])

    @property
    def _X(self) -> Tensor:
        """Training inputs (n, d)."""
        return self._data.X

    def _row_noise(self, s: int) -> Tensor:
        """Variances (n,) of the noise of each training row under sample s."""
        return self._data.row_noise(self._X.new_full((), float(self.noise[s]))).contiguous()

    def _component_means(self, Z: Tensor) -> Tensor:
        """Mean (S, t) of f at the rows of Z (t, d) under each sample."""
        raise NotImplementedError

    def _component_moments(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f, (S, t) each; differentiable in Z where it asks for gradients."""
        raise NotImplementedError

    def _joints(
        self, Z: Tensor, samples: np.ndarray | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each sample (all by default) with mean (t,) and covariance (t, t) of f at Z (t, d)."""
        raise NotImplementedError

    def _check_joint_memory(self, n_rows: int) -> None:
        """Refuse the joint covariance of rows for which there is no room."""
        raise NotImplementedError

    def at(self, kernel: Any, u: np.ndarray) -> GPMixture:
        """The same rows under the hyper-parameters u (kernel.n_dims,) alone."""
        raise NotImplementedError

    @property
    def n_samples(self) -> int:
        """S, of different samples."""
        return len(self.weights)

    @property
    def bytes_per_row(self) -> int:
        """What predicting a row takes."""
        return 64 * self.n_samples

    def _rows(self, X: np.ndarray) -> Tensor:
        return torch.tensor(X, dtype=self._X.dtype, device=self._X.device)

    def component_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of f, (S, t) each, at the rows of X (t, d) under each sample."""
        mean, var = to_arrays(*self._component_moments(self._rows(X)))
        return mean, var

    def mean(self, Z: Tensor) -> Tensor:
        """Mean (t,) of f at the rows of Z (t, d)."""
        return self._shares @ self._component_means(Z)

    def mean_and_variance(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (t,) there, differentiable in Z where it asks for gradients."""
        mean, var = self._component_moments(Z)
        centre = self._shares @ mean
        return centre, self._shares @ (var + (mean - centre).square())

    def covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean (t,) and covariance (t, t) of f at the rows of X (t, d)."""
        Z = self._rows(X)
        self._check_joint_memory(len(Z))
        means = self._X.new_empty(self.n_samples, len(Z))
        total = self._X.new_zeros(len(Z), len(Z))
        for s, mean, covariance in self._joints(Z):
            means[s] = mean
            total.add_(covariance, alpha=float(self.weights[s]))
        weights = self._shares
        centred = means - weights @ means
        total.addmm_(centred.T * weights, centred)
        found = to_arrays(weights @ means, total)
        return found[0], found[1]

    def draws(self, X: np.ndarray, n_samples: int, rng: RNG, *, noise: bool = False) -> np.ndarray:
        """Joint draws (t, n_samples) of f at the rows of X (t, d), or of observations.

        Each takes a sample of the hyper-parameters first.
        """
        Z = self._rows(X)
        chosen = rng.choice(self.n_samples, size=n_samples, p=self.weights)
        parts = list(self._draws(Z, np.bincount(chosen, minlength=self.n_samples), rng))
        out = np.empty((len(Z), n_samples))
        out[:, np.argsort(chosen, kind="stable")] = torch.cat(parts, 1).cpu().numpy()
        if noise:
            out += np.sqrt(self.noise[chosen]) * rng.standard_normal(out.shape)
        return out

    def _draws(self, Z: Tensor, counts: np.ndarray, rng: RNG) -> Iterator[Tensor]:
        """Draws (t, k) of f under each sample that has a count k; O(t^3) each."""
        self._check_joint_memory(len(Z))
        for s, mean, covariance in self._joints(Z, np.flatnonzero(counts)):
            # A covariance without noise is singular up to rounding: the jitter has its size.
            root = semidefinite_root(covariance)
            normal = Z.new_tensor(rng.standard_normal((len(Z), int(counts[s]))))
            yield mean[:, None] + root @ normal


# ---- mixtures of Gaussians in one dimension, many at once: components are (S, n), column j being
# the mixture sum_s w_s N(m_sj, v_sj), with one set of weights (S,), of sum one, for all


def mixture_moments(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance (n,) of each mixture, by the law of total variance."""
    centre = weights @ mean
    return centre, weights @ (var + (mean - centre) ** 2)


def mixture_log_density(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray, z: np.ndarray
) -> np.ndarray:
    """Log-density (n,) of z (n,), each under its own mixture, in nats."""
    var = np.maximum(var, _TINY)  # without noise a variance may be 0, where no density is finite
    terms = -0.5 * ((z - mean) ** 2 / var + np.log(2 * math.pi * var))
    return logsumexp(terms + np.log(weights)[:, None], axis=0)


def mixture_quantiles(
    weights: np.ndarray, mean: np.ndarray, var: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    r"""Quantiles (n, q) of each mixture at levels (q,) strictly between 0 and 1.

    The root of :math:`\sum_s w_s \Phi((z - m_s) / \sigma_s) = p`, to about 1e-12 of a standard
    deviation, by Newton's method on the logarithm of the probability of the nearer tail, which is
    concave for one Gaussian; the root stays bracketed, and where a step leaves the bracket it is
    halved. ``O(n q S)`` for each of some five to ten steps.
    """
    std = np.sqrt(np.maximum(var, _TINY))
    if len(weights) == 1:
        return mean[0][:, None] + std[0][:, None] * ndtri(levels)
    out = np.empty((mean.shape[1], len(levels)))
    n_rows = max(1, defaults.ELEMENTS // len(weights))
    for j, level in enumerate(levels):
        # Of the upper half the mirror image, whose lower tail keeps its digits.
        sign = -1.0 if level > 0.5 else 1.0
        log_level = math.log1p(-level) if level > 0.5 else math.log(level)
        for start in range(0, mean.shape[1], n_rows):
            rows = slice(start, start + n_rows)
            root = _lower_quantile(weights, sign * mean[:, rows], std[:, rows], log_level)
            out[rows, j] = sign * root
    return out


def _lower_quantile(weights, mean, std, log_level: float) -> np.ndarray:
    """Where the log-probability below is `log_level`, at most log(1/2), for each column."""
    log_weights = np.log(weights)[:, None]
    ends = mean + std * ndtri(math.exp(log_level))
    low, high = ends.min(axis=0), ends.max(axis=0)
    z = weights @ ends
    scale = std.min(axis=0)
    active = np.arange(len(z))
    for _ in range(defaults.MAX_STEPS):
        t = (z[active] - mean[:, active]) / std[:, active]
        log_below = log_ndtr(t) + log_weights
        total = logsumexp(log_below, axis=0)
        log_density = -0.5 * (t**2 + math.log(2 * math.pi)) - np.log(std[:, active]) + log_weights
        slope = np.exp(logsumexp(log_density, axis=0) - total)
        gap = total - log_level
        low[active] = np.where(gap <= 0, z[active], low[active])
        high[active] = np.where(gap >= 0, z[active], high[active])
        with np.errstate(divide="ignore", invalid="ignore"):
            new = z[active] - gap / slope
        inside = (new >= low[active]) & (new <= high[active])
        new = np.where(inside, new, (low[active] + high[active]) / 2)
        step = np.abs(new - z[active])
        z[active] = new
        active = active[step > 1e-13 * (scale[active] + np.abs(new))]
        if len(active) == 0:
            break
    return z


# ---- a series under several values of its hyper-parameters, of some weight each

#: Whether a part is a season, and how many of its kind stand before it.
Place = tuple[bool, int]


@dataclass(frozen=True)
class AveragedState(TensorState):
    """States of one series, the likeliest first; they share times, offset and terms."""

    states: tuple[SeriesState, ...]
    weights: tuple[float, ...]  # of sum 1
    noise: tuple[float, ...]  # variances of the observations

    @staticmethod
    def of(state: Any, parameters: Tensor) -> AveragedState:
        """A state with parameters (1,) of its noise as an average over one; an average as it is."""
        if isinstance(state, AveragedState):
            return state
        return AveragedState((state,), (1.0,), (float(parameters[0].exp()),))

    def mean_noise(self, like: Tensor) -> Tensor:
        """Parameters of the likelihood, `like` others, of the mean of the noise variances."""
        mean = sum(w * v for w, v in zip(self.weights, self.noise, strict=True))
        return torch.full_like(like, math.log(mean))

    @property
    def kernel(self) -> Any:
        """That of the likeliest."""
        return self.states[0].kernel

    @property
    def parts(self) -> list[Any]:
        """Kernels of the columns of `components`: of each the first that a state has there."""
        return list(self._columns.values())

    @property
    def _columns(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for state in self.states:
            for place, kernel in _places(state).items():
                found.setdefault(place, kernel)
        return found

    @property
    def form(self) -> StateSpace:
        """The same in state space."""
        return self.states[0].form

    @property
    def offset(self) -> float:
        """Prior mean of f."""
        return self.states[0].offset

    @property
    def terms(self) -> Any:
        """Those of the likeliest; None without."""
        return getattr(self.states[0], "terms", None)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of f at any rows, (n,)."""
        return self.moments(x)[0]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any rows, each (n,)."""
        return self._mixed([state.moments(x) for state in self.states])

    def mixture(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (k,) above 0, and means and variances (k, n) of observations at any rows."""
        used = [each for each in zip(self.states, self.weights, self.noise, strict=True) if each[1]]
        moments = [(w, *state.moments(x), noise) for state, w, noise in used]
        weights = x.new_tensor([w for w, *_ in moments], dtype=torch.float64)
        means = torch.stack([mean for _, mean, _, _ in moments])
        return weights, means, torch.stack([var + noise for _, _, var, noise in moments])

    def past_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same given what was observed before each time alone."""
        return self._mixed([state.past_moments(x) for state in self.states])

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the parts of the model."""
        found = [state.components(x) for state in self.states]
        columns = list(self._columns)

        def wide(part: Tensor, places: list[int]) -> Tensor:
            """With parts of the kernel that a state lacks, which add nothing, before the terms."""
            own, others = part.tensor_split([len(places)], 1)
            found = part.new_zeros(len(part), len(columns))
            found[:, places] = own
            return torch.cat([found, others], 1)

        places = [[columns.index(place) for place in _places(state)] for state in self.states]
        pairs = zip(found, places, strict=True)
        return self._mixed([(wide(mean, at), wide(var, at)) for (mean, var), at in pairs])

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any rows."""
        means, covariances = zip(*(state.covariance(x) for state in self.states), strict=True)
        mean = self._sum(means)
        apart = [each - mean for each in means]
        return mean, self._sum(covariances) + self._sum([torch.outer(d, d) for d in apart])

    def samples(
        self, x: Tensor, n_samples: int, generator: torch.Generator, *, noise: bool = False
    ) -> Tensor:
        """Joint draws of f, or of observations, at any rows, (n, n_samples)."""
        weights = torch.tensor(self.weights, dtype=torch.float64, device=generator.device)
        which = torch.multinomial(weights, n_samples, replacement=True, generator=generator)
        draws = x.new_empty(len(x), n_samples)
        for k, state in enumerate(self.states):
            here = (which == k).nonzero()[:, 0]
            if len(here):
                draws[:, here] = state.samples(x, len(here), generator)
                if noise:
                    errors = torch.empty_like(draws[:, here]).normal_(generator=generator)
                    draws[:, here] += math.sqrt(self.noise[k]) * errors
        return draws

    def with_rows(self, series: Series, likelihood: Likelihood) -> AveragedState:
        """The posterior given more rows, hyper-parameters and weights kept."""
        pairs = zip(self.states, self.noise, strict=True)
        found = []
        for state, noise in pairs:
            at = torch.tensor([math.log(noise)], dtype=torch.float64)
            found.append(state.with_rows(series, likelihood.with_parameters(at)))
        return replace(self, states=tuple(found))

    def _mixed(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        means, variances = zip(*pairs, strict=True)
        mean = self._sum(means)
        return mean, self._sum([v + (m - mean) ** 2 for m, v in pairs])

    def _sum(self, values: Any) -> Tensor:
        """Weighted sum over the states."""
        return sum(w * value for w, value in zip(self.weights, values, strict=True))


def _places(state: SeriesState) -> dict[Place, Any]:
    """The parts of a kernel: seasons of any structure are the same, in their order."""
    parts = summands(state.kernel)
    seasons = [has_waves(part) for part in parts]
    return {(kind, seasons[:i].count(kind)): parts[i] for i, kind in enumerate(seasons)}
