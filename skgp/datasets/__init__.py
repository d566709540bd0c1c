"""Synthetic data sets: generators in NumPy, each with its source."""

from .generators import make_counts, make_ringnorm, make_sinc, make_smooth, make_twonorm

__all__ = ["make_counts", "make_ringnorm", "make_sinc", "make_smooth", "make_twonorm"]
