"""GaussianProcessClassifier beside scikit-learn's, and what it hands to other methods."""

import numpy as np
import pytest
from scipy.special import expit
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessClassifier as Original
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    PairwiseKernel,
    WhiteKernel,
)
from sklearn.gaussian_process.tests._mini_sequence_kernel import MiniSeqKernel

from skgp import GaussianProcessClassifier, QSGPClassifier, StateSpaceGPClassifier, SWSGPClassifier
from skgp.estimators import _front_door

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (40, 2))
F = np.sin(2 * X[:, 0]) + X[:, 1] + 0.3 * RNG.standard_normal(40)
Y = np.where(F > 0, "yes", "no")
THREE = np.array(["a", "b", "c"])[np.digitize(F, [-0.5, 0.7])]
X_NEW = RNG.uniform(-2, 2, (9, 2))
KERNELS = {
    "none": None,
    "ard": 2.0 * RBF([1.0, 2.0]),
    "matern": 1.5 * Matern(nu=1.5),
    "sum": 1.0 * RBF() + 0.5 * Matern(3.0, nu=1.5) + ConstantKernel(0.3),
    "noise": 2.0 * RBF() + WhiteKernel(0.2),
    "linear": DotProduct() + RBF(),
    "pairwise": 1.0 * PairwiseKernel(metric="rbf"),
}


def both(kernel, y=Y, **params):
    """scikit-learn's and ours, fitted."""
    params = {"random_state": 0, **params}
    return [cls(kernel, **params).fit(X, y) for cls in (Original, GaussianProcessClassifier)]


def test_probabilities_of_two_classes_sum_to_one_and_far_away_are_halves():
    inputs = np.vstack([X_NEW, np.full((3, 2), 1e6)])
    proba = GaussianProcessClassifier(optimizer=None).fit(X, Y).predict_proba(inputs)
    np.testing.assert_allclose(proba.sum(1), 1.0, rtol=1e-15)
    assert (proba[-3:] == 0.5).all()


@pytest.mark.parametrize("name", KERNELS)
def test_numbers_are_those_of_scikit_learn(name):
    theirs, ours = both(KERNELS[name], optimizer=None)
    value, expected = (m.log_marginal_likelihood_value_ for m in (ours, theirs))
    assert value == pytest.approx(expected, abs=1e-8)
    for attribute in ("pi_", "W_sr_", "L_", "y_train_", "X_train_"):
        mine, other = (getattr(m.base_estimator_, attribute) for m in (ours, theirs))
        np.testing.assert_allclose(mine, other, atol=1e-5)
    for mine, other in zip(
        ours.latent_mean_and_variance(X_NEW), theirs.latent_mean_and_variance(X_NEW), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    np.testing.assert_array_equal(ours.predict(X_NEW), theirs.predict(X_NEW))
    theta = theirs.kernel_.theta + 0.3
    if len(theta):
        value, gradient = ours.log_marginal_likelihood(theta, eval_gradient=True)
        expected, slope = theirs.log_marginal_likelihood(theta, eval_gradient=True)
        assert value == pytest.approx(expected, abs=1e-8)
        np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)


def test_probabilities_are_exact_where_those_of_scikit_learn_are_approximate():
    theirs, ours = both(KERNELS["ard"], optimizer=None)
    proba = ours.predict_proba(X_NEW)
    np.testing.assert_allclose(proba, theirs.predict_proba(X_NEW), atol=1e-3)
    mean, var = ours.latent_mean_and_variance(X_NEW)
    z, weights = np.polynomial.hermite_e.hermegauss(60)
    expected = expit(mean[:, None] + np.sqrt(var)[:, None] * z) @ weights / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(proba[:, 1], expected, atol=1e-8)
    density = ours.log_predictive_density(X_NEW, np.where(np.arange(9) % 2, "yes", "no"))
    np.testing.assert_allclose(np.exp(density), proba[np.arange(9), np.arange(9) % 2])


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", ["ard", "matern", "sum", "pairwise"])
def test_optima_are_at_least_those_of_scikit_learn(name):
    theirs, ours = both(KERNELS[name])
    gained = ours.log_marginal_likelihood_value_ - theirs.log_marginal_likelihood_value_
    assert gained > -1e-3


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("multi_class", ["one_vs_rest", "one_vs_one"])
def test_several_classes_are_those_of_scikit_learn(multi_class):
    theirs, ours = both(KERNELS["ard"], THREE, optimizer=None, multi_class=multi_class)
    np.testing.assert_array_equal(ours.predict(X_NEW), theirs.predict(X_NEW))
    theta = np.arange(9.0) / 10
    for given in (None, theta, theta[:3]):
        value = ours.log_marginal_likelihood(given)
        assert value == pytest.approx(theirs.log_marginal_likelihood(given), abs=1e-8)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta)
    if multi_class == "one_vs_rest":
        np.testing.assert_allclose(
            ours.predict_proba(X_NEW), theirs.predict_proba(X_NEW), atol=2e-3
        )


