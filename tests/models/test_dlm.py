"""Fits from kernel and rows to a posterior: every objective and likelihood, every way to end."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.data import Data
from skgp.inference.collapsed import calibrated_variance, ridge, square_posterior, statistics
from skgp.learning.sparse import defaults
from skgp.learning.sparse.defaults import BETAS
from skgp.learning.sparse.objective import Objective, Problem, Settings, held_out_losses
from skgp.learning.sparse.search import Blend, fit_all_rows
from skgp.learning.sparse.start import start_state
from skgp.likelihoods import Bernoulli, Gaussian, StudentT
from skgp.models import dlm as module
from skgp.models.dlm import fit_beta_path, fit_sparse, minimise
from skgp.optim.stopping import StopRecorder
from tests.covering import slow_case
from tests.reference import sparse as dense
from tests.reference.sparse import GAUSSIAN, LIKELIHOODS
from tests.same import assert_same

CASES = [(likelihood, name) for likelihood in LIKELIHOODS for name in ("log_loss", "elbo")]


CASES += [("gaussian", "square_loss"), ("gaussian", "fitc")]


OF_GAUSSIAN = [case for case in CASES if case[0] == "gaussian"]


ALONE = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}


HELD_OUT = ("log_loss", "square_loss")  # objectives that keep rows from a joint search


QUICK = Settings(start_iter=10, max_iter=10)


def problem_of(likelihood, n=120, **options):
    likelihood, target = LIKELIHOODS[likelihood]
    return dense.make_problem(n=n, target=target, **options), likelihood


def problem_for(problem, objective, settings=QUICK, *, kernels=None, callback=None, **options):
    """What `fit_sparse` takes, of a small problem as arrays."""
    data = options.pop("data", problem.data)
    offset = torch.full((data.y.shape[1],), options.pop("offset", 0.0), dtype=data.y.dtype)
    Z = problem.tensors[0].to(data.X.dtype)
    return Problem(
        kernels or [problem.kernel],
        data,
        objective,
        settings,
        options.pop("inducing", lambda kernel: Z),
        offset,
        torch.Generator().manual_seed(options.pop("seed", 0)),
        StopRecorder(callback),
        **options,
    )


def run(problem, objective, settings=QUICK, **options):
    return fit_sparse(problem_for(problem, objective, settings, **options))


def run_path(problem, objective, settings=QUICK, **options):
    return fit_beta_path(problem_for(problem, objective, settings, **options))


def begin(problem, objective, settings, *, kernels=None):
    """The state after steps 1 and 2."""
    return start_state(problem_for(problem, objective, settings, kernels=kernels)).state


# ---- all objectives and families ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "name", "early_stopping"),
    [(*c, True) for c in CASES] + [(*c, False) for c in OF_GAUSSIAN if c[1] in HELD_OUT],
)
def test_fit_sparse_predicts_fresh_rows_better_than_it_began(likelihood, name, early_stopping):
    problem, made = problem_of(likelihood)
    fresh, _ = problem_of(likelihood, seed=1)
    objective = Objective(made, name=name, beta=0.5)
    offset = float(np.log(problem.y.mean())) if likelihood == "poisson" else 0.0
    fit = run(problem, objective, replace(QUICK, early_stopping=early_stopping), offset=offset)
    prior = replace(problem, offset=offset).state(made.initial(problem.tensors[0]))
    before, after = (
        held_out_losses(state, objective, fresh.data).mean() for state in (prior, fit.state)
    )
    assert after < before - 0.1
    # What every fit reports.
    bound = objective.elbo
    assert fit.elbo == pytest.approx(-bound.total(fit.state, problem.data), rel=1e-9)
    if name == "log_loss":
        expected = objective.total(fit.state, problem.data)
        expected -= float(made.log_prior(fit.state.likelihood))
        assert fit.loss == pytest.approx(expected, rel=1e-8)
    unit = fit.objective.unit
    assert (unit != 1.0) == (name == "square_loss")
    assert np.isfinite(fit.loss)
    # But for the floor of its noise.
    assert replace(fit.objective, likelihood=made) == replace(objective, unit=unit)
    # Of the kernel's own length scales, of others, and from there if these are likelier.
    assert 0 < len(fit.history["start"]) <= 3 * 10 and 0 < len(fit.history["solve"]) <= 10
    assert fit.n_iter == len(fit.history["solve"])  # the longest part after the start
    noise = made.with_parameters(fit.state.likelihood).additive_variance()
    np.testing.assert_equal(fit.noise_variance, noise)  # NaN equals NaN
    held_out = early_stopping and name in HELD_OUT
    assert bool(fit.history["validation"]) == (fit.held_out_loss is not None) == held_out


@pytest.mark.slow
def test_fit_sparse_by_the_bound_finds_the_optimum_without_the_closed_form():
    """The same data, as Student's t with very many degrees of freedom: no closed form."""
    problem, made = problem_of("gaussian", n=60)
    many = 1e6
    student = StudentT(0.3**0.5, many, scale_bounds=(0.01, 2.2))
    objective = Objective(made, name="elbo", learn_inducing=False)
    settings = Settings(start_iter=60, max_iter=150, tol=1e-9)
    losses = [
        run(problem, replace(objective, likelihood=f), settings).loss for f in (made, student)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_fit_sparse_of_several_functions_shares_kernel_and_points():
    problem, made = problem_of("probit")
    data = Data(problem.data.X, torch.cat([problem.data.y, -problem.data.y], dim=1))
    fit = run(problem, Objective(made), data=data)
    assert fit.state.mean.shape == (9, 2) and fit.state.root.shape == (2, 9, 9)
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    # The labels of the second are those of the first with the other sign.
    torch.testing.assert_close(mean[:, 0], -mean[:, 1], rtol=0, atol=0.1)
    torch.testing.assert_close(var[:, 0], var[:, 1], rtol=0.2, atol=0.1)


@pytest.mark.parametrize("name", ["log_loss", "elbo", "square_loss"])
def test_fit_sparse_of_beta_0_is_finite(name):
    problem, made = problem_of("gaussian", n=40)
    fit = run(problem, Objective(made, name=name, beta=0.0))
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all() and np.isfinite([fit.loss, fit.elbo]).all()


@pytest.mark.parametrize("name", ["log_loss", "elbo", "square_loss", "fitc"])
def test_fit_sparse_in_single_precision_predicts_as_in_double(name):
    problem, made = problem_of("gaussian")
    objective = Objective(made, name=name, **ALONE)
    double = run(problem, objective)
    single = run(problem, objective, data=problem.data.to(torch.float32))
    assert single.state.mean.dtype == torch.float32
    found, expected = (
        f.state.posterior().mean_and_variance(problem.data.X) for f in (single, double)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.05)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0.05)


