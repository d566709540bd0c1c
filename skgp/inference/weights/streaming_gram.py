r"""Sufficient statistics of a model linear in its weights, accumulated over chunks of rows.

.. math:: f(x) = \phi(x)^T w, \quad w \sim N(0, I), \quad y_i \sim N(f(x_i), \sigma^2 / w_i)

needs of the data only :math:`A = \Phi^T W \Phi`, :math:`b = \Phi^T W y` and a few scalars. All of
them are sums over rows, so more rows can be added at any time, exactly: the basis of
``partial_fit``. The noise variance enters later (:mod:`.evidence`), at no new pass
over the data.
"""

import torch
from torch import Tensor

from skgp.inference.weights.design import (
    GRAM_TILE,
    MEMORY_BUDGET,
    Basis,
    add_gram,
    check_sample_weight,
    row_chunks,
)
from skgp.linalg.tensor_state import TensorState

_ROUNDINGS = 10  # by which equal targets may differ
_MAX_ROWS_FLOAT32 = 4096  # bounds the rounding of a float32 sum before float64 takes over


class StreamingGram(TensorState):
    r"""Running :math:`A = \Phi^T W \Phi` and :math:`b = \Phi^T W y` of all rows seen.

    Parameters
    ----------
    basis : Basis
        Features with prior weights ``N(0, I)``.
    dtype : torch.dtype, default=torch.float64
        Precision of the features and of the products within a chunk of rows. With float32 (twice
        as fast) chunks have at most 4096 rows and their sums are added in float64, which leaves a
        relative error of about 1e-6 in A.
    memory_budget : int, default=2**29
        Bytes of features held at once; decides the rows of a chunk.
    shift : float, default=0.0
        Near the targets: sums are of :math:`y - \mathrm{shift}`, whose squares keep the digits of
        the variance.

    Attributes
    ----------
    gram : Tensor of shape (m, m)
        A, symmetric, float64.
    moment : Tensor of shape (m,)
        b.
    feature_sum : Tensor of shape (m,)
        :math:`\Phi^T W 1`, for targets shifted afterwards (:meth:`standardised`).
    n_rows : int
    sum_weight, sum_target, sum_square, sum_log_weight : float
        :math:`\sum w_i`, :math:`\sum w_i y_i`, :math:`\sum w_i y_i^2`, :math:`\sum \log w_i`, of
        shifted targets, as b.

    Notes
    -----
    ``n m^2`` flops (half of the full product) plus the features. Memory: ``8 m^2`` bytes for A,
    the features of one chunk (at most `memory_budget`, or one row) and one tile of 2 MiB.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.inference.weights.evidence import refit_noise
    >>> from skgp.inference.weights.weights import gram_posterior
    >>> from skgp.inference.weights.whitened import WhitenedInducingBasis
    >>> X = torch.linspace(0, 3, 20, dtype=torch.float64)[:, None]
    >>> statistics = StreamingGram(WhitenedInducingBasis(RBF(1.0), X[::2]))
    >>> for rows in (slice(0, 8), slice(8, 20)):
    ...     statistics = statistics.update(X[rows], X[rows, 0].sin())
    >>> fit = refit_noise(statistics, 0.1)
    >>> posterior = gram_posterior(statistics, fit.noise_variance, fit.prior_variance)
    >>> bool((posterior.mean(X) - X[:, 0].sin()).abs().max() < 0.01)
    True
    """

    def __init__(
        self,
        basis: Basis,
        *,
        dtype: torch.dtype = torch.float64,
        memory_budget: int = MEMORY_BUDGET,
        shift: float = 0.0,
    ):
        self.basis = basis
        self.shift = shift
        self.dtype = dtype
        self.memory_budget = memory_budget
        m = basis.n_features
        self.gram = torch.zeros(m, m, dtype=torch.float64)
        self.moment = torch.zeros(m, dtype=torch.float64)
        self.feature_sum = torch.zeros(m, dtype=torch.float64)
        self.n_rows: float = 0  # a float where rows count by their weights
        self.sum_weight = 0.0
        self.sum_target = 0.0
        self.sum_square = 0.0
        self.sum_log_weight = 0.0

    def update(self, X: Tensor, y: Tensor, sample_weight: Tensor | None = None) -> "StreamingGram":
        """Add rows; any split of the data into calls gives the same sums up to rounding.

        Parameters
        ----------
        X : Tensor of shape (n, d)
            The sums move to its device at the first call.
        y : Tensor of shape (n,)
        sample_weight : Tensor of shape (n,), optional
            Positive; row i has noise variance ``noise_variance / sample_weight[i]``.

        Returns
        -------
        StreamingGram
            Itself, changed in place.

        Raises
        ------
        ValueError
            If the shapes disagree or a weight is not positive and finite.
        """
        if y.shape != (X.shape[0],):
            raise ValueError(f"y must have shape ({X.shape[0]},); got {tuple(y.shape)}.")
        weight = torch.ones_like(y) if sample_weight is None else sample_weight
        check_sample_weight(weight, X.shape[0])
        y, weight = y.to(X.device, torch.float64) - self.shift, weight.to(X.device, torch.float64)
        self._move(X.device)
        max_rows = X.shape[0] if self.dtype == torch.float64 else _MAX_ROWS_FLOAT32
        row_bytes = self.basis.n_features * self.dtype.itemsize
        for rows in row_chunks(X.shape[0], row_bytes, self.memory_budget, max_rows):
            self._add_chunk(X[rows].to(self.dtype), y[rows], weight[rows])
        self._mirror()
        self.n_rows += X.shape[0]
        self.sum_weight += float(weight.sum())
        self.sum_target += float(weight @ y)
        self.sum_square += float(weight @ y.square())
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
        rounding = (_ROUNDINGS * torch.finfo(torch.float64).eps) ** 2 * (self.mean**2 + variance)
        return variance if variance > rounding else 0.0

    def standardised(self, shift: float, scale: float) -> "StreamingGram":
        """Return the statistics of ``(y - shift) / scale``; A is shared, so never update them.

        Lets targets be centred and scaled by statistics that are only known once every row has
        been seen, so that ``partial_fit`` equals ``fit``.
        """
        other = object.__new__(StreamingGram)
        other.__dict__.update(self.__dict__, shift=0.0)
        shift = shift - self.shift
        other.moment = (self.moment - shift * self.feature_sum) / scale
        other.sum_target = (self.sum_target - shift * self.sum_weight) / scale
        other.sum_square = (
            self.sum_square - 2 * shift * self.sum_target + shift**2 * self.sum_weight
        ) / scale**2
        return other

    def _move(self, device: torch.device) -> None:
        for name in ("gram", "moment", "feature_sum"):
            setattr(self, name, getattr(self, name).to(device))

    def _add_chunk(self, X: Tensor, y: Tensor, weight: Tensor) -> None:
        basis = self.basis
        Phi = X.new_empty(X.shape[0], basis.n_features)
        for block in range(basis.n_blocks):
            Phi[:, basis.block_slice(block)] = basis.features(X, block)
        Phi *= weight.sqrt().to(X)[:, None]
        moments = Phi.mT @ torch.stack([weight.sqrt() * y, weight.sqrt()], dim=1).to(X)
        self.moment += moments[:, 0]
        self.feature_sum += moments[:, 1]
        add_gram(self.gram, Phi)

    def _mirror(self) -> None:
        """Copy the tiles below the diagonal of A to above it."""
        for start in range(GRAM_TILE, self.basis.n_features, GRAM_TILE):
            rows = slice(start, start + GRAM_TILE)
            self.gram[:start, rows] = self.gram[rows, :start].mT
