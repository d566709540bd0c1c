r"""Observations, and rows of equal inputs merged without loss.

Given f, observations :math:`y_1 \dots y_r` at the same x with weights w enter the likelihood only
through their weighted mean, their total weight and their scatter,

.. math:: \prod_i N(y_i; f, \sigma^2)^{w_i} = N(\bar y; f, \sigma^2 / W)\,
          (2 \pi \sigma^2)^{(1 - W) / 2}\, W^{-1/2} \exp(-\tfrac{s}{2 \sigma^2}),
          \qquad W = \sum w_i, \quad s = \sum w_i (y_i - \bar y)^2.

Fewer rows, a better conditioned kernel matrix, and a sharper estimate of the noise. Of t targets at
each x, independent given their f, the product is over all, and s the sum of their scatters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.linalg.runtime import TensorState


@dataclass(frozen=True)
class Data(TensorState):
    r"""Observations.

    Attributes
    ----------
    X : Tensor of shape (n, d)
    y : Tensor of shape (n,) or (n, c)
        Of merged replicates :math:`\bar y`; one column for each of c latent functions or targets.
    weight : Tensor of shape (n,) or None
        Positive likelihood weights, W of merged replicates: a weight of 2 equals the observation
        given twice. None where all are 1.
    scatter : Tensor of shape (n,) or None
        s of merged replicates, summed over targets; None where each stands alone.
    offset : Tensor of shape (n, 1) or None
        Of the observations, for the likelihood: log-exposures of counts.
    """

    X: Tensor
    y: Tensor
    weight: Tensor | None = None
    scatter: Tensor | None = None
    offset: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def total(self) -> float:
        """Number of observations, those of weight w counted w times."""
        return float(len(self) if self.weight is None else self.weight.sum())

    @property
    def n_targets(self) -> int:
        """Columns of y; 1 of y (n,)."""
        return 1 if self.y.ndim == 1 else self.y.shape[1]

    @property
    def varies(self) -> bool:
        """Whether there is one target, y (n,), of more than one value."""
        return self.y.ndim == 1 and bool(self.y.max() > self.y.min())

    @property
    def exposure(self) -> float:
        """Weighted sum of the exposures; of no offsets the number of observations."""
        if self.offset is None:
            return self.total
        return float(self.weighted_sum(self.offset.double().exp()))

    @property
    def log_exposure(self) -> Tensor | None:
        """The offsets as (n,)."""
        return None if self.offset is None else self.offset[:, 0]

    @property
    def is_one_value(self) -> bool:
        """Whether one input and one target is all there is, which tells nothing of theta."""
        return len(self.y) < 2 and (self.scatter is None or not bool(self.scatter.any()))

    @property
    def mean_square(self) -> float:
        """Of the targets of all observations, scatter included; 1 where they are all 0."""
        squares = float(self.weighted_sum(self.y.square()))
        if self.scatter is not None:
            squares += float(self.scatter.sum())
        return squares / (self.total * self.n_targets) or 1.0

    def map(self, function: Callable[[Tensor], Tensor]) -> "Data":
        """`function` of every tensor."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return replace(self, **{k: function(v) for k, v in columns.items() if v is not None})

    def take(self, index: Tensor | slice) -> "Data":
        """The observations of an index, mask or slice; of a slice, views."""
        index = index.to(self.X.device) if isinstance(index, Tensor) else index
        return self.map(lambda tensor: tensor[index])

    def merged(self, *, any_likelihood: bool = False) -> "Data":
        """Those of equal inputs merged, in float64: see `merge_replicates`. O(n d log n).

        Only Gaussian noise allows it; `any_likelihood` those of equal targets and offset, too.
        """
        if not any_likelihood:
            X, y = (each.cpu().double().numpy() for each in (self.X, self.y))
            weight = None if self.weight is None else self.weight.cpu().double().numpy()
            return merge_replicates(X, y, weight, self.X.device)
        targets = self.y.reshape(len(self), -1)
        columns = [self.X, targets, *([] if self.offset is None else [self.offset])]
        found = replace(self, X=torch.cat([each.double() for each in columns], 1)).merged()
        parts = found.X.split([each.shape[1] for each in columns], 1)
        X, y, *offset = (part.contiguous() for part in parts)
        scatter = None if found.weight is None else torch.zeros_like(found.weight)
        return Data(X, y.reshape(-1, *self.y.shape[1:]), found.weight, scatter, *offset)

    def joined(self, other: "Data") -> "Data":
        """These and others, of weight 1 and offset 0 where one of the two has none."""
        pair = self, other
        found = Data(torch.cat([each.X for each in pair]), torch.cat([each.y for each in pair]))
        for name, start, shape in (("weight", 1.0, ()), ("offset", 0.0, (1,))):
            parts = [getattr(each, name) for each in pair]
            if any(part is not None for part in parts):
                filled = [
                    each.X.new_full((len(each), *shape), start) if part is None else part
                    for each, part in zip(pair, parts, strict=True)
                ]
                found = replace(found, **{name: torch.cat(filled)})
        return found

    def some(self, size: int, generator: torch.Generator) -> "Data":
        """At most `size` observations at random, in their order."""
        return self.take(random_rows(len(self), size, generator).sort().values)

    def weighted_sum(self, values: Tensor) -> Tensor:
        """Sum over the observations of values (n,) or (n, c), a scalar."""
        if self.weight is None:
            return values.sum()
        return (values * (self.weight if values.ndim == 1 else self.weight[:, None])).sum()

    def weighted_mean(self, values: Tensor) -> Tensor:
        """The same over the number of observations."""
        return self.weighted_sum(values) / self.total

    def likelihood(self, base: Any) -> Any:
        """The likelihood `base` of an observation, offsets and scatter of these considered."""
        within = None
        if self.scatter is not None and self.weight is not None:
            within = (self.scatter / self.weight)[:, None]
        return base.at(self.offset).of_means(within)

    def log_power(self, noise: Tensor) -> Tensor:
        r"""What the product above has beside :math:`N(\bar y; f, \sigma^2 / W)`, shape (n,), nats.

        Summed over targets.

        Parameters
        ----------
        noise : Tensor of shape ()
            :math:`\sigma^2`; the result is differentiable in it.
        """
        if self.weight is None or self.scatter is None:
            return self.y.new_zeros(len(self))
        log_noise = (2 * torch.pi * noise).log()
        powers = (1 - self.weight) * log_noise - self.weight.log()  # of a target
        return 0.5 * (self.n_targets * powers - self.scatter / noise)

    def log_power_slope(self, noise: Tensor) -> Tensor:
        """Derivative of the sum of `log_power` in the log noise, (); (k,) for noise (k, 1)."""
        if self.weight is None or self.scatter is None:
            return noise.new_zeros(noise.shape[:-1])
        return 0.5 * (self.n_targets * (1 - self.weight) + self.scatter / noise).sum(-1)

    def noise_gradient(self, slope: Tensor, noise: Tensor) -> Tensor:
        """In the log noise (..., 1), given the slopes (..., n) in `row_noise`: (...)."""
        return (slope * self.row_noise(noise)).sum(-1) + self.log_power_slope(noise)

    def pooled(self, z2: float, noise: float) -> float:
        """Mean squared standardised residual of all observations, given that of distinct inputs."""
        if self.scatter is None or self.weight is None or z2 == 1.0:
            return z2
        n_within = max(0.0, self.total - len(self))
        within = float(self.scatter.sum()) / (self.n_targets * noise)
        return (len(self) * z2 + within) / (len(self) + n_within)

    def row_noise(self, noise: Tensor) -> Tensor:
        r""":math:`\sigma^2 / W` of each distinct input, (n,); (k, n) for noise (k, 1)."""
        if self.weight is None:
            return noise.expand(*noise.shape[:-1], len(self.y))
        return noise / self.weight


