r"""Sparse within sparse Gaussian processes (SWSGP): from a kernel and observations to a posterior.

The model of [1]_: of M inducing points each observation conditions on the H nearest alone.

=================================  ===========================================================
paper                              here
=================================  ===========================================================
N, D; M; H                         n, d; M, ``len(Z)``; H, ``n_neighbors``
theta                              ``kernel`` (its ``theta``), ``likelihood`` (its parameters)
m, S of q(u), eq. (2)              ``mean`` (M, c); ``var`` (M, c) or ``root`` (c, M, M), c latent
                                   functions
w, active sets, eqs. (5), (8)      ``active`` (n, H), indices in place of binary vectors
section 3.2, nearest points        :mod:`skgp.inference.neighbors.search`
eqs. (10), (11), bound             :mod:`skgp.learning.local.bound`; kappa, ``kl_weight``
Algorithm 1                        :mod:`skgp.learning.local.minibatch`
eq. (13), predictions              :mod:`skgp.inference.neighbors.posterior`
section 4.5, SWSGP-U               the same, ``union=True``; J of ``conditionals`` by default
=================================  ===========================================================

`fit_swsgp` takes these steps:

1. *Active sets* of all observations (section 3.2), an observation itself among them if it is one.
2. *Prior.* Without Gaussian noise, KL weight, amplitude and the coupling of classes by held-out
   data (:mod:`skgp.learning.local.prior`). Not in the paper.
3. *q(u)* for fixed inducing points (section 4.3): diagonal S has a closed form for Gaussian noise,
   else some natural-gradient steps (:mod:`skgp.inference.natural`). Algorithm 1 from
   there for what these cannot move.
4. *Polish.* If asked for, everything together by Algorithm 1, accepted only if the
   validation loss falls.

With observations in blocks, steps 2 and 4 use a random subset. Step 3 is one of these: sums over
the blocks (:mod:`skgp.inference.neighbors.sums`), initialised at the q(u) of that subset where it
has no closed form; or Algorithm 1, whose minibatches are read from the blocks, with active sets
found on the fly. Memory is O(1) in n.

Deviations and errata
---------------------
- Eq. (3): the last A lacks its transpose.
- Eq. (11) averages KL divergences of H variables each: about H nats in all, whatever M. With
  inducing points at the inputs, m = y and S to 0, it has no upper bound as the noise variance falls
  to 0. The KL divergence has the weight M / H here; 1.0 is the paper's, and H = M is exactly SVGP.
- An observation at an inducing point may condition on itself: predictions of kin40k, protein,
  flights and MNIST were all better so, with the KL weight chosen (a prototype had found the
  reverse, at M / H and before convergence).
- Eq. (11) is no lower bound of the log marginal likelihood either, as w depends on the observation.
  Hyper-parameters are learned before, by the leave-one-out likelihood of observations given their
  neighbours (:mod:`skgp.learning.local.hyperparameters`).
- Section 4.5 predicts jointly from the union of active sets, which differs from eq. (13) for each
  point. J agrees with it.

References
----------
.. [1] Tran, Milios, Michiardi and Filippone (2021), Sparse within sparse Gaussian processes using
   neighbor information, International Conference on Machine Learning.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.inference.natural import (
    FullSystem,
    SitesFit,
    VariationalPosterior,
    fit_natural_sites,
    natural_steps,
    unsettled,
)
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.search import active_sets
from skgp.inference.neighbors.sums import BlocksProblem, FullRows, LocalRows
from skgp.inference.neighbors.system import (
    LocalSystem,
    Summary,
    full_system,
    local_system,
    summarize,
)
from skgp.inference.sites import without_site
from skgp.learning.defaults import FEW_ROWS, LEARNING_RATE
from skgp.learning.local import defaults
from skgp.learning.local.bound import LocalObjective, total_bound
from skgp.learning.local.minibatch import Search, fit_minibatch, of_all, of_minibatches, polish
from skgp.learning.local.prior import LeftOut, Prior, Settings, find_prior, split_rows
from skgp.likelihoods import Likelihood
from skgp.linalg import NumericalWarning, warn_caller
from skgp.linalg.runtime import Callback
from skgp.optim.bfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder


@dataclass(frozen=True)
class SWSGPFit:
    """A fitted model."""

    state: SWSGPState
    kl_weight: float
    elbo: float  # the bound, in nats; with the KL weight of the fit
    #: Of the rows, for more to come; None of a full covariance, and of points or hyper-parameters
    #: that Algorithm 1 moved.
    summary: Summary | None = None
    polished: bool = False  # whether a polish was kept
    left_out: LeftOut | None = None  # labels to calibrate by, if any could be
    n_iter: int = 1
    #: "prior": scores of the rows held out, in nats; "solve": minus the bound an observation;
    #: "polish": minus the bound an observation, estimated from minibatches.
    history: dict[str, list[float]] = field(default_factory=dict)


def fit_swsgp(
    kernel,
    likelihood: Likelihood,  # at the parameters that it starts from
    data: Data | MappedBlocks,  # n rows, or blocks of which some are n
    Z: Tensor,  # (M, d), inducing points
    position: Tensor,  # (n,) of int64; which of them each row is, -1 for none
    *,
    offset: Tensor,  # (c,), prior means
    settings: Settings,
    generator: torch.Generator,  # on the CPU
    start: SWSGPState | None = None,  # of an earlier fit: its prior, and q(u) if M is the same
    callback: Callback | None = None,  # True ends a step with what it has
) -> SWSGPFit:
    """Fit q(u) (steps 1 to 4 of the module docstring)."""
    recorder = StopRecorder(callback)
    blocks = data if isinstance(data, MappedBlocks) else None
    rows = data.some if isinstance(data, MappedBlocks) else data
    closed = settings.covariance == "full" and settings.n_neighbors >= len(Z)
    if closed:  # float32 has not the digits for all points at once
        rows, Z, offset = rows.to(torch.float64), Z.double(), offset.double()
        blocks = None if blocks is None else blocks.to(torch.float64)
        start = None if start is None else start.to(torch.float64)
    if closed and start is None and bool((position >= 0).all()):
        prior = Prior(kernel, settings.kl_weight, rows)  # the usual GP: nothing is left to choose
    elif start is None:  # step 2
        prior = find_prior(
            kernel, likelihood, rows, Z, position, offset, settings, generator, recorder
        )
    else:
        same = start.Z.shape == Z.shape and torch.equal(start.Z, Z)
        q = VariationalPosterior(start.mean, start.variance(), start.root) if same else None
        prior = Prior(start.kernel, settings.kl_weight, rows, start=q)
    parameters = likelihood.initial(Z) if start is None else start.likelihood
    state = SWSGPState.prior(prior.kernel, parameters, Z, offset)
    fitter = _Fitter(likelihood, prior.data, settings, generator, recorder, blocks)
    return fitter.fit(state, prior)


class _Fitter:
    """Steps 3 and 4 of :func:`fit_swsgp`, which share their arguments."""

    def __init__(self, likelihood, data, settings, generator, callback, blocks=None) -> None:
        self.likelihood, self.data, self.settings = likelihood, data, settings
        self.generator, self.callback, self.blocks = generator, callback, blocks
        self.history: dict[str, list[float]] = {"prior": [], "solve": [], "polish": []}
        parameters = likelihood.initial(data.X)
        self.has_parameters = parameters.numel() > 0
        self.is_gaussian = likelihood.with_parameters(parameters).is_gaussian
        # Gaussian noise was learned with the kernel; any other alternately with q.
        self.moves_likelihood = (
            settings.learn_hyperparameters and self.has_parameters and not self.is_gaussian
        )

    def fit(self, state: SWSGPState, prior: Prior) -> SWSGPFit:
        """q(u) of all rows."""
        s, M = self.settings, state.n_inducing
        self.history["prior"] = prior.history
        kl_weight = M / min(s.n_neighbors, M) if prior.kl_weight is None else prior.kl_weight
        # The system of the search for the prior is that of a diagonal covariance.
        system: LocalSystem | FullSystem | None = prior.system
        if system is None or self._is_closed(state):
            system = self._system(state, kl_weight)
        start = prior.start
        if isinstance(system, FullSystem):
            start = None if start is None or start.root is None else system.whitened(start)
        state, found, n_iter = self._natural(state, system, start)  # step 3
        by_gradient = s.moves_inducing or (s.covariance == "full" and state.root is None)
        if by_gradient and not self.callback.stopped:
            state, n_iter = self._adam(state, kl_weight)
        kept = False
        if s.polish and len(self.data) >= FEW_ROWS and not self.callback.stopped:
            state, kept = self._polish(state, kl_weight)  # step 4
        if kept and (state.root is None or self._is_closed(state)):
            system, by_gradient = self._system(state, kl_weight), False
            state, found, _ = self._natural(state, system, None)
        elif kept:  # no closed form: what was learned from most of the rows
            by_gradient = True
        left_out = prior.held_out
        if isinstance(system, FullSystem) and left_out is None and not self.likelihood.is_numeric:
            left_out = self._left_out(state, system, found)
        if self.blocks is not None and not by_gradient and not self.callback.stopped:
            state, bound, summary, n_iter = self._over_blocks(state, system, found, kl_weight)
        else:
            bound = self._bound(state, found, kl_weight, by_gradient)
            summary = None
            if not by_gradient and isinstance(system, LocalSystem):
                summary = summarize(system, found.sites)
        return SWSGPFit(state, kl_weight, bound, summary, kept, left_out, n_iter, self.history)

    def _bound(self, state: SWSGPState, found: SitesFit, kl_weight: float, moved: bool) -> float:
        """Of q(u), which gradients have `moved` since it was found; of blocks by minibatches."""
        if moved and self.blocks is not None:
            last = self.history["solve"][-defaults.PLATEAU_WINDOW :]
            return -self.blocks.total * sum(last) / len(last)
        if not moved:
            return found.bound
        active = self._search()(state.kernel, state.Z)
        return total_bound(state, self.data, active, LocalObjective(self.likelihood, kl_weight))

    def _over_blocks(
        self, state: SWSGPState, system: LocalSystem | FullSystem, some: SitesFit, kl_weight: float
    ) -> tuple[SWSGPState, float, Summary | None, int]:
        """Step 3 for all rows, from q(u) of some of them; with its bound and its steps."""
        s, blocks = self.settings, self.blocks
        likelihood = self.likelihood.with_parameters(state.likelihood)
        model = state.kernel, likelihood, state.offset, state.Z, kl_weight, blocks.total
        full = isinstance(system, FullSystem)
        rows = (FullRows if full else LocalRows)(*model, s.n_neighbors, s.neighbors)
        rows.require_room(self.data.X)
        problem = BlocksProblem(blocks, rows, **defaults.TIGHT_CG, callback=self.callback)
        found = natural_steps(
            problem,
            start=None if self.is_gaussian else some.q,
            max_iter=defaults.NATURAL_ITER if s.max_iter is None else s.max_iter,
            tol=s.tol,
            callback=self.callback,
        )
        self.history["solve"] = [entry["loss"] / blocks.total for entry in found.history]
        q = system.unwhitened(found.q) if isinstance(system, FullSystem) else found.q
        var = None if full else q.var.to(state.Z)
        root = None if q.root is None else q.root.to(state.Z)
        state = state.with_posterior(q.mean.to(state.Z), var=var, root=root)
        summary = None if full else Summary(found.sites.columns[1].to(state.Z))
        return state, found.bound, summary, max(1, len(found.history))

    def _is_closed(self, state: SWSGPState) -> bool:
        """Whether a full covariance has closed forms: H = M."""
        s = self.settings
        return s.covariance == "full" and s.n_neighbors >= state.n_inducing

    def _search(self, X: Tensor | None = None) -> Search:
        """Active sets, under a moving kernel and of moving points, of rows X; of all by default."""
        rows = self.data.X if X is None else X
        how = self.settings.n_neighbors, self.settings.neighbors
        return lambda kernel, Z: active_sets(kernel, rows, Z, *how)

    def _system(self, state: SWSGPState, kl_weight: float) -> LocalSystem | FullSystem:
        """The statistics of eq. (11) over all observations, given their active sets (step 1)."""
        kernel, Z, X, weight = state.kernel, state.Z, self.data.X, self.data.weight
        if self._is_closed(state):
            return full_system(kernel, X, Z, kl_weight=kl_weight, weight=weight)
        tiles = Tiles(kernel, X, Z, self._search()(kernel, Z))
        return local_system(tiles, kl_weight=kl_weight, weight=weight)

    def _natural(
        self,
        state: SWSGPState,
        system: LocalSystem | FullSystem,
        start: VariationalPosterior | None,
    ) -> tuple[SWSGPState, SitesFit, int]:
        """Closed form or natural-gradient steps; parameters of the likelihood in between."""
        s = self.settings
        history: list[float] = []
        # Algorithm 1 starts from noise that suits q; a warm start has it already.
        learns = s.learn_hyperparameters and (s.solver == "adam" or s.polish)
        in_turns = learns and self.has_parameters and start is None
        rounds = 0
        if self.moves_likelihood or in_turns:
            rounds = defaults.LIKELIHOOD_ROUNDS - (not self.moves_likelihood)
        for i in range(rounds + 1):  # q(u) last
            likelihood = self.data.likelihood(self.likelihood.with_parameters(state.likelihood))
            found = fit_natural_sites(
                system,
                self.data.y,
                likelihood,
                offset=state.offset,
                start=start,
                max_iter=s.max_iter
                if s.max_iter is not None and not s.moves_inducing
                else defaults.NATURAL_ITER,
                tol=s.tol,
                **self._cg_options(state.likelihood),
                callback=self.callback,
            )
            history += [entry["loss"] / self.data.total for entry in found.history]
            start = found.q
            q = system.unwhitened(start) if isinstance(system, FullSystem) else start
            state = state.with_posterior(q.mean, var=q.var if q.root is None else None, root=q.root)
            if i == rounds or self.callback.stopped:
                break
            state = replace(state, likelihood=self._likelihood(state, system, start))
        if not self.callback.stopped:
            left = unsettled(found, system, self.data.y, likelihood, state.offset)
            if left > defaults.UNSETTLED:
                warn_caller(
                    f"The {len(found.history)} natural-gradient steps ended short of the "
                    "posterior: another one would change the precisions of its sites by a share of "
                    f"{left:.2f}. Raise max_iter, or give a kernel whose variance is that of f.",
                    NumericalWarning,
                )
        self.history["solve"] = history
        return state, found, max(1, len(history))

    def _cg_options(self, parameters: Tensor) -> dict:
        """Residuals; of Gaussian noise, under which means err by little of its deviation."""
        if len(self.data) <= defaults.SMALL:
            return defaults.TIGHT_CG
        if not self.is_gaussian:
            return defaults.STEPS_CG
        noise = self.likelihood.gaussian_noise(parameters)
        least = defaults.NOISE_RESIDUAL * float((noise / self.data.y.square().mean()).sqrt())
        if not least < defaults.CLOSED_CG["cg_tol"]:
            return defaults.CLOSED_CG
        return {**defaults.TIGHT_CG, "cg_tol": max(least, defaults.TIGHT_CG["cg_tol"])}

    def _likelihood(self, state: SWSGPState, system, q: VariationalPosterior) -> Tensor:
        """Parameters of the likelihood that are best for q."""
        mean, var = system.moments(q)
        mean = state.offset + mean

        def loss(free: dict[str, Tensor]) -> Tensor:
            likelihood = self.data.likelihood(self.likelihood.with_parameters(free["likelihood"]))
            rows = likelihood.expected_log_prob(self.data.y, mean, var)
            log_prior = self.likelihood.log_prior(free["likelihood"])
            return -(self.data.weighted_sum(rows) + log_prior) / self.data.total

        found = minimize_lbfgs(
            loss,
            {"likelihood": state.likelihood},
            max_iter=defaults.LIKELIHOOD_ITER,
            bounds={"likelihood": self.likelihood.box(state.likelihood)},
        )
        return found.parameters["likelihood"]

    def _left_out(self, state: SWSGPState, system: FullSystem, found: SitesFit) -> LeftOut:
        """The cavity of each label: its site is divided out of q."""
        mean, var = system.moments(found.q)
        precision, shift = found.sites.precision, found.sites.shift
        mean, left = without_site(mean, var, shift - precision * mean, precision)
        return LeftOut(self.data.y, state.offset + mean, left, self.data.weight)

    def _adam(self, state: SWSGPState, kl_weight: float) -> tuple[SWSGPState, int]:
        """Algorithm 1."""
        s = self.settings
        if s.covariance == "full" and state.var is not None:
            root = torch.diag_embed(state.var.T.sqrt())
            state = state.with_posterior(state.mean, root=root)
        everything = s.learn_hyperparameters and s.solver == "adam"
        data, find = self.data, of_all(self._search())
        if self.blocks is not None:
            data, find = self.blocks.by_rows(), of_minibatches(s.n_neighbors, s.neighbors)
        state, history = fit_minibatch(
            state,
            data,
            find,
            LocalObjective(self.likelihood, kl_weight, everything, everything, s.learn_inducing),
            settle=s.max_iter is None,
            **self._adam_options(defaults.MOST_ITER),
        )
        self.history["solve"] += history
        return state, len(history)

    def _polish(self, state: SWSGPState, kl_weight: float) -> tuple[SWSGPState, bool]:
        """Step 4: judged by rows that neither the start nor the polish learns from."""
        s = self.settings
        kept, held_out = split_rows(self.data.y, s, self.generator)
        part = _Fitter(self.likelihood, self.data.take(kept), s, self.generator, self.callback)
        begin = state
        if state.root is None or self._is_closed(state):
            begin = part._natural(state, part._system(state, kl_weight), None)[0]
        moves = s.learn_inducing or s.polish_inducing
        polished, is_better, self.history["polish"] = polish(
            begin,
            part.data,
            part._search(),
            LocalObjective(self.likelihood, kl_weight, True, True, moves),
            held_out=self.data.take(held_out),
            held_out_search=self._search(self.data.X[held_out]),
            **self._adam_options(defaults.POLISH_ITER),
        )
        return (polished, True) if is_better else (state, False)

    def _adam_options(self, most: int) -> dict:
        s = self.settings
        rate = LEARNING_RATE if s.learning_rate is None else s.learning_rate
        return {
            "generator": self.generator,
            "max_iter": most if s.max_iter is None else s.max_iter,
            "batch_size": s.batch_size,
            "learning_rate": rate,
            "callback": self.callback,
        }
