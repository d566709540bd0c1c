r"""Unbiased estimators of the ELBO of QSGP, from a few rows and a few basis functions.

Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), write the evidence lower bound of
:math:`q(w) = N(\mu, C C^T)` under a Gaussian likelihood as (eq. 2)

.. math:: \text{ELBO} = -\tfrac12 L_\mu(\mu) - \tfrac12 L_\Sigma(C) - \tfrac12 L_\text{const}

and estimate each part from :math:`\tilde n` rows :math:`\tilde l` and independent samples
:math:`\tilde i, \tilde j, \tilde r` of the m basis functions: `quadratic_loss` (Theorem
1, and of the dense columns 2), `diagonal_loss`, `constant_loss` (Proposition 2).

===================================  ======================================================
paper                                code
===================================  ======================================================
:math:`m / \tilde m`                 ``i.weight``, the inverse inclusion probability
:math:`n / \tilde n`                 ``design.row_weight``
:math:`\Phi_{\tilde l, \tilde i}`    ``design.Phi_i (n_batch, |i|)``
:math:`S_{\tilde j, \tilde i}`       ``design.S_ji (|j|, |i|)``
:math:`y_{\tilde l}`                 ``y (n_batch,)``
:math:`\mu, c_1, c_2, \dots`         columns of ``V (m, q)``
===================================  ======================================================

Gradients with respect to the variational parameters are explicit and sparse: one block for the rows
``i`` of V and one for the rows ``j``, to be *added* where the samples overlap. Those with respect
to hyper-parameters come from autograd, through features and noise variance.

Deviations, all unbiased, each with the literal form as an option or beside it:

- ``symmetric=True`` estimates :math:`y^T \Phi \mu` by the mean over both samples instead of
  :math:`\tilde i` alone. Both gradients then contain a residual, :math:`\Phi_i^T(\hat f_j - y)`,
  which is small near the optimum; in the literal form :math:`\Phi_i^T (\hat f_j - 2 y)` and
  :math:`\Phi_j^T \hat f_i` are not.
- For a diagonal S the sum :math:`\sum_r s_{rr} v_r^2` is single: it is estimated as the mean over
  both samples. The literal double sampling needs pairs with i = j, met with probability
  :math:`\tilde m / m` and weighted :math:`m^2 / \tilde m^2` (``dense_precision=True``).
- The same holds for the columns of C that have only a diagonal entry (`diagonal_loss`).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.sampling import IndexSet

__all__ = [
    "Estimate",
    "SampledDesign",
    "constant_loss",
    "diagonal_loss",
    "precision_loss",
    "quadratic_loss",
    "sample_design",
]

Scalar = float | Tensor


@dataclass(frozen=True)
class SampledDesign:
    """The parts of Phi and S that one iteration sees.

    Attributes
    ----------
    i, j : IndexSet
        Independent samples of basis functions.
    Phi_i, Phi_j : Tensor of shape (n_batch, |i|) and (n_batch, |j|)
    row_weight : float
        n / n_batch.
    n_features : int
        m.
    S_ji : Tensor of shape (|j|, |i|) or None
        Set when the precision is treated as dense.
    s_i, s_j : Tensor of shape (|i|,) and (|j|,), or None
        Diagonal of the precision, set when it is treated as diagonal.
    """

    i: IndexSet
    j: IndexSet
    Phi_i: Tensor
    Phi_j: Tensor
    row_weight: float
    n_features: int
    S_ji: Tensor | None = None
    s_i: Tensor | None = None
    s_j: Tensor | None = None


@dataclass(frozen=True)
class Estimate:
    """An estimate of a loss and of its sparse gradient.

    Attributes
    ----------
    value : Tensor of shape () or (q,)
        Of the loss, one for each column.
    grad_i : Tensor of shape (|i|, q)
        Gradient with respect to rows i.
    grad_j : Tensor of shape (|j|, q)
        Gradient with respect to rows j; add it to the other's where they overlap.
    """

    value: Tensor
    grad_i: Tensor
    grad_j: Tensor

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.value + other.value, self.grad_i + other.grad_i, self.grad_j + other.grad_j
        )

    def scaled(self, factor: float) -> "Estimate":
        """Multiply values and gradients."""
        return Estimate(factor * self.value, factor * self.grad_i, factor * self.grad_j)


def sample_design(
    basis: StochasticBasis,
    X_batch: Tensor,
    i: IndexSet,
    j: IndexSet,
    *,
    n: int,
    theta: Tensor | None = None,
    dense_precision: bool | None = None,
) -> SampledDesign:
    """Evaluate the features and precisions of one iteration.

    Parameters
    ----------
    basis : StochasticBasis
    X_batch : Tensor of shape (n_batch, d)
        Rows drawn uniformly from the n rows of the data.
    i, j : IndexSet
    n : int
        Rows of the whole data.
    theta : Tensor, optional
        Log hyper-parameters; gradients flow to it.
    dense_precision : bool, optional
        Whether to sample S in two dimensions as the paper does; by default only if it is dense.

    Returns
    -------
    SampledDesign
        O(n_batch (\\|i\\| + \\|j\\|) d), and O(\\|i\\| \\|j\\| d) for a dense precision.
    """
    dense = not basis.diagonal_precision if dense_precision is None else dense_precision
    return SampledDesign(
        i=i,
        j=j,
        Phi_i=basis.features(X_batch, i.indices, theta),
        Phi_j=basis.features(X_batch, j.indices, theta),
        row_weight=n / len(X_batch),
        n_features=basis.n_features,
        S_ji=basis.precision(j.indices, i.indices, theta) if dense else None,
        s_i=None if dense else basis.precision_diag(i.indices, theta),
        s_j=None if dense else basis.precision_diag(j.indices, theta),
    )


def quadratic_loss(
    design: SampledDesign,
    V_i: Tensor,
    V_j: Tensor,
    noise_variance: Scalar,
    *,
    y: Tensor | None = None,
    symmetric: bool = True,
) -> Estimate:
    r"""Estimate :math:`\tfrac{1}{\sigma^2} \|\Phi v\|^2 + v^T S v` for every column v of V.

    What Theorems 1 and 2 have in common. With `y`, the first column also gets the linear term
    :math:`-\tfrac{2}{\sigma^2} y^T \Phi v` of Theorem 1.

    Parameters
    ----------
    design : SampledDesign
    V_i, V_j : Tensor of shape (|i|, q) and (|j|, q)
        Rows i and j of V.
    noise_variance : float or Tensor of shape ()
    y : Tensor of shape (n_batch,), optional
    symmetric : bool, default=True
        Split the linear term between both samples.

    Returns
    -------
    Estimate
        Values of shape (q,), in O(n_batch (\|i\| + \|j\|) q).
    """
    w_i, w_j = design.i.weight, design.j.weight
    scale = design.row_weight / noise_variance
    f_i = w_i * (design.Phi_i @ V_i)  # (n_batch, q), unbiased for Phi V
    f_j = w_j * (design.Phi_j @ V_j)
    value = scale * (f_i * f_j).sum(0)
    residual_i, residual_j = f_j, f_i
    if y is not None:
        share_i, share_j = (1.0, 1.0) if symmetric else (2.0, 0.0)
        linear = torch.zeros_like(f_i)
        linear[:, 0] = y
        value = value - scale * (linear * (share_i * f_i + share_j * f_j)).sum(0)
        residual_i, residual_j = f_j - share_i * linear, f_i - share_j * linear
    prior = precision_loss(design, V_i, V_j)
    return prior + Estimate(
        value,
        (w_i * scale) * (design.Phi_i.T @ residual_i),
        (w_j * scale) * (design.Phi_j.T @ residual_j),
    )


def precision_loss(design: SampledDesign, V_i: Tensor, V_j: Tensor) -> Estimate:
    """Estimate :math:`v^T S v` for every column v of V, given its rows i and j."""
    w_i, w_j = design.i.weight, design.j.weight
    if design.S_ji is not None:
        S_v_i = (w_i * w_j) * (design.S_ji @ V_i)
        grad_i = (w_i * w_j) * (design.S_ji.T @ V_j)
        return Estimate((V_j * S_v_i).sum(0), grad_i, S_v_i)
    grad_i = w_i * design.s_i[:, None] * V_i  # type: ignore[index]
    grad_j = w_j * design.s_j[:, None] * V_j  # type: ignore[index]
    return Estimate(0.5 * ((V_i * grad_i).sum(0) + (V_j * grad_j).sum(0)), grad_i, grad_j)


def diagonal_loss(
    design: SampledDesign, c_i: Tensor, noise_variance: Scalar, in_tail: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Theorem 2 for columns :math:`c_r = e_r c_{rr}`, whose quadratic form is a single term.

    .. math:: \sum_{r > k} \big(\tfrac{1}{\sigma^2} \phi_r^T \phi_r + s_{rr}\big) c_{rr}^2
              - 2 \log c_{rr} \approx \tfrac{m}{\tilde m} \sum_{r \in \tilde i, r > k}
              \big(\tfrac{n}{\sigma^2 \tilde n} \textstyle\sum_l \phi_{lr}^2 + s_{rr}\big)
              c_{rr}^2 - 2 \log c_{rr}

    Its minimum is Proposition 1.

    Parameters
    ----------
    design : SampledDesign
        With ``s_i``: `S_ji` alone lacks the diagonal.
    c_i : Tensor of shape (|i|,)
        Diagonal of C at i, positive.
    noise_variance : float or Tensor of shape ()
    in_tail : bool Tensor of shape (|i|,), optional
        Which of i count (r > k); all by default.

    Returns
    -------
    value : Tensor of shape ()
    gradient : Tensor of shape (|i|,)
        With respect to `c_i`.
    """
    weight = design.i.weight
    if design.s_i is None:
        raise ValueError("diagonal_loss needs the precision's diagonal: dense_precision=False.")
    curvature = design.row_weight / noise_variance * design.Phi_i.square().sum(0) + design.s_i
    counted = torch.ones_like(c_i) if in_tail is None else in_tail.to(c_i)
    terms = curvature * c_i.square() - 2 * c_i.log()
    gradient = 2 * (curvature * c_i - 1 / c_i)
    return weight * (counted * terms).sum(), weight * counted * gradient


def constant_loss(
    log_s_i: Tensor, i: IndexSet, y: Tensor, noise_variance: Scalar, *, n: int, m: int
) -> Tensor:
    r"""Proposition 2: the part of the ELBO that hyper-parameters alone decide.

    .. math:: L_\text{const} \approx -\tfrac{m}{\tilde m} \sum_{r \in \tilde i} \log s_{rr} - m
              + n \log(2 \pi \sigma^2) + \tfrac{n}{\sigma^2 \tilde n} y_l^T y_l

    Parameters
    ----------
    log_s_i : Tensor of shape (|i|,)
        ``basis.log_precision_diag(i.indices, theta)``.
    i : IndexSet
    y : Tensor of shape (n_batch,)
        Targets of the sampled rows.
    noise_variance : float or Tensor of shape ()
    n, m : int
        Rows and basis functions.

    Returns
    -------
    Tensor of shape ()
    """
    log_noise = (
        noise_variance.log() if isinstance(noise_variance, Tensor) else math.log(noise_variance)
    )
    fit = n / len(y) * y.square().sum() / noise_variance
    return fit - i.weight * log_s_i.sum() - m + n * (np.log(2 * np.pi) + log_noise)
