"""Draws of N(f; m, v) p(y | f) against the same density on a fine grid."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.likelihoods import (
    Bernoulli,
    Gaussian,
    Laplace,
    Likelihood,
    Poisson,
    StudentT,
    defaults,
    product_sampling,
)
from skgp.likelihoods.log_expectation import product_noise
from tests.reference.product_density import ProductDensity
from tests.same import assert_same

STUDENT = StudentT(1.0, 4.0)
# likelihood, y, mean, variance, mode of the likelihood
CASES = {
    "gaussian": (Gaussian(0.5), 3.0, -1.0, 2.0, 3.0),
    "logit, 20 sd apart": (Bernoulli("logit"), 1.0, -20.0, 1.0, math.inf),
    "logit, wide": (Bernoulli("logit"), -1.0, 0.3, 100.0, -math.inf),
    "probit, 20 sd apart": (Bernoulli("probit"), -1.0, 20.0, 1.0, -math.inf),
    "probit, very wide": (Bernoulli("probit"), -1.0, 20.0, 1e4, -math.inf),
    "counts 0, very wide": (Poisson("exp"), 0.0, 0.0, 1e4, -math.inf),
    "counts 0, rate e^5": (Poisson("exp"), 0.0, 5.0, 1.0, -math.inf),
    "counts 0, rate e^800": (Poisson("exp"), 0.0, 800.0, 1.0, -math.inf),
    "counts 500, 20 sd apart": (Poisson("exp"), 500.0, -14.0, 1.0, math.log(500)),
    "counts 500, very wide": (Poisson("exp"), 500.0, 0.0, 1e4, math.log(500)),
    "counts 3, very narrow": (Poisson("exp"), 3.0, 1.0, 1e-10, math.log(3)),
    "softplus 0, very wide": (Poisson("softplus"), 0.0, 0.0, 1e4, -math.inf),
    "softplus 500, far": (Poisson("softplus"), 500.0, 0.0, 1.0, 500.0),
    "softplus 2, 30 sd apart": (Poisson("softplus"), 2.0, -30.0, 1.0, 2.0),
    "laplace, kink": (Laplace(0.1), 0.0, 3.0, 1.0, 0.0),
    "laplace, slope": (Laplace(3.0), 0.0, 0.5, 0.01, 0.0),
    "student, 50 scales, narrow": (STUDENT, 50.0, 0.0, 1.0, 50.0),
    "student, 50 scales, wide": (STUDENT, 50.0, 0.0, 100.0, 50.0),
    "student, 50 scales, very wide": (STUDENT, 50.0, 0.0, 1e4, 50.0),
    "student, 20 sd": (STUDENT, 60.0, 0.0, 9.0, 60.0),
    "student, very narrow": (STUDENT, 0.5, 0.0, 1e-8, 0.5),
    "student, two modes": (StudentT(0.05, 3.0), 2.6, 0.0, 1.0, 2.6),
    "student, tiny scale": (StudentT(1e-6, 4.0), 0.5, 0.0, 1.0, 0.5),
    "student, df 0.5": (StudentT(1.0, 0.5), 60.0, 0.0, 900.0, 60.0),
    "student, df 100": (StudentT(1.0, 100.0), 50.0, 0.0, 50.0, 50.0),
}
REJECTION = [name for name in CASES if name != "gaussian"]


def product_samples(likelihood, y, mean, var, **options):
    """Draws of f, in its units."""
    noise, _ = product_noise(likelihood, y, mean, var, **options)
    return mean + var.sqrt() * noise


def rows(y, mean, var, *shape):
    return [torch.full(shape, value, dtype=torch.float64) for value in (y, mean, var)]


@pytest.mark.parametrize("name", CASES)
def test_product_samples_have_the_distribution_of_the_product(name, generator):
    likelihood, y, mean, var, mode = CASES[name]
    density = ProductDensity(likelihood, y, mean, var, mode=mode)
    noise, precision = product_noise(
        likelihood, *rows(y, mean, var, 100), n_samples=400, generator=generator
    )
    assert (precision >= 0).all()
    e = noise.flatten().numpy()
    assert stats.kstest(density.cdf(e), "uniform").pvalue > 1e-3
    expected_mean, expected_var = density.moments()
    centred = e - expected_mean
    for sample, expected in ((centred, 0.0), (centred**2, expected_var)):
        assert abs(sample.mean() - expected) < 4 * sample.std() / math.sqrt(len(e))


@pytest.mark.parametrize("name", CASES)
def test_draws_of_a_row_are_uncorrelated(name, generator):
    likelihood, y, mean, var, _ = CASES[name]
    noise, _ = product_noise(
        likelihood, *rows(y, mean, var, 4000), n_samples=3, generator=generator
    )
    correlation = np.corrcoef(noise.numpy())[np.triu_indices(3, 1)]
    assert (np.abs(correlation) < 4 / math.sqrt(4000)).all()


@pytest.mark.parametrize("name", REJECTION)
def test_envelopes_have_less_than_twice_the_mass(name, generator, monkeypatch):
    """What the proof that the rejection ends rests on."""
    likelihood, y, mean, var, mode = CASES[name]
    envelopes = []

    def recorded(target, pieces, n_samples, generator):
        envelopes.append(pieces)
        return target.mean.new_zeros(n_samples, *target.mean.shape)

    monkeypatch.setattr(product_sampling, "_reject", recorded)
    product_noise(likelihood, *rows(y, mean, var, 1), generator=generator)
    log_mass = float(envelopes[0].log_mass().logsumexp(0)) - 0.5 * math.log(2 * math.pi)
    density = ProductDensity(likelihood, y, mean, var, mode=mode)
    assert 0.7 < math.exp(density.log_mass - log_mass) < 1 + 1e-6


def test_every_entry_is_filled_for_mixed_rows(generator):
    n = 3000
    mean = 6 * torch.randn(n, dtype=torch.float64, generator=generator)
    var = (4 * torch.randn(n, dtype=torch.float64, generator=generator)).exp()
    y = torch.poisson(mean.clamp_max(6).exp(), generator=generator)
    for likelihood in (Poisson("exp"), Poisson("softplus"), STUDENT):
        f = product_samples(likelihood, y, mean, var, n_samples=2, generator=generator)
        assert f.shape == (2, n) and f.isfinite().all()
        assert (f[0] != f[1]).all()


def paper_sampler(likelihood, y, mean, var, mode, rng):
    """One draw by the supplement's section 1, and its number of proposals."""
    log_max = float(likelihood.log_prob(*torch.tensor([[y], [np.clip(mode, -800, 800)]]).double()))
    for n in range(10, 0, -1):
        r = math.sqrt(var * math.log(n) / (1 - 1 / n)) if n > 1 else 0.0
        peak = min(max(mode, mean - r), mean + r)
        log_m1 = float(likelihood.log_prob(*torch.tensor([[y], [peak]]).double()))
        if log_m1 <= log_max - 0.5 * math.log(n):
            break
    for n_proposals in range(1, 100_000):
        e = math.sqrt(n) * rng.standard_normal()
        f = torch.tensor([mean + math.sqrt(var) * e]).double()
        log_prob = float(likelihood.log_prob(torch.tensor([y]).double(), f))
        # Densities of q and of the proposal, without their common factor.
        log_ratio = 0.5 * math.log(n) - 0.5 * e**2 * (1 - 1 / n) + log_prob - log_max
        if math.log(rng.uniform()) < log_ratio:
            return e, n_proposals
    raise AssertionError("no proposal was accepted")


