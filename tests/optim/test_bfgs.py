"""Quasi-Newton minimisers on functions whose minima are known."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from skgp.optim import NonFiniteLossError
from skgp.optim.bfgs import (
    minimize_batch,
    minimize_by_curvature,
    minimize_lbfgs,
    minimize_within,
)


def quadratic(n=12, seed=0):
    """x'Ax / 2 - b'x + 3 of two tensors with x = (p, q), its minimiser and its minimum."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((n, n))
    A, b = torch.tensor(root @ root.T + np.eye(n)), torch.tensor(rng.standard_normal(n))
    solution = torch.linalg.solve(A, b)

    def loss(parts):
        x = torch.cat([parts["p"].ravel(), parts["q"]])
        return 0.5 * x @ A @ x - b @ x + 3.0

    start = {"p": torch.zeros(2, 3).double(), "q": torch.ones(n - 6).double()}
    return loss, start, solution, float(3.0 - 0.5 * b @ solution)


def rosenbrock(parts):
    x, y = parts["x"], parts["y"]
    return ((1 - x) ** 2 + 100 * (y - x**2) ** 2).sum()


def at(x, y, dtype=torch.float64):
    return {"x": torch.tensor([x], dtype=dtype), "y": torch.tensor([y], dtype=dtype)}


def test_minimize_lbfgs_solves_a_quadratic_over_tensors_of_any_shape():
    loss, start, solution, least = quadratic()
    before = {name: value.clone() for name, value in start.items()}
    found = minimize_lbfgs(loss, start, max_iter=200, tol=1e-15)
    assert found.loss == pytest.approx(least, rel=1e-12)
    assert found.parameters["p"].shape == (2, 3) and found.parameters["q"].shape == (6,)
    x = torch.cat([found.parameters["p"].ravel(), found.parameters["q"]])
    torch.testing.assert_close(x, solution, rtol=0, atol=1e-6)
    assert found.converged and not found.stopped
    assert not any(value.requires_grad for value in found.parameters.values())
    assert all(torch.equal(start[name], before[name]) for name in start)


def test_minimize_lbfgs_stays_within_bounds():
    """With x at most 0.5 the minimum of Rosenbrock's function is at (0.5, 0.25)."""
    seen = []

    def loss(parts):
        seen.append(float(parts["x"].detach()))
        return rosenbrock(parts)

    bounds = {"x": (torch.tensor([-2.0]).double(), torch.tensor([0.5]).double())}
    found = minimize_lbfgs(loss, at(-1.2, 1.0), max_iter=300, tol=1e-16, bounds=bounds)
    assert float(found.parameters["x"]) == 0.5
    assert float(found.parameters["y"]) == pytest.approx(0.25, abs=1e-6)
    assert found.loss == pytest.approx(0.25, rel=1e-9)
    assert min(seen) >= -2.0 and max(seen) <= 0.5


def test_minimize_lbfgs_moves_a_start_inside_the_bounds():
    loss, start, _, _ = quadratic()
    box = torch.full((6,), -1.0).double(), torch.full((6,), 0.5).double()
    start["q"] = torch.full((6,), 9.0).double()
    first = []

    def watched(parts):
        first.append(parts["q"].detach().clone())
        return loss(parts)

    minimize_lbfgs(watched, start, max_iter=3, bounds={"q": box})
    assert torch.equal(first[0], box[1])


@pytest.mark.parametrize("bounded", [False, True])
def test_minimize_lbfgs_hands_on_bounds_only_where_there_are_some(bounded, monkeypatch):
    # SciPy takes 4 us for each number that may have a bound, more than a short search of q(u) does.
    handed = []

    def recording(*args, **kwargs):
        handed.append(kwargs.get("bounds"))
        return minimize(*args, **kwargs)

    monkeypatch.setattr("skgp.optim.bfgs.minimize", recording)
    start = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)}
    low, high = torch.full((2,), -1.0), torch.full((2,), 1.0)
    bounds = {"b": (low.double(), high.double())} if bounded else None
    found = minimize_lbfgs(
        lambda parts: sum((part - 2).square().sum() for part in parts.values()),
        start,
        max_iter=20,
        bounds=bounds,
    )
    assert [each is not None for each in handed] == [bounded]
    assert torch.allclose(found.parameters["a"], torch.full((3,), 2.0, dtype=torch.float64))
    assert torch.allclose(
        found.parameters["b"], torch.full((2,), 1.0 if bounded else 2.0, dtype=torch.float64)
    )


