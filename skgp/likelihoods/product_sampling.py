r"""Exact samples of the product of a Gaussian with a likelihood, many rows at a time.

The unbiased gradients of a log-expectation [1]_ need draws of

.. math:: \tilde q(f) \propto N(f; m, v)\, p(y \mid f).

In the standardised variable :math:`e = (f - m) / \sqrt v` its log-density is, up to a constant,

.. math:: \psi(e) = -\tfrac12 e^2 + \log p(y \mid m + \sqrt v\, e).

======================  ===========================================================================
likelihood              draws
======================  ===========================================================================
Gaussian                closed form
log-concave             :math:`\psi` is concave: rejection under its tangents near the mode and on
                        either side of it, where :math:`\psi` has fallen by about 1
Student-t, narrow       :math:`\psi` is concave where :math:`v \le 8 \nu \sigma^2 / (\nu + 1)`: as
                        above
Student-t, wide         tangents in the three intervals where :math:`\psi` is concave, chords of a
                        geometric grid in the two where it is convex
======================  ===========================================================================

The envelopes are of exponential pieces. A tangent lies above a concave function and a chord above a
convex one, wherever they are taken (adaptive rejection sampling [2]_): an envelope of :math:`\psi`
is valid however roughly the mode was found; its quality decides only how many proposals are
rejected. Let :math:`\psi` be concave, with its mode at 0, and fall by 1 at t. It lies above the
chord there, so that :math:`\int_0^t e^\psi \ge \int_0^t e^{-x/t} dx = (1 - 1/e)\, t`. A flat top
and the tangent at t, of slope -k, have the mass :math:`(t - 1/k) + 1/k = t`. Tangents at the mode
and at the points on either side where :math:`\psi` has fallen by 1 therefore have at most 1.58
times the mass of :math:`e^\psi`, on any interval; 1.13 times, if it is Gaussian. For falls from .8
to 1.25, which is what the search accepts, the same argument gives at most 1.82 (times 1.03, for a
middle tangent that is not quite flat).

A proposal is thus accepted with a probability above one half, independently of the others: the
chance that one of N entries has no draw after k proposals is below :math:`N 2^{-k}`, and the
rejection ends with probability 1. With the likelihoods here 77 to 95% are accepted. The paper's
sampler (supplement, section 1) proposes from :math:`N(m, n v)` with :math:`n \le 10`. It needs 2 to
12 proposals a draw on average over rows drawn from the model, but thousands in single rows where
the Gaussian and the likelihood disagree.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes,
   Proposition 1.
.. [2] Gilks and Wild (1992), Adaptive rejection sampling for Gibbs sampling.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.likelihoods import Gaussian, Likelihood, StudentT, defaults


class Target:
    r""":math:`\psi` and its derivatives, for e of shape (k, ...) or (...)."""

    def __init__(self, likelihood: Likelihood, y: Tensor, mean: Tensor, var: Tensor) -> None:
        self.likelihood, self.y, self.mean = likelihood, y, mean
        self.std = var.clamp_min(torch.finfo(var.dtype).tiny).sqrt()

    def value(self, e: Tensor) -> Tensor:
        """psi, up to a constant."""
        return -0.5 * e**2 + self.likelihood.log_prob(self.y, self.mean + self.std * e)

    def derivatives(self, e: Tensor) -> tuple[Tensor, Tensor]:
        """First and second derivative of psi in e."""
        first, second = self.likelihood.derivatives(self.y, self.mean + self.std * e)
        return self.std * first - e, self.std**2 * second - 1

    def precision(self, e: Tensor) -> Tensor:
        """Curvature -d^2 log p / df^2, at least 0."""
        return -self.likelihood.derivatives(self.y, self.mean + self.std * e)[1].clamp_max(0)


@dataclass(frozen=True)
class Pieces:
    """An unnormalised density of exponential pieces, tensors (n_pieces, ...).

    Piece k is ``exp(height - rate * x)`` at ``origin + toward * x`` for ``0 <= x <= width``: it
    starts at its highest point, so that no exponential overflows.
    """

    origin: Tensor
    toward: Tensor  # -1 or 1
    width: Tensor  # may be 0, or infinite
    height: Tensor
    rate: Tensor  # not negative

    @classmethod
    def of_lines(
        cls, left: Tensor, right: Tensor, point: Tensor, value: Tensor, slope: Tensor
    ) -> "Pieces":
        """Pieces on [left, right] of the lines through (point, value)."""
        falls = slope <= 0
        origin = torch.where(falls, left, right)
        height = value + slope * (origin - point)
        toward = torch.where(falls, 1.0, -1.0).to(value)
        return cls(origin, toward, right - left, height, slope.abs())

    @classmethod
    def stack(cls, parts: "list[Pieces]", ndim: int) -> "Pieces":
        """All pieces of all parts; any dimensions before the last `ndim` count pieces."""
        return cls(
            *(
                torch.cat([t.flatten(0, t.ndim - ndim - 1) for t in tensors])
                for tensors in zip(*(_tensors(part) for part in parts), strict=True)
            )
        )

    def log_mass(self) -> Tensor:
        """Log of the integral of every piece, (n_pieces, ...)."""
        fall = self.rate * self.width
        flat = fall < defaults.FLAT
        mass = torch.where(flat, self.width, -torch.expm1(-fall) / torch.where(flat, 1, self.rate))
        # The height may be infinite where the width is 0.
        return torch.where(self.width > 0, mass.log() + self.height, -math.inf)

    def draw(self, n_draws: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw positions (n_draws, ...); the log-density there comes with them.

        Two uniform numbers each: one picks the piece, the other is put through the inverse of its
        distribution function. ``O(n_draws n_pieces)`` per element.
        """
        cumulated = self.log_mass().softmax(0).cumsum(0)
        choice, u = uniform((2, n_draws, *self.origin.shape[1:]), self.origin, generator)
        index = torch.zeros_like(choice, dtype=torch.long)
        # The last piece takes what rounding leaves of the probabilities.
        for bound in cumulated[:-1]:
            index += choice > bound
        origin, toward, width, height, rate = (t.gather(0, index) for t in _tensors(self))
        fall = rate * width
        flat = fall < defaults.FLAT
        x = -torch.log1p(u * torch.expm1(-fall)) / torch.where(flat, 1, rate)
        x = torch.where(flat, u * width, x)
        return origin + toward * x, height - rate * x


