r"""Quadruply stochastic Gaussian processes.

T. W. Evans and P. B. Nair, "Quadruply stochastic Gaussian processes", arXiv:2006.03015, 2020.

The model is :math:`f(x) = \phi(x)^T w`, :math:`w \sim N(0, S^{-1})`, with
:math:`\phi(x)^T S^{-1} \phi(x') \approx k(x, x')`; its posterior is approximated by
:math:`q(w) = N(\mu, C C^T)`, which maximises the ELBO

.. math:: \sum_\ell E_q[\log p(y_\ell \mid f(x_\ell))] - KL(q \,\|\, p(w)).  \qquad (1), (2), (4)

=======================================  =========================================================
paper                                    code
=======================================  =========================================================
:math:`n, d, m`                          observations, columns, ``plan.size`` basis functions
:math:`\tilde n, \tilde m, \bar n`       ``batch_size``, ``basis_batch_size``, ``n_support``
:math:`\Phi, S`                          ``basis``, whitened so that S = I but for Theorems 1 to 3
:math:`\mu, C`                           ``WeightGaussian.mean``, its ``columns`` and ``tail_std``
diagonal, chevron, full C (section 2.2)  ``plan.covariance``; "samples" are pathwise draws
:math:`\sigma^2`, b (appendix H.2)       ``noise``, ``likelihood_scale``
g, classes (section 3)                   ``likelihood``; one-vs-rest columns of y, the paper has two
Theorems 1, 2 and eq. (3); Theorem 3     :mod:`skgp.learning.stochastic`; ``solver="sgd"``
=======================================  =========================================================

Where an iteration may look at all observations, other solvers reach the same optimum in a fraction
of the time, and are the default (:mod:`skgp.learning.routes`). Laplace noise is fitted by natural
gradients, hyper-parameters are learned before the weights; more in
``doc/methods/paper_code_qsgp.rst``.

Errata: eq. (5), Theorem 3 and appendix H print the variance of the projection where its square root
belongs; appendix F.1 scales the gradient of a control variate by
:math:`m / |\tilde i \cup \tilde j|`, unbiased only if all sampling units have one size.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skgp.blocks import Blocks, MappedBlocks
from skgp.inference import pathwise
from skgp.inference.exact import CovarianceChoice, fit_dense, fit_iterative
from skgp.inference.laplace import ClassRows, fit_newton_sums, laplace_covariance, log_evidence
from skgp.inference.newton import fit_newton
from skgp.inference.newton_steps import Modes
from skgp.inference.relevance.evidence import (
    choose_candidates,
    fit_relevance,
    fit_relevance_classifier,
)
from skgp.inference.relevance.stochastic import fit_relevance_stochastic, polish
from skgp.inference.stochastic.engine import SGDOptions
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.gram import (
    StreamingGram,
    gram_statistics,
    hessian_covariance,
    statistics_posterior,
)
from skgp.inference.weights.posterior import AugmentedPosterior, ClassifierPosterior
from skgp.inference.weights.robust import fit_robust
from skgp.inference.weights.solvers import gauss_seidel, weights_cg
from skgp.kernels.gram import gram_diag
from skgp.learning import defaults, routes
from skgp.learning.amplitude import AmplitudeProblem, choose_amplitude
from skgp.learning.plan import (
    Fit,
    Options,
    Plan,
    Problem,
    check_memory,
    streaming_plan,
    training_design,
    unit_prior_basis,
)
from skgp.learning.routes import local_posterior
from skgp.learning.stochastic import SomeRows, fit_stochastic, fit_stochastic_classifier
from skgp.linalg import NumericalWarning, warn_caller
from skgp.optim.stopping import StopRecorder

Settings = dict[str, Any]


# ---- regression (section 2) -------------------------------------------------------------------


def fit_regression(p: Problem, asked: Plan, *, state: Any = None) -> Fit:
    """Fit the posterior of f by the route that a plan names, or that is best.

    `state` is that of an earlier stochastic fit to go on from, with the same ``options.seed``.
    """
    data, n = p.data, len(p.data)
    plan = routes.resolve(asked, n, p.kernel)
    if plan.solver == "sgd":  # Theorems 1 and 2
        return fit_stochastic(p, plan, state)
    open_choice = asked.basis == "auto" and asked.solver == "auto" and asked.n_basis is None
    if n > defaults.FACTOR_ROWS and open_choice:
        fit = routes.fit_low_rank(p, asked, fit_weights)
        if fit is not None:
            return fit
        weights = routes.in_weight_space(plan, asked, n, p.kernel)
        if weights is not None and asked.covariance in ("auto", "full"):
            plan = routes.compare_routes(p, weights, fit_weights)
            plan = routes.with_covariance(plan, "auto", n)
    check_memory(plan, n)
    if plan.space(n) == "local":
        return Fit(local_posterior(p.kernel, data, p.noise, plan.size), plan, p.kernel, p.noise)
    return fit_exact(p, plan) if plan.space(n) == "function" else fit_weights(p, plan)


def fit_exact(p: Problem, plan: Plan) -> Fit:
    r"""Appendix I.2, m = n: :math:`(K + \sigma^2 I) \mu = y`, by Cholesky or CG."""
    o, data, n = p.options, p.data, len(p.data)
    wanted = CovarianceChoice(plan.covariance, o.augment, o.n_dense_columns, None, o.n_samples)
    if plan.covariance == "samples":
        size = o.n_prior_features, defaults.FALL_BACK_POINTS
        controls: Settings = {"seed": o.seed + 1, "generator": p.generator}
        prior = pathwise.prior_features(p.kernel, data.X, *size, **controls)
        wanted = replace(wanted, prior=prior)
    if plan.solver == "cholesky":
        posterior = fit_dense(p.kernel, data, p.noise, wanted, generator=p.generator)
    else:
        kind = plan.covariance if plan.covariance == "samples" else "diagonal"
        # Half the draws: each is one more right-hand side of every iteration.
        wanted = replace(wanted, kind=kind, n_samples=(o.n_samples + 1) // 2)
        recorder = StopRecorder(p.callback)
        ill = float(gram_diag(p.kernel, data.X).sum()) / p.noise > defaults.ILL_CONDITIONED
        posterior = fit_iterative(
            p.kernel,
            data,
            p.noise,
            wanted,
            rank=min(n // 2, o.preconditioner_rank if ill else 3 * o.preconditioner_rank // 8),
            dtype=routes.stored_dtype(n, o.dtype),
            generator=p.generator,
            callback=recorder,
            **o.limits(tol=p.residual_tolerance, max_iter=200),
        )
        if not (recorder.stopped or posterior.residual < defaults.FALL_BACK_RESIDUAL):
            return _fall_back(p, plan, posterior.residual)
        if not (recorder.stopped or posterior.converged):
            warn_caller(
                f"Conjugate gradients stopped after {posterior.n_iter} iterations at a relative "
                f"residual of {posterior.residual:.1e}. Raise max_iter or tol.",
                NumericalWarning,
            )
    evidence = posterior.log_marginal_likelihood
    if evidence is not None:  # of distinct inputs; the scatter within them contributes
        evidence += float(data.log_power(data.X.new_tensor(p.noise)).sum())
    return Fit(
        posterior,
        plan,
        p.kernel,
        p.noise,
        data.pooled(posterior.calibration, p.noise),
        n_iter=posterior.n_iter,
        residual=posterior.residual,
        log_marginal_likelihood=evidence,
        history=posterior.history,
    )


def _fall_back(p: Problem, plan: Plan, residual: float) -> Fit:
    """Inducing points at the pivots of K and an exact factorisation, which cannot diverge."""
    m = min(len(p.data), defaults.FALL_BACK_POINTS)
    reason = (
        f"conjugate gradients ended at a relative residual of {residual:.1e}; "
        f"{m} inducing points and a Cholesky factorisation replace them"
    )
    advice = ". A larger noise variance, or a bound on the WhiteKernel's noise_level, improves "
    message = reason[0].upper() + reason[1:] + advice + "the conditioning."
    warn_caller(message, NumericalWarning)
    reduced = replace(plan, n_basis=m, solver="cholesky", reason=reason)
    return fit_weights(p, routes.with_covariance(reduced, "auto", len(p.data)))


def fit_weights(p: Problem, plan: Plan, pivots: Tensor | None = None) -> Fit:
    r"""m functions of unit prior: :math:`(\Phi^T \Phi + \sigma^2 I) \mu = \Phi^T y`.

    Inducing points stand at the pivots of K; with those of a factor of low rank the noise is kept.
    """
    o, data, low_rank = p.options, p.data, pivots is not None
    if pivots is None and plan.basis == "inducing":
        pivots = pathwise.pivots_of(p.kernel, data.X, plan.size, generator=p.generator)
    Z = None if pivots is None else data.X[pivots]
    basis = unit_prior_basis(p.kernel, data.X, plan, o, Z, near=True)
    if plan.solver == "cholesky":
        statistics = StreamingGram(basis, dtype=o.dtype, targets=tuple(data.y.shape[1:]))
        statistics.update(data.X, data.y, data.weight)
        if data.scatter is not None:
            statistics.sum_square += float(data.scatter.sum())
        return fit_statistics(p, plan, statistics, refit=o.refit_noise and not low_rank)
    design = StreamedDesign(basis, data.X, sample_weight=data.weight)

    def solve(targets: Tensor) -> Any:
        if plan.solver == "cg":
            limits = o.limits(tol=1e-3, max_iter=200)
            return weights_cg(design, targets, p.noise, **limits, **p.controls)
        limits = o.limits(tol=1e-2, max_iter=10)
        return gauss_seidel(design, targets, p.noise, **limits, **p.controls)

    draws: Settings = {"n_samples": min(o.n_samples, 31), "generator": p.generator}
    posterior, result, misfit = pathwise.pathwise_posterior(design, data.y, p.noise, solve, **draws)
    # Misfits are noise times (K + noise I)^-1 targets: a factor that cancels.
    z2 = pathwise.leave_one_out_z2(misfit[:, : data.n_targets], misfit[:, data.n_targets :])
    z2 = data.pooled(z2, p.noise)
    solved: Settings = {"n_iter": max(1, result.n_iter), "residual": float(result.residual.max())}
    return Fit(_augmented(posterior, plan, o), plan, p.kernel, p.noise, z2, **solved)


def fit_statistics(p: Problem, plan: Plan, statistics: StreamingGram, *, refit: bool) -> Fit:
    """Posterior from the sums over all observations seen, the noise refitted on request."""
    statistics = statistics.counting_weights()
    structure = plan.covariance, p.options.n_dense_columns, p.options.n_samples
    posterior, noise, evidence = statistics_posterior(
        statistics, p.noise, *structure, refit=refit, generator=p.generator
    )
    sums: Settings = {"log_marginal_likelihood": evidence, "statistics": statistics}
    return Fit(_augmented(posterior, plan, p.options), plan, p.kernel, noise, **sums)


def fit_blocks(p: Problem, asked: Plan, blocks: Blocks, *, shift: float, scale: float) -> Fit:
    """Weights from sums over all blocks, `p.data` being some of their observations at random.

    Targets y of the blocks are as given; those of `p.data` are ``(y - shift) / scale``.
    """
    o, X, n = p.options, p.data.X, len(blocks)
    plan, Z = replace(streaming_plan(asked, len(X), p.kernel), reason="rows in blocks"), None
    if plan.basis == "inducing":
        Z = X[pathwise.pivoted_factor(p.kernel, X, plan.size, generator=p.generator).pivots]
    elif asked.n_basis is None:
        plan = replace(plan, n_basis=routes.affordable_features(n))
    plan = routes.with_covariance(plan, asked.covariance, n)
    basis = unit_prior_basis(p.kernel, X, plan, o, Z, near=True)
    settings: Settings = {"dtype": o.dtype, "shift": shift, "device": X.device}
    found = blocks.sum(partial(gram_statistics, basis=basis, **settings), p.callback)
    fit = fit_statistics(p, plan, found.standardised(shift, scale), refit=o.refit_noise)
    return replace(fit, statistics=found)


def fit_laplace(
    p: Problem, plan: Plan, *, scale: float | None = None, Z: Tensor | None = None
) -> Fit:
    """Appendix H.2: Laplace noise of scale b, which starts from `scale` or a guess.

    `Z` (m, d) are distinct inducing points. Where ``options.refit_noise`` is False the noise,
    2 b^2, is kept. Many features are in float32 where that costs no accuracy; sums, factors and
    predictions are in float64.
    """
    o, data = p.options, p.data
    if plan.basis == "inducing" and Z is not None:
        plan = replace(plan, n_basis=len(Z))
    check_memory(replace(plan, basis="fourier"), len(data))
    basis = unit_prior_basis(p.kernel, data.X, plan, o, Z, near=True)
    recorder, limits = StopRecorder(p.callback), o.limits(tol=1e-4, max_iter=50)
    fit = fit_robust(
        training_design(basis, data.X, "laplace", o),
        data.y,
        scale=scale if o.refit_noise else (p.noise / 2) ** 0.5,
        sample_weight=data.weight,
        learn_scale=o.refit_noise,
        callback=recorder,
        **limits,
    )
    if not (fit.converged or recorder.stopped):
        passes = f"max_iter={limits['max_iter']} passes over the data"
        message = f"The bound still rose after {passes}. Raise max_iter or tol."
        warn_caller(message, NumericalWarning)
    fit.posterior.basis = basis  # predictions are in float64
    return Fit(
        _augmented(fit.posterior, plan, o),
        plan,
        p.kernel,
        2 * fit.scale**2 if o.refit_noise else p.noise,
        n_iter=max(1, fit.n_iter),
        likelihood_scale=fit.scale,
        elbo=fit.elbo,
        history=[-bound / data.total for bound in fit.history],
    )


def fit_relevance_vectors(p: Problem, plan: Plan) -> Fit:
    """Appendix I.3: relevance vectors, their weights and the noise, of `data` not merged.

    The amplitude of the kernel is without effect, and the noise too unless it is to be kept: the
    evidence of a sparse model has its own maximum. Of classes, one-vs-rest, it is Laplace's.
    """
    o, data, learn, sgd = p.options, p.data, p.options.refit_noise, plan.solver == "sgd"
    kernel, X, y = p.kernel, data.X, data.y
    rows = choose_candidates(len(data), plan.n_basis, p.generator)
    common: Settings = {"candidates": rows, "callback": p.callback}
    noise: Settings = {"noise_variance": None if learn else p.noise, "learn_noise": learn}
    if p.likelihood is not None:
        common |= {"offset": p.offset, "row_weight": data.weight}
        common |= o.limits(tol=1e-2, max_iter=500)
        fit = fit_relevance_classifier(kernel, X, y, p.likelihood, **common)
    elif sgd:
        max_iter = 1_000 if o.max_iter is None else o.max_iter
        sizes = SGDOptions(o.batch_size, o.basis_batch_size, o.learning_rate, max_iter=max_iter)
        common |= noise | {"n_support": o.n_support, "generator": p.generator}
        rough = fit_relevance_stochastic(kernel, X, y, sizes, **common)
        fit = polish(rough, kernel, X, y, learn_noise=learn)
    else:
        common |= noise | o.limits(tol=1e-3, max_iter=10_000)
        fit = fit_relevance(kernel, X, y, sample_weight=data.weight, **common)
    return Fit(
        fit.posterior,
        replace(plan, n_basis=len(fit.indices)),
        p.kernel,
        fit.noise_variance,
        moderation=1.0,
        n_iter=max(1, fit.n_iter),
        log_marginal_likelihood=None if math.isnan(fit.log_evidence) else fit.log_evidence,
        relevance=fit.indices,
        history=fit.history if sgd else [-evidence for evidence in fit.history],
    )


# ---- classification (section 3): P(y_j = 1) = g(f_j), f_j(x) = o_j + w_j' phi(x) ---------------


def fit_classifier(
    p: Problem,
    plan: Plan,
    *,
    Z: Tensor | None = None,
    state: Any = None,
    rows: SomeRows | None = None,
    blocks: MappedBlocks | None = None,
) -> Fit:
    """Fit the latent functions; `Z` (m, d) inducing points, `state` to go on from.

    With `rows` minibatches are read from them, with `blocks` these are passed over, y (n, c); and
    `p.data` are some of them.
    """
    if plan.basis == "inducing":
        Z = p.data.X if Z is None else Z
        plan = replace(plan, n_basis=len(Z))  # equal inputs make one inducing point
    if plan.basis == "relevance":
        return fit_relevance_vectors(p, plan)
    if plan.solver == "newton":
        return fit_modes(p, plan, Z, blocks)
    if p.data.weight is not None:
        raise ValueError(
            "sample_weight and class_weight are not supported by solver='sgd'; use solver='newton'."
        )
    return fit_stochastic_classifier(p, plan, Z=Z, state=state, rows=rows)  # Theorem 3


def fit_modes(p: Problem, plan: Plan, Z: Tensor | None, blocks: MappedBlocks | None = None) -> Fit:
    """Laplace approximation, the amplitude by held-out data, which enter the last fit.

    The paper has stochastic gradients only. They reach in ten minutes what Newton's method passes
    in one: a pass over all observations costs less than the thousands of iterations it replaces.
    With `blocks` the modes are those of all their observations, of which `p.data` are some.
    """
    o, X, Y = p.options, p.data.X, p.data.y
    check_memory(plan, len(Y), Y.shape[1])
    weight = torch.ones_like(Y[:, 0]) if p.data.weight is None else p.data.weight
    basis = unit_prior_basis(p.kernel, X, plan, o, Z)
    design = training_design(basis, X, "newton", o)
    recorder = StopRecorder(p.callback)
    problem = AmplitudeProblem(design, X, Y, p.likelihood, p.offset, weight)
    controls: Settings = {"generator": p.generator, "callback": recorder}
    choice = choose_amplitude(p.kernel, problem, plan, o, **controls)
    limits = o.limits(tol=1e-4, max_iter=30) | ({"max_iter": 1} if recorder.stopped else {})
    a, told = choice.prior_variance, None if recorder.stopped else recorder
    structure: Settings = {"kind": plan.covariance, "n_dense_columns": o.n_dense_columns}
    found: Settings = {"start": choice.weights, "callback": told, **limits}
    fit: Modes
    if blocks is None:
        fit = whole = fit_newton(problem.at(a), generator=p.generator, **found)
        curvature = problem.at(a).curvature(whole.latent)
        q = laplace_covariance(design, curvature, prior_variance=a, **structure)
    else:
        rows = ClassRows(basis, p.likelihood, p.offset)
        fit = sums = fit_newton_sums(blocks, rows, prior_variance=a, **found)
        q = hessian_covariance(sums.hessian, torch.full_like(fit.loss, 1 / a), **structure)
    is_full = plan.covariance == "full"
    evidence = float(log_evidence(fit, q, prior_variance=a).sum()) if is_full else None
    return Fit(
        _augmented(ClassifierPosterior(basis, fit.weights, p.offset, q), plan, o, a),
        plan,
        p.kernel,
        amplitude=a,
        moderation=choice.moderation,
        n_iter=max(1, fit.n_iter),
        history=[info["loss"] for info in fit.history],
        scores={"amplitude": choice.amplitude_scores, "moderation": choice.moderation_scores},
        log_marginal_likelihood=evidence,
    )


def _augmented(posterior: Any, plan: Plan, options: Options, amplitude: float = 1.0) -> Any:
    """Appendix G: inducing points, with a basis function added at each test input."""
    if plan.basis == "inducing" and options.augment:
        return AugmentedPosterior(posterior, amplitude)
    return posterior
