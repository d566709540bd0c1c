"""The closed form of the square loss against numerical optima, and its variances against refits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar

from skgp.inference.sparse.collapsed import elbo_loss, elbo_posterior, statistics
from skgp.inference.sparse.sparse import SparseState
from skgp.inference.sparse.square_loss import (
    calibrated_variance,
    evidence_ratio,
    ridge,
    square_loss,
    square_loss_path,
    square_posterior,
)
from tests.reference import sparse as dense

BETAS = [1e-3, 0.1, 1.0, 8.0]
weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
kernels = pytest.mark.parametrize("name", list(dense.KERNELS))


def sums_of(problem):
    return statistics(problem.kernel, problem.data, problem.tensors[0])


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


@pytest.mark.parametrize("beta", BETAS)
def test_square_posterior_is_that_of_a_process_with_noise_of_the_ridge(beta):
    """Whatever the common factor of kernel and noise, the mean is the same."""
    problem = dense.make_problem(weighted=True)
    mean, root = square_posterior(sums_of(problem), beta=beta)
    noise = ridge(sums_of(problem), beta)
    assert float(noise) == pytest.approx(beta * mean_prior_variance(problem))
    for factor in (1.0, 0.04):
        scaled = replace(problem, kernel=factor * problem.kernel)
        expected = elbo_posterior(sums_of(scaled), factor * noise)
        torch.testing.assert_close(mean / factor**0.5, expected[0], rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(root, expected[1], rtol=1e-8, atol=1e-8)


def test_square_loss_does_not_depend_on_the_amplitude():
    problem = dense.make_problem()
    scaled = replace(problem, kernel=7.0 * problem.kernel)
    losses = [float(square_loss(sums_of(p), beta=0.2)) for p in (problem, scaled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


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


def test_square_loss_has_the_gradients_of_finite_differences():
    problem = dense.make_problem("sum", n=9, n_inducing=4, weighted=True)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z = problem.tensors[0].requires_grad_()

    def loss(Z, theta):
        return square_loss(statistics(problem.kernel, problem.data, Z, theta), beta=0.2)

    assert torch.autograd.gradcheck(loss, (Z, theta))


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


def test_calibrated_variance_of_weights_is_that_of_repeated_rows():
    problem = dense.make_problem()
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    found, expected = (
        calibrated_variance(p.kernel, p.data, p.tensors[0], sums_of(p), beta=0.1)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    assert found == pytest.approx(expected, rel=1e-8)


def test_calibrated_variance_is_that_of_the_noise():
    """Of 2000 rows: relative standard error of a variance (2 / n)^(1/2) = .03."""
    problem = replace(dense.make_problem(n=2000, n_inducing=40), noise=0.25)
    sums = sums_of(problem)
    factor = calibrated_variance(problem.kernel, problem.data, problem.tensors[0], sums, beta=0.1)
    assert factor * float(ridge(sums, 0.1)) == pytest.approx(0.25, rel=0.12)


def test_calibrated_variance_makes_predictions_of_the_right_width():
    """Standardised errors of fresh rows have a mean square near 1, where s = 1 is far off."""
    problem, fresh = (dense.make_problem(n=400, n_inducing=25, seed=s) for s in (0, 1))
    sums = sums_of(problem)
    factor = calibrated_variance(problem.kernel, problem.data, problem.tensors[0], sums, beta=1.0)
    mean, root = square_posterior(sums, beta=1.0)
    Z = problem.tensors[0]
    zero = torch.zeros(1, dtype=torch.float64)
    state = SparseState(problem.kernel, torch.empty(0), Z, mean, root, zero)
    f_mean, f_var = state.posterior().mean_and_variance(torch.tensor(fresh.X))
    var = f_var + ridge(sums, 1.0)
    square = float(((torch.tensor(fresh.y)[:, None] - f_mean).square() / var).mean())
    assert square / factor == pytest.approx(1.0, abs=0.3) and square < 0.5
