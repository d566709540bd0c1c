"""Reading expressions: what is supported, where the noise is, which theta belongs to whom."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    PairwiseKernel,
    WhiteKernel,
)

from skgp.kernels import (
    ActiveDims,
    Cosine,
    check_kernel,
    gram,
    register_kernel,
    split_noise,
    split_theta,
    stationary,
)
from tests.contracts.kernels import each_kernel


@each_kernel()
def test_check_kernel_accepts_every_contract_kernel_and_noise(make_kernel):
    check_kernel(make_kernel() + WhiteKernel())


class RBFChild(RBF):
    """A subclass may compute anything, so it is not read as its parent."""


@pytest.mark.parametrize(
    "part", [CompoundKernel([RBF(), RBF()]), PairwiseKernel(), RBFChild(), "rbf", None]
)
def test_check_kernel_names_the_unsupported_part_and_the_supported_ones(part):
    said = rf"{type(part).__name__}.*RBF, Matern.*WhiteKernel, (?!Far).*Sum, .*register_kernel"
    with pytest.raises(TypeError, match=said):
        check_kernel(part)
    if not isinstance(part, str | None):
        with pytest.raises(TypeError, match=type(part).__name__):
            check_kernel(ActiveDims(2.0 * RBF() + part, [0]) ** 2)


def test_check_kernel_refuses_matern_without_closed_form():
    with pytest.raises(ValueError, match=r"Matern\(nu=1.0\).*0.5, 1.5, 2.5"):
        check_kernel(2.0 * Matern(nu=1.0))


def test_register_kernel_refuses_what_is_not_a_new_kernel_class():
    with pytest.raises(TypeError, match="not an instance"):
        register_kernel(RBF(), lambda kernel, params, X, Z: X @ Z.mT)
    with pytest.raises(ValueError, match="cls=RBF"):
        register_kernel(RBF, lambda kernel, params, X, Z: X @ Z.mT)
    with pytest.raises(TypeError, match="callable"):
        register_kernel(RBFChild, "rbf")


def test_registered_function_receives_hyper_parameters_on_the_natural_scale(monkeypatch):
    monkeypatch.setattr("skgp.kernels.expression._REGISTERED", {})
    seen = {}

    def read(kernel, params, X, Z):
        seen.update(params)
        return X @ Z.mT * params["length_scale"]

    register_kernel(RBFChild, read)
    theta = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    K = gram(2.0 * RBFChild(3.0), torch.ones(2, 1, dtype=torch.float64), theta=theta)
    torch.testing.assert_close(seen["length_scale"], theta[1].exp())
    K.sum().backward()
    torch.testing.assert_close(theta.grad, K.sum().expand(2).detach())


def test_stationary_is_that_of_every_part():
    assert stationary(2.0 * RBF() + ActiveDims(Cosine(), [1]))
    assert stationary(ExpSineSquared() * Matern() + WhiteKernel())
    assert not stationary(RBF() + DotProduct())
    assert not stationary(ActiveDims(DotProduct(), [1]))


a, b, c = 2.0 * RBF([1.0, 3.0]), Matern(0.5), DotProduct(0.1)
noise = WhiteKernel(0.3)


@pytest.mark.parametrize(
    ("kernel", "signal"),
    [
        (a + noise, a),
        (noise + a, a),
        ((a + noise) + b, a + b),
        (a + (noise + b), a + b),
        (a + (b + noise) + c, a + b + c),
        ((a + b) + (noise + c), (a + b) + c),
    ],
)
def test_split_noise_keeps_the_other_summands_in_order(kernel, signal):
    found, white = split_noise(kernel)
    assert found == signal
    assert white is noise
    assert (found.theta == signal.theta).all()
    theta = torch.arange(kernel.n_dims, dtype=torch.float64)
    theta_signal, log_noise = split_theta(kernel, theta)
    # The elements of theta are numbered: follow them to the same parts of both expressions.
    numbered = kernel.clone_with_theta(theta.numpy())
    expected, white = split_noise(numbered)
    np.testing.assert_allclose(theta_signal, expected.theta, rtol=1e-12)
    assert log_noise.ndim == 0
    np.testing.assert_allclose(log_noise, np.log(white.noise_level), rtol=1e-12)


def test_split_noise_without_noise_returns_the_kernel_itself():
    kernel = a + b
    assert split_noise(kernel) == (kernel, None)
    assert split_noise(kernel)[0] is kernel
    theta = torch.tensor(kernel.theta, requires_grad=True)
    theta_signal, log_noise = split_theta(kernel, theta)
    assert torch.equal(theta_signal, theta) and log_noise is None


def test_split_theta_of_fixed_noise_is_a_constant():
    kernel = ConstantKernel(2.0, "fixed") * RBF() + WhiteKernel(0.3, "fixed") + b
    theta = torch.tensor(kernel.theta, requires_grad=True)
    theta_signal, log_noise = split_theta(kernel, theta)
    assert torch.equal(theta_signal, theta)
    np.testing.assert_allclose(log_noise.exp(), 0.3, rtol=1e-12)
    assert not log_noise.requires_grad


def test_split_theta_lets_gradients_through():
    kernel = a + noise + b
    theta = torch.tensor(kernel.theta, requires_grad=True)
    theta_signal, log_noise = split_theta(kernel, theta)
    (theta_signal.sum() + 10 * log_noise).backward()
    assert theta.grad.tolist() == [1, 1, 1, 10, 1]


def test_split_theta_refuses_another_length():
    with pytest.raises(ValueError, match=r"shape \(4,\), got \(3,\)"):
        split_theta(a + noise, torch.zeros(3))


@pytest.mark.parametrize(
    "kernel",
    [a * noise, a + 2.0 * noise, noise**2, ActiveDims(b + noise, [0]), (a + noise) * b],
)
def test_split_noise_refuses_noise_below_the_top(kernel):
    with pytest.raises(ValueError, match=r"WhiteKernel inside .*summand at the top"):
        split_noise(kernel)


def test_split_noise_refuses_two_noises_and_noise_alone():
    with pytest.raises(ValueError, match="2 WhiteKernel summands"):
        split_noise(a + noise + WhiteKernel(0.1))
    with pytest.raises(ValueError, match="noise alone"):
        split_noise(noise)
    with pytest.raises(TypeError, match="PairwiseKernel"):
        split_noise(PairwiseKernel() + noise)


@each_kernel()
def test_bind_reads_theta_as_scikit_learn_does(make_kernel):
    """With every free hyper-parameter at another value, order mistakes cannot cancel."""
    kernel = make_kernel()
    theta = kernel.theta + 0.1 * np.arange(1, kernel.n_dims + 1)
    X = np.random.default_rng(0).standard_normal((4, 3))
    K = gram(kernel, torch.from_numpy(X), theta=torch.from_numpy(theta))
    np.testing.assert_allclose(K, kernel.clone_with_theta(theta)(X), rtol=1e-12)
