r"""Inducing points as a basis with unit prior: the features that the weight-space solvers share.

.. math:: \Phi = k(X, Z) L^{-T}, \quad L L^T = k(Z, Z) \quad\Rightarrow\quad
          \Phi \Phi^T = k(X, Z)\, k(Z, Z)^{-1} k(Z, X).

It is the model of inducing points (basis :math:`k(\cdot, Z)`, prior precision
:math:`S = k(Z, Z)`) in coordinates in which the prior of the weights is ``N(0, I)``.
"""

import torch
from torch import Tensor

from skgp.kernels.gram import gram
from skgp.linalg.cholesky import jittered_cholesky


class WhitenedInducingBasis:
    r"""Features :math:`k(X, Z) L^{-T}` of m inducing points, for m up to about 1e4.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (m, d)
        Inducing points.
    block_size : int, optional
        Features of a block; all m by default. Several blocks cost half as much per feature in
        products, since L is triangular, but evaluate the kernel about ``n_blocks / 2`` times.

    Attributes
    ----------
    n_features, n_blocks : int
    jitter : float
        Added to the diagonal of ``k(Z, Z)``, absolute.

    Raises
    ------
    NotPositiveDefiniteError
        If ``k(Z, Z)`` is singular beyond what jitter repairs, e.g. by duplicated points.
    ValueError
        If `block_size` is not positive.

    Notes
    -----
    Set-up ``O(m^3)``; a block ``O(n m width)``. Memory ``8 m^2`` bytes, which a pickle leaves out
    and recomputes. Always evaluated in float64, because :math:`L^{-T}` is ill conditioned, and
    rounded to the dtype of ``X`` at the end.
    """

    def __init__(self, kernel, Z: Tensor, *, block_size: int | None = None):
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be a positive integer or None; got {block_size!r}.")
        self.kernel = kernel
        self.Z = Z.to(torch.float64)
        self.n_features = Z.shape[0]
        self.block_features = min(block_size or self.n_features, self.n_features)
        self.n_blocks = -(-self.n_features // self.block_features)
        self._whitening, self.jitter = _whitening(kernel, self.Z, None)

    def block_slice(self, block: int) -> slice:
        """Columns of a block within ``0..m``."""
        start = block * self.block_features
        return slice(start, min(start + self.block_features, self.n_features))

    def features(self, X: Tensor, block: int, theta: Tensor | None = None) -> Tensor:
        """Return the columns of a block.

        Parameters
        ----------
        X : Tensor of shape (n, d)
        block : int
        theta : Tensor of shape (n_theta,), optional
            Log hyper-parameters to use instead of the kernel's own, differentiably. Factors
            ``k(Z, Z)`` anew at every call, ``O(m^3)``.

        Returns
        -------
        Tensor of shape (n, width)
        """
        columns = self.block_slice(block)
        whitening = self._whitening if theta is None else _whitening(self.kernel, self.Z, theta)[0]
        # L^-T is upper triangular: these columns involve the first inducing points only.
        Z, part = self.Z[: columns.stop], whitening[: columns.stop, columns]
        cross = gram(self.kernel, X.to(torch.float64), Z.to(X.device), theta=theta)
        return (cross @ part.to(X.device)).to(X.dtype)

    def __getstate__(self) -> dict:
        state = {key: value for key, value in self.__dict__.items() if key != "_whitening"}
        return state | {"Z": self.Z.cpu().numpy()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.Z = torch.from_numpy(state["Z"])
        self._whitening, self.jitter = _whitening(self.kernel, self.Z, None)


def _whitening(kernel, Z: Tensor, theta: Tensor | None) -> tuple[Tensor, float]:
    """Return ``L^-T`` (m, m), upper triangular, and the jitter that L needed."""
    factor, jitter = jittered_cholesky(gram(kernel, Z, theta=theta))
    identity = torch.eye(Z.shape[0], dtype=Z.dtype, device=Z.device)
    return torch.linalg.solve_triangular(factor.mT, identity, upper=True), jitter
