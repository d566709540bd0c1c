"""What searches along a direction inside bounds share: bounds that hold, Armijo's rule, steps."""

import math

import numpy as np

from skgp.optim.defaults import ARMIJO, SHORTENED


def held_at_bounds(
    x: np.ndarray, gradient: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Which coordinates (p,) lie at a bound that a step against the gradient would leave."""
    return ((x <= low) & (gradient > 0)) | ((x >= high) & (gradient < 0))


def falls_enough(value: float, loss: float, expected: float) -> bool:
    """Armijo's rule: the value of a trial beside the loss before and the change that g expects."""
    return value <= loss + ARMIJO * min(expected, 0.0)


def shortening(value: float, loss: float, expected: float) -> float:
    """Factor of a step refused: to the least value of the parabola through both ends and g."""
    excess = value - loss - expected
    best = -0.5 * expected / excess if math.isfinite(excess) and excess > 0 else 0.0
    return min(max(best, SHORTENED[0]), SHORTENED[1])
