r"""Which basis, solver and covariance a QSGP uses, and why.

===============================  ==================================================================
observations n                   ``basis="auto"``, ``solver="auto"``: regression
===============================  ==================================================================
up to 4000                       inducing, m = n, dense Cholesky: the exact GP
K of numerical rank <= 1000      inducing at the pivots of K, Cholesky in weight space
K fits in memory (see below)     inducing, m = n, block conjugate gradients, pathwise draws
more                             what predicts held-out data best (:mod:`.routes`): neighbours;
                                 Fourier features (inducing points where the kernel has no spectral
                                 density), streaming Gram matrix and Cholesky; or conjugate
                                 gradients that make K anew for each product
===============================  ==================================================================

===============================  ==================================================================
observations n                   ... classification
===============================  ==================================================================
up to 2000                       inducing, m = n, Newton: the Laplace approximation of the full GP
more                             inducing (cluster centres), :math:`n m^2` flops of about a minute
===============================  ==================================================================

Memory is that of the machine (:mod:`skgp.linalg.runtime`), or as asked: 8 GB hold the matrix of 60
thousand rows in float32 and its preconditioner. Of as many Fourier features as inducing points the
latter classify better wherever data fill a small part of the input space, which is nearly always.

Stochastic gradients are never chosen: they are the only solver that needs neither O(n) nor O(m)
memory an iteration, and the slowest to converge. Laplace noise (:func:`resolve_laplace`) takes
inducing points at all of up to 3000 observations, else as many as about two minutes allow; of
relevance vectors (:func:`resolve_relevance`) the evidence decides the number.
"""

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.weights.gram import StreamingGram
from skgp.kernels.operators import KernelOperator
from skgp.kernels.spectral import has_spectral_density
from skgp.learning.defaults import (
    CHOLESKY_FEATURES,
    CHOLESKY_ROWS,
    FACTOR_ROWS,
    FULL_COVARIANCE_NUMBERS,
    FULL_ROWS,
    GRAM_FLOPS,
    LAPLACE_FLOPS,
    LAPLACE_ROWS,
    MOST_FEATURES,
    N_NEIGHBORS,
    NEWTON_FLOPS,
    PRECONDITIONER_RANK,
    STOCHASTIC_FEATURES,
    STREAMING_FEATURES,
)
from skgp.linalg import NumericalWarning

#: Covariances that each (space, solver) offers; the first is what "auto" takes.
COVARIANCES = {
    ("function", "cholesky"): ("full", "samples", "chevron", "diagonal"),
    ("function", "cg"): ("samples", "diagonal"),
    ("weight", "cholesky"): ("full", "samples", "chevron", "diagonal"),
    ("weight", "cg"): ("samples",),
    ("weight", "gauss-seidel"): ("samples",),
    ("local", "cholesky"): ("full",),
    ("stochastic", "sgd"): ("diagonal", "chevron"),
}
CLASSIFIER_COVARIANCES = {"newton": ("full", "chevron", "diagonal"), "sgd": ("diagonal", "chevron")}


@dataclass(frozen=True)
class Plan:
    """What to fit: as asked by the user, with "auto" and None where open, or resolved.

    Attributes
    ----------
    basis : {"auto", "fourier", "inducing", "neighbors", "relevance"}
    n_basis : int or None
        Of "neighbors" their number. Of a resolved plan, None only for "relevance".
    solver : {"auto", "cholesky", "cg", "gauss-seidel", "sgd", "sequential", "newton"}
        "sequential" is what "auto" becomes for "relevance".
    covariance : {"auto", "diagonal", "chevron", "full", "samples"}
    reason : str
        Why a resolved plan differs from what was asked, or what decided it.
    """

    basis: str = "auto"
    n_basis: int | None = None
    solver: str = "auto"
    covariance: str = "auto"
    reason: str = ""

    @property
    def size(self) -> int:
        """Number of basis functions of a resolved plan."""
        if self.n_basis is None:
            raise ValueError("n_basis is open; resolve the plan first.")
        return self.n_basis

    def space(self, n: int) -> str:
        """ "stochastic", "local", "function" (one basis function a row) or "weight"."""
        if self.basis == "neighbors":
            return "local"
        if self.solver == "sgd":
            return "stochastic"
        return "function" if self.basis == "inducing" and self.n_basis == n else "weight"


