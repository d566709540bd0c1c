"""SWSGPClassifier: the contracts, several classes, options, streams, awkward data."""

import pickle

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm
from sklearn.datasets import load_digits, make_moons
from sklearn.gaussian_process.kernels import RBF
from sklearn.utils import shuffle

from skgp import SWSGPClassifier
from tests.contracts.classifiers import ClassifierContract

KERNEL = 4.0 * RBF(1.0)


class TestContract(ClassifierContract):
    offers_state = False

    def make(self, **params):
        return SWSGPClassifier(**{"random_state": 0, **params})


def kept(**params):
    """An estimator with hyper-parameters that suit `moons` and are kept."""
    options = {"kernel": KERNEL, "optimizer": None, "n_neighbors": 16, "random_state": 0}
    return SWSGPClassifier(**{**options, **params})


def log_loss_of(model, X, y):
    return -model.log_predictive_density(X, y).mean()


@pytest.fixture(scope="module")
def moons():
    X, y = make_moons(600, noise=0.3, random_state=0)
    return X[:200], y[:200], X[200:], y[200:]


@pytest.fixture(scope="module")
def digits():
    """Rows of ten classes, 64 columns, some of them constant; and others."""
    X, y = shuffle(*load_digits(return_X_y=True), random_state=0)
    return X[:330], y[:330], X[400:600], y[400:600]


# ---- several classes -----------------------------------------------------------------------------


def test_scales_of_default_kernels_follow_labels_left_out():
    """A prior of standard deviation 1 about their start held them back: log loss .29."""
    X, y = load_digits(return_X_y=True)
    model = SWSGPClassifier(random_state=0).fit(X[:100], y[:100] % 2)
    assert log_loss_of(model, X[100:], y[100:] % 2) < 0.26


@pytest.fixture(scope="module")
def of_digits(digits):
    """Hyper-parameters that suit `digits`, kept; not to be changed."""
    model = kept(kernel=400.0 * RBF(30.0), projection=None, warm_start=True)
    return model.fit(*digits[:2])


def test_probabilities_are_coupled_claims(digits, of_digits):
    model, (*_, fresh, target) = of_digits, digits
    mean, var = model.latent_mean_and_variance(fresh[:20])
    z = mean / np.sqrt(1 + model.moderation_ * var)
    expected = norm.cdf(z) / norm.sf(z) ** model.coupling_
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(fresh[:20]), expected, rtol=1e-7)
    assert model.coupling_ >= 0.5  # digits lie apart
    plain = pickle.loads(pickle.dumps(model))
    plain.coupling_ = 0.0
    assert log_loss_of(model, fresh, target) < log_loss_of(plain, fresh, target)


def test_moderation_is_that_of_labels_left_out(digits):
    X, y, fresh, target = digits
    full = {"n_neighbors": "auto", "projection": None}
    model = kept(kernel=100.0 * RBF(30.0), **full).fit(X, y % 2)
    found = log_loss_of(model, fresh, target % 2)
    assert model.moderation_ < 1  # q says too little of f where it is large
    model.moderation_ = 1.0
    assert found < 0.9 * log_loss_of(model, fresh, target % 2)
    noise = np.random.default_rng(0).integers(0, 2, len(X))
    assert kept(**full).fit(X[:, 10:12], noise).moderation_ == 1.0
    assert kept(projection=None).fit(X[:90], y[:90] % 2).moderation_ == 1.0  # none are left out


def test_calibration_is_kept_by_a_warm_start_and_a_stream(digits, of_digits):
    X, y = digits[:2]
    model = pickle.loads(pickle.dumps(of_digits))
    calibration = model.moderation_, model.coupling_
    assert calibration != (1.0, 0.5)  # without labels left out
    model.fit(X, y)
    assert (model.moderation_, model.coupling_) == calibration
    model.partial_fit(X[:50], y[:50])
    assert (model.moderation_, model.coupling_) == calibration


# ---- inducing points -----------------------------------------------------------------------------


