"""Evidence by dense factors of chunks against dense Gaussian processes and the filter."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern

from skgp.inference.markov import dense_chunks, smoother
from skgp.inference.markov.dense_chunks import DenseEvidence, dense_evidence
from skgp.kernels import SHO, Cosine, LocalLinearTrend
from skgp.kernels.sde import state_space
from skgp.kernels.sde_lags import Generators
from tests.reference.state_space import dense_posterior, model_covariance

QUASI_PERIODIC = Matern(20.0, nu=0.5) * ExpSineSquared(1.2, 3.0)
WAVES = Matern(5.0, nu=0.5) + SHO(3.0, 8.0)
KERNELS = {
    "quasi-periodic": QUASI_PERIODIC,
    "oscillators": SHO(1.0, 10.0) + 0.3 * SHO(3.0, 8.0) + SHO(7.0, 20.0),
    "sum": 2.0 * QUASI_PERIODIC + Matern(15.0, nu=1.5) + 0.5 * Matern(40.0, nu=2.5) + 1.0,
    "trend": LocalLinearTrend(1e-5, 10.0, 0.1, origin=0.0) + WAVES,
    "product": Matern(30.0, nu=1.5) * Cosine(2.0) * SHO(1.0, 10.0) + Matern(5.0, nu=0.5),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


def dynamics_of(name):
    kernel = KERNELS[name] if isinstance(name, str) else name
    return state_space(kernel).at()


def covariance_of(name, x):
    """At times x since the origin."""
    if name != "trend":
        return model_covariance(dynamics_of(name), x)
    low, high = np.minimum.outer(x, x), np.maximum.outer(x, x)
    trend = 10.0 + 0.1 * low * high + 1e-5 * low**2 * (3 * high - low) / 6
    return trend + model_covariance(dynamics_of(WAVES), x)


def awkward(n, noise, seed=0, wide=()):
    """Gaps with ties and wide ones, and sites of a noise variance, of which a tenth are missing."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(0.1, n)
    gaps[[3, 4, n // 2]] = 0.0
    gaps[n // 3], gaps[n // 4] = 1e-7, 4.0
    gaps[list(wide)] = 1e5
    x = np.cumsum(gaps)
    y = np.sin(x) + noise**0.5 * rng.normal(size=n)
    weight = rng.uniform(0.5, 2.0, n) / noise
    weight[rng.permutation(n)[: n // 10]] = 0.0
    gaps, y, weight = map(torch.tensor, (gaps, y, weight))
    return gaps, weight * y, weight, y


def by_points(dynamics, *series):
    """The same from point to point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smoother, "dense_evidence", lambda *_: None)
        return smoother.evidence(dynamics, *series)


def assert_same(found, other, tol):
    assert isinstance(found, DenseEvidence) and not isinstance(other, DenseEvidence)
    assert found.log_normalizer == pytest.approx(other.log_normalizer, rel=1e-2 * tol)
    scale = float(other.parameter_gradient.abs().max())
    close = {"rtol": tol, "atol": tol * scale}
    torch.testing.assert_close(found.parameter_gradient, other.parameter_gradient, **close)
    torch.testing.assert_close(found.mean, other.mean, rtol=0, atol=tol)
    torch.testing.assert_close(found.var, other.var, rtol=tol, atol=1e-3 * tol)
    assert found.spread == pytest.approx(other.spread, rel=tol)


@each_kernel
def test_evidence_equals_the_dense_gp(name):
    dynamics, (gaps, beta, weight, y) = dynamics_of(name), awkward(150, 0.1)
    found = dense_evidence(dynamics, gaps, beta, weight, None)
    x = np.cumsum(gaps.numpy())
    dense = dense_posterior(covariance_of(name, x), beta.numpy(), weight.numpy())
    assert found.log_normalizer == pytest.approx(dense.log_normalizer, rel=1e-11)
    np.testing.assert_allclose(found.mean, dense.mean, rtol=0, atol=1e-10)
    np.testing.assert_allclose(found.var, np.diag(dense.cov), rtol=1e-9)
    residual = dense.mean - y.numpy()
    assert found.misfit(y) == pytest.approx(float(weight.numpy() @ residual**2), rel=1e-9)


@each_kernel
@pytest.mark.parametrize("noise", [1e-3, 1e-6])
def test_little_noise_costs_no_more_digits_than_it_may(name, noise):
    dynamics, series = dynamics_of(name), awkward(600, noise)
    assert_same(dense_evidence(dynamics, *series), by_points(dynamics, *series), 1e-6)


def test_the_misfit_of_tops_takes_no_marginals(monkeypatch):
    dynamics, (gaps, beta, weight, y) = dynamics_of("oscillators"), awkward(300, 0.1)
    other = by_points(dynamics, gaps, beta, weight, y).misfit(y)
    monkeypatch.delattr(dense_chunks, "_moments")
    found = dense_evidence(dynamics, gaps, beta, weight, y)
    assert found.misfit(y) == pytest.approx(other, rel=1e-10)
    with pytest.raises(NameError):
        found.misfit(y + 1.0)


@pytest.mark.parametrize("name", ["product", "trend"])
def test_gradient_is_that_of_differences(name):
    form, series = state_space(KERNELS[name]), awkward(300, 0.1)
    level = form.parameters()
    gradient = dense_evidence(form.at(), *series).parameter_gradient
    for i, slope in enumerate(gradient.tolist()):
        step = torch.zeros_like(level)
        step[i] = 1e-5
        ends = [dense_evidence(form.at(level + s), *series).log_normalizer for s in (step, -step)]
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["quasi-periodic", "oscillators"])
def test_wide_gaps_are_cut_and_too_wide_stretches_shortened(name):
    """Beyond 8 gaps a chunk over which all is forgotten exponents leave the range of floats."""
    dynamics = dynamics_of(name)
    for wide in ((200, 300), range(100, 400, 2)):
        series = awkward(600, 0.1, wide=wide)
        assert_same(dense_evidence(dynamics, *series), by_points(dynamics, *series), 1e-7)
    gaps, *sites = awkward(600, 0.1)
    gaps[300] = torch.inf
    assert_same(dense_evidence(dynamics, gaps, *sites), by_points(dynamics, gaps, *sites), 1e-8)


def test_tiles_made_anew_are_the_same(monkeypatch):
    dynamics, series = dynamics_of("sum"), awkward(900, 0.1)
    whole = dense_evidence(dynamics, *series)
    monkeypatch.setattr(dense_chunks.defaults, "TILE_MATRICES", 5000)
    monkeypatch.setattr(dense_chunks.defaults, "CHUNKS_BYTES", 0)
    tiled = dense_evidence(dynamics, *series)
    assert tiled.log_normalizer == pytest.approx(whole.log_normalizer, rel=1e-12)
    for name in ("parameter_gradient", "mean", "var"):
        torch.testing.assert_close(getattr(tiled, name), getattr(whole, name), rtol=1e-9, atol=1e-9)


def test_sites_with_tops_far_away_and_their_values_at_a_centre(rng):
    dynamics, (gaps, beta, weight, _) = dynamics_of("oscillators"), awkward(500, 1.0)
    weight = weight * torch.tensor(10.0 ** rng.uniform(-4, 0, 500))
    centre = torch.tensor(rng.normal(size=500))
    for series in ((gaps, beta, weight, centre), (gaps, 1e-2 * beta, weight, None)):
        beta = torch.where(weight > 0, series[1], 0.0)
        series = series[0], beta, *series[2:]
        assert_same(dense_evidence(dynamics, *series), by_points(dynamics, *series), 1e-8)


def test_what_this_route_leaves_to_others():
    gaps, beta, weight, y = awkward(500, 0.1)
    dynamics = dynamics_of("oscillators")
    assert dense_evidence(dynamics, gaps, beta, weight, y) is not None
    negative = weight.index_fill(0, torch.tensor([7]), -1e-3)
    unset = weight.index_fill(0, torch.tensor([7]), 0.0)
    for other in (negative, unset, 1e7 * weight, weight * torch.nan):
        assert dense_evidence(dynamics, gaps, beta + 1e-3, other, None) is None
    for kernel in (RBF(), Matern()):
        assert (
            dense_evidence(dynamics_of(kernel), gaps.repeat(9), *[beta.repeat(9)] * 2, None) is None
        )
    long = gaps.index_fill(0, torch.tensor([200]), 1e4)
    assert dense_evidence(dynamics_of("sum"), long, beta, weight, y) is None
    assert dense_evidence(dynamics, 1e5 * gaps, beta, weight, y) is None


def test_vectors_make_the_covariance_given_the_state_before():
    dynamics = dynamics_of("product")
    generators = Generators([block for _, block in dynamics.blocks])
    gaps = torch.rand(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    clocks = generators.clock(gaps)
    u, v = (gaps.new_empty(2, dynamics.n_states, 7) for _ in range(2))
    generators.fill(clocks, None, u, v)
    F, Q = generators.ends(clocks)
    x, H = gaps.cumsum(1), dynamics.observation
    for c in range(2):
        own, noise = dynamics.transition(x[c])
        for i in range(7):
            ahead = dynamics.transition(x[c, i:] - x[c, i])[0]
            expected = torch.einsum("a,abm,bd,d->m", H, ahead, noise[..., i], H)
            torch.testing.assert_close(u[c, :, i:].T @ v[c, :, i], expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(F[c], own[..., -1], rtol=0, atol=1e-13)
        torch.testing.assert_close(Q[c], noise[..., -1], rtol=0, atol=1e-13)
