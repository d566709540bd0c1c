"""Multiplying a kernel expression by a factor, through its free constants."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.kernels.scales import amplitude_range, scale_amplitude

C = ConstantKernel
SCALABLE = [
    C(2.0) * RBF(0.7),
    RBF(0.7) * C(2.0),
    C(2.0) * RBF(0.7) + Matern(1.0) * C(0.5),
    C(2.0) * (RBF(0.7) + Matern(1.0)),
    C(3.0, "fixed") * (C(2.0) * RBF(0.7)),
    C(3.0) + C(2.0) * RBF(0.7),
]
FIXED = [
    RBF(0.7),
    C(2.0, "fixed") * RBF(0.7),
    C(2.0) * RBF(0.7) + Matern(1.0),
    (C(2.0) * RBF(0.7)) ** 2,
]


@pytest.mark.parametrize("kernel", SCALABLE)
@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_scaled_kernel_is_the_kernel_times_the_factor(kernel, factor):
    X = np.random.default_rng(0).normal(size=(5, 2))
    before = kernel.theta.copy()
    scaled = scale_amplitude(kernel, factor)
    np.testing.assert_allclose(scaled(X), factor * kernel(X), rtol=1e-12)
    assert [h.name for h in scaled.hyperparameters] == [h.name for h in kernel.hyperparameters]
    np.testing.assert_array_equal(kernel.theta, before)


@pytest.mark.parametrize("kernel", FIXED)
def test_kernel_without_a_free_factor_keeps_its_amplitude(kernel):
    assert amplitude_range(kernel) == (1.0, 1.0)
    assert scale_amplitude(kernel, 1.0) is kernel
    with pytest.raises(ValueError, match="factor=2.0 takes .* out of the bounds"):
        scale_amplitude(kernel, 2.0)


def test_range_is_that_of_the_bounds():
    kernel = C(2.0, (1.0, 10.0)) * RBF() + C(4.0, (0.1, 8.0)) * RBF()
    assert amplitude_range(kernel) == (0.5, 2.0)
    with pytest.raises(ValueError, match="may lie between 0.5 and 2"):
        scale_amplitude(kernel, 3.0)
