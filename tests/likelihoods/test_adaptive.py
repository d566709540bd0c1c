"""Adaptive quadrature of log-concave likelihoods against closed forms and bisection."""

import math

import numpy as np
import pytest
import torch
from scipy import special

from skgp.likelihoods import Bernoulli, Gaussian, Poisson
from skgp.likelihoods.adaptive import (
    log_expectation,
    log_expectation_and_slopes,
    log_gamma_rule,
    sinh_map,
    tilted_mode,
)


def _grid(*axes):
    return [torch.tensor(axis.ravel(), dtype=torch.float64) for axis in np.meshgrid(*axes)]


def test_log_expectation_equals_the_closed_form_of_gaussian_noise():
    y, mean, var = _grid([-300.0, 0.0, 2.0], [-1.0, 50.0], [0.0, 1e-12, 1e-3, 1.0, 1e3, 1e8])
    for noise in (1e-4, 1.0, 1e4):
        value, in_mean, in_var = log_expectation_and_slopes(Gaussian(noise), y, mean, var)
        total, residual = var + noise, y - mean
        torch.testing.assert_close(
            value, Gaussian(noise).log_predictive(y, mean, var), rtol=1e-9, atol=1e-9
        )
        slope = residual / total
        torch.testing.assert_close(in_mean, slope, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(in_var, 0.5 * (slope**2 - 1 / total), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("likelihood", [Poisson(), Poisson("softplus"), Bernoulli()])
def test_log_expectation_slopes_at_zero_variance_are_those_of_the_theorems(likelihood):
    y, mean = torch.tensor([[1.0] * 4, [-3.0, 0.0, 0.4, 3.0]], dtype=torch.float64)
    value, in_mean, in_var = log_expectation_and_slopes(likelihood, y, mean, 0 * mean)
    first, second = likelihood.derivatives(y, mean)
    torch.testing.assert_close(value, likelihood.log_prob(y, mean), rtol=0, atol=1e-9)
    torch.testing.assert_close(in_mean, first, rtol=1e-13, atol=0)
    torch.testing.assert_close(in_var, 0.5 * (second + first**2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("likelihood", [Poisson(), Poisson("softplus"), Bernoulli()])
def test_log_expectation_gradients_equal_finite_differences(likelihood):
    y, mean, var = _grid([1.0], [-6.0, 0.3, 5.0], [1e-2, 0.8, 30.0])
    mean.requires_grad_(), var.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *latent: log_expectation(likelihood, y, *latent), (mean, var), eps=1e-4, atol=1e-7
    )


def test_log_expectation_of_many_rows_is_that_of_each():
    generator = torch.Generator().manual_seed(0)
    mean, var = torch.randn(2, 9000, generator=generator, dtype=torch.float64)
    y, var = Poisson().sample(mean, generator), var.exp()
    together = log_expectation_and_slopes(Poisson(), y, mean, var)
    rows = torch.arange(0, 9000, 250)
    alone = log_expectation_and_slopes(Poisson(), y[rows], mean[rows], var[rows])
    for whole, part in zip(together, alone, strict=True):
        assert whole.shape == (9000,)
        torch.testing.assert_close(whole[rows], part, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("likelihood", [Poisson(), Poisson("softplus"), Bernoulli()])
def test_tilted_mode_is_the_root_that_bisection_finds(likelihood):
    targets = [-1.0, 1.0] if isinstance(likelihood, Bernoulli) else [0.0, 1.0, 500.0, 1e6]
    means, deviations = [-100.0, -8.0, 0.0, 8.0, 60.0], [1e-6, 1e-3, 1.0, 10.0, 1e3]
    y, mean, std = _grid(targets, means, deviations)
    z = tilted_mode(likelihood, y, mean, std)

    def excess(z):
        return z - std * likelihood._derivatives(y, mean + std * z)[0]

    pull = -excess(torch.zeros_like(z))
    low, high = pull.clamp_max(0), pull.clamp_min(0)
    for _ in range(400):
        middle = 0.5 * (low + high)
        low = torch.where(excess(middle) < 0, middle, low)
        high = torch.where(excess(middle) < 0, high, middle)

    def height(z):
        return likelihood._log_prob(y, mean + std * z) - 0.5 * z**2

    # In nats below the peak; nodes placed about the mode need no more.
    assert (height(low) - height(z) < 0.1).all()


@pytest.mark.parametrize("shape", [0.3, 1.0, 2.5, 40.0, 1e4])
def test_sinh_map_integrates_skewed_densities(shape):
    def profile(t):
        return shape * (t - torch.expm1(t)), -shape * torch.expm1(t)

    width = torch.tensor([shape**-0.5], dtype=torch.float64)
    offset, spacing = sinh_map(profile, width).nodes(56)
    integral = (spacing * profile(offset)[0].exp()).sum()
    expected = special.gammaln(shape) - shape * math.log(shape) + shape
    assert float(integral.log()) == pytest.approx(expected, abs=2e-8)
    assert (offset.diff(dim=0) > 0).all()


@pytest.mark.parametrize("for_tails", [False, True])
@pytest.mark.parametrize("shape", [0.5, 1.0, 7.0, 1e3, 1e6])
def test_log_gamma_rule_has_the_moments_of_the_gamma_distribution(shape, for_tails):
    a = torch.tensor([shape], dtype=torch.float64)
    offset, weights = log_gamma_rule(a, 96, for_tails=for_tails)
    for moment, expected in (
        (torch.ones_like(offset), 1.0),
        (offset.exp(), 1.0),
        ((2 * offset).exp(), 1 + 1 / shape),
        (offset, special.digamma(shape) - math.log(shape)),
    ):
        # With even spacings 96 nodes are few for the longest tail.
        tolerance = 1e-4 if for_tails and shape == 0.5 else 1e-7
        value = float((weights * moment).sum())
        assert value == pytest.approx(expected, rel=tolerance, abs=1e-10)
