"""Relevance vectors by evidence maximisation, regression and classes, against dense oracles."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.datasets import make_sinc
from skgp.inference.defaults import ALIGNED
from skgp.inference.relevance.evidence import (
    LaplaceProblem,
    choose_candidates,
    fit_relevance,
    fit_relevance_classifier,
)
from skgp.inference.relevance.steps import (
    DesignSource,
    Dictionary,
    EvidenceState,
    GramSource,
    Move,
    make_source,
    update_noise,
)
from skgp.inference.stochastic.basis import KernelColumns
from skgp.likelihoods import Bernoulli
from skgp.linalg.runtime import memory_limit
from tests.reference import relevance as reference

KERNEL = RBF(2.0)
GRID = torch.linspace(-10, 10, 400, dtype=torch.float64)[:, None]
TRUTH = torch.sinc(GRID[:, 0] / np.pi)


def sinc(n, seed=0, noise=0.1):
    X, y = make_sinc(n_samples=n, noise=noise, random_state=seed)
    return torch.from_numpy(X), torch.from_numpy(y)


def rmse(mean, truth):
    return float((mean - truth).square().mean().sqrt())


def make_state(kernel=KERNEL, n=40, noise=0.02):
    X, y = sinc(n)
    basis = KernelColumns(kernel, X)
    state = EvidenceState(make_source(basis, X, y, None), noise)
    Phi = basis.features(X, 0).numpy()
    return state, Phi, y.numpy()


def assert_exact(state, Phi, y):
    """Evidence, S, Q and the posterior of a state equal the oracle's."""
    args = Phi, y, state.noise_variance, state.indices.numpy(), state.precision.numpy()
    np.testing.assert_allclose(state.log_evidence, reference.log_evidence(*args), atol=1e-8)
    S, Q = reference.statistics(*args)
    np.testing.assert_allclose(state.S.numpy(), S, atol=1e-8 * np.abs(S).max())
    np.testing.assert_allclose(state.Q.numpy(), Q, atol=1e-8 * np.abs(Q).max())
    mean, covariance = reference.posterior(*args)
    np.testing.assert_allclose(state.mean.numpy(), mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(state.covariance.numpy(), covariance, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kernel", [RBF(2.0), 3.0 * Matern(1.5, nu=1.5)], ids=["rbf", "matern"])
def test_state_equals_the_dense_oracle_at_every_stage(kernel):
    state, Phi, y = make_state(kernel)
    kinds = set()
    for _ in range(40):
        move = state.best_move()
        if move.gain <= 1e-9:
            break
        inside = move.index in state.indices.tolist()
        kinds.add("add" if not inside else "delete" if move.precision == np.inf else "change")
        state.apply(move)
        assert_exact(state, Phi, y)
    assert {"add", "change"} <= kinds


def test_state_takes_out_a_function_exactly():
    state, Phi, y = make_state()
    for _ in range(6):
        state.apply(state.best_move())
    index = int(state.indices[2])
    before = state.log_evidence
    removed = [i for i in state.indices.tolist() if i != index]
    keep = state.indices != index
    after = reference.log_evidence(
        Phi, y, state.noise_variance, removed, state.precision[keep].numpy()
    )
    state.apply(Move(index, 2, np.inf, after - before))
    assert state.indices.tolist() == removed
    assert_exact(state, Phi, y)


def test_gains_are_rises_of_the_evidence_and_the_best_of_each_function():
    state, Phi, y = make_state(n=25)
    for _ in range(5):
        state.apply(state.best_move())
    precision, gain = state.moves()
    grid = np.geomspace(1e-6, 1e8, 60)
    active, s = state.indices.tolist(), state.precision.numpy()

    def evidence(active, s):
        return reference.log_evidence(Phi, y, state.noise_variance, active, s)

    for index in range(25):
        exact = [float(precision[index])] if precision[index] < np.inf else []
        best = reference.best_gain(evidence, active, s, index, [*grid, *exact])
        if index in active or not aligned_with(Phi, index, active):
            np.testing.assert_allclose(float(gain[index]), best, atol=1e-8)


def aligned_with(Phi, index, active):
    """Whether a function is nearly parallel to another one in the model."""
    lengths = np.linalg.norm(Phi, axis=0)
    cosines = [Phi[:, index] @ Phi[:, a] / lengths[index] / lengths[a] for a in active]
    return any(c > 1 - ALIGNED for c in cosines)


@pytest.mark.parametrize("learn_noise", [True, False])
def test_fit_ends_where_no_step_raises_the_dense_evidence(learn_noise):
    X, y = sinc(60)
    tol = 1e-4
    fit = fit_relevance(KERNEL, X, y, noise_variance=0.02, learn_noise=learn_noise, tol=tol)
    assert fit.converged
    Phi, active, s = KERNEL(X.numpy()), fit.indices.tolist(), fit.precision.numpy()

    def evidence(active, s, noise=fit.noise_variance):
        return reference.log_evidence(Phi, y.numpy(), noise, active, s)

    np.testing.assert_allclose(fit.log_evidence, evidence(active, s), atol=1e-8)
    for index in range(60):
        if index in active or not aligned_with(Phi, index, active):
            grid = np.geomspace(1e-4, 1e6, 20)
            assert reference.best_gain(evidence, active, s, index, grid) <= tol
    if learn_noise:
        for factor in (0.97, 1.03):
            assert evidence(active, s, factor * fit.noise_variance) < fit.log_evidence + tol
    else:
        assert fit.noise_variance == 0.02


def test_fit_raises_the_evidence_at_every_iteration():
    fit = fit_relevance(KERNEL, *sinc(300))
    assert len(fit.history) == fit.n_iter
    assert np.all(np.diff(fit.history) > -1e-8)


def test_update_noise_never_lowers_the_evidence_and_reaches_its_maximum():
    state, _, _ = make_state(noise=3.0)
    for _ in range(6):
        state.apply(state.best_move())
    state.refresh()
    values = []
    for _ in range(60):
        values.append(state.log_evidence)
        update_noise(state, 1e-9)
    assert np.all(np.diff(values) >= 0)
    best = state.log_evidence
    for factor in (0.99, 1.01):
        other = EvidenceState(
            state.source, factor * state.noise_variance, state.indices, state.precision
        )
        assert other.log_evidence < best


def test_update_noise_never_lowers_the_evidence_of_random_states(rng):
    for _ in range(60):
        n = int(rng.integers(2, 12))
        X, y = torch.from_numpy(rng.uniform(-3, 3, (n, 1))), torch.from_numpy(rng.normal(size=n))
        source = make_source(KernelColumns(RBF(1.0), X), X, y, None)
        s = torch.from_numpy(10 ** rng.uniform(-3, 3, n))
        state = EvidenceState(source, 10 ** rng.uniform(-4, 2), torch.arange(n), s)
        before, noise = state.log_evidence, state.noise_variance
        update_noise(state, 1e-9)
        assert state.log_evidence >= before
        assert state.noise_variance != noise


def test_posterior_equals_the_dense_oracle():
    X, y = sinc(120)
    fit = fit_relevance(KERNEL, X, y)
    Phi, active = KERNEL(X.numpy()), fit.indices.numpy()
    mean, Sigma = reference.posterior(
        Phi, y.numpy(), fit.noise_variance, active, fit.precision.numpy()
    )
    A = KERNEL(GRID.numpy(), X.numpy()[active])
    np.testing.assert_allclose(fit.posterior.mean(GRID), A @ mean, atol=1e-8)
    both = fit.posterior.mean_and_variance(GRID)
    np.testing.assert_allclose(both[0], A @ mean, atol=1e-8)
    np.testing.assert_allclose(both[1], np.diag(A @ Sigma @ A.T), atol=1e-9)
    np.testing.assert_allclose(fit.posterior.covariance(GRID), A @ Sigma @ A.T, atol=1e-9)


@pytest.mark.parametrize("route", ["stored", "gram", "streamed"])
def test_sources_equal_dense_products(route, rng):
    X, y = sinc(50)
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, size=50))
    m = 20 if route == "gram" else 50
    budget = {"stored": 2**20, "gram": 8 * 20 * 20, "streamed": 8 * 50}[route]
    basis = KernelColumns(KERNEL, X[:m])
    with memory_limit(2 * budget):  # half of which is for features
        source = make_source(basis, X, y, weight)
    assert isinstance(source, GramSource if route == "gram" else DesignSource)
    Phi, w = KERNEL(X.numpy(), X.numpy()[:m]), weight.numpy()
    G = Phi.T @ (w[:, None] * Phi)
    index = torch.tensor([3, 11])
    np.testing.assert_allclose(source.gram_columns(index), G[:, [3, 11]], rtol=1e-12)
    np.testing.assert_allclose(source.squares, np.diag(G), rtol=1e-12)
    np.testing.assert_allclose(source.moment, Phi.T @ (w * y.numpy()), atol=1e-12)
    np.testing.assert_allclose(source.sum_square, w @ y.numpy() ** 2, rtol=1e-12)
    np.testing.assert_allclose(source.n_rows, w.sum(), rtol=1e-12)


