r"""Which basis, solver and covariance a QSGP regression uses, and why.

===============================  ==================================================================
observations n                   ``basis="auto"``, ``solver="auto"``: regression
===============================  ==================================================================
up to 4000                       inducing, m = n, dense Cholesky: the exact GP
K of numerical rank <= 1000      inducing at the pivots of K, Cholesky in weight space
up to 40 000, K fits in memory   inducing, m = n, block conjugate gradients, pathwise draws
more                             what predicts held-out data best (below): neighbours;
                                 Fourier features (inducing points where the kernel has no spectral
                                 density), streaming Gram matrix and Cholesky; or conjugate
                                 gradients that make K anew for each product
===============================  ==================================================================

Memory is that of the machine (:mod:`skgp.linalg.runtime`), or as asked: 8 GB hold the matrix of 60
thousand rows in float32 and its preconditioner.

Where K is large, its numerical rank is asked first (:func:`low_rank_factor`). Else one log density
decides (`compare_routes`): held out are some observations at random, as in gapless data, and all of
some discs, as spatial data with gaps need; the score of a route is the mean of the two mean log
densities. Weights must gain on neighbours by two standard errors, to which a disc adds as one unit.
A route is tried at a small size, and what it would gain at full size is extrapolated:

==========  ============================================  =========================================
route       tried                                         extrapolated
==========  ============================================  =========================================
neighbors   on all other observations                     --
weights     Fourier features (inducing points where       to the m that is affordable, each doubling
            there are none): 512 and 1024, on 20 000      gaining half of what the last one did
            observations
cg          the exact GP, which it is: 512 neighbours     --
==========  ============================================  =========================================

Conjugate gradients must then also be affordable: flops are counted.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.posterior import KrigingModel
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.pathwise import affordable_rank, pivoted_factor
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram_diag, gram_tile
from skgp.kernels.operators import KernelOperator
from skgp.kernels.spectra import has_spectral_density
from skgp.learning import defaults
from skgp.learning.plan import Fit, Plan, Problem, matrix_room, refuse_other, warn_of_too_many
from skgp.learning.selection import improves
from skgp.linalg.preconditioners import LowRank
from skgp.linalg.runtime import memory_budget

#: Covariances that each (space, solver) offers; the first is what "auto" takes.
COVARIANCES = {
    ("function", "cholesky"): ("full", "samples", "chevron", "diagonal"),
    ("function", "cg"): ("samples", "diagonal"),
    ("weight", "cholesky"): ("full", "samples", "chevron", "diagonal"),
    ("weight", "cg"): ("samples",),
    ("weight", "gauss-seidel"): ("samples",),
    ("local", "cholesky"): ("full",),
    ("stochastic", "sgd"): ("diagonal", "chevron"),
}


def resolve(asked: Plan, n: int, kernel) -> Plan:
    """Fill what a plan of a regression on n observations leaves open; not by the rank of K.

    A ValueError says where basis, n_basis, solver and covariance cannot be had together.
    """
    basis, reason = asked.basis, asked.reason
    if basis == "neighbors":
        refuse_other("solver", asked.solver, ("auto", "cholesky"), "basis='neighbors'")
        refuse_other("covariance", asked.covariance, ("auto", "full"), "basis='neighbors'")
        return Plan(
            basis, min(asked.n_basis or defaults.N_NEIGHBORS, n), "cholesky", "full", reason
        )
    fits = _dense_fits(n) or stored_solve_bytes(n) <= memory_budget()
    if basis == "auto":
        basis, reason = _choose_basis(asked, n, kernel, fits)
    n_basis = _choose_size(asked, basis, n, fits)
    solver = asked.solver
    if solver == "auto":
        solver = _choose_solver(basis, n_basis, n)
    return with_covariance(Plan(basis, n_basis, solver, "auto", reason), asked.covariance, n)


def _dense_fits(n: int) -> bool:
    """Whether a Cholesky factor of the kernel matrix of n rows is affordable, memory included."""
    return n <= defaults.CHOLESKY_ROWS and 8.0 * defaults.DENSE_MATRICES * n**2 <= memory_budget()


def stored_solve_bytes(n: int) -> float:
    """Bytes of conjugate gradients with a stored kernel matrix: that, and the preconditioner."""
    rank = min(n // 2, defaults.PRECONDITIONER_RANK)
    return KernelOperator.stored_bytes(n, stored_dtype(n)) + 8.0 * n * rank


def stored_dtype(n: int, asked: torch.dtype = torch.float64) -> torch.dtype:
    """In which conjugate gradients keep the kernel matrix of n rows."""
    return asked if n <= defaults.CHOLESKY_ROWS else torch.float32


def with_covariance(plan: Plan, covariance: str, n: int) -> Plan:
    """Check the covariance against the solver, or choose it."""
    offered = COVARIANCES.get((plan.space(n), plan.solver))
    if offered is None:
        raise ValueError(
            f"solver={plan.solver!r} does not serve basis={plan.basis!r} with one basis function a "
            "row. Use solver='cg' or 'cholesky', or n_basis below the number of rows."
        )
    if covariance == "auto":
        # A factor of n^2 numbers is worth keeping on small data only.
        exact = plan.space(n) == "function" and n > defaults.FACTOR_ROWS
        return replace(plan, covariance="samples" if exact else offered[0])
    if covariance not in offered:
        raise ValueError(
            f"covariance={covariance!r} cannot be had from solver={plan.solver!r} with "
            f"basis={plan.basis!r} and n_basis={plan.n_basis}; it offers "
            f"{', '.join(map(repr, offered))}. solver='cholesky' offers all of them."
        )
    return replace(plan, covariance=covariance)


def _choose_basis(asked: Plan, n: int, kernel, fits: bool) -> tuple[str, str]:
    """Basis, and why."""
    spectral, no_density = has_spectral_density(kernel), "the kernel has no spectral density"
    if asked.solver in ("gauss-seidel", "sgd"):
        if spectral:
            return "fourier", f"solver={asked.solver!r} is for many cheap basis functions"
        return "inducing", no_density
    if asked.n_basis is not None and asked.n_basis > n and spectral:
        return "fourier", f"n_basis={asked.n_basis} exceeds the {n} rows"
    if asked.solver == "cholesky":
        if n <= defaults.CHOLESKY_ROWS:
            return "inducing", f"{n} rows: the exact GP is affordable"
        if spectral:
            return "fourier", f"{n} rows are too many for a dense factor"
        return "inducing", no_density
    if fits:
        return "inducing", f"the kernel matrix of {n} rows fits in memory"
    if asked.solver == "cg":
        return "inducing", "solver='cg' is for kernel matrices"
    if not spectral:
        return "inducing", no_density
    return "fourier", f"the kernel matrix of {n} rows does not fit in memory"


def _choose_size(asked: Plan, basis: str, n: int, fits: bool) -> int:
    """Number of basis functions: as asked, or by cost."""
    m = asked.n_basis
    if basis == "inducing":
        warn_of_too_many(m, n)
        if m is not None:
            return min(m, n)
        whole = asked.solver in ("sgd", "cg") or fits
        if asked.solver == "cholesky":
            whole = n <= defaults.CHOLESKY_ROWS
        if asked.solver == "gauss-seidel":
            whole = False
        return n if whole else max(1, min(n // 2, affordable_features(n)))
    if m is not None:
        return m + m % 2  # cosines and sines come in pairs
    if asked.solver in ("gauss-seidel", "sgd"):
        return defaults.STOCHASTIC_FEATURES if n > defaults.FACTOR_ROWS else 2 * max(n, 256)
    return affordable_features(n)


def affordable_features(n: int) -> int:
    """Even m whose Gram matrix, ``n m^2`` flops, takes about a minute; 256 to 8192, at most 4 n.

    Or as many as memory has room for.
    """
    most = min(
        defaults.CHOLESKY_FEATURES,
        4 * n,
        (defaults.GRAM_FLOPS / max(n, 1)) ** 0.5,
        matrix_room(defaults.GRAM_MATRICES),
    )
    return 2 * round(max(256.0, most) / 2)


def _choose_solver(basis: str, n_basis: int, n: int) -> str:
    if basis == "inducing" and n_basis == n:
        return "cholesky" if _dense_fits(n) else "cg"
    if n_basis <= defaults.CHOLESKY_FEATURES:
        return "cholesky"
    return "gauss-seidel" if basis == "fourier" else "cg"


def fit_low_rank(
    p: Problem, asked: Plan, fit_weights: Callable[[Problem, Plan, Tensor], Fit]
) -> Fit | None:
    """Fit by the pivots of K, where noise hides what they leave of it; None where not.

    Of ``p.kernel``, or of ``p.rival`` if all observations are likelier under that: from their
    neighbours they are predicted as well by a kernel that is too smooth for all of them.
    """
    fit = _fit_pivots(p, asked, fit_weights)
    if fit is None or p.rival is None:
        return fit
    signal, white = split_noise(p.rival)
    noise = p.noise if white is None else float(white.noise_level)
    other = _fit_pivots(replace(p, kernel=signal, noise=noise), asked, fit_weights)
    here = fit.log_marginal_likelihood
    if other is None or here is None or other.log_marginal_likelihood is None:
        return fit
    gain = other.log_marginal_likelihood - here
    return other if gain > defaults.LEAST_EFFECT * p.data.total * p.data.n_targets else fit


def _fit_pivots(p: Problem, asked: Plan, fit_weights) -> Fit | None:
    found = low_rank_factor(p.kernel, p.data, p.noise, seed=p.options.seed, generator=p.generator)
    if found is None:
        return None
    rank = found.factor.shape[1]
    reason = f"K has numerical rank {rank}: noise hides the rest"
    plan = Plan("inducing", rank, "cholesky", asked.covariance, reason)
    return fit_weights(p, with_covariance(plan, asked.covariance, len(p.data)), found.pivots)


def low_rank_factor(
    kernel, data: Data, noise: float, *, seed: int, generator: torch.Generator
) -> LowRank | None:
    """Factor of K where its rank, up to what the noise hides, is low; None where not.

    That some observations alone exceed the rank is cheap to see.
    """
    if len(data) > 2 * defaults.PROBED_ROWS:
        random = torch.Generator(data.X.device).manual_seed(seed)
        order = torch.randperm(len(data), generator=random, device=random.device)
        few = data.take(order[: defaults.PROBED_ROWS])
        if _low_rank(kernel, few.X, noise, generator) is None:
            return None
    return _low_rank(kernel, data.X, noise, generator)


def _low_rank(kernel, X: Tensor, noise: float, generator: torch.Generator) -> LowRank | None:
    """A factor that leaves no function which the observations tell apart from noise.

    Prior variances of a mean below that of the noise do not suffice: n observations show along an
    eigenvector of what is left of K an eigenvalue n times as great.
    """
    trace = float(gram_diag(kernel, X).sum())
    rank = affordable_rank(len(X), defaults.LOW_RANK)
    some = slice(None, None, -(-len(X) // defaults.LEFT_ROWS))
    tol = defaults.LOW_RANK_RESIDUAL * noise * len(X) / trace
    while True:
        factor = pivoted_factor(kernel, X, rank, generator=generator, tol=tol)
        if factor.residual_trace > tol * trace:
            return None
        F = factor.factor[some]
        left = gram_tile(kernel, X[some], X[some]) - F @ F.T  # its eigenvalues grow with its rows
        if (
            float(torch.linalg.eigvalsh(left)[-1]) * len(X) / len(F)
            <= defaults.LARGEST_LEFT * noise
        ):
            return factor
        tol /= 10


def local_posterior(kernel, data: Data, noise: float, n_neighbors: int) -> KrigingModel:
    """Posterior from the nearest observations, at three scales; holds the data."""
    Y = data.y.reshape(len(data), -1)
    shared = data.weight, Y.new_zeros(Y.shape[1]), n_neighbors
    return KrigingModel(kernel, noise, data.X, Y, *shared, n_scales=defaults.N_SCALES)


def in_weight_space(plan: Plan, asked: Plan, n: int, kernel) -> Plan | None:
    """The plan in weight space that held-out data compare with neighbours and the exact GP.

    None where the exact GP of n observations is the plan, and its kernel matrix, kept, soon solved.
    """
    if plan.space(n) != "function":
        return plan
    return (
        None if n <= defaults.SOLVED_ROWS else resolve(replace(asked, solver="cholesky"), n, kernel)
    )


def compare_routes(p: Problem, weights: Plan, fit_weights: Callable[[Problem, Plan], Fit]) -> Plan:
    """The plan of the route that predicts held-out data best; its `reason` tells all figures.

    `weights` is a resolved plan in weight space, `fit_weights` fits by such. The covariance is left
    to be chosen. Some ``3e10`` flops whatever n, beside the search for neighbours, ``O(n log n)``.
    """
    kernel, data, noise, generator = p.kernel, p.data, p.noise, p.generator
    n = len(data)
    kept, random, disc, place = hold_out_discs(kernel, data.X, generator)
    rest = data.take(kept)

    def scored(size: int) -> tuple[Data, Tensor]:
        """Held-out observations of both kinds, and weights that make the kinds count alike."""
        parts = random[:size], disc[:size]
        halves = torch.cat([data.y.new_full((len(part),), 0.5 / len(part)) for part in parts])
        return data.take(torch.cat(parts)), halves

    held, halves = scored(defaults.SCORED)
    near = local_posterior(kernel, rest, noise, defaults.N_NEIGHBORS)
    of_near = -_log_densities(near, noise, held)
    local = -float(of_near @ halves)
    order = torch.randperm(len(rest), generator=generator, device=generator.device)
    few = replace(p, data=rest.take(order[: defaults.TRIAL_ROWS]), callback=None)
    trials = []
    for m in defaults.TRIAL_FEATURES:
        m = min(m, max(2, len(few.data) // 4 * 2))
        trial = fit_weights(few, replace(weights, n_basis=m, covariance="full"))
        of_most = -_log_densities(trial.posterior, trial.noise, held)
        trials.append(-float(of_most @ halves))
    # Each doubling of m gains half of what the one before did.
    doublings = math.log2(weights.size / defaults.TRIAL_FEATURES[-1])
    more = max(trials[-1] - trials[-2], 0.0) * (1 - 0.5**doublings)
    many = trials[-1] + more
    wide = local_posterior(kernel, rest, noise, defaults.EXACT_NEIGHBORS)
    some, alike = scored(defaults.EXACT_SCORED)
    gain = float((_log_densities(wide, noise, some) - _log_densities(near, noise, some)) @ alike)
    flops = defaults.CG_ITERATIONS * float(n) ** 2 * defaults.ENTRY_FLOPS
    affordable = flops <= defaults.CG_FLOPS.get(data.X.device.type, defaults.CG_FLOPS["cpu"])
    reason = (
        f"the kernel matrix of {n} observations is large; log density of held-out data, at random "
        f"and in discs: {defaults.N_NEIGHBORS} neighbours {local:.3f}; "
        f"{weights.basis} functions {trials[0]:.3f} ({defaults.TRIAL_FEATURES[0]}), "
        f"{trials[1]:.3f} ({defaults.TRIAL_FEATURES[1]}), "
        f"extrapolated {many:.3f} ({weights.size}); "
        f"exact, by {defaults.EXACT_NEIGHBORS} neighbours, {local + gain:.3f} "
        f"({'' if affordable else 'not '}affordable: {flops:.0e} flops)"
    )
    if affordable and local + gain > max(many, local) + defaults.LEAST_GAIN:
        return Plan("inducing", n, "cg", reason=reason)
    unit = torch.cat([-1 - torch.arange(len(random), device=place.device), place])  # or a disc
    if improves(of_most - more, of_near, weight=halves, unit=unit, n_errors=defaults.ROUTE_ERRORS):
        return replace(weights, reason=reason)
    return Plan("neighbors", defaults.N_NEIGHBORS, "cholesky", reason=reason)


def hold_out_discs(kernel, X: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Indices kept, held out at random and in discs in the metric of the kernel, and whose disc."""
    n = len(X)
    order = torch.randperm(n, generator=generator)
    centres = X[order[: defaults.DISCS].to(X.device)]
    size = max(1, min(int(defaults.DISC_SHARE * n), defaults.DISC_ROWS))
    members = NeighborSearch(kernel, X).query(centres, size)
    place = torch.full((n,), -1, device=X.device)
    for i, rows in enumerate(members):
        place[rows] = i
    order = order.to(X.device)
    inside = place[order] >= 0
    random, disc = order[~inside][: defaults.SCORED], order[inside][: defaults.SCORED]
    kept = place < 0
    kept[random] = False
    return kept.nonzero()[:, 0], random, disc, place[disc]


def _log_densities(posterior, noise: float, data: Data) -> Tensor:
    """Log densities of the observations (p,), in nats; of several targets their means."""
    mean, variance = posterior.mean_and_variance(data.X)
    variance = (variance + data.row_noise(data.y.new_tensor(noise)))[:, None]
    residual = (data.y - mean.reshape(data.y.shape)).reshape(len(variance), -1)  # (p, t)
    return (-0.5 * (residual.square() / variance + (2 * math.pi * variance).log())).mean(1)
