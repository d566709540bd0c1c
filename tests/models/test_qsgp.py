"""Every route of a regression against the exact GP; fall-backs; evidence; noise."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, WhiteKernel

from skgp.data import Data, merge_replicates
from skgp.inference import exact as exact_module
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.gram import StreamingGram, gram_posterior
from skgp.inference.weights.posterior import AugmentedPosterior
from skgp.kernels import FourierFeatures
from skgp.learning import defaults, routes
from skgp.learning.plan import Options, Plan
from skgp.linalg import NumericalWarning
from skgp.linalg.cg import CGResult
from skgp.models import qsgp
from skgp.models.qsgp import fit_statistics
from tests.models.qsgp_problems import fit_regression
from tests.reference import weights as reference
from tests.reference.gaussian import process
from tests.same import assert_same

CPU = torch.device("cpu")
NOISE = 0.05
KERNEL = 1.2 * RBF(0.9)
OPTIONS = Options(refit_noise=False, n_prior_features=256, n_samples=500)

PROBLEM = qsgp.Problem(KERNEL, None, NOISE, OPTIONS, torch.Generator())


def sine(n=80, seed=0, weighted=False):
    """Rows in lexicographic order, so that `merge_replicates` leaves the order alone."""
    rng = np.random.default_rng(seed)
    X = np.sort(rng.uniform(-3, 3, size=(n, 1)), axis=0)
    y = np.sin(2 * X[:, 0]) + NOISE**0.5 * rng.normal(size=n)
    weight = rng.uniform(0.5, 3.0, size=n) if weighted else None
    return merge_replicates(X, y, weight, CPU)


X_TEST = torch.linspace(-3.5, 3.5, 15, dtype=torch.float64)[:, None]


def exact(data, kernel=KERNEL, noise=NOISE, X=X_TEST):
    """Mean and covariance of the exact GP."""
    noise = noise if data.weight is None else noise / data.weight.numpy()
    return process(kernel, data.X.numpy(), data.y.numpy(), noise, X.numpy())


def run(
    data, *, kernel=KERNEL, noise=NOISE, options=OPTIONS, state=None, callback=None, seed=0, **asked
):
    return fit_regression(
        kernel,
        data,
        noise,
        Plan(**asked),
        options,
        state=state,
        generator=torch.Generator().manual_seed(seed),
        callback=callback,
    )


def errors(fit, data, **problem):
    """Largest differences of mean and of standard deviation from the exact GP's."""
    mean, covariance = exact(data, **problem)
    found, variance = fit.posterior.mean_and_variance(X_TEST)
    std = np.sqrt(np.diag(covariance))
    return np.abs(found.numpy() - mean).max(), np.abs(variance.sqrt().numpy() - std).max()


