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

A short series takes one Cholesky factor instead (:mod:`.short`), a long one of many states factors
of chunks where their covariance has a short form (:mod:`.dense_chunks`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from skgp.inference.defaults import LEAST_PIVOT, MISFIT
from skgp.inference.markov.dense_chunks import DenseEvidence, dense_evidence
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
from skgp.inference.markov.short import DensePosterior, DensePrior
from skgp.kernels.sde import Dynamics
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.small_matrices import (
    batch_last,
    identity_plus,
    inverse_and_log_det,
    matmul,
    matvec,
    symmetrize,
)


@dataclass(frozen=True)
class Evidence:
    """Normaliser of the sites and what its derivatives are made of."""

    log_normalizer: float  # nats
    parameter_gradient: Tensor  # (q,), in the log variances and log rates of the dynamics
    mean: Tensor  # (n,) of f given all sites: the derivative in beta
    var: Tensor  # (n,); the derivative in omega is -(mean^2 + var) / 2
    weight: Tensor  # (n,) of the sites

    @property
    def spread(self) -> float:
        """Sum of weight * var."""
        return float(self.weight @ self.var)

    def gradients(self) -> list[Tensor]:
        """Derivative of the log normaliser in the parameters of the dynamics, (q,), the only."""
        return [self.parameter_gradient]

    def misfit(self, centre: Tensor) -> float:
        """Weighted sum of squares of the mean less some values (n,) of f."""
        residual = self.mean - centre
        return float((self.weight * residual) @ residual)


#: What the sites of a series leave, by whichever route.
SitesEvidence = Evidence | DenseEvidence | DensePosterior


def evidence(
    dynamics: Dynamics,
    gaps: Tensor,  # (n,), time from the point before; infinite where nothing is remembered
    beta: Tensor,  # (n,), sites of the points in order of time; zeros for a missing value
    weight: Tensor,  # (n,)
    centre: Tensor | None = None,  # (n,), values c of f near which the sites are
    *,
    prior: DensePrior | None = None,  # of these dynamics and gaps, if made before
) -> SitesEvidence:
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
    if prior is not None and prior.suits(weight.numpy()):
        at = None if centre is None else centre.numpy()
        return DensePosterior(prior, beta.numpy(), weight.numpy(), at)
    if (found := dense_evidence(dynamics, gaps, beta, weight, centre)) is not None:
        return found
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
    return Evidence(value, gradient.clone(), mean, var, weight)


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
        before, after = self.tree.starts(*self.prior), self.tree.futures()
        return batch_last(*before), batch_last(*after)

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
        # (r, N) at the ends of chunks: (I + J P)^-1 times eta - J m and J.
        _, (eta, J) = self.boundaries
        eta, J = eta[..., tile].contiguous(), J[..., tile].contiguous()
        m, P = run.end
        inverse, _ = inverse_and_log_det(identity_plus(matmul(J, P)))
        end = matvec(inverse, eta - matvec(J, m)), symmetrize(matmul(inverse, J))
        mean, var, start = smooth_chunks(self.model, steps, run, end, visit)
        if self.has_negative_weights:
            _check_joints(end[1], start[1])
        return mean, var

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
