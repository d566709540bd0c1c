"""Stochastic gradients on log s: unbiased, sparse, and in bounded memory."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.datasets import make_sinc
from skgp.inference.relevance.evidence import choose_candidates, fit_relevance
from skgp.inference.relevance.stochastic import (
    RelevanceSolver,
    RelevanceState,
    SparseBasis,
    fit_relevance_stochastic,
    log_precision_gradient,
    newton_direction,
    polish,
)
from skgp.inference.stochastic.basis import sample_indices
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.estimators import (
    constant_loss,
    diagonal_loss,
    quadratic_loss,
    sample_design,
)
from skgp.optim import sample_without_replacement
from tests.covering import slow_case
from tests.inference.stochastic_problems import z_score
from tests.reference import relevance as reference

KERNEL = RBF(2.0)
GRID = torch.linspace(-10, 10, 400, dtype=torch.float64)[:, None]
TRUTH = torch.sinc(GRID[:, 0] / np.pi)
NOISE = 0.3


def sinc(n, seed=0):
    X, y = make_sinc(n_samples=n, random_state=seed)
    return torch.from_numpy(X), torch.from_numpy(y)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def fit_sgd(X, y, *, candidates=None, generator=None, callback=None, kept=None, **options):
    """The mean-field fit, with 80 support rows; `kept` is a noise variance."""
    some = None if candidates is None else choose_candidates(len(X), candidates, seeded())
    sgd = SGDOptions(**{"batch_size": 80, "basis_batch_size": 2000, "learning_rate": 0.3} | options)
    return fit_relevance_stochastic(
        KERNEL,
        X,
        y,
        sgd,
        candidates=some,
        n_support=80,
        generator=generator or seeded(),
        callback=callback,
        noise_variance=kept,
        learn_noise=kept is None,
    )


def random_model(m=12, n=20):
    """A basis with precisions of several magnitudes, data, and variational parameters."""
    rng = np.random.default_rng(2)
    X, y = sinc(n)
    log_s = torch.from_numpy(rng.normal(scale=2.0, size=m))
    basis = SparseBasis(KERNEL, X[:m], log_s)
    mu, c = torch.from_numpy(rng.normal(size=m)), torch.from_numpy(rng.uniform(0.1, 1.0, m))
    return basis, X, y, mu, c


def dense_gradient(basis, X, y, mu, c):
    Phi = KERNEL(X.numpy(), basis.Z.numpy())
    args = (array.numpy() for array in (y, mu, c, basis.log_precision))
    y, mu, c, log_s = args
    return reference.log_precision_gradient(Phi, y, NOISE, mu, c, log_s)


def test_log_precision_gradient_equals_the_dense_one():
    basis, X, y, mu, c = random_model()
    gradient = log_precision_gradient(basis.log_precision.exp(), mu, c)
    np.testing.assert_allclose(gradient, dense_gradient(basis, X, y, mu, c), rtol=1e-5, atol=1e-6)


def test_log_precision_gradient_of_samples_is_unbiased(generator):
    basis, X, y, mu, c = random_model()
    draws = []
    for _ in range(1000):
        i = sample_indices(basis, 5, generator=generator)
        part = log_precision_gradient(basis.precision_diag(i.indices), mu[i.indices], c[i.indices])
        draws.append(torch.zeros(12).double().index_add(0, i.indices, i.weight * part).numpy())
    exact = log_precision_gradient(basis.log_precision.exp(), mu, c).numpy()
    assert z_score(draws, exact) < 4


def estimated_loss(basis, X, y, mu, c, rows, i, j):
    """The whole of -ELBO by Theorems 1 and 2 and Proposition 2."""
    n, m = len(X), basis.n_features
    design = sample_design(basis, X[rows], i, j, n=n)
    V_i, V_j = mu[i.indices, None], mu[j.indices, None]
    parts = quadratic_loss(design, V_i, V_j, NOISE, y=y[rows]).value[0]
    parts = parts + diagonal_loss(design, c[i.indices], NOISE, i.indices >= 0)
    s = basis.precision_diag(i.indices)
    return 0.5 * (parts + constant_loss(s, i, y[rows], NOISE, n=n, m=m))


def test_gradient_of_the_elbo_estimate_is_unbiased_in_log_s(generator):
    basis, X, y, mu, c = random_model()
    basis.log_precision.requires_grad_()
    draws = []
    for _ in range(400):
        rows = sample_without_replacement(20, 6, generator=generator)
        i, j = (sample_indices(basis, 5, generator=generator) for _ in range(2))
        loss = estimated_loss(basis, X, y, mu, c, rows, i, j)
        draws.append(torch.autograd.grad(loss, basis.log_precision)[0].numpy())
    basis.log_precision = basis.log_precision.detach()
    exact = log_precision_gradient(basis.log_precision.exp(), mu, c).numpy()
    assert z_score(draws, exact) < 4


@pytest.mark.parametrize("k", [4, 15])
def test_newton_direction_solves_its_system(k, rng):
    root, gradient = (
        torch.from_numpy(rng.normal(size=(8, k))),
        torch.from_numpy(rng.normal(size=(k, 2))),
    )
    precision = torch.from_numpy(rng.uniform(0.1, 1e3, k))
    x = newton_direction(root, precision, gradient)
    residual = root.T @ (root @ x) + precision[:, None] * x - gradient
    np.testing.assert_allclose(residual, 0, atol=1e-10)


def solver_of(X, y, rows, noise, n_support, generator, **options):
    state = RelevanceState.start(KERNEL, X, y, rows, noise, n_support, generator)
    return RelevanceSolver(X, y, state.basis, state, SGDOptions(decay=1.0, **options), generator)


def test_control_sums_follow_the_mean_through_steps_and_pruning(generator):
    X, y = sinc(300)
    options = dict(batch_size=50, basis_batch_size=30, learning_rate=0.1)
    solver = solver_of(X, y, torch.arange(0, 300, 5), None, 80, generator, **options)
    solver.precision_rate = 0.3
    for _ in range(40):
        solver.iterate(0)
    state = solver.state
    state.prune(0.3)
    assert 0 < len(state.rows) < 60
    solver.iterate(0)
    B = KERNEL(state.X_support.numpy(), X[state.rows].numpy())
    np.testing.assert_allclose(state.control.sums, B @ state.mean.numpy(), atol=1e-9)
    np.testing.assert_allclose(state.mean_squares, (B**2).mean(0), rtol=1e-9)
    np.testing.assert_allclose(
        state.determined(), 1 - state.basis.log_precision.exp() * state.std**2, atol=1e-9
    )


def test_steps_settle_at_the_ridge_solution_when_precisions_rest(generator):
    X, y = sinc(200)
    options = dict(batch_size=200, basis_batch_size=20, learning_rate=1.0)
    solver = solver_of(X, y, torch.arange(0, 200, 10), 0.01, 200, generator, **options)
    solver.precision_rate, solver.learn_noise = 1e-12, False
    for _ in range(3):
        solver.iterate(0)
    Phi, state = KERNEL(X.numpy(), X[::10].numpy()), solver.state
    s = state.basis.log_precision.exp().numpy()
    mean, _ = reference.posterior(Phi, y.numpy(), 0.01, np.arange(20), s)
    np.testing.assert_allclose(state.mean[:, 0], mean, atol=1e-5)


@pytest.mark.parametrize("basis_batch_size", [40, slow_case(2000)])
def test_fit_keeps_few_vectors_and_is_accurate(basis_batch_size, monkeypatch):
    monkeypatch.setattr(RelevanceSolver, "precision_rate", 0.3)
    X, y = sinc(400)
    rough = fit_sgd(X, y, candidates=80, max_iter=350, basis_batch_size=basis_batch_size)
    fit = polish(rough, KERNEL, X, y, learn_noise=True)
    for found, most, error in ((rough, 25, 0.05), (fit, 15, 0.04)):
        assert 5 <= len(found.indices) == len(found.precision) <= most
        assert (found.posterior.mean(GRID) - TRUTH).square().mean().sqrt() <= error
    assert 0.08 < fit.noise_variance**0.5 < 0.12 and np.isnan(rough.log_evidence)
    noise = rough.noise_variance
    again = fit_relevance(KERNEL, X, y, noise_variance=noise, candidates=rough.indices)
    assert torch.equal(fit.indices, again.indices) and fit.log_evidence == again.log_evidence
    assert fit.history == rough.history and fit.n_iter == 350


def test_diverging_mean_begins_anew_at_half_the_rate():
    X, y = sinc(400)
    history = fit_sgd(X, y, candidates=80, learning_rate=5.0, max_iter=60).history
    scale = float(y.square().mean())
    assert max(history) < 3 * scale and history[-1] < 0.3 * scale


def test_memory_map_is_read_and_fitted_like_the_array(tmp_path):
    X, y = sinc(300)
    for name, values in (("X", X), ("y", y)):
        np.save(tmp_path / f"{name}.npy", values.numpy())
    maps = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("X", "y")]
    fits = [
        polish(fit_sgd(*data, candidates=50, max_iter=30), KERNEL, *data, learn_noise=True)
        for data in ((X, y), maps)
    ]
    assert torch.equal(fits[0].indices, fits[1].indices)
    np.testing.assert_allclose(fits[0].log_evidence, fits[1].log_evidence, atol=1e-9)
