"""Data that say little: one input, a few rows, one class, more columns than points."""

import warnings

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

import skgp
from skgp.learning.posterior import defaults
from tests.contracts.catalogue import streaming
from tests.covering import covering

REGRESSORS = [
    skgp.QSGPRegressor,
    skgp.DLMGPRegressor,
    skgp.SWSGPRegressor,
    skgp.StateSpaceGPRegressor,
    skgp.BayesianGPRegressor,
    skgp.VecchiaGPRegressor,
]
CLASSIFIERS = [
    skgp.QSGPClassifier,
    skgp.DLMGPClassifier,
    skgp.SWSGPClassifier,
    skgp.StateSpaceGPClassifier,
]
#: What takes few rows in another way than the default does.
ROUTES = [
    (skgp.DLMGPRegressor, {"objective": "fitc"}),
    (skgp.DLMGPRegressor, {"likelihood": "poisson", "beta": "auto"}),
    (skgp.DLMGPRegressor, {"likelihood": "poisson", "link": "softplus"}),
    (skgp.DLMGPClassifier, {"beta": "auto", "early_stopping": True}),
    (skgp.DLMGPClassifier, {"objective": "elbo"}),
    (skgp.SWSGPRegressor, {"likelihood": "student_t"}),
    (skgp.SWSGPRegressor, {"likelihood": "poisson"}),
    (skgp.SWSGPRegressor, {"inducing": "learned"}),
    (skgp.SWSGPRegressor, {"solver": "adam", "covariance": "full"}),
    *(
        (estimator, params)
        for estimator in (skgp.SWSGPRegressor, skgp.SWSGPClassifier)
        for params in ({}, {"covariance": "full"})  # nothing is polished of few rows
    ),
    *(
        (skgp.StateSpaceGPRegressor, {"likelihood": likelihood, "n_inducing": n_inducing})
        for likelihood in ("gaussian", "student_t", "poisson")
        for n_inducing in (None, 4, "auto")
    ),
    *(
        (skgp.StateSpaceGPClassifier, {"n_inducing": n_inducing})
        for n_inducing in (None, 4, "auto")
    ),
    *(
        (skgp.VecchiaGPRegressor, {"likelihood": likelihood, "link": link, "n_neighbors": 3})
        for likelihood, link in (("student_t", "exp"), ("poisson", "softplus"))
    ),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@covering(route=ROUTES, n=["least", 5])
def test_a_few_rows(route, n):
    estimator, params = route
    n = n if n == 5 else 1 + (estimator in CLASSIFIERS)
    X, y = np.arange(n)[:, None] ** 1.5, np.arange(n) % 3
    X_new = np.vstack([X, [[-1e4], [1e4]]])
    model = estimator(**{"max_iter": 4, **params})
    if estimator in REGRESSORS:
        mean, std = model.fit(X, y).predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()
    else:
        y = np.array(["a", "b", "c"])[y]
        proba = model.fit(X, y).predict_proba(X_new)
        assert np.isfinite(proba).all() and (proba.max(1) < 1).all()
        assert list(model.classes_) == sorted(set(y))


@pytest.mark.parametrize(
    ("estimator", "params"),
    [
        (skgp.QSGPRegressor, {"basis": "inducing"}),
        (skgp.QSGPRegressor, {"basis": "inducing", "likelihood": "laplace"}),
        (skgp.QSGPClassifier, {"basis": "inducing"}),
        (skgp.DLMGPRegressor, {}),
        (skgp.SWSGPRegressor, {}),
        (skgp.StateSpaceGPRegressor, {}),
        (skgp.StateSpaceGPClassifier, {}),
        (skgp.VecchiaGPRegressor, {}),
    ],
)
def test_more_points_than_rows_are_lowered_with_a_warning(estimator, params):
    X = np.arange(12)[:, None] / 2
    basis, repeats = ("n_basis", 1) if "basis" in params else ("n_inducing", 2)
    X, y = X.repeat(repeats, axis=0), np.sin(X[:, 0]).repeat(repeats)
    model = estimator(**{basis: 50, "optimizer": None, "random_state": 0, **params})
    message = f"{basis}=50 (is more than the 12 distinct rows|exceeds the 12 .*basis='fourier')"
    with pytest.warns(Warning, match=message) as caught:
        model.fit(X, y if estimator in REGRESSORS else y > 0)
    assert {each.filename for each in caught} == {__file__}  # the line that called fit
    assert getattr(model, "n_basis_", None) == 12 or len(model.inducing_points_) == 12


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_equal_inputs_have_the_spread_of_their_targets(estimator):
    """Replicates at one input alone tell the noise."""
    y = np.random.default_rng(0).standard_normal(100)
    X = np.ones((100, 2))
    _, std = estimator(random_state=0).fit(X, y).predict(X[:1], return_std=True)
    assert std[0] == pytest.approx(y.std(), rel=0.15)


@covering(
    name=["QSGPRegressor", "DLMGPRegressor", "VecchiaGPRegressor", "SWSGPRegressor"],
    scale=[1e3, 1e-4],
    centre=[0.0, 1e4],
)
def test_default_kernels_are_in_units_of_targets_that_are_not_standardised(
    name, scale, centre, rng
):
    X = rng.uniform(-3, 3, size=(260, 1))
    y = scale * (centre + np.sin(X[:, 0]) + 0.1 * rng.standard_normal(260))
    model = getattr(skgp, name)(normalize_y=False, random_state=0).fit(X[:60], y[:60])
    loss = -model.log_predictive_density(X[60:], y[60:]).mean() - np.log(scale)
    assert loss < -0.5  # -.88 of the noise alone


@pytest.mark.parametrize("value", [0.3, 0.1 + 0.2])
def test_equal_targets_have_the_units_of_their_size_whatever_their_mean_is_rounded_to(value):
    y = np.full(7, value)
    model = skgp.QSGPRegressor(normalize_y=False, random_state=0).fit(np.arange(7.0)[:, None], y)
    assert model.noise_variance_ > 1e-10


def test_equal_targets_far_from_zero_are_not_known_beyond_their_size():
    y = np.full(2, 1e12)
    model = skgp.BayesianGPRegressor(normalize_y=False, random_state=0).fit([[0.0], [1.0]], y)
    mean, std = model.predict([[0.0], [10.0]], return_std=True)
    assert (np.abs(mean - 1e12) < 2 * std).all()


@pytest.mark.parametrize("estimator", REGRESSORS)
def test_one_row_says_nothing_of_the_spread(estimator):
    """Its deviation from its own mean is 0, which is not to be taken for a law without noise."""
    model = estimator(random_state=0).fit([[1.0, 2.0]], [3.0])
    mean, std = model.predict([[1.0, 2.0], [9.0, 9.0]], return_std=True)
    assert mean == pytest.approx(3.0)
    assert (std > 0.1).all() and std[1] > 0.5


@pytest.mark.parametrize("estimator", CLASSIFIERS)
def test_stream_that_begins_with_one_class_learns_the_others(estimator):
    """The evidence of one class has no use for f, and its amplitude would be nought for good."""
    X = np.random.default_rng(1).standard_normal((80, 2))
    y = (X[:, 0] > 0).astype(int)
    first = np.flatnonzero(y)[:10]
    others = np.setdiff1d(np.arange(80), first)
    model = streaming(estimator)
    for rows in (first, others[:35], others[35:]):
        model.partial_fit(X[rows], y[rows], classes=[0, 1])
    assert model.score(X, y) > 0.8


@pytest.mark.slow
def test_more_length_scales_than_points_of_a_round(monkeypatch):
    """Covariances of fewer points than hyper-parameters are singular."""
    monkeypatch.setattr(defaults, "ROUND", 64)  # in 32 pairs
    rng = np.random.default_rng(0)
    X = rng.standard_normal((defaults.FEW + 5, 40))
    y = X[:, 0] + 0.1 * rng.standard_normal(len(X))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = skgp.BayesianGPRegressor(random_state=0, n_samples=128).fit(X, y)
    _, std = model.predict(X, return_std=True)
    assert np.isfinite(std).all() and (std > 0).all()
