"""Free parameters of likelihoods: what an optimiser moves."""

import math

import pytest
import torch

from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT

LIKE = torch.zeros(3, dtype=torch.float64)
GAUSSIAN = Gaussian(0.3, bounds=(1e-4, 5.0))
STUDENT = StudentT(0.5, 4.0, scale_bounds=(0.03, 2.0), df_bounds=(2.1, 200.0))
LAPLACE = Laplace(0.2, bounds=(0.1, 1.0))
FREE = pytest.mark.parametrize(
    "likelihood", [GAUSSIAN, STUDENT, LAPLACE], ids=lambda x: str(type(x))
)


@FREE
def test_free_parameters_give_back_the_likelihood_within_its_bounds(likelihood):
    parameters = likelihood.initial(LIKE)
    made = likelihood.with_parameters(parameters)
    assert type(made) is type(likelihood)
    assert made.log_prob(LIKE + 1, LIKE).tolist() == pytest.approx(
        likelihood.log_prob(LIKE + 1, LIKE).tolist(), rel=1e-12
    )
    low, high = likelihood.box(LIKE)
    assert (low < parameters).all() and (parameters < high).all()
    moments = made.predictive_moments(LIKE, LIKE)
    assert made.additive_variance() == pytest.approx(float(moments[1][0]), rel=1e-9)


def test_student_t_bounds_are_those_of_its_scale_and_degrees_of_freedom():
    low, high = STUDENT.box(LIKE)
    assert low.exp().tolist() == pytest.approx([0.03**2, 2.1])  # the squared scale is learned
    assert high.exp().tolist() == pytest.approx([4.0, 200.0])
    assert StudentT(0.5, 2.0).additive_variance() == math.inf


@pytest.mark.parametrize("likelihood", [Bernoulli("probit"), Poisson("softplus")])
def test_likelihood_without_parameters_has_nothing_to_learn(likelihood):
    parameters = likelihood.initial(LIKE)
    assert parameters.shape == (0,) and parameters.dtype == torch.float64
    assert likelihood.with_parameters(parameters) is likelihood
    assert [bound.shape for bound in likelihood.box(LIKE)] == [(0,), (0,)]
    assert math.isnan(likelihood.additive_variance())
    with pytest.raises(TypeError, match="not Gaussian"):
        likelihood.gaussian_noise(parameters)


@FREE
def test_with_parameters_is_differentiable_and_keeps_the_dtype(likelihood, dtype):
    parameters = likelihood.initial(LIKE.to(dtype)).requires_grad_()
    assert parameters.dtype == dtype and likelihood.box(LIKE.to(dtype))[0].dtype == dtype
    y = torch.ones(1, dtype=dtype)
    loss = likelihood.with_parameters(parameters).log_predictive(y, 0 * y, y).sum()
    (gradient,) = torch.autograd.grad(loss, parameters)
    assert gradient.dtype == dtype and (gradient != 0).all()


def test_without_bounds_a_parameter_is_kept():
    likelihood = StudentT(0.5, 3.0, scale_bounds=(0.1, 2.0))
    low, high = likelihood.box(LIKE)
    assert low[1] == high[1] == likelihood.initial(LIKE)[1] and low[0] < high[0]
