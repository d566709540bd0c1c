"""Likelihoods with free parameters, as vectors that an optimiser moves.

A family turns a vector of parameters into an `skgp.likelihoods` object. Targets are standardised,
so variances are relative to that of the targets.

==================  ==========================================  ================================
family              parameters                                  likelihood
==================  ==========================================  ================================
GaussianFamily      log variance of the noise                   Gaussian
StudentTFamily      log squared scale, log degrees of freedom   StudentT
FixedFamily         none                                        Bernoulli, Poisson, or any other
==================  ==========================================  ================================
"""

import math
from collections.abc import Sequence

from torch import Tensor

from skgp.likelihoods import Gaussian, Likelihood, StudentT

__all__ = ["Family", "FixedFamily", "GaussianFamily", "StudentTFamily"]

Bounds = tuple[float, float]


class Family:
    """A likelihood as a function of its free parameters.

    Attributes
    ----------
    start : tuple of float
        Values of the parameters to begin with.
    bounds : tuple of (float, float)
        Least and greatest value of each.
    information : float
        Most that an observation tells of f; see `Likelihood`.
    """

    start: tuple[float, ...] = ()
    bounds: tuple[Bounds, ...] = ()
    information = math.inf

    def make(self, parameters: Tensor) -> Likelihood:
        """Likelihood of parameters (p,), differentiable in them."""
        raise NotImplementedError

    def initial(self, like: Tensor) -> Tensor:
        """Parameters to begin with, (p,), in the dtype and on the device of `like`."""
        return like.new_tensor(self.start)

    def box(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds, each (p,)."""
        low, high = zip(*self.bounds, strict=True) if self.bounds else ((), ())
        return like.new_tensor(low), like.new_tensor(high)

    def noise_variance(self, parameters: Tensor) -> float:
        """Variance of the observation given f; NaN where it depends on f."""
        return math.nan

    def gaussian_noise(self, parameters: Tensor) -> Tensor:
        """Variance of Gaussian noise, a scalar, differentiable in the parameters.

        Raises
        ------
        TypeError
            If the noise is not Gaussian: no closed forms.
        """
        raise TypeError(f"{type(self).__name__} is not of Gaussian noise.")


class GaussianFamily(Family):
    """Gaussian noise of a variance to be learned.

    Parameters
    ----------
    variance : float
        To begin with.
    bounds : (float, float)
        Equal ones keep the variance.
    """

    def __init__(self, variance: float, bounds: Bounds) -> None:
        self.start = (math.log(variance),)
        self.bounds = (_logs(bounds),)

    def make(self, parameters: Tensor) -> Gaussian:
        return Gaussian(parameters[0].exp())

    def gaussian_noise(self, parameters: Tensor) -> Tensor:
        return parameters[0].exp()

    def noise_variance(self, parameters: Tensor) -> float:
        return float(parameters[0].exp())


class StudentTFamily(Family):
    """Student's t noise of a scale and degrees of freedom to be learned.

    Parameters
    ----------
    variance : float
        Squared scale to begin with.
    bounds : (float, float)
        Of the squared scale.
    df : float
        Degrees of freedom to begin with.
    df_bounds : (float, float)
        Equal ones keep the degrees of freedom.
    """

    def __init__(self, variance: float, bounds: Bounds, df: float, df_bounds: Bounds) -> None:
        self.start = (math.log(variance), math.log(df))
        self.bounds = (_logs(bounds), _logs(df_bounds))

    def make(self, parameters: Tensor) -> StudentT:
        return StudentT((0.5 * parameters[0]).exp(), parameters[1].exp())

    def noise_variance(self, parameters: Tensor) -> float:
        squared_scale, df = parameters.exp().tolist()
        return squared_scale * df / (df - 2) if df > 2 else math.inf


class FixedFamily(Family):
    """A likelihood without free parameters."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood, self.information = likelihood, likelihood.information

    def make(self, parameters: Tensor) -> Likelihood:
        return self.likelihood


def _logs(bounds: Sequence[float]) -> Bounds:
    return math.log(bounds[0]), math.log(bounds[1])
