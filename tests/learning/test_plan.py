"""The table of plans: what each combination resolves to, or the error that says what to change."""

import itertools
import warnings

import pytest
from sklearn.gaussian_process.kernels import RBF, DotProduct

from skgp.learning.defaults import (
    CHOLESKY_FEATURES,
    CHOLESKY_ROWS,
    FACTOR_ROWS,
    FULL_COVARIANCE_NUMBERS,
    FULL_ROWS,
    LAPLACE_ROWS,
    MOST_FEATURES,
    STOCHASTIC_FEATURES,
    STREAMING_FEATURES,
)
from skgp.learning.plan import (
    Plan,
    affordable_points,
    check_memory,
    laplace_features,
    resolve_classification,
    resolve_laplace,
    resolve_relevance,
    streaming_plan,
)
from skgp.learning.routes import COVARIANCES, affordable_features, resolve, stored_solve_bytes
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import memory_limit

SPECTRAL, NOT_SPECTRAL = 1.3 * RBF(), 1.3 * DotProduct() * RBF()
BASES = ("auto", "fourier", "inducing")
SOLVERS = ("auto", "cholesky", "cg", "gauss-seidel", "sgd")
LARGE = 200_000  # rows of which no kernel matrix fits below


def resolved(n, kernel=SPECTRAL, memory_budget=8e9, **asked):
    with memory_limit(memory_budget):
        return resolve(Plan(**asked), n, kernel)


@pytest.mark.parametrize(
    "n, kernel, basis, solver, covariance",
    [
        (1, SPECTRAL, "inducing", "cholesky", "full"),
        (FACTOR_ROWS, SPECTRAL, "inducing", "cholesky", "full"),
        (CHOLESKY_ROWS + 1, SPECTRAL, "inducing", "cg", "samples"),
        (LARGE, SPECTRAL, "fourier", "cholesky", "full"),
        (FACTOR_ROWS, NOT_SPECTRAL, "inducing", "cholesky", "full"),
        (CHOLESKY_ROWS + 1, NOT_SPECTRAL, "inducing", "cg", "samples"),
        (LARGE, NOT_SPECTRAL, "inducing", "cholesky", "full"),
    ],
)
def test_resolve_chooses_by_the_number_of_rows(n, kernel, basis, solver, covariance):
    plan = resolved(n, kernel)
    assert (plan.basis, plan.solver, plan.covariance) == (basis, solver, covariance)
    assert plan.reason
    whole = basis == "inducing" and n < LARGE
    assert plan.size == n if whole else plan.size <= CHOLESKY_FEATURES
    assert plan.space(n) == ("function" if whole else "weight")


def test_resolve_chooses_by_the_memory_that_a_kernel_matrix_takes():
    n, needed = 20_000, stored_solve_bytes(20_000)
    assert 2.0 * n * n < needed < 4.0 * n * n
    assert resolved(n, memory_budget=needed).basis == "inducing"
    assert resolved(n, memory_budget=needed - 1).basis == "fourier"


@pytest.mark.parametrize("memory_budget", [1e8, 8e9])
def test_conjugate_gradients_are_chosen_only_where_the_kernel_matrix_is_kept(memory_budget):
    """The upper triangle in tiles of 2048 rows; no number of rows lies between two rules."""
    chosen = []
    for n in range(1_000, 90_000, 40):
        if resolved(n, memory_budget=memory_budget).solver == "cg":
            itemsize = 8 if n <= CHOLESKY_ROWS else 4
            assert itemsize * n * (n + 2048) / 2 <= memory_budget
            assert n > CHOLESKY_ROWS or 3 * 8 * n**2 > memory_budget
            chosen.append(n)
    numbers = 2.6 if max(chosen) > CHOLESKY_ROWS else 10.5  # in float32 and float64, a pair of rows
    assert max(chosen) > 0.9 * (memory_budget / numbers) ** 0.5


@pytest.mark.parametrize(
    "asked, expected",
    [
        (dict(solver="sgd"), ("fourier", 800, "sgd", "diagonal")),
        (dict(solver="gauss-seidel"), ("fourier", 800, "gauss-seidel", "samples")),
        (dict(solver="cg"), ("inducing", 400, "cg", "samples")),
        (dict(solver="cholesky"), ("inducing", 400, "cholesky", "full")),
        (dict(n_basis=401), ("fourier", 402, "cholesky", "full")),
        (dict(n_basis=100), ("inducing", 100, "cholesky", "full")),
        (dict(basis="fourier", n_basis=99), ("fourier", 100, "cholesky", "full")),
        (dict(basis="fourier", n_basis=10**4), ("fourier", 10**4, "gauss-seidel", "samples")),
        (dict(basis="fourier", solver="cg"), ("fourier", None, "cg", "samples")),
        (dict(basis="inducing", solver="sgd"), ("inducing", 400, "sgd", "diagonal")),
        (dict(basis="inducing", n_basis=50), ("inducing", 50, "cholesky", "full")),
        (dict(covariance="chevron"), ("inducing", 400, "cholesky", "chevron")),
        (dict(solver="cg", covariance="diagonal"), ("inducing", 400, "cg", "diagonal")),
        (dict(solver="sgd", covariance="chevron"), ("fourier", 800, "sgd", "chevron")),
    ],
    ids=str,
)
def test_resolve_fills_what_is_left_open(asked, expected):
    plan = resolved(400, **asked)
    found = (plan.basis, plan.size, plan.solver, plan.covariance)
    if expected[1] is None:
        assert 256 <= plan.size <= CHOLESKY_FEATURES
        expected = (expected[0], plan.size, *expected[2:])
    assert found == expected


