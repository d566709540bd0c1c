"""Scalable Gaussian processes with the scikit-learn interface.

The public estimators are here and nothing else is; kernels beyond scikit-learn's live in
:mod:`skgp.kernels`, data generators in :mod:`skgp.datasets`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skgp.estimators._bayesian import BayesianGPRegressor
    from skgp.estimators._dlm import DLMGPClassifier, DLMGPRegressor
    from skgp.estimators._gpc import GaussianProcessClassifier
    from skgp.estimators._gpr import GaussianProcessRegressor
    from skgp.estimators._qsgp import QSGPClassifier, QSGPRegressor
    from skgp.estimators._state_space import StateSpaceGPRegressor
    from skgp.estimators._state_space_classifier import StateSpaceGPClassifier
    from skgp.estimators._swsgp import SWSGPRegressor
    from skgp.estimators._swsgp_classifier import SWSGPClassifier
    from skgp.estimators._vecchia import VecchiaGPRegressor
    from skgp.estimators._vecchia_classifier import VecchiaGPClassifier

__version__ = "0.1.0.dev0"

__all__ = [
    "BayesianGPRegressor",
    "DLMGPClassifier",
    "DLMGPRegressor",
    "GaussianProcessClassifier",
    "GaussianProcessRegressor",
    "QSGPClassifier",
    "QSGPRegressor",
    "SWSGPClassifier",
    "SWSGPRegressor",
    "StateSpaceGPClassifier",
    "StateSpaceGPRegressor",
    "VecchiaGPClassifier",
    "VecchiaGPRegressor",
]

_MODULES = {
    "BayesianGPRegressor": "skgp.estimators._bayesian",
    "DLMGPClassifier": "skgp.estimators._dlm",
    "DLMGPRegressor": "skgp.estimators._dlm",
    "GaussianProcessClassifier": "skgp.estimators._gpc",
    "GaussianProcessRegressor": "skgp.estimators._gpr",
    "QSGPClassifier": "skgp.estimators._qsgp",
    "QSGPRegressor": "skgp.estimators._qsgp",
    "SWSGPClassifier": "skgp.estimators._swsgp_classifier",
    "SWSGPRegressor": "skgp.estimators._swsgp",
    "StateSpaceGPClassifier": "skgp.estimators._state_space_classifier",
    "StateSpaceGPRegressor": "skgp.estimators._state_space",
    "VecchiaGPClassifier": "skgp.estimators._vecchia_classifier",
    "VecchiaGPRegressor": "skgp.estimators._vecchia",
}


_PUBLIC = ("datasets", "displays", "estimators", "kernels", "likelihoods", "priors")


def __getattr__(name: str) -> Any:
    """Load an estimator or module at its first use: ``import skgp.linalg`` does not pay for it."""
    if name in _PUBLIC:
        return importlib.import_module(f"skgp.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'skgp' has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC})