def test_minimize_lbfgs_keeps_equal_bounds():
    pinned = at(1.0, 1.7)["y"]
    bounds = {"y": (pinned, pinned)}
    found = minimize_lbfgs(rosenbrock, at(1.0, 1.7), max_iter=100, tol=1e-15, bounds=bounds)
    assert float(found.parameters["y"]) == 1.7
    assert float(found.parameters["x"]) == pytest.approx(1.7**0.5, abs=0.01)


def raising(error):
    def bad(x):
        raise error

    return bad


refused = raising(ValueError("no Cholesky factor"))


@pytest.mark.parametrize("start", [[90.0], [5.0, 0.01], [5.0, 0.01, 90.0]])
@pytest.mark.parametrize(
    "bad",
    [
        lambda x: (x * torch.nan).sum(),
        lambda x: (x * 0 + torch.inf).sum(),
        lambda x: -(x * 0 + torch.inf).sum(),
        lambda x: (x * 0).sqrt().sum(),  # 0, with a slope of inf * 0
        refused,
        raising(FloatingPointError("overflow")),
        raising(NonFiniteLossError("The loss is nan", iteration=3, parameter=None)),
    ],
    ids=["nan", "inf", "-inf", "slope", "ValueError", "FloatingPointError", "NonFiniteLossError"],
)
def test_minimize_lbfgs_goes_on_after_a_refused_step(bad, start):
    """x - log x: extrapolations of the line search lead below 0, where there is no logarithm."""
    refusals = []

    def loss(parts):
        x = parts["x"]
        if bool((x > 0).all()):
            return (x - x.log()).sum()
        refusals.append(x)
        return bad(x)

    start = {"x": torch.tensor(start, dtype=torch.float64)}
    found = minimize_lbfgs(loss, start, max_iter=200, tol=1e-15)
    assert refusals
    torch.testing.assert_close(
        found.parameters["x"], torch.ones_like(start["x"]), rtol=0, atol=1e-4
    )


def test_minimize_lbfgs_passes_an_unusable_start_on():
    with pytest.raises(ValueError, match="no Cholesky factor"):
        minimize_lbfgs(lambda parts: refused(parts["x"]), at(0.0, 0.0), max_iter=5)


def test_minimize_lbfgs_passes_other_errors_on():
    def loss(parts):
        raise KeyError("unrelated")

    with pytest.raises(KeyError, match="unrelated"):
        minimize_lbfgs(loss, at(0.0, 0.0), max_iter=5)


def test_minimize_lbfgs_of_a_loss_that_ignores_a_tensor_leaves_it():
    start = at(2.0, 7.0)
    found = minimize_lbfgs(lambda parts: (parts["x"] ** 2).sum(), start, max_iter=20)
    assert float(found.parameters["y"]) == 7.0
    assert float(found.parameters["x"]) == pytest.approx(0.0, abs=1e-6)


def test_minimize_lbfgs_tells_the_callback_where_it_is():
    calls = []

    def callback(iteration, info):
        parts = info["parameters"]()
        calls.append((iteration, info["loss"], float(rosenbrock(parts))))

    found = minimize_lbfgs(rosenbrock, at(-1.2, 1.0), max_iter=20, tol=0.0, callback=callback)
    iterations, losses, values = zip(*calls, strict=True)
    assert iterations == tuple(range(1, 21)) and found.n_iter == 20
    assert list(losses) == found.history
    np.testing.assert_allclose(values, losses, rtol=1e-12)
    assert (np.diff(losses) <= 0).all()
    assert not found.converged and not found.stopped
    assert found.n_evaluations >= 21


