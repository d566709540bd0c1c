"""The path over beta: its order, where it ends, what it chooses, what it costs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.learning.sparse.holdout import BestState, held_out_losses
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.training import Training, fit_posterior, total_loss
from skgp.likelihoods import Bernoulli, Gaussian
from skgp.models.dlm import beta_path as module
from skgp.models.dlm.beta_path import BETAS, fit_beta_path
from skgp.models.dlm.fit import SparseFit, fit_sparse
from tests.reference import sparse as dense
from tests.same import assert_same

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
PROBIT = Bernoulli("probit")
QUICK = Settings(start_iter=10, max_iter=20)


def run(fit, problem, objective, settings=QUICK, **options):
    return fit(
        [problem.kernel],
        problem.data,
        objective,
        settings,
        inducing=lambda kernel: problem.tensors[0],
        offset=torch.zeros(1, dtype=torch.float64),
        generator=torch.Generator().manual_seed(0),
        **options,
    )


# ---- the choice ---------------------------------------------------------------------------------


def points(*losses):
    """Points of a path of which the part that chooses has these mean losses."""
    return [
        module._Point(Objective(GAUSSIAN, beta=beta), None, torch.full((100,), loss).double())
        for beta, loss in zip(BETAS, losses, strict=False)
    ]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 2.0, 1.0], False),
        ([1.0, 2.0], False),
        ([1.0, 2.0, 3.0], True),
        ([3.0, 1.0, 2.0, 3.0], True),
        ([1.0, 2.0, 1.5, 1.6], False),
        ([1.0, 2.0, 2.0], False),
        ([1.0], False),
    ],
)
def test_path_has_risen_after_two_rises_in_a_row(losses, expected):
    assert module._has_risen(points(*losses)) == expected


def test_choose_takes_the_least_loss():
    tried = points(3.0, 2.0, 1.0, 1.5)
    assert module._choose(tried) is tried[2]


def test_choose_of_equal_losses_is_the_nearest_to_1():
    tried = points(*[1.0] * 8)
    assert module._choose(tried) is tried[3]
    assert module._choose(tried[:3]) is tried[2]
    assert module._choose([*tried[:3], *tried[4:]]) is tried[2]  # of 2 and 1/2 the greater


def test_choose_takes_no_gain_below_the_least_effect_or_within_its_noise():
    assert module._choose(tried := points(1.0, 1.0, 1.0, 1.001, 1.0)) is tried[3]
    tried = points(1.0, 1.0, 1.0, 1.0, 0.99)
    noise = torch.tensor(np.random.default_rng(0).standard_normal(100))
    noisy = replace(tried[4], losses=tried[4].losses + noise - noise.mean())
    assert module._choose([*tried[:4], noisy]) is tried[3]
    assert module._choose(tried) is tried[4]


def test_choose_of_one_point_is_that_point():
    tried = points(2.0)
    assert module._choose(tried) is tried[0]


# ---- the order ----------------------------------------------------------------------------------


def stub_path(losses, monkeypatch, *, stop_at=None):
    """Run a path of stubs: the state that a fit finds is its beta, with the loss ``losses[beta]``.

    Returns the fit, the path, and what was minimised: (state to begin with, objective, settings).
    """
    calls = []

    def minimise(state, data, objective, settings, watch, generator, recorder):
        calls.append((state, objective, settings))
        if stop_at is not None and len(calls) >= stop_at:
            recorder.stopped = True
        return Training(State(objective.beta), 1.0, [objective.beta])

    def score(watch, state):
        watch._best = (state, None)
        return False

    def finish(state, data, objective, *rest):
        return SparseFit(state, objective, 0.0, 0.0, 0.0)

    def fit_sparse(kernels, data, objective, *rest, **options):
        state = State(objective.beta)
        return SparseFit(state, objective, 0.0, 0.0, 0.0, history={"start": [], "solve": []})

    monkeypatch.setattr(module, "minimise", minimise)
    monkeypatch.setattr(module, "finish", finish)
    monkeypatch.setattr(module, "fit_sparse", fit_sparse)
    monkeypatch.setattr(
        module,
        "held_out_losses",
        lambda state, *_: torch.full((4,), losses[state], dtype=torch.float64),
    )
    monkeypatch.setattr(BestState, "score", score)
    problem = dense.make_problem()
    start = problem.state()
    objective = Objective(GAUSSIAN, name="elbo")
    fit, path = run(fit_beta_path, problem, objective, start=start)
    return fit, path, calls, start


class State(float):
    """A state that is its beta."""

    kernel = None


def losses_of(**given):
    """Losses of all betas: of those named by their number in BETAS, else great ones."""
    return {beta: given.get(f"b{i}", 100.0 - i) for i, beta in enumerate(BETAS)}


def tried_in_order(calls):
    return list(dict.fromkeys(objective.beta for _, objective, _ in calls))


def test_path_runs_down_from_1_then_up_from_it_and_begins_where_the_last_ended(monkeypatch):
    losses = {beta: 10.0 - abs(3 - i) for i, beta in enumerate(BETAS)}
    _, path, calls, start = stub_path(losses, monkeypatch)
    assert list(path) == list(BETAS) == sorted(BETAS, reverse=True)
    assert path == losses
    assert tried_in_order(calls) == [*BETAS[3:], *BETAS[2::-1]]
    assert calls[0][0] is start
    begun = {objective.beta: state for state, objective, _ in calls[::2]}
    assert [begun[beta] for beta in BETAS[4:]] == list(BETAS[3:-1])
    assert [begun[beta] for beta in (2.0, 4.0, 8.0)] == [1.0, 2.0, 4.0]


def test_path_begins_as_a_fit_of_beta_1_and_goes_on_with_fewer_iterations(monkeypatch):
    losses = {beta: 10.0 - abs(3 - i) for i, beta in enumerate(BETAS)}
    _, _, calls, _ = stub_path(losses, monkeypatch)
    efforts = [settings.max_iter for _, _, settings in calls]
    assert efforts[:2] == [3, 20] and efforts[2:] == [3, 4] * 9


def test_path_stops_after_two_rises_either_way(monkeypatch):
    losses = losses_of(b3=3.0, b4=2.0, b5=2.5, b6=2.6, b7=1.0, b2=3.1, b1=3.2, b0=1.0)
    fit, path, calls, _ = stub_path(losses, monkeypatch)
    assert tried_in_order(calls) == [1.0, 0.5, 0.25, 0.125, 2.0, 4.0]
    assert list(path) == [4.0, 2.0, 1.0, 0.5, 0.25, 0.125]
    assert fit.state == 0.5 and fit.objective.beta == 0.5


def test_path_goes_on_after_a_single_rise(monkeypatch):
    losses = losses_of(b3=3.0, b4=3.5, b5=2.0, b6=2.5, b7=2.6, b2=3.1, b1=2.9, b0=1.0)
    fit, path, _, _ = stub_path(losses, monkeypatch)
    assert list(path) == list(BETAS[:8])
    assert fit.state == 8.0 and fit.objective.beta == 8.0


def test_path_ends_when_the_callback_stops(monkeypatch):
    _, path, _, _ = stub_path(losses_of(), monkeypatch, stop_at=3)
    assert list(path) == [1.0, 0.5]


# ---- real fits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "target", "name"),
    [
        (GAUSSIAN, "gaussian", "log_loss"),
        (GAUSSIAN, "gaussian", "elbo"),
        (GAUSSIAN, "gaussian", "square_loss"),
        (PROBIT, "labels", "log_loss"),
        (PROBIT, "labels", "elbo"),
    ],
)
def test_fit_beta_path_chooses_among_its_path_at_the_cost_of_few_fits(made, target, name):
    problem = dense.make_problem(n=120, target=target)
    objective = Objective(made, name=name)
    settings = Settings(start_iter=20, max_iter=40)
    fit, path = run(fit_beta_path, problem, objective, settings)
    chosen = replace(objective, beta=fit.objective.beta, unit=fit.objective.unit)
    assert fit.objective == chosen
    assert fit.objective.beta in path and list(path) == [b for b in BETAS if b in path]
    assert 1.0 in path
    assert fit.history["validation"] == list(path.values())
    assert fit.held_out_loss not in path.values()
    single = run(fit_sparse, problem, objective, settings)
    assert fit.n_iter <= 5 * single.n_iter
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all()


def test_fit_beta_path_learns_the_posterior_from_all_rows():
    problem = dense.make_problem(n=120)
    fit, _ = run(fit_beta_path, problem, Objective(GAUSSIAN), Settings(20, 60, tol=1e-9))
    assert fit.loss == pytest.approx(total_loss(fit.state, problem.data, fit.objective), rel=1e-8)
    alone = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
    more = fit_posterior(
        fit.state, problem.data, replace(fit.objective, **alone), max_iter=60, tol=0.0
    )
    assert more.loss == pytest.approx(fit.loss, rel=1e-3)


def test_fit_beta_path_prefers_much_regularisation_where_the_noise_is_understated():
    """Noise of a tenth of its variance: the posterior of Bayes' rule is far too sure."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (200, 1))
    y = np.sin(2 * X[:, 0]) + 0.5 * rng.standard_normal(200)
    problem = dense.Problem(RBF(1.0), X, y, np.linspace(-3, 3, 20)[:, None])
    family = Gaussian(0.025, bounds=(0.025, 0.025))
    objective = Objective(family, "elbo", learn_kernel=False, learn_inducing=False)
    fit, path = run(fit_beta_path, problem, objective)
    assert fit.objective.beta > 1 and path[fit.objective.beta] < path[1.0] - 0.1


