"""Noise that depends on x: the posterior of its logarithm, and when errors tell of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import Data
from skgp.learning import defaults
from skgp.learning.defaults import NOISE_LEVEL
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.noise_function import (
    Errors,
    Judged,
    PosteriorOfLogs,
    PriorOfLogs,
    Split,
    component_weights,
    learn_noise_function,
)
from tests.reference.gaussian import left_out
from tests.same import assert_same

KERNEL = RBF(0.3) + WhiteKernel(0.1)


def problem(n=60, seed=0, *, slope=4.0):
    """Rows (n, 1) in [0, 1], and y of which noise has the standard deviation .02 e^(slope x)."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(size=(n, 1)), axis=0)
    noise = 0.02 * np.exp(slope * X[:, 0]) * rng.standard_normal(n)
    return Data(torch.from_numpy(X), torch.from_numpy(np.sin(6 * X[:, 0]) + noise))


def learned(data, *, choose):
    """By the process of constant noise that is likeliest."""
    found, _ = maximise_evidence(KERNEL, data, max_iter=30)
    return learn_noise_function(found.kernel, data, KERNEL if choose else None)


def parts(errors, g):
    """Variances of errors, of f and of noise."""
    of_f = errors.variance.numpy() * np.exp(errors.exponent * g)
    return of_f, errors.noise.numpy() * np.exp(g)


def log_probabilities(errors, g):
    """Of each error, by SciPy's formulas of a normal distribution, up to a constant."""
    var = sum(parts(errors, g))
    return -0.5 * np.log(var) - 0.5 * errors.error.numpy() ** 2 / var


def curvature(errors, g):
    """Expected, (n,): half the square of the slope of the logarithm of the variance."""
    of_f, noise = parts(errors, g)
    return 0.5 * ((errors.exponent * of_f + noise) / (of_f + noise)) ** 2


@pytest.fixture(scope="module", params=[0.0, 0.5, 1.0])
def posterior(request):
    """Of 40 errors with unlike variances, and its matrix K."""
    rng = np.random.default_rng(1)
    X = torch.from_numpy(rng.uniform(size=(40, 2)))
    variance, noise = rng.uniform(0.01, 0.2, 40), rng.uniform(0.1, 0.5, 40)
    g = 2 * np.sin(5 * X[:, 0].numpy())
    scale = np.sqrt(variance * np.exp(request.param * g) + noise * np.exp(g))
    tensors = map(torch.from_numpy, (scale * rng.standard_normal(40), variance, noise))
    errors = Errors(*tensors, constant=0.1, exponent=request.param)
    (found,) = PosteriorOfLogs.of(errors, PriorOfLogs(RBF([0.3, 0.6]), X), [(2.0, 1.5)])
    K = 1.5 * RBF([0.6, 1.2])(X.numpy()) + NOISE_LEVEL
    return errors, found, K, X.numpy()


def test_the_mode_is_that_of_the_joint_density(posterior):
    errors, found, K, _ = posterior
    root = np.linalg.cholesky(K + 1e-10 * np.eye(40))

    def loss(u):  # g = root u
        return 0.5 * u @ u - log_probabilities(errors, root @ u).sum()

    best = minimize(loss, np.zeros(40), method="BFGS", options={"gtol": 1e-6}).x
    np.testing.assert_allclose(K @ found.alpha.numpy(), root @ best, atol=1e-4)


