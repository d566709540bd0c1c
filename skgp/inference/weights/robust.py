r"""Robust regression: Laplace noise and a full Gaussian over the weights.

Model (Evans and Nair, 2020, "Quadruply stochastic Gaussian processes", appendix H.2; the fit is
not theirs): :math:`f(x) = \phi(x)^T w`, :math:`w \sim N(0, I)`, and
:math:`p(y_i \mid f_i) = \exp(-|y_i - f_i| / b) / 2b`. The posterior is approximated by the Gaussian
:math:`q(w) = N(\mu, \Sigma)` that maximises

.. math:: \mathcal{L} = \sum_i \omega_i E_q[\log p(y_i \mid f_i)] - KL(q, N(0, I)),

which is in closed form and concave in :math:`\mu` and the Cholesky factor of :math:`\Sigma`.

Natural-gradient steps
----------------------
Each row has a Gaussian site of precision :math:`\lambda_i` and moment :math:`h_i`:
:math:`\Sigma^{-1} = I + \Phi^T \Lambda \Phi`, :math:`\Sigma^{-1} \mu = \Phi^T h`. With
:math:`f_i \sim N(m_i, v_i)`, a natural-gradient step of size :math:`\rho` [1]_ moves the sites by
:math:`\rho` of their way to

.. math:: \lambda_i^* = -\omega_i E[d_2] = \tfrac{2 \omega_i}{b} N(y_i; m_i, v_i), \qquad
          h_i^* = \omega_i E[d_1] + \lambda_i^* m_i,

whose fixed point is the optimum. The moments stay finite where the precision underflows (a gross
outlier pulls by 1 / b, however far it lies), unlike the pseudo-target :math:`h_i / \lambda_i`.
:math:`\rho` is halved while the bound would fall. The first steps majorise instead:

.. math:: \lambda_i^* = \frac{\omega_i}{b} \frac{\operatorname{erf}(|r_i| / \sqrt{2 v_i})}{|r_i|},
          \qquad h_i^* = \lambda_i^* y_i, \qquad r_i = y_i - m_i,

the sharpest quadratic bound of :math:`E|y - f|` in m: from a poor start it needs a third of the
steps, but its :math:`\Sigma` is too narrow. (:math:`\lambda = \omega / b \sqrt{r^2 + v}`, the bound
of a Gaussian scale mixture, is looser yet.) After each step b takes its optimum, the mean of
:math:`E|y - f|`.

References
----------
.. [1] Khan and Lin (2017), Conjugate-computation variational inference.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skgp.inference import defaults
from skgp.inference.weights.design import StreamedDesign, add_gram, check_sample_weight
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.likelihoods.closed_form import Laplace, expected_absolute_residual
from skgp.linalg.cholesky import cho_solve, jittered_cholesky, log_det, tri_solve
from skgp.linalg.runtime import Callback


@dataclass(frozen=True)
class RobustFit:
    """Result of :func:`fit_robust`."""

    posterior: LinearWeightsPosterior  # q(w)
    scale: float  # b, in the units of y
    elbo: float  # L in nats, summed over the observations
    n_iter: int  # passes over the data, the first one aside
    converged: bool  # whether the bound stopped rising before
    history: list[float]  # the ELBO after each step taken


def fit_robust(
    design: StreamedDesign,  # without sample weights
    y: Tensor,  # (n,), of zero mean under the prior
    *,
    scale: float | None = None,  # b to start from or to keep; else half the mean deviation
    sample_weight: Tensor | None = None,  # (n,), positive; a row of weight 2 counts as two rows
    learn_scale: bool = True,  # whether b is learned
    tol: float = 1e-4,  # rise of the ELBO by a full step, in nats a unit of weight, that ends it
    max_iter: int = 50,  # passes over the data
    callback: Callback | None = None,  # told "loss", minus the ELBO a unit of weight, and "scale"
) -> RobustFit:
    r"""Fit a Gaussian over the weights, and b, to targets with Laplace noise.

    Sums and factorisations are in float64 whatever the dtype of the design. A ValueError refuses
    a weight that is not positive.

    A pass costs :math:`2 n m^2` flops and the features once, a step :math:`O(m^3)`; some 10 to 20
    passes. Memory: at most ten m x m matrices beside the features kept.
    """
    weight = torch.ones_like(y) if sample_weight is None else sample_weight
    check_sample_weight(weight, design.n_rows)
    y, weight = (each.to(design.device, torch.float64) for each in (y, weight))
    floor = defaults.LEAST_SCALE * (float(y.square().mean().sqrt()) or 1.0)
    if scale is None:
        scale = max(floor, 0.5 * float((y - y.median()).abs().mean()))
    ascent = _Ascent(design, y, weight, scale, floor if learn_scale else None)
    converged = ascent.run(tol, max_iter, callback)
    return ascent.result(converged)


@dataclass
class _Sites:
    """Gaussian stand-ins of the likelihood, and what they sum up to."""

    precision: Tensor  # (n,), lambda
    moment: Tensor  # (n,), h
    gram: Tensor  # (m, m), Phi' Lambda Phi, its lower triangle
    total: Tensor  # (m,), Phi' h

    def towards(self, other: "_Sites", step: float) -> "_Sites":
        """The sites a fraction of the way to others; linear, so no pass over the data."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Sites(*(torch.lerp(here, there, step) for here, there in pairs))

    def divide_(self, scale: float) -> "_Sites":
        """Divide everything by the scale of the noise, in place."""
        for tensor in vars(self).values():
            tensor /= scale
        return self


