"""GaussianProcessRegressor beside scikit-learn's, and what it hands to other methods."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor as Original
from sklearn.gaussian_process.kernels import (
    RBF,
    CompoundKernel,
    ConstantKernel,
    DotProduct,
    ExpSineSquared,
    Matern,
    PairwiseKernel,
    RationalQuadratic,
    WhiteKernel,
)
from sklearn.gaussian_process.tests._mini_sequence_kernel import MiniSeqKernel

from skgp import (
    GaussianProcessClassifier,
    GaussianProcessRegressor,
    QSGPRegressor,
    StateSpaceGPRegressor,
    VecchiaGPRegressor,
)
from skgp.estimators import _front_door, _gpr_prediction
from skgp.kernels import training

RNG = np.random.default_rng(0)
X = RNG.uniform(-2, 2, (40, 2))
Y = np.sin(2 * X[:, 0]) + X[:, 1] + 0.1 * RNG.standard_normal(40)
X_NEW = RNG.uniform(-2, 2, (7, 2))
NOISE = WhiteKernel(0.1)
KERNELS = {
    "none": None,
    "ard": 2.0 * RBF([1.0, 2.0]) + NOISE,
    "matern12": 1.0 * Matern(nu=0.5) + NOISE,
    "matern32": NOISE + Matern(0.7, nu=1.5) * 2.0,
    "matern52": 1.0 * Matern([1.0, 1.0], nu=2.5),
    "any nu": 1.0 * Matern(nu=0.9) + NOISE,
    "sum": 1.0 * RBF() + 0.5 * Matern(3.0, nu=1.5) + ConstantKernel(0.3) + NOISE,
    "linear": DotProduct() + NOISE,
    "rational": 1.0 * RationalQuadratic() + NOISE,
    "power": RBF() ** 2 + NOISE,
    "scaled noise": 1.0 * (RBF() + WhiteKernel(0.2)),
    "pairwise": 1.0 * PairwiseKernel(metric="rbf") + NOISE,
    "fixed": 1.0 * RBF(1.0, "fixed") + WhiteKernel(0.1, "fixed"),
}
#: 0.1 and noise that differs from row to row.
ALPHAS = {"number": 0.01, "array": np.linspace(0.01, 0.1, 40)}


def both(kernel, y=Y, **params):
    """scikit-learn's and ours, fitted; their default is fixed before 1.9."""
    params = {"random_state": 0, "alpha": 0.01, **params}
    theirs = 1.0 * RBF() if kernel is None else kernel
    pairs = (Original, theirs), (GaussianProcessRegressor, kernel)
    return [cls(of_each, **params).fit(X, y) for cls, of_each in pairs]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("normalize_y", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_numbers_are_those_of_scikit_learn(name, normalize_y, alpha):
    options = dict(normalize_y=normalize_y, alpha=ALPHAS[alpha], optimizer=None)
    theirs, ours = both(KERNELS[name], **options)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta)
    assert ours.log_marginal_likelihood_value_ == pytest.approx(
        theirs.log_marginal_likelihood_value_, rel=1e-10
    )
    for attribute in ("L_", "alpha_", "X_train_", "y_train_", "_y_train_std"):
        np.testing.assert_allclose(getattr(ours, attribute), getattr(theirs, attribute), rtol=1e-9)
    for asked in ({}, {"return_std": True}, {"return_cov": True}):
        for mine, other in zip(
            ours.predict(X_NEW, **asked), theirs.predict(X_NEW, **asked), strict=True
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-8, atol=1e-10)
    if name != "linear":  # whose equal eigenvalues leave the basis of the draws open
        np.testing.assert_allclose(ours.sample_y(X_NEW, 3), theirs.sample_y(X_NEW, 3), atol=1e-6)
    theta = theirs.kernel_.theta + 0.3
    value, gradient = ours.log_marginal_likelihood(theta, eval_gradient=True)
    expected, slope = theirs.log_marginal_likelihood(theta, eval_gradient=True)
    assert value == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(gradient, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "fixed"])
