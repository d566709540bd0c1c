"""The leaves of kernel expressions: one class a kernel, which owns all its evaluations.

Stationary leaves are functions of the squared distance (:mod:`.distances`). Inputs are centred
first, so that data far from the origin lose no digits.

A new leaf is a class here and an entry in `LEAVES`.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Kernel,
    Matern,
    RationalQuadratic,
)
from torch import Tensor

from .distances import (
    PROFILES,
    Metric,
    Profile,
    by_differences_where_near,
    correct_far_,
    exp_decay_,
    matern32,
    matern52,
    scaled_inputs,
)
from .special import gamma_quantile, harmonic_weight, scaled_bessel
from .specs import SHO, Cosine, LocalLinearTrend, check_one_column

Params = dict[str, Tensor]
Rows = Callable[[int, int, np.random.Generator], Tensor]  # standard Gaussian ones
Draws = tuple[Tensor, ...]


class Leaf:
    """Evaluations of one class of kernels; `profile` and `draw` of those that say so."""

    has_profile = has_spectrum = owns_covariance = False  # the last: a tensor to be written to

    def covariance(
        self, kernel: Kernel, params: Params, X: Tensor, Z: Tensor | None, metric: Metric
    ) -> Tensor:
        """K(X, Z), X (..., n, d) and Z (..., p, d), differentiable; what broadcasts to it."""
        raise NotImplementedError

    def variance(self, kernel: Kernel, params: Params, X: Tensor) -> Tensor:
        """Diagonal of K(X, X); what broadcasts to (..., n)."""
        return X.new_ones(())

    def tile(
        self, kernel: Kernel, params: Params, X: Tensor, Z: Tensor, out: Tensor | None
    ) -> Tensor | None:
        """K(X, Z) evaluated in place, where there is a faster way than `covariance`."""
        return None

    def profile(self, kernel: Kernel, params: Params) -> tuple[Profile, float]:
        """k and k' of s and of what is rounding in it; what the length scale is divided by."""
        raise NotImplementedError

    def draw(self, kernel: Kernel, params: Params, count: int, d: int, rows: Rows, rng) -> Draws:
        """Randomness of `count` frequencies in d columns."""
        raise NotImplementedError

    def frequencies(
        self, kernel: Kernel, params: Params, draws: Draws
    ) -> tuple[Tensor, Tensor | None]:
        """Frequencies (count, d), and factors (count,) of the variance that each carries."""
        return draws[0] / params["length_scale"], None


class _Constant(Leaf):
    """The constant itself."""

    def covariance(self, kernel, params, X, Z, metric):
        return params["constant_value"]

    def variance(self, kernel, params, X):
        return params["constant_value"]


class _RBF(Leaf):
    """exp(-r^2 / 2) of the scaled distance r; frequencies are normal, N(0, 1 / length_scale^2)."""

    has_profile = has_spectrum = True

    def covariance(self, kernel, params, X, Z, metric):
        # exp saves its result alone, so both steps may work in place under autograd too.
        return metric.squared(*scaled_inputs(X, Z, params["length_scale"])).mul_(-0.5).exp_()

    def profile(self, kernel, params):
        return PROFILES[math.inf], 1.0

    def draw(self, kernel, params, count, d, rows, rng):
        return (rows(count, d, rng),)


class _Matern(_RBF):
    """exp(-s) times 1, 1 + s or 1 + s + s^2 / 3 of s = sqrt(2 nu) r, of nu 1/2, 3/2 and 5/2."""

    def covariance(self, kernel, params, X, Z, metric):
        nu = kernel.nu
        if nu == math.inf:
            return super().covariance(kernel, params, X, Z, metric)
        A, B, same = scaled_inputs(X, Z, params["length_scale"] / math.sqrt(2 * nu))
        if nu == 0.5:
            return torch.exp(-metric.root(A, B, same))
        profile = matern32 if nu == 1.5 else matern52
        return profile(metric.squared(A, B, same))

    def tile(self, kernel, params, X, Z, out):
        nu = kernel.nu
        # Of the Matern kernels 1/2 alone is rough: linear in the distance, not in its square.
        scale = params["length_scale"] / math.sqrt(2 * nu)
        squared = _tile_squared(X, Z, scale, out, near=nu == 0.5)
        if nu == 0.5:
            return exp_decay_(squared.sqrt_().neg_())
        if nu == 1.5:
            s = squared.sqrt_()
            decay = exp_decay_(-s)
            return s.mul_(decay).add_(decay)
        s = squared.sqrt()
        squared.mul_(1 / 3).add_(s).add_(1)
        return squared.mul_(exp_decay_(s.neg_()))

    def profile(self, kernel, params):
        nu = kernel.nu
        return PROFILES[nu], 1.0 if nu == math.inf else math.sqrt(2 * nu)

    def draw(self, kernel, params, count, d, rows, rng):
        """Multivariate t with 2 nu degrees of freedom: Gaussian / sqrt(chi^2_{2 nu} / (2 nu))."""
        gaussian, nu = rows(count, d, rng), kernel.nu
        if nu == math.inf:
            return (gaussian,)
        mixing = np.sqrt(2 * nu / rng.chisquare(2 * nu, (count, 1)))
        return (gaussian * torch.from_numpy(mixing),)


