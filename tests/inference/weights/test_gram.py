"""Streamed sufficient statistics and their evidence against dense NumPy."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights import design as design_module
from skgp.inference.weights import gram as gram_module
from skgp.inference.weights.gram import StreamingGram, log_marginal_likelihood, refit_noise
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg.runtime import memory_limit
from tests.reference import weights as reference

N, M = 60, 22
BASIS = FourierFeatures(RBF(1.0), M, 2, seed=3, block_size=4)


@pytest.fixture
def data(rng):
    """X, y and weights as tensors; y lies in the model, off its amplitude."""
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    f = reference.dense_features(BASIS, X) @ rng.standard_normal(M)
    y = torch.from_numpy(1.7 * f + 0.3 * rng.standard_normal(N))
    return X, y, torch.from_numpy(rng.uniform(0.3, 3.0, N))


def filled(data, weighted=True, **options):
    X, y, weight = data
    return StreamingGram(BASIS, **options).update(X, y, weight if weighted else None)


@pytest.mark.parametrize("tile", [5, 512])
@pytest.mark.parametrize("budget", [1, 8 * M * 7, 10**9])
def test_streaming_gram_equals_dense_sums(data, monkeypatch, tile, budget):
    monkeypatch.setattr(design_module, "GRAM_TILE", tile)
    X, y, weight = (tensor.numpy() for tensor in data)
    Phi = reference.dense_features(BASIS, data[0])
    with memory_limit(8 * budget):
        stats = filled(data)
    np.testing.assert_allclose(stats.gram.numpy(), Phi.T @ (weight[:, None] * Phi), atol=1e-12)
    np.testing.assert_allclose(stats.moment.numpy(), Phi.T @ (weight * y), atol=1e-12)
    np.testing.assert_allclose(stats.feature_sum.numpy(), Phi.T @ weight, atol=1e-12)
    sums = [stats.sum_weight, stats.sum_target, stats.sum_square, stats.sum_log_weight]
    expected = [weight.sum(), weight @ y, weight @ y**2, np.log(weight).sum()]
    np.testing.assert_allclose(sums, expected, rtol=1e-13)
    assert stats.n_rows == N


def test_streaming_gram_update_is_exact_over_any_split(data):
    X, y, weight = data
    whole, parts = filled(data), StreamingGram(BASIS)
    for rows in (slice(0, 1), slice(1, 40), slice(40, N)):
        parts.update(X[rows], y[rows], weight[rows])
    for name, value in vars(whole).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(parts, name), value, rtol=1e-12, atol=1e-12)
        elif isinstance(value, float):
            assert math.isclose(getattr(parts, name), value, rel_tol=1e-12), name


def test_streaming_gram_float32_features_sum_in_float64(data, monkeypatch):
    monkeypatch.setattr(gram_module, "ROWS_FLOAT32", 8)
    stats = filled(data, dtype=torch.float32)
    assert stats.gram.dtype == torch.float64
    torch.testing.assert_close(stats.gram, filled(data).gram, rtol=0, atol=1e-5)


def test_streaming_gram_standardised_equals_standardising_first(data):
    X, y, weight = data
    shifted = filled(data).standardised(0.7, 1.9)
    first = StreamingGram(BASIS).update(X, (y - 0.7) / 1.9, weight)
    torch.testing.assert_close(shifted.moment, first.moment, rtol=1e-11, atol=1e-12)
    assert math.isclose(shifted.sum_target, first.sum_target, rel_tol=1e-11)
    assert math.isclose(shifted.sum_square, first.sum_square, rel_tol=1e-11)


@pytest.mark.parametrize("noise", [0.09, 1e-4])
@pytest.mark.parametrize("weighted", [False, True])
def test_log_marginal_likelihood_equals_dense_normal(data, noise, weighted):
    _, y, weight = (tensor.numpy() for tensor in data)
    Phi = reference.dense_features(BASIS, data[0])
    value = log_marginal_likelihood(filled(data, weighted), noise)
    expected = reference.log_marginal_likelihood(Phi, y, noise, weight if weighted else None, 1.0)
    assert math.isclose(value, expected, rel_tol=1e-9)


@pytest.mark.parametrize("start", [1e-6, 0.05, 1e3])
def test_refit_noise_finds_the_maximum_of_a_dense_optimiser(data, start):
    _, y, weight = (tensor.numpy() for tensor in data)
    Phi = reference.dense_features(BASIS, data[0])

    def loss(log_noise):
        return -reference.log_marginal_likelihood(Phi, y, np.exp(log_noise), weight, 1.0)

    expected = minimize_scalar(loss, bounds=(-8, 8), method="bounded", options={"xatol": 1e-8})
    noise = refit_noise(filled(data), start, tol=1e-6)
    assert math.log(noise) == pytest.approx(expected.x, abs=1e-4)


def test_refit_noise_survives_data_without_noise(rng):
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    y = torch.from_numpy(reference.dense_features(BASIS, X) @ rng.standard_normal(M))
    for dtype in (torch.float32, torch.float64):
        statistics = StreamingGram(BASIS, dtype=dtype).update(X, y)
        noise = refit_noise(statistics, 0.1)
        assert 0 < noise < 1e-3
        assert math.isfinite(log_marginal_likelihood(statistics, noise))


def test_evidence_refuses_invalid_input(data):
    stats = filled(data)
    with pytest.raises(ValueError, match="noise_variance must be positive and finite; got 0.0"):
        log_marginal_likelihood(stats, 0.0)
    with pytest.raises(ValueError, match="no rows yet"):
        log_marginal_likelihood(StreamingGram(BASIS), 1.0)
    zeros = StreamingGram(BASIS).update(data[0], torch.zeros(N))
    with pytest.raises(ValueError, match="targets y are all 0"):
        refit_noise(zeros, 1.0)
