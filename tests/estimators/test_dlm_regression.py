"""DLMGPRegressor: the contracts, choice of beta, likelihoods, streams, bad input."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from skgp import DLMGPRegressor
from skgp.datasets import make_counts
from skgp.estimators._predictive import log_predictive_density_scorer
from skgp.learning.defaults import BETAS
from tests.contracts.estimators import (
    CountRegressorContract,
    Recorder,
    RegressorContract,
    RegressorPredictions,
)

QUICK = dict(n_inducing=15, max_iter=30, random_state=0)


def wave(n=300, *, seed=0, noise=0.3):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (n, 1))
    return X, np.sin(2 * X[:, 0]) + noise * rng.standard_normal(n)


class TestContract(RegressorContract):
    offers_state = False

    def make(self, **params):
        return DLMGPRegressor(**{"n_inducing": 30, "max_iter": 20, "random_state": 0, **params})

    def make_iterative(self, **params):
        """With one kernel, for by default four are compared."""
        return self.make(kernel=self.kernel(), **params)


class TestSquareLossContract(RegressorPredictions):
    offers_state = False
    weight_rtol = 1e-6  # of a standard deviation that is learned

    def make(self, **params):
        settings = {"objective": "square_loss", "n_inducing": 30, "max_iter": 20}
        return DLMGPRegressor(**{**settings, "random_state": 0, **params})

    def make_iterative(self, **params):
        """With one kernel, for by default four are compared."""
        return self.make(kernel=self.kernel(), **params)


class TestCountContract(CountRegressorContract):
    offers_state = False

    def make(self, **params):
        settings = {"n_inducing": 30, "max_iter": 30, "random_state": 0, "likelihood": "poisson"}
        return DLMGPRegressor(**{**settings, **params})


def test_joint_search_wants_rows_for_its_points():
    """A process with a point for every other row is nearly exact, and a joint search overfits."""
    X, y = wave(120)
    held_out = [
        DLMGPRegressor(n_inducing=M, max_iter=5, **options).fit(X, y).validation_loss_ is not None
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


def test_beta_auto_reports_its_path_and_costs_few_fits():
    X, y = wave()
    counts = Recorder(), Recorder()
    single = DLMGPRegressor(**QUICK).set_callbacks(counts[0]).fit(X, y)
    model = DLMGPRegressor(beta="auto", **QUICK).set_callbacks(counts[1]).fit(X, y)
    assert model.beta_ in model.beta_path_
    assert list(model.beta_path_) == [beta for beta in BETAS if beta in model.beta_path_]
    n_single, n_path = (recorder.ended.count("iteration") for recorder in counts)
    assert n_path <= 4 * n_single
    assert single.beta_ == 1.0 and single.beta_path_ == {}


def density_of_pipeline(pipeline, X, y):
    return pipeline[-1].log_predictive_density(pipeline[:-1].transform(X), y).mean()


def test_grid_search_over_beta_and_points_runs_in_parallel():
    """Far too much regularisation, or far too few points, is what it turns down."""
    X, y = wave(200)
    grid = {"dlmgpregressor__beta": [100.0, 1.0], "dlmgpregressor__n_inducing": [2, 10]}
    quick = DLMGPRegressor(**{**QUICK, "max_iter": 10})
    pipeline = make_pipeline(StandardScaler(), quick)
    search = GridSearchCV(pipeline, grid, scoring=density_of_pipeline, cv=2, n_jobs=2)
    search.fit(X, y)
    assert search.best_params_ == {"dlmgpregressor__beta": 1.0, "dlmgpregressor__n_inducing": 10}


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


def test_partial_fit_of_the_log_loss_keeps_the_quality_of_a_good_fit():
    """Two halves: the width of the first posterior stands for noise, and is no weak prior."""
    X, y = wave(600, noise=0.1)
    fresh, target = wave(300, seed=1, noise=0.1)
    model = DLMGPRegressor(**QUICK).partial_fit(X[:300], y[:300])
    before = model.log_predictive_density(fresh, target).mean()
    model.partial_fit(X[300:], y[300:])
    assert model.log_predictive_density(fresh, target).mean() > before - 0.05


@pytest.mark.parametrize("objective", ["elbo", "square_loss", "fitc"])
def test_partial_fit_adds_rows_exactly(objective):
    X, y = wave(300)
    kernel = 1.0 * RBF(0.7) + WhiteKernel(0.1)
    options = {"kernel": kernel, "optimizer": None, "normalize_y": False, "objective": objective}
    whole = DLMGPRegressor(**{**QUICK, **options}).fit(X[:100], y[:100])
    whole.partial_fit(X[100:], y[100:])
    parts = DLMGPRegressor(**{**QUICK, **options}).partial_fit(X[:100], y[:100])
    for rows in (slice(100, 200), slice(200, 300)):
        parts.partial_fit(X[rows], y[rows])
    np.testing.assert_allclose(parts.predict(X), whole.predict(X), rtol=1e-8, atol=1e-8)
    assert np.abs(parts.predict(X) - np.sin(2 * X[:, 0])).mean() < 0.1


def test_partial_fit_of_the_log_loss_keeps_its_quality():
    X, y = wave(400)
    fresh, target = wave(200, seed=1)
    model = DLMGPRegressor(**QUICK).partial_fit(X[:100], y[:100])
    before = model.log_predictive_density(fresh, target).mean()
    for rows in np.array_split(np.arange(100, 400), 3):
        model.partial_fit(X[rows], y[rows])
    assert model.log_predictive_density(fresh, target).mean() > before - 0.15
    assert model.score(fresh, target) > 0.8


def test_student_t_shrugs_off_outliers():
    X, y = wave(300, noise=0.1)
    y[::15] += 8.0
    fresh, target = wave(300, seed=1, noise=0.1)
    robust, plain = (
        DLMGPRegressor(likelihood=likelihood, **QUICK).fit(X, y)
        for likelihood in ("student_t", "gaussian")
    )
    error = [np.abs(model.predict(fresh) - target).mean() for model in (robust, plain)]
    assert error[0] < 0.7 * error[1]
    assert robust.degrees_of_freedom_ < 10 and robust.likelihood_scale_ < 0.3


def test_the_log_loss_predicts_overdispersed_counts_better_than_the_bound():
    X, y = make_counts(400, random_state=0)
    fresh, counts = make_counts(2400, random_state=0)
    models = [
        DLMGPRegressor(likelihood="poisson", objective=objective, **QUICK).fit(X, y)
        for objective in ("log_loss", "elbo")
    ]
    density = [model.log_predictive_density(fresh[400:], counts[400:]).mean() for model in models]
    assert density[0] > density[1] + 0.1


def test_awkward_inputs_are_fitted():
    X, y = wave(120)
    X = np.hstack([1e6 * X, np.ones((120, 1)), 1e-6 * X])
    X[60:], y[60:] = X[:60], y[:60]
    model = DLMGPRegressor(**QUICK).fit(X, y)
    assert model.score(X, y) > 0.8


def test_noise_free_targets_are_interpolated_closely():
    X, y = wave(300, noise=0.0)
    model = DLMGPRegressor(**QUICK).fit(X, y)
    assert np.abs(model.predict(X) - y).max() < 0.05


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beta": -0.5}, "beta.*-0.5"),
        ({"beta": "best"}, "beta.*best"),
        ({"objective": "hinge"}, "objective.*hinge"),
        ({"link": "softplus"}, "link='softplus'.*poisson"),
        ({"objective": "fitc", "likelihood": "student_t"}, "objective='fitc' needs"),
        ({"objective": "square_loss", "likelihood": "poisson"}, "objective='square_loss' needs"),
        ({"degrees_of_freedom": 3.0}, "degrees_of_freedom=3.0"),
        ({"n_inducing": 0}, "n_inducing.*0"),
    ],
)
def test_parameters_that_cannot_be_are_named(params, message):
    X, y = wave(30)
    with pytest.raises(ValueError, match=message):
        DLMGPRegressor(**params).fit(X, np.rint(np.abs(y)))


@pytest.mark.parametrize(("bad", "message"), [(-1.0, "-1.0"), (0.5, "0.5"), (np.nan, "NaN")])
def test_what_is_no_count_is_named(bad, message):
    X, y = make_counts(40, random_state=0)
    y = y.astype(float)
    y[3] = bad
    with pytest.raises(ValueError, match=message):
        DLMGPRegressor(likelihood="poisson", **QUICK).fit(X, y)


def test_more_points_than_rows_are_lowered_with_a_warning():
    X, y = wave(12)
    with pytest.warns(UserWarning, match="n_inducing=50 is more than the 12 distinct rows"):
        model = DLMGPRegressor(n_inducing=50, max_iter=5).fit(X, y)
    assert model.n_inducing_ == 12
