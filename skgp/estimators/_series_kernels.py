"""The kernels of time series and of additive models: defaults, and which column each part sees."""

import numpy as np
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    Kernel,
    KernelOperator,
    Matern,
)

from skgp.estimators.defaults import (
    SERIES_SCALE,
    SERIES_SCALE_BOUNDS,
    SERIES_VARIANCE_BOUNDS,
    SIX_STATES_ROWS,
    TWO_SCALES,
)
from skgp.kernels import ActiveDims
from skgp.kernels.expression import summands
from skgp.kernels.scales import robust_range


def default_series_kernels(x: np.ndarray, variance: float = 1.0) -> list[Kernel]:
    """Return the kernels, without noise, among which the evidence of a series chooses.

    Parameters
    ----------
    x : ndarray of shape (n,)
        Times.
    variance : float, default=1.0
        To start with.

    Returns
    -------
    list of Kernel
        ``constant * Matern`` of nu 3/2, 5/2 and 1/2, and a sum of two of nu 3/2, of a long and a
        short length scale; up to 10000 rows also ``constant * RBF`` and such a sum of nu 5/2, whose
        states are six.
    """
    unit = _range(x)

    def single(nu: float, scale: float = 1.0, share: float = 1.0) -> Kernel:
        return _matern(nu, scale * SERIES_SCALE * unit, unit, share * variance)

    def double(nu: float) -> Kernel:
        return single(nu, TWO_SCALES, 0.5) + single(nu, 1.0, 0.5)

    kernels = [single(1.5), single(2.5), single(0.5), double(1.5)]
    if len(x) <= SIX_STATES_ROWS:
        kernels += [single(np.inf), double(2.5)]
    return kernels


def default_component_kernel(x: np.ndarray, n_columns: int, variance: float = 1.0) -> Kernel:
    """Return the kernel that one column of an additive model starts with.

    Parameters
    ----------
    x : ndarray of shape (n,)
        The column.
    n_columns : int
        Of all, which share the variance.
    variance : float, default=1.0
        Of the sum of all components, to start with.
    """
    unit = _range(x)
    return _matern(1.5, unit / 4, unit, variance / n_columns)


def column_kernels(kernel: Kernel, n_columns: int) -> list[Kernel | None]:
    """Split the kernel of an additive model into one a column.

    Parameters
    ----------
    kernel : Kernel
        Without noise. Either of one column, which every column then gets a copy of, or a sum whose
        parts see one column each by `skgp.kernels.ActiveDims`.
    n_columns : int

    Returns
    -------
    list of Kernel or None
        None for a column that no part sees.

    Raises
    ------
    ValueError
        If some parts name columns and others do not, or a part sees several of them.
    """
    parts = summands(kernel)
    columns = [_columns(part) for part in parts]
    if not any(columns):
        return [ActiveDims(kernel, [column]) for column in range(n_columns)]
    kernels: list[Kernel | None] = [None] * n_columns
    for part, seen in zip(parts, columns, strict=True):
        if len(seen) != 1 or max(seen) >= n_columns:
            which = f"sees the columns {sorted(seen)}" if seen else "names no column"
            raise ValueError(
                f"kernel={kernel}: its part {part} {which}, but each part of an additive model "
                f"sees one of the {n_columns} columns of X. Write a sum of "
                "skgp.kernels.ActiveDims(kernel, [column]), or give one kernel without "
                "ActiveDims, of which every column gets a copy."
            )
        (column,) = seen
        known = kernels[column]
        kernels[column] = part if known is None else known + part
    return kernels


def _matern(nu: float, length_scale: float, unit: float, variance: float) -> Kernel:
    """``constant * Matern``, of infinite nu the RBF."""
    bounds = SERIES_SCALE_BOUNDS[0] * unit, SERIES_SCALE_BOUNDS[1] * unit
    shape = RBF(length_scale, bounds) if nu == np.inf else Matern(length_scale, bounds, nu=nu)
    return ConstantKernel(variance, SERIES_VARIANCE_BOUNDS) * shape


def _range(x: np.ndarray) -> float:
    """Range of some times, but for a few far from the others; 1 where all are equal."""
    return robust_range(x) or 1.0


def _columns(kernel: Kernel) -> set[int]:
    """The columns that the parts of an expression name."""
    if isinstance(kernel, ActiveDims):
        return set(kernel.columns().tolist())
    if isinstance(kernel, KernelOperator):
        return _columns(kernel.k1) | _columns(kernel.k2)
    inner = getattr(kernel, "kernel", None)  # of Exponentiation
    return _columns(inner) if isinstance(inner, Kernel) else set()
