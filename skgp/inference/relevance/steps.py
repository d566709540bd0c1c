r"""Single steps of evidence maximisation over a dictionary of kernels (Tipping and Faul, 2003).

With :math:`w \sim N(0, S^{-1})`, S = diag(s), and :math:`y_i \sim N(\phi(x_i)^T w, \sigma^2/w_i)`,

.. math:: \log p(y) = -\tfrac12 \big[ n \log 2\pi\sigma^2 + \log|S + \beta G| - \log|S|
          + \beta (y^T W y - \beta\, b^T \Sigma b) \big], \qquad \beta = \sigma^{-2},

G, b the parts of :math:`\Phi^T W \Phi` and :math:`\Phi^T W y` that belong to functions of finite
precision ("in the model"), :math:`\Sigma = (S + \beta G)^{-1}`, :math:`\mu = \beta \Sigma b`. As a
function of a single precision it has one maximum, which two numbers a function decide:

====================================  =================================  =======================
paper                                 here                               code
====================================  =================================  =======================
:math:`S_m, Q_m`                      :math:`\phi_m^T C^{-1} \phi_m`,    ``S, Q (m,)``
                                      :math:`\phi_m^T C^{-1} y`
:math:`s_m, q_m`                      the same without function m        ``sparsity, quality``
:math:`\theta_m = q_m^2 - s_m`        positive: m belongs in the model
:math:`\alpha_m`                      :math:`s_m`                        ``precision (r,)``
====================================  =================================  =======================

Of functions in the model :math:`s_m = 1/\Sigma_{mm} - \alpha_m`, :math:`q_m = \mu_m/\Sigma_{mm}`,
which has no difference of large numbers. Adding, deleting and re-estimating all change
:math:`C^{-1}` by one term :math:`-\kappa\, C^{-1} \phi \phi^T C^{-1}`,
:math:`\kappa = \delta/(1 + \delta S_m)` with :math:`\delta` the change of :math:`1/\alpha_m`, so
that one O(m r) formula moves all S and Q.

The columns of :math:`\Phi = K(X, Z)`, Z some rows of X (the candidates), are seen only through
:math:`\Phi^T W \Phi`, of which a step asks one column a vector it adds. Two sources answer, by what
fits in memory:

=======================  ====================================  =================================
source                   a column of the Gram matrix           memory
=======================  ====================================  =================================
:class:`DesignSource`    one pass over Phi, O(n m)             n m numbers kept, or a tile of Phi
:class:`GramSource`      none: accumulated once, O(n m^2)      m^2 numbers and a tile of Phi
=======================  ====================================  =================================
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.stochastic.basis import Array, KernelColumns, take_rows
from skgp.inference.weights.design import StreamedDesign, check_sample_weight
from skgp.inference.weights.gram import StreamingGram
from skgp.kernels import gram_tile
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det, tri_solve
from skgp.linalg.runtime import memory_budget


class Source(Protocol):
    """What evidence maximisation reads of the data."""

    squares: Tensor  # (m,), diagonal of Phi' W Phi
    moment: Tensor  # (m,), Phi' W y
    sum_square: float  # y' W y
    n_rows: float  # sum of W

    def gram_columns(self, indices: Tensor) -> Tensor:
        r"""Columns `indices` (k,) of :math:`\Phi^T W \Phi`, shape (m, k)."""


class Dictionary(StreamedDesign):
    """The candidates' functions at the training inputs X (n, d), float64."""

    basis: KernelColumns

    def some(self, indices: Tensor) -> Tensor:
        """Columns `indices` (k,) of Phi, shape (n, k), in O(n k d)."""
        if not len(indices):
            return self.X.new_zeros(len(self.X), 0)
        return gram_tile(self.basis.kernel, self.X, self.basis.Z[indices].to(self.X))


class DesignSource:
    """Gram columns by a pass over the dictionary each, O(n m k); row i counts as weight_i rows."""

    def __init__(self, dictionary: Dictionary, y: Tensor, weight: Tensor) -> None:
        self._dictionary, self._weight = dictionary, weight
        self.squares = dictionary.curvature_diagonal(weight[:, None])[:, 0]
        self.moment = dictionary.rmatmul((weight * y)[:, None])[:, 0]
        self.sum_square = float(weight @ y.square())
        self.n_rows = float(weight.sum())

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Columns of Phi' W Phi, shape (m, k)."""
        return self._dictionary.rmatmul(self._weight[:, None] * self._dictionary.some(indices))


