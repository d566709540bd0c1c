r"""Means of the log-loss moved towards those of least squares.

The log-loss weighs the squared error of a row by its predictive precision, and so gives up on rows
of great variance; steps on minibatches leave noise in the mean besides. With Gaussian noise the
mean of least squares is known, :math:`a_t = (G + t I)^{-1} b`
(:mod:`skgp.inference.sparse.square_loss`). Between it and the mean that was found,

.. math:: a_s = (1 - s)\, a + s\, a_t,

the log-loss is flat while the error falls fast, as it does for averages of predictions that err
independently. The s is chosen on held-out data by the sum of the log-loss and of the squared error
in units of twice its mean at s = 0, which is the log-loss of the same means under a single
variance: means should be good whatever variances go with them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import statistics
from skgp.inference.sparse.sparse import SparseState
from skgp.inference.sparse.square_loss import evidence_ratio, square_loss_path
from skgp.learning import choose
from skgp.learning.sparse.holdout import held_out_losses
from skgp.learning.sparse.objective import Objective

__all__ = ["Blend", "blended", "choose_blend"]

_RIDGES = (1.0, 0.3, 0.1, 0.03)  # in units of the one that the evidence bound prefers
# Both from the simplest: the evidence bound's ridge, and no blend.
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Blend:
    r"""How means are moved.

    Attributes
    ----------
    share : float
        s.
    ratio : float
        t in units of the mean prior variance.
    """

    share: float
    ratio: float


def choose_blend(state: SparseState, kept: Data, held_out: Data, objective: Objective) -> Blend:
    """The blend that rows held out prefer.

    Parameters
    ----------
    state : SparseState
        With a posterior of the log-loss.
    kept, held_out : Data
        Rows to learn means from, and to judge them by; one column of targets.
    objective : Objective
        "log_loss" of Gaussian noise.

    Returns
    -------
    Blend
        O(n M^2 + M^3).
    """
    means, ratios = _least_squares(state, kept)
    square = replace(objective, name="square_loss")

    def half_squares(mean: Tensor) -> Tensor:
        return held_out_losses(_with_mean(state, mean), square, held_out)

    found = half_squares(state.mean)
    unit = 2 * found.mean().clamp_min(torch.finfo(found.dtype).tiny)
    best = choose([half_squares(mean) / unit for mean in means])

    def losses(share: float) -> Tensor:
        moved = _mixed(state, means[best], share)
        return held_out_losses(moved, objective, held_out) + half_squares(moved.mean) / unit

    return Blend(_SHARES[choose([losses(share) for share in _SHARES])], ratios[best])


def blended(state: SparseState, data: Data, blend: Blend) -> SparseState:
    """The state with its mean moved towards the least squares of `data`; O(n M^2 + M^3)."""
    if blend.share == 0:
        return state
    with torch.no_grad():
        sums = statistics(state.kernel, data, state.Z)
        mean = square_loss_path(sums, sums.gram.new_tensor([blend.ratio]))
        return _mixed(state, mean, blend.share)


def _least_squares(state: SparseState, data: Data) -> tuple[list[Tensor], list[float]]:
    """Means (M, 1) of several ridges, and their ratios to the mean prior variance."""
    with torch.no_grad():
        sums = statistics(state.kernel, data, state.Z)
        ratios = evidence_ratio(sums) * sums.gram.new_tensor(_RIDGES)
        return list(square_loss_path(sums, ratios).split(1, dim=1)), ratios.tolist()


def _mixed(state: SparseState, mean: Tensor, share: float) -> SparseState:
    return _with_mean(state, (1 - share) * state.mean + share * mean)


def _with_mean(state: SparseState, mean: Tensor) -> SparseState:
    return state.with_posterior(mean, state.root)
