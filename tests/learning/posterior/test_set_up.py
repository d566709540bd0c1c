"""Mode, curvature and preconditioner found without a factorisation, against the exact ones."""

import copy
import math
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import find_start, laplace_modes, measure_curvature
from skgp.learning.posterior.priors import default_priors
from skgp.learning.posterior.set_up import FixedProbeGradient, ModeSearch, set_up
from skgp.learning.posterior.stochastic_gradient import StochasticGradient, make_anchor
from skgp.optim.stopping import StopRecorder
from tests.covering import slow_case
from tests.same import assert_same

F64 = {"dtype": torch.float64}


@cache
def make_posterior(n=150, ard=True, seed=0, bounds=(1e-5, 1e5)):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    X[1] = X[0]
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.standard_normal(n)
    y = (y - y.mean()) / y.std()
    kernel = 1.0 * RBF([1.0, 1.0] if ard else 1.0, bounds) + WhiteKernel(0.1)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    return LogPosterior(kernel, data, default_priors(kernel, X, y))


@pytest.fixture
def few_joint_rows(monkeypatch):
    """Small problems that do not end with the rows taken jointly."""
    monkeypatch.setattr(tuned, "JOINT_ROWS", 30)
    monkeypatch.setattr(tuned, "N_NEIGHBORS", 8)


def set_up_for(posterior, seed=1, rank="auto", max_iter=25, callback=None, **of_field):
    field = StochasticGradient(posterior, **of_field)
    rng = np.random.default_rng(seed)
    return set_up(field, rng=rng, rank=rank, max_iter=max_iter, callback=callback)


@cache
def exact(posterior):
    return laplace_modes(posterior, rng=np.random.default_rng(0))[0]


def whitened(posterior, mode, covariance):
    """Distance from the exact mode (p,) and eigenvalues of the covariance, in exact coordinates."""
    root = np.linalg.cholesky(np.linalg.inv(exact(posterior).covariance))
    error = root.T @ (mode - exact(posterior).u)
    return error, np.linalg.eigvalsh(root.T @ covariance @ root)


def make_gradient(posterior, generator, rank=20, max_rank=50):
    field = StochasticGradient(posterior, rank=rank, dtype=torch.float64)
    gradient = FixedProbeGradient(field, generator, max_rank)
    gradient.redraw(exact(posterior).u, rank)
    return gradient


def search_from(gradient, u, metric):
    return ModeSearch(gradient, u, metric).run(25, StopRecorder(None))


@pytest.mark.parametrize(("ard", "dtype"), [slow_case(False, torch.float64), (True, torch.float32)])
def test_set_up_finds_the_exact_mode_and_curvature(ard, dtype, few_joint_rows):
    posterior = make_posterior(ard=ard)
    found = set_up_for(posterior, dtype=dtype)
    assert found.converged and found.problems == []
    error, scales = whitened(posterior, found.mode, found.covariance)
    assert np.abs(error).max() < 0.1
    assert scales.min() > 0.8 and scales.max() < 1.25
    assert found.noise < 0.16 and found.field.rank <= 100


def test_set_up_leaves_a_field_that_makes_an_anchored_gradient(few_joint_rows, generator):
    posterior = make_posterior()
    found = set_up_for(posterior, n_probes=3, roulette="paper", **F64)
    field = pickle.loads(pickle.dumps(found.field))
    assert field.n_probes == 3 and field.solver["roulette"] == "paper"
    assert field.solver["max_iter"] == StochasticGradient(posterior).solver["max_iter"]
    anchored = make_anchor(field, found.mode, generator, n_entries=16)
    root = np.linalg.cholesky(found.covariance)
    noise = np.linalg.eigvalsh(root.T @ (16 * anchored.mean_covariance) @ root)[-1]
    assert 0.2 < noise / found.noise < 5
    assert np.linalg.norm(root.T @ anchored.mean) < 4 * math.sqrt(noise / 16) + 0.1


def test_set_up_spares_rank_where_rows_are_many(few_joint_rows, monkeypatch):
    """More noise is let through, and more probes make up for it in the mode."""
    monkeypatch.setattr(tuned, "FIRST_RANK", 3)
    monkeypatch.setattr(tuned, "NOISE", 0.05)
    posterior = make_posterior()
    few = set_up_for(posterior, **F64)
    monkeypatch.setattr(tuned, "MANY", 100)
    many = set_up_for(posterior, **F64)
    assert few.noise < 0.05 < many.noise < 0.5 and many.field.rank < few.field.rank
    assert np.abs(whitened(posterior, many.mode, many.covariance)[0]).max() < 0.15


