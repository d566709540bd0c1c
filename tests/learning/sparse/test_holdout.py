"""Rows held out: their choice, their losses, and the state that does best on them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from skgp.data import Data
from skgp.learning.sparse import holdout
from skgp.learning.sparse.holdout import BestState, held_out_losses, split
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli, Gaussian
from tests.reference import sparse as dense

NAN = float("nan")
LOG_LOSS = Objective(Gaussian(0.3, bounds=(1e-4, 5.0)))


def numbered(n, weighted=False):
    rows = torch.arange(float(n), dtype=torch.float64)[:, None]
    return Data(rows, rows, rows[:, 0] + 1 if weighted else None)


# ---- the split ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "fraction", "n_out"),
    [(100, 0.1, 10), (7, 0.2, 1), (5, 0.01, 1), (10, 0.99, 9), (2, 0.9, 1), (1, 0.5, 0)],
)
def test_split_holds_out_a_fraction_of_the_rows(n, fraction, n_out, generator):
    kept, held_out = split(numbered(n, weighted=True), fraction, generator)
    assert (len(kept), len(held_out)) == (n - n_out, n_out)
    both = torch.cat([kept.X, held_out.X])[:, 0]
    assert torch.equal(both.sort().values, numbered(n).X[:, 0])
    for part in (kept, held_out):
        assert torch.equal(part.X, part.y) and torch.equal(part.weight, part.X[:, 0] + 1)
        assert torch.equal(part.X, part.X.sort(dim=0).values)


def test_split_holds_out_no_more_than_enough(generator, monkeypatch):
    monkeypatch.setattr(holdout, "_MAX_ROWS", 5)
    kept, held_out = split(numbered(100), 0.5, generator)
    assert (len(kept), len(held_out)) == (95, 5)


def test_split_is_at_random_and_reproducible():
    parts = [split(numbered(200), 0.1, torch.Generator().manual_seed(s))[1].X for s in (0, 0, 1)]
    assert torch.equal(parts[0], parts[1]) and not torch.equal(parts[0], parts[2])
    assert parts[0].max() > 150 and parts[0].min() < 50  # neither the first rows nor the last


# ---- losses -------------------------------------------------------------------------------------


def test_held_out_losses_are_those_of_the_predictions():
    problem = dense.make_problem()
    mean, root = dense.random_posterior(9)
    state = replace(problem.state(), offset=torch.tensor([0.4]).double())
    state = state.with_posterior(mean, root)
    q = dense.unwhitened(problem.kernel, problem.Z, mean[:, 0].numpy(), root[0].numpy())
    f, covariance = dense.predict(problem.kernel, problem.X, problem.Z, *q, 0.4)
    std = np.sqrt(np.diag(covariance) + problem.noise)
    found = held_out_losses(state, LOG_LOSS, problem.data)
    np.testing.assert_allclose(found, -stats.norm(f, std).logpdf(problem.y), rtol=1e-8)
    # Judged by the log-loss, whatever is trained on; but for the square loss.
    for name in ("elbo", "fitc"):
        assert torch.equal(
            held_out_losses(state, replace(LOG_LOSS, name=name), problem.data), found
        )
    square = held_out_losses(state, replace(LOG_LOSS, name="square_loss"), problem.data)
    np.testing.assert_allclose(square, 0.5 * (f - problem.y) ** 2, atol=1e-8)


@pytest.mark.parametrize("name", ["log_loss", "square_loss"])
def test_held_out_losses_average_to_those_of_repeated_rows(name):
    problem = dense.make_problem()
    counts = np.random.default_rng(1).integers(1, 4, len(problem.y))
    state = problem.state().with_posterior(*dense.random_posterior(9))
    weighted, repeated = (
        held_out_losses(state, replace(LOG_LOSS, name=name), p.data)
        for p in (replace(problem, weight=counts.astype(float)), problem.repeated(counts))
    )
    assert float(weighted.mean()) == pytest.approx(float(repeated.mean()), rel=1e-12)


def test_held_out_losses_of_several_functions_add_up():
    problem = dense.make_problem(target="labels")
    objective = Objective(Bernoulli("probit"))
    mean, root = dense.random_posterior(9, 2)
    both = problem.state(torch.empty(0), n_latent=2).with_posterior(mean, root)
    y = torch.cat([problem.data.y, -problem.data.y], dim=1)
    found = held_out_losses(both, objective, Data(problem.data.X, y))
    expected = 0
    for c in range(2):
        one = problem.state(torch.empty(0)).with_posterior(mean[:, c : c + 1], root[c : c + 1])
        expected += held_out_losses(one, objective, Data(problem.data.X, y[:, c : c + 1]))
    torch.testing.assert_close(found, expected)


def test_held_out_losses_of_single_precision_are_in_double():
    problem = dense.make_problem()
    state = problem.state()
    single = replace(
        state,
        **{name: getattr(state, name).float() for name in ("likelihood", "Z", "mean", "root")},
        offset=state.offset.float(),
    )
    data = Data(problem.data.X.float(), problem.data.y.float())
    found = held_out_losses(single, LOG_LOSS, data)
    assert found.dtype == torch.float64
    torch.testing.assert_close(
        found, held_out_losses(state, LOG_LOSS, problem.data), rtol=1e-5, atol=1e-5
    )


# ---- the best state -----------------------------------------------------------------------------


def watch_of(losses, monkeypatch, **options):
    """A watch to which state number i has the loss ``losses[i]``."""
    monkeypatch.setattr(
        holdout, "held_out_losses", lambda i, *_: torch.full((3,), float(losses[i]))
    )
    return BestState(LOG_LOSS, numbered(3), **options)


def test_best_state_keeps_the_best(monkeypatch):
    watch = watch_of([5, 3, 4, 2, 6], monkeypatch)
    assert watch.loss == float("inf") and watch.losses == []
    assert not any(watch.score(i) for i in range(5))
    assert watch.best_state == 3 and watch.loss == 2.0 and watch.losses == [5, 3, 4, 2, 6]
    assert torch.equal(watch.best_rows, torch.full((3,), 2.0))


def test_best_state_before_the_first_score_is_an_error(monkeypatch):
    watch = watch_of([5], monkeypatch)
    for name in ("best_state", "best_rows"):
        with pytest.raises(RuntimeError, match="call score"):
            getattr(watch, name)


def test_best_state_stops_when_it_has_waited_long_enough(monkeypatch):
    watch = watch_of([5, 3, 4, 4, 2, 3, 3, 3], monkeypatch, patience=3)
    assert [watch.score(i) for i in range(8)] == [False] * 7 + [True]


def test_best_state_takes_an_equal_loss_for_no_better(monkeypatch):
    watch = watch_of([2, 2, 2], monkeypatch, patience=2)
    assert [watch.score(i) for i in range(3)] == [False, False, True]
    assert watch.best_state == 0


@pytest.mark.parametrize("losses", [[NAN, 2, 3], [2, NAN, 3], [NAN, NAN, 2]])
def test_best_state_passes_over_nan(losses, monkeypatch):
    watch = watch_of(losses, monkeypatch)
    for i in range(3):
        watch.score(i)
    assert watch.best_state == losses.index(2) and watch.loss == 2.0


def test_best_state_asks_for_a_state_when_it_is_time(monkeypatch):
    watch = watch_of(range(10, 0, -1), monkeypatch, every=3)
    asked = []

    def state():
        asked.append(len(asked))
        return asked[-1]

    assert not any(watch(state) for _ in range(10))
    assert asked == [0, 1, 2] and watch.losses == [10, 9, 8]
