r"""Gaussian q(w) over the weights of basis functions, and the best one in closed form.

Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), sections 2.1 and 2.2:
:math:`f(x) = \phi(x)^T w` with prior :math:`w \sim N(0, S^{-1})` and

.. math:: q(w) = N(w \mid \mu, \Sigma), \qquad \Sigma = C C^T, \qquad
          C = \begin{pmatrix} C_{HH} & 0 \\ C_{TH} & \operatorname{diag}(c_T) \end{pmatrix}.

The first k columns (the head H) have a dense lower triangle, the others (the tail T) only their
diagonal entry: k = 0 is the mean-field ("diagonal") structure, 0 < k < m the "chevron" ("QSGP-k"),
k = m the "full" one, so that one class serves all three.

=============== ======================= ===========================================
paper           code                    meaning
=============== ======================= ===========================================
m               ``n_features``          basis functions
k               ``n_dense``             dense columns of C
mu              ``mean (m,)``
c_1 ... c_k     ``columns (m, k)``      rows above the diagonal are 0
c_rr, r > k     ``tail_std (m - k,)``
Phi             ``Phi (n, m)``          basis functions at n inputs
S               ``prior_precision``     ``(m,)`` diagonal, or ``(m, m)``
=============== ======================= ===========================================
"""

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from skgp.linalg.cholesky import reverse_cholesky
from skgp.linalg.runtime import TensorState


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
    Stores O(m k) numbers. The tensors are kept, not copied.

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

    def variance(self, Phi: Tensor) -> Tensor:
        r"""Variances (n,) of :math:`\Phi w`, row sums of :math:`(\Phi C)^2`; O(n m (k + 1))."""
        head, tail = self._projections(Phi)
        return head.square().sum(1) + tail.square().sum(1)

    def covariance(self, Phi: Tensor) -> Tensor:
        r"""Covariance :math:`\Phi \Sigma \Phi^T` of shape (n, n), in :math:`O(n m (n + k))`."""
        head, tail = self._projections(Phi)
        return head @ head.T + tail @ tail.T

    def _projections(self, Phi: Tensor) -> tuple[Tensor, Tensor]:
        """Return Phi C by its dense (n, k) and its diagonal columns (n, m - k)."""
        return Phi @ self.columns, Phi[:, self.n_dense :] * self.tail_std


def optimal_gaussian(
    gram: Tensor,
    projection: Tensor,
    noise_variance: float | Tensor,
    prior_precision: Tensor,
    *,
    n_dense: int,
) -> tuple[WeightGaussian, float]:
    r"""Maximiser of the ELBO of eq. (2) among the q with `n_dense` dense columns.

    With the precision of the exact posterior, :math:`G = \Phi^T \Phi / \sigma^2 + S`,

    .. math:: \mu = G^{-1} \Phi^T y / \sigma^2, \qquad
              \mathcal{L}_\Sigma(C) = \operatorname{tr}(C^T G C) - 2 \sum_r \log c_{rr}.

    The objective of C is a sum over its columns, so column r of any structure is the minimiser over
    its own free entries. A dense column has :math:`c \propto G_{r:,r:}^{-1} e_1`: it is column r of
    the full optimum, for which :math:`C C^T = G^{-1}`. A diagonal one follows from Proposition 1.
    With :math:`G = U U^T`, U upper triangular, the full optimum is :math:`U^{-T}`.

    Parameters
    ----------
    gram : Tensor of shape (m, m)
        :math:`\Phi^T \Phi`; not changed.
    projection : Tensor of shape (m,)
        :math:`\Phi^T y`.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m)
        S.
    n_dense : int
        0 for the diagonal structure, m for the full one, chevron between them.

    Returns
    -------
    q : WeightGaussian
    jitter : float
        What had to be added to the diagonal of G; 0.0 almost always.

    Raises
    ------
    ValueError
        If `n_dense` is not in 0..m.
    NotPositiveDefiniteError
        If G cannot be factored, with jitter either.

    Notes
    -----
    :math:`O(m^3 / 3 + m^2 k)`, three matrices of size m x m in memory.
    """
    m = len(gram)
    if not 0 <= n_dense <= m:
        raise ValueError(
            f"n_dense must lie between 0 (diagonal) and the number of features {m} (full); "
            f"got {n_dense}."
        )
    G = gram / noise_variance  # (m, m)
    if prior_precision.ndim == 2:
        G = G + prior_precision
    else:
        G = G.diagonal_scatter(G.diagonal() + prior_precision)
    U, jitter = reverse_cholesky(G)
    half = solve_triangular(U, projection[:, None] / noise_variance, upper=True)  # (m, 1)
    mean = solve_triangular(U.T, half, upper=False)[:, 0]
    units = torch.eye(m, n_dense, dtype=G.dtype, device=G.device)
    columns = solve_triangular(U.T, units, upper=False)  # (m, k)
    return WeightGaussian(mean, columns, optimal_std(G.diagonal()[n_dense:])), jitter


def optimal_std(precision_diagonal: Tensor) -> Tensor:
    r"""Best diagonal entries of C in columns without other entries (Proposition 1).

    .. math:: c_{rr} = G_{rr}^{-1/2} = \sqrt{\sigma^2 / (\phi_r^T \phi_r + \sigma^2 s_{rr})}

    of the entries :math:`G_{rr} = \phi_r^T \phi_r / \sigma^2 + s_{rr}`, shape (t,).
    """
    return precision_diagonal.rsqrt()


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
