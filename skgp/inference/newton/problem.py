"""What Newton's method minimises: the data of several columns, checked and in one form."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from skgp.inference.weights.design import StreamedDesign

__all__ = [
    "NewtonProblem",
    "PointLikelihood",
    "check_unweighted",
    "laplace_curvature",
    "newton_problem",
    "prior_variances",
]


class PointLikelihood(Protocol):
    """What Newton's method asks of a likelihood; everything elementwise."""

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Return ``log p(y | f)`` in nats."""

    def derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first two derivatives of ``log p(y | f)`` with respect to f."""


def laplace_curvature(
    likelihood: PointLikelihood, Y: Tensor, latent: Tensor, row_weight: Tensor | None = None
) -> Tensor:
    r"""Curvature :math:`c_{ij}` of the negative log-likelihood, of shape (n, c), float64.

    Parameters
    ----------
    likelihood : PointLikelihood
    Y, latent : Tensor of shape (n, c)
        Observations; latent values, offsets included (``NewtonFit.latent``).
    row_weight : Tensor of shape (n,) or (n, c), optional

    Raises
    ------
    ValueError
        If `row_weight` has another shape, or is negative or not finite.
    """
    second = likelihood.derivatives(Y.double(), latent.double())[1]
    # Rounding must not let a Hessian lose its definiteness.
    return (-_row_weight(row_weight, Y) * second).clamp(min=0)


@dataclass(frozen=True)
class NewtonProblem:
    """The columns that are still being solved for; every tensor float64."""

    design: StreamedDesign
    likelihood: PointLikelihood
    Y: Tensor  # (n, k)
    offset: Tensor  # (k,)
    precision: Tensor  # (k,), 1 / a
    row_weight: Tensor  # (n, k)

    def select(self, columns: Tensor) -> "NewtonProblem":
        """Return the problem of some columns."""
        if len(columns) == self.Y.shape[1]:
            return self
        vectors = self.offset[columns], self.precision[columns]
        weight = self.row_weight[:, columns]
        return NewtonProblem(self.design, self.likelihood, self.Y[:, columns], *vectors, weight)

    def slope(self, latent: Tensor) -> Tensor:
        """First derivative of the log-likelihood, (n, k)."""
        return self.row_weight * self.likelihood.derivatives(self.Y, latent)[0]

    def loss(self, latent: Tensor, square_norm: Tensor) -> Tensor:
        """J (k,) from latent values (n, k) and squared norms of the weights (k,)."""
        log_prob = self.row_weight * self.likelihood.log_prob(self.Y, latent)
        return 0.5 * self.precision * square_norm - log_prob.sum(0)


def newton_problem(
    design: StreamedDesign,
    Y: Tensor,
    likelihood: PointLikelihood,
    offset: Tensor | None,
    prior_variance: float | Tensor,
    row_weight: Tensor | None,
) -> NewtonProblem:
    """Check the data of :func:`fit_newton` and bring them to one form."""
    check_unweighted(design)
    if Y.ndim != 2 or Y.shape[0] != design.n_rows:
        raise ValueError(f"Y must have shape ({design.n_rows}, c); got {tuple(Y.shape)}.")
    Y = Y.to(design.device, torch.float64)
    c = Y.shape[1]
    offset = Y.new_zeros(c) if offset is None else offset.to(Y)
    if offset.shape != (c,) or not bool(offset.isfinite().all()):
        raise ValueError(
            f"offset must be {c} finite numbers, one a column of Y; got {offset.tolist()}."
        )
    precision = 1 / prior_variances(prior_variance, c).to(Y)
    weight = _row_weight(row_weight, Y)
    return NewtonProblem(design, likelihood, Y, offset, precision, weight)


def prior_variances(prior_variance: float | Tensor, n_columns: int) -> Tensor:
    """Return one prior variance a column, (c,) float64; a ValueError unless positive, finite."""
    values = torch.as_tensor(prior_variance, dtype=torch.float64)
    if values.shape not in ((), (n_columns,)) or not bool((values.isfinite() & (values > 0)).all()):
        raise ValueError(
            f"prior_variance must be positive and finite, one number or {n_columns}; got "
            f"{values.tolist()}."
        )
    return values.expand(n_columns)


def check_unweighted(design: StreamedDesign) -> None:
    """Raise a ValueError if the design scales its rows, which would scale latent values too."""
    if design.is_weighted:
        raise ValueError(
            "The design must have no sample_weight, which would scale the latent values too; pass "
            "the weights as row_weight."
        )


def _row_weight(row_weight: Tensor | None, Y: Tensor) -> Tensor:
    """Return the row weights as (n, c), float64, after checking them."""
    if row_weight is None:
        return torch.ones_like(Y, dtype=torch.float64)
    if row_weight.shape not in (Y.shape[:1], Y.shape):
        raise ValueError(
            f"row_weight must have shape {tuple(Y.shape[:1])} or {tuple(Y.shape)}; got "
            f"{tuple(row_weight.shape)}."
        )
    if not bool((torch.isfinite(row_weight) & (row_weight >= 0)).all()):
        raise ValueError(
            "row_weight must be finite and not negative; got values from "
            f"{float(row_weight.min()):.3g} to {float(row_weight.max()):.3g}."
        )
    column = row_weight[:, None] if row_weight.ndim == 1 else row_weight
    return column.to(Y.device, torch.float64).expand(Y.shape)
