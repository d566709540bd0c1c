"""What `StateSpaceGPRegressor` and `StateSpaceGPClassifier` share: parameters, fit, predictions."""

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel, Sum
from torch import Tensor

from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._kernels import (
    column_kernels,
    default_component_kernel,
    default_series_kernels,
)
from skgp.estimators._parameters import Interval, Option, StrOptions, options
from skgp.estimators._reduction import warn_of_few_rows
from skgp.estimators.defaults import COLUMN_BINS, SERIES_LEAST_GAIN, STREAM_ROWS
from skgp.inference.markov.additive import AdditiveState
from skgp.inference.markov.additive_bins import AdditiveStatistics, make_bins
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.states import InducingState, SeriesState
from skgp.kernels import ActiveDims, state_space
from skgp.kernels.expression import summands
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import TensorState
from skgp.models.state_space import Fit, fit_additive, fit_additive_statistics, fit_series

State = SeriesState | InducingState | AdditiveState


@dataclass(frozen=True)
class Rows(TensorState):
    """Training rows: inputs (n, c), targets (n, t), weights and log-exposures (n,) or None."""

    x: Tensor
    y: Tensor
    weight: Tensor | None
    log_exposure: Tensor | None = None

    def series(self) -> list[Series]:
        """One series a target."""
        return [make_series(self.x[:, 0], y, self.weight, self.log_exposure) for y in self.y.T]

    def joined(self, other: "Rows") -> "Rows":
        """These rows, then others."""
        pairs = ((self.weight, other.weight, 1.0), (self.log_exposure, other.log_exposure, 0.0))
        x, y = torch.cat([self.x, other.x]), torch.cat([self.y, other.y])
        return Rows(x, y, *(self._joined(other, *pair) for pair in pairs))

    def _joined(
        self, other: "Rows", mine: Tensor | None, others: Tensor | None, default: float
    ) -> Tensor | None:
        """A column of both, `default` where one has none; None where neither has."""
        if mine is None and others is None:
            return None
        mine = self.x.new_full((len(self.x),), default) if mine is None else mine
        others = other.x.new_full((len(other.x),), default) if others is None else others
        return torch.cat([mine, others])


