"""The evidence at many theta: value, gradient, leave-one-out predictions; against oracles."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.data import Data, merge_replicates
from skgp.kernels import ActiveDims, split_noise
from skgp.kernels import pairwise as module
from skgp.learning.evidence import ExactEvidence, leave_one_out_log_density
from skgp.linalg import NotPositiveDefiniteError
from tests.reference.gaussian import left_out
from tests.reference.kernels import naive_gram
from tests.reference.qsgp import numerical_gradient

KERNELS = {
    "rbf": lambda: 1.3 * RBF([0.8, 1.7]) + WhiteKernel(0.1),
    "matern52": lambda: 0.7 * Matern([1.1, 0.6], nu=2.5) + WhiteKernel(0.05),
    "matern32": lambda: 0.7 * Matern([1.1, 0.6], nu=1.5) + WhiteKernel(0.05),
    "matern12": lambda: 0.7 * Matern([1.1, 0.6], nu=0.5) + WhiteKernel(0.05),
    "shared scale": lambda: 2.0 * RBF(1.2) + WhiteKernel(0.3, "fixed"),
    "fixed scale": lambda: RBF([1.2, 0.5], "fixed") * 2.0 * 0.5 + WhiteKernel(0.3),
    "fixed amplitude": lambda: ConstantKernel(1.5, "fixed") * RBF([1.0, 0.4]) + WhiteKernel(0.1),
    "noise first": lambda: WhiteKernel(0.2) + 0.5 * Matern([2.0, 1.0], nu=1.5),
    "sum": lambda: RBF(0.9) + WhiteKernel(0.2) + 0.5 * Matern(2.0, nu=2.5),
    "no closed form": lambda: 1.3 * RationalQuadratic(1.4, 0.8) * RBF(2.0) + WhiteKernel(0.2),
    "columns": lambda: ActiveDims(1.3 * Matern(0.8, nu=1.5), [1]) + WhiteKernel(0.2),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(params=[0, 1000], ids=["torch", "numpy"])
def few_rows(request, monkeypatch):
    """Both ways of evaluation, whatever the number of rows."""
    monkeypatch.setattr(module, "FEW_ROWS", request.param)


def problem(rng, n=30):
    X = rng.uniform(-2, 2, size=(n, 2))
    return X, np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * rng.normal(size=n)


def covariance(kernel, theta, X):
    signal, white = split_noise(kernel.clone_with_theta(theta))
    return naive_gram(signal, X) + white.noise_level * np.eye(len(X))


@each_kernel
def test_evidence_and_gradient_equal_scikit_learn(name, few_rows, rng):
    kernel, (X, y) = KERNELS[name](), problem(rng)
    regressor = GaussianProcessRegressor(kernel, optimizer=None, alpha=0.0).fit(X, y)
    evidence = ExactEvidence(kernel, Data(torch.tensor(X), torch.tensor(y)))
    for theta in (kernel.theta, kernel.theta - 0.4):
        value, gradient = regressor.log_marginal_likelihood(theta, eval_gradient=True)
        found = evidence(theta)
        np.testing.assert_allclose(found.value, value, rtol=1e-8)
        np.testing.assert_allclose(found.gradient, gradient, rtol=1e-6, atol=1e-6)


@each_kernel
def test_evidence_of_merged_rows_is_that_of_the_rows_written_out(name, few_rows, rng):
    kernel, (X, y) = KERNELS[name](), problem(rng)
    X[20:] = X[:10]
    merged = merge_replicates(X, y, None, torch.device("cpu"))
    regressor = GaussianProcessRegressor(kernel, optimizer=None, alpha=0.0).fit(X, y)
    value, gradient = regressor.log_marginal_likelihood(kernel.theta, eval_gradient=True)
    found = ExactEvidence(kernel, merged)(kernel.theta)
    np.testing.assert_allclose(found.value, value, rtol=1e-8)
    np.testing.assert_allclose(found.gradient, gradient, rtol=1e-6, atol=1e-6)


@each_kernel
def test_evidence_side_by_side_and_values_alone_are_those_one_by_one(name, few_rows, rng):
    kernel, (X, y) = KERNELS[name](), problem(rng)
    X[20:] = X[:10]
    evidence = ExactEvidence(kernel, merge_replicates(X, y, None, torch.device("cpu")))
    theta = kernel.theta + 0.3 * rng.standard_normal((3, kernel.n_dims))
    each = [evidence(at) for at in theta]
    values, gradients = evidence.of_many(theta, slope=True)
    expected = [found.value for found in each]
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    np.testing.assert_allclose(evidence.of_many(theta, slope=False)[0], expected, rtol=1e-9)
    np.testing.assert_allclose([evidence.value(at) for at in theta], expected, rtol=1e-9)
    np.testing.assert_allclose(gradients, [e.gradient for e in each], rtol=1e-7, atol=1e-8)


def test_side_by_side_a_covariance_without_a_factor_has_no_evidence_and_others_theirs(rng):
    """Of a kernel that is none on a plane: of a period along distances."""
    X, y = rng.uniform(0, 40, (60, 2)), rng.normal(size=60)
    kernel = ExpSineSquared(1.0, 1.0) + WhiteKernel(1e-6, (1e-9, 10.0))
    evidence = ExactEvidence(kernel, Data(torch.tensor(X), torch.tensor(y)))
    theta = np.array([[np.log(3.0), 0.0, np.log(1e-6)], [np.log(50.0), np.log(200.0), 0.0]])
    with pytest.raises(NotPositiveDefiniteError):
        evidence.value(theta[0])
    for slope in (False, True):
        values, _ = evidence.of_many(theta, slope=slope)
        assert np.isnan(values[0])
        assert values[1] == pytest.approx(evidence.value(theta[1]), rel=1e-9)


@each_kernel
def test_evidence_leave_one_out_is_the_prediction_without_the_row(name, few_rows, rng):
    kernel, (X, y) = KERNELS[name](), problem(rng, n=12)
    found = ExactEvidence(kernel, Data(torch.tensor(X), torch.tensor(y)))(kernel.theta)
    A = covariance(kernel, kernel.theta, X)
    for i in range(12):
        mean, variance = left_out(A, 0.0, y, i)
        np.testing.assert_allclose(found.residual[i], y[i] - mean, atol=1e-8)
        np.testing.assert_allclose(found.variance[i], variance, rtol=1e-8)
        expected = -0.5 * np.log(2 * np.pi * found.variance) - 0.5 * (
            found.residual**2 / found.variance
        )
        np.testing.assert_allclose(found.leave_one_out, expected, rtol=1e-12)


def test_evidence_of_several_targets_is_the_sum_of_theirs(few_rows, rng):
    kernel, (X, y) = KERNELS["matern32"](), problem(rng, n=20)
    X[15:], Y, weight = X[:5], np.stack([y, y[::-1] ** 2, X[:, 0]], 1), rng.uniform(0.5, 2, 20)

    def merged(y):
        return merge_replicates(X, y, weight, torch.device("cpu"))

    found = ExactEvidence(kernel, merged(Y))(kernel.theta)
    each = [ExactEvidence(kernel, merged(y))(kernel.theta) for y in Y.T]
    assert found.value == pytest.approx(sum(e.value for e in each), rel=1e-10)
    np.testing.assert_allclose(found.gradient, sum(e.gradient for e in each), rtol=1e-9)
    np.testing.assert_allclose(found.residual, np.stack([e.residual for e in each], 1), rtol=1e-9)
    np.testing.assert_allclose(found.leave_one_out, sum(e.leave_one_out for e in each), rtol=1e-9)

    rows, others = torch.arange(8), torch.arange(8, 14).expand(8, -1)
    sums, slopes = [], []
    for targets in (Y, *Y.T):
        theta = torch.tensor(kernel.theta, requires_grad=True)
        density = leave_one_out_log_density(kernel, merged(targets), rows, others, theta)
        sums.append(density.detach())
        slopes.append(torch.autograd.grad((torch.arange(8) * density).sum(), theta)[0])
    torch.testing.assert_close(sums[0], sum(sums[1:]))
    torch.testing.assert_close(slopes[0], sum(slopes[1:]))


def test_evidence_of_a_far_row_is_that_of_the_others_and_the_prior(few_rows, rng):
    kernel, (X, y) = KERNELS["matern32"](), problem(rng, n=20)
    X[-1] = 1e9
    evidence = ExactEvidence(kernel, Data(torch.tensor(X), torch.tensor(y)))
    found = evidence(kernel.theta)
    near = ExactEvidence(kernel, Data(torch.tensor(X[:-1]), torch.tensor(y[:-1])))
    variance = 0.7 + 0.05
    alone = -0.5 * (y[-1] ** 2 / variance + np.log(2 * np.pi * variance))
    np.testing.assert_allclose(found.value, near(kernel.theta).value + alone, rtol=1e-8)
    expected = numerical_gradient(lambda theta: evidence(theta).value, kernel.theta)
    np.testing.assert_allclose(found.gradient, expected, rtol=1e-5, atol=1e-6)


def test_evidence_needs_a_noise(rng):
    X, y = problem(rng, n=5)
    with pytest.raises(ValueError, match=r"has no noise; add \+ WhiteKernel"):
        ExactEvidence(RBF(), Data(torch.tensor(X), torch.tensor(y)))
