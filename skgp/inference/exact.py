r"""One basis function an observation, in function space: the exact GP.

With :math:`\Phi = S = K` (m = n, appendix I.2 of Evans and Nair, 2020) the posterior mean of the
weights solves :math:`(K + \sigma^2 I) \mu = y`, and the predictive mean is that of the exact GP.

===================  ==========================  ===============================================
paper                code                        meaning
===================  ==========================  ===============================================
:math:`\mu`          ``weights`` (n,)            representer weights :math:`A^{-1} y`
:math:`\sigma^2`     ``noise``                   noise variance; :math:`A = K + \sigma^2 I`
full :math:`C`       :class:`DenseCovariance`    Cholesky factor of A: the exact GP's covariance
diagonal, chevron    :class:`WeightCovariance`   the paper's C in the basis K, and Prop. 4
--                   :class:`PathwiseCovariance` posterior draws by Matheron's rule
===================  ==========================  ===============================================

**Augmentation** (appendix G) adds a basis function at the test point. With a full C its posterior
correlation with the others is known in closed form and the augmented model is the exact GP, so that
is what a full covariance gives; without augmentation the variance is :math:`k^T \Sigma k` alone,
:math:`k^T K^{-1} k - k^T A^{-1} k`. For a diagonal or chevron C it is Proposition 4.

**Pathwise draws** (Wilson et al., 2021, "Pathwise conditioning of Gaussian processes"). For a prior
draw :math:`f_s` (random features) and noise :math:`\varepsilon_s`, the function
:math:`f_s(x) - k(x, X) A^{-1} (f_s(X) + \varepsilon_s)` has the posterior covariance. Draws are
more right-hand sides of the same conjugate gradients, nearly free.

**Given covariance matrices** as NumPy arrays (the kernel may be one of strings or graphs), L is the
Cholesky factor of A and Y (n, t) has t targets (Rasmussen and Williams, 2006, Algorithm 2.1):

.. math:: E[f_*] = K_*\, \alpha, \quad \alpha = A^{-1} Y, \qquad
          V[f_*] = K_{**} - V^T V, \quad V = L^{-1} K_*^T .
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from scipy.linalg.blas import dtrsm
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import DENSE_ENTRIES, RESIDUAL
from skgp.inference.pathwise import (
    PathwiseCovariance,
    PivotCovariance,
    affordable_rank,
    leave_one_out_z2,
    nearly_exact,
    perturbed_targets,
    pivot_posterior,
    pivoted_factor,
)
from skgp.inference.weights.gram import optimal_gaussian, optimal_std
from skgp.inference.weights.posterior import WeightGaussian
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.kernels.operators import KernelOperator, kernel_matmul
from skgp.linalg.cg import block_cg
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.preconditioners import NystromPreconditioner
from skgp.linalg.runtime import TensorState, large_operation, tile_rows


class Covariance(Protocol):
    """Posterior covariance of f at new rows X (p, d) of a kernel, given training rows Z (n, d)."""

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,)."""

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""


