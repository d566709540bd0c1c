"""Kernel classes that scikit-learn lacks, written as scikit-learn kernels."""

from __future__ import annotations

import numpy as np
from sklearn.gaussian_process.kernels import (
    Hyperparameter,
    Kernel,
    NormalizedKernelMixin,
    StationaryKernelMixin,
)

__all__ = ["ActiveDims", "Cosine"]


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
                f"got {self.dims!r}."
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


class Cosine(StationaryKernelMixin, NormalizedKernelMixin, Kernel):
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

    @property
    def hyperparameter_period(self):
        """The period as a scikit-learn hyper-parameter."""
        return Hyperparameter("period", "numeric", self.period_bounds)

    def __call__(self, X, Y=None, eval_gradient=False):
        """Return K(X, Y) and, for Y=None, optionally its gradient with respect to theta."""
        X = np.atleast_2d(X)
        if Y is not None and eval_gradient:
            raise ValueError("Gradient can only be evaluated when Y is None.")
        Y = X if Y is None else np.atleast_2d(Y)
        check_one_column("Cosine", X.shape[1])
        angle = 2 * np.pi * np.abs(X - Y.T) / self.period  # (n, p), radians
        K = np.cos(angle)
        if not eval_gradient:
            return K
        if self.hyperparameter_period.fixed:
            return K, np.empty((*K.shape, 0))
        # d cos(angle) / d log(period) = -sin(angle) * (-angle)
        return K, (angle * np.sin(angle))[:, :, None]

    def __repr__(self):
        return f"Cosine(period={self.period:.3g})"


def check_one_column(name: str, n_columns: int) -> None:
    """Raise ValueError unless there is one column, the domain of kernel ``name`` here."""
    if n_columns != 1:
        raise ValueError(
            f"{name} works on one column, X has {n_columns}; "
            f"choose a column with ActiveDims({name}(...), [column])."
        )
