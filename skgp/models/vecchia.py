r"""Vecchia approximations with global inducing points: from a kernel and observations to f.

The joint density of n observations as a product of the densities of each given a few of those
before it [1]_, of a process whose large scales are taken out by m inducing points first [2]_
(VIF). A joint density: it compares kernels, numbers of neighbours and of inducing points by the
likelihood of all observations, and knows of ranges far beyond the neighbours.

=====================================  ======================================================
paper                                  here
=====================================  ======================================================
[1]_, [3]_ (m = 0)
y_i given y_c(i)                       b_i, D_i of `skgp.inference.vecchia.conditionals`
ordering, conditioning sets            :mod:`skgp.inference.vecchia.neighbors`; ``ordering``, H
U of Sigma^-1 = U U'                   (I - B)' D^-1/2
response or latent vectors             observations, noise among the variances D
[2]_
m inducing points, Sigma_m, Sigma_mn   Z, K_mm = L L', Phi = K_nm L^-T
Vecchia for Sigma - Sigma_mn' ..       B, D of S = K - Phi Phi' + noise
correlation-based neighbours           `earlier_neighbors`, by conditional variances [4]_
Sigma_vif, marginal likelihood, (5)    :mod:`skgp.inference.vecchia.regression`; M there is P
gradients, appendix                    `Conditionals.gradient`, `Sums.cotangents`
predictions, proposition 2.1           :mod:`skgp.inference.vecchia.posterior`
=====================================  ======================================================

`fit_vecchia` takes these steps:

1. *Order.* Observations in random order, or in one that spreads every prefix evenly; last those
   of so much noise that they tell little (`informative`).
2. *Hyper-parameters* by the joint likelihood (:mod:`skgp.learning.vecchia`), on some of many rows.
3. *Inducing points and neighbours* as the kernel found sees them; none of the former where
   observations are likelier so (`approximation`).
4. *Sums* over all observations: the log marginal likelihood and the posterior of u.

Deviations
----------
- Of three times as many nearest by scaled distance those are neighbours that, one by one, leave the
  least conditional variance [4]_. [2]_ takes the nearest in a cover tree of correlations: points
  that tell the same are taken all the same.
- Inducing points minimise the prior variance that is left, greedily, in place of k-means++.
- Predictions condition on observations alone, as the default of [2]_ does, and neighbours fade with
  their distance: they are continuous in x, and of two rows jointly the same whatever rows come
  along.

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes,
   Journal of the Royal Statistical Society B 50.
.. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
   Gaussian processes.
.. [3] Katzfuss and Guinness (2021), A general framework for Vecchia approximations of Gaussian
   processes, Statistical Science 36.
.. [4] Huan, Guinness, Katzfuss, Owhadi and Schaefer (2023), Sparse inverse Cholesky factorization
   of dense kernel matrices by greedy conditional selection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from skgp.data import Data
from skgp.inference.vecchia.posterior import VecchiaPosterior
from skgp.kernels.expression import theta_places
from skgp.learning.vecchia import (
    VecchiaSettings,
    approximation,
    fit_joint_likelihood,
    ordered,
)
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class VecchiaFit:
    """A fitted model."""

    posterior: VecchiaPosterior
    kernel: Any  # noise included
    noise: float  # variance of an observation of weight 1
    log_marginal_likelihood: float  # of all observations, in nats of the targets given
    n_iter: int = 1  # evaluations of objectives of the search
    history: list[float] = field(default_factory=list)  # log-density an observation, by evaluation


def fit_vecchia(
    kernels: list,
    data: Data,
    settings: VecchiaSettings,
    *,
    ordering: str = "random",
    n_predictive: int,
    learns: bool = True,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> VecchiaFit:
    """Fit one kernel, or the best of several, to observations with Gaussian noise.

    Parameters
    ----------
    kernels : list of sklearn kernel expressions with WhiteKernels
    data : Data
        float64, inputs distinct; y of shape (n,) or, of several targets that share the kernel,
        (n, c); of about zero mean and unit variance.
    settings : VecchiaSettings
    ordering : {"random", "maximin"}
    n_predictive : int
        Neighbours of a prediction.
    learns : bool
        Whether hyper-parameters move; if not, those of the first kernel hold.
    generator : torch.Generator
        On the CPU.
    callback : callable, optional
        Of :func:`skgp.learning.vecchia.fit_joint_likelihood`.
    """
    kernel, history = kernels[0], []
    data = ordered(kernel, data, ordering, generator)  # step 1
    if learns:  # step 2
        found = fit_joint_likelihood(
            kernels, data, settings, generator=generator, callback=callback
        )
        kernel, history = found.kernel, found.history
    evidence = approximation(kernel, data, settings, generator)  # step 3
    if evidence.group.shape[1] == 1:  # nothing is left to neighbours
        n_predictive = 1
    posterior, density = evidence.posterior(kernel.theta, n_predictive)  # step 4
    level = theta_places(kernel)[2]
    return VecchiaFit(posterior, kernel, level, density, max(1, len(history)), history)
