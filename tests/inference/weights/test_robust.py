"""Robust regression against dense NumPy bounds, quadrature, L-BFGS and outliers."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import erf
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import StreamingGram, gram_posterior, refit_noise
from skgp.inference.weights.robust import fit_robust
from skgp.likelihoods import Laplace

KERNEL = RBF([0.8, 1.2])


class MatrixBasis:
    """A basis whose features are the rows of a matrix, looked up by number."""

    n_blocks = 1

    def __init__(self, Phi):
        self.Phi, self.n_features = Phi, Phi.shape[1]

    def block_slice(self, block):
        return slice(0, self.n_features)

    def features(self, X, block):
        return self.Phi[X[:, 0].long()].to(X)


def _problem(rng, n=20, m=8):
    """Features as a matrix, targets with heavy tails; X are row numbers."""
    Phi = rng.standard_normal((n, m)) / np.sqrt(m)
    y = Phi @ rng.standard_normal(m) + 0.3 * rng.laplace(size=n)
    y[0] += 15.0
    rows = torch.arange(n, dtype=torch.float64)[:, None]
    return MatrixBasis(torch.tensor(Phi)), Phi, rows, y


def fit(basis, X, y, *, dtype=torch.float64, **options):
    design = StreamedDesign(basis, X, dtype=dtype)
    return fit_robust(design, torch.as_tensor(y), **options)


def _surface(rng, n, *, share_wrong=0.0):
    """A smooth function of two inputs with noise .1, and gross errors in a share of the rows."""
    X = rng.uniform(-2, 2, (n, 2))
    f = np.sin(2 * X[:, 0]) * np.cos(X[:, 1])
    y = f + 0.1 * rng.standard_normal(n)
    wrong = rng.permutation(n)[: round(share_wrong * n)]
    y[wrong] += rng.choice([-1, 1], len(wrong)) * rng.uniform(3, 14, len(wrong))
    return torch.tensor(X), torch.tensor(y), torch.tensor(f)


def _dense_elbo(Phi, y, mean, factor, scale):
    """The bound of N(mean, factor factor') in NumPy, by the folded normal."""
    m = Phi @ mean
    s = np.sqrt(((Phi @ factor) ** 2).sum(1))
    r = y - m
    absolute = s * np.sqrt(2 / np.pi) * np.exp(-0.5 * (r / s) ** 2) + r * erf(r / s / np.sqrt(2))
    trace, log_det = (factor**2).sum(), np.linalg.slogdet(factor)[1]
    divergence = 0.5 * (trace + mean @ mean - len(mean)) - log_det
    return -len(y) * np.log(2 * scale) - absolute.sum() / scale - divergence


def _dense_optimum(Phi, y, scale, start):
    """Maximum of the bound over the mean and a lower triangular factor, by L-BFGS."""
    m = Phi.shape[1]
    lower = np.tril_indices(m)
    Phi_t, y_t = torch.tensor(Phi), torch.tensor(y)

    def objective(parameters):
        leaf = torch.tensor(parameters, requires_grad=True)
        factor = torch.zeros(m, m, dtype=torch.float64).index_put(
            tuple(map(torch.tensor, lower)), leaf[m:]
        )
        var = (Phi_t @ factor).square().sum(1)
        expected = Laplace(scale).expected_log_prob(y_t, Phi_t @ leaf[:m], var).sum()
        divergence = 0.5 * (factor.square().sum() + leaf[:m].square().sum() - m)
        divergence = divergence - factor.diagonal().abs().log().sum()
        loss = divergence - expected
        loss.backward()
        return loss.item(), leaf.grad.numpy()

    found = minimize(
        objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15}
    )
    factor = np.zeros((m, m))
    factor[lower] = found.x[m:]
    return found.x[:m], factor, -found.fun


def test_fit_robust_reports_the_dense_elbo(rng):
    basis, Phi, X, y = _problem(rng)
    for max_iter in (1, 3, 30):
        found = fit(basis, X, y, max_iter=max_iter, tol=0.0)
        mean, root = found.posterior.mean_weights.numpy(), found.posterior.root.numpy()
        expected = _dense_elbo(Phi, y, mean, root, found.scale)
        assert found.elbo == pytest.approx(expected, rel=1e-12)


def test_fit_robust_finds_the_optimum_of_the_bound(rng):
    basis, Phi, X, y = _problem(rng)
    found = fit(basis, X, y, scale=0.4, learn_scale=False, tol=0.0, max_iter=400)
    m = Phi.shape[1]
    start = np.concatenate([np.zeros(m), np.eye(m)[np.tril_indices(m)]])
    mean, factor, elbo = _dense_optimum(Phi, y, 0.4, start)
    assert found.scale == 0.4
    assert found.elbo == pytest.approx(elbo, abs=1e-6) and found.elbo > elbo - 1e-9
    np.testing.assert_allclose(found.posterior.mean_weights, mean, atol=1e-4)
    covariance = found.posterior.root @ found.posterior.root.mT
    np.testing.assert_allclose(covariance, factor @ factor.T, atol=1e-4)


def test_fit_robust_learns_the_scale_that_maximises_the_bound(rng):
    basis, _, X, y = _problem(rng)
    free = fit(basis, X, y, tol=0.0, max_iter=200)
    for factor in (0.98, 1.02):
        scale = free.scale * factor
        kept = fit(basis, X, y, scale=scale, learn_scale=False, tol=0.0, max_iter=200)
        assert kept.scale == scale and kept.elbo < free.elbo


def test_fit_robust_bound_rises_once_it_follows_natural_gradients(rng):
    basis, _, X, y = _problem(rng, n=60, m=30)
    for scale in (1e-3, None, 30.0):
        found = fit(basis, X, y, scale=scale, tol=0.0, max_iter=100)
        assert all(np.diff(found.history[4:]) >= 0)
        assert found.history[-1] == found.elbo and found.converged


def _gaussian_mean(basis, X, y, X_new):
    statistics = StreamingGram(basis).update(X, y)
    return gram_posterior(statistics, refit_noise(statistics, 0.1)).mean(X_new)


def _rmse(a, b):
    return float((a - b).square().mean().sqrt())


def test_fit_robust_beats_the_gaussian_likelihood_with_outliers(rng):
    X, y, _ = _surface(rng, 400, share_wrong=0.05)
    X_new, _, f_new = _surface(rng, 300)
    basis = WhitenedInducingBasis(KERNEL, X[:100])
    robust = fit(basis, X, y)
    assert _rmse(robust.posterior.mean(X_new), f_new) < 0.08
    assert _rmse(_gaussian_mean(basis, X, y, X_new), f_new) > 0.2


def test_fit_robust_weight_two_equals_a_doubled_row(rng):
    basis, Phi, X, y = _problem(rng)
    weight = torch.ones(20, dtype=torch.float64)
    weight[:7] = 2.0
    weighted = fit(basis, X, y, sample_weight=weight, tol=1e-12)
    rows = torch.cat([torch.arange(20), torch.arange(7)])
    start = 0.5 * np.abs(y - np.sort(y)[9]).mean()
    doubled = fit(basis, X[rows], y[rows.numpy()], scale=start, tol=1e-12)
    assert weighted.elbo == pytest.approx(doubled.elbo, rel=1e-9)
    assert weighted.scale == pytest.approx(doubled.scale, rel=1e-6)
    torch.testing.assert_close(
        weighted.posterior.mean_weights, doubled.posterior.mean_weights, rtol=0, atol=1e-6
    )
