r"""Sparse GPs: a Gaussian over the values at M inducing points, and what it says of f elsewhere.

With inducing points Z (M, d) and :math:`K_{uu} + \epsilon I = L L^T`, the values there are
:math:`u = L w` with whitened :math:`w \sim N(0, I)` a priori, and the posterior is

.. math:: q(w) = N(a, R R^T), \qquad q(u) = N(L a, L R R^T L^T).

The conditional of f given u stays that of the prior, so with :math:`\phi = L^{-1} k_u(x)` [1]_

.. math:: \mu(x) = o + \phi^T a, \qquad v(x) = k(x, x) + \phi^T (R R^T - I) \phi .

``latent_moments`` computes both with gradients for training, ``SparsePosterior`` for prediction.
Several latent functions, one a column, share the kernel, Z, L and :math:`\phi`; each has its own
:math:`(o, a, R)`.

=============== =================== ========================================
paper           code                meaning
=============== =================== ========================================
M               ``n_inducing``      inducing points ("pseudo inputs")
u, m, V         --                  values there, their mean and covariance
:math:`K_{uu}`  ``L L^T``           with the jitter :math:`\epsilon`
:math:`L^{-1}m` ``mean (M, c)``     a: whitened means, one column a function
:math:`L^{-1}V  ``root (c, M, M)``  R: lower Cholesky factors, diagonal > 0
L^{-T}`
:math:`\mu_i,`  ``mean, var (n, c)``  of f at the rows
:math:`v_i`
=============== =================== ========================================

References
----------
.. [1] Titsias (2009), Variational learning of inducing variables in sparse Gaussian processes;
   Hensman, Fusi and Lawrence (2013), Gaussian processes for big data.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky, tri_solve
from skgp.linalg.tensor_state import TensorState

__all__ = [
    "FixedFeatures",
    "SparsePosterior",
    "SparseState",
    "inducing_factor",
    "jitter_of",
    "latent_moments",
    "whitened_features",
]


def jitter_of(dtype: torch.dtype) -> float:
    """Jitter of :math:`K_{uu}` relative to its mean diagonal.

    It bounds :math:`\\|L^{-1}\\|`, by which the rounding of kernel values is magnified.
    With 1e-8 searches for q(u) and inducing points stop where they begin.
    """
    return 1e-6 if dtype == torch.float64 else 1e-4


def inducing_factor(
    kernel,
    Z: Tensor,
    theta: Tensor | None = None,
    *,
    jitter: float | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    r"""Lower factor L of :math:`K_{uu} + \epsilon I`, shape (M, M).

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (M, d)
    theta : Tensor of shape (kernel.n_dims,), optional
    jitter : float, optional
        Relative; by default `jitter_of` the dtype.
    noise : Tensor of shape (M,), optional
        Added to the diagonal, too.

    Returns
    -------
    Tensor of shape (M, M)
        Differentiable in Z and theta; :math:`O(M^3)`.

    Raises
    ------
    NotPositiveDefiniteError
        If K holds NaN, or more jitter than 1e-4 is needed.
    """
    K = gram(kernel, Z, theta=theta)
    diagonal = K.diagonal()
    jitter = jitter_of(K.dtype) if jitter is None else jitter
    added = jitter * diagonal.mean() if noise is None else jitter * diagonal.mean() + noise
    K = K.diagonal_scatter(diagonal + added)
    return jittered_cholesky(K).factor


def whitened_features(kernel, X: Tensor, Z: Tensor, L: Tensor) -> Tensor:
    r"""Columns :math:`\phi(x_i) = L^{-1} k_u(x_i)`, shape (M, n); :math:`O(n M^2)`."""
    return tri_solve(L, gram(kernel, X, Z).mT, upper=False)


def latent_moments(
    kernel,
    X: Tensor,
    Z: Tensor,
    mean: Tensor,
    root: Tensor,
    *,
    theta: Tensor | None = None,
    offset: Tensor | float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""Posterior means and variances of f, differentiable in everything but X.

    .. math:: \mu = o + K_{xu} c, \quad c = L^{-T} a, \qquad
              v = \operatorname{diag} K_{xx} + \operatorname{rowsum}(K_{xu} B \circ K_{xu}), \quad
              B = L^{-T} (R R^T - I) L^{-1},

    which keeps triangular solves to M x M matrices: two products with an n x M matrix forward and
    backward. The rounding error of v is about eps / jitter times the kernel's variance.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    Z : Tensor of shape (M, d)
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
    theta : Tensor of shape (kernel.n_dims,), optional
    offset : Tensor of shape (c,) or float, default=0.0
        Prior mean of f.

    Returns
    -------
    mean, var : Tensor of shape (n, c)
        Variances are at least 0.

    Notes
    -----
    :math:`O(n M^2 c)` time, :math:`O(n M c)` memory.
    """
    L = inducing_factor(kernel, Z, theta)
    weights = tri_solve(L.mT, mean, upper=True)
    scaled_root = tri_solve(L.mT, root, upper=True)
    B = scaled_root @ scaled_root.mT - cho_inverse(L)
    K = gram(kernel, X, Z, theta=theta, method="expand")
    f_mean, excess = _QuadraticForms.apply(K, weights, B)
    prior = gram_diag(kernel, X, theta=theta)
    return offset + f_mean, (prior[:, None] + excess).clamp_min(0.0)


