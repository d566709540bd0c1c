"""Control variates: expectation 0, running sums (Prop. 3), less variance (figure 1)."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.stochastic.basis import FourierBasis
from skgp.inference.stochastic.control_variates import (
    LinearControlVariate,
    LowRankControlVariate,
    RegressionCoefficient,
    nystrom_factor,
    projection_weights,
    support_features,
)
from skgp.inference.stochastic.estimators import quadratic_loss, sample_design
from skgp.inference.stochastic.sampling import everything, sample_indices
from skgp.kernels import FourierFeatures
from skgp.optim import sample_without_replacement
from tests.inference.stochastic_problems import (
    BASES,
    NOISE,
    all_samples,
    make_problem,
    mean_loss,
    scatter_pair,
    z_score,
)
from tests.reference import qsgp as reference
from tests.same import assert_same

KINDS = ("features", "precision", "projected")


def low_rank(problem, kind="features", scaling="draws", V=None, **options):
    """A control variate of rank 3 with exact running sums, and B."""
    V = problem.mu[:, None] if V is None else V
    make = nystrom_factor if kind == "precision" else support_features
    if kind == "projected":
        options["weights"] = projection_weights(problem.basis.kernel, problem.X[:3], problem.X)
    factor = make(problem.basis, problem.X[:3])
    B = factor(everything(problem.basis).indices)
    return LowRankControlVariate(factor, B @ V, scaling=scaling, **options), B


def pair_estimate(cv, problem, i, j, scale=2.0):
    mu = problem.mu[:, None]
    parts = cv.columns(i), cv.columns(j)
    return cv.estimate(i, j, *parts, mu[i.indices], mu[j.indices], scale)


@pytest.mark.parametrize(
    "name, kind",
    [(name, kind) for name in BASES for kind in ("features", "projected")]
    + [("inducing", "precision")],
)
@pytest.mark.parametrize("scaling", ["draws", "union"])
def test_low_rank_correction_has_expectation_zero(name, scaling, kind):
    problem = make_problem(name)
    cv, _ = low_rank(problem, kind, scaling)
    values, gradients = [], []
    for i, j in itertools.product(all_samples(problem.basis, 2), repeat=2):
        estimate = pair_estimate(cv, problem, i, j)
        values.append(float(estimate.value))
        gradients.append(scatter_pair(problem.basis.n_features, i, j, estimate))
    np.testing.assert_allclose(np.mean(values), 0, atol=1e-10)
    np.testing.assert_allclose(torch.stack(gradients).mean(0).numpy(), 0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_low_rank_value_is_eq_3_to_the_letter(kind):
    problem = make_problem("inducing")
    cv, B = low_rank(problem, kind)
    i, j = all_samples(problem.basis, 2)[0], all_samples(problem.basis, 2)[3]
    mu = problem.mu.numpy()
    A = torch.eye(len(B)).double() if cv.weights is None else cv.weights
    M = (B.T @ A @ B).numpy()
    weight = (5 / 2) ** 2
    I, J = i.indices.numpy(), j.indices.numpy()
    expected = 2.0 * (mu @ M @ mu - weight * mu[J] @ M[np.ix_(J, I)] @ mu[I])
    value = pair_estimate(cv, problem, i, j).value
    np.testing.assert_allclose(float(value), expected, rtol=1e-10)


def test_nystrom_factor_reproduces_the_precision_at_its_own_points():
    problem = make_problem("inducing")
    factor = nystrom_factor(problem.basis, problem.basis.Z)
    B = factor(everything(problem.basis).indices)
    np.testing.assert_allclose((B.T @ B).numpy(), problem.dense()[1], atol=1e-6)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scaling", ["draws", "union"])
def test_linear_correction_has_expectation_zero(name, symmetric, scaling):
    problem = make_problem(name)
    Phi, _, y = problem.dense()
    b = torch.tensor(Phi.T @ y)
    total = float(b @ problem.mu)
    cv = LinearControlVariate(b, total, scaling=scaling, symmetric=symmetric)
    values, gradients = [], []
    for i, j in itertools.product(all_samples(problem.basis, 1), repeat=2):
        estimate = cv.estimate(i, j, problem.mu[i.indices], problem.mu[j.indices], NOISE)
        values.append(float(estimate.value))
        gradients.append(scatter_pair(problem.basis.n_features, i, j, estimate))
    np.testing.assert_allclose(np.mean(values), 0, atol=1e-10)
    np.testing.assert_allclose(torch.stack(gradients).mean(0).numpy(), 0, atol=1e-10)


def test_projection_weights_equal_their_formula_and_reproduce_functions_on_the_support():
    rng = np.random.default_rng(0)
    U, X = rng.normal(size=(4, 2)), rng.normal(size=(50, 2))
    kernel = 2.0 * RBF(1.3)
    A = projection_weights(kernel, torch.tensor(U), torch.tensor(X), jitter=0).numpy()
    P = np.linalg.solve(kernel(U), kernel(U, X))
    np.testing.assert_allclose(A, 4 / 50 * P @ P.T, atol=1e-12)
    # A function spanned by the support rows is its own projection: its mean square is exact.
    weights = rng.normal(size=4)
    f_U, f_X = kernel(U) @ weights, kernel(X, U) @ weights
    np.testing.assert_allclose(f_U @ A @ f_U / 4, np.mean(f_X**2), rtol=1e-10)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("scaling", ["draws", "union"])
@pytest.mark.parametrize("kind", ["features", "projected"])
def test_mean_loss_with_every_control_variate_is_unbiased_by_z_test(name, scaling, kind, generator):
    problem = make_problem(name)
    basis, mu = problem.basis, problem.mu
    features, _ = low_rank(problem, kind, scaling)
    precision = low_rank(problem, "precision", scaling)[0] if name == "inducing" else None
    Phi, S, y = problem.dense()
    b = torch.tensor(Phi.T @ y)
    linear = LinearControlVariate(b, float(b @ mu), scaling=scaling)
    draws = []
    for _ in range(600):
        rows = sample_without_replacement(problem.n, 2, generator=generator)
        i, j = (sample_indices(basis, 5, generator=generator) for _ in range(2))
        design = sample_design(basis, problem.X[rows], i, j, n=problem.n)
        estimate = mean_loss(design, problem.y[rows], mu, NOISE)
        estimate = estimate + pair_estimate(features, problem, i, j, problem.n / 3 / NOISE)
        if precision is not None:
            estimate = estimate + pair_estimate(precision, problem, i, j, 1.0)
        estimate = estimate + linear.estimate(i, j, mu[i.indices], mu[j.indices], NOISE)
        gradient = scatter_pair(basis.n_features, i, j, estimate)[:, 0]
        draws.append(torch.cat([estimate.value.reshape(1), gradient]).numpy())
    exact = 2 * (Phi.T @ (Phi @ mu.numpy() - y) / NOISE + S @ mu.numpy())
    expected = np.append(reference.loss_mu(Phi, S, y, mu.numpy(), NOISE), exact)
    assert z_score(draws, expected) < 4


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_running_sums_equal_direct_products(name, generator):
    problem = make_problem(name)
    V = torch.zeros(problem.basis.n_features, 4, dtype=torch.float64)
    cv, B = low_rank(problem, V=V)
    b = torch.randn(len(V), generator=generator, dtype=torch.float64)
    linear = LinearControlVariate(b)
    for _ in range(200):
        sample = sample_indices(problem.basis, 4, generator=generator)
        columns = torch.tensor([0, 2])
        delta = torch.randn(len(sample), 2, generator=generator, dtype=torch.float64)
        V[sample.indices[:, None], columns] += delta
        cv.update(cv.columns(sample), delta, columns)
        linear.update(sample, delta[:, 0])
    np.testing.assert_allclose(cv.sums.numpy(), (B @ V).numpy(), atol=1e-10)
    np.testing.assert_allclose(linear.total, float(b @ V[:, 0]), atol=1e-10)


@pytest.mark.parametrize("memory_budget", [0, 200, 10**6])
def test_kept_columns_are_those_of_the_factor(memory_budget, generator):
    problem = make_problem("fourier")
    cv, B = low_rank(problem, memory_budget=memory_budget)
    for _ in range(10):
        sample = sample_indices(problem.basis, 8, generator=generator)
        assert_same(cv.columns(sample).numpy(), B[:, sample.indices].numpy())


def test_kept_columns_are_not_made_again(generator):
    problem = make_problem("fourier")
    calls = []
    factor = support_features(problem.basis, problem.X[:3])
    cv = LowRankControlVariate(
        lambda indices: calls.append(indices) or factor(indices),
        torch.zeros(3, 1),
        memory_budget=3 * 4 * 8,  # one block of four functions in float64
    )
    for _ in range(3):
        cv.columns(everything(problem.basis))
    assert len(calls) == 1 + 3 * 2


def test_features_of_the_control_variate_stay_at_the_initial_theta():
    problem = make_problem("fourier")
    theta = torch.tensor(problem.basis.kernel.theta)
    factor = support_features(problem.basis, problem.X[:3], theta)
    indices = everything(problem.basis).indices
    before = factor(indices)
    theta += 1.0
    assert_same(factor(indices), before)


def variance_by_rank(problem, ranks, *, scaling, y=None, projected=False, repetitions=150):
    """Variances of value and gradient of the mean's loss, for nested sets of support rows."""
    basis, X, mu = problem
    generator = torch.Generator().manual_seed(2)
    n = len(X)
    order = torch.randperm(n, generator=generator)
    support = X[order[: max(ranks)]]
    B = basis.features(support, everything(basis).indices)
    A = {r: projection_weights(basis.kernel, support[:r], X) if projected else None for r in ranks}
    draws = {rank: ([], []) for rank in ranks}
    for _ in range(repetitions):
        rows = sample_without_replacement(n, 200, generator=generator)
        i, j = (sample_indices(basis, 200, generator=generator) for _ in range(2))
        design = sample_design(basis, X[rows], i, j, n=n)
        V_i, V_j = mu[i.indices, None], mu[j.indices, None]
        plain = quadratic_loss(design, V_i, V_j, NOISE, y=None if y is None else y[rows])
        for rank, (values, gradients) in draws.items():
            estimate = plain
            if rank:
                factor = B[:rank]
                sums = factor @ mu[:, None]
                cv = LowRankControlVariate(
                    lambda k, F=factor: F[:, k],
                    torch.zeros_like(sums) if scaling == "dense" else sums,
                    weights=A[rank],
                    scaling="draws" if scaling == "dense" else scaling,
                )
                parts = cv.columns(i), cv.columns(j)
                estimate = plain + cv.estimate(i, j, *parts, V_i, V_j, n / rank / NOISE)
            values.append(float(estimate.value))
            gradients.append(scatter_pair(len(mu), i, j, estimate)[:, 0])
    return {
        rank: (np.var(values), float(torch.stack(gradients).var(0).mean()))
        for rank, (values, gradients) in draws.items()
    }


