"""Student-t distributions and their mixtures: proposals with tails heavier than a Gaussian's."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import chdtri, gammaln, logsumexp, ndtri

from skgp.samplers import defaults as tuned


@dataclass(frozen=True)
class StudentT:
    """Multivariate Student-t distribution; `factor` is the lower Cholesky factor of its scale."""

    location: np.ndarray  # (p,)
    factor: np.ndarray  # (p, p)
    df: float

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log-density of the rows of x (n, p), in nats; O(n p^2)."""
        p, df = len(self.location), self.df
        inverse, log_constant = self._inverse
        z = (x - self.location) @ inverse.T
        return log_constant - 0.5 * (df + p) * np.log1p((z**2).sum(axis=1) / df)

    @cached_property
    def _inverse(self) -> tuple[np.ndarray, float]:
        """Inverse factor (p, p), and the log-density at the location."""
        p, df = len(self.location), self.df
        constant = gammaln((df + p) / 2) - gammaln(df / 2) - 0.5 * p * math.log(df * math.pi)
        log_volume = np.log(np.diag(self.factor)).sum()
        return np.linalg.inv(self.factor), float(constant - log_volume)

    def draw(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Quasi-random points (n_points, p) in pairs mirrored at the location; n_points even."""
        p = len(self.location)
        engine = torch.quasirandom.SobolEngine(p + 1, scramble=True, seed=int(rng.integers(2**31)))
        uniform = (
            engine.draw(n_points // 2, dtype=torch.float64).numpy().clip(tuned.EDGE, 1 - tuned.EDGE)
        )
        radius = np.sqrt(self.df / chdtri(self.df, uniform[:, -1:]))
        step = (ndtri(uniform[:, :-1]) * radius) @ self.factor.T
        return self.location + np.concatenate([step, -step])

    def sample(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Independent points (n_points, p)."""
        radius = np.sqrt(self.df / rng.chisquare(self.df, (n_points, 1)))
        normal = rng.standard_normal((n_points, len(self.location)))
        return self.location + (normal * radius) @ self.factor.T


@dataclass(frozen=True)
class StudentMixture:
    """Mixture of Student-t distributions of the given shares (m,), of sum one."""

    components: list[StudentT]
    shares: np.ndarray

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Log-density of the rows of x (n, p), in nats."""
        terms = [q.log_density(x) for q in self.components]
        return logsumexp(np.stack(terms, axis=1) + np.log(self.shares), axis=1)

    def sample(self, n_points: int, rng: np.random.Generator) -> np.ndarray:
        """Independent points (n_points, p)."""
        owner = rng.choice(len(self.shares), size=n_points, p=self.shares)
        x = np.empty((n_points, len(self.components[0].location)))
        for m in np.unique(owner):
            x[owner == m] = self.components[m].sample(int((owner == m).sum()), rng)
        return x

    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean (p,), and covariance (p, p) were the components normal."""
        locations = np.array([q.location for q in self.components])
        mean = self.shares @ locations
        between = (locations - mean).T * self.shares @ (locations - mean)
        within = [
            share * q.factor @ q.factor.T
            for share, q in zip(self.shares, self.components, strict=True)
        ]
        return mean, between + np.sum(within, axis=0)