# (asked, options, tolerance of the mean, of the standard deviation: 500 draws leave 5% and more)
AGAINST_THE_GP = [
    (dict(), {}, 1e-8, 1e-7),
    (dict(covariance="samples"), {}, 1e-8, 0.1),
    (dict(solver="cg"), dict(tol=1e-6), 1e-5, 0.1),
    (dict(basis="inducing", n_basis=40), {}, 1e-4, 1e-3),
    (dict(basis="inducing", n_basis=40, solver="cg"), dict(tol=1e-8), 1e-4, 0.25),
    (dict(basis="fourier", n_basis=2000), {}, 0.2, 0.05),  # Monte Carlo over frequencies
]
AGAINST_THE_FEATURES = [
    (dict(), {}, 1e-7, 1e-7),
    (dict(covariance="samples"), {}, 1e-7, 0.1),
    (dict(solver="cg"), dict(tol=1e-8), 1e-5, 0.25),
    (dict(solver="gauss-seidel"), dict(tol=1e-8, max_iter=50), 1e-5, 0.25),
]
each_weighting = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def assert_consistent(fit, asked):
    """What the fit says of itself, and its covariance against its variance."""
    for name, value in asked.items():
        assert getattr(fit.plan, name) == value
    covariance = fit.posterior.covariance(X_TEST)
    mean, variance = fit.posterior.mean_and_variance(X_TEST)
    torch.testing.assert_close(covariance.diagonal(), variance, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(fit.posterior.mean(X_TEST), mean, rtol=1e-10, atol=1e-10)
    assert fit.kernel is KERNEL and fit.noise == NOISE and fit.n_iter >= 1


@each_weighting
@pytest.mark.parametrize("asked, changes, mean_tol, std_tol", AGAINST_THE_GP, ids=str)
def test_every_route_agrees_with_the_exact_gp(asked, changes, mean_tol, std_tol, weighted):
    data = sine(weighted=weighted)
    fit = run(data, options=replace(OPTIONS, **changes), **asked)
    mean_error, std_error = errors(fit, data)
    assert mean_error < mean_tol and std_error < std_tol
    assert_consistent(fit, asked)


@each_weighting
@pytest.mark.parametrize("asked, changes, mean_tol, std_tol", AGAINST_THE_FEATURES, ids=str)
def test_fourier_routes_agree_with_the_gp_of_their_features(
    asked, changes, mean_tol, std_tol, weighted
):
    data, asked = sine(weighted=weighted), dict(asked, basis="fourier", n_basis=300)
    fit = run(data, options=replace(OPTIONS, **changes), **asked)
    Phi, new = (
        reference.dense_features(FourierFeatures(KERNEL, 300, 1, seed=0), X)
        for X in (data.X, X_TEST)
    )
    weight = None if data.weight is None else data.weight.numpy()
    mean, covariance = reference.posterior(Phi, data.y.numpy(), NOISE, weight)
    found, variance = fit.posterior.mean_and_variance(X_TEST)
    np.testing.assert_allclose(found.numpy(), new @ mean, atol=mean_tol)
    std = np.sqrt(np.diag(new @ covariance @ new.T))
    np.testing.assert_allclose(variance.sqrt().numpy(), std, atol=std_tol)
    assert_consistent(fit, asked)


@each_weighting
@pytest.mark.parametrize("covariance", ["diagonal", "chevron"])
def test_sparse_covariances_keep_the_exact_mean_and_some_variance(covariance, weighted):
    data = sine(weighted=weighted)
    fit = run(data, covariance=covariance, options=replace(OPTIONS, n_dense_columns=20))
    assert errors(fit, data)[0] < 1e-8
    far = torch.tensor([[50.0]], dtype=torch.float64)
    mean, variance = fit.posterior.mean_and_variance(far)
    np.testing.assert_allclose([float(mean), float(variance)], [0.0, 1.2], atol=1e-8)


def test_a_kernel_without_a_spectral_density_can_be_sampled():
    kernel = 0.5 * DotProduct(1.0) + 1.0 * RBF(0.9)
    data = sine()
    options = replace(OPTIONS, n_samples=2000)
    assert max(errors(run(data, kernel=kernel, options=options, covariance="samples"), data,
                      kernel=kernel)) < 0.06  # fmt: skip


# -------------------------------------------------------------------------------- low rank


def test_low_rank_plan_is_taken_where_the_kernel_matrix_is_of_low_rank(monkeypatch):
    monkeypatch.setattr(defaults, "FACTOR_ROWS", 50)
    data, kernel = sine(200), 1.2 * RBF(2.0)
    fit = run(data, kernel=kernel)
    K = kernel(data.X.numpy())
    assert fit.plan.basis == "inducing" and fit.plan.solver == "cholesky"
    assert fit.plan.size < 40 and f"numerical rank {fit.plan.size}" in fit.plan.reason
    mean_error, std_error = errors(fit, data, kernel=kernel)
    # What is left of K is below 1% of the noise variance: a tenth of its standard deviation.
    assert max(mean_error, std_error) < 0.1 * NOISE**0.5
    evidence = reference.log_marginal_likelihood(
        np.linalg.cholesky(K + 1e-10 * np.eye(200)), data.y.numpy(), NOISE
    )
    np.testing.assert_allclose(fit.log_marginal_likelihood, evidence, atol=1.5)


@pytest.mark.parametrize(("scale", "rival", "taken"), [(8.0, 0.7, True), (0.7, 8.0, False)])
def test_a_low_rank_is_that_of_the_kernel_which_makes_all_observations_likelier(
    scale, rival, taken, monkeypatch
):
    """From their neighbours 1e5 observations were told as well by a kernel too smooth for all."""
    monkeypatch.setattr(defaults, "FACTOR_ROWS", 50)
    data = sine(200)
    other = 1.2 * RBF(rival) + WhiteKernel(2 * NOISE)
    options = qsgp.Options(refit_noise=False)
    problem = qsgp.Problem(1.2 * RBF(scale), data, NOISE, options, torch.Generator(), rival=other)
    fit = qsgp.fit_regression(problem, qsgp.Plan("auto", None, "auto", "auto"))
    assert "numerical rank" in fit.plan.reason
    assert fit.kernel.k2.length_scale == (rival if taken else scale)
    assert fit.noise == (2 * NOISE if taken else NOISE)


def test_low_rank_plan_is_passed_over_where_the_rank_is_high(monkeypatch):
    monkeypatch.setattr(defaults, "FACTOR_ROWS", 50)
    monkeypatch.setattr("skgp.learning.defaults.LOW_RANK", 8)
    data = sine()
    fit = run(data)
    assert fit.plan.size == 80 and fit.plan.space(80) == "function"
    assert errors(fit, data)[0] < 1e-8


@pytest.mark.parametrize(
    "asked", [dict(basis="inducing"), dict(solver="cholesky"), dict(n_basis=80)]
)
def test_low_rank_plan_does_not_override_a_choice(asked, monkeypatch):
    monkeypatch.setattr(defaults, "FACTOR_ROWS", 50)
    monkeypatch.setattr(routes, "pivoted_factor", None)
    assert run(sine(), kernel=1.2 * RBF(2.0), **asked).plan.size == 80


# ------------------------------------------------------------------------------- fall-back


def assert_fallen_back(fit, data, noise=NOISE, kernel=KERNEL):
    assert fit.plan.solver == "cholesky" and fit.plan.basis == "inducing"
    assert "conjugate gradients ended at a relative residual" in fit.plan.reason
    mean_error, std_error = errors(fit, data, noise=noise, kernel=kernel)
    assert mean_error < 0.02 and std_error < 0.02


@pytest.mark.parametrize("residual", [0.8, float("nan"), float("inf")])
def test_fall_back_where_conjugate_gradients_fail(residual, monkeypatch):
    def failed(matmul, B, **options):
        garbage = torch.full_like(B, 1e12)
        return CGResult(garbage, 5, B.new_full((B.shape[1],), residual), False, B)

    monkeypatch.setattr(exact_module, "block_cg", failed)
    data = sine()
    with pytest.warns(NumericalWarning, match="Conjugate gradients ended .* improves the cond"):
        fit = run(data, solver="cg")
    assert_fallen_back(fit, data)


def test_fall_back_where_float32_products_are_too_inexact(monkeypatch):
    """A tiny noise and an operator whose rounding exceeds it: K + noise I is not definite."""
    true = exact_module.KernelOperator.matmul

    def inexact(self, V):
        rounding = torch.linspace(-1, 1, V.shape[0])[:, None] * 1e-2
        return true(self, V) + rounding * V.to(self.dtype)

    monkeypatch.setattr(exact_module.KernelOperator, "matmul", inexact)
    data, noise = sine(300), 1e-6
    options = replace(OPTIONS, preconditioner_rank=2, n_samples=3, tol=1e-6)
    with pytest.warns(NumericalWarning, match="Conjugate gradients ended"):
        fit = run(data, noise=noise, solver="cg", options=options)
    assert fit.plan.solver == "cholesky"
    mean, variance = fit.posterior.mean_and_variance(data.X)
    assert float((mean - data.y).square().mean()) < 3 * NOISE
    assert torch.isfinite(variance).all() and (variance >= 0).all() and (variance <= 1.3).all()


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_conjugate_gradients_end_by_the_size_of_the_noise(noise):
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(300, 2))
    kernel = Matern(0.3, nu=0.5)
    f = np.linalg.cholesky(kernel(X)) @ rng.standard_normal(300)
    data = Data(torch.tensor(X), torch.tensor(f + noise**0.5 * rng.standard_normal(300)))
    options = replace(OPTIONS, n_samples=3, preconditioner_rank=40)
    fit = run(data, kernel=kernel, noise=noise, solver="cg", options=options)
    mean, _ = exact(data, kernel, noise, data.X)
    error = np.abs(fit.posterior.mean(data.X).numpy() - mean)
    assert fit.plan.solver == "cg" and error.max() < 0.3 * noise**0.5


