"""Other starts of a search against what they stand for: spreads, spacings, units, bounds."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern, WhiteKernel

from skgp.data import Data
from skgp.kernels import ActiveDims, split_noise
from skgp.learning.defaults import NOISE_GRID
from skgp.learning.evidence import ExactEvidence
from skgp.learning.kernel_choice import choose_kernel
from skgp.learning.starts import likeliest_start, starts
from tests.same import assert_same

KERNEL = 4.0 * RBF([30.0, 30.0]) + WhiteKernel(0.1)


def wiggly(n=200, frequency=10.0, noise=0.1):
    """A sine of many periods along the first of two columns, of unit variance, in some units."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (n, 2))
    y = np.sqrt(2) * np.sin(frequency * X[:, 0]) + noise * rng.standard_normal(n)
    return Data(torch.tensor(X), torch.tensor(y))


def scales(kernels):
    return np.array([kernel.k1.k2.length_scale for kernel in kernels])


def test_starts_go_from_the_spread_of_inputs_to_their_spacing():
    data = wiggly(256)
    found = starts(KERNEL, data)
    std = data.X.numpy().std(axis=0)
    expected = [np.sqrt(2) * std / 2**k for k in range(5)]  # 256^(-1/2) = 1/16
    np.testing.assert_allclose(scales(found[:: len(NOISE_GRID)]), expected, rtol=1e-6)
    variance = float(data.y.square().mean())
    for kernel in found:
        np.testing.assert_allclose(kernel.k1.k1.constant_value, variance, rtol=1e-9)
    levels = [split_noise(kernel)[1].noise_level for kernel in found[: len(NOISE_GRID)]]
    np.testing.assert_allclose(levels, variance * np.array(NOISE_GRID), rtol=1e-12)
    finer = starts(KERNEL, data, known=64)  # whose spacing is an eighth
    np.testing.assert_allclose(scales(finer[:: len(NOISE_GRID)]), expected[3:], rtol=1e-6)


def test_starts_have_the_units_of_the_inputs_and_of_the_targets():
    data = wiggly()
    units = torch.tensor([1024.0, 2.0**-10], dtype=torch.float64)
    moved = starts(KERNEL, Data(data.X * units, data.y))
    np.testing.assert_allclose(
        scales(moved), scales(starts(KERNEL, data)) * units.numpy(), rtol=1e-5
    )
    quiet = starts(4.0 * RBF([30.0, 30.0]) + WhiteKernel(0.1), Data(data.X, data.y / 4))
    np.testing.assert_allclose(quiet[0].k1.k1.constant_value, float(data.y.square().mean()) / 16)


def test_starts_keep_bounds_fixed_values_and_everything_else():
    data = wiggly()
    assert starts(ConstantKernel() * RBF(2.0, "fixed") + WhiteKernel(), data) == []
    assert starts(DotProduct() + WhiteKernel(), data) == []
    kernel = ConstantKernel(3.0, "fixed") * RBF([1.0, 1.0], (0.9, 1.1)) + WhiteKernel(0.2, "fixed")
    for found in starts(kernel, data):
        assert np.all((scales([found]) >= 0.9 - 1e-12) & (scales([found]) <= 1.1 + 1e-12))
        assert found.k1.k1 == kernel.k1.k1 and found.k2 == kernel.k2
    assert kernel.k1.k2 == RBF([1.0, 1.0], (0.9, 1.1))


def test_starts_of_a_sum_keep_the_ratio_of_its_length_scales():
    found = starts(RBF(2.0) + Matern(20.0) + WhiteKernel(), wiggly())
    for kernel in found:
        np.testing.assert_allclose(kernel.k1.k2.length_scale / kernel.k1.k1.length_scale, 10.0)


def test_starts_of_a_choice_of_columns_see_these_alone():
    data = wiggly()
    wide = Data(torch.cat([1e3 * data.X[:, :1], data.X], 1), data.y)
    of_columns = starts(ActiveDims(RBF([7.0, 5.0]), [1, 2]) + WhiteKernel(), wide)[0]
    alone = starts(RBF([7.0, 5.0]) + WhiteKernel(), data)[0]
    np.testing.assert_allclose(of_columns.k1.kernel.length_scale, alone.k1.length_scale, rtol=1e-6)
    single = starts(ActiveDims(RBF(7.0), [1]) + WhiteKernel(), wide)[0]
    np.testing.assert_allclose(
        single.k1.kernel.length_scale, data.X[:, 0].std(correction=0), rtol=1e-6
    )


def test_likeliest_start_is_the_best_of_all():
    data = wiggly()
    found, value = likeliest_start(KERNEL, data)
    every = [ExactEvidence(kernel, data).value(kernel.theta) for kernel in starts(KERNEL, data)]
    assert value == max(every)
    np.testing.assert_allclose(ExactEvidence(found, data).value(found.theta), value)
    assert likeliest_start(DotProduct() + WhiteKernel(), data) is None


def test_choose_kernel_finds_a_function_of_many_periods(generator):
    """From length scales at the spread of the inputs all of it was noise, of variance 1."""
    data = wiggly(300)
    family = 1.0 * RBF([1.6, 1.6]) + WhiteKernel(0.1)
    kernel, history = choose_kernel([family], data, generator=generator)
    assert split_noise(kernel)[1].noise_level < 0.1
    again, _ = choose_kernel([family], data, generator=generator)
    assert_same(kernel.theta, again.theta)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_starts_of_hardly_any_rows(n):
    data = wiggly(4)
    few = data.take(slice(0, n))
    assert all(np.isfinite(kernel.theta).all() for kernel in starts(KERNEL, few))
