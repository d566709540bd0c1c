r"""Direct loss minimisation for sparse Gaussian processes, from a kernel and rows to a posterior.

The posterior q(u) of a sparse GP, and its hyper-parameters, minimise the loss that the predictions
are judged by [1]_ (:mod:`skgp.learning.sparse.objective`). ``fit_sparse`` takes these steps:

Where every input is an inducing point, Gaussian noise needs none of them
(:mod:`skgp.learning.sparse.exact`). Otherwise,

1. *Kernel.* Of several families, the one whose evidence bound on some rows is best.
2. *Start.* Hyper-parameters, inducing points and q(u) maximise the evidence bound, which is a sound
   if timid guide: collapsed for Gaussian noise, by natural gradients and L-BFGS otherwise. Of few
   rows, hyper-parameters maximise the evidence itself (:mod:`skgp.learning.sparse.bound_search`).
   More inducing points follow where they predict held-out data better
   (:mod:`skgp.learning.sparse.size`).
3. *Objective.* It is minimised over q(u), "fixed" stops here; then, "joint", over everything.
4. *Rows held out* of step 3 say when to stop the joint search, which can overfit
   (:mod:`skgp.learning.sparse.holdout`), and whether it gained anything; q(u) then learns from
   all rows. Step 2 saw them: the bound does not overfit. After minibatches they also say how far
   the mean may move to that of least squares (:mod:`skgp.learning.sparse.blending`).

=================================  ===========================================================
paper                              here
=================================  ===========================================================
sections 1, 2: objectives          `objective`; `collapsed`, `square_loss` for closed forms
section 2: sparse GPs, q(f_i)      `sparse`
section 3, supplement 1: uPS       `log_expectation`, `product_sampling`
section 4, supplement 2: bMC       `log_expectation`
section 6: fixed and joint DLM     step 3
section 6: grid search of beta     `beta_path`
=================================  ===========================================================

Deviations: whitened q(u) in natural coordinates, by L-BFGS or minibatches in place of Adam;
inducing points are learned; joint DLM starts from the evidence bound; noise has a floor;
expectations without a closed form by adaptive quadrature, more accurate than sampling and faster.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import statistics
from skgp.inference.sparse.sparse import SparsePosterior, SparseState
from skgp.inference.sparse.square_loss import calibrated_state, evidence_ratio
from skgp.kernels.gram import gram_diag
from skgp.learning import improves
from skgp.learning.sparse.blending import blended, choose_blend
from skgp.learning.sparse.bound_search import start_log_loss, start_state
from skgp.learning.sparse.exact import dense_posterior, dense_start, of_bayes_rule
from skgp.learning.sparse.holdout import BestState, split
from skgp.learning.sparse.minibatch import fit_minibatch
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.size import grown
from skgp.learning.sparse.training import (
    LEAST_BETA,
    Training,
    collapsed_posterior,
    fit_collapsed,
    fit_posterior,
    total_loss,
)
from skgp.optim.stopping import StopRecorder

__all__ = [
    "SparseFit",
    "finish",
    "fit_sparse",
    "has_closed_form",
    "in_units_of",
    "minimise",
    "of_few_iterations",
    "of_posterior_alone",
]

Callback = Callable[[int, dict], bool | None]

# Entries of the n x M matrix from which on minibatches take over: in a joint search, and in one of
# q(u) alone, whose iterations are cheaper and fewer.
_JOINT_NUMBERS, _ALONE_NUMBERS = 1e6, 1e7
_STEPS_PER_ITERATION = 2  # of minibatches
_ALONE_SHARE = 0.15  # of the iterations, for q(u) alone before and after a joint search


@dataclass(frozen=True)
class SparseFit:
    """A fitted sparse GP.

    Attributes
    ----------
    state : SparseState
    objective : Objective
        Minimised last, with its beta.
    loss : float
        Its value, summed over the rows.
    elbo : float
        Evidence bound of the posterior, in nats (beta = 1).
    noise_variance : float
        Of the observations given f; NaN where it depends on f.
    held_out_loss : float or None
        Of the state that step 3 chose, an observation; None without rows held out.
    n_iter : int
        Of the longest part of steps 3 and 4; steps with minibatches count by pairs.
    history : dict of str to list of float
        "start", "solve": objective an observation; "validation": loss of the rows held out.
    dense : SparsePosterior or None
        In place of that of `state`: of a dense process.
    """

    state: SparseState
    objective: Objective
    loss: float
    elbo: float
    noise_variance: float
    held_out_loss: float | None = None
    n_iter: int = 1
    history: dict[str, list[float]] = field(default_factory=dict)
    dense: SparsePosterior | None = None

    def posterior(self) -> SparsePosterior:
        """What predicts."""
        return self.state.posterior() if self.dense is None else self.dense


def fit_sparse(
    kernels: list,
    data: Data,
    objective: Objective,
    settings: Settings,
    *,
    inducing: Callable[..., Tensor],
    offset: Tensor,
    generator: torch.Generator,
    start: SparseState | None = None,
    callback: Callback | None = None,
) -> SparseFit:
    """Fit a sparse GP (steps 1 to 4 of the module docstring).

    Parameters
    ----------
    kernels : list of sklearn kernel expressions without noise
        One, or several to choose from.
    data : Data
    objective : Objective
    settings : Settings
    inducing : callable
        ``inducing(kernel, M=None)`` gives points (M, d) to begin with, in the metric of a kernel.
    offset : Tensor of shape (c,)
        Prior means of the latent functions.
    generator : torch.Generator
    start : SparseState, optional
        Of an earlier fit, in place of steps 1 and 2.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True ends the fit with what it has.

    Returns
    -------
    SparseFit
    """
    recorder = StopRecorder(callback)
    history: dict[str, list[float]] = {"start": [], "solve": [], "validation": []}
    if settings.exact:
        begun = dense_start(
            kernels,
            data,
            objective,
            inducing,
            offset,
            generator,
            recorder,
            max_iter=settings.max_iter,
            start=start,
        )
        start, history["start"] = begun.state, begun.history
        data, objective = data.to(torch.float64), of_bayes_rule(objective)
        if objective.name == "elbo" and objective.beta == 1.0:
            dense, evidence = dense_posterior(start, data, objective)
            return SparseFit(
                start,
                objective,
                loss=-evidence,
                elbo=evidence,
                noise_variance=objective.family.with_parameters(
                    start.likelihood
                ).additive_variance(),
                n_iter=max(1, recorder.n_longest),
                history=history,
                dense=dense,
            )
    elif start is None:
        begun = start_state(
            kernels, data, objective, settings, inducing, offset, generator, recorder
        )
        start, history["start"] = begun.state, begun.history
        if not recorder.stopped:
            start = grown(start, data, objective, settings, inducing, generator)
    if settings.early_stopping and _can_overfit(objective, settings):
        return _fit_watched(start, data, objective, settings, generator, recorder, history)
    state, objective = start, in_units_of(start, data, objective)
    if objective.name == "log_loss":
        free = objective if settings.joint else of_posterior_alone(objective)
        state = start_log_loss(start, data, free)
    found = minimise(state, data, objective, settings, None, generator, recorder)
    history["solve"] = found.history
    return _report(found.state, data, objective, found.loss, None, recorder, history)


def _fit_watched(
    state: SparseState,
    data: Data,
    objective: Objective,
    settings: Settings,
    generator: torch.Generator,
    recorder: StopRecorder,
    history: dict[str, list[float]],
) -> SparseFit:
    """Steps 3 and 4 of a joint search with rows held out."""
    kept, held_out = split(data, settings.validation_fraction, generator)
    objective = in_units_of(state, kept, objective)
    if objective.name == "log_loss":
        state = start_log_loss(state, kept, objective)
    # What the joint search has to beat: q(u) alone, with the bound's hyper-parameters.
    alone = of_posterior_alone(objective)
    state = minimise(
        state, kept, alone, of_few_iterations(settings), None, generator, recorder
    ).state
    watch = BestState(objective, held_out)
    watch.score(state)
    before, losses_before = watch.best_state, watch.best_rows
    found = minimise(state, kept, objective, settings, watch, generator, recorder)
    history["solve"], history["validation"] = found.history, watch.losses
    improved = improves(watch.best_rows, losses_before)
    chosen, loss = (watch.best_state, watch.loss) if improved else (before, watch.losses[0])
    parts = kept, held_out
    return finish(chosen, data, objective, settings, loss, generator, recorder, history, parts)


def in_units_of(state: SparseState, data: Data, objective: Objective) -> Objective:
    """The objective with the unit of beta that makes 1 the choice of the evidence bound.

    Only "square_loss" has one: at beta = 1, and the kernel and points of `state`, its mean is that
    of the Gaussian process. Where noise is learned its variance in `state` does not count: after a
    square loss it is that of the beta before.
    """
    if objective.name != "square_loss":
        return objective
    if objective.learn_likelihood:
        with torch.no_grad():
            return replace(objective, unit=evidence_ratio(statistics(state.kernel, data, state.Z)))
    prior = data.weighted_sum(gram_diag(state.kernel, data.X)) / data.total
    noise = objective.family.gaussian_noise(state.likelihood)
    return replace(objective, unit=float(noise / prior))


def _can_overfit(objective: Objective, settings: Settings) -> bool:
    """Whether step 3 moves hyper-parameters by an objective that can overfit."""
    free = objective.learn_kernel or objective.learn_inducing or objective.learn_likelihood
    return settings.joint and free and objective.name in ("log_loss", "square_loss")


# ------------------------------------------------------------------------ steps 3 and 4: objective


def minimise(
    state: SparseState,
    data: Data,
    objective: Objective,
    settings: Settings,
    watch: BestState | None,
    generator: torch.Generator,
    recorder: StopRecorder,
) -> Training:
    """Step 3, by whichever of closed forms, all rows at once, and minibatches suits."""
    if not (settings.joint or objective.name in ("elbo", "fitc")):
        objective = of_posterior_alone(objective)
    if recorder.stopped:
        if not has_closed_form(objective):
            return Training(state, total_loss(state, data, objective), stopped=True)
        objective = of_posterior_alone(objective)  # whose optimum takes no iteration
    options: dict[str, Any] = {
        "max_iter": settings.max_iter,
        "tol": settings.tol,
        "callback": recorder,
    }
    if has_closed_form(objective):
        few = data.some(int(_ALONE_NUMBERS / state.mean.numel()), generator)
        # Fewer rows bear as much less of the regulariser.
        scaled = replace(objective, beta=objective.beta * few.total / data.total)
        found = fit_collapsed(state, few, scaled, watch=watch, **options)
        recorder.end_part(len(found.history))
        with torch.no_grad():
            posterior = collapsed_posterior(found.state, data, objective)
        return replace(found, state=found.state.with_posterior(*posterior))
    if _by_minibatches(state, data, objective, settings):
        options["max_iter"] *= _STEPS_PER_ITERATION
        found = fit_minibatch(
            state,
            data,
            objective,
            batch_size=settings.batch_size,
            learning_rate=settings.learning_rate,
            generator=generator,
            watch=watch,
            **options,
        )
        recorder.end_part(-(-len(found.history) // _STEPS_PER_ITERATION))
        return found
    found = fit_posterior(state, data, objective, watch=watch, **options)
    recorder.end_part(len(found.history))
    return found


def _by_minibatches(
    state: SparseState, data: Data, objective: Objective, settings: Settings
) -> bool:
    """Whether steps on some rows suit an objective without a closed form better than all rows."""
    free = objective.learn_kernel or objective.learn_inducing or objective.learn_likelihood
    most = _JOINT_NUMBERS if free else _ALONE_NUMBERS
    many = len(data) * state.mean.numel() > most
    return objective.stochastic or settings.batch_size is not None or many


def finish(
    state: SparseState,
    data: Data,
    objective: Objective,
    settings: Settings,
    held_out_loss: float,
    generator: torch.Generator,
    recorder: StopRecorder,
    history: dict[str, list[float]],
    parts: tuple[Data, Data],
) -> SparseFit:
    """Step 4: let q(u) learn from all rows, under the hyper-parameters of `state`.

    `parts` are the rows kept for step 3 and those held out.
    """
    alone = of_posterior_alone(objective)
    found = minimise(state, data, alone, of_few_iterations(settings), None, generator, recorder)
    end, loss = found.state, found.loss
    if _blends(state, data, objective, settings) and not recorder.stopped:
        end = blended(end, data, choose_blend(state, *parts, objective))
        loss = total_loss(end, data, objective)
    return _report(end, data, objective, loss, held_out_loss, recorder, history)


def _blends(state: SparseState, data: Data, objective: Objective, settings: Settings) -> bool:
    """Whether the mean may move to that of least squares: Gaussian noise, by minibatches."""
    gaussian = objective.family.is_gaussian
    exact = objective.name == "log_loss" and not objective.stochastic
    return gaussian and exact and _by_minibatches(state, data, objective, settings)


def of_few_iterations(settings: Settings) -> Settings:
    """For q(u) alone, beginning near its optimum."""
    return replace(settings, max_iter=max(1, int(_ALONE_SHARE * settings.max_iter)))


def of_posterior_alone(objective: Objective) -> Objective:
    return replace(objective, learn_kernel=False, learn_likelihood=False, learn_inducing=False)


def _report(
    state: SparseState,
    data: Data,
    objective: Objective,
    loss: float,
    held_out_loss: float | None,
    recorder: StopRecorder,
    history: dict[str, list[float]],
) -> SparseFit:
    """The result, its variances made those of a Gaussian process after a square loss."""
    if objective.name == "square_loss" and objective.learn_likelihood:
        beta = max(objective.beta, LEAST_BETA) * objective.unit
        state = calibrated_state(state, data, beta=beta)
    return SparseFit(
        state=state,
        objective=objective,
        loss=loss,
        elbo=-total_loss(state, data, replace(objective, name="elbo", beta=1.0)),
        noise_variance=objective.family.with_parameters(state.likelihood).additive_variance(),
        held_out_loss=held_out_loss,
        n_iter=max(1, recorder.n_longest),
        history=history,
    )


def has_closed_form(objective: Objective) -> bool:
    """Whether q(u) is known for given hyper-parameters."""
    gaussian = objective.family.is_gaussian
    return objective.name in ("fitc", "square_loss") or (objective.name == "elbo" and gaussian)
