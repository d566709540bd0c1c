"""QSGPRegressor and QSGPClassifier on a device: equal to the CPU, few transfers."""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp import QSGPRegressor
from skgp.estimators.defaults import LEAST_GPU_ROWS
from tests.devices.common import PRETENDED, assert_few_transfers, cases, check, fit_counts
from tests.devices.pretended_cuda import CUDA

CASES = cases(
    """
[QSGPRegressor]
few:
weighted:
smooth2: kernel=linear optimizer=None
smooth2: kernel=product optimizer=None
seasonal: basis=fourier n_basis=40 kernel=periodic optimizer=None
smooth2: basis=inducing n_basis=20 covariance=chevron n_dense_columns=5 optimizer=None
replicated: basis=inducing n_basis=20 augment=False optimizer=None
weighted: basis=inducing solver=cg covariance=samples optimizer=None
smooth4: basis=fourier n_basis=40 feature_map=hadamard dtype=float32 optimizer=None
weighted: basis=fourier n_basis=60 solver=gauss-seidel basis_batch_size=16 optimizer=None
smooth2: basis=relevance n_basis=10 optimizer=None
smooth2: basis=neighbors kernel=matern32 optimizer=None
weighted/parts: basis=inducing n_basis=10 solver=cholesky optimizer=None
outliers: likelihood=laplace
[QSGPClassifier]
moons:
iris: likelihood=probit basis=inducing n_basis=20 covariance=diagonal optimizer=None
moons: basis=fourier n_basis=40 covariance=chevron n_dense_columns=5 optimizer=None
weighted classes: basis=relevance likelihood=probit optimizer=None
iris/parts: basis=inducing n_basis=10 optimizer=None
"""
)
ITERATED = cases(
    """
[QSGPRegressor]
smooth2: basis=inducing solver=cg optimizer=None
smooth2: basis=fourier n_basis=60 solver=gauss-seidel basis_batch_size=16 optimizer=None
smooth2: basis=relevance optimizer=None
outliers: likelihood=laplace basis=fourier n_basis=40 optimizer=None
[QSGPClassifier]
moons: basis=fourier n_basis=40 optimizer=None
"""
)


def name(case):
    return f"{case.estimator}-{case}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_routes_are_those_of_the_cpu(case, device):
    others = {"neighbors": (4, 1), "periodic": (2, 2)}  # what rows are searched by; two parts
    found = [crossed for name, crossed in others.items() if name in str(case)]
    check(case, device, crossed=found[0] if found else (1, 1))


@pytest.mark.parametrize("named", ["auto", "cuda", "cuda:0", torch.device("cuda")])
def test_every_name_of_a_device_leads_there(named, rng):
    X = rng.standard_normal((LEAST_GPU_ROWS if named == "auto" else 12, 2))
    with PRETENDED.entered():
        model = QSGPRegressor(RBF(), optimizer=None, device=named).fit(X, X[:, 0])
        assert model._posterior.device == CUDA


def test_devices_without_numbers_are_refused(rng):
    X = rng.standard_normal((12, 2))
    with pytest.raises(ValueError, match='device=.meta. cannot be used.* Use device="auto"'):
        QSGPRegressor(device="meta").fit(X, X[:, 0])


@pytest.mark.parametrize("case", ITERATED, ids=name)
def test_transfers_do_not_depend_on_iterations(case):
    few, many = (fit_counts(case, max_iter=size, tol=1e-12) for size in (1, 12))
    assert few["operations"] < many["operations"]
    for way in ("to_device", "to_host"):
        assert few[way] == many[way] <= 40


def test_an_evaluation_of_the_evidence_has_a_transfer_each_way():
    (case,) = cases("[QSGPRegressor]\nsmooth2: kernel=ard")
    assert_few_transfers(case, evaluations=lambda model: len(model.history_["hyperparameters"]))
