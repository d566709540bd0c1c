"""Short searches from Fisher's information: where they start, where they end, when they give up."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.inference.markov.series import make_series
from skgp.kernels import Cosine, LocalLinearTrend
from skgp.learning.markov import choice
from skgp.learning.markov.defaults import CHOICE_ITER, CHOICE_NATS, CHOICE_TOL, FISHER_RIDGE
from skgp.learning.markov.objectives import Component, GaussianEvidence
from skgp.learning.markov.scoring import SeriesLoss, plain_climb, promised_gain, short_climb
from skgp.learning.markov.search import maximise
from skgp.likelihoods import Gaussian

LIKELIHOOD = Gaussian(0.1, bounds=(1e-8, 10.0))
KERNELS = {
    "matern": ConstantKernel(1.0) * Matern(0.5, nu=1.5),
    "rbf": ConstantKernel(1.0) * RBF(0.5),
    "season": 1.0 * Cosine(3.0, "fixed") * Matern(8.0, nu=0.5) + Matern(1.0, nu=2.5),
    "trend": LocalLinearTrend(0.1, 10.0, 1.0, level_bounds="fixed", slope_bounds="fixed", origin=-9)
    + 1.0 * Matern(1.0, nu=0.5),
}
each_kernel = pytest.mark.parametrize("name", list(KERNELS))


def informed(kind, component, objective):
    """Where a search starts, and the information there, without the ridge."""
    loss = SeriesLoss.of(component, objective)
    at, _ = loss.start(LIKELIHOOD, None)
    return at, loss.information(loss(at)[-1], kind) - FISHER_RIDGE * np.eye(len(at))


def problem(n=50):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 10, n)).round(1)  # some times are equal
    y = np.sin(2 * x) + 0.3 * rng.standard_normal(n)
    return GaussianEvidence(make_series(torch.tensor(x), torch.tensor(y / y.std())))


@each_kernel
def test_information_is_the_expected_curvature(name):
    objective, component = problem(), Component(KERNELS[name])
    at, found = informed("information", component, objective)
    x, counts = objective.series.times.numpy()[:, None], objective.series.counts.numpy()

    def C(u):
        return component.kernel.clone_with_theta(u[:-1])(x) + np.diag(np.exp(u[-1]) / counts)

    h, S = 1e-5, np.linalg.inv(C(at))
    steps = h * np.eye(len(at))
    products = [S @ (C(at + step) - C(at - step)) / (2 * h) for step in steps]
    expected = [[0.5 * np.trace(A @ B) for B in products] for A in products]
    tol = 1e-3 if name == "rbf" else 1e-4  # RBF: six states; else of float32
    np.testing.assert_allclose(found, expected, rtol=tol, atol=tol)


def test_information_takes_weights_that_single_precision_does_not():
    """Such as weights that decay exponentially with age: those points tell nothing."""
    x, age = np.linspace(0, 10, 50), np.linspace(300, -10, 50).clip(0)
    y, weight = np.sin(2 * x), np.exp(-age)  # from 1e-130
    component, found = Component(KERNELS["matern"]), []
    for seen in (weight > 0, weight > 1e-20):
        columns = (torch.tensor(each[seen]) for each in (x, y, weight))
        given = component, GaussianEvidence(make_series(*columns))
        kinds = "information", "average_information"
        found.append([informed(kind, *given)[1] for kind in kinds])
    for every, heavy in zip(*found, strict=True):  # the scale of noise is seen in each weight
        np.testing.assert_allclose(every[:-1, :-1], heavy[:-1, :-1], rtol=1e-5, atol=1e-12)
        assert np.isfinite(every).all()


@each_kernel
def test_average_information_is_the_mean_of_the_observed_and_the_expected_one(name):
    objective, component = problem(), Component(KERNELS[name])
    (at, found), h = informed("average_information", component, objective), 1e-5
    x, series = objective.series.times.numpy()[:, None], objective.series

    def C(u):
        noise = np.exp(u[-1]) / series.counts.numpy()
        return component.kernel.clone_with_theta(u[:-1])(x) + np.diag(noise)

    S, y = np.linalg.inv(C(at)), (series.totals / series.counts).numpy()
    steps = h * np.eye(len(at))
    slopes = [(C(at + step) - C(at - step)) / (2 * h) for step in steps]
    # Of what is linear in Sigma the observed one is y' S dA S dB S y - tr(S dA S dB) / 2.
    fisher = np.array([[0.5 * np.trace(S @ A @ S @ B) for B in slopes] for A in slopes])
    observed = np.array([[y @ S @ A @ S @ B @ S @ y for B in slopes] for A in slopes]) - fisher
    tol = 1e-3 if name == "rbf" else 1e-6  # RBF: six states
    np.testing.assert_allclose(found, (fisher + observed) / 2, rtol=tol, atol=tol)


@each_kernel
def test_the_loss_of_a_short_series_is_that_of_its_sites(name):
    """By one factor of the covariance and by the sites' normaliser, gradients too."""
    rng, objective = np.random.default_rng(1), problem()
    component = Component(KERNELS[name])
    loss = SeriesLoss.of(component, objective)
    at = loss.start(LIKELIHOOD, None)[0] + 0.3 * rng.standard_normal(len(component.theta) + 1)
    value, gradient, q = loss(at)
    loss._short = None
    expected, slopes, nothing = loss(at)
    assert q is not None and nothing is None
    assert value == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-6)


