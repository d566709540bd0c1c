"""Classification in state space: the estimator of :mod:`skgp.models.state_space` for labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.estimators._state_space_common import StateSpaceMixin
from skgp.estimators._time import framed
from skgp.inference.markov.sites import left_out_moments
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_coupling
from skgp.learning.label_scales import capped
from skgp.likelihoods import Likelihood
from skgp.models import state_space as model


class StateSpaceGPClassifier(StateSpaceMixin, StreamingGPClassifier):
    r"""Gaussian process classification of time series and in additive models, in O(n).

    The latent functions are those of `StateSpaceGPRegressor`; more than two classes are learned one
    against the rest. The posterior is the nearest Gaussian process (variational), with a site at
    every time or, with ``n_inducing``, inducing states.

    Parameters
    ----------
    kernel : Kernel or None, default=None
        As of `StateSpaceGPRegressor`, without a WhiteKernel; None has trends and seasons of two
        classes, and no priors; of several columns also one variance and length scale, or their own.
    {time}
    covariates : {"auto"} or dict, default="auto"
        Kinds of the columns beside the times, as of `StateSpaceGPRegressor`.
    trend : {0, 1, 2} or None, default=None
        Degree of a polynomial of time in the mean of f.
    n_inducing : int, "auto" or None, default=None
        As of `StateSpaceGPRegressor`.
    {inducing, batch_size, posterior}
    likelihood : {"logit", "probit"}, default="logit"
        Link from f to a probability.
    class_weight : dict, "balanced" or None, default=None
        Weights of the classes, multiplied into ``sample_weight``.
    {optimizer, max_iter}
    tol : float, default=1e-7
        Gain of evidence in an iteration, in nats per observation, below which to stop. With less
        than 0.001 nats in all it stops in any case; of several columns with less than 0.001 an
        observation, or 0.5 in all.
    warm_start : bool, default=False
        Start from the kernel of the last fit. Another kernel, likelihood, number of columns or set
        of classes begins anew.
    random_state : int, RandomState instance or None, default=None
        Of the minibatches; without `batch_size` a fit draws none.
    {device, dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    kernel_ : Kernel
        With the hyper-parameters learned. Of several columns a sum of ActiveDims; if the classes
        differ in it, a CompoundKernel with one a class.
    elbo_ : float
        ELBO, in nats, summed over the latent functions. ``partial_fit`` of one column
        leaves it that of the first call.
    intercept_ : float or ndarray of shape (n_classes,)
        What `predict_components` leaves of the mean of f.
    {component_kernels_, covariate_kinds_, component_columns_, component_names_, inducing_points_}
    {time_origin_}
    offset_ : ndarray of shape (c,)
        Prior means of f, at which the base rates are the probabilities a priori; of several
        columns, or with covariates, those of an f without variance.
    {coupling_}
    moderation_ : float
        1: probabilities average over f with all of its posterior variance.
    n_iter_ : int
    {history_, interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    StateSpaceGPRegressor : The same for quantities and counts.

    Notes
    -----
    Times come in any order, with repetitions, as numbers or as dates, which become days: see
    `StateSpaceGPRegressor`.

    ``partial_fit`` keeps hyper-parameters, base rates and ``coupling_``. Later observations of one
    column may lie anywhere in time; their sites are found given those before. Sites at all times
    grow with them. With ``n_inducing`` the state does not, but for times beyond the inducing
    states, which get such of their own, as densely placed as before. Of several columns the
    observations are kept, and the posterior is that of all at once; a `fit` of more than 1000
    observations does not keep them and cannot go on.

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

    _start_variance = defaults.SERIES_LINK_VARIANCE
    _parameter_constraints = {"likelihood": [StrOptions({"logit", "probit"})]}

    def __init__(
        self,
        kernel=None,
        *,
        time=None,
        covariates="auto",
        trend=None,
        n_inducing=None,
        inducing="fixed",
        batch_size=None,
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
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    @property
    def elbo_(self) -> float:
        """ELBO, in nats, summed over the latent functions."""
        return self._evidence

    @property
    def intercept_(self) -> float | np.ndarray:
        """What the components leave of the mean of f."""
        offsets = np.array([state.offset for state in self._states])
        return float(offsets[0]) if len(offsets) == 1 else offsets

    # ---- training ------------------------------------------------------------------------

    def _fit_series(self, kernels: list, data: Data, likelihood: Likelihood, **search) -> model.Fit:
        """Weights far above the others come in where a search without their excess ends."""
        some = capped(data)
        fit = super()._fit_series(kernels, some, likelihood, **search)
        if some is data:
            return fit
        return model.resume(fit, model.series_of(data, search["terms"]), likelihood, **search)

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        X, weight = arrays(data)
        Y = self._one_vs_rest(data)
        # Of classes without rows yet, as if they had one.
        missing = len(data.y.unique()) < len(self.classes_)
        self._set_link(data, cautious=missing)
        given = None if self.kernel is None else self._given_kernel(self._process_columns(X))
        with session.stage("solve") as callback:
            self.kernel_, _ = self._fit_states(
                replace(data, y=to_tensor(Y)),
                given,
                self._likelihood,
                self.offset_.tolist(),
                backend,
                callback,
                stream=stream,
            )
        self.offset_ = np.array([state.offset for state in self._states])
        # Labels left out of q prefer less, .25 to 1, and new ones 1: the hyper-parameters, found
        # from all labels, have seen them (series of four classes .61, with .25 .64 nats a label).
        self.moderation_ = 1.0
        self.coupling_ = self._choose_coupling(X, Y, weight)
        self._warn_at_bounds()

    def _additive_tol(self, total: float) -> float:
        return min(defaults.ADDITIVE_LABEL_GAIN, defaults.ADDITIVE_LABEL_NATS / total)

    def _update(self, data: Data, backend: Backend) -> None:
        data = replace(data, y=to_tensor(self._one_vs_rest(data)))
        self._add(data, self._likelihood, backend)

    def _choose_coupling(self, X: np.ndarray, Y: np.ndarray, weight: np.ndarray | None) -> float:
        """Exponent of the coupling of one-vs-rest probabilities, chosen on held-out rows."""
        if len(self.classes_) == 2:
            return 0.0
        if (len(X) if weight is None else weight.sum()) < defaults.COUPLING_ROWS:
            return FEW_ROWS_COUPLING
        rows = np.linspace(0, len(X) - 1, min(len(X), defaults.LEFT_OUT_ROWS)).astype(np.int64)
        chosen = None if weight is None else to_tensor(weight[rows])
        labels = to_tensor(Y[rows])
        moments = self._latent_moments(X[rows])
        found = [
            left_out_moments(self._likelihood, y, mean, var, chosen)
            for y, mean, var in zip(labels.T, *(to_tensor(m).T for m in moments), strict=True)
        ]
        mean, var = (torch.stack(part, dim=1) for part in zip(*found, strict=True))
        return best_coupling(self._likelihood, labels, mean, var, chosen)

    # ---- prediction ------------------------------------------------------------------------

    predict = framed("class")(StreamingGPClassifier.predict)
    predict_proba = framed("probability", columns=lambda self, _: self.classes_)(
        StreamingGPClassifier.predict_proba
    )
