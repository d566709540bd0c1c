r"""The prior of a sparse-within-sparse GP whose noise is not Gaussian, by rows held out.

`find_prior` holds rows out, lets :mod:`skgp.learning.local.prior_scale` choose amplitude and KL
weight, and hands on what the fit of all rows can use.

Rows held out must not be inducing points: a point without data of its own, but right at the row
that is predicted, is what no prediction later has. Where enough rows are none, the inducing points
stay as they are, and the system of all rows comes with that of the rows learned from. Where every
row is one, points are left out, and all is computed again for all rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.assembly import row_weights
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.search import NeighborSearch
from skgp.inference.neighbors.system import LocalSystem, Posterior, nested_systems
from skgp.kernels.amplitude import amplitude_range, scale_amplitude
from skgp.learning.local.prior_scale import PriorScale, choose_prior, rescaled
from skgp.learning.local.settings import Settings
from skgp.learning.selection import held_out_rows
from skgp.likelihoods import Gaussian
from skgp.likelihoods.families import Family

__all__ = ["FEW_ROWS", "Prior", "active_sets", "find_prior", "split_rows"]

Callback = Callable[[int, dict], bool | None]

#: Below so many rows none is held out.
FEW_ROWS = 100
_MIN_HELD_OUT, _MAX_HELD_OUT = 500, 4000


@dataclass(frozen=True)
class Prior:
    """The prior found, and what a fit of all rows may begin with.

    Attributes
    ----------
    kernel : sklearn kernel expression without noise
    kl_weight : float or None
        None is M / H.
    data : Data
        All rows, perhaps in another order.
    coupling : float or None
        Of several classes; None without rows held out.
    system : LocalSystem or None
        Of `data` under this prior.
    start : Posterior or None
        Of the inducing points.
    history : list of float
        Scores of the rows held out, in nats.
    """

    kernel: Any
    kl_weight: float | None
    data: Data
    coupling: float | None = None
    system: LocalSystem | None = None
    start: Posterior | None = None
    history: list[float] = field(default_factory=list)


def active_sets(kernel, X: Tensor, Z: Tensor, settings: Settings) -> Tensor:
    """Indices (n, H) of the inducing points Z (M, d) nearest to rows X (n, d)."""
    search = NeighborSearch(kernel, Z, settings.neighbors)
    # In order of memory: what they index is read faster.
    return search.query(X, min(settings.n_neighbors, len(Z))).sort(1).values


def split_rows(
    y: Tensor, settings: Settings, generator: torch.Generator, preferred: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices of rows to learn from and of rows held out, each increasing; stratified by y.

    Parameters
    ----------
    y : Tensor of shape (n, c)
    settings : Settings
    generator : torch.Generator
    preferred : Tensor of bool, shape (n,), optional
        Rows to hold out rather than others.
    """
    n = len(y)
    least = min(n // 3, _MIN_HELD_OUT)
    n_out = min(max(round(settings.validation_fraction * n), least), _MAX_HELD_OUT, n - 1)
    target = (y[:, 0] if y.shape[1] == 1 else y.argmax(1)).cpu()
    labels = y.shape[1] > 1 or bool((y.abs() == 1).all())
    first = torch.ones(n, dtype=torch.bool) if preferred is None else preferred.cpu()
    held_out = torch.zeros(n, dtype=torch.bool)
    for part in (first, ~first):
        rows, size = part.nonzero()[:, 0], n_out - int(held_out.sum())
        if size >= len(rows):
            held_out[rows] = True
        elif size > 0:
            chosen = held_out_rows(target[rows], size, generator, classes=labels)
            held_out[rows[torch.from_numpy(chosen)]] = True
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def find_prior(
    kernel,
    family: Family,
    data: Data,
    Z: Tensor,
    position: Tensor,
    offset: Tensor,
    settings: Settings,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> Prior:
    """Choose amplitude, KL weight and coupling.

    Parameters
    ----------
    kernel, family, data, Z, position, offset, settings, generator
        As in :func:`~skgp.models.swsgp.fit.fit_swsgp`.
    callback : callable, optional
        Called after each trial; True ends the search.

    Returns
    -------
    Prior
        That given, where there is nothing to choose or rows are few.
    """
    likelihood = family.make(family.initial(Z))
    learn = settings.learn_hyperparameters
    low, high = amplitude_range(kernel) if learn else (1.0, 1.0)
    learn_kl = learn and settings.kl_weight is None and settings.n_neighbors < len(Z)
    free = learn_kl or high > low or data.y.shape[1] > 1
    given = Prior(kernel, settings.kl_weight, data)
    if isinstance(likelihood, Gaussian) or not free or len(data) < FEW_ROWS:
        return given
    halves = _halves(kernel, data, Z, position, settings, generator)
    kl_weight = halves.kl_weight if settings.kl_weight is None else settings.kl_weight
    system, everything = halves.systems(kl_weight)
    if everything is None:
        held_out = row_weights(halves.tiles[1])
    else:
        held_out = everything.rows.last(len(halves.held_out))
    found = choose_prior(
        system,
        halves.kept.y,
        held_out,
        halves.held_out.y,
        likelihood.at(halves.kept.offset),
        offset,
        held_out_likelihood=likelihood.at(halves.held_out.offset),
        weight=halves.held_out.weight,
        amplitudes=(low, high),
        kl_weight=kl_weight if learn_kl else 1.0,
        callback=callback,
    )
    if everything is not None:
        everything = rescaled(everything, found.amplitude, found.kl_factor)
    asked = found.kl_factor * len(Z) / min(settings.n_neighbors, len(Z))
    return Prior(
        scale_amplitude(kernel, found.amplitude) if found.amplitude != 1 else kernel,
        asked if settings.kl_weight is None else kl_weight,
        halves.data,
        coupling=found.coupling,
        system=everything,
        start=found.q if halves.keeps_points else _completed(found, Z, halves.own),
        history=found.history,
    )


@dataclass(frozen=True)
class _Halves:
    """Rows to learn from, then rows held out, and their conditionals.

    Attributes
    ----------
    data : Data
        Both, in this order.
    n_kept : int
        Of the former.
    own : Tensor of int64, shape (p,)
        Which inducing point each of the latter is, -1 for none.
    tiles : tuple of Tiles
        Of either.
    """

    data: Data
    n_kept: int
    own: Tensor
    tiles: tuple[Tiles, Tiles]

    @property
    def kept(self) -> Data:
        return self.data.take(slice(self.n_kept))

    @property
    def held_out(self) -> Data:
        return self.data.take(slice(self.n_kept, None))

    @property
    def keeps_points(self) -> bool:
        """Whether no inducing point had to be left out."""
        return bool((self.own < 0).all())

    @property
    def kl_weight(self) -> float:
        """M / H, of the points left."""
        return len(self.tiles[0].Z) / self.tiles[0].active.shape[1]

    def systems(self, kl_weight: float) -> tuple[LocalSystem, LocalSystem | None]:
        """That of the rows to learn from; and of all rows, where the points are the same."""
        if not self.keeps_points:
            weight = self.kept.weight
            return nested_systems([self.tiles[0]], kl_weight=kl_weight, weight=weight)[0], None
        both = nested_systems(list(self.tiles), kl_weight=kl_weight, weight=self.data.weight)
        return both[0], both[1]


def _halves(
    kernel,
    data: Data,
    Z: Tensor,
    position: Tensor,
    settings: Settings,
    generator: torch.Generator,
) -> _Halves:
    """Hold rows out, rather such as are no inducing points."""
    kept, held_out = split_rows(data.y, settings, generator, position < 0)
    data, own = data.take(torch.cat([kept, held_out])), position[held_out.to(position.device)]
    points = Z[_others(Z, own[own >= 0])]
    active = active_sets(kernel, data.X, points, settings)
    first, last = slice(0, len(kept)), slice(len(kept), len(data))
    tiles = (
        Tiles(kernel, data.X[first], points, active[first]),
        Tiles(kernel, data.X[last], points, active[last]),
    )
    return _Halves(data, len(kept), own, tiles)


def _others(Z: Tensor, index: Tensor) -> Tensor:
    """Mask (M,) of the rows of Z other than `index`."""
    mask = torch.ones(len(Z), dtype=torch.bool, device=Z.device)
    mask[index] = False
    return mask


def _completed(found: PriorScale, Z: Tensor, own: Tensor) -> Posterior:
    """q(u) of all of Z: as learned, and as predicted at the points `own` (p,) left out."""
    out, predicted = own >= 0, found.predicted
    others = _others(Z, own[out])
    mean = Z.new_empty(len(Z), found.q.mean.shape[1])
    var = torch.empty_like(mean)
    mean[others], var[others] = found.q.mean, found.q.var
    mean[own[out]], var[own[out]] = predicted.mean[out], predicted.var[out]
    return Posterior(mean, var)
