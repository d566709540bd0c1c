"""The choice of a route where the kernel matrix is too large to keep, or to solve with soon."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern

from skgp import QSGPRegressor
from skgp.data import Data
from skgp.learning import defaults, routes
from skgp.learning.plan import Options, Plan
from skgp.learning.routes import hold_out_discs
from skgp.linalg.runtime import memory_limit
from skgp.models import qsgp
from tests.models.qsgp_problems import fit_regression

N = 4500
ROUGH = 1.0 * Matern(1.0, nu=0.5)
WIDE = 1.0 * RBF(6.0)


@pytest.fixture(autouse=True)
def few_features(monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.CHOLESKY_FEATURES", 512)
    monkeypatch.setattr("skgp.learning.defaults.TRIAL_FEATURES", (64, 128))
    monkeypatch.setattr("skgp.learning.defaults.EXACT_NEIGHBORS", 150)
    monkeypatch.setattr("skgp.learning.defaults.SCORED", 100)
    monkeypatch.setattr("skgp.learning.defaults.LOW_RANK", 100)


def rough(seed=0):
    """Waves of many lengths in the plane, with little noise: what is near says most."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(0, 10, size=(N, 2))
    directions = rng.normal(size=(2, 60)) * 4 ** rng.uniform(0, 2, size=60)
    y = np.cos(X @ directions + rng.uniform(0, 6, 60)).sum(1) / 30**0.5
    return Data(torch.tensor(X), torch.tensor(y))


