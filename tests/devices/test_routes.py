"""Routes that need no more than a table on a device: equal to the CPU, few transfers."""

import pytest

from tests.covering import slow, slow_case
from tests.devices.common import cases, check, fit_counts, predict_counts

CASES = cases(
    """
[BayesianGPRegressor]
few: optimizer=map
few: n_keep=5 n_samples=128 min_ess=50 kernel=rbf
few: sampler=hmc n_samples=10 n_warmup=3 n_chains=2 n_keep=4 kernel=rbf
[DLMGPRegressor]
weighted:
smooth2: n_inducing=6 max_iter=2 objective=fitc kernel=ard
smooth2: n_inducing=10 max_iter=2 objective=square_loss kernel=matern32 dtype=float32
smooth2: n_inducing=10 max_iter=5 init=greedy learning_rate=0.05 batch_size=20 optimizer=None
smooth2/parts: n_inducing=10 max_iter=3 optimizer=None
[DLMGPClassifier]
moons/parts: n_inducing=10 max_iter=5
[QSGPRegressor]
smooth2: basis=fourier n_basis=40 solver=sgd max_iter=12 n_support=10 covariance=chevron
smooth2: basis=inducing n_basis=20 solver=sgd max_iter=12 batch_size=20 kernel=rbf
smooth2: basis=relevance solver=sgd n_basis=30 max_iter=8 optimizer=None
[QSGPClassifier]
iris: solver=sgd n_basis=40 max_iter=12 bound=strict kernel=rbf
[VecchiaGPRegressor]
weighted: optimizer=None n_neighbors=5 n_inducing=8
smooth4: optimizer=None ordering=maximin n_inducing=8
exposed: likelihood=poisson kernel=matern32 n_neighbors=5 n_inducing=8 max_iter=2
heavy tails: likelihood=student_t optimizer=None n_neighbors=5 n_inducing=0
[VecchiaGPClassifier]
moons: kernel=matern32 n_neighbors=5 n_inducing=0
iris: optimizer=None n_neighbors=5 n_inducing=8
"""
)
SLOW = cases(
    """
[BayesianGPRegressor]
few: solver=cg sampler=langevin n_samples=4 n_warmup=2 n_chains=1 n_keep=2
few: solver=cg sampler=mala n_samples=4 n_warmup=2 n_chains=1 n_keep=2
few: solver=cg sampler=sgld n_samples=4 n_warmup=2 n_chains=1 n_keep=2 kernel=rbf
weighted: kernel=rational optimizer=map
[DLMGPRegressor]
counts1: likelihood=poisson n_inducing=8 max_iter=1 link=softplus gradient=bmc optimizer=None
smooth2: n_inducing=10 max_iter=5 kernel=linear
exposed: likelihood=poisson n_inducing=6 max_iter=1 kernel=matern32
heavy tails: likelihood=student_t n_inducing=8 max_iter=1 gradient=ups optimizer=None
[DLMGPClassifier]
iris: n_inducing=10 max_iter=2 likelihood=logit kernel=rbf
weighted classes: max_iter=20
[QSGPClassifier]
moons: solver=sgd basis=inducing n_basis=20 max_iter=12 batch_size=20 likelihood=probit kernel=rbf
[VecchiaGPRegressor]
smooth2: kernel=matern32 n_neighbors=5
"""
)
MAP, SAMPLED = CASES[0], CASES[1]
#: Steps with minibatches alone: L-BFGS, which other starts take, has a transfer an evaluation.
STOCHASTIC = cases(
    """
[DLMGPRegressor]
smooth2: n_inducing=10 init=random batch_size=20 hyperparameters=fixed optimizer=None
"""
)


def name(case):
    return f"{case.estimator}-{case}"


def crossed(case):
    """Transfers of the first prediction to the device and back."""
    options = dict(case.options)
    if case.estimator.startswith("Vecchia"):
        # Rows, factors; of labels and numbers offsets, parameters of the noise, and triangular
        # systems that are solved on the host.
        latent = case.estimator.endswith("Classifier") or "likelihood" in options
        return (8, 5) if latent else (3, 1)
    return (2, 1) if options.get("solver") == "sgd" else (1, 1)


@pytest.mark.parametrize("case", [*CASES, *slow(SLOW)], ids=name)
def test_routes_are_those_of_the_cpu(case, device):
    check(case, device, crossed=crossed(case))


@pytest.mark.parametrize("case", STOCHASTIC, ids=name)
def test_transfers_of_stochastic_steps_do_not_depend_on_their_number(case):
    few, many = (fit_counts(case, max_iter=size, tol=0.0) for size in (5, 25))
    assert few["operations"] < many["operations"]
    for way in ("to_device", "to_host"):
        assert few[way] == many[way] <= 60


@pytest.mark.parametrize("name", ["QSGPRegressor-smooth2", slow_case("QSGPClassifier-moons")])
def test_transfers_grow_as_the_logarithm_of_the_iterations(name):
    estimator, problem = name.split("-")
    text = f"[{estimator}]\n{problem}: basis=fourier n_basis=60 solver=sgd optimizer=None"
    few, many = (fit_counts(cases(text)[0], max_iter=steps) for steps in (8, 64))
    assert many["operations"] > 4 * few["operations"]
    for count in ("to_device", "to_host", "synchronisations"):
        assert many[count] - few[count] <= 4 + 1  # looks: 16, 32, 64, and room for two


def test_a_joint_prediction_of_samples_crosses_once_each_way():
    counts = predict_counts(SAMPLED, "predict", return_cov=True)
    assert (counts["to_device"], counts["to_host"]) == (1, 1)


def test_draws_of_many_samples_cross_once():
    assert predict_counts(SAMPLED, "sample_y", n_samples=8)["to_host"] == 1


def test_a_search_for_the_mode_takes_no_rows_back():
    # Little more than a transfer for each of the kernels that are compared.
    assert fit_counts(MAP)["to_host"] < 40
