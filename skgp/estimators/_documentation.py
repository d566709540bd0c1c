"""What parameters and attributes of all estimators are, and docstrings that take it from here."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

#: Names of parameters or attributes, a line of their own: ``{device, n_jobs}``.
_NAMES = re.compile(r"^\{(\w+(?:, \w+)*)\}$", re.MULTILINE)


class DescribedEstimator:
    """An estimator whose docstrings take from those of base classes what these describe.

    A line of names in braces, ``{device, n_jobs}``, stands for their descriptions in the nearest
    base class, or in its method of the same name, that has them.

    Parameters
    ----------
    optimizer : "auto" or None, default="auto"
        None keeps the kernel's hyper-parameters.
    random_state : int, RandomState instance or None, default=None
        Seed of whatever a fit draws; an int makes fits repeatable.
    device : str or torch.device, default="auto"
        Of fit and predictions; "auto" is "cuda" where there is one and at least 500
        observations, else "cpu".
    dtype : {"float64", "float32"}, default="float64"
        Of the fit. Predictions are in float64.
    n_jobs : int or None, default=None
        Threads. None is one, but all that torch has for large matrix operations; a number is for
        these, and from 2000 observations on for everything: -1, all processors, pays on an idle
        machine.
    memory_budget : float or None, default=None
        Bytes that a fit or a prediction may take beyond the data and the model. None is 70% of
        what is free on the device. Less makes tiles smaller and computes anew what was kept; what
        cannot fit is refused before it begins.
    verbose : int, default=0
        1 prints one line per stage, 2 one per iteration.

    Attributes
    ----------
    kernel_ : Kernel
        With the hyper-parameters learned.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    n_features_in_ : int
    feature_names_in_ : ndarray of str
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, documented in [(None, cls), *vars(cls).items()]:
            if documented is cls or inspect.isfunction(documented):
                own = inspect.cleandoc(documented.__doc__ or "")
                bases = [base if name is None else vars(base).get(name) for base in cls.__mro__[1:]]
                above = [inspect.cleandoc(base.__doc__) for base in bases if base and base.__doc__]
                if _NAMES.search(own):
                    described = partial(_descriptions, docstrings=above)
                    documented.__doc__ = _NAMES.sub(described, own)


def _descriptions(found: re.Match, docstrings: list[str]) -> str:
    """Entries of numpydoc sections, each of the first docstring that has one of the name.

    The line itself, if a name has none: a class derived from ours may have braces of its own.
    """
    entries = []
    for name in found[1].split(", "):
        entry = re.compile(rf"^{name}\b[^:\n]* : .*(?:\n +.*)*", re.MULTILINE)
        matches = [match for match in map(entry.search, docstrings) if match]
        if not matches:
            return found[0]
        entries.append(matches[0][0])
    return "\n".join(entries)
