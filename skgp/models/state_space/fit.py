"""The fit of one or several series: kernel, hyper-parameters, inducing states, sites."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from skgp.inference.markov.inducing.fit import InducingFit
from skgp.inference.markov.inducing.knots import place_knots, shortest_scale
from skgp.inference.markov.inducing.state import InducingState
from skgp.inference.markov.series import Series
from skgp.inference.markov.state import SeriesState
from skgp.kernels.sde import state_space
from skgp.learning.markov.objectives import (
    GaussianEvidence,
    Objective,
    SharedEvidence,
    VariationalEvidence,
    find_sites,
)
from skgp.learning.markov.search import Search, choose_kernel, maximise
from skgp.likelihoods import Likelihood

__all__ = ["SeriesFit", "fit_series"]

Callback = Callable[[int, dict], bool | None]


@dataclass(frozen=True)
class SeriesFit:
    """What a fit found.

    Attributes
    ----------
    states : list of SeriesState or of InducingState
        One a latent process.
    parameters : Tensor of shape (p,)
        Of the likelihood's family.
    value : float
        Log marginal likelihood, or its bound; nats.
    n_iter : int
        Of the search of hyper-parameters.
    history : list of float
        Evidence an observation after each.
    """

    states: Sequence[SeriesState | InducingState]
    parameters: Tensor
    value: float
    n_iter: int
    history: list[float]


def fit_series(
    kernels: Sequence[Any],
    processes: Sequence[Series],
    family: Likelihood,
    *,
    offsets: Sequence[float],
    n_inducing: int | str | None = None,
    learn_inducing: bool = False,
    learn: bool = True,
    max_iter: int = 100,
    tol: float = 1e-7,
    start: Tensor | None = None,
    callback: Callback | None = None,
) -> SeriesFit:
    """Fit state-space GPs that share kernel and likelihood.

    Parameters
    ----------
    kernels : sequence of Kernel
        Without noise; the evidence chooses where there are several. If nothing is learned, the
        first.
    processes : sequence of Series
        Of the same rows, one a latent process.
    family : Likelihood
        Of the likelihood.
    offsets : sequence of float
        Prior mean of each; 0 for Gaussian noise.
    n_inducing : int, "auto" or None, default=None
        Number of inducing states; "auto" for as many as the kernel's length scale asks for, None
        for a site at every time.
    learn_inducing : bool, default=False
        Whether their places are learned.
    learn : bool, default=True
        Whether hyper-parameters move within their bounds.
    max_iter, tol
        Of the search: see `maximise`.
    start : Tensor of shape (p,), optional
        Parameters of the likelihood to start from.
    callback : callable, optional
        Called after every kernel that is tried and every iteration of the search as
        ``callback(number, {"loss": ...})``; True ends both.

    Returns
    -------
    SeriesFit
    """

    def make_objective(processes: Sequence[Series], *, sparse: bool = False) -> SharedEvidence:
        closed = family.is_gaussian and not sparse
        objectives: list[Objective] = [
            GaussianEvidence(series) if closed else VariationalEvidence(series, family, offset)
            for series, offset in zip(processes, offsets, strict=True)
        ]
        return SharedEvidence(objectives)

    stopped = False

    def report(number: int, info: dict) -> bool:
        nonlocal stopped
        stopped = stopped or (callback is not None and bool(callback(number, info)))
        return stopped

    kernel = kernels[0]
    if learn and len(kernels) > 1:
        chosen = choose_kernel(kernels, make_objective, processes, family, report)
        kernel, start = chosen.kernel, chosen.parameters
    knots = _knots(kernel, processes[0].times, n_inducing)
    objective = make_objective(processes, sparse=knots is not None)
    found = maximise(
        kernel,
        objective,
        family,
        parameters=start,
        knots=knots,
        learn_knots=learn and learn_inducing,
        max_iter=max_iter if learn and not stopped else 0,
        tol=tol,
        callback=report,
    )
    states = [
        _state(found, series, family, offset, getattr(each, "sites", None))
        for series, offset, each in zip(processes, offsets, objective.objectives, strict=True)
    ]
    return SeriesFit(states, found.parameters, found.value, found.n_iter, found.history)


def _state(
    found: Search,
    series: Series,
    family: Likelihood,
    offset: float,
    start: tuple[Tensor, Tensor] | None,
) -> SeriesState | InducingState:
    """The posterior of a series under the hyper-parameters found; sites to start from."""
    if found.knots is None and family.is_gaussian:
        sites = series.gaussian_sites(float(found.parameters[0].exp()))
        return SeriesState(found.kernel, series.times, *sites, offset)
    last = find_sites(
        state_space(found.kernel).at(),
        series,
        family.with_parameters(found.parameters),
        offset=offset,
        knots=found.knots,
        start=start,
    )
    if isinstance(last, InducingFit):
        return InducingState(found.kernel, cast(Tensor, found.knots), last.sites, offset)
    return SeriesState(found.kernel, series.times, last.beta, last.weight, offset)


def _knots(kernel: Any, times: Tensor, n_inducing: int | str | None) -> Tensor | None:
    """Places of the inducing states."""
    if n_inducing is None:
        return None
    if n_inducing == "auto":
        return place_knots(times, scale=shortest_scale(state_space(kernel).at()))
    return place_knots(times, int(n_inducing))
