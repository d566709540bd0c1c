"""Additive GPs of few rows, in the rows' own space, against dense GPs and against bins."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern

from skgp.inference.markov.additive.binning import make_bins
from skgp.inference.markov.additive.covariances import _CORRELATIONS, Covariances
from skgp.inference.markov.additive.dense import DensePrior, condition
from skgp.inference.markov.additive.rows_state import RowsState
from skgp.inference.markov.additive.state import BinnedState
from skgp.kernels import Cosine, sde_primitives, sde_rational, state_space
from skgp.kernels.sde_primitives import Primitive
from skgp.learning.markov.additive_objectives import VariationalRows
from skgp.learning.markov.kernel_parameters import KernelParameters
from skgp.likelihoods import Bernoulli, Gaussian, StudentT
from skgp.models.state_space.additive import fit_additive
from skgp.models.state_space.rows import make_rows
from tests.reference.additive import AdditiveGP, component_grams, natural_step
from tests.reference.vgp import maximise_vgp

KERNELS = [1.3 * Matern(0.7, nu=1.5), 0.5 * Matern(1.0, nu=2.5) + 0.2 * Matern(2.0, nu=0.5)]
NOISE = 0.09
GAUSSIAN = Gaussian(NOISE, bounds=(1e-6, 10.0))
STUDENT = StudentT(0.02**0.5, 3.0, scale_bounds=(0.01, 1.0), df_bounds=(1.0, 10.0))
FAMILIES = {"probit": Bernoulli("probit"), "student_t": STUDENT}
NEW = torch.tensor([[0.3, -0.7], [-9.0, 1.0], [0.1, 30.0]], dtype=torch.float64)


def make_data(n=40, seed=0, family=GAUSSIAN):
    """Rows of two columns of numbers, five of them given twice, and targets."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    X[-5:] = X[:5]
    y = 3 + np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] ** 2 + 0.3 * rng.normal(size=n)
    if not family.free_parameters():
        y = np.where(y > 3.2, 1.0, -1.0)
    if family is STUDENT:
        y[::8] += 4.0
    return torch.from_numpy(X), torch.from_numpy(y)


def fixed_fit(X, y, weight=None, family=GAUSSIAN, **options):
    """A fit without a search."""
    options = {"posterior": "auto", "optimise": False} | options
    return fit_additive(KERNELS, X, y, weight, family, **options)


def dynamics_of(kernels):
    forms = [state_space(kernel) for kernel in kernels]
    return [form.at() for form in forms]


def assert_close(found, expected, tol=1e-9):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "kernels",
    [
        KERNELS,
        [0.7 * RBF(0.5) + 2.0, Matern(1.0, nu=0.5) * Cosine(1.3)],
        [1.0 * Matern(2.0, nu=1.5) * ExpSineSquared(1.5, 1.2), Matern(1.0, nu=1.5)],
    ],
    ids=["matern", "rbf_constant_cosine", "periodic"],
)
def test_covariances_are_those_of_the_kernels(kernels, monkeypatch):
    monkeypatch.setattr("skgp.inference.markov.additive.covariances._TILE", 100)
    X, _ = make_data()
    found, expected = Covariances(dynamics_of(kernels)), component_grams(kernels, NEW, X)
    x, new = X.T.contiguous(), NEW.T.contiguous()
    assert_close(found.each(new, x), np.stack(expected), 1e-8)
    assert_close(found.total(new, x), sum(expected), 1e-8)
    assert_close(found.symmetric(x), sum(component_grams(kernels, X)), 1e-8)
    own = [np.diagonal(K).max() for K in component_grams(kernels, X)]
    assert_close(found.variances, own, 1e-8)
    shares = torch.linspace(0, 1, len(X), dtype=torch.float64)
    assert_close(found.levels(x, shares), found.each(x, x) @ shares, 1e-13)