@dataclass
class DenseCovariance(TensorState):
    r"""Covariance of the exact GP, :math:`k(x, x') - k(x, Z) A^{-1} k(Z, x')`; ``O(n^2 p)``.

    With the Cholesky factor of K too it is that of the basis functions alone,
    :math:`k(x, Z) (K^{-1} - A^{-1}) k(Z, x')` (no augmentation).
    """

    factor: Tensor  # (n, n), lower, of A
    prior_factor: Tensor | None = None  # (n, n), lower, of K

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,)."""
        root, prior_root = self._roots(gram_tile(kernel, X, Z).T)
        prior = gram_diag(kernel, X) if prior_root is None else prior_root.square().sum(0)
        return prior - root.square().sum(0)

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""
        root, prior_root = self._roots(gram_tile(kernel, X, Z).T)
        prior = gram_tile(kernel, X, X) if prior_root is None else prior_root.T @ prior_root
        return prior - root.T @ root

    def _roots(self, K: Tensor) -> tuple[Tensor, Tensor | None]:
        root = tri_solve(self.factor, K, upper=False)  # (n, p)
        if self.prior_factor is None:
            return root, None
        return root, tri_solve(self.prior_factor, K, upper=False)


@dataclass
class WeightCovariance(TensorState):
    r"""The paper's covariance of the weights in the basis K, and Proposition 4.

    .. math:: \mathbb V[f(x)] = k(x)^T C C^T k(x)
              + \frac{\sigma^2 k(x, x)^2}{k(x)^T W k(x) + \sigma^2 k(x, x)},

    the second term v(x) where `augment`. W holds the row weights, 1 in the paper. The proposition
    is about one test point. Between two, v is given the prior's correlation,
    :math:`\sqrt{v(x) v(x') / (k(x, x) k(x', x'))}\, k(x, x')`: draws are as smooth as the prior's,
    far from the data they are the prior's, and no variance depends on what is predicted together.
    """

    q: WeightGaussian  # over the n weights; its mean is not used
    noise: float
    augment: bool
    rows_per_point: float = 1.0  # training rows a basis function stands for: scales k(x)'k(x)
    row_weight: Tensor | None = None  # (n,), diagonal of W

    def variance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Variances, shape (p,). ``O(n p (1 + k))`` for k dense columns."""
        K = gram_tile(kernel, X, Z)
        return self.q.variance(K) + self._augmentation(kernel, X, K)

    def covariance(self, kernel, X: Tensor, Z: Tensor) -> Tensor:
        """Joint covariance, shape (p, p)."""
        K = gram_tile(kernel, X, Z)
        posterior = self.q.covariance(K)
        if not self.augment:
            return posterior
        scale = (self._augmentation(kernel, X, K) / gram_diag(kernel, X)).sqrt()
        return posterior + scale[:, None] * gram(kernel, X) * scale

    def _augmentation(self, kernel, X: Tensor, K: Tensor) -> Tensor:
        """Second term of Prop. 4, shape (p,)."""
        prior = gram_diag(kernel, X)
        if not self.augment:
            return torch.zeros_like(prior)
        squares = K.square()
        squares = squares.sum(1) if self.row_weight is None else squares @ self.row_weight
        squares = self.rows_per_point * squares
        return self.noise * prior.square() / (squares + self.noise * prior)


@dataclass(frozen=True)
class CovarianceChoice:
    """Which covariance is wanted, and what it takes."""

    kind: str = "full"  # "full", "chevron", "diagonal" or "samples"
    augment: bool = True
    n_dense_columns: int = 100  # of "chevron"
    prior: Any = None  # a Basis: random features of the prior draws of "samples"
    n_samples: int = 64  # draws of "samples"


def weight_covariance(
    kernel, data: Data, noise: float, wanted: CovarianceChoice
) -> WeightCovariance:
    """The paper's "diagonal" or "chevron" covariance of the weights, Phi = S = K, in closed form.

    "diagonal" (Prop. 1) streams ``n^2`` kernel evaluations; "chevron" takes ``O(n^3)`` flops and
    three n x n matrices.
    """
    X, n = data.X, len(data)
    row_weight = X.new_ones(n) if data.weight is None else data.weight
    if wanted.kind == "diagonal":
        tiles = X.split(tile_rows(n * X.element_size()))
        squares = torch.cat([gram_tile(kernel, tile, X).square() @ row_weight for tile in tiles])
        std = optimal_std(squares / noise + gram_diag(kernel, X))
        q = WeightGaussian.diagonal(torch.zeros_like(std), std)
    else:
        K = gram_tile(kernel, X, X)
        squares = (K * row_weight) @ K
        n_dense = min(wanted.n_dense_columns, n)
        q, _ = optimal_gaussian(squares, X.new_zeros(n), noise, K, n_dense=n_dense)
    return WeightCovariance(q, noise, wanted.augment, row_weight=data.weight)


@dataclass
class FunctionSpacePosterior(TensorState):
    """Posterior of f given by representer weights; see the module docstring."""

    kernel: object  # without noise
    X: Tensor  # (n, d)
    weights: Tensor  # (n,); or (n, t) of t targets, which share kernel and noise
    uncertainty: Covariance
    calibration: float = 1.0  # z^2, of all variances, that of the noise included
    n_iter: int = 1
    residual: float = 0.0  # true, relative, of the system of the mean
    converged: bool = True
    log_marginal_likelihood: float | None = None  # nats, where it is cheap
    history: list[float] = field(default_factory=list)

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f at X (p, d); shape (p,) or (p, t). ``O(n p)``."""
        columns = self.weights.reshape(len(self.weights), -1)  # (n, t)
        found = kernel_matmul(self.kernel, X, self.X, columns)
        return found.reshape(len(X), *self.weights.shape[1:])

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean, (p,) or (p, t), and uncalibrated variance (p,) of f at X (p, d)."""
        return self.mean(X), self.uncertainty.variance(self.kernel, X, self.X)

    def covariance(self, X: Tensor) -> Tensor:
        """Uncalibrated posterior covariance of f at X (p, d); shape (p, p)."""
        return self.uncertainty.covariance(self.kernel, X, self.X)


