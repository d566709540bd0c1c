"""One rule for choices by held-out data: how often noise is followed, and rows that are fair."""

import numpy as np
import pytest
import torch

from skgp.learning.defaults import LEAST_EFFECT
from skgp.learning.selection import choose, choose_towards, held_out_rows, hold_out, improves

N_RUNS = 400


def share_of_complex(make, **options):
    """How often a candidate other than the simplest is chosen."""
    rng = np.random.RandomState(0)
    return np.mean([choose(make(rng), **options) > 0 for _ in range(N_RUNS)])


# ---- the rule ---------------------------------------------------------------------------------


def test_choose_follows_pure_noise_as_often_as_one_standard_error_says():
    # P(N(0, 1) > 1) = .159; the least loss alone would follow noise half of the time.
    share = share_of_complex(lambda rng: rng.standard_normal((2, 60)), least_effect=0.0)
    assert abs(share - 0.159) < 4 * (0.159 * 0.841 / N_RUNS) ** 0.5


def test_choose_ignores_nearly_equal_fits_of_tiny_standard_error():
    def nearly_equal(rng):
        losses = rng.standard_normal(1000)
        return losses, losses - 1e-4 + 1e-4 * rng.standard_normal(1000)

    assert share_of_complex(nearly_equal) == 0
    assert share_of_complex(nearly_equal, least_effect=0.0) == 1


def test_a_value_on_the_other_side_of_the_simplest_is_no_step_towards_the_best():
    rng = np.random.RandomState(0)
    losses = dict.fromkeys((0.0, 0.1, 0.4, 1.0), np.ones(100))
    losses[0.4] = losses[0.1] - 0.2 + 0.1 * rng.standard_normal(100)  # 20 standard errors better
    losses[0.0] = losses[0.1] + np.eye(100)[0] * 40  # .6 worse, by a standard error of .4
    assert choose_towards(losses, 0.1, n_errors=2.0) == 0.4
    assert choose_towards(losses, 0.1, n_errors=30.0) == 0.1
    assert choose_towards({0.4: losses[0.4], 1.0: losses[1.0]}, 0.1) == 0.4  # nearest to it
    # The same seen from the other end of the line.
    mirrored = {-value: each for value, each in losses.items()}
    for n_errors in (0.0, 2.0, 30.0):
        found = choose_towards(mirrored, -0.1, n_errors=n_errors)
        assert found == -choose_towards(losses, 0.1, n_errors=n_errors)


def test_choose_ignores_noise_among_many_candidates_of_little_difference():
    def correlated(rng):
        return rng.standard_normal(300) + 0.005 * rng.standard_normal((8, 300))

    assert share_of_complex(correlated) < 0.01


def test_choose_takes_gains_that_are_clear():
    def clear(rng):
        losses = rng.standard_normal(400)
        return losses, losses - 0.05 + 0.1 * rng.standard_normal(400)

    assert share_of_complex(clear) == 1


def test_choose_takes_the_simplest_within_one_standard_error_of_the_best():
    d = np.where(np.arange(100) % 2, 1.0, -1.0)  # standard error .1005
    best = np.zeros(100)
    assert choose([0.3 + d, 0.09 + d, best]) == 1
    assert choose([0.3 + d, 0.11 + d, best]) == 2
    assert choose([0.3 + d, 0.11 + d, best], n_errors=2.0) == 1
    assert choose([best + 0.9 * LEAST_EFFECT, best]) == 0
    assert choose([best + 1.1 * LEAST_EFFECT, best]) == 1
    assert improves(best, best + 1.1 * LEAST_EFFECT)
    assert not improves(best + 1.0, best)


def test_observations_of_a_unit_count_as_one():
    """As their weighted means, given once: of 60 in 6 units the error is not that of 60."""
    rng = np.random.default_rng(0)
    unit, weight = np.repeat(np.arange(6), 10), rng.uniform(0.5, 2.0, 60)
    d = np.array([3.0, -1.0, 1.0, -1.0, 1.0, -1.0])[unit] + 0.01 * rng.standard_normal(60)
    assert choose([d, 0 * d], weight=weight) == 1
    assert choose([d, 0 * d], weight=weight, unit=unit) == 0
    total = np.bincount(unit, weight)
    for shift in np.linspace(-0.5, 1.0, 16):
        means = np.bincount(unit, weight * (d + shift)) / total
        expected = choose([means, 0 * means], weight=total)
        assert choose([d + shift, 0 * d], weight=weight, unit=unit) == expected
        order = rng.permutation(60)
        asked = {"weight": weight[order], "unit": 10 - 7 * unit[order]}
        assert choose([(d + shift)[order], 0 * d], **asked) == expected


