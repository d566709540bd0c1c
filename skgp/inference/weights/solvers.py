r"""Iterative solvers of ridge regression on streamed features.

Both solve :math:`(\Phi^T \Phi + \sigma^2 I) V = \Phi^T T` for several columns at once:
:func:`weights_cg` by preconditioned conjugate gradients, :func:`gauss_seidel` exactly in one block
of weights after another.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.weights.design import StreamedDesign, add_gram
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.cg import CGResult, block_cg
from skgp.linalg.cholesky import cho_solve, jittered_cholesky
from skgp.linalg.preconditioners import NystromPreconditioner
from skgp.linalg.runtime import Callback, memory_budget, tile_rows


def weights_cg(
    design: StreamedDesign,  # Phi, rows scaled by the weights
    targets: Tensor,  # T (n, k), rows scaled likewise (`design.scale_rows`)
    noise_variance: float,
    *,
    n_precondition_rows: int | None = None,  # p, 0 for none; by default 2000, or what 512 MiB hold
    tol: float = 1e-6,  # residual relative to Phi' t, a column; float32 attains 1e-5
    max_iter: int = 1000,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> CGResult:
    r"""Solve the ridge regression of `targets` on a streamed design by block PCG.

    The preconditioner is the same matrix for p random rows, :math:`\tfrac{n}{p} \Phi_p^T \Phi_p +
    \sigma^2 (1 + 4 (\tfrac np - 1)) I`: p rows resolve only directions above about
    :math:`\sigma^2 n / p`, hence the larger ridge. All rows give the exact inverse.

    An iteration costs ``O(n m k + m p k)`` and the features that the design does not keep; the
    set-up ``O(m p^2)``. Memory ``8 m p`` bytes and ``6 m k`` float64 beside the design's.
    """
    p = n_precondition_rows
    if p is None:
        p = min(
            defaults.PRECONDITIONER_ROWS,
            tile_rows(8 * design.n_features, defaults.PRECONDITIONER_BYTES),
        )
    preconditioner = None
    if p:
        preconditioner = subsample_preconditioner(design, noise_variance, p, generator=generator)
    return block_cg(
        lambda V: design.gram_matmul(V) + noise_variance * V,
        design.rmatmul(targets),
        preconditioner=preconditioner,
        tol=tol,
        max_iter=max_iter,
        callback=callback,
    )


def subsample_preconditioner(
    design: StreamedDesign, noise_variance: float, n_rows: int, *, generator: torch.Generator
) -> NystromPreconditioner:
    """The inverse described in :func:`weights_cg`; holds (m, p) float64, ``O(m p^2)`` to set up."""
    n_rows = min(n_rows, design.n_rows)
    ratio = design.n_rows / n_rows
    chosen = torch.randperm(design.n_rows, generator=generator, device=generator.device)[:n_rows]
    chosen = chosen.to(design.device)
    factor = torch.empty(design.n_features, n_rows, dtype=torch.float64, device=design.device)
    for block in design.blocks:
        rows = ratio**0.5 * design.features(block, chosen)  # (p, width)
        factor[design.basis.block_slice(block)] = rows.mT
    return NystromPreconditioner(factor, noise_variance * (1 + defaults.RIDGE_FACTOR * (ratio - 1)))


@dataclass(frozen=True)
class GaussSeidelResult:
    """Outcome of :func:`gauss_seidel`."""

    solution: Tensor  # (m, k), float64
    misfit: Tensor  # (n, k), t - Phi v; over the noise, (Phi Phi' + s2 I)^-1 t
    n_iter: int  # sweeps, counting one that was interrupted
    residual: Tensor  # (k,), gradient of J relative to Phi' t, as met by blocks
    converged: bool


def gauss_seidel(
    design: StreamedDesign,
    targets: Tensor,
    noise_variance: float,
    *,
    block_size: int = 2000,  # largest number of weights solved for at once: blocks are joined
    n_directions: int = defaults.N_DIRECTIONS,  # sweeps' displacements kept; 0: Gauss-Seidel
    tol: float = 1e-6,  # relative gradient norm at which every column has converged
    max_iter: int = 100,  # sweeps
    generator: torch.Generator | None = None,  # draws the order of the blocks; cyclic without it
    callback: Callback | None = None,
) -> GaussSeidelResult:
    r"""Minimise :math:`J(v) = \tfrac12 \| t - \Phi v \|^2 + \tfrac12 \sigma^2 \| v \|^2` by blocks.

    ::

        r = t
        for each block c:  F = Phi[:, c];  d = (F'F + s2 I)^-1 (F'r - s2 v_c);  v_c += d;  r -= F d

    Every block sees all rows and what the others have explained, so the iterate is useful long
    before the first sweep ends, for any number m of features. Two additions speed up the sweeps
    that follow: blocks in a fresh random order each sweep, and after each sweep the exact minimiser
    of J over the displacements of the last sweeps, whose images under Phi the running residual
    gives for nothing (the idea of conjugate gradients, with a sweep for preconditioner).

    Other arguments are those of :func:`weights_cg`. The callback is told "residual" (the relative
    gradient norm so far), "loss" (J of the first column) and "sweep" after every block; a
    NumericalWarning says when `max_iter` sweeps do not reach `tol`.

    First sweep ``O(n m block_size)``, later ones ``O(n m k)`` with factors and features kept.
    Memory: ``(n + m) k (4 + n_directions)`` float64, the features that the design keeps, those of
    one block of columns (tiles, generated twice, if they exceed an eighth of the budget), factors
    of blocks up to another eighth, the others being made again, and ``block_size^2``. A
    block wider than n is solved in its dual, of size n.
    """
    state = _State(design, targets.to(design.device, torch.float64), noise_variance)
    solver = _BlockSolver(design, noise_variance)
    groups = _groups(design, block_size)
    gradient = state.V.new_zeros(len(groups), targets.shape[1])
    scale = torch.zeros_like(gradient)
    displacements: list[tuple[Tensor, Tensor]] = []
    iteration = 0
    for sweep in range(1, max_iter + 1):
        before = (state.V.clone(), state.R.clone()) if n_directions else None
        for c in _order(len(groups), generator):
            columns = _Columns(design, groups[c])
            if sweep == 1:
                scale[c] = columns.rmatmul(targets).square().sum(0)
            gradient[c] = solver.step(c, columns, state)
            residual = _relative(gradient, scale)
            iteration += 1
            if callback is not None:
                info = {"residual": float(residual.max()), "loss": state.loss(), "sweep": sweep}
                if callback(iteration, info):
                    return GaussSeidelResult(state.V, state.R, sweep, residual, False)
        if bool((residual <= tol).all()):
            return GaussSeidelResult(state.V, state.R, sweep, residual, True)
        if before is not None:
            displacements.append((state.V - before[0], before[1] - state.R))
            displacements = displacements[-n_directions:]
            state.minimise_over(displacements)
            # The sweep and its acceleration together are the direction that comes next.
            displacements[-1] = (state.V - before[0], before[1] - state.R)
    warn_caller(
        f"Gauss-Seidel stopped after max_iter={max_iter} sweeps at a relative gradient of "
        f"{float(residual.max()):.1e}, short of tol={tol:.1e}. Raise max_iter or tol.",
        NumericalWarning,
    )
    return GaussSeidelResult(state.V, state.R, max_iter, residual, False)


class _State:
    """Weights V (m, k), residual R = T - Phi V (n, k) and the objective they define."""

    def __init__(self, design: StreamedDesign, targets: Tensor, noise_variance: float):
        self.noise_variance = noise_variance
        eps = torch.finfo(design.dtype).eps
        self.resolution = eps**0.5 * torch.linalg.vector_norm(targets, dim=0)
        self.V = targets.new_zeros(design.n_features, targets.shape[1])
        self.R = targets.clone()

    def loss(self) -> float:
        """J of the first column."""
        v, r = self.V[:, 0], self.R[:, 0]
        return 0.5 * float(r @ r + self.noise_variance * (v @ v))

    def minimise_over(self, displacements: list[tuple[Tensor, Tensor]]) -> None:
        """Move to the minimiser of J over the span of the displacements, column by column."""
        q = len(displacements)
        hessian = self.V.new_empty(self.V.shape[1], q, q)
        slope = self.V.new_empty(self.V.shape[1], q)
        for a, (P, Q) in enumerate(displacements):
            slope[:, a] = (Q * self.R).sum(0) - self.noise_variance * (P * self.V).sum(0)
            for b, (P_b, Q_b) in enumerate(displacements[: a + 1]):
                product = (Q * Q_b).sum(0) + self.noise_variance * (P * P_b).sum(0)
                hessian[:, a, b] = hessian[:, b, a] = product
        scale = hessian.diagonal(dim1=1, dim2=2).sqrt()
        # A displacement whose energy J does not resolve is known too roughly to be multiplied: V
        # and R would drift apart. It counts as 0, which plain sweeps, that shrink it, survive.
        scale = torch.where(scale > self.resolution[:, None], scale, torch.inf)
        hessian = hessian / (scale[:, :, None] * scale[:, None, :])
        inverse = torch.linalg.pinv(hessian, rtol=1e-10, hermitian=True)
        step = (inverse @ (slope / scale)[:, :, None])[:, :, 0] / scale  # (k, q)
        for a, (P, Q) in enumerate(displacements):
            self.V += step[:, a] * P
            self.R -= step[:, a] * Q


class _Columns:
    """Features of one group of blocks, held if they are few enough, else regenerated."""

    def __init__(self, design: StreamedDesign, blocks: range):
        self.design, self.blocks = design, blocks
        basis = design.basis
        self.slice = slice(basis.block_slice(blocks[0]).start, basis.block_slice(blocks[-1]).stop)
        self.width = self.slice.stop - self.slice.start
        n_bytes = design.n_rows * self.width * design.dtype.itemsize
        self._held = self.whole() if n_bytes <= defaults.KEPT_FACTORS * memory_budget() else None

    def whole(self) -> Tensor:
        """All rows, (n, width)."""
        return self.design.columns(self.blocks)

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        """Slices of rows with their features."""
        if self._held is not None:
            yield slice(0, self.design.n_rows), self._held
            return
        for rows in self.design.tiles(self.width):
            yield rows, self.design.columns(self.blocks, rows)

    def rmatmul(self, R: Tensor) -> Tensor:
        """``F^T R`` (width, k), float64."""
        R = R.to(self.design.device, self.design.dtype)
        out = torch.zeros(self.width, R.shape[1], dtype=torch.float64, device=R.device)
        for rows, F in self.tiles():
            out += F.mT @ R[rows]
        return out

    def matmul(self, D: Tensor) -> Tensor:
        """``F D`` (n, k), float64."""
        D = D.to(self.design.dtype)
        return torch.cat([(F @ D).double() for _, F in self.tiles()])

    def gram(self) -> Tensor:
        """``F^T F`` (width, width), float64, of which the lower triangle is right."""
        out = torch.zeros(self.width, self.width, dtype=torch.float64, device=self.design.device)
        for _, F in self.tiles():
            add_gram(out, F)
        return out


class _BlockSolver:
    """Exact minimisation of J over one block of weights; keeps factors while the budget lasts."""

    def __init__(self, design: StreamedDesign, noise_variance: float):
        self._n_rows, self._noise_variance = design.n_rows, noise_variance
        self._bytes_left = defaults.KEPT_FACTORS * memory_budget(design.device)
        self._factors: dict[int, Tensor] = {}

    def step(self, c: int, columns: _Columns, state: _State) -> Tensor:
        """Update the state in place; return the squared gradient norm (k,) met before."""
        V = state.V[columns.slice]
        gradient = columns.rmatmul(state.R) - self._noise_variance * V
        L = self._factor(c, columns)
        if columns.width <= self._n_rows:
            D = cho_solve(L, gradient)
        else:
            # (F'F + s2)^-1 (F'r - s2 v) = F'(FF' + s2)^-1 (r + F v) - v
            D = columns.rmatmul(cho_solve(L, state.R + columns.matmul(V))) - V
        V += D
        state.R -= columns.matmul(D)
        return gradient.square().sum(0)

    def _factor(self, c: int, columns: _Columns) -> Tensor:
        """Cholesky factor of block c, of its columns or, where these exceed n, of the rows."""
        if c in self._factors:
            return self._factors[c]
        if columns.width <= self._n_rows:
            hessian = columns.gram()
        else:
            F = columns.whole()
            hessian = (F @ F.mT).double()
        hessian.diagonal().add_(self._noise_variance)
        L = jittered_cholesky(hessian).factor
        if L.nbytes <= self._bytes_left:
            self._factors[c] = L
            self._bytes_left -= L.nbytes
        return L


def _groups(design: StreamedDesign, block_size: int) -> list[range]:
    """Join neighbouring blocks of the basis as long as they have at most `block_size` columns."""
    basis = design.basis
    groups, first = [], 0
    for block in range(1, basis.n_blocks + 1):
        if (
            block == basis.n_blocks
            or basis.block_slice(block).stop - basis.block_slice(first).start > block_size
        ):
            groups.append(range(first, block))
            first = block
    return groups


def _order(n_groups: int, generator: torch.Generator | None) -> list[int]:
    if generator is None:
        return list(range(n_groups))
    return torch.randperm(n_groups, generator=generator, device=generator.device).tolist()


def _relative(gradient: Tensor, scale: Tensor) -> Tensor:
    """Gradient norm (k,) relative to the right-hand side, over the blocks visited so far."""
    total = scale.sum(0)
    ratio = gradient.sum(0) / torch.where(total > 0, total, torch.ones_like(total))
    return ratio.sqrt()
