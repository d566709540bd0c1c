"""Covariances of new and training inputs, beside scikit-learn's kernels."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.kernels import training
from skgp.kernels.pairwise import profile_of_few, values_of_few
from skgp.kernels.training import cross_gram

RNG = np.random.default_rng(0)
SHAPES = [RBF, *(lambda scale, nu=nu: Matern(scale, nu=nu) for nu in (0.5, 1.5, 2.5))]


@pytest.mark.parametrize("nu", [np.inf, 0.5, 1.5, 2.5])
def test_values_of_few_are_those_of_the_profile(nu):
    s = np.array([[0.0, 1e-12, 0.3, 2.0], [40.0, 1e4, 1e308, np.inf]])
    expected = profile_of_few(nu, np.minimum(s, 1e300))[0]
    found = values_of_few(nu, s.copy())
    np.testing.assert_allclose(found, expected, rtol=1e-15, atol=0)
    np.testing.assert_array_equal(found[1, 2:], 0)


@pytest.mark.parametrize("few_pairs", [2**18, 0], ids=["few pairs", "many pairs"])
@pytest.mark.parametrize("d", [1, 8, 9])
@pytest.mark.parametrize("shape", SHAPES, ids=["rbf", "1/2", "3/2", "5/2"])
def test_cross_gram_is_that_of_scikit_learn(shape, d, few_pairs, monkeypatch):
    monkeypatch.setattr(training, "CALLED_PAIRS", few_pairs)
    X, Z = RNG.uniform(-2, 2, (7, d)), RNG.uniform(-2, 2, (11, d))
    X[0] = Z[0]
    kernel = ConstantKernel(2.5) * shape(RNG.uniform(0.5, 2, d)) * 0.7 + WhiteKernel(0.3)
    exact = few_pairs or d <= 8  # by distances, not by a product of matrices
    tolerance = {"rtol": 1e-14} if exact else {"rtol": 1e-6}
    np.testing.assert_allclose(cross_gram(kernel, X, Z), kernel(X, Z), **tolerance)


def test_cross_gram_leaves_inputs_and_kernel_as_they_are():
    X, Z = RNG.uniform(-2, 2, (7, 2)), RNG.uniform(-2, 2, (11, 2))
    before = X.copy(), Z.copy()
    kernel = 1.0 * RBF(1.0)
    first = cross_gram(kernel, X, Z)
    np.testing.assert_array_equal(cross_gram(kernel, X, Z), first)
    np.testing.assert_array_equal(X, before[0])
    np.testing.assert_array_equal(Z, before[1])
