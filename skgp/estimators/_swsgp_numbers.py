"""What a sparse-within-sparse GP does with quantities: rows, kernel, kriging."""

from dataclasses import replace

import numpy as np
from sklearn.gaussian_process.kernels import Kernel, WhiteKernel

from skgp.data import Data, distinct_observations, merge_replicates
from skgp.estimators._backend import Backend
from skgp.estimators._default_kernel import default_kernels, with_noise
from skgp.estimators._validation import refuse_noise
from skgp.inference.neighbors.kriging import KrigingModel
from skgp.kernels.gram import split_noise
from skgp.learning.local.hyperparameters import search_hyperparameters

# Rows up to which all are neighbours, at the cost of one factor: q(u) then is the exact GP.
_EXACT_ROWS = 2500


class NumbersMixin:
    """Rows, kernel and kriging of a regressor.

    The regressor has the parameters and hooks of
    :class:`~skgp.estimators._swsgp_common.SWSGPMixin`, and ``likelihood`` and ``link``.
    """

    def _data(self, X, z, sample_weight, backend: Backend, offset=None) -> Data:
        """Rows as tensors, merged where the likelihood allows."""
        if self._is_gaussian:
            return merge_replicates(X, z, sample_weight, backend.device)
        return distinct_observations(X, z, sample_weight, backend.device, offset)

    def _rows(self, data: Data, backend: Backend) -> Data:
        """Rows in the dtype of the fit."""
        return replace(data, y=data.y[:, None], scatter=None).to(backend.dtype)

    def _learn_kernel(
        self, session, X: np.ndarray, sample_weight, data: Data, backend: Backend
    ) -> tuple[Kernel, WhiteKernel]:
        """Return the kernel of f and the noise that goes with it, learned if they are to be."""
        if self._keeps_kernel(data):
            signal, white = split_noise(self.kernel_)
            return signal, white or WhiteKernel()
        if self.kernel is None:
            kernels = default_kernels(X, sample_weight)
        else:
            kernel = self._resolve_kernel(X, lambda: None)
            if self._own_likelihood is not None:
                refuse_noise(kernel, self)
            kernels = [with_noise(kernel)]
        if not self._learns:
            return split_noise(kernels[0])
        with session.stage("hyperparameters") as callback:
            found = search_hyperparameters(
                kernels,
                data,
                self._family(WhiteKernel()),
                generator=backend.generator(),
                callback=callback,
            )
        self.history_["hyperparameters"] = found.history
        return split_noise(found.kernel)

    def _fit_kriging(self, kernel: Kernel, noise: float, data: Data, backend: Backend) -> None:
        """Keep the rows that predictions are kriged from."""
        rows = replace(data, y=data.y[:, None])
        rows = self._kriging_rows(rows, backend)
        each_row = len(rows) == len(data.y)
        self._set_neighbors(len(rows), each_row=each_row, n_latent=1)
        model = KrigingModel(
            kernel,
            noise,
            rows.X,
            rows.y,
            rows.weight,
            rows.y.new_zeros(1),
            self.n_neighbors_,
            neighbors=self.neighbors,
        )
        self._set_kriging(model)

    def _append_kriging(self, data: Data) -> None:
        """Krige from these rows too."""
        weight = None if data.weight is None else data.weight.cpu()
        model = self._posterior.appended(data.X.cpu(), data.y[:, None].cpu(), weight)
        n = len(model.X)
        self.n_neighbors_ = self._neighbors_of(n, each_row=self._each_row, n_latent=1)
        self._set_kriging(replace(model, n_neighbors=self.n_neighbors_))

    def _few_points(self, n_latent: int) -> int:
        return _EXACT_ROWS if self._is_gaussian else 0
