"""Minimisers: quasi-Newton searches, and a training loop on minibatches with stopping rules."""

from skgp.optim.loop import (
    Adam,
    BoundedAdam,
    NonFiniteLossError,
    exponential_decay,
    host_generator,
    sample_without_replacement,
)
from skgp.optim.stopping import LossPlateau, Plateau, ValidationPlateau

__all__ = [
    "Adam",
    "BoundedAdam",
    "LossPlateau",
    "NonFiniteLossError",
    "Plateau",
    "ValidationPlateau",
    "exponential_decay",
    "host_generator",
    "sample_without_replacement",
]
