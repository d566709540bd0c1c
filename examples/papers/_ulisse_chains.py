"""Figures 5 and 6 of ``ulisse.py``: chains driven by stochastic gradients."""

import math
import time
import warnings
from typing import Any

import numpy as np
from _s2vgp_study import Row, Study
from _ulisse_problem import NAMES, Problem

from skgp.learning.posterior.samples import PosteriorSamples
from skgp.learning.posterior.sampling import sample_by_density
from skgp.models.bayesian import sample_stochastic
from skgp.samplers import Run, ess_bulk, r_hat

SAMPLERS: dict[str, dict[str, Any]] = {
    "Langevin": {"sampler": "langevin"},
    "SGLD, paper": {"sampler": "sgld", "schedule": "paper", "roulette": "paper"},
}
_N_POINTS = 40  # of the curve of R-hat
_PAUSE = 30.0  # seconds between two lines of progress


class Progress:
    """Says now and then how far a sampler is, and ends it after so many seconds.

    What was drawn by then is kept; a set-up that is not over leaves the mode alone.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._start = self._told = time.perf_counter()

    def __call__(self, iteration: int, info: dict) -> bool:
        now = time.perf_counter()
        if now - self._told > _PAUSE:
            self._told = now
            known = ("loss", "rank", "ess", "r_hat")
            values = ", ".join(f"{key} {info[key]:.3g}" for key in known if key in info)
            print(
                f"  {self._name}: {now - self._start:.0f} s, call {iteration}, {values}", flush=True
            )
        if now - self._start > self._seconds:
            print(f"  {self._name}: ended after {now - self._start:.0f} s", flush=True)
        return now - self._start > self._seconds


def figure5(problem: Problem, quick: bool) -> Study:
    """Chains next to exact importance sampling."""
    rng = np.random.default_rng(0)
    exact = sample_by_density(problem.posterior, rng=rng, target_ess=300 if quick else 1000)
    return _chains(problem, (100, 100) if quick else (1000, 800), 4, exact)


def figure6(problem: Problem, quick: bool, seconds: float = math.inf) -> Study:
    """Chains alone: the data are too many for exact sampling. At most `seconds` a sampler."""
    return _chains(problem, (30, 30) if quick else (150, 300), 2, None, seconds)


def _chains(
    problem: Problem,
    lengths: tuple[int, int],
    n_chains: int,
    exact: PosteriorSamples | None,
    most_seconds: float = math.inf,
) -> Study:
    """Run each sampler for its number of draws; compare what it says of the posterior."""
    rows, curves = [], {}
    for (name, options), n_samples in zip(SAMPLERS.items(), lengths, strict=True):
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is not met stands in the table
            found = sample_stochastic(
                problem.posterior,
                rng=np.random.default_rng(1),
                **options,
                run=Run(
                    n_chains=n_chains,
                    n_draws=n_samples,
                    target_ess=400,
                    callback=Progress(name, most_seconds),
                ),
            )
        seconds = time.process_time() - start
        chains = _by_chain(found)
        rows.append({"sampler": name, **_scores(found, chains, seconds, exact)})
        curves[name] = chains
        problems = "; ".join(found.diagnostics["problems"])
        print(f"  {name}, {seconds:.0f} s: {problems or 'converged'}", flush=True)
    if exact is not None:
        curves["exact"] = np.stack([exact.mean(), np.sqrt(np.diag(exact.covariance()))])
    title = f"figure {6 if exact is None else 5}, {problem.name}: {len(problem.y)} rows"
    return Study({title: rows}, curves)


def _by_chain(samples: PosteriorSamples) -> np.ndarray:
    """Draws (n_chains, n_draws, p) of u."""
    groups = [samples.u[samples.chain == c] for c in np.unique(samples.chain)]
    length = min(map(len, groups))
    return np.stack([group[:length] for group in groups])


def _scores(
    found: PosteriorSamples, chains: np.ndarray, seconds: float, exact: PosteriorSamples | None
) -> Row:
    columns = list(chains.transpose(2, 0, 1))
    n_gradients = float(found.diagnostics["n_gradients"])
    ess = min(map(ess_bulk, columns)) if chains.shape[1] > 3 else math.nan
    row: Row = {
        "chains": float(len(chains)),
        "draws": float(chains.shape[1]),
        "gradients": n_gradients,
        "seconds": seconds,
        "R-hat": max(map(r_hat, columns)),
        "ESS": ess,
        "ESS / gradient": ess / n_gradients,
        "ESS / hour": 3600 * ess / seconds,
    }
    if exact is not None:
        mean, sd = exact.mean(), np.sqrt(np.diag(exact.covariance()))
        found_sd = np.sqrt(np.diag(found.covariance()))
        row["mean error / sd"] = float(np.abs((found.mean() - mean) / sd).max())
        row["sd error"] = float(np.abs(found_sd / sd - 1).max())
    return row


def running(chain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n_draws, p) of the draws so far."""
    count = np.arange(1, len(chain) + 1)[:, None]
    mean = np.cumsum(chain, axis=0) / count
    return mean, np.sqrt(np.maximum(np.cumsum(chain**2, axis=0) / count - mean**2, 0.0))


def running_r_hat(chains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of draws, and the largest R-hat over the hyper-parameters of so many."""
    counts = np.unique(np.linspace(8, chains.shape[1], _N_POINTS).astype(int))
    values = [max(r_hat(chains[:, :count, j]) for j in range(len(NAMES))) for count in counts]
    return counts, np.array(values)
