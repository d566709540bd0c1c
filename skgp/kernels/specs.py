"""Kernel classes that scikit-learn lacks, written as scikit-learn kernels."""

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
from sklearn.gaussian_process.kernels import (
    Hyperparameter,
    Kernel,
    NormalizedKernelMixin,
    StationaryKernelMixin,
)


class ActiveDims(Kernel):
    r"""A kernel on some of the columns of X.

    .. math:: k(x, x') = k_0(x_D, x'_D), \qquad D = \mathrm{dims}.

    Sums of it make additive models, products of it let every group of columns have a kernel of its
    own. Hyper-parameters, bounds and ``theta`` are those of the kernel within.

    Parameters
    ----------
    kernel : Kernel
        Any scikit-learn kernel on vectors.
    dims : int or sequence of int
        The columns that the kernel sees, counted from 0, without repetition.

    Raises
    ------
    TypeError
        If ``kernel`` is not a kernel.
    ValueError
        If ``dims`` is empty, repeats a column or has a negative one; on evaluation, if X has too
        few columns.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> kernel = ActiveDims(RBF(1.0), [0]) * ActiveDims(RBF(2.0), [1])
    >>> kernel(np.zeros((1, 2)), np.array([[1.0, 2.0]])).round(4)
    array([[0.3679]])
    """

    def __init__(self, kernel, dims):
        if not isinstance(kernel, Kernel):
            raise TypeError(f"kernel must be a scikit-learn kernel, got {kernel!r}.")
        self.kernel = kernel
        self.dims = dims
        self.columns()

    def columns(self) -> np.ndarray:
        """Return ``dims`` as an index array, checked."""
        columns = np.atleast_1d(np.asarray(self.dims))
        valid = columns.ndim == 1 and columns.size and np.issubdtype(columns.dtype, np.integer)
        if not valid or columns.min() < 0 or np.unique(columns).size != columns.size:
            raise ValueError(
                f"dims must be a column index or a sequence of different ones, each >= 0, "
                f"got {self.dims!r}. Give positions, such as dims=[0, 2]."
            )
        return columns

    def select(self, X):
        """Return the columns of X (..., d), an array or a tensor, that the kernel sees."""
        columns = self.columns()
        if columns.max() >= X.shape[-1]:
            raise ValueError(
                f"dims={self.dims!r} needs at least {columns.max() + 1} columns, "
                f"X has {X.shape[-1]}."
            )
        return X[..., columns.tolist()]

    def get_params(self, deep=True):
        """Return the parameters; with ``deep`` also ``kernel__...``."""
        params = {"kernel": self.kernel, "dims": self.dims}
        if deep:
            params.update(("kernel__" + k, v) for k, v in self.kernel.get_params().items())
        return params

    @property
    def hyperparameters(self):
        """Hyper-parameters of the kernel within, their names prefixed by ``kernel__``."""
        return [
            Hyperparameter("kernel__" + h.name, h.value_type, h.bounds, h.n_elements)
            for h in self.kernel.hyperparameters
        ]

    @property
    def theta(self):
        """Logarithms of the free hyper-parameters."""
        return self.kernel.theta

    @theta.setter
    def theta(self, theta):
        self.kernel.theta = theta

    @property
    def bounds(self):
        """Logarithms of the bounds, shape (n_dims, 2)."""
        return self.kernel.bounds

    def __eq__(self, other):
        return (
            type(self) is type(other)
            and self.kernel == other.kernel
            and np.array_equal(self.columns(), other.columns())
        )

    def __call__(self, X, Y=None, eval_gradient=False):
        """Return K(X, Y) and optionally its gradient with respect to theta."""
        X = self.select(np.atleast_2d(X))
        Y = None if Y is None else self.select(np.atleast_2d(Y))
        return self.kernel(X, Y, eval_gradient=eval_gradient)

    def diag(self, X):
        """Return the diagonal of K(X, X), shape (n,)."""
        return self.kernel.diag(self.select(np.atleast_2d(X)))

    def is_stationary(self):
        """Whether the kernel within is stationary."""
        return self.kernel.is_stationary()

    def __repr__(self):
        return f"ActiveDims({self.kernel}, dims={self.columns().tolist()})"


