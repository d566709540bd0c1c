"""Additive state-space GPs, in bins and in the space of the rows, against dense GPs on the rows."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern

from skgp.data import Data
from skgp.inference.markov.additive import BinnedRows, DistinctRows
from skgp.inference.markov.additive_bins import (
    AdditivePosterior,
    AdditiveStatistics,
    Tables,
    bin_priors,
    make_bins,
)
from skgp.inference.markov.additive_sites import RowsPrior, condition_rows
from skgp.inference.markov.additive_states import BinnedState, RowsState
from skgp.kernels import Cosine, sde_processes, sde_rational, state_space
from skgp.kernels.sde_lags import CORRELATIONS, Covariances
from skgp.learning.markov.additive import RowsElbo
from skgp.learning.markov.search import Component
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.state_space import fit_additive, fit_additive_statistics
from tests.covering import covering, slow_case
from tests.reference.additive import AdditiveGP, component_grams, natural_step
from tests.reference.state_space import assert_draws, by_finite_differences
from tests.reference.vgp import expected_log_prob, maximise_vgp

KERNELS = [1.3 * Matern(0.7, nu=1.5), 0.5 * Matern(1.0, nu=2.5) + 0.2 * Matern(2.0, nu=0.5)]
NOISE = 0.09
GAUSSIAN = Gaussian(NOISE, bounds=(1e-6, 10.0))
FAMILIES = {
    "probit": Bernoulli("probit"),
    "student_t": StudentT(0.02**0.5, 3.0, scale_bounds=(0.01, 1.0), df_bounds=(1.0, 10.0)),
    "poisson": Poisson(),
}
each_family = pytest.mark.parametrize(
    "family", [GAUSSIAN, FAMILIES["probit"], FAMILIES["student_t"]], ids=["gaussian", *FAMILIES][:3]
)
# Values of bins, between them and beyond them.
NEW = torch.tensor(
    [[0.25, 0.5], [0.3, -0.7], [-9.0, 1.0], [1.1, 30.0], [0.25, 0.5]], dtype=torch.float64
)
ROUTES = {
    "rows": {"posterior": "joint"},
    "bins": {"posterior": "joint", "binned": True},
    "mean_field": {"posterior": "mean_field"},
}
each_route = pytest.mark.parametrize("route", ROUTES)
families_and_routes = pytest.mark.parametrize(
    ("family", "route"),
    [
        (GAUSSIAN, "rows"),
        (GAUSSIAN, "mean_field"),
        (FAMILIES["probit"], "bins"),
        (FAMILIES["student_t"], "rows"),
        (FAMILIES["student_t"], "mean_field"),
    ],
    ids=["gaussian-rows", "gaussian-mean_field", "probit-bins", "t-rows", "t-mean_field"],
)
exact_route = pytest.mark.parametrize("route", ["rows", "bins"])


def make_data(n=60, family=GAUSSIAN):
    """Two columns of numbers (n, 2), five rows given twice, and targets."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    X[-5:] = X[:5]
    y = 3 + np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] ** 2 + 0.3 * rng.normal(size=n)
    if family is FAMILIES["probit"]:
        y = np.where(y > 3.2, 1.0, -1.0)
    elif family is FAMILIES["poisson"]:
        y = np.round(np.maximum(y - 2, 0))
    elif family is FAMILIES["student_t"]:
        y[::8] += 4.0
    return torch.from_numpy(X), torch.from_numpy(y)


def fit(X, y, weight=None, family=GAUSSIAN, *, route="rows", kernels=KERNELS, **options):
    mean = float(y.mean() if weight is None else weight @ y / weight.sum())
    options = {"offset": mean if family is GAUSSIAN else 0.3} | ROUTES[route] | options
    if options.pop("binned", False):
        options["bins"] = make_bins(X)
    return fit_additive(kernels, Data(X, y, weight), family, **options)


def fixed(*data, **options):
    """A fit without a search, and its state."""
    found = fit(*data, optimise=False, **options)
    return found.states[0], found


def dynamics_of(kernels=KERNELS):
    return [state_space(kernel).at() for kernel in kernels]


def assert_close(found, expected, tol=1e-8):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tol, atol=tol)


# ---- bins --------------------------------------------------------------------------------------


def test_bins_keep_few_values_as_they_are():
    X, _ = make_data()
    bins = make_bins(X)
    for j, part in enumerate(bins.slices):
        assert_close(bins.values[part], np.unique(X[:, j]), 0)
        assert_close(bins.values[part][bins.index(X)[j].long()], X[:, j], 0)
    assert (bins.spread == 0).all()


