"""Quadruply stochastic Gaussian processes: the estimator of :mod:`skgp.models.qsgp`."""

from numbers import Real

from skgp.estimators._parameters import Interval, StrOptions, keep_parameters, options
from skgp.estimators._qsgp_classifier_fitting import QSGPClassifierFitting
from skgp.estimators._qsgp_fitting import QSGPFitting


class QSGPRegressor(QSGPFitting):
    r"""Gaussian process regression with up to millions of basis functions.

    The model is :math:`y = \sum_{j=1}^m w_j \phi_j(x) + \varepsilon` with
    :math:`w \sim N(0, S^{-1})` and :math:`\phi(x)^T S^{-1} \phi(x') \approx k(x, x')` [1]_. With
    one inducing basis function per observation the predictive mean is that of the exact GP. What
    suits the number of observations, the kernel and the conditioning is chosen by default and
    reported in ``solver_``, ``basis_``, ``n_basis_``, ``covariance_`` and ``reason_``.

    Parameters
    ----------
    kernel : sklearn.gaussian_process.kernels.Kernel or None, default=None
        Covariance of f; a ``WhiteKernel`` summand at the top level is the observation noise (one of
        level 0.01 is added where there is none). None chooses among RBF and Matern kernels with one
        length scale a column, started from the spread of the columns.
    basis : {"auto", "fourier", "inducing", "neighbors", "relevance"}, default="auto"
        Random Fourier features, kernels centred on observations, those of the observations near
        each test point alone (exact regression on neighbourhoods), or those on the few
        observations that the evidence keeps [2]_. Beyond 40000 observations, or where the kernel
        matrix is too large to keep, held-out observations decide, at random and in discs;
        ``reason_`` tells their log densities.
        "relevance" needs a smooth kernel. Its hyper-parameters, and which one where it is None, are
        learned as those of a GP, its length scales halved where the evidence gains much by it; the
        amplitude is without effect. Error bars shrink far from the relevance vectors.
    n_basis : int or None, default=None
        Number of basis functions m. By default as many as there are observations for the inducing
        basis, and as many Fourier features as about a minute allows. With Laplace noise all of up
        to 3000 observations, else as many as two minutes allow. Of "relevance", the observations
        that are candidates: by default all of up to 20000 observations, else 2000. Of "neighbors",
        their number: 128, half of them the nearest of all observations, the others the nearest of
        one observation in 16 and of one in 256.
    likelihood : {"auto", "gaussian", "lognormal", "laplace"}, default="auto"
        Observation noise. "lognormal" is for positive targets whose noise grows with their level:
        log y = f + Gaussian noise. "auto" is "gaussian", or "lognormal" of 50 positive targets or
        more, with ``kernel=None``, where predictions left out are clearly likelier so. "laplace" is
        for targets of which some are grossly wrong: it takes the absolute error, finds the
        hyper-parameters without the outliers, and serves ``basis="inducing"`` and "fourier" with
        ``solver="cholesky"`` and ``covariance="full"``. Beyond m n = 1e7 its features are in
        float32 if that costs no accuracy.
    solver : {"auto", "cholesky", "cg", "gauss-seidel", "sgd"}, default="auto"
        "cholesky" is exact, offers every covariance, ``partial_fit`` with Fourier features, and
        costs :math:`O(n m^2)`, or :math:`O(n^3)` with one basis function per observation. "cg" is
        block conjugate gradients with a Nystrom preconditioner. "gauss-seidel" suits 1e4 to 1e6
        Fourier features. "sgd" takes iterations whose cost depends on neither n nor m. Relevance
        vectors are found one by one ("auto"), or by "sgd".
    covariance : {"auto", "diagonal", "chevron", "full", "samples"}, default="auto"
        Posterior covariance: mean-field, with `n_dense_columns` dense columns of the Cholesky
        factor, exact, or that of posterior draws calibrated on leave-one-out residuals.
    {n_dense_columns}
    basis_batch_size : int, default=10_000
        Basis functions sampled an iteration of "sgd".
    batch_size : int, default=500
        Observations sampled an iteration of "sgd".
    n_support : int, default=500
        Rank of the control variate of "sgd"; 0 for none.
    {augment, feature_map, heteroscedastic, warp_inputs, optimizer}
    normalize_y : bool, default=True
        Centre and scale the targets, for Laplace noise by what outliers leave alone; ``kernel_`` is
        then in units of the scaled target.
    max_iter : int or None, default=None
        Iterations of "cg" (200 by default) and "sgd" (1000), sweeps of "gauss-seidel" (10), passes
        with Laplace noise (50), steps towards relevance vectors (10000).
    tol : float or None, default=None
        Relative residual at which "cg" (by default .03 standard deviations of the noise, 1e-2 at
        most, with one basis function per observation, else 1e-3) and "gauss-seidel" (1e-2) stop;
        relative fall of the smoothed loss below which "sgd" stops (never by default); rise of the
        bound of Laplace noise (1e-4), and of the evidence of relevance vectors (1e-3), in nats.
    learning_rate : float, default=0.1
        Of "sgd", which starts again with a tenth of it where it diverges.
    warm_start : bool, default=False
        Start from the hyper-parameters of the last fit and, with "sgd", from its weights and basis
        functions, if there are as many. Another kernel, likelihood, basis or number of columns
        begins anew.
    early_stopping : bool, default=False
        With "sgd", hold `validation_fraction` of the observations out, score them every 50
        iterations and stop when their squared error has not fallen for five scores. No effect on
        other solvers.
    validation_fraction : float, default=0.1
        Held-out observations by `early_stopping`, at most 1000. They are not trained on.
    {random_state, device}
    dtype : {"float64", "float32"}, default="float64"
        Of features, Gram matrices and stochastic gradients. Beyond 16000
        observations the kernel matrix of "cg" is stored in float32 either way, from entries
        computed in float64, and the residual is checked. Predictions are in float64.
    {n_jobs, memory_budget, verbose}

    Attributes
    ----------
    {kernel_, input_powers_}
    basis_, solver_, covariance_ : str
        The solver of relevance vectors is "sequential" by default.
    {n_basis_, reason_}
    likelihood_ : str
        "gaussian" or "lognormal" of "auto", else `likelihood`.
    noise_variance_ : float or ndarray of shape (t,)
        In squared units of y, or of log y; of Laplace noise twice the square of its scale.
    likelihood_scale_ : float
        Scale b of Laplace noise, in units of y.
    {relevance_, n_relevance_vectors_}
    log_marginal_likelihood_value_ : float
        In nats; of the standardised targets under the basis used, summed over several. Set where
        "cholesky" gives it, and for relevance vectors.
    elbo_ : float
        With Laplace noise: lower bound of the same.
    n_iter_ : int
    residual_ : float
        True relative residual of the linear system solved.
    calibration_ : float
        Factor by which variances were multiplied (covariance "samples"), else 1.
    history_ : dict of lists
        "hyperparameters": log-density per observation; "solve": relative residual or loss, of
        Laplace noise minus the bound per observation, of relevance vectors minus the evidence;
        "validation": mean squared error of standardised targets held out, every 50 iterations.
    {interrupted_, n_features_in_, feature_names_in_}
    y_mean_, y_scale_ : float or ndarray of shape (t,)
        Mean and standard deviation of the targets, for Laplace noise of those that are no gross
        outliers.

    See Also
    --------
    sklearn.gaussian_process.GaussianProcessRegressor : The exact GP of up to a few thousand points.

    Notes
    -----
    ``partial_fit`` adds observations exactly as if they had been there from the start: for Gaussian
    noise, ``solver="cholesky"`` and Fourier features or ``n_basis`` inducing points, which "auto"
    becomes there. The first call learns the hyper-parameters and chooses the basis; later calls
    keep both and learn the noise variance and the standardisation of y from all observations.

    Targets y (n, t) share basis, solves, kernel and noise, which has in each the same share of its
    variance, and are independent given these: hyper-parameters have the greatest sum of their
    evidence, of which constant ones are no part, and one factor calibrates all. Not with
    ``basis="relevance"``, Laplace noise, "sgd", ``partial_fit`` or observations in blocks.

    Observations that dask holds, or that exceed `memory_budget` in memory, are read in blocks: with
    Gaussian noise and ``solver="cholesky"``, of which "auto" is Fourier features, or Fourier
    features and "sgd". Hyper-parameters are then learned from 60000 observations at random.

    References
    ----------
    .. [1] Evans and Nair (2020), Quadruply stochastic Gaussian processes.
    .. [2] Tipping and Faul (2003), Fast marginal likelihood maximisation for sparse Bayesian
       models.

    Examples
    --------
    >>> import numpy as np
    >>> from skgp import QSGPRegressor
    >>> X = np.linspace(0, 10, 60)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> model = QSGPRegressor(random_state=0).fit(X, y)
    >>> mean, std = model.predict([[2.5]], return_std=True)
    >>> bool(abs(mean[0] - np.sin(2.5)) < 0.01)
    True
    >>> model.basis_, model.solver_
    ('inducing', 'cholesky')
    """

    _parameter_constraints = {
        "basis": [StrOptions({"auto", "fourier", "inducing", "neighbors", "relevance"})],
        "likelihood": [StrOptions({"auto", "gaussian", "lognormal", "laplace"})],
        "solver": [StrOptions({"auto", "cholesky", "cg", "gauss-seidel", "sgd"})],
        "covariance": [StrOptions({"auto", "diagonal", "chevron", "full", "samples"})],
        "early_stopping": ["boolean"],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
    }

    _option_rules = (
        options(
            "batch_size basis_batch_size n_support learning_rate early_stopping", solver=("sgd",)
        ),
        options("n_dense_columns", covariance=("chevron",)),
        options("feature_map", basis=("fourier",)),
        options("validation_fraction", early_stopping=(True,)),
        options(
            "max_iter tol",
            solver=("cg", "gauss-seidel", "sgd"),
            likelihood=("laplace",),
            basis=("relevance",),
        ),
    )
    _updated_in_place = frozenset({"_statistics", "_sgd_state"})

    def __init__(
        self,
        kernel=None,
        *,
        basis="auto",
        n_basis=None,
        likelihood="auto",
        solver="auto",
        covariance="auto",
        n_dense_columns=100,
        basis_batch_size=10_000,
        batch_size=500,
        n_support=500,
        augment=True,
        feature_map="orthogonal",
        heteroscedastic="auto",
        warp_inputs="auto",
        optimizer="auto",
        normalize_y=True,
        max_iter=None,
        tol=None,
        learning_rate=0.1,
        warm_start=False,
        early_stopping=False,
        validation_fraction=0.1,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        keep_parameters(self, locals())


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
    {n_dense_columns}
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
    {n_basis_, reason_}
    {moderation_, offset_}
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
    {relevance_, n_relevance_vectors_, interrupted_, n_features_in_, feature_names_in_}

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

    _parameter_constraints = {
        "basis": [StrOptions({"auto", "fourier", "inducing", "relevance"})],
        "likelihood": [StrOptions({"logit", "probit"})],
        "solver": [StrOptions({"auto", "newton", "sgd"})],
        "bound": [StrOptions({"plug-in", "strict"})],
        "covariance": [StrOptions({"auto", "full", "chevron", "diagonal"})],
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
