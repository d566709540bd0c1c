"""What every test shares: the environment, reproducible examples, seeded data."""

import gc
import os
import signal

# A shell starts what runs in the background with SIGINT ignored, and tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before torch, NumPy and SciPy load, here and nowhere else: `make test`, `.ci/run` and a bare
# `pytest` run the same thing. On problems so small a second thread costs more than it brings.
_threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
for _variable in ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, _threads)
# Without it scikit-learn skips its checks of array API input.
os.environ.setdefault("SCIPY_ARRAY_API", "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# Derandomised: a run fails or passes whoever runs it. No deadline: the machines are shared.
settings.register_profile("skgp", deadline=None, derandomize=True, database=None)
settings.load_profile("skgp")


# What collection makes stays until the end: no search for garbage goes through it, then or later.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for examples in docstrings of skgp alone: to do so in tests, all would be imported."""
    return [each for each in (yield) if type(each).__name__ != "DoctestModule"]


def pytest_collection_modifyitems(items):
    """Skip, rather than fail, the ``gpu`` tests where there is no CUDA device."""
    import torch  # here and below: the process that only hands tests out starts without it

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def rng():
    """NumPy's generator, seeded."""
    return np.random.default_rng(0)


@pytest.fixture
def generator():
    """A local torch generator on the CPU, seeded: nothing here touches torch's global one."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Both precisions that the core supports."""
    import torch

    return getattr(torch, request.param)
