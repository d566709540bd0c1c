r"""QSGP by stochastic gradients whose cost depends neither on n nor on m.

Evans and Nair, "Quadruply Stochastic Gaussian Processes" (2020), sections 2 and 4, appendices F and
I.1. An iteration draws rows :math:`\tilde l` and two samples :math:`\tilde i, \tilde j` of basis
functions (a third, of the dense columns of C, if asked), estimates the losses of the mean and of
the dense columns with their sparse gradients (`estimators`), corrects both by control variates
(`control_variates`) and moves the rows :math:`\tilde i` and :math:`\tilde j` (`sgd_optimizers`).
Columns of C without entries below the diagonal follow from Proposition 1.

Beyond the paper: ``optimizer="nystrom"`` takes block Newton directions built from the control
variate's features. One thread, rank-500 control variate, RMSE of the mean on test rows:

=========================================  ======================  =========================
estimator, optimizer                       8-d waves, n = m = 2e4  kin40k, m = 1e5
=========================================  ======================  =========================
Theorem 1, AdaGrad, no control variate     .550 (500 iterations)
Theorem 1, AdaGrad (the paper)             .332 (12 s)
symmetric, AdaGrad                         .313 (12 s)             .421 (400 iterations, 30 s)
symmetric, nystrom                         .179 (10 s)             .272 (400, 35 s; .237: 115 s)
=========================================  ======================  =========================

Of no use in the same trials: averaged iterates (they lag), the regression coefficient at rank 500,
the preconditioner applied to the whole space instead of the sampled block (it diverges), one
preconditioner shared by all blocks (it diverges) and constant steps along the Newton directions
(faster for a while, then divergent unless tuned; AdaGrad's scaling needs no tuning).

Diagonal entries of dense columns stay positive because a step may at most halve them.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from skgp.inference.stochastic.basis import StochasticBasis
from skgp.inference.stochastic.hyper import COMPLEXITIES
from skgp.inference.stochastic.solver import Callback, Options, Solver
from skgp.inference.stochastic.state import SGDResult, SGDState, initial_state
from skgp.optim import LossPlateau, exponential_decay

__all__ = ["fit_sgd"]


def fit_sgd(
    X: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    basis: StochasticBasis,
    noise_variance: float,
    *,
    theta: Tensor | None = None,
    covariance: str = "diagonal",
    n_dense_columns: int = 100,
    column_batch_size: int | None = None,
    batch_size: int = 500,
    basis_batch_size: int = 10_000,
    n_support: int = 500,
    optimizer: str = "nystrom",
    learning_rate: float = 0.1,
    decay: float = 0.3,
    max_iter: int = 1000,
    tol: float | None = None,
    learn_hyperparameters: bool = False,
    hyper_learning_rate: float | None = None,
    complexity: str = "bound",
    freeze_iterations: int = 0,
    symmetric: bool = True,
    control: str = "projection",
    scaling: str = "draws",
    coefficient: float | str = 1.0,
    linear_control: Tensor | None = None,
    memory_budget: int = 2**28,
    generator: torch.Generator,
    callback: Callback | None = None,
    state: SGDState | None = None,
) -> SGDResult:
    r"""Fit the variational posterior of a QSGP by stochastic gradients.

    Parameters
    ----------
    X : Tensor or ndarray of shape (n, d)
        A memory map is read by rows, as they are sampled; it is never loaded.
    y : Tensor or ndarray of shape (n,)
        Centred targets.
    basis : StochasticBasis
        `FourierBasis` or `InducingBasis`; its ``dtype`` is that of all parameters.
    noise_variance : float
        :math:`\sigma^2`, in squared units of y.
    theta : Tensor, optional
        Log hyper-parameters of the basis' kernel; by default the kernel's own.
    covariance : {"diagonal", "chevron"}
        Mean-field, or with `n_dense_columns` dense columns of the Cholesky factor (QSGP-k).
    n_dense_columns : int, default=100
        k, at most m, for "chevron".
    column_batch_size : int, optional
        Dense columns sampled an iteration; all by default.
    batch_size, basis_batch_size : int
        :math:`\tilde n` and :math:`\tilde m`. At most n and m are used, and whole sampling units.
    n_support : int, default=500
        Rank :math:`\bar n` of the control variates; 0 for none.
    optimizer : {"nystrom", "adagrad", "adam", "momentum"}
        "adagrad" is the paper's. "nystrom" needs `n_support`.
    learning_rate : float, default=0.1
        For weights of prior variance about 1.
    decay : float, default=0.3
        Both learning rates fall exponentially to this fraction at `max_iter`; 1 for constant.
    max_iter : int, default=1000
        Iterations of this call.
    tol : float, optional
        Stop when the smoothed loss no longer falls by this fraction of its fall so far within 300
        iterations; None never does.
    learn_hyperparameters : bool, default=False
        Maximise the ELBO in theta and the noise variance as well, by Adam. Needs a diagonal S.
    hyper_learning_rate : float, optional
        By default ``10 / max_iter``, at most 0.01: what goes one way all the time can change by a
        factor of 200. (The paper has 1e-5 for 1e5 iterations.)
    complexity : {"bound", "support"}
        What the hyper-parameters pay for: the paper's bound, which is too much where m is not far
        below n, or an estimate from the support rows (:mod:`.sgd_hyper`).
    freeze_iterations : int, default=0
        Iterations before hyper-parameters move, counted over warm starts.
    symmetric : bool, default=True
        See `quadratic_loss`; False is Theorem 1 to the letter.
    control : {"projection", "support"}
        Whether the support rows stand for all rows by projection or alike, as in eq. (3).
    scaling : {"draws", "union"}
        See `control_variates`; "union" is the paper's.
    coefficient : float or "regression"
        Of the control variate of eq. (3).
    linear_control : Tensor of shape (m,), optional
        A precomputed :math:`\Phi^T y` for the control variate of :math:`y^T \Phi \mu`.
    memory_budget : int, default=2**28
        Bytes of the control variate's features to keep between iterations.
    generator : torch.Generator
    callback : callable, optional
        ``callback(iteration, {"loss": ..., "support_mse": ...})``; True stops.
    state : SGDState, optional
        Continue from an earlier call with the same basis and covariance. X may be other data.

    Returns
    -------
    SGDResult

    Raises
    ------
    ValueError
        For an option out of range, named with its value and the remedy.
    NonFiniteStepError
        If a step is not finite. It names iteration and parameter and carries the last good state.

    Examples
    --------
    >>> import torch
    >>> from sklearn.gaussian_process.kernels import RBF
    >>> from skgp.kernels import FourierFeatures
    >>> from skgp.inference.stochastic.basis import FourierBasis
    >>> X = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    >>> basis = FourierBasis(FourierFeatures(RBF(0.5), 100, 1, seed=0, block_size=10))
    >>> generator = torch.Generator().manual_seed(0)
    >>> result = fit_sgd(X, X[:, 0].sin(), basis, 0.01, max_iter=100, generator=generator)
    >>> result.n_iter, result.history["support_mse"][-1] < 1e-4
    (100, True)

    Notes
    -----
    An iteration takes :math:`O((\tilde n + \bar n) \tilde m (d + k))`, "nystrom"
    :math:`O(200^2 \tilde m)` more. Between iterations it keeps :math:`O(m k)`.
    """
    _check_options(noise_variance, n_support, learning_rate, decay, max_iter)
    if control not in ("projection", "support"):
        raise ValueError(f'control must be "projection" or "support", got {control!r}.')
    k = _n_dense(covariance, n_dense_columns, basis.n_features)
    if learn_hyperparameters and not basis.diagonal_precision:
        basis.log_precision_diag(torch.zeros(1, dtype=torch.int64))  # says why not
    if state is None:
        state = initial_state(
            X, y, basis, noise_variance, theta, k, n_support, optimizer, generator=generator
        )
    elif state.n_dense != k or len(state.weights) != basis.n_features:
        raise ValueError(
            f"state has {len(state.weights)} basis functions and {state.n_dense} dense columns; "
            f"the call asks for {basis.n_features} and {k}. Start without state."
        )
    if complexity not in COMPLEXITIES or (complexity == "support" and not len(state.X_support)):
        raise ValueError(
            f'complexity must be "bound", or "support" with n_support > 0, got {complexity!r}.'
        )
    if hyper_learning_rate is None:
        hyper_learning_rate = min(10 / max_iter, 0.01)
    start = state.n_iter
    options = Options(
        batch_size=min(batch_size, len(X)),
        basis_batch_size=basis_batch_size,
        column_batch_size=column_batch_size,
        learn_hyperparameters=learn_hyperparameters,
        complexity=complexity,
        freeze_iterations=freeze_iterations,
        symmetric=symmetric,
        rate=_shifted(exponential_decay(learning_rate, learning_rate * decay, max_iter), start),
        hyper_rate=_shifted(
            exponential_decay(hyper_learning_rate, hyper_learning_rate * decay, max_iter), start
        ),
    )
    solver = Solver(X, y, basis, options, state, generator)
    solver.set_control_variates(control, scaling, coefficient, linear_control, memory_budget)
    rule = LossPlateau(tol=tol, patience=300, smoothing=0.98) if tol is not None else None
    return solver.run(max_iter, rule, callback)


def _shifted(schedule: Callable[[int], float], start: int) -> Callable[[int], float]:
    """Let a schedule begin at iteration `start`."""
    return lambda iteration: schedule(iteration - start)


def _n_dense(covariance: str, n_dense_columns: int, m: int) -> int:
    if covariance == "diagonal":
        return 0
    if covariance != "chevron":
        raise ValueError(f'covariance must be "diagonal" or "chevron", got {covariance!r}.')
    if not 1 <= n_dense_columns <= m:
        raise ValueError(f"n_dense_columns must be in 1..m={m}, got {n_dense_columns}.")
    return n_dense_columns


def _check_options(
    noise_variance: float, n_support: int, learning_rate: float, decay: float, max_iter: int
) -> None:
    positive = {
        "noise_variance": noise_variance,
        "learning_rate": learning_rate,
        "decay": decay,
        "max_iter": max_iter,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")
    if n_support < 0:
        raise ValueError(f"n_support must be 0 (no control variate) or more, got {n_support}.")