def test_bins_of_many_values_bound_mass_and_width():
    rng = np.random.default_rng(1)
    x = torch.from_numpy(np.concatenate([rng.standard_cauchy(5000), np.full(3000, 0.125)]))
    bins = make_bins(x[:, None], n_bins=64)
    index = bins.index(x[:, None])[0].long()
    assert 24 < bins.sizes[0] <= 64
    assert torch.equal(index.unique(), torch.arange(bins.sizes[0]))
    counts = torch.bincount(index)
    assert torch.bincount(index[:5000]).max() <= 2 / 64 * len(x) + 1 and counts.max() >= 3000
    low, high = (
        torch.full_like(bins.values, s * np.inf).scatter_reduce(0, index, x, how)
        for s, how in ((1, "amin"), (-1, "amax"))
    )
    assert (high - low).max() <= 2 / 64 * (x.max() - x.min()) * (1 + 1e-9)
    means = torch.zeros_like(bins.values).index_add_(0, index, x) / counts
    assert_close(bins.values, means, 1e-10)
    assert_close(bins.spread[0], ((x - means[index]) ** 2).mean().sqrt())


def test_bins_share_what_all_columns_may_have():
    X = torch.from_numpy(np.random.default_rng(2).normal(size=(400, 3))).clone()
    X[:, 0] = X[:, 0].round()
    bins = make_bins(X, most_bins=128)
    assert sum(bins.sizes) <= 128 and bins.sizes[0] == len(X[:, 0].unique())
    assert min(bins.sizes[1:]) > 40


def test_bins_take_neighbouring_floats_apart():
    x = torch.tensor([1.0, np.nextafter(1.0, 2.0), np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert make_bins(x[:, None]).index(x[:, None])[0].tolist() == [1, 2, 0]


# ---- Gaussian noise ----------------------------------------------------------------------------


@exact_route
def test_exact_posterior_equals_the_dense_gp(route):
    X, y = make_data()
    (state, found), dense = fixed(X, y, route=route), AdditiveGP(KERNELS, X, y, NOISE)
    assert isinstance(state, RowsState if route == "rows" else BinnedState)
    assert_close(found.value, dense.log_likelihood)
    mean, covariance = dense.moments(NEW)
    assert_close(state.moments(NEW)[0] - float(y.mean()), mean)
    assert_close(state.moments(NEW)[1], np.diagonal(covariance))
    assert_close(state.covariance(NEW)[1], covariance)


@each_route
def test_components_are_those_of_the_dense_gp_about_their_means(route):
    X, y = make_data()
    (state, _), dense = fixed(X, y, route=route), AdditiveGP(KERNELS, X, y, NOISE)
    means, variances = state.components(NEW)
    centring = np.hstack([np.eye(len(NEW)), -np.full((len(NEW), len(X)), 1 / len(X))])
    for j in range(2):
        mean, V = dense.component(j, torch.cat([NEW, X]))
        assert_close(means[:, j], centring @ mean)
        if route != "mean_field":
            assert_close(variances[:, j], np.diagonal(centring @ V @ centring.T))
    assert_close(means.sum(1) + state.offset, state.moments(NEW)[0], 1e-12)
    assert_close(state.components(X)[0].mean(0), np.zeros(2))


def test_mean_field_stays_as_it_is_under_backfitting():
    X, y = make_data()
    state, _ = fixed(X, y, route="mean_field")
    columns = zip(state.series, NEW.T.contiguous(), strict=True)
    fields = torch.stack([each.posterior.marginals(x)[0] for each, x in columns], 1)
    levels = state.components(NEW)[0] - fields
    means = (state.components(X)[0] - levels[0]).numpy()
    residual, covariance = (y - y.mean()).numpy() - means.sum(1), 0.0
    centring = np.eye(len(X)) - 1 / len(X)
    for j, K in enumerate(component_grams(KERNELS, X)):
        mean, V, _ = natural_step(K, means[:, j], residual / NOISE, np.full(len(X), -1 / NOISE))
        assert_close(means[:, j], mean)
        assert_close(state.components(X)[1][:, j], np.diagonal(centring @ V @ centring.T))
        covariance = covariance + V
    assert_close(state.covariance(X)[1], covariance)
    assert_close(state.moments(X)[1], np.diagonal(covariance))


@pytest.mark.parametrize("joint", [False, True])
def test_posterior_gradients_are_those_of_the_normalizer(joint):
    X, y = make_data()
    kernels = [KERNELS[1], 0.8 * Matern(2.0, nu=1.5) * ExpSineSquared(1.0, 2.0)]
    statistics = AdditiveStatistics.empty(make_bins(X), float(y.mean()))
    statistics.add(X, y)
    tables = Tables(statistics.cross, 1 / NOISE, statistics.sums / NOISE)
    forms = [state_space(kernel) for kernel in kernels]
    start = [form.parameters().detach() for form in forms]

    def at(parameters):
        dynamics = [f.at(p) for f, p in zip(forms, parameters, strict=True)]
        return AdditivePosterior(bin_priors(dynamics, statistics.bins.columns), tables, joint)

    sizes = [len(p) for p in start]
    expected = by_finite_differences(lambda p: at(p.split(sizes)).log_normalizer, torch.cat(start))
    assert_close(torch.cat(at(start).gradients()), expected)


def test_statistics_of_batches_are_those_of_all_rows():
    X, y = make_data()
    bins = make_bins(X, n_bins=12)
    statistics = AdditiveStatistics.empty(bins, origin=2.0)
    for rows in (slice(0, 7), slice(7, 40), slice(40, None)):
        statistics.add(X[rows], y[rows])
    stored = pickle.loads(pickle.dumps(statistics))
    streamed = fit_additive_statistics(
        KERNELS, stored, GAUSSIAN, offset=float(y.mean()), max_iter=5
    )
    batch = fit(X, y, route="mean_field", bins=bins, max_iter=5)
    assert streamed.value == pytest.approx(batch.value, rel=1e-9)
    (state,), (expected,) = streamed.states, batch.states
    assert_close(state.moments(NEW)[0], expected.moments(NEW)[0], 1e-7)


@pytest.mark.parametrize("noise", [1e-8, 1e-4, 1e8])
def test_evidence_of_rows_keeps_its_digits_at_any_noise(noise):
    """log N(y | 0, K + noise I) where the variance of the prior is 1e12 times the noise."""
    X = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 2)))
    y = torch.sin(X[:, 0])
    kernels = [5e3 * Matern(7.0, nu=1.5), 50.0 * Matern(3.0, nu=2.5)]
    weight = torch.full_like(y, 1 / noise)
    prior = RowsPrior(dynamics_of(kernels), X.T.contiguous())
    posterior = condition_rows(prior, weight * y, weight)
    found = posterior.log_normalizer - 0.5 * float(weight @ y**2)
    found -= 0.5 * len(y) * np.log(2 * np.pi * noise)
    A = sum(component_grams(kernels, X)) + noise * np.eye(len(y))
    alpha = np.linalg.solve(A, y.numpy())
    expected = -0.5 * (y.numpy() @ alpha + np.linalg.slogdet(2 * np.pi * A)[1])
    assert abs(found - expected) < 1e-5 * (1 + abs(expected))
    np.testing.assert_allclose(posterior.alpha, alpha, rtol=1e-4, atol=1e-6 * np.abs(alpha).max())


