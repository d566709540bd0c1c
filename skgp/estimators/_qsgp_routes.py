"""What `QSGPRegressor` hands to the models: data and search for each likelihood and basis.

==================  ========================================  =================================
route               rows of the data                          model
==================  ========================================  =================================
Gaussian            of equal inputs merged                    :mod:`skgp.models.qsgp.regression`
Gaussian, "sgd"     as they are, a memory map unread          the same
Laplace             of equal inputs and targets merged        ``robust_regression``
relevance vectors   as they are: ``relevance_`` counts them   ``relevance_regression``
==================  ========================================  =================================
"""

from dataclasses import replace

import numpy as np
import torch

from skgp.data import Data, distinct_observations, merge_replicates
from skgp.estimators._backend import to_tensor
from skgp.estimators._inducing import cluster_centres
from skgp.inference.stochastic.state import SGDState
from skgp.kernels.gram import split_noise
from skgp.learning.robust import robust_hyperparameters
from skgp.learning.search import HyperparameterFit, fit_hyperparameters
from skgp.models.qsgp.plan import Plan, resolve_laplace
from skgp.models.qsgp.regression import fit_regression
from skgp.models.qsgp.relevance import (
    fit_relevance_vectors,
    shorten_length_scales,
)
from skgp.models.qsgp.results import Fit, Options
from skgp.models.qsgp.robust import fit_laplace
from skgp.optim.stopping import StopRecorder

_CPU = torch.device("cpu")
_RELEVANCE_ROWS = 500  # whose marginal likelihood gives relevance vectors their first kernel


def to_tensors(X, y, sample_weight, device):
    """Return float64 tensors on `device`; None stays None."""
    return tuple(
        None if a is None else to_tensor(a, dtype=torch.float64, device=device)
        for a in (X, y, sample_weight)
    )


def search_data(X, z, sample_weight, likelihood: str, solver: str, device) -> Data:
    """Tensors of the rows that the search for hyper-parameters sees.

    Raises
    ------
    ValueError
        If there are weights, which "sgd" does not take.
    """
    if solver == "sgd":
        if sample_weight is not None:
            raise ValueError(
                "sample_weight is not supported by solver='sgd'; use solver='cholesky' or 'cg', "
                "or 'auto'."
            )
        return Data(*to_tensors(X, z, None, _CPU)[:2])
    if likelihood == "laplace":
        return distinct_observations(X, z, sample_weight, device)
    return merge_replicates(X, z, sample_weight, device)


def search(
    kernels, data: Data, basis: str, likelihood: str, rows: Data, generator, callback
) -> tuple[HyperparameterFit, float | None]:
    """Learn hyper-parameters; for Laplace noise also return where its scale may start.

    `rows` are those that relevance vectors are found among; `data` serves everything else.
    """
    if likelihood == "laplace":
        found, scale = robust_hyperparameters(kernels, data, generator=generator, callback=callback)
        return found, scale or None  # 0 of constant targets
    recorder = StopRecorder(callback)
    if basis == "relevance" and len(data.y) > _RELEVANCE_ROWS:
        # A start is all that is needed: the evidence of the relevance vectors has the last word.
        data = data.take(torch.randperm(len(data.y), generator=generator)[:_RELEVANCE_ROWS])
    found = fit_hyperparameters(kernels, data, generator=generator, callback=recorder)
    if basis == "relevance" and not recorder.stopped:
        signal, white = split_noise(found.kernel)
        signal = shorten_length_scales(signal, rows, generator=generator, callback=callback)
        found = replace(found, kernel=signal + white)
    return found, None


def solve(
    signal,
    data: Data,
    noise: float,
    asked: Plan,
    options: Options,
    likelihood: str,
    *,
    scale: float | None,
    state: SGDState | None,
    generator: torch.Generator,
    callback,
) -> Fit:
    """Fit the posterior for fixed hyper-parameters, `signal` and `noise`."""
    if asked.basis == "relevance":
        return fit_relevance_vectors(
            signal, data, noise, asked, options, generator=generator, callback=callback
        )
    if likelihood == "laplace":
        plan = resolve_laplace(asked, len(data.y), signal)
        Z = _inducing_points(signal, data, plan, options.seed) if plan.basis == "inducing" else None
        return fit_laplace(signal, data, noise, scale, plan, options, Z=Z, callback=callback)
    return fit_regression(
        signal, data, noise, asked, options, state=state, generator=generator, callback=callback
    )


def _inducing_points(signal, data: Data, plan: Plan, seed: int) -> torch.Tensor:
    """All distinct rows, or as many centres of clusters as the plan says; shape (m, d)."""
    weight = None if data.weight is None else data.weight.cpu().numpy()
    rng = np.random.RandomState(seed)
    centres = cluster_centres(
        data.X.cpu().numpy(), plan.size, signal, sample_weight=weight, random_state=rng
    )
    return to_tensor(centres, device=data.X.device)


def kept_rows(sample_weight, n: int) -> np.ndarray:
    """Rows given to fit whose weight is not 0, increasing; n of them."""
    weights = None if sample_weight is None else np.asarray(sample_weight)
    if weights is None or weights.ndim == 0:
        return np.arange(n)
    return np.flatnonzero(weights > 0)
