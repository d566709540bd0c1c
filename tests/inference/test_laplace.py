"""Laplace covariances and evidence in weight space against dense oracles."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.laplace import laplace_covariance, log_evidence
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.weights.design import StreamedDesign
from skgp.kernels.spectral import FourierFeatures
from skgp.likelihoods import Bernoulli
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import memory_limit
from tests.reference import laplace as reference
from tests.reference import qsgp
from tests.reference.weights import dense_features

N, M, C = 40, 12, 2
BASIS = FourierFeatures(3.0 * RBF(1.2), M, 2, seed=3, block_size=2)
A = np.array([0.7, 5.0])


@pytest.fixture
def X(rng):
    return torch.from_numpy(rng.standard_normal((N, 2)))


@pytest.fixture
def curvature(rng):
    return torch.from_numpy(rng.uniform(0.0, 0.25, (N, C)))


@pytest.fixture(params=[0, 10**9], ids=["streamed", "stored"])
def design(X, request):
    with memory_limit(request.param):
        return StreamedDesign(BASIS, X)


@pytest.mark.parametrize(("kind", "n_dense"), [("diagonal", 0), ("chevron", 5)])
def test_laplace_covariance_is_the_best_of_its_structure(X, design, curvature, kind, n_dense):
    """The minimiser of tr(C'HC) - 2 sum log c_rr that L-BFGS finds over the free entries."""
    options = {"kind": kind, "n_dense_columns": 5, "prior_variance": torch.from_numpy(A)}
    Phi = dense_features(BASIS, X)
    for j, q in enumerate(laplace_covariance(design, curvature, **options)):
        root = np.sqrt(curvature[:, [j]].numpy()) * Phi
        _, expected = qsgp.minimise_covariance_objective(root, 1.0, np.eye(M) / A[j], n_dense)
        assert q.n_dense == n_dense
        np.testing.assert_allclose(q.factor().numpy(), expected, atol=1e-5)


def test_laplace_covariance_reports_jitter(X):
    """Duplicated features under a prior too wide to tell them apart."""
    basis = FourierFeatures(RBF(1e8), M, 2, seed=0)
    ones = torch.ones(N, 1, dtype=torch.float64)
    with pytest.warns(NumericalWarning, match="needed a jitter"):
        laplace_covariance(StreamedDesign(basis, X), ones, prior_variance=1e40)


@pytest.mark.parametrize("weighted", [False, True])
def test_log_evidence_equals_the_dense_oracle(X, design, rng, weighted):
    y = torch.from_numpy(np.where(rng.uniform(size=(N, C)) < 0.4, 1.0, -1.0))
    weight = torch.from_numpy(rng.uniform(0, 2, N)) if weighted else None
    offset, a = torch.tensor([0.2, -0.5]), torch.from_numpy(A)
    options = {"offset": offset, "prior_variance": a, "row_weight": weight}
    problem = newton_problem(design, y, Bernoulli(), **options)
    generator = torch.Generator().manual_seed(0)
    fit = fit_newton(problem, tol=1e-11, loss_tol=0, generator=generator)
    curvature = problem.curvature(fit.latent)
    q = laplace_covariance(design, curvature, prior_variance=a)
    evidence = log_evidence(fit, q, prior_variance=a)
    Phi = dense_features(BASIS, X)
    counts = None if weight is None else weight.numpy()
    for j in range(C):
        expected = reference.log_evidence(Phi, y[:, j].numpy(), float(offset[j]), A[j], counts)
        np.testing.assert_allclose(float(evidence[j]), expected, rtol=1e-10)
    expected = reference.curvature(Phi, fit.weights[:, 0].numpy(), float(offset[0]), counts)
    np.testing.assert_allclose(curvature[:, 0].numpy(), expected, rtol=1e-9)


def test_laplace_covariance_refuses_invalid_input(X, design, curvature):
    weighted = StreamedDesign(BASIS, X, sample_weight=torch.ones(N))
    for message, arguments, options in [
        ("must have no sample_weight", (weighted, curvature), {}),
        (r"curvature must have shape \(40, c\); got \(39, 2\)", (design, curvature[1:]), {}),
        ("curvature must be finite and not negative", (design, -curvature), {}),
        ("prior_variance must be positive", (design, curvature), {"prior_variance": -1.0}),
    ]:
        with pytest.raises(ValueError, match=message):
            laplace_covariance(*arguments, **options)
