"""Closed forms for Gaussian noise against dense n x n matrices, numerical optima and refits."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

from skgp.inference.collapsed import (
    calibrated_variance,
    elbo_loss,
    elbo_posterior,
    evidence_ratio,
    fitc_loss,
    fitc_posterior,
    natural_parameters,
    square_loss,
    square_loss_path,
    square_posterior,
    statistics,
)
from skgp.inference.sparse import posterior_from_precision
from tests.reference import sparse as dense

NAMES = list(dense.KERNELS)


WEIGHTS = [1e-3, 0.3, 1.0, 7.0]


weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


kernels = pytest.mark.parametrize("name", NAMES)


def sums_of(problem, **options):
    return statistics(problem.kernel, problem.data, problem.tensors[0], **options)


def assert_posterior(problem, found, expected):
    """Whitened mean and root against dense moments of u."""
    mean, root = found
    assert mean.shape == (len(problem.Z), 1) and root.shape == (1, *2 * (len(problem.Z),))
    assert torch.equal(root, root.tril())
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    np.testing.assert_allclose(q[0], expected[0], atol=1e-8 * np.abs(expected[0]).max())
    np.testing.assert_allclose(q[1], expected[1], atol=1e-8 * np.abs(expected[1]).max())


# ---- sums over the rows -------------------------------------------------------------------------


@weights
@kernels
def test_statistics_equal_dense_sums(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found, w = sums_of(problem), problem.row_weight
    L = np.linalg.cholesky(dense.inducing_gram(problem.kernel, problem.Z))
    Phi = np.linalg.solve(L, problem.kernel(problem.Z, problem.X))
    np.testing.assert_allclose(found.gram, (Phi * w) @ Phi.T, atol=1e-8)
    np.testing.assert_allclose(found.projection[:, 0], Phi @ (w * problem.y), atol=1e-8)
    assert float(found.sum_square) == pytest.approx(w @ problem.y**2)
    assert float(found.sum_prior) == pytest.approx(w @ problem.kernel.diag(problem.X))
    assert found.total == pytest.approx(w.sum())


@weights
@kernels
def test_statistics_have_the_gradients_of_finite_differences(name, weighted):
    problem = dense.make_problem(name, n=7, n_inducing=3, weighted=weighted)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z = problem.tensors[0].requires_grad_()

    def sums(theta, Z):
        found = statistics(problem.kernel, problem.data, Z, theta, tile=4)
        return found.gram, found.projection, found.sum_prior

    assert torch.autograd.gradcheck(sums, (theta, Z))


# ---- the ELBO -----------------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("beta", WEIGHTS)
@kernels
def test_elbo_loss_equals_the_dense_formula(name, beta, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = float(elbo_loss(sums_of(problem), problem.tensors[1], beta=beta))
    assert found == pytest.approx(dense.elbo_loss(problem, beta), rel=1e-8)


@weights
@pytest.mark.parametrize("beta", WEIGHTS)
@kernels
def test_elbo_posterior_equals_the_dense_formula(name, beta, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = elbo_posterior(sums_of(problem), problem.tensors[1], beta=beta)
    assert_posterior(problem, found, dense.elbo_posterior(problem, beta))


# ---- FITC ---------------------------------------------------------------------------------------


@weights
@kernels
def test_fitc_loss_equals_the_dense_formula(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = float(fitc_loss(problem.kernel, problem.data, *problem.tensors))
    assert found == pytest.approx(dense.fitc_loss(problem), rel=1e-8)


@weights
@kernels
def test_fitc_posterior_equals_the_dense_formula(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = fitc_posterior(problem.kernel, problem.data, *problem.tensors)
    assert_posterior(problem, found, dense.fitc_posterior(problem))


def elbo_at(kernel, data, Z, noise, theta):
    return elbo_loss(statistics(kernel, data, Z, theta), noise, beta=0.4)


@weights
@kernels
@pytest.mark.parametrize("loss", [fitc_loss, elbo_at])
def test_losses_have_the_gradients_of_finite_differences(loss, name, weighted):
    problem = dense.make_problem(name, n=9, n_inducing=4, weighted=weighted)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z, noise = (tensor.requires_grad_() for tensor in problem.tensors)
    assert torch.autograd.gradcheck(partial(loss, problem.kernel, problem.data), (Z, noise, theta))


# ---- natural parameters -------------------------------------------------------------------------


def test_posterior_from_precision_is_the_inverse(rng):
    A = rng.standard_normal((3, 6, 6))
    precision, projection = A @ A.transpose(0, 2, 1) + np.eye(6), rng.standard_normal((6, 3))
    mean, root = posterior_from_precision(torch.tensor(precision), torch.tensor(projection))
    assert torch.equal(root, root.tril()) and (root.diagonal(dim1=1, dim2=2) > 0).all()
    inverse = np.linalg.inv(precision)
    np.testing.assert_allclose(root @ root.mT, inverse, rtol=1e-10, atol=1e-12)
    expected = np.einsum("cij,jc->ic", inverse, projection)
    np.testing.assert_allclose(mean, expected, rtol=1e-10, atol=1e-12)


@weights
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_natural_parameters_are_what_the_rows_add_to_the_prior(beta, weighted):
    problem = dense.make_problem(weighted=weighted)
    eye = torch.eye(len(problem.Z), dtype=torch.float64)
    for fitc, expected in (
        (False, elbo_posterior(sums_of(problem), problem.tensors[1], beta=beta)),
        (True, fitc_posterior(problem.kernel, problem.data, *problem.tensors)),
    ):
        precision, projection = natural_parameters(
            problem.kernel, problem.data, *problem.tensors, beta=beta, fitc=fitc
        )
        found = posterior_from_precision(eye + precision, projection)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)


# ---- the square loss -----------------------------------------------------------------------------

BETAS = [1e-3, 0.1, 1.0, 8.0]


def mean_prior_variance(problem):
    w = problem.row_weight
    return w @ problem.kernel.diag(problem.X) / w.sum()


def minimise_densely(problem, beta):
    """Least of sum_i w_i (mu_i - y_i)^2 / 2 + beta kappa u'Kuu^-1 u / 2 over u, by L-BFGS.

    Over u / their prior standard deviations, mu = Kxu Kuu^-1 u; returns the value and u.
    """
    kernel, Z, w = problem.kernel, problem.Z, problem.row_weight
    prior = dense.inducing_gram(kernel, Z)
    root = np.linalg.cholesky(prior)
    A = np.linalg.solve(prior, kernel(Z, problem.X)).T @ root
    t = beta * mean_prior_variance(problem)

    def loss(v):
        residual = A @ v - problem.y
        value = w @ residual**2 / 2 + t * v @ v / 2
        return value, A.T @ (w * residual) + t * v

    options = {"maxiter": 5000, "maxfun": 10000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30}
    found = minimize(loss, np.zeros(len(Z)), jac=True, method="L-BFGS-B", options=options)
    return found.fun, root @ found.x


@weights
@pytest.mark.parametrize("beta", BETAS)
@kernels
def test_square_loss_and_posterior_equal_the_numerical_optimum(name, beta, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    value, u = minimise_densely(problem, beta)
    sums = sums_of(problem)
    assert float(square_loss(sums, beta=beta)) == pytest.approx(value, rel=1e-8)
    mean, root = square_posterior(sums, beta=beta)
    found, _ = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    np.testing.assert_allclose(found, u, atol=1e-7)


@weights
@kernels
def test_square_loss_path_equals_separate_solves(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    sums = sums_of(problem)
    betas = torch.logspace(-4, 1, 12, dtype=torch.float64)
    path = square_loss_path(sums, betas)
    assert path.shape == (9, 12)
    separate = [square_posterior(sums, beta=beta)[0] for beta in betas.tolist()]
    torch.testing.assert_close(path, torch.cat(separate, dim=1), rtol=1e-7, atol=1e-7)


@weights
@kernels
def test_evidence_ratio_is_that_of_the_greatest_bound(name, weighted):
    """Over noise and amplitude, by the bound itself; whatever the amplitude given."""
    problem = dense.make_problem(name, weighted=weighted)

    def bound(log_noise, log_factor):
        scaled = replace(problem, kernel=np.exp(log_factor) * problem.kernel)
        return float(elbo_loss(sums_of(scaled), torch.tensor(log_noise).exp()))

    def best_of_factor(log_factor):
        return minimize_scalar(lambda v: bound(v, log_factor), bounds=(-8, 4), method="bounded")

    factor = minimize_scalar(lambda v: best_of_factor(v).fun, bounds=(-6, 6), method="bounded").x
    noise = np.exp(best_of_factor(factor).x)
    expected = noise / (np.exp(factor) * mean_prior_variance(problem))
    assert evidence_ratio(sums_of(problem)) == pytest.approx(expected, rel=1e-2)
    scaled = replace(problem, kernel=7.0 * problem.kernel)
    assert evidence_ratio(sums_of(scaled)) == pytest.approx(
        evidence_ratio(sums_of(problem)), rel=1e-5
    )


def test_evidence_ratio_of_constant_targets_is_finite():
    problem = dense.make_problem()
    sums = sums_of(replace(problem, y=np.zeros_like(problem.y)))
    assert 1e-6 <= evidence_ratio(sums) <= 1e3


def left_out_residuals(problem, beta):
    """Squared residual of one observation of each row, over its variance, by explicit refits."""
    noise = beta * mean_prior_variance(problem)
    prior = dense.inducing_gram(problem.kernel, problem.Z)
    features = problem.kernel(problem.X, problem.Z)
    ratios = []
    for i in range(len(problem.y)):
        weight = problem.row_weight.copy()
        weight[i] -= 1.0
        precision = np.linalg.inv(prior)
        A = features @ precision
        S = np.linalg.inv(precision + (A.T * weight) @ A / noise)
        m = S @ A.T @ (weight * problem.y) / noise
        mean, covariance = dense.predict(problem.kernel, problem.X[i : i + 1], problem.Z, m, S)
        ratios.append((problem.y[i] - mean[0]) ** 2 / (covariance[0, 0] + noise))
    return np.array(ratios)


@pytest.mark.parametrize("beta", [0.01, 0.5])
@pytest.mark.parametrize("name", ["rbf", "matern"])
@weights
def test_calibrated_variance_equals_explicit_refits(name, beta, weighted):
    problem = dense.make_problem(name, n=25, n_inducing=6, weighted=weighted)
    expected = np.average(left_out_residuals(problem, beta), weights=problem.row_weight)
    found = calibrated_variance(
        problem.kernel, problem.data, problem.tensors[0], sums_of(problem), beta=beta
    )
    assert found == pytest.approx(expected, rel=1e-6)
