"""StateSpaceGPClassifier: the contracts, series, several classes, streams, awkward data."""

import pickle

import numpy as np
import pytest
from scipy.special import expit
from sklearn.datasets import load_iris
from sklearn.gaussian_process.kernels import RBF, CompoundKernel, Matern

from skgp import StateSpaceGPClassifier
from skgp.kernels import ActiveDims
from skgp.learning.calibration import COUPLINGS
from tests.contracts.classifiers import ClassifierContract
from tests.covering import covering

KERNEL = 4.0 * Matern(2.0, nu=1.5)


class TestContract(ClassifierContract):
    offers_state = False
    scalar_kernel = ActiveDims(4.0 * RBF(1.0), [0]) + ActiveDims(4.0 * RBF(1.0), [1])
    length_scale = "kernel__k1__kernel__k2__length_scale"

    def make(self, **params):
        return StateSpaceGPClassifier(**params)

    def kernel(self, n_columns=2):
        if n_columns > 2:  # more length scales than columns
            return RBF([1.0] * n_columns)
        first, second = (ActiveDims(2.0 * Matern(1.5, nu=1.5), [j]) for j in range(2))
        return first + second

    @pytest.mark.parametrize("dtype", ["float64"])
    def test_predictions_do_not_depend_on_the_batch(self, data, dtype):
        super().test_predictions_do_not_depend_on_the_batch(data, dtype)

    def test_everything_is_float64_even_of_a_fit_in_float32(self, data):
        with pytest.raises(ValueError, match='Use dtype="float64"'):
            self.make(dtype="float32").fit(*data)


def kept(**params):
    """An estimator with hyper-parameters that suit the series and are kept."""
    return StateSpaceGPClassifier(**{"kernel": KERNEL, "optimizer": None, **params})