def test_optima_are_at_least_those_of_scikit_learn(name):
    theirs, ours = both(KERNELS[name])
    gained = ours.log_marginal_likelihood_value_ - theirs.log_marginal_likelihood_value_
    assert gained > -1e-3
    at_theirs = theirs.log_marginal_likelihood(ours.kernel_.theta)
    assert at_theirs == pytest.approx(ours.log_marginal_likelihood_value_, abs=1e-6)


@pytest.mark.parametrize("device_rows", [40, 30])
def test_rows_beyond_those_of_numpy_give_the_same_fit(device_rows, monkeypatch):
    few = GaussianProcessRegressor(KERNELS["sum"], optimizer=None).fit(X, Y)
    monkeypatch.setattr("skgp.kernels.pairwise.FEW_ROWS", device_rows - 1)
    monkeypatch.setattr("skgp.inference.exact.DENSE_ENTRIES", 0)
    monkeypatch.setattr(training, "CALLED_PAIRS", 0)
    monkeypatch.setattr("skgp.estimators._gpr_prediction.LIMITED_PAIRS", 0)
    monkeypatch.setattr("skgp.linalg.defaults.LARGE_FLOPS", 0)
    many = GaussianProcessRegressor(KERNELS["sum"], optimizer=None).fit(X, Y)
    assert many.log_marginal_likelihood_value_ == pytest.approx(few.log_marginal_likelihood_value_)
    for mine, other in zip(many.predict(X_NEW, True), few.predict(X_NEW, True), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-9)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_targets_share_a_kernel():
    y = np.column_stack([Y, X[:, 0] ** 2, -Y])
    theirs, ours = both(KERNELS["ard"], y, normalize_y=True)
    assert ours.log_marginal_likelihood_value_ == pytest.approx(
        theirs.log_marginal_likelihood_value_, abs=1e-3
    )
    theirs, ours = both(KERNELS["ard"], y, normalize_y=True, optimizer=None)
    for asked in ({"return_std": True}, {"return_cov": True}):
        for mine, other in zip(
            ours.predict(X_NEW, **asked), theirs.predict(X_NEW, **asked), strict=True
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-8, atol=1e-10)
    density = ours.log_predictive_density(X_NEW, y[:7])
    assert density.shape == (7, 3)
    single = GaussianProcessRegressor(KERNELS["ard"], normalize_y=True, alpha=0.01, optimizer=None)
    alone = single.fit(X, y[:, 1]).log_predictive_density(X_NEW, y[:7, 1])
    np.testing.assert_allclose(density[:, 1], alone, rtol=1e-9)


def test_strings_are_compared_by_their_kernel():
    words, y = ["A", "AB", "B", "ABC", "AAB"], np.array([0.1, 0.5, 0.9, 0.4, 0.3])
    kernel = MiniSeqKernel(0.5)
    theirs, ours = (
        cls(kernel, alpha=0.1).fit(words, y) for cls in (Original, GaussianProcessRegressor)
    )
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-4)
    np.testing.assert_allclose(ours.predict(["BA"]), theirs.predict(["BA"]), rtol=1e-4)
    assert "by calling it" in ours.reason_


def test_restarts_find_what_one_start_does_not_and_are_the_same_alone_and_in_a_batch(monkeypatch):
    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(1e-3, (1e-4, 1e2)) + WhiteKernel(
        1e-5, (1e-5, 10.0)
    )
    once, often = (
        GaussianProcessRegressor(kernel, n_restarts_optimizer=k, random_state=0).fit(X, Y)
        for k in (0, 6)
    )
    assert often.log_marginal_likelihood_value_ > once.log_marginal_likelihood_value_ + 10
    monkeypatch.setattr(training.ExpressionGram, "has_many", False)
    alone = GaussianProcessRegressor(kernel, n_restarts_optimizer=6, random_state=0).fit(X, Y)
    assert alone.log_marginal_likelihood_value_ == pytest.approx(
        often.log_marginal_likelihood_value_, abs=1e-5
    )


def test_length_scales_of_a_callable_optimizer_are_kept():
    def optimizer(objective, initial_theta, bounds):
        value, gradient = objective(initial_theta)
        assert gradient.shape == initial_theta.shape == bounds[:, 0].shape
        return initial_theta + 0.1, objective(initial_theta + 0.1, eval_gradient=False)

    model = GaussianProcessRegressor(1.0 * RBF(), alpha=0.1, optimizer=optimizer).fit(X, Y)
    np.testing.assert_allclose(model.kernel_.theta, [0.1, 0.1])


