"""The joint likelihood of a Vecchia approximation as an objective, and its search."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal, norm
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import Data, merge_replicates
from skgp.inference.pathwise import greedy_variance
from skgp.learning.search import fit_hyperparameters
from skgp.learning.selection import held_out_densities, rows_in_blocks
from skgp.learning.vecchia import (
    VecchiaEvidence,
    VecchiaSettings,
    _Search,
    _Trial,
    approximation,
    choose_inducing,
    fit_joint_likelihood,
    neighbors_of,
)
from skgp.optim.stopping import LossRecorder
from tests.reference import vecchia
from tests.reference.gaussian import left_out

KERNEL = 1.3 * Matern([0.4, 0.7], nu=1.5) + WhiteKernel(0.2)


def repeated(n=25, seed=0):
    """Rows that come once, twice or three times: all of them, and merged."""
    rng = np.random.default_rng(seed)
    X = np.repeat(rng.random((n, 2)), 1 + np.arange(n) % 3, axis=0)
    y = rng.normal(size=len(X))
    return X, y, merge_replicates(X, y, None, torch.device("cpu"))


def evidence(data, H, m, rows=None):
    Z = data.X[:m]
    rows = torch.arange(len(data)) if rows is None else rows
    return VecchiaEvidence(KERNEL, data, rows, neighbors_of(KERNEL.k1, data.X, H, Z, rows), Z)


def drawn(n, kernel, seed=0, d=2):
    """n observations of a draw; `kernel` with noise."""
    rng = np.random.default_rng(seed)
    X = rng.random((n, d))
    y = np.linalg.cholesky(kernel(X) + 1e-10 * np.eye(n)) @ rng.standard_normal(n)
    return Data(torch.tensor(X), torch.tensor(y))


@pytest.mark.parametrize("m", [0, 6])
def test_merged_replicates_have_the_density_of_all_rows(m):
    X, y, data = repeated()
    found = evidence(data, len(data) - 1, m).value(KERNEL.theta)
    expected = vecchia.log_density(KERNEL.k1(X) + 0.2 * np.eye(len(X)), y[:, None])
    np.testing.assert_allclose(-len(X) * found, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("H", "m", "step"), [(4, 0, 1), (4, 6, 1), (4, 0, 3), (4, 6, 3), (0, 6, 1)]
)
def test_gradient_is_that_of_the_value(H, m, step):
    data = repeated()[2]
    objective = evidence(data, H, m, torch.arange(0, len(data), step))
    value, gradient = objective(KERNEL.theta)
    assert value == pytest.approx(objective.value(KERNEL.theta), abs=1e-12)
    for i, s in enumerate(1e-5 * np.eye(len(gradient))):
        ends = [objective.value(KERNEL.theta + t) for t in (s, -s)]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-5, atol=1e-8)


def test_several_targets_add_up():
    X, y, _ = repeated()
    Y = np.stack([y, y[::-1]], 1)
    merged = [merge_replicates(X, each, None, torch.device("cpu")) for each in (Y, *Y.T)]
    whole, *each = (evidence(data, 4, 6)(KERNEL.theta) for data in merged)
    assert 2 * whole[0] == pytest.approx(each[0][0] + each[1][0], abs=1e-12)  # in nats a number
    np.testing.assert_allclose(2 * whole[1], each[0][1] + each[1][1], atol=1e-12)


def test_inducing_points_are_chosen_greedily():
    data, generator = drawn(50, KERNEL), torch.Generator().manual_seed(0)
    Z = choose_inducing(KERNEL.k1, data.X, 7, generator)
    assert torch.equal(Z, data.X[greedy_variance(KERNEL.k1, data.X, 7)])
    assert len(choose_inducing(KERNEL.k1, data.X, 0, generator)) == 0
    assert len(choose_inducing(KERNEL.k1, data.X, 100, generator)) == 50


@pytest.mark.slow
def test_search_of_many_rows_finds_the_hyperparameters():
    truth = 1.0 * Matern([0.2, 0.5], nu=1.5) + WhiteKernel(0.05)
    data = drawn(2600, truth)
    start = 1.0 * Matern([1.0, 1.0], nu=1.5) + WhiteKernel(0.5)
    heard = []
    found = fit_joint_likelihood(
        [start],
        data,
        VecchiaSettings(n_neighbors=12, n_stages=2),
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, info: heard.append(info["loss"]),
    )
    assert found.method == "joint likelihood"
    np.testing.assert_allclose(found.kernel.theta[1:], truth.theta[1:], atol=0.25)
    assert len(heard) >= len(found.history) > 5
    full = evidence_of(found.kernel, data)
    assert full < evidence_of(truth, data) < evidence_of(start, data)
    told = {"generator": torch.Generator().manual_seed(0), "start": truth}
    assert fit_joint_likelihood([start], data, VecchiaSettings(n_stages=0), **told).kernel == truth


def evidence_of(kernel, data):
    index = neighbors_of(kernel.k1, data.X, 12, data.X[:0])
    rows = torch.arange(len(data))
    return VecchiaEvidence(kernel, data, rows, index, data.X[:0]).value(kernel.theta)


def test_search_of_few_rows_is_by_the_exact_evidence():
    data = drawn(80, KERNEL)
    kernels = [1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1), KERNEL]
    settings = VecchiaSettings(n_neighbors=3)
    seeds = [torch.Generator().manual_seed(0) for _ in range(2)]
    found = fit_joint_likelihood(kernels, data, settings, generator=seeds[0])
    assert found.kernel == fit_hyperparameters(kernels, data, generator=seeds[1]).kernel


def far_and_near():
    """A search of 1000 observations, and trials of two families: one far from fine detail."""
    X = np.random.default_rng(0).random((1000, 2))
    data = Data(torch.tensor(X), torch.tensor(np.sin(40 * X).sum(1)))
    search = _Search(data, VecchiaSettings(n_neighbors=12), torch.Generator().manual_seed(0), None)
    far = 1.0 * Matern([3.0, 3.0], nu=2.5) + WhiteKernel(0.5)
    near = 1.0 * Matern([0.1, 0.1], nu=1.5) + WhiteKernel(1e-4)
    losses = (search.evidence(k, search.settings).value(k.theta) for k in (far, near))
    return search, *map(_Trial, (far, near), losses)


def test_families_of_many_observations_go_on_from_the_likeliest():
    search, far, near = far_and_near()
    moved = search._nearer(far, near, search.settings)
    assert moved.k1.k2.nu == 2.5 and np.array_equal(moved.theta, near.kernel.theta)
    assert search._nearer(near, far, search.settings) is near.kernel
    fewer = _Trial(1.0 * Matern(0.05, nu=1.5) + WhiteKernel(1e-4), -10.0)  # one length scale
    assert search._nearer(far, fewer, search.settings) is far.kernel


@pytest.mark.parametrize(("many", "gain", "rounds"), [(999, 1.0, 2), (999, 0.01, 1), (1000, 1, 0)])
def test_families_compete_in_rounds_while_the_likeliest_gains(many, gain, rounds, monkeypatch):
    search, far, near = far_and_near()
    climbed = []

    def climb(kernel, settings, *, from_starts=False):
        climbed.append(kernel)
        return _Trial(kernel, -gain * ((len(climbed) - 1) // 3))

    monkeypatch.setattr("skgp.learning.defaults.JOINT_ROWS", many)
    monkeypatch.setattr("skgp.learning.defaults.VECCHIA_START_ROWS", 60)
    monkeypatch.setattr(search, "climb", climb)
    monkeypatch.setattr(search, "best", lambda trials: trials)
    found = search.best_family([far.kernel, near.kernel], far.kernel)
    assert len(found) == 3 and len(climbed) == 3 * (1 + rounds)


def test_rounds_of_families_end_with_a_stopped_search(monkeypatch):
    search, far, near = far_and_near()
    monkeypatch.setattr("skgp.learning.defaults.JOINT_ROWS", 999)
    search.recorder = LossRecorder(lambda step, info: True)
    asked, evidence = [], search.evidence
    monkeypatch.setattr(search, "evidence", lambda *of: asked.append(of) or evidence(*of))
    search.best_family([far.kernel, near.kernel], None)
    assert search.recorder.stopped and not asked


def test_search_stops_when_told():
    X = torch.rand(2600, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = Data(X, X.sum(1))
    found = fit_joint_likelihood(
        [KERNEL],
        data,
        VecchiaSettings(n_neighbors=3),
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, info: step == 4,
    )
    assert np.isfinite(found.kernel.theta).all()
    assert len(found.history) < 4


def test_rows_in_blocks_lie_in_blocks():
    data = drawn(1500, KERNEL)
    rows, outside = rows_in_blocks(data.X, torch.randperm(1500, generator=torch.manual_seed(0)))
    X = data.X / data.X.std(0)
    distance = torch.cdist(X[rows], X[outside]).amin(1)
    everyone = torch.cdist(X[rows], X).sort(1).values[:, 1]
    assert len(rows) > 50 and not np.intersect1d(rows, outside).size
    assert distance.mean() > 1.5 * everyone.mean()


def test_held_out_densities_are_those_of_the_nearest():
    *_, data = repeated()
    rows, outside = torch.tensor([3, 8, 20]), torch.tensor([0, 1, 2, 5, 6, 9, 11, 12, 15, 21])
    found = held_out_densities(KERNEL, data, rows, outside, 4).reshape(2, 3)
    K, y, noise = KERNEL.k1(data.X.numpy()), data.y.numpy(), 0.2 / data.weight.numpy()
    scaled = data.X.numpy() / KERNEL.k1.k2.length_scale
    for row, densities in zip(rows.tolist(), found.T, strict=True):
        near = np.argsort(((scaled - scaled[row]) ** 2).sum(1))[1:]
        sets = near[:4], [i for i in near if i in outside.tolist()][:4]
        for chosen, density in zip(sets, densities, strict=True):
            mean, var = left_out(K, noise, y, row, chosen)
            expected = norm.logpdf(y[row], mean, np.sqrt(var + noise[row]))
            assert float(density) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("likelier", [0, 1])
def test_family_is_the_likeliest_of_those_that_predict_alike(likelier, rng):
    """A gain on held-out observations within its noise is none; beyond it decides."""
    X = torch.tensor(rng.uniform(0, 1, (2000, 2)))
    f = torch.sin(6 * X[:, 0]) * torch.cos(5 * X[:, 1])
    data = Data(X, f + 0.3 * torch.tensor(rng.standard_normal(2000)))
    search = _Search(data, VecchiaSettings(), torch.Generator().manual_seed(0), None)
    alike = [RBF(scale) + WhiteKernel(0.09) for scale in (0.25, 0.2501)]
    trials = [_Trial(kernel, float(i != likelier)) for i, kernel in enumerate(alike)]
    assert search.best(trials).kernel == alike[likelier]
    poor = _Trial(RBF(0.01) + WhiteKernel(0.09), -1.0)
    assert search.best([poor, *trials]).kernel == alike[likelier]


def test_few_observations_are_all_inducing_points_by_default():
    """Which is exact, as predictions from neighbours are not; also where no density tells."""
    X = np.random.default_rng(0).uniform(0, 1, (60, 1))
    data = Data(torch.tensor(X), torch.tensor(np.sin(3 * X[:, 0])))
    kernel = 1.0 * Matern(0.5, nu=0.5) + WhiteKernel(0.1)  # 20 neighbours leave nothing to gain

    def n_inducing(**options):
        settings, generator = VecchiaSettings(20, **options), torch.Generator().manual_seed(0)
        return len(approximation(kernel, data, settings, generator).Z)

    assert n_inducing(n_inducing=None, exact_rows=60) == 60
    assert n_inducing(n_inducing=None, exact_rows=59, most_inducing=30) == 0


def test_few_inputs_are_all_inducing_points_whatever_the_misfit(rng):
    """The exact density may be the lesser one of data that are none of the process."""
    G = rng.random((100, 2))
    X = np.repeat(G, 5, axis=0)
    y = np.sin(40 * X[:, 0] * X[:, 1]) + 0.1 * rng.standard_normal(len(X))
    kernel = 1.0 * RBF(0.3) + WhiteKernel(1e-3)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    found = approximation(kernel, data, VecchiaSettings(20, None, exact_rows=100), generator)
    exact = multivariate_normal(np.zeros(len(X)), kernel(X)).logpdf(y)
    np.testing.assert_allclose(found.log_density(kernel.theta), exact, rtol=1e-6)
    near = approximation(kernel, data, VecchiaSettings(20, 0), generator)
    assert near.log_density(kernel.theta) > exact
