r"""Squared exponential processes of few states: rational approximations of the spectral density.

.. math:: e^{-r^2/2} \approx \frac{1}{2\pi} \int
          \frac{q\,(1 - \omega^2/\zeta^2)^{2m}}{\prod_k |i\omega - p_k|^2} e^{i\omega r} d\omega,
          \qquad p_k = -a_k \pm i b_k.

The process is :math:`(1 + \zeta^{-2} d^2/dr^2)^m x` of an all-pole process x, whose derivatives are
the state. Poles and zero of the first two make the greatest error of the covariance over all r
least, those of the others that of the spectral density over all frequencies:

============  ======  =========  ===================  ==================================
process       states  error      of spectral density  for comparison: Taylor series [1]_
============  ======  =========  ===================  ==================================
`GAUSSIAN4`   4       4.5e-4                          2.2e-2
`GAUSSIAN6`   6       9.1e-6                          4.3e-3
`GAUSSIAN10`  10      5.2e-9     4e-9
`GAUSSIAN12`  12      1.9e-10    1.7e-10
`GAUSSIAN14`  14      1.0e-11    9.6e-12
`GAUSSIAN16`  16      9.1e-13    6.5e-13
============  ======  =========  ===================  ==================================

The last column but one is relative to the density at 0. Beside noise of the variance
:math:`\sigma^2` an observation, :math:`\Delta` apart, an error of the density matters where it is
not small beside :math:`\sigma^2 \Delta`.

Transitions at r below a switch are power series, above it sums over the poles or, from eight states
on, compositions of shorter ones, which add without cancellation:

.. math:: F(2r) = F(r)^2, \qquad Q(2r) = Q(r) + F(r) Q(r) F(r)^\top.

With :math:`\alpha` the mean of :math:`a_k` the series

.. math:: e^{\alpha r} F(r) = \sum_n \frac{(A + \alpha)^n r^n}{n!}, \qquad
          e^{2 \alpha r} Q(r) = \sum_n G_n r^n, \quad
          (n + 1) G_{n+1} = (A + \alpha) G_n + G_n (A + \alpha)^\top
          + \frac{(2 \alpha)^n}{n!} q L L^\top

keep the leading power of each entry exactly, as the noise enters the last derivative alone.

References
----------
.. [1] J. Hartikainen and S. Sarkka, "Kalman filtering and smoothing solutions to temporal Gaussian
   process regression models" (MLSP 2010), with the variance restored to 1.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skgp.linalg.runtime import constant_like
from skgp.linalg.small_matrices import matmul

from .defaults import NUGGET
from .sde_processes import Primitive


class Rational(Primitive):
    """The process of a rational spectral density with a zero on the imaginary axis.

    Its pairs of poles are -a +- ib, of `decays` a and `frequencies` b; `zero` is the angular
    frequency at which the density vanishes, 2 `multiplicity` times, `error` the greatest distance
    of the covariance from exp(-r^2 / 2). The state is (x, x', x'', ...), each entry scaled to unit
    variance. Cost of a transition: products of a (d^2, K) with a (K, m) matrix, K up to about 40.
    """

    is_approximate = True
    # r up to which transitions are power series, at equal digits, and from which on they are sums
    # over the poles: there Q is nearly P0
    switch, settled = 1.25, 1.25  # mathematical

    def __init__(
        self,
        name: str,
        decays: Sequence[float],
        frequencies: Sequence[float],
        zero: float,
        error: float,
        *,
        multiplicity: int = 1,
    ) -> None:
        self.error = error
        if multiplicity > 1:
            self.switch, self.settled = 0.5, 8.0
        a, b = np.array(decays), np.array(frequencies)
        self._decays, self._frequencies = a, b
        poles = np.concatenate([-a + 1j * b, -a - 1j * b])
        d = len(poles)
        moments = _moments(poles, 2 * d - 1)
        i = np.arange(d)
        P = (-1.0) ** i * moments[i[:, None] + i] * ((i[:, None] + i) % 2 == 0)
        H = np.zeros(d)
        H[: 2 * multiplicity + 1 : 2] = [
            math.comb(multiplicity, k) * zero ** (-2 * k) for k in range(multiplicity + 1)
        ]
        q = 1 / (H @ P @ H)
        scale = np.sqrt(q * np.diag(P))
        A = np.diag(np.ones(d - 1), 1)
        A[-1] = -np.poly(poles).real[:0:-1]
        A = A * scale / scale[:, None]
        noise = np.r_[np.zeros(d - 1), math.sqrt(q) / scale[-1]]
        P0 = q * P / np.outer(scale, scale)
        self._shift = float(a.mean())
        self._series = _series(
            A, noise, self._shift, _n_terms(self._spread * self.switch, 2 * d - 1)
        )
        if multiplicity > 1:
            P0 = self._stationary_by_doubling()
            variance = float((H * scale) @ P0 @ (H * scale))
            P0, noise = P0 / variance, noise / math.sqrt(variance)
            self._series[1] = self._series[1] / variance
        super().__init__(name, A.tolist(), noise.tolist(), P0.tolist())
        self.observation = torch.tensor(H * scale)
        self.horizon = self.horizon / a.min()
        self._modes = _modes(A, poles[: d // 2], P0)
        # Of the waves in k(r).
        H, P0 = self.observation.numpy(), self.stationary.numpy()
        self._weights = np.einsum("i,iju,j->u", H, self._modes[0], P0 @ H)
        if multiplicity > 1:
            self._weights = _residues(poles, zero, multiplicity)

    def _stationary_by_doubling(self) -> np.ndarray:
        """P0 as the limit of Q(2r) = Q + F Q F', a sum without cancellation."""
        powers = self.switch ** np.arange(self._series[0].shape[-1])
        decay = math.exp(-self._shift * self.switch)
        F, Q = (each @ powers * decay**k for k, each in enumerate(self._series, 1))
        while np.abs(F).max() > 1e-30:
            F, Q = F @ F, Q + F @ Q @ F.T
        return Q

    def correlation(self, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As of `Primitive`: waves of some decays a and frequencies b, with weights u and v."""
        a, b, (u, v) = self._decays, self._frequencies, self._weights.reshape(2, -1)
        decay = np.exp(np.multiply.outer(-a, r))
        phase = torch.from_numpy(np.multiply.outer(b, r))
        waves = np.concatenate([decay * phase.cos().numpy(), decay * phase.sin().numpy()])
        value = np.tensordot(self._weights, waves, 1)
        return value, r * np.tensordot(np.append(b * v - a * u, -a * v - b * u), waves, 1)

    def intended(self, r: np.ndarray, start: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """exp(-r^2 / 2), and what rounding leaves uncertain at r = 0.

        The eigenvalues fall below the rounding of the greatest whatever the noise.
        """
        square = r * r
        k = np.exp(-0.5 * square)
        return k + NUGGET * (r == 0), -square * k

    def fill(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        """By power series below the switch, by waves where settled, by compositions in between."""
        if not len(r):
            return
        low, high = (float(v) for v in torch.aminmax(r))
        if high < self.switch:
            return self._fill_series(r, high, F, Q)
        if high >= self.settled:
            self._fill_modes(r, F, Q)
        if low < self.settled:
            near = (r < self.settled).nonzero()[:, 0]
            F[..., near], Q[..., near] = self._composed(r[near])

    def _composed(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """F and Q of r (m,) from those of an r that is halved until it is below the switch."""
        shape = (self.n_states, self.n_states, len(r))
        F, Q = r.new_empty(shape), r.new_empty(shape)
        halvings = (r / self.switch).log2().floor().add_(1).clamp_(min=0)
        part = r * (-halvings).exp2()
        self._fill_series(part, self.switch, F, Q)
        for k in range(int(halvings.max())):
            here = (halvings > k).nonzero()[:, 0]
            f, q = F[..., here], Q[..., here]
            F[..., here] = matmul(f, f)
            Q[..., here] = q + matmul(matmul(f, q), f.transpose(0, 1))
        return F, Q

    def _fill_series(self, r: Tensor, high: float, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        n_terms = _n_terms(self._spread * high, 2 * d - 1)
        powers = r.new_ones(n_terms, len(r))
        for n in range(1, n_terms):
            torch.mul(powers[n - 1], r, out=powers[n])
        decay = torch.exp(-self._shift * r)
        for out, series, factor in zip((F, Q), self._series, (decay, decay * decay), strict=True):
            coefficients = constant_like(series[..., :n_terms], r).reshape(d * d, -1)
            torch.mul((coefficients @ powers).reshape(out.shape), factor, out=out)

    @property
    def _spread(self) -> float:
        """Greatest distance of sums of two poles from twice their mean."""
        offset = self._decays - self._shift
        return 2 * float(np.hypot(offset, self._frequencies).max())

    def _fill_modes(self, r: Tensor, F: Tensor, Q: Tensor) -> None:
        d = self.n_states
        a, b = (constant_like(v, r)[:, None] for v in (self._decays, self._frequencies))
        decay, phase = torch.exp(-a * r), b * r
        waves = torch.cat([decay * phase.cos(), decay * phase.sin()])  # (d, m)
        modes, squares = (constant_like(m, r).reshape(d * d, -1) for m in self._modes)
        F.copy_((modes @ waves).reshape(F.shape))
        u, v = torch.triu_indices(d, d, device=r.device)
        lost = (squares @ (waves[u] * waves[v])).reshape(Q.shape)
        torch.sub(constant_like(self.stationary, r)[..., None], lost, out=Q)


def _moments(poles: np.ndarray, count: int) -> np.ndarray:
    """Derivatives at 0 of the covariance of the all-pole process with unit noise, (count,)."""
    residues = np.array(
        [1 / (np.prod(np.delete(p - poles, k)) * np.prod(-p - poles)) for k, p in enumerate(poles)]
    )
    return np.array([(residues * poles**n).sum().real for n in range(count)])


def _residues(poles: np.ndarray, zero: float, multiplicity: int) -> np.ndarray:
    """Weights of the decaying cosines, then sines, in the covariance of unit variance, (d,)."""
    upper = poles[: len(poles) // 2]
    weights = np.array(
        [
            2
            * (1 + (p / zero) ** 2) ** (2 * multiplicity)
            / (np.prod((p - poles)[poles != p]) * np.prod(-p - poles))
            for p in upper
        ]
    )
    weights = weights / weights.sum().real
    return np.concatenate([weights.real, -weights.imag])


def _n_terms(x: float, lead: int) -> int:
    """Terms of a power series in x until they are below 1e-17 of the term ``lead``."""
    n, term = lead, 1.0
    while term > 1e-17:
        n += 1
        term *= x / n
    return n + 1


def _series(A: np.ndarray, noise: np.ndarray, shift: float, n_terms: int) -> list[np.ndarray]:
    """Coefficients (d, d, n_terms) of the shifted power series of F and of Q."""
    d = len(A)
    B, source = A + shift * np.eye(d), np.outer(noise, noise)
    F, G = [np.eye(d)], [np.zeros((d, d))]
    for n in range(n_terms - 1):
        F.append(B @ F[-1] / (n + 1))
        G.append((B @ G[-1] + G[-1] @ B.T + source) / (n + 1))
        source = source * (2 * shift) / (n + 1)
    return [np.stack(terms, -1) for terms in (F, G)]


def _modes(A: np.ndarray, poles: np.ndarray, P0: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of F in the waves, (d, d, d), and of F P0 F' in their products."""
    poles = np.concatenate([poles, poles.conj()])
    scale = np.cumprod(np.r_[1.0, np.diag(A, 1)])  # eigenvectors are powers of the pole, scaled
    V = poles[None] ** np.arange(len(A))[:, None] / scale[:, None]
    half = len(A) // 2
    parts = V.T[:half, :, None] * np.linalg.inv(V)[:half, None, :]  # residue at each upper pole
    modes = np.moveaxis(np.concatenate([2 * parts.real, -2 * parts.imag]), 0, -1)
    squares = []
    for u, v in zip(*np.triu_indices(len(A)), strict=True):
        product = modes[..., u] @ P0 @ modes[..., v].T
        squares.append(product if u == v else product + product.T)
    return np.ascontiguousarray(modes), np.stack(squares, -1)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


_A4, _B4 = [1.5671277701, 1.4806180914], [0.6327591736, 2.0165338261]  # mathematical
_A6, _B6 = (
    [1.8878092714, 1.847051314, 1.7547020574],
    [0.5143257123, 1.580459293, 2.8030488056],
)  # mathematical
GAUSSIAN4 = Rational("gaussian4", _A4, _B4, 4.8535871093, 4.5e-4)  # mathematical
GAUSSIAN6 = Rational("gaussian6", _A6, _B6, 5.0915963995, 9.1e-6)  # mathematical
GAUSSIAN10 = Rational(  # mathematical
    "gaussian10",
    [2.5229933638708, 2.5045583257601, 2.4655224542287, 2.4003052381072, 2.2954875609444],
    [0.42517576262229, 1.2871437638837, 2.1881234482934, 3.1732883459109, 4.3559387598295],
    8.0425580231903,
    5.17e-9,
    multiplicity=4,
)
GAUSSIAN12 = Rational(  # mathematical
    "gaussian12",
    _numbers(
        "2.6888676172797 2.6735894019399 2.641787815559 "
        "2.5904085084205 2.5130064236404 2.3952649660602"
    ),
    _numbers(
        "0.39088013174309 1.1802582495872 1.9943172601432 "
        "2.8571273495555 3.8124848240935 4.9755093201927"
    ),
    8.9665646895443,
    1.91e-10,
    multiplicity=5,
)
GAUSSIAN14 = Rational(  # mathematical
    "gaussian14",
    _numbers(
        "2.8788657196995 2.8650914506933 2.8360922654037 2.7897633049186 "
        "2.7232614128974 2.6302733773724 2.4953867359368"
    ),
    _numbers(
        "0.36104562657862 1.0882328587838 1.8321630022133 2.608661224449 "
        "3.4413576641489 4.3736037406684 5.5224501709424"
    ),
    9.7944089162414,
    1.01e-11,
    multiplicity=6,
)
GAUSSIAN16 = Rational(  # mathematical
    "gaussian16",
    _numbers(
        "3.0308811481137 3.0227873408394 3.0060793519194 2.9774634381966 "
        "2.9290172147598 2.851634658162 2.7394385417437 2.5824693906897"
    ),
    _numbers(
        "0.34200634416664 1.0292267031963 1.725794289781 2.4386108017718 "
        "3.1807525367727 3.9800272948011 4.8878385114833 6.0270465857058"
    ),
    10.563465707946,
    9.1e-13,
    multiplicity=7,
)
#: Those of six states and more, by their errors.
GAUSSIANS = (GAUSSIAN6, GAUSSIAN10, GAUSSIAN12, GAUSSIAN14, GAUSSIAN16)  # mathematical
