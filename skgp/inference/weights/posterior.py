r"""Gaussian posteriors over the weights of basis functions, and what they say of the functions.

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
=============== ======================= ===========================================

Predictions take any root R of few columns in place of the head, that of pathwise samples, too:
:math:`q(w) = N(\mu, R R^T + \operatorname{diag}(0, c_T^2))`. Features are regenerated block by
block in float64, so a prediction does not depend on the rows predicted together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from skgp.inference.defaults import PRODUCT_BYTES
from skgp.inference.weights.bases import Basis, WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign, block_width, row_chunks
from skgp.linalg.runtime import TensorState, standard_normal


class WeightGaussian(TensorState):
    r"""The Gaussian :math:`q(w) = N(\mu, C C^T)` with a chevron factor C.

    `mean` is :math:`\mu` (m,), or (m, t) of t targets that share C; `columns` (m, k) are the dense
    columns of C, lower triangular with a positive diagonal; `tail_std` (m - k,), positive, is the
    diagonal of C in the others.

    O(m k) numbers. The tensors are kept, not copied; a ValueError refuses a diagonal that is not
    positive.

    Examples
    --------
    >>> import torch
    >>> q = WeightGaussian.diagonal(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0]))
    >>> q.variance(torch.ones(1, 3))
    tensor([14.])
    """

    def __init__(self, mean: Tensor, columns: Tensor, tail_std: Tensor) -> None:
        # Written as a negation so that NaN is refused as well.
        if not ((columns.diagonal() > 0).all() and (tail_std > 0).all()):
            raise ValueError(
                "The diagonal of the covariance factor (of columns, and tail_std) must be "
                "positive; parameterise it by its logarithm when it is trained."
            )
        self.mean, self.columns, self.tail_std = mean, columns, tail_std

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

    def factor(self) -> Tensor:
        """C as a dense matrix (m, m), for small m."""
        C = self.columns.new_zeros(self.n_features, self.n_features)
        C.diagonal()[self.n_dense :] = self.tail_std
        C[:, : self.n_dense] = self.columns
        return C

    def log_det(self) -> Tensor:
        r"""Log-determinant :math:`\log|\Sigma| = 2 \sum_r \log c_{rr}`, a scalar in nats; O(m)."""
        return 2 * (self.columns.diagonal().log().sum() + self.tail_std.log().sum())

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


class LinearWeightsPosterior(TensorState):
    r"""Gaussian over the weights of a basis, and its predictions of the noise-free f.

    `mean` (m,), or (m, t) of t targets that share all else, is :math:`\mu`, `root` (m, r) is R, and
    `tail_std` are :math:`c_T`, the standard deviations of the last weights, independent of R.
    ``O(n m (r + t))`` a prediction and its features. State: ``m (r + t)`` numbers, those of
    `tail_std` and the basis; a pickle holds NumPy arrays.
    """

    def __init__(self, basis: Basis, mean: Tensor, root: Tensor, tail_std: Tensor):
        self.basis = basis
        self.mean_weights, self.root = mean.double(), root.double()
        self.tail_std = tail_std.double()

    @classmethod
    def from_gaussian(cls, basis: Basis, q: WeightGaussian) -> "LinearWeightsPosterior":
        """Wrap a diagonal, chevron or full Gaussian."""
        return cls(basis, q.mean, q.columns, q.tail_std)

    @classmethod
    def from_deviations(
        cls, basis: Basis, mean: Tensor, deviations: Tensor
    ) -> "LinearWeightsPosterior":
        r"""Take the covariance from draws: :math:`\frac1S \sum_s (w_s - \mu) (w_s - \mu)^T`.

        `deviations` (m, S) are :math:`w_s - \mu`. The divisor is S, not S - 1: the draws scatter
        around the posterior mean, which is solved for and not estimated from them.
        """
        root = deviations / max(1, deviations.shape[1]) ** 0.5
        return cls(basis, mean, root, mean.new_zeros(0))

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f, shape (n,) or (n, t), float64."""
        design = StreamedDesign(self.basis, X, keep=False)
        return self._by_target(design.matmul(self._columns.to(X.device)))

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) or (n, t) and variance (n,) of f, noise not included."""
        columns = self._columns, self.root[None], self.tail_std[:, None]
        mean, variance = _moments(self.basis, X, *columns)
        return self._by_target(mean), variance[:, 0]

    @property
    def _columns(self) -> Tensor:
        """Mean weights (m, t)."""
        return self.mean_weights if self.mean_weights.ndim > 1 else self.mean_weights[:, None]

    def _by_target(self, mean: Tensor) -> Tensor:
        """Means (n, t), as (n,) where there is one target."""
        return mean if self.mean_weights.ndim > 1 else mean[:, 0]

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance of f between all rows, shape (n, n), float64."""
        design = StreamedDesign(self.basis, X, keep=False)
        half = torch.zeros(len(X), self.root.shape[1], dtype=torch.float64, device=X.device)
        covariance = half @ half.mT
        for block in design.blocks:
            Phi = design.features(block)
            half += Phi @ self.root[self.basis.block_slice(block)].to(X.device)  # (n, r)
            place, std = _tail_of(self.basis, block, self.tail_std)
            scaled = Phi[:, place] * std.to(X.device)
            covariance += scaled @ scaled.mT
        return covariance + half @ half.mT

    def sample_deviations(self, n_samples: int, generator: torch.Generator) -> Tensor:
        """Draws of the weights less their mean, shape (m, n_samples), on the generator's device.

        They have exactly the covariance of this object, of rank S when it came from S draws.
        """
        device, tail = generator.device, len(self.tail_std)
        weights = self.root.to(device) @ standard_normal((self.root.shape[1], n_samples), generator)
        if tail:
            std = self.tail_std.to(device)[:, None]
            weights[-tail:] += std * standard_normal((len(weights), n_samples), generator)[-tail:]
        return weights


