"""Variational distributions over weights, their optima in closed form, and their divergences."""

from skgp.inference.variational.gaussian import PredictionAccumulator, WeightGaussian
from skgp.inference.variational.kl import covariance_objective, elbo, kl_to_prior, mean_objective
from skgp.inference.variational.optimum import (
    Optimum,
    optimal_columns,
    optimal_gaussian,
    optimal_std,
    posterior_precision,
)

__all__ = [
    "Optimum",
    "PredictionAccumulator",
    "WeightGaussian",
    "covariance_objective",
    "elbo",
    "kl_to_prior",
    "mean_objective",
    "optimal_columns",
    "optimal_gaussian",
    "optimal_std",
    "posterior_precision",
]
