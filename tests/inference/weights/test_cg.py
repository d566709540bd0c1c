"""Block PCG for the weights against the closed form."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights.design import StreamedDesign, WhitenedInducingBasis
from skgp.inference.weights.solvers import subsample_preconditioner, weights_cg
from skgp.kernels.spectral import FourierFeatures
from tests.reference import weights as reference

N, M, NOISE = 120, 60, 0.05
FOURIER = FourierFeatures(RBF(0.7), M, 2, seed=5, block_size=7)


@pytest.fixture
def problem(rng):
    """X, weights and targets scaled by the root weights."""
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, N))
    return X, weight, torch.from_numpy(rng.standard_normal((N, 4)))


@pytest.mark.parametrize("n_rows", [0, 30, 10**6], ids=["none", "some rows", "all rows"])
@pytest.mark.parametrize("kind", ["fourier", "inducing"])
def test_weights_cg_equals_the_closed_form(problem, generator, kind, n_rows):
    X, weight, targets = problem
    basis = FOURIER
    if kind == "inducing":
        basis = WhitenedInducingBasis(RBF(0.7), X[:40])
    Phi = reference.dense_features(basis, X) * np.sqrt(weight.numpy())[:, None]
    expected = reference.ridge(Phi, targets.numpy(), NOISE)
    result = weights_cg(
        StreamedDesign(basis, X, sample_weight=weight),
        targets,
        NOISE,
        n_precondition_rows=n_rows,
        generator=generator,
        tol=1e-11,
    )
    assert result.converged
    error = np.linalg.norm(result.solution.numpy() - expected) / np.linalg.norm(expected)
    assert error < 1e-8


def test_weights_cg_preconditioner_saves_iterations(rng, generator):
    X = torch.from_numpy(rng.standard_normal((600, 2)))
    targets = torch.from_numpy(rng.standard_normal((600, 2)))
    design = StreamedDesign(FourierFeatures(RBF(0.7), 200, 2, seed=0), X)
    iterations = [
        weights_cg(design, targets, 1e-3, n_precondition_rows=p, generator=generator).n_iter
        for p in (0, 150)
    ]
    assert iterations[1] < iterations[0] / 3


def test_weights_cg_callback_stops_and_keeps_the_state(problem, generator):
    X, _, targets = problem
    result = weights_cg(
        StreamedDesign(FOURIER, X),
        targets,
        NOISE,
        n_precondition_rows=0,
        generator=generator,
        callback=lambda iteration, info: iteration == 3,
    )
    assert result.n_iter == 3
    assert not result.converged
    assert result.solution.abs().max() > 0


def test_weights_cg_float32_features_reach_their_accuracy(problem, generator):
    X, _, targets = problem
    expected = reference.ridge(reference.dense_features(FOURIER, X), targets.numpy(), NOISE)
    result = weights_cg(
        StreamedDesign(FOURIER, X, dtype=torch.float32),
        targets,
        NOISE,
        generator=generator,
        tol=1e-5,
    )
    error = np.linalg.norm(result.solution.numpy() - expected) / np.linalg.norm(expected)
    assert error < 1e-3


def test_subsample_preconditioner_inverts_the_subsampled_matrix(problem, generator):
    X, weight, _ = problem
    design = StreamedDesign(FOURIER, X, sample_weight=weight)
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:30].numpy()
    Phi = reference.dense_features(FOURIER, X) * np.sqrt(weight.numpy())[:, None]
    P = 4.0 * Phi[chosen].T @ Phi[chosen] + 13 * NOISE * np.eye(M)
    inverse = subsample_preconditioner(design, NOISE, 30, generator=generator)
    identity = torch.eye(M, dtype=torch.float64)
    np.testing.assert_allclose(inverse(identity).numpy(), np.linalg.inv(P), atol=1e-10)