@dataclass(frozen=True)
class Options:
    """Parameters of the solvers, in the estimators' words and with the regressor's defaults."""

    n_dense_columns: int = 100
    basis_batch_size: int = 10_000
    batch_size: int = 500
    n_support: int = 500
    bound: str = "plug-in"
    augment: bool = True
    feature_map: str = "orthogonal"
    max_iter: int | None = None
    tol: float | None = None
    learning_rate: float = 0.1
    early_stopping: bool = False
    validation_fraction: float = 0.1
    learn_hyperparameters: bool = True
    refit_noise: bool = True
    moderation: float | None = None  # known beforehand; None lets held-out data decide
    n_samples: int = 63
    n_prior_features: int = 32_768
    preconditioner_rank: int = PRECONDITIONER_RANK
    memory_budget: float = 8e9
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def limits(self, *, tol: float, max_iter: int) -> dict[str, Any]:
        """Tolerance and iterations, those of the solver where the user has not given them."""
        return {
            "tol": tol if self.tol is None else self.tol,
            "max_iter": max_iter if self.max_iter is None else self.max_iter,
        }


@dataclass
class Fit:
    """A fitted regression or classification."""

    posterior: Any  # mean(X), mean_and_variance(X), (p,) or (p, c); of regressions covariance(X)
    plan: Plan  # what was done in the end
    kernel: Any  # without noise; of a classifier, of the features
    noise: float = 0.0
    calibration: float = 1.0  # of all variances, that of the noise included
    n_iter: int = 1
    residual: float = 0.0  # true relative residual of the linear system, where there is one
    log_marginal_likelihood: float | None = None  # nats; Laplace's of a classifier, summed
    elbo: float | None = None  # of Laplace noise, or of the last tenth of stochastic iterations
    likelihood_scale: float | None = None  # b of Laplace noise, of variance `noise`
    relevance: Tensor | None = None  # observations that are relevance vectors, increasing
    history: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)  # of early stopping, every 50 iterations
    statistics: StreamingGram | None = None  # which partial_fit adds rows to
    state: Any = None  # of stochastic gradients, for a warm start
    amplitude: float = 1.0  # of a classifier's prior, times its kernel
    moderation: float = 0.0  # factor of the latent variance that class probabilities average over
    scores: dict = field(default_factory=dict)  # held-out log densities by amplitude, moderation


# ---- regression -------------------------------------------------------------------------------


def resolve(asked: Plan, n: int, kernel, *, memory_budget: float) -> Plan:
    """Fill what a plan of a regression leaves open; the numerical rank of K is not looked at here.

    Parameters
    ----------
    asked : Plan
    n : int
        Training rows.
    kernel : sklearn kernel expression without noise
    memory_budget : float
        Bytes for a kernel matrix and what its products need beside it.

    Raises
    ------
    ValueError
        Where basis, n_basis, solver and covariance cannot be had together.
    """
    basis, reason = asked.basis, asked.reason
    if basis == "neighbors":
        _refuse_other("solver", asked.solver, ("auto", "cholesky"), "basis='neighbors'")
        _refuse_other("covariance", asked.covariance, ("auto", "full"), "basis='neighbors'")
        return Plan(basis, min(asked.n_basis or N_NEIGHBORS, n), "cholesky", "full", reason)
    fits = stored_solve_bytes(n) <= memory_budget
    if basis == "auto":
        basis, reason = _choose_basis(asked, n, kernel, fits)
    n_basis = _choose_size(asked, basis, n, fits)
    solver = asked.solver
    if solver == "auto":
        solver = _choose_solver(basis, n_basis, n)
    return with_covariance(Plan(basis, n_basis, solver, "auto", reason), asked.covariance, n)


