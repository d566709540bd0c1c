"""What follows a start: more points, a wider q(u), means of least squares, rows in batches."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.data import Data
from skgp.inference.collapsed import evidence_ratio, square_posterior, statistics
from skgp.inference.sparse import SparseState, natural_gradients
from skgp.learning import defaults
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.refine import (
    Blend,
    blended,
    broadened,
    choose_blend,
    grown,
    update,
)
from skgp.learning.sparse.search import fit_all_rows, held_out_losses
from skgp.learning.sparse.start import Problem, Settings
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.dlm import fit_sparse
from skgp.optim.stopping import StopRecorder
from tests.reference import sparse as dense
from tests.same import assert_same

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))


STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))


OTHERS = {
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (STUDENT, "student_t"),
}


LIKELIHOODS = {"gaussian": (GAUSSIAN, "gaussian")} | OTHERS


weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def problem_of(likelihood, n_latent=1, offset=0.3, **options):
    made, target = LIKELIHOODS[likelihood]
    problem = replace(dense.make_problem(target=target, **options), offset=offset)
    parameters = made.initial(torch.zeros(1, dtype=torch.float64))
    return problem, made, problem.state(parameters, n_latent)


# ---- towards the log-loss -----------------------------------------------------------------------


def at_the_bound(likelihood, *, beta=1.0, learn_likelihood=True, **options):
    """A problem, a state at the optimum of its evidence bound, and the log-loss objective."""
    problem, made, state = problem_of(likelihood, **options)
    objective = Objective(made, name="log_loss", beta=beta, learn_likelihood=learn_likelihood)
    made = objective.likelihood.with_parameters(state.likelihood)
    state = natural_gradients(state, problem.data, made, max_iter=100, tol=1e-10)
    return problem, state, objective


@weights
@pytest.mark.parametrize("beta", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_broadened_does_not_raise_the_log_loss_and_keeps_the_mean(likelihood, beta, weighted):
    problem, state, objective = at_the_bound(likelihood, beta=beta, weighted=weighted)
    found = broadened(state, problem.data, objective)
    before, after = (objective.total(s, problem.data) for s in (state, found))
    assert after <= before + 1e-9 * abs(before)
    assert torch.equal(found.mean, state.mean) and torch.equal(found.root, found.root.tril())
    assert (found.root.diagonal(dim1=1, dim2=2) > 0).all()
    assert torch.equal(found.Z, state.Z) and found.kernel is state.kernel


def test_broadened_lowers_the_log_loss_where_little_regularisation_asks_for_width():
    problem, state, objective = at_the_bound("gaussian", beta=0.01, n=200)
    found = broadened(state, problem.data, objective)
    before, after = (objective.total(s, problem.data) for s in (state, found))
    assert after < before - 1
    widths = [torch.logdet(s.root[0] @ s.root[0].mT) for s in (state, found)]
    assert widths[1] > widths[0] + 1


def test_broadened_takes_the_best_pair_of_its_grid():
    """Against every pair by explicit inverses."""
    problem, state, objective = at_the_bound("gaussian", beta=0.1, n=100)
    S = (state.root[0] @ state.root[0].mT).numpy()
    eye = np.eye(9)
    losses = []
    for width in defaults.WIDTHS:
        wide = np.linalg.inv(eye + (np.linalg.inv(S) - eye) / width)
        root = torch.tensor(np.linalg.cholesky(wide))[None]
        for factor in defaults.LESS_NOISE:
            likelihood = (state.likelihood + np.log(factor)).clamp_min(np.log(1e-4))
            candidate = replace(state, root=root, likelihood=likelihood)
            losses.append(objective.total(candidate, problem.data))
    found = objective.total(broadened(state, problem.data, objective), problem.data)
    assert found == pytest.approx(min(losses), rel=1e-8)


def test_broadened_keeps_noise_within_bounds_and_degrees_of_freedom():
    problem, state, objective = at_the_bound("student_t", beta=0.01, n=200)
    narrow = StudentT(0.5, 4.0, scale_bounds=(0.2**0.5, 2.2), df_bounds=(2.1, 200.0))
    found = broadened(state, problem.data, replace(objective, likelihood=narrow))
    assert found.likelihood[0].exp() >= 0.2 - 1e-12
    assert found.likelihood[1] == state.likelihood[1]


def test_broadened_looks_at_some_rows_weighed_as_all(monkeypatch):
    """Every third row, the divergence a third: the same as those rows and a third of beta."""
    problem, state, objective = at_the_bound("gaussian", beta=0.3, n=120)
    monkeypatch.setattr(defaults, "GRID_ROWS", 40)
    found = broadened(state, problem.data, objective)
    some = problem.data.take(torch.arange(0, 120, 3))
    expected = broadened(state, some, replace(objective, beta=0.1))
    torch.testing.assert_close(found.root, expected.root)
    torch.testing.assert_close(found.likelihood, expected.likelihood)


def test_broadened_by_nothing_returns_its_posterior_in_either_precision(dtype, monkeypatch):
    """Also where variances of q(w) are below the rounding error of the greatest."""
    monkeypatch.setattr(defaults, "WIDTHS", (1.0,))
    problem, made, state = problem_of("gaussian")
    directions, _ = torch.linalg.qr(dense.random_posterior(9)[1][0])
    stds = torch.logspace(-5, 0.3, 9, dtype=torch.float64)
    upper = torch.linalg.qr((directions * stds).mT).R
    root = (upper * upper.diagonal().sign()[:, None]).mT[None]
    state = state.with_posterior(state.mean, root)
    names = ("likelihood", "Z", "mean", "root", "offset")
    state = replace(state, **{name: getattr(state, name).to(dtype) for name in names})
    data = Data(problem.data.X.to(dtype), problem.data.y.to(dtype))
    found = broadened(state, data, Objective(made, learn_likelihood=False))
    assert found.root.dtype == dtype
    scale = state.root.abs().amax(dim=2, keepdim=True)  # of each row
    error = ((found.root - state.root) / scale).abs().max()
    assert error < (1e-9 if dtype == torch.float64 else 1e-2)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_broadened_does_not_sample(gradient):
    problem, state, objective = at_the_bound("probit", beta=0.1)
    found = broadened(state, problem.data, replace(objective, gradient=gradient))
    torch.testing.assert_close(found.root, broadened(state, problem.data, objective).root)


def test_broadened_does_not_raise_the_loss_of_a_posterior_wider_than_the_prior():
    """As a warm start by the log-loss can be, or the bound of Student's t."""
    problem, made, state = problem_of("gaussian", offset=3.0)
    objective = Objective(made, name="log_loss", beta=1e-3, learn_likelihood=False)
    state = state.with_posterior(state.mean, 2 * state.root)
    before = objective.total(state, problem.data)
    assert objective.total(broadened(state, problem.data, objective), problem.data) <= before


