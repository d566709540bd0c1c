"""Forms as fine as the noise asks for: the evidence equals the dense one."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
)

from skgp.inference.markov.series import make_series
from skgp.kernels import LocalLinearTrend, gram, state_space
from skgp.learning.markov.objectives import GaussianEvidence
from skgp.learning.markov.refinement import evidence_error
from skgp.likelihoods import Gaussian
from skgp.linalg import NotPositiveDefiniteError, NumericalWarning
from skgp.models.state_space import fit_series


def drawn(kernel, n, noise, seed=0, span=15.0):
    """Times, values drawn from kernel and noise, and their log marginal likelihood."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(0, span, n))
    C = gram(kernel, torch.tensor(x)[:, None]).numpy() + noise * np.eye(n)
    L = np.linalg.cholesky(C)
    z = rng.standard_normal(n)
    dense = -0.5 * z @ z - np.log(np.diag(L)).sum() - 0.5 * n * np.log(2 * np.pi)
    return torch.tensor(x), torch.tensor(L @ z), dense


def fitted(kernel, x, y, noise):
    options = {"offsets": [0.0], "learn": False}
    return fit_series(
        [kernel], [make_series(x, y)], Gaussian(noise, bounds=(noise, noise)), **options
    )


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize(
    "kernel",
    [1.3 * RBF(0.8), RBF(2.0) * Matern(1.5, nu=0.5), RBF(1.1) + 0.5 * Matern(3.0, nu=1.5)],
    ids=str,
)
@pytest.mark.parametrize("n", [80, 410])  # by one Cholesky factor, and by the smoother
def test_evidence_of_rbf_equals_the_dense_one(n, kernel, noise):
    x, y, dense = drawn(kernel, n, noise)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = fitted(kernel, x, y, noise)
    assert abs(fit.value - dense) < 0.01


@pytest.fixture
def by_the_filter(monkeypatch):
    """As if the series were long."""
    monkeypatch.setattr("skgp.inference.defaults.MAX_TIMES", 0)
    monkeypatch.setattr("skgp.inference.defaults.MOST_TIMES", 0)


def test_states_follow_the_noise(by_the_filter):
    kernel = RBF(0.8)
    sizes = []
    for noise in (1.0, 1e-3, 1e-8):
        x, y, _ = drawn(kernel, 150, noise)
        sizes.append(fitted(kernel, x, y, noise).states[0].form.n_states)
    assert sizes[0] == 6 < sizes[1] < sizes[2]


def test_predictions_use_the_refined_form(by_the_filter):
    kernel, noise = RBF(0.8), 1e-6
    x, y, _ = drawn(kernel, 150, noise)
    new = torch.linspace(1, 14, 40, dtype=torch.float64)
    mean, var = fitted(kernel, x, y, noise).states[0].moments(new)
    K = gram(kernel, x[:, None]) + noise * torch.eye(len(x))
    k = gram(kernel, new[:, None], x[:, None])
    expected = k @ torch.linalg.solve(K, y)
    expected_var = 1 - (k * torch.linalg.solve(K, k.T).T).sum(1)
    assert ((mean - expected).abs() < 1e-3 * noise**0.5 + 0.05 * expected_var.sqrt()).all()
    assert (var - expected_var).abs().max() < 0.05 * noise


def test_evidence_error_is_that_of_drawn_series(request):
    kernel, noise, errors = RBF(0.8), 1e-3, []
    form = state_space(kernel)
    for seed in range(20):
        x, y, dense = drawn(kernel, 200, noise, seed)
        K = form.at().covariance((x[:, None] - x).abs().numpy(), of_form=True)[0]
        C = torch.from_numpy(K) + noise * torch.eye(len(x))
        found = torch.distributions.MultivariateNormal(torch.zeros_like(y), C).log_prob(y)
        errors.append(float(found) - dense)
    assert evidence_error(form, make_series(x, y), noise) == 0  # by one factor of the covariance
    request.getfixturevalue("by_the_filter")
    stated = evidence_error(form, make_series(x, y), noise)
    assert 0.4 < stated / np.std(errors) < 2.5
    beside_a_trend = state_space(kernel + LocalLinearTrend(1e-9, 10.0, 1.0, origin=-1.0))
    assert 0 < evidence_error(beside_a_trend, make_series(x, y), noise) < 2 * stated