def test_every_source_and_memory_map_gives_the_same_fit(tmp_path):
    X, y = sinc(120)
    for name, values in (("X", X), ("y", y)):
        np.save(tmp_path / f"{name}.npy", values.numpy())
    maps = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("X", "y")]
    rows, fits = torch.arange(0, 120, 6), []
    gram = 8 * 20 * 20  # bytes
    for budget, data in ((2**25, (X, y)), (gram, (X, y)), (gram, maps), (8 * 20, (X, y))):
        with memory_limit(2 * budget):  # half of which is for features
            fits.append(fit_relevance(KERNEL, *data, candidates=rows))
    for fit in fits[1:]:
        assert torch.equal(fit.indices, fits[0].indices)
        np.testing.assert_allclose(fit.log_evidence, fits[0].log_evidence, atol=1e-7)


def test_candidates_are_drawn_of_many_rows_and_limit_the_vectors(generator):
    assert len(choose_candidates(20_000, None, generator)) == 20_000
    assert len(choose_candidates(20_001, None, generator)) == 2000
    chosen = choose_candidates(400, 40, generator)
    assert len(chosen) == 40 and choose_candidates(5, 9, generator).tolist() == [0, 1, 2, 3, 4]
    fit = fit_relevance(KERNEL, *sinc(400), candidates=chosen)
    assert set(fit.indices.tolist()) <= set(chosen.tolist())
    assert rmse(fit.posterior.mean(GRID), TRUTH) <= 0.04


