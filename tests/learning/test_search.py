"""Hyper-parameter objectives and searches against scikit-learn and dense formulas."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data, merge_replicates
from skgp.kernels import ActiveDims, Cosine, split_noise
from skgp.learning import search as hyperparameters
from skgp.learning.defaults import GLOBAL_SEARCH, LEAST_EFFECT, NOISE_GRID
from skgp.learning.evidence import ExactEvidence, leave_one_out_log_density
from skgp.learning.search import (
    HyperparameterFit,
    SearchSettings,
    fit_hyperparameters,
    fit_leave_one_out,
    fit_marginal_likelihood,
    leave_one_out_densities,
)
from skgp.optim.stopping import StopRecorder
from tests.covering import covering
from tests.reference.gaussian import left_out
from tests.reference.kernels import naive_gram
from tests.reference.qsgp import numerical_gradient

CPU = torch.device("cpu")
KERNELS = {
    "ard": lambda: 1.3 * RBF([0.8, 1.7]) + WhiteKernel(0.1),
    "matern": lambda: 0.7 * Matern([1.1, 0.6], nu=1.5) + WhiteKernel(0.05),
    "sum": lambda: RBF(0.9) + WhiteKernel(0.2) + 0.5 * Matern(2.0, nu=2.5),
    "fixed noise": lambda: 2.0 * RBF(1.2) + WhiteKernel(0.3, "fixed"),
    "fixed amplitude": lambda: ConstantKernel(1.5, "fixed") * RBF([1.0, 0.4]) + WhiteKernel(0.1),
}
each_kernel = pytest.mark.parametrize("name", KERNELS)


def smooth(n=40, seed=0, noise=0.1):
    """Standardised targets of a function that varies four times faster along the first input."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, size=(n, 2))
    y = np.sin(2 * X[:, 0]) + 0.5 * np.cos(0.5 * X[:, 1]) + noise * rng.normal(size=n)
    return X, (y - y.mean()) / y.std()


def as_data(X, y):
    return merge_replicates(X, y, None, CPU)


def repeated(seed=1):
    """Data with integer weights on some repeated rows, merged; and the rows written out."""
    X, y = smooth(14, seed)
    X[9:] = X[:5]
    counts = np.array([1, 2, 1, 3, 1, 1, 2, 1, 1, 2, 1, 1, 1, 4])
    merged = merge_replicates(X, y, counts.astype(float), CPU)
    return merged, np.repeat(X, counts, axis=0), np.repeat(y, counts)


def dense_log_density(kernel, X, y):
    """log N(y; 0, K + noise I), one matrix entry at a time."""
    signal, white = split_noise(kernel)
    A = naive_gram(signal, X) + white.noise_level * np.eye(len(y))
    return stats.multivariate_normal(np.zeros(len(y)), A).logpdf(y)


def value_and_gradient(function, theta):
    theta = torch.tensor(theta, requires_grad=True)
    value = function(theta)
    return value.item(), torch.autograd.grad(value, theta)[0].numpy()


# --------------------------------------------------------------------- marginal likelihood


@pytest.mark.parametrize("merge", [False, True], ids=["plain", "merged"])
def test_fit_marginal_likelihood_reaches_the_optimum_of_scikit_learn(merge):
    X, y = smooth(40, seed=1)
    if merge:
        X[25:] = X[:15]
        y[25:] = y[:15] + 0.2 * np.random.default_rng(1).normal(size=15)
    kernel = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)
    oracle = GaussianProcessRegressor(kernel, alpha=0.0).fit(X, y)
    fit = fit_marginal_likelihood(kernel, as_data(X, y), max_iter=200)
    best = oracle.log_marginal_likelihood_value_
    np.testing.assert_allclose(fit.log_marginal_likelihood, best, atol=2e-3)
    value = oracle.log_marginal_likelihood(fit.kernel.theta)
    np.testing.assert_allclose(fit.log_marginal_likelihood, value, rtol=1e-8)
    assert fit.method == "marginal likelihood" and len(fit.history) > 3
    np.testing.assert_allclose(max(fit.history) * len(y), value, rtol=1e-8)