# ---- points --------------------------------------------------------------------------------------


def points(kernel, n_points=12):
    return torch.linspace(-3, 3, n_points, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("length_scale", "sizes"), [(3.0, {12}), (0.4, {24, 48}), (0.1, {48})])
def test_points_grow_where_held_out_data_gain(length_scale, sizes):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (600, 1))
    y = np.sin(2 * X[:, 0] / length_scale) + 0.2 * rng.standard_normal(600)
    problem = dense.Problem(RBF(length_scale), X, y, points(None).numpy())
    objective = Objective(Gaussian(0.04, bounds=(1e-4, 1.0)))
    noise = torch.tensor([math.log(0.04)], dtype=torch.float64)
    start = SparseState.prior(problem.kernel, noise, points(None), torch.zeros(1).double())
    problem = Problem(
        [problem.kernel],
        problem.data,
        objective,
        Settings(sizes=(24, 48)),
        points,
        start.offset,
        torch.Generator().manual_seed(0),
        StopRecorder(None),
    )
    found = grown(start, problem)
    assert len(found.Z) in sizes
    assert (found is start) == (len(found.Z) == 12)
    assert grown(start, replace(problem, settings=Settings())) is start


# ---- means ---------------------------------------------------------------------------------------

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))


OBJECTIVE = Objective(GAUSSIAN)


