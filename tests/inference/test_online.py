"""The online Laplace approximation against the batch one, and what a stream of batches loses."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process.kernels import RBF

from skgp.inference import laplace as module
from skgp.inference.laplace import OnlineLaplace, laplace_covariance
from skgp.inference.newton import fit_newton, newton_problem
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.kernels.spectral import FourierFeatures
from skgp.likelihoods import Bernoulli
from skgp.linalg import NumericalWarning
from tests.reference import laplace as reference
from tests.reference.weights import dense_features
from tests.same import assert_same

N, M, C = 150, 24, 3
BASIS = FourierFeatures(4.0 * RBF(1.2), M, 2, seed=3, block_size=5)
OFFSET = torch.tensor([0.3, -0.5, -1.0], dtype=torch.float64)
LOGIT = Bernoulli()


def sample(rng, n):
    """Rows of three classes that overlap, one against the rest."""
    X = torch.from_numpy(rng.standard_normal((n, 2)))
    noisy = X[:, 0] + torch.sin(3 * X[:, 1]) + 0.5 * torch.from_numpy(rng.standard_normal(n))
    labels = torch.bucketize(noisy, torch.tensor([-0.7, 0.6], dtype=torch.float64))
    return X, 2.0 * (labels[:, None] == torch.arange(C)).double() - 1


@pytest.fixture
def X(rng):
    return sample(rng, N)[0]


@pytest.fixture
def Y():
    return sample(np.random.default_rng(0), N)[1]


@pytest.fixture
def X_new(rng):
    return torch.from_numpy(rng.standard_normal((200, 2)))


def online(likelihood=LOGIT):
    return OnlineLaplace(BASIS, OFFSET, likelihood)


def batch_posterior(X, Y, likelihood=LOGIT, row_weight=None):
    """The Laplace approximation of all rows at once."""
    design = StreamedDesign(BASIS, X)
    problem = newton_problem(design, Y, likelihood, offset=OFFSET, row_weight=row_weight)
    generator = torch.Generator().manual_seed(0)
    fit = fit_newton(problem, tol=1e-13, loss_tol=0.0, max_iter=60, generator=generator)
    q = laplace_covariance(design, problem.curvature(fit.latent), kind="full")
    return ClassifierPosterior(BASIS, fit.weights, OFFSET, q), q


@pytest.mark.parametrize("link", ["logit", "probit"])
@pytest.mark.parametrize("weighted", [False, True])
def test_online_one_batch_is_the_laplace_approximation(X, Y, X_new, rng, link, weighted):
    likelihood = Bernoulli(link=link)
    weight = torch.from_numpy(rng.uniform(0.2, 3.0, N)) if weighted else None
    state = online(likelihood).update(X, Y, weight)
    expected, q = batch_posterior(X, Y, likelihood, weight)
    torch.testing.assert_close(state.weights, expected.weights, rtol=0, atol=1e-8)
    for H, gaussian in zip(state.precision, q, strict=True):
        torch.testing.assert_close(
            H @ gaussian.factor() @ gaussian.factor().mT,
            torch.eye(M, dtype=torch.float64),
            rtol=0,
            atol=1e-8,
        )
    moments = state.posterior().mean_and_variance(X_new)
    truth = expected.mean_and_variance(X_new)
    torch.testing.assert_close(moments[0], truth[0], rtol=0, atol=1e-8)
    torch.testing.assert_close(moments[1], truth[1], rtol=2e-7, atol=0)  # of float32 factors


def test_online_second_batch_has_the_first_posterior_as_its_prior(X, Y):
    """Against SciPy, which knows of no Newton steps."""
    first, second = slice(0, 60), slice(60, N)
    state = online().update(X[first], Y[first])
    w_t, H_t = state.weights.numpy().copy(), state.precision.numpy().copy()
    state.update(X[second], Y[second])
    Phi = dense_features(BASIS, X[second])
    for j in range(C):
        o, y = float(OFFSET[j]), Y[second, j].numpy()

        def loss(w, o=o, y=y, j=j):
            d = w - w_t[:, j]
            return np.logaddexp(0, -y * (o + Phi @ w)).sum() + 0.5 * d @ H_t[j] @ d

        def gradient(w, o=o, y=y, j=j):
            return -Phi.T @ (y * reference.sigmoid(-y * (o + Phi @ w))) + H_t[j] @ (w - w_t[:, j])

        best = minimize(loss, w_t[:, j], jac=gradient, method="BFGS", options={"gtol": 1e-9})
        np.testing.assert_allclose(state.weights[:, j].numpy(), best.x, atol=1e-6)
        np.testing.assert_allclose(gradient(state.weights[:, j].numpy()), 0, atol=1e-8)
        c = reference.curvature(Phi, state.weights[:, j].numpy(), o)
        H = H_t[j] + Phi.T @ (c[:, None] * Phi)
        np.testing.assert_allclose(state.precision[j].numpy(), H, rtol=1e-12)


def test_online_separable_rows_and_a_single_label_stay_finite(X):
    Y = torch.ones(N, C, dtype=torch.float64)
    state = online().update(X, Y).update(100 * X, -Y)
    mean, variance = state.posterior().mean_and_variance(X)
    assert bool(mean.isfinite().all()) and bool((variance > 0).all())


def test_online_no_rows_change_nothing(X, Y):
    state = online().update(X, Y)
    weights = state.weights.clone()
    assert_same(state.update(X[:0], Y[:0]).weights, weights)


def test_online_error_leaves_the_state_alone(X, Y):
    state = online().update(X, Y)
    weights, precision = state.weights.clone(), state.precision.clone()
    with pytest.raises(FloatingPointError, match="gradient is not finite after 0 Newton steps"):
        state.update(torch.full((3, 2), torch.nan), Y[:3])
    assert_same(state.weights, weights)
    assert_same(state.precision, precision)


def test_online_warns_when_it_falls_short(X, Y, monkeypatch):
    monkeypatch.setattr(module, "ONLINE_STEPS", 2)
    with pytest.warns(NumericalWarning, match="ended after max_iter=2 steps"):
        online().update(X, Y)


def test_online_refuses_invalid_input(X, Y):
    with pytest.raises(ValueError, match=r"Y must have shape \(150, 3\); got \(150, 2\)"):
        online().update(X, Y[:, :2])
    with pytest.raises(ValueError, match="row_weight must be finite and not negative"):
        online().update(X, Y, -torch.ones(N))


def test_online_posterior_is_left_alone_by_later_batches(X, Y, X_new):
    state = online().update(X[:60], Y[:60])
    posterior = state.posterior()
    before = posterior.mean_and_variance(X_new)
    state.update(X[60:], Y[60:])
    for moment, later in zip(before, posterior.mean_and_variance(X_new), strict=True):
        assert_same(moment, later)
