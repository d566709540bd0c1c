"""Hyper-parameter search of classifiers: what it finds, what it leaves alone, odd inputs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime
from scipy.special import logit
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data
from skgp.learning import classification_hyperparameters
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    directions,
    fit_classification_hyperparameters,
    rare_total,
    stratified_order,
    subset_rows,
)
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_leave_one_out
from skgp.likelihoods import Bernoulli
from tests.covering import covering, slow_case
from tests.reference import laplace_evidence as oracle
from tests.reference.kernels import naive_gram

QUICK = ClassificationSettings(
    subset_size=120,
    screen_size=60,
    n_score_rows=120,
    max_iter=15,
    neighbor_search=SearchSettings(n_neighbors=12, batch_size=48, n_steps=30),
)


def labelled(n=600, d=2, length_scale=0.5, seed=0):
    """Labels of a latent function that varies with the first column alone."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1.5, 1.5, size=(n, d))
    latent = 4.0 * np.sin(X[:, 0] / length_scale)
    Y = np.where(rng.uniform(size=n) < 1 / (1 + np.exp(-latent)), 1.0, -1.0)
    return torch.tensor(X), torch.tensor(Y)[:, None]


def one_vs_rest(n=240, c=3, seed=0):
    X, _ = labelled(n, seed=seed)
    label = ((X[:, 0] + 1.5) * c / 3.001).long()
    return X, torch.where(label[:, None] == torch.arange(c), 1.0, -1.0).double()


def base_rate(Y):
    share = ((Y > 0).double().sum(0) + 0.5) / (len(Y) + 1)
    return torch.tensor(logit(share.numpy()))


def ard(d=2, start=1.0, nu=np.inf):
    scales = start * np.ones(d)
    shape = RBF(scales) if nu == np.inf else Matern(scales, nu=nu)
    return ConstantKernel(2.0, (1e-3, 1e5)) * shape


def search(kernels, X, Y, seed=0, settings=QUICK, row_weight=None, **kwargs):
    kwargs.setdefault("offset", base_rate(Y))
    kwargs.setdefault("likelihood", Bernoulli("logit"))
    generator = torch.Generator().manual_seed(seed)
    return fit_classification_hyperparameters(
        kernels, Data(X, Y, row_weight), generator=generator, settings=settings, **kwargs
    )


# ------------------------------------------------------------------------------- what is found


def test_search_on_few_rows_reaches_the_evidence_of_scikit_learn():
    X, Y = labelled(60)
    kernel = ConstantKernel(2.0, (1e-3, 1e5)) * RBF(1.0)
    best = GaussianProcessClassifier(kernel).fit(X.numpy(), Y[:, 0].numpy())
    found = search([kernel], X, Y, offset=torch.zeros(1, dtype=torch.float64))
    expected = best.log_marginal_likelihood_value_
    np.testing.assert_allclose(found.log_marginal_likelihood, expected, atol=0.02)
    assert found.method == "Laplace evidence"


@pytest.mark.parametrize("link", [slow_case("logit"), "probit"])
def test_search_finds_a_short_length_scale_and_a_long_one_for_an_irrelevant_column(link):
    X, Y = labelled(300)
    settings = replace(QUICK, subset_size=200, n_score_rows=100)
    found = search([ard(start=2.0)], X, Y, settings=settings, likelihood=Bernoulli(link)).kernel
    relevant, irrelevant = found.k2.length_scale
    assert 0.3 < relevant < 1.5  # sin(x / 0.5) bends over lengths of about 0.5 to 1
    assert irrelevant > 2 * relevant


def test_search_takes_ratios_from_a_regression_on_all_rows(monkeypatch):
    X, Y = labelled(900)
    thorough = SearchSettings(n_neighbors=24, batch_size=64, n_steps=60)
    fitted = []

    def recording(kernel, data, **kwargs):
        fitted.append((kernel, data, fit_leave_one_out(kernel, data, **kwargs)))
        return fitted[-1][2]

    monkeypatch.setattr(classification_hyperparameters, "fit_leave_one_out", recording)
    search([ard()], X, Y, settings=replace(QUICK, neighbor_search=thorough))
    ((kernel, data, fit),) = fitted
    assert len(data.X) == 900
    # Labels on the scale of the kernel, so that its amplitude need not move far.
    np.testing.assert_allclose(data.y.var().item(), kernel.k1.k1.constant_value, rtol=1e-9)
    relevant, irrelevant = fit.kernel.k1.k2.length_scale
    assert irrelevant > 1.5 * relevant


@pytest.mark.parametrize(
    ("scales", "method"), [([0.5, 50.0], "leave-one-out"), ([50.0, 0.5], "Laplace evidence")]
)
def test_search_keeps_the_ratios_of_the_regression_where_they_score_better(
    scales, method, monkeypatch
):
    def known(kernel, data, **kwargs):
        theta = kernel.theta.copy()
        theta[1:3] = np.log(scales)
        return HyperparameterFit(kernel.clone_with_theta(theta))

    monkeypatch.setattr(classification_hyperparameters, "fit_leave_one_out", known)
    found = search([ard()], *labelled(400))
    assert found.method == method
    assert (found.kernel.k2.length_scale[1] > 90 * found.kernel.k2.length_scale[0]) == (
        method == "leave-one-out"
    )


