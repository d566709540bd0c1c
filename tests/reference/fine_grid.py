"""Expectations over one Gaussian latent value by brute force: panels of Gauss-Legendre nodes.

No adaptivity beyond cutting off what is negligible: many panels, twenty nodes in each, edges at
every kink and dense about every place that matters. Shares no code with the library's quadrature.
"""

import numpy as np
import torch

_X, _W = np.polynomial.legendre.leggauss(20)


def log_predictive(likelihood, y, mean, var, kinks=(), centres=()):
    """log E[p(y | f)] and its derivatives in mean and variance, for f ~ N(mean, var).

    The derivatives are ``E[f - m] / v`` and ``(E[(f - m)^2] / v - 1) / 2v`` under the density
    proportional to ``N(f; m, v) p(y | f)``; ``centres`` are (place, scale) of its other features.
    """
    std = np.sqrt(var)

    def log_integrand(t):
        return -0.5 * (t / std) ** 2 + log_prob(likelihood, y, mean + t)

    edges = _edges(std, _hull(likelihood, y, mean, var, centres), mean, kinks, centres)
    for _ in range(4):  # shrink to where the integrand is within 45 nats of its peak
        values = log_integrand(edges)
        kept = np.flatnonzero(values > values.max() - 45)
        ends = edges[max(kept[0] - 1, 0)], edges[min(kept[-1] + 1, len(edges) - 1)]
        edges = _edges(std, ends, mean, kinks, centres)
    t, weights = panels(edges)
    values = log_integrand(t)
    terms = weights * np.exp(values - values.max())
    total = terms.sum()
    value = values.max() + np.log(total) - 0.5 * np.log(2 * np.pi * var)
    terms /= total
    return value, terms @ t / var, 0.5 * (terms @ t**2 / var - 1) / var


def expected_log_prob(likelihood, y, mean, var, kinks=(), centres=()):
    """E[log p(y | f)] and its derivatives ``E[z g(f)] / s`` and ``E[(z^2 - 1) g(f)] / 2v``.

    z = (f - m) / s, and g is log p less its value at the mean, lest the sums cancel.
    """
    std = np.sqrt(var)
    # As far as 20 standard deviations, for the sake of g = exp(f).
    t, weights = panels(_edges(std, (-20 * std, 20 * std), mean, kinks, centres))
    z = t / std
    weights = weights * np.exp(-0.5 * z**2) / (std * np.sqrt(2 * np.pi))
    at_mean = float(log_prob(likelihood, y, np.array([mean]))[0])
    g = log_prob(likelihood, y, mean + t) - at_mean
    return at_mean + weights @ g, weights @ (z * g) / std, weights @ ((z**2 - 1) * g) / (2 * var)


def log_prob(likelihood, y, f):
    """Values of log p(y | f) at an array of f."""
    f = torch.as_tensor(f)
    return likelihood.log_prob(torch.full_like(f, y), f).numpy()


def _hull(likelihood, y, mean, var, centres):
    """Interval of t = f - mean with all of the integrand.

    For a log-concave likelihood its peak is between the mean and the nearer of the likelihood's own
    mode and the place to which its slope at the mean pulls; otherwise the centres count as well.
    """
    arguments = (torch.tensor([value], dtype=torch.float64) for value in (y, mean))
    pull = var * float(likelihood.derivatives(*arguments)[0])
    own = float(likelihood.mode(torch.tensor([y], dtype=torch.float64))) - mean
    ends = [0.0, min(pull, own) if pull > 0 else max(pull, own)]
    ends += [place - mean for place, _ in centres]
    return min(ends) - 13 * np.sqrt(var), max(ends) + 13 * np.sqrt(var)


def _edges(std, ends, mean, kinks, centres):
    """Edges of panels in t = f - mean: even, even about 0 and sinh-spaced about the centres."""
    places = [
        np.linspace(*ends, 161),
        std * np.linspace(-13, 13, 53),
        np.asarray(kinks, dtype=float) - mean,
    ]
    places += [place - mean + scale * np.sinh(np.linspace(-12, 12, 97)) for place, scale in centres]
    edges = np.unique(np.concatenate(places))
    return edges[(edges >= ends[0]) & (edges <= ends[1])]


def panels(edges):
    """Nodes and weights of a rule of 20 nodes between each two consecutive edges."""
    half = np.diff(edges)[:, None] / 2
    middle = (edges[:-1] + edges[1:])[:, None] / 2
    return (middle + half * _X).ravel(), (half * _W).ravel()
