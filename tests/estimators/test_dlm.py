"""DLMGPRegressor: contracts; exact, sparse, of every likelihood; choice of beta; streams."""

import warnings

import numpy as np
import pytest
from scipy import integrate, stats
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, Matern, WhiteKernel
from sklearn.model_selection import GridSearchCV

from skgp import DLMGPClassifier, DLMGPRegressor
from skgp.datasets import make_counts
from skgp.estimators._predictive import log_predictive_density_scorer
from skgp.learning.sparse import defaults
from skgp.learning.sparse.search import fit_all_rows
from tests.contracts.estimators import (
    CountRegressorPredictions,
    RegressorContract,
    RegressorPredictions,
    rbf_kernel,
)
from tests.covering import slow_case

QUICK = dict(n_inducing=15, max_iter=30, random_state=0)
KERNEL = 1.3 * Matern(0.8, nu=2.5) + WhiteKernel(0.05)
links = pytest.mark.parametrize("link", ["exp", "softplus"])


def wave(n=300, *, seed=0, noise=0.3):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (n, 1))
    return X, np.sin(2 * X[:, 0]) + noise * rng.standard_normal(n)


def student(**params):
    """By one kernel, where by default four are compared."""
    defaults = dict(likelihood="student_t", n_inducing=20, max_iter=40, random_state=0)
    defaults["kernel"] = 1.0 * RBF(1.0) + WhiteKernel(0.1)
    return DLMGPRegressor(**{**defaults, **params})


def kept_student(**params):
    """An estimator with hyper-parameters that suit `heavy_data` and are kept."""
    return student(**{"kernel": rbf_kernel(), "optimizer": None, **params})


def counting(**params):
    defaults = dict(likelihood="poisson", n_inducing=15, max_iter=20, random_state=0)
    defaults["kernel"] = 1.0 * RBF(1.0)
    return DLMGPRegressor(**{**defaults, **params})


def kept_counting(**params):
    """An estimator with hyper-parameters that suit `count_data` and are kept."""
    return counting(**{"kernel": ConstantKernel(0.5) * RBF(0.5), "optimizer": None, **params})


def score(estimator, X, y):
    """Mean log-density of rows, in nats."""
    return estimator.log_predictive_density(X, y).mean()


@pytest.fixture(scope="module")
def heavy_data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (60, 2))
    noise = rng.standard_t(3, 60)
    return X, 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.15 * noise)


@pytest.fixture(scope="module")
def count_data():
    return make_counts(60, mean=5.0, dispersion=np.inf, random_state=0)


class DLM:
    """What the contracts ask of every kind of fit."""

    offers_state = False
    params = {}

    def make(self, **params):
        settings = {"n_inducing": 20, "max_iter": 10, "random_state": 0, **self.params}
        return DLMGPRegressor(**{**settings, **params})


class OneKernel(DLM):
    """With one kernel where iterations count, for by default four are compared."""

    def make_iterative(self, **params):
        return self.make(kernel=self.kernel(), **params)


class TestContract(OneKernel, RegressorContract):
    pass


class TestSquareLossContract(OneKernel, RegressorPredictions):
    params = {"objective": "square_loss"}


class TestStudentContract(OneKernel, RegressorPredictions):
    gaussian = False
    heavy_tailed = True
    params = {"likelihood": "student_t", "n_inducing": 40, "max_iter": 5}


class TestCountContract(DLM, CountRegressorPredictions):
    params = {"likelihood": "poisson", "max_iter": 15}


def test_max_iter_bounds_the_comparison_of_default_kernels(count_data, monkeypatch):
    asked = []

    def search(*args, max_iter, **options):
        asked.append(max_iter)
        return fit_all_rows(*args, max_iter=max_iter, **options)

    monkeypatch.setattr("skgp.learning.sparse.start.fit_all_rows", search)
    DLMGPRegressor(likelihood="poisson", n_inducing=5, max_iter=6, random_state=0).fit(*count_data)
    assert len(asked) > 4 and max(asked) <= 3  # a start has half of the iterations


