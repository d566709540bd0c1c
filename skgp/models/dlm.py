r"""Direct loss minimisation for sparse Gaussian processes: Wei, Sheth and Khardon (2021) [1]_.

The posterior q(u) of a sparse GP, and its hyper-parameters, minimise the loss that the predictions
are judged by,

.. math:: \sum_i w_i\, \ell_i(q) + \beta\, \mathrm{KL}(q(u) \,\|\, p(u)), \qquad
          \ell_i = -\log E_{q(f_i)}[p(y_i \mid f_i)] .

``fit_sparse`` takes these steps. Where every input is an inducing point, Gaussian noise needs none
of them: the posterior is that of Bayes' rule. Otherwise,

1. *Kernel.* Of several families, the one of the greatest ELBO on a subset of the observations.
2. *Initial values.* Hyper-parameters, inducing points and q(u) maximise the ELBO: collapsed for
   Gaussian noise, by natural gradients and L-BFGS otherwise. With few observations,
   hyper-parameters maximise the log marginal likelihood itself. More inducing points follow where
   they predict held-out data better.
3. *Objective.* It is minimised over q(u), where "fixed" stops; then, "joint", over everything. With
   few labels, or few observations with outliers, the ELBO replaces the log-loss (`of_few_rows`).
4. *Held-out observations* of step 3 decide when the joint search, which can overfit, stops, whether
   its result is accepted, and how far the noise may fall below that of the ELBO; q(u) is then
   fitted to all observations. Step 2 uses them: the ELBO does not overfit. After minibatches they
   also choose how far the mean moves towards that of least squares.

=================================  ===========================================================
paper                              here
=================================  ===========================================================
sections 1, 2: objectives          `learning.sparse.objective`; `inference.collapsed` for
                                   closed forms
section 2: sparse GPs, q(f_i)      `inference.sparse`
section 3, supplement 1: uPS       `likelihoods.log_expectation`, `product_sampling`
section 4, supplement 2: bMC       `likelihoods.log_expectation`
section 6: fixed and joint DLM     steps 1 to 4: `fit_sparse`
section 6: grid search of beta     `fit_beta_path`
M, m, V, u                         ``len(Z)``; whitened ``mean``, ``root``: see `inference.sparse`
=================================  ===========================================================

Deviations: whitened q(u) in natural coordinates, by L-BFGS or minibatches in place of Adam;
inducing points are learned; joint DLM starts from the ELBO; noise has a floor; expectations without
a closed form by adaptive quadrature, more accurate than sampling and faster; batches
(`learning.sparse.objective.update`).
Errata: of the weight of the divergence, `inference.collapsed`; of smooth-bMC,
`likelihoods.log_expectation`; others in the documentation ("Paper and code").

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.
.. [2] Friedman, Hastie and Tibshirani (2010), Regularization paths for generalized linear models
   via coordinate descent: warm starts along a path.
"""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import calibrated_state, dense_posterior, evidence_ratio, statistics
from skgp.inference.sparse import SparsePosterior, SparseState
from skgp.kernels.gram import gram_diag
from skgp.learning.selection import choose_towards, improves
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import (
    BestState,
    Objective,
    Problem,
    Settings,
    held_out_losses,
    split,
)
from skgp.learning.sparse.search import (
    Training,
    blended,
    choose_blend,
    fit_all_rows,
    fit_minibatch,
    less_noise,
    with_floor,
    with_noise_that_pays,
)
from skgp.learning.sparse.start import (
    dense_start,
    grown,
    of_bayes_rule,
    of_few_rows,
    start_log_loss,
    start_state,
)

History = dict[str, list[float]]


@dataclass(frozen=True)
class SparseFit:
    """A fitted sparse GP."""

    state: SparseState
    objective: Objective  # minimised last, with its beta
    loss: float  # its value, summed over the rows
    elbo: float  # of the posterior, in nats (beta = 1)
    noise_variance: float  # of the observations given f; NaN where it depends on f
    held_out_loss: float | None = None  # of the state that step 3 chose, an observation
    n_iter: int = 1  # of the longest part of steps 3 and 4; minibatches count by pairs of steps
    # "start", "solve": objective an observation; "validation": loss of the held-out rows.
    history: History = field(default_factory=dict)
    dense: SparsePosterior | None = None  # of a dense process, in place of that of `state`

    def posterior(self) -> SparsePosterior:
        """The predictive posterior."""
        return self.state.posterior() if self.dense is None else self.dense