def test_fit_sparse_chooses_a_smooth_kernel_for_a_smooth_function():
    problem, made = problem_of("gaussian")
    kernels = [1.0 * Matern([0.7, 0.7], nu=nu) for nu in (0.5, np.inf)]
    fit = run(problem, Objective(made), kernels=kernels)
    assert fit.state.kernel.k2.nu == np.inf


# ---- steps 3 and 4 ------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t", "logit"])
def test_fit_sparse_with_fixed_hyperparameters_keeps_those_of_the_bound(likelihood):
    problem, made = problem_of(likelihood)
    settings = replace(QUICK, joint=False)
    objective = Objective(made, beta=0.01)
    fit = run(problem, objective, settings)
    begun = begin(problem, objective, settings)
    np.testing.assert_array_equal(fit.state.kernel.theta, begun.kernel.theta)
    assert torch.equal(fit.state.Z, begun.Z)
    assert torch.equal(fit.state.likelihood, begun.likelihood)
    assert not torch.equal(fit.state.mean, begun.mean)
    assert fit.history["validation"] == [] and fit.held_out_loss is None


@pytest.mark.parametrize("name", ["log_loss", slow_case("square_loss")])
def test_fit_sparse_with_early_stopping_keeps_the_best_state_for_rows_held_out(name):
    problem, made = problem_of("gaussian", n=150)
    objective = Objective(made, name=name, beta=0.1)
    fit = run(problem, objective, replace(QUICK, max_iter=60))
    losses = fit.history["validation"]
    # The first is of q(u) alone, which the joint search has to beat clearly.
    assert fit.held_out_loss in (min(losses), losses[0]) and len(losses) >= 2
    assert len(losses) - 1 <= len(fit.history["solve"]) / 5


