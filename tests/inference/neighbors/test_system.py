"""The closed-form mean and variances against dense matrices, and as stationary points."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.inference.natural import Sites, VariationalPosterior
from skgp.inference.neighbors import assembly as module
from skgp.inference.neighbors.assembly import local_prior
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.system import local_system, row_weights
from tests.covering import covering
from tests.reference import swsgp as dense


def tiles_of(problem, dtype=torch.float64):
    X, _, Z, active, _, _ = problem.tensors
    return Tiles(problem.kernel, X.to(dtype), Z.to(dtype), active)


def system_of(problem, dtype=torch.float64):
    weight = None if problem.weight is None else torch.tensor(problem.weight).to(dtype)
    return local_system(tiles_of(problem, dtype), kl_weight=problem.kl_weight, weight=weight)


def sites_of(problem, seed=1):
    """Precisions that differ between rows and latent functions."""
    rng = np.random.default_rng(seed)
    lam = problem.row_weight[:, None] * rng.uniform(0.1, 5.0, problem.Y.shape)
    eta = lam * (problem.Y - problem.offset)
    return lam, eta, Sites(*map(torch.tensor, (lam, eta, lam)))


def torch_bound(problem, mean, var, noise):
    """Plain bound of Gaussian noise for a diagonal S, one row at a time."""
    X, Y, Z, active, offset, _ = problem.tensors
    total = torch.zeros((), dtype=torch.float64)
    rows = zip(X, Y, active, problem.row_weight, problem.share, strict=True)
    for x, y, I, weight, share in rows:
        K = torch.tensor(dense.inducing_gram(problem.kernel, Z[I].numpy()))
        a, variance = dense.conditional(problem.kernel, x.numpy(), Z[I].numpy())
        a, m, s = torch.tensor(a), mean[I], var[I]
        f, v = offset + a @ m, variance + a.square() @ s
        fit = -0.5 * ((y - f).square() + v) / noise - 0.5 * np.log(2 * np.pi * noise)
        inverse = torch.linalg.inv(K)
        for l in range(len(y)):
            kl = inverse.diagonal() @ s[:, l] + m[:, l] @ inverse @ m[:, l] - len(I)
            total = total - share * 0.5 * (kl + torch.logdet(K) - s[:, l].log().sum())
        total = total + weight * fit.sum()
    return total


@covering(name=["rbf", "matern", "sum"], n_neighbors=[4, 12, 1], weighted=[False, True])
def test_posterior_equals_the_dense_closed_form(name, weighted, n_neighbors):
    problem = dense.make_problem(name, n_latent=2, weighted=weighted, n_neighbors=n_neighbors)
    lam, eta, sites = sites_of(problem)
    q, found = system_of(problem).solve(sites, tol=1e-13)
    np.testing.assert_allclose(q.mean, dense.optimal_mean(problem, lam, eta), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(q.var, dense.optimal_var(problem, lam), rtol=1e-10)
    assert found.converged and found.n_iter > 0


@pytest.mark.parametrize("kl_weight", [1.0, 3.0])
def test_posterior_is_a_stationary_point_of_the_bound(kl_weight):
    problem = dense.make_problem("matern", n=25, n_latent=2, weighted=True, kl_weight=kl_weight)
    lam, eta = map(torch.tensor, dense.gaussian_sites(problem))
    q, _ = system_of(problem).solve(Sites(lam, eta, lam), tol=1e-13)
    mean, log_var = q.mean.clone().requires_grad_(), q.var.log().requires_grad_()
    value = torch_bound(problem, mean, log_var.exp(), problem.noise)
    gradients = torch.autograd.grad(value, (mean, log_var))
    for gradient in gradients:
        assert gradient.abs().max() < 1e-8
    covariance = dense.diagonal(q.var.numpy())
    log_prob = dense.gaussian_log_prob(problem.noise)
    np.testing.assert_allclose(
        value.item(), dense.bound(problem, log_prob, q.mean.numpy(), covariance)
    )


def test_prior_equals_the_dense_sum_of_local_inverses():
    problem = dense.make_problem("sum", weighted=True)
    prior = local_prior(tiles_of(problem), torch.tensor(problem.share))
    Q = dense.prior_precision(problem)
    np.testing.assert_allclose(prior.matrix.to_dense(), Q, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(prior.diagonal, np.diag(Q), rtol=1e-10)
    np.testing.assert_allclose(prior.mass.sum(), problem.kl_weight * problem.active.shape[1])


def test_prior_assembled_in_parts_is_the_same(monkeypatch):
    problem = dense.make_problem("sum", weighted=True)
    whole = system_of(problem).prior
    monkeypatch.setattr(module.defaults, "ASSEMBLED", 200)
    parts = system_of(problem).prior
    torch.testing.assert_close(parts.matrix.to_dense(), whole.matrix.to_dense())
    torch.testing.assert_close(parts.constant, whole.constant)


@pytest.mark.parametrize("n_neighbors", [4, 12])
def test_divergence_and_moments_equal_the_dense_ones(n_neighbors):
    problem = dense.make_problem("matern", n_latent=2, weighted=True, n_neighbors=n_neighbors)
    mean, covariance = dense.random_posterior(12, 2)
    var = np.diagonal(covariance, axis1=1, axis2=2).T.copy()
    q = VariationalPosterior(torch.tensor(mean), torch.tensor(var))
    system = system_of(problem)
    expected = dense.divergence(problem, mean, dense.diagonal(var))
    np.testing.assert_allclose(float(system.divergence(q)), expected, rtol=1e-10)
    f_mean, f_var = dense.moments(problem, mean, dense.diagonal(var))
    found = system.moments(q)
    np.testing.assert_allclose(problem.offset + found[0].numpy(), f_mean, rtol=1e-8)
    np.testing.assert_allclose(found[1], f_var, rtol=1e-8)


def test_anchor_adds_a_site_at_each_inducing_point():
    problem = dense.make_problem(n_latent=2)
    lam, eta, sites = sites_of(problem)
    anchor = np.random.default_rng(2).uniform(0.0, 9.0, (12, 2))
    system = replace(system_of(problem), anchor=torch.tensor(anchor))
    q, _ = system.solve(sites, tol=1e-13)
    A, _ = dense.conditionals(problem)
    for l in range(2):
        matrix = dense.precision(problem, lam[:, l]) + np.diag(anchor[:, l])
        np.testing.assert_allclose(
            q.mean[:, l], np.linalg.solve(matrix, A.T @ eta[:, l]), rtol=1e-7
        )
        mass = dense.optimal_var(problem, lam)[:, l] * np.diag(dense.precision(problem, lam[:, l]))
        np.testing.assert_allclose(q.var[:, l], mass / np.diag(matrix), rtol=1e-9)
    extra = 0.5 * np.sum(anchor * (q.mean.numpy() ** 2 + q.var.numpy()))
    plain = dense.divergence(problem, q.mean.numpy(), dense.diagonal(q.var.numpy()))
    np.testing.assert_allclose(float(system.divergence(q)), plain + extra, rtol=1e-10)


def test_inducing_points_that_are_never_active_keep_their_prior():
    problem = dense.make_problem(n_latent=2)
    Z = np.concatenate([problem.Z[:5], [[30.0, 30.0]], problem.Z[5:]])
    problem = replace(
        problem, Z=Z, active=np.where(problem.active >= 5, problem.active + 1, problem.active)
    )
    lam, eta, sites = sites_of(problem)
    q, _ = system_of(problem).solve(sites, tol=1e-13)
    assert (q.mean[5] == 0).all()
    np.testing.assert_allclose(q.var[5], 1.3 * (1 + dense.JITTER))
    np.testing.assert_allclose(q.var, dense.optimal_var(problem, lam), rtol=1e-10)


@pytest.mark.parametrize("n_columns", [1, 3])
def test_row_weights_multiply_as_the_dense_matrix_does(n_columns):
    problem = dense.make_problem("sum")
    rows, (A, variance) = row_weights(tiles_of(problem)), dense.conditionals(problem)
    rng = np.random.default_rng(4)
    V, R = rng.standard_normal((12, n_columns)), rng.standard_normal((40, n_columns))
    options = {"rtol": 1e-8, "atol": 1e-9}
    np.testing.assert_allclose(rows.project(torch.tensor(V)), A @ V, **options)
    np.testing.assert_allclose(rows.project_squares(torch.tensor(V)), A**2 @ V, **options)
    np.testing.assert_allclose(rows.collect(torch.tensor(R)), A.T @ R, **options)
    np.testing.assert_allclose(rows.collect_squares(torch.tensor(R)), (A**2).T @ R, **options)
    np.testing.assert_allclose(rows.variance, variance, **options)
    assert len(rows) == 40
    last = rows.last(7)
    np.testing.assert_allclose(last.project(torch.tensor(V)), (A @ V)[-7:], **options)
    np.testing.assert_allclose(last.collect(torch.tensor(R[-7:])), A[-7:].T @ R[-7:], **options)
    np.testing.assert_allclose(last.variance, variance[-7:], **options)


def test_solve_from_the_solution_needs_no_iterations():
    problem = dense.make_problem("matern", n_latent=2)
    _, _, sites = sites_of(problem)
    system = system_of(problem)
    q, found = system.solve(sites, tol=1e-9)
    _, again = system.solve(sites, start=q.mean, tol=1e-8)
    assert again.n_iter == 0 and (found.residual < 1e-8).all()


def test_negative_curvatures_leave_variances_within_ten_times_those_without_data():
    problem = dense.make_problem()
    _, _, sites = sites_of(problem)
    system = system_of(problem)
    alone = system.variance(Sites.none(sites.precision))
    var = system.variance(replace(sites, curvature=-100 * sites.curvature))
    torch.testing.assert_close(var, 10 * alone)


def test_system_of_float32_is_near_that_of_float64():
    problem = dense.make_problem("matern", n_latent=2, n_neighbors=6)
    _, _, sites = sites_of(problem)
    exact, _ = system_of(problem).solve(sites, tol=1e-12)
    single = Sites(sites.precision.float(), sites.shift.float(), sites.curvature.float())
    found, _ = system_of(problem, torch.float32).solve(single, tol=1e-5)
    assert found.mean.dtype == found.var.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=0, atol=2e-3)
    torch.testing.assert_close(found.var.double(), exact.var, rtol=1e-3, atol=0)
