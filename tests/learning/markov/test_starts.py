"""Where else the search of one kernel of a series starts."""

import numpy as np
import pytest
import torch
from sklearn.gaussian_process.kernels import RBF, ExpSineSquared, Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.inference.markov.series import make_series
from skgp.learning.markov.starts import likeliest_starts
from skgp.likelihoods import Gaussian

NOISE = 0.3


def noisy_sine(n_rows, span=6.0, speed=2.0):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-span / 2, span / 2, n_rows))
    f = np.sin(speed * x)
    return x[:, None], f + NOISE * rng.standard_normal(n_rows), f


@pytest.mark.parametrize(
    "n_rows, span, speed, kernel",
    [
        (60, 6.0, 2.0, 1.0 * RBF(2.0)),
        (120, 6.0, 2.0, 1.0 * RBF(30.0)),
        (2000, 60.0, 20.0, 1.0 * Matern(300.0, nu=1.5)),  # seen in a stretch of rows alone
    ],
    ids=["few", "smooth", "quick"],
)
def test_the_answer_does_not_depend_on_the_start(n_rows, span, speed, kernel):
    X, y, f = noisy_sine(n_rows, span, speed)
    found = StateSpaceGPRegressor(kernel + WhiteKernel(0.05)).fit(X, y)
    assert np.sqrt(np.mean((found.predict(X) - f) ** 2)) < NOISE


def test_starts_keep_fixed_noise_and_have_none_without_length_scales():
    X, y, _ = noisy_sine(50)
    series = make_series(torch.tensor(X[:, 0]), torch.tensor(y))
    ((kernel, parameters),) = likeliest_starts(RBF(9.0), series, Gaussian(0.09))
    assert kernel.length_scale < 2.0
    assert float(parameters[0]) == pytest.approx(np.log(0.09))
    free = Gaussian(0.09, bounds=(1e-4, 1.0))
    ((_, parameters),) = likeliest_starts(RBF(9.0), series, free)
    assert np.log(1e-4) <= float(parameters[0]) <= 0.0
    fixed = ExpSineSquared(1.0, 3.0, length_scale_bounds="fixed")
    assert not list(likeliest_starts(fixed, series, free))