def test_what_cannot_be_refined_warns_with_the_figure():
    kernel, noise = RationalQuadratic(0.8, 1.5), 1e-6
    x, y, dense = drawn(kernel, 120, noise)
    with pytest.warns(NumericalWarning, match=r"may be off by [0-9.e+]+ nats. Use a Matern"):
        fit = fitted(kernel, x, y, noise)
    assert abs(fit.value - dense) > 0.01


def test_exact_forms_and_harmonics_are_left_alone():
    x, y, _ = drawn(Matern(nu=1.5), 60, 1e-2)
    assert fitted(Matern(nu=1.5), x, y, 1e-2).states[0].tolerance is None
    assert fitted(ExpSineSquared(1.5, 3.0), x, y, 1e-1).states[0].tolerance is None


def test_a_search_with_a_finer_form_does_not_lose_what_was_found(by_the_filter):
    t = np.arange(135.0)
    y = np.exp(t / 30)
    y = torch.tensor((y - y.mean()) / y.std())
    series = make_series(torch.tensor(t), y)
    kernel = ConstantKernel(1.0) * RBF(10.0, (1e-3, 1e3))
    with pytest.warns(NumericalWarning, match="not to be relied on. Give the noise a lower"):
        fit = fit_series([kernel], [series], Gaussian(1e-4, bounds=(1e-10, 10.0)), offsets=[0.0])
    assert 1000 < fit.value < 1600  # of noise alone -192; no more than without any misfit


def test_evidence_beyond_the_digits_of_a_filter_is_refused(by_the_filter):
    """A density of more than that of the noise alone, at no misfit, is one of rounding."""
    t = np.linspace(0, 10, 60)
    z = np.exp(t / 3)
    series = make_series(torch.tensor(t), torch.tensor((z - z.mean()) / z.std()))
    kernel = ConstantKernel(1e5) * RBF(141.0)
    at = [state_space(kernel, tolerance=1e-12).at()], torch.tensor([np.log(1e-10)])
    with pytest.raises(NotPositiveDefiniteError, match="Give the noise a greater lower bound"):
        GaussianEvidence(series)(*at)


@pytest.mark.parametrize("n", [40, 150])
@pytest.mark.parametrize(
    "function", [lambda x: np.sin(2 * x) + np.exp(-0.1 * (x - 5) ** 2), lambda x: np.exp(x / 3)]
)
def test_short_series_without_noise_have_the_dense_process_of_rbf(function, n):
    """The search ends where a dense process has as much evidence; predictions are its own."""
    x = np.sort(np.random.default_rng(n).uniform(0, 10, n))
    y = function(x)
    scale = y.std()
    y = (y - y.mean()) / scale
    kernel, series = (
        ConstantKernel(1.0) * RBF(1.0, (1e-3, 1e3)),
        make_series(*map(torch.tensor, (x, y))),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        fit = fit_series([kernel], [series], Gaussian(1e-4, bounds=(1e-10, 1.0)), offsets=[0.0])
    state, noise = fit.states[0], float(fit.parameters.exp())
    K = state.kernel(x[:, None]) + noise * np.eye(n)
    K.flat[:: n + 1] += 1e-13 * K[0, 0]  # what rounding leaves uncertain
    L = np.linalg.cholesky(K)
    z = np.linalg.solve(L, y)
    dense = -0.5 * z @ z - np.log(np.diag(L)).sum() - 0.5 * n * np.log(2 * np.pi)
    assert fit.value == pytest.approx(dense, abs=0.5)
    new = np.linspace(1, 9, 50)
    found = state.moments(torch.tensor(new))[0].numpy() * scale
    assert np.abs(found - (function(new) - function(x).mean())).max() < 3e-4 * scale
