r"""Posterior of the weights, and what it says about the function.

.. math:: q(w) = N\big(\mu,\; R R^T + \operatorname{diag}(0, c_T^2)\big), \qquad
          f(x) = \phi(x)^T w,

with a root R of few columns serves every covariance of the paper: none but the tail c_T is
"diagonal", k dense columns and a tail "chevron", a square R "full"; and pathwise samples, R holding
their deviations from the mean. Features are regenerated block by block in float64, so a prediction
does not depend on the rows predicted together.
"""

import torch
from torch import Tensor

from skgp.inference.weights.design import Basis, StreamedDesign, row_chunks
from skgp.inference.weights.gaussian import WeightGaussian, optimal_gaussian
from skgp.inference.weights.streaming_gram import StreamingGram
from skgp.linalg.tensor_state import TensorState

_PRODUCT_BYTES = 2**27  # of Phi R held at once when variances are predicted


class LinearWeightsPosterior(TensorState):
    r"""Gaussian over the weights of a basis, and its predictions of the noise-free f.

    Parameters
    ----------
    basis : Basis
    mean : Tensor of shape (m,)
        :math:`\mu`.
    root : Tensor of shape (m, r)
        R.
    tail_std : Tensor of shape (t,)
        :math:`c_T`, the standard deviations of the last t weights that are independent of R.
    noise_variance : float
        :math:`\sigma^2` of an observation of weight 1, kept for the caller; no prediction here
        includes it.

    Notes
    -----
    ``O(n m (r + 1))`` a prediction and its features. State: ``m (r + 1) + t`` numbers and the
    basis; a pickle holds NumPy arrays.
    """

    def __init__(
        self,
        basis: Basis,
        mean: Tensor,
        root: Tensor,
        tail_std: Tensor,
        *,
        noise_variance: float,
    ):
        m = basis.n_features
        if mean.shape != (m,) or root.ndim != 2 or root.shape[0] != m or len(tail_std) > m:
            raise ValueError(
                f"mean, root and tail_std must have shapes ({m},), ({m}, r) and (t,), t <= {m}; "
                f"got {tuple(mean.shape)}, {tuple(root.shape)} and {tuple(tail_std.shape)}."
            )
        self.basis = basis
        self.mean_weights = mean.double()
        self.root = root.double()
        self.tail_std = tail_std.double()
        self.noise_variance = float(noise_variance)

    @classmethod
    def from_gaussian(
        cls, basis: Basis, q: WeightGaussian, noise_variance: float
    ) -> "LinearWeightsPosterior":
        """Wrap a diagonal, chevron or full Gaussian."""
        return cls(basis, q.mean, q.columns, q.tail_std, noise_variance=noise_variance)

    @classmethod
    def from_deviations(
        cls, basis: Basis, mean: Tensor, deviations: Tensor, noise_variance: float
    ) -> "LinearWeightsPosterior":
        r"""Take the covariance from draws: :math:`\frac1S \sum_s (w_s - \mu) (w_s - \mu)^T`.

        The divisor is S, not S - 1: the draws scatter around the posterior mean, which is solved
        for and not estimated from them, so that S makes the variances unbiased.

        Parameters
        ----------
        mean : Tensor of shape (m,)
        deviations : Tensor of shape (m, S)
            ``w_s - mean``.
        """
        root = deviations / deviations.shape[1] ** 0.5
        return cls(basis, mean, root, mean.new_zeros(0), noise_variance=noise_variance)

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f, shape (n,), float64."""
        return self._design(X).matmul(self.mean_weights[:, None].to(X.device))[:, 0]

    def variance(self, X: Tensor) -> Tensor:
        """Posterior variance of f, shape (n,), float64; noise not included."""
        return self.mean_and_variance(X)[1]

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments of f, each of shape (n,), from features generated once."""
        products = torch.cat([self.mean_weights[:, None], self.root], dim=1).to(X.device)
        mean = torch.empty(X.shape[0], dtype=torch.float64, device=X.device)
        variance = torch.empty_like(mean)
        row_bytes = products.shape[1] * products.itemsize
        for rows in row_chunks(X.shape[0], row_bytes, _PRODUCT_BYTES, X.shape[0]):
            out, tail = self._moments(self._design(X[rows]), products)
            mean[rows] = out[:, 0]
            variance[rows] = out[:, 1:].square().sum(1) + tail
        return mean, variance

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance of f between all rows, shape (n, n), float64."""
        design = self._design(X)
        half = design.matmul(self.root.to(X.device))
        covariance = half @ half.mT
        for block in range(self.basis.n_blocks):
            F, std = self._tail_of(design.features(block), block)
            covariance += (F * std) @ (F * std).mT
        return covariance

    def sample_weights(self, n_samples: int, generator: torch.Generator) -> Tensor:
        """Independent draws of the weights, shape (m, n_samples), on the generator's device.

        They have exactly the covariance of this object, of rank S when it came from S pathwise
        draws.
        """
        device = generator.device
        tail = torch.zeros(self.basis.n_features, dtype=torch.float64, device=device)
        tail[len(tail) - len(self.tail_std) :] = self.tail_std.to(device)
        weights = self.mean_weights.to(device)[:, None] + self.root.to(device) @ standard_normal(
            self.root.shape[1], n_samples, generator
        )
        if len(self.tail_std):
            weights += tail[:, None] * standard_normal(len(tail), n_samples, generator)
        return weights

    def sample(self, X: Tensor, n_samples: int, generator: torch.Generator) -> Tensor:
        """Joint draws of f at all rows, shape (n, n_samples), float64."""
        weights = self.sample_weights(n_samples, generator)
        return self._design(X).matmul(weights.to(X.device))

    def _design(self, X: Tensor) -> StreamedDesign:
        return StreamedDesign(self.basis, X, dtype=torch.float64, memory_budget=0)

    def _moments(self, design: StreamedDesign, products: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``Phi [mu, R]`` and the variance of the independent tail."""
        out = products.new_zeros(design.n_rows, products.shape[1])
        variance = products.new_zeros(design.n_rows)
        for block in range(self.basis.n_blocks):
            columns = self.basis.block_slice(block)
            for rows in design.tiles(columns.stop - columns.start):
                F = design.features(block, rows)
                out[rows] += F @ products[columns]
                tail, std = self._tail_of(F, block)
                variance[rows] += tail.square() @ std.square()
        return out, variance

    def _tail_of(self, F: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """Return the columns of a block that belong to the tail and their standard deviations."""
        columns = self.basis.block_slice(block)
        head = self.basis.n_features - len(self.tail_std)
        first = min(max(columns.start, head), columns.stop)  # a block may straddle head and tail
        std = self.tail_std[max(first - head, 0) : max(columns.stop - head, 0)]
        return F[:, first - columns.start :], std.to(F.device)


def gram_posterior(
    statistics: StreamingGram,
    noise_variance: float,
    prior_variance: float = 1.0,
    *,
    n_dense_columns: int | None = None,
) -> LinearWeightsPosterior:
    r"""Best Gaussian posterior of a covariance structure, out of the Gram matrix.

    Parameters
    ----------
    statistics : StreamingGram
    noise_variance, prior_variance : float
        :math:`\sigma^2` and a in :math:`w \sim N(0, a I)`.
    n_dense_columns : int, optional
        Dense columns of the covariance's Cholesky factor: 0 "diagonal", m "full", "chevron" in
        between. None is "full", the exact posterior.

    Raises
    ------
    ValueError
        If a variance is not positive or `n_dense_columns` is not in 0..m.

    Notes
    -----
    ``O(m^3)``, about five m x m matrices at its peak.
    """
    for name, value in (("noise_variance", noise_variance), ("prior_variance", prior_variance)):
        if not value > 0:
            raise ValueError(f"{name} must be positive; got {value!r}.")
    m = statistics.basis.n_features
    q, _ = optimal_gaussian(
        statistics.gram,
        statistics.moment,
        noise_variance,
        torch.full_like(statistics.moment, 1 / prior_variance),
        n_dense=m if n_dense_columns is None else n_dense_columns,
    )
    return LinearWeightsPosterior.from_gaussian(statistics.basis, q, noise_variance)


def standard_normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a (rows, columns) float64 matrix on the generator's device."""
    return torch.randn(
        rows, columns, generator=generator, dtype=torch.float64, device=generator.device
    )
