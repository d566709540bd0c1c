r"""A kernel expression on one column as a state-space model.

.. math:: s(x + t) = F(t) s(x) + N(0, Q(t)), \qquad f(x) = H s(x), \qquad
          k(t) = H F(t) P_0 H^\top, \quad t \ge 0.

`state_space` finds the structure once; `StateSpace.parameters` maps ``theta`` to the log variances
and log rates of its components, differentiably; `StateSpace.at` makes the `Dynamics` at numbers. So
a gradient in the parameters, which inference computes without autograd, becomes one in ``theta``.

That of a sum is the concatenation of states, with block-diagonal matrices: see `sde_block`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from itertools import accumulate, chain, pairwise, repeat
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.linalg.runtime import asks_for_gradients, constant_like
from skgp.linalg.small_matrices import matmul

from .expression import Binder, check_kernel, summands
from .hyperparameters import copied, owned
from .sde_block import Block, affine_form, log_parameters
from .sde_expression import check_one_input, expand, origin_of
from .sde_processes import Primitive


def has_state_space(kernel: Kernel) -> bool:
    """Whether `state_space` has a form, exact or approximate, for the kernel on one column.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import DotProduct, Matern
    >>> has_state_space(2.0 * Matern(nu=1.5) + 1.0), has_state_space(DotProduct())
    (True, False)
    """
    try:
        state_space(kernel)
    except (TypeError, ValueError):
        return False
    return True


def state_space(kernel: Kernel, *, tolerance: float | None = None) -> StateSpace:
    """State-space form of a kernel expression.

    Parameters
    ----------
    kernel : Kernel
        On one column, without WhiteKernel (see `split_noise`). ActiveDims of that column are seen
        through.
    tolerance : float, optional
        Greatest error of a truncated Fourier series and of RBF, relative to its variance, at the
        kernel's own hyper-parameters; RBF stops at 16 states. By default 1e-8 of a series, and six
        states, 9.1e-6, of RBF.

    Raises
    ------
    ValueError
        If a part has no state-space form or the expression sees several columns.
    TypeError
        If a part is not supported at all.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import Matern
    >>> form = state_space(2.0 * Matern(3.0, nu=1.5) + Matern(0.5, nu=0.5))
    >>> form.n_states, form.n_parameters
    (3, 4)
    """
    check_kernel(kernel)
    check_one_input(kernel)
    return StateSpace(kernel, tolerance)


class StateSpace:
    """Structure of a state-space form, and its parameters as functions of ``theta``.

    Made by `state_space`. It has `n_states` d and `n_parameters` q: the log variances of the
    components, then the log rates of their factors, then the log shapes of those that have one;
    `order` has the states of each component, `primitives` its processes.
    """

    def __init__(self, kernel: Kernel, tolerance: float | None = None) -> None:
        self.kernel = copied(kernel)  # later changes by the caller must not reach it
        self.tolerance = tolerance
        self.origin = origin_of(self.kernel)  # None of what is stationary
        hypers = owned(self.kernel)
        self._free = [hyper for _, hyper in hypers if not hyper.fixed]
        #: Its hyper-parameters, and their bounds: logarithms.
        self.bounds = _logarithms([hyper.bounds for hyper in self._free]).reshape(-1, 2)
        logs = _logarithms([getattr(leaf, hyper.name) for leaf, hyper in hypers])
        moves = [not hyper.fixed for _, hyper in hypers for _ in range(hyper.n_elements)]
        self.theta = logs[moves]
        #: Slopes (q, t) of the parameters in theta where they are known to be affine.
        self.slopes: np.ndarray | None = None
        #: Whether it is the kernel itself, whatever the values of its hyper-parameters.
        self.is_exact = False
        known = None
        if all(hyper.n_elements == 1 for _, hyper in hypers) and np.isfinite(logs).all():
            known = affine_form(self.kernel, tolerance)
        if known is None:
            self._own = log_parameters(components := self._expand(None).components)
            self.primitives = [[f.primitive for f in c.factors] for c in components]
        else:
            self._own = torch.from_numpy(known.level + known.slopes @ logs)
            self.slopes = known.slopes[:, moves]
            self.is_exact, self.primitives = known.is_exact, known.primitives
        self._moves: dict[tuple[bool, ...] | None, list[tuple[bool, ...]]] = {}
        self.n_parameters = _count_parameters(self.primitives)
        self.order = _slices(math.prod(p.n_states for p in each) for each in self.primitives)
        self.n_states = self.order[-1].stop

    @cached_property
    def _bind(self) -> Binder:
        return Binder(self.kernel)

    def _expand(self, theta: Tensor | None):
        return expand(self._bind(theta, dtype=torch.float64), self.tolerance)

    def parameters(self, theta: Tensor | None = None) -> Tensor:
        """Log variances of the components, log rates of their factors and log shapes, (q,).

        Gradients flow to theta (t,); None takes the kernel's own values.
        """
        if theta is None:
            return self._own
        return log_parameters(self._expand(theta).components)

    @property
    def is_length_scale(self) -> np.ndarray:
        """Which entries of theta, (t,), are length scales."""
        found = ([h.name == "length_scale"] * h.n_elements for h in self._free)
        return np.array([each for part in found for each in part], dtype=bool)

    def error(self, theta: Tensor | None = None) -> float:
        """Bound of the greatest ``abs(k - k_approximate)``; 0 for kernels with an exact form."""
        with torch.no_grad():
            return self._expand(theta).error

    def at(
        self, parameters: Tensor | np.ndarray | None = None, moving: Sequence[bool] | None = None
    ) -> Dynamics:
        """Matrices at parameters (q,); by default those of the kernel's own hyper-parameters.

        Derivatives of covariances are those in the `moving` ones (q,), by default all.
        """
        if parameters is None:
            parameters = self.parameters()
        parameters = np.asarray(parameters.detach() if torch.is_tensor(parameters) else parameters)
        if parameters.shape != (self.n_parameters,):
            raise ValueError(
                f"parameters must have shape ({self.n_parameters},), got "
                f"{tuple(parameters.shape)}; StateSpace.parameters makes them."
            )
        values = iter(np.exp(parameters).tolist())
        variances = [next(values) for _ in self.primitives]
        rates = [[next(values) for _ in group] for group in self.primitives]
        groups = self.primitives
        if self.n_parameters > len(groups) + sum(map(len, groups)):
            groups = [[p.at(next(values)) if p.has_shape else p for p in each] for each in groups]
        moves = self._by_block(None if moving is None else tuple(moving))
        blocks = [Block(*parts) for parts in zip(variances, groups, rates, moves, strict=True)]
        return Dynamics(blocks, self.origin)

    def _by_block(self, moving: tuple[bool, ...] | None) -> list[tuple[bool, ...]]:
        """Whether the log variance moves, then each log rate, of every block."""
        if moving not in self._moves:
            asked = repeat(True) if moving is None else iter(moving)
            first = [next(asked) for _ in self.primitives]
            rest = [tuple(next(asked) for _ in each) for each in self.primitives]
            self._moves[moving] = [(a, *b) for a, b in zip(first, rest, strict=True)]
        return self._moves[moving]

    def summands(self) -> list[tuple[Kernel, Tensor]]:
        """Addends of the expression and the row (d,) that observes each one's share of f.

        Their rows sum to the observation row of the whole.

        Examples
        --------
        >>> from sklearn.gaussian_process.kernels import Matern
        >>> state_space(Matern(nu=0.5) + Matern(nu=1.5)).summands()[1][1]
        tensor([0., 1., 0.], dtype=torch.float64)
        """
        rows, start = [], 0
        observation = self.at().observation
        for part in summands(self.kernel):
            count = len(state_space(part, tolerance=self.tolerance).order)
            row = torch.zeros_like(observation)
            for s in self.order[start : start + count]:
                row[s] = observation[s]
            start += count
            rows.append((part, row))
        return rows


class Dynamics:
    r"""A state-space form at numbers: plain tensors, no autograd; made when first asked for.

    Its parameters (q,) are the log variances of the blocks, then the log rates of their factors,
    then the log shapes; over a time t, with constant matrices that commute with F,

    .. math:: \frac{\partial F}{\partial \log \lambda_i} = t B_i F, \qquad
              \frac{\partial Q}{\partial \log \lambda_i} = t F W_i F^\top.

    A shape moves P0 besides: :math:`\partial Q = \partial P_0 - F \, \partial P_0 F^\top + t F W
    F^\top` with :math:`W = -B P_0 - P_0 B^\top`. With an `origin` the process is not stationary
    and P0 is the covariance there; the first of the gaps of a series is then that from the origin.

    There are `n_states` d. `blocks` holds the states of each component and its
    `Block`; F, Q and P0 are 0 between them.
    """

    def __init__(self, blocks: Sequence[Block], origin: float | None = None) -> None:
        states = _slices(block.n_states for block in blocks)
        self.blocks = list(zip(states, blocks, strict=True))
        self.n_states = states[-1].stop
        self.origin = origin

    @cached_property
    def n_parameters(self) -> int:
        """Log variances, log rates and log shapes, q."""
        return _count_parameters([block.primitives for _, block in self.blocks])

    def gaps(self, times: Tensor) -> Tensor:
        """Time before each of some times (n,), rising: of the first 0, or that from the origin."""
        if self.origin is None:
            return times.diff(prepend=times[:1])
        if float(times[0]) < self.origin:
            raise ValueError(
                f"X has a time of {float(times[0]):g}, before the kernel's origin={self.origin:g}; "
                "give LocalLinearTrend an earlier origin."
            )
        return times.diff(prepend=times.new_tensor([self.origin]))

    def require_stationary(self, what: str) -> None:
        """ValueError where a process starts at an origin."""
        if self.origin is not None:
            raise ValueError(
                f"kernel has a LocalLinearTrend, which is not stationary; {what} needs a "
                "stationary kernel. Use Matern(nu=1.5) of a long length scale for the trend."
            )

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def shape_slopes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each log shape: B, the derivative dP of P0, and X with X P0 H' = dP H', (d, d)."""
        found = []
        for s, block in self.blocks:
            for parts in block.shape_slopes():
                whole = parts[0].new_zeros(3, self.n_states, self.n_states)
                whole[:, s, s] = torch.stack(parts)
                found.append((whole[0], whole[1], whole[2]))
        return found

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def observation(self) -> Tensor:
        """H, (d,): f = H s."""
        return torch.cat([block.observation for _, block in self.blocks])

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def stationary(self) -> Tensor:
        """P0, (d, d), covariance of the state at any one time."""
        return torch.block_diag(*(block.stationary for _, block in self.blocks))

    @cached_property
    @torch.inference_mode(False)  # whatever the mode of who asks first
    def mirror(self) -> Tensor:
        """D, (d, d), its own inverse: the state of the process run backwards in time is D s."""
        return torch.block_diag(*(block.mirror for _, block in self.blocks))

    @cached_property
    def is_approximate(self) -> bool:
        """Whether a process approximates a squared exponential: dense covariances have that."""
        return any(p.is_approximate for _, block in self.blocks for p in block.primitives)

    def prior_at(self, x: Tensor) -> Tensor:
        """P0 (d, d) where x lies."""
        return constant_like(self.stationary, x)

    def observation_at(self, x: Tensor) -> Tensor:
        """H (d,) where x lies."""
        return constant_like(self.observation, x)

    def transition(self, gaps: Tensor) -> tuple[Tensor, Tensor]:
        """Transition matrices F and noise covariances Q (d, d, n), s' = F s + N(0, Q).

        Gaps (n,) are not negative, float64; 0 gives I and 0; inf gives 0 and P0, and a ValueError
        where a component never forgets (a Cosine, a periodic kernel). Entry (i, j) of Q is accurate
        relative to sqrt(Q_ii Q_jj). O(n d^2) and the exponentials. Differentiable in the gaps.
        """
        if asks_for_gradients(gaps):
            return _Transition.apply(gaps, self)
        if len(self.blocks) == 1:
            return self.blocks[0][1].transition(gaps)
        shape = (self.n_states, self.n_states, len(gaps))
        F, Q = gaps.new_zeros(shape), gaps.new_zeros(shape)
        for s, block in self.blocks:
            block.fill(gaps, F[s, s], Q[s, s])
        return F, Q

    def covariance(
        self, lags: np.ndarray, since: np.ndarray | None = None, *, of_form: bool = False
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Covariance of f over finite lags (n,), and its derivative in each parameter.

        Of RBF that of the kernel, or with `of_form` its approximation; see `Block.covariance`.
        With an origin, between the times `since` (n,) after it and those a lag later.
        """
        if since is None:
            self.require_stationary("a covariance of lags")
        parts = (block.covariance(lags, since, of_form=of_form) for _, block in self.blocks)
        values, rates, shapes = zip(*parts, strict=True)
        return reduce(np.add, values), [*values, *chain(*rates, *shapes)]

    def transition_gradient(self, gaps: Tensor, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        r"""Contraction of the transition's derivatives, summed over gaps (n,); (q,).

        .. math:: \sum_n \langle \bar F_n, \partial F_n / \partial p \rangle
                  + \langle \bar Q_n, \partial Q_n / \partial p \rangle.

        Entries of F_bar, Q_bar (d, d, n) between the blocks are not read; Q_bar need not be
        symmetric.
        """
        by_variance, by_rate, by_shape = [], [], []
        for s, block in self.blocks:
            slope, slopes = block.gradient(gaps, F_bar[s, s], Q_bar[s, s])
            by_variance.append(slope[None])
            by_rate.append(slopes)
            by_shape.append(block.shape_gradient(gaps, F_bar[s, s], Q_bar[s, s]))
        return torch.cat(by_variance + by_rate + by_shape)

    def stationary_gradient(self, P_bar: Tensor) -> Tensor:
        """Contraction of P_bar (d, d) with the derivatives of P0, (q,); rates do not move it."""
        gradient = P_bar.new_zeros(self.n_parameters)
        for i, (s, block) in enumerate(self.blocks):
            gradient[i] = (P_bar[s, s] * constant_like(block.stationary, P_bar)).sum()
        for i, (_, dP, _) in enumerate(reversed(self.shape_slopes), 1):
            gradient[-i] = (P_bar * constant_like(dP, P_bar)).sum()
        return gradient


class GapSlope:
    """Derivatives in the gaps: dF = A F and dQ = F L F'."""

    def __init__(self, dynamics: Dynamics) -> None:
        blocks = zip(*(block.generator() for _, block in dynamics.blocks), strict=True)
        self.A, self.L = (torch.block_diag(*part) for part in blocks)

    def __call__(self, F: Tensor, F_bar: Tensor, Q_bar: Tensor) -> Tensor:
        """Contraction (n,) with F_bar and Q_bar (d, d, n)."""
        A, L = (constant_like(each, F)[..., None] for each in (self.A, self.L))
        spread = matmul(matmul(F, L), F.transpose(0, 1))
        return (F_bar * matmul(A, F) + Q_bar * spread).sum((0, 1))


class _Transition(torch.autograd.Function):
    """`Dynamics.transition` as a function of the gaps that autograd knows."""

    @staticmethod
    def forward(ctx: Any, gaps: Tensor, dynamics: Dynamics) -> tuple[Tensor, Tensor]:
        F, Q = dynamics.transition(gaps)
        ctx.save_for_backward(F)
        ctx.slope = GapSlope(dynamics)
        return F, Q

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, F_bar: Tensor, Q_bar: Tensor) -> tuple[Tensor, None]:
        (F,) = ctx.saved_tensors
        return ctx.slope(F, F_bar, Q_bar), None


def _logarithms(values: list[Any]) -> np.ndarray:
    """Of numbers and arrays, one after the other."""
    numbers = all(isinstance(value, float) for value in values)
    with np.errstate(divide="ignore"):
        return np.log(values if numbers else np.concatenate([*map(np.ravel, values)], dtype=float))


def _count_parameters(groups: Sequence[Sequence[Primitive]]) -> int:
    """Of blocks: a log variance each, and of each factor a log rate and perhaps a log shape."""
    return sum(1 + sum(1 + p.has_shape for p in group) for group in groups)


def _slices(sizes: Iterable[int]) -> list[slice]:
    """Where parts of some sizes lie one after the other."""
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