def test_evidence_and_predictions_are_those_of_dense_formulas(posterior):
    errors, found, K, X = posterior
    g = K @ found.alpha.numpy()
    W = curvature(errors, g)
    expected = log_probabilities(errors, g).sum() - 0.5 * g @ found.alpha.numpy()
    expected -= 0.5 * np.linalg.slogdet(np.eye(40) + K * W)[1]
    assert found.evidence == pytest.approx(expected, abs=1e-8)

    X_new = np.random.default_rng(2).uniform(-1, 2, size=(7, 2))
    K_new = 1.5 * RBF([0.6, 1.2])(X_new, X) + NOISE_LEVEL
    var = 1.5 + NOISE_LEVEL - np.sum(K_new.T * np.linalg.solve(K + np.diag(1 / W), K_new.T), axis=0)
    mean = K_new @ found.alpha.numpy()
    function, X_new = found.function(reach=0.2), torch.from_numpy(X_new)
    np.testing.assert_allclose(function.moments(X_new), (mean, var), rtol=1e-8)
    # E[e^g], of a part of a greater noise, and of f E[e^(power g)].
    expected = np.exp(mean + 0.5 * var)
    g = torch.from_numpy(mean + 0.5 * var)
    for level, factor in ((0.1, expected), (0.02, expected), (0.4, (0.1 * expected + 0.3) / 0.4)):
        np.testing.assert_allclose(function.of_noise(g, level), factor, rtol=1e-8)
    of_f = np.linspace(0.05, 0.6, 7)
    power = errors.exponent * np.minimum(1, 0.2 / of_f)
    moments = map(torch.from_numpy, (of_f, mean, var))
    varied = of_f * np.exp(power * mean + 0.5 * power**2 * var)
    np.testing.assert_allclose(function.of_f(*moments), varied, rtol=1e-8)
    # The same of g, and of the values that stand for it.
    joint, covariance = function.joint_moments(X_new)
    np.testing.assert_allclose(joint, mean, rtol=1e-8)
    prior = 1.5 * RBF([0.6, 1.2])(X_new.numpy()) + NOISE_LEVEL
    known = K_new @ np.linalg.solve(K + np.diag(1 / W), K_new.T)
    np.testing.assert_allclose(covariance, prior - known, atol=1e-8)
    factors = function.components(X_new, torch.from_numpy(of_f), 0.4)
    for values, each in zip(factors, (varied / of_f, (0.1 * expected + 0.3) / 0.4), strict=True):
        np.testing.assert_allclose(component_weights() @ values.numpy(), each, rtol=1e-6)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_slopes_of_the_log_probability(exponent):
    error, variance = torch.tensor([[0.3, -2.0], [0.1, 0.4]]).double()
    errors = Errors(error, variance, torch.ones(2), 1.0, exponent)
    g = torch.tensor([-0.5, 1.0], dtype=torch.float64, requires_grad=True)
    value, slope, second = errors.log_prob_and_derivatives(errors.error, g)
    assert_same(value.detach(), log_probabilities(errors, g.detach().numpy()))
    expected = torch.autograd.grad(value.sum(), g)[0]
    torch.testing.assert_close(slope.detach(), expected)
    curvature = torch.autograd.grad(errors.log_prob_and_derivatives(errors.error, g)[1].sum(), g)[0]
    torch.testing.assert_close(second.detach(), curvature)
    # What is expected of it is minus the variance of the slope.
    total = torch.from_numpy(sum(parts(errors, g.detach().numpy())))
    draws = total.sqrt() * torch.from_numpy(np.random.default_rng(0).standard_normal((200_000, 2)))
    slopes = errors.log_prob_and_derivatives(draws, g.detach())[1]
    torch.testing.assert_close(
        errors.share(g.detach()).square() / 2, slopes.var(0), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("held_out", [False, True])
def test_errors_of_many_are_predicted_by_the_nearest(monkeypatch, held_out):
    """By all others of few weighted observations, and by five of many; or all but all asked for."""
    kernel, data = RBF(0.3) + WhiteKernel(0.1), problem(60)
    data = Data(data.X, data.y, torch.from_numpy(np.random.default_rng(3).uniform(0.5, 4, 60)))
    X, y, noise = data.X.numpy(), data.y.numpy(), 0.1 / data.weight.numpy()
    rows = torch.tensor([3, 40, 17])
    for most, near in ((100, 59), (20, 50), (20, 5)):
        monkeypatch.setattr(defaults, "NOISE_ROWS", (most, most))
        monkeypatch.setattr(defaults, "NOISE_NEIGHBORS", near)
        known = np.delete(np.arange(60), rows) if held_out else np.arange(60)
        found = Errors.of(kernel, data, rows, torch.from_numpy(known))
        for i in rows.tolist():
            others = known[known != i]
            others = others[np.argsort(np.abs(X[others, 0] - X[i, 0]))[:near]]
            mean, var = left_out(RBF(0.3)(X), noise, y, i, others)
            at = int((rows == i).nonzero())
            assert found.error[at] == pytest.approx(y[i] - mean, abs=1e-8)
            assert found.variance[at] == pytest.approx(var, abs=1e-8)
            assert found.noise[at] == pytest.approx(noise[i])


def test_noise_that_grows_is_found():
    function = learned(problem(150), choose=True)
    x = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    low, high = function.moments(x)[0].tolist()
    assert 8 * 0.8 == pytest.approx(high - low, abs=2.0)  # of log variances


def test_noise_of_many_rows(monkeypatch):
    """Learned from the errors of some, and judged by those of others."""
    monkeypatch.setattr(defaults, "NOISE_ROWS", (250, 250))
    kernel = RBF(0.3) + WhiteKernel(0.02)
    x = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    function = learn_noise_function(kernel, problem(500), KERNEL)
    low, high = function.moments(x)[0].tolist()
    assert len(function.X) == 250 and 8 * 0.8 == pytest.approx(high - low, abs=1.0)
    kernel = RBF(0.3) + WhiteKernel(0.02**2)
    assert learn_noise_function(kernel, problem(500, slope=0.0), KERNEL) is None


@pytest.mark.parametrize("seed", range(4))
def test_constant_noise_is_left_constant(seed):
    assert learned(problem(150, seed, slope=0.0), choose=True) is None


def judged(error, log_scale, *, spread=0.0, weight=None):
    """Errors (n,) of noise 1 and no f, and g of a mean and a spread."""
    ones = torch.ones(len(error)).double()
    return Judged(error, 0 * ones, ones, 2 * log_scale, spread * ones, ones, weight)


def test_losses_must_fall_clearly_and_count_by_weight():
    rng = np.random.default_rng(0)
    error = torch.from_numpy(rng.standard_normal(200))
    scale = torch.where(torch.arange(200) % 2 == 0, 0.1, 1.0).double()
    logs = scale.log()
    assert judged(scale * error, logs).are_likelier()
    assert judged(scale * error, logs, weight=torch.ones(200)).are_likelier()
    assert not judged(error, logs).are_likelier()
    # One that is nearly impossible now outweighs all others, unless it counts for nothing.
    error[0] = 100.0
    assert not judged(scale * error, logs).are_likelier()
    assert judged(scale * error, logs, weight=torch.arange(200).double()).are_likelier()
    # It may be of one of a mixture.
    assert judged(scale * error, logs, spread=4.0).are_likelier()


def test_shift_and_scatter_are_those_that_errors_held_out_tell_of():
    rng = np.random.default_rng(0)
    normal = torch.from_numpy(rng.standard_normal(2000))
    logs = torch.from_numpy(rng.standard_normal(2000))
    function = learned(problem(150), choose=False)
    function = replace(function, scatter=0.0, shift=0.0)
    clean = judged(logs.exp() * normal, logs).scattered(function)
    assert (clean.scatter, clean.shift) == (0, 0)
    scattered = normal * torch.from_numpy(0.5 * rng.standard_normal(2000)).exp()
    found = judged(logs.exp() * scattered, logs).scattered(function)
    assert (found.scatter, found.shift) == (1, 0)
    found = judged((logs - 0.25).exp() * normal, logs).scattered(function)
    assert found.shift + found.scatter / 2 >= 0  # the mean variance does not fall
    found = judged((logs + 0.125).exp() * normal, logs).scattered(function)
    assert (found.scatter, found.shift) == (0, 0.25)
    x = torch.linspace(0, 1, 5).double()[:, None]
    mean, spread = function.moments(x)
    torch.testing.assert_close(found.moments(x), (mean + 0.25, spread))
    joint = found.joint_moments(x)
    torch.testing.assert_close((joint[0], joint[1].diagonal()), (mean + 0.25, spread))


def test_errors_of_single_observations_that_scatter_are_found():
    """Noise of Student's t, whose size also depends on x."""
    data = problem(400)
    x, rng = data.X[:, 0], np.random.default_rng(2)
    noise = torch.from_numpy(rng.standard_t(2.5, 400))
    data.y.copy_((6 * x).sin() + 0.02 * (4 * x).exp() * noise)
    assert learned(data, choose=True).scatter > 0
    assert learned(problem(400), choose=True).scatter == 0


def test_what_is_held_out_tells_nothing_of_the_variances_by_which_it_is_judged():
    data = problem(150)
    kernel = maximise_evidence(KERNEL, data, max_iter=30)[0].kernel
    split = Split(data)
    found = split.posterior(kernel)
    assert sorted(torch.cat(split.folds).tolist()) == list(range(150))
    split.folds = split.folds[1:2]
    before = split.judged(kernel, kernel, found)
    data.y[split.folds[0]] += 1.0
    after = split.judged(kernel, kernel, found)
    torch.testing.assert_close(after.error, before.error + 1.0)
    for name in ("variance", "noise", "mean", "spread", "power"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name))


