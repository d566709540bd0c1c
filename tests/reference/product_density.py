"""The density N(f; m, v) p(y | f) of one row on a fine grid: sums in NumPy, nothing clever."""

import math

import numpy as np
import torch


class ProductDensity:
    """Trapezoidal sums over e = (f - m) / sqrt(v).

    The nodes crowd geometrically around the modes of both factors and of their product, so that
    neither a narrow nor a distant factor is missed.
    """

    def __init__(self, likelihood, y, mean, var, *, mode=0.0):
        self.likelihood, self.y, self.mean, self.std = likelihood, y, mean, math.sqrt(var)
        around = np.geomspace(1e-9, 1e3, 6001)
        around = np.concatenate([-around[::-1], [0.0], around])
        centres = [0.0, (mode - mean) / self.std if math.isfinite(mode) else 0.0]
        e = np.unique(np.concatenate([centre + around for centre in centres]))
        centres.append(e[np.argmax(self._log_density(e))])
        self.e = np.unique(np.concatenate([centre + around for centre in centres]))
        log_density = self._log_density(self.e)
        density = np.exp(log_density - log_density.max())
        width = np.diff(self.e)
        self.weights = 0.5 * (np.append(width, 0.0) + np.insert(width, 0, 0.0)) * density
        self.cumulated = np.insert(np.cumsum(0.5 * width * (density[1:] + density[:-1])), 0, 0.0)
        mass = self.weights.sum()
        self.log_mass = math.log(mass) + log_density.max() - 0.5 * math.log(2 * math.pi)
        self.weights /= mass
        self.cumulated /= self.cumulated[-1]

    def _log_density(self, e):
        f = torch.from_numpy(self.mean + self.std * e)
        y = torch.full_like(f, self.y)
        log_prob = self.likelihood.log_prob(y, f).numpy()
        return -0.5 * e**2 + np.nan_to_num(log_prob, nan=-np.inf, neginf=-np.inf)

    def cdf(self, e):
        """Distribution function of e."""
        return np.interp(e, self.e, self.cumulated)

    def moments(self):
        """Mean and variance of e."""
        mean = self.weights @ self.e
        return mean, self.weights @ (self.e - mean) ** 2

    def gradient(self):
        """Derivatives of the log of the mass in m and v: means of those of log N(f; m, v)."""
        in_mean = self.weights @ self.e / self.std
        return in_mean, self.weights @ (self.e**2 - 1) / (2 * self.std**2)
