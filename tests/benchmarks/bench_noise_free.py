"""Targets without noise, as of simulations: errors beside scikit-learn's, and the scales chosen.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_noise_free.py -m benchmark -s``. Seconds
are the processor's.

``test_regressors``: root mean square error over the standard deviation of y, loss in nats of
standardised targets and coverage of 95% intervals at 2000 inputs, of regressors by default and of
scikit-learn's GPR with ``alpha=1e-10`` and one length scale a column, restarted twice; "QSGP, 1e-5"
has default noise of at least 1e-5 of the variance of y.

``test_oscillations``: errors of a trend with a quick oscillation along another column, with and
without starts of shorter length scales.
"""

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

import skgp
from skgp import QSGPRegressor
from skgp.learning.defaults import AUTOCORRELATED
from tests.benchmarks.bench_few_points import scores
from tests.benchmarks.data import seconds_of

pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]


def branin(X):
    a, b = 15 * X[:, 0] - 5, 15 * X[:, 1]
    wave = 10 * (1 - 1 / (8 * np.pi)) * np.cos(a)
    return (b - 5.1 / (4 * np.pi**2) * a**2 + 5 / np.pi * a - 6) ** 2 + wave + 10


def hartmann(X):
    A = np.array(
        [
            [10, 3, 17, 3.5, 1.7, 8],
            [0.05, 10, 17, 0.1, 8, 14],
            [3, 3.5, 1.7, 10, 17, 8],
            [17, 8, 0.05, 10, 0.1, 14],
        ]
    )
    P = 1e-4 * np.array(
        [
            [1312, 1696, 5569, 124, 8283, 5886],
            [2329, 4135, 8307, 3736, 1004, 9991],
            [2348, 1451, 3522, 2883, 3047, 6650],
            [4047, 8828, 8732, 5743, 1091, 381],
        ]
    )
    return -np.exp(-((X[:, None] - P) ** 2 * A).sum(2)) @ [1, 1.2, 3, 3.2]


def borehole(X):
    low = np.array([0.05, 100, 63070, 990, 63.1, 700, 1120, 9855])
    high = np.array([0.15, 50000, 115600, 1110, 116, 820, 1680, 12045])
    rw, r, Tu, Hu, Tl, Hl, L, Kw = (low + X * (high - low)).T
    ratio = np.log(r / rw)
    return 2 * np.pi * Tu * (Hu - Hl) / (ratio + 2 * L * Tu / (rw**2 * Kw) + ratio * Tu / Tl)


def friedman(X):
    wave = 10 * np.sin(np.pi * X[:, 0] * X[:, 1])
    return wave + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]


def rosenbrock(X):
    Z = 4 * X - 2
    return (100 * (Z[:, 1:] - Z[:, :-1] ** 2) ** 2 + (1 - Z[:, :-1]) ** 2).sum(1)


def one_column(X):
    return np.sin(6 * X[:, 0])


FUNCTIONS = {
    "branin": (branin, 2),
    "hartmann": (hartmann, 6),
    "borehole": (borehole, 8),
    "friedman": (friedman, 10),
    "rosenbrock": (rosenbrock, 4),
    "one column": (one_column, 3),
}


def drawn(name, n, seed, noise=0.0):
    """Inputs and targets of n observations and of 2000 others."""
    function, d = FUNCTIONS[name]
    rng = np.random.default_rng(seed)
    X, X_test = rng.random((n, d)), rng.random((2000, d))
    y, y_test = function(X), function(X_test)
    spread = noise * y_test.std()
    return X, X_test, y + spread * rng.normal(size=n), y_test + spread * rng.normal(size=2000)


@pytest.mark.parametrize("n", [40, 200, 1000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_regressors(name, n, monkeypatch):
    X, X_test, y, y_test = drawn(name, n, 0)
    kernel = 1.0 * RBF(np.ones(X.shape[1]), (1e-2, 1e3))
    models = {
        "scikit-learn": GaussianProcessRegressor(
            kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0
        )
    }
    for label in ("QSGP", "DLM", "SWSGP", "Vecchia", "Bayesian"):
        models[label] = getattr(skgp, f"{label}GPRegressor".replace("GPGP", "GP"))(random_state=0)
    models["QSGP, 1e-5"] = QSGPRegressor(random_state=0)
    print(f"\n{name}, n = {n}: error, loss, coverage, seconds")
    for label, model in models.items():
        if label == "scikit-learn" and n > 200:
            continue
        with monkeypatch.context() as patch:
            if label.endswith("1e-5"):
                patch.setattr("skgp.estimators.defaults.NOISE_BOUNDS", (1e-5, 1e1))
            _, seconds = seconds_of(lambda: model.fit(X, y))  # noqa: B023
        mean, std = model.predict(X_test, return_std=True)
        loss, coverage, error = scores(mean, np.maximum(std, 1e-9 * y.std()), y_test, y.std())
        print(f"  {label:13s} {error:9.1e} {loss:9.3f} {coverage:6.3f} {seconds:7.1f}")
        assert coverage > 0.8 or label == "scikit-learn"


def trend_and_wave(X, wave):
    if wave == "curve":
        return 2 * X[:, 0] ** 2 + 0.3 * np.sin(80 * X[:, 2])
    return 5 * X[:, 0] + np.sin(wave * X[:, 1])


@pytest.mark.parametrize(("wave", "d"), [(60, 2), (60, 5), (30, 8), ("curve", 3)])
def test_oscillations(wave, d, monkeypatch):
    print(f"\nwave {wave} of {d} columns: error without and with starts, at 3 seeds")
    for n in (100, 250, 800):
        errors = []
        for seed in range(3):
            rng = np.random.default_rng(seed)
            X, X_test = rng.random((n, d)), rng.random((2000, d))
            y = trend_and_wave(X, wave) + 0.05 * rng.normal(size=n)
            for least in (np.inf, AUTOCORRELATED):
                monkeypatch.setattr("skgp.learning.defaults.AUTOCORRELATED", least)
                found = QSGPRegressor(random_state=0).fit(X, y).predict(X_test)
                errors.append(np.sqrt(np.mean((found - trend_and_wave(X_test, wave)) ** 2)))
        without, with_starts = np.reshape(errors, (3, 2)).T
        print(f"  n = {n}: {without.round(3)} {with_starts.round(3)}", flush=True)
        assert with_starts.mean() < without.mean() + 0.01
