"""Searches by all rows and by minibatches: their optima, held-out rows, bounds, when they stop."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.collapsed import elbo_loss, fitc_loss, square_loss, statistics
from skgp.inference.sparse import SparseState
from skgp.learning import defaults
from skgp.learning.sparse import search as module
from skgp.learning.sparse.objective import Coordinates, Objective
from skgp.learning.sparse.search import (
    BestState,
    fit_all_rows,
    fit_minibatch,
    held_out_losses,
    split,
)
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from tests.reference import sparse as dense
from tests.same import assert_same

GAUSSIAN = Gaussian(0.3, bounds=(1e-3, 5.0))


STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))


FIXED = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}


LIKELIHOODS = {
    "gaussian": (GAUSSIAN, "gaussian"),
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (STUDENT, "student_t"),
}


weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def problem_of(likelihood, **options):
    """A problem, its likelihood, and a state of no particular optimum."""
    made, target = LIKELIHOODS[likelihood]
    problem = replace(dense.make_problem(target=target, **options), offset=0.2)
    state = problem.state(made.initial(torch.zeros(1, dtype=torch.float64)))
    posterior = dense.random_posterior(len(problem.Z))
    return problem, made, state.with_posterior(0.3 * posterior[0], posterior[1])


def direct_loss(state, data, objective):
    """The collapsed objectives by the functions that compute them."""
    noise = objective.likelihood.with_parameters(state.likelihood).noise_variance
    if objective.name == "fitc":
        return float(fitc_loss(state.kernel, data, state.Z, noise))
    sums = statistics(state.kernel, data, state.Z)
    if objective.name == "square_loss":
        return float(square_loss(sums, beta=objective.beta))
    return float(elbo_loss(sums, noise, beta=objective.beta))


@weights
@pytest.mark.parametrize("name", ["elbo", "fitc", "square_loss"])
def test_fit_all_rows_in_closed_form_ends_at_the_optimal_posterior(name, weighted):
    problem, made, state = problem_of("gaussian", weighted=weighted)
    # The square loss has no noise to learn.
    objective = Objective(made, name=name, beta=0.5, learn_likelihood=name != "square_loss")
    found = fit_all_rows(state, problem.data, objective, max_iter=60, tol=1e-9)
    assert found.loss < direct_loss(state, problem.data, objective) - 1
    assert found.loss == pytest.approx(direct_loss(found.state, problem.data, objective), rel=1e-9)
    assert found.history[-1] * problem.data.total == pytest.approx(found.loss, rel=1e-6)
    assert len(found.history) <= 60 and not found.stopped
    optimum = objective.with_optimum(found.state, problem.data)
    assert_same(found.state.mean, optimum.mean)
    assert_same(found.state.root, optimum.root)


@pytest.mark.parametrize("name", ["elbo", "fitc", "square_loss"])
def test_fit_all_rows_in_closed_form_moves_only_what_is_free(name):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name=name, **FIXED)
    for free in FIXED:
        if name == "square_loss" and free == "learn_likelihood":
            continue  # its loss does not know the noise
        some = replace(objective, **{free: True})
        found = fit_all_rows(state, problem.data, some, max_iter=5, tol=0.0).state
        assert (found.kernel.theta != state.kernel.theta).any() == (free == "learn_kernel")
        assert (found.likelihood != state.likelihood).any() == (free == "learn_likelihood")
        unmoved = torch.equal(found.Z, state.Z)
        assert unmoved == (free != "learn_inducing")
    still = fit_all_rows(state, problem.data, objective, max_iter=5, tol=0.0)
    assert still.converged and still.history == []
    assert still.loss == pytest.approx(direct_loss(state, problem.data, objective), rel=1e-12)


def test_fit_all_rows_in_closed_form_respects_the_bounds():
    problem, _, state = problem_of("gaussian")
    kernel = ConstantKernel(1.0, (0.9, 1.1)) * RBF([1.0, 1.0], (0.8, 1.2))
    likelihood = Gaussian(0.3, bounds=(0.28, 0.29))
    state = replace(state, kernel=kernel)
    found = fit_all_rows(
        state, problem.data, Objective(likelihood, name="elbo"), max_iter=30, tol=1e-9
    ).state
    low, high = kernel.bounds.T
    assert (found.kernel.theta >= low - 1e-12).all() and (found.kernel.theta <= high + 1e-12).all()
    assert (np.isclose(found.kernel.theta, low) | np.isclose(found.kernel.theta, high)).any()
    assert 0.28 - 1e-9 <= found.likelihood.exp().item() <= 0.29 + 1e-9


@pytest.mark.parametrize(
    ("likelihood", "name"), [*((f, "log_loss") for f in LIKELIHOODS), ("probit", "elbo")]
)
def test_fit_all_rows_lowers_its_objective(likelihood, name):
    problem, made, state = problem_of(likelihood, weighted=True)
    objective = Objective(made, name=name, beta=0.7)
    found = fit_all_rows(state, problem.data, objective, max_iter=15, tol=1e-9)
    before = objective.total(state, problem.data)
    assert found.loss < before - 1
    assert found.loss == pytest.approx(objective.total(found.state, problem.data), rel=1e-8)
    assert len(found.history) == 15 and not found.converged
    assert found.history[-1] * problem.data.total == pytest.approx(found.loss, rel=1e-9)


@pytest.mark.parametrize("max_iter", [1, 2, 30, 31, 45, 60, 61, 200])
def test_rounds_add_up_to_the_iterations(max_iter):
    rounds = list(module._rounds(max_iter))
    assert sum(rounds) == max_iter and all(n >= 1 for n in rounds)
    assert len(rounds) <= 4


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_number_their_iterations_across_rounds(name):
    problem, made, state = problem_of("gaussian")
    calls = []
    found = fit_all_rows(
        replace(state, offset=torch.zeros(1).double()),
        problem.data,
        Objective(made, name=name),
        max_iter=40,
        tol=0.0,
        callback=lambda iteration, info: calls.append((iteration, info)),
    )
    assert [iteration for iteration, _ in calls] == list(range(1, 41))
    assert [info["loss"] for _, info in calls] == found.history
    assert all(set(info) == {"loss"} for _, info in calls)
    falls = np.diff(found.history)
    assert (falls <= 1e-9).all()


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_stop_when_the_callback_says_so(name):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name=name)
    found = fit_all_rows(
        state,
        problem.data,
        objective,
        max_iter=40,
        tol=0.0,
        callback=lambda iteration, info: iteration == 3,
    )
    assert found.stopped and not found.converged and len(found.history) == 3
    assert found.loss == pytest.approx(found.history[-1] * problem.data.total, rel=1e-9)


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_converge_to_their_tolerance(name):
    problem, made, state = problem_of("gaussian", n=20, n_inducing=4)
    objective = Objective(made, name=name, learn_inducing=False)
    found = fit_all_rows(state, problem.data, objective, max_iter=500, tol=1e-3)
    assert found.converged and len(found.history) < 500


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_stop_when_the_rows_held_out_say_so(name):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name=name)
    held_out = problem_of("gaussian", seed=7)[0].data
    watch = BestState(objective, held_out)
    scored = []
    score = watch.score

    def spy(state):
        scored.append(state)
        return score(state) or len(scored) == 3

    watch.score = spy
    found = fit_all_rows(state, problem.data, objective, max_iter=40, tol=0.0, watch=watch)
    assert len(found.history) == 15 and len(scored) == 3 and not found.stopped
    # What is scored is complete: hyper-parameters on their way, and the posterior that is theirs.
    last = scored[-1]
    torch.testing.assert_close(last.Z, found.state.Z)
    if objective.has_closed_form:
        torch.testing.assert_close(last.mean, objective.with_optimum(last, problem.data).mean)
    assert math.isfinite(watch.loss)


# ---- held-out rows -------------------------------------------------------------------------------

NAN = float("nan")


LOG_LOSS = Objective(Gaussian(0.3, bounds=(1e-4, 5.0)))


def numbered(n, weighted=False):
    rows = torch.arange(float(n), dtype=torch.float64)[:, None]
    return Data(rows, rows, rows[:, 0] + 1 if weighted else None)


# ---- the split ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "fraction", "n_out"),
    [(100, 0.1, 10), (7, 0.2, 1), (5, 0.01, 1), (10, 0.99, 9), (2, 0.9, 1), (1, 0.5, 0)],
)
def test_split_holds_out_a_fraction_of_the_rows(n, fraction, n_out, generator):
    kept, held_out = split(numbered(n, weighted=True), fraction, generator)
    assert (len(kept), len(held_out)) == (n - n_out, n_out)
    both = torch.cat([kept.X, held_out.X])[:, 0]
    assert torch.equal(both.sort().values, numbered(n).X[:, 0])
    for part in (kept, held_out):
        assert torch.equal(part.X, part.y) and torch.equal(part.weight, part.X[:, 0] + 1)
        assert torch.equal(part.X, part.X.sort(dim=0).values)


def test_split_holds_out_no_more_than_enough(generator, monkeypatch):
    monkeypatch.setattr(defaults, "MAX_HELD_OUT", 5)
    kept, held_out = split(numbered(100), 0.5, generator)
    assert (len(kept), len(held_out)) == (95, 5)


# ---- losses -------------------------------------------------------------------------------------


def test_held_out_losses_are_those_of_the_predictions():
    problem = dense.make_problem()
    mean, root = dense.random_posterior(9)
    state = replace(problem.state(), offset=torch.tensor([0.4]).double())
    state = state.with_posterior(mean, root)
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    f, covariance = dense.predict(problem.kernel, problem.X, problem.Z, *q, 0.4)
    std = np.sqrt(np.diag(covariance) + problem.noise)
    found = held_out_losses(state, LOG_LOSS, problem.data)
    np.testing.assert_allclose(found, -stats.norm(f, std).logpdf(problem.y), rtol=1e-8)
    # Judged by the log-loss, whatever is trained on; but for the square loss.
    for name in ("elbo", "fitc"):
        assert torch.equal(
            held_out_losses(state, replace(LOG_LOSS, name=name), problem.data), found
        )
    square = held_out_losses(state, replace(LOG_LOSS, name="square_loss"), problem.data)
    np.testing.assert_allclose(square, 0.5 * (f - problem.y) ** 2, atol=1e-8)


@pytest.mark.parametrize("name", ["log_loss", "square_loss"])
def test_held_out_losses_average_to_those_of_repeated_rows(name):
    problem = dense.make_problem()
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    state = problem.state().with_posterior(*dense.random_posterior(9))
    weighted, repeated = (
        held_out_losses(state, replace(LOG_LOSS, name=name), p.data)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    assert float(weighted.mean()) == pytest.approx(float(repeated.mean()), rel=1e-12)


# ---- the best state -----------------------------------------------------------------------------


def watch_of(losses, monkeypatch):
    """A watch to which state number i has the loss ``losses[i]``."""
    monkeypatch.setattr(module, "held_out_losses", lambda i, *_: torch.full((3,), float(losses[i])))
    return BestState(LOG_LOSS, numbered(3))


def test_best_state_keeps_the_best(monkeypatch):
    watch = watch_of([5, 3, 4, 2, 6], monkeypatch)
    assert watch.loss == float("inf") and watch.losses == []
    assert not any(watch.score(i) for i in range(5))
    assert watch.best_state == 3 and watch.loss == 2.0 and watch.losses == [5, 3, 4, 2, 6]
    assert torch.equal(watch.best_rows, torch.full((3,), 2.0))


def test_best_state_stops_when_it_has_waited_long_enough(monkeypatch):
    watch = watch_of([5, 3, 4, 4, 2, 3, 3, 2, 3, 3, 3], monkeypatch)
    assert [watch.score(i) for i in range(11)] == [False] * 10 + [True]


@pytest.mark.parametrize("losses", [[NAN, 2, 3], [2, NAN, 3], [NAN, NAN, 2]])
def test_best_state_passes_over_nan(losses, monkeypatch):
    watch = watch_of(losses, monkeypatch)
    for i in range(3):
        watch.score(i)
    assert watch.best_state == losses.index(2) and watch.loss == 2.0


def test_best_state_asks_for_a_state_when_it_is_time(monkeypatch):
    watch = watch_of(range(10, 0, -1), monkeypatch)
    asked = []

    def state():
        asked.append(len(asked))
        return asked[-1]

    assert not any(watch(state) for _ in range(15))
    assert asked == [0, 1, 2] and watch.losses == [10, 9, 8]


# ---- minibatches ---------------------------------------------------------------------------------

SMALL = Gaussian(0.1, bounds=(0.05, 1.0))


def minibatch_problem(n=200, *, labels=False, weighted=False):
    """Data, a state of 10 inducing points at its prior, and an objective."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 4 - 2
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    y = (3 * X).sin() + 0.3 * noise
    likelihood = Bernoulli("probit") if labels else SMALL
    weight = torch.arange(1.0, n + 1, dtype=torch.float64) if weighted else None
    data = Data(X, y.sign() if labels else y, weight)
    kernel = ConstantKernel(1.0, (0.5, 2.0)) * RBF(0.5, (0.1, 2.0))
    Z = torch.linspace(-2, 2, 10, dtype=torch.float64)[:, None]
    state = SparseState.prior(kernel, likelihood.initial(X), Z, X.new_zeros(1))
    return data, state, Objective(likelihood)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("weighted", [False, True])
