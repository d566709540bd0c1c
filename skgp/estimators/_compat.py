"""What differs between the versions of scikit-learn that skgp allows.

Callbacks came with 1.9; before, weights that are all 0 were none to refuse.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight

__all__ = ["CallbackSupportMixin", "check_sample_weight"]

try:
    from sklearn.callback import CallbackSupportMixin
except ImportError:

    class _NoCallbacks:
        """The context of a fit that has nobody to tell."""

        def call_on_fit_task_begin(self, **told: Any) -> None:
            """Tell nobody."""

        call_on_fit_task_end = call_on_fit_task_begin

        def subcontext(self, **described: Any) -> _NoCallbacks:
            """Of a part of the fit: nobody hears of it either."""
            return self

        def propagate_callback_context(self, estimator: Any) -> contextlib.nullcontext:
            """Hand nothing down to an estimator within."""
            return contextlib.nullcontext()

    class CallbackSupportMixin:  # type: ignore[no-redef]
        """An estimator that takes no callbacks."""

        def set_callbacks(self, *callbacks: Any) -> None:
            """Refuse: `sklearn.callback` is not there."""
            raise ImportError(
                "set_callbacks needs scikit-learn 1.9 or later; upgrade it, or set verbose=1 to "
                "follow the fit."
            )

        def _init_callback_context(self, **described: Any) -> _NoCallbacks:
            return _NoCallbacks()


def check_sample_weight(sample_weight: Any, X: Any, **checks: Any) -> np.ndarray:
    """Weights (n,) as scikit-learn checks them; ValueError where all are 0, too."""
    weight = _check_sample_weight(sample_weight, X, **checks)
    if len(weight) and not weight.any():
        raise ValueError("Sample weights must contain at least one non-zero number.")
    return weight
