r"""Length scales and amplitude of a classifier's kernel, by labels that it has not seen.

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
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skgp.data import Data, replicates
from skgp.inference.newton import fit_newton
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.kernels.hyperparameters import bounds_of, owned, theta_of, with_theta
from skgp.kernels.scales import (
    amplitude_range,
    capped_weights,
    length_scale_places,
    scale_amplitude,
)
from skgp.learning import defaults
from skgp.learning.amplitude import AmplitudeProblem, some_columns, without_own
from skgp.learning.calibration import choose_moderation
from skgp.learning.laplace_evidence import LaplaceEvidence, laplace_predict
from skgp.learning.selection import class_codes, improves
from skgp.likelihoods import Bernoulli
from skgp.linalg.runtime import Callback
from skgp.optim.stopping import StopRecorder


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

    @cache
    def loss(place: tuple[int, int]) -> float:
        candidate = moved(kernel, place)
        if candidate is None or recorder.stopped or recorder.n_calls == defaults.LEFT_OUT_TRIALS:
            return math.inf
        losses, _ = left_out_losses(candidate, few, likelihood, offset)
        value = float(few.weighted_mean(losses))
        recorder(0, {"loss": value})
        return value + _surprise(place) / few.total if math.isfinite(value) else math.inf

    best = _lowest(loss)
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


def _lowest(loss: Callable[[tuple[int, int]], float]) -> tuple[int, int]:
    """Where the loss is lower than at all neighbours on the grid, by descent from its origin."""
    best, moved = (0, 0), True
    while moved:
        moved = False
        for move in defaults.LEFT_OUT_MOVES:
            while loss(place := (best[0] + move[0], best[1] + move[1])) < loss(best):
                best, moved = place, True
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
