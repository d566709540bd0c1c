"""QSGPRegressor: the contracts of every regressor, and what is its own."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel

from skgp import QSGPClassifier, QSGPRegressor
from skgp.estimators import _qsgp_fitting
from skgp.learning import defaults
from skgp.learning.search import HyperparameterFit
from skgp.learning.selection import held_out_rows
from tests.contracts.estimators import RegressorContract
from tests.same import assert_same

#: Every (basis, n_basis, solver, covariance) there is; n_basis=None is one function a row.
COMBINATIONS = [
    ("inducing", None, "cholesky", "full"),
    ("inducing", None, "cholesky", "chevron"),
    ("inducing", None, "cholesky", "diagonal"),
    ("inducing", None, "cholesky", "samples"),
    ("inducing", None, "cg", "samples"),
    ("inducing", None, "cg", "diagonal"),
    ("inducing", None, "sgd", "diagonal"),
    *[
        (basis, 30, solver, covariance)
        for basis in ("fourier", "inducing")
        for solver, covariances in {
            "cholesky": ("full", "chevron", "diagonal", "samples"),
            "cg": ("samples",),
            "gauss-seidel": ("samples",),
            "sgd": ("diagonal" if basis == "fourier" else "chevron",),
        }.items()
        for covariance in covariances
    ],
]
#: One of each solver with each basis it serves.
SOLVERS = [
    dict(basis=basis, n_basis=n_basis, solver=solver)
    for basis, n_basis, solver, _ in dict.fromkeys((*c[:3], None) for c in COMBINATIONS)
]


def name(options):
    return "-".join(str(value) for value in options.values())


def kernel(n_columns=2):
    """A kernel that suits `data`, in units of the standardised target."""
    return ConstantKernel(1.0) * RBF([1.5] * n_columns) + WhiteKernel(0.05)


def make(**params):
    """An estimator with hyper-parameters kept, and small batches for "sgd"."""
    defaults = dict(kernel=kernel(), optimizer=None, random_state=0)
    if params.get("covariance") == "chevron":
        defaults["n_dense_columns"] = 5
    if params.get("solver") == "sgd":
        defaults.update(max_iter=60, n_support=30, basis_batch_size=20, batch_size=30)
    return QSGPRegressor(**{**defaults, **params})


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    return X, 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(60))


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-3, 3, (7, 2))


class TestContract(RegressorContract):
    offers_state = False  # a posterior exists only when the solver has ended

    def make(self, **params):
        return QSGPRegressor(**{"random_state": 0, **params})


# ---- every combination -----------------------------------------------------------------------


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(map(str, c)))
def test_combination_fits_predicts_and_pickles(combination, data, X_new):
    basis, n_basis, solver, covariance = combination
    estimator = make(basis=basis, n_basis=n_basis, solver=solver, covariance=covariance)
    estimator.fit(*data)
    used = estimator.basis_, estimator.n_basis_, estimator.solver_, estimator.covariance_
    assert used == (basis, n_basis or 60, solver, covariance)
    mean, std = estimator.predict(X_new, return_std=True)
    assert estimator.score(*data) > (0.8 if solver == "sgd" else 0.9)
    assert (std**2 >= estimator.noise_variance_).all() and estimator.noise_variance_ > 0
    joint = estimator.predict(X_new, return_cov=True)[1]
    np.testing.assert_allclose(joint.diagonal(), std**2, rtol=1e-8)
    copied = pickle.loads(pickle.dumps(estimator)).predict(X_new, return_std=True)
    assert_same(copied, (mean, std))


@pytest.mark.parametrize("options", [o for o in SOLVERS if o["n_basis"]], ids=name)
def test_solver_in_float32_is_near_float64(options, data, X_new):
    X, y = data
    expected = make(**options).fit(X, y).predict(X_new, return_std=True)
    found = make(dtype="float32", **options).fit(X, y).predict(X_new, return_std=True)
    assert found[0].dtype == found[1].dtype == np.float64
    # The roundings of many small steps add up; the matrix of "cg" is in float32 either way.
    np.testing.assert_allclose(found, expected, rtol=1e-2 if options["solver"] == "sgd" else 1e-4)


# ---- streams and weights ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("basis", "weighted", "normalize_y"),
    [("fourier", True, True), ("fourier", False, False), ("inducing", True, False)],
)
def test_partial_fit_in_batches_equals_fit_of_all_rows(basis, weighted, normalize_y, data, X_new):
    X, y = data
    if not normalize_y:
        y = (y - 30) / 4
    weights = np.linspace(0.5, 3, 60) if weighted else np.ones(60)
    # The inducing points are among the rows of the first call: let both fits see the same ones.
    first = 40
    estimator = make(basis=basis, n_basis=30, solver="cholesky", normalize_y=normalize_y)
    batches = clone(estimator)
    for rows in (slice(0, first), slice(first, 41), slice(41, 60)):
        batches.partial_fit(X[rows], y[rows], weights[rows] if weighted else None)
    if basis == "fourier":
        whole = clone(estimator).fit(X, y, weights if weighted else None)
    else:
        whole = clone(estimator).partial_fit(X[:first], y[:first], weights[:first])
        whole.partial_fit(X[first:], y[first:], weights[first:])
    np.testing.assert_allclose(
        batches.predict(X_new, return_std=True), whole.predict(X_new, return_std=True), rtol=1e-8
    )
    assert batches.y_mean_ == pytest.approx(whole.y_mean_, rel=1e-10)
    assert batches.log_marginal_likelihood_value_ == pytest.approx(
        whole.log_marginal_likelihood_value_, rel=1e-8
    )


def test_partial_fit_learns_the_noise_from_all_rows():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (900, 1))
    noise = np.where(np.arange(900) < 300, 0.1, 0.5)  # the first rows are the least noisy
    y = np.sin(2 * X[:, 0]) + noise * rng.standard_normal(900)
    estimator = QSGPRegressor(1.0 * RBF(1.0) + WhiteKernel(0.1), n_basis=40, random_state=0)
    first = estimator.partial_fit(X[:300], y[:300]).noise_variance_
    for rows in (slice(300, 600), slice(600, 900)):
        estimator.partial_fit(X[rows], y[rows])
    assert first == pytest.approx(0.01, rel=0.3)
    assert estimator.noise_variance_ == pytest.approx((noise**2).mean(), rel=0.15)


def test_evidence_of_repeated_rows_is_that_of_scikit_learn(data):
    X, y = data
    X, y = np.repeat(X, 2, axis=0), np.concatenate([y, y[::-1]])
    z = (y - y.mean()) / y.std()
    expected = GaussianProcessRegressor(kernel(), optimizer=None).fit(X, z)
    found = make().fit(X, y).log_marginal_likelihood_value_
    assert found == pytest.approx(expected.log_marginal_likelihood_value_, rel=1e-8)


# ---- watching, stopping, going on -------------------------------------------------------------


def test_scoring_monitor_follows_sgd(data):
    monitor = pytest.importorskip("sklearn.callback").ScoringMonitor(scoring="r2")
    estimator = make(solver="sgd", n_basis=30, max_iter=20).set_callbacks(monitor).fit(*data)
    log = monitor.get_logs().data
    scores = [row["r2"] for row in log if row["task_name"] == "iteration"]
    assert len(scores) == 20 and scores[0] < scores[-1]
    assert scores[-1] == pytest.approx(estimator.score(*data))


def test_warm_start_of_sgd_goes_on_from_the_weights(data):
    options = {"n_basis": 30, "random_state": np.random.RandomState(0), "optimizer": "auto"}
    estimator = make(solver="sgd", warm_start=True, **options).fit(*data)
    losses = estimator.history_["solve"]
    estimator.fit(*data)
    assert estimator.n_iter_ == 120
    # The first loss is where the last fit ended, within what an iteration moves it.
    assert estimator.history_["solve"][0] - losses[-1] < 0.05 * (losses[0] - losses[-1])
    assert estimator.score(*data) > 0.9


def test_warm_start_of_another_size_starts_anew(data):
    estimator = make(solver="sgd", n_basis=30, warm_start=True, max_iter=8).fit(*data)
    estimator.set_params(n_basis=40).fit(*data)
    assert estimator.n_iter_ == 8 and estimator.n_basis_ == 40
    estimator.set_params(basis="inducing").fit(*data)
    assert estimator.n_iter_ == 8
    estimator.set_params(dtype="float32").fit(*data)
    assert estimator.n_iter_ == 8


def test_early_stopping_ends_sgd_when_held_out_rows_no_longer_gain():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (300, 2))
    y = np.sin(X[:, 0]) + rng.standard_normal(300)
    options = dict(solver="sgd", n_basis=60, max_iter=3000, learning_rate=0.3)
    stopped = make(early_stopping=True, **options).fit(X, y)
    errors = stopped.history_["validation"]
    assert stopped.n_iter_ < 1500 and stopped.n_iter_ == 50 * len(errors)
    assert np.argmin(errors) < len(errors) - 1
    assert not make(max_iter=50, solver="sgd").fit(X, y).history_["validation"]


def test_early_stopping_trains_on_the_other_rows_only(data, X_new):
    # Same seed, same rows held out, whose targets alone are changed, and not their order, by which
    # rows are stratified: the fit is the same.
    X, y = (np.array(a) for a in data)
    options = dict(solver="sgd", n_basis=30, early_stopping=True, normalize_y=False)
    fit = make(**options).fit(X, y)
    held_out = held_out_rows(y, 6, torch.Generator().manual_seed(seed_of(fit)))
    rising = np.sort(y)
    above = np.append(rising, rising[-1] + 100)[np.searchsorted(rising, y) + 1]
    y[held_out] = (0.1 * y + 0.9 * above)[held_out]
    assert_same(make(**options).fit(X, y).predict(X_new), fit.predict(X_new))
    y[~held_out] += 100
    assert not np.allclose(make(**options).fit(X, y).predict(X_new), fit.predict(X_new))


def seed_of(estimator):
    return estimator._resolve_backend().seed


def test_no_control_variate_is_a_choice(data):
    assert make(solver="sgd", n_basis=30, n_support=0, max_iter=300).fit(*data).score(*data) > 0.9


# ---- bad and awkward input --------------------------------------------------------------------


@pytest.mark.parametrize("options", SOLVERS, ids=name)
def test_awkward_data_has_a_finite_answer(options, data, X_new):
    X, y = data
    cases = {
        "constant y": (X, np.full(60, 0.1), X_new),
        "constant column": (np.column_stack([X[:, 0], np.full(60, 1e4)]), y, X_new),
        "duplicated rows": (np.repeat(X[:30], 2, axis=0), y, X_new),
    }
    if options["n_basis"] is None or options["basis"] == "fourier":
        cases["one row"] = (X[:1], y[:1], X_new)
    if options["solver"] == "sgd":
        options = {**options, "max_iter": 10}
    for case, (X_case, y_case, X_test) in cases.items():
        if case == "duplicated rows" and options["n_basis"] == 30:
            options = {**options, "n_basis": 20}  # of 30 distinct rows
        estimator = make(**options).fit(X_case, y_case)
        mean, std = estimator.predict(X_test, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all(), case
        assert (std > 0).all(), case
        assert np.isfinite(estimator.log_predictive_density(X_case, y_case)).all(), case
        if case == "constant y":
            np.testing.assert_allclose(mean, 0.1, rtol=1e-12)


def test_kernel_without_spectral_density_takes_inducing_points(data):
    linear = DotProduct() + WhiteKernel(0.1)
    for solver in ("auto", "cg", "sgd"):
        assert make(kernel=linear, solver=solver).fit(*data).basis_ == "inducing"
    with pytest.raises(ValueError, match=r'DotProduct\(sigma_0=1\) has no .* basis "inducing"'):
        make(kernel=linear, basis="fourier").fit(*data)


def test_sgd_scales_its_variances_by_observations_held_out_of_many():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(4000, 1))
    y = np.sin(3 * X[:, 0]) + 0.3 * rng.normal(size=len(X))
    kernel = 1.0 * RBF(0.5) + WhiteKernel(1e-3)  # overconfident
    options = dict(solver="sgd", n_basis=100, max_iter=60, optimizer=None, random_state=0)
    fit = QSGPRegressor(kernel, basis="fourier", **options).fit(X[:3200], y[:3200])
    mean, std = fit.predict(X[3200:], return_std=True)
    assert fit.calibration_ > 10
    assert 0.8 < np.mean(((y[3200:] - mean) / std) ** 2) < 1.25
    few = QSGPRegressor(kernel, basis="fourier", **options).fit(X[:900], y[:900])
    assert few.calibration_ == 1


def test_sgd_refuses_weights(data):
    with pytest.raises(ValueError, match="sample_weight .* solver='sgd'; use solver='cholesky'"):
        make(solver="sgd").fit(*data, sample_weight=np.ones(60))


@pytest.mark.parametrize("estimator", [QSGPRegressor, QSGPClassifier])
def test_partial_fit_says_that_it_begins_anew_after_fit(estimator, data):
    X, y = data[0][:40], data[1][:40]
    if estimator is QSGPClassifier:
        y = y > np.median(y)
    model = estimator(RBF(), optimizer=None, basis="fourier", n_basis=16, random_state=0).fit(X, y)
    with pytest.warns(UserWarning, match="partial_fit begins anew"):
        model.partial_fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.partial_fit(X, y)


def test_partial_fit_refuses_what_it_cannot_stream(data):
    with pytest.raises(ValueError, match="partial_fit needs solver='cholesky'; got solver='cg'"):
        make(solver="cg").partial_fit(*data)
    with pytest.raises(ValueError, match="n_basis=60 for 60 rows. Give a smaller n_basis"):
        make(basis="inducing", n_basis=60).partial_fit(*data)


@pytest.mark.parametrize(("mean", "scale"), [(1e4, 1e-4), (1e7, 0.67), (-1e9, 1.0), (0.0, 1e-9)])
def test_partial_fit_keeps_the_digits_of_targets_far_from_zero(mean, scale, data):
    X, z = data
    y = mean + scale * z
    estimator = make(basis="inducing", n_basis=20, solver="cholesky")
    whole = clone(estimator).partial_fit(X, y)
    parts = clone(estimator).partial_fit(X, y)  # the rest twice
    for rows in (slice(0, 5), slice(5, None)):
        parts.partial_fit(X[rows], y[rows])
    assert parts.y_scale_ == pytest.approx(np.std(y), rel=1e-6)
    assert parts.y_mean_ == pytest.approx(np.mean(y), rel=1e-12)
    std, expected = (each.predict(X, return_std=True)[1] for each in (parts, whole))
    assert (std < 1.2 * expected).all() and (std > 0.5 * expected).all()


@pytest.mark.parametrize("value", [0.0, 0.1, 1e9])
def test_partial_fit_does_not_scale_constant_targets(value, data):
    X, y = data[0], np.full(len(data[0]), value)
    model = make(basis="inducing", n_basis=5, solver="cholesky").partial_fit(X, y)
    model.partial_fit(X[:7], y[:7])
    assert model.y_scale_ == 1.0
    np.testing.assert_allclose(model.predict(X), value, rtol=1e-9, atol=1e-9)


def test_a_kernel_too_smooth_for_all_observations_gives_way_to_that_of_a_subset(data, monkeypatch):
    X, y = data
    smooth, likely = (1.0 * RBF(length) + WhiteKernel(0.1) for length in (50.0, 2.0))
    found = HyperparameterFit(smooth, of_evidence=likely)
    monkeypatch.setattr(_qsgp_fitting, "learn_hyperparameters", lambda *_, **__: (found, None))
    monkeypatch.setattr(defaults, "FACTOR_ROWS", 50)
    model = QSGPRegressor(random_state=0).fit(X, y)
    assert "numerical rank" in model.reason_
    assert model.kernel_.k1.k2.length_scale == 2.0


def test_a_partial_fit_that_fails_leaves_the_statistics(data, monkeypatch):
    model = make(basis="inducing", n_basis=20, solver="cholesky").partial_fit(*data)
    before = model.predict(data[0])
    monkeypatch.setattr(model, "_fitted_attributes", None)  # fails after the sums were made

    with pytest.raises(TypeError):
        model.partial_fit(*data)
    monkeypatch.undo()
    assert model._statistics.n_rows == len(data[1])
    np.testing.assert_array_equal(model.predict(data[0]), before)


@pytest.mark.slow
def test_intervals_of_ten_rows_know_that_their_variance_is_estimated():
    """Mean probability that intervals of 95% hold a new observation, over draws from a prior."""
    held = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        X = rng.uniform(-2, 2, (60, 1))
        f = np.linalg.cholesky(RBF(1.0)(X) + 1e-9 * np.eye(60)) @ rng.standard_normal(60)
        y = f + 0.3 * rng.standard_normal(60)
        low, high = QSGPRegressor(random_state=0).fit(X[:10], y[:10]).predict_interval(X[10:])
        held.append(np.diff(norm.cdf([low, high], f[10:], 0.3), axis=0).mean())
    assert np.mean(held) > 0.905  # .88 of the variance that fits best