# ---- covariances of the rows -------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernels",
    [
        slow_case(KERNELS),
        [0.7 * RBF(0.5) + 2.0, Matern(1.0, nu=0.5) * Cosine(1.3)],
        [1.0 * Matern(2.0, nu=1.5) * ExpSineSquared(1.5, 1.2), Matern(1.0, nu=1.5)],
    ],
    ids=["matern", "rbf_constant_cosine", "periodic"],
)
def test_covariances_are_those_of_the_kernels(kernels, monkeypatch):
    monkeypatch.setattr("skgp.kernels.sde_lags.COVARIANCES", 100)
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
        parts = parameters.split([len(p) for p in start])
        dynamics = [form.at(p) for form, p in zip(forms, parts, strict=True)]
        return (Covariances(dynamics).symmetric(x) * K_bar).sum()

    found = Covariances(dynamics_of(kernels)).gradient(x, K_bar)
    assert_close(torch.cat(found), by_finite_differences(contraction, torch.cat(start)), 1e-7)


def test_covariances_know_every_process():
    processes = [
        each for each in vars(sde_processes).values() if isinstance(each, sde_processes.Primitive)
    ]
    processes = [each for each in processes if each.is_stationary and not each.has_shape]
    processes += [sde_rational.GAUSSIAN4, sde_rational.GAUSSIAN6]  # finer ones are of series
    assert {each.name for each in processes} == set(CORRELATIONS)


# ---- other likelihoods -------------------------------------------------------------------------