@pytest.mark.parametrize("rank", [0, 17])
def test_set_up_keeps_a_given_rank(rank, few_joint_rows):
    found = set_up_for(make_posterior(60), rank=rank, max_iter=3)
    assert found.field.rank == len(found.field._pivots) == rank and found.n_gradients > 0


def test_set_up_does_not_factor_all_rows(few_joint_rows, monkeypatch):
    sizes, likelihoods = [], LogPosterior._likelihoods

    def recorded(self, theta, slope):
        sizes.append(len(self.data.y))
        return likelihoods(self, theta, slope)

    monkeypatch.setattr(LogPosterior, "_likelihoods", recorded)
    assert set_up_for(make_posterior()).converged
    assert 0 < max(sizes) <= 30


# ------------------------------------------------------------------------------- the search


def test_the_rank_doubles_while_systems_are_hard(generator):
    """From a preconditioner that is far too small, and up to the most allowed."""
    posterior = make_posterior()
    gradient = make_gradient(posterior, generator, rank=2, max_rank=64)
    hard = np.log([20.0, 0.5, 0.5, 0.005])
    gradient.redraw(hard, 2)
    _, before, _ = gradient(hard, 1e-2)
    assert before > 15
    _, after, usable = gradient.with_enough_rank(hard)
    assert usable and after < before and 2 < gradient.field.rank <= 64
    assert len(gradient.field._pivots) == gradient.field.rank
    assert gradient._probes.e1.shape == (16, gradient.field.rank)


def test_polish_finds_the_mode_from_afar(generator):
    """With a metric that is far off."""
    posterior = make_posterior()
    start = exact(posterior).u + [1.5, -1.0, 1.0, 1.5]
    found = search_from(make_gradient(posterior, generator), start, np.eye(4))
    assert found.converged and found.norm < 0.02
    error, _ = whitened(posterior, found.u, np.eye(4))
    assert np.linalg.norm(error) < 0.5


def test_polish_stays_within_the_bounds(generator):
    """The mode is beyond one: the gradient there points outwards."""
    posterior = make_posterior(bounds=(1e-5, 0.9))
    gradient = make_gradient(posterior, generator)
    found = search_from(gradient, exact(posterior).u - 0.3, exact(posterior).covariance)
    assert found.converged
    at_bound = np.isclose(found.u, posterior.bounds[:, 1])
    assert at_bound.any() and (found.u <= posterior.bounds[:, 1]).all()
    error, _ = whitened(posterior, found.u, np.eye(4))
    assert np.linalg.norm(error) < 0.5


def test_a_step_is_refused_where_systems_fail(generator, monkeypatch):
    """One that reaches the cap of iterations: the point stays, the next step is shorter."""
    posterior = make_posterior()
    gradient = make_gradient(posterior, generator)
    search = ModeSearch(gradient, exact(posterior).u + 0.7, np.eye(4))
    before, metric = search.u.copy(), search.metric.copy()
    monkeypatch.setattr(tuned, "MAX_CG", 0)
    search.step()
    assert_same(search.u, before)
    assert_same(search.metric, metric)
    assert search.n_refused == 1 and search.trust < tuned.LONGEST / 2
    monkeypatch.undo()
    search.step()
    assert 0 < np.linalg.norm(search.u - before) < 0.2


def test_a_step_is_refused_where_it_overshoots(generator):
    """The slope at its end tells; the metric learns from it all the same."""
    posterior = make_posterior()
    start = exact(posterior).u + 0.1
    search = ModeSearch(make_gradient(posterior, generator), start, 10 * np.eye(4))
    direction = search._direction()
    direction *= 0.7 / np.linalg.norm(direction)
    search.step()
    assert_same(search.u, start)
    assert search.n_refused == 1
    # Along the step the metric is now the inverse of the curvature seen.
    curvature = np.linalg.inv(exact(posterior).covariance)
    seen = direction @ np.linalg.solve(search.metric, direction)
    assert 0.4 < seen / (direction @ curvature @ direction) < 2.5


