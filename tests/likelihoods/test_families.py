"""Likelihoods as functions of their free parameters."""

import math

import pytest
import torch

from skgp.likelihoods import Bernoulli, Gaussian, Poisson, StudentT
from skgp.likelihoods.families import FixedFamily, GaussianFamily, StudentTFamily

LIKE = torch.zeros(3, dtype=torch.float64)
GAUSSIAN = GaussianFamily(0.3, (1e-4, 5.0))
STUDENT = StudentTFamily(0.25, (1e-3, 4.0), 4.0, (2.1, 200.0))


def test_gaussian_family_makes_the_noise_of_its_parameter():
    likelihood = GAUSSIAN.make(GAUSSIAN.initial(LIKE))
    assert isinstance(likelihood, Gaussian)
    assert float(likelihood.noise_variance) == pytest.approx(0.3, rel=1e-12)
    assert GAUSSIAN.noise_variance(torch.tensor([0.5]).double()) == pytest.approx(math.exp(0.5))
    low, high = GAUSSIAN.box(LIKE)
    assert low.exp().tolist() == pytest.approx([1e-4])
    assert high.exp().tolist() == pytest.approx([5.0])


def test_student_t_family_makes_scale_and_degrees_of_freedom():
    likelihood = STUDENT.make(STUDENT.initial(LIKE))
    assert isinstance(likelihood, StudentT)
    assert float(likelihood.scale) == pytest.approx(0.5, rel=1e-12)
    assert float(likelihood.df) == pytest.approx(4.0, rel=1e-12)
    low, high = STUDENT.box(LIKE)
    assert low.exp().tolist() == pytest.approx([1e-3, 2.1])
    assert high.exp().tolist() == pytest.approx([4.0, 200.0])


def test_student_t_family_has_the_variance_of_its_noise():
    """scale^2 df / (df - 2), infinite for few degrees of freedom."""
    parameters = STUDENT.initial(LIKE)
    assert STUDENT.noise_variance(parameters) == pytest.approx(0.5, rel=1e-12)
    moments = STUDENT.make(parameters).predictive_moments(LIKE, LIKE)
    assert STUDENT.noise_variance(parameters) == pytest.approx(float(moments[1][0]), rel=1e-9)
    assert STUDENT.noise_variance(torch.tensor([0.25, 2.0]).log()) == math.inf


@pytest.mark.parametrize("likelihood", [Bernoulli("probit"), Poisson("softplus")])
def test_fixed_family_has_nothing_to_learn(likelihood):
    family = FixedFamily(likelihood)
    parameters = family.initial(LIKE)
    assert parameters.shape == (0,) and parameters.dtype == torch.float64
    assert family.make(parameters) is likelihood
    assert [bound.shape for bound in family.box(LIKE)] == [(0,), (0,)]
    assert math.isnan(family.noise_variance(parameters))


@pytest.mark.parametrize("family", [GAUSSIAN, STUDENT], ids=["gaussian", "student_t"])
def test_families_are_differentiable_and_keep_the_dtype(family, dtype):
    parameters = family.initial(LIKE.to(dtype)).requires_grad_()
    assert parameters.dtype == dtype and family.box(LIKE.to(dtype))[0].dtype == dtype
    y = torch.ones(1, dtype=dtype)
    loss = family.make(parameters).log_predictive(y, 0 * y, y).sum()
    (gradient,) = torch.autograd.grad(loss, parameters)
    assert gradient.dtype == dtype and (gradient != 0).all()


def test_equal_bounds_keep_a_parameter():
    family = StudentTFamily(0.25, (1e-3, 4.0), 3.0, (3.0, 3.0))
    low, high = family.box(LIKE)
    assert low[1] == high[1] == family.initial(LIKE)[1] and low[0] < high[0]
