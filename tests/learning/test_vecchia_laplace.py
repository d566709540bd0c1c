"""Laplace's evidence of labels under a Vecchia prior as an objective, and its search."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern

from skgp.data import Data
from skgp.inference.vecchia.hessian import hessian
from skgp.learning import vecchia_labels
from skgp.learning.search import HyperparameterFit
from skgp.learning.vecchia import VecchiaSettings, neighbors_of
from skgp.learning.vecchia_labels import fit_labels
from skgp.learning.vecchia_laplace import LatentEvidence
from skgp.likelihoods import Bernoulli

KERNEL = 4.0 * Matern([0.4, 0.7], nu=1.5)
OFFSET = torch.tensor([0.2], dtype=torch.float64)


def labelled(n=50, seed=0, c=1):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 2))
    f = np.stack([np.sin(6 * X[:, 0] + j) for j in range(c)], 1)
    y = np.where(f + 0.5 * rng.standard_normal((n, c)) > 0, 1.0, -1.0)
    return Data(torch.tensor(X), torch.tensor(y), torch.tensor(1.0 + np.arange(n) % 3))


def evidence(data, H=4, m=5, likelihood=None):
    Z = data.X[:m]
    index = neighbors_of(KERNEL, data.X, H, Z)
    offset = OFFSET.expand(data.y.shape[1])
    generator = torch.Generator().manual_seed(0)
    return LatentEvidence(KERNEL, data, index, Z, likelihood or Bernoulli(), offset, generator)


def test_draws_with_what_a_mode_has_are_those_made_anew(monkeypatch):
    """And the same at the same seed, by which trials are compared."""
    monkeypatch.setattr("skgp.inference.defaults.LATENT_CUBES", 0.0)
    problem = evidence(labelled())
    mode = problem.mode(problem.conditionals(KERNEL.theta))
    anew, at_hand = (problem.posterior(mode, KERNEL, 8, seed=3) for _ in range(2))
    at_hand.draw(mode.root, hessian(mode.root, mode.curvature, dense=False))
    for a, b in zip(anew.spread, at_hand.__dict__["spread"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)
    few = problem.posterior(mode, KERNEL, 8, seed=3, most_draws=30)
    assert (anew.n_spread, few.n_spread) == (50, 30)
    assert few.spread[0].shape == (len(problem.data), 30)


def test_some_observations_begin_with_their_f_and_the_first_inducing_points(monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.VECCHIA_INDUCING", 3)
    problem, rows = evidence(labelled()), torch.arange(0, 50, 2)
    mode = problem.mode(problem.conditionals(KERNEL.theta))
    some = problem.some(KERNEL, rows)
    assert torch.equal(some.Z, problem.Z[:3])
    assert torch.equal(some.start, mode.latent[rows])


def test_columns_add_up():
    data = labelled(c=2)
    whole = evidence(data)(KERNEL.theta)
    columns = [Data(data.X, data.y[:, [j]], data.weight) for j in range(2)]
    each = [evidence(some)(KERNEL.theta) for some in columns]
    assert whole[0] == pytest.approx(each[0][0] + each[1][0], abs=1e-9)
    np.testing.assert_allclose(whole[1], each[0][1] + each[1][1], atol=1e-9)


# ---- the search by evidence, labels as numbers and held-out labels -------------------------------


def searched(monkeypatch, dense, data, *, callback=None, exact_rows=0, offset=OFFSET, **settings):
    monkeypatch.setattr(vecchia_labels.SearchSettings, "exact_rows", exact_rows)
    monkeypatch.setattr(
        vecchia_labels, "fit_classification_hyperparameters", lambda *_, **__: dense
    )
    settings = {"n_neighbors": 6, "n_inducing": 5, "n_stages": 1, "max_iter": 0, **settings}
    return fit_labels(
        [KERNEL],
        data,
        VecchiaSettings(**settings),
        Bernoulli("logit"),
        offset,
        generator=torch.Generator().manual_seed(0),
        callback=callback,
    )


def test_evidence_moves_amplitude_and_the_common_length_scale(monkeypatch):
    data, told = labelled(200), []
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    start = KERNEL.clone_with_theta(KERNEL.theta - 1.0)
    dense = HyperparameterFit(start, history=[-1.0])
    learned = searched(
        monkeypatch, dense, data, max_iter=6, callback=lambda _, info: told.append(info["loss"])
    )
    found = learned.found
    assert learned.n_inducing == 5
    np.testing.assert_allclose(found.history[1:], np.negative(told))
    np.testing.assert_allclose(np.ptp(found.kernel.theta[1:]), np.ptp(start.theta[1:]))
    at = evidence(data, H=6)
    assert at(found.kernel.theta)[0] < at(start.theta)[0] - 0.01


@pytest.mark.parametrize(
    ("n_neighbors", "exact_rows", "length"),
    [(6, 0, [0.5, 0.5]), (0, 0, [0.5, 0.5]), (6, 2500, [0.5, 0.5]), (6, 0, 0.5)],
)
def test_all_labels_as_numbers_are_asked_where_there_are_neighbours(
    monkeypatch, n_neighbors, exact_rows, length
):
    """And more observations than the dense evidence takes, and length scales to tell apart."""
    subset = HyperparameterFit(4.0 * Matern(length), history=[-1.0])
    told = []

    def by_all_labels(found, kernels, data, *, information, **options):
        told.append((found, len(data), information))
        return found

    monkeypatch.setattr(vecchia_labels, "search_label_kernel", by_all_labels)
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    searched(monkeypatch, subset, labelled(200), n_neighbors=n_neighbors, exact_rows=exact_rows)
    assert told == (
        [(subset, 200, 0.25)] if n_neighbors and not exact_rows and length != 0.5 else []
    )


@pytest.mark.parametrize(("better", "scale"), [("other", 0.1), ("subset", 0.6)])
def test_held_out_labels_choose_between_two_kernels(monkeypatch, better, scale):
    """Labels of a chessboard, or labels that change slowly."""
    data = labelled(800)
    if better == "other":
        cell = (5 * data.X).floor().sum(1, keepdim=True)
        data.y[:] = torch.where(cell % 2 == 0, 1.0, -1.0)
    kernels = {"subset": 9.0 * Matern([0.6, 0.6]), "other": 100.0 * Matern([0.1, 0.1])}
    fits = {name: HyperparameterFit(kernel) for name, kernel in kernels.items()}
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda *_, **__: fits["other"])
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    found = searched(monkeypatch, fits["subset"], data).found
    np.testing.assert_allclose(found.kernel.k2.length_scale, scale, rtol=0.5)


def test_f_at_held_out_and_other_labels_is_near_the_mode_of_all(monkeypatch):
    dense, data = HyperparameterFit(4.0 * Matern([0.5, 0.5])), labelled(600)
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    learned = searched(monkeypatch, dense, data)
    problem = evidence(data, H=6)
    mode = problem.mode(problem.conditionals(learned.found.kernel.theta)).latent
    assert np.mean((learned.latent - mode).numpy() ** 2) < 0.05 * mode.var()


def test_held_out_labels_moderate_probabilities_where_fewer_are_left_out_in_turn(monkeypatch):
    """As of several classes; those of coins, under a prior of large amplitude, wholly."""
    data, generator = labelled(600), torch.Generator().manual_seed(0)
    heads = torch.rand(len(data), 1, generator=generator) < 0.5
    coins = replace(data, y=torch.cat([heads, ~heads], 1).double() * 2 - 1)
    dense = HyperparameterFit(400.0 * Matern([0.5, 0.5]))
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    monkeypatch.setattr("skgp.learning.defaults.VECCHIA_LEFT_OUT", 150)  # 120 are held out
    found = searched(monkeypatch, dense, coins, offset=torch.zeros(2).double()).calibration
    assert found[0] == 1.0
    assert searched(monkeypatch, dense, data).calibration is None


def test_held_out_labels_raise_an_amplitude_that_is_too_small(monkeypatch):
    dense = HyperparameterFit(0.05 * Matern([0.5, 0.5]))
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    data, told = labelled(600), []
    found = searched(
        monkeypatch,
        dense,
        data,
        n_inducing=None,
        callback=lambda _, info: told.append(info["loss"]),
    ).found
    assert found.kernel.k1.constant_value > 0.2
    np.testing.assert_allclose(found.history, np.negative(told))


@pytest.mark.parametrize("length", [0.17, 0.4])
def test_of_scales_the_least_held_out_loss_decides(monkeypatch, length):
    """Longer or shorter ones; from .4 by less than a standard error."""
    dense = HyperparameterFit(4.0 * Matern([length, length]))
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    found = searched(monkeypatch, dense, labelled(600)).found
    assert 0.24 < found.kernel.k2.length_scale[0] < 0.28


def test_scales_are_compared_at_the_best_moderation_of_each(monkeypatch):
    """And not at the one chosen, which keeps to the simplest within errors."""
    losses, told = {0.0: torch.full((40,), 0.1), 1.0: torch.full((40,), 0.5)}, []
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    monkeypatch.setattr(vecchia_labels, "choose_moderation", lambda *_: (1.0, losses))
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    dense = HyperparameterFit(4.0 * Matern([0.5, 0.5]))
    searched(monkeypatch, dense, labelled(200), callback=lambda _, info: told.append(info["loss"]))
    assert told == [pytest.approx(0.1)]


@pytest.mark.parametrize(
    ("n", "c", "given", "expected"),
    [
        (300, 1, None, 300),  # all
        (10_000, 1, None, 1000),  # n c m^2 of 1e10
        (5_000, 10, None, 447),
        (40_000, 10, None, 400),  # no fewer than are tried
        (1_000_000, 1, None, 40),  # what their features may take
        (10_000, 1, 7, 7),
    ],
)
def test_inducing_points_by_default_are_as_many_as_are_quick(n, c, given, expected):
    settings = VecchiaSettings(n_inducing=given)
    assert vecchia_labels.inducing_by_default(settings, n, c) == expected


def test_few_inducing_points_are_tried_and_more_taken(monkeypatch):
    """Of an RBF kernel, which neighbours alone approximate badly."""
    dense = HyperparameterFit(9.0 * RBF([0.3, 0.3]))
    monkeypatch.setattr(vecchia_labels, "search_label_kernel", lambda found, *_, **__: found)
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_MOVES", ())
    tried = []
    chosen = vecchia_labels.choose_inducing

    def choose(kernel, X, n_inducing, generator):
        tried.append(n_inducing)
        return chosen(kernel, X, n_inducing, generator)

    monkeypatch.setattr(vecchia_labels, "choose_inducing", choose)
    options = {"n_neighbors": 1, "n_inducing": None, "most_inducing": 30}
    n_inducing = searched(monkeypatch, dense, labelled(300), **options).n_inducing
    assert tried == [0, 30] and n_inducing == 300
