"""How many inducing points: more where held-out data gain by them."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.inference.sparse.sparse import SparseState
from skgp.learning.sparse.objective import Objective
from skgp.learning.sparse.settings import Settings
from skgp.learning.sparse.size import grown
from skgp.likelihoods import Gaussian
from tests.reference import sparse as dense


def points(kernel, n_points=12):
    return torch.linspace(-3, 3, n_points, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(("length_scale", "sizes"), [(3.0, {12}), (0.4, {24, 48}), (0.1, {48})])
def test_points_grow_where_held_out_data_gain(length_scale, sizes):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (600, 1))
    y = np.sin(2 * X[:, 0] / length_scale) + 0.2 * rng.standard_normal(600)
    problem = dense.Problem(RBF(length_scale), X, y, points(None).numpy())
    objective = Objective(Gaussian(0.04, bounds=(1e-4, 1.0)))
    noise = torch.tensor([math.log(0.04)], dtype=torch.float64)
    start = SparseState.prior(problem.kernel, noise, points(None), torch.zeros(1).double())
    generator = torch.Generator().manual_seed(0)
    found = grown(start, problem.data, objective, Settings(sizes=(24, 48)), points, generator)
    assert len(found.Z) in sizes
    assert (found is start) == (len(found.Z) == 12)
    assert grown(start, problem.data, objective, Settings(), points, generator) is start
