"""Families and length scales of few observations: priors, corrected leave-one-out, the choice."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import Data, merge_replicates
from skgp.kernels import split_noise
from skgp.learning import kernel_choice
from skgp.learning.defaults import LEAST_CURVATURE
from skgp.learning.kernel_choice import choose_kernel, fit_families, raised
from skgp.learning.starts import ChoiceSettings, Family, inverse_hessian, leave_one_out
from skgp.linalg import NotPositiveDefiniteError
from skgp.optim.bfgs import minimize_within
from tests.reference.qsgp import numerical_gradient

SETTINGS = ChoiceSettings()


def families(d):
    scale = np.full(d, d**0.5)
    shapes = [RBF(scale), *(Matern(scale, nu=nu) for nu in (2.5, 1.5, 0.5))]
    return [1.0 * shape + WhiteKernel(0.1, (1e-5, 1e1)) for shape in shapes]


def sample(rng, n, d, n_relevant):
    """Standardised targets that vary alike along the first columns, and not along the others."""
    X = rng.normal(size=(n, d))
    f = np.sin(1.5 * X[:, :n_relevant].sum(1) / n_relevant**0.5) + 0.5 * X[:, 0]
    y = f + 0.1 * rng.normal(size=n)
    return X, (y - y.mean()) / y.std()


def as_data(X, y):
    return Data(torch.tensor(X), torch.tensor(y))


def choose(X, y, settings=None, kernels=None):
    generator = torch.Generator().manual_seed(0)
    kernels = families(X.shape[1]) if kernels is None else kernels
    return choose_kernel(kernels, as_data(X, y), generator=generator, settings=settings)


def length_scales(kernel):
    return np.atleast_1d(split_noise(kernel)[0].k2.length_scale)


# ------------------------------------------------------------------------------------- objective


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "merged"])
def test_family_gradient_matches_finite_differences(weighted, rng):
    X, y = sample(rng, 20, 3, 2)
    X[15:] = X[:5]
    data = (
        merge_replicates(X, y, None, torch.device("cpu")) if weighted else as_data(X[:15], y[:15])
    )
    family = Family(families(3)[1], data, SETTINGS)
    theta = family.start + np.array([0.1, 0.5, -1.0, 0.3, -2.0])
    expected = numerical_gradient(lambda t: family(t)[0], theta)
    np.testing.assert_allclose(family(theta)[1], expected, rtol=1e-6, atol=1e-7)


def test_family_prior_is_students_t_of_ratios_and_of_the_noise(rng):
    X, y = sample(rng, 20, 3, 2)
    family = Family(families(3)[0], as_data(X, y), SETTINGS)
    theta = family.start + np.array([0.1, 0.5, -1.0, 0.3, -2.0])
    plain = -family.evidence(theta).value
    ratio = np.array([0.5, -1.0, 0.3]) - np.mean([0.5, -1.0, 0.3])
    prior = 2 * np.log1p(ratio**2 / (3 * SETTINGS.ratio_scale**2)).sum()
    deviation = (theta[-1] - np.log(0.1 * np.mean(y**2))) / SETTINGS.noise_scale
    prior += 2 * np.log1p(deviation**2 / 3)
    np.testing.assert_allclose(family.at(theta)[0], plain + prior, rtol=1e-10)


def optimum(family):
    theta, _ = minimize_within(family, family.start, family.bounds, max_iter=500, tol=1e-13)
    return theta


def test_corrected_leave_one_out_is_near_that_of_searches_without_each_observation(rng):
    """Closer by far than with the theta that has seen the observation."""
    X, y = sample(rng, 30, 3, 2)
    family = Family(families(3)[1], as_data(X, y), SETTINGS)
    theta = optimum(family)
    groups = np.arange(len(theta))
    refitted = np.empty(30)
    for i in range(30):
        rest = np.delete(np.arange(30), i)
        # The prior of the noise is relative to the variance of all targets, as it is above.
        part = Family(families(3)[1], as_data(X[rest], y[rest]), SETTINGS)
        part.variance = family.variance
        start, _ = minimize_within(part, theta, part.bounds, max_iter=500, tol=1e-13)
        refitted[i] = -family.evidence(start).leave_one_out[i]
    plain = leave_one_out(family, theta, groups, corrected=False)
    better = leave_one_out(family, theta, groups, corrected=True)
    assert refitted.mean() - plain.loss.mean() > 0.02  # what the search has learnt of each
    assert abs(refitted.mean() - better.loss.mean()) < 0.4 * (refitted.mean() - plain.loss.mean())
    assert better.spread > plain.spread


# -------------------------------------------------------------------------------------- the choice


def test_corrected_leave_one_out_of_copies_of_a_target_is_that_of_one(rng):
    """Without priors copies have one optimum, and what a row did to it."""
    X, y = sample(rng, 30, 3, 2)
    flat = replace(SETTINGS, ratio_scale=np.inf, noise_scale=np.inf)
    one, two = (Family(families(3)[1], as_data(X, Y), flat) for Y in (y, np.stack([y, -y], 1)))
    theta = optimum(one)
    np.testing.assert_allclose(one(theta)[0], two(theta)[0], rtol=1e-12)
    expected, found = (
        leave_one_out(family, theta, np.arange(len(theta)), corrected=True) for family in (one, two)
    )
    for name in ("loss", "square", "spread"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6)


def test_inverse_hessian_leads_down_where_theta_is_no_optimum(rng):
    """Of a negative curvature the size counts, and none is below the least."""
    X, y = sample(rng, 30, 3, 2)
    family = Family(families(3)[1], as_data(X, y), SETTINGS)
    theta = family.start + np.array([3.0, -2.0, 1.0, 0.0, 2.0])
    hessian = [numerical_gradient(lambda t, i=i: family.at(t)[1][i], theta) for i in range(5)]
    values, vectors = np.linalg.eigh(np.array(hessian))
    assert values.min() < -2 * LEAST_CURVATURE
    expected = (vectors / np.maximum(np.abs(values), LEAST_CURVATURE)) @ vectors.T
    found = inverse_hessian(family, theta, np.arange(5)) / family.total
    np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.01 * np.abs(expected).max())


def test_leave_one_out_moves_no_hyper_parameter_that_a_bound_holds(rng):
    X, _ = sample(rng, 20, 2, 2)
    y = np.sin(X.sum(1))  # without noise: its variance ends at the bound
    free = 1.0 * RBF([1.4, 1.4]) + WhiteKernel(1e-4, (1e-4, 1.0))
    held = 1.0 * RBF([1.4, 1.4]) + WhiteKernel(1e-4, "fixed")
    found = [
        leave_one_out(family, family.start, np.arange(len(family.start)), corrected=True)
        for family in (Family(kernel, as_data(X, y), SETTINGS) for kernel in (free, held))
    ]
    for name in ("loss", "square"):
        np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), rtol=1e-9)


@pytest.mark.parametrize("n", [15, 60])
def test_choose_kernel_finds_the_relevant_column_of_a_function_without_noise(n):
    # The squared error of a few observations at the edge is nearly all there is.
    X = np.random.default_rng(0).random((n, 2))
    y = np.sin(6 * X[:, 0])
    kernel = 1.0 * RBF([0.4, 0.4], (1e-3, 1e3)) + WhiteKernel(0.1, (1e-8, 10.0))
    scales = length_scales(choose(X, y / y.std(), kernels=[kernel])[0])
    assert scales[1] > 10 * scales[0]


def test_choose_kernel_finds_the_relevant_column_where_few_targets_have_much_of_the_noise():
    # A gain in density within the noise of heavy tails, where squared errors fall by half.
    X = np.random.default_rng(23).uniform(-1, 1, size=(150, 4))
    noise = np.random.default_rng(24).normal(size=150) * np.exp(1.2 * X[:, 3])
    y = np.sin(3 * X[:, 0]) + 0.1 * noise
    kernel = 1.0 * RBF(X.std(0), (1e-3, 1e3)) + WhiteKernel(0.1, (1e-8, 10.0))
    scales = length_scales(choose(X, y / y.std(), kernels=[kernel])[0])
    assert scales[1:].min() > 3 * scales[0]


@pytest.mark.parametrize("seed", [10, 17, 21])
def test_choose_kernel_finds_the_relevant_column_of_few_observations_by_many_nats(seed):
    """Steep where observations are rare: the squared errors of these few are all noise."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((40, 3))
    y = X[:, 0] ** 3 + X[:, 1] + 0.2 * rng.standard_normal(40)
    kernel = 1.0 * RBF(X.std(0) * 3**0.5, (1e-3, 1e3)) + WhiteKernel(0.1, (1e-8, 10.0))
    scales = length_scales(choose(X, (y - y.mean()) / y.std(), kernels=[kernel])[0])
    assert scales[1:].min() > 5 * scales[0]


