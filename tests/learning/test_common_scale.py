"""The common factor of a classifier's length scales."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.learning import amplitude
from skgp.learning.amplitude import refine_length_scales, scaled
from skgp.likelihoods import Bernoulli

ZERO = torch.zeros(1, dtype=torch.float64)


def waves(n, seed=0):
    """Labels of a function of length scale about 0.3 on the unit square, almost without noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    f = torch.sin(12 * X[:, 0]) + torch.sin(12 * X[:, 1])
    return X, torch.where(f > 0, 1.0, -1.0).double()[:, None]


def refine(kernel, X, Y, **options):
    generator = torch.Generator().manual_seed(1)
    return refine_length_scales(
        kernel, X, Y, Bernoulli(), offset=ZERO, generator=generator, **options
    )


@pytest.fixture(autouse=True)
def small_trials(monkeypatch):
    monkeypatch.setattr(amplitude, "SCALE_ROWS", 500)
    monkeypatch.setattr(amplitude, "SCALE_TRAINING", 700)
    monkeypatch.setattr(amplitude, "SCALE_HELD_OUT", 300)
    monkeypatch.setattr(amplitude, "SCALE_POINTS", 150)


@pytest.mark.parametrize(("start", "shorter"), [(2.0, True), (0.02, False)])
def test_length_scales_move_towards_those_of_the_data(start, shorter):
    X, Y = waves(1000)
    kernel = ConstantKernel(10.0) * RBF([start, 2 * start])
    found = refine(kernel, X, Y).k2.length_scale
    assert found[1] == pytest.approx(2 * found[0])
    steps = np.log2(found[0] / start) * 2
    assert steps == pytest.approx(round(steps)) and abs(steps) >= 1
    assert (found[0] < start) == shorter


def test_kernel_is_kept_where_nothing_is_better_or_free():
    X, Y = waves(1000)
    kernel = ConstantKernel(10.0) * RBF([0.3, 0.3])
    once = refine(kernel, X, Y)
    assert refine(once, X, Y) == once
    assert refine(kernel, X[:400], Y[:400]) is kernel  # few rows
    fixed = ConstantKernel(10.0) * RBF([2.0, 2.0], "fixed")
    assert refine(fixed, X, Y) is fixed


def test_rows_of_no_weight_do_not_count():
    X, Y = waves(1000)
    weight = torch.ones(1000, dtype=torch.float64)
    weight[::2] = 1e-12
    flipped = Y.clone()
    flipped[::2] *= -1
    kernel = ConstantKernel(10.0) * RBF([2.0, 2.0])
    assert refine(kernel, X, Y, row_weight=weight) == refine(kernel, X, flipped, row_weight=weight)


def test_callback_ends_the_search():
    X, Y = waves(1000)
    kernel, calls = ConstantKernel(10.0) * RBF([2.0, 2.0]), []
    found = refine(kernel, X, Y, callback=lambda i, info: calls.append(info["loss"]) or True)
    assert found is kernel and len(calls) == 1 and np.isfinite(calls[0])


def test_scaled_multiplies_every_length_scale_and_nothing_else():
    kernel = ConstantKernel(2.0) * RBF([1.0, 3.0]) + ConstantKernel(0.5, "fixed") * Matern(4.0)
    half = scaled(kernel, 0.5)
    np.testing.assert_allclose(half.k1.k2.length_scale, [0.5, 1.5])
    assert half.k2.k2.length_scale == pytest.approx(2.0)
    assert half.k1.k1.constant_value == pytest.approx(2.0)
    assert half.k2.k1.constant_value == 0.5


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(1.0, "fixed"),
        ConstantKernel(1.0),
        RBF(1.0) + Matern(1.0, "fixed"),
        RBF(1.0, (0.9, 2.0)),
    ],
)
def test_scaled_is_none_where_proportions_or_bounds_forbid(kernel):
    assert scaled(kernel, 0.5) is None
