"""Hyper-parameters of few rows by the evidence: the optimum of the ELBO, priors, kernels, stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.data import Data
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.start import (
    Problem,
    Settings,
    best_evidence,
    has_evidence,
    start_state,
)
from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from skgp.optim.stopping import StopRecorder
from tests.reference import sparse as dense

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))


PROBIT = Bernoulli("probit")


ZERO = torch.zeros(1, dtype=torch.float64)


def problem_for(problem, objective, settings, *, kernels=None, callback=None, offset=ZERO, seed=0):
    return Problem(
        kernels or [problem.kernel],
        problem.data,
        objective,
        settings,
        lambda kernel: problem.data.X,
        offset.to(problem.data.X),
        torch.Generator().manual_seed(seed),
        StopRecorder(callback),
    )


def search_of(problem, likelihood, *, max_iter=100, ratio_std=None, **options):
    settings = Settings(start_iter=max_iter, tol=1e-12, ratio_std=ratio_std)
    return best_evidence(problem_for(problem, Objective(likelihood), settings, **options))


def begin(problem, objective, settings, **options):
    return start_state(problem_for(problem, objective, settings, **options))


def log_density(problem, fit):
    """Of the targets under the hyper-parameters of a fit, a row of weight w counting w times."""
    noise, w = float(fit.likelihood.exp()), problem.row_weight
    A = fit.kernel(problem.X) + np.diag(noise / w)
    density = stats.multivariate_normal(np.zeros(len(A)), A).logpdf(problem.y)
    return density + 0.5 * np.sum((1 - w) * np.log(2 * np.pi * noise) - np.log(w))


@pytest.mark.parametrize("weighted", [False, True])
def test_gaussian_evidence_is_the_dense_density(weighted):
    problem = dense.make_problem(weighted=weighted)
    losses = []
    options = {"max_iter": 3, "callback": lambda i, info: losses.append(info["loss"])}
    found = search_of(problem, GAUSSIAN, **options)
    expected = -log_density(problem, found) / problem.row_weight.sum()
    assert found.loss == pytest.approx(expected, rel=1e-9)
    assert tuple(losses) == found.history and len(losses) == 3


def test_gaussian_evidence_of_weights_is_that_of_repeated_rows():
    problem = dense.make_problem()
    counts = np.random.default_rng(0).integers(1, 4, 40)
    weighted = replace(problem, weight=counts.astype(float))
    found, expected = (search_of(each, GAUSSIAN) for each in (weighted, problem.repeated(counts)))
    np.testing.assert_allclose(found.kernel.theta, expected.kernel.theta, atol=1e-3)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)


def test_gaussian_evidence_is_the_bound_of_a_point_a_row():
    """Either search finds the same hyper-parameters, and the posterior is its optimum."""
    problem = dense.make_problem()
    objective = Objective(GAUSSIAN, learn_inducing=False)
    settings = Settings(start_iter=200, tol=1e-12)
    dense_start = begin(problem, objective, replace(settings, dense_start=True))
    bound = begin(problem, objective, settings)
    found, expected = dense_start.state, bound.state
    np.testing.assert_allclose(found.kernel.theta, expected.kernel.theta, atol=1e-2)
    assert float(found.likelihood) == pytest.approx(float(expected.likelihood), abs=1e-2)
    assert dense_start.loss == pytest.approx(bound.loss, rel=1e-4)
    elbo = replace(objective, name="elbo")
    assert elbo.total(found, problem.data) == pytest.approx(dense_start.loss, rel=1e-4)


def test_laplace_evidence_begins_near_the_bound_of_labels():
    problem = dense.make_problem(target="labels", n=60)
    objective = Objective(PROBIT, learn_inducing=False)
    settings = Settings(start_iter=150, tol=1e-9)
    few, bound = (
        begin(problem, objective, s).state for s in (replace(settings, dense_start=True), settings)
    )
    elbo = replace(objective, name="elbo")
    found, least, prior = (
        elbo.total(state, problem.data) for state in (few, bound, problem.state(ZERO[:0]))
    )
    assert found - least < 0.02 * (prior - least)


@pytest.mark.parametrize("likelihood", [GAUSSIAN, PROBIT])
def test_ratio_prior_draws_length_scales_to_those_of_the_kernel(likelihood):
    """Its optimum trades the evidence for the log ratios, whatever their common factor."""
    target = "gaussian" if likelihood is GAUSSIAN else "labels"
    problem = dense.make_problem(target=target)
    free = search_of(problem, likelihood)

    def ratio(fit):
        moved = fit.kernel.theta[1:] - problem.kernel.theta[1:]
        return abs(moved[0] - moved[1])

    ratios = [ratio(search_of(problem, likelihood, ratio_std=std)) for std in (1e-3, 0.3, 1e3)]
    assert ratios[0] < 1e-3 < ratios[1] < ratios[2]
    assert ratios[2] == pytest.approx(ratio(free), abs=1e-2)
    tied = search_of(problem, likelihood, ratio_std=1e-3)
    assert abs(tied.kernel.theta[1:] - problem.kernel.theta[1:]).min() > 0.01


def test_ratio_prior_counts_in_the_loss():
    problem = dense.make_problem()
    fit = search_of(problem, GAUSSIAN, ratio_std=0.3)
    moved = fit.kernel.theta[1:] - problem.kernel.theta[1:]
    log_prior = -0.5 * np.square(moved - moved.mean()).sum() / 0.3**2
    expected = -(log_density(problem, fit) + log_prior) / 40
    assert fit.loss == pytest.approx(expected, rel=1e-9)


def test_choose_takes_the_kernel_of_greatest_evidence():
    problem = dense.make_problem(target="labels", n=150)
    kernels = [ConstantKernel(1.0) * RBF(s, "fixed") for s in (0.01, 1.0, 100.0)]
    assert search_of(problem, PROBIT, kernels=kernels).kernel.k2.length_scale == 1.0


def test_choose_keeps_a_kernel_without_anything_free():
    problem, kernel = dense.make_problem(target="labels"), RBF(1.0, "fixed")
    assert search_of(problem, PROBIT, kernels=[kernel]).kernel == kernel


@pytest.mark.parametrize("n_kernels", [1, 2])
def test_start_by_the_evidence_stops_when_told(n_kernels):
    problem = dense.make_problem(target="labels")
    kernels = [problem.kernel, 1.0 * Matern(1.0, nu=0.5)][:n_kernels]
    settings = Settings(dense_start=True)
    calls = []

    def stop(iteration, info):
        calls.append(info["loss"])
        return True

    begun = begin(problem, Objective(PROBIT), settings, kernels=kernels, callback=stop)
    assert begun.stopped and len(calls) == 1
    assert begun.state.mean.isfinite().all() and len(begun.state.Z) == 40


def test_start_by_the_evidence_keeps_fixed_noise_and_precision():
    problem = dense.make_problem()
    kept = Gaussian(0.2, bounds=(0.2, 0.2))
    data = Data(problem.data.X.float(), problem.data.y.float())
    single = type("Single", (), {"kernel": problem.kernel, "data": data})
    begun = begin(single, Objective(kept), Settings(dense_start=True))
    assert float(begun.state.likelihood.exp()) == pytest.approx(0.2, rel=1e-6)
    assert begun.state.mean.dtype == begun.state.likelihood.dtype == torch.float32
    assert not np.array_equal(begun.state.kernel.theta, problem.kernel.theta)


@pytest.mark.parametrize(
    ("likelihood", "options", "n_kernels", "expected"),
    [
        (GAUSSIAN, {}, 1, True),
        (GAUSSIAN, {}, 2, False),
        (GAUSSIAN, {"learn_likelihood": False}, 1, False),
        (PROBIT, {}, 2, True),
        (PROBIT, {"beta": 0.5}, 1, True),
        (PROBIT, {"beta": 0.5, "name": "elbo"}, 1, False),
        (PROBIT, {"learn_kernel": False}, 1, False),
        (Poisson("exp"), {}, 1, True),
        (Laplace(1.0), {}, 1, False),
        (StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0)), {}, 1, False),
    ],
)
def test_has_evidence_where_it_is_known_and_free(likelihood, options, n_kernels, expected):
    assert has_evidence(Objective(likelihood, **options), [RBF()] * n_kernels) == expected
