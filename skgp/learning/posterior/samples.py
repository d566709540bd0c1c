"""The solver and sampler of the posterior over hyper-parameters, and its weighted samples.

Samples are drawn by values of the likelihood (:mod:`skgp.learning.posterior.sampling`), or by
stochastic gradients in :mod:`skgp.models.bayesian`.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from skgp.data import Data
from skgp.inference.gp_mixture import GPMixture, mixture_moments
from skgp.kernels import split_noise
from skgp.kernels.defaults import STORED_SHARE
from skgp.kernels.operators import RowOperator
from skgp.learning.posterior import defaults as tuned
from skgp.linalg.runtime import memory_budget, require_memory
from skgp.samplers import SEGMENT, LangevinResult, ess_tail, stratified_resample

STOPPED = "sampling was stopped before the first draw: the mode stands for the posterior"


@dataclass(frozen=True)
class PosteriorSamples:
    """Weighted samples of u, the logarithms of the hyper-parameters.

    `diagnostics` holds "sampler", "converged" and "problems", a list of sentences, empty where
    converged; "ess" (effective number of samples, the least over coordinates, bulk and tail),
    "ess_spread" (the same for variances), "n_likelihoods", "n_gradients", "n_modes" and
    "log_evidence"; for importance sampling "pareto_k" and "n_rounds"; for chains "r_hat",
    "ess_bulk" and "ess_tail" (p,), "acceptance", "n_divergent" and "step_size" (n_chains,).
    """

    u: np.ndarray  # (s, p)
    weights: np.ndarray  # (s,), of sum one
    #: (s,), which chain a sample belongs to; the round, for importance sampling. Chains of which
    #: more than a tenth of the paths diverged are left out, unless all did.
    chain: np.ndarray
    log_posterior: np.ndarray  # (s,), up to the log marginal likelihood, nats
    map_: np.ndarray  # (p,), the mode
    diagnostics: dict[str, Any] = field(default_factory=dict)

    def mean(self) -> np.ndarray:
        """Posterior mean (p,) of u."""
        return self.weights @ self.u

    def covariance(self) -> np.ndarray:
        """Posterior covariance (p, p) of u."""
        centred = self.u - self.mean()
        return (self.weights[:, None] * centred).T @ centred

    def keep(self, n_keep: int, rng: np.random.Generator) -> np.ndarray:
        """Indices (n_keep,) of samples that stand for all, equally weighted; they may repeat."""
        points = self.u if self.diagnostics.get("sampler") == "importance" else None
        return stratified_resample(self.weights, n_keep, rng, points=points)


def single_sample(u: np.ndarray, log_density: float, diagnostics: dict) -> PosteriorSamples:
    """Hyper-parameters u (p,) that stand for their posterior alone; a log-density may be NaN."""
    return PosteriorSamples(
        u[None], np.ones(1), np.zeros(1, int), np.array([log_density]), u, diagnostics
    )


def outcome(sampler: str, problems: list[str], **entries: Any) -> dict[str, Any]:
    """Diagnostics with the entries that all have."""
    common = {"ess": math.nan, "n_likelihoods": 0, "log_evidence": math.nan} | entries
    return {"sampler": sampler, "converged": not problems, "problems": problems} | common


def iterations_between_calls(n: int) -> int:
    """How often samplers call back for n rows, so that a stop takes seconds and not minutes."""
    return max(1, int(SEGMENT * min(1.0, (tuned.LARGE / n) ** 2)))


def too_few(of_what: str, ess: np.ndarray | float, wanted: float) -> list[str]:
    """Whether the least ESS is less than wanted."""
    least = float(np.min(ess))
    if least >= wanted:
        return []
    number = f"{least:.0f} of {wanted:g} wanted"
    return [f"the effective number of samples{of_what} is {number}; raise n_samples"]


def mixing_problems(r_hat: np.ndarray, ess: np.ndarray, target_ess: float) -> list[str]:
    """Whether R-hat and ESS (p,) of chains are not as they should be, each with a remedy."""
    problems, worst = [], float(np.max(r_hat))
    if not worst <= tuned.MAX_R_HAT:
        problems.append(
            f"R-hat is {worst:.3f}, above {tuned.MAX_R_HAT}; raise n_samples or n_warmup"
        )
    return problems + too_few("", ess, target_ess)


def chain_problems(
    found: LangevinResult, sampler: str, target_ess: float, bank_error: float
) -> list[str]:
    """What keeps the chains from being trusted, each with a remedy."""
    problems = mixing_problems(found.r_hat, found.ess, target_ess)
    some = np.flatnonzero(found.n_astray > tuned.DIVERGENT * found.points.shape[1])
    if len(some):
        left_out = np.flatnonzero(found.astray).tolist()
        problems.append(
            f"more than {tuned.DIVERGENT:.0%} of the iterations of chains {some.tolist()} left the "
            "bounds or met gradients out of proportion"
            + (f" (left out: {left_out})" if left_out else "")
            + "; use priors that keep off the bounds, or more rows"
        )
    if found.floored > 0:
        problems.append(
            f"the noise of the gradients, {found.noise_ratio:.2g} times the posterior's precision, "
            "is more than the steps can make up for; raise n_probes or the preconditioner's rank"
        )
    if bank_error > tuned.WORST_BANK_ERROR:
        problems.append(
            "the mean gradient at the mode is so noisy that it shifts the samples by up to "
            f"{math.sqrt(bank_error):.2f} standard deviations; raise n_probes or the "
            "preconditioner's rank"
        )
    if sampler == "sgld" and not found.frozen:
        worst = float(np.max(found.criterion))
        measured = "was not measured" if math.isnan(worst) else f"is {worst:.2g}, above 0.002"
        problems.append(
            f"criterion (7), the gradient's noise over that injected, {measured}: the step size "
            'was never held; raise n_samples, or use sampler="langevin"'
        )
    n_unsolved = sum(memory.n_unsolved for memory in found.memories if memory)
    share = n_unsolved / max(1, found.n_gradients)  # none where all steps left the bounds
    if share > tuned.UNSOLVED:
        problems.append(
            f"{share:.0%} of the gradients are biased, their linear systems not solved within the "
            "allowed iterations; raise the preconditioner's rank"
        )
    return problems


def samples_of_chains(
    found: LangevinResult, sampler: str, mode: np.ndarray, problems: list[str], **entries: Any
) -> PosteriorSamples:
    """The chains that have not gone astray as samples; `entries` are further diagnostics."""
    kept = np.flatnonzero(~found.astray)
    points = found.points[kept]  # (c, n_drawn, p)
    n_drawn, p = points.shape[1:]
    n_products = sum(memory.n_products for memory in found.memories if memory)
    diagnostics = outcome(
        sampler,
        problems,
        ess=float(found.ess.min()),
        ess_bulk=found.ess,
        ess_tail=np.array([ess_tail(column) for column in points.transpose(2, 0, 1)]),
        r_hat=found.r_hat,
        acceptance=found.acceptance,
        n_divergent=found.n_astray,
        step_size=found.step_size,
        noise_ratio=found.noise_ratio,
        n_iter_cg=n_products / max(1, found.n_gradients),
        **entries,
    )
    if sampler == "sgld":
        diagnostics["criterion"] = found.criterion
    return PosteriorSamples(
        points.reshape(-1, p),
        found.weights[kept].ravel(),
        np.repeat(kept, n_drawn),
        np.full(len(kept) * n_drawn, math.nan),
        mode,
        diagnostics,
    )


def probe_rows(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Points half way between pairs of rows of X (n, d), and rows with their columns shuffled."""
    pairs = rng.integers(len(X), size=(2, tuned.PROBE_ROWS))
    shuffled = [column[rng.integers(len(X), size=tuned.PROBE_ROWS)] for column in X.T]
    return np.concatenate([X[pairs].mean(axis=0), np.column_stack(shuffled)])


