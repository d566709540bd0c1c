"""Densities of classes, and the moderation and the coupling that rows left out prefer."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from skgp.data import Data
from skgp.inference.sparse import SparseState
from skgp.learning.calibration import (
    COUPLINGS,
    best_calibration,
    best_coupling,
    choose_moderation,
    class_log_density,
    left_out_moments,
    mean_scores,
    without_own,
)
from skgp.learning.defaults import FEW_ROWS, FEW_ROWS_MODERATION, MODERATIONS
from skgp.learning.sparse.objective import Objective
from skgp.likelihoods import Bernoulli, Gaussian


def one_vs_rest(codes, c):
    return torch.where(torch.as_tensor(codes)[:, None] == torch.arange(c), 1.0, -1.0).double()


def drawn(rng, mean, var, moderation, coupling):
    """Labels (n, c), one of c classes a row, with the probabilities of latent moments (n, c)."""
    z = mean / np.sqrt(1 + moderation * var)
    proba = norm.cdf(z) / norm.sf(z) ** coupling
    proba /= proba.sum(1, keepdims=True)
    codes = (proba.cumsum(1) < rng.uniform(size=(len(mean), 1))).sum(1)
    return one_vs_rest(codes, mean.shape[1])


def averaged_sigmoid(mean, var):
    if var == 0:
        return expit(mean)
    return quad(
        lambda f: expit(f) * norm.pdf(f, mean, var**0.5), mean - 12 * var**0.5, mean + 12 * var**0.5
    )[0]


@pytest.mark.parametrize("moderated", [True, False])
def test_density_of_two_classes_is_that_of_the_label(moderated):
    Y, mean, var = torch.tensor([[1.0], [-1.0]]), torch.tensor([[0.7], [2.0]]), torch.ones(2, 1) * 3
    Y, mean, var = Y.double(), mean.double(), var.double()
    found = class_log_density(Bernoulli(), Y, mean, var if moderated else None)
    v = 3.0 if moderated else 0.0
    expected = np.log([averaged_sigmoid(0.7, v), 1 - averaged_sigmoid(2.0, v)])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("moderated", [True, False])
def test_densities_of_several_classes_sum_to_one(moderated):
    rng = np.random.default_rng(0)
    mean, var = torch.tensor(rng.normal(size=(5, 3)) * 2), torch.tensor(rng.gamma(1.0, size=(5, 3)))
    densities = [
        class_log_density(
            Bernoulli(), one_vs_rest(np.full(5, k), 3), mean, var if moderated else None
        )
        for k in range(3)
    ]
    np.testing.assert_allclose(torch.stack(densities).exp().sum(0).numpy(), 1.0, rtol=1e-12)
    moments = zip(mean[0].tolist(), var[0].tolist(), strict=True)
    p = np.array([averaged_sigmoid(m, v * moderated) for m, v in moments])
    first = torch.stack(densities)[:, 0].exp().numpy()
    np.testing.assert_allclose(first, p / p.sum(), rtol=1e-6)


def test_scores_are_weighted_means_at_each_factor():
    rng = np.random.default_rng(0)
    Y = one_vs_rest(rng.integers(0, 3, 6), 3)
    mean, var = torch.tensor(rng.normal(size=(6, 3))), torch.tensor(rng.gamma(1.0, size=(6, 3)))
    weight = torch.tensor(rng.gamma(1.0, size=6))
    _, losses = choose_moderation(Bernoulli(), Y, mean, var, weight)
    scores = mean_scores(losses, weight)
    assert tuple(scores) == MODERATIONS
    for factor, score in scores.items():
        density = class_log_density(Bernoulli(), Y, mean, factor * var if factor else None)
        assert score == pytest.approx(np.average(density, weights=weight))
    _, losses = choose_moderation(Bernoulli(), Y, mean, var, weight, separately=True)
    separate = mean_scores(losses, weight)
    density = Bernoulli().log_prob(Y, mean).mean(1)
    assert separate[0.0] == pytest.approx(np.average(density, weights=weight))


@pytest.mark.parametrize(("noise", "best"), [(0.0, 0.0), (2.0, 1.0)])
def test_scores_prefer_the_variance_that_there_is(noise, best):
    # The mean is wrong by `noise` standard deviations of 2, of which the variance is stated as 4.
    generator = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(20_000, 1, generator=generator, dtype=torch.float64)
    f = mean + noise * torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    Y = torch.where(torch.rand(f.shape, generator=generator) < f.sigmoid(), 1.0, -1.0).double()
    ones = torch.ones(len(Y), dtype=torch.float64)
    found, losses = choose_moderation(Bernoulli(), Y, mean, torch.full_like(mean, 4.0), ones)
    scores = mean_scores(losses, ones)
    assert max(scores, key=scores.get) == best
    assert scores[found] > scores[best] - 0.015


def test_one_label_far_from_its_mean_does_not_hide_the_variance_that_there_is():
    """It makes the noise of the loss of the mean alone so great that no factor is surely better."""
    generator = torch.Generator().manual_seed(0)
    mean = 2 * torch.randn(2_000, 1, generator=generator, dtype=torch.float64)
    f = mean + 2 * torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    Y = torch.where(torch.rand(f.shape, generator=generator) < f.sigmoid(), 1.0, -1.0).double()
    var = torch.full_like(mean, 16.0)  # four times as much as there is
    mean[0], var[0], Y[0] = 300.0, 400.0**2, -1.0
    assert choose_moderation(Bernoulli(), Y, mean, var, n_errors=2.0)[0] == 0.25


def test_few_labels_do_not_say_how_to_moderate():
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for _ in range(100):
        mean = 2 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
        Y = torch.where(torch.rand(mean.shape, generator=generator) < mean.sigmoid(), 1.0, -1.0)
        var, ones = torch.full_like(mean, 0.2), torch.ones(20, dtype=torch.float64)
        chosen.append(choose_moderation(Bernoulli(), Y.double(), mean, var, ones)[0])
    assert np.mean(np.array(chosen) == FEW_ROWS_MODERATION) > 0.8


@pytest.mark.parametrize(("n", "best"), [(60, FEW_ROWS_MODERATION), (600, 0.0)])
def test_few_labels_predicted_right_do_not_make_probabilities_sure(n, best):
    """The surest gain .03 nats a label, ten standard errors; one wrong label costs 5 more."""
    mean = torch.linspace(-15, 15, n, dtype=torch.float64)[:, None]
    Y, var = mean.sign(), torch.full_like(mean, 60.0)
    found, losses = choose_moderation(Bernoulli(), Y, mean, var, n_errors=2.0)
    gain = (losses[FEW_ROWS_MODERATION] - losses[0.0]).numpy()
    assert gain.mean() > 4 * gain.std(ddof=1) / n**0.5
    assert found == best


@pytest.mark.parametrize(("n", "best"), [(FEW_ROWS, 1 / 16), (1000, 0.0)])
def test_a_calibration_expects_a_wrong_label(n, best):
    """Under the probit it costs the mode some 100 nats, a share of which is 0 of many labels."""
    mean = torch.linspace(-15, 15, n, dtype=torch.float64)[:, None]
    var = torch.full_like(mean, 300.0)
    assert best_calibration(Bernoulli("probit"), mean.sign(), mean, var) == (best, 0.0)


@pytest.mark.parametrize(("n", "best"), [(FEW_ROWS - 1, 1.0), (FEW_ROWS, 0.0)])
def test_few_labels_of_two_classes_keep_all_of_the_variance(n, best):
    """Labels that the means tell for sure."""
    mean = torch.linspace(-3, 3, n, dtype=torch.float64)[:, None]
    Y, var = torch.where(mean < 0, -1.0, 1.0).double(), torch.full_like(mean, 20.0)
    assert best_calibration(Bernoulli(), Y, mean, var) == (best, 0.0)


# ---- moments left out, and couplings -------------------------------------------------------------


def test_left_out_moments_are_those_of_fits_without_the_input():
    """Exact where the likelihood is Gaussian."""
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(20, 2, generator=rng, dtype=torch.float64)
    X[11] = X[7]
    y = torch.randn(20, 1, generator=rng, dtype=torch.float64)
    weight = torch.rand(20, generator=rng, dtype=torch.float64) + 0.5
    data, likelihood = Data(X, y, weight), Gaussian(0.3, bounds=(0.3, 0.3))
    objective = Objective(likelihood, "elbo", beta=0.7)
    kernel = ConstantKernel(2.0) * RBF(1.0)
    prior = SparseState.prior(kernel, likelihood.initial(X), X[:6] + 0.1, X.new_zeros(1))

    def posterior(rows):
        return objective.with_optimum(prior, rows).posterior()

    likelihood = likelihood.with_parameters(prior.likelihood)
    mean, var = left_out_moments(posterior(data), data, objective, likelihood)
    for row in (0, 7, 19):
        others = (X != X[row]).any(1)
        expected = posterior(data.take(others)).mean_and_variance(X[row : row + 1])
        torch.testing.assert_close(mean[row], expected[0][0], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(var[row], expected[1][0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_best_coupling_is_that_which_drew_the_labels(coupling):
    rng = np.random.default_rng(0)
    mean, var = rng.normal(-0.5, 1.5, (20_000, 4)), rng.uniform(0.1, 1.0, (20_000, 4))
    Y, weight = drawn(rng, mean, var, 1.0, coupling), rng.uniform(0.5, 1.5, 20_000)
    moments = map(torch.from_numpy, (mean, var, weight))
    assert best_coupling(Bernoulli("probit"), Y, *moments) == coupling


@pytest.mark.parametrize("coupling", [0.0, 1.0])
def test_few_labels_decide_the_coupling(coupling):
    """150 labels a time, whose gain over 1/2 is seldom a standard error."""
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        mean = rng.normal(-0.5, 0.7, (150, 4))
        var = np.full_like(mean, 1e-9)
        Y = drawn(rng, mean, var, 1.0, coupling)
        found.append(best_coupling(Bernoulli("probit"), Y, *map(torch.from_numpy, (mean, var))))
    assert abs(np.mean(found) - coupling) < 0.2


@pytest.mark.parametrize("coupling", [0.0, 1.0])
@pytest.mark.parametrize("moderation", MODERATIONS)
def test_best_calibration_is_that_which_drew_the_labels(moderation, coupling):
    rng = np.random.default_rng(0)
    mean, var = rng.normal(-1.0, 2.0, (20_000, 4)), rng.uniform(0.1, 30.0, (20_000, 4))
    Y = drawn(rng, mean, var, moderation, coupling)
    moments = map(torch.from_numpy, (mean, var))
    assert best_calibration(Bernoulli("probit"), Y, *moments) == (moderation, coupling)


def test_moments_without_the_observations_of_an_input_are_those_of_the_others():
    """Of Gaussian sites; inputs 0 and 5 are equal, of contrary labels."""
    rng = np.random.default_rng(0)
    X, precision, site = rng.random((8, 2)), rng.uniform(0.5, 2.0, 8), rng.standard_normal(8)
    X[5] = X[0]
    K = np.exp(-2 * ((X[:, None] - X) ** 2).sum(2))
    C = K - K @ np.linalg.solve(K + np.diag(1 / precision), K)
    f = C @ (precision * site)
    parts = (f, np.diag(C).copy(), precision * (site - f), precision)
    found = without_own(torch.from_numpy(X), *(torch.from_numpy(part)[:, None] for part in parts))
    for i in (0, 2, 5):
        rest = (X != X[i]).any(1)
        a = np.linalg.solve(K[np.ix_(rest, rest)] + np.diag(1 / precision[rest]), K[rest, i])
        expected = a @ site[rest], K[i, i] - a @ K[rest, i]
        np.testing.assert_allclose([each[i, 0] for each in found], expected, rtol=1e-9)
