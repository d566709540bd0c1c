"""A rare class: 2% of 1000 rows, two columns, a logistic function of a smooth surface.

    pytest -m benchmark tests/benchmarks/bench_rare_class.py -s

Prints the negative log-probability of a label, in nats, for each of RARE_CLASS_SEEDS (20) seeds:
`SWSGPClassifier`, `QSGPClassifier`, the base rate of the training labels, the truth.
"""

import os
import time

import numpy as np
import pytest
from scipy.special import expit

from skgp import QSGPClassifier, SWSGPClassifier

N, N_NEW, BASE_RATE = 1000, 5000, 0.02


def rare_labels(seed, n=N, n_new=N_NEW):
    """Rows, labels of which 2% are 1, and their probabilities; training part and others."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n + n_new, 2))
    phase = rng.uniform(0, 2 * np.pi, 2)
    f = 2.0 * np.sin(1.5 * X[:, 0] + phase[0]) + 1.5 * np.cos(1.2 * X[:, 1] + phase[1])
    low, high = -30.0, 30.0
    for _ in range(60):  # the intercept that gives the base rate
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expit(f + middle).mean() < BASE_RATE else (low, middle)
    p = expit(f + low)
    y = (rng.uniform(size=n + n_new) < p).astype(int)
    return X[:n], y[:n], X[n:], y[n:], p[n:]


def loss(p, y):
    """Mean negative log-probability of the labels."""
    return -np.log(np.where(y == 1, p, 1 - p)).mean()


def losses_of(seed):
    """Of SWSGP, of QSGP, of the base rate, of the truth; and process seconds of the two fits."""
    X, y, X_new, y_new, p = rare_labels(seed)
    found, seconds = [], []
    for model in (SWSGPClassifier(random_state=seed), QSGPClassifier(random_state=seed)):
        start = time.process_time()
        proba = model.fit(X, y).predict_proba(X_new)[:, 1]
        seconds.append(time.process_time() - start)
        found.append(loss(proba, y_new))
    return [*found, loss(np.full(len(y_new), y.mean()), y_new), loss(p, y_new)], seconds


@pytest.mark.benchmark
def test_rare_class():
    seeds = range(int(os.environ.get("RARE_CLASS_SEEDS", 20)))
    rows = []
    for seed in seeds:
        losses, seconds = losses_of(seed)
        rows.append(losses)
        print(f"{seed:3d}", *(f"{each:.4f}" for each in losses), *(f"{s:.1f}s" for s in seconds))
    swsgp, qsgp, base, truth = np.mean(rows, axis=0)
    print(f"mean {swsgp:.4f} {qsgp:.4f} {base:.4f} {truth:.4f}")
    assert swsgp <= qsgp + 0.003
    assert all(row[0] <= row[2] for row in rows)
