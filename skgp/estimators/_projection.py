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
from skgp.learning.selection import LABEL_SHARE, held_out_rows, improves

#: Columns beyond which a default kernel is one of principal components, and how many it takes.
MANY_COLUMNS = 50
_BLOCK = 8_192
# Rows among which neighbours are looked for, of how many, and how many.
_CANDIDATES, _COMPARED, _NEIGHBORS = 10_000, 2_000, 10
_N_ERRORS = 2.0  # by which columns divided by their spread must predict better
# Rows of a trial fit and rows held out for it, at most; what a trial has of the fit itself.
_TRIAL_ROWS, _JUDGED = 500, 1_000
_OF_THE_FIT = (
    "method likelihood link degrees_of_freedom normalize_y optimizer device dtype n_jobs".split()
)


@dataclass(frozen=True)
class Projection:
    """Inputs minus their mean, on a few directions.

    Attributes
    ----------
    mean : ndarray of shape (d,)
    directions : ndarray of shape (d, p)
        Orthonormal, or after division of its rows by the spreads of the columns.
    """

    mean: np.ndarray
    directions: np.ndarray

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
    """Return the directions of greatest variance.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    n_directions : int
        At most d.
    sample_weight : ndarray of shape (n,), optional
    targets : ndarray of shape (n, c), optional
        By which to choose whether the columns are divided by their standard deviations first; by
        default they are not.
    random_state : RandomState, optional
        Draws the rows that choose; needed with `targets`.

    Returns
    -------
    Projection

    Notes
    -----
    From the d x d covariance, ``O(n d^2 + d^3)``. Each direction has its largest entry positive:
    the result does not depend on the library's choice of sign.
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
    for start in range(0, len(X), _BLOCK):
        rows = X[start : start + _BLOCK] - mean
        weighted = (
            rows if sample_weight is None else rows * sample_weight[start : start + _BLOCK, None]
        )
        total += weighted.T @ rows
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
    rows = random_state.permutation(distinct_rows(X))[:_CANDIDATES]
    if len(rows) <= 2 * _NEIGHBORS:
        return plain
    losses = [_left_out_losses(each(X[rows]), targets[rows]) for each in (plain, scaled)]
    clear = improves(losses[1], losses[0], n_errors=_N_ERRORS, least_effect=0.0)
    return scaled if clear else plain


def _left_out_losses(Z: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Squared errors (p,) of some rows predicted by the mean of those nearest to each."""
    p = min(_COMPARED, len(Z))
    search = NearestNeighbors(n_neighbors=_NEIGHBORS + 1, algorithm="brute").fit(Z)
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

    Parameters
    ----------
    estimator : SWSGPRegressor or SWSGPClassifier
        Whose fits, with default kernels and all else of the default size, are compared.
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
        Numbers, counts or classes.
    sample_weight, exposure : ndarray of shape (n,), optional
    seed : int

    Returns
    -------
    bool
        By the rule of :func:`skgp.learning.selection.choose`; the columns are the simpler.
    """
    labels = is_classifier(estimator)
    random = np.random.RandomState(seed)
    judged = held_out_rows(y, min(len(X) // 3, _JUDGED), random, X=X, classes=labels)
    rows = np.flatnonzero(~judged)
    if len(rows) > _TRIAL_ROWS:
        left = held_out_rows(y[rows], len(rows) - _TRIAL_ROWS, random, X=X[rows], classes=labels)
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
