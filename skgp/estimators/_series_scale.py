r"""Whether a series is modelled as :math:`y = f + \varepsilon` or :math:`\log y = f + \varepsilon`.

By the evidence of y, which of the latter is that of log y less the sum of log y (the Jacobian). The
structure found for y tells by a short search whether log y is worth a search of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators._base import to_tensor
from skgp.estimators._base_regressor import LikelihoodGPRegressor
from skgp.estimators._state_space_common import StateSpaceMixin
from skgp.estimators.defaults import LOG_LEAST_ROWS, LOG_NATS, LOG_RATIOS
from skgp.inference.markov.averaged import kernel_of, series_of
from skgp.learning.markov.defaults import STRUCTURE_ROWS
from skgp.learning.markov.series_search import Problem, evidence_near
from skgp.likelihoods import Likelihood

Found = tuple[Kernel, torch.Tensor]


class SeriesScale(StateSpaceMixin, LikelihoodGPRegressor):
    """A regressor of series that may be of log y.

    Parameters
    ----------
    likelihood : str or instance, default="auto"
        Observation noise: "gaussian"; "lognormal" of positive targets whose trend, seasons and
        noise grow with their level, log y = f + Gaussian noise; "student_t" of targets with
        outliers; "poisson" of counts. "auto" is "gaussian", or "lognormal" of a series of 20 to
        20000 positive targets whose kernel is left to the data, where that is likelier by three
        nats (`likelihood_`). An instance of a class of ``skgp.likelihoods``, or of your own, learns
        its free parameters; additive noise is relative to the standardised targets, as the kernel
        is.

    Attributes
    ----------
    noise_variance_ : float
        In squared units of y, or of log y; none for counts. Of few observations the mean over its
        posterior.
    y_mean_, y_scale_ : float
        Mean and standard deviation of the targets, for Student-t noise of those that are no gross
        outliers, or of their logarithms.
    """

    _parameter_constraints: dict[str, list[Any]] = {
        **LikelihoodGPRegressor._parameter_constraints,
        **StateSpaceMixin._state_space_constraints,
    }

    @property
    def _chooses_scale(self) -> bool:
        """Whether the data may decide for log y."""
        return self.likelihood == "auto" and self._is_default and self._learns

    def _logs_predict_better(self, X: Any, y: Any, sample_weight: Any) -> bool:
        return False  # the evidence of a structure found for y tells, later

    def _on_better_scale(
        self,
        data: Data,
        likelihood: Likelihood,
        found: Found,
        fit: Callable[[SeriesScale, Data], Found],
    ) -> Found:
        """Kernel and parameters `found` of y; or those of log y, which the model then is of.

        `fit` gave the former from the model and the standardised data.
        """
        y = self._to_y(data.y.numpy())
        ratio = y.max() / y.min() if y.min() > 0 else 0.0
        several = self._place is None or data.total < LOG_LEAST_ROWS or len(y) > STRUCTURE_ROWS
        if several or not LOG_RATIOS[0] <= ratio <= LOG_RATIOS[1]:
            return found
        rival = copy.copy(self)
        rival._of_log = True
        weight = None if data.weight is None else data.weight.numpy()
        logs = replace(data, y=to_tensor(rival._target(y, weight)))
        jacobian = float(data.weighted_sum(to_tensor(np.log(y))))
        change = data.total * np.log(rival.y_scale_ / self.y_scale_) + jacobian
        least = self._evidence + change  # that log y is to have
        (series,) = series_of(replace(logs, y=logs.y[:, None]), self._terms)
        problem = Problem([series], likelihood, [0.0], self._terms)
        if evidence_near(problem, kernel_of(self._states[0]), found[1]) < least:
            return found
        other = fit(rival, logs)
        if rival._evidence < least + LOG_NATS:
            return found
        self.__dict__.update(rival.__dict__)
        return other
