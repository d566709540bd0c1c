"""The warning of columns that act together where a model is a sum over columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sklearn.base import is_classifier

from skgp.data import Data
from skgp.learning.markov.interactions import missed_interaction, rows_to_look_at
from skgp.likelihoods import Likelihood
from skgp.linalg import warn_caller


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
