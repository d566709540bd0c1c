"""Kriging against dense GPs on each row's neighbours, and its link against known parameters."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.neighbors.kriging import KrigingModel, LabelLink, is_shared, merge_rows
from skgp.learning.local.label_kriging import fit_link, krige_labels, label_targets
from tests.reference import neighborhood
from tests.same import assert_same

KERNEL = 1.5 * Matern([0.8, 1.3], nu=2.5)
NOISE = 0.05
H = 12


def problem(n=150, c=2, *, seed=0, d=2):
    rng = np.random.default_rng(seed)
    X, T = rng.normal(size=(n, d)), rng.normal(size=(n, c))
    return torch.from_numpy(X), torch.from_numpy(T)


def model(X, T, weight=None, *, kernel=KERNEL, n_neighbors=H):
    offset = torch.linspace(0.5, 1.5, T.shape[1], dtype=torch.float64)
    return KrigingModel(kernel, NOISE, X, T, weight, offset, n_neighbors)


def left_out(m, rows, values):
    """Rows predicted where one observation of each is taken away."""
    ones = torch.ones(len(rows), dtype=torch.float64)
    weight = ones if m.weight is None else m.weight[rows]
    return m.leave_out(rows, ones, values, m.others(rows, is_shared(weight, ones)))


def dense_kriging(m, x, own=None):
    """Kriging at x by a loop over the rows; `own` is left out."""
    X, T, offset = m.X.numpy(), m.targets.numpy(), m.offset.numpy()
    noise = m.noise / (np.ones(len(X)) if m.weight is None else m.weight.numpy())
    scale = m.kernel.k2.length_scale
    a, var = neighborhood.weights(m.kernel, X, noise, x, m.n_neighbors, scale, out=own)
    return offset + a @ (T - offset), var


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("d", [2, 14])
def test_mean_and_variance_are_those_of_neighbours_that_fade_and_a_few_more(weighted, d):
    X, T = problem(d=d)
    weight = torch.linspace(0.2, 3.0, len(X), dtype=torch.float64) if weighted else None
    m = model(X, T, weight, kernel=1.5 * RBF(np.linspace(0.8, 3.0, d)))
    x = problem(40, seed=1, d=d)[0]
    mean, var = m.mean_and_variance(x)
    for i, row in enumerate(x.numpy()):
        expected, expected_var = dense_kriging(m, row)
        np.testing.assert_allclose(mean[i], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(var[i], expected_var, rtol=0, atol=1e-10)
    assert_same(m.mean(x), mean)


def test_mean_and_variance_do_not_depend_on_the_batch():
    m = model(*problem())
    x = problem(30, seed=1)[0]
    mean, var = m.mean_and_variance(x)
    alone = [m.mean_and_variance(row[None]) for row in x]
    torch.testing.assert_close(mean, torch.cat([a for a, _ in alone]), rtol=0, atol=1e-12)
    torch.testing.assert_close(var, torch.cat([b for _, b in alone]), rtol=0, atol=1e-12)


def test_mean_and_variance_of_few_rows_use_them_all():
    X, T = problem(5)
    mean, var = model(X, T).mean_and_variance(X)
    K, offset = KERNEL(X), np.array([0.5, 1.5])
    a = np.linalg.solve(K + NOISE * np.eye(5), K)
    np.testing.assert_allclose(mean, offset + a.T @ (T.numpy() - offset), atol=1e-12)
    np.testing.assert_allclose(var, np.diag(K - K @ a), atol=1e-12)


def test_leave_out_conditions_a_row_on_the_others_alone():
    X, T = problem()
    X = torch.cat([X, X[:20]])  # duplicates: the twin stays, by its index, and the row itself goes
    T = torch.cat([T, T[:20] + 1])
    m = model(X, T)
    rows = torch.arange(0, len(X), 7)
    mean, var = left_out(m, rows, T[rows])
    for i, row in enumerate(rows.tolist()):
        expected, expected_var = dense_kriging(m, X[row].numpy(), own=row)
        np.testing.assert_allclose(mean[i], expected, rtol=0, atol=1e-10)
        np.testing.assert_allclose(var[i], expected_var, rtol=0, atol=1e-10)


def test_leave_out_of_a_merged_row_is_that_of_one_of_its_copies():
    X, T = problem(60)
    copies = torch.cat([X, X[:10], X[:10]])
    targets = torch.cat([T, T[:10] + 1, T[:10] - 2])
    every = model(copies, targets, n_neighbors=len(copies))
    merged = model(*merge_rows(copies, targets), n_neighbors=len(copies))
    rows = torch.arange(30)
    expected = left_out(every, rows, T[rows])
    for got, want in zip(left_out(merged, rows, T[rows]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_merge_rows_keeps_the_dense_posterior():
    X, T = problem(40)
    X = torch.cat([X, X[:15]])
    T = torch.cat([T, T[:15] * 2])
    weight = torch.linspace(0.5, 2.0, len(X), dtype=torch.float64)
    x = problem(5, seed=1)[0]
    merged = model(*merge_rows(X, T, weight), n_neighbors=100)
    assert len(merged.X) == 40
    whole = model(X, T, weight, n_neighbors=100)
    for got, want in zip(merged.mean_and_variance(x), whole.mean_and_variance(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert merge_rows(X[:40], T[:40])[2] is None


def test_appended_is_the_model_of_all_rows():
    X, T = problem(80)
    first = model(X[:50], T[:50])
    grown = first.appended(X[40:], T[40:])  # ten rows come again
    whole = model(*merge_rows(torch.cat([X[:50], X[40:]]), torch.cat([T[:50], T[40:]])))
    x = problem(9, seed=1)[0]
    for got, want in zip(grown.mean_and_variance(x), whole.mean_and_variance(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert len(first.X) == 50 and grown.weight[40:50].tolist() == [2.0] * 10


def test_label_is_left_out_with_the_weight_of_its_class():
    """Of labels that weigh 5 nothing stays, of one that was given twice the other."""
    units = []

    class Recorded(KrigingModel):
        def leave_out(self, row, unit, value, others):
            units.append((row, unit))
            return super().leave_out(row, unit, value, others)

    X = problem(30)[0]
    labels = torch.arange(30) % 2
    weight = torch.where(labels == 1, 5.0, 1.0).double()
    weight[:4] *= 2  # rows given twice
    targets = label_targets(labels, 2, torch.float64)
    m = Recorded(RBF(), 0.1, X, targets, weight, torch.zeros(1, dtype=torch.float64), 5)
    fit_link(m, generator=torch.Generator())
    (row, unit), each = units[0], torch.tensor([1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(unit, each[labels][row])
    fit_link(replace(m, weight=0.5 * weight), generator=torch.Generator())
    (row, unit), each = units[1], torch.tensor([0.5, 2.5], dtype=torch.float64)
    few = torch.where(row < 4, 1.0, 0.5).double()  # labels that weigh less than 1 go as they are
    torch.testing.assert_close(unit, torch.where(labels[row] == 1, each[1], few))


class Predictions(KrigingModel):
    """A model that reports the leave-one-out predictions it is given."""

    def leave_out(self, row, unit, value, others):
        mean, var = self.__dict__["given"]
        return mean[row] + self.offset, var[row]


@pytest.mark.parametrize("n_classes", [2, 4])
def test_fit_link_recovers_known_parameters(n_classes):
    rng = np.random.default_rng(0)
    n, c = 40_000, 1 if n_classes == 2 else n_classes
    mean = torch.from_numpy(rng.uniform(-1, 1, size=(n, c)))
    var = torch.from_numpy(rng.uniform(0.0, 1.0, size=n))
    scales = torch.tensor([0.6, 0.1, 0.5], dtype=torch.float64).log()
    intercept = torch.tensor([0.3, -0.5, 0.0, 0.2], dtype=torch.float64)[:c]
    flat = torch.full((n_classes,), 1 / n_classes, dtype=torch.float64)
    true = LabelLink(intercept, scales, flat, 1e-12)
    p = true.log_probabilities(mean, var).exp().numpy()
    labels = torch.from_numpy((p.cumsum(1) < rng.uniform(size=(n, 1))).sum(1))
    targets = label_targets(labels, n_classes, torch.float64)
    X = torch.arange(n, dtype=torch.float64)[:, None]
    m = Predictions(RBF(), 0.1, X, targets, None, torch.zeros(c, dtype=torch.float64), 5)
    m.__dict__["given"] = (mean, var)
    found = fit_link(m, generator=torch.Generator(), n_rows=n).link
    assert (found.log_scales - scales).abs().max() < 0.3
    shift = found.intercept - found.intercept.mean() if c > 1 else found.intercept
    expected = intercept - intercept.mean() if c > 1 else intercept
    assert (shift - expected).abs().max() < 0.06
    got = found.log_probabilities(mean, var).exp().numpy()
    assert np.abs(got - p).max() < 0.02


@pytest.mark.parametrize("n_classes", [2, 3])
def test_krige_labels_gives_probabilities_that_are_neither_0_nor_1(n_classes, generator):
    rng = np.random.default_rng(0)
    centres = 6.0 * np.arange(n_classes)[:, None] * np.ones(2)
    labels = rng.integers(n_classes, size=200)  # far apart: every neighbourhood has one class
    X = torch.from_numpy(centres[labels] + 0.3 * rng.normal(size=(200, 2)))
    m = krige_labels(
        KERNEL, 1e-6, X, torch.from_numpy(labels), n_classes=n_classes, n_neighbors=8,
        generator=generator,
    )  # fmt: skip
    p = m.log_probabilities(torch.cat([X, X + 1e3])).exp()
    torch.testing.assert_close(p.sum(1), torch.ones(400, dtype=torch.float64), atol=1e-12, rtol=0)
    assert 0 < p.min() < 0.01 and p.max() < 1
    assert bool((p[:200].argmax(1) == torch.from_numpy(labels)).all())
    assert bool(m.link.log_scales.abs().max() < 30)


def noisy_labels(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, size=(n, 2))
    p = special.ndtr(2.5 * np.sin(1.5 * X[:, 0]) + X[:, 1] / 2)
    return torch.from_numpy(X), torch.from_numpy((rng.uniform(size=n) < p).astype(np.int64)), p


def krige(X, labels, generator, **keywords):
    return krige_labels(
        KERNEL, 0.7, X, labels, n_classes=2, n_neighbors=32, generator=generator, **keywords
    )


def test_krige_labels_is_calibrated(generator):
    X, labels, _ = noisy_labels(3000)
    x, new, p = noisy_labels(4000, seed=1)
    log_p = krige(X, labels, generator).log_probabilities(x)
    found = log_p[:, 1].exp().numpy()
    # Of the rows of each fifth by the predicted probability, as many are 1 as were predicted.
    for part in np.array_split(found.argsort(), 5):
        expected, observed = found[part].sum(), new.numpy()[part].sum()
        spread = np.sqrt((found[part] * (1 - found[part])).sum())
        assert abs(observed - expected) < 4 * spread
    best = -(p * np.log(p) + (1 - p) * np.log1p(-p)).mean()
    assert -log_p.gather(1, new[:, None]).mean() < best + 0.04


def test_krige_labels_counts_a_weight_of_two_as_the_row_twice(generator):
    X, labels, _ = noisy_labels(300)
    weight = torch.ones(300, dtype=torch.float64)
    weight[:100] = 2.0
    weighted = krige(X, labels, generator, weight=weight)
    twice = krige(torch.cat([X, X[:100]]), torch.cat([labels, labels[:100]]), generator)
    x = noisy_labels(20, seed=1)[0]
    torch.testing.assert_close(
        weighted.log_probabilities(x), twice.log_probabilities(x), rtol=0, atol=1e-8
    )


def test_krige_labels_draws_no_more_rows_than_asked(generator):
    X, labels, _ = noisy_labels(600)
    some = krige(X, labels, generator, n_link_rows=200)
    every = krige(X, labels, generator)
    x = noisy_labels(50, seed=1)[0]
    assert not torch.equal(some.link.log_scales, every.link.log_scales)
    assert (some.log_probabilities(x).exp() - every.log_probabilities(x).exp()).abs().max() < 0.15


def test_krige_labels_of_one_distinct_row_gives_its_frequencies(generator):
    X = torch.zeros(10, 2, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    p = krige(X, labels, generator).log_probabilities(X[:1]).exp()
    assert 0.5 < p[0, 1] < 1


def test_model_pickles_small_and_predicts_as_before(generator):
    X, labels, _ = noisy_labels(400)
    m = krige(X, labels, generator)
    before = m.log_probabilities(X)
    state = pickle.dumps(m)
    assert len(state) < 400 * 4 * 8 + 3000  # X, target and weight; no search tree
    assert_same(pickle.loads(state).log_probabilities(X), before)


def test_lapse_is_that_of_one_label_beyond_those_seen(generator):
    X, labels, _ = noisy_labels(300)
    assert krige(X, labels, generator).link.lapse == pytest.approx(1 / 302)
    weight = torch.full((300,), 2.0, dtype=torch.float64)
    assert krige(X, labels, generator, weight=weight).link.lapse == pytest.approx(1 / 602)
