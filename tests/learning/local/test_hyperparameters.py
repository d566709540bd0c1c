"""Hyper-parameters before q(u): observations on a scale of Gaussian noise; labels as numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel

from skgp.data import Data
from skgp.inference.neighbors.posterior import KrigingModel, LabelLink
from skgp.learning.local import hyperparameters as module
from skgp.learning.local.hyperparameters import (
    fit_link,
    label_targets,
    search_hyperparameters,
    search_label_kernel,
)
from skgp.learning.search import HyperparameterFit
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT

LIKELIHOODS = {"gaussian": Gaussian(1.0), "student_t": StudentT(1.0), "poisson": Poisson()}


def kernel(length_scale=1.0):
    return ConstantKernel(1.0, (1e-3, 1e3)) * RBF([length_scale] * 2) + WhiteKernel(0.5)


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    return rng, X, np.sin(3 * X[:, 0])  # of the first column alone


def search(y, X, likelihood, kernels=None, generator=None, **options):
    data = Data(torch.from_numpy(X), torch.from_numpy(y))
    data = data.merged(any_likelihood=likelihood != "gaussian")
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


def test_detail_that_some_rows_missed_is_learned_from_all_labels(monkeypatch):
    """With the amplitude that goes with the noise of the link."""
    monkeypatch.setattr(module.defaults, "SEARCHED_ROWS", 1000)
    for settings in (module.defaults.SHORT_SEARCH, module.defaults.LONG_SEARCH):
        monkeypatch.setitem(settings, "batch_size", 64)
        monkeypatch.setitem(settings, "n_steps", 40)
    data = labelled(1400, 2)
    coarse = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0])
    probit, logit = (
        search_label_kernel(
            HyperparameterFit(coarse),
            [coarse],
            data,
            n_neighbors=16,
            n_points=300,
            information=Bernoulli(link).information,
            generator=torch.Generator().manual_seed(0),
        ).kernel
        for link in ("probit", "logit")
    )
    scales = probit.k2.length_scale
    assert scales[0] < 0.5 and scales[1] > 3 * scales[0]
    np.testing.assert_allclose(logit.k2.length_scale, scales)
    ratio = logit.k1.constant_value / probit.k1.constant_value
    assert ratio == pytest.approx(Bernoulli("probit").information / 0.25)


def test_kernel_that_suits_the_labels_is_kept():
    data = labelled(1500, 2)
    fine = HyperparameterFit(ConstantKernel(4.0, "fixed") * RBF([0.15, 10.0], "fixed"))
    options = {"n_neighbors": 16, "generator": torch.Generator().manual_seed(0)}
    coarse = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0], (2.0, 10.0))
    assert search_label_kernel(fine, [coarse], data, **options) is fine
    few = data.take(torch.arange(500))
    assert search_label_kernel(fine, [coarse], few, **options) is fine
    assert search_label_kernel(fine, [fine.kernel], data, **options) is fine


def linked(model, n_rows=10_000):
    """The link of a model, and the losses of labels left out."""
    return fit_link(model, module._draw(model, torch.Generator(), n_rows))


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
    linked(m)
    (row, unit), each = units[0], torch.tensor([1.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(unit, each[labels][row])
    linked(replace(m, weight=0.5 * weight))
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
    found = linked(m, n)[0]
    assert (found.log_scales - scales).abs().max() < 0.3
    shift = found.intercept - found.intercept.mean() if c > 1 else found.intercept
    expected = intercept - intercept.mean() if c > 1 else intercept
    assert (shift - expected).abs().max() < 0.06
    got = found.log_probabilities(mean, var).exp().numpy()
    assert np.abs(got - p).max() < 0.02


def test_lapse_is_that_of_one_label_beyond_those_seen():
    X, labels = torch.rand(300, 2, dtype=torch.float64), torch.arange(300) % 2
    for weight, lapse in ((None, 1 / 302), (torch.full((300,), 2.0, dtype=torch.float64), 1 / 602)):
        Y = label_targets(labels, 2, X.dtype)
        m = module._labelled(KERNEL, Data(X, Y, weight), 32)
        assert linked(m)[0].lapse == pytest.approx(lapse)


def test_link_of_one_distinct_row_gives_its_frequencies():
    X = torch.zeros(10, 2, dtype=torch.float64)
    labels = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    m = module._labelled(KERNEL, Data(X, label_targets(labels, 2, X.dtype)), 32)
    mean, var = m.mean_and_variance(X[:1])
    p = linked(m)[0].log_probabilities(mean - m.offset, var).exp()
    assert 0.5 < p[0, 1] < 1
