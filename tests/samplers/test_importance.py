"""Adaptive importance sampling of targets whose moments are known."""

import math

import numpy as np
import pytest
from joblib import parallel_config
from scipy.stats import kstest, multivariate_t, norm, t

from skgp.samplers import Rounds, StudentDensity, adaptive_importance_sampling
from tests.same import assert_same


def importance(target, mean, covariance, *, rng, shares=None, wide=None, **rounds):
    return adaptive_importance_sampling(
        target, mean, covariance, rng=rng, rounds=Rounds(**rounds), shares=shares, wide=wide
    )


class Gaussian:
    """Unnormalised Gaussian of given mean and covariance; picklable."""

    def __init__(self, mean, covariance, log_scale=0.0):
        self.mean, self.precision = np.asarray(mean), np.linalg.inv(covariance)
        self.covariance, self.log_scale = np.asarray(covariance), log_scale

    def __call__(self, x):
        centred = x - self.mean
        return float(self.log_scale - 0.5 * centred @ self.precision @ centred)

    @property
    def log_normalizer(self):
        return self.log_scale + 0.5 * np.linalg.slogdet(2 * np.pi * self.covariance)[1]


class LogGamma:
    """Independent logarithms of Gamma variables of shape 3: skew, of known moments."""

    shape = 3.0
    mean = 0.9227843350984671  # digamma(3)
    var = 0.3949340668482264  # trigamma(3)

    def __call__(self, x):
        return float(np.sum(self.shape * x - np.exp(x)))


def rough(p, shift=1.0, scale=2.0):
    """A proposal away from the standard normal and wider."""
    return np.full(p, shift), scale**2 * np.eye(p)


def correlated(p, rng):
    root = rng.standard_normal((p, p))
    return root @ root.T + np.eye(p)


def test_student_t_log_density_equals_scipy(rng):
    covariance = correlated(3, rng)
    law = StudentDensity(np.array([1.0, -2.0, 0.5]), np.linalg.cholesky(covariance), 7.0)
    x = rng.standard_normal((20, 3)) * 3
    expected = multivariate_t(law.location, covariance, df=7).logpdf(x)
    np.testing.assert_allclose(law.log_density(x), expected, rtol=1e-12)


