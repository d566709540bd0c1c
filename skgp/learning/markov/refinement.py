"""State-space forms of kernels that have an approximate one only, as fine as the noise asks for."""

import math
from collections.abc import Callable

from torch import Tensor

from skgp.inference.markov.approximation import evidence_error
from skgp.inference.markov.series import Series
from skgp.kernels import state_space
from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.markov.defaults import (
    FORM_NATS,
    FORM_TOLERANCES,
    MOST_NATS,
    WORTH_A_WARNING,
)
from skgp.learning.markov.objectives import Component
from skgp.learning.markov.search import Search
from skgp.linalg import NotPositiveDefiniteError, NumericalWarning, warn_caller


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
    if error <= FORM_NATS:
        return found
    for _ in FORM_TOLERANCES:  # with a finer form the noise may fall further
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
        if error <= FORM_NATS:
            break
    if asked and error > WORTH_A_WARNING:
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
    if error <= MOST_NATS:
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
    for tolerance in FORM_TOLERANCES:
        if best.form.tolerance is not None and tolerance >= best.form.tolerance:
            continue
        finer = Component(found.kernel, tolerance)
        gap = evidence_error(finer.form, series, _noise(found))
        if gap < error / 2:
            best, error = finer, gap
        if error <= FORM_NATS:
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
