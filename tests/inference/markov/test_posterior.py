"""Predictions, joint covariances and samples of a series against the dense posterior."""

import numpy as np
import pytest
import torch
from mpmath import mp, mpf
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern

from skgp.inference.markov import series
from skgp.inference.markov.posterior import Posterior
from skgp.kernels import Cosine, LocalLinearTrend
from skgp.kernels.sde import state_space
from tests.reference.state_space import (
    assert_draws,
    awkward_series,
    dense_posterior,
    model_covariance,
)
from tests.same import assert_same

KERNELS = {
    "matern": 1.3 * Matern(0.7, nu=1.5),
    "sum": 0.6 * Matern(0.4, nu=0.5) + 2.0 * Matern(3.0, nu=2.5),
    "product-and-bias": Matern(1.0, nu=1.5) * Matern(2.0, nu=0.5) + 3.0,
    "quasi-periodic": Matern(2.0, nu=0.5) * ExpSineSquared(3.0, 1.7),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))


class Problem:
    """A series and new times: before, after, in the gap, at points of the series, between them."""

    def __init__(self, kernel, n=90, jump=1e3):
        x, self.beta, self.weight = awkward_series(n, jump=jump)
        self.weight[6] = -0.02
        rng = np.random.default_rng(1)
        inside = rng.uniform(x[0], x[n // 2], 12)
        new = np.concatenate([[-3.0, -0.1, x[-1] + 0.4, 1e5, 500.0], x[2:10], x[-1:], inside])
        self.x, self.new = x, rng.permutation(new)
        form = state_space(kernel)
        self.form, self.dynamics = form, form.at()

    def posterior(self):
        return Posterior(self.dynamics, *map(torch.tensor, (self.x, self.beta, self.weight)))

    def dense(self):
        """Mean (m,) and covariance (m, m) at the new times."""
        K = model_covariance(self.dynamics, np.concatenate([self.x, self.new]))
        nothing = np.zeros(len(self.new))
        sites = (np.concatenate([site, nothing]) for site in (self.beta, self.weight))
        found = dense_posterior(K, *sites)
        n = len(self.x)
        return found.mean[n:], found.cov[n:, n:]


@pytest.fixture(params=[2**29, 30_000], ids=["one tile", "many tiles"])
def tile_bytes(request, monkeypatch):
    monkeypatch.setattr(series.defaults, "CHUNKS_BYTES", request.param)


@each_kernel
def test_marginals_and_covariance_equal_the_dense_posterior(kernel, tile_bytes):
    problem = Problem(kernel)
    mean, cov = problem.dense()
    found = problem.posterior()
    for _ in range(2):  # what is kept from the first call serves the second
        m, v = found.marginals(torch.tensor(problem.new))
        np.testing.assert_allclose(m, mean, rtol=0, atol=1e-11)
        np.testing.assert_allclose(v, np.diag(cov), rtol=1e-10, atol=1e-12)
    m, C = found.covariance(torch.tensor(problem.new))
    np.testing.assert_allclose(m, mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(C, cov, rtol=0, atol=1e-11)


@pytest.mark.parametrize("places", [[90], [70, 190], [20, 21, 150]], ids=str)
def test_covariance_of_few_times_far_apart(places):
    # The chain runs through many chunks of data from one of them to the next.
    problem = Problem(50.0 * Matern(30.0, nu=2.5), n=200, jump=1.0)
    problem.weight /= 1e4
    problem.beta /= 1e4
    problem.new = problem.x[places] + 1e-3
    mean, cov = problem.dense()
    m, C = problem.posterior().covariance(torch.tensor(problem.new))
    np.testing.assert_allclose(m, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(C, cov, rtol=1e-9, atol=1e-10)
    assert np.abs(cov[0, -1]) > 1e-3


@each_kernel
def test_samples_have_the_mean_and_covariance_of_the_posterior(kernel, tile_bytes, generator):
    problem, S = Problem(kernel), 800
    mean, cov = problem.dense()
    samples = problem.posterior().sample(torch.tensor(problem.new), S, generator).numpy()
    assert_draws(samples, mean, cov)
    # Random projections sum up what every pair of times alone might miss.
    w = np.random.default_rng(2).normal(size=(len(mean), 5))
    ratio = ((w.T @ (samples - mean[:, None])) ** 2).mean(1) / np.einsum("ip,ij,jp->p", w, cov, w)
    assert np.abs((ratio - 1) / (2 / S) ** 0.5).max() < 4


def test_samples_repeat_with_the_generator_and_agree_at_equal_times():
    problem = Problem(KERNELS["matern"])
    x = torch.tensor([1.0, 0.3, 1.0, problem.x[20]])
    draw = [
        problem.posterior().sample(x, 3, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    ]
    assert not torch.equal(draw[0], draw[2])
    assert_same(draw[0], draw[1])
    torch.testing.assert_close(draw[0][0], draw[0][2], rtol=0, atol=1e-12)


def test_latent_projections_are_the_parts_of_f():
    problem = Problem(KERNELS["sum"])
    new = torch.tensor(problem.new)
    found = problem.posterior()
    rows = torch.stack([row for _, row in problem.form.summands()])
    mean, var = found.latent(new, torch.cat([rows, rows.sum(0)[None]]))
    m, v = found.marginals(new)
    torch.testing.assert_close(mean[:, :2].sum(1), m, rtol=0, atol=1e-12)
    torch.testing.assert_close(mean[:, 2], m, rtol=0, atol=1e-12)
    torch.testing.assert_close(var[:, 2], v, rtol=1e-10, atol=1e-12)
    # The first part alone, by the dense joint of (part, f).
    form = state_space(KERNELS["sum"].k1)
    x = np.concatenate([problem.x, problem.new])
    part = model_covariance(form.at(), x)
    n, whole = len(problem.x), model_covariance(problem.dynamics, problem.x)
    gain = part[n:, :n] @ np.linalg.inv(np.eye(n) + problem.weight[:, None] * whole)
    np.testing.assert_allclose(mean[:, 0], gain @ problem.beta, rtol=0, atol=1e-10)
    expected = np.diag(part)[n:] - np.einsum("ij,j,ij->i", gain, problem.weight, part[n:, :n])
    np.testing.assert_allclose(var[:, 0], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("n", [1, 40])
def test_no_new_times_give_empty_answers(n):
    x, beta, weight = (torch.tensor(a[:n]) for a in awkward_series(40))
    form = state_space(KERNELS["sum"])
    found = Posterior(form.at(), x, beta, weight)
    none = torch.zeros(0, dtype=torch.float64)
    assert [t.shape for t in found.marginals(none)] == [(0,), (0,)]
    assert [t.shape for t in found.covariance(none)] == [(0,), (0, 0)]
    assert found.sample(none, 3, torch.Generator()).shape == (0, 3)


def test_times_that_fall_are_refused():
    x = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)
    form = state_space(KERNELS["matern"])
    with pytest.raises(ValueError, match="rising order"):
        Posterior(form.at(), x, x, x)


def test_predictions_and_samples_where_the_filter_has_no_covariance(generator):
    # Every fifth weight is so negative that only later data leave a posterior.
    problem, S = Problem(KERNELS["matern"], n=80, jump=0.02), 3000
    problem.x = np.arange(80) / 50
    problem.beta, problem.weight = np.sin(9 * problem.x), np.full(80, 4.0)
    problem.weight[::5] = -3.0
    problem.new = np.array([-0.1, 0.0, 0.003, 0.5, 0.51, 1.1, 1.58, 1.7])
    mean, cov = problem.dense()
    found, new = problem.posterior(), torch.tensor(problem.new)
    m, v = found.marginals(new)
    np.testing.assert_allclose(m, mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(v, np.diag(cov), rtol=1e-8)
    np.testing.assert_allclose(found.covariance(new)[1], cov, rtol=0, atol=1e-10)
    assert_draws(found.sample(new, S, generator), mean, cov)


@pytest.mark.parametrize("scale", [1e-5, 0.03, 0.3], ids="scale={}".format)
def test_samples_keep_the_mean_where_weights_leave_no_digits(scale, generator):
    """Weights of 1e19, of noise far below rounding: draws were NaN, or far beside the mean."""
    rng, S = np.random.default_rng(0), 1000
    x = torch.tensor(np.sort(rng.uniform(-2, 2, 20)))
    weight = 10.0 ** torch.tensor(rng.integers(2, 20, 20), dtype=torch.float64)
    values = torch.sin(3 * x) + 300 * (torch.arange(20) == 15)
    form = state_space(1.0 * RBF(scale))
    found = Posterior(form.at(), x, values * weight, weight)
    new = torch.cat([x, x[:-1] + 0.5 * x.diff()])
    mean, var = found.marginals(new)
    samples = found.sample(new, S, generator)
    assert samples.isfinite().all()
    error = (samples.mean(1) - mean).abs() / (var / S + 1e-16 / S).sqrt()
    assert float(error.max()) < 4.5  # of 39
    noisy = var > 1e-10
    ratio = samples[noisy].var(1) / var[noisy]
    assert float(((ratio - 1) / (2 / S) ** 0.5).abs().max()) < 4.5


def test_draws_of_rbf_beside_a_season_are_as_wide_as_predictions(generator):
    """States of many scales: draws were 1e9 times too wide, of noise a hundredth of the season."""
    rng, S = np.random.default_rng(600), 2000
    x = torch.tensor(np.sort(rng.uniform(0, 600, 600)))
    kernel = 38.0**2 * RBF(8700.0) + 0.27**2 * Cosine(12.0) * Matern(1e6, nu=0.5)
    found = Posterior(state_space(kernel).at(), x, 0 * x, torch.full_like(x, 1e5))
    new = torch.linspace(5, 720, 15).double()
    ratio = found.sample(new, S, generator).var(1) / found.marginals(new)[1]
    assert float(((ratio - 1) / (2 / S) ** 0.5).abs().max()) < 4.5


@pytest.mark.parametrize("origin", [-1000.0, -1.0], ids=["far", "near"])
def test_variances_before_the_first_time_keep_their_digits(origin):
    """Of a wide prior and little noise, against 50 digits: they were 0, or 1e4 times as much."""
    trend, noise = LocalLinearTrend(1e-11, 1e3, 2e-3, origin=origin), 1e-6
    season = Cosine(12.0) * Matern(1e6, nu=0.5)
    x, new = np.arange(1.0, 31.0) ** 1.1, np.array([0.2, 0.9, 3.0])

    def k(a, b):
        lag, (m, M) = abs(a - b), sorted((a - mpf(origin), b - mpf(origin)))
        line = 1000 + mpf("0.002") * m * M + mpf("1e-11") * m**2 * (3 * M - m) / 6
        return line + mp.cos(2 * mp.pi * lag / 12) * mp.e ** (-lag / mpf(10) ** 6)

    with mp.workdps(50):
        X, K = [mpf(float(each)) for each in x], mp.matrix(30, 30)
        for i, j in np.ndindex(30, 30):
            K[i, j] = k(X[i], X[j]) + (mpf("1e-6") if i == j else 0)
        expected = []
        for at in map(mpf, new):
            across = mp.matrix([k(at, each) for each in X])
            expected.append(float(k(at, at) - (across.T * mp.lu_solve(K, across))[0]))
    weight = torch.full((30,), 1 / noise, dtype=torch.float64)
    found = Posterior(state_space(trend + season).at(), torch.tensor(x), 0 * weight, weight)
    np.testing.assert_allclose(found.marginals(torch.tensor(new))[1], expected, rtol=1e-2)
    np.testing.assert_allclose(
        found.covariance(torch.tensor(new))[1].diagonal(), expected, rtol=1e-2
    )
