"""Samples by stochastic gradients against a grid over two hyper-parameters; how many predict."""

import math
import pickle
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import laplace_modes
from skgp.learning.posterior.samples import probe_rows, resolve_plan, samples_needed
from skgp.learning.posterior.set_up import SetUp
from skgp.learning.posterior.stochastic_gradient import (
    SampledGradient,
    StochasticGradient,
    make_anchor,
)
from skgp.models import bayesian
from skgp.models.bayesian import sample_stochastic
from skgp.priors import LogNormal
from skgp.samplers import Run
from tests.covering import slow_case
from tests.same import assert_same

N = 40


@cache
def target():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(N, 1))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(N)
    kernel = RBF(1.0) + WhiteKernel(0.1)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    # Narrow priors: wide ones leave some mass where all is noise, rarely visited.
    return LogPosterior(kernel, data, [LogNormal(0.7, 0.5), LogNormal(0.1, 0.5)])


@cache
def grid_moments():
    """Mean and variances by the trapezoidal rule."""
    axes = np.linspace(-1.5, 2.0, 28), np.linspace(-4.0, 0.0, 28)
    u = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
    values = target().log_densities(u)
    weights = np.exp(values - values.max())
    weights /= weights.sum()
    mean = weights @ u
    return mean, weights @ (u - mean) ** 2


@pytest.fixture(autouse=True)
def exact_set_up(monkeypatch):
    """The set-up has tests of its own; this one does not move with it."""
    monkeypatch.setattr(bayesian, "set_up", stand_in)


def stand_in(field, *, rng, rank="auto", starts=(), callback=lambda *_: False, problems=()):
    stopped = callback(1, {"loss": 0.0})
    found = laplace_modes(field.posterior, rng=rng, starts=starts)[0]
    field.rank = 10 if rank == "auto" else rank
    field.choose_pivots(found.u, torch.Generator().manual_seed(0))
    problems = [*problems, "stopped"] if stopped else [*problems]
    return SetUp(found.u, found.covariance, field, 7, problems, noise=0.02)


def stochastic(seed=1, *, sampler="langevin", schedule="constant", roulette="adaptive", **run):
    options = dict(sampler=sampler, schedule=schedule, roulette=roulette, run=Run(**run))
    return sample_stochastic(target(), rng=np.random.default_rng(seed), **options)


@cache
def samples(sampler):
    return stochastic(
        sampler=sampler, n_warmup=20, target_ess=100, n_draws=100,
    )  # fmt: skip


@pytest.mark.parametrize("sampler", ["langevin", slow_case("mala")])
def test_samples_agree_with_the_grid(sampler):
    mean, var = grid_moments()
    run = samples(sampler)
    ess = run.diagnostics["ess"]
    # Stein's weights leave less than half of the error that the ESS allows for.
    for weights, most in ((run.weights, 2), (np.full(len(run.u), 1 / len(run.u)), 4)):
        found = weights @ run.u
        assert np.all(np.abs(found - mean) / np.sqrt(var) < most / math.sqrt(ess))
        ratio = weights @ (run.u - found) ** 2 / var
        assert np.all(np.abs(ratio - 1) < most * math.sqrt(2 / ess)), ratio


