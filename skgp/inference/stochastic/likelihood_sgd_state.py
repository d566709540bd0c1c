"""What the stochastic solver for any likelihood learns and hands on, and how it starts."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.optimizers import SparseOptimizer, make_optimizer
from skgp.inference.stochastic.sampling import sample_indices, take_rows
from skgp.inference.weights.gaussian import WeightGaussian
from skgp.likelihoods import Likelihood
from skgp.linalg.tensor_state import TensorState
from skgp.optim import sample_without_replacement

__all__ = ["LikelihoodSGDResult", "LikelihoodState", "initial_state"]

Array = Tensor | np.ndarray


@dataclass
class LikelihoodState(TensorState):
    r"""Everything that a later call needs to continue.

    Attributes
    ----------
    weights : Tensor of shape (m, c (1 + k))
        c columns of means, then the k dense columns of each latent function in turn.
    precision : Tensor of shape (m, c), or (0, c) for a point estimate
        :math:`c_i^{-2}` of the mean-field part.
    visits : Tensor of shape (m,)
        Iterations that sampled each function.
    column_scale : Tensor of shape (c (1 + k),)
        Factor of the learning rate of each column.
    offset : Tensor of shape (c,)
    theta : Tensor or None
        Log hyper-parameters; None keeps the kernel's own.
    X_support : Tensor of shape (n_support, d)
    y_support, sums : Tensor of shape (n_support, c)
        Their targets, and :math:`\Phi_p \mu` as a running sum (Proposition 3).
    optimizer : SparseOptimizer
    n_iter : int
    hyper_moments : dict
        State of the hyper-parameters' Adam.
    """

    weights: Tensor
    precision: Tensor
    visits: Tensor
    column_scale: Tensor
    offset: Tensor
    theta: Tensor | None
    X_support: Tensor
    y_support: Tensor
    sums: Tensor
    optimizer: SparseOptimizer
    n_iter: int = 0
    hyper_moments: dict = field(default_factory=dict)

    @property
    def n_latent(self) -> int:
        """Number c of latent functions."""
        return len(self.offset)

    @property
    def n_dense(self) -> int:
        """Dense columns k of C."""
        return self.weights.shape[1] // self.n_latent - 1

    @property
    def is_point(self) -> bool:
        """Whether the weights have no covariance."""
        return not len(self.precision)

    def variances(self, indices: Tensor) -> Tensor:
        """Mean-field variances at `indices`; 0 where the column is dense or there is none."""
        if self.is_point:
            return self.weights.new_zeros(len(indices), self.n_latent)
        return (indices >= self.n_dense)[:, None] / self.precision[indices]

    def marginal_std(self) -> Tensor | None:
        """Standard deviations (m, c) of the weights over all columns; None for a point estimate."""
        if self.is_point:
            return None
        columns = self.weights[:, self.n_latent :].unflatten(1, (self.n_latent, -1))
        tail = self.precision.reciprocal()
        tail[: self.n_dense] = 0
        return (tail + columns.square().sum(2)).sqrt()

    def q(self, column: int = 0) -> WeightGaussian:
        """Return the Gaussian over the weights of one latent function; O(m k).

        Raises
        ------
        ValueError
            If the fit has no covariance.
        """
        if self.is_point:
            raise ValueError('covariance="none" leaves no Gaussian; use mean, or fit "diagonal".')
        c, k = self.n_latent, self.n_dense
        columns = self.weights[:, c + column * k : c + (column + 1) * k]
        tail = self.precision[k:, column].rsqrt()
        return WeightGaussian(self.weights[:, column].clone(), columns.clone(), tail)


@dataclass(frozen=True)
class LikelihoodSGDResult:
    r"""Outcome of `fit_likelihood_sgd`.

    Attributes
    ----------
    mean : Tensor of shape (m, c)
    std : Tensor of shape (m, c) or None
        Marginal standard deviations of the weights; None for a point estimate.
    theta : Tensor or None
        Log hyper-parameters; None where they are the kernel's own.
    offset : Tensor of shape (c,)
    n_iter : int
        Iterations, over all warm starts.
    stopped_early : bool
        Whether `tol` or the callback ended it.
    history : dict of str to list of float
        "loss": estimate of -ELBO in nats, summed over latent functions (up to
        :math:`-\tfrac12 \log|S|` for a dense S); "support_log_prob": mean log-density of the
        support rows at the exact latent mean, NaN while hyper-parameters are learned.
    state : LikelihoodState
        To continue from.
    """

    mean: Tensor
    std: Tensor | None
    theta: Tensor | None
    offset: Tensor
    n_iter: int
    stopped_early: bool
    history: dict[str, list[float]]
    state: LikelihoodState

    def q(self, column: int = 0) -> WeightGaussian:
        """Return the Gaussian over the weights of one latent function; see `LikelihoodState.q`."""
        return self.state.q(column)


@torch.no_grad()
def initial_state(
    X: Array,
    y: Array,
    basis: StochasticBasis,
    likelihood: Likelihood,
    offset: Tensor | None,
    theta: Tensor | None,
    k: int,
    n_support: int,
    optimizer: str,
    covariance: str,
    generator: torch.Generator,
) -> LikelihoodState:
    """Start from mu = 0, with the variances that are best there."""
    n, m, dtype = len(X), basis.n_features, basis.dtype
    c = 1 if y.ndim == 1 else y.shape[1]
    offset = torch.zeros(c, dtype=dtype) if offset is None else offset.to(dtype)
    if offset.shape != (c,):
        raise ValueError(f"offset must have shape ({c},), one a column of y; got {offset.shape}.")
    rows = sample_without_replacement(n, min(n_support, n), generator=generator)
    y_support = take_rows(y, rows, dtype).reshape(len(rows), c)
    state = LikelihoodState(
        weights=torch.zeros(m, c * (1 + k), dtype=dtype),
        precision=torch.zeros(0, c, dtype=dtype),
        visits=torch.zeros(m, dtype=torch.int32),
        column_scale=torch.ones(c * (1 + k), dtype=dtype),
        offset=offset,
        theta=theta,
        X_support=take_rows(X, rows, dtype),
        y_support=y_support,
        sums=torch.zeros(len(rows), c, dtype=torch.float64),
        optimizer=make_optimizer(optimizer, (m, c * (1 + k)), dtype),
    )
    if basis.diagonal_precision:
        # Steps in units of the prior's standard deviation, wherever the amplitude lies.
        s = basis.precision_diag(torch.arange(1), theta)
        state.column_scale[:c] = s.detach().rsqrt()
    if covariance != "none":
        _start_covariance(state, X, y, basis, likelihood, k, generator)
    return state


def _start_covariance(
    state: LikelihoodState,
    X: Array,
    y: Array,
    basis: StochasticBasis,
    likelihood: Likelihood,
    k: int,
    generator: torch.Generator,
) -> None:
    """Put s + n E[phi^2] E[-d2 log p] at mu = 0 on the precisions, and on the dense diagonals."""
    n, c, dtype = len(X), state.n_latent, state.weights.dtype
    rows = sample_without_replacement(n, min(100, n), generator=generator)
    X, y = take_rows(X, rows, dtype), take_rows(y, rows, dtype).reshape(len(rows), c)
    if not bool(torch.isfinite(X).all()):
        raise ValueError("X contains NaN or inf; drop or impute those rows.")
    sample = sample_indices(basis, 1000, generator=generator).indices
    squares = basis.features(X, sample, state.theta).square().mean()
    s = basis.precision_diag(sample, state.theta).mean()
    prior_var = (squares * basis.n_features / s).expand_as(y)
    _, d2 = likelihood.expected_derivatives(y, state.offset.expand_as(y), prior_var)
    precision = s + n * squares * -d2.mean(0)  # (c,)
    state.precision = precision.expand(basis.n_features, c).clone()
    if k:
        std = precision.rsqrt()
        columns = state.weights[:, c:].unflatten(1, (c, k))  # a view
        head = torch.arange(k)
        columns[head, :, head] = std
        state.column_scale[c:] = std.repeat_interleave(k)