@pytest.mark.parametrize("likelihood", [slow_case("gaussian"), "logit"])
def test_fit_sparse_with_early_stopping_learns_the_posterior_from_all_rows(likelihood):
    problem, made = problem_of(likelihood)
    objective = Objective(made, beta=0.3)
    fit = run(problem, objective, Settings(start_iter=10, max_iter=60, tol=1e-9))
    alone = replace(objective, **ALONE)
    more = fit_all_rows(fit.state, problem.data, alone, max_iter=50, tol=0.0)
    assert more.loss == pytest.approx(fit.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("likelihood", "batch_size", "expected"),
    [("gaussian", 60, True), ("gaussian", None, False), ("logit", 60, False)],
)
def test_fit_sparse_by_minibatches_moves_the_mean_to_least_squares(
    likelihood, batch_size, expected, monkeypatch
):
    """As the rows held out would have it; the loss reported is that of the mean moved."""
    problem, made = problem_of(likelihood)
    blends = []

    def choose(state, kept, held_out, objective):
        blends.append((len(kept), len(held_out)))
        return Blend(1.0, 0.1)

    monkeypatch.setattr(module, "choose_blend", choose)
    objective = Objective(made)
    fit = run(problem, objective, replace(QUICK, batch_size=batch_size))
    assert blends == ([(108, 12)] if expected else [])
    sums = statistics(fit.state.kernel, problem.data, fit.state.Z)
    mean, _ = square_posterior(sums, beta=0.1)
    assert torch.allclose(fit.state.mean, mean, rtol=1e-6, atol=1e-6) == expected
    if expected:
        assert fit.loss == pytest.approx(objective.total(fit.state, problem.data))


@pytest.mark.parametrize("name", ["log_loss", "square_loss"])
def test_fit_sparse_keeps_rows_held_out_from_the_joint_search(name, monkeypatch):
    """Rows held out with absurd targets: the search does not see them."""
    problem, made = problem_of("gaussian")
    _, held_out = module.split(problem.data, 0.1, torch.Generator().manual_seed(0))
    out = (problem.X[:, None] == held_out.X.numpy()).all(-1).any(1)
    # The same rows, which are stratified by y, whatever the targets.
    rows = [torch.from_numpy(which) for which in (~out, out)]
    monkeypatch.setattr(module, "split", lambda data, *_: tuple(map(data.take, rows)))
    absurd = replace(problem, y=np.where(out, 1e3, problem.y))
    fits = [
        run(p, Objective(made, name=name), replace(QUICK, max_iter=9), start=problem.state())
        for p in (problem, absurd)
    ]
    assert fits[0].history["solve"] == fits[1].history["solve"]
    assert fits[0].history["validation"] != fits[1].history["validation"]


# ---- how the objective is minimised -------------------------------------------------------------


def minimised(problem, objective, settings=QUICK):
    made = problem_for(problem, objective, settings)
    return minimise(problem.state(), problem.data, objective, made)


@pytest.mark.parametrize(("likelihood", "name"), [*OF_GAUSSIAN, ("logit", "log_loss")])
def test_minimise_when_stopped_takes_no_iteration(likelihood, name):
    """Where there is a closed form the posterior is its optimum all the same."""
    problem, made = problem_of(likelihood)
    objective = Objective(made, name=name)
    calls = []
    stopped = problem_for(problem, objective, callback=lambda *call: calls.append(call))
    stopped.recorder.stopped = True
    state = problem.state(made.initial(problem.tensors[0]))
    found = minimise(state, problem.data, objective, stopped)
    assert calls == []
    assert found.state.kernel == state.kernel and torch.equal(found.state.Z, state.Z)
    assert torch.equal(found.state.likelihood, state.likelihood)
    if objective.has_closed_form:
        assert_same(found.state.mean, objective.with_optimum(state, problem.data).mean)
    else:
        assert torch.equal(found.state.mean, state.mean)
        assert found.loss == pytest.approx(objective.total(state, problem.data))


