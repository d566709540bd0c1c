"""The display of additive effects: the arrays it computes and the artists it draws."""

import numpy as np
import pytest
from scipy import stats
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.displays import AdditiveEffectsDisplay
from skgp.kernels import ActiveDims

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


class Squares:
    """Components x^2 of the columns 2 and 0, of standard deviation |x|; k times that of class k."""

    columns = (2, 0)

    def __init__(self, n_classes=1):
        self.n_classes = n_classes
        self.classes_ = np.arange(n_classes)
        self.component_columns_ = list(self.columns)
        self.component_names_ = ["the last", "the first"]

    def predict_components(self, X, return_std=False):
        self.names = list(getattr(X, "columns", []))
        values = np.asarray(X)[:, self.columns]
        mean, std = values**2, np.abs(values)
        if self.n_classes > 1:
            mean, std = (part[..., None] * (1 + self.classes_) for part in (mean, std))
        return mean, std


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def X():
    rng = np.random.default_rng(0)
    return np.column_stack([rng.integers(0, 5, 300), rng.normal(size=(300, 2))])


def test_effects_follow_the_column_of_each_component(X):
    display = AdditiveEffectsDisplay.from_estimator(Squares(), X, grid_resolution=30)
    np.testing.assert_allclose(display.x[0], np.linspace(X[:, 2].min(), X[:, 2].max(), 30))
    for x, mean, std in zip(display.x, display.mean, display.std, strict=True):
        np.testing.assert_allclose(mean, x**2)
        np.testing.assert_allclose(std, np.abs(x))
    assert display.panel_names == ["x2", "x0"]
    np.testing.assert_allclose(display.deciles[0], np.percentile(X[:, 2], range(10, 100, 10)))


def test_effects_of_few_values_are_drawn_at_these(X):
    display = AdditiveEffectsDisplay.from_estimator(Squares(), X)
    np.testing.assert_array_equal(display.x[1], np.arange(5))
    assert [lines[0].get_marker() for lines in display.lines_] == ["None", "o"]


def test_effects_draw_what_they_hold(X):
    figure, axes = plt.subplots(1, 2)
    display = AdditiveEffectsDisplay.from_estimator(
        Squares(),
        X,
        coverage=0.8,
        ax=axes,
        target_name="rides",
        line_kwargs={"color": "red"},
        band_kwargs={"alpha": 0.5},
    )
    assert display.figure_ is figure and list(display.axes_) == list(axes)
    line, band = display.lines_[1][0], display.bands_[1][0]
    np.testing.assert_array_equal(line.get_xydata(), np.c_[np.arange(5), np.arange(5) ** 2])
    reach = stats.norm.ppf(0.9) * 4
    assert band.get_paths()[0].vertices[:, 1].max() == pytest.approx(16 + reach)
    assert line.get_color() == "red" and band.get_alpha() == 0.5
    assert [axis.get_xlabel() for axis in axes] == ["x2", "x0"]
    assert [axis.get_ylabel() for axis in axes] == ["rides", ""]


def test_effects_of_classes_are_a_line_each(X):
    display = AdditiveEffectsDisplay.from_estimator(Squares(3), X, grid_resolution=30)
    assert [len(lines) for lines in display.lines_] == [3, 3]
    np.testing.assert_allclose(display.lines_[0][2].get_ydata(), 3 * display.x[0] ** 2)
    labels = [text.get_text() for text in display.axes_[0].get_legend().get_texts()]
    assert labels == ["0", "1", "2"]


def test_effects_of_chosen_features_of_a_data_frame(X):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["hour", "unused", "wind"])
    estimator = Squares()
    display = AdditiveEffectsDisplay.from_estimator(estimator, frame, features=["hour"])
    assert estimator.names == ["hour", "unused", "wind"]
    assert display.panel_names == ["hour"] and len(display.axes_) == 1


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"features": [1]}, r"holds 1, of which the kernel has no part; .* \[0, 2\]"),
        ({"features": ["hour"]}, "'hour' is not a column"),
        ({"ax": [None]}, "1 axes for 2 panels"),
    ],
)
def test_effects_refuse_what_is_not_there(X, params, message):
    with pytest.raises(ValueError, match=message):
        AdditiveEffectsDisplay.from_estimator(Squares(), X, **params)


def test_effects_need_components(X):
    with pytest.raises(TypeError, match="object has no predict_components"):
        AdditiveEffectsDisplay.from_estimator(object(), X)


def test_effects_of_an_additive_model_are_its_components(X):
    y = X[:, 0] - X[:, 2] ** 2
    kernel = ActiveDims(Matern(2.0), [2]) + ActiveDims(Matern(2.0), [0]) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, optimizer=None).fit(X, y)
    display = AdditiveEffectsDisplay.from_estimator(model, X, grid_resolution=30)
    columns = [2 if name == "x2" else 0 for name in display.panel_names]
    assert sorted(columns) == [0, 2]
    for panel, column in enumerate(columns):
        rows = np.repeat(X[:1], len(display.x[panel]), axis=0)
        rows[:, column] = display.x[panel]
        found = np.array(model.predict_components(rows, return_std=True))
        np.testing.assert_allclose(display.mean[panel], found[0][:, panel], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(display.std[panel], found[1][:, panel], rtol=1e-9)


def test_effects_of_a_series_are_the_summands_of_its_kernel():
    x = np.linspace(0, 9, 60)[:, None]
    kernel = Matern(9.0, nu=2.5) + Matern(1.0, nu=0.5) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, optimizer=None).fit(x, np.sin(x[:, 0]))
    display = AdditiveEffectsDisplay.from_estimator(model, x)
    assert display.panel_names == [
        "x0\nMatern(length_scale=9, nu=2.5)",
        "x0\nMatern(length_scale=1, nu=0.5)",
    ]
    assert display.deciles is None
    total = sum(display.mean) + model.intercept_
    np.testing.assert_allclose(total, model.predict(display.x[0][:, None]), rtol=1e-9)


def test_effects_of_a_series_with_dates_and_covariates():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    when = pd.date_range("2024-01-01", periods=90, freq="h")
    X = pd.DataFrame({"x": rng.normal(size=90), "when": when, "site": rng.choice(["a", "b"], 90)})
    y = np.sin(np.arange(90) / 9) + (X["site"] == "a") + 0.1 * rng.normal(size=90)
    kernel = Matern(1.0) + Matern(0.1) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, trend=1, optimizer=None).fit(X, y)
    assert model.component_columns_ == [1, 1, 1, 0, 2]
    display = AdditiveEffectsDisplay.from_estimator(model, X, grid_resolution=30)
    assert [len(x) for x in display.x] == [30, 30, 30, 30, 2]
    assert display.panel_names[2:] == ["when\ntrend", "x", "site"]
    assert (display.x[0][0], display.x[0][-1]) == (when[0].to_numpy(), when[-1].to_numpy())
    rows = X.iloc[:30].assign(when=display.x[0])
    np.testing.assert_allclose(display.mean[0], model.predict_components(rows)[:, 0])
    np.testing.assert_array_equal(display.x[4], ["a", "b"])