@pytest.mark.parametrize(
    ("max_cg", "settings", "expected"),
    [
        (1, {"rank": 1}, ["more than 1 iterations", "rank 1", "raise that rank"]),
        (150, {"max_iter": 1}, ["gradient norm", "narrower priors"]),
    ],
)
def test_set_up_says_why_it_did_not_converge(max_cg, settings, expected, few_joint_rows,
                                             monkeypatch):  # fmt: skip
    monkeypatch.setattr(tuned, "MAX_CG", max_cg)
    found = set_up_for(make_posterior(), **settings)
    assert not found.converged and math.isnan(found.noise)
    (problem,) = found.problems
    assert all(text in problem for text in expected)
    assert np.isfinite(found.mode).all() and found.covariance.shape == (4, 4)


def test_curvature_is_measured_with_a_point_left_out(generator):
    """One end of an axis where systems fail: a one-sided difference."""
    posterior = make_posterior(ard=False)
    gradient = make_gradient(posterior, generator)
    mode, covariance = exact(posterior).u, exact(posterior).covariance
    failing = copy.copy(gradient)
    calls = []

    class Failing(FixedProbeGradient):
        def __call__(self, u, tol=1e-3):
            calls.append(1)
            g, n_iter, usable = super().__call__(u, tol)
            return g, n_iter, usable and len(calls) != 2

    failing.__class__ = Failing
    both = measure_curvature(gradient, mode, covariance)
    one_sided = measure_curvature(failing, mode, covariance)
    assert len(calls) == 2 * 3 + 1
    for measured, low, high in ((both, 0.9, 1.12), (one_sided, 0.6, 1.6)):
        scales = whitened(posterior, mode, measured)[1]
        assert scales.min() > low and scales.max() < high


# ------------------------------------------------------------------------------- the start


@pytest.mark.parametrize(("n", "n_neighbors", "most"), [slow_case(120, 40, 2.0), (70, 69, 0.1)])
def test_find_start_is_near_the_mode_and_with_all_neighbors_there(
    few_joint_rows, monkeypatch, n, n_neighbors, most
):
    monkeypatch.setattr(tuned, "N_NEIGHBORS", n_neighbors)
    posterior = make_posterior(n)
    start = find_start(posterior, np.random.default_rng(0))
    error, scales = whitened(posterior, start.u, start.covariance)
    assert np.linalg.norm(error) < most
    assert scales.min() > 1 / (1 + most) and scales.max() < 1 + most


@pytest.mark.parametrize("given", [[], [np.full(4, 3.0)]])
def test_find_start_of_few_rows_is_the_mode(given):
    posterior = make_posterior()
    start = find_start(posterior, np.random.default_rng(0), given)
    error, scales = whitened(posterior, start.u, start.covariance)
    assert np.abs(error).max() < 0.05
    np.testing.assert_allclose(scales, 1, atol=0.01)


def test_a_callback_stops_with_the_mode_so_far(few_joint_rows):
    """In the search for a start, and in the search proper."""
    infos, posterior = [], make_posterior(60)

    def watch(iteration, info):
        infos.append((iteration, info))

    set_up_for(posterior, callback=watch)
    assert [i for i, _ in infos] == list(range(1, len(infos) + 1))
    assert all(math.isfinite(info["loss"]) for _, info in infos)
    first_step = next(i for i, info in infos if "gradient_norm" in info)
    assert 2 < first_step < len(infos)
    curvature = next(i for i, info in infos if i > first_step and "gradient_norm" not in info)
    for when in (2, first_step, curvature):
        seen = []

        def stop(iteration, info, when=when, seen=seen):
            seen.append(iteration)
            return iteration == when

        found = set_up_for(posterior, callback=stop)
        assert seen == list(range(1, when + 1)) and not found.converged
        assert "stopped by the callback" in found.problems[0]
        assert np.isfinite(found.mode).all()


def test_set_up_is_reproducible_from_its_rng(few_joint_rows):
    first, second = (set_up_for(make_posterior(60), 3) for _ in range(2))
    assert_same(first.mode, second.mode)
    assert_same(first.covariance, second.covariance)
    assert first.field.rank == second.field.rank and first.n_gradients == second.n_gradients > 20
