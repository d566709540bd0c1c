r"""Divergence of q(w) from the prior, and the evidence lower bound of a Gaussian likelihood.

Equation (2) of Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), in the
notation of `skgp.inference.variational.gaussian`. The paper names three parts, kept here:
:math:`ELBO = -\frac12 (\mathcal{L}_\mu + \mathcal{L}_\Sigma + \mathcal{L}_{const})`.
"""

import math

import torch
from torch import Tensor

from skgp.inference.variational.gaussian import WeightGaussian
from skgp.linalg.cholesky import jittered_cholesky, log_det

__all__ = ["covariance_objective", "elbo", "kl_to_prior", "mean_objective"]


def kl_to_prior(q: WeightGaussian, prior_precision: Tensor | None = None) -> Tensor:
    r"""Kullback-Leibler divergence from the prior :math:`N(0, S^{-1})` to q.

    .. math:: KL(q \,\|\, p) = \tfrac12 \left( \operatorname{tr}(S \Sigma) + \mu^T S \mu - m
              - \log|S| - \log|\Sigma| \right).

    Parameters
    ----------
    q : WeightGaussian
        Over m weights.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.

    Returns
    -------
    Tensor of shape ()
        In nats. :math:`O(m k)` for a diagonal S, :math:`O(m^3 / 3 + m^2 k)` for a dense one.

    Raises
    ------
    NotPositiveDefiniteError
        If a dense S cannot be factored.

    Examples
    --------
    >>> import torch
    >>> kl_to_prior(WeightGaussian.diagonal(torch.ones(4), torch.ones(4)))
    tensor(2.)
    """
    S = prior_precision
    fit = q.trace(S) + _quadratic(q.mean, S)
    return 0.5 * (fit - q.n_features - _log_det_precision(S, q.mean) - q.log_det())


def mean_objective(
    mean: Tensor,
    gram: Tensor,
    projection: Tensor,
    noise_variance: float | Tensor,
    prior_precision: Tensor | None = None,
) -> Tensor:
    r"""The part of the ELBO that depends on the mean, to be minimised.

    .. math:: \mathcal{L}_\mu(\mu) = \frac{1}{\sigma^2} \left( -2 y^T \Phi \mu
              + \mu^T \Phi^T \Phi \mu \right) + \mu^T S \mu.

    Parameters
    ----------
    mean : Tensor of shape (m,)
        :math:`\mu`.
    gram, projection : Tensor of shape (m, m) and (m,)
        :math:`\Phi^T \Phi` and :math:`\Phi^T y`.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.

    Returns
    -------
    Tensor of shape ()
        In nats (twice); :math:`O(m^2)`.
    """
    fit = _quadratic(mean, gram) - 2 * (projection @ mean)
    return fit / noise_variance + _quadratic(mean, prior_precision)


def covariance_objective(
    q: WeightGaussian,
    gram: Tensor,
    noise_variance: float | Tensor,
    prior_precision: Tensor | None = None,
) -> Tensor:
    r"""The part of the ELBO that depends on the covariance, to be minimised.

    .. math:: \mathcal{L}_\Sigma(C) = \frac{1}{\sigma^2} \operatorname{tr}(C^T \Phi^T \Phi C)
              + \operatorname{tr}(S C C^T) - 2 \sum_r \log c_{rr}.

    Parameters
    ----------
    q : WeightGaussian
        Its mean plays no part.
    gram : Tensor of shape (m, m)
        :math:`\Phi^T \Phi`.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.

    Returns
    -------
    Tensor of shape ()
        In nats (twice); :math:`O(m^2 k)`.
    """
    return q.trace(gram) / noise_variance + q.trace(prior_precision) - q.log_det()


def elbo(
    q: WeightGaussian,
    gram: Tensor,
    projection: Tensor,
    sum_squares: float | Tensor,
    n_rows: int,
    noise_variance: float | Tensor,
    prior_precision: Tensor | None = None,
) -> Tensor:
    r"""Evidence lower bound of a Gaussian likelihood, eq. (2), from the sufficient statistics.

    .. math::

        ELBO &= -\tfrac12 \left( \mathcal{L}_\mu + \mathcal{L}_\Sigma + \mathcal{L}_{const} \right)
        \le \log N(y \mid 0, \Phi S^{-1} \Phi^T + \sigma^2 I) \\
        \mathcal{L}_{const} &= -\log|S| - m + n \log(2 \pi \sigma^2) + y^T y / \sigma^2

    with equality where q is the exact posterior, the full structure's optimum.

    Parameters
    ----------
    q : WeightGaussian
        Over m weights.
    gram, projection : Tensor of shape (m, m) and (m,)
        :math:`\Phi^T \Phi` and :math:`\Phi^T y`.
    sum_squares : float or Tensor of shape ()
        :math:`y^T y`.
    n_rows : int
        Number of observations n.
    noise_variance : float or Tensor of shape ()
        :math:`\sigma^2`.
    prior_precision : Tensor of shape (m,) or (m, m), optional
        S; the identity by default.

    Returns
    -------
    Tensor of shape ()
        In nats; :math:`O(m^2 k)`, and :math:`O(m^3 / 3)` more for a dense S.

    Raises
    ------
    NotPositiveDefiniteError
        If a dense S cannot be factored.
    """
    noise = torch.as_tensor(noise_variance, dtype=q.mean.dtype, device=q.mean.device)
    constant = (
        n_rows * torch.log(2 * math.pi * noise)
        + sum_squares / noise
        - q.n_features
        - _log_det_precision(prior_precision, q.mean)
    )
    return -0.5 * (
        mean_objective(q.mean, gram, projection, noise, prior_precision)
        + covariance_objective(q, gram, noise, prior_precision)
        + constant
    )


def _quadratic(vector: Tensor, A: Tensor | None) -> Tensor:
    """vector' A vector for a dense, diagonal or identity A."""
    if A is None:
        return vector @ vector
    return vector @ (A @ vector) if A.ndim == 2 else vector @ (A * vector)


def _log_det_precision(S: Tensor | None, like: Tensor) -> Tensor:
    if S is None:
        return like.new_zeros(())
    return log_det(jittered_cholesky(S).factor) if S.ndim == 2 else S.log().sum()
