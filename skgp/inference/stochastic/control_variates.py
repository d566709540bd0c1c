r"""Control variates for the estimators of QSGP (Evans and Nair, 2020, section 2.4, appendix F).

A quadratic form :math:`v^T M v` estimated from two samples of basis functions,
:math:`\tfrac{m^2}{\tilde m^2} v_j^T M_{j,i} v_i`, loses variance when the same estimate for a
low-rank :math:`B^T B \approx M` is subtracted and its expectation :math:`\|B v\|^2` added:

- ``M = (n / n_batch) Phi_l' Phi_l`` with ``B = sqrt(n / n_support) Phi_p`` for fixed support rows
  p, eq. (3), for the mean and every dense column of C;
- the same support rows weighed against each other (`projection_weights`, not in the paper): with
  ``M = B' A B``, A projects *all* rows on the support rows, :math:`k(x, U) K(U, U)^{-1}`, where
  eq. (3) lets each support row stand for n / n_support rows alike (A = I). It costs a matrix of
  the rank squared, and as much variance falls at rank 100 as by eq. (3) at rank 300;
- ``M = S = K(Z, Z)`` with the Nystrom factor ``B = L^-1 K(U, Z)``, ``K(U, U) = L L'`` (F.2).

Proposition 3: as iterations move few entries of v, the running sums :math:`a = B v` are kept by
:math:`a \mathrel{+}= B_{:,i}\,\Delta v_i`, at a cost independent of n and m.

Sparse gradients of the expectation (F.1)
-----------------------------------------
:math:`2 B^T a` is dense, and must be estimated from the entries that an iteration touches.

- ``scaling="union"`` is the paper's: the entries in the union, scaled to be unbiased. The paper's
  factor :math:`m / |\tilde i \cup \tilde j|` is exact when all sampling units have one size;
  `union_weight` corrects it when the last block is short.
- ``scaling="draws"`` (default) gives each sample its own copy :math:`(m / \tilde m) B_i^T a`, the
  weight that the other terms have. Given that a function is in i, what it sees is an unbiased
  estimate of (half) its gradient and vanishes in the mean at the optimum. With "union" the terms
  of one function carry different weights, and the noise of the sparsity stays. The price is a
  slightly larger variance of this term alone, by :math:`2 (w - 1)` against
  :math:`4 (1 / (2/w - 1/w^2) - 1)` times its squared half.

Under empirical Bayes the features of B stay at the initial hyper-parameters (F.3).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.estimators import Estimate
from skgp.inference.stochastic.sampling import IndexSet, union_weight
from skgp.kernels import gram

__all__ = [
    "LinearControlVariate",
    "LowRankControlVariate",
    "RegressionCoefficient",
    "nystrom_factor",
    "projection_weights",
    "support_features",
]

Factor = Callable[[Tensor], Tensor]


def support_features(
    basis: StochasticBasis, X_support: Tensor, theta: Tensor | None = None
) -> Factor:
    r"""Columns of :math:`\Phi_{p,:}` at the support rows, for eq. (3).

    Parameters
    ----------
    basis : StochasticBasis
    X_support : Tensor of shape (n_support, d)
    theta : Tensor, optional
        Hyper-parameters at initialisation: copied, and fixed from then on (F.3).

    Returns
    -------
    callable
        Maps indices (k,) to a Tensor (n_support, k).
    """
    fixed = None if theta is None else theta.detach().clone()
    return lambda indices: basis.features(X_support, indices, fixed)


def projection_weights(
    kernel: Any, U: Tensor, X: Tensor, theta: Tensor | None = None, *, jitter: float = 1e-6
) -> Tensor:
    r"""Weights A of the support rows under which :math:`\Phi_U^T A \Phi_U` stands for all rows.

    A function of the prior is nearly its projection on the support rows U,
    :math:`f(x) \approx k(x, U) K_{UU}^{-1} f(U)`, so that

    .. math:: \tfrac1N \sum_x f(x)^2 \approx \tfrac{1}{r} f(U)^T A f(U), \qquad
              A = \tfrac rN K_{UU}^{-1} K_{UX} K_{XU} K_{UU}^{-1}.

    The control variate's expectation is computed with the same A: any A, of any rows X, leaves it
    unbiased.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    U : Tensor of shape (r, d)
        Support rows.
    X : Tensor of shape (N, d)
        A sample of all rows.
    theta : Tensor, optional
        Log hyper-parameters.
    jitter : float, default=1e-6
        Added to the diagonal of K(U, U), relative to its mean.

    Returns
    -------
    Tensor of shape (r, r)
        float64, symmetric positive semi-definite. :math:`O((N + r) r^2)`.
    """
    theta = None if theta is None else theta.detach()
    U = U.to(torch.float64)
    K = gram(kernel, U, theta=theta)
    K.diagonal().add_(jitter * K.diagonal().mean())
    projection = torch.cholesky_solve(
        gram(kernel, U, X.to(torch.float64), theta=theta), torch.linalg.cholesky(K)
    )
    return (len(U) / len(X)) * (projection @ projection.mT)


def nystrom_factor(
    basis: StochasticBasis, U: Tensor, theta: Tensor | None = None, *, jitter: float = 1e-8
) -> Factor:
    r"""Columns of :math:`L^{-1} K(U, Z)` with :math:`L L^T = K(U, U)`, for a dense S (F.2).

    Any jitter keeps the control variate unbiased, whose expectation is computed with the same
    factor.

    Parameters
    ----------
    basis : StochasticBasis
        Whose features are :math:`K(\cdot, Z)`.
    U : Tensor of shape (r, d)
        Support points.
    theta : Tensor, optional
        Copied, and fixed from then on.
    jitter : float, default=1e-8
        Added to the diagonal of K(U, U), relative to its mean.

    Returns
    -------
    callable
        Maps indices (k,) to a Tensor (r, k).
    """
    fixed = None if theta is None else theta.detach().clone()
    K = gram(basis.kernel, U.to(torch.float64), theta=fixed).detach()
    K.diagonal().add_(jitter * K.diagonal().mean())
    L = torch.linalg.cholesky(K)

    def columns(indices: Tensor) -> Tensor:
        Kuz = basis.features(U, indices, fixed)
        return torch.linalg.solve_triangular(L.to(Kuz), Kuz, upper=False)

    return columns


class LowRankControlVariate:
    r"""Control variate of :math:`v^T M v` for the columns v of V, with running sums :math:`B V`.

    Parameters
    ----------
    factor : callable
        Columns of B (see `support_features` and `nystrom_factor`).
    sums : Tensor of shape (rank, q)
        B V to start from: zeros for V = 0. Kept and changed in place; float64 whatever the
        precision of V, because rounding errors would add up.
    weights : Tensor of shape (rank, rank), optional
        A, for the form :math:`v^T B^T A B v` (`projection_weights`); the identity by default.
    memory_budget : int, default=0
        Bytes of columns of B kept, by sampling unit, first come first kept. Only for units of
        several basis functions.
    scaling : {"draws", "union"}
        Sparse gradient of the expectation; see the module.

    Attributes
    ----------
    sums : Tensor of shape (rank, q)
        B V.

    Raises
    ------
    ValueError
        If `scaling` is unknown.
    """

    def __init__(
        self,
        factor: Factor,
        sums: Tensor,
        *,
        weights: Tensor | None = None,
        memory_budget: int = 0,
        scaling: str = "draws",
    ) -> None:
        if scaling not in ("draws", "union"):
            raise ValueError(f'scaling must be "draws" or "union", got {scaling!r}.')
        self.sums = sums
        self.weights = weights
        self.scaling = scaling
        self._factor = factor
        self._bytes_left = memory_budget
        self._kept: dict[int, Tensor] = {}

    @torch.no_grad()
    def columns(self, sample: IndexSet) -> Tensor:
        """Return the columns of B in a sample, shape (rank, \\|i\\|)."""
        if sample.unit_size == 1 or (self._bytes_left <= 0 and not self._kept):
            return self._factor(sample.indices)
        parts = torch.split(sample.indices, sample.unit_size)
        return torch.cat(
            [self._unit(u, p) for u, p in zip(sample.units.tolist(), parts, strict=True)], dim=1
        )

    def _unit(self, unit: int, indices: Tensor) -> Tensor:
        if unit in self._kept:
            return self._kept[unit]
        part = self._factor(indices)
        n_bytes = part.numel() * part.element_size()
        if n_bytes <= self._bytes_left:
            self._kept[unit] = part
            self._bytes_left -= n_bytes
        return part

    @torch.no_grad()
    def estimate(
        self,
        i: IndexSet,
        j: IndexSet,
        B_i: Tensor,
        B_j: Tensor,
        V_i: Tensor,
        V_j: Tensor,
        scale: float,
        *,
        columns: Tensor | slice = slice(None),
    ) -> Estimate:
        r"""Return the correction, of expectation 0, to add to an estimate of `scale` v' M v.

        .. math:: -w_i w_j v_j^T B_j^T A B_i v_i + a^T A a

        Parameters
        ----------
        i, j : IndexSet
            The samples of that estimate.
        B_i, B_j : Tensor of shape (rank, |i|) and (rank, |j|)
            `columns` of both.
        V_i, V_j : Tensor of shape (|i|, q) and (|j|, q)
        scale : float
            Multiplies everything: n / (n_support noise_variance) in eq. (3).
        columns : Tensor or slice
            Which running sums belong to the columns of V.

        Returns
        -------
        Estimate
            To be multiplied by a coefficient, if any, that does not depend on these samples.
            O(rank (\|i\| + \|j\|) q).
        """
        a = self.sums[:, columns].to(B_i)
        p_i, p_j = i.weight * (B_i @ V_i), j.weight * (B_j @ V_j)
        plain_a, plain_i = a, p_i
        if self.weights is not None:
            A = self.weights.to(B_i)
            a, p_i, p_j = A @ a, A @ p_i, A @ p_j
        value = scale * (plain_a * a - plain_i * p_j).sum(0)
        if self.scaling == "draws":
            grad_i = (i.weight * scale) * (B_i.T @ (a - p_j))
            grad_j = (j.weight * scale) * (B_j.T @ (a - p_i))
            return Estimate(value, grad_i, grad_j)
        grad_i = (-i.weight * scale) * (B_i.T @ p_j)
        grad_j = (-j.weight * scale) * (B_j.T @ p_i)
        factor = 2 * scale * union_weight(i, j)
        only_j = ~torch.isin(j.indices, i.indices, assume_unique=True)
        grad_i = grad_i + factor * (B_i.T @ a)
        grad_j = grad_j + factor * only_j[:, None].to(B_j) * (B_j.T @ a)
        return Estimate(value, grad_i, grad_j)

    @torch.no_grad()
    def update(self, B_i: Tensor, delta: Tensor, columns: Tensor | slice = slice(None)) -> None:
        """Proposition 3: follow the change `delta` (|i|, q) of the rows i of V."""
        self.sums[:, columns] += (B_i @ delta).to(self.sums)


class LinearControlVariate:
    r"""Control variate of :math:`y^T \Phi \mu` from a precomputed :math:`b = \Phi^T y` (F.2).

    The correction of the term :math:`-\tfrac{2}{\sigma^2} y^T \Phi \mu` of Theorem 1 is

    .. math:: \tfrac{2}{\sigma^2} \big(w_i\, b_i^T \mu_i - b^T \mu\big),

    with :math:`b^T \mu` kept as a running sum. Computing b costs O(n m) beforehand.

    With ``scaling="draws"`` (each sample its own copy) the correction of the *gradient* vanishes
    identically: given the sampled entries, :math:`(n / \tilde n) y_l^T \Phi_{l,i}` has only the
    noise of the rows, which b does not share. With ``"union"`` it is the paper's. It is the
    *value* that gains, hence the monitored loss; the paper does not use it either.

    Parameters
    ----------
    b : Tensor of shape (m,)
    total : float
        :math:`b^T \mu` to start from.
    scaling : {"draws", "union"}
    symmetric : bool, default=True
        As in `quadratic_loss`, whose form the correction follows.
    """

    def __init__(
        self, b: Tensor, total: float = 0.0, *, scaling: str = "draws", symmetric: bool = True
    ) -> None:
        if scaling not in ("draws", "union"):
            raise ValueError(f'scaling must be "draws" or "union", got {scaling!r}.')
        self.b = b
        self.total = total
        self.scaling = scaling
        self.share_i, self.share_j = (1.0, 1.0) if symmetric else (2.0, 0.0)

    @torch.no_grad()
    def estimate(
        self, i: IndexSet, j: IndexSet, mu_i: Tensor, mu_j: Tensor, noise_variance: float
    ) -> Estimate:
        """Return the correction, of expectation 0; gradients of shape (k, 1)."""
        b_i, b_j = self.b[i.indices], self.b[j.indices]
        w_i, w_j = self.share_i * i.weight, self.share_j * j.weight
        value = w_i * (b_i @ mu_i) + w_j * (b_j @ mu_j) - 2 * self.total
        if self.scaling == "draws":
            grad_i, grad_j = torch.zeros_like(b_i), torch.zeros_like(b_j)
        else:
            factor = 2 * union_weight(i, j)
            only_j = ~torch.isin(j.indices, i.indices, assume_unique=True)
            grad_i, grad_j = (w_i - factor) * b_i, (w_j - factor * only_j.to(b_j)) * b_j
        return Estimate(
            value / noise_variance,
            grad_i[:, None] / noise_variance,
            grad_j[:, None] / noise_variance,
        )

    def update(self, i: IndexSet, delta: Tensor) -> None:
        """Follow the change `delta` (|i|,) of the entries i of mu."""
        self.total += float(self.b[i.indices] @ delta)


class RegressionCoefficient:
    r"""Coefficient :math:`\beta = \operatorname{cov}(x, z) / \operatorname{var}(z)`, learned.

    x is the plain estimate of a term and z, of expectation 0, what the control variate subtracts.
    Exponential averages over past iterations: the current one uses a coefficient that does not
    depend on its samples, so that it stays unbiased.

    Parameters
    ----------
    smoothing : float, default=0.98
        Weight of the past.
    """

    def __init__(self, smoothing: float = 0.98) -> None:
        self.smoothing = smoothing
        self._mean = 0.0
        self._xz = 0.0
        self._zz = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float:
        """The coefficient for the next iteration; 1 before the tenth, and kept in [0, 2]."""
        if self._zz <= 0 or self._weight < 1 - self.smoothing**10:
            return 1.0
        return min(max(self._xz / self._zz, 0.0), 2.0)

    def update(self, x: float, z: float) -> None:
        """Take the plain estimate and what was subtracted from it, before the coefficient."""
        centred = x - self._mean / self._weight if self._weight else 0.0
        s = self.smoothing
        self._mean = s * self._mean + (1 - s) * x
        self._xz = s * self._xz + (1 - s) * centred * z
        self._zz = s * self._zz + (1 - s) * z * z
        self._weight = s * self._weight + (1 - s)
