r"""Columns with long tails, on a scale where one length scale suits all of their range.

Of counts, shares, amounts and durations most rows lie within a small part of a column's range: a
length scale that tells these apart knows nothing of the rest, and one for the tail is blind to
them. Let u be a column less its median, in units of the median deviation that is not 0. The kernel
sees

.. math:: \psi(u) = \operatorname{sign}(u) \, \frac{(1 + |u|)^p - 1}{p},

with an exponent p for either side, :math:`\log(1 + |u|)` where it is 0: 2 - p and p for columns
with one tail (Yeo and Johnson [1]_), or one p < 1 for two (John and Draper [2]_); those that make
the column most like a normal distribution. Rows far off stay apart. Whether rows are predicted
better then, their neighbours tell. Snoek et al. [3]_ learn such a warping beside the length scales.

References
----------
.. [1] Yeo and Johnson (2000), A new family of power transformations to improve normality or
   symmetry.
.. [2] John and Draper (1980), An alternative family of transformations.
.. [3] Snoek, Swersky, Zemel and Adams (2014), Input warping for Bayesian optimization of
   non-stationary functions.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from sklearn.base import is_classifier
from sklearn.utils import gen_batches
from sklearn.utils.validation import check_is_fitted

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import BaseGP, arrays, to_tensor
from skgp.estimators._kernels import default_kernels
from skgp.estimators._parameters import Auto, StrOptions
from skgp.estimators._reduction import distinct_rows, left_out_losses
from skgp.kernels.scales import varies
from skgp.learning.hyperparameters import left_out
from skgp.learning.selection import choose, improves
from skgp.linalg import NotPositiveDefiniteError


@dataclass(frozen=True)
class Warp:
    """Powers of the columns, of variance 1 over the rows that they were learned from."""

    median: np.ndarray  # (d,)
    unit: np.ndarray  # (d,)
    powers: np.ndarray  # (2, d), below and above the median; 1 and 1 are the column itself
    std: np.ndarray  # (d,)

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Rows X (n, d) as the kernel sees them."""
        warped = np.empty(X.shape)
        for rows in gen_batches(len(X), defaults.SCATTER_ROWS):
            warped[rows] = _psi((X[rows] - self.median) / self.unit, *self.powers) / self.std
        return warped

    def slopes(self, warped: np.ndarray) -> np.ndarray:
        r"""Derivatives (n, d) in each column, :math:`(1 + |u|)^{p - 1}`, at rows as warped."""
        p, size = np.where(warped < 0, *self.powers), np.abs(warped * self.std)
        logs = np.where(p == 0, size, np.log1p(p * size) / np.where(p == 0, 1.0, p))
        return np.exp((p - 1) * logs) / (self.unit * self.std)


def _psi(U: np.ndarray, below: np.ndarray | float, above: np.ndarray | float) -> np.ndarray:
    """Powers (n, d) of columns U (n, d), of exponents (d,) or one for all, finite as inputs are."""
    p, logs = np.where(U < 0, below, above), np.log1p(np.abs(U))
    grown = np.expm1(np.minimum(p * logs, np.log(defaults.LARGEST_INPUT["float64"])))
    return np.sign(U) * np.where(p == 0, logs, grown / np.where(p == 0, 1.0, p))


def learn_warp(X: np.ndarray) -> Warp:
    """The powers, in tenths, under which columns of rows X (n, d) are likeliest normal.

    ``O(n d)`` some thirty times.
    """
    median = np.median(X, axis=0)
    away = np.abs(X - median)
    away[~varies(away, median)] = np.nan
    constant = np.isnan(away).all(axis=0)
    away[:, constant] = 1.0
    unit = np.nanmedian(away, axis=0)
    U = (X - median) / unit
    tenths = np.linspace(0.0, 2.0, 21)
    pairs = np.concatenate([np.stack([2 - tenths, tenths], 1), np.stack([tenths[:10]] * 2, 1)])
    stds = np.stack([_psi(U, *pair).std(axis=0) for pair in pairs])
    stds[:, constant] = 1.0
    logs = np.log1p(np.abs(U))  # the slope is (1 + |u|)^(p - 1)
    log_slope = (pairs - 1) @ np.stack([(logs * (U < 0)).mean(0), (logs * (U >= 0)).mean(0)])
    best = np.argmax(log_slope - np.log(stds), axis=0)
    return Warp(median, unit, pairs[best].T, stds[best, np.arange(len(best))])


