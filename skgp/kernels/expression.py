"""Reading a scikit-learn kernel expression: its parts, its hyper-parameters, its noise.

A kernel expression is a tree of ``sklearn.gaussian_process.kernels`` objects: leaves such as
``RBF`` and the composites ``Sum``, ``Product``, ``Exponentiation`` and ``ActiveDims``. `bind` walks
it once, hands every leaf its slice of ``theta`` and returns a plain tree, which `gram`, `gradients`
and `spectra` evaluate, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    ExpSineSquared,
    Kernel,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
    WhiteKernel,
)
from torch import Tensor

from skgp.linalg.runtime import constant

from .hyperparameters import children_of, hyperparameters_of, n_dims_of, names_of
from .specs import SHO, ActiveDims, Cosine, LocalLinearTrend

BUILT_IN = (
    ConstantKernel,
    RBF,
    Matern,
    RationalQuadratic,
    ExpSineSquared,
    DotProduct,
    Cosine,
    SHO,
    LocalLinearTrend,
)
COMPOSITES = (Sum, Product, Exponentiation, ActiveDims)
MATERN_NU = (0.5, 1.5, 2.5, float("inf"))  # mathematical

GramFunction = Callable[[Kernel, "dict[str, Tensor]", Tensor, Tensor], Tensor]
_REGISTERED: dict[type, GramFunction] = {}


class Node(NamedTuple):
    """A part of the expression with the values of its own hyper-parameters.

    ``params`` maps each hyper-parameter of a leaf to a tensor of shape () or (n_elements,);
    composites have none and keep their parts in ``children``.
    """

    kernel: Kernel
    params: dict[str, Tensor]
    children: tuple[Node, ...]


def register_kernel(cls: type, function: GramFunction) -> None:
    """Teach skgp to evaluate, in torch, a user's own scikit-learn kernel class.

    Parameters
    ----------
    cls : type
        A subclass of ``sklearn.gaussian_process.kernels.Kernel`` (a leaf, not a composite). A
        class that skgp evaluates already cannot be replaced.
    function : callable
        ``function(kernel, params, X, Z)`` returns K(X, Z) of shape (..., n, p) for X (..., n, d)
        and Z (..., p, d). ``params`` maps the names of the hyper-parameters to tensors, on the
        natural scale; write it with torch operations so that gradients flow.

    Raises
    ------
    TypeError
        If ``cls`` is not a kernel class or ``function`` cannot be called.
    ValueError
        If ``cls`` is a class that skgp evaluates itself.

    Notes
    -----
    The registration is for exactly this class: a subclass may override ``__call__`` and is
    therefore registered on its own. It holds for the running process; register again in workers
    that do not share its memory.
    """
    if not (isinstance(cls, type) and issubclass(cls, Kernel)):
        raise TypeError(
            f"cls must be a subclass of sklearn.gaussian_process.kernels.Kernel, got {cls!r}; "
            "pass the class, not an instance."
        )
    if cls in BUILT_IN + COMPOSITES + (WhiteKernel,):
        raise ValueError(f"cls={cls.__name__} is known to skgp already; register a subclass of it.")
    if not callable(function):
        raise TypeError(f"function must be callable as f(kernel, params, X, Z), got {function!r}.")
    _REGISTERED[cls] = function


def registered_function(kernel: Kernel) -> GramFunction | None:
    """Return the user's covariance function of this leaf, None where there is none."""
    return _REGISTERED.get(type(kernel))


def built_in(kernel: Kernel) -> bool:
    """Whether every leaf of a checked expression is one that skgp evaluates itself."""
    parts = children_of(kernel)
    return all(map(built_in, parts)) if parts else registered_function(kernel) is None


def check_kernel(kernel: Any) -> None:
    """Raise unless skgp can evaluate every part of ``kernel``.

    Parameters
    ----------
    kernel : object
        Accepted: the kernels of ``BUILT_IN``, their sums, products, powers and ``ActiveDims``,
        ``WhiteKernel``, and classes given to `register_kernel`.

    Raises
    ------
    TypeError
        For any other part (``CompoundKernel``, ``PairwiseKernel``, an unknown subclass).
    ValueError
        For a Matern kernel whose ``nu`` has no closed form.
    """
    if type(kernel) in COMPOSITES:
        for child in children_of(kernel):
            check_kernel(child)
        return
    known = BUILT_IN + (WhiteKernel,) + tuple(_REGISTERED)
    if type(kernel) not in known:
        forms = {
            cls for cls in _REGISTERED if cls.__base__ in BUILT_IN
        }  # of kernels that are named
        names = ", ".join(cls.__name__ for cls in known + COMPOSITES if cls not in forms)
        raise TypeError(
            f"kernel contains {type(kernel).__name__}, which skgp cannot evaluate; supported are "
            f"{names}. Register the covariance function of your own class with "
            "skgp.kernels.register_kernel."
        )
    if type(kernel) is Matern and kernel.nu not in MATERN_NU:
        raise ValueError(
            f"kernel contains Matern(nu={kernel.nu}); nu must be 0.5, 1.5, 2.5 or inf, "
            "the values with a closed form."
        )


