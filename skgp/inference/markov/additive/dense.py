r"""Posterior of an additive model under one Gaussian site a distinct row, in the space of the rows.

With K the covariance of the sum :math:`\eta` of the components at the m distinct rows and sites
:math:`\exp(\beta^\top \eta - \tfrac12 \eta^\top W \eta)`, W diagonal,

.. math:: V = (K^{-1} + W)^{-1}, \qquad \mu = V \beta = K \alpha, \qquad \alpha = \beta - W \mu,
          \qquad \log Z = \tfrac12 \beta^\top \mu - \tfrac12 \log |I + K W|,

.. math:: \frac{\partial \log Z}{\partial K} = \tfrac12 (\alpha \alpha^\top - R), \qquad
          R = W - W V W, \qquad
          \operatorname{cov}(f(x), g(x')) = k_{fg}(x, x') - k_f(x, \cdot) R\, k_g(\cdot, x')

for any functions f and g that are jointly Gaussian with the rows, the components among them. Where
no weight is negative,

.. math:: B = I + W^{1/2} K W^{1/2} = L L^\top, \qquad R = T^\top T, \qquad T = L^{-1} W^{1/2}

(Rasmussen and Williams, Algorithms 2.1 and 3.2): nothing is divided by a small weight, and the
eigenvalues of B are 1 or more. Outliers leave negative weights, and then, with
:math:`K = L_K L_K^\top`,

.. math:: B = I + L_K^\top W L_K = L L^\top, \qquad V = S^\top S, \qquad S = L^{-1} L_K^\top.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive.covariances import Covariances
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det

__all__ = ["DensePosterior", "DensePrior", "condition"]


class DensePrior:
    """Covariance of the sum at the distinct rows, for fixed dynamics.

    Parameters
    ----------
    dynamics : sequence of Dynamics
        One a component.
    x : Tensor of shape (c, m)
        Distinct rows, as columns.

    Attributes
    ----------
    covariances : Covariances
    x : Tensor of shape (c, m)
    K : Tensor of shape (m, m)
    """

    def __init__(self, dynamics: Sequence[Any], x: Tensor) -> None:
        self.covariances, self.x = Covariances(dynamics), x
        self.K = self.covariances.symmetric(x)

    @cached_property
    def factor(self) -> Tensor:
        """Lower Cholesky factor of K."""
        return jittered_cholesky(self.K).factor

    def levels(self, shares: Tensor) -> Tensor:
        r"""Covariance :math:`\sum_i p_i k_j(x_i, \cdot)` of each component's mean, (c, m).

        Parameters
        ----------
        shares : Tensor of shape (m,)
            p, of the rows in the mean.
        """
        return self.covariances.levels(self.x, shares)


class DensePosterior:
    """What both forms of the posterior share; made by `condition`.

    Parameters
    ----------
    prior : DensePrior
    beta, weight : Tensor of shape (m,)
        Sites.

    Attributes
    ----------
    alpha, mean : Tensor of shape (m,)
    log_normalizer : float
        Of the sites, in nats.

    Notes
    -----
    O(m^3) and two or three matrices of m x m; what is asked for later takes as much again.
    """

    alpha: Tensor
    _chol: Tensor

    def __init__(self, prior: DensePrior, beta: Tensor, weight: Tensor) -> None:
        self.prior, self.beta, self.weight = prior, beta, weight
        self._solve()
        # Where the site is sharper than the prior, K alpha would lose the digits that mu has.
        sharp = weight * prior.K.diagonal() > 1
        self.mean = torch.where(sharp, (beta - self.alpha) / weight, prior.K @ self.alpha)
        self._log_det = float(log_det(self._chol))
        self.log_normalizer = 0.5 * (float(beta @ self.mean) - self._log_det)

    @property
    def divergence(self) -> float:
        """Of the posterior from the prior, in nats."""
        squares = float(self.weight @ (self.mean**2 + self.var))
        return 0.5 * (float(self.beta @ self.mean) + self._log_det - squares)

    def gradients(self) -> list[Tensor]:
        """Derivatives of the log normaliser in the parameters of each component, (q_j,)."""
        K_bar = torch.addr(self.reduction, self.alpha, self.alpha, beta=-0.5, alpha=0.5)
        return self.prior.covariances.gradient(self.prior.x, K_bar)

    @property
    def var(self) -> Tensor:
        """Variances of the sum at the rows, (m,)."""
        raise NotImplementedError

    @property
    def reduction(self) -> Tensor:
        """R, (m, m)."""
        raise NotImplementedError

    @property
    def spread(self) -> float:
        """The trace of V W."""
        return float(self.weight @ self.var)

    def gain(self, push: Tensor) -> float:
        r"""Half of :math:`p^\top V p`: what moving :math:`\beta` by p (m,) adds to log Z."""
        moved = self.prior.K @ push
        return 0.5 * (float(push @ moved) - float(self.reduce(moved[:, None])))

    def reduce(self, k: Tensor) -> Tensor:
        """``k_i' R k_i`` for covariances k_i with the rows, the columns of k (m, p): (p,)."""
        raise NotImplementedError

    def reduce_all(self, k: Tensor) -> Tensor:
        """``k' R k``, (p, p)."""
        raise NotImplementedError

    def _solve(self) -> None:
        """Find alpha and the factor of B."""
        raise NotImplementedError