def test_minimise_of_many_rows_in_closed_form_learns_from_some(monkeypatch):
    """Hyper-parameters from some rows, of which each weighs more beside the divergence."""
    problem, made = problem_of("gaussian", weighted=True)
    monkeypatch.setattr(defaults, "ALONE_NUMBERS", 9 * 50)
    seen = []

    def spy(state, data, objective, **options):
        seen.append((data, objective.beta))
        return fit_all_rows(state, data, objective, **options)

    monkeypatch.setattr(module, "fit_all_rows", spy)
    objective = Objective(made, name="elbo", beta=0.7)
    found = minimised(problem, objective)
    ((data, beta),) = seen
    assert len(data) == 50
    assert beta == pytest.approx(0.7 * data.total / problem.data.total)
    # The posterior is of all rows.
    assert_same(found.state.mean, objective.with_optimum(found.state, problem.data).mean)


# ---- the square loss ----------------------------------------------------------------------------


def square_fit(problem, **options):
    made = GAUSSIAN
    objective = Objective(made, name="square_loss", beta=0.1)
    return run(problem, objective, replace(QUICK, early_stopping=False), **options), objective


@pytest.mark.parametrize(
    "kernel",
    [
        ConstantKernel(1.0, (1e-3, 1e3)) * RBF([0.9, 1.6]),
        ConstantKernel(1.0, (0.99, 1.01)) * RBF([0.9, 1.6]),
        ConstantKernel(1.0, "fixed") * RBF([0.9, 1.6]),
        RBF([0.9, 1.6]),
    ],
    ids=["free", "bounded", "fixed", "absent"],
)
def test_fit_sparse_by_the_square_loss_is_a_process_of_calibrated_variance(kernel):
    """Its mean is that of the loss; kernel and noise are s times those under which it is a GP's."""
    problem = replace(problem_of("gaussian", weighted=True)[0], kernel=kernel)
    fit, objective = square_fit(problem)
    state = fit.state
    # The process of the unscaled kernel, of which the factor does not change the mean.
    sums = statistics(state.kernel, problem.data, state.Z)
    beta = 0.1 * fit.objective.unit
    mean, root = square_posterior(sums, beta=beta)
    torch.testing.assert_close(state.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state.root, root, rtol=1e-6, atol=1e-6)
    assert fit.noise_variance == pytest.approx(float(ridge(sums, beta)), rel=1e-8)
    factor = calibrated_variance(state.kernel, problem.data, state.Z, sums, beta=beta)
    assert factor == pytest.approx(1.0, rel=1e-8)
    square = 0.5 * (state.posterior().mean(problem.data.X) - problem.data.y).square()
    t = float(ridge(sums, beta))
    loss = problem.data.weighted_sum(square) + 0.5 * t * state.mean.square().sum()
    assert fit.loss == pytest.approx(float(loss), rel=1e-6)


def test_fit_sparse_by_the_square_loss_has_noise_of_the_right_size():
    problem, _ = problem_of("gaussian", n=400, n_inducing=15)
    objective = Objective(GAUSSIAN, name="square_loss")
    fit = run(problem, objective, replace(QUICK, joint=False))
    assert fit.noise_variance == pytest.approx(0.25, rel=0.3)
    fresh, _ = problem_of("gaussian", n=400, seed=1)
    mean, var = fit.state.posterior().mean_and_variance(fresh.data.X)
    square = (fresh.data.y - mean).square() / (var + fit.noise_variance)
    assert float(square.mean()) == pytest.approx(1.0, abs=0.3)


def test_fit_sparse_by_the_square_loss_at_beta_1_has_the_mean_of_the_process():
    """Under the hyper-parameters of the bound, whatever their amplitude."""
    problem, _ = problem_of("gaussian")
    kernel = ConstantKernel(1.0) * RBF([0.9, 1.6], "fixed")
    problem = replace(problem, kernel=kernel)
    settings = Settings(start_iter=100, tol=1e-12, joint=False)
    fit = run(problem, Objective(GAUSSIAN, name="square_loss"), settings)
    bound = Objective(GAUSSIAN, name="elbo")
    begun = begin(problem, Objective(GAUSSIAN, name="square_loss"), settings)
    expected = bound.with_optimum(begun, problem.data).posterior().mean(problem.data.X)
    found = fit.state.posterior().mean(problem.data.X)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_fit_sparse_by_the_square_loss_again_means_the_same_by_beta():
    """A warm start, whose noise is that of the beta before, is no reason to count beta twice."""
    problem, made = problem_of("gaussian")
    objective = Objective(made, name="square_loss", beta=0.1)
    settings = replace(QUICK, joint=False)
    first = run(problem, objective, settings)
    again = run(problem, objective, settings, start=first.state)
    found, expected = (f.state.posterior().mean(problem.data.X) for f in (again, first))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_fit_sparse_by_the_square_loss_of_constant_targets_is_finite():
    """No residuals, from which no variance could be learned."""
    problem, _ = problem_of("gaussian")
    fit, _ = square_fit(replace(problem, y=np.zeros(120)))
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    np.testing.assert_allclose(mean, 0, atol=1e-6)
    assert 0 < fit.noise_variance < 1e-6 and (var >= 0).all() and var.isfinite().all()


