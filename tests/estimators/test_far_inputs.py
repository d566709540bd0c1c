"""Inputs far from all others, of every estimator: no prediction depends on what is in its batch."""

import warnings
from functools import cache

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import (
    RBF,
    DotProduct,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

import skgp
from skgp.kernels import Cosine
from tests.covering import covering, slow

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
F = np.sin(2 * X[:, 0]) + 0.3 * X[:, 1]
Y = F + 0.1 * RNG.standard_normal(60)
X_TEST = RNG.standard_normal((8, 3))

NAMES = [name for name in skgp.__all__ if name.endswith(("Regressor", "Classifier"))]
#: Those that keep scikit-learn's digits and checks are exempt from what goes beyond them.
OWN = [name for name in NAMES if not name.startswith("GaussianProcess")]
every_estimator = pytest.mark.parametrize("name", NAMES)
#: Other routes to the posterior, beside the default one of few rows.
ROUTES = [(name, {}) for name in NAMES] + [
    ("QSGPRegressor", {"basis": "fourier", "n_basis": 100}),
    ("QSGPRegressor", {"basis": "inducing", "n_basis": 20}),
    ("QSGPRegressor", {"solver": "cg"}),
    ("QSGPRegressor", {"solver": "sgd", "max_iter": 30, "batch_size": 20, "basis_batch_size": 20}),
    ("QSGPRegressor", {"covariance": "samples"}),
    ("QSGPRegressor", {"likelihood": "laplace"}),
    ("QSGPRegressor", {"basis": "relevance"}),
    ("QSGPClassifier", {"basis": "fourier", "n_basis": 100}),
    ("SWSGPRegressor", {"n_inducing": 40, "n_neighbors": 8}),
    ("DLMGPRegressor", {"n_inducing": 20}),
    ("DLMGPRegressor", {"likelihood": "student_t"}),
    ("StateSpaceGPRegressor", {"n_inducing": 10}),
]
every_route = pytest.mark.parametrize(
    ("name", "params"), ROUTES, ids=["-".join([n, *map(str, p.values())]) for n, p in ROUTES]
)


def shorten(name, X):
    """State-space estimators take one column here."""
    return X[:, :1] if name.startswith("StateSpace") else X


def make(name, kernel=None, **params):
    """An estimator that keeps the hyper-parameters of a kernel."""
    signal = Matern(1.5, nu=1.5) if kernel is None else kernel
    if name.endswith("Classifier"):
        kernel = 4.0 * signal
    else:
        kernel = signal + WhiteKernel(0.05)
    quick = {"n_samples": 64} if name == "BayesianGPRegressor" else {"optimizer": None}
    params = quick | params
    return getattr(skgp, name)(kernel, random_state=0, **params)


def fit(name, X, y, **params):
    y = np.asarray(y > 0, dtype=int) if name.endswith("Classifier") else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(name, **params).fit(shorten(name, X), y)


@cache
def fitted(name, *params):
    """Fitted once to the ordinary rows, for tests that only predict."""
    return fit(name, X, Y, **dict(params))


def moments(name, model, X):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.stack(model.latent_mean_and_variance(shorten(name, X)), axis=-1)


def far_rows(value):
    return value * np.outer([1.0, 0.5, -0.7], np.ones(3))


@every_route
def test_a_prediction_does_not_depend_on_far_rows_beside_it(name, params):
    model = fitted(name, *params.items())
    alone = np.concatenate([moments(name, model, row[None]) for row in X_TEST])
    for value in (1e6, 1e10, 1e300):
        together = moments(name, model, np.concatenate([far_rows(value), X_TEST]))
        assert np.isfinite(together).all()
        np.testing.assert_allclose(together[3:], alone, rtol=1e-7, atol=1e-9)
    crowd = np.concatenate([far_rows(1e12 + 1e9 * i) for i in range(60)])
    found = moments(name, model, np.concatenate([crowd, X_TEST]))[180:]
    np.testing.assert_allclose(found, alone, rtol=1e-7, atol=1e-9)


@every_estimator
def test_far_rows_get_the_prior(name):
    model = fitted(name)
    prior = moments(name, model, np.full((1, 3), 1e4))
    for value in (1e6, 1e10, 1e100, 1e300):
        np.testing.assert_allclose(
            moments(name, model, far_rows(value)), np.repeat(prior, 3, 0), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize(
    "kernel",
    [
        RationalQuadratic(1.5, alpha=0.7),
        Matern(1.5, nu=1.5) + 0.3 * DotProduct(),
        Matern(1.5, nu=0.5) * RBF(2.0),
    ],
    ids=["rational-quadratic", "linear", "product"],
)
@pytest.mark.parametrize("name", ["QSGPRegressor", "DLMGPRegressor", "SWSGPRegressor"])
def test_no_kernel_lets_far_rows_change_a_prediction(name, kernel):
    model = fit(name, X, Y, kernel=kernel)
    alone = moments(name, model, X_TEST)
    for value in (1e6, 1e8, 1e10):
        together = moments(name, model, np.concatenate([far_rows(value), X_TEST]))
        assert np.isfinite(together).all()
        np.testing.assert_allclose(together[3:], alone, rtol=1e-7, atol=1e-9)


@covering(
    name=[name for name in OWN if not name.startswith("StateSpace")],
    case=[(DotProduct(), 1e6), (RBF(2.0) + DotProduct(), 1e8)],
)
def test_a_linear_kernel_stands_offsets(name, case):
    kernel, offset = case
    model = fit(name, X + offset, Y, kernel=kernel)
    rows = X_TEST + offset
    alone = np.concatenate([moments(name, model, row[None]) for row in rows])
    np.testing.assert_allclose(moments(name, model, rows), alone, rtol=1e-8, atol=1e-8)
    if name.endswith("Regressor"):
        values = np.linalg.eigvalsh(model.predict(rows, return_cov=True)[1])
        assert values[0] > 0


@pytest.mark.parametrize("kernel", [ExpSineSquared(1.0, 3.0), Cosine(3.0)], ids=["sine", "cosine"])
@pytest.mark.parametrize("name", ["QSGPRegressor", "DLMGPRegressor", "StateSpaceGPRegressor"])
def test_periodic_kernels_stand_far_rows(name, kernel):
    rows, test = X[:, :1], X_TEST[:, :1]
    model = fit(name, rows, Y, kernel=kernel * RBF(5.0) + 0.1 * kernel)
    alone = moments(name, model, test)
    for value in (1e6, 1e10):
        together = moments(name, model, np.concatenate([far_rows(value)[:, :1], test]))
        assert np.isfinite(together).all()
        np.testing.assert_allclose(together[3:], alone, rtol=1e-6, atol=1e-8)


@every_route
def test_one_far_training_row_leaves_the_others_their_predictions(name, params):
    if params.get("solver") == "sgd":
        pytest.skip("its minibatches are drawn among all rows")
    here = moments(name, fitted(name, *params.items()), X_TEST)
    # The target of the row is the mean, so that it does not move the standardisation.
    targets = np.append(Y, Y.mean() if name.endswith("Regressor") else 1.0)
    model = fit(name, np.concatenate([X, np.full((1, 3), 1e10)]), targets, **params)
    there = moments(name, model, X_TEST)
    # Inducing points are others: what few of them predict moves by a part of the mean.
    moved = np.sqrt(np.mean((there[..., 0] - here[..., 0]) ** 2))
    assert moved < 0.2 * np.abs(here[..., 0]).max()
    assert (there[..., 1] < 2.5 * here[..., 1] + 0.05).all()


@pytest.mark.parametrize(
    "name", slow(OWN, but=[name for name in OWN if not name.startswith("StateSpace")])
)
def test_a_default_fit_stands_one_far_training_row(name):
    X_far = np.concatenate([X, np.full((1, 3), 1e9)])
    y = np.append(Y, Y.mean() if name.endswith("Regressor") else 1.0)
    model = getattr(skgp, name)(random_state=0)
    target = (y > 0).astype(int) if name.endswith("Classifier") else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(shorten(name, X_far), target)
    mean = model.latent_mean_and_variance(shorten(name, X))[0]
    assert np.corrcoef(mean, F)[0, 1] > (0.7 if name.startswith("StateSpace") else 0.9)


@pytest.mark.parametrize("name", OWN)
def test_inputs_too_large_to_be_squared_are_named(name):
    X_far = X.copy()
    X_far[17, 0] = -1e300
    with pytest.raises(ValueError, match=r"X .* must lie between .* -1e\+300 in row 17, column 0"):
        fit(name, X_far, Y)


@pytest.mark.parametrize("name", [name for name in OWN if name.endswith("Regressor")])
def test_targets_of_any_size_are_fitted_or_refused(name):
    inputs = shorten(name, X)
    expected = fitted(name).predict(inputs, return_std=True)
    tiny = 2.0**-996  # a power of two rounds nothing, which samplers would make much of
    found = fit(name, X, tiny * Y).predict(inputs, return_std=True)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a / tiny, b, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"y must lie between .* in row \d+\. Drop the row"):
        fit(name, X, 1e200 * Y)


def test_a_kernel_that_grows_refuses_predictions_it_cannot_square():
    model = fit("QSGPRegressor", X, Y, kernel=DotProduct())
    assert np.isfinite(moments("QSGPRegressor", model, far_rows(1e80))).all()
    with pytest.raises(ValueError, match="X .* must lie"):
        model.predict(far_rows(1e300))


@covering(name=[name for name in NAMES if name != "BayesianGPRegressor"], scale=[1e-12, 1e12])
def test_units_of_a_column_change_no_prediction(name, scale):
    units = np.array([scale, 1.0, 1.0 / scale])
    offset = np.array([0.0, 0.0, 1.0 / scale])
    kernels = [Matern(1.5 * u, nu=1.5) for u in (1.0, shorten(name, units[None])[0])]
    expected = moments(name, fit(name, X, Y, kernel=kernels[0]), X_TEST)
    model = fit(name, X * units + offset, Y, kernel=kernels[1])
    found = moments(name, model, X_TEST * units + offset)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", slow(NAMES, but=set(NAMES) - {"DLMGPClassifier", "SWSGPClassifier"})
)
def test_offsets_and_constant_columns_change_no_default_fit(name):
    rows = (X * 2**10).round() / 2**10  # exact after the offset
    moved = rows + 2.0**30
    if not name.startswith("StateSpace"):
        rows, moved = (np.column_stack([A, np.full(60, c)]) for A, c in ((rows, 0), (moved, 1e9)))
    y = (Y > 0).astype(int) if name.endswith("Classifier") else Y
    found = []
    for A in (rows, moved):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(skgp, name)(random_state=0).fit(shorten(name, A), y)
        found.append(model.latent_mean_and_variance(shorten(name, A))[0])
    assert np.abs(found[1] - found[0]).max() < 0.1 * np.std(found[0])
    if name in OWN:
        assert np.corrcoef(found[0], F)[0, 1] > (0.7 if name.startswith("StateSpace") else 0.9)
