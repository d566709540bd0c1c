r"""QSGP classification: from a plan (basis, solver, covariance) to latent posteriors.

Evans and Nair (2020), section 3. Class j of c has the latent function
:math:`f_j(x) = o_j + \sum_r w_{rj} \phi_r(x)`, :math:`w_j \sim N(0, S^{-1})`, and
:math:`P(y_j = 1) = g(f_j)`; the c one-vs-rest problems (one for two classes) share the features.

===============  ==================================================================================
solver           what
===============  ==================================================================================
newton           Laplace approximation: Newton's method with preconditioned conjugate gradients
                 (:mod:`.newton`), the amplitude by rows left out (:mod:`.amplitude`)
sgd              Theorem 3 by minibatches over rows and basis functions (:mod:`.likelihood`)
relevance        a sparse basis by evidence maximisation (:mod:`.relevance_classification`)
===============  ==================================================================================

The paper has stochastic gradients only. They reach in ten minutes what Newton's method passes in
one: a pass over all rows costs less than the thousands of iterations that it replaces.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.inference.laplace import OnlineLaplace, laplace_covariance, log_evidence
from skgp.inference.newton import fit_newton, laplace_curvature
from skgp.inference.relevance.classification import fit_relevance_classifier
from skgp.inference.weights.design import Basis, StreamedDesign, WhitenedInducingBasis
from skgp.inference.weights.posterior import ClassifierPosterior
from skgp.kernels.scales import amplitude_range
from skgp.kernels.spectral import FourierFeatures
from skgp.learning import held_out_rows
from skgp.learning.moderation import class_codes
from skgp.likelihoods import Bernoulli
from skgp.models.qsgp.amplitude import (
    FACTORS,
    Choice,
    Problem,
    by_held_out_rows,
    by_leaving_one_out,
)
from skgp.models.qsgp.classification_plan import SUBSET_ROWS
from skgp.models.qsgp.classification_results import (
    ClassificationFit,
    ClassificationOptions,
    LatentPosterior,
)
from skgp.models.qsgp.classification_sgd import fit_sgd_classifier
from skgp.models.qsgp.plan import Plan
from skgp.optim.stopping import StopRecorder

Callback = Callable[[int, dict], bool | None]

#: Flops of an approximate leave-one-out score up to which it takes the place of held-out rows.
LEAVE_ONE_OUT_FLOPS = 3e10
#: Numbers of features beyond which they are kept in float32.
SINGLE_SIZE = 2e7
#: Rows held out, at most; as a share of all rows, a tenth.
MAX_HELD_OUT = 5_000
_PROBE_ROWS = 32  # for the accuracy of single precision


def fit_classifier(
    kernel,
    X: Tensor,
    Y: Tensor,
    likelihood: Bernoulli,
    plan: Plan,
    options: ClassificationOptions,
    *,
    offset: Tensor,
    row_weight: Tensor | None = None,
    Z: Tensor | None = None,
    state: Any = None,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> ClassificationFit:
    """Fit the latent functions for a kernel whose hyper-parameters are known but for the amplitude.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
        Float64.
    Y : Tensor of shape (n, c)
        In {-1, +1}.
    likelihood : Bernoulli
    plan : Plan
        Resolved by `resolve_classification`.
    options : ClassificationOptions
    offset : Tensor of shape (c,)
    row_weight : Tensor of shape (n,), optional
        Positive.
    Z : Tensor of shape (n_basis, d), optional
        Inducing points of ``basis="inducing"``; all rows by default.
    state : LikelihoodState, optional
        Of an earlier stochastic fit to go on from.
    generator : torch.Generator
    callback : callable, optional
        The info of a stochastic iteration holds ``"fit"``, which makes a fit of the weights so far.

    Returns
    -------
    ClassificationFit

    Raises
    ------
    ValueError
        For weighted rows with stochastic gradients.
    """
    if plan.basis == "inducing":
        Z = X if Z is None else Z
        plan = replace(plan, n_basis=len(Z))  # of rows that are equal one is a point
    arguments = (kernel, X, Y, likelihood, plan, options)
    if plan.solver == "sgd":
        if row_weight is not None:
            raise ValueError(
                "sample_weight and class_weight are not supported by solver='sgd'; use "
                "solver='newton'."
            )
        return fit_sgd_classifier(
            *arguments, offset=offset, Z=Z, state=state, generator=generator, callback=callback
        )
    options_of_rows: dict[str, Any] = {
        "offset": offset,
        "row_weight": row_weight,
        "generator": generator,
        "callback": callback,
    }
    if plan.basis == "relevance":
        return _fit_relevance(*arguments, **options_of_rows)
    return _fit_newton(*arguments, **options_of_rows, Z=Z)


class ClassificationStream:
    """Online Laplace approximation, and what it predicts.

    Parameters
    ----------
    online : OnlineLaplace
    inducing : bool
        Whether the basis consists of inducing points, which can be augmented.
    """

    def __init__(self, online: OnlineLaplace, inducing: bool):
        self._online, self._inducing = online, inducing

    @property
    def n_iter(self) -> int:
        """Newton steps of the last update."""
        return self._online.n_iter

    def update(self, X: Tensor, Y: Tensor, row_weight: Tensor | None = None) -> None:
        """Add a batch of rows."""
        self._online.update(X, Y, row_weight)

    def posterior(self, *, augment: bool) -> LatentPosterior:
        """The posterior after the batches so far."""
        weights = self._online.posterior()
        if augment and self._inducing:
            return LatentPosterior(weights, 1.0)
        return LatentPosterior(weights)


def start_stream(
    kernel,
    n_inputs: int,
    plan: Plan,
    likelihood: Bernoulli,
    *,
    offset: Tensor,
    Z: Tensor | None,
    feature_map: str,
    seed: int,
) -> ClassificationStream:
    """Begin an online Laplace approximation with the basis that a plan names."""
    basis: Basis
    if Z is None:
        basis = FourierFeatures(kernel, plan.size, n_inputs, kind=feature_map, seed=seed)
    else:
        basis = WhitenedInducingBasis(kernel, Z)
    online = OnlineLaplace(basis, offset, likelihood)
    return ClassificationStream(online, Z is not None)


def _fit_newton(
    kernel,
    X: Tensor,
    Y: Tensor,
    likelihood: Bernoulli,
    plan: Plan,
    options: ClassificationOptions,
    *,
    offset: Tensor,
    row_weight: Tensor | None = None,
    Z: Tensor | None = None,
    generator: torch.Generator,
    callback: Callback | None = None,
) -> ClassificationFit:
    """Laplace approximation, the amplitude by rows left out.

    Factors of 4 are tried within the bounds of the kernel's constants, unless the rows are so few
    that the amplitude is known. The rows held out for that enter the last fit.
    """
    n = len(Y)
    weight = torch.ones_like(Y[:, 0]) if row_weight is None else row_weight
    design = _design(_basis(kernel, X, plan, options, Z), X, options)
    problem = Problem(design, X, Y, likelihood, offset, weight)
    recorder = StopRecorder(callback)
    factors = _factors(kernel) if options.learn_hyperparameters and n > SUBSET_ROWS else (1.0,)
    choice = _choose(kernel, problem, factors, plan, options, generator, recorder)
    max_iter = 30 if options.max_iter is None else options.max_iter
    fit = fit_newton(
        design,
        Y,
        likelihood,
        offset=offset,
        prior_variance=choice.prior_variance,
        row_weight=weight,
        start=choice.weights,
        max_iter=1 if recorder.stopped else max_iter,
        tol=1e-4 if options.tol is None else options.tol,
        generator=generator,
        callback=None if recorder.stopped else recorder,
    )
    q = laplace_covariance(
        design,
        laplace_curvature(likelihood, Y, fit.latent, weight),
        prior_variance=choice.prior_variance,
        kind=plan.covariance,
        n_dense_columns=options.n_dense_columns,
    )
    evidence = None
    if plan.covariance == "full":
        evidence = float(log_evidence(fit, q, prior_variance=choice.prior_variance).sum())
    weights = ClassifierPosterior(_exact(design.basis), fit.weights, offset, q)
    augmented = plan.basis == "inducing" and options.augment
    return ClassificationFit(
        LatentPosterior(weights, choice.prior_variance) if augmented else LatentPosterior(weights),
        plan,
        kernel,
        amplitude=choice.prior_variance,
        moderation=choice.moderation if options.moderation is None else options.moderation,
        n_iter=max(1, fit.n_iter),
        history=[info["loss"] for info in fit.history],
        scores={"amplitude": choice.amplitude_scores, "moderation": choice.moderation_scores},
        log_evidence=evidence,
    )


def _fit_relevance(
    kernel,
    X: Tensor,
    Y: Tensor,
    likelihood: Bernoulli,
    plan: Plan,
    options: ClassificationOptions,
    *,
    offset: Tensor,
    row_weight: Tensor | None,
    generator: torch.Generator,
    callback: Callback | None,
) -> ClassificationFit:
    """Relevance vectors: the evidence decides about every basis function of the candidates."""
    fit = fit_relevance_classifier(
        kernel,
        X,
        Y,
        likelihood,
        offset=offset,
        row_weight=row_weight,
        candidates=plan.n_basis,
        max_iter=500 if options.max_iter is None else options.max_iter,
        tol=1e-2 if options.tol is None else options.tol,
        generator=generator,
        callback=callback,
    )
    return ClassificationFit(
        fit.posterior,
        plan,
        kernel,
        moderation=1.0,
        n_iter=max(1, fit.n_iter),
        history=fit.history,
        log_evidence=fit.log_evidence,
        relevance=fit.indices,
    )


def _basis(
    kernel, X: Tensor, plan: Plan, options: ClassificationOptions, Z: Tensor | None
) -> Basis:
    """The features, those of many rows in single precision where that is accurate."""
    if plan.basis == "fourier":
        return FourierFeatures(
            kernel, plan.size, X.shape[1], kind=options.feature_map, seed=options.seed
        )
    basis = WhitenedInducingBasis(kernel, X if Z is None else Z)
    if _training_dtype(X, plan.size, options) == torch.float64:
        return basis
    return basis.in_single_precision(X[:: -(-len(X) // _PROBE_ROWS)])


def _exact(basis: Basis) -> Basis:
    """The same basis with features in double precision, for predictions."""
    return basis.in_double_precision() if isinstance(basis, WhitenedInducingBasis) else basis


def _training_dtype(X: Tensor, m: int, options: ClassificationOptions) -> torch.dtype:
    return torch.float32 if len(X) * m > SINGLE_SIZE else options.dtype


def _design(basis: Basis, X: Tensor, options: ClassificationOptions) -> StreamedDesign:
    dtype = _training_dtype(X, basis.n_features, options)
    return StreamedDesign(basis, X, dtype=dtype, memory_budget=options.memory_budget)


def _factors(kernel) -> tuple[float, ...]:
    """Multiples of the amplitude that the bounds of the kernel's constants allow."""
    low, high = amplitude_range(kernel)
    return tuple(a for a in FACTORS if low <= a <= high)


def _choose(
    kernel,
    problem: Problem,
    factors: tuple[float, ...],
    plan: Plan,
    options: ClassificationOptions,
    generator: torch.Generator,
    callback: StopRecorder,
) -> Choice:
    """Amplitude and moderation by rows left out, in the way that the size allows."""
    n, c = problem.Y.shape
    if c * n * plan.size**2 <= LEAVE_ONE_OUT_FLOPS:
        return by_leaving_one_out(problem, factors, generator=generator, callback=callback)
    n_out = min(MAX_HELD_OUT, max(1, n // 10))
    held_out = held_out_rows(class_codes(problem.Y), n_out, generator, classes=True)
    return by_held_out_rows(
        problem,
        torch.from_numpy(np.flatnonzero(held_out)).to(problem.X.device),
        factors,
        covariance=plan.covariance,
        n_dense_columns=options.n_dense_columns,
        kernel=kernel if plan.basis == "inducing" and options.augment else None,
        generator=generator,
        callback=callback,
    )
