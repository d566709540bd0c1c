"""Sparse GP classifiers trained on the log-loss: the face of :mod:`skgp.models.dlm` for labels."""

import numpy as np
from numpy.typing import ArrayLike
from sklearn.gaussian_process.kernels import Kernel

from skgp.estimators._backend import Backend
from skgp.estimators._base_classifier import BaseGPClassifier
from skgp.estimators._callbacks import fit_session
from skgp.estimators._compat import StrOptions, fit_context, warn_at_bounds
from skgp.estimators._default_kernel import default_classification_kernels
from skgp.estimators._dlm_common import SparseGPMixin
from skgp.estimators._labels import base_rate_offset, one_vs_rest
from skgp.likelihoods import Bernoulli
from skgp.models.dlm.data import SparseData
from skgp.models.dlm.families import FixedFamily
from skgp.models.dlm.objective import Objective
from skgp.models.replicates import distinct_observations

_REGRESSION_OBJECTIVES = ("square_loss", "fitc")


class DLMGPClassifier(SparseGPMixin, BaseGPClassifier):
    r"""Sparse Gaussian process classification trained on the loss that it is judged by."""

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
        n_inducing=200,
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
        a class may come late. Later calls keep its hyper-parameters, inducing points and base
        rates; the posterior is near that of all rows at once, and depends a little on their order.

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
        self._add_rows(data, self._log_loss_or_bound(len(data), learn=False), backend)
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
        Y = np.vstack([Y, np.ones_like(Y[:1]), -np.ones_like(Y[:1])])
        if sample_weight is not None:
            sample_weight = np.append(sample_weight, [sample_weight.mean()] * 2)
        return base_rate_offset(Y, sample_weight, link=self.likelihood)

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
            objective = self._log_loss_or_bound(len(data))
            self._fit_sparse(kernels, data, objective, offset, backend, callback)
        self._likelihood = Bernoulli(self.likelihood)
        self.kernel_ = self._posterior.kernel
        self.offset_ = offset
        self.moderation_ = 1.0  # the loss averages over f with its whole variance
        if self.kernel is not None and self.optimizer is not None:
            warn_at_bounds(self.kernel_)

    def _kernels(self, X: np.ndarray, sample_weight: np.ndarray | None) -> list[Kernel]:
        """Kernels of f to choose among."""
        if self.kernel is None:
            return default_classification_kernels(X, sample_weight)
        return [self._resolve_kernel(X, lambda: None)]

    def _data(
        self, X: np.ndarray, codes: np.ndarray, sample_weight: np.ndarray | None, backend: Backend
    ) -> SparseData:
        """Rows as tensors, those of equal inputs and labels merged."""
        rows = distinct_observations(X, codes.astype(np.float64), sample_weight, backend.device)
        Y = one_vs_rest(rows.y.cpu().numpy().astype(np.int64), len(self.classes_))
        weight = None if rows.weight is None else rows.weight.to(backend.dtype)
        return SparseData(rows.X.to(backend.dtype), backend.tensor(Y), weight)

    def _log_loss_or_bound(self, n_rows: int, *, learn: bool = True) -> Objective:
        """What to minimise, as the parameters say."""
        family = FixedFamily(Bernoulli(self.likelihood))
        return self._objective(self.objective, family, n_rows, learn=learn)

    # ---- prediction ------------------------------------------------------------------------

    def _latent_mean(self, X):
        return self._means(X)

    def _latent_mean_and_variance(self, X):
        return self._moments(X)
