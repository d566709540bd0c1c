"""Fewer points and fewer columns: where a sparse basis is centred, and principal components.

Pixels and counts share a unit, and a column that hardly varies says little. Where columns have
units of their own, the one of the largest numbers would be all that is seen. Rows at hand tell
which it is: their targets are predicted from neighbours in the components of the columns as they
are, and of the columns divided by their standard deviations.

And where a few columns matter, of many that vary as much, no component shows them. So components
are compared with the columns themselves, by fits to some rows (`components_predict_better`).
"""

import warnings
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh
from sklearn.base import is_classifier
from sklearn.cluster import MiniBatchKMeans
from sklearn.gaussian_process.kernels import Kernel
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from skgp.data import Data, replicates
from skgp.estimators import defaults
from skgp.estimators._base import Backend, BaseGP, arrays, to_tensor
from skgp.estimators._parameters import Auto, Interval, StrOptions
from skgp.estimators.defaults import MANY_COLUMNS
from skgp.inference.pathwise import greedy_variance
from skgp.kernels.distances import origin
from skgp.kernels.scales import length_scales, varies
from skgp.learning.defaults import LABEL_SHARE
from skgp.learning.selection import held_out_rows, improves
from skgp.linalg import warn_caller
from skgp.linalg.runtime import constant_like

#: Ways of choosing inducing points.
INITIALISERS = ("k-means", "random", "greedy")


def inducing_points(
    data: Data,
    n_points: int,
    kernel: Kernel,
    *,
    init: str = "k-means",
    random_state: np.random.RandomState,
) -> np.ndarray:
    """Inducing points (at most n_points, d) for some rows (n, d): all that are distinct if few.

    Centres of clusters, of rows of some weights; rows at random; or one by one the row of which the
    points before it explain the least variance.
    """
    if init == "k-means":
        return cluster_centres(data, n_points, kernel, random_state=random_state)
    X, _ = arrays(data)
    distinct = distinct_rows(X)
    if n_points >= len(distinct):
        return X[distinct]
    if init == "random":
        return X[random_state.choice(distinct, n_points, replace=False)]
    if len(distinct) > defaults.GREEDY_ROWS:
        distinct = random_state.choice(distinct, defaults.GREEDY_ROWS, replace=False)
    rows = X[distinct]
    return rows[greedy_variance(kernel, to_tensor(rows), n_points).numpy()]


def warn_of_few_rows(n_inducing: int, n_distinct: int) -> None:
    """Warn that there are fewer distinct rows than inducing points asked for."""
    if n_inducing > n_distinct:
        warn_caller(
            f"n_inducing={n_inducing} is more than the {n_distinct} distinct rows of X; it is "
            f"lowered to {n_distinct}. Give n_inducing={n_distinct} or less to avoid this warning."
        )


def warn_of_interaction(estimator: BaseGP, first: int, second: int, gain: float) -> None:
    """Warn of two columns that act together, which a sum of functions of one each misses.

    What they promise is in nats per observation.
    """
    names = getattr(estimator, "feature_names_in_", range(estimator.n_features_in_))
    kind = "Classifier" if is_classifier(estimator) else "Regressor"
    warn_caller(
        f"Columns {names[first]} and {names[second]} of X act together: the model is a sum of "
        f"functions of one column each, and a function of both promises {gain:.2g} nats per "
        f"observation more. Use skgp.SWSGP{kind} or skgp.GaussianProcess{kind}, whose kernels take "
        "all columns."
    )


def cluster_centres(
    data: Data, n_points: int, kernel: Kernel, *, random_state: np.random.RandomState
) -> np.ndarray:
    """Distinct centres of clusters of some rows (n, d), in the metric of a kernel.

    Clusters that are small in the kernel's own length scales leave less of the prior's variance
    unexplained than as many rows at random. About two passes over the rows, O(n n_points d).
    """
    X, weight = arrays(data)
    distinct = distinct_rows(X)
    if n_points >= len(distinct):
        return X[distinct]
    scale, middle = length_scales(kernel, to_tensor(X)).numpy(), origin(to_tensor(X)).numpy()
    # Far from 0 they would lose their digits.
    rows = np.clip((X - middle) / scale, -defaults.FARTHEST, defaults.FARTHEST).astype(np.float32)
    kmeans = MiniBatchKMeans(
        n_points,
        init="random",
        n_init=1,
        max_iter=defaults.CLUSTER_PASSES,
        batch_size=max(defaults.CLUSTER_BATCH, n_points),
        max_no_improvement=None,
        reassignment_ratio=0.0,
        compute_labels=False,
        random_state=random_state,
    ).fit(rows, sample_weight=weight)
    centres = kmeans.cluster_centers_.astype(np.float64) * scale + middle
    return centres[distinct_rows(centres)]


