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
stochastic      eq. (2) by Theorems 1 and 2                    :mod:`.stochastic`
==============  =============================================  =================================
"""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.exact import (
    FunctionSpacePosterior,
    fit_dense,
    fit_iterative,
)
from skgp.inference.pathwise import (
    leave_one_out_z2,
    pathwise_posterior,
    pivoted_factor,
    prior_features,
)
from skgp.inference.stochastic.state import SGDState
from skgp.inference.weights.design import Basis, StreamedDesign, WhitenedInducingBasis
from skgp.inference.weights.gram import StreamingGram
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.inference.weights.solvers import gauss_seidel, weights_cg
from skgp.kernels.distances import origin
from skgp.kernels.gram import gram_diag
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg.exceptions import NumericalWarning
from skgp.linalg.preconditioners import LowRank
from skgp.models.qsgp.comparison import compare_routes
from skgp.models.qsgp.local import local_posterior
from skgp.models.qsgp.plan import DENSE_ROWS, Plan, resolve, stored_dtype, with_covariance
from skgp.models.qsgp.results import (
    AugmentedPosterior,
    Fit,
    Options,
    Posterior,
    fit_statistics,
)
from skgp.models.qsgp.stochastic import fit_stochastic
from skgp.optim.stopping import StopRecorder

Callback = Callable[[int, dict], bool | None]

ILL_CONDITIONED = 1e7  # trace(K) / noise, a bound on the condition number of K + noise I
FALL_BACK_RESIDUAL = 0.1  # relative residual of the mean above which the solution is not used
LOW_RANK = 1_000  # largest numerical rank at which K is treated as of that rank
PROBED_ROWS = 5_000  # whose rank is looked at before that of all
LOW_RANK_RESIDUAL = 1e-2  # mean residual variance, relative to the noise, that counts as nothing


def fit_regression(
    kernel,
    data: Data,
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
    data : Data
        Float64, with centred targets.
    noise : float
        Noise variance in squared units of y.
    asked : Plan
    options : Options
    state : SGDState, optional
        Of an earlier stochastic fit to go on from, with the same ``options.seed``. One of another
        basis, of another number of functions or of dense columns, is passed over.
    generator : torch.Generator
    callback : callable, optional
        The info of a stochastic iteration holds ``"fit"``, which makes a Fit of the weights so far.

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
        return fit_stochastic(
            kernel, data.X, data.y, noise, plan, options, state, generator, callback
        )
    open_choice = asked.basis == "auto" and asked.solver == "auto" and asked.n_basis is None
    if n > DENSE_ROWS and open_choice:
        reduced = fit.low_rank_plan(asked)
        if reduced is not None:
            return reduced
        if plan.space(n) != "function" and asked.covariance in ("auto", "full"):
            plan = with_covariance(fit.compared_plan(plan), "auto", n)
    if plan.space(n) == "local":
        return fit.local(plan)
    if plan.space(n) == "function":
        return fit.function_space(plan)
    return fit.weight_space(plan)


class _Fitter:
    """The routes of :func:`fit_regression`, which share their arguments."""

    def __init__(self, kernel, data: Data, noise, options, generator, callback):
        self.kernel, self.data, self.noise, self.options = kernel, data, noise, options
        self.X, self.y, self.sample_weight = data.X, data.y, data.weight
        self.generator, self.callback = generator, callback
        self.n = data.X.shape[0]

    # ------------------------------------------------------------------- function space

    def function_space(self, plan: Plan) -> Fit:
        """One basis function a row: exact GP mean, by Cholesky or by conjugate gradients."""
        o = self.options
        prior = None
        if plan.covariance == "samples":
            prior = prior_features(
                self.kernel,
                self.X,
                o.n_prior_features,
                2_000,
                seed=o.seed + 1,
                generator=self.generator,
            )
        common = {
            "sample_weight": self.sample_weight,
            "covariance": plan.covariance,
            "augment": o.augment,
            "prior": prior,
            # A factor gives draws for nothing; every draw makes an iteration of "cg" dearer.
            "n_samples": o.n_samples if plan.solver == "cholesky" else (o.n_samples + 1) // 2,
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
        callback = StopRecorder(self.callback)
        posterior = fit_iterative(
            self.kernel,
            self.X,
            self.y,
            self.noise,
            rank=self._preconditioner_rank(),
            dtype=stored_dtype(self.n, o.dtype),
            tol=1e-2 if o.tol is None else o.tol,
            max_iter=200 if o.max_iter is None else o.max_iter,
            memory_budget=o.memory_budget,
            callback=callback,
            **common,
        )
        if not (callback.stopped or posterior.residual < FALL_BACK_RESIDUAL):
            return self._fall_back(plan, posterior.residual)
        if not (callback.stopped or posterior.converged):
            warnings.warn(
                f"Conjugate gradients stopped after {posterior.n_iter} iterations at a relative "
                f"residual of {posterior.residual:.1e}. Raise max_iter or tol.",
                NumericalWarning,
                stacklevel=4,
            )
        return self._from_function_space(plan, posterior)

    def _preconditioner_rank(self) -> int:
        """Large where the matrix is ill conditioned: iterations then cost more than the set-up."""
        condition = float(gram_diag(self.kernel, self.X).sum()) / self.noise
        rank = self.options.preconditioner_rank
        return min(self.n // 2, rank if condition > ILL_CONDITIONED else 3 * rank // 8)

    def _from_function_space(self, plan: Plan, posterior: FunctionSpacePosterior) -> Fit:
        return Fit(
            posterior,
            plan,
            self.kernel,
            self.noise,
            calibration=self._over_observations(posterior.calibration),
            n_iter=posterior.n_iter,
            residual=posterior.residual,
            log_marginal_likelihood=self._with_scatter(posterior.log_marginal_likelihood),
            history=posterior.history,
        )

    def _over_observations(self, z2: float) -> float:
        """Mean squared standardised residual of all observations, given that of distinct rows."""
        if self.data.scatter is None or self.data.weight is None or z2 == 1.0:
            return z2
        n_within = max(0.0, float(self.data.weight.sum()) - self.n)
        within = float(self.data.scatter.sum()) / self.noise
        return (self.n * z2 + within) / (self.n + n_within)

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

    def local(self, plan: Plan) -> Fit:
        """Exact regression on neighbourhoods."""
        posterior = local_posterior(self.kernel, self.data, self.noise, plan.size)
        return Fit(posterior, plan, self.kernel, self.noise)

    def compared_plan(self, weights: Plan) -> Plan:
        """The plan whose route predicts rows left out best (:mod:`.comparison`)."""

        def fit(data: Data, plan: Plan) -> tuple[Posterior, float]:
            trial = _Fitter(self.kernel, data, self.noise, self.options, self.generator, None)
            result = trial.weight_space(plan)
            return result.posterior, result.noise

        return compare_routes(
            self.kernel, self.data, self.noise, weights, fit, generator=self.generator
        )

    def low_rank_plan(self, asked: Plan) -> Fit | None:
        """The exact answer at its cheapest, where K is of low numerical rank; None where not.

        That some rows alone exceed the rank is cheap to see.
        """
        if self.n > 2 * PROBED_ROWS:
            generator = torch.Generator().manual_seed(self.options.seed)
            order = torch.randperm(self.n, generator=generator)[:PROBED_ROWS]
            some = self.data.take(order.to(self.X.device))
            few = _Fitter(self.kernel, some, self.noise, self.options, generator, None)
            if few.low_rank_factor() is None:
                return None
        low_rank = self.low_rank_factor()
        if low_rank is None:
            return None
        rank = low_rank.factor.shape[1]
        reason = f"K has numerical rank {rank}: the rest is below 1% of the noise variance"
        plan = Plan("inducing", rank, "cholesky", asked.covariance, reason)
        plan = with_covariance(plan, asked.covariance, self.n)
        return self.weight_space(plan, pivots=low_rank.pivots)

    def low_rank_factor(self) -> LowRank | None:
        """Factor of K where its rank, up to a hundredth of the noise, is low; None where not."""
        trace = float(gram_diag(self.kernel, self.X).sum())
        tol = LOW_RANK_RESIDUAL * self.noise * self.n / trace
        factor = pivoted_factor(self.kernel, self.X, LOW_RANK, generator=self.generator, tol=tol)
        return factor if factor.residual_trace <= tol * trace else None

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
        weights, result, misfit = pathwise_posterior(
            design,
            self.y,
            self.noise,
            lambda targets: self._solve(plan, design, targets),
            n_samples=min(self.options.n_samples, 31),
            generator=self.generator,
        )
        # Misfits are noise times (K + noise I)^-1 targets: a factor that cancels.
        z2 = leave_one_out_z2(misfit[:, 0], misfit[:, 1:])
        return Fit(
            self._augmented(plan, weights),
            plan,
            self.kernel,
            self.noise,
            calibration=z2,
            n_iter=max(1, result.n_iter),
            residual=float(result.residual.max()),
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
            return AugmentedPosterior(posterior)
        return posterior

    # -------------------------------------------------------------------------- features

    def _fourier(self, m: int) -> FourierFeatures:
        return FourierFeatures(
            self.kernel,
            m,
            self.X.shape[1],
            kind=self.options.feature_map,
            seed=self.options.seed,
            origin=origin(self.X)[0],
        )
