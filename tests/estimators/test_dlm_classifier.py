"""DLMGPClassifier: the contract of every classifier, and what is its own."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, make_classification, make_moons
from sklearn.gaussian_process.kernels import RBF
from sklearn.utils import shuffle

from skgp import DLMGPClassifier
from skgp.data import Data
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli
from tests.contracts.classifiers import ClassifierContract
from tests.reference.vgp import maximise_vgp

QUICK = dict(n_inducing=15, max_iter=20, random_state=0)


class TestContract(ClassifierContract):
    offers_state = False

    def make(self, **params):
        return DLMGPClassifier(**{"n_inducing": 20, "max_iter": 8, "random_state": 0, **params})


def log_loss_of(model, X, y):
    return -model.log_predictive_density(X, y).mean()


def calibration_error(model, X, y, n_bins=10):
    """Mean distance of confidence and accuracy, over bins of the confidence."""
    proba = model.predict_proba(X)
    confidence, right = proba.max(1), model.classes_[proba.argmax(1)] == y
    bins = np.minimum((n_bins * confidence).astype(int), n_bins - 1)
    sums = np.bincount(bins, weights=confidence - right, minlength=n_bins)
    return np.abs(sums).sum() / len(y)


@pytest.fixture(scope="module")
def moons():
    X, y = make_moons(700, noise=0.3, random_state=0)
    return X[:200], y[:200], X[200:], y[200:]


@pytest.fixture(scope="module")
def digits():
    """A fit of ten classes, 64 columns, some of them constant, and rows it did not see."""
    X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    kernel = 400.0 * RBF(30.0)
    model = DLMGPClassifier(kernel, optimizer=None, n_inducing=100, max_iter=10, random_state=0)
    model.fit(X[:400], y[:400])
    return model, X[400:1400], y[400:1400]


@pytest.mark.parametrize("d", [3, 12])  # beyond ten columns some kernels have one length scale
def test_units_change_no_bit_that_a_search_could_amplify(d):
    X, y = make_classification(200, d, n_informative=3, n_redundant=0, n_classes=3, random_state=0)
    factor = 0.3048 if d > 10 else np.array([1000.0, 0.3048, 1 / 7])
    fits = [DLMGPClassifier(**QUICK).fit(X * unit, y) for unit in (1.0, factor)]
    proba = [model.predict_proba(X * unit) for model, unit in zip(fits, (1.0, factor), strict=True)]
    np.testing.assert_allclose(*proba, atol=1e-9)


# ---- several classes ---------------------------------------------------------------------------


def test_ten_classes_are_calibrated_better_than_by_their_plain_sum(digits):
    model, X, y = digits
    plain = pickle.loads(pickle.dumps(model))
    plain.moderation_, plain.coupling_ = 1.0, 0.0
    assert model.coupling_ >= 0.5 and model.moderation_ < 1  # digits lie apart
    assert model.score(X, y) > 0.93
    assert log_loss_of(model, X, y) < 0.8 * log_loss_of(plain, X, y) < 0.3
    assert calibration_error(model, X, y) < 0.5 * calibration_error(plain, X, y)


@pytest.mark.slow
def test_classes_that_overlap_are_not_sharpened():
    X, y = make_classification(
        900, 6, n_informative=4, n_redundant=0, n_classes=3, flip_y=0.3, random_state=0
    )
    model = DLMGPClassifier(**QUICK).fit(X[:300], y[:300])
    found = log_loss_of(model, X[300:], y[300:])
    assert model.coupling_ <= 0.5
    model.coupling_ = 1.0
    assert found < log_loss_of(model, X[300:], y[300:])


@pytest.mark.parametrize(
    "n_classes, n, dense", [(4, 400, True), (2, 500, True), (4, 900, False), (2, 900, False)]
)
def test_which_labels_begin_with_the_evidence(n_classes, n, dense):
    codes = torch.arange(n) % n_classes
    Y = torch.eye(n_classes, dtype=torch.float64)[codes] * 2 - 1
    Y = Y[:, :1] if n_classes == 2 else Y
    data, model = Data(torch.zeros(n, 3, dtype=torch.float64), Y), DLMGPClassifier()
    settings = model._settings(data, Objective(Bernoulli("probit")), [RBF(1.0)] * 2, 200)
    assert (settings.dense_start, settings.rescales) == (dense, dense)
    assert (
        not DLMGPClassifier(RBF(1.0))
        ._settings(data, Objective(Bernoulli("probit")), [RBF(1.0)], 200)
        .rescales
    )


# ---- the loss ----------------------------------------------------------------------------------


def test_bound_of_labels_that_lie_apart_exceeds_that_of_no_function():
    """f = 0 is among the kernels: with its least variance the labels have about log 2 each."""
    X = np.random.RandomState(100).randn(150, 4)
    model = DLMGPClassifier(objective="elbo", random_state=0).fit(X, X[:, 0] + X[:, 1] > 0)
    assert model.elbo_ > -150 * np.log(2)


def test_few_labels_have_the_posterior_of_the_elbo():
    """That of the log-loss is wider: standard deviations of f are up to a half greater."""
    X = np.random.RandomState(0).uniform(size=(12, 1))
    y = X[:, 0] > 0.5
    kernel = 9.0 * RBF(0.2)
    model = DLMGPClassifier(kernel, optimizer=None, warm_start=True, tol=1e-12).fit(X, y)
    K = torch.from_numpy(kernel(X) + 1e-8 * np.eye(12))
    signs, rows = torch.from_numpy(np.where(y, 1.0, -1.0)), torch.arange(12)
    *_, mean, var = maximise_vgp(Bernoulli("probit"), K, rows, signs, offset=model.offset_[0])
    for _ in range(2):  # the second with a warm start
        found, found_var = model.latent_mean_and_variance(X)
        np.testing.assert_allclose(found, mean + model.offset_[0], atol=2e-3)
        np.testing.assert_allclose(found_var, var, rtol=5e-3)
        model.fit(X, y)


def test_few_labels_are_not_predicted_too_cautiously():
    """Of a board of three by three; scikit-learn, with an RBF kernel, has a log loss of .34."""
    X = np.random.RandomState(1).uniform(size=(2060, 2))
    y = np.floor(3 * X).sum(1) % 2 == 0
    model = DLMGPClassifier(random_state=0).fit(X[:60], y[:60])
    assert log_loss_of(model, X[60:], y[60:]) < 0.31


@pytest.mark.slow
def test_auto_beta_is_of_its_path(moons):
    model = DLMGPClassifier(beta="auto", **QUICK).fit(*moons[:2])
    assert model.beta_ in model.beta_path_ and len(model.beta_path_) >= 3
    assert log_loss_of(model, *moons[2:]) < 0.4


@pytest.mark.slow
def test_sampled_gradients_end_near_the_exact_one(moons):
    options = dict(kernel=4.0 * RBF(1.0), optimizer=None, n_gradient_samples=30)
    exact, *sampled = (
        log_loss_of(DLMGPClassifier(gradient=each, **QUICK, **options).fit(*moons[:2]), *moons[2:])
        for each in ("auto", "bmc", "smooth_bmc", "ups")
    )
    np.testing.assert_allclose(sampled, exact, atol=0.05)


# ---- streams, warm starts, state ---------------------------------------------------------------


def test_warm_start_goes_on_where_the_last_fit_ended(moons):
    X, y = moons[:2]
    options = {**QUICK, "early_stopping": False}
    model = DLMGPClassifier(**options, warm_start=True).fit(X, y)
    before = model.loss_
    model.set_params(max_iter=2).fit(X, y)
    assert model.loss_ < before + 1e-6
    cold = DLMGPClassifier(**{**options, "max_iter": 2}).fit(X, y)
    assert model.loss_ < cold.loss_ - 1