def distinct_rows(X: np.ndarray) -> np.ndarray:
    """Return the index of the first of each set of equal rows, in order."""
    return np.unique(replicates(X), return_index=True)[1]


def class_centres(
    data: Data,
    labels: np.ndarray,
    n_points: int,
    kernel: Kernel,
    *,
    random_state: np.random.RandomState,
) -> np.ndarray:
    """Centres of clusters (M, d) of the rows of one class after the other; `labels` (n,) are codes.

    Where classes meet, a centre of rows of both would stand for neither. Classes share the points
    in proportion to the weights of their rows, and get one at least.
    """
    X, weight = arrays(data)
    rows = distinct_rows(X)
    if n_points >= len(rows):
        return X[rows]
    shares = np.bincount(labels, weights=weight)
    edges = np.round(np.append(0, np.cumsum(shares)) / shares.sum() * n_points).astype(int)
    centres = [
        cluster_centres(data.take(members), max(size, 1), kernel, random_state=random_state)
        for label, size in enumerate(np.diff(edges))
        if (members := torch.from_numpy(labels == label)).any()
    ]
    points = np.concatenate(centres)
    return points[distinct_rows(points)]


# What a trial has of the fit itself.
_OF_THE_FIT = (
    "method likelihood link degrees_of_freedom normalize_y optimizer device dtype n_jobs".split()
)


@dataclass(frozen=True)
class Projection:
    """Inputs minus their mean, on a few directions."""

    mean: np.ndarray  # (d,)
    directions: np.ndarray  # (d, p); orthonormal, or with rows divided by the columns' spreads

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Return the coordinates of rows X (n, d), shape (n, p).

        By products of one size: what they round to depends on their shape, and no row's
        coordinates are to depend on the rows beside it.
        """
        n_tiles = -(-len(X) // defaults.PROJECTED_ROWS)
        tiles = np.zeros((n_tiles, defaults.PROJECTED_ROWS, X.shape[1]))
        np.subtract(X, self.mean, out=tiles.reshape(-1, X.shape[1])[: len(X)])
        return (tiles @ self.directions).reshape(-1, self.directions.shape[1])[: len(X)]

    def of_tensor(self, X: Tensor) -> Tensor:
        """The same, up to rounding, of a tensor (n, d), differentiable in it."""
        mean, directions = (constant_like(each, X) for each in (self.mean, self.directions))
        return (X - mean) @ directions


def principal_components(
    X: np.ndarray,
    n_directions: int,
    sample_weight: np.ndarray | None = None,
    *,
    targets: np.ndarray | None = None,
    random_state: np.random.RandomState | None = None,
) -> Projection:
    """The directions of greatest variance of X (n, d), at most d of them.

    `targets` (n, c) choose whether the columns are divided by their standard deviations first, by
    rows that `random_state` draws; without them they are not. From the d x d covariance,
    O(n d^2 + d^3). Each direction has its largest entry positive: the result does not depend on the
    library's choice of sign.
    """
    mean = np.average(X, axis=0, weights=sample_weight)
    covariance = _scatter(X, mean, sample_weight)
    std = np.sqrt(np.diag(covariance) / (len(X) if sample_weight is None else sample_weight.sum()))
    std = np.where(varies(std, mean), std, np.inf)
    plain = Projection(mean, _leading(covariance, n_directions))
    if targets is None or random_state is None:
        return plain
    inverse = 1 / std[:, None]
    scaled = _leading(covariance * inverse * inverse.T, n_directions) * inverse
    return _choose(plain, Projection(mean, scaled), X, targets, random_state)


def _scatter(X: np.ndarray, mean: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
    """Sum of squares and products (d, d) of rows less their mean."""
    total = np.zeros((X.shape[1], X.shape[1]))
    for start in range(0, len(X), defaults.SCATTER_ROWS):
        rows = X[start : start + defaults.SCATTER_ROWS] - mean
        weight = (
            1.0
            if sample_weight is None
            else sample_weight[start : start + defaults.SCATTER_ROWS, None]
        )
        total += (weight * rows).T @ rows
    return total


def _leading(covariance: np.ndarray, n_directions: int) -> np.ndarray:
    """Eigenvectors (d, n_directions) of the largest eigenvalues, those first."""
    d = len(covariance)
    vectors = eigh(covariance, subset_by_index=[d - n_directions, d - 1])[1][:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    return vectors * np.sign(vectors[largest, np.arange(n_directions)])


def _choose(
    plain: Projection,
    scaled: Projection,
    X: np.ndarray,
    targets: np.ndarray,
    random_state: np.random.RandomState,
) -> Projection:
    """The second projection if neighbours in it predict clearly better, else the first.

    Copies of a row would predict each other in any coordinates, and count once.
    """
    rows = random_state.permutation(distinct_rows(X))[: defaults.SPREAD_CANDIDATES]
    if len(rows) <= 2 * defaults.SPREAD_NEIGHBORS:
        return plain
    losses = [left_out_losses(each(X[rows]), targets[rows]) for each in (plain, scaled)]
    clear = improves(losses[1], losses[0], n_errors=defaults.SPREAD_ERRORS, least_effect=0.0)
    return scaled if clear else plain


def left_out_losses(Z: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Squared errors (p,) of some rows predicted by the mean of those nearest to each."""
    p = min(defaults.SPREAD_COMPARED, len(Z))
    search = NearestNeighbors(n_neighbors=defaults.SPREAD_NEIGHBORS + 1, algorithm="brute").fit(Z)
    nearest = search.kneighbors(Z[:p], return_distance=False)
    others = (nearest != np.arange(p)[:, None])[..., None]
    predicted = (targets[nearest] * others).sum(1) / others.sum(1)
    return ((predicted - targets[:p]) ** 2).sum(1)


