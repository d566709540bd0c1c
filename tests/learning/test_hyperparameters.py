"""Hyper-parameters of regression: gross errors, relevance vectors, targets or their logarithms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Matern,
    WhiteKernel,
)

from skgp.data import Data
from skgp.learning import defaults, hyperparameters
from skgp.learning.hyperparameters import (
    learn_hyperparameters,
    left_out,
    logs_predict_better,
    robust_hyperparameters,
    robust_location_scale,
)
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.learning.selection import held_out_densities
from tests.inference.weights.test_robust import _surface
from tests.reference import gaussian

NOISY = ConstantKernel(1.0, (1e-3, 1e3)) * RBF([3.0, 3.0]) + WhiteKernel(0.1, (1e-5, 10.0))
SHORT = SearchSettings(subset_size=150, dense_max_iter=30, n_neighbors=24, n_steps=20)


def test_robust_hyperparameters_are_those_of_clean_data(rng):
    X, y, f = _surface(rng, 300, share_wrong=0.06)
    clean = Data(X, f + 0.1 * torch.tensor(rng.standard_normal(300)))

    def generator():
        return torch.Generator().manual_seed(1)

    best = fit_hyperparameters([NOISY], clean, generator=generator(), settings=SHORT).kernel
    misled = fit_hyperparameters([NOISY], Data(X, y), generator=generator(), settings=SHORT).kernel
    robust, scale = robust_hyperparameters(
        [NOISY], Data(X, y), generator=generator(), settings=SHORT
    )
    assert robust.kernel.k2.noise_level == pytest.approx(best.k2.noise_level, rel=0.5)
    assert misled.k2.noise_level > 20 * best.k2.noise_level
    np.testing.assert_allclose(robust.kernel.theta[1:3], best.theta[1:3], atol=0.5)
    assert 0.1 < scale < 1.5  # 6% of errors of 8.5 on average, and noise of .1


def test_robust_location_scale_are_those_of_the_clean_rows(rng):
    y = 4.0 + 2.0 * torch.tensor(rng.standard_normal(500))
    expected = (float(y.mean()), float(y.std(correction=0)))
    assert robust_location_scale(y) == pytest.approx(expected, rel=1e-12)
    y[:150] += 100.0
    clean = y[150:]
    expected = (float(clean.mean()), float(clean.std(correction=0)))
    for unit in (1e-12, 1.0, 1e12):
        found = robust_location_scale(unit * y)
        assert found == pytest.approx([unit * value for value in expected], rel=1e-12)
    for value in (0.0, 0.1):
        assert robust_location_scale(torch.full_like(y, value)) == (pytest.approx(value), 1.0)
    y[:300] = 7.0  # as counts of zero, or a sensor at its limit
    others = (y[300:] - 7.0).abs().sort().values
    assert robust_location_scale(y) == pytest.approx((7.0, float(others[99])))


def test_robust_hyperparameters_of_clean_data_change_little(rng):
    X, y, _ = _surface(rng, 300)
    generator = torch.Generator().manual_seed(1)
    fit, scale = robust_hyperparameters([NOISY], Data(X, y), generator=generator, settings=SHORT)
    assert fit.kernel.k2.noise_level == pytest.approx(0.01, rel=0.4)
    assert scale == pytest.approx(0.1 * math.sqrt(2 / math.pi), rel=0.4)


@pytest.mark.parametrize("constant", [True, False])
def test_robust_hyperparameters_survive_constant_targets_and_duplicates(rng, constant):
    X, y, _ = _surface(rng, 60)
    data = Data(X[:20].repeat(3, 1), torch.zeros_like(y) if constant else y)
    generator = torch.Generator().manual_seed(1)
    fit, scale = robust_hyperparameters([NOISY], data, generator=generator, settings=SHORT)
    assert np.isfinite(fit.kernel.theta).all() and math.isfinite(scale)


SETTINGS = dict(n_steps=8, n_score_rows=64, n_compared=24, subset_size=100, exact_rows=400)


def _rough_surface(n, d, rng):
    """Draws of a rough process, dense in clusters with gaps between: X (n, d), y."""
    centres = rng.uniform(0, 6, (12, d))
    X = centres[rng.integers(12, size=n)] + 0.3 * rng.standard_normal((n, d))
    waves = rng.standard_normal((d, 80)) * 4 ** rng.uniform(-1, 2, 80)
    y = np.cos(X @ waves + rng.uniform(0, 6, 80)).sum(1) / 80**0.5
    return Data(torch.tensor(X), torch.tensor(y + 0.05 * rng.standard_normal(n)))


def _learned(data, monkeypatch, losses=None, kernel=None, **constants):
    """The kernel of a search whose two candidates have these losses; and how many there were."""
    seen = []

    def judged(kernel, data, rows, outside, n_neighbors):
        seen.append(kernel)
        found = held_out_densities(kernel, data, rows, outside, n_neighbors)
        return found if losses is None else torch.full_like(found, -losses[len(seen) - 1])

    monkeypatch.setattr(defaults, "GLOBAL_SEARCH", SETTINGS)
    monkeypatch.setattr(hyperparameters, "held_out_densities", judged)
    for name, value in constants.items():
        monkeypatch.setattr(defaults if name.isupper() else hyperparameters, name, value)
    kernel = kernel or ConstantKernel() * Matern(1.0, nu=0.5) + WhiteKernel(0.1, (1e-5, 10.0))
    found, _ = learn_hyperparameters(
        [kernel],
        data,
        data,
        robust=False,
        relevance=False,
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, info: False,
    )
    return found.kernel, seen


@pytest.mark.parametrize("best", [0, 1])
def test_joint_likelihood_is_a_candidate_that_held_out_observations_judge(best, rng, monkeypatch):
    data = _rough_surface(450, 2, rng)
    losses = [1.0, 0.0] if best else [0.0, 1.0]
    rival = HyperparameterFit(2.0**2 * Matern(3.0, nu=0.5) + WhiteKernel(0.2))
    joint = dict(fit_joint_likelihood=lambda *args, **options: rival)
    kernel, seen = _learned(data, monkeypatch, losses, **joint)
    assert len(seen) == 2 and seen[1] == rival.kernel != seen[0]
    assert kernel == seen[best]


def test_joint_likelihood_is_asked_in_few_columns_or_of_many_observations(rng, monkeypatch):
    data = _rough_surface(450, 4, rng)
    monkeypatch.setitem(SETTINGS, "n_steps", 2)
    assert not _learned(data, monkeypatch)[1]
    kernel, seen = _learned(data, monkeypatch, JOINT_ROWS=400)
    assert len(seen) == 3 and kernel in seen


def test_joint_search_in_many_columns_begins_at_the_kernel_of_neighbours_too(rng, monkeypatch):
    """And goes on among all families from where that ends."""
    starts, rival = [], HyperparameterFit(2.0**2 * Matern(3.0, nu=0.5) + WhiteKernel(0.2))

    def joint(kernels, data, settings, *, start=None, known=None, **options):
        starts.append((start, known))
        return rival

    for d in (2, 4):
        asked = dict(JOINT_ROWS=400, fit_joint_likelihood=joint)
        _, seen = _learned(_rough_surface(450, d, rng), monkeypatch, [0.0, 1.0, 1.0], **asked)
    assert starts == [(None, None), (seen[0], None), (None, rival.kernel)]


@pytest.mark.parametrize(
    "signal",
    [ConstantKernel(), RBF([1.0, 3.0]) + Matern([3.0, 1.0]), ConstantKernel() * DotProduct()],
    ids=str,
)
def test_kernels_without_one_distance_have_no_joint_candidate(signal, rng, monkeypatch):
    data = _rough_surface(450, 2, rng)
    monkeypatch.setattr(hyperparameters, "fit_joint_likelihood", None)
    assert not _learned(data, monkeypatch, kernel=signal + WhiteKernel(0.1))[1]


# ---- targets or their logarithms -----------------------------------------------------------------


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
