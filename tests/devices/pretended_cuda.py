"""A CUDA device for machines without one, over the memory of the CPU.

Within ``with PretendedCuda() as cuda:`` tensors made on or moved to "cuda" are of a subclass that
says ``device == cuda:0`` and computes on the CPU, so that results equal those of the CPU to the
last bit. As CUDA does, they refuse to meet tensors of the CPU (but those of no dimension), to
become NumPy arrays, and to be drawn by a generator of the CPU; a generator of the device draws the
numbers that one of the CPU with its seed draws. ``cuda.counts`` tells what would cost time on a
device: operations, transfers either way, and synchronisations, at which the CPU waits for a value.

Everything happens above autograd: gradients are those of the tensors beneath, and what ``backward``
of an ``autograd.Function`` does is neither checked nor counted. The mode holds in the thread that
enters it. Sparse tensors are told by an attribute.
"""

import functools
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")

#: Operations whose tensors may lie on different devices.
_MIXING = {
    *("__getitem__", "__setitem__", "__set__", "copy_", "index_put_", "index_put"),
    *("to", "type_as", "backward", "grad", "result_type", "promote_types", "new_tensor"),
}
#: Operations in which even a tensor of no dimension must lie on the device.
_STRICT = {"stack", "cat", "concat", "hstack", "vstack", "column_stack", "block_diag", "lerp"}
#: Values become known to Python, or shapes depend on values, or LAPACK reports a failure.
_SYNCHRONISING = {
    *("item", "__bool__", "__float__", "__int__", "__index__", "__contains__", "__repr__"),
    *("__format__", "tolist", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique"),
    *("_unique2", "unique_consecutive", "masked_select", "bincount", "repeat_interleave"),
    *("cholesky", "inv", "solve", "eigh", "eigvalsh", "svd", "lstsq", "eig", "eigvals"),
    *("cholesky_inverse", "multinomial", "numpy", "cpu"),
}
#: What is no tensor and holds none.
_PLAIN = {int, float, bool, type(None), slice, torch.dtype, torch.layout}
#: Constructors that copy what Python or NumPy holds.
_COPYING = {"tensor", "as_tensor", "asarray", "new_tensor"}
#: What is more than an operation on tensors of one device.
_SPECIAL = {*_MIXING, *_SYNCHRONISING, *_COPYING, "is_cuda", "__array__"}


class CudaTensor(Tensor):
    """A tensor that says it lies on CUDA."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _call(function, args, kwargs or {})

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.detach().clone())


class _Generator(torch.Generator):
    """A generator of either device, with the numbers of the CPU."""

    def __new__(cls, device: Any = "cpu"):
        generator = super().__new__(cls)
        generator.lies_on = CUDA if _is_cuda(device) else CPU
        return generator

    def __init__(self, device: Any = "cpu") -> None:
        """The seed is set later."""

    @property
    def device(self):
        return self.lies_on


class PretendedCuda(TorchFunctionMode):
    """The context; `free` bytes of `total` are what the device says of its memory.

    Attributes
    ----------
    counts : Counter
        "operations", "to_device", "to_host" and "synchronisations" so far.
    """

    current: "PretendedCuda | None" = None

    def __init__(self, *, free: float = 8e9, total: float = 16e9) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._patches = [
            mock.patch.object(torch, "Generator", _Generator),
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: 1),
            mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
            mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: (free, total)),
        ]

    def __enter__(self):
        for patch in self._patches:
            patch.start()
        PretendedCuda.current = self
        return super().__enter__()

    def __exit__(self, *error):
        PretendedCuda.current = None
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _call(function, args, kwargs or {})


def _call(function, args, kwargs):
    """Run a function of torch on the memory beneath, as if it ran where its tensors lie."""
    with torch._C.DisableTorchFunction():
        if function is torch.device:
            return function(*args, **kwargs)
        name = _name(function)
        if name == "__get__":
            return _attribute(function, args)
        on_device, on_host, others = found = [], [], []
        _sort([*args, *kwargs.values()] if kwargs else args, *found)
        plain = not others and name not in _SPECIAL and "generator" not in kwargs
        if plain and not on_device:
            return function(*args, **kwargs)
        counts = Counter() if PretendedCuda.current is None else PretendedCuda.current.counts
        asked = None if plain else _asked_device(name, args, others)
        if on_host or not plain:
            _check(name, args, kwargs, on_device, on_host, asked)
        if not plain:
            _count(counts, name, args, on_device, on_host, asked)
        if others and any(_beneath(leaf) is not leaf for leaf in others):
            args, kwargs = tree_map(_beneath, args), tree_map(_beneath, kwargs)
        if name == "cpu" or (name in ("to", "type_as") and asked == CPU and on_device):
            return function(*args, **kwargs).as_subclass(Tensor).clone()
        if name == "is_cuda":
            return bool(on_device)
        out = function(*args, **kwargs)
        if out is NotImplemented or name == "backward" or not (on_device or asked == CUDA):
            return out
        if asked == CPU or (name == "__getitem__" and not _lies_on_device(args[0])):
            return out
        if name == "copy_" and not _lies_on_device(args[0]):
            return args[0]
        counts["operations"] += 1
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place and isinstance(args[0], CudaTensor) and isinstance(out, Tensor):
            return args[0]
        if name in ("to", *_COPYING) and not on_device:
            out = out.clone()  # the device has memory of its own
        return _as_cuda(out)


@functools.cache
def _name(function) -> str:
    return getattr(function, "__name__", str(function)).removeprefix("linalg_")


def _sort(values, on_device, on_host, others) -> None:
    """Tensors by where they lie, and strings and devices; of lists and dictionaries what is in."""
    for value in values:
        kind = type(value)
        if kind is CudaTensor:
            on_device.append(value)
        elif kind in _PLAIN:
            continue
        elif isinstance(value, Tensor):
            (on_device if _lies_on_device(value) else on_host).append(value)
        elif isinstance(value, (str, torch.device)):
            others.append(value)
        elif isinstance(value, (list, tuple, dict)):
            _sort(value.values() if kind is dict else value, on_device, on_host, others)


def _leaves(values) -> list:
    """What lists, tuples and dictionaries in a sequence hold, however nested."""
    found = []
    for value in values:
        if isinstance(value, dict):
            found += _leaves(value.values())
        elif isinstance(value, (list, tuple)):
            found += _leaves(value)
        else:
            found.append(value)
    return found


def _attribute(function, args):
    """A property of a tensor."""
    name, x = getattr(getattr(function, "__self__", None), "__name__", ""), args[0]
    if not _lies_on_device(x):
        return function(*args)
    if name == "device":
        return CUDA
    if name in ("is_cuda", "is_cpu"):
        return name == "is_cuda"
    return _as_cuda(function(x, *args[1:]))


def _check(name, args, kwargs, on_device, on_host, asked) -> None:
    """Raise what CUDA would."""
    if on_device and name in ("numpy", "__array__"):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
    strangers = [x for x in on_host if x.dim() > 0 or name in _STRICT]
    if on_device and strangers and name not in _MIXING:
        shapes = [tuple(x.shape) for x in strangers]
        raise RuntimeError(f"Expected all tensors on one device: {name} has {shapes} on the CPU")
    if name == "__getitem__" and on_device and not _lies_on_device(args[0]):
        raise RuntimeError("indices should be on the CPU, as the indexed tensor is")
    if name in ("__setitem__", "index_put_") and on_device and not _lies_on_device(args[0]):
        if any(_lies_on_device(x) for x in _leaves(args[1:2])):
            raise RuntimeError("indices should be on the CPU, as the indexed tensor is")
    generator = kwargs.get("generator")
    if generator is not None:
        expected = asked or (CUDA if on_device else CPU)
        if generator.device != expected:
            raise RuntimeError(
                f"Expected a generator of {expected}, found {generator.device} ({name})"
            )


def _count(counts, name, args, on_device, on_host, asked) -> None:
    """Count transfers and synchronisations."""
    if name == "cpu" or (name in ("to", "type_as") and asked == CPU):
        counts["to_host"] += len(on_device)
        return
    masked = name == "__getitem__" and any(
        x.dtype == torch.bool for x in _leaves(args[1:]) if isinstance(x, Tensor)
    )
    if on_device and (name in _SYNCHRONISING or masked):
        counts["synchronisations"] += 1
    moves = name in ("to", "type_as", *_COPYING) and asked == CUDA and not on_device
    moves = moves or (name == "new_tensor" and bool(on_device))
    writes = name in ("copy_", "__getitem__", "__setitem__", "index_put_") and on_device
    if moves or (writes and _lies_on_device(args[0]) and any(x.dim() > 0 for x in on_host)):
        counts["to_device"] += 1
    if writes and not _lies_on_device(args[0]):
        counts["to_host"] += 1


def _asked_device(name, args, named) -> torch.device | None:
    """The device that a call names, by itself (among `named`) or by another tensor."""
    if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], Tensor):
        return CUDA if _lies_on_device(args[1]) else CPU
    for leaf in named:
        if isinstance(leaf, torch.device):
            return CUDA if leaf.type == "cuda" else CPU
        if leaf.split(":")[0] in ("cuda", "cpu"):
            return CUDA if _is_cuda(leaf) else CPU
    if name in _COPYING and name != "new_tensor" and isinstance(args[0], CudaTensor):
        return CUDA
    return None


def _lies_on_device(x: Any) -> bool:
    if type(x) is Tensor and x.layout is torch.strided:
        return False
    return isinstance(x, CudaTensor) or getattr(x, "_lies_on_device", False) is True


def _as_cuda(x: Any) -> Any:
    """What an operation returns: a tensor, tensors in a tuple, or something else."""
    if not isinstance(x, Tensor):
        return type(x)(map(_as_cuda, x)) if isinstance(x, (tuple, list)) else x
    if _lies_on_device(x):
        return x
    if x.layout != torch.strided:
        x._lies_on_device = True
        return x
    if x.is_leaf:  # as a view it would be none
        return Tensor._make_subclass(CudaTensor, x, x.requires_grad)
    return x.as_subclass(CudaTensor)


def _beneath(x: Any) -> Any:
    """Devices and generators as the CPU takes them."""
    if isinstance(x, torch.device) and x.type == "cuda":
        return CPU
    return "cpu" if isinstance(x, str) and x.split(":")[0] == "cuda" else x


def _is_cuda(device: Any) -> bool:
    return torch.device(device).type == "cuda"
