r"""A dense Gaussian process: an inducing point at every distinct input, and Gaussian noise.

With Z at all inputs nothing is approximated. The evidence bound is the log marginal likelihood, its
hyper-parameters are found as for every dense process (:mod:`skgp.learning.search`), and
the posterior is that of Bayes' rule (Rasmussen and Williams, eqs. 2.25-2.26), where u are the
observations themselves: :math:`K + \sigma^2 W^{-1} = L L^T` needs no jitter, which next to little
noise would count. "log_loss" has nothing to correct: what it
gains over the bound is that variances adapt to where a sparse posterior errs [1]_.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.data import Data, merge_replicates
from skgp.inference.sparse.collapsed import posterior_from_precision
from skgp.inference.sparse.sparse import (
    SparsePosterior,
    SparseState,
    inducing_factor,
    whitened_features,
)
from skgp.kernels.expression import WhiteKernel
from skgp.kernels.gram import split_noise
from skgp.learning.search import SearchSettings, fit_hyperparameters
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.training import Training
from skgp.likelihoods import Likelihood
from skgp.linalg.cholesky import tri_solve
from skgp.optim.stopping import StopRecorder

__all__ = ["dense_posterior", "dense_start", "is_conjugate", "of_bayes_rule", "sparse_posterior"]


def is_conjugate(objective: Objective) -> bool:
    """Whether the posterior of a dense process is known in closed form, at least up to beta."""
    if not objective.family.is_gaussian:
        return False
    by_bayes = objective.name == "log_loss" and objective.beta == 1.0 and not objective.stochastic
    return by_bayes or objective.name in ("elbo", "fitc", "square_loss")


def of_bayes_rule(objective: Objective) -> Objective:
    """The objective whose optimum is the posterior of a dense process.

    Hyper-parameters stay where :func:`dense_start` chose them, unless another objective moves them.
    """
    if objective.beta != 1.0 or objective.name == "square_loss":
        return objective
    return replace(
        objective, name="elbo", learn_kernel=False, learn_likelihood=False, learn_inducing=False
    )


def dense_start(
    kernels: list,
    data: Data,
    objective: Objective,
    inducing: Callable[..., Tensor],
    offset: Tensor,
    generator: torch.Generator,
    recorder: StopRecorder,
    *,
    max_iter: int,
    start: SparseState | None = None,
) -> Training:
    """Hyper-parameters of the greatest evidence, and an inducing point at every distinct input.

    Parameters
    ----------
    kernels, data, objective, inducing, offset, generator
        As for :func:`~skgp.models.dlm.fit.fit_sparse`; Gaussian noise.
    recorder : StopRecorder
        Hears of every iteration, and says when to stop.
    max_iter : int
        Most iterations of the search for each kernel.
    start : SparseState, optional
        Whose hyper-parameters the search begins with.

    Returns
    -------
    Training
        Of the prior, in float64; the posterior is in closed form. O(n^3) an iteration.
    """
    data, family = data.to(torch.float64), objective.family
    noise = family.initial(data.X) if start is None else start.likelihood.double()
    if start is not None:
        kernels = [start.kernel]
    kernel, history = kernels[0], list[float]()
    search = SearchSettings()
    if objective.learn_kernel:
        white = _white(family, noise)
        found = fit_hyperparameters(
            [kernel + white for kernel in kernels],
            _merged(data),
            generator=generator,
            settings=replace(search, dense_max_iter=min(max_iter, search.dense_max_iter)),
            callback=recorder,
        )
        kernel, learned = split_noise(found.kernel)
        noise = noise.new_tensor([learned.noise_level if learned else 0.0]).log()
        history = [-value for value in found.history]
    state = SparseState.prior(kernel, noise, inducing(kernel).double(), offset.double())
    return Training(state, history[-1] if history else 0.0, history, stopped=recorder.stopped)


@torch.no_grad()
def dense_posterior(
    state: SparseState, data: Data, objective: Objective
) -> tuple[SparsePosterior, float]:
    """The posterior of Gaussian noise for the hyper-parameters of a state, and the log evidence.

    Parameters
    ----------
    state : SparseState
    data : Data
        Float64.
    objective : Objective

    Returns
    -------
    posterior : SparsePosterior
        Of an inducing point at every distinct input.
    evidence : float
        In nats; O(n^3).
    """
    rows, noise = _merged(data), objective.family.gaussian_noise(state.likelihood)
    row_noise = rows.row_noise(noise)
    L = inducing_factor(state.kernel, rows.X, jitter=0.0, noise=row_noise)
    mean = tri_solve(L, (rows.y - state.offset)[:, None], upper=False)
    evidence = -0.5 * (mean.square().sum() + len(mean) * math.log(2 * math.pi))
    evidence = evidence - L.diagonal().log().sum() + rows.log_power(noise).sum()
    known = mean.new_zeros(1, len(mean), 0)
    posterior = SparsePosterior(state.kernel, rows.X, mean, known, state.offset, row_noise)
    return posterior, float(evidence)


def sparse_posterior(dense: SparsePosterior) -> tuple[Tensor, Tensor]:
    """Mean (M, 1) and root (1, M, M) of f at the inputs, whitened, for what comes later; O(M^3)."""
    assert dense.noise is not None
    L = inducing_factor(dense.kernel, dense.Z)
    Phi = whitened_features(dense.kernel, dense.Z, dense.Z, L) / dense.noise.sqrt()
    observed = dense.factor @ dense.whitened_mean / dense.noise.sqrt()[:, None]
    precision = torch.eye(len(L), dtype=L.dtype) + Phi @ Phi.mT
    return posterior_from_precision(precision, Phi @ observed)


def _merged(data: Data) -> Data:
    X, y = data.X.cpu().numpy(), data.y[:, 0].cpu().numpy()
    weight = None if data.weight is None else data.weight.cpu().numpy()
    return merge_replicates(X, y, weight, data.X.device)


def _white(family: Likelihood, noise: Tensor) -> WhiteKernel:
    low, high = (float(end.exp()) for end in family.box(noise))
    return WhiteKernel(float(noise.exp()), (low, high) if low < high else "fixed")
