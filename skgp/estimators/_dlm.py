"""Sparse GPs trained on the loss that they are judged by (:mod:`skgp.models.dlm`)."""

from __future__ import annotations

from dataclasses import replace

import torch

from skgp.data import Data
from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._base_regressor import LikelihoodGPRegressor, StreamingGPRegressor
from skgp.estimators._dlm_common import SparseGPMixin
from skgp.estimators._fitting import FitSession
from skgp.estimators._input_units import InputUnits, on_grid
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.estimators._varying_noise import VaryingNoise
from skgp.kernels.expression import split_noise
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_calibration, left_out_moments
from skgp.learning.defaults import FEW_ROWS
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import STOCHASTIC_GRADIENTS, Objective


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
        noise, or the squared scale of Student-t noise (0.01 is added where there is none; counts
        have none). None chooses among RBF and Matern kernels with one length scale a column.
    objective : {"log_loss", "square_loss", "elbo", "fitc"}, default="log_loss"
        What to minimise; all but the first two are for comparison. "square_loss" is the best for
        the error of the mean; its variances are those of a GP of the same mean, scaled to
        leave-one-out residuals. "square_loss" and "fitc" require Gaussian noise, and "fitc"
        has no `beta`.
    {beta, likelihood, link}
    n_inducing : int or "auto", default="auto"
        Number of inducing points M; lowered to the number of distinct inputs, with a warning.
        "auto" with Gaussian noise and ``beta=1`` is, up to 3000 distinct inputs, the exact GP (M is
        their number, q the posterior of Bayes' rule in closed form, hyper-parameters those of the
        greatest evidence), and beyond 200, 400 or 800, more while held-out observations gain by
        them. Otherwise, where q has no closed form, it is 200.
    {inducing, init, hyperparameters, gradient, n_gradient_samples, degrees_of_freedom}
    {heteroscedastic, warp_inputs, optimizer, normalize_y, max_iter, tol, learning_rate}
    batch_size : int or None, default=None
        Observations of a minibatch. None takes all observations at once while n M is below 1e6 (1e7
        for q alone), and beyond that 4 M, at least 1000. Closed forms take no minibatches.
    {warm_start, early_stopping, validation_fraction, random_state, device, dtype, n_jobs}
    {memory_budget, verbose}

    Attributes
    ----------
    {kernel_, input_powers_, inducing_points_, n_inducing_, beta_, beta_path_}
    noise_variance_ : float
        In squared units of y; none for counts.
    {likelihood_scale_, degrees_of_freedom_}
    loss_ : float
        The objective's value, in nats of the standardised targets, summed over the observations.
    {elbo_, validation_loss_, n_iter_, history_, interrupted_, n_features_in_, feature_names_in_}
    {y_mean_}

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
    kept. Later calls keep the hyper-parameters and standardisation of the first, but raise the
    variances of f and noise where a batch is predicted worse than they allow; and its inducing
    points, to which they add observations that these leave unexplained, up to `n_inducing` in all;
    for Gaussian noise and objectives other than "log_loss" the posterior is that of all
    observations at once, but for what those before a point tell of it. That of "log_loss", whose
    width is noise, too, counts ten times as a prior. A `fit` of all observations is better.

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

    _parameter_constraints = {
        "objective": [StrOptions({"log_loss", "square_loss", "elbo", "fitc"})]
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
        units, data = self._in_units(data)
        kernels, noises = zip(*map(split_noise, self._kernels(data)), strict=True)
        white = None if self._own_likelihood is not None else noises[0]
        data = self._distinct(data, backend)
        objective = self._objective(self._make_likelihood(white))
        exact = self._is_exact(data, objective)
        with session.stage("solve") as callback:
            told = data, objective, self._offset(data), units, backend, callback
            self._fit_sparse(list(kernels), *told, exact=exact)
        self._describe(self._found_kernel, to_tensor(self._likelihood_parameters), white)
        self._warn_at_bounds()

    def _update(self, data: Data, backend: Backend) -> None:
        white = split_noise(self.kernel_)[1]
        objective = self._objective(self._make_likelihood(white), name=self._minimised, learn=False)
        self._add_rows(data, objective, backend)
        self._describe(self._found_kernel, to_tensor(self._likelihood_parameters), white)

    def _training_offset(self, exposure, n_rows, sample_weight):
        if exposure is not None and self.gradient in STOCHASTIC_GRADIENTS:
            raise ValueError(
                f"gradient={self.gradient!r} does not take exposure; use gradient='auto'."
            )
        return super()._training_offset(exposure, n_rows, sample_weight)

    def _in_units(self, data: Data) -> tuple[InputUnits | None, Data]:
        units, data = super()._in_units(data)
        standardised = self.normalize_y and self._is_additive
        return units, replace(data, y=on_grid(data.y)) if standardised else data

    def _distinct(self, data: Data, backend: Backend) -> Data:
        """Observations of equal inputs, targets and exposures merged, for the fit."""
        data = data.merged(any_likelihood=True).to(backend.device)
        return replace(data, y=data.y[:, None], scatter=None).to(backend.dtype)

    def _moment_tensors(self, rows):
        return super()._moment_tensors(self._inputs(rows))

    def _latent_mean_and_covariance(self, X):
        covariance, mean = self._evaluate("covariance mean", self._inputs(X))
        return mean[:, 0], covariance[0]


_REGRESSION_OBJECTIVES = ("square_loss", "fitc")


class DLMGPClassifier(SparseGPMixin, StreamingGPClassifier):
    r"""Sparse Gaussian process classification trained on the loss that it is judged by.

    The latent function of class j is a sparse GP around :math:`o_j`, which predicts the base rate,
    and :math:`P(y = j) = g(f_j)`. The posterior q over the values at M inducing points, the points
    and the hyper-parameters minimise [1]_

    .. math:: \sum_i \ell_i(q) + \beta\, \mathrm{KL}(q \,\|\, p),

    by default with :math:`\ell_i = -\log E_q[p(y_i \mid f_i)]`, the log-loss of the prediction,
    where the ELBO has :math:`-E_q[\log p(y_i \mid f_i)]`. Beyond two classes each is
    set against the rest, over shared inducing points, with the probability
    :math:`p_j = E_q[g(f_j)]`, and ``coupling_`` combines them.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels with one
        length scale a column, or of many one for all; up to 500 observations by labels left out.
    objective : {"log_loss", "elbo"}, default="log_loss"
        What to minimise; the second is for comparison and for streams.
    {beta}
    likelihood : {"probit", "logit"}, default="probit"
        The link g. Averages of the first over f have a closed form.
    n_inducing : int or "auto", default="auto"
        Number of inducing points M; lowered to the number of distinct inputs, with a warning.
        "auto" is 200, or the number of distinct inputs.
    {inducing, init, hyperparameters, gradient, n_gradient_samples, warp_inputs, class_weight}
    {optimizer, max_iter, tol, learning_rate}
    batch_size : int or None, default=None
        Observations of a minibatch. None takes all observations at once while n M, times the number
        of classes beyond two, is below 1e6 (1e7 for q alone).
    {warm_start, early_stopping, validation_fraction, random_state, device, dtype, n_jobs}
    {memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_, input_powers_, inducing_points_, n_inducing_, offset_, beta_, beta_path_}
    loss_ : float
        The objective's value, in nats, summed over the observations, and over the classes beyond
        two.
    {elbo_, validation_loss_, coupling_, moderation_}
    {n_iter_, history_, interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    DLMGPRegressor : The same for quantities and counts.
    QSGPClassifier : Many more basis functions, fixed places, Laplace's approximation.

    Notes
    -----
    Of at most two observations for each inducing point the ELBO takes the place of the default
    objective, the log-loss at ``beta=1``, whose q(u) is too wide there. With another ``beta`` or
    ``gradient``, or ``early_stopping`` given in a joint search, the log-loss is minimised.

    Labels are left out of q in turn to choose ``coupling_`` and ``moderation_``; below 100
    observations, and of two classes, none are, and ``moderation_`` is 1.

    ``partial_fit`` changes the posterior, which is the prior of the next call; observations are not
    kept. In the first call every class counts as one observation more for the base rates: a class
    may come late. Later calls keep its hyper-parameters, base rates, ``coupling_`` and inducing
    points, to which they add observations that these leave unexplained, up to `n_inducing` in all;
    the posterior is near that of all observations at once, and depends a little on their order.

    References
    ----------
    .. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import DLMGPClassifier
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> model = DLMGPClassifier(n_inducing=20, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.inducing_points_.shape
    (20, 2)
    """

    _parameter_constraints = {
        # Those of the regressor are known so that they can be refused with advice.
        "objective": [StrOptions({"log_loss", "elbo", *_REGRESSION_OBJECTIVES})],
        "likelihood": [StrOptions({"probit", "logit"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        objective="log_loss",
        beta=1.0,
        likelihood="probit",
        n_inducing="auto",
        inducing="learned",
        init="k-means",
        hyperparameters="joint",
        gradient="auto",
        n_gradient_samples=10,
        class_weight=None,
        warp_inputs="auto",
        optimizer="auto",
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

    def _check_parameters(self, *, stream: bool = False) -> None:
        if self.objective in _REGRESSION_OBJECTIVES:
            raise ValueError(
                f"objective={self.objective!r} needs Gaussian noise, and labels have none. Use "
                "objective='log_loss' or 'elbo', or DLMGPRegressor if y is a quantity."
            )

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        units, data = self._in_units(data)
        kernels = self._kernels(data)
        # Of a stream with a row of each kind more: a late class must not have an infinite one.
        self._set_link(data, cautious=stream)
        data = self._distinct(data, backend)
        with session.stage("solve") as callback:
            objective = self._objective(self._likelihood)
            fit = self._fit_sparse(kernels, data, objective, self.offset_, units, backend, callback)
        self.moderation_, self.coupling_ = self._calibrate(data, fit.objective, backend)
        self.kernel_ = self._found_kernel
        self._warn_at_bounds()

    def _update(self, data: Data, backend: Backend) -> None:
        self._add_rows(data, self._objective(self._likelihood, learn=False), backend)

    def _calibrate(self, data: Data, objective: Objective, backend: Backend) -> tuple[float, float]:
        """Moderation and coupling of one-vs-rest probabilities, by leave-one-out predictions.

        Of two classes the loss itself averages over f with its whole variance.
        """
        if len(self.classes_) == 2:
            return 1.0, 0.0
        if len(data) < FEW_ROWS:
            return 1.0, FEW_ROWS_COUPLING
        n_rows = int(defaults.LEFT_OUT_NUMBERS / self._posterior.whitened_mean.numel())
        data = data.some(max(FEW_ROWS, n_rows), backend.generator())
        moments = left_out_moments(self._posterior, data, objective, self._likelihood)
        return best_calibration(self._likelihood, data.y.cpu(), *moments, data.weight)

    def _class_balance(self, data: Data) -> float:
        """Share of the rarest class, relative to that of equal classes."""
        shares = (data.y > 0).double().mean(0)
        shares = shares if len(shares) > 1 else torch.cat([shares, 1 - shares])
        return float(len(shares) * shares.min())

    def _rescales(self, data: Data) -> bool:
        return self._search_options(data)["rescales"]