@pytest.fixture(scope="module")
def smooth_problem():
    """Two-dimensional rows, 1000 features in blocks of 50, and weights from the prior."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(1000, 2, generator=generator, dtype=torch.float64)
    basis = FourierBasis(FourierFeatures(RBF(0.3), 1000, 2, seed=0, block_size=25))
    return basis, X, torch.randn(1000, generator=generator, dtype=torch.float64)


def test_variance_falls_by_an_order_of_magnitude(smooth_problem):
    # Figure 1: the gradient of the expectation is dense, a constant that "dense" leaves out.
    variances = variance_by_rank(smooth_problem, (0, 30, 100, 300), scaling="dense")
    objective, gradient = zip(*variances.values(), strict=True)
    assert np.all(np.diff(objective) < 0) and np.all(np.diff(gradient) < 0)
    assert objective[-1] < 0.1 * objective[0]
    assert gradient[-1] < 0.1 * gradient[0]


def test_projection_needs_fewer_support_rows(smooth_problem):
    alike = variance_by_rank(smooth_problem, (30, 100), scaling="dense")
    projected = variance_by_rank(smooth_problem, (30, 100), scaling="dense", projected=True)
    for rank in (30, 100):
        assert np.all(np.array(projected[rank]) < np.array(alike[rank]))
    assert np.all(np.array(projected[30]) < np.array(alike[100]))


@pytest.mark.parametrize("scaling", ["draws", "union"])
def test_sparse_gradients_gain_down_to_the_noise_of_their_sparsity(smooth_problem, scaling):
    basis, X, mu = smooth_problem
    Phi = basis.features(X, everything(basis).indices)
    floor = 4 * (Phi.T @ (Phi @ mu) / NOISE + mu).square().mean()
    w = basis.n_units / 4
    floor *= (w - 1) / 2 if scaling == "draws" else 1 / (2 / w - 1 / w**2) - 1
    variances = variance_by_rank(smooth_problem, (0, 300), scaling=scaling)
    assert variances[300][1] < 0.4 * variances[0][1]
    assert variances[300][1] < 1.3 * floor < 0.4 * variances[0][1]


def test_scaling_by_draws_has_the_smaller_variance_at_the_optimum(smooth_problem):
    basis, X, mu = smooth_problem
    Phi = basis.features(X, everything(basis).indices)
    noise = torch.randn(len(X), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = Phi @ mu + NOISE**0.5 * noise
    optimum, _ = reference.posterior(Phi.numpy(), np.eye(len(mu)), y.numpy(), NOISE)
    problem = basis, X, torch.tensor(optimum)
    draws, union = (
        variance_by_rank(problem, (300,), scaling=scaling, y=y)[300][1]
        for scaling in ("draws", "union")
    )
    assert draws < 0.5 * union


def test_regression_coefficient_finds_the_slope():
    rng = np.random.default_rng(0)
    coefficient = RegressionCoefficient(smoothing=0.995)
    assert coefficient.value == 1.0
    for z in rng.normal(size=3000):
        coefficient.update(5.0 + 0.6 * z + 0.1 * rng.normal(), z)
    assert abs(coefficient.value - 0.6) < 0.05


def test_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="scaling must be"):
        LowRankControlVariate(lambda k: k, torch.zeros(1, 1), scaling="both")
    with pytest.raises(ValueError, match="scaling must be"):
        LinearControlVariate(torch.zeros(1), scaling="both")
