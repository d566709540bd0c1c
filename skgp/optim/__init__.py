"""Minimisers: quasi-Newton searches, and training loops on minibatches with stopping rules."""

from skgp.optim.loop import (
    Adam,
    NonFiniteLossError,
    TrainingLoop,
    exponential_decay,
    host_generator,
    sample_without_replacement,
)
from skgp.optim.stopping import LossPlateau, Plateau, ValidationPlateau

__all__ = [
    "Adam",
    "LossPlateau",
    "NonFiniteLossError",
    "Plateau",
    "TrainingLoop",
    "ValidationPlateau",
    "exponential_decay",
    "host_generator",
    "sample_without_replacement",
]
