"""Priors of hyper-parameters."""

from skgp.priors.densities import Gamma, HalfNormal, LogNormal, Prior

__all__ = ["Gamma", "HalfNormal", "LogNormal", "Prior"]