# ---- the choice of beta --------------------------------------------------------------------------

PROBIT = Bernoulli("probit")


@pytest.mark.parametrize(
    ("made", "target", "name"),
    [
        slow_case(GAUSSIAN, "gaussian", "log_loss"),
        (GAUSSIAN, "gaussian", "square_loss"),
        (PROBIT, "labels", "log_loss"),
    ],
)
def test_fit_beta_path_chooses_among_its_path_at_the_cost_of_few_fits(made, target, name):
    problem = dense.make_problem(n=80, target=target)
    objective = Objective(made, name=name)
    settings = Settings(start_iter=10, max_iter=10)
    fit, path = run_path(problem, objective, settings)
    chosen = replace(objective, beta=fit.objective.beta, unit=fit.objective.unit)
    assert replace(fit.objective, likelihood=made) == chosen
    assert fit.objective.beta in path and list(path) == [b for b in BETAS if b in path]
    # No weight is chosen that predicts worse than that of Bayes' rule.
    assert len(path) >= 3 and path[fit.objective.beta] <= path[1.0]
    assert fit.history["validation"] == list(path.values())
    assert fit.held_out_loss not in path.values()
    single = run(problem, objective, settings)
    assert fit.n_iter <= 5 * single.n_iter
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all()


def test_fit_beta_path_prefers_much_regularisation_where_the_noise_is_understated():
    """Noise of a tenth of its variance: the posterior of Bayes' rule is far too sure."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (200, 1))
    y = np.sin(2 * X[:, 0]) + 0.5 * rng.standard_normal(200)
    problem = dense.Problem(RBF(1.0), X, y, np.linspace(-3, 3, 20)[:, None])
    likelihood = Gaussian(0.025, bounds=(0.025, 0.025))
    objective = Objective(likelihood, "elbo", learn_kernel=False, learn_inducing=False)
    fit, path = run_path(problem, objective)
    assert fit.objective.beta > 1 and path[fit.objective.beta] < path[1.0] - 0.1


@pytest.mark.slow
def test_fit_beta_path_is_no_worse_than_beta_1_for_a_smooth_function():
    """Points enough for it: great weights first would leave the search in a poorer optimum."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (1200, 1))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(1200)
    kernel = dense.KERNELS["rbf"]().k1 * RBF(1.0)
    problem = dense.Problem(kernel, X[:300], y[:300], np.linspace(-3, 3, 12)[:, None])
    fresh = dense.Problem(kernel, X[300:], y[300:], problem.Z)
    objective = Objective(GAUSSIAN)
    settings = Settings(start_iter=30, max_iter=30)
    chosen, _ = run_path(problem, objective, settings)
    single = run(problem, objective, settings)
    losses = [
        float(held_out_losses(fit.state, objective, fresh.data).mean()) for fit in (chosen, single)
    ]
    assert losses[0] < losses[1] + 0.05


@pytest.mark.slow
def test_the_loss_reported_is_that_of_new_data():
    """Mean over data sets of the loss reported, against that of new data."""
    gaps = []
    for seed in range(4):
        problem = dense.make_problem(n=60, seed=seed)
        fresh = dense.make_problem(n=300, seed=100 + seed)
        fit, path = run_path(problem, Objective(GAUSSIAN), Settings(5, 15))
        new = float(held_out_losses(fit.state, fit.objective, fresh.data).mean())
        gaps.append(fit.held_out_loss - new)
    error = np.std(gaps, ddof=1) / len(gaps) ** 0.5
    assert np.mean(gaps) > -3 * error
