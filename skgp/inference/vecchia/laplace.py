r"""The mode of f under a Vecchia prior, Laplace's evidence, and its derivatives.

Column j of f is :math:`o_j + R \omega_j`. With :math:`\hat\omega` the mode,

.. math:: \log q(y) = \sum_i w_i \log p(y_i \mid \hat f_i) - \tfrac12 |\hat\omega|^2
          - \tfrac12 \log |I + R^T W R| .

The prior's density is :math:`-\tfrac12 (\min_u |u|^2 + \sum_i r_i^2 / D_i + \log |\Sigma|)` with
:math:`r_i = b_i^T f - E_i^T u = D_i^{1/2} e_i`, of local terms; :math:`\log |\Sigma| = \sum_i \log
D_i + \log |P|`, :math:`P = I + E^T D^{-1} E`. With :math:`s_i = \tfrac12 C_{ii} w_i \nabla^3 \log
p`, C the posterior covariance of f, and :math:`h = H^{-1} R^T s` by which the mode moves, the
derivative is that of

.. math:: -\tfrac12 \sum_i \frac{1}{D_i} \sum_k \alpha_{ik}\, r_i^{x_k} r_i^{y_k}
          - \tfrac12 \log |\Sigma|

at fixed vectors f and u: :math:`(\hat\omega + 2 h, \hat\omega)` with :math:`\alpha = 1`, and the
pairs of :mod:`skgp.inference.vecchia.hessian`, of mean :math:`H^{-1}`. Draws from the prior as
pairs have the mean derivative :math:`-\tfrac12\, d \log |\Sigma|`, row by row where there are no
inducing points. They enter with :math:`\alpha = -(1 + D_i W_i)^{-2}`, the coefficient of a
regression on them (its mean with inducing points), and their mean is put back: the variance is
small wherever an observation tells little beside the others.

Of a likelihood's own parameters :math:`\phi` the derivative is, at fixed f, C and :math:`R h`,
that of

.. math:: \sum_i w_i \Big[ \log p_\phi + \tfrac12 C_{ii} \min(0, \nabla^2 \log p_\phi)
          + (R h)_i \nabla \log p_\phi \Big](y_i \mid \hat f_i) .
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import FORCING, LATENT_STEPS, LATENT_TOL, START_TOL
from skgp.inference.newton import NewtonProblem, fit_newton, newton_problem
from skgp.inference.vecchia.conditionals import Tile
from skgp.inference.vecchia.hessian import (
    DenseHessian,
    Pairs,
    SparseHessian,
    directions,
    hessian,
)
from skgp.inference.vecchia.root import VecchiaRoot
from skgp.linalg.cholesky import cho_solve
from skgp.linalg.rows import gather_rows
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class LatentMode:
    """The mode of c columns, and the Hessian there."""

    root: VecchiaRoot
    likelihood: Any
    problem: NewtonProblem
    weights: Tensor  # (N, c), the mode in whitened coordinates
    latent: Tensor  # (n, c), offset included
    loss: Tensor  # (c,), minus the log joint density, in nats
    hessian: DenseHessian | SparseHessian
    n_iter: int

    @property
    def curvature(self) -> Tensor:
        """W, (n, c)."""
        return self.problem.curvature(self.latent)

    @property
    def signed(self) -> Tensor | None:
        """Curvatures of either sign, (n, c), where the likelihood may have them."""
        return self.problem.signed_curvature(self.latent) if self.problem.is_signed else None


def find_mode(
    root: VecchiaRoot,
    y: Tensor,
    likelihood: Any,
    offset: Tensor,
    weight: Tensor | None = None,
    *,
    start: Tensor | None = None,
    tol: float = LATENT_TOL,
    callback: Callback | None = None,
) -> LatentMode:
    """Newton's method; offset (c,) or (n, c).

    `start` (n, c) is an f near the mode, such as that of other hyper-parameters. What f is in
    coordinates of this prior may be far from any mode: the first step is the one from f as it is.
    """
    features: Any = root  # all that Newton's method asks of a design
    problem = newton_problem(features, y, likelihood, offset=offset, row_weight=weight)
    if not likelihood.is_log_concave:
        problem = replace(problem, is_signed=True)
    first = None
    if start is not None:
        first = _newton_step(root, problem, start, START_TOL)
    elif likelihood.has_link or not likelihood.is_log_concave:
        # Where each observation has its own mode; from f = 0 most would be far off.
        nearest, _ = likelihood.gaussian_observations(problem.Y, problem.offset)
        first = _newton_step(root, problem, nearest, FORCING)
    found = fit_newton(
        problem,
        start=first,
        solver=directions,
        tol=tol,
        loss_tol=0.0,
        max_iter=LATENT_STEPS,
        callback=callback,
    )
    H = hessian(root, problem.curvature(found.latent))
    return LatentMode(
        root, likelihood, problem, found.weights, found.latent, found.loss, H, found.n_iter
    )


def _newton_step(root: VecchiaRoot, problem: NewtonProblem, f: Tensor, tol: float) -> Tensor:
    """Whitened coordinates (N, c) after Newton's step from any f (n, c), to a relative residual."""
    W = problem.curvature(f)
    targets = W * (f - problem.offset) + problem.slope(f)
    return hessian(root, W).solve(root.rmatmul(targets), tol)[0]


