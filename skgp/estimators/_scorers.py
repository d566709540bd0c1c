"""Scores that scikit-learn lacks, as callables for ``scoring=``."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from sklearn.pipeline import Pipeline


def log_predictive_density_scorer(
    estimator, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
) -> float:
    """Score a fitted estimator by its mean log predictive density; greater is better.

    Meant as ``scoring=log_predictive_density_scorer`` of ``GridSearchCV``, ``cross_validate``,
    ``permutation_importance`` and their like. For a classifier it is minus the log-loss.

    Parameters
    ----------
    estimator : estimator
        With a method ``log_predictive_density``; or a ``Pipeline`` that ends in one, whose other
        steps transform X first; or a search over either, of which the best is judged.
    X : array-like of shape (n, d)
    y : array-like of shape (n,)
        Targets, or labels that the classifier knows.
    sample_weight : array-like of shape (n,) or None, default=None

    Returns
    -------
    float
        Nats per observation.

    Raises
    ------
    TypeError
        If the estimator, or the last step of the pipeline, has no such method.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import GridSearchCV
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from skgp import DLMGPClassifier
    >>> from skgp.estimators import log_predictive_density_scorer
    >>> pipeline = make_pipeline(StandardScaler(), DLMGPClassifier(max_iter=20, random_state=0))
    >>> grid = {"dlmgpclassifier__n_inducing": [1, 10]}
    >>> search = GridSearchCV(pipeline, grid, scoring=log_predictive_density_scorer, cv=2)
    >>> search.fit(*load_iris(return_X_y=True)).best_params_
    {'dlmgpclassifier__n_inducing': 10}
    """
    return float(np.average(_log_density(estimator, X, y), weights=sample_weight))


def _log_density(estimator, X, y) -> np.ndarray:
    """Log predictive density of each row, shape (n,), of whatever wraps an estimator of ours."""
    if hasattr(estimator, "log_predictive_density"):
        return estimator.log_predictive_density(X, y)
    if hasattr(estimator, "best_estimator_"):
        return _log_density(estimator.best_estimator_, X, y)
    if isinstance(estimator, Pipeline):
        # A pipeline of no steps cannot transform.
        inputs = estimator[:-1].transform(X) if len(estimator) > 1 else X
        return _log_density(estimator[-1], inputs, y)
    raise TypeError(
        f"log_predictive_density_scorer needs an estimator with log_predictive_density, or a "
        f"Pipeline or a fitted search (with refit) that ends in one; got "
        f"{type(estimator).__name__}. Of other classifiers scoring='neg_log_loss' is the same."
    )
