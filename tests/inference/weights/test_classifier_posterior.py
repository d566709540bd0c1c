"""Predictions of several latent functions against the dense formula."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.laplace import laplace_covariance
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.weights import posterior as posterior_module
from skgp.inference.weights.design import StreamedDesign, WhitenedInducingBasis
from skgp.inference.weights.posterior import ClassifierPosterior, WeightGaussian
from skgp.kernels.spectral import FourierFeatures
from skgp.likelihoods import Bernoulli
from tests.inference.weights.test_design import CountingBasis
from tests.reference.weights import dense_features
from tests.same import assert_same

P, M, C = 23, 20, 3
BASIS = FourierFeatures(2.0 * RBF(1.2), M, 2, seed=3, block_size=3)


@pytest.fixture
def X(rng):
    return torch.from_numpy(rng.standard_normal((P, 2)))


@pytest.fixture
def weights(rng):
    return torch.from_numpy(rng.standard_normal((M, C)))


OFFSET = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def gaussians(rng, n_dense):
    """Random factors with `n_dense` dense columns."""
    return [
        WeightGaussian(
            torch.zeros(M, dtype=torch.float64),
            torch.from_numpy(np.tril(rng.standard_normal((M, n_dense)), -1) + np.eye(M, n_dense)),
            torch.from_numpy(rng.uniform(0.5, 2.0, M - n_dense)),
        )
        for _ in range(C)
    ]


@pytest.mark.parametrize("n_dense", [0, 4, 7, M], ids=["diagonal", "chevron", "straddling", "full"])
@pytest.mark.parametrize("tile_bytes", [1, 2**27], ids=["row tiles", "one tile"])
def test_posterior_equals_the_dense_formula(X, weights, rng, n_dense, tile_bytes, monkeypatch):
    monkeypatch.setattr(posterior_module, "PRODUCT_BYTES", tile_bytes)
    qs = gaussians(rng, n_dense)
    posterior = ClassifierPosterior(BASIS, weights, OFFSET, qs)
    mean, variance = posterior.mean_and_variance(X)
    Phi = dense_features(BASIS, X)
    expected = Phi @ weights.numpy() + OFFSET.numpy()
    np.testing.assert_allclose(mean.numpy(), expected, atol=1e-13)
    np.testing.assert_allclose(posterior.mean(X).numpy(), expected, atol=1e-13)
    for j, q in enumerate(qs):
        expected = ((Phi @ q.factor().numpy()) ** 2).sum(1)
        np.testing.assert_allclose(variance[:, j].numpy(), expected, rtol=1e-6)


def test_posterior_without_covariance_has_no_variance(X, weights):
    posterior = ClassifierPosterior(BASIS, weights, OFFSET)
    mean, variance = posterior.mean_and_variance(X)
    assert_same(mean, posterior.mean(X))
    assert torch.equal(variance, torch.zeros(P, C, dtype=torch.float64))


@pytest.mark.parametrize("n_dense", [0, 4, M])
def test_posterior_of_a_row_ignores_the_other_rows(X, weights, rng, n_dense):
    posterior = ClassifierPosterior(BASIS, weights, OFFSET, gaussians(rng, n_dense))
    together = posterior.mean_and_variance(X)
    alone = [posterior.mean_and_variance(X[i : i + 1]) for i in range(P)]
    for moment in (0, 1):
        single = torch.cat([moments[moment] for moments in alone])
        np.testing.assert_allclose(single.numpy(), together[moment].numpy(), rtol=1e-12)


def test_posterior_predicts_in_float64_and_no_rows(X, weights, rng):
    posterior = ClassifierPosterior(BASIS, weights, OFFSET, gaussians(rng, 4))
    rounded = X.float()
    for single, double in zip(
        posterior.mean_and_variance(rounded),
        posterior.mean_and_variance(rounded.double()),
        strict=True,
    ):
        assert single.dtype == torch.float64
        assert_same(single, double)
    assert posterior.mean(rounded).dtype == torch.float64
    assert [moment.shape for moment in posterior.mean_and_variance(X[:0])] == [(0, C)] * 2


def test_posterior_generates_features_once_for_all_columns(X, weights, rng):
    basis = CountingBasis(BASIS)
    ClassifierPosterior(basis, weights, OFFSET, gaussians(rng, 4)).mean_and_variance(X)
    assert basis.rows == P * BASIS.n_blocks


@pytest.mark.parametrize("n_dense", [None, 0, 4, M])
def test_posterior_pickles_as_arrays(X, weights, rng, n_dense):
    covariance = None if n_dense is None else gaussians(rng, n_dense)
    posterior = ClassifierPosterior(BASIS, weights, OFFSET, covariance)
    assert not any(isinstance(value, torch.Tensor) for value in posterior.__getstate__().values())
    again = pickle.loads(pickle.dumps(posterior))
    for first, second in zip(
        posterior.mean_and_variance(X), again.mean_and_variance(X), strict=True
    ):
        assert_same(first, second)


def test_posterior_equals_laplace_gaussian_process(rng):
    """Latent moments of scikit-learn's classifier, with features whose Gram matrix is K."""
    X = torch.from_numpy(rng.standard_normal((30, 2)))
    y = torch.where(X[:, :1] + X[:, 1:] > 0.2, 1.0, -1.0).double()
    X_new = torch.from_numpy(rng.standard_normal((8, 2)))
    kernel = 3.0 * RBF(0.9)
    oracle = GaussianProcessClassifier(kernel, optimizer=None, max_iter_predict=1000)
    oracle.fit(X.numpy(), y[:, 0].numpy())
    mean, variance = oracle.latent_mean_and_variance(X_new.numpy())
    basis = WhitenedInducingBasis(kernel, torch.cat([X, X_new]))
    design = StreamedDesign(basis, X)
    generator = torch.Generator().manual_seed(0)
    problem = newton_problem(design, y, Bernoulli())
    fit = fit_newton(problem, tol=1e-11, loss_tol=0.0, generator=generator)
    covariance = laplace_covariance(design, problem.curvature(fit.latent), kind="full")
    posterior = ClassifierPosterior(basis, fit.weights, torch.zeros(1), covariance)
    actual = posterior.mean_and_variance(X_new)
    np.testing.assert_allclose(actual[0][:, 0].numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(actual[1][:, 0].numpy(), variance, rtol=1e-6)


def test_posterior_refuses_shapes_that_do_not_fit(weights, rng):
    qs = gaussians(rng, 4)
    with pytest.raises(ValueError, match=r"weights must have shape \(20, 3\); got \(20, 2\)"):
        ClassifierPosterior(BASIS, weights[:, 1:], OFFSET)
    with pytest.raises(ValueError, match="covariance must hold 3 Gaussians over 20 weights"):
        ClassifierPosterior(BASIS, weights, OFFSET, qs[1:])
    with pytest.raises(ValueError, match="same number of dense columns"):
        ClassifierPosterior(BASIS, weights, OFFSET, [*qs[1:], gaussians(rng, 0)[0]])
