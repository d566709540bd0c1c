"""Predictions of a short series by one factor equal those of the filter."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference import defaults
from skgp.inference.markov import short_posterior
from skgp.inference.markov.posterior import Posterior
from skgp.inference.markov.short_posterior import ShortPosterior, posterior_of
from skgp.kernels import Cosine, LocalLinearTrend, state_space

KERNELS = [
    1.3 * Matern(2.0, nu=1.5),
    LocalLinearTrend(0.1, 2.0, 0.1, origin=-1.0) + Cosine(1.7) * Matern(4.0, nu=0.5),
]


def series(kernel, n=30, precision=20.0):
    rng = np.random.default_rng(n)
    times = torch.from_numpy(np.sort(rng.uniform(0, 10, n)))
    weight = torch.from_numpy(precision * rng.uniform(0, 1, n) * (rng.uniform(size=n) < 0.8))
    return state_space(kernel).at(), times, weight * times.sin(), weight


@pytest.mark.parametrize("kernel", KERNELS, ids=["stationary", "trend"])
def test_marginals_are_those_of_the_filter(kernel):
    given = series(kernel)
    short, filtered = posterior_of(*given), Posterior(*given)
    assert isinstance(short, ShortPosterior)
    new = torch.tensor([3.0, -0.5, 14.0, 3.0, float(given[1][4])], dtype=torch.float64)
    for found, expected in zip(short.marginals(new), filtered.marginals(new), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    rows = torch.eye(given[0].n_states, dtype=torch.float64)
    assert torch.equal(short.latent(new, rows)[0], filtered.latent(new, rows)[0])
    assert torch.equal(short.covariance(new)[1], filtered.covariance(new)[1])


@pytest.mark.parametrize(
    "kernel",
    [1.3 * RBF(2.0), RBF(1.0) * Cosine(1.7) + 0.2 * Matern(1.5, nu=1.5) * RBF(3.0)],
    ids=["rbf", "products"],
)
def test_moments_and_slopes_of_rbf_are_those_of_a_dense_process(kernel):
    """Not those of the process that approximates it: on, between and off the times."""
    dynamics, times, beta, weight = series(kernel)
    short, seen = posterior_of(dynamics, times, beta, weight), weight > 0
    X, noise = times[seen].numpy()[:, None], np.diag(1 / weight[seen].numpy())
    new = torch.tensor([3.0, -0.5, 14.0, float(times[seen][4]), 5.5], dtype=torch.float64)

    def dense(x):
        cross, K = kernel(x[:, None], X), kernel(X) + noise
        mean = cross @ np.linalg.solve(K, np.sin(X[:, 0]))
        return mean, kernel(x[:, None]) - cross @ np.linalg.solve(K, cross.T)

    expected = dense(new.numpy())
    for found, each in zip(short.covariance(new), expected, strict=True):
        np.testing.assert_allclose(found, each, rtol=0, atol=1e-10)
    np.testing.assert_allclose(short.marginals(new)[1], expected[1].diagonal(), atol=1e-10)
    moving, step = new.clone().requires_grad_(), 1e-5
    mean, var = short.marginals(moving)
    ends = [dense(new.numpy() + sign * step) for sign in (1, -1)]
    for found, i in ((mean, 0), (var, 1)):
        (slope,) = torch.autograd.grad(found.sum(), moving, retain_graph=True)
        up, down = (end[0] if i == 0 else end[1].diagonal() for end in ends)
        np.testing.assert_allclose(slope, (up - down) / (2 * step), atol=1e-6)


def test_the_filter_predicts_before_an_origin_far_from_it_and_of_many(monkeypatch):
    given = series(KERNELS[1])
    short, filtered = posterior_of(*given), Posterior(*given)
    before = torch.tensor([-3.0, 2.0], dtype=torch.float64)
    assert torch.equal(short.marginals(before)[1], filtered.marginals(before)[1])
    monkeypatch.setattr(short_posterior, "PREDICTED_ENTRIES", 29)
    assert torch.equal(short.marginals(given[1])[0], filtered.marginals(given[1])[0])
    rbf = posterior_of(*series(1.0 * RBF(2.0)))  # by one factor whatever their number
    alone = torch.stack([rbf.marginals(time[None])[0][0] for time in given[1]])
    assert (rbf.marginals(given[1])[0] - alone).abs().max() < 1e-12
    sharp = series(KERNELS[0], precision=10 * defaults.MAX_RATIO)
    assert not isinstance(posterior_of(*sharp), ShortPosterior)
    moving = before.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        posterior_of(*series(KERNELS[0])).marginals(moving)[0].sum(), moving
    )
    assert bool(gradient.isfinite().all())
