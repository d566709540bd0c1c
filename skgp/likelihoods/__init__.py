"""Likelihoods p(y | f): one contract, quadrature by default, closed forms where they exist."""

from skgp.likelihoods.base import Likelihood
from skgp.likelihoods.gaussian import Gaussian

__all__ = ["Gaussian", "Likelihood"]
