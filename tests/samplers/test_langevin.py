"""Langevin dynamics with noisy gradients, on targets whose moments and noise are known."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from joblib import parallel_config

from skgp.samplers import (
    PowerSchedule,
    Run,
    ess_bulk,
    noise_ratio,
    r_hat,
    stein_weights,
    stochastic_langevin,
)
from skgp.samplers.langevin_steps import STEPS, LangevinChain, Settings, kick_matrix
from tests.same import assert_same


def langevin(target, mean, covariance, *, rng=None, sampler="langevin", bounds=None, **options):
    rng = np.random.default_rng(1) if rng is None else rng
    schedule = options.pop("schedule", 1.0)
    own = dict(sampler=sampler, schedule=schedule, bounds=bounds, run=Run(**options))
    return stochastic_langevin(target, np.asarray(mean), np.asarray(covariance), rng=rng, **own)


class Noisy:
    """A gradient with Gaussian noise, a fixed draw for each entry."""

    def __init__(self, slope, noise, n_entries=4096):
        self.slope, self.n_entries = slope, n_entries
        values, vectors = np.linalg.eigh(noise)
        draws = np.random.default_rng(0).standard_normal((n_entries, len(noise)))
        self.errors = (draws - draws.mean(0)) @ (vectors * np.sqrt(values.clip(0))).T

    def __call__(self, u, entry, rng, memory):
        return self.slope(u) + self.errors[entry], (memory or 0) + 1


@dataclass
class Gaussian:
    mean: np.ndarray
    covariance: np.ndarray

    def __post_init__(self):
        self.precision = np.linalg.inv(self.covariance)

    def __call__(self, u):
        return -self.precision @ (u - self.mean)


def log_gamma(u):
    """Logarithms of Gamma variables of shape 3."""
    return 3 - np.exp(u)


GAMMA_MEAN, GAMMA_VAR = 0.9227843350984671, 0.3949340668482264  # digamma(3), trigamma(3)
GAMMA_MODE, GAMMA_LAPLACE = math.log(3), 1 / 3


def z_of_moments(points, mean, var):
    """Standard errors, by their ESS, of means and variances (n_chains, n_draws, p) -> (2, p)."""
    out = []
    for j in range(points.shape[2]):
        column = points[:, :, j]
        squares = (column - mean[j]) ** 2
        out.append(
            [
                (c.mean() - expected) / (c.std() / math.sqrt(ess_bulk(c)))
                for c, expected in ((column, mean[j]), (squares, var[j]))
            ]
        )
    return np.array(out).T


def correlated(rng, p):
    root = rng.standard_normal((p, p))
    return root @ root.T + np.eye(p)


# ------------------------------------------------------------------------------- moments


@pytest.mark.parametrize(
    ("sampler", "step", "size"),
    [("langevin", 0.7, 0.8), ("langevin", 1.5, 0.8), ("mala", 1.0, 0.1)],
)
def test_moments_of_a_gaussian_are_free_of_the_noise(sampler, step, size, rng):
    """Uncorrected, the noise would widen the first direction by step / (4 - step) * size."""
    target = Gaussian(rng.standard_normal(3), correlated(rng, 3))
    factor = np.linalg.cholesky(target.covariance)
    whitened = size * np.diag([1.0, 0.3, 0.0])
    noise = np.linalg.solve(factor.T, np.linalg.solve(factor.T, whitened).T)
    found = langevin(
        Noisy(target, noise), target.mean, target.covariance, rng=rng, sampler=sampler,
        schedule=step, n_chains=8, n_draws=400,
    )  # fmt: skip
    x = np.linalg.solve(factor, (found.points - target.mean).reshape(-1, 3).T)
    z = z_of_moments(x.T.reshape(found.points.shape), np.zeros(3), np.ones(3))
    assert np.all(np.abs(z) < 4), z
    assert found.noise_ratio == pytest.approx(size, rel=0.3)
    assert np.all(found.n_astray < 20) and not found.astray.any() and found.floored == 0


def test_langevin_is_exact_for_gaussians_of_another_width(rng):
    """The approximation is half as wide; correcting the injected noise for it would not do."""
    target = Gaussian(np.zeros(2), np.diag([2.0, 0.5]))
    found = langevin(
        Noisy(target, np.zeros((2, 2))), np.zeros(2), np.eye(2), rng=rng, n_chains=8, n_draws=600
    )
    z = z_of_moments(found.points, np.zeros(2), np.array([2.0, 0.5]))
    assert np.all(np.abs(z) < 4), z


def test_kick_leaves_the_variance_at_one():
    """The stationary variance of draws by the recursion of covariances, iterated."""
    noise = np.array([[0.6, 0.2], [0.2, 0.3]])
    for step in (0.3, 1.0, 1.5):
        kick, floored = kick_matrix(step, noise)
        left = kick - step / 2 * np.eye(2)
        x = np.eye(2)
        for _ in range(500):
            x = (1 - step / 2) ** 2 * x + step / 4 * left @ left.T + step**2 / 4 * noise
        np.testing.assert_allclose(x + step / 4 * np.eye(2), np.eye(2), atol=1e-12)
        assert floored == 0
    kick, floored = kick_matrix(1.0, np.diag([5.0, 0.0]))
    np.testing.assert_allclose(np.diag(kick), [0.5, 2.0])
    assert floored == pytest.approx(5 - 4 * 0.75**2)


def test_mala_is_unbiased_where_the_plain_step_is_not(rng):
    """A skew target and long steps: the bias of the plain dynamics shows, MALA has none."""

    def run(sampler):
        found = langevin(
            Noisy(log_gamma, 1e-4 * np.eye(2)), np.full(2, GAMMA_MODE),
            GAMMA_LAPLACE * np.eye(2), sampler=sampler, schedule=1.8, n_chains=8, n_draws=500,
        )  # fmt: skip
        return found, z_of_moments(found.points, [GAMMA_MEAN] * 2, [GAMMA_VAR] * 2)

    _, plain = run("sgld")
    found, z = run("mala")
    assert plain[1].min() > 6  # the variance is 1 / (1 - 1.8 / 4) of what it should be
    assert np.all(np.abs(z) < 4), z
    assert np.all((found.acceptance > 0.4) & (found.acceptance < 0.95))


def test_langevin_keeps_the_skewness(rng):
    """Third moments by the step evaluated ahead; the step with corrected noise keeps half."""
    found = langevin(
        Noisy(log_gamma, 1e-4 * np.eye(4)), np.full(4, GAMMA_MODE), GAMMA_LAPLACE * np.eye(4),
        rng=rng, n_chains=8, n_draws=700,
    )  # fmt: skip
    z = z_of_moments(found.points, [GAMMA_MEAN] * 4, [GAMMA_VAR] * 4)
    assert np.all(np.abs(z) < 4), z
    skew = ((found.points - GAMMA_MEAN) ** 3).mean() / GAMMA_VAR**1.5
    assert skew == pytest.approx(-0.622, abs=0.15)  # psi''(3) / psi'(3)^1.5


# ------------------------------------------------------------------------------- weights


def test_stein_weights_fulfil_the_identities_and_sharpen_moments(rng):
    """Independent draws of a skew density and gradients with noise, many times."""
    errors = []
    for _ in range(60):
        u = np.log(rng.gamma(10.0, size=(600, 2)))
        g = 10 - np.exp(u) + 0.3 * rng.standard_normal(u.shape)
        w = stein_weights(u, g, 600)
        assert w.min() > 0 and w.sum() == pytest.approx(1.0)
        np.testing.assert_allclose(w @ g, 0.0, atol=1e-6)
        scale = u.std(0)
        product = (w[:, None] * (u - u.mean(0)) / scale).T @ (g * scale)
        np.testing.assert_allclose((product + product.T) / 2, -np.eye(2), atol=1e-6)
        weighted = [w @ u[:, 0], w @ (u[:, 0] - w @ u[:, 0]) ** 2]
        errors.append([*weighted, u[:, 0].mean(), u[:, 0].var()])
    mean, var, plain_mean, plain_var = np.array(errors).T
    assert mean.std() < 0.35 * plain_mean.std() and var.std() < 0.6 * plain_var.std()
    z = (mean.mean() - 2.2517525890667211) / (mean.std() / 60**0.5)  # digamma(10)
    assert abs(z) < 4


def test_stein_weights_are_equal_where_draws_are_few_or_the_gradient_another(rng):
    u = rng.standard_normal((50, 3))
    assert_same(stein_weights(u, -u, 11.0), np.full(50, 0.02))
    assert_same(stein_weights(u, -u - 50.0, 50.0), np.full(50, 0.02))
    assert_same(stein_weights(u[:1], -u[:1], 50.0), [1.0])
    first_alone = stein_weights(u, -u, 13.0)
    np.testing.assert_allclose(first_alone @ u, 0.0, atol=1e-7)
    assert abs(first_alone @ u[:, 0] ** 2 - 1) > 0.01


# ----------------------------------------------------------------------- schedule and SGLD


def test_power_schedule_equals_its_formula():
    schedule = PowerSchedule.between(0.1, 1e-4, 40_000)
    assert schedule(1) == pytest.approx(0.1) and schedule(40_000) == pytest.approx(1e-4)
    assert schedule.gamma == 1
    assert schedule(700) == pytest.approx(schedule.a / (schedule.b + 700))
    half = PowerSchedule.between(0.1, 1e-3, 100, gamma=0.55)
    assert half(100) == pytest.approx(half.a * (half.b + 100) ** -0.55) == pytest.approx(1e-3)


def test_noise_ratio_equals_the_dense_computation(rng):
    M, V = correlated(rng, 4), correlated(rng, 4)
    values, vectors = np.linalg.eigh(M)
    root = (vectors * np.sqrt(values)) @ vectors.T  # the symmetric one of equation (7)
    expected = 0.3 / 4 * np.linalg.eigvalsh(root @ V @ root).max()
    F = np.linalg.cholesky(M)  # that of gradients whitened by any root
    assert noise_ratio(0.3, F.T @ V @ F) == pytest.approx(expected)


def test_sgld_takes_the_papers_steps(rng):
    """Equation (5) by hand, with the same random numbers; an entry lasts 20 iterations."""
    entries = []

    def target(u, entry, rng, memory):
        entries.append(entry)
        return -2.0 * u, None

    target.n_entries = 10**6
    M = correlated(rng, 2)
    schedule = PowerSchedule.between(0.1, 0.01, 50)
    found = langevin(
        target, np.zeros(2), M, rng=np.random.default_rng(7), sampler="sgld",
        schedule=schedule, n_chains=1, n_warmup=0, n_draws=50,
    )  # fmt: skip
    (stream,) = np.random.default_rng(7).spawn(1)
    factor = np.linalg.cholesky(M)
    theta, expected = factor @ stream.standard_normal(2), []
    for t in range(50):
        if t % 20 == 0:
            stream.integers(10**6)
        expected.append(theta)
        e = schedule(t + 1)
        injected = math.sqrt(e) * factor @ stream.standard_normal(2)
        theta = theta + e / 2 * M @ (-2.0 * theta) + injected
    np.testing.assert_allclose(found.points[0], expected, rtol=1e-9)
    assert len(set(entries[:20])) == len(set(entries[20:40])) == 1 and len(set(entries)) == 3


def test_sgld_holds_its_step_where_the_criterion_says_so(rng):
    target = Gaussian(np.zeros(1), np.eye(1))
    found = langevin(
        Noisy(target, 0.01 * np.eye(1)), np.zeros(1), np.eye(1), rng=rng, sampler="sgld",
        schedule=PowerSchedule.between(0.1, 1e-4, 1500), n_warmup=0, n_draws=1500,
    )  # fmt: skip
    assert found.frozen and np.all(found.criterion < 0.02)
    assert found.points.shape[1] < 1500 and np.all(found.step_size > 1e-4)
    never = langevin(
        Noisy(target, np.eye(1)), np.zeros(1), np.eye(1), rng=rng, sampler="sgld",
        schedule=0.1, n_warmup=0, n_draws=200, target_ess=1, max_r_hat=99,
    )  # fmt: skip
    assert not never.frozen and not never.converged and np.all(never.criterion > 0.002)
    assert never.points.shape[1] == 200


# ------------------------------------------------------------------------------- chains


@pytest.mark.parametrize("sampler", sorted(STEPS))
def test_langevin_does_not_depend_on_the_workers(sampler):
    def run(n_jobs):
        return langevin(
            Noisy(log_gamma, 0.1 * np.eye(2)), np.ones(2), np.eye(2) / 3, sampler=sampler,
            rng=np.random.default_rng(5), schedule=0.5, n_jobs=n_jobs, n_warmup=30, n_draws=60,
        )  # fmt: skip

    alone = run(None)
    with parallel_config("threading"):
        together = run(2)
    assert_same(alone.points, together.points)
    assert_same(alone.weights, together.weights)
    assert not np.array_equal(alone.points[0], alone.points[1])


def test_langevin_stops_at_the_size_asked_for(rng):
    covariance = np.array([[1.0, 0.8], [0.8, 1.0]])
    target = Noisy(Gaussian(np.zeros(2), covariance), 0.1 * np.eye(2))
    found = langevin(
        target, np.zeros(2), covariance, rng=rng, target_ess=200, max_r_hat=1.05, n_draws=5000
    )
    assert found.converged and found.points.shape[1] < 1000
    assert np.all(found.ess >= 200) and np.all(found.r_hat <= 1.05)
    # Of the coordinates of the points, not of whitened ones.
    each = [r_hat(found.points[..., j]) for j in range(found.points.shape[-1])]
    np.testing.assert_allclose(found.r_hat, each)
    # One gradient an iteration, and the second ones that show the noise.
    n_iterations = found.points.shape[1] + 50
    seconds = 4 * (25 + math.ceil(found.points.shape[1] / 10))
    assert found.n_gradients == sum(found.memories) == 4 * n_iterations + seconds


def test_langevin_stops_by_callback_and_draws_the_same_however_often_it_calls_back():
    def run(every, last):
        seen = []

        def callback(iteration, info):
            seen.append(iteration)
            assert set(info) == {"loss", "ess", "r_hat"}
            return iteration >= last

        found = langevin(
            Noisy(log_gamma, 0.1 * np.eye(2)), np.ones(2), np.eye(2) / 3, n_warmup=30,
            n_draws=70, every=every, callback=callback,
        )  # fmt: skip
        return found, seen

    (seldom, few), (often, many), (stopped, _) = run(25, 99), run(10, 99), run(25, 55)
    assert few == [25, 30, 55, 80, 100] and many[:9] == [10, 20, 25, 30, 40, 50, 55, 65, 75]
    assert_same(seldom.points, often.points)
    assert_same(seldom.weights, often.weights)
    assert_same(stopped.points, seldom.points[:, :25])
    assert stopped.weights.sum() == pytest.approx(1.0)


def test_a_chain_gone_astray_is_reported_and_left_out(rng):
    """The chain that begins highest never meets a finite gradient."""

    class Cliff:
        n_entries = 2

        def __init__(self, edge):
            self.edge = edge

        def __call__(self, u, entry, rng, memory):
            memory = u[0] if memory is None else memory  # where the chain began
            return (-u if memory < self.edge else np.full(1, np.nan)), memory

    starts = [child.standard_normal() for child in np.random.default_rng(1).spawn(4)]
    found = langevin(Cliff(max(starts)), np.zeros(1), np.eye(1), sampler="mala", n_draws=100)
    gone = int(np.argmax(starts))
    assert found.astray.tolist() == [i == gone for i in range(4)]
    assert found.n_astray[gone] == 100 and np.all(found.weights[gone] == 0)
    assert found.weights.sum() == pytest.approx(1.0) and np.isfinite(found.r_hat).all()


def test_draws_stay_within_bounds(rng):
    bounds = np.array([[-0.5, 1.0]])
    for sampler in sorted(STEPS):
        found = langevin(
            Noisy(Gaussian(np.zeros(1), np.eye(1)), np.zeros((1, 1))), np.zeros(1), np.eye(1),
            rng=rng, sampler=sampler, bounds=bounds, n_draws=100,
        )  # fmt: skip
        assert found.points.min() >= -0.5 and found.points.max() <= 1.0
        assert found.n_astray.sum() > 0 or sampler == "mala"


def test_a_long_gradient_is_clipped(rng):
    settings = Settings(
        Noisy(lambda u: 1e6 * np.ones(4), np.zeros((4, 4))),
        np.zeros(4),
        np.eye(4),
        np.full((4, 2), [-9.0, 9.0]),
        1.0,
        "langevin",
        0,
        np.zeros((4, 4)),
    )
    chain = LangevinChain(np.zeros(4), rng, np.zeros(4), np.zeros(4), np.zeros((4, 4)))
    gradient = settings.gradient(chain, np.zeros(4), 0)
    assert np.linalg.norm(gradient) == pytest.approx(6 * 2) and chain.n_astray == 1


def test_langevin_refuses_bad_input(rng):
    target = Noisy(log_gamma, np.eye(1))
    for scale, settings, message in (
        (-1.0, {}, "positive definite"),
        (1.0, {"schedule": 4.0}, "between 0 and 4"),
    ):
        with pytest.raises(ValueError, match=message):
            langevin(target, np.zeros(1), scale * np.eye(1), rng=rng, **settings)
