r"""Hyper-parameters of few rows, by the evidence of a dense Gaussian process.

With an inducing point at every row the evidence bound is the evidence itself. While rows are not
many more than inducing points, it costs less to maximise the evidence of the dense process, a
function of some hyper-parameters alone, than the bound, whose q(u) has :math:`O(c M^2)` numbers:

================  ======================================================================
likelihood        evidence
================  ======================================================================
Gaussian          exact (:mod:`skgp.learning.evidence`)
labels, counts    Laplace's approximation (:mod:`skgp.learning.laplace_evidence`), summed over
                  the latent functions
================  ======================================================================

Few rows say little of many length scales, and their ratios overfit. On the logarithm of each ratio
to those of the kernel to begin with lies a normal prior, as in
:mod:`skgp.learning.classification_hyperparameters`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import WhiteKernel
from skgp.learning.evidence import ExactEvidence
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Likelihood
from skgp.optim.lbfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder

__all__ = ["EvidenceFit", "EvidenceSearch", "has_evidence"]

Callback = Callable[[int, dict], bool | None]
Evidence = Callable[[np.ndarray], tuple[float, np.ndarray]]  # and the gradient

_SCREEN_ROWS = 100  # on which several kernels are compared


def has_evidence(objective: Objective, kernels: list) -> bool:
    """Whether an `EvidenceSearch` finds the start of an objective: what it knows, and is free.

    With Gaussian noise it does not choose among kernels: rough ones, which explain noise as signal,
    seem the best for few rows.
    """
    family = objective.family
    if objective.name == "elbo" and objective.beta != 1.0:
        return False
    if family.is_gaussian:
        return objective.learn_kernel and objective.learn_likelihood and len(kernels) == 1
    newton = family.is_log_concave and family.is_smooth
    return objective.learn_kernel and newton and not family.free_parameters()


@dataclass(frozen=True)
class EvidenceFit:
    """Hyper-parameters and how likely they are.

    Attributes
    ----------
    kernel : sklearn kernel expression
    likelihood : Tensor of shape (p,)
        Free parameters of the likelihood, float64.
    loss : float
        Minus the log evidence and the log prior of the ratios, in nats an observation.
    history : list of float
        The same after each iteration.
    """

    kernel: Any
    likelihood: Tensor
    loss: float = math.inf
    history: list[float] = field(default_factory=list)


class EvidenceSearch:
    """Searches for the hyper-parameters of greatest evidence by L-BFGS.

    Parameters
    ----------
    family : Likelihood
        Known to `has_evidence`.
    offset : Tensor of shape (c,)
        Prior means of the latent functions; 0 for Gaussian noise.
    ratio_std : float or None
        Standard deviation of the log ratios of length scales a priori; None is without a prior.
    max_iter : int
        Iterations a search.
    tol : float
        Relative fall of the loss in an iteration below which to stop.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops.
    """

    def __init__(
        self,
        family: Likelihood,
        offset: Tensor,
        *,
        ratio_std: float | None = None,
        max_iter: int = 50,
        tol: float = 1e-5,
        callback: Callback | None = None,
    ) -> None:
        self.family, self.offset, self.ratio_std = family, offset.double(), ratio_std
        self.max_iter, self.tol = max_iter, tol
        self.recorder = StopRecorder(callback)

    def choose(self, kernels: list, data: Data, generator: torch.Generator) -> EvidenceFit:
        """The best of some kernels.

        Each is fitted to at most 100 rows, from where the last one ended, and the best to all.

        Parameters
        ----------
        kernels : list of sklearn kernel expressions without noise
        data : Data
        generator : torch.Generator

        Returns
        -------
        EvidenceFit
        """
        likelihood = self.family.initial(data.X.double())
        last = best = EvidenceFit(kernels[0], likelihood)
        centre = kernels[0]
        if len(kernels) > 1:
            few = data.some(_SCREEN_ROWS, generator)
            for kernel in kernels:
                last = self.fit(replace(last, kernel=_beginning(kernel, last.kernel)), few, kernel)
                if last.loss < best.loss:
                    best, centre = last, kernel
                if self.recorder.stopped:
                    return best
        found = self.fit(best, data, centre)
        return replace(found, history=best.history + found.history)

    def fit(self, start: EvidenceFit, data: Data, centre) -> EvidenceFit:
        """Search from `start`, ratios drawn towards those of the kernel `centre`."""
        gaussian = self.family.is_gaussian
        whole = start.kernel + self._noise(start.likelihood) if gaussian else start.kernel
        theta = torch.as_tensor(whole.theta)
        if len(theta) == 0:
            return start
        evidence = self._gaussian(whole, data) if gaussian else self._laplace(whole, data)
        prior = self._log_prior(centre)

        def loss(parts: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
            at = parts["theta"].detach().numpy()
            (value, slope), (of_prior, slope_of_prior) = evidence(at), prior(at)
            gradient = torch.as_tensor(slope + slope_of_prior) / -data.total
            return -(value + of_prior) / data.total, {"theta": gradient}

        low, high = torch.as_tensor(whole.bounds).to(theta).T
        found = minimize_lbfgs(
            loss,
            {"theta": theta},
            max_iter=self.max_iter,
            tol=self.tol,
            bounds={"theta": (low, high)},
            callback=lambda i, info: self.recorder(i, {"loss": info["loss"]}),
        )
        whole = whole.clone_with_theta(found.parameters["theta"].numpy())
        if not gaussian:
            return EvidenceFit(whole, start.likelihood, found.loss, found.history)
        noise = start.likelihood.new_tensor([whole.k2.noise_level]).log()
        return EvidenceFit(whole.k1, noise, found.loss, found.history)

    def _noise(self, likelihood: Tensor) -> WhiteKernel:
        low, high = (float(end.exp()) for end in self.family.box(likelihood))
        level = float(likelihood.exp())
        return WhiteKernel(level, (low, high) if low < high else "fixed")

    def _gaussian(self, whole, data: Data) -> Evidence:
        """Log evidence of a kernel with noise; O(n^3)."""
        weight = None if data.weight is None else data.weight.double()
        scatter = None if weight is None else torch.zeros_like(weight)
        rows = Data(data.X.double(), data.y[:, 0].double(), weight, scatter)
        exact = ExactEvidence(whole, rows)
        return lambda theta: exact(theta)[:2]

    def _laplace(self, kernel, data: Data) -> Evidence:
        """Log evidence of the latent functions; O(c n^3)."""
        X, weight = data.X.double(), None if data.weight is None else data.weight.double()
        exposure = None if data.offset is None else data.offset[:, 0].double()
        likelihood = self.family.with_parameters(self.offset[:0]).at(exposure)
        y, offset = data.y.double(), self.offset
        laplace = LaplaceEvidence(
            kernel, X, y, likelihood=likelihood, offset=offset, row_weight=weight
        )

        def summed(theta: np.ndarray) -> tuple[float, np.ndarray]:
            values, gradient = laplace(theta)
            return float(values.sum()), gradient

        return summed

    def _log_prior(self, centre) -> Evidence:
        """Of the ratios in a vector of length scales to those of `centre`, up to a constant."""
        start, vectors = centre.theta, _vectors(centre) if self.ratio_std is not None else []

        def log_prior(theta: np.ndarray) -> tuple[float, np.ndarray]:
            deviation = np.zeros_like(theta)
            for part in vectors:
                moved = theta[part] - start[part]
                deviation[part] = (moved - moved.mean()) / self.ratio_std
            return -0.5 * float(deviation @ deviation), -deviation / (self.ratio_std or 1.0)

        return log_prior


def _beginning(kernel, last):
    """The kernel with the hyper-parameters of the last one, where these are as many."""
    theta = last.theta
    return kernel.clone_with_theta(theta) if len(theta) == kernel.n_dims else kernel


def _vectors(kernel) -> list[slice]:
    """Where theta has the elements of each vector of hyper-parameters."""
    vectors, end = [], 0
    for hyper in kernel.hyperparameters:
        if not hyper.fixed:
            begin, end = end, end + hyper.n_elements
            if hyper.n_elements > 1:
                vectors.append(slice(begin, end))
    return vectors
