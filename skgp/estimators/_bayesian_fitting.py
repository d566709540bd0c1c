"""Fits of `BayesianGPRegressor`: from its parameters to samples of the hyper-parameters.

And these samples as a table, and in the form of arviz.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators._base import Backend, arrays
from skgp.estimators._base_regressor import BaseGPRegressor
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import warn_at_bounds
from skgp.estimators._warping import WarpedInputs
from skgp.learning.evidence import ExactEvidence
from skgp.learning.posterior.log_posterior import LogPosterior
from skgp.learning.posterior.priors import Priors, element_names, resolve_priors
from skgp.learning.posterior.samples import (
    Plan,
    PosteriorSamples,
    cost_of_products,
    resolve_plan,
    single_sample,
)
from skgp.learning.vecchia import VecchiaEvidence
from skgp.linalg import warn_caller
from skgp.models.bayesian import (
    choose_kernel,
    draw_samples,
    find_optimum,
    likelihood_by_neighbors,
    predictive_mixture,
)
from skgp.samplers import ess_bulk, ess_tail, r_hat, stratified_resample


class BayesianFitting(WarpedInputs, BaseGPRegressor):
    """Samples of the hyper-parameters, by the functions of :mod:`skgp.models.bayesian`."""

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        X, weight = arrays(data)
        z, kernels = data.y.numpy(), self._kernels(data)
        data = data.merged().to(backend.device)
        learns = self.optimizer is not None
        plan = resolve_plan(
            self.solver, self.sampler, len(data.y), learns=learns, samples=self.optimizer == "auto"
        )
        self.history_ = {}
        self.priors_ = Priors()
        columns = getattr(self, "feature_names_in_", None)

        def posterior_of(kernel: Kernel, rows: Data = data) -> LogPosterior:
            priors = resolve_priors(kernel, self.prior, X, z, weight, columns)
            return LogPosterior(kernel, rows, priors)

        rng = backend.rng()
        if session.verbose and plan.solver == "cg":
            cost = cost_of_products(kernels[0], data)
            if cost is not None:
                session.print(cost)
        kernel, starts = self._choose_kernel(session, kernels, posterior_of, data, rng)
        samples, evidence = self._sample(session, kernel, starts, posterior_of, data, plan, rng)
        with session.stage("predictions") as callback:
            self._keep(kernel, samples, evidence, data, plan, rng, callback)
        self._report(samples, session.interrupted)

    def _choose_kernel(
        self,
        session: FitSession,
        kernels: list[Kernel],
        posterior_of: Callable[..., LogPosterior],
        data: Data,
        rng: np.random.Generator,
    ) -> tuple[Kernel, list[np.ndarray]]:
        """The user's kernel, with noise, or the default that explains some rows best; starts."""
        if self.kernel is not None:
            kernel = fix_equal_bounds(kernels[0])
            return kernel, [kernel.theta]
        if len(kernels) == 1 or self.optimizer is None:
            return kernels[0], []
        with session.stage("kernel") as callback:
            return choose_kernel(kernels, data, posterior_of, rng, self._recorded(callback))

    def _sample(
        self,
        session: FitSession,
        kernel: Kernel,
        starts: list[np.ndarray],
        posterior_of: Callable[..., LogPosterior],
        data: Data,
        plan: Plan,
        rng: np.random.Generator,
    ) -> tuple[PosteriorSamples, VecchiaEvidence | None]:
        """Samples of the hyper-parameters, and the likelihood by neighbours that they are of.

        A single one where there is nothing to sample.
        """
        if self.optimizer is None or kernel.n_dims == 0:
            if self.optimizer is not None:
                warn_caller(
                    f"kernel={kernel} has no free hyper-parameter: there is nothing to average "
                    "over, and one plain model is fitted. Set optimizer=None to say so."
                )
            fixed = {"sampler": "fixed", "converged": True, "problems": [], "ess": 1.0}
            alone = single_sample(np.asarray(kernel.theta, dtype=float), np.nan, fixed)
            return alone, likelihood_by_neighbors(kernel, data, plan, rng)
        posterior = posterior_of(kernel)
        self.priors_ = posterior.priors
        of_cg: dict[str, Any] = {
            "rank": self.preconditioner_rank,
            "n_probes": self.n_probes,
            "roulette": self.roulette,
        }
        with session.stage("posterior") as callback:
            common: dict[str, Any] = {
                "rng": rng,
                "starts": starts,
                "callback": self._recorded(callback),
            }
            if self.optimizer == "map":
                return find_optimum(posterior, plan, **common, **of_cg)
            return draw_samples(
                posterior,
                plan,
                schedule=self.schedule,
                of_cg=of_cg,
                n_chains=None if self.n_chains == "auto" else self.n_chains,
                n_warmup=self.n_warmup,
                n_samples=self.n_samples,
                target_ess=self.min_ess,
                n_jobs=self.n_jobs,
                **common,
            )

    def _recorded(self, callback: Callable) -> Callable:
        """The callback, its numbers written to ``history_``."""

        def record(iteration: int, info: dict) -> bool:
            for name, value in info.items():
                if isinstance(value, Real):
                    self.history_.setdefault(name, []).append(float(value))
            return callback(iteration, info)

        return record

    def _keep(
        self,
        kernel: Kernel,
        samples: PosteriorSamples,
        evidence: VecchiaEvidence | None,
        data: Data,
        plan: Plan,
        rng: np.random.Generator,
        callback: Callable,
    ) -> None:
        """Set the attributes that predict and that describe the posterior."""
        self._posterior = predictive_mixture(
            kernel, data, samples, self.n_keep, plan, rng, evidence=evidence,
            double=self.dtype == "float64", rank=self.preconditioner_rank, callback=callback,
        )  # fmt: skip
        self._noise_variance = float(self._posterior.weights @ self._posterior.noise)
        self.kernel_ = kernel.clone_with_theta(samples.mean())
        self.map_ = np.array(samples.map_)
        self.posterior_samples_, self.sample_weights_ = samples.u, samples.weights
        self.sample_chains_, self.sample_log_posterior_ = samples.chain, samples.log_posterior
        self.hyperparameter_names_ = element_names(kernel, getattr(self, "feature_names_in_", None))
        self.diagnostics_ = samples.diagnostics
        self.solver_, self.sampler_ = plan.solver, samples.diagnostics["sampler"]
        self.n_kept_ = self._posterior.n_samples
        self.n_iter_ = max(1, len(self.history_.get("loss", [])))
        theta = self.kernel_.theta
        if evidence is not None:
            self.log_marginal_likelihood_value_ = evidence.log_density(theta)
        elif plan.solver == "cholesky":
            if self.priors_:
                value = LogPosterior(kernel, data, self.priors_).log_likelihood(theta)
            else:  # nothing was sampled
                value = ExactEvidence(self.kernel_, data)(theta).value
            self.log_marginal_likelihood_value_ = value

    def _report(self, samples: PosteriorSamples, interrupted: bool) -> None:
        """Warn of what keeps the samples from being trusted."""
        if samples.diagnostics["problems"] and not interrupted:
            warn_caller(
                "The samples of the hyper-parameters may not stand for their posterior: "
                f"{'; '.join(samples.diagnostics['problems'])}. See summary() and diagnostics_.",
                ConvergenceWarning,
            )
        if self.optimizer is not None:
            warn_at_bounds(self.kernel_.clone_with_theta(self.map_), self.kernel)


def fix_equal_bounds(kernel: Kernel) -> Kernel:
    """Fix, in place, what has no room between its bounds, at the value that they allow."""
    for hyper in kernel.hyperparameters:
        bounds = None if hyper.fixed else np.asarray(hyper.bounds, dtype=float)
        if bounds is not None and (bounds[:, 0] == bounds[:, 1]).all():
            value = bounds[:, 0] if hyper.n_elements > 1 else float(bounds[0, 0])
            kernel.set_params(**{hyper.name: value, f"{hyper.name}_bounds": "fixed"})
    return kernel


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
