"""Hyper-parameters before q(u): observations on a scale of Gaussian noise; labels as numbers."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data, distinct_observations, merge_replicates
from skgp.inference.neighbors.kriging import KrigingModel, LabelLink
from skgp.learning.local import hyperparameters as module
from skgp.learning.local.hyperparameters import (
    fit_link,
    krige_labels,
    label_targets,
    search_hyperparameters,
    search_label_kernel,
)
from skgp.learning.search import HyperparameterFit
from skgp.likelihoods import Gaussian, Poisson, StudentT
from tests.same import assert_same

LIKELIHOODS = {"gaussian": Gaussian(1.0), "student_t": StudentT(1.0), "poisson": Poisson()}


def kernel(length_scale=1.0):
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF([length_scale] * 2) + WhiteKernel(0.5)


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return rng, X, np.sin(3 * X[:, 0])  # of the first column alone


def search(y, X, likelihood, kernels=None, generator=None, **options):
    merge = merge_replicates if likelihood == "gaussian" else distinct_observations
    data = merge(X, y, None, torch.device("cpu"))
    return search_hyperparameters(
        [kernel()] if kernels is None else kernels,
        data,
        LIKELIHOODS[likelihood],
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t", "poisson"])
def test_search_finds_the_column_that_matters_and_the_noise(likelihood):
    rng, X, f = rows()
    y = {
        "gaussian": lambda: f + 0.2 * rng.standard_normal(300),
        "student_t": lambda: f + 0.2 * rng.standard_t(3, 300),
        "poisson": lambda: rng.poisson(25 * np.exp(f)).astype(float),
    }[likelihood]()
    found = search(y, X, likelihood)
    scales = found.kernel.k1.k2.length_scale
    assert scales[0] < 1.5 < 3 * scales[0] < scales[1]
    # 0.2^2; of counts 1 / 25 or so, on the scale of the logarithm.
    assert 0.02 < found.kernel.k2.noise_level < 0.12
    assert len(found.history) >= 2


def test_outliers_do_not_inflate_the_noise_of_student_t():
    rng, X, f = rows()
    y = f + 0.1 * rng.standard_normal(300)
    y[:15] += 20 * rng.standard_t(2, 15)
    robust, plain = (search(y, X, each).kernel.k2.noise_level for each in ("student_t", "gaussian"))
    assert robust < 0.1 and plain > 5 * robust


def test_search_chooses_among_kernels():
    rng, X, f = rows()
    rough = ConstantKernel(1.0) * Matern([1e3, 1e3], "fixed", nu=0.5) + WhiteKernel(0.5)
    y = f + 0.1 * rng.standard_normal(300)
    found = search(y, X, "gaussian", [rough, kernel()])
    assert isinstance(found.kernel.k1.k2, RBF)


def test_callback_ends_the_search():
    rng, X, f = rows(80)
    seen = []
    search(f, X, "gaussian", callback=lambda i, info: seen.append(info["loss"]) or len(seen) >= 2)
    assert len(seen) == 2 and np.isfinite(seen).all()


def test_search_leaves_the_data_alone():
    rng, X, f = rows(60)
    y = rng.poisson(5 * np.exp(f)).astype(float)
    data = distinct_observations(X, y, None, torch.device("cpu"))
    before = data.y.clone()
    search_hyperparameters([kernel()], data, Poisson(), generator=torch.Generator().manual_seed(0))
    assert isinstance(data, Data) and torch.equal(data.y, before)


# ---- labels as numbers

KERNEL = 1.5 * Matern([0.8, 1.3], nu=2.5)


def labelled(n, n_classes, seed=0):
    """Labels of fine detail along the first column alone."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.uniform(-2, 2, (n, 2)))
    codes = ((6 * X[:, 0]).floor() % n_classes).long()
    if n_classes == 2:
        return Data(X, 2.0 * codes[:, None].double() - 1)
    return Data(X, 2 * torch.nn.functional.one_hot(codes).double() - 1)


def test_detail_that_some_rows_missed_is_learned_from_all_labels():
    data = labelled(2500, 2)
    coarse = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0])
    found = search_label_kernel(
        HyperparameterFit(coarse),
        [coarse],
        data,
        n_neighbors=16,
        generator=torch.Generator().manual_seed(0),
    )
    scales = found.kernel.k2.length_scale
    assert scales[0] < 0.5 and scales[1] > 3 * scales[0]


def test_kernel_that_suits_the_labels_is_kept():
    data = labelled(1500, 2)
    fine = HyperparameterFit(ConstantKernel(4.0, "fixed") * RBF([0.15, 10.0], "fixed"))
    options = {"n_neighbors": 16, "generator": torch.Generator().manual_seed(0)}
    coarse = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0], (2.0, 10.0))
    assert search_label_kernel(fine, [coarse], data, **options) is fine
    few = data.take(torch.arange(500))
    assert search_label_kernel(fine, [coarse], few, **options) is fine
    assert search_label_kernel(fine, [fine.kernel], data, **options) is fine


# ---- link ---------------------------------------------------------------------------------------


def test_label_is_left_out_with_the_weight_of_its_class():
    """Of labels that weigh 5 nothing stays, of one that was given twice the other."""
    units = []

    class Recorded(KrigingModel):
        def leave_out(self, row, unit, value, others):
            units.append((row, unit))
            return super().leave_out(row, unit, value, others)

    X = torch.from_numpy(np.random.default_rng(0).normal(size=(30, 2)))
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
def test_fit_link_recovers_known_parameters(n_classes, monkeypatch):
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
    monkeypatch.setattr(module, "LINK_ROWS", n)
    found = fit_link(m, generator=torch.Generator()).link
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
        KERNEL, X, torch.from_numpy(labels), n_classes=n_classes, n_neighbors=8,
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
        KERNEL, X, labels, n_classes=2, n_neighbors=32, generator=generator, **keywords
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


def test_krige_labels_draws_no_more_rows_than_the_link_takes(generator, monkeypatch):
    X, labels, _ = noisy_labels(600)
    every = krige(X, labels, generator)
    monkeypatch.setattr(module, "LINK_ROWS", 200)
    some = krige(X, labels, generator)
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
