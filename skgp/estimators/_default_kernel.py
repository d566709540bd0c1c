"""The kernels that an estimator chooses among when ``kernel=None``."""

import numpy as np
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern, WhiteKernel

from skgp.estimators.defaults import (
    FEW_LABELS,
    LATENT_BOUNDS,
    LATENT_VARIANCE,
    MANY_COLUMNS,
    NOISE_BOUNDS,
)
from skgp.kernels.gram import split_noise
from skgp.kernels.scales import robust_std


def default_kernels(X: np.ndarray, sample_weight: np.ndarray | None = None) -> list[Kernel]:
    """Return families of decreasing smoothness, scaled to the columns of X, with noise.

    ``constant * RBF + white`` and the same with Matern of nu 5/2, 3/2 and 1/2. Variances start at
    those of a standardised target; length scales at ``sqrt(d)`` times the columns' spreads, which
    puts two typical rows about one length scale apart. How many of these differ is for
    `skgp.learning.kernel_choice` to say.
    """
    length_scale = np.sqrt(X.shape[1]) * column_spreads(X, sample_weight)
    return [
        ConstantKernel(1.0, (1e-3, 1e4)) * _shape(nu, length_scale) + WhiteKernel(0.1, NOISE_BOUNDS)
        for nu in (np.inf, 2.5, 1.5, 0.5)
    ]


def default_classification_kernels(
    X: np.ndarray, sample_weight: np.ndarray | None = None, *, link: str = "logit"
) -> list[Kernel]:
    """Return the kernels, without noise, that a classifier chooses among.

    ``constant * RBF`` and the same with Matern of nu 5/2 and 3/2; of few rows, which cannot tell
    them apart, the Matern of nu 5/2 alone. One length scale a column, at ``sqrt(d)`` times its
    spread to start with. Of many columns, which often share a unit (pixels, counts), also RBF and
    Matern 3/2 with one length scale for all. ``link`` has the units of the latent function.
    """
    length_scale = np.sqrt(X.shape[1]) * column_spreads(X, sample_weight)
    if X.shape[0] <= FEW_LABELS:
        shapes = [_shape(2.5, length_scale)]
    else:
        shapes = [_shape(nu, length_scale) for nu in (np.inf, 2.5, 1.5)]
    if X.shape[1] > MANY_COLUMNS:
        shared = _distance_from_centre(X, sample_weight)
        shapes += [_shape(nu, shared) for nu in (np.inf, 1.5)]
    return [ConstantKernel(LATENT_VARIANCE[link], LATENT_BOUNDS) * shape for shape in shapes]


def isotropic_classification_kernels(
    X: np.ndarray, sample_weight: np.ndarray | None = None, *, link: str = "logit"
) -> list[Kernel]:
    """Return the kernels, without noise, of inputs whose columns share a unit.

    ``constant * RBF`` and the same with Matern of nu 5/2 and 3/2, with one length scale.
    """
    shared = _distance_from_centre(X, sample_weight)
    shapes = [_shape(nu, shared) for nu in (np.inf, 2.5, 1.5)]
    return [ConstantKernel(LATENT_VARIANCE[link], LATENT_BOUNDS) * shape for shape in shapes]


def _distance_from_centre(X: np.ndarray, sample_weight: np.ndarray | None) -> float:
    """Root mean square distance of the rows from their mean; 1 where all are equal."""
    return float(np.linalg.norm(robust_std(X, sample_weight))) or 1.0


def _shape(nu: float, length_scale: np.ndarray | float) -> Kernel:
    """Matern of smoothness `nu`, RBF for infinity, with bounds a factor 1e4 around its start."""
    bounds = np.multiply.outer(length_scale, [1e-4, 1e4])
    return RBF(length_scale, bounds) if nu == np.inf else Matern(length_scale, bounds, nu=nu)


def column_spreads(X: np.ndarray, sample_weight: np.ndarray | None = None) -> np.ndarray:
    """Return a standard deviation of each column that a few outliers do not inflate, shape (d,).

    It is the smaller of the standard deviation and the range of the middle 90% over that of a
    normal distribution; 1 for a constant column.
    """
    mean = np.average(X, axis=0, weights=sample_weight)
    std = robust_std(X, sample_weight)
    low, high = np.quantile(X, [0.05, 0.95], axis=0, weights=sample_weight, method="inverted_cdf")
    middle = (high - low) / 3.29
    spread = np.where(middle > 0, np.minimum(std, middle), std)
    # Rounding leaves a constant column a spread of about eps times its value.
    constant = spread <= 1e-12 * np.abs(mean)
    # Eight digits: a search that starts from them does not tell a weight from repeated rows.
    mantissa, exponent = np.frexp(np.where(constant | (spread == 0), 1.0, spread))
    return np.ldexp(np.round(mantissa * 2**26) / 2**26, exponent)


def with_noise(kernel: Kernel) -> Kernel:
    """Return the kernel with a ``WhiteKernel`` summand: its own, or a new one of level 0.01."""
    if split_noise(kernel)[1] is not None:
        return kernel
    return kernel + WhiteKernel(1e-2, NOISE_BOUNDS)
