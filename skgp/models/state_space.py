r"""State-space Gaussian processes: Markov in time, so that n points cost O(n) [1]_.

============================================  ====================================================
Adam et al. (2020)                            code
============================================  ====================================================
:math:`s(x)`, F, H; eq. 7                     `skgp.kernels.state_space`
:math:`A_{n}, Q_{n}`; eqs. 9, 10              F and Q of ``Dynamics.transition``
exact inference (2.3)                         :mod:`skgp.inference.markov.smoother`, ``posterior``
z, :math:`u = s(z)`, M (3.1)                  knots, states at the knots: ``n_inducing``
:math:`v_n, P_n, T_n`; eqs. 13, 14, A.1       pair, h, T of ``conditionals``; h for H P
btd: natural parameters of q less those of    ``PairSites`` of ``elements``
the prior; eqs. 15, 16 (3.2, 3.4)
S2VGP (3.3), joint draws (A.2)                ``inducing``, ``minibatch``
natural gradients; eqs. 17-20, B.2            ``sites``
Gaussian likelihood, any other                Gaussian sites: :math:`\beta, \omega` of each time
additive models (4.3, C.3)                    `fit_additive`; ``additive``
:math:`z^{(i)}`                               bins: the distinct values where few
============================================  ====================================================

An additive model is a sum of independent processes, one a column,

.. math:: y_i \sim p(y \mid \eta_i), \qquad \eta_i = o + \sum_{j=1}^c f_j(x_{ij}), \qquad
          f_j \sim GP(0, k_j).

Deviations
----------
- The default is exact inference, with a site at every time for likelihoods that are not Gaussian;
  inducing states are for small fitted models and for minibatches.
- q is the prior times sites on pairs of neighbouring states. The natural-gradient step averages
  these; it equals the paper's, which goes through the reverse subset inverse (B.3, Algorithms 1, 2)
  and needs no such operator. No covariance is inverted.
- Hyper-parameters maximise the ELBO with q at its optimum, by L-BFGS; the paper takes steps of Adam
  in turn, and so does `fit_minibatches`. A pass over all rows is linear in them: of 1e6 counts both
  take the same time. The default of an additive model has a prior of them besides
  (:class:`~.search.Climb`), and of few rows they are common to all columns unless that is clearly
  less likely (:mod:`~skgp.learning.markov.choice`).
- Rows of an additive model are tabulated once: for Gaussian noise the ELBO, its maximum over q and
  its gradient are then independent of n. ``posterior="mean_field"`` is the paper's product of
  processes; its means are exact, its variances too small and its ELBO low by as much as the columns
  are correlated. ``posterior="joint"`` is the exact posterior (for other likelihoods the best
  Gaussian) of the binned model, at about three times the cost. Few rows stay in their own space.

Errata of the paper
-------------------
A.1: :math:`\Sigma_{vv}` has :math:`P_0 A^\top` above the diagonal and :math:`A P_0` below,
:math:`\Sigma_{sv} = [A_{-t} P_0, P_0 A_{t+}^\top]`. Eq. 12 conditions on s(x_n), not f(x_n).
Eq. 15 lacks the logarithm of :math:`|\Sigma_{uu}|`. B.2: to maximise, a step is
:math:`\xi + \gamma \tilde\nabla`. Eqs. 25 and 26: the blocks off the diagonal are
:math:`-L_{op}^{-1} L_{op,n} L_{nn}^{-1}`. Algorithm 1: blocks have r + 1 rows, and the input is the
band of :math:`Q^{-1}`. Algorithm 2: :math:`\bar c = -c^{-1} H^\top \bar l e^\top c^{-1}`.

References
----------
.. [1] Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), Doubly sparse variational
   Gaussian processes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.additive import BinnedRows, DistinctRows
from skgp.inference.markov.additive_bins import AdditiveStatistics, Bins, make_bins
from skgp.inference.markov.additive_sites import is_sharp
from skgp.inference.markov.additive_states import AdditiveState
from skgp.inference.markov.inducing import place_knots, shortest_scale
from skgp.inference.markov.regression import make_regression_series
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.inference.markov.terms import Terms
from skgp.kernels.expression import summands, summed
from skgp.kernels.sde import StateSpace, state_space
from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.markov.additive import (
    BinnedEvidence,
    RowsElbo,
    RowsEvidence,
    check_columns,
    left_by_terms,
)
from skgp.learning.markov.averaging import Average
from skgp.learning.markov.choice import (
    apart_if_likelier,
    choose_kernel,
    climb_columns,
    common_columns,
)
from skgp.learning.markov.defaults import CHOICE_ITER, FEW_ADDITIVE_ROWS
from skgp.learning.markov.search import Component, Search, maximise
from skgp.learning.markov.series_search import (
    Problem,
    SeriesSearch,
    averaged_state,
    column_starts,
    state_of,
    with_structure_of_sites,
)
from skgp.learning.markov.steps import beside_its_like, least_gain, with_step
from skgp.learning.markov.structure import Structure, with_structure
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback
from skgp.optim.loop import NonFiniteLossError
from skgp.optim.stopping import StopRecorder

Exact = SeriesState | AveragedState
State = Exact | InducingState | AdditiveState


@dataclass(frozen=True)
class Fit:
    """What a fit found: one state a latent process, and what else."""

    states: Sequence[State]
    parameters: Tensor  # (p,) of the likelihood
    value: float  # log marginal likelihood or ELBO, in nats; of bins, of the binned model
    n_iter: int  # of the search of hyper-parameters
    history: list[float]  # evidence an observation after each


# ---- one column ------------------------------------------------------------------------------


def fit_series(
    kernels: Sequence[Any],  # without noise; of several the evidence chooses, if it may
    processes: Sequence[Series],  # of the same rows, one a latent process
    likelihood: Likelihood,
    *,
    offsets: Sequence[float],  # prior mean of each; 0 for Gaussian noise
    terms: Terms | None = None,  # beside the process, where a search starts; no inducing states
    n_inducing: int | str | None = None,  # "auto" suits the length scale; None is every time
    learn_inducing: bool = False,  # whether their places are learned
    learn: bool = True,  # whether hyper-parameters move within their bounds
    start: Tensor | None = None,  # (p,), parameters of the likelihood
    max_iter: int = 100,
    **search: Any,
) -> Fit:
    """Fit state-space GPs that share kernel and likelihood.

    `search` are ``tol`` (1e-7) and ``callback`` of `maximise`; the latter is called after every
    kernel that is tried, too, and True ends both. ``structured`` (False): of one process with
    Gaussian kernels, whether trends and seasons are tried besides
    (:mod:`skgp.learning.markov.structure`). ``minibatches``, rows of one and a `torch.Generator`:
    hyper-parameters of inducing states are then learned by `fit_minibatches`, and q by all rows in
    the end.
    """
    callback = StopRecorder(search.pop("callback", None))
    structured = search.pop("structured", False) and len(processes) == 1
    minibatches = search.pop("minibatches", None)
    problem, kernel, structure = Problem(processes, likelihood, offsets, terms), kernels[0], None
    several = learn and len(kernels) > 1
    if several:  # eq. 7: which F and H
        found = choose_kernel(kernels, problem.evidence, processes, likelihood, callback)
        structure = Structure(found)
        if structured and likelihood.is_gaussian and not callback.stopped:
            whole = problem.evidence()
            rest = left_by_terms(processes[0], found, whole)
            structure = with_structure(found, rest, whole, likelihood)
        (kernel,), start = structure.best.components, structure.best.parameters
    knots = _knots(kernel, processes[0].times, n_inducing)  # (M,), z of section 3.1
    options: dict[str, Any] = {"minibatches": minibatches, "learn_knots": learn and learn_inducing}
    ends, max_iter = {"callback": callback, **search}, max_iter if learn else 0
    searches = SeriesSearch(problem, knots, max_iter, ends, near=several, **options)
    found = searches.climb(kernel, start)  # 2.3, 3.3: by the evidence or the ELBO
    if learn and start is None and terms is None and not several:
        found = searches.from_likeliest_start(found, kernel)
    points = None
    if knots is None and likelihood.is_gaussian:
        default = structure if structured else None
        found, points = searches.finished(found, default, asked=not several)
    elif several and structured and not callback.stopped:
        found = with_structure_of_sites(found, problem, searches.objective, searches.at_working)
    fit = _fit(found, points, problem, searches.objective)
    if several and structured and likelihood.is_gaussian and not callback.stopped:
        fit = _stepped(fit, found, searches, kernels)
    return fit


def resume(fit: Fit, processes: Sequence[Series], likelihood: Likelihood, **search: Any) -> Fit:
    """The fit to other observations that starts where one ended; `search` as there."""
    search |= {"start": fit.parameters, "terms": getattr(fit.states[0], "terms", None)}
    other = fit_series(parts_of(fit.states[0]), processes, likelihood, **search)
    return replace(other, n_iter=fit.n_iter + other.n_iter, history=fit.history + other.history)


def _stepped(fit: Fit, found: Search, searches: SeriesSearch, kernels: Sequence[Any]) -> Fit:
    """The fit, or one with a step of the level besides if that is likelier."""
    problem = searches.problem
    rest = left_by_terms(problem.processes[0], found, searches.objective)
    stepped = with_step(found, rest, problem)
    if stepped is None:
        return fit
    options = {"structured": True, "max_iter": searches.max_iter, **searches.ends}
    place = stepped.processes, problem.likelihood
    other = fit_series(kernels, *place, offsets=problem.offsets, terms=stepped.terms, **options)
    if other.value <= fit.value + least_gain(rest):
        return fit
    pair = [AveragedState.of(each.states[0], each.parameters) for each in (other, fit)]
    state = beside_its_like(*pair)
    return replace(other, states=[state], parameters=state.mean_noise(other.parameters))


def _fit(found: Search, points: Average | None, problem: Problem, objective: Any) -> Fit:
    """3.4: q at the hyper-parameters found, or an average over some."""
    likelihood, end = problem.likelihood, (found.n_iter, found.history)
    given = zip(problem.processes, problem.offsets, objective.objectives, strict=True)
    if points is not None:
        ((series, offset, each),) = given
        state = averaged_state(points, series, likelihood, offset, each, problem.terms)
        return Fit([state], points.mean_noise, points.points[0].value, *end)
    states = [
        state_of(found, series, likelihood, offset, each, problem.terms)
        for series, offset, each in given
    ]
    return Fit(states, found.parameters, found.value, *end)


def _knots(kernel: Any, times: Tensor, n_inducing: int | str | None) -> Tensor | None:
    """Places of the inducing states."""
    if n_inducing is None:
        return None
    if n_inducing == "auto":
        return place_knots(times, scale=shortest_scale(Component.of(kernel).dynamics()))
    return place_knots(times, int(n_inducing))


# ---- additive models, section 4.3 --------------------------------------------------------------


def fit_additive(
    kernels: Sequence[Any],  # one a column, without noise, of the hyper-parameters to start from
    data: Data,  # float64, finite; X (n, c), y (n,)
    likelihood: Likelihood,
    *,
    offset: float,  # prior mean of the sum
    posterior: str = "mean_field",  # a product over the components; or "joint", or "auto"
    bins: Bins | None = None,  # instead of those of X; then rows are put in bins, however few
    n_bins: int = 512,  # of a column, at most; an iteration in bins is cubic in those of all
    **search: Any,
) -> Fit:
    """Fit an additive model; "auto" is joint of Gaussian noise and of at most 3000 rows.

    In bins: O(n c^2) once for Gaussian noise, O(n c) (joint: O(n c^2)) for every step of the sites
    of another likelihood. Up to 3000 rows of which no more are distinct than there are bins, or
    whose noise variances, for their weights, are as small as rounding of the covariances, the exact
    posterior is found in the space of the rows, in O(n^2 (n + c)) an iteration.

    `search` are ``parameters`` of the likelihood to start from, ``optimise`` (True), ``prior``
    (None), ``max_iter`` (100), ``tol`` (1e-6) and ``callback``: see `maximise`. A ValueError
    refuses a kernel without a state-space form that can be summed.
    """
    gaussian, few = likelihood.is_gaussian, len(data) <= FEW_ADDITIVE_ROWS
    joint = posterior == "joint" or (posterior == "auto" and (gaussian or few))
    if search.get("optimise", True) and not (search.get("prior") and likelihood.is_additive):
        search["others"] = partial(column_starts, kernels, data, likelihood)
    few = few and bins is None
    bins = make_bins(data.X, data.weight, n_bins=n_bins) if bins is None else bins
    given: dict[str, Any] = {"y": data.y, "weight": data.weight, "offset": offset}
    given["log_exposure"] = data.log_exposure
    objective: Any
    if joint and few:
        rows = DistinctRows.of(data.X, **given)
        sharp = gaussian and _is_sharp(kernels, rows, likelihood, search.get("parameters"))
        if sharp or rows.x.shape[1] <= len(bins.values):
            elbo = partial(RowsElbo, likelihood=likelihood, search_tol=search.get("tol", 0.0))
            return _climb(kernels, (RowsEvidence if gaussian else elbo)(rows), likelihood, **search)
    if gaussian:
        statistics = AdditiveStatistics.empty(bins, origin=float(data.y.mean()))
        statistics.add(data.X, data.y, data.weight)
        objective = BinnedEvidence(statistics, offset, joint)
    else:
        binned = BinnedRows(bins=bins, index=bins.index(data.X), joint=joint, **given)
        objective = RowsElbo(binned, likelihood)
    return _climb(kernels, objective, likelihood, **search)


def _is_sharp(
    kernels: Sequence[Any], rows: DistinctRows, likelihood: Likelihood, parameters: Tensor | None
) -> bool:
    """Whether Gaussian noise is too small, in the heaviest row, for tables of bins."""
    blocks = [pair[1] for kernel in kernels for pair in Component.of(kernel).dynamics().blocks]
    noise = (likelihood.initial(rows.y[:0]) if parameters is None else parameters)[0].exp()
    ratio = sum(block.variance for block in blocks) / float(noise)
    return is_sharp(rows.sums(torch.ones_like(rows.y)), ratio)


def fit_additive_statistics(
    kernels: Sequence[Any],
    statistics: AdditiveStatistics,
    likelihood: Likelihood,
    *,
    offset: float,
    posterior: str = "mean_field",
    **search: Any,
) -> Fit:
    """Fit as `fit_additive` to the statistics of observations not kept, with Gaussian noise."""
    objective = BinnedEvidence(statistics, offset, posterior in ("auto", "joint"))
    return _climb(kernels, objective, likelihood, **search)


def _climb(
    kernels: Sequence[Any],
    objective: Any,
    likelihood: Likelihood,
    *,
    parameters: Tensor | None = None,
    optimise: bool = True,
    prior: Sequence[Any] | None = None,
    max_iter: int = 100,
    tol: float = 1e-6,
    callback: Callback | None = None,
    others: Callable[[], Sequence[Any]] | None = None,
) -> Fit:
    """Hyper-parameters of all components and of the noise at once, and the posterior there.

    `others` are kernels to start from, too, unless `parameters` of an earlier search are given.
    """
    check_columns(kernels)
    callback = StopRecorder(callback)
    options: dict[str, Any] = {"max_iter": max_iter, "tol": tol, "callback": callback}
    options["parameters"] = parameters
    if parameters is None:
        parameters = likelihood.initial(torch.empty(0, dtype=torch.float64))
    else:
        others = None
    found = Search([Component(kernel) for kernel in kernels], parameters, 0.0)
    if optimise and prior is not None and likelihood.is_additive:
        found = climb_columns(found.components, objective, likelihood, prior, **options)
    elif optimise:
        options["amplitudes"] = True
        found = maximise(found.components, objective, likelihood, **options)
        if others is not None and not callback.stopped:
            few = {**options, "max_iter": min(max_iter, CHOICE_ITER)}
            rival = maximise(others(), objective, likelihood, **few)
            if rival.value > found.value + LEAST_EFFECT * objective.total:
                options["parameters"] = rival.parameters
                found = maximise(rival.components, objective, likelihood, **options)
        if prior is not None and not callback.stopped:
            ends = {name: options[name] for name in ("max_iter", "tol", "callback")}
            together = common_columns(objective, likelihood, prior, **ends)
            found = apart_if_likelier(found, together, objective, likelihood)
    with torch.no_grad():
        last = objective([each.dynamics() for each in found.components], found.parameters)
    if last.value == -math.inf:
        raise NonFiniteLossError(
            "The ELBO of the columns has no digits left. Check y for values of extreme size.",
            iteration=found.n_iter,
            parameter=None,
        )
    states = [objective.state(found.kernels, last.posterior)]
    return Fit(states, found.parameters, last.value, found.n_iter, found.history)


# ---- states of any kind, and the series they are of ----------------------------------------------


def distinct(data: Data, place: int | None) -> Data:
    """Rows of a series, those of equal columns and targets as one of their weight.

    `place` is that of the times; None of an additive model, which is left unchanged.
    """
    if place is None or len(data.X[:, place].unique()) == len(data):
        return data
    return data.merged(any_likelihood=True)


def series_of(data: Data, terms: Terms | None) -> list[Series]:
    """One series a column of y."""
    rest = data.weight, data.log_exposure
    if terms is None:
        return [make_series(data.X[:, 0], y, *rest) for y in data.y.T]
    x, features = data.X[:, terms.time], terms.features(data.X)
    return [make_regression_series(x, y, features, *rest) for y in data.y.T]


def parts_of(state: State, *, split: bool = False) -> list[Any]:
    """Kernels of the components; of a series all at once, or its summands."""
    if isinstance(state, Exact | InducingState):
        if not split:
            return [state.kernel]
        return state.parts if isinstance(state, AveragedState) else summands(state.kernel)
    return list(state.kernels)


def forms_of(state: State) -> list[StateSpace]:
    """The components in state space."""
    if isinstance(state, Exact):
        return [state.form]
    return [state_space(part) for part in parts_of(state)]


def kernel_of(state: State) -> Any:
    """The kernel of f as one expression."""
    return summed(parts_of(state))
