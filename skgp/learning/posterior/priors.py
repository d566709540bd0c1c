"""Priors of the hyper-parameters of a kernel: defaults from the data, and what a user gave."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from skgp.kernels import ActiveDims
from skgp.kernels.scales import robust_std, target_units, varies
from skgp.learning.posterior import defaults as tuned
from skgp.priors import LogNormal, Prior


class Priors(tuple):
    r"""One prior for each element of ``kernel.theta``, and how those of length scales go together.

    The logarithms of the length scales of a kernel, each normal of standard deviation s, have a
    level in common and ratios of standard deviation :math:`\tau` about it,

    .. math:: u_j = \log m_j + \sqrt{s^2 - \tau^2}\, z_0 + \tau z_j.

    Were they independent, of many columns some would be short a priori, and all functions noise:
    :math:`E \sum_j (x_j - x_j')^2 / \ell_j^2` is :math:`e^{2 s^2}` = 90 times that at the medians.
    """

    vectors: tuple[slice, ...]  # of elements that are so, all of standard deviation `SD`
    _alone: list[int]  # places of the others
    _log_medians: list[np.ndarray]  # of each vector

    def __new__(cls, priors: Sequence[Prior] = (), vectors: Sequence[slice] = ()) -> "Priors":
        """Priors, and the places of those that are length scales of one kernel."""
        self = super().__new__(cls, priors)
        self.vectors = tuple(vectors)
        within = {j for part in self.vectors for j in range(part.start, part.stop)}
        self._alone = [j for j in range(len(self)) if j not in within]
        self._log_medians = [np.log([prior.median for prior in self[part]]) for part in vectors]
        return self

    @property
    def covariance(self) -> np.ndarray:
        """Prior covariance (p, p) of u."""
        found = np.diag([float(getattr(p, "log_sd", tuned.PRIOR_SD)) ** 2 for p in self])
        for part in self.vectors:
            within = found[part, part]
            within[~np.eye(len(within), dtype=bool)] = tuned.SD**2 - tuned.RATIO_SD**2
        return found

    def log_density(self, u: np.ndarray) -> np.ndarray:
        """Of u (..., p), in nats."""
        found = np.sum([self[j].log_density(u[..., j]) for j in self._alone], axis=0)
        ratio_var = tuned.RATIO_SD**2
        for _, moved, level, level_var in self._moves(u):
            k = moved.shape[-1]
            squares = ((moved - level) ** 2).sum(-1) / ratio_var
            squares += k * level[..., 0] ** 2 / level_var
            log_det = (k - 1) * math.log(ratio_var) + math.log(level_var)
            found = found - 0.5 * (squares + log_det + k * math.log(2 * math.pi))
        return found

    def gradient(self, u: np.ndarray) -> np.ndarray:
        """Of the log density, (..., p)."""
        found = np.empty(u.shape)
        for j in self._alone:
            found[..., j] = self[j].gradient(u[..., j])
        for part, moved, level, level_var in self._moves(u):
            found[..., part] = (level - moved) / tuned.RATIO_SD**2 - level / level_var
        return found

    def _moves(self, u: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray, float]]:
        """Each vector's place, u less its medians (..., k), their mean (..., 1), k its variance."""
        for part, log_medians in zip(self.vectors, self._log_medians, strict=True):
            moved = u[..., part] - log_medians
            k = moved.shape[-1]
            level_var = tuned.RATIO_SD**2 + k * (tuned.SD**2 - tuned.RATIO_SD**2)
            yield part, moved, moved.mean(-1, keepdims=True), level_var


def default_priors(
    kernel: Any, X: np.ndarray, y: np.ndarray, sample_weight: np.ndarray | None = None
) -> Priors:
    r"""Wide log-normal priors (n_theta,) whose medians are the scales of the data.

    ==========================  ===========================================================
    variances of the signal     the mean square of y: its variance, if centred
    length scales, ``sigma_0``  :math:`\sqrt d` times the spread of the column; of all d
                                columns, for a single one, the root of their mean square
    noise                       a tenth of the variance of y
    any other                   the value in `kernel`
    ==========================  ===========================================================

    Each has standard deviation 1.5 in the logarithm, but periods, which only the user knows, 0.1:
    a likelihood has a mode for every period that divides the data nearly as well. The length scales
    of a kernel, one a column, have a level in common (`Priors`). Observations far from all others
    do not count in the spread of a column.
    """
    X = np.asarray(X, dtype=float)
    spread = robust_std(X, sample_weight)
    spread = np.where(varies(spread, np.median(X, axis=0)), spread, 1.0)
    units = target_units(np.asarray(y, dtype=float), sample_weight)
    priors: list[Prior] = []
    vectors: list[slice] = []
    for h in kernel.hyperparameters:
        if not h.fixed:
            if h.n_elements > 1 and h.name.split("__")[-1] == "length_scale":
                vectors.append(slice(len(priors), len(priors) + h.n_elements))
            sd = (
                tuned.PERIOD_SD if h.name.split("__")[-1] in ("periodicity", "period") else tuned.SD
            )
            priors += [LogNormal(float(m), sd) for m in _medians(kernel, h, spread, *units)]
    return Priors(priors, vectors)


