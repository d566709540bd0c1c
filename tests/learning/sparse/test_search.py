"""Searches by all rows and by minibatches: their optima, held-out data, bounds, when they stop."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.collapsed import (
    elbo_loss,
    evidence_ratio,
    fitc_loss,
    square_loss,
    square_posterior,
    statistics,
)
from skgp.inference.sparse import SparseState
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import BestState, Objective, held_out_losses
from skgp.learning.sparse.search import Blend, blended, choose_blend, fit_all_rows, fit_minibatch
from skgp.likelihoods import Bernoulli, Gaussian
from tests.covering import covering
from tests.reference import sparse as dense
from tests.reference.sparse import GAUSSIAN, LIKELIHOODS, random_problem
from tests.same import assert_same

FIXED = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}


weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


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
    problem, made, state = random_problem("gaussian", weighted=weighted)
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
    problem, made, state = random_problem("gaussian")
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
    problem, _, state = random_problem("gaussian")
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
    problem, made, state = random_problem(likelihood, weighted=True)
    objective = Objective(made, name=name, beta=0.7)
    found = fit_all_rows(state, problem.data, objective, max_iter=15, tol=1e-9)
    before = objective.total(state, problem.data)
    assert found.loss < before - 1
    expected = objective.total(found.state, problem.data)
    expected -= float(made.log_prior(found.state.likelihood))
    assert found.loss == pytest.approx(expected, rel=1e-8)
    assert len(found.history) == 15 and not found.converged
    assert found.history[-1] * problem.data.total == pytest.approx(found.loss, rel=1e-9)


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_number_their_iterations_across_rounds(name):
    problem, made, state = random_problem("gaussian")
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
def test_searches_converge_to_their_tolerance(name):
    problem, made, state = random_problem("gaussian", n=20, n_inducing=4)
    objective = Objective(made, name=name, learn_inducing=False)
    found = fit_all_rows(state, problem.data, objective, max_iter=500, tol=1e-3)
    assert found.converged and len(found.history) < 500


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
def test_searches_stop_when_the_rows_held_out_say_so(name):
    problem, made, state = random_problem("gaussian")
    objective = Objective(made, name=name)
    held_out = random_problem("gaussian", seed=7)[0].data
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
    losses = [
        objective.posterior_loss(state, data.take(torch.tensor(rows)), scale=6 / 2)
        for rows in combinations(range(6), 2)
    ]
    expected = objective.total(state, data)
    assert float(torch.stack(losses).mean()) == pytest.approx(expected, rel=1e-12)


@covering(labels=[False, True], name=["log_loss", "elbo"])
def test_fit_minibatch_lowers_the_objective(labels, name):
    data, state, objective = minibatch_problem(labels=labels)
    objective = replace(objective, name=name)
    found = fit_minibatch(state, data, objective, batch_size=50, max_iter=60, generator=seeded())
    before, after = (objective.total(s, data) for s in (state, found.state))
    assert after < before - 20
    assert found.loss == pytest.approx(after, rel=0.2, abs=20)


def test_fit_minibatch_of_q_alone_keeps_the_rest():
    data, state, objective = minibatch_problem()
    alone = replace(objective, learn_kernel=False, learn_likelihood=False, learn_inducing=False)
    found = fit_minibatch(state, data, alone, max_iter=10, generator=seeded()).state
    assert torch.equal(found.Z, state.Z) and torch.equal(found.likelihood, state.likelihood)
    assert (found.kernel.theta == state.kernel.theta).all()
    assert not torch.equal(found.mean, state.mean)


def test_fit_minibatch_scores_rows_held_out():
    data, state, objective = minibatch_problem()
    watch = BestState(objective, minibatch_problem(50)[0])
    found = fit_minibatch(state, data, objective, max_iter=120, generator=seeded(), watch=watch)
    assert len(watch.losses) > 1 and watch.loss == min(watch.losses)
    assert not found.stopped


# ---- means moved towards least squares -----------------------------------------------------------

OBJECTIVE = Objective(GAUSSIAN)


def problem_and_state(*, weighted=False, shift=0.0):
    """A problem, and a state of the mean of least squares but for a shift in all directions."""
    problem = dense.make_problem(n=150, weighted=weighted)
    state = problem.state(GAUSSIAN.initial(problem.tensors[0]))
    sums = statistics(state.kernel, problem.data, state.Z)
    mean, root = square_posterior(sums, beta=evidence_ratio(sums))
    return problem, state.with_posterior(mean + shift, root)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_blended_lies_between_the_mean_and_that_of_least_squares(weighted):
    problem, state = problem_and_state(weighted=weighted, shift=1.0)
    sums = statistics(state.kernel, problem.data, state.Z)
    least_squares, _ = square_posterior(sums, beta=0.05)
    for share in (0.0, 0.3, 1.0):
        found = blended(state, problem.data, Blend(share, 0.05))
        expected = (1 - share) * state.mean + share * least_squares
        torch.testing.assert_close(found.mean, expected, rtol=1e-8, atol=1e-8)
        assert_same(found.root, state.root)


def test_choose_blend_takes_the_least_squares_where_the_mean_is_bad():
    problem, state = problem_and_state(shift=2.0)
    fresh = dense.make_problem(n=150, seed=1)
    assert choose_blend(state, problem.data, fresh.data, OBJECTIVE).share == 1.0


def test_choose_blend_lowers_both_losses_of_the_rows_held_out():
    problem, state = problem_and_state(shift=0.15)
    fresh = dense.make_problem(n=150, seed=1)
    blend = choose_blend(state, problem.data, fresh.data, OBJECTIVE)

    def both(share):
        moved = blended(state, problem.data, replace(blend, share=share))
        loss, square = (
            held_out_losses(moved, replace(OBJECTIVE, name=name), fresh.data).mean()
            for name in ("log_loss", "square_loss")
        )
        return float(loss + 0.5 * square.log())

    assert 0 < blend.share and both(blend.share) < both(0.0) - 2e-3
    assert both(blend.share) < min(both(share) for share in defaults.BLEND_SHARES) + 0.05


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
