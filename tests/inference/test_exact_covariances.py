"""Covariances over the basis K against dense optimisers, closed forms and z-tests."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from skgp.inference.exact import (
    CovarianceChoice,
    DenseCovariance,
    WeightCovariance,
    weight_covariance,
)
from skgp.inference.pathwise import (
    PathwiseCovariance,
    leave_one_out_z2,
    perturbed_targets,
    prior_draws,
)
from skgp.inference.weights.posterior import WeightGaussian
from skgp.kernels import FourierFeatures
from skgp.linalg.runtime import memory_limit
from tests.inference.dense_problems import KERNELS, NOISE, make_problem
from tests.inference.stochastic_problems import z_score
from tests.reference import qsgp as reference

each_kernel = pytest.mark.parametrize("name", KERNELS)
each_weighting = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def fitted(problem, covariance, *, n_dense_columns=3, augment=False):
    wanted = CovarianceChoice(covariance, augment, n_dense_columns)
    return weight_covariance(problem.kernel, problem.data, problem.noise, wanted)


def variance_of(covariance, problem, X=None):
    X = problem.X_test if X is None else X
    return covariance.variance(problem.kernel, X, problem.X).numpy()


# ----------------------------------------------------------------- diagonal and chevron C


@each_weighting
@each_kernel
def test_diagonal_is_the_optimum_of_a_dense_optimiser(name, weighted):
    """Prop. 1 in the basis K, row-weighted: Phi' W Phi takes the place of Phi' Phi."""
    problem = make_problem(name, weighted=weighted, n=12)
    Phi, _, K = problem.weighted_basis()
    covariance = fitted(problem, "diagonal")
    C = covariance.q.factor().numpy()
    optimum, best_C = reference.minimise_covariance_objective(Phi, NOISE, K, 0)
    value = reference.loss_sigma(Phi, K, C, NOISE)
    np.testing.assert_allclose(value, optimum, rtol=1e-8)
    np.testing.assert_allclose(C, best_C, rtol=1e-5, atol=1e-8)
    k = problem.kernel(problem.X_test.numpy(), problem.X.numpy())
    expected = ((k @ C) ** 2).sum(1)
    np.testing.assert_allclose(variance_of(covariance, problem), expected, rtol=1e-10)


@each_weighting
@pytest.mark.parametrize("n_dense", [1, 4, 8])
@each_kernel
def test_chevron_is_the_optimum_of_a_dense_optimiser(name, n_dense, weighted):
    problem = make_problem(name, weighted=weighted, n=8)
    Phi, _, K = problem.weighted_basis()
    covariance = fitted(problem, "chevron", n_dense_columns=n_dense)
    C = covariance.q.factor().numpy()
    optimum, best_C = reference.minimise_covariance_objective(Phi, NOISE, K, n_dense)
    assert reference.loss_sigma(Phi, K, C, NOISE) <= optimum + 1e-9 * abs(optimum)
    k = problem.kernel(problem.X_test.numpy(), problem.X.numpy())
    np.testing.assert_allclose(variance_of(covariance, problem), ((k @ C) ** 2).sum(1), rtol=1e-10)
    np.testing.assert_allclose(k @ C, k @ best_C, atol=1e-4)


# --------------------------------------------------------------------------- Proposition 4


def augmentation_optimum(problem, row):
    """Appendix G: the new function's own variance, k(x, x)^2 c^2, at the best c."""
    X = np.concatenate([problem.X.numpy(), row[None]])
    S = problem.kernel(X)
    Phi = np.sqrt(problem.row_weight)[:, None] * problem.kernel(problem.X.numpy(), X)

    def loss(c):
        C = np.eye(len(S))
        C[-1, -1] = c
        return reference.loss_sigma(Phi, S, C, problem.noise)

    best = minimize_scalar(loss, bounds=(1e-5, 10), method="bounded", options={"xatol": 1e-10})
    return (best.x * S[-1, -1]) ** 2


@each_weighting
@pytest.mark.parametrize("kind", ["diagonal", "chevron"])
@each_kernel
def test_augmentation_is_the_numerical_optimum_of_the_augmented_objective(name, kind, weighted):
    problem = make_problem(name, weighted=weighted, n=15)
    added = variance_of(fitted(problem, kind, augment=True), problem)
    added -= variance_of(fitted(problem, kind), problem)
    for row, value in zip(problem.X_test.numpy(), added, strict=True):
        np.testing.assert_allclose(value, augmentation_optimum(problem, row), rtol=1e-5)


@each_weighting
def test_augmentation_of_points_that_stand_for_several_rows(weighted):
    """`rows_per_point` = 3 and every training row thrice are the same sums."""
    problem = make_problem(weighted=weighted, n=10)
    q = WeightGaussian.diagonal(torch.zeros(10).double(), torch.full((10,), 1e-9).double())
    one = WeightCovariance(q, NOISE, True, rows_per_point=3.0, row_weight=problem.weight)
    thrice = make_problem(weighted=weighted, n=10)
    thrice.X = problem.X.repeat(3, 1)
    thrice.weight = None if problem.weight is None else problem.weight.repeat(3)
    for row, value in zip(problem.X_test.numpy(), variance_of(one, problem), strict=True):
        S = problem.kernel(row[None])[0, 0]
        k = thrice.kernel(row[None], thrice.X.numpy())[0]
        weight = 1.0 if thrice.weight is None else thrice.weight.numpy()
        expected = S**2 / (np.sum(weight * k**2) / NOISE + S)
        np.testing.assert_allclose(value, expected, rtol=1e-10)