class GramSource:
    """Gram columns out of statistics that need no row any more."""

    def __init__(self, statistics: StreamingGram) -> None:
        self._gram = statistics.gram
        self.squares = statistics.gram.diagonal().clone()
        self.moment = statistics.moment
        self.sum_square = statistics.sum_square
        self.n_rows = statistics.sum_weight

    def gram_columns(self, indices: Tensor) -> Tensor:
        """Columns of Phi' W Phi, shape (m, k)."""
        return self._gram[:, indices]


def make_source(basis: KernelColumns, X: Array, y: Array, sample_weight: Tensor | None) -> Source:
    """Keep Phi if it is small enough, else its Gram matrix if that is, or stream Phi.

    A memory map X (n, d) is read in chunks when the Gram matrix is accumulated.
    """
    n, m = len(X), basis.n_features
    kept = min(defaults.DICTIONARY_BYTES, defaults.KEPT_FEATURES * memory_budget())
    if n * m * 8 > kept >= m * m * 8:
        statistics = StreamingGram(basis)
        for rows in all_rows(X).split(defaults.MAPPED_ROWS):
            weight = None if sample_weight is None else sample_weight[rows]
            X_chunk, y_chunk = (take_rows(A, rows, torch.float64) for A in (X, y))
            statistics.update(X_chunk, y_chunk, weight)
        return GramSource(statistics)
    X, y = (take_rows(A, all_rows(A), torch.float64) for A in (X, y))
    weight = torch.ones_like(y) if sample_weight is None else sample_weight.to(y)
    check_sample_weight(weight, n)
    return DesignSource(Dictionary(basis, X), y, weight)


def all_rows(X: Array) -> Tensor:
    """Indices of the rows of a tensor or array, on its device."""
    return torch.arange(len(X), device=X.device)


@dataclass(frozen=True)
class Move:
    """One step."""

    index: int  # basis function
    place: int  # of it in the model; -1 where it is not
    precision: float  # the one to give it; inf takes it out
    gain: float  # of the log evidence, in nats