def fit_sparse(problem: Problem) -> SparseFit:
    """Fit a sparse GP (steps 1 to 4 of the module docstring)."""
    data, objective, settings = problem.data, problem.objective, problem.settings
    history: History = {"start": [], "solve": [], "validation": []}
    start = problem.start
    if settings.exact:
        begun = dense_start(problem)
        start, history["start"] = begun.state, begun.history
        data, objective = data.to(torch.float64), of_bayes_rule(objective)
        problem = replace(problem, data=data, objective=objective)
        if objective.name == "elbo" and objective.beta == 1.0:
            noise = objective.likelihood.gaussian_noise(start.likelihood)
            dense, evidence = dense_posterior(start, data, noise)
            n_iter = max(1, problem.recorder.n_longest)
            return SparseFit(
                start, objective, -evidence, evidence, float(noise), None, n_iter, history, dense
            )
    else:
        objective = of_few_rows(problem)
    if start is None:  # steps 1 and 2
        begun = start_state(problem)
        start, history["start"] = begun.state, begun.history
        if not problem.recorder.stopped:
            start = grown(start, problem)
    can_overfit = objective.moves_hyperparameters and objective.name in ("log_loss", "square_loss")
    if settings.early_stopping and settings.joint and can_overfit:
        return _fit_watched(start, problem, history)
    objective = _relative_to(start, data, objective)
    state = start_log_loss(start, data, objective, settings)
    found = minimise(state, data, objective, problem)  # step 3
    history["solve"] = found.history
    return _report(found.state, objective, found.loss, None, problem, history)


def _fit_watched(state: SparseState, problem: Problem, history: History) -> SparseFit:
    """Steps 3 and 4 of a joint search with held-out rows."""
    kept, held_out = split(problem.data, problem.settings.validation_fraction, problem.generator)
    objective = _relative_to(state, kept, problem.objective)
    noisy = less_noise(state, objective)
    state = start_log_loss(state, kept, objective, problem.settings)
    # The result is accepted only if its validation loss is below that of q(u) alone, with
    # the hyper-parameters of the ELBO.
    state = minimise(state, kept, objective.of_posterior_alone, _briefly(problem)).state
    watch = BestState(objective, held_out)
    watch.score(state)
    before, losses_before = watch.best_state, watch.best_rows
    found = minimise(state, kept, objective, problem, watch)
    history["solve"], history["validation"] = found.history, watch.losses
    improved = improves(watch.best_rows, losses_before)
    chosen = watch.best_state if improved else before
    if objective.learn_likelihood and objective.name == "log_loss":
        chosen = with_noise_that_pays(chosen, noisy, held_out, objective)
    loss = float(held_out_losses(chosen, objective, held_out).mean())
    return _finish(chosen, objective, loss, problem, history, (kept, held_out))


def _relative_to(state: SparseState, data: Data, objective: Objective) -> Objective:
    """The objective with a floor of its noise, or the unit of beta that makes 1 the ELBO's choice.

    Only "square_loss" has a unit: at beta = 1, and the kernel and points of `state`, its mean is
    that of the Gaussian process. Where noise is learned its variance in `state` does not count:
    after a square loss it is that of the beta before.
    """
    if objective.name != "square_loss":
        return with_floor(state, objective)
    if objective.learn_likelihood:
        with torch.no_grad():
            return replace(objective, unit=evidence_ratio(statistics(state.kernel, data, state.Z)))
    prior = data.weighted_mean(gram_diag(state.kernel, data.X))
    noise = objective.likelihood.gaussian_noise(state.likelihood)
    return replace(objective, unit=float(noise / prior))


# ------------------------------------------------------------------------ steps 3 and 4: objective


