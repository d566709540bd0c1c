"""Likelihoods p(y | f): one contract, quadrature by default, closed forms where they exist."""

from skgp.likelihoods.base import Likelihood
from skgp.likelihoods.bernoulli import Bernoulli
from skgp.likelihoods.gaussian import Gaussian
from skgp.likelihoods.laplace import Laplace

__all__ = ["Bernoulli", "Gaussian", "Laplace", "Likelihood"]
