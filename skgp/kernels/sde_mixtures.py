r"""Kernels that are not Markov as mixtures of such that are: weights, nodes and their errors.

ExpSineSquared is its Fourier series,

.. math:: e^{-z (1 - \cos \omega t)} = \sum_{j \ge 0} w_j \cos(j \omega t), \qquad
          w_j = (2 - \delta_{j0}) e^{-z} I_j(z), \quad z = \ell^{-2},

cut at a harmonic J, the weights scaled to sum to 1 (A. Solin and S. Sarkka, "Explicit link between
periodic covariance functions and state space models", AISTATS 2014).

RationalQuadratic is a Gamma mixture of squared exponentials,

.. math:: \left(1 + \frac{t^2}{2 \alpha \ell^2}\right)^{-\alpha}
          = E\left[e^{-u t^2 / 2 \ell^2}\right], \qquad u \sim \mathrm{Gamma}(\alpha, \alpha),

here by Gauss quadrature of few nodes. In the variable u itself it (generalised Laguerre) is exact
near t = 0 and poor in the tail, which small u decide; in
:math:`x = \sqrt u / (\sqrt u + \sqrt c)` the greatest error over all t is 4 to 20 times less.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from scipy import special
from torch import Tensor

from .sde_rational import GAUSSIAN4, GAUSSIAN6, Rational

__all__ = ["choose_mixture", "gamma_mixture", "harmonics", "last_harmonic", "mixture_error"]

_MAX_HARMONICS = 32
# Nodes and the process at each: 24 states either way. The first suits small alpha.
_MIXTURES: tuple[tuple[int, Rational], ...] = ((6, GAUSSIAN4), (4, GAUSSIAN6))
_CENTRE = 0.2  # c, of the least errors for alpha between 0.5 and 5
_MAX_GRID = 4096
_LEAST_LOG = -600.0  # of u, whose square root is then still a normal float


def harmonics(z: Tensor, last: int) -> tuple[Tensor, float]:
    """Logarithms of the weights of harmonics 0..last and the bound of the error.

    Parameters
    ----------
    z : Tensor of shape ()
        length_scale**-2. Gradients flow to it.
    last : int

    Returns
    -------
    log_weights : Tensor of shape (last + 1,)
        Their exponentials sum to 1.
    error : float
        Twice the mass left out: what the cut and the scaling can each differ by.
    """
    log_weights = _LogHarmonics.apply(z, last)
    return log_weights - torch.logsumexp(log_weights, 0), 2 * _missing_mass(z.item(), last)


def last_harmonic(z: float, tolerance: float) -> int:
    """Least number of harmonics whose error is within the tolerance, 32 at most."""
    for last in range(1, _MAX_HARMONICS):
        if 2 * _missing_mass(z, last) <= tolerance:
            return last
    return _MAX_HARMONICS


def _missing_mass(z: float, last: int) -> float:
    # I_j(z) falls like exp(-j^2 / (2 z)) for j < z and like (z / 2)^j / j! beyond.
    j = np.arange(last + 1, last + 41 + math.ceil(9 * min(math.sqrt(z), 1e4)))
    return 2 * float(special.ive(j, z).sum())


class _LogHarmonics(torch.autograd.Function):
    """log of (2 - [j = 0]) I_j(z), j = 0..last, up to a common term; differentiable in z once."""

    @staticmethod
    def forward(ctx, z, last):
        j, value = np.arange(last + 2), z.item()
        bessel = special.ive(j, value)
        # I_j(z) = (z/2)^j / j! (1 + ...), where it is too small for a float.
        tiny = bessel < 1e-290
        leading = j * math.log(value / 2) - special.gammaln(j + 1.0)
        log_bessel = np.where(tiny, leading, np.log(np.where(tiny, 1.0, bessel)))
        # I_j' / I_j = I_{j+1} / I_j + j / z
        slope = np.exp(np.diff(log_bessel)) + j[:-1] / value
        ctx.save_for_backward(z.new_tensor(slope))
        return z.new_tensor(log_bessel[:-1] + math.log(2) * (j[:-1] > 0))

    @staticmethod
    def backward(ctx, grad):
        (slope,) = ctx.saved_tensors
        return (grad * slope).sum(), None


def gamma_mixture(alpha: Tensor, n_nodes: int) -> tuple[Tensor, Tensor]:
    """Logarithms of the nodes u and of their weights, (n_nodes,) each.

    Parameters
    ----------
    alpha : Tensor of shape ()
        Gradients flow to it.
    n_nodes : int

    Notes
    -----
    The Gamma density on a fine grid of log u, where the trapezoid rule is exact to rounding, gives
    the recurrence of its orthogonal polynomials (Stieltjes' procedure); the nodes are eigenvalues
    of their Jacobi matrix (Golub and Welsch).
    """
    grid = alpha.new_tensor(_log_grid(alpha.item()))
    mass = torch.softmax(alpha * (grid - grid.exp()), 0)
    x = torch.sigmoid(grid / 2 - math.log(_CENTRE) / 2)
    diagonal: list[Tensor] = []
    off: list[Tensor] = []
    previous, current = torch.zeros_like(x), torch.ones_like(x)
    for k in range(n_nodes):
        diagonal.append((mass * x * current**2).sum())
        following = (x - diagonal[-1]) * current - (off[-1] * previous if k else 0)
        off.append((mass * following**2).sum().sqrt())
        previous, current = current, following / off[-1]
    side = torch.stack(off[:-1])
    jacobi = torch.diag(torch.stack(diagonal)) + torch.diag(side, 1) + torch.diag(side, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    # Beyond the rounding of eigh lie length scales of 1e13, constants for all practical purposes.
    nodes = nodes.clamp(1e-13, 1 - 1e-13)
    return 2 * torch.logit(nodes) + math.log(_CENTRE), 2 * vectors[0].abs().log()


def _log_grid(alpha: float) -> np.ndarray:
    """Values of log u that hold all but 1e-17 of the mass of Gamma(alpha, alpha > 0.1)."""
    width = 9 / math.sqrt(alpha)
    low = max(-width - 42 / alpha, _LEAST_LOG)
    high = min(width + 1, math.log1p(45 / alpha) + 1)
    step = 0.2 / (1 + math.sqrt(alpha))
    return np.linspace(low, high, min(_MAX_GRID, math.ceil((high - low) / step)))


def mixture_error(alpha: float, n_nodes: int, process: Rational) -> float:
    """Greatest distance of the mixture from RationalQuadratic, over 1e4 length scales."""
    log_nodes, log_weights = gamma_mixture(torch.tensor(alpha, dtype=torch.float64), n_nodes)
    half_square = np.append(0.0, np.logspace(-3, 8, 400))
    r = np.sqrt(2 * half_square[:, None] * log_nodes.exp().numpy())
    value = process.correlation(np.minimum(r, process.horizon))[0] @ log_weights.exp().numpy()
    # The grid can miss the top of a ripple by this little.
    return 1.02 * float(np.abs(value - (1 + half_square / alpha) ** -alpha).max())


@lru_cache(maxsize=64)
def choose_mixture(alpha: float) -> tuple[int, Rational]:
    """Return the number of nodes and the process at each that approximate best."""
    return min(_MIXTURES, key=lambda option: mixture_error(alpha, *option))
