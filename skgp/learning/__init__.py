"""What chooses options: below the models, above kernels and likelihoods."""

from skgp.learning.selection import (
    LEAST_EFFECT,
    choose,
    cross_validated_losses,
    held_out_rows,
    improves,
    k_folds,
)

__all__ = [
    "LEAST_EFFECT",
    "choose",
    "cross_validated_losses",
    "held_out_rows",
    "improves",
    "k_folds",
]
