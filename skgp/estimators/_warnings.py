"""Warnings that name the line of the user who called, however deep they arise."""

import os
import sys
import warnings

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn from the line that called the outermost function of skgp on the stack."""
    level, outermost, frame = 1, 1, sys._getframe()  # level 1 is this function
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            outermost = level
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=outermost + 1)