# ---- classification ---------------------------------------------------------------------------

UNIT = RBF(1.0)
LOGIT = Bernoulli(link="logit")


def bananas(n, seed=0):
    """Two interleaved, noisy half-moons, labels -1 and 1, shapes (n, 2) and (n, 1)."""
    rng = np.random.default_rng(seed)
    angle, label = rng.uniform(0, np.pi, n), rng.choice([-1.0, 1.0], n)
    X = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    X[label > 0] = [1.0, 0.5] - X[label > 0]
    return torch.from_numpy(X + 0.25 * rng.normal(size=(n, 2))), torch.from_numpy(label)[:, None]


def laplace_problem(n=40, offset=0.3):
    X, Y = bananas(n)
    weight = torch.from_numpy(np.random.default_rng(1).uniform(0.5, 2.0, n))
    dictionary = Dictionary(KernelColumns(UNIT, X), X)
    problem = LaplaceProblem(dictionary, Y[:, 0], weight, offset, LOGIT)
    return problem, (UNIT(X.numpy()), Y[:, 0].numpy(), offset), weight.numpy()


def test_mode_and_evidence_equal_the_dense_laplace_approximation():
    problem, data, weight = laplace_problem()
    active, s = [3, 17, 8], np.array([0.5, 2.0, 7.0])
    mode = problem.mode(torch.tensor(active), torch.from_numpy(s), torch.zeros(3).double())
    mean, _, evidence = reference.logit_laplace(*data, active, s, weight)
    np.testing.assert_allclose(mode.mean, mean, atol=1e-8)
    np.testing.assert_allclose(mode.log_evidence, evidence, atol=1e-8)
    np.testing.assert_allclose(mode.fitted, data[0][:, active] @ mean, atol=1e-8)


def test_mode_is_found_from_a_far_start():
    problem, _, _ = laplace_problem()
    active, s = torch.tensor([3, 17]), torch.tensor([0.1, 0.1]).double()
    near = problem.mode(active, s, torch.zeros(2).double())
    far = problem.mode(active, s, torch.tensor([80.0, -90.0]).double())
    np.testing.assert_allclose(far.mean, near.mean, atol=1e-7)


def test_regression_at_the_mode_has_its_posterior_and_slopes():
    problem, (Phi, y, offset), weight = laplace_problem()
    active, s = [3, 17, 8], np.array([0.5, 2.0, 7.0])
    mode = problem.mode(torch.tensor(active), torch.from_numpy(s), torch.zeros(3).double())
    state = EvidenceState(problem.source(mode), 1.0, mode.indices, mode.precision)
    mean, H, _ = reference.logit_laplace(Phi, y, offset, active, s, weight)
    np.testing.assert_allclose(state.mean, mean, atol=1e-7)
    np.testing.assert_allclose(state.covariance, np.linalg.inv(H), atol=1e-7)
    p = 1 / (1 + np.exp(y * (offset + Phi[:, active] @ mean)))
    np.testing.assert_allclose(state.Q, Phi.T @ (weight * y * p), atol=1e-7)
    B = weight * p * (1 - p)
    C = np.diag(1 / B) + (Phi[:, active] / s) @ Phi[:, active].T
    np.testing.assert_allclose(state.S, np.sum(Phi * np.linalg.solve(C, Phi), axis=0), rtol=1e-7)


