"""What the stochastic solvers of QSGP learn and hand on, by kind of likelihood.

Hyper-parameters follow the bound of the iterations by Adam (Proposition 2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import (
    Array,
    StochasticBasis,
    blocks,
    index_set,
    make_optimizer,
    sample_indices,
    take_rows,
)
from skgp.inference.stochastic.engine import Health, SolverState
from skgp.inference.stochastic.estimators import Factor, nystrom_factor, support_features
from skgp.inference.weights.gram import optimal_std
from skgp.inference.weights.posterior import WeightGaussian
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Likelihood
from skgp.optim import Adam, sample_without_replacement


@dataclass(kw_only=True)
class SGDState(SolverState):
    """State of the solver under a Gaussian likelihood; one latent function."""

    # (n_units, p), theta at which the support features of each sampling unit entered the running
    # sums last; None where all entered at `theta`.
    unit_theta: Tensor | None = None
    noise_variance: float | Tensor  # a tensor while it is learned
    precision_sums: Tensor  # (n_support, 1 + k), of the Nystrom control variate; none of diagonal S
    square_sums: Tensor  # (m,), sums of phi_lr^2 over the rows seen with function r
    square_rows: Tensor  # (m,), the number of these rows
    Z: Tensor | None = None  # (m, d), inducing points that the weights belong to
    # Features that the weights belong to: under another kernel's hyper-parameters new ones could
    # share their frequencies otherwise among its terms.
    fourier: FourierFeatures | None = None

    @classmethod
    def start(
        cls,
        X: Array,
        y: Array,
        basis: StochasticBasis,
        noise_variance: float,
        *,
        n_dense: int = 0,
        n_support: int = 500,
        optimizer: str | None = None,
        generator: torch.Generator,
    ) -> "SGDState":
        """Start from mu = 0 and mean-field columns, with support rows drawn from the data.

        X (n, d) and centred targets y (n,). `n_dense` columns k of C: 0 is mean-field, more a
        chevron (QSGP-k). `n_support` is the rank of the control variates; 0 for none. `optimizer`
        is "nystrom" (by default, where there are support rows), "adagrad", the paper's, or "adam".
        """
        n, m, dtype, device = len(X), basis.n_features, basis.dtype, basis.device
        rows = sample_without_replacement(n, min(n_support, n), generator=generator)
        weights = torch.zeros(m, 1 + n_dense, dtype=dtype, device=device)
        sums = weights.new_zeros(len(rows), 1 + n_dense, dtype=torch.float64)
        state = cls(
            weights=weights,
            noise_variance=float(noise_variance),
            X_support=take_rows(X, rows, dtype, device),
            y_support=take_rows(y, rows, torch.float64, device),
            sums=sums,
            precision_sums=torch.zeros_like(sums[:0] if basis.diagonal_precision else sums),
            square_sums=weights.new_zeros(m),
            square_rows=weights.new_zeros(m),
            column_scale=_unit(basis) * weights.new_ones(1 + n_dense),
            optimizer=make_optimizer(optimizer, n_support, weights),
        )
        if n_dense:
            size = min(defaults.START_ROWS, n)
            some = sample_without_replacement(n, size, generator=generator)
            state._start_columns(basis, take_rows(X, some, dtype, device), n)
        return state

    @torch.no_grad()
    def _start_columns(self, basis: StochasticBasis, X: Tensor, n: int) -> None:
        """Put Proposition 1 on the diagonal of the dense columns, and its values as their units."""
        k = self.n_dense
        first = index_set(basis, torch.arange(-(-k // basis.unit_size)))  # units that hold them
        head = first.indices[:k]
        squares = n * basis.sampled(X, first, self.theta)[:, :k].square().mean(0)
        s = basis.precision_diag(head, self.theta)
        c = optimal_std(squares / self.noise_variance + s)  # (k,)
        self.weights[head, 1 + head] = c
        self.column_scale[1:] = c
        for factor, sums in self.running_sums(basis):
            sums[:, 1:] = factor(first)[:, :k] * c

    @torch.no_grad()
    def continued(
        self, basis: StochasticBasis, noise_variance: float, theta: Tensor | None = None
    ) -> "SGDState":
        """The weights of an earlier fit, shared, at other hyper-parameters.

        They are `theta`, or the basis' own where that is None. The running sums belong to features
        at the earlier ones: they are summed again.
        """
        new = replace(
            self,
            theta=theta,
            noise_variance=float(noise_variance),
            sums=torch.zeros_like(self.sums),
            precision_sums=torch.zeros_like(self.precision_sums),
        )
        new.sum_again(basis)
        return new

    @torch.no_grad()
    def sum_again(self, basis: StochasticBasis) -> None:
        """Recompute the running sums at `theta`, in O(n_support m)."""
        self.unit_theta = None
        for factor, sums in self.running_sums(basis):
            sums.zero_()
            for sample in blocks(basis):
                sums += factor(sample).to(sums) @ self.weights[sample.indices].to(sums)

    def running_sums(self, basis: StochasticBasis) -> list[tuple[Factor, Tensor]]:
        """Factors B of the control variates at `theta`, and the sums B V of each."""
        if not len(self.X_support):
            return []
        X, theta = self.X_support, self.theta
        pairs = [(support_features(basis, X, theta), self.sums)]
        if len(self.precision_sums):
            pairs.append((nystrom_factor(basis, X, theta), self.precision_sums))
        return pairs

    def add_squares(
        self, indices: Tensor, Phi: Tensor, keep: float = 1.0, good: Tensor | None = None
    ) -> None:
        """Count squares of features (n_batch, k) in, if `good`; `keep` < 1 forgets older ones."""
        old = self.square_sums[indices]
        squares = keep * old + Phi.square().sum(0).to(old)
        self.square_sums[indices] = squares if good is None else torch.where(good, squares, old)
        self.square_rows[indices] = keep * self.square_rows[indices] + len(Phi)

    def tail_std(
        self, basis: StochasticBasis, n: int, indices: Tensor, theta: Tensor | None
    ) -> Tensor:
        r"""Diagonal of C at `indices` by Proposition 1, from the squares seen so far.

        Functions not met yet get the mean of the others' mean squares.
        """
        rows, sums = self.square_rows[indices], self.square_sums[indices]
        mean, known = sums / rows.clamp_min(1), rows > 0  # phi_r' phi_r / n
        others = torch.where(known.any(), mean.sum() / known.sum(), 1)
        squares = n * torch.where(known, mean, others).to(basis.dtype)
        share = (self.n_drawn_units or basis.n_units) / basis.n_units  # see IndexSet
        s = share * basis.precision_diag(indices, theta)
        return optimal_std(squares / self.noise_variance + s)

    def covariance(
        self, basis: StochasticBasis, n: int, first: int | None = None
    ) -> WeightGaussian:
        """Return q(w) of the first functions, by default all, mean-field or chevron; O(m k)."""
        m = basis.n_features if first is None else first
        tail = torch.arange(self.n_dense, m, device=basis.device)
        return WeightGaussian(
            self.weights[:m, 0].clone(),
            self.weights[:m, 1:].clone(),
            self.tail_std(basis, n, tail, self.theta),
        )


@dataclass(kw_only=True)
class LikelihoodState(SolverState):
    """State of the solver under any likelihood; `sums` are those of the means."""

    precision: Tensor  # (m, c), c_i^-2 of the mean-field part
    visits: Tensor  # (m,), iterations that sampled each function
    offset: Tensor  # (c,), added to the latent functions

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        X: Array,
        y: Array,
        basis: StochasticBasis,
        likelihood: Likelihood,
        *,
        offset: Tensor | None = None,
        n_dense: int = 0,
        n_support: int = 200,
        optimizer: str | None = None,
        generator: torch.Generator,
    ) -> "LikelihoodState":
        """Start from mu = 0, with the variances that are best there.

        X (n, d) and targets y (n,) or (n, c), c problems over shared features (one-vs-rest
        classes); the likelihood is log-concave. The features of `n_support` rows shape the
        directions of "nystrom", and their latent means are followed exactly. `offset` (c,),
        `n_dense` and `optimizer` as for `SGDState.start`.
        """
        n, m, dtype, device = len(X), basis.n_features, basis.dtype, basis.device
        c = 1 if y.ndim == 1 else y.shape[1]
        offset = torch.zeros(c) if offset is None else offset
        offset = offset.to(device, dtype)
        rows = sample_without_replacement(n, min(n_support, n), generator=generator)
        weights = torch.zeros(m, c * (1 + n_dense), dtype=dtype, device=device)
        state = cls(
            weights=weights,
            precision=weights.new_zeros(0, c),
            visits=weights.new_zeros(m, dtype=torch.int32),
            column_scale=_unit(basis) * weights.new_ones(c * (1 + n_dense)),
            offset=offset,
            X_support=take_rows(X, rows, dtype, device),
            y_support=take_rows(y, rows, dtype, device).reshape(len(rows), c),
            sums=weights.new_zeros(len(rows), c, dtype=torch.float64),
            optimizer=make_optimizer(optimizer, n_support, weights),
        )
        state._start_covariance(X, y, basis, likelihood, generator)
        return state

    def _start_covariance(
        self,
        X: Array,
        y: Array,
        basis: StochasticBasis,
        likelihood: Likelihood,
        generator: torch.Generator,
    ) -> None:
        """Put s + n E[phi^2] E[-d2 log p] at mu = 0 on precisions and dense diagonals."""
        n, c, k, dtype = len(X), self.n_latent, self.n_dense, self.weights.dtype
        rows = min(defaults.LIKELIHOOD_START_ROWS, n)
        some = sample_without_replacement(n, rows, generator=generator)
        X, y = (take_rows(a, some, dtype, basis.device) for a in (X, y))
        y = y.reshape(rows, c)
        if not bool(torch.isfinite(X).all()):
            raise ValueError("X contains NaN or inf; drop or impute those rows.")
        size = defaults.LIKELIHOOD_START_FUNCTIONS
        sample = sample_indices(basis, size, generator=generator)
        squares = basis.sampled(X, sample).square().mean()
        s = basis.precision_diag(sample.indices).mean()
        prior_var = (squares * basis.n_features / s).expand_as(y)
        _, d2 = likelihood.expected_derivatives(y, self.offset.expand_as(y), prior_var)
        precision = s + n * squares * -d2.mean(0)  # (c,)
        self.precision = precision.expand(basis.n_features, c).clone()
        if k:
            std = precision.rsqrt()
            columns = self.weights[:, c:].unflatten(1, (c, k))  # a view
            head = torch.arange(k, device=basis.device)
            columns[head, :, head] = std
            self.column_scale[c:] = std.repeat_interleave(k)

    @property
    def n_latent(self) -> int:
        """Number c of latent functions."""
        return len(self.offset)

    def variances(self, indices: Tensor) -> Tensor:
        """Mean-field variances at `indices`; 0 where the column is dense."""
        return (indices >= self.n_dense)[:, None] / self.precision[indices]

    def q(self, column: int = 0, first: int | None = None) -> WeightGaussian:
        """Return the Gaussian over the first weights of one latent function; O(m k)."""
        c, k = self.n_latent, self.n_dense
        weights = self.weights[:first]
        columns = weights[:, c + column * k : c + (column + 1) * k]
        tail = self.precision[k:first, column].rsqrt()
        return WeightGaussian(weights[:, column].clone(), columns.clone(), tail)


def _unit(basis: StochasticBasis) -> float:
    """Steps of a mean that change f alike whatever the variance of the kernel.

    Fourier features are as large as the prior's standard deviation; k(z, .) is its square.
    """
    if basis.diagonal_precision:
        return 1.0
    size = min(defaults.LIKELIHOOD_START_FUNCTIONS, basis.n_features)
    some = torch.linspace(0, basis.n_features - 1, size, dtype=torch.float64).long()
    return 1 / float(basis.precision_diag(some.to(basis.device)).mean())


class HyperParameters:
    """Log hyper-parameters, and perhaps the log noise variance, moved by Adam up the ELBO.

    Reads the state and writes it after every step; Adam's moments outlast warm starts.
    """

    def __init__(
        self,
        state: SolverState,
        kernel: Any,
        health: Health,
        noise_variance: float | Tensor | None = None,
    ) -> None:
        self.state, self.kernel, self.health = state, kernel, health
        numbers: Any = {"dtype": torch.float64, "device": state.weights.device}
        start = torch.as_tensor(kernel.theta) if state.theta is None else state.theta
        self.theta = start.detach().to(**numbers).clone().requires_grad_()
        self.leaves = {"theta": self.theta}
        if noise_variance is not None:
            noise = torch.as_tensor(noise_variance, **numbers)
            self.leaves["noise_variance"] = noise.log().requires_grad_()
        self.bounds = torch.as_tensor(kernel.bounds, **numbers).T if len(start) else None
        self.adam = Adam(list(self.leaves.values()))
        if state.hyper_moments:
            self.adam.load_state_dict(state.hyper_moments)

    def slopes(self, loss: Tensor) -> list[Tensor]:
        """Gradients with respect to the leaves; some kernels have none."""
        leaves = list(self.leaves.values())
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    @torch.no_grad()
    def move(self, iteration: int, gradients: Sequence[Tensor], rate: float) -> None:
        """Step of Adam, kept within the kernel's bounds; none once something was not finite."""
        before = [leaf.clone() for leaf in self.leaves.values()]
        for (name, leaf), gradient in zip(self.leaves.items(), gradients, strict=True):
            good = self.health.note(gradient, iteration, name)
            leaf.grad = torch.where(good, gradient, 0)
        self.adam.param_groups[0]["lr"] = rate
        self.adam.step()
        if self.bounds is not None:
            self.theta.clamp_(*self.bounds)
        for leaf, old in zip(self.leaves.values(), before, strict=True):
            leaf.copy_(torch.where(good, leaf, old))
        self.state.theta = self.theta.detach().clone()
        self.state.hyper_moments = self.adam.state_dict()


def check_learnable(basis: StochasticBasis) -> None:
    """Refuse to learn hyper-parameters where the log-determinant of S has no cheap estimator."""
    if not basis.diagonal_precision:
        raise ValueError(
            "Proposition 2 needs a diagonal prior precision, and that of inducing points is "
            'K(Z, Z). Learn the hyper-parameters beforehand, or use basis="fourier".'
        )
