"""The Student-t likelihood against SciPy, fine grids and the contract of all likelihoods."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from skgp.likelihoods import Gaussian, StudentT
from tests.contracts.numeric_likelihoods import NumericLikelihoodContract
from tests.reference import fine_grid
from tests.same import assert_same

SCALE, DF = 0.6, 5.0


class TestStudentT(NumericLikelihoodContract):
    """Quadrature throughout."""

    VARIANCES = (0.05, 0.7, 2.5, 40.0)
    N_POINTS = 200

    def likelihood(self):
        return StudentT(SCALE, DF)

    def targets(self):
        return np.array([-2.0, 0.1, 0.5, 3.0])

    def wide_targets(self):
        return np.array([-60.0, -4.0, 0.0, 0.7, 9.0])  # residuals up to 100 scales

    def centres(self, y):
        return ((y, SCALE * math.sqrt(DF)),)

    def support(self, f):
        return f + SCALE * np.sinh(np.linspace(-16, 16, 129))

    def parameters(self):
        return [torch.tensor(value, dtype=torch.float64) for value in (SCALE, DF)]

    def differentiable_likelihood(self, parameters):
        return StudentT(*parameters)


def _fine(name, y, mean, var, scale, df):
    centres = ((y, scale * math.sqrt(df)),)
    return getattr(fine_grid, name)(StudentT(scale, df), y, mean, var, (), centres)


def _leaves(*columns):
    return [torch.tensor(column, dtype=torch.float64, requires_grad=True) for column in columns]


def test_student_t_equals_scipy():
    y, f = torch.tensor([[0.3, -1.0, 1e5], [0.0, 2.0, -1.0]], dtype=torch.float64)
    for df in (0.5, 1.0, 4.0, 200.0):
        expected = stats.t(df, loc=f, scale=SCALE).logpdf(y)
        np.testing.assert_allclose(StudentT(SCALE, df).log_prob(y, f), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["log_predictive", "expected_log_prob"])
@pytest.mark.parametrize("df", [1.0, 1.5, 4.0, 30.0, 200.0])
def test_student_t_is_exact_for_all_ratios_of_scales(name, df):
    scale = 2.0
    cases = [
        (residual * scale, 0.0, ratio * scale**2)
        for ratio in (1e-8, 1e-4, 0.05, 1.0, 10.0, 100.0, 1e4)
        for residual in (0.0, 1.0, -5.0, 20.0, -60.0, 300.0, 1000.0)
    ]
    expected = np.array([_fine(name, *case, scale, df) for case in cases])
    y, mean, var = np.transpose(cases)
    mean, var = _leaves(mean, var)
    value = getattr(StudentT(scale, df), name)(torch.tensor(y), mean, var)
    value.sum().backward()
    for result, reference, tolerance in (
        (value.detach(), expected[:, 0], 2e-7),
        (mean.grad, expected[:, 1], 2e-7),
        # The reference divides its rounding errors by the variance.
        (var.grad, expected[:, 2], 1e-6 + 1e-13 / var.detach().numpy()),
    ):
        error = np.abs(result.numpy() - reference) / (1 + np.abs(reference))
        assert (error < tolerance).all(), f"at {cases[int((error - tolerance).argmax())]}"


def test_student_t_slopes_keep_relative_precision_where_the_latent_value_is_wide():
    # There the predictive is N(m, v + V[noise]); its slope in v is some 1 / v.
    y, mean, var = _leaves([3e4, 0.0, -2e5], [0.0, 5.0, 1e4], [1e10, 1e9, 1e10])
    StudentT(1.0, 4.0).log_predictive(y, mean, var).sum().backward()
    residual, total = (y - mean).detach(), var.detach() + 2.0
    torch.testing.assert_close(mean.grad, residual / total, rtol=1e-6, atol=0)
    expected = 0.5 * ((residual / total) ** 2 - 1 / total)
    torch.testing.assert_close(var.grad, expected, rtol=1e-6, atol=0)


def test_student_t_gradients_equal_finite_differences_where_there_are_two_peaks():
    # A residual that is as improbable for the noise as for the latent value.
    y = torch.tensor([60.0, 8.0, -30.0, 300.0], dtype=torch.float64)
    leaves = _leaves(
        np.zeros(4), [100.0, 3.0, 25.0, 1000.0], [1.0, 0.7, 1.0, 1.0], [3, 1.2, 30, 10]
    )

    def value(mean, var, scale, df):
        return StudentT(scale, df).log_predictive(y, mean, var)

    assert torch.autograd.gradcheck(value, leaves, eps=1e-5, atol=1e-7, rtol=1e-6)


def test_student_t_scalar_parameters_collect_the_gradients_of_all_rows():
    y, mean, var = torch.tensor([[0.3, -1.0], [0.0, 2.0], [0.5, 0.1]], dtype=torch.float64)
    scalar, rows = _leaves(SCALE, DF), _leaves([SCALE] * 2, [DF] * 2)
    for parameters in (scalar, rows):
        StudentT(*parameters).log_predictive(y, mean, var).sum().backward()
    for total, single in zip(scalar, rows, strict=True):
        torch.testing.assert_close(total.grad, single.grad.sum())


def test_student_t_gradient_in_y_is_minus_that_in_the_mean():
    y, mean = _leaves([0.3, -7.0], [0.0, 2.0])
    StudentT(SCALE, DF).log_predictive(y, mean, torch.ones_like(y)).sum().backward()
    torch.testing.assert_close(y.grad, -mean.grad)


def test_student_t_tends_to_the_normal_distribution():
    y, mean, var = torch.tensor([[0.3, -3.0], [0.0, 2.0], [0.5, 0.1]], dtype=torch.float64)
    wide, normal = StudentT(SCALE, 1e7), Gaussian(SCALE**2)
    for name in ("log_predictive", "expected_log_prob", "cdf"):
        expected = getattr(normal, name)(y, mean, var)
        np.testing.assert_allclose(getattr(wide, name)(y, mean, var), expected, rtol=1e-4)


def test_student_t_is_finite_for_extreme_variances_and_residuals(dtype):
    y = torch.tensor([-1e6, -1.0, 0.0, 1.0, 1e6], dtype=dtype)
    for variance in (0.0, 1e-20, 1e-6, 1.0, 1e8):
        for name in ("log_predictive", "expected_log_prob"):
            leaves = [
                torch.full_like(y, value).requires_grad_() for value in (0.0, variance, 0.5, 3.0)
            ]
            value = getattr(StudentT(*leaves[2:]), name)(y, *leaves[:2])
            value.sum().backward()
            assert value.isfinite().all() and all(leaf.grad.isfinite().all() for leaf in leaves)


@pytest.mark.parametrize("df", [1.0, 2.0, 4.0, 30.0, 1e4])
def test_student_t_cdf_and_quantile_equal_scipy_without_latent_variance(df):
    q = torch.tensor([1e-6, 1e-3, 0.1, 0.5, 0.7, 0.999], dtype=torch.float64)
    zero = torch.zeros_like(q)
    expected = stats.t(df, scale=SCALE).ppf(q)
    likelihood = StudentT(SCALE, df)
    np.testing.assert_allclose(likelihood.cdf(torch.tensor(expected), zero, zero), q, rtol=3e-6)
    np.testing.assert_allclose(likelihood.quantile(q, zero, zero), expected, rtol=3e-6, atol=1e-12)


def test_student_t_cdf_equals_a_numerical_integral():
    for r, var in ((-7.0, 0.5), (-0.4, 30.0), (1.5, 1e-3)):
        expected = integrate.quad(
            lambda z, r=r, s=var**0.5: stats.t.cdf((r - s * z) / SCALE, DF) * stats.norm.pdf(z),
            *(-12, 12),
            epsabs=1e-13,
            points=[np.clip(r / var**0.5, -12, 12)],
            limit=400,
        )[0]
        y, mean, v = (torch.tensor([x], dtype=torch.float64) for x in (r, 0.0, var))
        value = float(StudentT(SCALE, DF).cdf(y, mean, v))
        assert value == pytest.approx(expected, abs=1e-10)


def test_student_t_variance_is_infinite_up_to_two_degrees_of_freedom():
    df = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    mean, var = torch.tensor([[0.3] * 3, [0.5] * 3], dtype=torch.float64)
    mean_y, var_y = StudentT(SCALE, df).predictive_moments(mean, var)
    assert_same(mean_y, mean)
    np.testing.assert_allclose(var_y.detach(), [np.inf, np.inf, 0.5 + 2 * SCALE**2])
    var_y[2].backward()
    np.testing.assert_allclose(df.grad, [0, 0, -0.5 * SCALE**2])


@pytest.mark.parametrize("name", ["scale", "df"])
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, torch.tensor([1.0, 0.0])])
def test_student_t_refuses_parameters_that_are_not_positive(name, bad):
    with pytest.raises(ValueError, match=rf"{name} must be positive and finite; got .* use a "):
        StudentT(**{"scale": 1.0, "df": 4.0, name: bad})
