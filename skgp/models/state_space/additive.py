r"""Additive Gaussian processes: a state-space process for every column (section 4.3 of [1]_).

.. math:: y_i \sim p(y \mid \eta_i), \qquad \eta_i = o + \sum_{j=1}^c f_j(x_{ij}), \qquad
          f_j \sim GP(0, k_j) \text{ independent.}

===================  ==========================================  ================================
paper                here                                        file
===================  ==========================================  ================================
:math:`z^{(i)}`      bins: the distinct values where few         :mod:`.binning`
minibatches          sufficient statistics, exact                :mod:`.tables`
natural gradients    closed form, all components at once         :mod:`.inference`
Adam                 L-BFGS on the bound with q at its best      :mod:`.search`
(none)               few rows: in their own space, no bins       :mod:`.rows`
===================  ==========================================  ================================

Deviations
----------
The paper takes natural and Adam steps in turn, of a size to be chosen, with minibatches of the
rows. Here the rows are tabulated once: for Gaussian noise the bound, its maximum over q and the
gradient in all hyper-parameters no longer depend on their number. ``posterior="mean_field"`` is the
paper's product of processes; its means are exact, its variances too small and its bound low
by as much as the columns are correlated. ``posterior="joint"`` is the exact posterior (for other
likelihoods the best Gaussian) of the binned model, at about three times the cost.

References
----------
.. [1] Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), Doubly sparse variational
   Gaussian processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from skgp.inference.markov.additive.binning import Bins, make_bins
from skgp.inference.markov.additive.state import AdditiveState
from skgp.inference.markov.additive.tables import AdditiveStatistics
from skgp.learning.markov.additive_objectives import VariationalRows
from skgp.learning.markov.additive_search import AdditiveSearch
from skgp.likelihoods import Likelihood
from skgp.models.state_space.binned import BinnedGaussian, BinnedRows
from skgp.models.state_space.rows import DenseGaussian, make_rows

__all__ = ["fit_additive", "fit_additive_statistics"]

Callback = Callable[[int, dict], bool | None]

_FAR = 10.0  # beyond which log-odds and log-rates of standardised data do not lie
_POSTERIORS = ("auto", "mean_field", "joint")
_FEW_ROWS = 3000  # up to which exact inference in the space of the rows is thought of


def fit_additive(
    kernels: Sequence[Any],
    X: Tensor,
    y: Tensor,
    weight: Tensor | None,
    family: Likelihood,
    *,
    posterior: str = "mean_field",
    offset: float | None = None,
    log_exposure: Tensor | None = None,
    parameters: Tensor | None = None,
    optimise: bool = True,
    bins: Bins | None = None,
    n_bins: int = 512,
    most_bins: int = 2048,
    max_iter: int = 100,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> AdditiveState:
    """Fit an additive model.

    Parameters
    ----------
    kernels : sequence of Kernel
        One a column, without noise; the search starts from their hyper-parameters.
    X : Tensor of shape (n, c)
        float64, finite.
    y : Tensor of shape (n,)
    weight : Tensor of shape (n,) or None
        A weight of 2 counts as two rows.
    family : Likelihood
        Of the likelihood.
    posterior : {"auto", "mean_field", "joint"}, default="mean_field"
        A product over the components, or exact. "auto" is exact where the noise is Gaussian or
        there are at most 3000 rows; the state tells which it was.
    log_exposure : Tensor of shape (n,), optional
        Of counts; wants an `offset`.
    offset : float, optional
        Prior mean of the sum: by default that with which a constant fits y best.
    parameters : Tensor of shape (p,), optional
        Of the likelihood, to start from.
    optimise : bool, default=True
        Whether hyper-parameters move within their bounds.
    bins : Bins, optional
        Instead of those of X; then rows are put in bins, however few.
    n_bins, most_bins : int
        Of a column and of all: see `make_bins`. A fit in bins costs O(most_bins^3) an iteration.
    max_iter : int, default=100
        Iterations of the search.
    tol : float, default=1e-6
        Least gain of an iteration, in nats a row.
    callback : callable, optional
        Called as ``callback(iteration, {"loss": ...})``, the loss being the negative evidence a
        row; True ends the search.

    Returns
    -------
    AdditiveState

    Raises
    ------
    ValueError
        If `posterior` is unknown, the number of kernels is not that of the columns, or a kernel
        has no state-space form.

    Notes
    -----
    In bins: O(n c^2) once for Gaussian noise, O(n c) (joint: O(n c^2)) for every step of the sites
    of another likelihood. Up to 3000 rows of which no more are distinct than there are bins, the
    exact posterior is found in the space of the rows, in O(n^2 (n + c)) an iteration.
    """
    _check(kernels, X.shape[1], posterior)
    search = AdditiveSearch(kernels, family, parameters, optimise, max_iter, tol, callback)
    gaussian, few = family.is_gaussian, len(X) <= _FEW_ROWS
    joint = posterior == "joint" or (posterior == "auto" and (gaussian or few))
    if offset is None:
        offset = _prior_mean(family, parameters, y, weight)
    given = bins
    bins = make_bins(X, weight, n_bins=n_bins, most_bins=most_bins) if bins is None else bins
    if joint and few and given is None:
        rows = make_rows(X, y, weight, offset, log_exposure)
        if rows.x.shape[1] <= len(bins.values):
            return search(DenseGaussian(rows) if gaussian else VariationalRows(rows, family), y)
    if gaussian:
        statistics = AdditiveStatistics.empty(bins, origin=float(y.mean()))
        statistics.add(X, y, weight)
        return search(BinnedGaussian(statistics, offset, joint), y)
    binned = BinnedRows(bins, bins.index(X), y, weight, offset, joint, log_exposure)
    return search(VariationalRows(binned, family), y)


def fit_additive_statistics(
    kernels: Sequence[Any],
    statistics: AdditiveStatistics,
    family: Likelihood,
    *,
    posterior: str = "mean_field",
    offset: float | None = None,
    parameters: Tensor | None = None,
    optimise: bool = True,
    max_iter: int = 100,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> AdditiveState:
    """Fit an additive model with Gaussian noise to the statistics of rows that are gone.

    Exactly what `fit_additive` finds from all the rows at once in the same bins.

    Parameters
    ----------
    statistics : AdditiveStatistics
        Of at least one row.
    kernels, family, posterior, offset, parameters, optimise, max_iter, tol, callback
        See `fit_additive`.

    Returns
    -------
    AdditiveState
    """
    _check(kernels, len(statistics.bins.sizes), posterior)
    offset = statistics.mean if offset is None else offset
    search = AdditiveSearch(kernels, family, parameters, optimise, max_iter, tol, callback)
    joint = posterior in ("auto", "joint")
    return search(BinnedGaussian(statistics, offset, joint), statistics.sums)


def _prior_mean(
    family: Likelihood, parameters: Tensor | None, y: Tensor, weight: Tensor | None
) -> float:
    """The value of the sum with which a constant fits best."""
    if family.is_gaussian:
        return float(y.mean() if weight is None else weight @ y / weight.sum())
    likelihood = family.with_parameters(family.initial(y) if parameters is None else parameters)
    return _best_constant(likelihood, y, weight)


def _best_constant(likelihood: Likelihood, y: Tensor, weight: Tensor | None) -> float:
    """The value of f at which the rows are most probable if it is the same for all."""
    values, place = y.unique(return_inverse=True)
    mass = torch.bincount(place, weight, len(values)).to(y)

    def loss(f: float) -> float:
        return -float(mass @ likelihood.log_prob(values, torch.full_like(values, f)).detach())

    modes = likelihood.mode(values).clamp(-_FAR, _FAR)
    low, high = float(modes.min()), float(modes.max())
    if low == high:
        return low
    return float(minimize_scalar(loss, bounds=(low, high), method="bounded").x)


def _check(kernels: Sequence[Any], n_columns: int, posterior: str) -> None:
    if posterior not in _POSTERIORS:
        raise ValueError(f"posterior must be one of {_POSTERIORS}; got {posterior!r}.")
    if len(kernels) != n_columns:
        raise ValueError(
            f"kernels must hold one kernel for each of the {n_columns} columns of X; got "
            f"{len(kernels)}."
        )
