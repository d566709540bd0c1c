"""The evidence of a series with terms, and its ELBO: against each other and finite differences."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.regression import make_regression_series
from skgp.inference.markov.series import make_series
from skgp.inference.markov.terms import Categorical, Linear, Polynomial, Smooth, Terms
from skgp.learning.markov.additive import RegressionElbo, RegressionEvidence, TermComponent
from skgp.learning.markov.objectives import ClosedForm, Component, VariationalEvidence
from skgp.learning.markov.scoring import SeriesLoss
from skgp.likelihoods import Gaussian, Poisson
from tests.reference.state_space import by_finite_differences


def problem(n=80, seed=0):
    rng = np.random.default_rng(seed)
    X = torch.tensor(
        np.column_stack(
            [np.sort(rng.uniform(0, 9, n)), rng.normal(size=(n, 2)), rng.integers(0, 3, n)]
        )
    )
    parts = (
        Polynomial.over(X[:, 0], 2, 10.0, place=0),
        Linear.of(X[:, 1], "line", 1, 10.0),
        Smooth.of(X[:, 2], "curve", 2, 10.0),
        Categorical.of(X[:, 3], "level", 3, 10.0, n_levels=3),
    )
    terms = Terms(parts, 0)
    rate = 0.5 + X[:, 0].sin() + 0.3 * X[:, 1] + 0.2 * X[:, 2] ** 2 + 0.3 * (X[:, 3] == 1)
    weight = torch.tensor(rng.integers(1, 3, n), dtype=torch.float64)
    counts = torch.tensor(rng.poisson(rate.exp()), dtype=torch.float64)
    y = rate + 0.3 * torch.tensor(rng.normal(size=n))
    features = terms.features(X)
    components = [Component(0.7 * Matern(1.2, nu=1.5)), *map(TermComponent, terms.parts)]
    numbers, whole = (make_regression_series(X[:, 0], z, features, weight) for z in (y, counts))
    return numbers, whole, terms, components


def evaluated(objective, components, likelihood, place):
    """Value and gradient at all theta and the likelihood's parameters in one vector."""
    sizes = [len(each.theta) for each in components]
    *thetas, parameters = place.split([*sizes, len(place) - sum(sizes)])
    pairs = list(zip(components, thetas, strict=True))
    found = objective([each.dynamics(theta) for each, theta in pairs], parameters, tol=1e-13)
    bars = found.gradients()
    slopes = [each.pull(theta, bar) for (each, theta), bar in zip(pairs, bars, strict=True)]
    return found.value, torch.cat([*slopes, found.likelihood_gradient])


@pytest.mark.parametrize("counts", [False, True])
def test_gradient_in_every_parameter(counts):
    numbers, whole, terms, components = problem()
    likelihood = Poisson("exp") if counts else Gaussian(0.2)
    objective = (
        RegressionElbo(whole, 0.1, terms, likelihood)
        if counts
        else RegressionEvidence(numbers, terms)
    )
    start = torch.cat([*(each.theta for each in components), likelihood.initial(torch.ones(1))])
    start = start.double()
    _, gradient = evaluated(objective, components, likelihood, start)
    expected = by_finite_differences(
        lambda place: evaluated(objective, components, likelihood, place)[0], start, step=1e-3
    )
    assert len(gradient) == 2 + 0 + 0 + 2 + 1 + (not counts)
    torch.testing.assert_close(gradient, expected, rtol=2e-5, atol=2e-5)


class Boosted(Poisson):
    """Counts of rate exp(f + s), times their exposures, where s is learned."""

    def __init__(self, log_boost=0.0, exposure=None):
        shift = torch.as_tensor(log_boost, dtype=torch.float64)
        super().__init__(offset=shift if exposure is None else exposure + shift)
        self.log_boost, self.exposure = log_boost, exposure

    def at(self, offset):
        return Boosted(self.log_boost, offset)

    def free_parameters(self):
        return ((1.0, 1e-3, 1e3),)

    def with_parameters(self, parameters):
        return Boosted(parameters[0])


def test_slope_in_a_parameter_of_counts_heeds_their_exposures():
    rng = np.random.default_rng(0)
    times = torch.linspace(0, 6, 40, dtype=torch.float64)
    exposure = torch.tensor(rng.uniform(-1, 2, 40))
    y = torch.tensor(rng.poisson((times.sin() + exposure).exp().numpy()), dtype=torch.float64)
    objective = VariationalEvidence(make_series(times, y, None, exposure), Boosted())
    dynamics = [Component(0.7 * Matern(1.2, nu=1.5)).dynamics()]
    at = torch.tensor([0.3], dtype=torch.float64)
    expected = by_finite_differences(lambda s: objective(dynamics, s, tol=1e-13).value, at)
    found = objective(dynamics, at, tol=1e-13).likelihood_gradient
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sites_of_gaussian_noise_give_the_exact_evidence():
    numbers, _, terms, components = problem()
    likelihood = Gaussian(0.2)
    dynamics = [each.dynamics() for each in components]
    parameters = torch.tensor([0.2], dtype=torch.float64).log()
    exact = RegressionEvidence(numbers, terms)(dynamics, parameters)
    elbo = RegressionElbo(numbers, 0.0, terms, likelihood)(dynamics, parameters)
    assert elbo.value == pytest.approx(exact.value, rel=1e-10)
    for one, other in zip(elbo.gradients(), exact.gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        elbo.likelihood_gradient, exact.likelihood_gradient, rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("noise", [0.2, 1e-3])
def test_dense_evidence_is_that_of_the_eliminated_coefficients(noise):
    numbers, _, terms, components = problem()
    dynamics = [each.dynamics() for each in components]
    whole = RegressionEvidence(numbers, terms)
    dense, other = whole.assess(dynamics, noise), ClosedForm.assess(whole, dynamics, noise)
    assert type(dense[2]) is not type(other[2])
    assert dense[:2] == pytest.approx(other[:2], rel=1e-8)
    pairs = zip(dense[2].gradients(), other[2].gradients(), strict=True)
    for one, expected in [*pairs, (dense[2].of_terms, other[2].of_terms)]:
        torch.testing.assert_close(one, expected, rtol=1e-6, atol=1e-6)


def test_terms_left_out_of_the_dynamics_stand_at_their_start():
    numbers, _, terms, components = problem()
    objective, parameters = RegressionEvidence(numbers, terms), torch.zeros(1).double()
    dynamics = [each.dynamics() for each in components]
    whole, alone = objective(dynamics, parameters), objective(dynamics[:1], parameters)
    assert whole.value == alone.value
    assert len(alone.gradients()) == 1


def test_a_short_search_sees_the_evidence_with_terms():
    numbers, _, terms, (component, *_) = problem()
    objective = RegressionEvidence(numbers, terms)
    loss = SeriesLoss.of(component, objective)
    at, _ = loss.start(Gaussian(0.2), None)
    value, gradient, short = loss(at)
    assert short is not None
    exact = objective([component.dynamics()], torch.from_numpy(at[-1:]))
    assert -value == pytest.approx(exact.value, rel=1e-10)
    slope = component.pull(component.theta, exact.gradients()[0])
    expected = torch.cat([slope, exact.likelihood_gradient]).numpy()
    np.testing.assert_allclose(-gradient, expected, rtol=1e-7)
