"""Random Fourier features: unbiased, random access, differentiable."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import (
    RBF,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    PairwiseKernel,
    RationalQuadratic,
    WhiteKernel,
)

from skgp.kernels import ActiveDims, Cosine, FourierFeatures, gram, has_spectral_density, spectral
from skgp.kernels.spectra import GAUSSIAN_ROWS
from tests.contracts.kernels import ARD, N_INPUTS, each_kernel
from tests.same import assert_same

each_kind = pytest.mark.parametrize("kind", GAUSSIAN_ROWS)


def inputs(n, d=N_INPUTS, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)))


def estimates(kernel, X, n_features, n_draws, theta=None, **options):
    """Phi Phi' for seeds 0, 1, ..., shape (n_draws, n, n)."""
    grams = []
    for seed in range(n_draws):
        phi = FourierFeatures(kernel, n_features, X.shape[1], seed=seed, **options)
        features = phi.all_features(X, theta)
        grams.append(features @ features.T)
    return torch.stack(grams)


def assert_unbiased(draws, expected):
    """|z| < 4 for every entry; entries without randomness must agree to rounding."""
    error = draws.mean(0) - expected
    spread = draws.std(0) / len(draws) ** 0.5
    assert (error.abs() < 4 * spread + 1e-12).all(), (error / spread).abs().max()


# Unbiasedness ---------------------------------------------------------------------------------


@each_kernel(spectral=True)
def test_features_are_unbiased_away_from_the_kernels_own_theta(make_kernel):
    kernel, X = make_kernel(), inputs(4)
    theta = torch.from_numpy(kernel.theta + np.linspace(-0.2, 0.3, kernel.n_dims))
    # Three blocks of 8, 8 and 4 frequencies.
    draws = estimates(kernel, X, 40, 40, theta, block_size=8)
    assert_unbiased(draws, gram(kernel, X, theta=theta))


@each_kind
def test_features_are_unbiased_in_more_columns_than_a_group(kind):
    kernel, X = 1.3 * Matern(6.0, nu=1.5), inputs(5, d=40)
    assert_unbiased(estimates(kernel, X, 200, 150, kind=kind), gram(kernel, X))


@each_kernel(spectral=True)
def test_gradient_of_features_is_unbiased(make_kernel):
    kernel, X = make_kernel(), inputs(4)
    if not kernel.n_dims:
        pytest.skip("no free hyper-parameter")
    G = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 4)))
    theta = torch.tensor(kernel.theta, requires_grad=True)
    slopes = []
    for seed in range(40):
        features = FourierFeatures(kernel, 40, N_INPUTS, seed=seed).all_features(X, theta)
        slopes.append(torch.autograd.grad((G * (features @ features.T)).sum(), theta)[0])
    (expected,) = torch.autograd.grad((G * gram(kernel, X, theta=theta)).sum(), theta)
    # 1e-8: alpha's quantile is differentiated numerically.
    draws, spread = torch.stack(slopes), torch.stack(slopes).std(0) / len(slopes) ** 0.5
    assert ((draws.mean(0) - expected).abs() < 4 * spread + 1e-8).all()


