"""Covariances of f at any times with f at the points of a series are those of the dense GP."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.markov import additive_states
from skgp.inference.markov.additive_states import PointCovariances
from skgp.inference.markov.posterior import Posterior
from skgp.kernels.sde import state_space
from tests.covering import covering

KERNELS = {
    "matern": 1.5 * Matern(0.7, nu=1.5),
    "rough": Matern(2.0, nu=0.5),
    "sum": 0.5 * Matern(0.4, nu=2.5) + Matern(3.0, nu=0.5),
}


def dense(kernel, x, times, weight):
    """Posterior covariances (n, m) of f at x with f at the times, of sites of some weights."""
    both = np.concatenate([x, times])[:, None]
    K, n = kernel(both), len(x)
    inner = np.linalg.inv(np.eye(len(times)) + weight[:, None] * K[n:, n:])
    return K[:n, n:] @ inner


def case(kernel, n, m, seed=0):
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(-1, 4, m))
    weight = 1e4 ** rng.uniform(-1, 1, m)
    weight[::3] = 0.0  # a missing value
    x = rng.uniform(-2, 5, n)
    x[: min(3, n)] = times[[0, m // 2, -1]][: min(3, n)]
    sites = torch.from_numpy(rng.standard_normal(m)), torch.from_numpy(weight)
    posterior = Posterior(state_space(kernel).at(), torch.from_numpy(times), *sites)
    found = PointCovariances.of(state_space(kernel).at(), posterior, torch.from_numpy(x))
    return found, dense(kernel, x, times, weight)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=list(KERNELS))
def test_covariances_are_those_of_the_dense_gp(kernel):
    found, expected = case(kernel, 40, 12)
    np.testing.assert_allclose(found.dense(), expected, rtol=1e-9, atol=1e-11)
    v = np.random.default_rng(1).standard_normal((12, 2))
    np.testing.assert_allclose(found @ torch.from_numpy(v), expected @ v, rtol=1e-9, atol=1e-11)


def test_covariances_between_smooth_points_close_together():
    """Squared exponentials, whose state at two close points is nearly known by that at one."""
    exact = state_space(RBF(2.0)).at()
    x, times = torch.linspace(-2, 5, 60).double(), torch.linspace(0, 1e-3, 30).double()
    posterior = Posterior(exact, times, torch.ones(30).double(), torch.full((30,), 1e6).double())
    found = PointCovariances.of(exact, posterior, x).dense()
    joint = posterior.covariance(torch.cat([x, times]))[1][:60, 60:]
    np.testing.assert_allclose(found, joint, atol=1e-9)


@covering(kernel=KERNELS.values(), n=[1, 30, 3000])  # by covariances, by a table of the states
def test_quadratic_forms_are_those_of_the_dense_gp(kernel, n, monkeypatch):
    monkeypatch.setattr(additive_states, "tile_rows", lambda row_bytes: 7)
    left, A = case(kernel, n, 9)
    right, B = case(KERNELS["matern"], n, 14, seed=1)
    C = np.random.default_rng(2).standard_normal((9, 14))
    expected = np.einsum("ij,jk,ik->i", A, C, B)
    np.testing.assert_allclose(left.form(torch.from_numpy(C), right), expected, atol=1e-10)
    monkeypatch.setattr(additive_states, "BATCH_NUMBERS", 0)  # a table would be too large
    np.testing.assert_allclose(left.form(torch.from_numpy(C), right), expected, atol=1e-10)
