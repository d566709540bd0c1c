r"""A common factor of a classifier's length scales, by many more rows than the evidence could see.

The evidence of a thousand rows favours smoother functions than many thousand rows support. Here a
basis of moderate size is fitted to some ten thousand rows at each of a few factors, every time for
several amplitudes at once, and judged by rows left out. A kernel of stationary parts takes all its
length scales times c when its inputs are divided by c.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.newton import fit_newton
from skgp.inference.weights.design import StreamedDesign, WhitenedInducingBasis
from skgp.learning import LABEL_SHARE, improves
from skgp.likelihoods import Bernoulli
from skgp.models.qsgp.amplitude import some_columns

__all__ = ["refine_length_scales"]

#: Fewer rows than this hold no more than the search for hyper-parameters has seen.
MIN_ROWS = 5_000
_TRAINING_ROWS = 12_000
_HELD_OUT_ROWS = 4_000
_POINTS = 1_200
_STEP = 2**0.5
_MAX_STEPS = 4
_AMPLITUDES = (1.0, 4.0, 16.0)


def refine_length_scales(
    kernel,
    X: Tensor,
    Y: Tensor,
    likelihood: Bernoulli,
    *,
    offset: Tensor,
    row_weight: Tensor | None = None,
    generator: torch.Generator,
    callback: Callable[[int, dict], bool | None] | None = None,
):
    """Multiply all free length scales by the factor that predicts held-out rows best.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    X : Tensor of shape (n, d)
        Float64.
    Y : Tensor of shape (n, c)
        In {-1, +1}.
    likelihood : Bernoulli
    offset : Tensor of shape (c,)
    row_weight : Tensor of shape (n,), optional
    generator : torch.Generator
    callback : callable, optional
        Called with (number of factors tried, {"loss": float}), the loss in nats a row; True ends
        the search with the best so far.

    Returns
    -------
    sklearn kernel expression
        The same one where it has no free length scale, where there are fewer than 5000 rows, or
        where no factor is better by more than its standard error.

    Notes
    -----
    Two to five factors of the root of 2, each ``O(16000 (1200^2 + 1200 d))``.
    """
    if len(X) < MIN_ROWS or scaled(kernel, 0.9) is None:
        return kernel
    trial = _Trial.draw(X, Y, likelihood, offset, row_weight, generator)
    best, best_kernel = trial.density(kernel), kernel
    n_tried = 1
    for step in (1 / _STEP, _STEP):
        improved = False
        for _ in range(_MAX_STEPS):
            if callback is not None and callback(n_tried, {"loss": -float(best.mean())}):
                return best_kernel
            candidate = scaled(best_kernel, step)
            if candidate is None:
                break
            density = trial.density(candidate)
            n_tried += 1
            if not improves(-density, -best, least_share=LABEL_SHARE):
                break
            best, best_kernel, improved = density, candidate, True
        if improved:
            break
    return best_kernel


def scaled(kernel, factor: float):
    """The kernel with all its free length scales times a factor; None if bounds forbid or none is.

    A part with a fixed length scale forbids too: the proportions of the parts are to stay.
    """
    theta, position, found = kernel.theta.copy(), 0, False
    for hyper in kernel.hyperparameters:
        is_length = hyper.name.endswith("length_scale")
        if is_length and hyper.fixed:
            return None
        if hyper.fixed:
            continue
        if is_length:
            theta[position : position + hyper.n_elements] += np.log(factor)
            found = True
        position += hyper.n_elements
    if not found or (theta < kernel.bounds[:, 0]).any() or (theta > kernel.bounds[:, 1]).any():
        return None
    return kernel.clone_with_theta(theta)


@dataclass(frozen=True)
class _Trial:
    """Rows on which every factor is tried; the first ones are held out."""

    X: Tensor
    Y: Tensor
    likelihood: Bernoulli
    offset: Tensor
    weight: Tensor
    n_held_out: int
    seed: int

    @classmethod
    def draw(cls, X, Y, likelihood, offset, row_weight, generator) -> "_Trial":
        n = len(X)
        held_out = min(_HELD_OUT_ROWS, n // 4)
        order = torch.randperm(n, generator=generator)[: held_out + _TRAINING_ROWS].to(X.device)
        weight = torch.ones_like(X[:, 0]) if row_weight is None else row_weight
        columns = some_columns(Y)
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
        parts = X[order], Y[order][:, columns], likelihood, offset[columns], weight[order]
        return cls(*parts, held_out, seed)

    def density(self, kernel) -> Tensor:
        """Weighted log density of each row held out, at the best amplitude, shape (p,)."""
        h, k = self.n_held_out, self.Y.shape[1]
        basis = WhitenedInducingBasis(kernel, self.X[h : h + _POINTS])
        basis = basis.in_single_precision(self.X[:32])
        training = self.weight.clone()
        training[:h] = 0.0
        fit = fit_newton(
            StreamedDesign(basis, self.X, dtype=torch.float32),
            self.Y.repeat(1, len(_AMPLITUDES)),
            self.likelihood,
            offset=self.offset.repeat(len(_AMPLITUDES)),
            prior_variance=torch.tensor(_AMPLITUDES, dtype=torch.float64).repeat_interleave(k),
            row_weight=training,
            loss_tol=1e-4,
            preconditioner_rows=3_000,
            generator=torch.Generator().manual_seed(self.seed),
        )
        latent = fit.latent[:h].unflatten(1, (len(_AMPLITUDES), k))
        Y = self.Y[:h, None].expand_as(latent)
        density = self.weight[:h, None] * self.likelihood.log_prob(Y, latent).mean(2)
        return density[:, density.mean(0).argmax()] / self.weight[:h].mean()
