r"""Noise of a variance that depends on the input [1]_.

.. math:: y_i = f(x_i) + \varepsilon_i, \qquad \varepsilon_i \sim N(0, \sigma^2 e^{g(x_i)}),

with a process g beside f. As in [2]_ the two are learned in turn, and in one round: the process of
constant noise that has been fitted predicts each of some observations from all others, of many the
nearest, with an error :math:`r_i` and a variance :math:`v_i` of f, and then

.. math:: r_i \mid g \sim N(0, v_i + \sigma^2 e^{g(x_i)}), \qquad
          g \sim GP\big(0, a\,\rho(x / c, x' / c) + b\big),

:math:`\rho` the correlation of f: g varies as f does, over c times its length scales. The posterior
of g is Laplace's approximation, at its mode with the expected curvature
([3]_, section 3.4)

.. math:: W_i = \tfrac12 \omega_i^2, \qquad
          \omega_i = \sigma^2 e^{g_i} / (v_i + \sigma^2 e^{g_i}),

as the observed one is negative where an error is small; a and c are the likeliest of a few. The
variance of noise is its mean, :math:`\sigma^2 E[e^g] = \sigma^2 e^{m + s^2 / 2}`: where little is
known of g it is greater.

Errors of a smoother process, of an RBF kernel, tell more where f is rougher here than there: what
is rough is noise to it. Whichever errors g is learned from, it must make those of the process that
has been fitted likelier, each left out of g [4]_. A few gross errors that happen to be neighbours
would do as normal ones, of which the squares count: errors of Student's t, with tails as heavy as
those that errors of constant noise have, must become likelier as well.

What is predicted of f stays that of constant noise: to give observations less weight where errors
are large, as where f is rough, makes them larger, by a third on airfoil.

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

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributions import StudentT

from skgp.data import Data, random_rows
from skgp.inference.neighbors.search import CandidateSearch
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram, gram_diag
from skgp.learning import defaults
from skgp.learning.evidence import leave_one_out_errors
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_factor
from skgp.learning.search import SearchSettings, neighbor_tiles
from skgp.learning.selection import improves
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky, log_det, raise_diagonal_


@dataclass(frozen=True)
class NoiseFunction:
    r"""Logarithm of the variance of noise over its constant :math:`\sigma^2`."""

    kernel: Any  # of f, without noise
    X: Tensor  # (m, d), in units of c length scales
    stretch: float  # c
    amplitude: float  # a
    alpha: Tensor  # (m,), K^-1 times the mode of g
    root: Tensor  # (m,), W^1/2
    constant: float  # sigma^2

    @cached_property
    def reduction(self) -> Tensor:
        """W^1/2 B^-1 W^1/2, (m, m)."""
        K = self.amplitude * _correlation(self.kernel, self.X, self.X) + defaults.NOISE_LEVEL
        return self.root[:, None] * cho_inverse(laplace_factor(K, self.root)) * self.root

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "reduction"}

    def __call__(self, X: Tensor, noise: float) -> Tensor:
        """At rows X (n, d), differentiable in them, of a process whose constant noise is another.

        ``O(n m (m + d))``.
        """
        rho = _correlation(self.kernel, X / self.stretch, self.X)
        K = self.amplitude * rho + defaults.NOISE_LEVEL
        var = self.amplitude + defaults.NOISE_LEVEL - ((K @ self.reduction) * K).sum(1)
        return _beside(noise, K @ self.alpha + 0.5 * var.clamp(min=0), self.constant)


def learn_noise_function(kernel: Any, data: Data, smoother: Any = None) -> NoiseFunction | None:
    """Of y (n,), none merged, and the kernel of the fit, with noise: from the errors of some.

    With `smoother`, a kernel to maximise the evidence of, None unless observations left out of g
    are clearly likelier by it, as the fitted process predicts them: by g of its own errors, or else
    of those of the smoother process, to which more of what varies is noise. ``O(m^3)`` some 50
    times, or 100, of m errors.
    """
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    order = order[: defaults.NOISE_JUDGED].to(data.X.device)
    least, most = defaults.NOISE_ROWS
    rows, others = order.tensor_split([min(max(least, len(data) // 4), most)])
    some, judged = data.take(rows), data.take(order)
    try:
        own = Errors.of(kernel, data, order)
        found = own.first(len(rows)).likeliest(kernel, some)
        if smoother is None or found.is_likelier(own, judged):
            return found.function
        fit, _ = maximise_evidence(smoother, some.take(slice(least)), max_iter=defaults.LOG_ITER)
        found = Errors.of(fit.kernel, data, rows).likeliest(fit.kernel, some)
        return found.function if found.is_likelier(own, judged) else None
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
    def of(kernel: Any, data: Data, rows: Tensor) -> "Errors":
        """Of observations `rows` (n,), all of few, predicted from the others, or their nearest."""
        signal, white = cast(tuple[Any, Any], split_noise(kernel))
        noise = data.row_noise(data.y.new_tensor(white.noise_level))
        if len(data) <= defaults.NOISE_ROWS[0]:  # (Sundararajan and Keerthi, 2001)
            K = gram(signal, data.X[rows])
            raise_diagonal_(K, noise[rows])
            precision = cho_inverse(jittered_cholesky(K).factor)
            total = 1 / precision.diagonal()
            error = total * (precision @ data.y[rows])
        else:
            generator = torch.Generator().manual_seed(0)
            known = random_rows(len(data), SearchSettings.max_candidates, generator)
            k = min(defaults.NOISE_NEIGHBORS, len(data) - 1)
            near = CandidateSearch(signal, data.X, known.to(rows)).query(rows, k)
            tiles = neighbor_tiles(rows, near)
            found = [leave_one_out_errors(kernel, data, *tile) for tile in tiles]
            error, total = map(torch.cat, zip(*found, strict=True))
        noise = noise[rows]
        return Errors(error, (total - noise).clamp(min=0), noise, float(white.noise_level))

    def first(self, m: int) -> "Errors":
        """Of the first m."""
        return Errors(self.error[:m], self.variance[:m], self.noise[:m], self.constant)

    def likeliest(self, kernel: Any, data: Data) -> "PosteriorOfLogs":
        """The likeliest posterior of g, each mode sought from the last."""
        prior = PriorOfLogs(split_noise(kernel)[0], data.X)
        laplace = LaplaceEvidence(prior, self.error[:, None], self)
        grid = product(defaults.NOISE_STRETCHES, defaults.NOISE_AMPLITUDES)
        fits = [
            PosteriorOfLogs(self, prior, at, laplace.fit(np.array(at)).alpha[:, 0]) for at in grid
        ]
        return max(fits, key=lambda fit: fit.evidence)

    def losses(self, g: Tensor) -> Tensor:
        """Minus log densities at g (n,), up to a constant."""
        return -self.log_prob_and_derivatives(self.error, g)[0]

    def robust_losses(self, g: Tensor) -> Tensor:
        """Of Student's t instead, with the scales of the normal distributions times a constant."""
        return -self._student(g, *self._tails).log_prob(self.error)

    @cached_property
    def _tails(self) -> tuple[Tensor, Tensor]:
        """The likeliest degrees of freedom and constant at g = 0, of a grid, (1,) each."""
        options: dict[str, Any] = {"dtype": self.error.dtype, "device": self.error.device}
        df = torch.tensor(defaults.NOISE_TAILS, **options)[:, None]
        scale = torch.logspace(*defaults.NOISE_SCALES, **options)[:, None, None]
        log_prob = self._student(torch.zeros_like(self.error), df, scale).log_prob(self.error)
        j, i = divmod(int(log_prob.sum(-1).argmax()), len(df))
        return df[i], scale[j, 0]

    def _student(self, g: Tensor, df: Tensor, scale: Tensor) -> StudentT:
        scale = scale * (self.variance + self.noise * g.exp()).sqrt()
        return StudentT(df, scale=scale, validate_args=False)  # g may overflow

    def log_prob_and_derivatives(self, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of errors r (n,) in g (n,), up to a constant, for Newton's method."""
        share, total = self.share(g), self.variance + self.noise * g.exp()
        excess = r.square() / total - 1
        second = 0.5 * share * ((1 - share) * excess - share * (1 + excess))
        return -0.5 * (total.log() + 1 + excess), 0.5 * share * excess, second

    def share(self, g: Tensor) -> Tensor:
        """omega (n,)."""
        noise = self.noise * g.exp()
        return noise / (self.variance + noise)


class PriorOfLogs:
    """Covariances of g at the observations X (n, d), as `LaplaceEvidence` takes those of f."""

    few = False

    def __init__(self, kernel: Any, X: Tensor) -> None:
        self.kernel, self.X = kernel, X

    def __call__(self, theta: Any) -> tuple[Tensor, None]:
        """At c and a, (n, n)."""
        stretch, amplitude = map(float, theta)
        X = self.X / stretch
        return amplitude * _correlation(self.kernel, X, X) + defaults.NOISE_LEVEL, None


class PosteriorOfLogs:
    """The posterior of g at the observations, of the mode K alpha."""

    def __init__(self, errors: Errors, prior: PriorOfLogs, theta: Any, alpha: Tensor) -> None:
        self.errors, self.prior, self.theta, self.alpha = errors, prior, theta, alpha
        self.K, _ = prior(theta)  # (n, n)
        self.mode = self.K @ alpha
        self.root = errors.share(self.mode) / math.sqrt(2)  # W^1/2, (n,)
        complexity = 0.5 * (self.mode @ alpha + log_det(laplace_factor(self.K, self.root)))
        #: Logarithm of the evidence, up to a constant.
        self.evidence = -float(errors.losses(self.mode).sum() + complexity)

    @cached_property
    def function(self) -> NoiseFunction:
        """At any input."""
        stretch, amplitude = self.theta
        known = self.prior.kernel, self.prior.X / stretch, stretch, amplitude
        return NoiseFunction(*known, self.alpha, self.root, self.errors.constant)

    def is_likelier(self, errors: Errors, data: Data) -> bool:
        """Whether errors of the fitted process are clearly likelier, each left out of g.

        They are of these observations, of which the first are those that g is learned from.
        """
        left_out = _beside(errors.constant, self.left_out(), self.errors.constant)
        g = torch.cat([left_out, self.function(data.X[len(left_out) :], errors.constant)])
        options = {"weight": data.weight, "n_errors": defaults.NOISE_ERRORS}
        return all(
            improves(losses(g), losses(torch.zeros_like(g)), **options)
            for losses in (errors.losses, errors.robust_losses)
        )

    def left_out(self) -> Tensor:
        r"""log E[e^g] (n,) from the posterior of g without the site of each error, as of [4]_.

        .. math:: 1 / s_{-i}^2 = 1 / s_i^2 - W_i, \qquad
                  m_{-i} / s_{-i}^2 = m_i / s_i^2 - W_i m_i - \nabla_i \log p.
        """
        g, W = self.mode, self.root.square()
        var = self.K.diagonal() - ((self.K @ self.function.reduction) * self.K).sum(1)
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