def test_augmentation_has_the_correlation_of_the_prior():
    problem = make_problem()
    plain, augmented = (
        fitted(problem, "chevron", augment=augment).covariance(
            problem.kernel, problem.X_test, problem.X
        )
        for augment in (False, True)
    )
    added = (augmented - plain).numpy()
    std, K = np.sqrt(added.diagonal()), problem.kernel(problem.X_test.numpy())
    prior_std = np.sqrt(K.diagonal())
    correlation = K / prior_std[:, None] / prior_std
    np.testing.assert_allclose(added, std[:, None] * correlation * std, rtol=1e-8, atol=1e-12)


# ------------------------------------------------------------------------- whole interface


def each_covariance(problem):
    A = torch.from_numpy(problem.kernel(problem.X.numpy()))
    factor = torch.linalg.cholesky(A + NOISE * torch.eye(30))
    prior = FourierFeatures(problem.kernel, 40, 2, seed=0)
    weights, targets = perturbed_targets(prior, problem.X, NOISE, 5, torch.Generator())
    return {
        "dense": DenseCovariance(factor),
        "degenerate": DenseCovariance(factor, torch.linalg.cholesky(A)),
        "diagonal": fitted(problem, "diagonal", augment=True),
        "chevron": fitted(problem, "chevron"),
        "pathwise": PathwiseCovariance(prior, weights, torch.cholesky_solve(targets, factor)),
    }


@pytest.mark.parametrize("name", ["dense", "degenerate", "diagonal", "chevron", "pathwise"])
def test_variance_is_the_diagonal_of_the_covariance(name):
    problem = make_problem()
    covariance = each_covariance(problem)[name]
    whole = covariance.covariance(problem.kernel, problem.X_test, problem.X)
    np.testing.assert_allclose(variance_of(covariance, problem), whole.diagonal(), rtol=1e-9)
    assert torch.linalg.eigvalsh(whole).min() > -1e-12
    torch.testing.assert_close(whole, whole.T, rtol=0, atol=1e-12)


# ------------------------------------------------------------------- calibration by draws


@pytest.mark.parametrize("n_samples", [10, 40])
def test_leave_one_out_z2_is_unbiased_for_few_draws(n_samples):
    """Against the leave-one-out residuals of eqs. 5.10-5.12 of Rasmussen and Williams."""
    problem = make_problem(weighted=True, n=8)
    A = problem.kernel(problem.X.numpy()) + np.diag(NOISE / problem.row_weight)
    inverse = np.linalg.inv(A)
    alpha = inverse @ problem.y.numpy()
    rng = np.random.default_rng(0)
    betas = rng.multivariate_normal(np.zeros(8), inverse, size=(4000, n_samples))
    found = [leave_one_out_z2(torch.tensor(alpha), torch.tensor(b.T)) for b in betas]
    assert z_score(np.array(found)[:, None], [np.mean(alpha**2 / np.diag(inverse))]) < 4


def test_leave_one_out_z2_is_one_where_draws_say_nothing():
    weights = torch.ones(4, dtype=torch.float64)
    assert leave_one_out_z2(weights, torch.ones(4, 2, dtype=torch.float64)) == 1.0
    assert leave_one_out_z2(0 * weights, torch.ones(4, 9, dtype=torch.float64)) == 1.0


# ------------------------------------------------------------------------------ prior draws


@each_weighting
def test_perturbed_targets_have_the_covariance_of_the_targets(weighted):
    problem = make_problem(weighted=weighted, n=6)
    prior = problem.exact_prior()
    row_noise = NOISE if problem.weight is None else NOISE / problem.weight
    generator = torch.Generator().manual_seed(0)
    weights, targets = perturbed_targets(prior, problem.X, row_noise, 5000, generator)
    expected = problem.kernel(problem.X.numpy()) + np.diag(NOISE / problem.row_weight)
    samples = targets.T.numpy()
    assert z_score(samples, np.zeros(6)) < 4
    assert z_score(samples[:, :, None] * samples[:, None, :], expected) < 4
    # What is left after the draw of f is the noise alone.
    noise = samples - prior_draws(prior, problem.X, weights).T.numpy()
    assert z_score(noise**2, NOISE / problem.row_weight) < 4


@pytest.mark.parametrize("budget", [0.0, 8000.0, 1e9])
def test_prior_draws_do_not_depend_on_the_tiles(budget):
    problem = make_problem()
    prior = FourierFeatures(problem.kernel, 50, 2, seed=0, block_size=9)
    weights = torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double()
    with memory_limit(budget):
        draws = prior_draws(prior, problem.X, weights)
    expected = prior.all_features(problem.X) @ weights
    torch.testing.assert_close(draws, expected, rtol=1e-12, atol=1e-12)
