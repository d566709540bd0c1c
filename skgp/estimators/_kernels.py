"""The kernels that an estimator chooses among when ``kernel=None``, and the parts of one given."""

from functools import reduce
from operator import add
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Kernel,
    KernelOperator,
    Matern,
    Product,
    Sum,
    WhiteKernel,
)

from skgp.estimators import defaults
from skgp.kernels import ActiveDims, state_space
from skgp.kernels.expression import split_noise, summands
from skgp.kernels.scales import capped_weights, robust_range, robust_std, varies


def default_kernels(
    X: np.ndarray,
    sample_weight: np.ndarray | None = None,
    *,
    bounds: tuple[float, float] = defaults.SIGNAL_BOUNDS,
    units: tuple[float, float] = (1.0, 1.0),
) -> list[Kernel]:
    """Return families of decreasing smoothness, scaled to the columns of X, with noise.

    ``constant * RBF + white`` and the same with Matern of nu 5/2, 3/2 and 1/2. Variances start at
    those of a standardised target, that of f within ``bounds``, times `units` (`target_units`).
    Length scales start at ``sqrt(d)`` times the columns' spreads, which puts two typical
    observations about one length scale apart. How many of these differ is for
    `skgp.learning.kernel_choice` to say.
    """
    length_scale = np.sqrt(X.shape[1]) * column_spreads(X, sample_weight)
    low, high = defaults.NOISE_BOUNDS
    return [
        ConstantKernel(units[0], (units[0] * bounds[0], units[0] * bounds[1]))
        * _shape(nu, length_scale)
        + WhiteKernel(0.1 * units[1], (units[1] * low, units[1] * high))
        for nu in (np.inf, 2.5, 1.5, 0.5)
    ]


def default_classification_kernels(
    X: np.ndarray,
    sample_weight: np.ndarray | None = None,
    *,
    link: str = "logit",
    isotropic: bool = False,
) -> list[Kernel]:
    """Return the kernels, without noise, that a classifier chooses among.

    ``constant * RBF`` and the same with Matern of nu 5/2 and 3/2; of few observations, which cannot
    tell them apart, the Matern of nu 5/2 alone. One length scale a column, which starts where two
    typical observations are about one apart. Of many columns, which often share a unit (pixels,
    counts), also RBF and Matern 3/2 with one length scale for all. ``isotropic`` columns do share
    one, and all three kernels have one length scale. ``link`` has the units of the latent function.
    """
    # Root mean square distance of the rows from their mean.
    shared = float(np.linalg.norm(robust_std(X, capped_weights(sample_weight)))) or 1.0
    if isotropic:
        shapes = [_shape(nu, shared) for nu in (np.inf, 2.5, 1.5)]
    else:
        length_scale = _length_scales_of_labels(X, sample_weight)
        few = len(X) <= defaults.FEW_LABELS
        shapes = [_shape(nu, length_scale) for nu in ([2.5] if few else [np.inf, 2.5, 1.5])]
        if X.shape[1] > defaults.MANY_COLUMNS:
            shapes += [_shape(nu, shared) for nu in (np.inf, 1.5)]
    variance = ConstantKernel(defaults.LATENT_VARIANCE[link], defaults.LATENT_BOUNDS)
    return [variance * shape for shape in shapes]


