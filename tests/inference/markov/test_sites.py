"""Sites of a series against a dense variational GP with a free mean and covariance."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.exact_sites import fit_sites
from skgp.inference.markov.series import Series, make_series
from skgp.inference.markov.sites import _mixed, left_out_moments
from skgp.inference.markov.smoother import evidence
from skgp.kernels.sde import state_space
from skgp.learning.markov.objectives import GaussianEvidence
from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from skgp.optim.loop import NonFiniteLossError
from skgp.optim.scoring import AndersonMixing
from tests.reference.state_space import by_finite_differences
from tests.reference.vgp import maximise_vgp

KERNEL = 1.5 * Matern(0.8, nu=1.5)
TIGHT = {"tol": 1e-13, "max_iter": 200}
LIKELIHOODS = {
    "logit": Bernoulli(),
    "probit": Bernoulli("probit"),
    "exp": Poisson(),
    "softplus": Poisson("softplus"),
    "student_t": StudentT(0.5, 3.0),
    "gaussian": Gaussian(0.2),
}


def dynamics_of(kernel=KERNEL, shift=None):
    """Dynamics of a kernel, their parameters moved by `shift` (q,)."""
    form = state_space(kernel)
    parameters = form.parameters(None).detach()
    return form.at(parameters if shift is None else parameters + shift)


def targets(name, f, generator):
    """Observations (n,) of latent values."""
    likelihood = LIKELIHOODS.get(name)
    if isinstance(likelihood, Bernoulli):
        return torch.where(
            torch.rand(len(f), generator=generator) < torch.sigmoid(f), 1.0, -1.0
        ).to(f)
    if isinstance(likelihood, Poisson):
        return torch.poisson(f.exp(), generator=generator)
    y = f + 0.3 * torch.randn(len(f), generator=generator).to(f)
    y[1] += 4.0
    return y


def problem(name, n=13, seed=0):
    """Rows in no order, times that repeat with labels that differ, a gap; weights."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(n, generator=generator, dtype=torch.float64)
    x[n // 2 :: 2], x[0] = x[2], 1e3
    weight = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)
    y = targets(name, torch.sin(2 * x), generator)
    if name in ("logit", "probit"):
        repeated = (x == x[2]).nonzero()[:, 0]
        y[repeated[::2]], y[repeated[1::2]] = 1.0, -1.0
    return x, y, weight


