"""Where knots are put: at quantiles of the times, closer where f moves, or uphill on the bound."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood
from skgp.models.state_space.inducing import fit_inducing
from skgp.models.state_space.series import Series
from skgp.training.lbfgs import minimize_lbfgs

__all__ = ["MAX_KNOTS", "learn_knots", "place_knots", "shortest_scale"]

Callback = Callable[[int, dict], bool | None]

MAX_KNOTS = 1000
_PER_SCALE = 10  # knots a length scale that leave nearly nothing to be gained by more
_LEAST_GAP = 1e-6  # relative to the range of the times, of knots that move


def shortest_scale(dynamics: Dynamics) -> float:
    """Shortest time over which a component of f changes; inf for constants."""
    rates = [rate for _, block in dynamics.blocks for rate in block.rates]
    return 1 / max(rates) if rates else math.inf


def place_knots(times: Tensor, n_knots: int | None = None, *, scale: float | None = None) -> Tensor:
    """Put knots at quantiles of the times, and more of them where f would move in between.

    Parameters
    ----------
    times : Tensor of shape (n,)
        Distinct, rising.
    n_knots : int, optional
        M; never more than n are used. By default 1000, or n if that is less.
    scale : float, optional
        Of f's changes (`shortest_scale`). Where knots with times in between are further apart than
        a tenth of it, those times are thinned to that spacing and added. Not with `n_knots`.

    Returns
    -------
    Tensor of shape (at most M,)
        Some of the times: as many knots as times are exact inference.

    Raises
    ------
    ValueError
        If `n_knots` is less than 1.

    Examples
    --------
    >>> import torch
    >>> place_knots(torch.arange(9.0, dtype=torch.float64), 3)
    tensor([0., 4., 8.], dtype=torch.float64)
    """
    if n_knots is not None and n_knots < 1:
        raise ValueError(f"n_knots must be at least 1; got {n_knots}.")
    n = len(times)
    size = min(n, MAX_KNOTS if n_knots is None else n_knots)
    index = torch.linspace(0, n - 1, size, dtype=torch.float64).round().long()
    if n_knots is None and scale is not None and size > 1:
        index = _refined(times, index, scale / _PER_SCALE)
    return times[index]


def _refined(times: Tensor, index: Tensor, spacing: float) -> Tensor:
    """Positions of knots among the times, with those added that wide intervals ask for."""
    start = times[index[:-1]]
    owner = torch.searchsorted(index, torch.arange(len(times)), right=True) - 1
    owner = owner.clamp_max(len(start) - 1)
    # The first time of every cell of the spacing, counted from the knot before.
    cell = ((times - start[owner]) / spacing).floor()
    first = torch.ones_like(owner, dtype=torch.bool)
    first[1:] = (owner.diff() != 0) | (cell.diff() != 0)
    wide = (times[index].diff() > spacing)[owner]
    return torch.cat([index, (first & wide).nonzero()[:, 0]]).unique()


def learn_knots(
    dynamics: Dynamics,
    knots: Tensor,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    max_iter: int = 30,
    tol: float = 1e-5,
    callback: Callback | None = None,
) -> Tensor:
    """Move knots uphill on the bound, by L-BFGS in the first of them and the log gaps.

    Parameters
    ----------
    dynamics : Dynamics
        Of f.
    knots : Tensor of shape (M,)
        Rising; to start from.
    series : Series
    likelihood : Likelihood
    offset : float, default=0.0
        Prior mean of f.
    max_iter : int, default=30
    tol : float, default=1e-5
        Least gain of an iteration, in nats an observation.
    callback : callable, optional
        Called as ``callback(iteration, {"loss": ...})``; True stops.

    Returns
    -------
    Tensor of shape (M,)
        Rising. O(n d^3) a natural-gradient step, a few of them an iteration.

    Notes
    -----
    Worth its price only for few knots: one more knot costs next to nothing.
    """
    span = float(series.times[-1] - series.times[0]) or 1.0
    start: tuple[Tensor, Tensor] | None = None

    def loss(leaves: dict[str, Tensor]) -> Tensor:
        nonlocal start
        z = leaves["first"] + torch.cat(
            [leaves["first"].new_zeros(1), leaves["log_gaps"].exp()]
        ).cumsum(0)
        fit = fit_inducing(dynamics, z.detach(), series, likelihood, offset=offset, start=start)
        start = fit.beta, fit.weight
        # A plane through the value with the known slope carries it into torch's graph.
        return -(fit.elbo + (z - z.detach()) @ fit.knot_gradient) / series.total

    log_gaps = knots.diff().log()
    low, high = (torch.full_like(log_gaps, math.log(part * span)) for part in (_LEAST_GAP, 2.0))
    found = minimize_lbfgs(
        loss,
        {"first": knots[:1].clone(), "log_gaps": log_gaps},
        max_iter=max_iter,
        tol=tol,
        bounds={
            "first": (knots[:1] - span, knots[:1] + span),
            "log_gaps": (low.minimum(log_gaps), high.maximum(log_gaps)),
        },
        callback=callback,
    )
    return _rising(**found.parameters)


def _rising(first: Tensor, log_gaps: Tensor) -> Tensor:
    """Knots (M,) from the first (1,) and the gaps (M - 1,)."""
    return torch.cat([first, first + log_gaps.exp().cumsum(0)])
