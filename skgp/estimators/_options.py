"""Which parameters have an effect where, and a warning where one was set in vain.

Each estimator lists, in ``_option_rules``, parameters that only some values of others make use of.
One set to other than its default where none of these values is asked for is reported.
"""

import inspect
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from skgp.estimators._warnings import warn_caller

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
                if value != defaults[name].default and name not in told
                if not any(value is nothing for nothing in _NOTHING)
            }
            if idle and option.is_idle(estimator, fitted=stage):
                told.update(idle)
                if stage == fitted:
                    warn_caller(_message(estimator, option, idle))


def _message(estimator: object, option: Option, idle: dict[str, Any]) -> str:
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
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _any_of(values: Any) -> str:
    if isinstance(values, range):
        return f"{values.start} or more"
    return " or ".join(map(repr, values))