def test_minimize_lbfgs_keeps_the_best_when_the_callback_stops():
    found = minimize_lbfgs(
        rosenbrock, at(-1.2, 1.0), max_iter=50, tol=0.0, callback=lambda i, info: i == 7
    )
    assert found.stopped and not found.converged and found.n_iter == len(found.history) == 7
    assert float(rosenbrock(found.parameters)) == pytest.approx(found.loss, rel=1e-12)
    assert found.loss <= min(found.history)


def test_minimize_lbfgs_keeps_the_best_point_seen():
    """Also where that is not the last one."""
    seen = []

    def loss(parts):
        value = rosenbrock(parts)
        seen.append(float(value.detach()))
        return value

    for max_iter in (1, 5, 9):
        seen.clear()
        found = minimize_lbfgs(loss, at(-1.2, 1.0), max_iter=max_iter, tol=0.0)
        assert found.loss == min(seen)
        assert float(rosenbrock(found.parameters)) == pytest.approx(found.loss, rel=1e-12)


def test_minimize_lbfgs_stops_at_the_relative_tolerance():
    loss, start, _, _ = quadratic()
    coarse, fine = (minimize_lbfgs(loss, start, max_iter=200, tol=tol) for tol in (1e-2, 1e-12))
    assert coarse.converged and fine.converged
    assert coarse.n_iter < fine.n_iter
    last = coarse.history[-2] - coarse.history[-1]
    assert last <= 1e-2 * max(1.0, abs(coarse.history[-2]))


def test_minimize_lbfgs_works_in_either_precision(dtype):
    found = minimize_lbfgs(rosenbrock, at(-1.2, 1.0, dtype), max_iter=200, tol=1e-10)
    assert found.parameters["x"].dtype == dtype
    assert float(found.parameters["x"]) == pytest.approx(1.0, abs=1e-2)
    assert math.isfinite(found.loss)


def test_searches_end_where_they_stand_still():
    """As of an ELBO, whose gradient errs more than it: a line search finds no descent."""
    solution, n_calls = np.array([1.0, -2.0]), [0]

    def loss(x):
        n_calls[0] += 1
        gap = x - solution
        return 0.5 * gap @ gap, gap + 1e-2 * np.array([1.0, -1.0]) * np.cos(1e3 * x)

    def of_tensors(leaves):
        value, gradient = loss(leaves["x"].detach().numpy())
        return value, {"x": torch.from_numpy(gradient)}

    found = minimize_lbfgs(of_tensors, {"x": torch.zeros(2).double()}, max_iter=100, tol=1e-7)
    assert found.converged and found.loss < 1e-4 and found.n_evaluations < 20  # of 70 and more
    n_calls[0], bounds = 0, np.array([[-5.0, 5.0]] * 2)
    x, _ = minimize_within(loss, np.zeros(2), bounds, max_iter=100, tol=1e-7, gtol=1e-8)
    assert n_calls[0] < 20
    np.testing.assert_allclose(x, solution, atol=0.02)


def test_minimize_lbfgs_at_the_minimum_stays_there():
    found = minimize_lbfgs(rosenbrock, at(1.0, 1.0), max_iter=10)
    assert found.converged and found.loss == 0.0 and float(found.parameters["x"]) == 1.0


FREE = np.array([[-50.0, 50.0], [-50.0, 50.0]])


# ---- many starts


def rosenbrocks(x):
    a, b = x.T
    value = (1 - a) ** 2 + 100 * (b - a**2) ** 2
    slope = np.stack([-2 * (1 - a) - 400 * a * (b - a**2), 200 * (b - a**2)], axis=1)
    return value, slope


def test_every_search_ends_at_the_minimum(rng):
    starts = rng.uniform(-2, 2, (6, 2))
    found = minimize_batch(rosenbrocks, starts, bounds=FREE, max_iter=300, tol=1e-12)
    assert found.converged.all() and not found.stopped
    np.testing.assert_allclose(found.x, 1.0, atol=1e-4)
    assert found.n_evaluations < 6 * 120
    np.testing.assert_allclose(found.value, rosenbrocks(found.x)[0])


def test_searches_do_not_depend_on_those_beside_them(rng):
    starts = rng.uniform(-2, 2, (4, 2))
    together = minimize_batch(rosenbrocks, starts, bounds=FREE).x
    alone = [minimize_batch(rosenbrocks, start[None], bounds=FREE).x[0] for start in starts]
    np.testing.assert_allclose(together, alone, rtol=1e-9, atol=1e-9)


