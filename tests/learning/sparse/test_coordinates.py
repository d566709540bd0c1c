"""From a state to the tensors of an optimiser and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.kernels import ActiveDims
from skgp.learning.sparse.coordinates import Coordinates
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli, Gaussian, StudentT
from tests.reference import sparse as dense

FAMILY = Gaussian(0.3, bounds=(1e-4, 2.0))


@pytest.fixture
def problem():
    return dense.make_problem("sum")


def state_of(problem, n_latent=2):
    return problem.state(n_latent=n_latent).with_posterior(*dense.random_posterior(9, n_latent))


def around(problem, state=None, *, free_posterior=True, family=FAMILY, **options):
    state = state_of(problem) if state is None else state
    objective = Objective(family, **options)
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


def test_coordinates_measure_points_in_length_scales(problem):
    kernel = 2.0 * RBF([0.5, 20.0])
    coordinates = around(problem, replace(state_of(problem), kernel=kernel))
    expected = problem.Z / [0.5, 20.0]
    np.testing.assert_allclose(coordinates.start()["Z"], expected, rtol=1e-8)


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
    family = Bernoulli("probit")
    coordinates = around(problem, state, family=family, free_posterior=False)
    assert set(coordinates.start()) == {"Z"} and coordinates.bounds() == {}
    assert coordinates.to_state(coordinates.start()).kernel.theta.shape == (0,)


def test_coordinates_have_the_bounds_of_kernel_and_family(problem):
    kernel = ConstantKernel(1.0, (0.5, 3.0)) * RBF([1.0, 2.0], [(0.1, 9.0), (0.2, 8.0)])
    family = StudentT(0.3**0.5, 4.0, scale_bounds=(0.01, 1.5), df_bounds=(2.1, 200.0))
    state = replace(state_of(problem), kernel=kernel, likelihood=family.initial(torch.ones(1)))
    bounds = around(problem, state, family=family).bounds()
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


def test_coordinates_pass_gradients_on(problem):
    coordinates = around(problem)
    parts = {name: value.requires_grad_() for name, value in coordinates.start().items()}
    values = coordinates.values(parts)
    total = sum(v.sum() for v in vars(values).values())
    gradients = torch.autograd.grad(total, list(parts.values()))
    assert all((g != 0).any() for g in gradients)
