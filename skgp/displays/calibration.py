"""Calibration of classifiers: the number that goes with scikit-learn's reliability diagram.

The diagram itself is `sklearn.calibration.CalibrationDisplay`, which draws any classifier here.
"""

from __future__ import annotations

from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike


def expected_calibration_error(
    y_true: ArrayLike,
    prob: ArrayLike,
    n_bins: int = 15,
    *,
    labels: ArrayLike | None = None,
) -> float:
    r"""Mean distance between what a classifier says and how often it is right.

    .. math:: \mathrm{ECE} = \sum_{b=1}^{B} \frac{n_b}{n} \,
              \Big| \frac{1}{n_b} \sum_{i \in b} (h_i - p_i) \Big|,

    over bins of equal width in p [1]_. Given one column, :math:`p_i` is the probability of the
    second class and :math:`h_i` whether observation i is of it. Given one column a class,
    :math:`p_i` is the probability of the likeliest class and :math:`h_i` whether that is right.

    Parameters
    ----------
    y_true : array-like of shape (n,)
        Labels of observations that were not trained on.
    prob : array-like of shape (n,) or (n, n_classes)
        As of ``predict_proba(X)[:, 1]`` or ``predict_proba(X)``.
    n_bins : int, default=15
    labels : array-like of shape (n_classes,) or None, default=None
        Label of each column of `prob` (``estimator.classes_``), two for a single column. None
        takes the sorted labels in `y_true`.

    Returns
    -------
    float
        Between 0 and 1. Chance alone makes it about ``0.3 * sqrt(n_bins / n)`` for a classifier
        that is calibrated, less where it is sure.

    Raises
    ------
    ValueError
        If shapes do not fit, `prob` leaves [0, 1], `n_bins` is not a positive integer, or labels
        and columns do not match.

    See Also
    --------
    sklearn.calibration.CalibrationDisplay : Draws the bins of a single column.

    References
    ----------
    .. [1] Naeini, Cooper and Hauskrecht (2015), Obtaining well calibrated probabilities using
       Bayesian binning; Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural
       networks.

    Examples
    --------
    >>> round(expected_calibration_error([0, 1, 1, 1], [0.1, 0.7, 0.7, 0.7]), 3)
    0.25
    """
    if not isinstance(n_bins, Integral) or n_bins < 1:
        raise ValueError(f"n_bins must be a positive integer; got {n_bins!r}.")
    y, p = np.asarray(y_true), np.asarray(prob, dtype=np.float64)
    if y.ndim != 1 or p.ndim not in (1, 2) or len(p) != len(y) or not len(y):
        raise ValueError(
            "y_true must be of shape (n,) and prob of shape (n,) or (n, n_classes), n > 0; got "
            f"{y.shape} and {p.shape}."
        )
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"prob must lie in [0, 1]; got values from {p.min():.3g} to {p.max():.3g}."
        )
    hit, confidence = _hits(y, p, _column_labels(y, p, labels))
    # Intervals closed on the right, as those of sklearn.calibration.calibration_curve.
    bins = np.searchsorted(np.linspace(0, 1, n_bins + 1)[1:-1], confidence)
    excess = np.bincount(bins, weights=hit - confidence, minlength=n_bins)
    return float(np.abs(excess).sum() / len(y))


def _column_labels(y: np.ndarray, p: np.ndarray, labels: ArrayLike | None) -> np.ndarray:
    """Return the label of each class, after checking that they are as many as the columns."""
    known = np.unique(y) if labels is None else np.asarray(labels)
    n_classes = 2 if p.ndim == 1 else p.shape[1]
    if known.shape != (n_classes,):
        source = "y_true holds" if labels is None else "labels has"
        raise ValueError(
            f"prob of shape {p.shape} needs {n_classes} labels; {source} {known.tolist()}. "
            "Give labels=estimator.classes_."
        )
    unknown = np.setdiff1d(y, known)
    if unknown.size:
        raise ValueError(f"y_true holds {unknown.tolist()}, not among labels={known.tolist()}.")
    return known


def _hits(y: np.ndarray, p: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each prediction came true and its probability, shapes (n,)."""
    if p.ndim == 1:
        return y == labels[1], p
    return y == labels[p.argmax(axis=1)], p.max(axis=1)
