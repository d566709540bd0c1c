r"""Minibatches for S2VGP: hyper-parameters of states at knots, from a few rows at a time (3.4).

The ELBO is a sum over the rows, less a divergence between the states at the knots: a minibatch of B
of n rows, scaled by n / B, estimates it and its derivatives without bias, at a cost of O(B + M). An
iteration evaluates the bound at the present q and takes two steps from there: q's sites, of rate
:math:`\rho_t`, towards those that the minibatch asks for (eqs. 17-20), and one of Adam in the
hyper-parameters, with q held. With :math:`\rho_t = 1 / t` the sites are the average over all
minibatches so far; while hyper-parameters move the oldest are to be forgotten, and the rate stays
at the share B / n or more, 1 where a minibatch is all rows. A constant rate alone keeps the noise
of the last few minibatches.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from skgp.inference.markov.conditionals import Conditionals, condition
from skgp.inference.markov.inducing import fit_inducing
from skgp.inference.markov.knots import PairPosterior, PairSites, infer_pairs
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import expectations, likelihood_gradient, prior_mean
from skgp.kernels.sde import Dynamics
from skgp.learning.markov import defaults
from skgp.learning.markov.objectives import Evaluation, Knots, Processes
from skgp.learning.markov.search import Climb, Search
from skgp.likelihoods import Likelihood
from skgp.linalg.runtime import Callback
from skgp.optim import BoundedAdam, LossPlateau, sample_without_replacement
from skgp.optim.stopping import StopRecorder, settled


def fit_minibatches(
    kernel: Any,
    objective: "MinibatchElbo",
    likelihood: Likelihood,
    *,
    parameters: Tensor | None = None,
    max_iter: int = 1000,
    tol: float = 1e-4,
    callback: Callback | None = None,
    **options: Any,
) -> Search:
    """Learn kernel, likelihood and perhaps knots, beginning with `parameters` of the likelihood.

    Half of the `max_iter` iterations at most, or until the smoothed ELBO rises no further (`tol`,
    relative to its rise so far), take steps of one rate; as many more of falling rate average the
    noise away. A callback that returns True ends the search. The value of the result is the mean
    estimate over the last tenth. O(B d^3 + M d^3) an iteration, for d states; `options` are
    ``knots`` (M,), ``learn_knots`` and ``prior`` of `Climb`.
    """
    climb = Climb([kernel], objective, likelihood, **options)
    start = climb.start(parameters)
    place = start.clone().requires_grad_()

    def loss(iteration: int) -> Tensor:
        value, gradient = climb.loss(place)
        return value + (place - place.detach()) @ gradient  # a number with its gradient

    recorder = StopRecorder(callback)
    loop = BoundedAdam(
        {"place": place},
        loss,
        {"place": climb.bounds(start)},
        shares={"place": 1.0},
        eps={},
        callback=recorder,
    )
    rate = min(defaults.MINIBATCH_RATE, defaults.MINIBATCH_REACH / max(max_iter, 1))
    plateau = LossPlateau(
        tol=tol, patience=defaults.MINIBATCH_PATIENCE, smoothing=defaults.MINIBATCH_SMOOTHING
    )
    loop.flat_then_falling(rate, max_iter, share=1.0, stopping=[plateau])
    losses = loop.history
    return climb.ended(place.detach(), settled(losses), loop.n_iter, losses)


class MinibatchElbo:
    """A `SeriesObjective` whose every evaluation draws rows of its own, and moves q after it."""

    def __init__(
        self,
        processes: Sequence[Series],  # of the same rows
        likelihood: Likelihood,
        offsets: Sequence[float],
        batch_size: int,
        generator: torch.Generator,
    ) -> None:
        self.processes, self.likelihood, self.offsets = processes, likelihood, offsets
        self.batch_size = min(batch_size, len(processes[0].y))
        self.total, self.generator = processes[0].total, generator
        self.rate = max(
            defaults.OLDEST, self.batch_size / len(processes[0].y)
        )  # at least, of the sites
        #: Of each process; none before the first evaluation, which finds the best for its rows.
        self.sites: list[PairSites] = []
        self.n_evaluations = 0

    def __call__(
        self,
        dynamics: Processes,
        parameters: Tensor,
        knots: Knots = None,
        *,
        tol: float = defaults.ELBO_TOL,
    ) -> Evaluation:
        """Estimate the ELBO of all rows from the next minibatch."""
        batch, (motion,), knots = self._draw(), dynamics, cast(Tensor, knots)
        parameters = parameters.to(batch[0].y)
        if not self.sites:
            likelihood = self.likelihood.with_parameters(parameters)
            means = [prior_mean(likelihood, offset, motion)[0] for offset in self.offsets]
            self.sites = [
                fit_inducing(motion, knots, part, likelihood, offset=offset).posterior.sites
                for part, offset in zip(batch, means, strict=True)
            ]
        self.n_evaluations += 1
        rows = condition(motion, knots, batch[0].at_rows(batch[0].times))
        found = [self._step(j, part, rows, parameters, motion) for j, part in enumerate(batch)]
        values, slopes, of_knots, of_likelihood = zip(*found, strict=True)
        return Evaluation(
            sum(values),
            None,
            torch.stack(of_likelihood).sum(0),
            lambda: [torch.stack(slopes).sum(0)],
            torch.stack(of_knots).sum(0),
        )

    def _step(
        self, j: int, part: Series, rows: Conditionals, parameters: Tensor, motion: Dynamics
    ) -> tuple[float, Tensor, Tensor, Tensor]:
        """Move q of process j; the ELBO before, and its gradients with q held.

        These are in the parameters of the dynamics (q,), the knots (M,) and the likelihood (p,).
        """
        likelihood = self.likelihood.with_parameters(parameters).at(part.log_exposure)
        sites = self.sites[j]
        q, share = infer_pairs(rows.chain, sites), cast(Tensor, part.weight)
        mean, var = rows.marginals(q)
        centre, rises = prior_mean(self.likelihood, self.offsets[j], motion)
        f = part.y, mean + centre, var
        expected, slope, curvature = expectations(likelihood, *f)
        weight = -share * curvature  # eqs. 17-20: the sites that these rows ask for
        beta = share * slope + weight * mean
        value = float(share @ expected) - q.kl(sites)
        in_motion, in_knots = rows.gradient(q, beta, weight)
        in_motion[: len(rises)] += float(share @ slope) * in_motion.new_tensor(rises)
        place = f, lambda v: share * v, part.log_exposure
        of_likelihood = likelihood_gradient(self.likelihood, parameters, *place)
        self._move(j, rows.collect(beta, weight), lambda s: infer_pairs(rows.chain, s))
        return value, in_motion, in_knots, of_likelihood

    def _draw(self) -> list[Series]:
        """The next rows of each process, their weights scaled to those of all."""
        n, size = len(self.processes[0].y), self.batch_size
        rows = sample_without_replacement(n, size, generator=self.generator)
        rows = rows.to(self.processes[0].y.device)
        parts = [series.rows(rows) for series in self.processes]
        ones = torch.ones_like(parts[0].y)
        return [
            replace(part, weight=(n / size) * (ones if part.weight is None else part.weight))
            for part in parts
        ]

    def _move(self, j: int, target: PairSites, infer: Callable[[PairSites], PairPosterior]) -> None:
        """Step of process j's sites; shorter ones where weights so negative leave no posterior."""
        rate = max(1 / (1 + self.n_evaluations), self.rate)
        trial = self.sites[j].towards(target, rate)
        convex = bool((target.precision.diagonal(dim1=0, dim2=1) >= 0).all())
        while not convex and rate > self.rate**2 / 4 and not infer(trial).is_proper:
            rate /= 2
            trial = self.sites[j].towards(target, rate)
        self.sites[j] = trial
