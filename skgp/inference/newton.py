r"""Newton's method for generalised linear models on streamed features, many columns at once.

Column j of the weights minimises its negative log joint density (the constant of the prior left
out),

.. math::
    J_j(w) = -\sum_i s_{ij} \log p(y_{ij} \mid o_j + \phi_i^T w) + \frac{\|w\|^2}{2 a_j}, \qquad
    H_j = \Phi^T \operatorname{diag}(c_j) \Phi + I / a_j, \quad
    c_{ij} = -s_{ij} \frac{\partial^2 \log p(y_{ij} \mid f_{ij})}{\partial f_{ij}^2}.

The minimum is the mode of :math:`w \sim N(0, a_j I)` given y, around which a Laplace approximation
is built (Rasmussen and Williams, 2006, section 3.4, here in the space of the weights). The columns,
one-vs-rest problems, share every pass over the features and nothing else: each has its own
curvature, its own step length and its own end.

A step solves :math:`H_j d_j = -\nabla J_j`: by a Cholesky factor of every Hessian where that is
cheap, else roughly, by a few conjugate gradients (inexact Newton: Dembo, Eisenstat and Steihaug,
1982). Either way :math:`\Phi d_j` is at hand, so that halving a step costs no pass over the
features.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import EXACT_FLOPS, PRECONDITIONER_DRAWS
from skgp.inference.newton_steps import (
    CGDirections,
    Direction,
    Modes,
    exact_directions,
    newton_steps,
)
from skgp.inference.weights.design import StreamedDesign
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback

Directions = Callable[[Any, Tensor, Tensor, Tensor, Tensor], Direction]


@dataclass(frozen=True)
class NewtonFit(Modes):
    """Outcome of :func:`fit_newton`; every tensor float64."""

    latent: Tensor  # (n, c), offset + Phi weights
    n_products: int  # passes over all the features, those of preconditioners aside


def fit_newton(
    problem: "NewtonProblem",
    *,
    start: Tensor | None = None,
    solver: str | Directions = "auto",
    tol: float = 1e-4,
    loss_tol: float = 1e-5,
    max_iter: int = 30,
    preconditioner_rows: int = PRECONDITIONER_DRAWS,
    generator: torch.Generator | None = None,
    callback: Callback | None = None,
) -> NewtonFit:
    r"""Find the mode of the weights of c problems that share their features.

    Parameters
    ----------
    problem : NewtonProblem
        See :func:`newton_problem`.
    start : Tensor of shape (m, c), optional
        First weights; costs two more passes. Zero by default.
    solver : {"auto", "exact", "cg"} or callable, default="auto"
        How the Newton equations are solved; "auto" is "exact" up to 1e10 flops a step. A callable
        takes and returns what :func:`.exact_directions` does.
    tol : float, default=1e-4
        A column ends when its gradient is that small relative to the one at zero weights.
    loss_tol : float, default=1e-5
        It ends too after a step that lowers its loss by no more than this per unit of row weight;
        the mode is nearer still.
    max_iter : int, default=30
        Newton steps.
    preconditioner_rows : int, default=6000
        Rows expected in the subsampled Hessian that preconditions "cg".
    generator : torch.Generator, optional
        Draws the rows of the preconditioner of "cg", which requires it.
    callback : callable, optional
        ``callback(step, info)`` after each step, with ``loss`` (sum over the columns),
        ``gradient_norm`` (largest, before the step), ``n_active`` (columns that moved), ``n_cg``
        (0 when exact) and ``step`` (shortest step length); True stops and keeps the state.

    Returns
    -------
    NewtonFit
        The loss of no column ever rises from step to step.

    Raises
    ------
    ValueError
        If "cg" is asked for, or chosen by "auto", without a generator.

    Warns
    -----
    NumericalWarning
        When `max_iter` steps meet no tolerance.

    Notes
    -----
    "exact": :math:`O(c (n m^2 + m^3))` a step, two m x m matrices at least. "cg": a step costs at
    most 9 passes of :math:`O(n m c)` over the features. Two to four times in a fit it pays
    :math:`O(p m^2 + m^3)` for the preconditioner of p rows; two m x m matrices. Memory beside the
    design's: about ten (n, c) and ten (m, c) float64.

    Examples
    --------
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.likelihoods import Bernoulli
    >>> from skgp.inference.weights.bases import WhitenedInducingBasis
    >>> X = torch.linspace(0, 3, 20, dtype=torch.float64)[:, None]
    >>> design = StreamedDesign(WhitenedInducingBasis(RBF(1.0), X[::4]), X)
    >>> Y = torch.where(X < 1, -1.0, 1.0).double()
    >>> rows = torch.Generator().manual_seed(0)
    >>> problem = newton_problem(design, Y, Bernoulli(), prior_variance=100.0)
    >>> fit = fit_newton(problem, generator=rows)
    >>> fit.converged, bool((fit.latent.sign() == Y).all())
    (True, True)
    """
    design, solve = problem.design, solver if callable(solver) else exact_directions
    c = problem.Y.shape[1]
    flops = c * (design.n_rows + design.n_features / 3) * design.n_features**2
    if solver == "cg" or (solver == "auto" and flops > EXACT_FLOPS):
        if generator is None:
            raise ValueError(f"solver={solver!r} draws rows of the features; give a generator.")
        solve = CGDirections(preconditioner_rows, generator).solve
    at = _InMemory(problem, start, solve)
    modes = newton_steps(at, tol=tol, loss_tol=loss_tol, max_iter=max_iter, callback=callback)
    return NewtonFit(**vars(modes), latent=at.latent, n_products=at.n_products)


@dataclass(frozen=True)
class NewtonProblem:
    """The columns that are still being solved for; every tensor float64."""

    design: StreamedDesign
    likelihood: Likelihood
    Y: Tensor  # (n, k)
    offset: Tensor  # (k,) or (n, k)
    precision: Tensor  # (k,), 1 / a
    row_weight: Tensor  # (n, k)
    is_signed: bool = False  # whether directions are told of negative curvatures

    def select(self, columns: Tensor) -> "NewtonProblem":
        """The problem of some columns."""
        if len(columns) == self.Y.shape[1]:
            return self
        return replace(
            self,
            Y=self.Y[:, columns],
            offset=self.offset[..., columns],
            precision=self.precision[columns],
            row_weight=self.row_weight[:, columns],
        )

    def slope(self, latent: Tensor) -> Tensor:
        """First derivative of the log-likelihood, (n, k)."""
        return self.row_weight * self.likelihood.derivatives(self.Y, latent)[0]

    def curvature(self, latent: Tensor) -> Tensor:
        """Curvature of the negative log-likelihood, (n, k), 0 where it is negative."""
        # Rounding must not let a Hessian lose its definiteness.
        return self.signed_curvature(latent).clamp(min=0)

    def signed_curvature(self, latent: Tensor) -> Tensor:
        """The same where the likelihood is not log-concave, and negative."""
        return -self.row_weight * self.likelihood.derivatives(self.Y, latent)[1]

    def loss(self, latent: Tensor, square_norm: Tensor) -> Tensor:
        """J (k,) from latent values (n, k) and squared norms of the weights (k,)."""
        log_prob = self.row_weight * self.likelihood.log_prob(self.Y, latent)
        return 0.5 * self.precision * square_norm - log_prob.sum(0)


def newton_problem(
    design: StreamedDesign,
    Y: Tensor,
    likelihood: Likelihood,
    *,
    offset: Tensor | None = None,
    prior_variance: float | Tensor = 1.0,
    row_weight: Tensor | None = None,
) -> NewtonProblem:
    r"""Check the data of c problems and bring them to one form.

    Parameters
    ----------
    design : StreamedDesign
        :math:`\Phi`, without sample weights.
    Y : Tensor of shape (n, c)
        Observations, a column a problem.
    likelihood : Likelihood
        Log-concave in f, e.g. `skgp.likelihoods.Bernoulli`.
    offset : Tensor of shape (c,) or (n, c), optional
        Constants :math:`o_j` of the latent functions; 0 by default.
    prior_variance : float or Tensor of shape (c,), default=1.0
        :math:`a_j`.
    row_weight : Tensor of shape (n,) or (n, c), optional
        :math:`s_{ij} \ge 0`; 1 by default.
    """
    check_unweighted(design)
    if Y.ndim != 2 or Y.shape[0] != design.n_rows:
        raise ValueError(f"Y must have shape ({design.n_rows}, c); got {tuple(Y.shape)}.")
    Y = Y.to(design.device, torch.float64)
    c = Y.shape[1]
    offset = Y.new_zeros(c) if offset is None else offset.to(Y)
    # One a row is a latent mean, whose faults the gradient names.
    if offset.shape != Y.shape and not (offset.shape == (c,) and bool(offset.isfinite().all())):
        raise ValueError(
            f"offset must be {c} finite numbers, one a column of Y; got {offset.tolist()}."
        )
    precision = 1 / prior_variances(prior_variance, c).to(Y)
    weight = _row_weight(row_weight, Y)
    return NewtonProblem(design, likelihood, Y, offset, precision, weight)


def prior_variances(prior_variance: float | Tensor, n_columns: int) -> Tensor:
    """One prior variance a column, (c,) float64; a ValueError unless positive and finite."""
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
    """The row weights as (n, c), float64, after checking them."""
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


class _InMemory:
    """`NewtonObjective` with the latent values that the weights make, (n, c), in memory."""

    def __init__(self, problem: NewtonProblem, start: Tensor | None, solve: Callable) -> None:
        design, c = problem.design, problem.Y.shape[1]
        self._whole, self._solve, self.n_products = problem, solve, 0
        self.weights = problem.Y.new_zeros(design.n_features, c)
        self.latent = problem.offset.expand_as(problem.Y).clone()
        self.total, self.zero_norm = problem.row_weight.sum(0), None
        if start is not None:
            check_start(start, self.weights)
            zero = design.rmatmul(problem.slope(self.latent))
            self.zero_norm = torch.linalg.vector_norm(zero, dim=0)
            self.weights += start.to(self.weights)
            self.latent += design.matmul(self.weights)
            self.n_products = 2
        self.loss = problem.loss(self.latent, self.weights.square().sum(0))

    def gradient(self, columns: Tensor) -> Tensor:
        r"""The gradient :math:`\Lambda W - \Phi^T \partial \log p(Y \mid F)` (m, k); one pass."""
        part = self._whole.select(columns)
        data = part.design.rmatmul(part.slope(self.latent[:, columns]))
        self.n_products += 1
        return part.precision * self.weights[:, columns] - data

    def direction(self, columns: Tensor, B: Tensor, forcing: Tensor) -> Direction:
        """Solve H d = B of some columns, H the Hessian (or signed) at the latent values held.

        By conjugate gradients to the relative tolerance `forcing` (c,) or by a factor, as `solve`
        has it; `n_products` of the result are its passes over the features.
        """
        self._columns, self._part = columns, self._whole.select(columns)
        told = self._part.signed_curvature if self._part.is_signed else self._part.curvature
        curvature = told(self.latent[:, columns])
        self._direction = self._solve(
            self._part.design, self._part.precision, curvature, B, forcing
        )
        self.n_products += self._direction.n_products
        return self._direction

    def losses(self, step: Tensor) -> Tensor:
        """Losses (k,) after a step (k,) along the direction; O(n k), for its image is known."""
        W, D = self.weights[:, self._columns], self._direction
        norm = W.square().sum(0) + 2 * step * (W * D.weights).sum(0)
        norm = norm + step.square() * D.weights.square().sum(0)
        return self._part.loss(self.latent[:, self._columns] + step * D.image, norm)

    def move(self, step: Tensor, after: Tensor) -> None:
        """Take the step (k,), after which the losses are `after` (k,); O(n k)."""
        self.weights[:, self._columns] += step * self._direction.weights
        self.latent[:, self._columns] += step * self._direction.image
        self.loss[self._columns] = after


def check_start(start: Tensor, weights: Tensor) -> None:
    """Raise a ValueError unless first weights have the shape of `weights`."""
    if start.shape != weights.shape:
        raise ValueError(f"start must have shape {tuple(weights.shape)}; got {tuple(start.shape)}.")
