"""StateSpaceGPRegressor: the contracts, series, additive models, streams, awkward data."""

import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import (
    RBF,
    ExpSineSquared,
    Matern,
    WhiteKernel,
)

from skgp import StateSpaceGPClassifier, StateSpaceGPRegressor
from skgp.kernels import ActiveDims
from tests.contracts.common import Recorder
from tests.contracts.estimators import (
    CountRegressorPredictions,
    RegressorContract,
    rbf_kernel,
)
from tests.covering import covering, slow
from tests.same import assert_same

KERNEL = 1.0 * Matern(2.0, nu=1.5) + WhiteKernel(0.05)
COUNT_KERNEL = 0.5 * Matern(2.0, nu=1.5)
LIKELIHOODS = ("gaussian", "student_t", "poisson")
likelihoods = pytest.mark.parametrize("likelihood", LIKELIHOODS)


class AdditiveContract:
    """What differs: parts name their columns, and single precision is refused."""

    offers_state = False

    @pytest.mark.parametrize("dtype", ["float64"])
    def test_predictions_do_not_depend_on_the_batch(self, data, dtype):
        super().test_predictions_do_not_depend_on_the_batch(data, dtype)


def additive_kernel(n_columns):
    """A kernel that sees two columns; one with more length scales than there are columns."""
    if n_columns > 2:
        return RBF([1.0] * n_columns)
    first, second = (ActiveDims(1.0 * Matern(1.5, nu=1.5), [j]) for j in range(2))
    return first + second


TWO_COLUMNS = ActiveDims(1.0 * RBF(1.0), [0]) + ActiveDims(1.0 * RBF(1.0), [1])


class TestContract(AdditiveContract, RegressorContract):
    easy_r2 = 0.7  # the data have an interaction
    scalar_kernel = TWO_COLUMNS + WhiteKernel(0.05)
    length_scale = "kernel__k1__k1__kernel__k2__length_scale"

    def make(self, **params):
        if params.get("kernel") == rbf_kernel():
            params["kernel"] = self.kernel()
        return StateSpaceGPRegressor(**params)

    def kernel(self, n_columns=2):
        return additive_kernel(n_columns) + WhiteKernel(0.05)


class TestCountContract(AdditiveContract, CountRegressorPredictions):
    scalar_kernel = TWO_COLUMNS
    length_scale = "kernel__k1__kernel__k2__length_scale"

    def make(self, **params):
        return StateSpaceGPRegressor(**{"likelihood": "poisson", **params})

    def kernel(self, n_columns=2):
        return additive_kernel(n_columns)


def kept(**params):
    """An estimator with hyper-parameters that suit `data` and are kept."""
    counts = params.get("likelihood") == "poisson"
    kernel = COUNT_KERNEL if counts else KERNEL
    return StateSpaceGPRegressor(**{"kernel": kernel, "optimizer": None, **params})


@pytest.fixture(scope="module")
def data():
    """Times in no order, some of them twice."""
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 20, 120)
    x[:10] = x[10:20]
    return x[:, None], 30 + 4 * (np.sin(x) + 0.2 * rng.standard_normal(120))


@pytest.fixture(scope="module")
def counts(data):
    rng = np.random.default_rng(1)
    return data[0], rng.poisson(np.exp(1 + np.sin(data[0][:, 0])))


