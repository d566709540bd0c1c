"""Sequential evidence maximisation of the relevance vector machine against the dense oracle."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, WhiteKernel

from skgp.data import Data
from skgp.datasets import make_sinc
from skgp.inference.defaults import ALIGNED, NOISE_FLOOR
from skgp.inference.relevance import evidence as module
from skgp.inference.relevance.evidence import choose_candidates, fit_relevance, update_noise
from skgp.inference.relevance.steps import (
    DesignSource,
    Dictionary,
    EvidenceState,
    GramSource,
    Move,
    make_source,
)
from skgp.inference.stochastic.basis import KernelColumns
from skgp.learning.search import fit_hyperparameters
from tests.reference import relevance as reference
from tests.same import assert_same

KERNEL = RBF(2.0)
GRID = torch.linspace(-10, 10, 400, dtype=torch.float64)[:, None]
TRUTH = torch.sinc(GRID[:, 0] / np.pi)


def sinc(n, seed=0, noise=0.1):
    X, y = make_sinc(n_samples=n, noise=noise, random_state=seed)
    return torch.from_numpy(X), torch.from_numpy(y)


def make_state(kernel=KERNEL, n=40, noise=0.02):
    X, y = sinc(n)
    basis = KernelColumns(kernel, X)
    state = EvidenceState(make_source(basis, X, y, None, 2**25), noise)
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
    state.apply(Move(index, np.inf, after - before))
    assert state.indices.tolist() == removed
    assert_exact(state, Phi, y)


def test_refresh_changes_nothing_but_rounding():
    state, Phi, y = make_state()
    for _ in range(25):
        state.apply(state.best_move())
    before = state.log_evidence, state.S.clone(), state.Q.clone()
    state.refresh()
    assert_exact(state, Phi, y)
    np.testing.assert_allclose(before[0], state.log_evidence, atol=1e-9)
    np.testing.assert_allclose(before[1], state.S, atol=1e-9 * float(state.S.max()))
    np.testing.assert_allclose(before[2], state.Q, atol=1e-9 * float(state.Q.abs().max()))


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
        source = make_source(KernelColumns(RBF(1.0), X), X, y, None, 2**20)
        s = torch.from_numpy(10 ** rng.uniform(-3, 3, n))
        state = EvidenceState(source, 10 ** rng.uniform(-4, 2), torch.arange(n), s)
        before, noise = state.log_evidence, state.noise_variance
        update_noise(state, 1e-9)
        assert state.log_evidence >= before
        assert state.noise_variance != noise


@pytest.mark.parametrize("seed", range(4))
def test_fit_keeps_few_vectors_of_500_rows_of_sinc(seed):
    fit = fit_relevance(KERNEL, *sinc(500, seed))
    assert 7 <= len(fit.indices) <= 15
    assert error(fit) <= 0.04


def test_fit_keeps_few_vectors_of_5000_rows_of_sinc():
    fit = fit_relevance(RBF(1.6), *sinc(5000))
    assert fit.converged
    assert len(fit.indices) <= 20
    assert error(fit) <= 0.04


def test_fit_keeps_few_vectors_at_a_learned_length_scale(generator):
    X, y = sinc(300)
    kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    learned = fit_hyperparameters([kernel], Data(X, y / y.std()), generator=generator).kernel
    fit = fit_relevance(learned.k1, X, y)
    assert 7 <= len(fit.indices) <= 15
    assert error(fit) <= 0.04


def error(fit):
    """Root mean squared error of the mean to the true function."""
    return float((fit.posterior.mean(GRID) - TRUTH).square().mean().sqrt())


def test_amplitude_of_the_kernel_has_no_effect():
    X, y = sinc(150)
    one, other = (fit_relevance(a * RBF(2.0), X, y) for a in (1.0, 16.0))
    assert torch.equal(one.indices, other.indices)
    np.testing.assert_allclose(one.log_evidence, other.log_evidence, atol=1e-6)
    np.testing.assert_allclose(one.posterior.mean(GRID), other.posterior.mean(GRID), atol=1e-6)


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


def test_weights_count_as_repeated_rows():
    X, y = sinc(60)
    counts = torch.arange(60) % 3 + 1
    weighted = fit_relevance(KERNEL, X, y, sample_weight=counts.double(), tol=1e-6)
    again = torch.arange(60).repeat_interleave(counts)
    first = torch.cumsum(counts, 0) - counts
    repeated = fit_relevance(KERNEL, X[again], y[again], candidates=first, tol=1e-6)
    assert torch.equal(again[repeated.indices], weighted.indices)
    np.testing.assert_allclose(weighted.log_evidence, repeated.log_evidence, atol=1e-7)
    np.testing.assert_allclose(weighted.noise_variance, repeated.noise_variance, rtol=1e-6)


def test_duplicated_rows_do_not_enter_twice():
    X, y = sinc(60)
    fit = fit_relevance(KERNEL, torch.cat([X, X]), torch.cat([y, y]))
    assert fit.converged
    assert len((fit.indices % 60).unique()) == len(fit.indices)


@pytest.mark.parametrize(
    ("X", "y"),
    [
        (torch.zeros(1, 1), torch.ones(1)),
        (torch.arange(20.0)[:, None], torch.zeros(20)),
        (torch.arange(20.0)[:, None], torch.ones(20)),
        (torch.zeros(10, 2), torch.arange(10.0)),
        (torch.linspace(-3, 3, 40)[:, None], torch.linspace(-3, 3, 40).sin()),
    ],
    ids=["one row", "zero", "constant", "one place", "noise-free"],
)
def test_fit_of_degenerate_data_is_finite(X, y):
    X, y = X.double(), y.double()
    fit = fit_relevance(RBF(1.0), X, y)
    mean, variance = fit.posterior.mean_and_variance(X)
    assert bool(torch.isfinite(torch.cat([mean, variance])).all())
    assert np.isfinite(fit.log_evidence)
    mean_square = float(y.square().mean()) or 1.0
    assert fit.noise_variance >= NOISE_FLOOR * mean_square * (1 - 1e-9)
    assert bool((variance >= 0).all())


def test_fit_of_noise_free_targets_is_accurate():
    X = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None]
    fit = fit_relevance(RBF(1.0), X, X[:, 0].sin())
    np.testing.assert_allclose(fit.posterior.mean(X), X[:, 0].sin(), atol=5e-3)


def test_fit_of_zero_targets_has_no_vectors_and_pickles():
    X = torch.arange(20.0).double()[:, None]
    fit = fit_relevance(RBF(1.0), X, torch.zeros(20).double())
    assert len(fit.indices) == 0
    again = pickle.loads(pickle.dumps(fit.posterior))
    assert torch.equal(again.mean(X), torch.zeros(20).double())


@pytest.mark.parametrize("route", ["stored", "gram", "streamed"])
def test_sources_equal_dense_products(route, rng):
    X, y = sinc(50)
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, size=50))
    m = 20 if route == "gram" else 50
    budget = {"stored": 2**20, "gram": 8 * 20 * 20, "streamed": 8 * 50}[route]
    basis = KernelColumns(KERNEL, X[:m])
    source = make_source(basis, X, y, weight, budget)
    assert isinstance(source, GramSource if route == "gram" else DesignSource)
    Phi, w = KERNEL(X.numpy(), X.numpy()[:m]), weight.numpy()
    G = Phi.T @ (w[:, None] * Phi)
    index = torch.tensor([3, 11])
    np.testing.assert_allclose(source.gram_columns(index), G[:, [3, 11]], rtol=1e-12)
    np.testing.assert_allclose(source.squares, np.diag(G), rtol=1e-12)
    np.testing.assert_allclose(source.moment, Phi.T @ (w * y.numpy()), atol=1e-12)
    np.testing.assert_allclose(source.sum_square, w @ y.numpy() ** 2, rtol=1e-12)
    np.testing.assert_allclose(source.n_rows, w.sum(), rtol=1e-12)


def test_every_source_and_memory_map_gives_the_same_fit(tmp_path, monkeypatch):
    X, y = sinc(200)
    for name, values in (("X", X), ("y", y)):
        np.save(tmp_path / f"{name}.npy", values.numpy())
    maps = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("X", "y")]
    rows, fits = torch.arange(0, 200, 4), []
    gram = 8 * 50 * 50  # bytes
    for budget, data in ((2**25, (X, y)), (gram, (X, y)), (gram, maps), (8 * 50, (X, y))):
        monkeypatch.setattr(module, "MEMORY_BUDGET", budget)
        fits.append(fit_relevance(KERNEL, *data, candidates=rows))
    for fit in fits[1:]:
        assert torch.equal(fit.indices, fits[0].indices)
        np.testing.assert_allclose(fit.log_evidence, fits[0].log_evidence, atol=1e-7)


def test_dictionary_regenerates_what_it_does_not_keep():
    X, _ = sinc(30)
    Phi = torch.from_numpy(KERNEL(X.numpy()))
    dictionary = Dictionary(KernelColumns(KERNEL, X), X, memory_budget=0)
    np.testing.assert_allclose(dictionary.columns(torch.tensor([2, 20])), Phi[:, [2, 20]])
    np.testing.assert_allclose(dictionary.rmatmul(X), Phi.T @ X, atol=1e-12)
    weight = X[:, 0].square()
    np.testing.assert_allclose(dictionary.squares(weight), Phi.square().T @ weight, rtol=1e-12)


def test_candidates_limit_the_vectors_and_are_deterministic_for_a_generator():
    X, y = sinc(400)
    fits = [
        fit_relevance(KERNEL, X, y, candidates=40, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 3, 4)
    ]
    assert torch.equal(fits[0].indices, fits[1].indices)
    assert fits[0].log_evidence == fits[1].log_evidence != fits[2].log_evidence
    chosen = choose_candidates(400, 40, torch.Generator().manual_seed(3))
    assert set(fits[0].indices.tolist()) <= set(chosen.tolist())
    assert error(fits[0]) <= 0.04


def test_candidates_default_to_every_row_up_to_a_limit(generator):
    assert len(choose_candidates(20_000, None, None)) == 20_000
    assert len(choose_candidates(20_001, None, generator)) == 2000
    assert choose_candidates(9, torch.tensor([4, 1, 4]), None).tolist() == [1, 4]
    assert choose_candidates(5, 9, None).tolist() == [0, 1, 2, 3, 4]


def test_callback_sees_the_state_and_stops():
    calls = []

    def callback(iteration, info):
        calls.append((iteration, info))
        return iteration == 4

    fit = fit_relevance(KERNEL, *sinc(100), callback=callback)
    assert [iteration for iteration, _ in calls] == [1, 2, 3, 4]
    assert fit.n_iter == 4 and not fit.converged
    assert [-info["loss"] for _, info in calls] == fit.history
    assert calls[-1][1]["n_vectors"] == len(fit.indices)


def test_posterior_pickles_small_and_predicts_the_same():
    fit = fit_relevance(KERNEL, *sinc(500))
    stored = pickle.dumps(fit.posterior)
    assert len(stored) < 8000
    assert_same(pickle.loads(stored).mean(GRID), fit.posterior.mean(GRID))


def test_variance_shrinks_far_from_the_vectors():
    fit = fit_relevance(KERNEL, *sinc(200))
    _, variance = fit.posterior.mean_and_variance(torch.tensor([[0.0], [80.0]]).double())
    assert float(variance[1]) < 1e-12 < float(variance[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"candidates": 0}, "candidates"),
        ({"candidates": 5}, "generator"),
        ({"candidates": torch.tensor([30])}, "candidates"),
        ({"sample_weight": torch.zeros(30).double()}, "sample_weight"),
    ],
)
def test_bad_options_are_named(options, match):
    with pytest.raises(ValueError, match=match):
        fit_relevance(KERNEL, *sinc(30), **options)
