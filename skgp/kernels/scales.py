r"""Scales of a kernel expression and of inputs: amplitude, length scales, spread, origin.

**Inputs far from zero.** A linear kernel loses digits there. With :math:`x = c + u` and
:math:`V = \sigma_0^2 + |c|^2`, completing the square,

.. math:: \sigma_0^2 + x^\top z = V h(u) h(v) + u^\top (I - c c^\top / V) v,
          \qquad h(u) = 1 + c^\top u / V .

Where the rows lie much closer to c than c to zero the first term, a level, is
:math:`|c|^2 / |u|^2` times the second, the slopes: sums of both keep no digit of the slopes. Data
decide the level all the same, whatever its variance, once that is large. `at_origin` therefore
lowers V in front of the first term, and nothing else, to :math:`10^3 |u|^2`.
"""

import numpy as np
import torch
from scipy.special import ndtri
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    Kernel,
    Matern,
    Product,
    RationalQuadratic,
    Sum,
)
from torch import Tensor

from skgp.linalg.runtime import constant

from .defaults import (
    ALIKE,
    DISTINCT_ROWS,
    FAR_LINEAR,
    LEVEL,
    MOST_WEIGHT,
    OUTLYING,
    ROUNDING,
    SCALE_ROWS,
    TAIL,
)
from .expression import register_kernel
from .gram import gram, gram_diag
from .hyperparameters import bounds_of, children_of, free_of, sizes_of, theta_of, with_theta
from .specs import ActiveDims


def amplitude_range(kernel: Kernel) -> tuple[float, float]:
    """Least and greatest factor by which a kernel without noise may be multiplied.

    As the bounds of its constants allow; 1 and 1 where some part has no free constant as a factor.
    """
    if isinstance(kernel, ConstantKernel):
        if kernel.hyperparameter_constant_value.fixed:
            return 1.0, 1.0
        low, high = np.ravel(kernel.constant_value_bounds) / kernel.constant_value
        return min(float(low), 1.0), max(float(high), 1.0)
    if isinstance(kernel, Product):
        ranges = amplitude_range(kernel.k1), amplitude_range(kernel.k2)
        return max(ranges, key=lambda ends: ends[1] / ends[0])
    if isinstance(kernel, Sum):
        (low1, high1), (low2, high2) = amplitude_range(kernel.k1), amplitude_range(kernel.k2)
        return max(low1, low2), min(high1, high2)
    return 1.0, 1.0


def scale_amplitude(kernel: Kernel, factor: float) -> Kernel:
    """The kernel times a factor within `amplitude_range`, as an expression of the same form.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> scale_amplitude(2.0 * RBF(1.0), 8.0)
    4**2 * RBF(length_scale=1)
    """
    low, high = amplitude_range(kernel)
    if not low * (1 - 1e-9) <= factor <= high * (1 + 1e-9):
        raise ValueError(
            f"factor={factor} takes {kernel} out of the bounds of its constants; it may lie "
            f"between {low:.3g} and {high:.3g}. Widen constant_value_bounds."
        )
    if factor == 1.0:
        return kernel
    if isinstance(kernel, Product):
        first, second = amplitude_range(kernel.k1), amplitude_range(kernel.k2)
        if first[1] / first[0] >= second[1] / second[0]:
            return Product(scale_amplitude(kernel.k1, factor), kernel.k2)
        return Product(kernel.k1, scale_amplitude(kernel.k2, factor))
    if isinstance(kernel, Sum):
        return Sum(scale_amplitude(kernel.k1, factor), scale_amplitude(kernel.k2, factor))
    return ConstantKernel(kernel.constant_value * factor, kernel.constant_value_bounds)


def scale_within(kernel: Kernel, factor: float) -> Kernel:
    """The kernel times a factor, as far as its bounds allow."""
    low, high = amplitude_range(kernel)
    return scale_amplitude(kernel, min(max(factor, low), high))


def with_variance(kernel: Kernel, X: Tensor, variance: float = 1.0) -> Kernel:
    """The kernel of this mean prior variance at the rows of X (n, d), as far as bounds allow."""
    return scale_within(kernel, variance / (float(gram_diag(kernel, X).mean()) or 1.0))