class StateSpaceMixin:
    """Parameters, fit and predictions; an estimator adds the likelihood.

    It has the parameters of ``_state_space_constraints``, and the hooks and attributes of a base
    class of :mod:`skgp.estimators`.
    """

    _state_space_constraints: dict[str, list[Any]] = {
        "n_inducing": [Interval(Integral, 2, None, closed="left"), StrOptions({"auto"}), None],
        "inducing": [StrOptions({"fixed", "learned"})],
        "posterior": [StrOptions({"auto", "mean_field", "joint"})],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "warm_start": ["boolean"],
    }

    _option_rules: tuple[Option, ...] = (
        options("inducing", n_features_in_=(1,)),
        options("posterior", n_features_in_=range(2, 2**31)),
    )

    #: One a latent process.
    _states: list[State]
    #: Columns of X that the model sees.
    _columns: list[int]
    #: Of an additive model: what rows that come later join, if it is there.
    _stream: Rows | AdditiveStatistics | None

    # ---- training ------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Refuse parameters that state-space inference cannot serve."""
        if self.dtype != "float64":
            raise ValueError(
                f"dtype={self.dtype!r} is not for state-space inference, which loses whole nats of "
                "the evidence and a fifth of the variances in single precision. Use "
                'dtype="float64".'
            )
        if self.inducing == "learned" and self.n_inducing is None:
            raise ValueError(
                "inducing='learned' moves inducing states, and n_inducing=None has none. Give "
                "n_inducing, or leave inducing out."
            )

    def _signals(self, X: np.ndarray, variance: float, given: Kernel | None) -> list[Kernel | None]:
        """Kernels of f: of one column those to choose among, else one for each column.

        Raises
        ------
        ValueError
            If `given` has no state-space form, or parts that see several columns.
        """
        n_columns = X.shape[1]
        if given is None:
            if n_columns == 1:
                return [*default_series_kernels(X[:, 0], variance)]
            return [
                ActiveDims(default_component_kernel(X[:, column], n_columns, variance), [column])
                for column in range(n_columns)
            ]
        kernels = [given] if n_columns == 1 else column_kernels(given, n_columns)
        for kernel in kernels:
            if kernel is not None:
                state_space(kernel)  # says which kernels have a form
        return kernels

    def _learn(
        self,
        X: np.ndarray,
        targets: Sequence[np.ndarray],
        weight: np.ndarray | None,
        likelihood: Likelihood,
        offsets: Sequence[float],
        signals: list[Kernel | None],
        backend: Backend,
        callback: Callable[[int, dict], bool],
        *,
        stream: bool = False,
        log_exposure: np.ndarray | None = None,
    ) -> tuple[Kernel, Tensor]:
        """Fit latent processes, one a target; a stream keeps what later rows need.

        Returns
        -------
        kernel : Kernel
            Without noise.
        parameters : Tensor of shape (p,)
            Of the likelihood.
        """
        start = None
        if self._goes_on:
            signals, start = self._warm(X.shape[1])
        self._columns = [0]
        if X.shape[1] > 1:
            self._columns = [column for column, part in enumerate(signals) if part is not None]
        kernels = [kernel for kernel in signals if kernel is not None]
        rows = self._tensors(X, targets, weight, backend, log_exposure)
        tol = max(self.tol, SERIES_LEAST_GAIN / (len(X) if weight is None else weight.sum()))
        search: dict[str, Any] = {"max_iter": self.max_iter, "tol": tol, "callback": callback}
        self._offsets = list(offsets)
        self._stream = None
        if X.shape[1] == 1:
            if isinstance(self.n_inducing, Integral):
                warn_of_few_rows(int(self.n_inducing), len(np.unique(X)))
            inducing: dict[str, Any] = {
                "n_inducing": self.n_inducing,
                "learn_inducing": self.inducing == "learned",
            }
            options: dict[str, Any] = {"offsets": offsets, "learn": self._learns, "start": start}
            fits = [fit_series(kernels, rows.series(), likelihood, **inducing, **options, **search)]
        else:
            data = self._stream_of(rows, likelihood) if stream else rows
            options = {"parameters": start, "optimise": self._learns}
            fits = self._fit_additive(
                [kernels] * len(targets), data, likelihood, **options, **search
            )
            self._stream = data if stream or len(X) <= STREAM_ROWS else None
        self._keep(fits)
        parameters = fits[0].parameters
        # What a warm start needs besides the states.
        self._likelihood_parameters = parameters.cpu().numpy()
        kernels = [_kernel_of(state) for state in self._states]
        alike = len({str(kernel) for kernel in kernels}) == 1
        return kernels[0] if alike else CompoundKernel(kernels), parameters.cpu()

    def _tensors(
        self,
        X: np.ndarray,
        targets: Sequence[np.ndarray],
        weight: np.ndarray | None,
        backend: Backend,
        log_exposure: np.ndarray | None = None,
    ) -> Rows:
        """Rows on the device of the fit, without the columns that have no component."""
        return Rows(
            backend.tensor(X[:, self._columns]),
            backend.tensor(np.stack(targets, axis=1)),
            *(None if c is None else backend.tensor(c).clone() for c in (weight, log_exposure)),
        )

    def _fit_additive(
        self,
        kernels: Sequence[list[Kernel]],
        data: Rows | AdditiveStatistics,
        likelihood: Likelihood,
        **options: Any,
    ) -> list[Fit]:
        """Fit additive models with some kernels, one a column, for every target."""
        options["posterior"] = self.posterior
        if isinstance(data, AdditiveStatistics):
            (offset,) = self._offsets
            return [fit_additive_statistics(kernels[0], data, likelihood, offset=offset, **options)]
        return [
            fit_additive(
                parts,
                data.x,
                y,
                data.weight,
                likelihood,
                offset=offset,
                n_bins=self._n_bins(),
                log_exposure=data.log_exposure,
                **options,
            )
            for parts, y, offset in zip(kernels, data.y.T, self._offsets, strict=True)
        ]

    def _stream_of(self, rows: Rows, likelihood: Likelihood) -> Rows | AdditiveStatistics:
        """What to keep of rows so that others can join them."""
        if not likelihood.is_gaussian or len(rows.x) <= STREAM_ROWS:
            return rows
        y = rows.y[:, 0]
        bins = make_bins(rows.x, rows.weight, n_bins=self._n_bins())
        statistics = AdditiveStatistics.empty(bins, origin=float(y.mean()))
        statistics.add(rows.x, y, rows.weight)
        return statistics

    def _add(
        self,
        X: np.ndarray,
        targets: Sequence[np.ndarray],
        weight: np.ndarray | None,
        likelihood: Likelihood,
        backend: Backend,
        log_exposure: np.ndarray | None = None,
    ) -> None:
        """Condition on more rows; hyper-parameters stay.

        Raises
        ------
        ValueError
            If the model is additive and the rows before are gone.
        """
        rows = self._tensors(X, targets, weight, backend, log_exposure)
        if X.shape[1] > 1:
            self._add_to_columns(rows, likelihood)
            return
        learned = likelihood.with_parameters(to_tensor(self._likelihood_parameters))
        states = [
            state.with_rows(series, learned)  # type: ignore[union-attr]
            for state, series in zip(self._states, rows.series(), strict=True)
        ]
        self._states = pickle.loads(pickle.dumps(states))

    def _add_to_columns(self, rows: Rows, likelihood: Likelihood) -> None:
        """The additive part of `_add`."""
        if self._stream is None:
            raise ValueError(
                f"partial_fit of {len(self._columns)} columns cannot go on from a fit of more than "
                f"{STREAM_ROWS} rows, which keeps nothing that others could join. Call fit with "
                "all rows, or begin the stream with partial_fit on a new estimator."
            )
        if isinstance(self._stream, AdditiveStatistics):
            stream = copy.deepcopy(self._stream)
            stream.add(rows.x, rows.y[:, 0], rows.weight)
        else:
            stream = self._stream_of(self._stream.joined(rows), likelihood)
        fits = self._fit_additive(
            [_parts(state) for state in self._states],
            stream,
            likelihood,
            parameters=to_tensor(self._likelihood_parameters),
            optimise=False,
        )
        states = [state for fit in fits for state in fit.states]
        self._stream, self._states = stream, pickle.loads(pickle.dumps(states))
        self._evidence = float(sum(fit.value for fit in fits))

    def _n_bins(self) -> int:
        """Bins of a column of an additive model."""
        return COLUMN_BINS if self.n_inducing in (None, "auto") else self.n_inducing

    def _keep(self, fits: Sequence[Fit]) -> None:
        """Copy what was learned to attributes."""
        states = [state for fit in fits for state in fit.states]
        self._states = pickle.loads(pickle.dumps(states))  # from any device
        self._evidence = float(sum(fit.value for fit in fits))
        self.n_iter_ = sum(fit.n_iter for fit in fits)
        self.history_ = {"solve": [value for fit in fits for value in fit.history]}

    def _warm(self, n_columns: int) -> tuple[list[Kernel | None], Tensor]:
        """Kernels and likelihood of the last fit."""
        parts, parameters = _parts(self._states[0]), to_tensor(self._likelihood_parameters)
        if n_columns == 1:
            return [*parts], parameters
        learned = dict(zip(self._columns, parts, strict=True))
        return [learned.get(column) for column in range(n_columns)], parameters

    @property
    def inducing_points_(self) -> np.ndarray:
        """Times of the inducing states, (M, 1)."""
        state = self._states[0]
        if not isinstance(state, InducingState):
            raise AttributeError("There are no inducing states; give n_inducing and one column.")
        return state.knots.numpy()[:, None]

    # ---- prediction ------------------------------------------------------------------------

    def _bytes_per_row(self) -> int:
        n_states = max(
            state_space(part).n_states for state in self._states for part in _parts(state)
        )
        return 8 * (6 * n_states**2 + 20) * len(self._columns)

    def _inputs(self, X: np.ndarray) -> Tensor:
        """Rows as the states take them: times (n,), or the columns that have a component."""
        x = to_tensor(X[:, self._columns])
        return x[:, 0] if isinstance(self._states[0], SeriesState | InducingState) else x

    def _moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latent means and variances, shapes (n, c)."""
        x = self._inputs(X)
        found = [state.moments(x) for state in self._states]
        mean, var = (torch.stack(part, dim=1).numpy() for part in zip(*found, strict=True))
        return mean, var

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and variances of the components, shapes (n, p, c)."""
        x = self._inputs(X)
        found = [state.components(x) for state in self._states]
        mean, var = (torch.stack(part, dim=2).numpy() for part in zip(*found, strict=True))
        return mean, var

    def _draws(self, X: np.ndarray, n_samples: int, seed: int) -> np.ndarray:
        """Joint draws of the first latent process, (n, n_samples)."""
        state, generator = self._states[0], torch.Generator().manual_seed(seed)
        return state.samples(self._inputs(X), n_samples, generator).numpy()

    @property
    def component_kernels_(self) -> list[Kernel]:
        """Kernel of each column of `predict_components`, of the first latent process."""
        return _parts(self._states[0], split=True)


def _parts(state: State, *, split: bool = False) -> list[Kernel]:
    """Kernels of the components; of a series all at once, or its summands."""
    if isinstance(state, SeriesState | InducingState):
        return summands(state.kernel) if split else [state.kernel]
    return list(state.kernels)


def _kernel_of(state: State) -> Kernel:
    """The kernel of f as one expression.

    The sum is a balanced tree: scikit-learn asks each operand for its bounds twice, which takes
    2^c steps of c summands added one after the other, and c^2 of a balanced tree.
    """
    kernels = _parts(state)
    while len(kernels) > 1:
        pairs = [Sum(*pair) for pair in zip(kernels[::2], kernels[1::2], strict=False)]
        kernels = pairs + kernels[len(kernels) - len(kernels) % 2 :]
    return kernels[0]
