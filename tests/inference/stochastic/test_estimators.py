"""Theorems 1 and 2, Proposition 2 and control variates: literal forms, unbiased, less variance."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.stochastic import estimators as module
from skgp.inference.stochastic.basis import FourierBasis, everything, index_set, sample_indices
from skgp.inference.stochastic.estimators import (
    LowRankControlVariate,
    constant_loss,
    diagonal_loss,
    nystrom_factor,
    projection_weights,
    quadratic_loss,
    sample_design,
    support_features,
)
from skgp.kernels import FourierFeatures
from skgp.optim import sample_without_replacement
from tests.inference.stochastic_problems import (
    BASES,
    NOISE,
    all_rows,
    all_samples,
    make_problem,
    scatter_pair,
    z_score,
)
from tests.reference import qsgp as reference
from tests.same import assert_same


def designs(problem):
    """Every equally likely design of one unit a sample and two rows, with its samples and rows."""
    samples = all_samples(problem.basis, 1)
    for rows, i, j in itertools.product(all_rows(problem.n, 2), samples, samples):
        yield rows, i, j, sample_design(problem.basis, problem.X[rows], i, j, n=problem.n)


def mean_loss(design, problem, rows, noise=NOISE):
    """The estimate of Theorem 1: one column, with the targets."""
    V_i, V_j = (problem.mu[side.indices, None] for side in (design.i, design.j))
    return quadratic_loss(design, V_i, V_j, noise, y=problem.y[rows])


def exact_mean_loss(problem):
    """Value and gradient by eq. (2)."""
    Phi, S, y = problem.dense()
    mu = problem.mu.numpy()
    gradient = 2 * (Phi.T @ (Phi @ mu - y) / NOISE + S @ mu)
    return np.append(reference.loss_mu(Phi, S, y, mu, NOISE), gradient)


def test_quadratic_loss_is_theorem_1_with_its_linear_term_from_both_samples():
    problem = make_problem("inducing")
    i, j = (
        index_set(problem.basis, torch.tensor([0, 1])),
        index_set(problem.basis, torch.ones(1).long()),
    )
    rows = torch.tensor([0, 3])
    estimate = mean_loss(sample_design(problem.basis, problem.X[rows], i, j, n=5), problem, rows)
    sets = i.indices.tolist(), j.indices.tolist()

    def oracle(mu):
        orders = (sets, sets[::-1])
        return np.mean(
            [reference.theorem_1(*problem.dense(), mu, NOISE, rows.tolist(), *s) for s in orders]
        )

    mu = problem.mu.numpy()
    np.testing.assert_allclose(float(estimate.value), oracle(mu), rtol=1e-12)
    gradient = scatter_pair(problem.basis.n_features, i, j, estimate)[:, 0]
    numerical = reference.numerical_gradient(oracle, mu)
    np.testing.assert_allclose(gradient.numpy(), numerical, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", BASES)
def test_mean_loss_averages_to_eq_2_over_all_samples(name):
    problem, found = make_problem(name), []
    for rows, i, j, design in designs(problem):
        estimate = mean_loss(design, problem, rows)
        gradient = scatter_pair(problem.basis.n_features, i, j, estimate)[:, 0]
        found.append(torch.cat([estimate.value, gradient]))
    average = torch.stack(found).mean(0).numpy()
    np.testing.assert_allclose(average, exact_mean_loss(problem), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["fourier", "sparse"])
def test_chevron_estimates_average_to_eq_2_over_all_samples(name):
    problem = make_problem(name)
    m, k = problem.basis.n_features, 3
    C = problem.C.clone()
    C[:, k:] = torch.diag(C.diagonal())[:, k:]
    c, V = C.diagonal().clone(), C[:, :k]
    values, dense_gradients, tail_gradients = [], [], []
    for _, i, j, design in designs(problem):
        dense = quadratic_loss(design, V[i.indices], V[j.indices], NOISE)
        c_i = c[i.indices].requires_grad_()
        value = diagonal_loss(design, c_i, NOISE, i.indices >= k)
        values.append(float(dense.value.sum() + value.detach() - 2 * c[:k].log().sum()))
        dense_gradients.append(scatter_pair(m, i, j, dense))
        gradient = torch.autograd.grad(value, c_i)[0]
        tail_gradients.append(torch.zeros(m).double().index_add(0, i.indices, gradient))
    Phi, S, _ = problem.dense()
    H = Phi.T @ Phi / NOISE + S
    expected = reference.loss_sigma(Phi, S, C.numpy(), NOISE)
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-10)
    np.testing.assert_allclose(torch.stack(dense_gradients).mean(0), 2 * H @ V.numpy(), rtol=1e-9)
    exact = 2 * np.diag(H) * c.numpy() - 2 / c.numpy()
    np.testing.assert_allclose(torch.stack(tail_gradients).mean(0)[k:], exact[k:], rtol=1e-9)


def test_diagonal_loss_has_its_minimum_at_proposition_1():
    problem = make_problem("sparse")
    whole = everything(problem.basis)
    design = sample_design(problem.basis, problem.X, whole, whole, n=problem.n)
    Phi, S, _ = problem.dense()
    c = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    c = torch.tensor(c, requires_grad=True)
    loss = diagonal_loss(design, c, NOISE, whole.indices >= 0)
    np.testing.assert_allclose(torch.autograd.grad(loss, c)[0], 0, atol=1e-12)


def test_constant_loss_is_proposition_2_and_averages_to_eq_2():
    problem = make_problem("sparse")
    _, S, y = problem.dense()
    values = []
    for i, rows in itertools.product(all_samples(problem.basis, 2), all_rows(problem.n, 2)):
        s = problem.basis.precision_diag(i.indices)
        values.append(float(constant_loss(s, i, problem.y[rows], NOISE, n=5, m=5)))
        oracle = reference.proposition_2(S, y[rows.numpy()], NOISE, 5, i.indices.tolist())
        np.testing.assert_allclose(values[-1], oracle, rtol=1e-12)
    np.testing.assert_allclose(np.mean(values), reference.loss_const(S, y, NOISE), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimates_keep_the_precision_of_the_basis(dtype):
    problem = make_problem("fourier")
    expected = exact_mean_loss(problem)[0]
    problem.basis.dtype = dtype
    problem.mu, problem.y = problem.mu.to(dtype), problem.y.to(dtype)
    whole = everything(problem.basis)
    design = sample_design(problem.basis, problem.X, whole, whole, n=problem.n)
    estimate = mean_loss(design, problem, torch.arange(problem.n))
    assert estimate.value.dtype == estimate.grad_i.dtype == dtype
    rtol = 1e-4 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(float(estimate.value), expected, rtol=rtol)


# Control variates ---------------------------------------------------------------------------------


def low_rank(problem, kind="features", **options):
    """A control variate of rank 3 with exact running sums, and B."""
    make = nystrom_factor if kind == "precision" else support_features
    if kind == "projected":
        options["weights"] = projection_weights(problem.basis.kernel, problem.X[:3], problem.X)
    factor = make(problem.basis, problem.X[:3])
    B = factor(everything(problem.basis))
    return LowRankControlVariate(factor, B @ problem.mu[:, None], **options), B


def pair_estimate(cv, problem, i, j, scale=2.0):
    mu = problem.mu[:, None]
    return cv.estimate(i, j, cv.columns(i), cv.columns(j), mu[i.indices], mu[j.indices], scale)


@pytest.mark.parametrize(
    "name, kind",
    [("fourier", "features"), ("fourier", "projected"), ("inducing", "projected")]
    + [("inducing", "precision")],
)
def test_correction_is_eq_3_and_has_expectation_zero(name, kind):
    problem = make_problem(name)
    cv, B = low_rank(problem, kind)
    mu = problem.mu.numpy()
    A = torch.eye(len(B)).double() if cv.weights is None else cv.weights
    M = (B.T @ A @ B).numpy()
    values, gradients = [], []
    for i, j in itertools.product(all_samples(problem.basis, 2), repeat=2):
        estimate = pair_estimate(cv, problem, i, j)
        values.append(float(estimate.value))
        gradients.append(scatter_pair(problem.basis.n_features, i, j, estimate))
        I, J = i.indices.numpy(), j.indices.numpy()
        sampled = i.weight * j.weight * mu[J] @ M[np.ix_(J, I)] @ mu[I]
        np.testing.assert_allclose(values[-1], 2.0 * (mu @ M @ mu - sampled), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(np.mean(values), 0, atol=1e-10)
    np.testing.assert_allclose(torch.stack(gradients).mean(0).numpy(), 0, atol=1e-10)


def test_nystrom_factor_reproduces_the_precision_at_its_own_points():
    problem = make_problem("inducing")
    B = nystrom_factor(problem.basis, problem.basis.Z)(everything(problem.basis))
    np.testing.assert_allclose((B.T @ B).numpy(), problem.dense()[1], atol=1e-6)


def test_projection_weights_equal_their_formula_and_reproduce_functions_on_the_support(monkeypatch):
    monkeypatch.setattr(module, "PROJECTION_JITTER", 0.0)
    rng = np.random.default_rng(0)
    U, X = rng.normal(size=(4, 2)), rng.normal(size=(50, 2))
    kernel = 2.0 * RBF(1.3)
    A = projection_weights(kernel, torch.tensor(U), torch.tensor(X)).numpy()
    P = np.linalg.solve(kernel(U), kernel(U, X))
    np.testing.assert_allclose(A, 4 / 50 * P @ P.T, atol=1e-12)
    # A function spanned by the support rows is its own projection: its mean square is exact.
    weights = rng.normal(size=4)
    f_U, f_X = kernel(U) @ weights, kernel(X, U) @ weights
    np.testing.assert_allclose(f_U @ A @ f_U / 4, np.mean(f_X**2), rtol=1e-10)


@pytest.mark.parametrize("name", BASES)
def test_mean_loss_with_every_control_variate_is_unbiased_by_z_test(name, generator):
    problem = make_problem(name)
    basis = problem.basis
    controls = [(low_rank(problem, "projected")[0], problem.n / 3 / NOISE)]
    if name == "inducing":
        controls.append((low_rank(problem, "precision")[0], 1.0))
    draws = []
    for _ in range(150):
        rows = sample_without_replacement(problem.n, 2, generator=generator)
        i, j = (sample_indices(basis, 5, generator=generator) for _ in range(2))
        design = sample_design(basis, problem.X[rows], i, j, n=problem.n)
        estimate = mean_loss(design, problem, rows)
        for cv, scale in controls:
            estimate = estimate + pair_estimate(cv, problem, i, j, scale)
        gradient = scatter_pair(basis.n_features, i, j, estimate)[:, 0]
        draws.append(torch.cat([estimate.value, gradient]).numpy())
    assert z_score(draws, exact_mean_loss(problem)) < 4


def test_features_of_the_control_variate_stay_at_the_initial_theta():
    problem = make_problem("fourier")
    theta = torch.tensor(problem.basis.kernel.theta)
    factor = support_features(problem.basis, problem.X[:3], theta)
    whole = everything(problem.basis)
    before = factor(whole)
    theta += 1.0
    assert_same(factor(whole), before)


def variance_by_rank(problem, ranks, *, dense, projected=False, repetitions=60):
    """Variances of value and gradient of the mean's loss, for nested sets of support rows."""
    basis, X, mu = problem
    generator = torch.Generator().manual_seed(2)
    n = len(X)
    support = X[torch.randperm(n, generator=generator)[: max(ranks)]]
    B = basis.features(support, everything(basis).indices)
    A = {r: projection_weights(basis.kernel, support[:r], X) if projected else None for r in ranks}
    draws = {rank: ([], []) for rank in ranks}
    for _ in range(repetitions):
        rows = sample_without_replacement(n, 200, generator=generator)
        i, j = (sample_indices(basis, 200, generator=generator) for _ in range(2))
        design = sample_design(basis, X[rows], i, j, n=n)
        V_i, V_j = mu[i.indices, None], mu[j.indices, None]
        plain = quadratic_loss(design, V_i, V_j, NOISE)
        for rank, (values, gradients) in draws.items():
            estimate = plain
            if rank:
                # The gradient of the expectation is dense, a constant that `dense` leaves out.
                sums = (0 if dense else 1) * B[:rank] @ mu[:, None]
                cv = LowRankControlVariate(
                    lambda k, r=rank: B[:r][:, k.indices], sums, weights=A[rank]
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


def test_variance_falls_by_an_order_of_magnitude_and_sooner_by_projection(smooth_problem):
    # Figure 1.
    variances = variance_by_rank(smooth_problem, (0, 30, 100, 300), dense=True)
    objective, gradient = zip(*variances.values(), strict=True)
    assert np.all(np.diff(objective) < 0) and np.all(np.diff(gradient) < 0)
    assert objective[-1] < 0.1 * objective[0]
    assert gradient[-1] < 0.1 * gradient[0]
    projected = variance_by_rank(smooth_problem, (30, 100), dense=True, projected=True)
    for rank in (30, 100):
        assert np.all(np.array(projected[rank]) < np.array(variances[rank]))
    assert np.all(np.array(projected[30]) < np.array(variances[100]))