class FixedFeatures:
    r"""`latent_moments` at the same rows for many posteriors, kernel and inducing points fixed.

    .. math:: \mu = o + \Phi^T a, \qquad
              v = \operatorname{diag} (K_{xx} - \Phi^T \Phi) +
              \operatorname{rowsum}(\Phi^T R \circ \Phi^T R),

    with :math:`\Phi = L^{-1} K_{ux}` kept: one product with an n x M matrix forward, one backward.

    Parameters
    ----------
    kernel, X, Z, offset
        As for `latent_moments`.
    """

    def __init__(self, kernel, X: Tensor, Z: Tensor, offset: Tensor | float = 0.0) -> None:
        with torch.no_grad():
            features = whitened_features(kernel, X, Z, inducing_factor(kernel, Z))
            self.rows = features.mT.contiguous()  # (n, M)
            unexplained = gram_diag(kernel, X) - features.square().sum(0)
        self.unexplained = unexplained.clamp_min(0.0)[:, None]
        self.offset = offset

    def moments(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, c) of f, differentiable in mean (M, c) and root (c, M, M)."""
        explained = (self.rows @ root).square().sum(-1)  # (c, n)
        return self.offset + self.rows @ mean, self.unexplained + explained.mT


class _QuadraticForms(torch.autograd.Function):
    """Rows' linear forms ``K W`` and quadratic forms ``k_i' B_c k_i`` of symmetric B.

    Autograd would not know that B is symmetric and would take a third product with K.
    """

    @staticmethod
    def forward(ctx, K: Tensor, W: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        KB = K @ B  # (c, n, M)
        ctx.save_for_backward(K, W, KB)
        return K @ W, (KB * K).sum(-1).mT

    @staticmethod
    def backward(ctx, d_linear: Tensor, d_quadratic: Tensor):
        K, W, KB = ctx.saved_tensors
        dK = d_linear @ W.mT if ctx.needs_input_grad[0] else None
        dB = KB.new_empty(len(KB), K.shape[1], K.shape[1])
        for c, slope in enumerate(d_quadratic.unbind(1)):
            if dK is not None:
                dK.addcmul_(KB[c], slope[:, None], value=2)
            torch.mm(K.mT, slope[:, None] * K, out=dB[c])
        return dK, K.mT @ d_linear, dB


class SparsePosterior(TensorState):
    r"""Predictions of the latent functions from their whitened posterior.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    Z : Tensor of shape (M, d)
    mean : Tensor of shape (M, c)
        a.
    root : Tensor of shape (c, M, M)
        R; (c, M, 0) where u is known.
    offset : Tensor of shape (c,)
        Prior means.
    noise : Tensor of shape (M,), optional
        Variances of u beside those of f(Z), in place of the jitter: u may be observations.

    Notes
    -----
    Holds :math:`O(c M^2)` numbers, whatever the number of training rows.
    """

    Z: Tensor
    whitened_mean: Tensor
    root: Tensor
    offset: Tensor
    factor: Tensor
    weights: Tensor

    noise: Tensor | None = None

    def __init__(
        self,
        kernel,
        Z: Tensor,
        mean: Tensor,
        root: Tensor,
        offset: Tensor,
        noise: Tensor | None = None,
    ) -> None:
        self.kernel = kernel
        self.Z, self.whitened_mean, self.root, self.offset = (
            tensor.detach().double() for tensor in (Z, mean, root, offset)
        )
        self.noise = noise
        # The whitening is that of the training, whose precision gave the jitter.
        jitter = jitter_of(Z.dtype) if noise is None else 0.0
        self.factor = inducing_factor(kernel, self.Z, jitter=jitter, noise=noise)
        self.weights = tri_solve(self.factor.mT, self.whitened_mean, upper=True)

    @property
    def n_inducing(self) -> int:
        """Number of inducing points M."""
        return len(self.Z)

    @property
    def n_latent(self) -> int:
        """Number of latent functions c."""
        return self.root.shape[0]

    def mean(self, X: Tensor) -> Tensor:
        """Means (n, c) of f at the rows of X; O(n M (d + c))."""
        return self.offset + gram(self.kernel, X, self.Z) @ self.weights

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, c) of f; O(n M^2 c)."""
        K = gram(self.kernel, X, self.Z)
        features = tri_solve(self.factor, K.mT, upper=False)
        unexplained = (gram_diag(self.kernel, X) - features.square().sum(0)).clamp_min(0.0)
        explained = (self.root.mT @ features).square().sum(1)  # (c, n)
        return self.offset + K @ self.weights, (unexplained + explained).mT

    def covariance(self, X: Tensor) -> Tensor:
        """Joint covariances (c, n, n) of f; O(n M^2 c + n^2 M c)."""
        features = whitened_features(self.kernel, X, self.Z, self.factor)
        prior = gram(self.kernel, X) - features.mT @ features
        spread = self.root.mT @ features
        return prior + spread.mT @ spread


