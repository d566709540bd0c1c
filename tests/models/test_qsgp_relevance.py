"""Relevance vectors as a route: what the options mean, and length scales beyond the inputs."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

from skgp.data import Data
from skgp.datasets import make_sinc
from skgp.inference.relevance.evidence import fit_relevance
from skgp.learning.hyperparameters import shorten_length_scales
from skgp.learning.plan import Options, Plan
from skgp.models import qsgp
from tests.covering import slow

KERNEL = RBF(2.0)
SEQUENTIAL = Plan("relevance", None, "sequential", "full")
SGD = Plan("relevance", None, "sgd", "full")


def generator():
    return torch.Generator().manual_seed(0)


def sinc(n=120, weight=None):
    X, y = make_sinc(n_samples=n, noise=0.1, random_state=0)
    return Data(torch.tensor(X), torch.tensor(y - y.mean()), weight)


def run(data, plan=SEQUENTIAL, *, kernel=KERNEL, noise=0.01, **options):
    problem = qsgp.Problem(kernel, data, noise, Options(**options), generator())
    return qsgp.fit_relevance_vectors(problem, plan)


def test_sequential_route_is_fit_relevance():
    data = sinc(weight=torch.linspace(0.5, 2, 120, dtype=torch.float64))
    fit = run(data)
    expected = fit_relevance(KERNEL, data.X, data.y, sample_weight=data.weight)
    assert torch.equal(fit.relevance, expected.indices)
    torch.testing.assert_close(fit.posterior.mean(data.X), expected.posterior.mean(data.X))
    assert fit.log_marginal_likelihood == expected.log_evidence
    assert fit.plan.n_basis == len(fit.relevance) and fit.noise == expected.noise_variance
    assert fit.history == [-value for value in expected.history]


def test_sgd_of_targets_that_are_all_zero_keeps_nothing():
    data = Data(sinc().X, torch.zeros(120, dtype=torch.float64))
    fit = run(data, SGD, max_iter=60)
    assert torch.equal(fit.posterior.mean(data.X), torch.zeros(120, dtype=torch.float64))
    assert fit.plan.n_basis == len(fit.relevance)


@pytest.mark.parametrize("weighted", slow([False, True], but=[True]))
def test_length_scales_beyond_the_inputs_are_shortened(weighted):
    weight = torch.full((120,), 2.0, dtype=torch.float64) if weighted else None
    data = sinc(weight=weight)
    kernel = ConstantKernel(9.0) * RBF(100.0)
    shorter = shorten_length_scales(kernel, data, generator=generator())
    assert 1 < shorter.k2.length_scale < 10
    assert shorter.theta[0] == pytest.approx(kernel.theta[0], rel=1e-12)
    scores = [run(data, kernel=k).log_marginal_likelihood for k in (kernel, shorter)]
    assert scores[1] > scores[0] + 10


@pytest.mark.parametrize(
    "kernel",
    [RBF(2.5), ConstantKernel(1.0) * RBF(100.0, "fixed"), DotProduct(), RBF(60.0, (50.0, 100.0))],
    ids=str,
)
def test_length_scales_that_suit_or_are_bound_are_kept(kernel):
    found = shorten_length_scales(kernel, sinc(), generator=generator())
    if kernel.n_dims and "RBF" in str(kernel) and kernel.theta[0] > np.log(50):
        assert found.length_scale >= 50
    else:
        assert found == kernel


@pytest.mark.parametrize("plan", [SEQUENTIAL, SGD], ids=lambda plan: plan.solver)
def test_max_iter_bounds_the_iterations(plan):
    assert run(sinc(), plan, max_iter=5).n_iter == 5


def test_shortening_stops_when_the_callback_says_so():
    calls = []
    kernel = RBF(100.0)
    found = shorten_length_scales(
        kernel,
        sinc(),
        generator=generator(),
        callback=lambda iteration, info: calls.append(iteration) or True,
    )
    assert len(calls) == 1 and found == kernel
