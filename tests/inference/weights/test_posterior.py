"""Predictions of a weight posterior, the Gram posterior and the whitened inducing basis."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.weights import posterior as posterior_module
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.gram import StreamingGram, gram_posterior
from skgp.inference.weights.posterior import (
    ClassifierPosterior,
    LinearWeightsPosterior,
    WeightGaussian,
)
from skgp.kernels.spectral import FourierFeatures
from tests.inference.weights.test_design import CountingBasis
from tests.reference import weights as reference
from tests.same import assert_same

N, M, NOISE = 40, 18, 0.1
FOURIER = FourierFeatures(RBF(1.0), M, 2, seed=3, block_size=4)


@pytest.fixture
def data(rng):
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    return X, torch.from_numpy(rng.standard_normal(N)), torch.from_numpy(rng.uniform(0.5, 2, N))


@pytest.fixture
def X_new(rng):
    return torch.from_numpy(rng.standard_normal((9, 2)))


def random_posterior(rng, n_root=3, n_tail=M - 3):
    mean, root = rng.standard_normal(M), rng.standard_normal((M, n_root))
    std = rng.uniform(0.5, 1.5, n_tail)
    Sigma = root @ root.T + np.diag(np.concatenate([np.zeros(M - n_tail), std**2]))
    tensors = [torch.from_numpy(a) for a in (mean, root, std)]
    return LinearWeightsPosterior(FOURIER, *tensors), mean, Sigma


@pytest.mark.parametrize(("n_root", "n_tail"), [(0, M), (3, M - 3), (5, 0), (M, 0), (2, 9)])
def test_posterior_predictions_equal_dense_ones(rng, X_new, monkeypatch, n_root, n_tail):
    monkeypatch.setattr(posterior_module, "PRODUCT_BYTES", 100)  # a few rows at a time
    posterior, mean, Sigma = random_posterior(rng, n_root, n_tail)
    Phi = reference.dense_features(FOURIER, X_new)
    np.testing.assert_allclose(posterior.mean(X_new).numpy(), Phi @ mean, atol=1e-13)
    covariance = Phi @ Sigma @ Phi.T
    np.testing.assert_allclose(posterior.covariance(X_new).numpy(), covariance, atol=1e-12)
    both = posterior.mean_and_variance(X_new)
    np.testing.assert_allclose(both[0].numpy(), Phi @ mean, atol=1e-13)
    np.testing.assert_allclose(both[1].numpy(), np.diag(covariance), atol=1e-12)


def test_posterior_sample_has_its_moments(rng, generator):
    posterior, _, Sigma = random_posterior(rng, 2, 9)
    n_samples = 20_000
    deviations = posterior.sample_deviations(n_samples, generator).numpy()
    z = deviations.mean(1)[M - 9 :] / np.sqrt(np.diag(Sigma)[M - 9 :] / n_samples)
    assert np.abs(z).max() < 4
    error = deviations @ deviations.T / n_samples - Sigma
    spread = np.sqrt((np.outer(np.diag(Sigma), np.diag(Sigma)) + Sigma**2) / n_samples)
    assert np.abs(error / np.maximum(spread, 1e-12)).max() < 4.5  # 171 of them


def test_posterior_from_deviations_divides_by_their_number(rng, X_new):
    deviations = rng.standard_normal((M, 6))
    posterior = LinearWeightsPosterior.from_deviations(
        FOURIER, torch.zeros(M), torch.from_numpy(deviations)
    )
    f = reference.dense_features(FOURIER, X_new) @ deviations
    variance = posterior.mean_and_variance(X_new)[1].numpy()
    np.testing.assert_allclose(variance, (f**2).mean(1), atol=1e-13)


# ---- several latent functions -----------------------------------------------------------------

C = 3
OFFSET = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


@pytest.fixture
def weights(rng):
    return torch.from_numpy(rng.standard_normal((M, C)))


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
def test_classifier_posterior_equals_the_dense_formula(
    X_new, weights, rng, n_dense, tile_bytes, monkeypatch
):
    monkeypatch.setattr(posterior_module, "PRODUCT_BYTES", tile_bytes)
    qs = gaussians(rng, n_dense)
    posterior = ClassifierPosterior(FOURIER, weights, OFFSET, qs)
    mean, variance = posterior.mean_and_variance(X_new)
    Phi = reference.dense_features(FOURIER, X_new)
    expected = Phi @ weights.numpy() + OFFSET.numpy()
    np.testing.assert_allclose(mean.numpy(), expected, atol=1e-13)
    np.testing.assert_allclose(posterior.mean(X_new).numpy(), expected, atol=1e-13)
    for j, q in enumerate(qs):
        expected = ((Phi @ q.factor().numpy()) ** 2).sum(1)
        np.testing.assert_allclose(variance[:, j].numpy(), expected, rtol=1e-6)


def test_classifier_posterior_predicts_in_float64_and_no_rows(X_new, weights, rng):
    posterior = ClassifierPosterior(FOURIER, weights, OFFSET, gaussians(rng, 4))
    rounded = X_new.float()
    for single, double in zip(
        posterior.mean_and_variance(rounded),
        posterior.mean_and_variance(rounded.double()),
        strict=True,
    ):
        assert single.dtype == torch.float64
        assert_same(single, double)
    assert posterior.mean(rounded).dtype == torch.float64
    assert [moment.shape for moment in posterior.mean_and_variance(X_new[:0])] == [(0, C)] * 2


def test_classifier_posterior_generates_features_once_for_all_columns(X_new, weights, rng):
    basis = CountingBasis(FOURIER)
    ClassifierPosterior(basis, weights, OFFSET, gaussians(rng, 4)).mean_and_variance(X_new)
    assert basis.rows == len(X_new) * FOURIER.n_blocks


# ---- the Gram posterior and inducing points ---------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_gram_posterior_equals_the_closed_form(data, X_new, weighted):
    X, y, weight = data
    weight = weight if weighted else None
    Phi, Phi_new = (reference.dense_features(FOURIER, rows) for rows in (X, X_new))
    mean, Sigma = reference.posterior(
        Phi, y.numpy(), NOISE, None if weight is None else weight.numpy(), 1.0
    )
    posterior = gram_posterior(StreamingGram(FOURIER).update(X, y, weight), NOISE)
    np.testing.assert_allclose(posterior.mean(X_new).numpy(), Phi_new @ mean, rtol=1e-8)
    np.testing.assert_allclose(
        posterior.covariance(X_new).numpy(), Phi_new @ Sigma @ Phi_new.T, rtol=1e-8, atol=1e-12
    )


def test_whitened_basis_computes_in_float64_for_float32_inputs(data):
    X, Z = data[0].float(), data[0][:20]
    basis = WhitenedInducingBasis(RBF(2.0), Z)  # condition number of k(Z, Z) above 1e9
    features = basis.features(X, 0)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, basis.features(X.double(), 0).float())


def test_whitened_basis_pickle_leaves_the_factor_out(data):
    basis = WhitenedInducingBasis(RBF(0.8), data[0])
    state = pickle.dumps(basis)
    assert len(state) < 8 * N * N
    assert_same(pickle.loads(state).features(data[0], 0), basis.features(data[0], 0))


def test_whitened_basis_in_single_precision_is_close(data):
    X, Z = data[0], 3.0 * data[0][:8]
    basis = WhitenedInducingBasis(ConstantKernel(4.0) * RBF(0.8), Z)
    fast = basis.in_single_precision(X[::2])
    assert fast.single and not basis.single and fast.n_blocks == basis.n_blocks
    for b in range(basis.n_blocks):
        exact, single = basis.features(X, b), fast.features(X.float(), b)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), exact, rtol=0, atol=2e-5)
        # It is a float32 evaluation, not a rounded float64 one.
        assert not torch.equal(single, basis.features(X.float(), b))
        assert_same(fast.features(X, b), exact)  # rows in float64 stay there


@pytest.mark.parametrize("case", ["ill conditioned", "far from 0"])
def test_whitened_basis_stays_in_double_precision_where_single_is_wrong(data, case):
    X = data[0] if case == "ill conditioned" else data[0] + 1e6
    kernel = RBF(5.0) if case == "ill conditioned" else RBF(0.1)
    basis = WhitenedInducingBasis(kernel, X[:20])
    assert basis.in_single_precision(X) is basis


def test_whitened_basis_in_single_precision_judges_relative_to_the_prior(data):
    Z = 3.0 * data[0][:8]
    for amplitude in (1e-8, 1e8):
        basis = WhitenedInducingBasis(ConstantKernel(amplitude) * RBF(0.8), Z)
        assert basis.in_single_precision(data[0]).single


def test_whitened_basis_times_the_factor_is_the_kernel(data):
    """Also where k(Z, Z) is nearly singular."""
    X, Z = data[0], data[0][:20]
    kernel = RBF(2.0)
    basis = WhitenedInducingBasis(kernel, Z)
    L = np.linalg.cholesky(kernel(Z.numpy()) + basis.jitter * np.eye(20))
    np.testing.assert_allclose(
        basis.features(X, 0).numpy() @ L.T, kernel(X.numpy(), Z.numpy()), atol=1e-12
    )
