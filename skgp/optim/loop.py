"""A small training loop: gradient steps on a loss, with schedule, stopping rules and safety.

The loop is made of short methods; a solver with steps of its own overrides one of them:

>>> import torch
>>> from skgp.optim import Adam
>>> x = torch.zeros(2, requires_grad=True)
>>> loop = TrainingLoop(
...     {"x": x},
...     lambda iteration: ((x - 1) ** 2).sum(),
...     Adam([x], lr=1.0),
... )
>>> _ = loop.run(max_iter=2)
>>> loop.n_iter, [round(loss, 3) for loss in loop.history["loss"]]
(2, [2.0, 0.0])

The optimizers of torch load its compiler (`torch._dynamo`, some two seconds) when the first is
made; a fit has no use for it, and :class:`Adam` [1]_ takes a few operations.

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.optim.defaults import BLOCK

Schedule = Callable[[int], float]
StoppingRule = Callable[[int, float], bool]


class Optimizer(Protocol):
    """Moves parameters by their gradients: `skgp.optim.Adam`, or one of torch's."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> None:
        """Move the parameters by them."""


class NonFiniteLossError(FloatingPointError):
    """The loss or a gradient became NaN or infinite.

    Attributes
    ----------
    iteration : int
    parameter : str or None
        Name of the first parameter whose value or gradient is not finite, if there is one.
    """

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


class TrainingLoop:
    """Minimise a (stochastic) loss by the steps of an optimizer.

    A copy of the parameters is kept to go back to from a NaN.

    Attributes
    ----------
    n_iter : int
        Iterations done, over all calls of `run`.
    history : dict of str to list of float
        "loss" and "learning_rate" of each iteration.
    stopped_early : bool
        Whether a rule or the callback ended the last run.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],  # leaves, changed in place; names serve the errors
        compute_loss: Callable[[int], Tensor],  # of an iteration; draws its own minibatch
        optimizer: Optimizer,
        *,
        schedule: Schedule | None = None,  # the learning rate of an iteration; None leaves it alone
        stopping: Sequence[StoppingRule] = (),  # `skgp.optim.stopping`; True stops
        callback: Callable[[int, Mapping[str, Any]], bool] | None = None,  # called last
        snapshot_every: int = 10,  # iterations between two copies of the parameters
    ) -> None:
        self.parameters = dict(parameters)
        self.compute_loss = compute_loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.stopping = tuple(stopping)
        self.callback = callback
        self.snapshot_every = snapshot_every
        self.n_iter = 0
        self.history: dict[str, list[float]] = {"loss": [], "learning_rate": []}
        self.stopped_early = False
        self.take_snapshot()

    def run(self, max_iter: int) -> "TrainingLoop":
        """Do at most ``max_iter`` further iterations.

        Raises
        ------
        NonFiniteLossError
            If the loss or a gradient is NaN or infinite. The parameters are those of the last
            snapshot, where both were finite.
        """
        self.stopped_early = False
        for iteration in range(self.n_iter, self.n_iter + max_iter):
            self.set_learning_rate(iteration)
            loss = self.train_step(iteration)
            self.n_iter = iteration + 1
            self.record(loss)
            if self.should_stop(iteration, loss):
                self.stopped_early = True
                break
        return self

    def set_learning_rate(self, iteration: int) -> None:
        """Give every parameter group the learning rate of the schedule."""
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(iteration)

    def train_step(self, iteration: int) -> float:
        """Evaluate the loss and its gradient, check both, and move the parameters.

        The check comes before the move: parameters that pass it are good, and a bad gradient
        never reaches them.
        """
        self.optimizer.zero_grad()
        loss = self.compute_loss(iteration)
        loss.backward()
        self.check_finite(iteration, loss)
        if iteration % self.snapshot_every == 0:
            self.take_snapshot()
        self.optimizer.step()
        return loss.item()

    def record(self, loss: float) -> None:
        """Append an iteration to the history."""
        self.history["loss"].append(loss)
        self.history["learning_rate"].append(self.optimizer.param_groups[0]["lr"])

    def should_stop(self, iteration: int, loss: float) -> bool:
        """Ask every rule, then the callback: each is called at every iteration."""
        answers = [rule(iteration, loss) for rule in self.stopping]
        if self.callback is not None:
            answers.append(self.callback(iteration, {"loss": loss}))
        return any(answers)

    def take_snapshot(self) -> None:
        """Copy the parameters, which are known to be good."""
        self._snapshot = {k: v.detach().clone() for k, v in self.parameters.items()}
        self._snapshot_iteration = self.n_iter

    @torch.no_grad()
    def restore_snapshot(self) -> None:
        """Put the last good parameters back in place."""
        for name, value in self._snapshot.items():
            self.parameters[name].copy_(value)

    def check_finite(self, iteration: int, loss: Tensor) -> None:
        """Restore the last good parameters and raise if loss or gradients are not finite."""
        culprit = next((k for k, v in self.parameters.items() if not _is_finite(v)), None)
        if culprit is None and torch.isfinite(loss):
            return
        blame = (
            f"parameter {culprit!r} (or its gradient) is not finite either"
            if culprit is not None
            else "no single parameter is to blame"
        )
        self.restore_snapshot()
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
