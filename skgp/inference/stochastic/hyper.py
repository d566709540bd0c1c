r"""Empirical Bayes inside the stochastic solver of QSGP (section 2.3 of the paper).

The paper maximises its bound, in which a tail of C without entries below the diagonal pays

.. math:: \sum_{r > k} \log\big(1 + \phi_r^T \phi_r / (\sigma^2 s_{rr})\big)
          \;\ge\; \log|I + K / \sigma^2|

(Hadamard) where a full C pays the right-hand side. The left one grows with m without limit: from m
about n on the best noise variance under the bound is of the size of the prior variance whatever the
data, and length scales go to their bounds. ``complexity="support"`` takes the right-hand side from
:math:`\bar n` support rows, each of which stands for :math:`n / \bar n`,

.. math:: \log|I + \tfrac{n}{\bar n} K_{pp} / \sigma^2| ,

exact for all rows and otherwise a little small (Jensen), and moves nothing while the support rows
do not resolve the process: where its effective dimension exceeds half their number.

======================================  ==================  =============  ========
sin 3x + noise of variance .1,          bound, mean-field   support        exact GP
n = 1000, 600 iterations                (length, noise)
======================================  ==================  =============  ========
from (2, .5), m = 100                   .83, .115           .92, .107      .64, .105
from (2, .5), m = 600                   .68, .144           1.02, .105     .64, .105
======================================  ==================  =============  ========
"""

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.estimators import (
    constant_loss,
    diagonal_loss,
    quadratic_loss,
    sample_design,
)
from skgp.inference.stochastic.sampling import IndexSet
from skgp.inference.stochastic.state import SGDState, raise_non_finite
from skgp.kernels import gram
from skgp.optim import Adam

__all__ = ["COMPLEXITIES", "HyperParameters"]

COMPLEXITIES = ("bound", "support")
_REFRESH = 10  # iterations that a gradient of the complexity serves: theta moves by 1% in each


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
    complexity : {"bound", "support"}
        That of the paper's bound, or of the support rows (see the module).
    """

    def __init__(
        self, state: SGDState, basis: StochasticBasis, n: int, complexity: str = "bound"
    ) -> None:
        self.state, self.basis, self.n, self.complexity = state, basis, n, complexity
        self._calls = 0
        self._resolved, self._slopes = True, (torch.zeros(()), torch.zeros(()))
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
        (i, V_i), (j, V_j) = side_i, side_j
        noise = self.log_noise.exp().to(self.basis.dtype)
        design = sample_design(self.basis, X, i, j, n=self.n, theta=self.theta)
        values = quadratic_loss(design, V_i, V_j, noise, y=y).value
        values = values + correction * (self.state.noise_variance / noise)
        log_s = self.basis.log_precision_diag(i.indices, self.theta)
        constant = constant_loss(log_s, i, y, noise, n=self.n, m=self.basis.n_features)
        if self.complexity == "bound":
            # The envelope theorem: at its optimum (Prop. 1) the tail of C may be held fixed.
            c = self.state.tail_std(self.basis, self.n, i.indices, self.theta.detach())
            tail, _ = diagonal_loss(design, c, noise, i.indices >= self.state.n_dense)
            covariance = column_weight * values[1:].sum() + tail
        else:  # of the full C, but for what it has in common with the constant
            covariance = i.weight * log_s.sum()
        slopes = self._slope(0.5 * (values[0] + covariance + constant))
        if self.complexity == "bound":
            return slopes
        if self._calls % _REFRESH == 0:
            self._resolved, self._slopes = self._support_complexity()
        self._calls += 1
        if not self._resolved:
            return torch.zeros_like(self.theta), torch.zeros_like(self.log_noise)
        return slopes[0] + self._slopes[0], slopes[1] + self._slopes[1]

    def _slope(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient with respect to theta, of which some kernels have none, and log noise."""
        theta, log_noise = torch.autograd.grad(
            loss, [self.theta, self.log_noise], allow_unused=True
        )
        return torch.zeros_like(self.theta) if theta is None else theta, log_noise

    def _support_complexity(self) -> tuple[bool, tuple[Tensor, Tensor]]:
        """Whether the support rows resolve the process, and the gradient of half the log-det."""
        X = self.state.X_support.double()
        share = self.n / len(X) / self.log_noise.exp()
        A = share * gram(self.basis.kernel, X, theta=self.theta)
        A = A + torch.eye(len(X), dtype=A.dtype)
        L = torch.linalg.cholesky(A)
        dimension = len(X) - float(torch.cholesky_inverse(L.detach()).diagonal().sum())
        resolved = len(X) == self.n or dimension <= len(X) / 2
        return resolved, self._slope(L.diagonal().log().sum())

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
