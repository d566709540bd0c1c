r"""Gaussian likelihood: sums over observations that suffice, their evidence, the best q(w).

.. math:: f(x) = \phi(x)^T w, \quad w \sim N(0, I), \quad y_i \sim N(f(x_i), \sigma^2 / w_i)

needs of the data only :math:`A = \Phi^T W \Phi`, :math:`b = \Phi^T W y` and a few scalars. All are
sums over rows, so more rows can be added at any time, exactly: the basis of ``partial_fit``. The
noise variance enters later, at no new pass over the data: with :math:`B = A + \sigma^2 I = L L^T`,

.. math::
    \log p(y) = -\tfrac12 \Big[ (y^T W y - \| L^{-1} b \|^2) / \sigma^2
    + n \log 2 \pi \sigma^2 - \textstyle\sum_i \log w_i + \log |B| - m \log \sigma^2 \Big].
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import (
    CHUNK_BYTES,
    RATIO_HALF_WIDTH,
    RATIO_INTERVALS,
    RATIO_ROUNDING,
    ROUNDINGS,
    ROWS_FLOAT32,
)
from skgp.inference.weights.bases import Basis
from skgp.inference.weights.design import add_gram, check_sample_weight, mirror, row_chunks
from skgp.inference.weights.posterior import LinearWeightsPosterior, WeightGaussian
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.cholesky import jittered_cholesky, log_det, reverse_cholesky, tri_solve
from skgp.linalg.runtime import TensorState


class StreamingGram(TensorState):
    r"""Running :math:`A = \Phi^T W \Phi` and :math:`b = \Phi^T W y` of all rows seen.

    With float32 features (twice as fast) chunks have at most 4096 rows and their sums are added in
    float64, which leaves a relative error of about 1e-6 in A. ``n m^2`` flops (half of the full
    product) plus the features. Memory: ``8 m^2`` bytes for A, the features of one chunk (at most
    512 MiB, or one row) and one tile of 2 MiB.
    """

    def __init__(
        self,
        basis: Basis,  # with prior weights N(0, I)
        *,
        dtype: torch.dtype = torch.float64,  # of the features and of products within a chunk
        shift: float = 0.0,  # near the targets: squares of y - shift keep their digits
        targets: tuple[int, ...] = (),  # (t,): targets of shape (n, t)
    ):
        self.basis, self.shift, self.dtype = basis, shift, dtype
        m = basis.n_features
        self.gram = torch.zeros(m, m, dtype=torch.float64)  # A
        self.moment = torch.zeros(m, *targets, dtype=torch.float64)  # b
        self.feature_sum = torch.zeros(m, dtype=torch.float64)  # Phi'W1, for `standardised`
        self.n_rows: float = 0  # a float where rows count by their weights
        # Of shifted targets, as b; summed over targets, so that what follows of a mean is for one.
        self.sum_weight = self.sum_target = self.sum_square = self.sum_log_weight = 0.0

    def update(self, X: Tensor, y: Tensor, sample_weight: Tensor | None = None) -> "StreamingGram":
        """Add rows, in place; any split of the data gives the same sums up to rounding.

        The sums move to the device of X (n, d) at the first call. Row i has noise variance
        ``noise_variance / sample_weight[i]``; a ValueError refuses weights that are not positive.
        """
        weight = y.new_ones(len(y)) if sample_weight is None else sample_weight
        check_sample_weight(weight, X.shape[0])
        y, weight = y.to(X.device, torch.float64) - self.shift, weight.to(X.device, torch.float64)
        for name in ("gram", "moment", "feature_sum"):
            setattr(self, name, getattr(self, name).to(X.device))
        max_rows = None if self.dtype == torch.float64 else ROWS_FLOAT32
        row_bytes = self.basis.n_features * self.dtype.itemsize
        for rows in row_chunks(X.shape[0], row_bytes, CHUNK_BYTES, max_rows):
            self._add_chunk(X[rows].to(self.dtype), y[rows], weight[rows])
        mirror(self.gram)
        self.n_rows += X.shape[0]
        self.sum_weight += float(weight.sum())
        self.sum_target += float((weight @ y).sum())
        self.sum_square += float((weight @ y.square()).sum())
        self.sum_log_weight += float(weight.log().sum())
        return self

    @property
    def mean(self) -> float:
        """Weighted mean of the targets."""
        return self.shift + self.sum_target / self.sum_weight

    @property
    def variance(self) -> float:
        """Weighted variance of the targets; 0 where it is that of their rounding."""
        from_shift = self.sum_target / self.sum_weight
        variance = self.sum_square / self.sum_weight - from_shift**2
        rounding = (ROUNDINGS * torch.finfo(torch.float64).eps) ** 2 * (self.mean**2 + variance)
        return variance if variance > rounding else 0.0

    def standardised(self, shift: float, scale: float) -> "StreamingGram":
        """The statistics of ``(y - shift) / scale``; A is shared, so never update them.

        Lets targets be centred and scaled by statistics that are only known once every row has
        been seen, so that ``partial_fit`` equals ``fit``.
        """
        other = self._copy(shift=0.0)
        shift = shift - self.shift
        other.moment = (self.moment - shift * self.feature_sum) / scale
        other.sum_target = (self.sum_target - shift * self.sum_weight) / scale
        other.sum_square = (
            self.sum_square - 2 * shift * self.sum_target + shift**2 * self.sum_weight
        ) / scale**2
        return other

    def counting_weights(self) -> "StreamingGram":
        """The statistics for an evidence in which a row of weight w counts as w observations.

        Their own is that of one observation of noise variance ``noise / w`` a row.
        """
        return self._copy(n_rows=self.sum_weight, sum_log_weight=0.0)

    def __add__(self, other: "StreamingGram") -> "StreamingGram":
        """The statistics of the rows of both, for one basis and shift."""
        names = "gram moment feature_sum n_rows sum_weight sum_target sum_square sum_log_weight"
        sums = {name: getattr(self, name) + getattr(other, name) for name in names.split()}
        return self._copy(**sums)

    def _add_chunk(self, X: Tensor, y: Tensor, weight: Tensor) -> None:
        """Add X (c, d), y (c,) or (c, t) and weights (c,) to the sums; O(c m^2)."""
        Phi = X.new_empty(X.shape[0], self.basis.n_features)
        for block in range(self.basis.n_blocks):
            Phi[:, self.basis.block_slice(block)] = self.basis.features(X, block)
        root = weight.sqrt()[:, None]
        Phi *= root.to(X)
        Y = y.reshape(len(y), -1)
        moments = Phi.mT @ torch.cat([root * Y, root], dim=1).to(X)  # (m, t + 1)
        self.moment += moments[:, :-1].reshape(self.moment.shape)
        self.feature_sum += moments[:, -1]
        add_gram(self.gram, Phi)


def gram_statistics(
    data: Data, *, basis: Basis, device: torch.device, **settings: Any
) -> StreamingGram:
    """The statistics of some observations, made on a device; they add over observations."""
    data = data.to(device)
    return StreamingGram(basis, **settings).update(data.X, data.y, data.weight)


def log_marginal_likelihood(statistics: StreamingGram, noise_variance: float) -> float:
    r"""Exact :math:`\log p(y \mid \sigma^2)` in nats, for the features as they are; O(m^3 / 3).

    Summed over targets.
    """
    _check(statistics, noise_variance)
    B = statistics.gram.clone()
    B.diagonal().add_(noise_variance)
    L = jittered_cholesky(B).factor
    moments = statistics.moment.reshape(len(L), -1)  # (m, t)
    whitened = tri_solve(L, moments, upper=False)
    misfit = statistics.sum_square - float(whitened.square().sum())
    log_volume = float(log_det(L)) - len(L) * math.log(noise_variance)
    normaliser = statistics.n_rows * math.log(2 * math.pi * noise_variance)
    volume = normaliser - statistics.sum_log_weight + log_volume  # of a target
    return -0.5 * (misfit / noise_variance + moments.shape[1] * volume)


def refit_noise(statistics: StreamingGram, noise_variance: float, *, tol: float = 0.02) -> float:
    r"""The noise variance of largest evidence.

    Truncated features explain less than the kernel that they stand for; what they leave must be
    counted as noise, or predictive variances are far too small. The search starts from
    `noise_variance`, widens as long as the best value lies at an end of its interval, and ends
    within `tol` in the logarithm: about 10 factors of ``O(m^3 / 3)``, two copies of A in memory.
    """
    _check(statistics, noise_variance)
    if statistics.sum_square <= 0:
        raise ValueError(
            "The targets y are all 0: no noise variance can be fitted to them. Pass targets that "
            "vary, or skip the refit."
        )
    tried: dict[float, float] = {}

    def loss(log_noise: float) -> float:
        noise = math.exp(log_noise)
        tried[noise] = log_marginal_likelihood(statistics, noise)
        return -tried[noise]

    floor, half_width = _smallest_log_noise(statistics), math.log(RATIO_HALF_WIDTH)
    centre = max(floor, math.log(noise_variance))
    for _ in range(RATIO_INTERVALS):
        low, high = max(floor, centre - half_width), centre + half_width
        found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": tol})
        centre = float(found.x)
        if (low == floor or centre > low + 0.5) and centre < high - 0.5:
            break
    return max(tried, key=tried.__getitem__)


def _smallest_log_noise(statistics: StreamingGram) -> float:
    """The log-variance below which the rounding of A, not the data, decides the evidence."""
    eps = torch.finfo(statistics.dtype).eps
    trace = float(statistics.gram.diagonal().sum())
    return math.log(max(RATIO_ROUNDING * eps * trace / math.sqrt(len(statistics.gram)), 1e-300))


def _check(statistics: StreamingGram, noise_variance: float) -> None:
    if not 0 < noise_variance < math.inf:
        raise ValueError(f"noise_variance must be positive and finite; got {noise_variance!r}.")
    if statistics.n_rows == 0:
        raise ValueError("The statistics hold no rows yet: call update(X, y) first.")


def optimal_gaussian(
    gram: Tensor,  # Phi' Phi (m, m); not changed
    projection: Tensor,  # Phi' y (m,); or (m, t) of t targets, which have one C
    noise_variance: float | Tensor,
    prior_precision: Tensor,  # S, (m,) or (m, m)
    *,
    n_dense: int,  # k: 0 for the diagonal structure, m for the full one, else chevron
) -> tuple[WeightGaussian, float]:
    r"""Maximiser of the ELBO of eq. (2) among the q with `n_dense` dense columns.

    With the precision of the exact posterior, :math:`G = \Phi^T \Phi / \sigma^2 + S`,

    .. math:: \mu = G^{-1} \Phi^T y / \sigma^2, \qquad
              \mathcal{L}_\Sigma(C) = \operatorname{tr}(C^T G C) - 2 \sum_r \log c_{rr}.

    The objective of C is a sum over its columns, so column r of any structure is the minimiser over
    its own free entries. A dense column has :math:`c \propto G_{r:,r:}^{-1} e_1`: it is column r of
    the full optimum, for which :math:`C C^T = G^{-1}`. A diagonal one follows from Proposition 1.
    With :math:`G = U U^T`, U upper triangular, the full optimum is :math:`U^{-T}`.

    Returned are q and the jitter that was added to the diagonal of G, 0.0 almost always.

    :math:`O(m^3 / 3 + m^2 k)`, three matrices of size m x m in memory.
    """
    m = len(gram)
    G = gram / noise_variance  # (m, m)
    if prior_precision.ndim == 2:
        G = G + prior_precision
    else:
        G = G.diagonal_scatter(G.diagonal() + prior_precision)
    U, jitter = reverse_cholesky(G)
    half = tri_solve(U, projection.reshape(m, -1) / noise_variance, upper=True)  # (m, t)
    mean = tri_solve(U.T, half, upper=False).reshape(projection.shape)
    units = torch.eye(m, n_dense, dtype=G.dtype, device=G.device)
    columns = tri_solve(U.T, units, upper=False)  # (m, k)
    return WeightGaussian(mean, columns, optimal_std(G.diagonal()[n_dense:])), jitter


def optimal_std(precision_diagonal: Tensor) -> Tensor:
    r"""Best diagonal entries of C in columns without other entries (Proposition 1).

    .. math:: c_{rr} = G_{rr}^{-1/2} = \sqrt{\sigma^2 / (\phi_r^T \phi_r + \sigma^2 s_{rr})}

    of the entries :math:`G_{rr} = \phi_r^T \phi_r / \sigma^2 + s_{rr}`, shape (t,).
    """
    return precision_diagonal.rsqrt()


def gram_posterior(
    statistics: StreamingGram, noise_variance: float, *, n_dense_columns: int | None = None
) -> LinearWeightsPosterior:
    r"""Best Gaussian posterior of a covariance structure, out of the Gram matrix; O(m^3).

    `n_dense_columns` of the covariance's Cholesky factor: 0 is "diagonal", m, or None, "full", the
    exact posterior; "chevron" between. Five m x m matrices at its peak.
    """
    m = statistics.basis.n_features
    q, _ = optimal_gaussian(
        statistics.gram,
        statistics.moment,
        noise_variance,
        torch.ones_like(statistics.feature_sum),
        n_dense=m if n_dense_columns is None else n_dense_columns,
    )
    return LinearWeightsPosterior.from_gaussian(statistics.basis, q)


def statistics_posterior(
    statistics: StreamingGram,
    noise: float,
    covariance: str,
    n_dense_columns: int,
    n_samples: int,
    *,
    refit: bool,
    generator: torch.Generator,
) -> tuple[LinearWeightsPosterior, float, float]:
    """Posterior of a covariance structure ("samples": of draws), noise variance, log evidence.

    With `refit` the noise variance is the one of largest evidence: what the truncated basis leaves
    unexplained counts as noise.
    """
    if refit and statistics.sum_square > 0:
        noise = refit_noise(statistics, noise)
    m = statistics.basis.n_features
    n_dense = {"diagonal": 0, "chevron": min(n_dense_columns, m)}.get(covariance, m)
    posterior = gram_posterior(statistics, noise, n_dense_columns=n_dense)
    if covariance == "samples":
        deviations = posterior.sample_deviations(n_samples, generator)
        posterior = LinearWeightsPosterior.from_deviations(
            statistics.basis, posterior.mean_weights, deviations
        )
    return posterior, noise, log_marginal_likelihood(statistics, noise)


def hessian_covariance(
    hessians: Iterable[Tensor], precision: Tensor, kind: str = "full", n_dense_columns: int = 100
) -> list[WeightGaussian]:
    """Gaussians of mean 0 around modes, of their negative log-likelihoods' Hessians (m, m).

    As :func:`skgp.inference.laplace.laplace_covariance`, of precisions 1 / a (c,).
    """
    found = []
    for H, each in zip(hessians, precision, strict=True):
        m, zero = len(H), torch.zeros_like(H[0])
        if kind == "diagonal":
            found.append(WeightGaussian.diagonal(zero, optimal_std(H.diagonal() + each)))
            continue
        n_dense = m if kind == "full" else min(n_dense_columns, m)
        q, jitter = optimal_gaussian(H, zero, 1.0, each.expand(m), n_dense=n_dense)
        if jitter:
            warn_caller(
                f"The Hessian of the weights needed a jitter of {jitter:.1e} on its diagonal "
                "to be factored, which shrinks the posterior variances. Lower the prior variance "
                "or the number of features, or use dtype='float64'.",
                NumericalWarning,
            )
        found.append(q)
    return found
