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

The gradient is that of the filter by hand, so that no graph is kept. With (r, N) of the smoother
the derivatives of :math:`\log Z` in the state predicted at a point are r (mean) and
:math:`G / 2 = (r r^\top - N) / 2` (covariance), whence those in F and Q:

.. math:: \bar F = r m^\top + G F P, \qquad \bar Q = G / 2 \qquad
          (m, P \text{ filtered at the point before}),

and since :math:`\partial F / \partial \log \lambda_i = t B_i F` and
:math:`\partial Q / \partial \log \lambda_i = t F W_i F^\top`, the whole sum over the points is
that of two d x d matrices, :math:`\sum t (r m_p^\top + G F P F^\top)` and
:math:`\sum t F^\top G F`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.markov.chunks import Chunks, Steps, Transitions
from skgp.inference.markov.defaults import LEAST_PIVOT, MISFIT
from skgp.inference.markov.dense import DensePosterior, DensePrior
from skgp.inference.markov.elements import Element, ElementTree
from skgp.inference.markov.passes import (
    Filtered,
    Gaussian,
    Model,
    Sites,
    Visitor,
    chunk_elements,
    filter_chunks,
    filtered_log_normalizer,
    smooth_chunks,
)
from skgp.kernels.sde_dynamics import Dynamics
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.small_matrices import (
    identity_plus,
    inverse_and_log_det,
    matmul,
    matvec,
    symmetrize,
)

__all__ = ["Evidence", "Smoother", "evidence"]


@dataclass(frozen=True)
class Evidence:
    """Normaliser of the sites and what its derivatives are made of."""

    log_normalizer: float  # nats
    parameter_gradient: Tensor  # (q,), in the log variances and log rates of the dynamics
    mean: Tensor  # (n,) of f given all sites: the derivative in beta
    var: Tensor  # (n,); the derivative in omega is -(mean^2 + var) / 2


def evidence(
    dynamics: Dynamics,
    gaps: Tensor,
    beta: Tensor,
    weight: Tensor,
    centre: Tensor | None = None,
    *,
    prior: DensePrior | None = None,
) -> Evidence | DensePosterior:
    r"""Normaliser, its gradient and the marginals of f in one sweep forwards and one back.

    .. math:: \log Z = \log \int \prod_n \exp(\beta_n f_n - \omega_n f_n^2 / 2) \, dP(f).

    O(n d^3) time; memory 5 n d^2 numbers, in tiles beyond half a gigabyte.

    Parameters
    ----------
    dynamics : Dynamics
    gaps : Tensor of shape (n,)
        Time from the point before, not negative; the first is not read. Infinite where nothing is
        remembered.
    beta, weight : Tensor of shape (n,)
        Sites of the points in order of time; zeros for a missing value.
    centre : Tensor of shape (n,), optional
        Values c of f near which the sites are: each is divided by its value there. Where weights
        are large, log Z is a small difference of terms like :math:`\omega c^2 / 2`, which
        :math:`c = \beta / \omega` leaves out from the start.
    prior : DensePrior, optional
        Of these dynamics and gaps, if made before.

    Returns
    -------
    Evidence, or what has its attributes

    Raises
    ------
    NotPositiveDefiniteError
        If negative weights leave no proper posterior.
    """
    _check_shapes(gaps, beta, weight)
    prior = DensePrior.of(dynamics, gaps) if prior is None else prior
    if prior is not None and prior.suits(weight):
        return DensePosterior(prior, beta, weight, centre)
    chunks = Chunks(len(gaps))
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
    return Evidence(value, gradient.clone(), chunks.gather(mean), chunks.gather(var))


class Smoother:
    """A series (n,) with its sites, in chunks; the chunks are joined when first asked for."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor, beta: Tensor, weight: Tensor) -> None:
        _check_shapes(gaps, beta, weight)
        self.dynamics, self.model = dynamics, Model(dynamics)
        self.chunks = Chunks(len(gaps))
        self.sites = self.chunks.spread(beta), self.chunks.spread(weight)  # (L, C) each
        self.transitions = Transitions(dynamics, gaps, self.chunks)
        P0 = dynamics.stationary.to(beta)
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
        beta, omega = self.sites
        return beta[:, tile], omega[:, tile]


class Moments(Visitor):
    """Sums over the way back from which the gradient in the dynamics' parameters is made."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor) -> None:
        self._dynamics = dynamics
        # Over an infinite gap F = 0 and nothing depends on a rate.
        self._gaps = gaps.nan_to_num(posinf=0.0)
        self._prior = dynamics.stationary.to(gaps)
        zero = torch.zeros_like(self._prior)
        self._transition, self._noise, self._scale = zero.clone(), zero.clone(), zero.clone()

    def begin(self, tile: slice, run: Filtered) -> None:
        """Turn to the run over another tile of chunks."""
        self._run, self._gap = run, self._gaps[:, tile]
        self._is_first = tile.start == 0
        self._spread = torch.zeros_like(run.end[1])  # summed over the chunks at the end

    def updated(self, j: int, F: Tensor, Q: Tensor, r: Tensor, N: Tensor) -> None:
        """Sum ``t (r m_p' + G F P F')`` and ``G Q``, entry by entry."""
        d, gap = len(r), self._gap[j]
        minus_G = _minus_slope(r, N)
        self._spread.addcmul_(minus_G, Q, value=-1)
        moved = self._run.cov[j] - Q  # F P F'
        self._transition.addmm_(r * gap, self._run.mean[j].T)
        weighted = minus_G.mul_(gap).reshape(d, -1)
        self._transition.addmm_(weighted, moved.reshape(d, -1).T, alpha=-1)

    def moved(self, j: int, r: Tensor, N: Tensor) -> None:
        """Sum ``t F'G F``; at the first point of all, G belongs to the prior."""
        gap = self._gap[j]
        self._noise.addmm_(r * gap, r.T)
        self._noise -= (N.reshape(-1, len(gap)) @ gap).view_as(self._noise)
        if j == 0:
            self._scale += self._spread.sum(-1)
            if self._is_first:
                self._scale -= _minus_slope(r[:, 0], N[..., 0]) * self._prior

    def gradient(self) -> Tensor:
        """Derivative of the log normaliser in the dynamics' parameters, (q,).

        The sums over all gaps are those of one short gap with ``F_bar F'`` and ``F'Q_bar F`` equal
        to them, over which F is easily inverted.
        """
        gap, F = self._short_gap()
        inverse = torch.linalg.inv(F)
        F_bar = self._transition @ inverse.T / gap
        Q_bar = inverse.T @ self._noise @ inverse / (2 * gap)
        gradient = self._dynamics.transition_gradient(gap, F_bar[..., None], Q_bar[..., None])
        for i, (states, _) in enumerate(self._dynamics.blocks):
            gradient[i] = 0.5 * self._scale[states, states].sum()
        return gradient

    def _short_gap(self) -> tuple[Tensor, Tensor]:
        """A gap (1,) over which the state hardly moves, and its F (d, d)."""
        gap = self._gaps.new_ones(1)
        while True:
            F = self._dynamics.transition(gap)[0][..., 0]
            if float((F - torch.eye(len(F)).to(F)).abs().max()) < 0.1:
                return gap, F
            gap = gap / 16


def _minus_slope(r: Tensor, N: Tensor) -> Tensor:
    """``-G = N - r r'``."""
    return N.addcmul(r[:, None], r, value=-1)


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