def test_prediction_before_a_fit_is_of_the_prior():
    model = GaussianProcessRegressor(2.0 * RBF(), n_targets=2)
    mean, std = model.predict(X_NEW, return_std=True)
    assert mean.shape == std.shape == (7, 2) and not mean.any()
    np.testing.assert_allclose(std, np.sqrt(2.0))


def test_the_density_and_the_interval_are_of_a_new_observation():
    model = GaussianProcessRegressor(1.0 * RBF() + NOISE, alpha=0.05, normalize_y=True).fit(X, Y)
    mean, var = model.latent_mean_and_variance(X_NEW)
    std = np.sqrt(var + model.noise_variance_)
    lower, upper = model.predict_interval(X_NEW, 0.5)
    np.testing.assert_allclose(model.predict_quantiles(X_NEW, 0.75), upper)
    np.testing.assert_allclose(upper - lower, 2 * 0.6744897501960817 * std)
    expected = -0.5 * (np.log(2 * np.pi * std**2) + ((1.0 - mean) / std) ** 2)
    np.testing.assert_allclose(model.log_predictive_density(X_NEW, np.ones(7)), expected)


def test_quantiles_have_the_alpha_of_the_fit():
    model = GaussianProcessRegressor(1.0 * RBF(), alpha=0.05, optimizer=None).fit(X, Y)
    quantiles = model.predict_quantiles(X_NEW, [0.1, 0.9])
    model.set_params(alpha=2.0)
    assert model.noise_variance_ == pytest.approx(0.05)
    np.testing.assert_array_equal(model.predict_quantiles(X_NEW, [0.1, 0.9]), quantiles)


@pytest.mark.parametrize(
    "kernel",
    [
        RBF() + WhiteKernel(0.2) + WhiteKernel(0.1),
        2.0 * (0.5 * RBF() + WhiteKernel(0.1)) + WhiteKernel(0.1),
        RBF() + WhiteKernel(0.1) * ConstantKernel(3.0),
    ],
)
def test_noise_is_what_white_kernels_sum_up_to(kernel):
    model, simple = (
        GaussianProcessRegressor(each, optimizer=None).fit(X, Y)
        for each in (kernel, RBF() + WhiteKernel(0.3))
    )
    assert model.noise_variance_ == pytest.approx(0.3)
    for call in (
        lambda m: m.latent_mean_and_variance(X_NEW),
        lambda m: m.predict_interval(X_NEW),
    ):
        np.testing.assert_allclose(call(model), call(simple), atol=1e-8)


@pytest.mark.parametrize("method", ["exact", "qsgp"])
def test_noise_of_one_target_is_a_number_whatever_the_shape_of_y(method):
    params = dict(kernel=RBF() + NOISE, method=method, optimizer=None, normalize_y=True)
    one, column = (GaussianProcessRegressor(**params).fit(X, y) for y in (Y, Y[:, None]))
    assert np.ndim(column.noise_variance_) == 0
    assert column.noise_variance_ == pytest.approx(one.noise_variance_)


def test_noise_that_is_multiplied_by_a_kernel_is_not_named():
    model = GaussianProcessRegressor(RBF() * WhiteKernel() + RBF(), optimizer=None).fit(X, Y)
    assert not hasattr(model, "noise_variance_")
    assert np.isfinite(model.predict_interval(X_NEW)).all()
    with pytest.raises(ValueError, match="does not tell its noise from f; write it as a sum"):
        model.latent_mean_and_variance(X_NEW)


