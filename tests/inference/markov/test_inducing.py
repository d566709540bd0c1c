"""Variational inference on states at knots, against dense sparse GPs with explicit inverses."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.inference.markov import inducing as draws_module
from skgp.inference.markov.conditionals import condition
from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.inducing import fit_inducing, infer_inducing, place_knots, shortest_scale
from skgp.inference.markov.knots import Chain, PairSites, infer_pairs
from skgp.inference.markov.series import make_series
from skgp.inference.markov.sites import expectations
from skgp.inference.markov.states import InducingState
from skgp.kernels.sde import state_space
from skgp.kernels.specs import Cosine
from skgp.likelihoods import Bernoulli, Gaussian, Poisson
from tests.reference.state_space import assert_draws, by_finite_differences
from tests.reference.state_space_inducing import (
    inducing_matrices,
    reverse_subset_inverse,
    site_posterior,
    titsias_bound,
)

KERNELS = {
    "matern12": Matern(0.7, nu=0.5),
    "matern32": 2.0 * Matern(0.7, nu=1.5),
    "matern52": 2.0 * Matern(1.7, nu=2.5),
    "sum": Matern(1.0, nu=0.5) + 0.5 * Matern(0.3, nu=1.5),
    "damped": Matern(1.0, nu=1.5) * Cosine(0.8) + 0.4 * Matern(1.0, nu=0.5),
    "without noise": Matern(0.5, nu=1.5) + Cosine(2.0) + ConstantKernel(0.5),
}
KNOTS = torch.tensor([0.3, 0.9, 1.5, 2.6], dtype=torch.float64)


def dynamics_of(kernel):
    form = state_space(kernel)
    return form.at()


@pytest.fixture(params=KERNELS, ids=str)
def kernel(request):
    return KERNELS[request.param]


@pytest.fixture
def times(rng):
    """Before, between and after the knots, and on one."""
    return torch.tensor(np.sort(np.r_[rng.uniform(-0.5, 3.5, 13), 1.5]))


@pytest.fixture
def f_sites(rng):
    return torch.tensor(rng.normal(size=14)) * 3, torch.tensor(rng.uniform(0, 20, 14))


def counts(x, rng):
    return torch.tensor(rng.poisson(np.exp(np.sin(2 * x.numpy()))), dtype=torch.float64)


def labels(x, rng):
    return torch.tensor(np.where(rng.normal(size=len(x)) < np.sin(2 * x.numpy()), 1.0, -1.0))


def test_moments_and_normaliser_agree_with_dense_algebra(kernel, times, f_sites):
    dynamics, (beta, weight) = dynamics_of(kernel), f_sites
    found = infer_inducing(condition(dynamics, KNOTS, times), beta, weight)
    Kuu, A, residual = inducing_matrices(dynamics, KNOTS, times)
    b, w = beta.numpy(), weight.numpy()
    log_z, mean, cov = site_posterior(Kuu, A.T @ b, A.T * w @ A)
    T = residual.diagonal()
    np.testing.assert_allclose(found.log_normalizer, log_z - 0.5 * w @ T, rtol=1e-10)
    np.testing.assert_allclose(found.mean, A @ mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.var, T + (A @ cov * A).sum(1), rtol=1e-9, atol=1e-9)


def test_joint_covariance_agrees_with_dense_algebra(kernel, times, f_sites):
    dynamics, (beta, weight) = dynamics_of(kernel), f_sites
    rows = condition(dynamics, KNOTS, times)
    sites = rows.collect(beta, weight)
    state = InducingState(kernel, KNOTS, sites, offset=0.5)
    Kuu, A, residual = inducing_matrices(dynamics, KNOTS, times)
    _, mean, cov = site_posterior(Kuu, A.T @ beta.numpy(), A.T * weight.numpy() @ A)
    order = torch.randperm(len(times), generator=torch.Generator().manual_seed(1))
    got_mean, got = state.covariance(times[order])
    np.testing.assert_allclose(got_mean, (A @ mean + 0.5)[order], atol=1e-9)
    expected = A @ cov @ A.T + residual
    np.testing.assert_allclose(got, expected[order][:, order], atol=1e-9)
    np.testing.assert_allclose(state.moments(times)[1], expected.diagonal(), atol=1e-9)


def test_gradients_agree_with_finite_differences(kernel, rng, f_sites):
    times = torch.tensor(np.sort(rng.uniform(-0.5, 3.5, 14)))
    form, (beta, weight) = state_space(kernel), f_sites
    parameters = form.parameters().detach()

    def value(parameters, knots):
        rows = condition(form.at(parameters), knots, times)
        return infer_inducing(rows, beta, weight).log_normalizer

    rows = condition(form.at(parameters), KNOTS, times)
    pairs = infer_pairs(rows.chain, rows.collect(beta, weight))
    found = rows.gradient(pairs, beta, weight)
    slopes = (
        by_finite_differences(lambda at: value(at, KNOTS), parameters),
        by_finite_differences(lambda at: value(parameters, at), KNOTS),
    )
    for gradient, expected in zip(found, slopes, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_gaussian_bound_is_that_of_titsias_after_one_step(kernel, times, rng):
    dynamics, y = dynamics_of(kernel), rng.normal(size=14)
    series = make_series(times, torch.tensor(y))
    fit = fit_inducing(dynamics, KNOTS, series, Gaussian(0.1))
    Kuu, A, residual = inducing_matrices(dynamics, KNOTS, times)
    expected = titsias_bound(A @ Kuu @ A.T, residual.trace(), y, 0.1)
    assert fit.elbo == pytest.approx(expected, abs=1e-8)
    assert fit.converged and fit.n_iter <= 2
    target, _ = _natural_target(dynamics, series, Gaussian(0.1), fit)
    torch.testing.assert_close(target.linear, fit.posterior.sites.linear, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        target.precision, fit.posterior.sites.precision, rtol=1e-12, atol=1e-12
    )


def _natural_target(dynamics, series, likelihood, fit):
    rows = condition(dynamics, KNOTS, series.times)
    _, slope, curvature = expectations(likelihood, series.y, fit.posterior.mean, fit.posterior.var)
    return rows.collect(slope - curvature * fit.posterior.mean, -curvature), rows


@pytest.mark.parametrize(
    ("likelihood", "targets"), [(Bernoulli("logit"), labels), (Poisson(), counts)]
)
def test_bound_is_the_optimum_of_dense_variational_inference(likelihood, targets, times, rng):
    dynamics, y = dynamics_of(KERNELS["matern32"]), targets(times, rng)
    fit = fit_inducing(dynamics, KNOTS[:3], make_series(times, y), likelihood, tol=1e-12)
    Kuu, A, residual = (torch.tensor(t) for t in inducing_matrices(dynamics, KNOTS[:3], times))
    L, m = torch.linalg.cholesky(Kuu), len(Kuu)
    AL, rows, columns = A @ L, *torch.tril_indices(m, m)

    def loss(free):
        """Negative bound in whitened coordinates: u = L v, q(v) = N(mean, R R')."""
        leaf = torch.tensor(free, requires_grad=True)
        R = torch.zeros(m, m, dtype=leaf.dtype).index_put((rows, columns), leaf[m:])
        var = residual.diagonal() + (AL @ R).square().sum(1)
        bound = likelihood.expected_log_prob(y, AL @ leaf[:m], var).sum()
        log_det = R.diagonal().abs().log().sum()
        bound = bound - 0.5 * (leaf[:m].square().sum() + R.square().sum() - m) + log_det
        return -bound.item(), -torch.autograd.grad(bound, leaf)[0].numpy()

    start = np.concatenate([np.zeros(m), np.eye(m)[rows, columns]])
    options = {"maxiter": 500, "ftol": 1e-15, "gtol": 1e-9}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    assert fit.converged
    assert fit.elbo == pytest.approx(-best.fun, abs=1e-8)


def test_step_is_the_natural_gradient_through_mean_parameters(rng):
    """B.2: theta moves by the gradient in eta, taken through the reverse subset inverse."""
    x = torch.tensor(rng.uniform(0.3, 2.6, 20))
    dynamics, likelihood = dynamics_of(KERNELS["matern32"]), Poisson()
    series, r = make_series(x, counts(x, rng)), 2 * dynamics.n_states - 1
    rows = condition(dynamics, KNOTS, series.times)
    A = torch.tensor(inducing_matrices(dynamics, KNOTS, series.times)[1])  # E[f | u] = A u
    none = PairSites.zeros(dynamics.n_states, len(KNOTS))
    sites = rows.collect(torch.full_like(x, 0.5), torch.ones_like(x))

    def moments(sites):
        pairs = infer_pairs(rows.chain, sites)
        return pairs.mean[dynamics.n_states :, :-1].T.reshape(-1), pairs.joint_covariance()

    mean, cov = moments(sites)
    block = torch.arange(len(mean)) // dynamics.n_states
    band = (block[:, None] - block).abs() <= 1
    P = torch.linalg.inv(moments(none)[1])

    def bound(m, second):
        """As a function of eta = (mean, band of the second moments): the rest of C has no say."""
        C = second - torch.outer(m, m)
        L = reverse_subset_inverse(C, r)
        var = rows.T + ((A @ (C * band)) * A).sum(1)
        fit = likelihood.expected_log_prob(series.y, A @ m, var).sum()
        return fit - 0.5 * ((P * C).sum() + m @ P @ m) - L.diagonal().log().sum()

    eta = [t.clone().requires_grad_() for t in (mean, cov + torch.outer(mean, mean))]
    slope, second = torch.autograd.grad(bound(*eta), eta)
    found, var = rows.marginals(infer_pairs(rows.chain, sites))
    _, g, h = expectations(likelihood, series.y, found, var)
    target, rate = rows.collect(g - h * found, -h), 0.3

    def theta(mean, cov):
        L = reverse_subset_inverse(cov, r)
        return L @ (L.T @ mean), L @ L.T  # theta_2 = -Q / 2

    linear, Q = theta(mean, cov)
    expected = linear + rate * slope, Q - rate * (second + second.T)
    for got, wanted in zip(theta(*moments(sites.towards(target, rate))), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_reverse_subset_inverse_undoes_the_band_of_the_inverse(rng):
    """Algorithm 1, with the band of the inverse for its input and blocks of r + 1 rows."""
    L = torch.tensor(np.tril(rng.normal(size=(9, 9)) / 3 + 2 * np.eye(9)))
    L[(torch.arange(9)[:, None] - torch.arange(9)) > 2] = 0.0
    torch.testing.assert_close(reverse_subset_inverse(torch.linalg.inv(L @ L.T), 2), L)


def test_batches_of_gaussian_rows_add_up(rng):
    x, y = torch.tensor(rng.uniform(-0.5, 3.5, (2, 30)))
    dynamics, likelihood = dynamics_of(KERNELS["matern32"]), Gaussian(0.2)
    whole = fit_inducing(dynamics, KNOTS, make_series(x, y), likelihood)
    base, total = None, 0.0
    for rows in torch.arange(30).split(10):
        batch = make_series(x[rows], y[rows])
        fit = fit_inducing(dynamics, KNOTS, batch, likelihood, base=base)
        base, total = fit.posterior.sites, total + fit.elbo
    torch.testing.assert_close(base.linear, whole.posterior.sites.linear)
    torch.testing.assert_close(base.precision, whole.posterior.sites.precision)
    assert total == pytest.approx(whole.elbo, abs=1e-9)


@pytest.mark.parametrize("crowded", [64, 1])
def test_samples_have_the_joint_moments(kernel, times, f_sites, rng, crowded, monkeypatch):
    """Times in any order, several between two knots and one twice; crowds divided or not."""
    monkeypatch.setattr(draws_module, "CROWDED", crowded)
    times = torch.cat([times, times[3:4]])[torch.tensor(rng.permutation(15))]
    beta, weight = f_sites
    sites = condition(dynamics_of(kernel), KNOTS, times[:14]).collect(beta, weight)
    state, n = InducingState(kernel, KNOTS, sites, 0.7), 5000
    draws = state.samples(times, n, torch.Generator().manual_seed(3))
    assert_draws(draws, *state.covariance(times))


def test_samples_take_linear_memory():
    """A dense covariance of these times would take 80 GB. Crowded intervals are divided."""
    kernel, x = KERNELS["matern32"], torch.linspace(-1, 5, 100_000, dtype=torch.float64)
    state = InducingState(kernel, KNOTS, PairSites.zeros(2, len(KNOTS)))
    draws = state.samples(x, 2, torch.Generator().manual_seed(0))
    assert draws.shape == (100_000, 2)
    # A path of Matern-3/2 is smooth: neighbours differ by some l / n.
    assert float(draws.diff(dim=0).abs().max()) < 1e-2


def test_kl_vanishes_for_sites_that_say_nothing():
    chain = Chain.of(dynamics_of(KERNELS["matern52"]), KNOTS)
    sites = PairSites.zeros(3, len(KNOTS))
    assert infer_pairs(chain, sites).kl(sites) == pytest.approx(0.0, abs=1e-12)


def test_knots_are_quantiles_and_follow_the_scale(rng):
    times = torch.tensor(np.sort(rng.uniform(0, 1, 5000) ** 3))
    knots = place_knots(times, 11)
    assert len(knots) == 11 and knots[0] == times[0] and knots[-1] == times[-1]
    counts = torch.histogram(times, knots).hist
    assert float(counts.max() - counts.min()) <= 2
    spaced = place_knots(times, scale=0.005)
    assert len(place_knots(times)) == 1000 < len(spaced)
    # Gaps are left where the data have them.
    since = times - spaced[torch.searchsorted(spaced, times, right=True) - 1]
    assert float(since.max()) <= 0.0005
    assert torch.equal(place_knots(times[:7]), times[:7])
    assert torch.equal(place_knots(times[:1], scale=1.0), times[:1])
    assert shortest_scale(dynamics_of(Matern(2.0, nu=0.5))) == pytest.approx(2.0)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_knots_and_times_close_together_and_far_apart(nu, rng):
    x = torch.tensor([0, 1e-6, 2e-6, 1e-3, 0.5, 1, 1 + 1e-5, 1e4, 1e4 + 1e-4, 1e4 + 0.1]).double()
    dynamics, y = dynamics_of(Matern(1.0, nu=nu)), torch.tensor(rng.normal(size=10))
    series = make_series(x, y)
    exact = fit_sites(dynamics, series, Gaussian(0.01))
    for knots in (series.times, torch.cat([series.times, series.times + 1e-7]).sort().values):
        fit = fit_inducing(dynamics, knots, series, Gaussian(0.01))
        assert fit.elbo == pytest.approx(exact.elbo, abs=1e-9)
        torch.testing.assert_close(fit.posterior.mean, exact.posterior.mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(
            fit.posterior.parameter_gradient,
            exact.posterior.parameter_gradient,
            rtol=1e-8,
            atol=1e-8,
        )


@pytest.mark.parametrize("gap", [1e-12, 1e-4, 1e-2, 0.3])
def test_knots_closer_than_a_smooth_process_moves_are_exact_inference(gap, rng):
    """Of RBF the noise of states over a short gap spans its eleventh power: beyond all digits."""
    dynamics, x = dynamics_of(2.0 * RBF(1.0)), torch.tensor(np.sort(rng.uniform(0, gap, 20)))
    knots, y = torch.tensor([0.0, gap], dtype=torch.float64), torch.tensor(rng.normal(size=20))
    fit = fit_inducing(dynamics, knots, make_series(x, y), Gaussian(0.1))
    x, y = x.numpy(), y.numpy()
    K = 2.0 * np.exp(-0.5 * (x[:, None] - x) ** 2)
    gain = K @ np.linalg.inv(K + 0.1 * np.eye(20))
    np.testing.assert_allclose(fit.posterior.mean, gain @ y, atol=1e-3)
    np.testing.assert_allclose(fit.posterior.var, (K - gain @ K).diagonal(), rtol=1e-2)


def test_errors_name_the_argument():
    dynamics, x = dynamics_of(KERNELS["matern32"]), torch.arange(3.0, dtype=torch.float64)
    series = make_series(x, x)
    for knots in (x.flip(0), x[:0], x / 0):
        with pytest.raises(ValueError, match="knots must"):
            fit_inducing(dynamics, knots, series, Gaussian(1.0))
    with pytest.raises(ValueError, match="n_knots must be at least 1"):
        place_knots(x, 0)
    with pytest.raises(ValueError, match="max_iter"):
        fit_inducing(dynamics, x, series, Gaussian(1.0), max_iter=0)
