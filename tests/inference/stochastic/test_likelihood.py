"""Theorem 3: exact with every function, bounds in expectation, the erratum; the solver's optima."""

import functools

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.stochastic.basis import (
    FourierBasis,
    InducingBasis,
    everything,
    index_set,
    product,
)
from skgp.inference.stochastic.engine import NonFiniteStepError, SGDOptions
from skgp.inference.stochastic.likelihood import (
    LikelihoodSolver,
    WeightBlock,
    divergence,
    latent_moments,
    pair_weight,
    squared_form,
    squared_sum,
)
from skgp.inference.stochastic.state import LikelihoodState
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Bernoulli, Gaussian, Laplace
from tests.covering import slow_case
from tests.inference.stochastic_problems import BASES, all_samples, make_problem, z_score
from tests.reference.sparse import divergence as kl_of_gaussians

LOGIT = Bernoulli("logit")
K_DENSE = 3


def chevron(problem, k):
    """Lower-triangular C of the problem with entries below the diagonal in k columns only."""
    C = problem.C.clone()
    C[:, k:] = torch.diag(C.diagonal())[:, k:]
    return C


def block_of(problem, i, k):
    """Rows i of mu and C as Theorem 3 reads them, for a single latent function."""
    C = chevron(problem, k)
    var = C.diagonal().square()
    var[:k] = 0
    rows = i.indices
    return WeightBlock(problem.mu[rows, None], var[rows, None], C[rows][:, None, :k])


def labels(problem):
    return torch.where(problem.y > 0, 1.0, -1.0).to(torch.float64)


def estimate(problem, i, k, bound, likelihood=LOGIT, y=None):
    """The data term from every row and the sample i."""
    y = labels(problem) if y is None else y
    Phi = problem.basis.features(problem.X, i.indices)
    mean, var = latent_moments(Phi, i, block_of(problem, i, k), bound=bound)
    return float(likelihood.expected_log_prob(y[:, None], mean, var).sum())


def expected_log_logit(y, mean, std):
    """Sum of E log sigmoid(y (mean + std z)), by the trapezoidal rule in z."""
    z = np.linspace(-12, 12, 20_001)
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    values = log_expit(y[:, None] * (mean[:, None] + std[:, None] * z))
    return np.sum(values * density) * (z[1] - z[0])


def exact(problem, k):
    """The data term of the ELBO, dense."""
    Phi = problem.dense()[0]
    std = np.sqrt(np.sum((Phi @ chevron(problem, k).numpy()) ** 2, axis=1))
    return expected_log_logit(labels(problem).numpy(), Phi @ problem.mu.numpy(), std)


def expectation(problem, n_draws, k, bound):
    """Mean over all equally likely samples of `n_draws` sampling units."""
    samples = all_samples(problem.basis, n_draws)
    return np.mean([estimate(problem, i, k, bound) for i in samples])


def pairs_problem():
    """Twelve Fourier features in six sampling units."""
    return make_problem("fourier", n_features=12, block_size=1)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("k", [0, K_DENSE])
@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_data_term_is_exact_with_every_function(name, k, bound):
    problem = make_problem(name)
    value = estimate(problem, everything(problem.basis), k, bound)
    np.testing.assert_allclose(value, exact(problem, k), rtol=1e-8)


@pytest.mark.parametrize("k", [0, K_DENSE])
def test_strict_is_a_lower_bound_in_expectation_and_rises_to_the_elbo(k):
    problem = pairs_problem()
    bounds = [expectation(problem, draws, k, "strict") for draws in range(1, 7)]
    assert np.all(np.diff(bounds) > 0)
    assert bounds[-2] < exact(problem, k) < bounds[-1] + 1e-8


def test_plug_in_is_nearer_than_strict():
    problem = pairs_problem()
    for draws in range(2, 6):
        near, far = (
            abs(expectation(problem, draws, 0, bound) - exact(problem, 0))
            for bound in ("plug-in", "strict")
        )
        assert near < far


