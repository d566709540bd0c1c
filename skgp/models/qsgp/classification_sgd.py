"""QSGP classification by stochastic gradients (Theorem 3)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.inference.stochastic.basis import (
    FourierBasis,
    InducingBasis,
    KernelColumns,
    SpectralColumns,
)
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.stochastic.likelihood import LikelihoodSolver
from skgp.inference.stochastic.state import LikelihoodState
from skgp.inference.weights.gaussian import WeightGaussian
from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.kernels.spectral import FourierFeatures
from skgp.learning import held_out_rows
from skgp.learning.moderation import choose_moderation, class_codes, mean_scores
from skgp.likelihoods import Bernoulli
from skgp.models.qsgp.classification_results import (
    ClassificationFit,
    ClassificationOptions,
    LatentPosterior,
)
from skgp.models.qsgp.plan import Plan

Callback = Callable[[int, dict], bool | None]

#: Rows held out to decide about moderation; more would take long to predict with 1e6 functions.
HELD_OUT_ROWS = 300
_ITERATIONS = 1_000


def fit_sgd_classifier(
    kernel,
    X: Tensor,
    Y: Tensor,
    likelihood: Bernoulli,
    plan: Plan,
    options: ClassificationOptions,
    *,
    offset: Tensor,
    Z: Tensor | None,
    state: LikelihoodState | None,
    generator: torch.Generator,
    callback: Callback | None,
) -> ClassificationFit:
    """Fit by minibatches over rows and basis functions; parameters as `fit_classifier`.

    Hyper-parameters follow the bound after a tenth of the iterations, with Fourier features. A few
    rows are held out, to decide about moderation.
    """
    n_held_out = min(HELD_OUT_ROWS, len(X) // 10)
    seed = torch.Generator().manual_seed(options.seed)
    out = torch.from_numpy(held_out_rows(class_codes(Y), n_held_out, seed, classes=True))
    X_held, Y_held, X, Y = X[out], Y[out], X[~out], Y[~out]
    k = min(options.n_dense_columns, plan.size) if plan.covariance == "chevron" else 0
    route = _Route(kernel, X, Y, likelihood, plan, options, Z)
    state = route.start(state, offset, k, generator)

    def watch(iteration: int, info: dict) -> bool:
        return callback is not None and bool(
            callback(iteration, {**info, "fit": lambda: route.fit(state, [])})
        )

    max_iter = _ITERATIONS if options.max_iter is None else options.max_iter
    sgd = SGDOptions(
        batch_size=options.batch_size,
        basis_batch_size=options.basis_batch_size,
        learning_rate=options.learning_rate,
        max_iter=max_iter,
        tol=options.tol,
        learn_hyperparameters=options.learn_hyperparameters and plan.basis == "fourier",
        freeze_iterations=max_iter // 10,
    )
    solver = LikelihoodSolver(
        X, Y, route.basis, state, sgd, generator, likelihood, bound=options.bound
    )
    losses = solver.run(watch)["loss"]
    last = losses[-(-len(losses) * 9 // 10) :] or losses
    fit = replace(route.fit(state, losses), elbo=-sum(last) / len(last))
    if not len(X_held):
        return fit
    mean, variance = fit.posterior.mean_and_variance(X_held)
    ones = torch.ones_like(mean[:, 0])
    best, moderated = choose_moderation(likelihood, Y_held, mean, variance, ones)
    return replace(fit, moderation=best, scores={"moderation": mean_scores(moderated, ones)})


class _Route:
    """One problem: where its fits start, and what they predict."""

    def __init__(self, kernel, X, Y, likelihood, plan: Plan, options, Z: Tensor | None):
        self.kernel, self.X, self.Y, self.likelihood = kernel, X, Y, likelihood
        self.plan, self.options = plan, options
        self.Z = X if Z is None else Z
        self.basis: FourierBasis | InducingBasis
        if plan.basis == "fourier":
            fourier = FourierFeatures(
                kernel, plan.size, X.shape[1], kind=options.feature_map, seed=options.seed
            )
            self.basis = FourierBasis(fourier, dtype=options.dtype)
        else:
            self.basis = InducingBasis(kernel, self.Z, dtype=options.dtype)

    def start(
        self,
        previous: LikelihoodState | None,
        offset: Tensor,
        k: int,
        generator: torch.Generator,
    ) -> LikelihoodState:
        """The state of an earlier fit, if it is one of the same kind, or a new one."""
        shape = (self.plan.size, self.Y.shape[1] * (1 + k))
        if (
            previous is not None
            and previous.weights.shape == shape
            and previous.weights.dtype == self.options.dtype
            and previous.X_support.shape[1] == self.X.shape[1]
            and self.plan.basis == "fourier"  # clusters, and their centres, are drawn anew
        ):
            return previous
        return LikelihoodState.start(
            self.X,
            self.Y,
            self.basis,
            self.likelihood,
            offset=offset,
            n_dense=k,
            n_support=min(self.options.n_support, len(self.X)),
            generator=generator,
        )

    def fit(self, state: LikelihoodState, history: list[float]) -> ClassificationFit:
        """What the state predicts, also while a fit goes on."""
        kernel = self.kernel
        columns: KernelColumns | SpectralColumns
        if isinstance(self.basis, FourierBasis):
            theta = None if state.theta is None else state.theta.detach().clone()
            columns = SpectralColumns(self.basis.fourier, theta)
            if theta is not None:
                kernel = kernel.clone_with_theta(theta.numpy())
        else:
            columns = KernelColumns(kernel, self.Z)
        c = state.n_latent
        # Predictions are in float64, whatever the weights were trained in.
        gaussians = [state.q(j) for j in range(c)]
        q = [
            WeightGaussian(g.mean.double(), g.columns.double(), g.tail_std.double())
            for g in gaussians
        ]
        weights = ClassifierPosterior(columns, state.weights[:, :c].clone(), state.offset, q)
        return ClassificationFit(
            LatentPosterior(weights),
            self.plan,
            kernel,
            n_iter=max(1, state.n_iter),
            history=history,
            state=state,
        )
