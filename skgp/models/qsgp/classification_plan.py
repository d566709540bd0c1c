r"""Which basis, solver and covariance a QSGP classification uses, and why.

===================  ==============================================================================
rows n               ``basis="auto"``, ``solver="auto"``
===================  ==============================================================================
up to 2000           inducing, m = n, Newton: the Laplace approximation of the full GP
more                 inducing (cluster centres), :math:`n m^2` flops of about a minute, Newton
===================  ==============================================================================

Of as many Fourier features as inducing points the latter predict better wherever data fill a small
part of the input space, which is nearly always. Stochastic gradients are never chosen.
"""

import warnings

from skgp.kernels.spectral import has_spectral_density
from skgp.linalg.exceptions import NumericalWarning
from skgp.models.qsgp.plan import STOCHASTIC_FEATURES, STREAMING_FEATURES, Plan

#: Rows that the hyper-parameter search sees; of no more rows, the amplitude is known.
SUBSET_ROWS = 1_000
FULL_ROWS = 2_000  # one basis function a row
MOST_FEATURES = 4_096
FULL_COVARIANCE_NUMBERS = 4_000_000  # of float32 roots kept in the fitted estimator

#: Covariances that each solver offers; the first is what "auto" takes where it is affordable.
COVARIANCES = {"newton": ("full", "chevron", "diagonal"), "sgd": ("diagonal", "chevron")}


def resolve_classification(asked: Plan, n: int, n_problems: int, kernel) -> Plan:
    """Fill what a plan leaves open.

    Parameters
    ----------
    asked : Plan
    n : int
        Training rows.
    n_problems : int
        c, one-vs-rest problems.
    kernel : sklearn kernel expression

    Raises
    ------
    ValueError
        Where basis, n_basis, solver and covariance cannot be had together.
    """
    solver = "newton" if asked.solver == "auto" else asked.solver
    basis, reason = asked.basis, ""
    if basis == "relevance":
        return _relevance(asked, solver)
    if basis == "auto":
        spectral = has_spectral_density(kernel)
        many = asked.n_basis is not None and asked.n_basis > n
        if spectral and (solver == "sgd" or many):
            basis = "fourier"
            reason = (
                f"n_basis={asked.n_basis} exceeds the {n} rows"
                if many
                else "solver='sgd' is for many cheap basis functions"
            )
        else:
            basis, reason = "inducing", "inducing points adapt to where the rows are"
    m = _size(asked, basis, solver, n)
    covariance = _covariance(asked, solver, m, n_problems)
    return Plan(basis, m, solver, covariance, reason)


def streaming_classification(asked: Plan, n: int, kernel) -> Plan:
    """A plan whose basis stays fixed while rows are added (``partial_fit``).

    Parameters
    ----------
    asked : Plan
    n : int
        Rows of the first batch.
    kernel : sklearn kernel expression

    Raises
    ------
    ValueError
        For another covariance than the exact one, which is what carries the rows seen.
    """
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


def _relevance(asked: Plan, solver: str) -> Plan:
    """Relevance vectors have a solver and a covariance of their own."""
    choices = (("solver", solver, "newton"), ("covariance", asked.covariance, "full"))
    for name, value, only in choices:
        if value not in ("auto", only):
            raise ValueError(
                f"{name}={value!r} cannot be had with basis='relevance'; use {name}='auto', or "
                "another basis."
            )
    return Plan("relevance", asked.n_basis, "newton", "full", "the evidence decides")


def _size(asked: Plan, basis: str, solver: str, n: int) -> int:
    m = asked.n_basis
    if basis == "inducing":
        if m is not None and m > n:
            warnings.warn(
                f"n_basis={m} exceeds the {n} training rows; n_basis={n} is used. "
                "basis='fourier' takes any number.",
                NumericalWarning,
                stacklevel=4,
            )
        if solver == "sgd" and m is None:
            return n
        return min(n, affordable_points(n) if m is None else m)
    if m is None and solver == "sgd":
        m = STOCHASTIC_FEATURES if n > FULL_ROWS else 2 * max(n, 256)
    if m is None:
        m = affordable_points(n)
    return m + m % 2  # cosines and sines come in pairs


def affordable_points(n: int) -> int:
    """Basis functions m of Newton's method: all rows of few, else about 1e12 / n = m^2, <= 4096."""
    if n <= FULL_ROWS:
        return n
    return int(min(MOST_FEATURES, n, max(256.0, (1.2e12 / n) ** 0.5)))


def _covariance(asked: Plan, solver: str, m: int, n_problems: int) -> str:
    offered = COVARIANCES[solver]
    if asked.covariance == "auto":
        large = n_problems * m * m > FULL_COVARIANCE_NUMBERS
        return "diagonal" if solver == "sgd" or large else "full"
    if asked.covariance not in offered:
        raise ValueError(
            f"covariance={asked.covariance!r} cannot be had from solver={solver!r}, which offers "
            f"{', '.join(map(repr, offered))}."
        )
    return asked.covariance
