"""Posteriors of f averaged over samples of the hyper-parameters."""
