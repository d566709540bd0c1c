"""Bayesian optimisation by scikit-optimize with our exact GP in place of its own.

``pip install scikit-optimize``, which skgp does not need; then
``python examples/papers/bayesian_optimisation.py [--seeds 5] [PROBLEM ...]`` minimises Branin's
function (2 columns) and Hartmann's (6), and prints for each model and seed the simple regret, best
value so far less the minimum, after some evaluations, and the seconds of all but the evaluations.

Both models have the same kernel, as many starts of its search, and ``Optimizer``'s own choice of
acquisition ("gp_hedge"), which climbs by the gradients that ``predict`` returns. scikit-optimize
learns a noise variance that its predictions leave out, which ends at its lower bound of 1e-5; ours
has it as `alpha`, which its predictions leave out, too. Of the same data and hyper-parameters both
return the same means, standard deviations and gradients.
"""

import argparse
import time
import warnings

import numpy as np
from sklearn.gaussian_process.kernels import ConstantKernel, Matern
from skopt import Optimizer
from skopt.benchmarks import branin, hart6
from skopt.space import Real

from skgp import GaussianProcessRegressor

#: Function, bounds, minimum, evaluations, and after which the regret is told.
PROBLEMS = {
    "branin": (branin, [(-5.0, 10.0), (0.0, 15.0)], 0.39788735772973816, 30, (15, 20, 25, 30)),
    "hartmann6": (hart6, [(0.0, 1.0)] * 6, -3.32236801141551, 50, (20, 30, 40, 50)),
}


def kernel(n_columns: int):
    """That of scikit-optimize's default."""
    return ConstantKernel(1.0, (0.01, 1000.0)) * Matern([1.0] * n_columns, (0.01, 100.0), nu=2.5)


def optimizer(model: str, bounds: list, seed: int) -> Optimizer:
    """By "skopt", its default, or "skgp"."""
    settings = {"n_initial_points": 10, "random_state": seed}
    if model == "skopt":
        return Optimizer(bounds, base_estimator="GP", **settings)
    ours = GaussianProcessRegressor(
        kernel(len(bounds)), alpha=1e-5, normalize_y=True, n_restarts_optimizer=2, device="cpu"
    )
    # Inputs in [0, 1], as it does for its own.
    space = [Real(*ends, transform="normalize") for ends in bounds]
    return Optimizer(space, base_estimator=ours, **settings)


def minimise(problem: str, model: str, seed: int) -> tuple[list[float], float]:
    """Simple regrets, and seconds."""
    function, bounds, minimum, n_evaluations, told = PROBLEMS[problem]
    search, seconds = optimizer(model, bounds, seed), 0.0
    for _ in range(n_evaluations):
        start = time.perf_counter()
        x = search.ask()
        seconds += time.perf_counter() - start
        y = function(x)
        start = time.perf_counter()
        search.tell(x, y)
        seconds += time.perf_counter() - start
    best = np.minimum.accumulate(search.yi) - minimum
    return [best[n - 1] for n in told], seconds


def main() -> None:
    """Print a line a run, and medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problems", nargs="*", default=[*PROBLEMS])
    parser.add_argument("--models", nargs="+", default=["skopt", "skgp"])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for problem in options.problems:
        print(f"{problem}: regret after {PROBLEMS[problem][4]} evaluations, seconds", flush=True)
        found: dict[str, list] = {model: [] for model in options.models}
        for seed in range(options.seeds):
            for model, runs in found.items():
                regrets, seconds = minimise(problem, model, seed)
                runs.append([*regrets, seconds])
                print(f"  {model:6} seed {seed}", *(f"{v:9.2e}" for v in regrets), end="")
                print(f"{seconds:8.1f}", flush=True)
        for model, runs in found.items():
            *regrets, seconds = np.median(runs, axis=0)
            print(f"  {model:6} median", *(f"{v:9.2e}" for v in regrets), f"{seconds:7.1f}")


if __name__ == "__main__":
    main()