@pytest.mark.parametrize(("n", "d"), [(150, 2), (151, 2), (160, 1), (151, 9), (320, 2)])
@pytest.mark.parametrize("noise", [None, WhiteKernel(0.2)])
def test_any_number_of_rows_and_columns_has_the_evidence_of_scikit_learn(n, d, noise):
    inputs = np.random.default_rng(n).standard_normal((n, d))
    kernel = 1.0 * RBF() if noise is None else 1.0 * RBF() + noise
    labels = inputs[:, 0] + 0.5 * np.sin(9 * inputs[:, -1]) > 0
    model = GaussianProcessClassifier(kernel).fit(inputs, labels)
    theirs = Original(kernel, optimizer=None).fit(inputs, labels)
    for mine, other in zip(
        model.log_marginal_likelihood(kernel.theta, eval_gradient=True),
        theirs.log_marginal_likelihood(kernel.theta, eval_gradient=True),
        strict=True,
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-4)


def test_strings_are_compared_by_their_kernel():
    words, y = ["A", "AB", "B", "ABC", "AAB"], np.array([0, 1, 1, 1, 0])
    model = GaussianProcessClassifier(MiniSeqKernel(0.5, "fixed")).fit(words, y)
    expected = Original(MiniSeqKernel(0.5, "fixed")).fit(words, y)
    np.testing.assert_allclose(
        model.latent_mean_and_variance(["BA"]), expected.latent_mean_and_variance(["BA"]), atol=1e-6
    )


def test_the_probit_link_is_that_of_its_own_likelihood():
    logit, probit = (
        GaussianProcessClassifier(KERNELS["ard"], optimizer=None, likelihood=likelihood).fit(X, Y)
        for likelihood in ("logit", "probit")
    )
    other = QSGPClassifier(KERNELS["ard"], optimizer=None, likelihood="probit", random_state=0)
    other.fit(X, Y)
    assert abs(logit.predict_proba(X) - probit.predict_proba(X)).max() > 0.02
    assert (probit.predict(X) == other.predict(X)).mean() > 0.95


@pytest.mark.parametrize(
    ("inputs", "params", "method", "reason"),
    [
        (X[:, :1], {}, "state_space", "40 observations are more than 20, and X has one column"),
        (X, {}, "neighbors", "X has no more than 3 columns"),
        (np.tile(X, 3), {}, "qsgp", "X has 6 columns"),
        (X, {"kernel": PairwiseKernel()}, "exact", "evaluated by calling it"),
        (X, {"kernel": KERNELS["noise"]}, "exact", "contains a WhiteKernel"),
        (X[:20], {}, "exact", "20 observations are no more than 20"),
    ],
)
def test_auto_takes_the_method_that_suits(monkeypatch, inputs, params, method, reason):
    monkeypatch.setattr(_front_door.defaults, "EXACT_ROWS", 20)
    model = GaussianProcessClassifier(optimizer=None, random_state=0, **params)
    model.fit(inputs, Y[: len(inputs)])
    assert model.method_ == method and reason in model.reason_
    np.testing.assert_allclose(model.predict_proba(inputs[:3]).sum(1), 1)


@pytest.mark.parametrize(
    ("method", "cls"),
    [
        ("qsgp", QSGPClassifier),
        ("neighbors", SWSGPClassifier),
        ("state_space", StateSpaceGPClassifier),
    ],
)
def test_another_method_is_its_estimator(method, cls):
    shared = dict(kernel=4.0 * Matern(nu=1.5), optimizer=None, random_state=0)
    inputs = X[:, :1]
    model = GaussianProcessClassifier(method=method, **shared).fit(inputs, THREE)
    direct = cls(likelihood="logit", **shared).fit(inputs, THREE)
    for call in (
        lambda m: m.predict(inputs),
        lambda m: m.predict_proba(inputs),
        lambda m: m.log_predictive_density(inputs, THREE),
        lambda m: m.score(inputs, THREE),
    ):
        np.testing.assert_array_equal(call(model), call(direct))
    with pytest.raises(ValueError, match="needs method='exact'"):
        model.log_marginal_likelihood(np.zeros(2))


def test_latent_moments_before_a_fit_are_refused():
    """scikit-learn's raise an AttributeError, which this one is too."""
    with pytest.raises(NotFittedError, match="not fitted yet"):
        GaussianProcessClassifier().latent_mean_and_variance(X)
    with pytest.raises(AttributeError):
        Original().latent_mean_and_variance(X)
    assert issubclass(NotFittedError, AttributeError)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="multi_class='one_vs_one'. Set method='exact'"):
        GaussianProcessClassifier(method="qsgp", multi_class="one_vs_one").fit(X, THREE)
    with pytest.raises(ValueError, match="requires 2 or more distinct classes"):
        GaussianProcessClassifier().fit(X, np.full(40, "no"))
    with pytest.raises(ValueError, match="Unknown label type"):
        GaussianProcessClassifier().fit(X, F)


def test_as_many_labels_as_rows_have_a_density():
    model = GaussianProcessClassifier(optimizer=None).fit(X, Y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.log_predictive_density(X[:3], Y[:2])


def test_tie_is_the_class_of_scikit_learn():
    for cls in (Original, GaussianProcessClassifier):
        model = cls(optimizer=None).fit([[-1.0], [1.0]], [0, 1])
        assert model.predict([[0.0]]) == [1]
        np.testing.assert_allclose(model.predict_proba([[0.0]]), 0.5)
