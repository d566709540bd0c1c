"""Fits in a process of their own, without the `sklearn.callback` that came with 1.9."""

import json
import subprocess
import sys

import pytest

FITS = """
import json, os, sys, warnings
import torch.utils.checkpoint  # that of torch 2.6 loads sympy
known = set(sys.modules)
import numpy as np
import sklearn.pipeline
from sklearn.gaussian_process.kernels import DotProduct, RBF
try:
    import sklearn.callback as there
except ImportError:
    import skgp
else:
    sys.modules["sklearn.callback"] = None  # for this import alone: scikit-learn has its own
    import skgp.estimators._parameters
    sys.modules["sklearn.callback"] = there
    assert skgp.estimators._base.CallbackSupportMixin is not there.CallbackSupportMixin

names = ["torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy"]
X = np.random.default_rng(0).normal(size=(24, 1))
y = np.sin(X[:, 0])
options = {
    "QSGPRegressor": [
        {"verbose": 1}, {"kernel": DotProduct() * RBF()}, {"solver": "sgd", "max_iter": 3}
    ],
    "DLMGPRegressor": [{"n_inducing": 5}, {"n_inducing": 5, "batch_size": 10, "max_iter": 3}],
    "SWSGPRegressor": [{}, {"method": "variational", "batch_size": 10, "max_iter": 3}],
    "SWSGPClassifier": [{}, {"batch_size": 10, "max_iter": 3}],
    "BayesianGPRegressor": [{}, {"kernel": DotProduct() * RBF(), "n_samples": 64}],
    "GaussianProcessRegressor": [{}, {"method": "qsgp"}, {"method": "neighbors"}],
    "GaussianProcessClassifier": [{}, {"method": "qsgp"}],
}
estimators = [getattr(skgp, name) for name in skgp.__all__ if name[-4:] in ("ssor", "fier")]
before = dict(os.environ), list(warnings.filters)
warnings.simplefilter("ignore")
for estimator in estimators:
    for chosen in options.get(estimator.__name__, [{}]):
        target = y > 0 if hasattr(estimator, "predict_proba") else y
        model = estimator(**chosen).fit(X, target)
        found = model.predict(X)
        assert (found == target).mean() > 0.9 or abs(found - target).max() < 0.3 or (
            "max_iter" in chosen or "n_inducing" in chosen
        ), model
warnings.filters.pop(0)
try:
    model.set_callbacks(print)
except ImportError as error:
    print("refused:", error)
print(json.dumps({
    "n": len(estimators),
    "loaded": [name for name in names if name in sys.modules and name not in known],
    "environment": dict(os.environ) == before[0],
    "filters": [str(f) for f in warnings.filters if f not in before[1]],
}))
"""


@pytest.fixture(scope="module")
def output():
    found = subprocess.run([sys.executable, "-c", FITS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_fits_load_no_compiler_and_leave_no_filter(output):
    expected = {"n": 13, "loaded": [], "environment": True, "filters": []}
    assert json.loads(output.splitlines()[-1]) == expected


def test_fits_without_callbacks_tell_of_their_stages(output):
    assert "[QSGPRegressor] hyperparameters" in output


def test_set_callbacks_says_what_it_needs(output):
    assert "refused: set_callbacks needs scikit-learn 1.9 or later; upgrade it" in output
