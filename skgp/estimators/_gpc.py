"""Classification under scikit-learn's name and interface: exact, and beyond by another family."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import logit
from sklearn.base import ClassifierMixin
from sklearn.gaussian_process.kernels import CompoundKernel, Kernel
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.utils import check_consistent_length
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._base import resolve_device
from skgp.estimators._classification_data import encode
from skgp.estimators._fitting import FitSession, fit_context, fit_session, within_limits
from skgp.estimators._front_door import FrontDoor, choose_method, classifier_of, validated
from skgp.estimators._gpc_binary import LaplaceBinaryClassifier
from skgp.estimators._parameters import (
    Interval,
    StrOptions,
    keep_parameters,
    options,
    warn_of_idle_options,
)
from skgp.estimators._validation import told_of_text
from skgp.optim.stopping import LossRecorder


class GaussianProcessClassifier(ClassifierMixin, FrontDoor):
    r"""scikit-learn's ``GaussianProcessClassifier``, quicker, and for any number of observations.

    Parameters, attributes and methods are those of
    :class:`sklearn.gaussian_process.GaussianProcessClassifier`: Laplace's approximation of two
    classes, one classifier a class or a pair of classes of more. The user guide ("From
    scikit-learn") says what differs. Beyond some thousand observations another family of skgp takes
    over.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of the latent function. None is ``1.0 * RBF(1.0)``, both fixed, and the default
        kernels of the other methods. Any scikit-learn kernel but a CompoundKernel is exact.
    {optimizer, n_restarts_optimizer}
    max_iter_predict : int, default=100
        Newton steps towards a mode, at most.
    warm_start : bool, default=False
        Without effect: a mode is always sought from that of the last theta.
    {copy_X_train}
    multi_class : {"one_vs_rest", "one_vs_one"}, default="one_vs_rest"
        Of three classes or more, "exact": one classifier a class, or a pair, which has no
        probabilities.
    method : {"auto", "exact", "qsgp", "neighbors", "state_space"}, default="auto"
        "exact" is scikit-learn's model at :math:`O(n^3)`. "qsgp" is `QSGPClassifier`, "neighbors"
        `SWSGPClassifier`, "state_space" `StateSpaceGPClassifier`. "auto" is "exact" up to 2000
        observations and where no other can be (a callable `optimizer`, a kernel that has to be
        called or has a WhiteKernel, "one_vs_one"), then "state_space" for one column, "neighbors"
        for up to three and "qsgp" for more.
    likelihood : {"logit", "probit"}, default="logit"
        The sigmoid that makes probabilities of the latent function.
    {random_state, device}
    n_jobs : int or None, default=None
        Processes of "exact" with three classes or more, as scikit-learn's; threads otherwise.
    {memory_budget, verbose}

    Attributes
    ----------
    method_, reason_ : str
        The method taken, and why.
    base_estimator_ : estimator
        A classifier of two classes, with ``X_train_``, ``y_train_``, ``pi_``, ``W_sr_``, ``L_`` and
        ``kernel_``, or scikit-learn's meta-estimator over several; that of any other method.
    kernel_ : Kernel
        With the hyper-parameters learned; of several classes a CompoundKernel.
    log_marginal_likelihood_value_ : float
        Laplace's approximation in nats, the mean over the classifiers. Of "exact" alone.
    classes_ : ndarray of shape (n_classes,)
    n_classes_ : int
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    sklearn.gaussian_process.GaussianProcessClassifier : The model.
    QSGPClassifier, SWSGPClassifier, StateSpaceGPClassifier : The other methods and their options.
    VecchiaGPClassifier : Thousands of observations, boundaries of fine and coarse detail.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp import GaussianProcessClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = GaussianProcessClassifier(1.0 * RBF(1.0)).fit(X, y)
    >>> round(model.score(X, y), 2), model.method_
    (0.99, 'exact')
    """

    _parameter_constraints = {
        "max_iter_predict": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "multi_class": [StrOptions({"one_vs_rest", "one_vs_one"})],
        "method": [StrOptions({"auto", "exact", "qsgp", "neighbors", "state_space"})],
        "likelihood": [StrOptions({"logit", "probit"})],
    }
    _option_rules = (options("n_restarts_optimizer max_iter_predict", method=("exact",)),)

    def __init__(
        self,
        kernel=None,
        *,
        optimizer="fmin_l_bfgs_b",
        n_restarts_optimizer=0,
        max_iter_predict=100,
        warm_start=False,
        copy_X_train=True,
        random_state=None,
        multi_class="one_vs_rest",
        method="auto",
        likelihood="logit",
        device="auto",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    @property
    def kernel_(self) -> Kernel:
        """The kernel with the hyper-parameters learned; of several classes a CompoundKernel."""
        if self.method_ != "exact" or self.n_classes_ == 2:
            return self.base_estimator_.kernel_
        return CompoundKernel([each.kernel_ for each in self.base_estimator_.estimators_])

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any):
        """Learn the hyper-parameters, then the posterior of the latent functions.

        Parameters
        ----------
        X : array-like of shape (n, d) or list of object
        y : array-like of shape (n,)
            Labels of two classes or more.

        Returns
        -------
        object
            The estimator.
        """
        with fit_session(self, X, y) as session:
            warn_of_idle_options(self, fitted=False)
            X, y = validated(self, X, y, multi_output=False)
            check_classification_targets(y)
            resolve_device(self.device)
            self.classes_ = np.unique(y)
            self.n_classes_ = len(self.classes_)
            if self.n_classes_ == 1:
                raise ValueError(
                    "GaussianProcessClassifier requires 2 or more distinct classes; got "
                    f"{self.n_classes_} class (only class {self.classes_[0]} is present)"
                )
            self.method_, self.reason_ = choose_method(self, X, y)
            self.__dict__.pop("log_marginal_likelihood_value_", None)
            if self.method_ == "exact":
                self._fit_exact(X, y, session)
            else:
                self.base_estimator_ = self._fit_other(classifier_of(self), X, y, session)
        return self

    def _fit_exact(self, X: Any, y: np.ndarray, session: FitSession) -> None:
        """Laplace's approximation of scikit-learn's classifier, one-vs-rest or one-vs-one."""
        base = LaplaceBinaryClassifier(
            self.kernel,
            optimizer=self.optimizer,
            n_restarts_optimizer=self.n_restarts_optimizer,
            max_iter_predict=self.max_iter_predict,
            copy_X_train=self.copy_X_train,
            likelihood=self.likelihood,
            random_state=self.random_state,
            device=self.device,
        )
        with session.stage("hyperparameters") as callback:
            if self.n_classes_ == 2:
                self.base_estimator_ = base.fit(X, y, tell=LossRecorder(callback).tell)
            else:
                several = (
                    OneVsRestClassifier if self.multi_class == "one_vs_rest" else OneVsOneClassifier
                )
                self.base_estimator_ = several(base, n_jobs=self.n_jobs).fit(X, y)
        values = [each.log_marginal_likelihood_value_ for each in self._binary]
        self.log_marginal_likelihood_value_ = np.mean(values)

    @property
    def _binary(self) -> list[LaplaceBinaryClassifier]:
        """The classifiers of two classes each of "exact"."""
        if self.n_classes_ == 2:
            return [self.base_estimator_]
        return list(self.base_estimator_.estimators_)

    @within_limits
    def predict(self, X: Any) -> np.ndarray:
        """Predict the likeliest class of each point.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        ndarray of shape (p,)
        """
        check_is_fitted(self, "base_estimator_")
        return self.base_estimator_.predict(validated(self, X))

    @within_limits
    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict the probabilities of all classes.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        ndarray of shape (p, n_classes)
        """
        check_is_fitted(self, "base_estimator_")
        if self.method_ == "exact" and self.n_classes_ > 2 and self.multi_class == "one_vs_one":
            raise ValueError(
                "one_vs_one multi-class mode does not support predicting probability estimates. "
                "Use one_vs_rest mode instead."
            )
        return self.base_estimator_.predict_proba(validated(self, X))

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the log-odds of the second class, or of each of several.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        ndarray of shape (p,) or (p, n_classes)
        """
        odds = logit(self.predict_proba(X))
        return odds[:, 1] if self.n_classes_ == 2 else odds

    def log_predictive_density(self, X: Any, y: ArrayLike) -> np.ndarray:
        """Return the log-probability of each label, shape (p,), in nats.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object
        y : array-like of shape (p,)

        Returns
        -------
        ndarray of shape (p,)
        """
        check_is_fitted(self, "base_estimator_")
        if self.method_ != "exact":
            return self.base_estimator_.log_predictive_density(validated(self, X), y)
        proba = self.predict_proba(X)
        with told_of_text(None, y):
            check_consistent_length(proba, y)
        codes = encode(np.asarray(y), self.classes_)
        return np.log(proba[np.arange(len(codes)), codes])

    @within_limits
    def latent_mean_and_variance(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent function.

        Parameters
        ----------
        X : array-like of shape (p, d) or list of object

        Returns
        -------
        mean, var : ndarray of shape (p,)
            Of "exact" for two classes alone.
        """
        check_is_fitted(self, "base_estimator_")
        if self.method_ == "exact" and self.n_classes_ > 2:
            raise ValueError(
                "Returning the mean and variance of the latent function f is only supported for "
                f"binary classification, received {self.n_classes_} classes."
            )
        return self.base_estimator_.latent_mean_and_variance(validated(self, X))

    def log_marginal_likelihood(
        self, theta: ArrayLike | None = None, eval_gradient: bool = False, clone_kernel: bool = True
    ):
        """Return Laplace's approximation of the log marginal likelihood, in nats.

        Parameters
        ----------
        theta : array-like of shape (n_theta,) or (n_classifiers * n_theta,), default=None
            Of all classifiers, or one after the other; None is that of ``kernel_``.
        eval_gradient : bool, default=False
            Also return the gradient with respect to theta, of two classes.
        clone_kernel : bool, default=True
            False leaves theta in ``kernel_``.

        Returns
        -------
        value : float
            The mean over the classifiers.
        gradient : ndarray of shape (n_theta,)
            Only when ``eval_gradient`` is True.
        """
        check_is_fitted(self, "base_estimator_")
        if self.method_ != "exact":
            raise ValueError(
                f"The log marginal likelihood needs method='exact'; {self.method_!r} was taken: "
                f"{self.reason_}."
            )
        if theta is None:
            if eval_gradient:
                raise ValueError("Gradient can only be evaluated for theta!=None")
            return self.log_marginal_likelihood_value_
        theta, classifiers = np.asarray(theta, dtype=float), self._binary
        if self.n_classes_ == 2:
            return classifiers[0].log_marginal_likelihood(theta, eval_gradient, clone_kernel)
        if eval_gradient:
            raise NotImplementedError(
                "Gradient of log-marginal-likelihood not implemented for multi-class GPC."
            )
        n_dims, n = classifiers[0].kernel_.n_dims, len(classifiers)
        if len(theta) not in (n_dims, n * n_dims):
            raise ValueError(
                f"Shape of theta must be either {n_dims} or {n * n_dims}. Obtained theta with "
                f"shape {len(theta)}."
            )
        rows = np.broadcast_to(theta.reshape(-1, n_dims) if n_dims else theta, (n, n_dims))
        return np.mean(
            [
                each.log_marginal_likelihood(row, clone_kernel=clone_kernel)
                for each, row in zip(classifiers, rows, strict=True)
            ]
        )
