"""Sparse posteriors q(u) over the values of f at a few inducing points."""
