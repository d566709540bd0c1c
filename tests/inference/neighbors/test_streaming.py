"""Rows in batches against the equations of the batch, and against all rows at once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from skgp.data import Data
from skgp.inference.natural import fit_natural_sites
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.posterior import SWSGPPosterior, SWSGPState
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.neighbors.system import (
    full_system,
    local_system,
    localized,
    row_weights,
    summarize,
    update,
    update_full,
)
from skgp.likelihoods import Bernoulli, Gaussian
from tests.covering import slow_case
from tests.reference import swsgp as dense

H = 6
TIGHT = {"tol": 1e-13, "cg_tol": 1e-12}


def state_of(problem, mean=None, var=None):
    X, Y, Z, active, offset, weight = problem.tensors
    prior = SWSGPState.prior(problem.kernel, offset[:0], Z, offset)
    return prior if mean is None else prior.with_posterior(mean, var=var)


def fitted(problem, likelihood):
    """A fit of all rows: its state and what it leaves."""
    X, Y, Z, active, offset, weight = problem.tensors
    system = local_system(
        Tiles(problem.kernel, X, Z, active), kl_weight=problem.kl_weight, weight=weight
    )
    found = fit_natural_sites(system, Y, likelihood, offset=offset, **TIGHT)
    return state_of(problem, found.q.mean, found.q.var), summarize(system, found.sites)


def rows_of(problem, rows):
    """The problem with some of its rows."""
    weight = None if problem.weight is None else problem.weight[rows]
    parts = {"X": problem.X[rows], "Y": problem.Y[rows], "active": problem.active[rows]}
    return replace(problem, weight=weight, **parts)


def updated(state, summary, problem, likelihood, **options):
    X, Y, _, _, _, weight = problem.tensors
    options = {"n_neighbors": H} | TIGHT | options
    return update(state, summary, Data(X, Y, weight), likelihood, **options)


def predicted(state, X):
    """Mean and variance (n, c) of f."""
    X = torch.as_tensor(X)
    active = NeighborSearch(state.kernel, state.Z).query(X, H)
    rows = row_weights(Tiles(state.kernel, X, state.Z, active))
    var = rows.variance[:, None] + rows.project_squares(state.var)
    return state.offset + rows.project(state.mean), var


def score(state, likelihood, problem):
    """Mean negative log predictive density."""
    return -float(
        likelihood.log_predictive(torch.tensor(problem.Y), *predicted(state, problem.X)).mean()
    )


# ---- the equations ------------------------------------------------------------------------------


def test_summary_is_the_diagonal_of_the_data_term():
    problem = dense.make_problem(n_latent=2, weighted=True, n_neighbors=H)
    _, summary = fitted(problem, Gaussian(0.3))
    A, _ = dense.conditionals(problem)
    lam, _ = dense.gaussian_sites(problem)
    np.testing.assert_allclose(summary.precision, (A**2).T @ lam, rtol=1e-8)


@pytest.mark.parametrize(("kl_weight", "kl_factor"), [(None, 1.0), (None, 0.3), (1.0, 1.0)])
def test_update_solves_the_dense_equations_of_the_batch(kl_weight, kl_factor):
    problem = dense.make_problem("matern", n_latent=2, weighted=True, n_neighbors=H)
    first, batch = rows_of(problem, slice(0, 25)), rows_of(problem, slice(25, 40))
    before, summary = fitted(first, Gaussian(0.3))
    options = {"kl_weight": kl_weight, "kl_factor": kl_factor}
    after, left = updated(before, summary, batch, Gaussian(0.3), **options)

    # The divergence is that of rows at the inducing points.
    at_inducing = replace(
        problem,
        X=problem.Z,
        active=dense.nearest(problem.Z, problem.Z, H),
        weight=None,
        kl_weight=kl_factor * problem.kl_weight if kl_weight is None else kl_weight,
    )
    lam, eta = dense.gaussian_sites(batch)
    A, _ = dense.conditionals(batch)
    D = summary.precision.numpy()
    mass = np.zeros(12)
    for I in at_inducing.active:
        mass[I] += at_inducing.kl_weight / 12
    for l in range(2):
        matrix = dense.prior_precision(at_inducing) + np.diag(D[:, l]) + (A.T * lam[:, l]) @ A
        m0 = before.mean[:, l].numpy()
        expected = m0 + np.linalg.solve(matrix, A.T @ (eta[:, l] - lam[:, l] * (A @ m0)))
        np.testing.assert_allclose(after.mean[:, l], expected, rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(after.var[:, l], mass / np.diag(matrix), rtol=1e-8)
        np.testing.assert_allclose(left.precision[:, l], D[:, l] + (A**2).T @ lam[:, l], rtol=1e-8)


def test_batch_that_says_nothing_new_leaves_the_mean():
    problem = dense.make_problem(n_latent=2, n_neighbors=H)
    state, summary = fitted(problem, Gaussian(0.3))
    X = np.random.default_rng(4).uniform(-2, 2, (20, 2))
    expected = replace(problem, X=X, Y=predicted(state, X)[0].numpy(), active=problem.active[:20])
    after, _ = updated(state, summary, expected, Gaussian(0.3))
    torch.testing.assert_close(after.mean, state.mean, rtol=1e-10, atol=1e-10)
    assert after.var.log().mean() < state.var.log().mean()


# ---- beside one fit -----------------------------------------------------------------------------


def halves(target, likelihood, **options):
    """First half, both halves in turn and at once, and rows to test on."""
    options = {"n": 900, "n_inducing": 60, "n_neighbors": H, "target": target} | options
    problem = dense.make_problem("rbf", **options)
    first, second, test = (rows_of(problem, slice(i, i + 300)) for i in (0, 300, 600))
    half, summary = fitted(first, likelihood)
    streamed, left = updated(half, summary, second, likelihood)
    whole, _ = fitted(rows_of(problem, slice(0, 600)), likelihood)
    return half, streamed, whole, test


@pytest.mark.parametrize(
    ("target", "likelihood"),
    [slow_case("gaussian", Gaussian(0.25)), ("labels", Bernoulli("probit"))],
)
def test_two_halves_come_near_one_fit_and_beat_the_first(target, likelihood):
    half, streamed, whole, test = halves(target, likelihood)
    scores = [score(state, likelihood, test) for state in (half, streamed, whole)]
    assert scores[1] < scores[0]
    assert scores[1] < scores[2] + 0.02
    means = [predicted(state, test.X)[0] for state in (half, streamed, whole)]
    far, near = ((mean - means[2]).square().mean().sqrt() for mean in means[:2])
    assert near < 0.75 * far  # .3 with 200 inducing points, .6 with 30
    torch.testing.assert_close(streamed.var.log().mean(), whole.var.log().mean(), rtol=0, atol=0.15)


def test_new_inducing_points_are_rows_that_are_poorly_explained():
    problem = dense.make_problem("rbf", n=600, n_inducing=30, n_neighbors=H)
    left_side = problem.X[:, 0] < 0
    first, batch = rows_of(problem, left_side), rows_of(problem, ~left_side)
    # Inducing points on the left only.
    Z = first.X[:30]
    first = replace(first, Z=Z, active=dense.nearest(first.X, Z, H))
    state, summary = fitted(first, Gaussian(0.3))
    poor, _ = updated(state, summary, batch, Gaussian(0.3))
    after, left = updated(state, summary, batch, Gaussian(0.3), max_inducing=60)
    assert after.n_inducing == 60 and left.precision.shape == (60, 1)
    assert (after.Z[30:, 0] >= 0).all() and torch.equal(after.Z[:30], state.Z)
    assert score(after, Gaussian(0.3), batch) < score(poor, Gaussian(0.3), batch) - 0.1
    assert state.n_inducing == 30 and len(state.mean) == 30


def test_rows_that_are_known_add_no_inducing_points():
    problem = dense.make_problem("rbf", n=40, n_inducing=30, n_neighbors=H)
    state, summary = fitted(problem, Gaussian(0.3))
    known = replace(problem, X=np.repeat(problem.Z[:10], 2, axis=0), Y=problem.Y[:20])
    after, _ = updated(state, summary, known, Gaussian(0.3), max_inducing=100)
    assert after.n_inducing == 30
    # And equal rows add one between them.
    twice = replace(problem, X=np.full((2, 2), 9.0), Y=problem.Y[:2])
    after, _ = updated(state, summary, twice, Gaussian(0.3), max_inducing=100)
    assert after.n_inducing == 31


# ---- full covariance ----------------------------------------------------------------------------


def fitted_full(problem, likelihood):
    X, Y, Z, _, offset, weight = problem.tensors
    system = full_system(problem.kernel, X, Z, weight=weight)
    q = system.unwhitened(fit_natural_sites(system, Y, likelihood, offset=offset, **TIGHT).q)
    prior = SWSGPState.prior(problem.kernel, offset[:0], Z, offset)
    return prior.with_posterior(q.mean, root=q.root)


def same_moments(left, right, atol):
    for got, want in zip(left, right, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("grows", [False, True])
def test_full_covariance_in_batches_is_that_of_all_rows(grows):
    problem = dense.make_problem("matern", n_latent=2, weighted=True, n_neighbors=12)
    if grows:  # an inducing point a row
        problem = replace(problem, Z=problem.X, active=np.tile(np.arange(40), (40, 1)))
    first, batch = rows_of(problem, slice(0, 25)), rows_of(problem, slice(25, 40))
    first = replace(first, Z=first.X) if grows else first
    X, Y, _, _, _, weight = batch.tensors
    data, options = Data(X, Y, weight), {"max_inducing": 40 if grows else 0} | TIGHT
    after = update_full(fitted_full(first, Gaussian(0.3)), data, Gaussian(0.3), **options)
    whole = fitted_full(problem, Gaussian(0.3))
    assert after.n_inducing == whole.n_inducing
    X = torch.tensor(np.random.default_rng(3).uniform(-2, 2, (30, 2)))
    moments = (SWSGPPosterior(each, 40).mean_and_variance(X) for each in (after, whole))
    same_moments(*moments, atol=1e-5)


def test_full_covariance_in_batches_of_labels_comes_near_one_fit():
    options = {"n": 120, "n_inducing": 15, "n_neighbors": 15, "target": "labels"}
    problem = dense.make_problem("rbf", **options)
    likelihood = Bernoulli("probit")
    state = fitted_full(rows_of(problem, slice(0, 60)), likelihood)
    X, Y, _, _, _, _ = rows_of(problem, slice(60, 120)).tensors
    after = update_full(state, Data(X, Y), likelihood, **TIGHT)
    whole = fitted_full(problem, likelihood)
    means = [SWSGPPosterior(each, 15).mean(X) for each in (state, after, whole)]
    first, second = ((mean - means[2]).square().mean().sqrt() for mean in means[:2])
    assert second < 0.3 * first


def test_full_covariance_becomes_diagonal_with_the_precisions_it_had():
    problem = dense.make_problem("matern", n_latent=2, weighted=True, n_neighbors=12)
    full = fitted_full(problem, Gaussian(0.3))
    state, summary = localized(full)
    K = problem.kernel(problem.Z)
    A = np.linalg.solve(K, problem.kernel(problem.Z, problem.X)).T
    lam, _ = dense.gaussian_sites(problem)
    data = (A**2).T @ lam
    np.testing.assert_allclose(summary.precision, data, rtol=1e-4)
    precision = np.diag(np.linalg.inv(K))[:, None] + data
    np.testing.assert_allclose(state.var, 1 / precision, rtol=1e-4)
    assert torch.equal(state.mean, full.mean) and state.root is None
