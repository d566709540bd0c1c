"""Layers of deep state-space GPs: derivatives, natural steps, training of a composition."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from examples.papers._s2vgp_layers import StateSpaceLayer, fit_layers
from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.knots import PairSites
from skgp.inference.markov.series import make_series
from skgp.kernels.sde import state_space
from skgp.likelihoods import Gaussian
from skgp.linalg import NotPositiveDefiniteError

KERNEL = 1.5 * Matern(0.6, nu=1.5) + 0.3 * Matern(0.4, nu=0.5)
KNOTS = torch.tensor([0.2, 0.8, 1.7], dtype=torch.float64)


@pytest.fixture
def data(rng):
    x = torch.tensor(np.sort(rng.uniform(-0.3, 2.3, 15)))
    return x, torch.tensor(rng.normal(size=15)) + x


@pytest.fixture
def fitted(data):
    x, y = data
    form = state_space(KERNEL)
    dynamics = form.at()
    return fit_inducing(dynamics, KNOTS, make_series(x, y - 0.5 - 2 * x), Gaussian(0.1))


def layer_of(sites=None):
    return StateSpaceLayer(KERNEL, KNOTS, intercept=0.5, slope=2.0, sites=sites)


def test_marginals_are_those_of_the_fit(data, fitted):
    layer = layer_of(fitted.posterior.sites)
    mean, var = layer.marginals(data[0].reshape(3, 5))
    torch.testing.assert_close(mean.reshape(-1), fitted.posterior.mean + 0.5 + 2 * data[0])
    torch.testing.assert_close(var.reshape(-1), fitted.posterior.var)
    torch.testing.assert_close(layer.state().moments(data[0])[1], fitted.posterior.var)


def test_derivatives_agree_with_finite_differences(data, fitted):
    layer, x = layer_of(fitted.posterior.sites), data[0][[0, 6, 14]].clone()
    moments = layer._moments

    def outputs(theta, x, mean, cov):
        layer.theta = theta
        layer.refresh()
        layer._moments = mean, cov
        return layer.marginals(x)

    inputs = [t.detach().clone().requires_grad_() for t in (layer.theta, x, *moments)]
    assert torch.autograd.gradcheck(outputs, inputs, atol=1e-6, fast_mode=True)


def test_gradient_of_kl_is_that_at_fixed_q(fitted):
    layer, step = layer_of(fitted.posterior.sites), 1e-5
    gradient = torch.autograd.grad(layer.kl(), layer.theta)[0]
    second = layer._pairs.second_moments()

    def expected_log_prior(theta):
        """E_q[log p(u)] but for constants, by inverses of the transitions' covariances."""
        other = StateSpaceLayer(KERNEL.clone_with_theta(theta.numpy()), KNOTS)
        d, total = other.form.n_states, 0.0
        for k in range(len(KNOTS)):
            F, Q = other._chain.F[..., k], other._chain.Q[..., k]
            R = torch.cat([-F, torch.eye(d).double()], 1)
            noise = R @ second[..., k] @ R.T
            total -= 0.5 * float(torch.linalg.solve(Q, noise).trace() + torch.logdet(Q))
        return total

    for i, slope in enumerate(gradient):
        change = torch.zeros_like(gradient)
        change[i] = step
        ends = [expected_log_prior(layer.theta.detach() + s * change) for s in (1, -1)]
        assert -float(slope) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-6)


def test_one_natural_step_fits_gaussian_noise(data, fitted):
    layer, (x, y) = layer_of(), data
    loss = layer.kl() - Gaussian(0.1).expected_log_prob(y, *layer.marginals(x)).sum()
    loss.backward()
    layer.natural_step(1.0)
    torch.testing.assert_close(
        layer.sites.linear, fitted.posterior.sites.linear, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        layer.sites.precision, fitted.posterior.sites.precision, rtol=1e-9, atol=1e-9
    )
    layer.refresh()
    bound = Gaussian(0.1).expected_log_prob(y, *layer.marginals(x)).sum() - layer.kl()
    assert bound.item() == pytest.approx(fitted.elbo, abs=1e-8)


def test_samples_have_the_moments_of_the_marginals(data, fitted, generator):
    layer, x = layer_of(fitted.posterior.sites), data[0]
    with torch.no_grad():
        draws = layer.sample(x.expand(2000, -1), generator)
        mean, var = layer.marginals(x)
    assert float(((draws.mean(0) - mean) / (var / 2000).sqrt()).abs().max()) < 4
    assert float((draws.var(0) / var - 1).abs().max()) < 4 * (2 / 2000) ** 0.5


def test_a_step_that_leaves_no_valid_posterior_is_shortened(data):
    layer = layer_of()
    for moment in layer._moments:
        moment.grad = torch.zeros_like(moment)
    layer._moments[1].grad -= 5 * torch.eye(6, dtype=torch.float64)[..., None]
    layer.natural_step(1.0)
    layer.refresh()
    assert layer._pairs.is_proper


def test_sites_without_valid_ones_to_go_back_to_lose_their_negative_precisions(fitted):
    sites = fitted.posterior.sites
    negative = sites.precision.clone()
    negative[0, 0, 1] -= 1e4
    layer = layer_of(PairSites(sites.linear, negative))
    assert layer._pairs.is_proper
    eigenvalues = torch.linalg.eigvalsh(layer.sites.precision.movedim(-1, 0))
    assert float(eigenvalues.min()) > -1e-9 * float(eigenvalues.max())
    kept = [0, 2, 3]
    torch.testing.assert_close(layer.sites.precision[..., kept], sites.precision[..., kept])
    with pytest.raises(NotPositiveDefiniteError, match="Lower the rate"):
        layer_of(PairSites(sites.linear, negative * float("nan")))


def test_a_composition_learns_a_warp(rng, generator):
    """Two series of one wave, the second in squared time: a warp and the wave are learned."""
    x = torch.tensor(np.sort(rng.uniform(0, 1, 40)))
    noise = 0.05 * torch.tensor(rng.normal(size=(2, 40)))
    y = torch.stack([(8 * x).sin(), (8 * x**2).sin()]) + noise
    grid = torch.linspace(-0.05, 1.05, 10, dtype=torch.float64)
    warp = StateSpaceLayer(0.05 * Matern(2.0, nu=1.5), grid, slope=1.0)
    wave = StateSpaceLayer(1.0 * Matern(0.4, nu=1.5), torch.linspace(-0.1, 1.1, 25).double())
    likelihood = Gaussian(0.05**2 * 4)

    def expected_log_prob():
        inputs = torch.stack([x.expand(2, -1), warp.sample(x.expand(2, -1), generator)], 1)
        return likelihood.expected_log_prob(y.expand(2, -1, -1), *wave.marginals(inputs)).sum() / 2

    history = fit_layers([wave, warp], expected_log_prob, n_iter=60, rate=0.2, learning_rate=0.0)
    with torch.no_grad():
        learned = warp.marginals(x)[0]
        warped = wave.marginals(learned)[0]
    assert np.mean(history[-10:]) < 0.1 * history[0]
    assert float((warped - y[1]).square().mean()) < 0.05
    assert float((learned - x**2).abs().mean()) < 0.5 * float((x - x**2).abs().mean())
