"""Fitted estimators through ``pickle`` and ``skops``."""

import copy
import pickle
import pickletools

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPClassifier,
    DLMGPRegressor,
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    QSGPClassifier,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from skgp.linalg.runtime import TensorState
from tests.contracts.catalogue import CHEAP, cheap, rows, streaming

pytestmark = pytest.mark.filterwarnings("ignore")

#: What each estimator holds by default, and other states that it may hold.
STATES = [
    *((make, {}) for make in CHEAP),
    (GaussianProcessRegressor, {"kernel": RBF() + WhiteKernel(0.1)}),
    (GaussianProcessRegressor, {"method": "neighbors"}),
    (GaussianProcessClassifier, {}),
    (GaussianProcessClassifier, {"method": "qsgp"}),
    (DLMGPRegressor, {"likelihood": "student_t"}),
    (DLMGPRegressor, {"likelihood": "poisson", "kernel": None}),
    (SWSGPRegressor, {"likelihood": "student_t"}),
    (StateSpaceGPRegressor, {"likelihood": "student_t"}),
    (StateSpaceGPRegressor, {"n_inducing": 5}),
    (StateSpaceGPRegressor, {"likelihood": "lognormal"}),
    (VecchiaGPRegressor, {"likelihood": "student_t"}),
    (VecchiaGPRegressor, {"likelihood": "poisson"}),
    (QSGPRegressor, {"likelihood": "laplace"}),
    (QSGPRegressor, {"basis": "fourier", "n_basis": 20, "covariance": "chevron"}),
    (QSGPRegressor, {"solver": "cg", "covariance": "samples"}),
    (QSGPRegressor, {"solver": "sgd", "max_iter": 5, "warm_start": True}),
    (QSGPClassifier, {"solver": "sgd", "max_iter": 5, "warm_start": True}),
    (QSGPClassifier, {"basis": "relevance"}),
    (BayesianGPRegressor, {"optimizer": "auto", "n_samples": 64, "min_ess": 5}),
]


def target(make, params, n=30, seed=0):
    X, y = rows(make, n, seed=seed)
    if params.get("likelihood") == "lognormal":
        return X, np.exp(y)
    return X, np.rint(3 * abs(y)) if params.get("likelihood") == "poisson" else y


def streams(make, params):
    return hasattr(make(**params), "partial_fit") and params.get("solver") not in ("sgd", "cg")


@pytest.fixture(
    scope="module", params=STATES, ids=lambda s: "-".join([s[0].__name__, *map(str, s[1].values())])
)
def fitted(request):
    make, params = request.param
    estimator = cheap(make, **params) if params else streaming(make)
    if streams(make, params) and params.get("basis") != "relevance":
        return estimator.partial_fit(*target(make, params))
    return estimator.fit(*target(make, params))


def test_skops_needs_no_types_but_those_of_skgp_and_kernels(fitted):
    skops = pytest.importorskip("skops.io")
    data = skops.dumps(fitted)
    untrusted = skops.get_untrusted_types(data=data)
    assert all(t.startswith(("skgp.", "sklearn.gaussian_process.kernels.")) for t in untrusted)
    X = np.linspace(-1, 6, 9)[:, None]
    loaded = skops.loads(data, trusted=untrusted)
    np.testing.assert_allclose(
        loaded.latent_mean_and_variance(X), fitted.latent_mean_and_variance(X), rtol=1e-10
    )
    if hasattr(fitted, "predict_quantiles"):
        quantiles = (e.predict_quantiles(X, [0.1, 0.9]) for e in (loaded, fitted))
        np.testing.assert_allclose(*quantiles, rtol=1e-7)
    by_default = fitted.get_params() == streaming(type(fitted)).get_params()
    if by_default and hasattr(fitted, "partial_fit"):
        X, y = rows(type(fitted), 12, seed=2)
        streams = loaded, copy.deepcopy(fitted)
        found, expected = (e.partial_fit(X, y).latent_mean_and_variance(X) for e in streams)
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-10)


def test_pickle_and_deep_copy_hold_no_tensor_storage(fitted):
    text = pickle.dumps(fitted)
    names = {str(argument) for _, argument, _ in pickletools.genops(text)}
    assert not [name for name in names if "_rebuild_tensor" in name or "torch.storage" in name]
    X = np.linspace(-1, 6, 9)[:, None]
    for other in (pickle.loads(text), copy.deepcopy(fitted)):
        np.testing.assert_allclose(
            other.latent_mean_and_variance(X), fitted.latent_mean_and_variance(X), rtol=1e-10
        )


def tensors(value, seen):
    """Tensors that a state holds, caches of random draws aside."""
    if id(value) in seen or type(value).__name__ == "OrderedDict":
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value).__module__.startswith("skgp"):
        value = vars(value) if hasattr(value, "__dict__") else ()
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple)):
        return []
    return [tensor for part in parts for tensor in tensors(part, seen)]


def test_to_reaches_every_tensor_of_a_state(fitted):
    """A precision stands for a device: one tensor left behind would stop predictions."""
    fitted.predict(rows(type(fitted))[0])  # what predictions work out is worked out anew
    states = [*getattr(fitted, "_states", ())] or [vars(fitted).get("_posterior")]
    for state in states:
        if isinstance(state, TensorState):
            assert torch.float64 in {tensor.dtype for tensor in tensors(state, set())}
            moved = {tensor.dtype for tensor in tensors(state.to(torch.float32), set())}
            assert torch.float64 not in moved


@pytest.mark.parametrize(
    ("model", "most", "bytes_a_row"),
    [
        (SWSGPRegressor(n_inducing=60, n_neighbors=8), 30_000, 0),
        (DLMGPClassifier(n_inducing=15, max_iter=2), 30_000, 0),
        (QSGPClassifier(basis="inducing", n_basis=20), 30_000, 0),
        (StateSpaceGPRegressor(n_inducing=30), 8_000, 0),
        (StateSpaceGPRegressor(), 13_000, 24),  # sites and times
    ],
    ids=str,
)
def test_state_does_not_grow_with_the_rows(model, most, bytes_a_row):
    kernel = Matern(nu=1.5)
    kernel = kernel + WhiteKernel(0.1) if hasattr(model, "predict_interval") else kernel
    sizes = []
    for n in (300, 1500):
        X, y = rows(type(model), n)
        model.set_params(kernel=kernel, optimizer=None).fit(X, y).predict(X[:5])
        sizes.append(len(pickle.dumps(model)))
    assert sizes[0] < most and abs(sizes[1] - sizes[0]) < 300 + bytes_a_row * 1200
