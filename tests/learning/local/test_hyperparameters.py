"""Hyper-parameters before q(u): each kind of observation on the scale of Gaussian noise."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data, distinct_observations, merge_replicates
from skgp.learning.local.hyperparameters import search_hyperparameters
from skgp.likelihoods import Gaussian, Poisson, StudentT

LIKELIHOODS = {"gaussian": Gaussian(1.0), "student_t": StudentT(1.0), "poisson": Poisson()}


def kernel(length_scale=1.0):
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF([length_scale] * 2) + WhiteKernel(0.5)


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return rng, X, np.sin(3 * X[:, 0])  # of the first column alone


def search(y, X, likelihood, kernels=None, generator=None, **options):
    merge = merge_replicates if likelihood == "gaussian" else distinct_observations
    data = merge(X, y, None, torch.device("cpu"))
    return search_hyperparameters(
        [kernel()] if kernels is None else kernels,
        data,
        LIKELIHOODS[likelihood],
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t", "poisson"])
def test_search_finds_the_column_that_matters_and_the_noise(likelihood):
    rng, X, f = rows()
    y = {
        "gaussian": lambda: f + 0.2 * rng.standard_normal(300),
        "student_t": lambda: f + 0.2 * rng.standard_t(3, 300),
        "poisson": lambda: rng.poisson(25 * np.exp(f)).astype(float),
    }[likelihood]()
    found = search(y, X, likelihood)
    scales = found.kernel.k1.k2.length_scale
    assert scales[0] < 1.5 < 3 * scales[0] < scales[1]
    # 0.2^2; of counts 1 / 25 or so, on the scale of the logarithm.
    assert 0.02 < found.kernel.k2.noise_level < 0.12
    assert len(found.history) >= 2


def test_outliers_do_not_inflate_the_noise_of_student_t():
    rng, X, f = rows()
    y = f + 0.1 * rng.standard_normal(300)
    y[:15] += 20 * rng.standard_t(2, 15)
    robust, plain = (search(y, X, each).kernel.k2.noise_level for each in ("student_t", "gaussian"))
    assert robust < 0.1 and plain > 5 * robust


def test_search_chooses_among_kernels():
    rng, X, f = rows()
    rough = ConstantKernel(1.0) * Matern([1e3, 1e3], "fixed", nu=0.5) + WhiteKernel(0.5)
    y = f + 0.1 * rng.standard_normal(300)
    found = search(y, X, "gaussian", [rough, kernel()])
    assert isinstance(found.kernel.k1.k2, RBF)


def test_callback_ends_the_search():
    rng, X, f = rows(80)
    seen = []
    search(f, X, "gaussian", callback=lambda i, info: seen.append(info["loss"]) or len(seen) >= 2)
    assert len(seen) == 2 and np.isfinite(seen).all()


def test_search_leaves_the_data_alone():
    rng, X, f = rows(60)
    y = rng.poisson(5 * np.exp(f)).astype(float)
    data = distinct_observations(X, y, None, torch.device("cpu"))
    before = data.y.clone()
    search_hyperparameters([kernel()], data, Poisson(), generator=torch.Generator().manual_seed(0))
    assert isinstance(data, Data) and torch.equal(data.y, before)
