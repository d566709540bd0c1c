"""The pair (Phi, S) by columns, and uniform samples of basis functions."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.inference.stochastic import basis as module
from skgp.inference.stochastic.basis import (
    KernelColumns,
    SpectralColumns,
    everything,
    index_set,
    product,
    sample_indices,
    take_rows,
)
from skgp.kernels import FourierFeatures, gram
from tests.inference.stochastic_problems import BASES, KERNEL, all_samples, make_problem
from tests.same import assert_same


@pytest.mark.parametrize("name", BASES)
def test_features_of_any_indices_are_columns_of_the_whole(name):
    problem = make_problem(name)
    Phi, S, _ = problem.dense()
    some = torch.tensor([0, 2, 3, 4])
    np.testing.assert_allclose(
        problem.basis.features(problem.X, some).numpy(), Phi[:, some], atol=1e-12
    )
    np.testing.assert_allclose(problem.basis.precision_diag(some).numpy(), np.diag(S)[some])
    if name == "inducing":
        found = problem.basis.precision(some, some[1:]).numpy()
        np.testing.assert_allclose(found, S[np.ix_(some, some[1:])], atol=1e-12)
    V = torch.eye(problem.basis.n_features, dtype=torch.float64)[:, :3]
    np.testing.assert_allclose(product(problem.basis, problem.X, V), Phi[:, :3], atol=1e-12)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_prior_covariance_of_functions_is_the_kernel(name):
    problem = make_problem(name, n_features=2000, block_size=300)
    if name == "inducing":
        problem.basis.Z = problem.X
    Phi, S, _ = problem.dense()
    K = gram(KERNEL, problem.X).numpy()
    error = 1e-8 if name == "inducing" else 0.08
    np.testing.assert_allclose(Phi @ np.linalg.solve(S, Phi.T), K, atol=error)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_gradients_in_theta_match_differences(name):
    problem = make_problem(name)
    indices = everything(problem.basis).indices
    theta = torch.tensor(KERNEL.theta, requires_grad=True)

    def outputs(theta):
        Phi = problem.basis.features(problem.X, indices, theta)
        if name == "fourier":  # its precision is constant
            return Phi
        return Phi, problem.basis.precision_diag(indices, theta)

    assert torch.autograd.gradcheck(outputs, (theta,))


@pytest.mark.parametrize("learned", [False, True])
def test_spectral_columns_are_fourier_features_at_theta(learned):
    kernel = 2.0 * RBF(0.8) + Matern(1.5, nu=1.5)
    fourier = FourierFeatures(kernel, 30, 2, seed=3, block_size=5)
    theta = torch.tensor(kernel.theta + 0.3, requires_grad=True) if learned else None
    columns = SpectralColumns(fourier, theta)
    X = make_problem("fourier").X
    copy = pickle.loads(pickle.dumps(columns))
    assert columns.n_features == 30 and columns.n_blocks == 3
    for b in range(3):
        expected = fourier.features(X, b, theta)
        assert_same(columns.features(X, b), expected.detach())
        assert_same(copy.features(X, b), expected.detach())
        assert columns.block_slice(b) == fourier.block_slice(b)
        assert columns.features(X.float(), b).dtype == torch.float32
    if learned:  # theta is a copy: what a trainer does next does not matter
        with torch.no_grad():
            theta += 1.0
        assert_same(columns.features(X, 0), copy.features(X, 0))


@pytest.mark.parametrize("block_size", [1, 3, 100])
def test_kernel_columns_are_those_of_the_kernel(block_size, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block_size)
    rng = np.random.default_rng(0)
    X, Z = rng.standard_normal((5, 2)), rng.standard_normal((7, 2))
    columns = KernelColumns(KERNEL, torch.from_numpy(Z))
    copy = pickle.loads(pickle.dumps(columns))
    assert columns.n_blocks == -(-7 // block_size)
    for one in (columns, copy):
        blocks = [one.features(torch.from_numpy(X), b) for b in range(one.n_blocks)]
        np.testing.assert_allclose(torch.cat(blocks, dim=1).numpy(), KERNEL(X, Z), rtol=1e-12)
        widths = [one.block_slice(b).stop - one.block_slice(b).start for b in range(one.n_blocks)]
        assert widths == [block.shape[1] for block in blocks] and sum(widths) == one.n_features
    assert columns.features(torch.from_numpy(X).float(), 0).dtype == torch.float32


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_sampling_includes_every_function_equally_often(name, generator):
    basis = make_problem(name).basis
    repetitions = 4000
    counts = np.zeros(basis.n_features)
    for _ in range(repetitions):
        sample = sample_indices(basis, 5 if name == "fourier" else 2, generator=generator)
        counts[sample.indices.numpy()] += 1
    p = 1 / sample.weight
    z = (counts - repetitions * p) / np.sqrt(repetitions * p * (1 - p))
    assert np.abs(z).max() < 4


@pytest.mark.parametrize("n_draws", [1, 2, 3])
def test_weights_are_inverse_inclusion_probabilities(n_draws):
    basis = make_problem("fourier").basis  # blocks of 4, 4 and 2
    samples = all_samples(basis, n_draws)
    expected = torch.zeros(basis.n_features)
    for sample in samples:
        expected[sample.indices] += sample.weight / len(samples)
    torch.testing.assert_close(expected, torch.ones(basis.n_features))


def test_sums_over_the_units_that_are_drawn_from_are_sums_over_all():
    """The others' terms are 0: their weights are."""
    basis = make_problem("fourier").basis  # blocks of 4, 4 and 2
    terms = torch.arange(1.0, 11.0)
    terms[8:] = 0
    samples = [index_set(basis, torch.tensor([unit]), 2) for unit in range(2)]
    found = [sample.weight * float(terms[sample.indices].sum()) for sample in samples]
    assert np.mean(found) == float(terms.sum())


def test_first_blocks_with_their_share_of_the_precision_have_the_prior_of_all():
    problem = make_problem("fourier", n_features=4000, block_size=100)
    sample = index_set(problem.basis, torch.arange(10), 10)
    Phi = problem.basis.sampled(problem.X, sample)
    K = gram(KERNEL, problem.X)
    assert sample.share == 0.5
    torch.testing.assert_close(Phi @ Phi.T / sample.share, K, atol=0.1, rtol=0)
    torch.testing.assert_close((Phi.square().sum(1) / sample.share), K.diagonal())


def test_sample_of_more_than_all_is_everything(generator):
    basis = make_problem("fourier").basis
    sample = sample_indices(basis, 10**9, generator=generator)
    assert sample.weight == 1 and len(sample) == 10
    assert len(index_set(basis, torch.tensor([2]))) == 2


def test_take_rows_reads_a_read_only_memory_map(tmp_path):
    X = np.arange(12.0).reshape(6, 2)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    rows = take_rows(mapped, torch.tensor([1, 4]), torch.float32)
    rows += 1  # a copy: writable
    np.testing.assert_array_equal(rows.numpy(), X[[1, 4]] + 1)
    np.testing.assert_array_equal(mapped, X)
