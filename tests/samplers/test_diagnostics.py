"""R-hat, effective sizes and Pareto k against plain loops, known distributions and arviz."""

import math

import numpy as np
import pytest
from scipy.stats import genpareto, norm

from skgp.samplers import (
    Run,
    effective_sample_size,
    ess_bulk,
    ess_spread,
    ess_tail,
    pareto_k,
    r_hat,
    stratified_resample,
)


def autoregressive(rng, correlation, n_chains=4, n_draws=200):
    """Stationary chains of unit variance and the given correlation of neighbours."""
    noise = rng.standard_normal((n_chains, n_draws))
    chains = noise.copy()
    for t in range(1, n_draws):
        chains[:, t] = correlation * chains[:, t - 1] + math.sqrt(1 - correlation**2) * noise[:, t]
    return chains


def naive_scores(chains):
    """Normal scores of the ranks, each rank a count."""
    flat = chains.ravel()
    ranks = [np.sum(flat < x) + (np.sum(flat == x) + 1) / 2 for x in flat]
    return norm.ppf((np.array(ranks) - 0.375) / (len(flat) + 0.25)).reshape(chains.shape)


def naive_split(chains):
    half = chains.shape[1] // 2
    return np.array([c[:half] for c in chains] + [c[len(c) - half :] for c in chains])


def naive_r_hat(chains):
    n = chains.shape[1]
    within = np.mean([np.sum((c - c.mean()) ** 2) / (n - 1) for c in chains])
    means = [c.mean() for c in chains]
    between = np.sum((means - np.mean(means)) ** 2) / (len(chains) - 1)
    return math.sqrt(((n - 1) / n * within + between) / within)


def naive_ess(chains):
    """Vehtari et al. (2021), eq. (10), autocovariances by a double loop."""
    m, n = chains.shape
    covariance = [
        np.mean([np.sum((c[: n - t] - c.mean()) * (c[t:] - c.mean())) / n for c in chains])
        for t in range(n)
    ]
    within = covariance[0] * n / (n - 1)
    total = covariance[0] + np.var([c.mean() for c in chains], ddof=1)
    rho = [1.0] + [1 - (within - c) / total for c in covariance[1:]]
    time, t, last = -1.0, 0, math.inf
    while t < n - 4 and rho[t] + rho[t + 1] >= 0:
        last = min(last, rho[t] + rho[t + 1])
        time += 2 * last
        t += 2
    return m * n / max(time + max(0.0, rho[t]), 1 / math.log10(m * n))


CHAINS = {
    "independent": lambda rng: autoregressive(rng, 0.0),
    "correlated": lambda rng: autoregressive(rng, 0.8),
    "antithetic": lambda rng: autoregressive(rng, -0.5),
    "apart": lambda rng: autoregressive(rng, 0.3) + np.arange(4)[:, None],
    "odd": lambda rng: autoregressive(rng, 0.5, n_draws=121),
    "heavy": lambda rng: np.tan(1.5 * np.arctan(autoregressive(rng, 0.5))),
    "ties": lambda rng: np.round(autoregressive(rng, 0.5), 1),
}
each_chains = pytest.mark.parametrize("name", CHAINS)


@each_chains
def test_r_hat_equals_its_definition(name, rng):
    chains = CHAINS[name](rng)
    halves = naive_split(chains)
    folded = np.abs(halves - np.median(halves))
    expected = max(naive_r_hat(naive_scores(halves)), naive_r_hat(naive_scores(folded)))
    assert r_hat(chains) == pytest.approx(expected, rel=1e-12)


@each_chains
def test_ess_equals_its_definition(name, rng):
    chains = CHAINS[name](rng)
    assert ess_bulk(chains) == pytest.approx(naive_ess(naive_scores(naive_split(chains))), rel=1e-9)
    indicators = [chains <= q for q in np.quantile(chains, [0.05, 0.95])]
    expected = min(naive_ess(naive_split(below.astype(float))) for below in indicators)
    assert ess_tail(chains) == pytest.approx(expected, rel=1e-9)


def test_pareto_k_equals_arviz(rng):
    arviz = pytest.importorskip("arviz")
    log_weights = rng.standard_normal((5, 700)) * np.array([[0.1], [0.5], [1], [2], [4]])
    expected = [float(arviz.psislw(each)[1]) for each in log_weights]
    np.testing.assert_allclose([pareto_k(each) for each in log_weights], expected, rtol=1e-9)