# ---- few points: the exact process -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_few_points_learn_hyper_parameters_of_the_greatest_evidence():
    X, y = wave(60, noise=0.2)
    model = DLMGPRegressor(KERNEL, normalize_y=False, random_state=0).fit(X, y)
    dense = GaussianProcessRegressor(KERNEL).fit(X, y)
    assert model.elbo_ == pytest.approx(dense.log_marginal_likelihood_value_, abs=0.05)


@pytest.mark.parametrize(("n", "n_inducing"), [(80, "auto"), (40, 40), (300, 30)])
def test_noise_is_as_little_as_that_of_the_targets(n, n_inducing):
    """Of the exact process; by the ELBO of few rows; and by the log-loss, which stops at that."""
    X, _ = wave(n, noise=0.2)
    kernel = RBF() + WhiteKernel(1e-2, (1e-6, 1.0))
    model = DLMGPRegressor(kernel, n_inducing=n_inducing, random_state=0).fit(X, np.sin(X[:, 0]))
    assert model.kernel_.k2.noise_level < 2e-5


@pytest.mark.parametrize("make", [DLMGPRegressor, DLMGPClassifier])
def test_defaults_warn_of_no_number_that_nobody_gave(make):
    X, y = wave(30, noise=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        make(max_iter=5).fit(X, y if make is DLMGPRegressor else y > 0)
        DLMGPRegressor(likelihood="poisson", max_iter=5).fit(X, np.rint(np.exp(y)))


def test_rows_added_to_an_exact_fit_count_as_if_there_from_the_start():
    X, y = wave(90, noise=0.2)
    options = {"optimizer": None, "normalize_y": False}
    whole, parts = (DLMGPRegressor(KERNEL, **options).fit(X[:30], y[:30]) for _ in range(2))
    whole.partial_fit(X[30:], y[30:])
    parts.partial_fit(X[30:60], y[30:60]).partial_fit(X[60:], y[60:])
    dense = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, y)
    for model in (whole, parts):
        np.testing.assert_allclose(model.predict(X), dense.predict(X), atol=0.005)


