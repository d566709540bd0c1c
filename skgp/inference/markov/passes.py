r"""The recursions of the smoother, step by step over chunks that are worked on side by side.

Three passes (design: a covariance-form Kalman filter and the Bryson-Frazier smoother [1]_, with no
matrix inverted): `chunk_elements` takes the data of every chunk into an element, whatever its
state at the start; `filter_chunks` runs the filter once the states at the starts are known;
`smooth_chunks` comes back from the ends.

A point is a site :math:`\exp(\beta f - \omega f^2 / 2)` of f = H s. Given the state predicted,
:math:`N(m, P)`, with :math:`k = P H^\top`, :math:`p = H k` and :math:`D = 1 + \omega p`, the state
filtered is :math:`N(m + k e, P - k k^\top g)`, :math:`e = (\beta - \omega H m) / D`,
:math:`g = \omega / D`. What later data say is :math:`(r, N)`: the state smoothed has mean
:math:`m + P r` and covariance :math:`P - P N P`.

The gradient of the log normaliser is taken by hand, on the way back (`Moments`), so that no graph
is kept. Its derivatives in the state predicted at a point are r (mean) and
:math:`G / 2 = (r r^\top - N) / 2` (covariance), whence those in F and Q:

.. math:: \bar F = r m^\top + G F P, \qquad \bar Q = G / 2 \qquad
          (m, P \text{ filtered at the point before}),

and since :math:`\partial F / \partial \log \lambda_i = t B_i F` and
:math:`\partial Q / \partial \log \lambda_i = t F W_i F^\top`, the whole sum over the points is
that of two d x d matrices, :math:`\sum t (r m_p^\top + G F P F^\top)` and
:math:`\sum t F^\top G F`.

References
----------
.. [1] Bierman (1973), Fixed interval smoothing with discrete measurements.
"""

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from skgp.inference.markov.elements import Element
from skgp.inference.markov.series import Steps
from skgp.kernels.sde import Dynamics
from skgp.linalg.runtime import asks_for_gradients
from skgp.linalg.small_matrices import batch_first, inner, matmul, matvec

Gaussian = tuple[Tensor, Tensor]  # mean (d, C) and covariance (d, d, C)
Sites = tuple[Tensor, Tensor]  # beta and omega, each (L, C)


class Model:
    """The zeros in the observation row and between components, which need no arithmetic."""

    def __init__(self, dynamics: Dynamics) -> None:
        self.n_states = dynamics.n_states
        self.blocks = [states for states, _ in dynamics.blocks]
        self.runs = _runs([states.stop - states.start for states in self.blocks])
        values = dynamics.observation.tolist()
        self.row = [(i, h) for i, h in enumerate(values) if h != 0]
        self.picks_first = self.row == [(0, 1.0)]  # as any single component does

    def observe(self, X: Tensor) -> Tensor:
        """``H X``: (d, ...) to (...); a view of X where H picks one state."""
        (i, h), *rest = self.row
        out = X[i] if h == 1 else h * X[i]
        for i, h in rest:
            out = out.add(X[i], alpha=h)
        return out

    def add_observed(self, r: Tensor, e: Tensor) -> None:
        """``r += H' e`` in place."""
        for i, h in self.row:
            r[i].add_(e, alpha=h)

    def add_observed_outer(self, N: Tensor, u: Tensor) -> None:
        """``N += H' u' + u H`` in place, for u (d, ...)."""
        for i, h in self.row:
            N[i].add_(u, alpha=h)
            N[:, i].add_(u, alpha=h)

    def condition(self, P: Tensor, k: Tensor, g: Tensor, D: Tensor) -> Tensor:
        """``P - k k' g``, of which ``H P = k / D`` does not cancel where H picks one state."""
        if not self.picks_first:
            return P.addcmul(k[:, None], k * g, value=-1)
        out, rest = torch.empty_like(P), k[1:]
        torch.div(k, D, out=out[0])
        if len(rest):
            out[1:, 0] = out[0, 1:]
            torch.addcmul(P[1:, 1:], rest[:, None], rest * g, value=-1, out=out[1:, 1:])
        return out

    def times(self, F: Tensor, X: Tensor) -> Tensor:
        """``F X`` for block-diagonal F (d, d, ...) and X (d, e, ...) or (d, ...)."""
        product = matmul if X.ndim == F.ndim else matvec
        if len(self.blocks) == 1:
            return product(F, X)
        out = torch.empty_like(X, memory_format=torch.contiguous_format)
        for states, size in self.runs:
            if states.stop - states.start == size or asks_for_gradients(F):
                out[states] = product(F[states, states], X[states])
            else:
                _times_blocks(F[states, states], X[states], size, out[states])
        return out

    def transposed_times(self, F: Tensor, X: Tensor) -> Tensor:
        """``F' X``."""
        return self.times(F.transpose(0, 1), X)

    def sandwich(self, F: Tensor, P: Tensor) -> Tensor:
        """``F P F'`` for symmetric P."""
        return self.times(F, self.times(F, P).transpose(0, 1))


