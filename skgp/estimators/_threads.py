"""Threads of torch for the time of a fit or a prediction."""

import contextlib
from collections.abc import Iterator

import joblib
import torch


@contextlib.contextmanager
def threads(n_jobs: int | None, *, single: bool = False) -> Iterator[None]:
    """Give torch `n_jobs` threads for a while, in joblib's count.

    None leaves them as they are, or gives one where `single`: small operations take longer to hand
    out than to do, many times longer where other processes keep the processors busy.
    """
    if n_jobs is None and not single:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1 if n_jobs is None else joblib.effective_n_jobs(n_jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)
