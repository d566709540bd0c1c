"""Rows held out of the stochastic solver, and states that go on under other hyper-parameters."""

import pytest
import torch

from skgp.inference.stochastic.control_variates import nystrom_factor
from skgp.inference.stochastic.sampling import everything
from skgp.inference.stochastic.sgd import fit_sgd
from skgp.inference.stochastic.state import continued_state
from skgp.learning.stochastic_validation import (
    EVERY,
    HeldOutScore,
    hold_out,
    validation_rule,
)
from tests.inference.stochastic_problems import NOISE, make_problem


def fitted_state(problem, generator, **options):
    defaults = dict(batch_size=3, basis_batch_size=5, n_support=4, max_iter=20, optimizer="adagrad")
    return fit_sgd(
        problem.X,
        problem.y,
        problem.basis,
        NOISE,
        generator=generator,
        **{**defaults, **options},
    ).state


def test_hold_out_splits_rows_by_their_seed():
    X = torch.arange(50, dtype=torch.float64)[:, None]
    (X_train, y_train), (X_held, y_held) = hold_out(X, 2 * X[:, 0], 0.11, seed=3)
    assert len(X_held) == 6 and len(X_train) == 44  # rounded up
    assert torch.equal(torch.cat([X_train, X_held]).sort(0).values, X)
    assert torch.equal(y_train, 2 * X_train[:, 0]) and torch.equal(y_held, 2 * X_held[:, 0])
    assert torch.equal(hold_out(X, X[:, 0], 0.11, seed=3)[1][0], X_held)
    assert not torch.equal(hold_out(X, X[:, 0], 0.11, seed=4)[1][0], X_held)


def test_hold_out_takes_no_more_than_a_score_can_afford():
    X = torch.zeros(20_000, 1)
    (X_train, _), (X_held, _) = hold_out(X, X[:, 0], 0.5, seed=0)
    assert len(X_held) == 1_000 and len(X_train) == 19_000


def test_hold_out_leaves_rows_to_train_on():
    X = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="validation_fraction=0.9 of 3 rows .* Lower it"):
        hold_out(X, X[:, 0], 0.9, seed=0)


@pytest.mark.parametrize("name", ["fourier", "inducing"])
def test_held_out_score_follows_the_running_weights(name, generator):
    problem = make_problem(name)
    state = fitted_state(problem, generator)
    X = torch.randn(6, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(6, dtype=torch.float64, generator=generator)
    score = HeldOutScore(problem.basis, state, X, y)
    Phi = problem.basis.features(X, everything(problem.basis).indices)
    for _ in range(2):
        expected = -(y - Phi @ state.weights[:, 0]).square().mean()
        assert score() == pytest.approx(float(expected), rel=1e-12)
        state.weights[:, 0] *= 2


def test_validation_rule_stops_after_five_scores_without_a_rise(generator):
    problem = make_problem("fourier")
    state = fitted_state(problem, generator)
    rule = validation_rule(problem.basis, state, (problem.X, problem.y), None)
    stops = [rule(iteration, 0.0) for iteration in range(6 * EVERY)]  # the weights stand still
    assert stops.index(True) == 6 * EVERY - 1
    assert [iteration for iteration, _ in rule.scores] == [EVERY * k - 1 for k in range(1, 7)]


@pytest.mark.parametrize("name", ["fourier", "inducing"])
@pytest.mark.parametrize("n_dense", [0, 2])
def test_continued_state_sums_over_the_new_features(name, n_dense, generator):
    problem = make_problem(name)
    structure = dict(covariance="chevron", n_dense_columns=n_dense) if n_dense else {}
    state = fitted_state(problem, generator, **structure)
    other = make_problem(name).basis
    theta = torch.as_tensor(other.kernel.theta) + 0.3
    if name == "fourier":
        moved = other.fourier.kernel.clone_with_theta(theta.numpy())
        other = type(other)(type(other.fourier)(moved, 10, 2, seed=3, block_size=2))
    else:
        other = type(other)(other.kernel.clone_with_theta(theta.numpy()), other.Z, block_size=3)
    new = continued_state(state, other, 0.5)
    whole = everything(other).indices
    expected = other.features(state.X_support, whole) @ state.weights
    torch.testing.assert_close(new.sums, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(new.sums, state.sums)
    assert new.noise_variance == 0.5 and new.theta is None and new.n_iter == 20
    if name == "inducing":
        expected = nystrom_factor(other, state.X_support)(whole) @ state.weights
        torch.testing.assert_close(new.precision_sums, expected, rtol=1e-12, atol=1e-12)
