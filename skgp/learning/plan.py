r"""What is fitted and how: the problem, the plan asked for and resolved, options, the fit.

The plans of a regression with Gaussian noise are resolved in :mod:`.routes`.

===============================  ==================================================================
observations n                   ``basis="auto"``, ``solver="auto"``: classification
===============================  ==================================================================
up to 2000                       inducing, m = n, Newton: the Laplace approximation of the full GP
more                             inducing (cluster centres), :math:`n m^2` flops of about a minute
===============================  ==================================================================

Of as many Fourier features as inducing points the latter classify better wherever data fill a small
part of the input space, which is nearly always.

Stochastic gradients are never chosen: they are the only solver that needs neither O(n) nor O(m)
memory an iteration, and the slowest to converge. Laplace noise (:func:`resolve_laplace`) takes
inducing points at all of up to 3000 observations, else as many as about two minutes allow; of
relevance vectors (:func:`resolve_relevance`) the evidence decides the number.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.defaults import HELD_SUMS
from skgp.inference.weights.bases import Basis, WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels.distances import origin
from skgp.kernels.spectra import has_spectral_density
from skgp.kernels.spectral import FourierFeatures
from skgp.learning import defaults
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import memory_budget, require_memory

CLASSIFIER_COVARIANCES = {"newton": ("full", "chevron", "diagonal"), "sgd": ("diagonal", "chevron")}


@dataclass(frozen=True)
class Plan:
    """What to fit: as asked by the user, with "auto" and None where open, or resolved."""

    basis: str = "auto"  # "fourier", "inducing", "neighbors" or "relevance"
    n_basis: int | None = None  # of "neighbors" their number; None of resolved "relevance"
    # "cholesky", "cg", "gauss-seidel", "sgd", "newton", or "sequential", which "auto" becomes for
    # "relevance"
    solver: str = "auto"
    covariance: str = "auto"  # "diagonal", "chevron", "full" or "samples"
    reason: str = ""  # why a resolved plan differs from what was asked, or what decided it

    @property
    def size(self) -> int:
        """Number of basis functions of a resolved plan."""
        if self.n_basis is None:
            raise ValueError("n_basis is open; resolve the plan first.")
        return self.n_basis

    def space(self, n: int) -> str:
        """One of "stochastic", "local", "function" (one basis function a row) and "weight"."""
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
    n_samples: int = 63
    n_prior_features: int = 32_768
    preconditioner_rank: int = defaults.PRECONDITIONER_RANK
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def limits(self, *, tol: float, max_iter: int) -> dict[str, Any]:
        """Tolerance and iterations, those of the solver where the user has not given them."""
        return {
            "tol": tol if self.tol is None else self.tol,
            "max_iter": max_iter if self.max_iter is None else self.max_iter,
        }


@dataclass(frozen=True)
class Problem:
    """What every route starts from, hyper-parameters known (but a classifier's amplitude)."""

    kernel: Any  # without noise
    data: Data  # float64; targets (n,) centred, or (n, c) in {-1, +1}
    noise: float  # variance, in squared units of y; no meaning for classes
    options: Options
    generator: torch.Generator
    callback: Callable[[int, dict], bool | None] | None = None
    likelihood: Any = None  # g, of a classification
    offset: Any = None  # (c,), constants of the latent functions
    rival: Any = None  # kernel, noise included, to take if all observations are likelier under it

    @property
    def controls(self) -> dict[str, Any]:
        """What every iterative solver is told."""
        return {"generator": self.generator, "callback": self.callback}

    @property
    def residual_tolerance(self) -> float:
        r"""Relative residual at which :math:`(K + \sigma^2 I) \alpha = y` may be left.

        Means at the observations are then wrong by no more than a small share of :math:`\sigma`:
        :math:`\|K (\alpha - \alpha^*)\| \le \|r\|`.
        """
        relative = defaults.RESIDUAL_SHARE * (self.noise / self.data.mean_square) ** 0.5
        least, most = defaults.RESIDUALS
        return min(max(relative, least), most)


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


def check_memory(plan: Plan, n: int, n_problems: int = 1) -> None:
    """Refuse a resolved plan whose matrices do not fit in memory: MemoryBudgetError.

    Of `n_problems` latent functions.
    """
    m, solver = plan.n_basis or 0, plan.solver
    fewer = f"Use a smaller n_basis than {m}"
    if plan.space(n) == "function" and solver == "cholesky":
        what = f"solver='cholesky' with kernel matrices of {n} rows"
        count = defaults.GRAM_MATRICES if plan.covariance == "chevron" else defaults.DENSE_MATRICES
        require_memory(8.0 * count * n**2, what, "Use solver='cg', or n_basis below the rows")
    elif plan.space(n) == "weight" and solver == "cholesky":
        what = f"solver='cholesky' with Gram matrices of {m} basis functions"
        require_memory(8.0 * defaults.GRAM_MATRICES * m**2, what, f"{fewer}, or solver='cg'")
    elif solver == "newton":
        kept = n_problems if plan.covariance == "full" else 0
        what = f"The Hessians of {n_problems} latent functions of {m} basis functions"
        remedy = f"{fewer}, or covariance='diagonal'" if kept else fewer
        require_memory(8.0 * (defaults.HESSIANS + kept) * m**2, what, remedy)


def matrix_room(n_matrices: int) -> int:
    """Even number m up to which so many matrices m x m fit in the budget of memory."""
    return 2 * int((memory_budget() / (8 * n_matrices)) ** 0.5 / 2)


def streaming_plan(asked: Plan, n: int, kernel) -> Plan:
    """A plan whose basis stays fixed while rows are added (``partial_fit``)."""
    basis = asked.basis
    if basis == "auto":
        basis = "fourier" if has_spectral_density(kernel) else "inducing"
    m = asked.n_basis or (defaults.STREAMING_FEATURES if basis == "fourier" else min(n // 2, 1_000))
    if basis == "inducing" and not 1 <= m < n:
        raise ValueError(
            f"partial_fit keeps the inducing points of its first call, fewer than its rows; got "
            f"n_basis={m} for {n} rows. Give a smaller n_basis, or basis='fourier'."
        )
    return replace(asked, basis=basis, n_basis=m + m % 2 * (basis == "fourier"), solver="cholesky")


def check_laplace(asked: Plan) -> None:
    """Refuse what only Gaussian noise has, by a ValueError."""
    laplace = "likelihood='laplace'"
    refuse_other("basis", asked.basis, ("auto", "fourier", "inducing"), laplace)
    refuse_other("solver", asked.solver, ("auto", "cholesky"), laplace)
    refuse_other("covariance", asked.covariance, ("auto", "full"), laplace)


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
        warn_of_too_many(m, n)
    if m is None:
        m = laplace_features(n)
    m = min(m, n) if basis == "inducing" else m + m % 2
    return Plan(basis, m, "cholesky", "full", reason)


def laplace_features(n: int) -> int:
    """Basis functions m of Laplace noise: all of up to 3000 rows, then of two minutes; <= 4096."""
    if n <= defaults.LAPLACE_ROWS:
        return n
    return min(
        n, defaults.CHOLESKY_FEATURES // 2, 2 * round((defaults.LAPLACE_FLOPS / n) ** 0.5 / 2)
    )


def resolve_relevance(asked: Plan, likelihood: str = "gaussian") -> Plan:
    """Fill what a plan for relevance vectors leaves open; ``n_basis`` is known afterwards."""
    vectors = "basis='relevance'"
    refuse_other("likelihood", likelihood, ("gaussian", "lognormal", "auto"), vectors)
    refuse_other("solver", asked.solver, ("auto", "sgd"), vectors)
    refuse_other("covariance", asked.covariance, ("auto", "full"), vectors)
    solver = "sgd" if asked.solver == "sgd" else "sequential"
    return Plan("relevance", asked.n_basis, solver, "full", "the evidence decides")


def refuse_other(name: str, value: str, offered: tuple[str, ...], with_what: str) -> None:
    """Raise an error unless a parameter has one of the values that go together with another."""
    if value not in offered:
        choices = " or ".join(f"{name}={choice!r}" for choice in offered)
        raise ValueError(
            f"{name}={value!r} cannot be had with {with_what}. Use {choices}, or change "
            f"{with_what.split('=')[0]}."
        )


def warn_of_too_many(n_basis: int | None, n: int) -> None:
    """Say that inducing points are among the rows, of which there are fewer than asked for."""
    if n_basis is not None and n_basis > n:
        warn_caller(
            f"n_basis={n_basis} exceeds the {n} training rows; n_basis={n} is used. "
            "basis='fourier' takes any number.",
            NumericalWarning,
        )


def resolve_classification(asked: Plan, n: int, n_problems: int, kernel) -> Plan:
    """Fill what a plan of a classification of n rows leaves open; c one-vs-rest `n_problems`.

    A ValueError says where basis, n_basis, solver and covariance cannot be had together.
    """
    solver = "newton" if asked.solver == "auto" else asked.solver
    basis, reason = asked.basis, ""
    if basis == "relevance":
        refuse_other("solver", solver, ("auto", "newton"), "basis='relevance'")
        refuse_other("covariance", asked.covariance, ("auto", "full"), "basis='relevance'")
        return Plan("relevance", asked.n_basis, "newton", "full", "the evidence decides")
    if basis == "auto":
        many = asked.n_basis is not None and asked.n_basis > n
        basis, reason = "inducing", "inducing points adapt to where the rows are"
        if has_spectral_density(kernel) and (solver == "sgd" or many):
            basis, reason = "fourier", "solver='sgd' is for many cheap basis functions"
            reason = f"n_basis={asked.n_basis} exceeds the {n} rows" if many else reason
    m = asked.n_basis
    if basis == "inducing":
        warn_of_too_many(m, n)
        whole = n if solver == "sgd" else affordable_points(n, n_problems)
        m = min(n, whole if m is None else m)
    else:
        if m is None and solver == "sgd":
            m = defaults.STOCHASTIC_FEATURES if n > defaults.FULL_ROWS else 2 * max(n, 256)
        m = affordable_points(n, n_problems) if m is None else m
        m = m + m % 2  # cosines and sines come in pairs
    return Plan(basis, m, solver, _classifier_covariance(asked, solver, m, n_problems), reason)


def in_sums(asked: Plan, plan: Plan, n: int, n_some: int, n_problems: int) -> Plan:
    """The plan of a classification of n rows in blocks, of points among `n_some` in memory.

    A pass forms Hessians of all columns, and holds them several times: MemoryBudgetError where m is
    asked for and they do not fit.
    """
    matrices, m = (HELD_SUMS + defaults.HESSIANS) * n_problems, plan.size
    if asked.n_basis is None:
        exact = (
            affordable_points(defaults.SUMS_PASSES * n_problems * n)
            if n > defaults.FULL_ROWS
            else m
        )
        m = 2 * max(1, int(min(m, exact, matrix_room(matrices)) / 2))
    what = f"Sums over blocks of Hessians of {n_problems} latent functions of {m} basis functions"
    require_memory(8.0 * matrices * m**2, what, "Use a smaller n_basis, or solver='sgd'")
    m = min(m, n_some) if plan.basis == "inducing" else m
    covariance = _classifier_covariance(asked, plan.solver, m, n_problems)
    return replace(plan, n_basis=m, covariance=covariance, reason="rows in blocks")


def affordable_points(n: int, n_problems: int = 1) -> int:
    """Basis functions m of Newton's method: all rows of few, else about 1e12 / n = m^2, <= 4096.

    Or as many as memory has room for.
    """
    room = matrix_room(defaults.HESSIANS + n_problems)
    most = (
        n
        if n <= defaults.FULL_ROWS
        else min(defaults.MOST_FEATURES, n, max(256.0, (defaults.NEWTON_FLOPS / n) ** 0.5))
    )
    return max(1, int(min(most, room)))


def _classifier_covariance(asked: Plan, solver: str, m: int, n_problems: int) -> str:
    """The covariance asked for, or the one that is affordable."""
    offered = CLASSIFIER_COVARIANCES[solver]
    if asked.covariance == "auto":
        large = n_problems * m * m > defaults.FULL_COVARIANCE_NUMBERS
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
    m = defaults.STREAMING_FEATURES if asked.n_basis is None else asked.n_basis
    m = m + m % 2 if basis == "fourier" else min(m, n)
    return Plan(basis, m, "newton", "full", "a stream keeps its basis")


def unit_prior_basis(
    kernel, X: Tensor, plan: Plan, options: Options, Z: Tensor | None, *, near: bool = False
) -> Basis:
    """Whitened inducing points, Z or all X; or Fourier features: `near` X phases lose no digits."""
    if plan.basis == "inducing":
        return WhitenedInducingBasis(kernel, X if Z is None else Z)
    draws: dict[str, Any] = {"kind": options.feature_map, "seed": options.seed}
    zero = origin(X)[0] if near else None
    return FourierFeatures(kernel, plan.size, X.shape[1], origin=zero, **draws)


def training_design(basis: Basis, X: Tensor, route: str, options: Options) -> StreamedDesign:
    """Features at X; many of a route ("laplace", "newton") in float32 if no accuracy is lost."""
    dtype = options.dtype
    if len(X) * basis.n_features > defaults.SINGLE_SIZE[route]:
        dtype = torch.float32
    if dtype == torch.float32 and isinstance(basis, WhitenedInducingBasis):
        basis = basis.in_single_precision(X[:: -(-len(X) // defaults.PROBE_ROWS[route])])
    return StreamedDesign(basis, X, dtype=dtype)
