"""Vecchia approximations of GP regression: the estimator of :mod:`skgp.models.vecchia`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import Backend
from skgp.estimators._base_regressor import LikelihoodGPRegressor
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import Interval, StrOptions, keep_parameters, options
from skgp.estimators._reduction import warn_of_few_rows
from skgp.estimators._varying_noise import VaryingNoise
from skgp.estimators._warping import WarpedInputs
from skgp.inference.vecchia.posterior import VecchiaPosterior
from skgp.kernels.expression import split_noise
from skgp.learning.defaults import VECCHIA_INDUCING, VECCHIA_LATENT_INDUCING
from skgp.learning.search import SearchSettings
from skgp.learning.vecchia import VecchiaSettings
from skgp.models.vecchia import VecchiaFit, fit_vecchia, fit_vecchia_numbers


class VecchiaMixin(WarpedInputs):
    """Neighbours, inducing points and order.

    Parameters
    ----------
    ordering : {"auto", "maximin", "random"}, default="auto"
        Order of the observations: each as far as can be from all before it, or at random, by
        ``random_state``. "auto" is "maximin" for up to 4 columns, where it is quick to find.
    dtype : {"float64"}, default="float64"
    memory_budget : float or None, default=None
        Bytes that a fit or a prediction may take beyond the data and the model. None is 70% of
        what is free on the device. Less makes tiles smaller.

    Attributes
    ----------
    n_neighbors_ : int
        H, at most the number of distinct inputs less one.
    n_iter_ : int
        Evaluations of the search.
    """

    _parameter_constraints = {
        "n_neighbors": [Interval(Integral, 0, None, closed="left")],
        "n_inducing": [Interval(Integral, 0, None, closed="left"), None],
        "ordering": [StrOptions({"auto", "maximin", "random"})],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "dtype": [StrOptions({"float64"})],
    }

    _option_rules = (options("max_iter tol batch_size", optimizer=("auto",)),)

    #: Of a search, each with neighbours and inducing points as the kernel before it sees them.
    _n_search_stages = 3

    #: Inducing points by default, of enough rows.
    _most_inducing = VECCHIA_INDUCING

    #: Whether observations decide on inducing points by default.
    _chooses_inducing = False

    n_neighbors: int
    n_inducing: int | None
    ordering: str
    max_iter: int
    tol: float
    batch_size: int | None

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if not self.n_neighbors and self.n_inducing == 0:
            raise ValueError(
                "n_neighbors=0 needs inducing points, without which all rows would be independent; "
                "got n_inducing=0. Give n_neighbors or n_inducing at least 1."
            )

    def _settings(self, data: Data) -> VecchiaSettings:
        """Of distinct observations; sets ``ordering_`` and ``n_neighbors_``."""
        n, d = data.X.shape
        few = d <= defaults.VECCHIA_MAXIMIN_COLUMNS
        self.ordering_ = self.ordering
        if self.ordering == "auto":
            self.ordering_ = "maximin" if few else "random"
        self.n_neighbors_ = min(self.n_neighbors, n - 1)
        n_inducing = self.n_inducing
        if n_inducing is not None:
            if n_inducing > n:
                warn_of_few_rows(n_inducing, n)
            n_inducing = min(n_inducing, n)
        elif not (self._chooses_inducing and self.n_neighbors_):
            n_inducing = min(self._most_inducing, n)
        return VecchiaSettings(
            self.n_neighbors_,
            n_inducing,
            exact_rows=SearchSettings.exact_rows,
            n_rows=self._n_rows,
            n_stages=self._n_search_stages,
            max_iter=self.max_iter,
            tol=self.tol,
        )

    @property
    def _n_rows(self) -> int | None:
        """Rows that stand for all in the search; None for all."""
        return self.batch_size

    def _told(self, backend: Backend) -> dict[str, Any]:
        """What every fit is told, once `_settings` are made."""
        return {
            "ordering": self.ordering_,
            "n_predictive": max(1, defaults.VECCHIA_PREDICTIVE * self.n_neighbors_),
            "learns": self._learns,
            "generator": torch.Generator().manual_seed(backend.seed),
        }

    def _keep(self, fit: VecchiaFit) -> None:
        self._posterior = fit.posterior
        self.inducing_points_ = fit.posterior.Z.cpu().numpy()
        self.n_inducing_ = len(self.inducing_points_)
        self.log_marginal_likelihood_value_ = fit.log_marginal_likelihood
        self.n_iter_, self.history_ = fit.n_iter, {"hyperparameters": fit.history}

    def _bytes_per_row(self) -> int:
        size = self._posterior.neighborhood.size
        d, m = self.n_features_in_, self.n_inducing_
        return 8 * size * (4 * size + d + m) + 64 * m + 16 * self._posterior.n_spread


class VecchiaGPRegressor(VecchiaMixin, VaryingNoise, LikelihoodGPRegressor):
    r"""Gaussian process regression by Vecchia's approximation, beyond what a dense matrix allows.

    The joint density of the observations as a product of densities, each given H of the
    observations before it [1]_,

    .. math:: p(y) \approx \prod_i p(y_i \mid y_{N(i)}), \qquad N(i) \subset \{1 \dots i - 1\},

    of a process whose large scales m inducing points have taken out before [2]_. m = 0 is Vecchia's
    own. A fit costs :math:`O(n H^2 (H + m) + n m^2)`.

    For rough functions and spatial data of any number of observations: other than `SWSGPRegressor`
    it has a joint likelihood, which compares kernels and numbers of neighbours, and learns ranges
    that reach across gaps of the data. Of counts and Student-t noise the posterior is Laplace's
    approximation about the mode of f at all observations, as in `VecchiaGPClassifier`. Up to 2500
    observations with Gaussian noise are the exact GP by default.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f; a ``WhiteKernel`` summand at the top level is the variance of the noise, or
        the squared scale of Student-t noise (one of level 0.01 is added where there is none; counts
        have none). None takes an RBF kernel or a Matern
        kernel of nu 5/2, 3/2 or 1/2, whichever is likeliest, with one length scale a column.
    n_neighbors : int, default=20
        H, of the earlier observations that each is conditioned on; all there are if that is fewer.
        Predictions use twice as many of all observations, at least one, which fade with their
        distance; and as many more of the observations of large weight, where others tell little.
    n_inducing : int or None, default=None
        m. They pay for smooth functions, and for more columns than neighbours can surround a point
        in. None takes all of up to 2500 distinct inputs, which is the exact process, where the
        noise is above 1e-7 of the variance of f, beside which rounding counts; of more 400, or 4e7
        / n of more than 100,000, or 0 where they do not make the targets likelier; unless the noise
        is Gaussian, 100. More is lowered to the number of distinct inputs, with a warning.
    {ordering}
    {likelihood}
        The log-density must be twice differentiable in f.
    {link, degrees_of_freedom, heteroscedastic, warp_inputs, optimizer, normalize_y}
    max_iter : int, default=30
        Iterations of L-BFGS-B, at most, of each of three stages of the search (two, unless the
        noise is Gaussian).
    tol : float, default=1e-6
        Relative change of the likelihood at which a stage ends.
    batch_size : int, "auto" or None, default="auto"
        Observations, at random, whose densities stand for those of all observations in the search;
        each is given neighbours among all observations, or unless the noise is Gaussian among
        these. None takes all, "auto" 10000, or 2000 unless the noise is Gaussian.
    {random_state, device, dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    {kernel_, input_powers_, n_neighbors_}
    inducing_points_ : ndarray of shape (m, d)
    n_inducing_ : int
    ordering_ : {"maximin", "random"}
    log_marginal_likelihood_value_ : float
        Of all observations under the approximation, in nats of the standardised targets, summed
        over several. Laplace's approximation unless the noise is Gaussian.
    {noise_variance_, likelihood_scale_, degrees_of_freedom_, n_iter_}
    history_ : dict of lists
        "hyperparameters": log-density per observation, in nats; unless the noise is Gaussian
        "solve": minus the log joint density at the steps towards the mode.
    {interrupted_, n_features_in_, feature_names_in_, y_mean_}

    See Also
    --------
    VecchiaGPClassifier : The same for labels.
    SWSGPRegressor : Neighbours among inducing points; streams.
    DLMGPRegressor : Few inducing points and a variational posterior, of any likelihood.
    QSGPRegressor : The exact GP of a few thousand observations, and basis functions beyond.

    Notes
    -----
    Observations of equal inputs are merged. Two points of a prediction have the same joint
    distribution whatever points come with them. With H or m as many as the observations it is
    the exact GP, or Laplace's approximation of it, at a higher cost.

    With Gaussian noise y may be (n, t): targets share neighbours, kernel and noise, which has in
    each the same share of its variance, and are independent given these.

    A prediction of counts or with Student-t noise averages over a Gaussian posterior of f: mean the
    mode, variances as of `VecchiaGPClassifier`, exact for up to some 2000 observations, else
    estimated from 50 draws at the observations. Student-t noise has an observation far from f tell
    nothing of f: its curvature, which is negative there, counts as 0 in the posterior covariance.
    Unless the noise is Gaussian, f has at each observation an independent part of variance 1e-6
    besides, so that no observation tells more of f than that: standard deviations of counts of 1e5
    are up to 6% too great, of 1e6 up to a half.

    References
    ----------
    .. [1] Vecchia (1988), Estimation and model identification for continuous spatial processes.
    .. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
       Gaussian processes.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import VecchiaGPRegressor
    >>> X = np.linspace(0, 10, 100)[:, None]
    >>> y = np.sin(X[:, 0]) + 0.1 * np.cos(37 * np.arange(100.0))
    >>> model = VecchiaGPRegressor(n_neighbors=10, random_state=0).fit(X, y)
    >>> mean, std = model.predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.1)
    True
    >>> model.n_neighbors_, model.ordering_
    (10, 'maximin')

    Counts of unlike exposure:

    >>> exposure = 1.0 + np.arange(100) % 3
    >>> counts = np.random.default_rng(0).poisson(exposure * np.exp(1 + np.sin(X[:, 0])))
    >>> model = VecchiaGPRegressor(likelihood="poisson", random_state=0)
    >>> rate = model.fit(X, counts, exposure=exposure).predict([[2.5]])
    >>> bool(abs(np.log(rate[0]) - 1 - np.sin(2.5)) < 0.2)
    True
    """

    _parameter_constraints = {
        "batch_size": [*VecchiaMixin._parameter_constraints["batch_size"], StrOptions({"auto"})]
    }

    _posterior: VecchiaPosterior

    def __init__(
        self,
        kernel=None,
        *,
        n_neighbors=defaults.VECCHIA_NEIGHBORS,
        n_inducing=None,
        ordering="auto",
        likelihood="auto",
        link="exp",
        degrees_of_freedom="auto",
        heteroscedastic="auto",
        warp_inputs="auto",
        optimizer="auto",
        normalize_y=True,
        max_iter=30,
        tol=1e-6,
        batch_size="auto",
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        own = self._own_likelihood
        if own is not None and not own.is_smooth:
            raise ValueError(
                f"likelihood={self.likelihood!r} must be twice differentiable in f, for Laplace's "
                f"approximation has the curvature at the mode; {type(own).__name__} noise has "
                "none. Use likelihood='student_t', or DLMGPRegressor."
            )

    @property
    def _one_target(self) -> str | None:
        if self.heteroscedastic is True:
            return " with heteroscedastic=True"
        several = self.likelihood in ("auto", "gaussian")
        return None if several else f" with likelihood={self.likelihood!r}"

    @property
    def _chooses_inducing(self) -> bool:  # type: ignore[override]
        return self._has_gaussian_name

    @property
    def _most_inducing(self) -> int:  # type: ignore[override]
        return VECCHIA_INDUCING if self._has_gaussian_name else VECCHIA_LATENT_INDUCING

    @property
    def _n_search_stages(self) -> int:  # type: ignore[override]
        return 3 if self._has_gaussian_name else 2

    @property
    def _n_rows(self) -> int | None:
        if self.batch_size != "auto":
            return self.batch_size
        return defaults.VECCHIA_ROWS if self._has_gaussian_name else defaults.VECCHIA_LABELS

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        kernels = self._kernels(data)
        white = split_noise(kernels[0])[1] if self._own_likelihood is None else None
        gaussian = self._has_gaussian_name
        offset = self._offset(data)
        data = data.merged(any_likelihood=not gaussian).to(backend.device)
        settings = self._settings(data)
        fit: Any
        with session.stage("hyperparameters") as callback:
            if gaussian:
                fit = fit_vecchia(kernels, data, settings, callback=callback, **self._told(backend))
                self._describe_gaussian(fit.kernel, fit.noise)
            else:
                fit = fit_vecchia_numbers(
                    kernels,
                    replace(data, y=data.y[:, None]),
                    settings,
                    self._make_likelihood(white),
                    backend.tensor(offset),
                    callback=callback,
                    **self._told(backend),
                )
                self._describe(fit.kernel, fit.parameters.cpu(), white)
        self._keep(fit)
        if not gaussian:
            self.history_["solve"] = fit.solve
        self._warn_at_bounds()

    def _latent_mean_and_covariance(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        mean, covariance = self._evaluate("mean_and_covariance", X)
        return self._by_target(mean), covariance