def test_a_stream_in_order_takes_points_where_it_has_come_to():
    X, y = wave(200, noise=0.2)
    options = {"optimizer": None, "normalize_y": False}
    model = DLMGPRegressor(KERNEL, **options)
    few = DLMGPRegressor(KERNEL, n_inducing=50, **options)
    for rows in np.array_split(np.argsort(X[:, 0]), 4):
        model.partial_fit(X[rows], y[rows])
        few.partial_fit(X[rows], y[rows])
    dense = GaussianProcessRegressor(KERNEL, optimizer=None).fit(X, y)
    new = np.linspace(-3, 3, 50)[:, None]
    for found, expected in zip(
        *(m.predict(new, return_std=True) for m in (model, dense)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=0.01)
    assert model.n_inducing_ == len(model.inducing_points_) < 150
    assert few.n_inducing_ == 50  # as many as were asked for


@pytest.mark.filterwarnings("ignore:n_inducing=60 is more than the 40 distinct rows")
def test_the_first_batches_of_a_stream_leave_inducing_points_to_the_others():
    X, y = wave(240, noise=0.1)
    model = DLMGPRegressor(1.0 * RBF(0.05) + WhiteKernel(0.01), optimizer=None, n_inducing=60)
    sizes = []
    for rows in np.array_split(np.argsort(X[:, 0]), 6):
        model.partial_fit(X[rows], y[rows])
        sizes.append(model.n_inducing_)
    assert (np.diff(sizes) > 0).all() and sizes[-1] <= 60


def test_a_stream_of_counts_in_order_takes_points_where_it_has_come_to(count_data):
    X, y = count_data
    order = np.argsort(X[:, 0])
    model, whole = (kept_counting(n_inducing=40, objective="elbo") for _ in range(2))
    for rows in np.array_split(order, 4):
        model.partial_fit(X[rows], y[rows])
    expected = whole.fit(X, y).predict(X)
    assert np.abs(model.predict(X) - expected).mean() < 0.2 * expected.std()


def columns(n=160, d=3):
    """Rows of which many more than n_inducing=15 are needed, and some beyond."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n + 50, d))
    return X[:n], np.sin(X[:, 0] * X[:, 1]) + 0.3 * X[:, 2] + 0.1 * rng.standard_normal(n + 50), X


@pytest.mark.parametrize(
    "params",
    [{}, {"likelihood": "student_t"}, {"warp_inputs": True}, {"warm_start": True}],
)
def test_units_change_no_bit_that_a_search_could_amplify(params):
    X, y, X_all = columns()
    units, shift, of_y = np.array([1000.0, 0.3048, 1 / 7]), np.array([0.0, 40.0, 0.0]), 2.54

    def fit(scale, shift, of_y):
        model = DLMGPRegressor(**{**QUICK, "max_iter": 60, **params})
        for _ in range(1 + model.warm_start):
            model.fit(scale * X + shift, of_y * y[: len(X)])
        return model, *model.predict(scale * X_all + shift, return_std=True)

    one, mean, std = fit(1.0, 0.0, 1.0)
    other, scaled_mean, scaled_std = fit(units, shift, of_y)
    np.testing.assert_allclose(scaled_mean / of_y, mean, atol=1e-9)
    np.testing.assert_allclose(scaled_std / of_y, std, rtol=1e-9)
    if not params:  # attributes are in the units of X
        length = [model.kernel_.k1.k2.length_scale for model in (one, other)]
        np.testing.assert_allclose(length[1], units * length[0], rtol=1e-9)
        points = units * one.inducing_points_ + shift
        np.testing.assert_allclose(other.inducing_points_, points, atol=1e-9)


def test_offsets_far_beyond_the_spread_cost_a_smooth_function_no_digit():
    X, y, X_all = columns(80, 3)
    rows, new = (np.round(each * 2**10) / 2**10 for each in (X, X_all[-5:]))  # exact after 2^30
    y = np.sin(rows[:, 0]) + 0.3 * rows[:, 1]

    def found(offset):
        model = DLMGPRegressor(random_state=0).fit(rows + offset, y)
        covariance = model.predict(new + offset, return_cov=True)[1]
        gradients = model.predict(
            new + offset, return_mean_grad=True, return_std=True, return_std_grad=True
        )
        return covariance, model.inducing_points_ - offset, *gradients

    for near, far in zip(found(0.0), found(2.0**30), strict=True):
        np.testing.assert_allclose(far, near, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("warm", [False, True])
def test_single_precision_goes_on_from_a_fit_far_from_zero(warm):
    X, y = wave(160, noise=0.05)
    X = X + 1e9
    model = DLMGPRegressor(**{**QUICK, "dtype": "float32", "warm_start": warm}).fit(X[::2], y[::2])
    before = model.score(X[1::2], y[1::2])
    goes_on = model.fit if warm else model.partial_fit
    assert goes_on(X[::4], y[::4]).score(X[1::2], y[1::2]) > before - 0.02


def test_rounding_of_a_constant_column_is_not_taken_for_a_signal():
    X, y = wave(60, noise=0.1)
    rounding = np.spacing(1e9) * np.random.default_rng(0).integers(-3, 4, 60)
    one, other = (
        DLMGPRegressor(random_state=0).fit(np.column_stack([X, 1e9 + each]), y)
        for each in (np.zeros(60), rounding)
    )
    new = np.column_stack([X + 0.01, np.full(60, 1e9)])
    np.testing.assert_allclose(other.predict(new), one.predict(new), atol=1e-5)


def test_many_points_are_sparse(monkeypatch):
    monkeypatch.setattr(defaults, "EXACT_ROWS", 100)
    monkeypatch.setattr(defaults, "AUTO_INDUCING", 12)
    monkeypatch.setattr(defaults, "AUTO_SIZES", (24, 48))
    model = DLMGPRegressor(max_iter=5, random_state=0).fit(*wave(200, noise=0.2))
    assert model.n_inducing_ in (12, 24, 48) and model.validation_loss_ is not None


def test_joint_search_wants_rows_for_its_points():
    """A process with a point for every other row is nearly exact, and a joint search overfits."""
    X, y = wave(120)
    held_out = [
        DLMGPRegressor(KERNEL, n_inducing=M, max_iter=5, **options).fit(X, y).validation_loss_
        is not None
        for M, options in ((40, {}), (60, {}), (60, {"early_stopping": True}))
    ]
    assert held_out == [True, False, True]


def test_few_rows_lengthen_the_scale_of_a_column_of_noise_of_the_default_kernel():
    """Beside one that matters; a kernel of the user's is left to the evidence."""
    X, y = wave(60)
    X = np.hstack([X, np.random.default_rng(1).standard_normal((60, 1))])
    default = DLMGPRegressor(n_inducing=60).fit(X, y)
    kernel = default.kernel_.clone_with_theta(np.log([1.0, *X.std(axis=0), 0.1]))
    own = DLMGPRegressor(kernel, n_inducing=60).fit(X, y)
    # Chosen among families of length scales, which the evidence of few rows overfits.
    assert np.ptp(default.kernel_.theta[1:3]) > np.ptp(own.kernel_.theta[1:3]) > 1
    X_new, y_new = wave(500, seed=2)
    X_new = np.hstack([X_new, np.random.default_rng(3).standard_normal((500, 1))])
    chosen, free = (m.log_predictive_density(X_new, y_new).mean() for m in (default, own))
    assert chosen > free


@pytest.mark.slow
def test_two_of_fifty_columns_are_found_with_few_inducing_points():
    """Of these the ELBO alone found none: predictions were the mean of y."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 50))
    f = 2 * np.sin(2 * X[:, 3]) * X[:, 7]
    y = f + 0.3 * rng.normal(size=len(X))
    model = DLMGPRegressor(n_inducing=20, random_state=0).fit(X[:200], y[:200])
    assert model.score(X[200:], f[200:]) > 0.9
    assert list(np.sort(np.argsort(model.kernel_.k1.k2.length_scale)[:2])) == [3, 7]


@pytest.mark.slow
def test_gross_errors_may_happen_where_none_has_happened_before():
    """Variances of the log-loss were .1 nats worse than the single one of the ELBO."""
    rng = np.random.default_rng(1)

    def draw(n):
        X = rng.uniform(0, 1, (n, 3))
        f = np.sin(3 * X[:, 0]) + 0.5 * X[:, 2] + 0.3 * np.sin(60 * X[:, 1]) * X[:, 0]
        y, gross = f + 0.03 * rng.standard_normal(n), rng.random(n) < 0.004
        y[gross] += 2 * rng.choice([-1, 1], gross.sum())
        return X, y

    (X, y), new = draw(2000), draw(4000)
    kernel = 1.0 * RBF([1.0, 1.0, 1.0]) + WhiteKernel(0.01)
    options = dict(n_inducing=60, max_iter=60, random_state=0)
    by_log_loss, by_elbo = (
        DLMGPRegressor(kernel, objective=name, **options).fit(X, y).log_predictive_density(*new)
        for name in ("log_loss", "elbo")
    )
    assert by_log_loss.mean() > by_elbo.mean() - 0.02


# ---- beta ----------------------------------------------------------------------------------------


def many_points_for_few_rows():
    """Of 40 points learned from 200 rows a fold: wants a great weight of the divergence."""
    rng = np.random.default_rng(1)
    X = rng.uniform(-3, 3, (300, 1))
    return X, np.sin(2 * X[:, 0]) + 0.3 * rng.standard_normal(300), {"n_inducing": 40}


def few_points_for_a_rough_function():
    """The model is wrong, and knows nothing of it: wants a small weight."""
    rng = np.random.default_rng(2)
    X = rng.uniform(-3, 3, (400, 1))
    y = np.sin(6 * X[:, 0]) * (X[:, 0] > 0) + 0.05 * rng.standard_normal(400)
    kernel = 1.0 * RBF(1.0, "fixed") + WhiteKernel(0.1)
    return X, y, {"n_inducing": 8, "inducing": "fixed", "kernel": kernel}


@pytest.mark.slow
@pytest.mark.parametrize("problem", [many_points_for_few_rows, few_points_for_a_rough_function])
def test_beta_auto_agrees_with_grid_search_within_a_step(problem):
    """Where the log density of rows left out depends on beta by much."""
    X, y, params = problem()
    model = DLMGPRegressor(max_iter=40, random_state=0, **params)
    betas = [0.0625, 0.25, 1.0, 4.0]
    scoring = log_predictive_density_scorer
    search = GridSearchCV(model, {"beta": betas}, scoring=scoring, cv=3, refit=False).fit(X, y)
    chosen = model.set_params(beta="auto").fit(X, y).beta_
    nearest = np.abs(np.log(np.divide(betas, chosen))).argmin()
    assert abs(nearest - betas.index(search.best_params_["beta"])) <= 1


# ---- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "sizes", "lost"),
    [(0.1, (300, 300), 0.05), slow_case(0.3, (100, 100, 100, 100), 0.15)],
)
def test_partial_fit_of_the_log_loss_keeps_its_quality(noise, sizes, lost):
    """The width of the first posterior stands for noise, and is no weak prior."""
    X, y = wave(sum(sizes), noise=noise)
    fresh = wave(300, seed=1, noise=noise)
    first, *others = np.split(np.arange(len(y)), np.cumsum(sizes)[:-1])
    model = DLMGPRegressor(**QUICK).partial_fit(X[first], y[first])
    before = score(model, *fresh)
    for rows in others:
        model.partial_fit(X[rows], y[rows])
    assert score(model, *fresh) > before - lost
    assert model.score(*fresh) > 0.8


def test_variances_of_a_stream_rise_with_its_targets(rng):
    X = rng.uniform(-2, 2, size=(600, 3))
    y = np.exp(X[:, 0]) + np.sin(3 * X[:, 1]) + 0.1 * rng.standard_normal(600)
    model = DLMGPRegressor(random_state=0)
    for rows in np.array_split(np.argsort(y[:300]), 6):
        model.partial_fit(X[rows], y[rows])
    std = model.predict(X[300:], return_std=True)[1]
    assert np.mean((model.predict(X[300:]) - y[300:]) ** 2 / std**2) < 2


def test_variances_of_a_stream_rise_by_the_weights_of_all_that_it_has_seen():
    X, y = wave(120)
    model = DLMGPRegressor(objective="elbo", heteroscedastic=False, **QUICK)
    model.partial_fit(X[:40], y[:40]).partial_fit(X[40:80], y[40:80], np.full(40, 10.0))
    X, y = X[80:], y[80:] + 2.0
    mean, std = model.predict(X, return_std=True)
    before, squares = model.noise_variance_, np.sum(((y - mean) / std) ** 2)
    model.partial_fit(X, y)
    expected = (40 + 400 + squares) / (40 + 400 + 40)
    np.testing.assert_allclose(model.noise_variance_ / before, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "params", "share"),
    [
        (kept_counting, {"link": "exp", "objective": "elbo"}, 0.5),
        (kept_counting, {"link": "softplus", "objective": "elbo"}, 0.5),
        (kept_student, {"kernel": RBF(1.5) + WhiteKernel(0.05)}, 0.9),
        (kept_student, {"kernel": RBF(1.5) + WhiteKernel(0.05), "objective": "elbo"}, 0.2),
    ],
)
def test_stream_comes_near_the_fit_of_all_rows(make, params, share, heavy_data, count_data):
    X, y = count_data if make is kept_counting else (heavy_data[0], (heavy_data[1] - 30) / 4)
    stream, whole, first = (make(normalize_y=False, **params) for _ in range(3))
    for rows in (slice(0, 20), slice(20, 40), slice(40, 60)):
        stream.partial_fit(X[rows], y[rows])
    whole.fit(X, y), first.fit(X[:20], y[:20])
    errors = [np.abs(fit.predict(X) - whole.predict(X)).mean() for fit in (stream, first)]
    assert errors[0] < share * errors[1]
    if make is kept_counting:
        with pytest.raises(ValueError, match="y must hold counts"):
            stream.partial_fit(X, y + 0.5)


# ---- Student-t noise -----------------------------------------------------------------------------


def average(noise, f, y):
    """Density of y = f + noise, by quadrature on either side of the peak of the noise."""
    ends = sorted((y, *f.interval(1 - 1e-15)))
    return sum(
        integrate.quad(lambda x: noise.pdf(y - x) * f.pdf(x), *part, epsabs=0)[0]
        for part in zip(ends[:-1], ends[1:], strict=True)
    )


@pytest.mark.parametrize("df", [2.5, 5.0])
def test_density_is_the_noise_averaged_over_f_in_the_units_of_y(df, heavy_data):
    X_new = np.random.default_rng(1).uniform(-3, 3, (7, 2))
    fit = kept_student(degrees_of_freedom=df).fit(*heavy_data)
    assert fit.degrees_of_freedom_ == pytest.approx(df, rel=1e-12)
    assert fit.likelihood_scale_ == pytest.approx(np.sqrt(0.05) * fit.y_scale_, rel=1e-12)
    assert fit.noise_variance_ == pytest.approx(fit.likelihood_scale_**2 * df / (df - 2), rel=1e-9)
    mean, var = fit.latent_mean_and_variance(X_new)
    noise = stats.t(df, scale=fit.likelihood_scale_)
    y = mean + np.resize([-8.0, 0.0, 1.5], 7) * fit.y_scale_
    found = fit.log_predictive_density(X_new, y)
    for row in range(3):
        f = stats.norm(mean[row], np.sqrt(var[row]))
        assert found[row] == pytest.approx(np.log(average(noise, f, y[row])), abs=1e-5)


@pytest.mark.slow
def test_degrees_of_freedom_and_scale_are_learned():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (400, 1))
    y = np.sin(2 * X[:, 0]) + 0.1 * rng.standard_t(3, 400)
    fit = student(objective="elbo", n_inducing=15).fit(X, y)
    assert 2.1 <= fit.degrees_of_freedom_ < 5
    assert fit.likelihood_scale_ == pytest.approx(0.1, rel=0.25)
    level = fit.kernel_.k2.noise_level * fit.y_scale_**2
    assert level == pytest.approx(fit.likelihood_scale_**2, rel=1e-12)
    normal = student(objective="elbo", n_inducing=15)
    normal.fit(X, np.sin(2 * X[:, 0]) + 0.1 * rng.standard_normal(400))
    assert normal.degrees_of_freedom_ > 3 * fit.degrees_of_freedom_


@pytest.mark.parametrize("objective", ["log_loss", slow_case("elbo")])
def test_what_is_fixed_is_kept(objective, heavy_data):
    kernel = RBF(1.5) + WhiteKernel(0.08, "fixed")
    fit = student(kernel=kernel, degrees_of_freedom=3.5, objective=objective, max_iter=20).fit(
        *heavy_data
    )
    assert fit.degrees_of_freedom_ == pytest.approx(3.5, rel=1e-12)
    assert fit.likelihood_scale_ == pytest.approx(np.sqrt(0.08) * fit.y_scale_, rel=1e-12)
    assert fit.kernel_.k1.length_scale != 1.5
    theta = kept_student(objective=objective).fit(*heavy_data).kernel_.theta
    np.testing.assert_allclose(theta, rbf_kernel().theta, rtol=1e-12)


def test_outliers_pull_no_harder_from_further_away():
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (80, 1))
    y, wrong = np.sin(2 * X[:, 0]), 20.0 * (np.arange(80) < 4)
    options = dict(kernel=RBF(1.0) + WhiteKernel(0.01), degrees_of_freedom=3.0, normalize_y=False)
    near, far = (kept_student(**options).fit(X, y + k * wrong).predict(X) for k in (1, 1000))
    np.testing.assert_allclose(far, near, atol=1e-2)
    assert np.abs(near - y).max() < 0.3


@pytest.mark.parametrize("objective", ["log_loss", "elbo"])
def test_search_does_not_end_at_a_function_of_nothing(objective):
    """From a prior far wider than the noise, rows begin where the density curves upwards."""
    rng = np.random.default_rng(1)
    X = rng.uniform(-2, 2, (120, 5))
    y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * X[:, 3]
    kernel = 1.0 * RBF(np.ones(5)) + WhiteKernel(0.1)
    fit = student(objective=objective, n_inducing=60, kernel=kernel).fit(X, y)
    assert fit.score(X, y) > 0.9


# ---- counts --------------------------------------------------------------------------------------


@links
def test_prior_mean_is_that_of_the_counts(link, count_data):
    """Far from the rows the rate is the link of the mean count's own f, and its spread."""
    weights = np.where(np.arange(60) < 30, 3.0, 1.0)
    for weight in (None, weights):
        fit = kept_counting(link=link).fit(*count_data, sample_weight=weight)
        mean, var = fit.latent_mean_and_variance([[1e3]])
        rate = np.exp(mean) if link == "exp" else np.logaddexp(0, mean)
        assert rate[0] == pytest.approx(np.average(count_data[1], weights=weight), rel=1e-9)
        assert var[0] == pytest.approx(0.5, rel=1e-6)


@links
def test_rates_are_learned_and_intervals_cover(link):
    X, y = make_counts(400, mean=20.0, dispersion=np.inf, random_state=1)
    fit = counting(link=link).fit(X[:200], y[:200])
    assert fit.score(X[200:], y[200:]) > 0.6
    # A Poisson law of the right rate has an expected log-probability of about this.
    law = -0.5 * np.log(2 * np.pi * np.e * y[200:].clip(1)).mean()
    assert score(fit, X[200:], y[200:]) > law - 0.15
    lower, upper = fit.predict_interval(X[200:], coverage=0.9)
    covered = ((lower <= y[200:]) & (y[200:] <= upper)).mean()
    assert 0.85 < covered < 0.97


@pytest.mark.slow
def test_one_huge_count_leaves_the_others_alone(count_data):
    X_new = np.linspace(-1, 1, 7)[:, None]
    X, y = count_data[0], count_data[1].copy()
    y[5] = 10_000
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit = counting(kernel=None).fit(X, y)
        mean, std = fit.predict(X_new, return_std=True)
    assert np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()
    assert np.isfinite(fit.log_predictive_density(X, y)).all()
    assert np.median(np.abs(fit.predict_quantiles(X, 0.5) - count_data[1])) < 10


@pytest.mark.parametrize(("link", "size"), [("exp", 1e4), slow_case("softplus", 1e-2)])
def test_rates_of_any_size(link, size):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (300, 1))
    rate = size * np.exp(np.sin(3 * X[:, 0]))
    fit = counting(link=link, max_iter=30).fit(X, rng.poisson(rate))
    found = fit.predict(X)
    if size > 1:
        np.testing.assert_allclose(found, rate, rtol=0.1)
    else:
        assert found.mean() == pytest.approx(rate.mean(), rel=0.7) and (found > 0).all()


@pytest.mark.slow
def test_the_log_loss_predicts_overdispersed_counts_better_than_the_bound():
    X, y = make_counts(250, random_state=0)
    fresh, counts = make_counts(2400, random_state=0)
    models = [
        counting(objective=objective, max_iter=30).fit(X, y) for objective in ("log_loss", "elbo")
    ]
    density = [model.log_predictive_density(fresh[400:], counts[400:]).mean() for model in models]
    assert density[0] > density[1] + 0.1
