"""The parameters of a state-space form as functions of a kernel's hyper-parameters."""

from typing import Any

import torch
from torch import Tensor

from skgp.kernels.sde import state_space

__all__ = ["KernelParameters"]

_ROUNDING = 1e-11  # of log parameters


class KernelParameters:
    """A kernel, and the parameters of its state-space form as a function of theta.

    Log variances and log rates are affine functions of theta for most kernels. These are found out
    once, where torch's way through a kernel expression takes longer than the evidence of few rows.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.form = kernel, state_space(kernel)
        self.start = torch.from_numpy(kernel.theta.copy())
        self._slopes, self._level = self._affine()

    @property
    def is_amplitude(self) -> Tensor:
        """Which entries of theta, (t,), scale variances and nothing else."""
        if self._slopes is None:
            return torch.zeros(len(self.start), dtype=torch.bool)
        rates = self._slopes[len(self.form.order) :]
        return (rates.abs() < _ROUNDING).all(0)

    def parameters(self, theta: Tensor) -> Tensor:
        """Of the form, (q,), without a graph."""
        if self._slopes is None:
            return self.form.parameters(theta).detach()
        return self._level + self._slopes @ (theta - self.start)

    def pull(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Gradient in theta of a function with gradient `slope` (q,) in the parameters."""
        if self._slopes is not None:
            return slope @ self._slopes
        theta = theta.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.form.parameters(theta) @ slope, theta)[0]

    def _affine(self) -> tuple[Tensor | None, Tensor]:
        """Slopes (q, t) where the parameters are affine in theta, and the parameters at start."""
        at = self.form.parameters
        level = at(self.start)
        steps = torch.eye(len(self.start), dtype=torch.float64)
        slopes = level.new_zeros(len(level), len(steps))
        for i, step in enumerate(steps):
            slopes[:, i] = at(self.start + step) - level
        far = torch.linspace(-0.7, 0.9, len(steps), dtype=torch.float64)
        off = at(self.start + far) - level - slopes @ far
        return (slopes if bool((off.abs() < _ROUNDING).all()) else None), level
