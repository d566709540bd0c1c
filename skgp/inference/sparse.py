r"""Sparse GPs: a Gaussian over the values at M inducing points, and what it says of f elsewhere.

With inducing points Z (M, d) and :math:`K_{uu} + \epsilon I = L L^T`, the values there are
:math:`u = L w` with whitened :math:`w \sim N(0, I)` a priori, and the posterior is

.. math:: q(w) = N(a, R R^T), \qquad q(u) = N(L a, L R R^T L^T).

The conditional of f given u stays that of the prior, so with :math:`\phi = L^{-1} k_u(x)` [1]_

.. math:: \mu(x) = o + \phi^T a, \qquad v(x) = k(x, x) + \phi^T (R R^T - I) \phi .

``latent_moments`` computes both with gradients for training, ``SparsePosterior`` for prediction;
``natural_gradients`` finds the q(w) of the greatest ELBO. Several latent functions, one a column,
share the kernel, Z, L and :math:`\phi`; each has its own :math:`(o, a, R)`.

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

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.natural import FullSystem, VariationalPosterior, fit_natural_sites
from skgp.kernels.gram import gram, gram_diag
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import cho_inverse, inverse_factor, jittered_cholesky, tri_solve
from skgp.linalg.preconditioners import rp_cholesky
from skgp.linalg.runtime import TensorState


def inducing_factor(
    kernel,
    Z: Tensor,
    theta: Tensor | None = None,
    *,
    jitter: float | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    r"""Lower factor L (M, M) of :math:`K_{uu} + \epsilon I`; differentiable in Z and theta, O(M^3).

    The jitter is relative to the mean diagonal, by default that of the dtype; noise (M,) is added
    to the diagonal, too. NotPositiveDefiniteError if K holds NaN, or needs more than 1e-4.
    """
    K = gram(kernel, Z, theta=theta)
    diagonal = K.diagonal()
    jitter = defaults.JITTER[K.dtype] if jitter is None else jitter
    added = jitter * diagonal.mean() if noise is None else jitter * diagonal.mean() + noise
    return jittered_cholesky(K.diagonal_scatter(diagonal + added)).factor


def whitened_features(
    kernel, X: Tensor, Z: Tensor, L: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r""":math:`\Phi = L^{-1} K_{ux}` (M, n), and the variances (n,) that it leaves; O(n M^2)."""
    L = inducing_factor(kernel, Z) if L is None else L
    Phi = tri_solve(L, gram(kernel, X, Z).mT, upper=False)
    return Phi, (gram_diag(kernel, X) - Phi.square().sum(0)).clamp_min(0.0)


def latent_moments(
    kernel,
    X: Tensor,  # (n, d)
    Z: Tensor,  # (M, d)
    mean: Tensor,  # (M, c)
    root: Tensor,  # (c, M, M)
    *,
    theta: Tensor | None = None,  # (kernel.n_dims,)
    offset: Tensor | float = 0.0,  # (c,), prior means
) -> tuple[Tensor, Tensor]:
    r"""Posterior means and variances of f, differentiable in everything but X.

    .. math:: \mu = o + K_{xu} c, \quad c = L^{-T} a, \qquad
              v = \operatorname{diag} K_{xx} + \operatorname{rowsum}(K_{xu} B \circ K_{xu}), \quad
              B = L^{-T} (R R^T - I) L^{-1},

    which keeps triangular solves to M x M matrices: two products with an n x M matrix forward and
    backward. The rounding error of v is about eps / jitter times the kernel's variance. Both are
    (n, c), variances at least 0; O(n M^2 c) time, O(n M c) memory.
    """
    L = inducing_factor(kernel, Z, theta)
    weights = tri_solve(L.mT, mean, upper=True)  # (M, c)
    scaled_root = tri_solve(L.mT, root, upper=True)
    B = scaled_root @ scaled_root.mT - cho_inverse(L)  # (c, M, M)
    K = gram(kernel, X, Z, theta=theta, method="expand")
    f_mean, excess = _QuadraticForms.apply(K, weights, B)
    prior = gram_diag(kernel, X, theta=theta)
    return offset + f_mean, (prior[:, None] + excess).clamp_min(0.0)


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


class FixedFeatures:
    """`latent_moments` for many posteriors, with Phi kept: one product with it each way."""

    def __init__(self, kernel, X: Tensor, Z: Tensor, offset: Tensor | float = 0.0) -> None:
        with torch.no_grad():
            Phi, unexplained = whitened_features(kernel, X, Z)
            self.rows = Phi.mT.contiguous()  # (n, M)
        self.unexplained, self.offset = unexplained[:, None], offset

    def moments(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, c) of f, differentiable in mean (M, c) and root (c, M, M)."""
        explained = (self.rows @ root).square().sum(-1)  # (c, n)
        return self.offset + self.rows @ mean, self.unexplained + explained.mT


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
        jitter = defaults.JITTER[Z.dtype] if noise is None else 0.0
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
        features, _ = whitened_features(self.kernel, X, self.Z, self.factor)
        prior = gram(self.kernel, X) - features.mT @ features
        spread = self.root.mT @ features
        return prior + spread.mT @ spread


