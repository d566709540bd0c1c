"""Predictions left out on either scale, by as many dense fits, and what they decide."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from skgp.data import Data
from skgp.learning.hyperparameters import left_out, logs_predict_better
from tests.reference import gaussian

KERNEL = 1.3 * RBF([0.8, 2.0]) + WhiteKernel(0.2)


def data(y, X, weight=None):
    weight = None if weight is None else torch.tensor(weight)
    return Data(torch.tensor(X), torch.tensor(y), weight)


def problem(seed=0, n=40):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return rng, X, np.sin(2 * X[:, 0]) + 0.3 * X[:, 1]


@pytest.mark.parametrize("of_log", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_each_is_predicted_from_all_others(of_log, weighted):
    rng, X, f = problem()
    y = 5 * np.exp(0.5 * f + 0.3 * rng.standard_normal(40))
    weight = rng.uniform(0.5, 2.0, 40) if weighted else None
    fixed = ConstantKernel(1.3, "fixed") * RBF([0.8, 2.0], "fixed") + WhiteKernel(0.2, "fixed")
    loss, square = left_out(fixed, data(1e-290 * y, X, weight), of_log)
    y = y / y.max()
    u = np.log(y) if of_log else y
    mean = np.average(u, weights=weight)
    scale = np.average((u - mean) ** 2, weights=weight) ** 0.5
    noise = 0.2 / (1.0 if weight is None else weight)
    for i in range(0, 40, 7):
        f, var = gaussian.left_out(KERNEL.k1(X), noise, u - mean, i)
        m, std = mean + f, scale * np.sqrt(var + 0.2)
        law = stats.lognorm(std, scale=np.exp(m)) if of_log else stats.norm(m, std)
        assert loss[i] == pytest.approx(-law.logpdf(y[i]), rel=1e-8)
        predicted = np.exp(m + 0.1 * scale**2) if of_log else m
        assert square[i] == pytest.approx((predicted - y[i]) ** 2, rel=1e-7)


@pytest.mark.parametrize("kind", ["logs", "gamma", "sum", "heavy sum", "exponential"])
def test_the_scale_of_the_noise_is_found(kind):
    """Of five problems of each kind all but one."""
    found, n = [], 150
    for seed in range(5):
        rng, X, f = problem(seed, n)
        if kind == "logs":
            y = np.exp(0.9 * f + 0.3 * rng.standard_normal(n))
        elif kind == "gamma":
            y = np.exp(f) * rng.gamma(4.0, 0.25, n)
        elif kind == "exponential":  # of f, with additive noise
            y = np.exp(f) + 0.3 * rng.standard_normal(n)
        else:
            noise = rng.standard_t(3, n) if kind == "heavy sum" else rng.standard_normal(n)
            y = f + 0.5 * noise
        if kind not in ("logs", "gamma"):
            y = y - min(0.0, y.min()) + 0.3
        found.append(logs_predict_better(KERNEL, data(y, X)))
    assert sum(found) >= 4 if kind in ("logs", "gamma") else sum(found) <= 1


@pytest.mark.filterwarnings("error")
def test_targets_that_are_equal_or_hardly_count_decide_nothing():
    rng, X, f = problem(0, 80)
    assert not logs_predict_better(KERNEL, data(np.full(80, 2.0), X))
    y, weight = np.exp(0.9 * f + 0.3 * rng.standard_normal(80)), np.ones(80)
    weight[:20] = 10.0 ** rng.uniform(-20, -16, 20)  # noises above 1e15, which round
    for of_log in (False, True):
        loss, square = left_out(KERNEL, data(y, X, weight), of_log)
        assert np.isfinite(loss).all() and np.isfinite(square).all()
    assert logs_predict_better(KERNEL, data(y, X, weight))


def test_means_that_are_worse_forbid_logs(monkeypatch):
    """Densities of most are better in logs, and the error of the mean of some is far greater."""
    rng, X, f = problem(0, 120)
    y = np.exp(0.9 * f + 0.3 * rng.standard_normal(120))
    assert logs_predict_better(KERNEL, data(y, X))
    of_scale = left_out

    def worse(kernel, given, of_log):
        loss, square = of_scale(kernel, given, of_log)
        return loss, square * (1.5 if of_log else 1.0)

    monkeypatch.setattr("skgp.learning.hyperparameters.left_out", worse)
    assert not logs_predict_better(KERNEL, data(y, X))