def powers_are_likelier(warp: Warp, X: np.ndarray, y: np.ndarray) -> bool:
    """Whether numbers y (n,) or (n, t), each left out, are likelier by a process of the powers.

    Neighbours know nothing of variances: where noise grows along a tail that is shortened, errors
    may fall and densities with them. Of some hundred rows, none given twice.
    """
    columns = y.reshape(len(X), -1).T
    rows = np.random.RandomState(0).permutation(distinct_rows(np.column_stack([X, *columns])))
    kept = rows[: defaults.LOG_ROWS[1]]
    X, scales = X[kept], (X[kept], warp(X[kept]))
    total = np.zeros((2, len(X)))
    for column in columns:
        if np.ptp(column[kept]) > 0:
            data = [Data(to_tensor(Z), to_tensor(column[kept])) for Z in scales]
            try:
                total += [left_out(default_kernels(arrays(d)[0])[0], d, False)[0] for d in data]
            except NotPositiveDefiniteError:
                return False
    return improves(total[1], total[0])


def choose_warp(X: np.ndarray, targets: np.ndarray) -> Warp | None:
    """The powers of the columns of X (n, d) if neighbours predict clearly better then, else None.

    Better the ranks of the `targets` (n,) or (n, c), which outliers do not decide; and better than
    in the units of the columns and than in units of their standard deviations. Copies of a row
    would predict each other on any scale, and count once.
    """
    rows = np.random.RandomState(0).permutation(distinct_rows(X))[: defaults.SPREAD_CANDIDATES]
    if len(rows) <= 2 * defaults.SPREAD_NEIGHBORS:
        return None
    X, ranks = X[rows], rankdata(targets[rows].reshape(len(rows), -1), axis=0) / len(rows)
    warp, std = learn_warp(X[: defaults.SPREAD_COMPARED]), X.std(axis=0)
    scaled = (X - X.mean(axis=0)) / np.where(std > 0, std, 1.0)
    losses = [left_out_losses(Z, ranks) for Z in (X, scaled, warp(X))]
    clear = choose(losses, n_errors=defaults.SPREAD_ERRORS, least_effect=0.0) == 2
    return warp if clear else None


class WarpedInputs(BaseGP):
    """An estimator whose kernel may see powers of the columns of X.

    Parameters
    ----------
    warp_inputs : bool or "auto", default="auto"
        Whether the kernel sees powers of the columns that shorten their tails (`input_powers_`).
        "auto" does with ``kernel=None`` where observations are clearly better predicted by their
        neighbours then and numbers left out are likelier; not of streams, nor of rows in blocks.

    Attributes
    ----------
    input_powers_ : ndarray of shape (2, d) or None
        Powers of the columns below and above their medians, 1 for the column itself, 0 for the
        logarithm; length scales of ``kernel_`` and inducing points are then those of the powers.
        None where the kernel sees X as it is.
    """

    _parameter_constraints = {"warp_inputs": ["boolean", StrOptions({"auto"})]}

    warp_inputs: bool | Auto
    _warp: Warp | None = None

    @property
    def input_powers_(self) -> np.ndarray | None:
        """Powers (2, d) of the columns that the kernel sees; None where it sees X as it is."""
        check_is_fitted(self)
        return None if self._warp is None else self._warp.powers

    def _begin_fit(self, *, informed: bool = True) -> None:
        super()._begin_fit(informed=informed)
        if not self._goes_on:
            self._warp = None

    def _learn_warp(self, X: np.ndarray, targets: np.ndarray, *, chooses: bool) -> None:
        if self._goes_on:
            return
        if self.warp_inputs == "auto":
            may = chooses and self.kernel is None and self._informed
            warp = choose_warp(X, targets) if may else None
            numbers = not is_classifier(self)
            if warp is not None and numbers and not powers_are_likelier(warp, X, targets):
                warp = None
            self._warp = warp
        elif self.warp_inputs:
            self._warp = learn_warp(X)

    def _warped(self, X: np.ndarray) -> np.ndarray:
        return X if self._warp is None else self._warp(X)

    def _in_units_of_columns(self, X: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        if self._warp is None:
            return slopes
        return slopes * self._warp.slopes(X).reshape(len(X), *(slopes.ndim - 2) * (1,), -1)

    def _latent_gradients(self, X: np.ndarray) -> tuple[np.ndarray, ...]:
        mean, var, *slopes = super()._latent_gradients(X)
        return mean, var, *(self._in_units_of_columns(X, s) for s in slopes)
