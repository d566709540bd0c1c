"""What estimators on Vecchia approximations share: the approximation's parameters and sizes."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from skgp.data import Data
from skgp.estimators._base import BaseGP
from skgp.estimators._parameters import Interval, StrOptions, options
from skgp.estimators._reduction import warn_of_few_rows
from skgp.estimators.defaults import VECCHIA_MAXIMIN_COLUMNS, VECCHIA_PREDICTIVE
from skgp.learning.defaults import VECCHIA_INDUCING
from skgp.learning.search import SearchSettings
from skgp.learning.vecchia import VecchiaSettings


class VecchiaMixin(BaseGP):
    """Neighbours, inducing points and order.

    Parameters
    ----------
    ordering : {"auto", "maximin", "random"}, default="auto"
        Order of the observations: each as far as can be from all before it, or at random, by
        ``random_state``. "auto" is "maximin" for up to 4 columns, where it is quick to find.
    dtype : {"float64"}, default="float64"
    memory_budget : float or None, default=None
        Bytes that a fit or a prediction may take beyond the data and the model. None is 70% of
        what is free on the device. Less makes tiles smaller.

    Attributes
    ----------
    n_neighbors_ : int
        H, at most the number of distinct inputs less one.
    n_iter_ : int
        Evaluations of the search.
    """

    _vecchia_constraints: dict[str, list[Any]] = {
        "n_neighbors": [Interval(Integral, 0, None, closed="left")],
        "n_inducing": [Interval(Integral, 0, None, closed="left"), None],
        "ordering": [StrOptions({"auto", "maximin", "random"})],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "dtype": [StrOptions({"float64"})],
    }

    _option_rules = (options("max_iter tol batch_size", optimizer=("auto",)),)

    #: Of a search, each with neighbours and inducing points as the kernel before it sees them.
    _n_search_stages = 3

    #: Inducing points by default, of enough rows.
    _most_inducing = VECCHIA_INDUCING

    #: Whether observations decide on inducing points by default.
    _chooses_inducing = False

    n_neighbors: int
    n_inducing: int | None
    ordering: str
    max_iter: int
    tol: float
    batch_size: int | None

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if not self.n_neighbors and self.n_inducing == 0:
            raise ValueError(
                "n_neighbors=0 needs inducing points, without which all rows would be independent; "
                "got n_inducing=0. Give n_neighbors or n_inducing at least 1."
            )

    def _settings(self, data: Data) -> VecchiaSettings:
        """Of distinct observations; sets ``ordering_`` and ``n_neighbors_``."""
        n, d = data.X.shape
        few = d <= VECCHIA_MAXIMIN_COLUMNS
        self.ordering_ = self.ordering
        if self.ordering == "auto":
            self.ordering_ = "maximin" if few else "random"
        self.n_neighbors_ = min(self.n_neighbors, n - 1)
        n_inducing = self.n_inducing
        if n_inducing is not None:
            if n_inducing > n:
                warn_of_few_rows(n_inducing, n)
            n_inducing = min(n_inducing, n)
        elif not (self._chooses_inducing and self.n_neighbors_):
            n_inducing = min(self._most_inducing, n)
        return VecchiaSettings(
            self.n_neighbors_,
            n_inducing,
            exact_rows=SearchSettings.exact_rows,
            n_rows=self._n_rows,
            n_stages=self._n_search_stages,
            max_iter=self.max_iter,
            tol=self.tol,
        )

    @property
    def _n_rows(self) -> int | None:
        """Rows that stand for all in the search; None for all."""
        return self.batch_size

    @property
    def _n_predictive(self) -> int:
        """Neighbours of a prediction."""
        return max(1, VECCHIA_PREDICTIVE * self.n_neighbors_)

    def _keep_posterior(self, posterior: Any) -> None:
        self._posterior = posterior
        self.inducing_points_ = posterior.Z.cpu().numpy()
        self.n_inducing_ = len(self.inducing_points_)

    def _bytes_per_row(self) -> int:
        size = self._posterior.neighborhood.size
        d, m = self.n_features_in_, self.n_inducing_
        return 8 * size * (4 * size + d + m) + 64 * m + 16 * self._posterior.n_spread
