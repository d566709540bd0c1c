"""Powers of the columns that a kernel sees: which, when they are taken, what they change."""

import numpy as np
import pytest
from scipy.stats import yeojohnson, yeojohnson_llf
from sklearn.gaussian_process.kernels import RBF

import skgp
from skgp.estimators._warping import choose_warp, learn_warp, powers_are_likelier
from tests.same import assert_same

CLASSIFIERS = ["QSGPClassifier", "SWSGPClassifier", "VecchiaGPClassifier", "DLMGPClassifier"]
REGRESSORS = [name.replace("Classifier", "Regressor") for name in CLASSIFIERS]
REGRESSORS += ["BayesianGPRegressor"]


def long_tails(n, seed=0):
    """X (n, 2) of log-normal columns and y (n,), a function of their logarithms."""
    rng = np.random.default_rng(seed)
    U = rng.standard_normal((n, 2))
    y = np.sin(2 * U[:, 0]) + 0.5 * U[:, 1] + 0.1 * rng.standard_normal(n)
    return np.exp(1.5 * U), y


def fitted(name, X, y, **parameters):
    y = y if "Regressor" in name else (y > np.median(y)).astype(int)
    return getattr(skgp, name)(random_state=0, optimizer=None, **parameters).fit(X, y), y


@pytest.fixture(scope="module")
def columns():
    """Rows (200, 5): tails to the right and left, both, none, and a constant."""
    rng = np.random.default_rng(0)
    tail = rng.exponential(size=200) ** 2
    heavy, even = rng.standard_t(4, 200), rng.uniform(size=200)
    return np.column_stack([1e6 * tail, 3 - tail, heavy, even, np.full(200, 0.1) + 1e-17 * even])


def test_powers_are_the_likeliest_of_yeo_and_johnson(columns):
    warp = learn_warp(columns)
    U = (columns - np.median(columns, axis=0)) / warp.unit
    for j in (0, 1, 3):
        likelihood = [yeojohnson_llf(power, U[:, j]) for power in np.linspace(0, 2, 21)]
        assert warp.powers[1, j] == pytest.approx(0.1 * np.argmax(likelihood))
        expected = yeojohnson(U[:, j], warp.powers[1, j])
        np.testing.assert_allclose(warp(columns)[:, j], expected / expected.std(), rtol=1e-12)
    assert warp.powers[0, :4] == pytest.approx([2, 0, warp.powers[1, 2], 2 - warp.powers[1, 3]])
    assert abs(warp.powers[1, 3] - 1) < 0.25
    assert (np.abs(warp(columns)[:, 4]) < 1e-12).all()  # it is constant but for rounding


def test_two_tails_have_one_power(columns):
    warp = learn_warp(columns)
    u = (columns[:, 2] - np.median(columns[:, 2])) / warp.unit[2]

    def log_likelihood(power):  # of John and Draper's transformation, which is monotone
        z = np.sign(u) * ((1 + np.abs(u)) ** power - 1) / power
        slopes = (1 + np.abs(u)) ** (power - 1)
        return np.log(slopes / z.std()).mean(), z / z.std()

    powers = np.linspace(0.1, 0.9, 9)
    best = powers[np.argmax([log_likelihood(power)[0] for power in powers])]
    assert warp.powers[:, 2] == pytest.approx([best, best])
    np.testing.assert_allclose(warp(columns)[:, 2], log_likelihood(best)[1], rtol=1e-9)


@pytest.mark.parametrize("scale, shift", [(1e-9, 0.0), (-1e5, 0.0), (3.0, 50.0)])
def test_units_of_a_column_do_not_matter(columns, scale, shift):
    moved = scale * columns + shift
    expected = np.sign(scale) * learn_warp(columns)(columns)
    np.testing.assert_allclose(learn_warp(moved)(moved), expected, atol=1e-9)


def test_slopes_are_those_of_the_powers(columns):
    warp, step = learn_warp(columns), 1e-6
    rows = columns[:50] + 0.01 * warp.unit
    difference = warp(rows + step * warp.unit) - warp(rows - step * warp.unit)
    slopes = warp.slopes(warp(rows)) * warp.unit
    np.testing.assert_allclose(slopes, difference / (2 * step), rtol=1e-6)


def test_powers_are_chosen_where_neighbours_predict_better():
    X, y = long_tails(150)
    assert choose_warp(X, y).powers.tolist() == [[2, 2], [0, 0]]
    tail = np.random.default_rng(0).exponential(size=(150, 2))
    assert choose_warp(tail, np.sin(tail[:, 0])) is None  # in the units of the column
    uniform = np.random.default_rng(1).uniform(size=(150, 2))
    assert choose_warp(uniform, np.sin(6 * uniform[:, 0])) is None
    assert choose_warp(X[:20], y[:20]) is None


def test_powers_are_not_taken_where_noise_grows_along_the_tail():
    X, y = long_tails(200)
    warp = learn_warp(X)
    assert powers_are_likelier(warp, X, y) and powers_are_likelier(warp, X, np.c_[y, y])
    noisy = y + 0.1 * X[:, 0] * np.random.default_rng(0).standard_normal(200)
    assert choose_warp(X, noisy) is not None
    assert not powers_are_likelier(warp, X, noisy)
    assert fitted("QSGPRegressor", X, noisy)[0].input_powers_ is None


