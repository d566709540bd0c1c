r"""Orders of the points, and the neighbours of each among those before it.

The density of a Vecchia approximation depends on the order of the points. At random, every prefix
covers the domain, and the first points of it have neighbours far away; a maximin order [1]_ takes
as the next point the one farthest from all before, which spreads each prefix evenly.

The nearest of the points before are not the best to condition on: two that are close to each other
tell nearly the same. Neighbours are selected one by one instead, each the one that leaves the least
conditional variance beside those taken [2]_.

References
----------
.. [1] Guinness (2018), Permutation and grouping methods for sharpening Gaussian process
   approximations.
.. [2] Huan, Guinness, Katzfuss, Owhadi and Schaefer (2023), Sparse inverse Cholesky factorization
   of dense kernel matrices by greedy conditional selection.
"""

import math

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.vecchia.conditionals import residual_diagonal
from skgp.kernels.expression import RBF
from skgp.kernels.gram import gram, gram_diag
from skgp.kernels.scales import robust_std
from skgp.linalg.runtime import tile_rows
from skgp.linalg.small_matrices import gather_rows


@torch.no_grad()
def maximin_order(X: Tensor) -> Tensor:
    """An order (n,) of rows X (n, d) of which every prefix is spread evenly, nearly maximin.

    From the end: points are thinned, in the order given, until no two are near, those dropped
    come last, the farthest from what stays first; and so on with what stays, some half at a time.
    O(n) searches of a few neighbours; exact maximin orders take O(n log^2 n) steps one by one.
    """
    rest = torch.arange(len(X), device=X.device)
    parts: list[Tensor] = []
    while len(rest) > defaults.THIN_NEIGHBORS + 1:
        kept, reach = _thinned(X[rest])
        if kept.all():  # as many points at one place as are looked at
            break
        gone = rest[~kept]
        parts.append(gone[reach[~kept].argsort(descending=True, stable=True)])
        rest = rest[kept]
    return torch.cat([rest, *reversed(parts)])


