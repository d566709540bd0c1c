"""Empirical Bayes of the stochastic solver: its gradient against that of the exact objective."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.stochastic.basis import FourierBasis
from skgp.inference.stochastic.estimators import quadratic_loss
from skgp.inference.stochastic.hyper import HyperParameters
from skgp.inference.stochastic.sampling import everything
from skgp.inference.stochastic.sgd import fit_sgd
from skgp.inference.stochastic.solver import Options, Solver
from skgp.inference.stochastic.state import initial_state
from skgp.kernels import FourierFeatures, gram
from skgp.models.qsgp.plan import Plan
from skgp.models.qsgp.regression import fit_regression
from skgp.models.qsgp.results import Options as FitOptions
from tests.inference.stochastic_problems import (
    NOISE,
    all_rows,
    all_samples,
    make_problem,
    z_score,
)

DENSE = 2
each_amplitude = pytest.mark.parametrize("amplitude", ["fourier", "precision"])


def start(name, n_support=0):
    """A problem and a state with some weights, whose squares are those of all rows."""
    problem = make_problem(name)
    generator = torch.Generator().manual_seed(0)
    state = initial_state(
        problem.X, problem.y, problem.basis, NOISE, None, DENSE, n_support, "adagrad",
        generator=generator,
    )  # fmt: skip
    C = torch.tril(problem.C[:, :DENSE])
    state.weights[:] = torch.cat([problem.mu[:, None], C], dim=1)
    Phi = problem.basis.features(problem.X, everything(problem.basis).indices)
    state.square_sums[:], state.square_rows[:] = Phi.square().sum(0), problem.n
    return problem, state, generator


def exact_gradient(problem, state):
    """Autograd of minus the ELBO (eq. 2), all of it dense; the tail of C is held fixed."""
    basis, n, k = problem.basis, problem.n, state.n_dense
    indices = everything(basis).indices
    theta = torch.tensor(basis.kernel.theta).requires_grad_()
    log_noise = torch.tensor(math.log(NOISE), dtype=torch.float64).requires_grad_()
    noise = log_noise.exp()
    Phi, s = basis.features(problem.X, indices, theta), basis.precision_diag(indices, theta)
    C = torch.zeros(len(indices), len(indices), dtype=torch.float64)
    C[:, :k] = state.weights[:, 1:]
    with torch.no_grad():
        c = (noise / (Phi.square().sum(0) + noise * s)).sqrt()
    C[range(k, len(s)), range(k, len(s))] = c[k:]
    mu = state.weights[:, 0]
    fit = (problem.y - Phi @ mu).square().sum() + (Phi @ C).square().sum()
    prior = (s * mu.square()).sum() + (s[:, None] * C.square()).sum() - s.log().sum()
    loss = 0.5 * (fit / noise + prior + n * log_noise)
    return [g.numpy() for g in torch.autograd.grad(loss, [theta, log_noise])]


@each_amplitude
def test_gradient_over_all_samples_is_that_of_the_exact_objective(amplitude):
    problem, state, _ = start(amplitude)
    hyper = HyperParameters(state, problem.basis, problem.n)
    sides, found = all_samples(problem.basis, 2), []
    columns = [torch.tensor([0, 1 + r]) for (r,) in combinations(range(DENSE), 1)]
    for rows, i, j, r in product(all_rows(problem.n, 3), sides, sides, columns):
        found.append(
            hyper.gradient(
                problem.X[rows],
                problem.y[rows],
                (i, state.weights[i.indices][:, r]),
                (j, state.weights[j.indices][:, r]),
                DENSE / 1,
                torch.zeros(2, dtype=torch.float64),
            )
        )
    for one, expected in zip(zip(*found, strict=True), exact_gradient(problem, state), strict=True):
        np.testing.assert_allclose(np.mean([g.numpy() for g in one], axis=0), expected, rtol=1e-9)


@each_amplitude
def test_correction_enters_in_inverse_proportion_to_the_noise(amplitude):
    problem, state, _ = start(amplitude)
    hyper = HyperParameters(state, problem.basis, problem.n)
    side = everything(problem.basis), state.weights
    correction = torch.tensor([0.7, -0.2, 0.4], dtype=torch.float64)
    with_it, without = (
        hyper.gradient(problem.X, problem.y, side, side, 3.0, c)
        for c in (correction, 0 * correction)
    )
    torch.testing.assert_close(with_it[0], without[0], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(float(with_it[1] - without[1]), -0.5 * (0.7 + 3 * 0.2), rtol=1e-8)


@each_amplitude
def test_gradient_of_an_iteration_is_unbiased(amplitude):
    """Samples as the solver draws them, its control variates and sampled columns included."""
    problem, state, generator = start(amplitude, n_support=3)
    options = Options(
        batch_size=3,
        basis_batch_size=6,
        column_batch_size=1,
        learn_hyperparameters=True,
        complexity="bound",
        freeze_iterations=0,
        symmetric=True,
        rate=lambda iteration: 0.1,
        hyper_rate=lambda iteration: 0.1,
    )
    solver = Solver(problem.X, problem.y, problem.basis, options, state, generator)
    Phi = problem.basis.features(state.X_support, everything(problem.basis).indices)
    state.sums[:] = Phi @ state.weights
    solver.set_control_variates("projection", "draws", 1.0, None, 0)
    found = []
    for _ in range(300):
        draw = solver.draw()
        plain = quadratic_loss(draw.design, draw.i.V, draw.j.V, NOISE, y=draw.y)
        correction = solver.correct(draw, plain).value
        sides = [(side.sample, side.V) for side in (draw.i, draw.j)]
        gradient = solver.hyper.gradient(draw.X, draw.y, *sides, draw.column_weight, correction)
        found.append(torch.cat([gradient[0], gradient[1][None]]).numpy())
    expected = exact_gradient(problem, state)
    assert z_score(found, np.append(expected[0], expected[1])) < 4


def test_complexity_of_the_support_rows_is_the_log_determinant():
    rng = np.random.default_rng(0)
    X = torch.tensor(rng.uniform(-3, 3, size=(40, 1)))
    kernel = ConstantKernel(1.5) * RBF(0.8)
    basis = FourierBasis(FourierFeatures(kernel, 20, 1, seed=0))
    y = torch.zeros(40, dtype=torch.float64)
    state = initial_state(
        X[:30], y, basis, NOISE, None, 0, 30, "adagrad", generator=torch.Generator()
    )
    resolved, slopes = HyperParameters(state, basis, 90, "support")._support_complexity()

    def half_log_det(parameters):
        K = gram(kernel, state.X_support, theta=torch.as_tensor(parameters[:2]))
        return 0.5 * torch.logdet(torch.eye(30) + 3 * K / math.exp(parameters[2]))

    at = np.append(kernel.theta, math.log(NOISE))
    step = 1e-5 * np.eye(3)
    expected = [float(half_log_det(at + e) - half_log_det(at - e)) / 2e-5 for e in step]
    assert resolved
    np.testing.assert_allclose([*slopes[0].tolist(), float(slopes[1])], expected, rtol=1e-5)


def test_nothing_moves_where_the_support_rows_do_not_resolve_the_process():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-3, 3, size=(200, 1)), rng.normal(size=200)
    basis = FourierBasis(FourierFeatures(1.0 * RBF(0.01), 50, 1, seed=0))
    result = fit_sgd(
        torch.tensor(X), torch.tensor(y), basis, 0.01, n_support=20, max_iter=30,
        learn_hyperparameters=True, complexity="support", generator=torch.Generator(),
    )  # fmt: skip
    np.testing.assert_allclose(result.noise_variance, 0.01)
    np.testing.assert_allclose(result.theta.numpy(), basis.kernel.theta)


def test_an_unknown_complexity_is_refused():
    X = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    basis = FourierBasis(FourierFeatures(RBF(0.5), 10, 1, seed=0))
    for options in (dict(complexity="none"), dict(complexity="support", n_support=0)):
        with pytest.raises(ValueError, match="complexity must be"):
            fit_sgd(X, X[:, 0], basis, 0.1, generator=torch.Generator(), **options)


def test_hyperparameters_end_near_the_truth():
    """From length scale 2 and noise .5; the exact evidence has its optimum at .64 and .105."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, size=(1000, 1))
    y = np.sin(3 * X[:, 0]) + 0.1**0.5 * rng.standard_normal(1000)
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
