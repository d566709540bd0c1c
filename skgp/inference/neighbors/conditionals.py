r"""f given the values at points: at the H nearest of each row, at all, and jointly; and which.

With the active set I of a row x, :math:`k = K_{Z_I x}` and the kernel matrix :math:`K_I` of
:math:`Z_I`, its diagonal raised by the factor :math:`1 + \epsilon`,

.. math:: f(x) \mid u_I \sim N(a^T u_I,\; k_{xx} - k^T a), \qquad a = K_I^{-1} k
          \qquad \text{(eq. 13, without S).}

The jitter :math:`\epsilon` is part of the model: :math:`u_j` is :math:`f(z_j)` and a little noise
of its own. Its variance depends on :math:`z_j` alone and not on the company it is in, or else two
active sets would disagree about :math:`u_j`.

*Jointly.* With :math:`\tilde A` the sparse rows a over the union U of the active points, and
:math:`\operatorname{Cov}(u) = K_{UU} + \operatorname{diag}(\epsilon)` under the prior, the errors
:math:`f - \tilde A u` have the covariance

.. math:: J = K_{BB} - \tilde A K_{UB} - (\tilde A K_{UB})^T
              + \tilde A (K_{UU} + \operatorname{diag}(\epsilon)) \tilde A^T,

which is positive semi-definite by construction, has the variances of rows predicted one by one on
its diagonal, and is the same for two rows whatever rows come with them.

*Which points a prediction uses, and how much of each* (`Neighborhood`): predictions without steps.
The H points nearest to an input change as it moves. Were each to count in full up to the moment
when another takes its place, predictions would jump there, and most where they extrapolate, by
more than their standard deviation. Two things are done.

*Neighbours fade.* With :math:`D_1 \le \dots \le D_{H+1}` the distances of the nearest points and
:math:`D_\circ` that of the middle one of the H, the value at neighbour j is taken as if it were

.. math:: d_j u_j + \sqrt{1 - d_j^2}\, \xi_j, \qquad
          d_j^2 = \frac{(1 - t_j)^2}{(1 - t_j)^2 + \tau t_j^2}, \qquad
          t_j = \operatorname{clip}\Big(\frac{D_j - D_\circ}{D_{H+1} - D_\circ}, 0, 1\Big),

with :math:`\xi_j` of the variance of :math:`u_j` and independent of all else, that is with further
noise of variance :math:`\tau (t_j / (1 - t_j))^2 V[u_j]`. A point joins with no influence and has
all of it in the nearer half. Only where more than half of the neighbours are equally far, as on
grids of many columns, do steps remain. Where all points are neighbours nothing fades.

*Few global points join.* Sixteen points, the ones that leave the least variance, are neighbours of
every input where they explain most of the prior's variance at the others: functions that smooth
are known across gaps, and what is left to fade is small. With many columns they would explain
little, and none join.

*Coarser scales*, where asked for: with three, half of the H are the nearest of all points, a
quarter the nearest of one in sixteen, at random, and a quarter of one in 256. In the gaps of dense
data, where the nearest all lie on one rim, the others see what is beyond it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.neighbors.search import NeighborSearch, coarser_scales
from skgp.inference.pathwise import greedy_variance
from skgp.kernels.gram import gram, gram_diag
from skgp.linalg.cholesky import jittered_cholesky, log_det, tri_solve
from skgp.linalg.runtime import tile_rows
from skgp.linalg.small_matrices import gather_rows


@dataclass(frozen=True)
class LocalConditionals:
    """f at n rows given the H inducing variables active for each."""

    active: Tensor  # (n, H) of int64; indices of inducing points
    weights: Tensor  # (n, H); a
    inverse_factor: Tensor  # (n, H, H); L^-1, lower triangular, of K_I = L L'
    variance: Tensor  # (n,); of f given u, not negative
    log_det: Tensor  # (n,); log |K_I|

    def __len__(self) -> int:
        return len(self.active)

    @property
    def precision(self) -> Tensor:
        r""":math:`K_I^{-1}`, shape (n, H, H); ``O(n H^3)``, which predictions do not need."""
        return self.inverse_factor.mT @ self.inverse_factor


def local_conditionals(kernel, X: Tensor, Z: Tensor, active: Tensor) -> LocalConditionals:
    """Condition rows X (n, d) on their points `active` (n, H) of Z (M, d), none twice.

    O(n H^2 (H + d)) time, about half of it for the kernel; O(n H^2) memory, several times over.
    """
    points = gather_rows(Z, active)  # (n, H, d)
    K = gram(kernel, points)
    K.diagonal(dim1=-2, dim2=-1).mul_(1 + defaults.LOCAL_JITTER)
    cross = gram(kernel, points, X[:, None])  # (n, H, 1)
    L = jittered_cholesky(K).factor
    # By the inverse factor rather than cholesky_inverse: faster up to H = 64, and the variance is
    # a difference of what cannot be negative by more than rounding.
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    inverse = tri_solve(L, eye.expand_as(L), upper=False)
    half = inverse @ cross
    weights = (inverse.mT @ half)[..., 0]
    variance = gram_diag(kernel, X) - half[..., 0].square().sum(-1)
    return LocalConditionals(active, weights, inverse, variance.clamp_min(0.0), log_det(L))


def prior_variance(kernel, Z: Tensor) -> Tensor:
    """Variances (M,) of u under the prior, the jitter among them."""
    return gram_diag(kernel, Z) * (1 + defaults.LOCAL_JITTER)


class Tiles:
    """`LocalConditionals` of rows X (n, d) given active (n, H) of Z (M, d), tile by tile."""

    def __init__(self, kernel, X: Tensor, Z: Tensor, active: Tensor) -> None:
        self.kernel, self.X, self.Z, self.active = kernel, X, Z, active

    def __iter__(self) -> Iterator[tuple[slice, LocalConditionals]]:
        n, H = self.active.shape
        step = max(1, defaults.CACHED_NUMBERS // H**2)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, local_conditionals(self.kernel, self.X[rows], self.Z, self.active[rows])


class SharedConditionals:
    """f given values at all of Z (M, d), of `noise` (M,) beside f: one factor for all rows."""

    def __init__(self, kernel, Z: Tensor, noise: Tensor) -> None:
        self.kernel, self.Z = kernel, Z
        K = gram(kernel, Z)
        K.diagonal().add_(noise)
        self.factor = jittered_cholesky(K).factor  # (M, M)

    def __call__(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (n, M) and the variance (n,) of f given the values; ``O(n M (M + d))``."""
        psi, variance = self.features(X)
        return tri_solve(self.factor.T, psi.T, upper=True).T, variance

    def features(self, X: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`\psi = L^{-1} k`, (n, M), the weights of :math:`L^{-1} u`; and the variance."""
        parts = []
        for rows in X.split(tile_rows(8 * len(self.Z), 8 * defaults.NEIGHBOR_TILE)):
            cross = gram(self.kernel, rows, self.Z).mT  # (M, n)
            psi = tri_solve(self.factor, cross, upper=False).T
            left = gram_diag(self.kernel, rows) - psi.square().sum(1)
            parts.append((psi, left.clamp_min(0.0)))
        psi, variance = map(torch.cat, zip(*parts, strict=True))
        return psi, variance


def sparse_rows(position: Tensor, weights: Tensor, n_columns: int) -> Tensor:
    """Matrix (n, n_columns) with `weights` (n, H) in the columns `position` (n, H); sparse."""
    n, H = position.shape
    rows = torch.arange(n, device=position.device).repeat_interleave(H)
    index = torch.stack([rows, position.reshape(-1)])
    shape = (n, n_columns)
    return torch.sparse_coo_tensor(index, weights.reshape(-1), shape, check_invariants=False)


def quadratic_form(A: Tensor, diagonal: Tensor) -> Tensor:
    """A diag(v) A' (n, n), symmetric, of a sparse A (n, m) and v (m,)."""
    product = torch.sparse.mm(A, diagonal[:, None] * A.to_dense().T)
    return 0.5 * (product + product.T)


def joint_errors(kernel, X: Tensor, points: Tensor, A: Tensor, diagonal: Tensor) -> Tensor:
    """J (n, n) of rows X given `points` U (m, d), A~ sparse (n, m) and epsilon (m,); symmetric.

    O(m (m + n) (d + H) + n^2) time, O(n (m + n)) memory.
    """
    cross = torch.sparse.mm(A, gram(kernel, X, points).mT)
    inner = [
        torch.sparse.mm(A, gram(kernel, points, tile))
        for tile in points.split(defaults.UNION_POINTS)
    ]
    inner = torch.sparse.mm(A, torch.cat(inner, dim=1).T)
    J = gram(kernel, X) - cross - cross.T + inner + quadratic_form(A, diagonal)
    return 0.5 * (J + J.T)


class Neighborhood:
    """The points of Z (M, d) that predictions use: H neighbours, at `n_scales`, and g global.

    Half of H are the nearest of those `favoured` (M,), where these are some.
    """

    def __init__(
        self,
        kernel,
        Z: Tensor,
        n_neighbors: int,
        method: str = "auto",
        n_scales: int = 1,
        favoured: Tensor | None = None,
        n_global: int = defaults.N_GLOBAL,
    ) -> None:
        self.kernel, self.Z, self.n_neighbors = kernel, Z, n_neighbors
        self._n_global = n_global  # at most
        self.search = NeighborSearch(kernel, Z, method, ties=True)
        order, sizes, share = coarser_scales(Z, n_neighbors, n_scales)
        #: Points (sorted indices), search among them and neighbours of each coarser scale.
        self._coarser = [
            (points, NeighborSearch(kernel, Z[points], method, ties=True), share)
            for points in (order[:size].sort().values for size in sizes)
        ]
        if favoured is not None and not favoured.all() and n_neighbors < len(Z):
            points = favoured.nonzero()[:, 0]
            share = min(n_neighbors // 2, len(points))
            self._coarser.append(
                (points, NeighborSearch(kernel, Z[points], method, ties=True), share)
            )

    @cached_property
    def everywhere(self) -> Tensor:
        """Indices (g,) of the points that are neighbours of every input."""
        none = torch.empty(0, dtype=torch.int64, device=self.Z.device)
        if not self._n_global or len(self.Z) <= self.n_neighbors + self._n_global:
            return none
        chosen = greedy_variance(self.kernel, self.Z, self._n_global)
        points = self.Z[chosen]
        given = SharedConditionals(
            self.kernel, points, defaults.LOCAL_JITTER * gram_diag(self.kernel, points)
        )
        some = self.Z[:: -(-len(self.Z) // defaults.N_COMPARED)]
        left = given(some)[1] / gram_diag(self.kernel, some)
        return chosen if float(left.mean()) < 1 - defaults.EXPLAINED else none

    @property
    def size(self) -> int:
        """Points of an input, H + g at most."""
        return min(self.n_neighbors, len(self.Z)) + len(self.everywhere)

    def find(self, X: Tensor, exclude: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Points (n, H + g) of rows X (n, d) and their influence d; `exclude` (n,) leaves one out.

        Where a point comes twice, and where there are not H, some have influence 0.
        """
        n_finest = self.n_neighbors - sum(share for *_, share in self._coarser)
        near, influence = _nearest(self.search, X, n_finest, exclude)
        for points, search, share in self._coarser:
            place = None
            if exclude is not None:  # where a row to leave out is among the points of the scale
                place = torch.searchsorted(points, exclude).clamp_max_(len(points) - 1)
                place = torch.where(points[place] == exclude, place, -1)
            some, weight = _nearest(search, X, share, place)
            near, influence = _joined(near, influence, points[some], weight)
        joined = self.everywhere.expand(len(X), -1)  # (n, g)
        if not joined.shape[1]:
            return near, influence
        twice = (near[:, :, None] == joined[:, None]).any(2)
        influence = torch.where(twice, 0.0, influence)
        stays = torch.ones_like(joined) if exclude is None else joined != exclude[:, None]
        return torch.cat([near, joined], 1), torch.cat([influence, stays.to(influence)], 1)


def _joined(near: Tensor, influence: Tensor, some: Tensor, weight: Tensor):
    """Neighbours of two scales, (n, H) and (n, h); one that comes twice keeps the larger influence.

    Which of two equal entries has it makes no difference, so that nothing jumps as they fade.
    """
    same = near[:, :, None] == some[:, None]  # (n, H, h)
    best = torch.where(same, influence[:, :, None], 0.0).amax(1)  # of the first, (n, h)
    lost = torch.where(same, weight[:, None], 0.0).amax(2)  # of the second, (n, H)
    influence = torch.where(lost > influence, 0.0, influence)
    weight = torch.where(best >= weight, 0.0, weight)
    return torch.cat([near, some], 1), torch.cat([influence, weight], 1)


def _nearest(
    search: NeighborSearch, X: Tensor, k: int, exclude: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The k nearest points of a search and their influence: in full where there are no others."""
    available = len(search.Z) - (exclude is not None and bool((exclude >= 0).any()))
    if k < available:
        active = search.query(X, k + 1, exclude)
        distance = search.distances(X, active)
        return active[:, :-1], _influence(distance).to(X.dtype)
    active = search.query(X, available, exclude)
    influence = X.new_ones(active.shape)
    if exclude is not None and k > available:  # as wide as without exclusion
        active = torch.cat([active, exclude[:, None]], 1)
        influence = torch.cat([influence, X.new_zeros(len(X), 1)], 1)
    return active, influence


def fading_weights(
    K: Tensor, cross: Tensor, prior: Tensor, influence: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights a (n, H) of values of covariance K (n, H, H), and how far they miss f, (n,).

    cross (n, H) and prior (n,) are covariance with f(x) and its variance. The latter is
    k_xx - 2 a'k + a'K a, not negative: what the values lack, and not what was put in to make
    them fade.
    """
    diagonal = K.diagonal(dim1=-2, dim2=-1)
    faded = influence[:, :, None] * K * influence[:, None, :]
    faded.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    factor = jittered_cholesky(faded).factor
    solved = torch.cholesky_solve((influence * cross)[..., None], factor)[..., 0]
    weights = influence * solved
    # a'K a is a'k less what the xi would add.
    added = (1 - influence.square()) * solved.square() * diagonal
    variance = prior - (weights * cross).sum(-1) - added.sum(-1)
    return weights, variance.clamp_min(0.0)


def _influence(distance: Tensor) -> Tensor:
    """d (n, H) of ascending distances (n, H + 1)."""
    H = distance.shape[1] - 1
    begin, end = distance[:, [(H - 1) // 2]], distance[:, -1:]
    # Where all are equally far none is to go before the others: t is 0.
    span = torch.where(end > begin, end - begin, 1.0)
    t = ((distance[:, :-1] - begin) / span).clamp(0.0, 1.0)
    return (1 - t) / ((1 - t).square() + defaults.FADING * t.square()).sqrt()
