"""Conjugate gradients and block Gauss-Seidel against the closed form, and their bookkeeping."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.solvers import gauss_seidel, subsample_preconditioner, weights_cg
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg import NumericalWarning
from tests.covering import slow_case
from tests.reference import weights as reference

N, M, NOISE = 50, 44, 0.2
BASIS = FourierFeatures(RBF(1.0), M, 2, seed=5, block_size=4)
WIDTH = BASIS.block_features


@pytest.fixture
def problem(rng):
    """X, weights, targets (n, 3) scaled by the root weights, and the dense solution."""
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, N))
    targets = rng.standard_normal((N, 3))
    Phi = reference.dense_features(BASIS, X) * np.sqrt(weight.numpy())[:, None]
    return X, weight, torch.from_numpy(targets), reference.ridge(Phi, targets, NOISE)


def relative_error(solution, expected):
    return np.linalg.norm(solution.numpy() - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("block_size", "n_directions", "order"),
    [(1, 4, "cyclic"), (2 * WIDTH, 0, "random"), (2 * WIDTH, 4, "cyclic"), (10**4, 0, "cyclic")],
)
def test_gauss_seidel_converges_to_the_closed_form(
    problem, generator, block_size, n_directions, order
):
    X, weight, targets, expected = problem
    result = gauss_seidel(
        StreamedDesign(BASIS, X, sample_weight=weight),
        targets,
        NOISE,
        block_size=block_size,
        n_directions=n_directions,
        generator=generator if order == "random" else None,
        tol=1e-11,
        max_iter=3000,
    )
    assert result.converged
    assert relative_error(result.solution, expected) < 1e-9


@pytest.mark.parametrize("block_size", [2 * WIDTH, 10**4])
def test_gauss_seidel_solves_blocks_wider_than_n_in_the_dual(problem, block_size):
    X, weight, targets, _ = problem
    X, weight, targets = X[:10], weight[:10], targets[:10]
    Phi = reference.dense_features(BASIS, X) * np.sqrt(weight.numpy())[:, None]
    result = gauss_seidel(
        StreamedDesign(BASIS, X, sample_weight=weight),
        targets,
        NOISE,
        block_size=block_size,
        tol=1e-11,
        max_iter=3000,
    )
    expected = reference.ridge(Phi, targets.numpy(), NOISE)
    assert relative_error(result.solution, expected) < 1e-9


@pytest.mark.parametrize(
    ("dtype", "limit"), [slow_case(torch.float32, 1e-4), (torch.float64, 1e-11)]
)
def test_gauss_seidel_misfit_does_not_drift_over_many_sweeps(problem, dtype, limit):
    X, _, targets, _ = problem
    design = StreamedDesign(BASIS, X, dtype=dtype)
    with pytest.warns(NumericalWarning, match="max_iter=300"):
        result = gauss_seidel(design, targets, 1e-3, block_size=WIDTH, tol=0, max_iter=300)
    misfit = targets - StreamedDesign(BASIS, X).matmul(result.solution)
    assert float((result.misfit - misfit).abs().max()) < limit


def test_gauss_seidel_acceleration_saves_sweeps(problem):
    X, _, targets, _ = problem
    sweeps = [
        gauss_seidel(
            StreamedDesign(BASIS, X),
            targets,
            0.05,
            block_size=WIDTH,
            n_directions=n_directions,
            generator=torch.Generator().manual_seed(0),
            tol=1e-5,
            max_iter=5000,
        ).n_iter
        for n_directions in (0, 4)
    ]
    assert sweeps[1] < sweeps[0] / 7


def test_gauss_seidel_residual_is_the_relative_gradient(problem):
    X, _, targets, _ = problem
    design = StreamedDesign(BASIS, X)
    result = gauss_seidel(design, targets, NOISE, block_size=M, callback=lambda i, info: True)
    torch.testing.assert_close(result.residual, torch.ones(3, dtype=torch.float64))
    tight = gauss_seidel(design, targets, NOISE, block_size=WIDTH, tol=1e-4)
    gradient = design.rmatmul(tight.misfit) - NOISE * tight.solution
    relative = gradient.norm(dim=0) / design.rmatmul(targets).norm(dim=0)
    assert bool((tight.residual <= 1e-4).all()) and bool((relative <= 3e-4).all())


def test_gauss_seidel_of_zero_targets_is_zero(problem):
    X, _, targets, _ = problem
    result = gauss_seidel(StreamedDesign(BASIS, X), torch.zeros_like(targets), NOISE)
    assert result.converged
    assert result.solution.abs().max() == 0


# ---- conjugate gradients ----------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [0, 15, 10**6], ids=["none", "some rows", "all rows"])
@pytest.mark.parametrize("kind", ["fourier", "inducing"])
def test_weights_cg_equals_the_closed_form(problem, generator, kind, n_rows):
    X, weight, targets, _ = problem
    basis = BASIS if kind == "fourier" else WhitenedInducingBasis(RBF(0.7), X[:20])
    Phi = reference.dense_features(basis, X) * np.sqrt(weight.numpy())[:, None]
    design = StreamedDesign(basis, X, sample_weight=weight)
    options = {"n_precondition_rows": n_rows, "generator": generator, "tol": 1e-11}
    result = weights_cg(design, targets, NOISE, **options)
    assert result.converged
    assert relative_error(result.solution, reference.ridge(Phi, targets.numpy(), NOISE)) < 1e-8
    stopped = weights_cg(design, targets, 1e-4, callback=lambda i, info: i == 2, **options)
    if n_rows < N:
        assert stopped.n_iter == 2 and not stopped.converged
        assert stopped.solution.abs().max() > 0


def test_weights_cg_preconditioner_saves_iterations(rng, generator):
    X = torch.from_numpy(rng.standard_normal((600, 2)))
    targets = torch.from_numpy(rng.standard_normal((600, 2)))
    design = StreamedDesign(FourierFeatures(RBF(0.7), 200, 2, seed=0), X)
    iterations = [
        weights_cg(design, targets, 1e-3, n_precondition_rows=p, generator=generator).n_iter
        for p in (0, 150)
    ]
    assert iterations[1] < iterations[0] / 3


def test_subsample_preconditioner_inverts_the_subsampled_matrix(problem, generator):
    X, weight, _, _ = problem
    design = StreamedDesign(BASIS, X, sample_weight=weight)
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(0))[:25].numpy()
    Phi = reference.dense_features(BASIS, X) * np.sqrt(weight.numpy())[:, None]
    P = 2.0 * Phi[chosen].T @ Phi[chosen] + 5 * NOISE * np.eye(M)
    inverse = subsample_preconditioner(design, NOISE, 25, generator=generator)
    identity = torch.eye(M, dtype=torch.float64)
    np.testing.assert_allclose(inverse(identity).numpy(), np.linalg.inv(P), atol=1e-10)