@each_kernel(spectral=True)
def test_features_of_stationary_kernels_have_the_exact_variance(make_kernel):
    """cos^2 + sin^2 = 1: the amplitudes alone make the diagonal."""
    kernel, X = make_kernel(), inputs(3)
    phi = FourierFeatures(kernel, 46, N_INPUTS, seed=1, block_size=9)
    diagonal = phi.all_features(X).square().sum(1)
    torch.testing.assert_close(
        diagonal, torch.from_numpy(kernel.diag(X.numpy())), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize(
    "kernel",
    [
        Cosine(1.3) * Cosine(2.1),  # needs both signs
        ExpSineSquared(0.7, 1.9) * ExpSineSquared(0.9, 1.3),  # needs independent harmonics
        ExpSineSquared(0.7, 1.9) ** 2,
    ],
    ids=repr,
)
def test_features_of_products_of_line_spectra_are_unbiased(kernel):
    X = inputs(5, d=1)
    assert_unbiased(estimates(kernel, X, 40, 300), gram(kernel, X))


# Variance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "d"), [("orthogonal", 8), ("hadamard", 64)])
def test_orthogonal_directions_lower_the_variance(kind, d):
    # The theory [Yu et al. 2016] promises most at moderate |x - z|; the length scale makes it 1.
    X = torch.zeros(2, d, dtype=torch.float64)
    X[1] = 1 / d**0.5
    n_features = 4 * d
    iid, other = (
        estimates(RBF(), X, n_features, 300, kind=k)[:, 0, 1].var() for k in ("iid", kind)
    )
    assert other < 0.3 * iid


def test_harmonics_are_sampled_systematically():
    kernel, X = ActiveDims(ExpSineSquared(0.7, 1.9), [0]), inputs(5)
    errors = [
        (estimates(kernel, X, n_features, 30) - gram(kernel, X)).abs().mean()
        for n_features in (100, 1000)
    ]
    assert errors[0] < 0.02  # independent sampling: 1 / sqrt(50) = .14
    assert errors[1] < errors[0] / 4


def test_frequencies_are_shared_by_variance_with_one_a_block_for_each_term():
    kernel = 6.0 * RBF() + 2.0 * Matern() + 1e-6 * RBF(0.1) + 50.0 * ConstantKernel(2.0)
    phi = FourierFeatures(kernel, 2 * 250, 1, seed=0, block_size=100)
    assert phi.n_blocks == 3
    # Blocks of 100, 100 and 50: one each for the faint term and the bias, the rest 3 to 1.
    assert phi.n_frequencies == (74 + 74 + 36, 24 + 24 + 12, 3, 3)
    assert sum(phi.n_frequencies) == 250


def test_short_last_block_serves_the_largest_terms():
    kernel = 1.0 * RBF() + 3.0 * Matern() + 2.0 * RBF(0.1)
    phi = FourierFeatures(kernel, 2 * 7, 1, seed=0, block_size=5)
    assert sum(phi.n_frequencies) == 7
    assert phi.features(inputs(4, 1), 1).shape == (4, 4)
    assert_unbiased(
        estimates(kernel, inputs(3, 1), 14, 400, block_size=5), gram(kernel, inputs(3, 1))
    )


# Layout and random access -----------------------------------------------------------------------


@each_kind
def test_random_access_equals_sequential_access(kind):
    kernel, X = 1.3 * Matern(6.0, nu=1.5) + RationalQuadratic(), inputs(3)
    options = {"kind": kind, "seed": 5, "block_size": 9}
    phi = FourierFeatures(kernel, 50, N_INPUTS, **options)
    whole = phi.all_features(X)
    assert whole.shape == (3, 50) and phi.n_blocks == 3 and phi.block_features == 18
    again = FourierFeatures(kernel, 50, N_INPUTS, **options)
    stops = []
    for block in (2, 0, 1, 2):
        columns = again.block_slice(block)
        stops.append((columns.start, columns.stop))
        assert_same(again.features(X, block), whole[:, columns])
    assert stops[1:] == [(0, 18), (18, 36), (36, 50)]


def test_blocks_differ_from_each_other_and_between_seeds():
    kernel, X = RBF(), inputs(1)
    phi = FourierFeatures(kernel, 40, N_INPUTS, seed=0, block_size=10)
    other = FourierFeatures(kernel, 40, N_INPUTS, seed=1, block_size=10)
    blocks = [p.features(X, b) for p in (phi, other) for b in (0, 1)]
    for i in range(4):
        for j in range(i):
            assert not torch.isclose(blocks[i], blocks[j]).any()


def test_blocks_do_not_depend_on_what_is_kept(monkeypatch):
    kernel, X = 2.0 * RBF() + RationalQuadratic(), inputs(2)
    kept = FourierFeatures(kernel, 60, N_INPUTS, seed=3, block_size=10)
    expected = kept.all_features(X)
    assert_same(kept.all_features(X), expected)
    monkeypatch.setattr(spectral, "CACHE_BYTES", 700)  # two blocks of three
    fresh = FourierFeatures(kernel, 60, N_INPUTS, seed=3, block_size=10)
    assert_same(fresh.all_features(X), expected)
    assert len(fresh._cache) == 2
    copy = pickle.loads(pickle.dumps(kept))
    assert not copy._cache
    assert_same(copy.all_features(X), expected)


def test_features_of_many_millions_cost_one_block():
    phi = FourierFeatures(2.0 * RBF(), 10_000_000, 4, seed=0)
    assert phi.n_blocks == 5000
    assert phi.features(inputs(3, 4), 4999).shape == (3, 2000)
    assert phi.block_slice(4999) == slice(9_998_000, 10_000_000)
    assert len(pickle.dumps(phi)) < 10_000


def test_features_are_neighbouring_cosines_and_sines():
    kernel, X = 2.0 * RBF(ARD) + Matern(), inputs(4)
    phi = FourierFeatures(kernel, 20, N_INPUTS, seed=0)
    W, amplitude = phi.frequencies(0)
    features = phi.features(X, 0)
    torch.testing.assert_close(features[:, 0::2], amplitude * torch.cos(X @ W.T))
    torch.testing.assert_close(features[:, 1::2], amplitude * torch.sin(X @ W.T))


def test_kernel_may_change_after_construction():
    kernel, X = 2.0 * RBF(), inputs(2)
    phi = FourierFeatures(kernel, 20, N_INPUTS, seed=0)
    expected = phi.all_features(X)
    kernel.k1.constant_value = 9.0
    assert_same(phi.all_features(X), expected)


@pytest.mark.parametrize("d", [3, 40])
@pytest.mark.parametrize("n", [0, 1, 700])
def test_features_in_float32(d, n):
    kernel, X = 2.0 * RBF(float(d) ** 0.5), inputs(n, d)
    phi = FourierFeatures(kernel, 1000, d, seed=0, block_size=400)
    exact = phi.features(X, 0)
    assert exact.dtype == torch.float64 and exact.shape == (n, 800)
    single = phi.features(X.float(), 0)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=2e-6)


