r"""The points of a set that are nearest to given inputs, near as the kernel sees it.

Where the correlation falls with a single scaled distance, whatever the inputs,

.. math:: D(x, z) = \sum_j (x_j - z_j)^2 / \ell_j^2 ,

that distance is the metric; for any other expression the kernel's own correlation
:math:`k(x, z) / \sqrt{k(x, x)\, k(z, z)}` is.

A fast search proposes candidates, which are measured anew in float64. All others are known to lie
beyond some bound, up to the rounding of the fast search; a row whose k-th neighbour is not safely
within it is searched again, with more candidates and digits and at last among all points. So ties
go to the smaller index, and a row's neighbours do not depend on the rows that come with it.

=====================  =================================================================
up to 10 columns       KD-tree
11 to 50 columns       all distances by a matrix product in float32
more                   the same; of many points ("auto") in principal components [1]_
correlation            all correlations in float32
=====================  =================================================================

`CandidateSearch` takes the candidates as they are, and a tree up to 4 columns only: its queries are
few, so that the tree must repay the time to grow it.

References
----------
.. [1] Jolliffe (2002), Principal Component Analysis, section 2.1.
"""

import numpy as np
import torch
from torch import Tensor

from skgp.data import replicates
from skgp.inference.defaults import COARSER, NEIGHBOR_TILE, SPREAD_ROWS
from skgp.inference.neighbors.metrics import Correlation, ScaledDistance
from skgp.kernels.gram import gram, gram_diag
from skgp.kernels.scales import inverse_length_scales, robust_std
from skgp.linalg.runtime import differentiable_in_rows, tile_rows

_METHODS = ("auto", "exact", "faiss")


class NeighborSearch:
    """Search for the nearest of a fixed set of points under a kernel's metric.

    "auto" and "exact" are as above. Only "auto" may miss a neighbour, and only where there are more
    than 50 columns, at least 4096 points and principal components, a quarter of the columns or
    fewer, that hold nine tenths of their variance: of 32 neighbours of an MNIST digit it finds
    99.6%. "faiss" leaves the candidates to the library of that name; an ImportError says where it
    is not installed. Points Z (M, d), held by reference, may all be equally near with `ties`, as
    for predictions; else a ValueError refuses a kernel that gives all points the same correlation.
    Another refuses a method that is unknown, or cannot use the kernel's metric.

    Memory ``O(M d)`` beside Z, time O(M log M) of the tree, or O(d^3) of the components.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> Z = torch.tensor([[0.0, 0.0], [0.0, 3.0], [1.0, 0.0]], dtype=torch.float64)
    >>> NeighborSearch(RBF([0.1, 10.0]), Z).query(Z, 2)
    tensor([[0, 1],
            [1, 0],
            [2, 0]])
    """

    def __init__(self, kernel, Z: Tensor, method: str = "auto", *, ties: bool = False) -> None:
        if method not in _METHODS:
            raise ValueError(f"neighbors must be one of {', '.join(_METHODS)}, got {method!r}.")
        if Z.ndim != 2 or not len(Z):
            raise ValueError(f"Z must hold points, shape (M, d) and M >= 1; got {tuple(Z.shape)}.")
        gram(kernel, Z[:1], Z[:1])  # says what does not fit
        self.kernel, self.Z, self.method = kernel, Z, method
        self._metric = _metric_of(kernel, Z, method)
        if not ties and _flat(kernel, self._metric):
            raise ValueError(
                f"kernel={kernel} gives all points the same correlation, so that none is nearer "
                "than another; add a part that depends on the distance, such as 1.0 * RBF(), or "
                "lower its length scale."
            )
        if method == "faiss" and isinstance(self._metric, Correlation):
            raise ValueError(
                f"neighbors='faiss' needs a kernel that falls with one scaled distance, got "
                f"{kernel}; use neighbors='exact'."
            )

    @torch.no_grad()
    def query(self, X: Tensor, k: int, exclude: Tensor | None = None) -> Tensor:
        """Indices of the k points nearest to each row.

        Nearest first; of equally near points the smaller index first. `exclude` (n,) of int64 is
        the index of a point that is not to be returned for a row; -1 for none. A ValueError says
        where there are not k points to return, or shapes do not fit.

        Searches all M points in ``O(n M d)`` time, d the number of principal components where
        these are used; the tree in ``O(n k log M)`` where columns are few. Memory of some tiles
        of 16 to 64 MB.
        """
        self._check(X, k, exclude)
        out = torch.empty(len(X), k, dtype=torch.int64, device=X.device)
        pending = torch.arange(len(X), device=X.device)
        if exclude is None:
            exclude = torch.full_like(pending, -1)
        m, metric = len(self.Z), self._metric
        for stage, size in enumerate((k + 8, 4 * k + 64)):
            if size >= m:
                break
            unsure = [pending[:0]]
            for rows in _tiles(pending, metric.tile_rows(size)):
                out[rows], sure = self._among_candidates(X[rows], k, exclude[rows], stage, size)
                unsure.append(rows[~sure])
            pending = torch.cat(unsure)
        for rows in _tiles(pending, tile_rows(64 * m, 8 * NEIGHBOR_TILE)):
            values = metric.measure_all(X[rows])
            _mask(values, torch.arange(m, device=X.device)[None], exclude[rows])
            out[rows] = _stable_smallest(values, k)
        return out

    @differentiable_in_rows
    def distances(self, X: Tensor, index: Tensor) -> Tensor:
        """Distances (n, k), as this search sees them, of rows X (n, d) from points `index` (n, k).

        Squared and in length scales, or minus the correlation; float64.
        """
        return self._metric.measure(X, index)

    def _among_candidates(self, X: Tensor, k: int, exclude: Tensor, stage: int, size: int):
        """Neighbours (n, k) among some candidates, and whether none can be missing (n,)."""
        metric = self._metric
        found, proposed = metric.candidates(X, size, stage)
        found, order = found.sort(1)
        values = metric.measure(X, found)
        reach = metric.reach(X, values, proposed.gather(1, order), stage)
        _mask(values, found, exclude)
        nearest = _stable_smallest(values, k)
        kth = values.gather(1, nearest[:, -1:])[:, 0]
        return found.gather(1, nearest), metric.surely_within(X, kth, reach, stage)

    def _check(self, X: Tensor, k: int, exclude: Tensor | None) -> None:
        m, d = self.Z.shape
        if X.ndim != 2 or X.shape[1] != d:
            raise ValueError(f"X must have the {d} columns of Z, got shape {tuple(X.shape)}.")
        if exclude is not None and exclude.shape != X.shape[:1]:
            raise ValueError(
                f"exclude must hold one index a row, ({len(X)},), got {tuple(exclude.shape)}."
            )
        available = m - int(exclude is not None and bool((exclude >= 0).any()))
        if not 1 <= k <= available:
            raise ValueError(
                f"n_neighbors={k} must lie between 1 and {available}, the points there are to "
                "choose from; lower it or give more points."
            )


