"""Figure 4 of ``ulisse.py``: stochastic gradients against exact ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from _s2vgp_study import Row, Study, seconds_of
from _ulisse_problem import Draw, Problem, draws

from skgp.learning.posterior.stochastic_gradient import StochasticGradient

_MAX_ITER = 20_000


def figure4(problem: Problem, quick: bool) -> Study:
    """Error and price of a gradient with one probe, by the condition number."""
    repetitions = 5 if quick else 100
    sample = draws(problem, 8 if quick else 24)
    rows = []
    for draw in sample[1 :: 4 if quick else 4]:
        rows += list(_errors(problem, draw, repetitions))
    title = f"figure 4, {problem.name}: gradients with one probe, {repetitions} of each"
    return Study({title: rows}, {"rows": rows})


def _settings() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "CG", {"rank": 0, "stop": 0.0, "tol": 1e-8}
    for q in (0.1, 1.0):
        yield f"paper, q {q:g}", {"rank": 0, "stop": q, "roulette": "paper"}
    yield "adaptive, q 0.1", {"rank": 0, "stop": 0.1}
    for rank in (100, 300):
        yield f"adaptive, q 0.1, rank {rank}", {"rank": rank, "stop": 0.1}


def _errors(problem: Problem, draw: Draw, repetitions: int) -> Iterator[Row]:
    posterior = problem.posterior
    prior = posterior.prior_gradient(draw.u)
    exact = posterior.log_density_and_gradient(draw.u)[1] - prior
    for name, options in _settings():
        generator = torch.Generator().manual_seed(2)
        field = StochasticGradient(
            posterior, n_probes=1, dtype=torch.float64, max_iter=_MAX_ITER, **options
        )
        field.choose_pivots(draw.u, generator)

        def sample(field=field, generator=generator):
            return [
                field.estimate(draw.u, field.draw_probes(generator), generator)
                for _ in range(repetitions)
            ]

        found, seconds = seconds_of(sample)
        errors = np.array([each.gradient for each in found]) - prior - exact
        relative = (errors**2).sum(1) / (exact**2).sum()
        spread = errors.std(0, ddof=1)
        z = errors.mean(0) / spread * np.sqrt(repetitions)
        rounding = spread < 1e-7 * np.abs(exact)  # as good as exact
        yield {
            "kappa": f"{draw.condition:.1e}",
            "estimate": name,
            "products": float(np.mean([each.n_iter for each in found])),
            "seconds": seconds / repetitions,
            "log10 error^2": float(np.log10(relative).mean()),
            "bias / length": float(np.linalg.norm(errors.mean(0)) / np.linalg.norm(exact)),
            "largest |z|": float(np.abs(np.where(rounding, 0.0, z)).max()),
        }
