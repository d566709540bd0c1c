r"""Relevance vectors under a likelihood that is not Gaussian, by Laplace's approximation.

Tipping and Faul (2003), section on classification. At given precisions s the posterior is taken as
:math:`N(\mu, H^{-1})` at its mode,

.. math:: \log p(y) \approx \sum_i w_i \log p(y_i \mid f_i) - \tfrac12 \mu^T S \mu
          + \tfrac12 \log|S| - \tfrac12 \log|H|, \qquad
          H = \Phi^T B \Phi + S,\; f = o + \Phi \mu,

with curvatures :math:`b_i = -w_i\, \partial^2 \log p(y_i \mid f_i)`. That is the evidence of a
regression with noise variances :math:`1/b_i` and targets
:math:`z = \Phi \mu + B^{-1} W \nabla \log p`, in which the steps of `steps` are taken: a
few for every refresh of mode and curvatures. As these move with s, a step may lower Laplace's
evidence although the regression's rises. Such steps are taken back and tried one at a time, then
passed over, so the evidence rises at every iteration.

Each column of Y is a problem of its own: one class against the rest.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import INNER_STEPS, MIN_CURVATURE, MODE_HALVINGS, MODE_STEPS
from skgp.inference.relevance.evidence import (
    Callback,
    RelevanceFit,
    choose_candidates,
    relevance_fit,
)
from skgp.inference.relevance.steps import DesignSource, Dictionary, EvidenceState
from skgp.inference.stochastic.basis import Array, KernelColumns, take_rows
from skgp.inference.weights.design import MEMORY_BUDGET, check_sample_weight
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det
from skgp.linalg.runtime import TensorState
from skgp.optim.stopping import StopRecorder


class OneVsRestPosterior(TensorState):
    """Latent functions of the columns, each a Gaussian on vectors of its own; offset (c,)."""

    def __init__(self, columns: list, offset: Tensor) -> None:
        self.columns = columns
        self.offset = offset.double()

    def mean(self, X: Tensor) -> Tensor:
        """Means of the latent functions, shape (p, c)."""
        return torch.stack([column.mean(X) for column in self.columns], dim=1) + self.offset.to(X)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments of the latent functions, each of shape (p, c)."""
        moments = [column.mean_and_variance(X) for column in self.columns]
        mean, variance = (torch.stack(parts, dim=1) for parts in zip(*moments, strict=True))
        return mean + self.offset.to(X), variance


@dataclass
class RelevanceClassifierFit:
    """Fitted one-against-rest relevance vector machines.

    Attributes
    ----------
    indices : Tensor of shape (r,)
        Rows that are a relevance vector of any column, increasing.
    posterior : OneVsRestPosterior
    columns : list of RelevanceFit
        The c problems; their noise variance is 1, of the regression that they were solved by.
    log_evidence : float
        Laplace's, summed over columns.
    n_iter : int
        Refreshes of the mode, summed over columns.
    converged : bool
    history : list of float
        Laplace's log evidence after every iteration, column by column.
    """

    indices: Tensor
    posterior: OneVsRestPosterior
    columns: list[RelevanceFit]
    log_evidence: float
    n_iter: int
    converged: bool
    history: list[float] = field(default_factory=list)


def fit_relevance_classifier(
    kernel: Any,
    X: Array,
    Y: Array,
    likelihood: Any,
    *,
    offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    candidates: int | Tensor | None = None,
    max_iter: int = 500,
    tol: float = 1e-2,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
) -> RelevanceClassifierFit:
    r"""Maximise Laplace's evidence of sparse kernel classifiers, one basis function at a time.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor or ndarray of shape (n, d)
    Y : Tensor or ndarray of shape (n, c)
        Labels -1 and 1 of one-against-rest problems.
    likelihood : Likelihood
        Log-concave, with ``log_prob(y, f)`` and ``derivatives(y, f)``.
    offset : Tensor of shape (c,), optional
        Constant part of the latent functions, say the log-odds of the base rates; 0 by default.
    row_weight : Tensor of shape (n,), optional
        Positive. A row of weight w counts as w rows.
    candidates, generator
        As in `fit_relevance`.
    max_iter : int, default=500
        Refreshes of mode and curvatures at most, a column.
    tol : float, default=1e-2
        Gain in log evidence, in nats, below which a step is not worth taking.
    callback : callable, optional
        ``callback(iteration, {"loss": -log_evidence, "n_vectors": ..., "column": ...})``, counted
        over all columns; True stops, and leaves the columns not reached yet at the offset.

    Returns
    -------
    RelevanceClassifierFit

    Raises
    ------
    ValueError
        If a row weight is not positive.

    Notes
    -----
    An iteration is O(n m r) for m candidates and r vectors. Memory: the dictionary within its
    budget, n r numbers, and O(m r).
    """
    Y = torch.as_tensor(Y, dtype=torch.float64)
    rows = choose_candidates(len(X), candidates, generator)
    X = take_rows(X, torch.arange(len(X)), torch.float64)
    basis = KernelColumns(kernel, X[rows])
    weight = Y.new_ones(len(Y)) if row_weight is None else row_weight.to(Y)
    check_sample_weight(weight, len(Y))
    offset = Y.new_zeros(Y.shape[1]) if offset is None else offset.to(Y)
    dictionary = Dictionary(basis, X, memory_budget=MEMORY_BUDGET)
    recorder = StopRecorder(callback)
    columns = []
    for c in range(Y.shape[1]):
        problem = LaplaceProblem(dictionary, Y[:, c], weight, float(offset[c]), likelihood)
        columns.append(_fit_column(problem, rows, max_iter, tol, recorder, c))
    return RelevanceClassifierFit(
        indices=torch.cat([column.indices for column in columns]).unique(),
        posterior=OneVsRestPosterior([column.posterior for column in columns], offset),
        columns=columns,
        log_evidence=sum(column.log_evidence for column in columns),
        n_iter=sum(column.n_iter for column in columns),
        converged=all(column.converged for column in columns),
        history=[value for column in columns for value in column.history],
    )