@pytest.mark.parametrize("seed", [5, 8, 17])
def test_choose_kernel_adds_up_a_function_and_the_levels_of_a_one_hot_column(seed):
    """With length scales far below the root of two, between levels, each has its own function."""
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 5, 60)
    X = np.c_[rng.standard_normal(60), np.eye(5)[level]]
    y = np.sin(2 * X[:, 0]) + np.array([0, 1, -1, 2, 0.5])[level] + 0.2 * rng.standard_normal(60)
    kernel = 1.0 * RBF(X.std(0) * 6**0.5, (1e-3, 1e3)) + WhiteKernel(0.1, (1e-8, 10.0))
    scales = length_scales(choose(X, (y - y.mean()) / y.std(), kernels=[kernel])[0])
    assert scales[1:].min() > 1.0


def test_choose_kernel_adds_up_a_function_and_many_levels_of_a_one_hot_column():
    rng = np.random.default_rng(0)
    level = rng.integers(0, 30, 100)
    X = np.c_[rng.uniform(-2, 2, 100), np.eye(30)[level]]
    y = np.sin(2 * X[:, 0]) + rng.standard_normal(30)[level] + 0.2 * rng.standard_normal(100)
    spread = np.where(X.std(0) > 0, X.std(0), 1.0)  # no row has one of the levels
    shape = Matern(spread * 31**0.5, (1e-3, 1e3), nu=2.5)
    kernels = [1.0 * shape + WhiteKernel(0.1, (1e-8, 10.0))]
    scales = length_scales(choose(X, (y - y.mean()) / y.std(), kernels=kernels)[0])
    assert scales[1:].min() > 1.0


