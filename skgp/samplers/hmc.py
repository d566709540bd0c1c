r"""Hamiltonian Monte Carlo with exact gradients [1]_, all chains in lockstep.

In coordinates :math:`x = F^{-1} (u - m)`, in which an approximation :math:`N(m, F F^T)` of the
target is standard normal, each iteration draws a momentum, integrates Hamilton's equations by some
leapfrog steps and accepts the end by Metropolis. The number of steps is drawn afresh each time,
uniformly up to half a period of that normal distribution, against resonances.
Chains share the step size and the number of steps, so that one call of the target gives the
gradients of all. Where a global approximation is given, some iterations are jumps instead: a
point drawn from it, accepted by Metropolis with the ratio of the weights of both [3]_. They link
modes that paths do not, and tails that these reach slowly.

The warm-up finds the step size by dual averaging of the chains' mean acceptance [2]_; in its middle
half the metric, the covariance of the chains' draws, shrunk to the first approximation; and how
often jumps are refused, which is how often there will be paths. All are then held.

References
----------
.. [1] Neal (2011), MCMC using Hamiltonian dynamics. Handbook of Markov Chain Monte Carlo.
.. [2] Hoffman and Gelman (2014), The No-U-Turn Sampler: adaptively setting path lengths in
   Hamiltonian Monte Carlo. JMLR 15.
.. [3] Tierney (1994), Markov chains for exploring posterior distributions. Annals of Statistics 22:
   independence chains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from skgp.linalg.runtime import WithinBudget
from skgp.samplers import defaults as tuned
from skgp.samplers.diagnostics import Run, cholesky_factor, mixing
from skgp.samplers.importance import StudentMixture

LogDensityAndGradient = Callable[[np.ndarray], tuple]
_PATH = math.pi  # mathematical: longest path in whitened coordinates, where the period is 2 pi


@dataclass(frozen=True)
class HMCResult:
    """What c chains drew after their warm-up."""

    points: np.ndarray  # (c, n_draws, p)
    log_density: np.ndarray  # (c, n_draws)
    r_hat: np.ndarray  # (p,), rank-normalised split R-hat
    ess: np.ndarray  # (p,), effective numbers of draws: for the bulk,
    ess_tail: np.ndarray  # the tails
    ess_spread: np.ndarray  # and the variance
    acceptance: np.ndarray  # (c,), mean acceptance probability
    n_divergent: np.ndarray  # (c,), int
    step_size: np.ndarray  # (c,), the same for all
    n_gradients: int
    converged: bool  # R-hat and ESS reached what was asked for
    warming_up: bool = False  # the callback ended the warm-up: the draws are those of it

    def select(self, chains: np.ndarray) -> "HMCResult":
        """The result of some of the chains: `chains` holds their indices, or a flag for each."""
        names = ("points", "log_density", "acceptance", "n_divergent", "step_size")
        measures = mixing(self.points[chains])
        found = {name: getattr(self, name)[chains] for name in names}
        found |= dict(zip(("r_hat", "ess", "ess_tail", "ess_spread"), measures, strict=True))
        return replace(self, **found)


def hamiltonian_monte_carlo(
    target: LogDensityAndGradient,  # (p,) -> value and gradient (p,); (k, p) -> (k,) and (k, p)
    mean: np.ndarray,  # (p,) and
    covariance: np.ndarray,  # (p, p), of an approximation of the target
    *,
    rng: np.random.Generator,
    run: Run | None = None,  # its `target_ess` is for bulk and tail; half of it for the variance
    starts: np.ndarray | None = None,  # (n_chains, p); draws of the approximation by default
    jumps: StudentMixture | None = None,  # proposes jumps, which ask for
    log_density: Callable[[np.ndarray], Any] | None = None,  # the log-density alone
    batched: bool = False,  # the target takes points (k, p), and `n_jobs` is not used
) -> HMCResult:
    """Draw from a density known up to a constant, with its gradient.

    ``callback(iteration, {"loss": -mean log-density, "ess": float, "r_hat": float})`` stops by
    True, keeping what was drawn. An iteration costs one gradient a leapfrog step, about two or
    three where the approximation is good. `target` is picklable where joblib asks for processes. A
    ValueError says that `covariance` is not positive definite, or that the target vanishes near the
    mean.
    """
    run = run or Run()
    points: list[np.ndarray] = []
    values: list[np.ndarray] = []
    with Parallel(n_jobs=None if batched else run.n_jobs) as parallel:
        evaluate, leaps = evaluator(target, batched, parallel), None
        if jumps is not None and log_density is not None:
            leaps = Jumps(jumps, value_evaluator(log_density, batched, parallel), tuned.JUMPS)
        chains = Chains(
            evaluate, np.asarray(mean, float), cholesky_factor(covariance), rng, run,
            starts, leaps,
        )  # fmt: skip
        for n_steps, segment_ends in run.stretches():
            for _ in range(n_steps):
                chains.iterate()
                points.append(chains.u())
                values.append(chains.value)
            result = _result(chains, points, values, run)
            info = {
                "loss": -float(np.mean(values[-n_steps:])),
                "ess": float(np.minimum(result.ess, result.ess_tail).min()),
                "r_hat": float(result.r_hat.max()),
            }
            if run.stops(chains.n_done, info) or (segment_ends and result.converged):
                break
    return result


def _result(chains: "Chains", points, values, run: Run) -> HMCResult:
    """Everything drawn after the warm-up, and whether it is as good as wanted."""
    warming_up = len(points) <= chains.n_warmup
    first = 0 if warming_up else chains.n_warmup
    drawn = np.stack(points[first:], axis=1)  # (c, n, p)
    rhats, ess, tail, spread = mixing(drawn)
    enough = np.all(np.minimum(ess, tail) >= run.target_ess)
    enough = enough and np.all(spread >= run.target_ess / 2)
    good = enough and np.all(rhats <= run.max_r_hat)
    return HMCResult(
        points=drawn,
        log_density=np.stack(values[first:], axis=1),
        r_hat=rhats,
        ess=ess,
        ess_tail=tail,
        ess_spread=spread,
        acceptance=chains.acceptance,
        n_divergent=chains.n_divergent.copy(),
        step_size=np.full(len(drawn), chains.step_size),
        n_gradients=chains.n_gradients,
        converged=bool(good) and not warming_up,
        warming_up=warming_up,
    )


def evaluator(target: LogDensityAndGradient, batched: bool, parallel: Parallel):
    """Log-densities (k,) and gradients (k, p) of points (k, p); -inf and 0 where not finite."""

    def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if batched:
            values, gradients = target(points)
        else:
            pairs = parallel(map(delayed(WithinBudget(target, parallel.n_jobs)), points))
            values, gradients = (np.array(each, float) for each in zip(*pairs, strict=True))
        usable = np.isfinite(values) & np.isfinite(gradients).all(axis=1)
        return np.where(usable, values, -math.inf), np.where(usable[:, None], gradients, 0.0)

    return evaluate


def value_evaluator(log_density: Callable[[np.ndarray], Any], batched: bool, parallel: Parallel):
    """Log-densities (k,) of points (k, p), NaN read as -inf."""

    def evaluate(points: np.ndarray) -> np.ndarray:
        if batched:
            found = log_density(points)
        else:
            found = parallel(map(delayed(WithinBudget(log_density, parallel.n_jobs)), points))
        values = np.asarray(found, float)
        return np.where(np.isnan(values), -math.inf, values)

    return evaluate


@dataclass(frozen=True)
class Jumps:
    """Moves to points drawn wherever a chain is: `n_each` proposals a chain and iteration."""

    mixture: StudentMixture
    evaluate: Callable[[np.ndarray], np.ndarray]  # (k, p) -> (k,)
    n_each: int


class Chains:
    """Where all chains are, in whitened coordinates, and how they move."""

    def __init__(self, evaluate, mean, factor, rng, run: Run, starts, jumps) -> None:
        self._jumps, self._moved = jumps, False  # whether the gradient is that of another point
        self._evaluate, self._mean, self._factor, self._rng = evaluate, mean, factor, rng
        self.n_warmup = run.n_warmup
        self.n_done, self.n_gradients = 0, 0
        self._n_paths, self._accepted = 0, np.zeros(run.n_chains)
        self._path_share = 0.5
        self._jumped: list[float] = []
        self.n_divergent = np.zeros(run.n_chains, dtype=int)
        self._window: list[np.ndarray] = []
        p = len(mean)
        x = rng.standard_normal((run.n_chains, p)) if starts is None else self._whitened(starts)
        self._begin(x)
        self.step_size = 1.2 * p**-0.25  # acceptance of about 0.8 for a standard normal target
        # Of the dual averaging; [2]_ takes 10, for a start without any knowledge.
        self._centre = math.log(2 * self.step_size)
        self._statistic, self._log_average, self._n_adapted = 0.0, 0.0, 0

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
                refused = 1 - tuned.JUMPS_THAT_MIX * float(np.mean(self._jumped))
                self._path_share = max(tuned.LEAST_PATHS, refused)
        else:
            probability, divergent = self.move()
            if warming_up:
                self._adapt_step(float(probability.mean()))
            else:
                self._n_paths += 1
                self._accepted += probability
                self.n_divergent += divergent
        if warming_up and self.n_warmup >= tuned.LEAST_WARMUP:
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
        longest = min(tuned.MAX_STEPS, max(1, math.ceil(reach / step)))
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
            on &= change > -tuned.DIVERGENCE
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

    def _adapt_step(self, probability: float) -> None:
        """Dual averaging of the log step size [2]_, eq. (6); its average at the warm-up's end."""
        self._n_adapted += 1
        t = self._n_adapted
        weight = 1 / (t + tuned.T0)
        missing = tuned.ACCEPTANCE - probability
        self._statistic = (1 - weight) * self._statistic + weight * missing
        log_step = self._centre - math.sqrt(t) / tuned.GAMMA * self._statistic
        decay = t**-tuned.KAPPA
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
        mean, prior = draws.mean(axis=0), tuned.SHRINKAGE * len(self._mean)
        centred = draws - mean
        first = self._factor @ self._factor.T
        covariance = (centred.T @ centred + prior * first) / (len(draws) + prior)
        u, self._moved = self.u(), True
        self._mean, self._factor = mean, cholesky_factor(covariance)
        self.x = self._whitened(u)
