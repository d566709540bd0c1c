"""Inducing points: where the kernels of a sparse basis are centred."""

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._backend import to_tensor
from skgp.estimators._warnings import warn_caller
from skgp.estimators.defaults import CLUSTER_BATCH, CLUSTER_PASSES, FARTHEST, GREEDY_ROWS
from skgp.inference.inducing import greedy_variance
from skgp.kernels.distances import origin
from skgp.kernels.scales import length_scales

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
    """Inducing points (at most n_points, d) for the rows of X (n, d): all that are distinct if few.

    Centres of clusters, of rows of some weights; rows at random; or one by one the row of which the
    points before it explain the least variance.
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
    if len(distinct) > GREEDY_ROWS:
        distinct = random_state.choice(distinct, GREEDY_ROWS, replace=False)
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
    """Distinct centres of clusters of the rows of X (n, d), in the metric of a kernel.

    Clusters that are small in the kernel's own length scales leave less of the prior's variance
    unexplained than as many rows at random. About two passes over the rows, O(n n_points d).
    """
    distinct = distinct_rows(X)
    if n_points >= len(distinct):
        return X[distinct]
    scale, middle = length_scales(kernel, to_tensor(X)).numpy(), origin(to_tensor(X)).numpy()
    # Far from 0 they would lose their digits.
    rows = np.clip((X - middle) / scale, -FARTHEST, FARTHEST).astype(np.float32)
    kmeans = MiniBatchKMeans(
        n_points,
        init="random",
        n_init=1,
        max_iter=CLUSTER_PASSES,
        batch_size=max(CLUSTER_BATCH, n_points),
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


def class_centres(
    X: np.ndarray,
    labels: np.ndarray,
    n_points: int,
    kernel: Kernel,
    *,
    sample_weight: np.ndarray | None = None,
    random_state: np.random.RandomState,
) -> np.ndarray:
    """Centres of clusters (M, d) of the rows of one class after the other; `labels` (n,) are codes.

    Where classes meet, a centre of rows of both would stand for neither. Classes share the points
    in proportion to the weights of their rows, and get one at least.
    """
    rows = distinct_rows(X)
    if n_points >= len(rows):
        return X[rows]
    weight = np.ones(len(X)) if sample_weight is None else sample_weight
    shares = np.bincount(labels, weights=weight)
    edges = np.round(np.append(0, np.cumsum(shares)) / shares.sum() * n_points).astype(int)
    centres = [
        cluster_centres(
            X[labels == label],
            max(size, 1),
            kernel,
            sample_weight=weight[labels == label],
            random_state=random_state,
        )
        for label, size in enumerate(np.diff(edges))
        if (labels == label).any()
    ]
    centres = np.concatenate(centres)
    return centres[distinct_rows(centres)]