def problem_and_state(*, weighted=False, shift=0.0):
    """A problem, and a state of the mean of least squares but for a shift in all directions."""
    problem = dense.make_problem(n=150, weighted=weighted)
    state = problem.state(GAUSSIAN.initial(problem.tensors[0]))
    sums = statistics(state.kernel, problem.data, state.Z)
    mean, root = square_posterior(sums, beta=evidence_ratio(sums))
    return problem, state.with_posterior(mean + shift, root)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_blended_lies_between_the_mean_and_that_of_least_squares(weighted):
    problem, state = problem_and_state(weighted=weighted, shift=1.0)
    sums = statistics(state.kernel, problem.data, state.Z)
    least_squares, _ = square_posterior(sums, beta=0.05)
    for share in (0.0, 0.3, 1.0):
        found = blended(state, problem.data, Blend(share, 0.05))
        expected = (1 - share) * state.mean + share * least_squares
        torch.testing.assert_close(found.mean, expected, rtol=1e-8, atol=1e-8)
        assert_same(found.root, state.root)


def test_choose_blend_takes_the_least_squares_where_the_mean_is_bad():
    problem, state = problem_and_state(shift=2.0)
    fresh = dense.make_problem(n=150, seed=1)
    assert choose_blend(state, problem.data, fresh.data, OBJECTIVE).share == 1.0


def test_choose_blend_lowers_both_losses_of_the_rows_held_out():
    problem, state = problem_and_state(shift=0.15)
    fresh = dense.make_problem(n=150, seed=1)
    blend = choose_blend(state, problem.data, fresh.data, OBJECTIVE)

    def both(share):
        moved = blended(state, problem.data, replace(blend, share=share))
        loss, square = (
            held_out_losses(moved, replace(OBJECTIVE, name=name), fresh.data).mean()
            for name in ("log_loss", "square_loss")
        )
        return float(loss + 0.5 * square.log())

    assert 0 < blend.share and both(blend.share) < both(0.0) - 2e-3
    assert both(blend.share) < min(both(share) for share in defaults.BLEND_SHARES) + 0.05


# ---- rows in batches -----------------------------------------------------------------------------


def stream_of(likelihood, n=90, **options):
    return problem_of(likelihood, offset=0.0, n=n, **options)


LONG = {"max_iter": 300, "tol": 1e-12}


def batches(data, *sizes):
    return [data.take(index) for index in torch.arange(len(data)).split(list(sizes))]


def stream(state, parts, objective, **options):
    for part in parts:
        state = update(state, part, objective, **(LONG | options))
    return state


def at_once(state, data, objective):
    """Optimum of the posterior for all rows."""
    fixed = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
    return fit_all_rows(state, data, replace(objective, **fixed), **LONG).state


# ---- closed forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("name", "beta"), [("elbo", 1.0), ("elbo", 0.2), ("fitc", 1.0)])
def test_update_by_batches_equals_all_rows_at_once(name, beta, weighted):
    problem, made, prior = stream_of("gaussian", weighted=weighted)
    objective = Objective(made, name=name, beta=beta)
    expected = objective.with_optimum(prior, problem.data)
    mean, root = expected.mean, expected.root
    for sizes in ((90,), (30, 60), (1, 1, 40, 48)):
        found = stream(prior, batches(problem.data, *sizes), objective)
        torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.root, root, rtol=1e-8, atol=1e-8)
        assert torch.equal(found.Z, prior.Z) and torch.equal(found.likelihood, prior.likelihood)