def test_strict_integrates_the_weights_that_it_samples(generator):
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([0, 2, 5]))
    Phi, C = problem.basis.features(problem.X, i.indices), chevron(problem, K_DENSE)
    epsilon = torch.randn(20_000, problem.basis.n_features, generator=generator).double()
    weights = problem.mu + epsilon @ C.T
    f = i.weight * (weights[:, i.indices] @ Phi.T)
    draws = LOGIT.log_prob(labels(problem).expand_as(f), f).sum(1)
    assert z_score(draws.numpy(), estimate(problem, i, K_DENSE, "strict")) < 4


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("k", [0, K_DENSE])
def test_divergence_averages_to_the_dense_one_over_all_samples(name, k):
    problem = make_problem(name)
    basis, S = problem.basis, problem.dense()[1]
    values = []
    for i in all_samples(basis, 2):
        entries = None if basis.diagonal_precision else basis.precision(i.indices, i.indices)
        s = basis.precision_diag(i.indices)
        values.append(float(divergence(i, block_of(problem, i, k), s, S=entries)))
    C = chevron(problem, k).numpy()
    expected = kl_of_gaussians(problem.mu.numpy(), C @ C.T, np.linalg.inv(S))
    if not basis.diagonal_precision:  # leaves out -log|S| / 2
        expected += 0.5 * np.linalg.slogdet(S)[1]
    np.testing.assert_allclose(np.mean(values), expected, rtol=1e-10)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
@pytest.mark.parametrize("n_draws", [2, 3])
def test_squares_from_pairs_average_to_the_dense_ones(name, n_draws):
    problem = make_problem(name)
    basis, (Phi, S, _) = problem.basis, problem.dense()
    V = problem.C[:, :2]
    sums, forms = [], []
    for i in all_samples(basis, n_draws):
        sums.append(squared_sum(basis.features(problem.X, i.indices), V[i.indices], i).numpy())
        S_i = torch.tensor(S)[i.indices][:, i.indices]
        forms.append(squared_form(S_i, V[i.indices], i).numpy())
    np.testing.assert_allclose(np.mean(sums, 0), (Phi @ V.numpy()) ** 2, rtol=1e-10)
    dense = np.diag(V.numpy().T @ S @ V.numpy())
    np.testing.assert_allclose(np.mean(forms, 0), dense, rtol=1e-10)


def test_bias_of_plug_in_is_the_variance_of_the_mean_for_a_gaussian():
    problem, noise = pairs_problem(), 0.3
    mu, samples = problem.mu, all_samples(problem.basis, 3)
    values = [estimate(problem, i, 0, "plug-in", Gaussian(noise), problem.y) for i in samples]
    means = [
        i.weight * problem.basis.features(problem.X, i.indices) @ mu[i.indices] for i in samples
    ]
    variance = float(torch.stack(means).var(0, correction=0).sum())
    unbiased = estimate(
        problem, everything(problem.basis), 0, "plug-in", Gaussian(noise), problem.y
    )
    np.testing.assert_allclose(np.mean(values), unbiased - variance / (2 * noise), rtol=1e-10)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_gradients_are_the_numerical_ones(name, bound):
    problem = make_problem(name)
    basis = problem.basis
    i = index_set(basis, torch.tensor([0, 1]))
    start = block_of(problem, i, 1)
    theta = torch.tensor(basis.kernel.theta)

    def elbo(mean, var, columns, theta):
        block = WeightBlock(mean, var, columns)
        Phi = basis.features(problem.X, i.indices, theta)
        moments = latent_moments(Phi, i, block, bound=bound)
        s = basis.precision_diag(i.indices, theta)
        S = None if basis.diagonal_precision else basis.precision(i.indices, i.indices, theta)
        data = 2.0 * LOGIT.expected_log_prob(labels(problem)[:, None], *moments).sum(0)
        return data - divergence(i, block, s, S=S)

    # A variance of 0 in the head is on the edge: keep it out of the check.
    inputs = [t.clone().requires_grad_() for t in (start.mean, start.columns, theta)]
    assert torch.autograd.gradcheck(
        lambda mean, columns, theta: elbo(mean, start.var, columns, theta), inputs
    )
    tail = block_of(problem, i, 0).var.requires_grad_()
    none = start.columns[:, :, :0]
    assert torch.autograd.gradcheck(lambda var: elbo(start.mean, var, none, theta), [tail])


@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_latent_functions_do_not_mix(bound):
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([1, 3, 4]))
    one = block_of(problem, i, K_DENSE)
    parts = [one, WeightBlock(2 * one.mean, 0.5 * one.var, -0.7 * one.columns)]
    both = WeightBlock(*(torch.cat([getattr(p, a) for p in parts], 1) for a in one._fields))
    Phi = problem.basis.features(problem.X, i.indices)
    s = problem.basis.precision_diag(i.indices)
    alone = [latent_moments(Phi, i, p, bound=bound) for p in parts]
    together = latent_moments(Phi, i, both, bound=bound)
    for a, b in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(a, torch.cat(b, 1), rtol=1e-12, atol=1e-12)
    separate = torch.cat([divergence(i, p, s) for p in parts])
    torch.testing.assert_close(divergence(i, both, s), separate, rtol=1e-12, atol=1e-12)


