"""Sparse GP regression trained on the loss that it is judged by (:mod:`skgp.models.dlm`)."""

from __future__ import annotations

from dataclasses import replace

from skgp.data import Data
from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._base_regressor import LikelihoodGPRegressor, StreamingGPRegressor
from skgp.estimators._dlm_common import SparseGPMixin
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.estimators._varying_noise import VaryingNoise
from skgp.kernels.expression import split_noise
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import STOCHASTIC_GRADIENTS


class DLMGPRegressor(SparseGPMixin, VaryingNoise, LikelihoodGPRegressor, StreamingGPRegressor):
    r"""Sparse Gaussian process regression trained on the loss that it is judged by.

    The posterior q over the values at M inducing points, the points and the hyper-parameters
    minimise [1]_

    .. math:: \sum_i \ell_i(q) + \beta\, \mathrm{KL}(q \,\|\, p),

    by default with :math:`\ell_i = -\log E_q[p(y_i \mid f_i)]`, the log-loss of the prediction,
    where the ELBO has :math:`-E_q[\log p(y_i \mid f_i)]`. Predictive variances then adapt
    to where the sparse posterior errs. Up to 3000 distinct inputs nothing need be sparse, and with
    Gaussian noise the default is the exact GP.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f; a ``WhiteKernel`` summand at the top level is the variance of Gaussian
        noise, or the squared scale of Student-t noise (one of level 0.01 is added where there is
        none; counts have none). None chooses among RBF and Matern kernels with one length scale a
        column.
    objective : {"log_loss", "square_loss", "elbo", "fitc"}, default="log_loss"
        What to minimise; all but the first two are for comparison. "square_loss" is the best for
        the error of the mean; its variances are those of a GP of the same mean, scaled to
        leave-one-out residuals. "square_loss" and "fitc" want Gaussian noise.
    beta : float or "auto", default=1.0
        Weight of the KL divergence. "auto" chooses among 8, 4, ..., 0.015 by held-out data, along a
        path of warm starts from 1 down and up, which costs three to five single fits. Without
        effect on "fitc".
    {likelihood, link}
    n_inducing : int or "auto", default="auto"
        Number of inducing points M; lowered to the number of distinct inputs, with a warning.
        "auto" with Gaussian noise and ``beta=1`` is, up to 3000 distinct inputs, the exact GP (M is
        their number, q the posterior of Bayes' rule in closed form, hyper-parameters those of the
        greatest evidence), and beyond 200, 400 or 800, more while held-out observations gain by
        them. Otherwise, where q has no closed form, it is 200.
    {inducing, init, hyperparameters, gradient, n_gradient_samples, degrees_of_freedom}
    {heteroscedastic, warp_inputs, optimizer, normalize_y, max_iter}
    tol : float, default=1e-6
        Relative fall of the objective in an iteration below which to stop, 1e5 / n times as much
        with few observations: n at most `n_inducing` (twice that for counts), and 500.
    {learning_rate}
    batch_size : int or None, default=None
        Observations of a minibatch. None takes all observations at once while n M is below 1e6 (1e7
        for q alone), and beyond that 4 M, at least 1000. Closed forms take no minibatches.
    warm_start : bool, default=False
        Start from the hyper-parameters, points and posterior of the last fit. Another kernel,
        likelihood, number of points or of columns begins anew.
    {early_stopping, validation_fraction, random_state, device, dtype, n_jobs, memory_budget}
    {verbose}

    Attributes
    ----------
    {kernel_, input_powers_}
    inducing_points_ : ndarray of shape (M, d)
    n_inducing_ : int
    beta_ : float
    beta_path_ : dict of float to float
        Of ``beta="auto"``: the loss of the held-out data for each beta tried.
    noise_variance_ : float
        In squared units of y; none for counts.
    {likelihood_scale_, degrees_of_freedom_}
    loss_ : float
        The objective's value, in nats of the standardised targets, summed over the observations.
    {elbo_, validation_loss_, n_iter_, history_, interrupted_, n_features_in_}
    {feature_names_in_}
    y_mean_, y_scale_ : float
        Mean and standard deviation of the targets, for Student-t noise of those that are no gross
        outliers.

    See Also
    --------
    DLMGPClassifier : The same for classes.
    QSGPRegressor : Many more basis functions, fixed places, the evidence as the objective.

    Notes
    -----
    Where Student-t noise is learned from up to 500 observations, at most two for each inducing
    point, the ELBO takes the place of the default objective, the log-loss at ``beta=1``, which
    would fit q(u) to the outliers. With another ``beta`` or ``gradient``, or ``early_stopping``
    given in a joint search, the log-loss is minimised.

    ``partial_fit`` changes the posterior, which is the prior of the next call; observations are not
    kept. Later calls keep the hyper-parameters, inducing points and standardisation of the first;
    for Gaussian noise and objectives other than "log_loss" the posterior is that of all
    observations at once. That of "log_loss", whose width stands for noise as well, counts ten times
    as a prior, which keeps most of its quality; a `fit` of all observations is better.

    References
    ----------
    .. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import DLMGPRegressor
    >>> X = np.linspace(0, 10, 300)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> model = DLMGPRegressor(n_inducing=20, random_state=0).fit(X, y)
    >>> mean, std = model.predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.01)
    True
    """

    _parameter_constraints: dict = {
        **LikelihoodGPRegressor._parameter_constraints,
        **SparseGPMixin._dlm_constraints,
        **VaryingNoise._noise_constraints,
        "objective": [StrOptions({"log_loss", "square_loss", "elbo", "fitc"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        objective="log_loss",
        beta=1.0,
        likelihood="auto",
        link="exp",
        n_inducing="auto",
        inducing="learned",
        init="k-means",
        hyperparameters="joint",
        gradient="auto",
        n_gradient_samples=10,
        degrees_of_freedom="auto",
        heteroscedastic="auto",
        warp_inputs="auto",
        optimizer="auto",
        normalize_y=True,
        max_iter=200,
        tol=1e-6,
        learning_rate=None,
        batch_size=None,
        warm_start=False,
        early_stopping="auto",
        validation_fraction=0.1,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    # ---- training ------------------------------------------------------------------------

    @property
    def _noise_floor(self) -> float:  # type: ignore[override]
        # Of Gaussian noise the log-loss has a floor of its own: that of the ELBO, or less.
        return 0.0 if self._is_gaussian else defaults.NOISE_FLOOR

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        squared = self.objective == "square_loss"
        of_logs = squared and self.likelihood == "lognormal"
        if of_logs or ((squared or self.objective == "fitc") and not self._is_gaussian):
            raise ValueError(
                f"objective={self.objective!r} needs likelihood='gaussian'; got "
                f"likelihood={self.likelihood!r}. Use objective='log_loss' or 'elbo'."
            )

    def _logs_predict_better(self, X, y, sample_weight):
        squared = self.objective == "square_loss"  # of y, not of log y
        return not squared and super()._logs_predict_better(X, y, sample_weight)

    def _may_vary(self, data: Data) -> bool:
        may = super()._may_vary(data)
        if not may or self.heteroscedastic is True:
            return may
        # Sparse, variances of f vary: they have been trained to be those of the errors.
        white = split_noise(self._kernels(data)[0])[1]
        return self._is_exact(data, self._objective(self._make_likelihood(white)))

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        kernels, noises = zip(*map(split_noise, self._kernels(data)), strict=True)
        white = None if self._own_likelihood is not None else noises[0]
        data = self._distinct(data, backend)
        objective = self._objective(self._make_likelihood(white))
        exact = self._is_exact(data, objective)
        with session.stage("solve") as callback:
            offset = self._offset(data)
            self._fit_sparse(list(kernels), data, objective, offset, backend, callback, exact=exact)
        self._describe(self._posterior.kernel, to_tensor(self._likelihood_parameters), white)
        self._warn_at_bounds()

    def _update(self, data: Data, backend: Backend) -> None:
        likelihood = self._make_likelihood(split_noise(self.kernel_)[1])
        objective = self._objective(likelihood, name=self._minimised, learn=False)
        self._add_rows(self._distinct(data, backend), objective, backend)

    def _training_offset(self, exposure, n_rows, sample_weight):
        if exposure is not None and self.gradient in STOCHASTIC_GRADIENTS:
            raise ValueError(
                f"gradient={self.gradient!r} does not take exposure; use gradient='auto'."
            )
        return super()._training_offset(exposure, n_rows, sample_weight)

    def _distinct(self, data: Data, backend: Backend) -> Data:
        """Observations of equal inputs, targets and exposures merged, for the fit."""
        data = data.merged(any_likelihood=True).to(backend.device)
        return replace(data, y=data.y[:, None], scatter=None).to(backend.dtype)

    # ---- prediction, in the standardised scale ---------------------------------------------

    def _latent_mean_and_covariance(self, X):
        covariance, mean = self._evaluate("covariance mean", X)
        return mean[:, 0], covariance[0]
