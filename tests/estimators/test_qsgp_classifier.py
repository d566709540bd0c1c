"""QSGPClassifier: the contract of every classifier, and what is its own."""

import itertools
from itertools import cycle

import numpy as np
import pytest
from sklearn.datasets import load_digits, make_moons
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.metrics import log_loss

from skgp import QSGPClassifier
from skgp.learning.defaults import FEW_ROWS_MODERATION, LEAST_EFFECT
from tests.contracts.classifiers import ClassifierContract
from tests.covering import slow_case
from tests.same import assert_same

KERNEL = ConstantKernel(9.0) * RBF([0.7, 0.7])


class TestContract(ClassifierContract):
    offers_state = False

    def make(self, **params):
        return QSGPClassifier(**{"random_state": 0, **params})

    def make_streaming(self, **params):
        return self.make(n_basis=64, **params)


@pytest.fixture
def moons():
    return make_moons(150, noise=0.2, random_state=0)


def fitted(X, y, sample_weight=None, **params):
    model = QSGPClassifier(**{"kernel": KERNEL, "optimizer": None, "random_state": 0, **params})
    return model.fit(X, y, sample_weight)


OPTIONS = [
    *[
        dict(basis=basis, n_basis=n_basis, solver="newton", covariance=covariance)
        for basis, n_basis in (("inducing", None), ("inducing", 40), ("fourier", 80))
        for covariance in ("full", "chevron", "diagonal")
    ],
    *[
        dict(basis=basis, n_basis=80, solver="sgd", covariance=covariance, max_iter=50)
        for basis in ("fourier", "inducing")
        for covariance in ("diagonal", "chevron")
    ],
    dict(basis="fourier", n_basis=80, solver="sgd", bound="strict", max_iter=50),
    dict(basis="relevance"),
]


@pytest.mark.parametrize(
    ("options", "likelihood"), [*zip(OPTIONS, cycle(["logit", "probit"]), strict=False)], ids=str
)
def test_every_combination_classifies(moons, options, likelihood):
    X, y = moons
    model = fitted(X, y, likelihood=likelihood, **options)
    for name in ("basis", "solver", "covariance"):
        assert getattr(model, f"{name}_") == options.get(name, getattr(model, f"{name}_"))
    assert model.score(X, y) > 0.85
    mean, var = model.latent_mean_and_variance(X)
    assert np.isfinite(mean).all() and (var >= 0).all() and (var > 0).any()


def test_base_rate_is_predicted_far_from_the_rows(moons):
    X, y = moons
    kept = np.flatnonzero((y == 0) | (np.arange(len(y)) % 5 == 0))
    model = fitted(X[kept], y[kept], class_weight=None)
    model.moderation_ = 0.0
    share = np.mean(y[kept])
    np.testing.assert_allclose(model.predict_proba([[1e3, 1e3]])[0, 1], share, rtol=1e-6)


def test_the_amplitude_of_few_labels_has_an_end():
    """Of a dozen that a plane separates the evidence made it 35, the log loss of others 2.1."""
    rng = np.random.default_rng(101)
    X, W = rng.standard_normal((1512, 5)), 2 * rng.standard_normal((5, 2))
    y = (X @ W + rng.gumbel(size=(1512, 2))).argmax(1)
    model = QSGPClassifier(random_state=0).fit(X[:12], y[:12])
    assert model.kernel_.k1.constant_value**0.5 < 20


def test_few_rows_choose_the_moderation_by_labels_left_out(rng):
    """No label is wrong under the latent mode, but one more may be: a little of the variance."""
    X = rng.uniform(-2, 2, (60, 2))
    y = X[:, 0] > 0
    X[:, 0] += np.where(y, 1, -1)
    model = QSGPClassifier(1.0 * RBF(1.0), random_state=0).fit(X, y)
    scores = model.validation_["moderation"]
    factors = sorted(scores)
    assert all(scores[low] > scores[high] for low, high in itertools.pairwise(factors))
    assert model.moderation_ == factors[1] == FEW_ROWS_MODERATION


