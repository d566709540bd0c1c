"""What the stochastic solver of QSGP learns and hands on: parameters, moments, running sums."""

from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.control_variates import nystrom_factor, support_features
from skgp.inference.stochastic.optimizers import SparseOptimizer, make_optimizer
from skgp.inference.stochastic.sampling import IndexSet, take_rows
from skgp.inference.weights.gaussian import WeightGaussian
from skgp.kernels import FourierFeatures
from skgp.linalg.tensor_state import TensorState
from skgp.optim import sample_without_replacement

__all__ = [
    "NonFiniteStepError",
    "SGDResult",
    "SGDState",
    "chevron_pattern",
    "continued_state",
    "head_log_det",
    "initial_state",
    "proposition_1",
    "raise_non_finite",
    "sum_again",
]


class NonFiniteStepError(FloatingPointError):
    """A step of the stochastic solver is NaN or infinite, and was not taken.

    Attributes
    ----------
    iteration : int
    parameter : str
        "mu", "C", "theta" or "noise_variance".
    state : SGDState
        The last good one: fit on from it with other options, or predict with it.
    """

    def __init__(self, message: str, *, iteration: int, parameter: str, state: "SGDState") -> None:
        super().__init__(message)
        self.iteration = iteration
        self.parameter = parameter
        self.state = state


@dataclass
class SGDState(TensorState):
    r"""Everything that a later call needs to continue.

    Attributes
    ----------
    weights : Tensor of shape (m, 1 + k)
        :math:`\mu` and the k dense columns of C.
    theta : Tensor or None
        Current log hyper-parameters; None keeps the kernel's own.
    initial_theta : Tensor or None
        Those of the control variates' features: the initial ones, or those they were last built
        at.
    noise_variance : float
    X_support, y_support : Tensor of shape (n_support, d) and (n_support,)
    sums, precision_sums : Tensor of shape (n_support, 1 + k)
        Running sums of Proposition 3 and of the Nystrom control variate (no rows if S is
        diagonal).
    square_sums, square_rows : Tensor of shape (m,)
        :math:`\sum_l \phi_{lr}^2` over the rows seen with function r, and their number.
    column_scale : Tensor of shape (1 + k,)
        Factor of the learning rate of each column.
    n_iter : int
        Iterations so far.
    optimizer : SparseOptimizer
    hyper_moments : dict
        State of the hyper-parameters' Adam.
    Z : Tensor of shape (m, d) or None
        Inducing points that the weights belong to.
    fourier : FourierFeatures or None
        Fourier features that the weights belong to: under another kernel's hyper-parameters new
        ones could share their frequencies otherwise among its terms.
    """

    weights: Tensor
    theta: Tensor | None
    initial_theta: Tensor | None
    noise_variance: float
    X_support: Tensor
    y_support: Tensor
    sums: Tensor
    precision_sums: Tensor
    square_sums: Tensor
    square_rows: Tensor
    column_scale: Tensor
    optimizer: SparseOptimizer
    n_iter: int = 0
    hyper_moments: dict = field(default_factory=dict)
    Z: Tensor | None = None
    fourier: FourierFeatures | None = None

    @property
    def n_dense(self) -> int:
        """Dense columns k of C."""
        return self.weights.shape[1] - 1

    def add_squares(self, sample: IndexSet, Phi: Tensor, keep: float = 1.0) -> None:
        """Count the squares of features (n_batch, k) in; `keep` < 1 forgets older ones."""
        indices = sample.indices
        squares = keep * self.square_sums[indices] + Phi.square().sum(0).to(self.square_sums)
        self.square_sums[indices] = squares
        self.square_rows[indices] = keep * self.square_rows[indices] + len(Phi)

    def mean_squares(self, indices: Tensor | slice = slice(None)) -> Tensor:
        r"""Estimate :math:`\phi_r^T \phi_r / n`; functions not met yet get the others' mean."""
        rows, sums = self.square_rows[indices], self.square_sums[indices]
        mean = sums / rows.clamp_min(1)
        if bool((rows > 0).all()):
            return mean
        known = mean[rows > 0] if bool((rows > 0).any()) else mean.new_ones(1)
        return torch.where(rows > 0, mean, known.mean())

    def tail_std(
        self, basis: StochasticBasis, n: int, indices: Tensor, theta: Tensor | None
    ) -> Tensor:
        """Diagonal of C at `indices` by Proposition 1, from the squares seen so far."""
        squares = n * self.mean_squares(indices).to(basis.dtype)
        return proposition_1(squares, basis.precision_diag(indices, theta), self.noise_variance)

    def covariance(self, basis: StochasticBasis, n: int) -> WeightGaussian:
        """Return q(w), mean-field or chevron; O(m k)."""
        k = self.n_dense
        tail = torch.arange(k, basis.n_features)
        return WeightGaussian(
            self.weights[:, 0].clone(),
            self.weights[:, 1:].clone(),
            self.tail_std(basis, n, tail, self.theta),
        )


