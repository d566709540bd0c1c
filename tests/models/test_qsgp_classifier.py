"""From a plan to latent posteriors: every route against oracles that know nothing of it."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.kernels.spectral import FourierFeatures
from skgp.learning import amplitude, defaults
from skgp.learning import plan as module
from skgp.learning.defaults import AMPLITUDES, MODERATIONS
from skgp.learning.plan import Options, Plan, resolve_classification
from skgp.likelihoods import Bernoulli
from tests.models.qsgp_problems import fit_classifier
from tests.reference import laplace as reference
from tests.same import assert_same

LOGIT = Bernoulli()
KERNEL = 3.0 * RBF(0.9)
FIXED = Options(learn_hyperparameters=False, tol=1e-10, max_iter=60)


def sample(n, c=1, seed=0):
    """Rows of overlapping classes, one against the rest."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((n, 2)))
    noisy = X[:, 0] + torch.sin(2 * X[:, 1]) + 0.5 * torch.from_numpy(rng.standard_normal(n))
    edges = torch.tensor([-0.6, 0.6] if c == 3 else [0.1], dtype=torch.float64)
    classes = torch.arange(c) if c > 1 else torch.ones(1)
    return X, 2.0 * (torch.bucketize(noisy, edges)[:, None] == classes).double() - 1


def fit(X, Y, options=FIXED, *, kernel=KERNEL, offset=None, seed=0, **arguments):
    names = ("basis", "n_basis", "solver", "covariance")
    asked = {name: arguments.pop(name) for name in names if name in arguments}
    return fit_classifier(
        kernel,
        X,
        Y,
        arguments.pop("likelihood", LOGIT),
        resolve_classification(Plan(**asked), *Y.shape, kernel),
        options,
        offset=torch.zeros(Y.shape[1], dtype=torch.float64) if offset is None else offset,
        generator=torch.Generator().manual_seed(seed),
        **arguments,
    )


def dense_laplace(Phi, y, Phi_new, offset=0.0, prior_variance=1.0, weight=None):
    """Moments of the latent function at new rows."""
    w = reference.mode(Phi, y, offset, prior_variance, weight)
    H = reference.hessian(Phi, reference.curvature(Phi, w, offset, weight), prior_variance)
    return offset + Phi_new @ w, np.einsum("ij,ji->i", Phi_new, np.linalg.solve(H, Phi_new.T))


# ---- Newton -----------------------------------------------------------------------------------


