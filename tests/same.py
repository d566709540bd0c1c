"""Equality of what one computation yields in two ways: with a copy, in parts, once more."""

import numpy as np
import torch

__all__ = ["assert_same"]


def assert_same(found, expected) -> None:
    r"""Assert that two arrays are equal but for rounding.

    Instruction sets, builds of BLAS, numbers of threads and even the alignment of memory change the
    last digits of a sum: they agree to :math:`\sqrt\epsilon` of the largest element, half of the
    digits of the coarser dtype, which leaves a condition number of :math:`1 / \sqrt\epsilon` to
    what lies between. What is not of floating point must be equal.

    Parameters
    ----------
    found, expected : array-like or Tensor of one shape
    """
    found, expected = _array(found), _array(expected)
    if {found.dtype.kind, expected.dtype.kind} != {"f"}:
        np.testing.assert_array_equal(found, expected)
        return
    eps = max(np.finfo(array.dtype).eps for array in (found, expected))
    finite = np.abs(expected[np.isfinite(expected)])
    scale = finite.max(initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=eps**0.5, atol=scale * eps**0.5, strict=True)


def _array(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)
