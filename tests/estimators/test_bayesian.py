"""BayesianGPRegressor: the contracts, its own attributes, and what it refuses."""

import pickle
import warnings

import numpy as np
import pytest
from joblib import parallel_config
from scipy import stats
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, ExpSineSquared, WhiteKernel

from skgp import BayesianGPRegressor
from skgp.learning.posterior import defaults as tuned
from skgp.learning.posterior.samples import resolve_plan
from skgp.linalg.runtime import memory_limit
from skgp.priors import Gamma, LogNormal
from tests.contracts.estimators import Recorder, RegressorContract, rbf_kernel
from tests.covering import slow_case
from tests.same import assert_same

# Fewer samples than the defaults, for time alone.
SMALL = dict(n_samples=256, min_ess=50, n_keep=16, random_state=0)
pytestmark = pytest.mark.filterwarnings(
    "ignore:The samples of the hyper-parameters:sklearn.exceptions.ConvergenceWarning"
)


def make(**params):
    return BayesianGPRegressor(**{**SMALL, **params})


class TestContract(RegressorContract):
    offers_state = False

    def make(self, **params):
        return make(**params)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (40, 2))
    return X, 30 + 4 * (np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(40))


@pytest.fixture(scope="module")
def fitted(data):
    return make(kernel=rbf_kernel(), n_samples=2048, min_ess=200).fit(*data)


@pytest.fixture(scope="module")
def X_new():
    return np.random.default_rng(1).uniform(-3, 3, (7, 2))


class TestMixture:
    """What the contract asks of a prediction, here of several samples."""

    test_std = RegressorContract.test_predict_std_is_the_diagonal_of_cov
    test_noise = RegressorContract.test_predict_describes_latent_plus_noise
    test_mean = RegressorContract.test_predict_mean_does_not_depend_on_what_is_returned
    test_mass = RegressorContract.test_quantiles_hold_the_mass_of_the_density
    test_below = RegressorContract.test_draws_fall_below_the_quantiles_as_often_as_they_say
    test_draws = RegressorContract.test_sample_y_has_the_predicted_moments
    test_alone = RegressorContract.test_methods_leave_the_estimator_alone
    methods = RegressorContract.methods
    heavy_tailed = False

    def test_pickle_predicts_the_same(self, fitted, X_new):
        fitted.predict(X_new, return_std=True)
        text = pickle.dumps(fitted)
        samples = fitted.posterior_samples_.nbytes + 4 * len(fitted.posterior_samples_) * 8
        assert len(text) < samples + 8 * 40 * (fitted.n_kept_ + 4) + 15_000
        expected = fitted.predict(X_new, return_cov=True)
        for got, value in zip(pickle.loads(text).predict(X_new, return_cov=True), expected):  # noqa: B905
            assert_same(got, value)

    def test_it_is_wider_than_a_gaussian_of_its_moments_in_the_tails(self, fitted, X_new):
        assert fitted.n_kept_ > 10
        mean, std = fitted.predict(X_new, return_std=True)
        tail = fitted.predict_quantiles(X_new, 1 - 1e-6)
        assert (tail > stats.norm(mean, std).ppf(1 - 1e-6)).all()


# ------------------------------------------------------------------------------ the posterior


def test_samples_and_their_description_agree(fitted):
    n, p = fitted.posterior_samples_.shape
    assert p == fitted.kernel_.n_dims == len(fitted.hyperparameter_names_) == len(fitted.priors_)
    assert fitted.hyperparameter_names_[:2] == [
        "k1__k1__constant_value",
        "k1__k2__length_scale[0]",
    ]
    w = fitted.sample_weights_
    assert w.shape == fitted.sample_chains_.shape == fitted.sample_log_posterior_.shape == (n,)
    assert w.sum() == pytest.approx(1) and fitted.diagnostics_["converged"]
    np.testing.assert_allclose(fitted.kernel_.theta, w @ fitted.posterior_samples_, rtol=1e-12)
    assert fitted.sampler_ == "importance" and fitted.solver_ == "cholesky"
    assert fitted.n_iter_ == len(fitted.history_["loss"]) > 5


