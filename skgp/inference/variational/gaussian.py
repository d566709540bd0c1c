r"""Gaussian over the weights of basis functions, its covariance factor sparse in a chevron pattern.

The variational posterior of Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020),
section 2.2: :math:`f(x) = \phi(x)^T w` with prior :math:`w \sim N(0, S^{-1})` and

.. math:: q(w) = N(w \mid \mu, \Sigma), \qquad \Sigma = C C^T, \qquad
          C = \begin{pmatrix} C_{HH} & 0 \\ C_{TH} & \operatorname{diag}(c_T) \end{pmatrix}.

The first k columns (the head H) have a dense lower triangle, the others (the tail T) only their
diagonal entry: k = 0 is the mean-field ("diagonal") structure, 0 < k < m the "chevron", k = m the
"full" one, so that one class serves all three.

=============== ======================= ===========================================
paper           code                    meaning
=============== ======================= ===========================================
m               ``n_features``          basis functions
k ("QSGP-k")    ``n_dense``             dense columns of C
mu              ``mean (m,)``
c_1 ... c_k     ``columns (m, k)``      rows above the diagonal are 0
c_rr, r > k     ``tail_std (m - k,)``
Phi             ``Phi (n, m)``          basis functions at n inputs
S               ``prior_precision``     ``(m,)`` diagonal, ``(m, m)`` or None (identity)
=============== ======================= ===========================================
"""

import torch
from torch import Tensor

from skgp.linalg.tensor_state import TensorState

__all__ = ["PredictionAccumulator", "WeightGaussian"]


