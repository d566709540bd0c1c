r"""What noise is like: of a variance that depends on the input [1]_, or added to log y.

.. math:: y_i = f(x_i) + \varepsilon_i, \qquad \varepsilon_i \sim N(0, \sigma^2 e^{g(x_i)}),

with a process g beside f. As in [2]_ the two are learned in turn, and in one round: the process of
constant noise that has been fitted predicts each of some observations from all others, with an
error :math:`r_i` and a variance :math:`v_i` of f, and then

.. math:: r_i \mid g \sim N(0, v_i + \sigma^2 e^{g(x_i)}), \qquad
          g \sim GP\big(0, a\,\rho(x / c, x' / c) + b\big),

:math:`\rho` the correlation of f: g varies as f does, over c times its length scales. The posterior
of g is Laplace's approximation, with the expected curvature
([3]_, section 3.4)

.. math:: W_i = \tfrac12 \omega_i^2, \qquad
          \omega_i = \sigma^2 e^{g_i} / (v_i + \sigma^2 e^{g_i}),

as the observed one is negative where an error is small; a and c are the likeliest of a few. The
variance of noise is its mean, :math:`\sigma^2 E[e^g] = \sigma^2 e^{m + s^2 / 2}`: where little is
known of g it is greater.

Errors of a smoother process, of an RBF kernel, tell more where f is rougher here than there: what
is rough is noise to it. Whichever errors g is learned from, it must make those of the process that
has been fitted likelier, each left out of g [4]_.

What is predicted of f stays that of constant noise: to give observations less weight where errors
are large, as where f is rough, makes them larger, by a third on airfoil.

Whether noise is rather added to log y than to y (`logs_predict_better`) is told by processes of
either scale, each of which predicts some observations from all others ([3]_, section 5.4.2). The
density of y of a process of log y is that of log y divided by y; what it predicts is
:math:`e^{m + \sigma^2 / 2}`. Log y is the more complex scale: it needs clearly better densities,
and squared errors of predictions of y that are not clearly greater.

References
----------
.. [1] Goldberg, Williams and Bishop (1998), Regression with input-dependent noise: a Gaussian
   process treatment.
.. [2] Kersting, Plagemann, Pfaff and Burgard (2007), Most likely heteroscedastic Gaussian process
   regression.
.. [3] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning.
.. [4] Vehtari, Mononen, Tolvanen, Sivula and Winther (2016), Bayesian leave-one-out
   cross-validation approximations for Gaussian latent variable models.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram, gram_diag
from skgp.learning import defaults
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.learning.selection import improves
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky, raise_diagonal_


@dataclass(frozen=True)
class NoiseFunction:
    r"""Logarithm of the variance of noise over its constant :math:`\sigma^2`."""

    kernel: Any  # of f, without noise
    X: Tensor  # (m, d), in units of c length scales
    stretch: float  # c
    amplitude: float  # a
    alpha: Tensor  # (m,), K^-1 times the mode of g
    reduction: Tensor  # (m, m), W^1/2 B^-1 W^1/2
    constant: float  # sigma^2

    def __call__(self, X: Tensor, noise: float) -> Tensor:
        """At rows X (n, d), differentiable in them, of a process whose constant noise is another.

        ``O(n m (m + d))``.
        """
        rho = _correlation(self.kernel, X / self.stretch, self.X)
        K = self.amplitude * rho + defaults.NOISE_LEVEL
        var = self.amplitude + defaults.NOISE_LEVEL - ((K @ self.reduction) * K).sum(1)
        return _beside(noise, K @ self.alpha + 0.5 * var.clamp(min=0), self.constant)


def learn_noise_function(kernel: Any, data: Data, smoother: Any = None) -> NoiseFunction | None:
    """Of some hundred observations, y (n,), none merged, and the kernel of the fit, with noise.

    With `smoother`, a kernel to maximise the evidence of, None unless observations left out of g
    are clearly likelier by it, as the fitted process predicts them: by g of its own errors, or else
    of those of the smoother process, to which more of what varies is noise. ``O(n^3)`` some 100
    times, or 200.
    """
    try:
        own = Errors.of(kernel, data)
        found = own.likeliest(kernel, data)
        if smoother is None or found.is_likelier(own):
            return found.function(own.constant)
        smoother = maximise_evidence(smoother, data, max_iter=defaults.LOG_ITER)[0].kernel
        errors = Errors.of(smoother, data)
        found = errors.likeliest(smoother, data)
        return found.function(errors.constant) if found.is_likelier(own) else None
    except NotPositiveDefiniteError:
        return None


@dataclass(frozen=True)
class Errors:
    """Observations left out of f; as a likelihood of g, what `LaplaceEvidence` asks of one."""

    error: Tensor  # (n,), r
    variance: Tensor  # (n,), v
    noise: Tensor  # (n,)
    constant: float  # noise of weight 1

    has_link = False

    @staticmethod
    def of(kernel: Any, data: Data) -> "Errors":
        """Of each observation, predicted from all others (Sundararajan and Keerthi, 2001)."""
        kernel, white = cast(tuple[Any, Any], split_noise(kernel))
        noise = torch.full_like(data.y, float(white.noise_level))
        if data.weight is not None:
            noise /= data.weight
        K = gram(kernel, data.X)
        raise_diagonal_(K, noise)
        precision = cho_inverse(jittered_cholesky(K).factor)
        total = 1 / precision.diagonal()
        error = total * (precision @ data.y)
        return Errors(error, (total - noise).clamp(min=0), noise, float(white.noise_level))

    def likeliest(self, kernel: Any, data: Data) -> "PosteriorOfLogs":
        """The likeliest posterior of g."""
        kernel, _ = split_noise(kernel)
        grid = product(defaults.NOISE_AMPLITUDES, defaults.NOISE_STRETCHES)
        fits = [PosteriorOfLogs(self, kernel, data.X, a, c) for a, c in grid]
        return max(fits, key=lambda fit: fit.evidence)

    def losses(self, g: Tensor) -> Tensor:
        """Minus log densities at g (n,), up to a constant."""
        return -self.log_prob_and_derivatives(self.error, g)[0]

    def log_prob_and_derivatives(self, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of errors r (n,) in g (n,), up to a constant; minus W for the second."""
        total = self.variance + self.noise * g.exp()
        share, square = 1 - self.variance / total, r.square() / total
        return -0.5 * (total.log() + square), 0.5 * share * (square - 1), -0.5 * share.square()


