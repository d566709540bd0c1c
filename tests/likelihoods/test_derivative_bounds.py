"""Bounds on p(y | f) and its derivatives in f against their values on a fine grid."""

import math

import numpy as np
import pytest
import torch

from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from skgp.likelihoods.derivative_bounds import derivative_bounds, sufficient_samples
from tests.same import assert_same

LIKELIHOODS = {
    "gaussian": (Gaussian(0.3), (-1.0, 0.7)),
    "logit": (Bernoulli("logit"), (-1.0, 1.0)),
    "probit": (Bernoulli("probit"), (-1.0, 1.0)),
    "poisson exp": (Poisson("exp"), (0.0, 1.0, 2.0, 5.0, 50.0, 500.0)),
    "poisson softplus": (Poisson("softplus"), (0.0, 1.0, 2.0, 5.0, 50.0, 500.0)),
    "student 4": (StudentT(0.4, 4.0), (-1.0, 0.7)),
    "student 0.5": (StudentT(2.0, 0.5), (0.0,)),
}


def extrema(name, y):
    """Of phi, phi' and phi'' on a grid: (n, 5), ordered as Table 1."""
    likelihood, _ = LIKELIHOODS[name]
    centre = {"poisson exp": y.clamp_min(0.1).log(), "poisson softplus": y}.get(name, 0 * y)
    f = centre + torch.linspace(-45, 45, 100_001, dtype=y.dtype)[:, None]
    density = likelihood.log_prob(y, f).exp()
    first, second = likelihood.derivatives(y, f)
    slope, curvature = density * first, density * (second + first**2)
    limits = (density.amax(0), slope.amin(0), slope.amax(0), curvature.amin(0), curvature.amax(0))
    return torch.stack(limits, dim=-1)


def printed(name, y):
    """Table 1 of the paper, for the likelihoods whose bounds here are tighter."""
    one = torch.ones_like(y)
    if name == "logit":
        return torch.stack([one, -one / 4, one / 4, -one / 4, one / 4], dim=-1)
    if name == "poisson exp":
        return torch.stack([one, -y - 1, y, -y - 1 / 4, 2 * y**2 + 3 * y + 2], dim=-1)
    return torch.stack([one, -one, one, -2.25 * one, 2.25 * one], dim=-1)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bounds_hold_and_are_attained(name):
    likelihood, targets = LIKELIHOODS[name]
    y = torch.tensor(targets, dtype=torch.float64)
    bounds = torch.stack(derivative_bounds(likelihood, y), dim=-1)
    values = extrema(name, y)
    upward = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    excess = upward * (bounds - values)
    assert (excess > -1e-12).all()
    slack = 1.2e-3 if name == "poisson softplus" else 1e-4
    assert (excess < slack * values.abs() + 1e-9).all()


@pytest.mark.parametrize("name", ["logit", "poisson exp", "poisson softplus"])
def test_printed_bounds_hold_but_are_wider(name):
    likelihood, targets = LIKELIHOODS[name]
    y = torch.tensor(targets, dtype=torch.float64)
    ours, paper = torch.stack(derivative_bounds(likelihood, y), dim=-1), printed(name, y)
    assert (paper.abs() >= ours.abs() - 1e-12).all()
    assert (paper[:, 3:].abs() > 1.5 * ours[:, 3:].abs()).all()


def test_width_of_the_printed_poisson_bounds_is_as_documented():
    y = torch.tensor([50.0], dtype=torch.float64)
    for link, expected in (
        ("exp", [18, 201, 217, 18, 3624]),
        ("softplus", [18, 226, 187, 1971, 3432]),
    ):
        ratio = printed(f"poisson {link}", y) / extrema(f"poisson {link}", y)
        np.testing.assert_allclose(ratio[0], expected, rtol=0.02)


def test_density_as_printed_is_unbounded():
    """g^y e^{+g} / y! grows with f: the sign of the exponent is an erratum."""
    rate = torch.tensor([1.0, 10.0, 100.0])
    growing = rate**2 * rate.exp() / 2
    assert (growing.diff() > 0).all() and growing[-1] > 1e30


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bounds_keep_shape_and_dtype(name, dtype):
    likelihood, targets = LIKELIHOODS[name]
    y = torch.tensor(targets, dtype=dtype).expand(3, -1)
    for bound in derivative_bounds(likelihood, y):
        assert bound.shape == y.shape and bound.dtype == dtype
        assert_same(bound[0], bound[2])
    for bound in derivative_bounds(likelihood, y[:0]):
        assert bound.shape == y[:0].shape


