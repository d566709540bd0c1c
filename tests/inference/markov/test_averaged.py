"""A series under several hyper-parameters: equal to the mixture of dense Gaussian processes."""

import numpy as np
import torch
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp.inference.gp_mixture import AveragedState
from skgp.inference.markov.series import make_series
from skgp.inference.markov.states import SeriesState
from skgp.likelihoods import Gaussian

KERNELS = [
    ConstantKernel(2.0) * Matern(1.5, nu=1.5) + Matern(0.2, nu=0.5),
    ConstantKernel(0.5) * Matern(0.4, nu=1.5) + Matern(1.0, nu=0.5),
]
WEIGHTS, NOISE, OFFSET = (0.7, 0.3), (0.1, 0.4), 0.3


def data(n):
    rng = np.random.default_rng(n)
    return np.sort(rng.uniform(0, 5, n)), rng.standard_normal(n)


def mixture(x, y):
    series = make_series(torch.tensor(x), torch.tensor(y - OFFSET))
    pairs = zip(KERNELS, NOISE, strict=True)
    states = [SeriesState(k, series.times, *series.gaussian_sites(v), OFFSET) for k, v in pairs]
    return AveragedState(tuple(states), WEIGHTS, NOISE)


def dense(x, y, new):
    """Mean and covariance of the mixture."""
    means, second = [], 0.0
    for w, kernel, noise in zip(WEIGHTS, KERNELS, NOISE, strict=True):
        C, k = kernel(x[:, None]) + noise * np.eye(len(x)), kernel(new[:, None], x[:, None])
        mean = OFFSET + k @ np.linalg.solve(C, y - OFFSET)
        cov = kernel(new[:, None]) - k @ np.linalg.solve(C, k.T)
        means.append(w * mean)
        second = second + w * (cov + np.outer(mean, mean))
    mean = sum(means)
    return mean, second - np.outer(mean, mean)


NEW = np.array([3.0, -1.0, 0.7, 6.0])


def test_moments_are_those_of_the_mixture():
    x, y = data(20)
    state, new = mixture(x, y), torch.tensor(NEW)
    mean, covariance = dense(x, y, NEW)
    found, joint = state.covariance(new)
    np.testing.assert_allclose(found, mean, atol=1e-9)
    np.testing.assert_allclose(joint, covariance, atol=1e-9)
    found, var = state.moments(new)
    np.testing.assert_allclose(state.mean(new), mean, atol=1e-9)
    np.testing.assert_allclose(var, covariance.diagonal(), atol=1e-9)
    past_mean, past_var = state.past_moments(torch.tensor([-1.0], dtype=torch.float64))
    prior = np.dot(WEIGHTS, [3.0, 1.5])  # variances of the kernels
    np.testing.assert_allclose([past_mean[0], past_var[0]], [OFFSET, prior], atol=1e-9)
    parts, _ = state.components(new)
    np.testing.assert_allclose(parts.sum(1) + OFFSET, mean, atol=1e-9)


def test_draws_have_the_moments_of_the_mixture():
    x, y = data(20)
    n = 40_000
    draws = mixture(x, y).samples(torch.tensor(NEW), n, torch.Generator().manual_seed(0)).numpy()
    mean, covariance = dense(x, y, NEW)
    z = (draws.mean(1) - mean) / np.sqrt(covariance.diagonal() / n)
    assert np.abs(z).max() < 4
    products = np.einsum("is,js->ijs", draws - mean[:, None], draws - mean[:, None])
    z = (products.mean(2) - covariance) / (products.std(2) / np.sqrt(n))
    assert np.abs(z).max() < 4


def test_rows_that_come_later_are_seen_with_the_noise_of_each():
    x, y = data(20)
    early = np.arange(20) % 3 > 0
    later = make_series(*map(torch.tensor, (x[~early], y[~early])))
    joined = mixture(x[early], y[early]).with_rows(later, Gaussian(0.19, bounds=(1e-6, 1.0)))
    expected = mixture(x, y)
    for found, wanted in zip(
        joined.moments(torch.tensor(NEW)), expected.moments(torch.tensor(NEW)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-9)