# ------------------------------------------------------------- evidence, weights and noise


def repeated(counts_seed=3):
    """Merged rows with integer weights, and the same rows written out."""
    rng = np.random.default_rng(counts_seed)
    X = rng.uniform(-3, 3, size=(40, 1))
    X[30:] = X[:10]
    y = np.sin(2 * X[:, 0]) + NOISE**0.5 * rng.normal(size=40)
    counts = rng.integers(1, 4, size=40)
    merged = merge_replicates(X, y, counts.astype(float), CPU)
    # Replicates as given: no merging, every row on its own.
    written = Data(torch.tensor(np.repeat(X, counts, axis=0)), torch.tensor(np.repeat(y, counts)))
    return merged, written


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_calibration_pools_distinct_rows_and_the_scatter_within_them(solver):
    """W observations: n squares of leave-one-out residuals, W - n of deviations within rows."""
    merged, _ = repeated()
    options = replace(OPTIONS, tol=1e-6, n_samples=4000)
    found = run(merged, solver=solver, covariance="samples", options=options).calibration
    total = float(merged.weight.sum())
    weight = merged.weight.numpy()
    inverse = np.linalg.inv(KERNEL(merged.X.numpy()) + np.diag(NOISE / weight))
    alpha = inverse @ merged.y.numpy()
    between = np.sum(alpha**2 / np.diag(inverse))
    expected = (between + float(merged.scatter.sum()) / NOISE) / total
    np.testing.assert_allclose(found, expected, rtol=0.05)
    assert 0.5 < found < 1.7


