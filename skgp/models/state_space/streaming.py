r"""Rows that come later: their sites join those of the rows before, hyper-parameters kept.

The posterior so far, prior times sites, is the prior of the new rows. With Gaussian noise their
sites are known at once, and the result is that of all rows together. Of other likelihoods the sites
of the new rows are sought with those of old held, as a *base* of :mod:`.sites` or of
:mod:`.inducing.fit`.

New times beyond the knots of inducing states get knots of their own, as far apart as those before
are in the middle. Intervals that are new have no sites yet, and the site of what was the last
interval, which tells of the state at its inner end alone, is one of the interval that follows that
state now: appending zeros is exact.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from skgp.inference.markov.inducing.fit import fit_inducing
from skgp.inference.markov.inducing.knots import shortest_scale
from skgp.inference.markov.inducing.pair_sites import PairSites
from skgp.inference.markov.inducing.state import InducingState
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import fit_sites
from skgp.inference.markov.state import SeriesState
from skgp.kernels.sde import state_space
from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood

__all__ = ["add_rows"]

# Of the search of new sites, which are never looked at again: passes, and gain in nats a row.
_MAX_ITER, _TOL = 50, 1e-10
_PER_SCALE = 10  # knots a length scale, where those before do not say


def add_rows(
    state: SeriesState | InducingState, series: Series, likelihood: Likelihood
) -> SeriesState | InducingState:
    """Condition a posterior on more rows.

    Parameters
    ----------
    state : SeriesState or InducingState
        Of m times, or of M knots.
    series : Series
        The new rows, at any times.
    likelihood : Likelihood
        One that takes all rows alike.

    Returns
    -------
    SeriesState or InducingState
        As `state`. Knots: O(M d^3) and as much a row and step. Sites at all times: O(m log m) for
        Gaussian noise, else O(m d^3) a step.

    Raises
    ------
    NonFiniteLossError
        If the bound of the new rows is not finite where the search begins.
    """
    dynamics = state_space(state.kernel).at()
    if isinstance(state, InducingState):
        state = _with_knots_for(state, series.times, dynamics)
        return _add_to_knots(state, series, likelihood, dynamics)
    return _add_to_times(state, series, likelihood, dynamics)


def _add_to_times(
    state: SeriesState, series: Series, likelihood: Likelihood, dynamics: Dynamics
) -> SeriesState:
    """Sites at the union of the times, those of equal times added."""
    times, place = torch.unique(torch.cat([state.times, series.times]), return_inverse=True)
    before, new = place[: len(state.times)], place[len(state.times) :]
    beta, weight = (
        times.new_zeros(len(times)).index_copy_(0, before, old)
        for old in (state.beta, state.weight)
    )
    if likelihood.is_gaussian:
        noise = likelihood.additive_variance()
        linear = (series.totals - state.offset * series.counts) / noise
        zeros = torch.zeros_like(beta)
        added = zeros.index_add(0, new, linear), zeros.index_add(0, new, series.counts / noise)
    else:
        index = new if series.index is None else new[series.index]
        rows = replace(series, times=times, index=index)
        found = fit_sites(
            dynamics, rows, likelihood, offset=state.offset, base=(beta, weight), tol=_TOL
        )
        added = found.beta, found.weight
    return SeriesState(state.kernel, times, beta + added[0], weight + added[1], state.offset)


def _add_to_knots(
    state: InducingState, series: Series, likelihood: Likelihood, dynamics: Dynamics
) -> InducingState:
    """Sites of the same knots, with what the rows add."""
    found = fit_inducing(
        dynamics,
        state.knots,
        series,
        likelihood,
        offset=state.offset,
        base=state.sites,
        # Of Gaussian noise the first sites are the best.
        max_iter=1 if likelihood.is_gaussian else _MAX_ITER,
        tol=_TOL,
    )
    return InducingState(state.kernel, state.knots, found.sites, state.offset)


def _with_knots_for(state: InducingState, times: Tensor, dynamics: Dynamics) -> InducingState:
    """The same posterior, with knots as far as the times (rising) reach."""
    knots = state.knots
    spacing = (
        float(knots.diff().median()) if len(knots) > 1 else shortest_scale(dynamics) / _PER_SCALE
    )
    after = _beyond(times[times > knots[-1]], float(knots[-1]), spacing)
    before = -_beyond(-times[times < knots[0]].flip(0), -float(knots[0]), spacing).flip(0)
    pad = len(before), len(after)
    sites = PairSites(
        torch.nn.functional.pad(state.sites.linear, pad),
        torch.nn.functional.pad(state.sites.precision, pad),
    )
    return InducingState(state.kernel, torch.cat([before, knots, after]), sites, state.offset)


def _beyond(times: Tensor, edge: float, spacing: float) -> Tensor:
    """The last of the times (rising, beyond the edge) in each cell of a width, but for close ones.

    The first cell begins at the edge. A time less than half a cell away needs no knot.
    """
    if not len(times) or not math.isfinite(spacing):
        return times[:0]
    cell = ((times - edge) / spacing).floor()
    last = torch.ones_like(cell, dtype=torch.bool)
    last[:-1] = cell.diff() != 0
    found = times[last]
    return found[found.diff(prepend=found.new_tensor([edge])) > spacing / 2]
