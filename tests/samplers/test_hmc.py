"""Hamiltonian Monte Carlo on targets whose moments are known."""

import math

import numpy as np
import pytest
from joblib import Parallel, parallel_config

from skgp.samplers import Run, StudentDensity, StudentMixture, ess_bulk, hamiltonian_monte_carlo
from skgp.samplers.hmc import Chains, evaluator
from tests.same import assert_same


def hmc(target, mean, covariance, *, rng, starts=None, **options):
    own = {
        name: options.pop(name) for name in ("jumps", "log_density", "batched") if name in options
    }
    return hamiltonian_monte_carlo(
        target, mean, covariance, rng=rng, run=Run(**options), starts=starts, **own
    )


class Gaussian:
    """Log-density and gradient of a Gaussian; counts its calls."""

    def __init__(self, mean, covariance):
        self.mean, self.covariance = np.asarray(mean), np.asarray(covariance)
        self.precision, self.n_calls = np.linalg.inv(covariance), 0

    def __call__(self, x):
        self.n_calls += 1
        slope = -self.precision @ (x - self.mean)
        return float(0.5 * slope @ (x - self.mean)), slope


def log_gamma(x):
    """Logarithms of Gamma variables of shape 3: mean digamma(3), variance trigamma(3)."""
    return float(np.sum(3 * x - np.exp(x))), 3 - np.exp(x)


def assert_moments(points, mean, var):
    """Means and variances within four standard errors, by the ESS of each."""
    for j in range(points.shape[2]):
        column = points[:, :, j]
        z = (column.mean() - mean[j]) / math.sqrt(var[j] / ess_bulk(column))
        assert abs(z) < 4
        squares = (column - mean[j]) ** 2
        error = squares.std() / math.sqrt(ess_bulk(squares))
        assert abs(squares.mean() - var[j]) / error < 4


def test_hmc_of_a_gaussian_finds_its_moments(rng):
    root = rng.standard_normal((5, 5))
    target = Gaussian(rng.standard_normal(5), root @ root.T + np.eye(5))
    # The approximation is off in mean and scale, as the Laplace approximation may be.
    found = hmc(target, target.mean + 0.5, 0.5 * target.covariance, rng=rng, n_draws=300)
    assert found.points.shape == (4, 300, 5)
    assert_moments(found.points, target.mean, np.diag(target.covariance))
    assert np.all(found.r_hat < 1.02) and np.all(found.ess > 400)
    assert np.all((found.acceptance > 0.5) & (found.acceptance < 0.98))
    assert found.n_gradients == target.n_calls and not found.n_divergent.any()
    values = [[target(x)[0] for x in chain] for chain in found.points[:, :5]]
    np.testing.assert_allclose(found.log_density[:, :5], values, rtol=1e-9)


def test_hmc_of_a_skew_target_finds_its_moments(rng):
    found = hmc(log_gamma, np.ones(2), np.eye(2) / 3, rng=rng, n_draws=400)
    assert_moments(found.points, [0.9227843350984671] * 2, [0.3949340668482264] * 2)


def test_hmc_corrects_paths_integrated_coarsely(rng):
    """Steps of 1.8 standard deviations: accepted blindly, their variance would be 5 times 1."""
    found = hmc(
        Gaussian(np.zeros(1), np.eye(1)), np.zeros(1), 2.25 * np.eye(1), rng=rng, n_warmup=0,
        n_draws=500,
    )  # fmt: skip
    assert np.all(found.acceptance < 0.9)
    assert_moments(found.points, [0.0], [1.0])


def test_leapfrog_is_reversible_and_nearly_conserves_energy():
    """With a tiny step nothing is rejected, and the energy error is of second order."""
    lost = []
    for step in (0.2, 0.1):
        chains = Chains(
            evaluator(log_gamma, False, Parallel()),
            np.ones(2),
            np.eye(2) / 3**0.5,
            np.random.default_rng(0),
            Run(n_chains=40, n_warmup=0),
            np.full((40, 2), 1.2),
            None,
        )
        chains.step_size = step
        lost.append(np.mean([1 - chains.move()[0].mean() for _ in range(3)]))
    assert lost[1] < 0.4 * lost[0] < 0.1


def two_humps(x):
    """A mixture of equal Gaussians five apart on either side of 0, and its gradient, (k, p)."""
    low, high = -0.5 * (x[:, 0] + 5) ** 2, -0.5 * (x[:, 0] - 5) ** 2
    value = np.logaddexp(low, high)
    slope = -np.exp(low - value) * (x[:, 0] + 5) - np.exp(high - value) * (x[:, 0] - 5)
    return value, slope[:, None]