class _RationalQuadratic(Leaf):
    """(1 + r^2 / (2 alpha))^-alpha of the scaled distance r: RBFs mixed by a Gamma law."""

    has_profile = has_spectrum = True

    def covariance(self, kernel, params, X, Z, metric):
        alpha = params["alpha"]
        squared = metric.squared(*scaled_inputs(X, Z, params["length_scale"]))
        return torch.exp(-alpha * torch.log1p(squared / (2 * alpha)))

    def tile(self, kernel, params, X, Z, out):
        alpha = params["alpha"]
        # length_scale sqrt(2 alpha) leaves 1 + squared as the base of the power.
        squared = _tile_squared(X, Z, params["length_scale"] * (2 * alpha).sqrt(), out)
        return squared.log1p_().mul_(-alpha).exp_()

    def profile(self, kernel, params):
        alpha = float(params["alpha"])

        def profile(s: Tensor, floor: float) -> tuple[Tensor, Tensor]:
            base = s.mul_(1 / (2 * alpha)).add_(1)
            k = base.pow(-alpha)
            return k, k / base.mul_(-2)

        return profile, 1.0

    def draw(self, kernel, params, count, d, rows, rng):
        """Gaussian rows and the levels of their Gamma mixing."""
        return rows(count, d, rng), torch.from_numpy(rng.random((count, 1)))

    def frequencies(self, kernel, params, draws):
        r"""w = sqrt(tau) g / l with tau ~ Gamma(alpha, rate alpha).

        It follows from (1 + r^2 / (2 alpha l^2))^{-alpha} = E[exp(-tau r^2 / (2 l^2))].
        """
        gaussian, level = draws
        mixing = gamma_quantile(params["alpha"], level) / params["alpha"]
        return gaussian * mixing.sqrt() / params["length_scale"], None


class _ExpSineSquared(Leaf):
    """exp(-2 sin^2(pi r / periodicity) / length_scale^2) of the distance r."""

    has_spectrum = owns_covariance = True

    def covariance(self, kernel, params, X, Z, metric):
        distance = metric.root(*scaled_inputs(X, Z, 1.0))
        sine = torch.sin(distance * (math.pi / params["periodicity"])) / params["length_scale"]
        return torch.exp(-2 * sine.square())

    def draw(self, kernel, params, count, d, rows, rng):
        r"""Signed harmonics and their probabilities under the kernel's own length scale.

        .. math:: e^{-2 \sin^2(\pi r / p) / l^2} = \sum_{k \ge 0} w_k \cos(2 \pi k r / p), \qquad
                  w_k = (2 - \delta_{k0}) e^{-z} I_k(z),\; z = l^{-2}.

        Systematic sampling: harmonic k comes up count w_k times, give or take one.
        """
        z = float(params["length_scale"]) ** -2
        # I_k(z) falls like exp(-k^2 / (2 z)) for k < z and like (z / 2)^k / k! beyond.
        n_harmonics = 40 + math.ceil(9 * math.sqrt(z))
        if n_harmonics > 10_000_000:
            raise ValueError(
                f"{kernel} has a spectrum of more than 10 million harmonics; "
                "length_scale must be above 1e-6."
            )
        probability = scaled_bessel(np.arange(n_harmonics), z)
        probability[1:] *= 2
        probability /= probability.sum()
        levels = (np.arange(count) + rng.random()) / count
        harmonic = np.searchsorted(probability.cumsum(), levels).clip(max=n_harmonics - 1)
        harmonic = rng.permutation(harmonic)  # in a product the factors' draws are independent
        sign = rng.integers(0, 2, count) * 2.0 - 1.0
        return torch.from_numpy(harmonic * sign)[:, None], torch.from_numpy(probability[harmonic])

    def frequencies(self, kernel, params, draws):
        """Harmonics do not move with the length scale: their weights do."""
        harmonic, probability = draws
        z = params["length_scale"] ** -2
        weight = harmonic_weight(z, harmonic[:, 0].abs()) / probability
        return harmonic * (2 * math.pi / params["periodicity"]), weight


class _Cosine(Leaf):
    """cos(2 pi r / period) of the distance r in one column."""

    has_spectrum = owns_covariance = True

    def covariance(self, kernel, params, X, Z, metric):
        check_one_column("Cosine", X.shape[-1])
        return torch.cos(metric.root(*scaled_inputs(X, Z, 1.0)) * (2 * math.pi / params["period"]))

    def draw(self, kernel, params, count, d, rows, rng):
        """Signs: in a product, cos a cos b = (cos(a + b) + cos(a - b)) / 2."""
        return (torch.from_numpy(rng.integers(0, 2, (count, 1)) * 2.0 - 1.0),)

    def frequencies(self, kernel, params, draws):
        return draws[0] * (2 * math.pi / params["period"]), None


