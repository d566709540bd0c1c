"""MixtureState against dense NumPy on scikit-learn's kernels; one-dimensional mixtures."""

import pickle

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.gaussian_process.kernels import RBF, DotProduct, Matern, WhiteKernel

from skgp.data import merge_replicates
from skgp.inference import defaults as tuned
from skgp.inference.gp_mixture import mixture_log_density, mixture_moments, mixture_quantiles
from skgp.inference.mixture import MixtureState
from skgp.linalg.runtime import memory_limit, to_arrays
from tests.covering import covering
from tests.same import assert_same

KERNELS = {
    "ard": 1.0 * RBF([1.0, 2.0]) + WhiteKernel(0.1),
    "noise first": WhiteKernel(0.1) + 1.0 * Matern(1.0, nu=1.5),
    "sum": 1.0 * RBF(1.0) + DotProduct(0.5) + WhiteKernel(0.1),
    "fixed noise": 1.0 * Matern([1.0, 1.0], nu=2.5) + WhiteKernel(0.05, "fixed"),
}


def problem(n=30, seed=0):
    """Rows of which some repeat, weights, targets, and new rows."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 2))
    X[3:6] = X[0]
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(n)
    return X, y, rng.uniform(0.5, 2.0, n), rng.uniform(-3, 3, (9, 2))


def samples(kernel, S=5):
    rng = np.random.default_rng(1)
    return kernel.theta + 0.3 * rng.standard_normal((S, kernel.n_dims)), rng.uniform(1, 3, S)


def make_state(kernel, **settings):
    X, y, weight, X_new = problem()
    data = merge_replicates(X, y, weight, torch.device("cpu"))
    return MixtureState(kernel, data, *samples(kernel), **settings), X_new


def moments(state, X):
    """Of f, (t,) each."""
    return to_arrays(*state.mean_and_variance(torch.tensor(X)))


def means_of(state, X):
    """Of f under each sample, (S, t)."""
    return state._component_means(torch.tensor(X)).numpy()


def dense(kernel, X_new):
    """Means (S, t) and covariances (S, t, t) of f, from all rows with their own noise."""
    X, y, weight, _ = problem()
    means, covariances = [], []
    for theta in samples(kernel)[0]:
        bound = kernel.clone_with_theta(theta)
        joint = np.concatenate([X, X_new])
        noise = next(k.noise_level for k in (bound.k1, bound.k2) if isinstance(k, WhiteKernel))
        # A WhiteKernel adds noise between equal objects alone: none within K(joint, copy).
        K = bound(joint, joint.copy())
        A = K[: len(X), : len(X)] + np.diag(noise / weight)
        cross, prior = K[: len(X), len(X) :], K[len(X) :, len(X) :]
        means.append(cross.T @ np.linalg.solve(A, y))
        covariances.append(prior - cross.T @ np.linalg.solve(A, cross))
    return np.array(means), np.array(covariances)


@pytest.mark.parametrize("name", KERNELS)
def test_samples_together_are_those_one_by_one(name, monkeypatch):
    state, X_new = make_state(KERNELS[name])
    assert state._few_covariances(state._rows(X_new)) is not None
    together = means_of(state, X_new), *state.component_moments(X_new)
    monkeypatch.setattr(tuned, "TOGETHER", 0)
    assert state._few_covariances(state._rows(X_new)) is None
    alone = means_of(state, X_new), *state.component_moments(X_new)
    for found, expected in zip(together, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", KERNELS)
def test_components_equal_dense_algebra(name):
    state, X_new = make_state(KERNELS[name])
    means, covariances = dense(KERNELS[name], X_new)
    np.testing.assert_allclose(means_of(state, X_new), means, rtol=1e-9, atol=1e-11)
    mean, var = state.component_moments(X_new)
    np.testing.assert_allclose(mean, means, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(var, np.diagonal(covariances, axis1=1, axis2=2), rtol=1e-8)


def test_moments_follow_the_law_of_total_variance():
    kernel = KERNELS["ard"]
    state, X_new = make_state(kernel)
    means, covariances = dense(kernel, X_new)
    w = samples(kernel)[1] / samples(kernel)[1].sum()
    centre = np.einsum("s,st->t", w, means)
    centred = means - centre
    expected = np.einsum("s,stu->tu", w, covariances + centred[:, :, None] * centred[:, None])
    for mean, var in (moments(state, X_new), state.covariance(X_new)):
        np.testing.assert_allclose(mean, centre, rtol=1e-9)
        target = expected if var.ndim == 2 else np.diag(expected)
        np.testing.assert_allclose(var, target, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(state.mean(state._rows(X_new)), centre, rtol=1e-9)


@pytest.mark.parametrize("name", KERNELS)
def test_cg_agrees_with_cholesky_and_errs_on_the_wide_side(name):
    exact, X_new = make_state(KERNELS[name])
    state, _ = make_state(KERNELS[name], solver="cg", rank=5)
    np.testing.assert_allclose(means_of(state, X_new), means_of(exact, X_new), 1e-6)
    excess = state.component_moments(X_new)[1] - exact.component_moments(X_new)[1]
    most = 0.01 * state.noise[:, None] / problem()[2].max()
    assert excess.min() > -1e-9 and (excess < most).all()
    assert excess.max() > 1e-12  # it does stop early
    excess = state.covariance(X_new)[1] - exact.covariance(X_new)[1]
    assert np.linalg.eigvalsh(excess).min() > -1e-9 and np.diag(excess).max() < most.max()


def test_cg_in_single_precision_stands_short_length_scales(rng):
    """Of a column whose values repeat, far apart for it: squared distances need more digits."""
    kernel = RBF([0.05, 1.0]) + WhiteKernel(0.1)
    X = np.column_stack([100.0 * rng.integers(0, 5, 60), rng.normal(size=60)])
    data = merge_replicates(X, X[:, 0] / 200 + X[:, 1], None, torch.device("cpu"))
    X_new = X[:9] + [0.0, 0.1]
    exact = MixtureState(kernel, data, kernel.theta[None])
    state = MixtureState(kernel, data, kernel.theta[None], solver="cg", rank=5, dtype=torch.float32)
    for got, expected in zip(moments(state, X_new), moments(exact, X_new), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 1e9), (torch.float64, 1.0)])
def test_cg_in_single_precision_and_without_a_stored_matrix(dtype, budget):
    exact, X_new = make_state(KERNELS["ard"])
    with memory_limit(budget):
        state, _ = make_state(KERNELS["ard"], solver="cg", rank=5, dtype=dtype)
        found = moments(state, X_new)
    for got, expected in zip(found, moments(exact, X_new), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_factors_are_kept_within_the_budget_and_never_pickled():
    state, X_new = make_state(KERNELS["ard"])
    expected, text = moments(state, X_new), pickle.dumps(state)
    assert len(state._factors) == 5 and len(text) < 8 * 30 * (5 + 2 + 2) + 10_000
    again = pickle.loads(text)
    assert not again._factors
    assert_same(moments(again, X_new), expected)
    one = 8 * len(state._X) ** 2
    for budget, kept in ((0, 0), (2.5 * one, 2)):
        with memory_limit(budget):
            state, _ = make_state(KERNELS["ard"])
            assert_same(moments(state, X_new), expected)
            assert_same(moments(state, X_new), expected)
        assert len(state._factors) == kept


@covering(solver=["cholesky", "cg"], most_joint=[4000, 1])
def test_draws_have_the_moments_of_the_mixture(solver, most_joint, monkeypatch):
    monkeypatch.setattr(tuned, "MOST_JOINT", most_joint)
    state, X_new = make_state(KERNELS["ard"], solver=solver)
    X_new, n = X_new[:4], 5000 if most_joint > 1 else 2000  # of approximate draws
    mean, covariance = state.covariance(X_new)
    for noise in (False, True):
        draws = state.draws(X_new, n, np.random.default_rng(2), noise=noise)
        assert draws.shape == (4, n)
        expected = covariance + noise * state.weights @ state.noise * np.eye(4)
        products = (draws - mean[:, None])[:, None] * (draws - mean[:, None])
        for found, target in ((draws, mean), (products, expected)):
            z = (found.mean(-1) - target) / (found.std(-1) / np.sqrt(n))
            assert np.abs(z).max() < 4


def test_draws_take_function_and_noise_from_the_same_sample():
    # Little noise about -1 or much about 1: observations below -1.5 have the little noise alone.
    kernel = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    X = np.array([[0.0]])
    data = merge_replicates(X, np.array([2.0]), None, torch.device("cpu"))
    u = np.log([[1e-8, 1.0, 1e-4], [100.0, 1.0, 1.0]])
    state = MixtureState(kernel, data, u)
    draws = state.draws(X, 4000, np.random.default_rng(0), noise=True)[0]
    near_zero = np.abs(draws) < 0.05
    assert abs(near_zero.mean() - 0.5) < 4 * 0.5 / np.sqrt(4000) + 0.03
    np.testing.assert_allclose(draws[near_zero].std(), 1e-2, rtol=0.2)


# -------------------------------------------------------------------- mixtures in one dimension


def mixtures(S=6, n=5, seed=0):
    rng = np.random.default_rng(seed)
    spread = np.exp(3 * rng.standard_normal(n))
    var = rng.gamma(1.0, 1.0, (S, n)) * spread**2
    return rng.dirichlet(np.ones(S)), spread * rng.standard_normal((S, n)), var


def test_quantiles_invert_the_distribution_function():
    w, mean, var = mixtures()
    levels = np.array([1e-12, 1e-4, 0.1, 0.5, 0.77, 0.99, 1 - 1e-9])
    quantiles = mixture_quantiles(w, mean, var, levels)
    std = np.sqrt(var)
    for j, level in enumerate(levels):
        tail = norm.cdf if level <= 0.5 else norm.sf
        found = w @ tail((quantiles[:, j] - mean) / std)
        np.testing.assert_allclose(found, min(level, 1 - level), rtol=1e-10)


def test_quantiles_where_newton_alone_would_stray():
    # Two far peaks: between them the distribution function is flat.
    mean, var = np.array([[0.0], [1e6]]), np.array([[1.0], [1e-6]])
    quantiles = mixture_quantiles(np.array([0.5, 0.5]), mean, var, np.array([0.25, 0.4, 0.6, 0.75]))
    expected = [norm.ppf(0.5), norm.ppf(0.8), 1e6 + 1e-3 * norm.ppf(0.2), 1e6]
    np.testing.assert_allclose(quantiles[0], expected, atol=1e-9)


def test_quantiles_of_one_component_are_gaussian():
    w, mean, var = mixtures(S=1)
    found = mixture_quantiles(w, mean, var, np.array([0.3]))
    np.testing.assert_allclose(found[:, 0], norm.ppf(0.3, mean[0], np.sqrt(var[0])), rtol=1e-13)


def test_density_and_moments_of_mixtures_by_quadrature():
    w, mean, var = mixtures(n=3)
    centre, total = mixture_moments(w, mean, var)
    for i in range(3):
        edge = 12 * np.sqrt(var[:, i].max()) + np.abs(mean[:, i]).max()
        z = np.linspace(-edge, edge, 400_001)
        columns = np.repeat(mean[:, [i]], len(z), axis=1), np.repeat(var[:, [i]], len(z), axis=1)
        density = np.exp(mixture_log_density(w, *columns, z)) * (z[1] - z[0])
        assert density.sum() == pytest.approx(1, rel=1e-5)
        assert density @ z == pytest.approx(centre[i], rel=1e-4, abs=1e-5 * np.sqrt(total[i]))
        assert density @ (z - centre[i]) ** 2 == pytest.approx(total[i], rel=1e-5)
