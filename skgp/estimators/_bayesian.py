"""GPs averaged over their hyper-parameters: the estimator of :mod:`skgp.models.bayesian`."""

from __future__ import annotations

import copy
from numbers import Integral, Real

import numpy as np
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._bayesian_fitting import (
    BayesianFitting,
    PosteriorSummary,
    inference_data,
    summarise,
)
from skgp.estimators._fitting import within_limits
from skgp.estimators._parameters import Interval, StrOptions, keep_parameters, options


class BayesianGPRegressor(BayesianFitting):
    r"""Gaussian process regression averaged over the posterior of the hyper-parameters.

    Samples :math:`u_s` of the posterior of the logarithms of the hyper-parameters stand for it,
    and a prediction is the mixture of the Gaussian processes that they make,
    :math:`p(y_* \mid y) \approx \frac1S \sum_s p(y_* \mid y, u_s)`. The posterior comes from
    adaptive importance sampling with exact likelihoods up to some thousands of observations, and
    beyond with those of Vecchia's approximation [2]_, whose cost is linear in the observations; or
    from Langevin dynamics with unbiased stochastic gradients of the exact one [1]_.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        A ``WhiteKernel`` summand at the top level is the noise (one of level 0.01 is added where
        there is none). None chooses among RBF and Matern kernels with one length scale a column by
        their evidence on a few hundred observations.
    prior : Prior, list of Prior, dict or None, default=None
        Of the free hyper-parameters, in the units of ``kernel_``: `LogNormal`, `Gamma` or
        `HalfNormal` of :mod:`skgp.priors`; one for all, one for each, or a dict by
        name (``"length_scale"``, in full ``"k1__k2__length_scale"``, or of one element
        ``"length_scale[0]"``, ``"length_scale[pressure]"``). None: log-normal, wide (a factor of
        20 either way), around the scales of the data, the length scales of a kernel correlated
        (their ratios are within a factor of 16); periods within 20% of the kernel's own.
    solver : {"auto", "cholesky", "vecchia", "cg"}, default="auto"
        Factorisations of the kernel matrix, the default up to 4000 distinct inputs (10,000 where
        nothing is sampled); Vecchia's approximation by 20 neighbours, the default beyond; or
        conjugate gradients, which are exact, and slow.
    sampler : {"auto", "importance", "hmc", "langevin", "mala", "sgld"}, default="auto"
        "importance" and "hmc" for "cholesky" and "vecchia", by default the first; the second of
        more than 20 hyper-parameters and at most 200 observations and, up to 1000, where the first
        is worth less than half of `min_ess`; "langevin" (the default), "mala", which corrects its
        discretisation, and "sgld", that of the paper, for "cg".
    roulette : {"adaptive", "paper"}, default="adaptive"
        Of "cg": how linear systems are cut short without bias.
    schedule : {"constant", "paper"}, default="constant"
        Step sizes of "cg": held, or falling as in the paper.
    n_chains : int or "auto", default="auto"
        Of all samplers but "importance". "auto": 8 of "hmc" up to 200 observations, 4 otherwise.
    n_warmup : int, default=50
        Draws of each chain that are dropped.
    n_samples : int or None, default=None
        The most samples: points of "importance" (None: 5120), draws of each chain of the others
        (None: 1000; of "hmc" by ``sampler="auto"`` 400, beyond 500 observations fewer, 200 at
        least). Given, it is for one sampler alone.
    min_ess : float, default=400
        Effective number of samples at which to stop, once they have mixed.
    n_keep : int or "auto", default="auto"
        Samples that predict: S, of equal weight; equal ones are merged. "auto": from 8 to 64, as
        many as predict a mean to 0.03 standard deviations and these to 2%.
    n_probes : int, default=4
        Of "cg": vectors that estimate a trace.
    preconditioner_rank : int or "auto", default="auto"
        Of "cg".
    {warp_inputs}
    optimizer : {"auto", "map"} or None, default="auto"
        "map" finds the optimum alone, and None keeps the kernel's hyper-parameters: one plain
        Gaussian process, exact and, by "cg", large.
    normalize_y : bool, default=True
        Centre and scale the targets; ``kernel_`` is then in units of the scaled target.
    {random_state}
    device : str or torch.device, default="auto"
        "auto" is "cuda" where there is one and at least 500
        observations, else "cpu".
    dtype : {"float64", "float32"}, default="float64"
        Of the kernel products of "cg" in predictions; float32 is used there in any case where
        float64 does not fit `memory_budget`. The stochastic gradients, noisier than any rounding,
        are in float32, and factorisations in float64.
    n_jobs : int or None, default=None
        Jobs of joblib, over points or chains. Results do not depend on it.
    {memory_budget, verbose}

    Attributes
    ----------
    kernel_ : Kernel
        At the posterior mean of the logarithms (at the optimum for ``optimizer="map"``), noise
        included.
    {input_powers_}
    map_ : ndarray of shape (p,)
        The optimum, in the order of ``kernel_.theta`` and, as that, of logarithms. `plug_in`
        predicts with it.
    posterior_samples_ : ndarray of shape (s, p)
        All samples, of logarithms likewise.
    sample_weights_ : ndarray of shape (s,)
        Of sum one.
    sample_chains_ : ndarray of int, shape (s,)
        The chain of each; for "importance" the round.
    sample_log_posterior_ : ndarray of shape (s,)
        Up to a constant, in nats; NaN where not computed.
    hyperparameter_names_ : list of str, of length p
        With the names of the columns where X had them: ``"length_scale[pressure]"``.
    priors_ : tuple of Prior, of length p
        Empty for ``optimizer=None``. Its ``log_density(u)`` is their joint density.
    diagnostics_ : dict
        "sampler", "converged", "problems" (sentences), "ess" and what the sampler adds.
    log_marginal_likelihood_value_ : float
        Of ``kernel_`` and the standardised targets, in nats; with "vecchia" of the approximation
        that was sampled, with "cg" there is none.
    noise_variance_ : float
        Posterior mean over the samples kept, in squared units of y.
    solver_, sampler_ : str
    n_kept_ : int
        Different samples among those that predict.
    n_iter_ : int
        Iterations of the search for the optimum and parts of the sampling, as in ``history_``.
    history_ : dict of lists
        What was reported after each iteration, by name.
    {interrupted_, n_features_in_, feature_names_in_}
    y_mean_, y_scale_ : float

    See Also
    --------
    VecchiaGPRegressor : One set of hyper-parameters, with Vecchia's approximation.
    QSGPRegressor : One set of hyper-parameters, many more observations.

    References
    ----------
    .. [1] Filippone and Engler (2015), Enabling scalable stochastic gradient-based inference for
       Gaussian processes by employing the Unbiased LInear System SolvEr (ULISSE).
    .. [2] Vecchia (1988), Estimation and model identification for continuous spatial processes.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import BayesianGPRegressor
    >>> X = np.linspace(0, 10, 40)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> model = BayesianGPRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.05)
    True
    """

    _parameter_constraints = {
        "prior": "no_validation",
        "solver": [StrOptions({"auto", "cholesky", "vecchia", "cg"})],
        "sampler": [StrOptions({"auto", "importance", "hmc", "langevin", "mala", "sgld"})],
        "roulette": [StrOptions({"adaptive", "paper"})],
        "schedule": [StrOptions({"constant", "paper"})],
        "n_chains": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "n_warmup": [Interval(Integral, 0, None, closed="left")],
        "n_samples": [Interval(Integral, 1, None, closed="left"), None],
        "min_ess": [Interval(Real, 0, None, closed="neither")],
        "n_keep": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "n_probes": [Interval(Integral, 1, None, closed="left")],
        "preconditioner_rank": [Interval(Integral, 0, None, closed="left"), StrOptions({"auto"})],
        "optimizer": [StrOptions({"auto", "map"}), None],
    }

    _n_stages = 3

    _option_rules = (
        options("roulette schedule n_probes preconditioner_rank", solver=("cg",)),
        options("n_chains n_warmup", sampler=("hmc", "langevin", "mala", "sgld")),
        options("sampler n_chains n_warmup n_samples min_ess n_keep", optimizer=("auto",)),
        options("prior", optimizer=("auto", "map")),
    )

    def __init__(
        self,
        kernel=None,
        *,
        prior=None,
        solver="auto",
        sampler="auto",
        roulette="adaptive",
        schedule="constant",
        n_chains="auto",
        n_warmup=50,
        n_samples=None,
        min_ess=400,
        n_keep="auto",
        n_probes=4,
        preconditioner_rank="auto",
        warp_inputs="auto",
        optimizer="auto",
        normalize_y=True,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    def summary(self) -> PosteriorSummary:
        """Mean, standard deviation, quantiles and diagnostics of each hyper-parameter.

        Returns
        -------
        PosteriorSummary
            In the units of the hyper-parameters; prints as a table, and ``to_frame()`` makes a
            ``pandas.DataFrame`` of it.
        """
        check_is_fitted(self)
        return summarise(
            self.hyperparameter_names_,
            self.posterior_samples_,
            self.sample_weights_,
            self.sample_chains_,
            self.sampler_,
        )

    def to_arviz(self):
        """Return the samples as an ``arviz.InferenceData``, in the units of the hyper-parameters.

        Those of "importance" are resampled to as many of equal weight as they are worth, as four
        chains of independent draws.

        Raises
        ------
        ImportError
            If arviz is not installed.
        """
        check_is_fitted(self)
        return inference_data(
            self.kernel_,
            self.hyperparameter_names_,
            self.posterior_samples_,
            self.sample_weights_,
            self.sample_chains_,
            self.sampler_,
        )

    @within_limits
    def plug_in(self):
        """Return a fitted copy that predicts with the optimum ``map_`` alone, for comparison.

        Costs one solution with the kernel matrix.
        """
        check_is_fitted(self)
        other = copy.copy(self)
        other.kernel_ = self.kernel_.clone_with_theta(self.map_)
        other._posterior = self._posterior.at(self.kernel_, self.map_)
        other._noise_variance = float(other._posterior.noise[0])
        other.posterior_samples_, other.sample_weights_ = self.map_[None], np.ones(1)
        other.sample_chains_, other.sample_log_posterior_ = np.zeros(1, int), np.full(1, np.nan)
        other.n_kept_, other.sampler_ = 1, "map"
        other.diagnostics_ = {"sampler": "map", "converged": True, "problems": [], "ess": 1.0}
        at_map = self.diagnostics_.get("log_posterior_map")
        if at_map is not None and hasattr(self, "log_marginal_likelihood_value_"):
            log_prior = self.priors_.log_density(self.map_)
            other.log_marginal_likelihood_value_ = at_map - float(log_prior)
        return other

    _n_threads = None  # of ``n_jobs``, which are of joblib

    def _bytes_per_row(self):
        return self._posterior.bytes_per_row

    def _latent_mean_and_covariance(self, X):
        return self._posterior.covariance(X)

    def _latent_samples(self, X, n_samples, rng):
        return self._posterior.draws(X, n_samples, rng)

    def _observation_samples(self, X, n_samples, rng, **offset):
        return self._posterior.draws(X, n_samples, rng, noise=True)

    _is_mixture = True

    def _components(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weights (S,), means and variances (S, n) of z under each sample."""
        mean, var = self._posterior.component_moments(X)
        return self._posterior.weights, mean, var + self._posterior.noise[:, None]