def _runs(sizes: list[int]) -> list[tuple[slice, int]]:
    """States of consecutive blocks of one size, and the size."""
    runs, start = [], 0
    for size, group in groupby(sizes):
        stop = start + size * len(list(group))
        runs.append((slice(start, stop), size))
        start = stop
    return runs


def _times_blocks(F: Tensor, X: Tensor, size: int, out: Tensor) -> None:
    """Write ``F X`` of block-diagonal F (b k, b k, ...) with blocks of `size` k, all at once."""
    n_blocks = len(F) // size
    # (k, k, ..., b), a view
    blocks = F.unflatten(1, (n_blocks, size)).unflatten(0, (n_blocks, size)).diagonal(0, 0, 2)
    blocks = blocks.movedim(-1, 0)  # (b, k, k, ...)
    parts, result = X.unflatten(0, (n_blocks, size)), out.unflatten(0, (n_blocks, size))
    for i in range(size):
        for j in range(size):
            f = blocks[:, i, j]
            f = f.unsqueeze(1) if parts.ndim > f.ndim + 1 else f  # against (b, e, ...)
            if j == 0:
                torch.mul(f, parts[:, j], out=result[:, i])
            else:
                result[:, i].addcmul_(f, parts[:, j])


def chunk_elements(model: Model, steps: Steps, sites: Sites) -> Element:
    """Take the data of every chunk into one element, from before its first point to its last.

    Their constants `ll` are left at 0: the filter has log Z (`filtered_log_normalizer`).
    """
    beta, omega = sites
    d, n_chunks = model.n_states, beta.shape[1]
    A = torch.eye(d, dtype=beta.dtype, device=beta.device)[..., None].repeat(1, 1, n_chunks)
    P, J = torch.zeros_like(A), torch.zeros_like(A)
    b, eta = torch.zeros_like(A[0]), torch.zeros_like(A[0])
    ll = torch.zeros_like(A[0, 0])
    e, g, D = (torch.empty_like(ll) for _ in range(3))
    for j in range(len(beta)):
        F, Q = steps[j]
        A, b = model.times(F, A), model.times(F, b)
        P = model.sandwich(F, P).add_(Q)
        k, a = model.observe(P), model.observe(A)
        _meet((beta[j], omega[j]), (model.observe(b), model.observe(k)), e, g, D)
        scaled = a * g
        eta.addcmul_(a, e)
        J.addcmul_(a[:, None], scaled)
        b = b.addcmul(k, e)
        A = A.addcmul(k[:, None], scaled, value=-1)
        P = model.condition(P, k, g, D)
    return Element.of(*batch_first(A, b, P, eta, J, ll))


@dataclass(frozen=True)
class Filtered:
    """The filter over a tile of chunks."""

    mean: Tensor  # (L, d, C) of the state predicted: given all the data before the point
    cov: Tensor  # (L, d, d, C)
    e: Tensor  # (L, C), as g and D: see the module
    g: Tensor
    D: Tensor
    end: Gaussian  # of the state at the ends, their data taken in


def filter_chunks(model: Model, steps: Steps, sites: Sites, start: Gaussian) -> Filtered:
    """Run the filter through every chunk of a tile, from the states given the data before it."""
    beta, omega = sites
    length, n_chunks = beta.shape
    d = model.n_states
    mean, cov = beta.new_empty(length, d, n_chunks), beta.new_empty(length, d, d, n_chunks)
    e, g, D = (torch.empty_like(beta) for _ in range(3))
    m, P = start
    for j in range(length):
        F, Q = steps[j]
        mean[j] = model.times(F, m)
        torch.add(model.sandwich(F, P), Q, out=cov[j])
        k = model.observe(cov[j])
        site, f = (beta[j], omega[j]), (model.observe(mean[j]), model.observe(k))
        _meet(site, f, e[j], g[j], D[j])
        m = mean[j].addcmul(k, e[j])
        P = model.condition(cov[j], k, g[j], D[j])
    return Filtered(mean, cov, e, g, D, (m, P))