@pytest.mark.parametrize("name", ["ard", "pairwise"])
@pytest.mark.parametrize("y", [Y, np.column_stack([Y, 3 * Y])], ids=["one", "two"])
def test_tiles_of_new_rows_are_predicted_alike(name, y, monkeypatch):
    model = GaussianProcessRegressor(KERNELS[name], optimizer=None, normalize_y=True).fit(X, y)
    many = RNG.uniform(-2, 2, (50, 2))
    whole, mean = model.predict(many, return_std=True), model.predict(many)
    sizes = []
    tiles = _gpr_prediction.cross_gram
    monkeypatch.setattr(_gpr_prediction, "tile_rows", lambda row_bytes: 7)
    monkeypatch.setattr(
        _gpr_prediction, "cross_gram", lambda k, A, B: sizes.append(len(A)) or tiles(k, A, B)
    )
    for tiled, expected in zip(model.predict(many, return_std=True), whole, strict=True):
        np.testing.assert_allclose(tiled, expected, atol=1e-12)
    np.testing.assert_allclose(model.predict(many), mean, atol=1e-12)
    assert max(sizes) == 7


def test_predictions_of_few_pairs_take_one_thread_of_torch(monkeypatch):
    model = GaussianProcessRegressor(KERNELS["ard"], optimizer=None).fit(X, Y)
    threads, variance = [], _gpr_prediction.variance
    monkeypatch.setattr(
        _gpr_prediction,
        "variance",
        lambda *args: threads.append(torch.get_num_threads()) or variance(*args),
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model.predict(np.tile(X, (3, 1)), return_std=True)
        assert threads == [1] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_predictions_of_many_rows_keep_to_the_budget(monkeypatch):
    model = GaussianProcessRegressor(KERNELS["ard"], optimizer=None).fit(X, Y)
    many = np.tile(X, (250, 1))
    sizes, tiles = [], _gpr_prediction.cross_gram
    monkeypatch.setattr(
        _gpr_prediction, "cross_gram", lambda k, A, B: sizes.append(len(A)) or tiles(k, A, B)
    )
    model.set_params(memory_budget=1e6).predict(many, return_std=True)
    assert 8 * 40 * max(sizes) < 1e6 / 4


# ---- other methods

SERIES = X[:, :1]


@pytest.fixture
def few_exact(monkeypatch):
    monkeypatch.setattr(_front_door.defaults, "EXACT_ROWS", 20)


@pytest.mark.parametrize(
    ("inputs", "params", "method", "reason"),
    [
        (SERIES, {}, "state_space", "40 observations are more than 20, and X has one column"),
        (X, {}, "qsgp", "X has 2 columns"),
        (np.tile(X, 3), {}, "qsgp", "X has 6 columns"),
        (SERIES, {"kernel": DotProduct()}, "qsgp", "X has 1 column"),
        (X, {"likelihood": "student_t"}, "neighbors", "likelihood='student_t'"),
        (SERIES, {"likelihood": "student_t"}, "state_space", "likelihood='student_t'"),
        (X, {"likelihood": "laplace"}, "qsgp", "likelihood='laplace'"),
        (X, {"kernel": 1.0 * PairwiseKernel()}, "exact", "evaluated by calling it"),
        (X[:20], {}, "exact", "20 observations are no more than 20"),
        (X, {"method": "exact"}, "exact", "as asked for"),
    ],
)
def test_auto_takes_the_method_that_suits(few_exact, inputs, params, method, reason):
    model = GaussianProcessRegressor(optimizer=None, random_state=0, **params)
    model.fit(inputs, Y[: len(inputs)])
    assert model.method_ == method and reason in model.reason_
    assert np.isfinite(model.predict(inputs[:3], return_std=True)).all()
    assert hasattr(model, "L_") == (method == "exact")


@pytest.mark.parametrize(
    ("inputs", "kernel", "method"),
    [
        (X, None, "vecchia"),
        (X, 1.0 * RBF([1.0, 2.0]) + NOISE, "vecchia"),
        (X, RBF([1.0, 2.0]) + Matern([2.0, 1.0]) + NOISE, "qsgp"),  # no single distance
        (np.tile(X, 3), None, "qsgp"),
        (SERIES, None, "state_space"),
    ],
)
def test_many_places_on_a_map_are_those_of_vecchia(few_exact, monkeypatch, inputs, kernel, method):
    monkeypatch.setattr(_front_door.defaults, "MANY_PLACES", 30)
    model = GaussianProcessRegressor(kernel, optimizer=None, random_state=0).fit(inputs, Y)
    assert model.method_ == method


@pytest.mark.parametrize(
    ("method", "cls", "options"),
    [
        ("qsgp", QSGPRegressor, {}),
        ("neighbors", VecchiaGPRegressor, {}),
        ("vecchia", VecchiaGPRegressor, {}),
        ("state_space", StateSpaceGPRegressor, {}),
    ],
)
def test_another_method_is_its_estimator(method, cls, options):
    kernel = 1.0 * Matern(nu=1.5) + NOISE
    shared = dict(kernel=kernel, optimizer=None, random_state=0)
    model = GaussianProcessRegressor(method=method, normalize_y=True, **shared).fit(SERIES, Y)
    direct = cls(**shared, **options).fit(SERIES, Y)
    for asked in ({}, {"return_std": True}, {"return_cov": True}):
        for mine, other in zip(
            model.predict(SERIES[:5], **asked), direct.predict(SERIES[:5], **asked), strict=True
        ):
            np.testing.assert_array_equal(mine, other)
    for call in (
        lambda m: m.sample_y(SERIES[:5], 2, random_state=1),
        lambda m: m.log_predictive_density(SERIES, Y),
        lambda m: m.predict_interval(SERIES),
        lambda m: m.score(SERIES, Y),
    ):
        np.testing.assert_array_equal(call(model), call(direct))


@pytest.mark.parametrize("normalize_y", [False, True])
def test_several_targets_of_many_rows_are_those_of_qsgp(normalize_y, few_exact):
    """And of the exact process, in its units, the noise of alpha left out."""
    y = np.column_stack([Y, X[:, 0] ** 2 + 1e4])  # means differ, not spreads
    shared = dict(kernel=2.0 * RBF() + NOISE, alpha=0.1, optimizer=None, normalize_y=normalize_y)
    many = GaussianProcessRegressor(**shared).fit(SERIES, y)
    exact = GaussianProcessRegressor(method="exact", **shared).fit(SERIES, y)
    assert (many.method_, exact.method_) == ("qsgp", "exact")
    assert many.sample_y(SERIES[:5], 3).shape == many.sample_f(SERIES[:5], 3).shape == (5, 2, 3)
    for asked in (
        {},
        {"return_std": True},
        {"return_cov": True},
        {"return_std": True, "return_mean_grad": True, "return_std_grad": True},
    ):
        for mine, other in zip(
            many.predict(SERIES[:5], **asked), exact.predict(SERIES[:5], **asked), strict=True
        ):
            np.testing.assert_allclose(mine, other, rtol=1e-7, atol=1e-9)
    for call in (
        lambda m: m.log_predictive_density(SERIES, y),
        lambda m: m.predict_quantiles(SERIES, [0.1, 0.5]),
        lambda m: m.latent_mean_and_variance(SERIES)[0],
        lambda m: m.noise_variance_,
        lambda m: m.log_marginal_likelihood_value_,
    ):
        np.testing.assert_allclose(call(many), call(exact), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.1, np.full(40, 0.1)], ids=["number", "constant array"])