def test_classifier_raises_the_dense_evidence_at_every_iteration():
    X, Y = bananas(80)
    fit = fit_relevance_classifier(UNIT, X, Y, LOGIT)
    assert fit.converged
    assert np.all(np.diff(fit.history) >= 0)
    column = fit.columns[0]
    s = column.precision.numpy()
    data = UNIT(X.numpy()), Y[:, 0].numpy(), 0.0
    *_, evidence = reference.logit_laplace(*data, column.indices.tolist(), s, np.ones(80))
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-7)
    assert fit.log_evidence == fit.history[-1]


def test_steps_that_lower_the_evidence_are_taken_back():
    fit = fit_relevance_classifier(RBF(0.3), *bananas(30, seed=1), LOGIT, tol=1e-3)
    rises = np.diff(fit.history)
    assert np.all(rises >= 0)
    assert np.sum(rises[:-1] == 0) > 0 and fit.converged


def test_fit_ends_where_no_change_of_a_precision_raises_the_evidence_by_much():
    X, Y = bananas(60)
    fit = fit_relevance_classifier(UNIT, X, Y, LOGIT, tol=1e-3)
    Phi, y, active = UNIT(X.numpy()), Y[:, 0].numpy(), fit.indices.tolist()

    def evidence(active, s):
        return reference.logit_laplace(Phi, y, 0.0, active, s, np.ones(60))[2]

    # The curvatures that are held fixed in a step move a little: 0.1 nats of about 20.
    grid = np.geomspace(1e-3, 1e3, 7)
    s = fit.columns[0].precision.numpy()
    for index in {*active, *range(0, 60, 6)}:
        assert reference.best_gain(evidence, active, s, index, grid) < 0.1


def test_columns_are_fitted_one_by_one():
    X, Y = bananas(80)
    second = torch.where(X[:, :1] > 0.5, 1.0, -1.0).double()
    both = fit_relevance_classifier(UNIT, X, torch.cat([Y, second], 1), LOGIT)
    alone = [fit_relevance_classifier(UNIT, X, y, LOGIT) for y in (Y, second)]
    mean, variance = both.posterior.mean_and_variance(X)
    assert mean.shape == variance.shape == (80, 2)
    for c, fit in enumerate(alone):
        assert torch.equal(both.columns[c].indices, fit.indices)
        np.testing.assert_allclose(mean[:, c], fit.posterior.mean(X)[:, 0], atol=1e-8)
    assert set(both.indices.tolist()) == {i for fit in alone for i in fit.indices.tolist()}
    total = sum(fit.log_evidence for fit in alone)
    np.testing.assert_allclose(both.log_evidence, total, atol=1e-8)


def test_offset_is_part_of_the_latent_function():
    X, Y = bananas(80)
    offset = torch.tensor([1.5]).double()
    fit = fit_relevance_classifier(UNIT, X, Y, LOGIT, offset=offset)
    far = torch.tensor([[50.0, 50.0]]).double()
    assert float(fit.posterior.mean(far)) == 1.5
    *_, evidence = reference.logit_laplace(
        UNIT(X.numpy()),
        Y[:, 0].numpy(),
        1.5,
        fit.indices.tolist(),
        fit.columns[0].precision.numpy(),
        np.ones(80),
    )
    np.testing.assert_allclose(fit.log_evidence, evidence, atol=1e-7)


def test_weights_of_classes_count_as_repeated_rows():
    X, Y = bananas(50)
    counts = torch.arange(50) % 3 + 1
    weighted = fit_relevance_classifier(UNIT, X, Y, LOGIT, row_weight=counts.double())
    again = torch.arange(50).repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    repeated = fit_relevance_classifier(UNIT, X[again], Y[again], LOGIT, candidates=first)
    assert torch.equal(again[repeated.indices], weighted.indices)
    np.testing.assert_allclose(weighted.log_evidence, repeated.log_evidence, atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 30])
def test_separable_and_one_sided_labels_stay_finite(n):
    X = torch.linspace(-2, 2, n).double()[:, None]
    for Y in (torch.ones(n, 1).double(), torch.where(X > 0, 1.0, -1.0).double()):
        fit = fit_relevance_classifier(UNIT, X, Y, LOGIT)
        mean, variance = fit.posterior.mean_and_variance(X)
        assert bool(torch.isfinite(torch.cat([mean, variance])).all())
        assert np.isfinite(fit.log_evidence)


def test_amplitude_of_the_kernel_has_no_effect():
    X, y = sinc(150)
    one, other = (fit_relevance(a * RBF(2.0), X, y) for a in (1.0, 16.0))
    assert torch.equal(one.indices, other.indices)
    np.testing.assert_allclose(one.log_evidence, other.log_evidence, atol=1e-6)
    np.testing.assert_allclose(one.posterior.mean(GRID), other.posterior.mean(GRID), atol=1e-6)
