"""Vecchia approximations of GP classification: the estimator of `skgp.models.vecchia`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral

from skgp.data import Data
from skgp.estimators._base import Backend
from skgp.estimators._base_classifier import BaseGPClassifier
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import Interval, StrOptions, keep_parameters
from skgp.estimators._reduction import ProjectedClassifierMixin
from skgp.estimators._vecchia import VecchiaMixin
from skgp.estimators.defaults import VECCHIA_LABELS, VECCHIA_NEIGHBORS
from skgp.inference.vecchia.laplace import LatentPosterior
from skgp.models.vecchia import fit_vecchia_classifier


class VecchiaGPClassifier(ProjectedClassifierMixin, VecchiaMixin, BaseGPClassifier):
    r"""Gaussian process classification by Vecchia's approximation and Laplace's.

    The prior density of the latent function at all observations is a product of densities, each
    given H of the observations before it [1]_,

    .. math:: p(f) \approx \prod_i p(f_i \mid f_{N(i)}), \qquad N(i) \subset \{1 \dots i - 1\},

    of a process whose large scales m inducing points have taken out before [2]_; m = 0 is Vecchia's
    own. The posterior is Laplace's approximation about the mode of f at all observations. A fit
    costs
    :math:`O(n H^2 (H + m) + n m^2)` and some hundred products with sparse matrices of n H numbers.

    Every observation is a point of its own, as in label kriging and the dense classifier, and not
    one of few hundred basis functions. Below some 2000 observations `GaussianProcessClassifier` is
    exact.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels with one
        length scale a column, or one for all components of a projection; up to 2500 observations
        labels left out then correct amplitude and length scales. Beyond, for a kernel given too,
        held-out labels decide between this kernel and, of several length scales, one that all
        labels, as numbers, prefer, and correct its scales.
    n_neighbors : int, default=20
        H, of the earlier observations that each is conditioned on; all there are if that is fewer.
        Predictions use twice as many of all observations, at least one, which fade with their
        distance.
    n_inducing : int or None, default=None
        m; 0 for none. None is 400, or the number of distinct inputs if that is fewer, which makes
        the prior exact; beyond 2500 observations none, unless held-out labels are predicted better
        with them, and fewer of more than 100000. More than the distinct inputs is lowered to their
        number, with a warning.
    {ordering}
    likelihood : {"logit", "probit"}, default="logit"
        The link, which makes probabilities of f.
    projection : int, "auto" or None, default="auto"
        Principal components of X that the kernel sees in place of its columns, divided by their
        standard deviations if observations are predicted better by their neighbours then. "auto" is
        50 with ``kernel=None`` and more than 50 columns, unless these predict labels held out
        better.
    {warp_inputs, class_weight, optimizer}
    max_iter : int, default=0
        Iterations of L-BFGS-B, at most, by which the evidence of `batch_size` of more than 2500
        observations improves on amplitude and common length scale of a dense GP on fewer, before
        held-out labels do. They gain nothing on the sets tried, and take a fifth of the time.
    tol : float, default=1e-3
        Relative change of the evidence at which they end; its estimates are no finer.
    batch_size : int or None, default=2000
        Observations, at random, whose evidence that is. None takes all.
    {random_state}
    device : str or torch.device, default="auto"
        Of fit and predictions; "auto" is "cuda" where there is one and at least 500
        observations, else "cpu". Sparse triangular systems are solved on the CPU.
    {dtype, n_jobs, memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_, input_powers_, n_neighbors_}
    inducing_points_ : ndarray of shape (m, d)
        In the coordinates of the projection, if there is one.
    n_inducing_ : int
    ordering_ : {"maximin", "random"}
    {offset_}
    log_marginal_likelihood_value_ : float
        Laplace's approximation, of all observations, in nats; summed over the classes beyond two.
    {moderation_, coupling_, n_iter_}
    history_ : dict of lists
        "hyperparameters": log evidence per observation, in nats; "solve": minus the log joint
        density at the steps towards the mode.
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    VecchiaGPRegressor : The same for quantities.
    SWSGPClassifier : Neighbours among inducing points; streams.
    QSGPClassifier : Basis functions that every observation uses, and Laplace's approximation.

    Notes
    -----
    Observations of equal inputs and labels are merged. Posterior variances are exact for up to some
    1700 observations of two classes, else estimated from 50 draws at the observations, 20 of many,
    which ``random_state`` decides: the prediction at a point is the same whatever points come with
    it. With H or m as many as the observations this is the dense classifier, at a higher cost.

    References
    ----------
    .. [1] Kuendig and Sigrist (2024), Iterative methods for Vecchia-Laplace approximations for
       latent Gaussian process models.
    .. [2] Gyger, Furrer and Sigrist (2025), Vecchia-inducing-points full-scale approximations for
       Gaussian processes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import VecchiaGPClassifier
    >>> X, y = make_moons(200, noise=0.1, random_state=0)
    >>> model = VecchiaGPClassifier(n_neighbors=10, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.n_neighbors_, model.ordering_
    (10, 'maximin')
    """

    _parameter_constraints = {
        "likelihood": [StrOptions({"logit", "probit"})],
        "max_iter": [Interval(Integral, 0, None, closed="left")],
    }

    _n_search_stages = 1
    _chooses_inducing = True

    _posterior: LatentPosterior

    def __init__(
        self,
        kernel=None,
        *,
        n_neighbors=VECCHIA_NEIGHBORS,
        n_inducing=None,
        ordering="auto",
        likelihood="logit",
        projection="auto",
        class_weight=None,
        warp_inputs="auto",
        optimizer="auto",
        max_iter=0,
        tol=1e-3,
        batch_size=VECCHIA_LABELS,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        data = self._projected(data, self._one_vs_rest(data), backend)
        kernels = self._kernels(data)
        self._set_link(data)
        data = self._distinct(data, backend)
        settings = replace(self._settings(data), **self._search_options(data))
        with session.stage("hyperparameters") as callback:
            fit = fit_vecchia_classifier(
                kernels,
                data,
                settings,
                self._likelihood,
                backend.tensor(self.offset_),
                callback=callback,
                **self._told(backend),
            )
        self._keep(fit)
        self.history_["solve"] = fit.solve
        self.kernel_, self.moderation_, self.coupling_ = fit.kernel, fit.moderation, fit.coupling
        self._warn_at_bounds()
