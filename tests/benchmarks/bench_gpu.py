"""The estimators on a GPU beside gpytorch on the same one: seconds, error, density and memory.

::

    python -m tests.benchmarks.bench_gpu                      # all problems, device="cuda"
    python -m tests.benchmarks.bench_gpu --only kin40k mnist
    python -m tests.benchmarks.bench_gpu --device cpu --tiny  # a few hundred rows: that it runs

or ``pytest tests/benchmarks/bench_gpu.py -m "gpu and benchmark" -s``. Data are read from the folder
``SKGP_DATA_DIR``, by default ``../shared/data`` beside the repository (``NAME.npz``: X, y,
test_mask); problems whose file is absent are skipped. gpytorch's model is a stochastic variational
GP of 1024 inducing points, left out where it is not installed. Inputs and targets are standardised
by the training part.
"""

import argparse
import math
import time
import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import DLMGPRegressor, QSGPClassifier, QSGPRegressor, StateSpaceGPRegressor
from tests.benchmarks.data import DATA

pytestmark = [pytest.mark.gpu, pytest.mark.benchmark]
TINY = 400
N_INDUCING, N_EPOCHS, BATCH = 1024, 20, 1024


def rows_of(name, tiny):
    """X_train, X_test, y_train, y_test of the first split, standardised; None without the file."""
    path = DATA / f"{name}.npz"
    if not path.is_file():
        print(f"{name}: no {path}; name its folder in SKGP_DATA_DIR")
        return None
    with np.load(path) as arrays:
        test, X, y = arrays["test_mask"][:, 0], arrays["X"], arrays["y"]
    size = TINY if tiny else None
    X_train, X_test = (X[rows][:size].astype(np.float64) for rows in (~test, test))
    y_train, y_test = (y[rows][:size] for rows in (~test, test))
    if name == "mnist":  # odd or even
        return X_train / 255, X_test / 255, y_train % 2, y_test % 2
    scale = np.maximum(X_train.std(0), 1e-12)
    X_train, X_test = ((A - X_train.mean(0)) / scale for A in (X_train, X_test))
    y_train, y_test = ((a - y_train.mean()) / y_train.std() for a in (y_train, y_test))
    return X_train, X_test, y_train, y_test


def timed(device, function):
    """What a function returns, and its seconds, work on the device included."""
    synchronise = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronise()
    start = time.perf_counter()
    found = function()
    synchronise()
    return found, time.perf_counter() - start


def run(title, model, rows, device):
    """Fit, predict and print a line."""
    X_train, X_test, y_train, y_test = rows
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, seconds = timed(device, lambda: model.fit(X_train, y_train))
        predicted, later = timed(device, lambda: model.predict(X_test))
        density = float(np.mean(model.log_predictive_density(X_test, y_test)))
    error = np.mean((predicted - y_test) ** 2) ** 0.5
    if hasattr(model, "predict_proba"):
        error = np.mean(predicted != y_test)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.startswith("cuda") else math.nan
    print(
        f"{title:36} {seconds:8.1f} s fit {later:7.2f} s predict  error {error:.4f}  "
        f"nats {density:7.3f}  {peak:5.1f} GB",
        flush=True,
    )


class Peer:
    """gpytorch's stochastic variational GP with the methods that `run` calls."""

    def __init__(self, device, n_inducing, n_epochs):
        self.device, self.n_inducing, self.n_epochs = device, n_inducing, n_epochs

    def fit(self, X, y):
        import gpytorch
        from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

        X, y = (torch.tensor(A, dtype=torch.float32, device=self.device) for A in (X, y))
        chosen = torch.randperm(len(X), device=self.device)[: self.n_inducing]

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self, Z):
                q = CholeskyVariationalDistribution(len(Z))
                super().__init__(VariationalStrategy(self, Z, q, learn_inducing_locations=True))
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.ScaleKernel(
                    gpytorch.kernels.MaternKernel(ard_num_dims=Z.shape[1])
                )

            def forward(self, X):
                return gpytorch.distributions.MultivariateNormal(
                    self.mean_module(X), self.covar_module(X)
                )

        self.model = Model(X[chosen]).to(self.device)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood().to(self.device)
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=len(y))
        for _ in range(self.n_epochs):
            for rows in torch.randperm(len(X), device=self.device).split(BATCH):
                optimizer.zero_grad()
                (-objective(self.model(X[rows]), y[rows])).backward()
                optimizer.step()
        return self

    @torch.no_grad()
    def _moments(self, X):
        X = torch.tensor(X, dtype=torch.float32, device=self.device)
        parts = [self.likelihood(self.model(rows)) for rows in X.split(BATCH)]
        mean = torch.cat([part.mean for part in parts]).cpu().numpy()
        return mean, torch.cat([part.variance for part in parts]).cpu().numpy()

    def predict(self, X):
        return self._moments(X)[0]

    def log_predictive_density(self, X, y):
        mean, var = self._moments(X)
        return -0.5 * (np.log(2 * np.pi * var) + (y - mean) ** 2 / var)