def test_copies_of_rows_do_not_speak_for_powers():
    rng = np.random.default_rng(0)
    X, y = rng.exponential(size=(100, 3)), rng.standard_normal(100)
    assert choose_warp(X, y) is None
    assert choose_warp(np.tile(X, (4, 1)), np.tile(y, 4)) is None


@pytest.mark.parametrize("name", REGRESSORS + CLASSIFIERS)
def test_a_warped_fit_is_one_to_the_powers(name):
    X, y = long_tails(80)
    model, y = fitted(name, X[:60], y[:60])
    warp = learn_warp(X[:60])
    assert_same(model.input_powers_, warp.powers)
    other, _ = fitted(name, warp(X[:60]), y, warp_inputs=False)
    assert other.input_powers_ is None
    new, seen = X[60:], warp(X[60:])
    methods = ["latent_mean_and_variance", "predict"]
    methods += ["predict_proba"] if name in CLASSIFIERS else ["sample_f", "sample_y"]
    for method in methods:
        found, expected = (getattr(m, method)(Z) for m, Z in ((model, new), (other, seen)))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    target = y[:20]
    np.testing.assert_allclose(
        model.log_predictive_density(new, target), other.log_predictive_density(seen, target)
    )


@pytest.mark.parametrize("name", REGRESSORS + CLASSIFIERS)
def test_far_off_f_is_the_prior_whose_powers_overflow(name):
    X, y = long_tails(60)
    model, _ = fitted(name, X, y)
    mean, var = model.latent_mean_and_variance(
        [[-1e80, 1], [-1e300, 1], [1e300, 1], [1e300, -1e300]]
    )
    assert np.isfinite(mean).all()
    np.testing.assert_allclose(var, var[0], rtol=1e-6)
    assert (var > model.latent_mean_and_variance(X)[1].max()).all()


@pytest.mark.parametrize("name", REGRESSORS)
def test_gradients_are_in_the_columns_as_given(name):
    X, y = long_tails(63)
    model, _ = fitted(name, X[:60], y[:60])
    asked = {"return_std": True, "return_mean_grad": True, "return_std_grad": True}
    slopes = model.predict(X[60:], **asked)[2:]
    for j in range(2):
        step = 1e-5 * X[60:, j]
        ends = [X[60:] + sign * np.outer(step, np.eye(2)[j]) for sign in (1, -1)]
        high, low = (model.predict(end, return_std=True) for end in ends)
        for slope, above, below in zip(slopes, high, low, strict=True):
            np.testing.assert_allclose(slope[:, j], (above - below) / (2 * step), rtol=1e-4)


def test_powers_are_taken_when_asked_for():
    X, y = long_tails(60)
    assert not hasattr(skgp.QSGPRegressor(), "input_powers_")
    assert fitted("QSGPRegressor", X, y, kernel=RBF())[0].input_powers_ is None
    given = fitted("QSGPRegressor", X, y, kernel=RBF(), warp_inputs=True)[0]
    assert given.input_powers_.tolist() == [[2, 2], [0, 0]]
    stream = skgp.SWSGPRegressor(n_inducing=20, optimizer=None, warp_inputs=True, random_state=0)
    stream.partial_fit(X[:30], y[:30]).partial_fit(X[30:], y[30:])
    assert_same(stream.input_powers_, learn_warp(X[:30]).powers)
    assert stream.score(X, y) > 0.8


@pytest.mark.parametrize("asked", ["auto", True])
def test_powers_that_are_asked_for_need_all_rows_in_memory(asked):
    X, y = long_tails(4000)
    settings = {"basis": "fourier", "n_basis": 20, "solver": "cholesky", "memory_budget": 3e5}
    model, _ = fitted("QSGPRegressor", X, y, warp_inputs=asked, **settings)
    assert (model.input_powers_ is None) == (model.reason_ == "rows in blocks") == (asked == "auto")


def test_observations_beyond_a_fit_are_warped_as_before():
    X, y = long_tails(200)
    model = skgp.SWSGPRegressor(random_state=0, optimizer=None, n_inducing=40)
    model.fit(X[:100], y[:100])
    powers, before = model.input_powers_, model.score(X[100:], y[100:])
    model.partial_fit(X[100:], y[100:])
    assert_same(model.input_powers_, powers)
    assert model.score(X[100:], y[100:]) > before


def test_a_warm_start_keeps_the_powers():
    X, y = long_tails(150)
    model = skgp.SWSGPRegressor(random_state=0, warm_start=True, n_inducing=30, optimizer=None).fit(
        X, y
    )
    uniform = np.random.default_rng(0).uniform(1, 2, X.shape)
    assert_same(model.fit(uniform, y).input_powers_, np.array([[2.0, 2.0], [0.0, 0.0]]))
    assert model.set_params(warm_start=False).fit(uniform, y).input_powers_ is None
