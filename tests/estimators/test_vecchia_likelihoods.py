"""VecchiaGPRegressor of counts and heavy-tailed noise: dense oracles, what is learned, errors."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import DLMGPRegressor, VecchiaGPRegressor
from skgp.inference.defaults import LATENT_JITTER
from skgp.likelihoods import Laplace, Poisson, StudentT
from tests.covering import covering, slow_case
from tests.reference import laplace_evidence as oracle

KERNEL = 1.3 * Matern([0.4, 0.7], nu=1.5)
FIXED = {"optimizer": None, "random_state": 0}


def problem(kind, n=60, seed=0):
    """X (n, 2), y (n,), exposures or None, and f (n,)."""
    rng = np.random.default_rng(seed)
    X = rng.random((n, 2))
    f = np.sin(5 * X[:, 0]) + X[:, 1]
    if kind == "student_t":
        return X, f + 0.15 * rng.standard_t(3, n) + 4.0 * (rng.random(n) < 0.05), None, f
    exposure = rng.choice([0.3, 1.0, 8.0], n)
    return X, rng.poisson(exposure * np.exp(f)).astype(float), exposure, f


@covering(kind=["poisson", "student_t"], n_inducing=[0, 7])
def test_all_neighbors_are_the_dense_approximation(kind, n_inducing):
    X, y, exposure, _ = problem(kind)
    x = np.vstack([X[:3] + 0.05, [[0.5, 0.5], [3.0, 0.0]]])
    if kind == "poisson":
        kernel, offset = KERNEL, np.log(y.sum() / exposure.sum())
        model, likelihood = {}, oracle.poisson(y, np.log(exposure))
    else:
        kernel, offset = KERNEL + WhiteKernel(0.04), 0.0
        model, likelihood = {"degrees_of_freedom": 3.0}, oracle.student_t(y, 0.2, 3.0)
    fit = VecchiaGPRegressor(
        kernel,
        likelihood=kind,
        n_neighbors=59,
        n_inducing=n_inducing,
        normalize_y=False,
        **model,
        **FIXED,
    ).fit(X, y, exposure=exposure)
    if kind == "student_t":
        fit.predict(x)
        assert "spread" not in fit._posterior.__dict__  # what variances alone need
    K = KERNEL(X) + LATENT_JITTER * np.eye(60)
    f, C, value = oracle.laplace(K, likelihood, offset)
    assert fit.log_marginal_likelihood_value_ == pytest.approx(value, rel=1e-8)
    weights = np.linalg.solve(K, KERNEL(X, x)).T
    mean = offset + weights @ f
    joint = KERNEL(x) - weights @ KERNEL(X, x) + weights @ C @ weights.T
    found = fit.latent_mean_and_covariance(x)
    np.testing.assert_allclose(found[0], mean, atol=1e-7)
    np.testing.assert_allclose(found[1], joint, atol=1e-7)
    np.testing.assert_allclose(fit.latent_mean_and_variance(x), [mean, joint.diagonal()], atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "student_t"])
def test_predictions_are_as_good_as_those_of_the_variational_posterior(kind):
    X, y, exposure, f = problem(kind, 300)
    train, test = slice(None, 100), slice(100, None)
    scores = {}
    for make in (VecchiaGPRegressor, DLMGPRegressor):
        given, new = (
            {} if exposure is None else {"exposure": exposure[rows]} for rows in (train, test)
        )
        model = make(likelihood=kind, random_state=0).fit(X[train], y[train], **given)
        scores[make] = model.log_predictive_density(X[test], y[test], **new).mean()
        lower, upper = model.predict_interval(X[test], 0.9, **new)
        assert 0.83 < np.mean((lower <= y[test]) & (y[test] <= upper)) < 0.995
    assert scores[VecchiaGPRegressor] > scores[DLMGPRegressor] - 0.02


@pytest.mark.slow
def test_parameters_of_the_noise_are_learned():
    X, y, _, f = problem("student_t", 100)
    model = VecchiaGPRegressor(likelihood="student_t", random_state=0).fit(X, 50 + 10 * y)
    assert 1.0 < model.likelihood_scale_ < 2.2  # of 1.5
    assert 2 < model.degrees_of_freedom_ < 5
    assert np.sqrt(np.mean((model.predict(X) - 50 - 10 * f) ** 2)) < 0.6
    assert len(model.history_["solve"]) > 1 and model.n_iter_ > 10
    again = clone(model).set_params(degrees_of_freedom=7.0).fit(X[:30], y[:30])
    assert again.degrees_of_freedom_ == pytest.approx(7.0)


@pytest.mark.parametrize(
    "likelihood", [Poisson("softplus"), slow_case(StudentT(0.3, 4.0, scale_bounds=(0.01, 1.0)))]
)
def test_instances_learn_what_is_free(likelihood):
    X, y, *_ = problem("poisson" if likelihood.is_count else "student_t", 40)
    model = VecchiaGPRegressor(likelihood=likelihood, random_state=0, max_iter=2).fit(X, y)
    learned = model._likelihood.free_parameters()
    for (_, low, high), (value, *_) in zip(likelihood.free_parameters(), learned, strict=True):
        assert low <= value <= high
    assert np.isfinite(model.log_predictive_density(X, y)).all()


def test_noise_with_a_kink_is_refused():
    X, y, *_ = problem("student_t")
    with pytest.raises(ValueError, match="twice differentiable in f.*Laplace noise has none"):
        VecchiaGPRegressor(likelihood=Laplace(0.3)).fit(X, y)


def test_the_default_kernel_reaches_large_counts_of_a_linear_rate():
    """Where the rate is about f, the variance of f is that of the rates and not about 1."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (60, 1))
    rate = 1e5 * np.exp(np.sin(2 * X[:, 0]))
    model = VecchiaGPRegressor(likelihood="poisson", link="softplus", random_state=0)
    y = rng.poisson(rate)
    mean, std = model.fit(X, y).predict(X, return_std=True)
    assert np.abs(mean / rate - 1).mean() < 0.01  # 0.5 with a standard deviation of at most 100
    assert np.std((y - mean) / std) < 2
