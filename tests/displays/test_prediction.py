"""Displays: the arrays they compute and the artists they draw."""

import sys

import numpy as np
import pytest
from scipy import stats
from sklearn.gaussian_process.kernels import Matern, WhiteKernel

from skgp import StateSpaceGPRegressor
from skgp.displays import CoverageDisplay, PredictiveBandDisplay
from skgp.displays.prediction import LEVELS

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


class Normal:
    """Predicts N(first column, scale^2)."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def predict(self, X):
        self.columns = list(getattr(X, "columns", []))
        return np.asarray(X)[:, 0] + 10 * np.asarray(X)[:, 1]

    def predict_quantiles(self, X, quantiles):
        return self.predict(X)[:, None] + self.scale * stats.norm.ppf(quantiles)

    def predict_interval(self, X, coverage=0.95):
        tail = (1 - coverage) / 2
        return self.predict_quantiles(X, [tail, 1 - tail]).T


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    X = rng.uniform(0, 4, (4000, 2))
    return X, X[:, 0] + 10 * X[:, 1] + rng.standard_normal(4000)


def test_band_follows_one_feature_at_the_medians_of_the_others(data):
    X, y = data
    display = PredictiveBandDisplay.from_estimator(Normal(), X, y, coverage=0.8, grid_resolution=9)
    np.testing.assert_allclose(display.x, np.linspace(X[:, 0].min(), X[:, 0].max(), 9))
    np.testing.assert_allclose(display.mean, display.x + 10 * np.median(X[:, 1]))
    np.testing.assert_allclose(display.upper - display.mean, stats.norm.ppf(0.9))
    np.testing.assert_allclose(display.mean - display.lower, stats.norm.ppf(0.9))


def test_band_names_its_axes_as_told(data):
    names = {"feature_name": "time, days", "target_name": "load, MW"}
    display = PredictiveBandDisplay.from_estimator(Normal(), *data, **names)
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("time, days", "load, MW")


def test_band_draws_what_it_holds(data):
    X, y = data
    figure, ax = plt.subplots()
    display = PredictiveBandDisplay.from_estimator(
        Normal(), X, y, feature=1, ax=ax, line_kwargs={"color": "red"}, band_kwargs={"alpha": 0.5}
    )
    assert display.ax_ is ax and display.figure_ is figure
    np.testing.assert_array_equal(display.line_.get_xydata(), np.c_[display.x, display.mean])
    np.testing.assert_array_equal(display.points_.get_offsets(), np.c_[X[:, 1], y])
    assert display.line_.get_color() == "red" and display.band_.get_alpha() == 0.5
    assert ax.get_xlabel() == "x1" and ax.get_ylabel() == "y"
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["95% interval of y", "predictive mean", "observed"]


def test_band_without_targets_has_no_points(data):
    display = PredictiveBandDisplay.from_estimator(Normal(), data[0])
    assert display.points_ is None and display.observed is None


def test_band_of_a_data_frame_keeps_its_names(data):
    pandas = pytest.importorskip("pandas")
    X, y = data
    frame = pandas.DataFrame(X, columns=["age", "size"])
    estimator = Normal()
    display = PredictiveBandDisplay.from_estimator(
        estimator, frame, pandas.Series(y, name="price"), feature="size"
    )
    assert estimator.columns == ["age", "size"]
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("size", "price")
    assert display.x[-1] == X[:, 1].max()


@pytest.mark.parametrize("feature", [2, -1, "size"])
def test_band_refuses_a_feature_that_is_not_there(data, feature):
    with pytest.raises(ValueError, match=f"feature={feature!r} is not a column"):
        PredictiveBandDisplay.from_estimator(Normal(), data[0], feature=feature)


def test_coverage_of_a_calibrated_estimator_is_nominal(data):
    display = CoverageDisplay.from_estimator(Normal(), *data)
    np.testing.assert_array_equal(display.nominal, LEVELS)
    z = (display.observed - LEVELS) / np.sqrt(LEVELS * (1 - LEVELS) / len(data[1]))
    assert np.abs(z).max() < 4


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_coverage_shows_too_narrow_and_too_wide(data, scale):
    display = CoverageDisplay.from_estimator(Normal(scale), *data, levels=[0.5, 0.8])
    expected = 1 - 2 * stats.norm.cdf(-scale * stats.norm.ppf([0.75, 0.9]))
    np.testing.assert_allclose(display.observed, expected, atol=0.03)


def test_coverage_draws_the_curve_and_the_diagonal(data):
    display = CoverageDisplay.from_estimator(Normal(), *data, color="green")
    expected = np.c_[display.nominal, display.observed]
    np.testing.assert_array_equal(display.line_.get_xydata(), expected)
    np.testing.assert_array_equal(display.diagonal_.get_xydata(), [[0, 0], [1, 1]])
    assert display.line_.get_color() == "green" and display.line_.get_label() == "Normal"
    second = CoverageDisplay(LEVELS, LEVELS, estimator_name="b").plot(ax=display.ax_)
    assert second.figure_ is display.figure_
    names = [text.get_text() for text in display.ax_.get_legend().get_texts()]
    assert names == ["calibrated", "Normal", "b"]


@pytest.mark.parametrize("display", [PredictiveBandDisplay, CoverageDisplay])
def test_displays_without_matplotlib_say_how_to_install_it(data, display, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=rf"{display.__name__} needs.*skgp\[plot\]"):
        display.from_estimator(Normal(), *data)


def test_band_spans_gaps_and_leaves_out_missing_targets():
    X = np.column_stack([np.arange(50.0), np.zeros(50)])
    y = np.sin(X[:, 0])
    y[20:] = np.nan  # rows that are not observed yet still say how far to draw
    display = PredictiveBandDisplay.from_estimator(Normal(), X, y)
    assert display.x[-1] == 49
    np.testing.assert_array_equal(display.points_.get_offsets(), np.c_[X[:20, 0], y[:20]])


def test_band_along_dates():
    pd = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    when = pd.date_range("2024-01-01", periods=60, freq="h")
    X = pd.DataFrame({"x": rng.normal(size=60), "when": when, "site": rng.choice(["a", "b"], 60)})
    kernel = Matern(1.0) + WhiteKernel(0.1)
    model = StateSpaceGPRegressor(kernel, optimizer=None).fit(X, np.sin(np.arange(60) / 9))
    display = PredictiveBandDisplay.from_estimator(model, X, feature="when", grid_resolution=20)
    site = np.sort(X["site"])[30]
    rows = pd.DataFrame({"x": X["x"].median(), "when": display.x, "site": site})
    np.testing.assert_allclose(display.mean, model.predict(rows))
    assert (display.x[0], display.x[-1]) == (when[0].to_numpy(), when[-1].to_numpy())
    by_site = PredictiveBandDisplay.from_estimator(model, X, feature="site")
    np.testing.assert_array_equal(by_site.x, ["a", "b"])
