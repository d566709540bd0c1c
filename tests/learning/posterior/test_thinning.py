"""How many samples predict, against moments known in closed form."""

from types import SimpleNamespace

import numpy as np
import pytest

from skgp.learning.posterior.thinning import probe_rows, samples_needed


def pilot(mean, var, noise=0.0):
    mean, var = np.asarray(mean, float), np.asarray(var, float)
    size = len(mean)
    return SimpleNamespace(
        component_moments=lambda X: (mean, var),
        weights=np.full(size, 1 / size),
        noise=np.full(size, noise),
    )


@pytest.mark.parametrize(("spread", "n_samples"), [(0.01, 8), (0.15, 28), (0.6, 64)])
def test_samples_needed_is_the_variance_of_means_over_the_tolerance(spread, n_samples):
    """Means spread by so many standard deviations: n = spread^2 / 0.03^2, within bounds."""
    rng = np.random.default_rng(0)
    offsets = spread * rng.choice([-1.0, 1.0], size=(12, 500))
    found = samples_needed(pilot(offsets, np.full_like(offsets, 0.6), 0.4), np.zeros((500, 1)))
    assert found == pytest.approx(n_samples, rel=0.15)


def test_samples_needed_sees_variances_that_differ():
    var = np.repeat([[0.5], [1.5]], 6, axis=0) * np.ones(10)
    # V[v] = 0.25 of a variance of 1: 0.25 / 4 / 0.02^2 is more than the most.
    assert samples_needed(pilot(np.zeros((12, 10)), var), np.zeros((10, 1))) == 64
    assert samples_needed(pilot(np.zeros((12, 10)), np.ones((12, 10))), np.zeros((10, 1))) == 8
    # Noise that all share covers what differs.
    assert samples_needed(pilot(np.zeros((12, 10)), var, 20.0), np.zeros((10, 1))) == 8


def test_probe_rows_lie_in_the_range_of_the_data():
    X = np.random.default_rng(0).uniform(2, 5, (20, 3))
    rows = probe_rows(X, np.random.default_rng(1))
    assert rows.shape == (64, 3)
    assert (rows >= X.min(0)).all() and (rows <= X.max(0)).all()
    assert probe_rows(X[:1], np.random.default_rng(1)).shape == (64, 3)