def regression(name, device, tiny):
    """QSGP, DLM and gpytorch on one set."""
    rows = rows_of(name, tiny)
    if rows is None:
        return
    print(f"\n{name}, {len(rows[0])} rows of {rows[0].shape[1]} columns, {device}")
    common = {"device": device, "random_state": 0}
    run("QSGPRegressor", QSGPRegressor(**common), rows, device)
    size = {"n_inducing": 20, "max_iter": 10} if tiny else {"n_inducing": N_INDUCING}
    run("DLMGPRegressor", DLMGPRegressor(**size, **common), rows, device)
    try:
        import gpytorch  # noqa: F401
    except ImportError:
        print("gpytorch is not installed: pip install skgp[bench]")
        return
    sizes = (20, 2) if tiny else (N_INDUCING, N_EPOCHS)
    run("gpytorch, variational", Peer(device, *sizes), rows, device)


def kin40k(device, tiny):
    """36 thousand rows of a smooth function."""
    regression("kin40k", device, tiny)


def protein(device, tiny):
    """41 thousand rows with much noise."""
    regression("protein", device, tiny)


def mnist(device, tiny):
    """Odd and even digits: Newton's method, and stochastic gradients."""
    rows = rows_of("mnist", tiny)
    if rows is None:
        return
    print(f"\nmnist, {len(rows[0])} rows, {device}")
    common = {"device": device, "random_state": 0, "basis": "fourier", "dtype": "float32"}
    m, steps = (200, 20) if tiny else (10_000, 2_000)
    run(f"newton, m = {m}", QSGPClassifier(n_basis=m, **common), rows, device)
    for m in (1_000,) if tiny else (10**5, 10**6):
        model = QSGPClassifier(solver="sgd", n_basis=m, max_iter=steps, **common)
        run(f"sgd, m = {m}", model, rows, device)


def many_functions(device, tiny):
    """QSGPRegressor on kin40k with up to 1e7 Fourier functions."""
    rows = rows_of("kin40k", tiny)
    if rows is None:
        return
    print(f"\nkin40k, stochastic gradients, {device}")
    for m in (1_000,) if tiny else (10**5, 10**6, 10**7):
        model = QSGPRegressor(
            1.0 * RBF(np.ones(rows[0].shape[1])) + WhiteKernel(0.01),
            basis="fourier", solver="sgd", n_basis=m, max_iter=20 if tiny else 2_000,
            dtype="float32", device=device, random_state=0,
        )  # fmt: skip
        run(f"sgd, m = {m}", model, rows, device)


def state_space(device, tiny):
    """A series of a million times, fixed hyper-parameters and learned ones."""
    n = TINY if tiny else 10**6
    x = np.sort(np.random.default_rng(0).uniform(0, n / 10, n + 1000))
    y = np.sin(x) + 0.1 * np.random.default_rng(1).standard_normal(len(x))
    test = np.zeros(len(x), dtype=bool)
    test[:: len(x) // 1000 + 1] = True
    rows = x[~test, None], x[test, None], y[~test], y[test]
    print(f"\nseries of {len(rows[0])} times, {device}")
    kernel = 1.0 * Matern(1.0, nu=1.5) + WhiteKernel(0.01)
    for optimizer in (None, "auto"):
        model = StateSpaceGPRegressor(kernel, optimizer=optimizer, device=device)
        run(f"optimizer={optimizer!r}", model, rows, device)


PROBLEMS = {f.__name__: f for f in (kin40k, protein, mnist, many_functions, state_space)}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_bench(problem):
    PROBLEMS[problem]("cuda", tiny=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="some hundred rows, few iterations")
    parser.add_argument("--only", nargs="+", default=[*PROBLEMS], choices=[*PROBLEMS])
    chosen = parser.parse_args()
    for problem in chosen.only:
        PROBLEMS[problem](chosen.device, chosen.tiny)
