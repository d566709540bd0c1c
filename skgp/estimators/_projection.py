"""Principal components in place of many columns: the parameter ``projection``."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data
from skgp.estimators._base import Backend, BaseGP, arrays, to_tensor
from skgp.estimators._kernels import (
    default_classification_kernels,
    isotropic_classification_kernels,
)
from skgp.estimators._parameters import Auto, Interval, StrOptions
from skgp.estimators._reduction import (
    Projection,
    components_predict_better,
    principal_components,
)
from skgp.estimators.defaults import MANY_COLUMNS


class ProjectionMixin(BaseGP):
    """What the kernel sees of rows: their columns, or principal components learned by `fit`."""

    _projection_constraints: dict[str, list[Any]] = {
        "projection": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"}), None],
    }

    projection: int | Auto | None
    _projection: Projection | None

    def _projected(
        self, data: Data, targets: np.ndarray, backend: Backend, *, chooses: bool = True
    ) -> Data:
        """Learn the projection that the parameters ask for and return the data as projected.

        `targets` (n, c) tell whether the columns share a unit. "auto" is None unless this `chooses`
        one. ValueError if ``projection`` is more than the number of columns.
        """
        X, weight = arrays(data)
        d = X.shape[1]
        asked = self.projection
        if asked == "auto":
            helps = chooses and self._projection_helps(data, targets.shape[1], backend)
            asked = MANY_COLUMNS if helps else None
        if asked is not None and asked > d:
            raise ValueError(
                f"projection={asked} is more than the {d} columns of X; give {d} or less, or None."
            )
        self._projection = None
        if asked is not None:
            self._projection = principal_components(
                X,
                min(asked, len(X), d),
                weight,
                targets=targets,
                random_state=np.random.RandomState(backend.seed),
            )
        return replace(data, X=to_tensor(self._inputs(X)))

    def _projection_helps(self, data: Data, n_latent: int, backend: Backend) -> bool:
        """Whether components of many columns predict better, of a default kernel."""
        if self.kernel is not None or data.X.shape[1] <= MANY_COLUMNS:
            return False
        if self._goes_on:
            return self._projection is not None
        X, weight = arrays(data)
        exposure = None if data.offset is None else data.offset[:, 0].exp().numpy()
        return components_predict_better(
            self, X, data.y.numpy(), weight, exposure=exposure, seed=backend.seed
        )

    def _inputs(self, X: np.ndarray) -> np.ndarray:
        """Rows of X as the kernel sees them."""
        return X if self._projection is None else self._projection(X)


class ProjectedClassifierMixin(ProjectionMixin):
    """The same, with default kernels that suit what they see."""

    likelihood: str

    def _kernels(self, X: np.ndarray, sample_weight: np.ndarray | None) -> list[Kernel]:
        if self.kernel is not None:
            return [self._given_kernel(X)]
        # Principal components share a unit.
        projected = self._projection is not None
        make = isotropic_classification_kernels if projected else default_classification_kernels
        return make(X, sample_weight, link=self.likelihood)


def as_seen(data: Data, *, projection: Projection | None, to: tuple) -> Data:
    """Observations of a block as a fit sees them: y (n, c), X projected, where it is to run."""
    y = data.y if data.y.ndim == 2 else data.y[:, None]
    X = data.X if projection is None else to_tensor(projection(data.X.numpy()))
    device, dtype = to
    return replace(data, X=X, y=y).to(device).to(dtype)
