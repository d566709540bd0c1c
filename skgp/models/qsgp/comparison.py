r"""Which route to take where the kernel matrix is too large to keep: one log density decides.

Left out are some rows at random, as in gapless data, and all rows of some discs, as spatial data
with gaps need; the score of a route is the mean of the two mean log densities. It is tried at a
small size, and what it would gain at full size is extrapolated:

==========  ============================================  =========================================
route       tried                                         extrapolated
==========  ============================================  =========================================
neighbors   on all other rows                             --
weights     Fourier features (inducing points where       to the m that is affordable, each doubling
            there are none): 512 and 1024, on 20 000      gaining half of what the last one did
            rows
cg          the exact GP, which it is: 512 neighbours     --
==========  ============================================  =========================================

Conjugate gradients without a stored matrix must also be affordable: flops are counted.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.search import NeighborSearch
from skgp.models.qsgp.local import local_posterior
from skgp.models.qsgp.plan import N_NEIGHBORS, Plan

_DISCS, _DISC_SHARE, _DISC_ROWS = 8, 0.01, 5_000  # a hundredth of the rows each, at most so many
_SCORED = 256  # rows of either kind
_TRIAL_ROWS, _TRIAL_FEATURES = 20_000, (512, 1_024)
_EXACT_NEIGHBORS, _EXACT_SCORED = 512, 64
_LEAST_GAIN = 0.02  # nats a row that a dearer route must be better by
_ITERATIONS, _ENTRY_FLOPS = 60, 40  # of conjugate gradients; to make an entry of K anew
_CG_FLOPS = {"cpu": 1e13, "cuda": 3e16}  # about ten minutes of two cores, or of an accelerator

Fitter = Callable[[Data, Plan], tuple[object, float]]


@dataclass(frozen=True)
class HeldOut:
    """Rows left out: `random` and `disc` are scored, `kept` trained on."""

    kept: Tensor
    random: Tensor
    disc: Tensor


def compare_routes(
    kernel,
    data: Data,
    noise: float,
    weights: Plan,
    fit: Fitter,
    *,
    generator: torch.Generator,
) -> Plan:
    """The plan of the route that predicts rows left out best.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    data : Data
    noise : float
    weights : Plan
        Resolved, in weight space: what there is without a comparison.
    fit : callable
        Maps data and a plan in weight space to a posterior and its noise variance.
    generator : torch.Generator

    Returns
    -------
    Plan
        Its `reason` tells all figures. The covariance is left to be chosen.

    Notes
    -----
    Some ``3e10`` flops whatever n, beside the search for neighbours, ``O(n log n)``.
    """
    n = len(data.y)
    out = hold_out(kernel, data.X, generator)
    rest = data.take(out.kept)

    def score(posterior, noise: float, size: int = _SCORED) -> float:
        rows = (out.random[:size], out.disc[:size])
        return sum(_log_density(posterior, noise, data.take(some)) for some in rows) / 2

    near = local_posterior(kernel, rest, noise, N_NEIGHBORS)
    local = score(near, noise)
    few = torch.randperm(len(rest.y), generator=generator)[:_TRIAL_ROWS].to(data.y.device)
    trial, trials = rest.take(few), []
    for m in _TRIAL_FEATURES:
        m = min(m, max(2, len(few) // 4 * 2))
        trials.append(score(*fit(trial, replace(weights, n_basis=m, covariance="full"))))
    many = _extrapolated(trials, math.log2(weights.size / _TRIAL_FEATURES[-1]))
    wide = local_posterior(kernel, rest, noise, _EXACT_NEIGHBORS)
    gain = score(wide, noise, _EXACT_SCORED) - score(near, noise, _EXACT_SCORED)
    flops = _ITERATIONS * float(n) ** 2 * _ENTRY_FLOPS
    affordable = flops <= _CG_FLOPS.get(data.X.device.type, _CG_FLOPS["cpu"])
    reason = (
        f"the kernel matrix of {n} rows does not fit in memory; log density of rows left out, at "
        f"random and in discs: {N_NEIGHBORS} neighbours {local:.3f}; {weights.basis} functions "
        f"{trials[0]:.3f} ({_TRIAL_FEATURES[0]}), {trials[1]:.3f} ({_TRIAL_FEATURES[1]}), "
        f"extrapolated {many:.3f} ({weights.size}); exact, by {_EXACT_NEIGHBORS} neighbours, "
        f"{local + gain:.3f} ({'' if affordable else 'not '}affordable: {flops:.0e} flops)"
    )
    if affordable and local + gain > max(many, local) + _LEAST_GAIN:
        return Plan("inducing", n, "cg", reason=reason)
    if many > local:
        return replace(weights, reason=reason)
    return Plan("neighbors", N_NEIGHBORS, "cholesky", reason=reason)


def hold_out(kernel, X: Tensor, generator: torch.Generator) -> HeldOut:
    """Rows at random, and discs in the metric of the kernel, to leave out."""
    n = len(X)
    order = torch.randperm(n, generator=generator)
    centres = X[order[:_DISCS].to(X.device)]
    size = max(1, min(int(_DISC_SHARE * n), _DISC_ROWS))
    members = NeighborSearch(kernel, X).query(centres, size).reshape(-1).unique()
    inside = torch.zeros(n, dtype=torch.bool, device=X.device)
    inside[members] = True
    order = order.to(X.device)
    random = order[~inside[order]][:_SCORED]
    disc = order[inside[order]][:_SCORED]
    kept = ~inside
    kept[random] = False
    return HeldOut(kept.nonzero()[:, 0], random, disc)


def _extrapolated(scores: list[float], doublings: float) -> float:
    """Score after more doublings of m, each of which gains half of what the one before did."""
    gain = max(scores[-1] - scores[-2], 0.0)
    return scores[-1] + gain * (1 - 0.5**doublings)


def _log_density(posterior, noise: float, rows: Data) -> float:
    """Mean log density of the observations, in nats."""
    mean, variance = posterior.mean_and_variance(rows.X)
    variance = variance + rows.row_noise(rows.y.new_tensor(noise))
    density = -0.5 * ((rows.y - mean).square() / variance + (2 * math.pi * variance).log())
    return float(density.mean())