@dataclass
class _Gaussian:
    """q(w): its mean, and the upper triangular root R of its covariance R R'."""

    mean: Tensor
    root: Tensor
    log_det_precision: float

    @classmethod
    def of(cls, sites: _Sites) -> "_Gaussian":
        """Factor I + Phi' Lambda Phi, O(m^3)."""
        precision = sites.gram.tril() + sites.gram.tril(-1).mT
        precision.diagonal().add_(1.0)
        factor = jittered_cholesky(precision).factor
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        root = tri_solve(factor.mT, identity, upper=True)
        return cls(cho_solve(factor, sites.total), root, float(log_det(factor)))

    def moments(self, F: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of F w, each (rows,), float64."""
        root = self.root.to(F)  # triangular: half of its products are left out
        variance = F.new_zeros(F.shape[0], dtype=torch.float64)
        for start in range(0, F.shape[1], defaults.GRAM_TILE):
            stop = min(start + defaults.GRAM_TILE, F.shape[1])
            variance += (F[:, :stop] @ root[:stop, start:stop]).square().sum(1)
        return (F @ self.mean.to(F)).double(), variance


@dataclass
class _State:
    """Sites, the Gaussian that they make, and where the ascent goes from there."""

    sites: _Sites
    q: _Gaussian
    elbo: float
    scale: float
    target: _Sites


class _Ascent:
    """The optimisation: one pass over the data evaluates a state and sums up its target."""

    def __init__(
        self, design: StreamedDesign, y: Tensor, weight: Tensor, scale: float, floor: float | None
    ):
        self.design, self.y, self.weight = design, y, weight
        self.total_weight = float(weight.sum())
        self.scale, self.floor = scale, floor
        self.history: list[float] = []
        self.n_iter = 0
        self.state = self._evaluate(self._gaussian_sites(), majorise=True)

    def run(self, tol: float, max_iter: int, callback: Callback | None) -> bool:
        """Ascend until `max_iter` passes; whether it stopped before, at the optimum."""
        step = 1.0
        stopped = self._report(callback)
        while not stopped and self.n_iter < max_iter:
            majorised = self.n_iter <= defaults.N_MAJORISED
            trial = self._try(step, majorise=self.n_iter < defaults.N_MAJORISED)
            # A majorising step may lower the bound, since it narrows the covariance; it is no
            # direction of ascent then, and shorter steps along it would not help.
            while trial.elbo < self.state.elbo and not majorised:
                step /= 2
                if step < defaults.SMALLEST_STEP:
                    return True
                if self.n_iter == max_iter:
                    return False
                trial = self._try(step, majorise=False)
            rise, self.state = trial.elbo - self.state.elbo, trial
            stopped = self._report(callback)
            if rise <= tol * self.total_weight * step and not majorised:
                return True
            step = min(1.0, 2 * step)
        return False

    def result(self, converged: bool) -> RobustFit:
        """Wrap the state reached."""
        state = self.state
        none = state.q.mean.new_zeros(0)
        posterior = LinearWeightsPosterior(self.design.basis, state.q.mean, state.q.root, none)
        return RobustFit(posterior, state.scale, state.elbo, self.n_iter, converged, self.history)

    def _report(self, callback: Callback | None) -> bool:
        """Record the state and report it; whether to stop."""
        self.history.append(self.state.elbo)
        info = {"loss": -self.state.elbo / self.total_weight, "scale": self.state.scale}
        return callback is not None and bool(callback(len(self.history), info))

    def _try(self, step: float, *, majorise: bool) -> _State:
        state = self.state
        sites = state.target if step == 1 else state.sites.towards(state.target, step)
        return self._evaluate(sites, majorise=majorise)

    def _gaussian_sites(self) -> _Sites:
        """Sites of Gaussian noise of variance 2 b^2: the start."""
        precision = self.weight / (2 * self.scale**2)
        return self._sum_up(lambda F, rows: (precision[rows], precision[rows] * self.y[rows]))

    def _evaluate(self, sites: _Sites, *, majorise: bool) -> _State:
        """The Gaussian of given sites, its bound under the best b, and the sites to go to."""
        q = _Gaussian.of(sites)
        misfit = trace = 0.0  # sum w E|y - f| and tr(Lambda Phi Sigma Phi')

        def target_of(F: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
            nonlocal misfit, trace
            mean, variance = q.moments(F)
            trace += float(sites.precision[rows] @ variance)
            variance = variance.clamp_min((defaults.LEAST_STD * self.scale) ** 2)
            y, weight = self.y[rows], self.weight[rows]
            misfit += float(weight @ expected_absolute_residual(y, mean, variance))
            precision, moment = _target_sites(y, mean, variance, majorise=majorise)
            return weight * precision, weight * moment

        target = self._sum_up(target_of)
        self.n_iter += 1
        scale = self.scale
        if self.floor is not None:
            scale = max(self.floor, misfit / self.total_weight)
        # tr(Sigma) = m - trace, since Sigma (I + Phi' Lambda Phi) = I.
        divergence = 0.5 * (float(q.mean @ q.mean) - trace + q.log_det_precision)
        elbo = -self.total_weight * math.log(2 * scale) - misfit / scale - divergence
        return _State(sites, q, elbo, scale, target.divide_(scale))

    def _sum_up(self, site_of: Callable[[Tensor, slice], tuple[Tensor, Tensor]]) -> _Sites:
        """One pass over the data: sites of every tile of rows, and their sums."""
        design, m = self.design, self.design.n_features
        precision, moment = torch.empty_like(self.y), torch.empty_like(self.y)
        gram, total = self.y.new_zeros(m, m), self.y.new_zeros(m)
        for rows in design.tiles(m, defaults.SITE_TILE_BYTES):
            F = design.columns(range(design.basis.n_blocks), rows)
            precision[rows], moment[rows] = site_of(F, rows)
            add_gram(gram, F * precision[rows].sqrt().to(F)[:, None])
            total += F.mT @ moment[rows].to(F)
        return _Sites(precision, moment, gram, total)


def _target_sites(
    y: Tensor, mean: Tensor, variance: Tensor, *, majorise: bool
) -> tuple[Tensor, Tensor]:
    """Precision and moment that a step goes to, for b = 1 (both are proportional to 1 / b)."""
    first, second = Laplace(1.0).expected_derivatives(y, mean, variance)
    if not majorise:
        return -second, first - second * mean
    residual = y - mean
    # erf(r / sqrt(2 v)) / r tends to the curvature as r does to 0.
    near = residual.abs() < 1e-6 * variance.sqrt()
    precision = torch.where(near, -second, first / torch.where(near, 1.0, residual))
    return precision, precision * y
