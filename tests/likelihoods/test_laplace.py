"""The Laplace likelihood against SciPy, numerical integrals and the contract of all likelihoods."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from skgp.likelihoods import Laplace
from skgp.likelihoods.closed_form import expected_absolute_residual
from tests.contracts.numeric_likelihoods import NumericLikelihoodContract
from tests.covering import covering

SCALE = 0.6


class TestLaplace(NumericLikelihoodContract):
    """Closed forms throughout."""

    TOLERANCE = 1e-10

    def likelihood(self):
        return Laplace(SCALE)

    def targets(self):
        return np.array([-2.0, 0.1, 0.5, 3.0])

    def support(self, f):
        return f + SCALE * np.linspace(-40, 40, 81)

    def breaks(self, y):
        return (y,)

    def parameters(self):
        return [torch.tensor(SCALE, dtype=torch.float64)]

    def differentiable_likelihood(self, parameters):
        return Laplace(*parameters)

    def test_quadrature_equals_the_methods_in_use(self):
        """Gauss-Hermite quadrature is no reference at a kink; `quad` below is."""


def _integral(function, r, std):
    """E over f ~ N(0, std^2), split at the kink r and at the points where the weight is."""
    points = np.unique(np.clip([r, -3 * std, 0.0, 3 * std], -14 * std, 14 * std))
    edges = [-14 * std, *points, 14 * std]
    return sum(
        integrate.quad(
            lambda f: function(f) * stats.norm.pdf(f, scale=std), a, b, epsabs=1e-13, epsrel=1e-12
        )[0]
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    )


@covering(r=[-7.0, -0.3, 0.0, 2.0], std=[1.0, 1e-3, 20.0, 0.1])
def test_laplace_expectations_equal_numerical_integrals(r, std):
    laplace = Laplace(SCALE)
    y, mean, var = torch.tensor([[r + 1], [1.0], [std**2]], dtype=torch.float64)
    expected = -math.log(2 * SCALE) - _integral(lambda f: abs(r - f), r, std) / SCALE
    assert float(laplace.expected_log_prob(y, mean, var)) == pytest.approx(expected, abs=1e-10)
    expected = _integral(lambda f: stats.laplace.pdf(r - f, scale=SCALE), r, std)
    density = float(laplace.log_predictive(y, mean, var).exp())
    assert density == pytest.approx(expected, rel=1e-9, abs=1e-12)
    first, second = laplace.expected_derivatives(y, mean, var)
    expected = _integral(lambda f: np.sign(r - f), r, std) / SCALE
    assert float(first) == pytest.approx(expected, abs=1e-10)
    expected = -2 / SCALE * stats.norm.pdf(r, scale=std)
    assert float(second) == pytest.approx(expected, rel=1e-10)
    expected = _integral(lambda f: stats.laplace.cdf(r - f, scale=SCALE), r, std)
    assert float(laplace.cdf(y, mean, var)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("ratio", [1e-8, 1e-4, 1e4, 1e8])
def test_laplace_log_predictive_tends_to_its_limits(ratio):
    # Hardly any latent variance: Laplace. Hardly any noise: Gaussian. Far in the tails of both.
    y = torch.tensor([-600.0, -3.0, 0.1, 30.0], dtype=torch.float64)
    zero, one = torch.zeros_like(y), torch.ones_like(y)
    if ratio < 1:
        value = Laplace(1.0).log_predictive(y, zero, ratio**2 * one)
        expected = stats.laplace.logpdf(y)
    else:
        value = Laplace(1.0).log_predictive(ratio * y / 20, zero, ratio**2 * one)
        expected = stats.norm.logpdf(ratio * y / 20, scale=ratio)
    np.testing.assert_allclose(value, expected, rtol=3e-7 if ratio in (1e-4, 1e4) else 1e-9)


def test_laplace_is_finite_for_extreme_variances_and_residuals(dtype):
    y = torch.tensor([-1e5, -1.0, 0.0, 1.0, 1e5], dtype=dtype)
    for variance in (0.0, 1e-20, 1e-6, 1.0, 1e8):
        mean = torch.zeros_like(y).requires_grad_()
        var = torch.full_like(y, variance).requires_grad_()
        value = Laplace(0.5).log_predictive(y, mean, var)
        value.sum().backward()
        assert value.isfinite().all() and mean.grad.isfinite().all() and var.grad.isfinite().all()
        assert all(d.isfinite().all() for d in Laplace(0.5).expected_derivatives(y, mean, var))


def test_laplace_far_tail_falls_like_the_noise():
    # Where r >> v / b the density is e^{v / 2b^2 - r / b} / 2b exactly, to the last digit.
    y, mean, var = torch.tensor([[500.0], [0.0], [2.0]], dtype=torch.float64)
    expected = 2.0 / (2 * 0.5**2) - 500 / 0.5 - math.log(1.0)
    assert float(Laplace(0.5).log_predictive(y, mean, var)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("std", [0.0, 1e-6, 0.3, 1.0, 50.0])
def test_laplace_quantile_inverts_the_cdf(std):
    q = torch.tensor([1e-12, 1e-3, 0.025, 0.3, 0.5, 0.7, 0.975, 0.999], dtype=torch.float64)
    mean, var = torch.full_like(q, 4.0), torch.full_like(q, std**2)
    y = Laplace(SCALE).quantile(q, mean, var)
    np.testing.assert_allclose(Laplace(SCALE).cdf(y, mean, var), q, rtol=1e-10, atol=0)
    mirrored = Laplace(SCALE).quantile(1 - q, mean, var)
    np.testing.assert_allclose((y + mirrored)[1:], 8.0, atol=1e-10 * (1 + std))


def test_laplace_scale_of_largest_expected_likelihood_is_the_mean_absolute_residual(rng):
    y, mean = torch.tensor(rng.standard_normal((2, 30)))
    var = torch.tensor(rng.uniform(0.1, 1, 30))
    best = expected_absolute_residual(y, mean, var).mean()
    values = [
        Laplace(float(best) * factor).expected_log_prob(y, mean, var).sum()
        for factor in (0.99, 1.0, 1.01)
    ]
    assert values[1] > values[0] and values[1] > values[2]


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, torch.tensor([1.0, 0.0])])
def test_laplace_refuses_scales_that_are_not_positive(scale):
    with pytest.raises(ValueError, match="scale must be positive and finite"):
        Laplace(scale)
