"""Quadruply stochastic GP classification: the estimator of :mod:`skgp.models.qsgp`."""

from __future__ import annotations

from skgp.estimators._base_classifier import StreamingGPClassifier
from skgp.estimators._parameters import StrOptions, keep_parameters, options
from skgp.estimators._qsgp_classifier_fitting import QSGPClassifierFitting
from skgp.estimators._qsgp_fitting import CONSTRAINTS
from skgp.estimators._reduction import ProjectedClassifierMixin


class QSGPClassifier(QSGPClassifierFitting):
    r"""Gaussian process classification with up to millions of basis functions.

    The latent function of class j is :math:`f_j(x) = o_j + \sum_r w_{rj} \phi_r(x)` with
    :math:`w_j \sim N(0, S^{-1})`, :math:`\phi(x)^T S^{-1} \phi(x') \approx k(x, x')` and
    :math:`P(y = j) = g(f_j)` [1]_; :math:`o_j` predicts the base rate. Beyond two classes each is
    set against the rest, over shared features, and the probabilities are divided by their sum.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f, without WhiteKernel. None chooses among RBF and Matern kernels by evidence
        and held-out labels; labels left out then correct amplitude and length scales.
    basis : {"auto", "fourier", "inducing", "relevance"}, default="auto"
        Random Fourier features, kernels centred on inducing points (centres of clusters of the
        observations), or kernels centred on the few observations that the evidence keeps.
    n_basis : int or None, default=None
        Number of basis functions m. By default all observations up to 2000, then as many as about a
        minute allows, at most 4096; 100000 for "sgd". Of "relevance", the observations that are
        candidates.
    likelihood : {"logit", "probit"}, default="logit"
        The link g.
    projection : int, "auto" or None, default="auto"
        Principal components of X that the kernel sees in place of its columns, divided by their
        standard deviations if observations are predicted better by their neighbours then. "auto" is
        50 with ``kernel=None`` and more than 50 columns of arrays, unless these predict held-out
        labels better; None of "sgd", streams and blocks.
    solver : {"auto", "newton", "sgd"}, default="auto"
        Newton's method for the Laplace approximation, with conjugate gradients where the Hessian
        is large; or stochastic gradients of a variational bound (Theorem 3), whose iterations cost
        the same for any number of observations and basis functions, and which need many of them.
    bound : {"plug-in", "strict"}, default="plug-in"
        Of "sgd": integrate the likelihood over the sampled mean and variance of f, which is nearer
        to the bound of the whole basis, or over sampled weights, which never exceeds it.
    covariance : {"auto", "full", "chevron", "diagonal"}, default="auto"
        Posterior covariance of the weights: exact, with `n_dense_columns` dense columns of the
        Cholesky factor, or mean-field. "auto" is the first where it is affordable, else the last.
    n_dense_columns : int, default=100
        For ``covariance="chevron"``.
    basis_batch_size : int, default=20_000
        Basis functions sampled an iteration of "sgd".
    batch_size : int, default=100
        Observations sampled an iteration of "sgd".
    n_support : int, default=200
        Observations that shape the directions of "sgd"; 0 for plain AdaGrad.
    {augment, feature_map, warp_inputs, class_weight, optimizer}
    max_iter : int or None, default=None
        Newton steps (30 by default), or iterations of "sgd" (1000).
    tol : float or None, default=None
        Relative gradient at which Newton's method ends (1e-4 by default); relative fall of the
        smoothed loss below which "sgd" ends (never by default).
    learning_rate : float, default=0.1
        Of "sgd".
    warm_start : bool, default=False
        Start from the hyper-parameters of the last fit and, with "sgd", from its weights. Another
        kernel, likelihood, basis, projection, number of columns or set of classes begins anew.
    {random_state, device}
    dtype : {"float64", "float32"}, default="float64"
        Of the features of the fit. Beyond 2e7 of them (observations times basis functions) they are
        float32 either way, where a comparison shows that they can. Predictions are in float64.
    {n_jobs, memory_budget, verbose}

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
    {kernel_, input_powers_}
    basis_, solver_, covariance_ : str
    n_basis_ : int
    reason_ : str
        Why these were chosen.
    moderation_ : float
        Probabilities average over f with this factor of its posterior variance; 0 takes f at its
        mean. Chosen on held-out observations; of up to 200 by leaving out each in turn.
    offset_ : ndarray of shape (1,) or (n_classes,)
        Constant parts of the latent functions.
    log_marginal_likelihood_value_ : float
        Laplace's approximation, in nats, under the basis used, summed over the latent functions.
        Set where the covariance is full, and for relevance vectors.
    elbo_ : float
        Of "sgd": the bound in nats, estimated by the last tenth of the iterations.
    n_iter_ : int
    validation_ : dict of str to dict
        Mean log density of held-out observations, in nats: "amplitude", by factor of the amplitude
        that a subset suggested, and "moderation", by factor of the posterior variance.
    history_ : dict of lists
        "hyperparameters": log evidence per observation; "solve": the loss in nats.
    relevance_ : ndarray of int
        With ``basis="relevance"``: the observations that are relevance vectors.
    n_relevance_vectors_ : int
        Their number.
    {interrupted_, n_features_in_, feature_names_in_}

    See Also
    --------
    sklearn.gaussian_process.GaussianProcessClassifier : The dense GP of up to two thousand points.

    Notes
    -----
    ``partial_fit`` changes the posterior, which is the prior of the next call; observations are not
    kept. The first call learns the hyper-parameters and the base rates and chooses the basis:
    Fourier features (1024 by default) or as many inducing points. Later calls keep them. The result
    is near that of a fit to all observations, and depends a little on their order.

    Observations that dask holds, or that exceed `memory_budget` in memory, are read in blocks: by
    Newton's method with Fourier features or inducing points in a pass a step, which adds up
    gradients and Hessians, exact, of fewer basis functions by default; by ``solver="sgd"`` with
    Fourier features in minibatches. Hyper-parameters, the amplitude and ``moderation_`` are those
    of 60000 observations at random. The indices of the labels are held in memory, a byte or two an
    observation.

    References
    ----------
    .. [1] Evans and Nair (2020), Quadruply stochastic Gaussian processes.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> from skgp import QSGPClassifier
    >>> X, y = make_moons(100, noise=0.1, random_state=0)
    >>> model = QSGPClassifier(random_state=0).fit(X, y)
    >>> model.predict([[0.0, 1.0], [1.0, -0.5]])
    array([0, 1])
    >>> model.solver_, model.basis_, model.n_basis_
    ('newton', 'inducing', 100)
    """

    _parameter_constraints: dict = {
        **StreamingGPClassifier._parameter_constraints,
        **CONSTRAINTS,
        "basis": [StrOptions({"auto", "fourier", "inducing", "relevance"})],
        "likelihood": [StrOptions({"logit", "probit"})],
        "solver": [StrOptions({"auto", "newton", "sgd"})],
        "bound": [StrOptions({"plug-in", "strict"})],
        "covariance": [StrOptions({"auto", "full", "chevron", "diagonal"})],
        **ProjectedClassifierMixin._projection_constraints,
    }

    _option_rules = (
        options("batch_size basis_batch_size n_support learning_rate bound", solver=("sgd",)),
        options("n_dense_columns", covariance=("chevron",)),
        options("feature_map", basis=("fourier",)),
    )
    _updated_in_place = frozenset({"_online", "_sgd_state"})

    def __init__(
        self,
        kernel=None,
        *,
        basis="auto",
        n_basis=None,
        likelihood="logit",
        projection="auto",
        solver="auto",
        bound="plug-in",
        covariance="auto",
        n_dense_columns=100,
        basis_batch_size=20_000,
        batch_size=100,
        n_support=200,
        augment=True,
        feature_map="orthogonal",
        class_weight=None,
        warp_inputs="auto",
        optimizer="auto",
        max_iter=None,
        tol=None,
        learning_rate=0.1,
        warm_start=False,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())
