r"""The iterations common to all stochastic routes of QSGP: state, minibatches, steps, stopping.

An iteration of :class:`StochasticSolver` draws rows :math:`\tilde l`; the objective that a subclass
plugs in (`gaussian`: Theorems 1 and 2; `likelihood`: Theorem 3; `relevance.stochastic`: precisions
besides weights) draws basis functions and estimates loss and sparse gradients; `move` takes the
step of what was sampled and lets the running sums of the support rows follow (Proposition 3).
Hyper-parameters follow the bound by Adam (Proposition 2).

The optimizers are sparse: each keeps its moments for all m functions but reads and writes those of
the sample alone. ``step`` returns the change and the new moments; the caller checks the change
before it is applied and before `commit` stores the moments, so that a bad gradient leaves nothing
behind. Diagonal entries of dense columns of C stay positive because a step may at most halve them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import Array, StochasticBasis, take_rows
from skgp.linalg.runtime import TensorState
from skgp.optim import Adam, LossPlateau, exponential_decay, sample_without_replacement

Callback = Callable[[int, dict], bool | None]
Step = tuple[Tensor, dict[str, Tensor]]


# ---- optimizers


class AdaGrad(TensorState):
    r"""AdaGrad (Duchi et al., 2011), appendix I.1: :math:`-\rho\, g / \sqrt{\sum g^2}` an entry."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.state = {"sum_squares": torch.zeros(shape, dtype=dtype)}

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        return self._scaled(indices, gradient, gradient.square(), rate)

    def commit(self, indices: Tensor, moments: dict[str, Tensor]) -> None:
        """Store the moments of a step, in place."""
        for name, values in moments.items():
            self.state[name][indices] = values

    def _scaled(self, indices: Tensor, direction: Tensor, squares: Tensor, rate: float) -> Step:
        total = self.state["sum_squares"][indices] + squares
        tiny = torch.finfo(total.dtype).tiny
        return -rate * direction / total.clamp_min(tiny).sqrt(), {"sum_squares": total}


class NystromAdaGrad(AdaGrad):
    r"""Block Newton directions from the control variate's features, scaled as AdaGrad does.

    The Hessian of the losses in a sampled block is nearly
    :math:`\tfrac{n}{\sigma^2 \bar n} B_i^T B_i` with the support features B (r, k) already at hand.
    The direction is :math:`d = (\lambda I + B_i^T B_i)^{-1} g` (by Woodbury, in O(r^2 k)), with
    :math:`\lambda` a fraction of the trace; its step divides by the root of the sum of the mean
    squares of d so far. No constant of proportionality matters: AdaGrad is scale-free.
    """

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        if B is None or not len(B):
            raise ValueError(
                'optimizer="nystrom" needs the support features: set n_support to 50 or more.'
            )
        direction = self._direction(B[: defaults.NEWTON_RANK], gradient)
        return self._scaled(indices, direction, direction.square().mean(0), rate)

    def _direction(self, B: Tensor, gradient: Tensor) -> Tensor:
        inner = B @ B.T
        damping = defaults.NEWTON_DAMPING * float(inner.diagonal().sum())
        if not damping > 0:
            return gradient
        inner.diagonal().add_(damping)
        L = torch.linalg.cholesky(inner)
        return (gradient - B.T @ torch.cholesky_solve(B @ gradient, L)) / damping


