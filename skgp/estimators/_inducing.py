"""Inducing points: where the kernels of a sparse basis are centred."""

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._backend import to_tensor
from skgp.estimators._warnings import warn_caller
from skgp.inference.inducing import greedy_variance
from skgp.kernels.distances import origin
from skgp.kernels.length_scales import length_scales

# Rows that the clustering looks at, as a multiple of the centres, over all minibatches.
_PASSES = 2
_BATCH_ROWS = 4_096
# Rows among which points are chosen greedily.
_GREEDY_ROWS = 20_000
# Length scales beyond which all rows are equally far.
_BEYOND = 1e6

#: Ways of choosing inducing points.
INITIALISERS = ("k-means", "random", "greedy")


def inducing_points(
    X: np.ndarray,
    n_points: int,
    kernel: Kernel,
    *,
    init: str = "k-means",
    sample_weight: np.ndarray | None = None,
    random_state: np.random.RandomState,
) -> np.ndarray:
    """Return inducing points for the rows of X.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    n_points : int
        All distinct rows are returned if there are no more.
    kernel : Kernel
        Without noise.
    init : {"k-means", "random", "greedy"}, default="k-means"
        Centres of clusters; rows at random; or one by one the row of which the points before it
        explain the least variance.
    sample_weight : ndarray of shape (n,), optional
        Of the rows, for the clusters.
    random_state : RandomState

    Returns
    -------
    ndarray of shape (at most n_points, d)
    """
    if init == "k-means":
        return cluster_centres(
            X, n_points, kernel, sample_weight=sample_weight, random_state=random_state
        )
    distinct = distinct_rows(X)
    if n_points >= len(distinct):
        return X[distinct]
    if init == "random":
        return X[random_state.choice(distinct, n_points, replace=False)]
    if len(distinct) > _GREEDY_ROWS:
        distinct = random_state.choice(distinct, _GREEDY_ROWS, replace=False)
    rows = X[distinct]
    return rows[greedy_variance(kernel, to_tensor(rows), n_points).numpy()]


def warn_of_few_rows(n_inducing: int, n_distinct: int) -> None:
    """Warn that there are fewer distinct rows than inducing points asked for."""
    if n_inducing > n_distinct:
        warn_caller(
            f"n_inducing={n_inducing} is more than the {n_distinct} distinct rows of X; it is "
            f"lowered to {n_distinct}. Give n_inducing={n_distinct} or less to avoid this warning.",
        )


def cluster_centres(
    X: np.ndarray,
    n_points: int,
    kernel: Kernel,
    *,
    sample_weight: np.ndarray | None = None,
    random_state: np.random.RandomState,
) -> np.ndarray:
    """Return centres of clusters of the rows, in the metric of the kernel.

    Clusters that are small in the kernel's own length scales leave less of the prior's variance
    unexplained than as many rows at random.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    n_points : int
        All distinct rows are returned if there are no more.
    kernel : Kernel
        Without noise.
    sample_weight : ndarray of shape (n,), optional
    random_state : RandomState

    Returns
    -------
    ndarray of shape (at most n_points, d)
        Distinct.

    Notes
    -----
    About two passes over the rows, ``O(n n_points d)``.
    """
    distinct = distinct_rows(X)
    if n_points >= len(distinct):
        return X[distinct]
    scale, middle = length_scales(kernel, to_tensor(X)).numpy(), origin(to_tensor(X)).numpy()
    # Far from 0 they would lose their digits.
    rows = np.clip((X - middle) / scale, -_BEYOND, _BEYOND).astype(np.float32)
    kmeans = MiniBatchKMeans(
        n_points,
        init="random",
        n_init=1,
        max_iter=_PASSES,
        batch_size=max(_BATCH_ROWS, n_points),
        max_no_improvement=None,
        reassignment_ratio=0.0,
        compute_labels=False,
        random_state=random_state,
    ).fit(rows, sample_weight=sample_weight)
    centres = kmeans.cluster_centers_.astype(np.float64) * scale + middle
    return centres[distinct_rows(centres)]


def distinct_rows(X: np.ndarray) -> np.ndarray:
    """Return the index of the first of each set of equal rows, in order."""
    X = np.ascontiguousarray(X + 0.0)  # -0. becomes 0., for rows are compared byte by byte
    first: dict[int, int] = {}
    for index, row in enumerate(X):
        first.setdefault(hash(row.tobytes()), index)
    return np.fromiter(first.values(), dtype=np.int64)
