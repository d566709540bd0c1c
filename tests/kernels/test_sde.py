"""State-space forms: equal to the dense kernel, Markov, and differentiated in closed form."""

import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    Exponentiation,
    ExpSineSquared,
    Matern,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.kernels import ActiveDims, Cosine, LocalLinearTrend, gram, has_state_space, state_space
from skgp.kernels.special import scaled_bessel
from tests.reference.state_space import by_finite_differences
from tests.reference.state_space_kernels import CASES, EXACT, each_series_kernel
from tests.same import assert_same

EPS = torch.finfo(torch.float64).eps
GAPS = torch.cat([torch.zeros(1), torch.logspace(-5, 2, 40)]).double()


def dynamics_of(kernel):
    form = state_space(kernel)
    return form.at()


def product(*factors):
    """Products of matrices (d, d) and (d, d, n), gap by gap, as (n, d, d)."""
    result = None
    for factor in factors:
        batch = factor if factor.ndim == 2 else factor.permute(2, 0, 1)
        result = batch if result is None else result @ batch
    return result


def transposed(matrices):
    return matrices.transpose(0, 1)


def dense(kernel, gaps):
    """k(gap) over the gaps."""
    return gram(kernel, torch.zeros(1, 1, dtype=torch.float64), gaps[:, None])[0]


# The form equals the kernel -----------------------------------------------------------------------


@each_series_kernel()
def test_covariance_equals_the_dense_kernel(case):
    kernel = case.make()
    dynamics, expected = dynamics_of(kernel), dense(kernel, GAPS)
    F, _ = dynamics.transition(GAPS)
    H = dynamics.observation
    covariance = product(F, dynamics.stationary) @ H @ H
    assert (covariance - expected).abs().max() < case.tolerance * expected[0]


@each_series_kernel()
def test_stated_error_bounds_the_actual_one(case):
    kernel = case.make()
    form, variance = state_space(kernel), float(dense(kernel, GAPS[:1]))
    dynamics, gaps = form.at(), torch.linspace(0, 30, 1000).double()
    F, _ = dynamics.transition(gaps)
    covariance = product(F, dynamics.stationary) @ dynamics.observation @ dynamics.observation
    actual = float((covariance - dense(kernel, gaps)).abs().max())
    assert actual <= form.error() + EXACT * variance
    assert form.error() <= (0 if case.tolerance == EXACT else 2 * case.tolerance * variance)


def test_stated_error_follows_theta():
    kernel = ExpSineSquared(1.5, 2.0)
    form = state_space(kernel)
    moved = torch.tensor([math.log(0.4), math.log(2.0)], dtype=torch.float64)
    assert form.error() < 1e-8 < 1e-3 < form.error(moved)
    dynamics = form.at(form.parameters(moved))
    assert abs(dynamics.observation @ dynamics.stationary @ dynamics.observation - 1) < 1e-12
    F, _ = dynamics.transition(GAPS)
    covariance = product(F, dynamics.stationary) @ dynamics.observation @ dynamics.observation
    error = covariance - dense(kernel.clone_with_theta(moved.numpy()), GAPS)
    assert error.abs().max() < form.error(moved)


def test_tolerance_decides_the_number_of_harmonics():
    kernel = ExpSineSquared(1.0, 2.0)
    coarse, fine = state_space(kernel, tolerance=1e-3), state_space(kernel)
    assert coarse.n_states < fine.n_states
    assert fine.error() <= 1e-8 < coarse.error() <= 1e-3


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 5.0, 20.0, 1e4])
def test_rational_quadratic_is_within_its_documented_error(alpha):
    form = state_space(RationalQuadratic(1.0, alpha))
    documented = {0.1: 0.22, 0.5: 5.2e-3, 1.0: 7e-4, 5.0: 1.1e-4, 20.0: 1e-5, 1e4: 1e-5}
    assert form.n_states == 24 and form.error() <= documented[alpha]


