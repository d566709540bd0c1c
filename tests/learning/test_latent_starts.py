"""Numbers that stand for f, of counts: locations, precisions, exposures."""

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.learning.label_scales import latent_numbers, search_by_numbers
from skgp.learning.search import SearchSettings
from skgp.likelihoods import Poisson


def counts(rate, n=200, seed=0):
    """X (n, 1) and counts of these rates times exp f, and f."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 1))
    f = np.sin(2 * X[:, 0])
    return torch.tensor(X), torch.tensor(rng.poisson(rate * np.exp(f)).astype(float)), f


def test_numbers_of_large_counts_are_their_logarithms_and_weigh_as_much_as_they():
    X, y, _ = counts(1e4)
    numbers = latent_numbers(Data(X, y), Poisson())
    torch.testing.assert_close(numbers.weight, y / y.mean(), rtol=0.02, atol=0)
    log = (y + 0.5).log()
    torch.testing.assert_close(numbers.y, log - numbers.weight @ log / len(y))


def test_small_counts_weigh_nearly_alike_and_those_of_little_exposure_nothing():
    X, y, _ = counts(0.5)
    weight = latent_numbers(Data(X, y), Poisson()).weight
    assert 1.0 < float(weight.max() / weight.min()) < 3 < float(y.max())
    exposed = Data(X, y, offset=torch.where(torch.arange(200) < 100, -14.0, 0.0).double()[:, None])
    weight = latent_numbers(exposed, Poisson()).weight[:100][y[:100] == 0]
    assert float(weight.max()) < 0.02


def test_noise_found_is_that_of_the_counts():
    X, y, f = counts(1e4)
    found = search_by_numbers(
        [ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0)],
        Data(X, y),
        Poisson(),
        generator=torch.Generator().manual_seed(0),
        settings=SearchSettings(),
    ).kernel
    assert 0.6 < found.k2.noise_level * float(y.mean()) < 1.6
    assert 0.3 < found.k1.k1.constant_value < 10 and 0.5 < found.k1.k2.length_scale < 2
