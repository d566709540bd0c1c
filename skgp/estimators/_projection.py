"""Principal components: what inputs of very many columns are reduced to.

Pixels and counts share a unit, and a column that hardly varies says little. Where columns have
units of their own, the one of the largest numbers would be all that is seen. Rows at hand tell
which it is: their targets are predicted from neighbours in the components of the columns as they
are, and of the columns divided by their standard deviations.

And where a few columns matter, of many that vary as much, no component shows them. So components
are compared with the columns themselves, by fits to some rows (`components_predict_better`).
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import eigh
from sklearn.base import is_classifier
from sklearn.neighbors import NearestNeighbors

from skgp.estimators._inducing import distinct_rows
from skgp.estimators.defaults import (
    MANY_COLUMNS,
    SCATTER_ROWS,
    SPREAD_CANDIDATES,
    SPREAD_COMPARED,
    SPREAD_ERRORS,
    SPREAD_NEIGHBORS,
    TRIAL_JUDGED,
    TRIAL_ROWS,
)
from skgp.learning.selection import LABEL_SHARE, held_out_rows, improves

# What a trial has of the fit itself.
_OF_THE_FIT = (
    "method likelihood link degrees_of_freedom normalize_y optimizer device dtype n_jobs".split()
)


@dataclass(frozen=True)
class Projection:
    """Inputs minus their mean, on a few directions."""

    mean: np.ndarray  # (d,)
    directions: np.ndarray  # (d, p); orthonormal, or with rows divided by the columns' spreads

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Return the coordinates of rows X (n, d), shape (n, p)."""
        return (X - self.mean) @ self.directions


def principal_components(
    X: np.ndarray,
    n_directions: int,
    sample_weight: np.ndarray | None = None,
    *,
    targets: np.ndarray | None = None,
    random_state: np.random.RandomState | None = None,
) -> Projection:
    """The directions of greatest variance of X (n, d), at most d of them.

    `targets` (n, c) choose whether the columns are divided by their standard deviations first, by
    rows that `random_state` draws; without them they are not. From the d x d covariance,
    O(n d^2 + d^3). Each direction has its largest entry positive: the result does not depend on the
    library's choice of sign.
    """
    mean = np.average(X, axis=0, weights=sample_weight)
    covariance = _scatter(X, mean, sample_weight)
    std = np.sqrt(np.diag(covariance) / (len(X) if sample_weight is None else sample_weight.sum()))
    # Rounding leaves a constant column a spread of about eps times its value.
    std = np.where(std > 1e-12 * np.abs(mean), std, np.inf)
    plain = Projection(mean, _leading(covariance, n_directions))
    if targets is None or random_state is None:
        return plain
    inverse = 1 / std[:, None]
    scaled = _leading(covariance * inverse * inverse.T, n_directions) * inverse
    return _choose(plain, Projection(mean, scaled), X, targets, random_state)


def _scatter(X: np.ndarray, mean: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
    """Sum of squares and products (d, d) of rows less their mean."""
    total = np.zeros((X.shape[1], X.shape[1]))
    for start in range(0, len(X), SCATTER_ROWS):
        rows = X[start : start + SCATTER_ROWS] - mean
        weight = 1.0 if sample_weight is None else sample_weight[start : start + SCATTER_ROWS, None]
        total += (weight * rows).T @ rows
    return total


def _leading(covariance: np.ndarray, n_directions: int) -> np.ndarray:
    """Eigenvectors (d, n_directions) of the largest eigenvalues, those first."""
    d = len(covariance)
    vectors = eigh(covariance, subset_by_index=[d - n_directions, d - 1])[1][:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    return vectors * np.sign(vectors[largest, np.arange(n_directions)])


def _choose(
    plain: Projection,
    scaled: Projection,
    X: np.ndarray,
    targets: np.ndarray,
    random_state: np.random.RandomState,
) -> Projection:
    """The second projection if neighbours in it predict clearly better, else the first.

    Copies of a row would predict each other in any coordinates, and count once.
    """
    rows = random_state.permutation(distinct_rows(X))[:SPREAD_CANDIDATES]
    if len(rows) <= 2 * SPREAD_NEIGHBORS:
        return plain
    losses = [_left_out_losses(each(X[rows]), targets[rows]) for each in (plain, scaled)]
    clear = improves(losses[1], losses[0], n_errors=SPREAD_ERRORS, least_effect=0.0)
    return scaled if clear else plain


def _left_out_losses(Z: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Squared errors (p,) of some rows predicted by the mean of those nearest to each."""
    p = min(SPREAD_COMPARED, len(Z))
    search = NearestNeighbors(n_neighbors=SPREAD_NEIGHBORS + 1, algorithm="brute").fit(Z)
    nearest = search.kneighbors(Z[:p], return_distance=False)
    others = (nearest != np.arange(p)[:, None])[..., None]
    predicted = (targets[nearest] * others).sum(1) / others.sum(1)
    return ((predicted - targets[:p]) ** 2).sum(1)


def components_predict_better(
    estimator: Any,
    X: np.ndarray,
    y: np.ndarray,
    sample_weight: np.ndarray | None = None,
    *,
    exposure: np.ndarray | None = None,
    seed: int = 0,
) -> bool:
    """Whether rows held out are predicted better from principal components than from columns.

    By fits of an SWSGP estimator with default kernels, and all else of the default size, and the
    rule of :func:`skgp.learning.selection.choose`; the columns are the simpler.
    """
    labels = is_classifier(estimator)
    random = np.random.RandomState(seed)
    judged = held_out_rows(y, min(len(X) // 3, TRIAL_JUDGED), random, X=X, classes=labels)
    rows = np.flatnonzero(~judged)
    if len(rows) > TRIAL_ROWS:
        left = held_out_rows(y[rows], len(rows) - TRIAL_ROWS, random, X=X[rows], classes=labels)
        rows = rows[~left]
    if not judged.any():
        return False
    given = {"sample_weight": sample_weight, "exposure": exposure}
    given = {name: values[rows] for name, values in given.items() if values is not None}
    asked = {"exposure": exposure[judged]} if exposure is not None else {}
    parameters = estimator.get_params(deep=False)
    parameters = {name: parameters[name] for name in _OF_THE_FIT if name in parameters}
    losses = []
    for projection in (None, min(MANY_COLUMNS, len(rows))):
        trial = type(estimator)(projection=projection, random_state=seed, **parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the fit itself does warns by itself
            trial.fit(X[rows], y[rows], **given)
            losses.append(-trial.log_predictive_density(X[judged], y[judged], **asked))
    weight = None if sample_weight is None else sample_weight[judged]
    share = LABEL_SHARE if labels else None
    return improves(losses[1], losses[0], weight=weight, least_share=share)
