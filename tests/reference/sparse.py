"""Dense NumPy oracles of sparse GPs: n x n matrices, explicit inverses, nothing whitened.

The prior of u at the inducing points Z is N(0, Kuu), Kuu with the jitter of the models; f given u
is as in the exact GP. A weight w of a row is a power w of its density.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special, stats
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.data import Data
from skgp.inference.sparse import SparseState
from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT

JITTER = 1e-6  # relative to the mean diagonal, in float64

KERNELS = {
    "rbf": lambda: 1.3 * RBF([0.9, 1.6]),
    "matern": lambda: 0.8 * Matern(1.2, nu=1.5),
    "sum": lambda: 0.5 * RBF([0.7, 1.1]) + 0.6 * Matern(1.5, nu=2.5),
}

LOG_PROB = {
    "probit": lambda y, f: special.log_ndtr(y * f),
    "logit": lambda y, f: -np.logaddexp(0.0, -y * f),
    "poisson": lambda y, f: stats.poisson(np.exp(f)).logpmf(y),
    "softplus": lambda y, f: stats.poisson(np.logaddexp(0.0, f)).logpmf(y),
    "student_t": lambda y, f: stats.t(4.0, f, 0.5).logpdf(y),
    "gaussian": lambda y, f: stats.norm(f, 0.3**0.5).logpdf(y),
}

GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.2), df_bounds=(2.1, 200.0))
#: Those of LOG_PROB, with the observations that each is for.
LIKELIHOODS = {
    "gaussian": (GAUSSIAN, "gaussian"),
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
    "student_t": (STUDENT, "student_t"),
}


@dataclass(frozen=True)
class Problem:
    """A small problem as arrays; `data` and `state` are what the models take."""

    kernel: object
    X: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    weight: np.ndarray | None = None
    noise: float = 0.3
    offset: float = 0.0

    @property
    def row_weight(self):
        """Weights, ones where there are none."""
        return np.ones(len(self.y)) if self.weight is None else self.weight

    @property
    def data(self):
        weight = None if self.weight is None else torch.tensor(self.weight)
        return Data(torch.tensor(self.X), torch.tensor(self.y)[:, None], weight)

    @property
    def tensors(self):
        """Z and the noise."""
        return torch.tensor(self.Z), torch.tensor(self.noise, dtype=torch.float64)

    def state(self, parameters=None, n_latent=1):
        """The prior; its likelihood has the logarithm of the noise unless told otherwise."""
        Z, noise = self.tensors
        parameters = noise.log().reshape(1) if parameters is None else parameters
        return SparseState.prior(self.kernel, parameters, Z, Z.new_full((n_latent,), self.offset))

    def repeated(self, counts):
        """Each row as often as `counts` says, without weights."""
        return replace(
            self, X=np.repeat(self.X, counts, axis=0), y=np.repeat(self.y, counts), weight=None
        )


def make_problem(name="rbf", *, n=40, n_inducing=9, weighted=False, target="gaussian", seed=0):
    """A smooth function of two columns, observed as `target` says."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    f = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1]
    y = {
        "gaussian": lambda: f + 0.5 * rng.standard_normal(n),
        "student_t": lambda: f + 0.3 * rng.standard_t(2.0, n),
        "labels": lambda: np.where(f + 0.5 * rng.standard_normal(n) > 0, 1.0, -1.0),
        "counts": lambda: rng.poisson(np.exp(0.5 + f)).astype(float),
    }[target]()
    Z = rng.uniform(-2, 2, (n_inducing, 2))
    weight = rng.uniform(0.3, 4.0, n) if weighted else None
    return Problem(KERNELS[name](), X, y, Z, weight)


def problem_of(name, n_latent=1, offset=0.3, **options):
    """A problem, its likelihood, and the prior."""
    made, target = LIKELIHOODS[name]
    problem = replace(make_problem(target=target, **options), offset=offset)
    parameters = made.initial(torch.zeros(1, dtype=torch.float64))
    return problem, made, problem.state(parameters, n_latent)


def random_problem(name, **options):
    """A problem, its likelihood, and a state of no particular optimum."""
    problem, made, state = problem_of(name, offset=0.2, **options)
    mean, root = random_posterior(len(problem.Z))
    return problem, made, state.with_posterior(0.3 * mean, root)


def random_posterior(n_inducing, n_latent=1, seed=0):
    """Whitened mean (M, c) and root (c, M, M) of no particular optimum, as tensors."""
    rng = np.random.default_rng(seed)
    root = 0.3 * np.tril(rng.standard_normal((n_latent, n_inducing, n_inducing)), -1)
    root[:, range(n_inducing), range(n_inducing)] = rng.uniform(0.2, 0.9, (n_latent, n_inducing))
    return torch.tensor(rng.standard_normal((n_inducing, n_latent))), torch.tensor(root)


# ---- the prior ----------------------------------------------------------------------------------