@pytest.mark.parametrize("noise", [None, WhiteKernel(0.1, "fixed"), WhiteKernel(0.1)])
@pytest.mark.parametrize("normalize_y", [False, True])
def test_alpha_is_noise_of_another_method_and_left_out_of_its_predictions(
    alpha, noise, normalize_y
):
    kernel = 1.0 * Matern(nu=1.5) if noise is None else noise + 1.0 * Matern(nu=1.5)
    params = dict(kernel=kernel, alpha=alpha, optimizer=None, normalize_y=normalize_y)
    exact = GaussianProcessRegressor(method="exact", **params).fit(SERIES, Y)
    other = GaussianProcessRegressor(method="state_space", **params).fit(SERIES, Y)
    for asked in ({"return_std": True}, {"return_cov": True}):
        for mine, expected in zip(
            other.predict(SERIES[:6], **asked), exact.predict(SERIES[:6], **asked), strict=True
        ):
            np.testing.assert_allclose(mine, expected, atol=1e-6)
    assert other.noise_variance_ == pytest.approx(exact.noise_variance_)
    assert other.sample_y(SERIES[:3], 4).shape == (3, 4)


@pytest.mark.parametrize("alpha", [0.02, 2.0])
@pytest.mark.parametrize("method", ["qsgp", "neighbors", "state_space"])
def test_noise_is_learned_beside_alpha(method, alpha):
    kernel = 1.0 * Matern(nu=1.5) + WhiteKernel(0.1)
    exact, other = (
        GaussianProcessRegressor(kernel, alpha=alpha, method=taken, random_state=0).fit(SERIES, Y)
        for taken in ("exact", method)
    )
    assert other.noise_variance_ == pytest.approx(exact.noise_variance_, rel=0.01)
    for mine, expected in zip(
        other.predict(SERIES[:6], True), exact.predict(SERIES[:6], True), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=0.02, atol=0.01)


