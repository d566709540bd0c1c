r"""Kernels of latent functions: where their search starts, and by labels not seen, where it ends.

Labels and counts resemble the latent function f where they are many: numbers in their place
(`Likelihood.gaussian_targets`) have a log marginal likelihood in closed form, and what was learned
about kernels of numbers holds for f. From them come, beside the kernel given,

length scales
    the likeliest of other lengths (:mod:`skgp.learning.starts`);
their structure
    one for all columns, one for the relevant ones and one for the others, each its own, as
    leave-one-out predictions choose (:mod:`skgp.learning.kernel_choice`). The posterior mode hides
    it where one length scale for all explains nothing: there the evidence is flat.

Large counts and other observations of f through a link g are nearly Gaussian ones, of
:math:`g^{-1}(y)` with the Fisher information I of one observation as precision
(`Likelihood.gaussian_observations`), for a log link :math:`\log y` and y; `search_by_numbers` has
a kernel learned from them. The noise of number i is :math:`\sigma^2 \bar I / I_i`, its scale
:math:`\sigma^2` learned: more than Poisson where counts are overdispersed. Small counts are not
Gaussian, and the precisions of their own values would be largest of those that are large by chance:
I is taken at

.. math:: \mu + \frac{w}{w + c / s^2} (g^{-1}(y) - \mu),

w the precision at the number itself, :math:`\mu, s^2` mean and variance of all, weighted by w,
and c = 16.

The evidence of some hundred labels is greatest for functions that are smoother than those that
predict best. On digits and pixels left-out labels lose half of their log density by it, on tables
little or nothing. Two searches on a grid of factors, whose ratios of length scales stay, ask
observations left out instead:

few observations (`rescale_few`)
    each is left out in turn of a dense Laplace approximation [1]_;
many (`refine_length_scales`)
    some thousand are held out of a fit with a basis of moderate size.

References
----------
.. [1] Vehtari, Mononen, Tolvanen, Sivula and Winther (2016), Bayesian leave-one-out
   cross-validation approximations for Gaussian latent variable models, section 3.2.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, replicates
from skgp.inference.newton import fit_newton
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.kernels.expression import WhiteKernel, split_noise
from skgp.kernels.hyperparameters import bounds_of, owned, sizes_of, theta_of, with_theta
from skgp.kernels.scales import (
    amplitude_range,
    capped_weights,
    length_scale_places,
    scale_amplitude,
    with_variance,
)
from skgp.learning import defaults
from skgp.learning.amplitude import AmplitudeProblem, some_columns
from skgp.learning.calibration import choose_moderation, without_own
from skgp.learning.kernel_choice import choose_kernel
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.search import HyperparameterFit, SearchSettings, fit_hyperparameters
from skgp.learning.selection import class_codes, improves
from skgp.learning.starts import ChoiceSettings, likeliest_start, ratio_penalty
from skgp.likelihoods import Bernoulli, Likelihood
from skgp.linalg import NotPositiveDefiniteError
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import StopRecorder


def _with_noise(kernel):
    """The kernel of standardised numbers."""
    return kernel + WhiteKernel(defaults.NOISE_GRID[-1], (defaults.NOISE_GRID[0], 1.0))


def latent_start(kernel, data: Data, likelihood):
    """The likeliest start of a latent function, for a kernel without noise; None without starts.

    By numbers that resemble f (:func:`_standardised`). The amplitude is 1.
    """
    found = likeliest_start(_with_noise(kernel), _standardised(data, likelihood))
    return None if found is None else split_noise(found[0])[0]


def _standardised(data: Data, likelihood) -> Data:
    """Standardised numbers that resemble f (`Likelihood.gaussian_targets`), at some observations.

    Of several latent functions, columns of y, a sum of them.
    """
    data = data.take(slice(None, None, -(-len(data) // defaults.LATENT_START_ROWS)))
    data = data.to("cpu", torch.float64)
    offset = None if data.offset is None else data.offset.mT
    f = likelihood.at(offset).gaussian_targets(data.y.reshape(len(data), -1).mT)  # (c, n)
    f = torch.arange(1.0, len(f) + 1, dtype=f.dtype) @ f
    f = f - data.weighted_mean(f)
    scale = float(data.weighted_mean(f.square()).sqrt()) or 1.0
    numbers = replace(data, y=f / scale)
    if data.weight is not None:  # as rows given so often
        scatter = torch.zeros_like(data.weight) if data.scatter is None else data.scatter
        numbers = replace(numbers, scatter=scatter / scale**2)
    return numbers


def latent_structure(
    kernel, data: Data, likelihood, *, generator: torch.Generator, callback: Callback | None = None
) -> tuple[Any, float] | None:
    """The kernel, its separate length scales as those of numbers that resemble f.

    And minus the log prior of these, in nats, by which the evidence of f has to be greater. None
    where one length scale for all columns predicts the numbers as well, or there are no others. The
    amplitude stays.
    """
    if max(sizes_of(kernel), default=0) < 2 or len(data) < 2:
        return None
    theta, numbers = theta_of(kernel), _standardised(data, likelihood)
    unit = _with_noise(with_variance(kernel, numbers.X))
    try:
        found, _ = choose_kernel([unit], numbers, generator=generator, callback=callback)
    except NotPositiveDefiniteError:
        return None
    places = length_scale_places(kernel)
    moved = theta_of(split_noise(found)[0])[places] - theta[places]
    if np.ptp(moved) < 1e-6:
        return None
    theta[places] += moved
    kernel = with_theta(kernel, theta.clip(*bounds_of(kernel).T))
    return kernel, ratio_penalty(moved, ChoiceSettings())[0]


def search_by_numbers(
    kernels: list,
    data: Data,
    likelihood: Likelihood,
    *,
    generator: torch.Generator,
    settings: SearchSettings,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn a kernel of f, or the best of several, with a WhiteKernel: the noise of a mean number.

    The noise that the kernels have, if any, is replaced; y is (n,).
    """
    numbers = latent_numbers(data, likelihood)
    variance = float(numbers.weighted_mean(numbers.y.square())) or 1.0
    return fit_hyperparameters(
        [_of_variance(kernel, numbers.X, variance) for kernel in kernels],
        numbers,
        generator=generator,
        settings=settings,
        callback=callback,
    )


