"""Fits from kernel and rows to a posterior: every objective and family, every way to end."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.data import Data
from skgp.inference.sparse.collapsed import statistics
from skgp.inference.sparse.square_loss import calibrated_variance, ridge, square_posterior
from skgp.learning.sparse import bound_search
from skgp.learning.sparse.blending import Blend
from skgp.learning.sparse.bound_search import start_state
from skgp.learning.sparse.holdout import held_out_losses
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.training import Training, fit_posterior, total_loss
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.dlm import fit as module
from skgp.models.dlm.fit import fit_sparse, has_closed_form, minimise
from skgp.optim.stopping import StopRecorder
from tests.reference import sparse as dense
from tests.same import assert_same

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))
FAMILIES = {
    "gaussian": (GAUSSIAN, "gaussian"),
    "student_t": (
        STUDENT,
        "student_t",
    ),
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
}
CASES = [(family, name) for family in FAMILIES for name in ("log_loss", "elbo")]
CASES += [("gaussian", "square_loss"), ("gaussian", "fitc")]
OF_GAUSSIAN = [case for case in CASES if case[0] == "gaussian"]
ALONE = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
HELD_OUT = ("log_loss", "square_loss")  # objectives that keep rows from a joint search
QUICK = Settings(start_iter=10, max_iter=10)


def problem_of(family, n=120, **options):
    family, target = FAMILIES[family]
    return dense.make_problem(n=n, target=target, **options), family


def run(problem, objective, settings=QUICK, *, kernels=None, seed=0, offset=0.0, **options):
    return fit_sparse(
        kernels or [problem.kernel],
        problem.data,
        objective,
        settings,
        inducing=options.pop("inducing", lambda kernel: problem.tensors[0]),
        offset=torch.tensor([offset], dtype=torch.float64),
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def begin(problem, objective, settings, *, kernels=None):
    """The state after steps 1 and 2."""
    return start_state(
        kernels or [problem.kernel],
        problem.data,
        objective,
        settings,
        lambda kernel: problem.tensors[0],
        torch.zeros(1, dtype=torch.float64),
        torch.Generator().manual_seed(0),
        StopRecorder(None),
    ).state


# ---- all objectives and families ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "name", "early_stopping"),
    [(*c, early) for c in CASES for early in (True, False) if early or c[1] in HELD_OUT],
)
def test_fit_sparse_predicts_fresh_rows_better_than_it_began(family, name, early_stopping):
    problem, made = problem_of(family)
    fresh, _ = problem_of(family, seed=1)
    objective = Objective(made, name=name, beta=0.5)
    offset = float(np.log(problem.y.mean())) if family == "poisson" else 0.0
    fit = run(problem, objective, replace(QUICK, early_stopping=early_stopping), offset=offset)
    prior = replace(problem, offset=offset).state(made.initial(problem.tensors[0]))
    before, after = (
        held_out_losses(state, objective, fresh.data).mean() for state in (prior, fit.state)
    )
    assert after < before - 0.1
    # What every fit reports.
    bound = replace(objective, name="elbo", beta=1.0)
    assert fit.elbo == pytest.approx(-total_loss(fit.state, problem.data, bound), rel=1e-9)
    if name == "log_loss":
        expected = total_loss(fit.state, problem.data, objective)
        assert fit.loss == pytest.approx(expected, rel=1e-8)
    unit = fit.objective.unit
    assert (unit != 1.0) == (name == "square_loss")
    assert np.isfinite(fit.loss) and fit.objective == replace(objective, unit=unit)
    assert 0 < len(fit.history["start"]) <= 10 and 0 < len(fit.history["solve"]) <= 10
    assert fit.n_iter == len(fit.history["solve"])  # the longest part after the start
    noise = made.with_parameters(fit.state.likelihood).additive_variance()
    np.testing.assert_equal(fit.noise_variance, noise)  # NaN equals NaN
    held_out = early_stopping and name in HELD_OUT
    assert bool(fit.history["validation"]) == (fit.held_out_loss is not None) == held_out


def test_fit_sparse_by_the_bound_is_at_the_optimum_of_the_general_search():
    """The collapsed form, then q(u) and hyper-parameters free: nothing is left to gain."""
    problem, made = problem_of("gaussian")
    objective = Objective(made, name="elbo")
    fit = run(problem, objective, Settings(start_iter=100, max_iter=200, tol=1e-10))
    assert fit.loss == pytest.approx(-fit.elbo, rel=1e-8)
    free = fit_posterior(fit.state, problem.data, objective, max_iter=40, tol=0.0)
    assert free.loss == pytest.approx(fit.loss, rel=1e-4) and free.loss <= fit.loss + 1e-6


def test_fit_sparse_by_the_bound_finds_the_optimum_without_the_closed_form():
    """The same data, as Student's t with very many degrees of freedom: no closed form."""
    problem, made = problem_of("gaussian", n=60)
    many = 1e6
    student = StudentT(0.3**0.5, many, scale_bounds=(0.01, 2.2))
    objective = Objective(made, name="elbo", learn_inducing=False)
    settings = Settings(start_iter=60, max_iter=150, tol=1e-9)
    losses = [run(problem, replace(objective, family=f), settings).loss for f in (made, student)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_fit_sparse_of_several_functions_shares_kernel_and_points():
    problem, made = problem_of("probit")
    data = Data(problem.data.X, torch.cat([problem.data.y, -problem.data.y], dim=1))
    fit = fit_sparse(
        [problem.kernel],
        data,
        Objective(made),
        QUICK,
        inducing=lambda kernel: problem.tensors[0],
        offset=torch.zeros(2).double(),
        generator=torch.Generator().manual_seed(0),
    )
    assert fit.state.mean.shape == (9, 2) and fit.state.root.shape == (2, 9, 9)
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    # The labels of the second are those of the first with the other sign.
    torch.testing.assert_close(mean[:, 0], -mean[:, 1], rtol=0, atol=0.1)
    torch.testing.assert_close(var[:, 0], var[:, 1], rtol=0.2, atol=0.1)


def test_fit_sparse_of_weights_is_that_of_repeated_rows():
    problem, made = problem_of("gaussian", n=60)
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    settings = Settings(start_iter=5, max_iter=5, early_stopping=False)
    for name in ("log_loss", "elbo", "square_loss", "fitc"):
        weighted, repeated = (
            run(p, Objective(made, name=name, beta=0.3), settings)
            for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
        )
        assert weighted.loss == pytest.approx(repeated.loss, rel=1e-6)
        mean, var = weighted.state.posterior().mean_and_variance(problem.data.X)
        expected = repeated.state.posterior().mean_and_variance(problem.data.X)
        torch.testing.assert_close(mean, expected[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(var, expected[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["log_loss", "elbo", "square_loss"])
def test_fit_sparse_of_beta_0_is_finite(name):
    problem, made = problem_of("gaussian", n=40)
    fit = run(problem, Objective(made, name=name, beta=0.0))
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all() and np.isfinite([fit.loss, fit.elbo]).all()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("family", "name"), CASES)
def test_fit_sparse_of_hardly_any_rows_is_finite(family, name, n):
    problem, made = problem_of(family, n=n, n_inducing=n)
    settings = Settings(start_iter=3, max_iter=3, early_stopping=n > 1)
    fit = run(problem, Objective(made, name=name), settings)
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and var.isfinite().all()


@pytest.mark.parametrize("name", ["log_loss", "elbo", "square_loss", "fitc"])
def test_fit_sparse_in_single_precision_predicts_as_in_double(name):
    problem, made = problem_of("gaussian")
    objective = Objective(made, name=name, **ALONE)
    double = run(problem, objective)
    data = Data(problem.data.X.float(), problem.data.y.float())
    single = fit_sparse(
        [problem.kernel],
        data,
        objective,
        QUICK,
        inducing=lambda kernel: problem.tensors[0].float(),
        offset=torch.zeros(1),
        generator=torch.Generator(),
    )
    assert single.state.mean.dtype == torch.float32
    found, expected = (
        f.state.posterior().mean_and_variance(problem.data.X) for f in (single, double)
    )
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.05)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0.05)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_fit_sparse_begins_sampled_gradients_without_sampling(gradient, monkeypatch):
    """Steps 1 and 2 and the step towards the log-loss are exact; minibatches take over."""
    problem, made = problem_of("probit")
    begun = []

    def stub(state, data, objective, **options):
        begun.append(state)
        return Training(state, 0.0)

    monkeypatch.setattr(module, "fit_minibatch", stub)
    settings = replace(QUICK, early_stopping=False)
    for objective in (Objective(made, gradient=gradient), Objective(made)):
        run(problem, objective, replace(settings, batch_size=10))
    torch.testing.assert_close(begun[0].root, begun[1].root)
    torch.testing.assert_close(begun[0].mean, begun[1].mean)


# ---- step 1: kernels ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "beta"), [("log_loss", 1.0), ("elbo", 0.3)])
def test_start_state_takes_the_kernel_of_the_best_bound(name, beta, monkeypatch):
    losses = {0.5: 3.0, 1.5: 1.0, 2.5: 2.0}
    seen = []

    def stub(state, data, objective, **options):
        seen.append((state.kernel.nu, objective.name, objective.beta))
        return Training(state, losses[state.kernel.nu])

    monkeypatch.setattr(bound_search, "fit_collapsed", stub)
    problem, made = problem_of("gaussian")
    kernels = [Matern(1.0, nu=nu) for nu in losses]
    begun = begin(problem, Objective(made, name=name, beta=0.3), QUICK, kernels=kernels)
    assert begun.kernel.nu == 1.5
    # All of them, then the best again, by the bound: with the weight of the divergence if that
    # is the objective.
    assert seen == [(nu, "elbo", beta) for nu in (*losses, 1.5)]


def test_fit_sparse_chooses_a_smooth_kernel_for_a_smooth_function():
    problem, made = problem_of("gaussian")
    kernels = [1.0 * Matern([0.7, 0.7], nu=nu) for nu in (0.5, np.inf)]
    fit = run(problem, Objective(made), kernels=kernels)
    assert fit.state.kernel.k2.nu == np.inf


def test_start_state_ranks_kernels_with_few_points_and_ends_with_all_and_more_rows(monkeypatch):
    """Minibatches come next, and gain less from each row."""
    problem, made = problem_of("gaussian")
    for name, value in {
        "_FAMILY_POINTS": 4,
        "_START_NUMBERS": 0,
        "_START_PER_INDUCING": 3,
        "_MORE_PER_INDUCING": 6,
    }.items():
        monkeypatch.setattr(bound_search, name, value)
    seen = []

    def stub(state, data, objective, **options):
        seen.append((len(state.Z), len(data), options["max_iter"]))
        return Training(state, state.kernel.nu, [1.0])

    monkeypatch.setattr(bound_search, "fit_collapsed", stub)
    kernels = [Matern(1.0, nu=nu) for nu in (1.5, 0.5)]
    begun = begin(problem, Objective(made), QUICK, kernels=kernels)
    assert begun.kernel.nu == 0.5 and torch.equal(begun.Z, problem.tensors[0])
    assert seen == [(3, 120, 30), (3, 120, 30), (9, 27, 10), (9, 54, 5)]
    seen.clear()
    begin(problem, Objective(made, name="elbo"), QUICK, kernels=kernels)
    assert seen[2:] == [(9, 27, 10)]


@pytest.mark.parametrize("n_kernels", [1, 2])
def test_fit_sparse_asks_for_points_once_a_kernel(n_kernels):
    """Clusters of many rows take their time."""
    problem, made = problem_of("gaussian", n=30)
    kernels = [problem.kernel, 1.0 * Matern(1.0, nu=0.5)][:n_kernels]
    asked = []
    run(
        problem,
        Objective(made),
        Settings(start_iter=1, max_iter=1),
        kernels=kernels,
        inducing=lambda kernel: asked.append(kernel) or problem.tensors[0],
    )
    assert asked == kernels


# ---- steps 3 and 4 ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gaussian", "student_t", "logit"])
def test_fit_sparse_with_fixed_hyperparameters_keeps_those_of_the_bound(family):
    problem, made = problem_of(family)
    settings = replace(QUICK, joint=False)
    objective = Objective(made, beta=0.01)
    fit = run(problem, objective, settings)
    begun = begin(problem, objective, settings)
    np.testing.assert_array_equal(fit.state.kernel.theta, begun.kernel.theta)
    assert torch.equal(fit.state.Z, begun.Z)
    assert torch.equal(fit.state.likelihood, begun.likelihood)
    assert not torch.equal(fit.state.mean, begun.mean)
    assert fit.history["validation"] == [] and fit.held_out_loss is None


def test_fit_sparse_by_the_square_loss_with_fixed_hyperparameters_keeps_the_points():
    problem, made = problem_of("gaussian")
    settings = replace(QUICK, joint=False)
    fit = run(problem, Objective(made, name="square_loss", beta=0.1), settings)
    bound = run(problem, Objective(made, name="elbo"), replace(settings, max_iter=1))
    assert fit.history["validation"] == []
    # Up to the amplitude, which its variances set.
    lengths = fit.state.kernel.theta[1:]
    assert lengths.shape == (2,) and len(fit.history["solve"]) == 0
    assert np.abs(lengths - bound.state.kernel.theta[1:]).max() < 0.5


@pytest.mark.parametrize("name", ["log_loss", "square_loss"])
def test_fit_sparse_with_early_stopping_keeps_the_best_state_for_rows_held_out(name):
    problem, made = problem_of("gaussian", n=150)
    objective = Objective(made, name=name, beta=0.1)
    fit = run(problem, objective, replace(QUICK, max_iter=60))
    losses = fit.history["validation"]
    # The first is of q(u) alone, which the joint search has to beat clearly.
    assert fit.held_out_loss in (min(losses), losses[0]) and len(losses) >= 2
    assert len(losses) - 1 <= len(fit.history["solve"]) / 5


@pytest.mark.parametrize("family", ["gaussian", "logit"])
def test_fit_sparse_with_early_stopping_learns_the_posterior_from_all_rows(family, monkeypatch):
    problem, made = problem_of(family)
    objective = Objective(made, beta=0.3)
    chosen = []
    finish = module.finish

    def spy(state, data, *args):
        chosen.append((state, len(data)))
        return finish(state, data, *args)

    monkeypatch.setattr(module, "finish", spy)
    fit = run(problem, objective, Settings(start_iter=10, max_iter=60, tol=1e-9))
    ((state, n_rows),) = chosen
    assert n_rows == 120
    np.testing.assert_array_equal(fit.state.kernel.theta, state.kernel.theta)
    assert torch.equal(fit.state.Z, state.Z) and torch.equal(fit.state.likelihood, state.likelihood)
    assert fit.loss < total_loss(state, problem.data, objective)
    alone = replace(objective, **ALONE)
    more = fit_posterior(fit.state, problem.data, alone, max_iter=50, tol=0.0)
    assert more.loss == pytest.approx(fit.loss, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "batch_size", "expected"),
    [("gaussian", 60, True), ("gaussian", None, False), ("logit", 60, False)],
)
def test_fit_sparse_by_minibatches_moves_the_mean_to_least_squares(
    family, batch_size, expected, monkeypatch
):
    """As the rows held out would have it; the loss reported is that of the mean moved."""
    problem, made = problem_of(family)
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
        assert fit.loss == pytest.approx(total_loss(fit.state, problem.data, objective))


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


