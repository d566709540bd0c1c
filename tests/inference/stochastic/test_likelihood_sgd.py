"""The solver of Theorem 3: dense optima, structure, warm starts, inputs, failures."""

import functools
import pickle

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.stochastic.basis import FourierBasis, InducingBasis
from skgp.inference.stochastic.likelihood_sgd import fit_likelihood_sgd
from skgp.inference.stochastic.prediction import product
from skgp.inference.stochastic.sampling import everything
from skgp.inference.stochastic.state import NonFiniteStepError
from skgp.kernels import FourierFeatures
from skgp.likelihoods import Bernoulli, Gaussian, Laplace
from tests.same import assert_same

KERNEL = ConstantKernel(2.0) * RBF(0.7)
N, M = 60, 20
Z, WEIGHTS = np.polynomial.hermite_e.hermegauss(60)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def binary_data(n=N):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(n, 1))
    y = np.where(rng.uniform(size=n) < expit(3 * np.sin(2 * X[:, 0])), 1.0, -1.0)
    return X, y


def fourier_basis(amplitude="features", *, block_size=5, dtype=torch.float64):
    fourier = FourierFeatures(KERNEL, M, 1, seed=1, block_size=block_size)
    return FourierBasis(fourier, amplitude=amplitude, dtype=dtype)


def make_basis(name, X):
    if name == "inducing":
        return InducingBasis(KERNEL, torch.tensor(X[:M]))
    return fourier_basis(name)


def fit(basis, X, y, likelihood=None, seed=0, **options):
    defaults = dict(batch_size=N, basis_batch_size=M, n_support=50, max_iter=150, decay=0.03)
    return fit_likelihood_sgd(
        X,
        y,
        basis,
        likelihood or Bernoulli("logit"),
        generator=torch.Generator().manual_seed(seed),
        **{**defaults, **options},
    )


class DenseElbo:
    """The exact -ELBO of a chevron (k = 0: mean-field) under the logit link, and its optimum."""

    def __init__(self, basis, X, y, k=0, offset=0.0):
        whole = everything(basis).indices
        self.Phi = basis.features(torch.tensor(X), whole).numpy()
        self.S = basis.precision(whole, whole).numpy()
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


def gap(dense, result):
    """Distance of a fit from the optimum, as a fraction of that of the start."""
    best = dense.optimum[0]
    q = result.q()
    return (dense(q.mean.numpy(), q.factor().numpy()) - best) / (dense.start() - best)


@pytest.mark.parametrize("name", ["features", "precision", "inducing"])
def test_mean_field_fit_with_every_row_and_function_reaches_the_dense_optimum(name):
    X, y = binary_data()
    basis = make_basis(name, X)
    result = fit(basis, X, y, learning_rate=0.1 if name == "inducing" else 1.0)
    dense = DenseElbo(basis, X, y)
    assert -1e-6 < gap(dense, result) < 5e-3
    std = np.diag(dense.optimum[1][1])
    np.testing.assert_allclose(result.std[:, 0].numpy(), std, rtol=0.03)


@pytest.mark.parametrize("bound", ["plug-in", "strict"])
def test_precision_is_a_running_mean_of_the_fixed_point(bound):
    X, y = binary_data()
    basis = fourier_basis(block_size=2)
    options = dict(bound=bound, max_iter=1, learning_rate=1e-12, basis_batch_size=10)
    state = fit(basis, X, y, **options).state
    before, visits = state.precision[:, 0].numpy().copy(), state.visits.numpy().copy()
    fit(basis, X, y, state=state, seed=1, **options)
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


@pytest.mark.parametrize("optimizer, rate", [("adagrad", 0.3), ("adam", 0.05), ("momentum", 1.0)])
def test_every_optimizer_approaches_the_dense_optimum(optimizer, rate):
    X, y = binary_data()
    basis = fourier_basis()
    result = fit(basis, X, y, optimizer=optimizer, learning_rate=rate, n_support=0)
    assert gap(DenseElbo(basis, X, y), result) < 0.04


def test_chevron_reaches_the_dense_optimum_of_its_structure_and_beats_mean_field():
    X, y = binary_data()
    basis, k = fourier_basis(), 4
    options = dict(optimizer="adam", n_support=0, learning_rate=0.05, max_iter=250)
    result = fit(basis, X, y, covariance="chevron", n_dense_columns=k, **options)
    dense, q = DenseElbo(basis, X, y, k), result.q()
    assert -1e-6 < gap(dense, result) < 0.02
    assert dense(q.mean.numpy(), q.factor().numpy()) < DenseElbo(basis, X, y).optimum[0]
    assert (q.columns[:k].triu(1) == 0).all() and (q.columns.diagonal() > 0).all()
    variances = np.square(q.factor().numpy()).sum(1)
    np.testing.assert_allclose(result.std[:, 0].numpy() ** 2, variances, rtol=1e-10)


