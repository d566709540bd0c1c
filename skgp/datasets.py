"""Generators of synthetic data, each with its source: ``random_state`` in, ``X, y`` out."""

import math
from collections.abc import Iterator
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray
from sklearn.utils import check_random_state

__all__ = ["make_counts", "make_ringnorm", "make_sinc", "make_smooth", "make_twonorm"]

Array = NDArray[np.float64]

_ROWS = 4096  # shape: rows of features in memory at a time: 4096 x 500 float64 features take 16 MB


def make_twonorm(n_samples=300, n_features=20, *, random_state=None):
    r"""Two overlapping Gaussian classes of equal spread.

    .. math:: x \mid y = 0 \sim N(a \mathbf 1, I), \quad x \mid y = 1 \sim N(-a \mathbf 1, I),
              \quad a = 2 / \sqrt d .

    The classes are separated by a hyperplane through the origin and the Bayes error is
    :math:`\Phi(-2)` = 2.3% for every ``n_features``.

    Parameters
    ----------
    n_samples : int, default=300
        Number of observations; the class of each is a fair coin.
    n_features : int, default=20
        Number of columns d.
    random_state : int, RandomState instance or None, default=None
        Seed of the draw.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
    y : ndarray of shape (n_samples,)
        Integer labels 0 and 1.

    Raises
    ------
    ValueError
        If a size is below 1.

    References
    ----------
    L. Breiman, "Bias, variance, and arcing classifiers", Technical Report 460, Statistics
    Department, University of California at Berkeley, 1996.

    Examples
    --------
    >>> from skgp.datasets import make_twonorm
    >>> X, y = make_twonorm(n_samples=100, random_state=0)
    >>> X.shape, y.shape
    ((100, 20), (100,))
    """
    _check_sizes(n_samples=n_samples, n_features=n_features)
    random = check_random_state(random_state)
    y = random.randint(2, size=n_samples)
    shift = 2 / math.sqrt(n_features) * (1 - 2 * y)
    return random.standard_normal((n_samples, n_features)) + shift[:, None], y


def make_ringnorm(n_samples=300, n_features=20, *, random_state=None):
    r"""A narrow Gaussian class inside a wide one.

    .. math:: x \mid y = 0 \sim N(0, 4 I), \quad x \mid y = 1 \sim N(a \mathbf 1, I),
              \quad a = 2 / \sqrt d .

    No hyperplane separates the classes; the Bayes error is 1.25% for 20 columns.

    Parameters
    ----------
    n_samples : int, default=300
        Number of observations; the class of each is a fair coin.
    n_features : int, default=20
        Number of columns d.
    random_state : int, RandomState instance or None, default=None
        Seed of the draw.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
    y : ndarray of shape (n_samples,)
        Integer labels 0 and 1.

    Raises
    ------
    ValueError
        If a size is below 1.

    References
    ----------
    L. Breiman, "Bias, variance, and arcing classifiers", Technical Report 460, Statistics
    Department, University of California at Berkeley, 1996. The mean 2 / sqrt(d) is that of
    the 7400 observations of the DELVE archive; some descriptions print 1 / sqrt(d).

    Examples
    --------
    >>> from skgp.datasets import make_ringnorm
    >>> X, y = make_ringnorm(n_samples=1000, random_state=0)
    >>> bool(X[y == 0].var() > 3 * X[y == 1].var())
    True
    """
    _check_sizes(n_samples=n_samples, n_features=n_features)
    random = check_random_state(random_state)
    y = random.randint(2, size=n_samples)
    Z = random.standard_normal((n_samples, n_features))
    narrow = (y == 1)[:, None]
    return np.where(narrow, Z + 2 / math.sqrt(n_features), 2 * Z), y


def make_sinc(n_samples=100, *, noise=0.1, low=-10.0, high=10.0, random_state=None):
    r"""Noisy values of the unnormalised sinc function at uniform inputs.

    .. math:: y = \frac{\sin x}{x} + \epsilon, \quad x \sim U(\mathrm{low}, \mathrm{high}),
              \quad \epsilon \sim N(0, \mathrm{noise}^2) .

    Parameters
    ----------
    n_samples : int, default=100
        Number of observations.
    noise : float, default=0.1
        Standard deviation of the noise, in the units of y.
    low, high : float, default=-10, 10
        Range of the inputs.
    random_state : int, RandomState instance or None, default=None
        Seed of the draw.

    Returns
    -------
    X : ndarray of shape (n_samples, 1)
        Sorted inputs.
    y : ndarray of shape (n_samples,)

    Raises
    ------
    ValueError
        If ``n_samples`` is below 1, ``noise`` negative, or ``low`` not below ``high``.

    References
    ----------
    M. E. Tipping, "Sparse Bayesian learning and the relevance vector machine", Journal of Machine
    Learning Research 1, 2001, section 2.4.

    Examples
    --------
    >>> from skgp.datasets import make_sinc
    >>> X, y = make_sinc(n_samples=20, noise=0.0, random_state=0)
    >>> float(abs(y).max()) <= 1.0
    True
    """
    _check_sizes(n_samples=n_samples)
    _check_not_negative(noise=noise)
    if not low < high:
        raise ValueError(f"low must be below high, got low={low!r}, high={high!r}; swap them")
    random = check_random_state(random_state)
    x = np.sort(random.uniform(low, high, size=n_samples))
    # np.sinc(t) is sin(pi t) / (pi t), with its limit 1 at 0.
    return x[:, None], np.sinc(x / np.pi) + noise * random.standard_normal(n_samples)


