"""The estimator base: memory of predictions, clipped variances, devices, random numbers."""

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import QSGPRegressor, StateSpaceGPRegressor
from skgp.estimators import _base
from skgp.estimators._base import clip_variance, resolve_device, to_tensor
from skgp.estimators._predictive import covariance_root, is_constant
from skgp.linalg import NumericalWarning
from tests.contracts.estimators import rbf_kernel


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (30, 2))
    return X, 5 + 3 * np.sin(X.sum(1)) + 0.1 * rng.standard_normal(30)


def test_mean_alone_takes_the_fast_path(data, monkeypatch):
    X, y = data
    estimator = QSGPRegressor(rbf_kernel(), optimizer=None).fit(X, y)
    monkeypatch.setattr(estimator, "_moments", None)
    monkeypatch.setattr(estimator, "_latent_mean_and_covariance", None)
    assert estimator.predict(X).shape == y.shape


def test_kernel_at_a_bound_warns_as_scikit_learn_does(data):
    kernel = RBF(1e-3, (1e-3, 1.0001e-3)) + WhiteKernel(0.1)
    with pytest.warns(ConvergenceWarning, match="k1__length_scale is close to the specified"):
        QSGPRegressor(kernel, random_state=0).fit(*data)


def test_clip_variance_warns_with_the_least_value():
    with pytest.warns(NumericalWarning, match="2 of 3 .* the least -0.5 "):
        clipped = clip_variance(np.array([-0.5, 1.0, -0.1]))
    np.testing.assert_array_equal(clipped, [0, 1, 0])


def test_clip_variance_is_silent_on_good_values(recwarn):
    var = np.array([0.0, 1.0])
    assert clip_variance(var) is var
    assert not recwarn


def test_covariance_root_of_a_singular_matrix():
    A = np.random.default_rng(0).standard_normal((5, 2))
    root = covariance_root(A @ A.T)
    np.testing.assert_allclose(root @ root.T, A @ A.T, atol=1e-12)


def test_covariance_root_is_continuous_where_eigenvalues_are_equal():
    E = np.random.default_rng(0).standard_normal((5, 5)) * 1e-13
    np.testing.assert_allclose(covariance_root(np.eye(5) + E + E.T), np.eye(5), atol=1e-11)


@pytest.mark.parametrize(
    ("y", "constant"),
    [([0.1] * 7, True), ([0.0, 0.0], True), ([1e8, 1e8 + 1e-3], False), ([1e-9, 2e-9], False)],
)
def test_is_constant_judges_relative_to_the_values(y, constant):
    y = np.array(y)
    assert is_constant(y.std(), y) is np.bool_(constant)


def test_is_constant_allows_for_the_rounding_of_a_mean():
    y = np.full((2500, 2), 3.7)
    y[0, 1] += 1e-9
    assert y.std(axis=0)[0] > 1e-14
    np.testing.assert_array_equal(is_constant(y.std(axis=0), y), [True, False])


def test_resolve_device_auto_finds_one():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == expected
    assert resolve_device(torch.device("cpu")).type == "cpu"


def test_auto_leaves_few_rows_and_series_of_one_column_to_the_cpu(monkeypatch):
    """By rows counted in the X given, whatever it is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    taken = []

    def resolve(device, n_rows, least):
        taken.append("cuda" if n_rows >= least else "cpu")

    monkeypatch.setattr(_base, "resolve_device", resolve)

    series = StateSpaceGPRegressor()
    for model, X, expected in (
        (QSGPRegressor(), np.zeros((499, 3)), "cpu"),
        (QSGPRegressor(), [[0.0]] * 500, "cuda"),
        (QSGPRegressor(), None, "cuda"),  # a stream
        (series, np.zeros((10**6, 1)), "cpu"),
        (series, np.zeros((500, 2)), "cuda"),
        (series, np.zeros((499, 2)), "cpu"),
    ):
        model._resolve_backend(X)
        assert taken.pop() == expected
    assert resolve_device("auto", 499).type == "cpu"


def test_to_tensor_shares_memory_and_accepts_read_only(recwarn):
    array = np.arange(6.0).reshape(2, 3)
    assert to_tensor(array).data_ptr() == array.ctypes.data
    array.flags.writeable = False
    assert torch.equal(to_tensor(array, dtype=torch.float32), torch.arange(6.0).reshape(2, 3))
    assert not recwarn
