"""Routes of regression on large data compared by what they predict of held-out data.

Which data, and what is compared, says :mod:`skgp.learning.routes`.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.search import NeighborSearch
from skgp.learning.defaults import (
    CG_FLOPS,
    CG_ITERATIONS,
    DISC_ROWS,
    DISC_SHARE,
    DISCS,
    ENTRY_FLOPS,
    EXACT_NEIGHBORS,
    EXACT_SCORED,
    LEAST_GAIN,
    N_NEIGHBORS,
    SCORED,
    SOLVED_ROWS,
    TRIAL_FEATURES,
    TRIAL_ROWS,
)
from skgp.learning.plan import Fit, Plan, Problem
from skgp.learning.routes import local_posterior, resolve


def in_weight_space(plan: Plan, asked: Plan, n: int, kernel) -> Plan | None:
    """The plan in weight space that held-out data compare with neighbours and the exact GP.

    None where the exact GP of n observations is the plan, and its kernel matrix, kept, soon solved.
    """
    if plan.space(n) != "function":
        return plan
    return None if n <= SOLVED_ROWS else resolve(replace(asked, solver="cholesky"), n, kernel)


def compare_routes(p: Problem, weights: Plan, fit_weights: Callable[[Problem, Plan], Fit]) -> Plan:
    """The plan of the route that predicts held-out data best; its `reason` tells all figures.

    `weights` is a resolved plan in weight space, `fit_weights` fits by such. The covariance is left
    to be chosen. Some ``3e10`` flops whatever n, beside the search for neighbours, ``O(n log n)``.
    """
    kernel, data, noise, generator = p.kernel, p.data, p.noise, p.generator
    n = len(data)
    kept, random, disc = hold_out(kernel, data.X, generator)
    rest = data.take(kept)

    def score(posterior, noise: float, size: int = SCORED) -> float:
        parts = data.take(random[:size]), data.take(disc[:size])
        return sum(_log_density(posterior, noise, part) for part in parts) / 2

    near = local_posterior(kernel, rest, noise, N_NEIGHBORS)
    local = score(near, noise)
    order = torch.randperm(len(rest), generator=generator, device=generator.device)
    few = replace(p, data=rest.take(order[:TRIAL_ROWS]), callback=None)
    trials = []
    for m in TRIAL_FEATURES:
        m = min(m, max(2, len(few.data) // 4 * 2))
        trial = fit_weights(few, replace(weights, n_basis=m, covariance="full"))
        trials.append(score(trial.posterior, trial.noise))
    many = _extrapolated(trials, math.log2(weights.size / TRIAL_FEATURES[-1]))
    wide = local_posterior(kernel, rest, noise, EXACT_NEIGHBORS)
    gain = score(wide, noise, EXACT_SCORED) - score(near, noise, EXACT_SCORED)
    flops = CG_ITERATIONS * float(n) ** 2 * ENTRY_FLOPS
    affordable = flops <= CG_FLOPS.get(data.X.device.type, CG_FLOPS["cpu"])
    reason = (
        f"the kernel matrix of {n} observations is large; log density of held-out data, at random "
        f"and in discs: {N_NEIGHBORS} neighbours {local:.3f}; "
        f"{weights.basis} functions {trials[0]:.3f} ({TRIAL_FEATURES[0]}), {trials[1]:.3f} "
        f"({TRIAL_FEATURES[1]}), extrapolated {many:.3f} ({weights.size}); exact, "
        f"by {EXACT_NEIGHBORS} neighbours, {local + gain:.3f} "
        f"({'' if affordable else 'not '}affordable: {flops:.0e} flops)"
    )
    if affordable and local + gain > max(many, local) + LEAST_GAIN:
        return Plan("inducing", n, "cg", reason=reason)
    if many > local:
        return replace(weights, reason=reason)
    return Plan("neighbors", N_NEIGHBORS, "cholesky", reason=reason)


def hold_out(kernel, X: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Indices kept, held out at random, and in discs in the metric of the kernel."""
    n = len(X)
    order = torch.randperm(n, generator=generator)
    centres = X[order[:DISCS].to(X.device)]
    size = max(1, min(int(DISC_SHARE * n), DISC_ROWS))
    members = NeighborSearch(kernel, X).query(centres, size).reshape(-1).unique()
    inside = torch.zeros(n, dtype=torch.bool, device=X.device)
    inside[members] = True
    order = order.to(X.device)
    random = order[~inside[order]][:SCORED]
    disc = order[inside[order]][:SCORED]
    kept = ~inside
    kept[random] = False
    return kept.nonzero()[:, 0], random, disc


def _extrapolated(scores: list[float], doublings: float) -> float:
    """Score after more doublings of m, each of which gains half of what the one before did."""
    gain = max(scores[-1] - scores[-2], 0.0)
    return scores[-1] + gain * (1 - 0.5**doublings)


def _log_density(posterior, noise: float, data: Data) -> float:
    """Mean log density of the observations, in nats; of several targets over all."""
    mean, variance = posterior.mean_and_variance(data.X)
    variance = variance + data.row_noise(data.y.new_tensor(noise))
    variance = variance if mean.ndim == 1 else variance[:, None]
    density = -0.5 * ((data.y - mean).square() / variance + (2 * math.pi * variance).log())
    return float(density.mean())
