"""Hyper-parameters that follow the bound of the stochastic iterations by Adam (Proposition 2)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.engine import Health, SolverState
from skgp.optim import Adam


class HyperParameters:
    """Log hyper-parameters, and perhaps the log noise variance, moved by Adam up the ELBO.

    Reads the state and writes it after every step; Adam's moments outlast warm starts.
    """

    def __init__(
        self,
        state: SolverState,
        kernel: Any,
        health: Health,
        noise_variance: float | Tensor | None = None,
    ) -> None:
        self.state, self.kernel, self.health = state, kernel, health
        numbers: Any = {"dtype": torch.float64, "device": state.weights.device}
        start = torch.as_tensor(kernel.theta) if state.theta is None else state.theta
        self.theta = start.detach().to(**numbers).clone().requires_grad_()
        self.leaves = {"theta": self.theta}
        if noise_variance is not None:
            noise = torch.as_tensor(noise_variance, **numbers)
            self.leaves["noise_variance"] = noise.log().requires_grad_()
        self.bounds = torch.as_tensor(kernel.bounds, **numbers).T if len(start) else None
        self.adam = Adam(list(self.leaves.values()))
        if state.hyper_moments:
            self.adam.load_state_dict(state.hyper_moments)

    def slopes(self, loss: Tensor) -> list[Tensor]:
        """Gradients with respect to the leaves; some kernels have none."""
        leaves = list(self.leaves.values())
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    @torch.no_grad()
    def move(self, iteration: int, gradients: Sequence[Tensor], rate: float) -> None:
        """Step of Adam, kept within the kernel's bounds; none once something was not finite."""
        before = [leaf.clone() for leaf in self.leaves.values()]
        for (name, leaf), gradient in zip(self.leaves.items(), gradients, strict=True):
            good = self.health.note(gradient, iteration, name)
            leaf.grad = torch.where(good, gradient, 0)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        if self.bounds is not None:
            self.theta.clamp_(*self.bounds)
        for leaf, old in zip(self.leaves.values(), before, strict=True):
            leaf.copy_(torch.where(good, leaf, old))
        self.state.theta = self.theta.detach().clone()
        self.state.hyper_moments = self.adam.state_dict()


def check_learnable(basis: StochasticBasis) -> None:
    """Refuse to learn hyper-parameters where the log-determinant of S has no cheap estimator."""
    if not basis.diagonal_precision:
        raise ValueError(
            "Proposition 2 needs a diagonal prior precision, and that of inducing points is "
            'K(Z, Z). Learn the hyper-parameters beforehand, or use basis="fourier".'
        )
