"""Where and how an estimator computes: device, dtype and sources of randomness."""

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from sklearn.utils import check_random_state


@dataclass(frozen=True)
class Backend:
    """What ``device``, ``dtype`` and ``random_state`` of an estimator resolve to, for one fit.

    ``dtype`` is of the training: prediction is in float64 whatever this is.
    """

    device: torch.device
    dtype: torch.dtype
    random_state: int | np.random.RandomState | None

    @cached_property
    def seed(self) -> int:
        """Drawn from ``random_state`` at the first use; a fit that draws nothing leaves it alone.

        As in scikit-learn, None draws from NumPy's global generator.
        """
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def generator(self) -> torch.Generator:
        """Return a new ``torch.Generator`` on the CPU, seeded by ``seed``.

        Drawing on the CPU and moving the draws gives the same fit on every device.
        """
        return torch.Generator().manual_seed(self.seed)

    def rng(self) -> np.random.Generator:
        """Return a new NumPy generator, seeded by ``seed``."""
        return np.random.default_rng(self.seed)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return ``array`` on ``device`` in ``dtype``; shares its memory where it can."""
        return to_tensor(array, dtype=self.dtype, device=self.device)


def resolve_backend(device: str | torch.device, dtype: str, random_state) -> Backend:
    """Resolve the parameters ``device``, ``dtype`` and ``random_state`` of an estimator."""
    return Backend(resolve_device(device), getattr(torch, dtype), random_state)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device that ``device`` names; "auto" prefers CUDA.

    ValueError if torch does not know it or this machine lacks it.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved, dtype=torch.float64)
    except (RuntimeError, AssertionError, TypeError) as error:
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            reason = "needs CUDA, and torch finds none on this machine."
        else:
            reason = f"cannot be used for arrays of float64: {error}"
        raise ValueError(
            f'device={device!r} {reason} Use device="auto" or "cpu", or install a build of torch '
            "for the device."
        ) from error
    return resolved


def to_tensor(
    array: np.ndarray,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return ``array`` as a tensor, without a copy where dtype and device allow.

    Read-only arrays (memory maps of joblib) are accepted: the caller must not write to the result.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device=device, dtype=dtype)