class ClassifierPosterior(TensorState):
    r"""Independent Gaussian posteriors of c latent functions that share their features.

    .. math:: f_j(x) = o_j + \phi(x)^T w_j, \qquad w_j \sim N(\mu_j, C_j C_j^T).

    The factors :math:`C_j` are those of c `covariance` Gaussians of the same number k of dense
    columns, whose means are not used. Without them the weights are known exactly, and every
    variance is 0.

    State, and pickle: the basis, ``8 m c`` bytes of weights, ``8 (m - k) c`` of standard deviations
    and ``4 m k c`` of dense columns, which are rounded to float32 (a relative error of 1e-7 in a
    variance). With m = 4096 and ten columns: .7 MB diagonal, 17 MB chevron of 100 columns, 670 MB
    full. ``O(p m c (k + 1))`` for p rows, in float64.
    """

    def __init__(
        self,
        basis: Basis,
        weights: Tensor,  # (m, c); mu_j
        offset: Tensor,  # (c,); o_j
        covariance: Sequence[WeightGaussian] | None = None,
    ):
        m, c = basis.n_features, offset.shape[0]
        self.basis, self.weights, self.offset = basis, weights.double(), offset.double()
        self.tail_std = self.weights.new_zeros(0, c)  # (m - k, c)
        self.columns = torch.zeros(c, m, 0, device=weights.device)  # (c, m, k)
        if covariance is not None:
            self.tail_std = torch.stack([q.tail_std.double() for q in covariance], dim=1)
            self.columns = torch.stack([q.columns.float() for q in covariance])

    def mean(self, X: Tensor) -> Tensor:
        """Posterior means of the latent functions, shape (p, c), float64."""
        design = StreamedDesign(self.basis, X, keep=False)
        return design.matmul(self.weights.to(X.device)) + self.offset.to(X.device)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments of the latent functions, each of shape (p, c), float64."""
        mean, variance = _moments(self.basis, X, self.weights, self.columns, self.tail_std)
        return mean + self.offset.to(X.device), variance


@dataclass
class AugmentedPosterior(TensorState):
    r"""Inducing points with basis functions added at the test points (appendix G).

    With a full covariance, and in whitened coordinates with any other, the part of the new
    functions that the basis does not explain adds its prior law :math:`a (K_{**} - Q_{**})`,
    :math:`Q_{**} = \Phi_* \Phi_*^T`: the predictive covariance of Titsias (2009), and with one
    inducing point a row that of Rasmussen and Williams (2006), eq. (3.24). a is the `amplitude` of
    the prior of the weights, over a :class:`.bases.WhitenedInducingBasis`.
    """

    weights: Any  # LinearWeightsPosterior or ClassifierPosterior
    amplitude: float = 1.0

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f, shape (p,) or (p, c)."""
        return self.weights.mean(X)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of f, each (p,) or (p, c); of targets that share it (p,)."""
        mean, variance = self.weights.mean_and_variance(X)
        unexplained = self.amplitude * self._basis.unexplained(X)
        return mean, variance + unexplained.view(-1, *[1] * (variance.ndim - 1))

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance of a single f, shape (p, p)."""
        left = self._basis.unexplained_covariance(X)
        return self.weights.covariance(X) + self.amplitude * left

    @property
    def _basis(self) -> WhitenedInducingBasis:
        return cast(WhitenedInducingBasis, self.weights.basis)


def _moments(
    basis: Basis, X: Tensor, weights: Tensor, roots: Tensor, tail_std: Tensor
) -> tuple[Tensor, Tensor]:
    """Means and variances (p, c) under weights (m, c), roots (c, m, r) and tails (t, c).

    Weights of more columns have means of these, whose variances are not theirs alone.
    """
    c, _, r = roots.shape
    weights, tail_std = weights.to(X.device), tail_std.to(X.device)
    mean, variance = (
        torch.zeros(len(X), columns, dtype=torch.float64, device=X.device)
        for columns in (weights.shape[1], c)
    )
    blocks = range(basis.n_blocks)  # none where no relevance vector is left
    width = max((block_width(basis, block) for block in blocks), default=0)
    row_bytes = 8 * (2 * width + c * (r + 2))
    for rows in row_chunks(len(X), row_bytes, PRODUCT_BYTES):
        tile = X[rows].double()
        dense = mean.new_zeros(c, len(tile), r)  # Phi R
        for block in blocks:
            part, F = basis.block_slice(block), basis.features(tile, block)  # (rows, width)
            mean[rows] += F @ weights[part]
            for j in range(c if r else 0):
                dense[j] += F @ roots[j, part].to(F)
            place, std = _tail_of(basis, block, tail_std)
            variance[rows] += F[:, place].square() @ std.square()
        variance[rows] += dense.square().sum(2).mT
    return mean, variance


def _tail_of(basis: Basis, block: int, tail_std: Tensor) -> tuple[slice, Tensor]:
    """Which columns of a block belong to the tail, and their standard deviations."""
    columns = basis.block_slice(block)
    head = basis.n_features - len(tail_std)
    first = min(max(columns.start, head), columns.stop)  # a block may straddle head and tail
    std = tail_std[max(first - head, 0) : max(columns.stop - head, 0)]
    return slice(first - columns.start, None), std