def test_variance_is_never_negative():
    problem = pairs_problem()
    for i in all_samples(problem.basis, 2):
        block = block_of(problem, i, K_DENSE)
        block = WeightBlock(block.mean, 0 * block.var, block.columns)
        Phi = problem.basis.features(problem.X, i.indices)
        raw = squared_sum(Phi, block.columns[:, 0], i).sum(1)
        clipped = latent_moments(Phi, i, block)[1][:, 0]
        torch.testing.assert_close(clipped, raw.clamp_min(0))


def test_errors_name_the_remedy():
    problem = pairs_problem()
    i = index_set(problem.basis, torch.tensor([2]))
    Phi = problem.basis.features(problem.X, i.indices)
    with pytest.raises(ValueError, match="basis_batch_size=2 gives a single sampling unit"):
        latent_moments(Phi, i, block_of(problem, i, 1))
    assert pair_weight(everything(problem.basis)) == 1.0


# The solver ---------------------------------------------------------------------------------------

KERNEL = ConstantKernel(2.0) * RBF(0.7)
N, M = 60, 20
Z, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def binary_data(n=N):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(n, 1))
    y = np.where(rng.uniform(size=n) < expit(3 * np.sin(2 * X[:, 0])), 1.0, -1.0)
    return X, y


def fourier_basis(*, block_size=5, dtype=torch.float64):
    return FourierBasis(FourierFeatures(KERNEL, M, 1, seed=1, block_size=block_size), dtype=dtype)


class Fit:
    """A solver that has run, with its state and history."""

    def __init__(self, basis, X, y, likelihood=LOGIT, seed=0, *, state=None, **options):
        generator = torch.Generator().manual_seed(seed)
        names = ("n_dense", "n_support", "optimizer", "offset")
        start = {"n_support": 50, **{k: options.pop(k) for k in names if k in options}}
        bound, callback = options.pop("bound", "plug-in"), options.pop("callback", None)
        defaults = dict(batch_size=N, basis_batch_size=M, max_iter=150, decay=0.03)
        chosen = SGDOptions(**{**defaults, **options})
        if state is None:
            state = LikelihoodState.start(X, y, basis, likelihood, generator=generator, **start)
        self.state = state
        solver = LikelihoodSolver(X, y, basis, state, chosen, generator, likelihood, bound=bound)
        self.history = solver.run(callback)
        self.mean = state.weights[:, : state.n_latent]
        self.q = state.q


class DenseElbo:
    """The exact -ELBO of a chevron (k = 0: mean-field) under the logit link, and its optimum."""

    def __init__(self, basis, X, y, k=0, offset=0.0):
        whole = everything(basis).indices
        self.Phi = basis.features(torch.tensor(X), whole).numpy()
        diagonal = basis.diagonal_precision
        self.S = np.eye(len(whole)) if diagonal else basis.precision(whole, whole).numpy()
        self.y, self.k, self.offset = y, k, offset
        m = len(self.S)
        self.free = np.tril(np.ones((m, m), dtype=bool))
        self.free[:, k:] = np.eye(m, dtype=bool)[:, k:]

    def __call__(self, mu, C):
        f = self.offset + self.Phi @ mu
        std = np.linalg.norm(self.Phi @ C, axis=1)
        fit = log_expit(self.y[:, None] * (f[:, None] + std[:, None] * Z)) @ WEIGHTS
        quadratic = mu @ self.S @ mu + np.trace(C.T @ self.S @ C)
        log_det = 2 * np.log(np.diag(C)).sum() + np.linalg.slogdet(self.S)[1]
        return 0.5 * (quadratic - log_det - len(mu)) - fit.sum()

    def gradient(self, mu, C):
        PC = self.Phi @ C
        std = np.linalg.norm(PC, axis=1)
        f = self.offset + self.Phi @ mu
        p = expit(-self.y[:, None] * (f[:, None] + std[:, None] * Z))
        d1, d2 = self.y * (p @ WEIGHTS), -(p * (1 - p)) @ WEIGHTS
        grad_C = self.S @ C - self.Phi.T @ (d2[:, None] * PC) - np.diag(1 / np.diag(C))
        return self.S @ mu - self.Phi.T @ d1, grad_C

    def unpack(self, x):
        m = len(self.S)
        C = np.zeros((m, m))
        C[self.free] = x[m:]
        C[np.diag_indices(m)] = np.exp(np.diag(C))
        return x[:m], C

    @functools.cached_property
    def optimum(self):
        """Least value and where, by L-BFGS over mu, entries and logarithms of the diagonal."""

        def value_and_gradient(x):
            mu, C = self.unpack(x)
            grad_mu, grad_C = self.gradient(mu, C)
            grad_C[np.diag_indices_from(C)] *= np.diag(C)
            return self(mu, C), np.concatenate([grad_mu, grad_C[self.free]])

        start = np.zeros(len(self.S) + self.free.sum())
        options = dict(maxiter=600, ftol=1e-12, gtol=1e-7)
        best = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
        return best.fun, self.unpack(best.x)

    def start(self):
        """The value at mu = 0 and unit variances, to measure gaps by."""
        return self(np.zeros(len(self.S)), np.eye(len(self.S)))


