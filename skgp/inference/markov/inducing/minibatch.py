r"""Sites on pairs of states from minibatches: one pass over the rows is nearly enough.

In the first epoch batches add up: each is fitted given the sites of those before, which is exact
for Gaussian noise and elsewhere nearly so, as q is at every time what the rows seen so far tell.
Later epochs take natural-gradient steps on batches that stand for all n rows,

.. math:: \lambda \leftarrow (1 - \rho_t) \lambda
          + \rho_t \frac{n}{|B|} \sum_{i \in B} w_i (g_i + \omega_i m_i)\, h_i, \qquad
          \rho_t = \frac{|B_t|}{\sum_{s \le t} |B_s|}

(and likewise :math:`\Lambda`). At these rates, 1/t for batches of one size, the sites are averages,
whose noise dies out; a constant rate keeps it, and the paper, which has one, finds that minibatches
hurt. Averages from the very first batch on would hold what was asked for far from the optimum:
tens of nats too few for counts, where the above ends within half a nat.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.inference.markov.inducing.conditionals import condition
from skgp.inference.markov.inducing.fit import fit_inducing
from skgp.inference.markov.inducing.pair_sites import Chain, PairSites, infer_pairs
from skgp.inference.markov.natural import expectations
from skgp.inference.markov.series import Series
from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood

__all__ = ["fit_minibatch"]

Callback = Callable[[int, dict], bool | None]

_FIRST_ITER, _ITER = 10, 3  # passes over the first batch, and over others of the first epoch
_MOST_HALVINGS = 20


@dataclass(frozen=True)
class _Model:
    dynamics: Dynamics
    knots: Tensor
    likelihood: Likelihood
    offset: float

    def added(self, batch: Series, sites: PairSites, max_iter: int) -> tuple[PairSites, float]:
        """Add a batch to the rows seen so far; its log-density given those, in nats."""
        found = fit_inducing(
            self.dynamics,
            self.knots,
            batch,
            self.likelihood,
            offset=self.offset,
            base=sites,
            max_iter=max_iter,
        )
        return found.sites, found.elbo

    def estimate(self, batch: Series, sites: PairSites) -> tuple[PairSites, float]:
        """Sites that a batch asks for, and its estimate of the bound, in nats."""
        rows = condition(self.dynamics, self.knots, batch.times)
        pairs = infer_pairs(rows.chain, sites)
        at_times, var = rows.marginals(pairs)
        mean = batch.at_rows(at_times)
        expected, slope, curvature = expectations(
            self.likelihood.at(batch.log_exposure), batch.y, mean + self.offset, batch.at_rows(var)
        )
        target = rows.collect(batch.sums(slope - curvature * mean), batch.sums(-curvature))
        return target, float(batch.sums(expected).sum()) - pairs.kl(sites)

    def step(self, batch: Series, sites: PairSites, rate: float) -> tuple[PairSites, float]:
        """Move towards what a batch asks for, less far where that leaves no valid q."""
        target, bound = self.estimate(batch, sites)
        chain = Chain.of(self.dynamics, self.knots)
        for _ in range(_MOST_HALVINGS):
            moved = sites.towards(target, rate)
            if infer_pairs(chain, moved).is_proper:
                return moved, bound
            rate *= 0.5
        return sites, bound


def fit_minibatch(
    dynamics: Dynamics,
    knots: Tensor,
    series: Series,
    likelihood: Likelihood,
    *,
    generator: torch.Generator,
    offset: float = 0.0,
    batch_size: int = 10_000,
    n_epochs: int = 1,
    callback: Callback | None = None,
) -> PairSites:
    """Find q by one pass over the rows, or a few, in random batches.

    Parameters
    ----------
    dynamics : Dynamics
        Of f.
    knots : Tensor of shape (M,)
        Rising.
    series : Series
    likelihood : Likelihood
    generator : torch.Generator
        Of the batches.
    offset : float, default=0.0
        Prior mean of f.
    batch_size : int, default=10_000
        Rows a batch, at least 1.
    n_epochs : int, default=1
        Passes over the rows, at least 1.
    callback : callable, optional
        Called as ``callback(t, {"loss": ..., "step": ...})`` after every batch; True stops. The
        loss is the negative bound of the batch given those before, whose sum over the first epoch
        is about that of all rows; in later epochs an estimate of that of all rows.

    Returns
    -------
    PairSites
        O((b + M) d^3) a batch of b rows.

    Raises
    ------
    ValueError
        If `batch_size` or `n_epochs` is less than 1, or as `fit_inducing`.
    """
    for name, value in (("batch_size", batch_size), ("n_epochs", n_epochs)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}.")
    model, t, seen = _Model(dynamics, knots, likelihood, offset), 0, 0.0
    sites = PairSites.zeros(dynamics.n_states, len(knots))
    for epoch in range(n_epochs):
        order = torch.randperm(len(series.y), generator=generator)
        for chosen in order.split(batch_size):
            batch = series.rows(chosen.sort().values)
            t, seen = t + 1, seen + batch.total
            rate = 1.0 if epoch == 0 else batch.total / seen
            if epoch == 0:
                sites, bound = model.added(batch, sites, _ITER if t > 1 else _FIRST_ITER)
            else:
                sites, bound = model.step(_scaled(batch, series.total), sites, rate)
            if callback is not None and callback(t, {"loss": -bound, "step": rate}):
                return sites
    return sites


def _scaled(batch: Series, total: float) -> Series:
    """A batch with its weights raised to the total of all rows, for which it stands."""
    weight = torch.ones_like(batch.y) if batch.weight is None else batch.weight
    return replace(batch, weight=weight * (total / batch.total))
