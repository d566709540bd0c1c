r"""Inference of a series from Gaussian sites: normaliser, its gradient, and marginals, in O(n d^3).

The sites :math:`\exp(\beta_n f_n - \omega_n f_n^2 / 2)` are Gaussian noise, with
:math:`\beta = y / \sigma^2`, :math:`\omega = 1 / \sigma^2`, or what a variational or Laplace
method puts in place of another likelihood; a missing value has :math:`\beta = \omega = 0`. A
weight may be negative as long as the posterior is proper: with K the prior covariance of f and
:math:`\Omega = \mathrm{diag}(\omega)`, :math:`K^{-1} + \Omega` must have no negative eigenvalue. By
Sylvester's law of inertia, for the factors :math:`D_n = 1 + \omega_n p_n` of the filter,

.. math:: \#\{n : D_n < 0, \omega_n < 0\} - \#\{n : D_n < 0, \omega_n > 0\}

is the number of these: :math:`D_n / \omega_n` are the pivots of :math:`K + \Omega^{-1}`. A later
datum may thus make good for an earlier one, and the covariances of the filter be indefinite in
between.

A short series, :math:`\omega \ge 0`, takes one Cholesky factor instead, in O(m^3):

.. math::
    B = I + \Omega^{1/2} K \Omega^{1/2}, \quad S = \Omega^{1/2} B^{-1} \Omega^{1/2}, \quad
    V = K - K S K, \quad m = V \beta, \quad \frac{\partial \log Z}{\partial K}
    = \tfrac12 \left(\alpha \alpha^\top - S\right), \quad \alpha = \beta - \Omega m.

Up to two hundred times this takes some forty calls of NumPy, where a sweep takes 1000 of torch
however short the series. It keeps fewer digits where the weights are large (see
`DensePrior.suits`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from skgp.inference.defaults import LEAST_PIVOT, MAX_RATIO, MISFIT
from skgp.inference.markov.elements import Element, ElementTree
from skgp.inference.markov.passes import (
    Filtered,
    Gaussian,
    Model,
    Moments,
    Sites,
    Visitor,
    chunk_elements,
    filter_chunks,
    filtered_log_normalizer,
    smooth_chunks,
)
from skgp.inference.markov.series import Chunks, Lags, Steps, Transitions, few_times
from skgp.kernels.sde import Dynamics
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import constant_like
from skgp.linalg.small_matrices import (
    identity_plus,
    inverse_and_log_det,
    matmul,
    matvec,
    symmetrize,
)

_Slope = tuple[int, np.ndarray | None]


class DensePrior:
    """The covariance K (m, m) of a short series, made once for whatever sites it is given."""

    def __init__(self, dynamics: Dynamics, lags: Lags) -> None:
        self._lags, values = lags, list[Any]([None] * len(lags.tables))
        by_variance, by_rate, by_shape = list[_Slope](), list[_Slope](), list[_Slope]()
        for _, block in dynamics.blocks:
            i = lags.table_of(block.is_stationary)
            table = lags.tables[i]
            k, rates, shapes = block.covariance(table.lags, table.since, table.known)
            values[i] = k if values[i] is None else values[i] + k
            by_variance.append((i, k if block.moving[0] else None))
            by_rate += [(i, each) for each in rates]
            by_shape += [(i, each) for each in shapes]
        #: Of each parameter, the derivative of k and its table; None where it does not move.
        self._slopes = by_variance + by_rate + by_shape
        self.K = self._square(values)  # (m, m)

    def suits(self, weight: Tensor) -> bool:
        """Whether weights (m,) are neither negative nor large."""
        w = weight.numpy()
        return bool(w.min() >= 0 and w.max() * self.K.diagonal().max() <= MAX_RATIO)

    def contract(self, bar: np.ndarray) -> Tensor:
        """``<bar, dK/dp> / 2``, (q,), of a symmetric matrix (m, m): its upper half is read.

        0 in a parameter that does not move.
        """
        upper = bar.take(self._lags.places)
        upper[self._lags.pairs.diagonal()] *= 0.5  # the others stand for both triangles
        sums = [table.fold(upper) for table in self._lags.tables]
        found = [0.0 if slope is None else slope @ sums[i] for i, slope in self._slopes]
        return torch.tensor(found, dtype=torch.float64)

    def derivative(self, direction: np.ndarray) -> np.ndarray:
        """Of K (m, m), along a direction (q,) in which some parameter moves."""
        sums = list[Any]([None] * len(self._lags.tables))
        for c, (i, slope) in zip(direction, self._slopes, strict=True):
            if c and slope is not None:
                sums[i] = c * slope if sums[i] is None else sums[i] + c * slope
        return self._square(sums)

    def _square(self, values: Sequence[np.ndarray | None]) -> np.ndarray:
        """The matrix (m, m) of a function of distances, given its values of each table, or None."""
        pairs = zip(values, self._lags.tables, strict=True)
        return reduce(np.add, (k.take(table.pairs) for k, table in pairs if k is not None))

    @property
    def covariance(self) -> Tensor:
        """K."""
        return torch.from_numpy(self.K)

    def pull(self, bar: Tensor) -> Tensor:
        """`contract`, of a tensor."""
        return self.contract(bar.numpy())


class DevicePrior:
    """The covariance (m, m) of f at a few times (m,) of a device, by the transitions there."""

    def __init__(self, dynamics: Dynamics, times: Tensor) -> None:
        m = len(times)
        row, column = torch.tril_indices(m, m, device=times.device)
        self._dynamics, self._pairs = dynamics, (row, column)
        self._lags = times[row] - times[column]  # (p,), p = m (m + 1) / 2
        H, P0 = dynamics.observation_at(times), dynamics.prior_at(times)
        self._slope = torch.outer(H, P0 @ H)[..., None]  # (d, d, 1), of k in F
        F, _ = dynamics.transition(self._lags)
        self._parts = [
            (self._slope[s, s] * F[s, s]).sum((0, 1)) for s, _ in dynamics.blocks
        ]  # (p,) of each block
        self.covariance = times.new_empty(m, m)
        self.covariance[row, column] = self.covariance[column, row] = sum(self._parts)

    def pull(self, bar: Tensor) -> Tensor:
        """As of `DensePrior`."""
        row, column = self._pairs
        upper = torch.where(row == column, 0.5, 1.0) * bar[row, column]
        F_bar = self._slope * upper
        gradient = self._dynamics.transition_gradient(self._lags, F_bar, torch.zeros_like(F_bar))
        by_variance = torch.stack([part @ upper for part in self._parts])
        gradient[: len(by_variance)] += by_variance
        H, F = self._dynamics.observation_at(bar), None
        for i, (_, dP) in enumerate(reversed(self._dynamics.shape_slopes), 1):
            F = self._dynamics.transition(self._lags)[0] if F is None else F
            slope = torch.outer(H, constant_like(dP, bar) @ H)[..., None]
            gradient[-i] += (slope * F).sum((0, 1)) @ upper
        return gradient


Prior = DensePrior | DevicePrior


class DensePosterior:
    r"""Log normaliser of sites (m,), its slopes, and the marginals of f; see `Evidence`.

    Of sites divided by their values at c, the `centre` (m,) of `evidence`, which leaves
    :math:`\beta' = \beta - \omega c`, in terms of :math:`e = c - K \beta'`:

    .. math:: \log Z = -\tfrac12 e^\top S e - \beta'^\top c + \tfrac12 \beta'^\top K \beta'
              - \tfrac12 \log |B|, \qquad \alpha = \beta' + S e, \qquad m = K \alpha.
    """

    def __init__(
        self, prior: DensePrior, beta: Tensor, weight: Tensor, centre: Tensor | None
    ) -> None:
        K, rest, w = prior.K, beta.numpy(), weight.numpy()
        c = np.zeros_like(rest) if centre is None else centre.numpy()
        rest = rest - w * c
        root = np.sqrt(w)
        B = root[:, None] * K  # (m, m)
        B *= root
        B.flat[:: len(w) + 1] += 1.0
        L, failed = lapack.dpotrf(B.T, lower=True, overwrite_a=True)
        if failed:
            raise NotPositiveDefiniteError(
                "The covariance of a series is not finite or indefinite."
            )
        K_rest = K @ rest
        e = c - K_rest
        Se = root * lapack.dpotrs(L, root * e, lower=True)[0]
        value = -0.5 * (e @ Se) - rest @ c + 0.5 * (rest @ K_rest)
        self._prior, self._root, self._L, self._alpha = prior, root, L, rest + Se
        self.log_normalizer = float(value - np.log(L.diagonal()).sum())
        self.mean = torch.from_numpy(K @ self._alpha)

    @cached_property
    def var(self) -> Tensor:
        """(m,)."""
        K = self._prior.K
        half, _ = lapack.dtrtrs(self._L, self._root[:, None] * K, lower=True)
        return torch.from_numpy(np.maximum(K.diagonal() - np.einsum("ij,ij->j", half, half), 0.0))

    @property
    def spread(self) -> float:
        """The trace of V Omega, which is that of I - B^-1."""
        return float((1.0 - self._inverse.diagonal()).sum())

    def gradients(self) -> list[Tensor]:
        """As of `Evidence`."""
        return [self.parameter_gradient]

    @cached_property
    def parameter_gradient(self) -> Tensor:
        """(q,)."""
        root, alpha = self._root, self._alpha
        # LAPACK leaves the lower triangle of the inverse, which is the upper one of its transpose.
        return self._prior.contract(alpha[:, None] * alpha - root[:, None] * self._inverse.T * root)

    def information(self, slopes: np.ndarray) -> np.ndarray:
        r"""Fisher's information of p parameters and of the log noise, (p + 1, p + 1).

        `slopes` (p, q) are the derivatives of the log parameters of the dynamics. It is
        :math:`\tfrac12 \mathrm{tr}\, \Sigma^{-1} \dot\Sigma_i \Sigma^{-1} \dot\Sigma_j` with
        :math:`\Sigma = K + \Omega^{-1}`; weights are positive, inverse to the noise. O(p m^3), in
        float32, whose digits suffice for the first step of a search.
        """
        inverse = np.tril(self._inverse)
        S = self._root[:, None] * (inverse + np.tril(inverse, -1).T) * self._root
        by_noise = (S / self._root**2).astype(np.float32)  # a quotient of what float32 has not
        S = S.astype(np.float32)
        parts = [S @ self._prior.derivative(slope).astype(np.float32) for slope in slopes]
        parts.append(by_noise)
        found = np.empty((len(parts), len(parts)))
        for i, right in enumerate(parts):
            turned = np.ascontiguousarray(right.T)
            found[i, : i + 1] = found[: i + 1, i] = [
                0.5 * np.vdot(P, turned) for P in parts[: i + 1]
            ]
        return found

    def average_information(self, slopes: np.ndarray) -> np.ndarray:
        r"""The average information, (p + 1, p + 1), of the parameters of `information`.

        .. math:: \tfrac12 (\dot\Sigma_i \alpha)^\top \Sigma^{-1} (\dot\Sigma_j \alpha), \qquad
                  \alpha = \Sigma^{-1} y,

        is the mean of Fisher's and the observed information where :math:`\Sigma` is linear in the
        parameters: terms in :math:`\ddot\Sigma` are left out (Gilmour, Thompson and Cullis, 1995).
        O(p m^2).
        """
        parts = [self._prior.derivative(slope) @ self._alpha for slope in slopes]
        U = self._root * np.stack([*parts, self._alpha / self._root**2])  # (p + 1, m)
        half, _ = lapack.dtrtrs(self._L, U.T, lower=True)
        return 0.5 * half.T @ half

    @cached_property
    def _inverse(self) -> np.ndarray:
        return lapack.dpotri(self._L, lower=True)[0]


@dataclass(frozen=True)
class Evidence:
    """Normaliser of the sites and what its derivatives are made of."""

    log_normalizer: float  # nats
    parameter_gradient: Tensor  # (q,), in the log variances and log rates of the dynamics
    mean: Tensor  # (n,) of f given all sites: the derivative in beta
    var: Tensor  # (n,); the derivative in omega is -(mean^2 + var) / 2
    spread: float  # sum of weight * var

    def gradients(self) -> list[Tensor]:
        """Derivative of the log normaliser in the parameters of the dynamics, (q,), the only."""
        return [self.parameter_gradient]


def evidence(
    dynamics: Dynamics,
    gaps: Tensor,  # (n,), time from the point before; infinite where nothing is remembered
    beta: Tensor,  # (n,), sites of the points in order of time; zeros for a missing value
    weight: Tensor,  # (n,)
    centre: Tensor | None = None,  # (n,), values c of f near which the sites are
    *,
    prior: DensePrior | None = None,  # of these dynamics and gaps, if made before
) -> Evidence | DensePosterior:
    r"""Normaliser, its gradient and the marginals of f in one sweep forwards and one back.

    .. math:: \log Z = \log \int \prod_n \exp(\beta_n f_n - \omega_n f_n^2 / 2) \, dP(f).

    O(n d^3) time; memory 5 n d^2 numbers, in tiles beyond half a gigabyte.

    The first gap is not read, or that from the origin (`Dynamics.gaps`). Each site is divided by
    its value at the centre: where weights are large, log Z is a small difference of terms like
    :math:`\omega c^2 / 2`, which :math:`c = \beta / \omega` leaves out from the start. A
    NotPositiveDefiniteError says that negative weights leave no proper posterior.
    """
    _check_shapes(gaps, beta, weight)
    if prior is None and dynamics.origin is None and len(gaps) <= few_times(dynamics.n_states):
        lags = Lags.of(gaps)
        prior = None if lags is None else DensePrior(dynamics, lags)
    if prior is not None and prior.suits(weight):
        return DensePosterior(prior, beta, weight, centre)
    chunks = Chunks(len(gaps), dynamics.n_states)
    # Made outside the inference mode, which spares a tenth of the time, to be the caller's own.
    mean, var = (beta.new_empty(chunks.length, chunks.count) for _ in range(2))
    with torch.inference_mode():
        smoother = Smoother(dynamics, gaps, beta, weight)
        moments = Moments(dynamics, smoother.transitions.gaps)
        value, c = 0.0, None if centre is None else chunks.spread(centre)
        for tile, steps, run in smoother.filtered():
            value += smoother.tile_log_normalizer(tile, run, c)
            moments.begin(tile, run)
            mean[:, tile], var[:, tile] = smoother.smooth(tile, steps, run, moments)
        gradient = moments.gradient()
    mean, var = chunks.gather(mean), chunks.gather(var)
    return Evidence(value, gradient.clone(), mean, var, float(weight @ var))


class Smoother:
    """A series (n,) with its sites, in chunks; the chunks are joined when first asked for."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor, beta: Tensor, weight: Tensor) -> None:
        _check_shapes(gaps, beta, weight)
        self.dynamics, self.model = dynamics, Model(dynamics)
        self.chunks = Chunks(len(gaps), dynamics.n_states)
        self.sites = self.chunks.spread(beta), self.chunks.spread(weight)  # (L, C) each
        self.transitions = Transitions(dynamics, gaps, self.chunks)
        P0 = dynamics.prior_at(beta)
        self.prior = torch.zeros_like(P0[0]), P0
        self.has_negative_weights = bool((weight < 0).any())

    @cached_property
    def tree(self) -> ElementTree:
        """The chunks with their data, joined."""
        parts = [
            chunk_elements(self.model, self.transitions.over(tile), self.sites_of(tile))
            for tile in self.tiles()
        ]
        return ElementTree(parts[0] if len(parts) == 1 else Element.join(*parts))

    @cached_property
    def boundaries(self) -> tuple[Gaussian, Gaussian]:
        """States at the starts of the chunks given the past, information at the ends."""
        return self.tree.starts(*self.prior), self.tree.futures()

    def filtered(self) -> Iterator[tuple[slice, Steps, Filtered]]:
        """Run the filter, tile by tile of chunks.

        That negative weights leave no proper posterior may be known, and raised, after the last
        tile only.
        """
        (mean, cov), _ = self.boundaries
        negative = 0
        for tile in self.tiles():
            steps = self.transitions.over(tile)
            start = mean[..., tile].contiguous(), cov[..., tile].contiguous()
            run = filter_chunks(self.model, steps, self.sites_of(tile), start)
            _check_pivots(run)
            if self.has_negative_weights:
                _check_joints(run.end[1], start[1])
                negative += _negative_eigenvalues(run.D, self.sites_of(tile)[1])
            yield tile, steps, run
        if negative:
            raise NotPositiveDefiniteError(
                f"The precision of f has {negative} negative eigenvalues: the negative weights "
                "are too large. Halve the step that made them, or bound them from below."
            )

    def tile_log_normalizer(
        self, tile: slice, run: Filtered, centre: Tensor | None = None
    ) -> float:
        """Part of log Z that a tile adds; its sites are divided by their values at a centre."""
        c = None if centre is None else centre[:, tile]
        return filtered_log_normalizer(self.model, self.sites_of(tile), run, c)

    def smooth(self, tile: slice, steps: Steps, run: Filtered, visit: Visitor) -> Gaussian:
        """Come back through a tile; mean and variance of f, each (L, C)."""
        end = self._end(tile, run)
        mean, var, start = smooth_chunks(self.model, steps, run, end, visit)
        if self.has_negative_weights:
            _check_joints(end[1], start[1])
        return mean, var

    def _end(self, tile: slice, run: Filtered) -> Gaussian:
        """(r, N) at the ends of chunks, ``(I + J P)^-1`` times ``eta - J m`` and ``J``."""
        _, (eta, J) = self.boundaries
        eta, J = eta[..., tile].contiguous(), J[..., tile].contiguous()
        m, P = run.end
        inverse, _ = inverse_and_log_det(identity_plus(matmul(J, P)))
        return matvec(inverse, eta - matvec(J, m)), symmetrize(matmul(inverse, J))

    def tiles(self, width: int = 0) -> Iterator[slice]:
        """Tiles of chunks that fit in memory with `width` numbers a point beside the matrices."""
        return self.chunks.tiles(self.model.n_states, width)

    def sites_of(self, tile: slice) -> Sites:
        """Those of a tile of chunks."""
        beta, omega = self.sites
        return beta[:, tile], omega[:, tile]