def _tensors(pieces: Pieces) -> tuple[Tensor, ...]:
    return pieces.origin, pieces.toward, pieces.width, pieces.height, pieces.rate


def tangents(density: Target, lower: Tensor, upper: Tensor) -> tuple[Pieces, Tensor]:
    """Three tangents of psi over intervals [lower, upper] on which it is concave, pieces (3, ...).

    Ends may be infinite, if psi falls without bound there. With them comes where the middle tangent
    was taken (...): near the mode in the interval.
    """
    mode = _mode(density, lower, upper)
    left, right = _outer_points(density, mode, lower, upper)
    points = torch.stack([left, mode, right])
    value, slope = density.value(points), density.derivatives(points)[0]
    gap = points.diff(dim=0)
    # Any point of the gap would do for an envelope; where the tangents meet is the lowest one.
    meet = (value.diff(dim=0) - slope[1:] * gap) / (slope[:-1] - slope[1:])
    inner = points[:-1] + torch.minimum(meet.nan_to_num(0.0).clamp_min(0), gap)
    edges = torch.cat([lower[None], inner, upper[None]])
    return Pieces.of_lines(edges[:-1], edges[1:], points, value, slope), mode


def chords(density: Target, nodes: Tensor) -> Pieces:
    """Chords of psi where it is convex, between nodes (nchords + 1, ...): pieces (nchords, ...).

    Nodes increase or decrease; all are equal for an element that is to have none.
    """
    value = density.value(nodes)
    slope = (value.diff(dim=0) / nodes.diff(dim=0)).nan_to_num(0.0)
    left, right = torch.minimum(nodes[:-1], nodes[1:]), torch.maximum(nodes[:-1], nodes[1:])
    return Pieces.of_lines(left, right, nodes[:-1], value[:-1], slope)


def _mode(density: Target, lower: Tensor, upper: Tensor) -> Tensor:
    """Near the mode of psi on [lower, upper], by Newton's method inside a bracket."""
    e = torch.zeros_like(lower).clamp(lower, upper)
    # A finite end where psi still rises outwards is the mode.
    for end, rises in ((lower, -1), (upper, 1)):
        slope = density.derivatives(torch.where(end.isfinite(), end, e))[0]
        is_mode = end.isfinite() & (rises * slope >= 0)
        lower, upper = (torch.where(is_mode, end, bound) for bound in (lower, upper))
    e = e.clamp(lower, upper)
    for step in range(defaults.MAX_SEARCH):
        slope, curvature = density.derivatives(e)
        lower = torch.where(slope > 0, e, lower)
        upper = torch.where(slope <= 0, e, upper)
        # The tangent here is to rise little up to the outer points. These lie at most sqrt(2) away
        # where psi'' <= -1, as it is of a standard normal times anything log-concave.
        done = slope.abs() * (upper - lower).clamp_max(defaults.REACH) < defaults.RISE
        if bool((done | (upper == lower)).all()):
            break
        # Newton's method may creep along an exponential, or meet overflow far out on it: every
        # third step, and where it fails, the bracket is halved, or a long step taken to close it.
        newton, bisection = e - slope / curvature, 0.5 * (lower + upper)
        leap = e + slope.sign() * 2.0 ** min(step, 60)
        safe = torch.where(bisection.isfinite(), bisection, leap)
        use_newton = (newton > lower) & (newton < upper) & (step % 3 != 2)
        e = torch.where(done, e, torch.where(use_newton, newton, safe))
    return e


