r"""Laplace approximation in the space of the weights: covariances around the mode, and evidence.

With the mode :math:`\hat w` of :func:`.newton.fit_newton` and the curvature c of
the negative log-likelihood there (Rasmussen and Williams, 2006, section 3.4),

.. math::
    q(w) = N(\hat w, H^{-1}), \quad H = \Phi^T \operatorname{diag}(c) \Phi + I / a, \qquad
    \log p(y) \approx -J(\hat w) - \tfrac12 \log |a H|.

A cheaper q is the one of its structure that is nearest to :math:`N(\hat w, H^{-1})` in the sense of
the evidence lower bound, exactly as for a Gaussian likelihood of precision c
(:mod:`skgp.inference.weights.gaussian`).
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from skgp.inference.newton.newton import NewtonFit
from skgp.inference.newton.problem import (
    check_unweighted,
    prior_variances,
)
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gaussian import WeightGaussian, optimal_gaussian, optimal_std
from skgp.linalg.exceptions import NumericalWarning

__all__ = ["laplace_covariance", "log_evidence_of"]

_KINDS = ("full", "chevron", "diagonal")


def laplace_covariance(
    design: StreamedDesign,
    curvature: Tensor,
    *,
    prior_variance: float | Tensor = 1.0,
    kind: str = "full",
    n_dense_columns: int = 100,
    mean: Tensor | None = None,
) -> list[WeightGaussian]:
    r"""Gaussians around the modes of c problems, of a structure of one's choice.

    Parameters
    ----------
    design : StreamedDesign
        :math:`\Phi`, without sample weights.
    curvature : Tensor of shape (n, c)
        :math:`c_{ij} \ge 0` at the modes, see
        :func:`skgp.inference.newton.problem.laplace_curvature`.
    prior_variance : float or Tensor of shape (c,), default=1.0
        a.
    kind : {"full", "chevron", "diagonal"}, default="full"
        :math:`H^{-1}`; its best approximation with `n_dense_columns` dense columns in the Cholesky
        factor; independent weights, :math:`c_r = H_{rr}^{-1/2}`.
    n_dense_columns : int, default=100
        Of "chevron"; m at most.
    mean : Tensor of shape (m, c), optional
        The modes, means of the Gaussians; 0 by default.

    Returns
    -------
    list of c WeightGaussian
        Float64.

    Raises
    ------
    ValueError
        If a shape or a parameter is invalid.
    NotPositiveDefiniteError
        If H cannot be factored.

    Warns
    -----
    NumericalWarning
        When H needed jitter.

    Notes
    -----
    "diagonal": one pass over the features for all columns, ``O(n m c)``. Others: a column after
    another, ``O(n m^2 + m^3)`` each, about four m x m matrices beside the results.
    """
    c = _check(design, curvature)
    if kind not in _KINDS:
        raise ValueError(f"kind must be one of {_KINDS}; got {kind!r}.")
    if kind == "chevron" and n_dense_columns < 0:
        raise ValueError(f"n_dense_columns must not be negative; got {n_dense_columns!r}.")
    m = design.n_features
    if mean is None:
        mean = torch.zeros(m, c, dtype=torch.float64, device=design.device)
    if mean.shape != (m, c):
        raise ValueError(f"mean must have shape ({m}, {c}); got {tuple(mean.shape)}.")
    precision = 1 / prior_variances(prior_variance, c).to(design.device)
    if kind == "diagonal":
        std = optimal_std(design.curvature_diagonal(curvature) + precision)
        return [WeightGaussian.diagonal(mean[:, j], std[:, j]) for j in range(c)]
    n_dense = m if kind == "full" else min(n_dense_columns, m)
    return [
        _gaussian(design, curvature[:, [j]], precision[j], n_dense, mean[:, j]) for j in range(c)
    ]


def log_evidence_of(
    fit: NewtonFit, covariances: Sequence[WeightGaussian], *, prior_variance: float | Tensor = 1.0
) -> Tensor:
    r"""Laplace approximation of :math:`\log p(y)` of every column, in nats.

    .. math:: -J(\hat w) - \tfrac12 \log |a H|, \qquad |a H| = a^m / |\Sigma|.

    Parameters
    ----------
    fit : NewtonFit
    covariances : sequence of c WeightGaussian
        :math:`\Sigma` of each column, from :func:`laplace_covariance` with ``kind="full"``.
    prior_variance : float or Tensor of shape (c,)

    Returns
    -------
    Tensor of shape (c,)
    """
    log_det_prior = covariances[0].n_features * prior_variances(prior_variance, len(fit.loss)).log()
    log_det_posterior = torch.stack([q.log_det() for q in covariances])
    return -fit.loss - 0.5 * (log_det_prior.to(fit.loss) - log_det_posterior.to(fit.loss))


def _gaussian(
    design: StreamedDesign, curvature: Tensor, precision: Tensor, n_dense: int, mean: Tensor
) -> WeightGaussian:
    """Return the best Gaussian of one column with `n_dense` dense columns."""
    gram = design.curvature_gram(curvature)[0]
    no_targets = gram.new_zeros(len(gram))  # the mean is known
    best, jitter = optimal_gaussian(
        gram, no_targets, 1.0, precision.expand(len(gram)), n_dense=n_dense
    )
    if jitter:
        warnings.warn(
            f"The Hessian of the weights needed a jitter of {jitter:.1e} on its diagonal to "
            "be factored, which shrinks the posterior variances. Lower the prior variance or the "
            "number of features, or use dtype='float64'.",
            NumericalWarning,
            stacklevel=3,
        )
    return WeightGaussian(mean, best.columns, best.tail_std)


def _check(design: StreamedDesign, curvature: Tensor) -> int:
    """Return the number of columns, or raise a ValueError."""
    check_unweighted(design)
    if curvature.ndim != 2 or curvature.shape[0] != design.n_rows:
        raise ValueError(
            f"curvature must have shape ({design.n_rows}, c); got {tuple(curvature.shape)}."
        )
    if not bool((torch.isfinite(curvature) & (curvature >= 0)).all()):
        raise ValueError(
            "curvature must be finite and not negative, minus the second derivative of a "
            "log-concave likelihood; got values from "
            f"{float(curvature.min()):.3g} to {float(curvature.max()):.3g}."
        )
    return curvature.shape[1]
