"""Samplers of a density given as a function, and the diagnostics of what they drew."""

from skgp.samplers.defaults import SEGMENT
from skgp.samplers.diagnostics import (
    Run,
    effective_sample_size,
    ess_bulk,
    ess_spread,
    ess_tail,
    pareto_k,
    r_hat,
    stein_weights,
    stratified_resample,
)
from skgp.samplers.hmc import HMCResult, hamiltonian_monte_carlo
from skgp.samplers.importance import (
    ImportanceSamples,
    Rounds,
    StudentDensity,
    StudentMixture,
    adaptive_importance_sampling,
)
from skgp.samplers.langevin import LangevinResult, stochastic_langevin
from skgp.samplers.langevin_steps import NoisyGradient, PowerSchedule, noise_ratio

__all__ = [
    "SEGMENT",
    "HMCResult",
    "ImportanceSamples",
    "LangevinResult",
    "NoisyGradient",
    "PowerSchedule",
    "Rounds",
    "Run",
    "StudentMixture",
    "StudentDensity",
    "adaptive_importance_sampling",
    "effective_sample_size",
    "ess_bulk",
    "ess_spread",
    "ess_tail",
    "hamiltonian_monte_carlo",
    "noise_ratio",
    "pareto_k",
    "r_hat",
    "stein_weights",
    "stochastic_langevin",
    "stratified_resample",
]