def fit_dense(
    kernel,  # without noise
    data: Data,  # observation i has noise variance `noise / data.weight[i]`
    noise: float,
    wanted: CovarianceChoice,
    *,
    generator: torch.Generator,
) -> FunctionSpacePosterior:
    """Exact GP mean by one Cholesky factorisation, with any of the covariances.

    ``O(n^3 / 3)`` flops and ``8 n^2`` bytes, kept only for "full"; "chevron" takes two more
    matrices of that size while it is fitted.
    """
    X, row_noise = data.X, data.row_noise(data.X.new_tensor(noise))
    if wanted.kind == "full" and nearly_exact(kernel, X, row_noise):
        at = pivot_posterior(kernel, X, data.y, row_noise)
        uncertainty = PivotCovariance(at.factor, at.root, wanted.augment)
        columns = tri_solve(at.factor.T, at.mean.reshape(len(at.mean), -1), upper=True)
        weights = columns.reshape(at.mean.shape)
        return FunctionSpacePosterior(
            kernel, at.Z, weights, uncertainty, log_marginal_likelihood=at.evidence
        )
    B, prior_weights = _right_hand_sides(data, noise, wanted, generator)
    A = gram_tile(kernel, X, X)
    A.diagonal().add_(row_noise)
    factor = jittered_cholesky(A).factor
    del A
    half = tri_solve(factor, B, upper=False)
    solution = tri_solve(factor.T, half, upper=True)
    t = data.n_targets
    fit_term = float(half[:, :t].square().sum()) + t * len(X) * math.log(2 * math.pi)
    dense = None
    if wanted.kind == "full":
        prior_factor = None if wanted.augment else jittered_cholesky(gram_tile(kernel, X, X)).factor
        dense = DenseCovariance(factor, prior_factor)
    return _posterior(
        kernel, data, noise, wanted, prior_weights, solution, dense,
        log_marginal_likelihood=-0.5 * fit_term - t * float(factor.diagonal().log().sum()),
    )  # fmt: skip


def fit_iterative(
    kernel,
    data: Data,
    noise: float,
    wanted: CovarianceChoice,  # of kind "samples" or "diagonal"
    *,
    generator: torch.Generator,
    rank: int = 2000,  # of the Nystrom preconditioner; less where memory holds no more
    dtype: torch.dtype = torch.float32,  # of stored entries and products; float32 attains 1e-6
    **limits: Any,
) -> FunctionSpacePosterior:
    r"""Representer weights and pathwise draws by preconditioned conjugate gradients.

    With row weights w the system is made symmetric,
    :math:`(W^{1/2} K W^{1/2} + \sigma^2 I)\, W^{-1/2} \alpha = W^{1/2} y`. Arguments are those of
    :func:`fit_dense` and these.

    Limits are ``tol`` (1e-2), ``max_iter`` (200) and ``callback`` of
    :func:`~skgp.linalg.cg.block_cg`. The tolerance is relative to the norm of `y`; draws are held
    to that absolute size too, for what counts is their error next to the noise, and to 1e-2 of
    their own. The posterior's ``converged`` is False where the true residual missed `tol`
    tenfold: do not predict from it without looking.

    Set-up ``O(n^2 d / 2 + n r^2)``, an iteration ``2 n^2 (1 + s)`` flops on entries that were
    computed in float64 whatever `dtype`. Memory ``2 n^2`` bytes for a float32 matrix, ``8 n r`` for
    the preconditioner, ``40 n s`` for the iteration.
    """
    limits = {"tol": RESIDUAL, "max_iter": 200} | limits
    X = data.X
    root_weight = X.new_ones(len(X), 1) if data.weight is None else data.weight.sqrt()[:, None]
    B, prior_weights = _right_hand_sides(data, noise, wanted, generator)
    low_rank = pivoted_factor(kernel, X, affordable_rank(len(X), rank), generator=generator)
    preconditioner = NystromPreconditioner(low_rank.factor.mul_(root_weight), noise)
    operator = KernelOperator(kernel, X, dtype=dtype)
    B = root_weight * B
    norms = torch.linalg.vector_norm(B, dim=0)
    of_targets = norms[: data.n_targets].mean()
    scale = of_targets if float(of_targets) > 0 else norms.mean()  # a constant y is 0 here
    limits["tol"] = limits["tol"] * scale / norms.clamp(min=torch.finfo(B.dtype).tiny)
    limits["tol"][data.n_targets :].clamp_(max=RESIDUAL)
    result = block_cg(
        lambda V: root_weight * operator.matmul(root_weight * V).to(V.dtype) + noise * V,
        B,
        preconditioner=preconditioner,
        warn=False,
        **limits,
    )
    return _posterior(
        kernel, data, noise, wanted, prior_weights, root_weight * result.solution,
        n_iter=max(1, result.n_iter), residual=float(result.residual[: data.n_targets].max()),
        converged=result.converged, history=result.history,
    )  # fmt: skip


