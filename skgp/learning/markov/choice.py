"""The choice of a kernel for a series, by the evidence.

The first of several kernels finds the length scale: of many rows on some 2000, once spread evenly
(which shows slow motion) and once in stretches of consecutive ones (which shows quick motion), and
all rows say which is right. From there the kernels compete on some 20000 rows of that kind. Few
rows tell less, and labels less than numbers: scales far below the gaps between them are not tried,
nor are kernels of many hyper-parameters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.learning.markov.defaults import (
    CHOICE_ITER,
    CHOICE_NATS,
    CHOICE_ROWS,
    CHOICE_TOL,
    INNER,
    LEAST_SCALE,
    N_STRETCHES,
    ROWS_A_PARAMETER,
    SCALE_ROWS,
    SCALES,
    START_TOL,
)
from skgp.learning.markov.objectives import Objective
from skgp.learning.markov.search import Callback, Climb, Search, maximise
from skgp.likelihoods import Likelihood

__all__ = ["choose_kernel"]


def choose_kernel(
    kernels: Sequence[Any],
    make_objective: Callable[[Sequence[Series]], Objective],
    processes: Sequence[Series],
    likelihood: Likelihood,
    callback: Callback | None = None,
) -> Search:
    """Choose among kernels by the evidence, for `maximise` to go on; the first finds the scale.

    The kernels have to forget: stretches of rows stand apart. `make_objective` makes the objective
    of the series of all latent processes; the callback is called after every kernel, and True ends
    the choice.
    """
    n_rows = len(processes[0].y)

    def part(kind: str, most: int) -> list[Series]:
        few = n_rows <= 2 * most
        return list(processes) if few else [_PARTS[kind](series, most) for series in processes]

    whole = make_objective(processes)
    kernels = _affordable(kernels, n_rows * min(1.0, likelihood.information))
    if n_rows <= 2 * SCALE_ROWS:
        if len(kernels) == 1:  # the climb is the caller's
            return _search_scale(kernels[0], whole, likelihood, processes[0], climbs=False)
        kind, best = "all", _search_scale(kernels[0], whole, likelihood, processes[0])
    else:
        parts = [(kind, part(kind, SCALE_ROWS)) for kind in _PARTS]
        kind, best = max(
            (
                (kind, _search_scale(kernels[0], make_objective(rows), likelihood, rows[0]))
                for kind, rows in parts
            ),
            key=lambda pair: _value(pair[1], whole, likelihood),
        )
    objective = whole if n_rows <= 2 * CHOICE_ROWS else make_objective(part(kind, CHOICE_ROWS))
    searches = []
    for number, kernel in enumerate(kernels):
        if number:
            # Noise that a rough kernel explains away is not there for a smooth one to begin with.
            start, parameters = _with_length_scale_of(kernel, best.kernel), None
        else:
            start, parameters = best.kernel, best.parameters
        if kind == "all" and not number:  # it has climbed there
            searches.append(best)
        else:
            climb = Climb([start], objective, likelihood)
            searches.append(_short_climb(climb, climb.start(parameters, False)))
        if callback is not None and callback(number, {"loss": -searches[-1].value}):
            break
    # Akaike's criterion: a nat for every hyper-parameter.
    return max(searches, key=lambda search: search.value - len(search.kernel.theta))


#: Ways to take some rows of many.
_PARTS: dict[str, Callable[[Series, int], Series]] = {
    "spread": lambda series, n_rows: series.thinned(n_rows),
    "stretches": lambda series, n_rows: series.stretches(n_rows, n_rows // N_STRETCHES),
}


def _value(search: Search, objective: Objective, likelihood: Likelihood) -> float:
    """Evidence of other data at the hyper-parameters that a search found."""
    options: dict[str, Any] = {"parameters": search.parameters, "max_iter": 0}
    return maximise(search.kernels, objective, likelihood, **options).value


def _short_climb(climb: Climb, start: dict[str, Tensor]) -> Search:
    """A search that is short, for comparison."""
    tol = max(CHOICE_TOL, CHOICE_NATS / climb.objective.total)
    climb.tol = INNER * tol
    return climb.run(start, CHOICE_ITER, tol)


def _search_scale(
    kernel: Any,
    objective: Objective,
    likelihood: Likelihood,
    series: Series,
    *,
    climbs: bool = True,
) -> Search:
    """The best of several multiples of a kernel's length scales, or where a climb from it ends."""
    climb = Climb([kernel], objective, likelihood, tol=INNER * START_TOL)
    start = climb.start(None, False)
    thetas = torch.from_numpy(_scaled(kernel, _telling_scales(kernel, series)))
    values = [climb.evaluate(start | {"place": theta}).value for theta in thetas]
    best = int(np.argmax(values))
    if climbs:
        return _short_climb(climb, start | {"place": thetas[best]})
    kernels = [kernel.clone_with_theta(thetas[best].numpy())]
    return Search(kernels, start["likelihood"], values[best])


def _telling_scales(kernel: Any, series: Series) -> np.ndarray:
    """Multiples of the length scales that are not all noise between the rows."""
    gaps, own = series.gaps[1:], kernel.theta[_is_length_scale(kernel)]
    gaps = gaps[gaps.isfinite()]
    if not (len(gaps) and len(own)):
        return SCALES[1:2]
    short = float(gaps.kthvalue(1 + len(gaps) // 10).values)
    telling = np.exp(own.mean()) * SCALES >= LEAST_SCALE * short
    return SCALES[: max(2, int(telling.sum()))]


def _affordable(kernels: Sequence[Any], n_rows: float) -> list[Any]:
    """The first kernel, and those whose hyper-parameters so many rows can tell."""
    first, *others = kernels
    return [first, *(k for k in others if ROWS_A_PARAMETER * len(k.theta) <= n_rows)]


def _is_length_scale(kernel: Any) -> np.ndarray:
    """Which of the free hyper-parameters, (p,), are length scales."""
    names = [(h.name, h.n_elements) for h in kernel.hyperparameters if not h.fixed]
    return np.array([name.endswith("length_scale") for name, n in names for _ in range(n)], bool)


def _scaled(kernel: Any, factor: np.ndarray) -> np.ndarray:
    """Theta (..., p) with the length scales multiplied by factors (...), within their bounds."""
    moved = np.log(factor)[..., None] * _is_length_scale(kernel)
    return np.clip(kernel.theta + moved, *kernel.bounds.T)


def _with_length_scale_of(kernel: Any, other: Any) -> Any:
    """The kernel with length scales of the geometric mean that those of another have."""
    mine, theirs = _is_length_scale(kernel), _is_length_scale(other)
    if not (mine.any() and theirs.any()):
        return kernel
    factor = np.exp(other.theta[theirs].mean() - kernel.theta[mine].mean())
    return kernel.clone_with_theta(_scaled(kernel, factor))
