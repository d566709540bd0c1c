"""VecchiaGPClassifier: the contracts, dense limits, several classes, weights, model selection."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_moons
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, WhiteKernel
from sklearn.utils import shuffle

from skgp import (
    GaussianProcessClassifier,
    QSGPClassifier,
    SWSGPClassifier,
    VecchiaGPClassifier,
    VecchiaGPRegressor,
)
from skgp.data import Data
from skgp.inference.defaults import LATENT_JITTER
from skgp.learning.defaults import COUPLINGS, FEW_ROWS_MODERATION, MODERATIONS
from skgp.likelihoods import Bernoulli
from skgp.models import vecchia as model_of
from skgp.models.vecchia import left_out
from tests.contracts.classifiers import ClassifierContract
from tests.covering import slow_case
from tests.inference.vecchia.test_vecchia_laplace import OFFSET, conditionals, mode_of, problem
from tests.learning.test_calibration import drawn
from tests.reference import gaussian, vecchia

KERNEL = 4.0 * Matern([0.4, 0.7], nu=1.5)
FIXED = {"optimizer": None, "random_state": 0}


class TestContract(ClassifierContract):
    offers_state = False

    def make(self, **params):
        params.pop("dtype", None)  # float64 is all there is
        return VecchiaGPClassifier(**{"random_state": 0, **params})


def labels(n=60, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 2))
    return X, np.where(np.sin(6 * X[:, 0]) + 0.5 * rng.standard_normal(n) > 0, 1, -1)


def halves(X, y):
    """As many rows of each class, so that the prior mean is 0."""
    size = min((y > 0).sum(), (y < 0).sum())
    rows = np.r_[np.flatnonzero(y > 0)[:size], np.flatnonzero(y < 0)[:size]]
    return X[rows], y[rows]


@pytest.mark.parametrize("sizes", [{"n_neighbors": 1000, "n_inducing": 0}, {"n_neighbors": 3}])
def test_all_neighbors_or_inducing_points_are_the_dense_classifier(sizes):
    X, y = halves(*labels())
    model = VecchiaGPClassifier(KERNEL, **sizes, **FIXED).fit(X, y)
    if "n_inducing" not in sizes:  # all are inducing points, which leave nothing to neighbours
        assert model._posterior.group.shape[1] == 1
    jitter = WhiteKernel(LATENT_JITTER, "fixed")
    exact = GaussianProcessClassifier(KERNEL + jitter, optimizer=None).fit(X, y)
    assert model.log_marginal_likelihood_value_ == pytest.approx(
        exact.log_marginal_likelihood_value_, abs=1e-8
    )
    x = np.vstack([X[:4] + 0.05, [[3.0, 0.0], [1e6, 1e6]]])
    mean, var = exact.latent_mean_and_variance(x)
    found = model.latent_mean_and_variance(x)
    np.testing.assert_allclose(found[0], mean, atol=1e-7)
    np.testing.assert_allclose(found[1], var - LATENT_JITTER, atol=1e-7)


def test_left_out_moments_are_those_without_the_site():
    _, sets, _ = conditionals(4, 0)
    X, y, weight = problem()
    mode = mode_of(conditionals(4, 0)[0])
    mean, var = left_out(mode, torch.from_numpy(X))
    Q, R = vecchia.parts(KERNEL, X, None)
    C = vecchia.covariance(Q, R + LATENT_JITTER * np.eye(len(X)), sets)
    W = mode.curvature.numpy()
    slope = mode.problem.slope(mode.latent).numpy()
    for j in range(2):
        numbers = (mode.latent - OFFSET).numpy()[:, j] + slope[:, j] / W[:, j]  # of Gaussian sites
        for i in range(0, len(X), 7):
            expected = gaussian.left_out(C, 1 / W[:, j], numbers, i)
            found = mean[i, j] - float(OFFSET[j]), var[i, j]
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_moderation_and_coupling_are_those_that_drew_the_labels_together(monkeypatch):
    """Without the coupling all of the variance is too much: chosen first, it would be a quarter."""
    rng = np.random.default_rng(0)
    mean, var = rng.normal(0.0, 2.0, (4_000, 4)), rng.uniform(0.1, 10.0, (4_000, 4))
    Y = drawn(rng, mean, var, moderation=1.0, coupling=1.0)
    rows = SimpleNamespace(Y=Y, row_weight=torch.ones_like(Y))
    mode = SimpleNamespace(weights=Y, problem=rows, likelihood=Bernoulli("probit"))
    moments = torch.from_numpy(mean), torch.from_numpy(var)
    monkeypatch.setattr(model_of, "VECCHIA_LEFT_OUT", 10_000)
    monkeypatch.setattr(model_of, "left_out", lambda mode, X: moments)
    told = SimpleNamespace(data=Data(Y, Y)), mode, KERNEL, torch.Generator()
    assert model_of.calibrated(*told) == (1.0, 1.0)
    # Where variances are of no effect what is taken without data stays.
    moments[1].mul_(1e-9)
    assert model_of.calibrated(*told)[0] == FEW_ROWS_MODERATION


def test_draws_stand_for_the_covariance_of_many_rows(monkeypatch):
    X, y = labels(400)
    model = VecchiaGPClassifier(KERNEL, n_neighbors=8, n_inducing=5, **FIXED)
    exact = clone(model).fit(X, y)
    monkeypatch.setattr("skgp.inference.vecchia.hessian.LATENT_DENSE", 0)
    x = np.random.default_rng(1).random((300, 2))
    mean, var = exact.latent_mean_and_variance(x)
    mode_alone = clone(model).fit(X, y)  # predictions by a dense factor at its mode
    np.testing.assert_allclose(mode_alone.latent_mean_and_variance(x)[1], var, rtol=1e-4)
    monkeypatch.setattr("skgp.inference.defaults.LATENT_CUBES", 0)
    drawn = model.fit(X, y)
    found = drawn.latent_mean_and_variance(x)
    np.testing.assert_allclose(found[0], mean, atol=1e-5)
    assert abs(np.mean(found[1] / var) - 1) < 0.15
    assert np.std(found[1] / var) < 0.35  # (2 / 50)^1/2 = 0.2
    evidences = [each.log_marginal_likelihood_value_ for each in (exact, drawn)]
    assert abs(evidences[0] - evidences[1]) < 3
    assert exact.moderation_ == drawn.moderation_


def test_predictions_are_continuous():
    X, y = labels(300)
    model = VecchiaGPClassifier(KERNEL, n_neighbors=5, n_inducing=10, **FIXED).fit(X, y)
    line = np.column_stack([np.linspace(0, 1, 4001), np.full(4001, 0.4)])
    steps = np.abs(np.diff(model.decision_function(line)))
    assert steps.max() < 20 * np.median(steps)


def test_five_classes():
    X, y = shuffle(*load_digits(n_class=5, return_X_y=True), random_state=0)
    model = VecchiaGPClassifier(400.0 * RBF(30.0), **FIXED).fit(X[:300], y[:300])
    assert model.score(X[300:600], y[300:600]) > 0.93
    assert -model.log_predictive_density(X[300:600], y[300:600]).mean() < 0.3
    assert model.coupling_ in COUPLINGS and model.moderation_ in MODERATIONS
    mean, var = model.latent_mean_and_variance(X[:5])
    assert mean.shape == var.shape == (5, 5)
    # The inputs, draws there and of u.
    assert len(pickle.dumps(model)) < 8 * 300 * (64 + 5 * 55) + 2_500_000


def classes_of_two_columns(rng, n):
    X = rng.standard_normal((n, 60))
    return X, X[:, 0] + np.sin(2 * X[:, 1]) > 0


def parities_of_pixels(rng, n):
    X, y = load_digits(return_X_y=True)
    return X[:n], y[:n] % 2


@pytest.mark.parametrize(
    ("model", "make"),
    [
        slow_case(VecchiaGPClassifier(n_inducing=50, random_state=0), parities_of_pixels),
        (QSGPClassifier(random_state=0), parities_of_pixels),
        slow_case(QSGPClassifier(random_state=0), classes_of_two_columns),
        slow_case(
            SWSGPClassifier(n_inducing=100, n_neighbors=16, max_iter=20, random_state=0),
            parities_of_pixels,
        ),
    ],
)
def test_many_columns_are_projected_unless_labels_held_out_lose(model, make):
    components = make is parities_of_pixels
    X, y = make(np.random.default_rng(0), 520)
    model = clone(model).fit(X[:120], y[:120])
    assert (np.size(model.kernel_.k2.length_scale) == 1) == components
    assert (model._projection is not None) == components
    given = clone(model).set_params(projection=None).fit(X[:120], y[:120])
    losses = [-each.log_predictive_density(X[120:], y[120:]) for each in (model, given)]
    worse = losses[0] - losses[1]
    assert worse.mean() < 2 * worse.std() / np.sqrt(len(worse)) + 0.01
    if components:
        np.testing.assert_allclose(
            model.predict_proba(X[:1]), model.predict_proba(X[:5])[:1], rtol=1e-12
        )


@pytest.mark.slow
def test_few_pixels_are_told_apart_by_labels_left_out():
    X, y = load_digits(return_X_y=True)
    y = y % 2
    model = VecchiaGPClassifier(random_state=0).fit(X[:200], y[:200])
    density = model.log_predictive_density(X[200:], y[200:]).mean()
    assert density > -0.26  # by the evidence alone: -0.293


def test_search_raises_the_evidence(monkeypatch):
    monkeypatch.setattr("skgp.learning.search.SearchSettings.exact_rows", 200)
    X, y = make_moons(400, noise=0.3, random_state=0)
    start = 4.0 * RBF([3.0, 3.0])
    sizes = {"n_neighbors": 8, "n_inducing": 20}
    settings = {**sizes, "max_iter": 4, "batch_size": 250, "random_state": 0}
    kept = VecchiaGPClassifier(start, **sizes, **FIXED).fit(X, y)
    model = VecchiaGPClassifier(start, **settings).fit(X, y)
    gain = model.log_marginal_likelihood_value_ - kept.log_marginal_likelihood_value_
    assert gain > 20 and len(model.history_["hyperparameters"]) > 3
    assert model.history_["solve"][-1] <= model.history_["solve"][0]


@pytest.mark.parametrize("scale", [1e9, 1e12])
@pytest.mark.parametrize("n_inducing", [7, 20])
def test_variances_far_above_the_jitter_leave_a_residual(scale, n_inducing):
    X = scale * np.random.default_rng(0).standard_normal((20, 2))
    y = (X[:, 0] > 0).astype(int)
    kernel, settings = DotProduct() + RBF(), {"n_inducing": n_inducing, **FIXED}
    model = VecchiaGPClassifier(kernel, **settings).fit(X, y)
    assert model.score(X, y) > 0.7
    assert np.isfinite(model.predict_log_proba(X)).all()
    quantity = VecchiaGPRegressor(kernel + WhiteKernel(), **settings).fit(X, X[:, 0] / scale)
    assert quantity.score(X, X[:, 0] / scale) > 0.9


@pytest.mark.parametrize("kernel", [None, KERNEL])
@pytest.mark.parametrize(
    ("n", "few", "default"),
    [(60, 3, (False, 1.0)), (60, 20, (True, 2.0)), (240, 100, (True, np.inf))],
)
@pytest.mark.parametrize(
    ("make", "module"),
    [
        (VecchiaGPClassifier, "learning.vecchia_labels"),
        (QSGPClassifier, "estimators._qsgp_classifier_fitting"),
    ],
)
def test_default_kernels_are_held_to_their_start_where_labels_are_few(
    make, module, n, few, default, kernel, monkeypatch
):
    """More so where they are rare, which elsewhere are left out; kernels given do neither."""
    asked = []

    class Asked(Exception):
        pass

    def search(*_, settings, **__):
        asked.append((settings.rescales, settings.scale_std))
        raise Asked

    monkeypatch.setattr(f"skgp.{module}.fit_classification_hyperparameters", search)
    X, y = labels(n)[0], np.arange(n) < few
    with pytest.raises(Asked):
        make(kernel, random_state=0).fit(X, y)
    assert asked == [default if kernel is None else (False, np.inf)]
