r"""The modes of the posterior and their Laplace approximations, from which samplers start.

Searches from several starts run side by side (:mod:`skgp.optim.batched_bfgs`), for many rows on
some hundreds of them first; those of their ends that differ are polished on all rows. Few data
often have two explanations, a short length scale with little noise and a long one with much: both
modes count. The curvature of each is measured by central differences of the gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.optim.batched_bfgs import minimize_batch
from skgp.optim.stopping import StopRecorder

__all__ = [
    "LaplaceApproximation",
    "find_mode",
    "laplace_approximation",
    "laplace_modes",
    "modes_of_all",
]

Callback = Callable[[int, dict], bool | None]

_SUBSET = 200  # rows of the first searches: the most that are evaluated side by side
_SEVERAL = 1000  # rows up to which more than one mode is looked at on all of them
_MAX_ITER, _TOL = 100, 1e-6  # gradients of a search, and nats that a step must gain
_MORE_STARTS = 4  # drawn from the prior
_MOST_MODES = 4
_LOST = 12.0  # nats below the best mode at which another no longer counts
_APART = 1.0  # distance of two modes, in standard deviations of the better one
_STEP = 0.1  # of the differences: a fraction of the posterior's usual width in log units
_LEAST_CURVATURE = 0.1  # a standard deviation of 3 in the logarithm, twice the default priors'


@dataclass(frozen=True)
class LaplaceApproximation:
    """Gaussian approximation of the posterior of u.

    Attributes
    ----------
    mode : ndarray of shape (p,)
    covariance : ndarray of shape (p, p)
        Inverse of the negative Hessian there, its eigenvalues bounded.
    log_density : float
        Log posterior at the mode.
    n_gradients : int
        Evaluated on all rows.
    converged : bool
        Whether the search for the mode met its tolerance.
    """

    mode: np.ndarray
    covariance: np.ndarray
    log_density: float
    n_gradients: int
    converged: bool

    @property
    def log_evidence(self) -> float:
        r"""Laplace's estimate :math:`\log p(\hat u, y) + \tfrac12 \log |2 \pi \Sigma|`, nats."""
        _, log_det = np.linalg.slogdet(2 * math.pi * self.covariance)
        return self.log_density + 0.5 * float(log_det)


@dataclass(frozen=True)
class _Ends:
    """Ends of searches, the highest first."""

    u: np.ndarray  # (k, p)
    log_density: np.ndarray  # (k,)
    converged: np.ndarray  # (k,)
    n_gradients: int


@dataclass(frozen=True)
class _Mode:
    u: np.ndarray
    log_density: float
    n_gradients: int
    converged: bool


def find_mode(
    posterior: LogPosterior,
    starts: Sequence[np.ndarray],
    *,
    max_iter: int = _MAX_ITER,
    tol: float = _TOL,
    callback: Callback | None = None,
) -> _Mode:
    """Highest end of searches from each of the starts, within the kernel's bounds.

    Parameters
    ----------
    posterior : LogPosterior
    starts : sequence of ndarray of shape (p,)
        Points outside the bounds are moved inside.
    max_iter : int, default=100
        Gradients of each search.
    tol : float, default=1e-6
        Nats that a search expects to gain by a further step, below which it ends.
    callback : callable, optional
        ``callback(iteration, {"loss": float, ...})``; True stops.

    Returns
    -------
    object with ``u`` (p,), ``log_density``, ``n_gradients`` and ``converged``

    Raises
    ------
    ValueError
        If the posterior vanishes at every start.
    """
    ends = _search(posterior, starts, max_iter, tol, callback)
    return _Mode(ends.u[0], float(ends.log_density[0]), ends.n_gradients, bool(ends.converged[0]))


def _search(posterior, starts, max_iter: int, tol: float, callback: Callback | None) -> _Ends:
    low, high = posterior.bounds.T
    inset = np.clip((high - low) / 2, 0.0, 1e-9)  # equal bounds have no inside

    def function(u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, gradients = posterior.log_densities_and_gradients(u)
        return -values, -gradients

    found = minimize_batch(
        function,
        np.array(starts, dtype=float),
        bounds=np.stack([low + inset, high - inset], axis=1),
        max_iter=max_iter,
        tol=tol,
        callback=callback,
    )
    order = np.argsort(found.value, kind="stable")
    order = order[np.isfinite(found.value[order])]
    if len(order) == 0:
        raise ValueError(_nowhere(posterior, found.x[0]))
    return _Ends(found.x[order], -found.value[order], found.converged[order], found.n_evaluations)


def _nowhere(posterior: LogPosterior, u: np.ndarray) -> str:
    """Why the posterior vanishes at u (p,), and the remedy."""
    at = posterior.kernel.clone_with_theta(u)
    message = f"The posterior of the hyper-parameters vanishes at every start, {at} among them"
    try:
        posterior._log_likelihood(u)
    except NotPositiveDefiniteError as error:
        return f"{message}: {error} A WhiteKernel of a higher noise_level_bounds helps in any case."
    return f"{message}: its log-density is not finite; check the priors and the scale of X."


def laplace_approximation(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),
    max_iter: int = _MAX_ITER,
    callback: Callback | None = None,
) -> LaplaceApproximation:
    """The highest of :func:`laplace_modes`."""
    return laplace_modes(
        posterior, rng=rng, starts=starts, max_iter=max_iter, callback=callback
    )[0]  # fmt: skip


