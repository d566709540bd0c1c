"""Pictures of fitted estimators, after scikit-learn's Display convention."""

from skgp.displays.fits import AdditiveEffectsDisplay, LossHistoryDisplay
from skgp.displays.posterior import PosteriorDisplay, TraceDisplay
from skgp.displays.prediction import (
    CoverageDisplay,
    PredictiveBandDisplay,
    expected_calibration_error,
)

__all__ = [
    "AdditiveEffectsDisplay",
    "CoverageDisplay",
    "LossHistoryDisplay",
    "PosteriorDisplay",
    "PredictiveBandDisplay",
    "TraceDisplay",
    "expected_calibration_error",
]