def test_summary_is_that_of_the_weighted_samples(fitted):
    summary, w = fitted.summary(), fitted.sample_weights_
    theta = np.exp(fitted.posterior_samples_)
    np.testing.assert_allclose(summary.mean, w @ theta, rtol=1e-12)
    np.testing.assert_allclose(summary.sd**2, w @ theta**2 - summary.mean**2, rtol=1e-8)
    for j in range(theta.shape[1]):
        below = [w[theta[:, j] <= q].sum() for q in summary.quantiles[j]]
        np.testing.assert_allclose(below, [0.025, 0.5, 0.975], atol=2 * w.max())
    assert np.isnan(summary.r_hat).all() and (summary.ess_bulk > 50).all()
    text = str(summary)
    assert "ess_tail" in text and len(text.splitlines()) == 1 + len(summary.names)
    frame = pytest.importorskip("pandas") and summary.to_frame()
    assert list(frame.index) == fitted.hyperparameter_names_
    assert_same(frame["mean"], summary.mean)


def test_summary_of_chains_has_r_hat(data):
    model = make(kernel=rbf_kernel(), sampler="hmc", n_samples=40, n_warmup=15).fit(*data)
    assert set(model.sample_chains_) == set(range(8)) and model.sampler_ == "hmc"
    summary = model.summary()
    np.testing.assert_allclose(summary.r_hat, model.diagnostics_["r_hat"])
    np.testing.assert_allclose(summary.ess_tail, model.diagnostics_["ess_tail"])
    np.testing.assert_allclose(summary.mean, np.exp(model.posterior_samples_).mean(0))


