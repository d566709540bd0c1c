"""SWSGPRegressor and SWSGPClassifier on a device: equal to the CPU, few transfers."""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.data import Data
from skgp.inference.neighbors import assembly
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.likelihoods import Bernoulli
from tests.covering import slow
from tests.devices.common import (
    PRETENDED,
    cases,
    check,
    check_rows_join_a_stored_model,
    crossings,
    fit_counts,
    more_rows,
)

CASES = cases(
    """
[SWSGPRegressor]
weighted:
smooth2: dtype=float32 n_inducing=16 n_neighbors=6 max_iter=2 kernel=rbf
smooth2: n_inducing=16 n_neighbors=6 max_iter=2 solver=adam batch_size=30 kernel=rbf
wide: n_inducing=16 n_neighbors=6 max_iter=2 projection=2 joint_prediction=union
smooth2/parts: n_inducing=16 n_neighbors=6 max_iter=2 inducing=fixed kernel=rbf
outliers: likelihood=student_t n_inducing=15 n_neighbors=6 max_iter=3 optimizer=None

[SWSGPClassifier]
moons: n_inducing=16 n_neighbors=6 max_iter=3 init=greedy
iris: n_inducing=16 n_neighbors=6 max_iter=3 likelihood=logit optimizer=None
"""
)
SLOW = cases(
    """
[SWSGPRegressor]
smooth2: n_inducing=16 n_neighbors=6 max_iter=2 covariance=full init=k-means kernel=rbf
exposed: likelihood=poisson n_inducing=16 n_neighbors=6 max_iter=2 kernel=rbf
"""
)
NATURAL, MINIBATCHES = cases(
    """
[SWSGPRegressor]
smooth2: n_inducing=16 n_neighbors=6 optimizer=None
smooth2: n_inducing=16 n_neighbors=6 optimizer=None solver=adam batch_size=30 max_iter=4
"""
)


@pytest.fixture
def same_sums(monkeypatch):
    """The divergences are summed on the CPU as on a device: the same numbers in the same order."""
    for host in ("_HalfOnHost", "_HalfTable"):
        monkeypatch.setattr(assembly, host, assembly._HalfOnDevice)


@pytest.mark.parametrize("case", [*CASES, *slow(SLOW)], ids=lambda c: f"{c.estimator}-{c}")
def test_routes_are_those_of_the_cpu(case, device, same_sums):
    # The rows; at the first prediction, what they are searched by.
    check(case, device, crossed=(8, 1))


def test_divergences_summed_on_a_device_are_those_of_scipy():
    generator = torch.Generator().manual_seed(0)
    Z = torch.zeros(30, 1, dtype=torch.float64)
    halves = assembly._HalfOnHost(Z), assembly._HalfOnDevice(Z)
    for _ in range(2):
        active = torch.stack([torch.randperm(30, generator=generator)[:4] for _ in range(50)])
        upper = torch.randn(50, 10, generator=generator, dtype=torch.float64)
        for half in halves:
            half.add(active, upper)
    host, there = (
        assembly.compressed_rows(*half.symmetric(), (30, 30)).to_dense() for half in halves
    )
    torch.testing.assert_close(there, host, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", [NATURAL, MINIBATCHES], ids=str)
def test_no_more_crosses_for_more_rows(case):
    assert crossings(fit_counts(case, more_rows)) == crossings(fit_counts(case))


def test_no_more_crosses_for_more_minibatches():
    few = fit_counts(MINIBATCHES)
    assert crossings(fit_counts(MINIBATCHES, max_iter=12)) == crossings(few)


def test_rows_may_join_a_model_that_was_stored():
    check_rows_join_a_stored_model(NATURAL)


@pytest.mark.parametrize("n_classes", [2, 6])
def test_the_labels_of_all_classes_cross_together(n_classes):
    X = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    Y = 2 * torch.nn.functional.one_hot(torch.arange(20) % n_classes).double() - 1
    with PRETENDED.entered() as counts:
        X, Y = X.to("cuda"), Y.to("cuda")
        evidence = LaplaceEvidence.of(RBF(), Data(X, Y), Bernoulli("probit"))
        made = counts["to_host"]
        assert made <= 4
        evidence(RBF().theta)
        assert counts["to_host"] == made