def latent_numbers(data: Data, likelihood: Likelihood) -> Data:
    """Numbers of weighted mean 0 that stand for f, weighted by their precisions; y (n,).

    A weight is that of the observation times its precision over the mean of these.
    """
    made = likelihood.at(data.log_exposure)
    f, precision = made.gaussian_observations(data.y)
    share = precision / data.weighted_mean(precision)
    mean = data.weighted_mean(share * f)
    spread = data.weighted_mean(share * (f - mean).square())
    shrunk = mean + (f - mean) * precision / (precision + defaults.NUMBERS_SHRUNK / spread)
    information = made.fisher_information(torch.where(spread > 0, shrunk, f))
    weight = information / data.weighted_mean(information)
    weight = weight if data.weight is None else weight * data.weight
    data = replace(data, weight=weight, offset=None)
    return replace(data, y=f - data.weighted_mean(f))


def _of_variance(kernel, X: Tensor, variance: float) -> Any:
    """The kernel with this variance, as far as its bounds allow, and noise of a share of it."""
    low, high = defaults.NUMBERS_NOISE_BOUNDS
    white = WhiteKernel(defaults.NUMBERS_NOISE * variance, (low * variance, high * variance))
    return with_variance(split_noise(kernel)[0], X, variance) + white


def capped(data: Data) -> Data:
    """Labels y (n, c), no weight far above the median of its class, for searches of a kernel.

    A search ends with gains that are small beside the weight of all observations: that of one alone
    leaves the others none. Labels of equal inputs keep the ratios of their weights, which tell the
    probability there. Without weights the data are those given.
    """
    if data.weight is None:
        return data
    weight = data.weight.cpu().numpy()
    share = capped_weights(weight, class_codes(data.y).cpu().numpy()) / weight
    if (share == 1).all():
        return data
    place = replicates(data.X.cpu().numpy())
    least = np.ones(place.max() + 1)
    np.minimum.at(least, place, share)
    return replace(data, weight=data.weight * torch.from_numpy(least[place]).to(data.weight))


