"""A kernel and a likelihood defined here work in every estimator that they can."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import (
    RBF,
    Hyperparameter,
    Kernel,
    NormalizedKernelMixin,
    StationaryKernelMixin,
    WhiteKernel,
)

import skgp
from skgp.kernels import register_kernel
from skgp.likelihoods import Gaussian, NumericLikelihood, Poisson


class Bell(StationaryKernelMixin, NormalizedKernelMixin, Kernel):
    """exp(-|x - z|^2 / 2 l^2), which RBF is too."""

    def __init__(self, length_scale=1.0, length_scale_bounds=(1e-2, 1e2)):
        self.length_scale, self.length_scale_bounds = length_scale, length_scale_bounds

    @property
    def hyperparameter_length_scale(self):
        return Hyperparameter("length_scale", "numeric", self.length_scale_bounds)

    def __call__(self, X, Y=None, eval_gradient=False):
        return RBF(self.length_scale)(X, Y, eval_gradient)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("skgp.kernels.expression._REGISTERED", {})
    register_kernel(
        Bell,
        lambda kernel, params, X, Z: torch.exp(
            -0.5
            * (X[..., :, None, :] - Z[..., None, :, :]).square().sum(-1)
            / params["length_scale"] ** 2
        ),
    )


class Counts(NumericLikelihood):
    """Poisson counts of rate e^f, by what a subclass must write and quadrature."""

    is_count = has_log_link = True

    def at(self, offset):
        assert offset is None
        return self

    def _log_prob(self, y, f):
        return y * f - f.exp() - torch.lgamma(y + 1)

    def _derivatives(self, y, f):
        return y - f.exp(), -f.exp()

    def _mode(self, y):
        return y.log()

    def _conditional_mean(self, f):
        return f.exp()

    def _conditional_var(self, f):
        return f.exp()

    def _cdf(self, y, mean, var):
        return Poisson()._cdf(y, mean, var)

    def _quantile(self, q, mean, var):
        return Poisson()._quantile(q, mean, var)

    def _sample(self, f, generator):
        return torch.poisson(f.exp(), generator=generator)


class Noise(NumericLikelihood):
    """Logistic noise of a scale to be learned."""

    is_additive = True

    def __init__(self, scale=1.0):
        super().__init__(n_points=40)
        self.scale = scale

    def free_parameters(self):
        return ((float(self.scale), 1e-3, 1e3),)

    def with_parameters(self, parameters):
        return Noise(parameters[0].exp())

    def _z(self, y, f):
        return (y - f) / self.scale

    def _log_prob(self, y, f):
        z = self._z(y, f)
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z) - self._log()

    def _log(self):
        return torch.as_tensor(self.scale, dtype=torch.float64).log()

    def _derivatives(self, y, f):
        z = self._z(y, f)
        both = torch.sigmoid(z) * torch.sigmoid(-z)
        return torch.tanh(z / 2) / self.scale, -2 * both / self.scale**2

    def _mode(self, y):
        return y

    def _conditional_mean(self, f):
        return f

    def _conditional_var(self, f):
        return torch.full_like(f, float(self.scale) ** 2 * np.pi**2 / 3)

    def _cdf(self, y, mean, var):
        raise NotImplementedError

    _quantile = _sample = _cdf


def data(n=40, seed=0):
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, n))[:, None]
    return X, np.sin(X[:, 0]), rng


OPTIONS = {
    "QSGPRegressor": {"basis": "inducing", "n_basis": 20},
    "QSGPClassifier": {"basis": "inducing", "n_basis": 20},
    "DLMGPRegressor": {"n_inducing": 15, "max_iter": 5},
    "DLMGPClassifier": {"n_inducing": 15, "max_iter": 5},
    "SWSGPRegressor": {"n_neighbors": 8},
    "SWSGPClassifier": {"n_neighbors": 8},
    "BayesianGPRegressor": {"n_samples": 20},
    "VecchiaGPRegressor": {},
    "VecchiaGPClassifier": {},
}


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_own_kernel_predicts_as_the_same_kernel_built_in(name):
    X, f, rng = data()
    labels = name.endswith("Classifier")
    y = f > 0.2 if labels else f + 0.1 * rng.standard_normal(len(f))
    found = []
    for leaf in (Bell(0.8), RBF(0.8)):
        kernel = 1.0 * leaf if labels else 1.0 * leaf + WhiteKernel(0.01)
        fixed = {} if name.startswith("Bayesian") else {"optimizer": None}
        model = getattr(skgp, name)(kernel=kernel, random_state=0, **fixed, **OPTIONS[name])
        model = clone(model).fit(X, y)
        found.append(model.predict_proba(X)[:, 1] if labels else model.predict(X))
    np.testing.assert_allclose(*found, atol=2e-3)


def test_own_kernel_is_learned_as_the_same_kernel_built_in():
    X, f, rng = data()
    y = f + 0.1 * rng.standard_normal(len(f))
    thetas = [
        skgp.SWSGPRegressor(1.0 * leaf + WhiteKernel(0.1), random_state=0).fit(X, y).kernel_.theta
        for leaf in (Bell(), RBF())
    ]
    np.testing.assert_allclose(*thetas, rtol=1e-3)


REGRESSORS = {
    "DLMGPRegressor": {"n_inducing": 20, "max_iter": 30},
    "SWSGPRegressor": {"n_neighbors": 10},
    "StateSpaceGPRegressor": {},
    "VecchiaGPRegressor": {},
}


@pytest.mark.parametrize("name", REGRESSORS)
def test_own_likelihood_of_counts_predicts_as_the_one_built_in(name):
    X, f, rng = data(60)
    y = rng.poisson(np.exp(1 + f)).astype(float)
    found = []
    for likelihood in (Counts(), "poisson"):
        model = getattr(skgp, name)(
            1.0 * RBF(1.0), likelihood=likelihood, random_state=0, **REGRESSORS[name]
        )
        found.append(clone(model).fit(X, y).predict(X))
    np.testing.assert_allclose(*found, rtol=0.03)


@pytest.mark.parametrize("name", REGRESSORS)
def test_own_noise_is_learned(name):
    X, f, rng = data(150)
    y = 50 + 10 * f + rng.logistic(scale=1.0, size=len(f))
    kernel = 1.0 * RBF(1.0)
    model = getattr(skgp, name)(kernel, likelihood=Noise(), random_state=0, **REGRESSORS[name]).fit(
        X, y
    )
    mean, std = model.predict(X, return_std=True)
    assert np.sqrt(np.mean((mean - 50 - 10 * f) ** 2)) < 1.2
    assert 1.2 < std.mean() < 2.8  # pi / sqrt(3) = 1.81 of the noise


@pytest.mark.parametrize("bounds", [None, (1e-5, 10.0)])
def test_gaussian_likelihood_given_has_the_greatest_evidence(bounds):
    X, f, rng = data(60)
    y = f + 0.2 * rng.standard_normal(len(f))
    level = 0.5 if bounds else 0.04
    given = 1.0 * RBF(1.0) + WhiteKernel(level, bounds or "fixed")
    exact = GaussianProcessRegressor(given, alpha=0.0).fit(X, y)
    model = skgp.SWSGPRegressor(
        1.0 * RBF(1.0), likelihood=Gaussian(level, bounds=bounds), normalize_y=False
    ).fit(X, y)
    assert model.elbo_ == pytest.approx(exact.log_marginal_likelihood_value_, abs=1e-3)
    assert model.noise_variance_ == pytest.approx(exact.kernel_.k2.noise_level, rel=0.01)
