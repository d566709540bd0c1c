"""Linear algebra on tensors and matvec closures; no Gaussian-process words."""

import os
import sys
import warnings
from types import FrameType

__all__ = ["NotPositiveDefiniteError", "NumericalWarning", "warn_caller"]


class NotPositiveDefiniteError(ValueError):
    """A matrix that must be positive definite is not, even after the largest jitter allowed."""


class NumericalWarning(UserWarning):
    """A result is usable but less accurate than asked for; the message says by how much and why."""


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn from the line that called the outermost function of skgp on the stack."""
    level, outermost = 1, 1  # level 1 is this function
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=outermost + 1)
