"""The Laplace evidence against scikit-learn, a dense NumPy oracle and finite differences."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data
from skgp.kernels import pairwise
from skgp.learning import laplace_evidence
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.likelihoods import Bernoulli, Poisson
from tests.reference import laplace_evidence as oracle
from tests.reference.kernels import naive_gram, naive_value

KERNELS = {
    "ard": lambda: 1.7 * RBF([0.8, 1.7]),
    "matern": lambda: 4.0 * Matern([1.1, 0.6], nu=1.5),
    "sum": lambda: RBF(0.9) + 0.5 * Matern(2.0, nu=2.5),
    "fixed amplitude": lambda: ConstantKernel(3.0, "fixed") * RBF([1.0, 0.4]),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)
each_link = pytest.mark.parametrize("link", ["logit", "probit"])


@pytest.fixture(params=[0, 1000], ids=["torch", "numpy"], autouse=True)
def few_rows(request, monkeypatch):
    """Both ways of evaluation, whatever the number of rows."""
    monkeypatch.setattr(pairwise, "FEW_ROWS", request.param)


def labelled(n=40, c=1, seed=0):
    """X (n, 2) and noisy labels Y (n, c) in {-1, +1}, as tensors."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    latent = np.stack([np.sin((j + 2) * X[:, 0]) + j - 0.5 for j in range(c)], axis=1)
    Y = np.where(latent + 0.5 * rng.normal(size=(n, c)) > 0, 1.0, -1.0)
    return torch.tensor(X), torch.tensor(Y)


def evidence(kernel, X, Y, *, link="logit", offset=None, row_weight=None):
    """Of labels or, where the link is "exp", of counts 0 and 2."""
    likelihood, Y = (Poisson(link), Y + 1) if link == "exp" else (Bernoulli(link), Y)
    return LaplaceEvidence.of(kernel, Data(X, Y, row_weight), likelihood, offset)


def value(kernel, *args, **kwargs):
    return evidence(kernel, *args, **kwargs)(kernel.theta)[0]


def weighted_columns(n=25):
    """A problem with three columns, offsets and weights, one of them 0."""
    X, Y = labelled(n, c=3, seed=1)
    weight = torch.tensor(np.random.default_rng(2).uniform(0.2, 3.0, n))
    weight[4] = 0.0
    return X, Y, torch.tensor([-0.4, 0.3, 1.2], dtype=X.dtype), weight


@each_kernel
@pytest.mark.parametrize("shift", [0.0, 0.4, 2.0])
def test_laplace_evidence_equals_scikit_learn(name, shift):
    kernel, (X, Y) = KERNELS[name](), labelled()
    classifier = GaussianProcessClassifier(kernel, optimizer=None).fit(X.numpy(), Y[:, 0].numpy())
    expected = classifier.log_marginal_likelihood(kernel.theta + shift, eval_gradient=True)
    found, gradient = evidence(kernel, X, Y)(kernel.theta + shift)
    np.testing.assert_allclose(found.item(), expected[0], rtol=1e-9)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-5, atol=1e-6)