@pytest.fixture(scope="module")
def two():
    """Times in no order, some of them twice with labels that differ."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 20, 90)
    x[:8] = x[8:16]
    return x[:, None], np.where(rng.random(90) < expit(4 * np.sin(x)), "day", "night")


@pytest.fixture(scope="module")
def three():
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 20, 150)
    signal = np.sin(x) + 0.3 * rng.standard_normal(150)
    return x[:, None], np.array(["low", "mid", "top"])[np.digitize(signal, [-0.4, 0.4])]


@pytest.fixture(scope="module")
def X_new():
    return np.array([[3.0], [-2.0], [19.5], [24.0], [3.0], [11.0]])


def density(fit, X, y):
    return fit.log_predictive_density(X, y).mean()


# ---- series -----------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["logit", "probit"])
def test_default_learns_a_series(likelihood, two):
    X, y = (part[:60] for part in two)
    fit = StateSpaceGPClassifier(likelihood=likelihood, max_iter=10).fit(X, y)
    base = np.mean(y == "day")
    entropy = base * np.log(base) + (1 - base) * np.log(1 - base)
    assert density(fit, two[0][60:], two[1][60:]) > 0.7 * entropy
    assert fit.n_iter_ >= 1 and len(fit.history_["solve"]) == fit.n_iter_
    assert fit.elbo_ < 0 and fit.coupling_ == 0.0 and fit.moderation_ == 1.0


def test_far_away_the_base_rates_are_predicted(two, three):
    for (X, y), n_inducing in ((two, None), (two, 20), (three, None)):
        fit = kept(n_inducing=n_inducing).fit(X, y)
        classes, counts = np.unique(y, return_counts=True)
        mean, var = fit.latent_mean_and_variance([[-1e6], [1e6]])
        share = counts[1:] / len(y) if len(classes) == 2 else counts / len(y)
        f, weight = np.polynomial.hermite.hermgauss(60)  # of a variance of 4
        found = expit(mean[..., None] + np.sqrt(8.0) * f) @ weight / np.sqrt(np.pi)
        np.testing.assert_allclose(found, np.tile(share, (2, 1)).reshape(mean.shape), rtol=1e-6)
        np.testing.assert_allclose(var, 4.0, rtol=1e-10)


def test_inducing_states_come_near_exact_inference(two, X_new):
    exact, sparse = (kept(n_inducing=n).fit(*two) for n in (None, 60))
    np.testing.assert_allclose(sparse.predict_proba(X_new), exact.predict_proba(X_new), atol=5e-3)
    assert exact.elbo_ - 0.5 < sparse.elbo_ < exact.elbo_ + 1e-6
    assert sparse.inducing_points_.shape == (60, 1)
    assert len(pickle.dumps(sparse)) < 4 * 4 * 60 * 8 + 5000


def test_weights_are_rows_given_twice_in_a_column_of_heavy_tails(rng):
    X, weight = rng.standard_normal((60, 2)), rng.integers(1, 4, 60)
    X[0] = 1e7
    label = X[:, 0] + rng.logistic(scale=0.3, size=60) > 0
    rows = np.repeat(np.arange(60), weight)
    weighted = StateSpaceGPClassifier().fit(X, label, sample_weight=weight)
    repeated = StateSpaceGPClassifier().fit(X[rows], label[rows])
    np.testing.assert_allclose(
        weighted.predict_proba(X), repeated.predict_proba(X), rtol=0, atol=1e-6
    )


def test_classes_of_unequal_size(two):
    X, y = two
    few = np.concatenate([np.flatnonzero(y == "day")[:2], np.flatnonzero(y == "night")])
    rare = kept().fit(X[few], y[few])
    balanced = kept(class_weight="balanced").fit(X[few], y[few])
    assert rare.predict_proba([[1e6]])[0, 0] < 0.2
    assert balanced.predict_proba([[1e6]])[0, 0] == pytest.approx(0.5)


def test_components_are_the_summands(three, X_new):
    fit = kept(kernel=KERNEL + 1.0 * Matern(0.3, nu=0.5)).fit(*three)
    mean, std = fit.predict_components(X_new, return_std=True)
    assert mean.shape == std.shape == (6, 2, 3) and fit.intercept_.shape == (3,)
    latent = fit.latent_mean_and_variance(X_new)[0]
    np.testing.assert_allclose(mean.sum(1) + fit.intercept_, latent, rtol=1e-9)


# ---- several classes --------------------------------------------------------------------------


def test_classes_of_a_series_share_a_kernel(three):
    X, y = (part[:100] for part in three)
    fit = StateSpaceGPClassifier(KERNEL, max_iter=5).fit(X, y)
    assert not isinstance(fit.kernel_, CompoundKernel) and fit.kernel_ != KERNEL
    assert fit.score(*three) > 0.7


def test_coupling_is_that_of_rows_left_out(three, X_new):
    fit = kept().fit(*three)
    assert fit.coupling_ in COUPLINGS
    mean, var = fit.latent_mean_and_variance(X_new)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    claims = expit(mean[..., None] + np.sqrt(var)[..., None] * nodes) @ (weights / weights.sum())
    expected = claims / (1 - claims) ** fit.coupling_
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(fit.predict_proba(X_new), expected, rtol=1e-5)
    # Of all couplings about the best for rows that were not seen.
    X, y = three
    half = kept().fit(X[::2], y[::2])
    found = density(half, X[1::2], y[1::2])
    half.coupling_ = 1.0
    assert found > density(half, X[1::2], y[1::2]) - 0.02
    assert kept().fit(X[:99], y[:99]).coupling_ == 0.5


def test_kernels_of_classes_differ_in_additive_models():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    y = np.digitize(np.sin(2 * X[:, 0]) + 0.2 * X[:, 1], [-0.4, 0.4])
    fit = StateSpaceGPClassifier(max_iter=4).fit(X, y)
    assert isinstance(fit.kernel_, CompoundKernel) and len(fit.kernel_.kernels) == 3
    mean = fit.predict_components(X)
    assert mean.shape == (60, 2, 3)
    latent = fit.latent_mean_and_variance(X)[0]
    np.testing.assert_allclose(mean.sum(1) + fit.intercept_, latent, atol=1e-8)
    again = StateSpaceGPClassifier(TestContract().kernel(), max_iter=4).fit(X, y)
    assert again.score(X, y) > 0.7


def test_warm_start_goes_on_from_the_last_fit(two):
    fit = StateSpaceGPClassifier(KERNEL, warm_start=True, max_iter=2).fit(*two)
    first = fit.elbo_
    assert fit.fit(*two).elbo_ >= first - 1e-6


# ---- streams ----------------------------------------------------------------------------------


@covering(labels=["three", "two"], n_inducing=[None, 20])
def test_stream_comes_near_the_fit_of_all_rows(labels, n_inducing, request):
    X, y = request.getfixturevalue(labels)
    stream, whole = kept(n_inducing=n_inducing), kept().fit(X, y)
    order = np.argsort(X[:, 0])
    for rows in np.array_split(order, 3):
        stream.partial_fit(X[rows], y[rows], classes=np.unique(y))
    first = kept().fit(X[order[:60]], y[order[:60]])
    densities = [density(fit, X, y) for fit in (first, stream, whole)]
    assert densities[1] > 0.2 * densities[0] + 0.8 * densities[2]
    assert stream.score(X, y) > 0.7


# ---- awkward data -----------------------------------------------------------------------------


def test_stream_of_columns_goes_on_after_a_large_first_batch(monkeypatch):
    monkeypatch.setattr("skgp.estimators._state_space_common.STREAM_ROWS", 300)
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (303, 2))
    y = (X[:, 0] + 0.3 * rng.standard_normal(303) > 0).astype(int)
    model = StateSpaceGPClassifier(optimizer=None, max_iter=3).partial_fit(X, y)
    assert model.partial_fit(X[:3], y[:3]).score(X, y) > 0.8


def test_an_additive_search_ends_where_an_iteration_gains_little():
    X, y = load_iris(return_X_y=True)
    model = StateSpaceGPClassifier().fit(X[::3], y[::3] == 1)
    gains = np.diff(model.history_["solve"])
    assert (gains[:-1] > 1e-3).all()


def test_rare_labels_are_as_rare_as_they_were_seen():
    """One in fifty; a variance about the logit of that would add half as many."""
    t, y = np.arange(200.0)[:, None], np.isin(np.arange(200), [50, 90, 91, 92])
    fit = StateSpaceGPClassifier().fit(t, y)
    assert fit.predict_proba(t)[:, 1].sum() == pytest.approx(4, rel=0.2)
    np.testing.assert_allclose(fit.predict_proba([[1e6]])[:, 1], 0.02, rtol=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_extreme_weights_leave_a_search_of_the_kernel(seed):
    """One ended where q is no posterior: an error, or 1 predicted where labels of 0 weigh 1e5."""
    rng = np.random.default_rng(20 + seed)
    x = np.sort(rng.uniform(0, 10, 20))[:, None]
    y, weight = rng.integers(0, 2, 20), 10.0 ** rng.uniform(-6, 6, 20)
    proba = StateSpaceGPClassifier().fit(x, y, sample_weight=weight).predict_proba(x)[:, 1]
    heavy = weight > 10 * np.median(weight)
    assert np.all(np.abs(proba - y)[heavy] < 0.5)
