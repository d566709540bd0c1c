r"""Unbiased estimators of the ELBO of QSGP, from a few rows and a few basis functions.

Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), write the evidence lower bound of
:math:`q(w) = N(\mu, C C^T)` under a Gaussian likelihood as (eq. 2)

.. math:: \text{ELBO} = -\tfrac12 L_\mu(\mu) - \tfrac12 L_\Sigma(C) - \tfrac12 L_\text{const}

and estimate each part from :math:`\tilde n` rows :math:`\tilde l` and independent samples
:math:`\tilde i, \tilde j, \tilde r` of the m basis functions: `quadratic_loss` (Theorem 1, and of
the dense columns of C Theorem 2), `diagonal_loss` (Theorem 2, the others), `constant_loss`
(Proposition 2).

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

Deviations, all unbiased:

- :math:`y^T \Phi \mu` is estimated by the mean over both samples instead of :math:`\tilde i` alone.
  Both gradients then contain a residual, :math:`\Phi_i^T(\hat f_j - y)`, which is small near the
  optimum; in the literal form :math:`\Phi_i^T (\hat f_j - 2 y)` and :math:`\Phi_j^T \hat f_i` are
  not.
- For a diagonal S the sum :math:`\sum_r s_{rr} v_r^2` is single: it is estimated as the mean over
  both samples. The literal double sampling needs pairs with i = j, met with probability
  :math:`\tilde m / m` and weighted :math:`m^2 / \tilde m^2`.
- The same holds for the columns of C that have only a diagonal entry (`diagonal_loss`).

Control variates (section 2.4, appendix F)
------------------------------------------
A quadratic form :math:`v^T M v` estimated from two samples of basis functions,
:math:`\tfrac{m^2}{\tilde m^2} v_j^T M_{j,i} v_i`, loses variance when the same estimate for a
low-rank :math:`B^T A B \approx M` is subtracted and its expectation :math:`(Bv)^T A\, Bv` added:

- ``M = (n / n_batch) Phi_l' Phi_l`` with ``B = sqrt(n / n_support) Phi_p`` for fixed support rows
  p, eq. (3), for the mean and every dense column of C. Eq. (3) lets each support row stand for
  n / n_support rows alike (A = I); here A projects *all* rows on the support rows
  (`projection_weights`, not in the paper). It costs a matrix of the rank squared, and as much
  variance falls at rank 100 as by eq. (3) at rank 300;
- ``M = S = K(Z, Z)`` with the Nystrom factor ``B = L^-1 K(U, Z)``, ``K(U, U) = L L'`` (F.2), A = I.

Proposition 3: as iterations move few entries of v, the running sums :math:`a = B v` are kept by
:math:`a \mathrel{+}= B_{:,i}\,\Delta v_i`, at a cost independent of n and m. Under empirical Bayes
the features of B would stay where they were first built (F.3), from which the hyper-parameters
soon are too far to be of use: a length scale that halves stretches the function. Here every
sampling unit has hyper-parameters of its own, those at which its columns were built last. A visit
builds them anew and lets a follow, :math:`a \mathrel{+}= (B^\text{new}_{:,i} - B^\text{old}_{:,i})
v_i`, still at a cost independent of n and m. Any columns leave the estimate unbiased as long as
those of the estimate are those of a.

The gradient :math:`2 B^T A a` of the expectation is dense, and must be estimated from the entries
that an iteration touches. Each sample gets its own copy, :math:`(m / \tilde m) B_i^T A a`, of the
weight that the other terms have: given that a function is in i, what it sees is an unbiased
estimate of (half) its gradient and vanishes in the mean at the optimum. The paper (F.1) scales the
entries in the union of both samples by :math:`m / |\tilde i \cup \tilde j|`: the terms of one
function then carry different weights, and the noise of the sparsity stays
(``examples/papers/qsgp_figure1.py`` shows both). The price is a slightly larger variance of this
term alone, by :math:`2 (w - 1)` against :math:`4 (1 / (2/w - 1/w^2) - 1)` times its squared half.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from skgp.inference.defaults import NYSTROM_JITTER, PROJECTION_JITTER
from skgp.inference.stochastic.basis import IndexSet, StochasticBasis
from skgp.kernels import gram
from skgp.linalg.cholesky import tri_solve

Scalar = float | Tensor
Factor = Callable[[IndexSet], Tensor]


@dataclass(frozen=True)
class SampledDesign:
    """The parts of Phi and S that one iteration sees."""

    i: IndexSet  # independent samples of basis functions
    j: IndexSet
    Phi_i: Tensor  # (n_batch, |i|)
    Phi_j: Tensor  # (n_batch, |j|)
    row_weight: float  # n / n_batch
    S_ji: Tensor | None = None  # (|j|, |i|), of a dense S
    s_i: Tensor | None = None  # (|i|,), of a diagonal S
    s_j: Tensor | None = None  # (|j|,)

    def detached(self) -> "SampledDesign":
        """Without the graph to theta."""
        return replace(self, Phi_i=self.Phi_i.detach(), Phi_j=self.Phi_j.detach())


@dataclass(frozen=True)
class Estimate:
    """An estimate of a loss and of its sparse gradient."""

    value: Tensor  # (q,), one a column
    grad_i: Tensor  # (|i|, q), with respect to rows i
    grad_j: Tensor  # (|j|, q), to be added to the other's where they overlap

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.value + other.value, self.grad_i + other.grad_i, self.grad_j + other.grad_j
        )


def sample_design(
    basis: StochasticBasis,
    X_batch: Tensor,  # (n_batch, d), drawn uniformly from n rows
    i: IndexSet,
    j: IndexSet,
    *,
    n: int,
    theta: Tensor | None = None,
) -> SampledDesign:
    """Evaluate features and precisions, O(n_batch (|i| + |j|) d), and O(|i| |j| d) for a dense S.

    Gradients flow to theta.
    """
    Phi_i, Phi_j = (basis.sampled(X_batch, k, theta) for k in (i, j))
    weight = n / len(X_batch)
    if basis.diagonal_precision:
        s_i, s_j = (k.share * basis.precision_diag(k.indices, theta) for k in (i, j))
        return SampledDesign(i, j, Phi_i, Phi_j, weight, s_i=s_i, s_j=s_j)
    S_ji = basis.precision(j.indices, i.indices, theta)  # type: ignore[attr-defined]
    return SampledDesign(i, j, Phi_i, Phi_j, weight, S_ji)


def quadratic_loss(
    design: SampledDesign,
    V_i: Tensor,  # (|i|, q), rows i of V
    V_j: Tensor,  # (|j|, q)
    noise_variance: Scalar,
    *,
    y: Tensor | None = None,  # (n_batch,)
) -> Estimate:
    r"""Estimate :math:`\tfrac{1}{\sigma^2} \|\Phi v\|^2 + v^T S v` for every column v of V.

    What Theorems 1 and 2 have in common. With `y`, the first column also gets the linear term
    :math:`-\tfrac{2}{\sigma^2} y^T \Phi v` of Theorem 1, which is then

    .. math:: L_\mu \approx -\tfrac{2nm}{\sigma^2 \tilde n \tilde m} y_l^T \Phi_{l,i} \mu_i
              + \tfrac{n m^2}{\sigma^2 \tilde n \tilde m^2} \mu_j^T \Phi_{l,j}^T \Phi_{l,i} \mu_i
              + \tfrac{m^2}{\tilde m^2} \mu_j^T S_{j,i} \mu_i

    but for the deviations of the module. O(n_batch (\|i\| + \|j\|) q).
    """
    w_i, w_j = design.i.weight, design.j.weight
    scale = design.row_weight / noise_variance
    f_i = w_i * (design.Phi_i @ V_i)  # (n_batch, q), unbiased for Phi V
    f_j = w_j * (design.Phi_j @ V_j)
    value = scale * (f_i * f_j).sum(0)
    residual_i, residual_j = f_j, f_i
    if y is not None:
        linear = torch.zeros_like(f_i)
        linear[:, 0] = y
        value = value - scale * (linear * (f_i + f_j)).sum(0)
        residual_i, residual_j = f_j - linear, f_i - linear
    return precision_loss(design, V_i, V_j) + Estimate(
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
    design: SampledDesign, c_i: Tensor, noise_variance: Scalar, in_tail: Tensor
) -> Tensor:
    r"""Theorem 2 for columns :math:`c_r = e_r c_{rr}`, whose quadratic form is a single term.

    .. math:: \sum_{r > k} \big(\tfrac{1}{\sigma^2} \phi_r^T \phi_r + s_{rr}\big) c_{rr}^2
              - 2 \log c_{rr} \approx \tfrac{m}{\tilde m} \sum_{r \in \tilde i, r > k}
              \big(\tfrac{n}{\sigma^2 \tilde n} \textstyle\sum_l \phi_{lr}^2 + s_{rr}\big)
              c_{rr}^2 - 2 \log c_{rr}

    for a diagonal S, from the diagonal `c_i` (|i|,) of C; `in_tail` (|i|,) tells r > k. Its minimum
    is Proposition 1.
    """
    data = design.row_weight / noise_variance * design.Phi_i.square().sum(0)  # (|i|,)
    curvature = data + design.s_i  # type: ignore[operator]
    terms = curvature * c_i.square() - 2 * c_i.log()
    return design.i.weight * (in_tail.to(c_i) * terms).sum()


def constant_loss(
    s_i: Tensor, i: IndexSet, y: Tensor, noise_variance: Scalar, *, n: int, m: int
) -> Tensor:
    r"""Proposition 2: the part of the ELBO that hyper-parameters alone decide.

    .. math:: L_\text{const} \approx -\tfrac{m}{\tilde m} \sum_{r \in \tilde i} \log s_{rr} - m
              + n \log(2 \pi \sigma^2) + \tfrac{n}{\sigma^2 \tilde n} y_l^T y_l

    from the diagonal `s_i` (|i|,) of S and the targets `y` (n_batch,) of the sampled rows.
    """
    noise = noise_variance
    log_noise = noise.log() if isinstance(noise, Tensor) else math.log(noise)
    fit = n / len(y) * y.square().sum() / noise
    return fit - i.weight * s_i.log().sum() - m + n * (math.log(2 * math.pi) + log_noise)


# Control variates ---------------------------------------------------------------------------------


def support_features(
    basis: StochasticBasis, X_support: Tensor, theta: Tensor | None = None
) -> Factor:
    r"""Columns (n_support, k) of :math:`\Phi_{p,:}` of a sample, at a copy of theta (F.3)."""
    fixed = None if theta is None else theta.detach().clone()
    return lambda sample: basis.sampled(X_support, sample, fixed)


def nystrom_factor(basis: StochasticBasis, U: Tensor, theta: Tensor | None = None) -> Factor:
    r"""Columns (r, k) of :math:`L^{-1} K(U, Z)`, :math:`L L^T = K(U, U)`, of a sample (F.2).

    For inducing points, whose features are :math:`K(\cdot, Z)`, at a copy of theta.
    """
    features = support_features(basis, U, theta)
    L = _factor_of(basis.kernel, U.double(), theta, NYSTROM_JITTER)

    def columns(sample: IndexSet) -> Tensor:
        Kuz = features(sample)
        return tri_solve(L.to(Kuz), Kuz, upper=False)

    return columns


def projection_weights(kernel: Any, U: Tensor, X: Tensor, theta: Tensor | None = None) -> Tensor:
    r"""Weights A (r, r) of support rows U with which :math:`\Phi_U^T A \Phi_U` stands for all rows.

    A function of the prior is nearly its projection on the support rows,
    :math:`f(x) \approx k(x, U) K_{UU}^{-1} f(U)`, so that over a sample X (N, d) of all rows

    .. math:: \tfrac1N \sum_x f(x)^2 \approx \tfrac{1}{r} f(U)^T A f(U), \qquad
              A = \tfrac rN K_{UU}^{-1} K_{UX} K_{XU} K_{UU}^{-1}.

    float64, positive semi-definite, O((N + r) r^2). The control variate's expectation is computed
    with the same A: any A, of any rows X, leaves it unbiased.
    """
    theta = None if theta is None else theta.detach()
    L = _factor_of(kernel, U.double(), theta, PROJECTION_JITTER)
    projection = torch.cholesky_solve(
        gram(kernel, U.double(), X.double(), theta=theta), L
    )  # (r, N)
    return (len(U) / len(X)) * (projection @ projection.mT)


def _factor_of(kernel: Any, U: Tensor, theta: Tensor | None, jitter: float) -> Tensor:
    """Cholesky factor of K(U, U) plus a jitter relative to the mean of its diagonal."""
    K = gram(kernel, U, theta=theta).detach()
    K.diagonal().add_(jitter * K.diagonal().mean())
    return torch.linalg.cholesky_ex(K).L  # whose failure makes a step NaN


class LowRankControlVariate:
    r"""Control variate of :math:`v^T M v` for the columns v of V, with running sums :math:`B V`.

    `factor` gives columns of B (`support_features`, `nystrom_factor`), `weights` are A
    (`projection_weights`), the identity by default. The sums B V (rank, q) are kept, and moved by
    whoever moves V (Proposition 3): in float64 whatever the precision of V, because rounding errors
    would add up.
    """

    def __init__(self, factor: Factor, sums: Tensor, *, weights: Tensor | None = None) -> None:
        self.sums = sums
        self.weights = weights
        self._factor = factor

    @torch.no_grad()
    def columns(self, sample: IndexSet) -> Tensor:
        """Return the columns of B in a sample, shape (rank, |i|)."""
        return self._factor(sample)

    @torch.no_grad()
    def estimate(
        self,
        i: IndexSet,
        j: IndexSet,
        B_i: Tensor,  # (rank, |i|), columns of B
        B_j: Tensor,  # (rank, |j|)
        V_i: Tensor,  # (|i|, q)
        V_j: Tensor,  # (|j|, q)
        scale: float,
    ) -> Estimate:
        r"""Return the correction, of expectation 0, to add to an estimate of `scale` v' M v.

        .. math:: -w_i w_j v_j^T B_j^T A B_i v_i + a^T A a

        times `scale`: n / (n_support noise_variance) in eq. (3). O(rank (\|i\| + \|j\|) q).
        """
        a = self.sums.to(B_i)
        p_i, p_j = i.weight * (B_i @ V_i), j.weight * (B_j @ V_j)  # (rank, q)
        plain_a, plain_i = a, p_i
        if self.weights is not None:
            A = self.weights.to(B_i)
            a, p_i, p_j = A @ a, A @ p_i, A @ p_j
        return Estimate(
            scale * (plain_a * a - plain_i * p_j).sum(0),
            (i.weight * scale) * (B_i.T @ (a - p_j)),
            (j.weight * scale) * (B_j.T @ (a - p_i)),
        )
