r"""How strong the prior is, by rows held out.

Hyper-parameters from a small subset or from labels taken as numbers say how f correlates, and less
well how large it is: more rows support a larger f. And where every row is an inducing point, the
divergence of weight M / H restrains q more than predictions need. Both are one-dimensional and
cheap to vary, for :math:`k \to s k` leaves a, the largest part of the work, as it is:

.. math:: K_n^{-1} \to K_n^{-1} / s, \qquad v \to s v, \qquad
          \log |K_n| \to \log |K_n| + H \log s,

and a factor of kappa multiplies the divergence. First kappa falls by factors of ten, then the
amplitude moves by factors of three, while predictions improve; of what was tried, the nearest to
the start is chosen that is no worse than the best, beyond two standard errors and one
(:mod:`skgp.learning.selection`). Classes, each against the rest, are coupled as suits each
trial best (:mod:`skgp.learning.coupling`): the less the divergence holds q, the more its classes
repeat each other, and judged uncoupled it would be held less than predictions need.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from skgp.inference.neighbors.assembly import RowWeights, compressed_rows
from skgp.inference.neighbors.natural import fit_sites
from skgp.inference.neighbors.system import LocalSystem, Posterior
from skgp.learning.coupling import best_coupling, coupled_log_probabilities
from skgp.learning.selection import choose
from skgp.likelihoods import Bernoulli
from skgp.likelihoods.base import Likelihood

__all__ = ["PriorScale", "choose_prior", "negative_log_score", "rescaled"]

Callback = Callable[[int, dict], bool | None]

_STEP, _KL_STEP = 3.0, 0.1
_MOST = 5  # steps either way
_FIRST_ITER, _ITER = 16, 10  # natural-gradient steps without and with a warm start
_CG_ITER, _CG_TOL = 15, 3e-3
_TOL = 1e-3  # of the bound
_N_ERRORS = 2.0  # by which kappa must improve predictions: a rare class has few rows held out


@dataclass(frozen=True)
class PriorScale:
    """What was chosen, as factors of what there was.

    Attributes
    ----------
    amplitude : float
        Of the kernel.
    kl_factor : float
        Of the KL weight.
    score : float
        Mean negative log predictive density of the rows held out, in nats.
    q : Posterior
        Learned from the other rows.
    predicted : Posterior
        Means of f at the rows held out, less the prior means, and what q adds to their variances.
    coupling : float
        Of several classes.
    history : list of float
        All scores, in the order tried.
    """

    amplitude: float
    kl_factor: float
    score: float
    q: Posterior
    predicted: Posterior
    coupling: float = 0.0
    history: list[float] = field(default_factory=list)


def choose_prior(
    system: LocalSystem,
    Y: Tensor,
    held_out: RowWeights,
    Y_held_out: Tensor,
    likelihood: Likelihood,
    offset: Tensor,
    *,
    held_out_likelihood: Likelihood | None = None,
    weight: Tensor | None = None,
    amplitudes: tuple[float, float] = (0.0, float("inf")),
    kl_weight: float = 1.0,
    callback: Callback | None = None,
) -> PriorScale:
    """Choose amplitude and KL weight.

    Parameters
    ----------
    system : LocalSystem
        Of the rows learned from.
    Y : Tensor of shape (n, c)
    held_out : RowWeights
        Of other rows, for the same inducing points.
    Y_held_out : Tensor of shape (p, c)
    likelihood : Likelihood
        Of the rows learned from.
    offset : Tensor of shape (c,)
    held_out_likelihood : Likelihood, optional
        Of the others; the same by default.
    weight : Tensor of shape (p,), optional
        Of the rows held out.
    amplitudes : (float, float)
        Least and greatest factor of the kernel.
    kl_weight : float
        Of the system; it may fall to 1, the paper's.
    callback : callable, optional
        Called after each fit; True ends the walk.

    Returns
    -------
    PriorScale
    """
    judge = likelihood if held_out_likelihood is None else held_out_likelihood
    search = _Search(system, Y, held_out, Y_held_out, likelihood, judge, offset, weight, callback)
    factors = _ladder(_KL_STEP, 1 / kl_weight)
    search.walk([(1.0, factor) for factor in factors], n_errors=_N_ERRORS)
    kl_factor = search.trial.kl_factor
    low, high = amplitudes
    ups = [(amplitude, kl_factor) for amplitude in _ladder(_STEP, high)]
    downs = [(amplitude, kl_factor) for amplitude in _ladder(1 / _STEP, low)]
    if not search.walk(ups):
        search.walk(downs)
    return search.best()


@dataclass(frozen=True)
class _Trial:
    """A prior, the fit under it, and what it says of the rows held out."""

    amplitude: float
    kl_factor: float
    q: Posterior
    mean: Tensor
    var: Tensor
    losses: Tensor
    coupling: float


def _ladder(step: float, end: float) -> list[float]:
    """Up to `_MOST` powers of `step`, of which none is beyond `end`; and `end` if that is near."""
    end = min(max(end, step**-20), step**20) if step > 1 else min(max(end, step**20), step**-20)
    length = math.log(end) / math.log(step)
    if length < 1e-9:
        return []
    rungs = [step**i for i in range(1, _MOST + 1) if i <= length + 1e-9]
    return rungs if len(rungs) == _MOST or length - len(rungs) < 1e-9 else [*rungs, end]


class _Search:
    """Fits for one prior after another, each from where the best so far ended."""

    def __init__(
        self, system, Y, held_out, Y_held_out, likelihood, judge, offset, weight, callback
    ):
        self.system, self.Y = system, Y
        self.held_out, self.Y_held_out, self.weight = held_out, Y_held_out, weight
        self.likelihood, self.judge = likelihood, judge
        self.offset, self.callback = offset, callback
        self.trial = self._fit(1.0, 1.0, None)
        self.history = [self._mean(self.trial)]
        self.stopped = False

    def walk(self, priors: list[tuple[float, float]], n_errors: float = 1.0) -> bool:
        """Try one after another while predictions improve; whether any but the first is chosen."""
        trials = [self.trial]
        for amplitude, kl_factor in priors:
            if self.stopped:
                break
            trial = self._fit(amplitude, kl_factor, trials[-1].q)
            self.history.append(self._mean(trial))
            if self.callback is not None:
                self.stopped = bool(self.callback(len(self.history), {"loss": self.history[-1]}))
            if not self._mean(trial) < self._mean(trials[-1]):
                break
            trials.append(trial)
        losses = [trial.losses.double() for trial in trials]
        chosen = choose(losses, weight=self.weight, n_errors=n_errors)
        self.trial = trials[chosen]
        return chosen > 0

    def best(self) -> PriorScale:
        """What was chosen."""
        trial = self.trial
        return PriorScale(
            trial.amplitude,
            trial.kl_factor,
            self._mean(trial),
            trial.q,
            Posterior(trial.mean - self.offset, self.held_out.project_squares(trial.q.var)),
            trial.coupling,
            self.history,
        )

    def _fit(self, amplitude: float, kl_factor: float, start: Posterior | None) -> _Trial:
        fit = fit_sites(
            rescaled(self.system, amplitude, kl_factor),
            self.Y,
            self.likelihood,
            offset=self.offset,
            start=start,
            max_iter=_FIRST_ITER if start is None else _ITER,
            tol=_TOL,
            cg_tol=_CG_TOL,
            cg_max_iter=_CG_ITER,
        )
        mean = self.offset + self.held_out.project(fit.q.mean)
        var = amplitude * self.held_out.variance[:, None]
        var = var + self.held_out.project_squares(fit.q.var)
        coupling = self._coupling(mean, var)
        losses = negative_log_score(self.judge, self.Y_held_out, mean, var, coupling)
        return _Trial(amplitude, kl_factor, fit.q, mean, var, losses, coupling)

    def _coupling(self, mean: Tensor, var: Tensor) -> float:
        if self.Y.shape[1] == 1:
            return 0.0
        moments = mean.cpu().double(), var.cpu().double()
        weight = None if self.weight is None else self.weight.cpu().double()
        likelihood = cast(Bernoulli, self.likelihood)  # others have one column
        return best_coupling(likelihood, self.Y_held_out.cpu().double(), *moments, weight)

    def _mean(self, trial: _Trial) -> float:
        weight = torch.ones_like(trial.losses) if self.weight is None else self.weight
        return float((weight @ trial.losses) / weight.sum())


def negative_log_score(
    likelihood: Likelihood, Y: Tensor, mean: Tensor, var: Tensor, coupling: float = 0.0
) -> Tensor:
    """Negative log predictive density of each row (n,), in nats.

    Of several columns, each a class against the rest, that of the true class, the classes coupled
    by this exponent.
    """
    if Y.shape[1] == 1:
        return -likelihood.log_predictive(Y, mean, var)[:, 0]
    log_p = coupled_log_probabilities(cast(Bernoulli, likelihood), mean, var, coupling)
    return -log_p.gather(1, Y.argmax(1, keepdim=True))[:, 0]


def rescaled(system: LocalSystem, amplitude: float, kl_factor: float) -> LocalSystem:
    """The system for a kernel times `amplitude` and a KL weight times `kl_factor`; shares A."""
    prior = system.prior
    Q = prior.matrix
    values = Q.values() * (kl_factor / amplitude)
    matrix = compressed_rows(Q.crow_indices(), Q.col_indices(), values, Q.shape)
    log_amplitude = math.log(amplitude)
    rows = copy.copy(system.rows)
    rows.variance = amplitude * rows.variance
    return replace(
        system,
        rows=rows,
        prior=replace(
            prior,
            matrix=matrix,
            diagonal=prior.diagonal * (kl_factor / amplitude),
            mass=prior.mass * kl_factor,
            constant=kl_factor * (prior.constant + prior.mass.sum() * log_amplitude),
            variance=amplitude * prior.variance,
        ),
    )