class EvidenceState:
    """The functions in the model, and the statistics of all m; m (r + 5) numbers."""

    covariance: Tensor  # (r, r), Sigma
    mean: Tensor  # (r,), mu
    S: Tensor  # (m,)
    Q: Tensor  # (m,)
    log_evidence: float  # in nats; moved by the gains, exact after `refresh`

    def __init__(
        self,
        source: Source,
        noise_variance: float,
        indices: Tensor | None = None,  # (r,) of functions in the model, in the order they came
        precision: Tensor | None = None,  # (r,), their s
    ) -> None:
        self.source = source
        self.noise_variance = noise_variance
        none = source.moment.new_zeros(0)
        self.indices = none.long() if indices is None else indices
        self.precision = none if precision is None else precision
        self._gram = source.gram_columns(self.indices)  # (m, r)
        self.refresh()

    def refresh(self) -> None:
        """Compute everything from the precisions and the noise variance, O(m r^2)."""
        source, beta, r = self.source, 1 / self.noise_variance, len(self.indices)
        H = beta * self._gram[self.indices] + torch.diag(self.precision)
        self._factor = jittered_cholesky(H).factor if r else H
        self.covariance = (
            cho_solve(self._factor, torch.eye(r, dtype=H.dtype, device=H.device)) if r else H
        )
        # A solve loses less to rounding than the product with an inverse.
        moment = beta * source.moment[self.indices]
        self.mean = cho_solve(self._factor, moment) if r else moment
        half = self._gram
        if r:
            half = tri_solve(self._factor, self._gram.mT, upper=False).mT
        self.S = beta * source.squares - beta**2 * half.square().sum(1)
        self.Q = beta * (source.moment - self._gram @ self.mean)
        self._n_aligned = self._aligned(self._gram, self.indices).sum(1)
        self.log_evidence = self._exact_log_evidence()

    def residual_square(self) -> float:
        r"""Return :math:`\|y - \Phi \mu\|_W^2`, not negative."""
        mean, moment = self.mean, self.source.moment[self.indices]
        fitted = mean @ (self._gram[self.indices] @ mean) - 2 * (mean @ moment)
        return max(self.source.sum_square + float(fitted), 0.0)

    def n_determined(self) -> float:
        r"""Number of weights that the data determine, :math:`\sum_j 1 - s_j \Sigma_{jj}`."""
        return float((1 - self.precision * self.covariance.diagonal()).sum())

    def best_move(self, forbidden: Tensor | None = None) -> Move:
        """The step of greatest gain in log evidence, in O(m), but of the `forbidden` (m,)."""
        precision, gain = self.moves()
        if forbidden is not None:
            gain = torch.where(forbidden, 0.0, gain)
        index = gain.argmax()
        place = precision.new_full((), -1)
        if len(self.indices):
            match = (self.indices == index).long()
            place = torch.where(match.any(), match.argmax(), -1)
        found = torch.stack([index, place, precision[index], gain[index]])  # read at once
        index, place, *step = found.tolist()
        return Move(int(index), int(place), *step)

    def moves(self) -> tuple[Tensor, Tensor]:
        """Best precision of every function given the others, and the gain in nats; both (m,).

        inf and 0 where a function out of the model stays out.
        """
        squared, beta = self.Q.square(), 1 / self.noise_variance
        S = self.S
        new = (self._n_aligned == 0) & (beta * self.source.squares * defaults.RESOLUTION < S)
        new &= squared > S
        ratio = torch.where(new, squared / S, 1.0)
        precision = torch.where(new, S / (ratio - 1), math.inf)
        gain = 0.5 * (ratio - 1 - ratio.log())
        if len(self.indices):
            precision[self.indices], gain[self.indices] = self._moves_in_model()
        return precision, gain

    def _moves_in_model(self) -> tuple[Tensor, Tensor]:
        """The same for the functions in the model, shape (r,)."""
        s, variance = self.precision, self.covariance.diagonal()
        # Positive: the others may explain the function up to rounding.
        least = defaults.RESOLUTION / self.noise_variance * self.source.squares[self.indices]
        sparsity = torch.maximum(1 / variance - s, least)
        quality = self.mean / variance
        theta = quality.square() - sparsity
        precision = torch.where(theta > 0, sparsity.square() / theta, math.inf)

        # log evidence as a function of one precision, up to a constant
        def part(a: Tensor) -> Tensor:
            return 0.5 * (quality.square() / (a + sparsity) - torch.log1p(sparsity / a))

        best = torch.where(theta > 0, part(precision), 0.0)
        return precision, best - part(s)

    def apply(self, move: Move) -> None:
        """Take a step: O(m r), and a Gram column when a function is added."""
        if move.place >= 0:
            self._change(move.place, move)
        elif move.precision < math.inf:
            self._add(move)
        self.log_evidence += move.gain

    def _add(self, move: Move) -> None:
        """Put a function into the model; covariance, S and Q follow by one column, O(m r)."""
        index = self.indices.new_full((1,), move.index)
        column = self.source.gram_columns(index)
        beta, r = 1 / self.noise_variance, len(self.indices)
        projection = beta * (self.covariance @ column[self.indices, 0])  # (r,)
        v = beta * (column[:, 0] - self._gram @ projection)  # Phi' C^-1 phi
        S, Q = self.S[move.index], self.Q[move.index]
        variance = 1 / (move.precision + S)
        covariance = self.covariance.new_empty(r + 1, r + 1)
        covariance[:r, :r] = self.covariance + variance * torch.outer(projection, projection)
        covariance[:r, r] = covariance[r, :r] = -variance * projection
        covariance[r, r] = variance
        self.covariance = covariance
        new = variance * Q
        self.mean = torch.cat([self.mean - new * projection, new[None]])
        self._gram = torch.cat([self._gram, column], dim=1)
        self.indices = torch.cat([self.indices, index])
        self.precision = torch.cat([self.precision, column.new_full((1,), move.precision)])
        self._n_aligned = self._n_aligned + self._aligned(column, self.indices[r:])[:, 0]
        self._rank_one(v, Q, variance)

    def _change(self, at: int, move: Move) -> None:
        """Give function number `at` of the model another precision, or take it out."""
        s, column = self.precision[at], self.covariance[:, at].clone()
        variance, mean = column[at], self.mean[at]
        v = s / self.noise_variance * (self._gram @ column)  # Phi' C^-1 phi
        # s - S_at = s^2 Sigma_at,at > 0: the denominators below cannot vanish
        if move.precision == math.inf:
            kappa, weight = -1 / (s**2 * variance), 1 / variance
        else:
            delta = move.precision - s
            kappa = -delta / (s * (s + delta * s * variance))
            weight = delta / (1 + delta * variance)
        Q = s * mean
        self.covariance = self.covariance - weight * torch.outer(column, column)
        self.mean = self.mean - weight * mean * column
        self._rank_one(v, Q, kappa)
        if move.precision < math.inf:
            self.precision = self.precision.clone()
            self.precision[at] = move.precision
        else:
            self._remove(at)

    def _remove(self, at: int) -> None:
        rows = torch.arange(len(self.indices), device=self.indices.device)
        keep = torch.cat([rows[:at], rows[at + 1 :]])
        aligned = self._aligned(self._gram[:, at, None], self.indices[at, None])
        self._n_aligned = self._n_aligned - aligned[:, 0]
        self.covariance = self.covariance[keep][:, keep]
        self.mean, self.precision = self.mean[keep], self.precision[keep]
        self.indices, self._gram = self.indices[keep], self._gram[:, keep]

    def _rank_one(self, v: Tensor, Q: Tensor, kappa: Tensor) -> None:
        self.S = self.S - kappa * v.square()
        self.Q = self.Q - kappa * Q * v

    def _aligned(self, columns: Tensor, indices: Tensor) -> Tensor:
        """Whether each function is nearly parallel to those of given Gram columns, (m, k)."""
        squares = self.source.squares
        lengths = (squares[:, None] * squares[indices]).sqrt()
        return (columns.abs() > (1 - defaults.ALIGNED) * lengths).long()

    def _exact_log_evidence(self) -> float:
        source, noise = self.source, self.noise_variance
        fit = source.sum_square - self.mean @ source.moment[self.indices]
        log_dets = -self.precision.log().sum()
        if len(self.indices):
            log_dets = log_dets + log_det(self._factor)
        constant = source.n_rows * math.log(2 * math.pi * noise)
        return float(-0.5 * (constant + log_dets + fit / noise))


