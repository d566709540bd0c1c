"""Every check of scikit-learn: with cheap settings by default, defaults and other likelihoods slow.

The checks are of input, state and names; what a fit learns of data has tests of its own.
"""

import json
import subprocess
import sys

import pytest
from sklearn.gaussian_process.kernels import RBF, Matern
from sklearn.utils.estimator_checks import (
    check_dataframe_column_names_consistency,
    check_param_validation,
)

from skgp import (
    BayesianGPRegressor,
    DLMGPClassifier,
    DLMGPRegressor,
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    QSGPClassifier,
    QSGPRegressor,
    StateSpaceGPClassifier,
    StateSpaceGPRegressor,
    SWSGPRegressor,
)
from tests.contracts.catalogue import CHEAP, cheap
from tests.contracts.common import sklearn_checks
from tests.contracts.estimators import RoundTargets

pytestmark = [
    pytest.mark.filterwarnings("ignore:n_inducing=.* is more than the:UserWarning"),
    pytest.mark.filterwarnings("ignore:n_basis=30 exceeds"),
]


class RoundedDLM(RoundTargets, DLMGPRegressor):
    """Takes the fractions of the checks as counts."""


class RoundedSWSGP(RoundTargets, SWSGPRegressor):
    """Takes the fractions of the checks as counts."""


class RoundedStateSpace(RoundTargets, StateSpaceGPRegressor):
    """Takes the fractions of the checks as counts."""


#: Nothing is learned.
QUICK = {make: cheap(make, kernel=None, optimizer=None) for make in CHEAP} | {
    QSGPClassifier: cheap(QSGPClassifier, optimizer=None, n_basis=30),
    DLMGPClassifier: cheap(DLMGPClassifier, kernel=RBF(), optimizer=None),
    **{
        make: make(optimizer=None, random_state=0)
        for make in (DLMGPRegressor, SWSGPRegressor)  # few rows take the exact process
    },
    StateSpaceGPRegressor: StateSpaceGPRegressor(optimizer=None),
    StateSpaceGPClassifier: StateSpaceGPClassifier(1.0 * Matern(nu=0.5), optimizer=None),
}
FRONT = {
    make: make(optimizer=None) for make in (GaussianProcessRegressor, GaussianProcessClassifier)
}


def of_no_search(estimator):
    """State-space models count the iterations of their search: tests/estimators/test_fitting.py."""
    counted = type(estimator) in (StateSpaceGPRegressor, StateSpaceGPClassifier)
    return (
        {"check_non_transformer_estimators_n_iter": "no search, no iterations"} if counted else {}
    )


#: What tests/contracts ask more strictly of each of these: of lists, frames and maps as of arrays,
#: batches, orders of rows, pickles, repeated fits, pipelines, class weights; of weights
#: test_weights.py.
ELSEWHERE = {
    "check_regressor_data_not_an_array",
    "check_classifier_data_not_an_array",
    "check_methods_subset_invariance",
    "check_methods_sample_order_invariance",
    "check_fit_idempotent",
    "check_estimators_pickle",
    "check_sample_weight_equivalence_on_dense_data",
    "check_readonly_memmap_input",
    "check_pipeline_consistency",
    "check_class_weight_classifiers",
}

test_quick_settings = sklearn_checks(
    *QUICK.values(), expected_failed_checks=of_no_search, variants=False, but=ELSEWHERE
)
test_front_doors = sklearn_checks(*FRONT.values(), variants=False)

FEW_POINTS = dict(n_inducing=30, max_iter=20, random_state=0)

test_defaults_and_variants = pytest.mark.slow(
    sklearn_checks(
        *[make() for make in CHEAP | FRONT],
        *[DLMGPRegressor(objective=o) for o in ("elbo", "square_loss", "fitc")],
        DLMGPRegressor(hyperparameters="fixed"),
        DLMGPRegressor(**FEW_POINTS),
        DLMGPRegressor(likelihood="student_t", **FEW_POINTS),
        RoundedDLM(likelihood="poisson"),
        SWSGPRegressor(likelihood="student_t", random_state=0),
        RoundedSWSGP(likelihood="poisson", random_state=0),
        RoundedStateSpace(likelihood="poisson"),
        QSGPRegressor(basis="relevance", random_state=0),
        QSGPRegressor(likelihood="laplace", random_state=0),
        QSGPRegressor(likelihood="lognormal", optimizer=None),  # their targets are positive
        BayesianGPRegressor(solver="cg", optimizer=None),
        BayesianGPRegressor(optimizer="map"),
    )
)


@pytest.mark.parametrize("make", QUICK | FRONT, ids=lambda make: make.__name__)
def test_parameters_are_validated(make):
    check_param_validation(make.__name__, (QUICK | FRONT)[make])


@pytest.mark.parametrize("estimator", (QUICK | FRONT).values(), ids=lambda e: type(e).__name__)
def test_dataframe_columns_are_checked(estimator):
    pytest.importorskip("pandas")
    check_dataframe_column_names_consistency(type(estimator).__name__, estimator)


# ---- versions of scikit-learn --------------------------------------------------------------------


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
    "BayesianGPRegressor": [{"n_samples": 64}, {"kernel": DotProduct() * RBF(), "n_samples": 64}],
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
