"""Regressors of noise that depends on x: when they are, and what every prediction makes of it."""

import copy
import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, DotProduct, WhiteKernel

import skgp
from skgp.learning.noise_function import NoiseFunction
from tests.covering import slow_case
from tests.same import assert_same

REGRESSORS = [
    "QSGPRegressor",
    "SWSGPRegressor",
    "VecchiaGPRegressor",
    "DLMGPRegressor",
]


def noise_std(X):
    """Of the generated noise at rows X (n, d)."""
    return 0.02 * np.exp(3 * X[:, 0])


def problem(n=150, seed=0):
    """X (n, 2) in the unit square and y (n,), of which noise grows along the first column."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(n, 2))
    return X, 30 * (np.sin(6 * X[:, 0]) + X[:, 1] + noise_std(X) * rng.standard_normal(n))


@cache
def fitted(name, **params):
    """A model of the problem above; not to be changed."""
    return getattr(skgp, name)(random_state=0, **params).fit(*problem())


def constant(model):
    """The same with constant noise."""
    return fitted(type(model).__name__, heteroscedastic=False)


@pytest.fixture(scope="module", params=REGRESSORS)
def model(request):
    return fitted(request.param)


@pytest.fixture
def rows():
    return np.random.default_rng(1).uniform(-0.2, 1.2, size=(9, 2))


def test_noise_is_learned(model):
    X = np.random.default_rng(2).uniform(0.05, 0.95, size=(200, 2))
    ratio = np.sqrt(model.predict_noise_variance(X)) / (30 * noise_std(X))
    assert 0.6 < np.exp(np.log(ratio).mean()) < 1.5
    assert np.log(ratio).std() < 0.4  # that of constant noise is .8


def test_means_are_those_of_constant_noise_and_variances_of_f_times_a_function(model, rows):
    even = constant(model)
    mean, var = even.latent_mean_and_variance(rows)
    assert_same(model.latent_mean_and_variance(rows)[0], mean)
    assert_same(model.predict(rows), even.predict(rows))
    factors = model.latent_mean_and_variance(rows)[1] / var
    noise = model.predict_noise_variance(rows) / model.noise_variance_
    assert np.corrcoef(np.log(factors), np.log(noise))[0, 1] > 0.95
    assert (even.predict_noise_variance(rows) == even.noise_variance_).all()
    X, y = problem(400, seed=3)
    gain = model.log_predictive_density(X, y) - even.log_predictive_density(X, y)
    assert gain.mean() > 0.2


def mixture(model, rows):
    """Weights (k,), means (n,) and variances (n, k) of y, over a fine grid of values of g.

    The last component is that of gross errors.
    """
    function, scale = model._noise_function, model.y_scale_
    mean, var = constant(model).latent_mean_and_variance(rows)
    X = torch.from_numpy(rows)
    centre, spread = (each.numpy()[:, None] for each in function.moments(X))
    u = np.linspace(-8, 8, 2001)
    g = centre + np.sqrt(spread) * u
    noise = scale**2 * function.constant
    least = model.noise_variance_ - noise  # of an approximation
    power = function.exponent * np.minimum(1, scale**2 * function.reach / var)[:, None]
    variances = var[:, None] * np.exp(power * g) + noise * np.exp(g) + least
    weights, rate = norm.pdf(u) * (u[1] - u[0]), 0.5 / 151
    gross = (variances @ weights + scale**2)[:, None]
    return np.append((1 - rate) * weights, rate), mean, np.hstack([variances, gross])


def test_every_prediction_averages_over_the_variances_of_its_row(model, rows):
    mean, var = model.latent_mean_and_variance(rows)
    noise = model.predict_noise_variance(rows)
    assert noise.max() > 4 * noise.min()
    std = np.sqrt(var + noise)
    np.testing.assert_allclose(model.predict(rows, return_std=True), (mean, std), rtol=1e-9)
    weights, centre, variances = mixture(model, rows)
    without = variances[:, :-1] @ weights[:-1] / weights[:-1].sum()
    np.testing.assert_allclose(without, std**2, rtol=1e-3)
    levels = [0.03, 0.5, 0.9]
    for level, found in zip(levels, model.predict_quantiles(rows, levels).T, strict=True):
        below = norm.cdf((found - centre)[:, None] / np.sqrt(variances)) @ weights
        np.testing.assert_allclose(below, level, atol=1e-3)
    y = mean + std * np.linspace(-4, 4, 9)
    expected = norm.pdf((y - centre)[:, None], scale=np.sqrt(variances)) @ weights
    np.testing.assert_allclose(model.log_predictive_density(rows, y), np.log(expected), atol=0.02)
    _, joint = model.predict(rows, return_cov=True)
    covariance = model.latent_mean_and_covariance(rows)[1]
    np.testing.assert_allclose(covariance.diagonal(), var, rtol=1e-6)
    expected = covariance + np.diag(noise)
    np.testing.assert_allclose(joint, expected, rtol=1e-6, atol=1e-6 * expected.max())
    # Rows that come alone are predicted the same.
    np.testing.assert_allclose(model.predict_noise_variance(rows[:1]), noise[:1], rtol=1e-10)


def test_draws_are_of_the_same_distribution(model, rows):
    n = 20_000
    draws = model.sample_y(rows, n, random_state=0)
    for level in (0.05, 0.3, 0.95):
        below = (draws < model.predict_quantiles(rows, level)[:, None]).mean(axis=1)
        assert np.abs((below - level) / np.sqrt(level * (1 - level) / n)).max() < 4.5
    f = model.sample_f(rows, n, random_state=1)
    mean, covariance = model.latent_mean_and_covariance(rows)
    products = (f - mean[:, None])[:, None] * (f - mean[:, None])  # (9, 9, n)
    error = products.std(axis=2) / np.sqrt(n)
    assert np.abs((products.mean(axis=2) - covariance) / error).max() < 4.5


def test_scatter_is_of_single_observations_and_f_continuous(model, rows):
    """Draws of y are of the mixture with it; those of f have its mean, without jumps."""
    model = copy.copy(model)
    model._noise_function = replace(model._noise_function, scatter=1.0, shift=0.25, exponent=1.0)
    model._gross_error_rate = 0.0
    n = 20_000
    draws = model.sample_y(rows, n, random_state=0)
    for level in (0.01, 0.05, 0.3, 0.95):
        below = (draws < model.predict_quantiles(rows, level)[:, None]).mean(axis=1)
        assert np.abs((below - level) / np.sqrt(level * (1 - level) / n)).max() < 4.5
    var = model.latent_mean_and_variance(rows)[1]
    covariance = model.latent_mean_and_covariance(rows)[1]
    np.testing.assert_allclose(covariance.diagonal(), var, rtol=1e-6)
    pair = rows[0] + np.array([[0.0], [1e-5]])
    near = model.sample_f(pair, 200, random_state=0)
    assert np.abs(near[0] - near[1]).max() < 0.05 * near.std()


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_few_rows_have_it_where_it_is_asked_for(n):
    X, y = problem(n)
    model = skgp.QSGPRegressor(heteroscedastic=True, random_state=0).fit(X, y)
    assert not is_constant(model) and np.isfinite(model.predict_interval(X)).all()


def test_what_is_known_of_the_variances_is_asked_once_and_not_by_means(model, rows, monkeypatch):
    asked = []
    moments = NoiseFunction.moments
    monkeypatch.setattr(NoiseFunction, "moments", lambda *given: asked.append(1) or moments(*given))
    model.predict(rows)
    assert not asked
    for predict in (
        lambda: model.predict(rows, return_std=True),
        lambda: model.predict_interval(rows),
        lambda: model.log_predictive_density(rows, np.zeros(9)),
        lambda: model.predict(rows, return_std=True, return_std_grad=True),
        lambda: model.latent_mean_and_variance(rows),
        lambda: model.predict_noise_variance(rows),
    ):
        predict()
        assert len(asked) == 1
        asked.clear()


@pytest.mark.parametrize("draw", ["sample_y", "sample_f"])
def test_draws_at_more_rows_than_there_is_room_for_are_refused(draw):
    model = fitted("QSGPRegressor")
    many = np.broadcast_to([[0.5, 0.5]], (3_000_000, 2))
    with pytest.raises(MemoryError, match="Draw at fewer of them at once"):
        getattr(model, draw)(many)


def test_gradients_of_the_standard_deviation(model, rows):
    _, _, _, slopes = model.predict(
        rows, return_std=True, return_mean_grad=True, return_std_grad=True
    )
    for j, step in enumerate(1e-5 * np.eye(2)):
        ends = [model.predict(rows + s, return_std=True)[1] for s in (step, -step)]
        expected = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(slopes[:, j], expected, rtol=2e-4, atol=1e-4 * slopes.max())


def test_gradients_where_the_kernel_sees_powers(rows):
    X, y = problem()
    model = skgp.QSGPRegressor(random_state=0, warp_inputs=True, heteroscedastic=True)
    model.fit(np.exp(2 * X), y)
    rows = np.exp(2 * np.clip(rows, 0, 1))
    slopes = model.predict(rows, return_std=True, return_std_grad=True)[2]
    for j, step in enumerate(1e-5 * np.eye(2)):
        ends = [model.predict(rows + s, return_std=True)[1] for s in (step, -step)]
        expected = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(slopes[:, j], expected, rtol=2e-4, atol=1e-4 * slopes.max())


def test_a_pickle_predicts_the_same(model, rows):
    copy = pickle.loads(pickle.dumps(model))
    assert_same(copy.predict(rows, return_std=True), model.predict(rows, return_std=True))
    assert len(pickle.dumps(model._noise_function)) < 8 * 150 * 20  # and no matrix of 150 rows


def is_constant(model):
    return np.ptp(model.predict_noise_variance(np.linspace(0, 1, 20)[:, None] * [1.0, 1.0])) == 0


def test_what_asks_for_constant_noise():
    X, y = problem()
    given = RBF([0.3, 1.0]) + WhiteKernel(0.1)
    assert is_constant(skgp.QSGPRegressor(given, random_state=0).fit(X, y))
    assert is_constant(skgp.QSGPRegressor(random_state=0).fit(X[:99], y[:99]))
    assert is_constant(skgp.QSGPRegressor(random_state=0).fit(X, np.column_stack([y, -y])))
    assert is_constant(skgp.QSGPRegressor(n_basis=30, random_state=0).partial_fit(X, y))
    model = skgp.QSGPRegressor(given, heteroscedastic=True, random_state=0).fit(X, y)
    assert not is_constant(model)
    assert is_constant(model.set_params(heteroscedastic=False).fit(X, y))


@pytest.mark.parametrize(("n", "most"), [(150, 10), slow_case(300, 20)])
def test_rows_that_repeat_far_more_often_than_others_have_constant_noise(n, most):
    """Errors of distinct rows say little of the many copies of one in twenty."""
    X, y = problem(n)
    copies = np.where(np.arange(n) % 20 == 0, most, 1)
    for given in ((X, y, copies), (np.repeat(X, copies, axis=0), np.repeat(y, copies))):
        assert is_constant(skgp.QSGPRegressor(random_state=0).fit(*given))


def test_logs_are_an_alternative():
    """Noise that grows with the level of y is that of log y; where it is asked for, that of y."""
    X, _ = problem(seed=4)
    noise = np.random.default_rng(5).standard_normal(150)
    y = np.exp(3 * X[:, 0] + np.sin(5 * X[:, 1]) + 0.2 * noise)
    model = skgp.QSGPRegressor(random_state=0).fit(X, y)
    assert model.likelihood_ == "lognormal" and is_constant(model)
    model = skgp.QSGPRegressor(random_state=0, heteroscedastic=True).fit(X, y)
    assert model.likelihood_ == "gaussian" and not is_constant(model)


@cache
def of_logs():
    X, z = problem()
    return skgp.QSGPRegressor(likelihood="lognormal", random_state=0).fit(X, np.exp(0.1 * z))


def test_noise_of_logs_may_vary_too(rows):
    model = of_logs()
    mean, var = model.latent_mean_and_variance(rows)
    noise = model.predict_noise_variance(rows)
    assert noise.max() > 4 * noise.min()
    low, high = np.log(model.predict_interval(rows))
    np.testing.assert_allclose(low + high, 2 * mean, rtol=1e-6)
    assert np.corrcoef(high - low, np.sqrt(var + noise))[0, 1] > 0.99
    z = np.linspace(-40, 40, 2001)[:, None] * np.sqrt(var + noise)
    logs, many = mean + z, np.tile(rows, (2001, 1))
    density = model.log_predictive_density(many, np.exp(logs.ravel())).reshape(logs.shape) + logs
    total = np.exp(density).sum(axis=0) * (z[1] - z[0])
    np.testing.assert_allclose(total, 1, atol=1e-3)


def test_means_of_log_normal_targets_have_the_noise_there(rows):
    """E[y | f] = exp(f + noise / 2), of the noise at x: by constant noise it errs by its factor."""
    model = of_logs()
    log_mean, _ = model.latent_mean_and_variance(rows)
    expected = np.exp(log_mean + 0.5 * model.predict_noise_variance(rows))
    assert_same(model.predict(rows), expected)
    assert_same(model.predict(rows, return_cov=True)[0], expected)
    mean, _, slopes, _ = model.predict(rows, True, return_mean_grad=True, return_std_grad=True)
    assert_same(mean, expected)
    for column, step in enumerate(1e-5 * np.eye(2)):
        found = (model.predict(rows + step) - model.predict(rows - step)) / 2e-5
        np.testing.assert_allclose(slopes[:, column], found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("copies", [False, slow_case(True)])
def test_rows_in_another_order_and_copies_of_them_say_the_same(copies, rows):
    X, y = problem()
    model = fitted("QSGPRegressor")
    order = np.random.default_rng(0).permutation(150)
    given = (X[order], y[order], np.full(150, 2.0))
    if copies:
        given = np.repeat(X[order], 2, axis=0), np.repeat(y[order], 2)
    other = skgp.QSGPRegressor(random_state=0).fit(*given)
    noise = [m.predict_noise_variance(rows) / m.noise_variance_ for m in (model, other)]
    np.testing.assert_allclose(*noise, rtol=0.05)


@pytest.mark.parametrize("unit", [slow_case(1e-9), 1e9])
def test_units_are_without_effect(unit, rows):
    X, y = problem()
    model = fitted("QSGPRegressor")
    other = skgp.QSGPRegressor(random_state=0).fit(X * [unit, 1 / unit], unit * (y + 7))
    noise = model.predict_noise_variance(rows) * unit**2
    found = other.predict_noise_variance(rows * [unit, 1 / unit])
    np.testing.assert_allclose(found, noise, rtol=1e-2)


@pytest.mark.parametrize(
    "parameters",
    [
        {"likelihood": "laplace"},
        {"kernel": RBF() + WhiteKernel(0.1, "fixed")},
        {"optimizer": None},
    ],
)
def test_noise_that_is_not_learned_or_not_gaussian_is_refused(parameters):
    model = skgp.QSGPRegressor(heteroscedastic=True, **parameters)
    with pytest.raises(
        ValueError, match="heteroscedastic=True is of Gaussian noise that is learned.*an optimizer"
    ):
        model.fit(*problem())


@pytest.mark.parametrize("name", ["QSGPRegressor", "VecchiaGPRegressor"])
def test_several_targets_are_refused(name):
    X, y = problem(30)
    with pytest.raises(
        ValueError, match="with heteroscedastic=True takes one target.*MultiOutputR"
    ):
        getattr(skgp, name)(heteroscedastic=True).fit(X, np.c_[y, -y])


def test_principal_components_say_that_noise_is_constant():
    X, y = problem(40)
    model = skgp.SWSGPRegressor(RBF() + WhiteKernel(), heteroscedastic=True, projection=1)
    with pytest.warns(UserWarning, match="heteroscedastic=True has no effect with a projection"):
        model.fit(X, y)
    assert np.ptp(model.predict_noise_variance(X)) == 0


def test_a_stream_is_refused():
    with pytest.raises(ValueError, match="partial_fit has constant noise"):
        skgp.QSGPRegressor(heteroscedastic=True).partial_fit(*problem())


@pytest.mark.slow
def test_errors_are_those_of_the_process_that_predicts():
    """f is flat here and rough there: a smoother process would err where it is rough."""
    rng = np.random.default_rng(2)
    X = rng.uniform(-1, 1, (700, 3))
    y = np.where(X[:, 0] < 0, 0, np.sin(25 * X[:, 0])) + 0.1 * rng.standard_normal(700)
    model = skgp.QSGPRegressor(random_state=0).fit(X[:200], y[:200])
    mean, std = model.predict(X[200:], return_std=True)
    assert np.mean(((y[200:] - mean) / std) ** 2) < 1.5


@pytest.mark.parametrize("seed", [1, 7])
def test_gross_errors_mislead_nobody(seed):
    """One in 25 is twelve times as large: where variances vary, it is for heavier tails."""

    def draw(n):
        X = rng.uniform(size=(n, 1))
        noise = rng.standard_normal(n) * np.where(rng.uniform(size=n) < 0.04, 12, 1)
        return X, np.sin(6 * X[:, 0]) + 0.1 * noise

    rng = np.random.default_rng(seed)
    X, y = draw(120)
    models = (skgp.QSGPRegressor(heteroscedastic=h, random_state=0) for h in (False, "auto"))
    new = draw(2000)
    constant, varying = (model.fit(X, y).log_predictive_density(*new).mean() for model in models)
    assert varying > constant - 0.01


@pytest.mark.slow
def test_the_amplitude_far_off_is_that_of_all():
    """f is flat, and noise small, where x < 0: nothing is known of it beyond the observations."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (200, 2))
    y = np.where(X[:, 0] < 0, 0, 1.5 * np.sin(9 * X[:, 0])) + 0.05 * X[:, 1]
    y += 0.03 * np.exp(1.5 * X[:, 0]) * rng.standard_normal(200)
    models = (skgp.QSGPRegressor(heteroscedastic=h, random_state=0) for h in (False, True))
    far, flat = [[-9.0, 0.0], [-9.0, 9.0]], rng.uniform([-0.9, -0.9], [-0.3, 0.9], (100, 2))
    constant, varying = (model.fit(X, y).latent_mean_and_variance for model in models)
    np.testing.assert_allclose(varying(far)[1], constant(far)[1], rtol=0.5)
    assert np.median(varying(flat)[1] / constant(flat)[1]) < 0.5


def test_noise_far_off_is_finite_whatever_the_kernel(rows):
    X, y = problem()
    kernel = RBF([0.3, 1.0]) + DotProduct() + WhiteKernel(0.1)
    model = skgp.QSGPRegressor(kernel, heteroscedastic=True, random_state=0).fit(X, y)
    noise = model.predict_noise_variance([[3.0, 0.5], [50.0, 50.0]])
    assert (noise < 100 * model.predict_noise_variance(X).max()).all()