def maximise_evidence(
    state: EvidenceState,
    noise_floor: float | None,
    max_iter: int,
    tol: float,
    callback: Callable[[int, dict], bool],
) -> tuple[list[float], bool]:
    """Take the best step until none gains `tol`; the noise variance moves every ten steps.

    Changes the state in place, exact (refreshed) afterwards. A noise floor of None keeps the noise.
    Returns the log evidence after every iteration, and whether no step was left.
    """
    history: list[float] = []
    exact = copy.copy(state)  # steps replace the tensors of a state and never write into them
    for iteration in range(1, max_iter + 1):
        move = state.best_move()
        settled = move.gain <= tol
        if not settled:
            state.apply(move)
        if settled or iteration % defaults.REFRESH_EVERY == 0:
            before = state.log_evidence
            sound = _refresh(state, exact, noise_floor, tol)
            settled = not sound or (settled and abs(state.log_evidence - before) <= tol)
            exact = copy.copy(state)
        history.append(state.log_evidence)
        info = {
            "loss": -state.log_evidence,
            "noise_variance": state.noise_variance,
            "n_vectors": len(state.indices),
        }
        stop = callback(iteration, info)
        if settled or stop:
            break
    state.refresh()
    return history, settled


def _refresh(
    state: EvidenceState, exact: EvidenceState, noise_floor: float | None, tol: float
) -> bool:
    """Compute a state anew and move its noise; go back to `exact`, and say so, if it fell."""
    state.refresh()
    if state.log_evidence < exact.log_evidence - tol:
        # The gains were rounding errors: targets without noise, explained to the last digit.
        state.__dict__.update(exact.__dict__)
        return False
    if noise_floor is not None:
        update_noise(state, noise_floor)
    return True


def update_noise(state: EvidenceState, floor: float) -> None:
    r"""Move the noise variance to MacKay's :math:`\|y - \Phi\mu\|^2 / (n - \gamma)`, in place.

    :math:`\gamma = \sum_j 1 - s_j \Sigma_{jj}` is the number of weights that the data determine. A
    proposal that would lower the evidence is not taken; of 1500 random states none had one. The
    state is exact before and after; the floor is not above its noise variance.
    """
    noise, before = state.noise_variance, state.log_evidence
    free = max(state.source.n_rows - state.n_determined(), defaults.LEAST_FREE)
    state.noise_variance = max(state.residual_square() / free, floor)
    state.refresh()
    if state.log_evidence < before:  # at the maximum, by rounding
        state.noise_variance = noise
        state.refresh()
