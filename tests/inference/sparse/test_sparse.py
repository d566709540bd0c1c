"""Predictions of sparse posteriors and their gradients, against dense conditionals."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct

from skgp.data import Data
from skgp.inference.sparse.sparse import (
    FixedFeatures,
    SparsePosterior,
    SparseState,
    inducing_factor,
    jitter_of,
    latent_moments,
    whitened_features,
)
from skgp.linalg.exceptions import NotPositiveDefiniteError
from tests.reference import sparse as dense

NAMES = list(dense.KERNELS)
OFFSET = torch.tensor([0.4, -1.0, 0.0], dtype=torch.float64)


def posterior_and_oracle(name="rbf", n_latent=3):
    """A posterior of several latent functions, test rows, and their dense means, covariances."""
    problem = dense.make_problem(name)
    mean, root = dense.random_posterior(len(problem.Z), n_latent)
    Z, _ = problem.tensors
    posterior = SparsePosterior(problem.kernel, Z, mean, root, OFFSET[:n_latent])
    rows = problem.X[:12] + 0.05
    oracle = []
    for c in range(n_latent):
        q = dense.unwhitened(problem.kernel, problem.Z, mean[:, c].numpy(), root[c].numpy())
        oracle.append(dense.predict(problem.kernel, rows, problem.Z, *q, float(OFFSET[c])))
    means, covariances = map(np.stack, zip(*oracle, strict=True))
    return posterior, torch.tensor(rows), means.T, covariances


# ---- the factor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_inducing_factor_is_that_of_the_raised_gram_matrix(name):
    problem = dense.make_problem(name)
    L = inducing_factor(problem.kernel, problem.tensors[0])
    expected = dense.inducing_gram(problem.kernel, problem.Z)
    np.testing.assert_allclose(L @ L.mT, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(L, L.tril())


def test_inducing_factor_of_repeated_points_needs_no_more_than_its_jitter(dtype):
    Z = torch.linspace(-1, 1, 20, dtype=dtype)[:, None].repeat(3, 1)
    kernel = 50.0 * RBF(0.7)
    L = inducing_factor(kernel, Z)
    expected = kernel(Z.double().numpy()) + 50 * jitter_of(dtype) * np.eye(60)
    np.testing.assert_allclose(L @ L.mT, expected, atol=50 * 10 * torch.finfo(dtype).eps)


def test_inducing_factor_refuses_nan():
    Z = torch.tensor([[0.0], [torch.nan]], dtype=torch.float64)
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        inducing_factor(RBF(), Z)


def test_inducing_factor_reads_theta_in_place_of_the_kernel():
    problem = dense.make_problem()
    theta = torch.tensor(problem.kernel.theta) + 0.3
    moved = problem.kernel.clone_with_theta(theta.numpy())
    found = inducing_factor(problem.kernel, problem.tensors[0], theta)
    torch.testing.assert_close(found, inducing_factor(moved, problem.tensors[0]))


def test_whitened_features_explain_the_dense_part():
    problem = dense.make_problem("matern")
    Z, X = problem.tensors[0], torch.tensor(problem.X)
    Phi = whitened_features(problem.kernel, X, Z, inducing_factor(problem.kernel, Z))
    expected = dense.explained(problem.kernel, problem.X, problem.Z)
    np.testing.assert_allclose(Phi.mT @ Phi, expected, atol=1e-10)


# ---- moments for training -----------------------------------------------------------------------


@pytest.mark.parametrize("n_latent", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_latent_moments_equal_dense_conditionals(name, n_latent):
    posterior, rows, means, covariances = posterior_and_oracle(name, n_latent)
    p = posterior
    mean, var = latent_moments(p.kernel, rows, p.Z, p.whitened_mean, p.root, offset=p.offset)
    assert mean.shape == var.shape == (len(rows), n_latent)
    np.testing.assert_allclose(mean, means, atol=1e-9)
    np.testing.assert_allclose(var.mT, np.diagonal(covariances, axis1=1, axis2=2), atol=1e-9)


def test_latent_moments_of_the_prior_are_the_kernel():
    problem = dense.make_problem("sum")
    state = problem.state()
    mean, var = latent_moments(problem.kernel, problem.data.X, state.Z, state.mean, state.root)
    np.testing.assert_allclose(mean, 0, atol=1e-12)
    np.testing.assert_allclose(var[:, 0], problem.kernel.diag(problem.X), rtol=1e-9)


def test_latent_moments_have_the_gradients_of_finite_differences():
    problem = dense.make_problem("sum", n_inducing=4)
    mean, root = dense.random_posterior(4, n_latent=2)
    X, Z = torch.tensor(problem.X[:6]), problem.tensors[0]
    theta = torch.tensor(problem.kernel.theta)
    inputs = [t.requires_grad_() for t in (Z, mean, root, theta, OFFSET[:2].clone())]

    def moments(Z, mean, root, theta, offset):
        return latent_moments(problem.kernel, X, Z, mean, root, theta=theta, offset=offset)

    assert torch.autograd.gradcheck(moments, inputs)


def test_latent_moments_of_rows_at_the_points_have_finite_gradients():
    """The distance between a row and a point is 0."""
    problem = dense.make_problem("matern")
    state = problem.state()
    Z = state.Z.clone().requires_grad_()
    mean, var = latent_moments(problem.kernel, state.Z, Z, state.mean + 1, 0.5 * state.root)
    (gradient,) = torch.autograd.grad((mean + var).sum(), Z)
    assert gradient.isfinite().all()


def test_latent_moments_are_not_negative(dtype):
    """A posterior without variance, at the points themselves."""
    Z = torch.linspace(-1, 1, 40, dtype=dtype)[:, None]
    root = 1e-6 * torch.eye(40, dtype=dtype)[None]
    _, var = latent_moments(RBF(0.5), Z, Z, torch.zeros(40, 1, dtype=dtype), root)
    assert (var >= 0).all() and (var < 1e-2).all()


def test_latent_moments_in_single_precision_are_near_those_in_double():
    posterior, rows, means, covariances = posterior_and_oracle("rbf")
    p = posterior
    mean, var = latent_moments(
        p.kernel,
        *(t.float() for t in (rows, p.Z, p.whitened_mean, p.root)),
        offset=p.offset.float(),
    )
    assert mean.dtype == var.dtype == torch.float32
    np.testing.assert_allclose(mean, means, atol=0.01)
    np.testing.assert_allclose(var.mT, np.diagonal(covariances, axis1=1, axis2=2), atol=0.02)


@pytest.mark.parametrize("n_latent", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fixed_features_give_the_moments_of_every_posterior(name, n_latent):
    posterior, rows, means, covariances = posterior_and_oracle(name, n_latent)
    features = FixedFeatures(posterior.kernel, rows, posterior.Z, posterior.offset)
    mean, var = features.moments(posterior.whitened_mean, posterior.root)
    np.testing.assert_allclose(mean, means, atol=1e-9)
    np.testing.assert_allclose(var.mT, np.diagonal(covariances, axis1=1, axis2=2), atol=1e-9)


def test_fixed_features_have_the_gradients_of_finite_differences():
    problem = dense.make_problem("matern", n_inducing=4)
    features = FixedFeatures(problem.kernel, problem.data.X[:6], problem.tensors[0], OFFSET[:2])
    inputs = [value.requires_grad_() for value in dense.random_posterior(4, n_latent=2)]
    assert torch.autograd.gradcheck(features.moments, inputs)


# ---- predictions --------------------------------------------------------------------------------


@pytest.mark.parametrize("n_latent", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_sparse_posterior_predicts_as_dense_conditionals(name, n_latent):
    posterior, rows, means, covariances = posterior_and_oracle(name, n_latent)
    mean, var = posterior.mean_and_variance(rows)
    np.testing.assert_allclose(mean, means, atol=1e-9)
    np.testing.assert_allclose(posterior.mean(rows), mean, rtol=1e-13)
    np.testing.assert_allclose(var.mT, np.diagonal(covariances, axis1=1, axis2=2), atol=1e-9)
    np.testing.assert_allclose(posterior.covariance(rows), covariances, atol=1e-9)
    assert (posterior.n_inducing, posterior.n_latent) == (9, n_latent)


def test_sparse_posterior_predicts_a_row_whatever_comes_with_it():
    posterior, rows, _, _ = posterior_and_oracle("matern")
    mean, var = posterior.mean_and_variance(rows)
    for i in range(len(rows)):
        one = posterior.mean_and_variance(rows[i : i + 1])
        torch.testing.assert_close(one[0], mean[i : i + 1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one[1], var[i : i + 1], rtol=1e-12, atol=1e-12)
    pair = posterior.covariance(rows[[2, 7]])
    whole = posterior.covariance(rows)[:, [2, 7]][:, :, [2, 7]]
    torch.testing.assert_close(pair, whole, rtol=1e-12, atol=1e-12)


def test_sparse_posterior_has_the_prior_far_away():
    posterior, _, _, _ = posterior_and_oracle("rbf")
    mean, var = posterior.mean_and_variance(torch.full((1, 2), 80.0, dtype=torch.float64))
    torch.testing.assert_close(mean[0], OFFSET, rtol=0, atol=1e-12)
    np.testing.assert_allclose(var, 1.3, rtol=1e-12)


def test_sparse_posterior_of_a_linear_kernel_is_that_of_its_weights():
    """Prior variances differ from row to row: k(x, x) is not taken for a constant."""
    problem = dense.make_problem()
    kernel = DotProduct(0.5)
    mean, root = dense.random_posterior(9)
    posterior = SparsePosterior(kernel, problem.tensors[0], mean, root, OFFSET[:1])
    q = dense.unwhitened(kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    f_mean, covariance = dense.predict(kernel, problem.X, problem.Z, *q, 0.4)
    found = posterior.mean_and_variance(torch.tensor(problem.X))
    np.testing.assert_allclose(found[0][:, 0], f_mean, atol=1e-9)
    np.testing.assert_allclose(found[1][:, 0], np.diag(covariance), atol=1e-9)


def test_sparse_posterior_predicts_in_double_precision():
    problem = dense.make_problem()
    state = problem.state()
    parts = (state.Z, state.mean, state.root, state.offset)
    posterior = SparsePosterior(problem.kernel, *(part.float() for part in parts))
    mean, var = posterior.mean_and_variance(torch.tensor(problem.X))
    assert mean.dtype == var.dtype == torch.float64
    kept = (value for value in vars(posterior).values() if isinstance(value, torch.Tensor))
    assert {value.dtype for value in kept} == {torch.float64}


def test_sparse_posterior_of_single_precision_predicts_as_trained():
    """Whitened by the same factor, though in double precision."""
    problem = dense.make_problem(n_inducing=40)
    mean, root = dense.random_posterior(40)
    offset = OFFSET[:1].float()
    single = problem.tensors[0].float(), mean.float(), root.float()
    rows = torch.tensor(problem.X).float()
    trained = latent_moments(problem.kernel, rows, *single, offset=offset)
    posterior = SparsePosterior(problem.kernel, *single, offset)
    found = posterior.mean_and_variance(rows.double())
    np.testing.assert_allclose(found[0], trained[0], atol=0.01)
    np.testing.assert_allclose(found[1], trained[1], atol=0.05)


def test_sparse_posterior_pickles_small_and_predicts_the_same():
    posterior, rows, _, _ = posterior_and_oracle("sum")
    pickled = pickle.dumps(posterior)
    numbers = 9 * 2 + 9 * 3 + 3 * 81 + 3 + 81 + 9 * 3  # Z, mean, root, offset, factor, weights
    assert len(pickled) < 8 * numbers + 3000
    copy = pickle.loads(pickled)
    for found, expected in zip(
        copy.mean_and_variance(rows), posterior.mean_and_variance(rows), strict=True
    ):
        assert torch.equal(found, expected)


# ---- rows and states ----------------------------------------------------------------------------


def test_sparse_data_sums_and_selects_with_its_weights():
    problem = dense.make_problem(weighted=True)
    data, plain = problem.data, Data(problem.data.X, problem.data.y)
    values = torch.arange(40.0, dtype=torch.float64)
    assert float(data.weighted_sum(values)) == pytest.approx(problem.weight @ np.arange(40.0))
    columns = torch.stack([values, 2 * values], dim=1)
    assert float(data.weighted_sum(columns)) == pytest.approx(3 * problem.weight @ np.arange(40.0))
    assert float(plain.weighted_sum(values)) == 780.0
    assert data.total == pytest.approx(problem.weight.sum()) and plain.total == len(plain) == 40.0
    mask = values < 3
    for part in (data.take(torch.tensor([0, 1, 2])), data.take(mask)):
        assert torch.equal(part.X, data.X[:3]) and torch.equal(part.weight, data.weight[:3])
    assert plain.take(mask).weight is None


def test_sparse_state_of_the_prior_predicts_the_prior():
    problem = dense.make_problem()
    state = SparseState.prior(problem.kernel, torch.empty(0), problem.tensors[0], OFFSET)
    mean, var = state.posterior().mean_and_variance(torch.tensor(problem.X))
    torch.testing.assert_close(mean, OFFSET.expand(40, 3))
    np.testing.assert_allclose(var, 1.3, rtol=1e-9)
    state.root[0] += 1.0  # the functions share no storage
    assert torch.equal(state.root[1], torch.eye(9, dtype=torch.float64))
