"""The memory that fits may take: of the machine, of a container, as asked."""

import os

import pytest
import torch

from skgp.linalg import memory


def test_memory_budget_is_what_is_asked():
    assert memory.memory_budget(3e9) == 3e9


def test_memory_budget_is_a_share_of_what_is_free():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 <= memory.free_memory() <= total
    free = memory.free_memory()
    assert 0.3 * free < memory.memory_budget(None) < free


def test_memory_budget_does_not_move_with_some_megabytes(monkeypatch):
    free = [10.1e9, 10.12e9, 10.05e9]
    monkeypatch.setattr(memory, "free_memory", lambda device: free.pop())
    assert len({memory.memory_budget(None) for _ in range(3)}) == 1


@pytest.mark.parametrize("limit, expected", [("300000000", 2e8), ("max", None)])
def test_free_memory_keeps_to_the_control_group(tmp_path, monkeypatch, limit, expected):
    (tmp_path / "max").write_text(limit + "\n")
    (tmp_path / "current").write_text("100000000\n")
    paths = (str(tmp_path / "max"), str(tmp_path / "current"))
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", (paths, ("/none", "/none")))
    assert memory._free_of_group(paths) == expected
    if expected:
        assert memory.free_memory() == expected
    else:
        assert memory.free_memory() == pytest.approx(memory._free_of_machine(), rel=0.2)


def test_free_memory_of_a_system_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(memory, "_CONTROL_GROUPS", ())
    monkeypatch.setattr(memory, "_free_of_machine", lambda: None)
    assert memory.free_memory() == 8e9


def test_free_memory_of_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5e9, 8e9))
    assert memory.free_memory("cuda") == 5e9
