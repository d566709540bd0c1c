"""DLM against its peers: gpytorch's SGPR and SVGP, count regressors of scikit-learn, its own ELBO.

Run with ``OMP_NUM_THREADS=1 pytest tests/benchmarks/bench_dlm.py -m benchmark -s``. Every fit has a
process of its own and as many threads as ``OMP_NUM_THREADS`` says, one if it says nothing. Seconds
are the processor's, so that a neighbour on the machine does not count. Data are read from the
folder ``SKGP_DATA_DIR``, by default ``../shared/data`` beside the repository (``NAME.npz``: X, y,
test_mask); the tests that need an absent file are skipped. The peers are those of
``examples/papers/_dlm_peers.py``.

The settings of DLM are its defaults, those of the peers were tuned on training rows held out.
RMSE and NLL (nats a row) are printed for y standardised by its training part, then in y's units.
"""

import os
import sys
import time

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from skgp.datasets import make_counts
from tests.benchmarks.data import ROOT, split_of

# Appended and not prepended: a file there must not hide a package of the same name.
sys.path.append(str(ROOT / "examples" / "papers"))

import _dlm_peers as peers  # noqa: E402
from _runs import in_fresh_process  # noqa: E402

pytestmark = pytest.mark.benchmark
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by the processes of the fits
# Starts between gpytorch's 0.69 and sqrt(d): better than either on rows held out.
SGPR = {"initial_length_scale": 2**0.5}
SVGP = {"learning_rate": 0.03}


def some_of(rows, n, seed=0):
    """The same with `n` training rows drawn at random."""
    X_train, X_test, y_train, y_test = rows
    chosen = np.random.default_rng(seed).permutation(len(X_train))[:n]
    return X_train[chosen], X_test, y_train[chosen], y_test


def fit_dlm(rows, params):
    """Fit DLMGPRegressor; seconds and scores."""
    from skgp import DLMGPRegressor

    X_train, X_test, y_train, y_test = rows
    start = time.process_time()
    model = DLMGPRegressor(random_state=0, **params).fit(X_train, y_train)
    seconds = time.process_time() - start
    mean = model.predict(X_test)
    scores = {"seconds": seconds, "beta": model.beta_, "kernel": shape_of(model.kernel_)}
    nll = -np.mean(model.log_predictive_density(X_test, y_test))
    if params.get("likelihood") == "poisson":
        return {**scores, "nll": nll, "mre": peers.mean_relative_error(y_test, mean)}
    rmse = np.sqrt(np.mean((y_test - mean) ** 2))
    return {**scores, **peers.scores_in_both_units(rmse, nll, y_train.std())}


def shape_of(kernel):
    """RBF or Matern of some nu: what kernel=None chose."""
    parameters = kernel.get_params()
    shapes = [v for v in parameters.values() if isinstance(v, RBF)]  # Matern is a subclass
    return ", ".join(f"{type(v).__name__} {getattr(v, 'nu', '')}".strip() for v in shapes)


def fit_peer(rows, name, params):
    """Fit one of gpytorch's; seconds and scores."""
    X_train, X_test, y_train, y_test = rows
    model = getattr(peers, name)(**params).fit(X_train, y_train)
    scores = peers.gaussian_scores(y_test, *model.predict(X_test), y_train.std())
    return {"seconds": model.fit_seconds_, **scores}


def dlm(rows, title="DLM", **params):
    result = in_fresh_process(fit_dlm, rows, params)
    show(title, result)
    return result


def peer(rows, name, title=None, **params):
    pytest.importorskip("gpytorch", reason="the peers are gpytorch's: pip install skgp[bench]")
    result = in_fresh_process(fit_peer, rows, name, params)
    show(title or name, result)
    return result


def show(title, result):
    if "rmse" in result:
        scores = (
            f"RMSE {result['rmse_standardised']:.4f} NLL {result['nll_standardised']:.4f}"
            f"  (y's units: {result['rmse']:.4f} {result['nll']:.4f})"
        )
    else:
        scores = f"NLL {result['nll']:.4f} MRE {result['mre']:.4f}"
    model = f"  beta {result['beta']:.3g}, {result['kernel']}" if "beta" in result else ""
    print(f"  {title:<42}{result['seconds']:>7.1f} s  {scores}{model}", flush=True)


def isotropic_kernel(d):
    """For standardised inputs."""
    start = np.sqrt(d)
    return ConstantKernel(1.0) * RBF(start, (1e-3, 1e4)) + WhiteKernel(0.1, (1e-6, 1e1))


