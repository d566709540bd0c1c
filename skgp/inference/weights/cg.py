r"""Preconditioned conjugate gradients for the weights, on features regenerated at every product.

Solves :math:`(\Phi^T \Phi + \sigma^2 I) V = \Phi^T T` for several columns at once. The
preconditioner is the same matrix for p of the n rows,

.. math:: P = \tfrac{n}{p} \Phi_p^T \Phi_p + \sigma^2 \big(1 + 4 (\tfrac np - 1)\big) I.

Its ridge is larger than :math:`\sigma^2` because p rows resolve only directions above about
:math:`\sigma^2 n / p`: measured on n = 5000, m = 10000, 4 n/p needed half the iterations of
:math:`\sigma^2`, and n/p and 4 n/p about the same.
"""

import torch
from torch import Tensor

from skgp.inference.weights.design import MEMORY_BUDGET, StreamedDesign
from skgp.linalg.cg import Callback, CGResult, block_cg
from skgp.linalg.preconditioners import NystromPreconditioner

_MAX_ROWS = 2000


def weights_cg(
    design: StreamedDesign,
    targets: Tensor,
    noise_variance: float,
    *,
    initial: Tensor | None = None,
    n_precondition_rows: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    tol: float = 1e-6,
    max_iter: int = 1000,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> CGResult:
    r"""Solve the ridge regression of `targets` on a streamed design by block PCG.

    Parameters
    ----------
    design : StreamedDesign
        :math:`\Phi`, rows scaled by the weights; it keeps features as its own budget allows.
    targets : Tensor of shape (n, k)
        T, rows scaled likewise (``design.scale_rows``).
    noise_variance : float
        :math:`\sigma^2 > 0`.
    initial : Tensor of shape (m, k), optional
        Start; zero by default.
    n_precondition_rows : int, optional
        p; 0 for no preconditioner. By default as many as `memory_budget` allows, 2000 at most.
    memory_budget : int, default=2**29
        Bytes of the preconditioner's factor, ``8 m p``.
    tol : float, default=1e-6
        Residual relative to :math:`\Phi^T t`, per column. Features in float32 attain about 1e-5.
    max_iter : int, default=1000
    generator : torch.Generator
        Draws the rows of the preconditioner.
    callback : callable, optional
        ``callback(iteration, {"residual": float})``; True stops and keeps the state.

    Returns
    -------
    CGResult
        Its ``solution`` has shape (m, k).

    Raises
    ------
    ValueError
        If a shape, `noise_variance` or `n_precondition_rows` is invalid.

    Notes
    -----
    An iteration costs ``O(n m k + m p k)`` and the features that the design does not keep; the
    set-up ``O(m p^2)``. Memory ``8 m p`` bytes and ``6 m k`` float64 beside the design's.
    """
    if targets.ndim != 2 or targets.shape[0] != design.n_rows:
        raise ValueError(
            f"targets must have shape ({design.n_rows}, k); got {tuple(targets.shape)}."
        )
    if not noise_variance > 0:
        raise ValueError(f"noise_variance must be positive; got {noise_variance!r}.")
    if n_precondition_rows is None:
        n_precondition_rows = min(_MAX_ROWS, memory_budget // (8 * design.n_features))
    preconditioner = None
    if n_precondition_rows:
        preconditioner = subsample_preconditioner(
            design, noise_variance, n_precondition_rows, generator=generator
        )
    return block_cg(
        lambda V: design.gram_matmul(V) + noise_variance * V,
        design.rmatmul(targets),
        preconditioner=preconditioner,
        X0=initial,
        tol=tol,
        max_iter=max_iter,
        callback=callback,
    )


def subsample_preconditioner(
    design: StreamedDesign, noise_variance: float, n_rows: int, *, generator: torch.Generator
) -> NystromPreconditioner:
    r"""Inverse of :math:`\frac np \Phi_p^T \Phi_p + \lambda I` for p random rows.

    Parameters
    ----------
    design : StreamedDesign
    noise_variance : float
        :math:`\sigma^2`; :math:`\lambda = \sigma^2 (1 + 4 (n / p - 1))`.
    n_rows : int
        p; all rows, hence the exact inverse, if it is n or more.
    generator : torch.Generator

    Returns
    -------
    NystromPreconditioner
        Holds an (m, p) float64 matrix; ``O(m p^2)`` to set up, ``O(m p k)`` to apply.

    Raises
    ------
    ValueError
        If `n_rows` is not positive.
    """
    if n_rows < 1:
        raise ValueError(f"A preconditioner needs at least 1 row; got {n_rows!r}.")
    n_rows = min(n_rows, design.n_rows)
    ratio = design.n_rows / n_rows
    chosen = torch.randperm(design.n_rows, generator=generator, device=generator.device)[:n_rows]
    rows = design.subset(chosen.to(design.device))
    factor = torch.empty(design.n_features, n_rows, dtype=torch.float64, device=design.device)
    for block in range(design.basis.n_blocks):
        factor[design.basis.block_slice(block)] = ratio**0.5 * rows.features(block).mT
    return NystromPreconditioner(factor, noise_variance * (1 + 4 * (ratio - 1)))
