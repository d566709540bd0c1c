r"""QSGP by stochastic gradients, from a plan to a posterior: Theorems 1 to 3 in practice.

:class:`.SGDSolver` and :class:`.LikelihoodSolver` iterate, and move the
hyper-parameters after a tenth of the iterations; here are the basis, the warm start, observations
held out to stop early, to scale all variances or to choose the moderation, and what becomes of a
learning rate that is too large.

A descent that was stopped leaves errors that the posterior variances know nothing of, and those of
a mean-field posterior tend to the prior's as m grows. Where observations are many, some are held
out, and all variances are multiplied by their mean squared standardised residual.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.blocks import RowReader
from skgp.data import random_rows
from skgp.inference.exact import FunctionSpacePosterior, WeightCovariance
from skgp.inference.stochastic.basis import (
    FourierBasis,
    InducingBasis,
    KernelColumns,
    SpectralColumns,
)
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.gaussian import SGDSolver, validation_rule
from skgp.inference.stochastic.likelihood import LikelihoodSolver
from skgp.inference.stochastic.state import LikelihoodState, SGDState
from skgp.inference.weights.posterior import (
    ClassifierPosterior,
    LinearWeightsPosterior,
    WeightGaussian,
)
from skgp.kernels.spectral import FourierFeatures
from skgp.learning.calibration import choose_moderation, mean_scores
from skgp.learning.defaults import CALIBRATION_ROWS, DIVERGED, MAX_RESTARTS, MODERATION_ROWS
from skgp.learning.plan import Fit, Options, Plan, Problem
from skgp.learning.selection import class_codes, held_out_rows, hold_out
from skgp.linalg import NumericalWarning, warn_caller
from skgp.optim import host_generator
from skgp.optim.stopping import settled


def fit_stochastic(problem: Problem, plan: Plan, previous: SGDState | None) -> Fit:
    """Regression by Theorems 1 and 2, the learning rate a tenth as large wherever it diverges.

    `previous` is the state of an earlier fit to go on from; one of another basis, of another number
    of functions or of dense columns, is passed over. A callback is also told ``info["fit"]``, a
    function that returns the fit so far. Warns when the learning rate was lowered, or the mean
    explains less than half of the variance of the targets in the end.
    """
    options, y = problem.options, problem.data.y
    route = _Regression(problem, plan)
    rate, restart = options.learning_rate, 0
    fit = route.descend(previous, rate, watch=previous is None)  # which a descent changes in place
    while fit is None:
        restart += 1
        fit = route.descend(None, rate / 10**restart, watch=restart < MAX_RESTARTS)
    if restart:
        warn_caller(
            f"learning_rate={options.learning_rate} makes stochastic gradients diverge; a rate "
            f"{10**restart} times smaller was used. Lower it, or use solver='cholesky' or 'cg'.",
            NumericalWarning,
        )
    left = route.support_mse / float(y.square().mean()) if bool(y.any()) else 0.0
    if left > 0.5:
        warn_caller(
            f"Stochastic gradients are far from convergence after {fit.n_iter} iterations: the "
            f"mean leaves {left:.0%} of the variance unexplained. Raise max_iter, or use "
            "solver='cholesky' or 'cg'.",
            NumericalWarning,
        )
    return fit


class _Regression:
    """One problem, for as many descents as it takes."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.kernel, self.X, self.y = problem.kernel, problem.data.X, problem.data.y
        self.noise, self.plan, self.options = problem.noise, plan, problem.options
        self.generator, self.callback = host_generator(problem.generator), problem.callback
        self.n_dense = min(self.options.n_dense_columns, plan.size)
        self.support_mse = 0.0  # of the mean on the support rows, after the last descent
        self.held_out: tuple[Tensor, Tensor] = (self.y[:0, None], self.y[:0])

    def descend(self, previous: SGDState | None, rate: float, *, watch: bool) -> Fit | None:
        """Iterate to the end, or return None as soon as the support rows show divergence."""
        o, X, y = self.options, self.X, self.y
        rule = None
        fraction = CALIBRATION_ROWS / len(X)
        in_memory = isinstance(X, Tensor)  # a memory map is not copied, to hold some of it out
        if o.early_stopping or (in_memory and fraction <= 0.1):
            fraction = o.validation_fraction if o.early_stopping else fraction
            (X, y), self.held_out = hold_out(X, y, fraction, o.seed)
        basis, state = self._start(X, y, previous)
        if o.early_stopping:
            rule = validation_rule(basis, state, *self.held_out, o.tol)
        # Zero weights leave the mean square of y; only a diverging descent leaves more for long.
        limit = DIVERGED * float(y.square().mean())

        def diverges(iteration: int, info: dict[str, float]) -> bool:
            return watch and info["support_mse"] > limit

        def callback(iteration: int, info: dict) -> bool:
            stop = rule is not None and rule(iteration, 0.0)  # which scores the weights
            if self.callback is not None:
                info = {**info, "fit": lambda: self._fit(basis, state, len(X))}
                stop = bool(self.callback(iteration, info)) or stop
            return stop

        sgd = _settings(o, rate, o.learn_hyperparameters and basis.diagonal_precision)
        if o.early_stopping:
            sgd = replace(sgd, tol=None)
        solver = SGDSolver(X, y, basis, state, sgd, self.generator)
        solver.rules.append(diverges)
        history = solver.run(callback)
        if any(diverges(0, {"support_mse": error}) for error in history["support_mse"]):
            return None
        self.support_mse = history["support_mse"][-1]
        fit = self._fit(basis, state, len(X))
        fit.state, fit.history = state.to("cpu"), history["loss"]
        fit.validation = [] if rule is None else [-score for _, score in rule.scores]
        return fit

    def _start(
        self, X: Tensor, y: Tensor, previous: SGDState | None
    ) -> tuple[FourierBasis | InducingBasis, SGDState]:
        """The basis, and weights: those of an earlier fit where they are of the same kind."""
        o, m = self.options, self.plan.size
        k = self.n_dense if self.plan.covariance == "chevron" else 0
        if previous is not None and not self._continues(previous, k):
            previous = None
        fourier = None if previous is None else previous.fourier
        Z = None if previous is None else previous.Z
        if self.plan.basis == "inducing" and Z is None:  # all rows, or m at random; a copy
            Z = self.X[random_rows(len(self.X), m, self.generator).to(X.device)]
        basis = _basis(self.kernel, self.plan, o, X, Z, fourier)
        if previous is not None:
            theta = None
            if fourier is not None:
                theta = torch.as_tensor(self.kernel.theta, dtype=torch.float64, device=X.device)
            return basis, previous.to(X.device).continued(basis, self.noise, theta)
        state = SGDState.start(
            X,
            y,
            basis,
            self.noise,
            n_dense=k,
            n_support=min(o.n_support, len(X)),
            generator=self.generator,
        )
        if isinstance(basis, InducingBasis):
            state.Z = torch.as_tensor(basis.Z)
        else:
            state.fourier = basis.fourier
        return basis, state

    def _continues(self, previous: SGDState, k: int) -> bool:
        """Whether an earlier state, of k columns of its factor, is that of this problem."""
        fourier, theta = previous.fourier, self.kernel.theta
        return (
            previous.weights.shape == (self.plan.size, 1 + k)
            and previous.weights.dtype == self.options.dtype
            and previous.X_support.shape[1] == self.X.shape[1]
            and (fourier is None) == (self.plan.basis == "inducing")
            # The kernel is that of the features but for its free hyper-parameters.
            and (
                fourier is None
                or (
                    fourier.kind == self.options.feature_map
                    and fourier.kernel.n_dims == len(theta)
                    and fourier.kernel.clone_with_theta(theta)
                    == self.kernel.clone_with_theta(theta)
                )
            )
        )

    def _fit(self, basis: FourierBasis | InducingBasis, state: SGDState, n: int) -> Fit:
        """What the state of a fit to n rows predicts, also while it goes on."""
        kernel, noise = self.kernel, float(state.noise_variance)
        posterior: Any
        if isinstance(basis, FourierBasis):
            if state.theta is not None:
                kernel = kernel.clone_with_theta(state.theta.cpu().numpy())
            columns = SpectralColumns(basis.fourier, state.theta, state.n_drawn_units)
            m = columns.n_features
            q = state.covariance(basis, n, m)
            posterior = LinearWeightsPosterior.from_gaussian(columns, q)
        else:
            q = _in_float64(state.covariance(basis, n))
            covariance = WeightCovariance(q, noise, self.options.augment, n / self.plan.size)
            posterior = FunctionSpacePosterior(kernel, torch.as_tensor(basis.Z), q.mean, covariance)
        fit = Fit(posterior, self.plan, kernel, noise, n_iter=max(1, state.n_iter), state=state)
        X, y = self.held_out
        if len(X) >= CALIBRATION_ROWS:
            mean, variance = posterior.mean_and_variance(X.double())
            fit.calibration = float(((y - mean).square() / (variance + noise)).mean())
        return fit