class _Convex(DensePosterior):
    """No weight is negative."""

    def _solve(self) -> None:
        K = self.prior.K
        self._root = self.weight.sqrt()
        B = (self._root[:, None] * K).mul_(self._root)
        B.diagonal().add_(1.0)
        self._chol = jittered_cholesky(B).factor
        # With beta = beta_0 + W^1/2 b, beta_0 where W is 0: alpha = beta_0 + W^1/2 B^-1 (b - W^1/2
        # K beta_0). The difference beta - W mu has no digits left where the noise is small.
        absent = self._root == 0
        b = torch.where(absent, 0, self.beta / self._root)
        beta_0 = torch.where(absent, self.beta, 0)
        b -= self._root * (K @ beta_0)
        self.alpha = beta_0 + self._root * cho_solve(self._chol, b)

    @cached_property
    def var(self) -> Tensor:
        return (self.prior.K.diagonal() - self.reduce(self.prior.K)).clamp_(min=0)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(self._chol)

    @property
    def reduction(self) -> Tensor:
        return (self._root[:, None] * self._inverse).mul_(self._root)

    @property
    def spread(self) -> float:
        # V W has the trace of I - B^-1, of which gradients need the inverse anyway.
        return float((1 - self._inverse.diagonal()).sum())

    def reduce(self, k: Tensor) -> Tensor:
        return self._half(k).square_().sum(0)

    def reduce_all(self, k: Tensor) -> Tensor:
        half = self._half(k)
        return half.T @ half

    def _half(self, k: Tensor) -> Tensor:
        """``T k``."""
        return torch.linalg.solve_triangular(self._chol, self._root[:, None] * k, upper=False)


class _Mixed(DensePosterior):
    """Some weights are negative."""

    def _solve(self) -> None:
        L = self.prior.factor
        B = L.T @ (self.weight[:, None] * L)
        B.diagonal().add_(1.0)
        self._chol = jittered_cholesky(B).factor
        self._S = torch.linalg.solve_triangular(self._chol, L.T, upper=False)
        self.alpha = self.beta - self.weight * (self._S.T @ (self._S @ self.beta))

    @cached_property
    def var(self) -> Tensor:
        return self._S.square().sum(0)

    @property
    def reduction(self) -> Tensor:
        SW = self._S * self.weight
        return torch.diag(self.weight) - SW.T @ SW

    def reduce(self, k: Tensor) -> Tensor:
        half = self._S @ (self.weight[:, None] * k)
        return self.weight @ k.square() - half.square_().sum(0)

    def reduce_all(self, k: Tensor) -> Tensor:
        weighted = self.weight[:, None] * k
        half = self._S @ weighted
        return k.T @ weighted - half.T @ half


def condition(prior: DensePrior, beta: Tensor, weight: Tensor) -> DensePosterior:
    """Posterior given sites (m,), (m,).

    Raises
    ------
    NotPositiveDefiniteError
        If negative weights leave no proper posterior.
    """
    kind = _Convex if bool((weight >= 0).all()) else _Mixed
    return kind(prior, beta, weight)
