"""Sites that are sharper than covariances have digits, against 80 digits."""

import mpmath
import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import Matern

from skgp.data import Data
from skgp.inference.markov.additive_sites import RowsPrior, condition_rows
from skgp.kernels import state_space
from skgp.likelihoods import Gaussian
from skgp.models.state_space import fit_additive
from tests.reference.state_space import by_finite_differences

KERNELS = [Matern(1.0, nu=0.5), Matern(2.0, nu=0.5)]
NOISE = 1e-10
NEW = torch.tensor([[0.0, -1.0], [1.3, -1.7], [0.4, 0.0], [2.5, 9.0]], dtype=torch.float64)


def make_rows():
    """Rows on a grid with weights of 1e-8 to 1e8: X (n, 2), y (n,), weight (n,)."""
    rng = np.random.default_rng(0)
    X = np.round(rng.uniform(-2, 2, (24, 2)))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 1e-3 * rng.normal(size=24)
    return map(torch.from_numpy, (X, y, 10.0 ** rng.integers(-8, 9, 24)))


def exact_moments(X, y, weight, new):
    """Of the sum, by 80 digits; its prior mean is 0."""
    with mpmath.workdps(80):

        def cov(a, b):
            scales = zip(a.tolist(), b.tolist(), (1, 2), strict=True)
            return mpmath.fsum(mpmath.exp(-abs(mpmath.mpf(s) - t) / r) for s, t, r in scales)

        C = mpmath.matrix([[cov(a, b) for b in X] for a in X])
        for i, each in enumerate(weight.tolist()):
            C[i, i] += mpmath.mpf(NOISE) / mpmath.mpf(each)
        cross = mpmath.matrix([[cov(a, b) for b in new] for a in X])
        solved = mpmath.lu_solve(C, mpmath.matrix(y.tolist()))
        mean = [float((cross[:, j].T * solved)[0]) for j in range(len(new))]
        var = [
            float(2 - (cross[:, j].T * mpmath.lu_solve(C, cross[:, j]))[0]) for j in range(len(new))
        ]
    return mean, var


def test_rows_of_small_weight_beside_large_ones_keep_their_digits():
    X, y, weight = make_rows()
    options = {"posterior": "joint", "offset": 0.0, "optimise": False}
    likelihood = Gaussian(NOISE, bounds=(NOISE, NOISE))
    fit = fit_additive(KERNELS, Data(X, y, weight), likelihood, **options)
    mean, var = fit.states[0].moments(NEW)
    expected_mean, expected_var = exact_moments(X, y, weight, NEW)
    np.testing.assert_allclose(var, expected_var, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(mean, expected_mean, atol=1e-4)
    alone = [fit.states[0].moments(row[None])[1].item() for row in NEW]
    np.testing.assert_allclose(alone, var, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("zero", [False, True])
def test_both_factors_give_one_posterior(zero, monkeypatch):
    X, y, _ = make_rows()
    x = X.T + 0.01 * torch.arange(len(y)) * torch.tensor([[1.0], [-2.0]])
    weight = torch.linspace(0.5, 50.0, len(y), dtype=torch.float64)
    if zero:
        weight[3] = 0.0
    forms = [state_space(kernel) for kernel in KERNELS]
    start = torch.cat([form.parameters().detach() for form in forms])

    def at(parameters):
        parts = parameters.split([len(parameters) // 2] * 2)
        dynamics = [form.at(part) for form, part in zip(forms, parts, strict=True)]
        return condition_rows(RowsPrior(dynamics, x), weight * y + zero, weight)

    convex = at(start)
    monkeypatch.setattr("skgp.inference.markov.additive_sites.SHARP_SITE", 0.0)
    sharp = at(start)
    assert type(sharp) is not type(convex)
    for name in ("alpha", "mean", "var", "reduction"):
        np.testing.assert_allclose(getattr(sharp, name), getattr(convex, name), atol=1e-9)
    for name in ("log_normalizer", "divergence", "spread"):
        assert getattr(sharp, name) == pytest.approx(getattr(convex, name), rel=1e-9)
    k = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = sharp.prior.K @ k
    np.testing.assert_allclose(sharp.reduce(k), convex.reduce(k), rtol=1e-9)
    np.testing.assert_allclose(sharp.reduce_all(k), convex.reduce_all(k), rtol=1e-7)
    expected = by_finite_differences(lambda p: at(p).log_normalizer, start)
    np.testing.assert_allclose(torch.cat(sharp.gradients()), expected, rtol=1e-5, atol=1e-6)