def filtered_log_normalizer(
    model: Model, sites: Sites, filtered: Filtered, centre: Tensor | None
) -> float:
    r"""Sum over a tile of the log integrals of the sites over what was predicted of f, in nats.

    With the sites divided by their values at c, `centre` (L, C), factors :math:`\exp(\beta' (f - c)
    - \omega (f - c)^2 / 2)` with :math:`\beta' = \beta - \omega c`, they are

    .. math:: \frac{\beta' (m - c) - \omega (m - c)^2 / 2 + \beta'^2 p / 2}{D}
              - \tfrac12 \log |D|,

    where no large terms cancel if c is near :math:`\beta / \omega`.
    """
    (beta, omega), m = sites, model.observe(filtered.mean.movedim(1, 0))
    if centre is not None:
        beta, m = torch.addcmul(beta, omega, centre, value=-1), m - centre
    p = model.observe(model.observe(filtered.cov.movedim((1, 2), (0, 1))))
    total = torch.addcmul(beta, omega, m, value=-0.5).mul_(m)
    total.addcmul_(beta * beta, p, value=0.5).div_(filtered.D)
    return float(total.sum() - 0.5 * filtered.D.abs().log_().sum())


def smooth_chunks(
    model: Model, steps: Steps, filtered: Filtered, end: Gaussian, visit: "Visitor"
) -> tuple[Tensor, Tensor, Gaussian]:
    r"""Come back through every chunk of a tile, from (r, N) at its end; `visit` sees every step.

    Returns mean and variance (L, C) of f given all data, :math:`H m + p e + s / D` and
    :math:`p / D - t / D^2` with :math:`s = k^\top r`, :math:`t = k^\top N k` before the point's own
    data are taken in, and (r, N) before the first points of the chunks.
    """
    r, N = (x.clone() for x in end)
    mean, var = torch.empty_like(filtered.e), torch.empty_like(filtered.e)
    for j in reversed(range(len(mean))):
        F, Q = steps[j]
        e, g, D, k = filtered.e[j], filtered.g[j], filtered.D[j], model.observe(filtered.cov[j])
        p = model.observe(k)
        Nk = matvec(N, k)
        s, t = inner(k, r), inner(k, Nk)
        torch.addcmul(model.observe(filtered.mean[j]), p, e, out=mean[j]).addcdiv_(s, D)
        torch.sub(p, t.div(D), out=var[j]).div_(D).clamp_(min=0)
        model.add_observed(r, torch.addcmul(e, g, s, value=-1))
        # N becomes (I - H'k'g) N (I - g k H) + H'H g, two outer products with the row H.
        u = Nk.mul_(-g)
        model.add_observed(u, torch.addcmul(g, g * g, t).mul_(0.5))
        model.add_observed_outer(N, u)
        visit.updated(j, F, Q, r, N)
        r, N = model.transposed_times(F, r), model.sandwich(F.transpose(0, 1), N)
        visit.moved(j, r, N)
    return mean, var, (r, N)


class Visitor:
    """What else is wanted of the way back; by default nothing."""

    def updated(self, j: int, F: Tensor, Q: Tensor, r: Tensor, N: Tensor) -> None:
        """At point j, whose own data are in (r, N): they belong to the state predicted."""

    def moved(self, j: int, r: Tensor, N: Tensor) -> None:
        """Before point j: (r, N) belong to the state filtered at point j - 1."""


def _meet(site: Gaussian, f: Gaussian, e: Tensor, g: Tensor, D: Tensor) -> None:
    """Write e, g and D of sites (beta, omega) that meet f (m, p)."""
    (beta, omega), (m, p) = site, f
    torch.mul(omega, p, out=D).add_(1.0)
    torch.addcmul(beta, omega, m, value=-1, out=e).div_(D)
    torch.div(omega, D, out=g)


