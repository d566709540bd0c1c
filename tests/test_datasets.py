"""Each generator against the law that its docstring states."""

import numpy as np
import pytest
from scipy import stats
from sklearn.gaussian_process.kernels import RBF

from skgp.datasets import make_counts, make_ringnorm, make_sinc, make_smooth, make_twonorm

GENERATORS = [make_counts, make_ringnorm, make_sinc, make_smooth, make_twonorm]
Z_MAX = 4.0  # seeded z-tests


def z_score(sample, expected):
    """Standard errors between the mean of independent draws and its expectation."""
    return (sample.mean() - expected) / (sample.std(ddof=1) / np.sqrt(len(sample)))


@pytest.mark.parametrize("make", GENERATORS)
def test_generator_is_reproducible(make):
    X, y = make(n_samples=40, random_state=3)
    X_again, y_again = make(n_samples=40, random_state=3)
    X_other, _ = make(n_samples=40, random_state=4)
    np.testing.assert_array_equal(X, X_again)
    np.testing.assert_array_equal(y, y_again)
    assert not np.array_equal(X, X_other)


@pytest.mark.parametrize("make", GENERATORS)
def test_generator_leaves_the_global_state_alone(make):
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    make(n_samples=5, random_state=1)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("make", GENERATORS)
@pytest.mark.parametrize("n_samples", [0, -3, 2.5])
def test_generator_refuses_a_bad_size(make, n_samples):
    with pytest.raises(ValueError, match=f"n_samples must be an integer .* got {n_samples}"):
        make(n_samples=n_samples)


@pytest.mark.parametrize("n_features", [2, 20])
def test_twonorm_has_the_bayes_error_of_its_source(n_features):
    X, y = make_twonorm(20_000, n_features, random_state=0)
    wrong = (X.sum(axis=1) < 0) != (y == 1)
    assert abs(z_score(wrong.astype(float), stats.norm.cdf(-2))) < Z_MAX


def test_twonorm_has_unit_spread_around_opposite_means():
    X, y = make_twonorm(20_000, 5, random_state=0)
    for label, sign in ((0, 1), (1, -1)):
        centred = X[y == label] - sign * 2 / np.sqrt(5)
        assert abs(z_score(centred.ravel(), 0.0)) < Z_MAX
        assert abs(z_score(centred.ravel() ** 2, 1.0)) < Z_MAX
    assert abs(z_score(y.astype(float), 0.5)) < Z_MAX


def test_ringnorm_has_the_moments_of_its_source():
    X, y = make_ringnorm(20_000, 20, random_state=0)
    wide, narrow = X[y == 0], X[y == 1] - 2 / np.sqrt(20)
    for sample, var in ((wide, 4.0), (narrow, 1.0)):
        assert abs(z_score(sample.ravel(), 0.0)) < Z_MAX
        assert abs(z_score(sample.ravel() ** 2, var)) < Z_MAX


def test_sinc_without_noise_is_the_function():
    X, y = make_sinc(50, noise=0.0, random_state=0)
    x = X[:, 0]
    np.testing.assert_allclose(y, np.sin(x) / x, atol=1e-12)
    assert (np.diff(x) > 0).all() and x.min() >= -10 and x.max() <= 10


def test_sinc_has_the_noise_asked_for():
    X, y = make_sinc(20_000, noise=0.3, random_state=0)
    residual = y - np.sinc(X[:, 0] / np.pi)
    assert abs(z_score(residual, 0.0)) < Z_MAX
    assert abs(z_score(residual**2, 0.09)) < Z_MAX


def test_sinc_refuses_an_empty_range():
    with pytest.raises(ValueError, match="low must be below high, got low=2.0, high=1.0"):
        make_sinc(low=2.0, high=1.0)


def test_smooth_has_the_covariance_of_its_kernel():
    # Over independent functions the products of values have the kernel's values as their mean.
    n_draws, products, kernel = 3000, [], RBF(0.7)
    for seed in range(n_draws):
        random = np.random.RandomState(seed)
        X, y = make_smooth(6, 2, length_scale=0.7, noise=0.0, n_basis=40, random_state=random)
        products.append(np.outer(y, y) - kernel(X))
    products = np.array(products)
    z = products.mean(0) / (products.std(0, ddof=1) / np.sqrt(n_draws))
    assert (abs(z) < Z_MAX).all()


def test_smooth_is_one_function_for_any_number_of_rows():
    X, y = make_smooth(50, 3, noise=0.0, random_state=0)
    X_more, y_more = make_smooth(5000, 3, noise=0.0, random_state=0)
    np.testing.assert_array_equal(X_more[:50], X)
    np.testing.assert_allclose(y_more[:50], y, atol=1e-12)


def test_smooth_is_continuous_across_tiles():
    # Beyond one tile of 4096 rows the values still lie on one smooth function of the input.
    X, y = make_smooth(9000, 1, noise=0.0, length_scale=1.0, random_state=0)
    order = np.argsort(X[:, 0])
    step, rise = np.diff(X[order, 0]), np.diff(y[order])
    assert (abs(rise) < 10 * step + 1e-12).all()


def test_smooth_has_the_noise_asked_for():
    noisy = make_smooth(20_000, 2, noise=0.5, n_basis=20, random_state=0)[1]
    clean = make_smooth(20_000, 2, noise=0.0, n_basis=20, random_state=0)[1]
    assert abs(z_score((noisy - clean) ** 2, 0.25)) < Z_MAX


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("noise", -0.1), ("noise", np.inf), ("length_scale", 0.0), ("n_basis", 0), ("n_features", 0)],
)
def test_smooth_refuses_a_bad_parameter(parameter, value):
    with pytest.raises(ValueError, match=f"{parameter} must be .* got"):
        make_smooth(5, **{parameter: value})


def test_counts_are_non_negative_integers():
    y = make_counts(100, random_state=0)[1]
    assert np.issubdtype(y.dtype, np.integer) and (y >= 0).all()


@pytest.mark.parametrize("dispersion", [2.0, np.inf])
def test_counts_have_the_variance_of_the_negative_binomial(dispersion):
    # A huge length-scale and one cosine leave a rate that is one constant, known from the mean.
    y = make_counts(40_000, dispersion=dispersion, length_scale=1e9, n_basis=1, random_state=0)[
        1
    ].astype(float)
    rate = y.mean()
    assert abs(z_score((y - rate) ** 2, rate + rate**2 / dispersion)) < Z_MAX


@pytest.mark.parametrize("parameter", ["mean", "dispersion", "length_scale"])
def test_counts_refuse_a_parameter_that_is_not_positive(parameter):
    with pytest.raises(ValueError, match=f"{parameter} must be a number above 0, got 0"):
        make_counts(5, **{parameter: 0})