def numeric(name: str, what: str) -> property:
    """A hyper-parameter as scikit-learn looks for it, with the bounds of the attributes."""
    bounds = f"{name}_bounds"
    found = property(lambda kernel: Hyperparameter(name, "numeric", getattr(kernel, bounds)))
    found.__doc__ = f"{what} as a scikit-learn hyper-parameter."
    return found


class OneColumnKernel(Kernel):
    """Evaluation of kernels of one column, which have their values and derivatives."""

    @abstractmethod
    def _values(self, X: np.ndarray, Y: np.ndarray) -> tuple[np.ndarray, Callable]:
        """K of X (n, 1) and Y (1, p), and a function that makes its derivatives.

        They are with respect to the logarithms of hyper-parameters, by name.
        """

    def __call__(self, X, Y=None, eval_gradient=False):
        """Return K(X, Y) and, for Y=None, optionally its gradient with respect to theta."""
        X = np.atleast_2d(X)
        if Y is not None and eval_gradient:
            raise ValueError("Gradient can only be evaluated when Y is None.")
        Y = X if Y is None else np.atleast_2d(Y)
        check_one_column(type(self).__name__, X.shape[1])
        K, derivatives = self._values(X, Y.T)
        if not eval_gradient:
            return K
        slopes = derivatives()
        free = [slopes[each.name] for each in self.hyperparameters if not each.fixed]
        return K, np.stack(free, -1) if free else np.empty((*K.shape, 0))


class Cosine(StationaryKernelMixin, NormalizedKernelMixin, OneColumnKernel):
    r"""A single oscillation, on one column.

    .. math:: k(x, x') = \cos\!\left(2 \pi \frac{|x - x'|}{p}\right).

    It is of rank two; a product with a decaying kernel makes a quasi-periodic one.

    Parameters
    ----------
    period : float, default=1.0
        The period p > 0, in the units of x.
    period_bounds : pair of floats or "fixed", default=(1e-5, 1e5)

    Examples
    --------
    >>> Cosine(period=4.0)([[0.0], [2.0]])
    array([[ 1., -1.],
           [-1.,  1.]])
    """

    def __init__(self, period=1.0, period_bounds=(1e-5, 1e5)):
        self.period = period
        self.period_bounds = period_bounds

    hyperparameter_period = numeric("period", "The period")

    def _values(self, X, Y):
        angle = 2 * np.pi * np.abs(X - Y) / self.period  # (n, p), radians
        # d cos(angle) / d log(period) = -sin(angle) * (-angle)
        return np.cos(angle), lambda: {"period": angle * np.sin(angle)}

    def __repr__(self):
        return f"Cosine(period={self.period:.3g})"


class SHO(StationaryKernelMixin, NormalizedKernelMixin, OneColumnKernel):
    r"""A damped harmonic oscillator driven by white noise, on one column.

    .. math:: k(t) = e^{-|t| / \tau} \left(\cos \frac{2 \pi t}{p}
              + \frac{p}{2 \pi \tau} \sin \frac{2 \pi |t|}{p}\right).

    Oscillations of a period p whose phase is forgotten over a time :math:`\tau`: of light curves,
    tides, vibrations [1]_. In terms of the undamped angular frequency and the quality factor
    :math:`\omega_0^2 = (2 \pi / p)^2 + \tau^{-2}` and :math:`Q = \omega_0 \tau / 2 > 1/2`; as p
    grows it becomes Matern 3/2. Draws have one derivative.

    Parameters
    ----------
    period : float, default=1.0
        The period p > 0 of the damped oscillation, in the units of x.
    decay : float, default=1.0
        The time :math:`\tau > 0` over which the amplitude falls to 1/e, in the units of x.
    period_bounds, decay_bounds : pair of floats or "fixed", default=(1e-5, 1e5)

    References
    ----------
    .. [1] Foreman-Mackey, Agol, Ambikasaran and Angus (2017), Fast and scalable Gaussian process
       modeling with applications to astronomical time series, section 4.

    Examples
    --------
    >>> SHO(period=4.0, decay=10.0)([[0.0], [2.0]]).round(4)
    array([[ 1.    , -0.8187],
           [-0.8187,  1.    ]])
    """

    def __init__(self, period=1.0, decay=1.0, period_bounds=(1e-5, 1e5), decay_bounds=(1e-5, 1e5)):
        self.period = period
        self.decay = decay
        self.period_bounds = period_bounds
        self.decay_bounds = decay_bounds

    hyperparameter_decay = numeric("decay", "The decay time")
    hyperparameter_period = numeric("period", "The period")

    def _values(self, X, Y):
        lag = np.abs(X - Y)  # (n, p)
        angle, ratio = 2 * np.pi * lag / self.period, self.period / (2 * np.pi * self.decay)
        fall, sine = np.exp(-lag / self.decay), np.sin(angle)
        K = fall * (np.cos(angle) + ratio * sine)

        def derivatives():
            return {
                # t / decay K from the exponential, and the ratio falls
                "decay": lag / self.decay * K - ratio * fall * sine,
                # the angle falls, the ratio rises
                "period": fall * (angle * (sine - ratio * np.cos(angle)) + ratio * sine),
            }

        return K, derivatives

    def __repr__(self):
        return f"SHO(period={self.period:.3g}, decay={self.decay:.3g})"


