"""Theorems 1 and 2 and Proposition 2: literal forms, unbiasedness, gradients."""

import itertools

import numpy as np
import pytest
import torch

from skgp.inference.stochastic.estimators import (
    constant_loss,
    diagonal_loss,
    quadratic_loss,
    sample_design,
)
from skgp.inference.stochastic.sampling import everything, index_set, sample_indices
from skgp.optim import sample_without_replacement
from tests.inference.stochastic_problems import (
    BASES,
    KERNEL,
    NOISE,
    all_rows,
    all_samples,
    make_problem,
    mean_loss,
    scatter_pair,
    z_score,
)
from tests.reference import qsgp as reference


def designs(problem, *, n_draws=1, n_rows=2, theta=None, dense=None):
    """Every equally likely design of the problem, with its samples and rows."""
    samples = all_samples(problem.basis, n_draws)
    for rows, i, j in itertools.product(all_rows(problem.n, n_rows), samples, samples):
        design = sample_design(
            problem.basis, problem.X[rows], i, j, n=problem.n, theta=theta, dense_precision=dense
        )
        yield rows, i, j, design


def random_design(problem, generator, size, **options):
    """One design by the sampler."""
    rows = sample_without_replacement(problem.n, 2, generator=generator)
    i, j = (sample_indices(problem.basis, size, generator=generator) for _ in range(2))
    return rows, i, j, sample_design(problem.basis, problem.X[rows], i, j, n=problem.n, **options)


