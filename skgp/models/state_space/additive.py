r"""Additive Gaussian processes: a state-space process for every column (section 4.3 of [1]_).

.. math:: y_i \sim p(y \mid \eta_i), \qquad \eta_i = o + \sum_{j=1}^c f_j(x_{ij}), \qquad
          f_j \sim GP(0, k_j) \text{ independent.}

===================  ==========================================  ================================
paper                here                                        file
===================  ==========================================  ================================
:math:`z^{(i)}`      bins: the distinct values where few         :mod:`.binning`
minibatches          sufficient statistics, exact                :mod:`.additive_tables`
natural gradients    closed form, all components at once         :mod:`.additive_inference`
Adam                 L-BFGS on the bound with q at its best      this one
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
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from skgp.kernels.sde import StateSpace, state_space
from skgp.likelihoods import Likelihood
from skgp.models.dlm.families import Family, GaussianFamily
from skgp.models.state_space.additive_inference import AdditivePosterior
from skgp.models.state_space.additive_objectives import (
    GaussianRows,
    Objective,
    Rows,
    VariationalRows,
)
from skgp.models.state_space.additive_state import AdditiveState
from skgp.models.state_space.additive_tables import AdditiveStatistics
from skgp.models.state_space.binning import Bins, make_bins
from skgp.models.state_space.state import SeriesState
from skgp.training.lbfgs import minimize_lbfgs

__all__ = ["fit_additive", "fit_additive_statistics"]

Callback = Callable[[int, dict], bool | None]

_FAR = 10.0  # beyond which log-odds and log-rates of standardised data do not lie
_POSTERIORS = ("mean_field", "joint")


def fit_additive(
    kernels: Sequence[Any],
    X: Tensor,
    y: Tensor,
    weight: Tensor | None,
    family: Family,
    *,
    posterior: str = "mean_field",
    offset: float | None = None,
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
    family : Family
        Of the likelihood.
    posterior : {"mean_field", "joint"}, default="mean_field"
        A product over the components, or exact.
    offset : float, optional
        Prior mean of the sum: by default that with which a constant fits y best.
    parameters : Tensor of shape (p,), optional
        Of the likelihood, to start from.
    optimise : bool, default=True
        Whether hyper-parameters move within their bounds.
    bins : Bins, optional
        Instead of those of X.
    n_bins, most_bins : int
        Of a column and of all: see `make_bins`. A fit costs O(most_bins^3) an iteration.
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
    O(n c^2) once for Gaussian noise, O(n c) (joint: O(n c^2)) for every step of the sites of
    another likelihood.
    """
    _check(kernels, X.shape[1], posterior)
    bins = make_bins(X, weight, n_bins=n_bins, most_bins=most_bins) if bins is None else bins
    search = _Search(kernels, family, parameters, optimise, max_iter, tol, callback)
    joint = posterior == "joint"
    if isinstance(family, GaussianFamily):
        statistics = AdditiveStatistics.empty(bins, origin=float(y.mean()))
        statistics.add(X, y, weight)
        offset = statistics.mean if offset is None else offset
        return search(GaussianRows(statistics, offset, joint), offset)
    if offset is None:
        likelihood = family.make(family.initial(y) if parameters is None else parameters)
        offset = _best_constant(likelihood, y, weight)
    rows = Rows(bins, bins.index(X), y, weight, offset)
    return search(VariationalRows(rows, family, joint), offset)


def fit_additive_statistics(
    kernels: Sequence[Any],
    statistics: AdditiveStatistics,
    family: GaussianFamily,
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
    search = _Search(kernels, family, parameters, optimise, max_iter, tol, callback)
    return search(GaussianRows(statistics, offset, posterior == "joint"), offset)


@dataclass(frozen=True)
class _Search:
    """The hyper-parameters of all components and of the likelihood, by L-BFGS."""

    kernels: Sequence[Any]
    family: Family
    parameters: Tensor | None
    optimise: bool
    max_iter: int
    tol: float
    callback: Callback | None

    def __call__(self, objective: Objective, offset: float) -> AdditiveState:
        kernels, forms = list(self.kernels), [state_space(kernel) for kernel in self.kernels]
        start = {str(j): torch.from_numpy(kernel.theta.copy()) for j, kernel in enumerate(kernels)}
        like = objective.counts
        start["likelihood"] = (
            self.family.initial(like) if self.parameters is None else self.parameters
        )
        n_iter, history = 0, []
        if self.optimise and self.max_iter and sum(map(len, start.values())):
            found = minimize_lbfgs(
                lambda leaves: _loss(leaves, forms, objective),
                start,
                max_iter=self.max_iter,
                tol=self.tol,
                bounds=self._bounds(like),
                callback=self.callback,
            )
            start, n_iter = found.parameters, found.n_iter
            history = [-loss for loss in found.history]
            kernels = [
                kernel.clone_with_theta(start[str(j)].numpy()) for j, kernel in enumerate(kernels)
            ]
        dynamics = [form.at(form.parameters(start[str(j)])) for j, form in enumerate(forms)]
        last = objective(dynamics, start["likelihood"])
        series, shares, centre = _series(kernels, last.posterior, objective)
        return AdditiveState(
            series,
            offset + centre,
            shares,
            last.posterior.coupling if last.posterior.joint else None,
            start["likelihood"],
            self.family.noise_variance(start["likelihood"]),
            objective.bins.spread,
            last.value,
            n_iter,
            history,
        )

    def _bounds(self, like: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        boxes = {"likelihood": self.family.box(like)}
        for j, kernel in enumerate(self.kernels):
            low, high = torch.tensor(kernel.bounds, dtype=torch.float64).reshape(-1, 2).unbind(1)
            boxes[str(j)] = low, high
        return boxes


def _loss(leaves: dict[str, Tensor], forms: Sequence[StateSpace], objective: Objective) -> Tensor:
    """Negative evidence a row, with its gradient as a plane in torch's graph."""
    inputs = [form.parameters(leaves[str(j)]) for j, form in enumerate(forms)]
    likelihood = leaves["likelihood"]
    with torch.no_grad():
        dynamics = [form.at(p.detach()) for form, p in zip(forms, inputs, strict=True)]
        found = objective(dynamics, likelihood.detach())
        slopes = found.posterior.gradients()
    plane = (likelihood - likelihood.detach()) @ found.likelihood_gradient
    for p, slope in zip(inputs, slopes, strict=True):
        plane = plane + (p - p.detach()) @ slope
    return -(found.value + plane) / objective.total


def _series(
    kernels: Sequence[Any], q: AdditivePosterior, objective: Objective
) -> tuple[tuple[SeriesState, ...], Tensor, float]:
    """The components about their means over the rows, the bins' shares, and those means' sum."""
    shares, series, total = objective.counts / objective.total, [], 0.0
    for kernel, part in zip(kernels, objective.bins.slices, strict=True):
        centre = float(shares[part] @ q.mean[part])
        times, beta, weight = objective.bins.values[part], q.beta[part], q.weight[part]
        series.append(SeriesState(kernel, times, beta, weight, -centre))
        total += centre
    return tuple(series), shares, total


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
