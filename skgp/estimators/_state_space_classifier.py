"""Classification in state space: the estimator of :mod:`skgp.models.state_space`."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from skgp.estimators._base import to_tensor
from skgp.estimators._base_classifier import BaseGPClassifier
from skgp.estimators._fitting import fit_context, fit_session, in_few_threads
from skgp.estimators._parameters import StrOptions, warn_at_bounds
from skgp.estimators._state_space_common import StateSpaceMixin
from skgp.estimators._validation import base_rate_offset, one_vs_rest
from skgp.estimators.defaults import COUPLING_ROWS, LEFT_OUT_ROWS, SERIES_LINK_VARIANCE
from skgp.inference.markov.sites import left_out_moments
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_coupling
from skgp.likelihoods import Bernoulli


class StateSpaceGPClassifier(StateSpaceMixin, BaseGPClassifier):
    r"""Gaussian process classification of time series and in additive models, in O(n).

    The latent functions are those of `StateSpaceGPRegressor`; more than two classes are learned one
    against the rest. The posterior is the nearest Gaussian process (variational), with a site at
    every time or, with ``n_inducing``, inducing states.

    Parameters
    ----------
    kernel : Kernel or None, default=None
        As of `StateSpaceGPRegressor`, without a WhiteKernel.
    n_inducing : int, "auto" or None, default=None
        As of `StateSpaceGPRegressor`.
    inducing : {"fixed", "learned"}, default="fixed"
        Whether the places of inducing states are learned.
    posterior : {"auto", "mean_field", "joint"}, default="auto"
        Of several columns: a product of one process a column, which is cheaper, or with the
        dependence between them. "auto" is "joint" for few rows.
    likelihood : {"logit", "probit"}, default="logit"
        Link from f to a probability.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, multiplied into ``sample_weight``.
    optimizer : "auto" or None, default="auto"
        None keeps the kernel's hyper-parameters.
    max_iter : int, default=100
        Iterations of the search of hyper-parameters.
    tol : float, default=1e-7
        Gain of evidence in an iteration, in nats an observation, below which to stop. With less
        than 0.001 nats in all it stops in any case.
    warm_start : bool, default=False
        Start from the kernel of the last fit. Another kernel, likelihood, number of columns or set
        of classes begins anew.
    random_state : int, RandomState instance or None, default=None
        Not used by the fit, which draws nothing.
    device : str or torch.device, default="auto"
        Of the fit; "auto" is "cuda" where there is one, else "cpu". Predictions run on the CPU.
    dtype : {"float64"}, default="float64"
        Single precision is refused.
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
        With the hyper-parameters learned. Of several columns a sum of ActiveDims; if the classes
        differ in it, a CompoundKernel with one a class.
    elbo_ : float
        Evidence bound, in nats, summed over the latent functions. ``partial_fit`` of one column
        leaves it that of the first call.
    intercept_ : float or ndarray of shape (n_classes,)
        What `predict_components` leaves of the mean of f.
    component_kernels_ : list of Kernel
        One a column of `predict_components`.
    inducing_points_ : ndarray of shape (M, 1)
        Times of the inducing states, where there are any.
    offset_ : ndarray of shape (c,)
        Prior means of f: the base rates.
    coupling_ : float
        Of more than two classes, the exponent in :math:`P(k) \propto p_k (1 - p_k)^{-\lambda}`, of
        0, 1/4, ..., 1 that which predicts rows left out best; 1/2 below 100 rows. 0 for two
        classes.
    moderation_ : float
        1: probabilities average over f with all of its posterior variance.
    n_iter_ : int
    history_ : dict of lists
        "solve": evidence an observation after each iteration.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    n_features_in_ : int
    feature_names_in_ : ndarray of str

    See Also
    --------
    StateSpaceGPRegressor : The same for quantities and counts.

    References
    ----------
    .. [1] Adam, Eleftheriadis, Durrande, Artemev and Hensman (2020), Doubly sparse variational
       Gaussian processes.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import StateSpaceGPClassifier
    >>> x = np.linspace(0, 10, 200)[:, None]
    >>> model = StateSpaceGPClassifier().fit(x, np.where(np.sin(x[:, 0]) > 0, "day", "night"))
    >>> model.predict([[1.5], [4.5]])
    array(['day', 'night'], dtype='<U5')
    """

    _parameter_constraints: dict = {
        **BaseGPClassifier._parameter_constraints,
        **StateSpaceMixin._state_space_constraints,
        "likelihood": [StrOptions({"logit", "probit"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        n_inducing=None,
        inducing="fixed",
        posterior="auto",
        likelihood="logit",
        class_weight=None,
        optimizer="auto",
        max_iter=100,
        tol=1e-7,
        warm_start=False,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        verbose=0,
    ):
        self.kernel = kernel
        self.n_inducing = n_inducing
        self.inducing = inducing
        self.posterior = posterior
        self.likelihood = likelihood
        self.class_weight = class_weight
        self.optimizer = optimizer
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.verbose = verbose

    # ---- training ------------------------------------------------------------------------

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None):
        """Learn the hyper-parameters and the posterior of the latent functions.

        Parameters
        ----------
        X : array-like of shape (n, d)
            Times, in any order and units and with repetitions; or several columns, for an additive
            model.
        y : array-like of shape (n,)
            Labels of two classes or more.
        sample_weight : array-like of shape (n,), optional
            Likelihood weights: a weight of 2 equals the row given twice.

        Returns
        -------
        StateSpaceGPClassifier
            Itself.
        """
        self._check_parameters()
        with fit_session(self, X, y, sample_weight=sample_weight, n_stages=1) as session:
            X, codes, sample_weight = self._validate_training(X, y, sample_weight)
            self._learn_rows(session, X, codes, sample_weight)
        return self

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ):
        """Add rows to the posterior; hyper-parameters, base rates and ``coupling_`` stay.

        The first call is a `fit`. Later rows of one column may lie anywhere in time; their sites
        are found given those before. Sites at all times grow with them. With ``n_inducing`` the
        state does not, but for times beyond the inducing states, which get such of their own, as
        densely placed as before. Of several columns the rows are kept, and the posterior is that
        of all at once; a `fit` of more than 1000 rows does not keep them and cannot go on.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        classes : array-like of shape (n_classes,), optional
            All labels there will be; by default those of the first call.
        sample_weight : array-like of shape (n,), optional

        Returns
        -------
        StateSpaceGPClassifier
            Itself.
        """
        self._check_parameters()
        first = not hasattr(self, "_states")
        asked = X, y, sample_weight
        X, codes, sample_weight = self._validate_batch(
            X, y, sample_weight, classes=classes, first=first
        )
        if first:
            with fit_session(self, *asked[:2], sample_weight=asked[2], n_stages=1) as session:
                self._learn_rows(session, X, codes, sample_weight)
            return self
        targets = list(one_vs_rest(codes, len(self.classes_)).T)
        self._add(X, targets, sample_weight, self._likelihood, self._resolve_backend())
        return self

    def _learn_rows(self, session, X, codes: np.ndarray, sample_weight) -> None:
        """Fit and set the attributes that tell of it."""
        Y = one_vs_rest(codes, len(self.classes_))
        self._likelihood = Bernoulli(self.likelihood)
        self.offset_ = self._base_rates(Y, sample_weight)
        given = None
        if self.kernel is not None:
            given = self._resolve_kernel(X, lambda: None)
        signals = self._signals(X, SERIES_LINK_VARIANCE, given)
        with session.stage("solve") as callback:
            self.kernel_, _ = self._learn(
                X,
                list(Y.T),
                sample_weight,
                self._likelihood,
                self.offset_.tolist(),
                signals,
                self._resolve_backend(),
                callback,
            )
        self.moderation_ = 1.0
        self.coupling_ = self._choose_coupling(X, Y, sample_weight)
        if self._learns:
            warn_at_bounds(self.kernel_, self.kernel)

    def _base_rates(self, Y: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        """Base rates, on the scale of f; of classes without rows yet, as if they had one."""
        missing = bool((Y < 0).all(axis=0).any() or (Y > 0).all(axis=0).any())
        return base_rate_offset(Y, sample_weight, link=self.likelihood, cautious=missing)

    def _choose_coupling(
        self, X: np.ndarray, Y: np.ndarray, sample_weight: np.ndarray | None
    ) -> float:
        """How far the claims of several classes count as independent, by rows left out."""
        if len(self.classes_) == 2:
            return 0.0
        if (len(X) if sample_weight is None else sample_weight.sum()) < COUPLING_ROWS:
            return FEW_ROWS_COUPLING
        rows = np.linspace(0, len(X) - 1, min(len(X), LEFT_OUT_ROWS)).astype(np.int64)
        weight = None if sample_weight is None else to_tensor(sample_weight[rows])
        labels = to_tensor(Y[rows])
        moments = self._latent_moments(X[rows])
        found = [
            left_out_moments(self._likelihood, y, mean, var, weight)
            for y, mean, var in zip(labels.T, *(to_tensor(m).T for m in moments), strict=True)
        ]
        mean, var = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
        return best_coupling(self._likelihood, labels, mean, var, weight)

    @property
    def _coupling(self) -> float:
        return self.coupling_

    @property
    def elbo_(self) -> float:
        """Evidence bound, in nats, summed over the latent functions."""
        return self._evidence

    @property
    def intercept_(self) -> float | np.ndarray:
        """What the components leave of the mean of f."""
        offsets = np.array([state.offset for state in self._states])
        return float(offsets[0]) if len(offsets) == 1 else offsets

    # ---- prediction ------------------------------------------------------------------------

    def _latent_mean(self, X):
        return self._moments(X)[0]

    def _latent_mean_and_variance(self, X):
        return self._moments(X)

    @in_few_threads
    def predict_components(self, X: ArrayLike, return_std: bool = False):
        """Predict what each part of the model adds to f, on the scale of the link.

        Of several columns the parts are the columns (those that the kernel names), each about its
        mean over the training rows; of one column, the summands of the kernel. They and
        ``intercept_`` sum to the mean of f.

        Parameters
        ----------
        X : array-like of shape (n, d)
        return_std : bool, default=False
            Also return their standard deviations.

        Returns
        -------
        mean : ndarray of shape (n, p), or (n, p, n_classes) beyond two classes
        std : ndarray of the same shape
            Only when ``return_std`` is True.
        """
        mean, var = self._components(self._validate_prediction(X))
        if len(self.classes_) == 2:
            mean, var = mean[:, :, 0], var[:, :, 0]
        return (mean, np.sqrt(var)) if return_std else mean
