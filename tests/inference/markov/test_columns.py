"""The inverse covariance of a series times columns against dense matrices."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov import series as layout
from skgp.inference.markov.columns import DenseColumns, SeriesColumns, between, columns_of
from skgp.inference.markov.series import Lags
from skgp.kernels import SHO, Cosine, LocalLinearTrend
from skgp.kernels.sde import state_space
from tests.reference.state_space import model_covariance

KERNELS = {
    "one": 1.3 * Matern(0.7, nu=1.5),
    "sum": 1.3 * Matern(0.7, nu=1.5) + 0.4 * Matern(3.0, nu=0.5),
    "product": Cosine(2.0) * Matern(5.0, nu=1.5) + 0.1 * Matern(1.0, nu=2.5),
}


def problem(kernel, *, grid, n=70, seed=0):
    rng = np.random.default_rng(seed)
    gaps = np.full(n, 0.25) if grid else rng.exponential(0.2, n)
    if not grid:
        gaps[[3, 4, n // 2]] = 0.0
        gaps[n // 3] = 40.0
    x = np.cumsum(gaps)
    weight = rng.uniform(0.5, 9.0, n)
    C = rng.normal(size=(n, 5)) + x[:, None] / 10
    form = state_space(kernel)
    dynamics = form.at()
    return x, weight, C, form, dynamics


def made(route, dynamics, x, weight, monkeypatch, tiles=False):
    gaps = dynamics.gaps(torch.tensor(x))
    if route == "dense":
        found = columns_of(dynamics, gaps, torch.tensor(weight), Lags.between(gaps))
        assert isinstance(found, DenseColumns)
        return found
    if tiles:
        monkeypatch.setattr(layout.defaults, "CHUNKS_BYTES", 1)  # a tile a chunk
    return SeriesColumns(dynamics, gaps, torch.tensor(weight))


@pytest.mark.parametrize("route", ["dense", "series", "tiles"])
@pytest.mark.parametrize("grid", [True, False], ids=["grid", "irregular"])
@pytest.mark.parametrize("name", KERNELS)
def test_columns_equal_dense_matrices(monkeypatch, route, grid, name):
    x, weight, C, form, dynamics = problem(KERNELS[name], grid=grid)
    found = made(route, dynamics, x, weight, monkeypatch, route == "tiles")
    K = model_covariance(dynamics, x)
    V = K + np.diag(1 / weight)
    inverse = np.linalg.inv(V)
    close = {"rtol": 1e-9, "atol": 1e-10}
    half_log_det = 0.5 * np.linalg.slogdet(V * weight)[1]
    np.testing.assert_allclose(found.half_log_det, half_log_det, **close)
    np.testing.assert_allclose(found.var, np.diag(K - K @ inverse @ K), **close)
    white, g = found.whiten(torch.tensor(C))
    np.testing.assert_allclose(white.T @ (g[:, None] * white), C.T @ inverse @ C, **close)
    states = found.smooth(white)
    np.testing.assert_allclose(found.observe(states), K @ inverse @ C, **close)

    def quadratic(parameters):
        K = model_covariance(form.at(parameters), x)
        trace = np.trace(inverse @ K) / 2
        return np.array([0.5 * np.sum((inverse @ C) * (K @ inverse @ C)), trace])

    parameters, slopes = form.parameters(), []
    for step in 1e-5 * torch.eye(len(parameters), dtype=torch.float64):
        slopes.append((quadratic(parameters + step) - quadratic(parameters - step)) / 2e-5)
    quad, trace = np.array(slopes).T
    scale = np.abs(quad).max()
    np.testing.assert_allclose(found.pull(states), quad, rtol=1e-6, atol=1e-8 * scale)
    np.testing.assert_allclose(found.half_trace, trace, rtol=1e-6, atol=1e-6)


def test_columns_of_a_trend_equal_dense_matrices_with_gradients_in_theta():
    kernel = LocalLinearTrend(1.0, 2.0, 0.3) + 0.4 * Matern(3.0, nu=0.5) + SHO()
    x, weight, C, form, _ = problem(kernel, grid=False)
    theta = torch.tensor(kernel.theta, requires_grad=True)
    parameters = form.parameters(theta)
    dynamics = form.at(parameters.detach())
    found = made("series", dynamics, x, weight, None)
    K, slopes = kernel(x[:, None], eval_gradient=True)
    inverse = np.linalg.inv(K + np.diag(1 / weight))
    states = found.smooth(found.whiten(torch.tensor(C))[0])
    np.testing.assert_allclose(found.observe(states), K @ inverse @ C, rtol=1e-7, atol=1e-7)
    new = torch.tensor([0.0, x[0] / 2, x[5] + 0.01, x[-1] + 3])
    s = between(dynamics, torch.tensor(x), states, new)
    f = torch.einsum("d,dsn->ns", dynamics.observation, s)
    expected = kernel(new.numpy()[:, None], x[:, None]) @ inverse @ C
    np.testing.assert_allclose(f, expected, rtol=1e-7, atol=1e-6)
    (parameters @ (found.pull(states) - found.half_trace)).backward()
    of_a = np.einsum("is,ijp,js->p", inverse @ C, slopes, inverse @ C)
    expected = 0.5 * (of_a - np.einsum("ij,jip->p", inverse, slopes))
    np.testing.assert_allclose(theta.grad, expected, rtol=1e-7, atol=1e-7 * np.abs(expected).max())


def test_stretches_apart_do_not_meet():
    x, weight, C, _, dynamics = problem(KERNELS["sum"], grid=False)
    gaps = torch.tensor(np.diff(x, prepend=x[0]))
    gaps[60] = torch.inf
    found = SeriesColumns(dynamics, gaps, torch.tensor(weight))
    parts = [
        SeriesColumns(dynamics, torch.cat([gaps[:1], gaps[1:60]]), torch.tensor(weight[:60])),
        SeriesColumns(dynamics, gaps[60:].nan_to_num(posinf=0), torch.tensor(weight[60:])),
    ]
    columns = torch.tensor(C)
    whole = found.smooth(found.whiten(columns)[0])
    states = [p.smooth(p.whiten(c)[0]) for p, c in zip(parts, columns.split([60, 10]), strict=True)]
    smoothed = [part.observe(each) for part, each in zip(parts, states, strict=True)]
    torch.testing.assert_close(found.observe(whole), torch.cat(smoothed), rtol=1e-11, atol=1e-11)
    pulls = [part.pull(each) for part, each in zip(parts, states, strict=True)]
    torch.testing.assert_close(found.pull(whole), sum(pulls), rtol=1e-9, atol=1e-9)