def rescale_few(
    kernel,
    few: Data,
    rows: Data,
    likelihood: Bernoulli,
    offset: Tensor,
    *,
    callback: Callback | None = None,
) -> Any:
    """Amplitude and free length scales times what predicts labels left out best.

    The search is over `few` observations, a part of `rows`, y (n, c) of labels -1 and +1, under a
    normal prior about the kernel, without which the amplitude has no end where a plane separates
    labels. By `rows` the kernel found is judged: None unless it is better by more than two standard
    errors, as the best of some dozen is by luck. Some dozen fits of ``O(c n^3)`` to few. The
    callback is told the number of kernels tried and their loss in nats per observation; True ends
    the search with the best so far.
    """
    recorder = StopRecorder(callback)

    def loss(place: tuple[int, int]) -> float:
        candidate = moved(kernel, place)
        if candidate is None or recorder.stopped:
            return math.inf
        losses, _ = left_out_losses(candidate, few, likelihood, offset)
        value = float(few.weighted_mean(losses))
        recorder(0, {"loss": value})
        return value

    best = likeliest_scales(loss, few.total)
    if best == (0, 0):
        return None
    found = moved(kernel, best)
    old, _ = left_out_losses(kernel, rows, likelihood, offset)
    new, _ = left_out_losses(found, rows, likelihood, offset)
    options: dict[str, Any] = {
        "least_share": defaults.LABEL_SHARE,
        "n_errors": defaults.LEFT_OUT_ERRORS,
    }
    return found if improves(new, old, weight=rows.weight, **options) else None


def left_out_losses(
    kernel, data: Data, likelihood: Bernoulli, offset: Tensor
) -> tuple[Tensor, float]:
    """Minus log probabilities (n,) of the classes, each predicted without its input, in nats.

    By Laplace's approximation, and the moderation of the posterior variance that predicts best.
    """
    X, Y = data.X, data.y
    try:
        fit = LaplaceEvidence.of(kernel, data, likelihood, offset).fit(kernel.theta)
    except ValueError:  # a covariance that overflowed
        return torch.full_like(Y[:, 0], math.inf), 1.0
    mean, variance = laplace_predict(fit, kernel, X, X)
    moments = without_own(X, mean, variance, fit.alpha, fit.root.square())
    moderation, losses = choose_moderation(
        likelihood, Y, *moments, data.weight, n_errors=defaults.LEFT_OUT_ERRORS
    )
    return losses[moderation], moderation


def _surprise(place: tuple[int, int]) -> float:
    """Minus the log prior of so many steps of amplitude, the root of the variance, and lengths."""
    variance, length = (
        defaults.LEFT_OUT_STEP * steps / defaults.LEFT_OUT_STD for steps in (2 * place[0], place[1])
    )
    return 0.5 * (variance**2 + length**2)


def moved(kernel, place: tuple[int, int]):
    """The kernel so many steps of amplitude and of length scales away; None out of bounds."""
    amplitude, length = (math.exp(defaults.LEFT_OUT_STEP * steps) for steps in place)
    low, high = amplitude_range(kernel)
    if amplitude != 1 and not low <= amplitude**2 <= high:
        return None
    kernel = scale_amplitude(kernel, amplitude**2)
    return kernel if length == 1 else scaled(kernel, length)


def likeliest_scales(loss: Callable[[tuple[int, int]], float], total: float) -> tuple[int, int]:
    """Steps of amplitude and of length scales of the least mean loss, less a log prior's share.

    By descent on the grid from none, to where no neighbour is better, of `LEFT_OUT_TRIALS` at most.
    The loss is in nats per observation, of `total` ones, and infinite where there is no kernel.
    """
    tried: dict[tuple[int, int], float] = {}

    def penalised(place: tuple[int, int]) -> float:
        if place not in tried and len(tried) == defaults.LEFT_OUT_TRIALS:
            return math.inf
        if place not in tried:
            tried[place] = loss(place) + _surprise(place) / total
        return tried[place]

    best, found = (0, 0), True
    while found:
        found = False
        for move in defaults.LEFT_OUT_MOVES:
            while penalised(place := (best[0] + move[0], best[1] + move[1])) < penalised(best):
                best, found = place, True
    return best


