"""The scikit-learn estimators of the models."""

from skgp.estimators._predictive import log_predictive_density_scorer

__all__ = ["log_predictive_density_scorer"]
