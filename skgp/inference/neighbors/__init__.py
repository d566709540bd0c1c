"""Posteriors of f from the nearest points: kriging, and sparse-within-sparse systems."""