def test_bench_log_loss_against_sgpr_and_svgp():
    """0.15 nats below the better of both, within twice SGPR's time."""
    rows = some_of(split_of("kin40k"), 10_000)
    print(f"\nkin40k, 10000 rows, M = 200, {os.environ['OMP_NUM_THREADS']} thread(s)")
    sgpr = peer(rows, "SGPR", "SGPR, 60 Adam steps", n_inducing=200, **SGPR)
    peer(rows, "SGPR", "SGPR, 60 Adam steps, float64", n_inducing=200, dtype="float64", **SGPR)
    budget = 2 * sgpr["seconds"]
    svgp = peer(rows, "SVGP", n_inducing=200, max_seconds=budget, **SVGP)
    peer(
        rows,
        "SVGP",
        "the same on the log-loss (gpytorch's own DLM)",
        n_inducing=200,
        max_seconds=budget,
        objective="predictive",
        **SVGP,
    )
    ours = dlm(rows, n_inducing=200)
    best = min(sgpr["nll_standardised"], svgp["nll_standardised"])
    gain, ratio = best - ours["nll_standardised"], ours["seconds"] / sgpr["seconds"]
    print(f"  DLM: {gain:.3f} nats below the better of SGPR and SVGP, {ratio:.2f} x SGPR's time")
    assert gain >= 0.15
    assert ratio <= 2


def test_bench_minibatches_against_svgp():
    """Below SVGP-512 in NLL and RMSE after equal time."""
    rows = split_of("kin40k")
    print(f"\nkin40k, {len(rows[0])} rows, minibatches, {os.environ['OMP_NUM_THREADS']} thread(s)")
    # In float32, as the peers.
    ours = dlm(rows, "DLM, M = 500", n_inducing=500, batch_size=1024, dtype="float32")
    budget = {"n_inducing": 512, "max_seconds": ours["seconds"]}
    svgp = peer(rows, "SVGP", "SVGP, M = 512", **budget, **SVGP)
    peer(rows, "SVGP", "the same on the log-loss", objective="predictive", **budget, **SVGP)
    assert ours["nll"] < svgp["nll"]
    assert ours["rmse"] < svgp["rmse"]


def test_bench_square_loss_against_sgpr():
    """RMSE 15% below, isotropic kernel; SGPR after 60 and after 300 steps."""
    X_train, X_test, y_train, y_test = some_of(split_of("kin40k"), 5000)
    scaler = StandardScaler().fit(X_train)
    rows = scaler.transform(X_train), scaler.transform(X_test), y_train, y_test
    print("\nkin40k, 5000 rows, M = 100, isotropic RBF")
    sgpr = [
        peer(rows, "SGPR", f"SGPR, {k} Adam steps", n_inducing=100, ard=False, n_steps=k, **SGPR)
        for k in (60, 300)
    ]
    reference = min(result["rmse"] for result in sgpr)
    common = {"n_inducing": 100, "kernel": isotropic_kernel(X_train.shape[1])}
    dlm(rows, "ELBO", objective="elbo", **common)
    dlm(rows, "log-loss DLM", objective="log_loss", **common)
    square = dlm(rows, "square-loss DLM", objective="square_loss", **common)
    tuned = dlm(
        rows, "square-loss DLM, beta chosen", objective="square_loss", beta="auto", **common
    )
    for title, result in (("beta = 1", square), ("beta chosen", tuned)):
        print(f"  square-loss DLM, {title}: RMSE {1 - result['rmse'] / reference:.1%} below SGPR")
    assert min(square["rmse"], tuned["rmse"]) <= 0.85 * reference


@pytest.mark.parametrize("n", [500, 2000])
def test_bench_overdispersed_counts_against_the_elbo(n):
    """NLL 0.1 below."""
    X, y = make_counts(n + 20_000, 2, random_state=0)
    rows = X[:n], X[n:], y[:n], y[n:]
    print(f"\noverdispersed counts, {n} rows, 20000 test rows")
    common = {"likelihood": "poisson"}
    elbo = dlm(rows, "ELBO", objective="elbo", **common)
    dlm(rows, "ELBO, beta chosen", objective="elbo", beta="auto", **common)
    ours = dlm(rows, "DLM", **common)
    dlm(rows, "DLM, beta chosen", beta="auto", **common)
    print(f"  DLM: {elbo['nll'] - ours['nll']:.3f} nats below the ELBO")
    assert elbo["nll"] - ours["nll"] >= 0.1


