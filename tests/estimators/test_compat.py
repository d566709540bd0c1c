"""Fits where scikit-learn has no `sklearn.callback`, which came with 1.9."""

import subprocess
import sys

import pytest

FITS = """
import importlib
import sys
import skgp.estimators._compat
try:
    import sklearn.callback as there
except ImportError:
    pass
else:
    sys.modules["sklearn.callback"] = None  # for this import alone: scikit-learn has its own
    importlib.reload(skgp.estimators._compat)
    sys.modules["sklearn.callback"] = there
import numpy as np
from sklearn.gaussian_process.kernels import RBF
from skgp import GaussianProcessClassifier, GaussianProcessRegressor, QSGPRegressor

rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (30, 2))
y = np.sin(X[:, 0])
for model in (
    QSGPRegressor(1.0 * RBF(), verbose=1),
    GaussianProcessRegressor(1.0 * RBF()),
    GaussianProcessRegressor(1.0 * RBF(), method="qsgp"),
    GaussianProcessRegressor(1.0 * RBF(), method="neighbors"),
):
    assert abs(model.fit(X, y).predict(X) - y).max() < 0.3
labels = GaussianProcessClassifier(1.0 * RBF(), method="qsgp").fit(X, y > 0).predict(X)
assert (labels == (y > 0)).mean() > 0.9
try:
    model.set_callbacks(print)
except ImportError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def output():
    found = subprocess.run([sys.executable, "-c", FITS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_fits_without_callbacks_tell_of_their_stages(output):
    assert "[QSGPRegressor] hyperparameters" in output


def test_set_callbacks_says_what_it_needs(output):
    assert "refused: set_callbacks needs scikit-learn 1.9 or later; upgrade it" in output
