"""Sites of few times, which are found in arrays, are those of the smoother."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.inference.markov.exact_sites import _ExactBound, fit_sites
from skgp.inference.markov.series import make_series
from skgp.inference.markov.sites import climb
from skgp.kernels import state_space
from skgp.likelihoods import Bernoulli, Poisson, StudentT


@pytest.mark.parametrize("kind", ["labels", "counts", "outliers"])
def test_sites_in_arrays_are_those_of_the_smoother(kind, rng):
    x = torch.from_numpy(np.repeat(rng.uniform(0, 5, 25), 2))  # equal times
    f, weight = torch.sin(2 * x), torch.from_numpy(rng.uniform(0.5, 2, 50))
    if kind == "labels":
        likelihood, y = Bernoulli(), torch.where(f > 0.2, 1.0, -1.0).double()
    elif kind == "counts":
        likelihood, y = Poisson(), torch.from_numpy(rng.poisson(f.exp().numpy())).double()
    else:
        likelihood, y = StudentT(0.2, 4.0), f + 0.1 * torch.from_numpy(rng.standard_normal(50))
        y[:4] += 4.0  # whose weights are negative
    series = make_series(x, y, weight)
    dynamics = state_space(2.0 * Matern(1.0, nu=1.5)).at()
    found = fit_sites(dynamics, series, likelihood, offset=0.3, tol=1e-10)
    bound = _ExactBound(dynamics, series, likelihood, 0.3, None)
    bound.prior = None  # the filter
    expected = climb(bound, tol=1e-10)
    assert bool((found.weight < 0).any()) == (kind == "outliers")
    assert found.elbo == pytest.approx(expected.elbo, abs=1e-8)
    for name in ("beta", "weight", "mean", "var", "slope", "curvature"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=1e-4, rtol=0)
    again = fit_sites(
        dynamics, series, likelihood, offset=0.3, start=(found.beta, found.weight), tol=1e-10
    )
    assert again.elbo == pytest.approx(found.elbo, abs=1e-7)
