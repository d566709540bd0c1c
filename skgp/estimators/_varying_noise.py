"""Regressors whose noise may be greater at some inputs than at others."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.utils.validation import check_is_fitted

from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import arrays, to_tensor
from skgp.estimators._blocks import over_rows
from skgp.estimators._fitting import within_limits
from skgp.estimators._log_scale import LogScale
from skgp.estimators._parameters import Auto, StrOptions
from skgp.kernels.scales import capped_weights
from skgp.learning.noise_function import NoiseFunction, learn_noise_function
from skgp.samplers.diagnostics import effective_sample_size


class VaryingNoise(LogScale):
    """A regressor with Gaussian noise whose variance may depend on x.

    Parameters
    ----------
    heteroscedastic : bool or "auto", default="auto"
        Whether the variance of Gaussian noise is a function of x (`predict_noise_variance`),
        learned from the errors of up to 1000 observations; f and ``noise_variance_`` are those of
        constant noise. "auto" does with ``kernel=None`` and `likelihood_` "gaussian", of 100
        observations of one target or more, where errors left out, of up to 5000, are clearly
        likelier then; not of streams, rows in blocks, principal components or relevance vectors,
        nor where some rows repeat far more often than others.
    """

    _noise_constraints: dict[str, list[Any]] = {
        "heteroscedastic": ["boolean", StrOptions({"auto"})]
    }

    heteroscedastic: bool | Auto
    #: Of the logarithm of the variance over ``noise_variance_``; None where it is constant.
    _noise_function: NoiseFunction | None = None

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if self.heteroscedastic is not True:
            return
        if self.likelihood not in ("auto", "gaussian") or not self._learns_noise:
            raise ValueError(
                f"heteroscedastic=True is of Gaussian noise that is learned; got "
                f"likelihood={self.likelihood!r}, optimizer={self.optimizer!r} and "
                f"kernel={self.kernel!r}. Use likelihood='gaussian' and a noise level that is not "
                "fixed, or heteroscedastic='auto'."
            )
        if stream:
            raise ValueError(
                "partial_fit has constant noise; got heteroscedastic=True. Use 'auto' or False, or "
                "fit."
            )

    def _begin_fit(self, *, informed: bool = True) -> None:
        super()._begin_fit(informed=informed)
        self._noise_function = None

    def _choose_scale(self, X: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> None:
        if self.heteroscedastic is not True:
            super()._choose_scale(X, y, weight)

    def _learn_from_errors(self, data: Data, *, stream: bool) -> None:
        if not stream and self._may_vary(data):
            self._noise_function = self._learn_noise_function(data)

    def _may_vary(self, data: Data) -> bool:
        """Whether to ask the errors of a process of constant noise."""
        if self.heteroscedastic == "auto":
            asked = self.kernel is None and self._has_gaussian_name and not self._of_log
            # Between relevance vectors variances of f are too small, and of noise stand for them.
            asked &= getattr(self, "basis", None) != "relevance"
            if not asked or len(data) < defaults.NOISE_LEAST_ROWS:
                return False
        elif not self.heteroscedastic:
            return False
        projected = getattr(self, "_projection", None) is not None
        varies = data.y.ndim == 1 and bool(data.y.max() > data.y.min())
        return varies and self._learns and not projected

    def _learn_noise_function(self, data: Data) -> NoiseFunction | None:
        # Copies of an observation would predict each other.
        data = data.merged(any_likelihood=True)
        weight = arrays(data)[1]
        if self.heteroscedastic == "auto" and weight is not None:
            if effective_sample_size(np.log(weight)) < defaults.NOISE_EVENNESS * len(data):
                return None
        capped = capped_weights(weight)
        data = Data(data.X, data.y, None if capped is None else to_tensor(capped))
        smoother = self._kernels(data)[0] if self.heteroscedastic == "auto" else None
        return learn_noise_function(self.kernel_, data, smoother)

    # ---- prediction --------------------------------------------------------------------------

    @over_rows
    @within_limits
    def predict_noise_variance(self, X: ArrayLike) -> np.ndarray:
        """Predict the variance of the observation noise at each row of X.

        Parameters
        ----------
        X : array-like of shape (n, d)

        Returns
        -------
        ndarray of shape (n,) or (n, t)
            In squared units of y, or of log y: ``noise_variance_`` unless noise is heteroscedastic.
        """
        check_is_fitted(self)
        X = self._validate_prediction(X)
        variance = np.multiply.outer(np.ones(len(X)), self.noise_variance_)
        return variance * np.exp(self._offset_at(None, X).get("offset", 0.0))

    def _offset_at(self, exposure: ArrayLike | None, X: np.ndarray) -> dict[str, np.ndarray]:
        """Of Gaussian noise that varies the logarithm of its factors."""
        offset, function = super()._offset_at(exposure, X), self._noise_function
        if function is None:
            return offset

        def log_noise(rows: np.ndarray) -> np.ndarray:
            return function(to_tensor(rows), self._noise_variance).numpy()

        return {"offset": self._by_chunks(log_noise, X, 32 * len(function.X))}

    def _noise_gradients(self, X: np.ndarray) -> np.ndarray | float:
        if self._noise_function is None:
            return super()._noise_gradients(X)
        function = self._noise_function

        def gradients(X: np.ndarray) -> np.ndarray:
            rows = to_tensor(X).clone().requires_grad_()
            with torch.enable_grad():
                total = torch.exp(function(rows, self._noise_variance)).sum()
            return torch.autograd.grad(total, rows)[0].numpy()

        slopes = self._by_chunks(gradients, X, 8 * defaults.GRAPH_COPIES * len(function.X))
        return self._in_units_of_columns(X, self._noise_variance * slopes)