def test_an_alpha_that_differs_from_row_to_row_is_exact(few_exact):
    kernel = 1.0 * Matern(nu=1.5) + WhiteKernel(0.1)
    model = GaussianProcessRegressor(kernel, alpha=ALPHAS["array"]).fit(SERIES, Y)
    theirs = Original(kernel, alpha=ALPHAS["array"]).fit(SERIES, Y)
    assert model.method_ == "exact" and "alpha differs from row to row" in model.reason_
    assert model.log_marginal_likelihood_value_ == pytest.approx(
        theirs.log_marginal_likelihood_value_, abs=1e-4
    )


def test_the_evidence_at_theta_needs_the_exact_method():
    model = GaussianProcessRegressor(method="state_space", optimizer=None).fit(SERIES, Y)
    with pytest.raises(ValueError, match="needs method='exact'; 'state_space' was taken"):
        model.log_marginal_likelihood(model.kernel_.theta)


@pytest.mark.parametrize(
    ("params", "y", "message"),
    [
        (
            {"method": "state_space"},
            np.column_stack([Y, Y]),
            "2 targets, which share a ker.*Set meth",
        ),
        ({"method": "qsgp", "kernel": PairwiseKernel()}, Y, "by calling it. Set method='exact'"),
        ({"method": "qsgp", "likelihood": "poisson"}, Y, "'laplace'.; got likelihood='poisson'"),
        ({"method": "exact", "likelihood": "poisson"}, Y, "likelihood='poisson' needs another"),
        ({"method": "neighbors", "alpha": ALPHAS["array"]}, Y, "sample_weight. Set method='exact'"),
    ],
)
def test_what_cannot_be_is_refused(params, y, message):
    with pytest.raises(ValueError, match=message):
        GaussianProcessRegressor(**params).fit(X, y)


@pytest.mark.parametrize("alpha", [0.1, np.full(40, 0.1)], ids=["number", "array"])
def test_alpha_beside_other_noise_is_reported(alpha):
    params = dict(kernel=RBF(), optimizer=None, likelihood="student_t", random_state=0)
    with pytest.warns(UserWarning, match="alpha=.*0.*no effect with likelihood='student_t'") as w:
        model = GaussianProcessRegressor(alpha=alpha, **params).fit(X, Y)
    assert sum("no effect" in str(each.message) for each in w) == 1
    plain = GaussianProcessRegressor(**params).fit(X, Y)
    np.testing.assert_array_equal(model.predict(X), plain.predict(X))


