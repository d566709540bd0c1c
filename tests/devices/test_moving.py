"""Fitted states move between devices as tensors do."""

import pickle
from dataclasses import dataclass

import torch

from skgp.linalg.runtime import TensorState
from tests.devices.pretended_cuda import CUDA, PretendedCuda


@dataclass(frozen=True)
class _State(TensorState):
    x: torch.Tensor
    inner: object = None


def test_a_state_moves_each_tensor_once_and_not_by_way_of_the_host():
    with PretendedCuda() as cuda:
        here = _State(torch.ones(3, dtype=torch.float64), _State(torch.zeros(2)))
        there = here.to("cuda")
        assert there.x.device == there.inner.x.device == CUDA
        assert cuda.counts["to_device"] == 2
        single = there.to(torch.float32)
        assert single.x.device == CUDA
        assert single.x.dtype == torch.float32
        assert cuda.counts["to_host"] == 0


def test_a_state_of_a_device_is_pickled_as_arrays():
    with PretendedCuda():
        text = pickle.dumps(_State(torch.ones(3, device="cuda")))
    assert pickle.loads(text).x.tolist() == [1.0, 1.0, 1.0]
