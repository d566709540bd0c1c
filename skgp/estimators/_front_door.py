"""Which family serves `GaussianProcessRegressor` and `...Classifier`, and its set-up."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, WhiteKernel

from skgp.estimators._kernels import noise_on_top
from skgp.estimators._predictive import is_constant
from skgp.estimators.defaults import EXACT_ROWS, MANY_PLACES, NOISE_BOUNDS, PLACES
from skgp.kernels.expression import split_noise
from skgp.kernels.scales import inverse_length_scales
from skgp.kernels.sde import has_state_space
from skgp.kernels.training import can_evaluate

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
    if has_exact and n <= EXACT_ROWS:
        return "exact", f"{count} no more than {EXACT_ROWS}"
    why = f"{count} more than {EXACT_ROWS}" if has_exact else f"likelihood={likelihood!r}"
    if likelihood == "laplace":
        return "qsgp", why
    if d == 1 and not several and (kernel is None or has_state_space(split_noise(kernel)[0])):
        return "state_space", f"{why}, and X has one column"
    if not has_exact:
        return "neighbors", why
    if likelihood in LINKS and d <= PLACES:
        return "neighbors", f"{why}, and X has no more than {PLACES} columns"
    if n > MANY_PLACES and d <= PLACES and _has_one_distance(kernel, d):
        return "vecchia", f"{count} more than {MANY_PLACES}, of no more than {PLACES} columns"
    return "qsgp", f"{why}, and X has {d} column{'s' if d > 1 else ''}"


def _has_one_distance(kernel: Kernel | None, d: int) -> bool:
    """Whether neighbours are found by a distance; those of other kernels take n^2 correlations."""
    if kernel is None:
        return True
    return inverse_length_scales(split_noise(kernel)[0], torch.zeros(1, d)) is not None


def noise_of_alpha(alpha: float, scale: float) -> float:
    """Noise variance that `alpha` stands for; 0 where it only makes matrices invertible.

    That is a number below the least noise that default kernels allow, for targets of standard
    deviation `scale`.
    """
    return 0.0 if alpha <= NOISE_BOUNDS[0] * scale**2 else alpha


def regressor_of(estimator: Any, y: np.ndarray, alpha: float) -> tuple[Any, float]:
    """The estimator of ``method_``, and which part of its noise is `alpha`; targets (n,) or (n, t).

    Its noise is the sum of `alpha` and of the kernel's WhiteKernel, within bounds moved likewise.
    """
    kernel = None if estimator.kernel is None else noise_on_top(clone(estimator.kernel))
    std = y.std(axis=0)
    std = float(np.where(is_constant(std, y), 0.0, std).max())
    scale = 1.0 if estimator.normalize_y or std == 0 else std
    noise = noise_of_alpha(alpha, scale) if estimator.likelihood == "gaussian" else 0.0
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

        shared.pop("likelihood")
        return VecchiaGPRegressor(**shared), noise
    from skgp.estimators._swsgp import SWSGPRegressor

    return SWSGPRegressor(**shared), noise


def classifier_of(estimator: Any) -> Any:
    """The estimator of ``method_``."""
    shared = dict(kernel=estimator.kernel, likelihood=estimator.likelihood, **_common(estimator))
    if estimator.method_ == "qsgp":
        from skgp.estimators._qsgp_classifier import QSGPClassifier

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
