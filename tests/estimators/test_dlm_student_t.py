"""DLMGPRegressor with Student-t noise: the contracts, its predictive distribution, outliers."""

import pickle

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import DLMGPRegressor
from tests.contracts.estimators import RegressorPredictions, rbf_kernel
from tests.same import assert_same


def make(**params):
    defaults = dict(likelihood="student_t", n_inducing=20, max_iter=40, random_state=0)
    return DLMGPRegressor(**{**defaults, **params})


def kept(**params):
    """An estimator with hyper-parameters that suit `data` and are kept."""
    return make(**{"kernel": rbf_kernel(), "optimizer": None, **params})


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    noise = rng.standard_t(3, 60)
    return X, 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.15 * noise)


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-3, 3, (7, 2))


class TestContract(RegressorPredictions):
    gaussian = False
    heavy_tailed = True
    offers_state = False

    def make(self, **params):
        options = dict(likelihood="student_t", n_inducing=40, max_iter=20, random_state=0)
        return DLMGPRegressor(**{**options, **params})

    def make_iterative(self, **params):
        """With one kernel, for by default four are compared."""
        return self.make(kernel=self.kernel(), **params)


def average(noise, f, y):
    """Density of y = f + noise, by quadrature on either side of the peak of the noise."""
    ends = sorted((y, *f.interval(1 - 1e-15)))
    return sum(
        integrate.quad(lambda x: noise.pdf(y - x) * f.pdf(x), *part, epsabs=0)[0]
        for part in zip(ends[:-1], ends[1:], strict=True)
    )


# ---- the predictive distribution ---------------------------------------------------------------


@pytest.mark.parametrize("df", [2.5, 5.0])
def test_density_is_the_noise_averaged_over_f_in_the_units_of_y(df, data, X_new):
    fit = kept(degrees_of_freedom=df).fit(*data)
    assert fit.degrees_of_freedom_ == pytest.approx(df, rel=1e-12)
    assert fit.likelihood_scale_ == pytest.approx(np.sqrt(0.05) * fit.y_scale_, rel=1e-12)
    assert fit.noise_variance_ == pytest.approx(fit.likelihood_scale_**2 * df / (df - 2), rel=1e-9)
    mean, var = fit.latent_mean_and_variance(X_new)
    for k in (-8.0, 0.0, 1.5):
        y = mean + k * fit.y_scale_
        found = fit.log_predictive_density(X_new, y)
        for row in range(3):
            noise = stats.t(df, scale=fit.likelihood_scale_)
            f = stats.norm(mean[row], np.sqrt(var[row]))
            assert found[row] == pytest.approx(np.log(average(noise, f, y[row])), abs=1e-5)


def test_degrees_of_freedom_and_scale_are_learned():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (400, 1))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.standard_t(3, 400)
    fit = make(objective="elbo", n_inducing=15).fit(X, y)
    assert 2.1 <= fit.degrees_of_freedom_ < 5
    assert fit.likelihood_scale_ == pytest.approx(0.1, rel=0.25)
    level = fit.kernel_.k2.noise_level * fit.y_scale_**2
    assert level == pytest.approx(fit.likelihood_scale_**2, rel=1e-12)
    normal = make(objective="elbo", n_inducing=15)
    normal.fit(X, np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(400))
    assert normal.degrees_of_freedom_ > 3 * fit.degrees_of_freedom_


@pytest.mark.parametrize("objective", ["log_loss", "elbo"])
def test_what_is_fixed_is_kept(objective, data):
    kernel = RBF(1.5) + WhiteKernel(0.08, "fixed")
    fit = make(kernel=kernel, degrees_of_freedom=3.5, objective=objective, max_iter=20).fit(*data)
    assert fit.degrees_of_freedom_ == pytest.approx(3.5, rel=1e-12)
    assert fit.likelihood_scale_ == pytest.approx(np.sqrt(0.08) * fit.y_scale_, rel=1e-12)
    assert fit.kernel_.k1.length_scale != 1.5
    theta = kept(objective=objective).fit(*data).kernel_.theta
    np.testing.assert_allclose(theta, rbf_kernel().theta, rtol=1e-12)