@each_kernel
def test_short_searches_end_where_long_ones_do(name):
    objective = problem()
    short = short_climb(Component(KERNELS[name]), objective, LIKELIHOOD)
    long = maximise([KERNELS[name]], objective, LIKELIHOOD, tol=1e-12, max_iter=300)
    assert short.value > long.value - 0.1
    again = maximise(
        short.components, objective, LIKELIHOOD, parameters=short.parameters, max_iter=0
    )
    assert abs(again.value - short.value) < 1e-8
    assert short.n_iter <= 25


def test_a_search_that_cannot_win_ends_early():
    far = Component(KERNELS["rbf"])
    objective, component = problem(), far.at(far.scaled(torch.tensor([2.0]).double())[0])
    whole = short_climb(component, objective, LIKELIHOOD)
    early = short_climb(component, objective, LIKELIHOOD, worth=whole.value + 500.0)
    assert early.n_iter == 3 < whole.n_iter
    enough = short_climb(component, objective, LIKELIHOOD, worth=whole.value - 1.0)
    assert enough.value == pytest.approx(whole.value, abs=1e-9)


@each_kernel
def test_searches_by_lbfgs_in_numpy_are_those_in_torch(name):
    objective, component = problem(), Component(KERNELS[name])
    found = plain_climb(component, objective, LIKELIHOOD)
    options = {"tol": max(CHOICE_TOL, CHOICE_NATS / objective.total), "max_iter": CHOICE_ITER}
    expected = maximise([component], objective, LIKELIHOOD, **options)
    np.testing.assert_allclose(found.components[0].theta, expected.components[0].theta, rtol=1e-5)
    np.testing.assert_allclose(found.parameters, expected.parameters, rtol=1e-5)
    assert found.value == pytest.approx(expected.value, abs=1e-6)


