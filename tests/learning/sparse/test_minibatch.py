"""Training by minibatches: unbiased steps, bounds, when it stops."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.sparse.sparse import SparseState
from skgp.learning.sparse.coordinates import Coordinates
from skgp.learning.sparse.holdout import BestState
from skgp.learning.sparse.minibatch import default_batch_size, fit_minibatch
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.training import posterior_loss, total_loss
from skgp.likelihoods import Bernoulli, Gaussian
from tests.same import assert_same

FAMILY = Gaussian(0.1, bounds=(0.05, 1.0))


def problem(n=200, *, labels=False, weighted=False):
    """Data, a state of 10 inducing points at its prior, and an objective."""
    generator = torch.Generator().manual_seed(0)
    X = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 4 - 2
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    y = (3 * X).sin() + 0.3 * noise
    family = Bernoulli("probit") if labels else FAMILY
    weight = torch.arange(1.0, n + 1, dtype=torch.float64) if weighted else None
    data = Data(X, y.sign() if labels else y, weight)
    kernel = ConstantKernel(1.0, (0.5, 2.0)) * RBF(0.5, (0.1, 2.0))
    Z = torch.linspace(-2, 2, 10, dtype=torch.float64)[:, None]
    state = SparseState.prior(kernel, family.initial(X), Z, X.new_zeros(1))
    return data, state, Objective(family)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("weighted", [False, True])
def test_minibatch_loss_averages_to_the_objective_over_all_subsets(weighted):
    data, state, objective = problem(6, weighted=weighted)
    around = Coordinates(state, objective, data.X)
    values = around.values(around.start())
    losses = [
        posterior_loss(state, data.take(torch.tensor(rows)), objective, values, scale=6 / 2)
        for rows in combinations(range(6), 2)
    ]
    expected = total_loss(state, data, objective)
    assert float(torch.stack(losses).mean()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", ["log_loss", "elbo"])
def test_fit_minibatch_lowers_the_objective(labels, name):
    data, state, objective = problem(labels=labels)
    objective = replace(objective, name=name)
    found = fit_minibatch(state, data, objective, batch_size=50, max_iter=60, generator=seeded())
    before, after = (total_loss(s, data, objective) for s in (state, found.state))
    assert after < before - 20
    assert found.loss == pytest.approx(after, rel=0.2, abs=20)


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_fit_minibatch_by_sampled_gradients_comes_near_exact_ones(gradient):
    data, state, exact = problem(labels=True)
    options = {"batch_size": 200, "max_iter": 80}
    sampled = replace(exact, gradient=gradient)
    losses = [
        total_loss(
            fit_minibatch(state, data, each, generator=seeded(), **options).state, data, exact
        )
        for each in (exact, sampled)
    ]
    assert losses[1] < losses[0] + 5 < total_loss(state, data, exact) - 20


def test_fit_minibatch_respects_bounds():
    data, state, objective = problem()
    found = fit_minibatch(
        state, data, objective, learning_rate=1.0, batch_size=20, max_iter=30, generator=seeded()
    ).state
    low, high = found.kernel.bounds.T
    assert (found.kernel.theta >= low - 1e-12).all() and (found.kernel.theta <= high + 1e-12).all()
    (low,), (high,) = (bound.tolist() for bound in FAMILY.box(found.Z))
    assert low - 1e-12 <= float(found.likelihood[0]) <= high + 1e-12


def test_fit_minibatch_of_q_alone_keeps_the_rest():
    data, state, objective = problem()
    alone = replace(objective, learn_kernel=False, learn_likelihood=False, learn_inducing=False)
    found = fit_minibatch(state, data, alone, max_iter=10, generator=seeded()).state
    assert torch.equal(found.Z, state.Z) and torch.equal(found.likelihood, state.likelihood)
    assert (found.kernel.theta == state.kernel.theta).all()
    assert not torch.equal(found.mean, state.mean)


def test_fit_minibatch_depends_on_its_generator_only():
    data, state, objective = problem()
    options = {"batch_size": 30, "max_iter": 5}
    first, again, other = (
        fit_minibatch(state, data, objective, generator=seeded(seed), **options).state.mean
        for seed in (0, 0, 1)
    )
    assert not torch.equal(first, other)
    assert_same(first, again)


def test_fit_minibatch_stops_when_told():
    data, state, objective = problem()
    heard = []

    def callback(iteration, info):
        heard.append(info["loss"])
        return len(heard) == 4

    found = fit_minibatch(
        state, data, objective, max_iter=50, generator=seeded(), callback=callback
    )
    assert found.stopped and len(heard) == len(found.history) == 4


def test_fit_minibatch_scores_rows_held_out():
    data, state, objective = problem()
    watch = BestState(objective, problem(50)[0])
    found = fit_minibatch(state, data, objective, max_iter=120, generator=seeded(), watch=watch)
    assert len(watch.losses) > 1 and watch.loss == min(watch.losses)
    assert not found.stopped


def test_default_batch_size_grows_with_the_points():
    assert default_batch_size(10) == 1000 and default_batch_size(500) == 2000


@pytest.mark.parametrize("name", ["batch_size", "learning_rate", "max_iter"])
def test_fit_minibatch_refuses_what_is_not_positive(name):
    data, state, objective = problem(20)
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        fit_minibatch(state, data, objective, generator=seeded(), **{name: 0})