class WeightGaussian(TensorState):
    r"""The Gaussian :math:`q(w) = N(\mu, C C^T)` with a chevron factor C.

    Parameters
    ----------
    mean : Tensor of shape (m,)
        :math:`\mu`.
    columns : Tensor of shape (m, k)
        Dense columns of C, ``0 <= k <= m``: lower triangular with a positive diagonal.
    tail_std : Tensor of shape (m - k,)
        Diagonal of C in the other columns, positive.

    Raises
    ------
    ValueError
        If the shapes do not fit together, an entry of `columns` above the diagonal is not 0, or a
        diagonal entry is not positive.

    Notes
    -----
    Stores O(m k) numbers. The tensors are kept, not copied, and every result is differentiable in
    them, hence they may be a trainer's parameters.

    Examples
    --------
    >>> import torch
    >>> q = WeightGaussian.diagonal(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]))
    >>> q.variance(torch.ones(1, 3))
    tensor([14.])
    """

    def __init__(self, mean: Tensor, columns: Tensor, tail_std: Tensor) -> None:
        _check_factor(mean, columns, tail_std)
        self.mean = mean
        self.columns = columns
        self.tail_std = tail_std

    @classmethod
    def diagonal(cls, mean: Tensor, std: Tensor) -> "WeightGaussian":
        """Independent weights with standard deviations `std` (m,)."""
        return cls(mean, mean.new_zeros(len(mean), 0), std)

    @classmethod
    def full(cls, mean: Tensor, factor: Tensor) -> "WeightGaussian":
        """Dense lower Cholesky factor (m, m) of the covariance."""
        return cls(mean, factor, mean.new_zeros(0))

    @property
    def n_features(self) -> int:
        """Number of weights m."""
        return len(self.mean)

    @property
    def n_dense(self) -> int:
        """Number of dense columns k."""
        return self.columns.shape[1]

    @property
    def factor_diagonal(self) -> Tensor:
        """Diagonal (m,) of C."""
        return torch.cat([self.columns.diagonal(), self.tail_std])

    def factor(self) -> Tensor:
        """C as a dense matrix (m, m), for small m."""
        tail = torch.nn.functional.pad(self.tail_std.diag(), (0, 0, self.n_dense, 0))
        return torch.cat([self.columns, tail], dim=1)

    def log_det(self) -> Tensor:
        r"""Log-determinant :math:`\log|\Sigma| = 2 \sum_r \log c_{rr}`, a scalar in nats; O(m)."""
        return 2 * self.factor_diagonal.log().sum()

    def accumulator(self, n_rows: int, *, full_cov: bool = False) -> "PredictionAccumulator":
        """Predictions for `n_rows` inputs whose features will come block by block."""
        return PredictionAccumulator(self, n_rows, full_cov=full_cov)

    def variance(self, Phi: Tensor) -> Tensor:
        r"""Variances of :math:`\Phi w`, that is row sums of :math:`(\Phi C)^2`.

        Parameters
        ----------
        Phi : Tensor of shape (n, m)
            Basis functions at n inputs.

        Returns
        -------
        Tensor of shape (n,)
            :math:`O(n m (k + 1))`.
        """
        return self._predict(Phi, full_cov=False).variance()

    def covariance(self, Phi: Tensor) -> Tensor:
        r"""Covariance :math:`\Phi \Sigma \Phi^T` of shape (n, n), in :math:`O(n m (n + k))`."""
        return self._predict(Phi, full_cov=True).covariance()

    def sample(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        r"""Independent draws :math:`\mu + C \varepsilon` of the weights.

        Parameters
        ----------
        n_samples : int
            Number of draws.
        generator : torch.Generator, optional
            Source of randomness, on the device of the mean.

        Returns
        -------
        Tensor of shape (n_samples, m)
            :math:`O(n\_samples\, m (k + 1))`.
        """
        epsilon = torch.randn(
            n_samples,
            self.n_features,
            generator=generator,
            dtype=self.mean.dtype,
            device=self.mean.device,
        )
        head, tail = epsilon[:, : self.n_dense], epsilon[:, self.n_dense :]
        tail = torch.nn.functional.pad(tail * self.tail_std, (self.n_dense, 0))
        return self.mean + head @ self.columns.T + tail

    def _predict(self, Phi: Tensor, *, full_cov: bool) -> "PredictionAccumulator":
        accumulator = self.accumulator(len(Phi), full_cov=full_cov)
        accumulator.add(Phi, slice(0, self.n_features))
        return accumulator


class PredictionAccumulator:
    r"""Moments of :math:`f = \Phi w` under q(w), from blocks of columns of :math:`\Phi`.

    With B running over the blocks it keeps

    .. math:: \sum_B \Phi_B \mu_B, \qquad \sum_B \Phi_B C_{B H}, \qquad
              \sum_{r \in T} \phi_r^2 c_{rr}^2,

    O(n k) numbers, so that no n x m matrix is ever held.

    Parameters
    ----------
    q : WeightGaussian
        Distribution of the weights.
    n_rows : int
        Number of inputs n.
    full_cov : bool, default=False
        Keep what `covariance` needs, :math:`O(n^2)` numbers, in place of `variance` alone.
    """

    def __init__(self, q: WeightGaussian, n_rows: int, *, full_cov: bool = False) -> None:
        self._q = q
        self._seen = 0
        self._full_cov = full_cov
        self._mean = q.mean.new_zeros(n_rows)
        self._head = q.mean.new_zeros(n_rows, q.n_dense)
        self._tail = q.mean.new_zeros((n_rows, n_rows) if full_cov else n_rows)

    def add(self, Phi_block: Tensor, block: slice) -> None:
        """Add the basis functions `block`; each must come once, in any order.

        Parameters
        ----------
        Phi_block : Tensor of shape (n, b)
            Their values; converted to the dtype of q (float32 features are welcome).
        block : slice
            Their position in 0..m, of length b and step 1.

        Raises
        ------
        ValueError
            If `Phi_block` does not have n rows and as many columns as `block` has indices.
        """
        start, stop, _ = block.indices(self._q.n_features)
        if Phi_block.shape != (len(self._mean), stop - start):
            raise ValueError(
                f"Phi_block must have shape ({len(self._mean)}, {stop - start}) for the features "
                f"{start}:{stop}; got {tuple(Phi_block.shape)}."
            )
        k = self._q.n_dense
        Phi_block = Phi_block.to(self._mean.dtype)
        self._mean = self._mean + Phi_block @ self._q.mean[start:stop]
        self._head = self._head + Phi_block @ self._q.columns[start:stop]
        first = max(start, k)  # the block may straddle the head and the tail
        if first < stop:
            scaled = Phi_block[:, first - start :] * self._q.tail_std[first - k : stop - k]
            square = scaled @ scaled.T if self._full_cov else scaled.square().sum(1)
            self._tail = self._tail + square
        self._seen += stop - start

    def mean(self) -> Tensor:
        """Means (n,) of f."""
        self._check_complete()
        return self._mean

    def variance(self) -> Tensor:
        """Variances (n,) of f."""
        self._check_complete()
        tail = self._tail.diagonal() if self._full_cov else self._tail
        return self._head.square().sum(1) + tail

    def covariance(self) -> Tensor:
        """Covariance (n, n) of f; needs ``full_cov=True``."""
        self._check_complete()
        if not self._full_cov:
            raise ValueError("covariance() needs an accumulator made with full_cov=True.")
        return self._head @ self._head.T + self._tail

    def _check_complete(self) -> None:
        if self._seen != self._q.n_features:
            raise ValueError(
                f"{self._seen} features were added but q has {self._q.n_features} weights; "
                "add every block exactly once before reading a result."
            )


def _check_factor(mean: Tensor, columns: Tensor, tail_std: Tensor) -> None:
    m, k = len(mean), columns.shape[-1]
    if mean.ndim != 1 or columns.shape != (m, k) or k > m or tail_std.shape != (m - k,):
        raise ValueError(
            "mean, columns and tail_std must have shapes (m,), (m, k) and (m - k,), k <= m; got "
            f"{tuple(mean.shape)}, {tuple(columns.shape)} and {tuple(tail_std.shape)}."
        )
    if (columns[:k].triu(1) != 0).any():
        raise ValueError(
            "columns must be lower triangular, but an entry above the diagonal is not 0; "
            "apply tril() first."
        )
    # Written as a negation so that NaN is refused as well.
    if not ((columns.diagonal() > 0).all() and (tail_std > 0).all()):
        raise ValueError(
            "The diagonal of the covariance factor (of columns, and tail_std) must be positive; "
            "parameterise it by its logarithm when it is trained."
        )
