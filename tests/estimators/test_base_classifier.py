"""The classifier base: probabilities of given moments of f, tails, labels, weights."""

import pickle

import numpy as np
import pytest
from scipy.special import expit, log_expit, ndtri
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF

from skgp import QSGPClassifier
from skgp.estimators import _base, _base_classifier
from skgp.estimators._base_classifier import log_complement
from skgp.estimators._classification_data import (
    base_rate_offset,
    class_weights,
    encode,
    one_vs_rest,
)
from skgp.estimators._validation import distinct_labels, listing, natural_dtype
from skgp.linalg import NumericalWarning
from tests.same import assert_same

KERNEL = 4.0 * RBF([1.5, 1.5])


class GivenLatent(QSGPClassifier):
    """Latent moments are what a test says they are: column k of X, and a variance."""

    variance = 0.0

    def _means(self, X):
        return X[:, : 1 if len(self.classes_) == 2 else len(self.classes_)]

    def _moments(self, X):
        mean = self._means(X)
        return mean, np.full_like(mean, self.variance)


def given_latent(n_classes, *, moderation=1.0, **params):
    """Return a fitted `GivenLatent` of classes 0, 1, ... for X of three columns."""
    y = np.arange(12) % n_classes
    model = GivenLatent(optimizer=None, **{"likelihood": "probit", **params}).fit(
        np.eye(12)[:, :3], y
    )
    model.moderation_ = moderation
    return model


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (30, 2))
    return X, np.where(X.sum(1) + 0.3 * rng.standard_normal(30) > 0, 1, -1)


# ---- closed forms ------------------------------------------------------------------------------


def test_moderated_probit_is_the_closed_form():
    estimator = given_latent(2)
    estimator.variance = 3.0
    X = np.array([[-2.0, 0, 0], [0.5, 0, 0]])
    expected = norm.cdf(X[:, 0] / 2)
    np.testing.assert_allclose(estimator.predict_proba(X)[:, 1], expected, rtol=1e-12)


def test_moderated_logit_averages_the_sigmoid():
    estimator = given_latent(2, likelihood="logit")
    estimator.variance = 4.0
    f = np.linspace(-14, 18, 4001)
    expected = (expit(f) * norm.pdf(f, 2.0, 2.0)).sum() * (f[1] - f[0])
    found = estimator.predict_proba([[2.0, 0, 0]])[0, 1]
    assert found == pytest.approx(expected, rel=1e-6)
    estimator.moderation_ = 0.25  # half the standard deviation
    expected = (expit(f) * norm.pdf(f, 2.0, 1.0)).sum() * (f[1] - f[0])
    found = estimator.predict_proba([[2.0, 0, 0]])[0, 1]
    assert found == pytest.approx(expected, rel=1e-6)
    estimator.moderation_ = 0.0
    assert estimator.predict_proba([[2.0, 0, 0]])[0, 1] == pytest.approx(expit(2.0), rel=1e-12)


def test_several_classes_are_normalised_one_vs_rest():
    estimator = given_latent(3, likelihood="logit", moderation=0.0)
    X = np.array([[0.3, -1.0, 2.0]])
    np.testing.assert_allclose(estimator.predict_proba(X), expit(X) / expit(X).sum(), rtol=1e-12)


# ---- tails --------------------------------------------------------------------------------------


def test_tails_of_two_classes_keep_their_digits():
    estimator = given_latent(2, likelihood="logit", moderation=0.0)
    f = np.array([-2000.0, -40.0, 1e-9, 40.0, 2000.0])
    X = np.column_stack([f, np.zeros((5, 2))])
    np.testing.assert_allclose(estimator.decision_function(X), f, rtol=1e-6)
    np.testing.assert_allclose(estimator.predict_log_proba(X)[:, 1], log_expit(f), atol=1e-16)
    np.testing.assert_allclose(estimator.log_predictive_density(X, [0] * 5), log_expit(-f))
    np.testing.assert_array_equal(estimator.predict(X), [0, 0, 1, 1, 1])


@pytest.mark.parametrize("likelihood", ["logit", "probit"])
@pytest.mark.parametrize("moderation", [1.0, 0.0])
def test_classes_that_are_all_improbable_are_compared(likelihood, moderation):
    estimator = given_latent(3, likelihood=likelihood, moderation=moderation)
    estimator.variance = 2.0
    X = np.array([[-5000.0, -5001.0, -5002.0], [-1e200, -1e200, -1e200], [50.0, 2000.0, -2000.0]])
    proba, decision = estimator.predict_proba(X), estimator.decision_function(X)
    assert np.isfinite(decision).all()
    np.testing.assert_allclose(proba.sum(1), 1)
    assert proba[0, 0] > proba[0, 1] > proba[0, 2] or proba[0, 0] == 1
    np.testing.assert_allclose(proba[1], 1 / 3)
    np.testing.assert_allclose(proba[2], [0.5, 0.5, 0], atol=1e-12)


def test_log_complement_has_no_cancellation():
    log_proba = np.log([[1 - 3e-20, 1e-20, 2e-20], [0.2, 0.5, 0.3]])
    expected = [[np.log(3e-20), -1e-20, -2e-20], np.log([0.8, 0.5, 0.7])]
    np.testing.assert_allclose(log_complement(log_proba), expected, rtol=1e-12)


# ---- the base -----------------------------------------------------------------------------------