@pytest.mark.parametrize("seed", [0, 6])
def test_choose_kernel_finds_an_oscillation_that_shared_scales_do_not_show(seed):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (100, 12))
    y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + X[:, 2:8].sum(1) * 0.4
    y += 0.2 * rng.standard_normal(100)
    kernel = 1.0 * RBF(X.std(0) * 12**0.5, (1e-3, 1e3)) + WhiteKernel(0.1, (1e-8, 10.0))
    kernel = choose(X, (y - y.mean()) / y.std(), kernels=[kernel])[0]
    assert split_noise(kernel)[1].noise_level < 0.05  # .16 where the sine is noise


def test_choose_kernel_finds_a_quick_oscillation_beside_a_trend(rng):
    X = rng.random((250, 2))
    y = 5 * X[:, 0] + np.sin(60 * X[:, 1]) + 0.1 * rng.normal(size=250)
    shapes = (RBF([0.4, 0.4], (1e-4, 1e4)), Matern([0.4, 0.4], (1e-4, 1e4), nu=0.5))
    kernels = [1.0 * shape + WhiteKernel(0.1, (1e-8, 10.0)) for shape in shapes]
    kernel = choose(X, (y - y.mean()) / y.std(), kernels=kernels)[0]
    assert split_noise(kernel)[1].noise_level < 0.02  # .2 where the oscillation is noise
    assert length_scales(kernel)[1] < 0.1 * length_scales(kernel)[0]


