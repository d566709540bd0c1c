"""Algorithm 1: unbiased steps, what is learned, bounds, searches, and how it stops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.blocks import ArrayBlocks, MappedBlocks
from skgp.data import Data
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.search import active_sets
from skgp.learning.local import minibatch
from skgp.learning.local.bound import LocalObjective, bound, latent_moments, total_bound
from skgp.learning.local.minibatch import (
    LocalCoordinates,
    _Plateau,
    negative_log_predictive,
    of_all,
    of_minibatches,
    polish,
)
from skgp.likelihoods import Bernoulli, Gaussian
from skgp.optim import NonFiniteLossError
from tests.covering import covering, slow
from tests.same import assert_same

LIKELIHOOD = Gaussian(0.3, bounds=(0.05, 1.0))
KERNEL = ConstantKernel(1.0, (0.5, 2.0)) * RBF(0.5, (0.1, 2.0))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fit_minibatch(state, data, search, objective, **options):
    return minibatch.fit_minibatch(state, data, of_all(search), objective, **options)


def problem(n=200, M=20, H=5, *, labels=False, weighted=False, full=False, seed=0):
    """A state at its prior, rows, the search of their active points, and the objective."""
    generator = seeded(seed)
    X = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 4 - 2
    noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = torch.cat([(3 * X).sin(), X.cos()], dim=1) + 0.3 * noise
    weight = torch.linspace(0.5, 2.0, n, dtype=torch.float64) if weighted else None
    data = Data(X, y.sign() if labels else y, weight)
    likelihood = Bernoulli("probit") if labels else LIKELIHOOD
    Z = torch.linspace(-2, 2, M, dtype=torch.float64)[:, None]
    state = SWSGPState.prior(
        KERNEL,
        likelihood.initial(X),
        Z,
        X.new_zeros(2),
    )
    if full:
        state = state.with_posterior(state.mean, root=state.var.T.sqrt().diag_embed())
    return state, data, nearest(X, H), LocalObjective(likelihood, M / H)


def nearest(X, H=5):
    return lambda kernel, Z: torch.cdist(X, Z).topk(H, largest=False).indices


def value(state, data, search, objective):
    return total_bound(state, data, search(state.kernel, state.Z), objective)


def off_prior(state):
    """The state with a posterior that is no special point of the bound."""
    noise = torch.randn(state.mean.shape, generator=seeded(1), dtype=torch.float64)
    if state.root is None:
        return state.with_posterior(noise, var=noise.exp())
    lower = torch.randn(state.root.shape, generator=seeded(2), dtype=torch.float64).tril(-1)
    return state.with_posterior(noise, root=state.root + 0.1 * lower)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_gradients_of_the_batches_of_a_partition_average_to_that_of_all_rows(
    full, weighted, monkeypatch
):
    n, b = 60, 12
    state, data, search, objective = problem(n, full=full, weighted=weighted)
    objective = replace(objective, learn_inducing=True)
    state = off_prior(state)
    around = LocalCoordinates(state, objective)
    leaves = {k: v.clone().requires_grad_() for k, v in around.start().items()}
    assert set(leaves) == {"mean", "spread", "theta", "likelihood", "Z"}
    batches = list(torch.randperm(n, generator=seeded()).split(b))

    def estimates(size):
        loss = minibatch._MinibatchLoss(
            around, objective, leaves, data, of_all(search), size, seeded()
        )
        for step in range(n // size):
            estimate = loss(step)
            yield estimate.item(), torch.autograd.grad(estimate, list(leaves.values()))

    ((whole, expected),) = estimates(n)
    assert whole == pytest.approx(-value(state, data, search, objective) / data.total, rel=1e-12)
    monkeypatch.setattr(minibatch, "sample_without_replacement", lambda *_, **__: batches.pop())
    values, gradients = zip(*estimates(b), strict=True)
    assert sum(values) / len(values) == pytest.approx(whole, rel=1e-12)
    for parts, gradient in zip(zip(*gradients, strict=True), expected, strict=True):
        scale = float(gradient.abs().max())
        torch.testing.assert_close(sum(parts) / len(parts), gradient, rtol=0, atol=1e-11 * scale)


@pytest.mark.parametrize("full", [False, True])
def test_active_values_give_the_bound_of_their_rows(full):
    state, data, search, objective = problem(full=full)
    state, fixed = off_prior(state), replace(objective, kl_weight=2.0)
    around = LocalCoordinates(state, replace(objective, learn_inducing=True))
    active = search(None, state.Z)[:7]
    here, local = around.active_values(around.start(), active)
    batch = data.take(torch.arange(7))
    expected = bound(state, batch, active, fixed)
    assert float(bound(here, batch, local, fixed)) == pytest.approx(float(expected), rel=1e-12)


def test_active_values_touch_active_points_only():
    state, _, _, objective = problem(M=2000)
    around = LocalCoordinates(state, replace(objective, learn_inducing=True))
    here, local = around.active_values(around.start(), torch.tensor([[3, 1999], [7, 3]]))
    assert len(here.Z) == len(here.mean) == len(here.var) == 4
    torch.testing.assert_close(here.Z[local[:, 0]], state.Z[[3, 7]])


@covering(labels=[False, True], full=[False, True])
def test_fit_minibatch_raises_the_bound(labels, full):
    problem_ = state, data, search, objective = problem(labels=labels, full=full)
    found, history = fit_minibatch(*problem_, batch_size=50, max_iter=80, generator=seeded())
    gain = value(found, data, search, objective) - value(state, data, search, objective)
    assert gain > 100
    assert len(history) == 80 and (found.root is None) != full


def test_fit_minibatch_stays_near_an_optimum_it_starts_from():
    state, data, search, objective = problem()
    options = {"batch_size": 50, "max_iter": 120}
    first = fit_minibatch(state, data, search, objective, generator=seeded(), **options)[0]
    again = fit_minibatch(first, data, search, objective, generator=seeded(1), **options)[0]
    reached = value(first, data, search, objective)
    assert value(again, data, search, objective) > reached - 0.01 * abs(reached)


def test_learned_inducing_points_improve_the_bound():
    state, data, search, objective = problem(M=8, H=3)
    state = replace(state, Z=state.Z * 0.4)  # far from where the rows are
    free = replace(objective, learn_inducing=True)
    options = {"batch_size": 50, "max_iter": 120}
    fixed, learned = (
        fit_minibatch(state, data, search, each, generator=seeded(), **options)[0]
        for each in (objective, free)
    )
    assert torch.equal(fixed.Z, state.Z) and not torch.equal(learned.Z, state.Z)
    bounds = [value(each, data, search, objective) for each in (fixed, learned)]
    assert bounds[1] > bounds[0] + 20


def test_fit_minibatch_with_nothing_else_free_keeps_the_rest_and_searches_once(monkeypatch):
    monkeypatch.setattr(minibatch, "REFRESH_EVERY", 5)
    state, data, search, objective = problem()
    calls = []

    def counted(kernel, Z):
        calls.append(kernel)
        return search(kernel, Z)

    alone = replace(objective, learn_kernel=False, learn_likelihood=False)
    options = {"max_iter": 20, "batch_size": 20}
    found = fit_minibatch(state, data, counted, alone, generator=seeded(), **options)[0]
    assert len(calls) == 1
    assert torch.equal(found.Z, state.Z) and torch.equal(found.likelihood, state.likelihood)
    assert (found.kernel.theta == state.kernel.theta).all()
    assert not torch.equal(found.mean, state.mean) and not torch.equal(found.var, state.var)
    fit_minibatch(state, data, counted, objective, generator=seeded(), **options)
    assert len(calls) == 1 + 4
    assert calls[-1] != calls[1]  # the search sees the kernel that was reached


def test_fit_minibatch_depends_on_its_generator_only_and_leaves_its_start_alone():
    state, data, search, objective = problem()
    before = state.mean.clone()
    options = {"batch_size": 30, "max_iter": 5}
    first, again, other = (
        fit_minibatch(state, data, search, objective, generator=seeded(seed), **options)[0].mean
        for seed in (0, 0, 1)
    )
    assert not torch.equal(first, other)
    assert_same(first, again)
    assert torch.equal(state.mean, before)


def test_fit_minibatch_reports_mean_losses_and_stops_when_told():
    heard = []

    def callback(step, info):
        heard.append((step, info["loss"]))
        return len(heard) == 3

    problem_ = problem()
    options = {"max_iter": 50, "callback": callback}
    found, history = fit_minibatch(*problem_, generator=seeded(), **options)
    assert len(history) == 30 and [step for step, _ in heard] == [10, 20, 30]
    assert heard[1][1] == pytest.approx(np.mean(history[10:20]))
    assert found.mean.isfinite().all()


def test_fit_minibatch_in_single_precision():
    state, data, search, objective = problem()
    names = ("likelihood", "Z", "mean", "var", "offset")
    state = replace(state, **{name: getattr(state, name).float() for name in names})
    data = Data(data.X.float(), data.y.float())
    found = fit_minibatch(
        state, data, nearest(data.X), objective, batch_size=50, max_iter=60, generator=seeded()
    )[0]
    assert found.mean.dtype == found.var.dtype == torch.float32
    assert value(found, data, nearest(data.X), objective) > (
        value(state, data, nearest(data.X), objective) + 100
    )


def test_plateau_is_reached_where_losses_fall_no_more():
    rng = np.random.default_rng(0)
    falling, still = _Plateau(), _Plateau()
    noise = 0.3 * rng.standard_normal(2000)
    assert not any(falling(i, 20.0 - 0.01 * i + noise[i]) for i in range(2000))
    stops = [still(i, max(0.0, 5.0 - 0.01 * i) + noise[i]) for i in range(2000)]
    assert 500 < stops.index(True) < 1200


@pytest.mark.parametrize("kind", ["value", "covariance"])
def test_fit_that_meets_nan_says_what_to_do(kind):
    state, data, search, objective = problem(n=60)
    if kind == "value":
        objective = replace(objective, likelihood=Broken(0.3, bounds=(0.05, 1.0)))
    else:
        state = replace(state, Z=state.Z.clone())
        state.Z[7] = float("nan")
        search = lambda kernel, Z: torch.full((60, 5), 7)  # noqa: E731
    with pytest.raises(NonFiniteLossError, match="Lower learning_rate"):
        fit_minibatch(state, data, search, objective, generator=seeded(), max_iter=20)


@pytest.mark.parametrize("weighted", slow([False, True], but=[True]))
def test_rows_read_from_blocks_take_the_same_steps(weighted):
    state, data, _, objective = problem(labels=True, weighted=weighted)
    data = replace(data, y=data.y[:, :1])
    state = SWSGPState.prior(state.kernel, state.likelihood, state.Z, data.X.new_zeros(1))
    weight = None if data.weight is None else data.weight.numpy()
    blocks = ArrayBlocks(data.X.numpy(), data.y[:, 0].numpy() * 7 + 1, weight, 64)

    def coded(rows):
        return replace(rows, y=(rows.y[:, None] - 1) / 7)

    read = MappedBlocks(blocks, coded, data.total, data)
    options = {"batch_size": 50, "max_iter": 60}

    def search(kernel, Z):
        return active_sets(kernel, data.X, Z, 5)

    expected, losses = fit_minibatch(state, data, search, objective, generator=seeded(), **options)
    found, again = minibatch.fit_minibatch(
        state, read, of_minibatches(5, "auto"), objective, generator=seeded(), **options
    )
    np.testing.assert_allclose(again, losses, rtol=1e-10)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-8, atol=1e-10)
    assert found.kernel == expected.kernel != state.kernel


# ---- polish --------------------------------------------------------------------------------------


class Broken(Gaussian):
    """Noise that is no number from the sixth call on."""

    n_calls = 0

    def with_parameters(self, parameters):
        self.n_calls += 1
        likelihood = super().with_parameters(parameters)
        if self.n_calls > 5:
            likelihood.noise_variance = likelihood.noise_variance * float("nan")
        return likelihood


def polished(state, data, search, objective, **options):
    """The polish, and how much better it predicts other rows."""
    held_out = problem(100, seed=5)[1]
    other = nearest(held_out.X)
    options = {"max_iter": 60, "held_out": held_out, "held_out_search": other} | options
    found = polish(state, data, search, objective, generator=seeded(), **options)
    losses = [
        negative_log_predictive(each, held_out, other(None, each.Z), objective).mean()
        for each in (state, found[0])
    ]
    return *found, float(losses[0] - losses[1])


def test_polish_is_kept_where_it_predicts_better():
    state, *rest = problem()
    found, kept, history, gain = polished(state, *rest)
    assert kept and gain > 0.3 and found is not state and len(history) == 60


def test_polish_is_taken_back_where_it_predicts_worse():
    state, data, search, objective = problem()
    good = polished(state, data, search, objective)[0]
    found, kept, *_ = polished(good, Data(data.X, -data.y), search, objective)
    assert not kept and found is good


def test_polish_that_diverges_is_taken_back_with_a_warning():
    state, data, search, objective = problem()
    broken = replace(objective, likelihood=Broken(0.3, bounds=(0.05, 1.0)))
    with pytest.warns(RuntimeWarning, match="polish was not kept"):
        found = polish(
            state,
            data,
            search,
            broken,
            held_out=data,
            held_out_search=search,
            max_iter=20,
            generator=seeded(),
        )
    assert found == (state, False, [])


def test_polish_stops_when_told_and_searches_for_the_state_it_reached():
    state, data, search, objective = problem()
    kernels = []

    def held_out_search(kernel, Z):
        kernels.append(kernel)
        return search(kernel, Z)

    options = {"held_out": data, "held_out_search": held_out_search}
    found, kept, history, _ = polished(state, data, search, objective, **options)
    assert kept and set(map(str, kernels)) == {str(state.kernel), str(found.kernel)}
    history = polished(*problem(), callback=lambda step, info: True)[2]
    assert len(history) == 10


def test_negative_log_predictive_is_that_of_each_row():
    state, data, search, objective = problem(50, weighted=True)
    active = search(None, state.Z)
    mean, var = latent_moments(state, data.X, active)
    density = torch.distributions.Normal(mean, (var + state.likelihood.exp()).sqrt())
    found = negative_log_predictive(state, data, active, objective)
    torch.testing.assert_close(found, -density.log_prob(data.y).sum(1), rtol=1e-12, atol=0)