def test_of_many_those_that_g_is_not_learned_from_judge(monkeypatch):
    """Of two thirds of the rows noise falls where it grows in the third that g is learned from."""
    monkeypatch.setattr(defaults, "NOISE_ROWS", (100, 100))
    monkeypatch.setattr(defaults, "NOISE_FOLDED", 200)
    data, kernel = problem(300), RBF(0.3) + WhiteKernel(0.05)
    split = Split(data)
    (held,) = split.folds
    assert sorted([*split.rows.tolist(), *held.tolist()]) == list(range(300))
    assert learn_noise_function(kernel, data, KERNEL) is not None
    others = torch.randperm(300, generator=torch.Generator().manual_seed(0))[100:]
    x = data.X[others, 0]
    noise = 0.02 * (4 - 4 * x).exp() * torch.from_numpy(np.random.default_rng(1).normal(size=200))
    data.y[others] = (6 * x).sin() + noise
    assert learn_noise_function(kernel, data, KERNEL) is None


def test_an_amplitude_that_varies_is_found():
    """f of which the left half is flat: variances of f are as much smaller there."""
    rng = np.random.default_rng(0)
    X = torch.from_numpy(np.sort(rng.uniform(size=(200, 1)), axis=0))
    rough = RBF(0.02)(X.numpy()) + 1e-6 * np.eye(200)
    f = np.linalg.cholesky(rough) @ rng.standard_normal(200) * np.where(X[:, 0] < 0.5, 0.01, 1)
    data = Data(X, torch.from_numpy(f))
    kernel = maximise_evidence(RBF(0.05) + WhiteKernel(1e-4), data, max_iter=30)[0].kernel
    function = learn_noise_function(kernel, data, KERNEL)
    assert function.exponent == 1
    low, high = function.moments(torch.tensor([[0.25], [0.75]]).double())[0].tolist()
    assert high - low > 4  # 9.2 of the truth, towards 0 by the prior