def stationary(kernel: Kernel) -> bool:
    """Whether k(x, x') depends on x - x' alone; a registered class says so by ``is_stationary``.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF, DotProduct
    >>> stationary(2.0 * RBF()), stationary(RBF() + DotProduct())
    (True, False)
    """
    check_kernel(kernel)
    return bool(kernel.is_stationary())


def bind(
    kernel: Kernel, theta: Tensor | None, *, dtype: torch.dtype, device: torch.device | None = None
) -> Node:
    """Pair every part of a checked expression with the values of its hyper-parameters.

    theta (kernel.n_dims,) holds their logarithms in scikit-learn's order, and gradients flow to it;
    None takes the kernel's own values.
    """
    if theta is None:
        return _bind_own(kernel, dtype, device)
    return Binder(kernel)(theta, dtype=dtype, device=device)


class Binder:
    """`bind` for many theta: the kernel, slow to ask for its hyper-parameters, is asked once."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.part, self._n_dims = _plan(kernel, 0)

    def __call__(
        self, theta: Tensor | None, *, dtype: torch.dtype, device: torch.device | None = None
    ) -> Node:
        """As `bind`; theta (b, kernel.n_dims) is a batch, whose covariances are (b, n, p)."""
        if theta is not None:
            if theta.ndim not in (1, 2) or theta.shape[-1] != self._n_dims:
                raise ValueError(
                    f"theta must have shape ({self._n_dims},), the free hyper-parameters of "
                    f"{self.kernel}, got {tuple(theta.shape)}."
                )
            theta = theta.to(dtype=dtype, device=device)
        return _bind(self.part, theta, dtype, device)


class Part(NamedTuple):
    """A part of the expression and where its hyper-parameters are: in theta, or fixed.

    ``params`` holds the name, the place in theta (None of a fixed one) and the value of each.
    """

    kernel: Kernel
    params: tuple[tuple[str, slice | None, Any], ...]
    children: tuple[Part, ...]


def _plan(kernel: Kernel, start: int) -> tuple[Part, int]:
    """Read one part whose slice of theta begins at ``start``; return it and the slice's end."""
    children = []
    for child in children_of(kernel):
        part, start = _plan(child, start)
        children.append(part)
    params: list[tuple[str, slice | None, Any]] = []
    for hyper in () if children else hyperparameters_of(kernel):
        place = None
        if not hyper.fixed:
            place = slice(start, start + hyper.n_elements)
            start += hyper.n_elements
        params.append((hyper.name, place, getattr(kernel, hyper.name)))
    return Part(kernel, tuple(params), tuple(children)), start


def _bind(part: Part, theta: Tensor | None, dtype, device) -> Node:
    """A node of the expression with parameters as tensors, batches of theta in front."""
    params: dict[str, Tensor] = {}
    for name, place, own in part.params:
        if place is None or theta is None:
            value = constant(own, dtype=dtype, device=device)
        else:
            value = theta[..., place].exp()
            if theta.ndim == 2:
                params[name] = value[:, None, :]  # against (b, n, d) and (b, n, p)
                continue
        # A fixed or isotropic length scale may be stored as an array of one element.
        params[name] = value.reshape(()) if value.numel() == 1 else value
    children = tuple(_bind(child, theta, dtype, device) for child in part.children)
    return Node(part.kernel, params, children)


def _bind_own(kernel: Kernel, dtype: torch.dtype, device: torch.device | None) -> Node:
    """A part with its own values: without its places in theta, in a tenth of the time."""
    children = tuple(_bind_own(child, dtype, device) for child in children_of(kernel))
    params: dict[str, Tensor] = {}
    for name in () if children else names_of(type(kernel)):  # type: ignore[arg-type]
        value = constant(getattr(kernel, name), dtype=dtype, device=device)
        params[name] = value.reshape(()) if value.numel() == 1 else value
    return Node(kernel, params, children)


