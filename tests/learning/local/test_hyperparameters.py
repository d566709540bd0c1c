"""Hyper-parameters before q(u): each kind of observation on the scale of Gaussian noise."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data, distinct_observations, merge_replicates
from skgp.learning.local.hyperparameters import (
    gaussian_counts,
    search_hyperparameters,
)


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
        likelihood,
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


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_counts_are_put_on_the_scale_of_the_link(link):
    y = torch.tensor([0.0, 1.0, 2.0, 10.0, 1e4], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    found = gaussian_counts(y, weight, link).numpy()
    assert weight.numpy() @ found == pytest.approx(0.0, abs=1e-9)
    f = found - found[0]
    rate = np.exp(f + np.log(0.5)) if link == "exp" else np.logaddexp(0, f + np.log(np.expm1(0.5)))
    np.testing.assert_allclose(rate, y + 0.5, rtol=1e-9)
    plain = gaussian_counts(y, None, link)
    torch.testing.assert_close(plain, gaussian_counts(y, torch.ones_like(y), link))


def test_counts_of_weight_two_are_the_count_twice():
    y = torch.tensor([3.0, 7.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = gaussian_counts(torch.tensor([3.0, 7.0, 7.0], dtype=torch.float64), None, "exp")
    torch.testing.assert_close(gaussian_counts(y, weight, "exp"), expected[:2])


def test_search_leaves_the_data_alone():
    rng, X, f = rows(60)
    y = rng.poisson(5 * np.exp(f)).astype(float)
    data = distinct_observations(X, y, None, torch.device("cpu"))
    before = data.y.clone()
    search_hyperparameters([kernel()], data, "poisson", generator=torch.Generator().manual_seed(0))
    assert isinstance(data, Data) and torch.equal(data.y, before)
