"""Theorem 3: exact with every function, bounds in expectation, the paper's erratum, gradients."""

import itertools

import numpy as np
import pytest
import torch
from scipy.special import log_expit

from skgp.inference.stochastic.sampling import everything, index_set
from skgp.inference.stochastic.theorem3 import (
    WeightBlock,
    data_term,
    divergence,
    latent_moments,
    pair_weight,
    squared_form,
    squared_sum,
)
from skgp.likelihoods import Bernoulli, Gaussian
from tests.inference.stochastic_problems import BASES, all_samples, make_problem, z_score
from tests.reference import qsgp as reference
from tests.reference.variational import kl_to_prior

LOGIT = Bernoulli("logit")
K_DENSE = 3


def chevron(problem, k):
    """Lower-triangular C of the problem with entries below the diagonal in k columns only."""
    C = problem.C.clone()
    C[:, k:] = torch.diag(C.diagonal())[:, k:]
    return C


def block_of(problem, i, k):
    """Rows i of mu and C as Theorem 3 reads them, for a single latent function."""
    C = chevron(problem, k)
    var = C.diagonal().square()
    var[:k] = 0
    rows = i.indices
    return WeightBlock(problem.mu[rows, None], var[rows, None], C[rows][:, None, :k])


def labels(problem):
    return torch.where(problem.y > 0, 1.0, -1.0).to(torch.float64)


def estimate(problem, i, k, bound, likelihood=LOGIT, y=None):
    """The data term from every row and the sample i."""
    y = labels(problem) if y is None else y
    Phi = problem.basis.features(problem.X, i.indices)
    mean, var = latent_moments(Phi, i, block_of(problem, i, k), bound=bound)
    return float(data_term(likelihood, y[:, None], mean, var, 1.0))


def expected_log_logit(y, mean, std):
    """Sum of E log sigmoid(y (mean + std z)), by the trapezoidal rule in z."""
    z = np.linspace(-12, 12, 20_001)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    values = log_expit(y[:, None] * (mean[:, None] + std[:, None] * z))
    return np.sum(values * density) * (z[1] - z[0])


def exact(problem, k):
    """The data term of the ELBO, dense."""
    Phi = problem.dense()[0]
    std = np.sqrt(np.sum((Phi @ chevron(problem, k).numpy()) ** 2, axis=1))
    return expected_log_logit(labels(problem).numpy(), Phi @ problem.mu.numpy(), std)


def expectation(problem, n_draws, k, bound):
    """Mean over all equally likely samples of `n_draws` sampling units."""
    samples = all_samples(problem.basis, n_draws)
    return np.mean([estimate(problem, i, k, bound) for i in samples])


def pairs_problem():
    """Twelve Fourier features in six sampling units."""
    return make_problem("fourier", n_features=12, block_size=1)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("k", [0, K_DENSE])
@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_data_term_is_exact_with_every_function(name, k, bound):
    problem = make_problem(name)
    value = estimate(problem, everything(problem.basis), k, bound)
    np.testing.assert_allclose(value, exact(problem, k), rtol=1e-8)


@pytest.mark.parametrize("k", [0, K_DENSE])
def test_strict_is_a_lower_bound_in_expectation_and_rises_to_the_elbo(k):
    problem = pairs_problem()
    bounds = [expectation(problem, draws, k, "strict") for draws in range(1, 7)]
    assert np.all(np.diff(bounds) > 0)
    assert bounds[-2] < exact(problem, k) < bounds[-1] + 1e-8


@pytest.mark.parametrize("k", [0, K_DENSE])
def test_plug_in_error_shrinks_as_the_sample_grows(k):
    problem = pairs_problem()
    draws = range(2 if k else 1, 7)
    errors = [abs(expectation(problem, u, k, "plug-in") - exact(problem, k)) for u in draws]
    assert np.all(np.diff(errors) < 0) and errors[-1] < 1e-7


def test_plug_in_is_nearer_than_strict():
    problem = pairs_problem()
    for draws in range(2, 6):
        near, far = (
            abs(expectation(problem, draws, 0, bound) - exact(problem, 0))
            for bound in ("plug-in", "strict")
        )
        assert near < far


