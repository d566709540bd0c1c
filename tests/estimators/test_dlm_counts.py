"""DLMGPRegressor of counts: both links, the count distribution, awkward counts.

The contract with the exponential link is checked by ``test_dlm_regression``.
"""

import warnings

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp import DLMGPRegressor
from skgp.datasets import make_counts
from tests.contracts.estimators import CountRegressorPredictions

links = pytest.mark.parametrize("link", ["exp", "softplus"])


def make(**params):
    defaults = dict(likelihood="poisson", n_inducing=15, max_iter=20, random_state=0)
    return DLMGPRegressor(**{**defaults, **params})


def kept(**params):
    """An estimator with hyper-parameters that suit `data` and are kept."""
    return make(**{"kernel": ConstantKernel(0.5) * RBF(0.5), "optimizer": None, **params})


def score(estimator, X, y):
    """Mean log-probability of rows, in nats."""
    return estimator.log_predictive_density(X, y).mean()


@pytest.fixture(scope="module")
def data():
    return make_counts(60, mean=5.0, dispersion=np.inf, random_state=0)


@pytest.fixture(scope="module")
def X_new():
    return np.linspace(-1, 1, 7)[:, None]


class TestSoftplusContract(CountRegressorPredictions):
    link = "softplus"
    offers_state = False
    easy_r2 = 0.4  # the rates are exponentials of a function, which softplus has to bend

    def make(self, **params):
        options = dict(likelihood="poisson", link="softplus", n_inducing=30, max_iter=10)
        return DLMGPRegressor(**{**options, "random_state": 0, **params})


# ---- rates -------------------------------------------------------------------------------------


@links
def test_prior_mean_is_that_of_the_counts(link, data):
    """Far from the rows the rate is the link of the mean count's own f, and its spread."""
    weights = np.where(np.arange(60) < 30, 3.0, 1.0)
    for weight in (None, weights):
        fit = kept(link=link).fit(*data, sample_weight=weight)
        mean, var = fit.latent_mean_and_variance([[1e3]])
        rate = np.exp(mean) if link == "exp" else np.logaddexp(0, mean)
        assert rate[0] == pytest.approx(np.average(data[1], weights=weight), rel=1e-9)
        assert var[0] == pytest.approx(0.5, rel=1e-6)


@links
def test_rates_are_learned_and_intervals_cover(link):
    X, y = make_counts(400, mean=20.0, dispersion=np.inf, random_state=1)
    fit = make(link=link).fit(X[:200], y[:200])
    assert fit.score(X[200:], y[200:]) > 0.6
    # A Poisson law of the right rate has an expected log-probability of about this.
    law = -0.5 * np.log(2 * np.pi * np.e * y[200:].clip(1)).mean()
    assert score(fit, X[200:], y[200:]) > law - 0.15
    lower, upper = fit.predict_interval(X[200:], coverage=0.9)
    covered = ((lower <= y[200:]) & (y[200:] <= upper)).mean()
    assert 0.85 < covered < 0.97


@links
def test_loss_is_that_of_the_predictions_and_the_divergence(link, data):
    divergence = []
    for beta in (1e-3, 0.5):
        fit = kept(beta=beta, link=link).fit(*data)
        rows = -fit.log_predictive_density(*data).sum()
        divergence.append((fit.loss_ - rows) / beta)
    assert divergence[0] > divergence[1] > 0


# ---- weights, streams, state -------------------------------------------------------------------


@links
@pytest.mark.parametrize("objective", ["log_loss", "elbo"])
def test_sample_weight_is_repeated_rows(link, objective, data, X_new):
    X, y = data
    weights = np.arange(60) % 4  # 0 leaves the row out
    options = dict(link=link, objective=objective, max_iter=4, n_inducing=12)
    weighted = make(**options).fit(X, y, weights)
    order = np.random.default_rng(0).permutation(weights.sum())
    repeated = make(**options)
    repeated.fit(np.repeat(X, weights, axis=0)[order], np.repeat(y, weights)[order])
    expected = repeated.predict(X_new, return_std=True)
    np.testing.assert_allclose(weighted.predict(X_new, return_std=True), expected, rtol=1e-6)
    assert weighted.loss_ == pytest.approx(repeated.loss_, rel=1e-6)


@links
def test_stream_comes_near_the_fit_of_all_rows(link, data):
    X, y = data
    options = dict(link=link, objective="elbo")
    stream = kept(**options)
    for rows in (slice(0, 20), slice(20, 40), slice(40, 60)):
        stream.partial_fit(X[rows], y[rows])
    whole, first = (kept(**options).fit(X[:n], y[:n]) for n in (60, 20))
    errors = [np.abs(fit.predict(X) - whole.predict(X)).mean() for fit in (stream, first)]
    assert errors[0] < 0.5 * errors[1]
    with pytest.raises(ValueError, match="y must hold counts"):
        stream.partial_fit(X, y + 0.5)


