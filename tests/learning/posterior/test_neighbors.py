"""The posterior by Vecchia's likelihood: the exact one where every row sees all before it."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import merge_replicates
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.modes import Mode, NeighborPosterior, approximate, laplace_modes
from skgp.learning.posterior.priors import default_priors
from skgp.learning.vecchia import VecchiaSettings, evidence_of


def make_posterior(n=60, weighted=False, kernel=None):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 2))
    X[3:6] = X[0]
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.standard_normal(n)
    weight = rng.uniform(0.5, 2.0, n) if weighted else None
    kernel = kernel or 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    data = merge_replicates(X, (y - y.mean()) / y.std(), weight, torch.device("cpu"))
    return LogPosterior(kernel, data, default_priors(kernel, X, y))


def by_neighbors(posterior, n_neighbors=1000, rows=None, n_inducing=0):
    data = posterior.data
    rows = torch.arange(len(data)) if rows is None else rows
    settings = VecchiaSettings(n_neighbors, n_inducing)
    generator = torch.Generator().manual_seed(0)
    evidence = evidence_of(posterior.kernel, data, rows, settings, generator)
    return NeighborPosterior(posterior, evidence)


KERNELS = [
    None,
    WhiteKernel(0.2) + 1.0 * Matern(1.0, nu=1.5),
    RBF([1.0, 2.0]) + WhiteKernel(0.05, "fixed"),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_inducing", [0, 5])
def test_all_neighbors_make_the_exact_posterior(kernel, weighted, n_inducing):
    exact = make_posterior(30, weighted, kernel)
    chain = by_neighbors(exact, n_inducing=n_inducing)
    u = exact.kernel.theta + 0.1 * np.arange(exact.n_dims)
    value, gradient = chain.log_density_and_gradient(u)
    expected, expected_gradient = exact.log_density_and_gradient(u)
    # K_mm carries a jitter of 1e-8 or so.
    tol = 1e-8 if n_inducing else 1e-10
    assert value == pytest.approx(expected, rel=100 * tol)
    assert chain.log_density(u) == pytest.approx(value, rel=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4 if n_inducing else 1e-8)


def test_some_rows_stand_for_all():
    """Over subsets, the mean is the value of all rows."""
    exact = make_posterior(200)
    u = np.append(laplace_modes(exact, rng=np.random.default_rng(0))[0].u[:-1], 2.0)
    rng, values = np.random.default_rng(0), []
    for _ in range(15):
        some = torch.from_numpy(rng.permutation(len(exact.data))[:40]).sort().values
        values.append(by_neighbors(exact, 30, some).log_density(u))
    error = np.std(values) / len(values) ** 0.5
    # What the neighbours leave out comes to a nat or two.
    assert abs(np.mean(values) - exact.log_density(u)) < 4 * error + 2


def test_an_approximation_has_its_mode_near_the_exact_one(monkeypatch):
    """Of more rows than are ever factored together; and its density is one fixed function."""
    for name, value in (
        ("JOINT_ROWS", 60),
        ("SAMPLED_ROWS", 100),
        ("N_EARLIER", 15),
        ("SAMPLED_INDUCING", 60),
    ):
        monkeypatch.setattr(tuned, name, value)
    exact = make_posterior(150)
    target, modes = approximate(exact, rng=np.random.default_rng(0))
    best = laplace_modes(exact, rng=np.random.default_rng(0))[0]
    assert best.distance(modes[0].u) < 1
    assert modes[0].log_density == target.log_density(modes[0].u)
    _, gradient = target.log_density_and_gradient(modes[0].u)
    assert gradient @ modes[0].spread @ gradient < 0.01
    copy = pickle.loads(pickle.dumps(target))
    assert copy.log_density(best.u) == target.log_density(best.u)


def test_a_posterior_that_vanishes_says_why(monkeypatch):
    exact = make_posterior(30)
    chain = by_neighbors(exact)
    assert "log-density is not finite" in chain.why_it_vanishes(exact.kernel.theta)


def test_distances_from_a_mode_are_in_its_standard_deviations():
    """Also where the least variance is rounding: of one observation far beyond the prior."""
    along, across = np.array([[0.5, 0.5], [0.5, -0.5]]) * 2**0.5
    for least, far in ((1.0, 6.0), (0.0, 1e7)):
        covariance = 4.0 * np.outer(along, along) + least * np.outer(across, across)
        mode = Mode(np.ones(2), 0.0, True, 1, covariance.round(12))
        assert mode.distance(np.ones(2) + 6.0 * along) == pytest.approx(3.0, rel=1e-6)
        assert mode.distance(np.ones(2) + 6.0 * across) >= far * (1 - 1e-9)