def test_covariance_gradients_are_those_of_differences():
    X, _ = make_data(12)
    kernels = [KERNELS[1], 2.0 * Matern(2.0, nu=1.5) * Cosine(1.2) + 1.0 * RBF(1.1) + 0.5]
    x, K_bar = X.T.contiguous(), torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    K_bar = (K_bar + K_bar.T).double()
    forms = [state_space(kernel) for kernel in kernels]
    start = [form.parameters().detach() for form in forms]

    def contraction(parameters):
        dynamics = [form.at(p) for form, p in zip(forms, parameters, strict=True)]
        return float((Covariances(dynamics).symmetric(x) * K_bar).sum())

    found = Covariances(dynamics_of(kernels)).gradient(x, K_bar)
    for j, p in enumerate(start):
        for i in range(len(p)):
            values = []
            for step in (1e-5, -1e-5):
                moved = [each.clone() for each in start]
                moved[j][i] += step
                values.append(contraction(moved))
            assert float(found[j][i]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_covariances_know_every_process():
    processes = [
        each
        for module in (sde_primitives, sde_rational)
        for each in vars(module).values()
        if isinstance(each, Primitive)
    ]
    assert {each.name for each in processes} == set(_CORRELATIONS)


def test_gaussian_rows_equal_dense_gp():
    X, y = make_data()
    state, dense = fixed_fit(X, y), AdditiveGP(KERNELS, X, y, NOISE)
    assert isinstance(state, RowsState) and state.posterior == "joint" and len(state.X) == 35
    assert_close(state.elbo, dense.log_likelihood)
    mean, covariance = dense.moments(NEW)
    assert_close(state.moments(NEW)[0] - float(y.mean()), mean)
    assert_close(state.moments(NEW)[1], np.diagonal(covariance))
    assert_close(state.covariance(NEW)[1], covariance)


def test_gaussian_components_equal_those_of_dense_gp():
    X, y = make_data()
    state, dense = fixed_fit(X, y), AdditiveGP(KERNELS, X, y, NOISE)
    means, variances = state.components(NEW)
    centring = np.hstack([np.eye(len(NEW)), -np.full((len(NEW), len(X)), 1 / len(X))])
    for j in range(2):
        mean, V = dense.component(j, torch.cat([NEW, X]))
        assert_close(means[:, j], centring @ mean)
        assert_close(variances[:, j], np.diagonal(centring @ V @ centring.T))
    assert_close(means.sum(1) + state.offset, state.moments(NEW)[0], 1e-12)
    assert_close(state.components(X)[0].mean(0), np.zeros(2))


def test_rows_and_bins_agree():
    X, y = make_data()
    weight = torch.linspace(0.5, 2, len(y), dtype=torch.float64)
    rows = fixed_fit(X, y, weight)
    bins = fixed_fit(X, y, weight, bins=make_bins(X), offset=float(weight @ y / weight.sum()))
    assert isinstance(bins, BinnedState) and bins.posterior == "joint"
    assert_close([rows.elbo, rows.offset], [bins.elbo, bins.offset], 1e-8)
    for name in ("moments", "components", "covariance"):
        for found, expected in zip(getattr(rows, name)(NEW), getattr(bins, name)(NEW), strict=True):
            assert_close(found, expected, 1e-8)


@pytest.mark.parametrize("family", [GAUSSIAN, *FAMILIES.values()], ids=["gaussian", *FAMILIES])
def test_weights_are_repeated_rows(family):
    X, y = make_data(family=family)
    counts = torch.arange(len(y)) % 3 + 1
    weighted = fit_additive(KERNELS, X, y, counts.double(), family, posterior="auto", max_iter=4)
    X2, y2 = (t.repeat_interleave(counts, 0) for t in (X, y))
    repeated = fit_additive(KERNELS, X2, y2, None, family, posterior="auto", max_iter=4)
    assert_close(weighted.elbo, repeated.elbo, 1e-7)
    for found, expected in zip(weighted.components(NEW), repeated.components(NEW), strict=True):
        assert_close(found, expected, 1e-6)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_sites_stay_as_they_are_under_a_dense_natural_step(family):
    X, y = make_data(family=family)
    rows = make_rows(X, y, None, 0.3)
    objective = VariationalRows(rows, family, tol=1e-13, max_iter=200)
    found = objective(dynamics_of(KERNELS), family.initial(y))
    q = found.posterior
    assert (family is STUDENT) == bool((q.weight < 0).any())
    likelihood = family.with_parameters(family.initial(y))
    mean, var = (rows.series.at_rows(each) for each in (q.mean, q.var))
    slopes = likelihood.expected_derivatives(rows.y, mean + rows.offset, var)
    first, second = (rows.sums(each).numpy() for each in slopes)
    new, V, divergence = natural_step(
        sum(component_grams(KERNELS, rows.x.T)), q.mean.numpy(), first, second
    )
    assert_close(q.mean, new, 1e-5)
    assert_close(q.var, np.diagonal(V), 1e-5)
    expected = likelihood.expected_log_prob(rows.y, mean + rows.offset, var).sum()
    assert found.value == pytest.approx(float(expected) - divergence, rel=1e-7)


def test_labels_have_the_best_gaussian_of_all():
    family = FAMILIES["probit"]
    X, y = make_data(10, family=family)
    rows = make_rows(X, y, None, 0.3)
    found = VariationalRows(rows, family, tol=1e-13)(dynamics_of(KERNELS), y[:0])
    K = torch.from_numpy(sum(component_grams(KERNELS, rows.x.T)))
    likelihood = family.with_parameters(y[:0])
    bound, mean, var = maximise_vgp(likelihood, K, rows.series.index, rows.y, offset=0.3)
    assert found.value == pytest.approx(bound, abs=1e-8)
    assert_close(found.posterior.mean, mean, 1e-4)
    assert_close(found.posterior.var, var, 1e-4)


@pytest.mark.parametrize("family", [GAUSSIAN, *FAMILIES.values()], ids=["gaussian", *FAMILIES])
def test_state_predicts_what_its_posterior_says(family):
    X, y = make_data(family=family)
    state = fixed_fit(X, y, family=family, offset=0.3)
    rows = make_rows(X, y, None, 0.3)
    K = sum(component_grams(KERNELS, rows.x.T))
    cross, prior = sum(component_grams(KERNELS, NEW, rows.x.T)), sum(component_grams(KERNELS, NEW))
    W = np.diag(state.weight.numpy())
    alpha = np.linalg.solve(np.eye(len(K)) + W @ K, state.beta.numpy())
    V = prior - cross @ np.linalg.solve(np.eye(len(K)) + W @ K, W) @ cross.T
    assert_close(state.moments(NEW)[0], 0.3 + cross @ alpha)
    assert_close(state.moments(NEW)[1], np.diagonal(V))
    assert_close(state.covariance(NEW)[1], V)


@pytest.mark.parametrize("family", [GAUSSIAN, *FAMILIES.values()], ids=["gaussian", *FAMILIES])
def test_search_climbs_to_where_the_evidence_is_level(family):
    X, y = make_data(family=family)
    options = {"posterior": "auto", "offset": 2.5}
    state = fit_additive(KERNELS, X, y, None, family, tol=1e-10, **options)
    assert (np.diff(state.history) > -1e-9).all() and state.n_iter == len(state.history)
    assert state.history[-1] * len(y) == pytest.approx(state.elbo, abs=1e-5)
    assert state.elbo > fixed_fit(X, y, family=family, **options).elbo + 0.1
    options |= {"optimise": False, "parameters": state.parameters}
    for j, kernel in enumerate(state.kernels):
        for step in (-0.2, 0.2):
            kernels = list(state.kernels)
            kernels[j] = kernel.clone_with_theta(np.clip(kernel.theta + step, *kernel.bounds.T))
            other = fit_additive(kernels, X, y, None, family, **options)
            assert other.elbo < state.elbo


def test_search_sets_a_useless_component_aside_within_bounds():
    X, y = make_data()
    kernels = [1.0 * Matern(1.0, nu=1.5), 1.0 * Matern(1.0, nu=1.5)]
    kernels[1].k1.constant_value_bounds = (1e-3, 10.0)
    noise = torch.from_numpy(np.random.default_rng(1).normal(size=len(y)))
    X = torch.stack([X[:, 0], noise], 1)
    state = fit_additive(kernels, X, X[:, 0].sin(), None, GAUSSIAN, posterior="auto")
    assert np.exp(state.kernels[1].theta[0]) < 0.01
    assert (state.kernels[1].theta >= state.kernels[1].bounds[:, 0]).all()


@pytest.mark.parametrize(
    "kernel", [KERNELS[1], 2.0 * Matern(2.0) * ExpSineSquared(1.5, 1.2)], ids=["affine", "curved"]
)
def test_component_pulls_gradients_as_autograd_does(kernel):
    component = KernelParameters(kernel)
    theta = (component.start + 0.3).requires_grad_()
    parameters = component.form.parameters(theta)
    slope = torch.linspace(-1, 1.5, len(parameters), dtype=torch.float64)
    expected = torch.autograd.grad(parameters @ slope, theta)[0]
    assert_close(component.pull(theta.detach(), slope), expected, 1e-12)
    assert_close(component.parameters(theta.detach()), parameters.detach(), 1e-12)
    assert component.is_amplitude.any() == (kernel is KERNELS[1])


def test_route_is_by_posterior_rows_and_bins():
    X, y = make_data()
    assert isinstance(fixed_fit(X, y, posterior="joint"), RowsState)
    assert fixed_fit(X, y, posterior="mean_field").posterior == "mean_field"
    coarse = (2 * X).round()
    assert isinstance(fixed_fit(coarse, y), BinnedState)
    labels = (y - 3).sign()
    assert fixed_fit(X, labels, family=FAMILIES["probit"]).posterior == "joint"
    many, labels = X.repeat(80, 1), labels.repeat(80)
    assert fixed_fit(many, labels, family=FAMILIES["probit"]).posterior == "mean_field"
    assert fixed_fit(many, y.repeat(80)).posterior == "joint"


def test_state_pickles_small_and_predicts_the_same():
    X, y = make_data(100)
    state = fixed_fit(X, y)
    expected = state.moments(NEW)
    data = pickle.dumps(state)
    assert len(data) < 8 * 5 * 100 + 4000
    for found, value in zip(pickle.loads(data).moments(NEW), expected, strict=True):
        assert_close(found, value, 0)


def test_samples_have_the_moments_of_the_posterior():
    X, y = make_data()
    state, n_samples = fixed_fit(X, y), 4000
    draws = state.samples(NEW, n_samples, torch.Generator().manual_seed(0))
    mean, covariance = state.covariance(NEW)
    z = (draws.mean(1) - mean) / (covariance.diagonal() / n_samples).sqrt()
    assert z.abs().max() < 4
    variances = covariance.diagonal()
    error = ((variances[:, None] * variances + covariance**2) / n_samples).sqrt()
    assert ((torch.cov(draws) - covariance) / error).abs().max() < 4


@pytest.mark.parametrize("noise", [1e-8, 1e-4, 1e8])
def test_evidence_keeps_its_digits_at_any_noise(noise):
    """log N(y | 0, K + noise I) where the variance of the prior is 1e12 times the noise."""
    X, _ = make_data()
    X = X + 0.01 * torch.arange(len(X))[:, None]  # all rows differ
    y = torch.sin(X[:, 0])
    kernels = [5e3 * Matern(7.0, nu=1.5), 50.0 * Matern(3.0, nu=2.5)]
    prior = DensePrior(dynamics_of(kernels), X.T.contiguous())
    weight = torch.full_like(y, 1 / noise)
    posterior = condition(prior, weight * y, weight)
    found = posterior.log_normalizer - 0.5 * float(weight @ y**2)
    found -= 0.5 * len(y) * np.log(2 * np.pi * noise)
    A = sum(component_grams(kernels, X)) + noise * np.eye(len(y))
    alpha = np.linalg.solve(A, y.numpy())
    expected = -0.5 * (y.numpy() @ alpha + np.linalg.slogdet(2 * np.pi * A)[1])
    assert abs(found - expected) < 1e-5 * (1 + abs(expected))
    np.testing.assert_allclose(posterior.alpha, alpha, rtol=1e-4, atol=1e-6 * np.abs(alpha).max())
