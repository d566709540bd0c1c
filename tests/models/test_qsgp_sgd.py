"""Classification by stochastic gradients: what is trained on, kept, and predicted."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.kernels.spectral import FourierFeatures
from skgp.learning import stochastic as module
from skgp.learning.calibration import choose_moderation, mean_scores
from skgp.learning.plan import Options, Plan
from skgp.likelihoods import Bernoulli
from tests.models.qsgp_problems import fit_classifier
from tests.same import assert_same

LOGIT = Bernoulli()
KERNEL = 3.0 * RBF(0.9)
N, M = 120, 64


def options(**changes):
    common = {"basis_batch_size": 32, "batch_size": 20, "n_support": 30, "max_iter": 40}
    return Options(**{"learn_hyperparameters": False, **common, **changes})


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.standard_normal((N, 2)))
    noisy = X[:, 0] + torch.sin(2 * X[:, 1]) + 0.3 * torch.from_numpy(rng.standard_normal(N))
    labels = torch.bucketize(noisy, torch.tensor([-0.6, 0.6], dtype=torch.float64))
    return X, 2.0 * (labels[:, None] == torch.arange(3)).double() - 1


def fit(X, Y, chosen=None, *, kernel=KERNEL, basis="fourier", covariance="diagonal", **arguments):
    m = M if basis == "fourier" else len(X if arguments.get("Z") is None else arguments["Z"])
    plan = Plan(basis, arguments.pop("n_basis", m), "sgd", covariance)
    common = {"offset": torch.zeros(Y.shape[1], dtype=torch.float64), **arguments}
    common["generator"] = torch.Generator().manual_seed(0)
    return fit_classifier(kernel, X, Y, LOGIT, plan, chosen or options(), **common)


@pytest.mark.parametrize("covariance", ["diagonal", "chevron"])
@pytest.mark.parametrize("basis", ["fourier", "inducing"])
def test_sgd_posterior_is_that_of_the_state(data, basis, covariance):
    """Means and variances from dense features and the dense covariance of each column."""
    X, Y = data
    offset = torch.tensor([0.3, -0.4, -0.8], dtype=torch.float64)
    Z = X[:25] if basis == "inducing" else None
    found = fit(
        X,
        Y,
        options(n_dense_columns=5),
        basis=basis,
        covariance=covariance,
        offset=offset,
        Z=Z,
    )
    if basis == "fourier":
        Phi = FourierFeatures(KERNEL, M, 2, seed=0).features(X, 0).numpy()
    else:
        Phi = KERNEL(X.numpy(), Z.numpy())
    mean, variance = found.posterior.mean_and_variance(X)
    for j in range(3):
        q = found.state.q(j)
        assert q.n_dense == (5 if covariance == "chevron" else 0)
        C = q.factor().numpy()
        np.testing.assert_allclose(
            mean[:, j].numpy(), float(offset[j]) + Phi @ q.mean.numpy(), atol=1e-10
        )
        expected = np.einsum("ij,jk,ik->i", Phi, C @ C.T, Phi)
        np.testing.assert_allclose(variance[:, j].numpy(), expected, rtol=1e-6)


def test_sgd_rows_held_out_are_not_trained_on(data, monkeypatch):
    X, Y = data
    rows = []
    before = module.LikelihoodSolver

    def watched(X, Y, *arguments, **controls):
        rows.append((X, Y))
        return before(X, Y, *arguments, **controls)

    monkeypatch.setattr(module, "LikelihoodSolver", watched)
    found = fit(X, Y)
    trained = {tuple(row) for row in rows[0][0].tolist()}
    held_out = torch.tensor([tuple(row) not in trained for row in X.tolist()])
    assert len(trained) == 108 and int(held_out.sum()) == 12
    both = {(*x, *y) for x, y in zip(X.tolist(), Y.tolist(), strict=True)}
    assert {(*x, *y) for x, y in zip(rows[0][0].tolist(), rows[0][1].tolist(), strict=True)} <= both
    moments = found.posterior.mean_and_variance(X[held_out])
    weight = torch.ones(12, dtype=torch.float64)
    best, losses = choose_moderation(LOGIT, Y[held_out], *moments, weight)
    assert found.scores["moderation"] == pytest.approx(mean_scores(losses, weight), rel=1e-10)
    assert found.moderation == best


def test_sgd_holds_out_no_more_than_asked(data, monkeypatch):
    X, Y = data
    monkeypatch.setattr(module, "MODERATION_ROWS", 3)
    found = fit(X, Y)
    assert len(found.state.X_support) == 30 and found.scores
    few = fit(X[:9], Y[:9])  # a tenth of which is no row
    assert few.scores == {} and few.moderation == 0.0


def test_sgd_fit_of_an_iteration_is_not_changed_by_the_next(data):
    X, Y = data
    fits, means = [], []

    def callback(iteration, info):
        fits.append(info["fit"]())
        means.append(fits[-1].posterior.mean_and_variance(X))

    fit(X, Y, options(max_iter=4), covariance="chevron", callback=callback)
    for one, moments in zip(fits, means, strict=True):
        for now, then in zip(one.posterior.mean_and_variance(X), moments, strict=True):
            assert_same(now, then)


def test_sgd_hyperparameters_are_those_of_the_predictions(data):
    """Features at the learned theta, with the frequencies that the fit began with."""
    X, Y = data
    kernel = 3.0 * RBF(0.9) + Matern(2.0, nu=1.5)
    found = fit(X, Y, options(learn_hyperparameters=True, max_iter=200), kernel=kernel)
    assert np.abs(found.kernel.theta - kernel.theta).max() > 0.01
    np.testing.assert_allclose(found.kernel.theta, found.state.theta.detach().numpy())
    fourier = FourierFeatures(kernel, M, 2, seed=0)
    Phi = fourier.features(X, 0, found.state.theta.detach())
    expected = Phi @ found.state.weights[:, :3]
    torch.testing.assert_close(found.posterior.mean(X), expected)


def test_sgd_inducing_points_keep_the_kernel(data):
    X, Y = data
    chosen = options(learn_hyperparameters=True)
    assert fit(X, Y, chosen, basis="inducing", Z=X[:25]).kernel is KERNEL


@pytest.mark.parametrize("case", ["features", "classes", "columns", "dtype", "inducing"])
def test_sgd_state_of_another_problem_is_not_gone_on_with(data, case):
    X, Y = data
    arguments = {"basis": "inducing", "Z": X[:25]} if case == "inducing" else {}
    state = fit(X, Y, **arguments).state
    chosen = options(dtype=torch.float32) if case == "dtype" else options()
    if case == "features":
        found = fit(X, Y, chosen, n_basis=2 * M, state=state)
    else:
        X = torch.cat([X, X[:, :1]], dim=1) if case == "columns" else X
        Y = Y[:, :2] if case == "classes" else Y
        found = fit(X, Y, chosen, state=state, **arguments)
    assert found.state is not state and found.n_iter == 40
