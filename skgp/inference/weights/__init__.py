"""Solvers in the space of the weights: features streamed, sums over rows, their factors."""
