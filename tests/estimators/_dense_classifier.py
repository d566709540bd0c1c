"""A dense Laplace classifier on the hooks of `skgp.estimators._base_classifier`, to test that base.

Slow, dense and simple on purpose, as `tests.estimators._dense`: the kernels are scikit-learn's own,
and the hyper-parameters come from a short random search.
"""

from numbers import Integral

import numpy as np
import torch
from scipy.linalg import cho_solve, cholesky, solve_triangular
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.estimators._base_classifier import BaseGPClassifier
from skgp.estimators._parameters import Interval, StrOptions, warn_at_bounds
from skgp.estimators._validation import base_rate_offset, one_vs_rest
from skgp.likelihoods import Bernoulli


class DenseGPClassifier(BaseGPClassifier):
    """Laplace approximation of Rasmussen and Williams (2006), algorithm 3.1, one-vs-rest."""

    _parameter_constraints = {
        **BaseGPClassifier._parameter_constraints,
        "likelihood": [StrOptions({"logit", "probit"})],
        "moderated": ["boolean"],
        "n_moves": [Interval(Integral, 1, None, closed="left")],
    }

    _n_stages = 1

    def __init__(
        self,
        kernel=None,
        *,
        likelihood="probit",
        moderated=True,
        class_weight=None,
        optimizer="auto",
        n_moves=5,
        random_state=None,
        device="auto",
        dtype="float64",
        n_jobs=None,
        memory_budget=None,
        verbose=0,
    ):
        self.kernel = kernel
        self.likelihood = likelihood
        self.moderated = moderated
        self.class_weight = class_weight
        self.optimizer = optimizer
        self.n_moves = n_moves
        self.random_state = random_state
        self.device = device
        self.dtype = dtype
        self.n_jobs = n_jobs
        self.memory_budget = memory_budget
        self.verbose = verbose

    _has_stream = property(lambda self: getattr(self, "_stream", None) is not None)

    def _learn(self, data, session, backend, *, stream=False):
        weights = np.ones(len(data)) if data.weight is None else data.weight.numpy()
        rows = data.X.numpy().copy(), data.y.numpy(), weights
        self._stream = rows if stream else None
        self._fit(*rows, backend, None if stream else session)

    def _update(self, data, backend):
        """Fit anew to all rows of the stream, which are kept; no search."""
        weights = np.ones(len(data)) if data.weight is None else data.weight.numpy()
        rows = data.X.numpy(), data.y.numpy(), weights
        self._stream = tuple(map(np.concatenate, zip(self._stream, rows, strict=True)))
        self._fit(*self._stream, backend)

    def _fit(self, X, codes, weights, backend, session=None):
        Y = one_vs_rest(codes, len(self.classes_))
        self._likelihood = Bernoulli(self.likelihood)
        self.moderation_ = float(self.moderated)
        self.offset_ = base_rate_offset(Y, weights, link=self.likelihood)
        self.X_train_ = X
        self.n_iter_ = 1

        def posterior(kernel):
            return laplace(kernel, X, Y, weights, self.offset_, self._likelihood)

        best = posterior(
            default_kernel(X, weights) if self.kernel is None else self._given_kernel(X)
        )
        if self.optimizer is not None and session is not None:
            best = self._search(best, posterior, backend.rng(), session)
        self._set_state(best)

    def _search(self, best, posterior, rng, session):
        """Move theta at random; keep a move that raises the approximate evidence."""
        with session.stage("search", max_iter=self.n_moves, state=lambda: best) as callback:
            for iteration in range(self.n_moves):
                kernel = best["kernel_"]
                theta = kernel.theta + 0.3 * rng.standard_normal(kernel.n_dims)
                theta = np.clip(theta, *kernel.bounds.T)
                moved = posterior(kernel.clone_with_theta(theta))
                if moved["log_marginal_likelihood_value_"] > best["log_marginal_likelihood_value_"]:
                    best = moved
                self.n_iter_ = iteration + 1
                if callback(iteration, {"loss": -best["log_marginal_likelihood_value_"]}):
                    break
        warn_at_bounds(best["kernel_"], self.kernel)
        return best

    def _set_state(self, state):
        for name, value in state.items():
            setattr(self, name, value)

    def _bytes_per_row(self):
        return 3 * 8 * len(self.X_train_)

    def _latent_mean(self, X):
        return self.offset_ + self.kernel_(X, self.X_train_) @ self.gradient_

    def _latent_mean_and_variance(self, X):
        K = self.kernel_(X, self.X_train_)
        var = [
            self.kernel_.diag(X)
            - (solve_triangular(chol, root[:, None] * K.T, lower=True) ** 2).sum(0)
            for chol, root in zip(self.chol_, self.root_.T, strict=True)
        ]
        return self._latent_mean(X), np.stack(var, axis=1)


def default_kernel(X, weights):
    """Return an RBF on the spread of the columns."""
    mean = np.average(X, axis=0, weights=weights)
    spread = np.sqrt(np.average((X - mean) ** 2, axis=0, weights=weights))
    scale = np.where(spread > 1e-12 * np.abs(mean), spread, 1.0) * np.sqrt(X.shape[1])
    bounds = np.column_stack([scale / 100, scale * 100])
    return ConstantKernel(4.0) * RBF(scale, bounds)


def laplace(kernel, X, Y, weights, offset, likelihood):
    """Return the fitted attributes of the Laplace approximation, in O(c n^3)."""
    K = kernel(X)
    columns = [
        laplace_column(K, y, weights, mean, likelihood) for y, mean in zip(Y.T, offset, strict=True)
    ]
    gradient, root, chol, evidence = zip(*columns, strict=True)
    return {
        "kernel_": kernel,
        "gradient_": np.stack(gradient, axis=1),
        "root_": np.stack(root, axis=1),
        "chol_": np.stack(chol),
        "log_marginal_likelihood_value_": float(sum(evidence)),
    }


def laplace_column(K, y, weights, offset, likelihood):
    """Newton's method for one column; B = I + W^1/2 K W^1/2, and f = offset + K a.

    Steps are halved until the objective rises: weights of many orders would let it diverge.
    """

    def objective(a):
        f = offset + K @ a
        log_prob = likelihood.log_prob(torch.from_numpy(y), torch.from_numpy(f)).numpy()
        return weights @ log_prob - 0.5 * a @ K @ a

    def expansion(a):
        f = offset + K @ a
        first, second = likelihood.derivatives(torch.from_numpy(y), torch.from_numpy(f))
        root = np.sqrt(weights * -second.numpy())
        B = np.eye(len(y)) + root[:, None] * K * root
        return weights * first.numpy(), root, cholesky(B, lower=True, check_finite=False)

    a, value = np.zeros(len(y)), objective(np.zeros(len(y)))
    for _ in range(100):
        gradient, root, chol = expansion(a)
        b = root**2 * (K @ a) + gradient
        step = b - root * cho_solve((chol, True), root * (K @ b), check_finite=False) - a
        size = 1.0
        while objective(a + size * step) < value - 1e-9 * abs(value) and size > 1e-6:
            size /= 2
        a, before, value = a + size * step, value, objective(a + size * step)
        if abs(value - before) < 1e-13 * abs(value):
            break
    gradient, root, chol = expansion(a)
    return gradient, root, chol, value - np.log(chol.diagonal()).sum()
