"""The evidence of a series with little noise, against dense arithmetic of many digits."""

import math

import mpmath
import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.series import make_series
from skgp.inference.markov.short import DensePosterior
from skgp.kernels import ActiveDims, LocalLinearTrend
from skgp.kernels.sde import state_space
from skgp.learning.markov.objectives import Component, GaussianEvidence, VariationalEvidence
from skgp.likelihoods import Bernoulli, Gaussian, Poisson
from tests.covering import slow_case

KERNEL = 0.8 * Matern(0.5, nu=1.5)


def exact_evidence(x, y, noise):
    """Log marginal likelihood and its slope in log noise, with 40 digits."""
    with mpmath.workdps(40):
        n, rate = len(x), mpmath.sqrt(3) / 0.5
        y = mpmath.matrix([mpmath.mpf(v) for v in y])
        C = mpmath.matrix(n)
        for i in range(n):
            for j in range(n):
                r = rate * abs(mpmath.mpf(x[i]) - mpmath.mpf(x[j]))
                C[i, j] = mpmath.mpf(0.8) * (1 + r) * mpmath.exp(-r)
            C[i, i] += noise
        inverse = C**-1
        alpha = inverse * y
        fit, log_det = (y.T * alpha)[0], mpmath.log(mpmath.det(C))
        value = -(fit + log_det + n * mpmath.log(2 * mpmath.pi)) / 2
        slope = sum(alpha[i] ** 2 - inverse[i, i] for i in range(n)) * noise / 2
        return float(value), float(slope)


def problem(noise):
    """Times on a grid of binary fractions, whose gaps are exact, of which some repeat."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.integers(0, 64, 36)) / 64.0
    return x, np.sin(3 * x) + noise**0.5 * rng.normal(size=len(x))


def dynamics():
    form = state_space(KERNEL)
    return form.at()


@pytest.mark.parametrize("noise", [1e-8, slow_case(0.1)])
def test_gaussian_evidence_loses_no_digits_to_little_noise(noise):
    x, y = problem(noise)
    objective = GaussianEvidence(make_series(torch.tensor(x), torch.tensor(y)))
    assert len(objective.series.times) < len(x)
    found = objective([dynamics()], torch.tensor([math.log(noise)], dtype=torch.float64))
    # exp(log(noise)) is good to 20 ulp, the plain form of the evidence to 1e-7 nats at most.
    value, slope = exact_evidence(x, y, math.exp(math.log(noise)))
    assert found.value == pytest.approx(value, abs=3e-11)
    assert float(found.likelihood_gradient[0]) == pytest.approx(slope, abs=3e-11)


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize(
    "kernel",
    [
        4.0 * Matern(3.0, nu=2.5),
        LocalLinearTrend(0.1, 2.0, 0.1, origin=-1.0) + 0.5 * Matern(1.0, nu=1.5),
    ],
    ids=["matern", "trend"],
)
def test_short_series_of_little_noise_take_one_factor_with_the_digits_of_the_filter(
    kernel, noise, monkeypatch
):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, 60))
    y = np.sin(2 * x) + math.sqrt(noise) * rng.normal(size=60)
    at = [state_space(kernel).at()], torch.tensor([math.log(noise)], dtype=torch.float64)

    def evaluate():
        return GaussianEvidence(make_series(*map(torch.from_numpy, (x, y))))(*at)

    dense = evaluate()
    monkeypatch.setattr("skgp.inference.defaults.MAX_TIMES", 0)
    filtered = evaluate()
    assert isinstance(dense.posterior, DensePosterior)
    assert not isinstance(filtered.posterior, DensePosterior)
    assert dense.value == pytest.approx(filtered.value, rel=1e-8)
    for found, expected in (
        (dense.gradients()[0], filtered.gradients()[0]),
        (dense.likelihood_gradient, filtered.likelihood_gradient),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_bound_of_gaussian_noise_loses_no_digits_either():
    x, y = problem(1e-8)
    series = make_series(torch.tensor(x), torch.tensor(y))
    found = fit_sites(dynamics(), series, Gaussian(1e-8))
    assert found.elbo == pytest.approx(exact_evidence(x, y, 1e-8)[0], abs=1e-9)


def test_parameters_of_one_structure_serve_forms_of_other_values():
    kernels = [c * Matern(s, nu=1.5) + Matern(2 * s, "fixed") for c, s in ((1.0, 0.3), (7.0, 11.0))]
    kernels += [ActiveDims(kernels[0], [2]), ActiveDims(Matern(0.4), [2]) + 3.0 * RBF(1.5)]
    kernels += [2.0 * Matern(0.3, nu=0.5) + Matern(2.0), 2.0 * Matern(0.3) * Matern(2.0)]
    for kernel in kernels:
        component = Component(kernel)
        theta = component.theta + torch.linspace(-0.5, 0.5, len(component.theta)).double()
        expected = component.form.parameters(theta)
        torch.testing.assert_close(component.parameters(theta), expected, rtol=0, atol=1e-14)


def rare(name):
    """A burst of counts, or of labels, and the ELBO with the mean of all as base rate."""
    x, there = torch.arange(80.0).double(), (torch.arange(80) - 40).abs() < 3
    if name == "poisson":
        y, law, rate = 20.0 * there, Poisson(), math.log(20.0 * 5 / 80)
    else:
        y, law, rate = 2.0 * there - 1, Bernoulli(name), -1.5
    return VariationalEvidence(make_series(x, y.double()), law, rate)


@pytest.mark.parametrize("name", ["poisson", "logit", "probit"])
def test_elbo_has_the_gradient_that_its_prior_mean_adds(name):
    evidence, none = rare(name), torch.empty(0, dtype=torch.float64)
    part = Component(3.0 * Matern(4.0, nu=1.5) + 0.5 * RBF(20.0))
    found = evidence([part.dynamics()], none, tol=1e-12)
    slope = part.pull(part.theta, found.gradients()[0])
    for i, step in enumerate(1e-4 * torch.eye(len(part.theta)).double()):
        ends = (evidence([part.dynamics(part.theta + s * step)], none, tol=1e-12) for s in (1, -1))
        up, down = (each.value for each in ends)
        assert float(slope[i]) == pytest.approx((up - down) / 2e-4, rel=1e-4, abs=1e-4)


def test_sites_are_kept_where_they_are_as_the_prior_mean_moves():
    """A site of f = m + g is about the same f whatever m: its beta / weight is that of g."""
    evidence, none = rare("poisson"), torch.empty(0, dtype=torch.float64)
    assert evidence.sites_about(0.0) is None
    motion = [Component(3.0 * Matern(4.0, nu=1.5)).dynamics()]
    evidence(motion, none)
    mean = evidence.mean_of(motion)
    beta, weight = evidence.sites_about(mean)
    moved, same = evidence.sites_about(mean - 2.5)
    torch.testing.assert_close(same, weight)
    torch.testing.assert_close(moved / same - 2.5, beta / weight)


def test_elbo_is_found_after_one_of_a_far_variance():
    """Whose prior mean is 700 lower, from where the sites of the last evaluation start."""
    none, kernel = torch.empty(0, dtype=torch.float64), Matern(4.0, nu=1.5)
    near, far = (Component(v * kernel).dynamics() for v in (0.6, 1400.0))
    fresh, used = rare("poisson"), rare("poisson")
    assert used([far], none).value == -math.inf  # no digit is left
    value = used([near], none, tol=1e-10).value
    assert value == pytest.approx(fresh([near], none, tol=1e-10).value, abs=1e-6)