def test_fit_sparse_is_reproducible():
    problem, made = problem_of("logit", n=60)
    first, second = (run(problem, Objective(made), seed=3) for _ in range(2))
    assert_same(first.loss, second.loss)
    assert_same(first.state.root, second.state.root)


def test_fit_sparse_begins_where_it_is_told():
    problem, made = problem_of("gaussian")
    objective = Objective(made, name="elbo")
    long = run(problem, objective, Settings(start_iter=60, max_iter=100, tol=1e-9))

    def no_points(kernel):
        raise AssertionError("a start has its points")

    again = run(problem, objective, start=long.state, inducing=no_points)
    assert again.history["start"] == []
    assert again.loss == pytest.approx(long.loss, rel=1e-5)


# ---- callbacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 14, 25])
@pytest.mark.parametrize(("family", "name"), [*OF_GAUSSIAN, ("logit", "log_loss")])
def test_fit_sparse_ends_usable_when_the_callback_stops(family, name, at):
    """In whatever stage iteration `at` lies; later stages take one iteration at most."""
    problem, made = problem_of(family, n=60)
    calls = []

    def callback(iteration, info):
        calls.append((iteration, info["loss"]))
        return iteration >= at

    fit = run(problem, Objective(made, name=name), callback=callback)
    numbers = [number for number, _ in calls]
    assert numbers == list(range(1, len(calls) + 1)) and len(calls) <= at + 3
    assert fit.n_iter == max(len(fit.history["solve"]), 1)
    mean, var = fit.state.posterior().mean_and_variance(problem.data.X)
    assert mean.isfinite().all() and (var >= 0).all() and np.isfinite([fit.loss, fit.elbo]).all()