# Gradients --------------------------------------------------------------------------------------


@each_kernel(spectral=True)
def test_features_gradient_in_theta_equals_differences(make_kernel):
    kernel, X = make_kernel(), inputs(3)
    if not kernel.n_dims:
        pytest.skip("no free hyper-parameter")
    phi = FourierFeatures(kernel, 14, N_INPUTS, seed=2, block_size=4)
    theta = torch.tensor(kernel.theta + 0.05, requires_grad=True)
    with torch.no_grad():
        expected = phi.all_features(X, theta)
    assert_same(phi.all_features(X, theta), expected)
    assert torch.autograd.gradcheck(lambda t: phi.all_features(X, t), (theta,), atol=1e-6)


@pytest.mark.parametrize("d", [3, 40])
def test_features_gradient_in_the_inputs_equals_differences(d):
    phi = FourierFeatures(2.0 * RBF(2.0), 14, d, seed=2)
    X = inputs(2, d).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: phi.features(x, 0), (X,))
    assert torch.autograd.gradgradcheck(lambda x: phi.features(x, 0), (X,))


def test_features_gradient_flows_from_float32_inputs_to_float64_theta():
    kernel = 2.0 * RBF(ARD)
    phi, X = FourierFeatures(kernel, 30, N_INPUTS, seed=2), inputs(5)
    theta = torch.tensor(kernel.theta, requires_grad=True)
    slopes = [
        torch.autograd.grad(phi.features(x, 0, theta).sum(), theta)[0] for x in (X.float(), X)
    ]
    assert slopes[0].dtype == torch.float64
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kernel",
    [
        RationalQuadratic(1.0, alpha=1e-5),
        RationalQuadratic(1.0, alpha=1e5),
        ExpSineSquared(1e-3, 1.0),
        ExpSineSquared(1e5, 1.0),
        1e-5 * RBF(1e5),
    ],
)
def test_features_are_finite_at_the_bounds(kernel):
    X = inputs(4, 1)
    theta = torch.tensor(kernel.theta, requires_grad=True)
    phi = FourierFeatures(kernel, 60, 1, seed=0)
    features = phi.all_features(X, theta)
    features.square().sum().backward()
    assert torch.isfinite(features).all() and torch.isfinite(theta.grad).all()