def gap(dense, fit):
    """Distance of a fit from the optimum, as a fraction of that of the start."""
    best, q = dense.optimum[0], fit.q()
    return (dense(q.mean.numpy(), q.factor().numpy()) - best) / (dense.start() - best)


@pytest.mark.parametrize("name", ["inducing", slow_case("fourier")])
def test_mean_field_fit_with_every_row_and_function_reaches_the_dense_optimum(name):
    X, y = binary_data()
    basis = fourier_basis() if name == "fourier" else InducingBasis(KERNEL, torch.tensor(X[:M]))
    fit = Fit(basis, X, y, learning_rate=0.2 if name == "inducing" else 1.0)
    dense = DenseElbo(basis, X, y)
    assert -1e-6 < gap(dense, fit) < 5e-3
    std = np.diag(dense.optimum[1][1])
    np.testing.assert_allclose(fit.q().tail_std.numpy(), std, rtol=0.03)
    if name == "inducing":
        sampled = Fit(basis, X, y, batch_size=30, basis_batch_size=16)
        assert gap(dense, sampled) < 0.15


@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_precision_is_a_running_mean_of_the_fixed_point(bound):
    X, y = binary_data()
    basis = fourier_basis(block_size=2)
    options = dict(bound=bound, max_iter=1, learning_rate=1e-12, basis_batch_size=10)
    state = Fit(basis, X, y, **options).state
    state.n_drawn_units = None  # all may be drawn now
    before, visits = state.precision[:, 0].numpy().copy(), state.visits.numpy().copy()
    Fit(basis, X, y, state=state, seed=1, **options)
    i = np.flatnonzero(state.visits.numpy() > visits)
    w = M / len(i)
    Phi = DenseElbo(basis, X, y).Phi[:, i]
    power = 2 if bound == "strict" else 1
    std = np.sqrt(w**power * Phi**2 @ (1 / before[i]))
    p = expit(std[:, None] * Z)
    curvature = (p * (1 - p)) @ WEIGHTS
    target = 1 + w ** (power - 1) * (Phi**2).T @ curvature
    rho = 1 / state.visits.numpy()[i]
    expected = before.copy()
    expected[i] = (1 - rho) * before[i] + rho * target
    assert w == 2.5 and (visits[i] == 0).any()
    np.testing.assert_allclose(state.precision[:, 0].numpy(), expected, rtol=1e-4)


def test_chevron_reaches_the_dense_optimum_of_its_structure_and_beats_mean_field():
    X, y = binary_data()
    basis, k = fourier_basis(), 4
    fit = Fit(basis, X, y, n_dense=k, optimizer="adam", learning_rate=0.05, max_iter=250)
    dense, q = DenseElbo(basis, X, y, k), fit.q()
    assert -1e-6 < gap(dense, fit) < 0.02
    assert dense(q.mean.numpy(), q.factor().numpy()) < DenseElbo(basis, X, y).optimum[0]
    assert (q.columns[:k].triu(1) == 0).all() and (q.columns.diagonal() > 0).all()


@pytest.mark.parametrize("bound, k", [slow_case("plug-in", 0), ("strict", 3)])
def test_fit_by_samples_comes_near_the_dense_optimum(bound, k):
    X, y = binary_data()
    basis = fourier_basis(block_size=2)
    sizes = dict(batch_size=30, basis_batch_size=16, learning_rate=0.7)
    assert gap(DenseElbo(basis, X, y, k), Fit(basis, X, y, bound=bound, n_dense=k, **sizes)) < 0.1