def _right_hand_sides(
    data: Data, noise: float, wanted: CovarianceChoice, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """y and the noisy values of prior draws, (n, t + s), and the draws' weights where there are."""
    Y = data.y.reshape(len(data), -1)  # (n, t)
    if wanted.kind != "samples":
        return Y, None
    row_noise = data.row_noise(data.X.new_tensor(noise))
    weights, drawn = perturbed_targets(wanted.prior, data.X, row_noise, wanted.n_samples, generator)
    return torch.cat([Y, drawn], dim=1), weights


def _posterior(
    kernel,
    data: Data,
    noise: float,
    wanted: CovarianceChoice,
    prior_weights: Tensor | None,
    solution: Tensor,
    uncertainty: Covariance | None = None,
    **outcome: Any,
) -> FunctionSpacePosterior:
    """The posterior of the solved right-hand sides (n, t + s)."""
    t = data.n_targets
    weights, betas = solution[:, :t].clone().reshape(data.y.shape), solution[:, t:].clone()
    calibration = 1.0
    if prior_weights is not None:
        uncertainty = PathwiseCovariance(wanted.prior, prior_weights, betas)
        calibration = leave_one_out_z2(weights, betas)
    elif uncertainty is None:
        uncertainty = weight_covariance(kernel, data, noise, wanted)
    return FunctionSpacePosterior(
        kernel, data.X.clone(), weights, uncertainty, calibration, **outcome
    )


def condition(A: np.ndarray, Y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L (n, n), lower, and alpha, of the shape of Y: (n,) or (n, t). ``O(n^3)``.

    A NotPositiveDefiniteError where A (n, n) has no factor.
    """
    if A.size <= DENSE_ENTRIES:
        few = jittered_cholesky(A, max_jitter=0.0).factor  # type: ignore[arg-type]
        return few, cho_solve(few, Y)  # type: ignore[arg-type,return-value]
    L = jittered_cholesky(_tensor(A), max_jitter=0.0).factor
    return L.numpy(), cho_solve(L, _tensor(Y)).numpy()


def variance(L: np.ndarray, K_new: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Posterior variances (p,) given K_* (p, n) and the prior ones; ``O(n^2 p)``. May round < 0."""
    V = _whitened(L, K_new)
    return prior - np.einsum("ij,ij->j", V, V)


def variance_and_weights(
    L: np.ndarray, K_new: np.ndarray, prior: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`variance`, and :math:`A^{-1} K_*^T` (n, p): minus half its derivative in K_*."""
    V = _whitened(L, K_new)
    return prior - np.einsum("ij,ij->j", V, V), _solved(L, V, transposed=True)


def covariance(L: np.ndarray, K_new: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Posterior covariance (p, p) given K_* (p, n) and K_** (p, p)."""
    V = _whitened(L, K_new)
    return prior - V.T @ V


def _whitened(L: np.ndarray, K_new: np.ndarray) -> np.ndarray:
    """V (n, p)."""
    return _solved(L, K_new.T)


def _solved(L: np.ndarray, B: np.ndarray, transposed: bool = False) -> np.ndarray:
    """:math:`L^{-1} B` or :math:`L^{-T} B` (n, p), of L in either order, which is not copied.

    By BLAS, which takes a quarter less time than torch of 1000 rows, a tenth less of 3000.
    """
    columns = L.flags.f_contiguous
    with large_operation(B.size * len(L)):
        return dtrsm(1.0, L if columns else L.T, B, lower=columns, trans_a=transposed == columns)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Without a copy, but of memory that is not to be written to."""
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
