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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.newton import NewtonProblem, fit_newton, newton_problem
from skgp.inference.vecchia.conditionals import Conditionals, Tile, VecchiaRoot
from skgp.inference.vecchia.hessian import (
    DenseHessian,
    Pairs,
    SparseHessian,
    directions,
    hessian,
    probes,
)
from skgp.inference.vecchia.posterior import VecchiaPosterior
from skgp.linalg.cholesky import cho_solve
from skgp.linalg.runtime import Callback, tile_rows
from skgp.linalg.small_matrices import gather_rows


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
    tol: float = defaults.LATENT_TOL,
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
        first = _newton_step(root, problem, start, defaults.START_TOL)
    elif likelihood.has_link or not likelihood.is_log_concave:
        # Where each observation has its own mode; from f = 0 most would be far off.
        nearest, _ = likelihood.gaussian_observations(problem.Y, problem.offset)
        first = _newton_step(root, problem, nearest, defaults.FORCING)
    found = fit_newton(
        problem,
        start=first,
        solver=directions,
        tol=tol,
        loss_tol=0.0,
        max_iter=defaults.LATENT_STEPS,
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
    """Derivatives of Laplace's evidence, summed over the columns."""

    def __init__(self, mode: LatentMode, pairs: Pairs) -> None:
        root, c = mode.root, mode.weights.shape[1]
        n, m = root.n_rows, root.n_inducing
        W = mode.curvature
        f_x, f_y = root.matmul(pairs.x), root.matmul(pairs.y)
        self.variance = pairs.scale * (f_x * f_y).reshape(n, c, -1).sum(2)  # C, (n, c)
        problem = mode.problem
        skewness = mode.likelihood.skewness(problem.Y, mode.latent)
        slope = 0.5 * self.variance * W * skewness  # s
        moved = mode.hessian.solve(root.rmatmul(slope), defaults.LATENT_TOL, mode.signed)[0]  # h
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


@dataclass(frozen=True)
class LatentPosterior(VecchiaPosterior):
    r"""Predictions of c latent functions; `targets` are the modes, `root` that of no precision.

    An input depends on f at its neighbours and on u as in :mod:`skgp.inference.vecchia.posterior`,
    and these are now uncertain themselves: with C a root of their posterior covariance, exact up to
    some thousand points (`LATENT_CUBES`) and k posterior draws of more,

    .. math:: E[f] = o + \phi^T \hat u + a^T (\hat f_N - \Phi_N \hat u), \qquad
              V[f] = R_{xx} - a^T R_{Nx} + \big| a^T C_N + E^T C_u \big|^2 .

    The draws are fixed, so that predictions are a continuous function of x and equal for a row
    whatever rows come with it; the variance that they estimate has a relative standard error of
    :math:`(2 / k)^{1/2}`.
    """

    offset: Tensor  # (c,); o
    group: Tensor  # (n, H + 1) of int32; neighbours and, last, the point itself
    curvature: Tensor  # (n, c); W
    seed: int  # of the draws
    most_draws: int = defaults.LATENT_DRAWS

    @cached_property
    @torch.no_grad()
    def spread(self) -> tuple[Tensor, Tensor]:
        """Roots of the posterior covariance of f at the points (n, c k), and of u (m, c k)."""
        group = self.group.long()
        root = VecchiaRoot(Conditionals(self.kernel, self.X, group, self.noises, self.Z))
        return self._drawn(root, hessian(root, self.curvature, dense=self._is_dense))

    def draw(self, root: VecchiaRoot, H: Any) -> None:
        """Make the draws by root and Hessian of the mode, where they are at hand."""
        if not self._is_dense:
            self.__dict__["spread"] = self._drawn(root, H)

    def _drawn(self, root: VecchiaRoot, H: Any) -> tuple[Tensor, Tensor]:
        numbers = probes(root, self._n_draws, torch.Generator().manual_seed(self.seed))
        found = H.spread(numbers).flatten(1)
        return root.matmul(found), found[: len(self.Z)].contiguous()

    @property
    def n_spread(self) -> int:
        """Columns c k of `spread`."""
        k = len(self.X) + len(self.Z) if self._is_dense else self._n_draws
        return len(self.offset) * k

    @property
    def _n_draws(self) -> int:
        """Fewer of many points."""
        numbers = len(self.offset) * (len(self.X) + len(self.Z))
        return max(defaults.LEAST_DRAWS, min(self.most_draws, defaults.MOST_DRAWN // numbers))

    @property
    def _is_dense(self) -> bool:
        return len(self.offset) * (len(self.X) + len(self.Z)) ** 3 <= defaults.LATENT_CUBES

    @property
    def _tile_rows(self) -> int:
        return min(super()._tile_rows, tile_rows(16 * self.neighborhood.size * self.n_spread))

    def _mean(self, active: Tensor, weights: Tensor, phi: Tensor) -> Tensor:
        return self.offset + super()._mean(active, weights, phi)

    def _variance(
        self, active: Tensor, weights: Tensor, contrast: Tensor, residual: Tensor
    ) -> Tensor:
        unknown = self._unknown(active, weights, contrast)
        each = unknown.reshape(len(unknown), len(self.offset), -1)
        return residual[:, None] + each.square().sum(2)

    def _unknown(self, active: Tensor, weights: Tensor, contrast: Tensor) -> Tensor:
        at_points, of_u = self.spread
        known = (weights[:, None] @ gather_rows(at_points, active))[:, 0]
        return known + contrast @ of_u  # (t, c k)