@dataclass(frozen=True)
class LaplaceMode:
    """The mode at given precisions."""

    indices: Tensor  # (r,)
    precision: Tensor  # (r,)
    mean: Tensor  # (r,)
    fitted: Tensor  # (n,), Phi mu, without the offset
    log_evidence: float


@dataclass(frozen=True)
class LaplaceProblem:
    """One column of labels over a dictionary."""

    dictionary: Dictionary
    y: Tensor  # (n,)
    weight: Tensor  # (n,)
    offset: float
    likelihood: Any

    def mode(self, indices: Tensor, precision: Tensor, start: Tensor) -> LaplaceMode:
        """Find the mode by Newton's method from `start` (r,); O(n r^2) a step."""
        Phi, mean = self.dictionary.columns(indices), start
        value = self._log_joint(Phi @ mean, mean, precision)
        for _ in range(MODE_STEPS):
            slope, curvature = self._derivatives(Phi @ mean)
            gradient = Phi.mT @ slope - precision * mean
            step = cho_solve(_factor(Phi, curvature, precision), gradient)
            # half the Newton decrement: the rise that is left
            if float(step @ gradient) <= 1e-13 * (1 + float(value.abs())):
                break
            previous = value
            mean, value = self._line_search(Phi, mean, step, precision, value)
            if value <= previous:
                break
        _, curvature = self._derivatives(Phi @ mean)
        log_det_H = log_det(_factor(Phi, curvature, precision)) if len(indices) else 0.0
        evidence = float(value + 0.5 * (precision.log().sum() - log_det_H))
        return LaplaceMode(indices, precision, mean, Phi @ mean, evidence)

    def source(self, mode: LaplaceMode) -> DesignSource:
        """Regression of unit noise variance that is the problem to second order at a mode."""
        slope, curvature = self._derivatives(mode.fitted)
        curvature = curvature.clamp_min(MIN_CURVATURE)
        return DesignSource(self.dictionary, mode.fitted + slope / curvature, curvature)

    def _log_joint(self, fitted: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
        log_prob = self.likelihood.log_prob(self.y, self.offset + fitted)
        return self.weight @ log_prob - 0.5 * (precision @ mean.square())

    def _derivatives(self, fitted: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted slope and curvature of the log-likelihood, shapes (n,)."""
        first, second = self.likelihood.derivatives(self.y, self.offset + fitted)
        return self.weight * first, -self.weight * second

    def _line_search(
        self, Phi: Tensor, mean: Tensor, step: Tensor, precision: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Halve a step until it raises the log joint density; stay where none does."""
        for halving in range(MODE_HALVINGS):
            proposal = mean + 0.5**halving * step
            new = self._log_joint(Phi @ proposal, proposal, precision)
            if new >= value:
                return proposal, new
        return mean, value


def _fit_column(
    problem: LaplaceProblem,
    rows: Tensor,
    max_iter: int,
    tol: float,
    callback: StopRecorder,
    column: int,
) -> RelevanceFit:
    """Alternate between the mode and steps at its curvatures."""
    none = problem.y.new_zeros(0)
    mode = problem.mode(none.long(), none, none)
    state = EvidenceState(problem.source(mode), 1.0)
    passed_over = torch.zeros(len(state.S), dtype=torch.bool)
    history: list[float] = []
    n_steps, converged, stop = INNER_STEPS, False, callback.stopped
    while len(history) < max_iter and not stop and not converged:
        proposal, first = _inner_steps(state, n_steps, tol, passed_over)
        converged = first is None
        if first is not None:
            new = problem.mode(proposal.indices, proposal.precision, proposal.mean)
            if new.log_evidence > mode.log_evidence:
                mode = new
                state = EvidenceState(problem.source(mode), 1.0, mode.indices, mode.precision)
                passed_over[:], n_steps = False, INNER_STEPS
            elif n_steps > 1:
                n_steps = 1
            else:
                passed_over[first] = True
        history.append(mode.log_evidence)
        info = {"loss": -mode.log_evidence, "n_vectors": len(mode.indices), "column": column}
        stop = callback(len(history), info)
    fit = relevance_fit(state, problem.dictionary.basis, rows, history, converged)
    fit.log_evidence = mode.log_evidence
    return fit


def _inner_steps(
    state: EvidenceState, n_steps: int, tol: float, passed_over: Tensor
) -> tuple[EvidenceState, int | None]:
    """Take up to `n_steps` steps on a copy; also return the first's function, None if none."""
    # Steps replace the tensors of a state and never write into them.
    proposal, first = copy.copy(state), None
    for _ in range(n_steps):
        move = proposal.best_move(passed_over)
        if move.gain <= tol:
            break
        first = move.index if first is None else first
        proposal.apply(move)
    return proposal, first


def _factor(Phi: Tensor, curvature: Tensor, precision: Tensor) -> Tensor:
    """Cholesky factor of ``Phi' B Phi + S``."""
    H = Phi.mT @ (curvature[:, None] * Phi) + torch.diag(precision)
    return jittered_cholesky(H).factor if len(precision) else H
