r"""Evidence of a long series by dense factors of chunks, all chunks at once.

Given the state :math:`s_0` before a chunk of L points, f there and the state :math:`s_+` at its end
are

.. math:: f = U s_0 + N(0, C), \quad s_+ = \Phi s_0 + N(0, Q), \quad
          C_{ji} = u_j v_i^\top \; (i \le j), \quad
          \operatorname{Cov}(f, s_+) = V \Phi^\top

(:mod:`skgp.kernels.sde_lags`). With one Cholesky factor of :math:`B = I + \Omega^{1/2} C
\Omega^{1/2}` a chunk its data are taken into an :class:`~.elements.Element`; a filter and its way
back run over the chunks, with one factor of a d x d matrix each; and, given the state and what
later data say at all joints, the gradient is made of dense products. So a point costs O(L^2 + L d)
operations in large batches, where steps from point to point have O(d^2) in small ones.

Let m, P be the state before a chunk given the data before, and (r, N) its slopes given all, as in
:mod:`.passes`: :math:`s_p = m + P r` and :math:`\Gamma = P - P N P` are the smoothed moments. With
those at the end, :math:`r_+` and :math:`N_+`, :math:`G = (I + P J)^{-1}` and
:math:`Z = \Omega^{1/2} B^{-1} \Omega^{1/2} [U, V]`, the slopes in f are

.. math:: \alpha = \Omega^{1/2} B^{-1} \Omega^{1/2} c - Z h, \quad h = (s_p, \Phi^\top r_+), \qquad
          N_{ff} = \Omega^{1/2} B^{-1} \Omega^{1/2} + Z \Theta Z^\top, \quad
          \Theta = \begin{pmatrix} -\Gamma & \cdot \\
          \Phi^\top N_+ A G P & \Phi^\top N_+ \Phi \end{pmatrix},

and the derivatives of log Z in C, U, V and Q are :math:`\tfrac12 (\alpha \alpha^\top - N_{ff})`,
:math:`(\bar U, \bar V) = \alpha h^\top + Z \Theta` and :math:`\tfrac12 (r_+ r_+^\top - N_+)`; that
in :math:`\Phi`, times :math:`\Phi^\top` from the left, is :math:`\bar V^\top V + \Phi^\top (r_+
s_p^\top - N_+ A G P)`, which serves as well, since :math:`\Phi` commutes with all that moves it.
Arrays of points have a factor :math:`\Omega^{1/2}`, and with :math:`Y = Z_c M`, :math:`M =
\mathrm{diag}(\Theta, 0) - (h, -1) (h, -1)^\top`, where Z_c has c for one more column, they are two
products: Y holds :math:`(\bar U, \bar V, -\alpha)`, and :math:`B^{-1} + Y Z_c^\top = N_{ff} -
\alpha \alpha^\top`.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.markov.elements import Joint, Joints, Tile
from skgp.inference.markov.passes import GradientSums
from skgp.kernels.sde import Dynamics
from skgp.kernels.sde_lags import Generators


class DenseEvidence:
    r"""The log normaliser of the sites and its gradient, as `Evidence`, by dense chunks.

    One pass over tiles of chunks: :math:`\log Z = c - \tfrac12 y^T \alpha - \tfrac12 \log |B|` and
    sums of slopes in the lags and in the prior of the states. The marginals are worked out when
    first asked for.
    """

    def __init__(self, chunks: "DenseChunks") -> None:
        self._chunks, self._joints = chunks, Joints(chunks.tiles(), chunks.shape[0], chunks.prior)
        sums = GradientSums.zeros(chunks.prior)
        whole, misfit, spread = 0.0, 0.0, 0.0
        for tile, part in self._tiles():
            slopes = _Slopes(tile, part)
            whole += float((tile.y * slopes.alpha).sum())
            misfit += float(slopes.alpha.square().sum())
            spread += float((1 - slopes.diagonal).sum())
            slopes.add_to(sums, chunks)
        start = self._joints.r[0, :, None] * self._joints.r[0] - self._joints.N[0]
        self._of_prior = chunks.prior_gradient(0.5 * start)
        self.log_normalizer = chunks.constant - 0.5 * whole - self._joints.half_log_det
        self.spread, self._misfit, self._sums = spread, misfit, sums

    def _tiles(self) -> Iterator[tuple[Tile, Joint]]:
        return zip(self._chunks.tiles(), self._joints.tiles(self._chunks.tile_size), strict=True)

    @cached_property
    def parameter_gradient(self) -> Tensor:
        """As of `Evidence`."""
        return self._sums.gradient(self._chunks.dynamics) + self._of_prior

    def gradients(self) -> list[Tensor]:
        """As of `Evidence`."""
        return [self.parameter_gradient]

    def misfit(self, centre: Tensor) -> float:
        """As of `Evidence`."""
        if centre is self._chunks.given:
            return self._misfit
        residual = self.mean - centre
        return float((self._chunks.weight * residual) @ residual)

    @property
    def mean(self) -> Tensor:
        """(n,)."""
        return self._moments[0]

    @property
    def var(self) -> Tensor:
        """(n,)."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            found = [_moments(self._chunks, *each) for each in self._tiles()]
            moments = torch.cat(found, 1).flatten(1)
        mean, var = moments[:, : len(self._chunks.weight)].clone()
        return mean, var