def refine_length_scales(
    kernel,
    data: Data,  # float64; y (n, c)
    likelihood: Bernoulli,
    *,
    offset: Tensor,
    generator: torch.Generator,
    callback: Callable[[int, dict], bool | None] | None = None,
):
    """Multiply all free length scales by the factor that predicts held-out data best.

    A basis of moderate size is fitted to some ten thousand of the observations at two to five
    factors of the root of 2, every time for several amplitudes at once: each
    ``O(16000 (1200^2 + 1200 d))``. The kernel stays as it is where it has no free
    length scale, where there are fewer than 5000 observations, or where no factor is better by more
    than its standard error. The callback is told the number of factors tried and the loss in nats
    an observation; True ends the search with the best so far.
    """
    if len(data) < defaults.SCALE_ROWS or scaled(kernel, 0.9) is None:
        return kernel
    trial = _Trial(data, likelihood, offset, generator)
    best, best_kernel = trial.density(kernel), kernel
    n_tried = 1
    for step in (1 / defaults.SCALE_STEP, defaults.SCALE_STEP):
        improved = False
        for _ in range(defaults.SCALE_MAX_STEPS):
            if callback is not None and callback(n_tried, {"loss": -float(best.mean())}):
                return best_kernel
            candidate = scaled(best_kernel, step)
            if candidate is None:
                break
            density = trial.density(candidate)
            n_tried += 1
            if not improves(-density, -best, least_share=defaults.LABEL_SHARE):
                break
            best, best_kernel, improved = density, candidate, True
        if improved:
            break
    return best_kernel


def scaled(kernel, factor: float):
    """The kernel with all its free length scales times a factor; None if bounds forbid or none is.

    A part with a fixed length scale forbids too: the proportions of the parts are to stay.
    """
    fixed = [hyper.fixed for _, hyper in owned(kernel) if hyper.name == "length_scale"]
    theta = theta_of(kernel) + np.log(factor) * length_scale_places(kernel)
    low, high = bounds_of(kernel).T
    if not fixed or any(fixed) or (theta < low).any() or (theta > high).any():
        return None
    return with_theta(kernel, theta)


class _Trial:
    """Observations on which every factor is tried; the first ones are held out."""

    def __init__(self, data: Data, likelihood, offset: Tensor, generator: torch.Generator):
        n = len(data)
        self.n_held_out = min(defaults.SCALE_HELD_OUT, n // 4)
        order = torch.randperm(n, generator=generator, device=generator.device)
        some, columns = order[: self.n_held_out + defaults.SCALE_TRAINING], some_columns(data.y)
        self.seed = int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))
        data = data.take(some)
        self.X, self.Y, self.offset = data.X, data.y[:, columns], offset[columns]
        self.likelihood = likelihood
        self.weight = torch.ones_like(data.X[:, 0]) if data.weight is None else data.weight

    def density(self, kernel) -> Tensor:
        """Weighted held-out log densities, at the best amplitude, shape (p,)."""
        h, k, c = self.n_held_out, self.Y.shape[1], len(defaults.SCALE_AMPLITUDES)
        basis = WhitenedInducingBasis(kernel, self.X[h : h + defaults.SCALE_POINTS])
        basis = basis.in_single_precision(self.X[:32])
        design = StreamedDesign(basis, self.X, dtype=torch.float32)
        problem = AmplitudeProblem(
            design, self.X, self.Y, self.likelihood, self.offset, self.weight
        )
        fit = fit_newton(
            problem.without(torch.arange(h), torch.arange(k), defaults.SCALE_AMPLITUDES),
            loss_tol=1e-4,
            preconditioner_rows=3_000,
            generator=torch.Generator(self.X.device).manual_seed(self.seed),
        )
        latent = fit.latent[:h].unflatten(1, (c, k))
        Y = self.Y[:h, None].expand_as(latent)
        density = self.weight[:h, None] * self.likelihood.log_prob(Y, latent).mean(2)
        return density[:, density.mean(0).argmax()] / self.weight[:h].mean()