def _medians(
    kernel, hyperparameter, spread: np.ndarray, square: float, variance: float
) -> np.ndarray:
    """Medians (n_elements,) of the default priors of one hyper-parameter."""
    owner, columns = _owner(kernel, hyperparameter.name, np.arange(len(spread)))
    spread, last = spread[columns], hyperparameter.name.split("__")[-1]
    n_elements = hyperparameter.n_elements
    if last == "constant_value":
        return np.full(n_elements, square)
    if last == "noise_level":
        return np.full(n_elements, tuned.NOISE_SHARE * variance)
    # The length scale of a periodic kernel is an angle and not a distance.
    if last in ("length_scale", "sigma_0") and not hasattr(owner, "periodicity"):
        scale = spread if n_elements == len(spread) else np.sqrt(np.mean(spread**2))
        return np.broadcast_to(math.sqrt(len(spread)) * scale, (n_elements,))
    return np.broadcast_to(np.asarray(getattr(owner, last), dtype=float), (n_elements,))


def _owner(kernel: Any, name: str, columns: np.ndarray) -> tuple[Any, np.ndarray]:
    """The part that has the hyper-parameter of this full name, and which columns it sees."""
    for step in name.split("__")[:-1]:
        if isinstance(kernel, ActiveDims):
            columns = columns[kernel.columns()]
        kernel = getattr(kernel, step)
    return kernel, columns


def element_names(
    kernel: Any, columns: Sequence[str] | None = None, *, by_place: bool = False
) -> list[str]:
    """Name of each element of ``kernel.theta``: ``k1__k2__length_scale[0]``, say.

    In the brackets stand the names of the columns of X, where given, unless `by_place`.

    >>> from sklearn.gaussian_process.kernels import RBF
    >>> element_names(RBF([1.0, 2.0]), ["pressure", "depth"])
    ['length_scale[pressure]', 'length_scale[depth]']
    """
    names: list[str] = []
    for h in kernel.hyperparameters:
        if h.fixed:
            continue
        labels: list[Any] = list(range(h.n_elements))
        if columns is not None and not by_place:
            seen = _owner(kernel, h.name, np.arange(len(columns)))[1]
            labels = [columns[c] for c in seen] if len(seen) == h.n_elements else labels
        names += [h.name] if h.n_elements == 1 else [f"{h.name}[{label}]" for label in labels]
    return names


def resolve_priors(
    kernel: Any,
    prior: Any,
    X: np.ndarray,
    y: np.ndarray,
    sample_weight: np.ndarray | None = None,
    columns: Sequence[str] | None = None,
) -> Priors:
    """One prior for each element of ``kernel.theta``, from what the user gave.

    None: `default_priors`. One prior: the same for all. A sequence: one for each element of
    ``kernel.theta``, or one for each free hyper-parameter. A dict: priors by the name of the
    hyper-parameter, in full (``"k1__k2__length_scale"``) or its last part (``"length_scale"``,
    wherever it occurs), one prior or one for each element, or of an element, by its place or its
    column (``"length_scale[0]"``, ``"length_scale[depth]"``). Elements come first, then full names;
    what is not named keeps the default, and priors that a user gave are independent, those of a
    kernel's other length scales included. What is no prior is a TypeError, a name or a number of
    priors that does not fit a ValueError.
    """
    if prior is None:
        return default_priors(kernel, X, y, sample_weight)
    free = [h for h in kernel.hyperparameters if not h.fixed]
    if isinstance(prior, Mapping):
        default = default_priors(kernel, X, y, sample_weight)
        return _from_mapping(prior, kernel, free, default, columns)
    if isinstance(prior, Prior):
        return Priors((prior,) * sum(h.n_elements for h in free))
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
    return Priors([p for p, size in zip(prior, sizes, strict=True) for _ in range(size)])


def _from_mapping(
    prior: Mapping, kernel: Any, free: list, default: Priors, columns: Sequence[str] | None
) -> Priors:
    """Priors from a mapping of names, of hyper-parameters, their places or elements."""
    places = element_names(kernel, columns, by_place=True)
    labels = element_names(kernel, columns)
    names = [h.name for h in free]
    known = {*names, *places, *labels}
    known |= {name.split("__")[-1] for name in known}
    unknown = [key for key in prior if key not in known]
    if unknown:
        shown = labels if "[" in str(unknown[0]) else names
        raise ValueError(
            f"prior has the key {unknown[0]!r}, which is no free hyper-parameter of the kernel; "
            f"there are: {', '.join(shown)}."
        )
    found: list[Prior] = []
    for h in free:
        given = prior.get(h.name, prior.get(h.name.split("__")[-1]))
        start = len(found)
        found.extend(
            default[start : start + h.n_elements] if given is None else _elements(given, h)
        )
    for i, full in enumerate(zip(labels, places, strict=True)):
        for name in (*(each.split("__")[-1] for each in full), *full):  # the last one counts
            if "[" in name and name in prior:
                _check_prior(prior[name], f"prior[{name!r}]")
                found[i] = prior[name]
    kept = [i for i, prior in enumerate(found) if prior is default[i]]
    return Priors(found, [v for v in default.vectors if {*range(v.start, v.stop)} <= {*kept}])


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