def test_parameters_may_differ_by_row():
    y, scale = torch.zeros(2, 2, dtype=torch.float64), torch.tensor([0.5, 2.0]).double()
    for make in (lambda s: Gaussian(s**2), lambda s: StudentT(s, 4.0)):
        together = derivative_bounds(make(scale.clone().requires_grad_()), y)
        for column in (0, 1):
            alone = derivative_bounds(make(float(scale[column])), y[:, column])
            for bound, expected in zip(together, alone, strict=True):
                torch.testing.assert_close(bound[:, column], expected)
                assert not bound.requires_grad


def test_likelihoods_without_bounds_are_refused():
    y = torch.zeros(1)
    with pytest.raises(TypeError, match="No derivative bounds for Laplace"):
        derivative_bounds(Laplace(1.0), y)
    with pytest.raises(ValueError, match="y "):
        derivative_bounds(Bernoulli(), y)
    with pytest.raises(ValueError, match="y "):
        derivative_bounds(Poisson("exp"), y - 1)


def test_sufficient_samples_equals_the_formula():
    # Gaussian: phi averages to N(y; m, v + sigma^2), whose derivatives are elementary.
    y, mean, var = torch.tensor([[1.0, 0.4], [0.2, -0.3], [0.6, 1.1]], dtype=torch.float64)
    likelihood = Gaussian(0.5)
    computed = sufficient_samples(likelihood, y, mean, var, step_size=0.1, failure_probability=0.05)
    total, r = (var + 0.5).numpy(), (y - mean).numpy()
    density = np.exp(-0.5 * r**2 / total) / np.sqrt(2 * np.pi * total)
    first, second = density * r / total, density * (r**2 / total - 1) / total
    c = 1 / math.sqrt(2 * math.pi * 0.5)
    spreads = (c, 2 * c / math.sqrt(0.5 * math.e), c / 0.5 * (1 + 2 * math.e**-1.5))
    worst = np.max(
        [(s / e) ** 2 for s, e in zip(spreads, (density, first, second), strict=True)], 0
    )
    expected = np.floor(math.log(6 * 2 / 0.05) / (2 * 0.1**2) * worst) + 1
    np.testing.assert_allclose(computed, expected, rtol=1e-9)


def test_sufficient_samples_keep_the_relative_error_below_the_step_size(generator):
    likelihood, step_size = Bernoulli("logit"), 0.2
    y, mean, var = (torch.tensor([v], dtype=torch.float64) for v in (1.0, 1.5, 0.5))
    n_samples = sufficient_samples(
        likelihood, y, mean, var, step_size=step_size, failure_probability=0.1
    )
    noise = torch.randn(int(n_samples), 500, dtype=torch.float64, generator=generator)
    f = mean + var.sqrt() * noise
    density = likelihood.log_prob(y, f).exp()
    first, second = likelihood.derivatives(y, f)
    for values in (density, density * first, density * (second + first**2)):
        error = values.mean(0) / values.mean() - 1
        assert (error.abs() < step_size).double().mean() > 0.9


def test_sufficient_samples_without_expected_slope_use_one():
    y = torch.zeros(1, dtype=torch.float64)
    samples = sufficient_samples(Gaussian(1.0), y, y, y + 1, step_size=0.5, failure_probability=0.5)
    assert samples.isfinite().all() and 1 < float(samples) < 1e4


def test_sufficient_samples_refuses_bad_arguments():
    y = torch.zeros(1)
    for step_size in (0.0, 0.6, math.nan):
        with pytest.raises(ValueError, match="step_size must be"):
            sufficient_samples(
                Gaussian(1.0), y, y, y + 1, step_size=step_size, failure_probability=0.1
            )
    for probability in (0.0, 1.0):
        with pytest.raises(ValueError, match="failure_probability must be"):
            sufficient_samples(
                Gaussian(1.0), y, y, y + 1, step_size=0.1, failure_probability=probability
            )
