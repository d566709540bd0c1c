"""Display of the history of a fit."""

import numpy as np
import pytest
from sklearn.gaussian_process.kernels import RBF, WhiteKernel

from skgp import GaussianProcessRegressor, QSGPRegressor, StateSpaceGPRegressor
from skgp.displays import LossHistoryDisplay

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def series(rng):
    x = np.linspace(0, 6, 60)
    return x[:, None], np.sin(x) + 0.1 * rng.standard_normal(60)


def test_draws_what_the_fit_reported(series):
    model = StateSpaceGPRegressor(1.0 * RBF() + WhiteKernel(0.1)).fit(*series)
    display = LossHistoryDisplay.from_estimator(model)
    assert list(display.stages) == ["solve"]
    np.testing.assert_array_equal(display.lines_[0].get_ydata(), model.history_["solve"])
    assert display.lines_[0].get_xdata()[0] == 1
    assert display.axes_[0].get_title() == "solve"


def test_stages_in_the_order_asked_for_on_axes_given():
    display = LossHistoryDisplay({"a": np.array([2.0, np.inf, 1.0]), "b": np.array([1.0, 0.5])})
    _, axes = plt.subplots(1, 2)
    assert display.plot(axes, color="k") is display
    assert [axis.get_title() for axis in axes] == ["a", "b"]
    assert np.isnan(display.lines_[0].get_ydata()[1])
    assert display.lines_[1].get_color() == "k"


def test_front_door_shows_the_history_of_what_it_fitted(series):
    model = GaussianProcessRegressor(1.0 * RBF() + WhiteKernel(0.1), method="state_space")
    display = LossHistoryDisplay.from_estimator(model.fit(*series))
    assert len(display.stages["solve"]) == model.estimator_.n_iter_


def test_nothing_to_draw_and_unknown_stages_say_so(series):
    model = QSGPRegressor(1.0 * RBF() + WhiteKernel(0.1), optimizer=None).fit(*series)
    with pytest.raises(ValueError, match="no stage of this QSGPRegressor has two iterations"):
        LossHistoryDisplay.from_estimator(model)
    with pytest.raises(ValueError, match=r"stages holds 'loss'; .* has \['hyperparameters'"):
        LossHistoryDisplay.from_estimator(model, stages=["loss"])
