"""What every likelihood offers to a model, with quadrature as the default computation.

`NumericLikelihood` adds what a distribution of numbers has and a distribution of labels lacks: a
distribution function, quantiles, draws.
"""

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from skgp.likelihoods import quadrature
from skgp.likelihoods.quadrature import aligned, check_finite, check_var
from skgp.linalg.runtime import TensorState


class Likelihood(TensorState, abc.ABC):
    r"""Density :math:`p(y \mid f)` of one observation given one latent value.

    The public methods check and broadcast their arguments, then call the method of the same name
    with an underscore. A subclass must write ``_log_prob``, ``_derivatives``, ``_mode``,
    ``_conditional_mean`` and ``_conditional_var``; the other computations default to Gauss-Hermite
    quadrature in f, and a closed form overrides them. It must where log p has a kink: quadrature of
    the second derivative misses a delta function. ``_check_targets`` refuses values that y cannot
    take.

    A subclass inherits its tests too: see ``LikelihoodContract`` in ``tests/contracts``.

    Parameters
    ----------
    n_points : int, default=20
        Number of quadrature nodes per observation.

    Attributes
    ----------
    information : float
        Greatest Fisher information :math:`-E[\partial^2 \log p(y \mid f)]` over all f.
    is_gaussian : bool
        Whether noise is additive and Gaussian: posteriors are in closed form.
    is_additive : bool
        Whether y is f plus noise of median 0: a prediction of y is that of f.
    is_log_concave, is_smooth : bool
        Whether log p is concave, and twice differentiable, in f: where both, Newton's method finds
        the mode of the posterior.
    is_numeric : bool
        Whether y is a number, not a label.
    has_link : bool
        Whether y is a number, but not f plus noise: iterations begin at `gaussian_observations`.
    is_count : bool
        Whether y is a count, which may have an exposure (`at`).
    has_log_link : bool
        Whether E[y | f] is the exponential of f.
    has_heavy_tails : bool
        Whether it stands for gross outliers, which targets are then standardised in spite of.

    Notes
    -----
    Everything is elementwise and differentiable in f, mean, var and the likelihood's own
    parameters. Arguments are tensors of one dtype whose shapes broadcast to (...), the shape of the
    results: observations y, latent values f, or mean and variance (at least 0) of f ~ N(m, v). The
    caller sums, and rescales the sum for minibatches. Log-densities are in nats. A ValueError
    refuses other shapes or dtypes, negative variances, and values that y cannot take.
    """

    information = math.inf
    is_log_concave = is_smooth = True
    is_gaussian = is_additive = is_numeric = is_count = has_log_link = False
    has_heavy_tails = False
    #: Distance in f over which functions of it bend, where they do: see `_averaged`.
    _bend: float

    def __init__(self, *, n_points: int = 20) -> None:
        quadrature.check_n_points(n_points)
        self.n_points = n_points

    @property
    def has_link(self) -> bool:
        """See the class."""
        return self.is_numeric and not self.is_additive

    def free_parameters(self) -> tuple[tuple[float, float, float], ...]:
        """Initial value and bounds of each, all positive; `with_parameters` takes their logs."""
        return ()

    def with_parameters(self, parameters: Tensor) -> "Likelihood":
        """The likelihood at the logarithms of its free parameters, (p,); differentiable."""
        return self

    def initial(self, like: Tensor) -> Tensor:
        """Logarithms of the initial values, (p,), in the dtype and on the device of `like`."""
        return like.new_tensor([math.log(value) for value, _, _ in self.free_parameters()])

    def box(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds of the logarithms, each (p,)."""
        free = self.free_parameters()
        return (
            like.new_tensor([math.log(low) for _, low, _ in free]),
            like.new_tensor([math.log(high) for _, _, high in free]),
        )

    def log_prior(self, parameters: Tensor) -> Tensor:
        """Log-density of the free parameters (p,) a priori, up to a constant; differentiable."""
        return parameters.new_zeros(())

    def centred(self, f: float, variance: float) -> tuple[float, float]:
        """Mean of Gaussian f of a variance at which y has the mean that it has at f; its slope.

        The slope is that in the variance. Where y has neither a logarithmic link nor that of a
        label the mean is f.
        """
        return (f - 0.5 * variance, -0.5) if self.has_log_link else (f, 0.0)

    def with_least_noise(self, variance: float) -> "Likelihood":
        """The same, Gaussian noise that is learned being at least this."""
        return self

    def gaussian_noise(self, parameters: Tensor) -> Tensor:
        """Variance of Gaussian noise, a scalar, differentiable in the parameters."""
        raise TypeError(f"{type(self).__name__} noise is not Gaussian.")

    def additive_variance(self) -> float:
        """Variance of y given f; infinite where it is, NaN where it depends on f."""
        zero = torch.zeros((), dtype=torch.float64)
        return float(self._conditional_var(zero)) if self.is_additive else math.nan

    def at(self, offset: Tensor | None) -> "Likelihood":
        """The likelihood of observations with given offsets: log-exposures of counts.

        Parameters
        ----------
        offset : Tensor or None
            Broadcasts with the observations; None for no offsets, whatever there were.

        Returns
        -------
        Likelihood

        Raises
        ------
        ValueError
            If there is an offset and the observations are no counts.
        """
        if offset is None:
            return self
        raise ValueError(
            f"{type(self).__name__} observations have no exposure, which multiplies the rate of "
            "counts. Leave exposure out, or use likelihood='poisson'."
        )

    def of_means(self, within: Tensor | None) -> "Likelihood":
        """The likelihood of means of observations of one f, an observation of each.

        Parameters
        ----------
        within : Tensor or None
            Mean squared deviations of the observations from their mean, broadcastable to the
            means. Matters to Gaussian noise alone; with any other there are no such means.
        """
        return self

    def rows(self, index: slice | Tensor) -> "Likelihood":
        """The likelihood of some of the observations that `at` gave offsets."""
        return self

    def log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        r"""Log-density :math:`\log p(y \mid f)`."""
        y, f = aligned(y=y, f=f)
        self._check_targets(y)
        return self._log_prob(y, f)

    def expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r"""Expected log-density :math:`E_{f \sim N(m, v)}[\log p(y \mid f)]`."""
        y, mean, var = aligned(y=y, mean=mean, var=var)
        self._check_targets(y)
        check_var(var)
        return self._expected_log_prob(y, mean, var)

    def expected_log_prob_and_derivatives(
        self, y: Tensor, mean: Tensor, var: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Expected log-density and expected first and second derivatives in f, without a graph.

        By the theorems of Bonnet and Price the latter are the derivatives of the former in the mean
        and, twice, in the variance.
        """
        mean, var = mean.detach().requires_grad_(), var.detach().requires_grad_()
        with torch.enable_grad():
            expected = self.expected_log_prob(y, mean, var)
            in_mean, in_var = torch.autograd.grad(expected.sum(), (mean, var))
        return expected.detach(), in_mean, 2 * in_var

    def log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r"""Log predictive density :math:`\log E_{f \sim N(m, v)}[p(y \mid f)]`; -mean: the MNLP."""
        y, mean, var = aligned(y=y, mean=mean, var=var)
        self._check_targets(y)
        check_var(var)
        return self._log_predictive(y, mean, var)

    def derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        r"""Two derivatives of :math:`\log p(y \mid f)` in f, without delta functions at kinks."""
        y, f = aligned(y=y, f=f)
        self._check_targets(y)
        return self._derivatives(y, f)

    def mode(self, y: Tensor) -> Tensor:
        """Latent value under which y is most probable; infinite where p keeps growing that way."""
        (y,) = aligned(y=y)
        self._check_targets(y)
        return self._mode(y)

    def mode_of_mean(self, y: Tensor) -> Tensor:
        """That of observations of mean y, which a mean of counts need not be: not checked."""
        return self._mode(y)

    def expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        r"""Expected derivatives in f under :math:`f \sim N(m, v)`.

        By the theorems of Bonnet and Price they are the derivatives of the expected log-density
        :math:`\ell(m, v)`, which natural-gradient steps need:

        .. math:: E[d_1] = \partial \ell / \partial m, \qquad
                  E[d_2] = \partial^2 \ell / \partial m^2 = 2\, \partial \ell / \partial v.
        """
        y, mean, var = aligned(y=y, mean=mean, var=var)
        self._check_targets(y)
        check_var(var)
        return self._expected_derivatives(y, mean, var)

    def predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        r"""Mean and variance of a new observation when :math:`f \sim N(m, v)`."""
        mean, var = aligned(mean=mean, var=var)
        check_var(var)
        return self._predictive_moments(mean, var)

    def predictive_slopes(self, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
        """Derivatives of the predictive mean in `mean` and `var`, then those of the variance.

        By autograd through ``predictive_moments``; 0 in a variance of 0.
        """
        with torch.enable_grad():
            at = tuple(x.detach().clone().requires_grad_() for x in aligned(mean=mean, var=var))
            moments = self.predictive_moments(*at)
            slopes = [
                torch.autograd.grad(moment.sum(), at, retain_graph=True, materialize_grads=True)
                for moment in moments
            ]
        return *slopes[0], *slopes[1]

    def gaussian_targets(self, y: Tensor) -> Tensor:
        """Values of f that y observes with roughly Gaussian noise, of targets that were checked.

        The modes, those at infinity moved to the outermost of the others, or to -1 and 1.
        """
        mode = self._mode(y)
        finite = mode[mode.isfinite()]
        return mode.clamp(finite.min(), finite.max()) if len(finite) else mode.sign()

    def gaussian_observations(self, y: Tensor, mean: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Values of f that y observes with roughly Gaussian noise, and the precision of each.

        `gaussian_targets` and minus the second derivatives there, clipped at 0. Where the mode is
        infinite, as of a count of 0, y may tell little: the value is then at or beyond `mean`, if
        given, which broadcasts with y.
        """
        f, mode = self.gaussian_targets(y), self._mode(y)
        if mean is not None:
            ends = torch.where(mode > 0, torch.maximum(f, mean), torch.minimum(f, mean))
            f = torch.where(mode.isinf(), ends, f)
        return f, (-self._derivatives(y, f)[1]).clamp_min(0)

    def fisher_information(self, f: Tensor) -> Tensor:
        """Minus the expected second derivative of one observation, at least 0.

        Exact where that derivative is linear in y, as in exponential families.
        """
        return (-self._derivatives(self._conditional_mean(f), f)[1]).clamp_min(0)

    @abc.abstractmethod
    def _log_prob(self, y: Tensor, f: Tensor) -> Tensor:
        """Log-density; y (...) against f (...) or, in quadrature, f (n_points, ...)."""

    @abc.abstractmethod
    def _derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Both derivatives in f; shapes as for ``_log_prob``."""

    @abc.abstractmethod
    def _mode(self, y: Tensor) -> Tensor:
        """Argmax over f of p(y | f), elementwise."""

    @abc.abstractmethod
    def _conditional_mean(self, f: Tensor) -> Tensor:
        """E[y | f], elementwise."""

    @abc.abstractmethod
    def _conditional_var(self, f: Tensor) -> Tensor:
        """V[y | f], elementwise; any shape that broadcasts with f."""

    def _log_prob_and_derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three at once, which a subclass may do faster; not for autograd."""
        return self._log_prob(y, f), *self._derivatives(y, f)

    def log_prob_and_derivatives(self, y: Tensor, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`log_prob` and `derivatives` of targets that were checked, without a graph."""
        with torch.no_grad():
            return self._log_prob_and_derivatives(y, f)

    def skewness(self, y: Tensor, f: Tensor) -> Tensor:
        r"""Third derivative of :math:`\log p(y \mid f)` over minus the second; 0 where that is 0.

        Bounded where both underflow. Targets were checked.
        """
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            second = self._derivatives(y, f)[1]
            # Of Gaussian noise it is a constant.
            third = torch.zeros_like(f)
            if second.requires_grad:
                (third,) = torch.autograd.grad(second.sum(), f)
        return torch.where(second < 0, -third / second.detach(), 0.0)

    def _averaged(self, rule: Callable, function: Callable, y: Tensor, *moments: Tensor) -> Any:
        """A rule of `quadrature` for averages over f, of a smooth function of y and f."""
        scale, n_points = self._bend, self.n_points
        return rule(lambda f, y: function(y, f), *moments, y, scale=scale, n_points=n_points)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return quadrature.expectation(
            lambda f: self._log_prob(y, f), mean, var, n_points=self.n_points
        )

    def _expected_derivatives(self, y: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        # Stacked behind the nodes, so that one sum serves both.
        first, second = quadrature.expectation(
            lambda f: torch.stack(self._derivatives(y, f), dim=1), mean, var, n_points=self.n_points
        )
        return first, second

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return quadrature.log_expectation(
            lambda f: self._log_prob(y, f), mean, var, n_points=self.n_points
        )

    def _predictive_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        return quadrature.moments(
            self._conditional_mean, self._conditional_var, mean, var, n_points=self.n_points
        )

    def _check_targets(self, y: Tensor) -> None:
        check_finite(y)


class NumericLikelihood(Likelihood):
    """Likelihood of an observation that is a number, so that y has quantiles.

    A subclass writes ``_cdf``, ``_quantile`` and ``_sample`` besides what `Likelihood` asks for.
    """

    is_numeric = True

    def cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r"""Predictive distribution function :math:`P(Y \le y)` when :math:`f \sim N(m, v)`."""
        y, mean, var = aligned(y=y, mean=mean, var=var)
        check_finite(y)
        check_var(var)
        return self._cdf(y, mean, var)

    def quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        r"""Predictive quantile, the smallest y with :math:`P(Y \le y) \ge q`."""
        q, mean, var = aligned(q=q, mean=mean, var=var)
        check_var(var)
        if not ((q > 0) & (q < 1)).all():
            raise ValueError("q must hold probabilities strictly between 0 and 1.")
        with torch.no_grad():
            return self._quantile(q, mean, var)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one observation given each latent value."""
        (f,) = aligned(f=f)
        with torch.no_grad():
            draws = self._sample(f.to(generator.device, torch.float64), generator)
        return draws.to(f)

    @abc.abstractmethod
    def _cdf(self, y: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """P(Y <= y), elementwise."""

    @abc.abstractmethod
    def _quantile(self, q: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Smallest y with P(Y <= y) >= q, elementwise."""

    @abc.abstractmethod
    def _sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """One draw of y given each f; float64, on the generator's device."""
