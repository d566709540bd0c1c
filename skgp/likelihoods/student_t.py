r"""Student-t observation noise, for regression with outliers.

.. math:: p(y \mid f) = \frac{\Gamma(\frac{\nu + 1}{2})}{\Gamma(\frac\nu2) \sqrt\pi\, c}
                        \Big(1 + \frac{(y - f)^2}{c^2}\Big)^{-(\nu + 1) / 2}, \qquad
          c = \sigma \sqrt\nu.

The density is not log-concave, and its logarithm has singularities at a distance c from the
observation: Gauss-Hermite quadrature errs by .24 nats (20 nodes) where f is spread more widely
than the noise. In units of c, with :math:`X = (f - y) / c \sim N(\rho, \tau^2)`, everything needed
is one of two functions.

`expected_log_prob`
    :math:`H(\rho, \tau^2) = E[\log(1 + X^2)]`, by `quadrature.smooth_expectation`.
`log_predictive`
    :math:`L(\rho, \tau^2, \nu) = \log E[(1 + X^2)^{-(\nu + 1) / 2}]`. Under
    :math:`X = \sinh u` the noise becomes :math:`\cosh^{-\nu} u\, du`, and the trapezoidal rule in u
    resolves the noise and N(rho, tau^2) whatever their ratio. The integrand may have two peaks
    (an outlier is blamed on the noise or on f). They solve a cubic equation, which bounds the
    integrand from below and with it the window in which it is within 20 nats of its peak. Rows
    whose window is many times wider than their narrowest peak take 96 nodes, others 40.

The slopes of H and L come from the same nodes by the theorems of Bonnet and Price; autograd carries
them on to the mean, the variance, the scale and the degrees of freedom.

Distribution function
---------------------
The noise is a scale mixture of normals: :math:`y - f \sim N(0, \sigma^2 / \lambda)` with
:math:`\lambda \sim \operatorname{Gamma}(\nu / 2)` of mean 1. Hence
:math:`P(Y \le y) = E_\lambda[\Phi((y - m) / \sqrt{v + \sigma^2 / \lambda})]`, a smooth integral.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skgp.likelihoods import adaptive, defaults, quadrature
from skgp.likelihoods.base import NumericLikelihood
from skgp.likelihoods.quadrature import check_positive, free_parameter
from skgp.linalg.runtime import constant_like

_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)  # mathematical


class StudentT(NumericLikelihood):
    r"""Additive Student-t noise with scale :math:`\sigma` and :math:`\nu` degrees of freedom.

    Parameters
    ----------
    scale : float or Tensor broadcastable to the observations
        :math:`\sigma > 0` in the units of y; a tensor may require a gradient. The variance of the
        noise is :math:`\sigma^2 \nu / (\nu - 2)` for :math:`\nu > 2`, else infinite.
    df : float or Tensor broadcastable to the observations, default=4.0
        :math:`\nu > 0`; a tensor may require a gradient. 1 is the Cauchy distribution, and the
        normal one is the limit of large values.
    scale_bounds, df_bounds : (float, float), optional
        Within which they are learned; by default they are kept.
    n_points : int, default=20
        Gauss-Hermite nodes of the expected log-density for narrow latent variables.

    Raises
    ------
    ValueError
        If a scale or a number of degrees of freedom is not positive and finite.

    Notes
    -----
    For :math:`\nu \le 1` no mean exists; `predictive_moments` then gives the median in its place.

    Examples
    --------
    >>> import torch
    >>> y, mean, var = torch.tensor([[9.0], [0.0], [1.0]], dtype=torch.float64)
    >>> StudentT(scale=1.0, df=4.0).log_predictive(y, mean, var)
    tensor([-8.4423], dtype=torch.float64)
    """

    is_additive = has_heavy_tails = True
    is_log_concave = False

    def __init__(
        self,
        scale: float | Tensor,
        df: float | Tensor = 4.0,
        *,
        scale_bounds: tuple[float, float] | None = None,
        df_bounds: tuple[float, float] | None = None,
        n_points: int = 20,
    ) -> None:
        super().__init__(n_points=n_points)
        remedy = "For nearly noise-free data use a small positive value such as 1e-3."
        check_positive("scale", scale, remedy)
        check_positive("df", df, "For nearly Gaussian noise use a large value such as 200.")
        self.scale, self.df = scale, df
        self.scale_bounds, self.df_bounds = scale_bounds, df_bounds

    def free_parameters(self) -> tuple[tuple[float, float, float], ...]:
        """The squared scale and the degrees of freedom."""
        scale, low, high = free_parameter(self.scale, self.scale_bounds)
        return (scale**2, low**2, high**2), free_parameter(self.df, self.df_bounds)

    def with_parameters(self, parameters: Tensor) -> "StudentT":
        """The likelihood at the logarithms of these."""
        scale, df = (0.5 * parameters[0]).exp(), parameters[1].exp()
        return StudentT(scale, df, n_points=self.n_points)

    def log_prior(self, parameters: Tensor) -> Tensor:
        """Of the degrees of freedom: a Gamma law of mode 4, where they are learned.

        Some dozens of observations hold few outliers or none, and their likelihood is often
        greatest for normal noise: predictions are then sure of what they cannot know.
        """
        if self.df_bounds is None or self.df_bounds[0] == self.df_bounds[1]:
            return parameters.new_zeros(())
        return (defaults.DF_SHAPE - 1) * parameters[1] - defaults.DF_RATE * parameters[1].exp()

    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        c, df = self._unit(f), self._df(f)
        return self._log_peak(f) - 0.5 * (df + 1) * torch.log1p(((f - y) / c) ** 2)

    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        c, df = self._unit(f), self._df(f)
        _, first, second = _log_one_plus_square((f - y) / c)
        return -0.5 * (df + 1) / c * first, -0.5 * (df + 1) / c**2 * second

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        c, df = self._unit(mean), self._df(mean)
        average = quadrature.smooth_expectation(
            _log_one_plus_square,
            (mean - y) / c,
            var / c**2,
            scale=defaults.STUDENT_T_SCALE,
            n_points=self.n_points,
        )
        return self._log_peak(mean) - 0.5 * (df + 1) * average

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        c, df = self._unit(mean), self._df(mean)
        _, first, second = quadrature.smooth_averages(
            _log_one_plus_square,
            (mean - y) / c,
            var / c**2,
            scale=defaults.STUDENT_T_SCALE,
            n_points=self.n_points,
        )
        return -0.5 * (df + 1) / c * first, -0.5 * (df + 1) / c**2 * second

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        c, df = self._unit(mean), self._df(mean)
        columns = torch.broadcast_tensors((mean - y) / c, var / c**2, df)
        return self._log_peak(mean) + _LogAverage.apply(*columns)

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return mean, var + self._conditional_var(mean)

    def _cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r = y - mean
        # The predictive is symmetric about its mean; the lower half keeps tail precision.
        columns = torch.broadcast_tensors(-r.abs(), var, self._scale(mean), self._df(mean))
        (lower,) = quadrature.chunked(_lower_tail, columns, chunk=defaults.STUDENT_T_CHUNK)
        return torch.where(r > 0, 1 - lower, lower)

    def _quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        half = torch.minimum(q, 1 - q)
        columns = torch.broadcast_tensors(half, var, self._scale(mean), self._df(mean))
        (r,) = quadrature.chunked(_lower_quantile, columns, chunk=defaults.STUDENT_T_CHUNK)
        return mean + torch.where(q < 0.5, r, -r)

    def _sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        # Bailey (1994), Polar generation of random variates with the t-distribution.
        first, second = f.new_empty(2, *f.shape).uniform_(generator=generator)
        df = self._df(f)
        radius = (df * torch.expm1(-2 / df * torch.log1p(-first))).sqrt()
        return f + self._scale(f) * radius * torch.cos(2 * math.pi * second)

    def _mode(self, y: Tensor) -> Tensor:
        return y

    def _conditional_mean(self, f: Tensor) -> Tensor:
        return f

    def _conditional_var(self, f: Tensor) -> Tensor:
        df = self._df(f)
        has_variance = df > 2
        excess = torch.where(has_variance, df - 2, 1.0)
        return self._scale(f) ** 2 * torch.where(has_variance, df / excess, math.inf)

    def _log_peak(self, like: Tensor) -> Tensor:
        """Log-density of the noise at 0."""
        df = self._df(like)
        log_ratio = torch.lgamma(0.5 * (df + 1)) - torch.lgamma(0.5 * df)
        return log_ratio - 0.5 * math.log(math.pi) - self._unit(like).log()

    def _unit(self, like: Tensor) -> Tensor:
        """The length c."""
        return self._scale(like) * self._df(like).sqrt()

    def _scale(self, like: Tensor) -> Tensor:
        return constant_like(self.scale, like)

    def _df(self, like: Tensor) -> Tensor:
        return constant_like(self.df, like)


def _log_one_plus_square(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log(1 + x^2) and its first two derivatives."""
    square = x**2
    inverse = 1 / (1 + square)
    return torch.log1p(square), 2 * x * inverse, 2 * (1 - square) * inverse**2


