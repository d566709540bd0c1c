"""Minimisation with a given Hessian, on functions whose minima are known."""

import math

import numpy as np
import pytest

from skgp.optim.scoring import minimize_scored

FREE = np.array([[-9.0, 9.0], [-9.0, 9.0]])


def rosenbrock(x):
    """With the positive definite part of its Hessian (Gauss and Newton's)."""
    a, b = 1 - x[0], 10 * (x[1] - x[0] ** 2)
    J = np.array([[-1.0, 0.0], [-20 * x[0], 10.0]])
    return a * a + b * b, 2 * J.T @ [a, b], lambda: 2 * J.T @ J


def test_minimize_scored_follows_the_valley_of_rosenbrock():
    x, loss = minimize_scored(
        rosenbrock, np.array([-1.2, 1.0]), FREE, max_evaluations=60, tol=1e-12
    )
    np.testing.assert_allclose(x, 1.0, atol=1e-5)
    assert loss == pytest.approx(0.0, abs=1e-10)


def test_minimize_scored_stays_within_bounds():
    """With x at most 0.5 the minimum of Rosenbrock's function is at (0.5, 0.25)."""
    bounds = np.array([[-9.0, 0.5], [-9.0, 9.0]])
    x, loss = minimize_scored(
        rosenbrock, np.array([-1.2, 1.0]), bounds, max_evaluations=60, tol=1e-12
    )
    np.testing.assert_allclose(x, [0.5, 0.25], atol=1e-5)
    assert loss == pytest.approx(0.25, abs=1e-8)


def test_minimize_scored_steps_back_from_where_there_is_no_loss():
    """log(x) + 1/x of Hessian 1 / 4 overshoots below 0, where it has no value."""
    seen = []

    def function(x):
        seen.append(float(x[0]))
        if x[0] <= 0:
            return math.inf, np.zeros(1), None
        return math.log(x[0]) + 1 / x[0], 1 / x - 1 / x**2, lambda: np.array([[0.05]])

    bounds = np.array([[-9.0, 9.0]])
    x, loss = minimize_scored(function, np.array([2.0]), bounds, max_evaluations=40, tol=1e-12)
    assert min(seen) <= 0 and x[0] == pytest.approx(1.0, abs=1e-4)
    assert loss == pytest.approx(1.0, abs=1e-8)


def test_minimize_scored_ends_when_told_and_without_a_hessian():
    told = []

    def tell(loss):
        told.append(loss)
        return len(told) == 3

    start = np.array([-1.2, 1.0])
    _, loss = minimize_scored(rosenbrock, start, FREE, max_evaluations=60, tol=1e-12, tell=tell)
    assert len(told) == 3 and loss == min(told) == told[-1]
    x, loss = minimize_scored(
        lambda x: (1.0, np.ones(2), None), start, FREE, max_evaluations=9, tol=1e-9
    )
    assert loss == 1.0 and (x == start).all()