def test_minibatch_loss_averages_to_the_objective_over_all_subsets(weighted):
    data, state, objective = minibatch_problem(6, weighted=weighted)
    around = Coordinates(state, objective, data.X)
    values = around.values(around.start())
    losses = [
        objective.posterior_loss(state, data.take(torch.tensor(rows)), values, scale=6 / 2)
        for rows in combinations(range(6), 2)
    ]
    expected = objective.total(state, data)
    assert float(torch.stack(losses).mean()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", ["log_loss", "elbo"])
def test_fit_minibatch_lowers_the_objective(labels, name):
    data, state, objective = minibatch_problem(labels=labels)
    objective = replace(objective, name=name)
    found = fit_minibatch(state, data, objective, batch_size=50, max_iter=60, generator=seeded())
    before, after = (objective.total(s, data) for s in (state, found.state))
    assert after < before - 20
    assert found.loss == pytest.approx(after, rel=0.2, abs=20)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_fit_minibatch_by_sampled_gradients_comes_near_exact_ones(gradient):
    data, state, exact = minibatch_problem(labels=True)
    options = {"batch_size": 200, "max_iter": 80}
    sampled = replace(exact, gradient=gradient)
    losses = [
        exact.total(fit_minibatch(state, data, each, generator=seeded(), **options).state, data)
        for each in (exact, sampled)
    ]
    assert losses[1] < losses[0] + 5 < exact.total(state, data) - 20


def test_fit_minibatch_respects_bounds():
    data, state, objective = minibatch_problem()
    found = fit_minibatch(
        state, data, objective, learning_rate=1.0, batch_size=20, max_iter=30, generator=seeded()
    ).state
    low, high = found.kernel.bounds.T
    assert (found.kernel.theta >= low - 1e-12).all() and (found.kernel.theta <= high + 1e-12).all()
    (low,), (high,) = (bound.tolist() for bound in SMALL.box(found.Z))
    assert low - 1e-12 <= float(found.likelihood[0]) <= high + 1e-12


def test_fit_minibatch_of_q_alone_keeps_the_rest():
    data, state, objective = minibatch_problem()
    alone = replace(objective, learn_kernel=False, learn_likelihood=False, learn_inducing=False)
    found = fit_minibatch(state, data, alone, max_iter=10, generator=seeded()).state
    assert torch.equal(found.Z, state.Z) and torch.equal(found.likelihood, state.likelihood)
    assert (found.kernel.theta == state.kernel.theta).all()
    assert not torch.equal(found.mean, state.mean)


def test_fit_minibatch_depends_on_its_generator_only():
    data, state, objective = minibatch_problem()
    options = {"batch_size": 30, "max_iter": 5}
    first, again, other = (
        fit_minibatch(state, data, objective, generator=seeded(seed), **options).state.mean
        for seed in (0, 0, 1)
    )
    assert not torch.equal(first, other)
    assert_same(first, again)


def test_fit_minibatch_stops_when_told():
    data, state, objective = minibatch_problem()
    heard = []

    def callback(iteration, info):
        heard.append(info["loss"])
        return len(heard) == 4

    found = fit_minibatch(
        state, data, objective, max_iter=50, generator=seeded(), callback=callback
    )
    assert found.stopped and len(heard) == len(found.history) == 4


def test_fit_minibatch_scores_rows_held_out():
    data, state, objective = minibatch_problem()
    watch = BestState(objective, minibatch_problem(50)[0])
    found = fit_minibatch(state, data, objective, max_iter=120, generator=seeded(), watch=watch)
    assert len(watch.losses) > 1 and watch.loss == min(watch.losses)
    assert not found.stopped
