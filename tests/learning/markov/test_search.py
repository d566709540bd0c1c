"""The search of hyper-parameters: optima against scikit-learn's dense GP, bounds, the choice."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.inference.markov.series import make_series
from skgp.learning.markov import choice
from skgp.learning.markov.choice import choose_kernel
from skgp.learning.markov.defaults import NOISE_LOG_SD, PRIOR_LOG_SD, SCALES
from skgp.learning.markov.objectives import (
    Evaluation,
    GaussianEvidence,
    SharedEvidence,
    VariationalEvidence,
)
from skgp.learning.markov.search import Climb, Component, maximise
from skgp.likelihoods import Bernoulli, Gaussian, StudentT
from tests.covering import slow

NOISE = Gaussian(0.1, bounds=(1e-6, 10.0))


def matern(nu, length_scale=1.0, variance=1.0, bounds=(1e-3, 1e3)):
    return ConstantKernel(variance, (1e-3, 1e3)) * Matern(length_scale, bounds, nu=nu)


def draw(kernel, x, noise, seed=0):
    """A sample of a GP at times (n,), with noise of a standard deviation."""
    rng = np.random.default_rng(seed)
    K = kernel(x[:, None]) + 1e-10 * np.eye(len(x))
    y = np.linalg.cholesky(K) @ rng.standard_normal(len(x))
    return torch.from_numpy(y + noise * rng.standard_normal(len(x)))


@pytest.fixture(scope="module")
def data():
    x = np.sort(np.random.default_rng(1).uniform(0, 20, 80))
    return torch.from_numpy(x), draw(matern(1.5), x, 0.3)


def test_optimum_is_that_of_the_dense_gp(data):
    x, y = data
    found = maximise([matern(1.5, 3.0)], GaussianEvidence(make_series(x, y)), NOISE, tol=1e-12)
    dense = GaussianProcessRegressor(matern(1.5, 3.0) + WhiteKernel(0.1)).fit(x[:, None], y)
    assert found.value == pytest.approx(dense.log_marginal_likelihood_value_, abs=1e-5)
    theta = np.append(found.kernel.theta, found.parameters)
    np.testing.assert_allclose(theta, dense.kernel_.theta, atol=2e-3)
    assert found.n_iter == len(found.history) >= 5
    assert (np.diff(found.history) > -1e-9).all()
    assert found.history[-1] * 80 == pytest.approx(found.value)


def test_bounds_and_fixed_values_are_kept(data):
    x, y = data
    kernel = ConstantKernel(2.0, "fixed") * Matern(0.2, (0.1, 0.3), nu=0.5)
    found = maximise(
        [kernel], GaussianEvidence(make_series(x, y)), Gaussian(0.3, bounds=(0.3, 0.3))
    )
    assert found.kernel.k1.constant_value == 2.0
    assert found.kernel.k2.length_scale == pytest.approx(0.3, rel=1e-12)
    assert found.parameters.exp().item() == pytest.approx(0.3, rel=1e-12)


def test_nothing_to_learn_is_evaluated_only(data):
    x, y = data
    objective = GaussianEvidence(make_series(x, y))
    kept = ConstantKernel(1.0, "fixed") * Matern(1.0, "fixed", nu=1.5)
    for kernel, max_iter in ((matern(1.5), 0), (kept, 100)):
        found = maximise(
            [kernel], objective, NOISE, max_iter=max_iter, parameters=torch.tensor([-2.0]).double()
        )
        assert found.kernel is kernel or found.kernel == kernel
        if max_iter == 0:
            assert found.n_iter == 0 and found.history == []
            assert found.parameters.tolist() == [-2.0]


def test_parameters_of_the_likelihood_are_learned_too():
    x = np.linspace(0, 30, 200)
    y = draw(matern(1.5, 2.0), x, 0.1)
    y[::10] += torch.from_numpy(3 * np.random.default_rng(0).standard_normal(20))
    family = StudentT(0.1**0.5, 4.0, scale_bounds=(0.001, 3.2), df_bounds=(2.1, 200.0))
    series = make_series(torch.from_numpy(x), y)
    found = maximise([matern(1.5)], VariationalEvidence(series, family), family, max_iter=30)
    scale, df = (0.5 * found.parameters[0]).exp().item(), found.parameters[1].exp().item()
    assert scale == pytest.approx(0.1, rel=0.5) and df < 4
    assert found.kernel.k2.length_scale == pytest.approx(2.0, rel=0.6)


def test_processes_share_what_is_learned():
    """The gradient of a sum: its optimum is a compromise, better for both than either's own."""
    x = torch.linspace(0, 20, 60, dtype=torch.float64)
    series = [make_series(x, draw(matern(1.5, scale), x.numpy(), 0.2)) for scale in (0.5, 4.0)]
    alone = [maximise([matern(1.5)], GaussianEvidence(each), NOISE) for each in series]
    shared = SharedEvidence([GaussianEvidence(each) for each in series])
    both = maximise([matern(1.5)], shared, NOISE)
    scales = [each.kernel.k2.length_scale for each in (alone[0], both, alone[1])]
    assert scales[0] < scales[1] < scales[2]
    for each in alone:
        value = maximise([each.kernel], shared, NOISE, parameters=each.parameters, max_iter=0)
        assert both.value > value.value


