"""Dense NumPy oracles of sparse-within-sparse GPs: loops over rows, explicit inverses, dense S.

u = f(Z) plus noise of JITTER times the variance at each inducing point; a row x with the active set
I sees u_I alone. A weight of a row is a power of its density, and its share of the divergence.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.reference import neighborhood, sparse

JITTER = 1e-4
KERNELS = sparse.KERNELS
LOG_PROB = sparse.LOG_PROB


@dataclass(frozen=True)
class Problem:
    """A small problem as arrays; `tensors` are what the models take."""

    kernel: object
    X: np.ndarray  # (n, d)
    Y: np.ndarray  # (n, c)
    Z: np.ndarray  # (M, d)
    active: np.ndarray  # (n, H)
    offset: np.ndarray  # (c,)
    weight: np.ndarray | None = None
    kl_weight: float = 1.0
    noise: float = 0.3

    @property
    def row_weight(self):
        """Weights, ones where there are none."""
        return np.ones(len(self.X)) if self.weight is None else self.weight

    @property
    def share(self):
        """Weights (n,) of the local divergences; they add up to kl_weight."""
        return self.kl_weight * self.row_weight / self.row_weight.sum()

    @property
    def tensors(self):
        """X, Y, Z, active, offset and weight."""
        arrays = self.X, self.Y, self.Z, self.active, self.offset
        weight = None if self.weight is None else torch.tensor(self.weight)
        return *map(torch.tensor, arrays), weight

    def repeated(self, counts):
        """Each row as often as `counts` says, without weights."""
        X, Y, active = (np.repeat(a, counts, axis=0) for a in (self.X, self.Y, self.active))
        return replace(self, X=X, Y=Y, active=active, weight=None)


def make_problem(
    name="rbf",
    *,
    n=40,
    n_inducing=12,
    n_neighbors=4,
    n_latent=1,
    weighted=False,
    target="gaussian",
    kl_weight=None,
    seed=0,
):
    """Smooth functions of two columns, observed as `target` says; kl_weight M/H unless told."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    phase = np.arange(n_latent)
    f = np.sin(2 * X[:, :1] + phase) + 0.5 * X[:, 1:]
    Y = {
        "gaussian": lambda: f + 0.5 * rng.standard_normal(f.shape),
        "student_t": lambda: f + 0.3 * rng.standard_t(2.0, f.shape),
        "labels": lambda: np.where(f + 0.5 * rng.standard_normal(f.shape) > 0, 1.0, -1.0),
        "counts": lambda: rng.poisson(np.exp(0.5 + f)).astype(float),
    }[target]()
    Z = rng.uniform(-2, 2, (n_inducing, 2))
    weight = rng.uniform(0.3, 4.0, n) if weighted else None
    offset = 0.3 - 0.2 * phase
    active = nearest(X, Z, n_neighbors)
    scale = n_inducing / n_neighbors if kl_weight is None else kl_weight
    return Problem(KERNELS[name](), X, Y, Z, active, offset, weight, scale)


def random_posterior(n_inducing, n_latent=1, seed=0):
    """Mean (M, c) and covariances (c, M, M) of no particular optimum."""
    rng = np.random.default_rng(seed)
    root = 0.3 * np.tril(rng.standard_normal((n_latent, n_inducing, n_inducing)), -1)
    root[:, range(n_inducing), range(n_inducing)] = rng.uniform(0.2, 0.9, (n_latent, n_inducing))
    return rng.standard_normal((n_inducing, n_latent)), root @ root.transpose(0, 2, 1)


# ---- one row ------------------------------------------------------------------------------------


def nearest(X, Z, n_neighbors):
    """Indices (n, H) of the inducing points at the smallest Euclidean distances."""
    squared = [[np.sum((x - z) ** 2) for z in Z] for x in X]
    return np.argsort(np.array(squared), axis=1, kind="stable")[:, :n_neighbors].copy()


def inducing_gram(kernel, Z):
    """Covariance of u: each has noise of its own, JITTER of its own variance."""
    K = kernel(Z)
    return K + JITTER * np.diag(np.diag(K))


def conditional(kernel, x, Z):
    """Weights a (H,) and variance of f(x) given u at Z (H, d)."""
    k = kernel(Z, x[None])[:, 0]
    a = np.linalg.inv(inducing_gram(kernel, Z)) @ k
    return a, kernel.diag(x[None])[0] - k @ a


def conditionals(problem):
    """Dense weights A (n, M), zero off the active sets, and variances (n,)."""
    A, variance = np.zeros((len(problem.X), len(problem.Z))), np.zeros(len(problem.X))
    for n, (x, active) in enumerate(zip(problem.X, problem.active, strict=True)):
        A[n, active], variance[n] = conditional(problem.kernel, x, problem.Z[active])
    return A, variance


def predictors(problem):
    """The same of predictions, whose neighbours fade; as many as are active."""
    noise = JITTER * problem.kernel.diag(problem.Z)
    scale = getattr(problem.kernel, "k2", problem.kernel)
    scale = np.asarray(scale.get_params().get("length_scale", 1.0))
    H = problem.active.shape[1]
    rows = [neighborhood.weights(problem.kernel, problem.Z, noise, x, H, scale) for x in problem.X]
    return np.array([a for a, _ in rows]), np.array([var for _, var in rows])


