"""Length scales and amplitude by labels left out, against dense fits without them."""

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.datasets import load_digits
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern
from sklearn.metrics import log_loss

from skgp import QSGPClassifier
from skgp.data import Data
from skgp.learning.defaults import FEW_ROWS_MODERATION
from skgp.learning.label_scales import (
    capped,
    latent_numbers,
    left_out_losses,
    likeliest_scales,
    refine_length_scales,
    rescale_few,
    scaled,
    search_by_numbers,
)
from skgp.learning.search import SearchSettings
from skgp.likelihoods import Bernoulli, Poisson
from tests.reference import laplace_evidence as oracle
from tests.reference.gaussian import left_out
from tests.reference.kernels import naive_gram

ZERO = torch.zeros(1, dtype=torch.float64)


def waves(n, seed=0):
    """Labels of a function of length scale about 0.3 on the unit square, almost without noise."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    f = torch.sin(12 * X[:, 0]) + torch.sin(12 * X[:, 1])
    return X, torch.where(f > 0, 1.0, -1.0).double()[:, None]


def test_capped_labels_of_one_input_keep_the_ratio_of_their_weights():
    X, Y = waves(9)
    X[1], Y[:2, 0], weight = X[0], torch.tensor([1.0, -1.0]), torch.ones(9, dtype=torch.float64)
    weight[:2] = torch.tensor([1e4, 1e6])
    Y[2:, 0] = torch.tensor([1.0, -1, 1, -1, 1, -1, 1])
    found = capped(Data(X, Y, weight)).weight
    np.testing.assert_allclose(found, [1.0, 100.0, *[1.0] * 7])


# ---- few observations -------------------------------------------------------------------------


def test_left_out_losses_are_of_a_dense_process_without_the_input():
    X, Y = waves(30)
    X[1] = X[0]  # observations of one input are left out together
    weight = torch.linspace(0.5, 2.0, 30, dtype=torch.float64)
    kernel = ConstantKernel(4.0) * RBF(0.4)
    data = Data(X, Y, weight)
    losses, moderation = left_out_losses(kernel, data, Bernoulli("probit"), ZERO + 0.2)
    K = naive_gram(kernel, X.numpy()) + 1e-9 * np.eye(30)
    y, w = Y[:, 0].numpy(), weight.numpy()
    # A process of Gaussian numbers whose posterior is the approximation of all labels.
    likelihood = oracle.probit(y)
    g = oracle.laplace(K, likelihood, 0.2, w)[0]
    _, slope, second = likelihood(0.2 + g)
    W = -w * second
    z = g - slope / second
    for i in range(30):
        kept = np.delete(np.arange(30), [0, 1] if i < 2 else [i])
        mean, variance = left_out(K, 1 / W, z, i, kept)
        expected = norm.logcdf(y[i] * (0.2 + mean) / np.sqrt(1 + moderation * variance))
        assert -losses[i] == pytest.approx(expected, rel=1e-5)


def test_a_kernel_of_few_labels_moves_where_labels_left_out_gain_and_stays_elsewhere():
    X, Y = waves(150)
    data, likelihood = Data(X, Y), Bernoulli()
    smooth = ConstantKernel(4.0) * RBF([2.0, 4.0])
    found = rescale_few(smooth, data, data, likelihood, ZERO)
    assert found.k2.length_scale[0] < 1.0
    assert found.k2.length_scale[1] == pytest.approx(2 * found.k2.length_scale[0])
    before, after = (left_out_losses(k, data, likelihood, ZERO)[0].mean() for k in (smooth, found))
    assert after < before - 0.1
    assert rescale_few(found, data, data, likelihood, ZERO) is None
    assert rescale_few(smooth, data, data, likelihood, ZERO, callback=lambda *_: True) is None
    fixed = ConstantKernel(4.0, "fixed") * RBF([2.0, 4.0], (1.9, 4.1))
    assert rescale_few(fixed, data, data, likelihood, ZERO) is None
    noise = Data(X, torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], (150, 1))))
    assert rescale_few(ConstantKernel(1.0) * RBF(2.0), noise, noise, likelihood, ZERO) is None


def test_amplitude_of_labels_that_a_plane_separates_does_not_run_to_its_bound():
    X = np.random.default_rng(2).uniform(-2, 2, (20, 10))
    Y = np.sign(X @ np.linspace(-1, 1, 10))[:, None]
    data = Data(torch.from_numpy(X), torch.from_numpy(Y))
    kernel = ConstantKernel(4.0, (1e-3, 1e6)) * RBF([3.0] * 10, (1e-3, 1e5))
    found = rescale_few(kernel, data, data, Bernoulli(), ZERO)
    # Minus its log prior, .5 (log(v / 4) / 2)^2, is less than what 20 labels may gain: log 2 each.
    assert found.k1.constant_value < 4 * np.exp(2 * np.sqrt(2 * 20 * np.log(2)))


def test_scales_of_the_least_loss_are_found_by_descent(monkeypatch):
    tried = []

    def loss(place):
        tried.append(place)
        return 0.01 * ((place[0] - 2) ** 2 + (place[1] + 1) ** 2)

    assert likeliest_scales(loss, 1000.0) == (2, -1)
    assert len(tried) == len(set(tried))  # each once
    assert likeliest_scales(loss, 1.0) == (0, 0)  # of one label the prior has more to say
    tried.clear()
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_TRIALS", 3)
    assert likeliest_scales(loss, 1000.0) in tried
    assert len(tried) == 3


def test_a_gain_within_two_standard_errors_is_none(monkeypatch):
    X, Y = waves(40, seed=1)
    data, smooth = Data(X, Y), ConstantKernel(4.0) * RBF([1.0, 1.0])
    assert rescale_few(smooth, data, data, Bernoulli(), ZERO) is None
    monkeypatch.setattr("skgp.learning.defaults.LEFT_OUT_ERRORS", 1.0)
    found = rescale_few(smooth, data, data, Bernoulli(), ZERO)
    (old, _), (new, _) = (left_out_losses(k, data, Bernoulli(), ZERO) for k in (smooth, found))
    gain = (old - new).numpy()
    assert 1 < gain.mean() / (gain.std(ddof=1) / np.sqrt(40)) < 2


def test_few_labels_left_out_choose_the_moderation_too():
    X, y = load_digits(return_X_y=True)
    model = QSGPClassifier(random_state=0).fit(X[:150], y[:150] % 2)
    target = torch.from_numpy(np.where(y[:150] % 2, 1.0, -1.0))[:, None]
    data = Data(torch.from_numpy(X[:150]), target)
    offset = torch.from_numpy(model.offset_)
    _, moderation = left_out_losses(model.kernel_, data, Bernoulli("logit"), offset)
    assert model.moderation_ == moderation != FEW_ROWS_MODERATION


@pytest.mark.slow
def test_digits_are_told_apart_by_a_kernel_that_labels_left_out_choose():
    X, y = load_digits(return_X_y=True)
    y = y % 2
    model = QSGPClassifier(random_state=0).fit(X[:400], y[:400])
    assert log_loss(y[400:], model.predict_proba(X[400:])) < 0.15  # by the evidence alone: 0.182


# ---- many observations ------------------------------------------------------------------------


def refine(kernel, X, Y, row_weight=None, **options):
    generator = torch.Generator().manual_seed(1)
    return refine_length_scales(
        kernel, Data(X, Y, row_weight), Bernoulli(), offset=ZERO, generator=generator, **options
    )


@pytest.fixture
def small_trials(monkeypatch):
    monkeypatch.setattr("skgp.learning.defaults.SCALE_ROWS", 500)
    monkeypatch.setattr("skgp.learning.defaults.SCALE_TRAINING", 700)
    monkeypatch.setattr("skgp.learning.defaults.SCALE_HELD_OUT", 300)
    monkeypatch.setattr("skgp.learning.defaults.SCALE_POINTS", 150)


@pytest.mark.parametrize(("start", "shorter"), [(2.0, True), (0.02, False)])
def test_length_scales_move_towards_those_of_the_data(small_trials, start, shorter):
    X, Y = waves(1000)
    kernel = ConstantKernel(10.0) * RBF([start, 2 * start])
    found = refine(kernel, X, Y).k2.length_scale
    assert found[1] == pytest.approx(2 * found[0])
    steps = np.log2(found[0] / start) * 2
    assert steps == pytest.approx(round(steps)) and abs(steps) >= 1
    assert (found[0] < start) == shorter


def test_kernel_is_kept_where_nothing_is_better_or_free(small_trials):
    X, Y = waves(1000)
    kernel = ConstantKernel(10.0) * RBF([0.3, 0.3])
    once = refine(kernel, X, Y)
    assert refine(once, X, Y) == once
    assert refine(kernel, X[:400], Y[:400]) is kernel  # few rows
    fixed = ConstantKernel(10.0) * RBF([2.0, 2.0], "fixed")
    assert refine(fixed, X, Y) is fixed


def test_scaled_multiplies_every_length_scale_and_nothing_else():
    kernel = ConstantKernel(2.0) * RBF([1.0, 3.0]) + ConstantKernel(0.5, "fixed") * Matern(4.0)
    half = scaled(kernel, 0.5)
    np.testing.assert_allclose(half.k1.k2.length_scale, [0.5, 1.5])
    assert half.k2.k2.length_scale == pytest.approx(2.0)
    assert half.k1.k1.constant_value == pytest.approx(2.0)
    assert half.k2.k1.constant_value == 0.5


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(1.0, "fixed"),
        ConstantKernel(1.0),
        RBF(1.0) + Matern(1.0, "fixed"),
        RBF(1.0, (0.9, 2.0)),
    ],
)
def test_scaled_is_none_where_proportions_or_bounds_forbid(kernel):
    assert scaled(kernel, 0.5) is None


def test_callback_ends_the_search(small_trials):
    X, Y = waves(1000)
    kernel, calls = ConstantKernel(10.0) * RBF([2.0, 2.0]), []
    found = refine(kernel, X, Y, callback=lambda i, info: calls.append(info["loss"]) or True)
    assert found is kernel and len(calls) == 1 and np.isfinite(calls[0])


def test_rows_of_no_weight_do_not_count(small_trials):
    X, Y = waves(1000)
    weight = torch.ones(1000, dtype=torch.float64)
    weight[::2] = 1e-12
    flipped = Y.clone()
    flipped[::2] *= -1
    kernel = ConstantKernel(10.0) * RBF([2.0, 2.0])
    assert refine(kernel, X, Y, row_weight=weight) == refine(kernel, X, flipped, row_weight=weight)


# ---- numbers that stand for f, of counts ---------------------------------------------------------


def counts(rate, n=200, seed=0):
    """X (n, 1) and counts of these rates times exp f, and f."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 1))
    f = np.sin(2 * X[:, 0])
    return torch.tensor(X), torch.tensor(rng.poisson(rate * np.exp(f)).astype(float)), f


