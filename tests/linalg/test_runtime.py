"""One thread for small operations, several for large ones; the memory that fits may take."""

import os
import threading

import joblib
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

from skgp.estimators._base import BaseGP
from skgp.linalg import cholesky, runtime
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky
from skgp.linalg.runtime import (
    MemoryBudgetError,
    WithinBudget,
    large_operation,
    memory_budget,
    memory_limit,
    one_thread,
    require_memory,
    tile_rows,
)


@pytest.fixture(autouse=True)
def three_threads():
    """Torch and the pools of BLAS and OpenMP with three threads each."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def blas():
    """What is known of the pools of BLAS."""
    return [each for each in threadpool_info() if each["user_api"] == "blas"]


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
            assert {each["num_threads"] for each in blas()} == {3}
        assert torch.get_num_threads() == 1 and set(pools().values()) == {1}
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
            with large_operation(1e12):
                assert torch.get_num_threads() == 3
            assert set(pools().values()) == {1}

    thread = threading.Thread(target=first)
    thread.start()
    second()
    assert pools() == before


def test_factors_and_inverses_are_large_operations_by_their_flops(monkeypatch):
    seen = []

    def recorded(name, found):
        def call(A):
            threads = {each["num_threads"] for each in blas()} | {torch.get_num_threads()}
            seen.append((len(A), name, threads))
            return found(A)

        return call

    for owner, name, found in (
        (torch.linalg, "cholesky_ex", lambda A: (A, torch.zeros(()))),
        (torch, "cholesky_inverse", lambda L: L),
        (cholesky, "dpotrf", lambda A: (A, 0)),
        (cholesky, "dpotri", lambda L: (L, 0)),
    ):
        monkeypatch.setattr(owner, name, recorded(name, found))
    with one_thread():
        for n in (60, 1500):
            jittered_cholesky(torch.eye(n, dtype=torch.float64))
            cho_inverse(torch.eye(n, dtype=torch.float64))
    assert seen == [
        (60, "cholesky_ex", {1}),
        (60, "cholesky_inverse", {1}),
        (1500, "dpotrf", {3}),
        (1500, "dpotri", {3}),
    ]


@pytest.mark.parametrize(("n_jobs", "many_rows"), [(None, 20), (2, 20), (2, 21)])
def test_fits_and_predictions_take_the_threads_that_n_jobs_says(n_jobs, many_rows, monkeypatch):
    import skgp

    monkeypatch.setattr("skgp.estimators._fitting.MANY_ROWS", many_rows)
    expected = n_jobs if n_jobs and many_rows == 20 else 1
    X = np.random.default_rng(0).uniform(-2, 2, (20, 1))
    for name in ("QSGPRegressor", "StateSpaceGPClassifier"):
        y = np.sin(2 * X[:, 0]) + 0.1 * X[:, 0]
        cls, seen = getattr(skgp, name), {}

        def watch(method, cls=cls, seen=seen):
            found = getattr(cls, method)

            def watched(self, *args, **kwargs):
                seen[method] = torch.get_num_threads(), set(pools().values())
                return found(self, *args, **kwargs)

            monkeypatch.setattr(cls, method, watched)

        for method in ("_resolve_backend", "_means", "_moments"):
            watch(method)
        kind = "Classifier" in name
        y = y > 0 if kind else y
        cls(optimizer=None).fit(X, y)  # loads whatever there is to load
        model = cls(optimizer=None, n_jobs=n_jobs).fit(X, y)
        seen.pop("_means", None), seen.pop("_moments", None)
        model.latent_mean_and_variance(X)
        model.predict(X)
        assert {"_resolve_backend", "_moments"} <= seen.keys(), name
        assert set(map(str, seen.values())) == {str((expected, {expected}))}, name
    assert torch.get_num_threads() == 3


def test_memory_budget_is_what_the_outermost_limit_asks():
    with memory_limit(3e9):
        assert memory_budget() == memory_budget("cuda") == 3e9
        with memory_limit(4e9), memory_limit(None):
            assert memory_budget() == 3e9
    with pytest.raises(KeyError), memory_limit(0.0):
        assert memory_budget() == 0.0
        raise KeyError
    assert memory_budget() > 2.0**19


def test_memory_budget_is_a_share_of_what_is_free():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 <= runtime.free_memory() <= total
    free = runtime.free_memory()
    assert 0.3 * free < memory_budget() < free


def test_memory_budget_does_not_move_with_some_megabytes(monkeypatch):
    free = [10.1e9, 10.12e9, 10.05e9]
    monkeypatch.setattr(runtime, "free_memory", lambda device: free.pop())
    assert len({memory_budget() for _ in range(3)}) == 1


def test_a_limit_keeps_the_budget_that_it_found(monkeypatch):
    free = [10e9, 1e9]
    monkeypatch.setattr(runtime, "free_memory", lambda device: free.pop(0))
    with memory_limit(None, "cuda"):
        assert 5e9 < memory_budget() == memory_budget() < 7e9
    assert free == [1e9]


def test_a_tile_is_the_least_of_its_cap_and_a_share_of_the_budget():
    assert tile_rows(8 * 100, 8000.0) == 10
    assert tile_rows(8 * 100, 1.0) == tile_rows(1e12) == 1
    with memory_limit(1e12):
        assert tile_rows(8 * 100, 8000.0) == 10
    with memory_limit(8 * 1600.0):
        assert tile_rows(8 * 100, 8000.0) == 2
        assert tile_rows(0, 8000.0) == 1600
    with memory_limit(0.0):
        assert tile_rows(8 * 100, 8000.0) == 1


def test_what_does_not_fit_is_refused_with_sizes_and_remedy():
    with memory_limit(2e9):
        require_memory(2e9, "K", "Buy more")
        with pytest.raises(MemoryBudgetError) as caught:
            require_memory(8e9, "The matrix of 10 rows", "Take fewer rows")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, MemoryError)
    assert str(caught.value) == (
        "The matrix of 10 rows takes 8 GB, and the budget is 2 GB. Take fewer rows, or raise "
        "memory_budget (None: 70% of what is free)."
    )


@pytest.mark.parametrize("backend", ["sequential", "threading", "loky"])
def test_workers_of_joblib_share_the_budget(backend):
    with memory_limit(6e9), joblib.parallel_config(backend, n_jobs=2):
        share = 1 if backend == "sequential" else 2
        ask = joblib.delayed(WithinBudget(memory_budget))
        assert joblib.Parallel()(ask() for _ in range(3)) == [6e9 / share] * 3
    assert memory_budget() == WithinBudget(memory_budget)()


def test_fits_and_predictions_take_the_memory_that_memory_budget_says(monkeypatch):
    import skgp

    X = np.random.default_rng(0).uniform(-2, 2, (20, 1))
    y, seen = np.sin(2 * X[:, 0]), {}
    fitted = {name: getattr(skgp, name) for name in skgp.__all__ if name[0].isupper()}
    for name, cls in fitted.items():
        if not issubclass(cls, BaseGP):
            continue
        for method in ("_resolve_backend", "_means", "_moments"):
            found = getattr(cls, method)

            def watched(self, *args, found=found, key=(name, method)):
                seen[key] = memory_budget()
                return found(self, *args)

            monkeypatch.setattr(cls, method, watched)
        model = cls(memory_budget=12345678.0, optimizer=None)
        model.fit(X, y > 0 if "Classifier" in name else y)
        model.latent_mean_and_variance(X)
        assert {(name, "_resolve_backend"), (name, "_moments")} <= seen.keys()
    assert set(seen.values()) == {12345678.0}


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5e9, 8e9))
    assert runtime.free_memory("cuda") == 5e9


def test_arrays_that_workers_map_are_restored_without_a_warning(recwarn):
    array = np.arange(3.0)
    array.flags.writeable = False
    torch.set_warn_always(True)
    try:
        restored = runtime._restored(runtime.TensorArray(array))
    finally:
        torch.set_warn_always(False)
    assert restored.tolist() == [0.0, 1.0, 2.0] and not recwarn.list
