"""Sparse steps for parameters of which an iteration sees few rows.

Every optimizer keeps its moments for all m rows but reads and writes those of the sampled rows
alone. ``step`` returns the change and the new moments; the caller checks the change before it is
applied and before `commit` stores the moments, so that a bad gradient leaves nothing behind.
"""

import torch
from torch import Tensor

from skgp.inference.defaults import NEWTON_DAMPING, NEWTON_RANK
from skgp.linalg.runtime import TensorState

Step = tuple[Tensor, dict[str, Tensor]]


class AdaGrad(TensorState):
    r"""AdaGrad (Duchi et al., 2011), appendix I.1: :math:`-\rho\, g / \sqrt{\sum g^2}` an entry."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.state = {"sum_squares": torch.zeros(shape, dtype=dtype)}

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        return self._scaled(indices, gradient, gradient.square(), rate)

    def commit(self, indices: Tensor, moments: dict[str, Tensor]) -> None:
        """Store the moments of a step, in place."""
        for name, values in moments.items():
            self.state[name][indices] = values

    def _scaled(self, indices: Tensor, direction: Tensor, squares: Tensor, rate: float) -> Step:
        total = self.state["sum_squares"][indices] + squares
        tiny = torch.finfo(total.dtype).tiny
        return -rate * direction / total.clamp_min(tiny).sqrt(), {"sum_squares": total}


class NystromAdaGrad(AdaGrad):
    r"""Block Newton directions from the control variate's features, scaled as AdaGrad does.

    The Hessian of the losses in a sampled block is nearly
    :math:`\tfrac{n}{\sigma^2 \bar n} B_i^T B_i` with the support features B (r, k) already at hand.
    The direction is :math:`d = (\lambda I + B_i^T B_i)^{-1} g` (by Woodbury, in O(r^2 k)), with
    :math:`\lambda` a fraction of the trace; its step divides by the root of the sum of the mean
    squares of d so far. No constant of proportionality matters: AdaGrad is scale-free.
    """

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        if B is None or not len(B):
            raise ValueError(
                'optimizer="nystrom" needs the support features: set n_support to 50 or more.'
            )
        direction = self._direction(B[:NEWTON_RANK], gradient)
        return self._scaled(indices, direction, direction.square().mean(0), rate)

    def _direction(self, B: Tensor, gradient: Tensor) -> Tensor:
        inner = B @ B.T
        damping = NEWTON_DAMPING * float(inner.diagonal().sum())
        if not damping > 0:
            return gradient
        inner.diagonal().add_(damping)
        L = torch.linalg.cholesky(inner)
        return (gradient - B.T @ torch.cholesky_solve(B @ gradient, L)) / damping


class SparseAdam(AdaGrad):
    """Adam (Kingma and Ba, 2015) whose moments age only when their row is sampled."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.state = {
            "first": torch.zeros(shape, dtype=dtype),
            "second": torch.zeros(shape, dtype=dtype),
            "visits": torch.zeros(shape, dtype=torch.int32),
        }

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        first, second, visits = (self.state[k][indices] for k in ("first", "second", "visits"))
        first = 0.9 * first + (1 - 0.9) * gradient
        second = 0.999 * second + (1 - 0.999) * gradient.square()
        visits = visits + 1
        spread = (second / (1 - 0.999**visits)).sqrt() + 1e-30
        step = -rate * (first / (1 - 0.9**visits)) / spread
        return step, {"first": first, "second": second, "visits": visits}


def make_optimizer(name: str | None, n_support: int, weights: Tensor) -> AdaGrad:
    """Build the optimizer of parameters of this shape by name.

    None is "nystrom" where there are support rows, and else "adagrad", the paper's.
    """
    known = {"adagrad": AdaGrad, "adam": SparseAdam, "nystrom": NystromAdaGrad}
    if name is None:
        name = "nystrom" if n_support else "adagrad"
    if name not in known:
        raise ValueError(f"optimizer must be one of {sorted(known)}, got {name!r}.")
    return known[name]((weights.shape[0], weights.shape[1]), weights.dtype)