def _outer_points(density: Target, mode: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Points (2, ...) left and right of the mode where psi has fallen by about 1, or the ends."""
    low_fall, high_fall = defaults.FALL
    side = torch.tensor([-1.0, 1.0]).to(mode).reshape(2, *(1 for _ in mode.shape))
    top, curvature = density.value(mode), density.derivatives(mode)[1]
    reach = torch.stack([mode - lower, upper - mode])
    # Exact for a parabola.
    start = (2 / (-curvature).clamp_min(0.01)).sqrt()
    distance = torch.where(reach.isfinite(), reach, start)
    near, far = torch.zeros_like(distance), reach
    for step in range(defaults.MAX_SEARCH):
        fall = top - density.value(mode + side * distance)
        at_end = (distance == reach) & (fall <= high_fall)
        done = at_end | ((fall >= low_fall) & (fall <= high_fall))
        if bool(done.all()):
            break
        near = torch.where(fall < low_fall, distance, near)
        far = torch.where(fall > high_fall, distance, far)
        # Falls grow as a power of the distance between 1 (a kink) and 2 (a parabola), mostly; for
        # a plateau with a cliff, every third step halves the bracket.
        scaled, middle = distance / fall.clamp(1 / 256, 256).sqrt(), 0.5 * (near + far)
        scale = (scaled > near) & (scaled < far) & ((step % 3 != 2) | far.isinf())
        distance = torch.where(done, distance, torch.where(scale, scaled, middle))
    return mode + side * distance


def uniform(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) of the dtype and device of `like`, whatever the generator's."""
    draws = torch.rand(shape, dtype=like.dtype, device=generator.device, generator=generator)
    return draws.to(like.device)


def draw(
    likelihood: Likelihood, target: Target, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws e (n_samples, ...) and the precision (...)."""
    if isinstance(likelihood, Gaussian):
        return _draw_gaussian(likelihood, target, n_samples, generator)
    if isinstance(likelihood, StudentT):
        pieces, mode = _student_pieces(likelihood, target)
    elif likelihood.is_log_concave:
        infinity = torch.full_like(target.mean, math.inf)
        pieces, mode = tangents(target, -infinity, infinity)
    else:  # an envelope for one mode would miss others without a sign of it
        raise TypeError(
            f"Product sampling knows no way for {type(likelihood).__name__}; use "
            "gradient='quadrature' or 'bmc'."
        )
    return _reject(target, pieces, n_samples, generator), target.precision(mode)


def _draw_gaussian(
    likelihood: Gaussian, target: Target, n_samples: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """In closed form."""
    noise_variance = _parameter(likelihood.noise_variance, target.mean)
    total = target.std**2 + noise_variance
    # Calling the likelihood for its refusal of bad targets.
    precision = target.precision(torch.zeros_like(target.mean))
    shape = (n_samples, *target.mean.shape)
    z = torch.randn(shape, dtype=total.dtype, device=generator.device, generator=generator)
    shift = target.std * (target.y - target.mean) / total
    return shift + (noise_variance / total).sqrt() * z.to(total.device), precision


def _student_pieces(likelihood: StudentT, target: Target) -> tuple[Pieces, Tensor]:
    """Tangents where psi is concave and chords where it is convex; and its greatest mode."""
    first, last, unit, centre = _convex_intervals(likelihood, target)
    infinity = torch.full_like(centre, math.inf)
    wide = last > 0
    # Where psi is concave throughout, the core is all of the line and the tails have no width.
    core = torch.where(wide, unit * first, infinity)
    tail = torch.where(wide, infinity, 0)
    lower = centre + torch.stack([-tail, -core, unit * last])
    upper = centre + torch.stack([-unit * last, core, tail])
    curved, modes = tangents(target, lower, upper)
    reach = unit * _geometric_grid(likelihood, first, last)
    straight = chords(target, centre + torch.stack([-reach, reach], dim=1))
    pieces = Pieces.stack([curved, straight], ndim=centre.ndim)
    mode = modes.gather(0, target.value(modes).argmax(0, keepdim=True)).squeeze(0)
    return pieces, mode


def _convex_intervals(
    likelihood: StudentT, target: Target
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Where :math:`\psi` is convex: ``centre +- unit * [first, last]``, in units of e.

    With :math:`x = (f - y) / \sigma`, :math:`z = \nu + x^2` and :math:`\kappa = \sigma^2 / v`,

    .. math:: \psi'' > 0 \iff \kappa z^2 - (\nu + 1) z + 2 \nu (\nu + 1) < 0,

    an interval of z if :math:`\nu + 1 > 8 \kappa \nu`, and empty otherwise (all zero then).
    """
    like = target.mean
    scale, df = _parameter(likelihood.scale, like), _parameter(likelihood.df, like)
    kappa = (scale / target.std) ** 2
    discriminant = (df + 1) * (df + 1 - 8 * kappa * df)
    wide = discriminant > 0
    # Products and sums of positive numbers only: nothing cancels where kappa is small.
    root = 0.5 * (df + 1 + discriminant.clamp_min(0).sqrt())
    first = (2 * df * (df + 1) / root - df).clamp_min(0).sqrt()
    last = (root / kappa - df).clamp_min(0).sqrt()
    centre = (target.y - like) / target.std
    zero = torch.zeros_like(like)
    values = (first, last, scale / target.std, centre)
    return tuple(torch.where(wide, value, zero) for value in values)  # type: ignore[return-value]


def _geometric_grid(likelihood: StudentT, first: Tensor, last: Tensor) -> Tensor:
    r"""Nodes (k, ...) from `first` to `last`, with one ratio :math:`\rho` from node to node.

    A chord from node to node exceeds the log of the Student density by about
    :math:`(\nu + 1) (\log \rho)^2 / 8`, kept below 1/4; psi, of which another part is concave, by
    less. So chords cost at most 22% of the proposals.
    """
    df = _parameter(likelihood.df, first)
    log_ratio = (last / first).log().nan_to_num(0.0)
    needed = float((log_ratio * ((df + 1) / 2).sqrt()).max()) if first.numel() else 0.0
    nchords = min(max(math.ceil(needed), 1), defaults.MAX_CHORDS)
    fraction = torch.linspace(0, 1, nchords + 1, dtype=first.dtype, device=first.device)
    return first * (fraction.reshape(-1, *(1 for _ in first.shape)) * log_ratio).exp()


def _parameter(value: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _reject(target: Target, pieces: Pieces, n_samples: int, generator: torch.Generator) -> Tensor:
    """Draws e (n_samples, ...): of every element, its first accepted proposals."""
    shape = target.mean.shape
    n_rows = target.mean.numel()
    noise = target.mean.new_empty(n_samples, n_rows)
    filled = torch.zeros(n_rows, dtype=torch.long, device=noise.device)
    # At least half of the proposals are accepted: the chance to run out of them is below 1e-20.
    n_left = 20 * n_samples + 100
    # All rows take part in all rounds, since the parameters of a likelihood may differ by row.
    while n_left > 0:
        wanted = n_samples - int(filled.min()) if n_rows else 0
        if wanted == 0:
            return noise.reshape(n_samples, *shape)
        n_draws = max(1, min(wanted + wanted // 4 + 2, defaults.PROPOSALS_HELD // n_rows))
        proposals, accepted = _propose(target, pieces, n_draws, generator)
        slot = filled + accepted.cumsum(0) - 1
        draw, row = (accepted & (slot < n_samples)).nonzero(as_tuple=True)
        noise[slot[draw, row], row] = proposals[draw, row]
        filled = (filled + accepted.sum(0)).clamp_max(n_samples)
        n_left -= n_draws
    raise RuntimeError(
        f"{int((filled < n_samples).sum())} of {n_rows} rows are without enough product samples "
        f"after {20 * n_samples + 100} proposals: the Gaussian and the likelihood "
        f"{type(target.likelihood).__name__} are too far apart for floating-point numbers. Start "
        "nearer to the observations, or use gradient='quadrature'."
    )


def _propose(
    target: Target, pieces: Pieces, n_draws: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Proposals and whether they are accepted, both (n_draws, n_rows)."""
    proposals, log_envelope = pieces.draw(n_draws, generator)
    value = target.value(proposals)
    excess = value - log_envelope
    if bool((excess > 1e-6 + 1e-9 * value.abs()).any()):
        raise ValueError(
            f"{type(target.likelihood).__name__} exceeds its envelope: its log_prob is not of the "
            "shape that product sampling takes for granted. Use gradient='quadrature' or 'bmc'."
        )
    accepted = uniform(proposals.shape, proposals, generator).log() <= excess
    return proposals.reshape(n_draws, -1), accepted.reshape(n_draws, -1)
