"""Where natural-gradient steps end: stationary points of the bound; SVGP where H = M."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.defaults import LOCAL_JITTER
from skgp.inference.natural import FullSystem, fit_natural_sites, unsettled
from skgp.inference.neighbors.conditionals import SharedConditionals, Tiles, local_conditionals
from skgp.inference.neighbors.system import full_system, local_system
from skgp.kernels.gram import gram_diag
from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from tests.covering import covering
from tests.reference import sparse
from tests.reference import swsgp as dense

# As in the LOG_PROB of the oracle, with the observations that each is for.
LIKELIHOODS = {
    "gaussian": (Gaussian(0.3), "gaussian"),
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (StudentT(0.5, 4.0), "student_t"),
}
TIGHT = {"tol": 1e-15, "cg_tol": 1e-12, "max_iter": 60}


def problem_of(name, **options):
    likelihood, target = LIKELIHOODS[name]
    options = {"n_latent": 2, "weighted": True} | options
    return dense.make_problem("matern", target=target, **options), likelihood


def system_of(problem):
    X, _, Z, active, _, weight = problem.tensors
    tiles = Tiles(problem.kernel, X, Z, active)
    return local_system(tiles, kl_weight=problem.kl_weight, weight=weight)


def fit(problem, likelihood, **options):
    _, Y, _, _, offset, _ = problem.tensors
    return fit_natural_sites(system_of(problem), Y, likelihood, offset=offset, **(TIGHT | options))


def full_system_of(problem):
    X, _, Z, _, _, weight = problem.tensors
    given = SharedConditionals(problem.kernel, Z, LOCAL_JITTER * gram_diag(problem.kernel, Z))
    return FullSystem(*given.features(X), problem.kl_weight, weight, given.factor)


def fit_full(problem, likelihood):
    """All points active: the fit, and its q of u."""
    _, Y, _, _, offset, _ = problem.tensors
    system = full_system_of(problem)
    found = fit_natural_sites(system, Y, likelihood, offset=offset, **TIGHT)
    return found, system.unwhitened(found.q)


def torch_bound(problem, likelihood, mean, root):
    """Plain bound for S = root root', (c, M, M)."""
    X, Y, Z, active, offset, _ = problem.tensors
    weight, share = torch.tensor(problem.row_weight), torch.tensor(problem.share)
    local = local_conditionals(problem.kernel, X, Z, active)
    S = root @ root.mT
    total = torch.zeros((), dtype=torch.float64)
    for l in range(mean.shape[1]):
        m = mean[active, l]
        S_local = S[l][active[:, :, None], active[:, None, :]]
        f = offset[l] + (local.weights * m).sum(1)
        v = local.variance + torch.einsum("nh,nhk,nk->n", local.weights, S_local, local.weights)
        total = total + (weight * likelihood.expected_log_prob(Y[:, l], f, v)).sum()
        trace = (local.precision * S_local).sum((1, 2))
        trace = trace + torch.einsum("nh,nhk,nk->n", m, local.precision, m)
        log_ratio = local.log_det - torch.logdet(S_local)
        total = total - 0.5 * (share * (trace - active.shape[1] + log_ratio)).sum()
    return total


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_fit_ends_at_a_stationary_point_of_the_bound(name):
    problem, likelihood = problem_of(name)
    found = fit(problem, likelihood)
    mean, log_std = (
        found.q.mean.clone().requires_grad_(),
        (0.5 * found.q.var.log()).requires_grad_(),
    )
    value = torch_bound(problem, likelihood, mean, log_std.exp().T.diag_embed())
    gradients = torch.autograd.grad(value, (mean, log_std))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 5e-5
    assert found.converged and found.history[-1]["loss"] == -found.bound
    np.testing.assert_allclose(value.item(), found.bound, rtol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_fit_reports_the_bound_of_the_oracle(name):
    problem, likelihood = problem_of(name)
    found = fit(problem, likelihood, max_iter=2)
    covariance = dense.diagonal(found.q.var.numpy())
    expected = dense.bound(problem, dense.LOG_PROB[name], found.q.mean.numpy(), covariance)
    np.testing.assert_allclose(found.bound, expected, rtol=1e-8)


@covering(name=["probit", "poisson", "student_t"], damping=[0.5, 1.0])
def test_bound_never_falls_and_its_maximum_does_not_depend_on_the_damping(name, damping):
    problem, likelihood = problem_of(name)
    found = fit(problem, likelihood, damping=damping)
    losses = [entry["loss"] for entry in found.history]
    assert all(b <= a + 1e-9 for a, b in zip(losses, losses[1:], strict=False))
    np.testing.assert_allclose(found.bound, fit(problem, likelihood).bound, rtol=1e-9)


def test_systems_are_solved_roughly_while_the_bound_rises_fast():
    problem, likelihood = problem_of("probit")
    found = fit(problem, likelihood, cg_tol=1e-3, tol=1e-6)
    residuals = np.array([entry["cg_residual"] for entry in found.history])
    assert residuals[0] > 1e-3 and (residuals < 5.1e-3).all() and residuals[-1] < 2e-3
    exact = fit(problem, likelihood)
    assert found.converged and abs(found.bound - exact.bound) < 1e-4 * abs(exact.bound)


def test_step_that_lowers_the_bound_is_cut():
    problem, _ = problem_of("poisson", n=60, n_latent=1, weighted=False)
    Y = 4 + 3 * torch.sin(2 * problem.tensors[0][:, :1])
    found = fit_natural_sites(system_of(problem), Y, Laplace(0.05), **TIGHT)
    rates = [entry["rate"] for entry in found.history]
    assert rates[0] < 1 and rates[-1] == 0.75


class FromThePrior(Poisson):
    """Counts whose steps begin at the prior."""

    has_link = False


def test_large_counts_begin_at_their_own_values():
    """From a wide prior E[exp f] holds q where it is, and the ELBO seems to stand still."""
    rng = np.random.default_rng(0)
    X = torch.tensor(rng.uniform(-3, 3, (40, 1)))
    f = 14 + torch.sin(2 * X)
    system = full_system(150.0 * RBF(1.0), X, X)
    Y = torch.tensor(rng.poisson(f.exp().numpy())).double()
    offset = Y.mean(0).log()
    found = [
        (make(), fit_natural_sites(system, Y, make(), offset=offset))
        for make in (Poisson, FromThePrior)
    ]
    left = [unsettled(fit, system, Y, likelihood, offset) for likelihood, fit in found]
    (_, good), (_, held) = found
    assert good.converged and left[0] < 1e-3 and left[1] > 0.9
    mean = Y.mean(0).log() + system.moments(good.q)[0]
    assert float((mean - f).abs().max()) < 0.01 and good.bound > held.bound + 1e6


@pytest.mark.parametrize("full", [False, True], ids=["local", "full"])
@pytest.mark.parametrize("name", ["poisson", "laplace"])
def test_fit_far_from_the_prior_mean_ends_at_a_stationary_point(name, full):
    """A full step from a prior mean of 0 goes to rates of e^100, or has no curvature to stop it."""
    problem, _ = problem_of("poisson", n=60, n_latent=1, weighted=False)
    f = 4 + 3 * torch.sin(2 * problem.tensors[0][:, :1])
    if name == "poisson":
        likelihood, Y = Poisson(), f.exp().round()
    else:
        likelihood, Y = Laplace(0.05), f
    system = full_system_of(problem) if full else system_of(problem)
    found = fit_natural_sites(system, Y, likelihood, **TIGHT)
    assert found.converged
    mean, var = system.moments(found.q)
    slope, _ = likelihood.expected_derivatives(Y, mean, var)
    collect = system.features.T.__matmul__ if full else system.rows.collect
    prior = problem.kl_weight * found.q.mean if full else system.prior.multiply(found.q.mean)
    torch.testing.assert_close(collect(slope), prior, rtol=1e-4, atol=1e-4)


def test_fit_from_its_own_optimum_stays():
    problem, likelihood = problem_of("logit")
    first = fit(problem, likelihood)
    again = fit(problem, likelihood, start=first.q, tol=1e-8)
    assert len(again.history) <= 2
    torch.testing.assert_close(again.q.mean, first.q.mean, rtol=1e-4, atol=1e-5)


def test_weights_count_as_repeated_rows():
    counts = np.random.default_rng(3).integers(0, 4, 40)
    problem, likelihood = problem_of("probit", weighted=False)
    weighted = fit(replace(problem, weight=counts.astype(float)), likelihood)
    repeated = fit(problem.repeated(counts), likelihood)
    np.testing.assert_allclose(weighted.bound, repeated.bound, rtol=1e-9)
    torch.testing.assert_close(weighted.q.mean, repeated.q.mean, rtol=1e-5, atol=1e-6)


# ---- full covariance ----------------------------------------------------------------------------


def svgp(problem):
    """Bound, mean and covariance of Titsias (2009) for the jitter of these models."""
    Kuu, Kuf = dense.inducing_gram(problem.kernel, problem.Z), problem.kernel(problem.Z, problem.X)
    explained = Kuf.T @ np.linalg.solve(Kuu, Kuf)
    y, noise = problem.Y[:, 0] - problem.offset[0], problem.noise
    total = explained + noise * np.eye(len(y))
    bound = stats.multivariate_normal(np.zeros(len(y)), total).logpdf(y)
    bound -= np.sum(problem.kernel.diag(problem.X) - np.diag(explained)) / (2 * noise)
    gain = np.linalg.solve(total, Kuf.T).T
    return bound, gain @ y, Kuu - gain @ Kuf.T


def test_full_covariance_with_all_points_active_is_svgp():
    problem, likelihood = problem_of("gaussian", n_neighbors=12, weighted=False, n_latent=1)
    assert problem.kl_weight == 1.0
    found, q = fit_full(problem, likelihood)
    bound, mean, covariance = svgp(problem)
    np.testing.assert_allclose(found.bound, bound, rtol=1e-8)
    np.testing.assert_allclose(q.mean[:, 0], mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(q.root[0] @ q.root[0].T, covariance, rtol=1e-8, atol=1e-8)
    # Predictions of rows elsewhere, by the conditionals of all points.
    X = np.random.default_rng(5).uniform(-3, 3, (15, 2))
    K = dense.inducing_gram(problem.kernel, problem.Z)
    A = np.linalg.solve(K, problem.kernel(problem.Z, X)).T
    var = problem.kernel.diag(X) + np.sum((A @ (covariance - K)) * A, axis=1)
    everything = torch.arange(12).expand(15, 12)
    given = local_conditionals(problem.kernel, torch.tensor(X), torch.tensor(problem.Z), everything)
    f_var = given.variance + (given.weights @ q.root[0]).square().sum(1)
    np.testing.assert_allclose(given.weights @ q.mean[:, 0], A @ mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(f_var, var, rtol=1e-8, atol=1e-8)


def test_svgp_bound_of_a_given_posterior_is_that_of_the_local_system():
    """H = M and a diagonal S: the sum of the local divergences is the one of SVGP."""
    problem, _ = problem_of("gaussian", n_neighbors=12, n_latent=1)
    found = fit(problem, Gaussian(0.3), max_iter=1)
    S = np.diag(found.q.var[:, 0].numpy())
    K, mean = dense.inducing_gram(problem.kernel, problem.Z), found.q.mean[:, 0].numpy()
    A = np.linalg.solve(K, problem.kernel(problem.Z, problem.X)).T
    var = problem.kernel.diag(problem.X) + np.sum((A @ (S - K)) * A, axis=1)
    residual = problem.Y[:, 0] - problem.offset[0] - A @ mean
    rows = -0.5 * ((residual**2 + var) / 0.3 + np.log(2 * np.pi * 0.3))
    expected = problem.weight @ rows - sparse.divergence(mean, S, K)
    np.testing.assert_allclose(found.bound, expected, rtol=1e-8)


@pytest.mark.parametrize("kl_weight", [1.0, 0.4])
@pytest.mark.parametrize("name", ["gaussian", "probit", "poisson", "student_t"])
def test_full_covariance_is_a_stationary_point_of_the_bound(name, kl_weight):
    problem, likelihood = problem_of(name, n_inducing=6, n_neighbors=6, kl_weight=kl_weight)
    found, q = fit_full(problem, likelihood)
    mean, root = q.mean.clone().requires_grad_(), q.root.clone().requires_grad_()
    value = torch_bound(problem, likelihood, mean, root.tril())
    gradients = torch.autograd.grad(value, (mean, root))
    assert max(float(gradient.abs().max()) for gradient in gradients) < 5e-5
    np.testing.assert_allclose(value.item(), found.bound, rtol=1e-8)
    torch.testing.assert_close(q.root, q.root.tril())
    torch.testing.assert_close(q.var, q.root.square().sum(-1).T)
