"""Predictions of a short series by one Cholesky factor, where that keeps enough digits."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, from_numpy

from skgp.inference.defaults import PREDICTED_ENTRIES
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.series import Lags, few_times
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.kernels.sde import Dynamics


def posterior_of(dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor) -> Posterior:
    """What sites say of f at any times, by whichever route; as of `Posterior`."""
    if x.device.type == "cpu" and 0 < len(x) <= few_times(dynamics.n_states):
        lags = Lags.of(x.diff(prepend=x[:1]))
        if lags is not None and dynamics.origin is not None:
            lags = lags.after(x.numpy() - dynamics.origin)
        prior = None if lags is None else DensePrior(dynamics, lags)
        if prior is not None and prior.suits(weight.numpy()):
            return ShortPosterior(prior, dynamics, x, beta, weight)
    return Posterior(dynamics, x, beta, weight)


class ShortPosterior(Posterior):
    """The same of a short series; what is joint over times, and states, by the filter."""

    def __init__(
        self, prior: DensePrior, dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor
    ) -> None:
        self._prior = prior
        super().__init__(dynamics, x, beta, weight)

    def _prepare(self) -> None:
        """Nothing: the filter runs where it is asked for."""

    @cached_property
    def _dense(self) -> DensePosterior:
        beta, weight = self._beta.numpy(), self._weight.numpy()
        centre = np.divide(beta, weight, out=np.zeros_like(beta), where=weight > 0)
        return DensePosterior(self._prior, beta, weight, centre)

    def marginals(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at times in any order, each (m,)."""
        origin, approximate = self._dynamics.origin, self._dynamics.is_approximate
        many = len(x_new) * len(self.times) > PREDICTED_ENTRIES and not approximate
        slopes = x_new.requires_grad and (origin is not None or not approximate)
        if many or slopes or self._before(x_new):
            return super().marginals(x_new)
        size = max(1, PREDICTED_ENTRIES // len(self.times))
        means, variances = zip(*map(self._of_tile, x_new.split(size)), strict=True)
        return torch.cat(means), torch.cat(variances)

    def covariance(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (m,) and joint covariance (m, m) of f at times in any order."""
        if not self._dynamics.is_approximate or self._before(x_new):
            return super().covariance(x_new)
        mean, half = self._dense.given(self._across(x_new))
        x = x_new.numpy()
        prior = from_numpy(self._of_lags(np.abs(x[:, None] - x), np.minimum(x[:, None], x)))
        covariance = prior - half.T @ half
        covariance.diagonal().clamp_(min=0)
        return mean, covariance

    def _before(self, x_new: Tensor) -> bool:
        """Whether a time lies before the origin."""
        origin = self._dynamics.origin
        return origin is not None and bool((x_new < origin).any())

    def _of_tile(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (k,) at some times."""
        mean, half = self._dense.given(self._across(x))
        at = x.detach().numpy()
        var = from_numpy(self._of_lags(np.zeros_like(at), at))
        return mean, (var - half.square().sum(0)).clamp_min(0.0)

    def _across(self, x: Tensor) -> Tensor:
        """Prior covariances (k, m) of f at times (k,) with those of the series; differentiable."""
        lags = x[:, None] - self.times
        at = lags.detach().numpy()
        earlier = torch.minimum(x.detach()[:, None], self.times).numpy()
        across = from_numpy(self._of_lags(np.abs(at), earlier))
        if not x.requires_grad:
            return across
        slopes = [block.slope(np.abs(at)) for _, block in self._dynamics.blocks]
        slope = from_numpy(np.where(at < 0, -1, 1) * np.sum(slopes, 0))
        return across + slope * (lags - lags.detach())

    def _of_lags(self, lags: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        since = None if self._dynamics.origin is None else earlier - self._dynamics.origin
        found = np.zeros_like(lags)
        for _, block in self._dynamics.blocks:
            found += block.covariance(lags, None if block.is_stationary else since)[0]
        return found
