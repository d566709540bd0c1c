"""Principal components: what inputs of very many columns are reduced to."""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

#: Columns beyond which a default kernel is one of principal components, and how many it takes.
MANY_COLUMNS = 50
_BLOCK = 8_192


@dataclass(frozen=True)
class Projection:
    """Inputs minus their mean, on orthonormal directions.

    Attributes
    ----------
    mean : ndarray of shape (d,)
    directions : ndarray of shape (d, p)
    """

    mean: np.ndarray
    directions: np.ndarray

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Return the coordinates of rows X (n, d), shape (n, p)."""
        return (X - self.mean) @ self.directions


def principal_components(
    X: np.ndarray, n_directions: int, sample_weight: np.ndarray | None = None
) -> Projection:
    """Return the directions of greatest variance.

    Parameters
    ----------
    X : ndarray of shape (n, d)
        In units that may be compared, as pixels and counts are.
    n_directions : int
        At most d.
    sample_weight : ndarray of shape (n,), optional

    Returns
    -------
    Projection

    Notes
    -----
    From the d x d covariance, ``O(n d^2 + d^3)``. Each direction has its largest entry positive:
    the result does not depend on the library's choice of sign.
    """
    mean = np.average(X, axis=0, weights=sample_weight)
    covariance = np.zeros((X.shape[1], X.shape[1]))
    for start in range(0, len(X), _BLOCK):
        rows = X[start : start + _BLOCK] - mean
        weighted = (
            rows if sample_weight is None else rows * sample_weight[start : start + _BLOCK, None]
        )
        covariance += weighted.T @ rows
    d = len(covariance)
    values = eigh(covariance, subset_by_index=[d - n_directions, d - 1])[1][:, ::-1]
    largest = np.abs(values).argmax(axis=0)
    return Projection(mean, values * np.sign(values[largest, np.arange(n_directions)]))
