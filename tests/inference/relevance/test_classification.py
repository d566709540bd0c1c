"""Relevance vectors of classifiers against the dense Laplace approximation."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.datasets import make_twonorm
from skgp.inference.relevance.classification import (
    LaplaceProblem,
    _inner_steps,
    fit_relevance_classifier,
)
from skgp.inference.relevance.steps import Dictionary, EvidenceState
from skgp.inference.stochastic.basis import KernelColumns
from skgp.likelihoods import Bernoulli
from tests.reference import relevance as reference
from tests.same import assert_same

KERNEL = RBF(1.0)
LOGIT = Bernoulli(link="logit")


def bananas(n, seed=0):
    """Two interleaved, noisy half-moons, labels -1 and 1, shapes (n, 2) and (n, 1)."""
    rng = np.random.default_rng(seed)
    angle, label = rng.uniform(0, np.pi, n), rng.choice([-1.0, 1.0], n)
    X = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    X[label > 0] = [1.0, 0.5] - X[label > 0]
    return torch.from_numpy(X + 0.25 * rng.normal(size=(n, 2))), torch.from_numpy(label)[:, None]


def labelled(make, n, seed):
    X, y = make(n, 20, random_state=seed)
    return torch.from_numpy(X), torch.from_numpy(2.0 * y - 1)[:, None]


def make_problem(n=40, offset=0.3):
    X, Y = bananas(n)
    weight = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 2.0, n))
    dictionary = Dictionary(KernelColumns(KERNEL, X), X, memory_budget=2**25)
    problem = LaplaceProblem(dictionary, Y[:, 0], weight, offset, LOGIT)
    return problem, (KERNEL(X.numpy()), Y[:, 0].numpy(), offset), weight.numpy()


def test_mode_and_evidence_equal_the_dense_laplace_approximation():
    problem, data, weight = make_problem()
    active, s = [3, 17, 8], np.array([0.5, 2.0, 7.0])
    mode = problem.mode(torch.tensor(active), torch.from_numpy(s), torch.zeros(3).double())
    mean, _, evidence = reference.logit_laplace(*data, active, s, weight)
    np.testing.assert_allclose(mode.mean, mean, atol=1e-8)
    np.testing.assert_allclose(mode.log_evidence, evidence, atol=1e-8)
    np.testing.assert_allclose(mode.fitted, data[0][:, active] @ mean, atol=1e-8)


def test_mode_is_found_from_a_far_start():
    problem, _, _ = make_problem()
    active, s = torch.tensor([3, 17]), torch.tensor([0.1, 0.1]).double()
    near = problem.mode(active, s, torch.zeros(2).double())
    far = problem.mode(active, s, torch.tensor([80.0, -90.0]).double())
    np.testing.assert_allclose(far.mean, near.mean, atol=1e-7)


def test_regression_at_the_mode_has_its_posterior_and_slopes():
    problem, (Phi, y, offset), weight = make_problem()
    active, s = [3, 17, 8], np.array([0.5, 2.0, 7.0])
    mode = problem.mode(torch.tensor(active), torch.from_numpy(s), torch.zeros(3).double())
    state = EvidenceState(problem.source(mode), 1.0, mode.indices, mode.precision)
    mean, H, _ = reference.logit_laplace(Phi, y, offset, active, s, weight)
    np.testing.assert_allclose(state.mean, mean, atol=1e-7)
    np.testing.assert_allclose(state.covariance, np.linalg.inv(H), atol=1e-7)
    p = 1 / (1 + np.exp(y * (offset + Phi[:, active] @ mean)))
    np.testing.assert_allclose(state.Q, Phi.T @ (weight * y * p), atol=1e-7)
    B = weight * p * (1 - p)
    C = np.diag(1 / B) + reference.prior_covariance(Phi, active, s)
    np.testing.assert_allclose(state.S, np.sum(Phi * np.linalg.solve(C, Phi), axis=0), rtol=1e-7)


def test_inner_steps_leave_the_state_alone():
    problem, _, _ = make_problem()
    none = torch.zeros(0).double()
    state = EvidenceState(problem.source(problem.mode(none.long(), none, none)), 1.0)
    S, Q = state.S.clone(), state.Q.clone()
    proposal, first = _inner_steps(state, 4, 1e-3, torch.zeros(len(S), dtype=torch.bool))
    assert first == int(proposal.indices[0])
    assert len(state.indices) == 0
    assert_same(state.S, S)
    assert_same(state.Q, Q)
    allowed = torch.zeros(len(S), dtype=torch.bool)
    allowed[first] = True
    assert _inner_steps(state, 1, 1e-3, allowed)[1] != first


def test_fit_raises_the_dense_evidence_at_every_iteration():
    X, Y = bananas(80)
    fit = fit_relevance_classifier(KERNEL, X, Y, LOGIT)
    assert fit.converged
    assert np.all(np.diff(fit.history) >= 0)
    column = fit.columns[0]
    s = column.precision.numpy()
    data = KERNEL(X.numpy()), Y[:, 0].numpy(), 0.0
    *_, evidence = reference.logit_laplace(*data, column.indices.tolist(), s, np.ones(80))
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-7)
    assert fit.log_evidence == fit.history[-1]


def test_steps_that_lower_the_evidence_are_taken_back():
    fit = fit_relevance_classifier(RBF(0.3), *bananas(30, seed=1), LOGIT, tol=1e-3)
    rises = np.diff(fit.history)
    assert np.all(rises >= 0)
    assert np.sum(rises[:-1] == 0) > 0 and fit.converged


def test_fit_ends_where_no_change_of_a_precision_raises_the_evidence_by_much():
    X, Y = bananas(60)
    fit = fit_relevance_classifier(KERNEL, X, Y, LOGIT, tol=1e-3)
    Phi, y, active = KERNEL(X.numpy()), Y[:, 0].numpy(), fit.indices.tolist()

    def evidence(active, s):
        return reference.logit_laplace(Phi, y, 0.0, active, s, np.ones(60))[2]

    # The curvatures that are held fixed in a step move a little: 0.1 nats of about 20.
    grid = np.geomspace(1e-3, 1e3, 7)
    s = fit.columns[0].precision.numpy()
    for index in {*active, *range(0, 60, 6)}:
        assert reference.best_gain(evidence, active, s, index, grid) < 0.1


@pytest.mark.parametrize(
    ("data", "kernel", "accuracy", "nll"),
    [
        (lambda n, seed: bananas(n, seed), RBF(0.7), 0.93, 0.2),
        (lambda n, seed: labelled(make_twonorm, n, seed), RBF(8.0), 0.96, 0.12),
    ],
    ids=["bananas", "twonorm"],
)
def test_fit_classifies_with_few_vectors(data, kernel, accuracy, nll):
    X, Y = data(400, 0)
    X_new, Y_new = data(1000, 1)
    fit = fit_relevance_classifier(kernel, X, Y, LOGIT)
    assert len(fit.indices) <= 20
    mean, variance = fit.posterior.mean_and_variance(X_new)
    assert float((mean.sign() == Y_new).double().mean()) >= accuracy
    assert float(-LOGIT.log_predictive(Y_new, mean, variance).mean()) <= nll


def test_probit_likelihood_is_accepted():
    fit = fit_relevance_classifier(KERNEL, *bananas(100), Bernoulli(link="probit"))
    assert fit.converged and 0 < len(fit.indices) < 20


def test_columns_are_fitted_one_by_one():
    X, Y = bananas(80)
    second = torch.where(X[:, :1] > 0.5, 1.0, -1.0).double()
    both = fit_relevance_classifier(KERNEL, X, torch.cat([Y, second], 1), LOGIT)
    alone = [fit_relevance_classifier(KERNEL, X, y, LOGIT) for y in (Y, second)]
    mean, variance = both.posterior.mean_and_variance(X)
    assert mean.shape == variance.shape == (80, 2)
    for c, fit in enumerate(alone):
        assert torch.equal(both.columns[c].indices, fit.indices)
        np.testing.assert_allclose(mean[:, c], fit.posterior.mean(X)[:, 0], atol=1e-8)
    assert set(both.indices.tolist()) == {i for fit in alone for i in fit.indices.tolist()}
    total = sum(fit.log_evidence for fit in alone)
    np.testing.assert_allclose(both.log_evidence, total, atol=1e-8)


def test_offset_is_part_of_the_latent_function():
    X, Y = bananas(80)
    offset = torch.tensor([1.5]).double()
    fit = fit_relevance_classifier(KERNEL, X, Y, LOGIT, offset=offset)
    far = torch.tensor([[50.0, 50.0]]).double()
    assert float(fit.posterior.mean(far)) == 1.5
    *_, evidence = reference.logit_laplace(
        KERNEL(X.numpy()),
        Y[:, 0].numpy(),
        1.5,
        fit.indices.tolist(),
        fit.columns[0].precision.numpy(),
        np.ones(80),
    )
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-7)


def test_weights_count_as_repeated_rows():
    X, Y = bananas(50)
    counts = torch.arange(50) % 3 + 1
    weighted = fit_relevance_classifier(KERNEL, X, Y, LOGIT, row_weight=counts.double())
    again = torch.arange(50).repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    repeated = fit_relevance_classifier(KERNEL, X[again], Y[again], LOGIT, candidates=first)
    assert torch.equal(again[repeated.indices], weighted.indices)
    np.testing.assert_allclose(weighted.log_evidence, repeated.log_evidence, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_separable_and_one_sided_labels_stay_finite(n):
    X = torch.linspace(-2, 2, n).double()[:, None]
    for Y in (torch.ones(n, 1).double(), torch.where(X > 0, 1.0, -1.0).double()):
        fit = fit_relevance_classifier(KERNEL, X, Y, LOGIT)
        mean, variance = fit.posterior.mean_and_variance(X)
        assert bool(torch.isfinite(torch.cat([mean, variance])).all())
        assert np.isfinite(fit.log_evidence)


def test_callback_stops_between_columns():
    X, Y = bananas(60)
    calls = []

    def callback(iteration, info):
        calls.append((iteration, info["column"], info["n_vectors"]))
        return iteration == 3

    fit = fit_relevance_classifier(KERNEL, X, torch.cat([Y, -Y], 1), LOGIT, callback=callback)
    assert [call[:2] for call in calls] == [(1, 0), (2, 0), (3, 0)]
    assert not fit.converged
    assert len(fit.columns[1].indices) == 0
    assert bool((fit.posterior.mean(X)[:, 1] == 0).all())


def test_candidates_limit_the_vectors(generator):
    X, Y = bananas(100)
    fit = fit_relevance_classifier(KERNEL, X, Y, LOGIT, candidates=torch.arange(0, 100, 5))
    assert bool((fit.indices % 5 == 0).all())


def test_posterior_pickles_small_and_predicts_the_same():
    X, Y = bananas(200)
    posterior = fit_relevance_classifier(KERNEL, X, Y, LOGIT).posterior
    stored = pickle.dumps(posterior)
    assert len(stored) < 10_000
    assert_same(pickle.loads(stored).mean(X), posterior.mean(X))
