r"""A short series at once: the sweep through its times replaced by one Cholesky factor, O(m^3).

With K the prior covariance of f and :math:`\Omega = \mathrm{diag}(\omega)`, :math:`\omega \ge 0`,

.. math::
    B = I + \Omega^{1/2} K \Omega^{1/2}, \quad S = \Omega^{1/2} B^{-1} \Omega^{1/2}, \quad
    V = K - K S K, \quad m = V \beta, \quad \frac{\partial \log Z}{\partial K}
    = \tfrac12 \left(\alpha \alpha^\top - S\right), \quad \alpha = \beta - \Omega m.

Up to two hundred times this takes some forty calls of NumPy, where a sweep takes 1000 of torch
however short the series. It keeps fewer digits where the weights are
large (see `DensePrior.suits`).
"""

from functools import lru_cache

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from skgp.inference.markov.defaults import MAX_RATIO, MAX_TIMES
from skgp.kernels.sde_dynamics import Dynamics
from skgp.linalg import NotPositiveDefiniteError

__all__ = ["DensePosterior", "DensePrior"]


class DensePrior:
    """The covariance of a short series (m,), made once for whatever sites it is given."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor) -> None:
        m = len(gaps)
        times = np.cumsum(np.append(0.0, gaps.numpy()[1:]))
        self.pairs = _pairs(m)
        row, column = self.pairs
        k, self.slopes = dynamics.covariance(times[row] - times[column])  # (p,), (q, p)
        self.K = np.empty((m, m))
        self.K[row, column] = self.K[column, row] = k

    @classmethod
    def of(cls, dynamics: Dynamics, gaps: Tensor) -> "DensePrior | None":
        """That of a series (m,), if it is short, in main memory, and of one piece."""
        short = len(gaps) <= MAX_TIMES and gaps.device.type == "cpu"
        return cls(dynamics, gaps) if short and bool(gaps[1:].isfinite().all()) else None

    def suits(self, weight: Tensor) -> bool:
        """Whether weights (m,) are neither negative nor large."""
        low, high = weight.aminmax()
        return float(low) >= 0 and float(high) * self.K[0, 0] <= MAX_RATIO

    def contract(self, bar: np.ndarray) -> Tensor:
        """``<bar, dK/dp> / 2``, (q,), of a symmetric matrix (m, m): its lower half is read."""
        lower = bar[self.pairs]
        lower[self.pairs[0] == self.pairs[1]] *= 0.5  # the others stand for both triangles
        return torch.from_numpy(self.slopes @ lower)


class DensePosterior:
    """Log normaliser of sites (m,), its slopes, and the marginals of f; see `smoother.Evidence`.

    `centre` (m,) is that of `smoother.evidence`.
    """

    def __init__(
        self, prior: DensePrior, beta: Tensor, weight: Tensor, centre: Tensor | None
    ) -> None:
        K, b, w = prior.K, beta.numpy(), weight.numpy()
        root = np.sqrt(w)
        scaled = root[:, None] * K  # (m, m)
        B = scaled * root
        B.flat[:: len(w) + 1] += 1.0
        L, failed = lapack.dpotrf(B, lower=True)
        if failed:
            raise NotPositiveDefiniteError(
                "The covariance of a series is not finite or indefinite."
            )
        half, _ = lapack.dtrtrs(L, scaled, lower=True)
        var = np.maximum(K.diagonal() - np.einsum("ij,ij->j", half, half), 0.0)
        if centre is None:
            mean = K @ b - half.T @ (half @ b)
            value = 0.5 * b @ mean
        else:
            # Of sites divided by their values at c, with b = w c + b':
            # -c'S c / 2 - b''(c - K S c) + b''V b' / 2.
            c = centre.numpy()
            rest = b - w * c
            weighed = root * lapack.dpotrs(L, root * c, lower=True)[0]
            from_centre, from_rest = K @ weighed, K @ rest - half.T @ (half @ rest)
            mean = from_centre + from_rest
            value = -0.5 * c @ weighed - rest @ (c - from_centre) + 0.5 * rest @ from_rest
        self._prior, self._root, self._L, self._alpha = prior, root, L, b - w * mean
        self.log_normalizer = float(value - np.log(L.diagonal()).sum())
        self.mean, self.var = torch.from_numpy(mean), torch.from_numpy(var)

    @property
    def parameter_gradient(self) -> Tensor:
        """Derivative of the log normaliser in the parameters of the dynamics, (q,)."""
        inverse, _ = lapack.dpotri(self._L, lower=True)
        root, alpha = self._root, self._alpha
        return self._prior.contract(alpha[:, None] * alpha - root[:, None] * inverse * root)


@lru_cache(maxsize=16)
def _pairs(m: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each pair of m times, (m (m + 1) / 2,)."""
    return np.tril_indices(m)