class _LogAverage(torch.autograd.Function):
    """L(rho, tau^2, df) of the module's docstring, for tensors of one shape."""

    @staticmethod
    def forward(ctx: Any, rho: Tensor, tau_squared: Tensor, df: Tensor) -> Tensor:
        # Below this width N(rho, tau^2) is a point: the spacing of its nodes would be lost.
        least = math.sqrt(torch.finfo(rho.dtype).eps) * (1 + rho**2).sqrt()
        tau = torch.maximum(tau_squared.sqrt(), least)
        low, high, is_hard = _window(rho.abs(), tau, df)
        value, in_rho, in_tau_squared, in_df = quadrature.piecewise(
            is_hard,
            lambda *rows: _log_average(*rows, n_points=defaults.FEW_NODES),
            lambda *rows: _log_average(*rows, n_points=defaults.MANY_NODES),
            (rho.abs(), tau, df, low, high),
            chunk=defaults.STUDENT_T_CHUNK,
        )
        ctx.save_for_backward(torch.where(rho < 0, -in_rho, in_rho), in_tau_squared, in_df)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * slope for slope in ctx.saved_tensors)


def _window(rho: Tensor, tau: Tensor, df: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Interval in u outside of which the integrand is 20 nats below its peak, for rho >= 0.

    The logarithm of the integrand is the sum of two terms with maximum 0,

    .. math:: G(u) = -(\sinh u - \rho)^2 / 2 \tau^2, \qquad T(u) = -\nu \log \cosh u.

    Of shape (...) each; the last says whether a peak may be narrow beside the window.
    """
    mode, peak = _highest_peak(rho, tau, df)
    room = defaults.STUDENT_T_DROP - peak
    low, high = _bounds(rho, tau, df, room, room)
    # Far out, T is low all over the window and leaves less room to G.
    nearest = torch.zeros_like(rho).clamp(low, high)
    of_noise = -0.5 * df * torch.log1p(torch.sinh(nearest) ** 2)
    low, high = _bounds(rho, tau, df, room + of_noise, room)

    at_mode = (1 + 2 * mode**2 - rho * mode) / tau**2 + df / (1 + mode**2)
    at_noise = torch.where(low < 0, df, 0.0)
    at_latent = torch.where(high > torch.asinh(rho), (1 + rho**2) / tau**2, 0.0)
    sharpest = torch.maximum(at_mode, torch.maximum(at_noise, at_latent))
    return low, high, (high - low) ** 2 * sharpest > defaults.HARD**2


def _highest_peak(rho: Tensor, tau: Tensor, df: Tensor) -> tuple[Tensor, Tensor]:
    r"""Where G + T is largest, as :math:`X = \sinh u`, and its value there, at least nearly.

    Its stationary points solve :math:`X^3 - \rho X^2 + (1 + \nu \tau^2) X - \rho = 0` in
    :math:`[0, \rho]`; Newton's method rises to the first from 0 and falls to the last from rho.
    """
    x = torch.stack([torch.zeros_like(rho), rho])
    linear = 1 + df * tau**2
    for _ in range(defaults.N_ROOT_STEPS):
        value = ((x - rho) * x + linear) * x - rho
        slope = (3 * x - 2 * rho) * x + linear
        x = torch.minimum((x - value / slope).clamp_min(0), rho)
    candidates = torch.cat([x, rho[None]])
    heights = -0.5 * ((candidates - rho) / tau) ** 2 - 0.5 * df * torch.log1p(candidates**2)
    peak, index = heights.max(0, keepdim=True)
    return candidates.gather(0, index)[0], peak[0]


def _bounds(
    rho: Tensor, tau: Tensor, df: Tensor, room_latent: Tensor, room_noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Interval in u where G > -room_latent and T > -room_noise."""
    reach = tau * (2 * room_latent).sqrt()
    ratio = room_noise / df
    limit = ratio + torch.log1p((-torch.expm1(-2 * ratio)).sqrt())  # acosh(exp(ratio))
    low = torch.maximum(-limit, torch.asinh(rho - reach))
    return low, torch.minimum(limit, torch.asinh(rho + reach))


def _log_average(
    rho: Tensor, tau: Tensor, df: Tensor, low: Tensor, high: Tensor, *, n_points: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L and its slopes in rho, tau^2 and df, by the trapezoidal rule between low and high."""
    step = (high - low) / (n_points - 1)
    index = torch.arange(n_points, dtype=rho.dtype, device=rho.device)
    exp = torch.addcmul(low, index[:, None], step).exp_()
    inverse = exp.reciprocal()
    x = (exp - inverse).mul_(0.5)
    cosh = exp.add_(inverse).mul_(0.5)
    log_cosh = cosh.log()
    sech_squared = cosh.square_().reciprocal_()
    z = (x - rho).div_(tau)
    psi = (df * log_cosh).addcmul_(z, z, value=0.5).neg_()
    peak = psi.amax(0)
    weights = psi.sub_(peak).exp_()
    total = weights.sum(0)
    weights /= total

    def average(values: Tensor) -> Tensor:
        return (weights * values).sum(0)

    sech_2, sech_4 = average(sech_squared), average(sech_squared.square())
    # d log p / dX = -(df + 1) X / (1 + X^2), and 1 / (1 + X^2) = sech^2 u.
    first_squared = (df + 1) ** 2 * (sech_2 - sech_4)
    second = (df + 1) * (sech_2 - 2 * sech_4)
    z_squared = average(z.square())
    # Of Bonnet's and Price's two forms, the one whose terms cancel less.
    by_noise = first_squared + second.abs() < (z_squared + 1) / tau**2
    in_rho = torch.where(by_noise, -(df + 1) * average(sech_squared.mul_(x)), average(z) / tau)
    in_tau_squared = torch.where(by_noise, second + first_squared, (z_squared - 1) / tau**2)
    value = peak + (total * step / tau).log() - _LOG_ROOT_2PI
    return value, in_rho, 0.5 * in_tau_squared, -average(log_cosh)


def _mixture(var: Tensor, scale: Tensor, df: Tensor) -> tuple[Tensor, Tensor]:
    """Variances v + scale^2 / lambda and their weights (96, n)."""
    offset, weights = adaptive.log_gamma_rule(0.5 * df, defaults.N_MIXTURE, for_tails=True)
    return var + scale**2 * (-offset).exp(), weights


def _lower_tail(r: Tensor, var: Tensor, scale: Tensor, df: Tensor) -> tuple[Tensor]:
    variance, weights = _mixture(var, scale, df)
    return ((weights * torch.special.ndtr(r / variance.sqrt())).sum(0),)


def _lower_quantile(q: Tensor, var: Tensor, scale: Tensor, df: Tensor) -> tuple[Tensor]:
    r"""Quantile r <= 0 of a centred predictive for q <= 1/2.

    Newton's method on :math:`\log F(r) = \log q` in w, with :math:`r = -s \sinh w`: the power law
    of the far tail is straight in w. A step out of the bracket is replaced by bisection.
    """
    variance, weights = _mixture(var, scale, df)
    std, spread = variance.sqrt(), (var + scale**2).sqrt()
    w = torch.asinh(-torch.special.ndtri(q))
    low, high = torch.zeros_like(w), torch.asinh(_tail_bound(q, var, scale, df) / spread)
    tolerance = 4 * torch.finfo(q.dtype).eps
    for _ in range(defaults.STUDENT_T_MAX_NEWTON):
        z = -spread * torch.sinh(w) / std
        cdf = (weights * torch.special.ndtr(z)).sum(0)
        density = (weights * (-0.5 * z**2 - _LOG_ROOT_2PI).exp() / std).sum(0)
        excess = cdf.log() - q.log()
        low = torch.where(excess > 0, w, low)
        high = torch.where(excess < 0, w, high)
        target = w + excess * cdf / (density * spread * torch.cosh(w))
        is_inside = (target >= low) & (target <= high)
        target = torch.where(is_inside, target, 0.5 * (low + high))
        is_done = bool(((target - w).abs() <= tolerance * (1 + w)).all())
        w = target
        if is_done:
            break
    return (-spread * torch.sinh(w),)


def _tail_bound(q: Tensor, var: Tensor, scale: Tensor, df: Tensor) -> Tensor:
    r"""A distance b with :math:`P(Y - m < -b) < q`.

    One of three things must happen: f - m or the normal part of the noise is low, of probability
    q / 2 and q / 4, or the mixing variable is below :math:`(q / 4)^{2 / \nu} / e`, of probability
    less than q / 4 by Chernoff's bound.
    """
    of_latent = -var.sqrt() * torch.special.ndtri(0.5 * q)
    root = (0.5 + (4 / q).log() / df).clamp_max(0.4 * math.log(torch.finfo(q.dtype).max)).exp()
    return of_latent - scale * torch.special.ndtri(0.25 * q) * root
