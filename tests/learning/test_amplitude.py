"""Amplitude and moderation by held-out data, against fits without those rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.newton import fit_newton
from skgp.inference.weights.design import StreamedDesign
from skgp.kernels.spectral import FourierFeatures
from skgp.learning import amplitude as module
from skgp.learning.amplitude import (
    AmplitudeProblem,
    by_held_out_rows,
    by_leaving_one_out,
    leave_one_out_moments,
    some_columns,
)
from skgp.learning.defaults import FEW_ROWS_MODERATION, LABEL_SHARE, MODERATIONS
from skgp.learning.selection import choose
from skgp.likelihoods import Bernoulli
from skgp.optim.stopping import StopRecorder
from tests.covering import slow
from tests.reference import laplace as reference
from tests.reference.weights import dense_features
from tests.same import assert_same

N, M = 60, 16
BASIS = FourierFeatures(4.0 * RBF(1.2), M, 2, seed=3, block_size=5)
OFFSET = torch.tensor([0.3, -0.4, -0.8], dtype=torch.float64)
LOGIT = Bernoulli()
FACTORS = (0.25, 1.0, 4.0)


def make_problem(n=N, c=1, *, weighted=False, noise=0.7, seed=0):
    """Rows of a smooth function that noise turns into overlapping classes."""
    rng = np.random.default_rng(seed)
    X = torch.from_numpy(rng.standard_normal((n, 2)))
    noisy = X[:, 0] + torch.sin(2 * X[:, 1]) + noise * torch.from_numpy(rng.standard_normal(n))
    edges = torch.tensor([-0.6, 0.6] if c == 3 else [0.1], dtype=torch.float64)
    classes = torch.arange(c) if c > 1 else torch.ones(1)
    Y = 2.0 * (torch.bucketize(noisy, edges)[:, None] == classes).double() - 1
    weight = torch.from_numpy(rng.uniform(0.5, 2.0, n)) if weighted else torch.ones(n).double()
    return AmplitudeProblem(StreamedDesign(BASIS, X), X, Y, LOGIT, OFFSET[:c], weight)


def arrays(problem, column=0):
    """Features, labels, offset and weights of one column in NumPy."""
    Phi = dense_features(BASIS, problem.X)
    y, weight = problem.Y[:, column].numpy(), problem.weight.numpy()
    return Phi, y, float(problem.offset[column]), weight


def dense_latent(problem, prior_variance, *, without=(), at=slice(None), column=0):
    """Moments of the latent function at some rows, by a fit from which some are gone."""
    Phi, y, offset, weight = arrays(problem, column)
    rows = np.setdiff1d(np.arange(len(y)), without)
    options = {"offset": offset, "weight": weight[rows]}
    w = reference.mode(Phi[rows], y[rows], prior_variance=prior_variance, **options)
    c = reference.curvature(Phi[rows], w, **options)
    H = reference.hessian(Phi[rows], c, prior_variance)
    variance = np.einsum("ij,ji->i", Phi[at], np.linalg.solve(H, Phi[at].T))
    return offset + Phi[at] @ w, variance


def held_out_choice(problem, held_out, factors=FACTORS, *, covariance="full", k=100):
    return by_held_out_rows(
        problem,
        held_out,
        factors,
        covariance=covariance,
        n_dense_columns=k,
        generator=torch.Generator().manual_seed(0),
    )


def leave_one_out_choice(problem, factors=FACTORS, callback=None):
    return by_leaving_one_out(
        problem,
        factors,
        generator=torch.Generator().manual_seed(0),
        callback=StopRecorder(callback),
    )


def moderated_log_density(y, mean, variance, factor):
    """log E[sigmoid(y f)] by a fine sum over f."""
    z = np.linspace(-9, 9, 4001)
    f = mean[:, None] + np.sqrt(factor * variance)[:, None] * z
    density = np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return np.log((reference.sigmoid(y[:, None] * f) * density).sum(1) * (z[1] - z[0]))


# ---- leave one out ----------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", slow([False, True], but=[True]))
def test_leave_one_out_moments_are_near_those_of_refits(weighted):
    """To 2% of their spread on average, and 15% (mean) and 10% (std) for the worst row."""
    problem = make_problem(weighted=weighted)
    latent, _ = dense_latent(problem, 1.0)
    mean, variance = leave_one_out_moments(problem, torch.from_numpy(latent)[:, None], 1.0)
    refits = [dense_latent(problem, 1.0, without=[i], at=[i]) for i in range(N)]
    expected, expected_var = (np.concatenate(parts) for parts in zip(*refits, strict=True))
    std = np.sqrt(expected_var)
    error = np.abs(mean[:, 0].numpy() - expected) / std
    assert error.mean() < 0.02 and error.max() < 0.15
    # The fit of all rows is an order of magnitude further away.
    assert (np.abs(latent - expected) / std).mean() > 10 * error.mean()
    ratio = np.sqrt(variance[:, 0].numpy()) / std
    assert np.abs(ratio - 1).mean() < 0.02 and np.abs(ratio - 1).max() < 0.1


def test_leave_one_out_moments_are_the_formula_for_every_column():
    problem = make_problem(c=3, weighted=True)
    latent = torch.from_numpy(np.random.default_rng(1).standard_normal((N, 3)))
    mean, variance = leave_one_out_moments(problem, latent, 0.5)
    for j in range(3):
        Phi, y, _, weight = arrays(problem, j)
        p = reference.sigmoid(latent[:, j].numpy())
        c = weight * p * (1 - p)
        v = np.diag(Phi @ np.linalg.inv(reference.hessian(Phi, c, 0.5)) @ Phi.T)
        slope = weight * y * reference.sigmoid(-y * latent[:, j].numpy())
        np.testing.assert_allclose(variance[:, j].numpy(), v / (1 - c * v), rtol=1e-10)
        expected = latent[:, j].numpy() - v * slope / (1 - c * v)
        np.testing.assert_allclose(mean[:, j].numpy(), expected, rtol=1e-9, atol=1e-10)


def test_leave_one_out_leaves_equal_inputs_out_together():
    problem = make_problem()
    X, Y = torch.cat([problem.X, problem.X[:5]]), torch.cat([problem.Y, -problem.Y[:5]])
    design = StreamedDesign(BASIS, X)
    problem = replace(problem, design=design, X=X, Y=Y, weight=torch.ones(N + 5).double())
    latent, _ = dense_latent(problem, 1.0)
    mean, variance = leave_one_out_moments(problem, torch.from_numpy(latent)[:, None], 1.0)
    refits = [dense_latent(problem, 1.0, without=[i, N + i], at=[i]) for i in range(5)]
    expected, expected_var = (np.concatenate(parts) for parts in zip(*refits, strict=True))
    np.testing.assert_allclose(mean[:5, 0], expected, atol=0.1)
    np.testing.assert_allclose(variance[:5, 0], expected_var, rtol=0.2)
    assert_same(mean[N:], mean[:5])


def test_leave_one_out_moments_of_a_row_of_great_weight_are_finite():
    problem = make_problem()
    problem.weight[0] = 1e12
    fit = fit_newton(problem.at(1.0), generator=torch.Generator().manual_seed(0))
    mean, variance = leave_one_out_moments(problem, fit.latent, 1.0)
    assert bool(mean.isfinite().all()) and bool((variance > 0).all())


def chosen(densities, simplest, weight):
    """The nearest to the simplest, of log densities (p,) that the rule of selection cannot improve.

    On the side of the best.
    """
    best = max(densities, key=lambda key: float(weight @ np.asarray(densities[key])))
    low, high = sorted((simplest, best))
    order = sorted((k for k in densities if low <= k <= high), key=lambda k: abs(k - simplest))
    losses = [-densities[key] for key in order]
    return order[choose(losses, weight=weight, least_share=LABEL_SHARE)]


def moderated_choice(densities, weight):
    """The moderation, one label more expected to be wrong, where the whole variance doubts it."""
    doubt = 1 - np.exp(densities[1.0])
    share = weight.mean() * doubt / (weight @ doubt)
    told = {key: each + share * np.log1p(-np.exp(each)) for key, each in densities.items()}
    return chosen(told, FEW_ROWS_MODERATION, weight)


def test_leave_one_out_choice_is_that_of_its_moments():
    problem = make_problem(weighted=True)
    choice = leave_one_out_choice(problem)
    y, weight = problem.Y[:, 0].numpy(), problem.weight.numpy()
    best = {}
    for a in FACTORS:
        latent = torch.from_numpy(dense_latent(problem, a)[0])[:, None]
        mean, variance = (t[:, 0].numpy() for t in leave_one_out_moments(problem, latent, a))
        densities = {0.0: -np.logaddexp(0, -y * mean)}
        for factor in MODERATIONS[1:]:
            densities[factor] = moderated_log_density(y, mean, variance, factor)
        best[a] = densities
    moderations = {a: moderated_choice(each, weight) for a, each in best.items()}
    at_chosen = {a: best[a][moderations[a]] for a in best}
    assert choice.prior_variance == chosen(at_chosen, 1.0, weight)
    assert list(choice.amplitude_scores) == list(FACTORS)
    assert choice.moderation == moderations[choice.prior_variance]
    found = {a: np.average(each, weights=weight) for a, each in at_chosen.items()}
    scores = {
        factor: np.average(each, weights=weight)
        for factor, each in best[choice.prior_variance].items()
    }
    assert choice.amplitude_scores == pytest.approx(found, abs=1e-4)
    assert choice.moderation_scores == pytest.approx(scores, abs=1e-4)
    Phi, _, offset, _ = arrays(problem)
    w = reference.mode(Phi, y, offset, choice.prior_variance, weight)
    np.testing.assert_allclose(choice.weights[:, 0].numpy(), w, atol=0.02)  # of default tolerances


def test_leave_one_out_choice_is_the_choice_of_refits():
    problem = make_problem(N // 2, noise=0.3)
    factors = (0.01, 1.0)
    brute = {}
    for a in factors:
        refits = [dense_latent(problem, a, without=[i], at=[i])[0] for i in range(N // 2)]
        brute[a] = -np.logaddexp(0, -problem.Y[:, 0].numpy() * np.concatenate(refits)).mean()
    choice = leave_one_out_choice(problem, factors)
    assert choice.prior_variance == max(brute, key=lambda a: brute[a])


def test_leave_one_out_of_one_amplitude_chooses_the_moderation():
    choice = leave_one_out_choice(make_problem(c=3), (1.0,))
    assert choice.prior_variance == 1.0 and list(choice.amplitude_scores) == [1.0]
    assert tuple(choice.moderation_scores) == MODERATIONS
    assert choice.amplitude_scores[1.0] == choice.moderation_scores[choice.moderation]
    assert choice.weights.shape == (M, 3)


def test_leave_one_out_stops_between_amplitudes():
    choice = leave_one_out_choice(make_problem(), callback=lambda iteration, info: True)
    assert list(choice.amplitude_scores) == [FACTORS[0]]
    assert choice.prior_variance == FACTORS[0]


# ---- rows held out ----------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.5, 1.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_held_out_choice_is_that_of_fits_without_the_rows(noise, weighted):
    """Little noise calls for a great amplitude, much noise for a small one."""
    problem = make_problem(150, weighted=weighted, noise=noise)
    held_out = torch.arange(0, 150, 3)
    factors = (0.01, 0.1, 1.0, 10.0, 100.0)
    y, weight = problem.Y[held_out, 0].numpy(), problem.weight[held_out].numpy()
    densities, moments = {}, {}
    for a in factors:
        moments[a] = dense_latent(problem, a, without=held_out.numpy(), at=held_out.numpy())
        densities[a] = -np.logaddexp(0, -y * moments[a][0])
    choice = held_out_choice(problem, held_out, factors)
    best = chosen(densities, 1.0, weight)
    brute = {a: np.average(each, weights=weight) for a, each in densities.items()}
    assert choice.prior_variance == best == {0.5: 100.0, 1.5: 1.0}[noise]
    # The fits end when a step gains less than 1e-4 nats a row.
    assert choice.amplitude_scores == pytest.approx(brute, abs=2e-3)
    moderated = {m: moderated_log_density(y, *moments[best], m) for m in MODERATIONS}
    for factor, score in choice.moderation_scores.items():
        assert score == pytest.approx(np.average(moderated[factor], weights=weight), abs=2e-3)
    assert choice.moderation == moderated_choice(moderated, weight)


def test_held_out_rows_are_not_seen():
    """Their labels decide about the amplitude, not about the fits."""
    problem = make_problem(150)
    held_out = torch.arange(0, 150, 3)
    before = held_out_choice(problem, held_out, (1.0,))
    problem.Y[held_out] *= -1
    after = held_out_choice(problem, held_out, (1.0,))
    assert_same(before.weights, after.weights)
    assert before.amplitude_scores[1.0] > after.amplitude_scores[1.0]


@pytest.mark.parametrize("columns", [(0, 1, 2), (0, 2)], ids=["all", "some of many"])
def test_held_out_choice_of_columns_is_that_of_fits_without_the_rows(columns, monkeypatch):
    monkeypatch.setattr(module, "some_columns", lambda Y: torch.tensor(columns))
    problem, held_out = make_problem(150, 3), torch.arange(0, 150, 3)
    choice, rows = held_out_choice(problem, held_out), held_out.numpy()
    for a, score in choice.amplitude_scores.items():
        latent = [dense_latent(problem, a, without=rows, at=rows, column=j)[0] for j in columns]
        margin = problem.Y[held_out][:, columns].numpy() * np.column_stack(latent)
        assert score == pytest.approx(-np.logaddexp(0, -margin).mean(), abs=2e-3)
    if len(columns) < 3:
        assert choice.weights is None  # the other column has none
        return
    training = np.setdiff1d(np.arange(150), rows)
    for j in range(3):
        Phi, y, offset, _ = arrays(problem, j)
        w = reference.mode(Phi[training], y[training], offset, choice.prior_variance)
        np.testing.assert_allclose(choice.weights[:, j].numpy(), w, atol=0.1)  # |w| is about 2


def test_some_columns_spread_over_the_base_rates():
    Y = -torch.ones(100, 10)
    for column, count in enumerate([50, 3, 20, 7, 90, 1, 33, 60, 12, 75]):
        Y[:count, column] = 1.0
    # In order of their rates: 5 1 3 8 2 6 0 7 9 4, of which the 3rd, 5th or 6th and 8th.
    assert some_columns(Y).tolist() == [2, 3, 7]
    assert some_columns(Y[:, :3]).tolist() == [0, 1, 2]
    assert some_columns(Y[:, :4]).tolist() == [2, 3]  # none of them twice
