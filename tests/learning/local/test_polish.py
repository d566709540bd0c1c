"""The joint polish: kept only if rows held out are predicted better."""

import math
from dataclasses import replace

import pytest
import torch

from skgp.data import Data
from skgp.learning.local import polish as module
from skgp.learning.local.bound import latent_moments
from skgp.learning.local.polish import negative_log_predictive, polish
from skgp.likelihoods.families import GaussianFamily
from tests.learning.local.test_minibatch import FAMILY, nearest, problem, seeded


def polished(state, data, search, objective, seed=5, **options):
    held_out = problem(100, seed=seed)[1]
    return polish(
        state,
        data,
        search,
        objective,
        held_out=held_out,
        held_out_search=nearest(held_out.X),
        generator=seeded(),
        **options,
    )


def test_polish_is_kept_where_it_predicts_better():
    state, *rest = problem()
    found = polished(state, *rest, max_iter=60)
    assert found.kept and found.after < found.before - 0.3
    assert found.state is not state and len(found.history) == 60 and not found.stopped


def test_polish_is_taken_back_where_it_predicts_worse():
    state, data, search, objective = problem()
    wrong = Data(data.X, -data.y)
    good = polished(state, data, search, objective, max_iter=60).state
    found = polished(good, wrong, search, objective, max_iter=60)
    assert not found.kept and found.after > found.before and found.state is good


def test_polish_that_diverges_is_taken_back_with_a_warning():
    state, data, search, objective = problem()

    class Broken(GaussianFamily):
        n_calls = 0

        def make(self, parameters):
            self.n_calls += 1
            likelihood = super().make(parameters)
            if self.n_calls > 5:
                likelihood.noise_variance = likelihood.noise_variance * float("nan")
            return likelihood

    broken = replace(objective, family=Broken(0.3, (0.05, 1.0)))
    with pytest.warns(RuntimeWarning, match="polish was not kept"):
        found = polished(state, data, search, broken, max_iter=20)
    assert found.state is state and not found.kept and math.isnan(found.after)


def test_polish_passes_an_order_to_stop_on():
    found = polished(*problem(), max_iter=60, callback=lambda step, info: True)
    assert found.stopped and len(found.history) == 10


def test_polish_scores_with_the_search_of_the_state_that_it_reached(monkeypatch):
    state, data, search, objective = problem()
    kernels = []

    def held_out_search(kernel, Z):
        kernels.append(kernel)
        return search(kernel, Z)

    found = module.polish(
        state,
        data,
        search,
        objective,
        held_out=data,
        held_out_search=held_out_search,
        max_iter=30,
        generator=seeded(),
    )
    assert found.kept and kernels == [state.kernel, found.state.kernel]


def test_negative_log_predictive_is_that_of_each_row():
    state, data, search, objective = problem(50, weighted=True)
    active = search(None, state.Z)
    mean, var = latent_moments(state, data.X, active)
    density = torch.distributions.Normal(mean, (var + state.likelihood.exp()).sqrt())
    found = negative_log_predictive(state, data, active, objective)
    assert objective.family is FAMILY
    torch.testing.assert_close(found, -density.log_prob(data.y).sum(1), rtol=1e-12, atol=0)
