"""Adam [1]_ by a few operations of torch.

The optimizers of torch load its compiler (`torch._dynamo`, some two seconds) when the first is
made; a fit has no use for it.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.optim.defaults import BLOCK

__all__ = ["Adam"]


class Adam:
    r"""Gradient steps scaled by running moments of the gradient g.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
              v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
              x_t = x_{t-1} - \rho \, \frac{m_t / (1 - \beta_1^t)}
                                          {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    Parameters
    ----------
    parameters : iterable of Tensor, or of dict
        Leaf tensors, changed in place; or groups ``{"params": [...], "lr": ..., "eps": ...}``, with
        whatever else the caller wants to find in ``param_groups``.
    lr : float, default=1e-3
        Learning rate of a group that names none.
    betas : tuple of float, default=(0.9, 0.999)
    eps : float, default=1e-8

    Attributes
    ----------
    param_groups : list of dict
        "lr" may be set between steps.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        given: list[Any] = list(parameters)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, **group} for group in groups]
        self.betas, self.eps = betas, eps
        leaves = self._leaves()
        self._n_steps = [0] * len(leaves)
        self._first = [torch.zeros_like(x, requires_grad=False) for x in leaves]
        self._second = [torch.zeros_like(x, requires_grad=False) for x in leaves]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self._leaves():
            leaf.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        own = [(g["lr"], g.get("eps", self.eps)) for g in self.param_groups for _ in g["params"]]
        for i, (leaf, (rate, eps)) in enumerate(zip(self._leaves(), own, strict=True)):
            if leaf.grad is None:
                continue
            self._n_steps[i] += 1
            arrays = (leaf, leaf.grad, self._first[i], self._second[i])
            if leaf.numel() <= BLOCK or not all(a.is_contiguous() for a in arrays):
                self._move(arrays, rate, eps, self._n_steps[i])
                continue
            for part in zip(*(a.view(-1).split(BLOCK) for a in arrays), strict=True):
                self._move(part, rate, eps, self._n_steps[i])

    def state_dict(self) -> dict[str, list]:
        """Steps and moments of each parameter, for `load_state_dict` of another instance."""
        return {"n_steps": self._n_steps, "first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, list]) -> None:
        """Go on from a copy of moments of parameters of the same shapes."""
        self._n_steps = list(state["n_steps"])
        self._first, self._second = ([t.clone() for t in state[k]] for k in ("first", "second"))

    def _leaves(self) -> list[Tensor]:
        return [leaf for group in self.param_groups for leaf in group["params"]]

    def _move(self, arrays: Sequence[Tensor], rate: float, eps: float, n_steps: int) -> None:
        """One step of a parameter, or of a block of it; all four arrays of one shape."""
        x, gradient, first, second = arrays
        beta_1, beta_2 = self.betas
        first.lerp_(gradient, 1 - beta_1)
        second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        scale = second.sqrt().div_(math.sqrt(1 - beta_2**n_steps)).add_(eps)
        x.addcdiv_(first, scale, value=-rate / (1 - beta_1**n_steps))