def test_errors_of_a_smoother_process_tell_where_a_rough_one_explains_noise():
    kernel, data = Matern(0.02, nu=0.5) + WhiteKernel(0.01), problem(100, seed=3)
    split = Split(data)
    assert not split.judged(kernel, kernel, split.posterior(kernel)).are_likelier()
    function = learn_noise_function(kernel, data, KERNEL)
    x = torch.tensor([[0.1], [0.9]]).double()
    low, high = function.moments(x)[0].tolist()
    assert 8 * 0.8 == pytest.approx(high - low, abs=2.0)


def test_a_weight_of_two_has_half_the_noise():
    """Of rows of unlike weights: what is constant is the noise of weight 1."""
    data = problem(200, slope=0.0)
    weight = torch.where(data.X[:, 0] > 0.5, 16.0, 1.0).double()
    noisy = (
        data.y + 0.5 * torch.randn(200, generator=torch.Generator().manual_seed(0)) / weight**0.5
    )
    assert learned(Data(data.X, noisy, weight), choose=True) is None
    assert learned(Data(data.X, noisy), choose=True) is not None


def test_errors_are_those_of_a_process_of_constant_noise():
    """The function multiplies that noise: times it, the level of log noise is absolute."""
    data = problem(300, slope=2.0)
    function = learned(data, choose=False)
    noise = function.constant
    x = torch.linspace(0.05, 0.95, 10).double()[:, None]
    expected = np.log(0.02**2 / noise) + 4 * x[:, 0].numpy()
    np.testing.assert_allclose(function.moments(x)[0], expected, atol=0.9)
