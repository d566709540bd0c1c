"""Sparse-within-sparse GP classification: the estimator of :mod:`skgp.models.swsgp` for labels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Kernel

from skgp.blocks import MappedBlocks
from skgp.data import Data
from skgp.estimators import defaults
from skgp.estimators._base import Backend, to_tensor
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._classification_data import coded_columns
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.estimators._reduction import (
    INITIALISERS,
    ProjectedClassifierMixin,
    class_centres,
    inducing_points,
)
from skgp.estimators._swsgp_common import SWSGPMixin
from skgp.estimators._vecchia_classifier import VecchiaGPClassifier
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_calibration
from skgp.learning.classification_hyperparameters import (
    ClassificationSettings,
    fit_classification_hyperparameters,
)
from skgp.learning.local.hyperparameters import search_label_kernel
from skgp.learning.local.prior import LeftOut
from skgp.learning.selection import class_codes


class SWSGPClassifier(ProjectedClassifierMixin, SWSGPMixin, StreamingGPClassifier):
    r"""Sparse-within-sparse GP classification: each observation uses few of many inducing points.

    The latent function of class j is a GP around :math:`o_j`, which predicts the base rate, and
    :math:`P(y = j) = g(f_j)`. All that is learned of it is :math:`q(u) = N(m, S)` of its
    values at M inducing points. An input x uses the H inducing points I nearest to it, near under
    the kernel, and no others [1]_:

    .. math:: f(x) \sim N(o + a^T m_I,\; k_{xx} - k^T a + a^T S_I a), \qquad a = K_I^{-1} k_I
              \qquad \text{(eq. 13)},

    so that it costs :math:`O(H^3)` whatever M. q maximises

    .. math:: \sum_n w_n \Big( E_q[\log p(y_n \mid f_n)]
              - \frac{\kappa}{\sum w} \mathrm{KL}(q(u_{I_n}) \,\|\, p(u_{I_n})) \Big)
              \qquad \text{(eq. 11)}

    with a KL weight :math:`\kappa` of M / H or less, where the paper has 1. Beyond two classes each
    is set against the rest, over shared points, neighbours and factorisations, with the probability
    :math:`p_j = E_q[g(f_j)]`, and ``coupling_`` combines them.

    For many observations and boundaries that need many inducing points, and for streams. Where
    predictions may hold all observations compare `VecchiaGPClassifier`. Repeated observations count
    as independent labels, and make it over-confident.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels with one
        length scale a column, or one for all components of a projection.
    method : {"variational", "kriging"}, default="variational"
        The model above. "kriging" is deprecated: it is `VecchiaGPClassifier`, of `kernel`,
        `n_neighbors`, `likelihood`, `projection`, `class_weight` and `optimizer`.
    likelihood : {"probit", "logit"}, default="probit"
        The link g. Averages of the first over f have a closed form.
    {n_inducing}
    n_neighbors : int or "auto", default="auto"
        Inducing points H that an observation uses, or all there are if that is fewer. "auto" is 32;
        of up to 1000 observations (fewer of more than two classes) with an inducing point each it
        is all of them, which is the usual variational GP.
    kl_weight : float or "auto", default="auto"
        :math:`\kappa`. "auto" is M / H, or less by factors of ten, but not less than 1, while
        held-out observations gain. 1.0 is the paper's, which lets q overfit where M is large.
    {covariance, inducing}
    init : {"auto", "random", "k-means", "greedy"}, default="auto"
        Initial inducing points: observations at random; centres of clusters, of each class by
        itself; or observations chosen greedily, each where the conditional variance given the
        others is greatest. "auto" takes clusters for up to 0.3 n points, else observations at
        random.
    {neighbors}
    solver : {"auto", "natural", "adam"}, default="auto"
        Natural-gradient steps ("auto", "natural"), followed by Adam for what these cannot do (full
        S with H < M, learned points); or Algorithm 1 of the paper, by which minibatches move
        everything together, hyper-parameters too.
    polish : bool or "auto", default=False
        Run Algorithm 1 at the end; its result is accepted only if the validation loss falls. "auto"
        does where there are no more than a quarter as many inducing points as observations.
    projection : int, "auto" or None, default="auto"
        Principal components of X that the kernel sees in place of its columns, divided by their
        standard deviations if observations are predicted better by their neighbours then. "auto" is
        50 with ``kernel=None``, more than 50 columns and fewer neighbours than observations, unless
        these predict held-out labels better.
    {warp_inputs, class_weight, optimizer, max_iter, tol, learning_rate, batch_size, warm_start}
    validation_fraction : float, default=0.1
        Of the observations to hold out to choose the amplitude of the kernel, the KL weight,
        ``moderation_`` and ``coupling_``, and to judge a polish: at most 4000, and no fewer than
        500 or a third of the observations. q learns from all observations afterwards. Below 100
        observations none are held out.
    {random_state, device, dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_, input_powers_, inducing_points_}
    n_inducing_ : int
    {n_neighbors_, offset_, kl_weight_}
    elbo_ : float
        The bound with that weight, in nats, summed over the observations, and over the classes
        beyond two; ``partial_fit`` leaves it that of the first call.
    {polished_, coupling_, moderation_}
    n_iter_ : int
        Steps that were taken.
    history_ : dict of lists
        "hyperparameters": the objective of their search; "prior": negative log-probability of the
        label of a held-out observation, for each prior tried; "solve" and "polish": minus the
        bound, per observation.
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    SWSGPRegressor : The same for quantities and counts.
    DLMGPClassifier : Some hundred inducing points, each used by all, trained by the log-loss.
    QSGPClassifier : Many basis functions, used by each observation, and Laplace's approximation.
    VecchiaGPClassifier : Neighbours among the observations themselves, and Laplace's approximation.

    Notes
    -----
    Where H = M labels are left out of q in turn to choose ``moderation_`` and ``coupling_``. Where
    none are left out, and by fewer than 100 of two classes, ``moderation_`` is 1.

    ``partial_fit`` keeps hyper-parameters, base rates, ``moderation_`` and ``coupling_``. Later
    observations become inducing points while there are fewer than ``n_inducing``, and change q(u);
    those before them are summed up by one precision an inducing point and class, so that late ones
    count for somewhat more than early ones.

    Observations that dask holds, or that exceed `memory_budget` in memory, are read in blocks.
    Inducing points, hyper-parameters, ``moderation_`` and ``coupling_`` are then those of 60000
    observations at random, fewer where they would not fit. All observations determine the base
    rates and q(u): by a pass a natural-gradient step, from the q(u) of those observations; or by
    minibatches, where steps of Adam are taken, and ``elbo_`` is then an estimate by the last of
    them. The indices of the labels are held in memory, a byte or two per observation; dask makes
    them where the labels lie.

    References
    ----------
    .. [1] Tran, Milios, Michiardi and Filippone (2021), Sparse within sparse Gaussian processes
       using neighbor information.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import SWSGPClassifier
    >>> X, y = make_moons(200, noise=0.1, random_state=0)
    >>> model = SWSGPClassifier(n_inducing=50, n_neighbors=10, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.inducing_points_.shape
    (50, 2)
    """

    _parameter_constraints = {
        "init": [StrOptions({"auto", *INITIALISERS})],
        "likelihood": [StrOptions({"probit", "logit"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        method="variational",
        likelihood="probit",
        n_inducing=None,
        n_neighbors="auto",
        kl_weight="auto",
        covariance="auto",
        inducing="auto",
        init="auto",
        neighbors="auto",
        solver="auto",
        polish=False,
        projection="auto",
        class_weight=None,
        warp_inputs="auto",
        optimizer="auto",
        max_iter=None,
        tol=1e-4,
        learning_rate=None,
        batch_size=256,
        warm_start=False,
        validation_fraction=0.1,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    def _learn(
        self,
        data: Data,
        session: FitSession,
        backend: Backend,
        *,
        stream: bool = False,
        blocks: MappedBlocks | None = None,
    ) -> None:
        if self.method == "kriging":
            other = VecchiaGPClassifier(
                self.kernel,
                n_neighbors=self._vecchia_neighbors,
                optimizer=self.optimizer,
                likelihood=self.likelihood,
                projection=self.projection,
            )
            self._learn_as(other, data, session, backend)
            return
        given = self._projected(data, self._one_vs_rest(data), backend)
        data = self._distinct(given, backend)
        # Of classes without rows yet, as if they had one.
        missing = len(given.y.unique()) < len(self.classes_)
        self._set_link(given, cautious=missing and blocks is None)
        self.history_ = {"hyperparameters": []}
        kernel = self._learn_kernel(session, given, data, backend)
        with session.stage("solve", max_iter=self.max_iter) as callback:
            model = kernel, self._likelihood, data, self.offset_
            fit, again = self._fit_variational(*model, backend, callback, blocks=blocks)
        self.kernel_ = self._posterior.state.kernel
        if not again:
            self.moderation_, self.coupling_ = self._calibration(fit.left_out)
        self._warn_at_bounds()

    def _learn_blocks(self, blocks: MappedBlocks, session: FitSession, backend: Backend) -> None:
        some, coded = blocks.some, partial(coded_columns, n_classes=len(self.classes_))
        self._learn(some, session, backend, blocks=blocks.then(coded, coded(some)))

    def _calibration(self, left_out: LeftOut | None) -> tuple[float, float]:
        """Moderation, and coupling of one-vs-rest probabilities, that labels left out prefer."""
        if left_out is None:
            return 1.0, 0.0 if len(self.classes_) == 2 else FEW_ROWS_COUPLING
        Y, mean, var = (part.double() for part in left_out[:3])
        return best_calibration(self._likelihood, Y, mean, var, left_out.weight)

    def _update(self, data: Data, backend: Backend) -> None:
        data = replace(data, X=to_tensor(self._inputs(data.X.numpy())))
        data = self._distinct(data, backend)
        self._update_variational(data, self._likelihood, backend)

    def _learn_kernel(
        self, session: FitSession, given: Data, data: Data, backend: Backend
    ) -> Kernel:
        """Return the kernel of the latent functions, learned if it is to be."""
        if self._keeps_kernel(data):
            return self.kernel_
        kernels = self._kernels(given)
        if not self._learns:
            return kernels[0]
        data = data.to(torch.float64)
        n, c = data.y.shape
        exact = n <= self._max_inducing() and self._neighbors_of(n, each_row=True, n_latent=c) == n
        # Where f is local, its amplitude is chosen by held-out labels once more.
        local = {"scale_std": defaults.LABEL_SCALE_STD if self.kernel is None else math.inf}
        options = self._search_options(data) if exact else local
        with session.stage("hyperparameters") as callback:
            found = fit_classification_hyperparameters(
                kernels,
                data,
                offset=torch.as_tensor(self.offset_, device=backend.device),
                likelihood=self._likelihood,
                generator=backend.generator(),
                settings=ClassificationSettings(**options),
                callback=callback,
            )
            found = search_label_kernel(
                found,
                kernels,
                data,
                n_neighbors=defaults.SWSGP_NEIGHBORS
                if self.n_neighbors == "auto"
                else self.n_neighbors,
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
            init = "k-means" if n_points <= defaults.CLUSTERED_SHARE * len(data) else "random"
        if init != "k-means":
            return inducing_points(data, n_points, kernel, init=init, random_state=random_state)
        labels = class_codes((data.y.cpu() > 0).long()).numpy()
        return class_centres(data, labels, n_points, kernel, random_state=random_state)

    def _few_points(self, n_latent: int) -> int:
        return int(defaults.SWSGP_FULL_ROWS / n_latent**0.5)
