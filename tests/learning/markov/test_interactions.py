"""Interactions that an additive model misses: the score and its information beside differences."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.data import Data
from skgp.kernels import ActiveDims
from skgp.learning.markov import additive
from skgp.learning.markov.additive import _gains, missed_interaction
from skgp.learning.markov.defaults import FISHER_RIDGE, LEAST_INTERACTION, PEAK_CHANCE
from skgp.likelihoods import Gaussian
from tests.contracts.common import Recorder


def test_gain_is_that_of_the_score_of_the_dense_evidence():
    rng = np.random.default_rng(0)
    X, z, noise = (
        rng.uniform(-2, 2, (12, 2)),
        3 * rng.standard_normal(12),
        rng.uniform(0.1, 0.3, 12),
    )
    K = [v * Matern(s, nu=1.5)(X[:, [i]]) for i, (v, s) in enumerate([(1.3, 0.7), (0.4, 2.0)])]
    H = np.eye(12) - 1 / 12
    D = np.prod([H @ k @ H / np.trace(H @ k @ H) * 12 for k in K], 0)
    slopes = [*K, np.diag(noise), D]
    L = np.linalg.cholesky(sum(slopes[:3]))
    P, half = np.linalg.inv(L @ L.T), np.linalg.inv(L)
    z += 30 * L @ np.linalg.eigh(half @ D @ half.T)[1][:, -1]
    z *= np.sqrt(12 / (z @ P @ z))

    def evidence(p):
        C = sum(c * part for c, part in zip(p, slopes, strict=True))
        return -0.5 * (z @ np.linalg.solve(C, z) + np.linalg.slogdet(C)[1])

    p, h = np.array([1.0, 1.0, 1.0, 0.0]), 1e-4 * np.eye(4)
    u = (evidence(p + h[3]) - evidence(p - h[3])) / 2e-4
    observed = [
        [
            (evidence(p + a + b) - evidence(p + a - b) - evidence(p - a + b) + evidence(p - a - b))
            / -4e-8
            for a in h
        ]
        for b in h
    ]
    expected = [[0.5 * np.trace(P @ a @ P @ b) for a in slopes] for b in slopes]
    A = 0.5 * (np.array(observed) + expected)
    A[:3, :3] += FISHER_RIDGE * np.eye(3)
    left = A[3, 3] - A[3, :3] @ np.linalg.solve(A[:3, :3], A[:3, 3])
    found = _gains(*(torch.tensor(np.array(each)) for each in (K, z, noise)))
    assert u > 0
    np.testing.assert_allclose(found[0, 1], u**2 / (2 * left), rtol=1e-4)
    assert not found[1].any()
    louder = _gains(*(torch.tensor(np.array(each)) for each in (K, 10 * z, noise)))
    np.testing.assert_allclose(louder, found)  # no interaction, but noise that is told too small


def test_an_observation_of_some_weight_has_as_much_less_noise():
    rng = np.random.default_rng(0)
    X = torch.tensor(rng.uniform(-2, 2, (40, 2)))
    y = 3 * (X[:, 0] * X[:, 1]).sin()
    kernels = [ActiveDims(Matern(nu=1.5), [i]) for i in range(2)]
    weighted = Data(X, y, weight=torch.full((40,), 4.0, dtype=torch.float64))
    given = [(weighted, Gaussian(0.4)), (Data(X, y), Gaussian(0.1))]
    found = [missed_interaction(kernels, data, 0 * y, 0.0, noise) for data, noise in given]
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("n", "least"), [(200, 200 * LEAST_INTERACTION), (20, -np.log(PEAK_CHANCE))]
)
def test_gains_of_few_nats_are_chance(n, least, monkeypatch):
    X = torch.zeros(n, 2, dtype=torch.float64)
    data, kernels = Data(X, X[:, 0]), [ActiveDims(Matern(nu=1.5), [i]) for i in range(2)]
    for factor, told in ((0.99, False), (1.01, True)):
        gains = torch.tensor([[0.0, factor * least], [0.0, 0.0]])
        monkeypatch.setattr(additive, "_gains", lambda *args, gains=gains: gains)
        found = missed_interaction(kernels, data, X[:, 0], 0.0, Gaussian(0.1))
        assert (found is not None) == told


@pytest.mark.parametrize("ends", ["max_iter", "callback"])
def test_a_search_cut_short_may_have_left_out_any_part(ends):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (200, 3))
    y = np.sin(6 * X[:, 0]) + np.sin(5 * X[:, 1]) + 0.2 * rng.standard_normal(200)
    model = StateSpaceGPRegressor(max_iter=1)
    if ends == "callback":
        model = StateSpaceGPRegressor().set_callbacks(Recorder(stop_after=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*act together")
        assert model.fit(X, y).n_iter_ == 1


@pytest.mark.parametrize("estimator", [StateSpaceGPRegressor, StateSpaceGPClassifier])
def test_a_fit_warns_of_columns_that_act_together_and_of_no_others(estimator):
    rng = np.random.default_rng(1)
    X, weight = rng.uniform(-2, 2, (150, 3)), np.append(0, np.ones(149))
    alone, together = np.sin(2 * X[:, 0]) + X[:, 1] ** 2, np.sin(X[:, 0] + 2 * X[:, 2])
    for f, warns in ((alone, False), (together, True)):
        y = f + 0.2 * rng.standard_normal(150)
        y = y if estimator is StateSpaceGPRegressor else y > np.median(y)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            estimator().fit(X, y, sample_weight=weight)
        found = [str(each.message) for each in caught if "act together" in str(each.message)]
        assert len(found) == warns
        assert not warns or found[0].startswith("Columns 0 and 2 of X act together")