def _length_scales_of_labels(X: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
    """Where the length scales (d,) of the columns of X (n, d) start.

    Columns of two values, as levels of a category are, have the spread of even ones whatever their
    frequencies: a rare level tells as much, and thirty of them vary no more than a few columns do.
    """
    spreads = column_spreads(X, sample_weight)
    low, high = X.min(axis=0), X.max(axis=0)
    is_binary = ((X == low) | (X == high)).all(axis=0) & (low < high)
    unit = np.where(is_binary, 0.5 * high - 0.5 * low, spreads)
    return np.linalg.norm(np.minimum(spreads / unit, 1.0)) * unit


def _shape(nu: float, length_scale: np.ndarray | float, bounds: Any = None) -> Kernel:
    """Matern of smoothness `nu`, RBF for infinity; bounds are by default a factor 1e4 around."""
    if bounds is None:
        bounds = np.multiply.outer(length_scale, [1e-4, 1e4])
    return RBF(length_scale, bounds) if nu == np.inf else Matern(length_scale, bounds, nu=nu)


def column_spreads(X: np.ndarray, sample_weight: np.ndarray | None = None) -> np.ndarray:
    """Return a standard deviation of each column that a few outliers do not inflate, shape (d,).

    It is the smaller of the standard deviation and the range of the middle 90% over that of a
    normal distribution; 1 for a constant column.
    """
    sample_weight = capped_weights(sample_weight)
    std = robust_std(X, sample_weight)
    low, high = np.quantile(X, [0.05, 0.95], axis=0, weights=sample_weight, method="inverted_cdf")
    middle = (high - low) / 3.29
    spread = np.where(middle > 0, np.minimum(std, middle), std)
    # Eight digits: a search that starts from them does not tell a weight from repeated rows.
    mantissa, exponent = np.frexp(np.where(varies(spread, np.median(X, axis=0)), spread, 1.0))
    return np.ldexp(np.round(mantissa * 2**26) / 2**26, exponent)


def with_noise(kernel: Kernel) -> Kernel:
    """Return the kernel with a ``WhiteKernel`` summand: its own, or a new one of level 0.01."""
    if split_noise(kernel)[1] is not None:
        return kernel
    return kernel + WhiteKernel(1e-2, defaults.NOISE_BOUNDS)


def noise_on_top(kernel: Kernel) -> Kernel:
    """The expression with constants multiplied into sums that hold white noise; else as it is.

    The family of covariances is the same. Where the constant is free and the noise is not, noise
    could not follow the constant, and the product stays.

    Examples
    --------
    >>> noise_on_top(2.0 * (RBF() + WhiteKernel(0.1)))
    1.41**2 * RBF(length_scale=1) + WhiteKernel(noise_level=0.2)
    """
    if type(kernel) is Sum:
        parts = noise_on_top(kernel.k1), noise_on_top(kernel.k2)
        moved = any(new is not old for new, old in zip(parts, (kernel.k1, kernel.k2), strict=True))
        return Sum(*parts) if moved else kernel
    if type(kernel) is not Product:
        return kernel
    constant, other = kernel.k1, noise_on_top(kernel.k2)
    if type(other) is ConstantKernel:
        constant, other = other, noise_on_top(constant)
    whites = [part for part in summands(other) if type(part) is WhiteKernel]
    if type(constant) is not ConstantKernel or len(whites) != 1:
        return kernel
    constant_fixed = constant.hyperparameter_constant_value.fixed
    if whites[0].hyperparameter_noise_level.fixed and not constant_fixed:
        return kernel
    factor, level = constant.constant_value, whites[0]
    bounds = level.noise_level_bounds
    if not isinstance(bounds, str):
        of_constant = factor if constant_fixed else np.asarray(constant.constant_value_bounds)
        bounds = tuple(np.ravel(np.asarray(bounds) * of_constant))
    noise = WhiteKernel(factor * level.noise_level, bounds)
    signals = [part for part in summands(other) if part is not level]
    return Sum(constant * reduce(Sum, signals), noise) if signals else noise


def default_series_kernels(
    x: np.ndarray, variance: float = 1.0, sample_weight: np.ndarray | None = None
) -> list[Kernel]:
    """Return the kernels, without noise, among which the evidence of a series chooses.

    ``constant * Matern`` of nu 3/2, 5/2 and 1/2, and a sum of two of nu 3/2, of a long and a short
    length scale; up to 10000 observations also ``constant * RBF`` and such a sum of nu 5/2, of six
    states. `x` (n,) are times, `variance` is where the variances start.
    """
    unit = robust_range(x, sample_weight)

    def single(nu: float, scale: float = 1.0, share: float = 1.0) -> Kernel:
        return _matern(nu, scale * defaults.SERIES_SCALE * unit, unit, share * variance)

    def double(nu: float) -> Kernel:
        return single(nu, defaults.TWO_SCALES, 0.5) + single(nu, 1.0, 0.5)

    kernels = [single(1.5), single(2.5), single(0.5), double(1.5)]
    if len(x) <= defaults.SIX_STATES_ROWS:
        kernels += [single(np.inf), double(2.5)]
    return kernels


def process_kernels(
    X: np.ndarray, given: Kernel | None, variance: float, sample_weight: np.ndarray | None = None
) -> list[Kernel | None]:
    """Kernels of processes: of one column those to choose among, else one for each column.

    ValueError if `given` has no state-space form, or parts that see several columns.
    """
    n_columns = X.shape[1]
    if given is None:
        if n_columns == 1:
            return [*default_series_kernels(X[:, 0], variance, sample_weight)]
        units = [robust_range(x, sample_weight) for x in X.T]
        return [
            ActiveDims(_matern(1.5, unit / 4, unit, variance / n_columns), [column])
            for column, unit in enumerate(units)
        ]
    kernels = [given] if n_columns == 1 else column_kernels(given, n_columns)
    for kernel in kernels:
        if kernel is not None:
            state_space(kernel)  # says which kernels have a form
    return kernels


def column_kernels(kernel: Kernel, n_columns: int) -> list[Kernel | None]:
    """Split the kernel of an additive model, without noise, into one a column.

    Either of one column, which every column then gets a copy of, or a sum whose parts see a column
    each by `skgp.kernels.ActiveDims`: None for a column that no part sees, ValueError if some parts
    name columns and others do not, or a part sees several of them.
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


def split_terms(kernel: Kernel, place: int) -> tuple[Kernel, dict[int, str]]:
    """Split the kernel of a series into that of time, in column `place`, and kinds of covariates.

    A DotProduct asks for a straight line; a part of another column for a smooth function of it.
    ValueError if a part sees several columns, or none is left for time.
    """
    process: list[Kernel] = []
    kinds: dict[int, str] = {}
    for part in summands(kernel):
        seen, is_line = _columns(part) or {place}, _is_line(part)
        if len(seen) > 1:
            raise ValueError(
                f"kernel={kernel}: its part {part} sees the columns {sorted(seen)}, but each part "
                "of a series with covariates sees one. Write a sum of "
                "skgp.kernels.ActiveDims(kernel, [column])."
            )
        (column,) = seen
        if is_line or column != place:
            kinds[column] = "linear" if is_line else "smooth"
        else:
            process.append(part.kernel if isinstance(part, ActiveDims) else part)
    if all(isinstance(part, WhiteKernel) for part in process):
        raise ValueError(
            f"kernel={kernel} has no part of time, column {place}, but noise and lines. Add one "
            "with a state-space form, such as Matern(nu=1.5) or ExpSineSquared()."
        )
    return reduce(add, process), kinds


def _is_line(part: Kernel) -> bool:
    """Whether a summand is a DotProduct, times constants; ValueError of one beside others."""
    factors = [each for each in _factors(part) if type(each) is not ConstantKernel]
    if [type(each) for each in factors] == [DotProduct]:
        return True
    if _holds(part, DotProduct):
        raise ValueError(
            f"kernel has the part {part}, of a DotProduct and others, which has no state-space "
            "form that skgp knows. Add a DotProduct, times constants alone: a straight line."
        )
    return False


def _factors(kernel: Kernel) -> list[Kernel]:
    """The factors of a product, which may be one of some columns."""
    if isinstance(kernel, ActiveDims):
        return _factors(kernel.kernel)
    return _factors(kernel.k1) + _factors(kernel.k2) if type(kernel) is Product else [kernel]


def _holds(kernel: Kernel, leaf: type[Kernel]) -> bool:
    """Whether a kernel of some class is in an expression."""
    parts = (getattr(kernel, name, None) for name in ("k1", "k2", "kernel"))
    return isinstance(kernel, leaf) or any(_holds(part, leaf) for part in parts if part is not None)


def _matern(nu: float, length_scale: float, unit: float, variance: float) -> Kernel:
    """``constant * Matern``, of infinite nu the RBF."""
    bounds = defaults.SERIES_SCALE_BOUNDS[0] * unit, defaults.SERIES_SCALE_BOUNDS[1] * unit
    shape = _shape(nu, length_scale, bounds)
    return ConstantKernel(variance, defaults.SERIES_VARIANCE_BOUNDS) * shape


def _columns(kernel: Kernel) -> set[int]:
    """The columns that the parts of an expression name."""
    if isinstance(kernel, ActiveDims):
        return set(kernel.columns().tolist())
    if isinstance(kernel, KernelOperator):
        return _columns(kernel.k1) | _columns(kernel.k2)
    inner = getattr(kernel, "kernel", None)  # of Exponentiation
    return _columns(inner) if isinstance(inner, Kernel) else set()


def refuse_noise(kernel: Kernel, owner: object) -> None:
    """Refuse a WhiteKernel summand in a kernel where there is no Gaussian noise."""
    if split_noise(kernel)[1] is not None:
        raise ValueError(
            f"kernel={kernel} has a WhiteKernel, which is the noise of a Gaussian likelihood; "
            f"this {type(owner).__name__} has none. Leave the WhiteKernel out."
        )


def white_variance(kernel: Kernel) -> float | None:
    """Variance of the white noise of sums and of products with constants; None if unknown.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> white_variance(RBF() + 2.0 * (WhiteKernel(0.25) + WhiteKernel(0.125)))
    0.75
    >>> white_variance(RBF() * WhiteKernel(0.2)) is None
    True
    """
    if type(kernel) is WhiteKernel:
        return float(kernel.noise_level)
    parts = kernel.get_params().values()
    if not any(isinstance(part, WhiteKernel) for part in parts):
        return 0.0
    if type(kernel) not in (Sum, Product):
        return None
    if type(kernel) is Sum:
        first, second = white_variance(kernel.k1), white_variance(kernel.k2)
        return None if first is None or second is None else first + second
    constant, other = kernel.k1, kernel.k2
    if type(other) is ConstantKernel:
        constant, other = other, constant
    white = white_variance(other)
    if type(constant) is not ConstantKernel or white is None:
        return None
    return float(constant.constant_value) * white
