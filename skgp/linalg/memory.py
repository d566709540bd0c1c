"""How much memory there is to work in: of the machine, of a container, or of an accelerator."""

import math
import os
from pathlib import Path

import torch

from skgp.linalg.defaults import MEMORY_SHARE, MEMORY_UNKNOWN

# (limit, in use) of the control groups that containers are kept in, versions 2 and 1
_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def memory_budget(asked: float | None, device: torch.device | str = "cpu") -> float:
    """Bytes that the largest object of a computation may take.

    Parameters
    ----------
    asked : float or None
        What the user says; None takes 70% of `free_memory`, rounded down to a step of a quarter
        octave, so that equal fits meet equal budgets though some megabytes come and go.
    device : torch.device or str
    """
    if asked is not None:
        return float(asked)
    return 2.0 ** (math.floor(4 * math.log2(MEMORY_SHARE * free_memory(device))) / 4)


def free_memory(device: torch.device | str = "cpu") -> float:
    """Bytes free on a device; of the CPU also within the container that the process is in."""
    device = torch.device(device)
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    bounds = [_free_of_machine(), *map(_free_of_group, _CONTROL_GROUPS)]
    return max(
        min((bound for bound in bounds if bound is not None), default=MEMORY_UNKNOWN), 2.0**20
    )


def _free_of_machine() -> float | None:
    """What could be had without swapping, caches of files included."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return 1024.0 * float(fields["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_of_group(paths: tuple[str, str]) -> float | None:
    try:
        limit, used = (float(Path(path).read_text()) for path in paths)
    except (OSError, ValueError):  # there is none, or its limit is "max"
        return None
    return max(limit - used, 0.0)
