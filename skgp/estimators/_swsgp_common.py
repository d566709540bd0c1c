"""What `SWSGPRegressor` and `SWSGPClassifier` share: parameters, inducing points, predictions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import Backend
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import Auto, Interval, Option, StrOptions, options
from skgp.estimators._reduction import (
    INITIALISERS,
    ProjectionMixin,
    as_seen,
    inducing_points,
    warn_of_few_rows,
)
from skgp.estimators._vecchia import VecchiaMixin
from skgp.estimators._warping import WarpedInputs
from skgp.inference.neighbors.posterior import SWSGPPosterior, SWSGPState
from skgp.inference.neighbors.search import distinct, positions
from skgp.inference.neighbors.system import Summary, localized, update, update_full
from skgp.learning.local.prior import Settings
from skgp.likelihoods import Likelihood
from skgp.linalg import warn_caller
from skgp.models.swsgp import SWSGPFit, fit_swsgp


class SWSGPMixin(ProjectionMixin, WarpedInputs):
    r"""Parameters, inducing points and predictions; an estimator adds the likelihood.

    The estimator has the parameters of ``_parameter_constraints``.

    Parameters
    ----------
    n_inducing : int or None, default=None
        Number of inducing points M; None for one per distinct input, at most 100000, or 10000 where
        observations are read in blocks. Lowered to the number of distinct inputs, with a warning.
    covariance : {"auto", "diagonal", "full"}, default="auto"
        Of q(u). "full" has :math:`M^2` numbers a latent function, and unless H = M is learned by
        steps of Adam; "auto" is full where H = M and the inducing points are fixed.
    inducing : {"auto", "fixed", "learned"}, default="auto"
        Whether the inducing points move, by steps of Adam. "auto" moves them where such steps are
        taken anyway (``solver="adam"``, a polish), if they are no more than a quarter of the
        observations.
    neighbors : {"auto", "exact", "faiss"}, default="auto"
        How the nearest points are found. "auto" is exact but for more than 50 columns and 4096
        points or more, where a search in principal components may miss some; "faiss" needs that
        library.
    optimizer : "auto" or None, default="auto"
        None keeps the kernel's hyper-parameters and the points.
    max_iter : int or None, default=None
        Natural-gradient steps (14 by default) or steps of Adam: by default as many as it takes
        until the bound converges, 6000 at most, and 400 of a polish.
    tol : float, default=1e-4
        Relative change of the bound at which the former stop.
    learning_rate : float or None, default=None
        Of Adam, for logarithms of hyper-parameters; None for 0.03. Those of other parameters
        follow.
    batch_size : int, default=256
        Observations of a step of Adam.
    warm_start : bool, default=False
        Keep the hyper-parameters of the last fit and, where the inducing points are the same, start
        from its posterior. Another kernel, method, likelihood, projection, number of columns or set
        of classes begins anew.

    Attributes
    ----------
    inducing_points_ : ndarray of shape (M, d)
        In the coordinates of the projection, if there is one.
    n_neighbors_ : int
        H.
    kl_weight_ : float
        :math:`\kappa`. This and the next two are of "variational" only.
    polished_ : bool
        Whether a polish was kept.
    """

    method: str
    n_inducing: int | None
    n_neighbors: int | Auto
    kl_weight: float | Auto
    covariance: str
    inducing: str
    init: str
    neighbors: str
    solver: str
    polish: bool | Auto
    max_iter: int | None
    tol: float
    learning_rate: float | None
    batch_size: int
    validation_fraction: float
    #: A `SWSGPPosterior`, or that of Vecchia's approximation.
    _posterior: Any
    #: What ``partial_fit`` must know of the rows seen.
    _summary: Summary | None
    #: Whether q(u) was found from rows in blocks.
    _reads_blocks = False

    _parameter_constraints = {
        "method": [StrOptions({"variational", "kriging"})],
        "n_inducing": [Interval(Integral, 1, None, closed="left"), None],
        "n_neighbors": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "kl_weight": [Interval(Real, 0, None, closed="neither"), StrOptions({"auto"})],
        "covariance": [StrOptions({"auto", "diagonal", "full"})],
        "inducing": [StrOptions({"auto", "fixed", "learned"})],
        "init": [StrOptions(set(INITIALISERS))],
        "neighbors": [StrOptions({"auto", "exact", "faiss"})],
        "solver": [StrOptions({"auto", "natural", "adam"})],
        "polish": ["boolean", StrOptions({"auto"})],
        "max_iter": [Interval(Integral, 1, None, closed="left"), None],
        "tol": [Interval(Real, 0, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither"), None],
        "batch_size": [Interval(Integral, 1, None, closed="left")],
        "warm_start": ["boolean"],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
    }

    _option_rules: tuple[Option, ...] = (
        options(
            "n_inducing kl_weight covariance inducing init neighbors solver polish max_iter tol"
            " learning_rate batch_size warm_start validation_fraction",
            method=("variational",),
        ),
        options("inducing polish", optimizer=("auto",)),
        options(
            "learning_rate batch_size",
            solver=("adam",),
            polish=(True, "auto"),
            inducing=("learned",),
            covariance=("full",),
        ),
    )

    def _takes_blocks(self, n_columns: int) -> bool:
        return self.method == "variational" and self.likelihood != "lognormal"

    def _projection_helps(self, data: Data, n_latent: int, backend: Backend) -> bool:
        """Not where all rows are neighbours: nothing is gained by fewer columns there."""
        n = len(data)
        local = self._neighbors_of(n, each_row=n <= self._max_inducing(), n_latent=n_latent) < n
        return local and super()._projection_helps(data, n_latent, backend)

    def _settings(self, n_points: int, n_rows: int) -> Settings:
        """How to fit, as the parameters say; ``n_neighbors_`` of as many points is set."""
        sparse = self.inducing == "auto" and n_points <= defaults.POLISHED_SHARE * n_rows
        learns = (self.inducing == "learned" or sparse) and self._learns
        covariance = self.covariance
        if covariance == "auto":  # full where that has closed forms
            closed = self.n_neighbors_ >= n_points and self._is_fixed
            covariance = "full" if closed else "diagonal"
        return Settings(
            n_neighbors=self.n_neighbors_,
            kl_weight=None if self.kl_weight == "auto" else float(self.kl_weight),
            covariance=covariance,
            learn_inducing=learns and (self.inducing == "learned" or self.solver == "adam"),
            polish_inducing=learns,
            learn_hyperparameters=self._learns,
            neighbors=self.neighbors,
            solver=self.solver,
            max_iter=self.max_iter,
            tol=self.tol,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            validation_fraction=self.validation_fraction,
        )

    def _inducing(
        self, data: Data, kernel: Kernel, backend: Backend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inducing points (M, d), and which of them each row is (n,), -1 for none."""
        X = data.X.cpu().double()
        if self._keeps_points(data):
            points = self.inducing_points_
        else:
            points = self._choose_points(data, kernel, np.random.RandomState(backend.seed))
        if self.n_inducing is not None and len(points) < self.n_inducing:
            warn_of_few_rows(self.n_inducing, len(distinct(X)[0]))
        return backend.tensor(points), positions(X, torch.from_numpy(points))

    def _keeps_points(self, data: Data) -> bool:
        """Whether a warm start goes on from the points that the last fit moved."""
        if not self._goes_on or len(self.inducing_points_) != self._max_inducing():
            return False
        return self._settings(len(self.inducing_points_), len(data)).polish_inducing

    def _choose_points(
        self, data: Data, kernel: Kernel, random_state: np.random.RandomState
    ) -> np.ndarray:
        """Inducing points (M, d), as ``init`` says."""
        n_points = self._max_inducing()
        return inducing_points(data, n_points, kernel, init=self.init, random_state=random_state)

    def _max_inducing(self) -> int:
        """Inducing points if there are as many distinct rows."""
        most = defaults.SWSGP_BLOCKS_INDUCING if self._reads_blocks else defaults.SWSGP_MAX_INDUCING
        return most if self.n_inducing is None else self.n_inducing

    def _neighbors_of(self, n_points: int, *, each_row: bool, n_latent: int) -> int:
        """H, of so many points, whether or not one a row."""
        if self.n_neighbors == "auto":
            few = each_row and n_points <= self._few_points(n_latent)
            return n_points if few and self._is_fixed else min(defaults.SWSGP_NEIGHBORS, n_points)
        return min(self.n_neighbors, n_points)

    def _set_neighbors(self, n_points: int, *, each_row: bool, n_latent: int) -> None:
        """Set ``n_neighbors_``; warns if it is less than asked for."""
        self._each_row = each_row
        self.n_neighbors_ = self._neighbors_of(n_points, each_row=each_row, n_latent=n_latent)
        if self.n_neighbors != "auto" and self.n_neighbors > n_points:
            warn_caller(
                f"n_neighbors={self.n_neighbors} is more than the {n_points} points there are; it "
                f"is lowered to {n_points}. Give n_neighbors={n_points} or less, or 'auto', to "
                "avoid this warning."
            )

    @property
    def _is_fixed(self) -> bool:
        """Whether q(u) is found without steps of Adam."""
        learns = self.inducing == "learned" and self._learns
        return self.solver != "adam" and not learns and self.covariance != "diagonal"

    def _few_points(self, n_latent: int) -> int:
        """Points up to which all are the neighbours of every row; 0 for none."""
        return 0

    def _fit_variational(
        self,
        kernel: Kernel,
        likelihood: Likelihood,
        data: Data,
        offset: np.ndarray,
        backend: Backend,
        callback: Callable[[int, dict], bool],
        *,
        blocks: MappedBlocks | None = None,
        rival: Kernel | None = None,
    ) -> tuple[SWSGPFit, bool]:
        """Fit q(u) to `data`, or to blocks of them; the fit, and whether it began with another."""
        self._reads_blocks = blocks is not None
        Z, position = self._inducing(data, kernel, backend)
        each_row = len(Z) == len(distinct(data.X)[0])
        self._set_neighbors(len(Z), each_row=each_row, n_latent=data.y.shape[1])
        start, settings = self._warm_state(data, backend), self._settings(len(Z), len(data))
        if start is not None and self.kl_weight == "auto":
            settings = replace(settings, kl_weight=self._kl_factor * (len(Z) / self.n_neighbors_))
        polish = self.polish
        if polish == "auto":  # where hyper-parameters of all rows cannot suit
            polish = len(Z) <= defaults.POLISHED_SHARE * len(data)
        settings = replace(settings, polish=polish and self._learns, rival=rival)
        given: Data | MappedBlocks = data
        if blocks is not None:
            seen = partial(as_seen, projection=self._projection, to=(backend.device, backend.dtype))
            given = blocks.then(seen, data)
        fit = fit_swsgp(
            kernel,
            likelihood,
            given,
            Z,
            position.to(backend.device),
            offset=backend.tensor(offset),
            settings=settings,
            generator=backend.generator(),
            start=start,
            callback=callback,
        )
        self._set_posterior(fit.state)
        self._summary = fit.summary
        self._keep_kl_weight(fit.kl_weight)
        self.elbo_ = fit.elbo
        self.polished_ = fit.polished
        self.n_iter_ = fit.n_iter
        self.history_ = {**self.history_, **fit.history}
        return fit, start is not None

    def _keep_kl_weight(self, kl_weight: float) -> None:
        """Set ``kl_weight_``, and what it is relative to M / H."""
        self.kl_weight_ = kl_weight
        self._kl_factor = kl_weight * self.n_neighbors_ / self.n_inducing_

    def _set_posterior(self, state: SWSGPState) -> None:
        """Predict from this state from now on."""
        state = state.to(torch.float64)
        self._posterior = SWSGPPosterior(state, self.n_neighbors_, self.neighbors)
        self.inducing_points_ = state.Z.cpu().numpy()
        self.n_inducing_ = state.n_inducing

    def _check_parameters(self, *, stream: bool = False) -> None:
        super()._check_parameters(stream=stream)
        if self.method != "kriging":
            return
        other = type(self).__name__.replace("SWSGP", "VecchiaGP")
        if stream:
            raise ValueError(
                f"partial_fit needs method='variational', got 'kriging', which is {other}. Use "
                "method='variational', or fit with all observations."
            )
        warn_caller(
            f"method='kriging' is deprecated and will be removed in 0.2: it fits {other}, whose "
            f"joint likelihood predicts better. Use {other}.",
            FutureWarning,
        )

    def _learn_as(self, other: Any, data: Data, session: FitSession, backend: Backend) -> None:
        """Learn as another estimator does, and take over what it learned."""
        for name in ("kl_weight_", "elbo_", "polished_"):  # of an earlier method
            self.__dict__.pop(name, None)
        other.__dict__.update(_learned(self))
        other._learn(data, session, backend)
        self.__dict__.update(_learned(other))

    @property
    def _vecchia_neighbors(self) -> int:
        return defaults.VECCHIA_NEIGHBORS if self.n_neighbors == "auto" else self.n_neighbors

    def _update_variational(self, data: Data, likelihood: Likelihood, backend: Backend) -> None:
        """Change the posterior by rows beyond those of the last call.

        ValueError if what was learned cannot be summed up.
        """
        state, summary = self._posterior.state.to(backend.device), self._summary
        closed = state.root is not None and self.n_neighbors_ >= state.n_inducing and self._is_fixed
        if summary is None and not closed:
            raise ValueError(
                "partial_fit goes on from a diagonal covariance, or a full one with all points as "
                f"neighbours, and fixed inducing points; got covariance={self.covariance!r}, "
                f"inducing={self.inducing!r}, solver={self.solver!r}. Use covariance='auto', "
                "inducing='fixed' and solver='natural'."
            )
        room = self._max_inducing()
        M = min(max(room, state.n_inducing), state.n_inducing + len(data))
        self._each_row = self._each_row and state.n_inducing + len(data) <= room
        H = self._neighbors_of(M, each_row=self._each_row, n_latent=state.n_latent)
        likelihood = likelihood.with_parameters(state.likelihood)
        kl_weight = None if self.kl_weight == "auto" else float(self.kl_weight)
        steps: dict[str, Any] = {"max_inducing": room, "tol": self.tol}
        if closed and H >= M:
            data = data.to(torch.float64)
            state = update_full(state, data, likelihood, kl_weight=kl_weight or 1.0, **steps)
        else:
            if summary is None:
                state, summary = localized(state)
            state, summary = update(
                state.to(backend.dtype),
                summary.to(backend.device),
                data,
                likelihood,
                n_neighbors=H,
                kl_weight=kl_weight,
                kl_factor=self._kl_factor,
                neighbors=self.neighbors,
                **steps,
            )
            self._summary = summary
        self.n_neighbors_ = min(H, state.n_inducing)
        self._set_posterior(state)
        if self.kl_weight == "auto":
            self._keep_kl_weight(self._kl_factor * state.n_inducing / self.n_neighbors_)

    def _warm_state(self, data: Data, backend: Backend):
        """Where the last fit ended, if this one goes on from there."""
        if not (self._keeps_kernel(data) and isinstance(self._posterior, SWSGPPosterior)):
            return None
        return self._posterior.state.to(backend.device).to(backend.dtype)

    def _keeps_kernel(self, data: Data) -> bool:
        """Whether this fit goes on from the last, whose projection had as many components."""
        return self._goes_on and self.inducing_points_.shape[1] == data.X.shape[1]

    def _bytes_per_row(self) -> int:
        if not isinstance(self._posterior, SWSGPPosterior):
            return VecchiaMixin._bytes_per_row(self)
        H, M, d = self.n_neighbors_, *self.inducing_points_.shape
        if H >= M:
            return 64 * M
        H += 16  # points that may join
        return 8 * H * (4 * H + d) + 64 * H


def _learned(estimator: Any) -> dict[str, Any]:
    """What a fit has set."""
    parameters = estimator.get_params(deep=False)
    return {name: value for name, value in vars(estimator).items() if name not in parameters}
