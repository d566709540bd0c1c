"""States of state-space estimators: the data they are fitted to, and the kernels in them."""

import torch
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
