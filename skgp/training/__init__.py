"""Training with minibatches: sampling, stopping rules, and the loop itself."""

from skgp.training.adam import Adam
from skgp.training.loop import NonFiniteLossError, TrainingLoop, exponential_decay
from skgp.training.minibatch import sample_without_replacement
from skgp.training.stopping import LossPlateau, Plateau, ValidationPlateau

__all__ = [
    "Adam",
    "LossPlateau",
    "NonFiniteLossError",
    "Plateau",
    "TrainingLoop",
    "ValidationPlateau",
    "exponential_decay",
    "sample_without_replacement",
]
