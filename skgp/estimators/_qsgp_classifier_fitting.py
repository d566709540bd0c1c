"""Fits of `QSGPClassifier`, and what they tell of f: from its parameters to plans and back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.blocks import MappedBlocks
from skgp.data import Data, replicates
from skgp.estimators._base import Backend, arrays, to_tensor
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._blocks import numbers_of_some
from skgp.estimators._classification_data import coded_columns, one_vs_rest
from skgp.estimators._fitting import Callback, FitSession
from skgp.estimators._qsgp_fitting import QSGPMixin, inducing_points
from skgp.estimators._reduction import ProjectedClassifierMixin, cluster_centres
from skgp.inference.laplace import OnlineLaplace
from skgp.inference.weights.posterior import AugmentedPosterior
from skgp.kernels import has_spectral_density
from skgp.kernels.scales import amplitude_range, scale_amplitude
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    fit_classification_hyperparameters,
)
from skgp.learning.defaults import FEW_ROWS_MODERATION, SCALE_ROWS
from skgp.learning.label_scales import refine_length_scales
from skgp.learning.plan import (
    Fit,
    Options,
    in_sums,
    resolve_classification,
    streaming_classification,
    unit_prior_basis,
)
from skgp.learning.search import HyperparameterFit
from skgp.learning.stochastic import SomeRows
from skgp.models import qsgp

_NO_WEIGHTS = (
    "sample_weight and class_weight are not supported by solver='sgd'; use solver='newton'."
)


class QSGPClassifierFitting(ProjectedClassifierMixin, QSGPMixin, StreamingGPClassifier):
    """The hooks of the classifiers' interface, by the functions of :mod:`skgp.models.qsgp`."""

    bound: str
    validation_: dict[str, dict[float, float]]
    _online: OnlineLaplace

    @property
    def _has_stream(self) -> bool:
        return hasattr(self, "_online")

    def _check_parameters(self, *, stream: bool = False) -> None:
        if stream and (self.solver == "sgd" or self.basis == "relevance"):
            raise ValueError(
                "partial_fit needs solver='newton' with Fourier features or inducing points; got "
                f"solver={self.solver!r} and basis={self.basis!r}."
            )

    def _takes_blocks(self, n_columns: int) -> bool:
        if self.solver != "sgd":
            return self.basis != "relevance"
        fourier = self.kernel is None or has_spectral_density(self.kernel)
        return self.basis in ("auto", "fourier") and self.class_weight is None and fourier

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        if self.solver != "sgd":
            of_classes = partial(coded_columns, n_classes=len(self.classes_))
            given = blocks.then(of_classes, blocks.some).to(backend.device)
            self._learn(blocks.some, session, backend, blocks=given)
            return
        read = blocks.blocks.by_rows()
        numbers = numbers_of_some(blocks.blocks, backend)
        coded = partial(one_vs_rest, n_classes=len(self.classes_))
        rows = SomeRows(read.X, read.y, numbers, coded)
        if read.weight is not None:
            raise ValueError(_NO_WEIGHTS)
        self._learn(blocks.some, session, backend, rows=rows)

    def _learn(
        self,
        data: Data,
        session: FitSession,
        backend: Backend,
        *,
        stream: bool = False,
        rows: SomeRows | None = None,
        blocks: MappedBlocks | None = None,
    ) -> None:
        self.__dict__.pop("_online", None)  # a stream ends here
        if stream:
            self._start_stream(data, session, backend)
            return
        if self.solver != "sgd" and self.basis != "relevance":
            data = merge_equal(data)
        whole = rows is None and blocks is None
        if isinstance(self.projection, Integral) and not whole:
            raise ValueError(
                f"projection={self.projection} needs all rows in memory; give arrays, not blocks, "
                "or None."
            )
        chooses = whole and self.solver != "sgd"
        data = self._projected(data, self._one_vs_rest(data), backend, chooses=chooses)
        given = self._coded_rows(data, cautious=False)
        data, generator = given.to(backend.device), backend.generator()
        found = self._learn_kernel(session, given, data, generator)
        state = None
        if self.solver == "sgd":  # what it has learnt so far can predict at any time

            def state():
                return self._fitted_attributes(callback.info["fit"]())

        with session.stage("solve", state=state) as callback:
            problem = self._problem(found, data, backend, generator, callback)
            fit = self._solve(problem, given, self._previous(backend)[1], rows, blocks)
        self._keep_fit(fit, self._fitted_attributes(fit), backend)
        self._warn_at_bounds()
        self._keep_relevance(fit, session)

    def _coded_rows(self, data: Data, *, cautious: bool) -> Data:
        """Set likelihood and base rates; the observations with y (n, c) coded."""
        self._set_link(data, cautious=cautious)
        return replace(data, y=to_tensor(self._one_vs_rest(data)))

    def _start_stream(self, data: Data, session: FitSession, backend: Backend) -> None:
        """Learn from the first rows of a stream what all its rows will share."""
        # A row of each kind more: a class that comes late must not have an infinite offset.
        projected = self._projected(data, self._one_vs_rest(data), backend, chooses=False)
        given = self._coded_rows(projected, cautious=True)
        rows = given.to(backend.device)
        found = self._learn_kernel(session, given, rows, backend.generator())
        plan = streaming_classification(self._plan(), len(rows), found.kernel)
        Z = None
        if plan.basis == "inducing":
            rng = np.random.RandomState(backend.seed)
            plain = replace(given, weight=None)
            centres = cluster_centres(plain, plan.size, found.kernel, random_state=rng)
            Z = to_tensor(centres, device=backend.device)
        settings = Options(feature_map=self.feature_map, seed=backend.seed)
        basis = unit_prior_basis(found.kernel, rows.X, plan, settings, Z)
        offset = to_tensor(self.offset_, device=backend.device)
        self._online = OnlineLaplace(basis, offset, self._likelihood)
        self.kernel_, self.basis_, self.n_basis_ = found.kernel, plan.basis, plan.size
        self.solver_, self.covariance_, self.reason_ = plan.solver, plan.covariance, plan.reason
        self.moderation_, self.validation_ = FEW_ROWS_MODERATION, {}
        self._forget_optional()
        self._update(data, backend)

    def _update(self, data: Data, backend: Backend) -> None:
        X = to_tensor(self._inputs(data.X.numpy()))
        rows = replace(data, X=X, y=to_tensor(self._one_vs_rest(data))).to(backend.device)
        self._online.update(rows.X, rows.y, rows.weight)
        posterior = self._online.posterior()
        augmented = self.augment and self.basis_ == "inducing"
        self._posterior = AugmentedPosterior(posterior) if augmented else posterior
        self.n_iter_ = max(1, self._online.n_iter)

    def _learn_kernel(
        self, session: FitSession, given: Data, data: Data, generator: torch.Generator
    ) -> HyperparameterFit:
        """Return the kernel with learned hyper-parameters, and what the search found out.

        `given` are the observations on the CPU, `data` the same on the device.
        """
        self.history_ = {"hyperparameters": [], "solve": []}
        kernels = [self.kernel_] if self._goes_on else self._kernels(given)
        if not self._learns:
            return HyperparameterFit(kernels[0])
        shared: dict[str, Any] = {
            "offset": to_tensor(self.offset_, device=data.X.device),
            "generator": generator,
        }
        settings = ClassificationSettings(**self._search_options(data))
        if len(data) >= SCALE_ROWS:  # more correct the scales below
            settings = replace(settings, rescales=False)
        with session.stage("hyperparameters") as callback:
            found = fit_classification_hyperparameters(
                kernels,
                data,
                likelihood=self._likelihood,
                settings=settings,
                callback=callback,
                **shared,
            )
            self.history_["hyperparameters"] = found.history
            refined = refine_length_scales(
                found.kernel, data, self._likelihood, callback=callback, **shared
            )
        return replace(found, kernel=refined)

    def _problem(
        self,
        found: HyperparameterFit,
        data: Data,
        backend: Backend,
        generator: torch.Generator,
        callback: Callback,
    ) -> qsgp.Problem:
        """What the solvers start from for fixed hyper-parameters."""
        learns = self._learns and cast(Kernel, found.kernel).n_dims > 0
        options = self._shared_options(backend, bound=self.bound, learn_hyperparameters=learns)
        model = self._likelihood, to_tensor(self.offset_, device=backend.device)
        return qsgp.Problem(found.kernel, data, 0.0, options, generator, callback, *model)

    def _solve(
        self,
        problem: qsgp.Problem,
        given: Data,
        state: Any,
        rows: SomeRows | None,
        blocks: MappedBlocks | None,
    ) -> Fit:
        """Fit the posteriors of the latent functions to the data `given` on the CPU, too.

        With `rows` or `blocks` these are learned from, of which the data are some.
        """
        data = problem.data
        n = len(data) if rows is None else len(rows.X)
        n = n if blocks is None else len(blocks)
        plan = resolve_classification(self._plan(), n, data.y.shape[1], problem.kernel)
        if blocks is not None:
            plan = in_sums(self._plan(), plan, n, len(data), data.y.shape[1])
        Z = inducing_points(problem, plan, given)
        return qsgp.fit_classifier(problem, plan, Z=Z, state=state, rows=rows, blocks=blocks)

    def _fitted_attributes(self, fit: Fit) -> dict[str, Any]:
        """What makes this estimator one fitted by `fit`, the labels aside."""
        low, high = amplitude_range(fit.kernel)
        return {
            **self._fit_attributes(fit),
            "kernel_": scale_amplitude(fit.kernel, fit.amplitude if low < high else 1.0),
            "moderation_": fit.moderation,
            "validation_": fit.scores,
            "history_": {**self.history_, "solve": fit.history},
        }


def merge_equal(data: Data) -> Data:
    """Observations, those of equal input and label merged to one of their total weight.

    Where the first of them stood, so that without any nothing changes.
    """
    X, weight = arrays(data)
    number = replicates(np.column_stack([X, data.y.numpy()]))
    first = np.unique(number, return_index=True)[1]
    if len(first) == len(X):
        return data
    total = np.bincount(number, weights=weight).astype(np.float64)
    return replace(data.take(torch.from_numpy(first)), weight=to_tensor(total))