@dataclass(frozen=True)
class SGDResult:
    r"""Outcome of `fit_sgd`.

    Attributes
    ----------
    q : WeightGaussian
        :math:`N(\mu, C C^T)` over the weights.
    theta : Tensor or None
        Log hyper-parameters; None where they are the kernel's own.
    noise_variance : float
    n_iter : int
        Iterations, over all warm starts.
    stopped_early : bool
        Whether `tol` or the callback ended it.
    history : dict of str to list of float
        "loss": estimate of -ELBO in nats (up to :math:`\tfrac12 \log|S|` for a dense S);
        "support_mse": mean squared error of the mean on the support rows, at the hyper-parameters
        of the control variates; "noise_variance" of each iteration.
    state : SGDState
        To continue from, ``fit_sgd(..., state=result.state)``.
    """

    q: WeightGaussian
    theta: Tensor | None
    noise_variance: float
    n_iter: int
    stopped_early: bool
    history: dict[str, list[float]]
    state: SGDState

    @property
    def mu(self) -> Tensor:
        """Means (m,) of the weights."""
        return self.q.mean


def proposition_1(square_norms: Tensor, s: Tensor, noise_variance: float) -> Tensor:
    r"""Optimal diagonal entries of C in columns without other entries (Proposition 1).

    .. math:: c_{rr} = \sqrt{\sigma^2 / (\phi_r^T \phi_r + \sigma^2 s_{rr})}

    Parameters
    ----------
    square_norms : Tensor of shape (k,)
        :math:`\phi_r^T \phi_r`.
    s : Tensor of shape (k,)
        :math:`s_{rr}`.
    noise_variance : float
    """
    return (noise_variance / (square_norms + noise_variance * s)).sqrt()


def initial_state(
    X: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    basis: StochasticBasis,
    noise_variance: float,
    theta: Tensor | None,
    n_dense: int,
    n_support: int,
    optimizer: str,
    *,
    generator: torch.Generator,
) -> SGDState:
    """Start from mu = 0 and mean-field columns, with support rows drawn from the data."""
    n, m, dtype = len(X), basis.n_features, basis.dtype
    rows = sample_without_replacement(n, min(n_support, n), generator=generator)
    X_support, y_support = take_rows(X, rows, dtype), take_rows(y, rows, torch.float64)
    weights = torch.zeros(m, 1 + n_dense, dtype=dtype)
    sums = torch.zeros(len(rows), 1 + n_dense, dtype=torch.float64)
    state = SGDState(
        weights=weights,
        theta=theta,
        initial_theta=None if theta is None else theta.detach().clone(),
        noise_variance=float(noise_variance),
        X_support=X_support,
        y_support=y_support,
        sums=sums,
        precision_sums=torch.zeros_like(sums[:0] if basis.diagonal_precision else sums),
        square_sums=torch.zeros(m, dtype=dtype),
        square_rows=torch.zeros(m, dtype=dtype),
        column_scale=torch.ones(1 + n_dense, dtype=dtype),
        optimizer=make_optimizer(optimizer, (m, 1 + n_dense), dtype),
    )
    if n_dense:
        _start_columns(state, basis, take_rows(X, _some_rows(n, generator), dtype), n)
    return state


