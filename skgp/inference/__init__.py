"""Posteriors of f for given hyper-parameters: prior, likelihood and data in, q(f) out."""
