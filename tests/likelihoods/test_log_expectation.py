"""Gradients of log-expectations against sums on a fine grid, and against each other."""

import math

import numpy as np
import pytest
import torch

from skgp.likelihoods import Bernoulli, Gaussian, Laplace, Poisson, StudentT
from skgp.likelihoods.log_expectation import FORMS, log_expectation_loss
from tests.reference.product_density import ProductDensity

# likelihood, y, mean, variance, mode of the likelihood
CASES = {
    "gaussian": (Gaussian(0.5), 3.0, 1.0, 2.0, 3.0),
    "logit": (Bernoulli("logit"), 1.0, -0.7, 0.8, math.inf),
    "logit, wide": (Bernoulli("logit"), -1.0, 2.0, 9.0, -math.inf),
    "probit": (Bernoulli("probit"), -1.0, 1.0, 0.5, -math.inf),
    "counts 0": (Poisson("exp"), 0.0, 1.0, 0.6, -math.inf),
    "counts 9": (Poisson("exp"), 9.0, 1.2, 0.4, math.log(9)),
    "softplus": (Poisson("softplus"), 4.0, 1.0, 1.5, 4.0),
    "student, inlier": (StudentT(0.5, 4.0), 0.4, 0.0, 0.3, 0.4),
    "student, outlier": (StudentT(0.5, 4.0), 4.0, 0.0, 1.0, 4.0),
    "laplace": (Laplace(0.4), 1.0, 0.0, 0.5, 1.0),
}
N_REPEATS = 2000


def leaves(case, n=N_REPEATS):
    """The likelihood and n copies of a row; mean and var are leaves of the graph."""
    likelihood, y, mean, var, _ = CASES[case]
    y, mean, var = (torch.full((n,), value, dtype=torch.float64) for value in (y, mean, var))
    return likelihood, y, mean.requires_grad_(), var.requires_grad_()


def gradients(case, n=N_REPEATS, **options):
    """Loss and its gradient in mean and var for n independent repetitions."""
    likelihood, y, mean, var = leaves(case, n)
    loss = log_expectation_loss(likelihood, y, mean, var, **options)
    return loss.detach(), *torch.autograd.grad(loss.sum(), (mean, var))


def exact(case):
    """Loss and gradient by the fine grid."""
    *row, mode = CASES[case]
    density = ProductDensity(*row, mode=mode)
    return -density.log_mass, *(-value for value in density.gradient())


def z_value(sample, expected):
    # The sums on the grid err by 1e-6 or less.
    scale = float(sample.std()) / math.sqrt(len(sample)) + 1e-6 * (1 + abs(expected))
    return abs(float(sample.mean()) - expected) / scale


UPS = [
    (case, form)
    for case in CASES
    for form in FORMS["ups"]
    if not (case == "laplace" and form == "combined")
]


@pytest.mark.parametrize(("case", "form"), UPS)
def test_ups_is_unbiased(case, form, generator):
    options = {"gradient": "ups", "form": form, "n_samples": 2, "generator": generator}
    _, *estimates = gradients(case, **options)
    for estimate, expected in zip(estimates, exact(case)[1:], strict=True):
        assert z_value(estimate, expected) < 4


@pytest.mark.parametrize("gradient", ["exact", "quadrature"])
@pytest.mark.parametrize("case", CASES)
def test_exact_loss_and_gradient_equal_the_fine_grid(case, gradient):
    computed = gradients(case, n=1, gradient=gradient)
    for value, expected in zip(computed, exact(case), strict=True):
        assert float(value) == pytest.approx(expected, abs=2e-6)


def test_ups_has_the_value_of_the_exact_loss(generator):
    for case in CASES:
        likelihood, y, mean, var = leaves(case, n=3)
        loss = log_expectation_loss(
            likelihood, y, mean, var, gradient="ups", n_samples=1, generator=generator
        )
        torch.testing.assert_close(loss, -likelihood.log_predictive(y, mean, var))


def test_combined_form_has_no_noise_with_a_gaussian_likelihood(generator):
    _, *estimates = gradients("gaussian", gradient="ups", n_samples=1, generator=generator)
    for estimate, expected in zip(estimates, exact("gaussian")[1:], strict=True):
        np.testing.assert_allclose(estimate, expected, rtol=1e-5)
        assert float(estimate.std()) < 1e-12


