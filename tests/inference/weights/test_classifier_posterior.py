"""Predictions of several latent functions against the dense formula."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights import posterior as posterior_module
from skgp.inference.weights.posterior import ClassifierPosterior, WeightGaussian
from skgp.kernels.spectral import FourierFeatures
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


def test_posterior_refuses_shapes_that_do_not_fit(weights, rng):
    qs = gaussians(rng, 4)
    with pytest.raises(ValueError, match=r"weights must have shape \(20, 3\); got \(20, 2\)"):
        ClassifierPosterior(BASIS, weights[:, 1:], OFFSET)
    with pytest.raises(ValueError, match="covariance must hold 3 Gaussians over 20 weights"):
        ClassifierPosterior(BASIS, weights, OFFSET, qs[1:])
    with pytest.raises(ValueError, match="same number of dense columns"):
        ClassifierPosterior(BASIS, weights, OFFSET, [*qs[1:], gaussians(rng, 0)[0]])