@dataclass(frozen=True)
class GradientSums:
    """Sums over all points from which the gradient in the dynamics' parameters is made, (d, d).

    Of entries between blocks nothing is read.
    """

    transition: Tensor  # t (r m_p' + G F P F'), whose product with B_i is a derivative
    noise: Tensor  # t F'G F, of which half the product with W_i is
    scale: Tensor  # G Q, entry by entry
    start: Tensor  # G - F'G F, and G before the first point: by it P0 acts if it moves
    turned: Tensor  # what products with X_i add, of `Dynamics.shape_slopes`

    @staticmethod
    def zeros(like: Tensor) -> "GradientSums":
        """Before the first point."""
        return GradientSums(*(torch.zeros_like(like) for _ in range(5)))

    def gradient(self, dynamics: Dynamics) -> Tensor:
        """Derivative of the log normaliser in the dynamics' parameters, (q,), in main memory."""
        sums = torch.stack([self.transition, self.noise, self.scale, self.start, self.turned])
        transition, noise, scale, start, turned = sums.cpu().numpy()
        by_variance, by_rate, by_shape = [], [], []
        for s, block in dynamics.blocks:
            by_variance.append(0.5 * scale[s, s].sum())
            for B, W in block.rate_slopes():
                by_rate.append((transition[s, s] * B + 0.5 * noise[s, s] * W).sum())
        P0 = dynamics.stationary.numpy()
        for parts in dynamics.shape_slopes:
            B, dP, X = (part.numpy() for part in parts)
            W = -(B @ P0 + P0 @ B.T)
            by_shape.append((transition * B + turned * X + 0.5 * (noise * W + start * dP)).sum())
        return torch.tensor([*by_variance, *by_rate, *by_shape], dtype=torch.float64)


class Moments(Visitor):
    """`GradientSums` of the way back."""

    def __init__(self, dynamics: Dynamics, gaps: Tensor) -> None:
        self._dynamics = dynamics
        # Over an infinite gap F = 0 and nothing depends on a rate.
        self._gaps = gaps.nan_to_num(posinf=0.0)
        self._prior = dynamics.prior_at(gaps)
        self._sums = GradientSums.zeros(self._prior)
        self._has_shapes = bool(dynamics.shape_slopes)

    def begin(self, tile: slice, run: Filtered) -> None:
        """Turn to the run over another tile of chunks."""
        self._run, self._gap = run, self._gaps[:, tile]
        self._is_first = tile.start == 0
        self._spread = torch.zeros_like(run.end[1])  # summed over the chunks at the end
        self._level = torch.zeros_like(run.end[1]) if self._has_shapes else None

    def updated(self, j: int, F: Tensor, Q: Tensor, r: Tensor, N: Tensor) -> None:
        """Sum ``t (r m_p' + G F P F')`` and ``G Q``, entry by entry."""
        d, gap = len(r), self._gap[j]
        minus_G = _minus_slope(r, N)
        self._spread.addcmul_(minus_G, Q, value=-1)
        if self._level is not None:
            self._level -= minus_G
        moved = self._run.cov[j] - Q  # F P F'
        self._sums.transition.addmm_(r * gap, self._run.mean[j].T)
        weighted = minus_G.mul_(gap).reshape(d, -1)
        self._sums.transition.addmm_(weighted, moved.reshape(d, -1).T, alpha=-1)

    def moved(self, j: int, r: Tensor, N: Tensor) -> None:
        """Sum ``t F'G F``; at the first point of all, G belongs to the prior."""
        gap = self._gap[j]
        self._sums.noise.addmm_(r * gap, r.T)
        noise = self._sums.noise
        noise -= (N.reshape(-1, len(gap)) @ gap).view_as(noise)
        if self._level is not None:
            self._level += _minus_slope(r, N)
        if j == 0:
            self._sums.scale.add_(self._spread.sum(-1))
            if self._level is not None:
                self._sums.start.add_(self._level.sum(-1))
            if self._is_first:
                first = _minus_slope(r[:, 0], N[..., 0])
                self._sums.scale.sub_(first * self._prior)
                self._sums.start.sub_(first)

    def gradient(self) -> Tensor:
        """As of `GradientSums`."""
        return self._sums.gradient(self._dynamics)


def _minus_slope(r: Tensor, N: Tensor) -> Tensor:
    """``-G = N - r r'``."""
    return N.addcmul(r[:, None], r, value=-1)
