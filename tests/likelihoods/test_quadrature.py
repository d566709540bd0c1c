"""Expectations by quadrature against moments known in closed form."""

import math

import numpy as np
import pytest
import torch
from scipy import special

from skgp.likelihoods.quadrature import (
    expectation,
    gauss_hermite,
    log_expectation,
    moments,
    piecewise,
    smooth_averages,
    smooth_expectation,
)

MEAN = torch.tensor([[-1.0, 0.0, 2.5]], dtype=torch.float64)
VAR = torch.tensor([[0.3, 1.0, 4.0]], dtype=torch.float64)


@pytest.mark.parametrize("n_points", [1, 2, 20, 400])
def test_gauss_hermite_weights_sum_to_one(n_points, dtype):
    nodes, weights = gauss_hermite(n_points, torch.zeros(1, dtype=dtype))
    assert nodes.shape == weights.shape == (n_points,) and nodes.dtype == dtype
    assert float(weights.sum()) == pytest.approx(1.0, abs=10 * torch.finfo(dtype).eps)
    assert float(nodes.sum()) == pytest.approx(0.0, abs=1e-4 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("n_points", [0, -1, 2.5])
def test_gauss_hermite_refuses_bad_n_points(n_points):
    with pytest.raises(ValueError, match="n_points"):
        gauss_hermite(n_points, MEAN)


@pytest.mark.parametrize("n_points", [3, 20])
def test_expectation_is_exact_for_polynomials(n_points):
    value = expectation(lambda f: f**5, MEAN, VAR, n_points=n_points)
    expected = MEAN**5 + 10 * MEAN**3 * VAR + 15 * MEAN * VAR**2
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_expectation_equals_the_lognormal_mean():
    value = expectation(torch.exp, MEAN, VAR, n_points=40)
    torch.testing.assert_close(value, (MEAN + VAR / 2).exp(), rtol=1e-12, atol=0)


def test_log_expectation_equals_the_lognormal_mean_without_overflow():
    # exp(1000) overflows; the logarithm of its expectation is an ordinary number.
    value = log_expectation(lambda f: f + 1000, MEAN, VAR, n_points=40)
    torch.testing.assert_close(value, 1000 + MEAN + VAR / 2, rtol=1e-12, atol=0)
    value = log_expectation(lambda f: f - 1000, MEAN, VAR, n_points=400)
    torch.testing.assert_close(value, -1000 + MEAN + VAR / 2, rtol=1e-12, atol=0)


def test_log_expectation_gradients_survive_underflowing_weights():
    mean, var = MEAN.clone().requires_grad_(), VAR.clone().requires_grad_()
    log_expectation(lambda f: f, mean, var, n_points=400).sum().backward()
    torch.testing.assert_close(mean.grad, torch.ones_like(mean))
    torch.testing.assert_close(var.grad, 0.5 * torch.ones_like(var), rtol=1e-9, atol=0)


def test_moments_of_a_poisson_mixture_equal_the_closed_form():
    mean_y, var_y = moments(torch.exp, torch.exp, MEAN, VAR, n_points=60)
    rate = (MEAN + VAR / 2).exp()
    torch.testing.assert_close(mean_y, rate, rtol=1e-10, atol=0)
    torch.testing.assert_close(var_y, rate + rate**2 * (VAR.exp() - 1), rtol=1e-8, atol=0)


def test_moments_variance_does_not_cancel():
    # V[1e8 + f] is var; E[a^2] - E[a]^2 would lose all of it.
    _, var_y = moments(lambda f: 1e8 + f, torch.zeros_like, 0 * MEAN, 1e-3 * VAR)
    torch.testing.assert_close(var_y, 1e-3 * VAR, rtol=1e-5, atol=0)


def test_expectation_at_zero_variance_is_the_value_with_finite_gradients():
    mean, var = MEAN.clone().requires_grad_(), torch.zeros_like(VAR).requires_grad_()
    value = expectation(torch.sin, mean, var)
    torch.testing.assert_close(value, MEAN.sin(), rtol=1e-12, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(mean.grad, MEAN.cos(), rtol=1e-12, atol=1e-12)
    assert torch.equal(var.grad, torch.zeros_like(VAR))


def test_expectation_gradient_in_the_variance_is_half_the_curvature():
    var = torch.full_like(MEAN, 1e-6).requires_grad_()
    expectation(torch.sin, MEAN, var).sum().backward()
    np.testing.assert_allclose(var.grad, -MEAN.sin() / 2, rtol=1e-5, atol=1e-9)
    assert math.isfinite(float(var.grad.sum()))


def _lorentzian(x):
    """1 / (1 + x^2) and its first two derivatives: singular at +-i."""
    inverse = 1 / (1 + x**2)
    return inverse, -2 * x * inverse**2, (6 * x**2 - 2) * inverse**3


@pytest.mark.parametrize("std", [1e-4, 0.1, 0.3, 0.301, 1.0, 10.0, 100.0])
def test_smooth_averages_equal_a_closed_form(std):
    # E[1 / (1 + x^2)] = sqrt(pi / 2) / s erfcx(1 / s sqrt 2) for x ~ N(0, s^2).
    var = torch.full((1,), std**2, dtype=torch.float64)
    value, first, second = smooth_averages(_lorentzian, 0 * var, var, scale=1.0, n_points=40)
    expected = math.sqrt(math.pi / 2) / std * special.erfcx(1 / (std * math.sqrt(2)))
    assert float(value) == pytest.approx(expected, rel=1e-7)
    assert float(first) == pytest.approx(0.0, abs=1e-12)
    # E[g''] = d^2/dm^2 E[g] = 2 d/dv E[g], and E[g] solves a linear equation in 1 / s.
    slope = (1 - expected * (1 + std**2)) / (2 * std**4)
    assert float(second) == pytest.approx(2 * slope, rel=1e-5, abs=1e-8 / std**4 * 1e-6)


def test_smooth_averages_hand_each_row_its_columns():
    mean, var = torch.tensor([[0.1, 0.2, 0.3], [0.01, 4.0, 0.02]], dtype=torch.float64)
    factor = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)

    def scaled(f, factor):
        return (factor * f, factor * f**2)

    first, second = smooth_averages(scaled, mean, var, factor, scale=1.0)
    torch.testing.assert_close(first, factor * mean, rtol=1e-9, atol=0)
    torch.testing.assert_close(second, factor * (mean**2 + var), rtol=1e-8, atol=0)


def test_smooth_averages_are_differentiable_in_the_narrow_and_the_wide_rule():
    mean, var = torch.tensor([[0.4, -1.0, 3.0], [0.05, 2.0, 30.0]], dtype=torch.float64)
    mean.requires_grad_(), var.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *latent: smooth_averages(_lorentzian, *latent, scale=1.0), (mean, var), atol=1e-7
    )


def test_smooth_expectation_has_the_slopes_of_bonnet_and_price():
    mean, var = torch.tensor([[0.4, -1.0, 3.0], [0.05, 2.0, 30.0]], dtype=torch.float64)
    mean.requires_grad_(), var.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *latent: smooth_expectation(_lorentzian, *latent, scale=1.0), (mean, var), atol=1e-7
    )
    zero = torch.zeros_like(var, requires_grad=True)
    value = smooth_expectation(_lorentzian, mean, zero, scale=1.0)
    value.sum().backward()
    expected, _, second = _lorentzian(mean.detach())
    torch.testing.assert_close(value.detach(), expected)
    torch.testing.assert_close(zero.grad, 0.5 * second)


def test_piecewise_sends_each_row_to_its_rule_in_chunks():
    x = torch.arange(12.0).reshape(3, 4)
    sizes = []

    def rule(sign):
        def apply(values):
            sizes.append(len(values))
            return sign * values, values**2

        return apply

    first, second = piecewise(x % 3 == 0, rule(1), rule(-1), (x,), chunk=3)
    torch.testing.assert_close(first, torch.where(x % 3 == 0, -x, x))
    torch.testing.assert_close(second, x**2)
    assert sizes == [3, 3, 2, 3, 1]