def statistics_of(data, m=48):
    basis = FourierFeatures(KERNEL, m, 1, seed=0)
    statistics = StreamingGram(basis).update(data.X, data.y, data.weight)
    if data.scatter is not None:
        statistics.sum_square += float(data.scatter.sum())
    return statistics


def test_fit_statistics_evidence_is_that_of_the_rows_written_out():
    merged, written = repeated()
    statistics = statistics_of(merged)
    plan = Plan("fourier", 48, "cholesky", "full")
    fit = fit_statistics(PROBLEM, plan, statistics, refit=False)
    Phi = reference.dense_features(statistics.basis, written.X)
    expected = reference.log_marginal_likelihood(Phi, written.y.numpy(), NOISE)
    np.testing.assert_allclose(fit.log_marginal_likelihood, expected, rtol=1e-9)
    mean, _ = reference.posterior(Phi, written.y.numpy(), NOISE)
    features = reference.dense_features(statistics.basis, X_TEST)
    np.testing.assert_allclose(fit.posterior.mean(X_TEST).numpy(), features @ mean, atol=1e-9)
    # The caller's statistics are left as they were.
    assert statistics.n_rows == len(merged.y) and statistics.sum_log_weight != 0


def test_noise_refit_maximises_the_evidence():
    data = sine(200)
    fit = run(data, noise=0.5, basis="fourier", n_basis=64, options=Options())
    basis = FourierFeatures(KERNEL, 64, 1, kind="orthogonal", seed=0)
    Phi = reference.dense_features(basis, data.X)

    def evidence(noise):
        return reference.log_marginal_likelihood(Phi, data.y.numpy(), noise)

    np.testing.assert_allclose(fit.log_marginal_likelihood, evidence(fit.noise), rtol=1e-8)
    best = max(map(evidence, np.geomspace(fit.noise / 2, fit.noise * 2, 41)))
    assert evidence(fit.noise) >= best - 1e-2
    np.testing.assert_allclose(fit.noise, NOISE, rtol=0.3)


def test_noise_refit_counts_what_few_features_leave_unexplained():
    data, few = sine(200), dict(basis="inducing", n_basis=4)
    kept = run(data, options=replace(OPTIONS, refit_noise=False), **few)
    refitted = run(data, options=replace(OPTIONS, refit_noise=True), **few)
    assert kept.noise == NOISE and refitted.noise > 1.5 * NOISE
    assert refitted.log_marginal_likelihood > kept.log_marginal_likelihood + 10


# ---------------------------------------------------------------------------- augmentation


def test_augmented_posterior_is_the_predictive_variance_of_titsias():
    data, noise = sine(), NOISE
    Z = data.X[::8]
    basis = WhitenedInducingBasis(KERNEL, Z)
    weights = gram_posterior(StreamingGram(basis).update(data.X, data.y), noise)
    posterior = AugmentedPosterior(weights)
    Kzz, Kzx = KERNEL(Z.numpy()), KERNEL(Z.numpy(), data.X.numpy())
    k = KERNEL(X_TEST.numpy(), Z.numpy())
    Sigma = np.linalg.inv(Kzz + Kzx @ Kzx.T / noise)
    mean = k @ Sigma @ Kzx @ data.y.numpy() / noise
    covariance = k @ Sigma @ k.T
    covariance += KERNEL(X_TEST.numpy()) - k @ np.linalg.inv(Kzz) @ k.T
    np.testing.assert_allclose(posterior.mean(X_TEST).numpy(), mean, atol=1e-7)
    found = posterior.mean_and_variance(X_TEST)
    np.testing.assert_allclose(found[0].numpy(), mean, atol=1e-7)
    np.testing.assert_allclose(found[1].numpy(), np.diag(covariance), atol=1e-7)
    np.testing.assert_allclose(posterior.covariance(X_TEST).numpy(), covariance, atol=1e-7)


