"""Draws and covariances of f and gradients in X: what no contract says. See also the contracts."""

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

from skgp import (
    BayesianGPRegressor,
    DLMGPRegressor,
    GaussianProcessRegressor,
    QSGPRegressor,
    StateSpaceGPRegressor,
    SWSGPRegressor,
    VecchiaGPRegressor,
)
from skgp.likelihoods import Poisson
from tests.contracts.estimators import z_scores
from tests.reference import gradients as reference

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (40, 2))
Y = 30 + 4 * (np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * RNG.standard_normal(40))
X_NEW = RNG.uniform(-2, 2, (6, 2))
MODEL = {"variance": 2.0, "length_scale": np.array([0.7, 1.5]), "noise": 0.05}
KERNEL = 2.0 * RBF([0.7, 1.5]) + WhiteKernel(0.05)
ASKED = {"return_std": True, "return_mean_grad": True, "return_std_grad": True}
#: Routes that are the exact GP.
EXACT = {
    "gpr": lambda: GaussianProcessRegressor(KERNEL, alpha=0, optimizer=None, normalize_y=True),
    "qsgp": lambda: QSGPRegressor(KERNEL, optimizer=None),
    "dlm": lambda: DLMGPRegressor(KERNEL, optimizer=None),
    "swsgp": lambda: SWSGPRegressor(KERNEL, optimizer=None),
    "vecchia": lambda: VecchiaGPRegressor(KERNEL, optimizer=None),
    "bayesian": lambda: BayesianGPRegressor(KERNEL, optimizer=None),
}
#: Routes whose gradients take other ways than those of the contracts.
ROUTES = {
    "fourier": (QSGPRegressor, dict(basis="fourier", n_basis=60)),
    "float32": (QSGPRegressor, dict(basis="fourier", n_basis=60, dtype="float32")),
    "points": (QSGPRegressor, dict(basis="inducing", n_basis=15)),
    "pathwise": (QSGPRegressor, dict(covariance="samples")),
    "chevron": (QSGPRegressor, dict(covariance="chevron")),
    "diagonal": (QSGPRegressor, dict(covariance="diagonal")),
    "local": (QSGPRegressor, dict(basis="neighbors", n_basis=12)),
    "relevance": (QSGPRegressor, dict(basis="relevance")),
    "laplace": (QSGPRegressor, dict(likelihood="laplace")),
    "dlm points": (DLMGPRegressor, dict(n_inducing=10, max_iter=5)),
    "swsgp": (SWSGPRegressor, dict(n_neighbors=8)),
    "full": (SWSGPRegressor, dict(n_neighbors=8, covariance="full", max_iter=5)),
    "projected": (SWSGPRegressor, dict(n_neighbors=8, projection=2)),
    "cg": (BayesianGPRegressor, dict(solver="cg")),
}
#: One column, without and with inducing states.
SERIES = {
    "matern12": 1.0 * Matern(1.0, nu=0.5),
    "matern52": 1.0 * Matern(1.0, nu=2.5),
    "rbf": 1.0 * RBF(1.0),
    "sum": 1.0 * Matern(2.0, nu=1.5) + ExpSineSquared(1.0, 2.0) * Matern(5.0, nu=1.5),
}


def slopes(model, X_new, step=1e-5):
    """Central differences (2, p, d) of mean and standard deviation."""
    found = []
    for move in step * np.eye(X_new.shape[1]):
        up, down = (model.predict(X_new + sign * move, True) for sign in (1, -1))
        found.append(np.subtract(up, down) / (2 * step))
    return np.stack(found, -1)


def assert_gradients(model, X_new, rtol=1e-6, **options):
    found = model.predict(X_new, **ASKED)[2:]
    for gradient, slope in zip(found, slopes(model, X_new, **options), strict=True):
        np.testing.assert_allclose(gradient, slope, atol=rtol * np.abs(slope).max())


# ---- gradients in X


