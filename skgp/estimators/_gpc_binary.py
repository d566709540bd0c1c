"""The exact classifier of two classes, by Laplace's approximation, under scikit-learn's attributes.

The mode is that of `skgp.learning.laplace_evidence`; Rasmussen and Williams (2006), Algorithms 3.1,
3.2 and 5.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.utils.validation import check_is_fitted

from skgp.estimators._base import resolve_device
from skgp.estimators._front_door import check_exact_memory, learn_theta, theta_starts
from skgp.estimators._parameters import keep_parameters
from skgp.inference.exact import condition, variance
from skgp.kernels.training import cross_gram, training_gram
from skgp.learning.laplace_evidence import LaplaceEvidence
from skgp.likelihoods import Bernoulli


class LaplaceBinaryClassifier(ClassifierMixin, BaseEstimator):
    """Two classes; parameters are those of `GaussianProcessClassifier`, and not validated.

    Attributes
    ----------
    kernel_ : Kernel
    classes_ : ndarray of shape (2,)
    X_train_ : ndarray of shape (n, d) or list of object
    y_train_ : ndarray of shape (n,)
        0 and 1.
    pi_, W_sr_ : ndarray of shape (n,)
        At the mode, the probability of the second class and the root of the curvature.
    L_ : ndarray of shape (n, n)
        Lower Cholesky factor of :math:`I + W^{1/2} K W^{1/2}`.
    log_marginal_likelihood_value_ : float
        Laplace's approximation, in nats.
    """

    def __init__(
        self,
        kernel=None,
        *,
        optimizer="fmin_l_bfgs_b",
        n_restarts_optimizer=0,
        max_iter_predict=100,
        copy_X_train=True,
        likelihood="logit",
        random_state=None,
        device="auto",
    ):
        keep_parameters(self, locals())

    def fit(self, X: Any, y: np.ndarray, tell: Any = lambda loss: False):
        """Learn theta and the mode; `tell` hears of minus the evidence, and ends the search."""
        fixed = ConstantKernel(1.0, "fixed") * RBF(1.0, "fixed")
        kernel = fixed if self.kernel is None else clone(self.kernel)
        self.classes_, self.y_train_ = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            raise ValueError(f"y must hold two classes; got {self.classes_.tolist()}.")
        self.X_train_ = np.copy(X) if self.copy_X_train else X
        self.kernel_ = kernel
        check_exact_memory(kernel, X, learns=self.optimizer is not None)
        evidence = self._evidence()

        def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
            values, gradient = evidence(theta)
            return -float(values[0]), -gradient

        if self.optimizer is not None and kernel.n_dims:
            starts = theta_starts(kernel, self.n_restarts_optimizer, self.random_state)
            kernel.theta, _ = learn_theta(objective, kernel, self.optimizer, starts, tell=tell)
            kernel._check_bounds_params()
        fit = evidence.fit(kernel.theta)
        self.log_marginal_likelihood_value_ = np.float64(fit.log_evidence[0])
        self._weights, self.W_sr_ = (a[:, 0].cpu().numpy() for a in (fit.alpha, fit.root))
        K = np.asarray(kernel(self.X_train_), dtype=float)
        latent = torch.from_numpy(K @ self._weights)
        self.pi_ = Bernoulli(self.likelihood).prob(latent, torch.zeros_like(latent)).numpy()
        B = self.W_sr_[:, None] * K * self.W_sr_
        B[np.diag_indices_from(B)] += 1.0
        self.L_ = condition(B, np.zeros((len(B), 1)))[0]
        return self

    def _evidence(self) -> LaplaceEvidence:
        """Laplace's log evidence of the training labels, as a function of theta."""
        gram = training_gram(
            self.kernel_, self.X_train_, resolve_device(self.device, len(self.y_train_))
        )
        labels = torch.tensor(2.0 * self.y_train_[:, None] - 1.0, dtype=torch.float64)
        return LaplaceEvidence(
            gram,
            labels if gram.few else labels.to(gram.device),
            Bernoulli(self.likelihood),
            max_newton=self.max_iter_predict,
        )

    def latent_mean_and_variance(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance (p,) of the latent function at X."""
        check_is_fitted(self)
        K = cross_gram(self.kernel_, X, self.X_train_)  # (p, n)
        var = variance(self.L_, self.W_sr_ * K, self.kernel_.diag(X))
        return K @ self._weights, np.maximum(var, 0.0)

    def predict(self, X: Any) -> np.ndarray:
        """The likelier class of each point, by the sign of the latent mean; the second of a tie."""
        check_is_fitted(self)
        mean = cross_gram(self.kernel_, X, self.X_train_) @ self._weights
        return np.where(mean >= 0, self.classes_[1], self.classes_[0])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (p, 2), averaged over the latent function."""
        mean, var = map(torch.from_numpy, self.latent_mean_and_variance(X))
        likelihood = Bernoulli(self.likelihood)
        pair = torch.stack([likelihood.prob(-mean, var), likelihood.prob(mean, var)], dim=1)
        return (pair / pair.sum(1, keepdim=True)).numpy()  # quadratures of each, 1e-10 from one

    def log_marginal_likelihood(
        self, theta: Any = None, eval_gradient: bool = False, clone_kernel: bool = True
    ):
        """As that of `GaussianProcessClassifier`."""
        if theta is None:
            if eval_gradient:
                raise ValueError("Gradient can only be evaluated for theta!=None")
            return self.log_marginal_likelihood_value_
        theta = np.array(theta, dtype=float)
        if not clone_kernel:
            self.kernel_.theta = theta
        values, gradient = self._evidence()(theta)
        return (np.float64(values[0]), gradient) if eval_gradient else np.float64(values[0])