class PosteriorOfLogs:
    """The posterior of g at the observations."""

    def __init__(self, errors: Errors, kernel: Any, X: Tensor, amplitude: float, stretch: float):
        self._errors, self._kernel, self._X = errors, kernel, X / stretch
        self._stretch, self._amplitude = stretch, amplitude
        self._K = amplitude * _correlation(kernel, self._X, self._X) + defaults.NOISE_LEVEL
        fit = LaplaceEvidence(_Known(self._K), errors.error[:, None], errors).fit(np.empty(0))
        self.evidence, self.alpha = float(fit.log_evidence), fit.alpha[:, 0]
        self._root = fit.root

    @cached_property
    def reduction(self) -> Tensor:
        """W^1/2 B^-1 W^1/2, (n, n)."""
        B = self._root * self._K * self._root.mT
        raise_diagonal_(B, 1.0)
        return self._root * cho_inverse(jittered_cholesky(B).factor) * self._root.mT

    def function(self, constant: float) -> NoiseFunction:
        """At any input."""
        known = self._kernel, self._X, self._stretch, self._amplitude
        return NoiseFunction(*known, self.alpha, self.reduction, constant)

    def is_likelier(self, errors: Errors) -> bool:
        """Whether errors of the fitted process are clearly likelier, each left out of g."""
        new = errors.losses(_beside(errors.constant, self.left_out(), self._errors.constant))
        old = errors.losses(torch.zeros_like(new))
        return improves(new, old, n_errors=defaults.NOISE_ERRORS)

    def left_out(self) -> Tensor:
        r"""log E[e^g] (n,) from the posterior of g without the site of each error, as of [4]_.

        .. math:: 1 / s_{-i}^2 = 1 / s_i^2 - W_i, \qquad
                  m_{-i} / s_{-i}^2 = m_i / s_i^2 - W_i m_i - \nabla_i \log p.
        """
        g, W = self._K @ self.alpha, self._root[:, 0].square()
        var = self._K.diagonal() - ((self._K @ self.reduction) * self._K).sum(1)
        without = 1 / (1 / var - W)
        return without * (g / var - W * g - self.alpha) + 0.5 * without  # the slope is alpha


