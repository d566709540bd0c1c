"""The training loop: steps, Adam, schedules, bounds, minibatches, safety."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.linalg import NotPositiveDefiniteError
from skgp.optim import (
    Adam,
    BoundedAdam,
    NonFiniteLossError,
    exponential_decay,
    sample_without_replacement,
)
from skgp.optim.stopping import StopRecorder


def make_loop(compute_loss=None, start=0.0, bounds=None, callback=None):
    """Leaves "slow" and "fast", whose rate is twice as great, and a loop that pulls both to 1."""
    leaves = {
        name: torch.full((3,), start, dtype=torch.float64, requires_grad=True)
        for name in ("slow", "fast")
    }
    if compute_loss is None:
        compute_loss = lambda slow, fast, iteration: (  # noqa: E731
            0.5 * ((slow - 1) ** 2).sum() + 0.5 * ((fast - 1) ** 2).sum()
        )
    loop = BoundedAdam(
        leaves,
        lambda iteration: compute_loss(**leaves, iteration=iteration),
        bounds or {},
        shares={"slow": 1.0, "fast": 2.0},
        eps={"fast": 1e-3},
        callback=StopRecorder(callback),
    )
    return leaves, loop


def falling(slow, fast, iteration):
    return (slow + fast).sum()


def values(leaves):
    return [leaf.detach() for leaf in leaves.values()]


def test_loop_takes_the_steps_of_adam_at_the_rate_and_epsilon_of_each_kind():
    leaves, loop = make_loop()
    assert not loop.run(20, lambda i: 0.1)
    assert loop.n_iter == len(loop.history) == 20
    for leaf, rate, eps in zip(values(leaves), (0.1, 0.2), (1e-8, 1e-3), strict=True):
        x, gradients = np.zeros(3), []
        for _ in range(20):
            gradients.append(x - 1)
            x = reference(np.zeros(3), gradients, rate, (0.9, 0.99), eps)
        np.testing.assert_allclose(leaf, x, rtol=1e-12)


def test_loop_continues_where_it_stopped():
    seen, rates = [], []
    leaves, loop = make_loop(callback=lambda iteration, info: seen.append(iteration))
    loop.run(2, lambda i: 0.1)
    loop.run(3, lambda i: rates.append(i) or 0.1)
    assert seen == [1, 2, 3, 4, 5] and loop.n_iter == 5 and set(rates) == {2, 3, 4}
    whole, other = make_loop()
    other.run(5, lambda i: 0.1)
    assert all(map(torch.equal, values(leaves), values(whole)))


def test_loop_asks_every_rule_at_every_iteration():
    heard = []
    rules = [lambda i, loss: i == 1, lambda i, loss: heard.append((i, loss)) or False]
    _, loop = make_loop()
    assert loop.run(100, lambda i: 0.1, rules)
    assert heard == list(enumerate(loop.history)) and len(heard) == 2


def test_rates_are_flat_then_fall_to_zero_and_kinds_have_their_shares():
    rates = []
    leaves, loop = make_loop(falling, callback=lambda *_: rates.append(rate_of(loop)))
    assert not loop.flat_then_falling(0.1, 6, share=0.5)
    np.testing.assert_allclose(rates, [0.1] * 4 + [0.1, 0.05])
    torch.testing.assert_close(leaves["fast"], 2 * leaves["slow"], rtol=2e-3, atol=0)


def rate_of(loop):
    return loop.adam.param_groups[0]["lr"]


def test_first_phase_ends_by_a_rule_and_both_by_the_callback():
    _, loop = make_loop(falling)
    assert loop.flat_then_falling(0.1, 100, share=1.0, stopping=[lambda i, loss: i == 3])
    assert loop.n_iter == 8
    _, loop = make_loop(falling, callback=lambda n_calls, info: n_calls == 4)
    assert not loop.flat_then_falling(0.1, 100, share=1.0)
    assert loop.n_iter == 4


def test_steps_stay_within_bounds():
    low, high = torch.tensor([-0.3, 0.5]).double()
    leaves, loop = make_loop(falling, 1.0, {"slow": (low, high)})
    assert (leaves["slow"] == 0.5).all()
    loop.flat_then_falling(0.2, 20, share=1.0)
    assert (leaves["slow"] == low).all() and (leaves["fast"] < -1).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loop_keeps_the_last_good_parameters(bad):
    def compute_loss(slow, fast, iteration):
        return falling(slow, fast, iteration) * (bad if iteration == 17 else 1.0)

    leaves, loop = make_loop(compute_loss)
    with pytest.raises(NonFiniteLossError, match="iteration 17 and parameter 'slow'") as caught:
        loop.run(100, lambda i: 0.1)
    assert caught.value.iteration == 17 and caught.value.parameter == "slow"
    assert isinstance(caught.value, FloatingPointError)
    assert "those of iteration 10" in str(caught.value) and loop.n_iter == 17
    good, other = make_loop(falling)
    other.run(10, lambda i: 0.1)
    assert all(map(torch.equal, values(leaves), values(good)))


def test_loop_undoes_a_step_that_led_to_a_nan():
    # At iteration 1 the parameter is already bad: the step to it was the fault.
    leaves, loop = make_loop(lambda slow, fast, iteration: (slow + fast + 1).log().sum())
    with pytest.raises(NonFiniteLossError, match="iteration 1"):
        loop.run(5, lambda i: 1.0)
    assert not torch.cat(values(leaves)).any()


def test_loop_refuses_a_bad_gradient_of_a_finite_loss():
    # The derivative is infinite at 0.
    leaves, loop = make_loop(lambda slow, fast, iteration: fast.sqrt().sum())
    with pytest.raises(NonFiniteLossError, match=r"loss is 0 at iteration 0 and parameter 'fast'"):
        loop.run(1, lambda i: 0.1)
    assert not torch.cat(values(leaves)).any()


def test_loop_says_when_no_parameter_is_to_blame():
    _, loop = make_loop(lambda slow, fast, iteration: falling(slow, fast, 0) + math.inf)
    with pytest.raises(NonFiniteLossError, match="no single parameter") as caught:
        loop.run(1, lambda i: 0.1)
    assert caught.value.parameter is None


def test_loop_goes_back_where_the_loss_cannot_be_computed():
    def compute_loss(slow, fast, iteration):
        if iteration:
            raise NotPositiveDefiniteError("No factor.")
        return falling(slow, fast, iteration)

    leaves, loop = make_loop(compute_loss)
    with pytest.raises(NonFiniteLossError, match="iteration 1.*Lower learning_rate. No factor."):
        loop.run(5, lambda i: 0.1)
    assert not torch.cat(values(leaves)).any()


def test_exponential_decay_is_geometric_and_then_constant():
    rate = exponential_decay(0.1, 1e-3, 100)
    assert rate(0) == pytest.approx(0.1) and rate(50) == pytest.approx(0.01)
    assert rate(100) == rate(1000) == pytest.approx(1e-3)
    assert rate(31) / rate(30) == pytest.approx(rate(1) / rate(0))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("n", "size"), [(1, 1), (10, 0), (10, 3), (10, 4), (10, 10), (10**9, 500)])
def test_sample_is_distinct_sorted_and_in_range(n, size):
    indices = sample_without_replacement(n, size, generator=generator())
    assert indices.shape == (size,) and indices.dtype == torch.int64
    assert (indices.diff() > 0).all()
    assert size == 0 or (0 <= indices[0] and indices[-1] < n)


@pytest.mark.parametrize("size", [2, 4])  # redrawing (2 <= 7 // 3) and permutation
def test_sample_is_uniform_over_subsets(size):
    n, n_draws = 7, 6000
    stream = generator(1)
    subsets = {subset: 0 for subset in itertools.combinations(range(n), size)}
    for _ in range(n_draws):
        subsets[tuple(sample_without_replacement(n, size, generator=stream).tolist())] += 1
    assert stats.chisquare(list(subsets.values())).pvalue > 1e-3


def test_sample_follows_its_generator_and_no_other():
    before = torch.get_rng_state()
    first, second = (sample_without_replacement(1000, 50, generator=generator(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    other = sample_without_replacement(1000, 50, generator=generator(4))
    assert not torch.equal(first, other)


def reference(x, gradients, lr, betas, eps=1e-8):
    """The steps of Kingma and Ba, algorithm 1."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        x = x - lr * m_hat / (np.sqrt(v_hat) + eps)
    return x


