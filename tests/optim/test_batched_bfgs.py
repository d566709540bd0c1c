"""Searches side by side on functions whose minima are known."""

import numpy as np
import pytest

from skgp.optim.batched_bfgs import minimize_batch

FREE = np.array([[-50.0, 50.0], [-50.0, 50.0]])


def rosenbrock(x):
    a, b = x.T
    value = (1 - a) ** 2 + 100 * (b - a**2) ** 2
    slope = np.stack([-2 * (1 - a) - 400 * a * (b - a**2), 200 * (b - a**2)], axis=1)
    return value, slope


def test_every_search_ends_at_the_minimum(rng):
    starts = rng.uniform(-2, 2, (6, 2))
    found = minimize_batch(rosenbrock, starts, bounds=FREE, max_iter=300, tol=1e-12)
    assert found.converged.all() and not found.stopped
    np.testing.assert_allclose(found.x, 1.0, atol=1e-4)
    assert found.n_evaluations < 6 * 120
    np.testing.assert_allclose(found.value, rosenbrock(found.x)[0])


def test_searches_do_not_depend_on_those_beside_them(rng):
    starts = rng.uniform(-2, 2, (4, 2))
    together = minimize_batch(rosenbrock, starts, bounds=FREE).x
    alone = [minimize_batch(rosenbrock, start[None], bounds=FREE).x[0] for start in starts]
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

    found = minimize_batch(rosenbrock, rng.uniform(-2, 2, (3, 2)), bounds=FREE, callback=callback)
    assert found.stopped and len(told) == last
    assert told == sorted(told, reverse=True) and told[-1] == found.value.min()
