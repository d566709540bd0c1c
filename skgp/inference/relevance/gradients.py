r"""The parts of the stochastic search for relevance vectors: state, gradients and steps.

See `relevance_stochastic` for the method. q(w) is :math:`N(\mu, \operatorname{diag}(c^2))` over the
functions that are left; c follows from Proposition 1 and is never stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.relevance.dictionary import RelevanceBasis
from skgp.inference.relevance.evidence import RelevanceFit
from skgp.inference.stochastic.basis import InducingBasis
from skgp.inference.stochastic.control_variates import LowRankControlVariate, support_features
from skgp.inference.stochastic.estimators import quadratic_loss, sample_design
from skgp.inference.stochastic.optimizers import Adam
from skgp.inference.stochastic.sampling import IndexSet, everything, sample_indices, take_rows
from skgp.inference.stochastic.state import proposition_1
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.optim import sample_without_replacement

_NOISE_RATE = 0.1  # of the moving average that the noise variance is
_NOISE_FLOOR = 1e-6  # least noise variance, as a part of the mean square of y
_START_NOISE = 0.5  # of the mean square of y


class SparseBasis(InducingBasis):
    r""":math:`\Phi = K(X, Z)` with S = diag(s), in place of S = K(Z, Z).

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (m, d)
    log_precision : Tensor of shape (m,)
        log s; kept, not copied.
    """

    diagonal_precision = True
    Z: Tensor

    def __init__(self, kernel: Any, Z: Tensor, log_precision: Tensor) -> None:
        super().__init__(kernel, Z)
        self.log_precision = log_precision

    def precision(self, rows: Tensor, columns: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return entries of diag(s)."""
        same = rows[:, None] == columns
        return same * self.log_precision[rows].exp()[:, None]

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return s."""
        return self.log_precision[indices].exp()

    def log_precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return log s."""
        return self.log_precision[indices]


@dataclass(frozen=True)
class StepOptions:
    """What stays the same over the iterations; see `fit_relevance_stochastic`."""

    batch_size: int
    basis_batch_size: int
    rate: Callable[[int], float]
    precision_rate: float
    learn_noise: bool


@dataclass
class SparseState:
    """The functions that are left, and where their parameters are.

    Attributes
    ----------
    basis : SparseBasis
    rows : Tensor of shape (m,)
        Rows of X that the functions are centred on.
    mean : Tensor of shape (m, 1)
    noise_variance : float
    n : int
        Rows of the data.
    X_support, y_support : Tensor of shape (n_support, d) and (n_support,)
    optimizer : Adam
        Of log s.
    control : LowRankControlVariate
        Its sums are the mean on the support rows.
    mean_squares : Tensor of shape (m,)
        Of the functions on the support rows.
    rate_factor : float
        What divergence left of the learning rate.
    history : list of float
    """

    basis: SparseBasis
    rows: Tensor
    mean: Tensor
    noise_variance: float
    n: int
    X_support: Tensor
    y_support: Tensor
    optimizer: Adam
    control: LowRankControlVariate
    mean_squares: Tensor
    rate_factor: float = 1.0
    history: list[float] = field(default_factory=list)

    @property
    def std(self) -> Tensor:
        """The c of all functions, shape (m,), by Proposition 1."""
        precision = self.basis.log_precision.exp()
        return proposition_1(self.n * self.mean_squares, precision, self.noise_variance)

    def determined(self) -> Tensor:
        """Part of each weight that the data determine, ``1 - s c^2``, shape (m,)."""
        data = self.n * self.mean_squares / self.noise_variance
        return data / (data + self.basis.log_precision.exp())

    def prune(self, threshold: float) -> None:
        """Drop the functions whose weights the data determine by less than `threshold`."""
        keep = self.determined() > threshold
        if bool(keep.all()):
            return
        self.rows, self.mean = self.rows[keep], self.mean[keep]
        self.optimizer.state = {key: A[keep] for key, A in self.optimizer.state.items()}
        basis = self.basis
        self.basis = SparseBasis(basis.kernel, basis.Z[keep], basis.log_precision[keep])
        self.set_control()

    def set_control(self) -> None:
        """Sum the support rows anew, O(n_support m)."""
        factor = support_features(self.basis, self.X_support)
        B = factor(torch.arange(self.basis.n_features))
        self.control = LowRankControlVariate(factor, B @ self.mean)
        self.mean_squares = B.square().mean(0)

    def support_error(self) -> float:
        """Mean squared error of the mean on the support rows."""
        return float((self.y_support - self.control.sums[:, 0]).square().mean())

    def result(self) -> RelevanceFit:
        """Wrap the mean-field posterior."""
        posterior = LinearWeightsPosterior(
            RelevanceBasis(self.basis.kernel, self.basis.Z),
            self.mean[:, 0],
            self.mean.new_zeros(len(self.rows), 0),
            self.std,
        )
        return RelevanceFit(
            self.rows,
            posterior,
            self.noise_variance,
            self.basis.log_precision.exp(),
            log_evidence=float("nan"),
            n_iter=len(self.history),
            converged=False,
            history=self.history,
        )