def inducing_gram(kernel, Z, jitter=JITTER):
    """Covariance of u."""
    K = kernel(Z)
    return K + jitter * np.mean(np.diag(K)) * np.eye(len(Z))


def unwhitened(kernel, Z, mean, root):
    """Mean (M,) and covariance (M, M) of u for whitened mean (M,) and root (M, M)."""
    L = np.linalg.cholesky(inducing_gram(kernel, Z))
    return L @ mean, L @ root @ root.T @ L.T


def explained(kernel, X, Z):
    """Covariance (n, n) of f that u accounts for."""
    K = kernel(X, Z)
    return K @ np.linalg.solve(inducing_gram(kernel, Z), K.T)


def unexplained(kernel, X, Z):
    """Variances (n,) of f given u."""
    return kernel.diag(X) - np.diag(explained(kernel, X, Z))


def predict(kernel, X, Z, mean, covariance, offset=0.0):
    """Mean (n,) and covariance (n, n) of f for q(u) = N(mean, covariance)."""
    A = np.linalg.solve(inducing_gram(kernel, Z), kernel(Z, X)).T
    return offset + A @ mean, kernel(X) - explained(kernel, X, Z) + A @ covariance @ A.T


def divergence(mean, covariance, prior):
    """KL(N(mean, covariance) || N(0, prior))."""
    log_ratio = np.linalg.slogdet(prior)[1] - np.linalg.slogdet(covariance)[1]
    fit = np.trace(np.linalg.solve(prior, covariance)) + mean @ np.linalg.solve(prior, mean)
    return 0.5 * (fit - len(mean) + log_ratio)


# ---- Gaussian noise: q(u) eliminated ------------------------------------------------------------


def powers_of_densities(y, covariance, variance, weight):
    """log of the integral over f ~ N(0, covariance) of prod_i N(y_i; f_i, variance_i)^weight_i."""
    noise = variance / weight
    joint = stats.multivariate_normal(np.zeros(len(y)), covariance + np.diag(noise)).logpdf(y)
    left_out = np.log(2 * np.pi * noise) - weight * np.log(2 * np.pi * variance)
    return joint + 0.5 * np.sum(left_out)


def elbo_loss(problem, beta=1.0):
    """Least value over q(u) of -sum_i w_i E[log N(y_i; f_i, noise)] + beta KL.

    beta times the bound of Titsias (2009, eq. 9) for weights w / beta.
    """
    kernel, X, Z, noise = problem.kernel, problem.X, problem.Z, problem.noise
    weight = problem.row_weight / beta
    bound = powers_of_densities(problem.y, explained(kernel, X, Z), np.full(len(X), noise), weight)
    bound -= np.sum(weight * unexplained(kernel, X, Z)) / (2 * noise)
    return -beta * bound


def fitc_loss(problem):
    """-log p(y) of FITC, each density to the power of its weight."""
    kernel, X, Z = problem.kernel, problem.X, problem.Z
    variance = unexplained(kernel, X, Z) + problem.noise
    covariance = explained(kernel, X, Z)
    return -powers_of_densities(problem.y, covariance, variance, problem.row_weight)


def elbo_posterior(problem, beta=1.0):
    """Mean (M,) and covariance (M, M) of the q(u) at which `elbo_loss` is attained."""
    return condition(problem, beta * problem.noise / problem.row_weight)


def fitc_posterior(problem):
    """Mean (M,) and covariance (M, M) of FITC's q(u)."""
    variance = unexplained(problem.kernel, problem.X, problem.Z) + problem.noise
    return condition(problem, variance / problem.row_weight)


def condition(problem, variance):
    """q(u) given y = E[f | u] + noise of a variance (n,)."""
    kernel, X, Z = problem.kernel, problem.X, problem.Z
    total = explained(kernel, X, Z) + np.diag(variance)
    gain = np.linalg.solve(total, kernel(X, Z)).T
    return gain @ problem.y, inducing_gram(kernel, Z) - gain @ kernel(X, Z)


# ---- any likelihood: the bound of SVGP and the log-loss -----------------------------------------


def objective(problem, log_prob, mean, covariance, *, loss="elbo", beta=1.0, n_points=200):
    """Sum of weighted losses and beta KL for q(u) = N(mean, covariance), by Gauss-Hermite."""
    f_mean, f_cov = predict(problem.kernel, problem.X, problem.Z, mean, covariance, problem.offset)
    x, w = np.polynomial.hermite_e.hermegauss(n_points)
    f = f_mean + np.sqrt(np.diag(f_cov)) * x[:, None]
    values, w = log_prob(problem.y, f), (w / w.sum())[:, None]
    if loss == "elbo":
        rows = np.sum(w * values, axis=0)
    else:
        rows = special.logsumexp(values, b=w, axis=0)
    prior = inducing_gram(problem.kernel, problem.Z)
    return -np.sum(problem.row_weight * rows) + beta * divergence(mean, covariance, prior)
