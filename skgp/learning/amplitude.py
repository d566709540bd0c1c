r"""Amplitude and moderation of a classifier's kernel, by held-out data.

Hyper-parameters are learned on a subset; the evidence of a thousand observations favours smoother
functions than many thousand support, and more of them support a larger amplitude. The features stay
as they are while the amplitude a of the prior :math:`w \sim N(0, a I)` varies, so that several
amplitudes are fitted at once, as columns that share every pass over the features
(:func:`.newton.fit_newton`). They are judged, and so is the use of the posterior variance
(:mod:`skgp.learning.calibration`), by log densities of observations left out:

held out
    some have weight 0 in the fit;
leave one out
    where the Hessian is cheap, of every input at the mode, by one Newton step away from it,

    .. math:: f_{-i} \approx \hat f_i - \frac{v_i\, \ell'_i}{1 - c_i v_i}, \qquad
              V_{-i} \approx \frac{v_i}{1 - c_i v_i}, \qquad v_i = \phi_i^T H^{-1} \phi_i

    (Opper and Winther, 2000; Rad and Maleki, 2020), with :math:`\ell'_i` and :math:`-c_i` the
    derivatives of the weighted log-likelihood of all observations at that input.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skgp.inference.laplace import laplace_covariance
from skgp.inference.newton import NewtonProblem, fit_newton, newton_problem
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.posterior import AugmentedPosterior, ClassifierPosterior
from skgp.kernels.scales import amplitude_range
from skgp.learning import defaults
from skgp.learning.calibration import choose_moderation, mean_scores, without_own
from skgp.learning.plan import Options, Plan
from skgp.learning.selection import choose_towards, class_codes, held_out_rows
from skgp.likelihoods import Bernoulli
from skgp.linalg.cholesky import jittered_cholesky, tri_solve
from skgp.optim.stopping import StopRecorder


@dataclass(frozen=True)
class AmplitudeProblem:
    """What is fitted: features, labels and weights of the observations."""

    design: StreamedDesign
    X: Tensor  # (n, d), inputs of the design in float64
    Y: Tensor  # (n, c), in {-1, +1}
    likelihood: Bernoulli
    offset: Tensor  # (c,)
    weight: Tensor  # (n,)

    def at(self, prior_variance: float) -> NewtonProblem:
        """All columns with a prior variance."""
        return self._newton(self.Y, self.offset, prior_variance, self.weight)

    def without(self, held_out: Tensor, columns: Tensor, factors: Sequence[float]) -> NewtonProblem:
        """Some columns at each prior variance, (n, k len(factors)), some observations left out."""
        weight, c = self.weight.clone(), len(factors)
        weight[held_out] = 0.0
        variance = torch.tensor(factors, dtype=torch.float64).repeat_interleave(len(columns))
        Y, offset = self.Y[:, columns].repeat(1, c), self.offset[columns].repeat(c)
        return self._newton(Y, offset, variance, weight)

    def _newton(self, Y, offset, prior_variance, weight) -> NewtonProblem:
        options = {"prior_variance": prior_variance, "row_weight": weight}
        return newton_problem(self.design, Y, self.likelihood, offset=offset, **options)


@dataclass(frozen=True)
class Choice:
    """An amplitude, and the part of the posterior variance that predictions should average over."""

    prior_variance: float
    moderation: float
    amplitude_scores: dict[float, float]  # mean held-out log density in nats, by amplitude tried
    moderation_scores: dict[float, float]  # the same at the amplitude chosen, by moderation
    weights: Tensor | None = None  # (m, c), the mode at that amplitude, to start from


def choose_amplitude(
    kernel,
    problem: AmplitudeProblem,
    plan: Plan,
    options: Options,
    *,
    generator: torch.Generator,
    callback: StopRecorder,
) -> Choice:
    """Amplitude and moderation by observations left out, in the way that the size allows.

    Factors of 4 are tried within the bounds of the kernel's constants, unless the observations are
    so few that the amplitude is known.
    """
    n, c = problem.Y.shape
    factors: tuple[float, ...] = (1.0,)
    if options.learn_hyperparameters and n > defaults.SUBSET_ROWS:
        low, high = amplitude_range(kernel)
        factors = tuple(a for a in defaults.AMPLITUDES if low <= a <= high)
    if c * n * plan.size**2 <= defaults.LEAVE_ONE_OUT_FLOPS:
        # Fewer observations have all been seen by the search for the hyper-parameters.
        seen = options.learn_hyperparameters and n <= defaults.SUBSET_ROWS
        n_errors = defaults.LEFT_OUT_ERRORS if seen else 1.0
        return by_leaving_one_out(
            problem, factors, n_errors=n_errors, generator=generator, callback=callback
        )
    n_out = min(defaults.AMPLITUDE_HELD_OUT, max(1, n // 10))
    codes = class_codes(problem.Y)
    held_out = held_out_rows(codes, n_out, generator, X=problem.X, classes=True)
    return by_held_out_rows(
        problem,
        torch.from_numpy(np.flatnonzero(held_out)).to(problem.X.device),
        factors,
        covariance=plan.covariance,
        n_dense_columns=options.n_dense_columns,
        augment=plan.basis == "inducing" and options.augment,
        generator=generator,
        callback=callback,
    )


def by_held_out_rows(
    problem: AmplitudeProblem,
    held_out: Tensor,
    factors: tuple[float, ...],
    *,
    covariance: str,
    n_dense_columns: int,
    augment: bool = False,
    generator: torch.Generator,
    callback=None,
) -> Choice:
    """Choose by the observations `held_out` (p,), indices, that the fits give no weight.

    One fit of ``len(factors)`` times the columns, and one `laplace_covariance`.
    """
    columns = some_columns(problem.Y)
    k, left = len(columns), problem.without(held_out, columns, factors)
    fit = fit_newton(left, loss_tol=1e-4, generator=generator, callback=callback)
    Y, weight = problem.Y[held_out][:, columns], problem.weight[held_out]
    latent = fit.latent[held_out].unflatten(1, (len(factors), k))
    densities = problem.likelihood.log_prob(Y[:, None].expand_as(latent), latent).mean(2)
    losses = dict(zip(factors, (-densities).unbind(1), strict=True))
    amplitude = _nearest_to_one(losses, weight)
    best = factors.index(amplitude)
    chosen = slice(best * k, (best + 1) * k)
    trained = left.select(torch.arange(left.Y.shape[1], device=left.Y.device)[chosen])
    curvature = trained.curvature(fit.latent[:, chosen])
    q = laplace_covariance(
        problem.design,
        curvature,
        prior_variance=amplitude,
        kind=covariance,
        n_dense_columns=n_dense_columns,
    )
    weights = fit.weights[:, chosen]
    posterior = ClassifierPosterior(problem.design.basis, weights, problem.offset[columns], q)
    wide = AugmentedPosterior(posterior, amplitude) if augment else posterior
    whole = k == problem.Y.shape[1]
    moderation, moderated = choose_moderation(
        problem.likelihood,
        Y,
        *wide.mean_and_variance(problem.X[held_out]),
        weight,
        separately=not whole,
    )
    return Choice(
        amplitude,
        moderation,
        mean_scores(losses, weight),
        mean_scores(moderated, weight),
        weights if whole else None,
    )


def by_leaving_one_out(
    problem: AmplitudeProblem,
    factors: tuple[float, ...],
    *,
    n_errors: float = 1.0,
    generator: torch.Generator,
    callback: StopRecorder,
) -> Choice:
    """Choose by the approximate leave-one-out log density of every observation.

    ``O(c n m^2)`` for each amplitude; one alone leaves the moderation to be chosen. A callback that
    stops leaves the amplitudes that have not been tried.
    """
    found: dict[float, tuple[float, dict[float, Tensor], Tensor]] = {}
    weight, start = problem.weight, None
    for a in factors:
        fit = fit_newton(problem.at(a), start=start, generator=generator, callback=callback)
        start = fit.weights
        mean, variance = leave_one_out_moments(problem, fit.latent, a)
        choice = choose_moderation(
            problem.likelihood, problem.Y, mean, variance, weight, n_errors=n_errors
        )
        found[a] = *choice, fit.weights
        if callback.stopped:
            break
    losses = {a: losses[moderation] for a, (moderation, losses, _) in found.items()}
    best = _nearest_to_one(losses, weight)
    moderation, moderated, weights = found[best]
    return Choice(
        best, moderation, mean_scores(losses, weight), mean_scores(moderated, weight), weights
    )


def leave_one_out_moments(
    problem: AmplitudeProblem, latent: Tensor, prior_variance: float
) -> tuple[Tensor, Tensor]:
    """Approximate moments of f at each input without its observations, (n, c), from the mode."""
    newton = problem.at(prior_variance)
    slope, curvature = newton.slope(latent), newton.curvature(latent)
    design, variance = problem.design, torch.empty_like(latent)
    for j in range(latent.shape[1]):
        H = design.curvature_gram(curvature[:, [j]])[0]
        H.diagonal().add_(1 / prior_variance)
        L = jittered_cholesky(H).factor
        for rows in design.tiles(design.n_features):
            Phi = design.columns(design.blocks, rows).double()
            half = tri_solve(L, Phi.mT, upper=False)  # (m, b)
            variance[rows, j] = half.square().sum(0)
    return without_own(problem.X, latent, variance, slope, curvature)


def some_columns(Y: Tensor) -> Tensor:
    """Indices of all columns, or of a few whose base rates are spread over all of them."""
    c = Y.shape[1]
    if c <= defaults.AMPLITUDE_COLUMNS:
        return torch.arange(c)
    order = Y.mean(0).argsort(stable=True)
    return order[
        torch.linspace(0, c - 1, defaults.AMPLITUDE_COLUMNS + 2).round().long()[1:-1]
    ].unique()


def _nearest_to_one(losses: dict[float, Tensor], weight: Tensor) -> float:
    """The amplitude nearest to 1 that predicts no worse than the best, by losses (p,) of each."""
    return choose_towards(losses, 1.0, weight=weight, least_share=defaults.LABEL_SHARE)