def initial_state(
    kernel: Any,
    X: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    rows: Tensor,
    noise_variance: float | None,
    n_support: int,
    generator: torch.Generator,
) -> SparseState:
    """Start from mu = 0 and hardly any prior, with support rows drawn from the data."""
    n = len(X)
    support = sample_without_replacement(n, min(n_support, n), generator=generator)
    y_support = take_rows(y, support, torch.float64)
    scale = float(y_support.square().mean()) or 1.0
    Z = take_rows(X, rows, torch.float64)
    # a prior variance of the size of y for every weight: hardly any prior at all
    basis = SparseBasis(kernel, Z, torch.full((len(rows),), -float(np.log(scale))).double())
    mean = Z.new_zeros(len(rows), 1)
    X_support = take_rows(X, support, torch.float64)
    state = SparseState(
        basis=basis,
        rows=rows,
        mean=mean,
        noise_variance=_START_NOISE * scale if noise_variance is None else float(noise_variance),
        n=n,
        X_support=X_support,
        y_support=y_support,
        optimizer=Adam((len(rows), 1), torch.float64),
        control=LowRankControlVariate(support_features(basis, X_support), mean[:0]),
        mean_squares=mean[:, 0],
    )
    state.set_control()
    return state


def iterate(
    state: SparseState,
    X: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    options: StepOptions,
    iteration: int,
    generator: torch.Generator,
) -> None:
    """Move the mean and log s of the functions sampled, then the noise variance."""
    if not len(state.rows):
        state.history.append(state.support_error())
        return
    batch = sample_without_replacement(state.n, options.batch_size, generator=generator)
    X_batch, y_batch = (take_rows(A, batch, torch.float64) for A in (X, y))
    whole = options.basis_batch_size >= len(state.rows)
    # A sample of every function is exact: the second would repeat the first.
    i = everything(state.basis) if whole else _sample(state, options, generator)
    j = i if whole else _sample(state, options, generator)
    sides = _gradients(state, X_batch, y_batch, i, j)
    rate = state.rate_factor * options.rate(iteration)
    for sample, gradient, B in sides[:1] if whole else sides:
        _move(state, sample, gradient, B, rate, options.precision_rate)
    error = state.support_error()
    if not error <= 2 * float(state.y_support.square().mean()):
        state.rate_factor /= 2
        state.mean.zero_()
        state.control.sums.zero_()
        error = state.support_error()
    state.history.append(error)
    if options.learn_noise:
        _move_noise(state, X_batch, y_batch, i if whole else None)


def _sample(state: SparseState, options: StepOptions, generator: torch.Generator) -> IndexSet:
    return sample_indices(state.basis, options.basis_batch_size, generator=generator)