@pytest.mark.parametrize("solver", ["newton", slow_case("sgd")])
def test_more_rows_than_basis_functions_choose_the_amplitude_by_rows_left_out(solver):
    X, y = make_moons(1500, noise=0.3, random_state=0)
    kernel = ConstantKernel(0.05, (1e-3, 1e4)) * RBF([0.7, 0.7], "fixed")
    max_iter = 20 if solver == "sgd" else None
    model = QSGPClassifier(kernel, n_basis=60, solver=solver, random_state=0, max_iter=max_iter)
    model.fit(X, y)
    scores = model.validation_["moderation"]
    assert scores[model.moderation_] >= max(scores.values()) - LEAST_EFFECT
    assert np.isfinite(list(scores.values())).all()
    if solver == "newton":
        scores = model.validation_["amplitude"]
        assert len(scores) > 2
        best, amplitude = max(scores.values()), model.kernel_.k1.constant_value
        model.set_params(kernel=model.kernel_, optimizer=None).fit(X, y)
        assert model.kernel_.k1.constant_value == amplitude
        assert model.validation_["amplitude"] == {1.0: pytest.approx(best, abs=LEAST_EFFECT)}


@pytest.mark.parametrize(
    "params", [{}, {"kernel": None}, {"basis": "fourier", "n_basis": 1024, "kernel": None}]
)
def test_weights_are_repeated_rows_for_every_choice(params, monkeypatch):
    X, y = make_moons(80, noise=0.4, random_state=2)
    X, y = np.vstack([X, X[:6]]), np.r_[y, 1 - y[:6]]  # inputs of both labels, too
    counts = np.arange(86) % 3 + 1
    # The last case holds rows out.
    monkeypatch.setattr("skgp.learning.defaults.LEAVE_ONE_OUT_FLOPS", 1e8)
    model, again = (
        fitted(*data, **params)
        for data in ((X, y, counts), (X.repeat(counts, 0), y.repeat(counts)))
    )
    assert model.validation_ == again.validation_ and model.moderation_ == again.moderation_
    np.testing.assert_array_equal(model.predict_proba(X), again.predict_proba(X))


def test_relevance_vectors_are_counted_with_the_rows_of_weight_zero(moons):
    X, y = moons
    weight = np.ones(len(X))
    weight[:50] = 0
    model = QSGPClassifier(KERNEL, optimizer=None, basis="relevance", random_state=0)
    model.fit(X, y, sample_weight=weight)
    assert model.relevance_.min() >= 50
    shorter = fitted(X[50:], y[50:], basis="relevance")
    np.testing.assert_array_equal(model.relevance_, shorter.relevance_ + 50)


@pytest.mark.slow
def test_ten_digits_on_raw_pixels():
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, X_test, y, y_test = X[order[:700]], X[order[700:]], y[order[:700]], y[order[700:]]
    model = QSGPClassifier(random_state=0).fit(X, y)
    assert model.score(X_test, y_test) > 0.97
    assert -model.log_predictive_density(X_test, y_test).mean() < 0.12


def test_warm_start_continues_stochastic_gradients(moons):
    options = dict(solver="sgd", n_basis=80, max_iter=30, warm_start=True)
    model = fitted(*moons, **options)
    first = model.history_["solve"][-1]
    model.fit(*moons)
    assert model.n_iter_ == 60 and model.history_["solve"][-1] < first


# ---- partial_fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["fourier", "inducing"])
def test_stream_is_near_the_fit_to_all_rows(basis):
    X, y = make_moons(600, noise=0.25, random_state=0)
    options = dict(basis=basis, n_basis=100, kernel=KERNEL, optimizer=None, random_state=0)
    stream = QSGPClassifier(**options)
    for rows in np.split(np.arange(400), 4):
        assert stream.partial_fit(X[rows], y[rows], classes=[0, 1]) is stream
    whole = QSGPClassifier(**options).fit(X[:400], y[:400])
    losses = []
    for model in (stream, whole):
        model.moderation_ = 0.0
        losses.append(-model.log_predictive_density(X[400:], y[400:]).mean())
    assert abs(losses[0] - losses[1]) < 0.02
    assert stream.n_basis_ == 100 and stream.basis_ == basis


