r"""A series before the origin of its trend: the other side of a process that starts there.

A trend goes on to both sides of its origin o from one level and one slope, and what is stationary
knows no direction. Seen in a mirror the process has the same law, the state :math:`D s` for the s
of the other direction (`Dynamics.mirror`), so that, with h the time to the origin,

.. math:: s(o - h) = D F(h) D\, s(o) + N(0, D Q(h) D^\top),

independent, given s(o), of all that comes after the origin.
"""

import torch
from torch import Tensor

from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import constant_like, standard_normal
from skgp.linalg.small_matrices import matmul, matvec, square_root


def until_origin(dynamics: Dynamics, x: Tensor) -> Tensor:
    """Times (n,) to the origin from what lies before it; 0 of the rest, and without one."""
    if dynamics.origin is None:
        return torch.zeros_like(x)
    return (dynamics.origin - x).clamp(min=0)


def backwards(dynamics: Dynamics, h: Tensor) -> tuple[Tensor, Tensor]:
    """Transitions and noise covariances (d, d, n) to times h (n,) earlier."""
    F, Q = dynamics.transition(h)
    D = constant_like(dynamics.mirror, F)[..., None]
    return matmul(matmul(D, F), D), matmul(matmul(D, Q), D.transpose(0, 1))


def carried_back(dynamics: Dynamics, h: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """States (d, n) and (d, d, n), those of times before the origin given as they are there."""
    B, R = backwards(dynamics, h)
    return matvec(B, mean), matmul(matmul(B, cov), B.transpose(0, 1)) + R


def covariance_before(
    dynamics: Dynamics, h: Tensor, V: Tensor, origin: Tensor
) -> tuple[Tensor, Tensor]:
    """Lower triangle (k, k) of the joint covariance of f at times h (k,) to the origin, falling.

    And covariances (d, k) with the state there. V (d, d, k) are the covariances of the states,
    `origin` (d, d) that of the state at the origin.
    """
    H, k = dynamics.observation_at(V), len(h)
    covariance, with_next = V.new_zeros(k, k), V.new_zeros(len(V), k)
    steps, _ = backwards(dynamics, -h.diff(append=h.new_zeros(1)))
    for i in reversed(range(k)):
        with_next[:, i + 1 :] = steps[..., i] @ with_next[:, i + 1 :]
        with_next[:, i] = V[..., i] @ H
        covariance[i:, i] = H @ with_next[:, i:]
    B, _ = backwards(dynamics, h)
    return covariance, origin @ torch.einsum("i,ijk->jk", H, B)


def draws_before(
    dynamics: Dynamics, h: Tensor, start: Tensor, generator: torch.Generator
) -> Tensor:
    """Draws of f (k, S) at times h (k,) to the origin, falling, from states (d, S) there."""
    B, R = backwards(dynamics, -h.diff(append=h.new_zeros(1)))
    noise = standard_normal((*start.shape, len(h)), generator, R.dtype)
    moves, found = matmul(square_root(R), noise), start.new_empty(len(h), start.shape[1])
    H = dynamics.observation_at(start)
    for i in reversed(range(len(h))):
        start = B[..., i] @ start + moves[..., i]
        found[i] = H @ start
    return found