class CandidateSearch:
    """Fast search for near rows of a data set, for objectives that need no certainty.

    The proposals of the fast search are taken as they are: inputs that float32 cannot tell apart
    may be exchanged. The metric is the correlation of the kernel, whatever the expression, or for
    None the distance between columns of X (n, d), float64, divided by their standard deviations;
    `candidates` (c,) are the rows that may be neighbours. 256 rows among 36000 and 8 columns take
    15 ms: a fifth of the time of kernel values by :func:`~skgp.kernels.gram.gram_tile`.
    """

    @torch.no_grad()
    def __init__(self, kernel, X: Tensor, candidates: Tensor) -> None:
        self.X, self.candidates = X, candidates
        everyone = torch.arange(len(X), device=X.device)
        self._place = torch.full_like(everyone, -1)  # of a row among the candidates
        self._place[candidates] = everyone[: len(candidates)]
        points = X if torch.equal(candidates, everyone) else X[candidates]
        if kernel is None:
            some = X[:: -(-len(X) // SPREAD_ROWS)].double()
            spread = some.new_tensor(robust_std(some.cpu().numpy()))
            inverse = 1 / torch.where(spread > 0, spread, 1.0)
            self._metric: ScaledDistance | Correlation = ScaledDistance(inverse, points, "fast")
        else:
            self._metric = _metric_of(kernel, points, "fast")

    @torch.no_grad()
    def query(self, rows: Tensor, k: int) -> Tensor:
        """Indices (b, k) of the k candidates nearest to rows (b,), without themselves, in no order.

        O(b c d) time, O(b k log c) in the tree.
        """
        size = min(k + 1, len(self.candidates))
        out = torch.empty(len(rows), k, dtype=torch.int64, device=rows.device)
        # A kernel's inputs are scaled for every tile: let it have as many rows as they columns.
        tile = max(tile_rows(8 * len(self.candidates), 8 * NEIGHBOR_TILE), self.X.shape[1])
        for some, near in zip(rows.split(tile), out.split(tile), strict=True):
            found, values = self._metric.candidates(self.X[some], size, 0)
            _mask(values, found, self._place[some])
            nearest = values.topk(k, dim=1, largest=False, sorted=False).indices
            torch.gather(found, 1, nearest, out=near)
        return self.candidates[out]


def active_sets(kernel, X: Tensor, Z: Tensor, n_neighbors: int, method: str = "auto") -> Tensor:
    """Indices (n, H) of the points Z (M, d) nearest to rows X (n, d), H at most M, rising.

    In order of memory: what they index is read faster.
    """
    search = NeighborSearch(kernel, Z, method)
    return search.query(X, min(n_neighbors, len(Z))).sort(1).values


def coarser_scales(points: Tensor, k: int, n_scales: int) -> tuple[Tensor, list[int], int]:
    """A random order of points (M, ...), how many are of each coarser scale, and its share of k."""
    share = k // (2 * max(n_scales - 1, 1))
    sizes = (len(points) // COARSER**scale for scale in range(1, n_scales))
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    return order.to(points.device), [size for size in sizes if size > share > 0], share


class MultiscaleSearch:
    """The same at several scales, disjoint: for objectives that have to see beyond the nearest.

    With three scales half of the k neighbours are the nearest of nearly all candidates, a quarter
    the nearest of one in sixteen, at random, and a quarter of one in 256: within a neighbourhood
    every smooth function is nearly a plane, whatever its length scale. A scale of no more
    candidates than its share of the neighbours is left out.
    """

    def __init__(self, kernel, X: Tensor, candidates: Tensor, k: int, n_scales: int) -> None:
        order, coarser, share = coarser_scales(candidates, k, n_scales)
        parts = order[: sum(coarser)].split(coarser)
        finest = torch.ones_like(candidates, dtype=torch.bool)
        for part in parts:
            finest[part] = False
        self._parts = [(CandidateSearch(kernel, X, candidates[finest]), k - share * len(parts))]
        for part in parts:
            some = candidates[part.sort().values]
            self._parts.append((CandidateSearch(kernel, X, some), share))

    def query(self, rows: Tensor) -> Tensor:
        """Indices (b, k) of the neighbours of rows (b,), without themselves, in no order."""
        return torch.cat([search.query(rows, size) for search, size in self._parts], 1)


def distinct(Z: Tensor) -> tuple[Tensor, Tensor]:
    """The first of each set of equal rows of Z (M, d), in order (m,), and the set (M,) of each row.

    `Z[first][group]` equals Z. O(M log M) comparisons.
    """
    group = replicates(Z.detach().cpu().numpy())
    first = np.unique(group, return_index=True)[1]
    return torch.from_numpy(first).to(Z.device), torch.from_numpy(group).to(Z.device)


def positions(X: Tensor, points: Tensor) -> Tensor:
    """Index (n,) of the one of some distinct points that equals each row of X; -1 where none."""
    group = distinct(torch.cat([points, X]))[1][len(points) :]
    return torch.where(group < len(points), group, -1)


def _metric_of(kernel, Z: Tensor, method: str) -> ScaledDistance | Correlation:
    inverse = inverse_length_scales(kernel, Z)
    return Correlation(kernel, Z) if inverse is None else ScaledDistance(inverse, Z, method)


def _flat(kernel, metric: ScaledDistance | Correlation) -> bool:
    """Whether no point is nearer than another."""
    if isinstance(metric, ScaledDistance):
        return not metric.inverse.any()
    some = metric.Z[:: -(-len(metric.Z) // 64)]
    std = gram_diag(kernel, some).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    correlation = gram(kernel, some, some) / std[:, None] / std
    return bool((correlation > 1 - 1e-14).all()) and len(distinct(some)[0]) > 1


def _stable_smallest(values: Tensor, k: int) -> Tensor:
    """Columns (n, k) of the k smallest values, ascending; of equal ones the first column first."""
    if values.shape[1] <= 1024:
        return values.sort(dim=1, stable=True).indices[:, :k]
    kth = values.topk(k, dim=1, largest=False).values[:, -1:]
    below, equal = values < kth, values == kth
    taken = below | (equal & (equal.cumsum(1) <= k - below.sum(1, keepdim=True)))
    columns = taken.nonzero()[:, 1].view(-1, k)
    return columns.gather(1, values.gather(1, columns).sort(dim=1, stable=True).indices)


def _tiles(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    return rows.split(size) if len(rows) else ()


def _mask(values: Tensor, index: Tensor, exclude: Tensor) -> None:
    values.masked_fill_(index == exclude[:, None], float("inf"))