def test_augmentation_is_an_option_of_inducing_points():
    data, far = sine(), torch.tensor([[80.0]], dtype=torch.float64)
    for asked in (dict(basis="inducing", n_basis=20), dict(), dict(covariance="diagonal")):
        variances = [
            float(
                run(
                    data, options=replace(OPTIONS, augment=augment), **asked
                ).posterior.mean_and_variance(far)[1]
            )
            for augment in (True, False)
        ]
        np.testing.assert_allclose(variances, [1.2, 0.0], atol=1e-8)


def test_stochastic_route_lowers_a_learning_rate_that_diverges():
    data = sine()
    options = replace(OPTIONS, max_iter=60, learning_rate=100.0, learn_hyperparameters=False)
    with pytest.warns(NumericalWarning, match="learning_rate=100.0 makes .* diverge"):
        fit = run(data, options=options, basis="inducing", solver="sgd")
    residual = data.y - fit.posterior.mean(data.X)
    assert float(residual.square().mean()) < float(data.y.square().mean())


def test_stochastic_route_says_that_it_has_not_converged():
    data = sine()
    options = replace(OPTIONS, max_iter=1, learning_rate=1e-6, learn_hyperparameters=False)
    with pytest.warns(NumericalWarning) as caught:
        run(data, options=options, basis="fourier", n_basis=512, solver="sgd")
    (warning,) = caught
    assert "after 1 iterations" in str(warning.message)
    assert "Raise max_iter" in str(warning.message)


# Two terms whose shares of the frequencies depend on the hyper-parameters.
TERMS = 1.0 * RBF(1.5) + 0.1 * RBF(0.3)
MOVED = TERMS.clone_with_theta(np.log([0.2, 1.3, 0.9, 0.4]))


def descend(kernel, options, state=None, callback=None):
    """A stochastic fit of 40 Fourier features."""
    return run(
        sine(),
        kernel=kernel,
        options=replace(options, learn_hyperparameters=False),
        state=state,
        callback=callback,
        basis="fourier",
        n_basis=40,
        solver="sgd",
    )


def test_stochastic_route_predicts_by_the_features_it_was_trained_on():
    later = []

    def callback(iteration, info):
        state = info["fit"]().state
        state.theta = torch.as_tensor(MOVED.theta)
        later.append(info["fit"]())  # as if the iterations had moved theta there
        state.theta = None

    fit = descend(TERMS, replace(OPTIONS, max_iter=30), callback=callback)
    features = FourierFeatures(TERMS, 40, 1, seed=OPTIONS.seed)
    assert FourierFeatures(MOVED, 40, 1, seed=0).n_frequencies != features.n_frequencies
    weights = fit.state.weights[:, 0]
    for found, theta in ((fit, None), (later[-1], torch.as_tensor(MOVED.theta))):
        expected = features.all_features(X_TEST, theta) @ weights
        torch.testing.assert_close(found.posterior.mean(X_TEST), expected, rtol=1e-10, atol=1e-12)
        copied = pickle.loads(pickle.dumps(found.posterior))
        moments = found.posterior.mean_and_variance(X_TEST)
        for again, moment in zip(copied.mean_and_variance(X_TEST), moments, strict=True):
            assert_same(again, moment)
    assert later[-1].kernel == MOVED


@pytest.mark.filterwarnings("ignore:Stochastic gradients are far from convergence")
def test_warm_start_keeps_the_features_when_the_hyperparameters_moved():
    first = descend(TERMS, replace(OPTIONS, max_iter=30))
    state = pickle.loads(pickle.dumps(first.state))
    weights = state.weights[:, 0].clone()
    still = replace(OPTIONS, max_iter=1, learning_rate=1e-12)
    fit = descend(MOVED, still, state)
    assert fit.n_iter == 31 and fit.kernel == MOVED
    Phi = FourierFeatures(TERMS, 40, 1, seed=OPTIONS.seed).all_features(
        X_TEST, torch.as_tensor(MOVED.theta)
    )
    torch.testing.assert_close(fit.posterior.mean(X_TEST), Phi @ weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("change", ["kernel", "feature_map"])
def test_warm_start_from_other_features_starts_anew(change):
    state = descend(TERMS, replace(OPTIONS, max_iter=30)).state
    kernel = 1.3 * RBF(0.8) if change == "kernel" else TERMS
    kind = "iid" if change == "feature_map" else OPTIONS.feature_map
    assert descend(kernel, replace(OPTIONS, max_iter=30, feature_map=kind), state).n_iter == 30
