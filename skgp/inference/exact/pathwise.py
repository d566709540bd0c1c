r"""Posterior draws of the weights by the solver that finds their mean: sample, then optimise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.weights import LinearWeightsPosterior, standard_normal


@dataclass(frozen=True)
class PathwiseFit:
    """Outcome of :func:`pathwise_posterior`.

    Attributes
    ----------
    posterior : LinearWeightsPosterior
    result : object
        What `solve` returned.
    targets : Tensor of shape (n, 1 + S)
        Columns solved for, rows scaled by the root weights: y, then those of the samples.
    prior_weights : Tensor of shape (m, S)
        Prior draws that the samples started from.
    """

    posterior: LinearWeightsPosterior
    result: Any
    targets: Tensor
    prior_weights: Tensor


def pathwise_posterior(
    design: StreamedDesign,
    y: Tensor,
    noise_variance: float,
    solve: Callable[[Tensor], Any],
    *,
    n_samples: int,
    generator: torch.Generator,
) -> PathwiseFit:
    r"""Posterior mean and draws from one solve with several right-hand sides.

    With :math:`w_0 \sim N(0, I)` and :math:`\varepsilon \sim N(0, \sigma^2 W^{-1})`,

    .. math:: w_s - \mu = w_0 + (\Phi^T W \Phi + \sigma^2 I)^{-1}
              \Phi^T W (\varepsilon - \Phi w_0)

    has the covariance of the posterior (sample, then optimise). The correction starts from 0, so a
    solver stopped early leaves a deviation between the prior's and the posterior's: variances
    err upwards.

    Parameters
    ----------
    design : StreamedDesign
    y : Tensor of shape (n,)
    noise_variance : float
        :math:`\sigma^2 > 0`.
    solve : callable
        Maps targets T (n, 1 + S) to a result whose ``solution`` (m, 1 + S) solves
        :math:`(\Phi^T W \Phi + \sigma^2 I) V = \Phi^T W^{1/2} T`: `gauss_seidel` or `weights_cg`
        with everything else bound.
    n_samples : int
        S draws; 0 leaves the variances 0.
    generator : torch.Generator

    Returns
    -------
    PathwiseFit

    Notes
    -----
    The solve, and one pass over the features for :math:`\Phi w_0`. Memory ``(2 m + n) (1 + S)``
    float64 beside the solver's.
    """
    if y.shape != (design.n_rows,):
        raise ValueError(f"y must have shape ({design.n_rows},); got {tuple(y.shape)}.")
    if n_samples < 0:
        raise ValueError(f"n_samples must be 0 or more; got {n_samples!r}.")
    prior_weights = standard_normal(design.n_features, n_samples, generator).to(design.device)
    noise = standard_normal(design.n_rows, n_samples, generator).to(design.device)
    # W^(1/2) eps has variance s2 whatever the weights; the rows of Phi w0 are scaled already.
    perturbed = noise_variance**0.5 * noise
    if n_samples:
        perturbed = perturbed - design.matmul(prior_weights)
    targets = torch.cat([design.scale_rows(y[:, None]), perturbed], dim=1)
    result = solve(targets)
    mean, correction = result.solution[:, 0], result.solution[:, 1:]
    deviations = prior_weights + correction
    if n_samples:
        posterior = LinearWeightsPosterior.from_deviations(
            design.basis, mean, deviations, noise_variance
        )
    else:
        posterior = LinearWeightsPosterior(
            design.basis, mean, deviations, mean.new_zeros(0), noise_variance=noise_variance
        )
    return PathwiseFit(posterior, result, targets, prior_weights)
