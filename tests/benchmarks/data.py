"""Data sets of the benchmarks, read from ``SKGP_DATA_DIR`` or ``../shared/data``; seconds."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("SKGP_DATA_DIR", ROOT.parent / "shared" / "data"))


def arrays_of(name):
    """The arrays of ``NAME.npz`` by name, or a skip."""
    path = DATA / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there; name its folder in SKGP_DATA_DIR")
    with np.load(path) as arrays:
        return dict(arrays)


def split_of(name, split=0):
    """X_train, X_test, y_train, y_test of one split, or a skip."""
    arrays = arrays_of(name)
    X, y = arrays["X"].astype(float), arrays["y"].astype(float)
    test = arrays["test_mask"].reshape(len(y), -1)[:, split]
    return X[~test], X[test], y[~test], y[test]


def seconds_of(function):
    """What a call returns, and its seconds of the processor."""
    start = time.process_time()
    found = function()
    return found, time.process_time() - start