class LocalLinearTrend(OneColumnKernel):
    r"""A level whose slope wanders: integrated Brownian motion from an uncertain line, one column.

    .. math:: k(x, x') = \sigma_0^2 + \sigma_1^2 u u' + q \, [u u' > 0] \,
              \frac{m^2 (3 M - m)}{6}, \qquad u = x - o, \quad m = \min(|u|, |u'|),
              \quad M = \max(|u|, |u'|).

    Not stationary: forecasts go on along the last slope instead of returning to the mean, and their
    variance grows as q times the cube of the horizon over 3. Starts at the origin o with
    level and slope of mean zero and the variances given: large ones leave both to the data.

    Parameters
    ----------
    diffusion : float, default=1.0
        q > 0, by how much the variance of the slope grows in a unit of x.
    level : float, default=1.0
        Variance :math:`\sigma_0^2` of the function at the origin.
    slope : float, default=1.0
        Variance :math:`\sigma_1^2` of its derivative there.
    diffusion_bounds, level_bounds, slope_bounds : pair of floats or "fixed", default=(1e-10, 1e10)
    origin : float, default=0.0
        Where it starts, and goes on to both sides. A state-space model is fitted to no x before it,
        and predicts there.

    Examples
    --------
    >>> LocalLinearTrend(3.0, 0.5, 2.0)([[0.0], [1.0], [2.0]])
    array([[ 0.5,  0.5,  0.5],
           [ 0.5,  3.5,  7. ],
           [ 0.5,  7. , 16.5]])
    """

    def __init__(
        self,
        diffusion=1.0,
        level=1.0,
        slope=1.0,
        diffusion_bounds=(1e-10, 1e10),
        level_bounds=(1e-10, 1e10),
        slope_bounds=(1e-10, 1e10),
        origin=0.0,
    ):
        self.diffusion = diffusion
        self.level = level
        self.slope = slope
        self.diffusion_bounds = diffusion_bounds
        self.level_bounds = level_bounds
        self.slope_bounds = slope_bounds
        self.origin = origin

    hyperparameter_diffusion = numeric("diffusion", "The growth of the slope's variance")
    hyperparameter_level = numeric("level", "The variance of the level")
    hyperparameter_slope = numeric("slope", "The variance of the slope")

    def _values(self, X, Y):
        u, v = X - self.origin, Y - self.origin  # (n, 1), (1, p)
        low, high = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
        parts = {
            "diffusion": self.diffusion * (u * v > 0) * low**2 * (3 * high - low) / 6,
            "level": np.full(low.shape, float(self.level)),
            "slope": self.slope * (u * v),
        }
        return sum(parts.values()), lambda: parts

    def diag(self, X):
        """Return the diagonal of K(X, X), shape (n,)."""
        X = np.atleast_2d(X)
        check_one_column("LocalLinearTrend", X.shape[1])
        u = np.abs(X[:, 0] - self.origin)
        return self.level + self.slope * u**2 + self.diffusion * u**3 / 3

    def is_stationary(self):
        """It is not."""
        return False

    def __repr__(self):
        return (
            f"LocalLinearTrend(diffusion={self.diffusion:.3g}, level={self.level:.3g}, "
            f"slope={self.slope:.3g}, origin={self.origin:.6g})"
        )


def check_one_column(name: str, n_columns: int) -> None:
    """Raise ValueError unless there is one column, the domain of kernel ``name`` here."""
    if n_columns != 1:
        raise ValueError(
            f"{name} works on one column, X has {n_columns}; "
            f"choose a column with ActiveDims({name}(...), [column])."
        )
