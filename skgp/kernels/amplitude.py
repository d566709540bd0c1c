"""The amplitude of a kernel expression: whether it is free, and the expression at another one."""

import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Kernel, Product, Sum

__all__ = ["amplitude_range", "scale_amplitude"]


def amplitude_range(kernel: Kernel) -> tuple[float, float]:
    """Return the least and the greatest factor by which a kernel may be multiplied.

    Parameters
    ----------
    kernel : Kernel
        Without WhiteKernel.

    Returns
    -------
    low, high : float
        What the bounds of its constants allow; 1 and 1 where some part has no free constant as a
        factor.
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
    """Return the kernel times a factor, as an expression of the same form.

    Parameters
    ----------
    kernel : Kernel
    factor : float
        Within `amplitude_range`.

    Raises
    ------
    ValueError
        If the factor is out of that range.

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
