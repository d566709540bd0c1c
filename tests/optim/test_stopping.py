"""Stopping rules: when they fire, and that units do not matter."""

import math

import numpy as np
import pytest

from skgp.optim import LossPlateau, Plateau, ValidationPlateau


def first_stop(rule, losses):
    """Return the iteration at which the rule fires, or None."""
    return next((i for i, loss in enumerate(losses) if rule(i, loss)), None)


def test_plateau_counts_updates_without_a_fall():
    plateau = Plateau(tol=0.1, patience=3)
    # The fall from 10 to 0 is 10: below -1 counts as a fall, -0.9 does not.
    assert [plateau.update(v) for v in [10, 0, -0.9, 0, -1.1, -1.1, -1.1]] == [False] * 7
    assert plateau.update(-1.1)
    assert plateau.best == -1.1


def test_plateau_stops_on_a_rise():
    plateau = Plateau(tol=0, patience=2)
    assert [plateau.update(v) for v in [1.0, 2.0, 3.0]] == [False, False, True]


@pytest.mark.parametrize(("scale", "shift"), [(1e6, 0), (1e-6, 0), (1, -1e3), (3, 50)])
def test_loss_plateau_does_not_depend_on_units(scale, shift):
    rng = np.random.default_rng(0)
    losses = np.exp(-np.arange(2000) / 100) + 0.05 * rng.standard_normal(2000)
    reference = first_stop(LossPlateau(), losses)
    assert 100 < reference < 1500
    assert first_stop(LossPlateau(), shift + scale * losses) == reference


def test_loss_plateau_smooths_the_noise():
    rng = np.random.default_rng(0)
    losses = 10 - 0.01 * np.arange(500) + rng.standard_normal(500)
    assert first_stop(LossPlateau(tol=0, patience=60, smoothing=0.97), losses) is None
    assert first_stop(LossPlateau(tol=0, patience=60, smoothing=0.0), losses) is not None


def test_loss_plateau_average_is_corrected_for_its_start_at_zero():
    rule = LossPlateau(smoothing=0.75)
    assert first_stop(rule, [3.0] * 4) is None
    assert rule.plateau.first == pytest.approx(3.0)


def test_loss_plateau_passes_over_a_lucky_start():
    losses = [8.0, *np.linspace(10, 5, 300)]
    rule = LossPlateau(tol=0, patience=20, smoothing=0.9)
    assert first_stop(rule, losses) is None


def test_validation_plateau_scores_every_so_often_and_stops():
    scores = iter([0.1, 0.5, 0.4, 0.5, 0.45])
    rule = ValidationPlateau(lambda: next(scores), every=3, patience=2, tol=0.0)
    assert first_stop(rule, [math.nan] * 100) == 11
    assert rule.scores == [(2, 0.1), (5, 0.5), (8, 0.4), (11, 0.5)]
