"""The choice of priors from data, and from what a user gives."""

import math
import pickle

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import multivariate_normal
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.kernels import ActiveDims, Cosine
from skgp.learning.posterior.priors import default_priors, element_names, resolve_priors
from skgp.priors import Gamma, HalfNormal, LogNormal


def data(rng, spread=(1.0, 10.0, 0.1)):
    X = rng.standard_normal((400, 3)) * np.array(spread)
    return (X - X.mean(0)) / X.std(0) * np.array(spread), 3.0 * rng.standard_normal(400)


def medians(kernel, X, y):
    return np.array([prior.median for prior in default_priors(kernel, X, y)])


def test_default_priors_take_the_scales_of_the_data(rng):
    X, y = data(rng)
    kernel = 5.0 * RBF([9.0, 9.0, 9.0]) + WhiteKernel(7.0)
    expected = [np.mean(y**2), *(math.sqrt(3) * np.array([1.0, 10.0, 0.1])), 0.1 * y.var()]
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
        + ActiveDims(Cosine(3.0), 1)
        + RationalQuadratic(1.0, 4.0) ** 2
        + DotProduct(3.0)
        + WhiteKernel(1.0)
    )
    names = [h.name.split("__")[-1] for h in kernel.hyperparameters if not h.fixed]
    assert names == [
        "length_scale", "length_scale", "periodicity", "period", "alpha", "length_scale",
        "sigma_0", "noise_level",
    ]  # fmt: skip
    root = math.sqrt(1 + 100 + 0.01)
    pair = math.sqrt(2) * np.array([0.1, 1.0])
    expected = [*pair, 0.6, 12.0, 3.0, 4.0, root, root, 0.1 * y.var()]
    np.testing.assert_allclose(medians(kernel, X, y), expected, rtol=1e-10)
    assert len(expected) == kernel.n_dims
    spreads = dict(zip(element_names(kernel), default_priors(kernel, X, y), strict=True))
    periods = {name for name, prior in spreads.items() if prior.sd == 0.1}
    assert periods == {name for name in spreads if name.endswith(("periodicity", "period"))}


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


# ------------------------------------------------------------------- elements and their columns


@pytest.mark.parametrize(
    ("prior", "expected"),
    [
        ({"length_scale[0]": B}, [None, B, None, None]),
        ({"length_scale[depth]": B}, [None, None, B, None]),
        ({"k1__k2__length_scale[1]": B, "length_scale": C}, [None, C, B, None]),
        ({"length_scale[depth]": A, "k1__k2__length_scale[depth]": B}, [None, None, B, None]),
    ],
)
def test_resolve_priors_by_an_element(prior, expected):
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    X = np.random.default_rng(0).standard_normal((20, 2))
    found = resolve_priors(kernel, prior, X, X[:, 0], columns=["pressure", "depth"])
    default = default_priors(kernel, X, X[:, 0])
    assert list(found) == [d if e is None else e for d, e in zip(default, expected, strict=True)]


def test_resolve_priors_names_the_elements_there_are():
    with pytest.raises(ValueError, match=r"'length_scale\[2\]'.*length_scale\[0\], k1__k2__length"):
        resolve({"length_scale[2]": A})
    with pytest.raises(TypeError, match=r"prior\['length_scale\[1\]'\]"):
        resolve({"length_scale[1]": 3.0})


def test_element_names_have_the_columns_that_a_part_sees():
    kernel = ActiveDims(RBF([1.0, 1.0]), [2, 0]) + RBF(1.0) + WhiteKernel()
    names = element_names(kernel, ["a", "b", "c"])
    assert names[:2] == ["k1__k1__kernel__length_scale[c]", "k1__k1__kernel__length_scale[a]"]
    assert element_names(kernel)[:2] == [name.replace("c]", "0]").replace("a]", "1]")
                                         for name in names[:2]]  # fmt: skip
    assert names[2:] == element_names(kernel)[2:] == ["k1__k2__length_scale", "k2__noise_level"]


def test_length_scales_of_a_kernel_have_a_level_in_common(rng):
    """Against the dense normal density of the logarithms, and its gradient by differences."""
    kernel = 1.0 * RBF([1.0, 1.0, 1.0]) + WhiteKernel(0.1)
    X = data(rng)[0]
    priors = resolve_priors(kernel, None, X, X[:, 0])
    covariance, u = np.diag(np.full(5, 1.5**2)), rng.standard_normal((4, 5))
    covariance[1:4, 1:4] = (1.5**2 - 1.0) + np.eye(3)  # ratios of standard deviation 1
    np.testing.assert_allclose(priors.covariance, covariance)
    dense = multivariate_normal(np.log([p.median for p in priors]), covariance)
    np.testing.assert_allclose(priors.log_density(u), dense.logpdf(u), rtol=1e-12)
    slopes = [approx_fprime(each, dense.logpdf, 1e-6) for each in u]
    np.testing.assert_allclose(priors.gradient(u), slopes, atol=1e-4)
    given = resolve_priors(kernel, {"length_scale[1]": A}, X, X[:, 0])
    assert len(priors.vectors) == 1 and not given.vectors  # what a user gave is independent
    assert pickle.loads(pickle.dumps(priors)).vectors == priors.vectors


def test_an_outlier_does_not_make_a_column_constant():
    X = np.random.default_rng(0).uniform(-1, 1, (20, 2))
    X[-1] = 9.97e36
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel()
    found, tiny = (medians(kernel, unit * X, X[:, 0] / X.max()) for unit in (1.0, 2.0**-20))
    np.testing.assert_allclose(found / tiny, [1.0, 2.0**20, 2.0**20, 1.0])
