"""QSGP regression with Laplace noise: from a plan to a posterior over f."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.weights.design import Basis, WhitenedInducingBasis
from skgp.inference.weights.robust import fit_robust
from skgp.kernels.distances import origin
from skgp.kernels.spectral import FourierFeatures
from skgp.linalg.exceptions import NumericalWarning
from skgp.models.qsgp.plan import Plan
from skgp.models.qsgp.results import AugmentedPosterior, Fit, Options, Posterior
from skgp.optim.stopping import StopRecorder

Callback = Callable[[int, dict], bool | None]

_MANY_FEATURES = 10_000_000  # n m from which on float32 is worth its roundings
_JUDGED_ROWS = 64  # by which float32 is judged
_FEATURES_KEPT = 2**30  # bytes
_MAX_ITER, _TOL = 50, 1e-4


def fit_laplace(
    kernel,
    data: Data,
    noise: float,
    scale: float | None,
    plan: Plan,
    options: Options,
    *,
    Z: Tensor | None = None,
    callback: Callback | None = None,
) -> Fit:
    """Fit the posterior of f, and b, for fixed hyper-parameters.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    data : Data
        Of :func:`~skgp.data.distinct_observations`.
    noise : float
        :math:`2 b^2`, kept where ``options.refit_noise`` is False, else without effect.
    scale : float or None
        b to start from where it is learned; None for a guess.
    plan : Plan
        Of :func:`~skgp.models.qsgp.plan.resolve_laplace`.
    options : Options
    Z : Tensor of shape (m, d), optional
        Distinct inducing points; needed unless the plan asks for Fourier features.
    callback : callable, optional

    Returns
    -------
    Fit
        Its `noise` is :math:`2 b^2`.

    Warns
    -----
    NumericalWarning
        If ``options.max_iter`` is reached first.

    Notes
    -----
    See :func:`.robust.fit_robust`. Beyond n m = 1e7 features are in float32 where
    that costs no accuracy; sums, factors and predictions are in float64.
    """
    basis: Basis
    if plan.basis == "fourier":
        zero = origin(data.X)[0]
        basis = FourierFeatures(
            kernel,
            plan.size,
            len(zero),
            kind=options.feature_map,
            seed=options.seed,
            origin=zero,
        )
    elif Z is None:
        raise ValueError("Z, the inducing points, is needed for basis='inducing'.")
    else:
        basis = WhitenedInducingBasis(kernel, Z)
        plan = replace(plan, n_basis=len(Z))
    single = options.dtype == torch.float32 or len(data.y) * plan.size > _MANY_FEATURES
    recorder = StopRecorder(callback)
    max_iter = _MAX_ITER if options.max_iter is None else options.max_iter
    fit = fit_robust(
        _in_single(basis, data.X) if single else basis,
        data.X,
        data.y,
        scale=scale if options.refit_noise else (noise / 2) ** 0.5,
        sample_weight=data.weight,
        learn_scale=options.refit_noise,
        tol=_TOL if options.tol is None else options.tol,
        max_iter=max_iter,
        dtype=torch.float32 if single else torch.float64,
        memory_budget=_FEATURES_KEPT,
        callback=recorder,
    )
    if not (fit.converged or recorder.stopped):
        warnings.warn(
            f"The bound still rose after max_iter={max_iter} passes over the data. Raise max_iter "
            "or tol.",
            NumericalWarning,
            stacklevel=3,
        )
    fit.posterior.basis = basis  # predictions are in float64
    augmented = plan.basis == "inducing" and options.augment
    posterior: Posterior = AugmentedPosterior(fit.posterior) if augmented else fit.posterior
    total = float(len(data.y) if data.weight is None else data.weight.sum())
    return Fit(
        posterior,
        plan,
        kernel,
        2 * fit.scale**2 if options.refit_noise else noise,
        n_iter=max(1, fit.n_iter),
        likelihood_scale=fit.scale,
        elbo=fit.elbo,
        history=[-bound / total for bound in fit.history],
    )


def _in_single(basis: Basis, X: Tensor) -> Basis:
    """The basis for float32 rows; Fourier features suit them as they are."""
    if isinstance(basis, WhitenedInducingBasis):
        return basis.in_single_precision(X[:: -(-len(X) // _JUDGED_ROWS)])
    return basis
