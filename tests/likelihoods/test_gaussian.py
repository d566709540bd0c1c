"""The Gaussian likelihood against SciPy, and under the contract of all likelihoods."""

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.likelihoods import Gaussian, Likelihood
from tests.contracts.numeric_likelihoods import NumericLikelihoodContract

NOISE = 0.37


class TestGaussian(NumericLikelihoodContract):
    """Closed forms throughout."""

    def likelihood(self):
        return Gaussian(NOISE)

    def targets(self):
        return np.array([-2.0, 0.1, 0.5, 3.0])

    def support(self, f):
        return f + np.sqrt(NOISE) * np.linspace(-12, 12, 25)

    def parameters(self):
        return [torch.tensor(NOISE, dtype=torch.float64)]

    def differentiable_likelihood(self, parameters):
        return Gaussian(*parameters)


class _ByQuadrature(Gaussian):
    """The Gaussian likelihood stripped of its closed forms."""

    _expected_log_prob = Likelihood._expected_log_prob
    _log_predictive = Likelihood._log_predictive
    _predictive_moments = Likelihood._predictive_moments


class TestQuadratureDefaults(TestGaussian):
    """The same contract on the base class's quadrature.

    log N(y | f) is a quadratic in f and so exact; N(y | f) needs more nodes as var / noise grows.
    """

    WIDE_VARIANCES = (1e-6, 1e-3, 0.08, 0.7, 3.0)

    def likelihood(self):
        return self.differentiable_likelihood([NOISE])

    def differentiable_likelihood(self, parameters):
        likelihood = _ByQuadrature(*parameters)
        likelihood.n_points = 160
        return likelihood


def test_gaussian_equals_scipy():
    y, mean, var = torch.tensor([[0.3, -1.0], [0.0, 2.0], [0.5, 0.1]], dtype=torch.float64)
    gaussian = Gaussian(NOISE)
    expected = stats.norm(mean, np.sqrt(NOISE)).logpdf(y)
    np.testing.assert_allclose(gaussian.log_prob(y, mean), expected, rtol=1e-12)
    expected = stats.norm(mean, np.sqrt(NOISE + var.numpy())).logpdf(y)
    np.testing.assert_allclose(gaussian.log_predictive(y, mean, var), expected, rtol=1e-12)


def test_gaussian_accepts_one_noise_variance_per_row():
    noise = torch.tensor([0.1, 2.0], dtype=torch.float64)
    y, mean, var = torch.tensor([[0.3, -1.0], [0.0, 2.0], [0.5, 0.1]], dtype=torch.float64)
    together = Gaussian(noise)
    for i in range(2):
        alone = Gaussian(float(noise[i]))
        for name in ("expected_log_prob", "log_predictive"):
            value = getattr(together, name)(y, mean, var)[i]
            torch.testing.assert_close(value, getattr(alone, name)(y[i], mean[i], var[i]))
        moments = together.predictive_moments(mean, var)[1][i]
        torch.testing.assert_close(moments, var[i] + noise[i])


@pytest.mark.parametrize("noise", [0.0, -1.0, np.nan, np.inf, torch.tensor([1.0, 0.0])])
def test_gaussian_refuses_noise_variances_that_are_not_positive(noise):
    with pytest.raises(ValueError, match="noise_variance must be positive and finite"):
        Gaussian(noise)


@pytest.mark.parametrize("n_points", [0, 2.0, None])
def test_likelihood_refuses_bad_numbers_of_points(n_points):
    class Flat(_ByQuadrature):
        def __init__(self):
            Likelihood.__init__(self, n_points=n_points)

    with pytest.raises(ValueError, match="n_points must be a positive integer"):
        Flat()
