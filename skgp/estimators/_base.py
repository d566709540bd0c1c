"""What every estimator shares: validation, computing resources, kernel and latent process.

Regressors build on `BaseGP` in `skgp.estimators._base_regressor`, classifiers in
`skgp.estimators._base_classifier`; the hooks that a concrete estimator provides are listed there.
"""

from __future__ import annotations

import math
import warnings
from abc import ABCMeta, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators._fitting import FitSession, asked_model, shape_of
from skgp.estimators._parameters import (
    CallbackSupportMixin,
    DescribedEstimator,
    StrOptions,
    check_likelihood,
    check_sample_weight,
    warn_at_bounds,
    warn_of_idle_options,
)
from skgp.estimators._validation import bounded_inputs, is_valid, told_of_text
from skgp.estimators.defaults import LEAST_GPU_ROWS, PREDICTION_MEMORY
from skgp.kernels import split_noise
from skgp.kernels.scales import at_origin
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import tile_rows, to_arrays


@dataclass(frozen=True)
class Backend:
    """What ``device``, ``dtype`` and ``random_state`` of an estimator resolve to, for one fit.

    ``dtype`` is of the training: prediction is in float64 whatever this is.
    """

    device: torch.device
    dtype: torch.dtype
    random_state: int | np.random.RandomState | None

    @cached_property
    def seed(self) -> int:
        """Drawn from ``random_state`` at the first use; a fit that draws nothing leaves it alone.

        As in scikit-learn, None draws from NumPy's global generator.
        """
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def generator(self) -> torch.Generator:
        """Return a new generator of the device, seeded by ``seed``: draw with its ``device``.

        The same seed gives other numbers on another kind of device.
        """
        return torch.Generator(self.device).manual_seed(self.seed)

    def rng(self) -> np.random.Generator:
        """Return a new NumPy generator, seeded by ``seed``."""
        return np.random.default_rng(self.seed)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return ``array`` on ``device`` in ``dtype``; shares its memory where it can."""
        return to_tensor(array, dtype=self.dtype, device=self.device)


def resolve_device(
    device: str | torch.device, n_rows: float = math.inf, least: float = LEAST_GPU_ROWS
) -> torch.device:
    """Return the torch device that ``device`` names; "auto" is CUDA from `least` rows on.

    ValueError if torch does not know it or this machine lacks it.
    """
    if device == "auto":
        device = "cuda" if n_rows >= least and torch.cuda.is_available() else "cpu"
    try:
        # That of a tensor has an index, with which devices compare.
        resolved = torch.empty(0, device=torch.device(device), dtype=torch.float64).device
        if resolved.type == "meta":
            raise RuntimeError("its tensors hold no numbers")
    except (RuntimeError, AssertionError, TypeError) as error:
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            reason = "needs CUDA, and torch finds none on this machine."
        else:
            cause = str(error).split(". ")[0].rstrip(".")  # torch goes on for pages
            reason = f"cannot be used for arrays of float64: {cause}."
        raise ValueError(
            f'device={device!r} {reason} Use device="auto" or "cpu", or install a build of torch '
            "for the device."
        ) from error
    return resolved


def to_tensor(
    array: np.ndarray, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return ``array`` as a tensor, without a copy where dtype and device allow.

    Read-only arrays (memory maps of joblib) are accepted: the caller must not write to the result.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device=device, dtype=dtype)


class BaseGP(DescribedEstimator, CallbackSupportMixin, BaseEstimator, metaclass=ABCMeta):
    """Validation, computing resources, kernel and latent process of every estimator.

    The latent arrays of a classifier have a second axis, one column a latent process: (n, c) where
    a regressor says (n,).
    """

    _parameter_constraints = {
        "optimizer": [StrOptions({"auto"}), None],
        "dtype": [StrOptions({"float32", "float64"})],
    }

    # Parameters and fitted attributes of every estimator.
    optimizer: str | None
    random_state: int | np.random.RandomState | None
    device: str | torch.device
    dtype: str
    n_jobs: int | None
    memory_budget: float | None
    kernel_: Kernel
    n_iter_: int
    _posterior: Any
    history_: dict[str, list[float]]

    #: Stages that a fit opens, at most.
    _n_stages = 2

    def __sklearn_is_fitted__(self) -> bool:
        """Whether a fit came to its end: `fit_context` sets all of its state at once."""
        return hasattr(self, "kernel_")

    def _validate_params(self) -> None:
        check_likelihood(self, BaseGP)
        super()._validate_params()

    def _check_parameters(self, *, stream: bool = False) -> None:
        """Refuse parameters that do not go together, or not with ``partial_fit`` (`stream`)."""

    @abstractmethod
    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        """Fit and set the fitted attributes; a `stream` keeps what later observations need."""

    def _takes_blocks(self, n_columns: int) -> bool:
        """Whether a fit with these parameters takes rows in blocks (`_learn_blocks`)."""
        return False

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        """Fit to rows in blocks and set the fitted attributes: by a `_learn` that takes them.

        Observations of the blocks are those of `_learn`; ``blocks.blocks`` has them as given.
        """
        self._learn(blocks.some, session, backend, blocks=blocks)  # type: ignore[call-arg]

    @property
    def _has_stream(self) -> bool:
        """Whether ``partial_fit`` goes on from a fit."""
        return hasattr(self, "kernel_")

    def _warn_of_forgetting(self) -> None:
        """Warn of a first ``partial_fit`` that drops the rows of a `fit` without kept sums."""
        if not self._has_stream and hasattr(self, "kernel_"):
            warn_caller(
                "partial_fit begins anew: fit keeps no sums that further rows could be added to, "
                "and its rows are dropped. Give the first rows to partial_fit, too."
            )

    def _learn_warp(self, X: np.ndarray, targets: np.ndarray, *, chooses: bool) -> None:
        """Decide on what scales the kernel sees columns; targets (n, c) may say."""

    def _warped(self, X: np.ndarray) -> np.ndarray:
        """Rows of X (n, d) on the scales on which the kernel sees columns."""
        return X

    def _in_units_of_columns(self, X: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Gradients (n, ..., d) in the columns as given, from those in what the kernel sees."""
        return slopes

    def _inputs(self, X: np.ndarray) -> Any:
        """Rows of X as the model sees them."""
        return X

    def _means(self, X: np.ndarray) -> np.ndarray:
        """Posterior means (n, c) of c latent processes or targets; (n,) may be those of one."""
        return self._evaluate("mean", self._inputs(X))[0]

    def _moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same and variances, (n, c), or (n, 1) of several targets."""
        return self._evaluate("mean_and_variance", self._inputs(X))

    def _bytes_per_row(self) -> int:
        """Return the memory in bytes that the latent hooks take for one row of X."""
        return 2**16

    def _least_gpu_rows(self, n_columns: float) -> float:
        """Rows of so many columns from which ``device="auto"`` takes a GPU."""
        return LEAST_GPU_ROWS

    def _resolve_backend(self, X: Any = None) -> Backend:
        """Resolve ``device``, ``dtype`` and ``random_state``, for rows X; None are many."""
        n_rows, n_columns = (math.inf, math.inf) if X is None else shape_of(X)
        device = resolve_device(self.device, n_rows, self._least_gpu_rows(n_columns))
        return Backend(device, getattr(torch, self.dtype), self.random_state)

    @property
    def _asked_kernel(self) -> Kernel | None:
        """What of ``kernel`` is that of the process."""
        return self.kernel

    def _given_kernel(self, X: np.ndarray) -> Kernel:
        """Return a checked copy of ``kernel``, which is not None, for inputs X (n, d).

        TypeError if a part has no form in torch; ValueError if a WhiteKernel is not a summand at
        the top level, or the kernel does not fit the number of columns of X.
        """
        kernel = clone(self._asked_kernel)
        split_noise(kernel)  # raises for what skgp cannot evaluate
        try:
            kernel(X[:1])
        except ValueError as error:
            advice = " Give one length scale, or one a column." * ("Anisotropic" in str(error))
            raise ValueError(
                f"kernel={kernel} does not fit X of {X.shape[1]} columns: "
                f"{str(error).rstrip('.')}.{advice}"
            ) from error
        return at_origin(kernel, X)

    def _begin_fit(self, *, informed: bool = True) -> None:
        """Compare the model asked for with that of the last fit, once the data are validated.

        Sets ``_goes_on``: whether a warm start was asked for and there is a fit to go on from.
        Warns of parameters without effect. ``informed=False`` says that the targets are of one
        row, or of one class, in which every amplitude of f would be nought.
        """
        self._informed = informed
        warn_of_idle_options(self, fitted=False)
        model = asked_model(self)
        self._goes_on = getattr(self, "warm_start", False) and model == getattr(
            self, "_fitted_model", None
        )
        self._fitted_model = model

    def _check_goes_on(self) -> None:
        """Refuse observations for another model than the one that was fitted."""
        asked, fitted = asked_model(self), getattr(self, "_fitted_model", {})
        for name in ("method", "likelihood", "link", "basis"):
            if name in fitted and asked[name] != fitted[name]:
                raise ValueError(
                    f"partial_fit goes on from a fit with another {name} than "
                    f"{name}={getattr(self, name)!r}. Set it back, or call fit with all rows."
                )

    @property
    def _learns(self) -> bool:
        """Whether hyper-parameters move in this fit: they may, and the targets tell of them."""
        return self.optimizer is not None and self._informed

    def _warn_at_bounds(self) -> None:
        """Warn of what the fit has learned that is at a bound."""
        if self._learns:
            warn_at_bounds(self.kernel_, self.kernel)

    def _validated(self, X: ArrayLike, *y: ArrayLike, **checks: bool) -> Any:
        """X (n, d) in float64, and y where it is given: `checks` are those of `validate_data`."""
        with told_of_text(X, *y, numeric=checks.get("y_numeric", False)):
            return validate_data(self, X, *y, dtype=np.float64, **checks)

    def _validate_prediction(self, X: ArrayLike) -> np.ndarray:
        """Return X (n, d) as float64, checked against the columns seen by ``fit``."""
        check_is_fitted(self)
        inputs: Any = X
        if not is_valid(self, X):
            inputs = self._validated(X, reset=False)
        return self._warped(bounded_inputs(inputs, self.kernel_.is_stationary()))

    def _validate_scored(
        self, X: ArrayLike, y: ArrayLike, **checks: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return X (n, d) and y (n,) of observations to score; `checks` as of `validate_data`."""
        check_is_fitted(self)
        inputs, targets = self._validated(X, y, reset=False, **checks)
        return self._warped(bounded_inputs(inputs, self.kernel_.is_stationary())), targets

    def _evaluate(self, functions: str, X: np.ndarray) -> Any:
        """Arrays of what the posterior says of X (n, d), by one transfer to its device and back.

        Of functions by name, separated by spaces; of one that returns several tensors, each.
        """
        rows = to_tensor(X, device=self._posterior.device)
        found: list[torch.Tensor] = []
        for function in functions.split():
            values = getattr(self._posterior, function)(rows)
            found += [values] if isinstance(values, torch.Tensor) else values
        return to_arrays(*found)

    def _by_chunks(self, hook: Callable, X: np.ndarray, row_bytes: int | None = None):
        """Apply a latent hook to blocks of rows that fit in memory."""
        n_rows = tile_rows(row_bytes or self._bytes_per_row(), PREDICTION_MEMORY)
        if len(X) <= n_rows:
            return hook(X)
        parts = [hook(X[start : start + n_rows]) for start in range(0, len(X), n_rows)]
        if isinstance(parts[0], tuple):
            return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.concatenate(parts)

    def _latent_moments(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and clipped variance of f for all rows of X, chunk by chunk."""
        mean, var = self._by_chunks(self._moments, X)
        return mean, clip_variance(var)


def arrays(data: Data) -> tuple[np.ndarray, np.ndarray | None]:
    """X (n, d) and weights (n,) of observations, in float64."""
    weight = None if data.weight is None else data.weight.cpu().double().numpy()
    return data.X.cpu().double().numpy(), weight


def keep_weighted_rows(
    X: np.ndarray, y: np.ndarray, sample_weight: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the rows of positive weight and their weights (float64), or None as it came.

    ValueError if the weights are text, negative, not finite, all 0, or not one a row.
    """
    if sample_weight is None:
        return X, y, None
    if isinstance(sample_weight, str):
        raise ValueError(
            f"sample_weight must be None, a number or one for each row; got {sample_weight!r}. "
            "Weights of classes are the class_weight of a classifier."
        )
    weight = check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    kept = weight > 0
    return (X, y, weight) if kept.all() else (X[kept], y[kept], weight[kept])


def clip_variance(var: np.ndarray) -> np.ndarray:
    """Return variances with the negative ones, born of rounding, set to 0.

    NumericalWarning says how many there were, and the least.
    """
    negative = var < 0
    if not negative.any():
        return var
    warn_caller(
        f"{negative.sum()} of {var.size} predicted variances were negative, the least "
        f"{var.min():.3g} for a target of unit variance, and were set to 0. If that is not a "
        'rounding error, fit with dtype="float64" or a greater noise variance.',
        NumericalWarning,
    )
    return np.maximum(var, 0.0)
