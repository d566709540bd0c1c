"""Minibatches of S2VGP: unbiased estimates of the ELBO and its gradients, and where they end."""

import math

import pytest
import torch
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from skgp.inference.markov.inducing import find_sites, place_knots
from skgp.inference.markov.series import make_series
from skgp.learning.markov.minibatch import MinibatchElbo, fit_minibatches
from skgp.learning.markov.objectives import (
    Component,
    SharedEvidence,
    VariationalEvidence,
)
from skgp.learning.markov.search import maximise
from skgp.likelihoods import Gaussian, Poisson, StudentT

KERNEL = ConstantKernel(1.0) * Matern(0.5, nu=1.5)
LIKELIHOODS = {
    "gaussian": Gaussian(0.3, bounds=(1e-4, 10.0)),
    "poisson": Poisson(),
    "student_t": StudentT(0.3, 4.0),
}


def problem(name, n, *, weighted=False):
    """A series of n rows, some at equal times."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(n, generator=generator, dtype=torch.float64) * 200).round() / 20
    f = (2 * x).sin() + 0.5
    y = LIKELIHOODS[name].sample(f, generator)
    weight = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5 if weighted else None
    return make_series(x, y, weight)


def objective(name, series, batch_size, n_processes=1):
    generator = torch.Generator().manual_seed(1)
    return MinibatchElbo(
        [series] * n_processes, LIKELIHOODS[name], [0.2] * n_processes, batch_size, generator
    )


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_all_rows_at_once_give_the_elbo_and_its_gradients(name):
    """At the best q."""
    series = problem(name, 150, weighted=True)
    knots, likelihood = place_knots(series.times, 12), LIKELIHOODS[name]
    parameters = likelihood.initial(series.y)
    dynamics = [Component(KERNEL).dynamics()]
    evidence = VariationalEvidence(series, likelihood, 0.2)
    whole = evidence(dynamics, parameters, knots, tol=1e-13)
    drawn = objective(name, series, 150)
    place = series, likelihood.with_parameters(parameters), evidence.mean_of(dynamics), knots
    best = find_sites(dynamics[0], *place, tol=1e-13)
    drawn.sites = [best.posterior.sites]
    found = drawn(dynamics, parameters, knots)
    assert found.value == pytest.approx(whole.value, rel=1e-6)
    pairs = [
        (found.gradients()[0], whole.gradients()[0]),
        (found.likelihood_gradient, whole.likelihood_gradient),
        (found.knot_gradient, whole.knot_gradient),
    ]
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_estimates_are_unbiased(name):
    """Value and gradients at one q: means over minibatches within 4 standard errors."""
    series = problem(name, 200)
    knots, likelihood = place_knots(series.times, 10), LIKELIHOODS[name]
    parameters, dynamics = likelihood.initial(series.y), [Component(KERNEL).dynamics()]
    drawn = objective(name, series, 20)
    drawn(dynamics, parameters, knots)
    whole = objective(name, series, 200)
    sites = drawn.sites

    def evaluate(of):
        of.sites = list(sites)
        found = of(dynamics, parameters, knots)
        values = [torch.tensor([found.value]), found.gradients()[0], found.likelihood_gradient]
        return torch.cat([*values, found.knot_gradient, of.sites[0].linear.flatten()])

    n_drawn = 20
    drawn.n_evaluations = whole.n_evaluations = 10**9
    drawn.rate = whole.rate = 0.1
    draws = torch.stack([evaluate(drawn) for _ in range(n_drawn)])
    exact = evaluate(whole)
    error = draws.std(0) / math.sqrt(n_drawn) + 1e-9 * exact.abs() + 1e-12
    z = (draws.mean(0) - exact) / error
    assert float(z.abs().max()) < 4.5
    assert float(draws.std(0)[0]) > 0


def test_several_processes_add_up():
    series = problem("poisson", 100)
    knots, dynamics = place_knots(series.times, 8), [Component(KERNEL).dynamics()]
    none = torch.empty(0, dtype=torch.float64)
    one = objective("poisson", series, 30)(dynamics, none, knots)
    two = objective("poisson", series, 30, n_processes=2)(dynamics, none, knots)
    assert two.value == pytest.approx(2 * one.value)
    torch.testing.assert_close(two.gradients()[0], 2 * one.gradients()[0])


def test_ends_where_the_search_by_all_rows_ends():
    name = "poisson"
    series = problem(name, 400)
    knots, likelihood = place_knots(series.times, 25), LIKELIHOODS[name]
    found = fit_minibatches(
        KERNEL, objective(name, series, 80), likelihood, knots=knots, max_iter=60
    )
    evidence = SharedEvidence([VariationalEvidence(series, likelihood, 0.2)])
    best = maximise([KERNEL], evidence, likelihood, knots=knots)
    start = maximise([KERNEL], evidence, likelihood, knots=knots, max_iter=0)
    here = maximise(
        [found.kernel], evidence, likelihood, parameters=found.parameters, knots=knots, max_iter=0
    )
    assert best.value - here.value < 0.1 * (best.value - start.value)
    assert best.value - here.value < 5.0
    assert found.n_iter == len(found.history) == 60


def test_callback_ends_the_search():
    series = problem("gaussian", 100)
    found = fit_minibatches(
        KERNEL,
        objective("gaussian", series, 20),
        LIKELIHOODS["gaussian"],
        knots=place_knots(series.times, 8),
        callback=lambda iteration, info: iteration == 4,
    )
    assert found.n_iter == 4
