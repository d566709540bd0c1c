"""Fits and predictions of rows in blocks equal those of rows in memory."""

import sys

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern, WhiteKernel

import skgp
from skgp import QSGPRegressor
from skgp.blocks import ArrayBlocks
from skgp.linalg.runtime import MemoryBudgetError
from tests.covering import slow, slow_case

da = pytest.importorskip("dask.array", reason="pip install skgp[distributed]")
dask = pytest.importorskip("dask")

#: Too little for any fit of 500 rows at once; blocks then have 128.
BUDGET = 9e4
KERNEL = RBF([1.0, 2.0]) + WhiteKernel(0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.LEAST_BLOCK_ROWS", 128)
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def data():
    """X (500, 2), y (500,) of scale and shift unlike 1 and 0."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-2, 2, (500, 2))
    return X, 100 + 7 * (np.sin(2 * X).sum(1) + 0.3 * rng.standard_normal(500))


def make(**settings):
    fourier = {"basis": "fourier", "n_basis": 40, "solver": "cholesky", "kernel": KERNEL}
    settings = fourier | settings
    return QSGPRegressor(random_state=0, device="cpu", **settings)


@pytest.fixture(scope="module")
def first(data):
    """Fitted to some rows; not to be changed."""
    return make().fit(data[0][:300], data[1][:300])


def assert_same(found, expected):
    """Equal up to rounding: a product of matrices may group the rows of a tile otherwise."""
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-10)
    else:
        np.testing.assert_array_equal(found, expected)


def memory_map(path, array):
    np.save(path, array)
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize(
    ("settings", "weighted"),
    [({}, False), ({"basis": "inducing", "n_basis": 40}, True), ({"normalize_y": False}, True)],
)
def test_sums_over_blocks_give_the_fit_to_all_rows(data, settings, weighted):
    X, y = data
    weight = np.random.default_rng(1).integers(0, 3, len(y)) / 2.0 if weighted else None
    settings = {"optimizer": None, "covariance": "full"} | settings
    models = [make(memory_budget=budget, **settings).fit(X, y, weight) for budget in (None, BUDGET)]
    assert [model.reason_ for model in models] == ["", "rows in blocks"]
    if settings.get("basis") != "inducing":  # whose points are pivots of random trials
        found, expected = (model.predict(X, return_std=True) for model in models)
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    names = ("y_mean_", "y_scale_", "noise_variance_", "log_marginal_likelihood_value_")
    rtol = 1e-8 if settings.get("basis") != "inducing" else 0.05
    for name in names:
        found, expected = (getattr(model, name) for model in models)
        np.testing.assert_allclose(found, expected, rtol=rtol, err_msg=name)


def test_memory_maps_and_dask_arrays_give_the_model_of_the_array(data, tmp_path):
    X, y = data[0][:300], data[1][:300]
    expected = make(memory_budget=BUDGET).fit(X, y)
    maps = memory_map(tmp_path / "X.npy", X), memory_map(tmp_path / "y.npy", y)
    lazy = da.from_array(X, (128, 1)), da.from_array(y, 200)
    for given in (maps, lazy):
        model = make(memory_budget=BUDGET).fit(*given)
        assert str(model.kernel_) == str(expected.kernel_)
        np.testing.assert_array_equal(model.predict(X), expected.predict(X))
        np.testing.assert_allclose(model.score(*given), expected.score(X, y), rtol=1e-12)


def test_single_precision_maps_are_read_in_double(data, tmp_path):
    X, y = (array[:300].astype(np.float32) for array in data)
    maps = memory_map(tmp_path / "X.npy", X), memory_map(tmp_path / "y.npy", y)
    found = make(memory_budget=BUDGET).fit(*maps)
    expected = make(memory_budget=BUDGET).fit(X.astype(np.float64), y.astype(np.float64))
    np.testing.assert_allclose(found.predict(maps[0]), expected.predict(X), rtol=1e-12)


def test_data_frames_of_dask_keep_their_names(data):
    dd = pytest.importorskip("dask.dataframe")
    import pandas as pd

    frame = pd.DataFrame(data[0], columns=["a", "b"]).assign(y=data[1])
    lazy = dd.from_pandas(frame, npartitions=3)
    model = make(memory_budget=BUDGET).fit(lazy[["a", "b"]], lazy.y)
    assert list(model.feature_names_in_) == ["a", "b"]
    mean, std = model.predict(lazy[["a", "b"]], return_std=True)
    expected = model.predict(frame[["a", "b"]], return_std=True)
    np.testing.assert_allclose((mean.compute(), std.compute()), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="feature names"):
        model.predict(lazy[["b", "a"]])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("predict", {"return_std": True}),
        ("predict_interval", {"coverage": 0.5}),
        ("predict_quantiles", {"quantiles": [0.1, 0.5, 0.9]}),
        ("latent_mean_and_variance", {}),
    ],
)
def test_predictions_of_dask_rows_are_dask_arrays(data, first, method, settings):
    X = data[0]
    expected = getattr(first, method)(X, **settings)
    found = getattr(first, method)(da.from_array(X, (200, 2)), **settings)
    expected, found = ((e,) if not isinstance(e, tuple) else e for e in (expected, found))
    assert len(found) == len(expected)
    for lazy, array in zip(found, expected, strict=True):
        assert lazy.chunks[0] == (200, 200, 100) and lazy.dtype == array.dtype
        assert_same(lazy.compute(), array)


@pytest.mark.parametrize("again", ["fit", "partial_fit"])
@pytest.mark.parametrize("name", ["QSGPRegressor", "QSGPClassifier", "SWSGPRegressor"])
def test_lazy_predictions_are_of_the_model_that_was_asked(data, name, again):
    X, y = data[0], data[1] > 100 if name.endswith("Classifier") else data[1]
    few = {"n_basis": 40} if name.startswith("QSGP") else {}
    model = getattr(skgp, name)(random_state=0, optimizer=None, **few)
    getattr(model, again)(X[:100], y[:100])
    method = model.predict_proba if name.endswith("Classifier") else model.predict
    expected, lazy = method(X), method(da.from_array(X, (200, 2)))
    getattr(model, again)(X[100:], ~y[100:] if y.dtype == bool else y[100:] + 100)
    assert_same(lazy.compute(), expected)


def test_classifiers_load_dask_rows_and_predict_where_they_lie(data):
    X, labels = data[0][:120], np.where(data[1][:120] > 100, "up", "down")
    expected = skgp.QSGPClassifier(random_state=0).fit(X, labels)
    lazy = da.from_array(X, (50, 2)), da.from_array(labels, 50)
    model = skgp.QSGPClassifier(random_state=0).fit(*lazy)
    for method in ("predict", "predict_proba", "decision_function", "predict_log_proba"):
        found = getattr(model, method)(lazy[0])
        assert_same(found.compute(), getattr(expected, method)(X))
    assert model.score(*lazy) == expected.score(X, labels)
    scores = model.log_predictive_density(*lazy)
    assert_same(scores.compute(), expected.log_predictive_density(X, labels))


def test_many_rows_of_an_array_are_predicted_slice_by_slice(data, first, monkeypatch):
    X, y = data
    expected = first.predict(X, return_std=True), first.log_predictive_density(X, y)
    monkeypatch.setattr("skgp.estimators.defaults.BLOCK_ROWS", 200)
    np.testing.assert_allclose(first.predict(X, return_std=True), expected[0], rtol=1e-12)
    np.testing.assert_allclose(first.log_predictive_density(X, y), expected[1], rtol=1e-12)
    assert first.predict(X, return_cov=True)[1].shape == (500, 500)


def test_joint_predictions_of_dask_rows_are_refused(data, first):
    lazy = da.from_array(data[0], (200, 2))
    for call in (lambda: first.predict(lazy, return_cov=True), lambda: first.sample_y(lazy)):
        with pytest.raises(ValueError, match=r"is joint over the rows.*\[:1000\].compute"):
            call()


def test_more_rows_join_those_of_the_blocks(data):
    X, y = data
    settings = {"optimizer": None, "normalize_y": True}
    whole = make(**settings).fit(X, y)
    model = make(memory_budget=BUDGET, **settings).fit(X[:450], y[:450])
    model.partial_fit(X[450:], y[450:])
    np.testing.assert_allclose(model.predict(X), whole.predict(X), rtol=1e-8)


def test_progress_is_shown_block_by_block(data, capsys):
    make(memory_budget=BUDGET, verbose=2, optimizer=None).fit(*data)
    lines = [line for line in capsys.readouterr().out.splitlines() if "solve: iteration" in line]
    assert [line.split()[-1] for line in lines] == ["128", "256", "384", "500"]


@pytest.mark.parametrize(
    "name", [name for name in skgp.__all__ if hasattr(getattr(skgp, name), "_takes_blocks")]
)
def test_estimators_that_need_all_rows_say_so_where_there_is_no_room(name, data):
    X, y = da.from_array(data[0], (200, 2)), data[1]
    y = da.from_array(np.where(y > 100, 1, 0) if name.endswith("Classifier") else y, 200)
    model = getattr(skgp, name)(memory_budget=BUDGET)
    if model._takes_blocks(2):
        return
    advice = r"QSGPClassifier\(.*partial_fit" if name.endswith("Classifier") else "QSGPRegressor"
    with pytest.raises(MemoryBudgetError, match=f"{name}.*holds all 500 rows.*{advice}"):
        model.fit(X, y)


def test_bad_values_are_refused_with_their_row(data):
    X, y = data[0].copy(), data[1]
    X[300, 1] = np.nan
    with pytest.raises(ValueError, match="X must hold finite numbers.*in row 300"):
        make(memory_budget=BUDGET).fit(X, y)
    X[300, 1] = 1e200
    with pytest.raises(ValueError, match="^X.*its largest magnitude is 1e.200"):
        make(memory_budget=BUDGET).fit(X, y)
    with pytest.raises(ValueError, match="^y.*its largest magnitude is 1e.200"):
        make(memory_budget=BUDGET).fit(data[0], np.where(np.arange(500) == 300, 1e200, y))


def test_weights_are_those_of_memory_or_refused_as_there(data):
    X, y = data
    X, y = np.tile(X, (2, 1))[:640], np.tile(y, 2)[:640]  # 5 blocks of 128 rows
    settings = {"optimizer": None, "n_basis": 30}
    expected = make(**settings).fit(X, y, 2.0)
    lazy = da.from_array(X, (100, 2)), da.from_array(y, 100)
    for given in ((X, y), lazy):
        model = make(memory_budget=BUDGET, **settings).fit(*given, 2.0)
        assert model.reason_ == "rows in blocks"
        np.testing.assert_allclose(model.predict(X), expected.predict(X), rtol=1e-8)
        with pytest.raises(ValueError, match="Sample weights must be 1D array or scalar, got 2D"):
            make(memory_budget=BUDGET, **settings).fit(*given, np.ones((640, 1)))
    for budget, more in ((None, 1000), (BUDGET, 1000), (BUDGET, -1)):
        with pytest.raises(ValueError, match=r"sample_weight.shape == .*, expected \(640,\)!"):
            make(memory_budget=budget, **settings).fit(X, y, np.ones(640 + more))


def series_model():
    return skgp.StateSpaceGPRegressor(n_inducing=5, optimizer=None)


@pytest.mark.parametrize(
    "make_model", [lambda: make(optimizer=None, kernel=RBF() + WhiteKernel(0.1)), series_model]
)
def test_columns_of_dask_in_another_form_are_refused(data, make_model):
    X, y = da.from_array(data[0][:, :1], (200, 1)), da.from_array(data[1], 200)
    refused = [
        (X, da.stack([y, y], 1), "y should be a 1d array, got an array of 2 dim"),
        (X, np.ones((500, 2)), "y should be a 1d array, got an array of 2 dim"),
        (X, y.astype(complex), "y must hold real numbers; got the dtype complex128"),
        (X[:, 0], y, "Expected 2D array, got 1D array instead"),
        (X[:0], y[:0], r"Found array with 0 sample\(s\) \(shape=\(0, 1\)\) while a minimum of 1"),
        (X.astype(complex), y, "X must hold real numbers; got the dtype complex128.*Complex data"),
        (X.astype("U8"), y, "X must hold real numbers; got the dtype <U8"),
        (X, y[:-1], "y must have as many rows as X, 500; got 499"),
    ]
    for rows, target, message in refused:
        with pytest.raises(ValueError, match=message):
            make_model().fit(rows, target)
    with pytest.warns(DataConversionWarning, match="column-vector y"):
        model = make_model().fit(X, y[:, None])
    np.testing.assert_array_equal(model.predict(X), make_model().fit(X, y).predict(X))
    for rows in (X[:, 0], X[:0], X.astype(complex), X.astype("U8")):
        with pytest.raises(ValueError, match="Expected 2D|Found array with 0|must hold real"):
            model.predict(rows)


@pytest.mark.filterwarnings("ignore:A column-vector y")
def test_targets_of_another_kind_are_read_in_blocks(data):
    X, y = data[0], data[1] > 100
    model = make(memory_budget=BUDGET, optimizer=None)
    expected = clone(model).fit(X, y.astype(float)).predict(X[::5])
    for given in (
        y,
        y[:, None],
        y.tolist(),
        pytest.importorskip("pandas").Series(y, index=range(5, 505)),
        y.astype(object),
        da.from_array(y, 200),
    ):
        assert model.fit(X, given).reason_ == "rows in blocks"
        np.testing.assert_array_equal(model.predict(X[::5]), expected)
        with pytest.raises(ValueError, match="inconsistent numbers of samples"):
            make(memory_budget=BUDGET).fit(X, given[:-1])


def test_a_constant_target_is_centred_and_not_scaled(data):
    model = make(memory_budget=BUDGET, optimizer=None).fit(data[0], np.full(500, 3.0))
    assert (model.y_mean_, model.y_scale_) == (3.0, 1.0)
    np.testing.assert_allclose(model.predict(data[0][:5]), 3.0, atol=1e-6)


def test_kernels_without_spectral_density_take_inducing_points(data):
    kernel = ConstantKernel() * DotProduct() + WhiteKernel(0.1)
    model = QSGPRegressor(kernel, memory_budget=BUDGET, random_state=0, optimizer=None).fit(*data)
    assert model.basis_ == "inducing"


def test_arrays_and_memory_maps_do_not_need_dask(data, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "dask"] + ["dask"]:
        monkeypatch.setitem(sys.modules, name, None)
    X = memory_map(tmp_path / "X.npy", data[0])
    model = make(memory_budget=BUDGET, optimizer=None).fit(X, data[1])
    assert len(model.predict(X)) == 500


def test_minibatches_come_from_maps_and_files(data, tmp_path):
    X, y = data
    settings = {"solver": "sgd", "n_basis": 60, "max_iter": 8, "optimizer": None}
    expected = make(**settings).fit(X, y).predict(X, return_std=True)
    for given, rtol in (
        ((X, y), 1e-10),
        ((memory_map(tmp_path / "X.npy", X.astype("float32")), y), 1e-4),
        ((da.from_array(X, (200, 2)), da.from_array(y, 150)), 1e-10),
    ):
        model = make(memory_budget=BUDGET, **settings).fit(*given)
        np.testing.assert_allclose(model.predict(X, return_std=True), expected, rtol=rtol)


# ---- state space


@pytest.fixture(scope="module")
def series():
    """X (600, 1), y (600,) and weights (600,), not in the order of time."""
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 30, (600, 1))
    y = 5 + 3 * np.sin(X[:, 0]) + rng.standard_normal(600)
    return X, y, rng.integers(0, 3, 600) / 2.0


@pytest.mark.parametrize(("n_inducing", "weighted"), [slow_case(20, True), ("auto", False)])
def test_series_in_blocks_gives_the_fit_to_all_rows(series, n_inducing, weighted):
    series = series if weighted else series[:2]
    kernel = ConstantKernel(1.0) * Matern(2.0, nu=2.5) + WhiteKernel(0.1)
    settings = {"kernel": kernel, "max_iter": 3, "n_inducing": n_inducing}
    expected = skgp.StateSpaceGPRegressor(**settings).fit(*series)
    lazy = [da.from_array(column, 200) for column in series]
    for given in (series, lazy):
        model = skgp.StateSpaceGPRegressor(memory_budget=BUDGET, **settings).fit(*given)
        for name in ("inducing_points_", "log_marginal_likelihood_value_", "noise_variance_"):
            found, wanted = (getattr(each, name) for each in (model, expected))
            np.testing.assert_allclose(found, wanted, rtol=1e-8, err_msg=name)
        found, wanted = (each.predict(series[0], return_std=True) for each in (model, expected))
        np.testing.assert_allclose(found, wanted, rtol=1e-8)


def test_series_of_blocks_with_hyperparameters_of_some_rows(series, monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.SUBSET_ROWS", 300)
    kernel = ConstantKernel(1.0) * RBF(2.0) + WhiteKernel(0.1)
    model = skgp.StateSpaceGPRegressor(kernel, n_inducing=20, memory_budget=BUDGET, random_state=0)
    model.fit(*series)
    again = skgp.StateSpaceGPRegressor(model.kernel_, n_inducing=20, optimizer=None)
    X, y, weight = series  # whose ratios matter where noise is learned
    again.fit(X, y, weight * (weight > 0).mean() / weight.mean())
    # Their inducing states lie at other times, of which there are enough.
    np.testing.assert_allclose(model.predict(X), again.predict(X), atol=2e-3)
    gap = model.log_marginal_likelihood_value_ - again.log_marginal_likelihood_value_
    assert abs(gap) < 0.5


def test_series_with_missing_targets_in_blocks_names_what_takes_them(series):
    X, y = series[0], series[1].copy()
    y[70] = np.nan
    settings = {"n_inducing": 20, "optimizer": None}
    advice = "in row 70. Drop such rows; or .* larger memory_budget"
    for given in ((X, y), (da.from_array(X, (200, 1)), da.from_array(y, 200))):
        with pytest.raises(ValueError, match=advice):
            skgp.StateSpaceGPRegressor(memory_budget=BUDGET, **settings).fit(*given)
    skgp.StateSpaceGPRegressor(**settings).fit(X, y)


# ---- sparse within sparse

#: Too little for 500 rows at once, enough for the sums of 24 inducing points.
SUMS_BUDGET = 3e5


def swsgp(**settings):
    kernel = RBF([1.0, 2.0]) + WhiteKernel(0.1)
    settings = {"kernel": kernel, "n_inducing": 24, "n_neighbors": 6} | settings
    return skgp.SWSGPRegressor(random_state=0, device="cpu", **settings)


@pytest.mark.parametrize(
    ("settings", "rtol"),
    [
        ({"optimizer": None}, 1e-8),
        ({"normalize_y": False, "kl_weight": 1.0, "max_iter": 2}, 1e-6),
        ({"n_inducing": 15, "n_neighbors": 15, "polish": True, "max_iter": 5}, 1e-8),
        ({"likelihood": "student_t", "optimizer": None, "tol": 1e-13, "max_iter": 60}, 1e-5),
        ({"solver": "adam", "max_iter": 4, "optimizer": None}, 1e-6),
        ({"covariance": "full", "optimizer": None, "max_iter": 5}, 1e-6),
        ({"inducing": "learned", "optimizer": None, "max_iter": 2, "dtype": "float32"}, 1e-3),
    ],
)
def test_neighbors_in_blocks_give_the_fit_to_all_rows(data, settings, rtol):
    weighted = settings.get("solver") == "adam" or "likelihood" in settings
    order = np.lexsort(data[0].T[::-1])  # minibatches in memory are of rows in this order
    X, y = (column[order] for column in data)
    rng = np.random.default_rng(3)
    weight = [rng.integers(1, 4, len(y)) / 2.0] if weighted else []
    expected = swsgp(**settings).fit(X, y, *weight)
    model = swsgp(memory_budget=SUMS_BUDGET, **settings).fit(X, y, *weight)
    found, wanted = (each.predict(X[::5], return_std=True) for each in (model, expected))
    np.testing.assert_allclose(found, wanted, rtol=rtol)
    np.testing.assert_array_equal(model.inducing_points_.shape, expected.inducing_points_.shape)
    assert (model.kl_weight_, model.polished_) == (expected.kl_weight_, expected.polished_)
    if settings.get("solver") != "adam" and "covariance" not in settings and rtol < 1e-4:
        np.testing.assert_allclose(model.elbo_, expected.elbo_, rtol=1e-7)


def test_neighbors_of_maps_and_dask_rows_do_not_depend_on_the_chunks(data, tmp_path):
    X, y = data
    weight = np.random.default_rng(1).integers(0, 3, len(y)) / 2.0
    settings = {"memory_budget": SUMS_BUDGET, "optimizer": None}
    maps = [memory_map(tmp_path / f"{i}.npy", a) for i, a in enumerate((X, y, weight))]
    lazy = [da.from_array(X, (180, 1)), da.from_array(y, 200), da.from_array(weight, 500)]
    for solver, given in (("auto", lazy), ("adam", maps), ("adam", lazy)):
        settings |= {"solver": solver, "max_iter": 2}
        expected = swsgp(**settings).fit(X, y, weight).predict(X[:50], return_std=True)
        mean, std = swsgp(**settings).fit(*given).predict(given[0][:50], return_std=True)
        np.testing.assert_allclose((np.asarray(mean), np.asarray(std)), expected, rtol=1e-8)


def test_rows_that_come_after_the_blocks_change_q(data):
    X, y = data
    settings = {"optimizer": None}
    models = [swsgp(memory_budget=b, **settings).fit(X, y) for b in (None, SUMS_BUDGET)]
    found, expected = (m.partial_fit(X[:20] + 0.1, y[:20]).predict(X[::5]) for m in models)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_outliers_in_blocks_leave_the_scale_of_the_others(data):
    X, y = data[0], data[1].copy()
    y[::40] = 1e6
    settings = {"likelihood": "student_t", "optimizer": None, "max_iter": 2}
    models = [swsgp(memory_budget=b, **settings).fit(X, y) for b in (None, SUMS_BUDGET)]
    (mean, scale), expected = ((model.y_mean_, model.y_scale_) for model in models)
    np.testing.assert_allclose((mean, scale), expected, rtol=1e-12)
    np.testing.assert_allclose((mean, scale), (data[1].mean(), data[1].std()), rtol=0.1)


# ---- classifiers


def sgd_classifier(**settings):
    settings = {"kernel": RBF([1.0, 2.0]), "solver": "sgd", "n_basis": 60} | settings
    return skgp.QSGPClassifier(random_state=0, device="cpu", max_iter=6, **settings)


def newton_classifier(**settings):
    settings = {"kernel": RBF([1.0, 2.0]), "n_basis": 24, "optimizer": None} | settings
    settings = {"covariance": "full", "tol": 1e-12} | settings
    return skgp.QSGPClassifier(random_state=0, device="cpu", **settings)


def swsgp_classifier(**settings):
    settings = {"kernel": RBF([1.0, 2.0]), "n_inducing": 24, "n_neighbors": 6} | settings
    settings = {"tol": 1e-13, "max_iter": 60, "optimizer": None, "init": "random"} | settings
    return skgp.SWSGPClassifier(random_state=0, device="cpu", **settings)


CLASSIFIERS = {
    "sgd": (sgd_classifier, {"optimizer": None}, 1e-8),
    "sgd, learned": (sgd_classifier, {"basis": "fourier"}, 1e-8),
    "newton": (newton_classifier, {}, 1e-8),
    "newton, learned": (newton_classifier, {"optimizer": "auto", "basis": "fourier"}, 1e-8),
    "neighbors": (swsgp_classifier, {}, 1e-5),
    "all points": (swsgp_classifier, {"n_inducing": 12, "n_neighbors": 12}, 1e-5),
    "adam": (swsgp_classifier, {"solver": "adam", "kl_weight": 1.0, "max_iter": 5}, 1e-5),
}

SLOW = [("newton, learned", 2), ("newton", 3), ("neighbors", 3)]


@pytest.fixture(scope="module")
def labelled(data):
    """X (500, 2), in the order of memory, and strings: of two classes, and of three."""
    X, y = (column[np.lexsort(data[0].T[::-1])] for column in data)
    return X, np.where(y > 100, "up", "down"), np.array(["a", "b", "c"])[np.digitize(y, [95, 105])]


# Of several classes rows are held out in memory to couple them, which changes their order.
@pytest.mark.parametrize(
    ("name", "n_classes"),
    [*((name, 2) for name in CLASSIFIERS if name != "newton, learned"), ("sgd", 3)]
    + [slow_case(*case) for case in SLOW],
)
def test_classifiers_in_blocks_give_the_fit_to_all_rows(labelled, name, n_classes, tmp_path):
    make_model, settings, atol = CLASSIFIERS[name]
    X, y = labelled[0], labelled[n_classes - 1]
    expected = make_model(**settings).fit(X, y)
    limited = make_model(memory_budget=SUMS_BUDGET, **settings)
    wanted = expected.predict_proba(X[::5])
    found = limited.fit(memory_map(tmp_path / "X.npy", X), y).predict_proba(X[::5])
    np.testing.assert_array_equal(limited.classes_, expected.classes_)
    np.testing.assert_allclose(limited.offset_, expected.offset_, rtol=1e-10)
    np.testing.assert_allclose(found, wanted, atol=atol)
    if n_classes > 2 or name not in ("sgd", "all points"):
        return
    lazy = da.from_array(X, (180, 1)), da.from_array(y, 200)
    limited.fit(*lazy)
    assert limited.predict(lazy[0][:9]).compute().dtype == y.dtype
    np.testing.assert_allclose(limited.predict_proba(lazy[0][::5]).compute(), found, atol=1e-8)


def test_weights_and_classes_of_blocks_are_those_of_memory(labelled):
    X, _, y = labelled
    weight = np.random.default_rng(1).integers(0, 3, len(y)) / 2.0
    y = np.where(y == "c", 7, np.where(weight > 0, np.where(y == "a", 2, 3), 1))
    weight[y == 7] = 1.0
    for class_weight in ("balanced", {2: 3.0, 3: 0.5}):
        settings = {"class_weight": class_weight, "n_inducing": 12, "n_neighbors": 12}
        expected = swsgp_classifier(**settings).fit(X, y, weight)
        found = swsgp_classifier(memory_budget=SUMS_BUDGET, **settings).fit(X, y, weight)
        assert found.classes_.tolist() == [2, 3, 7]
        np.testing.assert_allclose(found.offset_, expected.offset_, rtol=1e-10)
        probabilities = (each.predict_proba(X[::5]) for each in (found, expected))
        np.testing.assert_allclose(*probabilities, atol=1e-5)
    with pytest.raises(ValueError, match="not supported by solver='sgd'"):
        sgd_classifier(memory_budget=SUMS_BUDGET).fit(X, y, weight)


@pytest.mark.parametrize("lazy", [False, True])
def test_labels_that_are_none_are_refused_in_blocks(labelled, lazy):
    X = labelled[0]
    model = swsgp_classifier(memory_budget=SUMS_BUDGET)
    for y, message in (
        (np.zeros(500), "y holds one class, 0.0"),
        (X[:, 0], "Unknown label type: continuous"),
        (np.where(X[:, 0] > 0, 1.0, np.nan), "NaN"),
    ):
        given = (da.from_array(X, (200, 2)), da.from_array(y, 200)) if lazy else (X, y)
        with pytest.raises(ValueError, match=message):
            model.fit(*given)


def test_counts_in_blocks_are_counts(data):
    X, y = data[0], np.round(np.abs(data[1] - 100))
    settings = {"kernel": RBF(1.0), "likelihood": "poisson", "optimizer": None}
    settings |= {"tol": 1e-13, "max_iter": 60}
    expected = swsgp(**settings).fit(X, y).predict(X[::5])
    found = swsgp(memory_budget=SUMS_BUDGET, **settings).fit(X, y).predict(X[::5])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="y must hold counts.*; 1 of 500 rows hold none"):
        swsgp(memory_budget=SUMS_BUDGET, **settings).fit(X, np.append(y[:-1], 0.5))


def test_fewer_inducing_points_by_default(data, monkeypatch):
    monkeypatch.setattr("skgp.estimators.defaults.SWSGP_BLOCKS_INDUCING", 25)
    models = [swsgp(memory_budget=b, n_inducing=None, optimizer=None) for b in (None, SUMS_BUDGET)]
    assert [model.fit(*data).n_inducing_ for model in models] == [500, 25]


def test_sums_without_room_are_refused(data):
    with pytest.raises(MemoryBudgetError, match="Use a smaller n_neighbors or n_inducing"):
        swsgp(memory_budget=6e4, optimizer=None).fit(*data)


BY_PASSES = {
    "QSGPRegressor": {"basis": "fourier", "n_basis": 60, "solver": "cholesky", "kernel": KERNEL},
    "StateSpaceGPRegressor": {"n_inducing": 20},
    "SWSGPRegressor": {"n_inducing": 12, "n_neighbors": 4, "max_iter": 2},
    "SWSGPClassifier": {"n_inducing": 30, "n_neighbors": 6, "max_iter": 3},
    "QSGPClassifier": {"n_basis": 30},
}


@pytest.mark.parametrize("name", slow(BY_PASSES, but=list(BY_PASSES)[:3]))
def test_a_source_that_is_interrupted_leaves_the_estimator_as_it_was(data, name, monkeypatch):
    """KeyboardInterrupt as a block is read: nothing of a pass over part of the rows is kept."""
    X, y = data
    if name.startswith("StateSpace"):
        X = X[:, :1]
    if name.endswith("Classifier"):
        y = y > 100
    model = getattr(skgp, name)(random_state=0, memory_budget=BUDGET, **BY_PASSES[name])
    read, left = ArrayBlocks._read, [10**6]

    def reading(self, *args):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return read(self, *args)

    monkeypatch.setattr(ArrayBlocks, "_read", reading)
    model.set_params(optimizer=None).fit(X, y)
    n_reads, before = 10**6 - left[0], model.predict(X[::5])
    state = dict(vars(model))
    left[0] = n_reads - 3  # in the last pass
    with pytest.raises(KeyboardInterrupt):
        model.fit(X[::-1], y)
    assert vars(model).keys() == state.keys()
    assert all(vars(model)[key] is value for key, value in state.items())
    left[0] = n_reads - 1
    fresh = clone(model)
    with pytest.raises(KeyboardInterrupt):
        fresh.fit(X, y)
    with pytest.raises(NotFittedError):
        fresh.predict(X)
    np.testing.assert_array_equal(model.predict(X[::5]), before)
