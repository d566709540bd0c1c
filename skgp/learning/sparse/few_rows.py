r"""Where direct loss minimisation of few rows begins: hyper-parameters of a dense process.

With an inducing point at every row the ELBO is the evidence itself. While rows are not many more
than inducing points, the evidence costs less to maximise, a function of some hyper-parameters
alone, than the ELBO, whose q(u) has :math:`O(c M^2)` numbers: that of
:mod:`skgp.learning.sparse.evidence`, and with outliers the exact one of the rows that are none
(:mod:`skgp.learning.hyperparameters`). Default kernels of labels also follow labels left out
(:mod:`skgp.learning.sparse.labels`).

With an inducing point at every distinct input and Gaussian noise (``dense_start``) nothing is
approximated: hyper-parameters are found as for every dense process (:mod:`skgp.learning.search`),
and "log_loss" has nothing to correct. What it gains over the ELBO is that variances adapt to where
a sparse posterior errs.
"""

import math
from dataclasses import replace
from typing import Any, cast

import torch

from skgp.data import Data
from skgp.inference.sparse import SparseState, natural_gradients
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.learning.defaults import GLOBAL_SEARCH
from skgp.learning.hyperparameters import robust_hyperparameters
from skgp.learning.search import SearchSettings
from skgp.learning.sparse import defaults
from skgp.learning.sparse.evidence import best_evidence, dense_fit, white_kernel
from skgp.learning.sparse.labels import best_of_labels
from skgp.learning.sparse.objective import Objective, Problem
from skgp.learning.sparse.search import Training, fit_all_rows


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
    """The ELBO of q(u) in place of the plain log-loss, of noise with heavy tails and few rows.

    For few rows q(u) is the posterior of f but for its Gaussian form, and the log-loss fits it to
    the rows themselves: new observations (60 to 300 rows, one and three columns, t noise) were
    .03 nats less likely than by the ELBO.
    """
    objective, settings = problem.objective, problem.settings
    plain = settings.dense_start and not settings.joint and _by_bayes_rule(objective)
    if plain and has_outliers(objective):
        return objective.elbo.of_posterior_alone
    return objective


def start_of_few(problem: Problem, bound: Objective) -> Training:
    """The kernel of the greatest evidence of a dense process, and the optimal ELBO for it."""
    if has_outliers(problem.objective):
        return _robust_start(problem, bound)
    data, of_labels = problem.data, problem.settings.rescales
    found = best_of_labels(problem) if of_labels else best_evidence(problem)
    state = problem.prior(found.kernel, found.likelihood.to(data.X))
    # Few steps: what follows searches for q(u) anyway.
    state = optimal_posterior(state, data, bound, max_iter=defaults.FEW_STEPS)
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


# ------------------------------------------------------------------- an inducing point at every row


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
