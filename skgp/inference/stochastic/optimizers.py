r"""Sparse steps of the stochastic iterations: AdaGrad, Newton directions of blocks, Adam.

Each optimizer keeps its moments for all m functions but reads and writes those of the sample alone.
``step`` returns the change and the new moments, which `commit` stores.
"""

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.linalg.runtime import TensorState

Step = tuple[Tensor, dict[str, Tensor]]


class AdaGrad(TensorState):
    r"""AdaGrad (Duchi et al., 2011), appendix I.1: :math:`-\rho\, g / \sqrt{\sum g^2}` an entry."""

    def __init__(self, weights: Tensor) -> None:
        """For parameters of the shape, dtype and device of `weights` (m, q)."""
        self.state = {"sum_squares": torch.zeros_like(weights)}

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        return self._scaled(indices, gradient, gradient.square(), rate)

    def commit(
        self, indices: Tensor, moments: dict[str, Tensor], good: Tensor | None = None
    ) -> None:
        """Store the moments of a step, in place; those of a step that was not taken are dropped."""
        for name, values in moments.items():
            if good is not None:
                values = torch.where(good, values, self.state[name][indices])
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
        # Some support rows at even distances: they are in the order of the observations, whose
        # first ones are alike in a series.
        some = B[:: -(-len(B) // defaults.NEWTON_RANK)]
        direction = self._direction(some, gradient)
        return self._scaled(indices, direction, direction.square().mean(0), rate)

    def _direction(self, B: Tensor, gradient: Tensor) -> Tensor:
        inner = B @ B.T
        damping = defaults.NEWTON_DAMPING * inner.diagonal().sum()
        inner.diagonal().add_(damping)
        L = torch.linalg.cholesky_ex(inner).L
        direction = (gradient - B.T @ torch.cholesky_solve(B @ gradient, L)) / damping
        return torch.where(damping > 0, direction, gradient)


class SparseAdam(AdaGrad):
    """Adam (Kingma and Ba, 2015) whose moments age only when their row is sampled."""

    def __init__(self, weights: Tensor) -> None:
        self.state = {
            "first": torch.zeros_like(weights),
            "second": torch.zeros_like(weights),
            "visits": torch.zeros_like(weights, dtype=torch.int32),
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
    return known[name](weights)
