"""QSGPRegressor with relevance vectors: the contracts, sparsity, indices, noise."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import make_friedman1
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor
from skgp.datasets import make_sinc
from tests.contracts.estimators import RegressorPredictions
from tests.same import assert_same

KERNEL = 1.0 * RBF(2.0) + WhiteKernel(0.05)


def make(**params):
    """An estimator with hyper-parameters kept, the noise aside."""
    return QSGPRegressor(**{"kernel": KERNEL, "basis": "relevance", "random_state": 0, **params})


@pytest.fixture(scope="module")
def data():
    return make_sinc(n_samples=120, noise=0.1, random_state=0)


class TestContract(RegressorPredictions):
    offers_state = False  # a posterior exists only when the search has ended

    def make(self, **params):
        return QSGPRegressor(**{"basis": "relevance", "random_state": 0, **params})


# ---- search -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_targets_without_a_signal_have_few_vectors(rng):
    X, y = rng.standard_normal((300, 3)), rng.standard_normal(300)
    fit = QSGPRegressor(basis="relevance", random_state=0).fit(X[:50], y[:50])
    assert fit.n_relevance_vectors_ < 25
    assert fit.log_predictive_density(X[50:], y[50:]).mean() > -2.5


@pytest.mark.slow
def test_noise_of_few_functions_is_no_last_word():
    X, y = make_friedman1(300, n_features=5, noise=0.1, random_state=5)
    fit = QSGPRegressor(basis="relevance", random_state=0).fit(X[:100], y[:100])
    assert fit.score(X[100:], y[100:]) > 0.95


@pytest.mark.slow
def test_targets_far_off_the_others_are_not_given_vectors_of_their_own(rng):
    X = rng.standard_normal((350, 4))
    y = np.exp(X[:, 0] + np.sin(X[:, 1]) + 0.5 * rng.standard_normal(350))
    model = QSGPRegressor(basis="relevance", likelihood="gaussian", random_state=0)
    fit = model.fit(X[:150], y[:150])
    low, high = fit.predict_interval(X[150:])
    assert np.mean((low < y[150:]) & (y[150:] < high)) > 0.9


# ---- sparsity -----------------------------------------------------------------------------------


def test_sinc_keeps_few_vectors():
    X, y = make_sinc(n_samples=300, noise=0.1, random_state=0)
    fit = make(kernel=None).fit(X, y)
    grid = np.linspace(-10, 10, 300)[:, None]
    assert 7 <= fit.n_relevance_vectors_ <= 15
    assert np.sqrt(np.mean((fit.predict(grid) - np.sinc(grid[:, 0] / np.pi)) ** 2)) < 0.04
    assert fit.noise_variance_**0.5 == pytest.approx(0.1, rel=0.1)


def test_vectors_of_many_rows_are_no_more():
    X, y = make_sinc(n_samples=5000, noise=0.1, random_state=0)
    assert make(optimizer=None, n_basis=300).fit(X, y).n_relevance_vectors_ <= 20


def test_attributes_say_what_was_kept(data):
    fit = make().fit(*data)
    assert (fit.basis_, fit.solver_, fit.covariance_) == ("relevance", "sequential", "full")
    assert fit.n_basis_ == fit.n_relevance_vectors_ == len(fit.relevance_) < 15
    assert fit.relevance_.dtype.kind == "i" and (np.diff(fit.relevance_) > 0).all()
    losses = fit.history_["solve"]
    assert losses[-1] == pytest.approx(-fit.log_marginal_likelihood_value_, abs=1e-2)
    assert losses[-1] < losses[0] and fit.n_iter_ == len(losses)


def test_the_rows_kept_are_enough_to_predict(data):
    # Phi of the rows that relevance_ names, whatever their order, spans the predictive mean.
    X, y = data
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    fit = make().fit(X, y)
    grid = np.linspace(-12, 12, 200)[:, None]
    Phi = fit.kernel_.k1(grid, X[fit.relevance_])
    mean = (fit.predict(grid) - fit.y_mean_) / fit.y_scale_
    weights = np.linalg.lstsq(Phi, mean, rcond=None)[0]
    np.testing.assert_allclose(Phi @ weights, mean, atol=1e-8)


class ArrayLike:
    """What NumPy makes an array of, and has no other functions of arrays."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)

    def __array_function__(self, func, types, args, kwargs):
        return NotImplemented


@pytest.mark.parametrize("kind", [list, ArrayLike])
def test_relevance_counts_rows_of_weight_zero(data, kind):
    X, y = data
    weights = np.ones(len(X))
    weights[::3] = 0
    kept = np.flatnonzero(weights)
    weighted = make(optimizer=None).fit(X, y, kind(weights))
    without = make(optimizer=None).fit(X[kept], y[kept])
    np.testing.assert_array_equal(weighted.relevance_, kept[without.relevance_])
    assert weighted.n_relevance_vectors_ == without.n_relevance_vectors_


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", ["fixed", (1e-5, 10.0)])
@pytest.mark.parametrize("optimizer", ["auto", None])
def test_noise_is_learned_unless_it_is_kept(optimizer, bounds, data):
    kernel = RBF(2.0) + WhiteKernel(0.5, bounds)
    fit = make(kernel=kernel, optimizer=optimizer).fit(*data)
    level = fit.noise_variance_ / fit.y_scale_**2
    kept = optimizer is None or bounds == "fixed"
    assert (level == pytest.approx(0.5, rel=1e-12)) == kept
    assert fit.kernel_.k2.noise_level == pytest.approx(level, rel=1e-12)
    assert kept or fit.noise_variance_**0.5 == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("n_basis", [20, 1000])
def test_n_basis_is_the_number_of_candidates(n_basis, data):
    fit = make(n_basis=n_basis, optimizer=None).fit(*data)
    assert fit.n_basis_ == fit.n_relevance_vectors_ <= 15
    assert fit.score(*data) > 0.8


def test_sgd_finds_as_few_vectors(data):
    fit = make(solver="sgd", learning_rate=0.3, max_iter=300, optimizer=None).fit(*data)
    assert fit.solver_ == "sgd" and fit.n_iter_ == 300
    assert fit.n_relevance_vectors_ <= 20 and fit.score(*data) > 0.85
    assert np.isfinite(fit.log_marginal_likelihood_value_)
    again = pickle.loads(pickle.dumps(fit)).predict(data[0], return_std=True)
    assert_same(again, fit.predict(data[0], return_std=True))
    with pytest.raises(ValueError, match="sample_weight is not supported by solver='sgd'"):
        fit.fit(*data, sample_weight=np.ones(len(data[1])))


def test_partial_fit_needs_a_basis_that_stays(data):
    with pytest.raises(AttributeError) as caught:
        make().partial_fit(*data)
    assert "got basis='relevance'" in str(caught.value.__cause__)