def test_choose_kernel_of_equally_relevant_columns_shares_their_length_scale():
    for seed in range(3):
        for n, d, screen_rows in ((70, 20, 500), (100, 3, 50)):  # of more rows, too
            rng = np.random.default_rng(seed)
            X = rng.normal(size=(n, d))
            y = np.sin(1.5 * X.sum(1) / d**0.5) + 0.1 * rng.normal(size=n)
            y = (y - y.mean()) / y.std()
            scales = length_scales(choose(X, y, replace(SETTINGS, screen_rows=screen_rows))[0])
            np.testing.assert_allclose(scales, scales[0], rtol=1e-10)


@pytest.mark.parametrize("max_separate", [300, 40], ids=["separate", "grouped"])
def test_choose_kernel_finds_the_relevant_of_many_columns(max_separate):
    X, y = sample(np.random.default_rng(0), 100, 60, 2)
    kernel, _ = choose(X, y, replace(SETTINGS, max_separate=max_separate))
    scales = length_scales(kernel)
    assert scales[:2].max() < 0.2 * np.median(scales[2:])


@pytest.mark.slow
def test_choose_kernel_covers_what_it_predicts_among_many_irrelevant_columns():
    """95% intervals, 100 observations of 100 columns of which five matter."""
    covered = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        X, y = sample(rng, 600, 100, 5)
        kernel, _ = choose(X[:100], y[:100])
        regressor = GaussianProcessRegressor(kernel, optimizer=None, alpha=0.0)
        mean, std = regressor.fit(X[:100], y[:100]).predict(X[100:], return_std=True)
        covered.append(np.mean(np.abs(y[100:] - mean) < 1.96 * std))
    assert 0.88 < np.mean(covered) < 0.99


def test_choose_kernel_tells_rough_functions_from_smooth_ones(rng):
    X = rng.uniform(-3, 3, size=(120, 1))
    smooth = np.sin(2 * X[:, 0]) + 0.01 * rng.normal(size=120)
    K = Matern(0.5, nu=0.5)(X)
    rough = np.linalg.cholesky(K + 1e-6 * np.eye(120)) @ rng.normal(size=120)
    found = [choose(X, y - y.mean())[0] for y in (smooth, rough)]
    assert type(split_noise(found[0])[0].k2) is RBF
    assert split_noise(found[1])[0].k2.nu == 0.5


@pytest.mark.parametrize("screen_rows", [500, 60], ids=["all", "led by few"])
def test_every_family_ends_at_its_optimum_whichever_is_the_best(screen_rows, rng, monkeypatch):
    # Of rough functions without noise the roughest family is best where shared scales are compared;
    # its noise, nearly none, is where the evidence of the smoother ones falls off.
    X = rng.normal(size=(120, 4))
    y = np.sign(X[:, 0]) * np.abs(X[:, 0]) ** 0.5 + np.sign(X[:, 1])
    data, kernels = as_data(X, (y - y.mean()) / y.std()), families(4)
    settings = partial(ChoiceSettings, screen_rows=screen_rows)
    monkeypatch.setattr(kernel_choice, "ChoiceSettings", settings)
    found, _ = fit_families(kernels, data, max_iter=40)
    assert len(found) == 4
    for kernel in found:
        family = Family(kernel, data, ChoiceSettings())
        _, best = minimize_within(family, family.start, family.bounds, max_iter=40, tol=1e-5)
        assert family(kernel.theta)[0] < best + 0.05