@pytest.mark.parametrize(
    "likelihood", [Bernoulli("logit"), Bernoulli("probit"), Poisson("exp"), StudentT(0.5, 4.0)]
)
def test_combined_form_has_the_least_noise_over_many_rows(likelihood, generator):
    n, n_repeats = 100, 100
    mean, noise = torch.randn(2, n, dtype=torch.float64, generator=generator)
    var = torch.rand(n, dtype=torch.float64, generator=generator)
    f = mean + var.sqrt() * noise
    y = {
        Bernoulli: torch.where(f > noise.flip(0), 1.0, -1.0).to(f),
        Poisson: torch.poisson(f.exp(), generator=generator),
        StudentT: f + 0.5 * noise.flip(0) / var.flip(0).sqrt(),
    }[type(likelihood)]
    noise = {}
    for form in FORMS["ups"]:
        leaves = [t.expand(n_repeats, n).clone().requires_grad_() for t in (mean, var)]
        options = {"gradient": "ups", "form": form, "n_samples": 1, "generator": generator}
        loss = log_expectation_loss(likelihood, y, *leaves, **options)
        noise[form] = [float(g.var(0).sum()) for g in torch.autograd.grad(loss.sum(), leaves)]
    for combined, pathwise, score in zip(*noise.values(), strict=True):
        assert combined < 0.3 * min(pathwise, score)
    assert noise["pathwise"][0] < noise["score"][0] and noise["pathwise"][1] < noise["score"][1]


# --- likelihood parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", ["ups", "bmc", "smooth_bmc"])
@pytest.mark.parametrize("make", [Gaussian, lambda p: StudentT(p, 4.0), Laplace])
def test_likelihood_parameters_get_their_gradient(make, gradient, generator):
    n = N_REPEATS if gradient == "ups" else 200
    y, mean, var = (torch.full((n,), value, dtype=torch.float64) for value in (1.5, 0.2, 0.7))
    parameter = torch.full((n,), 0.6, dtype=torch.float64, requires_grad=True)
    n_samples = 1 if gradient == "ups" else 3000  # so that the bias is below the noise
    options = {"gradient": gradient, "n_samples": n_samples, "smoothing": 0.0}
    loss = log_expectation_loss(make(parameter), y, mean, var, **options, generator=generator)
    (estimate,) = torch.autograd.grad(loss.sum(), parameter)
    loss = -make(parameter).log_predictive(y, mean, var)
    (expected,) = torch.autograd.grad(loss.sum(), parameter)
    assert z_value(estimate, float(expected[0])) < 4


# --- biased Monte Carlo ---------------------------------------------------------------------------


def naive_monte_carlo(case, e, nu):
    """Eqs. (5) to (8) as they are written, for one row and noise e (n_samples,)."""
    likelihood, y, mean, var, _ = CASES[case]
    f = torch.from_numpy(mean + math.sqrt(var) * e)
    y = torch.full_like(f, y)
    p = likelihood.log_prob(y, f).exp().numpy()
    d1 = likelihood.derivatives(y, f)[0].numpy()
    p_first = p * d1  # phi'
    in_var = p_first * e / (2 * math.sqrt(var))
    total = p.mean() + nu
    return -math.log(total), -p_first.mean() / total, -in_var.mean() / total


