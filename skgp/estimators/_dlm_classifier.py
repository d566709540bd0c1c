"""Sparse GP classifiers trained on the log-loss (:mod:`skgp.models.dlm`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data, distinct_observations
from skgp.estimators._base import Backend
from skgp.estimators._base_classifier import BaseGPClassifier
from skgp.estimators._dlm_common import SparseGPMixin
from skgp.estimators._fitting import fit_context, fit_session
from skgp.estimators._kernels import default_classification_kernels
from skgp.estimators._parameters import StrOptions, warn_at_bounds
from skgp.estimators._validation import base_rate_offset, one_vs_rest
from skgp.learning import defaults
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_coupling, left_out_moments
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli

_REGRESSION_OBJECTIVES = ("square_loss", "fitc")


class DLMGPClassifier(SparseGPMixin, BaseGPClassifier):
    r"""Sparse Gaussian process classification trained on the loss that it is judged by.

    The latent function of class j is a sparse GP around :math:`o_j`, which predicts the base rate,
    and :math:`P(y = j) = g(f_j)`. The posterior q over the values at M inducing points, the points
    and the hyper-parameters minimise [1]_

    .. math:: \sum_i \ell_i(q) + \beta\, \mathrm{KL}(q \,\|\, p),

    by default with :math:`\ell_i = -\log E_q[p(y_i \mid f_i)]`, the log-loss of the prediction,
    where the ELBO has :math:`-E_q[\log p(y_i \mid f_i)]`. Beyond two classes each is
    set against the rest, over shared inducing points, and claims a row with probability
    :math:`p_j = E_q[g(f_j)]`; predicted are :math:`P(y = j) \propto p_j (1 - p_j)^{-\lambda}`, as
    for independent claims (:math:`\lambda = 1`) or more cautious ones.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels with one
        length scale a column.
    objective : {"log_loss", "elbo"}, default="log_loss"
        What to minimise; the second is for comparison and for streams.
    beta : float or "auto", default=1.0
        Weight of the KL divergence. "auto" chooses among 8, 4, ..., 0.015 by held-out data, along a
        path of warm starts from 1 down and up, which costs three to five single fits.
    likelihood : {"probit", "logit"}, default="probit"
        The link g. Averages of the first over f have a closed form.
    n_inducing : int or "auto", default="auto"
        Number of inducing points M; lowered to the number of distinct rows, with a warning. "auto"
        is 200, or the number of distinct rows.
    inducing : {"learned", "fixed"}, default="learned"
        Whether the points move.
    init : {"k-means", "random", "greedy"}, default="k-means"
        Where they begin: centres of clusters, rows at random, or rows chosen one by one where the
        variance that the others leave is greatest.
    hyperparameters : {"joint", "fixed"}, default="joint"
        Whether the objective learns hyper-parameters and points too, beginning at the optimum of
        the ELBO, or q alone, with those of the ELBO.
    gradient : {"auto", "exact", "quadrature", "bmc", "smooth_bmc", "ups"}, default="auto"
        Of the log-loss: a closed form or adaptive quadrature ("auto", "exact", "quadrature"), or
        sampled as in the paper: biased Monte Carlo, with a smoothed denominator, or unbiased
        product sampling. Sampled ones train by stochastic steps.
    n_gradient_samples : int, default=10
        Samples a row and step of the last three.
    class_weight : dict, "balanced" or None, default=None
        Weights of classes, which multiply those of rows.
    optimizer : "auto" or None, default="auto"
        None keeps the kernel's hyper-parameters and the points.
    max_iter : int, default=200
        Iterations over all rows at once, or pairs of steps with minibatches, of each part of the
        fit.
    tol : float, default=1e-6
        Relative fall of the objective in an iteration below which to stop, 1e5 / n times as much
        with few rows: n at most 2 `n_inducing`, and 500.
    learning_rate : float or None, default=None
        Of minibatches; None for a default that suits.
    batch_size : int or None, default=None
        Rows of a minibatch. None takes all rows at once while n M, times the number of classes
        beyond two, is below 1e6 (1e7 for q alone).
    warm_start : bool, default=False
        Start from the hyper-parameters, points and posterior of the last fit. Another kernel,
        likelihood, number of points or of columns, or set of classes begins anew.
    early_stopping : bool or "auto", default="auto"
        Whether rows are held out to say when a joint search stops, which could overfit; q then
        learns from all rows. "auto" does from 100 rows and more than two an inducing point on; with
        fewer the hyper-parameters stay those of the evidence.
    validation_fraction : float, default=0.1
        Of the rows to hold out, at most 4000.
    random_state : int, RandomState instance or None, default=None
    device : str or torch.device, default="auto"
        Of the fit; "auto" is "cuda" where there is one, else "cpu". Predictions run on the CPU.
    dtype : {"float64", "float32"}, default="float64"
        Of the fit. Predictions are in float64.
    n_jobs : int or None, default=None
        Threads while fitting and predicting. None takes one, and for single large operations
        (factors and products of matrices of a thousand rows or more) all that torch has. A number
        is that of large operations, and from 2000 rows on of all: -1, all processors, pays for
        many rows on an idle machine.
    verbose : int, default=0
        1 prints a line a stage, 2 a line an iteration.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    kernel_ : Kernel
        With the hyper-parameters learned.
    inducing_points_ : ndarray of shape (M, d)
    n_inducing_ : int
    offset_ : ndarray of shape (1,) or (n_classes,)
        Prior means of the latent functions.
    beta_ : float
    beta_path_ : dict of float to float
        Of ``beta="auto"``: the loss of the held-out data for each beta tried.
    loss_ : float
        The objective's value, in nats, summed over the rows, and over the classes beyond two.
    elbo_ : float
        ELBO of the posterior found, likewise.
    validation_loss_ : float or None
        Mean loss of the held-out data; None without any.
    coupling_ : float
        The exponent :math:`\lambda`, 0 for two classes: of 0, 1/4, ..., 1 that which predicts the
        training rows best, each left out of q in turn. Below 100 rows it is 1/2.
    moderation_ : float
        1: probabilities average over f with all of its posterior variance.
    n_iter_ : int
        Of the longest part of the fit, at most `max_iter`.
    history_ : dict of lists
        "start" and "solve": objective an observation, of the ELBO and of the objective;
        "validation": losses of the held-out data.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    n_features_in_ : int
    feature_names_in_ : ndarray of str

    See Also
    --------
    DLMGPRegressor : The same for quantities and counts.
    QSGPClassifier : Many more basis functions, fixed places, Laplace's approximation.

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

    _parameter_constraints: dict = {
        **BaseGPClassifier._parameter_constraints,
        **SparseGPMixin._dlm_constraints,
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
        verbose=0,
    ):
        self.kernel = kernel
        self.objective = objective
        self.beta = beta
        self.likelihood = likelihood
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.init = init
        self.hyperparameters = hyperparameters
        self.gradient = gradient
        self.n_gradient_samples = n_gradient_samples
        self.class_weight = class_weight
        self.optimizer = optimizer
        self.max_iter = max_iter
        self.tol = tol
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.warm_start = warm_start
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose

    # ---- training ------------------------------------------------------------------------

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None):
        """Learn inducing points, hyper-parameters and the posterior of the latent functions.

        Parameters
        ----------
        X : array-like of shape (n, d)
            In any units.
        y : array-like of shape (n,)
            Labels of two classes or more.
        sample_weight : array-like of shape (n,), optional
            Likelihood weights: a weight of 2 equals the row given twice.

        Returns
        -------
        DLMGPClassifier
            Itself.
        """
        self._check_objective()
        with fit_session(self, X, y, sample_weight=sample_weight, n_stages=1) as session:
            X, codes, sample_weight = self._validate_training(X, y, sample_weight)
            Y = one_vs_rest(codes, len(self.classes_))
            offset = base_rate_offset(Y, sample_weight, link=self.likelihood)
            self._learn(session, X, codes, sample_weight, offset)
        return self

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ):
        """Add rows to the posterior, which is the prior of the next call; rows are not kept.

        The first call is a `fit`, in which every class counts as one row more for the base rates:
        a class may come late. Later calls keep its hyper-parameters, inducing points, base rates
        and ``coupling_``; the posterior is near that of all rows at once, and depends a little on
        their order.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        classes : array-like of shape (n_classes,), optional
            All labels there will be; by default those of the first call.
        sample_weight : array-like of shape (n,), optional

        Returns
        -------
        DLMGPClassifier
            Itself.
        """
        self._check_objective()
        first = not hasattr(self, "_posterior")
        asked = X, y, sample_weight
        X, codes, sample_weight = self._validate_batch(
            X, y, sample_weight, classes=classes, first=first
        )
        if first:
            offset = self._cautious_offset(codes, sample_weight)
            with fit_session(self, *asked[:2], sample_weight=asked[2], n_stages=1) as session:
                self._learn(session, X, codes, sample_weight, offset)
            return self
        backend = self._resolve_backend()
        data = self._data(X, codes, sample_weight, backend)
        self._add_rows(data, self._log_loss_or_bound(learn=False), backend)
        return self

    def _check_objective(self) -> None:
        """Refuse what only a regressor can minimise."""
        if self.objective in _REGRESSION_OBJECTIVES:
            raise ValueError(
                f"objective={self.objective!r} needs Gaussian noise, and labels have none. Use "
                "objective='log_loss' or 'elbo', or DLMGPRegressor if y is a quantity."
            )

    def _cautious_offset(self, codes: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        """Base rates with a row of each kind more: a late class must not have an infinite one."""
        Y = one_vs_rest(codes, len(self.classes_))
        return base_rate_offset(Y, sample_weight, link=self.likelihood, cautious=True)

    def _learn(
        self,
        session,
        X: np.ndarray,
        codes: np.ndarray,
        sample_weight: np.ndarray | None,
        offset: np.ndarray,
    ) -> None:
        """Fit and set the attributes that tell of it."""
        backend = self._resolve_backend()
        kernels = self._kernels(X, sample_weight)
        data = self._data(X, codes, sample_weight, backend)
        with session.stage("solve") as callback:
            objective = self._log_loss_or_bound()
            fit = self._fit_sparse(kernels, data, objective, offset, backend, callback)
        self._likelihood = Bernoulli(self.likelihood)
        self.coupling_ = self._choose_coupling(data, fit.objective, backend)
        self.kernel_ = self._posterior.kernel
        self.offset_ = offset
        self.moderation_ = 1.0  # the loss averages over f with its whole variance
        if self._learns:
            warn_at_bounds(self.kernel_, self.kernel)

    def _choose_coupling(self, data: Data, objective: Objective, backend: Backend) -> float:
        """How far the claims of several classes count as independent, by rows left out."""
        if len(self.classes_) == 2:
            return 0.0
        if len(data) < defaults.FEW_ROWS:
            return FEW_ROWS_COUPLING
        n_rows = int(defaults.LEFT_OUT_NUMBERS / self._posterior.whitened_mean.numel())
        data = data.some(max(defaults.FEW_ROWS, n_rows), backend.generator())
        moments = left_out_moments(self._posterior, data, objective, self._likelihood)
        return best_coupling(self._likelihood, data.y.cpu(), *moments, data.weight)

    @property
    def _coupling(self) -> float:
        return self.coupling_

    def _kernels(self, X: np.ndarray, sample_weight: np.ndarray | None) -> list[Kernel]:
        """Kernels of f to choose among."""
        if self.kernel is None:
            return default_classification_kernels(X, sample_weight)
        return [self._resolve_kernel(X, lambda: None)]

    def _data(
        self, X: np.ndarray, codes: np.ndarray, sample_weight: np.ndarray | None, backend: Backend
    ) -> Data:
        """Rows as tensors, those of equal inputs and labels merged."""
        rows = distinct_observations(X, codes.astype(np.float64), sample_weight, backend.device)
        Y = one_vs_rest(rows.y.cpu().numpy().astype(np.int64), len(self.classes_))
        return replace(rows, y=backend.tensor(Y), scatter=None).to(backend.dtype)

    def _evenness(self, data: Data) -> float:
        """Share of the rarest class, relative to that of equal classes."""
        shares = (data.y > 0).double().mean(0)
        shares = shares if len(shares) > 1 else torch.cat([shares, 1 - shares])
        return float(len(shares) * shares.min())

    def _log_loss_or_bound(self, *, learn: bool = True) -> Objective:
        """What to minimise, as the parameters say."""
        return self._objective(self.objective, Bernoulli(self.likelihood), learn=learn)

    # ---- prediction ------------------------------------------------------------------------

    def _latent_mean(self, X):
        return self._means(X)

    def _latent_mean_and_variance(self, X):
        return self._moments(X)
