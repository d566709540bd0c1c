"""A small budget changes no result, and what cannot fit in it is refused before it begins."""

import tracemalloc

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, PairwiseKernel

from skgp import (
    BayesianGPRegressor,
    DLMGPRegressor,
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    QSGPClassifier,
    QSGPRegressor,
    SWSGPRegressor,
)
from skgp.inference import defaults as inference
from skgp.linalg.runtime import MemoryBudgetError
from tests.contracts.catalogue import CHEAP, cheap, rows

#: Bytes in which the matrices of sixty rows fit, and no tile of 150 new ones.
SMALL = 2e5
FOURIER = {"basis": "fourier", "n_basis": 64}
#: Routes that keep or tile something else than the default of few rows does.
ROUTES = [
    *((make, {}) for make in CHEAP),
    (QSGPRegressor, {"solver": "cg", "tol": 1e-7, "covariance": "diagonal"}),
    (QSGPRegressor, {**FOURIER, "solver": "cg", "tol": 1e-10}),
    (QSGPRegressor, {**FOURIER, "solver": "cholesky"}),
    (QSGPRegressor, {**FOURIER, "solver": "gauss-seidel"}),
    (QSGPRegressor, {"basis": "relevance"}),
    (QSGPRegressor, {"basis": "neighbors", "n_basis": 8}),
    (QSGPRegressor, {"likelihood": "laplace", "n_basis": 20}),
    (QSGPClassifier, {**FOURIER}),
    (DLMGPRegressor, {"objective": "elbo"}),
    (BayesianGPRegressor, {"solver": "cg", "optimizer": None}),
]


def predictions(make, budget, **params):
    """Means and variances of f at 150 new rows, optimiser off."""
    X, y = rows(make, 60)
    new = np.linspace(-1, 6, 150)[:, None]
    params = {**params, "optimizer": None, "memory_budget": budget}
    return np.array(cheap(make, **params).fit(X, y).latent_mean_and_variance(new))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("make", "params"), ROUTES, ids=str)
def test_a_small_budget_changes_no_result(make, params):
    expected = predictions(make, 1e10, **params)
    found = predictions(make, SMALL, **params)
    # Conjugate gradients end with another iterate where products are rounded otherwise.
    tol = 1e-5 if params.get("solver") == "cg" else 1e-8
    np.testing.assert_allclose(found, expected, rtol=tol, atol=tol)


@pytest.mark.parametrize(
    ("make", "params", "message"),
    [
        # With less, sums over blocks of rows take the place of what rows would hold.
        (
            QSGPRegressor,
            {"solver": "cholesky", "memory_budget": 8e4},
            "kernel matrices of 60 rows takes .* solver='cg'",
        ),
        (
            QSGPRegressor,
            {**FOURIER, "solver": "cholesky", "memory_budget": 8e4},
            "of 64 basis functions .* n_basis",
        ),
        (QSGPRegressor, {"likelihood": "laplace", "n_basis": 40}, "of 40 basis functions"),
        (QSGPClassifier, {"n_basis": 50}, "Hessians of 1 latent functions of 50 .* smaller n_b"),
        (DLMGPRegressor, {"n_inducing": 40}, "at M=40 inducing points takes .* n_inducing"),
        (DLMGPRegressor, {"objective": "fitc", "n_inducing": 11}, "60 rows by 'fitc' .*='elbo'"),
        (SWSGPRegressor, {"n_inducing": 50}, "60 rows with H=6 neighbours .* M=50 .* n_neighbors"),
        (SWSGPRegressor, {"n_neighbors": 50, "n_inducing": 50}, "full covariance of M=50"),
        (BayesianGPRegressor, {"solver": "cholesky"}, "of 60 distinct rows takes .* solver='cg'"),
    ],
    ids=str,
)
def test_what_cannot_fit_is_refused_with_sizes_and_remedy(make, params, message):
    X, y = rows(make, 60)
    model = cheap(make, **{"memory_budget": 1e4, **params})
    with pytest.raises(MemoryBudgetError, match=message) as caught:
        model.fit(X, y)
    assert f"the budget is {model.memory_budget / 1e9:.3g} GB" in str(caught.value)
    assert "or raise memory_budget" in str(caught.value)
    assert not hasattr(model, "kernel_")


@pytest.mark.parametrize("make", [GaussianProcessRegressor, GaussianProcessClassifier])
def test_derivatives_of_a_called_kernel_count_before_the_fit(make, rng):
    """Of n x n x n_theta numbers: refused while learned, fitted within the peak while fixed."""
    X = rng.standard_normal((200, 2))
    y = X[:, 0] > 0
    kernel = PairwiseKernel(metric="laplacian") * ConstantKernel() + RBF()
    room = 8 * 15 * len(X) ** 2
    given = {"kernel": kernel, "memory_budget": room, "method": "exact"}
    with pytest.raises(MemoryBudgetError, match=r"holds 19 matrices of 200 x 200.*optimizer=None"):
        make(**given).fit(X, y)
    make(**given, optimizer=None).fit(X, y)
    model = make(**{**given, "memory_budget": 8 * 19 * len(X) ** 2, "n_restarts_optimizer": 0})
    tracemalloc.start()
    model.fit(X, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= model.memory_budget


def test_variances_that_make_the_kernel_matrix_anew_too_often_are_refused(monkeypatch):
    """Each tile of rows takes a solution; few of them, and the mean, are there all the same."""
    X, y = rows(BayesianGPRegressor, 60)
    new = np.linspace(-1, 6, 30)[:, None]
    given = {"solver": "cg", "optimizer": None, "memory_budget": 2e4}
    model = cheap(BayesianGPRegressor, **given).fit(X, y)
    expected = model.predict(new, return_std=True)
    # Room for two solutions of 30 products; a tile of an eighth of the budget has one row.
    monkeypatch.setattr(inference, "MADE_ANEW", 2.5 * 30 * 60**2 / 2)
    sizes = r"at 30 rows given 60 takes at least 900 products .* takes 2.88e-05 GB.* 2e-05 GB"
    with pytest.raises(MemoryBudgetError, match=sizes + ". Predict 2 rows, the mean alone, or"):
        model.predict(new, return_std=True)
    np.testing.assert_array_equal(model.predict(new), expected[0])
    some = model.predict(new[:2], return_std=True)[1]
    np.testing.assert_allclose(some, expected[1][:2], rtol=1e-4)
    model.set_params(memory_budget=1e9).predict(new, return_std=True)  # the matrix is stored


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_joint_covariances_with_many_training_rows_are_refused(solver):
    X, y = rows(BayesianGPRegressor, 200)
    model = cheap(BayesianGPRegressor, solver=solver, optimizer=None).fit(X, y)
    model.set_params(memory_budget=2e4)
    sizes = r"covariance of 20 rows given 200 takes .*room for [14]\)"
    with pytest.raises(MemoryBudgetError, match=sizes):
        model.predict(X[:20], return_cov=True)
    assert model.predict(X[:1], return_cov=True)[1].shape == (1, 1)
