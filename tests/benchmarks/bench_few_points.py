"""Few observations: predictions against scikit-learn's and the exact GP's, and what a fit takes.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_few_points.py -m benchmark -s``. Seconds
are the processor's. Data are read from the folder ``SKGP_DATA_DIR``, by default ``../shared/data``
beside the repository (``NAME.npz``: X, y, test_mask); a test is skipped where they are absent.

``test_many_columns``: 80 or 100 observations drawn from the training parts of five splits, and of
functions of five among 200 columns. Negative log predictive density (nats, standardised targets),
coverage of 95% intervals, root mean square error of `QSGPRegressor` and of scikit-learn's GPR with
one length scale and with one a column (restarted twice; once of more than 50 columns).

``test_exact``: all regressors by default on the sets below 2000 observations, against a GP of the
greatest exact evidence among the same families, each fitted to all from its start.

Seconds of 60 observations are those of ``bench_small_fits.py``.

The constants of :class:`skgp.learning.starts.ChoiceSettings` were chosen by the first of
these on other observations of the training parts than those that it draws, test parts aside.
"""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import BayesianGPRegressor, DLMGPRegressor, QSGPRegressor, SWSGPRegressor
from skgp.data import merge_replicates
from skgp.estimators._kernels import default_kernels
from skgp.learning.search import fit_marginal_likelihood
from tests.benchmarks.data import seconds_of, split_of

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.filterwarnings("ignore"),
]

MANY_COLUMNS = {
    "sarcos_testpart": 80,
    "sml": 100,
    "skillcraft": 100,
    "gas": 100,
    "pumadyn32nm": 100,
    "generated": 100,
}
BELOW_2000 = ("yacht", "motorcycle", "snelson1d", "solar", "concrete", "airfoil", "wine")
REGRESSORS = {
    "QSGP": lambda: QSGPRegressor(random_state=0),
    "DLM": lambda: DLMGPRegressor(random_state=0),
    "SWSGP": lambda: SWSGPRegressor(random_state=0),
    "Bayesian": lambda: BayesianGPRegressor(random_state=0),
}
N_SPLITS, N_RESTARTS, MARGIN = 5, 2, 0.05


def few(name, split):
    """Some observations of a training part, and the test part; or generated ones."""
    rng = np.random.RandomState(split)
    if name == "generated":
        X = rng.randn(1100, 200)
        y = np.sin(X[:, :5] @ rng.randn(5)) + 0.5 * X[:, 0] + 0.1 * rng.randn(1100)
        return X[:100], X[100:], y[:100], y[100:]
    X, X_test, y, y_test = split_of(name, split)
    some = rng.permutation(len(X))[: MANY_COLUMNS[name]]
    return X[some], X_test, y[some], y_test


def scores(mean, std, y, scale):
    """Loss in nats of targets over their scale, coverage, error in that scale."""
    z = (y - mean) / std
    loss = 0.5 * np.log(2 * np.pi * (std / scale) ** 2) + 0.5 * z**2
    return loss.mean(), np.mean(np.abs(z) < 1.96), np.sqrt(np.mean((y - mean) ** 2)) / scale


def scikit_learn(X, y, n_restarts, *, shared):
    length_scale = 1.0 if shared else np.ones(X.shape[1])
    kernel = 1.0 * RBF(length_scale) + WhiteKernel()
    return GaussianProcessRegressor(
        kernel, normalize_y=True, n_restarts_optimizer=n_restarts, random_state=0
    ).fit(X, y)


@pytest.mark.parametrize("name", MANY_COLUMNS)
def test_many_columns(name):
    found = {"QSGP": [], "one scale": [], "ARD": []}
    for split in range(N_SPLITS):
        X, X_test, y, y_test = few(name, split)
        ours, seconds = seconds_of(lambda: QSGPRegressor(random_state=0).fit(X, y))  # noqa: B023
        prediction = ours.predict(X_test, return_std=True)
        found["QSGP"].append((*scores(*prediction, y_test, y.std()), seconds))
        mean, spread = X.mean(0), X.std(0)
        spread[spread <= 1e-10 * np.abs(mean)] = 1.0
        Z, Z_test = (X - mean) / spread, (X_test - mean) / spread
        for label, shared in (("one scale", True), ("ARD", False)):
            n_restarts = N_RESTARTS if shared or X.shape[1] <= 50 else 1
            theirs, seconds = seconds_of(lambda: scikit_learn(Z, y, n_restarts, shared=shared))  # noqa: B023
            prediction = theirs.predict(Z_test, return_std=True)
            found[label].append((*scores(*prediction, y_test, y.std()), seconds))
    table = {label: np.mean(rows, axis=0) for label, rows in found.items()}
    print(f"\n{name} {X.shape}: loss, coverage, error, seconds")
    for label, row in table.items():
        print(f"  {label:10s}" + "".join(f"{value:8.3f}" for value in row))
    assert table["QSGP"][0] <= min(table["one scale"][0], table["ARD"][0]) + MARGIN
    assert 0.88 <= table["QSGP"][1] <= 0.98


def exact_gp(X, y):
    """The family of the greatest evidence, all observations and no priors."""
    data = merge_replicates(X, (y - y.mean()) / y.std(), None, torch.device("cpu"))
    fits = [fit_marginal_likelihood(kernel, data) for kernel in default_kernels(X)]
    best = max(fits, key=lambda fit: fit.log_marginal_likelihood)
    return QSGPRegressor(best.kernel, optimizer=None).fit(X, y)


@pytest.mark.parametrize("name", BELOW_2000)
def test_exact(name):
    X, X_test, y, y_test = split_of(name, 0)
    exact, least = seconds_of(lambda: exact_gp(X, y))
    prediction = exact.predict(X_test, return_std=True)
    reference = scores(*prediction, y_test, y.std())
    print(f"\n{name} {X.shape}: loss, coverage, error, seconds, of those of the exact GP")
    print("  exact          " + "".join(f"{value:8.3f}" for value in (*reference, least)))
    for label, make in REGRESSORS.items():
        ours, seconds = seconds_of(lambda: make().fit(X, y))  # noqa: B023
        found = scores(*ours.predict(X_test, return_std=True), y_test, y.std())
        row = (*found, seconds, seconds / least)
        print(f"  {label:15s}" + "".join(f"{value:8.3f}" for value in row))
        if label in ("QSGP", "DLM"):
            assert found[0] <= reference[0] + MARGIN