def samples_needed(pilot: GPMixture, X: np.ndarray) -> int:
    r"""Samples, from 8 to 64, that predict to 0.03 standard deviations and 2% of these at X (t, d).

    S equally weighted samples give the moments of the mixture up to

    .. math:: \frac{\mathrm{sd}(\hat m)}{\sigma} = \sqrt{\frac{V_s[m_s]}{S \sigma^2}}, \qquad
              \frac{\mathrm{sd}(\hat \sigma)}{\sigma}
              = \frac{1}{2 \sigma^2} \sqrt{\frac{V_s[v_s + (m_s - m)^2]}{S}},

    with :math:`m_s, v_s` the moments of an observation under each sample and :math:`m, \sigma^2`
    those of the mixture: root mean squares over the rows of X, of the few samples of a pilot.
    """
    mean, var = pilot.component_moments(X)  # (S, t)
    var = var + pilot.noise[:, None]
    centre, total = mixture_moments(pilot.weights, mean, var)
    spread = pilot.weights @ (mean - centre) ** 2
    energies = var + (mean - centre) ** 2
    uneven = pilot.weights @ (energies - total) ** 2
    of_mean = np.mean(spread / total) / tuned.MEAN_TOL**2
    of_std = np.mean(uneven / (4 * total**2)) / tuned.STD_TOL**2
    # The pilot's own variances are low by one of its effective samples.
    worth = 1 / float((pilot.weights**2).sum())
    needed = max(of_mean, of_std) * worth / max(1.0, worth - 1)
    return int(np.clip(math.ceil(needed), tuned.LEAST_SAMPLES, tuned.MOST_SAMPLES))