def test_map_is_the_optimum_and_plug_in_predicts_with_it(fitted, data, X_new):
    X, y = data
    only = clone(fitted).set_params(optimizer="map").fit(X, y)
    np.testing.assert_allclose(only.map_, fitted.map_, atol=1e-3)
    np.testing.assert_allclose(only.kernel_.theta, only.map_, rtol=1e-12)
    kernel = fitted.kernel_.clone_with_theta(fitted.map_)
    plain = BayesianGPRegressor(kernel, optimizer=None).fit(X, y)
    for got, expected in zip(
        fitted.plug_in().predict(X_new, return_std=True),
        plain.predict(X_new, return_std=True),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert fitted.n_kept_ > 1  # the copy left it alone
    best = fitted.log_marginal_likelihood_value_
    assert plain.log_marginal_likelihood_value_ == pytest.approx(best, abs=5)


@pytest.mark.parametrize("optimizer", ["map", slow_case("auto")])
def test_conjugate_gradients_agree_with_factorisations(data, X_new, optimizer):
    """In the optimum, and in the mean of 40 effective draws or so."""
    settings = dict(kernel=rbf_kernel(), optimizer=optimizer, random_state=0)
    few = {} if optimizer == "map" else dict(n_samples=20, n_warmup=20)
    exact = BayesianGPRegressor(solver="cholesky", **settings).fit(*data)
    model = BayesianGPRegressor(solver="cg", **few, **settings).fit(*data)
    std = exact.predict(X_new, return_std=True)[1]
    found, expected = (m.predict(X_new, return_std=True) for m in (model, exact))
    assert not hasattr(model, "log_marginal_likelihood_value_")
    if optimizer == "map":
        assert (model.solver_, model.sampler_) == ("cg", "map") and model.diagnostics_["converged"]
        np.testing.assert_allclose(model.map_, exact.map_, atol=0.15)
        assert np.abs((found[0] - expected[0]) / std).max() < 0.1
        np.testing.assert_allclose(found[1], expected[1], rtol=0.05)
        return
    assert set(model.sample_chains_) == {0, 1, 2, 3} and model.sampler_ == "langevin"
    assert model.posterior_samples_.shape == (80, 4) and model.n_kept_ > 20
    assert np.isfinite(model.summary().r_hat).all()
    z = (model.kernel_.theta - exact.kernel_.theta) / exact.posterior_samples_.std(0)
    assert np.abs(z).max() < 1 and np.abs((found[0] - expected[0]) / std).max() < 0.3


def test_with_all_neighbors_vecchias_approximation_is_the_exact_posterior(X_new, monkeypatch):
    """Weighted rows, some of them repeated; every method, the optimum alone, and a pickle."""
    monkeypatch.setattr(tuned, "N_EARLIER", 100)
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (30, 2))
    X[3:6] = X[0]
    y, weight = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(30), rng.uniform(0.5, 2.0, 30)
    exact, model = (
        make(kernel=rbf_kernel(), solver=solver, n_keep=4).fit(X, y, weight)
        for solver in ("cholesky", "vecchia")
    )
    assert (model.solver_, model.sampler_) == ("vecchia", "importance")
    assert_same(model.posterior_samples_, exact.posterior_samples_)
    assert_same(model.sample_log_posterior_, exact.sample_log_posterior_)
    assert_same(model.log_marginal_likelihood_value_, exact.log_marginal_likelihood_value_)
    copy = pickle.loads(pickle.dumps(model))
    for ask in (
        lambda each: each.predict(X_new, return_std=True),
        lambda each: each.predict(X_new, return_cov=True),
        lambda each: each.predict(X_new, True, return_mean_grad=True, return_std_grad=True),
        lambda each: each.predict_interval(X_new),
        lambda each: each.sample_y(X_new, 3, random_state=0),
        lambda each: each.log_predictive_density(X, y),
        lambda each: each.plug_in().predict(X_new, return_std=True),
    ):
        for got, again, expected in zip(*map(ask, (model, copy, exact)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)
            assert_same(again, got)


@pytest.mark.parametrize("optimizer", ["map", None])
def test_vecchias_approximation_without_sampling(data, X_new, optimizer):
    settings = dict(kernel=rbf_kernel(), optimizer=optimizer, random_state=0)
    exact = BayesianGPRegressor(solver="cholesky", **settings).fit(*data)
    model = BayesianGPRegressor(solver="vecchia", **settings).fit(*data)
    np.testing.assert_allclose(model.map_, exact.map_, atol=0.1)
    found, expected = (m.predict(X_new, return_std=True) for m in (model, exact))
    assert np.abs((found[0] - expected[0]) / expected[1]).max() < 0.2
    best = exact.log_marginal_likelihood_value_
    assert model.log_marginal_likelihood_value_ == pytest.approx(best, abs=2)


@pytest.mark.slow
def test_as_few_samples_predict_as_the_posterior_asks_for(X_new):
    rng = np.random.default_rng(0)
    X = rng.uniform(-3, 3, (120, 2))
    y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.2 * rng.standard_normal(120)
    narrow = BayesianGPRegressor(rbf_kernel(), random_state=0).fit(X, y)
    wide = BayesianGPRegressor(rbf_kernel(), random_state=0).fit(X[:9], y[:9])
    assert narrow.n_kept_ <= 16 and wide.n_kept_ > 40
    many = clone(narrow).set_params(n_keep=500).fit(X, y)
    mean, std = many.predict(X_new, return_std=True)
    found = narrow.predict(X_new, return_std=True)
    assert np.sqrt(np.mean(((found[0] - mean) / std) ** 2)) < 0.05
    np.testing.assert_allclose(found[1], std, rtol=0.05)


def test_more_probable_noise_moves_the_posterior(data):
    loud = make(kernel=rbf_kernel(), prior={"noise_level": LogNormal(1.0, 0.1)}).fit(*data)
    quiet = make(kernel=rbf_kernel(), prior={"k2__noise_level": LogNormal(0.01, 0.1)}).fit(*data)
    assert loud.noise_variance_ > 5 * quiet.noise_variance_
    assert loud.priors_[-1] == LogNormal(1.0, 0.1)


def test_priors_that_do_not_fit_are_refused(data):
    with pytest.raises(ValueError, match="'lengthscale', which is no free"):
        make(kernel=rbf_kernel(), prior={"lengthscale": Gamma(2.0, 1.0)}).fit(*data)


def test_weights_are_repetitions(data, X_new):
    X, y = data
    weights = np.random.default_rng(2).integers(0, 3, len(y))
    weighted = make().fit(X, y, sample_weight=weights)
    repeated = make().fit(X.repeat(weights, 0), y.repeat(weights))
    medians = [[p.median for p in model.priors_] for model in (weighted, repeated)]
    np.testing.assert_allclose(*medians, rtol=1e-12)
    np.testing.assert_allclose(weighted.predict(X_new), repeated.predict(X_new), rtol=1e-6)


# ------------------------------------------------------------------ scikit-learn and joblib


CHAINS = dict(sampler="hmc", n_samples=20, n_warmup=5, kernel=rbf_kernel())


@pytest.fixture(scope="module")
def alone(data, X_new):
    return make(**CHAINS).fit(*data).predict(X_new, return_std=True)


@pytest.mark.parametrize("backend", ["threading", slow_case("loky"), "dask"])
def test_results_do_not_depend_on_jobs_and_backend(data, X_new, alone, backend, request):
    if backend == "dask":
        distributed = pytest.importorskip("distributed", reason="pip install skgp[distributed]")
        client = distributed.Client(processes=False, n_workers=2, dashboard_address=None)
        request.addfinalizer(client.close)
    with parallel_config(backend):
        together = make(n_jobs=2, **CHAINS).fit(*data).predict(X_new, return_std=True)
    np.testing.assert_allclose(together, alone, rtol=1e-7)


def test_kernel_by_default_is_chosen_among_smoothnesses():
    rng = np.random.default_rng(0)
    X = np.sort(rng.uniform(0, 10, (150, 1)), axis=0)
    rough = np.cumsum(rng.standard_normal(150) * np.sqrt(np.diff(X[:, 0], prepend=0)))
    smooth = np.sin(X[:, 0]) + 0.1 * rng.standard_normal(150)
    found = [make(n_samples=32).fit(X, y).kernel_.k1.k2 for y in (rough, smooth)]
    assert found[0].nu == 0.5
    assert type(found[1]) is RBF or found[1].nu == 2.5


def test_kernel_by_default_is_smooth_where_a_sine_has_many_periods():
    """From the medians, searches of smooth kernels end at noise alone."""
    rng = np.random.default_rng(0)
    X, X_new = rng.uniform(size=(150, 1)), rng.uniform(size=(200, 1))
    y = np.sin(120 * X[:, 0]) + 0.1 * rng.standard_normal(150)
    by_default = make(n_samples=32).fit(X, y)
    known = make(kernel=RBF(0.02) + WhiteKernel(0.02), n_samples=32).fit(X, y)
    f = np.sin(120 * X_new[:, 0])
    errors = [np.sqrt(np.mean((each.predict(X_new) - f) ** 2)) for each in (by_default, known)]
    assert errors[0] < 1.1 * errors[1]


# -------------------------------------------------------------------- bad and awkward input


@pytest.mark.parametrize(("solver", "sampler"), [("cholesky", "mala"), ("cg", "hmc")])
def test_samplers_of_another_solver_are_refused(data, solver, sampler):
    with pytest.raises(ValueError, match=f"solver='{solver}' has no sampler='{sampler}'; use"):
        make(solver=solver, sampler=sampler).fit(*data)


def test_memory_that_does_not_suffice_is_refused_with_both_numbers(data):
    model = make(solver="cholesky", memory_budget=1e4)
    with pytest.raises(ValueError, match=r"takes 7.68e-05 GB, and the budget is 1e-05 GB. .*'cg'"):
        model.fit(*data)


def test_many_rows_of_a_matrix_that_is_not_stored_are_refused_unless_asked_for(rng):
    X = rng.standard_normal((20_000, 1))
    model = make(memory_budget=1e9, sampler="langevin")
    with pytest.raises(MemoryError, match="given 20000 distinct rows .* Take solver='vecchia'"):
        model.fit(X, X[:, 0])
    with memory_limit(1e9):
        assert resolve_plan("cg", "auto", 20_000, learns=True)[:2] == ("cg", "langevin")
        assert resolve_plan("auto", "auto", 20_000, learns=False).solver == "cg"
    with memory_limit(4e9):
        assert resolve_plan("auto", "mala", 20_000, learns=True).solver == "cg"


def test_a_matrix_made_anew_is_told_beforehand_and_predicts_as_one_that_is_stored(capsys, rng):
    X = rng.uniform(-3, 3, (300, 2))
    y = np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.standard_normal(300)
    settings = {"kernel": rbf_kernel(), "solver": "cg", "optimizer": None, "verbose": 1}
    small = BayesianGPRegressor(memory_budget=3e5, **settings).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert "the kernel matrix of 300 rows takes 0.00036 GB, beyond memory_budget" in lines[1]
    assert "predictions" in lines[-1] and "residual" in lines[-1]
    large = BayesianGPRegressor(**settings).fit(X, y)
    assert "beyond memory_budget" not in capsys.readouterr().out
    exact = BayesianGPRegressor(**{**settings, "solver": "cholesky"}).fit(X, y)
    found, expected = (each.predict(X[:30], return_std=True) for each in (small, exact))
    np.testing.assert_allclose(found, expected, atol=2e-3)
    np.testing.assert_allclose(large.predict(X), exact.predict(X), atol=1e-5)


def test_kernel_without_free_hyperparameters_is_one_plain_model(data, X_new):
    kernel = ConstantKernel(1.0, "fixed") * RBF(1.5, "fixed") + WhiteKernel(0.05, "fixed")
    with pytest.warns(UserWarning, match="no free hyper-parameter"):
        model = make(kernel=kernel).fit(*data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = BayesianGPRegressor(kernel, optimizer=None, random_state=0).fit(*data)
    assert_same(model.predict(X_new), plain.predict(X_new))
    assert model.posterior_samples_.shape == (1, 0) and model.summary().names == []


def test_what_falls_short_is_listed_in_a_warning(data):
    with pytest.warns(ConvergenceWarning, match="of 400 wanted; raise n_samples") as caught:
        make(n_samples=32, min_ess=400).fit(*data)
    assert any(warning.filename == __file__ for warning in caught)


def test_ctrl_c_while_sampling_keeps_the_samples_so_far(data, X_new):
    # The search for the mode takes some 25 iterations, four rounds of 512 points come after.
    full = make(n_samples=4 * 512, min_ess=1e9, kernel=rbf_kernel())
    n_search = full.fit(*data).n_iter_ - 4
    recorder = Recorder(stop_after=n_search + 2)
    stopped = clone(full).set_callbacks(recorder).fit(*data)
    assert len(stopped.posterior_samples_) == 2 * 512
    assert_same(stopped.posterior_samples_, full.posterior_samples_[: 2 * 512])
    assert np.isfinite(stopped.predict(X_new, return_std=True)).all()


def test_ctrl_c_in_the_warm_up_of_hmc_keeps_its_draws(data, X_new):
    settings = dict(kernel=rbf_kernel(), sampler="hmc", min_ess=1e9)
    n_search = make(n_samples=25, **settings).fit(*data).n_iter_ - 3  # three segments of 25
    stopped = make(n_samples=50, **settings).set_callbacks(Recorder(stop_after=n_search + 1))
    stopped.fit(*data)
    assert len(stopped.posterior_samples_) == 8 * 25 and stopped.n_kept_ > 1
    assert any("in the warm-up" in text for text in stopped.diagnostics_["problems"])
    assert np.isfinite(stopped.predict(X_new, return_std=True)).all()


def test_plug_in_describes_itself_and_not_the_mixture(fitted, data):
    plain, other = fitted.plug_in(), fitted.diagnostics_["problems"]
    assert plain.diagnostics_["sampler"] == plain.sampler_ == "map"
    assert plain.diagnostics_["ess"] == 1 and "pareto_k" not in plain.diagnostics_
    assert fitted.sampler_ == "importance" and fitted.diagnostics_["problems"] is other
    at = clone(fitted).set_params(kernel=plain.kernel_, optimizer=None).fit(*data)
    assert plain.log_marginal_likelihood_value_ == pytest.approx(
        at.log_marginal_likelihood_value_, abs=1e-6
    )
    assert plain.log_marginal_likelihood_value_ > fitted.log_marginal_likelihood_value_ - 1


def test_names_and_priors_know_the_columns_of_a_data_frame(data):
    pandas = pytest.importorskip("pandas")
    X, y = data
    frame = pandas.DataFrame(X, columns=["pressure", "depth"])
    prior = {"length_scale[depth]": LogNormal(3.0, 0.2)}
    model = make(kernel=rbf_kernel(), prior=prior).fit(frame, y)
    assert model.hyperparameter_names_[1:3] == [
        "k1__k2__length_scale[pressure]",
        "k1__k2__length_scale[depth]",
    ]
    assert model.priors_[2] == LogNormal(3.0, 0.2) and model.priors_[1].sd == 1.5


@pytest.mark.parametrize(
    ("bounds", "settings"),
    [
        ((1.0, 1.0), {}),
        ((0.99, 1.01), {}),
        ((1.0, 1.0 + 1e-9), {"sampler": "hmc", "n_samples": 40}),
        ((1.0, 1.0 + 1e-9), {"optimizer": "map"}),
    ],
)
def test_bounds_that_leave_little_room_are_obeyed(data, X_new, bounds, settings):
    X, y = data
    kernel = ConstantKernel(1.0, bounds) * RBF([1.5, 1.5]) + WhiteKernel(0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = make(kernel=kernel, **settings).fit(X, y)
        fixed = make(
            kernel=ConstantKernel(1.0, "fixed") * RBF([1.5, 1.5]) + WhiteKernel(0.05), **settings
        ).fit(X, y)
    assert model.kernel_.k1.k1.constant_value == pytest.approx(1.0, abs=0.011)
    std = fixed.predict(X_new, return_std=True)[1]
    assert np.abs((model.predict(X_new) - fixed.predict(X_new)) / std).max() < 0.2


def test_equal_bounds_fix_what_they_bound(data):
    kernel = ConstantKernel(1.0, (2.0, 2.0)) * RBF([1.5, 1.5]) + WhiteKernel(0.05)
    model = make(kernel=kernel, n_samples=64).fit(*data)
    assert model.hyperparameter_names_[0] == "k1__k2__length_scale[0]"
    assert model.kernel_.k1.k1.constant_value == 2.0
    assert kernel.k1.k1.constant_value == 1.0  # the user's own is left alone
    one = ConstantKernel() * RBF([1.5, 1.5], [(1e-2, 1e2), (1.5, 1.5)]) + WhiteKernel(0.05)
    model = make(kernel=one).fit(*data)
    assert np.ptp(model.posterior_samples_[:, 2]) < 1e-12 and model.diagnostics_["converged"]


def test_a_kernel_that_is_not_positive_definite_is_named(data):
    """Rows are no cause: the kernel is indefinite on two columns."""
    X, y = data
    kernel = ExpSineSquared(0.05, 1.0) + WhiteKernel(1e-9, (1e-10, 1e-9))
    with pytest.raises(ValueError, match="vanishes at every start") as caught:
        make(kernel=kernel).fit(10 * X, y)
    assert (
        "ExpSineSquared" in str(caught.value) and "remove nearly" not in str(caught.value).lower()
    )


def test_tiny_noise_and_unscaled_inputs(data):
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 1, (60, 3)) * [1e-4, 1.0, 1e5] + [0, 10, 1e6]
    y = np.sin(6e4 * X[:, 0]) + 1e-5 * X[:, 2]
    model = make().fit(X[:50], y[:50])
    assert model.score(X[50:], y[50:]) > 0.95
    assert model.noise_variance_ < 1e-2 * y.var()


def test_to_arviz(fitted):
    arviz = pytest.importorskip("arviz", reason="pip install skgp[mcmc]")
    draws = fitted.to_arviz()
    assert isinstance(draws, arviz.InferenceData)
    assert draws.posterior["k1__k2__length_scale"].shape[2] == 2
    assert draws.posterior["k2__noise_level"].shape[0] == 4
    assert float(arviz.rhat(draws)["k2__noise_level"]) < 1.05
    mean = draws.posterior["k2__noise_level"].values.mean()
    assert mean == pytest.approx(fitted.summary().mean[-1], rel=0.1)


def test_to_arviz_without_arviz_says_how_to_install_it(fitted, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "arviz", None)
    with pytest.raises(ImportError, match=r'pip install "skgp\[mcmc\]"'):
        fitted.to_arviz()


@pytest.mark.filterwarnings("ignore")
def test_a_chain_whose_every_step_leaves_the_bounds_says_so():
    kernel = 1.0 * RBF(1.0, (0.99, 1.01)) + WhiteKernel(0.1, (0.05, 0.2))
    settings = dict(sampler="sgld", n_samples=16, n_warmup=5, n_chains=1, random_state=4)
    model = BayesianGPRegressor(kernel, **settings).fit([[3.0, 1.0]], [0.5])
    assert any("left the bounds" in problem for problem in model.diagnostics_["problems"])


def test_many_hyperparameters_are_sampled_by_chains(monkeypatch):
    """Importance sampling there has a few effective points of thousands."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((25, 20))
    y = X[:, 0] + 0.3 * rng.standard_normal(25)
    few = make(n_samples=25, min_ess=10)
    assert clone(few).fit(X, y).sampler_ == "hmc"
    assert clone(few).fit(X[:, :3], y).sampler_ == "importance"
    assert clone(few).set_params(sampler="importance").fit(X, y).sampler_ == "importance"
    monkeypatch.setattr(tuned, "FEW_ROWS", 24)  # beyond, these points may do
    assert clone(few).fit(X, y).sampler_ == "importance"
