"""Laplace evidence of few rows against the general one, its gradient, awkward starts."""

import numpy as np
import pytest
import torch

from skgp.kernels.gram import gram
from skgp.likelihoods import Bernoulli, Poisson
from skgp.models.dlm.laplace import LaplaceEvidence
from skgp.models.laplace_evidence import laplace_log_evidence
from tests.reference import sparse as dense

LIKELIHOODS = {
    "probit": (Bernoulli("probit"), "labels"),
    "logit": (Bernoulli("logit"), "labels"),
    "poisson": (Poisson("exp"), "counts"),
    "softplus": (Poisson("softplus"), "counts"),
}
OFFSET = torch.tensor([0.2, -0.4], dtype=torch.float64)


def problem_of(name, **options):
    """Two latent functions: rows as they are, and in another order."""
    likelihood, target = LIKELIHOODS[name]
    problem = dense.make_problem(n=30, target=target, **options)
    y = torch.cat([problem.data.y, problem.data.y.flip(0)], dim=1)
    return problem, likelihood, y


def value_and_gradient(evidence, problem, theta):
    theta = theta.clone().requires_grad_()
    value = evidence(gram(problem.kernel, problem.data.X, theta=theta))
    return value.item(), torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_laplace_evidence_is_that_of_one_function_after_the_other(name, weighted):
    problem, likelihood, y = problem_of(name, weighted=weighted)
    data, theta = problem.data, torch.tensor(problem.kernel.theta)
    evidence = LaplaceEvidence(likelihood, y, OFFSET, data.weight)
    for shift in (0.0, 0.3, -1.0):  # each begins at the modes of the last
        found, slope = value_and_gradient(evidence, problem, theta + shift)
        at = (theta + shift).requires_grad_()
        options = {"likelihood": likelihood, "offset": OFFSET, "row_weight": data.weight}
        expected = laplace_log_evidence(problem.kernel, data.X, y, at, **options).sum()
        assert found == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(
            slope, torch.autograd.grad(expected, at)[0], rtol=1e-4, atol=1e-4
        )


def test_laplace_evidence_has_the_slope_of_its_values():
    problem, likelihood, y = problem_of("probit")
    theta, step = torch.tensor(problem.kernel.theta), 1e-5

    def at(theta):
        return value_and_gradient(LaplaceEvidence(likelihood, y, OFFSET), problem, theta)

    slope = at(theta)[1]
    for i, direction in enumerate(step * torch.eye(len(theta), dtype=torch.float64)):
        difference = (at(theta + direction)[0] - at(theta - direction)[0]) / (2 * step)
        assert difference == pytest.approx(float(slope[i]), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["probit", "poisson"])
def test_laplace_evidence_does_not_depend_on_where_it_begins(name):
    """Not even on modes from which a full step would lead astray."""
    problem, likelihood, y = problem_of(name)
    K = 4.0 * gram(problem.kernel, problem.data.X)
    fresh, led_astray = (LaplaceEvidence(likelihood, y, OFFSET) for _ in range(2))
    far = 30 * torch.tensor(np.random.default_rng(0).standard_normal((2, 30)))
    led_astray.last = far, *led_astray.derivatives(far)
    assert float(led_astray(K)) == pytest.approx(float(fresh(K)), rel=1e-6)


def test_laplace_evidence_of_separable_labels_of_great_amplitude_is_finite():
    problem, likelihood, _ = problem_of("logit")
    y = torch.sign(problem.data.X[:, :1])
    evidence = LaplaceEvidence(likelihood, y, OFFSET[:1])
    theta = torch.tensor(problem.kernel.theta)
    theta[0] = np.log(1e6)
    value, slope = value_and_gradient(evidence, problem, theta)
    assert np.isfinite(value) and slope.isfinite().all()