class DenseChunks:
    """A series of n points as c chunks of L; the last is padded with points that weigh nothing."""

    def __init__(
        self,
        dynamics: Dynamics,
        gaps: Tensor,
        weight: Tensor,
        tops: tuple[Tensor, float, Tensor | None],  # of `_centres`
        generators: Generators,
        length: int,
    ) -> None:
        self.dynamics, self.generators = dynamics, generators
        self._since = gaps[:1].clone()  # an origin, of dynamics that have one
        #: Covariance (d, d) of the state at the first point.
        self.prior = dynamics.stationary
        if dynamics.origin is not None:
            F, Q = (x[..., 0] for x in dynamics.transition(self._since))
            self.prior = F @ self.prior @ F.T + Q
        self.weight, (top, self.constant, self.given) = weight, tops
        self.variance = float(dynamics.observation @ self.prior @ dynamics.observation)
        count = -(-len(gaps) // length)
        padding = 0, count * length - len(gaps)
        gaps, root, centre = (
            torch.nn.functional.pad(x, padding).view(count, length)
            for x in (gaps.clone(), weight.sqrt(), top)
        )
        gaps[0, 0] = 0.0  # the prior is that there
        self.shape, self._data = (count, length), (gaps, root, centre)
        self._clocks = generators.clock(gaps)
        #: Whether no chunk is too long.
        self.is_valid = self._clocks is not None
        self.tile_size = max(1, defaults.TILE_MATRICES // length**2)
        numbers = length + 5 * dynamics.n_states + 2
        self._kept: list[Tile] | None = (
            [] if 8 * gaps.numel() * numbers <= defaults.CHUNKS_BYTES else None
        )

    def tiles(self) -> Iterator[Tile]:
        """Some chunks after the other, which a second call takes over and a third makes anew."""
        if self._kept:
            kept, self._kept = self._kept[::-1], None
            while kept:
                yield kept.pop()
            return
        assert self._clocks is not None
        arrays = *self._data, *self.generators.ends(self._clocks)
        for data in zip(*(x.split(self.tile_size) for x in arrays), strict=True):
            tile = self._take(*data)
            if self._kept is not None:
                self._kept.append(tile)
            yield tile

    def prior_gradient(self, slope: Tensor) -> Tensor:
        """Derivative (q,) in the parameters of the dynamics, from that in `prior`, (d, d)."""
        dynamics, found = self.dynamics, torch.zeros(self.dynamics.n_parameters, dtype=slope.dtype)
        if dynamics.origin is not None:
            F = dynamics.transition(self._since)[0][..., 0]
            moved = 2 * slope @ F @ dynamics.stationary
            found = dynamics.transition_gradient(self._since, moved[..., None], slope[..., None])
            slope = F.T @ slope @ F
        return found + dynamics.stationary_gradient(slope)

    def _take(self, gaps: Tensor, root: Tensor, centre: Tensor, F: Tensor, Q: Tensor) -> Tile:
        clocks = self.generators.clock(gaps)
        assert clocks is not None
        (c, L), d = gaps.shape, self.generators.n_states
        right = gaps.new_empty(c, 2 * d + 1, L)
        u, v = right[:, :d], right[:, d : 2 * d]
        self.generators.fill(clocks, root, u, v)
        torch.mul(root, centre, out=right[:, -1])
        B = u.mT @ v  # (c, L, L), of which the lower half holds
        B.diagonal(dim1=1, dim2=2).add_(1.0)
        factor, failed = torch.linalg.cholesky_ex(B)
        half_log_det = float(factor.diagonal(dim1=1, dim2=2).log().sum())
        # Half an inverse keeps digits of the products that a whole one loses.
        eye = torch.eye(L, dtype=B.dtype).expand_as(B)
        half = torch.linalg.solve_triangular(factor, eye, upper=False)
        white = right @ half.mT  # (c, 2d + 1, L)
        products, solved, inverse = white @ white.mT, white @ half, half.mT @ half
        return Tile(clocks, root, right, inverse, solved, products, F, Q, half_log_det)

    def covariances(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Of f in a tile: U' and V' (c, 2d, L), and C (c, L, L), without weights."""
        joint = torch.empty_like(tile.right[:, :-1])
        u, v = joint.chunk(2, 1)
        self.generators.fill(tile.clocks, None, u, v)
        C = torch.tril(u.mT @ v)
        return joint, C + torch.tril(C, -1).mT


class _Slopes:
    """Derivatives of log Z in what a tile is made of."""

    def __init__(self, tile: Tile, joint: Joint) -> None:
        d = tile.F.shape[1]
        self._tile, self._joint = tile, joint
        ends = torch.nn.functional.pad(joint.h, (0, 1), value=-1.0)
        M = torch.nn.functional.pad(joint.theta, (0, 1, 0, 1))
        M.baddbmm_(ends[:, :, None], ends[:, None], alpha=-1)
        self._bar = M @ tile.solved  # (c, 2d + 1, L): bars of U and V, and -alpha
        self._u, self._v, minus = self._bar.split([d, d, 1], 1)
        self.alpha = -minus[:, 0]  # (c, L)
        # N_ff - alpha alpha', in place of the inverse
        self._minus = tile.inverse.baddbmm_(self._bar.mT, tile.solved)
        self.diagonal = self._minus.diagonal(dim1=1, dim2=2) + self.alpha.square()  # of N_ff

    def add_to(self, sums: GradientSums, chunks: DenseChunks) -> None:
        """Add what `GradientSums.gradient` reads."""
        tile, joint = self._tile, self._joint
        d, L = tile.F.shape[1], tile.root.shape[1]
        u, v = tile.right[:, :d], tile.right[:, d : 2 * d]
        half = torch.ones(L, L, dtype=v.dtype).tril()
        half.diagonal().mul_(0.5)
        lower = self._minus.mul_(half)  # the slope in C, of which each pair counts once, negative
        # Of h and theta: F'(r s' - N A G P) and F'(r r' - N) F.
        moved = joint.h[:, d:, None] * joint.h[:, None] - joint.theta[:, d:]  # (c, d, 2d)
        F_bar, moved = torch.baddbmm(moved[..., :d], self._v, v.mT), moved[..., d:]
        Q_bar = joint.r[:, :, None] * joint.r[:, None] - joint.N  # twice it
        u_bar = torch.baddbmm(self._u, v, lower.mT, alpha=-1)  # (c, d, L)
        v_bar = torch.baddbmm(self._v, u, lower, alpha=-1)
        times = chunks.generators.times(tile.clocks)  # (c, d or 1, L)
        last, later = times[..., -1:], u * times
        slopes = torch.baddbmm(last * F_bar, later, u_bar.mT)
        sums.transition.add_(slopes.baddbmm_(v_bar, (v * times).mT, alpha=-1).sum(0))
        crossed = (v_bar @ later.mT).sum(0)
        sums.noise.add_(crossed + crossed.T + (last * moved).sum(0))
        sums.scale.add_((Q_bar * tile.Q).sum(0))
        sums.scale.diagonal().add_((v_bar * v).sum((0, 2)), alpha=2)
        if chunks.dynamics.shape_slopes:
            crossed = (v_bar @ u.mT).sum(0)
            sums.start.add_((Q_bar - moved).sum(0) - 2 * crossed)
            sums.turned.add_((v_bar @ v.mT).sum(0) + crossed @ chunks.dynamics.stationary)


def _moments(chunks: DenseChunks, tile: Tile, joint: Joint) -> Tensor:
    """Mean and variance of f in a tile, (2, c, L).

    With ``I - N_ff`` for the weighted covariance; where weights are small, given s_0 and s_+ too.
    """
    slopes = _Slopes(tile, joint)
    weight = tile.root.square()
    mean = (tile.y - slopes.alpha) / tile.root
    var = (1.0 - slopes.diagonal) / weight
    is_small = weight * chunks.variance < defaults.SMALL_WEIGHT
    if bool(is_small.any()):
        given = _small_moments(chunks, tile, joint, slopes.alpha)
        mean, var = (torch.where(is_small, *each) for each in zip(given, (mean, var), strict=True))
    return torch.stack([mean, var.clamp_(min=0)])


def _small_moments(
    chunks: DenseChunks, tile: Tile, joint: Joint, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance (c, L): given s_0 and s_+, f has covariance ``C - C S C``, S without Z."""
    joined, C = chunks.covariances(tile)  # (c, 2d, L), (c, L, L)
    weighted, solved = C * tile.root[:, None], tile.solved[:, :-1]
    B = weighted * tile.root[..., None]
    B.diagonal(dim1=1, dim2=2).add_(1.0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(B), weighted.mT, upper=False)
    mean = (joint.h[:, None] @ joined)[:, 0] + (weighted @ alpha[..., None])[..., 0]
    rest = joined - solved @ weighted.mT
    var = C.diagonal(dim1=1, dim2=2) - white.square().sum(1)
    return mean, var - ((joint.theta @ rest) * rest).sum(1)


def dense_evidence(
    dynamics: Dynamics, gaps: Tensor, beta: Tensor, weight: Tensor, centre: Tensor | None
) -> DenseEvidence | None:
    """As `evidence`, where this route is faster and keeps the digits; None elsewhere."""
    if gaps.device.type != "cpu" or not _is_fast(dynamics, gaps):
        return None
    spread = dynamics.stationary
    if dynamics.origin is not None:  # C has no part of where the process starts
        spread = dynamics.transition(gaps[1:].sum()[None])[1][..., 0]
    variance = float(dynamics.observation @ spread @ dynamics.observation)
    low, high = map(float, weight.aminmax())
    if not (low >= 0 and high * variance <= defaults.LARGEST_RATIO):
        return None
    generators = Generators([block for _, block in dynamics.blocks])
    tops = _centres(beta, weight, centre)
    if not generators.is_complete or tops is None:
        return None
    length = defaults.DENSE_LENGTHS[dynamics.n_states >= defaults.MANY_STATES]
    with torch.inference_mode():
        while length >= defaults.SHORTEST_LENGTH:
            chunks = DenseChunks(dynamics, gaps, weight, tops, generators, length)
            if chunks.is_valid:
                found = DenseEvidence(chunks)
                return found if math.isfinite(found.log_normalizer) else None
            length //= 2
    return None


def _is_fast(dynamics: Dynamics, gaps: Tensor) -> bool:
    """Whether steps from point to point, of which few take few states, cost more."""
    d, n = dynamics.n_states, len(gaps)
    if (
        n <= max(defaults.FEW_POINTS, defaults.POINTS_A_STATE * d**2)
        or d >= defaults.DENSE_STATES[1]
    ):
        return True
    low, high = map(float, gaps[1:].aminmax())
    return d >= defaults.DENSE_STATES[0] and high - low > defaults.REGULAR * high


def _centres(
    beta: Tensor, weight: Tensor, centre: Tensor | None
) -> tuple[Tensor, float, Tensor | None] | None:
    """Where the sites have their tops, (n,), and the sum of their logarithms there.

    And the given centre where, but for rounding, they are there. None where tops are too far away.
    """
    is_site, given = weight > 0, None
    top = torch.where(is_site, beta / weight, 0.0)
    if centre is None:
        above = 0.5 * beta * top
    else:
        at = torch.where(is_site, centre, 0.0)
        if torch.allclose(top, at, rtol=1e-14, atol=0.0):
            top, given = at, centre
        centre = at
        above = 0.5 * weight * (top - centre) ** 2
    if bool((is_site | (beta == 0)).all()) and float(above.max()) <= defaults.FARTHEST_TOP:
        return top, float(above.sum()), given
    return None
