r"""Unbiased gradients of the log posterior of the hyper-parameters, by linear systems alone.

With :math:`A_u = K_u + D_u` (D diagonal: the noise), the derivative of the log likelihood is

.. math:: g_t = \tfrac12 a^T \dot A_t a - \tfrac12 \operatorname{tr}(A^{-1} \dot A_t),
          \qquad a = A^{-1} y, \quad \dot A_t = \partial A / \partial u_t,

and its estimate ([1]_, equation 9)

.. math:: \hat g_t = \tfrac12 a_1^T \dot A_t a_2
          - \frac{1}{2 N} \sum_{k=1}^N w_k^T \dot A_t v_k
          - \tfrac12 \Big\{ \partial_t \log|P| - \frac1N \sum_k v_k^T \dot P_t v_k \Big\}.

Here :math:`a_1, a_2` are two draws of ULISSE for a, :math:`w_k` one for :math:`A^{-1} z_k`, and
:math:`v_k = P^{-1} z_k`.

Deviations from [1]_. There :math:`z_k = v_k` has entries :math:`\pm 1` and the systems are not
preconditioned: that is ``rank=0`` here. In general :math:`z_k \sim N(0, P)`,
:math:`P = K_{xm} K_{mm}^{-1} K_{mx} + D` with m pivots: the nearer P is to A, the less noise there
is in the trace, and the braces, of mean zero and in closed form, remove most of what is left.

References
----------
.. [1] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
   Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.kernels import gram_diag, gram_tile, split_noise, stationary
from skgp.kernels.distances import origin
from skgp.kernels.expression import theta_places
from skgp.kernels.gradients import bilinear_gradient, weighted_gradient
from skgp.kernels.operators import RowOperator
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.linalg.cholesky import jittered_cholesky
from skgp.linalg.preconditioners import (
    LowRankPreconditioner,
    rp_cholesky,
    without_subnormals,
)
from skgp.linalg.ulisse import UlisseResult, ulisse

__all__ = ["GradientEstimate", "Probes", "StochasticGradient"]

_JITTER = {torch.float32: 1e-5, torch.float64: 1e-8}  # of K_mm, relative to its mean diagonal


@dataclass(frozen=True)
class Probes:
    """Standard noise from which the probes of any u are made.

    Attributes
    ----------
    e1 : Tensor of shape (n_probes, rank)
    e2 : Tensor of shape (n_probes, n)
    """

    e1: Tensor
    e2: Tensor


@dataclass(frozen=True)
class GradientEstimate:
    """Outcome of :meth:`StochasticGradient.estimate`.

    Attributes
    ----------
    gradient : ndarray of shape (n_dims,)
        Of the log posterior, prior included, by u.
    n_iter : int
        Products with the kernel matrix.
    residual : float
        Largest relative residual of the plain iterates.
    truncated : bool
        Whether a coin ended a solution.
    converged : bool
        False where the estimate is biased, see :func:`~skgp.linalg.ulisse.ulisse`.
    warm : Tensor of shape (n,)
        Plain iterate for :math:`A^{-1} y`, to start from at the next u.
    """

    gradient: np.ndarray
    n_iter: int
    residual: float
    truncated: bool
    converged: bool
    warm: Tensor


class StochasticGradient:
    r"""Estimator of the gradient of a :class:`LogPosterior`, which is used for its prior alone.

    Parameters
    ----------
    posterior : LogPosterior
    rank : int, default=100
        Pivots of the preconditioner; 0 for none. :meth:`choose_pivots` comes before the rest.
    n_probes : int, default=4
    dtype : torch.dtype, default=torch.float32
        Of kernel matrix and solutions; pivots and small matrices are float64.
    stop, tol, roulette, beta, max_iter
        As :func:`~skgp.linalg.ulisse.ulisse`.
    memory_budget : float, default=4e9
        Bytes of the kernel matrix; recomputed at every product where it does not fit.

    Attributes
    ----------
    operator : RowOperator
        Kernel matrix at the last u.

    Notes
    -----
    An estimate forms the kernel matrix once, multiplies it ``n_iter`` times by ``n_probes + 1``
    rows, and passes over half of it for the gradients; ``O(n^2 (d + n_iter n_probes) + n r^2)``.
    Memory ``n^2`` numbers where stored, and about ``6 n r``.
    """

    def __init__(
        self,
        posterior: LogPosterior,
        *,
        rank: int = 100,
        n_probes: int = 4,
        dtype: torch.dtype = torch.float32,
        stop: float = 0.03,
        tol: float | None = None,
        roulette: str = "adaptive",
        beta: float = 1.0,
        max_iter: int = 500,
        memory_budget: float = 4e9,
    ) -> None:
        self.posterior, self.rank, self.n_probes = posterior, rank, n_probes
        self.solver = {
            "stop": stop, "tol": tol, "roulette": roulette, "beta": beta, "max_iter": max_iter
        }  # fmt: skip
        kernel, data = posterior.kernel, posterior.data
        self._signal, _ = split_noise(kernel)
        self._places, self._noise_place, self._fixed_noise = theta_places(kernel)
        centre = origin(data.X) if stationary(self._signal) else 0.0
        self.operator = RowOperator(
            self._signal, data.X - centre, dtype=dtype, memory_budget=memory_budget
        )
        self._y = data.y.to(dtype)
        self._pivots = torch.empty(0, dtype=torch.int64, device=self._y.device)

    # ---------------------------------------------------------------- preconditioner and probes

    def choose_pivots(self, u: np.ndarray, generator: torch.Generator) -> int:
        """Draw the pivots of the preconditioner at u (n_dims,); how many there are, up to `rank`.

        Probes drawn before do not fit any more.
        """
        if self.rank > 0:
            kernel = self._signal.clone_with_theta(np.asarray(u)[self._places])
            X = self.posterior.data.X
            self._pivots = rp_cholesky(
                lambda index: gram_tile(kernel, X, X[index]),
                gram_diag(kernel, X),
                self.rank,
                generator=generator,
            ).pivots
        return len(self._pivots)

    def draw_probes(self, generator: torch.Generator, n_probes: int | None = None) -> Probes:
        """New probes: normal, or :math:`\\pm 1` where there is no preconditioner, as in [1]_."""
        k = self.n_probes if n_probes is None else n_probes
        if len(self._pivots) == 0:
            signs = torch.randint(0, 2, (k, len(self._y)), generator=generator)
            return Probes(self._y.new_empty(k, 0), (2 * signs - 1).to(self._y))
        e1 = torch.randn(k, len(self._pivots), generator=generator, dtype=torch.float32)
        e2 = torch.randn(k, len(self._y), generator=generator, dtype=torch.float32)
        return Probes(e1.to(self._y), e2.to(self._y))

    # ------------------------------------------------------------------------------ the estimate

    @torch.no_grad()
    def estimate(
        self,
        u: np.ndarray,
        probes: Probes,
        generator: torch.Generator,
        *,
        warm: Tensor | None = None,
        stop: float | None = None,
        tol: float | None = None,
    ) -> GradientEstimate:
        """Gradient of the log posterior at u (n_dims,).

        Parameters
        ----------
        u : ndarray of shape (n_dims,)
        probes : Probes
            Of :meth:`draw_probes`; unbiased if they are drawn anew, or the same for several u.
        generator : torch.Generator
            Of the coins of ULISSE.
        warm : Tensor of shape (n,), optional
            Of an estimate nearby.
        stop, tol : float, optional
            Instead of those of the constructor; ``stop=0, tol=1e-4`` solves without coins.

        Returns
        -------
        GradientEstimate

        Warns
        -----
        NumericalWarning
            As :func:`~skgp.linalg.ulisse.ulisse`.
        """
        u = np.asarray(u, dtype=float)
        theta, noise = self._split(u)
        self.operator.set_theta(theta)
        D = self.posterior.data.row_noise(noise).to(self._y)
        nystrom = _Nystrom(self._signal, theta, self._pivots, self.operator)
        P = LowRankPreconditioner(nystrom.factor, D)
        z, v = P.probes(probes.e1, probes.e2)
        settings = self.solver | {k: x for k, x in (("stop", stop), ("tol", tol)) if x is not None}
        solved = self._solve(z, D, P, warm, generator, settings)
        # One row for the quadratic form, and one for each probe: g = sum_c U_c' dA V_c.
        U = torch.cat([solved.solution[:1] / 2, solved.solution[1:] / (-2 * len(z))])
        V = torch.cat([solved.second, v])
        X = self.operator.inputs
        signal = bilinear_gradient(self._signal, X, U.to(X), V.to(X), theta)
        of_noise = (U * V).double().sum(0)
        signal_P, of_noise_P = nystrom.control(P, v)
        gradient = self._join(signal - signal_P, of_noise - of_noise_P, noise)
        return GradientEstimate(
            gradient + self.posterior.prior_gradient(u),
            solved.n_iter,
            float(solved.residual.max()),
            any(solved.truncated),
            solved.converged,
            solved.iterate[0].clone(),
        )

    def _split(self, u: np.ndarray) -> tuple[Tensor, Tensor]:
        """Theta of the signal, and the variance of the noise."""
        theta = self.posterior.data.X.new_tensor(u)
        place = self._noise_place
        noise = theta.new_tensor(self._fixed_noise) if place is None else theta[place].exp()
        return theta[self._places], noise

    def _solve(self, z, D, P, warm, generator, settings) -> UlisseResult:
        B = torch.cat([self._y[None], z])
        start = torch.zeros_like(B)
        if warm is not None:
            start[0] = warm
        return ulisse(
            lambda V: self.operator.matmul(V) + V * D,
            B,
            generator=generator,
            preconditioner=P,
            start=start,
            n_paired=1,
            **settings,
        )

    def _join(self, signal: Tensor, of_noise: Tensor, noise: Tensor) -> np.ndarray:
        """Gradient by u from that by the signal's theta and that by each entry of D, (n,)."""
        gradient = np.zeros(self.posterior.n_dims)
        gradient[self._places] = signal.cpu().numpy()
        if self._noise_place is not None:
            data = self.posterior.data
            total = (of_noise * data.row_noise(noise)).sum()
            if data.weight is not None and data.scatter is not None:
                total = total + 0.5 * (1 - data.weight + data.scatter / noise).sum()
            gradient[self._noise_place] = float(total)
        return gradient


