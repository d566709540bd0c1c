"""What `StateSpaceGPRegressor` and `StateSpaceGPClassifier` share: parameters, fit, predictions."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel
from torch import Tensor

from skgp.data import Data
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._kernels import process_kernels
from skgp.estimators._parameters import Auto, Interval, Option, StrOptions, options
from skgp.estimators._reduction import warn_of_few_rows, warn_of_interaction
from skgp.estimators._series_inputs import SeriesInputs
from skgp.estimators._time import IndexedOutput, warn_of_far_times
from skgp.estimators.defaults import COLUMN_BINS, LEAST_GPU_SERIES, SERIES_LEAST_GAIN, STREAM_ROWS
from skgp.inference.markov.additive_bins import AdditiveStatistics, make_bins
from skgp.inference.markov.states import InducingState
from skgp.learning.markov.additive import interaction_of
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import constant, to_arrays
from skgp.models import state_space as model
from skgp.optim.stopping import StopRecorder


class StateSpaceMixin(IndexedOutput, SeriesInputs):
    """Parameters, fit and predictions; an estimator adds the likelihood.

    The estimator has the parameters of ``_parameter_constraints``.

    Parameters
    ----------
    inducing : {"fixed", "learned"}, default="fixed"
        Whether the places of inducing states are learned.
    batch_size : int or None, default=None
        Observations of a minibatch from which hyper-parameters of inducing states are learned, by
        steps of Adam of which `max_iter` are taken at most (some hundreds are usual); all
        observations have the last word on the posterior. None takes all observations in every
        iteration, which costs O(n).
    posterior : {"auto", "mean_field", "joint"}, default="auto"
        Of several columns: a product of one process a column, which is cheaper, or with the
        dependence between them. "auto" is "joint" with Gaussian noise or few observations.
    max_iter : int, default=100
        Iterations of the search of hyper-parameters.
    tol : float, default=1e-7
        Gain of evidence in an iteration, in nats per observation, below which to stop. With less
        than 0.001 nats in all it stops in any case.
    device : str or torch.device, default="auto"
        Of fit and predictions; "auto" is "cuda" where there is one and several columns, else
        "cpu".
    dtype : {"float64"}, default="float64"
        Single precision is refused.

    Attributes
    ----------
    inducing_points_ : ndarray of shape (M, 1)
        Times of the inducing states, where there are any.
    component_kernels_ : list of Kernel
        Of the processes, one each of the first columns of `predict_components`. Where predictions
        are averaged over two structures a column has the seasons of both, or what is none.
    component_names_ : list of str
        One a column of `predict_components`: the kernels, "trend", the covariates, and steps.
    history_ : dict of lists
        "solve": evidence per observation after each iteration.
    """

    n_inducing: int | Auto | None
    inducing: str
    batch_size: int | None
    posterior: str
    max_iter: int
    tol: float

    _parameter_constraints = {
        "n_inducing": [Interval(Integral, 2, None, closed="left"), StrOptions({"auto"}), None],
        "inducing": [StrOptions({"fixed", "learned"})],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "posterior": [StrOptions({"auto", "mean_field", "joint"})],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "warm_start": ["boolean"],
        "time": [str, Integral, None],
        "covariates": [StrOptions({"auto"}), dict],
        "trend": [Interval(Integral, 0, 2, closed="both"), None],
    }

    _option_rules: tuple[Option, ...] = (
        options("inducing batch_size", n_features_in_=(1,)),
        options("posterior", n_features_in_=range(2, 2**31)),
    )

    _n_stages = 1
    #: Prior variance of f to start with.
    _start_variance = 1.0
    #: One a latent process.
    _states: list[model.State]
    #: Of the largest component.
    _n_states: int
    #: Of an additive model: what later observations join, if it is there.
    _stream: Data | AdditiveStatistics | None

    def _least_gpu_rows(self, n_columns: float) -> float:
        return LEAST_GPU_SERIES if n_columns == 1 else super()._least_gpu_rows(n_columns)

    @property
    def inducing_points_(self) -> np.ndarray:
        """Times of the inducing states, (M, 1)."""
        state = self._states[0]
        if not isinstance(state, InducingState):
            raise AttributeError("There are no inducing states; give n_inducing and one column.")
        return state.knots.cpu().numpy()[:, None]

    @property
    def component_kernels_(self) -> list[Kernel]:
        """Kernel of each column of `predict_components`, of the first latent process."""
        return model.parts_of(self._states[0], split=True)

    @property
    def component_names_(self) -> list[str]:
        """Name of each column of `predict_components`: the part of the kernel, or the term."""
        terms = () if self._terms is None else self._terms.parts
        return [*map(str, self.component_kernels_), *(term.name for term in terms)]

    @over_rows
    @within_limits
    def predict_components(self, X: ArrayLike, return_std: bool = False):
        """Predict what each part of the model adds to f.

        Of several columns the parts are the columns (those that the kernel names), each about its
        mean over the observations; of a series, the summands of the kernel of time, then the
        polynomial of time ("trend") and each covariate: `component_names_` has their names. They
        and ``intercept_`` sum to the mean of f, which of a regressor is `predict`, counts aside.

        Parameters
        ----------
        X : array-like of shape (n, d)
        return_std : bool, default=False
            Also return their standard deviations.

        Returns
        -------
        mean : ndarray of shape (n, p), or (n, p, n_classes) beyond two classes
            In the units of y; of counts and classes on the scale of the link; of log-normal y in
            those of log y, where exponentials are factors.
        std : ndarray of the same shape
            Only when ``return_std`` is True.
        """
        x = self._inputs(self._validate_prediction(X))
        found = [state.components(x) for state in self._states]
        mean, var = to_arrays(*(torch.stack(part, dim=2) for part in zip(*found, strict=True)))
        if len(found) == 1:
            mean, var = mean[:, :, 0], var[:, :, 0]
        scale = getattr(self, "y_scale_", 1.0)
        return (scale * mean, scale * np.sqrt(var)) if return_std else scale * mean

    # ---- training ------------------------------------------------------------------------

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
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
        if self.batch_size is not None and self.n_inducing is None:
            raise ValueError(
                f"batch_size={self.batch_size} is for inducing states, and n_inducing=None has "
                "none. Give n_inducing, or leave batch_size out: exact inference takes all rows."
            )

    def _fit_states(
        self,
        data: Data,
        given: Kernel | None,
        likelihood: Likelihood,
        offsets: Sequence[float],
        backend: Backend,
        callback: Callable[[int, dict], bool],
        *,
        stream: bool = False,
    ) -> tuple[Kernel, Tensor]:
        """Fit latent processes, one a column of y; a `stream` keeps what later observations need.

        `given` is the kernel without noise, or None. Returns the kernel learned, and the parameters
        of the likelihood (p,).
        """
        (X, weight), total, given_data = arrays(data), data.total, data
        callback, process = StopRecorder(callback), self._process_columns(X)
        if not stream:
            warn_of_far_times(self, X)
        one, start = process.shape[1] == 1, None
        signals = process_kernels(process, given, self._start_variance, weight)
        prior = signals if self.kernel is None else None
        if self._goes_on:
            signals, start = self._warm(process.shape[1])
        self._columns = list(range(X.shape[1]))
        if not one:
            self._columns = [column for column, part in enumerate(signals) if part is not None]
        kernels = [kernel for kernel in signals if kernel is not None]
        data = model.distinct(self._seen(data, backend), self._place)
        tol = max(self.tol, SERIES_LEAST_GAIN / total, 0.0 if one else self._additive_tol(total))
        search: dict[str, Any] = {"max_iter": self.max_iter, "tol": tol, "callback": callback}
        self._offsets, self._stream = list(offsets), None
        if one:
            search |= {"start": start, "learn": self._learns}
            search |= self._series_options(process, backend, stream=stream)
            terms = self._make_terms(data.X, data.weight, likelihood.is_additive)
            search |= {"offsets": offsets, "terms": terms}
            fits = [self._fit_series(kernels, data, likelihood, **search)]
        else:
            kept = self._stream_of(data, likelihood) if stream else data
            search |= {"parameters": start, "optimise": self._learns, "prior": prior}
            fits = self._fit_additive([kernels] * len(offsets), kept, likelihood, **search)
            self._stream = kept if stream or len(X) <= STREAM_ROWS else None
        self._keep(fits)
        parameters = fits[0].parameters.cpu()
        self._likelihood_parameters = parameters.numpy()  # for a warm start
        # A search cut short may miss any part.
        ended = not callback.stopped and all(fit.n_iter < self.max_iter for fit in fits)
        if not one and self._learns and ended:
            self._warn_of_interaction(given_data, likelihood.with_parameters(parameters))
        kernels = [model.kernel_of(state) for state in self._states]
        alike = len({str(kernel) for kernel in kernels}) == 1
        return kernels[0] if alike else CompoundKernel(kernels), parameters

    def _fit_series(self, kernels: list, data: Data, likelihood: Likelihood, **search) -> model.Fit:
        series = model.series_of(data, search["terms"])
        return model.fit_series(kernels, series, likelihood, **search)

    def _warn_of_interaction(self, data: Data, likelihood: Likelihood) -> None:
        """Warn of two columns of the observations whose functions do not just add up."""
        states: Any = self._states
        if found := interaction_of(states, self._columns, data, likelihood):
            warn_of_interaction(self, *found)

    def _additive_tol(self, total: float) -> float:
        """Gain of evidence in an iteration of an additive model below which to stop in any case."""
        return 0.0

    def _series_options(
        self, times: np.ndarray, backend: Backend, *, stream: bool
    ) -> dict[str, Any]:
        """Options of `fit_series` that follow from the parameters."""
        if isinstance(self.n_inducing, Integral):
            warn_of_few_rows(int(self.n_inducing), len(np.unique(times)))
        found: dict[str, Any] = {"n_inducing": self.n_inducing}
        found["learn_inducing"] = self.inducing == "learned"
        # Not of a stream, whose rows may come from before the origin of a trend.
        found["structured"] = self._is_default and not stream
        if self.batch_size is not None:
            found["minibatches"] = self.batch_size, backend.generator()
        return found

    def _seen(self, data: Data, backend: Backend) -> Data:
        """Copies on the device of the fit, y (n, c), without the columns that have no component."""
        data = replace(data, X=data.X[:, self._columns], y=data.y.reshape(len(data), -1))
        device = self._device(backend)
        return data.map(lambda tensor: tensor.to(device, backend.dtype, copy=True))

    def _device(self, backend: Backend) -> torch.device:
        """Of series the CPU, unless the user names another: see LEAST_GPU_SERIES."""
        left = self.device == "auto" and self._place is not None
        return torch.device("cpu") if left else backend.device

    def _fit_additive(
        self,
        kernels: Sequence[list[Kernel]],
        data: Data | AdditiveStatistics,
        likelihood: Likelihood,
        **search: Any,
    ) -> list[model.Fit]:
        """Fit additive models with some kernels, one a column, for every target."""
        search["posterior"] = self.posterior
        if isinstance(data, AdditiveStatistics):
            (offset,) = self._offsets
            return [
                model.fit_additive_statistics(kernels[0], data, likelihood, offset=offset, **search)
            ]
        search["n_bins"] = self._n_bins()
        return [
            model.fit_additive(parts, replace(data, y=y), likelihood, offset=offset, **search)
            for parts, y, offset in zip(kernels, data.y.T, self._offsets, strict=True)
        ]

    def _stream_of(self, data: Data, likelihood: Likelihood) -> Data | AdditiveStatistics:
        """What to keep of observations so that others can join them."""
        if not likelihood.is_gaussian or len(data) <= STREAM_ROWS:
            return data
        y = data.y[:, 0]
        bins = make_bins(data.X, data.weight, n_bins=self._n_bins())
        statistics = AdditiveStatistics.empty(bins, origin=float(y.mean()))
        statistics.add(data.X, y, data.weight)
        return statistics

    def _add(self, data: Data, likelihood: Likelihood, backend: Backend) -> None:
        """Condition on more observations; hyper-parameters stay.

        ValueError if the model is additive and the rows before are gone.
        """
        data = self._seen(data, backend)
        if self._place is None:
            self._add_to_columns(data, likelihood)
            return
        self._refuse_new_levels(data.X)
        learned = likelihood.with_parameters(to_tensor(self._likelihood_parameters))
        self._states = [
            state.to(self._device(backend)).with_rows(series, learned)
            for state, series in zip(self._states, model.series_of(data, self._terms), strict=True)
        ]

    def _add_to_columns(self, data: Data, likelihood: Likelihood) -> None:
        """The additive part of `_add`."""
        stream: Data | AdditiveStatistics
        if self._stream is None:
            raise ValueError(
                f"partial_fit of {len(self._columns)} columns cannot go on from a fit of more than "
                f"{STREAM_ROWS} rows, which keeps nothing that others could join. Call fit with "
                "all rows, or begin the stream with partial_fit on a new estimator."
            )
        before = self._stream.to(data.X.device)
        if isinstance(before, AdditiveStatistics):
            stream = copy.deepcopy(before)
            stream.add(data.X, data.y[:, 0], data.weight)
        else:
            stream = self._stream_of(before.joined(data), likelihood)
        fits = self._fit_additive(
            [model.parts_of(state) for state in self._states],
            stream,
            likelihood,
            parameters=to_tensor(self._likelihood_parameters),
            optimise=False,
        )
        self._stream = stream
        self._set_states(fits)

    def _n_bins(self) -> int:
        """Bins of a column of an additive model."""
        return int(self.n_inducing) if isinstance(self.n_inducing, Integral) else COLUMN_BINS

    def _keep(self, fits: Sequence[model.Fit]) -> None:
        """Copy what was learned to attributes."""
        self._set_states(fits)
        self.n_iter_ = sum(fit.n_iter for fit in fits)
        self.history_ = {"solve": [value for fit in fits for value in fit.history]}

    def _set_states(self, fits: Sequence[model.Fit]) -> None:
        self._states = [state for fit in fits for state in fit.states]
        self._terms = getattr(self._states[0], "terms", None)
        self._evidence = float(sum(fit.value for fit in fits))
        forms = [form for state in self._states for form in model.forms_of(state)]
        self._n_states = max(form.n_states for form in forms)

    def _warm(self, n_columns: int) -> tuple[list[Kernel | None], Tensor]:
        """Kernels and likelihood of the last fit."""
        parts, parameters = model.parts_of(self._states[0]), to_tensor(self._likelihood_parameters)
        if n_columns == 1:
            return [*parts], parameters
        learned = dict(zip(self._columns, parts, strict=True))
        return [learned.get(column) for column in range(n_columns)], parameters

    # ---- prediction ------------------------------------------------------------------------

    def _bytes_per_row(self) -> int:
        q = 0 if self._terms is None else sum(self._terms.sizes)
        return 8 * (6 * self._n_states**2 + 20 + 4 * q * self._n_states) * len(self._columns)

    def _inputs(self, X: np.ndarray) -> Tensor:
        """Rows as the states take them: times (n,), or the columns that have a component."""
        return self._seen_columns(to_tensor(X, device=self._states[0].device))

    def _seen_columns(self, rows: Tensor) -> Tensor:
        """The same of rows (n, d) on the device."""
        if self._terms is not None:
            return rows
        if self._place is not None:
            return rows[:, self._place]
        return rows[:, constant(self._columns, dtype=torch.int64, device=rows.device)]

    def _moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Latent means and variances, shapes (n, c)."""
        x = self._inputs(X)
        found = [state.moments(x) for state in self._states]
        mean, var = to_arrays(*(torch.stack(part, dim=1) for part in zip(*found, strict=True)))
        return mean, var

    def _means(self, X: np.ndarray) -> np.ndarray:
        """Latent means, shape (n, c)."""
        x = self._inputs(X)
        return to_arrays(torch.stack([state.mean(x) for state in self._states], dim=1))[0]
