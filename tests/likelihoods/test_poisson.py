"""The Poisson likelihood against SciPy, fine integrals and the contract of all likelihoods."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from skgp.likelihoods import Likelihood, Poisson
from tests.contracts.numeric_likelihoods import NumericLikelihoodContract
from tests.reference.fine_grid import panels

LINKS = ["exp", "softplus"]


class TestExp(NumericLikelihoodContract):
    """Closed forms but for the log-predictive and the distribution function."""

    DISCRETE = True
    BAD_TARGETS = (np.nan, np.inf, -1.0, 0.5)

    def likelihood(self):
        return Poisson()

    def targets(self):
        return np.array([0.0, 1.0, 4.0, 7.0])

    def wide_targets(self):
        return np.array([0.0, 1.0, 6.0, 40.0, 500.0])

    def support(self, f):
        return np.arange(200.0)

    def _raw_moments(self, f):
        # Sums over y would run to 1e6 and more for the largest f; tested for small f below.
        rate = self.likelihood()._conditional_mean(torch.as_tensor(f, dtype=torch.float64)).numpy()
        return rate, rate + rate**2


class TestSoftplus(TestExp):
    """Quadrature throughout."""

    VARIANCES = (0.05, 0.7, 0.82, 2.5, 100.0)

    def likelihood(self):
        return Poisson("softplus")


def _rate(link, f):
    return np.exp(f) if link == "exp" else np.logaddexp(0, f)


def _row(*values):
    return tuple(torch.tensor([value], dtype=torch.float64) for value in values)


def _cdf_by_panels(link, y, mean, var):
    """E[Q(y + 1, rate(f))] on panels that are dense about the step at rate(f) = y + 1."""
    std = np.sqrt(var)
    step = np.log(y + 1) if link == "exp" else y + 1 + np.log(-np.expm1(-y - 1))
    width = (1 if link == "exp" else y + 1) / np.sqrt(y + 1)
    edges = np.append(
        np.linspace(-9, 9, 101) * std + mean, step + width * np.linspace(-30, 30, 301)
    )
    edges = np.unique(edges[np.abs(edges - mean) <= 9 * std])
    f, weights = panels(edges)
    return weights @ (stats.norm.pdf(f, mean, std) * special.gammaincc(y + 1, _rate(link, f)))


@pytest.mark.parametrize("link", LINKS)
def test_poisson_equals_scipy(link):
    y, f = torch.tensor([[0.0, 3.0, 500.0], [-40.0, 1.0, 6.0]], dtype=torch.float64)
    expected = stats.poisson(_rate(link, f.numpy())).logpmf(y)
    np.testing.assert_allclose(Poisson(link).log_prob(y, f), expected, rtol=1e-12)


def test_softplus_log_rate_and_inverse_keep_precision():
    likelihood = Poisson("softplus")
    f = torch.tensor([-1000.0, -37.0, -35.0, -1.0, 0.0, 5.0, 60.0, 1e6], dtype=torch.float64)
    f.requires_grad_()
    log_rate = likelihood._link.log_rate(f)
    log_rate.sum().backward()
    x = f.detach().numpy()
    expected = np.where(x < -36, x, np.log(np.logaddexp(0, np.maximum(x, -100))))
    np.testing.assert_allclose(log_rate.detach(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(f.grad, likelihood._link.log_slope(f.detach()), rtol=1e-12)
    rate = torch.tensor([1e-12, 0.3, 20.0, 1e5], dtype=torch.float64)
    back = likelihood._link.rate(likelihood._link.inverse(rate))
    np.testing.assert_allclose(back, rate, rtol=1e-13)


@pytest.mark.parametrize("link", LINKS)
def test_poisson_is_finite_for_extreme_latent_values(link, dtype):
    likelihood = Poisson(link)
    y = torch.tensor([0.0, 3.0, 1e4, 0.0, 1.0, 500.0, 2.0], dtype=dtype)
    mean = torch.tensor([-1e3, 1e3, -50.0, 80.0, 0.0, -8.0, 7e3], dtype=dtype)
    for variance in (0.0, 1e-8, 1.0, 1e4):
        m, v = mean.clone().requires_grad_(), torch.full_like(mean, variance).requires_grad_()
        for name in ("expected_log_prob", "log_predictive"):
            value = getattr(likelihood, name)(y, m, v)
            value.sum().backward()
            assert value.isfinite().all() and m.grad.isfinite().all() and v.grad.isfinite().all()
        results = [
            likelihood.log_prob(y, mean),
            *likelihood.derivatives(y, mean),
            *likelihood.expected_derivatives(y, mean, v.detach()),
            *likelihood.predictive_moments(mean, v.detach()),
            likelihood.cdf(y, mean, v.detach()),
        ]
        assert all(bool(result.isfinite().all()) for result in results)


def test_exp_gradient_beyond_the_clamp_pulls_the_rate_down():
    y, f = _row(3.0, 5000.0)
    f.requires_grad_()
    Poisson().log_prob(y, f).backward()
    assert float(f.grad) < -1e100
    assert float(Poisson().derivatives(y, f.detach())[0]) == pytest.approx(float(f.grad), rel=1e-12)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("var", [1e-6, 0.05, 0.3, 0.36, 1.0, 3.0, 100.0])
def test_poisson_cdf_equals_a_fine_integral(link, var):
    rows = [
        (y, mean, var)
        for mean in ((-8.0, 0.0, 2.0, 6.0, 13.8) if link == "exp" else (-8.0, 0.0, 2.0, 50.0, 1e6))
        for level in (0.01, 0.4, 0.99)
        for y in (0.0, np.floor(min(_rate(link, stats.norm.ppf(level, mean, var**0.5)), 1e9)))
    ]
    expected = [_cdf_by_panels(link, *row) for row in rows]
    value = Poisson(link).cdf(*torch.tensor(rows, dtype=torch.float64).T)
    np.testing.assert_allclose(value, expected, rtol=0, atol=3e-8)


def test_poisson_quantile_of_large_rates_is_that_of_the_rate():
    # Beyond 1e15 the noise of the count is less than 1e-7 of it.
    q = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    for mean in (40.0, 300.0):
        y = Poisson().quantile(q, torch.full_like(q, mean), torch.full_like(q, 4.0))
        np.testing.assert_allclose(y.log(), stats.norm.ppf(q, mean, 2.0), rtol=1e-7)


def test_poisson_cdf_of_other_values_is_a_step_function():
    y, mean, var = torch.tensor([[-0.5, -3.0, 2.0, 2.7], [0.0] * 4, [0.5] * 4]).double()
    value = Poisson().cdf(y, mean, var)
    assert float(value[0]) == float(value[1]) == 0.0 and value[2] == value[3]


def test_poisson_samples_of_huge_rates_do_not_wrap_around(generator):
    f = torch.full((2000,), 50.0, dtype=torch.float64)
    draws = Poisson().sample(f, generator)
    z = (draws / f.exp() - 1) * f.div(2).exp()
    assert torch.equal(draws, draws.round())
    assert abs(float(z.mean()) * math.sqrt(2000)) < 4
    assert abs((float(z.square().mean()) - 1) * math.sqrt(1000)) < 4


@pytest.mark.parametrize("link", LINKS)
def test_poisson_mode_gives_the_rate_y(link):
    y = torch.tensor([0.0, 1.0, 20.0, 1e6], dtype=torch.float64)
    mode = Poisson(link).mode(y)
    assert float(mode[0]) == -math.inf
    np.testing.assert_allclose(_rate(link, mode[1:].numpy()), y[1:], rtol=1e-12)


@pytest.mark.parametrize(("bad", "shown"), [(-1.0, "-1"), (2.5, "2.5")])
def test_poisson_refuses_what_is_no_count(bad, shown):
    y = torch.tensor([0.0, bad], dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"y must hold counts 0, 1, 2.*got {shown}\. Round"):
        Poisson().log_prob(y, torch.zeros_like(y))


def test_poisson_refuses_unknown_links():
    with pytest.raises(ValueError, match=r"link must be one of \('exp', 'softplus'\); got 'log'"):
        Poisson("log")


@pytest.mark.parametrize("link", LINKS)
def test_gaussian_observations_have_the_precision_of_large_counts(link):
    """Var[g^-1(y)] is about rate / g'(f)^2; a count of 0 says no more than the prior mean."""
    likelihood = Poisson(link)
    y, o = torch.tensor([0.0, 2e4, 1e6], dtype=torch.float64), math.log(10.0)
    f, precision = likelihood.at(torch.full_like(y, o)).gaussian_observations(y, -5 + 0 * y)
    slope = f.exp() if link == "exp" else torch.sigmoid(f)  # of the rate a unit exposure
    expected = (10 * slope) ** 2 / (y + 0.5)
    torch.testing.assert_close(precision[1:], expected[1:], rtol=1e-4, atol=0)
    made = likelihood.at(torch.full_like(y, o)).fisher_information(f)
    torch.testing.assert_close(made[1:], expected[1:], rtol=1e-4, atol=0)
    assert float(f[0]) == -5.0 and float(likelihood.gaussian_observations(y)[0][0]) > -1


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_gaussian_targets_are_on_the_scale_of_the_link(link):
    y = torch.tensor([0.0, 1.0, 2.0, 10.0, 1e4], dtype=torch.float64)
    likelihood, offset = Poisson(link), torch.full_like(y, 0.7)
    rate = likelihood.predictive_moments(likelihood.gaussian_targets(y), 0 * y)[0]
    torch.testing.assert_close(rate, y + 0.5, rtol=1e-9, atol=0)
    at = likelihood.at(offset)
    rate = at.predictive_moments(at.gaussian_targets(y), 0 * y)[0]
    torch.testing.assert_close(rate, y + 0.5, rtol=1e-9, atol=0)


def test_a_centred_mean_leaves_the_rate_at_any_variance():
    """That of a log-normal distribution is exp(m + v / 2)."""
    for f, var in ((-3.0, 0.0), (1.0, 2.0), (0.5, 400.0)):
        mean, slope = Poisson().centred(f, var)
        assert mean + var / 2 == pytest.approx(f) and slope == -0.5
        assert Poisson(link="softplus").centred(f, var) == (f, 0.0)


@pytest.mark.parametrize("offset", [None, 1.5])
def test_expectations_in_closed_form_are_those_of_autograd(offset):
    mean = torch.tensor([-800.0, -3.0, 0.0, 4.0, 330.0], dtype=torch.float64)
    var, y = torch.tensor([4.0, 0.5, 1.0, 2.0, 3.0]).to(mean), torch.tensor([0, 0, 3, 40, 7.0])
    likelihood = Poisson().at(None if offset is None else torch.full_like(mean, offset))
    found = likelihood.expected_log_prob_and_derivatives(y.to(mean), mean, var)
    expected = Likelihood.expected_log_prob_and_derivatives(likelihood, y.to(mean), mean, var)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-300)
