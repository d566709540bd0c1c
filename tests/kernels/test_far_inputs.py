"""Inputs far from the others: they change no other entry, and nothing overflows."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, Matern, RationalQuadratic

from skgp.kernels import FourierFeatures, gram, gram_diag, gram_tile
from skgp.kernels.distances import METRICS
from skgp.kernels.gradients import bilinear_gradient, weighted_gradient
from skgp.kernels.operators import KernelOperator, RowOperator
from tests.contracts.kernels import N_INPUTS, each_kernel

#: Kernels that fall to 0; the power of the distance with which the rational quadratic does is 4.
DECAYING = {
    "rbf": 1.3 * RBF([0.7, 1.9, 1.2]),
    "matern12": 1.3 * Matern(0.9, nu=0.5),
    "matern32": 1.3 * Matern([0.7, 1.9, 1.2], nu=1.5),
    "matern52": 1.3 * Matern(1.4, nu=2.5),
    "rational-quadratic": 1.3 * RationalQuadratic(1.1, alpha=2.0),
    "sum-of-products": RBF(0.5) * Matern(2.0, nu=0.5) + 0.3 * RationalQuadratic(1.1, alpha=2.0),
}
decaying = pytest.mark.parametrize("kernel", DECAYING.values(), ids=DECAYING)
FAR = [1e6, 1e8, 1e10, 1e100, 1e300]
READINGS = {
    "direct": lambda kernel, X, Z: gram(kernel, X, Z),
    "expand": lambda kernel, X, Z: gram(kernel, X, Z, method="expand"),
    "tile": gram_tile,
}


def inputs(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, N_INPUTS)))


def with_far(X, value, n=3):
    """X and n rows far away, all different."""
    beyond = value * torch.linspace(1.0, 0.5, n * X.shape[1], dtype=X.dtype).view(n, -1)
    return torch.cat([beyond, X])


@pytest.mark.parametrize("reading", READINGS)
@decaying
def test_far_rows_change_no_other_covariance_and_have_none_with_the_others(kernel, reading):
    read, X, Z = READINGS[reading], inputs(5), inputs(6, seed=1)
    near = read(kernel, X, Z)
    for far in FAR:
        beyond = with_far(X, far)
        K = read(kernel, beyond, Z)
        assert K[:3].abs().max() < 1e-16
        torch.testing.assert_close(K[3:], near, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            read(kernel, X, with_far(Z, far))[:, 3:], near, rtol=0, atol=1e-13
        )
        torch.testing.assert_close(
            read(kernel, beyond, beyond).diagonal(), gram_diag(kernel, beyond)
        )


@each_kernel()
def test_no_far_row_makes_a_covariance_infinite(make_kernel):
    kernel, X = make_kernel(), with_far(inputs(5), 1e70)
    for read in READINGS.values():
        for left, right in ((X, inputs(6)), (inputs(6), X), (X, X)):
            assert read(kernel, left, right).isfinite().all()


@pytest.mark.parametrize("method", ["direct", "expand"])
@decaying
def test_far_rows_change_no_gradient(kernel, method):
    def gradients(X, W):
        X, theta = X.clone().requires_grad_(), torch.tensor(kernel.theta, requires_grad=True)
        (W * gram(kernel, X, theta=theta, method=method)).sum().backward()
        return theta.grad, X.grad

    X, n = inputs(7), 10
    W = torch.ones(n, n, dtype=torch.float64)
    W[:3, :3] = 0
    near_theta, near_X = gradients(X, W[3:, 3:])
    for far in FAR:
        theta, all_X = gradients(with_far(X, far), W)
        torch.testing.assert_close(theta, near_theta, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(all_X[3:], near_X, rtol=1e-10, atol=1e-12)
        assert all_X.isfinite().all()


@decaying
def test_far_rows_change_no_closed_gradient(kernel):
    X = inputs(7)
    U, V = inputs(10, seed=2).T, inputs(10, seed=3).T
    U[:, :3] = 0
    expected = bilinear_gradient(kernel, X, U[:, 3:], V[:, 3:])
    for far in (1e8, 1e10, 1e100):
        rows = with_far(X, far)
        by_vectors = bilinear_gradient(kernel, rows, U, V)
        by_matrix = weighted_gradient(kernel, rows, rows, U.T @ V)
        for found in (by_vectors, by_matrix):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@decaying
def test_rows_far_away_and_near_to_each_other_keep_their_gradient(kernel):
    offset = 2.0**30
    steps = (inputs(8) * 2**10).round() / 2**10  # exact after the offset
    X = torch.cat([inputs(1), steps + offset])
    W = torch.ones(8, 8, dtype=torch.float64)
    everything = torch.zeros(9, 9, dtype=torch.float64)
    everything[1:, 1:] = W
    expected = weighted_gradient(kernel, steps, steps, W)
    torch.testing.assert_close(
        weighted_gradient(kernel, X, X, everything), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("metric", ["direct", "expand"])
@pytest.mark.parametrize("offset", [2.0**17, 2.0**30])
def test_distances_among_some_far_rows_and_their_gradient_keep_their_digits(offset, metric):
    """d (x - x')^2 / l^2 by d l is -2 (x - x')^2 / l^3; two of six inputs are far."""
    steps = (inputs(6) * 2**10).round() / 2**10  # exact after the offset, and over powers of two
    X = torch.cat([steps[:4], steps[4:] + offset])
    W = torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    W[:, :4, 4:], W[:, 4:, :4] = 0, 0  # as a kernel that decays weighs distances
    scale = X.new_tensor([0.5, 2.0])[:, None, None].expand(2, 1, N_INPUTS).clone().requires_grad_()
    A = X / scale
    D = METRICS[metric].squared(A, A, True)
    exact = (X[:, None] - X).square() / scale.detach()[:, None] ** 2  # (2, 6, 6, d)
    torch.testing.assert_close(D, exact.sum(-1), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad((W * D).sum(), scale)
    expected = -2 * torch.einsum("bij,bijk->bk", W, exact)[:, None] / scale.detach()
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14 * offset)


@decaying
def test_operators_of_rows_far_away_are_dense_matrices(kernel):
    X = with_far(inputs(20), 1e8)
    V = inputs(23, seed=4)
    expected = gram(kernel, X) @ V
    operator = KernelOperator(kernel, X, dtype=torch.float64)
    torch.testing.assert_close(operator.matmul(V), expected, rtol=1e-12, atol=1e-10)
    rows = RowOperator(kernel, X)
    rows.set_theta(torch.tensor(kernel.theta))
    torch.testing.assert_close(rows.matmul(V.T), expected.T, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("make", [RBF, Matern, lambda scale: Matern(scale, nu=2.5)])
def test_units_and_offsets_change_no_covariance(make, reading):
    read, X, Z, scale = READINGS[reading], inputs(5), inputs(6, seed=1), np.array([0.7, 1.9, 1.2])
    expected = gram(make(scale), X, Z)
    units = torch.tensor([1e-12, 1.0, 1e12], dtype=torch.float64)
    covariance = read(make(scale * units.numpy()), X * units, Z * units)
    torch.testing.assert_close(covariance, expected, rtol=1e-12, atol=1e-12)
    moved, others = X + 1e9, Z + 1e9
    torch.testing.assert_close(
        read(make(scale), moved, others),
        gram(make(scale), moved - 1e9, others - 1e9),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("kernel", [RBF([0.7, 1.9, 1.2]), Matern(0.9, nu=0.5)], ids=["rbf", "m12"])
def test_fourier_features_do_not_depend_on_the_rows_beside(kernel):
    features = FourierFeatures(kernel, 200, N_INPUTS, seed=0, origin=np.zeros(N_INPUTS))
    X = torch.cat([with_far(inputs(30), far) for far in (1e6, 1e10, 1e15, 1e100)])
    together = features.all_features(X)
    alone = torch.cat([features.all_features(row) for row in X.split(1)])
    assert together.isfinite().all()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-7)


def test_fourier_features_far_from_zero_are_those_from_an_origin():
    X = (inputs(6) * 2**10).round() / 2**10  # exact after the offset
    moved = FourierFeatures(RBF(0.8), 100, N_INPUTS, seed=0, origin=np.full(N_INPUTS, 2.0**30))
    at_zero = FourierFeatures(RBF(0.8), 100, N_INPUTS, seed=0)
    torch.testing.assert_close(
        moved.all_features(X + 2.0**30), at_zero.all_features(X), rtol=0, atol=1e-12
    )
