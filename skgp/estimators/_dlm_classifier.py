"""Sparse GP classifiers trained on the log-loss (:mod:`skgp.models.dlm`)."""

from __future__ import annotations

import torch

from skgp.data import Data
from skgp.estimators._base import Backend
from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._dlm_common import SparseGPMixin
from skgp.estimators._fitting import FitSession
from skgp.estimators._parameters import StrOptions, keep_parameters
from skgp.learning.calibration import FEW_ROWS_COUPLING, best_calibration, left_out_moments
from skgp.learning.defaults import FEW_ROWS
from skgp.learning.sparse import defaults
from skgp.learning.sparse.objective import Objective

_REGRESSION_OBJECTIVES = ("square_loss", "fitc")


class DLMGPClassifier(SparseGPMixin, StreamingGPClassifier):
    r"""Sparse Gaussian process classification trained on the loss that it is judged by.

    The latent function of class j is a sparse GP around :math:`o_j`, which predicts the base rate,
    and :math:`P(y = j) = g(f_j)`. The posterior q over the values at M inducing points, the points
    and the hyper-parameters minimise [1]_

    .. math:: \sum_i \ell_i(q) + \beta\, \mathrm{KL}(q \,\|\, p),

    by default with :math:`\ell_i = -\log E_q[p(y_i \mid f_i)]`, the log-loss of the prediction,
    where the ELBO has :math:`-E_q[\log p(y_i \mid f_i)]`. Beyond two classes each is
    set against the rest, over shared inducing points, and claims an observation with probability
    :math:`p_j = E_q[g(f_j)]`; predicted are :math:`P(y = j) \propto p_j (1 - p_j)^{-\lambda}`, as
    for independent claims (:math:`\lambda = 1`) or more cautious ones.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels with one
        length scale a column, or of many columns one for all; up to 500 observations by labels left
        out, too.
    objective : {"log_loss", "elbo"}, default="log_loss"
        What to minimise; the second is for comparison and for streams.
    beta : float or "auto", default=1.0
        Weight of the KL divergence. "auto" chooses among 8, 4, ..., 0.015 by held-out data, along a
        path of warm starts from 1 down and up, which costs three to five single fits.
    likelihood : {"probit", "logit"}, default="probit"
        The link g. Averages of the first over f have a closed form.
    n_inducing : int or "auto", default="auto"
        Number of inducing points M; lowered to the number of distinct inputs, with a warning.
        "auto" is 200, or the number of distinct inputs.
    {inducing, init, hyperparameters, gradient, n_gradient_samples}
    {warp_inputs, class_weight, optimizer}
    {max_iter}
    tol : float, default=1e-6
        Relative fall of the objective in an iteration below which to stop, 1e5 / n times as much
        with few observations: n at most 2 `n_inducing`, and 500.
    {learning_rate}
    batch_size : int or None, default=None
        Observations of a minibatch. None takes all observations at once while n M, times the number
        of classes beyond two, is below 1e6 (1e7 for q alone).
    warm_start : bool, default=False
        Start from the hyper-parameters, points and posterior of the last fit. Another kernel,
        likelihood, number of points or of columns, or set of classes begins anew.
    {early_stopping, validation_fraction, random_state, device, dtype, n_jobs, memory_budget}
    {verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_, input_powers_}
    inducing_points_ : ndarray of shape (M, d)
    n_inducing_ : int
    offset_ : ndarray of shape (1,) or (n_classes,)
        Prior means of the latent functions.
    beta_ : float
    beta_path_ : dict of float to float
        Of ``beta="auto"``: the loss of the held-out data for each beta tried.
    loss_ : float
        The objective's value, in nats, summed over the observations, and over the classes beyond
        two.
    {elbo_, validation_loss_}
    coupling_ : float
        The exponent :math:`\lambda`, 0 for two classes: of 0, 1/4, ..., 1 that which predicts the
        observations best, each left out of q in turn. Below 100 observations it is 1/2.
    moderation_ : float
        Share of the posterior variance of f over which probabilities average, chosen along with
        `coupling_` from 0, 1/16, 1/4 and 1; 1 for two classes, and below 100 observations.
    {n_iter_, history_, interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    DLMGPRegressor : The same for quantities and counts.
    QSGPClassifier : Many more basis functions, fixed places, Laplace's approximation.

    Notes
    -----
    ``partial_fit`` changes the posterior, which is the prior of the next call; observations are not
    kept. In the first call every class counts as one observation more for the base rates: a class
    may come late. Later calls keep its hyper-parameters, inducing points, base rates and
    ``coupling_``; the posterior is near that of all observations at once, and depends a little on
    their order.

    References
    ----------
    .. [1] Wei, Sheth and Khardon (2021), Direct loss minimization for sparse Gaussian processes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import DLMGPClassifier
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> model = DLMGPClassifier(n_inducing=20, random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.inducing_points_.shape
    (20, 2)
    """

    _parameter_constraints: dict = {
        **StreamingGPClassifier._parameter_constraints,
        **SparseGPMixin._dlm_constraints,
        # Those of the regressor are known so that they can be refused with advice.
        "objective": [StrOptions({"log_loss", "elbo", *_REGRESSION_OBJECTIVES})],
        "likelihood": [StrOptions({"probit", "logit"})],
    }

    def __init__(
        self,
        kernel=None,
        *,
        objective="log_loss",
        beta=1.0,
        likelihood="probit",
        n_inducing="auto",
        inducing="learned",
        init="k-means",
        hyperparameters="joint",
        gradient="auto",
        n_gradient_samples=10,
        class_weight=None,
        warp_inputs="auto",
        optimizer="auto",
        max_iter=200,
        tol=1e-6,
        learning_rate=None,
        batch_size=None,
        warm_start=False,
        early_stopping="auto",
        validation_fraction=0.1,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())

    # ---- training ------------------------------------------------------------------------

    def _check_parameters(self, *, stream: bool = False) -> None:
        if self.objective in _REGRESSION_OBJECTIVES:
            raise ValueError(
                f"objective={self.objective!r} needs Gaussian noise, and labels have none. Use "
                "objective='log_loss' or 'elbo', or DLMGPRegressor if y is a quantity."
            )

    def _learn(
        self, data: Data, session: FitSession, backend: Backend, *, stream: bool = False
    ) -> None:
        kernels = self._kernels(data)
        # Of a stream with a row of each kind more: a late class must not have an infinite one.
        self._set_link(data, cautious=stream)
        data = self._distinct(data, backend)
        with session.stage("solve") as callback:
            objective = self._objective(self._likelihood)
            fit = self._fit_sparse(kernels, data, objective, self.offset_, backend, callback)
        self.moderation_, self.coupling_ = self._calibrate(data, fit.objective, backend)
        self.kernel_ = self._posterior.kernel
        self._warn_at_bounds()

    def _update(self, data: Data, backend: Backend) -> None:
        objective = self._objective(self._likelihood, learn=False)
        self._add_rows(self._distinct(data, backend), objective, backend)

    def _calibrate(self, data: Data, objective: Objective, backend: Backend) -> tuple[float, float]:
        """Moderation and coupling of one-vs-rest probabilities, by leave-one-out predictions.

        Of two classes the loss itself averages over f with its whole variance.
        """
        if len(self.classes_) == 2:
            return 1.0, 0.0
        if len(data) < FEW_ROWS:
            return 1.0, FEW_ROWS_COUPLING
        n_rows = int(defaults.LEFT_OUT_NUMBERS / self._posterior.whitened_mean.numel())
        data = data.some(max(FEW_ROWS, n_rows), backend.generator())
        moments = left_out_moments(self._posterior, data, objective, self._likelihood)
        return best_calibration(self._likelihood, data.y.cpu(), *moments, data.weight)

    def _class_balance(self, data: Data) -> float:
        """Share of the rarest class, relative to that of equal classes."""
        shares = (data.y > 0).double().mean(0)
        shares = shares if len(shares) > 1 else torch.cat([shares, 1 - shares])
        return float(len(shares) * shares.min())

    def _rescales(self, data: Data) -> bool:
        return self._search_options(data)["rescales"]
