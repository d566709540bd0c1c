"""Posterior samples of hyper-parameters as a table, and in the form of arviz."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from skgp.samplers import ess_bulk, ess_tail, r_hat, stratified_resample

LEVELS = (0.025, 0.5, 0.975)  # mathematical
ARVIZ_CHAINS = 4  # mathematical: that independent draws are handed over as


@dataclass(frozen=True)
class PosteriorSummary:
    """The posterior of each hyper-parameter, in its own units; prints as a table.

    Attributes
    ----------
    names : list of str, of length p
    mean, sd : ndarray of shape (p,)
    quantiles : ndarray of shape (p, 3)
        At 2.5%, 50% and 97.5%.
    r_hat : ndarray of shape (p,)
        NaN where there are no chains, as in importance sampling.
    ess_bulk, ess_tail : ndarray of shape (p,)
        Effective numbers of samples for the mean and for the 5% and 95% quantiles (the lesser).
    """

    names: list[str]
    mean: np.ndarray
    sd: np.ndarray
    quantiles: np.ndarray
    r_hat: np.ndarray
    ess_bulk: np.ndarray
    ess_tail: np.ndarray

    def columns(self) -> dict[str, np.ndarray]:
        """The table's columns by their headings."""
        levels = {f"{level:.1%}": self.quantiles[:, i] for i, level in enumerate(LEVELS)}
        ends = {"r_hat": self.r_hat, "ess_bulk": self.ess_bulk, "ess_tail": self.ess_tail}
        return {"mean": self.mean, "sd": self.sd, **levels, **ends}

    def to_frame(self):
        """The table as a pandas.DataFrame, one row a hyper-parameter."""
        import pandas

        return pandas.DataFrame(self.columns(), index=self.names)

    def __str__(self) -> str:
        columns = self.columns()
        formats = ["{:.4g}"] * 5 + ["{:.3f}", "{:.0f}", "{:.0f}"]
        rows = [["", *columns]]
        for name, *values in zip(self.names, *columns.values(), strict=True):
            rows.append([name, *(f.format(v) for f, v in zip(formats, values, strict=True))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        )
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def summarise(
    names: list[str],
    u: np.ndarray,  # (s, p), samples of logarithms
    weights: np.ndarray,  # (s,), of sum one
    chain: np.ndarray,  # (s,)
    sampler: str,  # "importance" has weights that count, any other chains in order of their draws
) -> PosteriorSummary:
    """Mean, standard deviation, quantiles and mixing of each hyper-parameter."""
    theta = np.exp(u)
    mean = weights @ theta
    sd = np.sqrt(weights @ (theta - mean) ** 2)
    rows = [_quantiles(column, weights, LEVELS) for column in theta.T]
    quantiles = np.array(rows).reshape(-1, len(LEVELS))
    if sampler == "importance":
        mixing = [(np.nan, *_weighted_ess(column, weights)) for column in u.T]
    else:
        groups = [chain == c for c in np.unique(chain)]
        by_chain = (np.stack([column[group] for group in groups]) for column in u.T)
        mixing = [(r_hat(draws), ess_bulk(draws), ess_tail(draws)) for draws in by_chain]
    r_hats, bulk, tail = np.array(mixing).reshape(-1, 3).T
    return PosteriorSummary(names, mean, sd, quantiles, r_hats, bulk, tail)


def _quantiles(values: np.ndarray, weights: np.ndarray, levels: tuple[float, ...]) -> np.ndarray:
    return np.quantile(values, levels, weights=weights, method="inverted_cdf")


def _weighted_ess(values: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Effective numbers of weighted draws for the mean, and for the 5% and 95% quantiles."""

    def of_average(g: np.ndarray) -> float:
        centred = g - weights @ g
        errors = (weights**2) @ centred**2
        return float((weights @ centred**2) / errors) if errors > 0 else float(len(g))

    edges = _quantiles(values, weights, (0.05, 0.95))
    tails = [of_average((values <= edge).astype(float)) for edge in edges]
    return of_average(values), min(tails)


def inference_data(
    kernel: Kernel,
    names: list[str],
    u: np.ndarray,
    weights: np.ndarray,
    chain: np.ndarray,
    sampler: str,
) -> Any:
    """Samples as an ``arviz.InferenceData``, in the units of the hyper-parameters.

    Those of importance sampling are resampled to as many of equal weight as they are worth and
    shuffled: independent draws, of which any four parts are four chains. Chains stay as they are,
    which their diagnostics need; their weights are ``sample_stats["weight"]``.
    """
    try:
        import arviz
    except ImportError as error:
        raise ImportError(
            'to_arviz() needs arviz, which is not installed: pip install "skgp[mcmc]"'
        ) from error
    if sampler == "importance":
        n_draws = max(1, int(1 / (weights**2).sum()) // ARVIZ_CHAINS)
        rng = np.random.default_rng(0)
        kept = rng.permutation(stratified_resample(weights, ARVIZ_CHAINS * n_draws, rng))
        draws, stats = np.exp(u[kept]).reshape(ARVIZ_CHAINS, n_draws, -1), None
    else:
        groups = [chain == c for c in np.unique(chain)]
        draws = np.exp(np.stack([u[group] for group in groups]))
        stats = {"weight": np.stack([weights[group] for group in groups])}
    posterior, start = {}, 0
    dims, coords = {}, {}
    for hyper in kernel.hyperparameters:
        if hyper.fixed:
            continue
        stop = start + hyper.n_elements
        values = draws[:, :, start:stop]
        posterior[hyper.name] = values[:, :, 0] if hyper.n_elements == 1 else values
        if hyper.n_elements > 1:
            dims[hyper.name] = [f"{hyper.name}_element"]
            # What stands in the brackets of ``length_scale[pressure]``.
            labels = [name.split("[", 1)[1][:-1] for name in names[start:stop]]
            coords[f"{hyper.name}_element"] = labels
        start = stop
    return arviz.from_dict(posterior=posterior, sample_stats=stats, dims=dims, coords=coords)