def test_strict_integrates_the_weights_that_it_samples(generator):
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([0, 2, 5]))
    Phi, C = problem.basis.features(problem.X, i.indices), chevron(problem, K_DENSE)
    epsilon = torch.randn(20_000, problem.basis.n_features, generator=generator).double()
    weights = problem.mu + epsilon @ C.T
    f = i.weight * (weights[:, i.indices] @ Phi.T)
    draws = LOGIT.log_prob(labels(problem).expand_as(f), f).sum(1)
    assert z_score(draws.numpy(), estimate(problem, i, K_DENSE, "strict")) < 4


def test_literal_form_of_the_paper_is_not_a_bound_nor_exact():
    """Eq. (5) as printed: z times the variance, in place of its root; every function sampled."""
    problem = pairs_problem()
    Phi, C, y = problem.dense()[0], chevron(problem, 0).numpy(), labels(problem).numpy()

    def literal(scale):
        variance = np.sum((scale * Phi @ C) ** 2, axis=1)
        return expected_log_logit(y, Phi @ problem.mu.numpy(), variance)

    def by_definition(scale):
        std = np.sqrt(np.sum((scale * Phi @ C) ** 2, axis=1))
        return expected_log_logit(y, Phi @ problem.mu.numpy(), std)

    draws = np.random.default_rng(0).normal(size=(40_000, Phi.shape[1]))
    f = Phi @ (problem.mu.numpy()[:, None] + C @ draws.T)
    samples = log_expit(y[:, None] * f).sum(0)
    assert z_score(samples, by_definition(1.0)) < 4
    # A variance below 1 exceeds no more than its root: small ones make the printed form too large,
    # no lower bound, and large ones too small.
    assert z_score(samples, literal(1.0)) > 20
    assert literal(0.3) > by_definition(0.3) + 1e-3
    assert literal(3.0) < by_definition(3.0) - 1.0


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("k", [0, K_DENSE])
def test_divergence_averages_to_the_dense_one_over_all_samples(name, k):
    problem = make_problem(name)
    basis, S = problem.basis, problem.dense()[1]
    values = []
    for i in all_samples(basis, 2):
        entries = None if basis.diagonal_precision else basis.precision(i.indices, i.indices)
        s = basis.precision_diag(i.indices)
        values.append(float(divergence(i, block_of(problem, i, k), s, S=entries)))
    C = chevron(problem, k).numpy()
    expected = kl_to_prior(problem.mu.numpy(), C @ C.T, S)
    if not basis.diagonal_precision:  # leaves out -log|S| / 2
        expected += 0.5 * np.linalg.slogdet(S)[1]
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-10)


@pytest.mark.parametrize("name", BASES)
def test_divergence_of_a_point_is_the_negative_log_prior(name):
    problem = make_problem(name)
    i, S = everything(problem.basis), problem.dense()[1]
    entries = None if problem.basis.diagonal_precision else torch.tensor(S)
    s = problem.basis.precision_diag(i.indices)
    value = float(divergence(i, block_of(problem, i, 0), s, S=entries, point=True))
    mu = problem.mu.numpy()
    log_det = np.linalg.slogdet(S)[1] if problem.basis.diagonal_precision else 0.0
    np.testing.assert_allclose(value, 0.5 * (mu @ S @ mu - log_det), rtol=1e-10)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
@pytest.mark.parametrize("n_draws", [2, 3])
def test_squares_from_pairs_average_to_the_dense_ones(name, n_draws):
    problem = make_problem(name)
    basis, (Phi, S, _) = problem.basis, problem.dense()
    V = problem.C[:, :2]
    sums, forms = [], []
    for i in all_samples(basis, n_draws):
        sums.append(squared_sum(basis.features(problem.X, i.indices), V[i.indices], i).numpy())
        S_i = torch.tensor(S)[i.indices][:, i.indices]
        forms.append(squared_form(S_i, V[i.indices], i).numpy())
    np.testing.assert_allclose(np.mean(sums, 0), (Phi @ V.numpy()) ** 2, rtol=1e-10)
    dense = np.diag(V.numpy().T @ S @ V.numpy())
    np.testing.assert_allclose(np.mean(forms, 0), dense, rtol=1e-10)