def length_scales(kernel: Kernel, X: Tensor) -> Tensor:
    r"""Return how far each column must move for the kernel to notice, shape (d,).

    .. math:: \ell_j = \delta_j \big/ \sqrt{-2 \log \rho(x, x + \delta_j e_j)},

    averaged over some rows x, with :math:`\rho` the kernel's correlation and :math:`\delta_j` a
    tenth of the spread of column j: the length scale of an RBF kernel, and its likeness in any
    other expression without noise. Columns that the kernel ignores, or that are constant, get 1e6
    times the largest. X (n, d) is float64; not differentiable.
    """
    with torch.no_grad():
        rows = X[:: -(-len(X) // SCALE_ROWS)]
        steps = 0.1 * X.new_tensor(robust_std(X.cpu().numpy()))
        steps[steps == 0] = 1.0
        moved = rows[:, None] + steps.diag()  # (p, d, d): one column moved at a time
        cross = gram(kernel, rows[:, None], moved)[:, 0]  # (p, d)
        norms = (gram_diag(kernel, rows)[:, None] * gram_diag(kernel, moved)).sqrt()
        # Where the kernel vanishes, as a linear one at 0, there is no correlation to lose.
        correlation = torch.where(norms > 0, cross / norms, 1.0)
        drop = -2 * correlation.clamp(1e-12, 1.0).log().mean(dim=0)
        scale = steps / drop.clamp_min(1e-300).sqrt()
        ignored = drop < 1e-14
        if ignored.all():
            return torch.ones_like(scale)
        return torch.where(ignored, 1e6 * scale[~ignored].max(), scale)


def in_units(kernel: Kernel, unit: np.ndarray) -> Kernel:
    """The stationary expression for inputs divided by `unit` (d,), bounds included.

    Units are equal where a length scale is a number.

    Examples
    --------
    >>> in_units(2.0 * RBF([1.0, 30.0]), np.array([2.0, 10.0]))
    1.41**2 * RBF(length_scale=[0.5, 3])
    """
    parameters, changed = kernel.get_params(), {}
    for name, value in parameters.items():
        part = name.split("__")[-1]
        if part in ("length_scale", "length_scale_bounds") and not isinstance(value, str):
            length = parameters[name.removesuffix("_bounds")]
            each = unit if np.ndim(length) else float(unit[0])
            of_bounds = np.ndim(length) and part != "length_scale"
            changed[name] = value / (unit[:, None] if of_bounds else each)
    return kernel.clone_with_theta(kernel.theta).set_params(**changed)


def length_scale_places(kernel: Kernel) -> np.ndarray:
    """Which elements of theta are length scales, shape (n_theta,), bool."""
    is_length = [hyper.name.split("__")[-1] == "length_scale" for _, hyper in free_of(kernel)]
    return np.repeat(np.array(is_length, dtype=bool), sizes_of(kernel))


def at_spread(kernel: Kernel, X: Tensor) -> Kernel:
    """The expression at length scales that put two typical rows of X (n, d) about one apart.

    Of a vector, one a column, each moves to ``sqrt(d)`` times its column's spread, as
    `length_scales` measures them; a number moves to the root of the sum of the squared spreads. Of
    sums and products the ratios are kept, and so is what is fixed; all stays within its bounds.

    Examples
    --------
    >>> at_spread(RBF([30.0, 30.0]), torch.tensor([[0.0, 0.0], [2.0, 20.0]], dtype=torch.float64))
    RBF(length_scale=[1.41, 14.1])
    """
    ratio = robust_std(X.cpu().numpy()) / length_scales(kernel, X).cpu().numpy()
    theta = theta_of(kernel) + _log_factors(kernel, ratio)
    return with_theta(kernel, np.clip(theta, *bounds_of(kernel).T))


def _log_factors(kernel: Kernel, ratio: np.ndarray) -> np.ndarray:
    """Of theta (n_theta,), 0 but for length scales; ratio (d,) of spreads to length scales."""
    if type(kernel) is ActiveDims:
        return _log_factors(kernel.kernel, ratio[kernel.columns()])
    if children := children_of(kernel):
        return np.concatenate([_log_factors(child, ratio) for child in children])
    together = float(np.linalg.norm(ratio)) or 1.0
    factors = [np.zeros(0)]
    for _, hyper in free_of(kernel):
        moved = np.zeros(hyper.n_elements)
        if hyper.name == "length_scale":
            each = len(ratio) ** 0.5 * np.where(ratio > 0, ratio, together)
            moved += np.log(each if hyper.n_elements == len(ratio) else together)
        factors.append(moved)
    return np.concatenate(factors)


def inverse_length_scales(kernel: Kernel, X: Tensor) -> Tensor | None:
    r"""Read off the scaled distance that orders points as the kernel's correlation does.

    .. math:: D(x, z) = \sum_j (x_j - z_j)^2 / \ell_j^2 .

    Constants, RBF, Matern and rational quadratic parts fall with it, and so do sums, products and
    positive powers of such parts, provided that all weigh the columns alike.

    :math:`1 / \ell_j` (d,) in float64, up to a common factor; zeros for a constant. None where
    there is no such distance: parts that weigh the columns differently, periodic and linear
    parts, a choice of columns, a user's class.

    Examples
    --------
    >>> inverse_length_scales(2.0 * RBF([1.0, 4.0]) + Matern([2.0, 8.0]), torch.zeros(1, 2))
    tensor([1.0000, 0.2500], dtype=torch.float64)
    """
    scales = _length_scales(kernel)
    if scales is None:
        return None
    if not scales:
        return torch.zeros(X.shape[1], dtype=torch.float64, device=X.device)
    inverse = np.array([np.broadcast_to(1 / scale, X.shape[1:]) for scale in scales])
    relative = inverse / inverse[:, :1]
    if not np.allclose(relative, relative[0], rtol=ALIKE, atol=0.0):
        return None
    return constant(inverse[0], dtype=torch.float64, device=X.device)


def _length_scales(kernel: Kernel) -> list[np.ndarray] | None:
    """Length scales of all leaves; None where one does not fall with a scaled distance."""
    kind = type(kernel)
    if kind is ConstantKernel:
        return []
    if kind in (RBF, Matern, RationalQuadratic):
        return [np.asarray(kernel.length_scale, dtype=float)]
    # Sums, products and powers of positive functions that fall do so too.
    if kind in (Sum, Product) or (kind is Exponentiation and kernel.exponent > 0):
        parts = [_length_scales(child) for child in children_of(kernel)]
        return [s for part in parts if part for s in part] if None not in parts else None
    return None


def capped_weights(
    weights: np.ndarray | None, groups: np.ndarray | None = None
) -> np.ndarray | None:
    """Weights (n,), none above `MOST_WEIGHT` times their median; None of none.

    Where a scale is that of the row of greatest weight, it suits no other. Given `groups` (n,), the
    median is that of the group: classes may be of unlike weights.
    """
    if weights is None or groups is None:
        return None if weights is None else np.minimum(weights, MOST_WEIGHT * np.median(weights))
    capped = np.empty_like(weights)
    for group in np.unique(groups):
        capped[groups == group] = capped_weights(weights[groups == group])
    return capped


def robust_std(X: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Standard deviation of each column, shape (d,); where outliers make it large, without them.

    Outliers are few rows, or few of the distinct values, as codes for missing numbers are. X
    (n, d), weights (n,) if any.
    """
    mean = np.average(X, axis=0, weights=weights)
    std = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weights))
    middle, tail = _middle(X, weights)
    std = _unless_outlying(std, middle / (2 * ndtri(1 - tail)))
    some = X[:: -(-len(X) // DISTINCT_ROWS)]
    each = [_middle(np.unique(x), None) for x in some.T]
    return _unless_outlying(std, np.array([m / (2 * ndtri(1 - tail)) for m, tail in each]))


def varies(spread: np.ndarray, middle: np.ndarray) -> np.ndarray:
    """Whether numbers about a middle spread by more than rounding, which leaves eps times it.

    Of columns the middle is the median: outliers move the mean.
    """
    return spread > ROUNDING * np.abs(middle)


def target_units(y: np.ndarray, weights: np.ndarray | None) -> tuple[float, float]:
    """Mean square of targets y, (n,) or (n, t), and their variance, or that again of equal ones.

    1 and 1 of zeros.
    """
    mean = np.average(y, axis=0, weights=weights)
    variance = float(np.average((y - mean) ** 2, axis=0, weights=weights).mean())
    square = float(np.mean(mean**2)) + variance or 1.0
    return square, variance if varies(np.sqrt(variance), np.sqrt(square)) else square


def robust_range(x: np.ndarray, sample_weight: np.ndarray | None) -> float:
    """Range of numbers x (n,); where outliers make it large, that of the others; 1 of equal ones.

    Weights are capped.
    """
    middle, tail = _middle(x, capped_weights(sample_weight))
    return float(_unless_outlying(np.ptp(x), middle / (1 - 2 * tail))) or 1.0


def far_apart(x: np.ndarray) -> np.ndarray:
    """Which of some numbers (n,) are the outliers of `robust_range`: a range and more away."""
    unit = robust_range(x, None)
    return (np.abs(x - np.median(x)) > 2 * unit) & (np.ptp(x) > unit)


def _middle(X: np.ndarray, weights: np.ndarray | None) -> tuple[np.ndarray, float]:
    """Distance between a low and a high quantile, and the share beyond either."""
    if len(X) < 4:  # too few to tell which are outliers
        return np.zeros(X.shape[1:]), TAIL
    tail = max(TAIL, 1.5 / len(X))
    low, high = np.quantile(X, [tail, 1 - tail], axis=0, weights=weights, method="inverted_cdf")
    return high - low, tail


def _unless_outlying(whole: np.ndarray, middle: np.ndarray) -> np.ndarray:
    return np.where((middle > 0) & (whole > OUTLYING * middle), middle, whole)


class FarDotProduct(DotProduct):
    """``DotProduct`` for rows far from zero, whose values and gradients it has in NumPy.

    `origin` is c (d,), `level` the largest variance of the level: see `at_origin`.
    """

    def __init__(self, sigma_0=1.0, sigma_0_bounds=(1e-5, 1e5), origin=0.0, level=np.inf):
        super().__init__(sigma_0, sigma_0_bounds)
        self.origin = origin
        self.level = level

    def __repr__(self):
        return f"DotProduct(sigma_0={self.sigma_0:.3g})"


def at_origin(kernel: Kernel, X: np.ndarray) -> Kernel:
    """Return the expression with linear summands that keep their digits at the rows of X (n, d).

    Summands, constants times them and choices of columns of them; of other products and powers the
    level is not all that is large, and they stay as they are.
    """
    if type(kernel) is DotProduct:
        origin = np.median(X, axis=0)
        spread = np.median(np.square(X - origin).sum(axis=1)) or 1.0
        if np.square(origin).sum() <= FAR_LINEAR * spread:
            return kernel
        bounds = kernel.sigma_0_bounds
        return FarDotProduct(kernel.sigma_0, bounds, origin, float(LEVEL * spread))
    if type(kernel) is ActiveDims:
        inner = at_origin(kernel.kernel, kernel.select(X))
        return kernel if inner is kernel.kernel else ActiveDims(inner, kernel.dims)
    is_scaled = type(kernel) is Product and ConstantKernel in (type(kernel.k1), type(kernel.k2))
    if type(kernel) is Sum or is_scaled:
        k1, k2 = at_origin(kernel.k1, X), at_origin(kernel.k2, X)
        return kernel if k1 is kernel.k1 and k2 is kernel.k2 else type(kernel)(k1, k2)
    return kernel


def _evaluate(kernel, params, X, Z):
    c = constant(kernel.origin, dtype=X.dtype, device=X.device)
    variance = params["sigma_0"] ** 2 + c.square().sum()  # V
    U, W = X - c, Z - c
    along = U @ c, W @ c
    left, right = (1 + a / variance for a in along)  # h
    slopes = U @ W.mT - along[0][..., :, None] * (along[1] / variance)[..., None, :]
    return variance.clamp(max=kernel.level) * left[..., :, None] * right[..., None, :] + slopes


register_kernel(FarDotProduct, _evaluate)