def test_fit_marginal_likelihood_respects_bounds_and_fixed_values():
    kernel = ConstantKernel(1.5, "fixed") * RBF([1.0, 1.0], (0.9, 1.1)) + WhiteKernel(
        0.5, (0.4, 2.0)
    )
    fit = fit_marginal_likelihood(kernel, as_data(*smooth()))
    theta, bounds = fit.kernel.theta, kernel.bounds
    assert np.all(theta >= bounds[:, 0] - 1e-12) and np.all(theta <= bounds[:, 1] + 1e-12)
    np.testing.assert_allclose(np.exp(theta), [0.9, 1.1, 0.4], rtol=1e-6)  # all at a bound
    assert fit.kernel.k1.k1.constant_value == 1.5
    assert kernel.k2.noise_level == 0.5  # the user's object is left alone


def test_fit_marginal_likelihood_refuses_a_singular_step(monkeypatch):
    """A theta at which no factor exists is worse than any other, and never returned."""
    kernel = KERNELS["ard"]()
    true = ExactEvidence.__call__

    def fragile(self, theta):
        if theta[-1] < np.log(0.05):
            raise ValueError("not positive definite")
        return true(self, theta)

    monkeypatch.setattr(ExactEvidence, "__call__", fragile)
    fit = fit_marginal_likelihood(kernel, as_data(*smooth(noise=0.01)))
    assert np.log(0.05) <= fit.kernel.theta[-1] < kernel.theta[-1]
    assert np.isfinite(fit.log_marginal_likelihood)


# --------------------------------------------------------------------------- leave-one-out


def others(n):
    """Every other row as neighbours of each row."""
    return torch.tensor([[j for j in range(n) if j != i] for i in range(n)])


def dense_leave_one_out(kernel, X, y):
    """Rasmussen and Williams, eqs. 5.10-5.12: residuals and variances from one inverse."""
    signal, white = split_noise(kernel)
    inverse = np.linalg.inv(naive_gram(signal, X) + white.noise_level * np.eye(len(y)))
    variance = 1 / np.diag(inverse)
    residual = (inverse @ y) * variance
    return stats.norm(0, np.sqrt(variance)).logpdf(residual)


@each_kernel
def test_leave_one_out_with_all_neighbours_equals_the_dense_formulas(name):
    kernel, data = KERNELS[name](), as_data(*smooth(25))
    density = leave_one_out_log_density(
        kernel, data, torch.arange(25), others(25), torch.tensor(kernel.theta)
    )
    expected = dense_leave_one_out(kernel, data.X.numpy(), data.y.numpy())
    np.testing.assert_allclose(density.numpy(), expected, rtol=1e-8, atol=1e-8)


def test_leave_one_out_with_jitter_is_of_neighbours_with_noise_of_their_own():
    kernel, data = KERNELS["ard"](), as_data(*smooth(12))
    given = data, torch.arange(12), others(12), torch.tensor(kernel.theta)
    density = leave_one_out_log_density(kernel, *given, jitter=0.3)
    signal, white = split_noise(kernel)
    K, y = naive_gram(signal, data.X.numpy()), data.y.numpy()
    for i, value in enumerate(density.numpy()):
        mean, variance = left_out(K, white.noise_level + 0.3 * np.diag(K), y, i)
        expected = stats.norm(mean, np.sqrt(variance + white.noise_level)).logpdf(y[i])
        np.testing.assert_allclose(value, expected, rtol=1e-8)


def test_leave_one_out_of_merged_rows_is_a_difference_of_evidences():
    """log p(all seen at x_i | the rest) = log p(everything) - log p(the rest), rows written out."""
    kernel = KERNELS["ard"]()
    merged, X, y = repeated()
    n = len(merged.y)
    density = leave_one_out_log_density(
        kernel, merged, torch.arange(n), others(n), torch.tensor(kernel.theta)
    )
    whole = dense_log_density(kernel, X, y)
    for row, value in zip(merged.X.numpy(), density.numpy(), strict=True):
        rest = (X != row).any(axis=1)
        expected = whole - dense_log_density(kernel, X[rest], y[rest])
        np.testing.assert_allclose(value, expected, rtol=1e-8)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@each_kernel
