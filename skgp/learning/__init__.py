"""What chooses options: below the models, above kernels and likelihoods."""

from skgp.learning.selection import (
    LABEL_SHARE,
    LEAST_EFFECT,
    choose,
    held_out_rows,
    improves,
)

__all__ = [
    "LABEL_SHARE",
    "LEAST_EFFECT",
    "choose",
    "held_out_rows",
    "improves",
]
