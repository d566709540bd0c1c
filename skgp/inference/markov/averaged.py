r"""States of a series, of any kind, and one under several values of its hyper-parameters.

Given any of these, of some weight each, f is a Gaussian process; together they are a mixture, of
moments by the law of total variance:

.. math:: m = \sum_k w_k m_k, \qquad v = \sum_k w_k \{v_k + (m_k - m)^2\}.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.markov.additive_states import AdditiveState
from skgp.inference.markov.regression import make_regression_series
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.inference.markov.terms import Terms
from skgp.kernels.expression import Sum, summands
from skgp.kernels.sde import StateSpace, state_space
from skgp.kernels.series_parts import has_waves
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import TensorState

#: Whether a part is a season, and how many of its kind stand before it.
Place = tuple[bool, int]


@dataclass(frozen=True)
class AveragedState(TensorState):
    """States of one series, the likeliest first; they share times, offset and terms."""

    states: tuple[SeriesState, ...]
    weights: tuple[float, ...]  # of sum 1
    noise: tuple[float, ...]  # variances of the observations

    @property
    def kernel(self) -> Any:
        """That of the likeliest."""
        return self.states[0].kernel

    @property
    def parts(self) -> list[Any]:
        """Kernels of the columns of `components`: of each the first that a state has there."""
        return list(self._columns.values())

    @property
    def _columns(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for state in self.states:
            for place, kernel in _places(state).items():
                found.setdefault(place, kernel)
        return found

    @property
    def form(self) -> StateSpace:
        """The same in state space."""
        return self.states[0].form

    @property
    def offset(self) -> float:
        """Prior mean of f."""
        return self.states[0].offset

    @property
    def terms(self) -> Any:
        """Those of the likeliest; None without."""
        return getattr(self.states[0], "terms", None)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of f at any rows, (n,)."""
        return self.moments(x)[0]

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at any rows, each (n,)."""
        return self._mixed([state.moments(x) for state in self.states])

    def mixture(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights (k,) above 0, and means and variances (k, n) of observations at any rows."""
        used = [each for each in zip(self.states, self.weights, self.noise, strict=True) if each[1]]
        moments = [(w, *state.moments(x), noise) for state, w, noise in used]
        weights = x.new_tensor([w for w, *_ in moments], dtype=torch.float64)
        means = torch.stack([mean for _, mean, _, _ in moments])
        return weights, means, torch.stack([var + noise for _, _, var, noise in moments])

    def past_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same given what was observed before each time alone."""
        return self._mixed([state.past_moments(x) for state in self.states])

    def components(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances (n, p) of the parts of the model."""
        found = [state.components(x) for state in self.states]
        columns = list(self._columns)

        def wide(part: Tensor, places: list[int]) -> Tensor:
            """With parts of the kernel that a state lacks, which add nothing, before the terms."""
            own, others = part.tensor_split([len(places)], 1)
            found = part.new_zeros(len(part), len(columns))
            found[:, places] = own
            return torch.cat([found, others], 1)

        places = [[columns.index(place) for place in _places(state)] for state in self.states]
        pairs = zip(found, places, strict=True)
        return self._mixed([(wide(mean, at), wide(var, at)) for (mean, var), at in pairs])

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and joint covariance (n, n) of f at any rows."""
        means, covariances = zip(*(state.covariance(x) for state in self.states), strict=True)
        mean = self._sum(means)
        apart = [each - mean for each in means]
        return mean, self._sum(covariances) + self._sum([torch.outer(d, d) for d in apart])

    def samples(
        self, x: Tensor, n_samples: int, generator: torch.Generator, *, noise: bool = False
    ) -> Tensor:
        """Joint draws of f, or of observations, at any rows, (n, n_samples)."""
        weights = torch.tensor(self.weights, dtype=torch.float64, device=generator.device)
        which = torch.multinomial(weights, n_samples, replacement=True, generator=generator)
        draws = x.new_empty(len(x), n_samples)
        for k, state in enumerate(self.states):
            here = (which == k).nonzero()[:, 0]
            if len(here):
                draws[:, here] = state.samples(x, len(here), generator)
                if noise:
                    errors = torch.empty_like(draws[:, here]).normal_(generator=generator)
                    draws[:, here] += math.sqrt(self.noise[k]) * errors
        return draws

    def with_rows(self, series: Series, likelihood: Likelihood) -> "AveragedState":
        """The posterior given more rows, hyper-parameters and weights kept."""
        pairs = zip(self.states, self.noise, strict=True)
        found = []
        for state, noise in pairs:
            at = torch.tensor([math.log(noise)], dtype=torch.float64)
            found.append(state.with_rows(series, likelihood.with_parameters(at)))
        return replace(self, states=tuple(found))

    def _mixed(self, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        means, variances = zip(*pairs, strict=True)
        mean = self._sum(means)
        return mean, self._sum([v + (m - mean) ** 2 for m, v in pairs])

    def _sum(self, values: Any) -> Tensor:
        """Weighted sum over the states."""
        return sum(w * value for w, value in zip(self.weights, values, strict=True))


def _places(state: SeriesState) -> dict[Place, Any]:
    """The parts of a kernel: seasons of any structure are the same, in their order."""
    parts = summands(state.kernel)
    seasons = [has_waves(part) for part in parts]
    return {(kind, seasons[:i].count(kind)): parts[i] for i, kind in enumerate(seasons)}


# ---- states of any kind, and the series they are of


Exact = SeriesState | AveragedState
State = Exact | InducingState | AdditiveState


def distinct(data: Data, place: int | None) -> Data:
    """Rows of a series with covariates: those of equal columns and targets as one of their weight.

    `place` is that of the times; None of an additive model, which is as it was.
    """
    if place is None or data.X.shape[1] == 1 or len(data.X[:, place].unique()) == len(data):
        return data
    return data.merged(any_likelihood=True)


def series_of(data: Data, terms: Terms | None) -> list[Series]:
    """One series a column of y."""
    rest = data.weight, data.log_exposure
    if terms is None:
        return [make_series(data.X[:, 0], y, *rest) for y in data.y.T]
    x, features = data.X[:, terms.time], terms.features(data.X)
    return [make_regression_series(x, y, features, *rest) for y in data.y.T]


def parts_of(state: State, *, split: bool = False) -> list[Any]:
    """Kernels of the components; of a series all at once, or its summands."""
    if isinstance(state, Exact | InducingState):
        if not split:
            return [state.kernel]
        return state.parts if isinstance(state, AveragedState) else summands(state.kernel)
    return list(state.kernels)


def forms_of(state: State) -> list[StateSpace]:
    """The components in state space."""
    if isinstance(state, Exact):
        return [state.form]
    return [state_space(part) for part in parts_of(state)]


def kernel_of(state: State) -> Any:
    """The kernel of f as one expression.

    The sum is a balanced tree: scikit-learn asks each operand for its bounds twice, which takes
    2^c steps of c summands added one after the other, and c^2 of a balanced tree.
    """
    kernels = parts_of(state)
    while len(kernels) > 1:
        pairs = [Sum(*pair) for pair in zip(kernels[::2], kernels[1::2], strict=False)]
        kernels = pairs + kernels[len(kernels) - len(kernels) % 2 :]
    return kernels[0]
