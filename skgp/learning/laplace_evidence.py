r"""Laplace approximation of a GP classifier in function space, for up to a few thousand rows.

The latent function of column j is :math:`f_j = b_j + g_j`, :math:`g_j \sim N(0, K_\theta)`, and
:math:`w_i` weighs row i. With :math:`\hat g` the mode of :math:`\sum_i w_i \log p(y_i \mid b + g_i)
- \tfrac12 g^T K^{-1} g`, :math:`a = K^{-1} \hat g` and :math:`W = -\nabla^2` of the first term,

.. math:: \log q(y \mid \theta) = \sum_i w_i \log p(y_i \mid b + \hat g_i) - \tfrac12 a^T \hat g
          - \tfrac12 \log |B|, \qquad B = I + W^{1/2} K W^{1/2} \qquad [1]_, \text{ eq. (3.32)}.

==================  ================================================
Code                Rasmussen and Williams
==================  ================================================
``alpha``           :math:`a = K^{-1} \hat g = \nabla \log p`
``root``            :math:`W^{1/2}`, a diagonal
``curvature``       W
``skewness``        :math:`\nabla^3 \log p / W`
==================  ================================================

Everything works on a K that several one-vs-rest columns share, one column after the other, so that
memory is a few n x n matrices whatever their number. K and what is made of it are NumPy's arrays
for few rows, tensors otherwise (`skgp.kernels.pairwise.GramWithGradient`).

Erratum: Algorithm 5.1 prints :math:`s_2` with a minus sign; eq. (5.23) has the right one.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, sections 3.4, 5.5.1.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram, gram_diag
from skgp.kernels.pairwise import GramWithGradient
from skgp.learning.defaults import LAST_STEP, MAX_HALVINGS, MAX_NEWTON
from skgp.linalg.cholesky import (
    cho_inverse,
    cho_solve,
    jittered_cholesky,
    log_det,
    raise_diagonal_,
    tri_solve,
)
from skgp.linalg.runtime import to_arrays


@dataclass(frozen=True)
class LaplaceFit:
    """The Gaussian approximation of the posterior of the latent functions."""

    alpha: Tensor  # (n, c); the latent mean is offset + K(., X) alpha
    root: Tensor  # (n, c), of the curvature at the mode
    offset: Tensor  # (c,)
    log_evidence: Tensor  # (c,), nats


class LaplaceEvidence:
    r"""Approximate log evidence of one-vs-rest columns at many theta, each with its gradient.

    With :math:`R = W^{1/2} B^{-1} W^{1/2}` and :math:`s = \tfrac12 \mathrm{diag}((K^{-1} + W)^{-1})
    \nabla^3 \log p`, which by :math:`\mathrm{diag}((K^{-1} + W)^{-1}) = (1 - \mathrm{diag}\,B^{-1})
    / W` needs no further matrix product, the gradient of Algorithm 5.1 is in matrix form

    .. math:: \frac{d \log q}{d K} = \tfrac12 (a a^T - R) + \tfrac12 (u a^T + a u^T),
              \qquad u = (I - R K) s.

    The last term is the motion of the mode. `gram` gives K at theta, noise included
    (:func:`skgp.kernels.training.training_gram`); Y (n, c) are labels -1 and +1, `offset` (c,) the
    constants of the latent functions and `weight` (n,), not negative, factors of the
    log-likelihoods. ``O(c n^3)`` time: a few Cholesky factorisations a column and one inverse;
    ``O(n^2)`` memory.
    """

    def __init__(
        self,
        gram: Any,
        Y: Tensor,
        likelihood: Any,
        offset: Tensor | None = None,
        weight: Tensor | None = None,
        max_newton: int = MAX_NEWTON,
    ) -> None:
        self._gram, self._max_newton = gram, max_newton
        self.offset = Y.new_zeros(Y.shape[1]) if offset is None else offset
        weight = torch.ones_like(Y[:, 0]) if weight is None else weight
        labels, offsets = Y.mT.contiguous(), self.offset
        if self._gram.few:
            labels, offsets, weight = (each.cpu() for each in (labels, offsets, weight))
        self._columns = [
            _Column(y, likelihood, b, weight, self._gram.few)
            for y, b in zip(labels, offsets, strict=True)
        ]
        #: Of each column at the last theta; the next is sought from its g, which changes far less
        #: when K is scaled than K K_old^-1 g_old, so that this and not alpha is gone on from.
        self.modes = [column.start for column in self._columns]

    @staticmethod
    def of(kernel, data: Data, likelihood: Any, offset: Tensor | None = None) -> "LaplaceEvidence":
        """Of a kernel without WhiteKernel and observations in float64."""
        check_no_noise(kernel)
        gram = GramWithGradient(kernel, data.X)
        return LaplaceEvidence(gram, data.y, likelihood, offset, data.weight)

    @torch.no_grad()
    def __call__(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In nats, (c,), and the gradient of their sum (n_theta,)."""
        K, of_K = self._gram(theta)
        values, total = [], 0.0
        for j, column in enumerate(self._columns):
            mode, L, value = self._solve(K, j)
            values.append(value)
            total = total + _gradient(K, column, mode, L)
        gradient = of_K(total)
        is_array = isinstance(gradient, np.ndarray)
        return np.array(values), gradient if is_array else to_arrays(gradient)[0]

    @torch.no_grad()
    def fit(self, theta: np.ndarray) -> LaplaceFit:
        """The posteriors at theta."""
        K, _ = self._gram(theta)
        modes, _, values = zip(*(self._solve(K, j) for j in range(len(self._columns))), strict=True)
        alpha, root = (
            torch.stack([torch.as_tensor(a) for a in arrays], dim=1).to(self.offset)
            for arrays in ([m.alpha for m in modes], [m.curvature**0.5 for m in modes])
        )
        return LaplaceFit(alpha, root, self.offset, self.offset.new_tensor(values))

    def _solve(self, K: Any, j: int) -> tuple["_Mode", Any, float]:
        """Of column j the mode, which is remembered, the factor of B there, and the evidence."""
        mode = _mode(K, self._columns[j], self.modes[j], self._max_newton)
        self.modes[j] = mode
        L = laplace_factor(K, mode.curvature**0.5)
        return mode, L, mode.value - 0.5 * float(log_det(L))


