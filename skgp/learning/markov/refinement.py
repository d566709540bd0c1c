r"""State-space forms of kernels that have an approximate one only, as fine as the noise asks for.

With C the covariance of the observations, noise included, and E the error of that of the form,
:math:`R = C^{-1/2} E C^{-1/2}`; to second order the evidence of observations that C describes moves
by

.. math:: \Delta = \tfrac12 (\alpha^\top E \alpha - \operatorname{tr} R), \quad \alpha = C^{-1} y,
          \qquad E[\Delta^2] = v + v^2 / 4, \quad v = \tfrac12 \lVert R \rVert_F^2,

so that it is E beside the noise that counts, not E beside the variance of f.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from skgp.inference.defaults import ERROR_ROWS, LEAST_NOISE_SHARE
from skgp.inference.markov.series import Lags, Series
from skgp.kernels import gram
from skgp.kernels.expression import summands
from skgp.kernels.sde import StateSpace, state_space
from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Component
from skgp.learning.markov.search import Search
from skgp.linalg import NotPositiveDefiniteError, NumericalWarning, warn_caller

_APART = np.finfo(float).tiny  # mathematical: at 0 dense covariances have what rounding adds


def evidence_error(form: StateSpace, series: Series, noise: float) -> float:
    """Error of the evidence in nats, of Gaussian noise, at the kernel's own hyper-parameters.

    The root of E[Delta^2], or the size of Delta if that is larger, on the densest stretch of some
    consecutive times, taken for all: O(256^3). 0 for kernels with an exact form.
    """
    with_terms = getattr(series, "features", None) is not None  # predicted by the filter
    dense = not with_terms and series.lags_of(form.at()) is not None
    if form.is_exact or (dense and form.slopes is not None):  # RBF among what is exact
        return 0.0
    times, n = series.times.cpu(), len(series.times)
    m = min(n, ERROR_ROWS)
    ends = torch.arange(m - 1, n, m)
    last = int(ends[(times[ends] - times[ends - m + 1]).argmin()])
    part = slice(last - m + 1, last + 1)
    counts = series.counts[part].cpu()
    K, E = _covariance_and_error(form, times[part], of_form=not dense)
    C = K + torch.diag(noise / counts.clamp(min=torch.finfo(counts.dtype).tiny))
    C.diagonal().add_(LEAST_NOISE_SHARE * K.diagonal())
    L, failed = torch.linalg.cholesky_ex(C)
    if int(failed):
        return math.inf
    half = torch.linalg.solve_triangular(L, E, upper=False)
    R = torch.linalg.solve_triangular(L, half.mT, upper=False)  # (m, m)
    y = series.totals[part].cpu() / counts
    alpha = torch.cholesky_solve(y[:, None], L)[:, 0]
    v = 0.5 * float(R.square().sum()) * n / m
    shift = 0.5 * float(alpha @ E @ alpha - R.trace()) * n / m
    return max(math.sqrt(v + v * v / 4), abs(shift))


def _covariance_and_error(
    form: StateSpace, times: Tensor, *, of_form: bool
) -> tuple[Tensor, Tensor]:
    """K (m, m) of the kernel, and what inference takes for it less K: of the form, or dense."""
    table = Lags.between(times.diff(prepend=times[:1])).tables[0]
    parts, m = summands(form.kernel), len(times)
    K, error = times.new_zeros(m, m), times.new_zeros(m, m)
    for part in parts:
        own = form if len(parts) == 1 else state_space(part, tolerance=form.tolerance)
        exact = gram(part, times[:, None])
        K += exact
        if not own.is_exact:
            lags = np.maximum(table.lags, _APART)
            approximate, *_ = own.at().covariance(lags, of_form=of_form)
            error += torch.from_numpy(approximate.take(table.pairs)) - exact
    return K, error


def with_fine_form(
    found: Search,
    series: Series,
    climb: Callable[[Component, Tensor], Search],
    *,
    asked: bool = True,
) -> Search:
    """Where a search ends with a form fine enough for the noise found, of Gaussian noise.

    A search ends with little noise where the data have little: whether the form will do is known
    then, and `climb` goes on from there with a finer one, unless that ends at less evidence: many
    states and very little noise are beyond the digits of a filter, and a coarse form is a process
    of its own. Warns of forms that are not fine enough of a kernel that was `asked` for.
    """
    error = _error(found, series)
    if error <= defaults.FORM_NATS:
        return found
    for _ in defaults.FORM_TOLERANCES:  # with a finer form the noise may fall further
        finer, error = _finest_needed(found, series, error)
        if finer is found.components[0]:
            break
        again = _climbed(climb, finer, found)
        if again is None or (
            again.n_iter and again.value < found.value - LEAST_EFFECT * series.total
        ):
            error = _error(found, series)
            break
        again.n_iter += found.n_iter
        again.history = found.history + again.history
        found, error = again, _error(again, series)
        if error <= defaults.FORM_NATS:
            break
    if asked and error > defaults.WORTH_A_WARNING:
        warn_caller(_warning(found, error), NumericalWarning)
    return found


def _climbed(
    climb: Callable[[Component, Tensor], Search], finer: Component, found: Search
) -> Search | None:
    """Where a search with a finer form ends; None where its digits do not suffice anywhere."""
    try:
        again = climb(finer, found.parameters)
    except NotPositiveDefiniteError:
        return None
    return again if math.isfinite(again.value) else None


def _warning(found: Search, error: float) -> str:
    """What is wrong, and what to do."""
    noise = f"noise of variance {_noise(found):.3g} (of standardised targets)"
    if error <= defaults.MOST_NATS:
        return (
            f"The state-space form of {found.kernel} is approximate, and with {noise} the log "
            f"marginal likelihood may be off by {error:.2g} nats. Use a Matern kernel, whose form "
            "is exact, or QSGPRegressor, which takes the kernel itself."
        )
    return (
        f"The state-space form of {found.kernel} is approximate, and beside {noise} the error "
        "tells: log marginal likelihood and standard deviations are not to be relied on. Give the "
        "noise a lower bound, such as WhiteKernel(noise_level_bounds=(1e-6, 1)), or use a Matern "
        "kernel, whose form is exact, or QSGPRegressor, which takes the kernel itself."
    )


def _finest_needed(found: Search, series: Series, error: float) -> tuple[Component, float]:
    """The coarsest form that will do, or the best there is."""
    best = found.components[0]
    for tolerance in defaults.FORM_TOLERANCES:
        if best.form.tolerance is not None and tolerance >= best.form.tolerance:
            continue
        finer = Component(found.kernel, tolerance)
        gap = evidence_error(finer.form, series, _noise(found))
        if gap < error / 2:
            best, error = finer, gap
        if error <= defaults.FORM_NATS:
            break
    return best, error


def _error(found: Search, series: Series) -> float:
    own = found.components[0].form
    if own.is_exact:
        return 0.0
    form = state_space(found.kernel, tolerance=own.tolerance)
    return evidence_error(form, series, _noise(found))


def _noise(found: Search) -> float:
    return float(found.parameters[0].exp())
