"""Noise that depends on x: the posterior of its logarithm, and when errors tell of it."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import t as student_t
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import Data
from skgp.learning import defaults
from skgp.learning.defaults import NOISE_LEVEL
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.noise_function import Errors, learn_noise_function
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


def log_probabilities(errors, g):
    """Of each error, by SciPy's formulas of a normal distribution, up to a constant."""
    var = errors.variance.numpy() + errors.noise.numpy() * np.exp(g)
    return -0.5 * np.log(var) - 0.5 * errors.error.numpy() ** 2 / var


@pytest.fixture(scope="module")
def posterior():
    """Of 40 errors with unlike variances, and its matrix K."""
    rng = np.random.default_rng(1)
    X = torch.from_numpy(rng.uniform(size=(40, 2)))
    variance, noise = rng.uniform(0.01, 0.2, 40), rng.uniform(0.1, 0.5, 40)
    g = 2 * np.sin(5 * X[:, 0].numpy())
    error = np.sqrt(variance + noise * np.exp(g)) * rng.standard_normal(40)
    errors = Errors(*map(torch.from_numpy, (error, variance, noise)), constant=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "NOISE_STRETCHES", (2.0,))
        patch.setattr(defaults, "NOISE_AMPLITUDES", (1.5,))
        found = errors.likeliest(RBF([0.3, 0.6]), Data(X, errors.error))
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
    share = errors.noise.numpy() * np.exp(g)
    share /= share + errors.variance.numpy()
    W = 0.5 * share**2
    expected = log_probabilities(errors, g).sum() - 0.5 * g @ found.alpha.numpy()
    expected -= 0.5 * np.linalg.slogdet(np.eye(40) + K * W)[1]
    assert found.evidence == pytest.approx(expected, abs=1e-8)

    X_new = np.random.default_rng(2).uniform(-1, 2, size=(7, 2))
    K_new = 1.5 * RBF([0.6, 1.2])(X_new, X) + NOISE_LEVEL
    var = 1.5 + NOISE_LEVEL - np.sum(K_new.T * np.linalg.solve(K + np.diag(1 / W), K_new.T), axis=0)
    expected = K_new @ found.alpha.numpy() + 0.5 * var
    function, X_new = found.function, torch.from_numpy(X_new)
    np.testing.assert_allclose(function(X_new, 0.1), expected, rtol=1e-8)
    # Of less noise it is the same in proportion; of more, what is more is constant.
    np.testing.assert_allclose(function(X_new, 0.02), expected, rtol=1e-8)
    more = np.log((0.1 * np.exp(expected) + 0.3) / 0.4)
    np.testing.assert_allclose(function(X_new, 0.4), more, rtol=1e-8)


def test_errors_left_out_are_judged_without_their_sites(posterior):
    errors, found, K, _ = posterior
    g = K @ found.alpha.numpy()
    share = errors.noise.numpy() * np.exp(g)
    share /= share + errors.variance.numpy()
    W = 0.5 * share**2
    pseudo = g + found.alpha.numpy() / W  # observations of noise 1 / W with the same posterior
    for i in (0, 13, 39):
        others = np.delete(np.arange(40), i)
        A = K[np.ix_(others, others)] + np.diag(1 / W[others])
        mean = K[i, others] @ np.linalg.solve(A, pseudo[others])
        var = K[i, i] - K[i, others] @ np.linalg.solve(A, K[i, others])
        assert found.left_out()[i] == pytest.approx(mean + 0.5 * var, abs=1e-8)


def test_slopes_of_the_log_probability():
    errors = Errors(
        torch.tensor([0.3, -2.0]).double(), torch.tensor([0.1, 0.4]), torch.ones(2), 1.0
    )
    g = torch.tensor([-0.5, 1.0], dtype=torch.float64, requires_grad=True)
    value, slope, second = errors.log_prob_and_derivatives(errors.error, g)
    assert_same(value.detach(), log_probabilities(errors, g.detach().numpy()))
    expected = torch.autograd.grad(value.sum(), g)[0]
    torch.testing.assert_close(slope.detach(), expected)
    curvature = torch.autograd.grad(errors.log_prob_and_derivatives(errors.error, g)[1].sum(), g)[0]
    torch.testing.assert_close(second.detach(), curvature)
    # What is expected of it is minus the variance of the slope.
    total = errors.variance + g.detach().exp()
    draws = total.sqrt() * torch.from_numpy(np.random.default_rng(0).standard_normal((200_000, 2)))
    slopes = errors.log_prob_and_derivatives(draws, g.detach())[1]
    torch.testing.assert_close(
        errors.share(g.detach()).square() / 2, slopes.var(0), rtol=0.02, atol=0
    )


