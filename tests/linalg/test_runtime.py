"""One thread for small operations, several for large ones; the memory that fits may take."""

import os
import threading

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from skgp.linalg import runtime
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky
from skgp.linalg.runtime import large_operation, one_thread


@pytest.fixture(autouse=True)
def three_threads():
    """Torch and the pools of BLAS and OpenMP with three threads each."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def pools():
    """Threads of every pool that the process has."""
    return {each["filepath"]: each["num_threads"] for each in threadpool_info()}


def test_one_thread_limits_all_pools_and_restores_them():
    before = pools()
    with one_thread():
        assert torch.get_num_threads() == 1
        assert set(pools().values()) == {1}
        with one_thread(2):  # the outermost decides
            assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3 and pools() == before


def test_one_thread_restores_after_an_error():
    before = pools()
    with pytest.raises(KeyboardInterrupt), one_thread(2, throughout=True):
        assert torch.get_num_threads() == 2 and set(pools().values()) == {2}
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 3 and pools() == before


def test_large_operations_take_the_threads_found():
    with large_operation(1e12):
        assert torch.get_num_threads() == 3  # nothing to do outside of a fit
    with one_thread():
        with large_operation(1e12):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
        with large_operation(1e6):
            assert torch.get_num_threads() == 1
    with one_thread(2), large_operation(1e12):
        assert torch.get_num_threads() == 2


def test_concurrent_fits_leave_the_pools_as_they_were():
    before, inside = pools(), threading.Barrier(2, timeout=30)

    def first():
        with one_thread():
            inside.wait()
            inside.wait()  # the second has begun and not ended

    def second():
        inside.wait()
        with one_thread():
            inside.wait()
            thread.join()
            assert set(pools().values()) == {1}

    thread = threading.Thread(target=first)
    thread.start()
    second()
    assert pools() == before


def test_factors_and_inverses_are_large_operations_by_their_flops(monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch.linalg,
        "cholesky_ex",
        lambda A: seen.append(torch.get_num_threads()) or (A, torch.zeros(A.shape[:-2])),
    )
    monkeypatch.setattr(
        torch, "cholesky_inverse", lambda L: seen.append(torch.get_num_threads()) or L
    )
    with one_thread():
        for n in (60, 1500):
            jittered_cholesky(torch.empty(n, n))
            cho_inverse(torch.empty(n, n))
    assert seen == [1, 1, 3, 3]


@pytest.mark.parametrize(("n_jobs", "many_rows"), [(None, 20), (2, 20), (2, 21)])
def test_fits_and_predictions_take_the_threads_that_n_jobs_says(n_jobs, many_rows, monkeypatch):
    import skgp

    monkeypatch.setattr("skgp.estimators._fitting.MANY_ROWS", many_rows)
    expected = n_jobs if n_jobs and many_rows == 20 else 1
    X = np.random.default_rng(0).uniform(-2, 2, (20, 1))
    names = skgp.__all__ if n_jobs is None else ["QSGPRegressor", "StateSpaceGPClassifier"]
    for name in names:
        if name.startswith("Bayesian") or not name.endswith(("Regressor", "Classifier")):
            continue
        y = np.sin(2 * X[:, 0]) + 0.1 * X[:, 0]
        cls, seen = getattr(skgp, name), {}

        def watch(method, cls=cls, seen=seen):
            found = getattr(cls, method)

            def watched(self, *args, **kwargs):
                seen[method] = torch.get_num_threads(), set(pools().values())
                return found(self, *args, **kwargs)

            monkeypatch.setattr(cls, method, watched)

        for method in ("_resolve_backend", "_latent_mean", "_latent_mean_and_variance"):
            watch(method)
        kind = "Classifier" in name
        y = y > 0 if kind else y
        cls().fit(X, y)  # loads whatever there is to load
        model = cls(n_jobs=n_jobs).fit(X, y)
        seen.pop("_latent_mean", None), seen.pop("_latent_mean_and_variance", None)
        model.latent_mean_and_variance(X)
        model.predict(X)
        assert {"_resolve_backend", "_latent_mean_and_variance"} <= seen.keys(), name
        assert set(map(str, seen.values())) == {str((expected, {expected}))}, name
    assert torch.get_num_threads() == 3


def test_memory_budget_is_what_is_asked():
    assert runtime.memory_budget(3e9) == 3e9


def test_memory_budget_is_a_share_of_what_is_free():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 <= runtime.free_memory() <= total
    free = runtime.free_memory()
    assert 0.3 * free < runtime.memory_budget(None) < free


def test_memory_budget_does_not_move_with_some_megabytes(monkeypatch):
    free = [10.1e9, 10.12e9, 10.05e9]
    monkeypatch.setattr(runtime, "free_memory", lambda device: free.pop())
    assert len({runtime.memory_budget(None) for _ in range(3)}) == 1


@pytest.mark.parametrize("limit, expected", [("300000000", 2e8), ("max", None)])
def test_free_memory_keeps_to_the_control_group(tmp_path, monkeypatch, limit, expected):
    (tmp_path / "max").write_text(limit + "\n")
    (tmp_path / "current").write_text("100000000\n")
    paths = (str(tmp_path / "max"), str(tmp_path / "current"))
    monkeypatch.setattr(runtime, "_CONTROL_GROUPS", (paths, ("/none", "/none")))
    assert runtime._free_of_group(paths) == expected
    if expected:
        assert runtime.free_memory() == expected
    else:
        assert runtime.free_memory() == pytest.approx(runtime._free_of_machine(), rel=0.2)


def test_free_memory_of_a_system_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(runtime, "_CONTROL_GROUPS", ())
    monkeypatch.setattr(runtime, "_free_of_machine", lambda: None)
    assert runtime.free_memory() == 8e9


def test_free_memory_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5e9, 8e9))
    assert runtime.free_memory("cuda") == 5e9
