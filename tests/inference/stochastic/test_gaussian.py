"""The solver under a Gaussian likelihood: dense optima, exact running sums, inputs, failures."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference import defaults as constants
from skgp.inference.stochastic.basis import FourierBasis, InducingBasis, everything, index_set
from skgp.inference.stochastic.engine import NonFiniteStepError, SGDOptions
from skgp.inference.stochastic.estimators import nystrom_factor, sample_design, support_features
from skgp.inference.stochastic.gaussian import SGDSolver, Side, validation_rule
from skgp.inference.stochastic.state import SGDState
from skgp.kernels import FourierFeatures, gram
from skgp.learning.plan import Options as FitOptions
from skgp.learning.plan import Plan
from tests.covering import slow_case
from tests.inference.stochastic_problems import NOISE as PROBLEM_NOISE
from tests.inference.stochastic_problems import all_rows, all_samples, make_problem, z_score
from tests.models.qsgp_problems import fit_regression
from tests.reference import qsgp as reference
from tests.same import assert_same

NOISE = 0.05
KERNEL = ConstantKernel(1.2) * RBF(0.7)


def sine_data(n=60):
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, size=(n, 1))
    y = np.sin(3 * X[:, 0]) + NOISE**0.5 * rng.normal(size=n)
    return X, y - y.mean()


def fourier_basis(m=40, **options):
    return FourierBasis(FourierFeatures(KERNEL, m, 1, seed=1, block_size=5), **options)


def dense(basis, X):
    whole = everything(basis).indices
    Phi = basis.features(torch.tensor(X), whole).numpy()
    return Phi, np.eye(len(whole)) if basis.diagonal_precision else basis.precision(
        whole, whole
    ).numpy()


class Fit:
    """A solver that has run, with its state, history and q."""

    def __init__(self, basis, X, y, seed=0, *, state=None, callback=None, **options):
        generator = (
            seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        )
        names = ("n_dense", "n_support", "optimizer")
        start = {"n_support": 60, **{k: options.pop(k) for k in names if k in options}}
        defaults = dict(batch_size=40, basis_batch_size=20, max_iter=200)
        chosen = SGDOptions(**{**defaults, **options})
        if state is None:
            state = SGDState.start(X, y, basis, NOISE, generator=generator, **start)
        self.state = state
        self.history = SGDSolver(X, y, basis, state, chosen, generator).run(callback)
        self.q = state.covariance(basis, len(X))
        self.mu = self.q.mean


def relative_rmse(basis, fit, X, y):
    """Distance of the fitted mean from the exact posterior's, relative to the latter's size."""
    Phi, S = dense(basis, X)
    exact = Phi @ reference.posterior(Phi, S, y, NOISE)[0]
    return np.sqrt(np.mean((Phi @ fit.mu.numpy() - exact) ** 2) / np.mean(exact**2))


# Every row and function an iteration: no noise is left, and an optimizer must converge.
EVERYTHING = dict(batch_size=60, basis_batch_size=40, n_support=60)


@pytest.mark.parametrize(
    "optimizer, rate, max_iter, exact, sampled",
    [("nystrom", 0.1, 150, 2e-3, 0.15), slow_case("adagrad", 0.5, 250, 0.08, 0.5)],
)
def test_fit_reaches_the_dense_optimum(optimizer, rate, max_iter, exact, sampled):
    X, y = sine_data()
    basis, options = fourier_basis(), {"optimizer": optimizer, "max_iter": max_iter}
    fit = Fit(basis, X, y, decay=0.3, learning_rate=rate, **options, **EVERYTHING)
    assert relative_rmse(basis, fit, X, y) < exact
    assert relative_rmse(basis, Fit(basis, X, y, **options), X, y) < sampled


def test_diagonal_covariance_is_proposition_1():
    X, y = sine_data()
    basis = fourier_basis()
    # every function met with every row
    fit = Fit(basis, X, y, batch_size=len(y), basis_batch_size=40, max_iter=10)
    Phi, S = dense(basis, X)
    expected = np.sqrt(NOISE / ((Phi**2).sum(0) + NOISE * np.diag(S)))
    np.testing.assert_allclose(fit.q.factor().diagonal().numpy(), expected, rtol=1e-8)


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
        slow_case(dict(basis_batch_size=10, learning_rate=0.3), 0.3),
    ],
)
def test_chevron_approaches_the_dense_optimum_of_its_structure(options, gap):
    X, y = sine_data()
    basis = fourier_basis(m=20)
    Phi, S = dense(basis, X)
    fit = Fit(basis, X, y, n_dense=4, **options)
    value = reference.loss_sigma(Phi, S, fit.q.factor().numpy(), NOISE)
    mean_field = np.diag(1 / np.sqrt(np.diag(Phi.T @ Phi / NOISE + S)))
    best, worst = chevron_optimum(Phi, S, 4), reference.loss_sigma(Phi, S, mean_field, NOISE)
    assert best - 1e-6 < value < best + gap * (worst - best)


@pytest.mark.parametrize("kind", ["fourier", slow_case("inducing")])
def test_chevron_keeps_its_pattern_and_its_running_sums(kind):
    X, y = sine_data()
    basis = fourier_basis() if kind == "fourier" else InducingBasis(KERNEL, torch.tensor(X[:40]))
    fit = Fit(basis, X, y, n_dense=7, max_iter=100)
    C, state = fit.q.columns, fit.state
    assert (C[:7].triu(1) == 0).all() and (C.diagonal() > 0).all()
    assert (C[7:] != 0).any(dim=0).all()
    assert_running_sums(state, basis)
    assert len(state.precision_sums) == (60 if kind == "inducing" else 0)
    # At other hyper-parameters they are those of the new features.
    theta = torch.tensor(KERNEL.theta) + 0.3
    if kind == "inducing":
        basis, theta = InducingBasis(KERNEL.clone_with_theta(theta.numpy()), basis.Z), None
    new = state.continued(basis, 0.5, theta)
    assert_running_sums(new, basis)
    assert not torch.allclose(new.sums, state.sums)
    assert new.noise_variance == 0.5 and new.theta is theta and new.n_iter == 100


def assert_running_sums(state, basis):
    whole, X = everything(basis), state.X_support
    B = support_features(basis, X, state.theta)(whole)
    if state.unit_theta is not None:  # each unit at hyper-parameters of its own
        units = [index_set(basis, torch.tensor([unit])) for unit in range(basis.n_units)]
        pairs = zip(units, state.unit_theta, strict=True)
        B = torch.cat([basis.sampled(X, unit, theta) for unit, theta in pairs], 1)
    np.testing.assert_allclose(state.sums.numpy(), (B @ state.weights).numpy(), atol=1e-10)
    if len(state.precision_sums):
        expected = nystrom_factor(basis, X)(whole) @ state.weights
        np.testing.assert_allclose(state.precision_sums.numpy(), expected.numpy(), atol=1e-10)


def test_loss_estimates_the_negative_elbo():
    X, y = sine_data()
    basis = fourier_basis()
    state = Fit(basis, X, y, max_iter=50, **EVERYTHING).state
    Phi, S = dense(basis, X)
    # The loss of an iteration is that before its step: take one more, with a negligible step.
    options = dict(learning_rate=1e-12, max_iter=1, batch_size=60, basis_batch_size=40)
    again = Fit(basis, X, y, seed=3, state=state, **options)
    C = np.diag(again.q.factor().diagonal().numpy())
    expected = -reference.elbo(Phi, S, y, again.mu.numpy(), C, NOISE)
    np.testing.assert_allclose(again.history["loss"][-1], expected, rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["nystrom", "adagrad", "adam"])
def test_warm_start_continues_a_fit(optimizer):
    X, y = sine_data()
    options = dict(n_dense=3, decay=1.0, optimizer=optimizer)
    whole = Fit(fourier_basis(), X, y, max_iter=40, **options)
    generator = torch.Generator().manual_seed(0)
    half = Fit(fourier_basis(), X, y, generator, max_iter=20, **options)
    rest = Fit(fourier_basis(), X, y, generator, max_iter=20, decay=1.0, state=half.state)
    assert rest.state.n_iter == 40
    assert_same(rest.mu, whole.mu)
    assert_same(rest.q.factor(), whole.q.factor())


def test_callback_and_tolerance_stop_the_fit(monkeypatch):
    monkeypatch.setattr(constants, "PATIENCE", 20)
    X, y = sine_data()
    seen = []

    def stop_at_seven(iteration, info):
        seen.append(info["loss"])
        return iteration == 6

    stopped = Fit(fourier_basis(), X, y, callback=stop_at_seven)
    assert stopped.state.n_iter == len(seen) == 7
    assert np.isfinite(seen).all() and stopped.history["loss"] == seen
    assert Fit(fourier_basis(), X, y, tol=0.5).state.n_iter < 300


def test_overflow_names_iteration_and_parameter_and_keeps_the_last_good_state():
    X, y = sine_data()
    y[X[:, 0] > 1.9] = np.inf
    with pytest.raises(NonFiniteStepError, match="step of mu at iteration") as caught:
        Fit(fourier_basis(), X, y)
    error = caught.value
    assert error.parameter == "mu" and error.iteration == error.state.n_iter
    assert torch.isfinite(error.state.weights).all()
    assert all(torch.isfinite(v).all() for v in error.state.optimizer.state.values())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"n_support": 0, "optimizer": "nystrom"}, "set n_support"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"decay": -1.0}, "decay must be positive"),
        ({"max_iter": 0}, "max_iter must be positive"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    X, y = sine_data(30)
    with pytest.raises(ValueError, match=message):
        Fit(fourier_basis(), X, y, **options)


# Hyper-parameters ---------------------------------------------------------------------------------

DENSE = 2


def start(n_support=0):
    """A problem and a solver whose state has some weights, and the squares of all rows."""
    problem = make_problem("fourier")
    generator = torch.Generator().manual_seed(0)
    state = SGDState.start(
        problem.X, problem.y, problem.basis, PROBLEM_NOISE, n_dense=DENSE, n_support=n_support,
        optimizer="adagrad", generator=generator,
    )  # fmt: skip
    state.weights[:] = torch.cat([problem.mu[:, None], torch.tril(problem.C[:, :DENSE])], dim=1)
    Phi = problem.basis.features(problem.X, everything(problem.basis).indices)
    state.square_sums[:], state.square_rows[:] = Phi.square().sum(0), problem.n
    B = problem.basis.features(state.X_support, everything(problem.basis).indices)
    state.sums[:] = B @ state.weights
    options = SGDOptions(batch_size=3, basis_batch_size=6, learn_hyperparameters=True)
    solver = SGDSolver(problem.X, problem.y, problem.basis, state, options, generator)
    return problem, solver


def exact_gradient(problem, state):
    """Autograd of minus the ELBO (eq. 2), all of it dense; the tail of C is held fixed."""
    basis, n, k = problem.basis, problem.n, state.n_dense
    indices = everything(basis).indices
    theta = torch.tensor(basis.kernel.theta).requires_grad_()
    log_noise = torch.tensor(math.log(PROBLEM_NOISE), dtype=torch.float64).requires_grad_()
    noise = log_noise.exp()
    Phi = basis.features(problem.X, indices, theta)
    C = torch.zeros(len(indices), len(indices), dtype=torch.float64)
    C[:, :k] = state.weights[:, 1:]
    with torch.no_grad():
        c = (noise / (Phi.square().sum(0) + noise)).sqrt()
    C[range(k, len(c)), range(k, len(c))] = c[k:]
    fit = (problem.y - Phi @ state.weights[:, 0]).square().sum() + (Phi @ C).square().sum()
    loss = 0.5 * (fit / noise + n * log_noise)
    return np.append(*(g.numpy() for g in torch.autograd.grad(loss, [theta, log_noise])))


def test_hyper_gradient_over_all_samples_is_that_of_the_exact_objective():
    problem, solver = start()
    theta = solver.hyper.theta
    samples, found = all_samples(problem.basis, 2), []
    for rows, i, j in product(all_rows(problem.n, 3), samples, samples):
        sides = [Side(k, solver.state.weights[k.indices], None, None) for k in (i, j)]
        design = sample_design(problem.basis, problem.X[rows], i, j, n=problem.n, theta=theta)
        slopes = solver.hyper_slopes(design, problem.y[rows], *sides, torch.zeros(3))
        found.append(np.append(*slopes))
    np.testing.assert_allclose(np.mean(found, 0), exact_gradient(problem, solver.state), rtol=1e-9)


def test_hyper_gradient_of_an_iteration_is_unbiased():
    """Samples as the solver draws them, its control variates included."""
    problem, solver = start(n_support=3)
    solver.by_support, found = False, []
    for _ in range(300):
        X, y = solver.draw_rows()
        i, j = solver.draw_side(), solver.draw_side()
        design = sample_design(
            problem.basis, X, i.sample, j.sample, n=problem.n, theta=solver.hyper.theta
        )
        correction = solver.correct(i, j).value
        found.append(np.append(*solver.hyper_slopes(design, y, i, j, correction)))
    assert z_score(found, exact_gradient(problem, solver.state)) < 4


def test_complexity_of_the_support_rows_is_the_log_determinant():
    rng = np.random.default_rng(0)
    X, y = torch.tensor(rng.uniform(-3, 3, size=(90, 1))), torch.zeros(90).double()
    kernel = ConstantKernel(1.5) * RBF(0.8)
    basis = FourierBasis(FourierFeatures(kernel, 20, 1, seed=0))
    generator = torch.Generator()
    state = SGDState.start(X, y, basis, NOISE, n_support=30, generator=generator)
    options = SGDOptions(learn_hyperparameters=True)
    *slopes, resolved = SGDSolver(X, y, basis, state, options, generator).support_complexity()
    assert resolved

    def half_log_det(parameters):
        K = gram(kernel, state.X_support, theta=torch.as_tensor(parameters[:2]))
        return 0.5 * torch.logdet(torch.eye(30) + 3 * K / math.exp(parameters[2]))

    at = np.append(kernel.theta, math.log(NOISE))
    step = 1e-5 * np.eye(3)
    expected = [float(half_log_det(at + e) - half_log_det(at - e)) / 2e-5 for e in step]
    np.testing.assert_allclose(np.append(*slopes), expected, rtol=1e-5)


def test_nothing_moves_where_the_support_rows_do_not_resolve_the_process():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-3, 3, size=(200, 1)), rng.normal(size=200)
    basis = FourierBasis(FourierFeatures(1.0 * RBF(0.01), 50, 1, seed=0))
    state = Fit(basis, X, y, n_support=20, max_iter=30, learn_hyperparameters=True).state
    np.testing.assert_allclose(state.noise_variance, NOISE)
    np.testing.assert_allclose(state.theta.numpy(), basis.kernel.theta)


def test_hyperparameters_climb_the_elbo_once_unfrozen_and_stay_within_bounds():
    X, y = sine_data()
    kernel = ConstantKernel(1.2, (1.1, 1.3)) * RBF(0.7)
    basis = FourierBasis(FourierFeatures(kernel, 40, 1, seed=1, block_size=5))
    options = dict(EVERYTHING, learn_hyperparameters=True, hyper_learning_rate=0.03, decay=1.0)
    frozen = Fit(basis, X, y, max_iter=30, freeze_iterations=30, **options)
    assert frozen.state.noise_variance == NOISE and frozen.state.theta is None
    free = Fit(basis, X, y, max_iter=60, freeze_iterations=30, **options)
    theta = free.state.theta.numpy()
    assert abs(theta[1] - KERNEL.theta[1]) > 0.02
    assert np.all(theta >= kernel.bounds[:, 0]) and np.all(theta <= kernel.bounds[:, 1])


@pytest.mark.slow
def test_hyperparameters_end_near_the_truth():
    """From length scale 2 and noise .5; the exact evidence has its optimum at .64 and .105."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(1000, 1))
    y = np.sin(3 * X[:, 0]) + 0.1**0.5 * rng.standard_normal(len(X))
    fit = fit_regression(
        1.0 * RBF(2.0),
        Data(torch.tensor(X), torch.tensor(y)),
        0.5,
        Plan(basis="fourier", n_basis=200, solver="sgd"),
        FitOptions(max_iter=500, batch_size=250, n_support=200, learn_hyperparameters=True),
        generator=torch.Generator().manual_seed(0),
    )
    assert 0.085 < fit.noise < 0.125
    assert 0.45 < fit.kernel.k2.length_scale < 1.2
    x = torch.linspace(-2.8, 2.8, 50, dtype=torch.float64)[:, None]
    error = fit.posterior.mean(x) - (3 * x[:, 0]).sin()
    assert float(error.square().mean().sqrt()) < 0.1


