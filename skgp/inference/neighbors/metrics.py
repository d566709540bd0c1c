"""The two metrics of the neighbour search (:mod:`skgp.inference.neighbors.search`).

Each proposes candidates by a fast search and measures them anew in float64; a point that is no
candidate lies beyond the `reach` of the fast search, up to its rounding.
"""

import importlib
from typing import Any

import torch
from scipy.spatial import cKDTree
from torch import Tensor

from skgp.inference import defaults
from skgp.kernels.distances import origin
from skgp.kernels.expression import stationary
from skgp.kernels.gram import gram, gram_diag, gram_tile
from skgp.linalg.runtime import tile_rows
from skgp.linalg.small_matrices import gather_rows


class ScaledDistance:
    """Squared distance between inputs divided by length scales.

    The method "fast" is meant for few queries, whose answers are taken as they are.
    """

    def __init__(self, inverse: Tensor, Z: Tensor, method: str) -> None:
        self.inverse, self.Z = inverse, Z
        self.centre = origin(Z.double())[0]
        self.principal: Tensor | None = None
        self.tree, self.faiss = None, None
        tree_columns = defaults.TREE_COLUMNS_FAST if method == "fast" else defaults.TREE_COLUMNS
        if method == "faiss":
            self.faiss = _faiss_index(self._scaled(Z).float())
        elif Z.shape[1] <= tree_columns and not Z.is_cuda:
            # Midpoints: with medians, many equal coordinates make the tree deep.
            self.tree = cKDTree(self._scaled(Z).numpy(), balanced_tree=False)
        else:
            self.points = self._points()
            if (
                method == "auto"
                and Z.shape[1] > defaults.MANY_COLUMNS
                and len(Z) >= defaults.MANY_POINTS
            ):
                self.principal = _principal_axes(self.points[:, :-1])
            if self.principal is not None:
                # What two rows have beside the components is nearly orthogonal: their product,
                # and not their squares, is taken from the components alone.
                projected = self.points[:, :-1] @ self.principal
                self.projected = torch.cat([projected, self.points[:, -1:]], 1)

    def tile_rows(self, size: int) -> int:
        """Queries whose temporaries fit a tile."""
        width = size * self.Z.shape[1]
        width = max(width, 0 if self.tree is not None else len(self.Z))
        return tile_rows(8 * width, 8 * defaults.NEIGHBOR_TILE)

    def candidates(self, X: Tensor, size: int, stage: int) -> tuple[Tensor, Tensor]:
        """Indices of `size` points and their distances, (n, size), as the fast search sees them."""
        A = self._scaled(X)
        if self.tree is not None:
            distance, near = self.tree.query(A.numpy(), list(range(1, size + 1)), workers=1)
            # At a distance beyond the greatest number the tree knows of no points.
            found = torch.from_numpy(near).clamp_max_(len(self.Z) - 1)
            return found, torch.from_numpy(distance).square_()
        squares = A.square().sum(1, keepdim=True)
        if stage:
            Z = self._scaled(self.Z)
            points = torch.cat([Z, Z.square().sum(1, keepdim=True)], 1)
            found, values = _smallest(_against(A) @ points.T, size)
        elif self.faiss is not None:
            near = self.faiss.search(A.float().cpu().numpy(), size)
            return torch.tensor(near[1], device=X.device), torch.from_numpy(near[0]).to(A)
        elif self.principal is None:
            found, values = _smallest(_against(A.float()) @ self.points.T, size)
        else:
            A = A.float()
            rough = _against(A @ self.principal) @ self.projected.T
            wide, _ = _smallest(rough, min(2 * size, len(self.Z)))
            values = torch.bmm(gather_rows(self.points, wide), _against(A)[:, :, None])[..., 0]
            values, order = values.topk(size, dim=1, largest=False, sorted=False)
            found = wide.gather(1, order)
        return found, values + squares

    def measure(self, X: Tensor, found: Tensor) -> Tensor:
        """Distances (n, k) of rows X from points `found` (n, k), in float64."""
        step = max(1, defaults.SEARCH_CACHED // (found.shape[1] * X.shape[1]))
        pieces = zip(X.split(step), found.split(step), strict=True)
        distances = [self._differences(rows, gather_rows(self.Z, near)) for rows, near in pieces]
        return torch.cat(distances)

    def measure_all(self, X: Tensor) -> Tensor:
        """Distances (n, M) from all points, in float64."""
        step = tile_rows(8 * X.numel(), 8 * defaults.NEIGHBOR_TILE)
        return torch.cat([self._differences(X, piece[None]) for piece in self.Z.split(step)], 1)

    def reach(self, X: Tensor, values: Tensor, proposed: Tensor, stage: int) -> Tensor:
        """Distance (n,) that points which are no candidates have at least in the fast search."""
        return proposed.amax(1).double()

    def surely_within(self, X: Tensor, kth: Tensor, reach: Tensor, stage: int) -> Tensor:
        """Whether the k-th neighbour (n,) is nearer than all that are no candidates."""
        # A point nearer than the k-th has a norm of at most |x| + sqrt(kth). Of the rounding
        # errors of d terms, which have either sign, the sum is of the order sqrt(d).
        fast = self.tree is None and stage == 0
        eps = torch.finfo(torch.float32 if fast else torch.float64).eps
        norms = 2 * self._scaled(X).norm(dim=1) + kth.sqrt()
        return kth + (4 + X.shape[1] ** 0.5) * eps * norms.square() < reach

    def _points(self) -> Tensor:
        """Scaled points and their squares, float32, without a float64 copy of them all."""
        M, d = self.Z.shape
        points = self.centre.new_empty(M, d + 1, dtype=torch.float32)
        step = max(1, defaults.SEARCH_CACHED // d)
        for some, out in zip(self.Z.split(step), points.split(step), strict=True):
            out[:, :-1] = self._scaled(some)
            torch.sum(out[:, :-1].square(), 1, out=out[:, -1])
        return points

    def _scaled(self, X: Tensor) -> Tensor:
        # Bounded, for the tree and the squares must be finite; beyond, all points are equally far.
        return ((X.double() - self.centre) * self.inverse).clamp_(-defaults.BEYOND, defaults.BEYOND)

    def _differences(self, X: Tensor, points: Tensor) -> Tensor:
        difference = points.double() - X.double()[:, None]
        return difference.mul_(self.inverse).square_().sum(-1)


class Correlation:
    """Minus the correlation, up to a factor of the row; any kernel."""

    def __init__(self, kernel, Z: Tensor) -> None:
        self.kernel, self.Z = kernel, Z.double()
        # Far from the origin float32 has no digits left; only stationary kernels may be moved.
        self.centre = origin(self.Z)[0] if stationary(kernel) else torch.zeros_like(self.Z[0])
        self.points = (self.Z - self.centre).float()
        self.std = self._std(self.Z)

    def tile_rows(self, size: int) -> int:
        """Queries whose temporaries fit a tile."""
        return tile_rows(8 * max(len(self.Z), size * self.Z.shape[1]), 8 * defaults.NEIGHBOR_TILE)

    def candidates(self, X: Tensor, size: int, stage: int) -> tuple[Tensor, Tensor]:
        """Indices of `size` points and their values, (n, size), as the fast search sees them."""
        # Beside the rounding of float32, that of expanded squares: where it matters a row is
        # searched again in float64.
        A = X.double() - self.centre
        Z, A = (self.Z - self.centre, A) if stage else (self.points, A.float())
        least = torch.finfo(A.dtype).tiny ** 0.5  # at it a kernel value of 0 is no NaN
        factor = -1 / self.std.clamp_min(least).to(A)
        found, values = _smallest(gram_tile(self.kernel, A, Z).mul_(factor), size)
        return found, values / self._std(X)[:, None]

    def measure(self, X: Tensor, found: Tensor) -> Tensor:
        """Distances (n, k) of rows X from points `found` (n, k), in float64."""
        K = gram(self.kernel, self.Z[found], X.double()[:, None])[..., 0]
        return self._steps(K / self.std[found] / self._std(X)[:, None])

    def measure_all(self, X: Tensor) -> Tensor:
        """Distances (n, M) from all points, in float64."""
        K = gram(self.kernel, X.double(), self.Z)
        return self._steps(K / self.std / self._std(X)[:, None])

    def reach(self, X: Tensor, values: Tensor, proposed: Tensor, stage: int) -> Tensor:
        """Distance (n,) that points which are no candidates have at least in the fast search."""
        # The candidates' own errors are the measure of those of the others.
        error = 2 * (proposed - values).abs().amax(1)
        return proposed.amax(1) - error - 2 * defaults.CORRELATION_STEP

    def surely_within(self, X: Tensor, kth: Tensor, reach: Tensor, stage: int) -> Tensor:
        """Whether the k-th neighbour (n,) is nearer than all that are no candidates."""
        return kth < reach

    def _std(self, X: Tensor) -> Tensor:
        # Where a kernel vanishes, as a linear one at 0, every correlation counts as 0.
        variance = gram_diag(self.kernel, X.double())
        return variance.clamp_min(torch.finfo(torch.float64).tiny).sqrt()

    def _steps(self, correlation: Tensor) -> Tensor:
        # Equal in exact arithmetic, as on a grid, shall be equal here, whatever the batch.
        steps = correlation.detach() / -defaults.CORRELATION_STEP
        steps = steps.round_().mul_(defaults.CORRELATION_STEP)
        # The steps are rounding: gradients are those of what is rounded.
        return steps + (correlation.detach() - correlation) if correlation.requires_grad else steps


def _principal_axes(points: Tensor) -> Tensor | None:
    """Axes (d, q) with most of the variance of centred points; None where they would be many."""
    some = points[:: -(-len(points) // defaults.PCA_ROWS)]
    variance, axes = torch.linalg.eigh((some.T @ some).double())
    missing = variance.cumsum(0) < (1 - defaults.HELD_VARIANCE) * variance.sum()  # ascending
    q = max(defaults.MANY_COLUMNS, len(variance) - int(missing.sum()))
    return axes[:, -q:].float() if 4 * q <= len(variance) else None


def _faiss_index(points: Tensor) -> Any:
    try:
        faiss = importlib.import_module("faiss")
    except ImportError as error:
        raise ImportError(
            "neighbors='faiss' needs the package faiss-cpu, which is not installed; install "
            "skgp[neighbors] or use neighbors='auto'."
        ) from error
    index = faiss.IndexFlatL2(points.shape[1])
    index.add(points.cpu().numpy())
    return index


def _against(A: Tensor) -> Tensor:
    """Rows whose product with points b and their |b|^2 is |b|^2 - 2 ab."""
    # One product is three times as fast as a product and the addition of squares.
    return torch.cat([-2 * A, torch.ones_like(A[:, :1])], 1)


def _smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns (n, k) of the k smallest values of each row, and these; in no order.

    They lie in the k groups of the smallest minima, which are found at a third of the cost.
    """
    n, m = values.shape
    width = m // defaults.GROUP
    if width < 4 * k:
        found = values.topk(k, dim=1, largest=False, sorted=False)
        return found.indices, found.values
    grouped = values[:, : defaults.GROUP * width].view(n, defaults.GROUP, width)
    groups = grouped.amin(1).topk(k, dim=1, largest=False, sorted=False).indices
    steps = width * torch.arange(defaults.GROUP, device=values.device)
    rest = torch.arange(defaults.GROUP * width, m, device=values.device).expand(n, -1)
    columns = torch.cat([(groups[:, :, None] + steps).flatten(1), rest], 1)
    found = values.gather(1, columns).topk(k, dim=1, largest=False, sorted=False)
    return columns.gather(1, found.indices), found.values