@pytest.mark.parametrize("gradient", ["bmc", "ups"])
@pytest.mark.parametrize("at", [1, 14])
def test_fit_sparse_of_sampled_gradients_ends_usable_when_the_callback_stops(gradient, at):
    problem, made = problem_of("probit", n=60)
    objective = Objective(made, gradient=gradient, n_gradient_samples=2)
    fit = run(problem, objective, callback=lambda iteration, info: iteration >= at)
    assert np.isfinite([fit.loss, fit.elbo]).all() and fit.state.root.isfinite().all()


def test_fit_sparse_tells_the_callback_every_iteration():
    problem, made = problem_of("gaussian")
    losses = []
    fit = run(
        problem,
        Objective(made),
        replace(QUICK, early_stopping=False),
        callback=lambda i, info: losses.append(info["loss"]),
    )
    assert losses == fit.history["start"] + fit.history["solve"]
    assert fit.n_iter == len(fit.history["solve"])


def test_fit_sparse_choosing_a_kernel_stops_when_told():
    problem, made = problem_of("gaussian")
    kernels = [problem.kernel, 1.0 * Matern(1.0, nu=0.5)]
    fit = run(problem, Objective(made), kernels=kernels, callback=lambda i, info: True)
    assert type(fit.state.kernel.k2) is RBF and fit.n_iter <= 4