def test_few_degrees_of_freedom_have_no_variance(data, X_new):
    fit = kept(degrees_of_freedom=1.5).fit(*data)
    mean, std = fit.predict(X_new, return_std=True)
    assert np.isinf(std).all() and np.isinf(fit.noise_variance_) and np.isfinite(mean).all()
    lower, upper = fit.predict_interval(X_new, coverage=0.9)
    assert (lower < mean).all() and (mean < upper).all() and np.isfinite(upper - lower).all()


# ---- outliers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"objective": "elbo"}, {"beta": "auto"}], ids=str)
def test_outliers_are_predicted_better_than_by_gaussian_noise(options):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (500, 1))
    truth = np.sin(2 * X[:, 0])
    wrong = np.where(rng.random(500) < 0.08, 10.0 * rng.standard_t(2, 500), 0.0)
    y = truth + 0.1 * rng.standard_normal(500) + wrong
    train, test = slice(0, 200), slice(200, 500)

    def fit(likelihood):
        kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
        model = make(kernel=kernel, likelihood=likelihood, max_iter=100, **options)
        return model.fit(X[train], y[train])

    robust, plain = fit("student_t"), fit("gaussian")
    errors = [
        np.sqrt(np.mean((model.predict(X[test]) - truth[test]) ** 2)) for model in (robust, plain)
    ]
    assert errors[0] < 0.12 < errors[1]
    scores = [m.log_predictive_density(X[test], y[test]).mean() for m in (robust, plain)]
    assert scores[0] > scores[1] + 0.5


def test_outliers_pull_no_harder_from_further_away():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (80, 1))
    y, wrong = np.sin(2 * X[:, 0]), 20.0 * (np.arange(80) < 4)
    options = dict(kernel=RBF(1.0) + WhiteKernel(0.01), degrees_of_freedom=3.0, normalize_y=False)
    near, far = (kept(**options).fit(X, y + k * wrong).predict(X) for k in (1, 1000))
    np.testing.assert_allclose(far, near, atol=1e-2)
    assert np.abs(near - y).max() < 0.3


@pytest.mark.parametrize("objective", ["log_loss", "elbo"])
def test_search_does_not_end_at_a_function_of_nothing(objective):
    """From a prior far wider than the noise, rows begin where the density curves upwards."""
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, (120, 5))
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]
    assert make(objective=objective, n_inducing=60).fit(X, y).score(X, y) > 0.9


# ---- weights, streams, state --------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["log_loss", "elbo"])
def test_sample_weight_is_repeated_rows(objective, data, X_new):
    X, y = data
    weights = np.arange(60) % 4  # 0 leaves the row out
    options = dict(objective=objective, max_iter=4, n_inducing=12)
    weighted = make(**options).fit(X, y, weights)
    order = np.random.default_rng(0).permutation(weights.sum())
    repeated = make(**options)
    repeated.fit(np.repeat(X, weights, axis=0)[order], np.repeat(y, weights)[order])
    expected = repeated.predict(X_new, return_std=True)
    np.testing.assert_allclose(weighted.predict(X_new, return_std=True), expected, rtol=1e-6)
    assert weighted.loss_ == pytest.approx(repeated.loss_, rel=1e-6)


@pytest.mark.parametrize(("objective", "share"), [("log_loss", 0.9), ("elbo", 0.2)])
def test_stream_comes_near_the_fit_of_all_rows(objective, share, data):
    X, y = data
    options = dict(objective=objective, normalize_y=False, kernel=RBF(1.5) + WhiteKernel(0.05))
    z = (y - 30) / 4
    stream = kept(**options)
    for rows in (slice(0, 20), slice(20, 40), slice(40, 60)):
        stream.partial_fit(X[rows], z[rows])
    whole = kept(**options).fit(X, z)
    first = kept(**options).fit(X[:20], z[:20])
    errors = [np.abs(fit.predict(X) - whole.predict(X)).mean() for fit in (stream, first)]
    assert errors[0] < share * errors[1]


def test_attributes_of_student_t_noise_do_not_outlive_it(data, X_new):
    estimator = kept().fit(*data)
    assert pickle.loads(pickle.dumps(estimator)).degrees_of_freedom_ == 4.0
    estimator.set_params(likelihood="gaussian").fit(*data)
    assert not hasattr(estimator, "likelihood_scale_")
    assert not hasattr(estimator, "degrees_of_freedom_")
    gaussian = kept(likelihood="gaussian").fit(*data)
    found = estimator.predict_quantiles(X_new, [0.1])
    assert_same(found, gaussian.predict_quantiles(X_new, [0.1]))