@covering(family=FAMILIES.values(), joint=[False, True])
def test_sites_in_bins_stay_as_they_are_under_a_dense_natural_step(family, joint):
    X, y = make_data(80, family)
    likelihood, bins = family.with_parameters(family.initial(y)), make_bins(X)
    rows = BinnedRows(bins=bins, index=bins.index(X), y=y, weight=None, offset=0.3, joint=joint)
    objective = RowsElbo(rows, family, tol=1e-16, max_iter=200)
    found = objective(dynamics_of(), family.initial(y))
    mean, var = rows.moments(found.posterior)
    first, second = (d.numpy() for d in likelihood.expected_derivatives(y, mean, var))
    parts = [
        found.posterior.mean[p][i.long()] for p, i in zip(bins.slices, rows.index, strict=True)
    ]
    means, priors = torch.stack(parts).numpy(), component_grams(KERNELS, X)
    if joint:  # one Gaussian for the sum
        means, priors = means.sum(0)[None], [sum(priors)]
    new_var, divergence = 0.0, 0.0
    for K, old in zip(priors, means, strict=True):
        new, V, kl = natural_step(K, old, first, second)
        assert_close(old, new, 1e-5)
        new_var, divergence = new_var + np.diagonal(V), divergence + kl
    assert_close(var, new_var, 1e-5)
    elbo = float(expected_log_prob(likelihood, y, mean, var).sum()) - divergence
    assert found.value == pytest.approx(elbo, rel=1e-7)


@pytest.mark.parametrize("name", ["probit", "student_t"])
def test_sites_of_rows_stay_as_they_are_under_a_dense_natural_step(name):
    family = FAMILIES[name]
    X, y = make_data(40, family)
    rows = DistinctRows.of(X, y=y, weight=None, offset=0.3)
    found = RowsElbo(rows, family, tol=1e-13, max_iter=200)(dynamics_of(), family.initial(y))
    q = found.posterior
    assert (name == "student_t") == bool((q.weight < 0).any())
    likelihood = family.with_parameters(family.initial(y))
    mean, var = rows.moments(q)
    slopes = likelihood.expected_derivatives(rows.y, mean, var)
    first, second = (rows.sums(each).numpy() for each in slopes)
    K = sum(component_grams(KERNELS, rows.x.T))
    new, V, divergence = natural_step(K, q.mean.numpy(), first, second)
    assert_close(q.mean, new, 1e-5)
    assert_close(q.var, np.diagonal(V), 1e-5)
    expected = likelihood.expected_log_prob(rows.y, mean, var).sum()
    assert found.value == pytest.approx(float(expected) - divergence, rel=1e-7)


def test_labels_have_the_best_gaussian_of_all():
    family = FAMILIES["probit"]
    X, y = make_data(10, family)
    rows = DistinctRows.of(X, y=y, weight=None, offset=0.3)
    found = RowsElbo(rows, family, tol=1e-13)(dynamics_of(), y[:0])
    K = torch.from_numpy(sum(component_grams(KERNELS, rows.x.T)))
    likelihood = family.with_parameters(y[:0])
    bound, mean, var = maximise_vgp(likelihood, K, rows.index, rows.y, offset=0.3)
    assert found.value == pytest.approx(bound, abs=1e-8)
    assert_close(found.posterior.mean, mean, 1e-4)
    assert_close(found.posterior.var, var, 1e-4)


@each_family
def test_state_of_rows_predicts_what_its_posterior_says(family):
    X, y = make_data(40, family)
    state, _ = fixed(X, y, family=family, offset=0.3)
    rows = DistinctRows.of(X, y=y, weight=None, offset=0.3)
    K = sum(component_grams(KERNELS, rows.x.T))
    cross, prior = sum(component_grams(KERNELS, NEW, rows.x.T)), sum(component_grams(KERNELS, NEW))
    W = np.diag(state.weight.numpy())
    alpha = np.linalg.solve(np.eye(len(K)) + W @ K, state.beta.numpy())
    V = prior - cross @ np.linalg.solve(np.eye(len(K)) + W @ K, W) @ cross.T
    assert_close(state.moments(NEW)[0], 0.3 + cross @ alpha, 1e-8)
    assert_close(state.moments(NEW)[1], np.diagonal(V), 1e-8)
    assert_close(state.covariance(NEW)[1], V, 1e-8)


# ---- fits ----------------------------------------------------------------------------------------


@families_and_routes
def test_weights_are_repeated_rows(family, route):
    X, y = make_data(40, family)
    counts = torch.arange(len(y)) % 3 + 1
    weighted, state = fixed(X, y, counts.double(), family, route=route)[::-1]
    X2, y2 = (t.repeat_interleave(counts, 0) for t in (X, y))
    repeated, expected = fixed(X2, y2, None, family, route=route)[::-1]
    assert weighted.value == pytest.approx(repeated.value, rel=1e-9)
    for a, b in zip(state.components(NEW), expected.components(NEW), strict=True):
        assert_close(a, b, 1e-7)


