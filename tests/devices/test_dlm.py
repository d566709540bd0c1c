"""DLMGPRegressor and DLMGPClassifier on a device: equal to the CPU, few transfers."""

import pytest

from tests.devices.common import cases, check, fit_counts

CASES = cases(
    """
[DLMGPRegressor]
weighted:
smooth2: n_inducing=10 max_iter=5 kernel=linear
smooth2: n_inducing=6 max_iter=2 objective=fitc kernel=ard
smooth2: n_inducing=10 max_iter=2 objective=square_loss kernel=matern32 dtype=float32
smooth2: n_inducing=10 max_iter=5 init=greedy learning_rate=0.05 batch_size=20 optimizer=None
smooth2/parts: n_inducing=10 max_iter=3 optimizer=None
exposed: likelihood=poisson n_inducing=6 max_iter=1 kernel=matern32
counts1: likelihood=poisson n_inducing=8 max_iter=1 link=softplus gradient=bmc optimizer=None
heavy tails: likelihood=student_t n_inducing=8 max_iter=1 gradient=ups optimizer=None
[DLMGPClassifier]
iris: n_inducing=10 max_iter=2 likelihood=logit kernel=rbf
weighted classes: max_iter=20
moons/parts: n_inducing=10 max_iter=5
"""
)
#: Steps with minibatches alone: L-BFGS, which other starts take, has a transfer an evaluation.
STOCHASTIC = cases(
    """
[DLMGPRegressor]
smooth2: n_inducing=10 init=random batch_size=20 hyperparameters=fixed optimizer=None
"""
)


def name(case):
    return f"{case.estimator}-{case}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_routes_are_those_of_the_cpu(case, device):
    # Degrees of freedom that two steps of a search leave far from their optimum magnify rounding.
    searched = "student_t" in str(case) and "optimizer=None" not in str(case)
    check(case, device, **({"tolerance": 1e-5} if searched else {}))


@pytest.mark.parametrize("case", STOCHASTIC, ids=name)
def test_transfers_of_stochastic_steps_do_not_depend_on_their_number(case):
    few, many = (fit_counts(case, max_iter=size, tol=0.0) for size in (5, 25))
    assert few["operations"] < many["operations"]
    for way in ("to_device", "to_host"):
        assert few[way] == many[way] <= 60
