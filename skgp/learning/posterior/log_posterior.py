r"""The exact log posterior of the hyper-parameters, in their logarithms u, and without bounds.

.. math:: \log p(u \mid y) = \log N(y; 0, K_u + \sigma_u^2 I) + \log p(u) + \text{const}

with p(u) the density of :class:`~skgp.learning.posterior.priors.Priors`, and zero outside the
bounds of the kernel's hyper-parameters.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from skgp.data import Data
from skgp.kernels import split_noise
from skgp.kernels.expression import built_in, theta_places
from skgp.kernels.hyperparameters import bounds_of, n_dims_of
from skgp.learning.evidence import ExactEvidence
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.priors import Priors
from skgp.linalg import NotPositiveDefiniteError
from skgp.priors import Prior


class Density:
    """A log-density and its gradient at one point, from those at many; within bounds (p, 2)."""

    bounds: np.ndarray

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """Values (k,) at x (k, p), in nats."""
        raise NotImplementedError

    def log_densities_and_gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (k,) and gradients (k, p) at x (k, p)."""
        raise NotImplementedError

    def why_it_vanishes(self, x: np.ndarray) -> str:
        """For the error of a search that finds no density at x (p,)."""
        raise NotImplementedError

    def log_density(self, x: np.ndarray) -> float:
        """Value at x (p,), in nats."""
        return float(self.log_densities(np.asarray(x, dtype=float)[None])[0])

    def log_density_and_gradient(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Value and gradient (p,) at x (p,)."""
        values, gradients = self.log_densities_and_gradients(np.asarray(x, dtype=float)[None])
        return float(values[0]), gradients[0]


class LogPosterior(Density):
    """Log posterior density of u, by Cholesky factorisation (`ExactEvidence`); picklable.

    A density costs a kernel matrix and :math:`n^3 / 3` flops, its gradient about four times that.
    Few observations are evaluated at many u side by side.
    """

    def __init__(
        self,
        kernel: Any,  # with a top-level WhiteKernel and at least one free hyper-parameter
        data: Data,  # float64
        priors: Sequence[Prior],  # one for each element of ``kernel.theta``
    ) -> None:
        self.signal, self.places = split_noise(kernel)[0], theta_places(kernel)[0]
        self.n_dims = n_dims_of(kernel)
        if self.n_dims == 0:
            raise ValueError(
                f"kernel={kernel} has no free hyper-parameter and hence no posterior; free one, "
                "or use one plain model."
            )
        if len(priors) != self.n_dims:
            raise ValueError(
                f"priors has {len(priors)} entries and the kernel {self.n_dims} free "
                "hyper-parameters; give one prior for each."
            )
        self.kernel, self.data = kernel, data
        self.priors = priors if isinstance(priors, Priors) else Priors(priors)
        self.bounds = bounds_of(kernel)  # (n_dims, 2), of u
        self.medians = np.log([prior.median for prior in self.priors])  # (n_dims,), logarithms
        self.prior_covariance = self.priors.covariance  # (n_dims, n_dims), of u

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "exact"}

    @cached_property
    def exact(self) -> ExactEvidence:
        """The log marginal likelihood; made again where the posterior was pickled."""
        return ExactEvidence(self.kernel, self.data)

    @property
    def batched(self) -> bool:
        """Whether many u are evaluated at once."""
        return len(self.data.y) <= tuned.FEW_ROWS and built_in(self.signal)

    # ---- prior and posterior: -inf, and a gradient of 0, outside the bounds and where the kernel
    # matrix cannot be factored

    def log_prior(self, u: np.ndarray) -> np.ndarray:
        """Log prior of u (..., n_dims), in nats; -inf outside the bounds."""
        u = np.asarray(u, dtype=float)
        inside = ((u >= self.bounds[:, 0]) & (u <= self.bounds[:, 1])).all(-1)
        return np.where(inside, self.priors.log_density(u), -np.inf)

    def prior_gradient(self, u: np.ndarray) -> np.ndarray:
        """Gradient (..., n_dims) of the log prior."""
        return self.priors.gradient(np.asarray(u, dtype=float))

    def log_densities(self, u: np.ndarray) -> np.ndarray:
        """Log posterior (k,) of u (k, n_dims), in nats, up to the log marginal likelihood."""
        return self._evaluate(u, slope=False)[0]

    def log_densities_and_gradients(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same and its gradient (k, n_dims)."""
        return self._evaluate(u, slope=True)

    def _evaluate(self, u: np.ndarray, slope: bool) -> tuple[np.ndarray, np.ndarray]:
        """Log densities (k,) at u (k, p), nats, and gradients (k, p) if `slope`, batch by batch."""
        u = np.asarray(u, dtype=float)
        prior, values, gradients = self.log_prior(u), np.full(len(u), -math.inf), np.zeros_like(u)
        inside = np.flatnonzero(prior > -math.inf)
        size = tuned.BATCH // len(self.data.y) ** 2 + 1 if self.batched else 1
        for start in range(0, len(inside), size):
            points = inside[start : start + size]
            try:
                value, gradient = self._likelihoods(u[points], slope)
            except NotPositiveDefiniteError:
                continue
            usable = np.isfinite(value)
            values[points] = np.where(usable, prior[points] + value, -math.inf)
            if gradient is not None:
                gradient = gradient + self.prior_gradient(u[points])
                gradients[points] = np.where(usable[:, None], gradient, 0.0)
        return values, gradients

    def log_likelihood(self, u: np.ndarray) -> float:
        """Log marginal likelihood at u (n_dims,), in nats; NaN where it has none."""
        return float(self._likelihoods(np.asarray(u, dtype=float)[None], slope=False)[0][0])

    def _likelihoods(self, u: np.ndarray, slope: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Log likelihoods (k,) at u (k, n_dims), NaN where there is none, and gradients.

        Side by side of few observations, unless closed forms take less time one after the other.
        """
        exact = self.exact
        alone = exact.in_closed_form and (slope or len(self.data.y) > tuned.SIDE_BY_SIDE)
        if self.batched and not alone:
            return exact.of_many(u, slope=slope)
        values, gradients = np.full(len(u), math.nan), np.zeros_like(u)
        for i, each in enumerate(u):
            with suppress(NotPositiveDefiniteError):
                if slope:
                    values[i], gradients[i], *_ = exact(each)
                else:
                    values[i] = exact.value(each)
        return values, gradients if slope else None

    def _try(self, u: np.ndarray) -> None:
        """Raise the error of a covariance that has no factor."""
        self.exact.value(u)

    def why_it_vanishes(self, u: np.ndarray) -> str:
        """What to tell a user where it vanishes at u (n_dims,) and all other starts."""
        why = "its log-density is not finite; check the priors and the scale of X."
        try:
            self._try(u)
        except NotPositiveDefiniteError as error:
            why = f"{error} A WhiteKernel of a higher noise_level_bounds helps in any case."
        at = self.kernel.clone_with_theta(u)
        message = "The posterior of the hyper-parameters vanishes at every start"
        return f"{message}, {at} among them: {why}"


class FreePosterior(Density):
    r"""A `LogPosterior` in coordinates x that know no bounds; picklable.

    Where the bounds of a hyper-parameter cut its posterior off, Student-t proposals and paths of
    Hamiltonian dynamics waste what they draw beyond. There (`felt`, (p,))

    .. math:: u_j = l_j + (h_j - l_j)\, \Phi(x_j), \qquad
              \log p(x) = \log p(u) + \sum_j \log \big( (h_j - l_j)\, \phi(x_j) \big):

    a posterior that is flat between narrow bounds is standard normal in x, and one that rises
    towards a bound has a smooth tail. Between equal bounds u is constant, and x standard normal
    whatever the data. Other coordinates are u itself. `medians` and `prior_covariance` are those of
    the prior of x, roughly; `bounds` are left to coordinates that are u, which nothing comes near.
    """

    def __init__(self, posterior: LogPosterior, felt: np.ndarray) -> None:
        self.posterior, self._felt = posterior, felt
        self.n_dims, self.data, self.batched = posterior.n_dims, posterior.data, posterior.batched
        self._low = np.where(felt, posterior.bounds[:, 0], 0.0)
        self._width = np.where(felt, posterior.bounds[:, 1] - self._low, 0.0)
        free = np.array([-math.inf, math.inf])
        self.bounds = np.where(felt[:, None], free, posterior.bounds)
        self.medians = np.where(felt, 0.0, posterior.medians)
        either = felt | felt[:, None]
        self.prior_covariance = np.where(either, np.eye(self.n_dims), posterior.prior_covariance)

    def to_u(self, x: np.ndarray) -> np.ndarray:
        """Logarithms of the hyper-parameters (..., p) at x (..., p)."""
        within = self._low + np.minimum(self._width * ndtr(x), self._width)
        return np.where(self._felt, within, x)

    def to_x(self, u: np.ndarray) -> np.ndarray:
        """x (..., p) at u (..., p); at the bounds three standard deviations from the middle."""
        share = (u - self._low) / np.where(self._width > 0, self._width, 1.0)
        inside = ndtri(np.where(self._width > 0, np.clip(share, 0.0, 1.0), 0.5))
        return np.where(self._felt, np.clip(inside, -tuned.FARTHEST, tuned.FARTHEST), u)

    def why_it_vanishes(self, x: np.ndarray) -> str:
        """As of the posterior."""
        return self.posterior.why_it_vanishes(self.to_u(x))

    def log_jacobian(self, x: np.ndarray) -> np.ndarray:
        """Log-density of x less that of u, (...,)."""
        moving = np.where(self._width > 0, self._width, 1.0)
        each = np.log(moving) - 0.5 * x**2 - 0.5 * math.log(2 * math.pi)
        return np.where(self._felt, each, 0.0).sum(-1)

    def log_densities(self, x: np.ndarray) -> np.ndarray:
        """Of x (k, p)."""
        if not self._felt.any():
            return self.posterior.log_densities(x)
        return self.posterior.log_densities(self.to_u(x)) + self.log_jacobian(x)

    def log_densities_and_gradients(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of x (k, p), by x."""
        if not self._felt.any():
            return self.posterior.log_densities_and_gradients(x)
        values, gradients = self.posterior.log_densities_and_gradients(self.to_u(x))
        slope = self._width * np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
        by_x = np.where(self._felt, gradients * slope - x, gradients)
        return values + self.log_jacobian(x), by_x
