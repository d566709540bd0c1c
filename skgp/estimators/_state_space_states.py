"""States of state-space estimators: their data, their kernels, and columns that act together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from sklearn.base import is_classifier
from sklearn.gaussian_process.kernels import Kernel, Sum

from skgp.data import Data
from skgp.inference.markov.additive_states import AdditiveState
from skgp.inference.markov.averaged import AveragedState
from skgp.inference.markov.regression import make_regression_series
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.inference.markov.terms import Terms
from skgp.kernels import StateSpace, state_space
from skgp.kernels.expression import summands
from skgp.learning.markov.additive import missed_interaction, rows_to_look_at
from skgp.likelihoods import Likelihood
from skgp.linalg import warn_caller

Exact = SeriesState | AveragedState
State = Exact | InducingState | AdditiveState


def joined(data: Data, other: Data) -> Data:
    """Some observations, then others, of weight 1 and offset 0 where one of them has none."""
    columns = {"X": torch.cat([data.X, other.X]), "y": torch.cat([data.y, other.y])}
    for name, default in (("weight", 1.0), ("offset", 0.0)):
        parts = [getattr(part, name) for part in (data, other)]
        shapes = [
            part.X.shape[:1] if name == "weight" else part.X.shape[:1] + (1,)
            for part in (data, other)
        ]
        if any(part is not None for part in parts):
            columns[name] = torch.cat(
                [
                    data.X.new_full(shape, default) if part is None else part
                    for shape, part in zip(shapes, parts, strict=True)
                ]
            )
    return Data(**columns)


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


def parts_of(state: State, *, split: bool = False) -> list[Kernel]:
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


def kernel_of(state: State) -> Kernel:
    """The kernel of f as one expression.

    The sum is a balanced tree: scikit-learn asks each operand for its bounds twice, which takes
    2^c steps of c summands added one after the other, and c^2 of a balanced tree.
    """
    kernels = parts_of(state)
    while len(kernels) > 1:
        pairs = [Sum(*pair) for pair in zip(kernels[::2], kernels[1::2], strict=False)]
        kernels = pairs + kernels[len(kernels) - len(kernels) % 2 :]
    return kernels[0]


def warn_of_interactions(
    estimator: Any,
    states: Sequence[Any],  # `AdditiveState`s
    columns: Sequence[int],
    data: Data,
    likelihood: Likelihood,
) -> None:
    """Warn of two columns that act together, which a sum of functions of one each misses.

    The data are those of the fit with all columns of X; `columns` are those that have a component.
    """
    if len(columns) < 2:
        return
    some = rows_to_look_at(replace(data, y=data.y.reshape(len(data), -1)), len(columns))
    for state, y in zip(states, some.y.T, strict=True):
        rows = some.X[:, list(columns)]
        mean = state.mean(rows.to(state.device)).cpu()
        found = missed_interaction(
            state.kernels, replace(some, y=y), mean, state.offset, likelihood
        )
        if found is None:
            continue
        *pair, gain = found
        names = getattr(estimator, "feature_names_in_", range(estimator.n_features_in_))
        first, second = (str(names[columns[place]]) for place in pair)
        kind = "Classifier" if is_classifier(estimator) else "Regressor"
        warn_caller(
            f"Columns {first} and {second} of X act together: the model is a sum of functions of "
            f"one column each, and a function of both promises {gain:.2g} nats per observation "
            f"more. Use skgp.SWSGP{kind} or skgp.GaussianProcess{kind}, whose kernels take all "
            "columns."
        )
        return