@each_kernel
def test_promised_gains_are_those_of_a_score_test(name):
    objective, component, noise = problem(), Component(KERNELS[name]), 0.02
    scales = [0.1, 0.7, 3.0]
    others = [ConstantKernel(0.4) * Matern(scale, nu=0.5) for scale in scales]
    loss, part = SeriesLoss.of(component, objective), Component(others[0])
    thetas = np.log([[0.4, scale] for scale in scales])
    found = loss.gains(np.append(component.theta, math.log(noise)), part, thetas)
    x, series = objective.series.times.numpy()[:, None], objective.series
    y, counts = (series.totals / series.counts).numpy(), series.counts.numpy()

    def C(u):
        return component.kernel.clone_with_theta(u[:-1])(x) + np.diag(np.exp(u[-1]) / counts)

    at, h = np.append(component.theta, math.log(noise)), 1e-5
    S = np.linalg.inv(C(at))
    slopes = [(C(at + step) - C(at - step)) / (2 * h) for step in h * np.eye(len(at))]
    for other, gain in zip(others, found, strict=True):
        K = other(x)
        u = 0.5 * (y @ S @ K @ S @ y - np.trace(S @ K))
        A = np.array(
            [[0.5 * y @ S @ a @ S @ b @ S @ y for b in [*slopes, K]] for a in [*slopes, K]]
        )
        A[:-1, :-1] += FISHER_RIDGE * np.eye(len(slopes))
        expected = max(u, 0.0) ** 2 * np.linalg.inv(A)[-1, -1] / 2
        assert gain == pytest.approx(expected, rel=0.02 if name == "rbf" else 1e-4, abs=1e-7)
    assert max(found) > 0


def test_what_a_part_promises_is_about_what_it_gains():
    """Of an autoregressive process about a line: half to three times as much."""
    rng, n = np.random.default_rng(0), 200
    y = rng.standard_normal(n)
    for i in range(1, n):
        y[i] += 0.6 * y[i - 1]
    columns = torch.arange(n).double(), torch.from_numpy(0.05 * np.arange(n) + y)
    objective = GaussianEvidence(make_series(*columns))
    trend = LocalLinearTrend(1e-9, 10.0, 1.0, level_bounds="fixed", slope_bounds="fixed", origin=-9)
    first = short_climb(Component(trend), objective, LIKELIHOOD)
    part = ConstantKernel(1.0) * Matern(3.0, (0.1, 1e3), nu=0.5)
    promised = promised_gain(first, Component(part), objective)
    whole = short_climb(Component(first.kernel + part), objective, LIKELIHOOD, first.parameters)
    assert whole.value - first.value > 5.0
    assert promised / 3 < whole.value - first.value < 4 * promised
    nothing = GaussianEvidence(make_series(columns[0], torch.from_numpy(rng.standard_normal(n))))
    first = short_climb(Component(trend), nothing, LIKELIHOOD)
    assert promised_gain(first, Component(part), nothing) < 3.0


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_few_numbers_tell_a_smooth_kernel_by_many_nats(noise):
    x = np.arange(20.0)
    y = np.sin(x / 4) + noise * np.random.default_rng(0).standard_normal(20)
    series = make_series(torch.tensor(x), torch.tensor(y))
    kernels = [ConstantKernel(1.0) * Matern(3.0, nu=1.5), ConstantKernel(1.0) * RBF(3.0)]

    def objective(processes):
        return GaussianEvidence(processes[0])

    found = choice.choose_kernel(kernels, objective, [series], LIKELIHOOD).kernel.k2
    assert type(found) is (RBF if noise == 0 else Matern)


def test_kernels_past_the_best_are_not_searched(monkeypatch):
    """Where a rougher kernel is worse by nats, none still rougher is tried."""
    x = np.linspace(0, 10, 80)
    y = np.sin(2 * x) + 1e-3 * np.random.default_rng(0).standard_normal(80)
    series = make_series(torch.tensor(x), torch.tensor(y))
    tried, search = [], choice.short_climb

    def recorded(component, *given):
        tried.append(getattr(component.kernel.k2, "nu", math.inf))
        return search(component, *given)

    monkeypatch.setattr(choice, "short_climb", recorded)
    kernels = [ConstantKernel(1.0) * Matern(1.0, nu=nu) for nu in (1.5, 2.5, 0.5)]
    kernels.append(ConstantKernel(1.0) * RBF(1.0))
    best = choice.choose_kernel(
        kernels, lambda each: GaussianEvidence(each[0]), [series], LIKELIHOOD
    )
    assert tried == [1.5, 2.5, np.inf] and type(best.kernel.k2) is RBF
