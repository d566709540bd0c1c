r"""QSGP by stochastic gradients, from a plan to a posterior: Theorems 1 and 2 in practice.

:class:`.SGDSolver` iterates; here are the basis, rows held out, the warm start,
and what becomes of a learning rate that is too large.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from skgp.inference.exact import FunctionSpacePosterior, WeightCovariance
from skgp.inference.stochastic.basis import FourierBasis, InducingBasis, SpectralColumns
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.gaussian import SGDSolver, validation_rule
from skgp.inference.stochastic.state import SGDState
from skgp.inference.weights.gaussian import WeightGaussian
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.kernels.spectral import FourierFeatures
from skgp.learning.selection import hold_out
from skgp.linalg.exceptions import NumericalWarning
from skgp.models.qsgp.plan import Plan
from skgp.models.qsgp.results import Fit, Options, Posterior

Callback = Callable[[int, dict], bool | None]

DIVERGED = 1.5  # times the mean square of the targets, left on the support rows
MAX_RESTARTS = 3


def fit_stochastic(
    kernel,
    X: Tensor,
    y: Tensor,
    noise: float,
    plan: Plan,
    options: Options,
    previous: SGDState | None,
    generator: torch.Generator,
    callback: Callback | None,
) -> Fit:
    """Fit by stochastic gradients, with a learning rate ten times smaller wherever they diverge.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
    y : Tensor of shape (n,)
    noise : float
    plan : Plan
        Resolved, with ``solver="sgd"``.
    options : Options
    previous : SGDState or None
        Of an earlier fit to go on from.
    generator : torch.Generator
    callback : callable or None
        Also told ``info["fit"]``, a function that returns the fit so far.

    Warns
    -----
    NumericalWarning
        When the learning rate was lowered, or the mean explains less than half of the variance of
        the targets in the end.
    """
    route = _Stochastic(kernel, X, y, noise, plan, options, generator, callback)
    rate, restart = options.learning_rate, 0
    fit = route.descend(previous, rate, watch=previous is None)  # which a descent changes in place
    while fit is None:
        restart += 1
        fit = route.descend(None, rate / 10**restart, watch=restart < MAX_RESTARTS)
    if restart:
        warnings.warn(
            f"learning_rate={options.learning_rate} makes stochastic gradients diverge; a rate "
            f"{10**restart} times smaller was used. Lower it, or use solver='cholesky' or 'cg'.",
            NumericalWarning,
            stacklevel=4,
        )
    if route.support_mse > 0.5 * float(y.square().mean()):
        warnings.warn(
            f"Stochastic gradients are far from convergence after {fit.n_iter} iterations: the "
            f"mean leaves {route.support_mse / float(y.square().mean()):.0%} of the variance "
            "unexplained. Raise max_iter, or use solver='cholesky' or 'cg'.",
            NumericalWarning,
            stacklevel=4,
        )
    return fit


class _Stochastic:
    """One problem, for as many descents as it takes."""

    def __init__(self, kernel, X, y, noise, plan: Plan, options: Options, generator, callback):
        self.kernel, self.X, self.y, self.noise = kernel, X, y, noise
        self.plan, self.options = plan, options
        self.generator, self.callback = generator, callback
        self.n = X.shape[0]
        self.support_mse = 0.0  # of the mean on the support rows, after the last descent

    def descend(self, previous: SGDState | None, rate: float, *, watch: bool) -> Fit | None:
        """Iterate to the end, or return None as soon as the support rows show divergence."""
        o, plan, X, y = self.options, self.plan, self.X, self.y
        rule = None
        if o.early_stopping:
            (X, y), held_out = hold_out(X, y, o.validation_fraction, o.seed)
        basis, state = self._start(plan, X, y, previous)
        if o.early_stopping:
            rule = validation_rule(basis, state, *held_out, o.tol)
        # Zero weights leave the mean square of y; only a diverging descent leaves more for long.
        limit = DIVERGED * float(y.square().mean())
        diverged = False

        def callback(iteration: int, info: dict) -> bool:
            nonlocal diverged
            diverged = watch and info["support_mse"] > limit
            stop = diverged or (rule is not None and rule(iteration, info["loss"]))
            if self.callback is not None:
                info = {**info, "fit": lambda: self._stochastic_fit(plan, basis, state, len(X))}
                stop = bool(self.callback(iteration, info)) or stop
            return stop

        max_iter = 1000 if o.max_iter is None else o.max_iter
        sgd = SGDOptions(
            batch_size=o.batch_size,
            basis_batch_size=o.basis_batch_size,
            learning_rate=rate,
            max_iter=max_iter,
            tol=None if o.early_stopping else o.tol,
            learn_hyperparameters=o.learn_hyperparameters and basis.diagonal_precision,
            freeze_iterations=max_iter // 10,
        )
        history = SGDSolver(X, y, basis, state, sgd, self.generator).run(callback)
        if diverged:
            return None
        self.support_mse = history["support_mse"][-1]
        fit = self._stochastic_fit(plan, basis, state, len(X))
        fit.history = history["loss"]
        fit.validation = [] if rule is None else [-score for _, score in rule.scores]
        return fit

    def _start(
        self, plan: Plan, X: Tensor, y: Tensor, previous: SGDState | None
    ) -> tuple[FourierBasis | InducingBasis, SGDState]:
        """The basis, and weights: those of an earlier fit where they are of the same kind."""
        o = self.options
        k = self._dense_columns(plan) if plan.covariance == "chevron" else 0
        if previous is not None and not self._continues(previous, plan, k):
            previous = None
        basis: FourierBasis | InducingBasis
        theta = None
        if plan.basis == "fourier":
            fourier = previous.fourier if previous is not None else None
            if fourier is not None:
                theta = torch.as_tensor(self.kernel.theta, dtype=torch.float64)
            basis = FourierBasis(fourier or self._fourier(plan.size), dtype=o.dtype)
        else:
            Z = previous.Z if previous is not None else None
            Z = self._inducing_rows(plan.size) if Z is None else Z
            basis = InducingBasis(self.kernel, Z, dtype=o.dtype)
        if previous is not None:
            return basis, previous.continued(basis, self.noise, theta)
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

    def _continues(self, previous: SGDState, plan: Plan, k: int) -> bool:
        return (
            previous.weights.shape == (plan.size, 1 + k)
            and previous.weights.dtype == self.options.dtype
            and previous.X_support.shape[1] == self.X.shape[1]
            and (previous.fourier is None) == (plan.basis == "inducing")
            and (previous.fourier is None or self._same_features(previous.fourier))
        )

    def _same_features(self, fourier: FourierFeatures) -> bool:
        """Whether the kernel is that of the features but for its free hyper-parameters."""
        theta = self.kernel.theta
        return (
            fourier.kind == self.options.feature_map
            and fourier.kernel.n_dims == len(theta)
            and fourier.kernel.clone_with_theta(theta) == self.kernel.clone_with_theta(theta)
        )

    def _dense_columns(self, plan: Plan) -> int:
        return min(self.options.n_dense_columns, plan.size)

    def _stochastic_fit(
        self, plan: Plan, basis: FourierBasis | InducingBasis, state: SGDState, n: int
    ) -> Fit:
        """What the state of a stochastic fit to n rows predicts, also while it goes on."""
        kernel, noise, q = self.kernel, state.noise_variance, state.covariance(basis, n)
        posterior: Posterior
        if isinstance(basis, FourierBasis):
            if state.theta is not None:
                kernel = kernel.clone_with_theta(state.theta.cpu().numpy())
            columns = SpectralColumns(basis.fourier, state.theta)
            posterior = LinearWeightsPosterior.from_gaussian(columns, q)
        else:
            # Predictions are in float64, whatever the weights were trained in.
            q = WeightGaussian(q.mean.double(), q.columns.double(), q.tail_std.double())
            covariance = WeightCovariance(q, noise, self.options.augment, n / plan.size)
            Z = torch.as_tensor(basis.Z)
            posterior = FunctionSpacePosterior(kernel, Z, q.mean, covariance)
        return Fit(posterior, plan, kernel, noise, n_iter=max(1, state.n_iter), state=state)

    def _inducing_rows(self, m: int) -> Tensor:
        """All rows, or m at random; a copy."""
        if m == self.n:
            return self.X.clone()
        return self.X[torch.randperm(self.n, generator=self.generator)[:m]]

    def _fourier(self, m: int) -> FourierFeatures:
        return FourierFeatures(
            self.kernel,
            m,
            self.X.shape[1],
            kind=self.options.feature_map,
            seed=self.options.seed,
        )
