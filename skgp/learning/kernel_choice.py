r"""Which of several kernel families, and how many length scales, some observations support.

Few observations say little of many length scales, and those of greatest marginal likelihood overfit
[1]_: predictions are too sure of themselves. The families that an estimator chooses among by itself
are therefore fitted with priors, to all of theta that maximises

.. math:: \log p(y \mid \theta) - \sum_j \tfrac{\nu + 1}{2} \log\Big(1 + \frac{r_j^2}{\nu \tau^2}
          \Big) - \tfrac{\nu + 1}{2} \log\Big(1 + \frac{(\log \sigma^2 - \log \sigma_0^2)^2}
          {\nu s^2} \Big),

:math:`r_j` the logarithm of length scale j over its start, less the mean of these over j. Student's
t lets most columns share a scale while a few, or all but a few, leave it (sparse relevance, as the
priors of [2]_), and targets be without noise (:math:`\sigma^2` of 1e-8 costs a normal prior
32 nats, this one 7). Candidates, from the simplest to the most complex:

1. *shared*: the ratios of all length scales stay as they start, at the spreads of the columns;
2. *grouped*: one scale for the columns whose length scales the evidence would shorten first, and
   one for all others; tried only where one for all finds nothing;
3. *separate*: each its own.

They are judged by leave-one-out predictions in closed form, corrected for what each observation did
to theta (the infinitesimal jackknife [3]_): with H the Hessian of the objective and
:math:`\ell_i(\theta)` the log density of observation i given all others, theta without it is
:math:`\hat\theta - H^{-1} \nabla \ell_i`, and no nearer to a bound that holds it. A more complex
candidate needs smaller squared errors, by one and a half standard errors, as densities do not see
what is rarer than 1 in n; or clearly better densities, by eight: of observations without noise a
few at the edge have nearly all of the squared error; or an objective greater by a nat for every
scale more [4]_, and squared errors that are not greater by a standard error: of some dozen
observations even half the error may be within its noise.

Predictions with one theta are too narrow still. The corrected residuals say by how much: amplitude
and noise are raised by their mean square in units of the predicted variance, a factor that leaves
the mean as it is. Of n residuals it is uncertain itself, and normal predictions of an estimated
variance are too sure of themselves, where Student's t would have tails: the factor is 1 + 6 / n
times their mean square, where that is above 1.

References
----------
.. [1] Mohammed and Cawley (2017), Over-fitting in model selection with Gaussian process regression.
.. [2] Eriksson and Jankowiak (2021), High-dimensional Bayesian optimization with sparse
   axis-aligned subspaces.
.. [3] Giordano, Stephenson, Liu, Jordan and Broderick (2019), A Swiss Army infinitesimal jackknife.
.. [4] Akaike (1974), A new look at the statistical model identification.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, random_rows
from skgp.kernels.expression import split_noise
from skgp.kernels.hyperparameters import with_theta
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.learning import defaults
from skgp.learning.selection import improves
from skgp.learning.starts import (
    ChoiceSettings,
    Family,
    LeaveOneOut,
    inverse_hessian,
    leave_one_out,
    likeliest_start,
    of_pure_noise,
)
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_by_curvature, minimize_within
from skgp.optim.stopping import LossRecorder

_NATS_A_SCALE = 1.0  # mathematical: gain that a free hyper-parameter more has to bring [4]_
_WITHOUT_PRIORS = ChoiceSettings(
    ratio_scale=math.inf, noise_scale=math.inf, tol=defaults.EVIDENCE_TOL
)


@dataclass(frozen=True)
class Choice:
    """An optimum."""

    family: Family
    theta: np.ndarray  # (n_theta,)
    loss: float  # minus the penalised log evidence, in nats per observation
    groups: np.ndarray  # (n_theta,), int: which elements of theta moved together

    @property
    def kernel(self):
        """The expression at the optimum."""
        return with_theta(self.family.kernel, self.theta)

    def gain_over(self, other: "Choice") -> float:
        """By how many nats the objective is greater than at another optimum."""
        return (other.loss - self.loss) * self.family.total


def choose_kernel(
    kernels: list,  # with a top-level WhiteKernel; vectors of hyper-parameters are length scales
    data: Data,  # float64
    *,
    generator: torch.Generator,
    settings: ChoiceSettings | None = None,
    callback: Callback | None = None,
) -> tuple[Any, list[float]]:
    """Choose a family and a structure of length scales.

    The expression, raised by the factor of the module docstring, and the history: the objective in
    nats per observation, one per evaluation. ``callback(evaluation, {"loss": float})`` ends the
    search with the best so far by True. The generator draws the rows of the comparison, of more
    than ``screen_rows``.

    About 100 evaluations of the evidence on at most ``screen_rows`` rows and one for each hyper-
    parameter; of more rows, then some 5 on all, led by the curvature on few.
    """
    settings = settings or ChoiceSettings()
    few = data.take(random_rows(len(data), settings.screen_rows, generator))
    search = _Search(settings, callback)
    candidates, others = search.candidates([Family(kernel, few, settings) for kernel in kernels])
    chosen, spread = search.simplest(candidates)
    if len(few) == len(data) or search.recorder.stopped:
        return raised(chosen.kernel, spread), search.recorder.history
    rivals = [
        fit for fit in others if fit.loss < chosen.loss + settings.rival / chosen.family.total
    ]
    fits = [search.of_more(fit, data) for fit in [chosen, *rivals][:2]]
    best = min(fits, key=lambda fit: fit.loss)
    if len(np.unique(chosen.groups)) < len(chosen.theta):
        best = search.simplest([search.of_more(chosen, data, chosen.groups), best])[0]
    return best.kernel, search.recorder.history


def maximise_evidence(
    kernel, data: Data, *, max_iter: int, callback: Callback | None = None
) -> tuple[Choice, list[float]]:
    """The optimum of one expression without priors, and the history; as :func:`choose_kernel`."""
    search = _Search(_WITHOUT_PRIORS, callback)
    family = Family(kernel, data, _WITHOUT_PRIORS)
    return search.run(family, family.start, max_iter=max_iter), search.recorder.history


def fit_families(
    kernels: list, data: Data, *, max_iter: int, callback: Callback | None = None
) -> tuple[list, list[float]]:
    """Each family with separate length scales, the likeliest first, and the history.

    Of observations in random order: the first ``screen_rows`` are where the search begins.
    """
    settings = ChoiceSettings(max_iter=max_iter, few_iter=max_iter, close=math.inf)
    search = _Search(settings, callback)
    few = data.take(torch.arange(min(len(data), settings.screen_rows), device=data.X.device))
    candidates, others = search.candidates([Family(kernel, few, settings) for kernel in kernels])
    fits = [candidates[-1], *others]
    if len(few) < len(data):
        fits = sorted((search.of_more(fit, data) for fit in fits), key=lambda fit: fit.loss)
    return [fit.kernel for fit in fits], search.recorder.history


def raised(kernel, factor: float):
    """The expression with amplitude and noise times a factor, as far as its bounds allow."""
    signal, white = split_noise(kernel)
    if white is None or factor == 1.0 or white.hyperparameter_noise_level.fixed:
        return kernel
    factor = min(
        factor, amplitude_range(signal)[1], white.noise_level_bounds[1] / white.noise_level
    )
    level = white.noise_level * factor
    return scale_amplitude(signal, factor) + type(white)(level, white.noise_level_bounds)


class _Search:
    """Searches that share settings and a recorder."""

    def __init__(self, settings: ChoiceSettings, callback: Callback | None) -> None:
        self.settings, self.recorder = settings, LossRecorder(callback)

    def run(
        self,
        family: Family,
        theta: np.ndarray,
        groups: np.ndarray | None = None,
        *,
        max_iter: int | None = None,
        patience: float = 1.0,
        inverse: np.ndarray | None = None,
    ) -> Choice:
        """Search from theta; elements of one group move together.

        `inverse` approximates that of the Hessian in the moves of groups (n_groups, n_groups).
        """
        low, high = family.bounds.T
        if len(theta) != len(low):  # of a family of other hyper-parameters
            theta = family.start
        if groups is None:
            groups = np.arange(len(theta))
        theta = np.clip(theta, low, high)
        if self.recorder.stopped:
            return Choice(family, theta, math.inf, groups)
        size = int(groups.max(initial=-1)) + 1
        bounds = np.tile([-math.inf, math.inf], (size, 1))
        np.maximum.at(bounds[:, 0], groups, low - theta)
        np.minimum.at(bounds[:, 1], groups, high - theta)

        def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
            loss, gradient = family(theta + x[groups])
            return loss, np.bincount(groups, gradient, size)

        max_iter = self.settings.max_iter if max_iter is None else max_iter
        options: dict = {"max_iter": max_iter, "tol": self.settings.tol / patience}
        minimize = minimize_within
        if inverse is not None:
            minimize = partial(minimize_by_curvature, inverse_hessian=inverse)
        x, loss = minimize(objective, np.zeros(size), bounds, **options, tell=self.recorder.tell)
        return Choice(family, theta + x[groups], float(loss), groups)

    def of_more(self, few: Choice, data: Data, groups: np.ndarray | None = None) -> Choice:
        """The optimum of more observations, from that of few and led by the curvature there."""
        family, inverse = Family(few.family.kernel, data, self.settings), None
        if groups is None:
            groups = np.arange(len(few.theta))
        dear = (len(data) / len(few.family.data)) ** 2  # an evaluation of all, in those of few
        if not self.recorder.stopped and groups.max(initial=-1) < defaults.EVALUATIONS_SAVED * dear:
            try:
                inverse = inverse_hessian(few.family, few.theta, groups)
            except NotPositiveDefiniteError:  # beside a bound: the search goes without
                inverse = None
        return self.run(family, few.theta, groups, inverse=inverse)

    def candidates(self, families: list[Family]) -> tuple[list[Choice], list[Choice]]:
        """Candidates from the simplest on, and other families with separate length scales."""
        tied: list[Choice] = []
        for family in families:
            begin = tied[-1].theta if tied and not self._weak(tied[-1]) else family.start
            tied.append(self.run(family, begin, family.tied))
            if len(tied) == 1 and self._noisy(tied[0]) and not self.recorder.stopped:
                tied[0] = self._elsewhere(tied[0])
        shared = min(tied, key=lambda fit: fit.loss)
        family = shared.family
        n, d = family.data.X.shape
        others = [fit for fit in tied if fit is not shared]
        if len(family.scales) < 2:
            return [shared], others
        # Where the losses of all are nearly equal the smoothest sees farthest.
        weak = self._weak(shared)
        if d > self.settings.max_separate and n <= self.settings.screen_rows:
            return [shared, *self._grouped(families[0] if weak else family)], others
        found, begin, starts, patience = [shared], shared.theta, [shared.theta], 1.0
        if weak:
            family = families[0]
            found += self._grouped(family)
            begin = family.start
            starts += [begin, *(fit.theta for fit in found[1:])]
            patience = 10.0  # plateaus lead to what is relevant
        elif self._short(shared):  # levels of a one-hot column then share nothing
            starts.append(family.start)
        if self._noisy(shared):
            starts += self._oscillating(family, begin)
        separate = [self._separate(family, starts, patience)]
        for fit in tied:
            if fit.family is not family and fit.loss < shared.loss + self.settings.close:
                # Its own optimum of shared scales has their noise, from which no search returns.
                alike = len(fit.theta) == len(separate[0].theta)
                begin = separate[0].theta if alike else fit.theta
                begin = _likeliest(fit.family, begin, fit.family.scales, defaults.SMOOTHER_FACTORS)
                separate.append(self.run(fit.family, begin, max_iter=self.settings.few_iter))
        separate.sort(key=lambda fit: fit.loss)
        return [*found, separate[0]], separate[1:]

    def _separate(self, family: Family, starts: list[np.ndarray], patience: float) -> Choice:
        """The best optimum of separate length scales from these starts and those it suggests."""
        runs = [self.run(family, theta, patience=patience) for theta in starts]
        best = min(runs, key=lambda fit: fit.loss)
        if self._weak(best) or self._unexplained(best):
            little = self.run(family, family.with_little_noise(family.start), patience=patience)
            best = min(best, little, key=lambda fit: fit.loss)
        return self._with_oscillations(best)

    def _weak(self, fit: Choice) -> bool:
        return fit.loss > of_pure_noise(fit.family.data) - self.settings.weak

    def _short(self, fit: Choice) -> bool:
        """Whether length scales moved together ended far below their start."""
        family = fit.family
        return np.mean((family.start - fit.theta)[family.scales]) > math.log(defaults.FAR_BELOW)

    def _noisy(self, fit: Choice) -> bool:
        """Whether much is left to explain: the noise is above that of its prior."""
        place = fit.family.noise_place
        most = self.settings.noise * fit.family.variance
        return place is None or math.exp(fit.theta[place]) > most

    def _unexplained(self, fit: Choice) -> bool:
        """Whether observations left out are predicted far worse than the noise allows."""
        family = fit.family
        if family.noise_place is None or self.recorder.stopped:
            return False
        square = np.square(family.at(fit.theta)[2].residual).mean()
        return square > defaults.UNEXPLAINED * math.exp(fit.theta[family.noise_place])

    def _elsewhere(self, found: Choice) -> Choice:
        """The optimum from the likeliest of other starts, where that start is likelier already."""
        family = found.family
        start = likeliest_start(family.kernel, family.data)
        if start is None or family(start[0].theta)[0] >= found.loss:
            return found
        return min(found, self.run(family, start[0].theta, found.groups), key=lambda fit: fit.loss)

    def _with_oscillations(self, found: Choice) -> Choice:
        """The optimum after those of columns along which it oscillates are found, one by one."""
        while not self.recorder.stopped:
            starts = self._oscillating(found.family, found.theta)
            runs = [self.run(found.family, theta) for theta in starts]
            best = min([found, *runs], key=lambda fit: fit.loss)
            if best.gain_over(found) < _NATS_A_SCALE:
                return best
            found = best
        return found

    def _oscillating(self, family: Family, theta: np.ndarray) -> list[np.ndarray]:
        """Starts of shorter length scales, of columns along which residuals are autocorrelated."""
        X = family.data.X.cpu().numpy()
        if len(family.scales) != X.shape[1]:
            return []
        residual, found = family.at(theta)[2].residual, []
        for place, column in zip(family.scales, X.T, strict=True):
            along = residual[np.argsort(column, kind="stable")]  # (n,) or (n, t)
            least = defaults.AUTOCORRELATED * along.size**-0.5  # autocorrelation of lag one
            if np.vdot(along[1:], along[:-1]) > least * np.vdot(along, along):
                found.append(_likeliest(family, theta, [place], defaults.OSCILLATION_FACTORS))
        return found

    def _grouped(self, family: Family) -> list[Choice]:
        """The best of two groups of columns, the relevant ones short; none where that is worse."""
        scales, start = family.scales, family.start
        # At a noise of .3, a wrong length scale is not yet explained by short ones of others.
        asked = start.copy()
        asked[family.noise_place] = math.log(3 * family.settings.noise * family.variance)
        order = scales[np.argsort(-family(asked)[1][scales])]
        found, k = [], 1
        while k <= min(len(scales) // 2, defaults.MOST_GROUPED):
            theta = start.copy()
            theta[scales] += defaults.LONG
            theta[order[:k]] = start[order[:k]] + 0.5 * math.log(k / len(scales)) + defaults.SHORT
            groups = family.grouped(order[:k])
            found.append(
                self.run(family, theta, groups, max_iter=self.settings.few_iter, patience=10.0)
            )
            k *= 2
        return [min(found, key=lambda fit: fit.loss)]

    def simplest(self, candidates: list[Choice]) -> tuple[Choice, float]:
        """The simplest candidate that no later one beats, and what raises its variances."""
        if self.recorder.stopped:
            return min(candidates, key=lambda fit: fit.loss), 1.0
        corrected = len(candidates[0].family.data.y) <= self.settings.screen_rows
        judged = [_judged(fit, corrected) for fit in candidates]
        n_free = [len(np.unique(fit.groups)) for fit in candidates]
        weight, best = candidates[0].family.data.weight, 0
        for k in range(1, len(judged)):
            new, old = judged[k], judged[best]
            more = _NATS_A_SCALE * (n_free[k] - n_free[best])
            likelier = candidates[k].gain_over(candidates[best]) > more
            if old is None or (new is not None and self._better(new, old, weight, likelier)):
                best = k
        chosen = judged[best]
        if chosen is None or not corrected:
            return candidates[best], 1.0
        small_sample = 1 + self.settings.small_sample / candidates[best].family.total
        return candidates[best], max(1.0, chosen.spread * small_sample)

    def _better(
        self, new: LeaveOneOut, old: LeaveOneOut, weight: Tensor | None, likelier: bool
    ) -> bool:
        settings, unit = self.settings, old.square.mean() or 1.0

        def gains(new: np.ndarray, old: np.ndarray, n_errors: float) -> bool:
            return improves(new, old, weight=weight, n_errors=n_errors)

        if likelier and not improves(old.square / unit, new.square / unit, weight=weight):
            return True
        return gains(new.loss, old.loss, settings.n_clear_errors) or gains(
            new.square / unit, old.square / unit, settings.n_errors
        )


def _likeliest(family: Family, theta: np.ndarray, places, factors: tuple) -> np.ndarray:
    """The best of theta with length scales at some places shorter by each of the factors."""
    starts = np.tile(theta, (len(factors), 1))
    starts[:, places] -= np.log(factors)[:, None]
    return min(starts.clip(*family.bounds.T), key=lambda start: family(start)[0])


def _judged(fit: Choice, corrected: bool) -> LeaveOneOut | None:
    """Leave-one-out predictions; None where a covariance has no factor."""
    try:
        return leave_one_out(fit.family, fit.theta, fit.groups, corrected=corrected)
    except NotPositiveDefiniteError:
        return None