# ---- how the objective is minimised -------------------------------------------------------------


def minimised(problem, objective, settings=QUICK, watch=None):
    state = problem.state()
    generator = torch.Generator().manual_seed(0)
    return minimise(state, problem.data, objective, settings, watch, generator, StopRecorder(None))


@pytest.mark.parametrize(
    ("name", "family", "expected"),
    [
        ("elbo", "gaussian", True),
        ("fitc", "gaussian", True),
        ("square_loss", "gaussian", True),
        ("log_loss", "gaussian", False),
        ("elbo", "student_t", False),
        ("elbo", "probit", False),
    ],
)
def test_closed_forms_are_those_of_gaussian_noise(name, family, expected):
    assert has_closed_form(Objective(FAMILIES[family][0], name=name)) == expected


SIZE = 120 * 9  # rows times inducing points


@pytest.mark.parametrize(
    ("objective", "settings", "joint", "alone", "expected"),
    [
        ({}, {}, SIZE, 0, "posterior"),
        ({}, {}, SIZE - 1, 1e9, "minibatch"),
        (ALONE, {}, 0, SIZE, "posterior"),
        (ALONE, {}, 1e9, SIZE - 1, "minibatch"),
        ({}, {"joint": False}, 0, SIZE, "posterior"),
        ({}, {"batch_size": 10}, 1e9, 1e9, "minibatch"),
        ({"gradient": "ups"}, {}, 1e9, 1e9, "minibatch"),
        ({"name": "elbo"}, {"batch_size": 10}, 1e9, 1e9, "collapsed"),
        ({"name": "square_loss"}, {}, 0, 90, "collapsed"),
        ({"name": "fitc", "gradient": "ups"}, {}, 0, 90, "collapsed"),
    ],
)
def test_minimise_takes_the_way_that_suits(
    objective, settings, joint, alone, expected, monkeypatch
):
    problem, made = problem_of("gaussian")
    called = []

    def stub(way):
        def search(state, data, objective, **options):
            called.append((way, options))
            return Training(state, 1.0)

        return search

    for way in ("posterior", "minibatch", "collapsed"):
        monkeypatch.setattr(module, f"fit_{way}", stub(way))
    monkeypatch.setattr(module, "_JOINT_NUMBERS", joint)
    monkeypatch.setattr(module, "_ALONE_NUMBERS", alone)
    minimised(problem, Objective(made, **objective), replace(QUICK, **settings))
    ((way, options),) = called
    assert way == expected
    if way == "minibatch":
        assert options["batch_size"] == settings.get("batch_size")
        assert options["max_iter"] == 10 * module._STEPS_PER_ITERATION
    else:
        assert options["max_iter"] == 10


