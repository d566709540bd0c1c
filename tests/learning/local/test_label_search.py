"""The kernel of labels: learned from all of them where some rows missed their detail."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern

from skgp.data import Data
from skgp.learning.local import label_search as module
from skgp.learning.local.label_search import search_label_kernel
from skgp.learning.search import HyperparameterFit


def labelled(n, n_classes, seed=0):
    """Labels of fine detail along the first column alone."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.uniform(-2, 2, (n, 2)))
    codes = ((6 * X[:, 0]).floor() % n_classes).long()
    if n_classes == 2:
        return Data(X, 2.0 * codes[:, None].double() - 1)
    return Data(X, 2 * torch.nn.functional.one_hot(codes).double() - 1)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_detail_that_some_rows_missed_is_learned_from_all_labels(n_classes):
    data = labelled(2500, n_classes)
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
    data = labelled(2500, 2)
    fine = HyperparameterFit(ConstantKernel(4.0, "fixed") * RBF([0.15, 10.0], "fixed"))
    options = {"n_neighbors": 16, "generator": torch.Generator().manual_seed(0)}
    coarse = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0], (2.0, 10.0))
    assert search_label_kernel(fine, [coarse], data, **options) is fine
    few = data.take(torch.arange(500))
    assert search_label_kernel(fine, [coarse], few, **options) is fine
    assert search_label_kernel(fine, [fine.kernel], data, **options) is fine


def test_both_families_begin_at_the_scales_found(monkeypatch):
    """And neighbours are near among as many rows as inducing points can know of."""
    starts, settings = [], []

    def recorded(kernel, *args, **options):
        starts.append(kernel)
        settings.append(options["settings"])
        return HyperparameterFit(kernel)

    monkeypatch.setattr(module, "fit_leave_one_out", recorded)
    data = labelled(2500, 2)
    smooth = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0, 3.0])
    rough = ConstantKernel(4.0, (1e-3, 1e6)) * Matern([3.0, 3.0], nu=1.5)
    found = smooth.clone_with_theta(np.log([9.0, 0.5, 20.0]))
    options = {"n_neighbors": 16, "generator": torch.Generator().manual_seed(0)}
    search_label_kernel(HyperparameterFit(found), [smooth, rough], data, n_points=25, **options)
    kinds = [type(start.k1.k2) for start in starts[:2]]
    assert kinds == [RBF, Matern]
    for start in starts[:2]:
        np.testing.assert_allclose(start.k1.k2.length_scale, [0.5, 20.0])
        assert start.k1.k1.constant_value == pytest.approx(1.0)
    assert {each.max_candidates for each in settings} == {250}
