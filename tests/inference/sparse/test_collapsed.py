"""Closed forms for Gaussian noise against dense n x n matrices, optima and repeated rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor

from skgp.data import Data
from skgp.inference.sparse.collapsed import (
    elbo_loss,
    elbo_posterior,
    fitc_loss,
    fitc_posterior,
    natural_parameters,
    posterior_from_precision,
    statistics,
)
from tests.reference import sparse as dense
from tests.same import assert_same

NAMES = list(dense.KERNELS)
BETAS = [1e-3, 0.3, 1.0, 7.0]
weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
kernels = pytest.mark.parametrize("name", NAMES)


def sums_of(problem, **options):
    return statistics(problem.kernel, problem.data, problem.tensors[0], **options)


def assert_posterior(problem, found, expected):
    """Whitened mean and root against dense moments of u."""
    mean, root = found
    assert mean.shape == (len(problem.Z), 1) and root.shape == (1, *2 * (len(problem.Z),))
    assert torch.equal(root, root.tril())
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    np.testing.assert_allclose(q[0], expected[0], atol=1e-8 * np.abs(expected[0]).max())
    np.testing.assert_allclose(q[1], expected[1], atol=1e-8 * np.abs(expected[1]).max())


# ---- sums over the rows -------------------------------------------------------------------------


@weights
@kernels
def test_statistics_equal_dense_sums(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found, w = sums_of(problem), problem.row_weight
    L = np.linalg.cholesky(dense.inducing_gram(problem.kernel, problem.Z))
    Phi = np.linalg.solve(L, problem.kernel(problem.Z, problem.X))
    np.testing.assert_allclose(found.gram, (Phi * w) @ Phi.T, atol=1e-8)
    np.testing.assert_allclose(found.projection[:, 0], Phi @ (w * problem.y), atol=1e-8)
    assert float(found.sum_square) == pytest.approx(w @ problem.y**2)
    assert float(found.sum_prior) == pytest.approx(w @ problem.kernel.diag(problem.X))
    assert found.total == pytest.approx(w.sum())


@weights
def test_statistics_do_not_depend_on_the_tile(weighted):
    problem = dense.make_problem(weighted=weighted)
    whole = sums_of(problem)
    for tile in (1, 7, 39, 40):
        parts = sums_of(problem, tile=tile)
        torch.testing.assert_close(parts.gram, whole.gram, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.projection, whole.projection, rtol=1e-12, atol=1e-12)


def test_statistics_of_two_batches_add_up():
    problem = dense.make_problem(weighted=True)
    first, second = (problem.data.take(index) for index in torch.arange(40).split(15)[:2])
    both = problem.data.take(torch.arange(30))
    parts = [statistics(problem.kernel, d, problem.tensors[0]) for d in (first, second, both)]
    total = parts[0] + parts[1]
    for name in ("gram", "projection", "sum_square", "sum_prior", "total"):
        found, expected = (torch.as_tensor(getattr(s, name)) for s in (total, parts[2]))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@weights
@kernels
def test_statistics_have_the_gradients_of_finite_differences(name, weighted):
    problem = dense.make_problem(name, n=7, n_inducing=3, weighted=weighted)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z = problem.tensors[0].requires_grad_()

    def sums(theta, Z):
        found = statistics(problem.kernel, problem.data, Z, theta, tile=4)
        return found.gram, found.projection, found.sum_prior

    assert torch.autograd.gradcheck(sums, (theta, Z))


# ---- the evidence bound -------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("beta", BETAS)
@kernels
def test_elbo_loss_equals_the_dense_formula(name, beta, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = float(elbo_loss(sums_of(problem), problem.tensors[1], beta=beta))
    assert found == pytest.approx(dense.elbo_loss(problem, beta), rel=1e-8)


@weights
@pytest.mark.parametrize("beta", BETAS)
@kernels
def test_elbo_posterior_equals_the_dense_formula(name, beta, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = elbo_posterior(sums_of(problem), problem.tensors[1], beta=beta)
    assert_posterior(problem, found, dense.elbo_posterior(problem, beta))


@pytest.mark.parametrize("noise", [1e-4, 10.0])
def test_elbo_loss_equals_the_dense_formula_for_little_and_much_noise(noise):
    problem = replace(dense.make_problem(weighted=True), noise=noise)
    found = float(elbo_loss(sums_of(problem), problem.tensors[1]))
    assert found == pytest.approx(dense.elbo_loss(problem), rel=1e-8)


@weights
@pytest.mark.parametrize("beta", BETAS)
def test_elbo_loss_is_the_bound_at_its_posterior(beta, weighted):
    """Value and optimum were derived apart; the bound by Gauss-Hermite knows neither."""
    problem = dense.make_problem(weighted=weighted)
    log_prob = dense.LOG_PROB["gaussian"]
    q = dense.elbo_posterior(problem, beta)
    expected = dense.objective(problem, log_prob, *q, beta=beta)
    found = float(elbo_loss(sums_of(problem), problem.tensors[1], beta=beta))
    assert found == pytest.approx(expected, rel=1e-8)


def test_elbo_loss_with_all_rows_as_points_is_that_of_the_exact_process():
    problem = dense.make_problem(n=15)
    problem = replace(problem, Z=problem.X)
    exact = GaussianProcessRegressor(problem.kernel, alpha=problem.noise, optimizer=None)
    exact.fit(problem.X, problem.y)
    expected = -exact.log_marginal_likelihood_value_
    Z, noise = problem.tensors
    assert float(elbo_loss(sums_of(problem), noise)) == pytest.approx(expected, rel=1e-4)
    found = float(fitc_loss(problem.kernel, problem.data, Z, noise))
    assert found == pytest.approx(expected, rel=1e-4)


def test_elbo_loss_is_above_that_of_the_exact_process():
    problem = dense.make_problem()
    exact = GaussianProcessRegressor(problem.kernel, alpha=problem.noise, optimizer=None)
    exact.fit(problem.X, problem.y)
    loss = float(elbo_loss(sums_of(problem), problem.tensors[1]))
    assert loss > -exact.log_marginal_likelihood_value_


# ---- FITC ---------------------------------------------------------------------------------------


@weights
@kernels
def test_fitc_loss_equals_the_dense_formula(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = float(fitc_loss(problem.kernel, problem.data, *problem.tensors))
    assert found == pytest.approx(dense.fitc_loss(problem), rel=1e-8)


@weights
@kernels
def test_fitc_posterior_equals_the_dense_formula(name, weighted):
    problem = dense.make_problem(name, weighted=weighted)
    found = fitc_posterior(problem.kernel, problem.data, *problem.tensors)
    assert_posterior(problem, found, dense.fitc_posterior(problem))


@weights
@kernels
def test_fitc_loss_has_the_gradients_of_finite_differences(name, weighted):
    problem = dense.make_problem(name, n=9, n_inducing=4, weighted=weighted)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z, noise = (tensor.requires_grad_() for tensor in problem.tensors)

    def loss(Z, noise, theta):
        return fitc_loss(problem.kernel, problem.data, Z, noise, theta)

    assert torch.autograd.gradcheck(loss, (Z, noise, theta))


@weights
def test_elbo_loss_has_the_gradients_of_finite_differences(weighted):
    problem = dense.make_problem(n=9, n_inducing=4, weighted=weighted)
    theta = torch.tensor(problem.kernel.theta, requires_grad=True)
    Z, noise = (tensor.requires_grad_() for tensor in problem.tensors)

    def loss(Z, noise, theta):
        return elbo_loss(statistics(problem.kernel, problem.data, Z, theta), noise, beta=0.4)

    assert torch.autograd.gradcheck(loss, (Z, noise, theta))


# ---- weights ------------------------------------------------------------------------------------


def test_weights_equal_repeated_rows():
    problem = dense.make_problem()
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    weighted = replace(problem, weight=counts.astype(float))
    repeated = problem.repeated(counts)
    Z, noise = problem.tensors
    for loss in (
        lambda p: elbo_loss(sums_of(p), noise, beta=0.3),
        lambda p: fitc_loss(p.kernel, p.data, Z, noise),
    ):
        assert float(loss(weighted)) == pytest.approx(float(loss(repeated)), rel=1e-10)
    for posterior in (
        lambda p: elbo_posterior(sums_of(p), noise, beta=0.3),
        lambda p: fitc_posterior(p.kernel, p.data, Z, noise),
    ):
        for found, expected in zip(posterior(weighted), posterior(repeated), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# ---- natural parameters -------------------------------------------------------------------------


def test_posterior_from_precision_is_the_inverse(rng):
    A = rng.standard_normal((3, 6, 6))
    precision, projection = A @ A.transpose(0, 2, 1) + np.eye(6), rng.standard_normal((6, 3))
    mean, root = posterior_from_precision(torch.tensor(precision), torch.tensor(projection))
    assert torch.equal(root, root.tril()) and (root.diagonal(dim1=1, dim2=2) > 0).all()
    inverse = np.linalg.inv(precision)
    np.testing.assert_allclose(root @ root.mT, inverse, rtol=1e-10, atol=1e-12)
    expected = np.einsum("cij,jc->ic", inverse, projection)
    np.testing.assert_allclose(mean, expected, rtol=1e-10, atol=1e-12)


def test_posterior_from_precision_shares_one_matrix(rng):
    A = rng.standard_normal((6, 6))
    precision, projection = torch.tensor(A @ A.T + np.eye(6)), torch.tensor(rng.normal(size=(6, 2)))
    mean, root = posterior_from_precision(precision, projection)
    assert root.shape == (2, 6, 6)
    assert_same(root[0], root[1])
    torch.testing.assert_close(mean, torch.linalg.solve(precision, projection))


@weights
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_natural_parameters_are_what_the_rows_add_to_the_prior(beta, weighted):
    problem = dense.make_problem(weighted=weighted)
    eye = torch.eye(len(problem.Z), dtype=torch.float64)
    for fitc, expected in (
        (False, elbo_posterior(sums_of(problem), problem.tensors[1], beta=beta)),
        (True, fitc_posterior(problem.kernel, problem.data, *problem.tensors)),
    ):
        precision, projection = natural_parameters(
            problem.kernel, problem.data, *problem.tensors, beta=beta, fitc=fitc
        )
        found = posterior_from_precision(eye + precision, projection)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-9, atol=1e-11)


def test_collapsed_forms_of_single_precision_are_near_those_of_double():
    problem = dense.make_problem()
    Z, noise = problem.tensors
    data = Data(problem.data.X.float(), problem.data.y.float())
    sums = statistics(problem.kernel, data, Z.float())
    loss = elbo_loss(sums, noise.float())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(dense.elbo_loss(problem), rel=5e-3)
