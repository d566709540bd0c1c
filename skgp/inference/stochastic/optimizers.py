r"""Sparse steps for parameters of which an iteration sees few rows.

Every optimizer keeps its moments for all m rows but reads and writes those of the sampled rows
alone. ``step`` returns the change; the caller checks it before it is applied and before
`commit` stores the new moments, so that a bad gradient leaves nothing behind.
"""

from typing import Protocol

import torch
from torch import Tensor

from skgp.linalg.tensor_state import TensorState

__all__ = ["AdaGrad", "Adam", "Momentum", "NystromAdaGrad", "SparseOptimizer", "make_optimizer"]

Columns = Tensor | slice


class SparseOptimizer(Protocol):
    """What the stochastic solver asks of an optimizer."""

    state: dict[str, Tensor]

    def step(
        self, indices: Tensor, gradient: Tensor, rate: float, columns: Columns, B: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change of the rows `indices` (k, q) and their new moments."""


class AdaGrad(TensorState):
    r"""AdaGrad (Duchi et al., 2011), appendix I.1: :math:`-\rho\, g / \sqrt{\sum g^2}` an entry."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.state = {"sum_squares": torch.zeros(shape, dtype=dtype)}

    def step(
        self,
        indices: Tensor,
        gradient: Tensor,
        rate: float,
        columns: Columns = slice(None),
        B: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change (k, q) and the new sums of squares."""
        total = gather(self.state["sum_squares"], indices, columns) + gradient.square()
        tiny = torch.finfo(total.dtype).tiny
        return -rate * gradient / total.clamp_min(tiny).sqrt(), {"sum_squares": total}


class NystromAdaGrad(AdaGrad):
    r"""Block Newton directions from the control variate's features, scaled as AdaGrad does.

    The Hessian of the losses in a sampled block is nearly
    :math:`\tfrac{n}{\sigma^2 \bar n} B_i^T B_i` with the support features B already at hand. The
    direction is :math:`d = (\lambda I + B_i^T B_i)^{-1} g` (by Woodbury, in O(r^2 k)), with
    :math:`\lambda` a fraction of the trace; its step divides by the root of the sum of the mean
    squares of d so far. No constant of proportionality matters: AdaGrad is scale-free.

    Parameters
    ----------
    shape, dtype
        Of the parameters.
    rank : int, default=200
        Support rows used, at most those of B.
    damping : float, default=1e-3
        :math:`\lambda / \operatorname{tr}(B_i^T B_i)`.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        rank: int = 200,
        damping: float = 1e-3,
    ) -> None:
        super().__init__(shape, dtype)
        self.rank = rank
        self.damping = damping

    def step(
        self,
        indices: Tensor,
        gradient: Tensor,
        rate: float,
        columns: Columns = slice(None),
        B: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change (k, q) and the new sums of squares."""
        if B is None or not len(B):
            raise ValueError(
                'optimizer="nystrom" needs the support features: set n_support to 50 or more.'
            )
        direction = self._direction(B[: self.rank], gradient)
        previous = gather(self.state["sum_squares"], indices, columns)
        total = previous + direction.square().mean(0)
        tiny = torch.finfo(total.dtype).tiny
        return -rate * direction / total.clamp_min(tiny).sqrt(), {"sum_squares": total}

    def _direction(self, B: Tensor, gradient: Tensor) -> Tensor:
        inner = B @ B.T
        damping = self.damping * float(inner.diagonal().sum())
        if not damping > 0:
            return gradient
        inner.diagonal().add_(damping)
        L = torch.linalg.cholesky(inner)
        return (gradient - B.T @ torch.cholesky_solve(B @ gradient, L)) / damping


class Momentum(TensorState):
    r"""Heavy ball, :math:`v \leftarrow \beta v + (1 - \beta) g`, with one step size a sample.

    The step :math:`-\rho\, v / \sqrt{\sum \overline{g^2}}` divides by the root of the sum of the
    mean squared gradients of the sample, so that it is as free of scale as AdaGrad's, but keeps the
    direction of v.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, *, beta: float = 0.9) -> None:
        self.state = {
            "velocity": torch.zeros(shape, dtype=dtype),
            "sum_squares": torch.zeros(shape, dtype=dtype),
        }
        self.beta = beta

    def step(
        self,
        indices: Tensor,
        gradient: Tensor,
        rate: float,
        columns: Columns = slice(None),
        B: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change (k, q) and the new velocity."""
        velocity, total = (
            gather(self.state[name], indices, columns) for name in ("velocity", "sum_squares")
        )
        velocity = self.beta * velocity + (1 - self.beta) * gradient
        total = total + gradient.square().mean(0)
        step = -rate * velocity / total.clamp_min(torch.finfo(total.dtype).tiny).sqrt()
        return step, {"velocity": velocity, "sum_squares": total}


class Adam(TensorState):
    """Adam (Kingma and Ba, 2015) whose moments age only when their row is sampled."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        self.state = {
            "first": torch.zeros(shape, dtype=dtype),
            "second": torch.zeros(shape, dtype=dtype),
            "visits": torch.zeros(shape, dtype=torch.int32),
        }
        self.betas = betas

    def step(
        self,
        indices: Tensor,
        gradient: Tensor,
        rate: float,
        columns: Columns = slice(None),
        B: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change (k, q) and the new moments."""
        b1, b2 = self.betas
        first, second, visits = (
            gather(self.state[name], indices, columns) for name in ("first", "second", "visits")
        )
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient.square()
        visits = visits + 1
        unbiased = first / (1 - b1**visits)
        spread = (second / (1 - b2**visits)).sqrt() + 1e-30
        return -rate * unbiased / spread, {"first": first, "second": second, "visits": visits}


def make_optimizer(name: str, shape: tuple[int, int], dtype: torch.dtype) -> SparseOptimizer:
    """Build an optimizer by name.

    Parameters
    ----------
    name : {"adagrad", "adam", "momentum", "nystrom"}
    shape, dtype
        Of the parameters.

    Raises
    ------
    ValueError
        If the name is unknown.
    """
    if name not in _OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {sorted(_OPTIMIZERS)}, got {name!r}.")
    return _OPTIMIZERS[name](shape, dtype)


_OPTIMIZERS = {"adagrad": AdaGrad, "adam": Adam, "momentum": Momentum, "nystrom": NystromAdaGrad}


def gather(A: Tensor, indices: Tensor, columns: Columns = slice(None)) -> Tensor:
    """Copy the rows `indices` of A, of all columns or of some."""
    rows = A[indices]
    return rows if isinstance(columns, slice) else rows[:, columns]


def scatter(A: Tensor, indices: Tensor, columns: Columns, values: Tensor) -> None:
    """Write rows `indices` of A in place; the counterpart of `gather`."""
    if isinstance(columns, slice):
        A[indices] = values
    else:
        A[indices[:, None], columns] = values


def scatter_add(A: Tensor, indices: Tensor, columns: Columns, values: Tensor) -> None:
    """Add to distinct rows `indices` of A in place."""
    if isinstance(columns, slice):
        A[indices] += values
    else:
        A[indices[:, None], columns] += values