def test_choose_weighs_observations_and_passes_over_those_of_weight_zero():
    losses = np.array([[1.0, 1.0, 1.0, 0.0], [0.0, 0.5, 0.5, 1000.0]])
    weight = np.array([2.0, 1.0, 1.0, 0.0])
    assert choose(losses) == 0
    assert choose(losses, weight=weight) == 1
    assert choose(losses, weight=1e-9 * weight) == 1
    assert choose(torch.tensor(losses), weight=torch.tensor(weight)) == 1


def test_losses_that_are_not_finite_lose():
    good = np.ones(10)
    bad = good.copy()
    for value in (np.nan, np.inf, -np.inf):
        bad[3] = value
        assert choose([good, bad]) == 0
        assert choose([bad, good + 9]) == 1
    assert choose([bad, bad]) == 0
    # What no candidate predicts says nothing.
    assert choose([np.r_[good, np.nan], np.r_[good - 1, np.nan]]) == 1
    assert choose(np.full((2, 3), np.nan)) == 0


# ---- held-out rows ----------------------------------------------------------------------------


def test_held_out_rows_are_as_many_as_asked_and_stratified():
    rng = np.random.RandomState(0)
    y = rng.standard_normal(1000)
    held_out = held_out_rows(y, 100, rng)
    assert held_out.sum() == 100
    assert abs((y[held_out] > np.quantile(y, 0.9)).sum() - 10) <= 1
    labels = np.r_[np.zeros(980), np.ones(20)]
    held_out = held_out_rows(labels, 100, rng, classes=True)
    assert held_out.sum() == 100 and 1 <= labels[held_out].sum() <= 3
    assert held_out_rows(labels, 10_000, rng).sum() == 999
    assert held_out_rows(labels, 10_000, rng, classes=True).sum() == 998
    assert held_out_rows(labels[:1], 1, rng).sum() == 0


def test_a_class_of_one_observation_is_never_held_out():
    y = np.array([0] * 30 + [1] * 9 + [2])
    assert not held_out_rows(y, 20, np.random.RandomState(0), classes=True)[-1]


@pytest.mark.parametrize(
    "random", [np.random.RandomState, lambda seed: torch.Generator().manual_seed(seed)]
)
def test_equal_rows_stay_together_and_the_seed_decides(random):
    rng = np.random.RandomState(0)
    X = rng.standard_normal((40, 2))[rng.randint(40, size=200)]
    y = rng.standard_normal(200)
    held_out = held_out_rows(y, 40, random(3), X=torch.tensor(X))
    for row in np.unique(X, axis=0):
        assert len(set(held_out[(row == X).all(1)])) == 1
    np.testing.assert_array_equal(held_out, held_out_rows(torch.tensor(y), 40, random(3), X=X))
    assert (held_out != held_out_rows(y, 40, random(4), X=X)).any()
    zeros = np.array([[0.0], [-0.0], [1.0], [2.0]])
    for seed in range(8):
        assert len(set(held_out_rows(np.arange(4), 2, random(seed), X=zeros)[:2])) == 1


def test_hold_out_splits_rows_by_their_seed():
    X = torch.arange(50, dtype=torch.float64)[:, None]
    (X_train, y_train), (X_held, y_held) = hold_out(X, 2 * X[:, 0], 0.11, seed=3)
    assert len(X_held) == 6 and len(X_train) == 44  # rounded up
    assert torch.equal(torch.cat([X_train, X_held]).sort(0).values, X)
    assert torch.equal(y_train, 2 * X_train[:, 0]) and torch.equal(y_held, 2 * X_held[:, 0])
    assert torch.equal(hold_out(X, X[:, 0], 0.11, seed=3)[1][0], X_held)
    assert not torch.equal(hold_out(X, X[:, 0], 0.11, seed=4)[1][0], X_held)
    assert len(hold_out(X, X[:, 0], 0.5, seed=0, max_rows=8)[1][0]) == 8
    with pytest.raises(ValueError, match="validation_fraction=0.9 of 3 rows .* Lower it"):
        hold_out(X[:3], X[:3, 0], 0.9, seed=0)
