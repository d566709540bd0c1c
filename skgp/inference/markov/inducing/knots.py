"""Where knots are put: at quantiles of the times, closer where f moves."""

import math

import torch
from torch import Tensor

from skgp.kernels.sde_dynamics import Dynamics

__all__ = ["MAX_KNOTS", "place_knots", "shortest_scale"]

MAX_KNOTS = 1000
_PER_SCALE = 10  # knots a length scale that leave nearly nothing to be gained by more


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
