"""Laplace's evidence of labels under a Vecchia prior as an objective, and its search."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.data import Data
from skgp.inference.vecchia.hessian import hessian
from skgp.learning.vecchia import neighbors_of
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


@pytest.mark.parametrize("link", ["logit", "probit"])
@pytest.mark.parametrize("m", [0, 5])
def test_gradient_is_that_of_the_value(m, link):
    objective = evidence(labelled(), m=m, likelihood=Bernoulli(link))
    gradient = objective(KERNEL.theta)[1]
    for i, step in enumerate(1e-5 * np.eye(3)):
        ends = [objective(KERNEL.theta + s)[0] for s in (step, -step)]
        np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / 2e-5, atol=1e-7)


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


def test_weights_are_repetitions_at_one_place():
    """Two labels at one input are two points whose values agree up to the jitter."""
    data = labelled(20)
    counts = data.weight.long()
    twice = Data(data.X.repeat_interleave(counts, 0), data.y.repeat_interleave(counts, 0))
    values = [evidence(each, H=len(each) - 1, m=0)(KERNEL.theta)[0] for each in (data, twice)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
