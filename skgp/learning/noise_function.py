r"""Noise of a variance that depends on the input [1]_.

.. math:: y_i = e^{\gamma g(x_i) / 2} f(x_i) + e^{g(x_i) / 2} \varepsilon_i, \qquad
          \varepsilon_i \sim N(0, \sigma^2),

with a process g beside f: at :math:`\gamma = 0` the noise alone varies, at 1 the amplitude of f as
much, as where it is rough here and flat there [5]_. As in [2]_ the two are learned in turn, and in
one round: the process of constant variance that has been fitted predicts each of some observations
from all others, of many the nearest, with an error :math:`r_i` and a variance :math:`v_i` of f, and
with g nearly constant among these

.. math:: r_i \mid g \sim N\big(0, v_i e^{\gamma g(x_i)} + \sigma^2 e^{g(x_i)}\big), \qquad
          g \sim GP\big(0, a\,\rho(x / c, x' / c) + b\big),

:math:`\rho` the correlation of f: g varies as f does, over c times its length scales. The posterior
of g is Laplace's approximation, at its mode with the expected curvature
([3]_, section 3.4)

.. math:: W_i = \tfrac12 \omega_i^2, \qquad
          \omega_i = \frac{\gamma v_i e^{\gamma g_i} + \sigma^2 e^{g_i}}
          {v_i e^{\gamma g_i} + \sigma^2 e^{g_i}},

as the observed one is negative where an error is small; :math:`\gamma`, a and c are the likeliest
of a few. What is predicted averages over the posterior of g: variances are means, as
:math:`\sigma^2 E[e^g] = \sigma^2 e^{m + s^2 / 2}`, densities those of mixtures of normal
distributions, with heavier tails. Where the variance v of f exceeds those of all errors, which
tell nothing of such places, its :math:`\gamma` falls as 1 / v: the amplitude there is that of all.

What makes errors large may vary over less than the distances of observations. To what is known of g
a constant :math:`\delta` and parts of variance :math:`\tau^2`, one an observation, are therefore
added: the simplest that make observations held out likelier.

Errors of a smoother process, of an RBF kernel, may tell more: what is rough is noise to it.
Whichever errors g is learned from, it must make observations that are held out of f and of g
likelier, as the process that has been fitted predicts them, all in five folds or some of many. An
observation left out of g alone would not do: what errs grossly spoils the predictions of its
neighbours, which then tell where it is.

The mean of f stays that of constant variance: to give observations less weight where errors are
large, as where f is rough, makes them larger, by a third on airfoil.

References
----------
.. [1] Goldberg, Williams and Bishop (1998), Regression with input-dependent noise: a Gaussian
   process treatment.
.. [2] Kersting, Plagemann, Pfaff and Burgard (2007), Most likely heteroscedastic Gaussian process
   regression.
.. [3] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning.
.. [4] Sundararajan and Keerthi (2001), Predictive approaches for choosing hyperparameters in
   Gaussian processes.
.. [5] Adams and Stegle (2008), Gaussian process product models for nonparametric nonstationarity.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, random_rows
from skgp.inference.gp_mixture import mixture_log_density
from skgp.inference.neighbors.search import CandidateSearch
from skgp.kernels.expression import split_noise
from skgp.kernels.gram import gram, gram_diag
from skgp.learning import defaults
from skgp.learning.evidence import leave_one_out_errors
from skgp.learning.kernel_choice import maximise_evidence
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_factor
from skgp.learning.search import SearchSettings, neighbor_tiles
from skgp.learning.selection import choose, improves
from skgp.likelihoods.quadrature import gauss_hermite
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.cholesky import cho_inverse, jittered_cholesky, log_det, raise_diagonal_
from skgp.linalg.runtime import TensorState, to_arrays


@dataclass(frozen=True)
class NoiseFunction(TensorState):
    r"""Logarithm g of the variance of noise over its constant :math:`\sigma^2`."""

    kernel: Any  # of f, without noise
    X: Tensor  # (m, d), in units of c length scales
    stretch: float  # c
    amplitude: float  # a
    exponent: float  # gamma
    reach: float  # the greatest variance of f that an error has
    alpha: Tensor  # (m,), K^-1 times the mode of g
    root: Tensor  # (m,), W^1/2
    constant: float  # sigma^2
    shift: float = 0.0  # delta
    scatter: float = 0.0  # tau^2

    @cached_property
    def reduction(self) -> Tensor:
        """W^1/2 B^-1 W^1/2, (m, m)."""
        K = self._prior(self.X * self.stretch, self.X)
        return self.root[:, None] * cho_inverse(laplace_factor(K, self.root)) * self.root

    def components(self, X: Tensor, var: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """Factors of variances (n,) of f and of noise at rows X (n, d), for S values of g.

        (S, n) each; the values have the weights `component_weights`. ``O(n m (m + d))``.
        """
        g = _values(*self.moments(X))
        return (self.power(var) * g).exp(), self.of_noise(g, noise)

    def moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance (n,) of g."""
        K = self._prior(X, self.X)
        known = ((K @ self.reduction) * K).sum(1)
        spread = (self.amplitude + defaults.NOISE_LEVEL - known).clamp(min=0)
        return K @ self.alpha + self.shift, spread + self.scatter

    def joint_moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Posterior mean (n,) and covariance (n, n) of g, without its scatter."""
        K = self._prior(X, self.X)
        C = self._prior(X, X / self.stretch) - K @ self.reduction @ K.T
        return K @ self.alpha + self.shift, C

    def power(self, var: Tensor) -> Tensor:
        """Of e^g in the variances (n,) of f: gamma, and less where they exceed those of errors.

        Far from all observations, of which errors tell nothing, the amplitude is that of all.
        """
        return self.exponent * self.reach / var.clamp(min=self.reach)

    def of_f(self, var: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
        """Mean variances (n,) of f in place of `var`, given moments of g."""
        power = self.power(var)
        return var * (power * mean + 0.5 * power**2 * spread).exp()

    def of_noise(self, g: Tensor, noise: float) -> Tensor:
        """Factors of another constant noise: what it has more, of an approximation, is constant."""
        return 1 + self.constant / max(noise, self.constant) * torch.expm1(g)

    def _prior(self, X: Tensor, Z: Tensor) -> Tensor:
        rho = _correlation(self.kernel, X / self.stretch, Z)
        return self.amplitude * rho + defaults.NOISE_LEVEL


def component_weights() -> np.ndarray:
    """Of the values of g that a mixture has, (S,)."""
    return gauss_hermite(defaults.NOISE_NODES, torch.zeros(1, dtype=torch.float64))[1].numpy()


def _values(mean: Tensor, spread: Tensor) -> Tensor:
    """Of g (S, n), of these weights, given its moments (n,)."""
    nodes, _ = gauss_hermite(defaults.NOISE_NODES, mean)
    return mean + spread.sqrt() * nodes[:, None]


def learn_noise_function(kernel: Any, data: Data, smoother: Any = None) -> NoiseFunction | None:
    """Of y (n,), none merged, and the kernel of the fit, with noise: from the errors of some.

    With `smoother`, a kernel to maximise the evidence of, None unless observations held out are
    clearly likelier by it, as the fitted process predicts them: by g of its own errors, or else of
    those of the smoother process, to which more of what varies is noise. ``O(m^3)`` some 100 times,
    or 200, of m errors.
    """
    split = Split(data)
    try:
        found = split.posterior(kernel)
        function = found.function(float(found.errors.variance.max()))
        judged = split.judged(kernel, kernel, found)
        if smoother is not None and not judged.are_likelier():
            some = data.take(split.rows[: defaults.NOISE_ROWS[0]])
            other = maximise_evidence(smoother, some, max_iter=defaults.LOG_ITER)[0].kernel
            found = split.posterior(other)
            function, judged = found.function(function.reach), split.judged(kernel, other, found)
            if not judged.are_likelier():
                return None
        return judged.scattered(function)
    except NotPositiveDefiniteError:
        return None


@dataclass(frozen=True)
class Errors:
    """Observations left out of f; as a likelihood of g, what `LaplaceEvidence` asks of one."""

    error: Tensor  # (n,), r
    variance: Tensor  # (n,), v
    noise: Tensor  # (n,)
    constant: float  # noise of weight 1
    exponent: float = 0.0  # gamma

    has_link = False

    @staticmethod
    def of(kernel: Any, data: Data, rows: Tensor, known: Tensor) -> "Errors":
        """Of observations `rows` (n,), each predicted from others that are `known` (k,), in order.

        All of few, or those nearest to each; of the rows all are known, or none.
        """
        signal, white = cast(tuple[Any, Any], split_noise(kernel))
        noise = data.row_noise(data.y.new_tensor(white.noise_level))
        if len(known) <= defaults.NOISE_ROWS[0]:
            K = gram(signal, data.X[known])
            raise_diagonal_(K, noise[known])
            precision = cho_inverse(jittered_cholesky(K).factor)
            alpha = precision @ data.y[known]
            if torch.isin(rows, known).all():  # as in [4]
                place = torch.searchsorted(known, rows)
                total = 1 / precision.diagonal()[place]
                error, variance = total * alpha[place], total - noise[rows]
            else:
                K = gram(signal, data.X[rows], data.X[known])
                error = data.y[rows] - K @ alpha
                variance = gram_diag(signal, data.X[rows]) - ((K @ precision) * K).sum(1)
        else:
            generator = torch.Generator().manual_seed(0)
            some = random_rows(len(known), SearchSettings.max_candidates, generator).to(rows)
            k = min(defaults.NOISE_NEIGHBORS, len(known) - 1)
            near = CandidateSearch(signal, data.X, known[some]).query(rows, k)
            tiles = neighbor_tiles(rows, near)
            found = [leave_one_out_errors(kernel, data, *tile) for tile in tiles]
            error, total = map(torch.cat, zip(*found, strict=True))
            variance = total - noise[rows]
        return Errors(error, variance.clamp(min=0), noise[rows], float(white.noise_level))

    def total(self, of_f: Any = 1.0, of_noise: Any = 1.0) -> Tensor:
        """Variances (n,) of the errors, given factors of their parts."""
        return self.variance * of_f + self.noise * of_noise

    def log_prob_and_derivatives(self, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of errors r (n,) in g (n,), up to a constant, for Newton's method."""
        share, second, total = self._slopes(g)
        excess = r.square() / total - 1
        curvature = 0.5 * (second - share.square()) * excess - 0.5 * share.square() * (1 + excess)
        return -0.5 * (total.log() + 1 + excess), 0.5 * share * excess, curvature

    def share(self, g: Tensor) -> Tensor:
        """omega (n,), the slope of the logarithm of the variance of an error."""
        return self._slopes(g)[0]

    def _slopes(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slope and second derivative in g (n,) of the variance of an error, over it; and it."""
        power = self.exponent
        of_f, of_noise = self.variance * (power * g).exp(), self.noise * g.exp()
        total = of_f + of_noise
        return (power * of_f + of_noise) / total, (power**2 * of_f + of_noise) / total, total


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
    """The posterior of g given the errors of some observations, of the mode K alpha."""

    def __init__(self, prior: PriorOfLogs, errors: Errors, theta: Any, alpha: Tensor) -> None:
        self.prior, self.errors, self.theta, self.alpha = prior, errors, theta, alpha
        self.K, _ = prior(theta)  # (n, n)
        self.mode = self.K @ alpha
        self.root = errors.share(self.mode) / math.sqrt(2)  # W^1/2, (n,)
        complexity = 0.5 * (self.mode @ alpha + log_det(laplace_factor(self.K, self.root)))
        log_prob = errors.log_prob_and_derivatives(errors.error, self.mode)[0].sum()
        #: Logarithm of the evidence, up to a constant.
        self.evidence = float(log_prob - complexity)

    @staticmethod
    def of(errors: Errors, prior: PriorOfLogs, grid: Any) -> "list[PosteriorOfLogs]":
        """At each c and a of a grid, each mode sought from the last."""
        laplace = LaplaceEvidence(prior, errors.error[:, None], errors)
        alphas = (laplace.fit(np.array(theta)).alpha[:, 0] for theta in grid)
        return [PosteriorOfLogs(prior, errors, *at) for at in zip(grid, alphas, strict=True)]

    @staticmethod
    def likeliest(errors: Errors, prior: PriorOfLogs) -> "PosteriorOfLogs":
        """Of all gamma, c and a."""
        grid = list(product(defaults.NOISE_STRETCHES, defaults.NOISE_AMPLITUDES))
        each = [replace(errors, exponent=exponent) for exponent in defaults.NOISE_EXPONENTS]
        fits = chain.from_iterable(PosteriorOfLogs.of(errors, prior, grid) for errors in each)
        return max(fits, key=lambda fit: fit.evidence)

    def function(self, reach: float) -> NoiseFunction:
        """At any input, where variances of f up to `reach` vary as those of the errors do."""
        stretch, amplitude = self.theta
        X, errors = self.prior.X / stretch, self.errors
        place = self.prior.kernel, X, stretch, amplitude, errors.exponent, reach
        return NoiseFunction(*place, self.alpha, self.root, errors.constant)


@dataclass(frozen=True)
class Judged:
    """Observations (n,) held out of f and of g."""

    error: Tensor
    variance: Tensor  # of f
    noise: Tensor
    mean: Tensor  # of g
    spread: Tensor
    power: Tensor
    weight: Tensor | None = None

    def loss(self, scatter: float = 0.0, shift: float = 0.0) -> np.ndarray:
        """Negative log densities (n,) by variances that vary, in nats."""
        g = _values(self.mean + shift, self.spread + scatter)
        var = self.variance * (self.power * g).exp() + self.noise * g.exp()
        return -mixture_log_density(component_weights(), *to_arrays(0 * var, var, self.error))

    def are_likelier(self) -> bool:
        """Whether they are clearly likelier so than by variances that do not vary."""
        var = self.variance + self.noise
        constant = 0.5 * ((2 * math.pi * var).log() + self.error.square() / var)
        options = {"weight": self.weight, "n_errors": defaults.NOISE_ERRORS}
        return improves(self.loss(), to_arrays(constant)[0], **options)

    def scattered(self, function: NoiseFunction) -> NoiseFunction:
        """With the simplest scatter and shift beside which no others make them likelier."""
        losses = [self.loss(*pair) for pair in defaults.NOISE_SCATTERS]
        scatter, shift = defaults.NOISE_SCATTERS[choose(losses, weight=self.weight)]
        return replace(function, scatter=scatter, shift=shift)


class Split:
    """Observations whose errors g is learned from, and those held out that judge it."""

    def __init__(self, data: Data) -> None:
        self.data, n = data, len(data)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(data.X.device)
        least, most = defaults.NOISE_ROWS
        self.rows, others = order.tensor_split([min(max(least, n // 4), most)])
        #: Each held out of all that g is learned from.
        self.folds: Any = [others[: defaults.NOISE_JUDGED]]
        if n <= defaults.NOISE_FOLDED:
            self.folds = order.tensor_split(min(n, defaults.NOISE_FOLDS))

    def posterior(self, kernel: Any) -> PosteriorOfLogs:
        """The likeliest, from errors of a process."""
        return PosteriorOfLogs.likeliest(*self._errors(kernel, self.rows[:0]))

    def judged(self, kernel: Any, other: Any, found: PosteriorOfLogs) -> "Judged":
        """Observations that a process predicts without them, and g of another at them."""
        parts = [self._predicted(kernel, other, found, held) for held in self.folds]
        weight, held = self.data.weight, torch.cat(tuple(self.folds))
        error, var, noise, mean, spread, power = map(torch.cat, zip(*parts, strict=True))
        weight = None if weight is None else weight[held]
        return Judged(error, var, noise, mean, spread, power, weight)

    def _predicted(
        self, kernel: Any, other: Any, found: PosteriorOfLogs, held: Tensor
    ) -> tuple[Tensor, ...]:
        """Errors (n,) of a process held out of it, the variances of f and of noise, and of g.

        Its mean, variance and power, learned from errors of another process, without those held
        out.
        """
        errors, prior = self._errors(other, held)
        errors = replace(errors, exponent=found.errors.exponent)
        (fit,) = PosteriorOfLogs.of(errors, prior, [found.theta])
        judged = Errors.of(kernel, self.data, held, self._without(held))
        function, var = fit.function(float(judged.variance.max())), judged.variance
        moments = function.moments(self.data.X[held])
        return judged.error, var, judged.noise, *moments, function.power(var)

    def _errors(self, kernel: Any, held: Tensor) -> tuple[Errors, PriorOfLogs]:
        rows = self.rows[~torch.isin(self.rows, held)]
        errors = Errors.of(kernel, self.data, rows, self._without(held))
        return errors, PriorOfLogs(split_noise(kernel)[0], self.data.X[rows])

    def _without(self, held: Tensor) -> Tensor:
        known = torch.ones(len(self.data), dtype=torch.bool, device=held.device)
        known[held] = False
        return known.nonzero()[:, 0]


def _correlation(kernel: Any, X: Tensor, Z: Tensor) -> Tensor:
    """Of f at rows X (n, d) with f at rows Z (m, d); 0 where f has no variance."""
    scale, other = (gram_diag(kernel, rows).clamp(min=1e-300).rsqrt() for rows in (X, Z))
    return scale[:, None] * gram(kernel, X, Z) * other
