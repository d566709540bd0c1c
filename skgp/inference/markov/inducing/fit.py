r"""Doubly sparse variational GPs: the states at a few knots stand for those at all times [1]_.

==========================================  ===================================================
Adam et al. (2020)                          here
==========================================  ===================================================
z, u = s(z), M                              knots, states at the knots
:math:`v_n, P_n, T_n` (eqs. 13, 14)         pair, h, T (:mod:`.conditionals`); h for H P
btd, natural parameters of q less those     `PairSites` (:mod:`.pair_sites`)
of the prior (3.4)
natural gradient (eqs. 17-20, B.2)          `fit_inducing`
joint draws (A.2)                           :mod:`.draws`
==========================================  ===================================================

f at a time x depends on the states u at the knots through the two around it alone, and

.. math:: \mathcal{L} = \sum_i w_i E_q[\log p(y_i \mid f_i)] - KL(q(u) \,\|\, p(u))

is the bound of every sparse variational GP. Its best q is the prior times sites on pairs of
neighbouring states, and those are sums over the rows,

.. math:: \lambda_k = \sum_n \beta_n h_n, \qquad \Lambda_k = \sum_n \omega_n h_n h_n^\top,
          \qquad \beta_n = g_n + \omega_n m_n, \quad \omega_n = -2\, \partial \ell_n / \partial v_n

with :math:`\ell_n` the expected log-density of the row and :math:`g_n` its derivative in the mean:
the sites of exact inference (:mod:`..sites`), projected. A natural-gradient step of rate
:math:`\rho` moves the sites that fraction of the way to these sums. It is what differentiating
between mean and natural parameters through the reverse subset inverse gives, and needs no such
operator. Rows enter by sums per interval: O(n d^3 + M d^3), no loop over rows or knots.

In terms of sites of f the bound is that of exact inference, with

.. math:: \log Z - \tfrac12 \sum_n \omega_n T_n

in place of the log normaliser: its derivatives are the moments, :math:`m_n` in :math:`\beta_n` and
:math:`-(m_n^2 + v_n) / 2` in :math:`\omega_n`. For Gaussian noise it is the bound of Titsias, after
one step.

Errata of the paper
-------------------
A.1: :math:`\Sigma_{vv}` has :math:`P_0 A^\top` above the diagonal and :math:`A P_0` below,
:math:`\Sigma_{sv} = [A_{-t} P_0, P_0 A_{t+}^\top]`. Eq. 12 conditions on s(x_n), not f(x_n).
Eq. 15 lacks the logarithm of :math:`|\Sigma_{uu}|`. B.2: to maximise, a step is
:math:`\xi + \gamma \tilde\nabla`. Eqs. 25 and 26: the blocks off the diagonal are
:math:`-L_{op}^{-1} L_{op,n} L_{nn}^{-1}`.

References
----------
.. [1] Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), Doubly sparse variational Gaussian
   processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from skgp.inference.markov.inducing.conditionals import Conditionals, condition
from skgp.inference.markov.inducing.pair_sites import PairPosterior, PairSites, infer_pairs
from skgp.inference.markov.natural import climb
from skgp.inference.markov.series import Series
from skgp.inference.markov.sites import SeriesBound, sites_mean
from skgp.inference.markov.smoother import Evidence
from skgp.kernels.sde_dynamics import Dynamics
from skgp.likelihoods import Likelihood

__all__ = ["InducingEvidence", "InducingFit", "fit_inducing"]

Callback = Callable[[int, dict], bool | None]


class InducingEvidence:
    r"""What the states at knots say of sites of f: `smoother.evidence` for any number of times.

    Parameters
    ----------
    times : Tensor of shape (n,)
    knots : Tensor of shape (M,)
        Rising.
    base : PairSites, optional
        Sites that stand besides those of the times, such as what rows of the past have left.

    Notes
    -----
    h and T of the dynamics last seen are kept: (2d + 1) n numbers.
    """

    def __init__(self, times: Tensor, knots: Tensor, base: PairSites | None = None) -> None:
        _check_knots(knots)
        self.times, self.knots, self.base = times, knots, base
        self._kept: tuple[Dynamics, Conditionals] | None = None

    def conditionals(self, dynamics: Dynamics) -> Conditionals:
        """h and T of the times."""
        if self._kept is None or self._kept[0] is not dynamics:
            self._kept = dynamics, condition(dynamics, self.knots, self.times)
        return self._kept[1]

    def sites(self, dynamics: Dynamics, beta: Tensor, weight: Tensor) -> PairSites:
        """Sites of the pairs: the projected sites of f (n,), and the base."""
        found = self.conditionals(dynamics).collect(beta, weight)
        return found if self.base is None else found.plus(self.base)

    def __call__(self, dynamics: Dynamics, gaps: Tensor, beta: Tensor, weight: Tensor) -> Evidence:
        """Evaluate as `smoother.evidence` does; `gaps` are not read, the times being known.

        Returns
        -------
        Evidence
            Its `log_normalizer` is that of the pairs less half the sum of weight * T. Its gradient
            holds the base.
        """
        found = _infer(self, dynamics, beta, weight)
        parameters, _ = self.conditionals(dynamics).gradient(found.pairs, beta, weight)
        return Evidence(found.log_normalizer, parameters, found.mean, found.var)


@dataclass(frozen=True)
class InducingFit:
    r"""Sites that were found, and the posterior that they give.

    Attributes
    ----------
    sites : PairSites
        All that predictions need besides the kernel and the knots; with the base, if any.
    beta, weight : Tensor of shape (m,)
        Sites of f at each distinct time.
    elbo : float
        The bound, in nats; with a base, of the rows given the past.
    mean, var : Tensor of shape (m,)
        Of f less its prior mean, under q.
    n_iter : int
        Passes over the rows.
    converged : bool
    rows : Conditionals
        Of the times.
    pairs : PairPosterior
    """

    sites: PairSites
    beta: Tensor
    weight: Tensor
    elbo: float
    mean: Tensor
    var: Tensor
    n_iter: int
    converged: bool
    rows: Conditionals
    pairs: PairPosterior

    @property
    def parameter_gradient(self) -> Tensor:
        """Of the bound in the parameters of the dynamics (q,), where the sites have converged."""
        return self._gradients[0]

    @property
    def knot_gradient(self) -> Tensor:
        """Of the bound in the knots (M,), where the sites have converged."""
        return self._gradients[1]

    @cached_property
    def _gradients(self) -> tuple[Tensor, Tensor]:
        return self.rows.gradient(self.pairs, self.beta, self.weight)


def fit_inducing(
    dynamics: Dynamics,
    knots: Tensor,
    series: Series,
    likelihood: Likelihood,
    *,
    offset: float = 0.0,
    base: PairSites | None = None,
    start: tuple[Tensor, Tensor] | None = None,
    max_iter: int = 50,
    tol: float = 1e-6,
    callback: Callback | None = None,
) -> InducingFit:
    """Maximise the bound over q by natural-gradient steps, for fixed hyper-parameters.

    Parameters
    ----------
    dynamics : Dynamics
        Of f.
    knots : Tensor of shape (M,)
        Rising.
    series : Series
        m times and n rows.
    likelihood : Likelihood
        One that takes all rows alike. Unimodal in f.
    offset : float, default=0.0
        Prior mean of f.
    base : PairSites, optional
        What rows of the past have left: the rows of `series` are added to them.
    start : (Tensor, Tensor) of shapes (m,), optional
        Sites of f to begin with. By default the parabola that touches each row's log-density at
        its mode, or at the prior mean where it has none (labels, a count of 0): those of a Gaussian
        likelihood are the optimum.
    max_iter : int, default=50
        Largest number of passes over the rows, at least 1.
    tol : float, default=1e-6
        The search ends with a step that gains less, in nats an observation.
    callback : callable, optional
        Called as ``callback(n_iter, {"loss": ..., "step": ...})`` after every pass that raised the
        bound, the loss being its negative; returning True ends the search.

    Returns
    -------
    InducingFit
        With the highest bound found.

    Raises
    ------
    NonFiniteLossError
        If the bound is not finite where the search begins.
    ValueError
        If the knots are not rising and finite, `max_iter` is less than 1, or y holds a value that
        the likelihood refuses.

    Notes
    -----
    O((n + M) d^3) a pass, and as much for the gradients when they are first asked for.
    """
    inducing = InducingEvidence(series.times, knots, base)
    bound = _InducingBound(dynamics, inducing, series, likelihood, offset)
    end = climb(bound, start=start, max_iter=max_iter, tol=tol, callback=callback)
    point, found = end.point, end.point.found
    return InducingFit(
        inducing.sites(dynamics, point.beta, point.weight),
        point.beta,
        point.weight,
        point.elbo,
        found.mean,
        found.var,
        end.n_iter,
        end.converged,
        inducing.conditionals(dynamics),
        found.pairs,
    )


@dataclass(frozen=True)
class _Inference:
    pairs: PairPosterior
    log_normalizer: float
    mean: Tensor
    var: Tensor


def _infer(
    evidence: InducingEvidence, dynamics: Dynamics, beta: Tensor, weight: Tensor
) -> _Inference:
    """Posterior of the pairs and of f at the times, given sites of f (m,)."""
    rows = evidence.conditionals(dynamics)
    pairs = infer_pairs(rows.chain, evidence.sites(dynamics, beta, weight))
    mean, var = rows.marginals(pairs)
    return _Inference(pairs, pairs.log_normalizer - 0.5 * float(weight @ rows.T), mean, var)


class _InducingBound(SeriesBound):
    """Inference through the states at the knots."""

    def __init__(
        self,
        dynamics: Dynamics,
        inducing: InducingEvidence,
        series: Series,
        likelihood: Likelihood,
        offset: float,
    ) -> None:
        super().__init__(series, likelihood, offset)
        self._dynamics, self._inducing = dynamics, inducing
        # The bound of all rows so far, less what it was before these came.
        self._before = 0.0
        if inducing.base is not None:
            chain = inducing.conditionals(dynamics).chain
            self._before = infer_pairs(chain, inducing.base).log_normalizer

    def infer(self, beta: Tensor, weight: Tensor) -> tuple[_Inference, tuple[float, ...]] | None:
        found = _infer(self._inducing, self._dynamics, beta, weight)
        if not (found.pairs.is_proper and bool((found.var >= 0).all())):
            return None
        of_sites = sites_mean(beta, weight, found.mean, found.var)
        return found, (of_sites, -found.log_normalizer, self._before)


def _check_knots(knots: Tensor) -> None:
    if not (knots.ndim == 1 and len(knots) and bool(knots.isfinite().all())):
        raise ValueError(f"knots must be one or more finite times; got {knots}.")
    if not bool((knots.diff() > 0).all()):
        raise ValueError(
            "knots must rise strictly; sort them and drop those that coincide (torch.unique does "
            "both)."
        )
