"""What `GaussianProcessRegressor` and `...Classifier` share: which family serves, and its set-up.

And starts, optimizers and checks of inputs of the exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, clone
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    Kernel,
    WhiteKernel,
)
from sklearn.utils import check_random_state
from sklearn.utils.validation import validate_data

from skgp.estimators import defaults
from skgp.estimators._fitting import FitSession
from skgp.estimators._kernels import noise_on_top
from skgp.estimators._parameters import (
    CallbackSupportMixin,
    DescribedEstimator,
    Interval,
    StrOptions,
)
from skgp.estimators._predictive import is_constant
from skgp.estimators._validation import is_valid, told_of_text
from skgp.kernels.expression import split_noise
from skgp.kernels.scales import inverse_length_scales
from skgp.kernels.sde import has_state_space
from skgp.kernels.training import can_evaluate, is_called
from skgp.learning.starts import search_from_starts
from skgp.linalg.runtime import require_memory


class FrontDoor(DescribedEstimator, CallbackSupportMixin, BaseEstimator):
    """Parameters of both.

    Parameters
    ----------
    optimizer : "fmin_l_bfgs_b", callable or None, default="fmin_l_bfgs_b"
        None keeps the kernel's hyper-parameters. A callable is
        ``optimizer(objective, initial_theta, bounds) -> (theta, least)``.
    n_restarts_optimizer : int, default=0
        Further starts of the search, drawn within the bounds, which have to be finite.
    copy_X_train : bool, default=True
        Keep a copy of the training data.
    random_state : int, RandomState instance or None, default=None
        Seed of the further starts, and of whatever another method draws.
    device : str or torch.device, default="auto"
        Of the fit; "auto" is "cuda" where there is one and at least 500
        observations, else "cpu".
    memory_budget : float or None, default=None
        Bytes that a fit or a prediction may take beyond the data and the model. None is 70% of
        what is free on the device. What cannot fit is refused before it begins.
    """

    _parameter_constraints = {
        "optimizer": [StrOptions({"fmin_l_bfgs_b"}), callable, None],
        "n_restarts_optimizer": [Interval(Integral, 0, None, closed="left")],
        "copy_X_train": ["boolean"],
    }
    _n_stages = 1

    method_: str

    def _fit_other(self, estimator: Any, X: np.ndarray, y: np.ndarray, session: FitSession) -> Any:
        """The estimator that stands behind ``method_``, fitted."""
        context = session.context.subcontext(task_name=self.method_)
        with context.propagate_callback_context(estimator):
            return estimator.fit(X, y)


#: Likelihoods that a method has; "exact" has the Gaussian one.
LIKELIHOODS = {
    "qsgp": {"gaussian", "laplace"},
    "vecchia": {"gaussian"},
    "neighbors": {"gaussian", "student_t", "poisson"},
    "state_space": {"gaussian", "student_t", "poisson"},
}
#: Methods that take several targets, with Gaussian noise.
SEVERAL = {"auto", "exact", "qsgp", "vecchia", "neighbors"}
#: Of classes, which every method has.
LINKS = {"logit", "probit"}


def only_exact(estimator: Any, X: Any, y: np.ndarray) -> str | None:
    """Why no other method than "exact" takes a problem; None where others do."""
    kernel = None if estimator.kernel is None else noise_on_top(estimator.kernel)
    if kernel is not None and not (kernel.requires_vector_input and can_evaluate(kernel)):
        why = "is one that is evaluated by calling it"
        if any(type(part) is WhiteKernel for part in kernel.get_params().values()):
            why += ", unless its noise is a summand: signal + WhiteKernel(noise_level)"
        return f"kernel={kernel} {why}"
    if callable(estimator.optimizer):
        return f"optimizer={estimator.optimizer!r} is a function of theta"
    if _is_several(y) and not (estimator.method in SEVERAL and estimator.likelihood == "gaussian"):
        return f"y has {y.shape[1]} targets, which share a kernel"
    if getattr(estimator, "multi_class", None) == "one_vs_one" and estimator.n_classes_ > 2:
        return "multi_class='one_vs_one'"
    if hasattr(estimator, "multi_class"):
        if kernel is not None and split_noise(kernel)[1] is not None:
            return f"kernel={kernel} contains a WhiteKernel"
    elif np.ndim(estimator.alpha) and np.ptp(estimator.alpha) != 0:
        return "alpha differs from row to row, for which other estimators have sample_weight"
    return None


def _is_several(y: np.ndarray) -> bool:
    return y.ndim > 1 and y.shape[1] > 1


def choose_method(estimator: Any, X: Any, y: np.ndarray) -> tuple[str, str]:
    """The method, and why it was taken. ValueError if what was asked for cannot be."""
    asked, reason = estimator.method, only_exact(estimator, X, y)
    likelihood = estimator.likelihood
    if asked != "auto" and asked != "exact":
        if reason is not None:
            raise ValueError(f"method={asked!r} cannot be: {reason}. Set method='exact'.")
        if likelihood not in LIKELIHOODS[asked] | LINKS:
            raise ValueError(
                f"method={asked!r} has the likelihoods {sorted(LIKELIHOODS[asked])}; got "
                f"likelihood={likelihood!r}. Set method='auto'."
            )
        return asked, "as asked for"
    has_exact = likelihood in {"gaussian"} | LINKS
    if not has_exact and (asked == "exact" or reason is not None):
        cause = "method='exact'" if reason is None else reason
        raise ValueError(
            f"likelihood={likelihood!r} needs another method than 'exact'; got {cause}. Set "
            "likelihood='gaussian', or method='auto' with what other methods take."
        )
    if asked == "exact":
        return "exact", "as asked for"
    if reason is not None:
        return "exact", reason
    n, d = X.shape
    return _by_size(n, d, estimator.kernel, likelihood, has_exact, several=_is_several(y))


def _by_size(
    n: int, d: int, kernel: Kernel | None, likelihood: str, has_exact: bool, *, several: bool
) -> tuple[str, str]:
    """The method that n observations of d columns take by "auto", and why."""
    count = f"{n} observations are"
    if has_exact and n <= defaults.EXACT_ROWS:
        return "exact", f"{count} no more than {defaults.EXACT_ROWS}"
    why = f"{count} more than {defaults.EXACT_ROWS}" if has_exact else f"likelihood={likelihood!r}"
    if likelihood == "laplace":
        return "qsgp", why
    if d == 1 and not several and (kernel is None or has_state_space(split_noise(kernel)[0])):
        return "state_space", f"{why}, and X has one column"
    if not has_exact:
        return "neighbors", why
    if likelihood in LINKS and d <= defaults.PLACES:
        return "neighbors", f"{why}, and X has no more than {defaults.PLACES} columns"
    if n > defaults.MANY_PLACES and d <= defaults.PLACES and _has_one_distance(kernel, d):
        return (
            "vecchia",
            f"{count} more than {defaults.MANY_PLACES}, of no more than {defaults.PLACES} columns",
        )
    return "qsgp", f"{why}, and X has {d} column{'s' if d > 1 else ''}"


def _has_one_distance(kernel: Kernel | None, d: int) -> bool:
    """Whether neighbours are found by a distance; those of other kernels take n^2 correlations."""
    if kernel is None:
        return True
    return inverse_length_scales(split_noise(kernel)[0], torch.zeros(1, d)) is not None


def regressor_of(estimator: Any, y: np.ndarray, alpha: float) -> tuple[Any, float]:
    """The estimator of ``method_``, and which part of its noise is `alpha`; targets (n,) or (n, t).

    Its noise is the sum of `alpha` and of the kernel's WhiteKernel, within bounds moved likewise.
    """
    kernel = None if estimator.kernel is None else noise_on_top(clone(estimator.kernel))
    std = y.std(axis=0)
    std = float(np.where(is_constant(std, y), 0.0, std).max())
    scale = 1.0 if estimator.normalize_y or std == 0 else std
    # Below the least noise that default kernels allow it only makes matrices invertible.
    is_noise = estimator.likelihood == "gaussian" and alpha > defaults.NOISE_BOUNDS[0] * scale**2
    noise = alpha if is_noise else 0.0
    if noise:
        kernel = ConstantKernel() * RBF() if kernel is None else kernel
        white = split_noise(kernel)[1]
        if white is None:
            kernel = kernel + WhiteKernel(noise, "fixed")
        else:
            bounds = white.noise_level_bounds
            white.noise_level += noise
            if not isinstance(bounds, str):
                white.noise_level_bounds = np.asarray(bounds, dtype=float) + noise
    shared = dict(
        kernel=kernel,
        likelihood=estimator.likelihood,
        normalize_y=estimator.normalize_y or kernel is None,
        **_common(estimator),
    )
    if estimator.method_ == "qsgp":
        from skgp.estimators._qsgp import QSGPRegressor

        return QSGPRegressor(**shared), noise
    if estimator.method_ == "state_space":
        from skgp.estimators._state_space import StateSpaceGPRegressor

        return StateSpaceGPRegressor(**shared), noise
    if estimator.method_ == "vecchia" or estimator.likelihood == "gaussian":
        from skgp.estimators._vecchia import VecchiaGPRegressor

        return VecchiaGPRegressor(**{**shared, "likelihood": "gaussian"}), noise
    from skgp.estimators._swsgp import SWSGPRegressor

    return SWSGPRegressor(**shared), noise


def classifier_of(estimator: Any) -> Any:
    """The estimator of ``method_``."""
    shared = dict(kernel=estimator.kernel, likelihood=estimator.likelihood, **_common(estimator))
    if estimator.method_ == "qsgp":
        from skgp.estimators._qsgp import QSGPClassifier

        return QSGPClassifier(**shared)
    if estimator.method_ == "state_space":
        from skgp.estimators._state_space_classifier import StateSpaceGPClassifier

        return StateSpaceGPClassifier(**shared)
    from skgp.estimators._swsgp_classifier import SWSGPClassifier

    return SWSGPClassifier(**shared)


def _common(estimator: Any) -> dict[str, Any]:
    return dict(
        optimizer=None if estimator.optimizer is None else "auto",
        random_state=estimator.random_state,
        device=estimator.device,
        n_jobs=estimator.n_jobs,
        memory_budget=estimator.memory_budget,
        verbose=estimator.verbose,
    )


def validated(estimator: Any, X: ArrayLike, y: Any = "no_validation", **checks: Any) -> Any:
    """X, or X and y, checked as scikit-learn's Gaussian processes do: lists of objects, too."""
    kernel = estimator.kernel
    if isinstance(kernel, CompoundKernel):
        raise ValueError(
            "kernel cannot be a CompoundKernel; give one kernel for all classes or targets."
        )
    vectors = kernel is None or kernel.requires_vector_input
    checks |= {"ensure_2d": vectors, "dtype": "numeric" if vectors else None}
    if isinstance(y, str):
        if vectors and is_valid(estimator, X):
            return X
        with told_of_text(X):
            return _numbers(validate_data(estimator, X, reset=False, **checks), vectors)
    with told_of_text(X, y, numeric=checks.get("y_numeric", False)):
        rows, targets = validate_data(estimator, X, y, **checks)
        return _numbers(rows, vectors), targets


