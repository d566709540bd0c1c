r"""One rule for every choice by held-out data.

Candidates are ordered from the simplest to the most complex. Their losses :math:`\ell_{ki}` at the
same held-out observations i are paired: the noise of :math:`\bar\ell_k - \bar\ell_b` is that of the
mean of the differences :math:`d_i = \ell_{ki} - \ell_{bi}`,

.. math:: s^2 = \frac{n}{n - 1} \frac{\sum_i w_i^2 (d_i - \bar d)^2}{(\sum_i w_i)^2},

where i counts units of observations that err together, such as folds, which share a fit. With
b the candidate of the least mean loss, the choice is the simplest k for which

.. math:: \bar d \le \max(s, \delta).

The standard error s guards against a best by luck (the one-standard-error rule [1]_), the least
effect :math:`\delta` against fits so nearly equal that s is as tiny as their difference: a gain
that nobody would notice does not pay for complexity. A loss that is not finite loses.

Folds are stratified [2]_: observations are sorted by target and dealt out one by one, so that every
fold has its share of each class, of each count and of each quantile of y.

Kernels for many observations are compared by what they predict of held-out ones from their nearest,
in data and across gaps (`rows_in_blocks`, `held_out_densities`).

References
----------
.. [1] Breiman, Friedman, Olshen and Stone (1984), Classification and regression trees, section
   3.4.3.
.. [2] Kohavi (1995), A study of cross-validation and bootstrap for accuracy estimation and model
   selection.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, replicates
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.vecchia.conditionals import Conditionals
from skgp.kernels.expression import RBF, split_noise, theta_places
from skgp.kernels.scales import robust_std
from skgp.learning.defaults import (
    LEAST_EFFECT,
    VECCHIA_BLOCK_SHARE,
    VECCHIA_BLOCKS,
    VECCHIA_HELD_NEIGHBORS,
    VECCHIA_START_ROWS,
)

Array = np.ndarray | Tensor
Random = torch.Generator | np.random.RandomState
Trial = TypeVar("Trial")


def choose(
    losses: Array | Sequence[Array],  # (c, n) in nats, of the same rows; the simplest first
    *,
    weight: Array | None = None,  # (n,), not negative; its scale is without effect
    unit: Array | None = None,  # (n,), numbers of the units; each its own by default
    least_effect: float = LEAST_EFFECT,  # delta, in nats
    least_share: float | None = None,  # of the least mean loss, which the least effect is at most
    n_errors: float = 1.0,  # standard errors that a gain must exceed
) -> int:
    r"""The simplest candidate that is no worse than the best, beyond noise and the least effect.

    Observations that are finite under no candidate say nothing; 0 is the choice if no loss is
    finite. The share is for labels, whose losses are above 0 and may be small: `LABEL_SHARE`.

    Examples
    --------
    >>> rng = np.random.RandomState(0)
    >>> noise = rng.standard_normal(500)
    >>> choose([noise, noise - 1e-4, noise - 0.05 + 0.2 * rng.standard_normal(500)])
    2
    >>> choose([noise, noise - 1e-4, noise - 0.05 + 5.0 * rng.standard_normal(500)])
    0
    """
    table = np.stack([_numpy(row).astype(np.float64) for row in losses])  # (c, n)
    w = np.ones(table.shape[1]) if weight is None else _numpy(weight).astype(np.float64)
    judged = np.isfinite(table).any(0) & (w > 0)
    table, w = table[:, judged], w[judged]
    if unit is not None:
        table, w = _of_units(table, w, _numpy(unit)[judged])
    if not judged.any():
        return 0
    with np.errstate(invalid="ignore"):
        mean = table @ w / w.sum()
    mean[~np.isfinite(mean)] = math.inf
    best = int(mean.argmin())
    if least_share is not None:
        least_effect = min(least_effect, least_share * max(0.0, float(mean[best])))
    for k in range(best):
        if mean[k] == math.inf:
            continue
        difference = table[k] - table[best]
        error = n_errors * _standard_error(difference, w)
        if mean[k] - mean[best] <= max(error, least_effect):
            return k
    return best


def choose_towards(losses: Mapping[float, Array], simplest: float, **options: Any) -> float:
    """Of values on a line, the nearest to the simplest that is no worse than the best.

    It lies between the two. On the other side of the simplest a value may be within the noise of
    the best, where a few observations make that noise, and yet is no step towards it.

    `losses` (n,), in nats, are by value; `options` are those of `choose`.
    """
    line = sorted(losses)
    tried = [losses[value] for value in line]
    best = choose(tried, **{**options, "n_errors": 0.0, "least_effect": 0.0})
    start = min(range(len(line)), key=lambda k: abs(line[k] - simplest))
    way = range(start, best + 1) if start <= best else range(start, best - 1, -1)
    return line[way[choose([tried[k] for k in way], **options)]]


def improves(new: Array, old: Array, **options: Any) -> bool:
    """Whether the losses (n,) of a more complex candidate are lower, by the rule of `choose`.

    At the same held-out observations, in nats; `options` are those of `choose`.
    """
    return choose([old, new], **options) == 1


def while_falling(
    first: Trial,
    candidates: Iterable[Any],
    fit: Callable[[Any, Trial], Trial | None],
    loss: Callable[[Trial], float],
) -> list[Trial]:
    """Trials from `first` on, the candidates in order, while each has a lower loss than the last.

    ``fit(candidate, last)`` makes a trial of a candidate; None ends them.
    """
    trials = [first]
    for candidate in candidates:
        trial = fit(candidate, trials[-1])
        if trial is None or not loss(trial) < loss(trials[-1]):
            break
        trials.append(trial)
    return trials


def _of_units(table: np.ndarray, w: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean losses (c, u) of u units, and their weights (u,)."""
    _, place = np.unique(unit, return_inverse=True)
    total = np.bincount(place, w)
    return np.stack([np.bincount(place, w * row) for row in table]) / total, total


