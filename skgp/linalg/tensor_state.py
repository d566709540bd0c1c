"""State of objects that hold tensors, for ``pickle`` and ``skops``."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorArray:
    """Stands for a tensor."""

    array: np.ndarray


@dataclass(frozen=True)
class DTypeName:
    """Stands for a ``torch.dtype``."""

    name: str


class TensorState:
    """Stores tensors as NumPy arrays: small whatever storage they view, loadable without a GPU.

    Tensors and dtypes inside lists, tuples and dictionaries too. Deep copies keep their devices.
    """

    def __getstate__(self) -> dict[str, Any]:
        return _stored(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_restored(state))

    def to(self, *args: Any) -> Any:
        """A copy with every tensor on a device or in a dtype, as ``Tensor.to``; shares the rest."""
        other = object.__new__(type(self))
        other.__dict__.update(_moved(self.__dict__, args))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def _stored(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorArray(value.detach().cpu().numpy())
    if isinstance(value, torch.dtype):
        return DTypeName(str(value).removeprefix("torch."))
    return _mapped(_stored, value)


def _restored(value: Any) -> Any:
    if isinstance(value, TensorArray):
        return torch.from_numpy(value.array)
    if isinstance(value, DTypeName):
        return getattr(torch, value.name)
    return _mapped(_restored, value)


def _moved(value: Any, args: tuple) -> Any:
    if isinstance(value, (Tensor, TensorState)):
        return value.to(*args)
    return _mapped(lambda part: _moved(part, args), value)


def _mapped(function: Any, value: Any) -> Any:
    """Apply a function to what a plain container holds."""
    if type(value) is dict:
        return {key: function(part) for key, part in value.items()}
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
