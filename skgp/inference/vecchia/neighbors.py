r"""Orders of the points, and the neighbours of each among those before it.

The density of a Vecchia approximation depends on the order of the points. At random, every prefix
covers the domain, and the first points of it have neighbours far away; a maximin order [1]_ takes
as the next point the one farthest from all before, which spreads each prefix evenly.

References
----------
.. [1] Guinness (2018), Permutation and grouping methods for sharpening Gaussian process
   approximations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skgp.inference.defaults import EARLIER_CANDIDATES, EARLIER_SHARE, FIRST_BLOCK, NEIGHBOR_TILE
from skgp.inference.neighbors.search import NeighborSearch
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.runtime import tile_rows


@torch.no_grad()
def earlier_neighbors(
    kernel, X: Tensor, n_neighbors: int, features: Tensor | None = None
) -> Tensor:
    r"""Indices (n, H) of the neighbours of each row of X (n, d) among the rows before it.

    H is at most n - 1; a row with fewer before it has its own index in the places left. Near is
    what the metric of the kernel says is (:mod:`skgp.inference.neighbors.search`). Beside features
    :math:`\Phi` (n, m), of the nearest by that metric (`EARLIER_CANDIDATES` times as many) those
    are taken whose residuals correlate most,

    .. math:: R_{ij}^2 / R_{jj}, \qquad R = K - \Phi \Phi^T.

    The search is exact: among the first 1, 2, 4, ... blocks of points, for those of the last half,
    as far as the earlier ones among the nearest suffice. O(n H log n) in few columns.
    """
    n = len(X)
    H = min(n_neighbors, n - 1)
    rows = torch.arange(n, device=X.device)
    if H < 1:
        return rows.new_empty(n, 0)
    n_candidates = H if features is None else min(EARLIER_CANDIDATES * H, n - 1)
    found = rows[:, None].repeat(1, H)
    end = 1
    while end < n:
        begin, end = end, min(n, max(2 * end, FIRST_BLOCK))
        search = NeighborSearch(kernel, X[:end])
        pending, k = rows[begin:end], EARLIER_SHARE * n_candidates
        while len(pending):
            k, unsure = min(k, end - 1), []
            for some in pending.split(tile_rows(64 * k, 8 * NEIGHBOR_TILE)):
                near, sure = _earlier(search, X, some, k, n_candidates)
                if features is not None:
                    near = _most_correlated(kernel, X, features, some, near, H)
                found[some, : near.shape[1]] = near
                unsure.append(some[~sure])
            pending, k = torch.cat(unsure), 2 * k
    return found


def _earlier(
    search: NeighborSearch, X: Tensor, rows: Tensor, k: int, n_wanted: int
) -> tuple[Tensor, Tensor]:
    """Of the k points nearest to rows (b,) the first that are earlier, (b, c); whether all are."""
    near = search.query(X[rows], k, rows)
    earlier = near < rows[:, None]
    sure = earlier.sum(1) >= rows.clamp_max(min(n_wanted, k))
    sure |= k == len(search.Z) - 1
    order = (~earlier).to(torch.uint8).argsort(dim=1, stable=True)[:, :n_wanted]
    return torch.where(earlier, near, rows[:, None]).gather(1, order), sure


def _most_correlated(
    kernel, X: Tensor, features: Tensor, rows: Tensor, near: Tensor, H: int
) -> Tensor:
    """Of candidates (b, c) the H of greatest squared residual correlation with rows (b,)."""
    cross = gram(kernel, X[near], X[rows, None])[..., 0]
    cross = cross - torch.einsum("bcm,bm->bc", features[near], features[rows])
    variance = gram_diag(kernel, X[near]) - features[near].square().sum(-1)
    tiny = torch.finfo(X.dtype).eps * gram_diag(kernel, X[rows])[:, None]
    square = cross.square() / torch.maximum(variance, tiny)
    square = square.masked_fill(near == rows[:, None], -1.0)
    return near.gather(1, square.topk(min(H, near.shape[1]), dim=1).indices)
