"""The gradient in the parameters of the dynamics, from sums over all transitions."""

import torch
from torch import Tensor

from skgp.inference.markov.chunks import Dynamics

__all__ = ["parameter_gradient"]


def parameter_gradient(
    dynamics: Dynamics, like: Tensor, transition: Tensor, noise: Tensor, scale: Tensor
) -> Tensor:
    """Derivative of the log normaliser in the dynamics' parameters, (q,).

    The sums over all gaps are those of one short gap with ``F_bar F'`` and ``F'Q_bar F`` equal
    to them, over which F is easily inverted.

    Parameters
    ----------
    dynamics : Dynamics
    like : Tensor
        Of its dtype and device.
    transition, noise, scale : Tensor of shape (d, d)
        Sums of ``t F_bar F'``, of ``2 t F'Q_bar F``, and of what is scaled by each variance.
    """
    gap, F = _short_gap(dynamics, like)
    inverse = torch.linalg.inv(F)
    F_bar = transition @ inverse.T / gap
    Q_bar = inverse.T @ noise @ inverse / (2 * gap)
    gradient = dynamics.transition_gradient(gap, F_bar[..., None], Q_bar[..., None])
    for i, (states, _) in enumerate(dynamics.blocks):
        gradient[i] = 0.5 * scale[states, states].sum()
    return gradient


def _short_gap(dynamics: Dynamics, like: Tensor) -> tuple[Tensor, Tensor]:
    """A gap (1,) over which the state hardly moves, and its F (d, d)."""
    gap = like.new_ones(1)
    while True:
        F = dynamics.transition(gap)[0][..., 0]
        move = float((F - torch.eye(len(F), dtype=F.dtype, device=F.device)).abs().max())
        if move < 0.1:
            return gap, F
        gap = gap / 16
