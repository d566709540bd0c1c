"""Hyper-parameters of expressions, against scikit-learn's own answers."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    DotProduct,
    ExpSineSquared,
    Hyperparameter,
    Kernel,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.kernels import ActiveDims
from skgp.kernels.hyperparameters import bounds_of, copied, n_dims_of, theta_of, with_theta


class Named(RBF):
    """Finds its hyper-parameters its own way."""

    @property
    def hyperparameters(self):
        return [Hyperparameter("length_scale", "numeric", (0.5, 3.0))]


@pytest.mark.parametrize(
    "kernel",
    [
        1.0 * RBF([1.0, 2.0]) + WhiteKernel(0.1),
        RBF(1.0, "fixed") * RationalQuadratic(2.0, 0.3) ** 2 + Matern([0.7], nu=1.5),
        RBF(1.0, "fixed"),
        ExpSineSquared(0.5, 2.0, periodicity_bounds="fixed") + ActiveDims(DotProduct(3.0), [0]),
        2.0 * Named(1.5),
    ],
    ids=str,
)
def test_hyperparameters_are_those_of_scikit_learn(kernel: Kernel):
    assert n_dims_of(kernel) == kernel.n_dims
    np.testing.assert_array_equal(theta_of(kernel), kernel.theta)
    np.testing.assert_array_equal(bounds_of(kernel), kernel.bounds.reshape(-1, 2))
    theta = kernel.theta + np.linspace(-1, 1, kernel.n_dims)
    assert with_theta(kernel, theta) == kernel.clone_with_theta(theta)


def test_copies_share_nothing_that_can_change():
    kernel = 2.0 * RBF(np.array([1.0, 2.0])) + Matern(3.0, nu=0.5)
    inner = ActiveDims(Matern(3.0), [1])
    copied(inner).kernel.length_scale = 9.0
    assert inner == ActiveDims(Matern(3.0), [1])
    other = copied(kernel)
    other.k1.k2.length_scale[0], other.k2.length_scale, other.k1.k1.constant_value = 9.0, 9.0, 9.0
    assert kernel == 2.0 * RBF([1.0, 2.0]) + Matern(3.0, nu=0.5)
    assert other == 9.0 * RBF([9.0, 2.0]) + Matern(9.0, nu=0.5)
