r"""Laplace approximation in the space of the weights: around the mode of all rows, and online.

With the mode :math:`\hat w` of :func:`.newton.fit_newton` and the curvature c of
the negative log-likelihood there (Rasmussen and Williams, 2006, section 3.4),

.. math::
    q(w) = N(\hat w, H^{-1}), \quad H = \Phi^T \operatorname{diag}(c) \Phi + I / a, \qquad
    \log p(y) \approx -J(\hat w) - \tfrac12 \log |a H|.

A cheaper q is the one of its structure that is nearest to :math:`N(\hat w, H^{-1})` in the sense of
the evidence lower bound, exactly as for a Gaussian likelihood of precision c
(:mod:`skgp.inference.weights.posterior`).

Of observations in blocks, of which none has all in memory, the mode is found by passes over them
(`fit_newton_sums`). The negative log joint density of :mod:`skgp.inference.newton`, its gradient
and its Hessian are sums over the observations: for given weights W (m, c) a pass adds up

.. math:: -\sum_i s_i \log p(y_{ij} \mid f_{ij}), \qquad \Phi^T g_j, \qquad
          \Phi^T \operatorname{diag}(c_j) \Phi, \qquad f_{ij} = o_j + \phi_i^T w_j,

``O(c m^2)`` numbers whatever n is, where the blocks lie. A step is exact: of all columns at once,
and the pass at its end tells its loss and whence the next one goes. Halving a step takes a pass.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import MADE_OF, ONLINE_STEPS, ONLINE_TOL
from skgp.inference.newton import (
    check_start,
    check_unweighted,
    fit_newton,
    newton_problem,
    prior_variances,
)
from skgp.inference.newton_steps import Direction, Modes, newton_steps
from skgp.inference.weights.bases import Basis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import hessian_covariance, optimal_std
from skgp.inference.weights.posterior import ClassifierPosterior, WeightGaussian
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import cho_solve, inverse_factor, jittered_cholesky, tri_solve
from skgp.linalg.runtime import Callback, TensorState, tile_rows


def laplace_covariance(
    design: StreamedDesign,
    curvature: Tensor,
    *,
    prior_variance: float | Tensor = 1.0,
    kind: str = "full",
    n_dense_columns: int = 100,
) -> list[WeightGaussian]:
    r"""Gaussians of mean 0 and the covariance around the modes of c problems, float64.

    Parameters
    ----------
    design : StreamedDesign
        :math:`\Phi`, without sample weights.
    curvature : Tensor of shape (n, c)
        :math:`c_{ij} \ge 0` at the modes, see :meth:`.NewtonProblem.curvature`.
    prior_variance : float or Tensor of shape (c,), default=1.0
        a.
    kind : {"full", "chevron", "diagonal"}, default="full"
        :math:`H^{-1}`; its best approximation with `n_dense_columns` dense columns in the Cholesky
        factor; independent weights, :math:`c_r = H_{rr}^{-1/2}`.
    n_dense_columns : int, default=100
        Of "chevron"; m at most.

    Notes
    -----
    "diagonal": one pass over the features for all columns, ``O(n m c)``. Others: a column after
    another, ``O(n m^2 + m^3)`` each, about four m x m matrices beside the results. A
    NumericalWarning says when H needed jitter.
    """
    check_unweighted(design)
    if curvature.ndim != 2 or curvature.shape[0] != design.n_rows:
        raise ValueError(
            f"curvature must have shape ({design.n_rows}, c); got {tuple(curvature.shape)}."
        )
    if not bool((torch.isfinite(curvature) & (curvature >= 0)).all()):
        raise ValueError(
            "curvature must be finite and not negative, minus the second derivative of a "
            "log-concave likelihood; got values from "
            f"{float(curvature.min()):.3g} to {float(curvature.max()):.3g}."
        )
    m, c = design.n_features, curvature.shape[1]
    precision = 1 / prior_variances(prior_variance, c).to(design.device)
    zero = torch.zeros(m, dtype=torch.float64, device=design.device)
    if kind == "diagonal":
        std = optimal_std(design.curvature_diagonal(curvature) + precision)
        return [WeightGaussian.diagonal(zero, std[:, j]) for j in range(c)]
    hessians = (design.curvature_gram(curvature[:, [j]])[0] for j in range(c))
    return hessian_covariance(hessians, precision, kind, n_dense_columns)


def log_evidence(
    fit: Modes, covariances: Sequence[WeightGaussian], *, prior_variance: float | Tensor = 1.0
) -> Tensor:
    r"""Laplace approximation of :math:`\log p(y)` of every column, in nats; shape (c,).

    .. math:: \sum_i s_i \log p(y_i \mid \hat f_i) - \frac{\|\hat w\|^2}{2 a}
              - \tfrac12 \log |I + a \Phi^T \operatorname{diag}(c) \Phi|, \qquad
              |I + a \Phi^T \operatorname{diag}(c) \Phi| = a^m / |\Sigma|

    with :math:`\Sigma` of each column from :func:`laplace_covariance` with ``kind="full"``.
    """
    log_det_prior = covariances[0].n_features * prior_variances(prior_variance, len(fit.loss)).log()
    log_det_posterior = torch.stack([q.log_det() for q in covariances])
    return -fit.loss - 0.5 * (log_det_prior.to(fit.loss) - log_det_posterior.to(fit.loss))


class OnlineLaplace(TensorState):
    r"""Gaussian posteriors of c latent functions, updated batch by batch.

    Column j of the weights has the posterior :math:`N(w_t, H_t^{-1})` after t batches, from
    :math:`N(0, I)` before the first. A batch :math:`(\Phi, y)` moves it to

    .. math::
        w_{t+1} = \arg\min_w \; -\sum_i s_i \log p(y_i \mid o + \phi_i^T w)
                  + \tfrac12 (w - w_t)^T H_t (w - w_t), \qquad
        H_{t+1} = H_t + \Phi^T \operatorname{diag}(c) \Phi,

    with :math:`c_i` the curvature of the negative log-likelihood of row i at :math:`w_{t+1}`
    (Ritter, Botev and Barber, 2018, section 2). Rows are not kept. One batch of all rows is the
    Laplace approximation itself. Several are close to it: each sums its rows up by a parabola
    around the mode of its time. The mean log-loss of 500 rows held out of the banana data, after
    1500 rows, 256 Fourier features, is .198 from one batch, .204 to .205 from batches of 100 rows
    and .207 to .209 from single rows, in either of two orders.

    The basis has up to about 2000 features, the likelihood is log-concave in f. The constants
    :math:`o_j`, e.g. the link of the base rates of the first batch, stay: what later batches say
    otherwise is left to the weights. Attributes are the means :math:`w_t` (m, c) and precisions
    :math:`H_t` (c, m, m), in float64, and `n_iter`, the Newton steps of the last update, of the
    column that took most.

    State, and pickle: ``8 c m (m + 1)`` bytes, for any number of rows.
    """

    weights: Tensor
    precision: Tensor
    offset: Tensor

    def __init__(self, basis: Basis, offset: Tensor, likelihood: Likelihood):
        m, c = basis.n_features, len(offset)
        self.basis, self.likelihood, self.offset = basis, likelihood, offset.double()
        self.weights = torch.zeros(m, c, dtype=torch.float64, device=offset.device)
        self.precision = torch.eye(m, dtype=torch.float64, device=offset.device).repeat(c, 1, 1)
        self.n_iter = 0

    def update(self, X: Tensor, Y: Tensor, row_weight: Tensor | None = None) -> OnlineLaplace:
        """Add a batch of rows, in place; the state moves to the device of X.

        X is (n, d), Y (n, c), weights are (n,) or (n, c) and not negative. A batch without rows
        changes nothing. A gradient that is not finite raises a FloatingPointError, and changes
        nothing either.

        ``O(c (n m^2 + m^3))`` a Newton step (:func:`.fit_newton`), of which there are five to ten.
        Memory beside the state and the features kept: about four m x m float64.
        """
        c = self.weights.shape[1]
        if Y.shape != (len(X), c):
            raise ValueError(f"Y must have shape ({len(X)}, {c}); got {tuple(Y.shape)}.")
        if not len(X):
            return self
        for name in ("offset", "weights", "precision"):
            setattr(self, name, getattr(self, name).to(X.device))
        design = StreamedDesign(self.basis, X.double())
        latent = self.offset + design.matmul(self.weights)  # (n, c)
        weight = None if row_weight is None else row_weight.reshape(len(X), -1).expand(Y.shape)
        modes = [
            self._mode(j, X, Y[:, [j]], latent[:, [j]], None if weight is None else weight[:, [j]])
            for j in range(c)
        ]
        for j, (weights, curvature, _) in enumerate(modes):
            self.weights[:, j] = weights
            self.precision[j] += design.curvature_gram(curvature)[0]
        self.n_iter = max(n_iter for *_, n_iter in modes)
        return self

    def _mode(
        self, j: int, X: Tensor, y: Tensor, latent: Tensor, row_weight: Tensor | None
    ) -> tuple[Tensor, Tensor, int]:
        """Weights (m,) of column j after a batch, the curvature there (n, 1), and Newton steps."""
        L = jittered_cholesky(self.precision[j]).factor
        design = StreamedDesign(_Whitened(self.basis, L), X.double())
        problem = newton_problem(design, y, self.likelihood, offset=latent, row_weight=row_weight)
        fit = fit_newton(
            problem,
            solver="exact",
            tol=ONLINE_TOL,
            loss_tol=0.0,
            max_iter=ONLINE_STEPS,
            generator=torch.Generator(),
        )
        step = tri_solve(L.mT, fit.weights, upper=True)
        return self.weights[:, j] + step[:, 0], problem.curvature(fit.latent), fit.n_iter

    def posterior(self) -> ClassifierPosterior:
        r"""The posterior of the latent functions, of covariance :math:`H_t^{-1}`; ``O(c m^3)``.

        It shares no memory with this object, and takes ``4 c m^2`` bytes.
        """
        return ClassifierPosterior(
            self.basis,
            self.weights.clone(),
            self.offset.clone(),
            [
                WeightGaussian.full(self.weights[:, j], inverse_factor(H))
                for j, H in enumerate(self.precision)
            ],
        )


class _Whitened:
    """Features in the coordinates L^T (w - w_t), in which N(w_t, (L L^T)^-1) is N(0, I)."""

    n_blocks = 1

    def __init__(self, basis: Basis, L: Tensor) -> None:
        self.basis, self.L, self.n_features = basis, L, basis.n_features

    def block_slice(self, block: int) -> slice:
        """All columns."""
        return slice(0, self.n_features)

    def features(self, X: Tensor, block: int) -> Tensor:
        """All columns, (n, m)."""
        Phi = torch.cat([self.basis.features(X, k) for k in range(self.basis.n_blocks)], dim=1)
        return tri_solve(self.L, Phi.mT, upper=False).mT  # Phi L^-T


@dataclass(frozen=True)
class NewtonSums:
    """What a pass adds up of k columns, at their weights; in float64."""

    loss: Tensor  # (k,), negative log-likelihood, nats
    slope: Tensor  # (m, k), its gradient
    hessian: Tensor  # (k, m, m)
    zero_slope: Tensor  # (m, k), the gradient at zero weights
    weight: Tensor  # (k,), of the observations

    def __add__(self, other: NewtonSums) -> NewtonSums:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return NewtonSums(*(a + b for a, b in pairs))


@dataclass(frozen=True)
class ClassRows:
    """The model that observations are seen through; picklable, for whoever has the blocks."""

    basis: Basis
    likelihood: Likelihood
    offset: Tensor  # (c,)

    def __call__(
        self, data: Data, *, columns: Tensor, weights: Tensor, first: bool = False
    ) -> NewtonSums:
        """The statistic of a block, y (n, c), of some columns (k,) at weights (m, k).

        The gradient at zero weights is that of the `first` pass. Features are made once, of as many
        rows as a tile holds.
        """
        step = tile_rows(8 * MADE_OF * self.basis.n_features)
        tiles = (data.take(slice(i, i + step)) for i in range(0, max(len(data), 1), step))
        return reduce(operator.add, (self._of_tile(t, columns, weights, first) for t in tiles))

    def _of_tile(self, data: Data, columns: Tensor, weights: Tensor, first: bool) -> NewtonSums:
        """The sums of some observations at weights (m, k) of the columns that still move."""
        design = StreamedDesign(self.basis, data.X)
        offset = self.offset[columns]
        problem = newton_problem(
            design, data.y[:, columns], self.likelihood, offset=offset, row_weight=data.weight
        )
        zero = offset.expand_as(problem.Y)
        latent = zero + design.matmul(weights)
        return NewtonSums(
            problem.loss(latent, torch.zeros_like(offset)),
            -design.rmatmul(problem.slope(latent)),
            design.curvature_gram(problem.curvature(latent)),
            -design.rmatmul(problem.slope(zero)) if first else torch.zeros_like(weights),
            problem.row_weight.sum(0),
        )


@dataclass(frozen=True)
class SumsFit(Modes):
    """Outcome of `fit_newton_sums`; every tensor float64."""

    hessian: Tensor  # (c, m, m), of the negative log-likelihood at the weights


def fit_newton_sums(
    blocks: Any,  # of which `Data` with y (n, c) are read, on the device of the offset
    rows: ClassRows,
    *,
    prior_variance: float,
    start: Tensor | None = None,
    tol: float = 1e-4,
    loss_tol: float = 1e-5,
    max_iter: int = 30,
    callback: Callback | None = None,  # hears of the rows of a pass, too
) -> SumsFit:
    """The mode of c problems that share their features, as `skgp.inference.newton.fit_newton`.

    ``O(n c m^2)`` a pass, one a step and one at the start.
    """
    at = _OfBlocks(blocks, rows, prior_variance, start, callback)
    modes = newton_steps(at, tol=tol, loss_tol=loss_tol, max_iter=max_iter, callback=callback)
    return SumsFit(**vars(modes), hessian=at.hessian)


class _OfBlocks:
    """`NewtonObjective` over blocks: `losses` takes a pass, which tells all of the step."""

    def __init__(
        self,
        blocks: Any,
        rows: ClassRows,
        prior_variance: float,
        start: Tensor | None,
        callback: Callback | None,
    ) -> None:
        m, c = rows.basis.n_features, len(rows.offset)
        self._blocks, self._rows, self._callback = blocks, rows, callback
        self._precision = 1 / prior_variances(prior_variance, c).to(rows.offset)
        self.weights = rows.offset.new_zeros(m, c)
        if start is not None:
            check_start(start, self.weights)
            self.weights += start.to(self.weights)
        self._columns = torch.arange(c, device=rows.offset.device)
        first = self._pass(self.weights, first=True)
        self.loss, self._slope, self.hessian = self._joint(first, self.weights)
        self.total = first.weight
        self.zero_norm = torch.linalg.vector_norm(first.zero_slope, dim=0)

    def _pass(self, weights: Tensor, *, first: bool = False) -> NewtonSums:
        """Sums of the present columns at weights (m, k)."""
        at = partial(self._rows, columns=self._columns, weights=weights, first=first)
        return self._blocks.sum(at, self._callback)

    def _joint(self, sums: NewtonSums, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """J (k,), and gradients (m, k) and Hessians (k, m, m) of the negative log-likelihood."""
        prior = 0.5 * self._precision[self._columns] * weights.square().sum(0)
        return sums.loss + prior, sums.slope, sums.hessian

    def gradient(self, columns: Tensor) -> Tensor:
        """O(m k)."""
        return self._precision[columns] * self.weights[:, columns] + self._slope[:, columns]

    def direction(self, columns: Tensor, B: Tensor, forcing: Tensor) -> Direction:
        """Exact, by a Cholesky factor a column."""
        self._columns, self._D = columns, torch.empty_like(B)
        for j, column in enumerate(columns.tolist()):
            A = self.hessian[column].clone()
            A.diagonal().add_(self._precision[column])
            self._D[:, j] = cho_solve(jittered_cholesky(A).factor, B[:, j])
        return Direction(self._D, self._D[:0], 0, 0)

    def losses(self, step: Tensor) -> Tensor:
        """A pass, whose sums are kept."""
        weights = self.weights[:, self._columns] + step * self._D
        self._tried = step, self._joint(self._pass(weights), weights)
        return self._tried[1][0]

    def move(self, step: Tensor, after: Tensor) -> None:
        """Another pass where no step of some columns lowers their loss."""
        if not torch.equal(step, self._tried[0]):
            self.losses(step)
        columns, (loss, slope, hessian) = self._columns, self._tried[1]
        self.weights[:, columns] += step * self._D
        self.loss[columns], self._slope[:, columns], self.hessian[columns] = loss, slope, hessian