@dataclass(frozen=True)
class SparseState:
    """A sparse posterior (module docstring) and the hyper-parameters that it was found with."""

    kernel: Any  # covariance of f, without noise; its bounds hold while training
    likelihood: Tensor  # (p,), logarithms of its free parameters (`Likelihood.free_parameters`)
    Z: Tensor  # (M, d)
    mean: Tensor  # (M, c)
    root: Tensor  # (c, M, M)
    offset: Tensor  # (c,), prior means

    @classmethod
    def prior(cls, kernel, likelihood: Tensor, Z: Tensor, offset: Tensor) -> "SparseState":
        """The posterior of no data."""
        M, c = len(Z), len(offset)
        root = torch.eye(M, dtype=Z.dtype, device=Z.device).expand(c, M, M).contiguous()
        return cls(kernel, likelihood, Z, Z.new_zeros(M, c), root, offset)

    def with_posterior(self, mean: Tensor, root: Tensor) -> "SparseState":
        """The same hyper-parameters with another posterior."""
        return replace(self, mean=mean, root=root)

    def with_spread(self, factor: float) -> "SparseState":
        """With covariances of f, prior and posterior, and Gaussian noise times a factor.

        As far as the bounds of the kernel allow; the mean of f stays.
        """
        low, high = amplitude_range(self.kernel)
        factor = min(max(factor, low), high)
        kernel = scale_amplitude(self.kernel, factor)
        likelihood, mean = self.likelihood + math.log(factor), self.mean / factor**0.5
        return replace(self, kernel=kernel, likelihood=likelihood, mean=mean)

    def with_novel(self, X: Tensor, room: int, generator: torch.Generator) -> "SparseState":
        """With inducing points at rows of X (n, d) that those there are leave unexplained.

        At most `room`, r, spread by randomly pivoted Cholesky factorisation. Given all that is
        known they are as the prior has them: N(0, I) of the new part of w. O(n (M + r)^2).
        """
        if room <= 0:
            return self
        Phi, left = whitened_features(self.kernel, X, self.Z)  # (M, n), (n,)
        least = defaults.NOVEL * gram_diag(self.kernel, X)
        novel = left > least
        X, Phi, left, least = X[novel], Phi[:, novel], left[novel], least[novel]
        chosen = rp_cholesky(
            lambda rows: gram(self.kernel, X, X[rows]) - Phi.mT @ Phi[:, rows],
            left,
            room,
            generator=generator,
            tol=float(least.sum() / left.sum()) if len(left) else 0.0,
        ).pivots
        M, size = len(self.Z), len(self.Z) + len(chosen)
        root = torch.eye(size).to(self.root).repeat(len(self.root), 1, 1)
        root[:, :M, :M] = self.root
        mean = torch.cat([self.mean, self.mean.new_zeros(len(chosen), self.mean.shape[1])])
        return replace(self, Z=torch.cat([self.Z, X[chosen]]), mean=mean, root=root)

    def posterior(self) -> SparsePosterior:
        """What predicts."""
        return SparsePosterior(self.kernel, self.Z, self.mean, self.root, self.offset)