def test_update_after_the_square_loss_has_its_mean_for_all_rows():
    """The fit ends as a Gaussian process, whose kernel and noise have a common factor."""
    problem, made, _ = stream_of("gaussian")
    first, second = batches(problem.data, 50, 40)
    objective = Objective(made, name="square_loss", beta=0.2)
    fit = fit_sparse(
        Problem(
            [problem.kernel],
            first,
            objective,
            Settings(start_iter=5, max_iter=5, early_stopping=False),
            lambda kernel: problem.tensors[0],
            torch.zeros(1, dtype=torch.float64),
            torch.Generator().manual_seed(0),
            StopRecorder(None),
        )
    )
    found = update(fit.state, second, objective, **LONG)
    sums = statistics(fit.state.kernel, problem.data, fit.state.Z)
    expected = square_posterior(sums, beta=0.2 * fit.objective.unit)
    torch.testing.assert_close(found.mean, expected[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.root, expected[1], rtol=1e-7, atol=1e-7)


# ---- searches -----------------------------------------------------------------------------------


def test_update_without_the_closed_form_finds_the_conjugate_posterior():
    """Student's t of many degrees of freedom is Gaussian noise."""
    problem, made, prior = stream_of("gaussian")
    many = 1e7
    student = StudentT(0.3**0.5, many, scale_bounds=(0.01, 2.2))
    start = replace(prior, likelihood=student.initial(prior.Z))
    parts = batches(problem.data, 50, 40)
    expected = stream(prior, parts, Objective(made, name="elbo"))
    found = stream(start, parts, Objective(student, name="elbo"))
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.root, expected.root, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["log_loss", "elbo"])
@pytest.mark.parametrize("likelihood", ["gaussian", "student_t", "probit", "poisson"])
def test_update_of_the_prior_by_all_rows_is_their_optimum(likelihood, name):
    problem, made, prior = stream_of(likelihood)
    objective = Objective(made, name=name, beta=0.7)
    found = update(prior, problem.data, objective, **LONG)
    if name == "log_loss" and likelihood != "probit":
        objective = replace(objective, beta=0.7 * defaults.LOG_LOSS_WEIGHT)
    expected = at_once(prior, problem.data, objective)
    losses = [objective.total(s, problem.data) for s in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("likelihood", "name", "tolerance"),
    [
        ("probit", "elbo", 0.15),
        ("poisson", "elbo", 0.15),
        ("student_t", "elbo", 0.3),
        ("gaussian", "log_loss", 0.3),
        ("probit", "log_loss", 0.3),
    ],
)
def test_update_by_batches_is_near_all_rows_at_once(likelihood, name, tolerance):
    """Root mean square distance of the means, in standard deviations of the prior of f."""
    problem, made, prior = stream_of(likelihood, n=150)
    objective = Objective(made, name=name)
    parts = batches(problem.data, 50, 50, 50)
    first = at_once(prior, parts[0], objective)
    found = stream(first, parts[1:], objective)
    expected = at_once(prior, problem.data, objective)
    means = [s.posterior().mean(problem.data.X) for s in (found, expected, first)]
    distance, before = (
        float((mean - means[1]).square().mean().sqrt()) for mean in (means[0], means[2])
    )
    assert distance < tolerance and distance < before
    losses = [objective.total(s, problem.data) for s in (prior, first, found, expected)]
    assert losses[0] > losses[1] > losses[2] > losses[3] - 1e-6


@pytest.mark.parametrize(("likelihood", "weight"), [("probit", 1.0), ("gaussian", 10.0)])
def test_update_minimises_the_batch_and_the_divergence_from_the_posterior_before(
    likelihood, weight
):
    """The objective of the module docstring, by dense formulas: any other posterior has more."""
    problem, made, prior = stream_of(likelihood)
    first, second = batches(problem.data, 50, 40)
    objective = Objective(made, name="log_loss", beta=0.6)
    before = update(prior, first, objective, **LONG)
    after = update(before, second, objective, **LONG)

    def value(state):
        rows = replace(objective, beta=0.0).total(state, second)
        S, prior_S = ((s.root[0] @ s.root[0].mT).numpy() for s in (state, before))
        shift = (state.mean - before.mean)[:, 0].numpy()
        return rows + 0.6 * weight * dense.divergence(shift, S, prior_S)

    least = value(after)
    assert least < value(before)
    generator = torch.Generator().manual_seed(0)
    for size in (0.01, 0.1):
        for _ in range(5):
            shift, turn = (
                size * torch.randn(t.shape, generator=generator, dtype=torch.float64)
                for t in (after.mean, after.root)
            )
            root = before.root @ (torch.eye(9).double() + turn.tril())
            root = after.root @ torch.linalg.solve(before.root, root)
            assert value(after.with_posterior(after.mean + shift, root)) > least


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_update_does_not_sample(gradient):
    """A stream has all rows of a batch at hand: its gradients are exact."""
    problem, made, prior = stream_of("probit")
    options = {"max_iter": 10, "tol": 0.0}
    found = update(prior, problem.data, Objective(made, gradient=gradient), **options)
    expected = update(prior, problem.data, Objective(made), **options)
    torch.testing.assert_close(found.mean, expected.mean)