@pytest.mark.parametrize("shape", [0.2, 0.7, 1.2])
def test_pareto_k_finds_the_shape_of_pareto_weights(shape, rng):
    weights = genpareto(shape).rvs(size=(100, 2000), random_state=rng)
    found = np.array([pareto_k(np.log(each)) for each in weights])
    n_tail = math.ceil(3 * math.sqrt(2000))
    expected = (n_tail * shape + 10 * 0.5) / (n_tail + 10)
    # The estimator is biased by O(1 / n_tail); its spread is about (1 + k) / sqrt(n_tail).
    assert found.mean() == pytest.approx(expected, abs=0.05)
    assert found.std() == pytest.approx((1 + shape) / math.sqrt(n_tail), rel=0.35)


def test_pareto_k_of_equal_few_and_lonely_weights():
    assert pareto_k(np.zeros(100)) == -math.inf
    assert pareto_k(np.zeros(8)) == math.inf
    assert pareto_k(np.full(100, -np.inf)) == math.inf
    lonely = np.full(100, -np.inf)
    lonely[:3] = 0.0
    assert pareto_k(lonely) == math.inf


def test_effective_sample_size_of_known_weights():
    assert effective_sample_size(np.full(50, -700.0)) == pytest.approx(50)
    assert effective_sample_size(np.array([0.0, -np.inf, -np.inf])) == pytest.approx(1)
    assert effective_sample_size(np.log([3.0, 1.0])) == pytest.approx(16 / 10)
    assert effective_sample_size(np.full(3, -np.inf)) == 0


def test_chain_diagnostics_of_constant_short_and_broken_chains():
    assert r_hat(np.ones((2, 10))) == 1.0 and ess_bulk(np.ones((2, 10))) == 20
    assert all(math.isnan(f(np.zeros((2, 3)))) for f in (r_hat, ess_bulk, ess_tail))
    assert math.isnan(r_hat(np.array([[1.0, 2.0, np.nan, 3.0, 5.0]])))


def test_stratified_resample_keeps_draws_in_proportion_to_their_weights(rng):
    weights = rng.exponential(size=20)
    weights[3] = 0.0
    points = rng.standard_normal((20, 3))
    counts = np.zeros(20)
    for _ in range(2000):
        kept = stratified_resample(weights, 10, rng, points=points)
        copies = np.bincount(kept, minlength=20)
        # Systematic: the count is its expectation rounded down or up.
        assert np.all(np.abs(copies - 10 * weights / weights.sum()) < 1)
        counts += copies
    share = 10 * weights / weights.sum()
    variance = (share % 1) * (1 - share % 1) * 2000
    z = (counts - 2000 * share) / np.sqrt(np.maximum(variance, 1e-12))
    assert np.all(np.abs(z[variance > 1e-9]) < 4) and counts[3] == 0


def test_stratified_resample_thins_equal_weights(rng):
    kept = stratified_resample(np.ones(100), 20, rng)
    assert set(np.diff(kept)) == {5}


def test_stratified_resample_spreads_over_the_points(rng):
    points = rng.standard_normal((500, 2)) * np.array([1.0, 0.1])
    points = points @ np.array([[0.6, 0.8], [-0.8, 0.6]])
    weights = rng.uniform(0.5, 1.5, size=500)
    weights /= weights.sum()
    means = [
        points[stratified_resample(weights, 25, rng, points=points)].mean(axis=0)
        for _ in range(200)
    ]
    independent = (weights @ (points - weights @ points) ** 2) / 25
    assert np.all(np.var(means, axis=0) < 0.2 * independent)


@pytest.mark.parametrize("bad", [{"n_chains": 0}, {"n_draws": 0}, {"every": 0}, {"n_warmup": -1}])
def test_run_refuses_counts_of_nothing(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Run(**bad)


def test_ess_spread_counts_draws_of_a_gaussian_and_sees_heavy_tails(rng):
    normal = rng.standard_normal((4, 4000))
    assert ess_spread(normal) == pytest.approx(16_000, rel=0.1)
    # V[s] / v^2 is the kurtosis less one: 8 for Laplace's distribution less 3, against 2.
    assert ess_spread(rng.laplace(size=(4, 4000))) == pytest.approx(16_000 * 2 / 5, rel=0.25)
    assert math.isnan(ess_spread(normal[:, :3]))
