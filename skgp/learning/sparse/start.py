"""Where direct loss minimisation begins: the best kernel, points and q(u) by the ELBO.

Hyper-parameters, inducing points and q(u) maximise the ELBO. With an inducing point at every row
that is the evidence itself. While rows are not many more than inducing points, the evidence, a
function of some hyper-parameters alone, costs less to maximise than the ELBO, whose q(u) has
:math:`O(c M^2)` numbers: that of :mod:`skgp.learning.sparse.evidence`, and with outliers the exact
one of the rows that are none (:mod:`skgp.learning.hyperparameters`). Default kernels of labels also
follow labels left out (`best_of_labels`): the evidence alone overfits many length scales (on
digits, 64 columns and 400 labels, the log-loss of new ones is half as much again as with one length
scale for all), and prefers functions smoother than those that predict best
(:mod:`skgp.learning.label_scales`).

With an inducing point at every distinct input and Gaussian noise (``dense_start``) nothing is
approximated: hyper-parameters are found as for every dense process (:mod:`skgp.learning.search`),
and "log_loss" has nothing to correct. What it gains over the ELBO is that variances adapt to where
a sparse posterior errs.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from skgp.data import Data
from skgp.inference.sparse import SparseState, natural_gradients
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.hyperparameters import sizes_of
from skgp.learning.calibration import choose_moderation
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    rows_of,
    stratified_order,
)
from skgp.learning.defaults import GLOBAL_SEARCH, LABEL_SHARE, LEAST_EFFECT
from skgp.learning.hyperparameters import robust_hyperparameters
from skgp.learning.label_scales import capped, rescale_few
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.search import SearchSettings
from skgp.learning.selection import choose
from skgp.learning.sparse import defaults
from skgp.learning.sparse.evidence import (
    Evidence,
    best_evidence,
    dense_fit,
    other_starts,
    white_kernel,
)
from skgp.learning.sparse.objective import Objective, Problem, Settings, held_out_losses, split
from skgp.learning.sparse.search import Training, broadened, fit_all_rows
from skgp.likelihoods import Bernoulli
from skgp.linalg.runtime import require_memory


def require_room(objective: Objective, n: int, M: int, c: int) -> None:
    """Refuse more inducing points M, of c latent functions, than memory has room for."""
    what, remedy = f"q(u) of {c} latent functions at M={M} inducing points", "a smaller n_inducing"
    needed = 8.0 * (defaults.SPARSE_MATRICES + 2 * c) * M**2
    require_memory(needed, what, f"Use {remedy}")
    if objective.name == "fitc":
        what, needed = f"{what} and {n} rows by 'fitc'", 8.0 * defaults.FITC_MATRICES * n * M
        require_memory(needed, what, f"Use objective='elbo', or {remedy}")


def start_state(problem: Problem) -> Training:
    """The best kernel, and the points and q(u) that maximise the ELBO for it."""
    data, settings, recorder = problem.data, problem.settings, problem.recorder
    objective, generator = problem.objective, problem.generator
    bound = objective if objective.name == "elbo" else objective.elbo
    if settings.dense_start:
        return start_of_few(problem, bound)

    def maximise(state: SparseState, few: Data, max_iter: int) -> Training:
        if not bound.has_closed_form:
            state = optimal_posterior(state, few, bound)
        return fit_all_rows(
            state, few, bound, max_iter=max_iter, tol=settings.tol, callback=recorder
        )

    most = min(defaults.FAMILY_ITER, settings.start_iter)
    if len(problem.kernels) == 1:
        state = full = problem.prior(problem.kernels[0])
    else:
        few = data.some(defaults.FAMILY_ROWS, generator)
        full, best = _best_family(problem, lambda begun: maximise(begun, few, most))
        if recorder.stopped and len(best.state.Z) == len(full.Z):
            return best
        # Of more points, hyper-parameters learned with few of them are a poor start.
        state = best.state if len(best.state.Z) == len(full.Z) else full

    def rows(state: SparseState, per_inducing: int) -> Data:
        least = int(defaults.START_NUMBERS / state.mean.numel())
        return data.some(max(per_inducing * len(state.Z), least), generator)

    few = rows(state, defaults.START_PER_INDUCING)
    begun = maximise(state, few, settings.start_iter)
    for other, penalty in other_starts(problem, full.kernel, begun.loss / few.total):
        likelihood = objective.likelihood.initial(data.X)
        begins = SparseState.prior(other, likelihood, state.Z, problem.offset)
        rival = maximise(begins, few, most)
        history = begun.history + rival.history
        if rival.loss + penalty < begun.loss - LEAST_EFFECT * few.total:
            begun = maximise(rival.state, few, settings.start_iter)
            history = history + begun.history
        begun = replace(begun, history=history)
    if not _wants_more_rows(begun.state, data, objective) or recorder.stopped:
        return begun
    few = rows(begun.state, defaults.MORE_PER_INDUCING)
    more = maximise(begun.state, few, max(1, settings.start_iter // 2))
    return replace(more, history=begun.history + more.history)


def _best_family(
    problem: Problem, fit: Callable[[SparseState], Training]
) -> tuple[SparseState, Training]:
    """The prior of the kernel of least loss, and its fit from fewer points."""
    tried = []
    for kernel in problem.kernels:
        if not problem.recorder.stopped:
            full = problem.prior(kernel)
            tried.append((full, fit(_thinned(full))))
    return min(tried, key=lambda each: each[1].loss)


def _thinned(state: SparseState) -> SparseState:
    """The prior with at most 200 of the inducing points."""
    every = -(-len(state.Z) // defaults.FAMILY_POINTS)
    return SparseState.prior(state.kernel, state.likelihood, state.Z[::every], state.offset)


def _wants_more_rows(state: SparseState, data: Data, objective: Objective) -> bool:
    """Whether a longer start pays: minibatches improve points and hyper-parameters slowly.

    The other objectives go on by closed forms, or have none here.
    """
    M = len(state.Z)
    fewest = max(defaults.START_PER_INDUCING * M, defaults.START_NUMBERS / M)
    many = min(len(data), defaults.MORE_PER_INDUCING * M) > fewest
    return many and objective.name == "log_loss" and objective.is_gaussian


def grown(state: SparseState, problem: Problem) -> SparseState:
    """The state with as many inducing points as pay, of Gaussian noise alone; O(n M^2) each.

    The collapsed posterior costs one pass over the data for each number of points, at the
    hyper-parameters of the start. Twice as many points make every later step four times as dear, so
    that their gain has to be worth it, not only beyond chance.
    """
    settings, objective = problem.settings, problem.objective.elbo
    if not (settings.sizes and objective.is_gaussian):
        return state
    few = problem.data.some(defaults.MAX_SIZE_ROWS, problem.generator)
    kept, held_out = split(few, settings.validation_fraction, problem.generator)

    def at(size: int) -> SparseState:
        Z = problem.inducing(state.kernel, size)
        return SparseState.prior(state.kernel, state.likelihood, Z, state.offset)

    tried = [state, *map(at, settings.sizes)]
    losses = [
        held_out_losses(objective.with_optimum(each, kept), objective, held_out) for each in tried
    ]
    return tried[choose(losses, least_effect=defaults.POINTS_WORTH)]


def start_log_loss(
    state: SparseState, data: Data, objective: Objective, settings: Settings
) -> SparseState:
    """Posterior of `data` under the ELBO, as wide as the log-loss asks for, if it is minimised."""
    if objective.name != "log_loss":
        return state
    if objective.is_gaussian:
        state = optimal_posterior(state, data, objective.elbo)
    return broadened(state, data, objective if settings.joint else objective.of_posterior_alone)


def optimal_posterior(
    state: SparseState, data: Data, bound: Objective, *, max_iter: int = 10
) -> SparseState:
    """The state with the q(u) that maximises the ELBO, or is near it after `max_iter` steps."""
    if bound.has_closed_form:
        return bound.with_optimum(state, data)
    made = bound.likelihood.with_parameters(state.likelihood)
    return natural_gradients(state, data, made, beta=bound.beta, max_iter=max_iter)


def has_outliers(objective: Objective) -> bool:
    """Whether noise of which outliers are part is learned, a variance its first parameter."""
    likelihood = objective.likelihood
    ignores = likelihood.is_additive and not likelihood.is_log_concave
    return ignores and objective.learn_likelihood and len(likelihood.free_parameters()) > 0


def of_few_rows(problem: Problem) -> Objective:
    """The ELBO of q(u) in place of the plain log-loss, of few labels and few rows with outliers.

    For few rows q(u) is the posterior of f but for its Gaussian form. The log-loss fits it to heavy
    tails of the noise: new observations (60 to 300 rows, one and three columns, t noise) were .03
    nats less likely than by the ELBO. Of labels it gives no more than they cost: a wide q(u) costs
    little, and predicts cautiously. New labels (42 problems, 50 to 300 rows, three draws each) were
    .011 nats less likely, those of a checkerboard .07, by no more than .02 likelier in any.
    """
    objective, settings = problem.objective, problem.settings
    outliers = settings.dense_start and has_outliers(objective)
    exact = outliers or (settings.few and not objective.likelihood.is_numeric)
    if exact and not settings.joint and _by_bayes_rule(objective):
        return objective.elbo.of_posterior_alone
    return objective


def start_of_few(problem: Problem, bound: Objective) -> Training:
    """The kernel of the greatest evidence of a dense process, and the optimal ELBO for it."""
    if has_outliers(problem.objective):
        return _robust_start(problem, bound)
    data, of_labels = problem.data, problem.settings.rescales
    found = best_of_labels(problem) if of_labels else best_evidence(problem)
    state = problem.prior(found.kernel, found.likelihood.to(data.X))
    # To the end: from a poor q(u) of labels that lie apart a search would take steps too short.
    state = optimal_posterior(state, data, bound, max_iter=problem.settings.start_iter)
    loss, history = found.loss * data.total, list(found.history)
    return Training(state, loss, history, stopped=problem.recorder.stopped)


def _robust_start(problem: Problem, bound: Objective) -> Training:
    """Hyper-parameters from targets that are no gross errors; the likelihood by the ELBO.

    The kernel is found as that of a dense process with normal noise.
    """
    data, likelihood, settings = problem.data, problem.objective.likelihood, problem.settings
    parameters = likelihood.initial(data.X.double())
    white = white_kernel(likelihood, parameters)
    found, _ = robust_hyperparameters(
        [kernel + white for kernel in problem.kernels],
        replace(data, y=data.y[:, 0]).to(torch.float64),
        generator=problem.generator,
        settings=SearchSettings(**GLOBAL_SEARCH),
        callback=problem.recorder,
    )
    kernel, learned = split_noise(found.kernel)
    parameters[0] = math.log(cast(WhiteKernel, learned).noise_level)
    state = problem.prior(kernel, parameters.to(data.X))
    if problem.recorder.stopped:
        history = [-value for value in found.history]
        return Training(state, history[-1] if history else math.inf, history, stopped=True)
    fixed = replace(bound, learn_kernel=False, learn_inducing=False)
    options: dict[str, Any] = {
        "max_iter": settings.start_iter,
        "tol": settings.tol,
        "callback": problem.recorder,
    }
    return fit_all_rows(optimal_posterior(state, data, bound), data, fixed, **options)


def is_conjugate(objective: Objective) -> bool:
    """Whether the posterior of a dense process is known in closed form, at least up to beta."""
    by_bayes = objective.name != "log_loss" or _by_bayes_rule(objective)
    return objective.is_gaussian and by_bayes


def _by_bayes_rule(objective: Objective) -> bool:
    """Whether it is the plain log-loss, whose place a posterior of few rows may take."""
    return objective.name == "log_loss" and objective.beta == 1.0 and not objective.stochastic


def of_bayes_rule(objective: Objective) -> Objective:
    """The objective whose optimum is the posterior of a dense process.

    Hyper-parameters stay where :func:`dense_start` chose them, unless another objective moves them.
    """
    if objective.beta != 1.0 or objective.name == "square_loss":
        return objective
    return replace(objective.of_posterior_alone, name="elbo")


def dense_start(problem: Problem) -> Training:
    """Hyper-parameters of the greatest evidence, an inducing point at every distinct input.

    Of the prior, in float64: the posterior is in closed form. O(n^3) an iteration; the search
    begins with the hyper-parameters of an earlier fit, where there is one.
    """
    data, likelihood, begun = (
        problem.data.to(torch.float64),
        problem.objective.likelihood,
        problem.start,
    )
    noise = likelihood.initial(data.X) if begun is None else begun.likelihood.double()
    kernels = problem.kernels if begun is None else [begun.kernel]
    kernel, history, search = kernels[0], list[float](), SearchSettings(**GLOBAL_SEARCH)
    if problem.objective.learn_kernel:
        most = min(problem.settings.max_iter, search.dense_max_iter)
        settings = replace(search, dense_max_iter=most)
        found = dense_fit(problem, data, kernels, noise, settings)
        kernel, learned = split_noise(found.kernel)
        noise = noise.new_tensor([learned.noise_level if learned else 0.0]).log()
        history = [-value for value in found.history]
    Z, offset = problem.inducing(kernel).double(), problem.offset.double()
    state, loss = SparseState.prior(kernel, noise, Z, offset), history[-1] if history else 0.0
    return Training(state, loss, history, stopped=problem.recorder.stopped)


def best_of_labels(problem: Problem) -> Evidence:
    """The kernel of the greatest evidence, its complexity and scales as left-out labels prefer."""
    data = capped(problem.data.to(torch.float64))
    problem = replace(problem, data=data, offset=problem.offset.double())
    found = best_evidence(replace(problem, kernels=kernels_that_predict(problem)))
    if problem.recorder.stopped:
        return found
    likelihood = cast(Bernoulli, problem.objective.likelihood)
    size = rows_of(ClassificationSettings.screen_size, data.y.shape[1])
    few = data.take(stratified_order(data, problem.generator)[:size])
    better = rescale_few(
        found.kernel, few, data, likelihood, problem.offset, callback=problem.recorder
    )
    return found if better is None else found._replace(kernel=better)


def kernels_that_predict(problem: Problem) -> list:
    """The kernels with one length scale, or those with one a column if a third held out says so.

    All of them where there are none of one kind, or too few labels to hold any out.
    """
    shared: list = []
    separate: list = []
    for kernel in problem.kernels:
        (separate if max(sizes_of(kernel), default=0) > 1 else shared).append(kernel)
    data, likelihood = problem.data, cast(Bernoulli, problem.objective.likelihood)
    if not (shared and separate) or len(data) <= ClassificationSettings.few_rows:
        return problem.kernels
    order = stratified_order(data, problem.generator)
    n_kept = 2 * len(data) // 3
    kept, held_out = data.take(order[:n_kept]), data.take(order[n_kept:])
    losses = []
    for kernels in (shared, separate):
        kernel = best_evidence(replace(problem, kernels=kernels, data=kept)).kernel
        evidence = LaplaceEvidence.of(kernel, kept, likelihood, problem.offset)
        moments = laplace_predict(evidence.fit(kernel.theta), kernel, kept.X, held_out.X)
        best, of_moderations = choose_moderation(likelihood, held_out.y, *moments, held_out.weight)
        losses.append(of_moderations[best])
    return (shared, separate)[choose(losses, weight=held_out.weight, least_share=LABEL_SHARE)]
