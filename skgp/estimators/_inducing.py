"""Inducing points: where the kernels of a sparse basis are centred."""

import numpy as np
from sklearn.cluster import MiniBatchKMeans
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._backend import to_tensor
from skgp.kernels import gram, gram_diag

# Rows that the clustering looks at, as a multiple of the centres, over all minibatches.
_PASSES = 2
_BATCH_ROWS = 4_096


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
    scale, middle = length_scales(kernel, X), X.mean(axis=0)
    rows = ((X - middle) / scale).astype(np.float32)  # far from 0 they would lose their digits
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


def length_scales(kernel: Kernel, X: np.ndarray) -> np.ndarray:
    r"""Return how far each column must move for the kernel to notice, shape (d,).

    .. math:: \ell_j = \delta_j \big/ \sqrt{-2 \log \rho(x, x + \delta_j e_j)},

    averaged over some rows x, with :math:`\rho` the kernel's correlation and :math:`\delta_j` a
    tenth of the spread of column j: the length scale of an RBF kernel, and its likeness in any
    other expression. Columns that the kernel ignores, or that are constant, get 1e6 times the
    largest.
    """
    rows = X[:: -(-len(X) // 16)]
    steps = 0.1 * X.std(axis=0)
    steps[steps == 0] = 1.0
    moved = rows[:, None] + np.diag(steps)  # (p, d, d): one column moved at a time
    at, near = to_tensor(rows), to_tensor(moved)
    cross = gram(kernel, at[:, None], near)[:, 0].numpy()  # (p, d)
    norms = np.sqrt(gram_diag(kernel, at).numpy()[:, None] * gram_diag(kernel, near).numpy())
    # Where the kernel vanishes, as a linear one at 0, there is no correlation to lose.
    correlation = np.divide(cross, norms, out=np.ones_like(norms), where=norms > 0)
    drop = -2 * np.log(np.clip(correlation, 1e-12, 1.0)).mean(axis=0)
    scale = steps / np.sqrt(np.maximum(drop, 1e-300))
    ignored = drop < 1e-14
    if ignored.all():
        return np.ones(X.shape[1])
    scale[ignored] = 1e6 * scale[~ignored].max()
    return scale
