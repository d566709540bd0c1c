"""Sparse posteriors against dense conditionals: moments, coordinates, divergence, natural steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.data import Data
from skgp.inference import defaults
from skgp.inference.collapsed import elbo_posterior, statistics
from skgp.inference.sparse import (
    FixedFeatures,
    ReferenceGaussian,
    SparsePosterior,
    SparseState,
    inducing_factor,
    kl_from_standard_normal,
    latent_moments,
    natural_gradients,
    whitened_features,
)
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.search import fit_all_rows
from skgp.likelihoods import Bernoulli, Gaussian
from skgp.linalg import NotPositiveDefiniteError
from tests.covering import covering
from tests.reference import sparse as dense
from tests.reference.sparse import LIKELIHOODS, problem_of
from tests.same import assert_same

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
    expected = kernel(Z.double().numpy()) + 50 * defaults.JITTER[dtype] * np.eye(60)
    np.testing.assert_allclose(L @ L.mT, expected, atol=50 * 10 * torch.finfo(dtype).eps)


def test_inducing_factor_refuses_nan():
    Z = torch.tensor([[0.0], [torch.nan]], dtype=torch.float64)
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        inducing_factor(RBF(), Z)


def test_whitened_features_explain_the_dense_part():
    problem = dense.make_problem("matern")
    Z, X = problem.tensors[0], torch.tensor(problem.X)
    Phi, left = whitened_features(problem.kernel, X, Z)
    expected = dense.explained(problem.kernel, problem.X, problem.Z)
    np.testing.assert_allclose(Phi.mT @ Phi, expected, atol=1e-10)
    expected = dense.unexplained(problem.kernel, problem.X, problem.Z)
    np.testing.assert_allclose(left, expected, atol=1e-10)


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


@pytest.mark.parametrize("n_latent", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_fixed_features_give_the_moments_of_every_posterior(name, n_latent):
    posterior, rows, means, covariances = posterior_and_oracle(name, n_latent)
    features = FixedFeatures(posterior.kernel, rows, posterior.Z, posterior.offset)
    mean, var = features.moments(posterior.whitened_mean, posterior.root)
    np.testing.assert_allclose(mean, means, atol=1e-9)
    np.testing.assert_allclose(var.mT, np.diagonal(covariances, axis1=1, axis2=2), atol=1e-9)


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


def test_sparse_posterior_predicts_in_double_precision():
    problem = dense.make_problem()
    state = problem.state()
    parts = (state.Z, state.mean, state.root, state.offset)
    posterior = SparsePosterior(problem.kernel, *(part.float() for part in parts))
    mean, var = posterior.mean_and_variance(torch.tensor(problem.X))
    assert mean.dtype == var.dtype == torch.float64
    kept = (value for value in vars(posterior).values() if isinstance(value, torch.Tensor))
    assert {value.dtype for value in kept} == {torch.float64}


def test_new_inducing_points_change_no_prediction_and_leave_little_unexplained():
    rng = np.random.default_rng(0)
    kernel = 1.3 * RBF(0.8)
    Z, X = torch.tensor(rng.uniform(-3, 0, (8, 1))), torch.tensor(rng.uniform(-3, 3, (200, 1)))
    mean = torch.tensor(rng.standard_normal((8, 2)))
    root = torch.tensor(rng.standard_normal((2, 8, 8))).tril() / 4 + torch.eye(8)
    state = SparseState(kernel, torch.zeros(0), Z, mean, root.double(), torch.zeros(2))
    grown = state.with_novel(X, 30, torch.Generator().manual_seed(0))
    assert 8 < len(grown.Z) < 38 and (grown.Z[:8] == Z).all()
    before, after = (s.posterior().mean_and_variance(X) for s in (state, grown))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
    Kzz, Kxz = kernel(grown.Z.numpy()), kernel(X.numpy(), grown.Z.numpy())
    left = 1.3 - np.einsum("ij,ji->i", Kxz, np.linalg.lstsq(Kzz, Kxz.T, rcond=1e-12)[0])
    assert left.mean() < 2e-3 * 1.3
    assert len(state.with_novel(X, 3, torch.Generator().manual_seed(0)).Z) == 11
    assert len(state.with_novel(X, 0, torch.Generator()).Z) == 8
    assert len(state.with_novel(Z, 9, torch.Generator()).Z) == 8
    # However many rows are explained, each a little less than wholly.
    explained = (Z + 0.02).repeat(400, 1)
    apart = torch.tensor([[20.0], [30.0], [40.0]]).double()
    grown = state.with_novel(torch.cat([explained, apart]), 9, torch.Generator().manual_seed(0))
    assert sorted(grown.Z[8:, 0].tolist()) == [20.0, 30.0, 40.0]


M, C = 5, 2


@pytest.fixture
def reference():
    return ReferenceGaussian(*dense.random_posterior(M, C))


@pytest.fixture
def coordinates(rng):
    return {
        "alpha": torch.tensor(rng.standard_normal((M, C))),
        "triangle": torch.tensor(0.4 * rng.standard_normal((C, M * (M + 1) // 2))),
    }


def test_reference_starts_at_itself(reference):
    start = reference.start()
    mean, root = reference.posterior(**start)
    assert_same(mean, reference.mean)
    assert_same(root, reference.root)
    assert start["alpha"].shape == (M, C) and start["triangle"].shape == (C, 15)


def test_reference_posterior_is_its_equation(reference, coordinates):
    mean, root = reference.posterior(**coordinates)
    for c in range(C):
        shift = reference.root[c] @ coordinates["alpha"][:, c]
        torch.testing.assert_close(mean[:, c], reference.mean[:, c] + shift)
        T = torch.zeros(M, M, dtype=torch.float64)
        entries = iter(coordinates["triangle"][c])
        for i in range(M):
            for j in range(i + 1):
                T[i, j] = next(entries)
        T.diagonal().exp_()
        torch.testing.assert_close(reference.triangle(coordinates["triangle"])[c], T)
        torch.testing.assert_close(root[c], reference.root[c] @ T)
    assert torch.equal(root, root.tril())
    assert (root.diagonal(dim1=1, dim2=2) > 0).all()


def test_reference_posterior_has_the_gradients_of_finite_differences(reference, coordinates):
    inputs = [value.requires_grad_() for value in coordinates.values()]
    assert torch.autograd.gradcheck(reference.posterior, inputs)


def test_kl_from_standard_normal_is_the_dense_divergence():
    mean, root = dense.random_posterior(M, C)
    expected = sum(
        dense.divergence(a.numpy(), (R @ R.mT).numpy(), np.eye(M))
        for a, R in zip(mean.mT, root, strict=True)
    )
    assert float(kl_from_standard_normal(mean, root)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_reference_at_the_optimum_makes_the_hessian_the_identity(weighted):
    """In alpha. In the entries of T it is that of |T|^2 / 2 - log |T|: 1, and 2 on the diagonal."""
    problem = dense.make_problem(n_inducing=M, weighted=weighted)
    Z, noise = problem.tensors
    with torch.no_grad():
        optimum = elbo_posterior(statistics(problem.kernel, problem.data, Z), noise)
    reference, state = ReferenceGaussian(*optimum), problem.state()
    objective = Objective(Gaussian(problem.noise, bounds=(1e-4, 1.0)), name="elbo")

    def loss(alpha, triangle):
        here = state.with_posterior(*reference.posterior(alpha, triangle))
        return objective.posterior_loss(here, problem.data)

    start = tuple(reference.start().values())
    (in_alpha, across), (_, in_triangle) = torch.autograd.functional.hessian(loss, start)
    torch.testing.assert_close(
        in_alpha[:, 0, :, 0], torch.eye(M, dtype=torch.float64), rtol=0, atol=1e-7
    )
    np.testing.assert_allclose(across, 0, atol=1e-7)
    expected = np.where(np.equal(*np.tril_indices(M)), 2.0, 1.0)
    np.testing.assert_allclose(in_triangle[0, :, 0], np.diag(expected), atol=1e-7)


FIXED = {"learn_kernel": False, "learn_likelihood": False, "learn_inducing": False}


weights = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def natural(state, data, objective, **options):
    """Of an objective, by its likelihood and beta."""
    made = objective.likelihood.with_parameters(state.likelihood)
    return natural_gradients(state, data, made, beta=objective.beta, **options)


# ---- natural gradients --------------------------------------------------------------------------


@weights
@pytest.mark.parametrize("beta", [0.2, 1.0, 4.0])
def test_natural_gradients_reach_the_optimum_for_gaussian_noise_in_one_step(beta, weighted):
    """From wherever they begin."""
    problem, made, state = problem_of("gaussian", offset=0.0, weighted=weighted)
    objective = Objective(made, name="elbo", beta=beta)
    sums = statistics(problem.kernel, problem.data, state.Z)
    mean, root = elbo_posterior(sums, problem.tensors[1], beta=beta)
    for start in (state, state.with_posterior(*dense.random_posterior(9))):
        found = natural(start, problem.data, objective, max_iter=1)
        torch.testing.assert_close(found.mean, mean, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(found.root, root, rtol=1e-8, atol=1e-8)


@covering(likelihood=[name for name in LIKELIHOODS if name != "gaussian"], beta=[0.3, 1.0])
def test_natural_gradients_find_the_optimum_of_lbfgs(likelihood, beta):
    problem, made, state = problem_of(likelihood, weighted=True)
    objective = Objective(made, name="elbo", beta=beta, **FIXED)
    found = natural(state, problem.data, objective, max_iter=100, tol=1e-10)
    slow = fit_all_rows(state, problem.data, objective, max_iter=500, tol=1e-13)
    loss = objective.total(found, problem.data)
    # Negative curvatures, which Student's t has, are not counted: near the optimum only.
    assert loss == pytest.approx(slow.loss, rel=1e-2 if likelihood == "student_t" else 1e-7)
    if likelihood != "student_t":
        torch.testing.assert_close(found.mean, slow.state.mean, rtol=0, atol=3e-3)
        torch.testing.assert_close(found.root, slow.state.root, rtol=0, atol=3e-3)


def test_natural_gradients_go_on_while_means_of_hundreds_move():
    """Labels lie apart, and f has a variance of 3e6."""
    X = torch.from_numpy(np.random.RandomState(100).randn(60, 4))
    data = Data(X, (X[:, :2].sum(1, keepdim=True) > 0).double() * 2 - 1)
    objective = Objective(Bernoulli("probit"), name="elbo", **FIXED)
    offset = X.new_zeros(1)
    prior = SparseState.prior(ConstantKernel(3e6) * Matern(50.0, nu=2.5), offset[:0], X, offset)
    found = natural(prior, data, objective, max_iter=100)
    slow = fit_all_rows(found, data, objective, max_iter=500, tol=1e-13)
    assert objective.total(found, data) == pytest.approx(slow.loss, rel=1e-2)


def test_natural_gradients_from_rates_far_too_low_for_a_count_do_not_lower_the_bound():
    """A full step would take the log-rate of 3 beyond 1000."""
    problem, made, _ = problem_of("poisson")
    problem = replace(problem, y=np.where(np.arange(len(problem.y)) == 5, 10_000.0, problem.y))
    objective = Objective(made, name="elbo", **FIXED)
    state = problem.state(torch.empty(0))
    for begun in (state, replace(state, offset=state.offset - 3)):
        found = natural(begun, problem.data, objective)
        before, after = (objective.total(s, problem.data) for s in (begun, found))
        assert after < before
        means, _ = found.posterior().mean_and_variance(problem.data.X)
        assert means.max() < np.log(10_000) + 1


def test_natural_gradients_of_several_functions_are_those_of_each():
    problem, made, state = problem_of("probit", n_latent=2)
    y = problem.data.y
    objective = Objective(made, name="elbo")
    options = {"max_iter": 6, "tol": 0.0}
    both = Data(problem.data.X, torch.cat([y, -y], dim=1))
    found = natural(state, both, objective, **options)
    for c, sign in enumerate((1, -1)):
        one = Data(problem.data.X, sign * y)
        expected = natural(problem.state(torch.empty(0)), one, objective, **options)
        torch.testing.assert_close(found.mean[:, c : c + 1], expected.mean)
        torch.testing.assert_close(found.root[c : c + 1], expected.root)