def test_bounds_are_kept_and_held():
    """The minimum (3, 1) of a correlated quadratic, cut at 2: the other coordinate moves on."""
    A = np.array([[2.0, 1.5], [1.5, 2.0]])

    def quadratic(x):
        step = x - [3.0, 1.0]
        return 0.5 * ((step @ A) * step).sum(1), step @ A

    bounds = np.array([[-2.0, 2.0], [-50.0, 50.0]])
    found = minimize_batch(quadratic, np.array([[0.0, 0.0], [9.0, -9.0]]), bounds=bounds, tol=1e-12)
    np.testing.assert_allclose(found.x, [[2.0, 1.75]] * 2, atol=1e-5)
    assert found.converged.all()


def test_unusable_starts_and_steps_are_refused():
    def half(x):
        inside = x[:, 0] > 0
        safe = np.where(inside, x[:, 0], 1.0)
        value = np.where(inside, safe - np.log(safe), np.inf) + x[:, 1] ** 2
        slope = np.stack([np.where(inside, 1 - 1 / safe, 0.0), 2 * x[:, 1]], axis=1)
        return value, slope

    found = minimize_batch(half, np.array([[-1.0, 0.0], [8.0, 3.0]]), bounds=FREE, tol=1e-10)
    assert np.isinf(found.value[0]) and not found.converged[0]
    np.testing.assert_allclose(found.x[1], [1.0, 0.0], atol=1e-4)


@pytest.mark.parametrize("last", [1, 4])
def test_callback_hears_the_least_value_and_stops(last, rng):
    told = []

    def callback(iteration, info):
        told.append(info["loss"])
        return iteration == last

    found = minimize_batch(rosenbrocks, rng.uniform(-2, 2, (3, 2)), bounds=FREE, callback=callback)
    assert found.stopped and len(told) == last
    assert told == sorted(told, reverse=True) and told[-1] == found.value.min()


@pytest.mark.parametrize("refuse_far", [False, True])
def test_minimize_within_evaluates_where_scipy_does_unless_far_losses_are_refused(refuse_far):
    """The first step, of length 1 along the gradient, ends at e^60."""

    def loss(x):
        seen.append(x.copy())
        value = np.exp(60 * x[0]) - 60 * x[0]
        return value + (x[1] - 3) ** 2, np.array([60 * np.exp(60 * x[0]) - 60, 2 * (x[1] - 3)])

    start, bounds = np.array([-0.5, 0.0]), np.array([[-5.0, 5.0]] * 2)
    limits = {"ftol": 1e-9, "gtol": 1e-5}
    seen = []
    options = {"maxiter": 100, **limits}
    minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    expected, seen = seen, []
    x, _ = minimize_within(
        loss, start, bounds, max_iter=100, tol=1e-9, gtol=1e-5, refuse_far=refuse_far
    )
    np.testing.assert_allclose(x, [0.0, 3.0], atol=1e-3)
    same = len(seen) == len(expected) and all(map(np.array_equal, seen, expected))
    assert same != refuse_far


def test_minimize_by_curvature_takes_a_newton_step_within_the_bounds():
    curvature = np.diag([1e4, 1.0]) + 10.0

    def quadratic(x):
        return 0.5 * x @ curvature @ x, curvature @ x

    seen, far = [], np.array([[-9.0, 9.0]] * 2)
    options = {"inverse_hessian": np.linalg.inv(curvature), "max_iter": 20, "tol": 1e-9}
    x, loss = minimize_by_curvature(
        quadratic, np.array([0.3, -2.0]), far, **options, tell=seen.append
    )
    assert len(seen) == 2 and loss == min(seen)
    np.testing.assert_allclose(x, 0, atol=1e-12)
    bounds = np.array([[0.1, 9.0], [-9.0, 9.0]])
    x, _ = minimize_by_curvature(quadratic, np.array([0.3, -2.0]), bounds, **options)
    np.testing.assert_allclose(x, [0.1, -1 / 11], rtol=1e-6)
