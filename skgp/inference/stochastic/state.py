"""What the stochastic solvers of QSGP learn and hand on, by kind of likelihood."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import Array, StochasticBasis, sample_indices, take_rows
from skgp.inference.stochastic.engine import SolverState, make_optimizer
from skgp.inference.stochastic.estimators import Factor, nystrom_factor, support_features
from skgp.inference.weights.gram import optimal_std
from skgp.inference.weights.posterior import WeightGaussian
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Likelihood
from skgp.optim import sample_without_replacement


@dataclass(kw_only=True)
class SGDState(SolverState):
    """State of the solver under a Gaussian likelihood; one latent function."""

    # Of the control variates' features: the first theta, or the one they were last built at.
    initial_theta: Tensor | None = None
    noise_variance: float
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
        n, m, dtype = len(X), basis.n_features, basis.dtype
        rows = sample_without_replacement(n, min(n_support, n), generator=generator)
        weights = torch.zeros(m, 1 + n_dense, dtype=dtype)
        sums = torch.zeros(len(rows), 1 + n_dense, dtype=torch.float64)
        state = cls(
            weights=weights,
            noise_variance=float(noise_variance),
            X_support=take_rows(X, rows, dtype),
            y_support=take_rows(y, rows, torch.float64),
            sums=sums,
            precision_sums=torch.zeros_like(sums[:0] if basis.diagonal_precision else sums),
            square_sums=torch.zeros(m, dtype=dtype),
            square_rows=torch.zeros(m, dtype=dtype),
            column_scale=torch.ones(1 + n_dense, dtype=dtype),
            optimizer=make_optimizer(optimizer, n_support, weights),
        )
        if n_dense:
            size = min(defaults.START_ROWS, n)
            some = sample_without_replacement(n, size, generator=generator)
            state._start_columns(basis, take_rows(X, some, dtype), n)
        return state

    @torch.no_grad()
    def _start_columns(self, basis: StochasticBasis, X: Tensor, n: int) -> None:
        """Put Proposition 1 on the diagonal of the dense columns, and its values as their units."""
        head = torch.arange(self.n_dense)
        squares = n * basis.features(X, head, self.theta).square().mean(0)
        s = basis.precision_diag(head, self.theta)
        c = optimal_std(squares / self.noise_variance + s)  # (k,)
        self.weights[head, 1 + head] = c
        self.column_scale[1:] = c
        for factor, sums in self.running_sums(basis):
            sums[:, 1:] = factor(head) * c

    @torch.no_grad()
    def continued(
        self, basis: StochasticBasis, noise_variance: float, theta: Tensor | None = None
    ) -> "SGDState":
        """The weights of an earlier fit, shared, at other hyper-parameters.

        They are `theta`, or the basis' own where that is None. The running sums belong to the
        features at the initial hyper-parameters, which are new: they are summed again.
        """
        new = replace(
            self,
            theta=theta,
            initial_theta=None if theta is None else theta.clone(),
            noise_variance=float(noise_variance),
            sums=torch.zeros_like(self.sums),
            precision_sums=torch.zeros_like(self.precision_sums),
        )
        new.sum_again(basis)
        return new

    @torch.no_grad()
    def sum_again(self, basis: StochasticBasis) -> None:
        """Recompute the running sums, at the initial hyper-parameters, in O(n_support m)."""
        for factor, sums in self.running_sums(basis):
            sums.zero_()
            for indices in torch.arange(basis.n_features).split(basis.block_size):
                sums += factor(indices).to(sums) @ self.weights[indices].to(sums)

    def running_sums(self, basis: StochasticBasis) -> list[tuple[Factor, Tensor]]:
        """Factors B of the control variates, and the sums B V of each."""
        if not len(self.X_support):
            return []
        X, theta = self.X_support, self.initial_theta
        pairs = [(support_features(basis, X, theta), self.sums)]
        if len(self.precision_sums):
            pairs.append((nystrom_factor(basis, X, theta), self.precision_sums))
        return pairs

    def add_squares(self, indices: Tensor, Phi: Tensor, keep: float = 1.0) -> None:
        """Count the squares of features (n_batch, k) in; `keep` < 1 forgets older ones."""
        squares = keep * self.square_sums[indices] + Phi.square().sum(0).to(self.square_sums)
        self.square_sums[indices] = squares
        self.square_rows[indices] = keep * self.square_rows[indices] + len(Phi)

    def tail_std(
        self, basis: StochasticBasis, n: int, indices: Tensor, theta: Tensor | None
    ) -> Tensor:
        r"""Diagonal of C at `indices` by Proposition 1, from the squares seen so far.

        Functions not met yet get the mean of the others' mean squares.
        """
        rows, sums = self.square_rows[indices], self.square_sums[indices]
        mean = sums / rows.clamp_min(1)  # phi_r' phi_r / n
        if not bool((rows > 0).all()):
            known = mean[rows > 0] if bool((rows > 0).any()) else mean.new_ones(1)
            mean = torch.where(rows > 0, mean, known.mean())
        squares = n * mean.to(basis.dtype)
        return optimal_std(squares / self.noise_variance + basis.precision_diag(indices, theta))

    def covariance(self, basis: StochasticBasis, n: int) -> WeightGaussian:
        """Return q(w), mean-field or chevron; O(m k)."""
        tail = torch.arange(self.n_dense, basis.n_features)
        return WeightGaussian(
            self.weights[:, 0].clone(),
            self.weights[:, 1:].clone(),
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
        n, m, dtype = len(X), basis.n_features, basis.dtype
        c = 1 if y.ndim == 1 else y.shape[1]
        offset = torch.zeros(c, dtype=dtype) if offset is None else offset.to(dtype)
        if offset.shape != (c,):
            raise ValueError(
                f"offset must have shape ({c},), one a column of y; got {offset.shape}."
            )
        rows = sample_without_replacement(n, min(n_support, n), generator=generator)
        weights = torch.zeros(m, c * (1 + n_dense), dtype=dtype)
        state = cls(
            weights=weights,
            precision=torch.zeros(0, c, dtype=dtype),
            visits=torch.zeros(m, dtype=torch.int32),
            column_scale=torch.ones(c * (1 + n_dense), dtype=dtype),
            offset=offset,
            X_support=take_rows(X, rows, dtype),
            y_support=take_rows(y, rows, dtype).reshape(len(rows), c),
            sums=torch.zeros(len(rows), c, dtype=torch.float64),
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
        X, y = take_rows(X, some, dtype), take_rows(y, some, dtype).reshape(rows, c)
        if not bool(torch.isfinite(X).all()):
            raise ValueError("X contains NaN or inf; drop or impute those rows.")
        size = defaults.LIKELIHOOD_START_FUNCTIONS
        sample = sample_indices(basis, size, generator=generator).indices
        squares = basis.features(X, sample).square().mean()
        s = basis.precision_diag(sample).mean()
        prior_var = (squares * basis.n_features / s).expand_as(y)
        _, d2 = likelihood.expected_derivatives(y, self.offset.expand_as(y), prior_var)
        precision = s + n * squares * -d2.mean(0)  # (c,)
        self.precision = precision.expand(basis.n_features, c).clone()
        if k:
            std = precision.rsqrt()
            columns = self.weights[:, c:].unflatten(1, (c, k))  # a view
            head = torch.arange(k)
            columns[head, :, head] = std
            self.column_scale[c:] = std.repeat_interleave(k)

    @property
    def n_latent(self) -> int:
        """Number c of latent functions."""
        return len(self.offset)

    def variances(self, indices: Tensor) -> Tensor:
        """Mean-field variances at `indices`; 0 where the column is dense."""
        return (indices >= self.n_dense)[:, None] / self.precision[indices]

    def q(self, column: int = 0) -> WeightGaussian:
        """Return the Gaussian over the weights of one latent function; O(m k)."""
        c, k = self.n_latent, self.n_dense
        columns = self.weights[:, c + column * k : c + (column + 1) * k]
        tail = self.precision[k:, column].rsqrt()
        return WeightGaussian(self.weights[:, column].clone(), columns.clone(), tail)