def stored_solve_bytes(n: int) -> float:
    """Bytes of conjugate gradients with a stored kernel matrix: that, and the preconditioner."""
    rank = min(n // 2, PRECONDITIONER_RANK)
    return KernelOperator.stored_bytes(n, stored_dtype(n)) + 8.0 * n * rank


def stored_dtype(n: int, asked: torch.dtype = torch.float64) -> torch.dtype:
    """In which conjugate gradients keep the kernel matrix of n rows."""
    return asked if n <= CHOLESKY_ROWS else torch.float32


def with_covariance(plan: Plan, covariance: str, n: int) -> Plan:
    """Check the covariance against the solver, or choose it."""
    offered = COVARIANCES.get((plan.space(n), plan.solver))
    if offered is None:
        raise ValueError(
            f"solver={plan.solver!r} does not serve basis={plan.basis!r} with one basis function a "
            "row. Use solver='cg' or 'cholesky', or n_basis below the number of rows."
        )
    if covariance == "auto":
        # A factor of n^2 numbers is worth keeping on small data only.
        exact = plan.space(n) == "function" and n > FACTOR_ROWS
        return replace(plan, covariance="samples" if exact else offered[0])
    if covariance not in offered:
        raise ValueError(
            f"covariance={covariance!r} cannot be had from solver={plan.solver!r} with "
            f"basis={plan.basis!r} and n_basis={plan.n_basis}; it offers "
            f"{', '.join(map(repr, offered))}. solver='cholesky' offers all of them."
        )
    return replace(plan, covariance=covariance)


def streaming_plan(asked: Plan, n: int, kernel) -> Plan:
    """A plan whose basis stays fixed while rows are added (``partial_fit``)."""
    basis = asked.basis
    if basis == "auto":
        basis = "fourier" if has_spectral_density(kernel) else "inducing"
    m = asked.n_basis or (STREAMING_FEATURES if basis == "fourier" else min(n // 2, 1_000))
    if basis == "inducing" and not 1 <= m < n:
        raise ValueError(
            f"partial_fit keeps the inducing points of its first call, fewer than its rows; got "
            f"n_basis={m} for {n} rows. Give a smaller n_basis, or basis='fourier'."
        )
    return replace(asked, basis=basis, n_basis=m + m % 2 * (basis == "fourier"), solver="cholesky")


def check_laplace(asked: Plan) -> None:
    """Refuse what only Gaussian noise has, by a ValueError."""
    laplace = "likelihood='laplace'"
    _refuse_other("basis", asked.basis, ("auto", "fourier", "inducing"), laplace)
    _refuse_other("solver", asked.solver, ("auto", "cholesky"), laplace)
    _refuse_other("covariance", asked.covariance, ("auto", "full"), laplace)


def resolve_laplace(asked: Plan, n: int, kernel) -> Plan:
    """Fill what a plan for Laplace noise leaves open, for n rows."""
    check_laplace(asked)
    m, basis = asked.n_basis, asked.basis
    reason = "Laplace noise: a full Gaussian over the weights"
    if basis == "auto":
        many = m is not None and m > n and has_spectral_density(kernel)
        basis = "fourier" if many else "inducing"
        reason = f"n_basis={m} exceeds the {n} rows" if many else reason
    if basis == "inducing":
        _warn_of_too_many(m, n)
    if m is None:
        m = laplace_features(n)
    m = min(m, n) if basis == "inducing" else m + m % 2
    return Plan(basis, m, "cholesky", "full", reason)


def laplace_features(n: int) -> int:
    """Basis functions m of Laplace noise: all of up to 3000 rows, then of two minutes; <= 4096."""
    if n <= LAPLACE_ROWS:
        return n
    return min(n, CHOLESKY_FEATURES // 2, 2 * round((LAPLACE_FLOPS / n) ** 0.5 / 2))


def resolve_relevance(asked: Plan, likelihood: str = "gaussian") -> Plan:
    """Fill what a plan for relevance vectors leaves open; ``n_basis`` is known afterwards."""
    vectors = "basis='relevance'"
    _refuse_other("likelihood", likelihood, ("gaussian",), vectors)
    _refuse_other("solver", asked.solver, ("auto", "sgd"), vectors)
    _refuse_other("covariance", asked.covariance, ("auto", "full"), vectors)
    solver = "sgd" if asked.solver == "sgd" else "sequential"
    return Plan("relevance", asked.n_basis, solver, "full", "the evidence decides")


def _refuse_other(name: str, value: str, offered: tuple[str, ...], with_what: str) -> None:
    """Raise an error unless a parameter has one of the values that go together with another."""
    if value not in offered:
        choices = " or ".join(f"{name}={choice!r}" for choice in offered)
        raise ValueError(
            f"{name}={value!r} cannot be had with {with_what}. Use {choices}, or change "
            f"{with_what.split('=')[0]}."
        )


def _choose_basis(asked: Plan, n: int, kernel, fits: bool) -> tuple[str, str]:
    """Basis, and why."""
    spectral, no_density = has_spectral_density(kernel), "the kernel has no spectral density"
    if asked.solver in ("gauss-seidel", "sgd"):
        if spectral:
            return "fourier", f"solver={asked.solver!r} is for many cheap basis functions"
        return "inducing", no_density
    if asked.n_basis is not None and asked.n_basis > n and spectral:
        return "fourier", f"n_basis={asked.n_basis} exceeds the {n} rows"
    if asked.solver == "cholesky":
        if n <= CHOLESKY_ROWS:
            return "inducing", f"{n} rows: the exact GP is affordable"
        if spectral:
            return "fourier", f"{n} rows are too many for a dense factor"
        return "inducing", no_density
    if fits or asked.solver == "cg" or not spectral:
        return "inducing", f"the kernel matrix of {n} rows fits in memory" if fits else "solver"
    return "fourier", f"the kernel matrix of {n} rows does not fit in memory"


def _choose_size(asked: Plan, basis: str, n: int, fits: bool) -> int:
    """Number of basis functions: as asked, or by cost."""
    m = asked.n_basis
    if basis == "inducing":
        _warn_of_too_many(m, n)
        if m is not None:
            return min(m, n)
        whole = asked.solver in ("sgd", "cg") or fits
        if asked.solver == "cholesky":
            whole = n <= CHOLESKY_ROWS
        if asked.solver == "gauss-seidel":
            whole = False
        return n if whole else max(1, min(n // 2, affordable_features(n)))
    if m is not None:
        return m + m % 2  # cosines and sines come in pairs
    if asked.solver in ("gauss-seidel", "sgd"):
        return STOCHASTIC_FEATURES if n > FACTOR_ROWS else 2 * max(n, 256)
    return affordable_features(n)


def _warn_of_too_many(n_basis: int | None, n: int) -> None:
    """Say that inducing points are among the rows, of which there are fewer than asked for."""
    if n_basis is not None and n_basis > n:
        warnings.warn(
            f"n_basis={n_basis} exceeds the {n} training rows; n_basis={n} is used. "
            "basis='fourier' takes any number.",
            NumericalWarning,
            stacklevel=5,
        )


def affordable_features(n: int) -> int:
    """Even m whose Gram matrix, ``n m^2`` flops, takes about a minute; 256 to 8192, at most 4 n."""
    most = min(CHOLESKY_FEATURES, 4 * n, (GRAM_FLOPS / max(n, 1)) ** 0.5)
    return 2 * round(max(256.0, most) / 2)


def _choose_solver(basis: str, n_basis: int, n: int) -> str:
    if basis == "inducing" and n_basis == n:
        return "cholesky" if n <= CHOLESKY_ROWS else "cg"
    if n_basis <= CHOLESKY_FEATURES:
        return "cholesky"
    return "gauss-seidel" if basis == "fourier" else "cg"


# ---- classification ---------------------------------------------------------------------------


def resolve_classification(asked: Plan, n: int, n_problems: int, kernel) -> Plan:
    """Fill what a plan of a classification of n rows leaves open; c one-vs-rest `n_problems`.

    Raises
    ------
    ValueError
        Where basis, n_basis, solver and covariance cannot be had together.
    """
    solver = "newton" if asked.solver == "auto" else asked.solver
    basis, reason = asked.basis, ""
    if basis == "relevance":
        _refuse_other("solver", solver, ("auto", "newton"), "basis='relevance'")
        _refuse_other("covariance", asked.covariance, ("auto", "full"), "basis='relevance'")
        return Plan("relevance", asked.n_basis, "newton", "full", "the evidence decides")
    if basis == "auto":
        many = asked.n_basis is not None and asked.n_basis > n
        basis, reason = "inducing", "inducing points adapt to where the rows are"
        if has_spectral_density(kernel) and (solver == "sgd" or many):
            basis, reason = "fourier", "solver='sgd' is for many cheap basis functions"
            reason = f"n_basis={asked.n_basis} exceeds the {n} rows" if many else reason
    m = asked.n_basis
    if basis == "inducing":
        _warn_of_too_many(m, n)
        whole = n if solver == "sgd" else affordable_points(n)
        m = min(n, whole if m is None else m)
    else:
        if m is None and solver == "sgd":
            m = STOCHASTIC_FEATURES if n > FULL_ROWS else 2 * max(n, 256)
        m = affordable_points(n) if m is None else m
        m = m + m % 2  # cosines and sines come in pairs
    return Plan(basis, m, solver, _classifier_covariance(asked, solver, m, n_problems), reason)


def affordable_points(n: int) -> int:
    """Basis functions m of Newton's method: all rows of few, else about 1e12 / n = m^2, <= 4096."""
    if n <= FULL_ROWS:
        return n
    return int(min(MOST_FEATURES, n, max(256.0, (NEWTON_FLOPS / n) ** 0.5)))


def _classifier_covariance(asked: Plan, solver: str, m: int, n_problems: int) -> str:
    offered = CLASSIFIER_COVARIANCES[solver]
    if asked.covariance == "auto":
        large = n_problems * m * m > FULL_COVARIANCE_NUMBERS
        return "diagonal" if solver == "sgd" or large else "full"
    if asked.covariance not in offered:
        raise ValueError(
            f"covariance={asked.covariance!r} cannot be had from solver={solver!r}, which offers "
            f"{', '.join(map(repr, offered))}."
        )
    return asked.covariance


def streaming_classification(asked: Plan, n: int, kernel) -> Plan:
    """A plan whose basis stays fixed while rows are added (``partial_fit``), of n rows at first."""
    if asked.covariance not in ("auto", "full"):
        raise ValueError(
            f"covariance={asked.covariance!r} cannot be had from partial_fit; use 'full'."
        )
    basis = asked.basis
    if basis == "auto":
        basis = "fourier" if has_spectral_density(kernel) else "inducing"
    m = STREAMING_FEATURES if asked.n_basis is None else asked.n_basis
    m = m + m % 2 if basis == "fourier" else min(m, n)
    return Plan(basis, m, "newton", "full", "a stream keeps its basis")