@pytest.mark.parametrize("bound", ["plug-in", "strict"])
@pytest.mark.parametrize("options", [{}, dict(covariance="chevron", n_dense_columns=3)])
def test_fit_by_samples_comes_near_the_dense_optimum(bound, options):
    X, y = binary_data()
    basis = fourier_basis(block_size=2)
    sizes = dict(batch_size=30, basis_batch_size=16, learning_rate=0.7)
    result = fit(basis, X, y, bound=bound, **sizes, **options)
    k = options.get("n_dense_columns", 0)
    assert gap(DenseElbo(basis, X, y, k), result) < 0.1


def test_fit_of_inducing_points_by_samples_comes_near_the_dense_optimum():
    X, y = binary_data()
    basis = make_basis("inducing", X)
    result = fit(basis, X, y, batch_size=30, basis_batch_size=16)
    assert gap(DenseElbo(basis, X, y), result) < 0.15


def test_point_estimate_is_the_posterior_mode():
    X, y = binary_data()
    basis, offset = fourier_basis(), torch.tensor([0.4])
    result = fit(basis, X, y, covariance="none", offset=offset, learning_rate=1.0)
    dense = DenseElbo(basis, X, y, offset=0.4)

    def loss(mu):
        f = 0.4 + dense.Phi @ mu
        return 0.5 * mu @ mu - log_expit(y * f).sum(), mu - dense.Phi.T @ (y * expit(-y * f))

    best = minimize(loss, np.zeros(M), jac=True, method="L-BFGS-B")
    start = loss(np.zeros(M))[0]
    assert loss(result.mean[:, 0].numpy())[0] - best.fun < 0.01 * (start - best.fun)
    assert result.std is None
    with pytest.raises(ValueError, match="leaves no Gaussian"):
        result.q()


def test_laplace_likelihood_resists_outliers():
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, size=(N, 1))
    truth = np.sin(2 * X[:, 0])
    y = truth + 0.1 * rng.normal(size=N)
    y[:8] += 8.0
    errors = []
    for likelihood in (Laplace(0.1), Gaussian(0.01)):
        basis = fourier_basis()
        result = fit(basis, X, y, likelihood)
        mean = product(basis, torch.tensor(X), result.mean)[:, 0]
        errors.append(np.sqrt(np.mean((mean.numpy() - truth) ** 2)))
    assert errors[0] < 0.2 < errors[1]


def test_history_holds_the_loss_and_the_exact_fit_of_the_support_rows():
    X, y = binary_data()
    basis = fourier_basis()
    first = fit(basis, X, y, **SAMPLES)
    q, dense = first.q(), DenseElbo(basis, X, y)
    expected = dense(q.mean.numpy(), q.factor().numpy())
    state = first.state
    f = dense.Phi @ q.mean.numpy()
    rows = [int(np.flatnonzero(X[:, 0] == x)[0]) for x in state.X_support[:, 0].numpy()]
    # The history is that before a step: take one more, from every row and function.
    again = fit(basis, X, y, state=state, max_iter=1, learning_rate=1e-12)
    np.testing.assert_allclose(again.history["loss"], [expected], rtol=1e-8)
    support = np.mean(log_expit(y * f)[rows])
    np.testing.assert_allclose(again.history["support_log_prob"], [support], rtol=1e-8)
    assert again.n_iter == 21


def test_hyper_parameters_raise_the_bound_after_they_were_frozen():
    X, y = binary_data()
    basis = fourier_basis("precision")
    fixed = fit(basis, X, y, max_iter=80)
    losses = []
    result = fit(
        basis,
        X,
        y,
        max_iter=80,
        learn_hyperparameters=True,
        hyper_learning_rate=0.05,
        freeze_iterations=30,
        callback=lambda iteration, info: losses.append(info["loss"]),
    )
    np.testing.assert_allclose(losses[:30], fixed.history["loss"][:30], rtol=1e-10)
    assert losses[-1] < fixed.history["loss"][-1] - 0.1
    assert fixed.theta is None and result.theta.shape == (2,)
    assert np.isnan(result.history["support_log_prob"][-1])
    again = fit(basis, X, y, state=result.state, learn_hyperparameters=True, max_iter=5)
    assert again.n_iter == 85 and torch.allclose(again.theta, result.theta, atol=0.02)


SAMPLES = dict(batch_size=20, basis_batch_size=10, max_iter=20)  # one unit of two


