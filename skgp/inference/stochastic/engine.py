r"""The iterations common to all stochastic routes of QSGP: state, minibatches, steps, stopping.

An iteration of :class:`StochasticSolver` draws rows :math:`\tilde l`; the objective that a subclass
plugs in (`gaussian`: Theorems 1 and 2; `likelihood`: Theorem 3; `relevance.stochastic`: precisions
besides weights) draws basis functions and estimates loss and sparse gradients; `move` takes the
step of what was sampled and lets the running sums of the support rows follow (Proposition 3).
Hyper-parameters follow the bound by Adam (Proposition 2: `hyperparameters`).

A step that is not finite changes neither weights nor moments, nor does any after it, until `Health`
is read and the error raised. Diagonal entries of dense columns of C stay positive because a step
may at most halve them.

Everything lies on the device of the basis. On the CPU every iteration is looked at by the host as
it ends. On another device the host looks at iterations 1, 2, 4, 8, ... of a run alone, and draws
the samples of many iterations ahead: the number of transfers and synchronisations grows as the
logarithm of the number of iterations. (``tol`` looks every 50th, and callbacks that read what they
are told wait for it.)
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import (
    AdaGrad,
    Array,
    IndexSet,
    StochasticBasis,
    index_set,
    n_sampled_units,
    take_rows,
)
from skgp.linalg.runtime import Callback, TensorState
from skgp.optim import LossPlateau, exponential_decay, sample_without_replacement

if TYPE_CHECKING:
    from skgp.inference.stochastic.state import HyperParameters


@dataclass(kw_only=True)
class SolverState(TensorState):
    r"""Everything that a later call needs to continue, for c latent functions."""

    # (m, c (1 + k)): c columns of means mu, then the k dense columns of C of each function in turn
    weights: Tensor
    theta: Tensor | None = None  # log hyper-parameters; None keeps the kernel's own
    X_support: Tensor  # (n_support, d)
    y_support: Tensor  # (n_support,) or (n_support, c)
    sums: Tensor  # (n_support, q), Phi_p V of the first q columns of weights (Proposition 3)
    column_scale: Tensor  # (c (1 + k),), factor of the learning rate of each column
    optimizer: AdaGrad
    n_iter: int = 0  # so far
    n_drawn_units: int | None = None  # the first units, which were drawn from; None for all
    hyper_moments: dict = field(default_factory=dict)  # state of the hyper-parameters' Adam

    @property
    def n_latent(self) -> int:
        """Number c of latent functions."""
        return 1

    @property
    def n_dense(self) -> int:
        """Dense columns k of C."""
        return self.weights.shape[1] // self.n_latent - 1

    def pattern(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of ``weights[indices]``: entries above the diagonal of C, and on it.

        Those above it are structurally 0.
        """
        c, k = self.n_latent, self.n_dense
        # Column c + j k + r holds c_r of function j; the means lie below every diagonal.
        r = torch.arange(-c, c * k, device=indices.device)
        r = torch.where(r < 0, -1, r % max(k, 1))
        return indices[:, None] < r, indices[:, None] == r


class NonFiniteStepError(FloatingPointError):
    """A step of the stochastic solver is NaN or infinite, and was not taken.

    `parameter` is "mu", "C", "theta" or "noise_variance"; `state` the last good one: fit on from it
    with other options, or predict with it.
    """

    def __init__(self, iteration: int, parameter: str, state: "SolverState") -> None:
        super().__init__(
            f"The step of {parameter} at iteration {iteration} is not finite and was not taken; "
            "the state of the previous iteration is in the error's `state`. Lower learning_rate, "
            "use float64, or scale the columns of X."
        )
        self.iteration = iteration
        self.parameter = parameter
        self.state = state


class Health:
    """Whether every step so far was finite; known on the device, read by the host at times."""

    PARAMETERS = ("mu", "C", "theta", "noise_variance")

    def __init__(self, device: torch.device) -> None:
        self.failure = torch.zeros((), dtype=torch.int64, device=device)  # 0 of none

    def note(self, values: Tensor, iteration: int, parameter: str) -> Tensor:
        """Whether these values and all before were finite, a tensor of shape ()."""
        code = 1 + self.PARAMETERS.index(parameter) + len(self.PARAMETERS) * iteration
        fails = (self.failure == 0) & ~torch.isfinite(values).all()
        self.failure = torch.where(fails, code, self.failure)
        return self.failure == 0

    def passes(self, values: Tensor, iteration: int, parameter: str) -> bool:
        """As `note`; True wherever the host had to wait for the answer."""
        good = self.note(values, iteration, parameter)
        return good.device.type != "cpu" or bool(good)

    def check(self, state: "SolverState") -> None:
        """Raise the error of the first step that was not finite; waits for the device."""
        if code := int(self.failure):
            state.n_iter, parameter = divmod(code - 1, len(self.PARAMETERS))
            raise NonFiniteStepError(state.n_iter, self.PARAMETERS[parameter], state)