def test_jumps_link_modes_that_paths_do_not(rng):
    jumps = StudentMixture(
        [StudentDensity(np.array([m]), np.eye(1), 5) for m in (-5.0, 5.0)], np.array([0.7, 0.3])
    )
    settings = dict(rng=rng, n_draws=400, batched=True, starts=np.full((4, 1), 5.0))
    stuck = hmc(two_humps, np.array([5.0]), np.eye(1), **settings)
    assert stuck.points.min() > 0
    found = hmc(
        two_humps, np.array([5.0]), np.eye(1), jumps=jumps,
        log_density=lambda x: two_humps(x)[0], **settings,
    )  # fmt: skip
    share = (found.points[:, :, 0] > 0).astype(float)
    assert abs(share.mean() - 0.5) < 4 * 0.5 / math.sqrt(ess_bulk(share))
    assert found.points[:, :, 0].std() == pytest.approx(26**0.5, rel=0.05)


def test_warm_up_learns_the_metric(rng):
    """Of scales 100 apart; without it a path of 64 steps would not cross the wider."""
    target = Gaussian(np.zeros(2), np.diag([1e4, 1.0]))
    found = hmc(
        target, np.zeros(2), np.eye(2), rng=rng,
        starts=rng.standard_normal((4, 2)) * [100.0, 1.0], n_warmup=200, n_draws=200,
    )  # fmt: skip
    assert found.ess.min() > 200 and found.n_gradients < 4 * 400 * 30


def test_chains_advance_by_one_call_for_all(rng):
    calls = []

    def target(x):
        calls.append(len(x))
        return -0.5 * (x**2).sum(1), -x

    found = hmc(target, np.zeros(2), np.eye(2), rng=rng, batched=True, n_chains=6, n_draws=100)
    assert set(calls) == {6} and found.n_gradients == sum(calls)
    assert_moments(found.points, np.zeros(2), np.ones(2))


def test_hmc_stops_where_bulk_tails_and_spread_are_known(rng):
    found = hmc(
        log_gamma, np.ones(2), np.eye(2), rng=rng, target_ess=300, max_r_hat=1.1, n_draws=5000
    )
    assert found.converged and found.points.shape[1] < 1000 and np.all(found.r_hat <= 1.1)
    assert min(found.ess.min(), found.ess_tail.min()) >= 300 and found.ess_spread.min() >= 150
    assert found.ess_tail.shape == found.ess_spread.shape == (2,)


def test_hmc_does_not_depend_on_the_workers():
    def run(n_jobs):
        return hmc(
            log_gamma, np.ones(2), np.eye(2), rng=np.random.default_rng(5), n_jobs=n_jobs,
            n_warmup=10, n_draws=30,
        )  # fmt: skip

    alone = run(None)
    with parallel_config("threading"):
        together = run(2)
    assert_same(alone.points, together.points)
    assert not np.array_equal(alone.points[0], alone.points[1])


def test_hmc_counts_divergent_paths_and_stays_in_the_support(rng):
    """A density that falls off a cliff: paths beyond it end and are refused."""

    def cliff(x):
        return (-0.5 * float(x @ x), -x) if x[0] < 1.0 else (math.nan, x)

    found = hmc(cliff, np.zeros(1), np.eye(1), rng=rng, n_draws=200)
    assert found.points.max() < 1.0 and found.n_divergent.sum() > 10
    # The mean of a standard normal below 1.
    z = (found.points.mean() + 0.2876) / math.sqrt(0.6297 / found.ess[0])
    assert abs(z) < 4


@pytest.mark.parametrize("last", [25, 75])
def test_hmc_stopped_by_callback_keeps_its_draws(last, rng):
    """Of the warm-up where it ends in it."""
    seen = []

    def callback(iteration, info):
        seen.append(iteration)
        return iteration >= last

    found = hmc(
        log_gamma, np.ones(2), np.eye(2), rng=rng, n_warmup=50, n_draws=500, callback=callback
    )
    assert seen == list(range(25, last + 1, 25)) and found.points.shape == (4, 25, 2)
    assert found.warming_up == (last == 25) and not found.converged


def test_hmc_draws_the_same_however_often_it_calls_back():
    def run(every):
        seen = []
        found = hmc(
            log_gamma, np.ones(2), np.eye(2), rng=np.random.default_rng(1), n_draws=50,
            target_ess=20, max_r_hat=2.0, every=every,
            callback=lambda *told: seen.append(told[0]),
        )  # fmt: skip
        return found, seen

    (seldom, few), (often, many) = run(25), run(1)
    assert few == [25, 50, 75] and many == list(range(1, 76))
    assert_same(seldom.points, often.points)


def test_hmc_refuses_bad_input(rng):
    for target, scale, message in (
        (log_gamma, -1.0, "positive definite"),
        (lambda x: (math.nan, x), 1.0, "near the mean"),
    ):
        with pytest.raises(ValueError, match=message):
            hmc(target, np.ones(2), scale * np.eye(2), rng=rng)


def test_hmc_result_of_some_chains(rng):
    found = hmc(log_gamma, np.ones(2), np.eye(2), rng=rng, n_draws=50)
    pair = found.select(np.array([1, 3]))
    assert_same(pair.points, found.points[[1, 3]])
    assert pair.ess[1] == ess_bulk(found.points[[1, 3], :, 1])
    assert pair.acceptance.shape == pair.step_size.shape == pair.n_divergent.shape == (2,)
