r"""Targets y of which a model describes the logarithm: :math:`\log y = f + \varepsilon`, Gaussian.

With mean m and variance v of log y the median of y is :math:`e^m`, its mean :math:`e^{m + v / 2}`,
and its standard deviation :math:`e^{m + v} \sqrt{1 - e^{-v}}`. Far ahead the mean is what the least
likely growth makes it, and with a variance that is averaged over it is none. What is predicted is
:math:`E[y \mid f] = e^{f + \sigma^2 / 2}` at the mean of f: the mean where f is known.
"""

from __future__ import annotations

import numpy as np

from skgp.estimators.defaults import MAX_EXPONENT


def exponential(x: np.ndarray) -> np.ndarray:
    """Exponentials of 1e277 at most: of forecasts so far ahead that they are no numbers."""
    return np.exp(np.minimum(x, MAX_EXPONENT))


def log_normal_std(mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Standard deviations of y given mean and variance of log y."""
    with np.errstate(divide="ignore"):  # log(0) where log y does not vary
        return exponential(mean + var + 0.5 * np.log(-np.expm1(-var)))


def log_normal_gradients(
    centre: np.ndarray, mean: np.ndarray, var: np.ndarray, d_mean: np.ndarray, d_var: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Prediction `centre` and standard deviation of y, and their gradients (n, d).

    Given mean and variance of log y, and their gradients.
    """
    std = log_normal_std(mean, var)
    # d log std / dv = 1 + 1 / (2 (e^v - 1))
    rate = np.divide(0.5, np.expm1(np.minimum(var, MAX_EXPONENT)), where=var > 0, out=0 * var)
    d_std = std[..., None] * (d_mean + (1 + rate[..., None]) * d_var)
    return centre, std, centre[..., None] * d_mean, d_std


def check_positive_targets(y: np.ndarray, remedy: str) -> None:
    """Refuse targets that have no logarithm: a ValueError names the first, its row, the remedy."""
    bad = y <= 0
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"y must be positive where log y is modelled; got {y[row].item()!r} in row {row} "
            f"({bad.sum()} of {len(y)} rows are not positive). {remedy}"
        )
