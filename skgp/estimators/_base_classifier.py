r"""What every classifier shares: labels, weights of classes, and the predictive interface.

A concrete classifier derives from `BaseGPClassifier`, has an ``__init__`` that stores its
parameters (``class_weight`` among them), and extends ``_parameter_constraints``. Its latent
processes :math:`f_1, \ldots, f_c` are one a column of the coding :math:`Y \in \{-1, +1\}^{n \times
c}`: with two classes there is one column (c = 1), +1 for ``classes_[1]``; with more, column k sets
class k against the rest. The estimator provides

===================================== ==========================================================
``fit(X, y, sample_weight=None)``     see the sketch below
``_latent_mean(X)``                   :math:`E[f]`, shape (n, c); the fast path of predictions
``_latent_mean_and_variance(X)``      :math:`E[f], V[f]`, shapes (n, c), (n, c)
``_likelihood``                       set by ``fit``: a `skgp.likelihoods.Bernoulli`
``moderation_``                       set by ``fit``: factor of V[f] that predictions average
                                      over, 0 for those at the mean
===================================== ==========================================================

The hooks take a float64 array X (n, d) that may be read-only, in the units of the user, and return
float64 arrays, the same for a row whatever rows come with it. It may also override

===================================== ==========================================================
``_bytes_per_row()``                  memory that the hooks above take for a row of X
``_log_class_probability(mean, var)`` :math:`\log P(Y = +1)` given the moments of f, shape (n, c)
``_coupling``                         of more than two classes, :math:`\lambda` in
                                      :math:`P(k) \propto p_k (1 - p_k)^{-\lambda}`; 0 by default
===================================== ==========================================================

the second of which receives ``var=None`` where ``moderation_`` is 0. It must be that of a
symmetric link, :math:`P(Y = -1 \mid m, v) = P(Y = +1 \mid -m, v)`, as logit and probit are, and it
works in logarithms: probabilities near 0 keep their digits. A ``fit`` reads::

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X, y, sample_weight=None):
        with fit_session(self, X, y, sample_weight=sample_weight, n_stages=2) as session:
            X, codes, sample_weight = self._validate_training(X, y, sample_weight)
            Y = one_vs_rest(codes, len(self.classes_))
            self._likelihood = Bernoulli(self.likelihood)
            offset = base_rate_offset(Y, sample_weight, link=self.likelihood)
            backend = self._resolve_backend()
            kernel = self._resolve_kernel(X, lambda: default_kernel(X))
            with session.stage("solve", max_iter=self.max_iter) as callback:
                ...
            self.kernel_ = kernel.clone_with_theta(theta)
            warn_at_bounds(self.kernel_, self.kernel)
            self.moderation_ = ...
        return self

and a ``partial_fit`` calls ``_validate_batch`` instead of ``_validate_training``. Both drop rows of
weight 0, a class that has no other rows included, and fold ``class_weight`` into the weights: what
follows sees positive weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin
from sklearn.gaussian_process.kernels import Kernel
from sklearn.utils import gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from skgp.estimators._base import BaseGP, keep_weighted_rows, to_tensor
from skgp.estimators._fitting import in_few_threads
from skgp.estimators._parameters import StrOptions
from skgp.estimators._validation import (
    bounded_inputs,
    class_weights,
    distinct_labels,
    encode,
    natural_dtype,
    validate_training_data,
)
from skgp.estimators.defaults import LINK_ELEMENTS, LOG_ZERO
from skgp.kernels import split_noise
from skgp.likelihoods import Bernoulli


class BaseGPClassifier(ClassifierMixin, BaseGP):
    r"""The predictive interface of every classifier.

    With two classes the probability of ``classes_[1]`` is :math:`P(Y = +1)`; with more, the
    probabilities of one class against the rest are divided by their sum. The hooks that a concrete
    classifier provides are listed at the top of this module.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels, in order.
    moderation_ : float
        Probabilities average over f with this factor of its posterior variance; 0 takes f at its
        mean.
    interrupted_ : bool
        Whether Ctrl-C stopped the fit.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **BaseGP._parameter_constraints,
        "class_weight": [dict, StrOptions({"balanced"}), None],
    }

    _likelihood: Bernoulli

    @property
    def _coupling(self) -> float:
        """How far the claims of several classes count as independent of each other."""
        return 0.0

    def _log_class_probability(self, mean: np.ndarray, var: np.ndarray | None) -> np.ndarray:
        """Return log P(Y = +1) for f ~ N(mean, var), or f = mean where var is None.

        Parameters
        ----------
        mean, var : ndarray of shape (n, c)

        Returns
        -------
        ndarray of shape (n, c)
            In nats.
        """
        moments = [to_tensor(array) for array in (mean, var) if array is not None]
        log_prob = self._likelihood.log_prob if var is None else self._likelihood.log_predictive
        # Quadrature holds many nodes an element at once.
        parts = [
            log_prob(torch.ones_like(moments[0][rows]), *(array[rows] for array in moments))
            for rows in gen_batches(len(mean), max(1, LINK_ELEMENTS // mean.shape[1]))
        ]
        return torch.cat(parts).numpy()

    # ---- training ------------------------------------------------------------------------

    def _validate_training(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Set ``classes_`` and return X (n, d), codes (n,) and the weights (n,) or None.

        Codes are indices into ``classes_``; ``class_weight`` is folded into the weights.

        Raises
        ------
        ValueError
            If X or y hold NaN or infinity, if y does not hold labels of two classes or more (rows
            of weight 0 do not count), if more than two classes have one row each, or if the
            weights of rows or classes are out of range.
        TypeError
            If X is sparse.
        """
        X, y, sample_weight = self._validate_rows(X, y, sample_weight, reset=True)
        classes = distinct_labels(y, "y")
        if len(classes) < 2:
            rows = "" if sample_weight is None else ", in the rows of positive sample_weight"
            raise ValueError(
                f"y holds one class, {classes.tolist()[0]!r}{rows}; a classifier needs two classes "
                "or more. Give rows of another class."
            )
        if len(classes) == len(y) > 2:
            raise ValueError(
                f"y holds {len(classes)} classes in {len(y)} rows: each row is a class of its own. "
                "Merge classes, or use a regressor if y is a quantity."
            )
        codes = encode(y, classes)
        sample_weight = self._fold_class_weight(classes, codes, sample_weight)
        self.classes_ = classes
        self._begin_fit()
        return X, codes, sample_weight

    def _validate_batch(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        classes: ArrayLike | None = None,
        first: bool,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """As `_validate_training`, for one call of ``partial_fit``.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,) or None, default=None
        classes : array-like of shape (n_classes,) or None, default=None
            All labels of the stream; None takes those of y in the first call.
        first : bool
            Whether this call begins a stream: it sets ``classes_`` and the columns of X.

        Raises
        ------
        ValueError
            As `_validate_training`; if y holds a label that is not in ``classes_``, if `classes`
            differs from that of the first call, or if ``class_weight`` is "balanced".
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs all rows at once and cannot be had from "
                "partial_fit; give a dictionary, or use fit."
            )
        X, y, sample_weight = self._validate_rows(X, y, sample_weight, reset=first)
        if classes is not None:
            classes = distinct_labels(classes, "classes")
        if first:
            known = distinct_labels(y, "y") if classes is None else classes
            if len(known) < 2:
                raise ValueError(
                    f"partial_fit knows of one class, {known.tolist()[0]!r}; a classifier needs "
                    "two classes or more. Name all of them by classes= in the first call."
                )
        else:
            known = self.classes_
            if classes is not None and not np.array_equal(classes, known):
                raise ValueError(
                    f"classes={classes.tolist()} differs from that of the first call of "
                    f"partial_fit, {known.tolist()}. Leave it out, or call fit to begin anew."
                )
        codes = encode(y, known)
        sample_weight = self._fold_class_weight(known, codes, sample_weight)
        self.classes_ = known
        if first:
            self._begin_fit(informed=len(np.unique(codes)) > 1)
        return X, codes, sample_weight

    def _validate_rows(self, X, y, sample_weight, *, reset: bool):
        """Check rows, labels as such, and weights; drop the rows of weight 0."""
        X, y = validate_training_data(self, X, y, reset=reset)
        y = natural_dtype(y)
        distinct_labels(y, "y")  # says what is wrong with a mixture, which the next line does not
        check_classification_targets(y)
        return keep_weighted_rows(X, y, sample_weight)

    def _fold_class_weight(
        self, classes: np.ndarray, codes: np.ndarray, sample_weight: np.ndarray | None
    ) -> np.ndarray | None:
        """Return the weight of each row times that of its class, or None if all count as one."""
        if self.class_weight is None:
            return sample_weight
        weights = class_weights(self.class_weight, classes, codes, sample_weight)[codes]
        return weights if sample_weight is None else weights * sample_weight

    def _resolve_kernel(self, X: np.ndarray, default: Callable[[], Kernel]) -> Kernel:
        """As `BaseGP._resolve_kernel`; a classifier has no Gaussian noise.

        Raises
        ------
        ValueError
            Also if the kernel has a WhiteKernel summand.
        """
        kernel = super()._resolve_kernel(X, default)
        if split_noise(kernel)[1] is not None:
            raise ValueError(
                f"kernel={kernel} has a WhiteKernel, which is the noise of a Gaussian likelihood; "
                f"{type(self).__name__} has none. Leave the WhiteKernel out."
            )
        return kernel

    # ---- the public interface -----------------------------------------------------------

    @in_few_threads
    def _log_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the log-probability of each class, shape (n, n_classes)."""
        if self.moderation_:
            mean, var = self._latent_moments(X)
            var = self.moderation_ * var
        else:
            mean, var = self._by_chunks(self._latent_mean, X), None
        log_proba = self._log_class_probability(mean, var)
        if len(self.classes_) == 2:
            log_proba = np.hstack([self._log_class_probability(-mean, var), log_proba])
        elif self._coupling:
            others = np.maximum(self._log_class_probability(-mean, var), LOG_ZERO)
            log_proba = log_proba - self._coupling * others
        log_proba = np.maximum(log_proba, LOG_ZERO)
        # Beside a great common part the sum of the classes would be lost to rounding.
        log_proba = log_proba - log_proba.max(axis=1, keepdims=True)
        return log_proba - logsumexp(log_proba, axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable class of each row.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,)
            Of the dtype of ``classes_``.
        """
        log_proba = self._log_proba(self._validate_prediction(X))
        return self.classes_[log_proba.argmax(axis=1)]

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the probability of each class.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n, n_classes)
            In the order of ``classes_``; rows sum to 1.
        """
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Return the log-probability of each class.

        It is exact where the probability itself would be rounded to 0.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n, n_classes)
            In nats, in the order of ``classes_``.
        """
        return self._log_proba(self._validate_prediction(X))

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        r"""Return the log-odds of the classes, :math:`\log p - \log(1 - p)`.

        It orders rows and classes as `predict_proba` does, and is finite where those are 0 or 1.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,), or (n, n_classes) beyond two
            With two classes, the log-odds of ``classes_[1]``; else one column a class.
        """
        log_proba = self._log_proba(self._validate_prediction(X))
        if len(self.classes_) == 2:
            return log_proba[:, 1] - log_proba[:, 0]
        return log_proba - log_complement(log_proba)

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return the log-probability that each row has its label.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
            Labels out of ``classes_``.

        Returns
        -------
        ndarray of shape (n,)
            In nats. Minus its mean is the log-loss.

        Raises
        ------
        ValueError
            If there is a label that ``fit`` did not see; names it.
        """
        check_is_fitted(self)
        X, y = validate_data(self, X, y, reset=False, dtype=np.float64)
        X = bounded_inputs(X, self.kernel_.is_stationary())
        codes = encode(y, self.classes_)
        return self._log_proba(X)[np.arange(len(codes)), codes]

    def latent_mean_and_variance(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the posterior mean and variance of the latent processes f.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        mean, var : ndarray of shape (n,), or (n, n_classes) beyond two classes
            In the scale of the link. Large mean values favour ``classes_[1]``, or the class of
            the column against all others.
        """
        mean, var = super().latent_mean_and_variance(X)
        return (mean[:, 0], var[:, 0]) if len(self.classes_) == 2 else (mean, var)


def log_complement(log_proba: np.ndarray) -> np.ndarray:
    r"""Return :math:`\log(1 - p_k)` for each class of each row, without cancellation.

    Parameters
    ----------
    log_proba : ndarray of shape (n, n_classes)
        Rows sum to 1 in probability.

    Returns
    -------
    ndarray of shape (n, n_classes)
    """
    top = log_proba.argmax(axis=1)[:, None]
    others = log_proba.copy()
    np.put_along_axis(others, top, -np.inf, axis=1)
    # At most 1/2, so that 1 - p is exact to rounding; that of the likeliest class is a sum.
    complement = np.log1p(-np.exp(others))
    np.put_along_axis(complement, top, logsumexp(others, axis=1, keepdims=True), axis=1)
    return complement