def posterior_from_precision(precision: Tensor, projection: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gaussian of natural parameters, :math:`N(P^{-1} b, P^{-1})`: mean (M, c), root (c, M, M).

    Of P (M, M) or (c, M, M) and b (M, c); O(c M^3).
    """
    precision = precision.expand(projection.shape[1], *precision.shape[-2:])
    root = inverse_factor(precision)
    mean = root @ (root.mT @ projection.mT[:, :, None])
    return mean[..., 0].mT, root


def kl_from_standard_normal(mean: Tensor, root: Tensor) -> Tensor:
    r"""Divergence of q(w) from the prior, summed over the latent functions, a scalar in nats.

    .. math:: \mathrm{KL}(N(a, R R^T) \,\|\, N(0, I)) =
              \tfrac12 (a^T a + \|R\|_F^2 - M) - \sum_j \log R_{jj} .
    """
    logs = root.diagonal(dim1=-2, dim2=-1).log().sum()
    return 0.5 * (mean.square().sum() + root.square().sum() - mean.numel()) - logs


@dataclass(frozen=True)
class ReferenceGaussian:
    r"""Coordinates of q(w) in which its optimum is well conditioned.

    Beside a reference :math:`N(a_0, C_0 C_0^T)`, near the optimum sought, the posterior is

    .. math:: a = a_0 + C_0 \alpha, \qquad R = C_0 T, \qquad T \text{ lower triangular with
              diagonal } e^{t_{ii}} .

    At the reference, :math:`(\alpha, T) = (0, I)`, the Hessian of the negative ELBO in
    :math:`\alpha` is the identity if the reference is its optimum, whatever the data: what natural
    gradients achieve by another metric, a change of variables achieves for L-BFGS and Adam. Any
    positive-definite covariance has exactly one such T, so a poor reference costs only speed.
    """

    mean: Tensor  # (M, c)
    root: Tensor  # (c, M, M), lower triangular

    def start(self) -> dict[str, Tensor]:
        """Coordinates of the reference itself: zeros, `alpha` (M, c), `triangle` (c, M(M+1)/2).

        `triangle` holds the entries of T below the diagonal and the logarithms of those on it, row
        by row.
        """
        M, c = self.mean.shape
        return {
            "alpha": torch.zeros_like(self.mean),
            "triangle": self.mean.new_zeros(c, M * (M + 1) // 2),
        }

    def posterior(self, alpha: Tensor, triangle: Tensor) -> tuple[Tensor, Tensor]:
        """Mean a (M, c) and root R (c, M, M) of the coordinates; O(c M^3)."""
        shift = (self.root @ alpha.mT[:, :, None])[..., 0].mT
        return self.mean + shift, self.root @ self.triangle(triangle)

    def triangle(self, entries: Tensor) -> Tensor:
        """T (c, M, M) of its entries (c, M(M+1)/2)."""
        M = len(self.mean)
        rows, columns = torch.tril_indices(M, M, device=entries.device)
        T = entries.new_zeros(len(entries), M, M)
        T[:, rows, columns] = entries
        return T.diagonal_scatter(T.diagonal(dim1=1, dim2=2).exp(), dim1=1, dim2=2)


@torch.no_grad()
def natural_gradients(
    state: SparseState,
    data: Data,
    likelihood: Likelihood,
    *,
    beta: float = 1.0,
    max_iter: int = 10,
    tol: float = 1e-4,
) -> SparseState:
    """Maximise the ELBO in q(w) by natural gradients, for fixed hyper-parameters.

    Parameters
    ----------
    state : SparseState
        Kernel and inducing points; its q(w) is the initial value, unless it is the prior.
    data : Data
    likelihood : Likelihood
    beta : float, default=1.0
        Factor of the KL divergence in the ELBO.
    max_iter : int, default=10
        Steps, at most.
    tol : float, default=1e-4
        Steps end when the posterior means of f move by no more.

    Returns
    -------
    SparseState
        The same kernel and inducing points with the q(w) found.

    Notes
    -----
    The sites are those of :mod:`skgp.inference.natural`. O(n M^2 c) per step.
    """
    Phi, unexplained = whitened_features(state.kernel, data.X, state.Z)
    beta = max(beta, defaults.LEAST_SITE_BETA)
    system = FullSystem(Phi.mT.contiguous(), unexplained, beta, data.weight)
    start = VariationalPosterior(state.mean, state.root.square().sum(-1).mT, state.root)
    fit = fit_natural_sites(
        system,
        data.y,
        likelihood.at(data.offset),
        offset=state.offset,
        start=start if state.mean.any() else None,
        max_iter=max_iter,
        tol=defaults.ROUNDING_OF_ELBO,
        damping=defaults.SITE_STEP,
        callback=lambda _, info: info["moved"] <= tol,
    )
    return state.with_posterior(fit.q.mean, cast(Tensor, fit.q.root))
