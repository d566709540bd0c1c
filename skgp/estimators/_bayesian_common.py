"""What `BayesianGPRegressor` decides before it fits, and the calls of the samplers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.learning.posterior.exact import PosteriorSamples, sample_exact, single_sample
from skgp.learning.posterior.langevin import sample_stochastic
from skgp.learning.posterior.laplace import find_mode, laplace_approximation
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.priors import resolve_priors
from skgp.learning.posterior.set_up import set_up
from skgp.optim.stopping import StopRecorder

Callback = Callable[[int, dict], bool | None]
#: The samplers of each solver, the default first.
SAMPLERS = {"cholesky": ("importance", "hmc"), "cg": ("langevin", "mala", "sgld")}
_MOST_EXACT = 10_000  # rows up to which a gradient by "cg" costs as much as a few likelihoods
_MATRICES = 6  # n x n, of float64, that a likelihood and its gradient hold
_FEW = 300  # rows on which kernels are compared


@dataclass(frozen=True)
class Plan:
    """How to fit: ``solver`` and ``sampler``, none of them "auto"."""

    solver: str
    sampler: str


def resolve_plan(solver: str, sampler: str, n: int, memory_budget: float) -> Plan:
    """Settle what is left to "auto", and refuse what does not go together or does not fit.

    Parameters
    ----------
    solver : {"auto", "cholesky", "cg"}
    sampler : {"auto", "importance", "hmc", "langevin", "mala", "sgld"}
    n : int
        Distinct rows.
    memory_budget : float
        Bytes.

    Raises
    ------
    ValueError
        If the solver does not have the sampler, or its matrices do not fit in the budget.
    """
    needed = 8.0 * _MATRICES * n**2
    if solver == "auto":
        owner = [name for name, own in SAMPLERS.items() if sampler in own]
        fits = n <= _MOST_EXACT and needed <= memory_budget
        solver = owner[0] if owner else ("cholesky" if fits else "cg")
    if sampler == "auto":
        sampler = SAMPLERS[solver][0]
    if sampler not in SAMPLERS[solver]:
        choices = " or ".join(repr(name) for name in ("auto", *SAMPLERS[solver]))
        raise ValueError(
            f"solver={solver!r} has no sampler={sampler!r}; use sampler={choices}, or "
            "solver='auto'."
        )
    if solver == "cholesky" and needed > memory_budget:
        raise ValueError(
            f"solver='cholesky' with {n} distinct rows needs about {needed:.2g} bytes of kernel "
            f"matrices and memory_budget={memory_budget:.2g} allows fewer; use solver='cg', or "
            "raise memory_budget."
        )
    return Plan(solver, sampler)


def choose_kernel(
    kernels: list[Kernel],
    data: Data,
    posterior_of: Callable[[Kernel, Data], LogPosterior],
    rng: np.random.Generator,
    callback: Callback,
) -> Kernel:
    """The kernel of the highest posterior density at its mode, given a few hundred rows.

    All have the same hyper-parameters under the same priors, so that densities compare.

    Parameters
    ----------
    kernels : list of Kernel
    data : Data
    posterior_of : callable
        Maps a kernel and rows to the posterior of the kernel's hyper-parameters.
    rng : numpy.random.Generator
        Draws the rows.
    callback : callable
        See `find_mode`; True stops with the best so far.
    """
    rows = torch.from_numpy(rng.permutation(len(data.y))[:_FEW]).to(data.y.device)
    few, recorder, ends = data.take(rows), StopRecorder(callback), []
    for kernel in kernels:
        posterior = posterior_of(kernel, few)
        mode = find_mode(posterior, [posterior.medians], tol=1e-3, callback=recorder)
        ends.append(mode.log_density)
        if recorder.stopped:
            break
    return kernels[int(np.argmax(ends))]


def make_posterior(
    kernel: Kernel,
    data: Data,
    prior: Any,
    X: np.ndarray,
    z: np.ndarray,
    sample_weight: np.ndarray | None,
    columns: Sequence[str] | None = None,
) -> LogPosterior:
    """The posterior of the kernel's hyper-parameters, under the user's priors or the defaults."""
    return LogPosterior(kernel, data, resolve_priors(kernel, prior, X, z, sample_weight, columns))


def fix_equal_bounds(kernel: Kernel) -> Kernel:
    """Fix, in place, what has no room between its bounds, at the value that they allow."""
    for hyper in kernel.hyperparameters:
        bounds = None if hyper.fixed else np.asarray(hyper.bounds, dtype=float)
        if bounds is not None and (bounds[:, 0] == bounds[:, 1]).all():
            value = bounds[:, 0] if hyper.n_elements > 1 else float(bounds[0, 0])
            kernel.set_params(**{hyper.name: value, f"{hyper.name}_bounds": "fixed"})
    return kernel


def find_optimum(
    posterior: LogPosterior,
    plan: Plan,
    starts: list[np.ndarray],
    rng: np.random.Generator,
    callback: Callback,
    **of_cg: Any,
) -> PosteriorSamples:
    """The mode as the only sample."""
    if plan.solver == "cholesky":
        found: Any = laplace_approximation(posterior, rng=rng, starts=starts, callback=callback)
        problems = [] if found.converged else ["the search for the optimum did not converge"]
    else:
        found = set_up(posterior, rng=rng, starts=starts, callback=callback, **of_cg)
        problems = found.problems
    diagnostics = {
        "sampler": "map",
        "converged": not problems,
        "problems": problems,
        "ess": 1.0,
        "n_gradients": found.n_gradients,
    }
    if plan.solver == "cholesky":
        diagnostics["log_evidence"] = found.log_evidence
        diagnostics["log_posterior_map"] = found.log_density
    return single_sample(found.mode, getattr(found, "log_density", np.nan), diagnostics)


def draw_samples(
    posterior: LogPosterior,
    plan: Plan,
    *,
    schedule: str,
    of_cg: dict[str, Any],
    **common: Any,
) -> PosteriorSamples:
    """Samples of the posterior by the sampler of the plan; `common` is what all of them take."""
    if plan.solver == "cholesky":
        return sample_exact(posterior, sampler=plan.sampler, **common)
    return sample_stochastic(posterior, sampler=plan.sampler, schedule=schedule, **of_cg, **common)