@pytest.mark.parametrize(("gradient", "nu"), [("bmc", 0.0), ("smooth_bmc", 0.05)])
@pytest.mark.parametrize("case", ["gaussian", "logit", "counts 9", "student, outlier"])
def test_bmc_equals_the_equations_of_the_paper(case, gradient, nu):
    n_samples = 7
    e = torch.randn((n_samples, 1), dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    computed = gradients(
        case,
        n=1,
        gradient=gradient,
        n_samples=n_samples,
        smoothing=nu,
        generator=torch.Generator().manual_seed(5),
    )
    expected = naive_monte_carlo(case, e[:, 0].numpy(), nu)
    np.testing.assert_allclose([float(value) for value in computed], expected, rtol=1e-10)


@pytest.mark.parametrize("case", ["logit", "probit", "counts 0", "student, inlier"])
def test_bias_of_bmc_is_visible_with_one_sample_and_not_with_many(case, generator):
    _, expected, _ = exact(case)
    options = {"gradient": "bmc", "generator": generator}
    _, one, _ = gradients(case, n=400, n_samples=1, **options)
    _, many, _ = gradients(case, n=400, n_samples=200, **options)
    assert z_value(one, expected) > 5
    assert z_value(many, expected) < 4


def test_bias_of_bmc_shrinks_as_the_number_of_samples_grows(generator):
    _, expected, _ = exact("counts 0")
    bias, error = [], []
    for n_samples in (10, 40):
        options = {"gradient": "bmc", "n_samples": n_samples, "generator": generator}
        _, estimate, _ = gradients("counts 0", n=30_000, **options)
        bias.append(float(estimate.mean()) - expected)
        error.append(float(estimate.std()) / math.sqrt(30_000))
    # A fourth of the bias, up to terms of second order (a tenth).
    assert abs(bias[1] - bias[0] / 4) < 4 * error[1] + 4 * error[0] / 4 + 0.1 * abs(bias[0]) / 4
    assert abs(bias[1]) > 8 * error[1]


def test_smoothing_shrinks_the_gradient(generator):
    likelihood, y, mean, var = leaves("logit", n=200)
    options = {"gradient": "smooth_bmc", "n_samples": 2000, "generator": generator}
    loss = log_expectation_loss(likelihood, y, mean, var, smoothing=0.3, **options)
    (in_mean,) = torch.autograd.grad(loss.sum(), mean)
    exact_loss, exact_in_mean, _ = exact("logit")
    density = math.exp(-exact_loss)
    assert float(loss.detach().mean()) == pytest.approx(-math.log(density + 0.3), abs=1e-3)
    assert float(in_mean.mean()) == pytest.approx(
        exact_in_mean * density / (density + 0.3), abs=2e-3
    )


def test_densities_that_underflow_are_no_obstacle(generator):
    y, mean, var = (torch.full((1,), v, dtype=torch.float64) for v in (1e3, 0.0, 1.0))
    mean.requires_grad_()
    for gradient in ("bmc", "ups"):
        loss = log_expectation_loss(
            Gaussian(0.01), y, mean, var, gradient=gradient, generator=generator
        )
        (in_mean,) = torch.autograd.grad(loss.sum(), mean)
        assert loss.isfinite().all() and in_mean.isfinite().all()
        assert float(in_mean) < -100


# --- small variances, shapes, refusals ------------------------------------------------------------


@pytest.mark.parametrize("var", [0.0, 1e-300, 1e-12])
@pytest.mark.parametrize("case", [case for case in CASES if case != "laplace"])
def test_small_variances_have_the_gradient_of_the_limit(case, var, generator):
    likelihood, y, mean, _, _ = CASES[case]
    y, mean, var = (torch.tensor([value], dtype=torch.float64) for value in (y, mean, var))
    first, second = likelihood.derivatives(y, mean)
    leaves = mean.clone().requires_grad_(), var.clone().requires_grad_()
    loss = log_expectation_loss(likelihood, y, *leaves, gradient="ups", generator=generator)
    computed = torch.autograd.grad(loss.sum(), leaves)
    for value, limit in zip(computed, (-first, -(first**2 + second) / 2), strict=True):
        torch.testing.assert_close(value, limit, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("gradient", "form"),
    [("bmc", "pathwise"), ("smooth_bmc", "pathwise"), ("ups", "pathwise"), ("ups", "score")],
)
def test_forms_without_a_limit_are_finite_at_zero_variance(gradient, form, generator):
    y, mean = torch.ones(3), torch.zeros(3, requires_grad=True)
    var = torch.zeros(3, requires_grad=True)
    loss = log_expectation_loss(
        Bernoulli(), y, mean, var, gradient=gradient, form=form, generator=generator
    )
    in_mean, in_var = torch.autograd.grad(loss.sum(), (mean, var))
    assert in_mean.isfinite().all() and (in_var == 0).all()


@pytest.mark.parametrize("gradient", ["exact", *FORMS])
def test_loss_broadcasts_and_keeps_dtype(gradient, dtype, generator):
    y = torch.tensor([1.0, -1.0], dtype=dtype)
    mean = torch.zeros(3, 1, dtype=dtype, requires_grad=True)
    var = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    loss = log_expectation_loss(
        Bernoulli(), y, mean, var, gradient=gradient, n_samples=4, generator=generator
    )
    assert loss.shape == (3, 2) and loss.dtype == dtype
    in_mean, in_var = torch.autograd.grad(loss.sum(), (mean, var))
    assert in_mean.shape == (3, 1) and in_var.shape == (3, 2)
    assert in_mean.dtype == dtype and in_var.isfinite().all()


def test_bad_arguments_are_refused(generator):
    y, mean, var = torch.ones(3, 2, dtype=torch.float64)

    def loss(likelihood=None, var=var, generator=generator, **options):
        likelihood = likelihood or Bernoulli()
        return log_expectation_loss(likelihood, y, mean, var, generator=generator, **options)

    with pytest.raises(ValueError, match="gradient must be one of.*got 'vmc'"):
        loss(gradient="vmc")
    with pytest.raises(ValueError, match="form must be one of.*'bmc' and Bernoulli.*'score'"):
        loss(gradient="bmc", form="score")
    with pytest.raises(ValueError, match=r"form must be one of \('pathwise', 'score'\).*Laplace"):
        loss(Laplace(1.0), gradient="ups", form="combined")
    with pytest.raises(ValueError, match="generator"):
        loss(gradient="ups", generator=None)
    for gradient in FORMS:
        with pytest.raises(ValueError, match="n_samples must be a positive integer"):
            loss(gradient=gradient, n_samples=0)
        with pytest.raises(ValueError, match="var must be non-negative"):
            loss(gradient=gradient, var=-var)