def _gradients(
    state: SparseState, X: Tensor, y: Tensor, i: IndexSet, j: IndexSet
) -> list[tuple[IndexSet, Tensor, Tensor]]:
    """Theorem 1 with its control variate: both samples, their gradients and support features."""
    noise = state.noise_variance
    design = sample_design(state.basis, X, i, j, n=state.n)
    V_i, V_j = state.mean[i.indices], state.mean[j.indices]
    B_i = state.control.columns(i)
    B_j = B_i if j is i else state.control.columns(j)
    scale = state.n / (len(state.X_support) * noise)
    estimate = quadratic_loss(design, V_i, V_j, noise, y=y)
    estimate = estimate + state.control.estimate(i, j, B_i, B_j, V_i, V_j, scale)
    return [(i, estimate.grad_i / i.weight, B_i), (j, estimate.grad_j / j.weight, B_j)]


def _move(
    state: SparseState,
    sample: IndexSet,
    gradient: Tensor,
    B: Tensor,
    rate: float,
    precision_rate: float,
) -> None:
    """A part of a Newton step of the mean, then a step of Adam on log s."""
    indices, basis = sample.indices, state.basis
    root = B * (state.n / (len(B) * state.noise_variance)) ** 0.5
    precision = basis.precision_diag(indices)
    change = -rate * newton_direction(root, precision, gradient)
    state.mean[indices] += change
    state.control.update(B, change)
    slope = log_precision_gradient(precision, state.mean[indices, 0], state.std[indices])
    # Bounded below by -1/2; above, s mu^2 of a mean that is still moving is without bound.
    step, moments = state.optimizer.step(indices, slope.clamp_max(0.5)[:, None], precision_rate)
    for key, value in moments.items():
        state.optimizer.state[key][indices] = value
    basis.log_precision[indices] += step[:, 0]


def _move_noise(state: SparseState, X: Tensor, y: Tensor, whole: IndexSet | None) -> None:
    r"""Move towards the optimum :math:`(\|y - \Phi\mu\|^2 + \sum_j c_j^2 \phi_j^T \phi_j) / n`.

    The residuals are the batch's where every function is at hand, and else the support rows'.
    """
    if whole is None:
        error = state.support_error()
    else:
        fitted = state.basis.features(X, whole.indices) @ state.mean
        error = float((y - fitted[:, 0]).square().mean())
    target = error + state.noise_variance * float(state.determined().sum()) / state.n
    bound = float(state.y_support.square().mean()) or 1.0
    moved = (1 - _NOISE_RATE) * state.noise_variance + _NOISE_RATE * target
    state.noise_variance = min(max(moved, _NOISE_FLOOR * bound), bound)


def log_precision_gradient(precision: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    r"""Gradient of -ELBO with respect to log s, :math:`\tfrac12 (s (\mu^2 + c^2) - 1)`.

    Parameters
    ----------
    precision, mean, std : Tensor of shape (k,)
        s, :math:`\mu` and c of some functions.

    Returns
    -------
    Tensor of shape (k,)
        Of a sample, times its weight, an unbiased estimate of the whole gradient.
    """
    return 0.5 * (precision * (mean.square() + std.square()) - 1)


def newton_direction(root: Tensor, precision: Tensor, gradient: Tensor) -> Tensor:
    """Solve ``(root' root + diag(precision)) x = gradient``.

    Parameters
    ----------
    root : Tensor of shape (r, k)
    precision : Tensor of shape (k,)
        Positive.
    gradient : Tensor of shape (k, q)

    Returns
    -------
    Tensor of shape (k, q)
        In O(k r min(k, r)).
    """
    if root.shape[1] <= root.shape[0]:
        return torch.linalg.solve(root.mT @ root + torch.diag(precision), gradient)
    scaled = root / precision
    inner = scaled @ root.mT
    inner.diagonal().add_(1)
    return gradient / precision[:, None] - scaled.mT @ torch.linalg.solve(inner, scaled @ gradient)
