"""Neighbours at several scales: which points, how much of each, and no steps."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.neighbors.conditionals import Neighborhood
from skgp.inference.neighbors.posterior import KrigingModel

KERNEL = 1.0 * Matern([1.0, 0.5], nu=0.5)


def points(n=6000, seed=0):
    return torch.tensor(np.random.default_rng(seed).uniform(0, 10, size=(n, 2)))


@pytest.fixture(scope="module")
def neighborhood():
    return Neighborhood(KERNEL, points(), 32, n_scales=3)


def test_half_of_the_neighbours_are_the_nearest(neighborhood):
    X = points(50, seed=1)
    active, _ = neighborhood.find(X)
    scaled, Z = X / torch.tensor([1.0, 0.5]), neighborhood.Z / torch.tensor([1.0, 0.5])
    nearest = torch.cdist(scaled, Z).argsort(1)[:, :16]
    assert active.shape == (50, 32)
    for found, expected in zip(active[:, :16], nearest, strict=True):
        assert set(found.tolist()) == set(expected.tolist())


def test_coarser_neighbours_are_further_and_none_counts_twice(neighborhood):
    active, influence = neighborhood.find(points(50, seed=1))
    distance = (points(50, seed=1)[:, None] - neighborhood.Z[active]).norm(dim=-1)
    finest, coarse, coarsest = distance.split([16, 8, 8], dim=1)
    assert finest.mean() < 0.6 * coarse.mean() < 0.6**2 * coarsest.mean()
    for row, weight in zip(active, influence, strict=True):
        used = row[weight > 0]
        assert len(used.unique()) == len(used)


def test_a_row_left_out_is_at_no_scale(neighborhood):
    points_of_scale = neighborhood._coarser[-1][0]
    rows = torch.cat([points_of_scale[:5], torch.arange(5)])
    active, influence = neighborhood.find(neighborhood.Z[rows], rows)
    assert not ((active == rows[:, None]) & (influence > 0)).any()


def test_one_scale_and_few_points_are_as_without():
    Z, X = points(200), points(20, seed=1)
    one, three = (Neighborhood(KERNEL, Z, 64, n_scales=s).find(X) for s in (1, 3))
    torch.testing.assert_close(one, three)


def test_predictions_at_several_scales_have_no_steps():
    Z = points(4000)
    y = torch.sin(Z[:, :1]) + torch.cos(Z[:, 1:])
    model = KrigingModel(KERNEL, 0.01, Z, y, None, y.new_zeros(1), 32, n_scales=3)
    for step in (1e-3, 1e-4):
        x = torch.arange(4.0, 4.0 + 2000 * step, step, dtype=torch.float64)
        mean, var = model.mean_and_variance(torch.stack([x, 0 * x + 5.0], dim=1))
        # A step would not shrink with the distance of the points.
        assert mean.diff(dim=0).abs().max() < 60 * step and var.diff().abs().max() < 60 * step