@dataclass(frozen=True)
class SomeRows:
    """Arrays of which minibatches are read, and which of their rows a problem has."""

    X: np.ndarray  # (n, d)
    y: np.ndarray  # (n,); codes of classes
    numbers: np.ndarray  # (k,); rising
    coded: Callable[[np.ndarray], np.ndarray]  # codes (b,) to (b, c), -1 and +1

    def without(self, out: Tensor) -> tuple[Any, Any]:
        """X and Y but for the rows of the problem that are held out."""
        left_out = self.numbers[out.cpu().numpy()]
        return RowReader(self.X, left_out), RowReader(self.y, left_out, self.coded)


def fit_stochastic_classifier(
    problem: Problem,
    plan: Plan,
    *,
    Z: Tensor | None,
    state: LikelihoodState | None,
    rows: SomeRows | None = None,
) -> Fit:
    """Classification by Theorem 3, of labels (n, c) in {-1, +1}.

    Hyper-parameters follow the bound with Fourier features. A few observations are held out, to
    decide about moderation. `state` is that of an earlier fit to go on from. With `rows` these are
    learned from, and the observations of the problem are some of them.
    """
    kernel, likelihood, o = problem.kernel, problem.likelihood, problem.options
    X, Y, generator = problem.data.X, problem.data.y, host_generator(problem.generator)
    n_held_out = min(MODERATION_ROWS, (len(X) if rows is None else len(rows.X)) // 10)
    seed = torch.Generator().manual_seed(o.seed)
    out = torch.from_numpy(held_out_rows(class_codes(Y), n_held_out, seed, X=X, classes=True))
    X_held, Y_held = X[out], Y[out]
    X, Y = (X[~out], Y[~out]) if rows is None else rows.without(out)
    k = min(o.n_dense_columns, plan.size) if plan.covariance == "chevron" else 0
    basis = _basis(kernel, plan, o, X, Z)
    if state is not None and _continues(state, X, Y, plan, o, k):
        state = state.to(X.device)
    else:
        n_support = min(o.n_support, len(X))
        state = LikelihoodState.start(
            X,
            Y,
            basis,
            likelihood,
            offset=problem.offset,
            n_dense=k,
            n_support=n_support,
            generator=generator,
        )

    def watch(iteration: int, info: dict) -> bool:
        now = {**info, "fit": lambda: _classifier_fit(kernel, plan, basis, state, [])}
        return problem.callback is not None and bool(problem.callback(iteration, now))

    sgd = _settings(o, o.learning_rate, o.learn_hyperparameters and plan.basis == "fourier")
    solver = LikelihoodSolver(X, Y, basis, state, sgd, generator, likelihood, bound=o.bound)
    losses = solver.run(watch)["loss"]
    fit = _classifier_fit(kernel, plan, basis, state, losses)
    fit.elbo, fit.state = -settled(losses), state.to("cpu")
    if len(X_held):
        mean, variance = fit.posterior.mean_and_variance(X_held)
        ones = torch.ones_like(mean[:, 0])
        fit.moderation, moderated = choose_moderation(likelihood, Y_held, mean, variance, ones)
        fit.scores = {"moderation": mean_scores(moderated, ones)}
    return fit


def _continues(
    state: LikelihoodState, X: Tensor, Y: Tensor, plan: Plan, options: Options, k: int
) -> bool:
    """Whether a state is one of the same kind."""
    return (
        state.weights.shape == (plan.size, Y.shape[1] * (1 + k))
        and state.weights.dtype == options.dtype
        and state.X_support.shape[1] == X.shape[1]
        and plan.basis == "fourier"  # clusters, and their centres, are drawn anew
    )


def _classifier_fit(
    kernel,
    plan: Plan,
    basis: FourierBasis | InducingBasis,
    state: LikelihoodState,
    history: list[float],
) -> Fit:
    """What the state predicts, also while a fit goes on."""
    columns: KernelColumns | SpectralColumns
    if isinstance(basis, FourierBasis):
        theta = None if state.theta is None else state.theta.detach().clone()
        columns = SpectralColumns(basis.fourier, theta, state.n_drawn_units)
        if theta is not None:
            kernel = kernel.clone_with_theta(theta.cpu().numpy())
    else:
        columns = KernelColumns(kernel, torch.as_tensor(basis.Z))
    c, m = state.n_latent, columns.n_features
    q = [_in_float64(state.q(j, m)) for j in range(c)]
    posterior = ClassifierPosterior(columns, state.weights[:m, :c].clone(), state.offset, q)
    return Fit(posterior, plan, kernel, n_iter=max(1, state.n_iter), history=history, state=state)


def _basis(
    kernel,
    plan: Plan,
    options: Options,
    X: Tensor,
    Z: Tensor | None,
    fourier: FourierFeatures | None = None,
) -> FourierBasis | InducingBasis:
    """Columns of Phi and S where X is: Fourier features, those given or new, or k(., Z)."""
    if plan.basis == "inducing" and Z is not None:
        return InducingBasis(kernel, Z.to(X.device), dtype=options.dtype, device=X.device)
    if fourier is None:
        fourier = FourierFeatures(
            kernel, plan.size, X.shape[1], kind=options.feature_map, seed=options.seed
        )
    return FourierBasis(fourier, dtype=options.dtype, device=X.device)


def _settings(options: Options, rate: float, learn_hyperparameters: bool) -> SGDOptions:
    """Of the descent; hyper-parameters are frozen for a tenth of the iterations."""
    max_iter = 1000 if options.max_iter is None else options.max_iter
    return SGDOptions(
        batch_size=options.batch_size,
        basis_batch_size=options.basis_batch_size,
        learning_rate=rate,
        max_iter=max_iter,
        tol=options.tol,
        learn_hyperparameters=learn_hyperparameters,
        freeze_iterations=max_iter // 10,
    )


def _in_float64(q: WeightGaussian) -> WeightGaussian:
    """Predictions are in float64, whatever the weights were trained in."""
    return WeightGaussian(q.mean.double(), q.columns.double(), q.tail_std.double())