@pytest.mark.parametrize(("family", "name"), [*OF_GAUSSIAN, ("logit", "log_loss")])
def test_minimise_when_stopped_takes_no_iteration(family, name):
    """Where there is a closed form the posterior is its optimum all the same."""
    problem, made = problem_of(family)
    objective = Objective(made, name=name)
    calls = []
    recorder = StopRecorder(lambda *call: calls.append(call))
    recorder.stopped = True
    state = problem.state(made.initial(problem.tensors[0]))
    found = minimise(state, problem.data, objective, QUICK, None, torch.Generator(), recorder)
    assert calls == []
    assert found.state.kernel == state.kernel and torch.equal(found.state.Z, state.Z)
    assert torch.equal(found.state.likelihood, state.likelihood)
    if has_closed_form(objective):
        posterior = module.collapsed_posterior(state, problem.data, objective)
        assert_same(found.state.mean, posterior[0])
    else:
        assert torch.equal(found.state.mean, state.mean)
        assert found.loss == pytest.approx(total_loss(state, problem.data, objective))


def test_minimise_of_many_rows_in_closed_form_learns_from_some(monkeypatch):
    """Hyper-parameters from some rows, of which each weighs more beside the divergence."""
    problem, made = problem_of("gaussian", weighted=True)
    monkeypatch.setattr(module, "_ALONE_NUMBERS", 9 * 50)
    seen = []
    fit_collapsed = module.fit_collapsed

    def spy(state, data, objective, **options):
        seen.append((data, objective.beta))
        return fit_collapsed(state, data, objective, **options)

    monkeypatch.setattr(module, "fit_collapsed", spy)
    objective = Objective(made, name="elbo", beta=0.7)
    found = minimised(problem, objective)
    ((data, beta),) = seen
    assert len(data) == 50
    assert beta == pytest.approx(0.7 * data.total / problem.data.total)
    # The posterior is of all rows.
    posterior = module.collapsed_posterior(found.state, problem.data, objective)
    assert_same(found.state.mean, posterior[0])


@pytest.mark.parametrize("name", ["log_loss", "elbo", "square_loss", "fitc"])
def test_minimise_with_fixed_hyperparameters_moves_those_of_the_bounds_alone(name):
    problem, made = problem_of("gaussian")
    found = minimised(problem, Objective(made, name=name), replace(QUICK, joint=False)).state
    moved = not np.array_equal(found.kernel.theta, problem.kernel.theta)
    assert moved == (name in ("elbo", "fitc"))


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
    mean, _ = module.collapsed_posterior(begun, problem.data, bound)
    expected = begun.with_posterior(mean, begun.root).posterior().mean(problem.data.X)
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
