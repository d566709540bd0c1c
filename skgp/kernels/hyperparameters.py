"""Hyper-parameters of a kernel expression, in scikit-learn's order and in a fifth of its time.

scikit-learn looks for them by name among all attributes of every part, at every question: of a sum
of products for longer than the evidence of sixty observations takes. A class has the same names
always.
"""

import copy
import functools
from collections.abc import Hashable
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Exponentiation, Hyperparameter, Kernel, Product, Sum

from .specs import ActiveDims

_PREFIX = "hyperparameter_"
#: Modules of kernels that hold their parameters alone.
_PLAIN = Kernel.__module__, ActiveDims.__module__


def children_of(kernel: Any) -> tuple[Kernel, ...]:
    """Return the parts of a composite, in the order in which they own ``theta``; () for a leaf."""
    if type(kernel) in (Sum, Product):
        return kernel.k1, kernel.k2
    if type(kernel) in (Exponentiation, ActiveDims):
        return (kernel.kernel,)
    return ()


def hyperparameters_of(leaf: Any) -> list[Any]:
    """``leaf.hyperparameters``, fixed ones too."""
    if type(leaf).hyperparameters is not Kernel.hyperparameters:  # of a class of a user's own
        return leaf.hyperparameters
    return [_hyperparameter(leaf, name) for name in names_of(type(leaf))]  # type: ignore[arg-type]


def _hyperparameter(leaf: Any, name: str) -> Any:
    """One of them; those of a number are made once for all kernels of these bounds."""
    own = vars(leaf)
    if is_plain(leaf) and isinstance(own.get(name), float):
        try:
            return _of_number(name, own.get(f"{name}_bounds"))
        except TypeError:  # bounds that are no tuple of numbers
            pass
    return getattr(leaf, _PREFIX + name)


@functools.lru_cache(maxsize=2**10)
def _of_number(name: str, bounds: Hashable) -> Any:
    return Hyperparameter(name, "numeric", bounds)


def is_plain(kernel: Any) -> bool:
    """Whether a kernel holds its parameters alone, each as an attribute."""
    return type(kernel).__module__ in _PLAIN


@functools.lru_cache(maxsize=2**8)
def names_of(cls: type) -> tuple[str, ...]:
    """Names of the hyper-parameters of a class of kernels, as scikit-learn finds them."""
    return tuple(name.removeprefix(_PREFIX) for name in dir(cls) if name.startswith(_PREFIX))


def sizes_of(kernel: Kernel) -> list[int]:
    """Number of elements of each hyper-parameter that is not fixed, in the order of theta."""
    return [hyper.n_elements for _, hyper in free_of(kernel)]


def n_dims_of(kernel: Kernel) -> int:
    """``kernel.n_dims``: how many numbers are free."""
    return sum(sizes_of(kernel))


def theta_of(kernel: Kernel) -> np.ndarray:
    """``kernel.theta``, a new array (t,): their logarithms."""
    values = [np.ravel(getattr(leaf, hyper.name)) for leaf, hyper in free_of(kernel)]
    return np.log(np.concatenate(values, dtype=float)) if values else np.empty(0)


def bounds_of(kernel: Kernel) -> np.ndarray:
    """``kernel.bounds``, (t, 2): logarithms."""
    bounds = [hyper.bounds for _, hyper in free_of(kernel)]
    return np.log(np.concatenate(bounds, dtype=float)) if bounds else np.empty((0, 2))


def free_of(kernel: Kernel) -> list[tuple[Kernel, Any]]:
    """The hyper-parameters that are not fixed, and the leaves that own them."""
    return [(leaf, hyper) for leaf, hyper in owned(kernel) if not hyper.fixed]


def owned(kernel: Kernel) -> list[tuple[Kernel, Any]]:
    """All hyper-parameters, and the leaves that own them."""
    children = children_of(kernel)
    if children:
        return [pair for child in children for pair in owned(child)]
    return [(kernel, hyper) for hyper in hyperparameters_of(kernel)]


def copied(kernel: Kernel) -> Any:
    """A deep copy."""
    if type(kernel) in (Sum, Product):
        return type(kernel)(*map(copied, children_of(kernel)))
    if type(kernel) is ActiveDims:
        return ActiveDims(copied(kernel.kernel), kernel.dims)
    if not is_plain(kernel):  # may keep what it likes
        return copy.deepcopy(kernel)
    other = object.__new__(type(kernel))
    other.__dict__.update(kernel.__dict__)
    for name, value in vars(kernel).items():
        if not isinstance(value, float | int | str | tuple):
            other.__dict__[name] = copy.deepcopy(value)
    return other


def with_theta(kernel: Kernel, theta: np.ndarray) -> Any:
    """``kernel.clone_with_theta(theta)``."""
    other, start = copied(kernel), 0
    for leaf, hyper in free_of(other):
        values = np.exp(theta[start : start + hyper.n_elements])
        start += hyper.n_elements
        value = values if hyper.n_elements > 1 else values[0]
        if is_plain(leaf):
            setattr(leaf, hyper.name, value)
        else:
            leaf.set_params(**{hyper.name: value})
    return other
