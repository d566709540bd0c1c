"""The loop of Newton's method for c problems at once, wherever their observations are.

Each column has its own step length and its own end. What evaluates losses, gradients and directions
is handed in (`Objective`): features of all observations in memory (:mod:`.newton`), or sums over
blocks of them (:mod:`.newton_sums`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from skgp.inference.defaults import FORCING, LOSS_ROUNDING, MAX_HALVINGS, SUFFICIENT
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import Callback


class Objective(Protocol):
    """Negative log joint densities J of c columns of weights, at the weights where it stands."""

    weights: Tensor  # (m, c)
    loss: Tensor  # (c,), J there, nats
    total: Tensor  # (c,), weights of the observations
    zero_norm: Tensor | None  # (c,), norms of the gradients at zero weights; None: it stands there

    def gradient(self, columns: Tensor) -> Tensor:
        """Gradients (m, k) of the columns of some indices (k,)."""

    def direction(self, columns: Tensor, B: Tensor, forcing: Tensor) -> Any:
        """Solutions ``H_j d_j = b_j`` for B (m, k), of columns whose gradients were asked for.

        ``weights`` (m, k) and ``n_cg``, conjugate gradients taken; `forcing` (k,) is the relative
        residual that may be left.
        """

    def losses(self, step: Tensor) -> Tensor:
        """J (k,) after steps (k,) in the last direction."""

    def move(self, step: Tensor, after: Tensor) -> None:
        """Take these steps, after which the losses are `after` (k,)."""


@dataclass(frozen=True)
class Modes:
    """Outcome of Newton's method; every tensor float64."""

    weights: Tensor  # (m, c)
    loss: Tensor  # (c,), J at the weights, nats
    gradient_norm: Tensor  # (c,), relative to that at zero weights
    converged: bool  # whether every column met one of the tolerances
    history: list[dict]  # what the callback was told

    @property
    def n_iter(self) -> int:
        """Newton steps."""
        return len(self.history)


def newton_steps(
    at: Objective,
    *,
    tol: float,
    loss_tol: float,
    max_iter: int,
    callback: Callback | None,
) -> Modes:
    """Go on from where the objective stands to the modes; see :func:`.newton.fit_newton`."""
    norms, stopped = torch.zeros_like(at.loss), False
    settled = torch.zeros_like(at.loss, dtype=torch.bool)
    active, scale = torch.arange(len(at.loss), device=at.loss.device), at.zero_norm
    history: list[dict] = []
    while True:
        gradient = at.gradient(active)
        norm = _finite_norm(gradient, len(history))
        scale = norm if scale is None else scale
        norms[active] = norm / torch.where(scale > 0, scale, 1.0)[active]
        settled |= norms <= tol
        going = (~settled[active]).nonzero()[:, 0]
        active, gradient = active[going], gradient[:, going]
        if stopped or len(history) == max_iter or not len(active):
            break
        before = at.loss[active]
        direction = at.direction(active, -gradient, norms[active].sqrt().clamp(max=FORCING))
        slope = (gradient * direction.weights).sum(0)
        step, after = halved_steps(at.losses, before, slope)
        at.move(step, after)
        settled[active] = before - after <= loss_tol * at.total[active]
        info = {
            "loss": float(at.loss.sum()),
            "gradient_norm": float(norms.max()),
            "n_active": len(active),
            "n_cg": direction.n_cg,
            "step": float(step.min()),
        }
        history.append(info)
        stopped = callback is not None and bool(callback(len(history), info))
    converged = bool(settled.all())
    if not (stopped or converged):
        _warn(max_iter, float(norms.max()), tol)
    return Modes(at.weights, at.loss, norms, converged, history)


def _finite_norm(gradient: Tensor, n_iter: int) -> Tensor:
    """Norms (k,) of the columns of a gradient (m, k); FloatingPointError unless finite."""
    norm = torch.linalg.vector_norm(gradient, dim=0)
    if not bool(norm.isfinite().all()):
        raise FloatingPointError(
            f"The gradient is not finite after {n_iter} Newton steps. Look for NaN or inf "
            "in X, for overflowing features and for a prior_variance out of proportion."
        )
    return norm


def _warn(max_iter: int, norm: float, tol: float) -> None:
    warn_caller(
        f"Newton's method ended after max_iter={max_iter} steps at a relative gradient of "
        f"{norm:.1e}, short of tol={tol:.1e}. Raise max_iter, or lower the prior variance.",
        NumericalWarning,
    )


def halved_steps(
    loss: Callable[[Tensor], Tensor], before: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    """Step lengths (k,), 1 or halved until the losses (k,) fall enough (0 if never), and losses."""
    step = torch.ones_like(before)
    for _ in range(MAX_HALVINGS):
        after = loss(step)
        # Written as a negation so that NaN is refused as well.
        bad = ~(after <= before + SUFFICIENT * step * slope + LOSS_ROUNDING * before.abs())
        if not bool(bad.any()):
            return step, after
        step = torch.where(bad, 0.5 * step, step)
    return torch.where(bad, 0.0, step), torch.where(bad, before, after)