def test_attributes_of_noise_do_not_outlive_it(data):
    estimator = kept(likelihood="gaussian").fit(*data)
    assert estimator.noise_variance_ > 0
    estimator.set_params(likelihood="poisson").fit(*data)
    assert not hasattr(estimator, "noise_variance_")
    with pytest.raises(AttributeError, match="return_std=True"):
        estimator.noise_variance_  # noqa: B018


# ---- awkward counts ------------------------------------------------------------------------------


@links
def test_all_counts_zero(link, data, X_new):
    fit = make(link=link).fit(data[0], np.zeros(60))
    mean, std = fit.predict(X_new, return_std=True)
    assert (mean > 0).all() and (mean < 0.2).all() and np.isfinite(std).all()
    np.testing.assert_array_equal(fit.predict_quantiles(X_new, [0.1, 0.5]), 0)
    assert score(fit, data[0], np.zeros(60)) > -0.2
    assert fit.log_predictive_density(X_new, np.full(7, 50)).max() < -20


def test_one_huge_count_leaves_the_others_alone(data, X_new):
    X, y = data[0], data[1].copy()
    y[5] = 10_000
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit = make().fit(X, y)
        mean, std = fit.predict(X_new, return_std=True)
    assert np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()
    assert np.isfinite(fit.log_predictive_density(X, y)).all()
    assert np.median(np.abs(fit.predict_quantiles(X, 0.5) - data[1])) < 10


@pytest.mark.parametrize(
    ("link", "size"), [("exp", 1e-2), ("exp", 1e4), ("softplus", 1e-2), ("softplus", 10.0)]
)
def test_rates_of_any_size(link, size):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 1))
    rate = size * np.exp(np.sin(3 * X[:, 0]))
    fit = make(link=link, max_iter=30).fit(X, rng.poisson(rate))
    found = fit.predict(X)
    if size > 1:
        np.testing.assert_allclose(found, rate, rtol=0.1 if size > 10 else 0.4)
    else:
        assert found.mean() == pytest.approx(rate.mean(), rel=0.7) and (found > 0).all()


@pytest.mark.filterwarnings("ignore:n_inducing=15 is more than the:UserWarning")
@links
@pytest.mark.parametrize("counts", [[0], [7], [0, 3]])
def test_a_few_counts(link, counts, X_new):
    for beta in (1.0, "auto"):
        fit = make(link=link, beta=beta).fit(np.arange(len(counts))[:, None], counts)
        mean, std = fit.predict(X_new, return_std=True)
        assert np.isfinite(mean).all() and np.isfinite(std).all() and (mean > 0).all()
        assert np.isfinite(fit.log_predictive_density(X_new[:1], [3])).all()


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["bmc", "smooth_bmc", "ups"])
def test_sampled_gradients_end_near_the_exact_one(gradient, data):
    exact = kept().fit(*data)
    sampled = kept(gradient=gradient, n_gradient_samples=30, max_iter=60).fit(*data)
    assert score(sampled, *data) == pytest.approx(score(exact, *data), abs=0.05)


def test_auto_beta_is_of_its_path_and_its_loss_is_of_rows_that_did_not_choose():
    fit = make(beta="auto", max_iter=8).fit(*make_counts(120, random_state=3))
    assert fit.beta_ in fit.beta_path_ and len(fit.beta_path_) >= 3
    # No weight is chosen that predicts worse than that of Bayes' rule.
    assert fit.beta_path_[fit.beta_] <= fit.beta_path_[1.0]
    assert np.isfinite(fit.validation_loss_)
    assert fit.validation_loss_ not in fit.beta_path_.values()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"objective": "square_loss"}, "objective='square_loss' needs .*'poisson'.*'log_loss' or"),
        ({"objective": "fitc"}, "objective='fitc' needs likelihood='gaussian'.*'poisson'"),
        ({"link": "identity"}, "link.*identity"),
        ({"degrees_of_freedom": 4.0}, "degrees_of_freedom=4.0 .*'student_t'.*'poisson'"),
        ({"likelihood": "gaussian", "link": "softplus"}, "link='softplus' is that of .*Leave"),
        ({"likelihood": "student_t", "link": "softplus"}, "link='softplus'.*'student_t'"),
        ({"likelihood": "negative_binomial"}, "likelihood.*negative_binomial"),
    ],
)
def test_what_does_not_go_with_counts_is_named(params, message, data):
    with pytest.raises(ValueError, match=message):
        make(**params).fit(*data)
