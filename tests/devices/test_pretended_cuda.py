"""The pretended device refuses what CUDA refuses, and counts what would cost time there."""

import numpy as np
import pytest
import torch

from tests.devices.pretended_cuda import CUDA, PretendedCuda


@pytest.fixture
def cuda():
    with PretendedCuda() as mode:
        yield mode


def test_tensors_lie_where_they_were_made_or_moved(cuda):
    x = torch.ones(3, device="cuda")
    assert x.device == CUDA
    assert x.is_cuda
    assert x.reshape(1, 3).T.device == CUDA
    assert x.new_zeros(2).device == CUDA
    assert torch.zeros_like(x).device == CUDA
    assert torch.ones(3).device.type == "cpu"
    assert torch.ones(3).to(x).device == CUDA
    assert x.cpu().device.type == "cpu"
    assert x.to("cpu").numpy().tolist() == [1.0, 1.0, 1.0]
    assert torch.linalg.cholesky(torch.eye(2, device="cuda")).device == CUDA


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x, y: x + y,
        lambda x, y: y @ x,
        lambda x, y: torch.stack([x[0], y[0]]),
        lambda x, y: y[torch.zeros(1, dtype=torch.int64, device="cuda")],
        lambda x, y: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda x, y: torch.randn(3, generator=torch.Generator("cuda")),
        lambda x, y: y.add_(x),
    ],
)
def test_devices_do_not_mix(cuda, mistake):
    with pytest.raises(RuntimeError):
        mistake(torch.ones(3, device="cuda"), torch.ones(3))


def test_no_array_of_the_device(cuda):
    x = torch.ones(3, device="cuda")
    for convert in (np.asarray, lambda x: x.numpy(), np.exp):
        with pytest.raises(TypeError, match="numpy"):
            convert(x)


def test_the_device_has_memory_of_its_own(cuda):
    x = torch.ones(3)
    x.to("cuda").zero_()
    torch.as_tensor(x.numpy(), device="cuda").zero_()
    assert x.sum() == 3


def test_gradients_lie_with_their_tensors(cuda):
    x = torch.ones(3, device="cuda", requires_grad=True)
    (x**2).sum().backward()
    assert x.grad.device == CUDA
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    assert torch.autograd.grad((x**3).sum(), x)[0].device == CUDA


def test_generators_draw_the_numbers_of_the_cpu(cuda):
    there = torch.randn(4, device="cuda", generator=torch.Generator(device="cuda:0").manual_seed(1))
    here = torch.randn(4, generator=torch.Generator().manual_seed(1))
    assert there.tolist() == here.tolist()


def test_transfers_and_synchronisations_are_counted(cuda):
    x = torch.ones(3).to("cuda")
    x[0] = 2.0
    x[torch.tensor([0, 1])]  # an index of the CPU goes to the device
    assert cuda.counts["to_device"] == 2
    assert cuda.counts["synchronisations"] == cuda.counts["to_host"] == 0
    float(x.sum())
    x[x > 1.0]
    torch.linalg.cholesky(torch.eye(2, device="cuda"))
    assert cuda.counts["synchronisations"] == 3
    x.cpu()
    assert cuda.counts["to_host"] == 1


def test_nothing_stays_patched():
    found = torch.Generator, torch.cuda.is_available()
    with PretendedCuda(free=5.0):
        assert torch.cuda.mem_get_info()[0] == 5.0
    assert found == (torch.Generator, torch.cuda.is_available())
