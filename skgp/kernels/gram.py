r"""A kernel expression as a covariance in torch: K(X, Z), its diagonal, and large tiles of it.

Values and gradients with respect to ``theta`` agree with scikit-learn's
``kernel(X, eval_gradient=True)`` to 1e-13 of the kernel's variance in float64 (`gram`,
``method="direct"``). `gram_tile` is the fast way to large blocks without gradients.
"""

import math

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Exponentiation,
    Kernel,
    Matern,
    Product,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from skgp.linalg.defaults import ENTRY
from skgp.linalg.runtime import asks_for_gradients, large_operation

from .defaults import PIECE
from .distances import METRICS, Metric, correct_far_, exp_decay_, scaled_inputs
from .expression import Node, bind, check_kernel, factors, registered_function
from .leaves import LEAVES
from .specs import ActiveDims


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


def gram_tile(kernel: Kernel, X: Tensor, Z: Tensor, theta: Tensor | None = None) -> Tensor:
    """Fast K(X, Z) of a large tile, without gradients save where X itself asks for them.

    Where it does, this is `gram`. Else distances come from one matrix product of pre-scaled inputs
    and the kernel is evaluated in place. A constant times RBFs is a single product, clamp and
    exponential: the norms and the logarithm of the constant ride along as two more columns.

    Parameters
    ----------
    kernel, theta
        As in `gram`.
    X : Tensor of shape (n, d)
    Z : Tensor of shape (p, d)

    Returns
    -------
    Tensor of shape (n, p)

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
    if asks_for_gradients(X):
        return gram(kernel, X, Z, theta)
    _check_inputs(kernel, X, Z)
    out = X.new_empty(_gram_shape(X, Z))
    with torch.no_grad(), large_operation(ENTRY * out.numel()):
        return evaluate_tile(bind(kernel, theta, dtype=X.dtype, device=X.device), X, Z, out)


# Walks --------------------------------------------------------------------------------------------


def covariance(node: Node, X: Tensor, Z: Tensor | None, metric: Metric) -> Tensor:
    """Evaluate a part: a tensor that broadcasts to (..., n, p); constants stay scalars."""
    kernel, kind = node.kernel, type(node.kernel)
    if kind in (Sum, Product):
        a, b = (covariance(child, X, Z, metric) for child in node.children)
        return a + b if kind is Sum else a * b
    if kind is Exponentiation:
        return covariance(node.children[0], X, Z, metric) ** kernel.exponent
    if kind is ActiveDims:
        X, Z = kernel.select(X), None if Z is None else kernel.select(Z)
        return covariance(node.children[0], X, Z, metric)
    if kind is WhiteKernel:
        raise ValueError(
            f"kernel contains {kernel}, which is noise and has no place in a covariance of the "
            "signal; separate it first with skgp.kernels.split_noise."
        )
    function = registered_function(kernel)
    if function is not None:
        return function(kernel, node.params, X, X if Z is None else Z)
    return LEAVES[kind].covariance(kernel, node.params, X, Z, metric)


def variance(node: Node, X: Tensor) -> Tensor:
    """Evaluate the diagonal of a part: a tensor that broadcasts to (..., n)."""
    kernel, kind = node.kernel, type(node.kernel)
    if kind in (Sum, Product):
        a, b = (variance(child, X) for child in node.children)
        return a + b if kind is Sum else a * b
    if kind is Exponentiation:
        return variance(node.children[0], X) ** kernel.exponent
    if kind is ActiveDims:
        return variance(node.children[0], kernel.select(X))
    if registered_function(kernel) is None and kind is not WhiteKernel:
        return LEAVES[kind].variance(kernel, node.params, X)
    # Every row as a batch of one: the general covariance then yields (..., n, 1, 1).
    return covariance(node, X[..., None, :], None, METRICS["direct"])[..., 0, 0]


def evaluate_tile(node: Node, X: Tensor, Z: Tensor, out: Tensor) -> Tensor:
    """Write K(X, Z) to ``out`` (n, p), X (n, d) and Z (p, d); return it.

    Where X asks for gradients, a new tensor, differentiable, is returned instead.

    Expressions that need temporaries are evaluated by pieces of columns, each small enough for
    the cache. A product of constants and RBFs needs none and is evaluated at once.
    """
    if asks_for_gradients(X):
        return covariance(node, X, Z, METRICS["direct"]).expand(len(X), len(Z))
    plain = all(type(f.kernel) is ConstantKernel or _is_rbf(f) for f in factors(node))
    width = max(1, Z.shape[0] if plain or out.is_cuda else max(64, PIECE // max(1, X.shape[0])))
    for start in range(0, Z.shape[0], width):
        piece = out[:, start : start + width]
        K = _tile(node, X, Z[start : start + width], piece)
        if K is not piece:
            piece.copy_(K)
    return out


def largest_square(node: Node, X: Tensor) -> float:
    """Largest squared norm S of the rows of X (n, d) from an origin, over a kernel's length scales.

    A tile's squared distances, from the expanded square, err by about ``eps S``: short length
    scales, or rows far from the others, ask for more digits than float32 has.
    """
    if type(node.kernel) is ActiveDims:
        X = node.kernel.select(X)
    largest = max((largest_square(child, X) for child in node.children), default=0.0)
    scale = node.params.get("periodicity", node.params.get("length_scale"))
    if scale is not None:
        largest = max(largest, float(scaled_inputs(X, None, scale)[0].square().sum(1).max()))
    return largest


def _tile(node: Node, X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    """Evaluate a part in place. The result may be ``out``, is owned by the caller, or a scalar."""
    kind = type(node.kernel)
    if kind is Sum:
        parts = [_tile(node.children[0], X, Z, out), _tile(node.children[1], X, Z, None)]
        parts.sort(key=lambda part: part.ndim, reverse=True)  # a scalar cannot hold the sum
        return parts[0].add_(parts[1]) if parts[0].ndim else parts[0] + parts[1]
    if kind is ActiveDims:
        return _tile(node.children[0], node.kernel.select(X), node.kernel.select(Z), out)
    if kind is Product or _is_rbf(node):
        return _tile_product(factors(node), X, Z, out)
    leaf = LEAVES.get(kind)
    if leaf is not None:
        tile = leaf.tile(node.kernel, node.params, X, Z, out)
        if tile is not None:
            return tile
    K = covariance(node, X, Z, METRICS["expand"])
    # What a constant or a user's function returns is theirs and must not be written to.
    owned = kind is Exponentiation or (leaf is not None and leaf.owns_covariance)
    return K if owned else K.clone()


def _tile_product(parts: list[Node], X: Tensor, Z: Tensor, out: Tensor | None) -> Tensor:
    """Evaluate a product, with its constants inside the exponent of its RBFs where it has any."""
    constants = [f for f in parts if type(f.kernel) is ConstantKernel]
    gaussians = [f for f in parts if _is_rbf(f)]
    others = [f for f in parts if type(f.kernel) is not ConstantKernel and not _is_rbf(f)]
    scale = torch.ones((), dtype=X.dtype, device=X.device)
    for constant in constants:
        scale = scale * constant.params["constant_value"]
    if gaussians:
        # A product of RBFs is one RBF whose inverse squared length scales are their sum.
        precision = gaussians[0].params["length_scale"] ** -2
        for gaussian in gaussians[1:]:
            precision = precision + gaussian.params["length_scale"] ** -2
        K = _tile_gaussian(precision.rsqrt(), scale.log(), X, Z, out)
    elif others:
        K = _tile(others.pop(0), X, Z, out).mul_(scale)
    else:
        K = scale
    for factor in others:
        K = K.mul_(_tile(factor, X, Z, None)) if K.ndim else _tile(factor, X, Z, None).mul_(K)
    return K


def _tile_gaussian(length_scale, log_scale, X, Z, out) -> Tensor:
    """exp(log_scale - |x - z|^2 / (2 l^2)) by one product, a clamp and an exponential."""
    A, B, _ = scaled_inputs(X, Z, length_scale)
    # (a, -|a|^2/2, 1) . (b, 1, c - |b|^2/2) is the exponent, c = log_scale.
    a2, b2 = A.square().sum(1, keepdim=True), B.square().sum(1, keepdim=True)
    left = torch.cat([A, a2 / -2, torch.ones_like(a2)], 1)
    right = torch.cat([B, torch.ones_like(b2), log_scale - b2 / 2], 1)
    K = torch.matmul(left, right.T, out=out)
    top = log_scale.item()
    correct_far_(K, A, B, a2, b2, lambda squares: top - squares / 2)
    return exp_decay_(K.clamp_max_(top), top)


def _is_rbf(node: Node) -> bool:
    """Whether a kernel is RBF, by that name or as the limit of Matern."""
    kernel = node.kernel
    return type(kernel) is RBF or (type(kernel) is Matern and kernel.nu == math.inf)


def _check_inputs(kernel: Kernel, X: Tensor, Z: Tensor | None) -> None:
    """Refuse what is no floating tensor of rows, or two sets that do not fit."""
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
