"""Pathwise draws: their distribution, whatever solves for them."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.pathwise import pathwise_posterior
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.solvers import gauss_seidel, weights_cg
from skgp.kernels.spectral import FourierFeatures
from tests.reference import weights as reference
from tests.same import assert_same

N, M, NOISE = 30, 16, 0.3
BASIS = FourierFeatures(RBF(1.0), M, 2, seed=5, block_size=4)


@pytest.fixture
def problem(rng):
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    return X, torch.from_numpy(rng.standard_normal(N)), torch.from_numpy(rng.uniform(0.3, 3, N))


def solver(name, design):
    if name == "cg":
        generator = torch.Generator().manual_seed(1)
        return partial(weights_cg, design, noise_variance=NOISE, generator=generator, tol=1e-11)
    return partial(
        gauss_seidel, design, noise_variance=NOISE, block_size=8, tol=1e-11, max_iter=2000
    )


@pytest.mark.parametrize("name", ["cg", "gauss-seidel"])
def test_pathwise_mean_is_exact_and_draws_have_the_posterior_covariance(problem, generator, name):
    X, y, weight = problem
    design = StreamedDesign(BASIS, X, sample_weight=weight)
    n_samples = 500
    posterior, _, _ = pathwise_posterior(
        design, y, NOISE, solver(name, design), n_samples=n_samples, generator=generator
    )
    Phi = reference.dense_features(BASIS, X)
    mean, Sigma = reference.posterior(Phi, y.numpy(), NOISE, weight.numpy())
    np.testing.assert_allclose(posterior.mean_weights.numpy(), mean, rtol=1e-8, atol=1e-10)
    root = posterior.root.numpy()
    spread = np.sqrt((np.outer(np.diag(Sigma), np.diag(Sigma)) + Sigma**2) / n_samples)
    assert np.abs((root @ root.T - Sigma) / spread).max() < 4.2  # 136 of them
    z = root.sum(1) / np.sqrt(np.diag(Sigma))  # sqrt(S) times the mean deviation
    assert np.abs(z).max() < 4


def test_pathwise_misfit_of_the_draws_has_the_inverse_covariance_of_the_data(problem, generator):
    X, y, weight = problem
    design = StreamedDesign(BASIS, X, sample_weight=weight)
    _, _, misfit = pathwise_posterior(
        design, y, NOISE, solver("gauss-seidel", design), n_samples=500, generator=generator
    )
    alpha = misfit.numpy() / NOISE
    C = reference.observation_covariance(reference.dense_features(BASIS, X), NOISE, weight.numpy())
    root = np.sqrt(weight.numpy())
    precision = np.linalg.inv(root[:, None] * C * root)  # rows are scaled by the root weights
    np.testing.assert_allclose(alpha[:, 0], precision @ (root * y.numpy()), rtol=1e-7, atol=1e-9)
    ratio = (alpha[:, 1:] ** 2).mean(1) / np.diag(precision)
    assert np.abs((ratio - 1) / np.sqrt(2 / 500)).max() < 4


def test_pathwise_draws_of_a_solver_that_did_nothing_are_prior_draws(problem, generator):
    X, y, _ = problem
    design = StreamedDesign(BASIS, X)
    idle = partial(
        gauss_seidel, design, noise_variance=NOISE, callback=lambda iteration, info: True
    )

    def solve(targets):
        result = idle(targets)
        result.solution.zero_()
        return result

    posterior, _, _ = pathwise_posterior(design, y, NOISE, solve, n_samples=7, generator=generator)
    generator.manual_seed(3)
    again = pathwise_posterior(design, y, NOISE, solve, n_samples=1000, generator=generator)[0]
    assert posterior.root.shape == (M, 7)
    assert abs(float(again.root.square().sum()) - M) < 4 * (2 * M / 1000) ** 0.5


def test_pathwise_without_samples_has_no_variance(problem, generator):
    X, y, _ = problem
    design = StreamedDesign(BASIS, X)
    posterior, _, misfit = pathwise_posterior(
        design, y, NOISE, solver("cg", design), n_samples=0, generator=generator
    )
    assert misfit.shape == (N, 1)
    assert posterior.mean_and_variance(X)[1].abs().max() == 0
    mean, _ = reference.posterior(reference.dense_features(BASIS, X), y.numpy(), NOISE)
    np.testing.assert_allclose(posterior.mean_weights.numpy(), mean, rtol=1e-8, atol=1e-10)


def test_pathwise_follows_the_generator(problem):
    X, y, _ = problem
    design = StreamedDesign(BASIS, X)
    roots = [
        pathwise_posterior(
            design,
            y,
            NOISE,
            solver("cg", design),
            n_samples=3,
            generator=torch.Generator().manual_seed(seed),
        )[0].root
        for seed in (0, 0, 1)
    ]
    assert_same(roots[0], roots[1])
    assert not torch.equal(roots[0], roots[2])
