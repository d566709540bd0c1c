"""The distribution of a new observation given that of f, on NumPy arrays, and its score."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.linalg import eigh
from scipy.special import ndtri
from scipy.stats import norm
from sklearn.pipeline import Pipeline
from sklearn.utils import gen_batches

from skgp.estimators import defaults
from skgp.estimators._base import clip_variance, to_tensor
from skgp.estimators._validation import check_counts
from skgp.likelihoods import NumericLikelihood

FourArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class LikelihoodPredictive:
    r"""Predictive distribution of :math:`z \sim p(z \mid f)` for any likelihood and Gaussian f.

    Everything is in the standardised scale; ``mean`` and ``var``, of shape (n,), are those of f. Of
    several targets, with Gaussian noise, they are (n, t) and (n, 1): all share a kernel, and with
    it the variance.
    Noise that is added to f (Gaussian, Laplace, Student-t) leaves the mean where that of f is. With
    any other likelihood z is in units of its own, which no standardisation of the targets may
    change, and f is on the scale of the link.

    Attributes
    ----------
    _likelihood : NumericLikelihood or None
        None for Gaussian noise of variance ``_noise_variance``, in closed forms. Counts take an
        ``offset`` (n,), the logarithms of their exposures.
    """

    _noise_variance: float
    _likelihood: NumericLikelihood | None = None

    @property
    def _predicts_latent(self) -> bool:
        """Whether the mean of z (where there is none, its median) is that of f."""
        return self._likelihood is None or self._likelihood.is_additive

    def _additive_variance(self) -> float:
        """Return the variance of z given f; infinite where it is.

        AttributeError if it depends on f.
        """
        if self._likelihood is None:
            return self._noise_variance
        if not self._predicts_latent:
            raise AttributeError(
                f"{type(self).__name__} has no noise_variance_: the variance of a "
                f"{type(self._likelihood).__name__} observation depends on its mean. Use "
                "predict(X, return_std=True)."
            )
        zero = np.zeros(1)
        return float(self._predictive_moments(zero, zero)[1][0])

    def _of_likelihood(self, method: str, *arrays, offset: np.ndarray | None = None):
        """Evaluate a method of the likelihood elementwise, at offsets that broadcast."""
        if offset is None:
            return by_elements(getattr(self._likelihood, method), *arrays)
        likelihood = cast(NumericLikelihood, self._likelihood)
        return by_elements(
            lambda offset, *arrays: getattr(likelihood.at(offset), method)(*arrays), offset, *arrays
        )

    def _predictive_moments(
        self, mean: np.ndarray, var: np.ndarray, offset: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of z."""
        if self._likelihood is None:
            return mean, var + self._noise_variance
        return self._of_likelihood("predictive_moments", mean, var, offset=offset)

    def _moment_slopes(
        self, mean: np.ndarray, var: np.ndarray, offset: np.ndarray | None = None
    ) -> tuple[np.ndarray, ...] | None:
        """Return the derivatives of E[z] in mean and var, then those of V[z], (n,) each.

        None where noise is added: they are 1, 0, 0 and 1.
        """
        if self._likelihood is None or self._predicts_latent:
            return None
        return self._of_likelihood("predictive_slopes", mean, var, offset=offset)

    def _predictive_covariance(
        self, mean: np.ndarray, covariance: np.ndarray, offset: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return mean, (n,) or (n, t), and covariance (n, n) of z, given those of f."""
        var = clip_variance(covariance.diagonal())
        mean_z, var_z = self._predictive_moments(mean, var, offset)
        # Given f, observations are independent: off the diagonal only their means vary together.
        if self._likelihood is None or self._predicts_latent:
            joint = covariance.copy()
        elif self._likelihood.has_log_link:
            joint = exponential_covariance(mean if offset is None else mean + offset, covariance)
        else:
            joint = link_covariance(self._conditional_mean, mean, covariance)
            if offset is not None:
                joint *= np.exp(offset[:, None] + offset)
        np.fill_diagonal(joint, var_z)
        return mean_z, joint

    def _conditional_mean(self, f: np.ndarray) -> np.ndarray:
        """Return E[z | f], of the shape of f."""
        return self._of_likelihood("predictive_moments", f, np.zeros_like(f))[0]

    def _predictive_quantiles(
        self,
        mean: np.ndarray,
        var: np.ndarray,
        quantiles: np.ndarray,
        offset: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the quantiles of z, shape (n, q) or (n, t, q)."""
        if self._likelihood is None:
            return normal_quantiles(mean, var + self._noise_variance, quantiles)
        offset = None if offset is None else offset[:, None]
        moments = mean[:, None], var[:, None]
        return self._of_likelihood("quantile", quantiles, *moments, offset=offset)

    def _predictive_log_density(
        self, z: np.ndarray, mean: np.ndarray, var: np.ndarray, offset: np.ndarray | None = None
    ) -> np.ndarray:
        """Return log p(z), shape (n,) or (n, t)."""
        if self._likelihood is None:
            return normal_log_density(z, mean, var + self._noise_variance)
        if self._likelihood.is_count:
            check_counts(z)
        return self._of_likelihood("log_predictive", z, mean, var, offset=offset)

    def _sample_observations(
        self, f: np.ndarray, rng: np.random.RandomState, offset: np.ndarray | None = None
    ) -> np.ndarray:
        """Return draws of z, of the shape of f, given draws of f."""
        if self._likelihood is None:
            return f + np.sqrt(self._noise_variance) * rng.standard_normal(f.shape)
        generator = torch.Generator().manual_seed(int(rng.randint(2**31 - 1)))
        likelihood = self._likelihood
        if offset is not None:
            likelihood = cast(NumericLikelihood, likelihood.at(to_tensor(offset)[:, None]))
        return likelihood.sample(to_tensor(f), generator).numpy()


def normal_quantiles(mean: np.ndarray, var: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles (..., *levels.shape) of normal variables, of some probabilities () or (q,)."""
    centre = mean[(...,) + (None,) * levels.ndim]
    return centre + np.multiply.outer(np.sqrt(var), ndtri(levels))


def normal_log_density(y: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    """Log-densities of y under normal distributions, in nats; finite where there is no variance."""
    std = np.sqrt(np.maximum(var, np.finfo(np.float64).tiny))
    return np.asarray(norm.logpdf(y, mean, std))


def by_elements(function: Callable, *arrays: np.ndarray):
    """Apply an elementwise function of tensors to arrays that broadcast, some values at a time.

    Quadrature holds many nodes a value; what lies in memory at once does not grow with the arrays.

    ``function`` maps float64 tensors of shape (b,) to one such tensor, or to a tuple of them.
    """
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    columns = [to_tensor(np.broadcast_to(array, shape)).reshape(-1) for array in arrays]
    parts = [
        function(*(column[rows] for column in columns))
        for rows in gen_batches(len(columns[0]), defaults.LIKELIHOOD_ELEMENTS)
    ]
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part).reshape(shape).numpy() for part in zip(*parts, strict=True))
    return torch.cat(parts).reshape(shape).numpy()


def exponential_covariance(mean: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    r"""Return the covariance of the exponentials of jointly Gaussian variables.

    .. math:: \operatorname{Cov}(e^{f_i}, e^{f_j}) = E_i E_j (e^{C_{ij}} - 1), \qquad
              E_i = E[e^{f_i}] = e^{m_i + C_{ii} / 2}.

    ``mean`` (n,), ``covariance`` C (n, n); the result is of magnitude 1e277 at most.
    """
    log_mean = mean + np.maximum(covariance.diagonal(), 0.0) / 2

    def block(rows: slice) -> np.ndarray:
        C = covariance[rows]
        # |e^C - 1|, in logarithms: a vast mean times a tiny covariance then is no infinity.
        log_size = np.maximum(C, 0.0) + np.log(-np.expm1(-np.abs(C)))
        exponent = log_mean[rows, None] + log_mean + log_size
        return np.sign(C) * np.exp(np.minimum(exponent, defaults.MAX_EXPONENT))

    with np.errstate(divide="ignore"):  # log(0) where the covariance is 0
        return _by_blocks(block, len(mean))


def link_covariance(
    function: Callable[[np.ndarray], np.ndarray], mean: np.ndarray, covariance: np.ndarray
) -> np.ndarray:
    r"""Return the covariance of a function g of jointly Gaussian variables, by Mehler's formula.

    .. math:: \operatorname{Cov}(g(f_i), g(f_j)) = \sum_{k \ge 1} \rho_{ij}^k a_{ik} a_{jk},
              \qquad a_{ik} = E_{z \sim N(0, 1)}\big[g(m_i + s_i z)\,
              \mathit{He}_k(z) / \sqrt{k!}\big],

    with :math:`\rho` the correlation and s the standard deviations of f. The sum is cut at k = 64:
    each of its terms is positive semi-definite, so that the result is. Its error relative to the
    variances of g, for the softplus, is below 1e-8 up to s = 3 and 4e-5 at s = 10.

    ``function`` is g, elementwise, smooth and of polynomial growth. O(64 n^2) time, and O(241 n)
    values of g.
    """
    std = np.sqrt(np.maximum(covariance.diagonal(), 0.0))
    nodes, basis = _hermite_rule()
    coefficients = np.empty((len(mean), defaults.HERMITE_TERMS))
    for rows in gen_batches(len(mean), max(1, defaults.COVARIANCE_ELEMENTS // len(nodes))):
        coefficients[rows] = function(mean[rows, None] + std[rows, None] * nodes) @ basis
    # A row without variance has no correlation.
    inverse = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)

    def block(rows: slice) -> np.ndarray:
        correlation = covariance[rows] * inverse[rows, None] * inverse
        np.clip(correlation, -1.0, 1.0, out=correlation)
        total = np.zeros_like(correlation)
        for a in coefficients.T[::-1]:  # Horner's rule, from the last term to the first
            total += np.multiply.outer(a[rows], a)
            total *= correlation
        return total

    return _by_blocks(block, len(mean))


@functools.lru_cache(maxsize=1)
def _hermite_rule() -> tuple[np.ndarray, np.ndarray]:
    r"""Nodes z (q,), and weights (q, 64) that turn g at the nodes into coefficients.

    For an analytic g under a Gaussian the trapezoidal rule converges exponentially: the softplus is
    integrated to 1e-8 up to a latent standard deviation of 10.
    """
    nodes = defaults.HERMITE_STEP * np.arange(
        -round(defaults.HERMITE_RANGE / defaults.HERMITE_STEP),
        round(defaults.HERMITE_RANGE / defaults.HERMITE_STEP) + 1,
    )
    density = defaults.HERMITE_STEP * norm.pdf(nodes)
    hermite = [np.ones_like(nodes), nodes]  # He_k / sqrt(k!)
    for k in range(1, defaults.HERMITE_TERMS):
        following = nodes * hermite[k] - np.sqrt(k) * hermite[k - 1]
        hermite.append(following / np.sqrt(k + 1))
    return nodes, density[:, None] * np.stack(hermite[1:], axis=1)


def _by_blocks(block: Callable[[slice], np.ndarray], n: int) -> np.ndarray:
    """Return an (n, n) matrix of which ``block`` computes some rows at a time."""
    out = np.empty((n, n))
    for rows in gen_batches(n, max(1, defaults.COVARIANCE_ELEMENTS // n)):
        out[rows] = block(rows)
    return out


def is_constant(scale: Any, y: np.ndarray) -> Any:
    """Tell whether targets y (n,) or (n, t) vary by no more than rounding, theirs or their mean's.

    `scale`, their standard deviations, tells less: the mean of n equal numbers errs by up to n eps.
    """
    least = rounding_of(np.abs(y).max(axis=0))
    return (scale <= least) | (np.ptp(y, axis=0) <= least)


def rounding_of(largest: Any) -> Any:
    """What numbers of some magnitude may differ by and count as equal."""
    return 10 * np.finfo(np.float64).eps * largest


def of_targets(spread: np.ndarray, scale: Any) -> np.ndarray:
    """`spread` times `scale` () or (t,), with an axis of targets where there are several."""
    return spread * scale if np.ndim(scale) == 0 else np.multiply.outer(spread, scale)


def with_axes(of_each: Any, n_axes: int) -> Any:
    """What each target has, () or (t,), to broadcast with arrays (n, t, ...) of more axes."""
    return of_each if np.ndim(of_each) == 0 else np.reshape(of_each, (-1, *[1] * n_axes))


def parts_asked(
    return_std: bool, return_cov: bool, return_mean_grad: bool, return_std_grad: bool
) -> tuple[bool, ...]:
    """Which of mean, standard deviation and their gradients; () where no gradient is asked for.

    RuntimeError, as scikit-learn's, for a standard deviation beside a covariance; ValueError for
    gradients beside a covariance, and those of a standard deviation not asked for.
    """
    if return_std and return_cov:
        raise RuntimeError("At most one of return_std or return_cov can be requested.")
    if not (return_mean_grad or return_std_grad):
        return ()
    if return_cov:
        raise ValueError(
            "return_mean_grad and return_std_grad go with return_std, not with return_cov=True. "
            "Ask for the covariance in a call of its own."
        )
    if return_std_grad and not return_std:
        raise ValueError("return_std_grad=True needs return_std=True.")
    return True, return_std, return_mean_grad, return_std_grad


def std_gradient(d_var: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Gradients (..., d) of standard deviations given those of variances; 0 where they are 0."""
    inverse = np.divide(0.5, std, out=np.zeros_like(std), where=std > 0)
    return d_var * inverse[..., None]


def gradient_in(total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gradient (n, d) of a scalar in the rows; 0 where it does not depend on them."""
    if not total.requires_grad:
        return torch.zeros_like(rows)
    return torch.autograd.grad(total, rows, retain_graph=True, materialize_grads=True)[0]


def gaussian_draws(
    mean: np.ndarray, covariance: np.ndarray, n_samples: int, rng: np.random.RandomState
) -> np.ndarray:
    """Return joint draws (n, s) or (n, t, s) of means (n,) or (n, t) and a covariance (n, n)."""
    draws = rng.standard_normal((*mean.shape, n_samples))
    spread = covariance_root(covariance) @ draws.reshape(len(mean), -1)
    return mean[..., None] + spread.reshape(draws.shape)


def covariance_root(covariance: np.ndarray) -> np.ndarray:
    r"""Return the symmetric R (n, n) with :math:`R R` equal to a positive semi-definite covariance.

    Latent covariances are singular up to rounding, so this takes the eigenvalue decomposition,
    clips negative eigenvalues at 0, and needs no jitter. Unlike eigenvectors, whose signs and
    order rounding decides, R is continuous: draws are the same on other processors. O(n^3).
    """
    values, vectors = eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T


def log_predictive_density_scorer(
    estimator, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
) -> float:
    """Score a fitted estimator by its mean log predictive density; greater is better.

    Meant as ``scoring=log_predictive_density_scorer`` of ``GridSearchCV``, ``cross_validate``,
    ``permutation_importance`` and their like. For a classifier it is minus the log-loss.

    Parameters
    ----------
    estimator : estimator
        With a method ``log_predictive_density``; or a ``Pipeline`` that ends in one, whose other
        steps transform X first; or a search over either, of which the best is judged.
    X : array-like of shape (n, d)
    y : array-like of shape (n,) or (n, t)
        Targets, or labels that the classifier knows.
    sample_weight : array-like of shape (n,) or None, default=None

    Returns
    -------
    float
        Nats per observation.

    Raises
    ------
    TypeError
        If the estimator, or the last step of the pipeline, has no such method.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import GridSearchCV
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from skgp import DLMGPClassifier
    >>> from skgp.estimators import log_predictive_density_scorer
    >>> pipeline = make_pipeline(StandardScaler(), DLMGPClassifier(max_iter=5, random_state=0))
    >>> grid = {"dlmgpclassifier__n_inducing": [1, 10]}
    >>> search = GridSearchCV(pipeline, grid, scoring=log_predictive_density_scorer, cv=2)
    >>> search.fit(*load_iris(return_X_y=True)).best_params_
    {'dlmgpclassifier__n_inducing': 10}
    """
    weights = None if sample_weight is None else np.asarray(sample_weight)
    density = np.asarray(_log_density(estimator, X, y))
    return float(np.average(density.reshape(len(density), -1).mean(1), weights=weights))


def _log_density(estimator, X, y) -> np.ndarray:
    """Log predictive densities, (n,) or (n, t), of whatever wraps an estimator of ours."""
    if hasattr(estimator, "log_predictive_density"):
        return estimator.log_predictive_density(X, y)
    if hasattr(estimator, "best_estimator_"):
        return _log_density(estimator.best_estimator_, X, y)
    if isinstance(estimator, Pipeline):
        # A pipeline of no steps cannot transform.
        inputs = estimator[:-1].transform(X) if len(estimator) > 1 else X
        return _log_density(estimator[-1], inputs, y)
    raise TypeError(
        f"log_predictive_density_scorer needs an estimator with log_predictive_density, or a "
        f"Pipeline or a fitted search (with refit) that ends in one; got "
        f"{type(estimator).__name__}. Of other classifiers scoring='neg_log_loss' is the same."
    )
