"""The training loop: steps, Adam, schedules, minibatches, safety."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.optim import (
    Adam,
    NonFiniteLossError,
    TrainingLoop,
    exponential_decay,
    sample_without_replacement,
)


class GradientDescent:
    """Plain steps of one tensor."""

    def __init__(self, parameter, lr):
        self.param_groups = [{"params": [parameter], "lr": lr}]

    def zero_grad(self):
        self.param_groups[0]["params"][0].grad = None

    @torch.no_grad()
    def step(self):
        (x,) = self.param_groups[0]["params"]
        x -= self.param_groups[0]["lr"] * x.grad


def make_loop(compute_loss=None, lr=0.1, **options):
    """Return a loop that pulls x towards 1 by plain gradient descent."""
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    if compute_loss is None:
        compute_loss = lambda x, iteration: 0.5 * ((x - 1) ** 2).sum()  # noqa: E731
    loop = TrainingLoop(
        {"x": x}, lambda iteration: compute_loss(x, iteration), GradientDescent(x, lr), **options
    )
    return x, loop


def test_loop_takes_the_steps_of_gradient_descent():
    x, loop = make_loop()
    loop.run(20)
    torch.testing.assert_close(x.detach(), torch.full_like(x, 1 - 0.9**20))
    expected = [1.5 * 0.81**t for t in range(20)]
    assert loop.history["loss"] == pytest.approx(expected)
    assert loop.n_iter == 20 and not loop.stopped_early


def test_loop_continues_where_it_stopped():
    seen = []
    x, loop = make_loop(callback=lambda iteration, info: seen.append(iteration))
    loop.run(2).run(3)
    assert seen == [0, 1, 2, 3, 4] and loop.n_iter == 5
    torch.testing.assert_close(x.detach(), torch.full_like(x, 1 - 0.9**5))


def test_loop_follows_its_schedule():
    x, loop = make_loop(schedule=lambda t: 0.5 if t == 0 else 0.0)
    loop.run(3)
    assert loop.history["learning_rate"] == [0.5, 0.0, 0.0]
    torch.testing.assert_close(x.detach(), torch.full_like(x, 0.5))


def test_loop_stops_when_the_callback_says_so():
    x, loop = make_loop(callback=lambda iteration, info: info["loss"] < 1)
    loop.run(100)
    assert loop.n_iter == 3 and loop.stopped_early  # 1.5 * .81^2 < 1


def test_loop_asks_every_rule_at_every_iteration():
    heard = []
    rules = [lambda i, loss: i == 1, lambda i, loss: heard.append((i, loss)) or False]
    _, loop = make_loop(stopping=rules)
    loop.run(100)
    assert heard == [(0, pytest.approx(1.5)), (1, pytest.approx(1.5 * 0.81))]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loop_keeps_the_last_good_parameters(bad):
    def compute_loss(x, iteration):
        return ((x - 1) ** 2).sum() * 0.5 * (bad if iteration == 7 else 1.0)

    x, loop = make_loop(compute_loss, snapshot_every=5)
    with pytest.raises(NonFiniteLossError, match="iteration 7 and parameter 'x'") as caught:
        loop.run(100)
    assert caught.value.iteration == 7 and caught.value.parameter == "x"
    assert isinstance(caught.value, FloatingPointError)
    assert "those of iteration 5" in str(caught.value)
    torch.testing.assert_close(x.detach(), torch.full_like(x, 1 - 0.9**5))
    assert loop.n_iter == 7 and len(loop.history["loss"]) == 7


def test_loop_undoes_a_step_that_led_to_a_nan():
    # At iteration 1 the parameter is already bad: the step to it was the fault.
    x, loop = make_loop(lambda x, iteration: x.sum() + torch.log(1 + x.sum()), lr=1.0)
    with pytest.raises(NonFiniteLossError, match="iteration 1"):
        loop.run(5)
    assert torch.equal(x.detach(), torch.zeros_like(x))


def test_loop_refuses_a_bad_gradient_of_a_finite_loss():
    x, loop = make_loop(lambda x, iteration: x.sqrt().sum())  # derivative infinite at 0
    with pytest.raises(NonFiniteLossError, match=r"loss is 0 at iteration 0 and parameter 'x'"):
        loop.run(1)
    assert torch.equal(x.detach(), torch.zeros_like(x))


def test_loop_says_when_no_parameter_is_to_blame():
    x, loop = make_loop(lambda x, iteration: x.sum() + math.inf)
    with pytest.raises(NonFiniteLossError, match="no single parameter") as caught:
        loop.run(1)
    assert caught.value.parameter is None


def test_loop_steps_can_be_overridden():
    class Halving(TrainingLoop):
        def train_step(self, iteration):
            with torch.no_grad():
                self.parameters["x"].mul_(0.5)
            return 1.0

    x = torch.ones(2)
    Halving({"x": x}, None, GradientDescent(x, 0.1)).run(3)
    assert torch.equal(x, torch.full((2,), 0.125))


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


def test_sample_time_does_not_depend_on_n():
    def seconds(n):
        stream, times = generator(), []
        for _ in range(30):
            start = time.perf_counter()
            sample_without_replacement(n, 500, generator=stream)
            times.append(time.perf_counter() - start)
        return np.median(times)

    assert seconds(10**10) < 5 * seconds(10**4)


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