def test_fit_beta_path_is_no_worse_than_beta_1_for_a_smooth_function():
    """Points enough for it: great weights first would leave the search in a poorer optimum."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (1200, 1))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(1200)
    kernel = dense.KERNELS["rbf"]().k1 * RBF(1.0)
    problem = dense.Problem(kernel, X[:300], y[:300], np.linspace(-3, 3, 12)[:, None])
    fresh = dense.Problem(kernel, X[300:], y[300:], problem.Z)
    objective = Objective(GAUSSIAN)
    settings = Settings(start_iter=30, max_iter=60)
    chosen, _ = run(fit_beta_path, problem, objective, settings)
    single = run(fit_sparse, problem, objective, settings)
    losses = [
        float(held_out_losses(fit.state, objective, fresh.data).mean()) for fit in (chosen, single)
    ]
    assert losses[0] < losses[1] + 0.05


def test_fit_beta_path_is_reproducible():
    problem = dense.make_problem(n=60)
    (first, path), (second, again) = (
        run(fit_beta_path, problem, Objective(GAUSSIAN, name="elbo")) for _ in range(2)
    )
    assert_same(path, again)
    assert_same(first.state.mean, second.state.mean)


def test_fit_beta_path_begins_where_it_is_told():
    problem = dense.make_problem(n=60)
    objective = Objective(GAUSSIAN, name="elbo")
    first, _ = run(fit_beta_path, problem, objective)
    second, path = run(fit_beta_path, problem, objective, start=first.state)
    assert second.history["start"] == [] and len(path) >= 1


@pytest.mark.parametrize("at", [1, 12, 30])
def test_fit_beta_path_ends_usable_when_the_callback_stops(at):
    problem = dense.make_problem(n=60)
    calls = []

    def callback(iteration, info):
        calls.append(iteration)
        return iteration >= at

    fit, path = run(fit_beta_path, problem, Objective(GAUSSIAN), callback=callback)
    assert calls == list(range(1, len(calls) + 1)) and len(calls) <= at + 3
    assert 1 <= fit.n_iter <= len(calls) and len(path) >= 1
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all() and np.isfinite([fit.loss, fit.elbo]).all()


def test_fit_beta_path_of_two_rows():
    problem = dense.make_problem(n=2, n_inducing=2)
    fit, path = run(fit_beta_path, problem, Objective(GAUSSIAN), Settings(2, 5))
    assert np.isfinite(list(path.values())).all() and fit.state.mean.isfinite().all()


@pytest.mark.parametrize("target", ["gaussian", "labels"])
def test_parts_have_one_purpose_each(target):
    problem = dense.make_problem(n=120, target=target)
    generator = torch.Generator().manual_seed(0)
    parts = module._Parts.of(problem.data, 0.1, generator)
    sizes = [len(part) for part in (parts.training, parts.stopping, parts.choosing)]
    assert sizes == [84, 12, 12] and len(parts.reporting) == 12
    rows = torch.cat([parts.training.X, parts.stopping.X, parts.choosing.X, parts.reporting.X])
    assert len(rows.unique(dim=0)) == 120


def test_the_loss_reported_is_that_of_new_data():
    """Mean over data sets of the loss reported, against that of new data."""
    gaps = []
    for seed in range(6):
        problem = dense.make_problem(n=150, seed=seed)
        fresh = dense.make_problem(n=600, seed=100 + seed)
        fit, path = run(fit_beta_path, problem, Objective(GAUSSIAN), Settings(5, 15))
        new = float(held_out_losses(fit.state, fit.objective, fresh.data).mean())
        gaps.append(fit.held_out_loss - new)
    error = np.std(gaps, ddof=1) / len(gaps) ** 0.5
    assert np.mean(gaps) > -3 * error