def make_smooth(
    n_samples=1000, n_features=2, *, length_scale=0.5, noise=0.1, n_basis=500, random_state=None
):
    r"""Noisy values of one draw of a Gaussian process, for any number of observations.

    The process has zero mean, unit variance and, up to the error of ``n_basis`` random Fourier
    features, the squared-exponential kernel of the given length-scale:

    .. math:: f(x) = \sqrt{2 / m} \sum_{k=1}^m a_k \cos(w_k^T x + b_k), \quad
              w_k \sim N(0, \ell^{-2} I), \quad a_k \sim N(0, 1), \quad b_k \sim U(0, 2 \pi) .

    The function does not depend on ``n_samples``: for the same ``random_state``, more observations
    are more values of the same function.

    Parameters
    ----------
    n_samples : int, default=1000
        Number of observations, uniform in the cube [-1, 1]^d.
    n_features : int, default=2
        Number of columns d.
    length_scale : float, default=0.5
        Length-scale of the kernel, in the units of X.
    noise : float, default=0.1
        Standard deviation of the noise; that of the function is about 1.
    n_basis : int, default=500
        Number m of random cosines.
    random_state : int, RandomState instance or None, default=None
        Seed of the function, the inputs and the noise.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
    y : ndarray of shape (n_samples,)

    Raises
    ------
    ValueError
        If a size is below 1, ``length_scale`` not positive, or ``noise`` negative.

    Notes
    -----
    O(n d m) time. The features are made 4096 observations at a time: memory holds X, y and one such
    tile.

    References
    ----------
    A. Rahimi and B. Recht, "Random features for large-scale kernel machines", Advances in Neural
    Information Processing Systems 20, 2007, Algorithm 1.

    Examples
    --------
    >>> from skgp.datasets import make_smooth
    >>> X, y = make_smooth(n_samples=50, n_features=3, random_state=0)
    >>> X.shape, y.shape
    ((50, 3), (50,))
    """
    _check_not_negative(noise=noise)
    random = check_random_state(random_state)
    X, f = _smooth_function(n_samples, n_features, length_scale, n_basis, random)
    return X, f + noise * random.standard_normal(n_samples)


def make_counts(
    n_samples=300,
    n_features=1,
    *,
    mean=5.0,
    dispersion=2.0,
    length_scale=0.5,
    n_basis=500,
    random_state=None,
):
    r"""Counts with a smooth log-rate and more variance than a Poisson law has.

    .. math:: y \mid g \sim \mathrm{Poisson}(\lambda(x)\, g), \quad g \sim \mathrm{Gamma}(r, 1/r),
              \quad \log \lambda(x) = \log \mathrm{mean} + f(x) / 2,

    with f a draw of a Gaussian process as in :func:`make_smooth`. Given x, y is negative binomial
    with mean :math:`\lambda` and variance :math:`\lambda + \lambda^2 / r`.

    Parameters
    ----------
    n_samples : int, default=300
        Number of observations, uniform in the cube [-1, 1]^d.
    n_features : int, default=1
        Number of columns d.
    mean : float, default=5.0
        Rate where f is 0.
    dispersion : float, default=2.0
        The shape r of the Gamma distribution; ``float("inf")`` gives Poisson counts.
    length_scale : float, default=0.5
        Length-scale of f, in the units of X.
    n_basis : int, default=500
        Number of random cosines that make f.
    random_state : int, RandomState instance or None, default=None
        Seed of the function, the inputs and the counts.

    Returns
    -------
    X : ndarray of shape (n_samples, n_features)
    y : ndarray of shape (n_samples,)
        Non-negative integers.

    Raises
    ------
    ValueError
        If a size is below 1, or ``mean``, ``dispersion`` or ``length_scale`` not positive.

    References
    ----------
    A. C. Cameron and P. K. Trivedi, "Regression Analysis of Count Data", Cambridge University
    Press, 1998, section 3.3 (the NB2 model).

    Examples
    --------
    >>> from skgp.datasets import make_counts
    >>> X, y = make_counts(n_samples=500, random_state=0)
    >>> bool(y.var() > y.mean())
    True
    """
    _check_positive(mean=mean, dispersion=dispersion)
    random = check_random_state(random_state)
    X, f = _smooth_function(n_samples, n_features, length_scale, n_basis, random)
    rate = mean * np.exp(0.5 * f)
    if np.isfinite(dispersion):
        rate *= random.gamma(dispersion, 1 / dispersion, size=n_samples)
    return X, random.poisson(rate)


def _smooth_function(
    n_samples: int,
    n_features: int,
    length_scale: float,
    n_basis: int,
    random: np.random.RandomState,
) -> tuple[Array, Array]:
    """Uniform inputs ``(n, d)`` and the values ``(n,)`` there of one draw of a Gaussian process."""
    _check_sizes(n_samples=n_samples, n_features=n_features, n_basis=n_basis)
    _check_positive(length_scale=length_scale)
    # The function first, so that it does not depend on the number of rows.
    frequency = random.standard_normal((n_features, n_basis)) / length_scale
    phase = random.uniform(0, 2 * np.pi, size=n_basis)
    weight = random.standard_normal(n_basis) * math.sqrt(2 / n_basis)
    X = random.uniform(-1, 1, size=(n_samples, n_features))
    f = np.empty(n_samples)
    for rows in _slices(n_samples):
        f[rows] = np.cos(X[rows] @ frequency + phase) @ weight
    return X, f


def _slices(n: int) -> Iterator[slice]:
    """Consecutive slices of at most ``_ROWS`` that cover ``range(n)``."""
    return (slice(start, start + _ROWS) for start in range(0, n, _ROWS))


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}; raise it")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not value > 0:
            raise ValueError(f"{name} must be a number above 0, got {value!r}; give a larger one")


def _check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}; give one")
