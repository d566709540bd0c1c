r"""Predictions averaged over samples of the hyper-parameters.

Given a sample :math:`u_s` the model is an exact Gaussian process, so that the prediction is a
mixture over the S samples kept, of weights :math:`w_s`:

.. math:: p(f_* \mid y) \approx \sum_s w_s N(f_*; m_s, v_s), \qquad
          m_s = k_s^T \alpha_s, \quad v_s = k_{**} - k_s^T A_s^{-1} k_s, \quad
          \alpha_s = A_s^{-1} y,

with :math:`A_s = K_s + D_s` over the training rows (D diagonal: the noise) and :math:`k_s` their
covariance with the new row.

What is kept is :math:`\alpha`, (S, n), and the rows: means cost ``O(S n d)`` a row. Variances need
:math:`A_s^{-1}`, by one of two solvers.

``"cholesky"``
    A factor of each :math:`A_s`, made at the first variance and kept in memory as far as a budget
    goes; never pickled.
``"cg"``
    Conjugate gradients for a block of rows at a time, preconditioned by a low rank whose pivots all
    samples share. Kernel matrices are made anew in each call: the cost of a call is mostly theirs,
    so that many rows in one call are cheap. A solution that stops early makes a variance too great,
    never too small: the iterates minimise the error in the norm of A (Galerkin).
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.gp_mixture import RNG, GPMixture
from skgp.inference.pathwise import affordable_rank, nystrom_root, pivots_of, prior_draws
from skgp.kernels import FourierFeatures, gram_tile, has_spectral_density, stationary
from skgp.kernels.defaults import STORED_SHARE
from skgp.kernels.distances import METRICS, origin
from skgp.kernels.expression import Binder, Node, built_in
from skgp.kernels.gram import covariance, evaluate_tile, variance
from skgp.kernels.operators import RowOperator
from skgp.linalg.cg import block_cg
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, tri_solve
from skgp.linalg.preconditioners import LowRankPreconditioner
from skgp.linalg.runtime import (
    Callback,
    asks_for_gradients,
    memory_budget,
    require_memory,
    tile_rows,
)


class ExactInverse:
    """By the lower Cholesky factor (n, n) of A."""

    def __init__(self, factor: Tensor) -> None:
        self._L = factor

    def solve(self, B: Tensor, callback: Callback | None = None) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return cho_solve(self._L, B)

    def explained(self, K: Tensor) -> Tensor:
        r"""Diagonal (t,) of :math:`K^T A^{-1} K` for K (n, t)."""
        return tri_solve(self._L, K, upper=False).square().sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        r""":math:`K^T A^{-1} K`, (t, t)."""
        V = tri_solve(self._L, K, upper=False)
        return V.T @ V


class IterativeInverse:
    r"""By conjugate gradients preconditioned by F'F + D, F (r, n); what is explained falls short.

    With a residual r the variance of a row is too great by
    :math:`r^T A^{-1} r \le |r|^2 / \min D`, at most 0.01 min D.
    """

    def __init__(self, operator: RowOperator, D: Tensor, low_rank: Tensor) -> None:
        self._operator, self._D, self._dtype = operator, D, operator.dtype
        self._precondition = LowRankPreconditioner(low_rank, D, overwrite=True)

    def solve(self, B: Tensor, callback: Callback | None = None) -> Tensor:
        r""":math:`A^{-1} B` for B (n, k)."""
        return self._solve(B, defaults.SOLVED[self._dtype], callback)[0]

    def explained(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained`; never more. Its gradient in K is 2 A^-1 K."""
        # k'A^-1 k = x'k + x'r + e'A e with the error e of x and its residual r = k - A x.
        if not asks_for_gradients(K):
            X, left = self._solve_rows(K)
            return (X * (K + left)).sum(0)
        fixed = K.detach()
        X, left = self._solve(fixed, defaults.SOLVED[self._dtype])  # its error: the gradient's
        return 2 * (X * K).sum(0) - (X * (fixed - left)).sum(0)

    def explained_jointly(self, K: Tensor) -> Tensor:
        """As `ExactInverse.explained_jointly`, less a matrix without negative eigenvalues."""
        X, left = self._solve_rows(K)
        joint = X.T @ (K + left)
        return (joint + joint.T) / 2

    def _solve_rows(self, K: Tensor) -> tuple[Tensor, Tensor]:
        size = torch.linalg.vector_norm(K, dim=0).clamp_min(torch.finfo(K.dtype).tiny)
        tol = defaults.VARIANCE_TOL**0.5 * self._D.min() / size
        return self._solve(K, tol.clamp(defaults.SOLVED[self._dtype], 0.1))

    def _solve(
        self, B: Tensor, tol: float | Tensor, callback: Callback | None = None
    ) -> tuple[Tensor, Tensor]:
        """X (n, k), and B - A X."""
        precondition = lambda V: self._precondition(V.T).T  # noqa: E731
        found = block_cg(self._matmul, B, preconditioner=precondition, tol=tol, callback=callback)
        return found.solution, found.left

    def _matmul(self, V: Tensor) -> Tensor:
        return self._operator.matmul(V.T.to(self._dtype)).T.to(V) + self._D[:, None] * V