def test_errors_of_many_are_predicted_by_the_nearest(monkeypatch):
    """By all others of few weighted observations, and by five of many."""
    kernel, data = RBF(0.3) + WhiteKernel(0.1), problem(60)
    data = Data(data.X, data.y, torch.from_numpy(np.random.default_rng(3).uniform(0.5, 4, 60)))
    X, y, noise = data.X.numpy(), data.y.numpy(), 0.1 / data.weight.numpy()
    rows = torch.tensor([3, 40, 17])
    for most, near in ((100, 59), (20, 59), (20, 5)):
        monkeypatch.setattr(defaults, "NOISE_ROWS", (most, most))
        monkeypatch.setattr(defaults, "NOISE_NEIGHBORS", near)
        asked = torch.arange(60) if most == 100 else rows
        found = Errors.of(kernel, data, asked)
        for i in rows.tolist():
            others = np.argsort(np.abs(X[:, 0] - X[i, 0]))[1 : near + 1]
            k = RBF(0.3)(X[[i]], X[others])[0]
            a = np.linalg.solve(RBF(0.3)(X[others]) + np.diag(noise[others]), k)
            at = int((asked == i).nonzero())
            assert found.error[at] == pytest.approx(y[i] - a @ y[others], abs=1e-8)
            assert found.variance[at] == pytest.approx(1 - a @ k, abs=1e-8)
            assert found.noise[at] == pytest.approx(noise[i])


def test_robust_losses_are_of_students_t(posterior):
    errors, _, K, _ = posterior
    df, factor = map(float, errors._tails)

    def loss(df, factor, g):
        scale = factor * np.sqrt(errors.variance.numpy() + errors.noise.numpy() * np.exp(g))
        return -student_t.logpdf(errors.error.numpy(), df, scale=scale)

    g = np.linspace(-1, 1, 40)
    np.testing.assert_allclose(errors.robust_losses(torch.from_numpy(g)), loss(df, factor, g))
    grid = [(a, b) for a in (2, 3, 5, 10, 30, 1000) for b in (0.25, 0.5, 1.0)]
    assert loss(df, factor, 0 * g).sum() <= min(loss(*at, 0 * g).sum() for at in grid) + 0.05


def test_noise_that_grows_is_found():
    function = learned(problem(150), choose=True)
    x = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    low, high = function(x, function.constant).tolist()
    assert 8 * 0.8 == pytest.approx(high - low, abs=2.0)  # of log variances


def test_noise_of_many_rows():
    """Learned from the errors of some, and judged by those of others."""
    kernel = RBF(0.3) + WhiteKernel(0.02)
    x = torch.tensor([[0.1], [0.9]], dtype=torch.float64)
    function = learn_noise_function(kernel, problem(1500), KERNEL)
    low, high = function(x, function.constant).tolist()
    assert len(function.X) == 500 and 8 * 0.8 == pytest.approx(high - low, abs=1.0)
    kernel = RBF(0.3) + WhiteKernel(0.02**2)
    assert learn_noise_function(kernel, problem(1500, slope=0.0), KERNEL) is None


@pytest.mark.parametrize("seed", range(4))
def test_constant_noise_is_left_constant(seed):
    assert learned(problem(150, seed, slope=0.0), choose=True) is None


@pytest.mark.parametrize("seed", [5, 19])
def test_neighbouring_gross_errors_are_no_noise_that_varies(seed):
    """As normal ones, the errors would be likelier by 5.5 and 4.5 standard errors."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(size=(120, 1)), axis=0)
    noise = 0.1 * rng.standard_normal(120) * np.where(rng.uniform(size=120) < 0.04, 12, 1)
    data = Data(torch.from_numpy(X), torch.from_numpy(np.sin(6 * X[:, 0]) + noise))
    assert learned(data, choose=True) is None


def test_normal_errors_must_be_likelier_too():
    """As of Student's t these are so by four standard errors, as normal ones by none."""
    kernel, data = Matern(0.02, nu=0.5) + WhiteKernel(0.01), problem(200, seed=1, slope=3.0)
    own = Errors.of(kernel, data, torch.arange(200))
    assert not own.likeliest(kernel, data).is_likelier(own, data)


def test_rows_count_by_their_weights():
    data = problem(150)
    kernel = maximise_evidence(KERNEL, data, max_iter=30)[0].kernel
    own = Errors.of(kernel, data, torch.arange(150))
    found = own.likeliest(kernel, data)
    worse = own.losses(found.left_out()) > own.losses(torch.zeros(150).double())
    assert found.is_likelier(own, data)
    assert not found.is_likelier(own, Data(data.X, data.y, 1e-3 + worse.double()))


def test_errors_that_nothing_was_learned_from_are_judged_too(monkeypatch):
    """Of two thirds of the rows noise falls where it grows in the third that g is learned from."""
    monkeypatch.setattr(defaults, "NOISE_ROWS", (100, 100))
    data, kernel = problem(300), RBF(0.3) + WhiteKernel(0.05)
    others = torch.randperm(300, generator=torch.Generator().manual_seed(0))[100:]
    x = data.X[others, 0]
    noise = 0.02 * (4 - 4 * x).exp() * torch.from_numpy(np.random.default_rng(1).normal(size=200))
    data.y[others] = (6 * x).sin() + noise
    assert learn_noise_function(kernel, data, KERNEL) is None


def test_errors_of_a_smoother_process_tell_where_a_rough_one_explains_noise():
    kernel, data = Matern(0.02, nu=0.5) + WhiteKernel(0.01), problem(100, seed=3)
    own = Errors.of(kernel, data, torch.arange(100))
    assert not own.likeliest(kernel, data).is_likelier(own, data)
    function = learn_noise_function(kernel, data, KERNEL)
    low, high = function(torch.tensor([[0.1], [0.9]]).double(), function.constant).tolist()
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
    np.testing.assert_allclose(function(x, noise), expected, atol=0.9)
