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

The envelopes of :mod:`skgp.likelihoods.envelopes` are valid wherever the tangents are taken and
have less than twice the mass of :math:`e^\psi`. A proposal is thus accepted with a probability
above one half, independently of the others: the chance that one of N entries has no draw after k
proposals is below :math:`N 2^{-k}`, and the rejection ends with probability 1. With the likelihoods
here 77 to 95% are accepted. The paper's sampler (supplement, section 1) proposes from
:math:`N(m, n v)` with :math:`n \le 10`. It needs 2 to 12 proposals a draw on average over rows
drawn from the model, but thousands in single rows where the Gaussian and the likelihood disagree.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes,
   Proposition 1.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skgp.likelihoods import Gaussian, Likelihood, StudentT, defaults
from skgp.likelihoods.envelopes import Pieces, Target, chords, tangents, uniform
from skgp.likelihoods.quadrature import aligned, check_var


class ProductNoise(NamedTuple):
    """Draws in standardised form."""

    noise: Tensor  # (n_samples, ...): e, such that m + sqrt(v) e is a draw of q~
    # (...): -d^2 log p / df^2 >= 0 near the mode of q~, that of the Gaussian likelihood that is
    # most like this one there.
    precision: Tensor


def product_noise(
    likelihood: Likelihood,  # log-concave or StudentT
    y: Tensor,  # observations; it, mean and var broadcast to (...)
    mean: Tensor,
    var: Tensor,  # not negative
    *,
    n_samples: int = 1,  # independent, exact draws of every element
    generator: torch.Generator,
) -> ProductNoise:
    r"""Draws of the product in the variable :math:`e = (f - m) / \sqrt v`.

    Unlike differences of f from the mean, they keep their precision where the variance is tiny.

    Computed in float64, of the dtype of `mean`. Two or three rounds of proposals for all elements,
    after some 30 evaluations of :math:`\psi` per element for the envelope (60 with Student-t). A
    ValueError refuses shapes, dtypes and values that do not fit, or a likelihood that calls itself
    log-concave and is not; a TypeError other likelihoods. An entry still without a draw after ten
    times the proposals expected is a RuntimeError: a likelihood 1e8 standard deviations away from
    the Gaussian may bring it about.

    Examples
    --------
    >>> import torch
    >>> from skgp.likelihoods import Bernoulli
    >>> y, mean, var = torch.ones(3), torch.tensor([-9.0, 0.0, 9.0]), torch.ones(3)
    >>> generator = torch.Generator().manual_seed(0)
    >>> e, _ = product_noise(Bernoulli(), y, mean, var, n_samples=1000, generator=generator)
    >>> (mean + e).mean(0).round()
    tensor([-8.,  0.,  9.])
    """
    if not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples must be a positive integer such as 10; got {n_samples!r}.")
    y, mean, var = aligned(y=y, mean=mean, var=var)
    check_var(var)
    for name, tensor in {"mean": mean, "var": var}.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} contains NaN or inf; the step before this one diverged.")
    with torch.no_grad():
        target = Target(likelihood, y.double(), mean.double(), var.double())
        noise, precision = _draw(likelihood, target, n_samples, generator)
    return ProductNoise(noise.to(mean.dtype), precision.to(mean.dtype))


def _draw(
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