def test_bench_abalone_counts():
    """Reported beside PoissonRegressor and HistGradientBoostingRegressor, nothing asserted."""
    X_train, X_test, y_train, y_test = split_of("abalone")
    print(f"\nabalone, counts, {len(y_train)} rows")
    for name, model in peers.count_regressors().items():
        start = time.process_time()
        mean = model.fit(X_train, y_train).predict(X_test)
        seconds = time.process_time() - start
        show(name, {"seconds": seconds, **peers.poisson_scores(y_test, mean)})
    rows = X_train, X_test, y_train, y_test
    for objective in ("elbo", "log_loss"):
        for beta in (1.0, "auto"):
            title = f"DLMGPRegressor, {objective}, beta={beta!r}"
            dlm(rows, title, likelihood="poisson", objective=objective, beta=beta)


@pytest.mark.parametrize("objective", ["log_loss", "square_loss", "elbo"])
@pytest.mark.parametrize("likelihood", ["gaussian", "poisson"])
def test_bench_cost_of_choosing_beta(objective, likelihood):
    """At most four single fits."""
    if likelihood == "gaussian":
        rows = some_of(split_of("kin40k"), 5000)
    elif objective == "square_loss":
        pytest.skip("counts have no square loss")
    else:
        X, y = make_counts(4000, 2, random_state=0)
        rows = X[:2000], X[2000:], y[:2000], y[2000:]
    print(f"\n{objective}, {likelihood}, {len(rows[0])} rows, M = 100")
    common = {"likelihood": likelihood, "objective": objective, "n_inducing": 100}
    one = dlm(rows, "beta=1", **common)
    path = dlm(rows, 'beta="auto"', beta="auto", **common)
    ratio = path["seconds"] / one["seconds"]
    print(f"  choosing beta costs {ratio:.2f} fits")
    assert ratio <= 4


def test_bench_grid_search_agrees_with_beta_auto():
    """Within one step of the grid, two processes."""
    from skgp import DLMGPRegressor
    from skgp.estimators._predictive import log_predictive_density_scorer

    X_train, _, y_train, _ = some_of(split_of("kin40k"), 2000)
    betas = [0.0625, 0.25, 1.0, 4.0]
    grid = {"dlmgpregressor__beta": betas, "dlmgpregressor__n_inducing": [50, 100]}
    search = GridSearchCV(
        make_pipeline(StandardScaler(), DLMGPRegressor(random_state=0)),
        grid,
        scoring=log_predictive_density_scorer,
        cv=3,
        n_jobs=2,
    )
    start = time.perf_counter()  # the fits run in other processes
    search.fit(X_train, y_train)
    seconds = time.perf_counter() - start
    best = search.best_params_
    model = DLMGPRegressor(
        n_inducing=best["dlmgpregressor__n_inducing"], beta="auto", random_state=0
    ).fit(X_train, y_train)
    print(f"\nGridSearchCV, 24 fits and one: {seconds:.0f} s, {best}; beta_ {model.beta_:.3g}")
    nearest = np.abs(np.log(np.divide(betas, model.beta_))).argmin()
    assert abs(nearest - betas.index(best["dlmgpregressor__beta"])) <= 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["DLMGPRegressor", "DLMGPClassifier"])
def test_bench_fits_of_the_checks(name, monkeypatch):
    """Median below 0.1 s; the slowest, 300 rows of three classes, are printed."""
    import skgp

    estimator = getattr(skgp, name)
    seconds = {}
    fit = estimator.fit

    def timed(self, X, y, *args, **options):
        start = time.process_time()
        fitted = fit(self, X, y, *args, **options)
        spent = time.process_time() - start
        shape = *np.asarray(X).shape, len(getattr(fitted, "classes_", ()))
        seconds.setdefault(shape, []).append(spent)
        return fitted

    X = np.random.default_rng(0).standard_normal((30, 2))
    for n_inducing in (10, 30):  # the first fits of a process load libraries
        estimator(n_inducing=n_inducing).fit(X, np.arange(30) % 3)
    monkeypatch.setattr(estimator, "fit", timed)
    check_estimator(estimator(), on_skip=None)
    every = np.concatenate(list(seconds.values()))
    print(f"\n{name}: {len(every)} fits of the checks, median {np.median(every):.3f} s, ", end="")
    print(f"{np.mean(every < 0.1):.0%} below 0.1 s, slowest {every.max():.3f} s")
    for shape, times in sorted(seconds.items(), key=lambda item: -max(item[1]))[:6]:
        print(f"  {shape[0]} x {shape[1]}, {shape[2] or 'no'} classes: {max(times):.3f} s")
    assert np.median(every) < 0.1