@dataclass(frozen=True)
class SGDOptions:
    """What stays the same over the iterations."""

    batch_size: int = 500  # observations an iteration; at most n are used
    basis_batch_size: int = 10_000  # basis functions, in whole sampling units; at most m
    learning_rate: float = 0.1  # for weights of prior variance about 1
    # Learning rates fall exponentially to this fraction at `max_iter`; by default .3 under a
    # Gaussian likelihood and .1 otherwise.
    decay: float | None = None
    max_iter: int = 1000  # of this call
    # Stop when the smoothed loss no longer falls by this fraction of its fall so far within 300
    # iterations; None never does.
    tol: float | None = None
    # Maximise the ELBO in theta (and the noise variance) as well, by Adam. Needs a diagonal S.
    learn_hyperparameters: bool = False
    hyper_learning_rate: float | None = None  # in logarithms an iteration; see `defaults`
    freeze_iterations: int = 0  # before hyper-parameters move, counted over warm starts

    def __post_init__(self) -> None:
        for name in ("batch_size", "learning_rate", "decay", "max_iter", "hyper_learning_rate"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")


class StochasticSolver:
    """Minibatch iterations on an objective; a subclass says what `iterate` does.

    `rules` are called with (iteration, entries of the history) when the host looks; True stops.
    """

    default_decay: ClassVar[float]
    n_samples = 2  # of basis functions, an iteration

    def __init__(
        self,
        X: Array,  # (n, d); a memory map is read by rows, as they are sampled
        y: Array,  # (n,) or (n, c)
        basis: StochasticBasis,  # its dtype and device are those of all parameters
        state: Any,  # a `SolverState`, changed in place
        options: SGDOptions,
        generator: torch.Generator,
    ) -> None:
        self.X, self.y, self.n = X, y, len(X)
        self.basis, self.state, self.generator = basis, state, generator
        self.options = options
        self.first = state.n_iter
        self.history: dict[str, list[float]] = {}
        self.hyper: HyperParameters | None = None
        self.on_cpu = basis.device.type == "cpu"
        self.health = Health(basis.device)
        self.rules: list[Callable[[int, dict[str, float]], bool]] = []
        # rows, units of each sample, and of how many these were drawn
        self.draws: deque[tuple[Tensor, Tensor, int]] = deque()
        self.n_drawn = 0  # iterations
        before = getattr(state, "n_drawn_units", None)
        head = -(-getattr(state, "n_dense", 0) // basis.unit_size)  # with dense columns
        self.n_before = max(head, before or (basis.n_units if self.first else 1))
        self.unread: list[Tensor] = []  # of the history, on the device

    def run(self, callback: Callback | None = None) -> dict[str, list[float]]:
        """Iterate until `max_iter`, the smoothed loss, a rule or the callback stops.

        ``callback(iteration, info)`` is told "loss" and what else the history holds, as numbers or
        tensors of shape (); True stops. The history has one entry an iteration, each from before
        its step. A step that is not finite raises a NonFiniteStepError.
        """
        rules = [*self.rules, *self.plateau()]
        last = self.first + self.options.max_iter - 1
        for iteration in range(self.first, last + 1):
            info: dict[str, Any] = self.iterate(iteration)
            self.unread.append(torch.stack([value.double() for value in info.values()]))
            rule_says = False
            if iteration == last or self.looks(iteration + 1 - self.first):
                self.health.check(self.state)
                read = self.read(list(info))
                begin = iteration + 1 - len(read)
                told = [rule(begin + i, now) for i, now in enumerate(read) for rule in rules]
                rule_says, info = any(told), read[-1]
            self.state.n_iter = iteration + 1
            if (callback is not None and bool(callback(iteration, info))) or rule_says:
                break
        if self.unread:
            self.health.check(self.state)
            self.read(list(info))
        return self.history

    def plateau(self) -> list[Callable[[int, dict[str, float]], bool]]:
        """The rule of `tol`, if there is one."""
        if self.options.tol is None:
            return []
        rule = LossPlateau(
            tol=self.options.tol, patience=defaults.PATIENCE, smoothing=defaults.SMOOTHING
        )
        return [lambda iteration, info: rule(iteration, info["loss"])]

    def looks(self, n_done: int) -> bool:
        """Whether the host waits for the device after so many iterations of this run."""
        at_times = self.options.tol is not None and n_done % defaults.LOOK_EVERY == 0
        return self.on_cpu or at_times or n_done & (n_done - 1) == 0

    def read(self, names: list[str]) -> list[dict[str, float]]:
        """Move what the history lacks to the host, and return it by iteration."""
        read = [
            dict(zip(names, row, strict=True)) for row in torch.stack(self.unread).cpu().tolist()
        ]
        self.unread.clear()
        for name in names:
            self.history.setdefault(name, []).extend(row[name] for row in read)
        return read

    def iterate(self, iteration: int) -> dict[str, Tensor]:
        """One iteration; returns its entries of the history, each of shape ()."""
        raise NotImplementedError

    def draw_ahead(self) -> None:
        """Draw rows and units of functions, those of many iterations where it saves transfers.

        Row numbers go where the rows lie, unit numbers to the device if a unit is one function.
        """
        basis, n_draws = self.basis, 0
        if self.n_samples:
            n_draws = n_sampled_units(basis, self.options.basis_batch_size)
        n_rows = min(self.options.batch_size, self.n)
        several = 1 if self.on_cpu else self.n_ahead(n_rows + self.n_samples * n_draws)
        drawn, populations = [], []
        for _ in range(several):
            populations.append(self.n_active(n_draws))
            sizes = [(self.n, n_rows), *self.n_samples * [(populations[-1], n_draws)]]
            drawn.append(
                [sample_without_replacement(n, k, generator=self.generator) for n, k in sizes]
            )
            self.n_drawn += 1
        rows = torch.stack([first for first, *_ in drawn])
        units = torch.stack([torch.stack(rest) if rest else first[:0] for first, *rest in drawn])
        if isinstance(self.X, Tensor):
            rows = rows.to(self.X.device)
        if basis.unit_size == 1:
            units = units.to(basis.device)
        self.draws.extend(zip(rows, units, populations, strict=True))

    def n_active(self, n_draws: int) -> int:
        """Units that the next iteration draws from: the first of them, which grow in number.

        The model has so many functions so far, with a prior as wide as that of all of them (their
        precision is `IndexSet.share`): a function that is met too seldom to be learned only adds
        noise to what the others are told of f. Blocks of Fourier features are exchangeable;
        inducing points are not.
        """
        n_units = self.basis.n_units
        if self.basis.unit_size == 1:
            return n_units
        growing = min(self.n_drawn + 1, max(1, self.options.max_iter // 2))
        visited = self.n_samples * n_draws * growing / defaults.VISITS
        return min(n_units, max(n_draws, math.ceil(visited), self.n_before))

    def n_ahead(self, n_numbers: int) -> int:
        """Iterations whose samples, of so many numbers each, are moved to the device together."""
        return max(1, min(self.options.max_iter, defaults.AHEAD_BYTES // (8 * n_numbers)))

    def draw_rows(self) -> tuple[Tensor, Tensor]:
        """Begin an iteration: sample rows of X and y, in the dtype of the basis."""
        if not self.draws:
            self.draw_ahead()
        rows, units, self.population = self.draws.popleft()
        if isinstance(self.state, SolverState):
            self.state.n_drawn_units = self.population
        self.units = deque(units)
        X, y = (take_rows(a, rows, self.basis.dtype, self.basis.device) for a in (self.X, self.y))
        return X, y

    def draw_sample(self) -> IndexSet:
        """The next sample of basis functions of the iteration."""
        return index_set(self.basis, self.units.popleft(), self.population)

    def rate(self, start: float, iteration: int) -> float:
        """Learning rate that begins at `start` with this call."""
        decay = self.default_decay if self.options.decay is None else self.options.decay
        schedule = exponential_decay(start, start * decay, self.options.max_iter)
        return schedule(iteration - self.first)

    def hyper_rate(self, iteration: int) -> float:
        """Adam's rate for hyper-parameters."""
        start = self.options.hyper_learning_rate
        if start is None:
            start = min(defaults.HYPER_REACH / self.options.max_iter, defaults.HYPER_RATE)
        return self.rate(start, iteration)

    @torch.no_grad()
    def move(self, iteration: int, indices: Tensor, gradient: Tensor, B: Tensor) -> Tensor:
        """Take the step of the rows `indices` of the weights, and return it (k, c (1 + k)).

        B (n_support, k) are the features of the support rows.
        """
        state, c = self.state, self.state.n_latent
        # A part of the functions has to be as large as all would be.
        share = getattr(self, "population", self.basis.n_units) / self.basis.n_units
        rate = self.rate(self.options.learning_rate, iteration) / share**0.5
        step, moments = state.optimizer.step(indices, gradient, rate, B)
        step = step * state.column_scale
        if state.n_dense:
            upper, diagonal = state.pattern(indices)
            least = -0.5 * state.weights[indices]
            step = torch.where(diagonal, torch.maximum(step, least), step).masked_fill(upper, 0)
        good = self.health.note(step[:, :c], iteration, "mu")
        if state.n_dense:
            good = self.health.note(step[:, c:], iteration, "C")
        step = torch.where(good, step, 0)
        state.weights[indices] += step
        state.optimizer.commit(indices, moments, good)
        state.sums += (B @ step[:, : state.sums.shape[1]]).to(state.sums)
        return step