class SparseAdam(AdaGrad):
    """Adam (Kingma and Ba, 2015) whose moments age only when their row is sampled."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self.state = {
            "first": torch.zeros(shape, dtype=dtype),
            "second": torch.zeros(shape, dtype=dtype),
            "visits": torch.zeros(shape, dtype=torch.int32),
        }

    def step(self, indices: Tensor, gradient: Tensor, rate: float, B: Tensor | None = None) -> Step:
        """Return the change of the rows `indices` (k, q) and their new moments."""
        first, second, visits = (self.state[k][indices] for k in ("first", "second", "visits"))
        first = 0.9 * first + (1 - 0.9) * gradient
        second = 0.999 * second + (1 - 0.999) * gradient.square()
        visits = visits + 1
        spread = (second / (1 - 0.999**visits)).sqrt() + 1e-30
        step = -rate * (first / (1 - 0.9**visits)) / spread
        return step, {"first": first, "second": second, "visits": visits}


def make_optimizer(name: str | None, n_support: int, weights: Tensor) -> AdaGrad:
    """Build the optimizer of parameters of this shape by name.

    None is "nystrom" where there are support rows, and else "adagrad", the paper's.
    """
    known = {"adagrad": AdaGrad, "adam": SparseAdam, "nystrom": NystromAdaGrad}
    if name is None:
        name = "nystrom" if n_support else "adagrad"
    if name not in known:
        raise ValueError(f"optimizer must be one of {sorted(known)}, got {name!r}.")
    return known[name]((weights.shape[0], weights.shape[1]), weights.dtype)


# ---- state and iterations


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
    hyper_moments: dict = field(default_factory=dict)  # state of the hyper-parameters' Adam

    @property
    def n_latent(self) -> int:
        """Number c of latent functions."""
        return 1

    @property
    def n_dense(self) -> int:
        """Dense columns k of C."""
        return self.weights.shape[1] // self.n_latent - 1

    def pattern(self, indices: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Positions (row, column) in ``weights[indices]`` above the diagonal of C, and on it.

        Those above it are structurally 0.
        """
        c, k = self.n_latent, self.n_dense
        # Column c + j k + r holds c_r of function j; rows from k on lie below every diagonal.
        r = torch.cat([torch.full((c,), -1), torch.arange(k).repeat(c)])
        head = indices[indices < k, None]
        return torch.nonzero(head < r, as_tuple=True), torch.nonzero(head == r, as_tuple=True)


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

    Parameters
    ----------
    X, y : Tensor or ndarray of shape (n, d) and (n,) or (n, c)
        A memory map is read by rows, as they are sampled; it is never loaded.
    basis : StochasticBasis
        Its ``dtype`` is that of all parameters.
    state : SolverState
        Changed in place.
    options : SGDOptions
    generator : torch.Generator
    """

    default_decay: ClassVar[float]

    def __init__(
        self,
        X: Array,
        y: Array,
        basis: StochasticBasis,
        state: Any,
        options: SGDOptions,
        generator: torch.Generator,
    ) -> None:
        self.X, self.y, self.n = X, y, len(X)
        self.basis, self.state, self.generator = basis, state, generator
        self.options = options
        self.first = state.n_iter
        self.history: dict[str, list[float]] = {}
        self.hyper: HyperParameters | None = None

    def run(self, callback: Callback | None = None) -> dict[str, list[float]]:
        """Iterate until `max_iter`, the smoothed loss or the callback stops.

        ``callback(iteration, info)`` is told "loss" and what else the history holds; True stops.
        The history has one entry an iteration, each from before its step. A step that is not finite
        raises a NonFiniteStepError.
        """
        tol, patience = self.options.tol, defaults.PATIENCE
        rule = None
        if tol is not None:
            rule = LossPlateau(tol=tol, patience=patience, smoothing=defaults.SMOOTHING)
        for iteration in range(self.first, self.first + self.options.max_iter):
            info = self.iterate(iteration)
            self.state.n_iter = iteration + 1
            for name, value in info.items():
                self.history.setdefault(name, []).append(value)
            rule_says = rule is not None and rule(iteration, info["loss"])
            caller_says = callback is not None and bool(callback(iteration, info))
            if rule_says or caller_says:
                break
        return self.history

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its entries of the history."""
        raise NotImplementedError

    def draw_rows(self) -> tuple[Tensor, Tensor]:
        """Sample rows of X and y, in the dtype of the basis."""
        size = min(self.options.batch_size, self.n)
        rows = sample_without_replacement(self.n, size, generator=self.generator)
        X, y = (take_rows(a, rows, self.basis.dtype) for a in (self.X, self.y))
        return X, y

    def rate(self, start: float, iteration: int) -> float:
        """Learning rate that begins at `start` with this call."""
        decay = self.default_decay if self.options.decay is None else self.options.decay
        schedule = exponential_decay(start, start * decay, self.options.max_iter)
        return schedule(iteration - self.first)

    @torch.no_grad()
    def move(self, iteration: int, indices: Tensor, gradient: Tensor, B: Tensor) -> Tensor:
        """Take the step of the rows `indices` of the weights, and return it (k, c (1 + k)).

        B (n_support, k) are the features of the support rows.
        """
        state, c = self.state, self.state.n_latent
        rate = self.rate(self.options.learning_rate, iteration)
        step, moments = state.optimizer.step(indices, gradient, rate, B)
        step = step * state.column_scale
        if state.n_dense:
            upper, (at, column) = state.pattern(indices)
            step[upper] = 0
            half = -0.5 * state.weights[indices[at], column]
            step[at, column] = torch.maximum(step[at, column], half)
        if not bool(torch.isfinite(step).all()):
            mean_is_finite = bool(torch.isfinite(step[:, :c]).all())
            raise_non_finite(iteration, "C" if mean_is_finite else "mu", state)
        state.weights[indices] += step
        state.optimizer.commit(indices, moments)
        state.sums += (B @ step[:, : state.sums.shape[1]]).to(state.sums)
        return step


