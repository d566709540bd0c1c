"""Pictures of fitted estimators, after scikit-learn's Display convention."""

from skgp.displays.additive import AdditiveEffectsDisplay
from skgp.displays.calibration import expected_calibration_error
from skgp.displays.prediction import CoverageDisplay, PredictiveBandDisplay

__all__ = [
    "AdditiveEffectsDisplay",
    "CoverageDisplay",
    "PredictiveBandDisplay",
    "expected_calibration_error",
]
