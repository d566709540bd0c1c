"""Variational distributions over weights, and their optima in closed form."""

from skgp.inference.variational.gaussian import PredictionAccumulator, WeightGaussian
from skgp.inference.variational.optimum import (
    Optimum,
    optimal_gaussian,
    optimal_std,
    posterior_precision,
)

__all__ = [
    "Optimum",
    "PredictionAccumulator",
    "WeightGaussian",
    "optimal_gaussian",
    "optimal_std",
    "posterior_precision",
]