def test_running_sums_follow_hyperparameters_unit_by_unit():
    X, y = sine_data()
    basis = fourier_basis(m=80)
    options = dict(learn_hyperparameters=True, hyper_learning_rate=0.02, n_dense=3, max_iter=80)
    state = Fit(basis, X, y, basis_batch_size=20, **options).state
    assert state.unit_theta.unique(dim=0).shape[0] > 2
    assert_running_sums(state, basis)
    again = Fit(basis, X, y, state=state, **{**options, "max_iter": 5}).state
    assert_running_sums(again, basis)
    options = dict(learn_hyperparameters=False, max_iter=5)
    assert_running_sums(Fit(basis, X, y, state=again, **options).state, basis)


def test_functions_join_those_drawn_from_until_half_of_the_iterations():
    X, y = sine_data()
    basis = fourier_basis(m=400)  # 40 units, of which 4 are drawn an iteration
    state = Fit(basis, X, y, basis_batch_size=20, max_iter=100).state
    assert state.n_drawn_units == 5  # 2 samples x 2 units x 50 iterations / 40 visits
    drawn = index_set(basis, torch.arange(5)).indices
    weights = state.weights.clone()
    assert (weights[drawn] != 0).any(1).all()
    weights[drawn] = 0
    assert not weights.any()
    Fit(basis, X, y, basis_batch_size=20, max_iter=10, state=state)
    assert state.n_drawn_units == 5
    assert Fit(fourier_basis(), X, y).state.n_drawn_units == 4


# Early stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_validation_scores_follow_the_weights_and_stop_after_five_without_a_rise(name, generator):
    problem = make_problem(name)
    state = SGDState.start(
        problem.X, problem.y, problem.basis, PROBLEM_NOISE, n_support=4, generator=generator
    )
    state.weights[:, 0] = problem.mu
    rule = validation_rule(problem.basis, state, problem.X, problem.y, None)
    stops = [
        rule(iteration, 0.0) for iteration in range(6 * constants.SCORE_EVERY)
    ]  # weights stand still
    assert stops.index(True) == 6 * constants.SCORE_EVERY - 1
    assert [iteration for iteration, _ in rule.scores] == [
        constants.SCORE_EVERY * k - 1 for k in range(1, 7)
    ]
    Phi = problem.dense()[0]
    for factor in (1.0, 2.0):
        state.weights[:, 0] = factor * problem.mu
        expected = -np.mean((problem.y.numpy() - factor * Phi @ problem.mu.numpy()) ** 2)
        assert rule.score() == pytest.approx(expected, rel=1e-12)