@pytest.mark.parametrize(
    ("n", "kernel", "change"),
    [
        (400, 2.0 * RBF(1.0), {}),
        (400, ard(), {"max_free": 1}),
        (240, ard(), {}),
        (400, ard(), {"neighbor_rows": 0}),
    ],
    ids=["one length scale", "tied", "few rows", "off"],
)
def test_search_makes_no_regression_without_ratios_or_further_rows(n, kernel, change, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("regression on the labels")

    monkeypatch.setattr(classification_hyperparameters, "fit_leave_one_out", forbidden)
    search([kernel], *labelled(n), settings=replace(QUICK, **change))


def test_search_of_several_kernels_returns_that_of_the_best_score():
    X, Y = labelled(300)
    frozen = ConstantKernel(1.0, "fixed") * RBF(1e-3, "fixed")  # every row on its own
    found = search([frozen, ard(), frozen], X, Y)
    assert np.size(found.kernel.k2.length_scale) == 2


def test_the_score_of_a_kernel_is_that_of_probabilities_as_they_are_predicted():
    """A sure function of noisy labels: the mode alone would lose .4 nats a label more."""
    X, Y = labelled(150)
    held = (399.99, 400.01)
    kernel = ConstantKernel(400.0, held) * RBF(0.5, "fixed")
    settings = ClassificationSettings(few_rows=100, n_score_rows=50)
    zero = torch.zeros(1, dtype=torch.float64)
    found = search([kernel], X, Y, settings=settings, offset=zero)
    order = stratified_order(Data(X, Y), torch.Generator().manual_seed(0)).numpy()
    kept, new = order[:100], order[100:]
    y, K = Y[:, 0].numpy(), naive_gram(kernel, X.numpy())
    likelihood = oracle.logit(y[kept])
    g = oracle.laplace(K[np.ix_(kept, kept)], likelihood)[0]
    _, slope, second = likelihood(g)
    W = -second
    cross = K[np.ix_(kept, new)]
    mean = cross.T @ slope
    solved = np.linalg.solve(K[np.ix_(kept, kept)] + np.diag(1 / W), cross)
    variance = 400.0 - np.einsum("ij,ij->j", cross, solved)
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    f = y[new] * (mean + np.sqrt(variance) * nodes[:, None])
    density = np.log(weights @ (1 / (1 + np.exp(-f))) / weights.sum()).mean()
    at_mode = -np.logaddexp(0, -y[new] * mean).mean()
    assert density > at_mode + 0.4
    evidence = found.log_marginal_likelihood / 100
    assert found.score == pytest.approx(0.5 * (evidence + density), abs=2e-3)


def test_search_gives_a_long_vector_the_ratios_that_numbers_suggest():
    X, Y = labelled(300, d=6)
    found = search([ard(6)], X, Y, settings=replace(QUICK, max_free=2)).kernel.k2.length_scale
    assert found[0] < 0.3 * found[1:].min()


def test_search_keeps_the_ratios_of_a_long_vector_and_moves_it_within_bounds():
    X, Y = labelled(300, d=3)
    start = np.array([0.1, 0.2, 0.4])
    kernel = 2.0 * RBF(start, np.stack([start / 2, start * 3], axis=1))
    found = search([kernel], X, Y, settings=replace(QUICK, max_free=2)).kernel.k2.length_scale
    np.testing.assert_allclose(found / start, (found / start)[0])
    assert 1.0 < (found / start)[0] <= 3 * (1 + 1e-9)


def test_search_leaves_fixed_hyperparameters_alone():
    X, Y = labelled(300)
    kernel = ConstantKernel(3.0, "fixed") * RBF([1.0, 1.0])
    assert search([kernel], X, Y).kernel.k1.constant_value == 3.0
    frozen = ConstantKernel(3.0, "fixed") * RBF([1.0, 1.0], "fixed")
    found = search([frozen], X, Y)
    assert (found.kernel, found.method) == (frozen, "initial")


def test_search_of_several_columns_shares_one_kernel():
    X, Y = one_vs_rest()
    found = search([ard()], X, Y).kernel.k2.length_scale
    assert found[1] > 1.5 * found[0]


# --------------------------------------------------------------------------------- odd inputs


def _constant_column(X, Y):
    return torch.cat([X, torch.full_like(X[:, :1], 7.0)], dim=1), Y


def _repeated_rows(X, Y):
    return X[torch.arange(len(X)) // 10 * 10], Y


def _imbalanced(X, Y):
    return X, torch.where(X[:, :1] > 1.47, 1.0, -1.0).double()  # one in a hundred


def _outliers(X, Y):
    X = X.clone()
    X[::50] *= 1e6
    return X, Y


def _single_positive(X, Y):
    return X, torch.where(torch.arange(len(X))[:, None] == 17, 1.0, -1.0).double()


@covering(
    odd=[_constant_column, _repeated_rows, _imbalanced, _outliers, _single_positive], n=[201, 1, 2]
)
def test_search_survives(odd, n):
    X, Y = odd(*(each[-n:] for each in labelled(400)))
    found = search([ard(X.shape[1])], X, Y)
    low, high = found.kernel.bounds.T
    assert np.isfinite(found.score)
    assert (found.kernel.theta >= low - 1e-9).all() and (found.kernel.theta <= high + 1e-9).all()


def test_search_refuses_a_white_kernel():
    X, Y = labelled(30)
    with pytest.raises(ValueError, match="Remove the WhiteKernel"):
        search([ard() + WhiteKernel(0.1)], X, Y)


# --------------------------------------------------------------------------------------- parts


def test_stratified_order_keeps_the_shares_of_the_classes_in_every_beginning(generator):
    labels = np.repeat([0, 1, 2], [600, 390, 10])
    Y = torch.tensor(np.where(labels[:, None] == np.arange(3), 1.0, -1.0))
    data = Data(torch.arange(1000.0)[:, None], Y)
    order = stratified_order(data, generator)
    assert sorted(order.tolist()) == list(range(1000))
    assert set(labels[order[:3]]) == {0, 1, 2}
    for size in (50, 100, 500, 901):
        counts = np.bincount(labels[order[:size]], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.39, 0.01])).max() <= 2
    assert not torch.equal(order, stratified_order(data, generator))