@pytest.mark.parametrize(
    ("likelihood", "y", "mean", "mode"),
    [(Bernoulli(), 1.0, -1.0, math.inf), (Poisson("exp"), 3.0, 0.5, math.log(3.0))],
)
def test_product_samples_agree_with_the_sampler_of_the_paper(
    likelihood, y, mean, mode, rng, generator
):
    paper = [paper_sampler(likelihood, y, mean, 1.0, mode, rng)[0] for _ in range(400)]
    noise, _ = product_noise(likelihood, *rows(y, mean, 1.0, 400), generator=generator)
    assert stats.ks_2samp(paper, noise.flatten().numpy()).pvalue > 1e-3


def test_zero_variance_gives_the_mean(generator):
    y, mean, var = rows(2.0, 0.7, 0.0, 2000)
    for likelihood in (Gaussian(0.1), Poisson("exp"), STUDENT):
        noise, precision = product_noise(likelihood, y, mean, var, generator=generator)
        assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-3
        torch.testing.assert_close(precision, (-likelihood.derivatives(y, mean)[1]).clamp_min(0))
        assert_same(product_samples(likelihood, y, mean, var, generator=generator)[0], mean)


def test_parameters_may_differ_by_row(generator):
    noise_variance = torch.tensor([1e-6, 1e6], dtype=torch.float64)
    scale = noise_variance.sqrt()
    y, mean, var = rows(2.0, 0.0, 1.0, 3, 2)
    for likelihood in (Gaussian(noise_variance), Laplace(scale), StudentT(scale, 30.0)):
        f = product_samples(likelihood, y, mean, var, n_samples=500, generator=generator)
        assert f.shape == (500, 3, 2)
        assert (f[..., 0] - 2).abs().max() < 0.1
        assert f[..., 1].mean().abs() < 0.2 and abs(f[..., 1].var() - 1) < 0.2


