r"""Algorithm 1: the bound of eq. 11 maximised by steps of Adam [1]_ on minibatches.

A step estimates the bound from a set B of b of the n rows, drawn without replacement,

.. math:: \hat{\mathcal L} = \frac nb \sum_{i \in B} w_i \left( E_{q(f_i)}[\log p(y_i \mid f_i)]
    - \frac{\kappa}{N} \mathrm{KL}_i \right),

whose mean over all such sets, or over the sets of a partition, is the bound itself. It costs
:math:`O(b H^3)` whatever M, but for passes over the vectors that Adam keeps.

The steps are taken in coordinates of natural units: hyper-parameters are logarithms, inducing
points are measured in length scales, means in the standard deviations that q(u) starts with, and
variances are logarithms. The rate stays flat, then falls linearly to 0, which averages the noise
of the minibatches away; or it stays flat throughout and the last iterates are averaged.

Unwhitened means are strongly coupled, and Adam is slow to learn them where H is large. It does
best what the closed forms cannot: hyper-parameters and inducing points together with q(u), from
where those arrive (:mod:`skgp.learning.local.polish`).

References
----------
.. [1] Kingma and Ba (2015), Adam: a method for stochastic optimization.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.learning.local.bound import Objective, bound, kl_weight
from skgp.learning.local.coordinates import Coordinates
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.optim import Adam, NonFiniteLossError, TrainingLoop, sample_without_replacement

__all__ = [
    "LEARNING_RATE",
    "DivergedError",
    "MinibatchFit",
    "Search",
    "fit_minibatch",
]

Callback = Callable[[int, dict], bool | None]
#: ``search(kernel, Z) -> active``: the (n, H) inducing points nearest to each of n rows.
Search = Callable[..., Tensor]

#: Of hyper-parameters, which are logarithms.
LEARNING_RATE = 0.03
# Rates relative to `LEARNING_RATE`.
_SHARES = {"mean": 10.0, "spread": 10.0, "theta": 1.0, "likelihood": 1.0, "Z": 0.5}
_MOMENTS = (0.9, 0.99)
# Of the search for a plateau: steps compared, and nats an observation that count as nothing.
_WINDOW, _LEAST_GAIN = 100, 2e-3


class DivergedError(NonFiniteLossError):
    """The bound or its gradient was not finite.

    Attributes
    ----------
    state : SWSGPState
        The last that was known to be good.
    """

    def __init__(self, error: NonFiniteLossError, state: SWSGPState) -> None:
        super().__init__(str(error), iteration=error.iteration, parameter=error.parameter)
        self.state = state


@dataclass(frozen=True)
class MinibatchFit:
    """Where Algorithm 1 arrived.

    Attributes
    ----------
    state : SWSGPState
    history : list of float
        Minus the estimated bound of each step, in nats an observation.
    stopped : bool
        Whether the callback stopped it.
    """

    state: SWSGPState
    history: list[float]
    stopped: bool


def fit_minibatch(
    state: SWSGPState,
    data: Data,
    search: Search,
    objective: Objective,
    *,
    generator: torch.Generator,
    max_iter: int,
    batch_size: int = 256,
    learning_rate: float = LEARNING_RATE,
    falling: float = 0.5,
    average: bool = False,
    settle: bool = False,
    refresh_every: int = 50,
    callback: Callback | None = None,
    callback_every: int = 10,
) -> MinibatchFit:
    r"""Learn q(u), and what `objective` lets free, from minibatches.

    Parameters
    ----------
    state : SWSGPState
        Where to begin.
    data : Data
        n rows.
    search : callable
        ``search(kernel, Z) -> active (n, H)``. Called once where neither the kernel nor Z is
        learned.
    objective : Objective
    generator : torch.Generator
        Draws the minibatches.
    max_iter : int
        Steps.
    batch_size : int, default=256
        b; n if that is less.
    learning_rate : float, default=0.03
        Of the logarithms of hyper-parameters; the other rates are multiples of it.
    falling : float, default=0.5
        Fraction of the steps, the last ones, in which the rate falls or iterates are averaged.
    average : bool, default=False
        Keep the rate and average, in place of letting the rate fall.
    settle : bool, default=False
        Keep the rate until the bound stands still, then let it fall over half as many steps;
        `max_iter` is the most that this may take.
    refresh_every : int, default=50
        Steps between two searches, where the kernel or Z is learned.
    callback : callable, optional
        ``callback(step, {"loss": float})`` with the mean loss since the last call; True stops.
    callback_every : int, default=10
        Steps between two calls.

    Returns
    -------
    MinibatchFit

    Raises
    ------
    ValueError
        If `max_iter`, `batch_size`, `learning_rate`, `refresh_every` or `callback_every` is not
        positive, or `falling` not in (0, 1].
    DivergedError
        A `NonFiniteLossError`, if the bound or its gradient is not finite; it holds the last good
        state.

    Notes
    -----
    O(b H^2 (H + d + c) + M (c + d)) a step, of which the second part is one fused pass over the
    vectors; O(c M (b H^2 + M)) more with a full covariance.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.likelihoods.families import GaussianFamily
    >>> X = torch.linspace(-1, 1, 300, dtype=torch.float64)[:, None]
    >>> family = GaussianFamily(0.1, (1e-3, 1.0))
    >>> state = SWSGPState.prior(RBF(0.5), family.initial(X), X[::10], X.new_zeros(1))
    >>> found = fit_minibatch(
    ...     state, Data(X, X.sin()), lambda kernel, Z: torch.cdist(X, Z).argsort()[:, :8],
    ...     Objective(family), batch_size=50, max_iter=20,
    ...     generator=torch.Generator().manual_seed(0),
    ... )
    >>> len(found.history), found.history[-1] < found.history[0]
    (20, True)
    """
    _check_positive(
        max_iter=max_iter,
        batch_size=batch_size,
        learning_rate=learning_rate,
        refresh_every=refresh_every,
        callback_every=callback_every,
    )
    if not 0 < falling <= 1:
        raise ValueError(f"falling must lie in (0, 1], got {falling}; leave it at its default.")
    around = Coordinates(state, objective)
    leaves = {name: value.clone().requires_grad_() for name, value in around.start().items()}
    loss = _MinibatchLoss(
        around, leaves, data, search, min(batch_size, len(data)), refresh_every, generator
    )
    reports = _Reports(callback, callback_every)
    loop = _Steps(leaves, loss, around.bounds(), callback=reports)
    n_falling = max(1, round(falling * max_iter))
    if average:
        loop.schedule = lambda step: learning_rate
        loop.average_from = max_iter - n_falling
    else:
        loop.schedule = lambda step: learning_rate * min(1.0, (max_iter - step) / n_falling)
    try:
        if settle:
            loop.settle(max_iter, learning_rate)
        else:
            loop.run(max_iter)
    except NonFiniteLossError as error:
        raise DivergedError(error, around.to_state(leaves)) from error
    found = around.to_state(loop.averages() if average else leaves)
    return MinibatchFit(found, loop.history["loss"], reports.stopped)


class _MinibatchLoss:
    """Minus the bound estimated from a new minibatch, in nats an observation."""

    def __init__(
        self,
        around: Coordinates,
        leaves: Mapping[str, Tensor],
        data: Data,
        search: Search,
        batch_size: int,
        refresh_every: int,
        generator: torch.Generator,
    ) -> None:
        self.around, self.leaves, self.data, self.search = around, leaves, data, search
        self.batch_size, self.refresh_every, self.generator = batch_size, refresh_every, generator
        self.moves = "theta" in leaves or "Z" in leaves
        self.total = data.total
        self.active = search(around.state.kernel, around.state.Z)
        kappa = kl_weight(around.objective, around.state, self.active)
        self.objective = replace(around.objective, kl_weight=kappa)

    def __call__(self, step: int) -> Tensor:
        if self.moves and step and step % self.refresh_every == 0:
            here = self.around.to_state(self.leaves)
            self.active = self.search(here.kernel, here.Z)
        n, b = len(self.data), self.batch_size
        rows = sample_without_replacement(n, b, generator=self.generator).to(self.active.device)
        here, active = self.around.values(self.leaves, self.active[rows])
        theta = self.leaves.get("theta")
        batch = self.data.take(rows)
        value = bound(here, batch, active, self.objective, theta=theta, total=self.total)
        return value * (-n / (b * self.total))


class _Steps(TrainingLoop):
    """Steps of Adam, each kind of coordinate at its own rate and within its bounds."""

    average_from: int | None = None

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        compute_loss: Callable[[int], Tensor],
        bounds: Mapping[str, tuple[Tensor, Tensor]],
        **options,
    ) -> None:
        groups = [{"params": [leaf], "share": _SHARES[name]} for name, leaf in parameters.items()]
        super().__init__(
            parameters,
            compute_loss,
            Adam(groups, betas=_MOMENTS),
            **options,
        )
        self.bounds = {name: box for name, box in bounds.items() if name in parameters}
        self._sums: dict[str, Tensor] = {}
        self._n_summed = 0
        self.project()

    def set_learning_rate(self, iteration: int) -> None:
        super().set_learning_rate(iteration)
        for group in self.optimizer.param_groups:
            group["lr"] *= group["share"]

    def train_step(self, iteration: int) -> float:
        try:
            loss = super().train_step(iteration)
        except NotPositiveDefiniteError as error:
            self.restore_snapshot()
            raise NonFiniteLossError(
                f"The bound could not be computed at iteration {iteration}; the parameters were "
                f"put back to earlier ones. Lower learning_rate. {error}",
                iteration=iteration,
                parameter=None,
            ) from error
        self.project()
        if self.average_from is not None and iteration >= self.average_from:
            self._accumulate()
        return loss

    def check_finite(self, iteration: int, loss: Tensor) -> None:
        # A sum is one pass where isfinite is several, a time that shows for many points. Finite
        # gradients keep parameters finite; a sum that overflows is left to the exact check.
        gradients = [leaf.grad.sum() for leaf in self.parameters.values() if leaf.grad is not None]
        if not all(torch.isfinite(each) for each in (loss, *gradients)):
            super().check_finite(iteration, loss)

    @torch.no_grad()
    def project(self) -> None:
        """Move parameters back inside their bounds."""
        for name, (low, high) in self.bounds.items():
            self.parameters[name].clamp_(low, high)

    def settle(self, max_iter: int, learning_rate: float) -> None:
        """Run at one rate while the loss falls, then at rates that fall to 0."""
        plateau = _Plateau()
        self.schedule, self.stopping = lambda step: learning_rate, (plateau,)
        self.run(max(1, 2 * max_iter // 3))
        if plateau.reached or not self.stopped_early:  # and not stopped by the callback
            begin, n_falling = self.n_iter, max(1, self.n_iter // 2)
            self.schedule = lambda step: learning_rate * (1 - (step - begin) / n_falling)
            self.stopping = ()
            self.run(n_falling)

    def averages(self) -> dict[str, Tensor]:
        """Means of the parameters since `average_from`; the last ones if that was not reached."""
        if not self._n_summed:
            return self.parameters
        return {name: value / self._n_summed for name, value in self._sums.items()}

    @torch.no_grad()
    def _accumulate(self) -> None:
        self._n_summed += 1
        for name, value in self.parameters.items():
            if name in self._sums:
                self._sums[name] += value
            else:
                self._sums[name] = value.detach().clone()


class _Plateau:
    """Stops where the mean loss of some steps is no less than that of as many before.

    Less by the standard error of a mean, or by what nobody would notice, is no less; twice.
    """

    def __init__(self) -> None:
        self.reached = False
        self._windows: list[Tensor] = []
        self._losses: list[float] = []
        self._n_still = 0

    def __call__(self, iteration: int, loss: float) -> bool:
        self._losses.append(loss)
        if len(self._losses) < _WINDOW:
            return False
        self._windows.append(torch.tensor(self._losses))
        self._losses = []
        if len(self._windows) > 1:
            before, after = self._windows[-2:]
            error = float((before.var() + after.var()).sqrt()) / _WINDOW**0.5
            still = float(before.mean() - after.mean()) < max(error, _LEAST_GAIN)
            self._n_still = self._n_still + 1 if still else 0
        self.reached = self._n_still == 2
        return self.reached


class _Reports:
    """Passes the mean loss of every few steps on, and remembers an order to stop."""

    def __init__(self, callback: Callback | None, every: int) -> None:
        self.callback, self.every = callback, every
        self.losses: list[float] = []
        self.stopped = False

    def __call__(self, iteration: int, info: Mapping[str, float]) -> bool:
        self.losses.append(info["loss"])
        if self.callback is not None and len(self.losses) == self.every:
            mean = sum(self.losses) / self.every
            self.stopped = bool(self.callback(iteration + 1, {"loss": mean}))
            self.losses.clear()
        return self.stopped


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value!r}; leave it at its default.")
