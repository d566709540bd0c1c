r"""Rows that come in batches: the posterior of the last is the prior of the next.

With hyper-parameters and inducing points fixed, a batch B changes q to

.. math:: q_B = \arg\min_q \sum_{i \in B} w_i \ell_i + \gamma \beta\, \mathrm{KL}(q \,\|\, q_{B-1}),

which for Gaussian noise and the objectives with closed forms gives the same posterior as all rows
at once, and otherwise one near it [1]_. That takes :math:`\gamma = 1`. Under the log-loss of
numbers, though, the width of :math:`q_{B-1}` stands for noise and for what the model lacks, not for
what is unknown of u: as a prior it is too weak, and a batch overrules it. There
:math:`\gamma = 10`, which on rows of Gaussian and Student-t noise and on counts came nearer to all
rows at once than 1 did. Labels keep :math:`\gamma = 1`: classes may come late. The evidence
bound in place of the log-loss does far worse: it knows only the noise, which the log-loss has
driven to nearly nothing.

In the coordinates of :mod:`skgp.inference.sparse.reference` around :math:`q_{B-1}` the divergence
is again that from N(0, I).

References
----------
.. [1] Broderick, Boyd, Wibisono, Wilson and Jordan (2013), Streaming variational Bayes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.sparse.collapsed import natural_parameters, posterior_from_precision
from skgp.inference.sparse.reference import ReferenceGaussian, kl_from_standard_normal
from skgp.inference.sparse.sparse import SparseState, latent_moments
from skgp.learning.sparse.objective import Objective, data_loss
from skgp.learning.sparse.training import LEAST_BETA
from skgp.models.dlm.fit import has_closed_form
from skgp.optim.lbfgs import minimize_lbfgs

__all__ = ["LOG_LOSS_WEIGHT", "update"]

#: Gamma of the log-loss of numbers.
LOG_LOSS_WEIGHT = 10.0


def update(
    state: SparseState, data: Data, objective: Objective, *, max_iter: int, tol: float
) -> SparseState:
    """The posterior after a batch.

    Parameters
    ----------
    state : SparseState
        Before it, after a fit.
    data : Data
        The batch.
    objective : Objective
        "square_loss" counts as "elbo" under the noise that its variances were calibrated with.
    max_iter : int
    tol : float
        As for :func:`~skgp.learning.sparse.training.fit_posterior`.

    Returns
    -------
    SparseState
        O(n M^2 c) an iteration; one where there is a closed form.
    """
    if has_closed_form(objective):
        with torch.no_grad():
            return _conjugate(state, data, objective)
    objective = replace(objective, gradient="exact")
    reference = ReferenceGaussian(state.mean, state.root)
    likelihood = objective.family.with_parameters(state.likelihood)
    weak = objective.name == "log_loss" and likelihood.is_numeric
    weight = objective.beta * (LOG_LOSS_WEIGHT if weak else 1.0)

    def loss(parts: dict[str, Tensor]) -> Tensor:
        mean, root = reference.posterior(**parts)
        moments = latent_moments(state.kernel, data.X, state.Z, mean, root, offset=state.offset)
        divergence = kl_from_standard_normal(parts["alpha"], reference.triangle(parts["triangle"]))
        rows = data_loss(objective, likelihood, data, *moments)
        return (rows + weight * divergence) / data.total

    found = minimize_lbfgs(loss, reference.start(), max_iter=max_iter, tol=tol)
    with torch.no_grad():
        return state.with_posterior(*reference.posterior(**found.parameters))


def _conjugate(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """Add the natural parameters of the batch to those of the posterior."""
    noise = objective.family.gaussian_noise(state.likelihood)
    beta = max(objective.beta, LEAST_BETA) if objective.name == "elbo" else 1.0
    precision, projection = natural_parameters(
        state.kernel, data, state.Z, noise, beta=beta, fitc=objective.name == "fitc"
    )
    before = torch.cholesky_inverse(state.root[0])  # S^-1 of S = R R^T
    projection = projection + before @ state.mean
    return state.with_posterior(*posterior_from_precision(before + precision, projection))