@pytest.mark.parametrize("alpha", [1e-5, 1e-3, 1e5])
def test_rational_quadratic_stays_finite_at_the_bounds_of_alpha(alpha):
    form = state_space(RationalQuadratic(1.0, alpha))
    theta = torch.tensor(form.kernel.theta, requires_grad=True)
    parameters = form.parameters(theta)
    parameters.sum().backward()
    assert parameters.isfinite().all() and theta.grad.isfinite().all()


def test_squared_exponential_is_a_matern_of_infinite_smoothness():
    first, second = dynamics_of(Matern(0.7, nu=np.inf)), dynamics_of(RBF(0.7))
    assert_same(first.transition(GAPS)[1], second.transition(GAPS)[1])


# Markov -------------------------------------------------------------------------------------------


@each_series_kernel()
def test_noise_restores_the_stationary_covariance(case):
    dynamics = dynamics_of(case.make())
    F, Q = dynamics.transition(GAPS)
    P0 = dynamics.stationary
    error = product(F, P0, transposed(F)) + product(Q) - P0
    # Each entry sums d^2 products, which may cancel.
    size = product(F.abs(), P0.abs(), transposed(F).abs()).max()
    rounding = 4 * EPS * dynamics.n_states**2 * size
    assert error.abs().max() < rounding
    assert (Q - transposed(Q)).abs().max() < rounding


@each_series_kernel(forgets=True)
def test_an_infinite_gap_forgets(case):
    dynamics = dynamics_of(case.make())
    gaps = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    F, Q = dynamics.transition(gaps)
    assert (F[..., 0] == 0).all()
    assert torch.allclose(Q[..., 0], dynamics.stationary, rtol=1e-12, atol=0)
    ones = torch.ones_like(F)
    assert torch.isfinite(dynamics.transition_gradient(gaps, ones, ones)).all()


def test_an_infinite_gap_is_refused_by_what_never_forgets():
    gaps = torch.tensor([math.inf], dtype=torch.float64)
    with pytest.raises(ValueError, match="gaps must be finite for the component rotation"):
        dynamics_of(Matern() + Cosine()).transition(gaps)
    F, Q = dynamics_of(ConstantKernel(2.0) + Matern()).transition(gaps)
    assert (F[0, 0, 0], Q[0, 0, 0]) == (1, 0)  # a constant stays


def test_tiles_do_not_show():
    dynamics = dynamics_of(Matern(nu=1.5) * Matern(nu=0.5) + RBF())
    gaps = torch.from_numpy(np.random.default_rng(0).exponential(0.5, 40_000))
    F, Q = dynamics.transition(gaps)
    some = torch.arange(0, 40_000, 3989)
    for whole, few in zip((F, Q), dynamics.transition(gaps[some]), strict=True):
        # Two exponentials, to which an error of eps in the exponent of up to log(1 / eps) is that
        # many eps; vectors and what is left over of them are rounded differently.
        assert (whole[..., some] - few).abs().max() < 100 * EPS * whole.abs().max()


@each_series_kernel()
def test_covariance_and_its_derivatives_agree_with_transitions_and_differences(case):
    form = state_space(case.make())
    lags = np.append(0.0, np.logspace(-4, 0.4, 30))
    parameters = form.parameters().detach()

    def covariance(at):
        return torch.from_numpy(form.at(at).covariance(lags, of_form=True)[0])

    k, slopes = form.at(parameters).covariance(lags, of_form=True)
    dynamics = form.at(parameters)
    F, _ = dynamics.transition(torch.from_numpy(lags))
    H, P0 = dynamics.observation, dynamics.stationary
    np.testing.assert_allclose(k, torch.einsum("i,ijn,j->n", H, F, P0 @ H), atol=1e-12 * k[0])
    assert len(slopes) == len(parameters)
    expected = by_finite_differences(covariance, parameters)
    np.testing.assert_allclose(slopes, expected.T, atol=1e-6 * k[0])


