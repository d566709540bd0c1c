r"""Predictions of a fitted additive model: the sum and its components, at any inputs.

A level may move from one component to another without changing the sum. Components are therefore
reported about their own mean over the training rows, with the bins' shares :math:`p_j` of the
rows' weight,

.. math:: \bar f_j(x) = f_j(x) - p_j^\top f_j, \qquad
          \operatorname{var} \bar f_j(x) = v_j(x) - 2 \operatorname{cov}(f_j(x), p_j^\top f_j)
          + \operatorname{var}(p_j^\top f_j),

and the offset takes the means up, so that offset and components sum to the prediction.

With the covariance :math:`S_j(x, \cdot)` of the mean field between x and the bins, the exact
posterior's covariance of components j and k is :math:`\delta_{jk} S_j(x, x') - S_j(x, \cdot)
C_{jk} S_k(\cdot, x')` (:mod:`.inference`), whether x is a bin or not.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement, pairwise
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.state import SeriesState
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.tensor_state import TensorState

__all__ = ["AdditiveState", "BinnedState", "Outcome"]

_ROWS = 2**14  # of a batch of predictions
_VALUES = 1024  # whose joint covariance with the bins is held at a time


@dataclass(frozen=True)
class Outcome:
    """How a search ended.

    Attributes
    ----------
    parameters : Tensor of shape (p,)
        Of the likelihood's family.
    noise : float
        Variance of the noise; NaN where it depends on the sum.
    elbo : float
        Evidence in nats.
    n_iter : int
    history : list of float
        Evidence a row after each iteration.
    """

    parameters: Tensor
    noise: float
    elbo: float
    n_iter: int
    history: list[float]


class AdditiveState(TensorState, ABC):
    """Posterior of a sum of functions of one column each, c in all.

    Attributes
    ----------
    kernels : list of Kernel
        Of each component.
    posterior : {"mean_field", "joint"}
        A product over the components, or exact (for other likelihoods than Gaussian the best
        Gaussian).
    offset : float
        What the components leave: their sum is about 0 over the training rows.
    parameters : Tensor of shape (p,)
        Of the likelihood's family.
    noise : float
        Variance of the noise; NaN where it depends on the sum.
    spread : Tensor of shape (c,)
        How far the rows are from their bins, root mean square; to be small beside length scales.
    elbo : float
        Evidence in nats: of the binned model; a lower bound unless posterior and likelihood are
        exact.
    n_iter : int
    history : list of float
        Evidence a row after each iteration.
    """

    offset: float
    parameters: Tensor
    noise: float
    spread: Tensor
    elbo: float
    n_iter: int
    history: list[float]

    @property
    @abstractmethod
    def kernels(self) -> list[Any]:
        """Of each component."""

    @property
    @abstractmethod
    def posterior(self) -> str:
        """Which it is."""

    @abstractmethod
    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the sum.

        Parameters
        ----------
        X : Tensor of shape (n, c)
            Any inputs: between those seen and beyond them too.

        Returns
        -------
        mean, var : Tensor of shape (n,)
        """

    @abstractmethod
    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances of the components, each about its mean over the training rows.

        Parameters
        ----------
        X : Tensor of shape (n, c)

        Returns
        -------
        mean, var : Tensor of shape (n, c)
            The means and the offset sum to those of `moments`.
        """

    @abstractmethod
    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of the sum."""

    def samples(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the sum, (n, n_samples). O(n^3)."""
        mean, covariance = self.covariance(X)
        noise = torch.randn(len(X), n_samples, generator=generator, dtype=X.dtype)
        return mean[:, None] + jittered_cholesky(covariance).factor @ noise


@dataclass(frozen=True)
class BinnedState(AdditiveState):
    r"""The posterior in bins.

    Attributes
    ----------
    series : tuple of SeriesState
        Of each component at its m_j bins, under the mean field; centred by their offsets.
    offset : float
    shares : Tensor of shape (M,)
        Share of the training rows' weight in each bin.
    coupling : Tensor of shape (M, M) or None
        C of the exact posterior; None for the mean field.
    spread, parameters, noise, elbo, n_iter, history
        See `AdditiveState`.

    Notes
    -----
    Pickles as 4 M numbers, and M^2 with an exact posterior. Moments are O(n c), or O(n M c) where
    the posterior is exact.
    """

    series: tuple[SeriesState, ...]
    offset: float
    shares: Tensor
    coupling: Tensor | None
    spread: Tensor
    parameters: Tensor
    noise: float
    elbo: float
    n_iter: int
    history: list[float]

    @property
    def kernels(self) -> list[Any]:
        """Of each component."""
        return [each.kernel for each in self.series]

    @property
    def posterior(self) -> str:
        """Exact where there is a coupling."""
        return "mean_field" if self.coupling is None else "joint"

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        means, variances = self._marginals(X)
        mean, var = means.sum(1) + self.offset, variances.sum(1)
        if self.coupling is not None:
            batches = [self._shared_var(rows, self.coupling) for rows in X.split(_ROWS)]
            var = var - torch.cat(batches)
        return mean, var.clamp_(min=0)

    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        means, variances = self._marginals(X)
        for j, (level, part) in enumerate(zip(self._levels, self._parts, strict=True)):
            x = X[:, j].contiguous()
            shared, _ = level.moments(x)  # covariance with the mean over the rows
            own, _ = level.moments(level.times)
            variances[:, j] += self.shares[part] @ own - 2 * shared
            if self.coupling is not None:
                values, place = x.unique(return_inverse=True)
                about = self._to_bins(j, values) - own
                variances[:, j] -= ((about @ self.coupling[part, part]) * about).sum(1)[place]
        return means, variances.clamp_(min=0)

    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of the sum.

        O(n^2 c), and O(n M (n + M)) more where the posterior is exact.
        """
        total = X.new_zeros(len(X), len(X))
        distinct = _distinct_of_columns(X)
        for each, (values, place) in zip(self.series, distinct, strict=True):
            total += each.covariance(values)[1][place][:, place]
        if self.coupling is not None:
            to_bins = [
                self._to_bins(j, values)[place] for j, (values, place) in enumerate(distinct)
            ]
            A = torch.cat(to_bins, 1)
            total -= A @ self.coupling @ A.T
        return self.moments(X)[0], total

    def samples(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of the sum, (n, n_samples).

        O(n n_samples c), or O(n^3) where the posterior is exact.
        """
        if self.coupling is not None:
            return super().samples(X, n_samples, generator)
        total = X.new_full((len(X), n_samples), self.offset)
        for each, (values, place) in zip(self.series, _distinct_of_columns(X), strict=True):
            total += each.samples(values, n_samples, generator)[place]
        return total

    @property
    def _parts(self) -> list[slice]:
        ends = accumulate((len(each.times) for each in self.series), initial=0)
        return [slice(*pair) for pair in pairwise(ends)]

    @property
    def _levels(self) -> list[SeriesState]:
        """Series whose mean at x is the covariance of f_j(x) with p_j'f_j."""
        return [
            SeriesState(each.kernel, each.times, self.shares[part], each.weight)
            for each, part in zip(self.series, self._parts, strict=True)
        ]

    def _marginals(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each component under the mean field, (n, c) each."""
        columns = X.T.contiguous()
        found = [each.moments(x) for each, x in zip(self.series, columns, strict=True)]
        means, variances = zip(*found, strict=True)
        return torch.stack(means, 1), torch.stack(variances, 1)

    def _to_bins(self, j: int, x: Tensor) -> Tensor:
        """Covariance of component j at x (n,) with its bins, (n, m_j), under the mean field."""
        times = self.series[j].times
        found = [
            self.series[j].covariance(torch.cat([values, times]))[1][: len(values), len(values) :]
            for values in x.split(_VALUES)
        ]
        return torch.cat(found)

    def _shared_var(self, X: Tensor, coupling: Tensor) -> Tensor:
        """``a' C a``, (n,), for the covariances a (M,) of each row with the bins."""
        distinct = _distinct_of_columns(X)
        to_bins = [self._to_bins(j, values) for j, (values, _) in enumerate(distinct)]
        total = X.new_zeros(len(X))
        for j, k in combinations_with_replacement(range(len(distinct)), 2):
            C = coupling[self._parts[j], self._parts[k]]
            left, right = (to_bins[j] @ C)[distinct[j][1]], to_bins[k][distinct[k][1]]
            total += (1 if j == k else 2) * left.mul_(right).sum(1)
        return total


def _distinct_of_columns(X: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Distinct values of every column, and which of them each row has."""
    return [column.unique(return_inverse=True) for column in X.T.contiguous()]
