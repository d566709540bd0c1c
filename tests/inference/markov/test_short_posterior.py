"""Predictions of a short series by one factor equal those of the filter."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference import defaults
from skgp.inference.markov import exact_sites
from skgp.inference.markov.exact_sites import ShortPosterior, posterior_of
from skgp.inference.markov.posterior import Posterior
from skgp.kernels import Cosine, LocalLinearTrend, state_space
from skgp.kernels.expression import summands

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
    """Before the origin, too, on the times and far off."""
    given = series(kernel)
    short, filtered = posterior_of(*given), Posterior(*given)
    assert isinstance(short, ShortPosterior)
    new = torch.tensor([3.0, -0.5, 14.0, 3.0, -2.5, float(given[1][4])], dtype=torch.float64)
    rows = torch.stack([row for _, row in state_space(kernel).summands()])
    for name, more in (("marginals", ()), ("latent", (rows,)), ("covariance", ())):
        pair = zip(
            getattr(short, name)(new, *more), getattr(filtered, name)(new, *more), strict=True
        )
        for found, expected in pair:
            np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-12)


def process(kernel, x, z):
    """Covariances of each summand, of which a trend has no Gram matrix before its origin."""
    found = []
    for part in summands(kernel):
        if not isinstance(part, LocalLinearTrend):
            found.append(part(x[:, None], z[:, None]))
            continue
        a, b = np.meshgrid(x - part.origin, z - part.origin, indexing="ij")
        both = np.maximum(np.minimum(a, b), np.minimum(-a, -b)).clip(0.0)  # on one side
        more = np.maximum(abs(a), abs(b))
        wander = part.diffusion * both**2 * (3 * more - both) / 6
        found.append(part.level + part.slope * a * b + wander)
    return found


@pytest.mark.parametrize(
    "kernel",
    [
        *KERNELS,
        1.3 * RBF(2.0),
        RBF(1.0) * Cosine(1.7) + 0.2 * Matern(1.5, nu=1.5) * RBF(3.0),
        LocalLinearTrend(0.1, 2.0, 0.1, origin=-1.0) + RBF(2.0),
    ],
    ids=["stationary", "trend", "rbf", "products", "rbf-and-trend"],
)
def test_moments_slopes_and_draws_are_those_of_a_dense_process(kernel):
    """Not those of one that approximates RBF: on, between and off the times, and of each part."""
    dynamics, times, beta, weight = series(kernel)
    short, seen = posterior_of(dynamics, times, beta, weight), weight > 0
    X, noise = times[seen].numpy(), np.diag(1 / weight[seen].numpy())
    new = torch.tensor([3.0, -0.5, 14.0, float(times[seen][4]), 5.5, -2.5], dtype=torch.float64)

    def dense(x, part=None):
        """Of the sum, or of one summand."""
        own = slice(None) if part is None else slice(part, part + 1)
        cross, prior = (sum(process(kernel, x, z)[own]) for z in (X, x))
        K = sum(process(kernel, X, X)) + noise
        return cross @ np.linalg.solve(K, np.sin(X)), prior - cross @ np.linalg.solve(K, cross.T)

    mean, covariance = dense(new.numpy())
    for found, each in zip(short.covariance(new), (mean, covariance), strict=True):
        np.testing.assert_allclose(found, each, rtol=0, atol=1e-10)
    np.testing.assert_allclose(short.marginals(new)[1], covariance.diagonal(), atol=1e-10)
    rows = torch.stack([row for _, row in state_space(kernel).summands()])
    for found, each in zip(short.latent(new, rows), (0, 1), strict=True):
        expected = [dense(new.numpy(), part)[each] for part in range(len(rows))]
        expected = [e if each == 0 else e.diagonal() for e in expected]
        np.testing.assert_allclose(found.T, expected, rtol=0, atol=1e-10)

    moving, step = new[new != times[seen][4]].clone().requires_grad_(), 1e-5
    ends = [dense(moving.detach().numpy() + sign * step) for sign in (1, -1)]
    for found, i in zip(short.marginals(moving), (0, 1), strict=True):
        (slope,) = torch.autograd.grad(found.sum(), moving, retain_graph=True)
        up, down = (end[0] if i == 0 else end[1].diagonal() for end in ends)
        np.testing.assert_allclose(slope, (up - down) / (2 * step), atol=1e-6)

    n = 5000
    draws = short.sample(new, n, torch.Generator().manual_seed(1)).numpy() - mean[:, None]
    z = draws.mean(1) / np.sqrt(covariance.diagonal() / n)
    second = draws @ draws.T / n - covariance
    spread = np.sqrt((np.outer(*[covariance.diagonal()] * 2) + covariance**2) / n)
    assert abs(z).max() < 4 and abs(second / spread).max() < 4


@pytest.mark.parametrize("kernel", [1.3 * RBF(2.0), KERNELS[1]], ids=["rbf", "trend"])
def test_draws_and_parts_without_noise_are_within_the_variances(kernel):
    """The filter's lost all digits: draws had 1e7 times the variance of predictions."""
    dynamics, times, _, weight = series(kernel, precision=1e9)
    weight = weight + 1e8
    short, new = (
        posterior_of(dynamics, times, weight * times.sin(), weight),
        torch.tensor([4.03, 5.5]),
    )
    mean, var = short.marginals(new.double())
    draws = short.sample(new.double(), 4000, torch.Generator().manual_seed(1))
    assert ((draws.var(1) / var).log().abs() < 0.1).all()
    assert ((draws.mean(1) - mean).square() < 16 * var / 4000).all()
    rows = torch.stack([row for _, row in state_space(kernel).summands()])
    np.testing.assert_allclose(short.latent(new.double(), rows)[0].sum(1), mean, atol=1e-6)


def test_the_filter_predicts_many_times_where_it_keeps_digits(monkeypatch):
    given = series(KERNELS[1])
    short, filtered = posterior_of(*given), Posterior(*given)
    monkeypatch.setattr(exact_sites, "PREDICTED_ENTRIES", 29)
    assert torch.equal(short.marginals(given[1])[0], filtered.marginals(given[1])[0])
    sharp = series(KERNELS[1], precision=defaults.FILTER_RATIO)
    few = posterior_of(*sharp).marginals(sharp[1])[0]
    alone = torch.stack([posterior_of(*sharp).marginals(time[None])[0][0] for time in sharp[1]])
    assert (few - alone).abs().max() < 1e-10
    rbf = posterior_of(*series(1.0 * RBF(2.0)))  # by one factor whatever their number
    alone = torch.stack([rbf.marginals(time[None])[0][0] for time in given[1]])
    assert (rbf.marginals(given[1])[0] - alone).abs().max() < 1e-12


def test_without_a_factor_the_filter_predicts():
    kernel = 1e5 * Matern(1e4, nu=2.5)
    dynamics, times, beta, weight = series(kernel, n=60)
    found = posterior_of(dynamics, times, 1e12 * times.sin(), torch.full_like(times, 1e12))
    assert not isinstance(found, ShortPosterior)
    assert all(part.isfinite().all() for part in found.marginals(times))