class HyperParameters:
    """Log hyper-parameters, and perhaps the log noise variance, moved by Adam up the ELBO.

    Reads the state and writes it after every step; Adam's moments outlast warm starts.
    """

    def __init__(self, state: SolverState, kernel: Any, noise_variance: float | None = None):
        self.state, self.kernel = state, kernel
        start = torch.as_tensor(kernel.theta) if state.theta is None else state.theta
        self.theta = start.detach().to(torch.float64).clone().requires_grad_()
        self.leaves = {"theta": self.theta}
        if noise_variance is not None:
            noise = torch.tensor(noise_variance, dtype=torch.float64)
            self.leaves["noise_variance"] = noise.log().requires_grad_()
        self.adam = Adam(list(self.leaves.values()))
        if state.hyper_moments:
            self.adam.load_state_dict(state.hyper_moments)

    def slopes(self, loss: Tensor) -> list[Tensor]:
        """Gradients with respect to the leaves; some kernels have none."""
        leaves = list(self.leaves.values())
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    @torch.no_grad()
    def move(self, iteration: int, gradients: Sequence[Tensor], rate: float) -> None:
        """Step of Adam, kept within the kernel's bounds; none where a gradient is not finite."""
        for (name, leaf), gradient in zip(self.leaves.items(), gradients, strict=True):
            if not bool(torch.isfinite(gradient).all()):
                raise_non_finite(iteration, name, self.state)
            leaf.grad = gradient
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        if len(self.theta):
            self.theta.clamp_(*torch.as_tensor(self.kernel.bounds).T)
        self.state.theta = self.theta.detach().clone()
        self.state.hyper_moments = self.adam.state_dict()


def raise_non_finite(iteration: int, parameter: str, state: SolverState) -> NoReturn:
    """Raise the error that carries the last good state."""
    raise NonFiniteStepError(iteration, parameter, state)


def check_learnable(basis: StochasticBasis) -> None:
    """Refuse to learn hyper-parameters where the log-determinant of S has no cheap estimator."""
    if not basis.diagonal_precision:
        raise ValueError(
            "Proposition 2 needs a diagonal prior precision, and that of inducing points is "
            'K(Z, Z). Learn the hyper-parameters beforehand, or use basis="fourier".'
        )