def test_numbers_of_large_counts_are_their_logarithms_and_weigh_as_much_as_they():
    X, y, _ = counts(1e4)
    numbers = latent_numbers(Data(X, y), Poisson())
    torch.testing.assert_close(numbers.weight, y / y.mean(), rtol=0.02, atol=0)
    log = (y + 0.5).log()
    torch.testing.assert_close(numbers.y, log - numbers.weight @ log / len(y))


def test_small_counts_weigh_nearly_alike_and_those_of_little_exposure_nothing():
    X, y, _ = counts(0.5)
    weight = latent_numbers(Data(X, y), Poisson()).weight
    assert 1.0 < float(weight.max() / weight.min()) < 3 < float(y.max())
    exposed = Data(X, y, offset=torch.where(torch.arange(200) < 100, -14.0, 0.0).double()[:, None])
    weight = latent_numbers(exposed, Poisson()).weight[:100][y[:100] == 0]
    assert float(weight.max()) < 0.02


def test_noise_found_is_that_of_the_counts():
    X, y, f = counts(1e4)
    found = search_by_numbers(
        [ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0)],
        Data(X, y),
        Poisson(),
        generator=torch.Generator().manual_seed(0),
        settings=SearchSettings(),
    ).kernel
    assert 0.6 < found.k2.noise_level * float(y.mean()) < 1.6
    assert 0.3 < found.k1.k1.constant_value < 10 and 0.5 < found.k1.k2.length_scale < 2
