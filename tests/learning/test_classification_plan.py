"""What resolve_classification fills in, and what it refuses."""

import warnings

import pytest
from sklearn.gaussian_process.kernels import RBF, DotProduct

from skgp.learning.plan import (
    FULL_COVARIANCE_NUMBERS,
    FULL_ROWS,
    MOST_FEATURES,
    STOCHASTIC_FEATURES,
    Plan,
    affordable_points,
    resolve_classification,
)
from skgp.linalg import NumericalWarning


def resolve(n=1_500, n_problems=1, kernel=None, **asked):
    return resolve_classification(Plan(**asked), n, n_problems, kernel or RBF())


@pytest.mark.parametrize(
    ("n", "n_problems", "expected"),
    [
        (1, 1, ("inducing", 1, "newton", "full")),
        (2_000, 1, ("inducing", 2_000, "newton", "full")),
        (2_000, 2, ("inducing", 2_000, "newton", "diagonal")),
        (2_001, 1, ("inducing", 2_001, "newton", "diagonal")),
        (60_000, 10, ("inducing", 4_096, "newton", "diagonal")),
        (10_000_000, 1, ("inducing", 346, "newton", "full")),
    ],
)
def test_plan_by_default(n, n_problems, expected):
    plan = resolve(n, n_problems)
    assert (plan.basis, plan.n_basis, plan.solver, plan.covariance) == expected
    assert plan.reason == "inducing points adapt to where the rows are"


def test_affordable_points_cost_the_same_between_their_limits():
    assert [affordable_points(n) for n in (1, FULL_ROWS)] == [1, FULL_ROWS]
    assert affordable_points(FULL_ROWS + 1) == FULL_ROWS + 1
    assert affordable_points(50_000) == MOST_FEATURES
    for n in (200_000, 1_000_000):
        assert n * affordable_points(n) ** 2 == pytest.approx(1.2e12, rel=2e-3)
    assert affordable_points(10**9) == 256


@pytest.mark.parametrize(
    ("asked", "n", "basis", "size", "reason"),
    [
        ({"n_basis": 3_000}, 1_500, "fourier", 3_000, "n_basis=3000 exceeds the 1500 rows"),
        ({"n_basis": 1_500}, 1_500, "inducing", 1_500, "adapt"),
        ({"basis": "fourier"}, 1_500, "fourier", 1_500, ""),
        ({"basis": "fourier", "n_basis": 33}, 1_500, "fourier", 34, ""),
        ({"solver": "sgd"}, 1_500, "fourier", 3_000, "many cheap basis functions"),
        ({"solver": "sgd"}, 10, "fourier", 512, "many cheap"),
        ({"solver": "sgd"}, 2_001, "fourier", STOCHASTIC_FEATURES, "many cheap"),
        ({"solver": "sgd", "n_basis": 7}, 2_001, "fourier", 8, "many cheap"),
        ({"solver": "sgd", "basis": "inducing"}, 5_000, "inducing", 5_000, ""),
        ({"solver": "sgd", "basis": "inducing", "n_basis": 50}, 5_000, "inducing", 50, ""),
        ({"basis": "inducing", "n_basis": 50}, 5_000, "inducing", 50, ""),
    ],
)
def test_plan_keeps_what_was_asked(asked, n, basis, size, reason):
    plan = resolve(n, **asked)
    assert (plan.basis, plan.n_basis) == (basis, size)
    assert plan.solver == asked.get("solver", "newton")
    assert reason in plan.reason and bool(plan.reason) == bool(reason)


@pytest.mark.parametrize("asked", [{"solver": "sgd"}, {"n_basis": 1_500}])
def test_plan_without_a_spectral_density_is_of_inducing_points(asked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = resolve(kernel=DotProduct(), **asked)
    assert (plan.basis, plan.n_basis) == ("inducing", 1_500)


def test_plan_of_more_inducing_points_than_rows_is_lowered():
    with pytest.warns(NumericalWarning, match="n_basis=21 exceeds the 20 training rows"):
        assert resolve(20, basis="inducing", n_basis=21).n_basis == 20


@pytest.mark.parametrize(
    ("solver", "covariance", "m", "expected"),
    [
        ("newton", "auto", 2_000, "full"),
        ("newton", "auto", 2_002, "diagonal"),
        ("newton", "full", 4_000, "full"),
        ("newton", "chevron", 100, "chevron"),
        ("newton", "diagonal", 100, "diagonal"),
        ("sgd", "auto", 100, "diagonal"),
        ("sgd", "chevron", 100, "chevron"),
    ],
)
def test_plan_covariance_is_full_where_it_is_small(solver, covariance, m, expected):
    plan = resolve(10_000, basis="fourier", n_basis=m, solver=solver, covariance=covariance)
    assert plan.covariance == expected
    assert FULL_COVARIANCE_NUMBERS == 2_000**2


def test_plan_covariance_counts_every_class():
    assert resolve(10_000, 4, basis="fourier", n_basis=1_000).covariance == "full"
    assert resolve(10_000, 5, basis="fourier", n_basis=1_000).covariance == "diagonal"


def test_plan_of_relevance_vectors_has_its_own_solver():
    plan = resolve(basis="relevance", n_basis=77)
    assert (plan.basis, plan.n_basis, plan.solver, plan.covariance) == (
        "relevance",
        77,
        "newton",
        "full",
    )
    assert resolve(basis="relevance").n_basis is None
    with pytest.raises(ValueError, match="solver='sgd' cannot be had with basis='relevance'"):
        resolve(basis="relevance", solver="sgd")
    with pytest.raises(ValueError, match="covariance='diagonal' cannot be had with"):
        resolve(basis="relevance", covariance="diagonal")


def test_plan_refuses_a_covariance_that_the_solver_lacks():
    with pytest.raises(ValueError, match="covariance='full' cannot be had from solver='sgd'"):
        resolve(solver="sgd", covariance="full")
    with pytest.raises(ValueError, match="which offers 'full', 'chevron', 'diagonal'"):
        resolve(covariance="samples")
