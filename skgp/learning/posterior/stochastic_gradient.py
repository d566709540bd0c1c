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

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from skgp.inference.pathwise import nystrom_root, pivoted_factor
from skgp.kernels import stationary
from skgp.kernels.distances import origin
from skgp.kernels.gradients import bilinear_gradient, weighted_gradient
from skgp.kernels.operators import RowOperator
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.linalg import NotPositiveDefiniteError, NumericalWarning
from skgp.linalg.cholesky import tri_solve
from skgp.linalg.preconditioners import LowRankPreconditioner, without_subnormals
from skgp.linalg.runtime import tile_rows, to_arrays
from skgp.linalg.ulisse import ulisse

Tell = Callable[[dict], None]
SEEDS = 2**31 - 1  # mathematical


class Probes(NamedTuple):
    """Standard noise from which the probes of any u are made."""

    e1: Tensor  # (n_probes, rank)
    e2: Tensor  # (n_probes, n)


class GradientEstimate(NamedTuple):
    """Outcome of :meth:`StochasticGradient.estimate`."""

    gradient: np.ndarray  # (n_dims,), of the log posterior, prior included, by u
    n_iter: int  # products with the kernel matrix
    converged: bool  # False where the estimate is biased, see `ulisse`
    warm: Tensor  # (n,), plain iterate for A^-1 y, to start from at the next u


class StochasticGradient:
    r"""Estimator of the gradient of a :class:`LogPosterior`, which is used for its prior alone.

    An estimate forms the kernel matrix once, multiplies it ``n_iter`` times by ``n_probes + 1``
    rows, and passes over half of it for the gradients; ``O(n^2 (d + n_iter n_probes) + n r^2)``.
    Memory ``n^2`` numbers where stored, and about ``6 n r``.
    """

    def __init__(
        self,
        posterior: LogPosterior,
        *,
        rank: int = 100,  # pivots of the preconditioner, 0 for none; `choose_pivots` comes first
        n_probes: int = 4,
        dtype: torch.dtype = torch.float32,  # of kernel matrix and solutions; else float64
        **solver: Any,  # `stop, tol, roulette, max_iter` of `ulisse`
    ) -> None:
        self.posterior, self.rank, self.n_probes = posterior, rank, n_probes
        self.solver = {"stop": 0.03, "max_iter": 500} | solver
        X, signal = posterior.data.X, posterior.signal
        centre = origin(X) if stationary(signal) else 0.0
        self.operator = RowOperator(signal, X - centre, dtype=dtype)
        self._y = posterior.data.y.to(dtype)
        self._pivots = torch.empty(0, dtype=torch.int64, device=self._y.device)

    def choose_pivots(self, u: np.ndarray, generator: torch.Generator) -> int:
        """Draw the pivots of the preconditioner at u (n_dims,); how many there are, up to `rank`.

        Probes drawn before do not fit any more.
        """
        if self.rank > 0:
            posterior = self.posterior
            kernel = posterior.signal.clone_with_theta(np.asarray(u)[posterior.places])
            factor = pivoted_factor(kernel, posterior.data.X, self.rank, generator=generator)
            self._pivots = factor.pivots
        return len(self._pivots)

    def draw_probes(self, generator: torch.Generator, n_probes: int | None = None) -> Probes:
        r"""New probes: normal, or :math:`\pm 1` where there is no preconditioner, as in [1]_."""
        k = self.n_probes if n_probes is None else n_probes
        if len(self._pivots) == 0:
            shape = k, len(self._y)
            signs = torch.randint(0, 2, shape, generator=generator, device=generator.device)
            return Probes(self._y.new_empty(k, 0), (2 * signs - 1).to(self._y))
        options: dict[str, Any] = {"dtype": torch.float32, "device": generator.device}
        e1 = torch.randn(k, len(self._pivots), generator=generator, **options)
        e2 = torch.randn(k, len(self._y), generator=generator, **options)
        return Probes(e1.to(self._y), e2.to(self._y))

    def generator(self, seed: int) -> torch.Generator:
        """Of the device of the data."""
        return torch.Generator(self._y.device).manual_seed(seed)

    @torch.no_grad()
    def estimate(
        self,
        u: np.ndarray,  # (n_dims,)
        probes: Probes,  # unbiased if drawn anew, or the same for several u
        generator: torch.Generator,  # of the coins of ULISSE
        *,
        warm: Tensor | None = None,  # (n,), of an estimate nearby
        **solver: Any,  # instead of those of the field; stop=0, tol=1e-4 flips no coins
    ) -> GradientEstimate:
        """Gradient of the log posterior at u; a NumericalWarning as :func:`ulisse`."""
        u = np.asarray(u, dtype=float)
        posterior, place = self.posterior, self.posterior.exact.noise_place
        theta = posterior.data.X.new_tensor(u)
        noise, theta = posterior.exact.noise_variance(theta), theta[posterior.places]
        self.operator.set_theta(theta)
        D = posterior.data.row_noise(noise).to(self._y)  # (n,)
        nystrom = _Nystrom(posterior.signal, theta, self._pivots, self.operator)
        P = LowRankPreconditioner(nystrom.factor, D)
        z, v = P.probes(*probes)  # (N, n): of covariance P, and P^-1 z
        B = torch.cat([self._y[None], z])
        start = torch.zeros_like(B)
        if warm is not None:
            start[0] = warm
        solved = ulisse(
            lambda V: self.operator.matmul(V) + V * D,
            B,
            generator=generator,
            preconditioner=P,
            start=start,
            n_paired=1,  # section 4.1: two draws of A^-1 y
            **self.solver | solver,
        )
        # One row for the quadratic form, and one for each probe: g = sum_c U_c' dA V_c.
        U = torch.cat([solved.solution[:1] / 2, solved.solution[1:] / (-2 * len(z))])
        V = torch.cat([solved.second, v])
        X = self.operator.inputs
        signal = bilinear_gradient(posterior.signal, X, U.to(X), V.to(X), theta)
        of_noise = (U * V).double().sum(0)  # (n,)
        signal_P, of_noise_P = nystrom.control(P, v)
        gradient = posterior.prior_gradient(u)
        by_noise = posterior.data.noise_gradient(of_noise - of_noise_P, noise)
        slopes = to_arrays(signal - signal_P, by_noise)
        gradient[posterior.places] += slopes[0]
        if place is not None:
            gradient[place] += slopes[1]
        return GradientEstimate(
            gradient, solved.n_iter, solved.converged, solved.iterate[0].clone()
        )