@pytest.fixture(scope="module")
def X_new():
    return np.array([[3.0], [-2.0], [19.5], [24.0], [3.0], [11.0]])


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (80, 3))
    return X, 5 + np.sin(2 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.standard_normal(80)


def target(likelihood, data, counts):
    return counts if likelihood == "poisson" else data


# ---- predictions of a series -----------------------------------------------------------------


@pytest.mark.parametrize("n_inducing", [None, 110])
def test_series_is_the_dense_gp(n_inducing, data, X_new):
    X, y = data
    z = (y - y.mean()) / y.std()
    dense = GaussianProcessRegressor(KERNEL, optimizer=None, alpha=1e-14).fit(X, z)
    fit = kept(n_inducing=n_inducing).fit(X, y)
    mean, covariance = dense.predict(X_new, return_cov=True)
    found = fit.predict(X_new, return_cov=True)
    np.testing.assert_allclose((found[0] - y.mean()) / y.std(), mean, atol=1e-8)
    # scikit-learn has its noise between equal rows too.
    expected = covariance / 1.0
    same = (X_new == X_new.T) & ~np.eye(6, dtype=bool)
    np.testing.assert_allclose((found[1] / y.var())[~same], expected[~same], atol=1e-8)
    assert fit.log_marginal_likelihood_value_ == pytest.approx(
        dense.log_marginal_likelihood_value_, abs=1e-6
    )


@likelihoods
@pytest.mark.parametrize("n_inducing", [None, 30])
def test_far_away_the_prior_is_predicted(likelihood, n_inducing, data, counts):
    fit = kept(likelihood=likelihood, n_inducing=n_inducing)
    fit.fit(*target(likelihood, data, counts))
    mean, var = fit.latent_mean_and_variance([[-1e5], [1e5], [1e9]])
    scale = COUNT_KERNEL.k1.constant_value if likelihood == "poisson" else fit.y_scale_**2
    # The mean of the exponential is that of the counts.
    prior = np.log(counts[1].mean()) - scale / 2 if likelihood == "poisson" else data[1].mean()
    np.testing.assert_allclose(mean, prior, rtol=1e-10)
    np.testing.assert_allclose(var, scale, rtol=1e-10)


def test_components_are_the_summands_and_sum_to_the_mean(data, X_new):
    kernel = KERNEL + 0.3 * ExpSineSquared(0.7, 2.0) * Matern(3.0, nu=0.5)
    fit = kept(kernel=kernel).fit(*data)
    mean, std = fit.predict_components(X_new, return_std=True)
    assert mean.shape == std.shape == (6, 2) and len(fit.component_kernels_) == 2
    np.testing.assert_allclose(mean.sum(1) + fit.intercept_, fit.predict(X_new), rtol=1e-10)
    assert fit.intercept_ == pytest.approx(data[1].mean())
    alone = GaussianProcessRegressor(kernel, optimizer=None)
    z = (data[1] - data[1].mean()) / data[1].std()
    alone.fit(data[0], z)
    share = fit.component_kernels_[0](X_new, data[0]) @ alone.alpha_
    np.testing.assert_allclose(mean[:, 0] / fit.y_scale_, share, atol=1e-6)
    assert_same(fit.predict_components(X_new), mean)


@likelihoods
def test_missing_targets_are_rows_left_out(likelihood, data, counts, X_new):
    X, y = target(likelihood, data, counts)
    weights, missing = np.linspace(1, 2, len(y)), np.arange(len(y)) % 5 == 0
    holes = np.where(missing, np.nan, y)
    fit = kept(likelihood=likelihood).fit(X, holes, weights)
    rest = kept(likelihood=likelihood).fit(X[~missing], y[~missing], weights[~missing])
    assert_same(fit.predict(X_new), rest.predict(X_new))
    assert np.isfinite(fit.predict(X)).all()
    as_lists = kept(likelihood=likelihood).fit(X.tolist(), holes.tolist(), weights.tolist())
    assert_same(as_lists.predict(X_new), rest.predict(X_new))


@pytest.mark.slow
def test_gaps_and_few_inducing_states_leave_a_fit():
    """The search tries length scales of 1e4 gaps, where RBF on states at knots has no digits."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 40, 130))
    y = np.sin(x) + 0.3 * np.sin(3.1 * x) + 0.1 * rng.standard_normal(130)
    gap = (x > 20) & (x < 24)
    kernel = 1.0 * RBF(0.8) + WhiteKernel(0.02)
    fit = StateSpaceGPRegressor(kernel, n_inducing=15).fit(x[:, None], np.where(gap, np.nan, y))
    rest = StateSpaceGPRegressor(kernel, n_inducing=15).fit(x[~gap, None], y[~gap])
    assert_same(fit.predict(x[:, None]), rest.predict(x[:, None]))
    assert np.mean((fit.predict(x[:, None]) - y)[~gap] ** 2) < 0.1


# ---- what is learned --------------------------------------------------------------------------


def test_default_learns_a_series_and_tells_of_it(data):
    X, y = data
    fit = StateSpaceGPRegressor().fit(X, y)
    assert fit.noise_variance_ == pytest.approx(0.64, rel=0.4)
    assert fit.log_marginal_likelihood_value_ > kept().fit(X, y).log_marginal_likelihood_value_
    assert fit.n_iter_ >= 1 and len(fit.history_["solve"]) == fit.n_iter_
    grid = np.linspace(0, 20, 50)
    assert np.abs(fit.predict(grid[:, None]) - 30 - 4 * np.sin(grid)).max() < 2
    assert not hasattr(fit, "inducing_points_")


def test_as_many_inducing_states_as_the_length_scale_asks_for(data):
    # By default the exact model alone looks for seasons, and these data have one.
    kernel = 1.0 * Matern(2.0, nu=1.5) + WhiteKernel(0.1)
    exact = StateSpaceGPRegressor(kernel).fit(*data)
    fit = StateSpaceGPRegressor(kernel, n_inducing="auto").fit(*data)
    assert fit.inducing_points_.shape[1] == 1 and len(fit.inducing_points_) <= 110
    assert fit.log_marginal_likelihood_value_ == pytest.approx(
        exact.log_marginal_likelihood_value_, abs=0.5
    )


def test_inducing_states_that_move_raise_the_bound(data):
    settings = {"n_inducing": 10, "max_iter": 20}
    still, moved = (
        StateSpaceGPRegressor(KERNEL, inducing=places, **settings).fit(*data)
        for places in ("fixed", "learned")
    )
    gain = moved.log_marginal_likelihood_value_ - still.log_marginal_likelihood_value_
    assert gain > 0.5
    assert (np.diff(moved.inducing_points_[:, 0]) > 0).all()


def test_student_t_learns_its_degrees_of_freedom(data):
    X, y = (part[:70] for part in data)
    y = y + 15 * (np.random.default_rng(5).random(70) < 0.1)
    kernel = 1.0 * Matern(2.0, nu=1.5) + WhiteKernel(0.1)
    fit = StateSpaceGPRegressor(kernel, likelihood="student_t", max_iter=15).fit(X, y)
    assert fit.degrees_of_freedom_ < 10 and fit.likelihood_scale_ == pytest.approx(0.8, rel=0.6)
    plain = StateSpaceGPRegressor(kernel).fit(X, y)
    truth = 30 + 4 * np.sin(X[:, 0])
    assert np.abs(fit.predict(X) - truth).mean() < np.abs(plain.predict(X) - truth).mean()


def test_noise_that_is_fixed_stays(data):
    kernel = 1.0 * Matern(2.0, nu=1.5) + WhiteKernel(0.3, "fixed")
    fit = StateSpaceGPRegressor(kernel).fit(*data)
    assert fit.kernel_.k2.noise_level == pytest.approx(0.3, rel=1e-12)
    assert fit.noise_variance_ == pytest.approx(0.3 * fit.y_scale_**2, rel=1e-12)
    assert fit.kernel_.k1.k2.length_scale != 2.0


def test_bounds_that_are_reached_are_told(data):
    kernel = 1.0 * Matern(0.1, (0.05, 0.2), nu=1.5) + WhiteKernel(0.1)
    with pytest.warns(ConvergenceWarning, match="length_scale.*close to the specified upper"):
        StateSpaceGPRegressor(kernel).fit(*data)


def test_without_optimizer_the_default_kernel_is_kept(data):
    fit = StateSpaceGPRegressor(optimizer=None).fit(*data)
    assert fit.n_iter_ == 0 and fit.kernel_.k1.k2.nu == 1.5
    assert fit.kernel_.k1.k2.length_scale == pytest.approx(0.02 * np.ptp(data[0]))


@pytest.mark.parametrize("likelihood", slow(LIKELIHOODS, but=["gaussian"]))
def test_warm_start_goes_on_from_the_last_fit(likelihood, data, counts):
    X, y = (part[:30] for part in target(likelihood, data, counts))
    options = {"likelihood": likelihood, "max_iter": 3}
    fit = StateSpaceGPRegressor(warm_start=True, **options).fit(X, y)
    first = fit.log_marginal_likelihood_value_
    assert fit.fit(X, y).log_marginal_likelihood_value_ >= first - 1e-6
    # Another model begins anew.
    other = "gaussian" if likelihood == "student_t" else "student_t"
    fresh = {"kernel": KERNEL, "likelihood": other}
    again = fit.set_params(**fresh).fit(X, y)
    cold = StateSpaceGPRegressor(max_iter=3, **fresh).fit(X, y)
    np.testing.assert_allclose(again.kernel_.theta, cold.kernel_.theta)


def test_callbacks_and_their_stop_in_every_part_of_a_fit(data, X_new):
    recorder = Recorder()
    fit = StateSpaceGPRegressor().set_callbacks(recorder).fit(*data)
    n_iter = recorder.ended.count("iteration")
    assert n_iter > fit.n_iter_  # those of the choice of the kernel
    plain = StateSpaceGPRegressor().fit(*data)
    assert_same(fit.predict(X_new), plain.predict(X_new))
    for stop_after in (1, 3, n_iter):
        recorder = Recorder(stop_after=stop_after)
        fit = StateSpaceGPRegressor().set_callbacks(recorder).fit(*data)
        assert recorder.ended.count("iteration") == stop_after
        assert np.isfinite(fit.predict(X_new, return_std=True)).all()


# ---- streams ----------------------------------------------------------------------------------


def test_stream_is_the_fit_of_all_rows(data, X_new):
    X, y = data
    stream = kept(normalize_y=False)
    for rows in np.array_split(np.arange(120), 4):
        assert stream.partial_fit(X[rows], y[rows]) is stream
    whole = kept(normalize_y=False).fit(X, y)
    for a, b in zip(
        stream.predict(X_new, return_std=True), whole.predict(X_new, return_std=True), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-10)
    assert stream.y_mean_ == 0.0


def test_stream_keeps_hyperparameters_and_standardisation(data):
    X, y = data
    fit = StateSpaceGPRegressor().partial_fit(X[:60], y[:60])
    before = fit.kernel_.theta.copy(), fit.y_mean_, fit.y_scale_
    fit.partial_fit(X[60:], np.where(np.arange(60) % 7 == 0, np.nan, y[60:]))
    np.testing.assert_array_equal(fit.kernel_.theta, before[0])
    assert (fit.y_mean_, fit.y_scale_) == before[1:]
    with pytest.raises(ValueError, match="2 features"):
        fit.partial_fit(np.ones((3, 2)), np.ones(3))


@covering(likelihood=LIKELIHOODS, n_inducing=[20, None])
def test_stream_comes_near_the_fit_of_all_rows(likelihood, n_inducing, data, counts):
    X, y = target(likelihood, data, counts)
    stream = kept(likelihood=likelihood, n_inducing=n_inducing)
    order = np.argsort(X[:, 0])
    for rows in np.array_split(order, 3):
        stream.partial_fit(X[rows], y[rows])
    first = kept(likelihood=likelihood).fit(X[order[:40]], y[order[:40]])
    whole = kept(likelihood=likelihood).fit(X, y)
    densities = [fit.log_predictive_density(X, y).mean() for fit in (first, stream, whole)]
    assert densities[1] > 0.2 * densities[0] + 0.8 * densities[2]
    if n_inducing is not None:
        assert 40 < len(stream.inducing_points_) < 80


@pytest.mark.parametrize("few", [1000, 50])
def test_stream_of_columns_is_the_fit_of_all_rows(few, columns, monkeypatch):
    monkeypatch.setattr("skgp.estimators._state_space_common.STREAM_ROWS", few)
    X, y = np.round(columns[0], 1), columns[1]
    kernel = 1.0 * Matern(1.0, nu=1.5) + WhiteKernel(0.1)
    stream = kept(kernel=kernel, normalize_y=False, posterior="joint")
    for rows in np.array_split(np.arange(80), 3):
        stream.partial_fit(X[rows], y[rows])
    whole = clone(stream).fit(X, y)
    for a, b in zip(
        stream.predict(X, return_std=True), whole.predict(X, return_std=True), strict=True
    ):
        # In bins of the first rows, once there are many.
        np.testing.assert_allclose(a, b, rtol=1e-8 if few == 1000 else 0.1)


def test_stream_cannot_go_on_from_rows_that_are_gone(columns, monkeypatch):
    monkeypatch.setattr("skgp.estimators._state_space_common.STREAM_ROWS", 50)
    fit = kept().fit(*columns)
    with pytest.raises(ValueError, match="from a fit of more than 50 rows.*begin the stream with"):
        fit.partial_fit(*columns)


# ---- additive models --------------------------------------------------------------------------


@pytest.mark.parametrize("posterior", ["mean_field", "joint"])
def test_components_of_columns_sum_to_the_mean(posterior, columns):
    X, y = columns
    fit = StateSpaceGPRegressor(posterior=posterior, n_inducing=20, max_iter=5).fit(X, y)
    mean, std = fit.predict_components(X, return_std=True)
    assert mean.shape == std.shape == (80, 3) and (std > 0).all()
    np.testing.assert_allclose(mean.sum(1) + fit.intercept_, fit.predict(X), rtol=1e-8)
    np.testing.assert_allclose(mean.mean(0), 0, atol=0.01)
    assert fit.sample_y(X[:4], 3).shape == (4, 3)
    assert fit.predict(X[:4], return_cov=True)[1].shape == (4, 4)


def test_columns_that_no_part_sees_are_left_alone(columns):
    X, y = columns
    kernel = ActiveDims(1.0 * Matern(1.0, nu=2.5), [1]) + WhiteKernel(0.1)
    fit = kept(kernel=kernel).fit(X, y)
    assert fit.predict_components(X).shape == (80, 1)
    other = X.copy()
    other[:, [0, 2]] = 7.0
    assert_same(fit.predict(X), fit.predict(other))
    dense = GaussianProcessRegressor(kernel, optimizer=None).fit(X, (y - y.mean()) / y.std())
    expected = y.mean() + y.std() * dense.predict(X)
    np.testing.assert_allclose(fit.predict(X), expected, rtol=0.02)


def test_warm_start_of_columns(columns):
    fit = StateSpaceGPRegressor(warm_start=True, max_iter=3).fit(*columns)
    first = fit.log_marginal_likelihood_value_
    assert fit.fit(*columns).log_marginal_likelihood_value_ > first


# ---- awkward data -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:n_inducing=.* is more than the:UserWarning")
@pytest.mark.parametrize("n_inducing", [None, 4])
def test_all_times_equal(n_inducing):
    y = np.random.default_rng(0).normal(3.0, 1.0, 30)
    fit = StateSpaceGPRegressor(n_inducing=n_inducing).fit(np.full((30, 1), 7.0), y)
    mean, std = fit.predict([[7.0], [1e6]], return_std=True)
    np.testing.assert_allclose(mean, y.mean(), atol=0.3)
    np.testing.assert_allclose(std, y.std(), rtol=0.3)


@likelihoods
def test_constant_y_is_predicted(likelihood, data, X_new):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit = StateSpaceGPRegressor(likelihood=likelihood).fit(data[0], np.full(120, 7.0))
        mean, std = fit.predict(X_new, return_std=True)
    np.testing.assert_allclose(mean, 7.0, rtol=0.1)
    assert np.isfinite(std).all()


@pytest.mark.parametrize("n", [30, 60])  # beneath a line, and with a trend
def test_times_in_a_unit_whose_cube_is_no_number(n):
    x = np.linspace(0, 10, n)[:, None]
    y = np.sin(x[:, 0]) + x[:, 0]
    mean = StateSpaceGPRegressor().fit(1e-200 * x, y).predict([[5.1e-200]])
    np.testing.assert_allclose(mean, np.sin(5.1) + 5.1, atol=1e-3)


def test_times_of_any_integer_type(data, X_new):
    X, y = np.rint(10 * data[0]), data[1]
    expected = kept().fit(X, y).predict(X_new)
    for dtype in (np.int64, np.uint16, np.float32):
        assert_same(kept().fit(X.astype(dtype), y).predict(X_new), expected)


def test_kernels_that_name_no_column_are_refused(columns):
    with pytest.raises(ValueError, match="names no column.*ActiveDims"):
        StateSpaceGPRegressor(ActiveDims(RBF(), [0]) + RBF()).fit(*columns)
    with pytest.raises(ValueError, match=r"sees the columns \[0, 1\].*sum of"):
        StateSpaceGPRegressor(ActiveDims(RBF(), [0, 1])).fit(*columns)


def test_data_that_cannot_be_are_named(data):
    X, y = data
    with pytest.raises(ValueError, match="all its 120 targets are missing.*at least one"):
        StateSpaceGPRegressor().fit(X, np.full(120, np.nan))
    with pytest.raises(ValueError, match="y contains infinity"):
        StateSpaceGPRegressor().fit(X, np.where(y > 30, np.inf, np.nan))
    with pytest.raises(ValueError, match="X contains infinity"):
        StateSpaceGPRegressor().fit(np.where(X > 19, np.inf, X), y)
    with pytest.raises(ValueError, match="y must hold counts.*-2 in row 3.*Correct or drop"):
        StateSpaceGPRegressor(likelihood="poisson").fit(X, np.where(np.arange(120) == 3, -2, 1))
    left_out = np.isin(np.arange(120), [0, 2])
    with pytest.raises(ValueError, match=r"got -2.0 in row 3 \(1 of 118 rows"):
        counts = np.where(left_out, np.nan, np.where(np.arange(120) == 3, -2, 1))
        StateSpaceGPRegressor(likelihood="poisson").fit(X, counts)
    with pytest.raises(ValueError, match="X contains NaN.*first in row 5"):
        StateSpaceGPRegressor().fit(
            np.where(np.arange(120)[:, None] == 5, np.nan, X), np.where(left_out, np.nan, y)
        )
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        StateSpaceGPRegressor().fit(X[:-1], np.where(y > 30, np.nan, y))


def test_forty_columns_fit_in_a_moment():
    X = np.random.default_rng(0).normal(size=(20, 40))
    model = StateSpaceGPRegressor(max_iter=3, random_state=0).fit(X, X[:, 0])
    assert len(model.component_kernels_) == 40
    names = [str(part) for part in model.component_kernels_]
    first, second = model.kernel_.k1, model.kernel_  # signal, signal + noise
    assert str(second.k2).startswith("WhiteKernel")
    while hasattr(first, "k1") and type(first).__name__ == "Sum":
        first = first.k1
    assert str(first) == names[0]


@pytest.mark.parametrize(("n", "d", "seed"), [(60, 26, 0), (100, 60, 1)])
def test_default_of_few_rows_and_many_columns_is_not_overconfident(n, d, seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n + 500, d))
    y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * rng.standard_normal(n + 500)
    mean, std = StateSpaceGPRegressor().fit(X[:n], y[:n]).predict(X[n:], return_std=True)
    z = (y[n:] - mean) / std
    assert np.mean(np.abs(z) < 1.96) > 0.8
    assert np.mean(z**2 / 2 + np.log(std)) < np.log(y[:n].std()) + 0.5  # what a constant has


@pytest.mark.parametrize("d", [1, 2])
def test_noise_is_that_of_the_start_where_nothing_is_learned(d):
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(30, d)), rng.standard_normal(30)
    fixed = StateSpaceGPRegressor(optimizer=None, normalize_y=False).fit(X, y)
    alone = StateSpaceGPRegressor(normalize_y=False).fit(X[:1], y[:1])
    assert fixed.noise_variance_ == pytest.approx(0.1)
    assert alone.noise_variance_ == pytest.approx(0.1)


def test_counts_in_a_burst_do_not_grow_beyond_it():
    """Far from the data the expected count is that of the data."""
    t, rng = np.arange(120.0)[:, None], np.random.default_rng(0)
    y = np.where((t[:, 0] > 60) & (t[:, 0] < 66), rng.poisson(20, 120), 0)
    fit = StateSpaceGPRegressor(likelihood="poisson").fit(t, y)
    np.testing.assert_allclose(fit.predict(t + 1e4), y.mean(), rtol=1e-6)
    assert fit.predict(t[:60] + 120).sum() < y.sum()
    assert fit.predict(t).sum() == pytest.approx(y.sum(), rel=0.02)


@pytest.mark.parametrize("n_columns", [1, 2])
def test_counts_that_are_all_zero_are_predicted_as_few(rng, n_columns):
    X = rng.uniform(0, 10, (100, n_columns))
    fit = StateSpaceGPRegressor(likelihood="poisson").fit(X, np.zeros(100))
    mean, std = fit.predict(np.concatenate([X, X + 20]), return_std=True)
    assert mean.max() < 0.02
    assert std.max() < 0.2


def test_an_event_of_little_weight_or_exposure_is_next_to_none():
    t, y, few = np.arange(60.0)[:, None], np.zeros(60), np.ones(60)
    y[20], few[20] = 1, 1e-3
    fit = StateSpaceGPRegressor(likelihood="poisson").fit(t, y, sample_weight=few)
    mean, std = fit.predict(t, return_std=True)
    assert mean.max() < 0.02
    assert std.max() < 0.2
    fit.fit(t, y, exposure=np.where(y, 1e-6, 1e6))
    np.testing.assert_allclose(fit.predict(t), 1 / 59e6, rtol=0.05)


# ---- minibatches ---------------------------------------------------------------------------------


SIGNAL = 1.0 * Matern(1.0, nu=1.5)


@pytest.fixture
def series(rng):
    x = rng.uniform(0, 10, 400)[:, None]
    return x, np.sin(2 * x[:, 0])


@pytest.mark.slow
def test_minibatches_learn_what_all_rows_teach(series, rng):
    x, f = series
    y = f + 0.2 * rng.standard_normal(400)
    options = {"kernel": SIGNAL, "n_inducing": 25, "random_state": 0}
    model = StateSpaceGPRegressor(batch_size=50, max_iter=40, **options).fit(x, y)
    whole = StateSpaceGPRegressor(**options).fit(x, y)
    assert model.n_iter_ == 40
    assert model.log_marginal_likelihood_value_ > whole.log_marginal_likelihood_value_ - 3
    assert np.sqrt(np.mean((model.predict(x) - f) ** 2)) < 0.07


def test_minibatches_of_classes(series, rng):
    x, f = (column[:120] for column in series)
    labels = np.digitize(f + 0.1 * rng.standard_normal(120), [-0.5, 0.5])
    options = {"n_inducing": 20, "batch_size": 30, "max_iter": 10, "random_state": 0}
    kernel = 4.0 * Matern(1.0, "fixed", nu=1.5)
    model = StateSpaceGPClassifier(kernel, **options).fit(x, labels)
    assert model.score(x, labels) > 0.85


def test_minibatches_need_inducing_states(series):
    with pytest.raises(ValueError, match=r"batch_size=50 is for inducing states, and n_inducing=N"):
        StateSpaceGPRegressor(batch_size=50).fit(*series)
    X = np.column_stack([series[0], series[0] ** 2])
    with pytest.warns(UserWarning, match="batch_size"):
        StateSpaceGPRegressor(n_inducing=8, batch_size=50, max_iter=2).fit(X, series[1])
