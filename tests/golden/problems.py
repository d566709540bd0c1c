"""Thirty small problems, generated or bundled with scikit-learn, by name: see `problem`."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from sklearn import datasets

N_TEST = 12


@dataclass(frozen=True)
class Problem:
    """Training rows and those of the predictions.

    Parameters
    ----------
    X : ndarray of shape (n, d)
    y : ndarray of shape (n,)
    X_test : ndarray of shape (t, d)
    y_test : ndarray of shape (t,)
        What the density is asked of.
    fit : dict
        Further arguments of ``fit``: sample_weight, exposure.
    predict : dict
        Further arguments of the predictions: exposure.
    """

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    fit: dict
    predict: dict


@cache
def problem(name: str) -> Problem:
    """Return the problem of that name; its arrays are read-only."""
    family = next(family for family in (_SERIES, _NUMBERS, _COUNTS, _CLASSES) if name in family)
    # Not hash(): it differs from one interpreter to the next.
    rng = np.random.default_rng([ord(letter) for letter in name])
    X, y, *more = family[name](rng)
    more = more[0] if more else {}
    test = np.arange(len(X)) % max(2, len(X) // N_TEST) == 1
    y_test = np.where(np.isnan(y), 0.0, y) if y.dtype.kind == "f" else y
    parts = [{key: values[rows] for key, values in more.items()} for rows in (~test, test)]
    parts[1].pop("sample_weight", None)
    made = Problem(X[~test], y[~test], X[test], y_test[test], *parts)
    for values in (made.X, made.y, made.X_test, made.y_test):
        values.setflags(write=False)
    return made


def _smooth(n, d, noise=0.1, scale=1.0):
    def make(rng):
        X = rng.uniform(-2, 2, (n, d)) * scale
        f = np.sin(2 * X[:, 0] / scale) + 0.5 * (X / scale)[:, -1] ** 2
        return X, f + noise * rng.standard_normal(n)

    return make


def _outliers(rng):
    X, y = _smooth(80, 1)(rng)
    y[::9] += rng.choice([-4.0, 4.0], len(y[::9]))
    return X, y


def _heavy_tails(rng):
    X, y = _smooth(70, 2, 0.0)(rng)
    return X, y + 0.1 * rng.standard_t(2, 70)


def _replicated(rng):
    X, y = _smooth(90, 2)(rng)
    X[45:] = X[:45]
    return X, y


def _weighted(rng):
    X, y = _smooth(70, 2)(rng)
    return X, y, {"sample_weight": np.where(np.arange(70) % 7 == 3, 0.0, rng.uniform(0.5, 3, 70))}


def _units(rng):
    X, y = _smooth(60, 3)(rng)
    return X * [1e-3, 1.0, 1e4] + [5.0, 0.0, 1e5], 300 * y + 5000


def _constant_column(rng):
    X, y = _smooth(50, 3)(rng)
    X[:, 1] = 4.0
    return X, y


def _step(rng):
    X = np.sort(rng.uniform(-2, 2, (70, 1)), axis=0)
    return X, np.sign(X[:, 0]) + 0.1 * rng.standard_normal(70)


def _friedman(rng):
    return datasets.make_friedman1(110, n_features=6, noise=0.5, random_state=0)


def _diabetes(rng):
    X, y = datasets.load_diabetes(return_X_y=True)
    return X[:120], y[:120]


def _linnerud(rng):
    X, Y = datasets.load_linnerud(return_X_y=True)
    return np.repeat(X, 2, axis=0), np.repeat(Y[:, 0], 2) + 0.5 * rng.standard_normal(40)


def _additive(rng):
    X = rng.uniform(0, 4, (80, 2))
    return X, np.sin(2 * X[:, 0]) + np.sqrt(X[:, 1]) + 0.1 * rng.standard_normal(80)


_NUMBERS = {
    "smooth1": _smooth(60, 1),
    "smooth2": _smooth(80, 2),
    "smooth4": _smooth(110, 4),
    "wide": _smooth(40, 20),
    "noise-free": _smooth(35, 1, 0.0),
    "noisy": _smooth(70, 1, 2.0),
    "few": _smooth(8, 2),
    "outliers": _outliers,
    "heavy tails": _heavy_tails,
    "replicated": _replicated,
    "weighted": _weighted,
    "units": _units,
    "constant column": _constant_column,
    "step": _step,
    "friedman": _friedman,
    "diabetes": _diabetes,
    "linnerud": _linnerud,
    "additive": _additive,
}


def _gaps(rng):
    x = np.sort(rng.uniform(0, 40, 130))
    y = np.sin(x) + 0.3 * np.sin(3.1 * x) + 0.1 * rng.standard_normal(130)
    return x[:, None], np.where((x > 20) & (x < 24), np.nan, y)


def _seasonal(rng):
    x = np.arange(120) / 12.0
    y = np.sin(2 * np.pi * x) + 0.1 * x**1.5 + 0.1 * rng.standard_normal(120)
    return x[:, None], y


def _same_times(rng):
    x = np.round(rng.uniform(0, 20, 100))
    return x[:, None], np.cos(x / 2) + 0.2 * rng.standard_normal(100)


_SERIES = {"gaps": _gaps, "seasonal": _seasonal, "same times": _same_times}


def _counts(n, d, level=1.0):
    def make(rng):
        X = rng.uniform(-2, 2, (n, d))
        return X, rng.poisson(np.exp(level + np.sin(2 * X[:, 0]))).astype(float)

    return make


def _exposed(rng):
    X = rng.uniform(-2, 2, (80, 1))
    exposure = rng.uniform(0.2, 8, 80)
    return X, rng.poisson(exposure * np.exp(X[:, 0])).astype(float), {"exposure": exposure}


_COUNTS = {
    "counts1": _counts(80, 1),
    "counts2": _counts(90, 2, 0.0),
    "large counts": _counts(60, 1, 6.0),
    "exposed": _exposed,
}


def _moons(rng):
    return datasets.make_moons(100, noise=0.25, random_state=0)


def _interval(rng):
    X = rng.uniform(-2, 2, (70, 1))
    return X, (np.sin(3 * X[:, 0]) + 0.5 * rng.standard_normal(70) > 0).astype(int)


def _separable(rng):
    X = rng.uniform(-2, 2, (50, 2))
    return X, np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")


def _rare(rng):
    X = rng.standard_normal((120, 2))
    y = (np.argsort(np.argsort(X[:, 0])) >= 112).astype(int)
    return X, y


def _weighted_classes(rng):
    X, y = _moons(rng)
    return X, y, {"sample_weight": np.where(np.arange(100) % 9 == 4, 0.0, rng.uniform(0.5, 2, 100))}


def _iris(rng):
    X, y = datasets.load_iris(return_X_y=True)
    return X[1::2], y[1::2]


def _wine(rng):
    X, y = datasets.load_wine(return_X_y=True)
    return X[::2], y[::2]


def _cancer(rng):
    X, y = datasets.load_breast_cancer(return_X_y=True)
    return X[:120], y[:120]


def _digits(rng):
    X, y = datasets.load_digits(n_class=4, return_X_y=True)
    return X[:110], y[:110]


_CLASSES = {
    "moons": _moons,
    "interval": _interval,
    "separable": _separable,
    "rare": _rare,
    "weighted classes": _weighted_classes,
    "iris": _iris,
    "wine": _wine,
    "cancer": _cancer,
    "digits": _digits,
}