def test_leave_one_out_gradient_matches_finite_differences(name, weighted, generator):
    kernel = KERNELS[name]()
    data = repeated()[0] if weighted else as_data(*smooth(30))
    rows = torch.tensor([3, 0, 7])
    neighbors = torch.tensor([[1, 8, 4, 2, 6], [7, 3, 5, 6, 1], [0, 4, 3, 5, 8]])
    slopes = torch.tensor([0.4, -1.0, 2.0], dtype=torch.float64)

    def objective(theta):
        return slopes @ leave_one_out_log_density(kernel, data, rows, neighbors, theta)

    _, gradient = value_and_gradient(objective, kernel.theta)
    expected = numerical_gradient(lambda t: objective(torch.tensor(t)).item(), kernel.theta)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)


def test_leave_one_out_score_of_rows_drawn_by_weight_is_the_mean_over_observations(generator):
    kernel = KERNELS["ard"]()
    merged, _, y = repeated()
    n = len(merged.y)
    every, theta = torch.arange(n), torch.tensor(kernel.theta)
    density = leave_one_out_log_density(kernel, merged, every, others(n), theta)
    rows = torch.tensor([4, 0, 4])
    found = leave_one_out_densities(kernel, merged, rows, every, 100)  # k is cut to n - 1
    np.testing.assert_allclose(found, (density / merged.weight)[rows], rtol=1e-9)
    # In expectation, all that was observed over the number of observations.
    drawn = hyperparameters._draw_rows(merged, 4000, generator)
    scores = (density / merged.weight)[drawn]
    z = (scores.mean() - density.sum() / len(y)) / (scores.std() / 4000**0.5)
    assert abs(float(z)) < 4
    plain = hyperparameters._draw_rows(as_data(*smooth(10)), 4000, generator)
    assert stats.chisquare(np.bincount(plain.numpy(), minlength=10)).pvalue > 1e-4


def test_fit_leave_one_out_improves_the_score_within_bounds(generator):
    data = as_data(*smooth(150))
    kernel = ConstantKernel(1.0, "fixed") * RBF([0.3, 0.3], (0.1, 2.5)) + WhiteKernel(1.0)
    settings = SearchSettings(n_neighbors=10, batch_size=64, n_steps=60, learning_rate=0.1)
    fit = fit_leave_one_out(kernel, data, generator=generator, settings=settings)
    every = torch.arange(150)
    before, after = (
        leave_one_out_densities(k, data, every, every, 10).mean() for k in (kernel, fit.kernel)
    )
    assert after > before + 0.3
    theta, bounds = fit.kernel.theta, kernel.bounds
    assert np.all(theta >= bounds[:, 0] - 1e-12) and np.all(theta <= bounds[:, 1] + 1e-12)
    assert fit.method == "leave-one-out" and len(fit.history) == 60
    short, long = fit.kernel.k1.k2.length_scale
    assert short < long  # the first input varies faster


# ---------------------------------------------------------------------------- whole search

QUICK = SearchSettings(
    exact_rows=40,
    subset_size=40,
    dense_max_iter=15,
    n_neighbors=10,
    batch_size=32,
    n_steps=16,
    n_score_rows=64,
)
WIGGLY = ActiveDims(Cosine(0.5, "fixed"), [0]) * RBF(5.0) + WhiteKernel(0.1)
SMOOTH = 1.0 * RBF([1.0, 1.0]) + WhiteKernel(0.1)


@pytest.mark.parametrize("n", [30, 120], ids=["dense", "refined"])
@pytest.mark.parametrize("families", [[SMOOTH, WIGGLY], [WIGGLY, SMOOTH]], ids=["first", "second"])
def test_fit_hyperparameters_picks_the_better_family(families, n, generator):
    fit = fit_hyperparameters(families, as_data(*smooth(n)), generator=generator, settings=QUICK)
    assert "RBF" in repr(fit.kernel) and "Cosine" not in repr(fit.kernel)
    assert np.isfinite(fit.score) == (n > QUICK.subset_size)