@pytest.mark.parametrize(
    "kernel",
    [
        2.0 * (Matern(nu=1.5) + WhiteKernel(0.1)),
        (WhiteKernel(0.1) + 0.5 * (Matern(nu=1.5) + RBF(2.0))) * ConstantKernel(2.0, "fixed"),
        2.0 * (RBF() + 0.5 * (Matern(nu=1.5) + WhiteKernel(0.2))),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["qsgp", "neighbors"])
def test_noise_within_a_constant_is_that_of_another_method(kernel, method):
    exact, other = (
        GaussianProcessRegressor(kernel, method=taken, optimizer=None, normalize_y=True).fit(X, Y)
        for taken in ("exact", method)
    )
    np.testing.assert_allclose(other.kernel_(X), kernel(X), rtol=1e-12)
    assert other.noise_variance_ == pytest.approx(exact.noise_variance_)
    if method == "qsgp":
        for mine, expected in zip(other.predict(X, True), exact.predict(X, True), strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-6)


def test_noise_that_cannot_leave_its_product_is_told_where_to_go():
    kernel = 2.0 * (RBF() + WhiteKernel(0.1, "fixed"))
    with pytest.raises(ValueError, match=r"signal \+ WhiteKernel\(noise_level\)"):
        GaussianProcessRegressor(kernel, method="qsgp").fit(X, Y)


@pytest.mark.parametrize("method", ["qsgp", "neighbors"])
def test_a_constant_target_is_that_of_the_estimator_itself(method):
    """Its default alpha was taken for noise, and the length scale went to its bound."""
    y = np.full(40, 3.7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = GaussianProcessRegressor(method=method, random_state=0).fit(X, y)
        cls = {"qsgp": QSGPRegressor, "neighbors": VecchiaGPRegressor}[method]
        direct = cls(random_state=0).fit(X, y)
    assert model.kernel_ == direct.kernel_
    np.testing.assert_allclose(model.predict(X_NEW), 3.7, rtol=1e-12)


@pytest.mark.parametrize("method", ["exact", "qsgp"])
def test_a_constant_target_leaves_the_noise_of_the_others_as_it_is(method):
    """It counted as one without noise, its mean being rounded: two targets had half of theirs."""
    X, y = np.tile(SERIES, (10, 1)), np.tile(Y, 10) + RNG.standard_normal(400)
    kernel = 1.0 * RBF() + WhiteKernel(1.0)
    params = dict(kernel=kernel, method=method, normalize_y=True, random_state=0)
    two = GaussianProcessRegressor(**params).fit(X, np.column_stack([y, np.full(400, 3.7)]))
    one = GaussianProcessRegressor(**params).fit(X, y)
    np.testing.assert_allclose(two.kernel_.theta, one.kernel_.theta, rtol=1e-6)
    assert two.noise_variance_[0] == pytest.approx(one.noise_variance_)
    np.testing.assert_allclose(two.predict(X_NEW[:, :1])[:, 1], 3.7, rtol=1e-12)
    if method == "exact":  # the value is that of all targets, as scikit-learn's
        value = two.log_marginal_likelihood(two.kernel_.theta)
        assert two.log_marginal_likelihood_value_ == pytest.approx(value)


@pytest.mark.parametrize("n_samples", [-1, 2.5, "3", None, True])
@pytest.mark.parametrize("method", ["exact", "qsgp"])
@pytest.mark.parametrize("draw", ["sample_f", "sample_y"])
def test_a_number_of_draws_that_is_none_is_refused(draw, method, n_samples):
    model = GaussianProcessRegressor(RBF(), optimizer=None, method=method).fit(X, Y)
    owner = model if method == "exact" else model.estimator_
    with pytest.raises(ValueError, match=f"n_samples must be .*got {n_samples!r}. Give"):
        getattr(owner, draw)(X_NEW, n_samples)
    assert getattr(owner, draw)(X_NEW, 0).shape == (len(X_NEW), 0)
    assert getattr(owner, draw)(X_NEW, np.int64(2)).shape == (len(X_NEW), 2)


def test_a_fit_without_room_is_refused():
    with pytest.raises(MemoryError, match="7 matrices of 40 x 40 numbers.*raise memory_budget"):
        GaussianProcessRegressor(memory_budget=1e4).fit(X, Y)


def test_kernels_without_a_closed_form_here_are_called():
    for kernel in (1.0 * ExpSineSquared(), PairwiseKernel(), RBF() * WhiteKernel()):
        assert type(training.training_gram(kernel, X)) is training.CalledGram


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_a_search_finds_can_be_factored(seed):
    X = np.random.default_rng(seed).uniform(0, 1, (210, 3))
    y = X @ [1.0, 2.0, 3.0]
    kernel = 1.0 * RBF([1.0, 1.0, 1.0]) + WhiteKernel(0.1, (1e-10, 1e3))
    model = GaussianProcessRegressor(kernel, normalize_y=True).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, atol=1e-2)


def test_a_kernel_of_several_is_refused():
    kernel = CompoundKernel([RBF(), RBF()])
    for make in (GaussianProcessRegressor, GaussianProcessClassifier):
        with pytest.raises(ValueError, match="kernel cannot be a CompoundKernel; give one"):
            make(kernel).fit(np.arange(4.0)[:, None], [0, 1, 0, 1])
