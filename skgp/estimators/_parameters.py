"""Parameters of estimators: constraints, warnings, which have an effect where, descriptions.

skgp depends on scikit-learn >= 1.7. Third-party estimators need a few of its private helpers to
validate parameters as it does. They are imported in this one place, which has what differs between
versions, too: a new release is checked here first. Callbacks came with 1.9; before, weights that
are all 0 were none to refuse.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.base import _fit_context as validated_context
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel
from sklearn.utils import _safe_indexing
from sklearn.utils._param_validation import Interval, InvalidParameterError, StrOptions
from sklearn.utils.validation import _check_sample_weight

from skgp.kernels import split_noise
from skgp.linalg import warn_caller

#: Of parameters that the estimator may choose.
Auto = Literal["auto"]


def keep_parameters(estimator: object, given: dict[str, Any]) -> None:
    """Set the arguments of ``__init__`` (its ``locals()``) unchanged, as scikit-learn asks."""
    vars(estimator).update((name, value) for name, value in given.items() if name != "self")


def warn_at_bounds(kernel: Kernel, given: Kernel | None) -> None:
    """Warn about each optimised hyper-parameter that the user wrote and that ended at a bound.

    The ``ConvergenceWarning`` is scikit-learn's own and names the parameter and the bound.

    ``kernel`` is as learned, one for each class perhaps; ``given`` as the user gave it. Of None
    nothing is checked, nor is noise that was added to it.
    """
    if given is None:
        return
    added = split_noise(given)[1] is None
    for part in kernel.kernels if isinstance(kernel, CompoundKernel) else [kernel]:
        (split_noise(part)[0] if added else part)._check_bounds_params()


def check_hyperparameters(kernel: Kernel) -> None:
    """ValueError of what is to be searched for and has no logarithm, or no bounds to search in."""
    values = kernel.get_params()
    for hyper in kernel.hyperparameters:
        value, bounds = np.asarray(values[hyper.name], dtype=float), hyper.bounds
        if hyper.fixed:
            continue
        may_vanish = not hyper.name.endswith(("length_scale", "period", "periodicity", "decay"))
        if not ((value > 0) | (may_vanish & (value == 0))).all():
            raise ValueError(
                f"kernel={kernel} has {hyper.name}={value.tolist()}; hyper-parameters must be "
                "positive numbers."
            )
        low, high = bounds.T if np.shape(bounds)[-1:] == (2,) else (np.inf, 0.0)
        if not np.all(((0 <= low) | (low == -np.inf)) & (low <= high)):
            raise ValueError(
                f"kernel={kernel} has {np.asarray(bounds).tolist()} for bounds "
                f'of {hyper.name}; give (low, high), positive and in this order, or "fixed".'
            )


#: What to give in place of a value that no parameter takes, where the message does not tell.
_REMEDIES = {
    "alpha": "Of observations one by one give an array: np.asarray(alpha).",
    "kernel": "Give an object of these classes, such as 1.0 * RBF() + WhiteKernel(), or None; the "
    'documentation translates other libraries\' ("From GPyTorch").',
    "optimizer": "Leave it at the default to search for hyper-parameters; None keeps the kernel's.",
    "n_inducing": "Give a whole number of points; the estimator places them.",
    "random_state": "Give a whole number.",
    "device": 'Give a name, such as "cuda:0".',
    "dtype": 'Give the name, such as "float32".',
    "memory_budget": "It is in bytes, such as 4e9.",
    "covariates": 'Give a dict of columns and kinds, such as {"temp": "smooth"}.',
}


def _remedy(message: str) -> str:
    """What an error of parameters (scikit-learn's) does not tell; "" of most."""
    name = message.split("'")[1]
    if "Got <class " in message and name in ("kernel", "likelihood"):
        return " Give an object of the class: call it, with ()."
    return f" {_REMEDIES.get(name, '')}".rstrip()


def is_one_of_many_fits(estimator: object) -> bool:
    """Tell whether a search (``GridSearchCV`` and its like) runs this fit among others.

    A search announces itself by a callback context whose sub-tasks have no order.
    """
    context = getattr(estimator, "_parent_callback_ctx", None)
    while context is not None:
        if not context.sequential_subtasks:
            return True
        context = context.parent
    return False


def take_rows(X, rows: np.ndarray):
    """Return some rows of an array, a data frame or a list; None of None."""
    return None if X is None else _safe_indexing(X, rows)


#: A value that asks for nothing cannot be in vain.
_NOTHING = (None, False)


@dataclass(frozen=True)
class Option:
    """Parameters that have an effect only under a condition.

    ``where`` holds values of other parameters; one of them suffices. What "auto" stands for is
    known after the fit, from the attribute of that name: ``solver_`` of ``solver``.
    """

    names: tuple[str, ...]
    where: dict[str, Container]

    def is_idle(self, estimator: object, *, fitted: bool) -> bool:
        """Whether the condition fails, by what is known before a fit, or only after it."""
        found = {name: getattr(estimator, name, None) for name in self.where}
        auto = {name for name, value in found.items() if isinstance(value, str) and value == "auto"}
        if fitted:
            found |= {name: getattr(estimator, f"{name}_", "auto") for name in auto}
        holds = any(value in self.where[name] for name, value in found.items())
        return not holds and bool(auto) == fitted


def options(names: str, **where: Container) -> Option:
    """Say that the parameters `names` (separated by blanks) matter only where one of `where` holds.

    Examples
    --------
    >>> options("batch_size learning_rate", solver=("sgd",)).names
    ('batch_size', 'learning_rate')
    """
    return Option(tuple(names.split()), where)


def warn_of_idle_options(estimator: Any, *, fitted: bool) -> None:
    """Warn of parameters that were set and have no effect.

    ``fitted`` is False before the fit, for what the parameters alone decide; True after it, for
    what depends on the meaning that the fit gave to "auto".
    """
    defaults = inspect.signature(type(estimator).__init__).parameters
    told: set[str] = set()
    for stage in (False, True)[: 1 + fitted]:
        for option in getattr(estimator, "_option_rules", ()):
            values = {n: getattr(estimator, n) for n in option.names if n in defaults}
            idle = {
                name: value
                for name, value in values.items()
                if np.any(value != defaults[name].default) and name not in told
                if not any(value is nothing for nothing in _NOTHING)
            }
            if idle and option.is_idle(estimator, fitted=stage):
                told.update(idle)
                if stage == fitted:
                    warn_caller(_message(estimator, option, idle))


def _message(estimator: object, option: Option, idle: dict[str, Any]) -> str:
    """What a warning says of parameters without effect, and where they would have one."""
    found = {name: getattr(estimator, name) for name in option.where}
    chosen = [
        f"{name}='auto' chose {getattr(estimator, f'{name}_')!r}"
        for name, value in found.items()
        if isinstance(value, str) and value == "auto" and hasattr(estimator, f"{name}_")
    ]
    needs = [f"{name}={_any_of(values)}" for name, values in option.where.items()]
    return (
        f"{_listed(idle)} {'has' if len(idle) == 1 else 'have'} no effect with {_listed(found)}"
        f"{' (' + ', '.join(chosen) + ')' if chosen else ''}; needed is {', or '.join(needs)}. "
        f"Leave {', '.join(idle)} at the default, or change {' or '.join(found)}."
    )


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in values.items())


