"""Predictions of a short series by one Cholesky factor, where that keeps enough digits."""

from functools import cached_property

import numpy as np
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
        origin, x = self._dynamics.origin, x_new.detach().cpu().numpy()
        before = origin is not None and len(x) and x.min() < origin
        many = len(x) * len(self.times) > PREDICTED_ENTRIES and not self._dynamics.is_approximate
        if x_new.requires_grad or before or many:
            return super().marginals(x_new)
        mean, var = np.empty_like(x), np.empty_like(x)
        size = max(1, PREDICTED_ENTRIES // len(self.times))
        for rows in (slice(start, start + size) for start in range(0, len(x), size)):
            across = self._covariances(x[rows], self.times.numpy())
            mean[rows], var[rows] = self._dense.given(across, self._variances(x[rows]))
        return from_numpy(mean), from_numpy(var)

    def _covariances(self, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Prior covariances (k, m) of f at times (k,) with those at others (m,)."""
        return self._of_lags(np.abs(x[:, None] - times), np.minimum(x[:, None], times))

    def _variances(self, x: np.ndarray) -> np.ndarray:
        """Prior variances (k,)."""
        return self._of_lags(np.zeros_like(x), x)

    def _of_lags(self, lags: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        since = None if self._dynamics.origin is None else earlier - self._dynamics.origin
        found = np.zeros_like(lags)
        for _, block in self._dynamics.blocks:
            found += block.covariance(lags, None if block.is_stationary else since)[0]
        return found
