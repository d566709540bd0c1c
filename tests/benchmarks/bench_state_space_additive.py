"""Additive state-space GP on flight delays next to ridge, boosted trees, an exact additive GP.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_state_space_additive.py -m benchmark``
and ``-s``. Seconds are the processor's. Data are read from the folder ``SKGP_DATA_DIR``, by default
``../shared/data`` beside the repository (``NAME.npz``: X, y, test_mask); where the file is absent
the tests are skipped. MSE and NLPD (nats a row) are of y standardised by its training part; the
NLPD of peers without a predictive variance is that of N(mean, training MSE).
"""

import math
import time

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process.kernels import Matern
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp.data import Data
from skgp.kernels import gram
from skgp.likelihoods import Gaussian
from skgp.models.state_space import fit_additive
from tests.benchmarks.data import seconds_of, split_of

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def flights():
    """X_train, X_test, y_train, y_test of split 0, y standardised."""
    X, X_test, y, y_test = split_of("flights_nyc13")
    y, y_test = ((each - y.mean()) / y.std() for each in (y, y_test))
    return tuple(map(torch.from_numpy, (X, X_test, y, y_test)))


def fit(X, y, **options):
    """A Matern-3/2 for every column, of length scales from its spread; the fit and seconds."""
    kernels = [0.1 * Matern(s, (1e-3 * s, 1e3 * s), nu=1.5) for s in X.std(0).tolist()]
    family = Gaussian(0.9, bounds=(1e-6, 10.0))
    options["offset"] = float(y.mean())
    return seconds_of(lambda: fit_additive(kernels, Data(X, y), family, **options))


def report(name, y, mean, var, seconds):
    """Print and return the mean squared error and the negative log predictive density."""
    squared = (y - mean) ** 2
    mse = float(squared.mean())
    nlpd = float(0.5 * ((2 * math.pi * var).log() + squared / var).mean())
    print(f"{name:34s} MSE {mse:.4f}   NLPD {nlpd:.4f}   {seconds:6.1f} s")
    return mse, nlpd


def peer(name, model, rows):
    """Fit and score a scikit-learn regressor."""
    X_train, X_test, y_train, y_test = rows
    start = time.process_time()
    model.fit(X_train.numpy(), y_train.numpy())
    seconds = time.process_time() - start
    var = torch.tensor(np.mean((model.predict(X_train.numpy()) - y_train.numpy()) ** 2))
    return report(name, y_test, torch.from_numpy(model.predict(X_test.numpy())), var, seconds)


def exact_additive_gp(state, noise, X, y, X_new):
    """Mean and variance of y at new rows, from a dense GP on the rows as they are."""

    def covariance(A, B):
        columns = enumerate(state.kernels)
        return sum(gram(kernel, A[:, [j]], B[:, [j]]) for j, kernel in columns)

    C = covariance(X, X)
    C.diagonal().add_(noise)
    L = torch.linalg.cholesky(C)
    half = torch.linalg.solve_triangular(L, covariance(X, X_new), upper=False)
    centred = torch.linalg.solve_triangular(L, (y - y.mean())[:, None], upper=False)
    prior = sum(gram(k, X_new[:1, [j]])[0, 0] for j, k in enumerate(state.kernels))
    return y.mean() + (half.T @ centred)[:, 0], prior - half.square().sum(0) + noise


def test_flights_next_to_peers(flights):
    X_train, X_test, y_train, y_test = flights
    print(f"\nn = {len(X_train)}, c = {X_train.shape[1]}")
    scores = {}
    for posterior in ("mean_field", "joint"):
        found, seconds = fit(X_train, y_train, posterior=posterior)
        (state,), noise = found.states, found.parameters[0].exp()
        start = time.process_time()
        mean, var = state.moments(X_test)
        name = f"additive GP, {posterior}"
        scores[posterior] = report(name, y_test, mean, var + noise, seconds)
        print(
            f"    evidence {found.value:.1f}, {found.n_iter} iterations, "
            f"{len(state.shares)} bins, prediction {time.process_time() - start:.1f} s"
        )
        parts, _ = state.components(X_test)
        assert (parts.sum(1) + state.offset - mean).abs().max() < 1e-10
        assert seconds <= 90
    ridge = peer("ridge", make_pipeline(StandardScaler(), Ridge(1e-3)), flights)
    peer("HistGradientBoostingRegressor", HistGradientBoostingRegressor(random_state=0), flights)
    assert scores["mean_field"][0] < ridge[0] and scores["mean_field"][1] < ridge[1]


def test_ten_thousand_flights_next_to_exact_additive_gp(flights):
    X_train, X_test, y_train, y_test = flights
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(X_train))[:10_000].copy())
    X, y, X_new, y_new = X_train[rows], y_train[rows], X_test[:5000], y_test[:5000]
    print()
    for posterior in ("mean_field", "joint"):
        found, seconds = fit(X, y, posterior=posterior)
        (state,), noise = found.states, found.parameters[0].exp()
        mean, var = state.moments(X_new)
        mine = report(f"additive GP, {posterior}, n = 10000", y_new, mean, var + noise, seconds)
    start = time.process_time()
    mean, var = exact_additive_gp(state, noise, X, y, X_new)
    seconds = time.process_time() - start
    exact = report("exact additive GP, same kernels", y_new, mean, var, seconds)
    assert mine[0] == pytest.approx(exact[0], rel=0.01)
    assert mine[1] == pytest.approx(exact[1], abs=0.01)
