"""Scores that scikit-learn lacks, as callables for ``scoring=``."""

import numpy as np
from numpy.typing import ArrayLike


def log_predictive_density_scorer(
    estimator, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
) -> float:
    """Score a fitted estimator by its mean log predictive density; greater is better.

    Meant as ``scoring=log_predictive_density_scorer`` of ``GridSearchCV``, ``cross_validate``,
    ``permutation_importance`` and their like. For a classifier it is minus the log-loss.

    Parameters
    ----------
    estimator : estimator with a method ``log_predictive_density``
    X : array-like of shape (n, d)
    y : array-like of shape (n,)
        Targets, or labels that the classifier knows.
    sample_weight : array-like of shape (n,) or None, default=None

    Returns
    -------
    float
        Nats per observation.
    """
    return float(np.average(estimator.log_predictive_density(X, y), weights=sample_weight))
