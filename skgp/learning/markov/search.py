"""Hyper-parameters of a series by its evidence: L-BFGS-B over ``theta`` and the likelihood's own.

Where there are several kernels, the first finds the length scale: of many rows on some 2000, once
spread evenly (which shows slow motion) and once in stretches of consecutive ones (which shows quick
motion), and all rows say which is right. From there the kernels compete on some 20000 rows of that
kind. Few rows tell less, and labels less than numbers: scales far below the gaps between them are
not tried, nor are kernels of many hyper-parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.markov.series import Series
from skgp.learning.markov.kernel_parameters import KernelParameters
from skgp.learning.markov.objectives import Evaluation, Objective
from skgp.likelihoods import Likelihood
from skgp.optim.lbfgs import minimize_lbfgs

__all__ = ["Search", "choose_kernel", "maximise"]

Callback = Callable[[int, dict], bool | None]

_SCALE_ROWS, _CHOICE_ROWS = 2000, 20_000
_N_STRETCHES = 10
# The choice ends with gains of _CHOICE_NATS in all, or of few rows with _CHOICE_TOL an observation.
_LEAST_GAP = 1e-6  # between knots that are learned, of their span
_CHOICE_ITER, _CHOICE_TOL, _CHOICE_NATS, _START_TOL = 25, 1e-5, 0.01, 1e-3
# That a kernel besides the first needs, of a curvature of at most 1: in series drawn from kernels
# of nu 1/2 to infinity, a choice by 60 numbers predicts better, and one by 320 labels does not yet.
_ROWS_A_PARAMETER = 25
_LEAST_SCALE = 0.1  # of a short gap: below, the rows look like white noise whatever the scale
_INNER = 0.1  # of a search's tolerance: that of a bound
#: Multiples of the length scale that a start tries.
_SCALES = 10.0 ** np.array([0.75, 0.0, -0.75, -1.5, -2.25, -3.0])


@dataclass
class Search:
    """Where a search ended.

    Attributes
    ----------
    kernel : Kernel
        With the hyper-parameters found.
    parameters : Tensor of shape (p,)
        Of the likelihood's family.
    value : float
        The evidence, in nats.
    n_iter : int
    history : list of float
        Evidence an observation after each iteration.
    knots : Tensor of shape (M,) or None
        Of inducing states, where they end.
    """

    kernel: Any
    parameters: Tensor
    value: float
    n_iter: int = 0
    history: list[float] = field(default_factory=list)
    knots: Tensor | None = None


def maximise(
    kernel: Any,
    objective: Objective,
    family: Likelihood,
    *,
    parameters: Tensor | None = None,
    knots: Tensor | None = None,
    learn_knots: bool = False,
    max_iter: int = 100,
    tol: float = 1e-7,
    callback: Callback | None = None,
) -> Search:
    """Climb the evidence from a kernel's own hyper-parameters, within their bounds.

    Parameters
    ----------
    kernel : Kernel
        Without noise.
    objective : Objective
    family : Likelihood
        Of the likelihood: bounds, and start unless `parameters` are given.
    parameters : Tensor of shape (p,), optional
        Of the likelihood, to start from.
    knots : Tensor of shape (M,), optional
        Of inducing states; by default there is a state at every time.
    learn_knots : bool, default=False
        Whether they move, their order kept.
    max_iter : int, default=100
        0 evaluates only.
    tol : float, default=1e-7
        Least gain of an iteration, in nats an observation.
    callback : callable, optional

    Returns
    -------
    Search
    """
    climb = _Climb(KernelParameters(kernel), objective, family, knots, _INNER * tol)
    start = climb.start(parameters, learn_knots)
    if max_iter == 0 or not sum(len(leaf) for leaf in start.values()):
        value = climb.evaluate(start).value
        return Search(kernel, start["likelihood"], value, knots=knots)
    return _run(climb, start, max_iter, tol, callback)


def _run(
    climb: "_Climb",
    start: dict[str, Tensor],
    max_iter: int,
    tol: float,
    callback: Callback | None = None,
) -> Search:
    """Climb from somewhere to the top."""
    found = minimize_lbfgs(
        climb.loss,
        start,
        max_iter=max_iter,
        tol=tol,
        bounds=climb.bounds(start),
        callback=callback,
    )
    return Search(
        climb.kernel.clone_with_theta(found.parameters["theta"].numpy()),
        found.parameters["likelihood"],
        -found.loss * climb.objective.total,
        found.n_iter,
        [-value for value in found.history],
        climb.places(found.parameters),
    )


class _Climb:
    """The evidence as a loss of tensors: ``theta``, ``likelihood`` and the places of knots.

    Knots move by the first of them and the logarithms of the gaps, which keeps their order. The
    tensors are in main memory, wherever the data are.
    """

    def __init__(
        self,
        place: KernelParameters,
        objective: Objective,
        family: Likelihood,
        knots: Tensor | None,
        tol: float,
    ) -> None:
        self.place, self.objective, self.family = place, objective, family
        self.knots, self.tol = knots, tol
        self.kernel = place.kernel

    def start(self, parameters: Tensor | None, learn_knots: bool) -> dict[str, Tensor]:
        """Where the search begins."""
        theta = torch.tensor(self.kernel.theta, dtype=torch.float64)
        likelihood = self.family.initial(theta) if parameters is None else parameters
        start = {"theta": theta, "likelihood": likelihood}
        if self.knots is not None and learn_knots:
            knots = self.knots.to(theta)
            start["first"], start["log_gaps"] = knots[:1], knots.diff().log()
        return start

    def bounds(self, start: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Lower and upper bounds of what moves."""
        of_theta = torch.tensor(self.kernel.bounds, dtype=torch.float64).reshape(-1, 2)
        bounds = {
            "theta": (of_theta[:, 0], of_theta[:, 1]),
            "likelihood": self.family.box(start["theta"]),
        }
        if "log_gaps" in start:
            # Knots that meet, or leave, would take the transitions between them to a limit.
            first, gaps = start["first"], start["log_gaps"]
            span = float(gaps.exp().sum())
            ends = (math.log(part * span) for part in (_LEAST_GAP, 2.0))
            low, high = (torch.full_like(gaps, end) for end in ends)
            bounds |= {"first": (first - span, first + span), "log_gaps": (low, high)}
        return bounds

    def places(self, leaves: dict[str, Tensor]) -> Tensor | None:
        """The knots (M,), where the data are."""
        if self.knots is None or "first" not in leaves:
            return self.knots
        first, log_gaps = leaves["first"].detach(), leaves["log_gaps"].detach()
        return torch.cat([first, first + log_gaps.exp().cumsum(0)]).to(self.knots)

    def evaluate(self, leaves: dict[str, Tensor]) -> Evaluation:
        """Evidence and its gradients."""
        return self.objective(
            self.place.form.at(self.place.parameters(leaves["theta"].detach())),
            leaves["likelihood"].detach(),
            self.places(leaves),
            tol=self.tol,
        )

    def loss(self, leaves: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Negative evidence an observation, and its gradients."""
        found, theta = self.evaluate(leaves), leaves["theta"].detach()
        slopes = {
            "theta": self.place.pull(theta, found.dynamics_gradient.to(theta)),
            "likelihood": found.likelihood_gradient,
        }
        if "first" in leaves and found.knot_gradient is not None:
            slope = found.knot_gradient.to(theta)
            # A gap moves all knots behind it.
            behind = slope[1:].flip(0).cumsum(0).flip(0)
            slopes["first"] = slope.sum()[None]
            slopes["log_gaps"] = behind * leaves["log_gaps"].detach().exp()
        scale = -1 / self.objective.total
        return scale * found.value, {name: scale * slope for name, slope in slopes.items()}


def choose_kernel(
    kernels: Sequence[Any],
    make_objective: Callable[[Sequence[Series]], Objective],
    processes: Sequence[Series],
    family: Likelihood,
    callback: Callback | None = None,
) -> Search:
    """Choose among kernels by the evidence; the first one also finds the length scale.

    Parameters
    ----------
    kernels : sequence of Kernel
        Without noise. Only such as forget: stretches of rows stand apart.
    make_objective : callable
        Makes the objective of the series of all latent processes.
    processes : sequence of Series
        Of the same rows, one a latent process.
    family : Likelihood
        Of the likelihood.
    callback : callable, optional
        Called after every kernel; True ends the choice.

    Returns
    -------
    Search
        To be continued on all rows.
    """

    n_rows = len(processes[0].y)

    def part(kind: str, most: int) -> list[Series]:
        few = n_rows <= 2 * most
        return list(processes) if few else [_PARTS[kind](series, most) for series in processes]

    whole = make_objective(processes)
    kernels = _affordable(kernels, n_rows * min(1.0, family.information))
    if n_rows <= 2 * _SCALE_ROWS:
        if len(kernels) == 1:  # the climb is the caller's
            return _search_scale(kernels[0], whole, family, processes[0], climbs=False)
        kind, best = "all", _search_scale(kernels[0], whole, family, processes[0])
    else:
        parts = [(kind, part(kind, _SCALE_ROWS)) for kind in _PARTS]
        kind, best = max(
            (
                (kind, _search_scale(kernels[0], make_objective(rows), family, rows[0]))
                for kind, rows in parts
            ),
            key=lambda pair: _value(pair[1], whole, family),
        )
    objective = whole if n_rows <= 2 * _CHOICE_ROWS else make_objective(part(kind, _CHOICE_ROWS))

    def climb_from(kernel: Any, parameters: Tensor | None) -> Search:
        climb = _Climb(KernelParameters(kernel), objective, family, None, 0.0)
        return _climb(climb, climb.start(parameters, False))

    searches = []
    for number, kernel in enumerate(kernels):
        if number:
            # Noise that a rough kernel explains away is not there for a smooth one to begin with.
            start = _with_length_scale_of(kernel, best.kernel)
            searches.append(climb_from(start, None))
        elif kind == "all":  # it has climbed there
            searches.append(best)
        else:
            searches.append(climb_from(best.kernel, best.parameters))
        if callback is not None and callback(number, {"loss": -searches[-1].value}):
            break
    # Akaike's criterion: a nat for every hyper-parameter.
    return max(searches, key=lambda search: search.value - len(search.kernel.theta))


#: Ways to take some rows of many.
_PARTS: dict[str, Callable[[Series, int], Series]] = {
    "spread": lambda series, n_rows: series.thinned(n_rows),
    "stretches": lambda series, n_rows: series.stretches(n_rows, n_rows // _N_STRETCHES),
}


def _value(search: Search, objective: Objective, family: Likelihood) -> float:
    """Evidence of other data at the hyper-parameters that a search found."""
    return maximise(
        search.kernel, objective, family, parameters=search.parameters, max_iter=0
    ).value


def _climb(climb: _Climb, start: dict[str, Tensor]) -> Search:
    """A search that is short, for comparison."""
    tol = _choice_tol(climb.objective)
    climb.tol = _INNER * tol
    return _run(climb, start, _CHOICE_ITER, tol)


def _choice_tol(objective: Objective) -> float:
    return max(_CHOICE_TOL, _CHOICE_NATS / objective.total)


def _search_scale(
    kernel: Any, objective: Objective, family: Likelihood, series: Series, *, climbs: bool = True
) -> Search:
    """The best of several multiples of a kernel's length scales, or where a climb from it ends."""
    climb = _Climb(KernelParameters(kernel), objective, family, None, _INNER * _START_TOL)
    start = climb.start(None, False)
    thetas = torch.from_numpy(_scaled(kernel, _telling_scales(kernel, series)))
    values = [climb.evaluate(start | {"theta": theta}).value for theta in thetas]
    best = int(np.argmax(values))
    if climbs:
        return _climb(climb, start | {"theta": thetas[best]})
    return Search(kernel.clone_with_theta(thetas[best].numpy()), start["likelihood"], values[best])


def _telling_scales(kernel: Any, series: Series) -> np.ndarray:
    """Multiples of the length scales that are not all noise between the rows."""
    gaps, own = series.gaps[1:], kernel.theta[_is_length_scale(kernel)]
    gaps = gaps[gaps.isfinite()]
    if not (len(gaps) and len(own)):
        return _SCALES[1:2]
    short = float(gaps.kthvalue(1 + len(gaps) // 10).values)
    telling = np.exp(own.mean()) * _SCALES >= _LEAST_SCALE * short
    return _SCALES[: max(2, int(telling.sum()))]


def _affordable(kernels: Sequence[Any], n_rows: float) -> list[Any]:
    """The first kernel, and those whose hyper-parameters so many rows can tell."""
    first, *others = kernels
    return [first, *(k for k in others if _ROWS_A_PARAMETER * len(k.theta) <= n_rows)]


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