def test_covariance_of_a_trend_is_that_of_the_kernel_with_its_derivatives():
    kernel = LocalLinearTrend(0.3, 2.0, 0.7, origin=-1.0) + 0.5 * Matern(1.5, nu=1.5)
    times = np.array([-1.0, 0.2, 0.9, 4.0])
    earlier, later = np.triu_indices(4)
    form, places = state_space(kernel), (times[later] - times[earlier], times[earlier] + 1.0)
    parameters = form.parameters().detach()
    k, slopes = form.at(parameters).covariance(*places)
    np.testing.assert_allclose(k, kernel(times[:, None])[earlier, later], rtol=1e-12)
    expected = by_finite_differences(
        lambda at: torch.from_numpy(form.at(at).covariance(*places)[0]), parameters
    )
    np.testing.assert_allclose(slopes, expected.T, atol=1e-6)
    with pytest.raises(ValueError, match="a covariance of lags needs a stationary"):
        form.at(parameters).covariance(places[0])


# Gradients ----------------------------------------------------------------------------------------


@each_series_kernel()
def test_transition_gradient_equals_finite_differences(case):
    form = state_space(case.make())
    parameters = form.parameters()
    gaps = torch.tensor([1e-3, 0.02, 0.3, 0.9, 2.0], dtype=torch.float64)
    rng = np.random.default_rng(0)
    F_bar, Q_bar = torch.from_numpy(
        rng.standard_normal((2, form.n_states, form.n_states, len(gaps)))
    )

    def contraction(values):
        F, Q = form.at(values).transition(gaps)
        return (F * F_bar).sum() + (Q * Q_bar).sum()

    gradient = form.at(parameters).transition_gradient(gaps, F_bar, Q_bar)
    expected = by_finite_differences(contraction, parameters)
    assert (gradient - expected).abs().max() < 1e-8 * (1 + expected.abs().max())


TRENDS = [LocalLinearTrend(0.3, 0.7, 0.2, origin=-1.0)]
TRENDS.append(TRENDS[0] + Matern(0.7, nu=1.5) * Cosine(0.6))


@pytest.mark.parametrize("kernel", [case.make() for case in CASES.values()] + TRENDS, ids=str)
def test_transitions_are_differentiable_in_the_gaps(kernel):
    dynamics, step = dynamics_of(kernel), 1e-6
    gaps = torch.tensor([1e-3, 0.02, 0.3, 0.9, 2.0], dtype=torch.float64)
    rng = np.random.default_rng(0)
    bars = torch.from_numpy(rng.standard_normal((2, dynamics.n_states, dynamics.n_states, 5)))

    def contraction(at):
        return sum(
            (part * bar).sum((0, 1))
            for part, bar in zip(dynamics.transition(at), bars, strict=True)
        )

    moving = gaps.clone().requires_grad_()
    (found,) = torch.autograd.grad(contraction(moving).sum(), moving)
    expected = (contraction(gaps + step) - contraction(gaps - step)) / (2 * step)
    assert (found - expected).abs().max() < 1e-7 * (1 + expected.abs().max())


@each_series_kernel()
def test_stationary_gradient_equals_finite_differences(case):
    form = state_space(case.make())
    parameters = form.parameters()
    P_bar = torch.from_numpy(np.random.default_rng(1).standard_normal((form.n_states,) * 2))
    gradient = form.at(parameters).stationary_gradient(P_bar)
    expected = by_finite_differences(lambda p: (form.at(p).stationary * P_bar).sum(), parameters)
    assert (gradient - expected).abs().max() < 1e-9


@each_series_kernel()
def test_parameters_are_differentiable_in_theta(case):
    kernel = case.make()
    form, theta = state_space(kernel), torch.tensor(kernel.theta)
    assert torch.allclose(form.parameters(theta), form.parameters(), rtol=1e-13)
    assert form.parameters().shape == (form.n_parameters,)
    jacobian = torch.autograd.functional.jacobian(form.parameters, theta)
    expected = by_finite_differences(form.parameters, theta, 1e-3)
    assert (jacobian - expected).abs().max() < 1e-9 * (1 + expected.abs().max())


def test_a_periodic_kernel_without_variation_has_finite_weights():
    form = state_space(ExpSineSquared(0.15, 1.0))
    theta = torch.tensor([math.log(1e5), 0.0], dtype=torch.float64, requires_grad=True)
    parameters = form.parameters(theta)  # the last weights are below the least float
    parameters[1].backward()
    assert parameters.isfinite().all() and theta.grad.isfinite().all()