def test_fit_hyperparameters_of_few_rows_is_the_marginal_likelihood(generator):
    data = as_data(*smooth(30))
    fit = fit_hyperparameters([SMOOTH], data, generator=generator, settings=QUICK)
    alone = fit_marginal_likelihood(SMOOTH, data, max_iter=QUICK.dense_max_iter)
    assert fit.method == "marginal likelihood"
    assert fit.log_marginal_likelihood > alone.log_marginal_likelihood - 1e-2
    evidence = ExactEvidence(fit.kernel, data).value(fit.kernel.theta)
    np.testing.assert_allclose(fit.log_marginal_likelihood, evidence, rtol=1e-9)


@pytest.mark.parametrize("families", [[SMOOTH], [SMOOTH, WIGGLY]], ids=["one", "two"])
def test_fit_hyperparameters_is_no_worse_than_the_dense_fit(families, generator):
    """The refined kernel and the one of the subset are scored on the same rows."""
    data = as_data(*smooth(120))
    fit = fit_hyperparameters(families, data, generator=generator, settings=QUICK)
    twin = torch.Generator().manual_seed(0)
    subset = torch.randperm(120, generator=twin)[: QUICK.subset_size]
    dense = hyperparameters.dense_fits(families, data.take(subset), QUICK, StopRecorder(None))[0]
    score = hyperparameters._Comparison(data, QUICK, twin)
    assert fit.score >= score(dense).score - 1e-12
    assert (fit.of_evidence or fit.kernel) == dense.kernel
    np.testing.assert_allclose(fit.score, score(fit).score, rtol=1e-12)


def test_fit_hyperparameters_refines_a_family_that_is_far_behind(monkeypatch, generator):
    """What some hundred observations say of families that are not refined is no choice of one."""
    refined, refine = [], hyperparameters._refine

    def recorded(fit, *args):
        refined.append(type(fit.kernel.k1.k2))
        return refine(fit, *args)

    monkeypatch.setattr(hyperparameters, "_refine", recorded)
    rough = 1.0 * Matern([1.0, 1.0], nu=0.5) + WhiteKernel(0.1)
    smooth_data = as_data(*smooth(120, noise=0.01))
    fit_hyperparameters([rough, SMOOTH], smooth_data, generator=generator, settings=QUICK)
    assert refined == [RBF, Matern, RBF]  # shortly, and the best of all at length


def held_out_log_density(kernel, X, y, X_new, y_new):
    """Mean of the exact GP's, by scikit-learn."""
    model = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit(X, y)
    mean, std = model.predict(X_new, return_std=True)  # of observations, the noise included
    return stats.norm(mean, std).logpdf(y_new).mean()


def test_fit_hyperparameters_of_several_targets_by_neighbours_sees_all(generator):
    """Columns that one target alone depends on, and the noise that they share."""
    X, _ = smooth(400)
    Y = np.sin(2 * X) + 0.1 * np.random.default_rng(0).normal(size=X.shape)
    settings = SearchSettings(exact_rows=50, subset_size=40, n_neighbors=8, n_steps=60)
    kernels = [1.0 * Matern([1.0, 1.0], nu=nu) + WhiteKernel(0.1) for nu in (1.5, 2.5)]
    found = fit_hyperparameters(kernels, as_data(X, Y), generator=generator, settings=settings)
    assert found.kernel.k1.k2.nu == 2.5
    assert (found.kernel.k1.k2.length_scale < 4).all()
    assert found.kernel.k2.noise_level == pytest.approx(0.01, rel=0.5)


