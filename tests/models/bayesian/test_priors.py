"""Priors in log coordinates against scipy's densities, and their choice from data."""

import math

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.kernels import ActiveDims
from skgp.models.bayesian.priors import (
    Gamma,
    HalfNormal,
    LogNormal,
    default_priors,
    resolve_priors,
)

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


@each_prior
def test_prior_jacobian_and_gradient_equal_numerical_derivatives(name):
    prior, law = PRIORS[name]
    u, h = np.linspace(-4.0, 1.5, 12), 1e-5
    mass = (law.cdf(np.exp(u + h)) - law.cdf(np.exp(u - h))) / (2 * h)
    np.testing.assert_allclose(np.exp(prior.log_density(u)), mass, rtol=1e-5, atol=1e-10)
    slope = (prior.log_density(u + h) - prior.log_density(u - h)) / (2 * h)
    np.testing.assert_allclose(prior.gradient(u), slope, rtol=1e-7, atol=1e-8)


@each_prior
def test_prior_median_is_scipys(name):
    prior, law = PRIORS[name]
    assert prior.median == pytest.approx(law.median(), rel=1e-10)


@each_prior
def test_prior_is_finite_far_away(name):
    prior, _ = PRIORS[name]
    u = np.array([-500.0, 500.0])
    assert np.isfinite(prior.log_density(u)).all() and np.isfinite(prior.gradient(u)).all()


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


def data(rng, spread=(1.0, 10.0, 0.1)):
    X = rng.standard_normal((400, 3)) * np.array(spread)
    return (X - X.mean(0)) / X.std(0) * np.array(spread), 3.0 * rng.standard_normal(400)


def medians(kernel, X, y):
    return np.array([prior.median for prior in default_priors(kernel, X, y)])


def test_default_priors_take_the_scales_of_the_data(rng):
    X, y = data(rng)
    kernel = 5.0 * RBF([9.0, 9.0, 9.0]) + WhiteKernel(7.0)
    expected = [y.var(), *(math.sqrt(3) * np.array([1.0, 10.0, 0.1])), 0.1 * y.var()]
    np.testing.assert_allclose(medians(kernel, X, y), expected, rtol=1e-10)
    assert all(p == LogNormal(p.median, 1.5) for p in default_priors(kernel, X, y))
    isotropic = 5.0 * Matern(9.0, nu=1.5) + WhiteKernel(7.0)
    root = math.sqrt(3) * math.sqrt((1 + 100 + 0.01) / 3)
    np.testing.assert_allclose(medians(isotropic, X, y)[1], root, rtol=1e-10)


def test_default_priors_of_every_part_of_an_expression(rng):
    X, y = data(rng)
    kernel = (
        ConstantKernel(2.0, "fixed") * ActiveDims(RBF([1.0, 1.0]), [2, 0])
        + ActiveDims(ExpSineSquared(0.6, 12.0), 1)
        + RationalQuadratic(1.0, 4.0) ** 2
        + DotProduct(3.0)
        + WhiteKernel(1.0)
    )
    names = [h.name.split("__")[-1] for h in kernel.hyperparameters if not h.fixed]
    assert names == [
        "length_scale", "length_scale", "periodicity", "alpha", "length_scale", "sigma_0",
        "noise_level",
    ]  # fmt: skip
    root = math.sqrt(1 + 100 + 0.01)
    pair = math.sqrt(2) * np.array([0.1, 1.0])
    expected = [*pair, 0.6, 12.0, 4.0, root, root, 0.1 * y.var()]
    np.testing.assert_allclose(medians(kernel, X, y), expected, rtol=1e-10)
    assert len(expected) == kernel.n_dims


def test_default_priors_of_constant_data_are_proper():
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel()
    found = medians(kernel, np.ones((5, 2)), np.ones(5))
    np.testing.assert_allclose(found, [1.0, math.sqrt(2), math.sqrt(2), 0.1])


A, B, C = LogNormal(2.0), Gamma(1.0, 2.0), HalfNormal(3.0)


def resolve(prior, kernel=None):
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1) if kernel is None else kernel
    X = np.random.default_rng(0).standard_normal((20, 2))
    return resolve_priors(kernel, prior, X, X[:, 0]), default_priors(kernel, X, X[:, 0])


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        (A, [A, A, A, A]),
        ([A, B, C], [A, B, B, C]),
        ([A, B, C, A], [A, B, C, A]),
        ({"noise_level": C}, [None, None, None, C]),
        ({"k1__k2__length_scale": (A, B)}, [None, A, B, None]),
        ({"length_scale": A, "k1__k2__length_scale": B}, [None, B, B, None]),
        (None, [None] * 4),
        ({}, [None] * 4),
    ],
)
def test_resolve_priors_gives_one_prior_each(prior, expected):
    found, default = resolve(prior)
    assert list(found) == [d if e is None else e for d, e in zip(default, expected, strict=True)]


def test_resolve_priors_by_a_short_name_reaches_every_such_parameter():
    found, _ = resolve({"length_scale": B}, 1.0 * RBF(1.0) + 2.0 * Matern(1.0) + WhiteKernel())
    assert [each == B for each in found] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        ("gamma", TypeError, "prior must be None"),
        (3.0, TypeError, "prior must be None"),
        ([A, B], ValueError, "prior has 2 entries"),
        ([A, B, 1.0], TypeError, r"prior\[2\]"),
        ({"lengthscale": A}, ValueError, "'lengthscale'.*k1__k2__length_scale"),
        ({"length_scale": [A, B, C]}, ValueError, r"prior\['k1__k2__length_scale'\] has 3"),
        ({"length_scale": [A, 2.0]}, TypeError, r"prior\['k1__k2__length_scale'\]"),
        ({"noise_level": 2.0}, TypeError, r"prior\['k2__noise_level'\]"),
        ({"noise_level": LogNormal}, TypeError, r"prior\['k2__noise_level'\]"),
        (LogNormal, TypeError, "prior must be None"),
    ],
)
def test_resolve_priors_names_what_is_wrong(prior, error, message):
    with pytest.raises(error, match=message):
        resolve(prior)
