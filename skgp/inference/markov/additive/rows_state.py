r"""Predictions of an additive model that was fitted in the space of its rows.

With the covariances :math:`k_j(x, \cdot)` of component j at x with the sum at the rows, the level
:math:`\ell_j = \sum_i p_i k_j(x_i, \cdot)` of the rows' shares p, and :math:`\alpha`, R of
:mod:`.dense`, the component about its mean over the rows is

.. math:: E \bar f_j(x) = a^\top \alpha, \qquad
          \operatorname{var} \bar f_j(x) = k_j(0) - 2\, k_j(x, \cdot)\, p + \ell_j^\top p
          - a^\top R\, a, \qquad a = k_j(x, \cdot) - \ell_j.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skgp.inference.markov.additive.dense import DensePosterior, DensePrior, condition
from skgp.inference.markov.additive.state import AdditiveState
from skgp.kernels.sde import state_space

__all__ = ["RowsState"]

_NUMBERS = 2**22  # of the covariances of a batch of new rows with those of training


@dataclass(frozen=True)
class RowsState(AdditiveState):
    r"""The exact posterior, in the space of the m distinct training rows.

    Attributes
    ----------
    parts : tuple of Kernel
        The kernels.
    X : Tensor of shape (m, c)
        Distinct rows.
    beta, weight : Tensor of shape (m,)
        Sites :math:`\exp(\beta \eta - \omega \eta^2 / 2)` of the sum less its prior mean.
    shares : Tensor of shape (m,)
        Share of the training rows' weight.
    offset : float
    spread : Tensor of shape (c,)
        0.
    parameters, noise, elbo, n_iter, history
        See `AdditiveState`.

    Notes
    -----
    Pickles as m (c + 3) numbers; what predictions need is worked out again at the first of them, in
    O(m^3). Means are O(n m c), variances O(n m^2), of components O(n m^2 c).
    """

    parts: tuple[Any, ...]
    X: Tensor
    beta: Tensor
    weight: Tensor
    shares: Tensor
    offset: float
    spread: Tensor
    parameters: Tensor
    noise: float
    elbo: float
    n_iter: int
    history: list[float]

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_solved", None)
        return state

    @property
    def kernels(self) -> list[Any]:
        """Of each component."""
        return list(self.parts)

    @property
    def posterior(self) -> str:
        """Always "joint"."""
        return "joint"

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        q, levels = self._solution
        level, prior_var = levels.sum(0), sum(q.prior.covariances.variances)
        mean, var = X.new_empty(len(X)), X.new_empty(len(X))
        for rows, x in self._batches(X):
            k = q.prior.covariances.total(x, q.prior.x)
            mean[rows] = (k - level) @ q.alpha + self.offset
            var[rows] = prior_var - q.reduce(k.T)
        return mean, var.clamp_(min=0)

    def components(self, X: Tensor) -> tuple[Tensor, Tensor]:
        q, levels = self._solution
        prior_var = X.new_tensor(q.prior.covariances.variances)
        mean, var = torch.empty_like(X), torch.empty_like(X)
        for rows, x in self._batches(X):
            k = q.prior.covariances.each(x, q.prior.x)  # (c, b, m)
            var[rows] = prior_var + levels @ self.shares - 2 * (k @ self.shares).T
            k -= levels[:, None]
            mean[rows] = (k @ q.alpha).T
            for j, about in enumerate(k):
                var[rows, j] -= q.reduce(about.T)
        return mean, var.clamp_(min=0)

    def covariance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        q, _ = self._solution
        x = X.T.contiguous()
        k = q.prior.covariances.total(q.prior.x, x)
        return self.moments(X)[0], q.prior.covariances.symmetric(x) - q.reduce_all(k)

    @property
    def _solution(self) -> tuple[DensePosterior, Tensor]:
        """The posterior and the components' levels (c, m), kept after the first call."""
        solved = self.__dict__.get("_solved")
        if solved is None:
            forms = [state_space(kernel) for kernel in self.parts]
            dynamics = [form.at() for form in forms]
            prior = DensePrior(dynamics, self.X.T.contiguous())
            solved = condition(prior, self.beta, self.weight), prior.levels(self.shares)
            self.__dict__["_solved"] = solved
        return solved

    def _batches(self, X: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Batches of new rows: which, and as columns."""
        size = max(1, _NUMBERS // self.X.numel())
        for a in range(0, len(X), size):
            rows = slice(a, min(len(X), a + size))
            yield rows, X[rows].T.contiguous()
