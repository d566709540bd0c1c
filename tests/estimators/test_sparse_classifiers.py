"""What DLMGPClassifier and SWSGPClassifier have to get right alike, by every route."""

import numpy as np
import pytest
from sklearn.datasets import load_iris, make_classification, make_moons
from sklearn.gaussian_process.kernels import RBF

from skgp import DLMGPClassifier, SWSGPClassifier
from tests.covering import slow_case


def dlm(**params):
    return DLMGPClassifier(**{"n_inducing": 15, "max_iter": 20, "random_state": 0, **params})


def swsgp(**params):
    return SWSGPClassifier(**{"random_state": 0, **params})


def log_loss_of(model, X, y):
    return -model.log_predictive_density(X, y).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "params"),
    [
        (dlm, {"objective": "log_loss", "max_iter": 10}),
        (dlm, {"objective": "elbo", "max_iter": 10}),
        (swsgp, {}),
        (swsgp, {"kl_weight": 1000 / 32}),
    ],
)
def test_rare_class_is_predicted_with_calibrated_probabilities(make, params):
    """Of 2.5%: better than the base rate, and as frequent as predicted."""
    X, y = make_classification(
        3000, 5, n_redundant=0, weights=[0.98], class_sep=1.5, flip_y=0.01, random_state=0
    )
    model = make(**params).fit(X[:1000], y[:1000])
    X, y = X[1000:], y[1000:]
    share = y.mean()
    assert 0.02 < share < 0.03
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    p = model.predict_proba(X)[:, 1]
    assert -np.log(np.where(y == 1, p, 1 - p)).mean() < 0.8 * entropy
    for rows in (p < 0.1, p >= 0.1):
        z = (y[rows] - p[rows]).sum() / np.sqrt((p[rows] * (1 - p[rows])).sum())
        assert abs(z) < 4


@pytest.mark.parametrize("model", [dlm(n_inducing=1), swsgp()], ids=["dlm", "swsgp"])
def test_rows_that_are_all_equal_have_the_base_rate(model):
    y = np.array([0] * 30 + [1] * 10)
    proba = model.fit(np.ones((40, 2)), y).predict_proba([[1.0, 1.0]])[0]
    np.testing.assert_allclose(proba, [0.75, 0.25], atol=0.06)


@pytest.mark.parametrize(("make", "params"), [(dlm, {}), (swsgp, {"n_neighbors": 16})])
def test_few_rows_and_two_classes_have_a_coupling_of_their_own(make, params):
    X, y = load_iris(return_X_y=True)
    options = {"kernel": 4.0 * RBF(1.0), "optimizer": None, **params}
    assert make(**options).fit(X[::2], y[::2]).coupling_ == 0.5
    assert make(**options).fit(X[:100], y[:100]).coupling_ == 0.0


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (dlm, {"objective": "log_loss"}),
        slow_case(dlm, {"objective": "elbo"}),
        (swsgp, {"likelihood": "logit", "n_neighbors": 16}),
    ],
)
def test_stream_comes_near_the_fit_of_all_rows(make, params):
    X, y = make_moons(600, noise=0.3, random_state=0)
    params = {"kernel": 4.0 * RBF(1.0), "optimizer": None, **params}
    stream = make(**params)
    for rows in np.array_split(np.arange(200), 4):
        stream.partial_fit(X[rows], y[rows])
    whole, first = (make(**params).fit(X[:n], y[:n]) for n in (200, 50))
    losses = [log_loss_of(model, X[200:], y[200:]) for model in (whole, stream, first)]
    assert losses[1] < losses[0] + 0.05
    assert losses[1] < losses[2]
    if make is swsgp:
        assert first.n_inducing_ < stream.n_inducing_ <= 200
