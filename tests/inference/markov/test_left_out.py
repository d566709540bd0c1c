"""Leave-one-out moments from sites, against sites that lack the row."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.series import make_series
from skgp.inference.markov.sites import fit_sites, left_out_moments
from skgp.inference.markov.smoother import evidence
from skgp.kernels.sde import state_space
from skgp.likelihoods import Bernoulli, Gaussian


@pytest.mark.parametrize("likelihood", [Bernoulli(), Bernoulli("probit"), Gaussian(0.3)])
def test_left_out_moments_are_those_without_a_unit_of_the_row(likelihood, rng):
    x = torch.from_numpy(rng.uniform(0, 5, 12))
    x[3] = x[5]
    y = torch.from_numpy(np.where(rng.random(12) < 0.5, 1.0, -1.0))
    weight = torch.from_numpy(rng.uniform(0.5, 2, 12))
    series = make_series(x, y, weight)
    dynamics, offset = state_space(2.0 * Matern(1.0, nu=1.5)).at(), 0.4
    sites = fit_sites(dynamics, series, likelihood, offset=offset, tol=1e-14, max_iter=200)
    mean, var = series.at_rows(sites.posterior.mean) + offset, series.at_rows(sites.posterior.var)
    found = left_out_moments(likelihood, series.y, mean, var, series.weight)
    slope, curvature = likelihood.expected_derivatives(series.y, mean, var)
    for row in range(12):
        alone = torch.zeros(12, dtype=torch.float64)
        alone[row] = min(1.0, 1 / float(series.weight[row]))
        omega = series.sums(-curvature * alone)
        beta = series.sums((slope - curvature * (mean - offset)) * alone)
        rest = evidence(dynamics, series.gaps, sites.beta - beta, sites.weight - omega)
        assert found[0][row] == pytest.approx(float(series.at_rows(rest.mean)[row]) + offset, 1e-5)
        assert found[1][row] == pytest.approx(float(series.at_rows(rest.var)[row]), rel=1e-5)


def test_rows_that_did_not_converge_keep_a_proper_variance():
    y, mean, var = (torch.ones(1, dtype=torch.float64) for _ in range(3))
    _, left = left_out_moments(Gaussian(0.1), y, mean, var)
    assert left.item() == pytest.approx(100.0)