@pytest.mark.parametrize("name", EXACT)
def test_exact_routes_have_the_gradients_of_the_dense_gp(name):
    model = EXACT[name]().fit(X, Y)
    mean, std, d_mean, d_std = model.predict(X_NEW, **ASKED)
    centre, scale = Y.mean(), Y.std()
    # "gpr" and its likes say the same of noise; the other routes but for that of rounding.
    for row, x in enumerate(X_NEW):
        m, v, dm, dv = reference.predict(X, (Y - centre) / scale, x, **MODEL)
        s = np.sqrt(v + MODEL["noise"])
        np.testing.assert_allclose(mean[row], centre + scale * m, rtol=1e-6)
        np.testing.assert_allclose(std[row], scale * s, rtol=1e-6)
        np.testing.assert_allclose(d_mean[row], scale * dm, rtol=1e-5, atol=1e-6 * scale)
        np.testing.assert_allclose(d_std[row], scale * dv / (2 * s), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ROUTES)
def test_gradients_of_every_route(name):
    cls, options = ROUTES[name]
    model = cls(KERNEL, optimizer=None, random_state=0, **options).fit(X, Y)
    # Conjugate gradients leave 1e-3 of a variance's differences.
    assert_gradients(model, X_NEW, rtol=5e-3 if name == "cg" else 1e-6)


@pytest.mark.parametrize(
    "signal",
    [
        1.0 * RBF([1.0, 2.0]) + 0.5 * Matern(3.0, nu=1.5),
        ConstantKernel(2.0) * Matern(1.0, nu=0.5),
        1.0 * RationalQuadratic(),
        DotProduct() + 1.0 * RBF(),
        1.0 * Matern(2.0, nu=2.5) * RBF(1.0),
    ],
    ids=str,
)
def test_gradients_of_kernels(signal):
    kernel = signal + WhiteKernel(0.05)
    exact = GaussianProcessRegressor(kernel, optimizer=None, normalize_y=True).fit(X, Y)
    assert_gradients(exact, X_NEW)
    local = SWSGPRegressor(kernel, optimizer=None, n_neighbors=9, random_state=0).fit(X, Y)
    assert_gradients(local, X_NEW)


@pytest.mark.parametrize("n_inducing", [None, 12])
@pytest.mark.parametrize("name", SERIES)
def test_gradients_in_time(name, n_inducing):
    t = np.sort(RNG.uniform(0, 10, 40))[:, None]
    model = StateSpaceGPRegressor(
        SERIES[name] + WhiteKernel(0.1), n_inducing=n_inducing, optimizer=None
    ).fit(t, np.sin(t[:, 0]))
    # Between the times, before the first and after the last.
    assert_gradients(model, np.append(t[:-1:9] + t[1::9], [-1, 21.0])[:, None] / 2)


def test_gradient_at_a_kink_is_that_to_the_right():
    t = np.arange(5.0)[:, None]
    kernel = 1.0 * Matern(1.0, nu=0.5) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, optimizer=None).fit(t, [0.0, 1.0, -1.0, 2.0, 0.0])
    slope = (model.predict([[2 + 1e-6]]) - model.predict([[2.0]])) / 1e-6
    np.testing.assert_allclose(model.predict([[2.0]], return_mean_grad=True)[1][:, 0], slope, 1e-4)


@pytest.mark.parametrize("posterior", ["auto", "mean_field"])
def test_gradients_of_additive_models(posterior):
    kernel = 1.0 * Matern(1.0, nu=1.5) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, optimizer=None, posterior=posterior).fit(X, Y)
    assert_gradients(model, X_NEW)


def test_joint_posterior_in_bins_has_no_gradients():
    many = RNG.uniform(-2, 2, (3001, 2))
    kernel = 1.0 * Matern(1.0, nu=1.5) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, n_inducing=10, optimizer=None, posterior="joint")
    model.fit(many, np.sin(many).sum(1))
    with pytest.raises(ValueError, match='Set posterior="mean_field"'):
        model.predict(X_NEW, return_mean_grad=True)


