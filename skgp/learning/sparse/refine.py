"""What a start by the ELBO lacks for the log-loss: more points, a wider q(u), means that err less.

Each chooses among few candidates, by held-out rows or by the objective itself. ``update`` goes on
from a fitted posterior with a batch of rows.

References
----------
.. [1] Broderick, Boyd, Wibisono, Wilson and Jordan (2013), Streaming variational Bayes.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skgp.data import Data
from skgp.inference.collapsed import (
    evidence_ratio,
    natural_parameters,
    square_loss_path,
    statistics,
)
from skgp.inference.sparse import (
    ReferenceGaussian,
    SparseState,
    kl_from_standard_normal,
    latent_moments,
    posterior_from_precision,
    whitened_features,
)
from skgp.learning import defaults
from skgp.learning.selection import choose
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.search import held_out_losses, split
from skgp.learning.sparse.start import Problem, optimal_posterior
from skgp.linalg.cholesky import jittered_cholesky
from skgp.optim.bfgs import minimize_lbfgs

__all__ = ["Blend", "blended", "broadened", "choose_blend", "grown", "start_log_loss", "update"]


# -------------------------------------------------------------------------------- inducing points


def grown(state: SparseState, problem: Problem) -> SparseState:
    """The state with as many inducing points as pay, of Gaussian noise alone; O(n M^2) each.

    The collapsed posterior costs one pass over the data for each number of points, at the
    hyper-parameters of the start. Twice as many points make every later step four times as dear, so
    that their gain has to be worth it, not only beyond chance.
    """
    settings, objective = problem.settings, problem.objective.elbo
    if not (settings.sizes and objective.is_gaussian):
        return state
    few = problem.data.some(defaults.MAX_SIZE_ROWS, problem.generator)
    kept, held_out = split(few, settings.validation_fraction, problem.generator)

    def at(size: int) -> SparseState:
        Z = problem.inducing(state.kernel, size)
        return SparseState.prior(state.kernel, state.likelihood, Z, state.offset)

    tried = [state, *map(at, settings.sizes)]
    losses = [
        held_out_losses(objective.with_optimum(each, kept), objective, held_out) for each in tried
    ]
    return tried[choose(losses, least_effect=defaults.POINTS_WORTH)]


# ------------------------------------------------------------------------- the width of q(u)


def start_log_loss(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """Posterior of `data` under the ELBO, as wide as the log-loss wants it."""
    if objective.is_gaussian:
        state = optimal_posterior(state, data, objective.elbo)
    return broadened(state, data, objective)


@torch.no_grad()
def broadened(state: SparseState, data: Data, objective: Objective) -> SparseState:
    r"""The state, at the optimum of the ELBO, moved towards the log-loss; its mean stays.

    Its optimum has less noise and a wider q(u): uncertainty of f takes the place of noise, for it
    can differ from place to place. Among

    .. math:: S_\tau = \big(I + (S^{-1} - I) / \tau\big)^{-1}, \qquad \sigma^2 \leftarrow \nu
              \sigma^2,

    the best pair :math:`(\tau, \nu)` of a grid is taken, on at most 4000 rows; that costs one
    eigenvalue decomposition, where a gradient search would need many iterations.
    """
    n, objective = len(data), replace(objective, gradient="exact")
    some = data.take(torch.arange(0, n, -(-n // defaults.GRID_ROWS)))
    share = data.total / some.total
    Phi, unexplained = whitened_features(state.kernel, some.X, state.Z)
    mean = state.offset + Phi.mT @ state.mean
    # S^-1 - I = V diag(gain) V^T for each latent function.
    variances, vectors = torch.linalg.eigh(state.root @ state.root.mT)
    gain = 1 / variances.clamp_min(torch.finfo(Phi.dtype).tiny) - 1  # (c, M)
    squares = (vectors.mT @ Phi).square()  # (c, M, n)
    best, width, chosen = math.inf, 1.0, state.likelihood
    for tau in defaults.WIDTHS:
        narrowed = 1 / (1 + gain / tau)  # (c, M)
        var = (unexplained + (narrowed[:, None] @ squares)[:, 0]).mT
        divergence = 0.5 * (narrowed - 1 - narrowed.log()).sum()
        for likelihood in _less_noise(state, objective):
            made = objective.likelihood.with_parameters(likelihood)
            rows = share * objective.data_loss(made, some, mean, var)
            loss = float(rows + objective.beta * divergence)
            if loss < best:
                best, width, chosen = loss, tau, likelihood
    root = state.root
    if width != 1.0:
        covariance = (vectors / (1 + gain / width)[:, None]) @ vectors.mT
        root = jittered_cholesky(covariance).factor
    return replace(state, likelihood=chosen, root=root)


def _less_noise(state: SparseState, objective: Objective) -> list[Tensor]:
    """Parameters of the likelihood with the variance of the noise, the first, made smaller."""
    if not (objective.learn_likelihood and len(state.likelihood)):
        return [state.likelihood]
    low, high = objective.likelihood.box(state.likelihood)
    first = torch.eye(len(state.likelihood), dtype=low.dtype, device=low.device)[0]
    candidates = [state.likelihood + math.log(factor) * first for factor in defaults.LESS_NOISE]
    return [candidate.clamp(low, high) for candidate in candidates]


# ------------------------------------------------------------ means moved towards least squares


@dataclass(frozen=True)
class Blend:
    r"""Means of the log-loss moved towards those of least squares: :math:`a_s = (1 - s) a + s a_t`.

    The log-loss weighs the squared error of a row by its predictive precision, and so gives up on
    rows of great variance; steps on minibatches leave noise in the mean besides. With Gaussian
    noise the mean of least squares is known, :math:`a_t = (G + t I)^{-1} b`. Between it and the
    mean that was found the log-loss is flat while the error falls fast, as it does for averages of
    predictions that err independently.
    """

    share: float  # s
    ratio: float  # t in units of the mean prior variance


@torch.no_grad()
def choose_blend(state: SparseState, kept: Data, held_out: Data, objective: Objective) -> Blend:
    """The blend that held-out rows prefer, for a posterior of the log-loss; O(n M^2 + M^3).

    By the sum of the log-loss and of the squared error in units of twice its mean at s = 0, which
    is the log-loss of the same means under a single variance: means should be good whatever
    variances go with them.
    """
    sums = statistics(state.kernel, kept, state.Z)
    ratios = evidence_ratio(sums) * sums.gram.new_tensor(defaults.BLEND_RIDGES)
    means = list(square_loss_path(sums, ratios).split(1, dim=1))  # (M, 1) each
    square = replace(objective, name="square_loss")

    def half_squares(mean: Tensor) -> Tensor:
        return held_out_losses(replace(state, mean=mean), square, held_out)

    found = half_squares(state.mean)
    unit = 2 * found.mean().clamp_min(torch.finfo(found.dtype).tiny)
    best = choose([half_squares(mean) / unit for mean in means])

    def losses(share: float) -> Tensor:
        moved = replace(state, mean=(1 - share) * state.mean + share * means[best])
        return held_out_losses(moved, objective, held_out) + half_squares(moved.mean) / unit

    shares = defaults.BLEND_SHARES
    return Blend(shares[choose([losses(share) for share in shares])], ratios.tolist()[best])


@torch.no_grad()
def blended(state: SparseState, data: Data, blend: Blend) -> SparseState:
    """The state with its mean moved towards the least squares of `data`; O(n M^2 + M^3)."""
    if blend.share == 0:
        return state
    sums = statistics(state.kernel, data, state.Z)
    mean = square_loss_path(sums, sums.gram.new_tensor([blend.ratio]))
    return replace(state, mean=(1 - blend.share) * state.mean + blend.share * mean)


# --------------------------------------------------------------------------------- rows in batches


def update(
    state: SparseState, data: Data, objective: Objective, *, max_iter: int, tol: float
) -> SparseState:
    r"""The posterior after a batch, the prior of which is the posterior of the last [1]_.

    With hyper-parameters and inducing points fixed, a batch B changes q to

    .. math:: q_B = \arg\min_q \sum_{i \in B} w_i \ell_i + \gamma \beta\, \mathrm{KL}(q \,\|\,
              q_{B-1}),

    which for Gaussian noise and the objectives with closed forms gives the same posterior as all
    rows at once ("square_loss" counts as "elbo" under the noise that its variances were calibrated
    with), and otherwise one near it. That takes :math:`\gamma = 1`. Under the log-loss of numbers,
    though, the width of :math:`q_{B-1}` stands for noise and for what the model lacks, not for what
    is unknown of u: as a prior it is too weak, and a batch overrules it; there :math:`\gamma = 10`.
    Labels keep :math:`\gamma = 1`: classes may come late. The ELBO in place of the log-loss does
    far worse: it knows only the noise, which the log-loss has driven to nearly nothing.

    In coordinates around :math:`q_{B-1}` the divergence is again that from N(0, I). O(n M^2 c) an
    iteration; one where there is a closed form.
    """
    if objective.has_closed_form:
        return _conjugate(state, data, objective)
    objective = replace(objective, gradient="exact")
    reference = ReferenceGaussian(state.mean, state.root)
    likelihood = objective.likelihood.with_parameters(state.likelihood)
    weak = objective.name == "log_loss" and likelihood.is_numeric
    weight = objective.beta * (defaults.LOG_LOSS_WEIGHT if weak else 1.0)

    def loss(parts: dict[str, Tensor]) -> Tensor:
        mean, root = reference.posterior(**parts)
        moments = latent_moments(state.kernel, data.X, state.Z, mean, root, offset=state.offset)
        divergence = kl_from_standard_normal(parts["alpha"], reference.triangle(parts["triangle"]))
        return (objective.data_loss(likelihood, data, *moments) + weight * divergence) / data.total

    found = minimize_lbfgs(loss, reference.start(), max_iter=max_iter, tol=tol)
    with torch.no_grad():
        return state.with_posterior(*reference.posterior(**found.parameters))


@torch.no_grad()
def _conjugate(state: SparseState, data: Data, objective: Objective) -> SparseState:
    """Add the natural parameters of the batch to those of the posterior."""
    noise = objective.likelihood.gaussian_noise(state.likelihood)
    beta = objective.least_beta if objective.name == "elbo" else 1.0
    precision, projection = natural_parameters(
        state.kernel, data, state.Z, noise, beta=beta, fitc=objective.name == "fitc"
    )
    before = torch.cholesky_inverse(state.root[0])  # S^-1 of S = R R^T
    projection = projection + before @ state.mean
    return state.with_posterior(*posterior_from_precision(before + precision, projection))