def test_gaussian_likelihood_with_every_function_is_the_closed_form_elbo():
    problem = make_problem("precision")
    i = everything(problem.basis)
    Phi, S, y = problem.dense()
    for k, bound in itertools.product([0, K_DENSE], ["plug-in", "strict"]):
        data = estimate(problem, i, k, bound, Gaussian(0.3), problem.y)
        s = problem.basis.precision_diag(i.indices)
        value = data - float(divergence(i, block_of(problem, i, k), s))
        C = chevron(problem, k).numpy()
        expected = reference.elbo(Phi, S, y, problem.mu.numpy(), C, 0.3)
        np.testing.assert_allclose(value, expected, rtol=1e-10)


def test_bias_of_plug_in_is_the_variance_of_the_mean_for_a_gaussian():
    problem, noise = pairs_problem(), 0.3
    mu, samples = problem.mu, all_samples(problem.basis, 3)
    values = [estimate(problem, i, 0, "plug-in", Gaussian(noise), problem.y) for i in samples]
    means = [
        i.weight * problem.basis.features(problem.X, i.indices) @ mu[i.indices] for i in samples
    ]
    variance = float(torch.stack(means).var(0, correction=0).sum())
    unbiased = estimate(
        problem, everything(problem.basis), 0, "plug-in", Gaussian(noise), problem.y
    )
    np.testing.assert_allclose(np.mean(values), unbiased - variance / (2 * noise), rtol=1e-10)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_gradients_are_the_numerical_ones(name, bound):
    problem = make_problem(name)
    basis = problem.basis
    i = index_set(basis, torch.tensor([0, 1]))
    start = block_of(problem, i, 1)
    theta = torch.tensor(basis.kernel.theta)

    def elbo(mean, var, columns, theta):
        block = WeightBlock(mean, var, columns)
        Phi = basis.features(problem.X, i.indices, theta)
        moments = latent_moments(Phi, i, block, bound=bound)
        s = basis.precision_diag(i.indices, theta)
        S = None if basis.diagonal_precision else basis.precision(i.indices, i.indices, theta)
        data = data_term(LOGIT, labels(problem)[:, None], *moments, 2.0)
        return data - divergence(i, block, s, S=S)

    # A variance of 0 in the head is on the edge: keep it out of the check.
    inputs = [t.clone().requires_grad_() for t in (start.mean, start.columns, theta)]
    assert torch.autograd.gradcheck(
        lambda mean, columns, theta: elbo(mean, start.var, columns, theta), inputs
    )
    tail = block_of(problem, i, 0).var.requires_grad_()
    none = start.columns[:, :, :0]
    assert torch.autograd.gradcheck(lambda var: elbo(start.mean, var, none, theta), [tail])


@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_latent_functions_do_not_mix(bound):
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([1, 3, 4]))
    one = block_of(problem, i, K_DENSE)
    parts = [one, WeightBlock(2 * one.mean, 0.5 * one.var, -0.7 * one.columns)]
    both = WeightBlock(*(torch.cat([getattr(p, a) for p in parts], 1) for a in vars(one)))
    Phi = problem.basis.features(problem.X, i.indices)
    s = problem.basis.precision_diag(i.indices)
    alone = [latent_moments(Phi, i, p, bound=bound) for p in parts]
    together = latent_moments(Phi, i, both, bound=bound)
    for a, b in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(a, torch.cat(b, 1), rtol=1e-12, atol=1e-12)
    separate = torch.cat([divergence(i, p, s) for p in parts])
    torch.testing.assert_close(divergence(i, both, s), separate, rtol=1e-12, atol=1e-12)


def test_variance_is_never_negative():
    problem = pairs_problem()
    for i in all_samples(problem.basis, 2):
        block = block_of(problem, i, K_DENSE)
        block = WeightBlock(block.mean, 0 * block.var, block.columns)
        Phi = problem.basis.features(problem.X, i.indices)
        raw = squared_sum(Phi, block.columns[:, 0], i).sum(1)
        clipped = latent_moments(Phi, i, block)[1][:, 0]
        torch.testing.assert_close(clipped, raw.clamp_min(0))


def test_errors_name_the_remedy():
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([2]))
    Phi = problem.basis.features(problem.X, i.indices)
    with pytest.raises(ValueError, match="bound must be one of .*'dropout'"):
        latent_moments(Phi, i, block_of(problem, i, 0), bound="dropout")
    with pytest.raises(ValueError, match="basis_batch_size=2 gives a single sampling unit"):
        latent_moments(Phi, i, block_of(problem, i, 1))
    assert pair_weight(everything(problem.basis)) == 1.0