def split_noise(kernel: Kernel) -> tuple[Kernel, WhiteKernel | None]:
    """Separate the white noise of an expression from its signal.

    Parameters
    ----------
    kernel : Kernel
        An expression whose ``WhiteKernel``, if any, is a summand at the top: ``a + White``,
        ``(a + White) + b`` and so on.

    Returns
    -------
    signal : Kernel
        The other summands, in their order.
    noise : WhiteKernel or None

    Raises
    ------
    ValueError
        For a WhiteKernel inside a product, a power or ActiveDims, for two of them, and for an
        expression that is nothing but noise.
    TypeError
        As `check_kernel`.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF, WhiteKernel
    >>> split_noise(RBF() + WhiteKernel(0.1) + RBF(2.0))
    (RBF(length_scale=1) + RBF(length_scale=2), WhiteKernel(noise_level=0.1))
    """
    check_kernel(kernel)
    parts = summands(kernel)
    noises = [part for part in parts if type(part) is WhiteKernel]
    signals = [part for part in parts if type(part) is not WhiteKernel]
    for part in signals:
        if _contains_white(part):
            raise ValueError(
                f"kernel has a WhiteKernel inside {part}; it must be a summand at the top: write "
                "signal + WhiteKernel(noise_level)."
            )
    if len(noises) > 1:
        raise ValueError(
            f"kernel={kernel} has {len(noises)} WhiteKernel summands, which the data cannot tell "
            "apart; keep one whose noise_level is their sum."
        )
    if not signals:
        raise ValueError(f"kernel={kernel} is noise alone; add a signal such as 1.0 * RBF().")
    return _without_white(kernel), (noises[0] if noises else None)


def split_theta(kernel: Kernel, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """Separate ``theta`` as `split_noise` separates the kernel.

    Parameters
    ----------
    kernel : Kernel
        The whole expression, noise included.
    theta : Tensor of shape (kernel.n_dims,)

    Returns
    -------
    theta_signal : Tensor of shape (signal.n_dims,)
    log_noise : Tensor of shape () or None
        Logarithm of the noise variance: an element of theta, a constant where the noise level is
        fixed, None where there is no WhiteKernel.
    """
    split_noise(kernel)
    if theta.ndim != 1 or theta.shape[0] != n_dims_of(kernel):
        raise ValueError(f"theta must have shape ({kernel.n_dims},), got {tuple(theta.shape)}.")
    kept, log_noise, start = [], None, 0
    for part in summands(kernel):
        piece = theta[start : start + n_dims_of(part)]
        start += len(piece)
        if type(part) is not WhiteKernel:
            kept.append(piece)
        elif len(piece):
            log_noise = piece[0]
        else:
            log_noise = theta.new_tensor(part.noise_level).log()
    return torch.cat(kept), log_noise


def theta_places(kernel: Kernel) -> tuple[list[int], int | None, float]:
    """Where ``theta`` holds what `split_theta` separates, for code that splits it many times.

    Places of the signal's theta, that of the log noise variance (None where fixed), and the noise
    level of the kernel.
    """
    white = split_noise(kernel)[1]
    if white is None:
        raise ValueError(f"kernel={kernel} has no noise; add + WhiteKernel(0.1) to it.")
    signal: list[int] = []
    noise, start = None, 0
    for part in summands(kernel):
        places = range(start, start + n_dims_of(part))
        start = places.stop
        if part is not white:
            signal += places
        elif places:
            noise = places.start
    return signal, noise, float(white.noise_level)


def factors(part: Any) -> list[Any]:
    """The factors of a product, bound (`Node`) or planned (`Part`), in their order."""
    if type(part.kernel) is Product:
        return factors(part.children[0]) + factors(part.children[1])
    return [part]


def summands(kernel: Kernel) -> list[Kernel]:
    """The terms of a sum, in their order."""
    if type(kernel) is Sum:
        return summands(kernel.k1) + summands(kernel.k2)
    return [kernel]


def summed(kernels: list) -> Any:
    """Their sum, as a balanced tree.

    scikit-learn asks each operand for its bounds twice, which takes 2^c steps of c terms added one
    after the other, and c^2 of a balanced tree.
    """
    while len(kernels) > 1:
        pairs = [Sum(*pair) for pair in zip(kernels[::2], kernels[1::2], strict=False)]
        kernels = pairs + kernels[len(kernels) - len(kernels) % 2 :]
    return kernels[0]


def _contains_white(kernel):
    return type(kernel) is WhiteKernel or any(map(_contains_white, children_of(kernel)))


def _without_white(kernel):
    """Drop WhiteKernel summands from the tree; None where nothing is left."""
    if type(kernel) is WhiteKernel:
        return None
    if type(kernel) is not Sum:
        return kernel
    k1, k2 = _without_white(kernel.k1), _without_white(kernel.k2)
    if k1 is kernel.k1 and k2 is kernel.k2:
        return kernel  # no noise below: keep the user's own object
    if k1 is None or k2 is None:
        return k2 if k1 is None else k1
    return Sum(k1, k2)