def laplace_predict(fit: LaplaceFit, kernel, X: Tensor, X_new: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean and variance (p, c) of the latent functions at `X_new` (p, d), of a fit to X (n, d).

    .. math:: m = b + k_*^T a, \qquad v = k_{**} - k_*^T W^{1/2} B^{-1} W^{1/2} k_*
              \qquad \text{(Algorithm 3.2)}

    The kernel is that of the fit. ``O(c n^2 (n / 3 + p))``.
    """
    K = gram(kernel, X, method="expand")
    K_new = gram(kernel, X, X_new, method="expand")  # (n, p)
    prior = gram_diag(kernel, X_new)
    var = []
    for root in fit.root.T:
        half = tri_solve(laplace_factor(K, root), root[:, None] * K_new, upper=False)
        var.append((prior - half.square().sum(0)).clamp(min=0))
    return fit.offset + K_new.mT @ fit.alpha, torch.stack(var, dim=1)


def check_no_noise(kernel) -> None:
    """Raise ValueError where the kernel of a classifier contains a WhiteKernel."""
    if split_noise(kernel)[1] is not None:
        raise ValueError(
            f"kernel={kernel} contains a WhiteKernel, which a classifier has no use for: its "
            "likelihood is the noise of the labels. Remove the WhiteKernel summand."
        )


class _Mode(NamedTuple):
    """A point of Newton's method: ``g = K alpha`` (n,), the objective and derivatives there."""

    alpha: Any
    g: Any
    value: float
    slope: Any
    curvature: Any


class _Column:
    """Log likelihood of one column as a function of g: in tensors, of arrays like K."""

    def __init__(self, y: Tensor, likelihood, offset: Tensor, weight: Tensor, few: bool) -> None:
        self.y, self.likelihood, self.offset, self.weight = y, likelihood, offset, weight
        self._like_K = Tensor.numpy if few else lambda tensor: tensor
        zero = self._like_K(torch.zeros_like(self.y))
        self.origin = self.at(zero, zero)
        self.start: _Mode | None = None  # of the first mode: from g = 0 large counts are too far
        if likelihood.has_link:
            f, _ = likelihood.gaussian_observations(y, offset)
            self.start = self.at(zero, self._like_K(f - offset))

    def derivatives(self, g: Any) -> tuple[float, Any, Any]:
        """Weighted sum, its slope, and minus its second derivative, (n,) each."""
        f = self.offset + torch.as_tensor(g)
        value, first, second = self.likelihood.log_prob_and_derivatives(self.y, f)
        curvature = (-self.weight * second).clamp_(min=0)
        return (
            float(self.weight @ value),
            self._like_K(self.weight * first),
            self._like_K(curvature),
        )

    def skewness(self, g: Any) -> Any:
        """Third derivative over the curvature, (n,), free of weights."""
        return self._like_K(self.likelihood.skewness(self.y, self.offset + torch.as_tensor(g)))

    def at(self, alpha: Any, g: Any) -> _Mode:
        """With what the mode maximises, eq. (3.12) up to a constant."""
        value, slope, curvature = self.derivatives(g)
        return _Mode(alpha, g, value - 0.5 * float(alpha @ g), slope, curvature)


def _mode(K: Any, column: _Column, start: _Mode | None, max_newton: int) -> _Mode:
    """Newton's method with step halving (Algorithm 3.1)."""
    mode = column.origin
    if start is not None:
        # K^-1 g is unknown, so that the step itself is judged, not what it starts from.
        alpha = _newton(K, start.slope, start.curvature, start.g)
        mode = max(mode, column.at(alpha, K @ alpha), key=lambda mode: mode.value)
    for _ in range(max_newton):
        step = _newton(K, mode.slope, mode.curvature, mode.g) - mode.alpha
        moved = K @ step
        if float((mode.slope - mode.alpha) @ moved) <= LAST_STEP:
            return column.at(mode.alpha + step, mode.g + moved)
        for size in 0.5 ** np.arange(MAX_HALVINGS):
            new = column.at(mode.alpha + size * step, mode.g + size * moved)
            if new.value > mode.value:
                break
        else:
            break  # rounding hides any further rise
        mode = new
    return mode


def _newton(K: Any, slope: Any, curvature: Any, g: Any) -> Any:
    """Where a full Newton step from g leads, as ``alpha`` (Algorithm 3.1, lines 4-6)."""
    root = curvature**0.5
    rhs = curvature * g + slope
    return rhs - root * cho_solve(laplace_factor(K, root), root * (K @ rhs))


def laplace_factor(K: Any, root: Any) -> Any:
    """Cholesky factor of ``B = I + W^1/2 K W^1/2``, whose eigenvalues are at least 1."""
    B = root[:, None] * K * root
    raise_diagonal_(B, 1.0)
    return jittered_cholesky(B).factor


def _gradient(K: Any, column: _Column, mode: _Mode, L: Any) -> Any:
    """Of the evidence of a column in K, (n, n)."""
    inverse, root = cho_inverse(L), mode.curvature**0.5
    s = 0.5 * (1 - inverse.diagonal()) * column.skewness(mode.g)
    u = s - root * (inverse @ (root * (K @ s)))
    inverse *= root[:, None]
    inverse *= root
    outer = (0.5 * mode.alpha + u)[:, None] * mode.alpha
    return 0.5 * (outer + outer.T - inverse)