def gram(times):
    K = torch.tensor(KERNEL(times[:, None].numpy()))
    return K + 1e-12 * torch.eye(len(K), dtype=K.dtype)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_fit_sites_finds_the_dense_optimum(name):
    x, y, weight = problem(name)
    series, offset = make_series(x, y, weight), 0.3
    found = fit_sites(dynamics_of(), series, LIKELIHOODS[name], offset=offset, **TIGHT)
    elbo, mean, var = maximise_vgp(
        LIKELIHOODS[name], gram(series.times), series.index, series.y, series.weight, offset
    )
    assert found.converged and len(series.times) < len(y)
    np.testing.assert_allclose(found.elbo, elbo, atol=1e-8)
    np.testing.assert_allclose(found.posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(found.posterior.var, var, atol=1e-6)


def test_fit_sites_is_exact_at_once_for_gaussian_noise():
    x, y, weight = problem("gaussian")
    series, noise, offset = make_series(x, y, weight), 0.2, 0.3
    found = fit_sites(dynamics_of(), series, Gaussian(noise), offset=offset)
    centred = make_series(x, y - offset, weight)
    exact = evidence(dynamics_of(), series.gaps, *centred.gaussian_sites(noise))
    assert found.converged and found.n_iter == 1
    log_noise = torch.tensor([math.log(noise)], dtype=torch.float64)
    value = GaussianEvidence(centred)([dynamics_of()], log_noise).value
    np.testing.assert_allclose(found.elbo, value, rtol=1e-12)
    np.testing.assert_allclose(found.posterior.mean, exact.mean, atol=1e-12)
    np.testing.assert_allclose(found.posterior.var, exact.var, atol=1e-12)


@pytest.mark.parametrize("name", ["logit", "exp", "student_t"])
def test_parameter_gradient_is_that_of_the_converged_bound(name):
    series = make_series(*problem(name))
    likelihood = LIKELIHOODS[name]
    found = fit_sites(dynamics_of(), series, likelihood, **TIGHT).posterior.parameter_gradient
    expected = by_finite_differences(
        lambda shift: fit_sites(dynamics_of(shift=shift), series, likelihood, **TIGHT).elbo,
        torch.zeros_like(found),
        1e-4,
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_likelihood_gradient_is_that_of_the_expected_log_density():
    series = make_series(*problem("student_t"))
    logs = torch.tensor([np.log(0.5), np.log(3.0)], dtype=torch.float64, requires_grad=True)

    def fit(logs):
        return fit_sites(dynamics_of(), series, StudentT(*logs.exp()), **TIGHT)

    found = fit(logs)
    mean, var = series.at_rows(found.posterior.mean), series.at_rows(found.posterior.var)
    expected = StudentT(*logs.exp()).expected_log_prob(series.y, mean, var)
    (gradient,) = torch.autograd.grad(series.sums(expected).sum(), logs)
    expected = by_finite_differences(lambda at: fit(at).elbo, logs.detach(), 1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["probit", "exp", "student_t", "laplace"])
def test_bound_rises(name):
    series = make_series(*problem(name, n=60))
    likelihood, losses = LIKELIHOODS.get(name, Laplace(0.3)), []
    found = fit_sites(
        dynamics_of(), series, likelihood, callback=lambda _, logs: losses.append(logs["loss"])
    )
    assert found.converged
    assert found.elbo == -losses[-1]
    assert (np.diff(losses) <= 1e-9 * np.abs(losses[0])).all()


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (Bernoulli(), torch.ones(200)),
        (Bernoulli("probit"), -torch.ones(200)),
        (Poisson(), torch.cat([torch.zeros(100), torch.full((100,), 1e4)])),
        (Poisson(), torch.full((200,), 1e6)),
        (Poisson("softplus"), torch.full((200,), 1e4).index_fill(0, torch.arange(0, 200, 9), 0.0)),
        (StudentT(0.1, 4.0), torch.zeros(200).index_fill(0, torch.arange(0, 200, 9), 1e3)),
        (StudentT(0.1, 1.0), torch.zeros(200).index_fill(0, torch.arange(9), -1e6)),
    ],
)
@pytest.mark.parametrize("span", [2.0, 1e5])
def test_fit_sites_withstands_extreme_targets(likelihood, y, span):
    generator = torch.Generator().manual_seed(0)
    x = span * torch.rand(len(y), generator=generator, dtype=torch.float64)
    found = fit_sites(dynamics_of(), make_series(x, y.double()), likelihood, offset=1.0)
    assert found.converged and found.n_iter < 30
    assert found.posterior.mean.isfinite().all() and (found.posterior.var > 0).all()


def test_start_from_the_optimum_ends_there():
    series = make_series(*problem("student_t"))
    likelihood = LIKELIHOODS["student_t"]
    found = fit_sites(dynamics_of(), series, likelihood, tol=1e-10)
    again = fit_sites(dynamics_of(), series, likelihood, start=(found.beta, found.weight))
    assert again.converged and again.n_iter <= 2
    np.testing.assert_allclose(again.elbo, found.elbo, rtol=1e-10)


def test_start_without_a_valid_posterior_is_left_aside():
    series = make_series(*problem("logit"))
    invalid = torch.zeros_like(series.times), torch.full_like(series.times, -10.0)
    found = fit_sites(dynamics_of(), series, Bernoulli(), start=invalid)
    assert found.elbo == fit_sites(dynamics_of(), series, Bernoulli()).elbo


def test_callback_ends_the_search():
    series = make_series(*problem("exp"))
    found = fit_sites(dynamics_of(), series, Poisson(), callback=lambda n_iter, _: n_iter == 2)
    assert found.n_iter == 2 and not found.converged


def test_max_iter_bounds_the_sweeps():
    series = make_series(*problem("exp"))
    found = fit_sites(dynamics_of(), series, Poisson(), max_iter=1)
    assert found.n_iter == 1 and not found.converged
    with pytest.raises(ValueError, match="max_iter must be at least 1; got 0"):
        fit_sites(dynamics_of(), series, Poisson(), max_iter=0)


def test_bound_that_is_not_finite_names_the_remedy():
    series = make_series(torch.zeros(1).double(), torch.ones(1).double())
    broken = dynamics_of(shift=torch.tensor([torch.nan, 0.0]).double())
    with pytest.raises(NonFiniteLossError, match="Check for targets or inputs"):
        fit_sites(broken, series, Bernoulli())


