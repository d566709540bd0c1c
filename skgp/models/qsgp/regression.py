r"""QSGP regression: from a plan (basis, solver, covariance) to a posterior over f.

Evans and Nair (2020), "Quadruply stochastic Gaussian processes". One model, three spaces to solve
it in:

==============  =============================================  =================================
space           system                                         module
==============  =============================================  =================================
function        :math:`(K + \sigma^2 I) \mu = y`, m = n        :mod:`.function_space`
weight          :math:`(\Phi^T \Phi + \sigma^2 S) \mu          :mod:`.streaming_gram`,
                = \Phi^T y`                                    :mod:`.weights_cg`,
                                                               :mod:`.gauss_seidel`
stochastic      eq. (2) by Theorems 1 and 2                    :mod:`.sgd`
==============  =============================================  =================================
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from skgp.kernels.gram import gram_diag
from skgp.kernels.spectral import FourierFeatures, has_spectral_density
from skgp.linalg.exceptions import NumericalWarning
from skgp.models.qsgp.basis import FourierBasis, InducingBasis
from skgp.models.qsgp.covariances import WeightCovariance
from skgp.models.qsgp.design import Basis, StreamedDesign
from skgp.models.qsgp.evidence import log_marginal_likelihood, refit_noise
from skgp.models.qsgp.function_space import (
    FunctionSpacePosterior,
    fit_dense,
    fit_iterative,
    pivoted_factor,
)
from skgp.models.qsgp.gauss_seidel import gauss_seidel
from skgp.models.qsgp.pathwise import pathwise_posterior
from skgp.models.qsgp.plan import DENSE_ROWS, Plan, resolve, with_covariance
from skgp.models.qsgp.sgd import fit_sgd
from skgp.models.qsgp.sgd_state import SGDResult, SGDState
from skgp.models.qsgp.streaming_gram import StreamingGram
from skgp.models.qsgp.weights import LinearWeightsPosterior, gram_posterior
from skgp.models.qsgp.weights_cg import weights_cg
from skgp.models.qsgp.whitened import WhitenedInducingBasis
from skgp.models.replicates import Replicates

Callback = Callable[[int, dict], bool | None]

LOW_RANK = 1_000  # largest numerical rank at which K is treated as of that rank
LOW_RANK_RESIDUAL = 1e-2  # mean residual variance, relative to the noise, that counts as nothing


@dataclass(frozen=True)
class Options:
    """Parameters of the solvers, in the estimator's words and with its defaults."""

    n_dense_columns: int = 100
    basis_batch_size: int = 10_000
    batch_size: int = 500
    n_support: int = 500
    augment: bool = True
    feature_map: str = "orthogonal"
    max_iter: int | None = None
    tol: float | None = None
    learning_rate: float = 0.1
    learn_hyperparameters: bool = True
    refit_noise: bool = True
    n_samples: int = 63
    n_prior_features: int = 8_192
    preconditioner_rank: int = 4_000
    memory_budget: float = 8e9
    dtype: torch.dtype = torch.float64
    seed: int = 0


class Posterior(Protocol):
    """What every route ends in: moments of f at new rows X (p, d), uncalibrated."""

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean, shape (p,)."""

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance, shapes (p,), (p,)."""

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance, shape (p, p)."""


@dataclass
class Fit:
    """A fitted regression.

    Attributes
    ----------
    posterior : Posterior
    plan : Plan
        What was done in the end.
    kernel : sklearn kernel expression without noise
    noise : float
    calibration : float
        What variances, that of the noise included, are to be multiplied by.
    n_iter : int
    residual : float
        True relative residual of the linear system, where there is one.
    log_marginal_likelihood : float or None
    history : list of float
    statistics : StreamingGram or None
        Sufficient statistics, which ``partial_fit`` adds rows to.
    state : SGDState or None
        For a warm start.
    """

    posterior: Posterior
    plan: Plan
    kernel: object
    noise: float
    calibration: float = 1.0
    n_iter: int = 1
    residual: float = 0.0
    log_marginal_likelihood: float | None = None
    history: list[float] = field(default_factory=list)
    statistics: StreamingGram | None = None
    state: SGDState | None = None


@dataclass
class AugmentedPosterior:
    r"""Inducing points with a basis function added at each test point (appendix G).

    With a full covariance, and in whitened coordinates with any other, the part of the new function
    that the basis does not explain adds its prior variance
    :math:`k(x, x) - \phi(x)^T \phi(x)`: the predictive variance of Titsias (2009).
    """

    weights: LinearWeightsPosterior
    kernel: object

    def mean(self, X: Tensor) -> Tensor:
        """Posterior mean of f, shape (p,)."""
        return self.weights.mean(X)

    def mean_and_variance(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of f, shapes (p,), (p,)."""
        mean, variance = self.weights.mean_and_variance(X)
        return mean, variance + self._unexplained(X)

    def covariance(self, X: Tensor) -> Tensor:
        """Posterior covariance of f, shape (p, p)."""
        return self.weights.covariance(X) + torch.diag(self._unexplained(X))

    def _unexplained(self, X: Tensor) -> Tensor:
        basis = self.weights.basis
        explained = sum(basis.features(X, b).square().sum(1) for b in range(basis.n_blocks))
        return (gram_diag(self.kernel, X) - explained).clamp_(min=0.0)