def test_stratified_order_keeps_labels_of_equal_inputs_together(generator):
    X = torch.arange(60.0)[:, None] % 20
    Y = torch.where(torch.arange(60) % 3 == 0, 1.0, -1.0)[:, None]
    order = stratified_order(Data(X, Y), generator)
    inputs = X[order, 0]
    assert sorted(order.tolist()) == list(range(60))
    assert int((inputs[1:] != inputs[:-1]).sum()) == 19


@pytest.mark.parametrize(
    ("n", "c", "expected"),
    [(1, 1, (1, 0)), (200, 1, (200, 0)), (300, 1, (200, 100)), (5000, 2, (1000, 1000))],
)
def test_subset_rows_holds_out_rows_beyond_a_few(n, c, expected):
    assert subset_rows(n, c, ClassificationSettings()) == expected
    size, _ = subset_rows(10**5, 10, ClassificationSettings())
    assert 0.95 < 10 * size**3 / (2 * 1000**3) < 1.05  # ten columns cost twice one


def test_directions_move_long_vectors_as_a_whole():
    kernel = 2.0 * RBF([1.0, 2.0, 3.0]) + ConstantKernel(1.0, "fixed") * Matern([1.0, 1.0], nu=1.5)
    np.testing.assert_array_equal(directions(kernel, 3), np.eye(6))
    assert directions(RBF(1.0, "fixed"), 3).shape == (0, 0)
    tied = directions(kernel, 1)
    np.testing.assert_array_equal(tied.argmax(1), [0, 1, 1, 1, 2, 2])
    np.testing.assert_array_equal(tied.sum(1), np.ones(6))
    assert directions(kernel, 2).shape == (6, 4)


@pytest.mark.parametrize("max_free", [1, 3])
def test_objective_gradient_equals_finite_differences(max_free):
    X, Y = one_vs_rest(60)
    X = torch.cat([X, X[:, :1].cos()], dim=1)
    kernel = 2.0 * RBF([1.0, 0.7, 2.0])
    captured = []

    def minimize(objective, z, bounds, **kwargs):
        captured.append(objective)
        return z, 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification_hyperparameters, "minimize_within", minimize)
        search([kernel], X, Y, settings=replace(QUICK, max_free=max_free))
    objective = captured[-1]
    z = np.linspace(-0.3, 0.4, objective.moves.shape[1])
    numerical = approx_fprime(z, lambda z: objective(z)[0], 1e-6)
    np.testing.assert_allclose(objective(z)[1], numerical, atol=1e-5)
    assert objective.moves.shape[1] == (2 if max_free == 1 else 4)


@pytest.mark.parametrize(
    ("Y", "expected"),
    [([[1.0], [-1.0], [-1.0]], 1), ([[1.0, -1.0, -1.0]] * 3 + [[-1.0, 1.0, -1.0]] * 2, 2)],
)
def test_rare_total_counts_labels_beside_the_most_frequent_class(Y, expected):
    assert rare_total(torch.tensor(Y)) == expected


def test_search_ignores_rows_of_weight_zero():
    X, Y = labelled(300)
    weight = torch.ones(400, dtype=X.dtype)
    weight[300:] = 0.0
    padded = torch.cat([X, X[:100]]), torch.cat([Y, -Y[:100]])
    offset = base_rate(Y)
    found = search([ard()], *padded, row_weight=weight, offset=offset)
    ones = torch.ones(300, dtype=X.dtype)
    expected = search([ard()], X, Y, row_weight=ones, offset=offset)
    assert found.kernel == expected.kernel