class _SHO(Leaf):
    """exp(-r / decay) (cos b r + sin(b r) / (b decay)), b = 2 pi / period, r in one column."""

    has_spectrum = owns_covariance = True

    def covariance(self, kernel, params, X, Z, metric):
        check_one_column("SHO", X.shape[-1])
        lag = metric.root(*scaled_inputs(X, Z, 1.0))
        angle = lag * (2 * math.pi / params["period"])
        ratio = params["period"] / (2 * math.pi * params["decay"])
        return torch.exp(-lag / params["decay"]) * (angle.cos() + ratio * angle.sin())

    def draw(self, kernel, params, count, d, rows, rng):
        r"""Signs and Cauchy numbers z of frequencies w = +-b + a z, a = 1 / tau, by rejection.

        The density :math:`2 a \omega_0^2 / \pi ((w - b)^2 + a^2) ((w + b)^2 + a^2)` is
        :math:`2 \omega_0^2 / (w^2 + \omega_0^2) \le 2` times that of all such frequencies. The last
        are these factors.
        """
        own = {name: params[name].detach() for name in ("period", "decay")}
        kept = torch.empty(2, 0, 1, dtype=torch.float64, device=own["decay"].device)
        while kept.shape[1] < count:
            sign = rng.integers(0, 2, (4 * count, 1)) * 2.0 - 1.0
            drawn = torch.from_numpy(np.stack([sign, rng.standard_cauchy((4 * count, 1))]))
            drawn = drawn.to(kept.device)
            accepted = torch.from_numpy(rng.random(4 * count)).to(kept.device)
            kept = torch.cat([kept, drawn[:, 2 * accepted < _of_oscillator(own, *drawn)[1]]], 1)
        kept = kept[:, :count]
        return kept[0], kept[1], _of_oscillator(own, *kept)[1]

    def frequencies(self, kernel, params, draws):
        """Frequencies move with the hyper-parameters, and so do the factors of their density."""
        sign, cauchy, factor = draws
        w, now = _of_oscillator(params, sign, cauchy)
        return w, now / factor


def _of_oscillator(params: Params, sign: Tensor, cauchy: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies (m, 1), and what their density is of that of all such, (m,)."""
    a, b = 1 / params["decay"], 2 * math.pi / params["period"]
    w, square = sign * b + cauchy * a, a.square() + b.square()
    return w, 2 * square / (w[:, 0].square() + square)


class _LocalLinearTrend(Leaf):
    """level + slope u v + diffusion times the covariance of integrated Brownian motion.

    Of u and v on one side of `origin` that is a^2 (3 b - a) / 6 with a the nearer's distance from
    it and b the farther's; of others 0.
    """

    owns_covariance = True

    def covariance(self, kernel, params, X, Z, metric):
        check_one_column("LocalLinearTrend", X.shape[-1])
        u = X - kernel.origin  # (..., n, 1)
        v = u.mT if Z is None else Z.mT - kernel.origin  # (..., 1, p)
        low, high = torch.minimum(u.abs(), v.abs()), torch.maximum(u.abs(), v.abs())
        wander = (u * v > 0) * low.square() * (3 * high - low) / 6
        return params["level"] + params["slope"] * (u * v) + params["diffusion"] * wander

    def variance(self, kernel, params, X):
        check_one_column("LocalLinearTrend", X.shape[-1])
        u = (X[..., 0] - kernel.origin).abs()
        return params["level"] + params["slope"] * u**2 + params["diffusion"] * u**3 / 3


class _DotProduct(Leaf):
    """x'z + sigma_0^2."""

    owns_covariance = True

    def covariance(self, kernel, params, X, Z, metric):
        return X @ (X if Z is None else Z).mT + params["sigma_0"] ** 2

    def variance(self, kernel, params, X):
        return params["sigma_0"] ** 2 + X.square().sum(-1)


LEAVES: dict[type, Leaf] = {
    ConstantKernel: _Constant(),
    RBF: _RBF(),
    Matern: _Matern(),
    RationalQuadratic: _RationalQuadratic(),
    ExpSineSquared: _ExpSineSquared(),
    DotProduct: _DotProduct(),
    Cosine: _Cosine(),
    SHO: _SHO(),
    LocalLinearTrend: _LocalLinearTrend(),
}


def _tile_squared(
    X: Tensor, Z: Tensor, scale: Tensor, out: Tensor | None, near: bool = False
) -> Tensor:
    """Squared distance of scaled inputs, clamped at 0; ``near``: with the digits for a root."""
    A, B, _ = scaled_inputs(X, Z, scale)
    a2, b2 = A.square().sum(1, keepdim=True), B.square().sum(1, keepdim=True)
    left = torch.cat([-2 * A, a2, torch.ones_like(a2)], 1)
    right = torch.cat([B, torch.ones_like(b2), b2], 1)
    D = correct_far_(torch.matmul(left, right.T, out=out).clamp_min_(0), A, B, a2, b2)
    return by_differences_where_near(D, A, B, a2[:, 0]) if near else D