def test_resolve_without_a_spectral_density_keeps_the_inducing_basis():
    for solver in ("sgd", "gauss-seidel", "cholesky", "auto"):
        for n in (400, LARGE):
            try:
                plan = resolved(n, NOT_SPECTRAL, solver=solver)
            except ValueError as error:
                assert "n_basis" in str(error)
            else:
                assert plan.basis == "inducing"


@pytest.mark.parametrize("n_basis", [None, 1, 2, 64, 401, 100_000])
@pytest.mark.parametrize("kernel", [SPECTRAL, NOT_SPECTRAL], ids=["spectral", "other"])
def test_resolve_keeps_its_word_or_says_what_to_change(kernel, n_basis):
    """Every combination: what was asked for is kept and offered, or named in the error."""
    covariances = ("auto", "full", "chevron", "diagonal", "samples")
    sizes = (1, 10, 400, 5_000, 30_000, LARGE)
    for basis, solver, covariance, n in itertools.product(BASES, SOLVERS, covariances, sizes):
        asked = dict(basis=basis, solver=solver, covariance=covariance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NumericalWarning)
            try:
                plan = resolved(n, kernel, n_basis=n_basis, **asked)
            except ValueError as error:
                message = str(error)
                assert "solver=" in message and "basis=" in message
                named = [value for value in asked.values() if value != "auto"]
                assert any(repr(value) in message for value in named)
                assert "cholesky" in message or "n_basis below" in message
                continue
        for name, value in asked.items():
            assert value in ("auto", getattr(plan, name))
        assert "auto" not in (plan.basis, plan.solver, plan.covariance)
        assert plan.size >= 1 and (plan.basis == "inducing" or plan.size % 2 == 0)
        assert plan.covariance in COVARIANCES[plan.space(n), plan.solver]
        if plan.basis == "inducing":
            assert plan.size <= n
        if n_basis is not None and not (plan.basis == "inducing" and n_basis > n):
            assert plan.size in (n_basis, n_basis + 1)


def of_laplace(n, kernel=SPECTRAL, **asked):
    return resolve_laplace(Plan(**asked), n, kernel)


@pytest.mark.parametrize("resolver", [resolved, of_laplace])
@pytest.mark.parametrize(("kernel", "basis"), [(SPECTRAL, "inducing"), (NOT_SPECTRAL, "auto")])
def test_more_inducing_points_than_rows_are_lowered_with_a_warning(resolver, kernel, basis):
    message = "n_basis=60 exceeds the 50 training rows; n_basis=50"
    with pytest.warns(NumericalWarning, match=message):
        plan = resolver(50, kernel, basis=basis, n_basis=60)
    assert (plan.basis, plan.size, plan.space(50)) == ("inducing", 50, "function")