def test_fit_is_reproducible_and_reads_a_memory_map(tmp_path):
    X, y = binary_data()
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    maps = [np.load(tmp_path / name, mmap_mode="r") for name in ("X.npy", "y.npy")]
    one = fit(fourier_basis(), torch.tensor(X), torch.tensor(y), **SAMPLES)
    for data in ((X, y), maps):
        two = fit(fourier_basis(), *data, **SAMPLES)
        assert_same(one.mean, two.mean)
        assert_same(one.std, two.std)
    assert not torch.equal(one.mean, fit(fourier_basis(), X, y, seed=1, **SAMPLES).mean)


@pytest.mark.parametrize("covariance", ["diagonal", "chevron", "none"])
def test_classes_share_features_and_nothing_else(covariance):
    X, y = binary_data()
    Y = np.column_stack([y, -y, np.where(X[:, 0] > 0.3, 1.0, -1.0)])
    offset = torch.tensor([0.1, -0.2, 0.3])
    options = dict(SAMPLES, covariance=covariance, n_dense_columns=3)
    basis = fourier_basis(block_size=2)
    together = fit(basis, X, Y, offset=offset, **options)
    assert together.mean.shape == (M, 3)
    for c in range(3):
        alone = fit(basis, X, Y[:, c], offset=offset[c : c + 1], **options)
        torch.testing.assert_close(together.mean[:, [c]], alone.mean, rtol=1e-9, atol=1e-12)
        if covariance != "none":
            torch.testing.assert_close(together.q(c).factor(), alone.q().factor())


def test_warm_start_goes_on_from_the_state():
    X, y = binary_data()
    basis = fourier_basis()
    first = fit(basis, X, y, max_iter=75, decay=1.0, learning_rate=1.0)
    state = pickle.loads(pickle.dumps(first.state))
    result = fit(basis, X, y, state=state, max_iter=75, learning_rate=1.0)
    assert result.n_iter == 150 and len(result.history["loss"]) == 75
    assert gap(DenseElbo(basis, X, y), result) < 0.01


def test_callback_and_tolerance_stop():
    X, y = binary_data()
    result = fit(fourier_basis(), X, y, callback=lambda iteration, info: iteration == 4)
    assert result.n_iter == 5 and result.stopped_early
    result = fit(fourier_basis(), X, y, tol=2.0, **dict(SAMPLES, max_iter=600))
    assert result.n_iter < 600 and result.stopped_early


def test_float32_is_kept(generator):
    X, y = binary_data()
    result = fit(fourier_basis(dtype=torch.float32), X, y, **SAMPLES)
    assert result.mean.dtype == result.std.dtype == torch.float32


def test_non_finite_step_is_not_taken():
    X, y = binary_data()
    basis, options = fourier_basis(), dict(n_support=0, optimizer="adagrad")
    state = fit(basis, X, y, **options, **SAMPLES).state
    X[7] = np.nan
    with pytest.raises(NonFiniteStepError, match="step of mu at iteration 20") as caught:
        fit(basis, X, y, state=state, **options)
    assert torch.isfinite(caught.value.state.weights).all() and caught.value.state.n_iter == 20
    with pytest.raises(ValueError, match="X contains NaN or inf"):
        fit(basis, X, y, batch_size=N, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(covariance="full"), "covariance must be one of .*'full'"),
        (dict(bound="quadratic"), "bound must be one of .*'quadratic'"),
        (dict(learning_rate=0.0), "learning_rate must be positive, got 0.0"),
        (dict(decay=-1.0), "decay must be positive"),
        (dict(max_iter=0), "max_iter must be positive"),
        (dict(batch_size=0), "batch_size must be positive"),
        (dict(basis_batch_size=0), "basis_batch_size must be at least 1"),
        (dict(n_support=-1), "n_support must be 0"),
        (dict(n_support=0), 'optimizer="nystrom" needs the support features'),
        (dict(covariance="chevron", n_dense_columns=99), "n_dense_columns must be in 1..m=20"),
        (dict(offset=torch.zeros(3)), r"offset must have shape \(1,\)"),
        (dict(covariance="none", learn_hyperparameters=True), "needs a covariance"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    X, y = binary_data()
    with pytest.raises(ValueError, match=message):
        fit(fourier_basis(), X, y, **options)


def test_state_of_another_structure_is_refused_and_so_is_learning_with_a_dense_precision():
    X, y = binary_data()
    state = fit(fourier_basis(), X, y, **SAMPLES).state
    with pytest.raises(ValueError, match="does not fit covariance='none'"):
        fit(fourier_basis(), X, y, covariance="none", state=state)
    with pytest.raises(ValueError, match="diagonal prior precision"):
        fit(make_basis("inducing", X), X, y, learn_hyperparameters=True)
