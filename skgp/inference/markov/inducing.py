r"""Doubly sparse variational GPs: the states u at M knots stand for those at all times.

The ELBO is that of every sparse variational GP. Its best q is the prior
times sites on pairs of neighbouring states, and those are sums over the rows,

.. math:: \lambda_k = \sum_n \beta_n h_n, \qquad \Lambda_k = \sum_n \omega_n h_n h_n^\top,
          \qquad \beta_n = g_n + \omega_n m_n, \quad \omega_n = -2\, \partial \ell_n / \partial v_n

with :math:`\ell_n` the expected log-density of the row and :math:`g_n` its derivative in the mean:
the sites of exact inference (:mod:`.sites`), projected. A natural-gradient step of rate
:math:`\rho` moves the sites that fraction of the way to these sums (eqs. 17-20, B.2). It is what
differentiating between mean and natural parameters through the reverse subset inverse gives, and
needs no such operator. Rows enter by sums per interval: O(n d^3 + M d^3), no loop over rows or
knots. In terms of sites of f the ELBO is that of exact inference, with

.. math:: \log Z - \tfrac12 \sum_n \omega_n T_n

in place of the log normaliser: its derivatives are the moments, :math:`m_n` in :math:`\beta_n` and
:math:`-(m_n^2 + v_n) / 2` in :math:`\omega_n`. For Gaussian noise it is the bound of Titsias, after
one step.

Joint draws (A.2) take linear time. Given u, the process in one interval is independent of that in
another. A draw of u is a walk along the knots, which q makes a Markov chain; within an interval
Matheron's rule turns a path of the prior into one that ends where u says,

.. math:: f(x) = h(x)^\top (u_k, u_{k+1}) + \tilde f(x) - h(x)^\top (\tilde s_k, \tilde s_{k+1}),

with :math:`\tilde s` a prior path and h that of :mod:`.conditionals`. The path may begin anywhere,
as the rule conditions on where it does: it begins at :math:`\tilde s_k = 0`, before the first knot
in the stationary distribution. All intervals are walked through side by side; crowded ones are
first divided by states drawn at some of their times.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import CROWDED, MAX_KNOTS, PER_SCALE
from skgp.inference.markov.conditionals import Conditionals, condition
from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.knots import Chain, PairPosterior, PairSites, infer_pairs
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import SeriesBound, SiteFit, climb, sites_mean
from skgp.kernels.sde import Dynamics, state_space
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import TensorState, standard_normal
from skgp.linalg.small_matrices import matmul, square_root


@dataclass(frozen=True)
class InducingPosterior:
    """What sites of f (n,), projected to the pairs, say of f at the same times."""

    rows: Conditionals
    sites: PairSites  # of the pairs; with the base, if any: all that predictions need besides knots
    pairs: PairPosterior
    beta: Tensor
    weight: Tensor
    log_normalizer: float  # of the pairs, less half the sum of weight * T
    mean: Tensor  # (n,) of f less its prior mean
    var: Tensor

    @property
    def parameter_gradient(self) -> Tensor:
        """Of the log normaliser in the parameters of the dynamics (q,), all sites held."""
        return self._gradients[0]

    def gradients(self) -> list[Tensor]:
        """As of `skgp.inference.markov.smoother.Evidence`."""
        return [self.parameter_gradient]

    @property
    def knot_gradient(self) -> Tensor:
        """Of the log normaliser in the knots (M,)."""
        return self._gradients[1]

    @cached_property
    def _gradients(self) -> tuple[Tensor, Tensor]:
        return self.rows.gradient(self.pairs, self.beta, self.weight)


def find_sites(
    dynamics: Dynamics,
    series: Series,
    likelihood: Likelihood,
    offset: float,
    knots: Tensor | None,
    *,
    start: tuple[Tensor, Tensor] | None = None,
    tol: float,
) -> SiteFit:
    """The best sites of a series, for states at all times or, if given, at knots (M,) only."""
    if knots is None:
        return fit_sites(dynamics, series, likelihood, offset=offset, start=start, tol=tol)
    if likelihood.is_gaussian:  # of which the first sites are the best
        return fit_inducing(dynamics, knots, series, likelihood, offset=offset, max_iter=1)
    return fit_inducing(dynamics, knots, series, likelihood, offset=offset, start=start, tol=tol)


def fit_inducing(
    dynamics: Dynamics,
    knots: Tensor,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    base: PairSites | None = None,
    **options: Any,
) -> SiteFit:
    """Maximise the ELBO over q by natural-gradient steps, for fixed hyper-parameters.

    O((n + M) d^3) a pass, and as much for the gradients when they are first asked for. As
    `fit_sites`, with knots (M,), rising; `base` are the sites of the pairs that rows of the past
    have left. The posterior is an `InducingPosterior`. ValueError if the knots are not rising and
    finite.
    """
    return climb(_InducingBound(dynamics, knots, series, likelihood, offset, base), **options)


def infer_inducing(
    rows: Conditionals, beta: Tensor, weight: Tensor, base: PairSites | None = None
) -> InducingPosterior:
    """Posterior given sites of f (n,) and sites of the pairs that stand besides."""
    sites = rows.collect(beta, weight)
    sites = sites if base is None else sites.plus(base)
    pairs = infer_pairs(rows.chain, sites)
    value = pairs.log_normalizer - 0.5 * float(weight @ rows.T)
    return InducingPosterior(rows, sites, pairs, beta, weight, value, *rows.marginals(pairs))


@dataclass(frozen=True)
class GaussianSums(TensorState):
    r"""What q of the states at fixed knots needs of rows under Gaussian noise; it adds over rows.

    The best sites are sums over the rows, :math:`\beta_n = w_n y_n / \sigma^2` and
    :math:`\omega_n = w_n / \sigma^2`, and so is what the ELBO has beside their normaliser.
    """

    sites: PairSites
    constant: float  # sum of w [log 2 pi sigma^2 + (y^2 + T) / sigma^2]

    @staticmethod
    def of(data: Data, *, kernel: Any, knots: Tensor, noise: float) -> "GaussianSums":
        """Of rows (n, 1) with targets (n,), at knots (M,), rising."""
        y = data.y
        weight = (torch.ones_like(y) if data.weight is None else data.weight) / noise
        rows = condition(state_space(kernel).at(), knots, data.X[:, 0])
        level = noise * math.log(2 * math.pi * noise)
        constant = float(weight @ (level + y.square() + rows.T))
        return GaussianSums(rows.collect(weight * y, weight), constant)

    def __add__(self, other: "GaussianSums") -> "GaussianSums":
        return GaussianSums(self.sites.plus(other.sites), self.constant + other.constant)

    def elbo(self, kernel: Any, knots: Tensor) -> float:
        """Of all these rows, in nats."""
        chain = Chain.of(state_space(kernel).at(), knots)
        return infer_pairs(chain, self.sites).log_normalizer - 0.5 * self.constant


class _InducingBound(SeriesBound):
    """Inference through the states at the knots."""

    def __init__(
        self,
        dynamics: Dynamics,
        knots: Tensor,
        series: Series,
        likelihood: Likelihood,
        offset: float,
        base: PairSites | None,
    ) -> None:
        super().__init__(series, likelihood, offset)
        _check_knots(knots)
        self._rows, self._base = condition(dynamics, knots, series.times), base
        # The ELBO of all rows so far, less what it was before these came.
        chain = self._rows.chain
        self._before = 0.0 if base is None else infer_pairs(chain, base).log_normalizer

    def infer(
        self, beta: Tensor, weight: Tensor
    ) -> tuple[InducingPosterior, tuple[float, ...]] | None:
        found = infer_inducing(self._rows, beta, weight, self._base)
        if not (found.pairs.is_proper and bool((found.var >= 0).all())):
            return None
        of_sites = sites_mean(beta, weight, found.mean, found.var)
        return found, (of_sites, -found.log_normalizer, self._before)


def _check_knots(knots: Tensor) -> None:
    if not (knots.ndim == 1 and len(knots) and bool(knots.isfinite().all())):
        raise ValueError(f"knots must be one or more finite times; got {knots}.")
    if not bool((knots.diff() > 0).all()):
        raise ValueError(
            "knots must rise strictly; sort them and drop those that coincide (torch.unique does "
            "both)."
        )


def shortest_scale(dynamics: Dynamics) -> float:
    """Shortest time over which a component of f changes; inf for constants."""
    rates = [rate for _, block in dynamics.blocks for rate in block.rates]
    return 1 / max(rates) if rates else math.inf


def place_knots(times: Tensor, n_knots: int | None = None, *, scale: float | None = None) -> Tensor:
    """Put knots at quantiles of the times (n,), distinct and rising, and more where f would move.

    At most `n_knots`, by default 1000. Not with these: where knots with times in between are
    further apart than a tenth of the `scale` of f's changes, those times are thinned to that
    spacing and added. As many knots as times are exact inference.
    """
    if n_knots is not None and n_knots < 1:
        raise ValueError(f"n_knots must be at least 1; got {n_knots}.")
    n = len(times)
    size = min(n, MAX_KNOTS if n_knots is None else n_knots)
    index = torch.linspace(0, n - 1, size, dtype=torch.float64, device=times.device).round().long()
    if n_knots is None and scale is not None and size > 1:
        index = _refined(times, index, scale / PER_SCALE)
    return times[index]


def _refined(times: Tensor, index: Tensor, spacing: float) -> Tensor:
    """Positions of knots among the times, with those added that wide intervals ask for."""
    start = times[index[:-1]]
    owner = torch.searchsorted(index, torch.arange(len(times), device=times.device), right=True) - 1
    owner = owner.clamp_max(len(start) - 1)
    # The first time of every cell of the spacing, counted from the knot before.
    cell = ((times - start[owner]) / spacing).floor()
    first = torch.ones_like(owner, dtype=torch.bool)
    first[1:] = (owner.diff() != 0) | (cell.diff() != 0)
    wide = (times[index].diff() > spacing)[owner]
    return torch.cat([index, (first & wide).nonzero()[:, 0]]).unique()


def draw_jointly(
    dynamics: Dynamics,
    knots: Tensor,
    pairs: PairPosterior,
    x: Tensor,
    n_samples: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw f, without its prior mean, jointly at times x (n,); (n, n_samples).

    O((n + M) d^2 (d + n_samples)), in about M + 2 sqrt(n) steps.
    """
    states = _draw_states(pairs, n_samples, generator)
    times, place = torch.unique(x, return_inverse=True)
    most = int(torch.bincount(torch.searchsorted(knots, times, right=True)).max()) if len(x) else 0
    if most > CROWDED:
        some = times[:: math.isqrt(most)]
        some = some[~torch.isin(some, knots)]
        rows = torch.eye(dynamics.n_states, dtype=x.dtype, device=x.device)
        found = _given_states(dynamics, knots, states, some, rows, generator)
        knots, order = torch.cat([knots, some]).sort()
        states = torch.cat([states, found])[order]
    H = dynamics.observation_at(x)[None]
    return _given_states(dynamics, knots, states, times, H, generator)[place, 0]


