"""StateSpaceGPRegressor and StateSpaceGPClassifier on a device: equal to the CPU, few transfers."""

import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.markov.additive_bins import AdditiveStatistics, make_bins
from skgp.inference.markov.series import Lags
from skgp.inference.markov.short import DensePrior, DevicePrior
from skgp.kernels import Cosine, state_space
from skgp.kernels.sde_processes import Primitive
from skgp.kernels.sde_rational import Rational
from skgp.learning.markov.additive import BinnedEvidence
from skgp.learning.markov.search import Climb
from skgp.likelihoods import Gaussian
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

FIXED = cases(
    """
[StateSpaceGPRegressor]
gaps: kernel=matern32 optimizer=None
seasonal/parts: kernel=matern12 optimizer=None
seasonal/parts: n_inducing=8 kernel=matern12 optimizer=None
additive: n_inducing=8 optimizer=None posterior=mean_field
additive/parts: optimizer=None

[StateSpaceGPClassifier]
moons: optimizer=None
"""
)
SEARCHED = cases(
    """
[StateSpaceGPRegressor]
gaps: n_inducing=8 inducing=learned kernel=matern12 max_iter=2
few: likelihood=student_t n_inducing=4 kernel=matern12 max_iter=1
counts2: likelihood=poisson max_iter=2
additive: posterior=joint max_iter=3

[StateSpaceGPClassifier]
interval: n_inducing=4 kernel=matern12 max_iter=1
"""
)
PERIODIC = cases("[StateSpaceGPRegressor]\nseasonal: kernel=periodic max_iter=1")
SERIES, ADDITIVE = FIXED[2], FIXED[4]
#: Those of which the CPU draws by a dense factor, a device by the filter, of other random numbers.
DRAWN_APART = FIXED[0], FIXED[1], FIXED[3], *PERIODIC


def _draws(case):
    return ("draws of f", "samples") if case in DRAWN_APART else ()


@pytest.mark.parametrize("case", FIXED, ids=lambda case: f"{case.estimator}-{case}")
def test_routes_are_those_of_the_cpu(case, device):
    check(case, device, but=_draws(case), crossed=(8, 1))


@pytest.mark.parametrize("case", [*SEARCHED, *slow(PERIODIC)], ids=str)
def test_searches_are_those_of_the_cpu(case, device):
    # The root of a covariance that is nearly singular makes much of what the last digits of a
    # hyper-parameter are.
    check(case, device, but=("samples", *_draws(case)), crossed=(8, 1))


@pytest.mark.parametrize(
    "kernel", [2.0 * RBF(0.7), Matern(0.5, nu=1.5) * Cosine(0.4), RBF() + Matern()]
)
def test_covariances_by_transitions_are_those_in_closed_form(kernel, monkeypatch):
    """Of RBF those of the process that approximates it."""
    monkeypatch.setattr(Rational, "intended", Primitive.intended)
    times = torch.tensor([0.0, 0.1, 0.35, 1.2, 3.0], dtype=torch.float64)
    bar = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bar = bar + bar.T
    dynamics = state_space(kernel).at()
    here = DensePrior(dynamics, Lags.between(times.diff(prepend=times[:1])))
    there = DevicePrior(dynamics, times)
    torch.testing.assert_close(there.covariance, here.covariance, rtol=0, atol=1e-13)
    torch.testing.assert_close(there.pull(bar), here.pull(bar), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", [SERIES, ADDITIVE], ids=str)
def test_no_more_crosses_for_more_rows(case):
    assert crossings(fit_counts(case, more_rows)) == crossings(fit_counts(case))


@pytest.mark.parametrize("case", [SERIES, ADDITIVE], ids=str)
def test_rows_may_join_a_model_that_was_stored(case):
    check_rows_join_a_stored_model(case)


@pytest.mark.parametrize("n_columns", [2, 5])
def test_the_gradients_of_all_columns_cross_together(n_columns):
    X = torch.linspace(0, 1, 40 * n_columns, dtype=torch.float64).reshape(40, n_columns)
    with PRETENDED.entered() as counts:
        X, y = X.to("cuda"), X.sin().sum(1).to("cuda")
        statistics = AdditiveStatistics.empty(make_bins(X, n_bins=8))
        statistics.add(X, y)
        climb = Climb([Matern()] * n_columns, BinnedEvidence(statistics, 0.0, True), Gaussian(0.1))
        place = climb.start()
        before = counts["to_host"]
        climb.loss(place)
        assert counts["to_host"] == before + 1