def laplace_modes(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),
    max_iter: int = _MAX_ITER,
    callback: Callback | None = None,
) -> list[LaplaceApproximation]:
    """Modes of the posterior, the highest first, and their curvatures.

    Parameters
    ----------
    posterior : LogPosterior
    rng : numpy.random.Generator
        Draws starts from the prior, and beyond 200 rows those of the first searches.
    starts : sequence of ndarray of shape (p,), optional
        Besides the priors' medians, half of them and four draws; the kernel's own theta, say.
    max_iter : int, default=100
        Gradients of each search.
    callback : callable, optional
        See `find_mode`.

    Returns
    -------
    list of LaplaceApproximation
        At most four, at least a standard deviation apart, and at most 12 nats below the highest.
        Of more than 1000 rows the highest alone.

    Raises
    ------
    ValueError
        As `find_mode`.

    Notes
    -----
    Beyond 200 rows some 15 gradients on all rows a mode, and 2 p for its curvature.
    """
    recorder = StopRecorder(callback)
    p = posterior.n_dims
    drawn = posterior.medians + posterior.prior_sd * rng.standard_normal((_MORE_STARTS, p))
    # Short and long length scales with little and much noise explain the same data: two starts.
    starts = [posterior.medians, posterior.medians - math.log(2), *starts, *drawn]
    data = posterior.data
    if len(data.y) <= _SUBSET:
        return _distinct(posterior, _search(posterior, starts, max_iter, _TOL, recorder))
    rows = torch.from_numpy(rng.permutation(len(data.y))[:_SUBSET]).to(data.y.device)
    few = LogPosterior(posterior.kernel, data.take(rows), posterior.priors)
    coarse = _distinct(few, _search(few, starts, max_iter, 1e-3, None))
    near = sorted((each.mode for each in coarse), key=posterior.log_density, reverse=True)
    ends, n_gradients = [], 0
    for start in near if len(data.y) <= _SEVERAL else near[:1]:
        ends.append(find_mode(posterior, [start], max_iter=max_iter, callback=recorder))
        n_gradients += ends[-1].n_gradients
        if recorder.stopped:
            break
    ends.sort(key=lambda end: -end.log_density)
    u, values, converged = (
        np.array([getattr(end, name) for end in ends]) for name in ("u", "log_density", "converged")
    )
    return _distinct(posterior, _Ends(u, values, converged, n_gradients))


def modes_of_all(posterior, starts: np.ndarray) -> list[LaplaceApproximation]:
    """Modes near the starts (k, p), of a posterior that is evaluated on all rows."""
    return _distinct(posterior, _search(posterior, starts, _MAX_ITER, _TOL, None))


def _distinct(posterior, ends: _Ends) -> list[LaplaceApproximation]:
    """The Laplace approximations of those ends, the highest first, that are modes of their own."""
    modes: list[LaplaceApproximation] = []
    n_gradients = ends.n_gradients
    for u, value, converged in zip(ends.u, ends.log_density, ends.converged, strict=True):
        if len(modes) == _MOST_MODES or value < ends.log_density[0] - _LOST:
            break
        if any(_distance(u, mode) < _APART for mode in modes):
            continue
        covariance = bounded_inverse(-hessian_by_differences(posterior, u))
        n_gradients += 2 * posterior.n_dims
        modes.append(LaplaceApproximation(u, covariance, float(value), 0, bool(converged)))
    return [replace(mode, n_gradients=n_gradients) for mode in modes]


def _distance(u: np.ndarray, mode: LaplaceApproximation) -> float:
    """From u to a mode, in its standard deviations."""
    step = u - mode.mode
    return math.sqrt(float(step @ np.linalg.solve(mode.covariance, step)))


def hessian_by_differences(posterior: LogPosterior, u: np.ndarray) -> np.ndarray:
    """Hessian (p, p) of the log posterior at u by central differences; 2 p gradients.

    Within the bounds; where u lies at one, the difference is one-sided, and a coordinate without
    room between its bounds counts as flat.
    """
    low, high = posterior.bounds.T
    steps = _STEP * np.eye(len(u))
    above, below = np.minimum(u + steps, high), np.maximum(u - steps, low)
    _, gradients = posterior.log_densities_and_gradients(np.concatenate([above, below]))
    room = (above - below).diagonal()
    change = gradients[: len(u)] - gradients[len(u) :]
    hessian = change / np.where(room > 0, room, 1.0)[:, None]
    return (hessian + hessian.T) / 2


def bounded_inverse(precision: np.ndarray) -> np.ndarray:
    """Inverse, eigenvalues below the least curvature raised to it."""
    values, vectors = np.linalg.eigh(precision)
    return (vectors / np.maximum(values, _LEAST_CURVATURE)) @ vectors.T