def test_affordable_features_are_even_grow_with_few_rows_and_fall_with_many():
    few = [affordable_features(n) for n in (1, 64, 400, 1500, 10**4)]
    assert few == [256, 256, 1600, 6000, CHOLESKY_FEATURES]
    sizes = [affordable_features(n) for n in (10**4, 10**6, 10**8, 10**12)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 256
    assert all(size % 2 == 0 for size in sizes)
    n = 10**6
    assert 0.9 < n * affordable_features(n) ** 2 / 8e12 < 1.1


def test_streaming_plan_fixes_the_basis():
    assert streaming_plan(Plan(), 100, SPECTRAL) == Plan(
        "fourier", STREAMING_FEATURES, "cholesky", "auto"
    )
    assert streaming_plan(Plan(), 100, NOT_SPECTRAL).n_basis == 50
    assert streaming_plan(Plan(n_basis=7, covariance="diagonal"), 100, SPECTRAL).n_basis == 8
    assert streaming_plan(Plan("inducing", 7), 100, SPECTRAL).n_basis == 7


@pytest.mark.parametrize("n_basis, n", [(100, 100), (101, 100), (None, 1)])
def test_streaming_plan_refuses_one_function_a_row(n_basis, n):
    with pytest.raises(ValueError, match=rf"n_basis=\d+ for {n} rows. Give a smaller n_basis, or"):
        streaming_plan(Plan("inducing", n_basis), n, SPECTRAL)


# ---- Laplace noise and relevance vectors ------------------------------------------------------


@pytest.mark.parametrize(
    "asked, kernel, expected",
    [
        (dict(), SPECTRAL, ("inducing", 400)),
        (dict(solver="cholesky", covariance="full"), SPECTRAL, ("inducing", 400)),
        (dict(n_basis=100), SPECTRAL, ("inducing", 100)),
        (dict(n_basis=401), SPECTRAL, ("fourier", 402)),
        (dict(basis="fourier"), SPECTRAL, ("fourier", 400)),
        (dict(basis="fourier", n_basis=99), SPECTRAL, ("fourier", 100)),
        (dict(), NOT_SPECTRAL, ("inducing", 400)),
    ],
    ids=str,
)
def test_resolve_laplace_fills_what_is_open(asked, kernel, expected):
    plan = resolve_laplace(Plan(**asked), 400, kernel)
    assert (plan.basis, plan.size, plan.solver, plan.covariance) == (*expected, "cholesky", "full")
    assert plan.reason


def test_laplace_features_are_all_rows_and_then_what_two_minutes_allow():
    assert [laplace_features(n) for n in (1, 999, LAPLACE_ROWS)] == [1, 999, LAPLACE_ROWS]
    for n in (LAPLACE_ROWS + 1, 36_000, 10**6):
        m = laplace_features(n)
        assert 500 < m <= min(n, 4096) and 24 * n * m**2 < 7.5e12
    assert 2000 < laplace_features(36_000) < 3000


@pytest.mark.parametrize("solver, expected", [("auto", "sequential"), ("sgd", "sgd")])
def test_resolve_relevance_leaves_the_size_to_the_evidence(solver, expected):
    plan = resolve_relevance(Plan("relevance", None, solver))
    assert (plan.basis, plan.n_basis, plan.solver) == ("relevance", None, expected)
    assert plan.covariance == "full" and plan.reason


# ---- classification ---------------------------------------------------------------------------


def classification(n=1_500, n_problems=1, kernel=None, **asked):
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
def test_classification_by_default(n, n_problems, expected):
    plan = classification(n, n_problems)
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
def test_classification_keeps_what_was_asked(asked, n, basis, size, reason):
    plan = classification(n, **asked)
    assert (plan.basis, plan.n_basis) == (basis, size)
    assert plan.solver == asked.get("solver", "newton")
    assert reason in plan.reason and bool(plan.reason) == bool(reason)


@pytest.mark.parametrize("asked", [{"solver": "sgd"}, {"n_basis": 1_500}])
def test_classification_without_a_spectral_density_is_of_inducing_points(asked):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = classification(kernel=DotProduct(), **asked)
    assert (plan.basis, plan.n_basis) == ("inducing", 1_500)


def test_classification_of_more_inducing_points_than_rows_is_lowered():
    with pytest.warns(NumericalWarning, match="n_basis=21 exceeds the 20 training rows"):
        assert classification(20, basis="inducing", n_basis=21).n_basis == 20


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
def test_classification_covariance_is_full_where_it_is_small(solver, covariance, m, expected):
    plan = classification(10_000, basis="fourier", n_basis=m, solver=solver, covariance=covariance)
    assert plan.covariance == expected
    assert FULL_COVARIANCE_NUMBERS == 2_000**2


def test_classification_covariance_counts_every_class():
    assert classification(10_000, 4, basis="fourier", n_basis=1_000).covariance == "full"
    assert classification(10_000, 5, basis="fourier", n_basis=1_000).covariance == "diagonal"


def test_classification_of_relevance_vectors_has_its_own_solver():
    plan = classification(basis="relevance", n_basis=77)
    assert (plan.basis, plan.n_basis, plan.solver, plan.covariance) == (
        "relevance",
        77,
        "newton",
        "full",
    )
    assert classification(basis="relevance").n_basis is None
    with pytest.raises(ValueError, match="solver='sgd' cannot be had with basis='relevance'"):
        classification(basis="relevance", solver="sgd")
    with pytest.raises(ValueError, match="covariance='diagonal' cannot be had with"):
        classification(basis="relevance", covariance="diagonal")


def test_classification_refuses_a_covariance_that_the_solver_lacks():
    with pytest.raises(ValueError, match="covariance='full' cannot be had from solver='sgd'"):
        classification(solver="sgd", covariance="full")
    with pytest.raises(ValueError, match="which offers 'full', 'chevron', 'diagonal'"):
        classification(covariance="samples")


@pytest.mark.parametrize("budget", [1e8, 5e8 + 1, 5.01e8])
def test_sizes_chosen_for_a_budget_are_not_refused_for_it(budget):
    with memory_limit(budget):
        for basis in ("fourier", "inducing"):
            plan = resolve(Plan(basis, None, "cholesky", "full"), 10**5, RBF())
            check_memory(plan, 10**5)
            plan = resolve_classification(Plan(basis, None, "auto", "full"), 10**5, 3, RBF())
            check_memory(plan, 10**5, 3)