def components_predict_better(estimator: Any, data: Data, seed: int) -> bool:
    """Whether rows held out are predicted better from principal components than from columns.

    By fits of the estimator with default kernels, and all else of the default size, and the rule of
    :func:`skgp.learning.selection.choose`. The simpler are the columns of a regression, and the
    components of classes: many columns of these are pixels, counts or spectra, as a rule.
    """
    (X, sample_weight), y, labels = arrays(data), data.y.numpy(), is_classifier(estimator)
    exposure = None if data.log_exposure is None else data.log_exposure.exp().numpy()
    random = np.random.RandomState(seed)
    first = y if y.ndim == 1 else y[:, 0]  # of several targets one is stratified
    judged = held_out_rows(
        first, min(len(X) // 3, defaults.TRIAL_JUDGED), random, X=X, classes=labels
    )
    rows = np.flatnonzero(~judged)
    if len(rows) > defaults.TRIAL_ROWS:
        left = held_out_rows(
            first[rows], len(rows) - defaults.TRIAL_ROWS, random, X=X[rows], classes=labels
        )
        rows = rows[~left]
    if not judged.any():
        return False
    given = {"sample_weight": sample_weight, "exposure": exposure}
    given = {name: values[rows] for name, values in given.items() if values is not None}
    asked = {"exposure": exposure[judged]} if exposure is not None else {}
    parameters = estimator.get_params(deep=False)
    parameters = {name: parameters[name] for name in _OF_THE_FIT if name in parameters}
    if getattr(estimator, "_has_gaussian_name", False):  # y are standardised, or their logarithms
        parameters["likelihood"] = "gaussian"
    if hasattr(estimator, "heteroscedastic"):
        parameters["heteroscedastic"] = False
    losses = []
    for projection in (None, min(defaults.MANY_COLUMNS, len(rows))):
        parameters |= {"projection": projection, "warp_inputs": False, "random_state": seed}
        trial = type(estimator)(**parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the fit itself does warns by itself
            trial.fit(X[rows], y[rows], **given)
            density = trial.log_predictive_density(X[judged], y[judged], **asked)
            losses.append(-density.reshape(len(density), -1).mean(1))
    weight = None if sample_weight is None else sample_weight[judged]
    columns, components = losses
    if labels:
        return not improves(columns, components, weight=weight, least_share=LABEL_SHARE)
    return improves(components, columns, weight=weight)


class ProjectionMixin(BaseGP):
    """What the kernel sees of rows: their columns, or principal components learned by `fit`."""

    _parameter_constraints = {
        "projection": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"}), None]
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
        return components_predict_better(self, data, backend.seed)

    def _inputs(self, X: np.ndarray) -> np.ndarray:
        """Rows of X as the kernel sees them."""
        return X if self._projection is None else self._projection(X)


class ProjectedClassifierMixin(ProjectionMixin):
    """The same, with default kernels that suit what they see."""

    likelihood: str

    @property
    def _default_kernels(self) -> dict[str, Any]:
        # Principal components share a unit.
        return {"link": self.likelihood, "isotropic": self._projection is not None}


def as_seen(data: Data, *, projection: Projection | None, to: tuple) -> Data:
    """Observations of a block as a fit sees them: y (n, c), X projected, where it is to run."""
    y = data.y if data.y.ndim == 2 else data.y[:, None]
    X = data.X if projection is None else to_tensor(projection(data.X.numpy()))
    device, dtype = to
    return replace(data, X=X, y=y).to(device).to(dtype)
