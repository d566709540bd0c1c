"""Length scales of a kernel given are where a search starts, not what it finds."""

import numpy as np
import pytest
from scipy.special import expit, rel_entr
from sklearn.datasets import load_breast_cancer, load_digits, make_moons
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler

import skgp
from tests.covering import covering, slow, slow_case

CLASSIFIERS = ["QSGPClassifier", "DLMGPClassifier", "SWSGPClassifier", "StateSpaceGPClassifier"]
REGRESSORS = [name.replace("Classifier", "Regressor") for name in CLASSIFIERS]
COUNTS = REGRESSORS[1:]


@covering(name=CLASSIFIERS, length_scale=[0.01, 1000.0])
def test_classes_are_found_from_any_length_scale(name, length_scale):
    X, y = make_moons(150, noise=0.2, random_state=0)
    model = getattr(skgp, name)(1.0 * RBF(length_scale), random_state=0).fit(X, y)
    X_new, y_new = make_moons(300, noise=0.2, random_state=1)
    assert log_loss(y_new, model.predict_proba(X_new)) < 0.2  # 0.69 of a fair coin


@pytest.mark.parametrize("name", slow(CLASSIFIERS[:3], but=CLASSIFIERS[:2]))
def test_a_quick_oscillation_beside_a_trend_is_found_of_labels(name, rng):
    X = rng.uniform(-1, 1, size=(1200, 2))
    p = expit(3 * X[:, 0] + 2 * X[:, 1] + 4 * np.sin(10 * np.pi * X[:, 0]))
    y = rng.uniform(size=200) < p[:200]
    found = getattr(skgp, name)(random_state=0).fit(X[:200], y).predict_proba(X[200:])
    # The excess over the entropy of the labels is .33 of the trend alone.
    assert rel_entr(np.c_[1 - p, p][200:], found).sum(1).mean() < 0.18


@covering(name=[*CLASSIFIERS[:3], "VecchiaGPClassifier", "QSGPRegressor"], code=[-999.0, 1e6])
def test_codes_for_missing_numbers_do_not_hide_the_others(name, code, rng):
    X = rng.standard_normal((800, 4))
    f = 2 * np.sin(2 * X[:, 0]) + X[:, 1]
    X[:, :2][rng.uniform(size=(800, 2)) < 0.1] = code
    y = f + rng.logistic(scale=0.3, size=800)
    y = y if name == "QSGPRegressor" else y > 0
    model = getattr(skgp, name)(random_state=0).fit(X[:300], y[:300])
    loss = -model.log_predictive_density(X[300:], y[300:]).mean()
    assert loss < (1.3 if name == "QSGPRegressor" else 0.35)


def test_many_levels_of_a_category_do_not_hide_a_function_of_labels(rng):
    level, x = rng.integers(0, 30, 1300), rng.standard_normal((1300, 2))
    f = 3 * rng.standard_normal(30)[level] + 2 * np.sin(2 * x[:, 0])
    X, y = np.c_[np.eye(30)[level], x], rng.uniform(size=1300) < expit(f)
    model = skgp.QSGPClassifier(random_state=0).fit(X[:300], y[:300])
    assert -model.log_predictive_density(X[300:], y[300:]).mean() < 0.46  # .49 without the sine


@covering(name=COUNTS, length_scale=[0.01, 1000.0])
def test_rates_of_counts_are_found_from_any_length_scale(name, length_scale, rng):
    X = rng.uniform(-2, 2, size=(150, 2))
    rate = np.exp(1 + np.sin(2 * X[:, 0]) + 0.5 * X[:, 1])
    model = getattr(skgp, name)(1.0 * RBF(length_scale), likelihood="poisson", random_state=0)
    error = model.fit(X, rng.poisson(rate)).predict(X) - rate
    assert np.sqrt(np.mean(error**2)) < 0.3 * rate.std()


@pytest.mark.parametrize("likelihood", ["gaussian", slow_case("student_t")])
def test_few_inducing_points_find_the_length_scale(likelihood, rng):
    X = rng.uniform(-3, 3, size=(100, 1))
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(100)
    kernel = 1.0 * RBF(300.0) + WhiteKernel(0.05)
    model = skgp.DLMGPRegressor(kernel, likelihood=likelihood, n_inducing=30, random_state=0)
    assert np.std(model.fit(X, y).predict(X) - np.sin(2 * X[:, 0])) < 0.2


@pytest.mark.parametrize(
    "likelihood", slow(["poisson", "student_t", "labels"], but=["poisson", "labels"])
)
def test_series_find_the_length_scale(likelihood, rng):
    x = np.sort(rng.uniform(0, 6, 60))[:, None]
    f = np.sin(3 * x[:, 0])
    kernel = 1.0 * RBF(100.0)
    if likelihood == "labels":
        y = f + 0.5 * rng.standard_normal(60) > 0
        model = skgp.StateSpaceGPClassifier(kernel).fit(x, y)
        assert log_loss(y, model.predict_proba(x)) < 0.45
        return
    y = rng.poisson(np.exp(1 + f)) if likelihood == "poisson" else f + 0.2 * rng.standard_t(3, 60)
    model = skgp.StateSpaceGPRegressor(kernel, likelihood=likelihood).fit(x, y)
    truth = np.exp(1 + f) if likelihood == "poisson" else f
    assert np.std(model.predict(x) - truth) < 0.4 * truth.std()


@pytest.mark.parametrize(("seed", "load"), [(0, load_breast_cancer), slow_case(1, load_digits)])
def test_few_labels_of_many_columns_have_scales_of_their_own_where_the_prior_allows(seed, load):
    X, y = load(return_X_y=True)
    if load is load_digits:
        X, y = (array[np.isin(y, (3, 8))] for array in (X, y))
    rows = np.random.default_rng(seed).permutation(len(y))
    X, y = StandardScaler().fit_transform(X)[rows], y[rows]
    model = skgp.QSGPClassifier(random_state=0).fit(X[:100], y[:100])
    assert log_loss(y[100:], model.predict_proba(X[100:])) < 0.12