@pytest.mark.parametrize("noise", [0.2, 1e-6])
def test_evidence_given_a_base_adds_up_to_that_of_all_rows(noise):
    """With Gaussian noise: first the rows of one batch, then those of the other given these."""
    x, y, weight = problem("gaussian")
    likelihood, whole = Gaussian(noise), make_series(x, y, weight)
    at_once = fit_sites(dynamics_of(), whole, likelihood, **TIGHT)
    past = torch.arange(len(whole.y)) % 3 == 0

    def part(rows):
        return Series(whole.times, whole.index[rows], whole.y[rows], whole.weight[rows])

    first = fit_sites(dynamics_of(), part(past), likelihood, **TIGHT)
    base = first.beta, first.weight
    second = fit_sites(dynamics_of(), part(~past), likelihood, base=base, **TIGHT)
    assert first.elbo + second.elbo == pytest.approx(at_once.elbo, rel=1e-6)
    torch.testing.assert_close(base[0] + second.beta, at_once.beta)
    torch.testing.assert_close(second.posterior.mean, at_once.posterior.mean, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("likelihood", [Bernoulli(), Bernoulli("probit"), Gaussian(0.3)])
def test_left_out_moments_are_those_without_a_unit_of_the_row(likelihood, rng):
    x = torch.from_numpy(rng.uniform(0, 5, 12))
    x[3] = x[5]
    y = torch.from_numpy(np.where(rng.random(12) < 0.5, 1.0, -1.0))
    weight = torch.from_numpy(rng.uniform(0.5, 2, 12))
    series = make_series(x, y, weight)
    dynamics, offset = state_space(2.0 * Matern(1.0, nu=1.5)).at(), 0.4
    sites = fit_sites(dynamics, series, likelihood, offset=offset, tol=1e-14, max_iter=200)
    mean, var = series.at_rows(sites.posterior.mean) + offset, series.at_rows(sites.posterior.var)
    found = left_out_moments(likelihood, series.y, mean, var, series.weight)
    slope, curvature = likelihood.expected_derivatives(series.y, mean, var)
    for row in range(12):
        alone = torch.zeros(12, dtype=torch.float64)
        alone[row] = min(1.0, 1 / float(series.weight[row]))
        omega = series.sums(-curvature * alone)
        beta = series.sums((slope - curvature * (mean - offset)) * alone)
        rest = evidence(dynamics, series.gaps, sites.beta - beta, sites.weight - omega)
        assert found[0][row] == pytest.approx(float(series.at_rows(rest.mean)[row]) + offset, 1e-5)
        assert found[1][row] == pytest.approx(float(series.at_rows(rest.var)[row]), rel=1e-5)


def test_rows_that_did_not_converge_keep_a_proper_variance():
    y, mean, var = (torch.ones(1, dtype=torch.float64) for _ in range(3))
    _, left = left_out_moments(Gaussian(0.1), y, mean, var)
    assert left.item() == pytest.approx(100.0)


def test_mixed_sites_have_no_negative_weights():
    """Residuals of -.1, then -.08, are 0 four moves on; a weight below 0 there is its target."""
    bound = SimpleNamespace(whitened=lambda point, changes: changes.flatten(1))
    mixing, zeros = AndersonMixing(), torch.zeros(2, dtype=torch.float64)
    for weight, target in (([0.3, 1.0], [0.2, 0.9]), ([0.2, 0.9], [0.12, 0.82])):
        point = SimpleNamespace(beta=zeros, weight=torch.tensor(weight).to(zeros))
        found = _mixed(mixing, bound, point, (zeros, torch.tensor(target).to(zeros)))
    expected = torch.tensor([0.12, 0.82 - 4 * 0.08]).to(zeros)
    torch.testing.assert_close(found, (zeros, expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", [144 * Matern(0.7, nu=1.5), 144 * Matern(0.7, nu=2.5)])
def test_labels_that_are_nearly_separated_take_few_steps(kernel):
    """Plain iterations take 16 evaluations, and end 3e-4 nats below the optimum."""
    x = torch.linspace(0, 10, 60, dtype=torch.float64)
    series = make_series(x, torch.where(torch.sin(2 * x) > 0.3, 1.0, -1.0).double())
    found = fit_sites(dynamics_of(kernel), series, Bernoulli())
    best = fit_sites(dynamics_of(kernel), series, Bernoulli(), **TIGHT)
    assert found.converged and found.n_iter <= 13
    assert found.elbo == pytest.approx(best.elbo, abs=3e-5)