@each_link
def test_laplace_evidence_equals_the_oracle_with_offsets_weights_and_columns(link):
    kernel = KERNELS["matern"]()
    X, Y, offset, weight = weighted_columns()
    found = value(kernel, X, Y, link=link, offset=offset, row_weight=weight)
    K = naive_gram(kernel, X.numpy())
    expected = [
        oracle.laplace(K, getattr(oracle, link)(y), b, weight.numpy())[2]
        for y, b in zip(Y.numpy().T, offset.numpy(), strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.parametrize("link", ["logit", "probit", "exp"])
@each_kernel
def test_laplace_evidence_gradient_equals_finite_differences(name, link):
    kernel = KERNELS[name]()
    X, Y, offset, weight = weighted_columns()
    at = evidence(kernel, X, Y, link=link, offset=offset, row_weight=weight)
    theta, step = kernel.theta, 1e-4
    for slope, move in zip(at(theta)[1], step * np.eye(len(theta)), strict=True):
        difference = (at(theta + move)[0] - at(theta - move)[0]).sum() / (2 * step)
        np.testing.assert_allclose(slope, difference, rtol=1e-5, atol=1e-6)


def count_factorisations(monkeypatch):
    """A list that grows by one with every Cholesky factorisation."""
    count = []
    factor = laplace_evidence.laplace_factor
    monkeypatch.setattr(
        laplace_evidence, "laplace_factor", lambda K, root: count.append(0) or factor(K, root)
    )
    return count


def test_laplace_evidence_from_a_warm_start_takes_fewer_factorisations(monkeypatch):
    kernel, (X, Y) = KERNELS["ard"](), labelled(60)
    count = count_factorisations(monkeypatch)
    at, theta = evidence(kernel, X, Y), kernel.theta
    at(theta)
    cold = len(count)
    found, _ = at(theta + 0.01)
    assert len(count) - cold < cold
    np.testing.assert_allclose(found, evidence(kernel, X, Y)(theta + 0.01)[0], rtol=1e-10)


def test_laplace_evidence_ignores_a_warm_start_worse_than_zero(monkeypatch):
    kernel, (X, Y) = KERNELS["ard"](), labelled(30)
    count = count_factorisations(monkeypatch)
    at = evidence(kernel, X, Y)
    expected, _ = at(kernel.theta)
    cold = len(count)
    far = -20.0 * Y[:, 0]
    (column,) = at._columns
    at.modes = [column.at(column.origin.alpha, far.numpy() if pairwise.FEW_ROWS else far)]
    count.clear()
    np.testing.assert_allclose(at(kernel.theta)[0], expected)
    assert len(count) == cold + 1


@each_link
@pytest.mark.parametrize("amplitude", [1e-6, 1e6])
def test_laplace_evidence_is_finite_for_extreme_amplitudes_and_repeated_rows(link, amplitude):
    kernel, (X, Y) = amplitude * RBF([0.8, 1.7]), labelled(40)
    X, Y = torch.cat([X, X, X[:1]]), torch.cat([Y, Y, -Y[:1]])  # one row with both labels
    found, gradient = evidence(kernel, X, Y, link=link)(kernel.theta)
    assert np.isfinite(gradient).all() and -np.inf < found.item() < 0


def test_laplace_evidence_halves_newton_steps_that_overshoot():
    # Far labels of the probit link: a full step from 0 with a huge offset raises the objective.
    kernel, (X, Y) = 1e4 * RBF(0.5), labelled(30)
    offset = torch.tensor([30.0], dtype=X.dtype)
    found = value(kernel, X, Y, offset=offset)
    K = naive_gram(kernel, X.numpy()) + 1e-9 * np.eye(30)
    expected = oracle.laplace(K, oracle.logit(Y[:, 0].numpy()), 30.0)[2]
    np.testing.assert_allclose(found.item(), expected, rtol=1e-6)


def test_laplace_evidence_works_for_one_row_and_in_float32(dtype):
    X, Y = torch.zeros(1, 2, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    kernel = KERNELS["ard"]()
    expected = oracle.laplace(naive_gram(kernel, X.numpy()), oracle.logit(Y[:, 0].numpy()))[2]
    np.testing.assert_allclose(value(kernel, X, Y), expected, rtol=1e-5)


def test_laplace_evidence_refuses_a_white_kernel():
    X, Y = labelled(5)
    with pytest.raises(ValueError, match="Remove the WhiteKernel"):
        evidence(RBF() + WhiteKernel(), X, Y)


@each_link
def test_laplace_predict_equals_the_oracle(link):
    kernel = KERNELS["ard"]()
    X, Y, offset, weight = weighted_columns()
    weight[4] = 0.1  # the oracle divides by the curvature
    X_new = torch.tensor(np.random.default_rng(3).normal(size=(6, 2)))
    fit = evidence(kernel, X, Y, link=link, offset=offset, row_weight=weight).fit(kernel.theta)
    mean, var = laplace_predict(fit, kernel, X, X_new)
    K, K_new = naive_gram(kernel, X.numpy()), naive_gram(kernel, X.numpy(), X_new.numpy())
    prior = np.array([naive_value(kernel, x, x) for x in X_new.numpy()])
    for j in range(3):
        likelihood = getattr(oracle, link)(Y[:, j].numpy())
        at = offset[j].item(), weight.numpy()
        expected = oracle.predict(K, K_new, prior, likelihood, *at)
        np.testing.assert_allclose(mean[:, j].numpy(), expected[0], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(var[:, j].numpy(), expected[1], rtol=1e-6, atol=1e-8)


def test_laplace_evidence_fit_has_the_evidence_and_gives_back_the_latent_mean_at_its_rows():
    kernel, (X, Y) = KERNELS["sum"](), labelled(30)
    fit = evidence(kernel, X, Y).fit(kernel.theta)
    np.testing.assert_allclose(fit.log_evidence.numpy(), value(kernel, X, Y))
    mean, _ = laplace_predict(fit, kernel, X, X)
    # At the mode alpha is the slope of the log likelihood.
    slope = Bernoulli("logit").derivatives(Y, mean)[0]
    np.testing.assert_allclose(fit.alpha.numpy(), slope.numpy(), atol=1e-8)
