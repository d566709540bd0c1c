r"""A short series at once: the sweep through its times replaced by one Cholesky factor, O(m^3).

With K the prior covariance of f and :math:`\Omega = \mathrm{diag}(\omega)`, :math:`\omega \ge 0`,

.. math::
    B = I + \Omega^{1/2} K \Omega^{1/2}, \quad S = \Omega^{1/2} B^{-1} \Omega^{1/2}, \quad
    V = K - K S K, \quad m = V \beta, \quad \frac{\partial \log Z}{\partial K}
    = \tfrac12 \left(\alpha \alpha^\top - S\right), \quad \alpha = \beta - \Omega m.

Up to two hundred times this takes some 200 calls of torch, where a sweep takes 1000 however
short the series. It keeps fewer digits where the weights are large (see `suits`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.models.state_space.chunks import Dynamics

__all__ = ["Dense", "infer_densely", "suits"]

MAX_TIMES = 256  # where it costs nearly as much as a sweep
_MAX_NUMBERS = 2**18  # times squared by states, in the same sense
_MAX_RATIO = 1e4  # of weight to prior precision: the condition number of B is m times that


@dataclass(frozen=True)
class Dense:
    r"""What `skgp.models.state_space.smoother.evidence` is made of.

    Attributes
    ----------
    log_normalizer : float
    transition : Tensor of shape (d, d)
        Sum of :math:`t \bar F F^\top` over the pairs of times, t apart.
    scale : Tensor of shape (d, d)
        Whose blocks sum up to twice the derivatives in the log variances of the components.
    mean, var : Tensor of shape (m,)
    """

    log_normalizer: float
    transition: Tensor
    scale: Tensor
    mean: Tensor
    var: Tensor


def suits(dynamics: Dynamics, gaps: Tensor, weight: Tensor) -> bool:
    """Whether a series is short, of one piece, and its weights are neither negative nor large."""
    m, H = len(gaps), dynamics.observation
    if m > MAX_TIMES or m**2 * dynamics.n_states > _MAX_NUMBERS:
        return False
    low, high = (float(w) for w in torch.aminmax(weight))
    prior = float(H @ dynamics.stationary @ H)
    return low >= 0 and high * prior <= _MAX_RATIO and bool(gaps[1:].isfinite().all())


def infer_densely(
    dynamics: Dynamics, gaps: Tensor, beta: Tensor, weight: Tensor, centre: Tensor | None
) -> Dense:
    """Log normaliser of the sites, its slopes, and the marginals of f; see `smoother.evidence`.

    Parameters
    ----------
    dynamics : Dynamics
    gaps, beta, weight : Tensor of shape (m,)
    centre : Tensor of shape (m,) or None

    Returns
    -------
    Dense
    """
    m = len(gaps)
    times = torch.cat([gaps.new_zeros(1), gaps[1:]]).cumsum(0)
    row, column = torch.tril_indices(m, m, device=gaps.device)
    lags = times[row] - times[column]
    H = dynamics.observation.to(lags)
    F, _ = dynamics.transition(lags)
    ahead = (F * (dynamics.stationary.to(lags) @ H)[:, None]).sum(1)  # F P0 H', (d, pairs)
    K = lags.new_empty(m, m)
    K[row, column] = K[column, row] = H @ ahead
    root = weight.sqrt()
    B = root[:, None] * K * root
    B.diagonal().add_(1.0)
    L = torch.linalg.cholesky(B)
    S = root[:, None] * torch.cholesky_inverse(L) * root
    half = torch.linalg.solve_triangular(L, root[:, None] * K, upper=False)
    var = (K.diagonal() - (half**2).sum(0)).clamp_(min=0)
    value, mean = _value(K, S, half, beta, weight, centre)
    alpha = beta - weight * mean
    slope = (alpha[:, None] * alpha - S)[row, column]  # both triangles, hence without the 1/2
    slope[row == column] *= 0.5
    return Dense(
        value - float(L.diagonal().log().sum()),
        H[:, None] * (ahead @ (lags * slope)),
        2 * torch.diag(H * (ahead @ slope)),
        mean,
        var,
    )


def _value(
    K: Tensor, S: Tensor, half: Tensor, beta: Tensor, weight: Tensor, centre: Tensor | None
) -> tuple[float, Tensor]:
    r"""Log normaliser, without the determinant, and mean.

    Of sites divided by their values at c, with :math:`\beta = \Omega c + \beta'`:
    :math:`-c^\top S c / 2 - \beta'^\top (c - K S c) + \beta'^\top V \beta' / 2`.
    """
    if centre is None:
        mean = K @ beta - half.T @ (half @ beta)
        return 0.5 * float(beta @ mean), mean
    rest, weighed = beta - weight * centre, S @ centre
    from_centre, from_rest = K @ weighed, K @ rest - half.T @ (half @ rest)
    value = -0.5 * (centre @ weighed) - rest @ (centre - from_centre) + 0.5 * (rest @ from_rest)
    return float(value), from_centre + from_rest