def _standard_error(difference: np.ndarray, w: np.ndarray) -> float:
    """Of the weighted mean of the differences (n,); 0 of a single one."""
    n = len(difference)
    if n < 2:
        return 0.0
    deviation = w * (difference - difference @ w / w.sum())
    return float(np.sqrt(n / (n - 1) * (deviation @ deviation)) / w.sum())


def class_codes(Y: Any) -> Any:
    """A number for the class of each row of Y (n, c), array or tensor, in {-1, +1}, shape (n,)."""
    return Y[:, 0] if Y.shape[1] == 1 else Y.argmax(1)


def stratum(y: Tensor) -> tuple[Tensor, bool]:
    """What to stratify targets (n, c) by, and whether that is classes, as labels -1 and +1 are."""
    return class_codes(y), y.shape[1] > 1 or bool((y.abs() == 1).all())


def held_out_rows(
    y: Array,  # (n,), numbers, counts or classes
    n_rows: int,  # exactly, where rows of X are distinct, and less than n
    random: Random,
    *,
    X: Array | None = None,  # (n, d); observations of equal rows stay together
    classes: bool = False,  # whether y holds classes: each keeps an observation to train on
) -> np.ndarray:
    """Observations to hold out of one fit, stratified by y: a mask (n,)."""
    unit, order, value = _units_by_target(y, X, random, classes)
    n_units = len(order)
    n_out = min(round(n_rows * n_units / len(unit)), n_units - 1)
    if classes:  # the first unit of each, which chance put there, stays to train on
        order = order[np.r_[False, np.diff(value[order]) == 0]]
    n_out = min(n_out, len(order))
    held_out = np.zeros(n_units, dtype=bool)
    if n_out > 0:
        # One unit by chance of each of n_out nearly equal parts of the order.
        edges = np.arange(n_out + 1) * len(order) // n_out
        place = _permutation(len(order), random)[:n_out] / len(order)
        held_out[order[edges[:-1] + (place * np.diff(edges)).astype(int)]] = True
    return held_out[unit]


