"""Stochastic gradients against the exact gradient of the log posterior."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, RationalQuadratic, WhiteKernel

from skgp.data import merge_replicates
from skgp.kernels import ActiveDims
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.stochastic_gradient import Probes, StochasticGradient, make_anchor
from skgp.linalg import NumericalWarning
from skgp.linalg.runtime import memory_limit
from skgp.priors import Gamma, LogNormal

KERNELS = {
    "isotropic": lambda: 1.5 * RBF(0.8) + WhiteKernel(0.1),
    "ard": lambda: 1.5 * RBF([0.8, 1.7]) + WhiteKernel(0.1),
    "matern": lambda: WhiteKernel(0.3) + 4.0 * Matern([1.1, 0.6], nu=1.5),
    "fixed noise": lambda: 1.5 * RBF(0.8) + WhiteKernel(0.2, "fixed"),
    "sum": lambda: 2.0 * RBF(0.9) + WhiteKernel(0.2) + 0.5 * RationalQuadratic(2.0, 1.2),
    "not stationary": lambda: ActiveDims(RBF(0.9), 0) + DotProduct(0.6) ** 2 + WhiteKernel(0.2),
}


def make(kernel, n=60, repeats=False, dtype=torch.float64, **kwargs):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    if repeats:
        X[n // 2 :] = X[: n - n // 2]
    y = np.sin(2 * X[:, 0]) + 0.3 * rng.normal(size=n)
    priors = [LogNormal(0.8), Gamma(2.0, 1.5), *[LogNormal(1.0)] * (kernel.n_dims - 2)]
    data = merge_replicates(X, y, None, torch.device("cpu"))
    posterior = LogPosterior(kernel, data, priors[: kernel.n_dims])
    return posterior, StochasticGradient(posterior, dtype=dtype, **kwargs)


def balanced(field):
    """Probes whose second moment is I exactly: the trace without noise."""
    rank, n = len(field._pivots), len(field._y)
    e = torch.eye(rank + n, dtype=field._y.dtype) * (rank + n) ** 0.5
    return Probes(e[:, :rank], e[:, rank:])


def sample(estimate, n_draws):
    return np.array([estimate().gradient for _ in range(n_draws)])


def z_scores(samples, expected):
    return (samples.mean(0) - expected) / (samples.std(0) / np.sqrt(len(samples)))


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("rank", [0, 15])
@pytest.mark.parametrize("name", KERNELS)
def test_estimate_with_balanced_probes_is_the_exact_gradient(name, rank, repeats, generator):
    kernel = KERNELS[name]()
    posterior, field = make(kernel, repeats=repeats, rank=rank, max_iter=2000)
    u = kernel.theta + 0.3
    assert field.choose_pivots(kernel.theta, generator) == rank
    got = field.estimate(u, balanced(field), generator, stop=0.0, tol=1e-12)
    assert got.converged
    expected = posterior.log_density_and_gradient(u)[1]
    np.testing.assert_allclose(got.gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rank", "roulette", "dtype"),
    [(0, 0.1, torch.float64), (20, "adaptive", torch.float64), (20, "adaptive", torch.float32)],
)
def test_estimate_is_unbiased(rank, roulette, dtype, generator):
    """In float32 with a warm start."""
    kernel = KERNELS["ard"]()
    posterior, field = make(
        kernel, n=150, repeats=True, rank=rank, stop=0.1, roulette=roulette, dtype=dtype
    )
    u, warm = kernel.theta + 0.2, None
    field.choose_pivots(u, generator)
    if dtype == torch.float32:
        warm = field.estimate(kernel.theta, field.draw_probes(generator), generator).warm
    samples = sample(
        lambda: field.estimate(u, field.draw_probes(generator), generator, warm=warm), 60
    )
    expected = posterior.log_density_and_gradient(u)[1]
    assert np.abs(z_scores(samples, expected)).max() < 4


def test_estimate_with_rough_solutions_is_unbiased(generator):
    """Balanced probes leave the noise of the coins alone, large enough to see a pair that is none.

    The quadratic form of one draw with itself is off by more than seven standard errors.
    """
    kernel = KERNELS["ard"]()
    posterior, field = make(kernel, rank=0, stop=0.9)
    probes, u = balanced(field), kernel.theta + 0.2
    samples = sample(lambda: field.estimate(u, probes, generator), 100)
    expected = posterior.log_density_and_gradient(u)[1]
    assert np.abs(z_scores(samples, expected)).max() < 4


def test_estimate_of_the_trace_has_less_noise_with_a_preconditioner(generator):
    """By rank alone, at solutions without coins."""
    kernel, noise = KERNELS["ard"](), []
    for rank in (0, 30):
        _, field = make(kernel, n=150, rank=rank, tol=1e-6, stop=0.0)
        field.choose_pivots(kernel.theta, generator)
        samples = sample(
            lambda: field.estimate(kernel.theta, field.draw_probes(generator), generator),  # noqa: B023
            30,
        )
        noise.append(samples.var(0))
    assert (noise[1] < 0.2 * noise[0]).all()


def test_estimate_matrix_free_equals_stored(generator):
    kernel = KERNELS["matern"]()
    estimates = []
    for budget in (1e9, 0):
        with memory_limit(budget):
            _, field = make(kernel, rank=15, stop=0.0)
        assert field.operator.stored is (budget > 0)
        field.choose_pivots(kernel.theta, torch.Generator().manual_seed(0))
        probes = field.draw_probes(torch.Generator().manual_seed(1))
        estimates.append(field.estimate(kernel.theta, probes, generator).gradient)
    np.testing.assert_allclose(*estimates, rtol=1e-7)


def test_estimate_warm_start_saves_iterations(generator):
    kernel = KERNELS["ard"]()
    _, field = make(kernel, n=150, rank=0, n_probes=1)
    field.choose_pivots(kernel.theta, generator)
    probes = field.draw_probes(generator, 0)
    cold = field.estimate(kernel.theta, probes, generator, stop=0.0, tol=1e-6)
    again = field.estimate(kernel.theta, probes, generator, stop=0.0, tol=1e-6, warm=cold.warm)
    assert again.n_iter <= 1 < cold.n_iter


def test_estimate_in_float32_stands_short_length_scales(rng, generator):
    """Of a column whose values repeat, far apart for it: squared distances need more digits."""
    kernel = RBF([0.05, 1.0]) + WhiteKernel(0.2)
    X = np.column_stack([100.0 * rng.integers(0, 30, 150), rng.normal(size=150)])
    y = np.sin(X[:, 0]) + X[:, 1] + 0.3 * rng.normal(size=150)
    data = merge_replicates(X, y, None, torch.device("cpu"))
    posterior = LogPosterior(kernel, data, [LogNormal(1.0)] * 3)
    fields = [
        StochasticGradient(posterior, rank=0, dtype=d) for d in (torch.float64, torch.float32)
    ]
    probes = fields[0].draw_probes(generator)
    rounded = Probes(probes.e1.float(), probes.e2.float())
    exact, found = (
        field.estimate(kernel.theta, each, generator, stop=0.0, tol=1e-6)
        for field, each in zip(fields, (probes, rounded), strict=True)
    )
    assert found.converged and exact.converged
    np.testing.assert_allclose(found.gradient, exact.gradient, rtol=1e-4, atol=1e-4)


def test_estimate_says_that_it_did_not_converge(generator):
    kernel = KERNELS["ard"]()
    _, field = make(kernel, rank=0, max_iter=2)
    with pytest.warns(NumericalWarning, match="max_iter=2"):
        assert not field.estimate(kernel.theta, field.draw_probes(generator), generator).converged


def test_anchored_gradient_is_the_field_plus_a_bank_of_mean_zero(generator):
    """Without coins, the mean over the entries is the mean gradient of the bank at u."""
    kernel = KERNELS["ard"]()
    _, field = make(kernel, rank=15, stop=0.0)
    field.choose_pivots(kernel.theta, generator)
    anchor = make_anchor(field, kernel.theta, generator, n_entries=5, tol=1e-10)
    u = kernel.theta + 0.1
    over = [anchor.estimate(field, u, k, generator).gradient for k in range(5)]
    plain = [field.estimate(u, probes, generator).gradient for probes in anchor.bank]
    np.testing.assert_allclose(np.mean(over, 0), np.mean(plain, 0), rtol=1e-7, atol=1e-7)
    at = anchor.estimate(field, kernel.theta, 3, generator).gradient
    np.testing.assert_allclose(at, anchor.mean, rtol=1e-6, atol=1e-6)
    assert anchor.mean_covariance.shape == (4, 4)


def test_anchored_gradient_has_less_noise_near_its_anchor(generator):
    kernel = KERNELS["ard"]()
    posterior, field = make(kernel, n=150, rank=15, stop=0.01)
    field.choose_pivots(kernel.theta, generator)
    anchor = make_anchor(field, kernel.theta, generator, n_entries=40)
    near = kernel.theta + 0.05
    samples = np.array([anchor.estimate(field, near, k, generator).gradient for k in range(40)])
    assert (samples.var(0) < 0.1 * 40 * anchor.mean_covariance.diagonal()).all()
    exact = posterior.log_density_and_gradient(kernel.theta)[1]
    bank_error = np.sqrt(anchor.mean_covariance.diagonal())
    assert (np.abs(anchor.mean - exact) < 4 * bank_error).all()


def test_anchored_gradient_takes_more_probes_for_its_mean(generator):
    """Beyond those of the bank, in blocks of 64; the differences are still those of the bank."""
    kernel = KERNELS["ard"]()
    posterior, field = make(kernel, n=150, rank=15, stop=0.0, tol=1e-6)
    field.choose_pivots(kernel.theta, generator)
    few = make_anchor(field, kernel.theta, generator, n_entries=40, n_probes=50)
    assert few.n_gradients == 40
    anchor = make_anchor(field, kernel.theta, generator, n_entries=40, n_probes=160 + 1000)
    assert anchor.n_gradients == 40 + 16
    exact = posterior.log_density_and_gradient(kernel.theta)[1]
    error = np.sqrt(anchor.mean_covariance.diagonal())
    assert (error < 0.6 * np.sqrt(few.mean_covariance.diagonal())).all()
    z = (anchor.mean - exact) / error
    assert (np.abs(z) < 4).all()
    at = anchor.estimate(field, kernel.theta, 7, generator).gradient
    np.testing.assert_allclose(at, anchor.mean, rtol=1e-3, atol=1e-3)


def test_anchored_gradient_counts_each_probe_of_its_mean_once(generator, monkeypatch):
    """Estimates at the anchor have 4 probes, 64, or what is left."""
    kernel = KERNELS["ard"]()
    _, field = make(kernel, rank=15)
    field.choose_pivots(kernel.theta, generator)
    seen, estimate = [], field.estimate

    def recorded(u, probes, *args, **kwargs):
        at = estimate(u, probes, *args, **kwargs)
        seen.append((at.gradient, len(probes.e2)))
        return at

    monkeypatch.setattr(field, "estimate", recorded)
    anchored = make_anchor(field, kernel.theta, generator, n_entries=3, n_probes=90)
    gradients, sizes = map(np.array, zip(*seen, strict=True))
    assert sizes.tolist() == [4, 4, 4, 64, 14]
    np.testing.assert_allclose(anchored.mean, sizes @ gradients / 90, rtol=1e-12)
    noise = np.cov(gradients[:3], rowvar=False)
    np.testing.assert_allclose(anchored.mean_covariance, noise * 4 / 90, rtol=1e-12)