def test_gradients_are_in_the_units_of_the_user():
    scale, shift = np.array([1e-3, 1e5]), np.array([7.0, 1e8])
    given, kernel = shift + scale * X, 2.0 * RBF([0.7e-3, 1.5e5]) + WhiteKernel(0.05)
    for model, other in (
        (QSGPRegressor(KERNEL, optimizer=None), QSGPRegressor(kernel, optimizer=None)),
        (EXACT["gpr"](), EXACT["gpr"]().set_params(kernel=kernel)),
    ):
        expected = model.fit(X, Y).predict(X_NEW, **ASKED)
        found = other.fit(given, 1e3 * Y).predict(shift + scale * X_NEW, **ASKED)
        for gradient, same in zip(found[2:], expected[2:], strict=True):
            np.testing.assert_allclose(gradient, 1e3 * same / scale, rtol=1e-4)


def test_std_grad_is_zero_where_there_is_no_variance():
    kernel = 1.0 * RBF(1.0, "fixed")
    model = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=None).fit([[0.0]], [1.0])
    std, d_std = model.predict([[0.0]], True, return_std_grad=True)[1:]
    assert std == 0
    np.testing.assert_array_equal(d_std, 0)


def test_gradients_vanish_far_from_the_data():
    for name in ("gpr", "qsgp", "dlm", "swsgp", "vecchia", "bayesian"):
        model = EXACT[name]().fit(X, Y)
        for gradient in model.predict([[1e3, 0.0], [1e90, -1e90]], **ASKED)[2:]:
            np.testing.assert_array_equal(gradient, 0)


def test_gradients_of_a_constant_target_are_zero():
    model = QSGPRegressor(random_state=0).fit(X, np.full(40, 3.0))
    np.testing.assert_allclose(model.predict(X_NEW, return_mean_grad=True)[1], 0, atol=1e-12)


def test_gradients_in_small_tiles_are_the_same(monkeypatch):
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    expected = model.predict(X_NEW, **ASKED)
    monkeypatch.setattr("skgp.estimators._base.PREDICTION_MEMORY", 1)  # a row at a time
    for value, same in zip(model.predict(X_NEW, **ASKED), expected, strict=True):
        np.testing.assert_allclose(value, same, rtol=1e-9, atol=1e-10)


def test_no_graph_is_left_by_other_predictions():
    model = SWSGPRegressor(KERNEL, optimizer=None, n_neighbors=8).fit(X, Y)
    rows = torch.tensor(X_NEW, requires_grad=True)
    with torch.no_grad():
        assert not any(each.requires_grad for each in model._posterior.mean_and_variance(rows))
    assert all(each.requires_grad for each in model._posterior.mean_and_variance(rows))


@pytest.mark.parametrize("link", ["exp", "softplus"])
def test_slopes_of_a_link_are_those_of_finite_differences(link):
    mean, var = (torch.tensor(v, dtype=torch.float64) for v in ([-3.0, 0.5, 4.0], [0.1, 1.0, 0.3]))
    likelihood = Poisson(link).at(torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64))
    found = torch.stack(likelihood.predictive_slopes(mean, var))
    step, expected = 1e-5, []
    for value in (0, 1):
        for moves in ((step, 0.0), (0.0, step)):
            up = likelihood.predictive_moments(mean + moves[0], var + moves[1])[value]
            down = likelihood.predictive_moments(mean - moves[0], var - moves[1])[value]
            expected.append((up - down) / (2 * step))
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-8)
    at_zero = torch.stack(likelihood.predictive_slopes(mean, torch.zeros_like(var)))
    assert at_zero.isfinite().all()


def test_gradients_of_rates_grow_with_the_exposure():
    counts = RNG.poisson(np.exp(1 + np.sin(X[:, 0])))
    model = DLMGPRegressor(1.0 * RBF(1.0), likelihood="poisson", optimizer=None, n_inducing=20)
    model.fit(X, counts)
    alone = model.predict(X_NEW, return_mean_grad=True)[1]
    exposure = np.arange(1.0, 7.0)
    exposed = model.predict(X_NEW, exposure=exposure, return_mean_grad=True)[1]
    np.testing.assert_allclose(exposed, exposure[:, None] * alone, rtol=1e-10)


# ---- GaussianProcessRegressor


