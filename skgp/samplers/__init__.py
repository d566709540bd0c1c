"""Samplers of a density given as a function, and the diagnostics of what they drew."""

from skgp.samplers.diagnostics import (
    effective_sample_size,
    ess_bulk,
    ess_tail,
    pareto_k,
    r_hat,
    stratified_resample,
)
from skgp.samplers.hmc import ChainState, HMCResult, hamiltonian_monte_carlo
from skgp.samplers.importance import ImportanceSamples, adaptive_importance_sampling

__all__ = [
    "ChainState",
    "HMCResult",
    "ImportanceSamples",
    "adaptive_importance_sampling",
    "effective_sample_size",
    "ess_bulk",
    "ess_tail",
    "hamiltonian_monte_carlo",
    "pareto_k",
    "r_hat",
    "stratified_resample",
]
