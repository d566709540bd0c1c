"""The objectives against dense formulas, held-out data, posteriors that go on with more rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.data import Data
from skgp.inference.collapsed import square_posterior, statistics
from skgp.learning.sparse import defaults
from skgp.learning.sparse import objective as module
from skgp.learning.sparse import objective as objective_module
from skgp.learning.sparse.objective import (
    BestState,
    Objective,
    Problem,
    Settings,
    held_out_losses,
    split,
    update,
)
from skgp.learning.sparse.search import fit_all_rows
from skgp.likelihoods import Gaussian, StudentT
from skgp.models.dlm import fit_sparse
from skgp.optim.stopping import StopRecorder
from tests.covering import covering
from tests.reference import sparse as dense
from tests.reference.sparse import LIKELIHOODS, problem_of, random_problem

weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def loss_of(state, data, objective):
    return float(objective.posterior_loss(state, data))


@weights
@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_posterior_loss_equals_the_dense_objective(likelihood, loss, weighted):
    problem, made, state = random_problem(likelihood, weighted=weighted)
    q = dense.unwhitened(problem.kernel, problem.Z, state.mean[:, 0].numpy(), state.root[0].numpy())
    for beta in (0.0, 0.3, 1.0):
        expected = dense.objective(problem, dense.LOG_PROB[likelihood], *q, loss=loss, beta=beta)
        # Gauss-Hermite with 200 nodes errs near the singularities of Student's t.
        tolerance = 1e-4 if likelihood == "student_t" else 1e-8
        objective = Objective(made, name=loss, beta=beta)
        assert loss_of(state, problem.data, objective) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_posterior_loss_has_the_gradients_of_finite_differences(likelihood, loss):
    problem, made, state = random_problem(likelihood, n=6, n_inducing=3, weighted=True)
    names = [n for n in ("likelihood", "Z", "mean", "root") if len(getattr(state, n))]
    inputs = [torch.tensor(state.kernel.theta), *(getattr(state, n).clone() for n in names)]
    inputs = [value.requires_grad_() for value in inputs]
    objective = Objective(made, name=loss, beta=0.4)

    def value(theta, *parts):
        moved = replace(state, **dict(zip(names, parts, strict=True)))
        return objective.posterior_loss(moved, problem.data, theta)

    assert torch.autograd.gradcheck(value, inputs, atol=1e-4, rtol=1e-3, fast_mode=True)


def test_posterior_loss_of_several_functions_is_the_sum_of_theirs():
    problem, made, _ = random_problem("probit")
    labels = torch.stack([problem.data.y[:, 0], -problem.data.y[:, 0]], dim=1)
    mean, root = dense.random_posterior(9, 2)
    objective = Objective(made, name="log_loss", beta=0.3)
    both = problem.state(torch.empty(0), n_latent=2).with_posterior(mean, root)
    data = Data(problem.data.X, labels)
    found = loss_of(both, data, objective)
    expected = 0.0
    for c in range(2):
        one = problem.state(torch.empty(0)).with_posterior(mean[:, c : c + 1], root[c : c + 1])
        part = Data(data.X, labels[:, c : c + 1])
        expected += loss_of(one, part, objective)
    assert found == pytest.approx(expected, rel=1e-12)


def test_posterior_loss_scales_the_rows_alone():
    problem, made, state = random_problem("logit")
    objective = Objective(made, beta=0.5)
    once, thrice, rows = (
        float(o.posterior_loss(state, problem.data, scale=s))
        for o, s in ((objective, 1.0), (objective, 3.0), (replace(objective, beta=0.0), 1.0))
    )
    assert thrice - once == pytest.approx(2 * rows, rel=1e-12)


@pytest.mark.parametrize("loss", ["elbo", "log_loss"])
def test_total_loss_is_the_objective_whatever_the_blocks(loss, monkeypatch):
    problem, made, state = random_problem("student_t", weighted=True)
    objective = Objective(made, name=loss, beta=0.4)
    expected = loss_of(state, problem.data, objective)
    for numbers in (1, 9 * 7, 1e7):
        monkeypatch.setattr(defaults, "BLOCK_NUMBERS", numbers)
        assert objective.total(state, problem.data) == pytest.approx(expected, rel=1e-12)


@weights
@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_posterior_loss_has_no_slope_at_the_collapsed_posterior(beta, weighted):
    problem, made, state = random_problem("gaussian", weighted=weighted)
    state = replace(state, offset=torch.zeros(1).double())
    objective = Objective(made, name="elbo", beta=beta)
    optimum = objective.with_optimum(state, problem.data)
    mean, root = (part.clone().requires_grad_() for part in (optimum.mean, optimum.root))
    loss = objective.posterior_loss(state.with_posterior(mean, root), problem.data)
    slopes = torch.autograd.grad(loss, (mean, root))
    np.testing.assert_allclose(slopes[0], 0, atol=1e-6)
    np.testing.assert_allclose(slopes[1].tril(), 0, atol=1e-6)


# ---- held-out data -------------------------------------------------------------------------------

NAN = float("nan")


LOG_LOSS = Objective(Gaussian(0.3, bounds=(1e-4, 5.0)))


def numbered(n, weighted=False):
    rows = torch.arange(float(n), dtype=torch.float64)[:, None]
    return Data(rows, rows, rows[:, 0] + 1 if weighted else None)


@pytest.mark.parametrize(
    ("n", "fraction", "n_out"),
    [(100, 0.1, 10), (7, 0.2, 1), (5, 0.01, 1), (10, 0.99, 9), (2, 0.9, 1), (1, 0.5, 0)],
)
def test_split_holds_out_a_fraction_of_the_rows(n, fraction, n_out, generator):
    kept, held_out = split(numbered(n, weighted=True), fraction, generator)
    assert (len(kept), len(held_out)) == (n - n_out, n_out)
    both = torch.cat([kept.X, held_out.X])[:, 0]
    assert torch.equal(both.sort().values, numbered(n).X[:, 0])
    for part in (kept, held_out):
        assert torch.equal(part.X, part.y) and torch.equal(part.weight, part.X[:, 0] + 1)
        assert torch.equal(part.X, part.X.sort(dim=0).values)


def test_split_holds_out_no_more_than_enough(generator, monkeypatch):
    monkeypatch.setattr(objective_module, "MAX_HELD_OUT", 5)
    kept, held_out = split(numbered(100), 0.5, generator)
    assert (len(kept), len(held_out)) == (95, 5)


def test_held_out_losses_are_those_of_the_predictions():
    problem = dense.make_problem()
    mean, root = dense.random_posterior(9)
    state = replace(problem.state(), offset=torch.tensor([0.4]).double())
    state = state.with_posterior(mean, root)
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    f, covariance = dense.predict(problem.kernel, problem.X, problem.Z, *q, 0.4)
    std = np.sqrt(np.diag(covariance) + problem.noise)
    found = held_out_losses(state, LOG_LOSS, problem.data)
    np.testing.assert_allclose(found, -stats.norm(f, std).logpdf(problem.y), rtol=1e-8)
    # Judged by the log-loss, whatever is trained on; but for the square loss.
    for name in ("elbo", "fitc"):
        assert torch.equal(
            held_out_losses(state, replace(LOG_LOSS, name=name), problem.data), found
        )
    square = held_out_losses(state, replace(LOG_LOSS, name="square_loss"), problem.data)
    np.testing.assert_allclose(square, 0.5 * (f - problem.y) ** 2, atol=1e-8)


@pytest.mark.parametrize("name", ["log_loss", "square_loss"])
def test_held_out_losses_average_to_those_of_repeated_rows(name):
    problem = dense.make_problem()
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    state = problem.state().with_posterior(*dense.random_posterior(9))
    weighted, repeated = (
        held_out_losses(state, replace(LOG_LOSS, name=name), p.data)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    assert float(weighted.mean()) == pytest.approx(float(repeated.mean()), rel=1e-12)


def watch_of(losses, monkeypatch):
    """A watch to which state number i has the loss ``losses[i]``."""
    monkeypatch.setattr(module, "held_out_losses", lambda i, *_: torch.full((3,), float(losses[i])))
    return BestState(LOG_LOSS, numbered(3))


def test_best_state_keeps_the_best(monkeypatch):
    watch = watch_of([5, 3, 4, 2, 6], monkeypatch)
    assert watch.loss == float("inf") and watch.losses == []
    assert not any(watch.score(i) for i in range(5))
    assert watch.best_state == 3 and watch.loss == 2.0 and watch.losses == [5, 3, 4, 2, 6]
    assert torch.equal(watch.best_rows, torch.full((3,), 2.0))


def test_best_state_stops_when_it_has_waited_long_enough(monkeypatch):
    watch = watch_of([5, 3, 4, 4, 2, 3, 3, 2, 3, 3, 3], monkeypatch)
    assert [watch.score(i) for i in range(11)] == [False] * 10 + [True]


@pytest.mark.parametrize("losses", [[NAN, 2, 3], [2, NAN, 3], [NAN, NAN, 2]])
def test_best_state_passes_over_nan(losses, monkeypatch):
    watch = watch_of(losses, monkeypatch)
    for i in range(3):
        watch.score(i)
    assert watch.best_state == losses.index(2) and watch.loss == 2.0


def test_best_state_asks_for_a_state_when_it_is_time(monkeypatch):
    watch = watch_of(range(10, 0, -1), monkeypatch)
    asked = []

    def state():
        asked.append(len(asked))
        return asked[-1]

    assert not any(watch(state) for _ in range(15))
    assert asked == [0, 1, 2] and watch.losses == [10, 9, 8]


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


@covering(likelihood=["gaussian", "student_t", "probit", "poisson"], name=["log_loss", "elbo"])
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