def replicates(X: np.ndarray) -> np.ndarray:
    """Number of the distinct row that each row of X (n, d) is, in the order they first come in.

    O(n d log n).
    """
    X = np.ascontiguousarray(X.reshape(len(X), math.prod(X.shape[1:])) + 0.0)  # -0. becomes 0.
    rows = X.view(np.dtype((np.void, X.dtype.itemsize * X.shape[1]))).ravel()
    _, first, number = np.unique(rows, return_index=True, return_inverse=True)
    order = np.empty(len(first), dtype=np.int64)
    order[first.argsort()] = np.arange(len(first))
    return order[number.reshape(-1)]


def n_observations(X: np.ndarray, y: np.ndarray) -> int:
    """Number of independent observations among rows X (n, d) of targets y, (n,) or (n, t).

    Rows of equal input and target are copies of one: independent noise never ties, unless targets
    are discrete, which is where most come at several inputs, and several at one.
    """
    n_values = len(np.unique(y, axis=None if y.ndim == 1 else 0))
    if n_values == len(y):
        return len(y)
    distinct = len(np.unique(replicates(np.column_stack([X, y]))))
    is_discrete = 2 * n_values <= distinct and len(np.unique(replicates(X))) < distinct
    return len(y) if is_discrete else distinct


def random_rows(n: int, size: int, generator: torch.Generator) -> Tensor:
    """`size` of n rows in random order, where the generator is; all in their order if no more."""
    if n <= size:
        return torch.arange(n, device=generator.device)
    return torch.randperm(n, generator=generator, device=generator.device)[:size]


def merge_replicates(
    X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None, device: torch.device
) -> Data:
    """Merge observations of equal inputs. ``O(n d log n)``; copies, so that X may be read-only.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,) or (n, t)
    sample_weight : ndarray of shape (n,) or None
        Positive.
    device : torch.device
    """

    def tensor(array):
        return torch.tensor(array, dtype=torch.float64, device=device)

    distinct, inverse = np.unique(X, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    if len(distinct) == len(X) and sample_weight is None:
        order = np.empty(len(X), dtype=np.int64)
        order[inverse] = np.arange(len(X))
        return Data(tensor(distinct), tensor(y[order]))
    weight = np.bincount(inverse, weights=sample_weight).astype(np.float64)

    def summed(values):  # (n, t) to (r, t)
        values = values if sample_weight is None else sample_weight[:, None] * values
        return np.stack([np.bincount(inverse, weights=column) for column in values.T], axis=1)

    Y = y.reshape(len(y), -1)  # (n, t)
    means = summed(Y) / weight[:, None]
    scatter = summed((Y - means[inverse]) ** 2).sum(1)
    y_mean = means.reshape(len(means), *y.shape[1:])
    return Data(tensor(distinct), tensor(y_mean), tensor(weight), tensor(scatter))
