"""BayesianGPRegressor on a device: equal to the CPU, few transfers."""

import pytest

from tests.devices.common import cases, check, fit_counts, predict_counts

CASES = cases(
    """
[BayesianGPRegressor]
few: optimizer=map
weighted: kernel=rational optimizer=map
few: n_keep=5 n_samples=128 min_ess=50 kernel=rbf
few: sampler=hmc n_samples=10 n_warmup=3 n_chains=2 n_keep=4 kernel=rbf
few: solver=cg sampler=sgld n_samples=4 n_warmup=2 n_chains=1 n_keep=2 kernel=rbf
"""
)
SLOW = cases(
    """
[BayesianGPRegressor]
few: solver=cg sampler=langevin n_samples=4 n_warmup=2 n_chains=1 n_keep=2
few: solver=cg sampler=mala n_samples=4 n_warmup=2 n_chains=1 n_keep=2
"""
)
MAP, SAMPLED = CASES[0], CASES[2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_routes_are_those_of_the_cpu(case, device):
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_langevin_chains_are_those_of_the_cpu(case, device):
    check(case, device)


def test_a_joint_prediction_crosses_once_each_way():
    counts = predict_counts(SAMPLED, "predict", return_cov=True)
    assert (counts["to_device"], counts["to_host"]) == (1, 1)


def test_draws_of_many_samples_cross_once():
    assert predict_counts(SAMPLED, "sample_y", n_samples=8)["to_host"] == 1


def test_a_search_takes_no_rows_back():
    # Little more than a transfer for each of the kernels that are compared.
    assert fit_counts(MAP)["to_host"] < 40
