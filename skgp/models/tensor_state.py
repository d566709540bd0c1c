"""Pickling of objects that hold tensors."""

from typing import Any

import torch
from torch import Tensor


class TensorState:
    """Pickles tensors as NumPy arrays: small whatever storage they view, loadable without a GPU."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            for key, value in self.__dict__.items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = getattr(self, "__annotations__", {})
        for key, value in state.items():
            is_tensor = "Tensor" in str(tensors.get(key, "")) and value is not None
            self.__dict__[key] = torch.from_numpy(value) if is_tensor else value
