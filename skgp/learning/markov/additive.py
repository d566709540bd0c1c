"""What the hyper-parameters of additive models are judged by: evidence and ELBO of the sum."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive import AdditiveBound, DistinctRows, Rows
from skgp.inference.markov.additive_bins import (
    AdditivePosterior,
    AdditiveStatistics,
    Tables,
    bin_priors,
)
from skgp.inference.markov.additive_sites import RowsPosterior, condition_rows
from skgp.inference.markov.additive_states import AdditiveState, binned_state
from skgp.inference.markov.sites import SiteFit, climb
from skgp.learning.markov.defaults import ADDITIVE_TOL, ELBO_TOL, LOST_NATS, SITES_TOL
from skgp.learning.markov.objectives import ClosedForm, Knots, Processes, SitesElbo
from skgp.likelihoods import Likelihood


class BinnedEvidence(ClosedForm):
    """From the statistics of binned rows: exact (`joint`), or its bound by the mean field."""

    def __init__(self, statistics: AdditiveStatistics, offset: float, joint: bool) -> None:
        self.total, self._offset = statistics.weight, offset
        self._bins, self._joint = statistics.bins, joint
        self._cross = statistics.cross
        self._sums, self._squares = statistics.centred(offset)

    def _condition(
        self, dynamics: Processes, noise: float, rough: bool = False
    ) -> AdditivePosterior:
        tables = Tables(self._cross, 1 / noise, self._sums / noise)
        return AdditivePosterior(bin_priors(dynamics, self._bins.columns), tables, self._joint)

    def _misfit(self, q: AdditivePosterior, noise: float) -> float:
        return self._squares - float(q.mean @ (2 * self._sums - self._cross @ q.mean))

    def state(self, kernels: Sequence[Any], q: AdditivePosterior) -> AdditiveState:
        """What predicts, with the components' kernels and the posterior of an evaluation."""
        return binned_state(kernels, q, self._bins, self._cross.diagonal(), self._offset)


class RowsEvidence(ClosedForm):
    """In the space of the distinct rows, in O(m^3)."""

    def __init__(self, rows: DistinctRows) -> None:
        self._rows, self.total = rows, rows.total
        # Targets less the prior mean, so that nothing cancels in their squares.
        self._y = rows.y - rows.offset
        self._linear, self._curved = rows.sums(self._y), rows.sums(torch.ones_like(rows.y))
        self._squares = float(rows.weighted(self._y**2).sum())
        self.state = rows.state

    def _condition(self, dynamics: Processes, noise: float, rough: bool = False) -> RowsPosterior:
        prior = self._rows.prior(dynamics)
        return condition_rows(prior, self._linear / noise, self._curved / noise)

    def _misfit(self, q: RowsPosterior, noise: float) -> float:
        residual = self._y - q.mean[self._rows.index]
        return float(self._rows.weighted(residual**2).sum())


class RowsElbo(SitesElbo):
    """Of an additive model.

    `tol` is that of the sites, in nats an observation, or `SITES_TOL` of that of the search, if
    that is more.
    """

    def __init__(
        self,
        rows: Rows,
        likelihood: Likelihood,
        *,
        max_iter: int = 50,
        tol: float = ADDITIVE_TOL,
        search_tol: float = 0.0,
    ) -> None:
        super().__init__(rows, likelihood, rows.weighted)
        self.rows, self.state = rows, rows.state
        self._max_iter, self._tol = max_iter, max(tol, SITES_TOL * search_tol)

    def find(
        self, dynamics: Processes, parameters: Tensor, knots: Knots = None, tol: float = ELBO_TOL
    ) -> SiteFit:
        """To the tolerance of the sites."""
        bound = AdditiveBound(self.rows, dynamics, self.likelihood.with_parameters(parameters))
        return climb(bound, start=self.sites, max_iter=self._max_iter, tol=self._tol)

    def value_of(self, found: SiteFit) -> float:
        """Minus infinity where it has no digits left."""
        # What rounding leaves of an ELBO may be the best of all: a search is to turn back there.
        lost = found.rounding > LOST_NATS * self.total
        return -math.inf if lost else found.elbo