@torch.no_grad()
def continued_state(
    state: SGDState,
    basis: StochasticBasis,
    noise_variance: float,
    theta: Tensor | None = None,
) -> SGDState:
    """Return a state with the weights of an earlier fit, at other hyper-parameters.

    They are `theta`, or the basis' own where that is None.

    The running sums belong to the features at the initial hyper-parameters, which are new: they are
    summed again, ``O(n_support m)``. The weights are shared with `state` and will be changed.
    """
    new = replace(
        state,
        theta=theta,
        initial_theta=None if theta is None else theta.clone(),
        noise_variance=float(noise_variance),
        sums=torch.zeros_like(state.sums),
        precision_sums=torch.zeros_like(state.precision_sums),
    )
    sum_again(new, basis)
    return new


@torch.no_grad()
def sum_again(state: SGDState, basis: StochasticBasis) -> None:
    """Recompute the running sums, at the initial hyper-parameters of the state; in place."""
    if not len(state.X_support):
        return
    X, theta = state.X_support, state.initial_theta
    factors = [(support_features(basis, X, theta), state.sums)]
    if len(state.precision_sums):
        factors.append((nystrom_factor(basis, X, theta), state.precision_sums))
    for _, sums in factors:
        sums.zero_()
    for indices in torch.arange(basis.n_features).split(basis.block_size):
        for factor, sums in factors:
            sums += factor(indices).to(sums) @ state.weights[indices].to(sums)


def _some_rows(n: int, generator: torch.Generator) -> Tensor:
    return sample_without_replacement(n, min(500, n), generator=generator)


@torch.no_grad()
def _start_columns(state: SGDState, basis: StochasticBasis, X: Tensor, n: int) -> None:
    """Put Proposition 1 on the diagonal of the dense columns, and its values as their units."""
    k = state.n_dense
    head = torch.arange(k)
    squares = n * basis.features(X, head, state.theta).square().mean(0)
    c = proposition_1(squares, basis.precision_diag(head, state.theta), state.noise_variance)
    state.weights[head, 1 + head] = c
    state.column_scale[1:] = c
    if not len(state.X_support):
        return
    B = support_features(basis, state.X_support, state.initial_theta)(head)
    state.sums[:, 1:] = B * c
    if len(state.precision_sums):
        N = nystrom_factor(basis, state.X_support, state.initial_theta)(head)
        state.precision_sums[:, 1:] = N * c


def chevron_pattern(
    indices: Tensor, columns: Tensor | slice, n_dense: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Find the special entries among rows `indices` and `columns` of ``weights``.

    Returns
    -------
    upper, diagonal : tuple of two Tensors
        Positions (row, column) within the sampled part of the entries above the diagonal of C,
        structurally 0, and of those on it.
    """
    # Column 0 is the mean; c_r sits in column r + 1. Rows from k on lie below every diagonal.
    r = torch.arange(-1, n_dense)[columns]
    head = indices[indices < n_dense, None]
    upper = torch.nonzero(head < r, as_tuple=True)
    diagonal = torch.nonzero(head == r, as_tuple=True)
    return upper, diagonal  # type: ignore[return-value]


def head_log_det(state: SGDState) -> float:
    r"""Return :math:`-2 \sum_{r \le k} \log c_{rr}` of the dense columns."""
    return -2 * float(state.weights[:, 1:].diagonal().log().sum())


def raise_non_finite(iteration: int, parameter: str, state: SGDState) -> NoReturn:
    """Raise the error that carries the last good state."""
    raise NonFiniteStepError(
        f"The step of {parameter} at iteration {iteration} is not finite and was not taken; the "
        "state of the previous iteration is in the error's `state`. Lower learning_rate, use "
        "float64, or scale the columns of X.",
        iteration=iteration,
        parameter=parameter,
        state=state,
    )
