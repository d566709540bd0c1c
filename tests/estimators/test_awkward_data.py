"""Data that say little: one input, one row, one class, more columns than points."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

import skgp

REGRESSORS = [
    skgp.QSGPRegressor,
    skgp.DLMGPRegressor,
    skgp.SWSGPRegressor,
    skgp.StateSpaceGPRegressor,
    skgp.BayesianGPRegressor,
]
CLASSIFIERS = [
    skgp.QSGPClassifier,
    skgp.DLMGPClassifier,
    skgp.SWSGPClassifier,
    skgp.StateSpaceGPClassifier,
]


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_equal_inputs_have_the_spread_of_their_targets(estimator):
    """Replicates at one input alone tell the noise."""
    y = np.random.default_rng(0).standard_normal(100)
    X = np.ones((100, 2))
    _, std = estimator(random_state=0).fit(X, y).predict(X[:1], return_std=True)
    assert std[0] == pytest.approx(y.std(), rel=0.15)


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_one_row_says_nothing_of_the_spread(estimator):
    """Its deviation from its own mean is 0, which is not to be taken for a law without noise."""
    model = estimator(random_state=0).fit([[1.0, 2.0]], [3.0])
    mean, std = model.predict([[1.0, 2.0], [9.0, 9.0]], return_std=True)
    assert mean == pytest.approx(3.0)
    assert (std > 0.1).all() and std[1] > 0.5


@pytest.mark.parametrize("estimator", CLASSIFIERS)
def test_stream_that_begins_with_one_class_learns_the_others(estimator):
    """The evidence of one class has no use for f, and its amplitude would be nought for good."""
    X = np.random.default_rng(1).standard_normal((80, 2))
    y = (X[:, 0] > 0).astype(int)
    first = np.flatnonzero(y)[:10]
    others = np.setdiff1d(np.arange(80), first)
    model = estimator(random_state=0)
    for rows in (first, others[:35], others[35:]):
        model.partial_fit(X[rows], y[rows], classes=[0, 1])
    assert model.score(X, y) > 0.8


def test_more_length_scales_than_points_of_a_round():
    """Covariances of fewer points than hyper-parameters are singular."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 140))
    y = X[:, 0] + 0.1 * rng.standard_normal(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = skgp.BayesianGPRegressor(random_state=0, n_samples=512).fit(X, y)
    _, std = model.predict(X, return_std=True)
    assert np.isfinite(std).all() and (std > 0).all()
