"""Priors of the hyper-parameters of a kernel: defaults from the data, and what a user gave."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from skgp.kernels import ActiveDims
from skgp.kernels.spreads import robust_std
from skgp.priors import LogNormal, Prior

__all__ = ["default_priors", "resolve_priors"]

_DEFAULT_NOISE = 0.1  # of the variance of the targets
_ROUNDING = 1e-12  # relative to the values, below which a spread is none


def default_priors(
    kernel: Any, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None
) -> tuple[Prior, ...]:
    r"""Wide log-normal priors whose medians are the scales of the data.

    ==========================  ===========================================================
    variances of the signal     the variance of y
    length scales, ``sigma_0``  :math:`\sqrt d` times the spread of the column; of all d
                                columns, for a single one, the root of their mean square
    noise                       a tenth of the variance of y
    any other                   the value in `kernel`, as for periods, which only the user knows
    ==========================  ===========================================================

    Each has standard deviation 1.5 in the logarithm. Rows far from all others do not count in the
    spread of a column.

    Parameters
    ----------
    kernel : sklearn kernel expression
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
    sample_weight : ndarray of shape (n,), optional
        A weight of 2 equals the row given twice.

    Returns
    -------
    tuple of Prior
        One for each element of ``kernel.theta``.
    """
    X = np.asarray(X, dtype=float)
    mean, spread = np.average(X, axis=0, weights=sample_weight), robust_std(X, sample_weight)
    # Rounding leaves a constant column a spread of about eps times its value.
    spread = np.where(spread <= _ROUNDING * np.abs(mean), 1.0, spread)
    mean_y, spread_y = _mean_and_spread(np.asarray(y, dtype=float), sample_weight)
    variance = 1.0 if spread_y <= _ROUNDING * abs(mean_y) else float(spread_y**2)
    medians: list[float] = []
    for hyperparameter in kernel.hyperparameters:
        if not hyperparameter.fixed:
            medians.extend(_medians(kernel, hyperparameter, spread, variance))
    return tuple(LogNormal(float(median)) for median in medians)


def _mean_and_spread(values: np.ndarray, weights: np.ndarray | None):
    """Weighted mean and standard deviation along the first axis."""
    mean = np.average(values, axis=0, weights=weights)
    return mean, np.sqrt(np.average((values - mean) ** 2, axis=0, weights=weights))


def _medians(kernel, hyperparameter, spread: np.ndarray, variance: float) -> np.ndarray:
    """Medians (n_elements,) of the default priors of one hyper-parameter."""
    owner, name = kernel, hyperparameter.name
    *path, last = name.split("__")
    for step in path:
        if isinstance(owner, ActiveDims):
            spread = spread[owner.columns()]
        owner = getattr(owner, step)
    n_elements = hyperparameter.n_elements
    if last == "constant_value":
        return np.full(n_elements, variance)
    if last == "noise_level":
        return np.full(n_elements, _DEFAULT_NOISE * variance)
    # The length scale of a periodic kernel is an angle and not a distance.
    if last in ("length_scale", "sigma_0") and not hasattr(owner, "periodicity"):
        scale = spread if n_elements == len(spread) else np.sqrt(np.mean(spread**2))
        return np.broadcast_to(math.sqrt(len(spread)) * scale, (n_elements,))
    return np.broadcast_to(np.asarray(getattr(owner, last), dtype=float), (n_elements,))


def resolve_priors(
    kernel: Any,
    prior: Any,
    X: np.ndarray,
    y: np.ndarray,
    sample_weight: np.ndarray | None = None,
) -> tuple[Prior, ...]:
    """One prior for each element of ``kernel.theta``, from what the user gave.

    Parameters
    ----------
    kernel : sklearn kernel expression
    prior : None, Prior, sequence of Prior or dict
        None: `default_priors`. One prior: the same for all. A sequence: one for each element of
        ``kernel.theta``, or one for each free hyper-parameter. A dict: priors by the name of the
        hyper-parameter, in full (``"k1__k2__length_scale"``) or its last part
        (``"length_scale"``, wherever it occurs; full names come first), one prior or one for each
        element; others keep the default.
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
    sample_weight : ndarray of shape (n,), optional
        As `default_priors`.

    Returns
    -------
    tuple of Prior

    Raises
    ------
    TypeError
        If something else than a prior is given.
    ValueError
        If a name or the number of priors does not fit.
    """
    free = [h for h in kernel.hyperparameters if not h.fixed]
    if prior is None:
        return default_priors(kernel, X, y, sample_weight)
    if isinstance(prior, Mapping):
        return _from_mapping(prior, free, default_priors(kernel, X, y, sample_weight))
    if isinstance(prior, Prior):
        return (prior,) * sum(h.n_elements for h in free)
    if not isinstance(prior, Sequence) or isinstance(prior, str):
        raise TypeError(
            "prior must be None, LogNormal, Gamma, HalfNormal, a list of these or a dict of these "
            f"by hyper-parameter, got {prior!r}."
        )
    sizes = [1] * len(prior)
    if len(prior) == len(free):
        sizes = [h.n_elements for h in free]
    elif len(prior) != sum(h.n_elements for h in free):
        raise ValueError(
            f"prior has {len(prior)} entries; the kernel has {len(free)} free hyper-parameters "
            f"({', '.join(h.name for h in free)}) of {sum(h.n_elements for h in free)} elements. "
            "Give one prior for each, or a dict by name."
        )
    for i, each in enumerate(prior):
        _check_prior(each, f"prior[{i}]")
    return tuple(p for p, size in zip(prior, sizes, strict=True) for _ in range(size))


def _from_mapping(prior: Mapping, free: list, default: tuple[Prior, ...]) -> tuple[Prior, ...]:
    names = [h.name for h in free]
    known = set(names) | {name.split("__")[-1] for name in names}
    unknown = [key for key in prior if key not in known]
    if unknown:
        raise ValueError(
            f"prior has the key {unknown[0]!r}, which is no free hyper-parameter of the kernel; "
            f"there are: {', '.join(names)}."
        )
    found: list[Prior] = []
    for h in free:
        given = prior.get(h.name, prior.get(h.name.split("__")[-1]))
        start = len(found)
        found.extend(
            default[start : start + h.n_elements] if given is None else _elements(given, h)
        )
    return tuple(found)


def _elements(given: Any, hyperparameter) -> list[Prior]:
    """Priors of the elements of one hyper-parameter."""
    name, n_elements = f"prior[{hyperparameter.name!r}]", hyperparameter.n_elements
    if isinstance(given, Prior):
        return [given] * n_elements
    if not isinstance(given, Sequence) or isinstance(given, str):
        _check_prior(given, name)
    if len(given) != n_elements:
        raise ValueError(
            f"{name} has {len(given)} entries and the hyper-parameter has {n_elements} elements; "
            "give one prior for all or one for each."
        )
    for each in given:
        _check_prior(each, name)
    return list(given)


def _check_prior(prior: Any, name: str) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(f"{name} must be LogNormal, Gamma or HalfNormal, got {prior!r}.")