def test_classifier_with_a_point_a_row_is_that_of_scikit_learn():
    X, Y = sample(60)
    X_new = torch.cat([sample(20, seed=1)[0], 50.0 + X[:2]])  # two rows far from all others
    oracle = GaussianProcessClassifier(KERNEL, optimizer=None, max_iter_predict=1000)
    oracle.fit(X.numpy(), Y[:, 0].numpy())
    mean, variance = oracle.latent_mean_and_variance(X_new.numpy())
    found = fit(X, Y)
    assert (found.plan.basis, found.plan.n_basis, found.plan.covariance) == ("inducing", 60, "full")
    actual = found.posterior.mean_and_variance(X_new)
    np.testing.assert_allclose(actual[0][:, 0].numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(actual[1][:, 0].numpy(), variance, rtol=1e-6)
    np.testing.assert_allclose(actual[1][-2:, 0].numpy(), 3.0, rtol=1e-9)  # the prior's
    assert_same(found.posterior.mean(X_new), actual[0])
    assert found.amplitude == 1.0 and found.kernel is KERNEL


@pytest.mark.parametrize("weighted", [False, True])
def test_classifier_with_fourier_features_is_the_dense_laplace_approximation(weighted):
    X, Y = sample(80, 3)
    X_new = sample(10, seed=1)[0]
    offset = torch.tensor([0.3, -0.4, -0.8], dtype=torch.float64)
    weight = torch.linspace(0.2, 2.0, 80, dtype=torch.float64) if weighted else None
    found = fit(X, Y, basis="fourier", n_basis=24, offset=offset, row_weight=weight)
    features = FourierFeatures(KERNEL, 24, 2, seed=FIXED.seed)
    Phi, Phi_new = (features.features(rows, 0).numpy() for rows in (X, X_new))
    mean, variance = found.posterior.mean_and_variance(X_new)
    for j in range(3):
        numbers = None if weight is None else weight.numpy()
        expected = dense_laplace(Phi, Y[:, j].numpy(), Phi_new, float(offset[j]), 1.0, numbers)
        np.testing.assert_allclose(mean[:, j].numpy(), expected[0], atol=1e-7)
        np.testing.assert_allclose(variance[:, j].numpy(), expected[1], rtol=1e-6)


def test_classifier_augmentation_returns_the_prior_variance_that_points_miss():
    X, Y = sample(80)
    Z, far = X[:10], 50.0 + X[:3]
    moments = {}
    for augment in (True, False):
        options = Options(learn_hyperparameters=False, augment=augment)
        moments[augment] = fit(X, Y, options, Z=Z, n_basis=10).posterior.mean_and_variance(
            torch.cat([X, far])
        )
    torch.testing.assert_close(moments[True][0], moments[False][0])
    K = KERNEL(torch.cat([X, far]).numpy(), Z.numpy())
    unexplained = 3.0 - np.einsum("ij,ji->i", K, np.linalg.solve(KERNEL(Z.numpy()), K.T))
    difference = (moments[True][1] - moments[False][1])[:, 0].numpy()
    np.testing.assert_allclose(difference, unexplained, atol=1e-8)
    np.testing.assert_allclose(moments[True][1][80:].numpy(), 3.0, rtol=1e-9)
    np.testing.assert_allclose(moments[False][1][80:].numpy(), 0.0, atol=1e-12)


@pytest.mark.parametrize("covariance", ["full", "chevron", "diagonal"])
def test_classifier_covariance_has_the_structure_asked_for(covariance):
    X, Y = sample(80)
    options = Options(learn_hyperparameters=False, n_dense_columns=5)
    found = fit(X, Y, options, basis="fourier", n_basis=24, covariance=covariance)
    width = {"full": 24, "chevron": 5, "diagonal": 0}[covariance]
    assert found.posterior.columns.shape == (1, 24, width)


def test_classifier_reports_steps_losses_and_scores():
    X, Y = sample(80)
    seen = []
    found = fit(X, Y, callback=lambda iteration, info: seen.append(info["loss"]))
    assert found.n_iter == len(found.history) or found.n_iter == 1
    assert found.history == seen[len(seen) - len(found.history) :]
    assert tuple(found.scores["moderation"]) == MODERATIONS
    assert list(found.scores["amplitude"]) == [1.0]
    scores = found.scores["moderation"]
    assert scores[found.moderation] > max(scores.values()) - 0.01  # by the rule of selection


def test_classifier_plan_counts_the_points_that_there_are():
    X, Y = sample(60)
    assert fit(X, Y, Z=X[:7], n_basis=20).plan.n_basis == 7
    assert fit(X, Y, Z=X[:7], n_basis=20, solver="sgd", basis="inducing").plan.n_basis == 7


# ---- the amplitude ----------------------------------------------------------------------------


def test_classifier_learns_the_amplitude_of_more_rows_than_the_search_has_seen(monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.SUBSET_ROWS", 100)
    options = Options()
    kernel = ConstantKernel(0.01) * RBF(0.9)  # far too small
    X, Y = sample(101)
    found = fit(X, Y, options, kernel=kernel, n_basis=20, Z=X[:20])
    assert list(found.scores["amplitude"]) == list(AMPLITUDES)
    assert found.amplitude == max(AMPLITUDES)
    basis = found.posterior.weights.basis
    features = basis.features(X, 0).numpy()
    mean, variance = dense_laplace(features, Y[:, 0].numpy(), features, 0.0, found.amplitude)
    actual = found.posterior.weights.mean_and_variance(X)
    np.testing.assert_allclose(actual[0][:, 0].numpy(), mean, atol=1e-3)
    np.testing.assert_allclose(actual[1][:, 0].numpy(), variance, rtol=1e-3)
    whole = found.posterior.mean_and_variance(50.0 + X[:1])[1]
    assert float(whole) == pytest.approx(0.01 * found.amplitude)
    few = fit(X[:100], Y[:100], options, kernel=kernel, n_basis=20, Z=X[:20])
    assert list(few.scores["amplitude"]) == [1.0] == [few.amplitude]


@pytest.mark.parametrize(
    ("kernel", "factors"),
    [
        (ConstantKernel(1.0, (0.5, 5.0)) * RBF(0.9), [1.0, 4.0]),
        (ConstantKernel(1.0, "fixed") * RBF(0.9), [1.0]),
        (RBF(0.9), [1.0]),
    ],
)
def test_classifier_amplitude_respects_the_bounds_of_the_kernel(kernel, factors, monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.SUBSET_ROWS", 50)
    X, Y = sample(80)
    found = fit(X, Y, Options(), kernel=kernel)
    assert list(found.scores["amplitude"]) == factors


def test_classifier_that_is_large_holds_rows_out(monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.LEAVE_ONE_OUT_FLOPS", 0)
    asked = []
    before = amplitude.by_held_out_rows

    def watched(problem, held_out, *arguments, **options):
        asked.append(held_out)
        return before(problem, held_out, *arguments, **options)

    monkeypatch.setattr(amplitude, "by_held_out_rows", watched)
    X, Y = sample(105)
    found = fit(X, Y, n_basis=20, Z=X[:20])
    assert len(asked[0]) == len(set(asked[0].tolist())) == 10
    # They enter the last fit.
    features = found.posterior.weights.basis.features(X, 0).numpy()
    mean, _ = dense_laplace(features, Y[:, 0].numpy(), features)
    np.testing.assert_allclose(found.posterior.mean(X)[:, 0].numpy(), mean, atol=1e-4)
    monkeypatch.setattr("skgp.learning.defaults.AMPLITUDE_HELD_OUT", 4)
    fit(X, Y, n_basis=20, Z=X[:20])
    assert len(asked[1]) == 4


# ---- precision --------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["newton", "laplace"])
def test_many_features_are_in_float32_where_that_is_accurate(route, monkeypatch):
    X, _ = sample(60)
    near = WhitenedInducingBasis(RBF(0.5), X[:20])
    bases = [near, WhitenedInducingBasis(RBF(20.0), X), FourierFeatures(KERNEL, 40, 2, seed=0)]
    for limit, dtype in ((10**9, torch.float64), (100, torch.float32)):
        monkeypatch.setitem(defaults.SINGLE_SIZE, route, limit)
        designs = [module.training_design(basis, X, route, Options()) for basis in bases]
        assert {design.dtype for design in designs} == {dtype}
    assert [design.basis.single for design in designs[:2]] == [True, False]  # points coincide
    assert not near.single


def test_classifier_of_many_features_predicts_in_float64(monkeypatch):
    X, Y = sample(120)
    exact = fit(X, Y, n_basis=20, Z=X[:20])
    monkeypatch.setitem(defaults.SINGLE_SIZE, "newton", 100)
    single = fit(X, Y, Options(learn_hyperparameters=False), n_basis=20, Z=X[:20])
    assert not single.posterior.weights.basis.single
    moments, expected = (each.posterior.mean_and_variance(X) for each in (single, exact))
    assert not torch.equal(moments[0], expected[0])
    torch.testing.assert_close(moments[0], expected[0], rtol=0, atol=5e-3)
    torch.testing.assert_close(moments[1], expected[1], rtol=5e-3, atol=0)


# ---- other routes -----------------------------------------------------------------------------


def test_classifier_sgd_holds_equal_rows_out_together():
    X, Y = (part.repeat_interleave(3, 0) for part in sample(100))
    options = Options(n_support=len(X), max_iter=2)  # all that are trained on
    found = fit(X, Y, options, solver="sgd", basis="fourier", n_basis=60)
    trained, counts = found.state.X_support.unique(dim=0, return_counts=True)
    assert len(trained) == 90 and (counts == 3).all()