def test_product_samples_broadcast_and_keep_dtype(dtype, generator):
    y = torch.tensor([1.0, -1.0], dtype=dtype)
    mean = torch.zeros(3, 1, dtype=dtype)
    var = torch.ones((), dtype=dtype)
    f = product_samples(Bernoulli(), y, mean, var, n_samples=5, generator=generator)
    assert f.shape == (5, 3, 2) and f.dtype == dtype
    noise, precision = product_noise(Bernoulli(), y, mean, var, generator=generator)
    assert noise.shape == (1, 3, 2) and precision.shape == (3, 2) and precision.dtype == dtype


@pytest.mark.parametrize("likelihood", [Gaussian(1.0), Bernoulli(), STUDENT])
def test_empty_and_scalar_input(likelihood, generator):
    empty = torch.zeros(0, dtype=torch.float64)
    f = product_samples(likelihood, empty, empty, empty, n_samples=4, generator=generator)
    assert f.shape == (4, 0)
    scalar = torch.ones((), dtype=torch.float64)
    f = product_samples(likelihood, scalar, 0 * scalar, 100 * scalar, generator=generator)
    assert f.shape == (1,) and f.isfinite().all()


def test_product_samples_depend_on_the_generator_alone():
    y, mean, var = rows(1.0, 0.0, 1.0, 10)
    state = torch.random.get_rng_state()
    first, again, other = (
        product_samples(Bernoulli(), y, mean, var, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert not torch.equal(first, other)
    assert_same(first, again)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_memory_bound_changes_only_the_rounds(generator, monkeypatch):
    monkeypatch.setattr(defaults, "PROPOSALS_HELD", 50)
    f = product_samples(Bernoulli(), *rows(1.0, 0.0, 1.0, 20), n_samples=40, generator=generator)
    assert f.isfinite().all() and f.unique().numel() == 800


class Broken(Bernoulli):
    """A density that is nowhere finite."""

    def _log_prob(self, y, f):
        return torch.full_like(y * f, math.nan)


class TwoPeaks(Bernoulli):
    """Not log-concave, unlike its parent."""

    def _log_prob(self, y, f):
        return torch.logaddexp(-8 * (f - 1) ** 2, -8 * (f + 1) ** 2)

    def _derivatives(self, y, f):
        right = torch.sigmoid(32 * f)
        first = -16 * (f - 1) * right - 16 * (f + 1) * (1 - right)
        return first, -16 + 32**2 * right * (1 - right)


class Unknown(Likelihood):
    """A likelihood of a shape that nobody promises."""

    is_log_concave = False

    def _log_prob(self, y, f):
        return -((y - f) ** 2)

    def _derivatives(self, y, f):
        return 2 * (y - f), torch.full_like(f, -2.0)

    def _mode(self, y):
        return y

    def _conditional_mean(self, f):
        return f

    def _conditional_var(self, f):
        return torch.full_like(f, 0.5)


def test_unfilled_entries_are_never_returned(generator):
    with pytest.raises(RuntimeError, match="2 of 2 rows are without.*Broken"):
        product_samples(Broken(), *rows(1.0, 0.0, 1.0, 2), generator=generator)


def test_likelihoods_of_another_shape_are_refused(generator):
    y, mean, var = rows(1.0, 0.5, 1.0, 50)
    with pytest.raises(ValueError, match="TwoPeaks exceeds its envelope"):
        product_samples(TwoPeaks(), y, mean, var, n_samples=50, generator=generator)
    with pytest.raises(TypeError, match="no way for Unknown"):
        product_samples(Unknown(), y, mean, var, generator=generator)


def test_bad_arguments_are_refused(generator):
    y, mean, var = rows(1.0, 0.0, 1.0, 2)
    for bad in (0, 1.5):
        with pytest.raises(ValueError, match="n_samples must be a positive integer"):
            product_samples(Bernoulli(), y, mean, var, n_samples=bad, generator=generator)
    with pytest.raises(ValueError, match="mean contains NaN"):
        product_samples(Bernoulli(), y, mean * math.nan, var, generator=generator)
    with pytest.raises(ValueError, match="var contains NaN or inf"):
        product_samples(Bernoulli(), y, mean, var * math.inf, generator=generator)
    with pytest.raises(ValueError, match="var must be non-negative"):
        product_samples(Bernoulli(), y, mean, -var, generator=generator)
    for likelihood in (Bernoulli(), Gaussian(1.0), STUDENT):
        with pytest.raises(ValueError, match="y "):
            product_samples(likelihood, y * math.nan, mean, var, generator=generator)
