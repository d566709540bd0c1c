"""Means between those of the log-loss and of least squares."""

from dataclasses import replace

import pytest
import torch

from skgp.inference.sparse.collapsed import statistics
from skgp.inference.sparse.square_loss import evidence_ratio, square_posterior
from skgp.learning.sparse import blending as module
from skgp.learning.sparse.blending import Blend, blended, choose_blend
from skgp.learning.sparse.holdout import held_out_losses
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Gaussian
from tests.reference import sparse as dense
from tests.same import assert_same

FAMILY = Gaussian(0.3, bounds=(1e-4, 5.0))
OBJECTIVE = Objective(FAMILY)


def problem_and_state(*, weighted=False, shift=0.0):
    """A problem, and a state of the mean of least squares but for a shift in all directions."""
    problem = dense.make_problem(n=150, weighted=weighted)
    state = problem.state(FAMILY.initial(problem.tensors[0]))
    sums = statistics(state.kernel, problem.data, state.Z)
    mean, root = square_posterior(sums, beta=evidence_ratio(sums))
    return problem, state.with_posterior(mean + shift, root)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_blended_lies_between_the_mean_and_that_of_least_squares(weighted):
    problem, state = problem_and_state(weighted=weighted, shift=1.0)
    sums = statistics(state.kernel, problem.data, state.Z)
    least_squares, _ = square_posterior(sums, beta=0.05)
    for share in (0.0, 0.3, 1.0):
        found = blended(state, problem.data, Blend(share, 0.05))
        expected = (1 - share) * state.mean + share * least_squares
        torch.testing.assert_close(found.mean, expected, rtol=1e-8, atol=1e-8)
        assert_same(found.root, state.root)


def test_choose_blend_takes_the_least_squares_where_the_mean_is_bad():
    problem, state = problem_and_state(shift=2.0)
    fresh = dense.make_problem(n=150, seed=1)
    assert choose_blend(state, problem.data, fresh.data, OBJECTIVE).share == 1.0


def test_choose_blend_keeps_a_mean_that_is_better():
    """That of the rows held out themselves, against least squares of other, shifted rows."""
    problem, state = problem_and_state()
    shifted = replace(problem, y=problem.y + 5.0)
    assert choose_blend(state, shifted.data, problem.data, OBJECTIVE).share == 0.0


def test_choose_blend_lowers_both_losses_of_the_rows_held_out():
    problem, state = problem_and_state(shift=0.15)
    fresh = dense.make_problem(n=150, seed=1)
    blend = choose_blend(state, problem.data, fresh.data, OBJECTIVE)

    def both(share):
        moved = blended(state, problem.data, replace(blend, share=share))
        loss, square = (
            held_out_losses(moved, replace(OBJECTIVE, name=name), fresh.data).mean()
            for name in ("log_loss", "square_loss")
        )
        return float(loss + 0.5 * square.log())

    assert 0 < blend.share and both(blend.share) < both(0.0) - 2e-3
    assert both(blend.share) < min(both(share) for share in module._SHARES) + 0.05


def test_choose_blend_of_constant_targets_is_finite():
    problem, state = problem_and_state()
    zero = replace(problem, y=0 * problem.y)
    state = state.with_posterior(torch.zeros_like(state.mean), state.root)
    blend = choose_blend(state, zero.data, zero.data, OBJECTIVE)
    assert blended(state, zero.data, blend).mean.isfinite().all()
