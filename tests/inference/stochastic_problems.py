"""Small problems for the tests of the stochastic route, and all their samples."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.relevance.stochastic import SparseBasis
from skgp.inference.stochastic.basis import (
    FourierBasis,
    InducingBasis,
    StochasticBasis,
    everything,
    index_set,
)
from skgp.kernels import FourierFeatures

NOISE = 0.3
BASES = ("fourier", "sparse", "inducing")
KERNEL = ConstantKernel(1.5) * RBF(0.8)


@dataclass
class Problem:
    """A basis on five rows, its dense matrices, and variational parameters."""

    basis: StochasticBasis
    X: torch.Tensor
    y: torch.Tensor
    mu: torch.Tensor
    C: torch.Tensor

    @property
    def n(self):
        return len(self.X)

    def dense(self):
        """Phi, S and y in NumPy."""
        whole = everything(self.basis).indices
        Phi = self.basis.features(self.X, whole)
        if self.basis.diagonal_precision:
            S = torch.diag(self.basis.precision_diag(whole))
        else:
            S = self.basis.precision(whole, whole)
        return Phi.numpy(), S.numpy(), self.y.numpy()


def make_problem(name, *, n=5, block_size=2, n_features=10):
    """Build the problem of one basis; ten features in blocks of 4, 4 and 2 make a short block."""
    rng = np.random.default_rng(1)
    X = torch.tensor(rng.normal(size=(n, 2)))
    if name == "fourier":
        fourier = FourierFeatures(KERNEL, n_features, 2, seed=3, block_size=block_size)
        basis = FourierBasis(fourier)
    else:
        Z = torch.tensor(rng.normal(size=(5, 2)))
        log_s = torch.tensor([-0.5, 0.1, 0.8, -1.2, 0.3], dtype=torch.float64)
        basis = InducingBasis(KERNEL, Z) if name == "inducing" else SparseBasis(KERNEL, Z, log_s)
    m = basis.n_features
    C = np.tril(0.3 * rng.normal(size=(m, m)), -1) + np.diag(rng.uniform(0.5, 1.5, size=m))
    return Problem(
        basis,
        X,
        torch.tensor(rng.normal(size=n)),
        torch.tensor(rng.normal(size=m)),
        torch.tensor(C),
    )


def all_samples(basis, n_draws):
    """Every sample of `n_draws` units; all are equally likely."""
    return [
        index_set(basis, torch.tensor(units))
        for units in combinations(range(basis.n_units), n_draws)
    ]


def all_rows(n, size):
    """Every minibatch of `size` rows."""
    return [torch.tensor(rows) for rows in combinations(range(n), size)]


def scatter_pair(m, i, j, estimate):
    """Dense gradient (m, q) of a sparse estimate."""
    gradient = torch.zeros(m, estimate.grad_i.shape[1], dtype=estimate.grad_i.dtype)
    gradient.index_add_(0, i.indices, estimate.grad_i)
    return gradient.index_add_(0, j.indices, estimate.grad_j)


def z_score(samples, expected):
    """Largest |z| of means of samples (repetitions, ...) against their expectations."""
    samples = np.asarray(samples)
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    deviation = np.abs(samples.mean(axis=0) - expected)
    # A coordinate without noise must be right to rounding.
    exact = error <= 1e-9 * (1 + np.abs(expected))
    assert np.all(deviation[exact] <= 1e-8 * (1 + np.abs(np.asarray(expected)[exact])))
    return np.max(np.where(exact, 0.0, deviation / np.where(exact, 1.0, error)), initial=0.0)