def test_first_batch_decides_and_fit_begins_anew(moons):
    X, y = moons
    model = QSGPClassifier(n_basis=40, random_state=0).partial_fit(X[:90], y[:90])
    kernel, offset = model.kernel_, model.offset_.copy()
    model.partial_fit(X[90:], y[90:])
    assert model.kernel_ == kernel
    assert_same(model.offset_, offset)
    model.fit(X, y)
    expected = QSGPClassifier(n_basis=40, random_state=0).fit(X, y)
    assert_same(model.predict_proba(X), expected.predict_proba(X))
    with pytest.raises(ValueError, match="partial_fit needs solver='newton'"):
        QSGPClassifier(solver="sgd").partial_fit(X, y)


def test_evidence_is_that_of_the_laplace_approximation(moons):
    """Balanced classes have no offset, and all rows as inducing points are the dense process."""
    X, y = moons
    dense = GaussianProcessClassifier(KERNEL, optimizer=None).fit(X, y)
    model = fitted(X, y, tol=1e-10)
    assert model.covariance_ == "full" and abs(model.offset_[0]) < 1e-12
    expected = dense.log_marginal_likelihood_value_
    assert model.log_marginal_likelihood_value_ == pytest.approx(expected, rel=1e-5)


def test_evidence_and_bound_are_those_of_the_last_fit(moons):
    X, y = moons
    model = fitted(X, y, n_basis=40)
    exact = model.log_marginal_likelihood_value_
    assert not hasattr(model, "elbo_")
    model.set_params(solver="sgd", max_iter=60).fit(X, y)
    assert not hasattr(model, "log_marginal_likelihood_value_")
    assert np.isfinite(model.elbo_) and model.elbo_ < exact + 5
    model.set_params(solver="newton", covariance="diagonal").fit(X, y)
    assert not hasattr(model, "log_marginal_likelihood_value_") and not hasattr(model, "elbo_")
    model.set_params(basis="relevance", solver="auto", covariance="auto", n_basis=None).fit(X, y)
    assert np.isfinite(model.log_marginal_likelihood_value_)


# ---- principal components ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, slow_case({"solver": "sgd", "max_iter": 10, "warm_start": True}), {"basis": "relevance"}],
)
def test_components_asked_for_are_what_the_kernel_sees(options):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((150, 6)) * [9, 7, 5, 1, 1, 1]
    y = X[:, 0] > 0
    model = QSGPClassifier(1.0 * RBF(5.0), projection=3, random_state=0, **options)
    Z = (X - X.mean(0)) @ np.linalg.svd(X - X.mean(0), full_matrices=False)[2][:3].T
    alike = QSGPClassifier(1.0 * RBF(5.0), random_state=0, **options).fit(Z, y)
    for _ in range(2):  # the second with a warm start
        model.fit(X, y)
        np.testing.assert_allclose(model.score(X, y), alike.score(Z, y), atol=0.02)
        if not options:
            expected = alike.predict_proba(Z)
            np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-3)


def test_a_stream_keeps_the_components_of_its_first_rows():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((200, 6)) * [9, 7, 5, 1, 1, 1]
    y = X[:, 0] > 0
    model = QSGPClassifier(1.0 * RBF(5.0), optimizer=None, projection=2, random_state=0)
    model.partial_fit(X[:100], y[:100], classes=[False, True]).partial_fit(X[100:], y[100:])
    assert model.score(X, y) > 0.9
    with pytest.raises(ValueError, match="projection=7 is more than the 6 columns of X; give 6"):
        QSGPClassifier(projection=7).fit(X, y)


def test_labels_predicted_right_do_not_make_probabilities_sure():
    """Where the sign of a product tells the class, 68 labels held out had none wrong."""
    X = np.random.default_rng(7).normal(size=(1205, 2))
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    model = QSGPClassifier(random_state=0).fit(X[:205], y[:205])
    assert log_loss(y[205:], model.predict_proba(X[205:])) < 0.08  # with the mode alone .13
