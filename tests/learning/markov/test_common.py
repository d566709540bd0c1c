"""Hyper-parameters that columns have in common, and when each column has its own."""

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime, minimize
from sklearn.gaussian_process.kernels import Matern

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.inference.markov.additive import DistinctRows
from skgp.kernels import ActiveDims
from skgp.learning.markov import choice
from skgp.learning.markov.additive import RowsEvidence
from skgp.learning.markov.choice import CommonClimb, apart_if_likelier
from skgp.learning.markov.defaults import COMMON_LOG_SD, NOISE_LOG_SD
from skgp.learning.markov.search import Component, Search
from skgp.likelihoods import Gaussian

NOISE = Gaussian(0.1, bounds=(1e-6, 10.0))


def sample(n, d, kind, seed=0, n_new=300):
    """Rows to learn from and new ones, of noise .3 beside f of variance 1."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n + n_new, d))
    f = X @ rng.standard_normal(d) if kind == "plane" else np.sin(2 * X[:, 0]) + np.sin(2 * X[:, 1])
    y = f / f.std() + 0.3 * rng.standard_normal(n + n_new)
    return X[:n], y[:n], X[n:], y[n:]


def climb_of(X, y):
    kernels = [ActiveDims(0.2 * Matern(1.0 + j, (0.01, 100), nu=1.5), [j]) for j in range(3)]
    rows = DistinctRows.of(
        torch.from_numpy(X), y=torch.from_numpy(y), weight=None, offset=0.0, log_exposure=None
    )
    return CommonClimb(kernels, RowsEvidence(rows), NOISE)


def dense_loss(place, X, y):
    """Minus the log of evidence and priors, by scikit-learn's kernels."""
    a, b, noise = place
    C = np.exp(noise) * np.eye(len(y))
    for j in range(3):
        C += 0.2 * np.exp(a) * Matern((1 + j) * np.exp(b), nu=1.5)(X[:, [j]])
    half = 0.5 * (y @ np.linalg.solve(C, y) + np.linalg.slogdet(2 * np.pi * C)[1])
    of_noise = (noise - np.log(0.1)) ** 2 / (2 * NOISE_LOG_SD**2)
    return half + (a**2 + b**2) / (2 * COMMON_LOG_SD**2) + of_noise


def test_loss_and_gradient_of_common_factors_are_those_of_a_dense_process():
    X, y, *_ = sample(40, 3, "plane")
    climb, place = climb_of(X, y), np.array([0.7, -0.4, -1.5])
    value, slope = climb.loss(torch.from_numpy(place))
    assert value * 40 == pytest.approx(dense_loss(place, X, y), rel=1e-9)
    expected = approx_fprime(place, dense_loss, 1e-7, X, y)
    np.testing.assert_allclose(slope * 40, expected, rtol=1e-4, atol=1e-4)


def test_search_of_common_factors_ends_at_the_maximum():
    X, y, *_ = sample(40, 3, "plane")
    climb = climb_of(X, y)
    found = climb.run(climb.start(), max_iter=100, tol=1e-9)
    best = min(minimize(dense_loss, start, (X, y)).fun for start in ([0, 0, -2.3], [3, 2, -2.3]))
    assert -found.value == pytest.approx(best, abs=1e-3)
    ratios = [
        each.kernel.kernel.k2.length_scale / (1 + j) for j, each in enumerate(found.components)
    ]
    np.testing.assert_allclose(ratios, ratios[0])


def law_and_variances(kind):
    """Mean and deviation of a default fit of 80 rows of 40 columns, variances of its components."""
    X, y, X_new, y_new = sample(80, 40, kind)
    model = StateSpaceGPRegressor().fit(X, y)
    mean, std = model.predict(X_new, return_std=True)
    nlpd = np.mean(0.5 * np.log(2 * np.pi * std**2) + (y_new - mean) ** 2 / (2 * std**2))
    inside = np.mean(np.abs(y_new - mean) < 1.96 * std)
    return nlpd, inside, [each.kernel.k1.constant_value for each in model.component_kernels_]


def test_a_plane_of_half_as_many_columns_as_rows_is_found():
    """As by ridge regression with the true variances; columns apart follow the noise."""
    X, y, X_new, y_new = sample(80, 40, "plane")
    C, k = X @ X.T / 40 + 0.09 * np.eye(80), X_new @ X.T / 40
    mean, gain = k @ np.linalg.solve(C, y), np.linalg.solve(C, k.T).T
    var = np.square(X_new).sum(1) / 40 - (k * gain).sum(1) + 0.09
    ridge = np.mean(0.5 * np.log(2 * np.pi * var) + (y_new - mean) ** 2 / (2 * var))
    nlpd, inside, variances = law_and_variances("plane")
    assert nlpd < ridge + 0.1
    assert inside > 0.9
    np.testing.assert_allclose(variances, variances[0])


def test_two_columns_of_forty_keep_variances_of_their_own():
    nlpd, inside, variances = law_and_variances("waves")
    assert min(variances[:2]) > 10 * max(variances[2:])
    assert nlpd < 0.45
    assert inside > 0.9


def test_two_columns_of_a_hundred_pay_for_themselves_and_not_for_the_others():
    """They gain less than a nat for every column, and all there is to gain."""
    X, y, X_new, y_new = sample(60, 100, "waves", n_new=500)
    model = StateSpaceGPRegressor().fit(X, y)
    assert model.score(X_new, y_new) > 0.8


@pytest.mark.parametrize(("d", "slope", "most"), [(20, 3.0, 0.6), (10, 0.0, 0.75)])
def test_few_labels_do_not_make_columns_follow_the_noise(d, slope, most):
    """Of a plane and of no function; columns apart have log-losses of .70 and .86."""
    X, f, X_new, f_new = sample(60, d, "plane", n_new=1000)
    rng = np.random.default_rng(1)
    y, y_new = (rng.uniform(size=len(g)) < 1 / (1 + np.exp(-slope * g)) for g in (f, f_new))
    model = StateSpaceGPClassifier().fit(X, y)
    loss = -model.log_predictive_density(X_new, y_new).mean()
    assert loss < most


@pytest.mark.parametrize(
    ("n_columns", "n_kept", "least"),
    [(20, 2, 2 * (1.5 + np.log(10))), (20, 20, 20.0), (4, 3, 4.0), (3, 1, 1.5 + np.log(3))],
)
def test_columns_that_matter_pay_for_their_own_or_all_a_nat(monkeypatch, n_columns, n_kept, least):
    """Of columns with 1 or .001 of the variance; at most a nat for every column."""
    variances = np.where(np.arange(n_columns) < n_kept, 1.0, 1e-3)
    apart = Search([Component(v * Matern(1.0, nu=1.5)) for v in variances], torch.zeros(1), 0.0)
    together = Search(apart.components, torch.zeros(1), 0.0)
    for gain in (least - 0.01, least + 0.01):
        monkeypatch.setattr(choice, "evidence_at", lambda found, *_, g=gain: g * (found is apart))
        chosen = apart_if_likelier(apart, together, None, None)
        assert chosen is (apart if gain > least else together)
