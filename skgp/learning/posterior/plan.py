"""Which solver and sampler the posterior of hyper-parameters is had by, and what it takes."""

from typing import Any, NamedTuple

import torch

from skgp.data import Data
from skgp.kernels import split_noise
from skgp.kernels.defaults import STORED_SHARE
from skgp.kernels.operators import RowOperator
from skgp.learning.posterior import defaults as tuned
from skgp.linalg.runtime import memory_budget, require_memory

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
