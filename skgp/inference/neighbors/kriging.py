r"""Kriging from the nearest rows: exact Gaussian process regression on each row's neighbourhood.

With I the H training rows nearest to x (:mod:`skgp.inference.neighbors.search`), W their weights
and the targets T less their prior means m,

.. math:: a = (K_I + \sigma^2 W_I^{-1})^{-1} k, \qquad
          \mu = m + a^T (T_I - m), \qquad q = k_{xx} - k^T a \qquad
          \text{(Rasmussen and Williams, eqs. 2.25-2.26)}

for all columns of T at once. Rows of equal inputs are one row of their mean and total weight.

*Regression*: f ~ N(mu, q), an observation adds :math:`\sigma^2`. *Classification*: labels -1 and
+1 (of many classes, each against the rest) are kriged as if they were numbers, and a link
(`LabelLink`) turns the result into probabilities,

.. math:: p_k \propto g\Big(t_k + \frac{\nu_k + d\, \nu_k^3}{\sqrt{a q + b}}\Big), \qquad
          \nu = \mu - m,

g the normal distribution function for two classes and exp for more. If labels were the signs of a
latent function with Gaussian noise, a would be 1, b the noise and d 0. If so many noisy labels were
averaged that :math:`\mu = 2 p - 1`, then :math:`\Phi^{-1}(p) = \sqrt{\pi/2}\,(\mu + \tfrac{\pi}{12}
\mu^3 + \dots)`. Labels are neither, so t, a, b and d >= 0 maximise the likelihood of labels
left out one by one (:mod:`skgp.learning.local.hyperparameters`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import DIRECT_COLUMNS
from skgp.inference.neighbors.posterior import LocalPredictor
from skgp.inference.neighbors.search import distinct
from skgp.linalg.runtime import TensorState


@dataclass(frozen=True)
class KrigingModel(LocalPredictor):
    r"""Training rows, and what they say about others near them."""

    kernel: Any  # without noise
    noise: float  # sigma^2, the variance of an observation of weight 1
    X: Tensor  # (M, d), distinct rows
    targets: Tensor  # (M, c)
    weight: Tensor | None  # (M,), positive; None counts every row once
    offset: Tensor  # (c,); m, the prior means of the targets
    n_neighbors: int  # H; all rows where there are fewer
    n_scales: int = 1  # that share the neighbours

    neighbors = "auto"
    points = property(lambda self: self.X)
    values = property(lambda self: self.targets - self.offset)

    @cached_property
    def noises(self) -> Tensor:
        """Noise variances of the rows, (M,)."""
        if self.weight is None:
            return self.X.new_tensor(self.noise).expand(len(self.X))
        return self.noise / self.weight

    def others(self, row: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Neighbours (p, H) of training rows (p,), of which a part or all is left out; influence.

        Where something of a row stays, `shared` (p,), it is its own neighbour.
        """
        shape = len(row), self.neighborhood.size
        active = torch.empty(shape, dtype=torch.int64, device=row.device)
        influence = torch.empty(shape, dtype=self.X.dtype, device=self.X.device)
        for part, leaves in ((shared, False), (~shared, True)):
            some = row[part]
            if len(some):
                found = self.neighborhood.find(self.X[some], some if leaves else None)
                active[part], influence[part] = found
        return active, influence

    @torch.no_grad()
    def leave_out(
        self, row: Tensor, unit: Tensor, value: Tensor, others: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Mean (p, c), variance (p,) of training rows from all others and what is left of them.

        Of the rows (p,) observations of weight `unit` (p,) and target `value` (p, c) are taken
        away; `others` finds the neighbours.
        """
        weight = self.X.new_ones(len(row)) if self.weight is None else self.weight[row]
        left = (weight - unit)[:, None]  # (p, 1)
        active, influence = others
        rest = (weight[:, None] * self.targets[row] - unit[:, None] * value) / left  # (p, c)
        parts = []
        for i in torch.arange(len(row), device=row.device).split(self._tile_rows(active.shape[1])):
            own = (active[i] == row[i, None]) & (influence[i] > 0)
            noise = torch.where(own, self.noise / left[i], self.noises[active[i]])
            targets = torch.where(own[..., None], rest[i, None], self.targets[active[i]])
            weights, var = self._given(self.X[row[i]], active[i], influence[i], noise)
            known = torch.einsum("nh,nhc->nc", weights, targets - self.offset)
            parts.append((self.offset + known, var))
        mean, var = map(torch.cat, zip(*parts, strict=True))
        return mean, var

    def _given(self, X, active, influence, noise, method="direct"):
        method = "direct" if X.shape[1] <= DIRECT_COLUMNS else "expand"
        return super()._given(X, active, influence, noise, method)


@dataclass(frozen=True)
class LabelLink(TensorState):
    r"""Class probabilities of kriged labels.

    .. math:: p_k = (1 - \epsilon)\, \tilde p_k + \epsilon \pi_k,

    with :math:`\tilde p` of the module's equation. That :math:`\epsilon` of all rows belong to
    any class keeps probabilities off 0 and 1 where neighbours all agree: n rows can tell nothing
    of events that are rarer than 1 / n.
    """

    intercept: Tensor  # (c,); t
    log_scales: Tensor  # (3,); logs of a, b and d
    frequency: Tensor  # (max(c, 2),); pi, of the classes
    lapse: float  # epsilon

    def log_probabilities(self, mean: Tensor, var: Tensor) -> Tensor:
        """Log-probabilities (n, C) from kriged labels less their prior means (n, c), and q (n,)."""
        slope, floor, bend = self.log_scales.exp().unbind()
        signal = mean + bend * mean**3
        z = self.intercept + signal / (slope * var + floor).sqrt()[:, None]
        if z.shape[1] == 1:
            log_p = torch.special.log_ndtr(torch.cat([-z, z], 1))
        else:
            log_p = z.log_softmax(1)
        lapsed = math.log(self.lapse) + self.frequency.log()
        return torch.logaddexp(math.log1p(-self.lapse) + log_p, lapsed)


def is_shared(weight: Tensor, unit: Tensor) -> Tensor:
    """Whether something is left of rows of some weight of which a unit is taken, (p,)."""
    return weight - unit > 1e-9 * weight


def merge_rows(
    X: Tensor, targets: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Merge equal rows of X (n, d) to their weighted mean target (n, c) and total weight (n,).

    Rows stay in the order in which they come first; no weights if none are equal or given.
    """
    first, group = distinct(X)
    if len(first) == len(X):
        return X, targets, weight
    each = X.new_ones(len(X)) if weight is None else weight
    total = X.new_zeros(len(first)).index_add_(0, group, each)
    sums = targets.new_zeros(len(first), targets.shape[1])
    sums.index_add_(0, group, each[:, None] * targets)
    return X[first], sums / total[:, None], total