@dataclass(frozen=True)
class SparseState:
    """A sparse posterior and the hyper-parameters that it was found with.

    Attributes
    ----------
    kernel : sklearn kernel expression
        Covariance of f, without noise; its bounds hold while training.
    likelihood : Tensor of shape (p,)
        Free parameters of the likelihood (logarithms; see `Likelihood.free_parameters`).
    Z : Tensor of shape (M, d)
    mean : Tensor of shape (M, c)
    root : Tensor of shape (c, M, M)
        Whitened posterior (module docstring).
    offset : Tensor of shape (c,)
        Prior means.
    """

    kernel: Any
    likelihood: Tensor
    Z: Tensor
    mean: Tensor
    root: Tensor
    offset: Tensor

    @classmethod
    def prior(cls, kernel, likelihood: Tensor, Z: Tensor, offset: Tensor) -> "SparseState":
        """The posterior of no data."""
        M, c = len(Z), len(offset)
        root = torch.eye(M, dtype=Z.dtype, device=Z.device).expand(c, M, M).contiguous()
        return cls(kernel, likelihood, Z, Z.new_zeros(M, c), root, offset)

    def with_posterior(self, mean: Tensor, root: Tensor) -> "SparseState":
        """The same hyper-parameters with another posterior."""
        return replace(self, mean=mean, root=root)

    def posterior(self) -> SparsePosterior:
        """What predicts."""
        return SparsePosterior(self.kernel, self.Z, self.mean, self.root, self.offset)
