"""Naive kernels: one pair of rows at a time, from the textbook formula, in NumPy."""

import math

import numpy as np


def naive_gram(kernel, X, Z=None):
    """K(X, Z) by a double loop over rows."""
    Z = X if Z is None else Z
    return np.array([[naive_value(kernel, x, z) for z in Z] for x in X])


def naive_value(kernel, x, z):
    """k(x, z) of a scikit-learn expression for two vectors."""
    name = type(kernel).__name__
    if name == "Sum":
        return naive_value(kernel.k1, x, z) + naive_value(kernel.k2, x, z)
    if name == "Product":
        return naive_value(kernel.k1, x, z) * naive_value(kernel.k2, x, z)
    if name == "Exponentiation":
        return naive_value(kernel.kernel, x, z) ** kernel.exponent
    if name == "ActiveDims":
        columns = np.atleast_1d(kernel.dims)
        return naive_value(kernel.kernel, x[columns], z[columns])
    return LEAVES[name](kernel, x, z)


def distance(x, z, length_scale=1.0):
    return math.sqrt(
        sum(((a - b) / s) ** 2 for a, b, s in zip(x, z, spread(length_scale, x), strict=True))
    )


def spread(length_scale, x):
    return np.broadcast_to(length_scale, x.shape)


def constant(kernel, x, z):
    return kernel.constant_value


def rbf(kernel, x, z):
    return math.exp(-(distance(x, z, kernel.length_scale) ** 2) / 2)


def matern(kernel, x, z):
    r = distance(x, z, kernel.length_scale)
    if kernel.nu == math.inf:
        return math.exp(-(r**2) / 2)
    s = math.sqrt(2 * kernel.nu) * r
    polynomial = {0.5: 1, 1.5: 1 + s, 2.5: 1 + s + s**2 / 3}[kernel.nu]
    return polynomial * math.exp(-s)


def rational_quadratic(kernel, x, z):
    r = distance(x, z, kernel.length_scale)
    return (1 + r**2 / (2 * kernel.alpha)) ** -kernel.alpha


def exp_sine_squared(kernel, x, z):
    sine = math.sin(math.pi * distance(x, z) / kernel.periodicity)
    return math.exp(-2 * sine**2 / kernel.length_scale**2)


def cosine(kernel, x, z):
    return math.cos(2 * math.pi * distance(x, z) / kernel.period)


def sho(kernel, x, z):
    t, b = distance(x, z), 2 * math.pi / kernel.period
    return math.exp(-t / kernel.decay) * (math.cos(b * t) + math.sin(b * t) / (b * kernel.decay))


def local_linear_trend(kernel, x, z):
    u, v = x[0] - kernel.origin, z[0] - kernel.origin
    m = min(abs(u), abs(v)) if u * v > 0 else 0.0  # the integral of (|u| - s) (|v| - s) up to m
    wander = abs(u) * abs(v) * m - (abs(u) + abs(v)) * m**2 / 2 + m**3 / 3
    return kernel.level + kernel.slope * u * v + kernel.diffusion * wander


def dot_product(kernel, x, z):
    return kernel.sigma_0**2 + sum(a * b for a, b in zip(x, z, strict=True))


LEAVES = {
    "ConstantKernel": constant,
    "RBF": rbf,
    "Matern": matern,
    "RationalQuadratic": rational_quadratic,
    "ExpSineSquared": exp_sine_squared,
    "Cosine": cosine,
    "SHO": sho,
    "LocalLinearTrend": local_linear_trend,
    "DotProduct": dot_product,
}