Inverse = ExactInverse | IterativeInverse


class MixtureState(GPMixture):
    """A fitted mixture of exact Gaussian processes over the same rows, n distinct ones.

    A pickle has ``8 n (S + d)`` bytes and loads without a GPU. A kernel matrix that cannot be
    factored raises NotPositiveDefiniteError.
    """

    def __init__(
        self,
        kernel: Any,  # with a WhiteKernel summand at the top level
        data: Data,  # training rows, float64; copied
        u: np.ndarray,  # (S, kernel.n_dims), logarithms of the hyper-parameters of each sample
        weights: np.ndarray | None = None,  # (S,), positive, in any scale; equal ones by default
        *,
        solver: str = "cholesky",  # or "cg"
        # Of the kernel matrix of "cg". In float32 a row's variance depends on the rows beside it by
        # rounding, of about 1e-6.
        dtype: torch.dtype = torch.float64,
        rank: int = 200,  # of the preconditioner, at most: as the budget allows
        callback: Callback | None = None,  # of `block_cg`, which solves for alpha
    ) -> None:
        super().__init__(kernel, data.map(torch.clone), u, weights)
        self._bind, self.solver = Binder(self._signal), solver
        rank = affordable_rank(len(self._X), rank)
        self._dtype, self._rank = dtype, rank
        self._factors: dict[int, Tensor] = {}
        self._pivots = self._choose_pivots(rank if solver == "cg" else 0)
        fit = 8.0 * len(u) * len(self._X) ** 2 <= self._factor_bytes()
        few = len(self._X) <= defaults.FEW_MIXED_ROWS and built_in(self._signal)
        self._together = solver == "cholesky" and few and fit
        self._alpha = self._solutions(callback)

    def _solutions(self, callback: Callback | None) -> Tensor:
        """Alpha (S, n)."""
        if self._together:
            return cho_solve(self._all_factors(), self._data.y.expand(self.n_samples, -1))
        y, parts = self._data.y[:, None], self._components(keep=False)
        columns = [each.solve(y, callback) for _, _, each in parts]
        return torch.cat(columns, 1).T.contiguous()

    def _lasting(self) -> dict[str, Any]:
        return super()._lasting() | {"_factors": {}, "_bind": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind = Binder(self._signal)

    def at(self, kernel: Any, u: np.ndarray) -> "MixtureState":
        """The same rows under the hyper-parameters u (kernel.n_dims,) alone."""
        settings: dict[str, Any] = {"dtype": self._dtype, "rank": self._rank}
        return MixtureState(kernel, self._data, u[None], solver=self.solver, **settings)

    def _component_means(self, Z: Tensor) -> Tensor:
        few = self._few_covariances(Z)
        if few is not None:
            return (self._alpha[:, None] @ few)[:, 0]
        out = self._X.new_empty(self.n_samples, len(Z))
        for s, theta in enumerate(self._theta):
            for rows, K in self._tiles(self._node(theta), Z):
                out[s, rows] = self._alpha[s] @ K
        return out

    def _component_moments(self, Z: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (S, t) of f at the rows of Z (t, d) under each sample."""
        few = self._few_covariances(Z)
        if few is not None:
            half = tri_solve(self._all_factors(), few, upper=False)
            var = (self._prior(Z) - half.square().sum(1)).clamp_(min=0.0)
            return (self._alpha[:, None] @ few)[:, 0], var
        self._refuse_recomputation(len(Z))
        mean = self._X.new_empty(self.n_samples, len(Z))
        var = torch.empty_like(mean)
        for s, node, inverse in self._components():
            prior = variance(node, Z).expand(len(Z))
            for rows, K in self._tiles(node, Z):
                mean[s, rows] = self._alpha[s] @ K
                var[s, rows] = (prior[rows] - inverse.explained(K)).clamp_(min=0.0)
        return mean, var

    def _joints(
        self, Z: Tensor, samples: np.ndarray | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        for s, node, inverse in self._components(samples):
            yield s, *self._joint(s, node, inverse, Z)

    def _draws(self, Z: Tensor, counts: np.ndarray, rng: RNG) -> Iterator[Tensor]:
        """Of many rows, where the kernel has Fourier features, draws of the prior are corrected."""
        if len(Z) <= defaults.MOST_JOINT or not has_spectral_density(self._signal):
            yield from super()._draws(Z, counts, rng)
            return
        for s, node, inverse in self._components(np.flatnonzero(counts)):
            yield self._corrected_draws(s, node, inverse, Z, int(counts[s]), rng)

    def _corrected_draws(
        self, s: int, node: Node, inverse: Inverse, Z: Tensor, n_draws: int, rng: RNG
    ) -> Tensor:
        r"""Matheron's rule: :math:`g_* + k_*^T A^{-1} (y - g - \varepsilon)`, g from the prior."""
        kernel = self._signal.clone_with_theta(self._theta[s].cpu().numpy())
        seed = int(rng.choice(2**31 - 1))
        centre = origin(self._X)[0]
        settings: dict[str, Any] = {
            "seed": seed,
            "block_size": defaults.MIXTURE_BLOCK,
            "origin": centre,
        }
        features = FourierFeatures(kernel, defaults.MIXTURE_FEATURES, Z.shape[1], **settings)
        n_features = features.block_slice(features.n_blocks - 1).stop
        weights = Z.new_tensor(rng.standard_normal((n_features, n_draws)))
        g, out = (prior_draws(features, rows, weights) for rows in (self._X, Z))
        g += self._row_noise(s).sqrt()[:, None] * Z.new_tensor(rng.standard_normal(g.shape))
        solution = inverse.solve(self._data.y[:, None] - g)
        for rows, K in self._tiles(node, Z):
            out[rows] += K.T @ solution
        return out

    def _all_factors(self) -> Tensor:
        """Cholesky factors (S, n, n) of few rows, made at once and kept."""
        if len(self._factors) < self.n_samples:
            S, n = self.n_samples, len(self._X)
            K = covariance(self._node(self._theta), self._X, None, METRICS["expand"])
            A = K.expand(S, n, n).clone()
            noise = torch.stack([self._row_noise(s) for s in range(S)])
            A.diagonal(dim1=-2, dim2=-1).copy_(self._prior(self._X) + noise)
            self._factors = dict(enumerate(jittered_cholesky(A).factor))
        return torch.stack([self._factors[s] for s in range(self.n_samples)])

    def _prior(self, X: Tensor) -> Tensor:
        """Prior variances (S, t)."""
        prior = variance(self._node(self._theta), X)
        return prior.expand(self.n_samples, 1, len(X))[:, 0]

    def _node(self, theta: Tensor) -> Node:
        return self._bind(theta, dtype=self._X.dtype, device=self._X.device)

    def _tiles(self, node: Node, X: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Covariances (n, t) between training rows and tiles of X."""
        n_rows = self._tile_rows()
        for start in range(0, len(X), n_rows):
            tile = X[start : start + n_rows]
            out = self._X.new_empty(len(tile), len(self._X))
            yield slice(start, start + n_rows), evaluate_tile(node, tile, self._X, out).T

    def _tile_rows(self) -> int:
        """Rows that are predicted together."""
        if self.solver == "cg":  # a solution of many rows makes the kernel matrix once a product
            return tile_rows(8 * defaults.SOLVED_COPIES * len(self._X))
        return tile_rows(8 * len(self._X), defaults.MIXTURE_TILE_BYTES)

    def _refuse_recomputation(self, n_rows: int) -> None:
        """Refuse variances that make the kernel matrix anew for too many solutions."""
        n, tile, S = len(self._X), self._tile_rows(), self.n_samples
        if self.solver != "cg" or RowOperator.stores(n, self._dtype, self._X.device):
            return
        n_tiles, products = math.ceil(n_rows / tile), S * defaults.FEWEST_PRODUCTS
        most = max(1, int(defaults.MADE_ANEW / (products * n**2 / 2)))
        if n_tiles > most:
            require_memory(
                self._dtype.itemsize * n**2 / STORED_SHARE,
                f"The variance of f at {n_rows} rows given {n} takes at least {n_tiles * products} "
                "products with their kernel matrix, which, stored,",
                f"Predict {most * tile} rows, the mean alone, or given fewer rows",
            )

    def _check_joint_memory(self, n_rows: int) -> None:
        """Refuse a joint covariance for whose covariances with the training rows is no room."""
        n, copies = len(self._X), defaults.JOINT_COPIES[self.solver]
        what = f"The joint covariance of {n_rows} rows given {n}"
        most = int(memory_budget(self._X.device) / (8 * copies * n))
        remedy = f"Ask for fewer of them at once (there is room for {most})"
        require_memory(8.0 * copies * n * n_rows, what, remedy)

    def _few_covariances(self, X: Tensor) -> Tensor | None:
        """Covariances (S, n, t) with few new rows, of all samples; None where they are not few."""
        shape = self.n_samples, len(self._X), len(X)
        if not self._together or math.prod(shape) > defaults.TOGETHER:
            return None
        shape = self.n_samples, len(X), len(self._X)
        node = self._node(self._theta)
        return covariance(node, X, self._X, METRICS["expand"]).expand(shape).mT

    def _joint(self, s: int, node: Node, inverse: Inverse, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (t,) and covariance (t, t) of f at the rows of X under sample s."""
        K = evaluate_tile(node, X, self._X, X.new_empty(len(X), len(self._X))).T
        prior = evaluate_tile(node, X, X, X.new_empty(len(X), len(X)))
        prior.diagonal().copy_(variance(node, X))
        covariance = prior - inverse.explained_jointly(K)
        return self._alpha[s] @ K, (covariance + covariance.T) / 2

    def _components(
        self, samples: np.ndarray | None = None, *, keep: bool = True
    ) -> Iterator[tuple[int, Node, Inverse]]:
        """Each sample (all by default) with its kernel and the inverse of its matrix A."""
        operator = None
        if self.solver == "cg":
            centre = origin(self._X) if stationary(self._signal) else 0.0
            operator = RowOperator(self._signal, self._X - centre, dtype=self._dtype)
        for s in range(self.n_samples) if samples is None else samples.tolist():
            node = self._node(self._theta[s])
            D = self._row_noise(s)
            if operator is not None:
                operator.set_theta(self._theta[s])
                yield s, node, IterativeInverse(operator, D, self._low_rank(self._theta[s]))
                continue
            factor = self._factors.get(s)
            if factor is None:
                factor = self._factor(node, D)
                if keep and (len(self._factors) + 1) * factor.nbytes <= self._factor_bytes():
                    self._factors[s] = factor
            yield s, node, ExactInverse(factor)

    def _low_rank(self, theta: Tensor) -> Tensor:
        """F = L_m^-1 K_mx (r, n): F'F is the Nystrom approximation of K by the pivots."""
        M = self._X[self._pivots]
        L = nystrom_root(self._signal, M, theta, self._dtype)
        F = self._X.new_empty(len(M), len(self._X))
        for start in range(0, len(self._X), step := tile_rows(16 * max(len(M), 1))):
            some = slice(start, start + step)
            K = gram_tile(self._signal, M, self._X[some], theta)
            F[:, some] = tri_solve(L, K, upper=False)
        return F

    def _factor_bytes(self) -> float:
        """What the factors that "cholesky" keeps may take; one at a time is made in any case."""
        return min(defaults.FACTOR_BYTES, memory_budget(self._X.device))

    def _factor(self, node: Node, D: Tensor) -> Tensor:
        n = len(self._X)
        A = evaluate_tile(node, self._X, self._X, self._X.new_empty(n, n))
        # Distances by a matrix product are not quite 0 between equal rows.
        A.diagonal().copy_(variance(node, self._X) + D)
        return jittered_cholesky(A).factor

    def _choose_pivots(self, rank: int) -> Tensor:
        """Pivots of a preconditioner for all samples, at the mean of their logarithms."""
        if rank == 0:
            return torch.empty(0, dtype=torch.int64, device=self._X.device)
        theta = self._shares @ self._theta
        kernel = self._signal.clone_with_theta(theta.cpu().numpy())
        generator = torch.Generator().manual_seed(defaults.PIVOT_SEED)
        return pivots_of(kernel, self._X, rank, generator=generator)