def _draw_states(pairs: PairPosterior, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draw the states at the knots from q, (M, d, n_samples)."""
    d, M = len(pairs.mean) // 2, pairs.mean.shape[-1] - 1
    mean, cov = pairs.mean[d:, :M].T, pairs.cov.movedim(-1, 0)
    own, regression = cov[:M, d:, d:], pairs.regressions()
    spread = own.clone()
    spread[1:] -= regression @ own[:-1] @ regression.mT
    noise = standard_normal((M, d, n_samples), generator, own.dtype)
    states = square_root(spread.movedim(0, -1)).movedim(-1, 0) @ noise
    for k in range(1, M):
        states[k] += regression[k - 1] @ states[k - 1]
    return states + mean[..., None]


def _given_states(
    dynamics: Dynamics,
    knots: Tensor,
    states: Tensor,
    times: Tensor,
    rows: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Draw functions of the state, `rows` (p, d), at rising times (n,), given the states at knots.

    `states` (M, d, S). Returns (n, p, S).
    """
    d, n_samples = states.shape[1:]
    interval = torch.searchsorted(knots, times, right=True)
    path, right = _prior_paths(dynamics, knots, times, interval, n_samples, generator)
    nowhere = states.new_zeros(1, d, n_samples)
    before = torch.cat([nowhere, states])[interval]  # (n, d, S)
    after = (torch.cat([states, nowhere]) - right)[interval]
    h = torch.stack([condition(dynamics, knots, times, row).h.T for row in rows], 1)  # (n, p, 2d)
    return rows @ path + h[..., :d] @ before + h[..., d:] @ after


def _prior_paths(
    dynamics: Dynamics,
    knots: Tensor,
    times: Tensor,
    interval: Tensor,
    n_samples: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Prior paths: states at the times (n, d, S) and at the ends of the intervals (M + 1, d, S).

    The latter are 0 where an interval has no end or holds no time.
    """
    d, M = dynamics.n_states, len(knots)
    first = torch.searchsorted(
        interval, torch.arange(M + 1, device=times.device)
    )  # row where an interval begins
    count = torch.bincount(interval, minlength=M + 1)

    def draw(Q: Tensor) -> Tensor:
        noise = standard_normal((d, n_samples, Q.shape[-1]), generator, Q.dtype)
        return matmul(square_root(Q), noise).movedim(-1, 0)

    def walk(states: Tensor, gaps: Tensor) -> Tensor:
        """States (k, d, S) after gaps (k,)."""
        F, Q = dynamics.transition(gaps)
        return F.movedim(-1, 0) @ states + draw(Q)

    states, path = times.new_zeros(M + 1, d, n_samples), times.new_empty(len(times), d, n_samples)
    states[:1] = draw(dynamics.prior_at(times)[..., None])
    last = torch.cat([times[:1] if len(times) else knots[:1], knots])  # of each interval's state
    for j in range(int(count.max())):
        here = (count > j).nonzero()[:, 0]
        at = first[here] + j
        states[here] = path[at] = walk(states[here], times[at] - last[here])
        last[here] = times[at]
    ends = (count[:M] > 0).nonzero()[:, 0]
    right = torch.zeros_like(states)
    right[ends] = walk(states[ends], knots[ends] - last[ends])
    return path, right