def _thinned(X: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of X (n, d) stay, no two of them near, and the distance (n,) of each from those.

    Near is what leaves a row `THIN_DEGREE` others in the mean.
    """
    n, own = len(X), torch.arange(len(X), device=X.device)
    search = NeighborSearch(RBF(), X)
    index = search.query(X, defaults.THIN_NEIGHBORS, own)
    distance = search.distances(X, index)
    near = distance <= distance.flatten().kthvalue(defaults.THIN_DEGREE * n).values
    kept, open_ = torch.zeros(n, dtype=torch.bool, device=X.device), torch.ones_like(own) > 0
    while open_.any():  # the first of all near ones that are open stays, and the others go
        first = ~(near & open_[index] & (index < own[:, None])).any(1)
        kept |= open_ & first
        open_ &= ~(kept | (near & kept[index]).any(1))
    return kept, torch.where(kept[index], distance, math.inf).amin(1)


def order_of(X: Tensor, ordering: str, generator: torch.Generator) -> Tensor:
    """The order (n,) of rows X (n, d): at random, or spread evenly, columns in standard units."""
    n = len(X)
    order = torch.randperm(n, generator=generator, device=generator.device).to(X.device)
    if ordering == "random":
        return order
    spread = X.new_tensor(robust_std(X.cpu().numpy()))
    scaled = X / torch.where(spread > 0, spread, 1.0)
    return order[maximin_order(scaled[order])]


@torch.no_grad()
def informative(kernel, X: Tensor, noises: Tensor) -> Tensor:
    r"""Which observations (n,) at X (n, d), of noise variances v (n,), tell much beside the others.

    One alone takes the share :math:`k / (k + v)` of a variance k of f, the mean. Those of less
    than `LEAST_INFORMATION` of the mean share, as of tiny weights, leave others to be neighbours.
    """
    variance = gram_diag(kernel, X).mean()
    shares = variance / (variance + noises)
    return shares >= defaults.LEAST_INFORMATION * shares.mean()


@torch.no_grad()
def earlier_neighbors(
    kernel,
    X: Tensor,
    n_neighbors: int,
    features: Tensor | None = None,
    rows: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    r"""Indices (t, H) of the neighbours of rows (t,), sorted, among those of X (n, d) before them.

    By default of all rows. H is at most n - 1; a row with fewer before it has its own index in the
    places left. Of the `EARLIER_CANDIDATES` H nearest, by the metric of the kernel
    (:mod:`skgp.inference.neighbors.search`), those are taken one after the other that reduce the
    conditional variance of row i most beside the set N taken already,

    .. math:: j = \arg\max \, S_{ij \mid N}^2 / S_{jj \mid N}, \qquad
              S = K - \Phi \Phi^T + \operatorname{diag}(v),

    with `features` :math:`\Phi` (n, m) of inducing points and the variances v (n,) of the `noise`,
    none by default. Divergences from the exact process are a tenth to four fifths of those of the H
    nearest (1500 points in 2 and 8 columns, H = 10 and 20, m = 0 to 500).

    The search of the nearest is exact: among the first 1, 2, 4, ... blocks of points, for those of
    the last half, as far as the earlier ones among the nearest suffice. O(n H log n) in few
    columns; the selection takes O(n H^2 (H + d + m)).
    """
    n = len(X)
    H = min(n_neighbors, n - 1)
    rows = torch.arange(n, device=X.device) if rows is None else rows
    found = rows[:, None].repeat(1, max(H, 0))
    if H < 1:
        return found
    n_candidates = min(defaults.EARLIER_CANDIDATES * H, n - 1)
    features = X[:, :0] if features is None else features
    noise = torch.zeros_like(X[:, 0]) if noise is None else noise
    diagonal = residual_diagonal(gram_diag(kernel, X), features, noise)
    end = 1
    while end < n:
        begin, end = end, min(n, max(2 * end, defaults.FIRST_BLOCK))
        place = ((rows >= begin) & (rows < end)).nonzero()[:, 0]
        if not len(place):
            continue
        search = NeighborSearch(kernel, X[:end])
        pending, share = place, defaults.EARLIER_SHARE
        while len(pending):
            unsure = []
            for some in pending.split(tile_rows(128 * n_candidates, 8 * defaults.NEIGHBOR_TILE)):
                before = max(1, int(rows[some].min())) / end  # of the points, at least
                k = min(math.ceil(share * n_candidates / before), end - 1)
                near, sure = _earlier(search, X, rows[some], k, n_candidates)
                unsure.append(some[~sure])
                some = some[sure]
                near = _select_greedily(kernel, X, features, diagonal, rows[some], near[sure], H)
                found[some, : near.shape[1]] = near
            pending, share = torch.cat(unsure), 2 * share
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


def _select_greedily(
    kernel, X: Tensor, features: Tensor, diagonal: Tensor, rows: Tensor, near: Tensor, H: int
) -> Tensor:
    """Of candidates (b, c) the H that, one by one, reduce the variance of rows (b,) most.

    A partial Cholesky factor of S of the candidates, whose pivots are chosen for the row; of S only
    the diagonal (n,) of all points and the columns of pivots are evaluated.
    """
    c, m = near.shape[1], features.shape[1]
    if c <= H:
        return near
    step = tile_rows(16 * c * (c + H + m), 8 * defaults.NEIGHBOR_TILE)
    if len(rows) > step:
        tiles = zip(rows.split(step), near.split(step), strict=True)
        parts = [_select_greedily(kernel, X, features, diagonal, *tile, H) for tile in tiles]
        return torch.cat(parts)
    basis, points = gather_rows(features, near), gather_rows(X, near)  # (b, c, m), (b, c, d)
    left = diagonal[near]  # S_jj|N: (b, c)
    # Products (b, c, c) of which a third is used, but one for all pivots.
    known = basis @ basis.mT if m else None
    whole = gram(kernel, points, method="expand") if X.shape[1] > defaults.PRODUCT_COLUMNS else None
    cross = gram(kernel, points, X[rows, None]) - basis @ features[rows, :, None]
    cross = cross[..., 0]  # S_ij|N: (b, c)
    info = torch.finfo(X.dtype)
    tiny = (info.eps * left).clamp_min(info.tiny)
    order = torch.where(near == rows[:, None], -1.0, 0.0).to(X)  # places left come last
    factor, picked = cross.new_zeros(len(rows), H, c), []
    each = torch.arange(len(rows), device=X.device)
    for k in range(H):
        least = torch.maximum(left, tiny)
        pivot = torch.where(order < 0, order, cross.square() / least).argmax(1)  # (b,)
        picked.append(pivot)
        order[each, pivot] = -2.0
        if whole is None:
            column = gram(kernel, points, points[each, pivot, None])[..., 0]
        else:
            column = whole[each, pivot]
        if known is not None:
            column = column - known[each, pivot]
        past = factor[each, :k, pivot, None].mT @ factor[:, :k]  # (b, 1, c)
        root = least[each, pivot, None].sqrt()
        column = (column - past[:, 0]) / root  # wrong at the pivot itself, which is not asked again
        cross = cross - column * (cross[each, pivot, None] / root)
        left = left - column.square()
        factor[:, k] = column
    return near.gather(1, torch.stack(picked, 1))