def fit_regression(
    kernel,
    data: Replicates,
    noise: float,
    asked: Plan,
    options: Options,
    *,
    state: SGDState | None = None,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> Fit:
    """Fit the posterior of f for fixed hyper-parameters.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    data : Replicates
        Float64, with centred targets.
    noise : float
        Noise variance in squared units of y.
    asked : Plan
    options : Options
    state : SGDState, optional
        Of an earlier stochastic fit to go on from.
    generator : torch.Generator
    callback : callable, optional

    Returns
    -------
    Fit

    Warns
    -----
    NumericalWarning
        Where conjugate gradients fail and inducing points with an exact factorisation replace
        them.
    """
    n = data.X.shape[0]
    plan = resolve(asked, n, kernel, memory_budget=options.memory_budget)
    fit = _Fitter(kernel, data, noise, options, generator, callback)
    if plan.solver == "sgd":
        return fit.stochastic(plan, state)
    if plan.space(n) == "function":
        open_choice = asked.basis == "auto" and asked.solver == "auto" and asked.n_basis is None
        if n > DENSE_ROWS and open_choice:
            reduced = fit.low_rank_plan(asked)
            if reduced is not None:
                return reduced
        return fit.function_space(plan)
    return fit.weight_space(plan)


class _Fitter:
    """The routes of :func:`fit_regression`, which share their arguments."""

    def __init__(self, kernel, data: Replicates, noise, options, generator, callback):
        self.kernel, self.data, self.noise, self.options = kernel, data, noise, options
        self.X, self.y, self.sample_weight = data.X, data.y, data.weight
        self.generator, self.callback = generator, callback
        self.n = data.X.shape[0]

    # ------------------------------------------------------------------- function space

    def function_space(self, plan: Plan) -> Fit:
        """One basis function a row: exact GP mean, by Cholesky or by conjugate gradients."""
        o = self.options
        prior = self._prior_features(o.n_prior_features) if plan.covariance == "samples" else None
        common = {
            "sample_weight": self.sample_weight,
            "covariance": plan.covariance,
            "augment": o.augment,
            "prior": prior,
            "n_samples": o.n_samples,
            "generator": self.generator,
        }
        if plan.solver == "cholesky":
            posterior = fit_dense(
                self.kernel,
                self.X,
                self.y,
                self.noise,
                n_dense_columns=o.n_dense_columns,
                **common,
            )
            return self._from_function_space(plan, posterior)
        posterior = fit_iterative(
            self.kernel,
            self.X,
            self.y,
            self.noise,
            rank=min(o.preconditioner_rank, self.n // 2),
            tol=1e-2 if o.tol is None else o.tol,
            max_iter=200 if o.max_iter is None else o.max_iter,
            memory_budget=o.memory_budget,
            callback=self.callback,
            **common,
        )
        if not posterior.residual < 0.5:
            return self._fall_back(plan, posterior.residual)
        return self._from_function_space(plan, posterior)

    def _from_function_space(self, plan: Plan, posterior: FunctionSpacePosterior) -> Fit:
        return Fit(
            posterior,
            plan,
            self.kernel,
            self.noise,
            calibration=posterior.calibration,
            n_iter=posterior.n_iter,
            residual=posterior.residual,
            log_marginal_likelihood=self._with_scatter(posterior.log_marginal_likelihood),
            history=posterior.history,
        )

    def _with_scatter(self, value: float | None) -> float | None:
        """Add to the evidence of distinct rows what the scatter within them contributes."""
        if value is None:
            return None
        noise = self.X.new_tensor(self.noise)
        return value + float(self.data.log_power(noise).sum())

    def _fall_back(self, plan: Plan, residual: float) -> Fit:
        """Inducing points at the pivots of K and an exact factorisation, which cannot diverge."""
        m = min(self.n, 2_000)
        reason = (
            f"conjugate gradients ended at a relative residual of {residual:.1e}; "
            f"{m} inducing points and a Cholesky factorisation replace them"
        )
        warnings.warn(
            reason[0].upper() + reason[1:] + ". A larger noise variance, or a bound on the "
            "WhiteKernel's noise_level, improves the conditioning.",
            NumericalWarning,
            stacklevel=4,
        )
        reduced = replace(plan, n_basis=m, solver="cholesky", reason=reason)
        return self.weight_space(with_covariance(reduced, "auto", self.n))

    def low_rank_plan(self, asked: Plan) -> Fit | None:
        """The exact answer at its cheapest, where K is of low numerical rank; None where not."""
        prior = gram_diag(self.kernel, self.X)
        tol = LOW_RANK_RESIDUAL * self.noise * self.n / float(prior.sum())
        low_rank = pivoted_factor(self.kernel, self.X, LOW_RANK, generator=self.generator, tol=tol)
        if low_rank.residual_trace > tol * float(prior.sum()):
            return None
        rank = low_rank.factor.shape[1]
        reason = f"K has numerical rank {rank}: the rest is below 1% of the noise variance"
        plan = Plan("inducing", rank, "cholesky", asked.covariance, reason)
        plan = with_covariance(plan, asked.covariance, self.n)
        return self.weight_space(plan, pivots=low_rank.pivots)

    # --------------------------------------------------------------------- weight space

    def weight_space(self, plan: Plan, pivots: Tensor | None = None) -> Fit:
        """m basis functions with unit prior: Fourier features, or whitened inducing points."""
        basis = self._unit_prior_basis(plan, pivots)
        if plan.solver == "cholesky":
            statistics = StreamingGram(basis, dtype=self.options.dtype)
            statistics.update(self.X, self.y, self.sample_weight)
            if self.data.scatter is not None:
                statistics.sum_square += float(self.data.scatter.sum())
            refit = self.options.refit_noise and pivots is None
            return fit_statistics(
                statistics, plan, self.kernel, self.noise, self.options, self.generator, refit=refit
            )
        design = StreamedDesign(
            basis, self.X, sample_weight=self.sample_weight, memory_budget=int(2e9)
        )
        fit = pathwise_posterior(
            design,
            self.y,
            self.noise,
            lambda targets: self._solve(plan, design, targets),
            n_samples=min(self.options.n_samples, 31),
            generator=self.generator,
        )
        misfit = fit.targets - design.matmul(fit.result.solution)
        z2 = float(misfit[:, 0].square().mean() / misfit[:, 1:].square().mean())
        return Fit(
            self._augmented(plan, fit.posterior),
            plan,
            self.kernel,
            self.noise,
            calibration=z2,
            n_iter=max(1, fit.result.n_iter),
            residual=float(fit.result.residual.max()),
        )

    def _solve(self, plan: Plan, design: StreamedDesign, targets: Tensor):
        o = self.options
        if plan.solver == "cg":
            return weights_cg(
                design,
                targets,
                self.noise,
                tol=1e-3 if o.tol is None else o.tol,
                max_iter=200 if o.max_iter is None else o.max_iter,
                generator=self.generator,
                callback=self.callback,
            )
        return gauss_seidel(
            design,
            targets,
            self.noise,
            tol=1e-2 if o.tol is None else o.tol,
            max_iter=10 if o.max_iter is None else o.max_iter,
            generator=self.generator,
            callback=self.callback,
        )

    def _unit_prior_basis(self, plan: Plan, pivots: Tensor | None) -> Basis:
        if plan.basis == "fourier":
            return self._fourier(plan.size)
        if pivots is None:
            pivots = pivoted_factor(self.kernel, self.X, plan.size, generator=self.generator).pivots
        return WhitenedInducingBasis(self.kernel, self.X[pivots])

    def _augmented(self, plan: Plan, posterior: LinearWeightsPosterior):
        if plan.basis == "inducing" and self.options.augment:
            return AugmentedPosterior(posterior, self.kernel)
        return posterior

    # ----------------------------------------------------------------------- stochastic

    def stochastic(self, plan: Plan, state: SGDState | None) -> Fit:
        """Theorems 1 and 2 by stochastic gradients."""
        Z = None if plan.basis == "fourier" else self._inducing_rows(plan.size)
        result = self._run_sgd(plan, Z, state)
        kernel, noise = self.kernel, result.noise_variance
        posterior: Posterior
        if Z is None:
            if result.theta is not None:
                kernel = kernel.clone_with_theta(result.theta.cpu().numpy())
            features = self._fourier(plan.size, kernel)
            posterior = LinearWeightsPosterior.from_gaussian(features, result.q, noise)
        else:
            covariance = WeightCovariance(result.q, noise, self.options.augment, self.n / plan.size)
            posterior = FunctionSpacePosterior(kernel, Z, result.q.mean, noise, covariance)
        return Fit(
            posterior,
            plan,
            kernel,
            noise,
            n_iter=max(1, result.n_iter),
            history=result.history["loss"],
            state=result.state,
        )

    def _run_sgd(self, plan: Plan, Z: Tensor | None, state: SGDState | None) -> SGDResult:
        o = self.options
        basis: FourierBasis | InducingBasis
        if Z is None:
            basis = FourierBasis(self._fourier(plan.size), dtype=o.dtype)
        else:
            basis = InducingBasis(self.kernel, Z, dtype=o.dtype)
        max_iter = 1000 if o.max_iter is None else o.max_iter
        return fit_sgd(
            self.X,
            self.y,
            basis,
            self.noise,
            covariance=plan.covariance,
            n_dense_columns=min(o.n_dense_columns, plan.size),
            batch_size=o.batch_size,
            basis_batch_size=o.basis_batch_size,
            n_support=min(o.n_support, self.n),
            learning_rate=o.learning_rate,
            max_iter=max_iter,
            tol=o.tol,
            learn_hyperparameters=o.learn_hyperparameters and Z is None,
            freeze_iterations=max_iter // 10,
            generator=self.generator,
            callback=self.callback,
            state=state,
        )

    def _inducing_rows(self, m: int) -> Tensor:
        """All rows, or m at random; a copy."""
        if m == self.n:
            return self.X.clone()
        return self.X[torch.randperm(self.n, generator=self.generator)[:m]]

    # -------------------------------------------------------------------------- features

    def _fourier(self, m: int, kernel=None) -> FourierFeatures:
        return FourierFeatures(
            self.kernel if kernel is None else kernel,
            m,
            self.X.shape[1],
            kind=self.options.feature_map,
            seed=self.options.seed,
        )

    def _prior_features(self, m: int) -> Basis:
        """Features whose Gram matrix stands for K in prior draws."""
        if has_spectral_density(self.kernel):
            return FourierFeatures(self.kernel, m, self.X.shape[1], seed=self.options.seed + 1)
        rank = min(self.n, 2_000)
        pivots = pivoted_factor(self.kernel, self.X, rank, generator=self.generator).pivots
        return WhitenedInducingBasis(self.kernel, self.X[pivots])


def counting_weights(statistics: StreamingGram) -> StreamingGram:
    """The statistics for evidence in which a row of weight w counts as w rows.

    Their own evidence is that of one observation of noise variance ``noise / w`` a row.
    """
    counted = copy.copy(statistics)
    counted.n_rows, counted.sum_log_weight = statistics.sum_weight, 0.0
    return counted


def fit_statistics(
    statistics: StreamingGram,
    plan: Plan,
    kernel,
    noise: float,
    options: Options,
    generator: torch.Generator,
    *,
    refit: bool,
) -> Fit:
    """Posterior of the weights from the sufficient statistics of all rows seen.

    With `refit` the noise variance is set to the one of largest evidence, at least what the kernel
    alone asks for: what the truncated basis leaves unexplained counts as noise.
    """
    statistics = counting_weights(statistics)
    if refit and statistics.sum_square > 0:
        noise = refit_noise(statistics, noise, fit_prior_variance=False).noise_variance
    m = statistics.basis.n_features
    n_dense = {"diagonal": 0, "chevron": min(options.n_dense_columns, m)}.get(plan.covariance, m)
    weights = gram_posterior(statistics, noise, n_dense_columns=n_dense)
    if plan.covariance == "samples":
        draws = weights.sample_weights(options.n_samples, generator)
        mean = weights.mean_weights
        weights = LinearWeightsPosterior.from_deviations(
            statistics.basis, mean, draws - mean[:, None], noise
        )
    augmented = plan.basis == "inducing" and options.augment
    posterior = AugmentedPosterior(weights, kernel) if augmented else weights
    return Fit(
        posterior,
        plan,
        kernel,
        noise,
        log_marginal_likelihood=float(log_marginal_likelihood(statistics, noise)),
        statistics=statistics,
    )