def test_diagnostics_have_the_keys_of_hmc():
    run = samples("langevin")
    d = run.diagnostics
    assert d["sampler"] == "langevin" and d["rank"] == 10 and d["n_entries"] == 32
    assert d["ess"] == d["ess_bulk"].min() >= 15
    for name in ("ess_tail", "r_hat"):
        assert d[name].shape == (2,) and np.all(d[name] > 0.9)
    for name in ("acceptance", "n_divergent", "step_size"):
        assert d[name].shape == (4,)
    assert 0 < d["noise_ratio"] < 0.5 and d["n_iter_cg"] >= 1
    n_iterations = len(run.u) // 4 + 20
    assert d["n_gradients"] >= 7 + 40 + 4 * n_iterations
    assert d["converged"] == (not d["problems"])
    assert np.isnan(run.log_posterior).all() and set(run.chain) == {0, 1, 2, 3}
    assert run.weights.sum() == pytest.approx(1.0) and len(run.keep(16, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("schedule", "problem", "n_kept"),
    [("paper", "R-hat is", 10), slow_case("constant", "criterion (7)", 110)],
)
def test_sgld_says_that_it_has_not_mixed(schedule, problem, n_kept):
    """Steps that fall too soon are held where they move nothing; long ones are never held."""
    run = stochastic(
        sampler="sgld", schedule=schedule, roulette="paper", n_warmup=0, n_draws=110,
        n_chains=2,
    )  # fmt: skip
    d = run.diagnostics
    assert not d["converged"] and any(problem in each for each in d["problems"]), d["problems"]
    assert d["rank"] == d["n_entries"] == 0 and np.all(d["criterion"] > 0)
    low, high = (1e-4, 1.2e-4) if schedule == "paper" else (0.1, 0.1)
    assert np.all((d["step_size"] >= low) & (d["step_size"] <= high))
    np.testing.assert_allclose(run.weights, 1 / (2 * n_kept))


def test_a_set_up_that_did_not_converge_leaves_the_mode(monkeypatch):
    def failing(*args, **kwargs):
        return stand_in(*args, **kwargs, problems=["the search did not converge; give starts"])

    monkeypatch.setattr(bayesian, "set_up", failing)
    run = stochastic()
    assert_same(run.u, run.map_[None])
    assert run.diagnostics["problems"][0] == "the search did not converge; give starts"
    assert "mode stands alone" in run.diagnostics["problems"][1]


def test_many_rows_call_back_after_every_iteration(monkeypatch):
    """So that a stop takes seconds; the draws are the same."""
    told = []

    def run():
        told.clear()
        found = stochastic(
            n_warmup=5, n_draws=10, callback=lambda _, info: told.append("ess" in info),
        )  # fmt: skip
        return found, sum(told)

    few, seldom = run()
    monkeypatch.setattr(tuned, "LARGE", 1)
    many, often = run()
    assert seldom == 2 and often == 15
    assert_same(few.u, many.u)


def test_a_stop_keeps_the_samples_so_far():
    def run(last):
        return stochastic(n_warmup=25, callback=lambda i, _: i >= last)

    bank = 32 + 1  # estimates, one of them wide
    during_set_up, during_bank, during_warmup, later = run(1), run(2), run(bank + 2), run(bank + 4)
    for mode in (during_set_up, during_bank, during_warmup):
        assert len(mode.u) == 1 and "stopped" in mode.diagnostics["problems"][-1]
    assert during_set_up.diagnostics["n_gradients"] == during_bank.diagnostics["n_gradients"]
    assert len(later.u) == 4 * 50 and later.diagnostics["n_gradients"] > 200


def test_targets_are_picklable_and_leave_their_matrix_behind():
    field = StochasticGradient(target(), n_probes=2, dtype=torch.float64)
    start = stand_in(field, rng=np.random.default_rng(0))
    anchor = make_anchor(field, start.mode, torch.Generator().manual_seed(0), n_entries=3)
    for one in (SampledGradient(field, anchor), SampledGradient(field)):
        first, _ = one(start.mode, 1, np.random.default_rng(0), None)
        stored = pickle.dumps(one)
        second, memory = pickle.loads(stored)(start.mode, 1, np.random.default_rng(0), None)
        assert_same(first, second)
        assert memory.n_products > 0 and np.isfinite(first).all()


def test_a_singular_matrix_is_no_gradient(monkeypatch):
    def singular(*_):
        raise torch.linalg.LinAlgError("singular")

    one = SampledGradient(None)
    monkeypatch.setattr(one, "_estimate", singular)
    gradient, memory = one(np.zeros(2), 0, np.random.default_rng(0), None)
    assert np.isnan(gradient).all() and memory.n_products == 0


def test_unknown_options_are_refused():
    for name in ("sampler", "schedule", "roulette"):
        with pytest.raises(ValueError, match=f"{name} must be one of .* got 'nuts'"):
            stochastic(seed=0, **{name: "nuts"})


# ---- the plan, and how many samples predict, against moments known in closed form


def test_the_plan_goes_by_rows_and_by_what_is_asked_for():
    def of(n, sampler="auto", solver="auto", learns=True, samples=True):
        return resolve_plan(solver, sampler, n, learns=learns, samples=samples)[:2]

    few, many = tuned.MOST_SAMPLED, tuned.MOST_SAMPLED + 1
    assert of(few) == ("cholesky", "importance") and of(many) == ("vecchia", "importance")
    assert of(few, "hmc") == ("cholesky", "hmc") and of(many, "hmc") == ("vecchia", "hmc")
    assert of(few, "mala") == ("cg", "mala") and of(few, solver="vecchia")[0] == "vecchia"
    # The optimum takes few likelihoods, one solution none.
    for learns, beyond in ((True, "vecchia"), (False, "cg")):
        found = [of(n, learns=learns, samples=False)[0] for n in (10_000, 10_001)]
        assert found == ["cholesky", beyond]


def pilot(mean, var, noise=0.0):
    mean, var = np.asarray(mean, float), np.asarray(var, float)
    size = len(mean)
    return SimpleNamespace(
        component_moments=lambda X: (mean, var),
        weights=np.full(size, 1 / size),
        noise=np.full(size, noise),
    )


@pytest.mark.parametrize(("spread", "n_samples"), [(0.01, 8), (0.15, 28), (0.6, 64)])
def test_samples_needed_is_the_variance_of_means_over_the_tolerance(spread, n_samples):
    """Means spread by so many standard deviations: n = spread^2 / 0.03^2, within bounds."""
    rng = np.random.default_rng(0)
    offsets = spread * rng.choice([-1.0, 1.0], size=(12, 500))
    found = samples_needed(pilot(offsets, np.full_like(offsets, 0.6), 0.4), np.zeros((500, 1)))
    assert found == pytest.approx(n_samples, rel=0.15)


def test_samples_needed_sees_variances_that_differ():
    var = np.repeat([[0.5], [1.5]], 6, axis=0) * np.ones(10)
    # V[v] = 0.25 of a variance of 1: 0.25 / 4 / 0.02^2 is more than the most.
    assert samples_needed(pilot(np.zeros((12, 10)), var), np.zeros((10, 1))) == 64
    assert samples_needed(pilot(np.zeros((12, 10)), np.ones((12, 10))), np.zeros((10, 1))) == 8
    # Noise that all share covers what differs.
    assert samples_needed(pilot(np.zeros((12, 10)), var, 20.0), np.zeros((10, 1))) == 8


def test_probe_rows_lie_in_the_range_of_the_data():
    X = np.random.default_rng(0).uniform(2, 5, (20, 3))
    rows = probe_rows(X, np.random.default_rng(1))
    assert rows.shape == (64, 3)
    assert (rows >= X.min(0)).all() and (rows <= X.max(0)).all()
    assert probe_rows(X[:1], np.random.default_rng(1)).shape == (64, 3)