@pytest.mark.parametrize(("nu", "scale"), [(0.5, 0.3), (2.5, 3.0)])
def test_choice_finds_smoothness_and_length_scale(nu, scale):
    x = np.linspace(0, 20, 400)
    series = make_series(torch.from_numpy(x), draw(matern(nu, scale), x, 0.05, seed=3))
    kernels = [matern(each, 20.0) for each in (1.5, 2.5, 0.5)]
    heard = []
    found = choose_kernel(
        kernels,
        lambda processes: GaussianEvidence(processes[0]),
        [series],
        NOISE,
        lambda number, info: heard.append(number),
    )
    assert found.kernel.k2.nu == nu
    assert found.kernel.k2.length_scale == pytest.approx(scale, rel=0.6)
    assert heard == ([0, 1] if nu == 2.5 else [0, 1, 2])  # none rougher where 5/2 is better by nats


def test_choice_takes_the_simpler_kernel_where_evidence_is_equal(data):
    x, y = data
    kernels = [matern(1.5), matern(1.5) + matern(1.5, 30.0, 0.01)]
    found = choose_kernel(kernels, lambda p: GaussianEvidence(p[0]), [make_series(x, y)], NOISE)
    assert len(found.kernel.theta) == 2


@pytest.mark.parametrize("scale", slow([0.05, 30.0], but=[0.05]))
def test_length_scale_is_found_from_parts_of_many_rows(scale):
    """Quick motion shows in stretches, slow motion in rows spread over all."""
    x = np.linspace(0, 100, 8000)
    rng = np.random.default_rng(0)
    waves = rng.standard_normal(60) / np.sqrt(30)
    rates, phases = rng.standard_t(3, 60) / scale, rng.uniform(0, 6.3, 60)
    y = np.cos(x[:, None] * rates + phases) @ waves + 0.1 * rng.standard_normal(8000)
    series = make_series(torch.from_numpy(x), torch.from_numpy(y))
    kernels = [matern(nu, 2.0, bounds=(1e-4, 1e4)) for nu in (1.5, 2.5)]
    found = choose_kernel(kernels, lambda p: GaussianEvidence(p[0]), [series], NOISE)
    assert found.kernel.k2.length_scale == pytest.approx(scale, rel=0.8)
    assert found.parameters.exp().item() == pytest.approx(0.01, rel=0.6)


def test_labels_have_an_evidence_too():
    x = np.linspace(0, 20, 60)
    y = torch.where(draw(matern(1.5, 2.0, 4.0), x, 0.0, seed=1) > 0, 1.0, -1.0).double()
    family = Bernoulli()
    objective = VariationalEvidence(make_series(torch.from_numpy(x), y), family)
    found = maximise([matern(1.5, 0.1)], objective, family, max_iter=12)
    start = maximise([matern(1.5, 0.1)], objective, family, max_iter=0)
    assert found.value > start.value + 2
    assert 0.5 < found.kernel.k2.length_scale < 8


# What is chosen, apart from the climbs -----------------------------------------------------------


class Prize:
    """An evidence that depends on nothing but the number of components."""

    total = 100.0

    def __init__(self, prize):
        self.prize = prize

    def __call__(self, dynamics, parameters, knots=None, *, tol):
        value = self.prize * (len(dynamics[0].blocks) - 1)
        flat = torch.zeros(dynamics[0].n_parameters, dtype=torch.float64)
        return Evaluation(value, None, torch.zeros_like(parameters), lambda: [flat])


@pytest.mark.parametrize(
    ("prize", "family", "n_theta"),
    [(1.9, NOISE, 2), (2.1, NOISE, 4), (9.0, NOISE, 4), (9.0, Bernoulli(), 2)],
)
def test_a_hyperparameter_must_be_worth_a_nat(data, prize, family, n_theta):
    """Akaike's criterion: the sum has two hyper-parameters more. 160 labels count as 40 numbers.

    A logit has a curvature of 1/4 at most.
    """
    kernels = [matern(1.5), matern(1.5) + matern(1.5, 30.0)]
    series = make_series(data[0].repeat(2) + torch.arange(160), data[1].repeat(2).sign())
    found = choose_kernel(kernels, lambda processes: Prize(prize), [series], family)
    assert len(found.kernel.theta) == n_theta


def test_a_climb_starts_from_the_best_of_several_length_scales(data):
    x, y = data
    kernel, objective = matern(1.5, 50.0), GaussianEvidence(make_series(x, y))
    found = choose_kernel([kernel], lambda p: objective, [make_series(x, y)], NOISE)

    def dense(scale):
        K = matern(1.5, scale)(x[:, None].numpy()) + 0.1 * np.eye(80)
        return -0.5 * (y.numpy() @ np.linalg.solve(K, y.numpy()) + np.linalg.slogdet(K)[1])

    tried = 50.0 * 10.0 ** np.array([0.75, 0.0, -0.75, -1.5, -2.25])
    assert found.kernel.k2.length_scale == pytest.approx(max(tried, key=dense))