def _shown(value: Any) -> str:
    """A value in a message; of an array its shape."""
    return f"array of shape {value.shape}" if np.ndim(value) else repr(value)


def _any_of(values: Any) -> str:
    if isinstance(values, range):
        return f"{values.start} or more"
    return " or ".join(map(repr, values))


def check_likelihood(estimator: BaseEstimator, base: type[BaseEstimator]) -> None:
    """Say which estimators, derived from `base`, have a likelihood that this one lacks.

    Where there are none, scikit-learn's own message is as good.
    """
    asked = getattr(estimator, "likelihood", None)
    own = _likelihoods(type(estimator))
    if not isinstance(asked, str) or asked in own:
        return
    takers = sorted({cls.__name__ for cls in _descendants(base) if asked in _likelihoods(cls)})
    if takers:
        raise ValueError(
            f"The 'likelihood' parameter of {type(estimator).__name__} must be one of "
            f"{sorted(own)}; got {asked!r}, which these take: {', '.join(takers)}."
        )


def _likelihoods(cls: type[BaseEstimator]) -> set[str]:
    """Values of the parameter of that name; empty for a class without it."""
    constraints = cls._parameter_constraints.get("likelihood", [None])
    return set(getattr(constraints[0], "options", ()))


def _descendants(base: type[BaseEstimator]) -> Iterator[type[BaseEstimator]]:
    """Estimators of this package that derive from a class, used so far or not."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
        importlib.import_module(module.name)
    for cls in base.__subclasses__():
        if cls.__module__.startswith("skgp."):
            if not inspect.isabstract(cls):
                yield cls
            yield from _descendants(cls)


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

    #: A class says those of its own parameters, to which those of its bases are added.
    _parameter_constraints: dict[str, Any]
    _own_constraints: dict[str, Any] = {
        "kernel": [Kernel, None],
        "random_state": ["random_state"],
        "device": [str, torch.device],
        "n_jobs": [Integral, None],
        "memory_budget": [Interval(Real, 1e3, None, closed="left"), None],
        "verbose": ["verbose"],
    }
    kernel: Kernel | None

    def _validate_params(self) -> None:
        try:
            super()._validate_params()  # type: ignore[misc]
        except InvalidParameterError as error:
            raise InvalidParameterError(f"{error}{_remedy(str(error))}") from error
        if self.kernel is not None:
            check_hyperparameters(self.kernel)

    #: Where parameters have an effect that not always have one.
    _option_rules: tuple[Option, ...] = ()
    #: Fitted attributes that ``partial_fit`` or a warm start changes in place.
    _updated_in_place: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own_constraints = vars(cls).get("_parameter_constraints", {})
        cls._parameter_constraints = {}
        for base in reversed(cls.__mro__):
            cls._parameter_constraints |= vars(base).get("_own_constraints", {})
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


__all__ = ["CallbackSupportMixin", "Interval", "StrOptions", "validated_context"]

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