@families_and_routes
def test_search_climbs_the_evidence_to_where_it_is_level(family, route):
    X, y = make_data(40, family)
    options = {"offset": 2.5, "route": route}
    found = fit(X, y, family=family, tol=1e-10, **options)
    (state,) = found.states
    assert (np.diff(found.history) > -1e-9).all() and found.n_iter == len(found.history)
    of_prior = float(family.log_prior(found.parameters))
    assert found.history[-1] * len(y) == pytest.approx(found.value + of_prior, abs=1e-4)
    assert found.value > fixed(X, y, family=family, **options)[1].value + 0.1
    options |= {"parameters": found.parameters, "family": family}
    for j, kernel in enumerate(state.kernels):
        for step in (-0.2, 0.2):
            kernels = list(state.kernels)
            kernels[j] = kernel.clone_with_theta(np.clip(kernel.theta + step, *kernel.bounds.T))
            assert fixed(X, y, kernels=kernels, **options)[1].value < found.value + 1e-5


def test_search_learns_the_parameters_of_the_likelihood():
    family = StudentT(1.0, 10.0, scale_bounds=(0.01, 3.2), df_bounds=(1.0, 100.0))
    X, y = make_data(100, FAMILIES["student_t"])
    start = fixed(X, y, family=family, route="mean_field")[1]
    found = fit(X, y, family=family, route="mean_field", max_iter=30)
    assert found.value > start.value + 10 and found.parameters.exp()[0] < 0.3
    assert (np.diff(found.history) > -1e-8).all()


def test_search_sets_a_useless_component_aside_within_bounds():
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.normal(size=(40, 2)))
    kernels = [1.0 * Matern(1.0, nu=1.5), 1.0 * Matern(1.0, nu=1.5)]
    kernels[1].k1.constant_value_bounds = (1e-3, 10.0)
    (state,) = fit(X, X[:, 0].sin(), kernels=kernels, posterior="auto").states
    assert np.exp(state.kernels[1].theta[0]) < 0.01
    assert (state.kernels[1].theta >= state.kernels[1].bounds[:, 0]).all()


@pytest.mark.parametrize(
    "kernel", [KERNELS[1], 2.0 * Matern(2.0) * ExpSineSquared(1.5, 1.2)], ids=["affine", "curved"]
)
def test_component_pulls_gradients_as_autograd_does(kernel):
    component = Component(kernel)
    theta = (component.theta + 0.3).requires_grad_()
    parameters = component.form.parameters(theta)
    slope = torch.linspace(-1, 1.5, len(parameters), dtype=torch.float64)
    expected = torch.autograd.grad(parameters @ slope, theta)[0]
    assert_close(component.pull(theta.detach(), slope), expected, 1e-12)
    assert_close(component.parameters(theta.detach()), parameters.detach(), 1e-12)
    assert component.is_amplitude.any() == (kernel is KERNELS[1])


def test_route_is_by_posterior_rows_and_bins():
    X = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 2)))
    y, probit = X[:, 0].sin(), FAMILIES["probit"]

    def kind(X, y, family=GAUSSIAN, posterior="auto"):
        state, _ = fixed(X, y, family=family, posterior=posterior)
        return type(state), getattr(state, "coupling", 1) is not None

    assert kind(X, y) == kind(X, y, posterior="joint") == (RowsState, True)
    assert kind(X, y, posterior="mean_field") == (BinnedState, False)
    assert kind((2 * X).round(), y) == (BinnedState, True)
    assert kind(X, y.sign(), probit) == (RowsState, True)
    assert kind(X.repeat(80, 1), y.sign().repeat(80), probit) == (BinnedState, False)
    assert kind(X.repeat(80, 1), y.repeat(80)) == (BinnedState, True)


@each_route
def test_samples_have_the_moments_of_the_posterior(route):
    (state, _), n_samples = fixed(*make_data(), route=route), 4000
    draws = state.samples(NEW, n_samples, torch.Generator().manual_seed(0))
    assert_draws(draws, *state.covariance(NEW))
    assert_close(draws[0], draws[4], 1e-6)


def test_bad_arguments_are_named():
    X, y = make_data()
    with pytest.raises(ValueError, match="n_bins must be at least 2"):
        fit(X, y, n_bins=1)
    with pytest.raises(ValueError, match="2 columns that the bins were made of"):
        make_bins(X).index(X[:, :1])
