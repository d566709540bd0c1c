"""Predictions of a short series by one Cholesky factor, which keeps more digits than a filter."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor, from_numpy

from skgp.inference.defaults import DENSE_DRAWS, FILTER_RATIO, PREDICTED_ENTRIES
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.series import Lags, few_times
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.kernels.sde import Dynamics
from skgp.kernels.sde_block import Block
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import semidefinite_root
from skgp.linalg.runtime import standard_normal


def posterior_of(dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor) -> Posterior:
    """What sites say of f at any times, by whichever route; as of `Posterior`."""
    if x.device.type == "cpu" and 0 < len(x) <= few_times(dynamics.n_states):
        lags = Lags.of(x.diff(prepend=x[:1]))
        if lags is not None and dynamics.origin is not None:
            lags = lags.after(x.numpy() - dynamics.origin)
        if lags is not None and not bool((weight < 0).any()):
            short = ShortPosterior(DensePrior(dynamics, lags), dynamics, x, beta, weight)
            if short.has_factor:
                return short
    return Posterior(dynamics, x, beta, weight)


class ShortPosterior(Posterior):
    """The same of a short series; the states alone are those of the filter.

    Of RBF it is the posterior of that process, and not of one that approximates it.
    """

    def __init__(
        self, prior: DensePrior, dynamics: Dynamics, x: Tensor, beta: Tensor, weight: Tensor
    ) -> None:
        self._prior = prior
        super().__init__(dynamics, x, beta, weight)

    def _prepare(self) -> None:
        """Nothing: the filter runs where it is asked for."""

    @property
    def has_factor(self) -> bool:
        """Whether there is one in spite of rounding; some 1e-14 of the variance is noise enough."""
        try:
            return self._dense is not None
        except NotPositiveDefiniteError:
            return False

    @cached_property
    def _dense(self) -> DensePosterior:
        beta, weight = self._beta.numpy(), self._weight.numpy()
        centre = np.divide(beta, weight, out=np.zeros_like(beta), where=weight > 0)
        return DensePosterior(self._prior, beta, weight, centre)

    @cached_property
    def _blocks(self) -> list[Block]:
        return [block for _, block in self._dynamics.blocks]

    def _leaves(self, x: Tensor) -> bool:
        """Whether the filter, which is quicker, predicts at so many times as well."""
        exact = not self._dynamics.is_approximate
        many = len(x) * len(self.times) > PREDICTED_ENTRIES
        return many and exact and self._prior.ratio(self._weight.numpy()) < FILTER_RATIO

    def marginals(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at times in any order, each (m,)."""
        if self._leaves(x_new):
            return super().marginals(x_new)
        return self._of_parts(x_new, self._blocks)

    def latent(self, x_new: Tensor, projections: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (m, p) of sums of blocks, which the projections (p, d) observe."""
        if self._leaves(x_new):
            return super().latent(x_new, projections)
        found = []
        for row in projections:
            parts = [block for s, block in self._dynamics.blocks if bool(row[s].any())]
            found.append(self._of_parts(x_new, parts))
        mean, var = (torch.stack(each, 1) for each in zip(*found, strict=True))
        return mean, var

    def covariance(self, x_new: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (m,) and joint covariance (m, m) of f at times in any order."""
        mean, half = self._dense.given(self._across(x_new, self._blocks))
        x = x_new.numpy()
        covariance = self._prior_of(self._blocks, x[:, None], x) - half.T @ half
        covariance.diagonal().clamp_(min=0)
        return mean, covariance

    def sample(self, x_new: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at times (m,) in any order, (m, n_samples).

        Draws of the prior less what they would have the data say [1]_: O(m n S). Of an approximate
        process, up to some thousand times, by the root of the covariance.

        References
        ----------
        .. [1] Wilson et al. (2021), Pathwise conditioning of Gaussian processes, JMLR 22.
        """
        if self._dynamics.is_approximate and len(x_new) <= DENSE_DRAWS:
            mean, covariance = self.covariance(x_new)
            noise = standard_normal((len(mean), n_samples), generator, mean.dtype)
            return mean[:, None] + semidefinite_root(covariance) @ noise
        nothing, n = torch.zeros_like(self.times), len(self.times)
        prior = Posterior(self._dynamics, self.times, nothing, nothing)
        f = prior.sample(torch.cat([self.times, x_new]), n_samples, generator)
        noise = standard_normal((n, n_samples), generator, f.dtype)
        seen = self._dense.regress(f[:n], noise)  # (n, S)
        across = self._across(x_new, self._blocks)
        return f[n:] + self.marginals(x_new)[0][:, None] - across @ seen

    def _of_parts(self, x: Tensor, parts: list[Block]) -> tuple[Tensor, Tensor]:
        """Mean and variance (m,) of a sum of blocks; differentiable."""
        found = []
        for some in x.split(max(1, PREDICTED_ENTRIES // len(self.times))):
            mean, half = self._dense.given(self._across(some, parts))
            at = some.detach().numpy()
            var = self._prior_of(parts, at, at)
            if some.requires_grad:
                moving = [block for block in parts if not block.is_stationary]
                slope = 2 * self._prior_of(moving, at, at, slope=True)
                var = var + slope * (some - some.detach())
            found.append((mean, (var - half.square().sum(0)).clamp_min(0.0)))
        means, variances = zip(*found, strict=True)
        return torch.cat(means), torch.cat(variances)

    def _across(self, x: Tensor, parts: list[Block]) -> Tensor:
        """Prior covariances (k, n) of parts at times (k,) with those of the series."""
        at = x.detach()[:, None]
        pair = at.numpy(), self.times.numpy()
        k = self._prior_of(parts, *pair)
        if not x.requires_grad:
            return k
        return k + self._prior_of(parts, *pair, slope=True) * (x[:, None] - at)

    def _prior_of(
        self, parts: list[Block], x: np.ndarray, z: np.ndarray, *, slope: bool = False
    ) -> Tensor:
        """Sum over parts of their covariances at times x and z, or of the slopes of these in x."""
        found, origin = np.zeros(np.broadcast_shapes(x.shape, z.shape)), self._dynamics.origin
        for block in parts:
            found += block.between(x, z, origin or 0.0, slope=slope)
        return from_numpy(found)