def take_steps(optimizer, leaf, gradients):
    for gradient in gradients:
        leaf.grad = torch.as_tensor(gradient)
        optimizer.step()


@pytest.mark.parametrize("shape", [(3,), (), (2, 70_001)])  # the last goes block by block
def test_adam_takes_the_steps_of_the_paper(rng, shape):
    start, gradients = rng.standard_normal(shape), rng.standard_normal((5, *shape))
    leaf = torch.tensor(start, requires_grad=True)
    take_steps(Adam([leaf], lr=0.03, betas=(0.8, 0.95)), leaf, gradients)
    expected = reference(start, gradients, 0.03, (0.8, 0.95))
    np.testing.assert_allclose(leaf.detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_adam_moves_groups_at_their_own_rates_and_only_what_has_a_gradient(rng):
    a, b, c = (torch.zeros(2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    optimizer = Adam([{"params": [a], "share": 2.0}, {"params": [b, c], "lr": 0.5}], lr=0.1)
    assert optimizer.param_groups[0]["share"] == 2.0
    optimizer.param_groups[0]["lr"] = 0.2
    a.grad = b.grad = torch.ones_like(a)
    optimizer.step()
    # The first step is the rate, whatever the gradient.
    for leaf, expected in ((a, -0.2), (b, -0.5), (c, 0.0)):
        torch.testing.assert_close(
            leaf.detach(), torch.full_like(leaf, expected), rtol=1e-7, atol=0
        )
    optimizer.zero_grad()
    assert a.grad is None


def test_adam_goes_on_from_the_moments_of_another(rng):
    start, gradients = rng.standard_normal(4), rng.standard_normal((6, 4))
    leaf = torch.tensor(start, requires_grad=True)
    first = Adam([leaf])
    take_steps(first, leaf, gradients[:3])
    second = Adam([leaf])
    second.load_state_dict(first.state_dict())
    take_steps(second, leaf, gradients[3:])
    expected = reference(start, gradients, 1e-3, (0.9, 0.999))
    np.testing.assert_allclose(leaf.detach().numpy(), expected, rtol=1e-12)
    assert first.state_dict()["n_steps"] == [3]  # and shares nothing with it
