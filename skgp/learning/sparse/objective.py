r"""What is minimised: the loss of the rows and :math:`\beta` times the divergence from the prior.

.. math:: \mathcal L = \sum_i w_i\, \ell_i + \beta\, \mathrm{KL}(q(u) \,\|\, p(u))

==============  ======================================================  =========================
objective       :math:`\ell_i`                                          computed by
==============  ======================================================  =========================
"log_loss"      :math:`-\log E_{q(f_i)}[p(y_i \mid f_i)]`, the loss      ``log_predictive``, or a
                that the prediction is judged by                        sampled gradient
"elbo"          :math:`-E_{q(f_i)}[\log p(y_i \mid f_i)]`                ``expected_log_prob``
"fitc"          --                                                      `collapsed.fitc_loss`
"square_loss"   :math:`\frac12 (\mu_i - y_i)^2`                          `square_loss.square_loss`
==============  ======================================================  =========================
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.data import Data
from skgp.likelihoods import Likelihood
from skgp.likelihoods.log_expectation import log_expectation_loss

__all__ = ["STOCHASTIC_GRADIENTS", "Objective", "data_loss"]

STOCHASTIC_GRADIENTS = ("bmc", "smooth_bmc", "ups")


@dataclass(frozen=True)
class Objective:
    """What to minimise and over what.

    Attributes
    ----------
    family : Likelihood
        The likelihood and its free parameters.
    name : {"log_loss", "elbo", "fitc", "square_loss"}
    beta : float
        Weight of the divergence, not negative.
    unit : float
        Of "square_loss", the noise variance in units of the prior variance at which beta counts as
        1 (see :mod:`skgp.inference.sparse.square_loss`).
    gradient : {"exact", "bmc", "smooth_bmc", "ups"}
        Of the log-expectations of "log_loss"; "exact" is a closed form or quadrature.
    n_gradient_samples : int
        Samples of the others, for each row and iteration.
    learn_kernel, learn_likelihood, learn_inducing : bool
        Whether theta, the parameters of the likelihood and Z are minimised over too.
    """

    family: Likelihood
    name: str = "log_loss"
    beta: float = 1.0
    unit: float = 1.0
    gradient: str = "exact"
    n_gradient_samples: int = 10
    learn_kernel: bool = True
    learn_likelihood: bool = True
    learn_inducing: bool = True

    @property
    def stochastic(self) -> bool:
        """Whether its gradients are random."""
        return self.name == "log_loss" and self.gradient in STOCHASTIC_GRADIENTS


def data_loss(
    objective: Objective,
    likelihood: Likelihood,
    data: Data,
    mean: Tensor,
    var: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Weighted sum of the rows' losses under q(f), a scalar in nats.

    Parameters
    ----------
    objective : Objective
        "log_loss" or "elbo".
    likelihood : Likelihood
    data : Data
    mean, var : Tensor of shape (n, c)
        Of the latent functions.
    generator : torch.Generator, optional
        For gradients by sampling.

    Returns
    -------
    Tensor of shape ()
        Differentiable in mean, var and the parameters of the likelihood.
    """
    likelihood = likelihood.at(data.offset)
    if objective.name == "elbo":
        return -data.weighted_sum(likelihood.expected_log_prob(data.y, mean, var))
    if not objective.stochastic:
        return -data.weighted_sum(likelihood.log_predictive(data.y, mean, var))
    losses = log_expectation_loss(
        likelihood,
        data.y,
        mean,
        var,
        gradient=objective.gradient,
        n_samples=objective.n_gradient_samples,
        generator=generator,
    )
    return data.weighted_sum(losses)