def minimise(
    state: SparseState,
    data: Data,
    objective: Objective,
    problem: Problem,
    watch: BestState | None = None,
) -> Training:
    """Step 3, by whichever of closed forms, all rows at once, and minibatches suits."""
    settings, recorder = problem.settings, problem.recorder
    if not (settings.joint or objective.name in ("elbo", "fitc")):
        objective = objective.of_posterior_alone
    closed, n_numbers = objective.has_closed_form, state.mean.numel()
    if recorder.stopped:
        if not closed:
            return Training(state, objective.total(state, data), stopped=True)
        objective = objective.of_posterior_alone  # whose optimum takes no iteration
    options: dict[str, Any] = {"max_iter": settings.max_iter, "tol": settings.tol}
    options |= {"callback": recorder, "watch": watch}
    if closed:
        few = data.some(int(defaults.ALONE_NUMBERS / n_numbers), problem.generator)
        # The regulariser is scaled to the fewer observations.
        scaled = replace(objective, beta=objective.beta * few.total / data.total)
        found = fit_all_rows(state, few, scaled, **options)
        found = replace(found, state=objective.with_optimum(found.state, data))
    elif _by_minibatches(state, data, objective, settings):
        pair = defaults.STEPS_PER_ITERATION
        options["max_iter"] *= pair
        options |= {"batch_size": settings.batch_size, "learning_rate": settings.learning_rate}
        found = fit_minibatch(state, data, objective, generator=problem.generator, **options)
        recorder.end_part(-(-len(found.history) // pair))
        return found
    else:
        found = fit_all_rows(state, data, objective, **options)
    recorder.end_part(len(found.history))
    return found


def _by_minibatches(
    state: SparseState, data: Data, objective: Objective, settings: Settings
) -> bool:
    """Whether steps on some rows suit an objective without a closed form better than all rows."""
    free = objective.moves_hyperparameters
    most = defaults.JOINT_NUMBERS if free else defaults.ALONE_NUMBERS
    many = len(data) * state.mean.numel() > most
    return objective.stochastic or settings.batch_size is not None or many


def _briefly(problem: Problem) -> Problem:
    """With few iterations: for q(u) alone, beginning near its optimum."""
    max_iter = max(1, int(defaults.ALONE_SHARE * problem.settings.max_iter))
    return replace(problem, settings=replace(problem.settings, max_iter=max_iter))


def _finish(
    state: SparseState,
    objective: Objective,
    held_out_loss: float,
    problem: Problem,
    history: History,
    parts: tuple[Data, Data],
) -> SparseFit:
    """Step 4: q(u) learns from all rows, under the hyper-parameters of `state`.

    `parts` are the rows kept for step 3 and those held out. With Gaussian noise, after minibatches,
    the mean may move to that of least squares.
    """
    data = problem.data
    found = minimise(state, data, objective.of_posterior_alone, _briefly(problem))
    end, loss = found.state, found.loss
    blends = objective.is_gaussian and objective.name == "log_loss" and not objective.stochastic
    blends = blends and _by_minibatches(state, data, objective, problem.settings)
    if blends and not problem.recorder.stopped:
        end = blended(end, data, choose_blend(state, *parts, objective))
        loss = objective.total(end, data)
    return _report(end, objective, loss, held_out_loss, problem, history)


def _report(
    state: SparseState,
    objective: Objective,
    loss: float,
    held_out_loss: float | None,
    problem: Problem,
    history: History,
) -> SparseFit:
    """The result, its variances made those of a Gaussian process after a square loss."""
    if objective.name == "square_loss" and objective.learn_likelihood:
        state = calibrated_state(state, problem.data, beta=objective.ridge_beta)
    return SparseFit(
        state=state,
        objective=objective,
        loss=loss,
        elbo=-objective.elbo.total(state, problem.data),
        noise_variance=objective.likelihood.with_parameters(state.likelihood).additive_variance(),
        held_out_loss=held_out_loss,
        n_iter=max(1, problem.recorder.n_longest),
        history=history,
    )


# --------------------------------------------------------------------- section 6: choice of beta


def fit_beta_path(problem: Problem) -> tuple[SparseFit, dict[float, float]]:
    r"""Fit with the :math:`\beta` that predicts held-out data best, and the losses of the path.

    Three parts of the data are held out, each for one purpose, as a minimised loss is biased low:
    the first stops each fit and selects its state; the second chooses beta; the third scores the
    chosen fit once. A single fit of all the data with that beta follows.

    The path begins with :math:`\beta = 1`, searched for as in a fit of that weight alone. From its
    best state it goes down, each fit beginning at the best state of the last one, q(u) first and
    then, "joint", everything; then, from the state of :math:`\beta = 1`, it goes up likewise.
    Losses are smooth along the path, so that either way ends once they have risen twice in a row;
    the whole path costs about as much as two to four single fits [2]_. (One way, from the greatest
    weight down, would end in poorer optima: what a great weight has smoothed away does not come
    back.) Of equally good weights, within a standard error, the nearest to 1 is chosen.

    The ``held_out_loss`` of the fit is of rows that neither stopped nor chose. The path has the
    mean loss, of the part that chooses, for each beta tried, in nats (half the squared error for
    "square_loss"); it is empty below 30 rows, which beta = 1 is for.
    """
    data, settings, recorder = problem.data, problem.settings, problem.recorder
    problem = replace(problem, objective=replace(problem.objective, beta=1.0))
    if len(data) < defaults.FEWEST_FOR_BETA:
        return fit_sparse(problem), {}
    history: History = {"start": [], "solve": [], "validation": []}
    kept, stopping, choosing, reporting = _four_parts(problem)
    start = problem.start
    if start is None:
        begun = start_state(replace(problem, data=kept))
        start, history["start"] = begun.state, begun.history
    objective = _relative_to(start, kept, problem.objective)

    def fit_at(beta: float, state: SparseState, at: Problem) -> _Point:
        at_beta = replace(objective, beta=beta)
        watch = BestState(at_beta, stopping)
        for stage, how in ((at_beta.of_posterior_alone, _briefly(problem)), (at_beta, at)):
            found = minimise(state, kept, stage, how, watch)
            history["solve"] += found.history
            state = found.state
            watch.score(state)
        best = watch.best_state
        return _Point(at_beta, best, held_out_losses(best, at_beta, choosing))

    tried = [fit_at(1.0, start_log_loss(start, kept, objective, settings), problem)]
    max_iter = max(1, settings.max_iter // defaults.BETA_STEPS)
    warm = replace(problem, settings=replace(settings, max_iter=max_iter))
    down, up = (b for b in defaults.BETAS if b < 1), (b for b in defaults.BETAS[::-1] if b > 1)
    for betas in (down, up):
        way = tried[:1]
        for beta in betas:
            if _has_risen(way) or recorder.stopped:
                break
            # Hyper-parameters that overfit must not be passed on: it is the best state that is.
            way.append(fit_at(beta, way[-1].state, warm))
        tried += way[1:]
    points = {point.beta: point for point in sorted(tried, key=lambda point: -point.beta)}
    chosen = points[choose_towards({beta: point.losses for beta, point in points.items()}, 1.0)]
    path = {beta: point.loss for beta, point in points.items()}
    history["validation"] = list(path.values())
    reported = float(held_out_losses(chosen.state, chosen.objective, reporting).mean())
    if recorder.stopped:
        parts = kept, stopping
        fit = _finish(chosen.state, chosen.objective, reported, problem, history, parts)
        return fit, path
    of_beta = replace(problem.objective, beta=chosen.beta)
    fit = fit_sparse(replace(problem, kernels=[chosen.state.kernel], objective=of_beta))
    history |= {name: history[name] + fit.history[name] for name in ("start", "solve")}
    return replace(fit, held_out_loss=reported, history=history), path


@dataclass(frozen=True)
class _Point:
    """One beta of the path: its best state, and the losses (n,) of the part that chooses."""

    objective: Objective
    state: SparseState
    losses: Tensor

    @property
    def beta(self) -> float:
        return self.objective.beta

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


def _four_parts(problem: Problem) -> tuple[Data, Data, Data, Data]:
    """Training; then, of at most a fifth each, what stops, what chooses and what is reported."""
    fraction = min(problem.settings.validation_fraction, defaults.MOST_HELD_OUT)
    rest, stopping = split(problem.data, fraction, problem.generator)
    both, reporting = split(rest, fraction / (1 - fraction), problem.generator)
    training, choosing = split(both, fraction / (1 - 2 * fraction), problem.generator)
    return training, stopping, choosing, reporting


def _has_risen(tried: list[_Point]) -> bool:
    """Whether the loss rose twice in a row at the end of the path."""
    losses = [point.loss for point in tried[-defaults.MAX_RISES - 1 :]]
    return len(losses) > defaults.MAX_RISES and all(a < b for a, b in pairwise(losses))
