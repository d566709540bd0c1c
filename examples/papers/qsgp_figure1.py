r"""Figure 1 of "Quadruply Stochastic Gaussian Processes" (Evans and Nair, 2020).

Monte Carlo variance of the estimator of :math:`\tfrac{1}{\sigma^2} \mu^T \Phi^T \Phi \mu`, and of
its gradient in :math:`\mu` averaged over all elements, against the rank of the control variate of
eq. (3), both relative to rank 0. As in the paper: kin40k, m = 10000 random Fourier features, 500
rows and 500 basis functions an estimate, weights drawn from the prior, 1000 estimates a rank.

The gradient comes in three forms: with the dense gradient of the control variate's expectation
("dense", which no O(1) iteration can afford), and with the sparse ones of appendix F.1 ("union")
and of this package ("draws"). A sparse gradient has a variance of its own, shown as "floor": that
of the exact gradient's sampled entries. With "coefficient" the control variate of the objective is
multiplied by the best constant. "projected" is "dense" with the support rows weighed by projection,
as the solver of this package does (`projection_weights`); in eq. (3) all count alike.

Run it as::

    python examples/papers/qsgp_figure1.py [--data FOLDER] [--output FOLDER] [--repetitions 1000]

FOLDER holds ``kin40k.npz`` with arrays X and y; the environment variable SKGP_DATA may name it too.
Without it a generated problem of the same size takes its place. Prints a table and writes
``qsgp_figure1.csv`` and ``qsgp_figure1.png``.
"""

import argparse
import csv
import os
from pathlib import Path

import numpy as np
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, WhiteKernel
from torch import Tensor

from skgp.inference.stochastic.basis import IndexSet, everything, sample_indices
from skgp.inference.stochastic.estimators import (
    Estimate,
    LowRankControlVariate,
    projection_weights,
    quadratic_loss,
    sample_design,
)
from skgp.kernels import FourierFeatures
from skgp.optim import sample_without_replacement

RANKS = (0, 10, 30, 100, 200, 300, 500, 1000)
KINDS = ("dense", "projected", "union", "draws")
N_FEATURES = 10_000
BATCH = 500


class SingleFunctions:
    """Fourier features whose sampling unit is one function, as in the paper, not a block.

    The frequencies of all functions are kept, which is cheap at this size.
    """

    unit_size = 1
    diagonal_precision = True
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, fourier: FourierFeatures) -> None:
        self.kernel = fourier.kernel
        self.n_features = self.n_units = fourier.n_features
        parts = [fourier.frequencies(block) for block in range(fourier.n_blocks)]
        W, amplitude = (torch.cat(p).to(self.dtype) for p in zip(*parts, strict=True))
        self.W, self.amplitude = W.repeat_interleave(2, 0), amplitude.repeat_interleave(2)
        self.phase = torch.tensor([0.0, np.pi / 2], dtype=self.dtype).repeat(len(W))

    def features(self, X: Tensor, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return columns of Phi; sin(u) = cos(u - pi / 2)."""
        phases = X @ self.W[indices].T - self.phase[indices]
        return phases.cos_() * self.amplitude[indices]

    def sampled(self, X: Tensor, sample: IndexSet, theta: Tensor | None = None) -> Tensor:
        """Return the columns of a sample."""
        return self.features(X, sample.indices, theta)

    def precision_diag(self, indices: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the prior's precision, left out of figure 1."""
        return torch.zeros(len(indices), dtype=self.dtype)


def load_problem(folder: str | None) -> tuple[str, np.ndarray, np.ndarray]:
    """Return kin40k's inputs and targets, or a generated problem of 40000 rows."""
    if folder is not None:
        with np.load(Path(folder) / "kin40k.npz") as arrays:
            return "kin40k", arrays["X"].astype(float), arrays["y"].astype(float)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40_000, 8))
    W, phase = rng.normal(size=(8, 50)) / 2, rng.uniform(0, 2 * np.pi, 50)
    return "generated", X, np.cos(X @ W + phase).sum(1) / 5 + 0.1 * rng.normal(size=len(X))


