r"""State-space GPs as layers of a deep GP (Adam et al., 2020, section 4.4).

A layer is a function f with a linear prior mean and sites on the states at its knots. The bound of
a composition factorises over layers (Salimbeni and Deisenroth, 2017),

.. math:: \mathcal{L} = E[\log p(y \mid f_L(\dots f_1(x)))] - \sum_l KL(q_l(u) \,\|\, p_l(u)),

with the expectation over draws from the *marginals* of each layer at the draws of the one below:
an input is a number by itself, its interval is looked up, and no joint draw is needed.

Hyper-parameters and inputs are differentiated through h and T by hand, q through the moments of the
pairs: for those, the mean parameters of q, the derivatives of the expectation are the targets of a
natural-gradient step,

.. math:: \Lambda^* = -2\, \partial E / \partial \Sigma, \qquad
          \lambda^* = \partial E / \partial \mu + \Lambda^* \mu.

The gradient in the hyper-parameters is that at fixed q.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.knots import Chain, PairSites, infer_pairs
from skgp.inference.markov.states import InducingState
from skgp.kernels.sde import state_space
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.small_matrices import inner, matvec
from skgp.optim.loop import Adam

__all__ = ["StateSpaceLayer", "fit_layers"]

Callback = Callable[[int, dict], bool | None]

_LEAST_VAR = 1e-12  # of a draw: at 0 the derivative of the root is infinite
_MOST_HALVINGS = 10


class StateSpaceLayer:
    """One function of a deep GP.

    Parameters
    ----------
    kernel : sklearn kernel expression
        Without noise; its free hyper-parameters are learned.
    knots : Tensor of shape (M,)
        Rising; kept.
    intercept, slope : float, default=0.0
        Of the prior mean, learned.
    sites : PairSites, optional
        To start from; by default q is the prior.

    Attributes
    ----------
    theta : Tensor of shape (kernel.n_dims,)
        Log hyper-parameters; a leaf.
    linear : Tensor of shape (2,)
        Intercept and slope; a leaf.
    sites : PairSites
    """

    def __init__(
        self,
        kernel: Any,
        knots: Tensor,
        *,
        intercept: float = 0.0,
        slope: float = 0.0,
        sites: PairSites | None = None,
    ) -> None:
        self.form, self.knots = state_space(kernel), knots
        self.theta = torch.tensor(kernel.theta, dtype=torch.float64, requires_grad=True)
        line = [intercept, slope]
        self.linear = torch.tensor(line, dtype=torch.float64, requires_grad=True)
        self.sites = PairSites.zeros(self.form.n_states, len(knots)) if sites is None else sites
        self._before = self.sites
        self.refresh()

    def refresh(self) -> None:
        """Work q out after a change of hyper-parameters or sites; O(M d^3).

        A natural step that has left no valid q is shortened here. Where that is of no use, the
        hyper-parameters having moved away from the sites, negative precisions of sites become 0.

        Raises
        ------
        NotPositiveDefiniteError
            If even so there is no valid q, the sites being infinite or NaN.
        """
        self._parameters = self.form.parameters(self.theta)
        self._dynamics = self.form.at(self._parameters.detach())
        self._chain = Chain.of(self._dynamics, self.knots)
        self._pairs = infer_pairs(self._chain, self.sites)
        for _ in range(_MOST_HALVINGS):
            if self._pairs.is_proper:
                break
            self.sites = self._before.towards(self.sites, 0.5)
            self._pairs = infer_pairs(self._chain, self.sites)
        else:
            self.sites = _nonnegative(self.sites)
            self._pairs = infer_pairs(self._chain, self.sites)
        if not self._pairs.is_proper:
            raise NotPositiveDefiniteError(
                "The sites of a layer leave no valid posterior. Lower the rate of the natural "
                "steps, or draw more samples."
            )
        self._moments = tuple(
            t.detach().clone().requires_grad_() for t in (self._pairs.mean, self._pairs.cov)
        )

    def marginals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at inputs of any shape, differentiable in everything."""
        flat = x.reshape(-1)
        h, T = _Condition.apply(self._parameters, flat, self.knots, self._dynamics)
        mean, cov = self._moments
        k = torch.searchsorted(self.knots, flat.detach(), right=True)
        m = inner(h, mean[:, k]) + self.linear[0] + self.linear[1] * flat
        v = T + inner(h, matvec(cov[..., k], h))
        return m.reshape(x.shape), v.reshape(x.shape)

    def sample(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """One draw from each marginal of f, of the shape of x."""
        mean, var = self.marginals(x)
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return mean + var.clamp_min(_LEAST_VAR).sqrt() * noise

    def kl(self) -> Tensor:
        """KL divergence from the prior, nats; differentiable in `theta`, at fixed q."""
        # A plane through the value with the known slope carries it into torch's graph.
        slope = self._chain.gradient(self._pairs.F_bar, self._pairs.Q_bar)
        value = self._pairs.kl(self.sites)
        return value - (self._parameters - self._parameters.detach()) @ slope

    def natural_step(self, rate: float) -> None:
        """Move the sites along the natural gradient, to take effect with `refresh`.

        Parameters
        ----------
        rate : float
            In (0, 1]. The gradients of the *negative* bound must have been accumulated, by
            ``loss.backward()``.
        """
        mean, cov = self._moments
        if mean.grad is None or cov.grad is None:
            return
        precision = cov.grad + cov.grad.transpose(0, 1)
        linear = matvec(precision, mean.detach()) - mean.grad
        self._before = self.sites
        self.sites = self.sites.towards(PairSites(linear, precision), rate)

    def state(self) -> InducingState:
        """f less the line, for predictions and small pickles."""
        kernel = self.form.kernel.clone_with_theta(self.theta.detach().numpy())
        return InducingState(kernel, self.knots, self.sites)


def fit_layers(
    layers: Sequence[StateSpaceLayer],
    expected_log_prob: Callable[[], Tensor],
    others: Sequence[Tensor] = (),
    *,
    n_iter: int,
    rate: float = 0.1,
    learning_rate: float = 0.01,
    decay: float = 0.1,
    callback: Callback | None = None,
) -> list[float]:
    """Train layers together: natural steps for q, Adam for all hyper-parameters.

    Parameters
    ----------
    layers : sequence of StateSpaceLayer
        Changed in place.
    expected_log_prob : callable
        Estimates the expectation over all rows, by draws through the layers; nats.
    others : sequence of Tensor
        Further leaves, such as the log variance of the noise.
    n_iter : int
    rate : float, default=0.1
        Of the natural steps.
    learning_rate : float, default=0.01
        Of Adam, at the start; 0 keeps the hyper-parameters.
    decay : float, default=0.1
        What is left of both rates at the end, exponentially.
    callback : callable, optional
        Called as ``callback(iteration, {"loss": ...})``; True stops.

    Returns
    -------
    list of float
        The negative bound, estimated, at each iteration.
    """
    leaves = [t for layer in layers for t in (layer.theta, layer.linear)] + list(others)
    adam = Adam(leaves, lr=learning_rate)
    history: list[float] = []
    for iteration in range(n_iter):
        left = decay ** (iteration / n_iter)
        adam.zero_grad()
        for layer in layers:
            layer.refresh()
        loss = torch.stack([layer.kl() for layer in layers]).sum() - expected_log_prob()
        loss.backward()
        history.append(float(loss.detach()))
        for layer in layers:
            layer.natural_step(rate * left)
        for group in adam.param_groups:
            group["lr"] = learning_rate * left
        adam.step()
        if callback is not None and callback(iteration + 1, {"loss": history[-1]}):
            break
    for layer in layers:
        layer.refresh()
    return history


def _nonnegative(sites: PairSites) -> PairSites:
    """The nearest sites of nonnegative precision, with which any prior leaves a valid q."""
    if not bool(sites.precision.isfinite().all()):
        return sites
    values, vectors = torch.linalg.eigh(sites.precision.movedim(-1, 0))
    precision = (vectors * values.clamp_min(0.0)[:, None]) @ vectors.mT
    return PairSites(sites.linear, precision.movedim(0, -1).contiguous())


class _Condition(torch.autograd.Function):
    """h and T of `condition`, differentiable in the parameters of the dynamics and in x."""

    @staticmethod
    def forward(ctx, parameters: Tensor, x: Tensor, knots: Tensor, dynamics):
        rows = condition(dynamics, knots, x.detach())
        ctx.rows = rows
        return rows.h.clone(), rows.T.clone()

    @staticmethod
    def backward(ctx, h_bar: Tensor, T_bar: Tensor):
        parameters, x = ctx.rows.backward(h_bar, T_bar)
        return parameters, x, None, None