def test_another_start_of_several_targets_has_to_be_worth_it_for_each(monkeypatch, generator):
    """Of copies of a target as of one, whose evidence is less by a factor."""
    X, y = smooth(30)
    kernel = 1.0 * RBF(1e3, (1e-2, 1e5)) + WhiteKernel(0.5, (1e-4, 1e1))
    datasets = [Data(torch.tensor(X), torch.tensor(Y)) for Y in (y, np.stack([y, -y], 1))]
    here = [hyperparameters.fit_marginal_likelihood(kernel, data) for data in datasets]
    settings = SearchSettings()

    def found(data):
        return fit_hyperparameters([kernel], data, generator=generator, settings=settings)

    gain = found(datasets[0]).log_marginal_likelihood - here[0].log_marginal_likelihood
    assert gain > 1
    for share, moves in ((0.8, True), (1.2, False)):
        monkeypatch.setattr(hyperparameters, "LEAST_EFFECT", share * gain / 30)
        for data, fit in zip(datasets, here, strict=True):
            assert (found(data).log_marginal_likelihood > fit.log_marginal_likelihood) == moves


def test_fit_hyperparameters_keeps_length_scales_that_neighbourhoods_cannot_see(generator):
    """Among the nearest a sine is a plane: its scale of 2 went to 3.9, the density to .41 nats."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (900, 2))
    y = np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.standard_normal(len(X))
    settings = SearchSettings(
        exact_rows=0,
        subset_size=200,
        n_neighbors=24,
        n_steps=60,
        learning_rate=0.1,
        **{**GLOBAL_SEARCH, "n_compared": 96, "n_score_rows": 256},
    )
    data = as_data(X[:500], y[:500])
    fit = fit_hyperparameters([SMOOTH], data, generator=generator, settings=settings)
    found = held_out_log_density(fit.kernel, X[:500], y[:500], X[500:], y[500:])
    assert found > -np.log(0.1 * np.sqrt(2 * np.pi * np.e)) - 0.03  # what the noise allows


def test_fit_hyperparameters_with_nothing_to_learn_returns_the_kernel(generator):
    fixed = RBF(0.7, "fixed") + WhiteKernel(0.1, "fixed")
    data = as_data(*smooth(20))
    assert fit_hyperparameters([fixed], data, generator=generator).kernel is fixed
    one_row = data.take(torch.tensor([3]))
    fit = fit_hyperparameters([SMOOTH], one_row, generator=generator)
    assert fit.kernel is SMOOTH and fit.method == "initial"


def comparison(generator, n=150, noise=0.5):
    return hyperparameters._Comparison(as_data(*smooth(n, noise=noise)), QUICK, generator)


def test_best_start_finds_back_from_a_noise_of_nearly_zero(generator):
    on = comparison(generator)
    start = HyperparameterFit(1.0 * RBF([1.0, 1.0]) + WhiteKernel(1e-5))
    found = on.with_best_start(start)
    assert on(found).score > on(start).score + 0.5
    assert split_noise(found.kernel)[1].noise_level in NOISE_GRID
    np.testing.assert_allclose(found.kernel.theta[:-1], start.kernel.theta[:-1])


def test_best_start_keeps_bounds_fixed_values_and_good_fits(generator):
    on = comparison(generator)
    fixed = HyperparameterFit(RBF() + WhiteKernel(1e-5, "fixed"))
    assert on.with_best_start(fixed).kernel.k2 == fixed.kernel.k2
    narrow = HyperparameterFit(RBF() + WhiteKernel(1e-5, (1e-6, 0.02)))
    found = on.with_best_start(narrow).kernel
    assert split_noise(found)[1].noise_level <= 0.02
    np.testing.assert_array_equal(found.bounds, narrow.kernel.bounds)
    best = fit_marginal_likelihood(SMOOTH, on.data)
    assert on(on.with_best_start(best)).score >= on(best).score


def test_best_start_finds_length_scales_that_a_subset_does_not_show(generator):
    """Among 40 rows the spacing is .3 of the period of a sine, among 2000 it is .04."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (2000, 2))
    y = np.sqrt(2) * np.sin(12 * X[:, 0]) + 0.1 * rng.standard_normal(len(X))
    on = hyperparameters._Comparison(as_data(X, y), QUICK, generator)
    noise_alone = HyperparameterFit(0.01 * RBF([1e4, 1e4]) + WhiteKernel(1.0))
    found = on.with_best_start(noise_alone)
    assert on(found).score > on(noise_alone).score + 0.3


