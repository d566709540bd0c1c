r"""The mode of the posterior and its Laplace approximation, from which samplers start.

The mode is searched from several starts on a few hundred rows first, where a search costs little,
and polished on all rows from the best of the ends; the curvature there is measured by central
differences of the gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from skgp.models.bayesian.log_posterior import LogPosterior
from skgp.training.lbfgs import minimize_lbfgs

__all__ = ["LaplaceApproximation", "find_mode", "laplace_approximation"]

Callback = Callable[[int, dict], bool | None]

_SUBSET = 300  # rows of the first searches
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
class _Mode:
    u: np.ndarray
    log_density: float
    n_gradients: int
    converged: bool


def find_mode(
    posterior: LogPosterior,
    starts: Sequence[np.ndarray],
    *,
    max_iter: int = 100,
    tol: float = 1e-7,
    callback: Callback | None = None,
) -> _Mode:
    """Highest end of L-BFGS searches from each of the starts, within the kernel's bounds.

    Parameters
    ----------
    posterior : LogPosterior
    starts : sequence of ndarray of shape (p,)
        Points outside the bounds are moved inside.
    max_iter : int, default=100
        Of each search.
    tol : float, default=1e-7
        Relative fall of the negative log-density in an iteration below which a search ends.
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
    low, high = posterior.bounds.T + 1e-9 * np.array([[1.0], [-1.0]])
    inside = [np.clip(start, low, high) for start in starts]
    usable = [u for u in inside if math.isfinite(posterior.log_density(u))]
    if not usable:
        raise ValueError(
            f"The posterior of the hyper-parameters vanishes at every start, {inside}: the kernel "
            "matrix cannot be factored there. Raise the noise level or remove nearly equal rows."
        )

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        u = parameters["u"]
        value, gradient = posterior.log_density_and_gradient(u.detach().numpy())
        # The value and the gradient are known: a linear function that has both.
        return -(value + (u - u.detach()) @ u.new_tensor(gradient))

    bounds = {"u": (torch.tensor(low), torch.tensor(high))}
    ends = []
    for start in usable:
        end = minimize_lbfgs(
            loss,
            {"u": torch.tensor(start)},
            max_iter=max_iter,
            tol=tol,
            bounds=bounds,
            callback=callback,
        )
        ends.append(end)
        if end.stopped:
            break
    best = min(ends, key=lambda end: end.loss)
    n_gradients = sum(end.n_evaluations for end in ends)
    return _Mode(best.parameters["u"].numpy(), -best.loss, n_gradients, best.converged)


def laplace_approximation(
    posterior: LogPosterior,
    *,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),
    max_iter: int = 100,
    callback: Callback | None = None,
) -> LaplaceApproximation:
    """Mode and curvature of the posterior.

    Parameters
    ----------
    posterior : LogPosterior
    rng : numpy.random.Generator
        Draws the rows of the first searches, beyond 300.
    starts : sequence of ndarray of shape (p,), optional
        Besides the priors' medians and half of them; the kernel's own theta, say.
    max_iter : int, default=100
        Of each search.
    callback : callable, optional
        Of the last search; see `find_mode`.

    Returns
    -------
    LaplaceApproximation

    Raises
    ------
    ValueError
        As `find_mode`.

    Notes
    -----
    Some 20 gradients on all rows for the mode and 2 p for the curvature.
    """
    # Short and long length scales with little and much noise explain the same data: two starts.
    starts = [posterior.medians, posterior.medians - math.log(2), *starts]
    data = posterior.data
    if len(data.y) > _SUBSET:
        rows = torch.from_numpy(rng.permutation(len(data.y))[:_SUBSET]).to(data.y.device)
        few = LogPosterior(posterior.kernel, data.rows(rows), posterior.priors)
        ends = [_end(few, start, max_iter) for start in starts]
        starts = [max(ends, key=posterior.log_density)]
    mode = find_mode(posterior, starts, max_iter=max_iter, callback=callback)
    hessian = hessian_by_differences(posterior, mode.u)
    return LaplaceApproximation(
        mode.u,
        bounded_inverse(-hessian),
        mode.log_density,
        mode.n_gradients + 2 * posterior.n_dims,
        mode.converged,
    )


def _end(posterior: LogPosterior, start: np.ndarray, max_iter: int) -> np.ndarray:
    """Where a coarse search from `start` ends; the start itself where the posterior vanishes."""
    try:
        return find_mode(posterior, [start], max_iter=max_iter, tol=1e-5).u
    except ValueError:
        return start


def hessian_by_differences(posterior: LogPosterior, u: np.ndarray) -> np.ndarray:
    """Hessian (p, p) of the log posterior at u by central differences; 2 p gradients.

    Within the bounds; where u lies at one, the difference is one-sided.
    """
    rows = []
    for j, (low, high) in enumerate(posterior.bounds):
        above, below = u.copy(), u.copy()
        above[j], below[j] = min(u[j] + _STEP, high), max(u[j] - _STEP, low)
        change = (
            posterior.log_density_and_gradient(above)[1]
            - posterior.log_density_and_gradient(below)[1]
        )
        rows.append(change / (above[j] - below[j]))
    hessian = np.array(rows)
    return (hessian + hessian.T) / 2


def bounded_inverse(precision: np.ndarray) -> np.ndarray:
    """Inverse, eigenvalues below the least curvature raised to it."""
    values, vectors = np.linalg.eigh(precision)
    return (vectors / np.maximum(values, _LEAST_CURVATURE)) @ vectors.T
