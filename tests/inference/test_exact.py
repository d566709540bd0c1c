"""Function-space fits against scikit-learn's exact GP and the closed-form degenerate posterior."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.inference.exact import CovarianceChoice, fit_dense, fit_iterative
from skgp.inference.pathwise import pivoted_factor
from skgp.kernels import gram
from skgp.linalg.preconditioners import LowRank
from skgp.linalg.runtime import memory_limit
from tests.inference.dense_problems import KERNELS, NOISE, make_problem
from tests.inference.stochastic_problems import z_score
from tests.reference import qsgp as reference

each_kernel = pytest.mark.parametrize("name", KERNELS)
each_weighting = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def new_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def dense(problem, *, generator=None, **wanted):
    return fit_dense(
        problem.kernel, problem.data, problem.noise, CovarianceChoice(**wanted),
        generator=generator or new_generator(),
    )  # fmt: skip


def iterative(problem, **options):
    wanted = dict(kind="samples", prior=problem.exact_prior(), n_samples=4)
    wanted |= {name: options.pop(name) for name in set(options) & set(wanted)}
    return fit_iterative(
        problem.kernel, problem.data, problem.noise, CovarianceChoice(**wanted),
        generator=new_generator(), **{"rank": 10, "tol": 1e-9, **options},
    )  # fmt: skip


# ------------------------------------------------------------------------------------ dense


@each_weighting
@each_kernel
def test_fit_dense_with_a_full_covariance_equals_the_gp_of_scikit_learn(name, weighted):
    problem = make_problem(name, weighted=weighted)
    posterior = dense(problem)
    mean, covariance = problem.exact_prediction()
    found_mean, found_variance = posterior.mean_and_variance(problem.X_test)
    np.testing.assert_allclose(posterior.mean(problem.X_test).numpy(), mean, atol=1e-8)
    np.testing.assert_allclose(found_mean.numpy(), mean, atol=1e-8)
    np.testing.assert_allclose(found_variance.numpy(), np.diag(covariance), atol=1e-8)
    found = posterior.covariance(problem.X_test).numpy()
    np.testing.assert_allclose(found, covariance, atol=1e-8)
    evidence = problem.exact.log_marginal_likelihood_value_
    np.testing.assert_allclose(posterior.log_marginal_likelihood, evidence, rtol=1e-8)
    assert posterior.calibration == 1.0 and posterior.converged


@each_weighting
@each_kernel
def test_fit_dense_without_augmentation_is_the_posterior_of_the_basis(name, weighted):
    """mu and Sigma of eq. (2) with Phi = S = K: k' mu and k' Sigma k."""
    problem = make_problem(name, weighted=weighted)
    Phi, y, K = problem.weighted_basis()
    mu, Sigma = reference.posterior(Phi, K, y, problem.noise)
    k = problem.kernel(problem.X_test.numpy(), problem.X.numpy())
    posterior = dense(problem, augment=False)
    mean, variance = posterior.mean_and_variance(problem.X_test)
    np.testing.assert_allclose(mean.numpy(), k @ mu, atol=1e-8)
    np.testing.assert_allclose(variance.numpy(), np.diag(k @ Sigma @ k.T), atol=1e-8)
    covariance = posterior.covariance(problem.X_test).numpy()
    np.testing.assert_allclose(covariance, k @ Sigma @ k.T, atol=1e-8)
    assert (variance < dense(problem).mean_and_variance(problem.X_test)[1]).all()


# -------------------------------------------------------------------------------- iterative


@each_weighting
@each_kernel
def test_fit_iterative_equals_the_dense_mean(name, weighted):
    problem = make_problem(name, weighted=weighted)
    posterior = iterative(problem)
    expected = dense(problem).mean(problem.X_test)
    # Entries are stored in float32.
    torch.testing.assert_close(posterior.mean(problem.X_test), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("budget", [0, 8e9], ids=["recomputed", "stored"])
@pytest.mark.parametrize("rank", [1, 30])
def test_fit_iterative_does_not_depend_on_preconditioner_or_storage(rank, budget):
    problem = make_problem()
    with memory_limit(budget):
        posterior = iterative(problem, rank=rank)
    expected = dense(problem).mean(problem.X_test)
    torch.testing.assert_close(posterior.mean(problem.X_test), expected, rtol=0, atol=1e-6)


def test_fit_iterative_reports_the_true_residual():
    problem = make_problem()
    short = iterative(problem, max_iter=3, rank=1)
    A = gram(problem.kernel, problem.X) + problem.noise * torch.eye(30)
    residual = torch.linalg.vector_norm(problem.y - A @ short.weights) / problem.y.norm()
    np.testing.assert_allclose(short.residual, float(residual), rtol=1e-4)
    Y = torch.stack([problem.y, problem.y.sign()], 1)
    both = iterative(replace(problem, y=Y), max_iter=3, rank=1)
    residual = torch.linalg.vector_norm(Y - A @ both.weights, dim=0) / Y.norm(dim=0)
    np.testing.assert_allclose(both.residual, float(residual.max()), rtol=1e-4)  # of the worst
    assert residual.min() < 0.95 * residual.max()
    assert short.n_iter == 3 and len(short.history) == 3 and not short.converged
    whole = iterative(problem, tol=1e-5)
    assert whole.converged and whole.residual < 1e-4


@each_weighting
def test_fit_iterative_diagonal_equals_that_of_the_dense_fit(weighted):
    problem = make_problem(weighted=weighted)
    found, expected = (
        fit(problem, kind="diagonal").mean_and_variance(problem.X_test)[1]
        for fit in (iterative, dense)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_pivoted_factor_stops_at_its_tolerance_and_bounds_the_error():
    problem = make_problem("matern32", n=300)
    K = gram(problem.kernel, problem.X)
    low_rank = pivoted_factor(problem.kernel, problem.X, 300, generator=new_generator(), tol=0.1)
    assert isinstance(low_rank, LowRank) and low_rank.factor.shape[1] < 300
    error = K - low_rank.factor @ low_rank.factor.T
    assert torch.linalg.eigvalsh(error).min() > -1e-10
    assert float(error.trace()) <= 0.1 * float(K.trace())
    torch.testing.assert_close(error.diagonal(), low_rank.residual_diag, rtol=0, atol=1e-10)


# ------------------------------------------------------------------- draws and calibration


@each_weighting
@pytest.mark.parametrize("fit", [dense, iterative], ids=["dense", "iterative"])
def test_pathwise_variance_is_unbiased(fit, weighted):
    problem = make_problem(weighted=weighted)
    posterior = fit(problem, kind="samples", prior=problem.exact_prior(), n_samples=4000)
    deviations = posterior.uncertainty.deviations(problem.kernel, problem.X_test, problem.X)
    exact = problem.exact_prediction()[1]
    samples = deviations.T.numpy()  # (4000, 7)
    assert z_score(samples, np.zeros(7)) < 4
    assert z_score(samples[:, :, None] * samples[:, None, :], exact) < 4
    variance = posterior.mean_and_variance(problem.X_test)[1].numpy()
    np.testing.assert_allclose(variance, np.mean(samples**2, axis=0), rtol=1e-10)
    covariance = posterior.covariance(problem.X_test).numpy()
    np.testing.assert_allclose(covariance, samples.T @ samples / 4000, rtol=1e-10, atol=1e-12)


def test_calibration_is_that_of_the_exact_inverse():
    problem = make_problem(weighted=True)
    A = problem.kernel(problem.X.numpy()) + np.diag(NOISE / problem.row_weight)
    inverse = np.linalg.inv(A)
    alpha = inverse @ problem.y.numpy()
    # Leave-one-out residuals alpha_i / d_i over their standard deviations, squared.
    expected = np.mean(alpha**2 / np.diag(inverse))
    fits = (
        fit(problem, kind="samples", prior=problem.exact_prior(), n_samples=4000)
        for fit in (dense, iterative)
    )
    for posterior in fits:
        np.testing.assert_allclose(posterior.calibration, expected, rtol=0.03)


def test_draws_are_solved_whatever_the_size_of_the_targets():
    """Held to the size of the targets' residual they were 0, and the calibration infinite."""
    problem = make_problem()
    options = dict(kind="samples", prior=problem.exact_prior(), n_samples=400)
    huge = replace(problem, y=1e7 + problem.y)
    found, expected = (iterative(each, tol=1e-5, **options) for each in (huge, problem))
    variances = [each.mean_and_variance(problem.X_test)[1] for each in (found, expected)]
    np.testing.assert_allclose(*variances, rtol=0.05)
    np.testing.assert_allclose(found.calibration, dense(huge, **options).calibration, rtol=0.05)
