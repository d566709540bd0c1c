r"""Where a sparse-within-sparse GP stands: q(u) and the hyper-parameters that it was found with."""

from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from skgp.kernels.gram import gram_diag
from skgp.linalg.tensor_state import TensorState

__all__ = ["SWSGPState"]


@dataclass(frozen=True)
class SWSGPState(TensorState):
    r"""Unwhitened posterior :math:`q(u_l) = N(m_l, S_l)` of c latent functions, l = 1 ... c.

    The functions share kernel and inducing points. u and f are modelled without the prior means:
    ``offset`` is added to f before a likelihood sees it.

    Attributes
    ----------
    kernel : sklearn kernel expression
        Covariance of f, without noise; its bounds hold while training.
    likelihood : Tensor of shape (p,)
        Free parameters of the likelihood (see `skgp.likelihoods.families`).
    Z : Tensor of shape (M, d)
        Inducing points.
    mean : Tensor of shape (M, c)
        m.
    var : Tensor of shape (M, c) or None
        Diagonal of S, positive, where the covariance is diagonal.
    root : Tensor of shape (c, M, M) or None
        Lower triangular with :math:`S = R R^T`, where the covariance is full.
    offset : Tensor of shape (c,)
        Prior means.

    Raises
    ------
    ValueError
        If not exactly one of `var` and `root` is given.

    Notes
    -----
    Pickles as NumPy arrays of O(M d + M c) numbers, O(c M^2) with a full covariance.
    """

    kernel: Any
    likelihood: Tensor
    Z: Tensor
    mean: Tensor
    var: Tensor | None
    root: Tensor | None
    offset: Tensor

    def __post_init__(self) -> None:
        if (self.var is None) == (self.root is None):
            given = "neither" if self.var is None else "both"
            raise ValueError(
                f"Exactly one of var and root must be given, got {given}: var (M, c) makes the "
                "covariance diagonal, root (c, M, M) full."
            )

    @classmethod
    def prior(
        cls, kernel, likelihood: Tensor, Z: Tensor, offset: Tensor, *, covariance: str = "diagonal"
    ) -> "SWSGPState":
        r"""A posterior to begin with: mean 0 and variances those of the prior, independent.

        Parameters
        ----------
        kernel, likelihood, Z, offset
            See the class.
        covariance : {"diagonal", "full"}

        Returns
        -------
        SWSGPState

        Raises
        ------
        ValueError
            If `covariance` is neither.
        """
        if covariance not in ("diagonal", "full"):
            raise ValueError(f'covariance must be "diagonal" or "full", got {covariance!r}.')
        c = len(offset)
        variance = gram_diag(kernel, Z)[:, None].expand(-1, c).contiguous()
        mean = Z.new_zeros(len(Z), c)
        if covariance == "diagonal":
            return cls(kernel, likelihood, Z, mean, variance, None, offset)
        return cls(kernel, likelihood, Z, mean, None, variance.T.sqrt().diag_embed(), offset)

    def to(self, *args) -> "SWSGPState":
        """The same on another device or in another dtype, as `torch.Tensor.to` says."""
        tensors = {
            name: value.to(*args) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)

    @property
    def n_inducing(self) -> int:
        """M."""
        return len(self.Z)

    @property
    def n_latent(self) -> int:
        """The number c of latent functions."""
        return self.mean.shape[1]

    @property
    def is_diagonal(self) -> bool:
        """Whether the covariance of q(u) is diagonal."""
        return self.root is None

    @property
    def roots(self) -> Tensor:
        """Root of a full covariance."""
        return cast(Tensor, self.root)

    def variance(self) -> Tensor:
        """Diagonal of S, (M, c), of either kind of covariance."""
        if self.root is not None:
            return self.root.square().sum(-1).T
        return cast(Tensor, self.var)

    def with_posterior(
        self, mean: Tensor, *, var: Tensor | None = None, root: Tensor | None = None
    ) -> "SWSGPState":
        """The same hyper-parameters with another posterior."""
        return replace(self, mean=mean, var=var, root=root)