# Errors -----------------------------------------------------------------------------------------


@each_kernel()
def test_has_spectral_density_agrees_with_the_contract(make_kernel, request):
    name = request.node.callspec.id
    kernel = make_kernel()
    # ExpSineSquared has one, but on a single column only.
    expected = not any(word in name for word in ("root", "dot", "poly", "linear"))
    assert has_spectral_density(kernel) is expected


@each_kernel(spectral=False)
def test_kernels_without_spectral_density_are_refused(make_kernel):
    with pytest.raises(ValueError):
        FourierFeatures(make_kernel(), 100, N_INPUTS, seed=0)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (RBF() + 2.0 * DotProduct(0.5), r"DotProduct\(sigma_0=0.5\).*\"inducing\""),
        (RBF() ** 0.5, "exponent 0.5"),
        (RBF() + WhiteKernel(0.2), r"WhiteKernel\(noise_level=0.2\).*split_noise"),
        (ExpSineSquared(), r"one column, X has 3.*ActiveDims\(ExpSineSquared"),
        (Cosine(), "one column, X has 3"),
        (RBF([1.0, 2.0]), "length_scale of .* has 2 elements and X has 3"),
        (ActiveDims(RBF(), [3]), "at least 4 columns, X has 3"),
        (sum([RBF()] * 3, RBF()) ** 2, "16 terms.*raise n_features to 32"),
    ],
)
def test_constructor_names_what_does_not_fit_and_the_remedy(kernel, message):
    with pytest.raises(ValueError, match=message):
        FourierFeatures(kernel, 20, 3, seed=0)


def test_constructor_refuses_unsupported_kernels_and_values_out_of_range():
    with pytest.raises(TypeError, match="PairwiseKernel"):
        FourierFeatures(PairwiseKernel(), 20, 3, seed=0)
    for options, message in [
        ({"n_features": 21}, "even.*got 21"),
        ({"n_features": 0}, "even.*got 0"),
        ({"n_inputs": 0}, "n_inputs must be >= 1"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**64}, "seed must be"),
        ({"kind": "sobol"}, "kind must be one of .*got 'sobol'"),
    ]:
        with pytest.raises(ValueError, match=message):
            FourierFeatures(RBF(), **{"n_features": 20, "n_inputs": 3, "seed": 0, **options})


def test_features_refuse_what_does_not_fit():
    phi = FourierFeatures(RBF(), 20, 3, seed=0)
    X = inputs(4)
    with pytest.raises(ValueError, match=r"X must be .*\(n, 3\), got shape \(4, 2\)"):
        phi.features(X[:, :2], 0)
    for block in (-1, 1):
        with pytest.raises(ValueError, match=f"block must be in 0..0, got {block}"):
            phi.features(X, block)
        with pytest.raises(ValueError, match="block must be"):
            phi.block_slice(block)
    rough = FourierFeatures(ExpSineSquared(1e-8), 20, 1, seed=0)
    with pytest.raises(ValueError, match="10 million harmonics.*length_scale must be above"):
        rough.features(X[:, :1], 0)
