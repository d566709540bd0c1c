r"""A dense Gaussian process: an inducing point at every distinct input, and Gaussian noise.

With Z at all inputs nothing is approximated. The evidence bound is the log marginal likelihood, its
hyper-parameters are found as for every dense process (:mod:`skgp.models.hyperparameters`), and
q(u) is the posterior of Bayes' rule in closed form. "log_loss" has nothing to correct: what it
gains over the bound is that variances adapt to where a sparse posterior errs [1]_.

References
----------
.. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from skgp.kernels.expression import WhiteKernel
from skgp.kernels.gram import split_noise
from skgp.models.dlm.data import SparseData, SparseState
from skgp.models.dlm.objective import Objective
from skgp.models.dlm.training import Training
from skgp.models.families import Family, GaussianFamily
from skgp.models.hyperparameters import SearchSettings, fit_hyperparameters
from skgp.models.replicates import merge_replicates
from skgp.training.stopping import StopRecorder

__all__ = ["dense_start", "is_conjugate", "of_bayes_rule"]


def is_conjugate(objective: Objective) -> bool:
    """Whether the posterior of a dense process is known in closed form, at least up to beta."""
    if not isinstance(objective.family, GaussianFamily):
        return False
    by_bayes = objective.name == "log_loss" and objective.beta == 1.0 and not objective.stochastic
    return by_bayes or objective.name in ("elbo", "fitc", "square_loss")


def of_bayes_rule(objective: Objective) -> Objective:
    """The objective whose optimum is the posterior of a dense process.

    Hyper-parameters stay where :func:`dense_start` chose them, unless another objective moves them.
    """
    if objective.beta != 1.0 or objective.name not in ("log_loss", "elbo"):
        return objective
    return replace(
        objective, name="elbo", learn_kernel=False, learn_likelihood=False, learn_inducing=False
    )


def dense_start(
    kernels: list,
    data: SparseData,
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
    data, family = data.double(), objective.family
    noise = family.initial(data.X) if start is None else start.likelihood.double()
    if start is not None:
        kernels = [start.kernel]
    kernel, history = kernels[0], list[float]()
    search = SearchSettings()
    if objective.learn_kernel:
        X, y = data.X.cpu().numpy(), data.y[:, 0].cpu().numpy()
        weight = None if data.weight is None else data.weight.cpu().numpy()
        white = _white(family, noise)
        found = fit_hyperparameters(
            [kernel + white for kernel in kernels],
            merge_replicates(X, y, weight, data.X.device),
            generator=generator,
            settings=replace(search, dense_max_iter=min(max_iter, search.dense_max_iter)),
            callback=recorder,
        )
        kernel, learned = split_noise(found.kernel)
        noise = noise.new_tensor([learned.noise_level if learned else 0.0]).log()
        history = [-value for value in found.history]
    state = SparseState.prior(kernel, noise, inducing(kernel).double(), offset.double())
    return Training(state, history[-1] if history else 0.0, history, stopped=recorder.stopped)


def _white(family: Family, noise: Tensor) -> WhiteKernel:
    low, high = (float(end.exp()) for end in family.box(noise))
    return WhiteKernel(float(noise.exp()), (low, high) if low < high else "fixed")
