r"""Sparse within sparse Gaussian processes, from a kernel and rows to a posterior.

Each row conditions on the H of M inducing points that are nearest to it [1]_. ``fit_swsgp`` takes
these steps:

1. *Active sets.* The inducing points nearest to every row, the row itself among them if it is one
   (:mod:`skgp.inference.neighbors.search`).
2. *Prior.* Without Gaussian noise, KL weight, amplitude and how classes are coupled by rows held
   out (:mod:`.prior_search`, :mod:`.prior_scale`).
3. *q(u).* Diagonal S and fixed points: a closed form for Gaussian noise, some natural-gradient
   steps otherwise (:mod:`.natural`). Else Algorithm 1 from there (:mod:`.minibatch`).
4. *Polish.* If asked for, everything together by Algorithm 1, kept if rows held out gain
   (:mod:`.polish`).

=================================  ===========================================================
paper                              here
=================================  ===========================================================
eq. (5), (8): w, active sets       `active` indices (n, H) in place of binary vectors
eq. (11): bound                    `bound`, with a KL weight
section 3.2: nearest points        `neighbors`
Algorithm 1                        `minibatch`; `polish`
eq. (13): predictions              `conditionals`, `posterior`
section 4.5: SWSGP-U               `posterior`, ``union=True``; J of `joint` by default
=================================  ===========================================================

Deviations and errata
---------------------
- Eq. (3): the last A lacks its transpose.
- Eq. (11) averages divergences of H variables each: about H nats in all, whatever M. With inducing
  points at the rows, m = y and S to 0, it has no upper bound in a noise variance that falls to 0.
  The divergence weighs M / H here; 1.0 is the paper's, and H = M is exactly SVGP.
- A row that is an inducing point may condition on itself: predictions of kin40k, protein, flights
  and MNIST were all better so, given a KL weight that suits (a prototype had found the reverse, at
  M / H and before convergence).
- It is no bound of the marginal likelihood either, for w depends on the row. Hyper-parameters are
  learned by the leave-one-out likelihood of rows given their neighbours.
- Section 4.5 predicts jointly from the union of active sets, which differs from eq. (13) for each
  row. J agrees with it.

References
----------
.. [1] Tran, Milios, Michiardi and Filippone (2021), Sparse within sparse Gaussian processes using
   neighbor information.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.neighbors.conditionals import Tiles
from skgp.inference.neighbors.natural import SitesFit, fit_sites
from skgp.inference.neighbors.posterior import SWSGPState
from skgp.inference.neighbors.streaming import Summary, summarize
from skgp.inference.neighbors.system import (
    FullSystem,
    LocalSystem,
    Posterior,
    full_system,
    local_system,
)
from skgp.learning.coupling import best_coupling
from skgp.learning.local.bound import Objective, total_bound
from skgp.learning.local.minibatch import LEARNING_RATE, Search, fit_minibatch
from skgp.learning.local.polish import polish
from skgp.learning.local.prior_search import FEW_ROWS, Prior, active_sets, find_prior, split_rows
from skgp.learning.local.settings import Settings
from skgp.likelihoods import Bernoulli, StudentT
from skgp.likelihoods.families import Family, GaussianFamily
from skgp.optim.lbfgs import minimize_lbfgs
from skgp.optim.stopping import StopRecorder

__all__ = ["SWSGPFit", "Settings", "fit_swsgp"]

Callback = Callable[[int, dict], bool | None]

_NATURAL_ITER, _POLISH_ITER, _MOST_ITER = 14, 400, 6000
_LIKELIHOOD_ROUNDS = 3
_LIKELIHOOD_ITER = 20
# Residuals of the means: small where there is one system to solve or little to each of them, so
# that the order of rows, or the units of y, do not show in the predictions. Where there is one of
# many after another, 3e-3 takes half the iterations of 1e-3 and changes the bound by less than the
# tolerance of the steps (60000 flights, M = 24000: by 1e-4 of it).
_SMALL = 5000
TIGHT_CG = {"cg_tol": 1e-8, "cg_max_iter": 1000}
CLOSED_CG = {"cg_tol": 1e-3, "cg_max_iter": 200}
STEPS_CG = {"cg_tol": 3e-3, "cg_max_iter": 200}


@dataclass(frozen=True)
class SWSGPFit:
    """A fitted model.

    Attributes
    ----------
    state : SWSGPState
    kl_weight : float
    elbo : float
        The bound, in nats; with the KL weight of the fit.
    summary : Summary or None
        Of the rows, for more to come; None of a full covariance, of points or hyper-parameters
        that Algorithm 1 moved.
    polished : bool
        Whether a polish was kept.
    coupling : float or None
        Of several classes (:mod:`skgp.learning.coupling`), by rows held out; None where there were
        none.
    n_iter : int
    history : dict of str to list of float
        "prior": scores of the rows held out, in nats; "solve": minus the bound an observation;
        "polish": minus the bound an observation, estimated from minibatches.
    """

    state: SWSGPState
    kl_weight: float
    elbo: float
    summary: Summary | None = None
    polished: bool = False
    coupling: float | None = None
    n_iter: int = 1
    history: dict[str, list[float]] = field(default_factory=dict)


def fit_swsgp(
    kernel,
    family: Family,
    data: Data,
    Z: Tensor,
    position: Tensor,
    *,
    offset: Tensor,
    settings: Settings,
    generator: torch.Generator,
    start: SWSGPState | None = None,
    callback: Callback | None = None,
) -> SWSGPFit:
    """Fit q(u) (steps 1 to 4 of the module docstring).

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
    family : Family
        The likelihood, at the parameters that it starts from.
    data : Data
        n rows; labels as in `skgp.likelihoods`, one column a latent function.
    Z : Tensor of shape (M, d)
        Inducing points.
    position : Tensor of int64, shape (n,)
        Which of them each row is, -1 for none.
    offset : Tensor of shape (c,)
        Prior means.
    settings : Settings
    generator : torch.Generator
        On the CPU.
    start : SWSGPState, optional
        Of an earlier fit: its prior is kept, and its q(u) begins where M is the same.
    callback : callable, optional
        ``callback(iteration, {"loss": float})``; True ends a step with what it has.

    Returns
    -------
    SWSGPFit
    """
    recorder = StopRecorder(callback)
    closed = settings.covariance == "full" and settings.n_neighbors >= len(Z)
    if closed:  # float32 has not the digits for all points at once
        data, Z, offset = data.to(torch.float64), Z.double(), offset.double()
        start = None if start is None else start.to(torch.float64)
    if closed and start is None and bool((position >= 0).all()):
        prior = Prior(kernel, settings.kl_weight, data)  # the usual GP: nothing is left to choose
    elif start is None:
        prior = find_prior(kernel, family, data, Z, position, offset, settings, generator, recorder)
    else:
        prior = Prior(start.kernel, settings.kl_weight, data, start=_posterior(start, Z))
    parameters = family.initial(Z) if start is None else start.likelihood
    state = SWSGPState.prior(prior.kernel, parameters, Z, offset)
    return _Fitter(family, prior.data, settings, generator, recorder).fit(state, prior)


class _Fitter:
    """The steps of :func:`fit_swsgp`, which share their arguments."""

    def __init__(self, family, data, settings, generator, callback) -> None:
        self.family, self.data, self.settings = family, data, settings
        self.generator, self.callback = generator, callback
        self.history: dict[str, list[float]] = {"prior": [], "solve": [], "polish": []}

    def _uses_all(self, n_points: int) -> bool:
        return self.settings.n_neighbors >= n_points

    def _is_closed(self, state: SWSGPState) -> bool:
        """Whether a full covariance has closed forms."""
        return self.settings.covariance == "full" and self._uses_all(state.n_inducing)

    def fit(self, state: SWSGPState, prior: Prior) -> SWSGPFit:
        """q(u) of all rows."""
        s = self.settings
        self.history["prior"] = prior.history
        kl_weight = prior.kl_weight
        if kl_weight is None:
            kl_weight = state.n_inducing / min(s.n_neighbors, state.n_inducing)
        # The system of the search for the prior is that of a diagonal covariance.
        system: LocalSystem | FullSystem | None = prior.system
        if system is None or self._is_closed(state):
            system = self._system(state, kl_weight)
        start = prior.start
        if isinstance(system, FullSystem):
            start = None if start is None or start.root is None else system.whitened(start)
        state, found, n_iter = self._natural(state, system, start)
        by_gradient = s.moves_inducing or (s.covariance == "full" and state.root is None)
        if by_gradient and not self.callback.stopped:
            state, n_iter = self._adam(state, kl_weight)
        kept = False
        if s.polish and len(self.data) >= FEW_ROWS and not self.callback.stopped:
            state, kept = self._polish(state, kl_weight)
        if kept and (state.root is None or self._is_closed(state)):
            system, by_gradient = self._system(state, kl_weight), False
            state, found, _ = self._natural(state, system, None)
        elif kept:  # no closed form: what was learned from most of the rows
            by_gradient = True
        bound, summary, coupling = found.bound, None, prior.coupling
        if isinstance(system, FullSystem) and coupling is None and self.data.y.shape[1] > 1:
            coupling = self._left_out_coupling(state, system, found)
        if by_gradient or self._moves_likelihood(self.family.make(state.likelihood)):
            active = self._search()(state.kernel, state.Z)
            bound = total_bound(state, self.data, active, Objective(self.family, kl_weight))
        if not by_gradient and isinstance(system, LocalSystem):
            summary = summarize(system, found.sites)
        return SWSGPFit(state, kl_weight, bound, summary, kept, coupling, n_iter, self.history)

    def _system(self, state: SWSGPState, kl_weight: float) -> LocalSystem | FullSystem:
        """What the bound knows of all rows."""
        kernel, Z, X, weight = state.kernel, state.Z, self.data.X, self.data.weight
        if self._is_closed(state):
            return full_system(kernel, X, Z, kl_weight=kl_weight, weight=weight)
        tiles = Tiles(kernel, X, Z, self._search()(kernel, Z))
        return local_system(tiles, kl_weight=kl_weight, weight=weight)

    def _natural(
        self, state: SWSGPState, system: LocalSystem | FullSystem, start: Posterior | None
    ) -> tuple[SWSGPState, SitesFit, int]:
        """Closed form or natural-gradient steps; parameters of the likelihood in between."""
        s = self.settings
        history: list[float] = []
        goes_on = start is not None  # from parameters that suit its q already
        for i in range(_LIKELIHOOD_ROUNDS):
            likelihood = self.family.make(state.likelihood).at(self.data.offset)
            found = fit_sites(
                system,
                self.data.y,
                likelihood,
                offset=state.offset,
                start=start,
                max_iter=_NATURAL_ITER if s.max_iter is None or s.moves_inducing else s.max_iter,
                tol=s.tol,
                **self._cg_options(),
                callback=self.callback,
            )
            history += [entry["loss"] / self.data.total for entry in found.history]
            start = found.q
            q = system.unwhitened(start) if isinstance(system, FullSystem) else start
            state = state.with_posterior(q.mean, var=q.var if q.root is None else None, root=q.root)
            last = i == _LIKELIHOOD_ROUNDS - 1 and not self._moves_likelihood(likelihood)
            takes_turns = self._moves_likelihood(likelihood) or (
                not goes_on and self._alternates(likelihood)
            )
            if last or not takes_turns or self.callback.stopped:
                break
            state = replace(state, likelihood=self._likelihood(state, system, start))
        self.history["solve"] = history
        return state, found, max(1, len(history))

    def _left_out_coupling(self, state: SWSGPState, system: FullSystem, found: SitesFit) -> float:
        """Coupling of classes by labels each left out: what a site says of f is divided out."""
        mean, var = system.moments(found.q)
        left = 1 / (1 / var - found.sites.precision).clamp_min(0.01 / var)
        mean = state.offset + left * (mean / var - found.sites.shift)
        likelihood = cast(Bernoulli, self.family.make(state.likelihood))  # others have one column
        return best_coupling(likelihood, self.data.y, mean, left, self.data.weight)

    def _cg_options(self) -> dict:
        if len(self.data) <= _SMALL:
            return TIGHT_CG
        return CLOSED_CG if isinstance(self.family, GaussianFamily) else STEPS_CG

    def _moves_likelihood(self, likelihood) -> bool:
        return self.settings.learn_hyperparameters and isinstance(likelihood, StudentT)

    def _alternates(self, likelihood) -> bool:
        """Whether q and the likelihood take turns: Algorithm 1 starts from noise that suits q."""
        s = self.settings
        learns = s.learn_hyperparameters and (s.solver == "adam" or s.polish)
        has_parameters = self.family.initial(self.data.X).numel() > 0
        return self._moves_likelihood(likelihood) or (learns and has_parameters)

    def _likelihood(self, state: SWSGPState, system, q: Posterior) -> Tensor:
        """Parameters of the likelihood that are best for q."""
        mean, var = system.moments(q)
        mean = state.offset + mean

        def loss(free: dict[str, Tensor]) -> Tensor:
            likelihood = self.family.make(free["likelihood"]).at(self.data.offset)
            rows = likelihood.expected_log_prob(self.data.y, mean, var)
            return -self.data.weighted_sum(rows) / self.data.total

        found = minimize_lbfgs(
            loss,
            {"likelihood": state.likelihood},
            max_iter=_LIKELIHOOD_ITER,
            bounds={"likelihood": self.family.box(state.likelihood)},
        )
        return found.parameters["likelihood"]

    def _search(self, X: Tensor | None = None) -> Search:
        """Active sets, under a moving kernel and of moving points, of rows X; of all by default."""
        rows = self.data.X if X is None else X
        return lambda kernel, Z: active_sets(kernel, rows, Z, self.settings)

    def _adam(self, state: SWSGPState, kl_weight: float):
        """Algorithm 1."""
        s = self.settings
        if s.covariance == "full" and state.var is not None:
            root = torch.diag_embed(state.var.T.sqrt())
            state = state.with_posterior(state.mean, root=root)
        everything = s.learn_hyperparameters and s.solver == "adam"
        found = fit_minibatch(
            state,
            self.data,
            self._search(),
            Objective(self.family, kl_weight, everything, everything, s.learn_inducing),
            settle=s.max_iter is None,
            **self._adam_options(_MOST_ITER),
        )
        self.history["solve"] += found.history
        return found.state, len(found.history)

    def _polish(self, state: SWSGPState, kl_weight: float):
        """Step 4: judged by rows that neither the start nor the polish learns from."""
        kept, held_out = split_rows(self.data.y, self.settings, self.generator)
        part = _Fitter(
            self.family, self.data.take(kept), self.settings, self.generator, self.callback
        )
        begin = state
        if state.root is None or self._is_closed(state):
            begin = part._natural(state, part._system(state, kl_weight), None)[0]
        trial = polish(
            begin,
            part.data,
            part._search(),
            Objective(self.family, kl_weight, True, True, self.settings.polishes_inducing),
            held_out=self.data.take(held_out),
            held_out_search=self._search(self.data.X[held_out]),
            **self._adam_options(_POLISH_ITER),
        )
        self.history["polish"] = trial.history
        return (trial.state, True) if trial.kept else (state, False)

    def _adam_options(self, most: int) -> dict:
        s = self.settings
        return {
            "generator": self.generator,
            "max_iter": most if s.max_iter is None else s.max_iter,
            "batch_size": s.batch_size,
            "learning_rate": LEARNING_RATE if s.learning_rate is None else s.learning_rate,
            "callback": self.callback,
        }


def _posterior(start: SWSGPState, Z: Tensor) -> Posterior | None:
    """q(u) of an earlier fit, if it is of the same inducing points."""
    if start.Z.shape != Z.shape or not torch.equal(start.Z, Z):
        return None
    return Posterior(start.mean, start.variance(), start.root)
