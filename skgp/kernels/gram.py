r"""The covariance reading of a kernel expression: K(X, Z) and its diagonal in torch.

Values and gradients with respect to ``theta`` agree with scikit-learn's
``kernel(X, eval_gradient=True)`` to 1e-13 of the kernel's variance in float64 (`gram`,
``method="direct"``). `gram_tile` is the fast reading for large blocks without gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel
from torch import Tensor

from skgp.linalg.threads import ENTRY, large_operation

from .covariance import covariance, variance
from .distances import METRICS
from .expression import (
    bind,
    check_kernel,
    register_kernel,
    split_noise,
    split_theta,
    stationary,
)
from .tiles import evaluate_tile

__all__ = [
    "check_kernel",
    "gram",
    "gram_diag",
    "gram_tile",
    "register_kernel",
    "split_noise",
    "split_theta",
    "stationary",
]


def gram(
    kernel: Kernel,
    X: Tensor,
    Z: Tensor | None = None,
    theta: Tensor | None = None,
    *,
    method: str = "direct",
) -> Tensor:
    """Covariance K(X, Z) of a kernel expression, differentiable in theta, X and Z.

    Parameters
    ----------
    kernel : Kernel
        A scikit-learn expression without WhiteKernel (see `split_noise`).
    X : Tensor of shape (..., n, d)
        Floating point; leading dimensions are a batch.
    Z : Tensor of shape (..., p, d), optional
        Its batch dimensions broadcast against those of X. None means the symmetric K(X, X).
    theta : Tensor of shape (kernel.n_dims,), optional
        Logarithms of the free hyper-parameters, in scikit-learn's order. None takes the kernel's
        own values.
    method : {"direct", "expand"}
        "direct" sums squared differences: exact zeros for equal rows and full relative accuracy,
        O(n p d) without a matrix product. "expand" uses ``x'x + z'z - 2 x'z``, faster for
        d > 50, with an absolute error of about ``eps x'x`` in the squared, scaled distance, which
        the square root inside a Matern kernel magnifies to ``sqrt(eps x'x)`` near 0.

    Returns
    -------
    Tensor of shape (..., n, p)
        Newly allocated, in the dtype of X.

    Raises
    ------
    TypeError
        If part of the kernel is not supported.
    ValueError
        If the kernel contains a WhiteKernel, or shapes, ``dims`` or ``method`` do not fit.

    Notes
    -----
    Cost O(n p d). Gradients at distance 0 are 0 and never NaN. Second derivatives are available
    except through a distance that is not squared (Matern with nu=0.5).

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> gram(4.0 * RBF(1.0), torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    tensor([[4.0000, 2.4261],
            [2.4261, 4.0000]], dtype=torch.float64)
    """
    if method not in METRICS:
        raise ValueError(f'method must be "direct" or "expand", got {method!r}.')
    _check_inputs(kernel, X, Z)
    node = bind(kernel, theta, dtype=X.dtype, device=X.device)
    K = covariance(node, X, Z, METRICS[method])
    shape = _gram_shape(X, Z)
    return K if K.shape == shape else K.expand(shape).contiguous()


def gram_diag(kernel: Kernel, X: Tensor, theta: Tensor | None = None) -> Tensor:
    """Diagonal of K(X, X), differentiable in theta and X.

    Parameters
    ----------
    kernel, X, theta
        As in `gram`.

    Returns
    -------
    Tensor of shape (..., n)

    Notes
    -----
    Cost O(n d), whatever the kernel.
    """
    _check_inputs(kernel, X, None)
    node = bind(kernel, theta, dtype=X.dtype, device=X.device)
    shape = X.shape[:-1]
    return variance(node, X).expand(shape).contiguous()


@torch.no_grad()
def gram_tile(
    kernel: Kernel,
    X: Tensor,
    Z: Tensor,
    theta: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Fast K(X, Z) of a large tile, without gradients.

    Distances come from one matrix product of pre-scaled inputs and the kernel is evaluated in
    place. A constant times RBFs is a single product, clamp and exponential: the norms and
    the logarithm of the constant ride along as two more columns.

    Parameters
    ----------
    kernel, theta
        As in `gram`.
    X : Tensor of shape (n, d)
    Z : Tensor of shape (p, d)
    out : Tensor of shape (n, p), optional
        Contiguous storage for the result. Reusing it saves the page faults of a fresh tile,
        which cost as much as the exponential.

    Returns
    -------
    Tensor of shape (n, p)
        ``out`` where given.

    Notes
    -----
    Accuracy: with S the largest squared norm of a centred, scaled input, the squared distance has
    an absolute error of about 2 eps S; so has the relative error of an RBF. In float32 and
    S = 100 that is 1e-5. A distance that is not squared (Matern nu=0.5) has errors of up to
    sqrt(2 eps S) between nearly equal rows; values never exceed the variance. Where this is too
    coarse, use float64 or `gram`.

    Cost O(n p d). Memory beyond the result: none for constants times RBFs, up to two tiles for
    other leaves and one for each further summand or factor.
    """
    _check_inputs(kernel, X, Z)
    node = bind(kernel, theta, dtype=X.dtype, device=X.device)
    shape = _gram_shape(X, Z)
    if out is not None and (out.shape != shape or out.dtype != X.dtype):
        raise ValueError(
            f"out must have shape {tuple(shape)} and dtype {X.dtype}, "
            f"got {tuple(out.shape)} and {out.dtype}."
        )
    out = X.new_empty(shape) if out is None else out
    with large_operation(ENTRY * out.numel()):
        return evaluate_tile(node, X, Z, out)


def _check_inputs(kernel: Kernel, X: Tensor, Z: Tensor | None) -> None:
    check_kernel(kernel)
    for name, tensor in (("X", X), ("Z", Z)):
        if tensor is not None and (tensor.ndim < 2 or not tensor.is_floating_point()):
            raise ValueError(
                f"{name} must be a floating tensor of shape (..., n, d), "
                f"got shape {tuple(tensor.shape)} and dtype {tensor.dtype}."
            )
    if Z is not None and (Z.shape[-1] != X.shape[-1] or Z.dtype != X.dtype):
        raise ValueError(
            f"Z must have the columns and the dtype of X, got {Z.shape[-1]} columns of {Z.dtype} "
            f"and X has {X.shape[-1]} of {X.dtype}."
        )


def _gram_shape(X: Tensor, Z: Tensor | None) -> torch.Size:
    if Z is None:
        return X.shape[:-1] + X.shape[-2:-1]
    # torch's own loads sympy, in half a second.
    batch = np.broadcast_shapes(X.shape[:-2], Z.shape[:-2])
    return torch.Size((*batch, X.shape[-2], Z.shape[-2]))
