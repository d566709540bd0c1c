"""An exact Gaussian process on the hooks of `skgp.estimators._base_regressor`, to test that base.

Slow, dense and simple on purpose: the kernels are scikit-learn's own, and the hyper-parameters come
from a short random search, which makes a fit iterative and its result depend on ``random_state``.
"""

from numbers import Integral

import numpy as np
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from skgp.estimators._base_regressor import BaseGPRegressor
from skgp.estimators._parameters import Interval, warn_at_bounds
from skgp.kernels import split_noise


class DenseGPRegressor(BaseGPRegressor):
    """Exact GP: alpha = (K + S)^-1 z, where S = noise / weights on the diagonal."""

    _parameter_constraints = {
        **BaseGPRegressor._parameter_constraints,
        "max_iter": [Interval(Integral, 1, None, closed="left")],
    }

    _n_stages = 1

    def __init__(
        self,
        kernel=None,
        *,
        optimizer="auto",
        max_iter=5,
        normalize_y=True,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        self.kernel = kernel
        self.optimizer = optimizer
        self.max_iter = max_iter
        self.normalize_y = normalize_y
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.memory_budget = memory_budget
        self.verbose = verbose

    def _learn(self, data, session, backend, *, stream=False):
        X, z = data.X.numpy(), data.y.numpy()
        weights = np.ones(len(z)) if data.weight is None else data.weight.numpy()
        kernel = default_kernel(X, weights) if self.kernel is None else self._given_kernel(X)
        self.n_iter_ = 1
        if self.optimizer is not None:
            kernel = self._search(kernel, X, z, weights, backend, session)
        self._set_state(**posterior(kernel, X, z, weights, backend))

    def _search(self, kernel, X, z, weights, backend, session):
        """Move theta at random; keep a move that raises the marginal likelihood."""
        rng = backend.rng()
        best = posterior(kernel, X, z, weights, backend)
        with session.stage("search", max_iter=self.max_iter, state=lambda: best) as callback:
            for iteration in range(self.max_iter):
                theta = best["kernel_"].theta + 0.1 * rng.standard_normal(kernel.n_dims)
                theta = np.clip(theta, *kernel.bounds.T)
                moved = posterior(kernel.clone_with_theta(theta), X, z, weights, backend)
                if moved["log_marginal_likelihood_value_"] > best["log_marginal_likelihood_value_"]:
                    best = moved
                self.n_iter_ = iteration + 1
                loss = -best["log_marginal_likelihood_value_"]
                if callback(iteration, {"loss": loss}):
                    break
        warn_at_bounds(best["kernel_"], self.kernel)
        return best["kernel_"]

    def _set_state(self, **state):
        for name, value in state.items():
            setattr(self, name, value)

    def _bytes_per_row(self):
        return 3 * 8 * len(self.X_train_)

    def _signal(self):
        return split_noise(self.kernel_)[0]

    def _latent_mean(self, X):
        return self._signal()(X, self.X_train_) @ self.alpha_

    def _latent_mean_and_variance(self, X):
        K = self._signal()(X, self.X_train_)
        V = np.linalg.solve(self.chol_, K.T)
        return K @ self.alpha_, self._signal().diag(X) - (V**2).sum(0)

    def _latent_mean_and_covariance(self, X):
        K = self._signal()(X, self.X_train_)
        V = np.linalg.solve(self.chol_, K.T)
        return K @ self.alpha_, self._signal()(X) - V.T @ V


def default_kernel(X, weights):
    """Return an RBF on the spread of the columns, plus noise."""
    mean = np.average(X, axis=0, weights=weights)
    spread = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weights))
    scale = np.where(spread > 0, spread, 1.0) * np.sqrt(X.shape[1])
    bounds = np.column_stack([scale / 100, scale * 100])
    return ConstantKernel(1.0) * RBF(scale, bounds) + WhiteKernel(0.1)


def posterior(kernel, X, z, weights, backend):
    """Return the fitted attributes of the exact posterior, in O(n^3)."""
    signal, white = split_noise(kernel)
    noise = 1e-10 if white is None else white.noise_level
    A = signal(X) + np.diag(noise / weights)
    chol = torch.linalg.cholesky(backend.tensor(A)).numpy().astype(np.float64)
    half = np.linalg.solve(chol, z)
    # w copies of a row count as one row of noise s2 / w times a factor that holds s2.
    copies = 0.5 * ((weights - 1) * np.log(2 * np.pi * noise) + np.log(weights)).sum()
    log_det = np.log(np.diag(chol)).sum() + 0.5 * len(z) * np.log(2 * np.pi)
    return {
        "kernel_": kernel,
        "X_train_": X.copy(),
        "chol_": chol,
        "alpha_": np.linalg.solve(chol.T, half),
        "_noise_variance": float(noise),
        "log_marginal_likelihood_value_": float(-0.5 * half @ half - log_det - copies),
    }