def test_student_t_draws_have_the_distribution_and_are_mirrored(rng):
    covariance = correlated(3, rng)
    law = StudentDensity(np.array([1.0, -2.0, 0.5]), np.linalg.cholesky(covariance), 10.0)
    x = law.draw(2048, rng)
    np.testing.assert_allclose(x[:1024] + x[1024:], np.broadcast_to(2 * law.location, (1024, 3)))
    direction = np.array([0.3, -1.0, 2.0])
    scale = math.sqrt(direction @ covariance @ direction)
    z = (x - law.location) @ direction / scale
    assert kstest(z, t(10).cdf).pvalue > 0.01
    np.testing.assert_allclose(np.cov(x.T), covariance * 10 / 8, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("p", [1, 6])
def test_importance_sampling_of_a_gaussian_finds_its_moments(p, rng):
    target = Gaussian(rng.standard_normal(p), correlated(p, rng), log_scale=-500.0)
    sd = np.sqrt(np.diag(target.covariance))
    start = target.mean + sd, 2 * target.covariance
    runs = [importance(target, *start, rng=child, n_points=128) for child in rng.spawn(8)]
    assert all(run.converged and run.ess >= 400 and run.pareto_k < 0.7 for run in runs)
    errors = np.array([(run.mean - target.mean) / sd for run in runs])
    assert_zero_mean(errors)
    assert_zero_mean(np.array([np.diag(run.covariance) / sd**2 - 1 for run in runs]))
    integrals = np.array([run.log_normalizer - target.log_normalizer for run in runs])
    bias = p * (p + 3) / (4 * len(runs[0].points))
    assert abs(integrals.mean() + bias) < bias + 4 * integrals.std(ddof=1) / math.sqrt(len(runs))
    # Mirrored Sobol' points err less than as many independent draws as the ESS counts would.
    assert errors.std() < 1 / math.sqrt(400)


def assert_zero_mean(errors):
    z = errors.mean(axis=0) / (errors.std(axis=0, ddof=1) / math.sqrt(len(errors)))
    assert np.all(np.abs(z) < 4), z


def test_importance_weights_are_those_of_the_mixture(rng):
    target = LogGamma()
    found = importance(target, *rough(2), rng=rng, n_points=64, target_ess=1e9, max_rounds=1)
    law = multivariate_t(np.ones(2), 1.1**2 * 4 * np.eye(2), df=10)
    expected = [target(x) for x in found.points] - law.logpdf(found.points)
    expected -= np.log(np.sum(np.exp(expected)))
    np.testing.assert_allclose(found.log_weights, expected, rtol=1e-10)
    assert found.weights.sum() == pytest.approx(1.0)


def test_importance_weights_sum_to_one_however_large_the_log_density(rng):
    covariance = correlated(2, rng)
    found = [
        importance(
            Gaussian(np.ones(2), covariance, log_scale),
            *rough(2),
            rng=np.random.default_rng(0),
            max_rounds=3,
        )
        for log_scale in (0.0, -(2.0**36))
    ]
    for samples in found:
        np.testing.assert_allclose(samples.weights.sum(), 1, rtol=1e-14)
    # Seven digits of a nat are left of the log density, 2^-17.
    np.testing.assert_allclose(found[1].ess, found[0].ess, rtol=2.0**-12)


def test_importance_sampling_recovers_from_a_poor_start(rng):
    """Twelve standard deviations away in six dimensions: weights are tempered for the refits."""
    target = Gaussian(np.full(6, 12.0), np.eye(6))
    found = importance(target, np.zeros(6), 4 * np.eye(6), rng=rng)
    assert found.converged
    np.testing.assert_allclose(found.mean, 12.0, atol=0.2)
    np.testing.assert_allclose(found.covariance, np.eye(6), atol=0.35)


def test_importance_sampling_says_when_weights_cannot_be_trusted(rng):
    """A target of tails much heavier than any proposal's."""

    def cauchy(x):
        return float(-np.log1p(x**2).sum())

    found = importance(cauchy, np.zeros(4), np.eye(4), rng=rng, n_points=64, max_rounds=1)
    assert not found.converged and found.pareto_k > 0.7


def test_importance_sampling_leaves_out_points_outside_the_support(rng):
    def half(x):
        if x[0] < 0:
            return math.nan if x[0] < -1 else -math.inf
        return float(norm.logpdf(x[0]))

    found = importance(half, np.zeros(1), np.eye(1), rng=rng, target_ess=1000)
    assert np.all(found.weights[found.points[:, 0] < 0] == 0)
    assert found.mean[0] == pytest.approx(math.sqrt(2 / math.pi), abs=0.08)


def test_importance_sampling_does_not_depend_on_the_workers():
    def run(n_jobs):
        generator = np.random.default_rng(3)
        return importance(LogGamma(), *rough(2), rng=generator, n_jobs=n_jobs)

    alone = run(None)
    with parallel_config("threading"):
        together = run(2)
    assert_same(alone.points, together.points)
    assert_same(alone.log_weights, together.log_weights)


def test_importance_sampling_stops_by_callback_and_is_the_same_however_often_it_calls():
    def run(every, n_calls=10**9):
        seen = []

        def callback(iteration, info):
            seen.append(iteration)
            assert set(info) == {"loss", "ess", "pareto_k"}
            return len(seen) == n_calls

        found = importance(
            LogGamma(), *rough(2), rng=np.random.default_rng(1), n_points=32, target_ess=1e9,
            max_rounds=2, every=every, callback=callback,
        )  # fmt: skip
        return found, seen

    (whole, few), (parts, many), (stopped, _) = run(None), run(20), run(20, 3)
    assert few == [1, 2] and many == [1, 1, 2, 2]
    assert_same(whole.points, parts.points)
    assert_same(whole.log_weights, parts.log_weights)
    assert_same(stopped.points, whole.points[:52])
    assert stopped.round.tolist() == [0] * 32 + [1] * 20
    assert stopped.weights.sum() == pytest.approx(1.0)


def test_importance_sampling_waits_for_a_point_of_the_support(rng):
    """No point of the first stretch lies inside; the round's others do."""

    class Island:
        n_seen = 0

        def __call__(self, x):
            self.n_seen += 1
            return -math.inf if self.n_seen <= 4 else -0.5 * float(x @ x)

    found = importance(
        Island(), np.zeros(2), np.eye(2), rng=rng, n_points=32, max_rounds=1, every=4
    )
    assert len(found.points) == 32 and (found.weights[:4] == 0).all()


def test_importance_sampling_refuses_bad_input(rng):
    start = np.zeros(2), np.eye(2)
    with pytest.raises(ValueError, match="n_points must be even"):
        importance(LogGamma(), *start, rng=rng, n_points=7)
    with pytest.raises(ValueError, match="positive definite"):
        importance(LogGamma(), np.zeros(2), -np.eye(2), rng=rng)
    with pytest.raises(ValueError, match="zero .* at all 32 points"):
        importance(lambda x: -math.inf, *start, rng=rng, n_points=32)


def three_humps(x):
    """Gaussians at -6, 0 and 6 of weights 0.25, 0.5 and 0.25; the integral is 1."""
    return float(np.log(norm.pdf(x[0], [-6.0, 0.0, 6.0]) @ [0.25, 0.5, 0.25]))


def test_a_wide_proposal_finds_modes_that_none_starts_from(rng):
    wide = np.zeros(1), np.full((1, 1), 36.0)
    for child in rng.spawn(3):
        found = importance(three_humps, np.zeros(1), np.eye(1), rng=child, wide=wide)
        assert found.converged and found.log_normalizer == pytest.approx(0.0, abs=0.15)
        assert found.weights[found.points[:, 0] > 3].sum() == pytest.approx(0.25, abs=0.08)
        assert found.covariance[0, 0] == pytest.approx(19.0, rel=0.15)


def test_components_start_at_several_modes_and_are_fitted_to_them(rng):
    means = np.array([[-5.0], [1.0], [5.0]])
    covariances = np.broadcast_to(np.eye(1), (3, 1, 1))
    found = importance(
        three_humps, means, covariances, rng=rng, shares=np.array([0.1, 0.1, 0.8]), target_ess=600
    )
    assert found.converged and found.log_normalizer == pytest.approx(0.0, abs=0.1)
    centres = np.sort([q.location[0] for q in found.proposal.components])
    np.testing.assert_allclose(centres, [-6.0, 0.0, 6.0], atol=0.4)
    assert found.proposal.shares.sum() == pytest.approx(1.0)


def test_importance_sampling_goes_on_until_the_spread_is_known(rng):
    """Heavy tails: means are known before variances are."""

    def laplace(x):
        return float(-np.abs(x).sum())

    found = importance(laplace, np.zeros(2), np.eye(2), rng=rng, target_ess=400)
    assert found.converged and found.ess_spread >= 200
    np.testing.assert_allclose(np.diag(found.covariance), 2.0, rtol=0.3)


def test_proposals_follow_what_settles_variances(rng):
    """A tail of 3% of the mass has half of a variance; few points must not settle it."""

    def tail(x):
        z = (x - [-5.0, 0.0]) / [2.0, 1.0]
        return np.logaddexp(math.log(0.97) - 0.5 * x @ x, math.log(0.03 / 2) - 0.5 * z @ z)

    covariances = np.array([np.eye(2), 16 * np.eye(2)])
    wide = np.zeros(2), 16 * np.eye(2)
    shares = np.array([0.75, 0.25])
    for child in rng.spawn(3):
        found = importance(
            tail, np.zeros((2, 2)), covariances, rng=child, wide=wide, shares=shares, df=5
        )
        assert found.converged and len(found.points) <= 1024
        assert abs(found.covariance[0, 0] / 1.82 - 1) < 0.2