def _negative_eigenvalues(D: Tensor, omega: Tensor) -> int:
    """What a tile adds to the number of negative eigenvalues of the precision of f."""
    negative = D < 0
    return int((negative & (omega < 0)).sum()) - int((negative & (omega > 0)).sum())


def _check_pivots(run: Filtered) -> None:
    """Refuse a D that is not finite, or so near 0 that variances lose half their digits."""
    low = float(run.D.abs().min())
    if not (low > LEAST_PIVOT and math.isfinite(low)):
        raise NotPositiveDefiniteError(
            f"1 + weight * var must not vanish at any site, got {low:.3g} in size: the posterior "
            "is not proper, or not to be told from one that is not. Halve the step that made the "
            "weights, or bound them from below."
        )


def _check_joints(ends: Tensor, starts: Tensor) -> None:
    """Refuse what rounding has spoilt: matrices (d, d, C) at the ends of chunks and the starts.

    The tree and the passes come to what is known between two chunks in different ways, and with
    negative weights either may lose digits.
    """
    ends, starts = ends[..., :-1], starts[..., 1:]
    scale = 1.0 + ends.abs().amax((0, 1)) if ends.shape[-1] else ends.sum((0, 1))
    if not bool(((ends - starts).abs() <= MISFIT * scale).all()):
        raise NotPositiveDefiniteError(
            "Rounding has spoilt what the smoother knows between two chunks: the negative weights "
            "leave a posterior that is nearly improper. Halve the step that made them, or bound "
            "them from below."
        )


def _check_shapes(gaps: Tensor, beta: Tensor, weight: Tensor) -> None:
    if not len(gaps) or not gaps.shape == beta.shape == weight.shape == (len(gaps),):
        raise ValueError(
            "gaps, beta and weight must be vectors of one length, at least 1; got shapes "
            f"{tuple(gaps.shape)}, {tuple(beta.shape)} and {tuple(weight.shape)}."
        )
