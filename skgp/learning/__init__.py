"""What chooses options: below the models, above kernels and likelihoods."""

from skgp.learning.selection import (
    LABEL_SHARE,
    LEAST_EFFECT,
    choose,
    cross_validated_losses,
    held_out_rows,
    improves,
    k_folds,
)

__all__ = [
    "LABEL_SHARE",
    "LEAST_EFFECT",
    "choose",
    "cross_validated_losses",
    "held_out_rows",
    "improves",
    "k_folds",
]