class _Nystrom:
    r"""The low rank of P, :math:`F^T F` with :math:`F = L_m^{-1} K_{mx}`, and its derivative."""

    def __init__(self, kernel, theta: Tensor, pivots: Tensor, operator: RowOperator):
        X = operator.inputs
        self._kernel, self._theta, self._X, self._M = kernel, theta, X, X[pivots]
        L = nystrom_root(kernel, self._M.double(), theta, operator.dtype)
        eye = torch.eye(len(L), dtype=L.dtype, device=L.device)
        #: Inverse of L_m, (r, r) in float64.
        self._inverse_root = tri_solve(L, eye, upper=False)
        root = without_subnormals(self._inverse_root, operator.dtype)
        self.factor = without_subnormals(root @ operator.rows(pivots))

    def control(self, P: LowRankPreconditioner, v: Tensor) -> tuple[Tensor, Tensor]:
        r"""Half of :math:`\operatorname{tr}(S \dot P)`, :math:`S = P^{-1} - v^T v / N`.

        With :math:`B = K_{mm}^{-1} K_{mx}` and :math:`G = B S`,
        :math:`\operatorname{tr}(S \dot P) = 2 \langle G, \dot K_{mx} \rangle
        - \langle G B^T, \dot K_{mm} \rangle + \langle \operatorname{diag} S, \dot D \rangle`.

        By the signal's theta, (n_theta,), and by the entries of D, (n,); both in float64.
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


def wide_estimates(
    field: StochasticGradient,
    u: np.ndarray,
    n_probes: int,
    generator: torch.Generator,
    *,
    tol: float,
    warm: Tensor | None = None,
) -> Iterator[tuple[GradientEstimate, int]]:
    """Estimates at u (n_dims,) without coins, and how many probes each has: `n_probes` in all.

    What an estimate takes beside its linear systems does not depend on the number of probes, and a
    product with the kernel matrix is bound by memory up to some dozens of rows: for the mean at one
    place, estimates of 64 probes are several times as fast as those of four.
    """
    most = tile_rows(
        tuned.PROBE_COPIES * field.operator.dtype.itemsize * len(field.posterior.data.y)
    )
    while n_probes > 0:
        size = min(tuned.WIDE_PROBES, n_probes, most)
        n_probes -= size
        at = field.estimate(
            u, field.draw_probes(generator, size), generator, warm=warm, stop=0.0, tol=tol
        )
        warm = at.warm
        yield at, size


@dataclass(frozen=True)
class Anchor:
    r"""Control variate between u and an anchor :math:`u_0`, over a bank of B probes.

    .. math:: G(u) = \hat g(u, e_k) - \hat g(u_0, e_k) + \bar g(u_0),
              \qquad k \text{ uniform on } 1 \dots B .

    The same probes at both points: what is left of their noise falls with the distance to the
    anchor. :math:`\bar g` is the mean over the probes of the bank and, where these are too few,
    over others; it errs in the same way at all u.
    """

    bank: list[Probes]
    gradients: np.ndarray  # (B, p), there
    mean: np.ndarray  # (p,)
    mean_covariance: np.ndarray  # (p, p), of its error
    warm: Tensor  # (n,)
    n_gradients: int  # spent there

    def estimate(
        self,
        field: StochasticGradient,
        u: np.ndarray,
        entry: int,
        generator: torch.Generator,
        warm: Tensor | None = None,
    ) -> GradientEstimate:
        """Gradient at u (p,) with an entry of the bank."""
        start = self.warm if warm is None else warm
        at = field.estimate(u, self.bank[entry], generator, warm=start)
        return at._replace(gradient=at.gradient - self.gradients[entry] + self.mean)


def make_anchor(
    field: StochasticGradient,  # with its pivots chosen; they must stay
    u: np.ndarray,  # (p,)
    generator: torch.Generator,
    *,
    n_entries: int = tuned.BANK,  # B, of `field.n_probes` probes each: n + rank numbers a probe
    n_probes: int = 0,  # of the mean, at least; those of the bank are among them
    tol: float = tuned.ANCHOR_TOL,
    tell: Tell | None = None,  # tell({"n_at_anchor": int}) after each gradient
) -> Anchor:
    """Exact gradients of a new bank at u, and others for the mean."""
    bank = [field.draw_probes(generator) for _ in range(n_entries)]
    warm: Tensor | None = None
    gradients: list[np.ndarray] = []
    sizes: list[int] = []

    def estimates() -> Iterator[tuple[GradientEstimate, int]]:
        for probes in bank:
            at = field.estimate(u, probes, generator, warm=warm, stop=0.0, tol=tol)
            yield at, field.n_probes
        others = n_probes - n_entries * field.n_probes
        yield from wide_estimates(field, u, others, generator, tol=tol, warm=warm)

    for at, size in estimates():
        warm = at.warm
        gradients.append(at.gradient)
        sizes.append(size)
        if tell is not None:
            tell({"n_at_anchor": len(gradients)})
    of_bank = np.array(gradients[:n_entries])
    noise = np.atleast_2d(np.cov(of_bank, rowvar=False))
    return Anchor(
        bank,
        of_bank,
        np.average(gradients, axis=0, weights=sizes),
        noise * field.n_probes / sum(sizes),
        at.warm,
        len(gradients),
    )


@dataclass
class Memory:
    """What a chain remembers of its gradients."""

    warm: Tensor | None = None
    n_products: int = 0
    n_unsolved: int = 0
    entry: int = -1
    probes: Probes | None = None


class SampledGradient:
    """A :class:`~skgp.samplers.NoisyGradient`; picklable.

    A sampler names a realisation of the noise by a number, an entry of the bank of an anchor or a
    seed of probes, so that it can ask for the same one at several places. Each thread has a field
    of its own, since that holds the kernel matrix of its last u.
    """

    def __init__(self, field: StochasticGradient, anchor: Anchor | None = None) -> None:
        self.field, self.anchor = field, anchor
        self.n_entries = SEEDS if anchor is None else len(anchor.bank)
        self._own = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_own"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._own = threading.local()

    def __call__(
        self, u: np.ndarray, entry: int, rng: np.random.Generator, memory: Memory | None
    ) -> tuple[np.ndarray, Memory]:
        """Gradient (p,), NaN where the kernel matrix is singular, and what to remember."""
        memory = Memory() if memory is None else memory
        coins = torch.Generator().manual_seed(int(rng.integers(SEEDS)))  # which Python looks at
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)  # counted instead
                at = self._estimate(u, entry, coins, memory)
        except (NotPositiveDefiniteError, torch.linalg.LinAlgError):
            return np.full(len(u), np.nan), memory
        memory.warm = at.warm if bool(torch.isfinite(at.warm).all()) else None
        memory.n_products += at.n_iter
        memory.n_unsolved += not at.converged
        return at.gradient, memory

    def _estimate(
        self, u: np.ndarray, entry: int, coins: torch.Generator, memory: Memory
    ) -> GradientEstimate:
        """The estimate at u, of the anchor where there is one, else by probes of its own."""
        if not hasattr(self._own, "field"):
            self._own.field = copy.copy(self.field)
            self._own.field.operator = copy.copy(self.field.operator)  # leaves its matrix behind
        field = self._own.field
        if self.anchor is not None:
            return self.anchor.estimate(field, u, entry, coins, memory.warm)
        if memory.entry != entry:
            memory.probes = field.draw_probes(field.generator(entry))
            memory.entry = entry
        return field.estimate(u, memory.probes, coins, warm=memory.warm)
