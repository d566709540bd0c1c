r"""A product of processes as one component of a state-space model, and its derivatives.

The state of a product of processes is the Kronecker product of theirs, with

.. math:: F = F_1 \otimes F_2, \qquad
          Q = Q_1 \otimes P_2 + (P_1 - Q_1) \otimes Q_2, \qquad P_i = P_{0,i},

a sum without cancellation. The derivatives are closed forms: with :math:`r_i = \lambda_i t` and
:math:`w_i = \sqrt{q_i} F_i L_i`,

.. math:: \frac{\partial F}{\partial \log \lambda_i} = r_i A_i F, \qquad
          \frac{\partial Q}{\partial \log \lambda_i} = v \dots \otimes
          F_{i-1} P_{i-1} F_{i-1}^\top \otimes r_i w_i w_i^\top \otimes \dots, \qquad
          \frac{\partial Q}{\partial \log v} = Q.

Forms with log parameters that are affine in the logarithms of hyper-parameters (`affine_form`), as
those of sums and products of the leaves here: one form, found once, serves all kernels of one
structure, where torch's way through an expression takes longer than the evidence of few rows.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Kernel, Matern, Product, Sum
from torch import Tensor

from skgp.linalg.runtime import constant_like

from .defaults import TILE_ENTRIES
from .expression import Binder
from .hyperparameters import children_of
from .sde_expression import Component, expand
from .sde_processes import Primitive
from .specs import SHO, ActiveDims, Cosine, LocalLinearTrend


class Block:
    """One component: the product of processes at given rates per unit of time, or a constant."""

    def __init__(
        self,
        variance: float,
        primitives: Sequence[Primitive],
        rates: Sequence[float],
        moving: Sequence[bool] | None = None,
    ) -> None:
        self.variance = variance  # a factor of `stationary`
        self.primitives = tuple(primitives)
        self.rates = tuple(rates)
        #: Which derivatives a covariance is asked for: in the log variance, then the log rates.
        self.moving = (True,) * (1 + len(self.rates)) if moving is None else tuple(moving)

    @cached_property
    def n_states(self) -> int:
        """d."""
        return math.prod(p.n_states for p in self.primitives)

    @property
    def is_stationary(self) -> bool:
        """Whether its covariance is a function of lags alone."""
        return all(p.is_stationary for p in self.primitives)

    @cached_property
    def horizon(self) -> float:
        """From where on F is 0; inf for a component that never forgets."""
        reach = (p.horizon / rate for p, rate in zip(self.primitives, self.rates, strict=True))
        return min(reach, default=math.inf)

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def observation(self) -> Tensor:
        """H, (d,)."""
        one = torch.ones(1, dtype=torch.float64)
        return reduce(torch.kron, (p.observation for p in self.primitives), one)

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def stationary(self) -> Tensor:
        """P0, (d, d)."""
        variance = torch.full((1, 1), self.variance, dtype=torch.float64)
        return reduce(torch.kron, (p.stationary for p in self.primitives), variance)

    @property
    def mirror(self) -> Tensor:
        """D of `Dynamics.mirror`, (d, d)."""
        one = torch.ones(1, 1, dtype=torch.float64)
        return reduce(torch.kron, (p.mirror for p in self.primitives), one)

    def transition(self, gaps: Tensor) -> tuple[Tensor, Tensor]:
        """Return F and Q, (d, d, n); see `Dynamics.transition`."""
        shape = (self.n_states, self.n_states, len(gaps))
        F, Q = gaps.new_empty(shape), gaps.new_empty(shape)
        self.fill(gaps, F, Q)
        return F, Q

    def fill(self, gaps: Tensor, F: Tensor, Q: Tensor) -> None:
        """Write F and Q, (d, d, n) with the batch contiguous."""
        gaps = self._finite(gaps)
        for tile in self._tiles(len(gaps)):
            f, q = F[..., tile], Q[..., tile]
            if len(self.primitives) == 1:
                self.primitives[0].fill(self.rates[0] * gaps[tile], f, q)
            else:
                product, noise = self.product(self._factors(gaps[tile]), gaps[tile])
                f.copy_(product)
                q.copy_(noise)
            q.mul_(self.variance)

    def covariance(
        self,
        lags: np.ndarray,
        since: np.ndarray | None = None,
        known: dict[Any, np.ndarray] | None = None,
        *,
        of_form: bool = False,
    ) -> tuple[np.ndarray, list[np.ndarray | None], list[np.ndarray]]:
        """Return k, its derivatives in the log rates and in log shapes, in the shape of lags.

        Processes that approximate a squared exponential have that covariance, or their own with
        `of_form`. `since` is the time from the origin to the earlier of two, for what is not
        stationary.
        Correlations at rates that do not move are kept in `known`, for these lags; derivatives in
        such are None.
        """
        if not self.primitives:
            return np.full_like(lags, self.variance), [], []
        found = self._correlations(lags, since, known, of_form)
        values, slopes = zip(*found, strict=True)

        def times_others(i: int, slope: np.ndarray) -> np.ndarray:
            return reduce(np.multiply, [*values[:i], *values[i + 1 :]], self.variance * slope)

        pairs = [(i, self.primitives[i].shape_slope(self.rates[i] * lags)) for i in self._shaped]
        return (
            reduce(np.multiply, values[1:], self.variance * values[0]),
            [None if each is None else times_others(i, each) for i, each in enumerate(slopes)],
            [times_others(*pair) for pair in pairs],
        )

    def between(self, x: np.ndarray, z: np.ndarray, origin: float, *, slope: bool) -> np.ndarray:
        """Return k at times x and z, or its `slope` in x: where x is z, that to the right.

        They broadcast and may lie before the `origin`, beyond which what is not stationary begins
        anew in a mirror.
        """
        lags = np.abs(x - z)
        if self.is_stationary:
            return np.where(x < z, -1, 1) * self.slope(lags) if slope else self.covariance(lags)[0]
        a, b = x - origin, z - origin
        side = np.where((a < 0) & (b < 0), -1, 1)
        start = np.minimum(side * a, side * b)
        if not slope:
            return self.covariance(lags, start)[0]
        (p,), (rate,) = self.primitives, self.rates
        slopes = p.slopes(rate * lags, rate * start)
        return self.variance * rate * side * np.where(side * a < side * b, *slopes)

    def slope(self, lags: np.ndarray) -> np.ndarray:
        """Derivative of a stationary k in the lag, at 0 that to the right."""
        lags, slope, k = np.maximum(lags, 1e-100), np.zeros_like(lags), np.ones_like(lags)
        for p, r in zip(self.primitives, self.rates, strict=True):
            value, in_log_rate = p.intended(r * lags, None)
            slope, k = slope * value + k * in_log_rate, k * value
        return self.variance * slope / lags

    def _correlations(
        self,
        lags: np.ndarray,
        since: np.ndarray | None,
        known: dict[Any, np.ndarray] | None,
        of_form: bool,
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Of each factor, with its derivative in the log rate where that moves."""
        for p, r, moves in zip(self.primitives, self.rates, self.moving[1:], strict=True):
            if not moves and known is not None and (p, r) in known:
                yield known[p, r], None
                continue
            at, start = r * lags, None if since is None else r * since
            k, slope = p.own(at, start) if of_form else p.intended(at, start)
            if not moves and known is not None and not p.has_shape:
                known[p, r] = k
            yield k, slope if moves else None

    def gradient(self, gaps: Tensor, F_bar: Tensor, Q_bar: Tensor) -> tuple[Tensor, Tensor]:
        """Return the contraction with d/dlog variance and with each d/dlog rate."""
        gaps = self._finite(gaps)
        d = self.n_states
        by_variance = gaps.new_zeros(())
        by_rate = gaps.new_zeros(len(self.primitives))
        spread = gaps.new_zeros(d, d)  # sum of gap F_bar F'
        for tile in self._tiles(len(gaps)):
            gap, factors = gaps[tile], self._factors(gaps[tile])
            F, Q = self.product(factors, gap)
            weighted = F_bar[..., tile] * gap
            spread += weighted.reshape(d, -1) @ F.reshape(d, -1).T
            barred = Q_bar[..., tile]
            by_variance += (barred * Q).sum()
            for i in (i for i, p in enumerate(self.primitives) if p.is_noisy):
                by_rate[i] += (barred * self._noise_slope(factors, i, gap)).sum()
        by_rate *= self.variance
        for i in range(len(self.primitives)):
            by_rate[i] += (constant_like(self._generator(i), spread) * spread).sum()
        return by_variance * self.variance, by_rate

    @property
    def _shaped(self) -> list[int]:
        return [i for i, p in enumerate(self.primitives) if p.has_shape]

    def rate_slopes(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """B and W, (d, d), of each log rate: dF = t B F and dQ = t F W F' over a time t."""
        feedback = [p.feedback.numpy() for p in self.primitives]
        stationary = [p.stationary.numpy() for p in self.primitives]
        found = []
        for i, (rate, p) in enumerate(zip(self.rates, self.primitives, strict=True)):
            noise = p.noise.numpy()
            moved, spread = [np.eye(len(A)) for A in feedback], list(stationary)
            moved[i], spread[i] = rate * feedback[i], rate * self.variance * np.outer(noise, noise)
            found.append((reduce(_kron_of_two, moved), reduce(_kron_of_two, spread)))
        return found

    def shape_slopes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """B, the derivative dP of P0, and X with X P0 H' = dP H', (d, d), of each log shape."""
        found = []
        for i in self._shaped:
            _, dP, c = self.primitives[i].shape_slopes(torch.zeros(1, dtype=torch.float64))
            parts = [dP if j == i else p.stationary for j, p in enumerate(self.primitives)]
            eye = torch.eye(self.n_states, dtype=torch.float64)
            X = self._of_factor(i, self.primitives[i].shape_turn(), 1.0)
            found.append((c * self.rates[i] * eye, self.variance * reduce(torch.kron, parts), X))
        return found

    def shape_gradient(self, gaps: Tensor, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        """Contraction with the derivatives in the log shapes."""
        found, gaps = gaps.new_zeros(len(self._shaped)), self._finite(gaps)
        for tile in self._tiles(len(gaps)) if len(found) else []:
            gap, factors = gaps[tile], self._factors(gaps[tile])
            F, _ = self.product(factors, gap)
            for n, i in enumerate(self._shaped):
                dQ, dP, c = self.primitives[i].shape_slopes(self.rates[i] * gap)
                found[n] += c * self.rates[i] * (F_bar[..., tile] * F * gap).sum()
                dP = constant_like(dP, gap)[..., None]
                moved = self._shape_slope(factors, i, dQ, dP)
                found[n] += self.variance * (Q_bar[..., tile] * moved).sum()
        return found

    def _shape_slope(self, factors: list, i: int, dQ: Tensor, dP: Tensor) -> Tensor:
        """dQ / dlog shape_i at variance 1, (d, d, m): P0 less F P0 F' of the product, moved."""
        if len(factors) == 1:
            return dQ
        before, after = [], []
        for j, (p, (_, Q)) in enumerate(zip(self.primitives, factors, strict=True)):
            P = constant_like(p.stationary, Q)[..., None]
            before.append(dP if j == i else P)
            after.append(dP - dQ if j == i else P - Q)
        return reduce(_kron, before) - reduce(_kron, after)

    def _finite(self, gaps: Tensor) -> Tensor:
        """Gaps capped where the component has forgotten all: there F = 0 and Q = P0."""
        if math.isfinite(self.horizon):
            return gaps.clamp(max=self.horizon)
        if self.primitives and bool(gaps.isinf().any()):
            kind = " * ".join(p.name for p in self.primitives)
            raise ValueError(
                f"gaps must be finite for the component {kind}, which never forgets; got an "
                "infinite one. Multiply the kernel by one that decays, or keep the series whole."
            )
        return gaps if self.primitives else gaps.clamp(max=0)

    def _tiles(self, n: int) -> list[slice]:
        size = max(512, TILE_ENTRIES // self.n_states**2)
        return [slice(start, start + size) for start in range(0, n, size)]

    def _factors(self, gap: Tensor) -> list[tuple[Tensor, Tensor]]:
        factors = []
        for p, rate in zip(self.primitives, self.rates, strict=True):
            shape = (p.n_states, p.n_states, len(gap))
            F, Q = gap.new_empty(shape), gap.new_empty(shape)
            p.fill(rate * gap, F, Q)
            factors.append((F, Q))
        return factors

    def product(self, factors: list[tuple[Tensor, Tensor]], gap: Tensor) -> tuple[Tensor, Tensor]:
        """Transition and noise covariance of the product of factors at variance 1."""
        if not factors:
            one = gap.new_ones(1, 1, len(gap))
            return one, torch.zeros_like(one)
        (F, Q), noisy = factors[0], self.primitives[0].is_noisy
        P = constant_like(self.primitives[0].stationary, gap)[..., None]
        for p, (F2, Q2) in zip(self.primitives[1:], factors[1:], strict=True):
            P2 = constant_like(p.stationary, gap)[..., None]
            product = _kron(Q, P2)
            if p.is_noisy:
                product += _kron(P - Q if noisy else P, Q2)
            F, Q, P, noisy = _kron(F, F2), product, _kron(P, P2), noisy or p.is_noisy
        return F, Q

    def _noise_slope(self, factors: list[tuple[Tensor, Tensor]], i: int, gap: Tensor) -> Tensor:
        """Return dQ / dlog rate_i at variance 1, (d, d, m)."""
        parts = []
        for j, (p, (F, Q)) in enumerate(zip(self.primitives, factors, strict=True)):
            if j == i:
                w = F[:, -1] * float(p.noise[-1])
                parts.append(w[:, None] * (self.rates[i] * gap * w))
            else:
                P = constant_like(p.stationary, Q)[..., None]
                parts.append(P - Q if p.is_noisy else P)
        return reduce(_kron, parts)

    def generator(self) -> tuple[Tensor, Tensor]:
        """A and L of dF = A F and dQ = F L F' in the gap, each (d, d), stationary or not."""
        A, L = torch.zeros(2, self.n_states, self.n_states, dtype=torch.float64)
        for B, W in self.rate_slopes():
            A, L = A + torch.from_numpy(B), L + torch.from_numpy(W)
        return A, L

    def _generator(self, i: int) -> Tensor:
        """``rate_i I x A_i x I``, (d, d): what factor i adds to the generator."""
        return self._of_factor(i, self.primitives[i].feedback, self.rates[i])

    def _of_factor(self, i: int, A: Tensor, scale: float) -> Tensor:
        """``scale I x A x I``, (d, d), of a matrix of factor i."""
        total = torch.full((1, 1), scale, dtype=torch.float64)
        for j, p in enumerate(self.primitives):
            eye = torch.eye(p.n_states, dtype=torch.float64)
            total = torch.kron(total, A if j == i else eye)
        return total


def _kron(A: Tensor, B: Tensor) -> Tensor:
    """Kronecker products of the matrices (a, b, m) and (c, e, m), (ac, be, m)."""
    a, b = A.shape[:2]
    c, e = B.shape[:2]
    return (A[:, None, :, None] * B[None, :, None]).reshape(a * c, b * e, -1)


def _kron_of_two(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Kronecker product of two small matrices, in a tenth of the time that NumPy takes."""
    return (A[:, None, :, None] * B[:, None]).reshape(len(A) * len(B), -1)


_LEAVES = (ConstantKernel, Cosine, LocalLinearTrend, Matern, RBF, SHO)


class AffineForm(NamedTuple):
    """The processes of each component, and q log parameters of h logarithms."""

    primitives: list[list[Primitive]]
    is_exact: bool
    level: np.ndarray  # (q,), where all logarithms are 0
    slopes: np.ndarray  # (q, h), whole numbers


def affine_form(kernel: Kernel, tolerance: float | None) -> AffineForm | None:
    """The form of a kernel whose hyper-parameters are single numbers; None where it is another."""
    structure = _structure(kernel)
    return None if structure is None else _of_structure(structure, tolerance)


def _structure(kernel: Any) -> tuple | None:
    """Classes of the parts, and what of a class besides hyper-parameters decides the processes."""
    kind = type(kernel)
    if kind is ActiveDims:  # of the only column
        return _structure(kernel.kernel)
    if kind in (Sum, Product):
        found = tuple(map(_structure, children_of(kernel)))
        return None if None in found else (kind, found)
    return (kind, getattr(kernel, "nu", None)) if kind in _LEAVES else None


@lru_cache(maxsize=128)
def _of_structure(structure: tuple, tolerance: float | None) -> AffineForm:
    bind = Binder(_unit_kernel(structure))
    n_logs = bind.kernel.n_dims
    places = torch.cat([torch.zeros(1, n_logs), torch.eye(n_logs)]).double()
    found = [expand(bind(place, dtype=torch.float64), tolerance) for place in places]
    level, *moved = (log_parameters(each.components).numpy() for each in found)
    slopes = [np.round(each - level) for each in moved]
    primitives = [[f.primitive for f in c.factors] for c in found[0].components]
    return AffineForm(primitives, found[0].error == 0, level, np.stack(slopes, 1))


def _unit_kernel(structure: tuple) -> Kernel:
    """A kernel of a structure, of which all hyper-parameters are free."""
    kind, rest = structure
    if kind in (Sum, Product):
        return kind(*map(_unit_kernel, rest))
    return kind() if rest is None else kind(nu=rest)


def log_parameters(components: Sequence[Component]) -> Tensor:
    """Log variances of components, log rates of their factors and log shapes, (q,)."""
    variances, factors = zip(*((c.log_variance, c.factors) for c in components), strict=True)
    rates = [f.log_rate for each in factors for f in each]
    shapes = [f.log_shape for each in factors for f in each if f.log_shape is not None]
    return torch.stack([*variances, *rates, *shapes])
