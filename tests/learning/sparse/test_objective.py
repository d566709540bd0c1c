"""The objectives against dense formulas, and from a state to the tensors of an optimiser."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.kernels import ActiveDims
from skgp.learning import defaults
from skgp.learning.sparse.objective import Coordinates, Objective, Values
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from tests.reference import sparse as dense

GAUSSIAN = Gaussian(0.3, bounds=(1e-3, 5.0))


STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))


LIKELIHOODS = {
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


def problem_of(likelihood, **options):
    """A problem, its likelihood, and a state of no particular optimum."""
    made, target = LIKELIHOODS[likelihood]
    problem = replace(dense.make_problem(target=target, **options), offset=0.2)
    state = problem.state(made.initial(torch.zeros(1, dtype=torch.float64)))
    posterior = dense.random_posterior(len(problem.Z))
    return problem, made, state.with_posterior(0.3 * posterior[0], posterior[1])


def loss_of(state, problem, objective):
    return float(objective.posterior_loss(state, problem.data, values_of(state)))


# ---- the objective at a point -------------------------------------------------------------------


@weights
@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_posterior_loss_equals_the_dense_objective(likelihood, loss, weighted):
    problem, made, state = problem_of(likelihood, weighted=weighted)
    q = dense.unwhitened(problem.kernel, problem.Z, state.mean[:, 0].numpy(), state.root[0].numpy())
    for beta in (0.0, 0.3, 1.0):
        expected = dense.objective(problem, dense.LOG_PROB[likelihood], *q, loss=loss, beta=beta)
        # Gauss-Hermite with 200 nodes errs near the singularities of Student's t.
        tolerance = 1e-4 if likelihood == "student_t" else 1e-8
        objective = Objective(made, name=loss, beta=beta)
        assert loss_of(state, problem, objective) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_posterior_loss_has_the_gradients_of_finite_differences(likelihood, loss):
    problem, made, state = problem_of(likelihood, n=6, n_inducing=3, weighted=True)
    point = values_of(state)
    inputs = [value.clone().requires_grad_() for value in point if len(value)]

    def value(*parts):
        theta, *likelihood, Z, mean, root = parts
        moved = Values(theta, likelihood[0] if likelihood else state.likelihood, Z, mean, root)
        objective = Objective(made, name=loss, beta=0.4)
        return objective.posterior_loss(state, problem.data, moved)

    assert torch.autograd.gradcheck(value, inputs, atol=1e-4, rtol=1e-3)


def test_posterior_loss_of_several_functions_is_the_sum_of_theirs():
    problem, made, _ = problem_of("probit")
    labels = torch.stack([problem.data.y[:, 0], -problem.data.y[:, 0]], dim=1)
    mean, root = dense.random_posterior(9, 2)
    objective = Objective(made, name="log_loss", beta=0.3)
    both = problem.state(torch.empty(0), n_latent=2).with_posterior(mean, root)
    data = Data(problem.data.X, labels)
    found = float(objective.posterior_loss(both, data, values_of(both)))
    expected = 0.0
    for c in range(2):
        one = problem.state(torch.empty(0)).with_posterior(mean[:, c : c + 1], root[c : c + 1])
        part = Data(data.X, labels[:, c : c + 1])
        expected += float(objective.posterior_loss(one, part, values_of(one)))
    assert found == pytest.approx(expected, rel=1e-12)


def test_posterior_loss_scales_the_rows_alone():
    problem, made, state = problem_of("logit")
    values, objective = values_of(state), Objective(made, beta=0.5)
    once, thrice, rows = (
        float(o.posterior_loss(state, problem.data, values, scale=s))
        for o, s in ((objective, 1.0), (objective, 3.0), (replace(objective, beta=0.0), 1.0))
    )
    assert thrice - once == pytest.approx(2 * rows, rel=1e-12)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
def test_total_loss_is_the_objective_whatever_the_blocks(loss, monkeypatch):
    problem, made, state = problem_of("student_t", weighted=True)
    objective = Objective(made, name=loss, beta=0.4)
    expected = loss_of(state, problem, objective)
    for numbers in (1, 9 * 7, 1e7):
        monkeypatch.setattr(defaults, "BLOCK_NUMBERS", numbers)
        assert objective.total(state, problem.data) == pytest.approx(expected, rel=1e-12)


@weights
@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_posterior_loss_has_no_slope_at_the_collapsed_posterior(beta, weighted):
    problem, made, state = problem_of("gaussian", weighted=weighted)
    state = replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", beta=beta)
    optimum = objective.with_optimum(state, problem.data)
    mean, root = (part.clone().requires_grad_() for part in (optimum.mean, optimum.root))
    values = values_of(state)._replace(mean=mean, root=root)
    loss = objective.posterior_loss(state, problem.data, values)
    slopes = torch.autograd.grad(loss, (mean, root))
    np.testing.assert_allclose(slopes[0], 0, atol=1e-6)
    np.testing.assert_allclose(slopes[1].tril(), 0, atol=1e-6)


# ---- coordinates ---------------------------------------------------------------------------------

LIKELIHOOD = Gaussian(0.3, bounds=(1e-4, 2.0))


@pytest.fixture
def problem():
    return dense.make_problem("sum")


def state_of(problem, n_latent=2):
    return problem.state(n_latent=n_latent).with_posterior(*dense.random_posterior(9, n_latent))


def around(problem, state=None, *, free_posterior=True, likelihood=LIKELIHOOD, **options):
    state = state_of(problem) if state is None else state
    objective = Objective(likelihood, **options)
    return Coordinates(state, objective, problem.data.X, free_posterior=free_posterior)


def assert_same(found, expected, **tolerance):
    np.testing.assert_allclose(found.kernel.theta, expected.kernel.theta, **tolerance)
    for name in ("likelihood", "Z", "mean", "root", "offset"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-13, atol=1e-13
        )


@pytest.mark.parametrize("free_posterior", [True, False])
def test_coordinates_of_the_start_are_the_state(problem, free_posterior):
    coordinates = around(problem, free_posterior=free_posterior)
    start = coordinates.start()
    names = {"theta", "likelihood", "Z"} | ({"alpha", "triangle"} if free_posterior else set())
    assert set(start) == names
    assert_same(coordinates.to_state(start), state_of(problem), rtol=1e-12)
    values = coordinates.values(start)
    np.testing.assert_allclose(values.theta, problem.kernel.theta, rtol=1e-12)
    torch.testing.assert_close(values.Z, problem.tensors[0], rtol=1e-12, atol=1e-12)


def test_coordinates_round_trip_through_another_point(problem, rng):
    """The coordinates around a point reached describe that very point."""
    first = around(problem)
    moved = {
        name: value + 0.1 * torch.tensor(rng.standard_normal(value.shape))
        for name, value in first.start().items()
    }
    reached = first.to_state(moved)
    np.testing.assert_allclose(reached.kernel.theta, moved["theta"], rtol=1e-12)
    assert torch.equal(reached.likelihood, moved["likelihood"])
    values = first.values(moved)
    assert torch.equal(values.mean, reached.mean) and torch.equal(values.root, reached.root)
    second = around(problem, reached)
    assert_same(second.to_state(second.start()), reached, rtol=1e-12)


def test_coordinates_are_finite_where_the_kernel_ignores_a_column(problem):
    kernel = ActiveDims(RBF(0.5), [1])
    coordinates = around(problem, replace(state_of(problem), kernel=kernel))
    start = coordinates.start()
    assert all(value.isfinite().all() for value in start.values())
    torch.testing.assert_close(coordinates.values(start).Z, problem.tensors[0])


def test_coordinates_hold_only_what_is_free(problem):
    fixed = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
    assert around(problem, free_posterior=False, **fixed).start() == {}
    for name, part in (
        ("learn_kernel", "theta"),
        ("learn_likelihood", "likelihood"),
        ("learn_inducing", "Z"),
    ):
        coordinates = around(problem, free_posterior=False, **(fixed | {name: True}))
        assert set(coordinates.start()) == {part}
        assert_same(coordinates.to_state(coordinates.start()), state_of(problem), rtol=1e-12)


def test_coordinates_of_what_has_no_parameters_are_absent(problem):
    kernel = ConstantKernel(1.0, "fixed") * RBF(1.0, "fixed")
    state = replace(state_of(problem), kernel=kernel, likelihood=torch.empty(0))
    likelihood = Bernoulli("probit")
    coordinates = around(problem, state, likelihood=likelihood, free_posterior=False)
    assert set(coordinates.start()) == {"Z"} and coordinates.bounds() == {}
    assert coordinates.to_state(coordinates.start()).kernel.theta.shape == (0,)


def test_coordinates_have_the_bounds_of_kernel_and_likelihood(problem):
    kernel = ConstantKernel(1.0, (0.5, 3.0)) * RBF([1.0, 2.0], [(0.1, 9.0), (0.2, 8.0)])
    likelihood = StudentT(0.3**0.5, 4.0, scale_bounds=(0.01, 1.5), df_bounds=(2.1, 200.0))
    state = replace(state_of(problem), kernel=kernel, likelihood=likelihood.initial(torch.ones(1)))
    bounds = around(problem, state, likelihood=likelihood).bounds()
    assert set(bounds) == {"theta", "likelihood"}
    np.testing.assert_allclose(bounds["theta"][0].exp(), [0.5, 0.1, 0.2])
    np.testing.assert_allclose(bounds["theta"][1].exp(), [3.0, 9.0, 8.0])
    np.testing.assert_allclose(torch.stack(bounds["likelihood"]).exp(), [[1e-4, 2.1], [2.25, 200]])


def test_coordinates_keep_dtype_and_leave_the_state_alone(problem, dtype):
    state = state_of(problem)
    parts = {name: getattr(state, name).to(dtype) for name in ("likelihood", "Z", "mean", "root")}
    state = replace(state, **parts, offset=state.offset.to(dtype))
    theta = state.kernel.theta.copy()
    coordinates = around(problem, state)
    moved = {name: value + 0.1 for name, value in coordinates.start().items()}
    assert {value.dtype for value in moved.values()} == {dtype}
    for value in moved.values():
        value.requires_grad_()
    reached = coordinates.to_state(moved)
    for name in ("likelihood", "Z", "mean", "root"):
        assert getattr(reached, name).dtype == dtype
        assert not getattr(reached, name).requires_grad
        assert torch.equal(getattr(state, name), parts[name])
    np.testing.assert_array_equal(state.kernel.theta, theta)
    np.testing.assert_allclose(reached.kernel.theta, theta + 0.1, rtol=1e-5, atol=1e-6)
