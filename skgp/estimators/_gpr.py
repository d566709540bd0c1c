"""Regression under scikit-learn's name and interface: exact, and beyond it by another family."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import MultiOutputMixin, RegressorMixin, clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._base import resolve_device
from skgp.estimators._fitting import FitSession, fit_context, fit_session
from skgp.estimators._front_door import (
    FrontDoor,
    check_exact_memory,
    choose_method,
    evidence_or_infinity,
    learn_theta,
    regressor_of,
    theta_starts,
    validated,
)
from skgp.estimators._gpr_prediction import RegressorPredictions
from skgp.estimators._parameters import (
    Interval,
    StrOptions,
    keep_parameters,
    options,
    warn_of_idle_options,
)
from skgp.estimators._predictive import is_constant
from skgp.inference.exact import condition
from skgp.kernels.training import training_gram
from skgp.learning.evidence import TargetsEvidence
from skgp.linalg import NotPositiveDefiniteError
from skgp.optim.stopping import LossRecorder


class GaussianProcessRegressor(RegressorPredictions, MultiOutputMixin, RegressorMixin, FrontDoor):
    r"""scikit-learn's ``GaussianProcessRegressor``, quicker, and for any number of observations.

    Parameters, attributes, methods and numbers are those of
    :class:`sklearn.gaussian_process.GaussianProcessRegressor`; the user guide ("From scikit-learn")
    says what differs. Beyond some thousand observations another family of skgp takes the same model
    over.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f. None is ``ConstantKernel() * RBF()``, and the default kernels of the other
        methods. Any scikit-learn kernel is exact: those that skgp does not know are called.
    alpha : float or ndarray of shape (n,), default=1e-10
        Added to the diagonal of the covariance: a noise variance of all or of each observation
        (of the scaled targets with `normalize_y`), which predictions leave out. One that differs
        from observation to observation is "exact" alone; other estimators have ``sample_weight`` in
        its place.
    {optimizer}
    n_restarts_optimizer : int, default=0
        Further starts of the search, drawn within the bounds, which have to be finite. Those of up
        to 150 observations run as one batch.
    normalize_y : bool, default=False
        Centre and scale the targets; ``kernel_`` is then in units of the scaled target.
    {copy_X_train}
    n_targets : int or None, default=None
        Targets of draws and predictions before `fit`.
    method : {"auto", "exact", "qsgp", "vecchia", "neighbors", "state_space"}, default="auto"
        "exact" is scikit-learn's model at :math:`O(n^3)`. "qsgp" is `QSGPRegressor`, "vecchia"
        `VecchiaGPRegressor`, "neighbors" the same, or `SWSGPRegressor` unless noise is Gaussian,
        "state_space" `StateSpaceGPRegressor`, each with the kernel and the noise given. "auto" is
        "exact" up to 2000 observations and where no other can be (a callable `optimizer`, a kernel
        that has to be called, an `alpha` that differs from observation to observation), then
        "state_space" for one column and one target, "vecchia" for more than 10000 observations of
        two or three, and "qsgp", which compares routes, neighbours among them, on held-out data
        beyond 40000 observations, or where the kernel matrix does not fit in memory.
    likelihood : {"gaussian", "laplace", "student_t", "poisson"}, default="gaussian"
        Observation noise; others than "gaussian" are not "exact": "laplace" (outliers) is "qsgp",
        "student_t" (outliers) and "poisson" (counts) are "state_space" or "neighbors".
    {random_state, device}
    n_jobs : int or None, default=None
        Threads. None is one, but all that torch has for large matrix operations.
    {memory_budget, verbose}

    Attributes
    ----------
    method_ : str
        The method taken.
    reason_ : str
        Why.
    {kernel_}
    log_marginal_likelihood_value_ : float
        In nats, of "exact", and of other methods where they have it.
    X_train_ : ndarray of shape (n, d) or list of object
        This and the next three of "exact" alone.
    y_train_ : ndarray of shape (n,) or (n, t)
        Scaled with `normalize_y`.
    L_ : ndarray of shape (n, n)
        Lower Cholesky factor of the covariance of the training targets.
    alpha_ : ndarray of shape (n,) or (n, t)
        Weights of the predictive mean.
    estimator_ : estimator
        That of any other method.
    noise_variance_ : float or ndarray of shape (t,)
        Of the observations, in squared units of y: that of WhiteKernel summands, and of any
        `alpha` for all. Not where a WhiteKernel is multiplied by another kernel than a constant.
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    sklearn.gaussian_process.GaussianProcessRegressor : The model.
    QSGPRegressor, SWSGPRegressor, StateSpaceGPRegressor, VecchiaGPRegressor : The other methods.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.gaussian_process.kernels import RBF, WhiteKernel
    >>> from skgp import GaussianProcessRegressor
    >>> X = np.linspace(0, 10, 60)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> model = GaussianProcessRegressor(1.0 * RBF() + WhiteKernel(1e-3), random_state=0)
    >>> mean, std = model.fit(X, y).predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.01)
    True
    >>> model.method_, model.reason_
    ('exact', '60 observations are no more than 2000')
    """

    _parameter_constraints = {
        "alpha": [Interval(Real, 0, None, closed="left"), np.ndarray],
        "normalize_y": ["boolean"],
        "n_targets": [Interval(Integral, 1, None, closed="left"), None],
        "method": [StrOptions({"auto", "exact", "qsgp", "vecchia", "neighbors", "state_space"})],
        "likelihood": [StrOptions({"gaussian", "laplace", "student_t", "poisson"})],
    }
    _option_rules = (
        options("n_restarts_optimizer", method=("exact",)),
        options("alpha", likelihood=("gaussian",)),
    )

    def __init__(
        self,
        kernel=None,
        *,
        alpha=1e-10,
        optimizer="fmin_l_bfgs_b",
        n_restarts_optimizer=0,
        normalize_y=False,
        copy_X_train=True,
        n_targets=None,
        method="auto",
        likelihood="gaussian",
        random_state=None,
        device="auto",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any):
        """Learn the hyper-parameters, then the posterior of f.

        Parameters
        ----------
        X : array-like of shape (n, d) or list of object
        y : array-like of shape (n,) or (n, t)

        Returns
        -------
        object
            The estimator.
        """
        with fit_session(self, X, y) as session:
            warn_of_idle_options(self, fitted=False)
            X, y = validated(self, X, y, multi_output=True, y_numeric=True)
            n_targets = y.shape[1] if y.ndim > 1 else 1
            if self.n_targets not in (None, n_targets):
                raise ValueError(
                    "The number of targets seen in `y` is different from the parameter "
                    f"`n_targets`. Got {n_targets} != {self.n_targets}. Leave n_targets at None, "
                    "or give as many columns of y."
                )
            alpha = self._checked_alpha(y)
            for name in ("X_train_", "y_train_", "L_", "alpha_", "estimator_", "_alpha"):
                self.__dict__.pop(name, None)
            self.method_, self.reason_ = choose_method(self, X, y)
            if self.method_ == "exact":
                self._fit_exact(X, y, alpha, session)
            else:
                self._fit_estimator(X, y.ravel() if n_targets == 1 else y, alpha, session)
        return self

    def _fit_exact(
        self, X: Any, y: np.ndarray, alpha: float | np.ndarray, session: FitSession
    ) -> None:
        """The exact process of `X_train_`: hyper-parameters, factor and weights."""
        device = resolve_device(self.device, len(y))
        kernel = ConstantKernel() * RBF() if self.kernel is None else clone(self.kernel)
        check_exact_memory(kernel, X, learns=self.optimizer is not None)
        y = self._standardised(y)
        self.X_train_ = np.copy(X) if self.copy_X_train else X
        self.y_train_ = np.copy(y) if self.copy_X_train else y
        Y = np.asarray(y, dtype=float).reshape(len(y), -1)
        gram = training_gram(kernel, self.X_train_, device)
        # A target without a scale tells nothing of the others' noise.
        scaled = Y[:, Y.any(axis=0)] if self.normalize_y and Y.any() else Y
        theta, least = kernel.theta, None
        if self.optimizer is not None and kernel.n_dims:
            evidence = TargetsEvidence(gram, scaled, alpha)
            starts = theta_starts(kernel, self.n_restarts_optimizer, self.random_state)
            with session.stage("hyperparameters") as callback:
                theta, least = learn_theta(
                    evidence,
                    kernel,
                    self.optimizer,
                    starts,
                    of_many=evidence.of_many if evidence.has_many else None,
                    n_rows=len(y),
                    tell=LossRecorder(callback).tell,
                )
            kernel.theta = theta
            kernel._check_bounds_params()
        if least is None or scaled.shape != Y.shape:
            least = evidence_or_infinity(TargetsEvidence(gram, Y, alpha), theta)[0]
        self.log_marginal_likelihood_value_ = -np.float64(least)
        try:
            try:
                self.L_, weights = condition(_raised(kernel(self.X_train_), alpha), Y)
            except NotPositiveDefiniteError:  # rounded otherwise, it had a factor in the search
                K = gram(theta)[0]
                K = K.cpu().numpy() if isinstance(K, torch.Tensor) else K
                self.L_, weights = condition(_raised(K, alpha), Y)
        except NotPositiveDefiniteError as error:
            raise np.linalg.LinAlgError(
                f"The kernel, {kernel}, is not returning a positive definite matrix. Try gradually "
                "increasing the 'alpha' parameter of your GaussianProcessRegressor estimator. "
                f"{error}"
            ) from error
        self.alpha_ = weights.reshape(y.shape)
        self.kernel_, self._alpha = kernel, float(alpha) if np.ndim(alpha) == 0 else 0.0

    def _standardised(self, y: np.ndarray) -> np.ndarray:
        """Set mean and scale of y (n,) or (n, t), each () or (t,), and return what is scaled.

        Scaled targets that are constant are 0.
        """
        self._y_train_mean, self._y_train_std = np.zeros(y.shape[1:]), np.ones(y.shape[1:])
        if not self.normalize_y:
            return y
        std = y.std(axis=0)
        constant = is_constant(std, y)
        self._y_train_mean = y.mean(axis=0)
        self._y_train_std = np.where(constant, 1.0, std)
        return np.where(constant, 0.0, (y - self._y_train_mean) / self._y_train_std)

    def _fit_estimator(
        self, X: np.ndarray, y: np.ndarray, alpha: float | np.ndarray, session: FitSession
    ) -> None:
        """The estimator of this package that stands behind ``method_``, fitted."""
        estimator, self._alpha = regressor_of(self, y, float(alpha))
        self.estimator_ = self._fit_other(estimator, X, y, session)
        self.kernel_ = estimator.kernel_
        self._y_train_mean, self._y_train_std = estimator.y_mean_, estimator.y_scale_
        self.__dict__.pop("log_marginal_likelihood_value_", None)
        if hasattr(estimator, "log_marginal_likelihood_value_"):
            self.log_marginal_likelihood_value_ = estimator.log_marginal_likelihood_value_

    def log_marginal_likelihood(
        self, theta: ArrayLike | None = None, eval_gradient: bool = False, clone_kernel: bool = True
    ):
        """Return the log marginal likelihood of the (scaled) training targets, in nats.

        Parameters
        ----------
        theta : array-like of shape (n_theta,) or None, default=None
            Logarithms of the kernel's free hyper-parameters; None is those of ``kernel_``. Of
            "exact" alone.
        eval_gradient : bool, default=False
            Also return the gradient with respect to theta.
        clone_kernel : bool, default=True
            False leaves theta in ``kernel_``.

        Returns
        -------
        value : float
            Minus infinity where the covariance has no Cholesky factor.
        gradient : ndarray of shape (n_theta,)
            Only when ``eval_gradient`` is True.
        """
        check_is_fitted(self, "kernel_")
        if theta is None:
            if eval_gradient:
                raise ValueError("Gradient can only be evaluated for theta!=None")
            return self.log_marginal_likelihood_value_
        if self._other is not None:
            raise ValueError(
                f"The log marginal likelihood at other theta needs method='exact'; {self.method_!r}"
                f" was taken: {self.reason_}."
            )
        theta = np.array(theta, dtype=float)
        if not clone_kernel:
            self.kernel_.theta = theta
        Y = np.asarray(self.y_train_, dtype=float).reshape(len(self.y_train_), -1)
        gram = training_gram(self.kernel_, self.X_train_, resolve_device(self.device, len(Y)))
        evidence = TargetsEvidence(gram, Y, self._checked_alpha(self.y_train_))
        value, gradient = evidence_or_infinity(evidence, theta)
        value = np.float64(value)  # scikit-learn's type, which keeps its digits beside a float32
        return (-value, -gradient) if eval_gradient else -value

    def _checked_alpha(self, y: np.ndarray) -> float | np.ndarray:
        """`alpha` as a number or an array (n,)."""
        if np.ndim(self.alpha) == 0:
            return float(self.alpha)
        if self.alpha.shape not in ((1,), (len(y),)):
            raise ValueError(
                "alpha must be a scalar or an array with same number of entries as y. "
                f"({self.alpha.shape[0]} != {y.shape[0]})"
            )
        return float(self.alpha[0]) if np.ptp(self.alpha) == 0 else self.alpha

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.requires_fit = False
        return tags


def _raised(K: np.ndarray, alpha: float | np.ndarray) -> np.ndarray:
    """K + diag(alpha), a copy."""
    A = np.array(K, dtype=float)
    A[np.diag_indices_from(A)] += alpha
    return A