@pytest.mark.parametrize("normalize_y", [False, True])
def test_several_targets_have_gradients_each(normalize_y):
    several = np.column_stack([Y, -Y, X[:, 0] ** 2])
    model = GaussianProcessRegressor(KERNEL, optimizer=None, normalize_y=normalize_y, alpha=0.01)
    mean, std, d_mean, d_std = model.fit(X, several).predict(X_NEW, **ASKED)
    assert d_mean.shape == d_std.shape == (6, 3, 2)
    for target in range(3):
        alone = model.fit(X, several[:, target]).predict(X_NEW, **ASKED)
        for value, same in zip((mean, std, d_mean, d_std), alone, strict=True):
            np.testing.assert_allclose(value[:, target], same, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["qsgp", "neighbors", "state_space"])
def test_gradients_of_other_methods_leave_out_alpha(method):
    columns = slice(0, 1 if method == "state_space" else 2)
    kernel = 2.0 * RBF(0.7) + WhiteKernel(0.05)
    model = GaussianProcessRegressor(kernel, method=method, alpha=0.1, optimizer=None)
    assert_gradients(model.fit(X[:, columns], Y - 30), X_NEW[:, columns])


def test_many_rows_have_the_gradients_of_few(monkeypatch):
    model = EXACT["gpr"]().fit(X, Y)
    few = model.predict(X_NEW, **ASKED)
    monkeypatch.setattr("skgp.kernels.training.CALLED_PAIRS", 0)
    monkeypatch.setattr("skgp.inference.exact.DENSE_ENTRIES", 0)  # a factor in columns
    model.fit(X, Y)
    for value, same in zip(model.predict(X_NEW, **ASKED), few, strict=True):
        np.testing.assert_allclose(value, same, rtol=1e-7, atol=1e-9)


def test_called_kernels_have_no_gradients():
    kernel = 1.0 * PairwiseKernel(metric="rbf") + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, optimizer=None).fit(X, Y)
    with pytest.raises(ValueError, match="register_kernel"):
        model.predict(X_NEW, return_mean_grad=True)


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("n_targets", [1, 2])
def test_draws_of_f_have_no_noise_of_the_kernel(fitted, n_targets):
    model = GaussianProcessRegressor(KERNEL, optimizer=None, n_targets=n_targets, alpha=0.0)
    if fitted:
        model.fit(X, Y if n_targets == 1 else np.column_stack([Y, -Y]))
    mean, covariance = model.latent_mean_and_covariance(X_NEW)
    draws = model.sample_f(X_NEW, 4000, random_state=1)
    assert draws.shape == (*mean.shape, 4000)
    signal, noise = KERNEL.k1, MODEL["noise"]
    with_noise = model.predict(X_NEW, return_cov=True)[1]
    for target in range(n_targets):
        one = (slice(None), target) if n_targets > 1 else slice(None)
        both = covariance[..., target] if n_targets > 1 else covariance
        observed = with_noise[..., target] if n_targets > 1 else with_noise
        np.testing.assert_allclose(both, observed - noise * np.eye(6), atol=1e-12)
        if not fitted:
            np.testing.assert_allclose(both, signal(X_NEW), atol=1e-12)
        residual = draws[one] - mean[one][:, None]
        assert np.abs(z_scores(residual, 0)).max() < 4
        assert np.abs(z_scores(residual[:, None] * residual, both)).max() < 4


# ---- draws and covariances


def test_joint_predictions_refuse_rows_of_dask():
    array = pytest.importorskip("dask.array")
    model = QSGPRegressor(KERNEL, optimizer=None).fit(X, Y)
    rows = array.from_array(X_NEW, chunks=3)
    for method in ("sample_f", "latent_mean_and_covariance"):
        with pytest.raises(ValueError, match=f"{method} is joint over the rows"):
            getattr(model, method)(rows)
    gradient = model.predict(rows, return_mean_grad=True)[1]
    expected = model.predict(X_NEW, return_mean_grad=True)[1]
    np.testing.assert_allclose(gradient.compute(), expected, rtol=1e-7)