def fit_kernel(X: np.ndarray, y: np.ndarray) -> tuple[Kernel, float]:
    """Empirical Bayes of an exact GP on 1000 rows, the initialisation of appendix I.1."""
    rows = np.random.default_rng(1).choice(len(X), 1000, replace=False)
    kernel = ConstantKernel(1.0) * RBF(np.ones(X.shape[1])) + WhiteKernel(0.1)
    fitted = GaussianProcessRegressor(kernel).fit(X[rows], y[rows]).kernel_
    return fitted.k1, fitted.k2.noise_level


def dense_gradient(m: int, i: Tensor, j: Tensor, estimate: Estimate) -> Tensor:
    """Gradient (m,) in float64 of a sparse estimate."""
    gradient = torch.zeros(m, dtype=torch.float64)
    gradient.index_add_(0, i, estimate.grad_i[:, 0].double())
    return gradient.index_add_(0, j, estimate.grad_j[:, 0].double())


def controls(
    basis: SingleFunctions, X: Tensor, support: Tensor, mu: Tensor, kind: str
) -> dict[int, LowRankControlVariate]:
    """Build a control variate for every rank, of nested sets of support rows."""
    made = {}
    B = basis.features(X[support], everything(basis).indices)
    for rank in RANKS[1:]:
        weights = None
        if kind == "projected":
            weights = projection_weights(basis.kernel, X[support[:rank]], X[:: len(X) // 10_000])
        factor = B[:rank]
        sums = (factor @ mu[:, None]).double()
        # A dense gradient of the expectation is a constant: leaving it out shifts no variance.
        made[rank] = LowRankControlVariate(
            lambda k, F=factor: F[:, k.indices],
            sums if kind == "draws" else torch.zeros_like(sums),
            weights=weights,
        )
        made[rank].union_sums = sums if kind == "union" else None
    return made


def union_weight(i: IndexSet, j: IndexSet) -> float:
    r"""Weight of a sum over the union of two independent samples (appendix F.1).

    Given its size u in units, the union is uniform over all sets of u units by symmetry. Hence

    .. math:: E\Big[\frac{\text{units}}{u} \sum_{r \in \tilde i \cup \tilde j} t_r\Big] = \sum_r t_r

    holds exactly, although u is random. The paper's :math:`m / |\tilde i \cup \tilde j|` counts
    basis functions in place of units: the same if all units have one size, as here, and biased
    otherwise (units of 3 and 1 functions, one drawn for each sample: expected weights 5/6 and 3/2).
    """
    return i.n_units / len(torch.cat([i.units, j.units]).unique())


def add_union(
    estimate: Estimate, i: IndexSet, j: IndexSet, B_i: Tensor, B_j: Tensor, a: Tensor, scale: float
) -> Estimate:
    """Add the gradient of the expectation a'a by the entries in the union, the paper's way."""
    factor, a = 2 * scale * union_weight(i, j), a.to(B_i)
    only_j = ~torch.isin(j.indices, i.indices, assume_unique=True)
    grad_j = factor * only_j[:, None].to(B_j) * (B_j.T @ a)
    return estimate + Estimate(scale * a.square().sum(0), factor * (B_i.T @ a), grad_j)


def variances(
    basis: SingleFunctions, X: Tensor, noise: float, *, repetitions: int, kind: str
) -> dict[int, tuple[float, float, float]]:
    """Variances of value, of value with coefficient, and of gradient for every rank."""
    generator = torch.Generator().manual_seed(2)
    n, m = len(X), basis.n_features
    mu = torch.randn(m, generator=generator)
    support = torch.randperm(n, generator=generator)[: max(RANKS)]
    made = controls(basis, X, support, mu, kind)
    plain_values, corrections = [], {rank: [] for rank in RANKS}
    moments = {rank: torch.zeros(2, m, dtype=torch.float64) for rank in RANKS}
    for _ in range(repetitions):
        rows = sample_without_replacement(n, BATCH, generator=generator)
        i, j = (sample_indices(basis, BATCH, generator=generator) for _ in range(2))
        design = sample_design(basis, X[rows], i, j, n=n)
        V_i, V_j = mu[i.indices, None], mu[j.indices, None]
        plain = quadratic_loss(design, V_i, V_j, noise)
        plain_values.append(float(plain.value))
        for rank in RANKS:
            estimate = plain
            if rank:
                cv = made[rank]
                parts = cv.columns(i), cv.columns(j)
                scale = n / rank / noise
                estimate = plain + cv.estimate(i, j, *parts, V_i, V_j, scale)
                if cv.union_sums is not None:
                    estimate = add_union(estimate, i, j, *parts, cv.union_sums, scale)
            corrections[rank].append(float(estimate.value) - plain_values[-1])
            gradient = dense_gradient(m, i.indices, j.indices, estimate)
            moments[rank] += torch.stack([gradient, gradient.square()]) / repetitions
    result = {}
    for rank, (first, second) in moments.items():
        x, z = np.array(plain_values), np.array(corrections[rank])
        best = np.var(x) * (1 - np.corrcoef(x, z)[0, 1] ** 2) if rank else np.var(x)
        gradient = float((second - first.square()).mean())
        result[rank] = (float(np.var(x + z)), float(best), gradient)
    return result


def sparsity_floor(basis: SingleFunctions, X: Tensor, noise: float, kind: str) -> float:
    """Gradient variance of the exact gradient's sampled entries."""
    if kind in ("dense", "projected"):
        return 0.0
    generator = torch.Generator().manual_seed(2)
    mu = torch.randn(basis.n_features, generator=generator)
    whole = everything(basis).indices
    half = torch.zeros(basis.n_features, dtype=torch.float64)
    for rows in X.split(500):
        Phi = basis.features(rows, whole)
        half += (Phi.T @ (Phi @ mu)).double() / noise
    i, j = (sample_indices(basis, BATCH, generator=generator) for _ in range(2))
    factor = 2 * (i.weight - 1) if kind == "draws" else 4 * (union_weight(i, j) - 1)
    return float(factor * half.square().mean())


def main() -> None:
    """Compute, print and draw figure 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("SKGP_DATA"))
    parser.add_argument("--output", default=".")
    parser.add_argument("--repetitions", type=int, default=1000)
    arguments = parser.parse_args()
    name, X, y = load_problem(arguments.data)
    X, y = (X - X.mean(0)) / X.std(0), (y - y.mean()) / y.std()
    kernel, noise = fit_kernel(X, y)
    basis = SingleFunctions(FourierFeatures(kernel, N_FEATURES, X.shape[1], kind="iid", seed=0))
    X = torch.tensor(X, dtype=torch.float32)
    print(f"{name}: n = {len(X)}, d = {X.shape[1]}, kernel {kernel}, noise variance {noise:.4f}")
    table = []
    for kind in KINDS:
        result = variances(basis, X, noise, repetitions=arguments.repetitions, kind=kind)
        floor = sparsity_floor(basis, X, noise, kind)
        for rank, (value, best, gradient) in result.items():
            base = result[0]
            row = (value / base[0], best / base[0], gradient / base[2], floor / base[2])
            table.append((kind, rank, *row))
    write(table, Path(arguments.output), name)


def write(table: list[tuple], folder: Path, name: str) -> None:
    """Print the table, and write it as CSV and as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    header = ("kind", "rank", "objective", "coefficient", "gradient", "floor")
    print(("{:>8} {:>6}" + 4 * " {:>12}").format(*header))
    for row in table:
        print(("{:>8} {:>6d}" + 4 * " {:>12.4f}").format(*row))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "qsgp_figure1.csv", "w", newline="") as file:
        csv.writer(file).writerows([header, *table])
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for kind, line in zip(KINDS, ("-", "-.", "--", ":"), strict=True):
        ranks, objective, _, gradient, _ = zip(*(r[1:] for r in table if r[0] == kind), strict=True)
        if kind in ("dense", "projected"):
            axes.plot(ranks, objective, line, color="C0", label=f"objective ({kind})")
        axes.plot(ranks, gradient, line, color="C1", label=f"gradient ({kind})")
    axes.set(xlabel="rank of the control variate", ylabel="variance, rank 0 = 1", yscale="log")
    axes.set_title(name)
    axes.legend(fontsize=8)
    figure.savefig(folder / "qsgp_figure1.png", dpi=150)


if __name__ == "__main__":
    main()
