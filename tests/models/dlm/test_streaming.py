"""Rows in batches against all rows at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.data import Data
from skgp.inference.sparse.collapsed import statistics
from skgp.inference.sparse.square_loss import square_posterior
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.training import collapsed_posterior, fit_posterior, total_loss
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.dlm.fit import fit_sparse
from skgp.models.dlm.streaming import LOG_LOSS_WEIGHT, update
from tests.reference import sparse as dense

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))
FAMILIES = {
    "gaussian": (GAUSSIAN, "gaussian"),
    "student_t": (
        STUDENT,
        "student_t",
    ),
    "probit": (Bernoulli("probit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
}
LONG = {"max_iter": 300, "tol": 1e-12}


def problem_of(family, n=90, **options):
    made, target = FAMILIES[family]
    problem = dense.make_problem(n=n, target=target, **options)
    return problem, made, problem.state(made.initial(problem.tensors[0]))


def batches(data, *sizes):
    return [data.take(index) for index in torch.arange(len(data)).split(list(sizes))]


def stream(state, parts, objective, **options):
    for part in parts:
        state = update(state, part, objective, **(LONG | options))
    return state


def at_once(state, data, objective):
    """Optimum of the posterior for all rows."""
    fixed = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}
    return fit_posterior(state, data, replace(objective, **fixed), **LONG).state


# ---- closed forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(("name", "beta"), [("elbo", 1.0), ("elbo", 0.2), ("fitc", 1.0)])
def test_update_by_batches_equals_all_rows_at_once(name, beta, weighted):
    problem, made, prior = problem_of("gaussian", weighted=weighted)
    objective = Objective(made, name=name, beta=beta)
    mean, root = collapsed_posterior(prior, problem.data, objective)
    for sizes in ((90,), (30, 60), (1, 1, 40, 48)):
        found = stream(prior, batches(problem.data, *sizes), objective)
        torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.root, root, rtol=1e-8, atol=1e-8)
        assert torch.equal(found.Z, prior.Z) and torch.equal(found.likelihood, prior.likelihood)


def test_update_after_the_square_loss_has_its_mean_for_all_rows():
    """The fit ends as a Gaussian process, whose kernel and noise have a common factor."""
    problem, made, _ = problem_of("gaussian")
    first, second = batches(problem.data, 50, 40)
    objective = Objective(made, name="square_loss", beta=0.2)
    fit = fit_sparse(
        [problem.kernel],
        first,
        objective,
        Settings(start_iter=5, max_iter=5, early_stopping=False),
        inducing=lambda kernel: problem.tensors[0],
        offset=torch.zeros(1, dtype=torch.float64),
        generator=torch.Generator().manual_seed(0),
    )
    found = update(fit.state, second, objective, **LONG)
    sums = statistics(fit.state.kernel, problem.data, fit.state.Z)
    expected = square_posterior(sums, beta=0.2 * fit.objective.unit)
    torch.testing.assert_close(found.mean, expected[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.root, expected[1], rtol=1e-7, atol=1e-7)


def test_update_by_the_bound_of_beta_0_is_finite():
    problem, made, prior = problem_of("gaussian")
    objective = Objective(made, name="elbo", beta=0.0)
    found = stream(prior, batches(problem.data, 50, 40), objective)
    assert found.mean.isfinite().all() and found.root.isfinite().all()


# ---- searches -----------------------------------------------------------------------------------


def test_update_without_the_closed_form_finds_the_conjugate_posterior():
    """Student's t of many degrees of freedom is Gaussian noise."""
    problem, made, prior = problem_of("gaussian")
    many = 1e7
    student = StudentT(0.3**0.5, many, scale_bounds=(0.01, 2.2))
    start = replace(prior, likelihood=student.initial(prior.Z))
    parts = batches(problem.data, 50, 40)
    expected = stream(prior, parts, Objective(made, name="elbo"))
    found = stream(start, parts, Objective(student, name="elbo"))
    torch.testing.assert_close(found.mean, expected.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.root, expected.root, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["log_loss", "elbo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_update_of_the_prior_by_all_rows_is_their_optimum(family, name):
    problem, made, prior = problem_of(family)
    objective = Objective(made, name=name, beta=0.7)
    found = update(prior, problem.data, objective, **LONG)
    if name == "log_loss" and family != "probit":
        objective = replace(objective, beta=0.7 * LOG_LOSS_WEIGHT)
    expected = at_once(prior, problem.data, objective)
    losses = [total_loss(s, problem.data, objective) for s in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "name", "tolerance"),
    [
        ("probit", "elbo", 0.15),
        ("poisson", "elbo", 0.15),
        ("student_t", "elbo", 0.3),
        ("gaussian", "log_loss", 0.3),
        ("probit", "log_loss", 0.3),
    ],
)
def test_update_by_batches_is_near_all_rows_at_once(family, name, tolerance):
    """Root mean square distance of the means, in standard deviations of the prior of f."""
    problem, made, prior = problem_of(family, n=150)
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
    losses = [total_loss(s, problem.data, objective) for s in (prior, first, found, expected)]
    assert losses[0] > losses[1] > losses[2] > losses[3] - 1e-6


@pytest.mark.parametrize(("family", "weight"), [("probit", 1.0), ("gaussian", LOG_LOSS_WEIGHT)])
def test_update_minimises_the_batch_and_the_divergence_from_the_posterior_before(family, weight):
    """The objective of the module docstring, by dense formulas: any other posterior has more."""
    problem, made, prior = problem_of(family)
    first, second = batches(problem.data, 50, 40)
    objective = Objective(made, name="log_loss", beta=0.6)
    before = update(prior, first, objective, **LONG)
    after = update(before, second, objective, **LONG)

    def value(state):
        rows = total_loss(state, second, replace(objective, beta=0.0))
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


def test_update_of_weights_is_that_of_repeated_rows():
    problem, made, prior = problem_of("probit")
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    objective = Objective(made)
    weighted, repeated = (
        update(prior, p.data, objective, max_iter=20, tol=0.0)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    torch.testing.assert_close(weighted.mean, repeated.mean, rtol=1e-6, atol=1e-6)


def test_update_of_several_functions_is_that_of_each():
    problem, made, prior = problem_of("probit")
    both = problem.state(torch.empty(0), n_latent=2)
    y = torch.cat([problem.data.y, -problem.data.y], dim=1)
    found = update(both, Data(problem.data.X, y), Objective(made), **LONG)
    for c in range(2):
        data = Data(problem.data.X, y[:, c : c + 1])
        expected = update(prior, data, Objective(made), **LONG)
        torch.testing.assert_close(found.mean[:, c : c + 1], expected.mean, rtol=0, atol=1e-3)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_update_does_not_sample(gradient):
    """A stream has all rows of a batch at hand: its gradients are exact."""
    problem, made, prior = problem_of("probit")
    options = {"max_iter": 10, "tol": 0.0}
    found = update(prior, problem.data, Objective(made, gradient=gradient), **options)
    expected = update(prior, problem.data, Objective(made), **options)
    torch.testing.assert_close(found.mean, expected.mean)


def test_update_leaves_the_state_before_alone():
    for family, name in (("gaussian", "elbo"), ("probit", "log_loss")):
        problem, made, prior = problem_of(family)
        state = prior.with_posterior(*dense.random_posterior(9))
        mean, root = state.mean.clone(), state.root.clone()
        after = update(state, problem.data, Objective(made, name=name), max_iter=3, tol=0.0)
        assert torch.equal(state.mean, mean) and torch.equal(state.root, root)
        assert not after.mean.requires_grad and not after.root.requires_grad