def test_predictions_do_not_depend_on_the_chunks(data, monkeypatch):
    X, y = data
    # A smooth function: probabilities near 1e-5 keep fewer digits than their latent values.
    estimator = QSGPClassifier(RBF(3.0), optimizer=None, likelihood="logit", random_state=0)
    whole = estimator.fit(X, y).predict_proba(X)
    heights = []
    hook = estimator._moments
    monkeypatch.setattr(
        estimator,
        "_moments",
        lambda rows: heights.append(len(rows)) or hook(rows),
    )
    monkeypatch.setattr(_base, "PREDICTION_MEMORY", 7 * estimator._bytes_per_row())
    monkeypatch.setattr(_base_classifier, "LINK_ELEMENTS", 4)
    np.testing.assert_allclose(estimator.predict_proba(X), whole, rtol=1e-12)
    assert heights == [7, 7, 7, 7, 2]


def test_negative_variances_of_a_hook_are_clipped_with_a_warning():
    estimator = given_latent(2)
    estimator.variance = -1.0
    with pytest.warns(NumericalWarning, match="2 of 2"):
        proba = estimator.predict_proba([[0.5, 0, 0], [1.0, 0, 0]])
    np.testing.assert_allclose(proba[:, 1], norm.cdf([0.5, 1.0]))


def test_predictions_follow_the_likelihood_of_the_fit(data):
    X, y = data
    estimator = QSGPClassifier(random_state=0).fit(X, y)
    before = estimator.predict_proba(X)
    estimator.set_params(likelihood="logit")
    assert_same(pickle.loads(pickle.dumps(estimator)).predict_proba(X), before)


def test_stream_weighs_classes_and_rows(data):
    X, y = data
    weights = np.linspace(0, 2, 30)
    options = dict(kernel=KERNEL, optimizer=None, random_state=0, n_basis=10)
    by_class = QSGPClassifier(class_weight={1: 2.0}, **options)
    by_row = QSGPClassifier(class_weight=None, **options)
    for rows in (slice(0, 18), slice(18, 30)):
        given, doubled = weights[rows], weights[rows] * np.where(y[rows] == 1, 2.0, 1.0)
        by_class.partial_fit(X[rows], y[rows], classes=[-1, 1], sample_weight=given)
        by_row.partial_fit(X[rows], y[rows], classes=[-1, 1], sample_weight=doubled)
    np.testing.assert_allclose(by_class.predict_proba(X), by_row.predict_proba(X), rtol=1e-9)
    with pytest.raises(ValueError, match="features"):
        by_class.partial_fit(X[:, :1], y)


# ---- labels -------------------------------------------------------------------------------------


def test_base_rate_offset_is_the_link_of_the_weighted_share():
    Y = one_vs_rest(np.array([0, 1, 2, 2]), 3)
    weights = np.array([1.0, 3.0, 2.0, 4.0])
    share = np.array([0.1, 0.3, 0.6])
    np.testing.assert_allclose(expit(base_rate_offset(Y, weights)), share, rtol=1e-12)
    np.testing.assert_allclose(base_rate_offset(Y, weights, link="probit"), ndtri(share))
    np.testing.assert_allclose(expit(base_rate_offset(Y)), [0.25, 0.25, 0.5], rtol=1e-12)


def test_cautious_base_rates_count_a_row_of_each_kind_more():
    Y, weights = one_vs_rest(np.zeros(5, dtype=int), 3), np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    offset = base_rate_offset(Y, weights, cautious=True)
    np.testing.assert_allclose(expit(offset), np.array([18.0, 3.0, 3.0]) / 21, rtol=1e-12)
    offset = base_rate_offset(Y, cautious=True)
    np.testing.assert_allclose(expit(offset), np.array([6.0, 1.0, 1.0]) / 7, rtol=1e-12)


def test_base_rate_offset_of_a_class_not_yet_seen_is_finite():
    offset = base_rate_offset(one_vs_rest(np.zeros(5, dtype=int), 3))
    np.testing.assert_allclose(expit(offset), [1 - 1e-6, 1e-6, 1e-6], rtol=1e-9)


@pytest.mark.parametrize(
    ("classes", "y"),
    [
        (np.array(["a", "b"]), np.array(["a", "both"])),  # a cast would cut it to "b"
        (np.array([1, 2]), np.array([1.0, 2.5])),  # or round it
        (np.array([0, 1]), np.array(["0", "1"])),
    ],
)
def test_encode_does_not_cast_labels(classes, y):
    with pytest.raises(ValueError, match="not among the classes"):
        encode(y, classes)


def test_encode_takes_equal_labels_of_another_type():
    classes = np.array([1, 2])
    for y in (np.array([2.0, 1.0]), np.array([2, 1], dtype=object)):
        np.testing.assert_array_equal(encode(y, classes), [1, 0])


def test_distinct_labels_name_the_types_that_do_not_mix():
    with pytest.raises(ValueError, match=r"classes mixes labels .*\['int', 'str'\]"):
        distinct_labels(np.array([1, "a"], dtype=object), "classes")


@pytest.mark.parametrize(
    ("labels", "dtype"),
    [([True, False], bool), ([1, 2], np.int64), (["a", "b"], object), ([1, "a"], object)],
)
def test_natural_dtype_unboxes_objects_of_one_type(labels, dtype):
    found = natural_dtype(np.array(labels, dtype=object))
    assert found.dtype == dtype and found.tolist() == labels


def test_class_weights_tolerate_a_class_that_a_fold_lacks():
    weights = class_weights({"a": 2, "b": 3, "c": 4}, np.array(["a", "c"]), np.array([0, 1]), None)
    np.testing.assert_array_equal(weights, [2.0, 4.0])


def test_listing_is_short():
    assert listing(["a", 2]) == "'a', 2"
    assert listing(list(range(12))).endswith("8, 9 and 2 more")
