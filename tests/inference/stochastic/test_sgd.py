"""The stochastic solver: converges to the dense optimum, exact running sums, inputs, failures."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.inference.exact import FunctionSpacePosterior, WeightCovariance
from skgp.inference.stochastic.basis import FourierBasis, InducingBasis
from skgp.inference.stochastic.control_variates import nystrom_factor, support_features
from skgp.inference.stochastic.sampling import everything
from skgp.inference.stochastic.sgd import fit_sgd
from skgp.inference.stochastic.state import NonFiniteStepError, proposition_1
from skgp.inference.weights.posterior import LinearWeightsPosterior
from skgp.kernels import FourierFeatures, gram
from tests.reference import qsgp as reference
from tests.same import assert_same

NOISE = 0.05
KERNEL = ConstantKernel(1.2) * RBF(0.7)
OPTIMIZERS = ("nystrom", "adagrad", "momentum", "adam")


def sine_data(n=120):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(n, 1))
    y = np.sin(3 * X[:, 0]) + NOISE**0.5 * rng.normal(size=n)
    return X, y - y.mean()


def fourier_basis(m=40, **options):
    return FourierBasis(FourierFeatures(KERNEL, m, 1, seed=1, block_size=5), **options)


def dense(basis, X):
    whole = everything(basis).indices
    Phi = basis.features(torch.tensor(X), whole).numpy()
    return Phi, basis.precision(whole, whole).numpy()


def fit(basis, X, y, seed=0, **options):
    defaults = dict(batch_size=40, basis_batch_size=20, n_support=60, max_iter=300)
    generator = torch.Generator().manual_seed(seed)
    return fit_sgd(X, y, basis, NOISE, generator=generator, **{**defaults, **options})


def relative_rmse(basis, result, X, y):
    """Distance of the fitted mean from the exact posterior's, relative to the latter's size."""
    Phi, S = dense(basis, X)
    exact = Phi @ reference.posterior(Phi, S, y, NOISE)[0]
    return np.sqrt(np.mean((Phi @ result.mu.numpy() - exact) ** 2) / np.mean(exact**2))


# Every row and function an iteration: no noise is left, and an optimizer must converge.
EVERYTHING = dict(batch_size=120, basis_batch_size=40, n_support=120)


@pytest.mark.parametrize(
    "optimizer, learning_rate, error",
    [("nystrom", 0.1, 2e-3), ("adagrad", 0.5, 0.08), ("momentum", 1.0, 0.01), ("adam", 0.05, 0.01)],
)
def test_fit_without_noise_reaches_the_dense_optimum(optimizer, learning_rate, error):
    X, y = sine_data()
    basis = fourier_basis()
    options = dict(optimizer=optimizer, learning_rate=learning_rate)
    result = fit(basis, X, y, **EVERYTHING, **options)
    assert relative_rmse(basis, result, X, y) < error


@pytest.mark.parametrize(
    "optimizer, error", [("nystrom", 0.15), ("adagrad", 0.5), ("momentum", 0.4), ("adam", 0.6)]
)
def test_fit_by_samples_approaches_the_dense_optimum(optimizer, error):
    X, y = sine_data()
    basis = fourier_basis()
    assert relative_rmse(basis, fit(basis, X, y, optimizer=optimizer), X, y) < error


@pytest.mark.parametrize("scaling", ["draws", "union"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_fit_of_inducing_points_approaches_the_exact_gp(scaling, symmetric):
    X, y = sine_data()
    basis = InducingBasis(KERNEL, torch.tensor(X))
    result = fit(basis, X, y, scaling=scaling, symmetric=symmetric, basis_batch_size=60)
    K = gram(KERNEL, torch.tensor(X)).numpy()
    exact = K @ np.linalg.solve(K + NOISE * np.eye(len(y)), y)
    error = np.sqrt(np.mean((K @ result.mu.numpy() - exact) ** 2) / np.mean(exact**2))
    assert error < 0.2


def test_larger_steps_are_possible_with_the_preconditioner():
    X, y = sine_data()
    basis = fourier_basis()
    errors = [
        relative_rmse(basis, fit(basis, X, y, optimizer=optimizer, max_iter=60), X, y)
        for optimizer in ("nystrom", "adagrad")
    ]
    assert errors[0] < errors[1]


def test_diagonal_covariance_is_proposition_1():
    X, y = sine_data()
    basis = fourier_basis()
    result = fit(basis, X, y, batch_size=len(y), max_iter=60)  # every function met with every row
    Phi, S = dense(basis, X)
    expected = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    np.testing.assert_allclose(result.q.factor_diagonal.numpy(), expected, rtol=1e-8)


def test_proposition_1_is_the_numerical_optimum():
    phi, s = np.array([0.3, 1.2, -0.4]), 0.7
    best = minimize_scalar(
        lambda c: (phi @ phi / NOISE + s) * c**2 - 2 * np.log(c),
        bounds=(1e-3, 5),
        method="bounded",
        options={"xatol": 1e-10},
    ).x
    c = proposition_1(torch.tensor([phi @ phi]), torch.tensor([s]), NOISE)
    np.testing.assert_allclose(float(c), best, rtol=1e-6)


def chevron_optimum(Phi, S, k):
    """Least L_Sigma over chevrons with k dense columns, by a dense quasi-Newton method."""
    m = len(S)
    head = [(p, q) for q in range(k) for p in range(q, m)]
    rows, columns = np.array(head).T
    H = Phi.T @ Phi / NOISE + S

    def factor(x):
        C = np.zeros((m, m))
        C[rows, columns] = x
        C[np.arange(k, m), np.arange(k, m)] = 1 / np.sqrt(np.diag(H)[k:])
        C[np.arange(k), np.arange(k)] = np.exp(np.diag(C)[:k])
        return C

    def loss(x):
        C = factor(x)
        gradient = 2 * H @ C - 2 * np.diag(1 / np.diag(C))
        gradient[np.arange(k), np.arange(k)] *= np.diag(C)[:k]
        value = np.trace(C.T @ H @ C) - 2 * np.log(np.diag(C)).sum()
        return value, gradient[rows, columns]

    start = np.where(rows == columns, -1.0, 0.0)
    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 2000}).fun


@pytest.mark.parametrize(
    "options, gap",
    [
        (dict(EVERYTHING, learning_rate=0.3), 1e-3),
        (dict(EVERYTHING, learning_rate=0.3, column_batch_size=2), 5e-3),
        (dict(basis_batch_size=10, learning_rate=0.3), 0.3),
    ],
)
def test_chevron_approaches_the_dense_optimum_of_its_structure(options, gap):
    X, y = sine_data()
    basis = fourier_basis(m=20)
    Phi, S = dense(basis, X)
    result = fit(basis, X, y, covariance="chevron", n_dense_columns=4, **options)
    value = reference.loss_sigma(Phi, S, result.q.factor().numpy(), NOISE)
    mean_field = np.diag(1 / np.sqrt(np.diag(Phi.T @ Phi / NOISE + S)))
    best, worst = chevron_optimum(Phi, S, 4), reference.loss_sigma(Phi, S, mean_field, NOISE)
    assert best - 1e-6 < value < best + gap * (worst - best)


@pytest.mark.parametrize("kind", ["fourier", "inducing"])
def test_chevron_keeps_its_pattern_and_its_running_sums(kind):
    X, y = sine_data()
    basis = fourier_basis() if kind == "fourier" else InducingBasis(KERNEL, torch.tensor(X[:40]))
    result = fit(
        basis,
        X,
        y,
        covariance="chevron",
        n_dense_columns=7,
        column_batch_size=3,
        linear_control=torch.tensor(dense(basis, X)[0].T @ y),
    )
    state = result.state
    C = result.q.columns
    assert (C[:7].triu(1) == 0).all() and (C.diagonal() > 0).all()
    assert (C[7:] != 0).any(dim=0).all()
    B = support_features(basis, state.X_support)(everything(basis).indices)
    np.testing.assert_allclose(state.sums.numpy(), (B @ state.weights).numpy(), atol=1e-10)
    if kind == "inducing":
        N = nystrom_factor(basis, state.X_support)(everything(basis).indices)
        expected = (N @ state.weights).numpy()
        np.testing.assert_allclose(state.precision_sums.numpy(), expected, atol=1e-10)


def test_loss_estimates_the_negative_elbo():
    X, y = sine_data()
    basis = fourier_basis(amplitude="precision")
    result = fit(basis, X, y, max_iter=50, **EVERYTHING)
    Phi, S = dense(basis, X)
    # The loss of an iteration is that before its step: take one more, with a negligible step.
    again = fit_sgd(
        X, y, basis, NOISE, state=result.state, learning_rate=1e-12, max_iter=1,
        batch_size=120, basis_batch_size=40, generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    C = np.diag(again.q.factor_diagonal.numpy())
    expected = -reference.elbo(Phi, S, y, again.mu.numpy(), C, NOISE)
    np.testing.assert_allclose(again.history["loss"][-1], expected, rtol=1e-6)


@pytest.mark.parametrize("amplitude", ["features", "precision"])
def test_hyperparameters_climb_the_elbo_once_unfrozen(amplitude):
    X, y = sine_data()
    basis = fourier_basis(amplitude=amplitude)
    options = dict(EVERYTHING, learn_hyperparameters=True, hyper_learning_rate=0.03, decay=1.0)
    frozen = fit(basis, X, y, max_iter=60, freeze_iterations=60, **options)
    assert frozen.noise_variance == NOISE and frozen.theta is None
    free = fit(basis, X, y, max_iter=160, freeze_iterations=60, **options)
    assert not np.allclose(free.theta.numpy(), KERNEL.theta, atol=0.02)
    losses = np.array(free.history["loss"])
    assert losses[-20:].mean() < np.array(frozen.history["loss"])[-20:].mean() - 1


def test_hyperparameters_stay_within_the_bounds():
    X, y = sine_data()
    kernel = ConstantKernel(1.2, (1.1, 1.3)) * RBF(0.7, (0.69, 0.71))
    basis = FourierBasis(FourierFeatures(kernel, 20, 1, seed=1, block_size=5))
    options = dict(learn_hyperparameters=True, hyper_learning_rate=0.5, max_iter=20)
    theta = fit(basis, X, y, **options).theta.numpy()
    assert np.all(theta >= kernel.bounds[:, 0]) and np.all(theta <= kernel.bounds[:, 1])


def test_hyperparameters_of_inducing_points_are_refused():
    X, y = sine_data(20)
    with pytest.raises(ValueError, match="diagonal prior precision"):
        fit(InducingBasis(KERNEL, torch.tensor(X)), X, y, learn_hyperparameters=True)


def test_fit_reads_read_only_memory_maps(tmp_path):
    X, y = sine_data()
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    mapped = [np.load(tmp_path / name, mmap_mode="r") for name in ("X.npy", "y.npy")]
    from_file = fit(fourier_basis(), *mapped, max_iter=20)
    from_memory = fit(fourier_basis(), X, y, max_iter=20)
    from_tensor = fit(fourier_basis(), torch.tensor(X), torch.tensor(y), max_iter=20)
    assert_same(from_file.mu, from_memory.mu)
    assert_same(from_file.mu, from_tensor.mu)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fit_repeats_itself_for_a_seed(optimizer):
    X, y = sine_data()
    options = dict(optimizer=optimizer, max_iter=30, covariance="chevron", n_dense_columns=3)
    first, second = (fit(fourier_basis(), X, y, **options) for _ in range(2))
    other = fit(fourier_basis(), X, y, seed=1, **options)
    assert_same(first.q.factor(), second.q.factor())
    assert_same(first.mu, second.mu)
    assert not torch.equal(first.mu, other.mu)


def test_warm_start_continues_a_fit():
    X, y = sine_data()
    generator = torch.Generator().manual_seed(0)
    options = dict(batch_size=40, basis_batch_size=20, n_support=60, decay=1.0)
    whole = fit_sgd(X, y, fourier_basis(), NOISE, generator=generator, max_iter=40, **options)
    generator = torch.Generator().manual_seed(0)
    half = fit_sgd(X, y, fourier_basis(), NOISE, generator=generator, max_iter=20, **options)
    rest = fit_sgd(
        X, y, fourier_basis(), NOISE, generator=generator, max_iter=20, state=half.state, **options
    )
    assert rest.n_iter == 40
    assert_same(rest.mu, whole.mu)


def test_warm_start_with_another_shape_is_refused():
    X, y = sine_data()
    state = fit(fourier_basis(), X, y, max_iter=1).state
    with pytest.raises(ValueError, match="Start without state"):
        fit(fourier_basis(), X, y, state=state, covariance="chevron", n_dense_columns=2)


@pytest.mark.parametrize("memory_budget", [0, 2**20])
def test_memory_budget_does_not_change_the_result(memory_budget):
    X, y = sine_data()
    result = fit(fourier_basis(), X, y, max_iter=30, memory_budget=memory_budget)
    torch.testing.assert_close(result.mu, fit(fourier_basis(), X, y, max_iter=30).mu)


def test_float32_basis_fits_in_float32():
    X, y = sine_data()
    basis = fourier_basis(dtype=torch.float32)
    result = fit(basis, X, y)
    assert result.mu.dtype == torch.float32
    assert relative_rmse(fourier_basis(), result, X, y) < 0.15


@pytest.mark.parametrize("options", [{"n_support": 0, "optimizer": "adagrad"}, {"coefficient": 0.9},
                                     {"coefficient": "regression"}])  # fmt: skip
def test_fit_with_other_control_variates_still_improves(options):
    X, y = sine_data()
    basis = fourier_basis()
    assert relative_rmse(basis, fit(basis, X, y, **options), X, y) < 0.5


def test_callback_and_tolerance_stop_the_fit():
    X, y = sine_data()
    seen = []

    def stop_at_seven(iteration, info):
        seen.append(info["loss"])
        return iteration == 6

    stopped = fit(fourier_basis(), X, y, callback=stop_at_seven)
    assert stopped.stopped_early and stopped.n_iter == len(seen) == 7
    assert np.isfinite(seen).all() and stopped.history["loss"] == seen
    tolerant = fit(fourier_basis(), X, y, tol=0.5, max_iter=500)
    assert tolerant.stopped_early and tolerant.n_iter < 500


def test_overflow_names_iteration_and_parameter_and_keeps_the_last_good_state():
    X, y = sine_data()
    y = y.copy()
    y[X[:, 0] > 1.9] = np.inf
    with pytest.raises(NonFiniteStepError, match="step of mu at iteration") as caught:
        fit(fourier_basis(), X, y)
    error = caught.value
    assert error.parameter == "mu" and error.iteration == error.state.n_iter
    assert torch.isfinite(error.state.weights).all()
    assert all(torch.isfinite(v).all() for v in error.state.optimizer.state.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optimizer": "newton"}, "optimizer must be one of"),
        ({"covariance": "full"}, "covariance must be"),
        ({"covariance": "chevron", "n_dense_columns": 41}, r"n_dense_columns must be in 1..m=40"),
        ({"n_support": -1}, "n_support must be 0"),
        ({"n_support": 0}, "set n_support"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"decay": -1.0}, "decay must be positive"),
        ({"max_iter": 0}, "max_iter must be positive"),
        ({"basis_batch_size": 0}, "basis_batch_size must be at least 1"),
        ({"coefficient": "best"}, "coefficient must be"),
        ({"scaling": "both"}, "scaling must be"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    X, y = sine_data(30)
    with pytest.raises(ValueError, match=message):
        fit(fourier_basis(), X, y, **options)


def test_predictions_of_fourier_features_have_the_moments_of_q():
    X, y = sine_data()
    basis = fourier_basis()
    result = fit(basis, X, y, covariance="chevron", n_dense_columns=5, max_iter=50)
    Phi, _ = dense(basis, X)
    C = result.q.factor().numpy()
    posterior = LinearWeightsPosterior.from_gaussian(basis.fourier, result.q)
    mean, variance = posterior.mean_and_variance(torch.tensor(X))
    np.testing.assert_allclose(mean.numpy(), Phi @ result.mu.numpy(), atol=1e-12)
    np.testing.assert_allclose(variance.numpy(), ((Phi @ C) ** 2).sum(1), rtol=1e-10)


def test_predictions_of_inducing_points_have_the_moments_of_q():
    X, y = sine_data()
    basis = InducingBasis(KERNEL, torch.tensor(X[:40]))
    result = fit(basis, X, y, covariance="chevron", n_dense_columns=5, max_iter=50)
    Phi, _ = dense(basis, X)
    C = result.q.factor().numpy()
    covariance = WeightCovariance(result.q, NOISE, augment=False)
    posterior = FunctionSpacePosterior(KERNEL, basis.Z, result.mu, covariance)
    mean, variance = posterior.mean_and_variance(torch.tensor(X))
    np.testing.assert_allclose(mean.numpy(), Phi @ result.mu.numpy(), atol=1e-12)
    np.testing.assert_allclose(variance.numpy(), ((Phi @ C) ** 2).sum(1), rtol=1e-10)