def test_choose_kernel_of_many_rows_ends_at_an_optimum_of_all_of_them(rng, monkeypatch):
    X, y = sample(rng, 160, 3, 1)
    settings, of_all = replace(SETTINGS, screen_rows=60), []
    evaluate = Family.__call__

    def counting(family, theta):
        of_all.extend([family] * (len(family.data) == 160))
        return evaluate(family, theta)

    monkeypatch.setattr(Family, "__call__", counting)
    kernel, history = choose(X, y, settings)
    assert len(of_all) <= 12 * len(set(map(id, of_all)))  # the curvature on 60 rows leads; else 30
    # The optimum of all, one family at a time and from the defaults.
    best = min(
        family(optimum(family))[0]
        for family in (Family(kernel, as_data(X, y), settings) for kernel in families(3))
    )
    assert -max(history[-30:]) < best + 0.01


@pytest.mark.parametrize("step", ["inverse_hessian", "leave_one_out"])
def test_a_choice_goes_on_without_a_factor_and_stops_at_errors_of_another_kind(
    step, rng, monkeypatch
):
    (X, y), errors = sample(rng, 40, 2, 1), [NotPositiveDefiniteError("singular"), ValueError("x")]

    def fail(*args, **options):
        raise errors[0]

    monkeypatch.setattr(kernel_choice, step, fail)
    settings = replace(SETTINGS, screen_rows=30)
    assert np.isfinite(choose(X, y, settings)[0].theta).all()
    del errors[0]
    with pytest.raises(ValueError, match="x"):
        choose(X, y, settings)


@pytest.mark.parametrize("last", [1, 7, 30])
def test_choose_kernel_stopped_by_the_callback_returns_what_it_has(last, rng):
    X, y = sample(rng, 40, 4, 2)
    calls = []

    def callback(step, info):
        calls.append(step)
        return step >= last

    generator = torch.Generator().manual_seed(0)
    kernel, history = choose_kernel(
        families(4), as_data(X, y), generator=generator, callback=callback
    )
    assert calls == list(range(1, last + 1)) and len(history) == last
    assert np.isfinite(kernel.theta).all()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_choose_kernel_of_hardly_any_rows_is_finite(n, rng):
    X, y = rng.normal(size=(n, 4)), rng.normal(size=n)
    for target in (y, np.zeros(n)):
        assert np.isfinite(choose(X, target)[0].theta).all()


def test_choose_kernel_evaluates_the_evidence_a_hundred_times():
    """What makes a fit of 60 observations as quick as one of scikit-learn's."""
    for d in (1, 2, 5):
        X, y = sample(np.random.default_rng(d), 60, d, 1)
        assert len(choose(X, y)[1]) <= 110


def test_variances_of_few_observations_are_raised(rng):
    X, y = sample(rng, 15, 2, 2)
    levels = []
    for factor in (0.0, SETTINGS.small_sample):
        kernel, _ = choose(X, y, replace(SETTINGS, small_sample=factor), [families(2)[0]])
        levels.append(split_noise(kernel)[1].noise_level)
    assert levels[1] / levels[0] == pytest.approx(1 + SETTINGS.small_sample / 15)


def test_raised_leaves_the_mean_and_scales_the_variance(rng):
    X, y = sample(rng, 30, 2, 2)
    kernel = 2.0 * RBF([0.8, 1.1]) + WhiteKernel(0.2)
    moments = [
        GaussianProcessRegressor(k, optimizer=None, alpha=0.0).fit(X, y).predict(X + 0.1, True)
        for k in (kernel, raised(kernel, 1.7))
    ]
    np.testing.assert_allclose(moments[1][0], moments[0][0], rtol=1e-8)
    np.testing.assert_allclose(moments[1][1] ** 2, 1.7 * moments[0][1] ** 2, rtol=1e-8)


def test_raised_respects_bounds():
    kernel = 2.0 * RBF(1.0) + WhiteKernel(0.2, (0.1, 0.3))
    assert raised(kernel, 9.0).k2.noise_level <= 0.3
    fixed = 2.0 * RBF(1.0) + WhiteKernel(0.2, "fixed")
    assert raised(fixed, 9.0) == fixed
