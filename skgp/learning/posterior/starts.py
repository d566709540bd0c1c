r"""Where the search for the mode begins when no likelihood of all rows can be evaluated.

Every joint density is a chain of conditionals. With the rows in random order, the first m of them
jointly, and of each later row only its nearest neighbours among the rows before [1]_,

.. math:: \log p(y) \approx \log p(y_{1:m}) + \sum_b \frac{n_b}{|S_b|} \sum_{i \in S_b}
          \log p(y_i \mid y_{N(i)}),

where :math:`S_b` is a sample of block b, of :math:`n_b` rows, and the neighbours N(i) come from
all blocks before. It costs seconds, has a value (so that starts can be compared) and its curvature
is near that of the posterior (so that the search on all rows begins with a metric).

Deviation from [1]_: neighbours come from the blocks before and not from all rows before, which
leaves one search of neighbours a block, and still a chain of conditionals.

References
----------
.. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.neighbors.search import CandidateSearch
from skgp.kernels import split_noise
from skgp.learning.objectives import leave_one_out_log_density, log_marginal_likelihood
from skgp.learning.posterior.laplace import bounded_inverse, find_mode, hessian_by_differences
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.linalg.exceptions import NotPositiveDefiniteError
from skgp.optim.stopping import StopRecorder

__all__ = ["NeighborPosterior", "Start", "find_start"]

Callback = Callable[[int, dict], bool | None]

_SUBSET = 500  # rows taken jointly
_SAMPLE = 2000  # rows given their neighbours
_N_NEIGHBORS = 32
_GROWTH = 1.5  # of the rows that neighbours come from, from block to block
_ROUNDS, _ITERATIONS = 3, 15  # searches, each with neighbours of its own, and steps of each


@dataclass(frozen=True)
class Start:
    """Outcome of :func:`find_start`.

    Attributes
    ----------
    u : ndarray of shape (p,)
    metric : ndarray of shape (p, p)
        Approximate covariance of the posterior.
    log_density : float
        Approximate log posterior at u, nats.
    """

    u: np.ndarray
    metric: np.ndarray
    log_density: float


class NeighborPosterior(LogPosterior):
    """The posterior with the likelihood above; its neighbours are fixed between two searches.

    Parameters
    ----------
    posterior : LogPosterior
    rng : numpy.random.Generator
        Draws the order of the rows and the sample.

    Attributes
    ----------
    first : LogPosterior
        Of the rows taken jointly.

    Notes
    -----
    ``O(m^3 + s k^3)`` for m joint rows and s others with k neighbours.
    """

    def __init__(self, posterior: LogPosterior, rng: np.random.Generator) -> None:
        super().__init__(posterior.kernel, posterior.data, posterior.priors)
        n, device = len(self.data.y), self.data.y.device
        order = torch.from_numpy(rng.permutation(n)).to(device)
        m = min(_SUBSET, n)
        self.first = LogPosterior(self.kernel, self.data.take(order[:m]), self.priors)
        self._order, self._blocks, start = order, [], m
        while start < n:
            stop = min(n, math.ceil(start * _GROWTH))
            # The order is random: the first rows of a block are a sample of it.
            size = min(stop - start, max(32, math.ceil(_SAMPLE * (stop - start) / (n - m))))
            self._blocks.append((start, size, (stop - start) / size))
            start = stop
        self._neighbors: list[Tensor] = []

    def find_neighbors(self, u: np.ndarray) -> "NeighborPosterior":
        """Search the neighbours anew, in the metric of u (n_dims,); returns itself."""
        signal, _ = split_noise(self.kernel.clone_with_theta(u))
        self._neighbors = []
        for start, size, _ in self._blocks:
            search = CandidateSearch(signal, self.data.X, self._order[:start])
            rows = self._order[start : start + size]
            self._neighbors.append(search.query(rows, min(_N_NEIGHBORS, start)))
        return self

    @property
    def batched(self) -> bool:
        """Never: its terms have neighbours of their own."""
        return False

    def _likelihood(self, theta: Tensor) -> Tensor:
        value = log_marginal_likelihood(self.kernel, self.first.data, theta)
        for (start, size, weight), neighbors in zip(self._blocks, self._neighbors, strict=True):
            rows = self._order[start : start + size]
            each = leave_one_out_log_density(self.kernel, self.data, rows, neighbors, theta)
            value = value + weight * each.sum()
        return value

    def log_density(self, u: np.ndarray) -> float:
        """As :meth:`LogPosterior.log_density`."""
        prior = float(self.log_prior(u))
        if prior == -math.inf:
            return prior
        try:
            with torch.no_grad():
                return prior + float(self._likelihood(self.data.X.new_tensor(u)))
        except NotPositiveDefiniteError:
            return -math.inf

    def log_density_and_gradient(self, u: np.ndarray) -> tuple[float, np.ndarray]:
        """As :meth:`LogPosterior.log_density_and_gradient`."""
        prior = float(self.log_prior(u))
        if prior == -math.inf:
            return prior, np.zeros(self.n_dims)
        theta = self.data.X.new_tensor(u).requires_grad_()
        try:
            value = self._likelihood(theta)
        except NotPositiveDefiniteError:
            return -math.inf, np.zeros(self.n_dims)
        (gradient,) = torch.autograd.grad(value, theta)
        return prior + value.item(), gradient.cpu().numpy() + self.prior_gradient(u)


def find_start(
    posterior: LogPosterior,
    rng: np.random.Generator,
    starts: Sequence[np.ndarray] = (),
    callback: Callback | None = None,
) -> Start:
    """Mode and curvature of :class:`NeighborPosterior`, from the best of several starts.

    Parameters
    ----------
    posterior : LogPosterior
        Never evaluated on all rows, beyond 500.
    rng : numpy.random.Generator
    starts : sequence of ndarray of shape (p,), optional
        Besides the priors' medians and half of them.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True stops with the best start so far.

    Returns
    -------
    Start

    Raises
    ------
    ValueError
        If the posterior of the first rows vanishes at every start.
    """
    recorder = StopRecorder(callback)
    target = NeighborPosterior(posterior, rng)
    given = [np.asarray(start, dtype=float) for start in starts]
    ends, failure = [], None
    for start in [posterior.medians, posterior.medians - math.log(2), *given]:
        try:
            ends.append(find_mode(target.first, [start], tol=1e-3, callback=recorder).u)
        except ValueError as error:
            failure = error
        if recorder.stopped:
            break
    if not ends:
        raise failure if failure is not None else ValueError("There is nowhere to start.")
    low, high = posterior.bounds.T
    candidates = ends + [np.clip(start, low, high) for start in given]
    u = max(candidates, key=lambda each: target.find_neighbors(each).log_density(each))
    value = -math.inf
    for _ in range(_ROUNDS if target._blocks else 0):
        if recorder.stopped:
            break
        target.find_neighbors(u)
        found = find_mode(target, [u], max_iter=_ITERATIONS, tol=1e-3, callback=recorder)
        if found.log_density < value + 0.1:
            break
        u, value = found.u, found.log_density
    target.find_neighbors(u)
    metric = bounded_inverse(-hessian_by_differences(target, u))
    return Start(u, metric, target.log_density(u))
