"""The chunked smoother against dense Gaussian processes and against a loop over the data."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov import series as layout
from skgp.inference.markov import smoother
from skgp.inference.markov.short import DensePrior
from skgp.inference.markov.smoother import evidence
from skgp.kernels import Cosine, LocalLinearTrend
from skgp.kernels.sde import state_space
from skgp.linalg import NotPositiveDefiniteError
from tests.reference.state_space import (
    awkward_series,
    dense_posterior,
    kalman_loop,
    model_covariance,
    smoother_loop,
)
from tests.reference.state_space_kernels import SIX_STATES, each_series_kernel

MATERN = 1.3 * Matern(0.7, nu=1.5)
SUM = MATERN + 0.4 * Matern(3.0, nu=2.5)


@pytest.fixture(autouse=True, params=["dense", "chunks", "points"])
def route(request, monkeypatch):
    """Short series go any way; all are held to the same oracles."""
    if request.param != "dense":
        monkeypatch.setattr(layout.defaults, "MAX_TIMES", 0)
        monkeypatch.setattr(layout.defaults, "MOST_TIMES", 0)
    if request.param == "points":
        monkeypatch.setattr(smoother, "dense_evidence", lambda *_: None)
    return request.param


def dynamics_of(kernel):
    form = state_space(kernel)
    return form.at()


def tensors(x, beta, weight):
    """Gaps, beta and weight as the core takes them."""
    return torch.tensor(np.diff(x, prepend=x[0])), torch.tensor(beta), torch.tensor(weight)


def assert_close_to_dense(found, dense):
    np.testing.assert_allclose(found.log_normalizer, dense.log_normalizer, rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(found.mean, dense.mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(found.var, np.diag(dense.cov), rtol=1e-10, atol=1e-12)


@each_series_kernel(exact=True)
def test_evidence_equals_the_dense_gp_with_its_gradient_in_theta(case):
    kernel = case.make()
    # An oscillation that never fades turns the rounding of a long gap into one of its phase.
    x, beta, weight = awkward_series(jump=1e4 if case.forgets else 30.0)
    K, slopes = kernel(x[:, None], eval_gradient=True)
    dense = dense_posterior(K, beta, weight, slopes)
    form = state_space(kernel)
    theta = torch.tensor(kernel.theta, requires_grad=True)
    parameters = form.parameters(theta)
    dynamics = form.at(parameters.detach())
    found = evidence(dynamics, *tensors(x, beta, weight))
    assert_close_to_dense(found, dense)
    (parameters @ found.parameter_gradient).backward()
    np.testing.assert_allclose(theta.grad, dense.gradient, rtol=2e-10, atol=2e-10 * len(x))


@each_series_kernel(exact=False)
def test_evidence_of_an_approximate_kernel_is_exact_for_its_form(case, route):
    dynamics = dynamics_of(case.make())
    x, beta, weight = awkward_series(n=60, jump=30.0)
    K = model_covariance(dynamics, x)
    if route == "dense":  # RBF is no approximation there
        K, of_form = dynamics.covariance(np.abs(x[:, None] - x))[0], K
        tolerance = 1e-12 if case.tolerance == SIX_STATES else case.tolerance * K[0, 0]
        assert np.abs(K - case.make()(x[:, None])).max() < tolerance
        assert np.abs(K - of_form).max() < 2 * case.tolerance * K[0, 0]
    dense = dense_posterior(K, beta, weight)
    assert_close_to_dense(evidence(dynamics, *tensors(x, beta, weight)), dense)


@pytest.mark.parametrize("route", ["points"], indirect=True)
@pytest.mark.parametrize("keep", [1.0, 0.7], ids=["all", "some"])
@pytest.mark.parametrize("start", [0.0, 1960.0])
def test_evidence_on_a_regular_grid_looks_transitions_up(monkeypatch, rng, keep, start):
    x = start + np.arange(120)[rng.uniform(size=120) < keep] / 12
    beta, weight = rng.normal(size=len(x)), rng.uniform(size=len(x))
    K, slopes = SUM(x[:, None], eval_gradient=True)
    dense = dense_posterior(K, beta, weight, slopes)
    dynamics = dynamics_of(SUM)
    called = []
    transition = dynamics.transition
    monkeypatch.setattr(dynamics, "transition", lambda g: called.append(len(g)) or transition(g))
    found = evidence(dynamics, *tensors(x, beta, weight))
    assert max(called) < 10
    assert_close_to_dense(found, dense)
    # Variances then rates, against a variance and a length scale for each part.
    slope = found.parameter_gradient[[0, 2, 1, 3]] * torch.tensor([1.0, -1, 1, -1])
    np.testing.assert_allclose(slope, dense.gradient, rtol=2e-10, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_evidence_of_a_few_points(n):
    x, beta, weight = np.arange(n) / 3, np.ones(n), np.full(n, 2.0)
    dense = dense_posterior(SUM(x[:, None]), beta, weight)
    assert_close_to_dense(evidence(dynamics_of(SUM), *tensors(x, beta, weight)), dense)


def test_evidence_in_tiles_is_the_same(monkeypatch):
    series = tensors(*awkward_series(200))
    whole = evidence(dynamics_of(SUM), *series)
    monkeypatch.setattr(layout.defaults, "CHUNKS_BYTES", 60_000)
    tiled = evidence(dynamics_of(SUM), *series)
    assert tiled.log_normalizer == pytest.approx(whole.log_normalizer, rel=1e-13)
    for name in ("parameter_gradient", "mean", "var"):
        torch.testing.assert_close(getattr(tiled, name), getattr(whole, name), rtol=1e-11, atol=0)


def test_infinite_gaps_part_a_series_into_independent_ones():
    x, beta, weight = awkward_series(120)
    gaps, beta, weight = tensors(x, beta, weight)
    gaps[50] = torch.inf
    dynamics = dynamics_of(SUM)
    whole = evidence(dynamics, gaps, beta, weight)
    parts = [evidence(dynamics, gaps[s], beta[s], weight[s]) for s in (slice(50), slice(50, 120))]
    assert whole.log_normalizer == pytest.approx(sum(p.log_normalizer for p in parts), rel=1e-12)
    total = sum(p.parameter_gradient for p in parts)
    torch.testing.assert_close(whole.parameter_gradient, total, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(whole.mean, torch.cat([p.mean for p in parts]), rtol=0, atol=1e-12)


def is_proper(kernel, x, weight):
    root = np.linalg.cholesky(kernel(x[:, None]) + 1e-13 * np.eye(len(x)))
    return np.linalg.eigvalsh(np.eye(len(x)) + root.T @ (weight[:, None] * root)).min() > 0


@pytest.mark.parametrize("kernel", [MATERN, SUM], ids=["one", "two"])
@pytest.mark.parametrize("n", [12, 80, 300])
def test_later_data_make_good_for_negative_weights(n, kernel):
    # Var(f) = 1.7 at most, so that a first weight of -3 alone leaves no posterior.
    x = np.arange(n) / 50
    beta, weight = np.sin(9 * x), np.where(np.arange(n) % 5 == 0, -3.0, 4.0)
    assert is_proper(kernel, x, weight) and 1 + weight[0] * kernel.diag(x[:1, None])[0] < 0
    dense = dense_posterior(kernel(x[:, None]), beta, weight)
    series = tensors(x, beta, weight)
    found = evidence(dynamics_of(kernel), *series)
    np.testing.assert_allclose(found.log_normalizer, dense.log_normalizer, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.mean, dense.mean, rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.var, np.diag(dense.cov), rtol=1e-8)
    # Turned round, the negative weights come after the data that make good for them.
    back = evidence(dynamics_of(kernel), *tensors(x, beta[::-1].copy(), weight[::-1].copy()))
    assert back.log_normalizer == pytest.approx(found.log_normalizer, rel=1e-9)


def test_improper_posteriors_are_told_from_proper_ones(rng):
    dynamics, told = dynamics_of(MATERN), []
    for _ in range(25):
        n = int(rng.integers(1, 90))
        x = np.sort(rng.uniform(0, 3, n))
        weight = np.where(rng.uniform(size=n) < rng.uniform(0, 0.3), -1.0, 1.0)
        weight = weight * rng.exponential(3.0, n)
        proper = is_proper(MATERN, x, weight)
        try:
            evidence(dynamics, *tensors(x, np.ones(n), weight))
        except NotPositiveDefiniteError:
            assert not proper
        else:
            assert proper
        told.append(proper)
    assert 10 < sum(told) < 50


@pytest.mark.parametrize("near", [-0.1, -1e-2, 1e-2, 1e-3, 1e-4, 1e-7, 0.0])
def test_pivots_near_zero_are_exact_or_refused(near):
    n = 60
    x, beta, weight = np.arange(n) / 30, np.ones(n), np.full(n, 5.0)
    weight[0] = -(1 + near) / 1.3  # D = -near
    dense = dense_posterior(MATERN(x[:, None]), beta, weight)
    series = tensors(x, beta, weight)
    if abs(near) < 1e-5:
        with pytest.raises(NotPositiveDefiniteError, match="must not vanish"):
            evidence(dynamics_of(MATERN), *series)
        return
    found = evidence(dynamics_of(MATERN), *series)
    np.testing.assert_allclose(found.log_normalizer, dense.log_normalizer, rtol=1e-11)
    np.testing.assert_allclose(found.mean, dense.mean, rtol=0, atol=1e-13 / abs(near))
    np.testing.assert_allclose(found.var, np.diag(dense.cov), rtol=1e-13 / near**2)


@pytest.mark.parametrize("tile_bytes", [2**29, 30_000])
def test_negative_weights_that_are_too_large_are_refused(monkeypatch, tile_bytes):
    monkeypatch.setattr(layout.defaults, "CHUNKS_BYTES", tile_bytes)
    x, beta, weight = awkward_series(80)
    weight[[10, 11]] = -40.0
    with pytest.raises(NotPositiveDefiniteError, match="negative eigenvalues.*Halve the step"):
        evidence(dynamics_of(MATERN), *tensors(x, beta, weight))


def test_centred_normaliser_leaves_out_the_sites_at_their_centres(rng):
    x, beta, weight = awkward_series(90)
    weight[5] = -0.3
    centre = rng.normal(size=len(x))
    series = tensors(x, beta, weight)
    plain = evidence(dynamics_of(SUM), *series)
    centred = evidence(dynamics_of(SUM), *series, centre=torch.tensor(centre))
    left_out = (beta * centre - weight * centre**2 / 2).sum()
    expected = plain.log_normalizer - left_out
    assert centred.log_normalizer == pytest.approx(expected, rel=1e-12, abs=1e-10)


def test_evidence_equals_loops_over_many_points(rng):
    n, dynamics = 3000, dynamics_of(MATERN)
    x = np.sort(rng.uniform(0, 100, n))
    weight = np.full(n, 9.0)
    series = tensors(x, weight * rng.normal(size=n), weight)
    F, Q = (np.moveaxis(t.numpy(), -1, 0) for t in dynamics.transition(series[0]))
    P0, H = dynamics.stationary.numpy(), dynamics.observation.numpy()
    expected, *states = kalman_loop(F, Q, P0, H, series[1].numpy(), weight)
    found = evidence(dynamics, *series)
    assert found.log_normalizer == pytest.approx(expected, rel=1e-12)
    mean, var = smoother_loop(F, H, *states)
    np.testing.assert_allclose(found.mean, mean, rtol=0, atol=1e-11)
    np.testing.assert_allclose(found.var, var, rtol=1e-9)


@pytest.mark.parametrize("route", ["dense"], indirect=True)
def test_next_to_no_noise_and_long_series_are_not_for_the_dense_route():
    dynamics, gaps = dynamics_of(MATERN), torch.full((50,), 0.1, dtype=torch.float64)
    weight = torch.ones_like(gaps)
    gap = gaps.index_fill(0, torch.tensor([20]), torch.inf)
    prior = DensePrior(dynamics, layout.Lags.of(gaps))
    w = weight.numpy()
    assert prior.suits(w) and not (prior.suits(1e10 * w) or prior.suits(-w))
    assert layout.Lags.of(gap) is None
    assert layout.few_times(2) < 450 < layout.few_times(50) < layout.few_times(10**6) < 2000


@pytest.mark.parametrize("route", ["dense"], indirect=True)
@pytest.mark.parametrize("times", [0.1 * np.arange(12) + 3.0, np.arange(12.0) ** 1.5])
def test_dense_covariances_are_those_of_transitions_with_an_origin_or_without(times):
    season = 0.7 * Cosine(0.4, "fixed") * Matern(3.0, nu=0.5)
    trend = LocalLinearTrend(0.3, 2.0, 0.5, level_bounds="fixed", origin=times[0] - 1)
    x = torch.from_numpy(times)
    series = layout.make_series(x, torch.zeros_like(x))
    bar = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bar = bar + bar.T
    for kernel in (SUM + season, season + trend):
        form = state_space(kernel)
        dynamics = form.at()
        lags = series.lags_of(dynamics)
        assert len(lags.tables[0].lags) == (12 if times[0] else 78)
        found, F = DensePrior(dynamics, lags), series_covariance(dynamics, x)
        torch.testing.assert_close(found.covariance, F, rtol=1e-11, atol=1e-12)
        slopes = found.pull(bar)
        for i, slope in enumerate(slopes.tolist()):
            ends = []
            for h in (-1e-5, 1e-5):
                moved = form.parameters().clone()
                moved[i] += h
                ends.append(0.5 * float((bar * series_covariance(form.at(moved), x)).sum()))
            assert slope == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-6, abs=1e-6)
        asked = [i % 2 == 0 for i in range(len(slopes))]
        for _ in range(2):  # what does not move is kept
            some = DensePrior(form.at(moving=asked), lags)
            torch.testing.assert_close(some.covariance, found.covariance, rtol=1e-14, atol=0)
            torch.testing.assert_close(some.pull(bar), slopes * torch.tensor(asked))


def series_covariance(dynamics, times):
    """K (m, m) by the transitions between all pairs of times, from the state at the first."""
    H, m = dynamics.observation, len(times)
    first = dynamics.gaps(times)[:1]
    F, Q = (each[..., 0] for each in dynamics.transition(first))
    P0 = F @ dynamics.stationary @ F.T + Q
    F, Q = dynamics.transition(times - times[0])
    K = torch.zeros(m, m, dtype=torch.float64)
    for j in range(m):
        P = F[..., j] @ P0 @ F[..., j].T + Q[..., j]
        ahead, _ = dynamics.transition(times[j:] - times[j])
        K[j:, j] = K[j, j:] = torch.einsum("a,abn,bc,c->n", H, ahead, P, H)
    return K


def test_evidence_may_enter_a_graph():
    found = evidence(dynamics_of(MATERN), *tensors(*awkward_series(20)))
    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    (leaf * found.mean**2 + leaf * found.var).sum().backward()
    assert float(leaf.grad) == pytest.approx(float((found.mean**2 + found.var).sum()))


def test_series_of_no_points_or_of_unequal_lengths_are_refused():
    empty, two = torch.zeros(0), torch.zeros(2)
    for arguments in ((empty, empty, empty), (two, two, empty)):
        with pytest.raises(ValueError, match="vectors of one length, at least 1"):
            evidence(dynamics_of(MATERN), *arguments)
