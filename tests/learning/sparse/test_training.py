"""The objectives against independent bounds, and the searches against their optima."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.sparse.collapsed import elbo_loss, elbo_posterior, fitc_loss, statistics
from skgp.inference.sparse.square_loss import square_loss
from skgp.learning.sparse import training
from skgp.learning.sparse.coordinates import Values
from skgp.learning.sparse.holdout import BestState
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.training import (
    LEAST_BETA,
    collapsed_posterior,
    fit_collapsed,
    fit_posterior,
    posterior_loss,
    total_loss,
)
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from tests.reference import sparse as dense
from tests.same import assert_same

GAUSSIAN = Gaussian(0.3, bounds=(1e-3, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))
FIXED = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
FAMILIES = {
    "gaussian": (GAUSSIAN, "gaussian"),
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (STUDENT, "student_t"),
}
weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def values_of(state):
    """The point of a state in the terms of the model."""
    theta = torch.tensor(state.kernel.theta)
    return Values(theta, state.likelihood, state.Z, state.mean, state.root)


def problem_of(family, **options):
    """A problem, its family, and a state of no particular optimum."""
    made, target = FAMILIES[family]
    problem = replace(dense.make_problem(target=target, **options), offset=0.2)
    state = problem.state(made.initial(torch.zeros(1, dtype=torch.float64)))
    posterior = dense.random_posterior(len(problem.Z))
    return problem, made, state.with_posterior(0.3 * posterior[0], posterior[1])


def loss_of(state, problem, objective):
    return float(posterior_loss(state, problem.data, objective, values_of(state)))


# ---- the objective at a point -------------------------------------------------------------------


@weights
@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("family", FAMILIES)
def test_posterior_loss_equals_the_dense_objective(family, loss, weighted):
    problem, made, state = problem_of(family, weighted=weighted)
    q = dense.unwhitened(problem.kernel, problem.Z, state.mean[:, 0].numpy(), state.root[0].numpy())
    for beta in (0.0, 0.3, 1.0):
        expected = dense.objective(problem, dense.LOG_PROB[family], *q, loss=loss, beta=beta)
        # Gauss-Hermite with 200 nodes errs near the singularities of Student's t.
        tolerance = 1e-4 if family == "student_t" else 1e-8
        objective = Objective(made, name=loss, beta=beta)
        assert loss_of(state, problem, objective) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("family", FAMILIES)
def test_posterior_loss_has_the_gradients_of_finite_differences(family, loss):
    problem, made, state = problem_of(family, n=6, n_inducing=3, weighted=True)
    point = values_of(state)
    inputs = [value.clone().requires_grad_() for value in vars(point).values() if len(value)]

    def value(*parts):
        theta, *likelihood, Z, mean, root = parts
        moved = Values(theta, likelihood[0] if likelihood else state.likelihood, Z, mean, root)
        return posterior_loss(state, problem.data, Objective(made, name=loss, beta=0.4), moved)

    assert torch.autograd.gradcheck(value, inputs, atol=1e-4, rtol=1e-3)


def test_posterior_loss_of_several_functions_is_the_sum_of_theirs():
    problem, made, _ = problem_of("probit")
    labels = torch.stack([problem.data.y[:, 0], -problem.data.y[:, 0]], dim=1)
    mean, root = dense.random_posterior(9, 2)
    objective = Objective(made, name="log_loss", beta=0.3)
    both = problem.state(torch.empty(0), n_latent=2).with_posterior(mean, root)
    data = Data(problem.data.X, labels)
    found = float(posterior_loss(both, data, objective, values_of(both)))
    expected = 0.0
    for c in range(2):
        one = problem.state(torch.empty(0)).with_posterior(mean[:, c : c + 1], root[c : c + 1])
        part = Data(data.X, labels[:, c : c + 1])
        expected += float(posterior_loss(one, part, objective, values_of(one)))
    assert found == pytest.approx(expected, rel=1e-12)


def test_posterior_loss_scales_the_rows_alone():
    problem, made, state = problem_of("logit")
    values, objective = values_of(state), Objective(made, beta=0.5)
    once, thrice, rows = (
        float(posterior_loss(state, problem.data, o, values, scale=s))
        for o, s in ((objective, 1.0), (objective, 3.0), (replace(objective, beta=0.0), 1.0))
    )
    assert thrice - once == pytest.approx(2 * rows, rel=1e-12)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
def test_total_loss_is_the_objective_whatever_the_blocks(loss, monkeypatch):
    problem, made, state = problem_of("student_t", weighted=True)
    objective = Objective(made, name=loss, beta=0.4)
    expected = loss_of(state, problem, objective)
    for numbers in (1, 9 * 7, 1e7):
        monkeypatch.setattr(training, "_BLOCK_NUMBERS", numbers)
        assert total_loss(state, problem.data, objective) == pytest.approx(expected, rel=1e-12)


# ---- closed forms -------------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_posterior_loss_is_least_at_the_collapsed_posterior(beta, weighted):
    """There it is the collapsed loss, for beta = 1 that of SGPR; any other q has more."""
    problem, made, state = problem_of("gaussian", weighted=weighted)
    problem, state = replace(problem, offset=0.0), replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", beta=beta)
    sums = statistics(problem.kernel, problem.data, state.Z)
    noise = problem.tensors[1]
    optimum = state.with_posterior(*elbo_posterior(sums, noise, beta=beta))
    least = loss_of(optimum, problem, objective)
    assert least == pytest.approx(float(elbo_loss(sums, noise, beta=beta)), rel=1e-9)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(5):
            noises = (
                size * torch.randn(t.shape, generator=generator, dtype=torch.float64)
                for t in (optimum.mean, optimum.root)
            )
            shift, turn = noises
            other = optimum.with_posterior(optimum.mean + shift, optimum.root + turn.tril())
            if (other.root.diagonal(dim1=1, dim2=2) > 0).all():
                assert loss_of(other, problem, objective) > least


@weights
@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_posterior_loss_has_no_slope_at_the_collapsed_posterior(beta, weighted):
    problem, made, state = problem_of("gaussian", weighted=weighted)
    state = replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", beta=beta)
    optimum = collapsed_posterior(state, problem.data, objective)
    mean, root = (part.clone().requires_grad_() for part in optimum)
    values = replace(values_of(state), mean=mean, root=root)
    loss = posterior_loss(state, problem.data, objective, values)
    slopes = torch.autograd.grad(loss, (mean, root))
    np.testing.assert_allclose(slopes[0], 0, atol=1e-6)
    np.testing.assert_allclose(slopes[1].tril(), 0, atol=1e-6)


def direct_loss(state, data, objective):
    """The collapsed objectives by the functions that compute them."""
    noise = objective.family.with_parameters(state.likelihood).noise_variance
    if objective.name == "fitc":
        return float(fitc_loss(state.kernel, data, state.Z, noise))
    sums = statistics(state.kernel, data, state.Z)
    if objective.name == "square_loss":
        return float(square_loss(sums, beta=objective.beta))
    return float(elbo_loss(sums, noise, beta=objective.beta))


@weights
@pytest.mark.parametrize("name", ["elbo", "fitc", "square_loss"])
def test_fit_collapsed_lowers_its_objective_and_has_the_optimal_posterior(name, weighted):
    problem, made, state = problem_of("gaussian", weighted=weighted)
    # The square loss has no noise to learn.
    objective = Objective(made, name=name, beta=0.5, learn_likelihood=name != "square_loss")
    found = fit_collapsed(state, problem.data, objective, max_iter=60, tol=1e-9)
    assert found.loss < direct_loss(state, problem.data, objective) - 1
    assert found.loss == pytest.approx(direct_loss(found.state, problem.data, objective), rel=1e-9)
    assert found.history[-1] * problem.data.total == pytest.approx(found.loss, rel=1e-6)
    assert len(found.history) <= 60 and not found.stopped
    posterior = collapsed_posterior(found.state, problem.data, objective)
    assert_same(found.state.mean, posterior[0])
    assert_same(found.state.root, posterior[1])


@pytest.mark.parametrize("name", ["elbo", "fitc", "square_loss"])
def test_fit_collapsed_moves_only_what_is_free(name):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name=name, **FIXED)
    for free in FIXED:
        if name == "square_loss" and free == "learn_likelihood":
            continue  # its loss does not know the noise
        some = replace(objective, **{free: True})
        found = fit_collapsed(state, problem.data, some, max_iter=5, tol=0.0).state
        assert (found.kernel.theta != state.kernel.theta).any() == (free == "learn_kernel")
        assert (found.likelihood != state.likelihood).any() == (free == "learn_likelihood")
        unmoved = torch.equal(found.Z, state.Z)
        assert unmoved == (free != "learn_inducing")
    still = fit_collapsed(state, problem.data, objective, max_iter=5, tol=0.0)
    assert still.converged and still.history == []
    assert still.loss == pytest.approx(direct_loss(state, problem.data, objective), rel=1e-12)


def test_fit_collapsed_respects_the_bounds():
    problem, _, state = problem_of("gaussian")
    kernel = ConstantKernel(1.0, (0.9, 1.1)) * RBF([1.0, 1.0], (0.8, 1.2))
    family = Gaussian(0.3, bounds=(0.28, 0.29))
    state = replace(state, kernel=kernel)
    found = fit_collapsed(
        state, problem.data, Objective(family, name="elbo"), max_iter=30, tol=1e-9
    ).state
    low, high = kernel.bounds.T
    assert (found.kernel.theta >= low - 1e-12).all() and (found.kernel.theta <= high + 1e-12).all()
    assert (np.isclose(found.kernel.theta, low) | np.isclose(found.kernel.theta, high)).any()
    assert 0.28 - 1e-9 <= found.likelihood.exp().item() <= 0.29 + 1e-9


@pytest.mark.parametrize("name", ["elbo", "square_loss"])
def test_fit_collapsed_of_beta_0_takes_the_least_beta(name):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name=name, beta=0.0, **FIXED)
    found = fit_collapsed(state, problem.data, objective, max_iter=3, tol=0.0)
    least = replace(objective, beta=LEAST_BETA)
    assert found.loss == pytest.approx(direct_loss(state, problem.data, least), rel=1e-12)
    assert found.state.root.isfinite().all() and found.state.mean.isfinite().all()


# ---- searches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_fit_posterior_finds_the_collapsed_optimum_for_given_hyperparameters(beta):
    problem, made, state = problem_of("gaussian", weighted=True)
    state = replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", beta=beta, **FIXED)
    found = fit_posterior(state, problem.data, objective, max_iter=400, tol=1e-13)
    least = direct_loss(state, problem.data, objective)
    assert found.loss == pytest.approx(least, rel=1e-7)
    mean, root = collapsed_posterior(state, problem.data, objective)
    torch.testing.assert_close(found.state.mean, mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.state.root, root, rtol=0, atol=1e-3)


def test_fit_posterior_finds_the_collapsed_optimum_with_hyperparameters():
    problem, made, state = problem_of("gaussian")
    state = replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", learn_inducing=False)
    state = state.with_posterior(*collapsed_posterior(state, problem.data, objective))
    options = {"max_iter": 300, "tol": 1e-12}
    free = fit_posterior(state, problem.data, objective, **options)
    collapsed = fit_collapsed(state, problem.data, objective, **options)
    assert free.loss == pytest.approx(collapsed.loss, rel=1e-6)
    np.testing.assert_allclose(free.state.kernel.theta, collapsed.state.kernel.theta, atol=1e-2)


@pytest.mark.parametrize("name", ["elbo", "log_loss"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fit_posterior_lowers_its_objective(family, name):
    problem, made, state = problem_of(family, weighted=True)
    objective = Objective(made, name=name, beta=0.7)
    found = fit_posterior(state, problem.data, objective, max_iter=15, tol=1e-9)
    before = loss_of(state, problem, objective)
    assert found.loss < before - 1
    assert found.loss == pytest.approx(loss_of(found.state, problem, objective), rel=1e-8)
    assert len(found.history) == 15 and not found.converged
    assert found.history[-1] * problem.data.total == pytest.approx(found.loss, rel=1e-9)
    for parameters in (found.state.kernel.theta, *vars(values_of(found.state)).values()):
        assert np.isfinite(np.asarray(parameters)).all()


def test_fit_posterior_of_weights_is_that_of_repeated_rows():
    problem, made, state = problem_of("probit")
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    objective = Objective(made, name="log_loss", beta=0.5)
    weighted, repeated = (
        fit_posterior(state, p.data, objective, max_iter=10, tol=0.0)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    assert weighted.loss == pytest.approx(repeated.loss, rel=1e-9)
    torch.testing.assert_close(weighted.state.mean, repeated.state.mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_iter", [1, 2, 30, 31, 45, 60, 61, 200])
def test_rounds_add_up_to_the_iterations(max_iter):
    rounds = list(training._rounds(max_iter))
    assert sum(rounds) == max_iter and all(n >= 1 for n in rounds)
    assert len(rounds) <= 4


@pytest.mark.parametrize("search", [fit_collapsed, fit_posterior])
def test_searches_number_their_iterations_across_rounds(search):
    problem, made, state = problem_of("gaussian")
    calls = []
    found = search(
        replace(state, offset=torch.zeros(1).double()),
        problem.data,
        Objective(made, name="elbo"),
        max_iter=40,
        tol=0.0,
        callback=lambda iteration, info: calls.append((iteration, info)),
    )
    assert [iteration for iteration, _ in calls] == list(range(1, 41))
    assert [info["loss"] for _, info in calls] == found.history
    assert all(set(info) == {"loss"} for _, info in calls)
    falls = np.diff(found.history)
    assert (falls <= 1e-9).all()


@pytest.mark.parametrize("search", [fit_collapsed, fit_posterior])
def test_searches_stop_when_the_callback_says_so(search):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name="elbo")
    found = search(
        state,
        problem.data,
        objective,
        max_iter=40,
        tol=0.0,
        callback=lambda iteration, info: iteration == 3,
    )
    assert found.stopped and not found.converged and len(found.history) == 3
    assert found.loss == pytest.approx(found.history[-1] * problem.data.total, rel=1e-9)


@pytest.mark.parametrize("search", [fit_collapsed, fit_posterior])
def test_searches_converge_to_their_tolerance(search):
    problem, made, state = problem_of("gaussian", n=20, n_inducing=4)
    objective = Objective(made, name="elbo", learn_inducing=False)
    found = search(state, problem.data, objective, max_iter=500, tol=1e-3)
    assert found.converged and len(found.history) < 500


@pytest.mark.parametrize("search", [fit_collapsed, fit_posterior])
def test_searches_stop_when_the_rows_held_out_say_so(search):
    problem, made, state = problem_of("gaussian")
    objective = Objective(made, name="elbo")
    held_out = problem_of("gaussian", seed=7)[0].data
    watch = BestState(objective, held_out, every=2, patience=1)
    scored = []
    score = watch.score

    def spy(state):
        scored.append(state)
        return score(state) or len(scored) == 3

    watch.score = spy
    found = search(state, problem.data, objective, max_iter=40, tol=0.0, watch=watch)
    assert len(found.history) == 6 and len(scored) == 3 and not found.stopped
    # What is scored is complete: hyper-parameters on their way, and the posterior that is theirs.
    last = scored[-1]
    torch.testing.assert_close(last.Z, found.state.Z)
    if search is fit_collapsed:
        expected = collapsed_posterior(last, problem.data, objective)
        torch.testing.assert_close(last.mean, expected[0])
    assert math.isfinite(watch.loss)