@pytest.mark.parametrize("own", [0.3, 5.0, 60.0])
def test_length_scales_far_below_the_gaps_are_not_tried(own):
    times = torch.arange(50, dtype=torch.float64)
    series = make_series(times, torch.zeros(50).double())
    tried = own * choice._telling_scales(Component(matern(1.5, own)), series).numpy()
    untried = own * np.array(SCALES[len(tried) :])
    assert len(tried) >= 2 and (untried < 0.1).all()
    assert (tried[2:] >= 0.1).all() and len(untried)


def test_gradients_come_home_from_where_the_data_are(data):
    """A climb is in main memory and float64, whatever the device or dtype of the slopes."""

    class Elsewhere(GaussianEvidence):
        def __call__(self, *arguments, **options):
            found = super().__call__(*arguments, **options)
            return replace(found, gradients=lambda: [found.gradients()[0].float()])

    x, y = data
    found = maximise([matern(1.5, 3.0)], Elsewhere(make_series(x, y)), NOISE)
    expected = maximise([matern(1.5, 3.0)], GaussianEvidence(make_series(x, y)), NOISE)
    assert found.value == pytest.approx(expected.value, abs=1e-3)


@pytest.mark.parametrize("amplitudes", [False, True])
def test_prior_enters_loss_and_gradient(data, amplitudes):
    x, y = data
    kernel, prior = matern(1.5, 2.0, 0.8), matern(1.5, 3.0, 0.5)
    with_prior, without = (
        Climb(
            [kernel], GaussianEvidence(make_series(x, y)), NOISE, amplitudes=amplitudes, prior=each
        )
        for each in ([prior], None)
    )
    place = with_prior.start() + torch.tensor([0.2, -0.1, 0.3])
    (theta,), _ = with_prior.thetas(place)
    z = theta - torch.from_numpy(prior.theta)
    noise = float(place[2]) - np.log(0.1)
    of_variance = np.sqrt(2) * (z[0] / 2).exp() if amplitudes else z[0] ** 2 / (2 * PRIOR_LOG_SD**2)
    of_scale = z[1] ** 2 / (2 * PRIOR_LOG_SD**2)
    expected = (of_variance + of_scale + noise**2 / (2 * NOISE_LOG_SD**2)) / 80
    value, slope = with_prior.loss(place)
    assert value - without.loss(place)[0] == pytest.approx(float(expected), rel=1e-9)
    for i, step in enumerate(1e-6 * torch.eye(3, dtype=torch.float64)):
        ends = [with_prior.loss(place + sign * step)[0] for sign in (1, -1)]
        assert slope[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("own", [False, True], ids=["of the likelihood", "of the components"])
def test_parameters_of_a_likelihood_have_one_prior(data, own):
    """A Gamma law of the degrees of freedom, or the log-normal laws of all hyper-parameters."""
    x, y = data
    kernel, law = matern(1.5, 2.0, 0.8), StudentT(0.3, 4.0, scale_bounds=(0.01, 3.0))
    learned = StudentT(0.3, 4.0, scale_bounds=(0.01, 3.0), df_bounds=(2.0, 200.0))
    plain = Climb([kernel], VariationalEvidence(make_series(x, y), learned), learned)
    place = plain.start() + torch.tensor([0.0, 0.0, 0.0, 0.7])
    evidence = plain.evaluate(plain.thetas(place)[0], place).value
    options = {"prior": [kernel]} if own else {}
    climb = Climb([kernel], VariationalEvidence(make_series(x, y), learned), learned, **options)
    value, slope = climb.loss(place)
    nu = np.log(4.0) + 0.7
    of_prior = -0.5 * 0.7**2 if own else nu - 0.25 * np.exp(nu)
    assert -value * 80 - evidence == pytest.approx(of_prior, abs=1e-3)
    ends = [climb.loss(place + h * torch.eye(4)[3])[0] for h in (1e-3, -1e-3)]
    assert slope[3] == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=1e-2)
    assert law.log_prior(law.initial(x)) == 0


def test_a_search_among_rare_labels_does_not_end_where_it_begins():
    """One label of 1000: no process is likelier than a small one, of the ELBO of a constant."""
    n, y = 1000, -np.ones(1000)
    y[400] = 1
    rate, series = 1 / n, make_series(torch.arange(float(n)).double(), torch.tensor(y))
    objective = VariationalEvidence(series, Bernoulli(), float(np.log(rate / (1 - rate))))
    found = maximise([4.0 * RBF(112.0)], objective, Bernoulli(), tol=1e-6)
    constant = np.log(rate) + (n - 1) * np.log1p(-rate)
    assert found.value > constant - 0.1 and found.n_iter == len(found.history)
    assert found.history[-1] * n == pytest.approx(found.value, rel=1e-9)