def _numbers(rows: Any, vectors: bool) -> Any:
    """Vectors as numbers that torch reads, as scikit-learn leaves them where it does.

    It leaves a data frame with a categorical column as objects, and other byte orders.
    """
    if not vectors or (rows.dtype.kind != "O" and rows.dtype.itemsize <= 8 and rows.dtype.isnative):
        return rows
    return rows.astype(np.float64)


def theta_starts(kernel: Kernel, n_restarts: int, random_state: Any) -> np.ndarray:
    """The kernel's theta and draws that are uniform within its bounds, (1 + n_restarts, p)."""
    bounds = kernel.bounds
    if n_restarts and not np.isfinite(bounds).all():
        raise ValueError(
            f"n_restarts_optimizer={n_restarts} requires that all bounds are finite, between which "
            f"the starts are drawn; got {np.exp(bounds).tolist()}. Give the kernel finite bounds."
        )
    draws = ()
    if n_restarts:
        rng = check_random_state(random_state)
        draws = rng.uniform(bounds[:, 0], bounds[:, 1], (n_restarts, len(bounds)))
    return np.vstack([kernel.theta, *draws])


def learn_theta(
    evidence: Any,  # theta to minus the log marginal likelihood, and its gradient
    kernel: Kernel,
    optimizer: str | Callable,
    starts: np.ndarray,
    *,
    of_many: Callable | None = None,
    n_rows: int = 0,
    tell: Callable[[float], bool] = lambda loss: False,
) -> tuple[np.ndarray, float]:
    """Theta (p,) of the greatest log marginal likelihood found, and minus that."""
    if isinstance(optimizer, str):
        return search_from_starts(
            evidence, starts, kernel.bounds, of_many=of_many, n_rows=n_rows, tell=tell
        )

    def objective(theta: np.ndarray, eval_gradient: bool = True) -> Any:
        value, gradient = evidence_or_infinity(evidence, np.asarray(theta, dtype=float))
        tell(value)
        return (value, gradient) if eval_gradient else value

    found = [optimizer(objective, start, bounds=kernel.bounds) for start in starts]
    return min(found, key=itemgetter(1))


def evidence_or_infinity(evidence: Any, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Minus the log marginal likelihood and its gradient; infinity where there is no factor."""
    try:
        return evidence(theta)
    except ValueError:
        return math.inf, np.zeros(len(theta))


def check_exact_memory(kernel: Any, X: Any, *, learns: bool) -> None:
    """Raise MemoryBudgetError where the matrices of an exact fit exceed the budget.

    A kernel that is called returns all its derivatives at once.
    """
    n, count, remedy = len(X), defaults.EXACT_MATRICES, ""
    if learns and kernel.n_dims and is_called(kernel, X):
        count += defaults.CALLED_MATRICES * kernel.n_dims
        remedy = "register the kernel by skgp.kernels.register_kernel, set optimizer=None, "
    require_memory(
        8.0 * count * n**2,
        f"An exact fit, which holds {count} matrices of {n} x {n} numbers,",
        f'Fit fewer rows, {remedy}set method="qsgp", "neighbors" or "state_space" where kernel and '
        "targets allow",
    )