class _Nystrom:
    r"""The low rank of P, :math:`F^T F` with :math:`F = L_m^{-1} K_{mx}`, and its derivative."""

    def __init__(self, kernel, theta: Tensor, pivots: Tensor, operator: RowOperator):
        X = operator.inputs
        self._kernel, self._theta, self._X, self._M = kernel, theta, X, X[pivots]
        K = gram_tile(kernel, self._M.double(), self._M.double(), theta)
        if len(K):
            K.diagonal().add_(_JITTER[operator.dtype] * K.diagonal().mean())
        L = jittered_cholesky(K).factor
        eye = torch.eye(len(L)).to(L)
        #: Inverse of L_m, (r, r) in float64.
        self._inverse_root = torch.linalg.solve_triangular(L, eye, upper=False)
        root = without_subnormals(self._inverse_root, operator.dtype)
        self.factor = without_subnormals(root @ operator.rows(pivots))

    def control(self, P: LowRankPreconditioner, v: Tensor) -> tuple[Tensor, Tensor]:
        r"""Half of :math:`\operatorname{tr}(S \dot P)`, :math:`S = P^{-1} - v^T v / N`.

        With :math:`B = K_{mm}^{-1} K_{mx}` and :math:`G = B S`,
        :math:`\operatorname{tr}(S \dot P) = 2 \langle G, \dot K_{mx} \rangle
        - \langle G B^T, \dot K_{mm} \rangle + \langle \operatorname{diag} S, \dot D \rangle`.

        Returns
        -------
        signal : Tensor of shape (n_theta,)
        of_noise : Tensor of shape (n,)
            By the entries of D. Both in float64.
        """
        of_noise = 0.5 * (P.inverse_diag() - v.double().square().mean(0))
        if len(self._M) == 0:
            return torch.zeros_like(self._theta), of_noise
        # G = L_m^-T F S, and G B' = L_m^-T (F S F') L_m^-1.
        root, Fv = self._inverse_root, (v @ self.factor.T).double()
        G = P.solve_factor(root.T).addmm_((Fv @ root).T.to(v), v, alpha=-1 / len(v))
        GB = root.T @ (P.explained() - Fv.T @ Fv / len(v)) @ root
        M, X = self._M, self._X
        signal = weighted_gradient(self._kernel, M, X, G.to(X), self._theta)
        signal -= 0.5 * weighted_gradient(self._kernel, M, M, GB.to(X), self._theta)
        return signal, of_noise
