"""Relevance vectors: one basis function at a time, or all by stochastic gradients."""
