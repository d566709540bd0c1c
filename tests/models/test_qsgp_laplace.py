"""Laplace noise as a route: rows merged, basis and precision chosen, posterior augmented."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF

from skgp.data import Data
from skgp.inference.weights.bases import WhitenedInducingBasis
from skgp.inference.weights.design import StreamedDesign
from skgp.inference.weights.robust import fit_robust
from skgp.kernels import FourierFeatures
from skgp.kernels.distances import origin
from skgp.learning import defaults
from skgp.learning.plan import Options, Plan
from skgp.models import qsgp

CPU = torch.device("cpu")
KERNEL = 1.2 * RBF(0.9)
FOURIER = Plan("fourier", 40, "cholesky", "full")
INDUCING = Plan("inducing", 30, "cholesky", "full")


def fit_laplace(data, noise, scale, plan, options, Z):
    problem = qsgp.Problem(KERNEL, data, noise, options, torch.Generator())
    return qsgp.fit_laplace(problem, plan, scale=scale, Z=Z)


def sine(n=80, weighted=False):
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(-3, 3, (n, 1)), axis=0)
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.laplace(size=n)
    weight = rng.uniform(0.5, 3, n) if weighted else None
    data = Data(*map(torch.from_numpy, (X, y, *[weight] * weighted)))
    return data.merged(any_likelihood=True)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plan", [FOURIER, INDUCING], ids=lambda plan: plan.basis)
def test_fit_laplace_is_fit_robust_on_the_basis_planned(plan, weighted):
    data = sine(weighted=weighted)
    Z = data.X[::3]
    fit = fit_laplace(data, 0.3, 0.2, plan, Options(augment=False), Z=Z)
    basis = (
        FourierFeatures(KERNEL, 40, 1, seed=0, origin=origin(data.X)[0])
        if plan.basis == "fourier"
        else WhitenedInducingBasis(KERNEL, Z)
    )
    design = StreamedDesign(basis, data.X)
    expected = fit_robust(design, data.y, scale=0.2, sample_weight=data.weight)
    torch.testing.assert_close(fit.posterior.mean(data.X), expected.posterior.mean(data.X))
    assert fit.likelihood_scale == expected.scale and fit.noise == 2 * expected.scale**2
    assert fit.plan.n_basis == (40 if plan.basis == "fourier" else len(Z))
    total = float(len(data.y) if data.weight is None else data.weight.sum())
    assert fit.history[-1] == pytest.approx(-fit.elbo / total)


@pytest.mark.parametrize("plan", [FOURIER, INDUCING], ids=lambda plan: plan.basis)
def test_fit_laplace_of_much_data_predicts_in_double_precision(plan, monkeypatch):
    data = sine()
    exact = fit_laplace(data, 0.3, 0.2, plan, Options(), Z=data.X[::6])
    monkeypatch.setitem(defaults.SINGLE_SIZE, "laplace", 1)
    mean = fit_laplace(data, 0.3, 0.2, plan, Options(), Z=data.X[::6]).posterior.mean(data.X)
    assert mean.dtype == torch.float64 and not torch.equal(mean, exact.posterior.mean(data.X))
    torch.testing.assert_close(mean, exact.posterior.mean(data.X), rtol=1e-3, atol=1e-3)
