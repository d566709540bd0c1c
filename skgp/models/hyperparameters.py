r"""Hyper-parameters of a kernel from data, before any model is fitted.

Two objectives, both functions of ``theta``, the log hyper-parameters of a scikit-learn kernel
expression whose top-level ``WhiteKernel`` is the noise:

``marginal likelihood`` [1]_
    :math:`\log N(y; 0, K + \sigma^2 I)` of a dense GP on a random subset, by L-BFGS-B.

``leave-one-out`` by nearest neighbours [2]_, [3]_
    :math:`\frac1n \sum_i \log p(y_i \mid y_{N(i)})` where N(i) are the rows that correlate most
    with row i, itself left out: every row counts, at ``O(k^3)`` a row, by Adam on minibatches.

:func:`fit_hyperparameters` starts from the first, refines by the second and keeps whichever
predicts rows better from their neighbours; of several kernel families, the best.

References
----------
.. [1] Rasmussen and Williams (2006), Gaussian Processes for Machine Learning, eq. (5.8).
.. [2] Vecchia (1988), Estimation and model identification for continuous spatial processes.
.. [3] Sundararajan and Keerthi (2001), Predictive approaches for choosing hyperparameters in
   Gaussian processes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from skgp.kernels.gram import gram, gram_diag, gram_tile, split_noise, split_theta
from skgp.linalg.cholesky import jittered_cholesky
from skgp.models.replicates import Replicates

Callback = Callable[[int, dict], bool | None]
_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class HyperparameterFit:
    """Result of a hyper-parameter search.

    Attributes
    ----------
    kernel : sklearn kernel expression
        With the hyper-parameters found.
    score : float
        Mean log-density of a row given its neighbours, in nats, on rows kept for comparison (NaN
        when it was not computed).
    method : str
        "marginal likelihood", "leave-one-out" or "initial".
    history : list of float
        Objective per row, in nats, one value an evaluation.
    log_marginal_likelihood : float
        Of the rows that the dense GP saw, in nats (NaN for the other objective).
    """

    kernel: object
    score: float = math.nan
    method: str = "initial"
    history: list[float] = field(default_factory=list)
    log_marginal_likelihood: float = math.nan


@dataclass(frozen=True)
class SearchSettings:
    """How long and on how many rows to search; defaults chosen on held-out parts of training sets.

    Attributes
    ----------
    subset_size : int
        Rows of the dense GP.
    dense_max_iter : int
        L-BFGS-B iterations.
    n_neighbors : int
        Rows conditioned on, per row.
    batch_size, n_steps, learning_rate : int, int, float
        Of Adam; the rate decays linearly to zero.
    averaged : float
        Share of the last iterates that are averaged.
    max_candidates : int
        Rows among which neighbours are searched.
    n_score_rows : int
        Rows on which candidates are compared.
    """

    subset_size: int = 1000
    dense_max_iter: int = 60
    n_neighbors: int = 48
    batch_size: int = 256
    n_steps: int = 120
    learning_rate: float = 0.05
    averaged: float = 0.3
    max_candidates: int = 60_000
    n_score_rows: int = 1024


def fit_hyperparameters(
    kernels: list,
    data: Replicates,
    *,
    generator: torch.Generator,
    settings: SearchSettings | None = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Learn the hyper-parameters of one kernel, or choose among several families.

    Up to ``subset_size`` rows the marginal likelihood decides. Beyond, every family is refined by
    the leave-one-out likelihood for a third of the steps, the best goes on, and whichever of its
    two candidates predicts rows better from their neighbours is returned.

    Parameters
    ----------
    kernels : list of sklearn kernel expressions
        Each with a top-level ``WhiteKernel``. Their ``theta`` is the start, their bounds are
        respected.
    data : Replicates
        Float64; targets of about zero mean and unit variance.
    generator : torch.Generator
    settings : SearchSettings, optional
    callback : callable, optional
        Called with (step, {"loss": float}); returning True ends the search with what it has.

    Returns
    -------
    HyperparameterFit
    """
    settings = settings or SearchSettings()
    n = data.X.shape[0]
    if all(kernel.n_dims == 0 for kernel in kernels) or n < 2:
        return HyperparameterFit(kernels[0])
    callback = _Stoppable(callback)
    subset = torch.randperm(n, generator=generator)[: settings.subset_size]
    sample = data.rows(subset)
    dense = []
    for kernel in kernels:
        dense.append(
            fit_marginal_likelihood(
                kernel, sample, max_iter=settings.dense_max_iter, callback=callback
            )
        )
        if callback.stopped:
            break
    best = max(dense, key=lambda fit: fit.log_marginal_likelihood)
    if n <= settings.subset_size or callback.stopped:
        return best
    comparison = _Comparison(data, settings, generator)
    short = replace(settings, n_steps=settings.n_steps // 3)
    refine = [(fit, short) for fit in dense] if len(dense) > 1 else [(best, settings)]
    scored = list(map(comparison, dense))
    for fit, steps in refine:
        if not callback.stopped:
            scored.append(comparison(_refine(fit, comparison, steps, callback)))
    best = max(scored, key=lambda fit: fit.score)
    if len(dense) > 1 and not callback.stopped:
        longer = replace(settings, n_steps=settings.n_steps - short.n_steps)
        scored.append(comparison(_refine(best, comparison, longer, callback)))
    return max(scored, key=lambda fit: fit.score)


class _Stoppable:
    """A callback that remembers that it was told to stop."""

    def __init__(self, callback: Callback | None):
        self.callback, self.stopped, self.n_calls = callback, False, 0

    def __call__(self, iteration: int, info: dict) -> bool:
        self.n_calls += 1
        if self.callback is not None and self.callback(self.n_calls, info):
            self.stopped = True
        return self.stopped


class _Comparison:
    """Scores fits of whatever kernel on the same rows, each in its own metric."""

    def __init__(self, data: Replicates, settings: SearchSettings, generator):
        self.data, self.settings, self.generator = data, settings, generator
        n = data.X.shape[0]
        self.rows = torch.randperm(n, generator=generator)[: settings.n_score_rows]
        self.candidates = _candidates(n, settings.max_candidates, generator)

    def __call__(self, fit: HyperparameterFit) -> HyperparameterFit:
        k = self.settings.n_neighbors
        score = leave_one_out_score(fit.kernel, self.data, self.rows, self.candidates, k)
        return replace(fit, score=score)


def _refine(fit, on: _Comparison, settings: SearchSettings, callback) -> HyperparameterFit:
    return fit_leave_one_out(
        fit.kernel, on.data, settings=settings, generator=on.generator, callback=callback
    )


# --------------------------------------------------------------------- marginal likelihood


def log_marginal_likelihood(kernel, data: Replicates, theta: Tensor) -> Tensor:
    r"""Exact log marginal likelihood, in nats.

    .. math:: -\tfrac12 y^T A^{-1} y - \tfrac12 \log|A| - \tfrac n2 \log 2\pi, \quad
              A = K_\theta + \sigma^2 W^{-1} \qquad \text{(Rasmussen and Williams, eq. 5.8)}

    of the distinct rows, and :meth:`~skgp.models.replicates.Replicates.log_power` of the scatter
    within them.

    Parameters
    ----------
    kernel : sklearn kernel expression with a top-level WhiteKernel
    data : Replicates
    theta : Tensor of shape (n_theta,)

    Returns
    -------
    Tensor of shape ()
        Differentiable in `theta`. ``O(n^3)``.
    """
    signal, theta_signal, noise = _split(kernel, theta)
    A = gram(signal, data.X, theta=theta_signal, method="expand")
    A = A + torch.diag(data.row_noise(noise))
    return _GaussianLogDensity.apply(A, data.y) + data.log_power(noise).sum()


class _GaussianLogDensity(torch.autograd.Function):
    r""":math:`\log N(y; 0, A)`, with the gradient of Rasmussen and Williams, eq. (5.9).

    .. math:: \frac{\partial}{\partial A} = \tfrac12 (\alpha \alpha^T - A^{-1}), \qquad
              \alpha = A^{-1} y.

    Two thirds of the flops of the factorisation's own backward pass, and none of its memory.
    """

    @staticmethod
    def forward(ctx, A: Tensor, y: Tensor) -> Tensor:
        L = jittered_cholesky(A).factor
        alpha = torch.cholesky_solve(y[:, None], L)[:, 0]
        ctx.save_for_backward(L, alpha)
        return -0.5 * (y @ alpha + y.shape[0] * _LOG_2PI) - L.diagonal().log().sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        L, alpha = ctx.saved_tensors
        return 0.5 * grad * (torch.outer(alpha, alpha) - torch.cholesky_inverse(L)), None


def fit_marginal_likelihood(
    kernel, data: Replicates, *, max_iter: int = 60, callback: Callback | None = None
) -> HyperparameterFit:
    """Maximise :func:`log_marginal_likelihood` over theta within its bounds, by L-BFGS-B.

    A step that makes the matrix numerically singular is refused (its objective is infinite); the
    best theta seen is returned, also when `callback` stops the search.
    """
    history: list[float] = []
    best: list = [math.inf, np.array(kernel.theta, dtype=float)]
    total = _total_weight(data)

    def objective(theta_array: np.ndarray) -> tuple[float, np.ndarray]:
        theta = data.X.new_tensor(theta_array).requires_grad_()
        try:
            loss = -log_marginal_likelihood(kernel, data, theta) / total
            (gradient,) = torch.autograd.grad(loss, theta)
        except ValueError:  # not positive definite even with jitter
            return math.inf, np.zeros_like(theta_array)
        value, slope = loss.item(), gradient.cpu().numpy().astype(float)
        if not (math.isfinite(value) and np.isfinite(slope).all()):
            return math.inf, np.zeros_like(theta_array)
        if value < best[0]:
            best[:] = [value, theta_array.copy()]
        history.append(-value)
        if callback is not None and callback(len(history), {"loss": value}):
            raise StopIteration
        return value, slope

    try:
        minimize(
            objective,
            np.array(kernel.theta, dtype=float),
            jac=True,
            method="L-BFGS-B",
            bounds=kernel.bounds,
            options={"maxiter": max_iter, "ftol": 1e-6, "gtol": 1e-4},
        )
    except StopIteration:
        pass
    return HyperparameterFit(
        kernel.clone_with_theta(best[1]),
        method="marginal likelihood",
        history=history,
        log_marginal_likelihood=-best[0] * total,
    )


# ------------------------------------------------------------------ leave-one-out, neighbours


def nearest_neighbors(kernel, X: Tensor, rows: Tensor, candidates: Tensor, k: int) -> Tensor:
    """Indices of the k candidates that correlate most with each row, itself left out.

    Parameters
    ----------
    kernel : sklearn kernel expression without noise
        Its own correlation is the metric, whatever the expression: ARD, periodic, sums.
    X : Tensor of shape (n, d)
    rows : Tensor of int64, shape (b,)
    candidates : Tensor of int64, shape (c,)
    k : int

    Returns
    -------
    Tensor of int64, shape (b, k)
        ``O(b c)`` kernel evaluations in float32; neighbours are unordered.
    """
    Xc, Xr = X[candidates].float(), X[rows].float()
    similarity = gram_tile(kernel, Xr, Xc)
    similarity /= gram_diag(kernel, Xc).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    similarity.masked_fill_(candidates[None, :] == rows[:, None], -math.inf)
    return candidates[similarity.topk(k, dim=1, sorted=False).indices]


def leave_one_out_log_density(
    kernel, data: Replicates, rows: Tensor, neighbors: Tensor, theta: Tensor
) -> Tensor:
    """Log-density of all that was observed at each row given its neighbours, noise included.

    The row is put last in the joint covariance of its neighbourhood (:class:`_LastGivenOthers`).

    Parameters
    ----------
    kernel : sklearn kernel expression with a top-level WhiteKernel
    data : Replicates
    rows : Tensor of int64, shape (b,)
    neighbors : Tensor of int64, shape (b, k)
    theta : Tensor of shape (n_theta,)

    Returns
    -------
    Tensor of shape (b,)
        Nats; differentiable in `theta`. ``O(b k^3)``.
    """
    signal, theta_signal, noise = _split(kernel, theta)
    group = torch.cat([neighbors, rows[:, None]], dim=1)  # (b, k + 1)
    K = gram(signal, data.X[group], theta=theta_signal, method="expand")
    K = K + torch.diag_embed(data.row_noise(noise)[group])
    return _LastGivenOthers.apply(K, data.y[group]) + data.log_power(noise)[rows]


class _LastGivenOthers(torch.autograd.Function):
    r"""Log-density of the last entry of :math:`y \sim N(0, A)` given the others, for a batch.

    With :math:`u = A^{-1} e_k` and :math:`v = A^{-1} y` the conditional variance is
    :math:`1 / u_k` and the residual :math:`v_k / u_k` (Rasmussen and Williams, eqs. 5.10-5.12), so

    .. math:: \log p = \tfrac12 \log u_k - \tfrac12 v_k^2 / u_k - \tfrac12 \log 2\pi, \qquad
              \frac{\partial \log p}{\partial A} =
              \frac{v_k}{2 u_k} (u v^T + v u^T) - \frac{1 + v_k^2 / u_k}{2 u_k} u u^T.

    The closed form spares the backward pass of a batch of Cholesky factorisations.
    """

    @staticmethod
    def forward(ctx, A: Tensor, y: Tensor) -> Tensor:
        last = torch.zeros_like(y)
        last[:, -1] = 1.0
        L = jittered_cholesky(A).factor
        u, v = torch.cholesky_solve(torch.stack([last, y], dim=-1), L).unbind(-1)
        ctx.save_for_backward(u, v)
        return 0.5 * (u[:, -1].log() - v[:, -1].square() / u[:, -1] - _LOG_2PI)

    @staticmethod
    def backward(ctx, grad: Tensor):
        u, v = ctx.saved_tensors
        u_last, v_last = u[:, -1], v[:, -1]
        b = (grad * v_last / u_last)[:, None] * v
        b = b - (grad * (1 + v_last.square() / u_last) / (2 * u_last))[:, None] * u
        outer = u[:, :, None] * b[:, None, :]  # symmetrised: u b^T and b u^T, half each
        return 0.5 * (outer + outer.mT), None


def leave_one_out_score(
    kernel, data: Replicates, rows: Tensor, candidates: Tensor, k: int
) -> float:
    """:func:`leave_one_out_log_density` over `rows`, in nats an observation.

    Neighbours are those of the kernel's own metric.
    """
    signal, _ = split_noise(kernel)
    theta = data.X.new_tensor(kernel.theta)
    k = min(k, candidates.shape[0] - 1)
    total = 0.0
    with torch.no_grad():
        for batch in rows.split(256):
            neighbors = nearest_neighbors(signal, data.X, batch, candidates, k)
            density = leave_one_out_log_density(kernel, data, batch, neighbors, theta)
            total += float(density.sum())
    return total / _total_weight(data.rows(rows))


def fit_leave_one_out(
    kernel,
    data: Replicates,
    *,
    generator: torch.Generator,
    settings: SearchSettings | None = None,
    callback: Callback | None = None,
) -> HyperparameterFit:
    """Maximise the nearest-neighbour leave-one-out likelihood by Adam on minibatches.

    Neighbours are searched afresh for every batch in the metric of the moment, so ARD scales may
    move far. The learning rate falls linearly to zero and the last iterates are averaged.
    """
    settings = settings or SearchSettings()
    X, n = data.X, data.X.shape[0]
    lower, upper = X.new_tensor(kernel.bounds).T
    theta = X.new_tensor(kernel.theta).requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=settings.learning_rate, betas=(0.9, 0.99))
    candidates = _candidates(n, settings.max_candidates, generator)
    k = min(settings.n_neighbors, candidates.shape[0] - 1)
    history: list[float] = []
    iterates: list[Tensor] = []
    mean_weight = _total_weight(data) / n
    for step in range(settings.n_steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.n_steps)
        rows = torch.randint(n, (min(settings.batch_size, n),), generator=generator)
        rows = rows.to(X.device)
        with torch.no_grad():
            current = kernel.clone_with_theta(theta.detach().cpu().numpy())
            neighbors = nearest_neighbors(split_noise(current)[0], X, rows, candidates, k)
        optimizer.zero_grad()
        density = leave_one_out_log_density(kernel, data, rows, neighbors, theta)
        loss = -density.mean() / mean_weight
        loss.backward()
        gradient = theta.grad
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            break  # keep the iterates up to here; the comparison of scores decides
        optimizer.step()
        with torch.no_grad():
            theta.clamp_(lower, upper)
        history.append(-loss.item())
        iterates.append(theta.detach().clone())
        if callback is not None and callback(step + 1, {"loss": loss.item()}):
            break
    if not iterates:
        return HyperparameterFit(kernel, method="leave-one-out")
    last = iterates[-max(1, round(settings.averaged * len(iterates))) :]
    theta_mean = torch.stack(last).mean(0).cpu().numpy()
    return HyperparameterFit(
        kernel.clone_with_theta(theta_mean), method="leave-one-out", history=history
    )


def _candidates(n: int, size: int, generator: torch.Generator) -> Tensor:
    """All rows, or `size` of them at random."""
    return torch.arange(n) if n <= size else torch.randperm(n, generator=generator)[:size]


def _total_weight(data: Replicates) -> float:
    """Number of observations, those of weight w counted w times."""
    return float(data.y.shape[0] if data.weight is None else data.weight.sum())


def _split(kernel, theta: Tensor):
    """Signal kernel, its theta, and the noise variance as a tensor (differentiable if free)."""
    signal, white = split_noise(kernel)
    if white is None:
        raise ValueError(f"kernel={kernel} has no noise; add + WhiteKernel(0.1) to it.")
    theta_signal, log_noise = split_theta(kernel, theta)
    noise = theta.new_tensor(white.noise_level) if log_noise is None else log_noise.exp()
    return signal, theta_signal, noise