@covering(length=[0.03, 1.0, 30.0, 1000.0], exact_rows=[400, 0])
def test_fit_hyperparameters_does_not_depend_on_the_start(length, exact_rows, generator):
    """From a length scale of 30 the sine was noise, of variance .5 in place of .02."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (250, 2))
    y = np.sin(2 * X[:, 0]) + 0.3 * X[:, 1] + 0.1 * rng.standard_normal(len(X))
    data = as_data(X, y / y.std())
    settings = SearchSettings(
        exact_rows=exact_rows, subset_size=120, n_neighbors=16, n_steps=20, n_score_rows=128
    )
    kernel = 1.0 * RBF([length, length]) + WhiteKernel(0.1)
    found = fit_hyperparameters([kernel], data, generator=generator, settings=settings).kernel
    noise = split_noise(found)[1].noise_level * y.var()
    assert 0.005 < noise < 0.02  # .01
    assert 0.8 < found.k1.k2.length_scale[0] < 2.5


def test_objectives_do_not_need_sorted_or_merged_data():
    """Order of rows is free: the two ways to hold the same data agree."""
    X, y = smooth(20)
    kernel = KERNELS["ard"]()
    unsorted = Data(torch.tensor(X), torch.tensor(y))
    found = [ExactEvidence(kernel, data)(kernel.theta) for data in (unsorted, as_data(X, y))]
    np.testing.assert_allclose(found[0].value, found[1].value, rtol=1e-12)
    np.testing.assert_allclose(found[0].gradient, found[1].gradient, rtol=1e-9)


def _left_out(signal, level, jitter, X, y):
    """Mean log density of each observation given all others, by a dense solution for each."""
    moments = (left_out(signal(X), level + jitter, y, i) for i in range(len(X)))
    mean, var = np.transpose(list(moments))
    return stats.norm.logpdf(y, mean, np.sqrt(var + level)).mean()


@pytest.mark.parametrize(
    ("jump", "jitter", "bounds"),
    [
        (1.0, 0.0, (1e-9, 1.0)),
        (1.0, 0.0, (1e-9, 1e-4)),
        (0.0, 0.0, (1e-9, 1.0)),
        (0.05, 0.1, (1e-9, 1.0)),
    ],
)
def test_little_noise_is_judged_by_all_observations(jump, jitter, bounds, monkeypatch):
    """One near another that it differs from is impossible without noise, unless there is jitter."""
    monkeypatch.setattr(hyperparameters, "JUDGING_NEIGHBORS", 1000)
    X = np.random.default_rng(0).uniform(0, 1, (80, 1))
    y = np.sin(3 * X[:, 0])
    X[-1], y[-1] = X[0] + 1e-7, y[0] + jump
    kernel = 1.0 * Matern(0.5, nu=1.5) + WhiteKernel(1e-8, bounds)
    data, generator = Data(torch.tensor(X), torch.tensor(y)), torch.Generator().manual_seed(0)
    settings = SearchSettings(jitter=jitter)
    comparison = hyperparameters._Comparison(data, settings, generator)
    found = comparison.with_enough_noise(HyperparameterFit(kernel)).kernel
    most = min(0.1, bounds[1])
    levels = np.geomspace(1e-8, most, 2 + round(2 * np.log10(most / 1e-8)))
    means = [_left_out(kernel.k1, level, jitter, X, y) for level in levels]
    best = levels[np.argmax(means)] if max(means) > means[0] + LEAST_EFFECT else 1e-8
    assert found.k2.noise_level == pytest.approx(best)
    assert (best > 1e-6) == (jump > 0 and jitter == 0)
    assert found.k1 == kernel.k1 and found.k2.noise_level_bounds == bounds
    fixed = kernel.k1 + WhiteKernel(1e-8, "fixed")
    assert comparison.with_enough_noise(HyperparameterFit(fixed)).kernel == fixed
