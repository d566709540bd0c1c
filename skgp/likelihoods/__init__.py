"""Likelihoods p(y | f): one contract, quadrature by default, closed forms where they exist."""

from skgp.likelihoods.base import Likelihood, NumericLikelihood
from skgp.likelihoods.bernoulli import Bernoulli
from skgp.likelihoods.closed_form import Gaussian, Laplace
from skgp.likelihoods.poisson import Poisson
from skgp.likelihoods.student_t import StudentT

__all__ = [
    "Bernoulli",
    "Gaussian",
    "Laplace",
    "Likelihood",
    "NumericLikelihood",
    "Poisson",
    "StudentT",
]
