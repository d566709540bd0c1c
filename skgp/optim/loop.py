"""A training loop: Adam on a loss of minibatches, with schedule, stopping rules, bounds and safety.

>>> import torch
>>> from skgp.optim.stopping import StopRecorder
>>> x = torch.zeros(2, requires_grad=True)
>>> loop = BoundedAdam(
...     {"x": x},
...     lambda iteration: ((x - 1) ** 2).sum(),
...     {},
...     shares={"x": 1.0},
...     eps={},
...     callback=StopRecorder(None),
... )
>>> loop.run(2, lambda iteration: 1.0)
False
>>> [round(loss, 3) for loss in loop.history]
[2.0, 0.0]

The optimizers of torch load its compiler (`torch._dynamo`, some two seconds) when the first is
made; a fit has no use for it, and :class:`Adam` [1]_ takes a few operations.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from skgp.linalg import NotPositiveDefiniteError
from skgp.optim.defaults import BLOCK, BOUNDED_MOMENTS, SNAPSHOT_EVERY
from skgp.optim.stopping import StopRecorder

Schedule = Callable[[int], float]
StoppingRule = Callable[[int, float], bool]


class NonFiniteLossError(FloatingPointError):
    """The loss or a gradient became NaN or infinite, and of which `parameter` first, if of one."""

    def __init__(self, message: str, *, iteration: int, parameter: str | None) -> None:
        super().__init__(message)
        self.iteration = iteration
        self.parameter = parameter


class Adam:
    r"""Gradient steps scaled by running moments of the gradient g.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \quad
              v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \quad
              x_t = x_{t-1} - \rho \, \frac{m_t / (1 - \beta_1^t)}
                                          {\sqrt{v_t / (1 - \beta_2^t)} + \epsilon}

    The parameters are leaf tensors, changed in place, or groups ``{"params": [...], "lr": ...,
    "eps": ...}`` and other entries that ``param_groups`` is to hold. `lr` is for
    groups that name none; theirs may be set between steps.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[Mapping[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        given: list[Any] = list(parameters)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, **group} for group in groups]
        self.betas, self.eps = betas, eps
        leaves = self._leaves()
        self._n_steps = [0] * len(leaves)
        self._first = [torch.zeros_like(x, requires_grad=False) for x in leaves]
        self._second = [torch.zeros_like(x, requires_grad=False) for x in leaves]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self._leaves():
            leaf.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        own = [(g["lr"], g.get("eps", self.eps)) for g in self.param_groups for _ in g["params"]]
        for i, (leaf, (rate, eps)) in enumerate(zip(self._leaves(), own, strict=True)):
            if leaf.grad is None:
                continue
            self._n_steps[i] += 1
            arrays = (leaf, leaf.grad, self._first[i], self._second[i])
            if leaf.numel() <= BLOCK or not all(a.is_contiguous() for a in arrays):
                self._move(arrays, rate, eps, self._n_steps[i])
                continue
            for part in zip(*(a.view(-1).split(BLOCK) for a in arrays), strict=True):
                self._move(part, rate, eps, self._n_steps[i])

    def state_dict(self) -> dict[str, list]:
        """Steps and moments of each parameter, for `load_state_dict` of another instance."""
        return {"n_steps": self._n_steps, "first": self._first, "second": self._second}

    def load_state_dict(self, state: Mapping[str, list]) -> None:
        """Go on from a copy of moments of parameters of the same shapes."""
        self._n_steps = list(state["n_steps"])
        self._first, self._second = ([t.clone() for t in state[k]] for k in ("first", "second"))

    def _leaves(self) -> list[Tensor]:
        return [leaf for group in self.param_groups for leaf in group["params"]]

    def _move(self, arrays: Sequence[Tensor], rate: float, eps: float, n_steps: int) -> None:
        """One step of a parameter, or of a block of it; all four arrays of one shape."""
        x, gradient, first, second = arrays
        beta_1, beta_2 = self.betas
        first.lerp_(gradient, 1 - beta_1)
        second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
        scale = second.sqrt().div_(math.sqrt(1 - beta_2**n_steps)).add_(eps)
        x.addcdiv_(first, scale, value=-rate / (1 - beta_1**n_steps))