def hold_out(
    X: Tensor, y: Tensor, fraction: float, seed: int, *, max_rows: int = 1_000
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Split observations into those to train on and those to score, (X, y) of each, by a seed.

    Holds out a fraction, rounded up, but no more than a score can afford and training needs less.
    Equal seeds hold the same rows out, so that a warm start scores rows it never trained on.
    """
    n = X.shape[0]
    size = min(math.ceil(fraction * n), max_rows)
    if size >= n:
        raise ValueError(
            f"validation_fraction={fraction} of {n} rows leaves none to train on. Lower it, give "
            "more rows, or set early_stopping=False."
        )
    held = torch.from_numpy(held_out_rows(y, size, torch.Generator().manual_seed(seed)))
    held = held.to(X.device)
    return (X[~held], y[~held]), (X[held], y[held])


def _units_by_target(
    y: Array, X: Array | None, random: Random, classes: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit of each observation (n,), units in the order of their values (u,), values (u,).

    A unit is a set of observations of equal inputs, its value the mean of y or, of classes, the
    number of its rarest class in the order of their frequencies.
    """
    target = _numpy(y)
    unit = np.arange(len(target)) if X is None else replicates(_numpy(X))
    if classes:
        _, code, count = np.unique(target, return_inverse=True, return_counts=True)
        rank = np.argsort(np.argsort(count, kind="stable"))[code.reshape(-1)]
        value = np.full(unit.max() + 1, len(count))
        np.minimum.at(value, unit, rank)
    else:
        value = np.bincount(unit, weights=target.astype(np.float64)) / np.bincount(unit)
    return unit, np.lexsort((_permutation(len(value), random), value)), value


def _permutation(n: int, random: Random) -> np.ndarray:
    if isinstance(random, torch.Generator):
        return torch.randperm(n, generator=random, device=random.device).cpu().numpy()
    return random.permutation(n)


def _numpy(values: Array) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def noises_of(kernel, data: Data) -> Tensor:
    """Variances (n,) of the noise of the observations under an expression with a WhiteKernel."""
    return data.row_noise(data.X.new_tensor(theta_places(kernel)[2]))


def rows_in_blocks(X: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to predict, in blocks (b,), and those outside of all blocks (o,); of X (n, d).

    A block is what is nearest, in standard units, to a row; `order` (n,) is a random one.
    """
    n = len(X)
    spread = X.new_tensor(robust_std(X.cpu().numpy()))
    inverse = 1 / torch.where(spread > 0, spread, 1.0)
    centres = X[order[:VECCHIA_BLOCKS]]
    blocks = NeighborSearch(RBF(inverse.reciprocal().cpu().numpy()), X).query(
        centres, max(1, int(VECCHIA_BLOCK_SHARE * n))
    )
    inside = torch.zeros(n, dtype=torch.bool, device=X.device)
    inside[blocks.reshape(-1)] = True
    rows = order[inside[order]][:VECCHIA_START_ROWS]
    return rows, (~inside).nonzero()[:, 0]


@torch.no_grad()
def held_out_densities(
    kernel, data: Data, rows: Tensor, outside: Tensor, n_neighbors: int = VECCHIA_HELD_NEIGHBORS
) -> Tensor:
    """Log-densities (2 b,), in nats, of rows (b,) given others near them; means over the targets.

    The first half given the nearest of all other observations, the second given the nearest of
    the observations `outside` (o,) of all blocks that the rows lie in.
    """
    signal, X = split_noise(kernel)[0], data.X
    noise = noises_of(kernel, data)
    of_all = NeighborSearch(signal, X).query(X[rows], min(n_neighbors, len(X) - 1), rows)
    beyond = NeighborSearch(signal, X[outside]).query(X[rows], min(n_neighbors, len(outside)))
    found = []
    for near in (of_all, outside[beyond]):
        group = torch.cat([near, rows[:, None]], 1)
        for tile in Conditionals(signal, X, group, noise):
            e, D = tile.contrast(data.y.reshape(len(data), -1)), tile.variance[:, None]
            found.append(-0.5 * ((2 * math.pi * D).log() + e.square() / D).mean(1))
    return torch.cat(found)