#: The samplers of each solver, the default first.
SAMPLERS = {
    "cholesky": ("importance", "hmc"),
    "vecchia": ("importance", "hmc"),
    "cg": ("langevin", "mala", "sgld"),
}


class Plan(NamedTuple):
    """How to fit, none of both "auto"."""

    solver: str
    sampler: str
    automatic: bool = False  # whether the sampler was left open


def resolve_plan(
    solver: str, sampler: str, n: int, *, learns: bool = False, samples: bool = False
) -> Plan:
    """Settle what is left to "auto" for n distinct inputs.

    `learns` is whether hyper-parameters are learned, `samples` whether they are sampled. A
    ValueError if the solver does not have the sampler, or its matrices do not fit.
    """
    needed = 8.0 * tuned.MATRICES * n**2
    if solver == "auto":
        owners = [name for name, own in SAMPLERS.items() if sampler in own] or [*SAMPLERS]
        few = n <= (tuned.MOST_SAMPLED if samples else tuned.MOST_EXACT)
        if "cholesky" in owners and few and needed <= memory_budget():
            solver = "cholesky"
        else:
            solver = "vecchia" if learns and "vecchia" in owners else owners[-1]
        if solver == "cg" and learns:
            _refuse_recomputation(n)
    automatic = sampler == "auto"
    if automatic:
        sampler = SAMPLERS[solver][0]
    if sampler not in SAMPLERS[solver]:
        choices = " or ".join(repr(name) for name in ("auto", *SAMPLERS[solver]))
        raise ValueError(
            f"solver={solver!r} has no sampler={sampler!r}; use sampler={choices}, or "
            "solver='auto'."
        )
    if solver == "cholesky":
        what = f"solver='cholesky' with kernel matrices of {n} distinct rows"
        require_memory(needed, what, "Use solver='vecchia' or solver='cg'")
    return Plan(solver, sampler, automatic)


def _refuse_recomputation(n: int) -> None:
    """Refuse what would make the kernel matrix anew for each of some ten thousand products."""
    if RowOperator.stores(n, torch.float32, torch.device("cpu")):
        return
    room = int((memory_budget() / (8.0 * tuned.MATRICES)) ** 0.5)
    some = min(room, tuned.MINUTES_ROWS)
    require_memory(
        4.0 * n**2 / STORED_SHARE,
        f"Learning the hyper-parameters given {n} distinct rows takes some ten thousand products "
        "with their kernel matrix, which, stored,",
        "Take solver='vecchia', "
        f"fit {some} rows at random, keep the kernel by optimizer=None (one solution, whose cost "
        "verbose=1 tells), or make the matrix anew for each product by solver='cg' (hours to days)",
    )


def cost_of_products(posterior_kernel: Any, data: Data) -> str | None:
    """What a product with a kernel matrix that is not stored takes; None where it is stored."""
    n, signal = len(data.y), split_noise(posterior_kernel)[0]
    operator = RowOperator(signal, data.X, dtype=torch.float32)
    if operator.stored:
        return None
    operator.set_theta(data.X.new_tensor(signal.theta))
    seconds = operator.seconds_a_product()
    least, most = tuned.PRODUCTS_A_SOLUTION
    return (
        f"the kernel matrix of {n} rows takes {4e-9 * n**2:.3g} GB, beyond memory_budget, and is "
        f"made anew for each product, in some {seconds:.2g} s; a solution takes {least} to {most} "
        f"products ({least * seconds:.2g} to {most * seconds:.2g} s), a gradient of the posterior "
        f"some {least}, and samples of it some {tuned.GRADIENTS_A_FIT} gradients"
    )
