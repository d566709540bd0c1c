r"""The state-space reading of a kernel expression on one column.

.. math:: s(x + t) = F(t) s(x) + N(0, Q(t)), \qquad f(x) = H s(x), \qquad
          k(t) = H F(t) P_0 H^\top, \quad t \ge 0.

`state_space` finds the structure once; `StateSpace.parameters` maps ``theta`` to the log variances
and log rates of its components, differentiably; `StateSpace.at` makes the matrices at numbers. So a
gradient in the parameters, which inference computes without autograd, becomes one in ``theta``.
"""

from __future__ import annotations

import copy

import torch
from sklearn.gaussian_process.kernels import Kernel
from torch import Tensor

from .defaults import TOLERANCE
from .expression import Binder, check_kernel, summands
from .sde_dynamics import Block, Dynamics
from .sde_expression import check_one_input, expand

__all__ = ["StateSpace", "has_state_space", "state_space"]


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


def state_space(kernel: Kernel, *, tolerance: float = TOLERANCE) -> StateSpace:
    """State-space form of a kernel expression.

    Parameters
    ----------
    kernel : Kernel
        On one column, without WhiteKernel (see `split_noise`). ActiveDims of that column are seen
        through.
    tolerance : float, default=1e-8
        Greatest error of a truncated Fourier series, relative to its variance, at the kernel's own
        hyper-parameters.

    Returns
    -------
    StateSpace

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

    Made by `state_space`.

    Attributes
    ----------
    kernel : Kernel
        A copy.
    n_states : int
        d.
    n_parameters : int
        q: the log variances of the components, then the log rates of their factors.
    order : list of slice
        The states of each component.
    """

    def __init__(self, kernel: Kernel, tolerance: float = TOLERANCE) -> None:
        self.kernel = copy.deepcopy(kernel)  # later changes by the caller must not reach it
        self.tolerance = tolerance
        self._bind = Binder(self.kernel)
        components = self._expand(None).components
        self._primitives = [[f.primitive for f in c.factors] for c in components]
        self.n_parameters = sum(1 + len(group) for group in self._primitives)
        dynamics = self.at()
        self.n_states = dynamics.n_states
        self.order = [s for s, _ in dynamics.blocks]

    def _expand(self, theta: Tensor | None):
        return expand(self._bind(theta, dtype=torch.float64), self.tolerance)

    def parameters(self, theta: Tensor | None = None) -> Tensor:
        """Log variances of the components and log rates of their factors, (q,).

        Parameters
        ----------
        theta : Tensor of shape (kernel.n_dims,), optional
            Gradients flow to it. None takes the kernel's own values.
        """
        components = self._expand(theta).components
        variances = [c.log_variance for c in components]
        return torch.stack(variances + [f.log_rate for c in components for f in c.factors])

    def error(self, theta: Tensor | None = None) -> float:
        """Bound of the greatest ``abs(k - k_approximate)``; 0 for kernels with an exact form."""
        with torch.no_grad():
            return self._expand(theta).error

    def at(self, parameters: Tensor | None = None) -> Dynamics:
        """Matrices at parameters (q,); by default those of the kernel's own hyper-parameters.

        Raises
        ------
        ValueError
            If the parameters have another shape.
        """
        if parameters is None:
            parameters = self.parameters()
        if parameters.shape != (self.n_parameters,):
            raise ValueError(
                f"parameters must have shape ({self.n_parameters},), got "
                f"{tuple(parameters.shape)}; StateSpace.parameters makes them."
            )
        values = iter(parameters.detach().exp().tolist())
        variances = [next(values) for _ in self._primitives]
        return Dynamics(
            [
                Block(variance, group, [next(values) for _ in group])
                for variance, group in zip(variances, self._primitives, strict=True)
            ]
        )

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
