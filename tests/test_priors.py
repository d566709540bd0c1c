"""Priors in log coordinates against scipy's densities."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from skgp.priors import Gamma, HalfNormal, LogNormal

PRIORS = {
    "log-normal": (LogNormal(0.7, 1.2), stats.lognorm(1.2, scale=0.7)),
    "gamma": (Gamma(2.5, 3.0), stats.gamma(2.5, scale=1 / 3)),
    "gamma, shape below 1": (Gamma(0.5, 1.0), stats.gamma(0.5)),
    "half-normal": (HalfNormal(2.0), stats.halfnorm(scale=2.0)),
}
each_prior = pytest.mark.parametrize("name", PRIORS)


@each_prior
def test_prior_is_the_density_of_the_logarithm(name):
    prior, law = PRIORS[name]
    u = np.linspace(-4.0, 1.5, 12)
    expected = law.logpdf(np.exp(u)) + u  # the Jacobian of exp
    np.testing.assert_allclose(prior.log_density(u), expected, rtol=1e-10, atol=1e-12)
    total, _ = integrate.quad(lambda v: math.exp(prior.log_density(np.float64(v))), -60, 6)
    assert total == pytest.approx(1.0, rel=1e-6)
    assert prior.median == pytest.approx(law.median(), rel=1e-10)


@each_prior
def test_prior_jacobian_and_gradient_equal_numerical_derivatives(name):
    prior, law = PRIORS[name]
    u, h = np.linspace(-4.0, 1.5, 12), 1e-5
    mass = (law.cdf(np.exp(u + h)) - law.cdf(np.exp(u - h))) / (2 * h)
    np.testing.assert_allclose(np.exp(prior.log_density(u)), mass, rtol=1e-5, atol=1e-10)
    slope = (prior.log_density(u + h) - prior.log_density(u - h)) / (2 * h)
    np.testing.assert_allclose(prior.gradient(u), slope, rtol=1e-7, atol=1e-8)
    far = np.array([-500.0, 500.0])
    assert np.isfinite(prior.log_density(far)).all() and np.isfinite(prior.gradient(far)).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogNormal(0.0), "LogNormal: median"),
        (lambda: LogNormal(1.0, -1.0), "LogNormal: sd"),
        (lambda: Gamma(1.0, math.inf), "Gamma: rate"),
        (lambda: Gamma(math.nan, 1.0), "Gamma: shape"),
        (lambda: HalfNormal(-1.0), "HalfNormal: scale"),
        (lambda: HalfNormal([1.0, 2.0]), "HalfNormal: scale"),
    ],
)
def test_prior_refuses_improper_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()
