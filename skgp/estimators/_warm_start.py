"""When a warm start goes on from the last fit: one rule for every estimator.

It does where the last fit was asked for the same model of the same columns and classes, and begins
anew elsewhere: where it began, how long it ran and what it learned from may all be others. The
``optimizer`` may change too: None keeps the hyper-parameters where the last fit left them.
"""

from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

#: What defines the model; an estimator has some of them.
_MODEL = (
    "kernel",
    "likelihood",
    "link",
    "degrees_of_freedom",
    "method",
    "basis",
    "projection",
    "normalize_y",
    "n_features_in_",
    "classes_",
)


def asked_model(estimator: object) -> dict[str, Any]:
    """Return what defines the model that a fit is asked for, as plain values that compare."""
    return {name: _plain(getattr(estimator, name, None)) for name in _MODEL}


def _plain(value: Any) -> Any:
    if isinstance(value, Kernel):
        parameters = value.get_params(deep=False).items()
        return type(value).__name__, {name: _plain(part) for name, part in parameters}
    return np.asarray(value).tolist()
