"""Checks of the arguments of likelihoods, and their bounds."""

import torch
from torch import Tensor


def aligned(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Broadcast to one shape; a ValueError unless kind and dtype agree."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a floating-point tensor; got {kind}.")
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"All arguments must have one dtype; got {dtypes}. Convert them first.")
    try:
        return torch.broadcast_tensors(*tensors.values())
    except RuntimeError as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"Shapes do not broadcast: {shapes}.") from error


def fails(are_right: Tensor) -> bool:
    """Whether some value is not right, NaN among them; unseen where the host had to wait for it."""
    return are_right.device.type == "cpu" and not bool(are_right.all())


def check_var(var: Tensor) -> None:
    """Raise a ValueError if a variance is negative or NaN."""
    if fails(var >= 0):
        raise ValueError(
            f"var must be non-negative and not NaN; its smallest value is {float(var.min()):.3g}. "
            "Clip rounding errors at 0 before calling."
        )


def check_positive(name: str, value: float | Tensor, remedy: str) -> None:
    """Raise a ValueError that ends with the remedy unless the value is positive and finite."""
    number = torch.as_tensor(value).detach()
    if not ((number > 0) & number.isfinite()).all():
        raise ValueError(f"{name} must be positive and finite; got {value!r}. {remedy}")


def free_parameter(
    value: float | Tensor, bounds: tuple[float, float] | None
) -> tuple[float, float, float]:
    """A value with its bounds; None keeps it."""
    value = float(value)
    return value, *((value, value) if bounds is None else bounds)


def check_finite(y: Tensor) -> None:
    """Raise a ValueError if an observation is NaN or infinite."""
    if not y.isfinite().all():
        raise ValueError("y contains NaN or inf; drop or impute those rows.")