def moments(problem, mean, covariance, given=conditionals):
    """Mean and variance (n, c) of f, offset included (eq. 13)."""
    A, variance = given(problem)
    explained = np.array([[a @ S @ a for S in covariance] for a in A])
    return problem.offset + A @ mean, variance[:, None] + explained


# ---- the bound ----------------------------------------------------------------------------------


def divergence(problem, mean, covariance):
    """Weighted sum over rows and latent functions of KL(q(u_I) || p(u_I))."""
    total = 0.0
    for share, I in zip(problem.share, problem.active, strict=True):
        prior = inducing_gram(problem.kernel, problem.Z[I])
        for m, S in zip(mean.T, covariance, strict=True):
            total += share * sparse.divergence(m[I], S[np.ix_(I, I)], prior)
    return total


def expected_log_prob(log_prob, y, mean, var, n_points=4001):
    """E[log p(y | f)] of one row by the trapezoidal rule."""
    z = np.linspace(-12, 12, n_points)
    w = np.exp(-0.5 * z**2)
    return w @ log_prob(y, mean + np.sqrt(var) * z) / w.sum()


def bound(problem, log_prob, mean, covariance):
    """Evidence lower bound for q(u) = N(mean (M, c), covariance (c, M, M)), in nats."""
    total = -divergence(problem, mean, covariance)
    f_mean, f_var = moments(problem, mean, covariance)
    for n, weight in enumerate(problem.row_weight):
        for l in range(problem.Y.shape[1]):
            row = expected_log_prob(log_prob, problem.Y[n, l], f_mean[n, l], f_var[n, l])
            total += weight * row
    return total


def gaussian_log_prob(noise):
    """log N(y; f, noise)."""
    return lambda y, f: -0.5 * ((y - f) ** 2 / noise + np.log(2 * np.pi * noise))


def diagonal(var):
    """Covariances (c, M, M) of independent u with variances (M, c)."""
    return np.array([np.diag(column) for column in var.T])


# ---- where the bound is stationary, given Gaussian sites ----------------------------------------


def prior_precision(problem):
    """sum_n share_n P_n' K_n^-1 P_n, (M, M)."""
    Q = np.zeros((len(problem.Z), len(problem.Z)))
    for share, I in zip(problem.share, problem.active, strict=True):
        Q[np.ix_(I, I)] += share * np.linalg.inv(inducing_gram(problem.kernel, problem.Z[I]))
    return Q


def precision(problem, lam):
    """sum_n lam_n a_n a_n' + the prior's, (M, M), for sites lam (n,)."""
    A, _ = conditionals(problem)
    return sum(l * np.outer(a, a) for l, a in zip(lam, A, strict=True)) + prior_precision(problem)


def optimal_mean(problem, lam, eta):
    """m (M, c) for sites (n, c); 0 where no row is active. eta is precision times target."""
    A, _ = conditionals(problem)
    columns = [
        np.linalg.lstsq(precision(problem, l), A.T @ e, rcond=1e-13)[0]
        for l, e in zip(lam.T, eta.T, strict=True)
    ]
    return np.stack(columns, axis=1)


def optimal_var(problem, lam):
    """Diagonal of S (M, c); the prior's where no row is active."""
    var = np.empty((len(problem.Z), lam.shape[1]))
    diagonals = [np.diag(precision(problem, sites)) for sites in lam.T]
    for j, z in enumerate(problem.Z):
        rows = [n for n, I in enumerate(problem.active) if j in I]
        mass = sum(problem.share[n] for n in rows)
        prior = inducing_gram(problem.kernel, z[None])[0, 0]
        for l, diagonal in enumerate(diagonals):
            var[j, l] = mass / diagonal[j] if mass > 0 else prior
    return var


def optimal_covariance(problem, lam):
    """S (c, M, M) of a full covariance where H = M: SVGP's."""
    return np.array(
        [problem.kl_weight * np.linalg.inv(precision(problem, sites)) for sites in lam.T]
    )


def gaussian_sites(problem):
    """lam and eta (n, c) of Gaussian noise."""
    lam = np.repeat(problem.row_weight[:, None] / problem.noise, problem.Y.shape[1], axis=1)
    return lam, lam * (problem.Y - problem.offset)


# ---- joint predictions --------------------------------------------------------------------------


def joint_covariance(problem, covariance):
    """J (n, n) of f at all rows for one latent function with S (M, M)."""
    A, _ = predictors(problem)
    cross = A @ problem.kernel(problem.Z, problem.X)
    prior = inducing_gram(problem.kernel, problem.Z)
    return problem.kernel(problem.X) - cross - cross.T + A @ (prior + covariance) @ A.T


def union_prediction(problem, mean, covariance):
    """Mean (n,) without offset and covariance (n, n) given the union of all active sets."""
    union = np.unique(problem.active)
    Z, X, kernel = problem.Z[union], problem.X, problem.kernel
    A = kernel(X, Z) @ np.linalg.inv(inducing_gram(kernel, Z))
    S = covariance[np.ix_(union, union)]
    return A @ mean[union], kernel(X) - A @ kernel(Z, X) + A @ S @ A.T