@torch.no_grad()
def evidence(mode: LatentMode, probes: tuple[Tensor, Tensor]) -> tuple[Tensor, EvidenceTerms]:
    """Laplace's log evidence (c,), in nats, and what its derivatives need."""
    pairs = mode.hessian.pairs(probes)
    terms = EvidenceTerms(mode, pairs)
    return -mode.loss - 0.5 * pairs.log_det, terms


class EvidenceTerms:
    """Derivatives of Laplace's evidence, summed over the columns.

    Parameters
    ----------
    mode : LatentMode
    pairs : Pairs
    """

    def __init__(self, mode: LatentMode, pairs: Pairs) -> None:
        root, c = mode.root, mode.weights.shape[1]
        n, m = root.n_rows, root.n_inducing
        W = mode.curvature
        f_x, f_y = root.matmul(pairs.x), root.matmul(pairs.y)
        self.variance = pairs.scale * (f_x * f_y).reshape(n, c, -1).sum(2)  # C, (n, c)
        problem = mode.problem
        skewness = mode.likelihood.skewness(problem.Y, mode.latent)
        slope = 0.5 * self.variance * W * skewness  # s
        moved = mode.hessian.solve(root.rmatmul(slope), LATENT_TOL, mode.signed)[0]  # h
        x, y = [mode.weights + 2 * moved, pairs.x], [mode.weights, pairs.y]
        of_mode = root.matmul(moved)  # (n, c)
        self._mode, self._motion = mode, of_mode
        at_mode = mode.latent - problem.offset
        F_x, F_y = [at_mode + 2 * of_mode, f_x], [at_mode, f_y]
        alpha = [torch.ones_like(W), torch.full_like(f_x, pairs.scale)]
        removed = torch.zeros_like(W[:, 0])
        if pairs.prior is not None:
            share = (1 + root.std.square()[:, None] * W).square().reciprocal()
            share = share.mean(0).expand_as(share) if m else share
            removed = share.sum(1)
            x, y = [*x, pairs.prior], [*y, pairs.prior]
            drawn = root.matmul(pairs.prior)
            F_x, F_y = [*F_x, drawn], [*F_y, drawn]
            k = pairs.prior.shape[1] // c
            alpha.append(-pairs.scale * share.repeat_interleave(k, 1))
        X, Y = (root.expected(torch.cat(each, 1)) for each in (x, y))
        factor = torch.cat(alpha, 1)
        left = torch.cat([factor * X[m:], factor * Y[m:]], 1)
        self._left = 0.5 * left / root.std[:, None]  # (n, 2 K)
        self._right = torch.cat([*F_y, *F_x], 1)  # (n, 2 K)
        self._of_variance = 0.5 * (factor * X[m:] * Y[m:]).sum(1) / root.std.square()
        self._of_contrast = self._left @ torch.cat([Y[:m], X[:m]], 1).mT  # (n, m)
        self._add_determinant(root, c - removed)

    def _add_determinant(self, root: VecchiaRoot, count: Tensor) -> None:
        """That of -log |Sigma| / 2, count (n,) times, the same where there are inducing points."""
        known = cho_solve(root.factor, root.scaled.mT).mT  # (n, m)
        own = 1 - (known * root.scaled).sum(1)
        self._of_variance -= 0.5 * count * own / root.std.square()
        self._of_contrast -= count[:, None] * known / root.std[:, None]

    def of_likelihood(self, likelihood: Any) -> Tensor:
        """A number whose derivative in the likelihood's parameters is that of the evidence."""
        problem, f = self._mode.problem, self._mode.latent
        first, second = likelihood.derivatives(problem.Y, f)
        each = likelihood.log_prob(problem.Y, f) + self._motion * first
        each = each + 0.5 * self.variance * second.clamp(max=0)
        return (problem.row_weight * each).sum()

    def cotangents(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Of D (t,), b (t, H + 1) and E (t, m) of a tile."""
        right = gather_rows(self._right, tile.group)
        of_b = -torch.einsum("tk,thk->th", self._left[tile.rows], right)
        return self._of_variance[tile.rows], of_b, self._of_contrast[tile.rows]
