"""What a sparse-within-sparse GP does with labels: rows, kernel, label kriging."""

import math
from dataclasses import replace

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.data import Data, distinct_observations
from skgp.estimators._backend import Backend, to_tensor
from skgp.estimators._default_kernel import (
    default_classification_kernels,
    isotropic_classification_kernels,
)
from skgp.estimators._inducing import cluster_centres, distinct_rows, inducing_points
from skgp.estimators._labels import base_rate_offset, one_vs_rest
from skgp.inference.neighbors.search import distinct
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    fit_classification_hyperparameters,
)
from skgp.learning.local.labels import (
    fit_link,
    krige_labels,
    label_codes,
    label_targets,
    search_label_kernel,
)
from skgp.likelihoods import Bernoulli

# Rows up to which all are neighbours, of one latent function; of c with as many numbers, c M^2.
_FULL_ROWS = 1000
# Of logs of amplitude and length scales, by default kernels (tests/benchmarks/bench_rare_class.py).
_SCALE_STD = 1.0
_SEARCHED = 32  # neighbours by which kernels are compared
# Inducing points, of the rows, up to which "auto" takes centres of clusters.
_FEW_POINTS = 0.3


class LabelsMixin:
    """Rows, kernel and label kriging of a classifier.

    The classifier has the parameters and hooks of
    :class:`~skgp.estimators._swsgp_common.SWSGPMixin`, and ``classes_`` when these are called.
    """

    def _offset(self, codes: np.ndarray, sample_weight: np.ndarray | None) -> np.ndarray:
        """Base rates, on the scale of f; of classes without rows yet, as if they had one."""
        Y = one_vs_rest(codes, len(self.classes_))
        missing = len(np.unique(codes)) < len(self.classes_)
        return base_rate_offset(Y, sample_weight, link=self.likelihood, cautious=missing)

    def _data(
        self, X: np.ndarray, codes: np.ndarray, sample_weight: np.ndarray | None, backend: Backend
    ) -> Data:
        """Rows as tensors, those of equal inputs and labels merged."""
        rows = distinct_observations(X, codes.astype(np.float64), sample_weight, backend.device)
        Y = one_vs_rest(rows.y.cpu().numpy().astype(np.int64), len(self.classes_))
        weight = None if rows.weight is None else rows.weight.to(backend.dtype)
        return Data(rows.X.to(backend.dtype), backend.tensor(Y), weight)

    def _learn_kernel(
        self, session, X, sample_weight, data: Data, offset: np.ndarray, backend: Backend
    ) -> Kernel:
        """Return the kernel of the latent functions, learned if it is to be."""
        if self._keeps_kernel(data):
            return self.kernel_
        chosen = self.kernel is None
        if chosen:
            # Principal components share a unit.
            projected = self._projection is not None
            make = isotropic_classification_kernels if projected else default_classification_kernels
            kernels = make(X, sample_weight, link=self.likelihood)
        else:
            kernels = [self._resolve_kernel(X, lambda: None)]
        if not self._learns:
            return kernels[0]
        with session.stage("hyperparameters") as callback:
            found = fit_classification_hyperparameters(
                kernels,
                data.X.double(),
                data.y.double(),
                offset=torch.as_tensor(offset, device=backend.device),
                likelihood=Bernoulli(self.likelihood),
                generator=backend.generator(),
                row_weight=None if data.weight is None else data.weight.double(),
                settings=ClassificationSettings(scale_std=_SCALE_STD if chosen else math.inf),
                callback=callback,
            )
            found = search_label_kernel(
                found,
                kernels,
                data.to("cpu", torch.float64),
                n_neighbors=_SEARCHED if self.n_neighbors == "auto" else self.n_neighbors,
                n_points=self.n_inducing,
                generator=backend.generator(),
                callback=callback,
            )
        self.history_["hyperparameters"] = found.history
        return found.kernel

    def _choose_points(
        self, data: Data, kernel: Kernel, random_state: np.random.RandomState
    ) -> np.ndarray:
        """Inducing points (M, d); clusters are those of each class by itself."""
        n_points = self._max_inducing()
        init = self.init
        if init == "auto":
            init = "k-means" if n_points <= _FEW_POINTS * len(data) else "random"
        if init != "k-means":
            return inducing_points(
                data.X.cpu().double().numpy(),
                n_points,
                kernel,
                init=init,
                random_state=random_state,
            )
        return class_centres(data, n_points, kernel, random_state)

    def _few_points(self, n_latent: int) -> int:
        return int(_FULL_ROWS / n_latent**0.5)

    def _fit_kriging(self, kernel: Kernel, data: Data, backend: Backend) -> None:
        """Keep the rows that labels are kriged from, with noise and link."""
        rows = self._kriging_rows(data, backend).to("cpu", torch.float64)
        self._set_neighbors(len(distinct(rows.X)[0]), each_row=False, n_latent=1)
        model = krige_labels(
            kernel,
            rows.X,
            label_codes(rows.y),
            n_classes=len(self.classes_),
            n_neighbors=self.n_neighbors_,
            generator=backend.generator(),
            weight=rows.weight,
            neighbors=self.neighbors,
        )
        self._set_kriging(model)

    def _append_kriging(self, data: Data, backend: Backend) -> None:
        """Krige from these rows too; the link is learned anew."""
        rows = data.to("cpu", torch.float64)
        targets = label_targets(label_codes(rows.y), len(self.classes_), torch.float64)
        model = self._posterior.appended(rows.X, targets, rows.weight)
        self.n_neighbors_ = self._neighbors_of(len(model.X), each_row=False, n_latent=1)
        model = replace(model, n_neighbors=self.n_neighbors_)
        self._set_kriging(fit_link(model, generator=backend.generator()))

    # ---- prediction ------------------------------------------------------------------------

    def _log_proba(self, X):
        if self.method == "variational":
            return super()._log_proba(X)
        return self._by_chunks(self._kriged_log_proba, X)

    def _kriged_log_proba(self, X: np.ndarray) -> np.ndarray:
        return self._posterior.log_probabilities(to_tensor(self._inputs(X))).numpy()


def class_centres(
    data: Data, n_points: int, kernel: Kernel, random_state: np.random.RandomState
) -> np.ndarray:
    """Centres of clusters of the rows of one class after the other.

    Where classes meet, a centre of rows of both would stand for neither.

    Parameters
    ----------
    data : Data
        Labels -1 and +1, one column a class, or one for two.
    n_points : int
        All distinct rows are returned if there are no more. Classes share them in proportion to
        the weights of their rows, and get one at least.
    kernel : Kernel
        Without noise.
    random_state : RandomState

    Returns
    -------
    ndarray of shape (M, d)
        Distinct; not more than `n_points` but for the one a class.
    """
    X = data.X.cpu().double().numpy()
    rows = distinct_rows(X)
    if n_points >= len(rows):
        return X[rows]
    labels = label_codes(data.y.cpu()).numpy()
    weight = np.ones(len(X)) if data.weight is None else data.weight.cpu().double().numpy()
    shares = np.bincount(labels, weights=weight)
    edges = np.round(np.append(0, np.cumsum(shares)) / shares.sum() * n_points).astype(int)
    centres = [
        cluster_centres(
            X[labels == label],
            max(size, 1),
            kernel,
            sample_weight=weight[labels == label],
            random_state=random_state,
        )
        for label, size in enumerate(np.diff(edges))
        if (labels == label).any()
    ]
    centres = np.concatenate(centres)
    return centres[distinct_rows(centres)]