@pytest.mark.parametrize("length_scale", [3.1e-5, 1e-5])
def test_a_periodic_kernel_of_the_shortest_length_scale_is_finite(length_scale):
    kernel = ExpSineSquared(length_scale, 1.0)
    theta = torch.tensor(kernel.theta, requires_grad=True)
    parameters = state_space(kernel).parameters(theta)
    parameters.sum().backward()
    assert parameters.isfinite().all() and theta.grad.isfinite().all()


def test_bessel_functions_go_on_where_scipy_has_none():
    order = np.array([0, 1, 5, 32, 90_000])
    below, above = (scaled_bessel(order, z) * math.sqrt(z) for z in (9.999e8, 1e9))
    np.testing.assert_allclose(above, below, rtol=1e-3)
    np.testing.assert_allclose(above[:4], below[:4], rtol=1e-9)


# Structure ----------------------------------------------------------------------------------------


def test_summands_pick_their_share():
    kernel = 2.0 * Matern(nu=1.5) + RBF(3.0) + (Matern(nu=0.5) + 0.5) * ConstantKernel(0.7)
    form = state_space(kernel)
    dynamics, shares = form.at(), form.summands()
    assert [str(part) for part, _ in shares] == [
        str(kernel.k1.k1),
        str(kernel.k1.k2),
        str(kernel.k2),
    ]
    assert torch.equal(sum(row for _, row in shares), dynamics.observation)
    F, _ = dynamics.transition(GAPS)
    for part, row in shares:
        covariance = product(F, dynamics.stationary) @ row @ row
        assert (covariance - dense(part, GAPS)).abs().max() < 1e-5


def test_equal_products_of_a_power_are_collected():
    form = state_space((Matern(nu=0.5) + Matern(nu=1.5) + 0.5) ** 3)
    assert len(form.order) == 10  # of 27


def test_the_form_is_a_copy_and_pickles_small():
    kernel = 2.0 * RBF(1.0) + Matern(nu=1.5)
    form = state_space(kernel)
    kernel.k2.length_scale = 9.0
    assert form.kernel.k2.length_scale == 1.0
    data = pickle.dumps((form, form.at()))
    assert len(data) < 5000
    again, dynamics = pickle.loads(data)
    assert_same(again.parameters(), form.parameters())
    assert dynamics.blocks[0][1].primitives[0] is again.at().blocks[0][1].primitives[0]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (DotProduct() + Matern(), "DotProduct.* has no state-space form.*use Matern, RBF"),
        (Exponentiation(Matern(), 0.5), "whole exponents >= 1"),
        (Matern() + WhiteKernel(), "split_noise"),
        (Matern([1.0, 2.0], nu=1.5), "has 2 elements"),
        (RBF([1.0, 2.0]), "has 2 elements"),
        (ActiveDims(Matern(), [0, 1]), "must see one column"),
        (ActiveDims(Matern(), [0]) + ActiveDims(Matern(), [2]), r"columns \[0, 2\]"),
        (ActiveDims(ActiveDims(Matern(), [1]), [2]), "must see one column"),
    ],
    ids=str,
)
def test_kernels_without_a_form_are_named(kernel, message):
    assert not has_state_space(kernel)
    with pytest.raises(ValueError, match=message):
        state_space(kernel)


def test_parameters_of_another_shape_are_refused():
    form = state_space(Matern(nu=1.5))
    with pytest.raises(ValueError, match=r"parameters must have shape \(2,\), got \(3,\)"):
        form.at(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    "kernel, exact",
    [
        (2.0 * Matern(0.5, nu=1.5) + Cosine(3.0) * Matern(2.0, nu=0.5), True),
        (Matern() + RBF(0.3), False),
        (Matern() + ExpSineSquared(1.0, 2.0), False),  # the error is that of its length scale
    ],
)
def test_exact_forms_have_no_error_at_any_hyper_parameters(kernel, exact):
    form = state_space(kernel)
    assert form.is_exact == exact
    if exact:
        assert form.error(torch.randn(len(kernel.theta), dtype=torch.float64)) == 0
