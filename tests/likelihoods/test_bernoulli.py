"""The Bernoulli likelihood against SciPy, fine integrals and the contract of all likelihoods."""

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from skgp.likelihoods import Bernoulli
from skgp.likelihoods.bernoulli import _WIDE
from tests.contracts.likelihoods import LikelihoodContract
from tests.covering import covering

WIDE_MEANS = np.linspace(-12.0, 12.0, 9)


class TestLogit(LikelihoodContract):
    """Gauss-Hermite quadrature up to a variance of .81, other rules beyond."""

    VARIANCES = (0.05, 0.8, 0.82, 2.5, 100.0)
    DISCRETE = True
    BAD_TARGETS = (np.nan, np.inf, 0.0, 0.5, 2.0)

    def likelihood(self):
        return Bernoulli()

    def targets(self):
        return np.array([-1.0, 1.0, 1.0, -1.0])

    def support(self, f):
        return np.array([-1.0, 1.0])


class TestProbit(TestLogit):
    """Closed forms, but for the expectations of log Phi and of its derivatives."""

    def likelihood(self):
        return Bernoulli(link="probit", n_points=40)


@covering(var=[1e-3, 0.8, 0.82, 10.0, 100.0], link=["probit", "logit"])
def test_bernoulli_prob_equals_a_numerical_integral(link, var):
    sigmoid = special.expit if link == "logit" else special.ndtr
    expected = [
        integrate.quad(
            lambda z, m=mean: sigmoid(m + var**0.5 * z) * stats.norm.pdf(z),
            -12,
            12,
            epsabs=1e-12,
            points=[np.clip(-mean / var**0.5, -12, 12)],
            limit=200,
        )[0]
        for mean in WIDE_MEANS
    ]
    mean = torch.tensor(WIDE_MEANS)
    value = Bernoulli(link).prob(mean, torch.full_like(mean, var))
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-9)
    both = value + Bernoulli(link).prob(-mean, torch.full_like(mean, var))
    np.testing.assert_allclose(both, 1.0, atol=1e-9)


@pytest.mark.parametrize("var", [0.0, 1e-3, 0.5, 0.8, 3.0, 50.0, 1e4])
def test_logit_expectations_are_right_to_ten_digits(var):
    """By a fine sum, far from 0 too; a mixture of probits."""
    z, h = np.linspace(-14, 14, 20_001, retstep=True)
    density, means = h * stats.norm.pdf(z), np.array([-300.0, -30.0, -1.0, 0.3, 2.0, 9.0, 40.0])
    f = means[:, None] + var**0.5 * z
    wrong = special.expit(-f)
    parts = special.log_expit(f), wrong, -wrong * special.expit(f)
    expected = [part @ density for part in parts]
    mean = torch.tensor(means)
    y, v = torch.ones_like(mean), torch.full_like(mean, var)
    found = Bernoulli().expected_log_prob_and_derivatives(y, mean, v)
    np.testing.assert_allclose(np.stack(found), expected, rtol=1e-12, atol=2e-11)
    other = Bernoulli().expected_log_prob_and_derivatives(-y, -mean, v)
    np.testing.assert_allclose(np.stack(other), [found[0], -found[1], found[2]], atol=1e-15)


def test_logit_log_predictive_keeps_relative_precision_in_the_tail():
    # P = e^(m + v/2) E_{N(m + v, v)}[sigma(-f)], by a fine sum about the tilted mean.
    z, h = np.linspace(-12, 12, 4801, retstep=True)
    for mean, var in ((-60.0, 4.0), (-60.0, 50.0), (-200.0, 100.0), (-30.0, 90.0)):
        terms = special.expit(-(mean + var + var**0.5 * z)) * stats.norm.pdf(z)
        expected = mean + var / 2 + np.log(h * terms.sum())
        y, m, v = torch.tensor([[1.0], [mean], [var]], dtype=torch.float64)
        assert float(Bernoulli().log_predictive(y, m, v)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("link", ["logit", "probit"])
def test_bernoulli_is_finite_for_extreme_latent_values(link):
    y, mean = torch.tensor([[1.0, 1.0, -1.0], [-1e4, 1e4, 1e4]], dtype=torch.float64)
    for var in (0.0, 1.0, 1e4):
        likelihood, v = Bernoulli(link), torch.full_like(mean, var)
        values = [
            likelihood.log_prob(y, mean),
            *likelihood.derivatives(y, mean),
            likelihood.expected_log_prob(y, mean, v),
            likelihood.log_predictive(y, mean, v),
            *likelihood.expected_derivatives(y, mean, v),
        ]
        assert all(bool(value.isfinite().all()) for value in values)


def test_probit_derivatives_keep_precision_in_the_left_tail():
    # Mills' ratio: d1 = -f + 1 / |f| + O(f^-3), d2 = -1 + 1 / f^2 + O(f^-4).
    y, f = torch.tensor([[1.0], [-1000.0]], dtype=torch.float64)
    first, second = Bernoulli("probit").derivatives(y, f)
    assert float(first) == pytest.approx(1000.001, rel=1e-8)
    assert float(second) == pytest.approx(-1.0 + 1e-6, abs=1e-8)


def test_logit_is_continuous_where_the_rule_changes():
    y, mean = torch.ones(9, dtype=torch.float64), torch.tensor(WIDE_MEANS)
    at, above = (torch.full_like(mean, value) for value in (_WIDE, np.nextafter(_WIDE, 1.0)))
    for name in ("expected_log_prob", "log_predictive", "expected_derivatives"):
        method = getattr(Bernoulli(), name)
        torch.testing.assert_close(method(y, mean, at), method(y, mean, above), rtol=0, atol=1e-9)


def test_logit_treats_rows_alone_as_it_does_together():
    y, mean, var = torch.tensor([[1.0, -1.0], [0.3, -2.0], [0.5, 4.0]], dtype=torch.float64)
    together = Bernoulli().expected_log_prob(y, mean, var)
    for i in range(2):
        alone = Bernoulli().expected_log_prob(y[i : i + 1], mean[i : i + 1], var[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-12, atol=0)


def test_logit_gradients_survive_mixed_variances():
    mean = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    var = torch.tensor([0.0, 1.0, 50.0], dtype=torch.float64, requires_grad=True)
    Bernoulli().log_predictive(torch.ones_like(mean), mean, var).sum().backward()
    assert mean.grad.isfinite().all() and var.grad.isfinite().all()


def test_bernoulli_refuses_unknown_links_and_labels():
    with pytest.raises(ValueError, match="link must be one of"):
        Bernoulli(link="cauchit")
    with pytest.raises(ValueError, match="labels -1 and"):
        Bernoulli().log_prob(torch.tensor([0.0, 1.0]), torch.zeros(2))


@pytest.mark.parametrize("link", ["logit", "probit"])
@pytest.mark.parametrize("f", [-7.0, -1.0, 0.0, 3.0])
def test_a_centred_mean_leaves_the_probability_at_any_variance(link, f):
    sigmoid, law = special.expit if link == "logit" else special.ndtr, Bernoulli(link)
    z = np.linspace(-12, 12, 20001)
    for var in (0.0, 0.3, 4.0, 400.0):
        mean, slope = law.centred(f, var)
        found = integrate.simpson(sigmoid(mean + var**0.5 * z) * stats.norm.pdf(z), z)
        assert found == pytest.approx(float(sigmoid(f)), rel=1e-6)
        ends = [law.centred(f, var + h)[0] for h in (1e-4, 0.0)]
        assert slope == pytest.approx((ends[0] - ends[1]) / 1e-4, rel=1e-3, abs=1e-9)
