"""Laplace's evidence of labels under a Vecchia prior as an objective, and its search."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.data import Data
from skgp.learning import vecchia_laplace
from skgp.learning.search import HyperparameterFit
from skgp.learning.vecchia import VecchiaSettings, neighbors_of
from skgp.learning.vecchia_laplace import LatentEvidence, fit_latent_likelihood
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


@pytest.mark.parametrize("link", ["logit", "probit"])
@pytest.mark.parametrize("m", [0, 5])
def test_gradient_is_that_of_the_value(m, link):
    objective = evidence(labelled(), m=m, likelihood=Bernoulli(link))
    gradient = objective(KERNEL.theta)[1]
    for i, step in enumerate(1e-5 * np.eye(3)):
        ends = [objective(KERNEL.theta + s)[0] for s in (step, -step)]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-5, atol=1e-7)


def test_columns_add_up():
    data = labelled(c=2)
    whole = evidence(data)(KERNEL.theta)
    columns = [Data(data.X, data.y[:, [j]], data.weight) for j in range(2)]
    each = [evidence(some)(KERNEL.theta) for some in columns]
    assert whole[0] == pytest.approx(each[0][0] + each[1][0], abs=1e-9)
    np.testing.assert_allclose(whole[1], each[0][1] + each[1][1], atol=1e-9)


def test_weights_are_repetitions_at_one_place():
    """Two labels at one input are two points whose values agree up to the jitter."""
    data = labelled(20)
    counts = data.weight.long()
    twice = Data(data.X.repeat_interleave(counts, 0), data.y.repeat_interleave(counts, 0))
    values = [evidence(each, H=len(each) - 1, m=0)(KERNEL.theta)[0] for each in (data, twice)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_search_moves_amplitude_and_the_common_length_scale(monkeypatch):
    data, told = labelled(200), []
    monkeypatch.setattr(vecchia_laplace.SearchSettings, "exact_rows", 0)
    start = KERNEL.clone_with_theta(KERNEL.theta - 1.0)
    dense = HyperparameterFit(start, history=[-1.0])
    monkeypatch.setattr(
        vecchia_laplace, "fit_classification_hyperparameters", lambda *_, **__: dense
    )
    found = fit_latent_likelihood(
        [KERNEL],
        data,
        VecchiaSettings(n_neighbors=6, n_inducing=5, n_stages=1, max_iter=6),
        Bernoulli(),
        OFFSET,
        generator=torch.Generator().manual_seed(0),
        callback=lambda step, info: told.append(info["loss"]),
    )
    np.testing.assert_allclose(found.history[1:], np.negative(told))
    np.testing.assert_allclose(np.ptp(found.kernel.theta[1:]), np.ptp(start.theta[1:]))
    at = evidence(data, H=6)
    assert at(found.kernel.theta)[0] < at(start.theta)[0] - 0.01


@pytest.mark.parametrize(("n_neighbors", "exact_rows"), [(6, 0), (0, 0), (6, 2500)])
def test_search_goes_on_from_what_all_labels_say(monkeypatch, n_neighbors, exact_rows):
    """Where there are neighbours, and more observations than the dense evidence takes."""
    subset, fine = (HyperparameterFit(4.0 * Matern([s, s]), history=[-1.0]) for s in (0.5, 0.02))
    told = []

    def by_all_labels(found, kernels, data, *, information, **options):
        told.append((found, len(data), information))
        return fine

    monkeypatch.setattr(vecchia_laplace.SearchSettings, "exact_rows", exact_rows)
    monkeypatch.setattr(
        vecchia_laplace, "fit_classification_hyperparameters", lambda *_, **__: subset
    )
    monkeypatch.setattr(vecchia_laplace, "search_label_kernel", by_all_labels)
    found = fit_latent_likelihood(
        [KERNEL],
        labelled(200),
        VecchiaSettings(n_neighbors=n_neighbors, n_inducing=5, n_stages=1, max_iter=0),
        Bernoulli("logit"),
        OFFSET,
        generator=torch.Generator().manual_seed(0),
    )
    asked = n_neighbors > 0 and exact_rows == 0
    assert told == ([(subset, 200, 0.25)] if asked else [])
    start = fine if asked else subset
    np.testing.assert_allclose(found.kernel.k2.length_scale, start.kernel.k2.length_scale, rtol=0.3)