def test_adagrad_without_support_rows_approaches_the_dense_optimum():
    X, y = binary_data()
    basis = fourier_basis()
    fit = Fit(basis, X, y, learning_rate=0.3, n_support=0)
    assert gap(DenseElbo(basis, X, y), fit) < 0.04
    assert np.isnan(fit.history["support_log_prob"]).all()


def test_laplace_likelihood_resists_outliers():
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, size=(N, 1))
    truth = np.sin(2 * X[:, 0])
    y = truth + 0.1 * rng.normal(size=N)
    y[:8] += 8.0
    errors = []
    for likelihood in (Laplace(0.1), Gaussian(0.01)):
        basis = fourier_basis()
        fit = Fit(basis, X, y, likelihood)
        mean = product(basis, torch.tensor(X), fit.mean)[:, 0]
        errors.append(np.sqrt(np.mean((mean.numpy() - truth) ** 2)))
    assert errors[0] < 0.2 < errors[1]


SAMPLES = dict(batch_size=20, basis_batch_size=10, max_iter=20)


def test_history_holds_the_loss_and_the_exact_fit_of_the_support_rows():
    X, y = binary_data()
    basis, offset = fourier_basis(), 0.4
    first = Fit(basis, X, y, offset=torch.tensor([offset]), **SAMPLES)
    q, dense = first.q(), DenseElbo(basis, X, y, offset=offset)
    expected = dense(q.mean.numpy(), q.factor().numpy())
    state = first.state
    f = offset + dense.Phi @ q.mean.numpy()
    rows = [int(np.flatnonzero(X[:, 0] == x)[0]) for x in state.X_support[:, 0].numpy()]
    # The history is that before a step: take one more, from every row and function.
    again = Fit(basis, X, y, state=state, max_iter=1, learning_rate=1e-12)
    np.testing.assert_allclose(again.history["loss"], [expected], rtol=1e-7)
    support = np.mean(log_expit(y * f)[rows])
    np.testing.assert_allclose(again.history["support_log_prob"], [support], rtol=1e-7)
    assert state.n_iter == 21


def test_hyper_parameters_raise_the_bound_after_they_were_frozen():
    X, y = binary_data()
    basis = fourier_basis()
    fixed = Fit(basis, X, y, max_iter=80)
    options = dict(learn_hyperparameters=True, hyper_learning_rate=0.05, freeze_iterations=30)
    learned = Fit(basis, X, y, max_iter=80, **options)
    losses = learned.history["loss"]
    np.testing.assert_allclose(losses[:30], fixed.history["loss"][:30], rtol=1e-10)
    assert losses[-1] < fixed.history["loss"][-1] - 0.05
    theta = learned.state.theta.clone()
    assert fixed.state.theta is None and theta.shape == (2,)
    assert np.isnan(learned.history["support_log_prob"][-1])
    again = Fit(basis, X, y, state=learned.state, learn_hyperparameters=True, max_iter=5)
    assert again.state.n_iter == 85 and torch.allclose(again.state.theta, theta, atol=0.02)
    with pytest.raises(ValueError, match="diagonal prior precision"):
        Fit(InducingBasis(KERNEL, torch.tensor(X)), X, y, learn_hyperparameters=True)


@pytest.mark.parametrize("n_dense", [0, 3])
def test_classes_share_features_and_nothing_else(n_dense):
    X, y = binary_data()
    Y = np.column_stack([y, -y, np.where(X[:, 0] > 0.3, 1.0, -1.0)])
    offset = torch.tensor([0.1, -0.2, 0.3])
    basis = fourier_basis(block_size=2)
    together = Fit(basis, X, Y, offset=offset, n_dense=n_dense, **SAMPLES)
    assert together.mean.shape == (M, 3)
    for c in range(3):
        alone = Fit(basis, X, Y[:, c], offset=offset[c : c + 1], n_dense=n_dense, **SAMPLES)
        torch.testing.assert_close(together.mean[:, [c]], alone.mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(together.q(c).factor(), alone.q().factor())


def test_non_finite_step_is_not_taken():
    X, y = binary_data()
    basis = fourier_basis()
    state = Fit(basis, X, y, n_support=0, **SAMPLES).state
    X[7] = np.nan
    with pytest.raises(NonFiniteStepError, match="step of mu at iteration 20") as caught:
        Fit(basis, X, y, state=state)
    assert torch.isfinite(caught.value.state.weights).all() and caught.value.state.n_iter == 20
    with pytest.raises(ValueError, match="X contains NaN or inf"):
        Fit(basis, X, y, n_support=0)