def _beside(noise: float, logs: Tensor, constant: float) -> Tensor:
    """Logarithms (n,) of factors of a constant, as those of the noise of another process.

    What that has more is of its approximation, and the same everywhere.
    """
    return torch.log1p(constant / max(noise, constant) * torch.expm1(logs))


def _correlation(kernel: Any, X: Tensor, Z: Tensor) -> Tensor:
    """Of f at rows X (n, d) with f at rows Z (m, d); 0 where f has no variance."""
    scale, other = (gram_diag(kernel, rows).clamp(min=1e-300).rsqrt() for rows in (X, Z))
    return scale[:, None] * gram(kernel, X, Z) * other


@dataclass(frozen=True)
class _Known:
    """A matrix without hyper-parameters, as `LaplaceEvidence` takes one."""

    K: Tensor  # (n, n)

    few = False

    def __call__(self, theta: np.ndarray) -> tuple[Tensor, None]:
        return self.K, None


def logs_predict_better(kernel: Any, data: Data) -> bool:
    """Of some hundred observations, none merged, with positive y (n,); the kernel has noise.

    ``O(n^3)`` some 30 times.
    """
    if data.y.max() == data.y.min():  # as some of many may be
        return False
    try:
        (plain, error), (logs, error_of_logs) = (left_out(kernel, data, f) for f in (False, True))
    except NotPositiveDefiniteError:
        return False
    unit = error.mean() or 1.0
    options: dict[str, Any] = {"weight": data.weight, "n_errors": defaults.LOG_ERRORS}
    worse = improves(error / unit, error_of_logs / unit, **options)
    return not worse and improves(logs, plain, **options)


def left_out(kernel: Any, data: Data, of_log: bool) -> tuple[np.ndarray, np.ndarray]:
    """Minus log densities of y (n,) over its greatest size, in nats, and squared errors.

    As of observations of weight 1: what others count for is for those who average.
    """
    y = data.y.numpy() / float(data.y.abs().max())  # whose squares are numbers
    u = np.log(y) if of_log else y
    mean = np.average(u, weights=data.weight)
    scale = np.average((u - mean) ** 2, weights=data.weight) ** 0.5
    z = (u - mean) / scale
    scaled = replace(data, y=torch.from_numpy(z))
    found, _ = maximise_evidence(kernel, scaled, max_iter=defaults.LOG_ITER)
    at = found.family.at(found.theta)[2]
    white: Any = split_noise(found.kernel)[1]
    predicted, var, noise = mean + scale * (z - at.residual), at.variance, white.noise_level
    if data.weight is not None:
        var = np.maximum(var - noise / data.weight.numpy(), 0.0) + noise
    var, noise = scale**2 * var, scale**2 * noise
    loss = 0.5 * (np.log(2 * np.pi * var) + (u - predicted) ** 2 / var)
    if not of_log:
        return loss, (y - predicted) ** 2
    return loss + np.log(y), (y - np.exp(predicted + 0.5 * noise)) ** 2