def exponential_decay(start: float, end: float, n_steps: int) -> Schedule:
    r"""Return the schedule :math:`\rho_t = \rho_0 (\rho_1 / \rho_0)^{\min(t / T, 1)}`.

    Both learning rates are positive, T = n_steps at least 1.

    Examples
    --------
    >>> rate = exponential_decay(1.0, 0.01, 10)
    >>> [round(rate(t), 3) for t in (0, 5, 10, 20)]
    [1.0, 0.1, 0.01, 0.01]
    """
    return lambda iteration: start * (end / start) ** min(iteration / n_steps, 1.0)


def sample_without_replacement(n: int, size: int, *, generator: torch.Generator) -> Tensor:
    r"""Draw a uniform subset of ``range(n)``.

    Draws with replacement and draws again, as often as needed, as many indices as were
    duplicates. The result is the set of the first ``size`` distinct values of one i.i.d. uniform
    sequence, so all subsets are equally likely. Each round repeats at most one third of its draws
    in expectation: O(size) time and memory, whatever n. From ``size > n / 3`` on, a permutation
    of ``range(n)`` is of that order too and is taken instead.

    In increasing order (which reads a memory map forwards), on the device of the generator.

    Examples
    --------
    >>> sample_without_replacement(10, 10, generator=torch.Generator().manual_seed(0))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    if size > n // 3:
        order = torch.randperm(n, generator=generator, device=generator.device)
        return order[:size].sort().values
    chosen = torch.empty(0, dtype=torch.int64, device=generator.device)
    while (missing := size - len(chosen)) > 0:
        drawn = torch.randint(n, (missing,), generator=generator, device=generator.device)
        chosen = torch.cat([chosen, drawn]).unique()
    return chosen


def host_generator(generator: torch.Generator) -> torch.Generator:
    """Itself if it draws on the CPU, else one that does, of its state or at least of its seed."""
    if generator.device.type == "cpu":
        return generator
    host, state = torch.Generator(), generator.get_state()
    if len(state) == len(host.get_state()):
        return host.set_state(state)
    return host.manual_seed(generator.initial_seed())


class BoundedAdam:
    """Minimise a (stochastic) loss by Adam, each kind of parameter at its own rate, within bounds.

    A copy of the parameters is kept to go back to from a NaN.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],  # leaves, changed in place; names serve the errors
        compute_loss: Callable[[int], Tensor],  # of an iteration; draws its own minibatch
        bounds: Mapping[str, tuple[Tensor, Tensor]],  # of the parameters that have some
        *,
        shares: Mapping[str, float],  # rate of each kind in units of that of the schedule
        eps: Mapping[str, float],  # epsilon of the kinds that have one of their own
        callback: StopRecorder,  # called last
    ) -> None:
        self.parameters, self.compute_loss = dict(parameters), compute_loss
        self.bounds, self.callback = bounds, callback
        groups = [
            {"params": [leaf], "share": shares[name], "eps": eps.get(name, 1e-8)}
            for name, leaf in parameters.items()
        ]
        self.adam = Adam(groups, betas=BOUNDED_MOMENTS)
        self.history: list[float] = []  # the loss of each iteration
        self._project()
        self._take_snapshot()

    @property
    def n_iter(self) -> int:
        """Iterations done, over all calls of `run`."""
        return len(self.history)

    def flat_then_falling(
        self,
        rate: float,
        max_iter: int,
        *,
        share: float,
        stopping: Sequence[StoppingRule] = (),
        while_falling: Sequence[StoppingRule] = (),
    ) -> bool:
        """Run at one rate while rules let it, then at rates that fall linearly to 0.

        The second phase, which averages the noise of minibatches away, takes `share` as many steps
        as the first; both take `max_iter` at most. The callback ends both. Returns whether a rule
        ended the first.
        """
        n_flat = max_iter - int(max_iter * share / (1 + share))
        by_rule = self.run(n_flat, lambda iteration: rate, stopping)
        if self.callback.stopped:
            return False
        begin = self.n_iter
        n_falling = min(int(share * begin), max_iter - begin)
        self.run(n_falling, lambda i: rate * (1 - (i - begin) / n_falling), while_falling)
        return by_rule

    def run(
        self,
        max_iter: int,
        rate: Schedule,
        stopping: Sequence[StoppingRule] = (),  # `skgp.optim.stopping`; True stops
    ) -> bool:
        """Do at most `max_iter` further iterations; whether a rule or the callback ended them.

        A NonFiniteLossError says that the loss or a gradient is NaN or infinite, or that the loss
        could not be computed. The parameters are then those of the last snapshot, where both were
        finite.
        """
        for iteration in range(self.n_iter, self.n_iter + max_iter):
            for group in self.adam.param_groups:
                group["lr"] = rate(iteration) * group["share"]
            loss = self._step(iteration)
            self.history.append(loss)
            # Each is called at every iteration.
            answers = [rule(iteration, loss) for rule in stopping]
            if any([*answers, self.callback(iteration, {"loss": loss})]):
                return True
        return False

    def _step(self, iteration: int) -> float:
        """Evaluate the loss and its gradient, check both, and move the parameters.

        The check comes before the move: parameters that pass it are good, and a bad gradient
        never reaches them.
        """
        self.adam.zero_grad()
        try:
            loss = self.compute_loss(iteration)
            loss.backward()
        except NotPositiveDefiniteError as error:
            self._restore_snapshot()
            raise NonFiniteLossError(
                f"The loss could not be computed at iteration {iteration}; the parameters were "
                f"put back to earlier ones. Lower learning_rate. {error}",
                iteration=iteration,
                parameter=None,
            ) from error
        self._check_finite(iteration, loss)
        if iteration % SNAPSHOT_EVERY == 0:
            self._take_snapshot()
        self.adam.step()
        self._project()
        return loss.item()

    @torch.no_grad()
    def _project(self) -> None:
        """Move parameters back inside their bounds."""
        for name, (low, high) in self.bounds.items():
            self.parameters[name].clamp_(low, high)

    def _take_snapshot(self) -> None:
        """Copy the parameters, which are known to be good."""
        self._snapshot = {k: v.detach().clone() for k, v in self.parameters.items()}
        self._snapshot_iteration = self.n_iter

    @torch.no_grad()
    def _restore_snapshot(self) -> None:
        """Put the last good parameters back in place."""
        for name, value in self._snapshot.items():
            self.parameters[name].copy_(value)

    def _check_finite(self, iteration: int, loss: Tensor) -> None:
        """Restore the last good parameters and raise if loss or gradients are not finite."""
        # A sum is one pass where isfinite is several, a time that shows for many points. Finite
        # gradients keep parameters finite; a sum that overflows is left to the exact check.
        gradients = [leaf.grad.sum() for leaf in self.parameters.values() if leaf.grad is not None]
        if all(torch.isfinite(each) for each in (loss, *gradients)):
            return
        culprit = next((k for k, v in self.parameters.items() if not _is_finite(v)), None)
        if culprit is None and torch.isfinite(loss):
            return
        blame = (
            f"parameter {culprit!r} (or its gradient) is not finite either"
            if culprit is not None
            else "no single parameter is to blame"
        )
        self._restore_snapshot()
        raise NonFiniteLossError(
            f"The loss is {loss.item():.4g} at iteration {iteration} and {blame}. The parameters "
            f"were put back to those of iteration {self._snapshot_iteration}. Lower learning_rate, "
            'use dtype="float64", or scale the columns of X.',
            iteration=iteration,
            parameter=culprit,
        )


def _is_finite(parameter: Tensor) -> bool:
    """Tell whether a parameter and its gradient, if it has one, are finite."""
    gradient = parameter.grad
    return bool(
        torch.isfinite(parameter.detach()).all()
        and (gradient is None or torch.isfinite(gradient).all())
    )
