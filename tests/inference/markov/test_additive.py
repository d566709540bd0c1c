"""Additive state-space GPs against dense GPs on the rows, and against dense mean fields."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import ExpSineSquared, Matern

from skgp.inference.markov.additive.binning import make_bins
from skgp.inference.markov.additive.inference import AdditivePosterior, Prior, Tables
from skgp.inference.markov.additive.tables import AdditiveStatistics
from skgp.kernels.sde import state_space
from skgp.learning.markov.additive_objectives import VariationalRows
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.models.state_space.additive import fit_additive, fit_additive_statistics
from skgp.models.state_space.binned import BinnedRows
from tests.reference.additive import AdditiveGP, component_grams, natural_step
from tests.reference.vgp import expected_log_prob

KERNELS = [1.3 * Matern(0.7, nu=1.5), 0.5 * Matern(1.0, nu=2.5) + 0.2 * Matern(2.0, nu=0.5)]
NOISE = 0.09


def make_rows(n=60, seed=0):
    """Two correlated columns of few values (n, 2), and a sum of functions of them."""
    rng = np.random.default_rng(seed)
    first = rng.integers(-8, 9, n) / 4
    X = np.column_stack([first, np.round(2 * first + rng.normal(size=n)) / 2])
    y = 3 + np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] ** 2 + 0.3 * rng.normal(size=n)
    return torch.from_numpy(X), torch.from_numpy(y)


def targets_of(family, y):
    """Counts, labels or numbers made of y."""
    if isinstance(family, StudentT):
        return y + torch.where(torch.arange(len(y)) % 10 == 0, 4.0, 0.0).to(y)
    if isinstance(family, Poisson):
        return (y - 2).clamp(min=0).round()
    return torch.where(y > y.mean(), 1.0, -1.0).to(y)


def noise_family(variance=NOISE):
    return Gaussian(variance, bounds=(1e-6, 10.0))


def fixed_fit(X, y, weight=None, family=None, **options):
    """A fit without a search."""
    family = noise_family() if family is None else family
    return fit_additive(KERNELS, X, y, weight, family, optimise=False, **options)


def grams(X, Z=None):
    """Covariances of the components, in NumPy."""
    return component_grams(KERNELS, X, Z)


def dense_gp(X, y):
    """An exact additive GP on the rows."""
    return AdditiveGP(KERNELS, X, y, NOISE)


def new_inputs():
    """Bins, values between them and values beyond them, (5, 2)."""
    return torch.tensor(
        [[0.25, 0.5], [0.3, -0.7], [-9.0, 1.0], [1.1, 30.0], [0.25, 0.5]], dtype=torch.float64
    )


def assert_close(found, expected, tol=1e-9):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=tol, atol=tol)


def test_bins_keep_few_values_as_they_are():
    X, _ = make_rows()
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


def test_joint_posterior_equals_dense_gp():
    X, y = make_rows()
    state, dense, new = fixed_fit(X, y, posterior="joint"), dense_gp(X, y), new_inputs()
    assert_close(state.elbo, dense.log_likelihood)
    mean, covariance = dense.moments(new)
    found_mean, var = state.moments(new)
    assert_close(found_mean - float(y.mean()), mean)
    assert_close(var, np.diagonal(covariance))
    assert_close(state.covariance(new)[1], covariance)


@pytest.mark.parametrize("posterior", ["mean_field", "joint"])
def test_means_are_those_of_the_dense_gp_and_components_sum_to_them(posterior):
    X, y = make_rows()
    state, dense, new = fixed_fit(X, y, posterior=posterior), dense_gp(X, y), new_inputs()
    means, _ = state.components(new)
    for j in range(2):
        expected = dense.component(j, new)[0] - dense.component(j, X)[0].mean()
        assert_close(means[:, j], expected)
    assert_close(means.sum(1) + state.offset, state.moments(new)[0], 1e-12)
    assert_close(state.components(X)[0].mean(0), np.zeros(2))


def test_joint_component_variances_equal_those_of_the_dense_gp():
    X, y = make_rows()
    state, dense, new = fixed_fit(X, y, posterior="joint"), dense_gp(X, y), new_inputs()
    centring = np.hstack([np.eye(len(new)), -np.full((len(new), len(X)), 1 / len(X))])
    for j in range(2):
        V = dense.component(j, torch.cat([new, X]))[1]
        expected = np.diagonal(centring @ V @ centring.T)
        assert_close(state.components(new)[1][:, j], expected)


def test_mean_field_stays_as_it_is_under_backfitting():
    X, y = make_rows()
    state = fixed_fit(X, y)
    levels = state.components(new_inputs())[0] - torch.stack(
        [
            each.posterior.marginals(x)[0]
            for each, x in zip(state.series, new_inputs().T.contiguous(), strict=True)
        ],
        1,
    )
    means = (state.components(X)[0] - levels[0]).numpy()
    residual, covariance = (y - y.mean()).numpy() - means.sum(1), 0.0
    centring = np.eye(len(X)) - 1 / len(X)
    for j, K in enumerate(grams(X)):
        mean, V, _ = natural_step(K, means[:, j], residual / NOISE, np.full(len(X), -1 / NOISE))
        assert_close(means[:, j], mean)
        assert_close(state.components(X)[1][:, j], np.diagonal(centring @ V @ centring.T))
        covariance = covariance + V
    assert_close(state.covariance(X)[1], covariance)
    assert_close(state.moments(X)[1], np.diagonal(covariance))


@pytest.mark.parametrize("joint", [False, True])
def test_posterior_gradients_are_those_of_the_normalizer(joint):
    X, y = make_rows()
    kernels = [KERNELS[1], 0.8 * Matern(2.0, nu=1.5) * ExpSineSquared(1.0, 2.0)]
    statistics = AdditiveStatistics.empty(make_bins(X), float(y.mean()))
    statistics.add(X, y)
    tables = Tables(statistics.cross, 1 / NOISE, statistics.sums / NOISE)
    times = [statistics.bins.values[part] for part in statistics.bins.slices]
    forms = [state_space(kernel) for kernel in kernels]
    start = [form.parameters().detach() for form in forms]

    def at(parameters):
        dynamics = [f.at(p) for f, p in zip(forms, parameters, strict=True)]
        return AdditivePosterior(Prior.of_each(dynamics, times), tables, joint)

    direction = [torch.linspace(-1, 1.2, len(p), dtype=torch.float64) for p in start]
    step = 1e-5
    up, down = (
        at([p + s * d for p, d in zip(start, direction, strict=True)]).log_normalizer
        for s in (step, -step)
    )
    gradients = at(start).gradients()
    slope = sum(float(g @ d) for g, d in zip(gradients, direction, strict=True))
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-7)


@pytest.mark.parametrize("posterior", ["mean_field", "joint"])
def test_search_climbs_the_evidence_to_where_it_is_level(posterior):
    X, y = make_rows()
    state = fit_additive(KERNELS, X, y, None, noise_family(1.0), posterior=posterior, tol=1e-12)
    assert (np.diff(state.history) > -1e-10).all() and state.n_iter == len(state.history)
    assert state.history[-1] * len(y) == pytest.approx(state.elbo, rel=1e-7)
    for factor in (0.9, 1.1):
        other = fit_additive(
            state.kernels, X, y, None, noise_family(state.noise * factor), optimise=False,
            posterior=posterior,
        )  # fmt: skip
        assert other.elbo < state.elbo
        kernels = [
            state.kernels[0].clone_with_theta(state.kernels[0].theta * factor),
            state.kernels[1],
        ]
        family = noise_family(state.noise)
        other = fit_additive(kernels, X, y, None, family, optimise=False, posterior=posterior)
        assert other.elbo < state.elbo


def test_weights_are_repeated_rows():
    X, y = make_rows()
    counts = torch.arange(len(y)) % 3 + 1
    repeated = [t.repeat_interleave(counts, 0) for t in (X, y)]
    for family in (noise_family(), Bernoulli()):
        labels = [t if family.is_gaussian else (t - 3).sign() for t in (y, repeated[1])]
        weighted = fixed_fit(X, labels[0], counts.double(), family, n_bins=12)
        state = fixed_fit(repeated[0], labels[1], None, family, n_bins=12)
        assert weighted.elbo == pytest.approx(state.elbo, rel=1e-10)
        for found, expected in zip(weighted.components(X), state.components(X), strict=True):
            assert_close(found, expected, 1e-8)


def test_statistics_of_batches_are_those_of_all_rows():
    X, y = make_rows()
    bins = make_bins(X, n_bins=12)
    statistics = AdditiveStatistics.empty(bins, origin=2.0)
    for rows in (slice(0, 7), slice(7, 40), slice(40, None)):
        statistics.add(X[rows], y[rows])
    streamed = fit_additive_statistics(
        KERNELS, pickle.loads(pickle.dumps(statistics)), noise_family(), max_iter=5
    )
    batch = fit_additive(KERNELS, X, y, None, noise_family(), bins=bins, max_iter=5)
    assert streamed.elbo == pytest.approx(batch.elbo, rel=1e-9)
    assert_close(streamed.moments(new_inputs())[0], batch.moments(new_inputs())[0], 1e-7)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        Bernoulli("probit"),
        Poisson(),
        StudentT(0.2**0.5, 4.0, scale_bounds=(0.01, 1.0)),
    ],
    ids=["probit", "poisson", "student_t"],
)
def test_sites_stay_as_they_are_under_a_dense_natural_step(family, joint):
    X, y = make_rows(100)
    y = targets_of(family, y)
    likelihood = family.with_parameters(family.initial(y))
    bins = make_bins(X)
    rows = BinnedRows(bins, bins.index(X), y, None, 0.3, joint)
    objective = VariationalRows(rows, family, tol=1e-16, max_iter=200)
    forms = [state_space(kernel) for kernel in KERNELS]
    found = objective([f.at() for f in forms], family.initial(y))
    mean, var = rows.moments(found.posterior)
    first, second = (d.numpy() for d in likelihood.expected_derivatives(y, mean, var))
    parts = [
        found.posterior.mean[p][i.long()] for p, i in zip(bins.slices, rows.index, strict=True)
    ]
    means, priors = torch.stack(parts).numpy(), grams(X)
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


def test_search_learns_the_parameters_of_the_likelihood():
    X, y = make_rows(100)
    family = StudentT(1.0, 10.0, scale_bounds=(0.01, 3.2), df_bounds=(1.0, 100.0))
    y = targets_of(family, y)
    start = fixed_fit(X, y, family=family)
    state = fit_additive(KERNELS, X, y, None, family, max_iter=30)
    assert state.elbo > start.elbo + 10 and state.parameters.exp()[0] < 0.3
    assert (np.diff(state.history) > -1e-8).all()


@pytest.mark.parametrize("posterior", ["mean_field", "joint"])
def test_samples_have_the_moments_of_the_posterior(posterior):
    X, y = make_rows()
    state, new = fixed_fit(X, y, posterior=posterior), new_inputs()
    n_samples = 4000
    draws = state.samples(new, n_samples, torch.Generator().manual_seed(0))
    mean, covariance = state.covariance(new)
    z = (draws.mean(1) - mean) / (covariance.diagonal() / n_samples).sqrt()
    assert z.abs().max() < 4
    found = torch.cov(draws)
    variances = covariance.diagonal()
    error = ((variances[:, None] * variances + covariance**2) / n_samples).sqrt()
    assert ((found - covariance) / error).abs().max() < 4
    assert_close(draws[0], draws[4], 1e-6)


def test_state_pickles_small_and_predicts_the_same():
    X, y = make_rows(400)
    state = fixed_fit(X, y)
    state.moments(X)
    data = pickle.dumps(state)
    assert len(data) < 8000
    assert_close(pickle.loads(data).moments(X)[1], state.moments(X)[1], 0)


def test_callback_stops_the_search():
    X, y = make_rows()
    seen = []
    state = fit_additive(
        KERNELS, X, y, None, noise_family(), callback=lambda i, info: seen.append(info) or i == 2
    )
    assert state.n_iter == 2 and np.isfinite(seen[0]["loss"])


def test_bad_arguments_are_named():
    X, y = make_rows()
    with pytest.raises(ValueError, match="one kernel for each of the 2 columns"):
        fit_additive(KERNELS[:1], X, y, None, noise_family())
    with pytest.raises(ValueError, match="posterior must be one of"):
        fixed_fit(X, y, posterior="exact")
    with pytest.raises(ValueError, match="n_bins must be at least 2"):
        fixed_fit(X, y, n_bins=1)
    with pytest.raises(ValueError, match="2 columns that the bins were made of"):
        make_bins(X).index(X[:, :1])