def test_auto_takes_clusters_for_few_points(moons):
    """Up to 0.3 n, beyond that rows."""
    for n_inducing, init in ((60, "k-means"), (61, "random")):
        auto, asked = (
            kept(init=each, n_inducing=n_inducing).fit(*moons[:2]).inducing_points_
            for each in ("auto", init)
        )
        np.testing.assert_array_equal(auto, asked)
        rows = set(map(tuple, moons[0]))
        assert (init == "random") == all(tuple(point) in rows for point in auto)


# ---- state, weights, streams ---------------------------------------------------------------------


def test_stream_weighs_the_divergence_as_the_fit_did(moons):
    X, y = np.vstack([moons[0], moons[2]]), np.concatenate([moons[1], moons[3]])
    learned = SWSGPClassifier(n_neighbors=8, random_state=0).fit(X[:400], y[:400])
    assert learned.kl_weight_ < 400 / 8  # rows held out chose less than the default
    given, factor = pickle.loads(pickle.dumps(learned)), learned.kl_weight_ / learned.n_inducing_
    learned.partial_fit(X[400:500], y[400:500])
    assert learned.kl_weight_ / learned.n_inducing_ == pytest.approx(factor, rel=1e-12)
    given.set_params(kl_weight=learned.kl_weight_).partial_fit(X[400:500], y[400:500])
    np.testing.assert_allclose(
        learned.predict_proba(X[500:]), given.predict_proba(X[500:]), rtol=1e-8
    )
    given = kept(kl_weight=2.0, n_neighbors=8).fit(X[:50], y[:50])
    assert given.partial_fit(X[150:200], y[150:200]).kl_weight_ == 2.0


def test_warm_start_goes_on_where_the_last_fit_ended(moons):
    X, y, fresh, _ = moons
    model = SWSGPClassifier(warm_start=True, random_state=0).fit(X, y)
    theta, before, n_iter = model.kernel_.theta, model.predict_proba(fresh), model.n_iter_
    model.fit(X, y)
    np.testing.assert_allclose(model.kernel_.theta, theta, rtol=1e-12)
    np.testing.assert_allclose(model.predict_proba(fresh), before, atol=0.02)
    assert model.n_iter_ < n_iter and not model.history_["hyperparameters"]
    model.set_params(likelihood="logit").fit(X[:70], y[:70])
    assert model.history_["hyperparameters"]  # there is nothing to go on from


# ---- awkward data --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_rare_class_is_predicted_no_worse_than_by_its_frequency(seed):
    """Two in a hundred of 500 labels; what they are held out for does not follow their noise."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (3500, 2))
    p = 1 / (1 + np.exp(5.2 - 2 * np.sin(1.5 * X[:, 0]) - 1.5 * np.cos(1.2 * X[:, 1])))
    y = (rng.uniform(size=3500) < p).astype(int)
    model = SWSGPClassifier(n_neighbors=16, random_state=seed).fit(X[:500], y[:500])
    rate = np.full(3000, y[:500].mean())
    losses = [
        -np.log(np.where(y[500:] == 1, q, 1 - q)).mean()
        for q in (model.predict_proba(X[500:])[:, 1], rate)
    ]
    assert losses[0] < losses[1] + 1e-3


@pytest.mark.slow
def test_rare_class_is_learned_without_a_function_that_follows_its_labels():
    """13 of 1000 labels: the likeliest kernel has no signal, or follows each of them."""
    rng = np.random.default_rng(10)
    X = rng.uniform(-2, 2, (6000, 2))
    phase = rng.uniform(0, 2 * np.pi, 2)
    f = 2 * np.sin(1.5 * X[:, 0] + phase[0]) + 1.5 * np.cos(1.2 * X[:, 1] + phase[1])
    y = (rng.uniform(size=6000) < expit(f - 5.4)).astype(int)
    model = SWSGPClassifier(random_state=10).fit(X[:1000], y[:1000])
    rate = np.full(5000, y[:1000].mean())
    losses = [
        -np.log(np.where(y[1000:] == 1, p, 1 - p)).mean()
        for p in (model.predict_proba(X[1000:])[:, 1], rate, expit(f[1000:] - 5.4))
    ]
    assert losses[0] < losses[1] - 0.3 * (losses[1] - losses[2])
