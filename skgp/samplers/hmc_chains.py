"""Chains of Hamiltonian Monte Carlo in lockstep: see :mod:`skgp.samplers.hmc`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from skgp.samplers.chains import cholesky_factor
from skgp.samplers.student_t import StudentMixture

__all__ = ["Chains", "Jumps", "LogDensityAndGradient", "evaluator", "value_evaluator"]

LogDensityAndGradient = Callable[[np.ndarray], tuple]

_PATH = math.pi  # longest path in whitened coordinates, where the period is 2 pi
_MAX_STEPS = 64
_DIVERGENCE = 50.0  # nats of energy lost on a path: the integrator has left the level set
_LEAST_PATHS = 0.2  # share of the iterations that are paths, at least
_JUMPS_THAT_MIX = 4.0  # times the share of jumps accepted: what paths need not do
_LEAST_WARMUP = 20  # iterations below which the metric stays the first one
_SHRINKAGE = 5.0  # draws a dimension that the first approximation counts for in the metric
# Dual averaging, with the names and values of Hoffman and Gelman (2014), section 3.2.
_GAMMA, _T0, _KAPPA = 0.05, 10.0, 0.75


def evaluator(target: LogDensityAndGradient, batched: bool, parallel: Parallel):
    """Log-densities (k,) and gradients (k, p) of points (k, p); -inf and 0 where not finite."""

    def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if batched:
            values, gradients = target(points)
        else:
            pairs = parallel(delayed(target)(point) for point in points)
            values, gradients = (np.array(each, float) for each in zip(*pairs, strict=True))
        usable = np.isfinite(values) & np.isfinite(gradients).all(axis=1)
        return np.where(usable, values, -math.inf), np.where(usable[:, None], gradients, 0.0)

    return evaluate


def value_evaluator(log_density: Callable[[np.ndarray], Any], batched: bool, parallel: Parallel):
    """Log-densities (k,) of points (k, p), NaN read as -inf."""

    def evaluate(points: np.ndarray) -> np.ndarray:
        if batched:
            values = log_density(points)
        else:
            values = np.array(parallel(delayed(log_density)(point) for point in points), float)
        return np.where(np.isnan(values), -math.inf, values)

    return evaluate


@dataclass(frozen=True)
class Jumps:
    """Moves to points drawn wherever a chain is.

    Attributes
    ----------
    mixture : StudentMixture
        What proposes.
    evaluate : callable
        Maps points (k, p) to log-densities (k,).
    n_each : int
        Points proposed to a chain in an iteration, one after the other.
    """

    mixture: StudentMixture
    evaluate: Callable[[np.ndarray], np.ndarray]
    n_each: int


class Chains:
    """Where all chains are, in whitened coordinates, and how they move."""

    def __init__(
        self, evaluate, mean, factor, rng, n_chains, n_warmup, target_acceptance, starts, jumps,
    ) -> None:  # fmt: skip
        self._jumps, self._moved = jumps, False  # whether the gradient is that of another point
        self._evaluate, self._mean, self._factor, self._rng = evaluate, mean, factor, rng
        self.n_warmup, self._target_acceptance = n_warmup, target_acceptance
        self.n_done, self.n_gradients = 0, 0
        self._n_paths, self._accepted = 0, np.zeros(n_chains)
        self._path_share = 0.5
        self._jumped: list[float] = []
        self.n_divergent = np.zeros(n_chains, dtype=int)
        self._window: list[np.ndarray] = []
        p = len(mean)
        x = rng.standard_normal((n_chains, p)) if starts is None else self._whitened(starts)
        self._begin(x)
        self._restart(1.2 * p**-0.25)  # acceptance of about 0.8 for a standard normal target

    def u(self) -> np.ndarray:
        """Positions (c, p) in the coordinates of the target."""
        return self._mean + self.x @ self._factor.T

    def _whitened(self, u: np.ndarray) -> np.ndarray:
        return np.linalg.solve(self._factor, (u - self._mean).T).T

    def _at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, gradients = self._evaluate(self._mean + x @ self._factor.T)
        return values, gradients @ self._factor

    def _begin(self, x: np.ndarray) -> None:
        """Chains at x (c, p); nearer to the mean where the target vanishes."""
        for _ in range(10):
            self.x, (self.value, self.gradient) = x, self._at(x)
            self.n_gradients += len(x)
            astray = ~np.isfinite(self.value)
            if not astray.any():
                return
            x = np.where(astray[:, None], x / 2, x)
        raise ValueError(
            f"The target is zero or its gradient not finite near the mean {self._mean}; start "
            "from a point where both are finite."
        )

    def iterate(self) -> None:
        """A path or jumps of every chain; in the warm-up also what they teach."""
        self.n_done += 1
        warming_up = self.n_done <= self.n_warmup
        jumping = self._rng.uniform() > self._path_share
        if warming_up:
            jumping = self.n_done % 2 == 0
        if self._jumps is not None and jumping:
            accepted = self._jump(self._jumps)
            if warming_up:
                self._jumped.append(accepted)
                refused = 1 - _JUMPS_THAT_MIX * float(np.mean(self._jumped))
                self._path_share = max(_LEAST_PATHS, refused)
        else:
            probability, divergent = self.move()
            if warming_up:
                self._adapt_step(float(probability.mean()))
            else:
                self._n_paths += 1
                self._accepted += probability
                self.n_divergent += divergent
        if warming_up and self.n_warmup >= _LEAST_WARMUP:
            self._adapt_metric()

    @property
    def acceptance(self) -> np.ndarray:
        """Mean acceptance probability (c,) of paths after the warm-up."""
        return self._accepted / max(1, self._n_paths)

    def move(self) -> tuple[np.ndarray, np.ndarray]:
        """Acceptance probabilities (c,), and whether each path diverged."""
        if self._moved:
            self.value, self.gradient = self._at(self.x)
            self.n_gradients += len(self.x)
            self._moved = False
        x, value, gradient, step = self.x, self.value, self.gradient, self.step_size
        momentum = self._rng.standard_normal(x.shape)
        # Where jumps do most of the mixing, paths are for what is near.
        reach = _PATH if self._jumps is None else _PATH * (1 + self._path_share) / 2
        longest = min(_MAX_STEPS, max(1, math.ceil(reach / step)))
        n_steps = int(self._rng.integers(1, longest, endpoint=True))
        energy = value - 0.5 * (momentum**2).sum(axis=1)
        on = np.ones(len(x), dtype=bool)  # chains whose path has not diverged
        change = np.zeros(len(x))
        x, value, gradient = x.copy(), value.copy(), gradient.copy()
        for _ in range(n_steps):
            momentum[on] += 0.5 * step * gradient[on]
            x[on] += step * momentum[on]
            value[on], gradient[on] = self._at(x[on])
            self.n_gradients += int(on.sum())
            momentum[on] += 0.5 * step * gradient[on]
            change[on] = (value - 0.5 * (momentum**2).sum(axis=1) - energy)[on]
            on &= change > -_DIVERGENCE
            if not on.any():
                break
        probability = np.where(on, np.exp(np.minimum(change, 0.0)), 0.0)
        taken = self._rng.uniform(size=len(x)) < probability
        self.x = np.where(taken[:, None], x, self.x)
        self.value = np.where(taken, value, self.value)
        self.gradient = np.where(taken[:, None], gradient, self.gradient)
        return probability, ~on

    def _jump(self, jumps: Jumps) -> float:
        """Some points proposed to each chain, one after the other; the share accepted.

        Where a chain is changes nothing in the proposals: one call evaluates all of them.
        """
        n_chains, p = self.x.shape
        u = jumps.mixture.sample(jumps.n_each * n_chains, self._rng)
        value = jumps.evaluate(u)
        weight = (value - jumps.mixture.log_density(u)).reshape(-1, n_chains)
        here, n_accepted = self.value - jumps.mixture.log_density(self.u()), 0
        x, value = self._whitened(u).reshape(-1, n_chains, p), value.reshape(-1, n_chains)
        for k in range(jumps.n_each):
            taken = np.log(self._rng.uniform(size=n_chains)) < weight[k] - here
            here = np.where(taken, weight[k], here)
            self.x = np.where(taken[:, None], x[k], self.x)
            self.value = np.where(taken, value[k], self.value)
            n_accepted += int(taken.sum())
        self._moved = True
        return n_accepted / (jumps.n_each * n_chains)

    def _restart(self, step_size: float) -> None:
        """Begin the dual averaging anew."""
        self.step_size = step_size
        self._centre = math.log(2 * step_size)  # [2]_ takes 10, for a start without any knowledge
        self._statistic, self._log_average, self._n_adapted = 0.0, 0.0, 0

    def _adapt_step(self, probability: float) -> None:
        """Dual averaging of the log step size [2]_, eq. (6); its average at the warm-up's end."""
        self._n_adapted += 1
        t = self._n_adapted
        weight = 1 / (t + _T0)
        missing = self._target_acceptance - probability
        self._statistic = (1 - weight) * self._statistic + weight * missing
        log_step = self._centre - math.sqrt(t) / _GAMMA * self._statistic
        decay = t**-_KAPPA
        self._log_average = decay * log_step + (1 - decay) * self._log_average
        self.step_size = math.exp(self._log_average if self.n_done == self.n_warmup else log_step)

    def _adapt_metric(self) -> None:
        """Collect draws in the middle half of the warm-up; at its end whiten by their moments."""
        if not self.n_warmup // 4 < self.n_done <= 3 * self.n_warmup // 4:
            return
        self._window.append(self.u())
        if self.n_done < 3 * self.n_warmup // 4:
            return
        draws = np.concatenate(self._window)
        mean, prior = draws.mean(axis=0), _SHRINKAGE * len(self._mean)
        centred = draws - mean
        first = self._factor @ self._factor.T
        covariance = (centred.T @ centred + prior * first) / (len(draws) + prior)
        u, self._moved = self.u(), True
        self._mean, self._factor = mean, cholesky_factor(covariance)
        self.x = self._whitened(u)
