r"""What every classifier shares: labels, weights of classes, and the predictive interface.

A concrete classifier derives from `BaseGPClassifier`, or `StreamingGPClassifier` where it has a
``partial_fit``; has an ``__init__`` that stores its parameters (``class_weight`` among them); and
says the constraints of its own in ``_parameter_constraints``. Its latent processes
:math:`f_1, \ldots, f_c` are one a column of the coding :math:`Y \in \{-1, +1\}^{n \times c}`: with
two classes there is one column (c = 1), +1 for ``classes_[1]``; with more, column k sets class k
against the rest. The estimator provides

===================================== ==========================================================
``_learn(data, session, backend)``    fits, as below
``_update(data, backend)``            changes the posterior by more data, for ``partial_fit``
``_means(X)``                         :math:`E[f]`, shape (n, c); the fast path of predictions
``_moments(X)``                       :math:`E[f], V[f]`, shapes (n, c), (n, c)
``_likelihood``                       set by ``_learn``: a `skgp.likelihoods.Bernoulli`
``moderation_``                       set by ``_learn``: factor of V[f] that predictions average
                                      over, 0 for those at the mean
===================================== ==========================================================

The data of the first two are validated and on the CPU; their y (n,) are indices into ``classes_``.
Rows of weight 0 are dropped, a class that has no other rows included, and ``class_weight`` is
folded into the weights. The latent hooks take a float64 array X (n, d) that may be read-only, in
the units of the user, and return float64 arrays, the same for a row whatever rows come with it. It
may also override

===================================== ==========================================================
``_check_parameters()``               refuses parameters that do not go together
``_bytes_per_row()``                  memory that the latent hooks take for a row of X
``_log_class_probability(mean, var)`` :math:`\log P(Y = +1)` given the moments of f, shape (n, c)
``coupling_``                         of more than two classes, as below; 0 by default
===================================== ==========================================================

the third of which receives ``var=None`` where ``moderation_`` is 0. It must be that of a
symmetric link, :math:`P(Y = -1 \mid m, v) = P(Y = +1 \mid -m, v)`, as logit and probit are, and it
works in logarithms: probabilities near 0 keep their digits. A fit reads::

    def _learn(self, data, session, backend, *, stream=False):
        self._set_link(data)
        kernels = self._kernels(data)
        with session.stage("solve", max_iter=self.max_iter) as callback:
            ...
        self.kernel_ = kernel.clone_with_theta(theta)
        self._warn_at_bounds()
        self.moderation_ = ...
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.special import logsumexp
from sklearn.base import ClassifierMixin
from sklearn.gaussian_process.kernels import Kernel
from sklearn.metrics import accuracy_score
from sklearn.utils import gen_batches

from skgp.data import Data
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._blocks import in_memory, over_rows, training_blocks
from skgp.estimators._classification_data import ClassificationData, encode
from skgp.estimators._fitting import fit_context, fit_session, within_limits
from skgp.estimators._kernels import default_classification_kernels, refuse_noise
from skgp.estimators._validation import check_targets
from skgp.estimators.defaults import (
    FEW_LABEL_SCALE_STD,
    FEW_LABELS,
    LABEL_SCALE_STD,
    LINK_ELEMENTS,
    LOG_ZERO,
    RARE_LABELS,
    RARE_SHARE,
)
from skgp.learning.classification_hyperparameters import rare_total


class BaseGPClassifier(ClassifierMixin, ClassificationData):
    r"""The predictive interface of every classifier.

    With two classes the probability of ``classes_[1]`` is :math:`P(Y = +1)`; with more, the
    probabilities of one class against the rest are divided by their sum. The hooks that a concrete
    classifier provides are listed at the top of this module.

    Attributes
    ----------
    coupling_ : float
        Beyond two classes :math:`\lambda` in :math:`P(y = j) \propto p_j (1 - p_j)^{-\lambda}`,
        where :math:`p_j` is the probability of class j against the rest. Of 0, 1/4, ..., 1 it is
        that which predicts held-out labels best, and 1/2 where none are. 0 of two classes.
    moderation_ : float
        Probabilities average over f with this factor of its posterior variance; 0 takes f at its
        mean. Of 0, 1/16, 1/4 and 1 it is that which predicts held-out labels best.
    offset_ : ndarray of shape (1,) or (n_classes,)
        Prior means of the latent functions, which predict the base rates.
    """

    moderation_: float

    @fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None):
        """Learn the hyper-parameters, then the posterior of the latent functions.

        Parameters
        ----------
        X : array-like of shape (n, d)
            In any units.
        y : array-like of shape (n,)
            Labels of two classes or more.
        sample_weight : array-like of shape (n,), optional
            Likelihood weights: a weight of 2 equals the observation given twice.

        Returns
        -------
        object
            The estimator.
        """
        self._check_parameters()
        backend = self._resolve_backend(X)
        with fit_session(self, X, y, sample_weight=sample_weight) as session:
            given = X, y, sample_weight
            blocks = training_blocks(self, *given)
            if blocks is not None:
                self._learn_blocks(self._labelled(blocks, backend), session, backend)
                return self
            data = self._validate_training(*map(in_memory, given))
            self._learn(data, session, backend)
        return self

    @over_rows
    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the most probable class of each point.

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

    @over_rows
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

    @over_rows
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

    @over_rows
    def decision_function(self, X: ArrayLike) -> np.ndarray:
        r"""Return the log-odds of the classes, :math:`\log p - \log(1 - p)`.

        It orders points and classes as `predict_proba` does, and is finite where those are 0 or 1.

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

    @over_rows
    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """Return the log-probability that each point has its label.

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
        X, y = self._validate_scored(X, y)
        codes = encode(y, self.classes_)
        return self._log_proba(X)[np.arange(len(codes)), codes]

    @over_rows
    @within_limits
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
        mean, var = self._latent_moments(self._validate_prediction(X))
        return (mean[:, 0], var[:, 0]) if len(self.classes_) == 2 else (mean, var)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of observations, or of their weight, whose predicted class is y.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        sample_weight : array-like of shape (n,), optional

        Returns
        -------
        float
        """
        labels, found = map(in_memory, (y, self.predict(X)))
        check_targets(labels, numeric=False)
        return accuracy_score(labels, found, sample_weight=in_memory(sample_weight))

    def _log_class_probability(self, mean: np.ndarray, var: np.ndarray | None) -> np.ndarray:
        """Return log P(Y = +1), (n, c), for f ~ N(mean, var), or f = mean where var is None."""
        moments = [to_tensor(array) for array in (mean, var) if array is not None]
        log_prob = self._likelihood.log_prob if var is None else self._likelihood.log_predictive
        # Quadrature holds many nodes an element at once.
        parts = [
            log_prob(torch.ones_like(moments[0][rows]), *(array[rows] for array in moments))
            for rows in gen_batches(len(mean), max(1, LINK_ELEMENTS // mean.shape[1]))
        ]
        return torch.cat(parts).numpy()

    def _distinct(self, data: Data, backend: Backend) -> Data:
        """Observations of equal inputs and labels merged, for the fit, with y (n, c) coded."""
        data = data.merged(any_likelihood=True).to(backend.device)
        Y = backend.tensor(self._one_vs_rest(data))
        return replace(data, y=Y, scatter=None).to(backend.dtype)

    def _kernels(self, data: Data) -> list[Kernel]:
        """Kernels of f to choose among: the one given, or the default ones."""
        X, weight = arrays(data)
        if self.kernel is None:
            return default_classification_kernels(X, weight, **self._default_kernels)
        return [self._given_kernel(X)]

    @property
    def _default_kernels(self) -> dict[str, Any]:
        """Options of `default_classification_kernels`."""
        return {}

    def _search_options(self, data: Data) -> dict[str, Any]:
        """Of `ClassificationSettings`, of y (n, c) of -1 and +1: what few labels are held to.

        Default kernels follow labels left out; rare ones say too little, and a prior takes over. A
        wider one is beside few labels, whose evidence may be greatest for no f, or an endless one.
        """
        default, few = self.kernel is None, rare_total(data.y)
        rare = default and few < min(RARE_LABELS, RARE_SHARE * len(data))
        std = FEW_LABEL_SCALE_STD if default and len(data) <= FEW_LABELS else math.inf
        return {"rescales": default and not rare, "scale_std": LABEL_SCALE_STD if rare else std}

    def _given_kernel(self, X: np.ndarray) -> Kernel:
        kernel = super()._given_kernel(X)
        refuse_noise(kernel, self)
        return kernel

    @within_limits
    def _log_proba(self, X: np.ndarray) -> np.ndarray:
        """Return the log-probability of each class, shape (n, n_classes)."""
        if self.moderation_:
            mean, var = self._latent_moments(X)
            var = self.moderation_ * var
        else:
            mean, var = self._by_chunks(self._means, X), None
        log_proba = self._log_class_probability(mean, var)
        if len(self.classes_) == 2:
            log_proba = np.hstack([self._log_class_probability(-mean, var), log_proba])
        elif coupling := getattr(self, "coupling_", 0.0):
            others = np.maximum(self._log_class_probability(-mean, var), LOG_ZERO)
            log_proba = log_proba - coupling * others
        log_proba = np.maximum(log_proba, LOG_ZERO)
        # Beside a great common part the sum of the classes would be lost to rounding, and beside
        # the likeliest class that of the others, as in logsumexp of SciPy before 1.15.
        log_proba = log_proba - log_proba.max(axis=1, keepdims=True)
        others = np.exp(log_proba)
        np.put_along_axis(others, log_proba.argmax(axis=1)[:, None], 0.0, axis=1)
        return log_proba - np.log1p(others.sum(axis=1, keepdims=True))


class StreamingGPClassifier(BaseGPClassifier):
    """A classifier that observations may be added to."""

    @fit_context(prefer_skip_nested_validation=True)
    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ):
        """Add observations to the posterior, as the notes above say; the first call is a `fit`.

        Parameters
        ----------
        X : array-like of shape (n, d)
        y : array-like of shape (n,)
        classes : array-like of shape (n_classes,), optional
            All labels there will be; by default those of the first call.
        sample_weight : array-like of shape (n,), optional

        Returns
        -------
        object
            The estimator.
        """
        self._check_parameters(stream=True)
        first = not self._has_stream
        if not first:
            self._check_goes_on()
        data = self._validate_batch(X, y, sample_weight, classes=classes, first=first)
        backend = self._resolve_backend()
        if first:
            self._warn_of_forgetting()
            with fit_session(self, X, y, sample_weight=sample_weight) as session:
                self._learn(data, session, backend, stream=True)
        else:
            self._update(data, backend)
        return self

    @abstractmethod
    def _update(self, data: Data, backend: Backend) -> None:
        """Change the posterior by observations beyond those of the last call."""


def log_complement(log_proba: np.ndarray) -> np.ndarray:
    r"""Return :math:`\log(1 - p_k)` for each class of each row, without cancellation, (n, classes).

    Rows of `log_proba` sum to 1 in probability.
    """
    top = log_proba.argmax(axis=1)[:, None]
    others = log_proba.copy()
    np.put_along_axis(others, top, -np.inf, axis=1)
    # At most 1/2, so that 1 - p is exact to rounding; that of the likeliest class is a sum.
    complement = np.log1p(-np.exp(others))
    np.put_along_axis(complement, top, logsumexp(others, axis=1, keepdims=True), axis=1)
    return complement