def wide(seed=0):
    """A smooth function of eight columns under much noise: every row says something."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, size=(N, 8))
    y = np.sin(X / 3).sum(1) + 2.0 * rng.normal(size=N)
    return Data(torch.tensor(X), torch.tensor(y))


def fitted(data, kernel, noise, options=None, seed=0, memory=3e7, **asked):
    generator = torch.Generator().manual_seed(seed)
    with memory_limit(memory):  # less than the kernel matrix takes
        return fit_regression(
            kernel, data, noise, Plan(**asked), options or Options(), generator=generator
        )


def test_neighbours_are_chosen_where_they_predict_best_and_the_reason_says_so():
    fit = fitted(rough(), ROUGH, 1e-3)
    assert (fit.plan.basis, fit.plan.size, fit.plan.covariance) == ("neighbors", 128, "full")
    for told in ("128 neighbours", "fourier functions", "(128)", "150 neighbours", "discs"):
        assert told in fit.plan.reason
    again = fitted(rough(), ROUGH, 1e-3)
    assert again.plan == fit.plan


@pytest.mark.parametrize("solved_rows", [N - 1, N])
def test_a_kernel_matrix_that_takes_long_to_solve_with_is_compared(solved_rows, monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.CHOLESKY_ROWS", 4000)
    monkeypatch.setattr("skgp.learning.defaults.SOLVED_ROWS", solved_rows)
    monkeypatch.setattr(qsgp, "fit_exact", lambda problem, plan: qsgp.Fit(None, plan, ROUGH))
    found = fitted(rough(), ROUGH, 1e-3, memory=1e12).plan
    assert found.basis == ("neighbors" if solved_rows < N else "inducing")
    assert ("128 neighbours" in found.reason) == (solved_rows < N)


@pytest.mark.parametrize(("scored", "basis"), [(256, "fourier"), (100, "neighbors")])
def test_fourier_features_are_chosen_where_they_gain_beyond_noise(scored, basis, monkeypatch):
    """A gain of .01, with a standard error of .006 of 512 observations."""
    monkeypatch.setattr("skgp.learning.defaults.LOW_RANK", 20)  # K is of low rank indeed
    monkeypatch.setattr("skgp.learning.defaults.SCORED", scored)
    fit = fitted(wide(), WIDE, 4.0)
    assert fit.plan.basis == basis and "128 neighbours" in fit.plan.reason


def test_a_kernel_matrix_of_low_rank_needs_no_comparison(monkeypatch):
    monkeypatch.setattr(routes, "compare_routes", None)
    monkeypatch.setattr("skgp.learning.defaults.LOW_RANK", 1000)
    fit = fitted(wide(), WIDE, 80.0)
    assert fit.plan.basis == "inducing" and "numerical rank" in fit.plan.reason


def test_a_low_rank_leaves_nothing_that_observations_tell_from_noise():
    """The mean of what it leaves is small where it leaves 40 times the noise of a direction."""
    X = torch.tensor(np.random.default_rng(0).uniform(-2, 2, (1500, 4)))
    kernel, noise = 37.0**2 * RBF([5.6, 24.0, 12.0, 4e4]), 4.4e-3
    factor = routes._low_rank(kernel, X, noise, torch.Generator().manual_seed(0)).factor.numpy()
    left = kernel(X.numpy()) - factor @ factor.T
    assert np.linalg.eigvalsh(left)[-1] < 0.2 * noise


@pytest.mark.parametrize("affordable", [True, False])
def test_conjugate_gradients_are_chosen_where_they_gain_and_are_affordable(affordable, monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.LEAST_GAIN", -10.0)
    monkeypatch.setattr("skgp.learning.defaults.CG_FLOPS", {"cpu": 1e13 if affordable else 1.0})
    monkeypatch.setattr(qsgp, "fit_exact", lambda problem, plan: plan)
    found = fitted(rough(), ROUGH, 1e-3)
    if affordable:
        assert (found.basis, found.size, found.solver) == ("inducing", N, "cg")
    else:
        assert found.plan.basis == "neighbors" and "not affordable" in found.plan.reason


@pytest.mark.parametrize(
    "asked", [dict(basis="fourier"), dict(n_basis=100), dict(covariance="diagonal")], ids=str
)
def test_a_choice_of_the_user_is_not_compared(asked, monkeypatch):
    monkeypatch.setattr(routes, "compare_routes", None)
    fit = fitted(rough(), ROUGH, 1e-3, **asked)
    assert fit.plan.basis != "neighbors"


def test_hold_out_discs_leaves_whole_discs_out():
    X = rough().X
    *out, place = hold_out_discs(ROUGH, X, torch.Generator().manual_seed(0))
    kept, random, disc = out
    parts = [set(each.tolist()) for each in out]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    distance = torch.cdist(X[disc], X[kept]).amin(1)
    among = torch.cdist(X[random], X[kept]).amin(1)
    assert distance.mean() > 3 * among.mean()
    assert place.unique().tolist() == list(range(defaults.DISCS))
    for k in range(defaults.DISCS):
        own = X[disc[place == k]]
        assert torch.cdist(own, own).amax() < 3.0  # of 10 x 10


@pytest.mark.parametrize(
    ("gains", "basis"), [([5.0, 0, 0, 0, 0, 0, 0, 0], "neighbors"), ([0.5] * 8, "fourier")]
)
def test_observations_of_a_disc_err_together(gains, basis, monkeypatch):
    """Weights that gain in one disc alone, by one standard error, gain nothing beyond noise."""
    places, calls = [], []

    def held(*args):
        *out, place = hold_out_discs(*args)
        places.append(place)
        return *out, place

    def densities(posterior, noise, data):
        found = torch.zeros(len(data), dtype=torch.float64)
        calls.append(found)
        if len(calls) in (2, 3):  # of weights, of two sizes
            found[-len(places[0]) :] = torch.tensor(gains, dtype=torch.float64)[places[0]]
        return found

    monkeypatch.setattr(routes, "hold_out_discs", held)
    monkeypatch.setattr(routes, "_log_densities", densities)
    assert fitted(rough(), ROUGH, 1e-3).plan.basis == basis


def test_weights_and_replicates_count_in_the_comparison():
    data = rough()
    weighted = replace(data, weight=torch.full((N,), 1.0, dtype=torch.float64))
    assert fitted(weighted, ROUGH, 1e-3).plan.basis == "neighbors"


def test_log_density_of_several_targets_is_the_mean_of_theirs():
    data = rough().take(torch.arange(60))
    data = replace(data, y=torch.stack([data.y, data.X[:, 0]], 1), weight=1 + data.X[:, 1])
    kept, rows = data.take(slice(0, 50)), data.take(slice(50, None))
    found, *each = (
        routes._log_densities(
            routes.local_posterior(ROUGH, replace(kept, y=kept.y[:, t]), 0.1, 49),
            0.1,
            replace(rows, y=rows.y[:, t]),
        ).mean()
        for t in (slice(None), 0, 1)
    )
    assert found == pytest.approx(sum(each) / 2)
    K = ROUGH(data.X)
    A = K[:50, :50] + np.diag(0.1 / kept.weight)
    solved = np.linalg.solve(A, K[:50, 50:]).T
    var = 1 - (solved * K[50:, :50]).sum(1) + 0.1 / rows.weight.numpy()
    law = stats.norm(solved @ kept.y.numpy(), var[:, None] ** 0.5)
    assert found == pytest.approx(law.logpdf(rows.y).mean(), abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "kernel", "reason"),
    [
        (Plan(), DotProduct(), "the kernel has no spectral density"),
        (Plan(solver="cg"), RBF(), "solver='cg' is for kernel matrices"),
    ],
)
def test_the_reason_for_a_kernel_matrix_beyond_memory_is_told(asked, kernel, reason):
    with memory_limit(1e7):
        assert routes.resolve(asked, 100_000, kernel).reason == reason


def test_neighbours_can_be_asked_for():
    data = rough()
    X, y = data.X.numpy(), data.y.numpy()
    model = QSGPRegressor(ROUGH, basis="neighbors", n_basis=40, random_state=0, optimizer=None)
    model.fit(X[500:], y[500:])
    assert (model.basis_, model.n_basis_, model.solver_) == ("neighbors", 40, "cholesky")
    mean, covariance = model.predict(X[:50], return_cov=True)
    _, std = model.predict(X[:50], return_std=True)
    np.testing.assert_allclose(np.sqrt(covariance.diagonal()), std, rtol=1e-6)
    assert model.score(X[:500], y[:500]) > 0.8
    with pytest.raises(ValueError, match="solver='cg' cannot be had with basis='neighbors'"):
        model.set_params(solver="cg").fit(X, y)
    assert not hasattr(model, "partial_fit")


def test_plans_up_to_sixty_thousand_rows_are_as_they_were():
    """Of kin40k, protein, keggdirected and pol: kept kernel matrix, conjugate gradients."""
    for n in (13_500, 36_000, 41_157, 43_944):
        with memory_limit(8e9):
            found = routes.resolve(Plan(), n, ROUGH)
        assert (found.basis, found.size) == ("inducing", n)
        assert found.solver == ("cg" if n > defaults.CHOLESKY_ROWS else "cholesky")
