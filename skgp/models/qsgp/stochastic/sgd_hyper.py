"""Empirical Bayes inside the stochastic solver of QSGP (section 2.3 of the paper)."""

import torch
from torch import Tensor

from skgp.training import Adam

from .basis import StochasticBasis
from .estimators import constant_loss, diagonal_loss, quadratic_loss, sample_design
from .sgd_sampling import IndexSet
from .sgd_state import SGDState, raise_non_finite

__all__ = ["HyperParameters"]


class HyperParameters:
    r"""Log hyper-parameters and log noise variance, moved by Adam up the estimated ELBO.

    Parameters
    ----------
    state : SGDState
        Read, and written after every step; keeps Adam's moments over warm starts.
    basis : StochasticBasis
        With a diagonal S.
    n : int
        Rows of the data.
    """

    def __init__(self, state: SGDState, basis: StochasticBasis, n: int) -> None:
        self.state, self.basis, self.n = state, basis, n
        start = torch.as_tensor(basis.kernel.theta) if state.theta is None else state.theta
        self.theta = start.detach().to(torch.float64).clone().requires_grad_()
        noise = torch.tensor(state.noise_variance, dtype=torch.float64)
        self.log_noise = noise.log().requires_grad_()
        self.optimizer = Adam([self.theta, self.log_noise])
        if state.hyper_moments:
            self.optimizer.load_state_dict(state.hyper_moments)

    def gradient(
        self,
        X: Tensor,
        y: Tensor,
        side_i: tuple[IndexSet, Tensor],
        side_j: tuple[IndexSet, Tensor],
        column_weight: float,
        correction: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gradient of an unbiased estimate of -ELBO with respect to theta and log noise.

        Parameters
        ----------
        X, y : Tensor of shape (n_batch, d) and (n_batch,)
        side_i, side_j : tuple of IndexSet and Tensor of shape (|i|, 1 + k)
            Samples of basis functions, with their rows of mean and dense columns.
        column_weight : float
            Inverse of the fraction of the dense columns in V.
        correction : Tensor of shape (1 + k,)
            What the control variate of eq. (3) adds, at the current noise variance, to which it is
            inversely proportional. Its features are fixed (F.3).
        """
        state, basis = self.state, self.basis
        (i, V_i), (j, V_j) = side_i, side_j
        noise = self.log_noise.exp().to(basis.dtype)
        design = sample_design(basis, X, i, j, n=self.n, theta=self.theta)
        values = quadratic_loss(design, V_i, V_j, noise, y=y).value
        values = values + correction * (state.noise_variance / noise)
        # The envelope theorem: at its optimum (Prop. 1) the tail of C may be held fixed.
        c = state.tail_std(basis, self.n, i.indices, self.theta.detach())
        tail, _ = diagonal_loss(design, c, noise, i.indices >= state.n_dense)
        log_s = basis.log_precision_diag(i.indices, self.theta)
        constant = constant_loss(log_s, i, y, noise, n=self.n, m=basis.n_features)
        loss = 0.5 * (values[0] + column_weight * values[1:].sum() + tail + constant)
        theta, log_noise = torch.autograd.grad(
            loss, [self.theta, self.log_noise], allow_unused=True
        )
        return torch.zeros_like(self.theta) if theta is None else theta, log_noise

    @torch.no_grad()
    def move(self, iteration: int, gradient: tuple[Tensor, Tensor], rate: float) -> None:
        """Step of Adam, kept within the kernel's bounds.

        Raises
        ------
        NonFiniteStepError
            If the gradient is not finite; nothing has moved then.
        """
        parameters = (("theta", self.theta), ("noise_variance", self.log_noise))
        for (name, parameter), g in zip(parameters, gradient, strict=True):
            if not bool(torch.isfinite(g).all()):
                raise_non_finite(iteration, name, self.state)
            parameter.grad = g
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        bounds = torch.as_tensor(self.basis.kernel.bounds)
        if len(self.theta):
            self.theta.clamp_(bounds[:, 0], bounds[:, 1])
        self.state.theta = self.theta.detach().clone()
        self.state.noise_variance = float(self.log_noise.exp())
        self.state.hyper_moments = self.optimizer.state_dict()