@pytest.mark.parametrize("name", BASES)
def test_mean_loss_is_theorem_1_to_the_letter(name):
    problem = make_problem(name, n_features=8)  # blocks of one size: the paper's m / len(i)
    i = index_set(problem.basis, torch.tensor([0, 1]))
    j = index_set(problem.basis, torch.tensor([1]))
    rows = torch.tensor([0, 3])
    design = sample_design(problem.basis, problem.X[rows], i, j, n=5, dense_precision=True)
    estimate = mean_loss(design, problem.y[rows], problem.mu, NOISE, symmetric=False)
    sets = rows.tolist(), i.indices.tolist(), j.indices.tolist()

    def oracle(mu):
        return reference.theorem_1(*problem.dense(), mu, NOISE, *sets)

    mu = problem.mu.numpy()
    np.testing.assert_allclose(float(estimate.value), oracle(mu), rtol=1e-12)
    gradient = scatter_pair(problem.basis.n_features, i, j, estimate)[:, 0]
    np.testing.assert_allclose(
        gradient.numpy(), reference.numerical_gradient(oracle, mu), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dense", [None, True])
def test_mean_loss_averages_to_eq_2_over_all_samples(name, symmetric, dense):
    problem = make_problem(name)
    values, gradients = [], []
    for rows, i, j, design in designs(problem, dense=dense):
        estimate = mean_loss(design, problem.y[rows], problem.mu, NOISE, symmetric=symmetric)
        values.append(float(estimate.value))
        gradients.append(scatter_pair(problem.basis.n_features, i, j, estimate)[:, 0])
    Phi, S, y = problem.dense()
    mu = problem.mu.numpy()
    np.testing.assert_allclose(np.mean(values), reference.loss_mu(Phi, S, y, mu, NOISE), rtol=1e-10)
    exact = 2 * (Phi.T @ (Phi @ mu - y) / NOISE + S @ mu)
    np.testing.assert_allclose(torch.stack(gradients).mean(0).numpy(), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_mean_loss_is_unbiased_by_z_test(name, symmetric, generator):
    problem = make_problem(name)
    draws = []
    for _ in range(800):
        rows, i, j, design = random_design(problem, generator, 5)
        estimate = mean_loss(design, problem.y[rows], problem.mu, NOISE, symmetric=symmetric)
        gradient = scatter_pair(problem.basis.n_features, i, j, estimate)[:, 0]
        draws.append(torch.cat([estimate.value[None], gradient]).numpy())
    Phi, S, y = problem.dense()
    mu = problem.mu.numpy()
    exact = 2 * (Phi.T @ (Phi @ mu - y) / NOISE + S @ mu)
    expected = np.concatenate([[reference.loss_mu(Phi, S, y, mu, NOISE)], exact])
    assert z_score(draws, expected) < 4


@pytest.mark.parametrize("name", ["fourier", "precision"])
def test_chevron_estimates_average_to_eq_2_over_all_samples(name):
    problem = make_problem(name)
    m, k = problem.basis.n_features, 3
    C = problem.C.clone()
    C[:, k:] = torch.diag(C.diagonal())[:, k:]
    c, V = C.diagonal(), C[:, :k]
    values, dense_gradients, tail_gradients = [], [], []
    for _, i, j, design in designs(problem):
        dense = quadratic_loss(design, V[i.indices], V[j.indices], NOISE)
        tail = i.indices >= k
        value, gradient = diagonal_loss(design, c[i.indices], NOISE, tail)
        values.append(float(dense.value.sum() + value - 2 * c[:k].log().sum()))
        dense_gradients.append(scatter_pair(m, i, j, dense))
        tail_gradients.append(torch.zeros(m).double().index_add(0, i.indices, gradient))
    Phi, S, _ = problem.dense()
    H = Phi.T @ Phi / NOISE + S
    np.testing.assert_allclose(
        np.mean(values), reference.loss_sigma(Phi, S, C.numpy(), NOISE), rtol=1e-10
    )
    np.testing.assert_allclose(torch.stack(dense_gradients).mean(0), 2 * H @ V.numpy(), rtol=1e-9)
    exact = 2 * np.diag(H) * c.numpy() - 2 / c.numpy()
    np.testing.assert_allclose(torch.stack(tail_gradients).mean(0)[k:], exact[k:], rtol=1e-9)


def test_diagonal_loss_has_its_minimum_at_proposition_1():
    problem = make_problem("precision")
    whole = everything(problem.basis)
    design = sample_design(problem.basis, problem.X, whole, whole, n=problem.n)
    Phi, S, _ = problem.dense()
    c = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    _, gradient = diagonal_loss(design, torch.tensor(c), NOISE)
    np.testing.assert_allclose(gradient.numpy(), 0, atol=1e-12)


def test_diagonal_loss_without_the_diagonal_is_refused():
    problem = make_problem("inducing")
    whole = everything(problem.basis)
    design = sample_design(problem.basis, problem.X, whole, whole, n=problem.n)
    with pytest.raises(ValueError, match="dense_precision=False"):
        diagonal_loss(design, problem.C.diagonal(), NOISE)


@pytest.mark.parametrize("name", ["fourier", "precision"])
def test_constant_loss_averages_to_eq_2_over_all_samples(name):
    problem = make_problem(name)
    m = problem.basis.n_features
    values = [
        float(
            constant_loss(
                problem.basis.log_precision_diag(i.indices), i, problem.y[rows], NOISE, n=5, m=m
            )
        )
        for i in all_samples(problem.basis, 1)
        for rows in all_rows(problem.n, 2)
    ]
    _, S, y = problem.dense()
    np.testing.assert_allclose(np.mean(values), reference.loss_const(S, y, NOISE), rtol=1e-12)


def test_constant_loss_is_proposition_2_to_the_letter():
    problem = make_problem("precision", n_features=8)
    i = index_set(problem.basis, torch.tensor([1]))
    y = problem.y[:3]
    log_s = problem.basis.log_precision_diag(i.indices)
    value = constant_loss(log_s, i, y, NOISE, n=5, m=8)
    _, S, _ = problem.dense()
    oracle = reference.proposition_2(S, y.numpy(), NOISE, 5, i.indices.tolist())
    np.testing.assert_allclose(float(value), oracle, rtol=1e-12)


@pytest.mark.parametrize("name", ["fourier", "precision"])
def test_hyperparameter_gradients_average_to_those_of_the_elbo(name):
    problem = make_problem(name)
    basis, m = problem.basis, problem.basis.n_features
    C = torch.diag(problem.C.diagonal())

    def loss(theta, noise, rows, i, j):
        design = sample_design(basis, problem.X[rows], i, j, n=problem.n, theta=theta)
        mean = mean_loss(design, problem.y[rows], problem.mu, noise).value
        tail, _ = diagonal_loss(design, C.diagonal()[i.indices], noise)
        log_s = basis.log_precision_diag(i.indices, theta)
        return 0.5 * (mean + tail + constant_loss(log_s, i, problem.y[rows], noise, n=5, m=m))

    def gradient(*sample):
        theta = torch.tensor(KERNEL.theta, requires_grad=True)
        noise = torch.tensor(NOISE, dtype=torch.float64, requires_grad=True)
        return torch.cat(
            [
                g.reshape(-1)
                for g in torch.autograd.grad(loss(theta, noise, *sample), (theta, noise))
            ]
        )

    samples = all_samples(basis, 1)
    sampled = [
        gradient(rows, i, j)
        for rows, i, j in itertools.product(all_rows(problem.n, 2), samples, samples)
    ]
    whole = everything(basis)
    exact = gradient(torch.arange(problem.n), whole, whole)
    torch.testing.assert_close(torch.stack(sampled).mean(0), exact, rtol=1e-9, atol=1e-9)

    def oracle(parameters):
        indices = whole.indices
        theta = torch.tensor(parameters[:-1])
        Phi = basis.features(problem.X, indices, theta).numpy()
        S = basis.precision(indices, indices, theta).numpy()
        mu, y = problem.mu.numpy(), problem.y.numpy()
        return -reference.elbo(Phi, S, y, mu, C.numpy(), parameters[-1])

    parameters = np.append(KERNEL.theta, NOISE)
    numerical = reference.numerical_gradient(oracle, parameters)
    np.testing.assert_allclose(exact.numpy(), numerical, rtol=1e-5, atol=1e-6)


def test_exact_optimum_attains_the_evidence():
    Phi, S, y = make_problem("inducing").dense()
    mu, Sigma = reference.posterior(Phi, S, y, NOISE)
    elbo = reference.elbo(Phi, S, y, mu, np.linalg.cholesky(Sigma), NOISE)
    np.testing.assert_allclose(elbo, reference.log_evidence(Phi, S, y, NOISE), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimates_keep_the_precision_of_the_basis(dtype):
    problem = make_problem("fourier")
    problem.basis.dtype = dtype
    whole = everything(problem.basis)
    design = sample_design(problem.basis, problem.X, whole, whole, n=problem.n)
    estimate = mean_loss(design, problem.y.to(dtype), problem.mu.to(dtype), NOISE)
    assert estimate.value.dtype == estimate.grad_i.dtype == dtype
    expected = reference.loss_mu(*make_problem("fourier").dense(), problem.mu.numpy(), NOISE)
    rtol = 1e-4 if dtype == torch.float32 else 1e-12
    np.testing.assert_allclose(float(estimate.value), expected, rtol=rtol)
