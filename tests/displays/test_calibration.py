"""Expected calibration error; scikit-learn's reliability diagram draws the classifiers of skgp."""

import numpy as np
import pytest
from sklearn.calibration import CalibrationDisplay, calibration_curve
from sklearn.datasets import make_moons

from skgp import QSGPClassifier
from skgp.displays import expected_calibration_error
from tests.same import assert_same


def naive(hit, confidence, n_bins):
    """The definition, bin by bin; intervals are closed on the right, the first also on the left."""
    total = 0.0
    for b in range(n_bins):
        lower, upper = b / n_bins, (b + 1) / n_bins
        rows = [i for i, p in enumerate(confidence) if lower < p <= upper or (b == 0 and p == 0)]
        if rows:
            gap = np.mean([hit[i] for i in rows]) - np.mean([confidence[i] for i in rows])
            total += len(rows) / len(hit) * abs(gap)
    return total


@pytest.mark.parametrize("n_bins", [1, 4, 15])
def test_error_of_one_column_is_the_definition(n_bins):
    rng = np.random.default_rng(0)
    prob = np.append(rng.uniform(size=200), [0.0, 1.0, 0.25, 0.5])
    y = np.where(rng.uniform(size=204) < prob**2, "yes", "no")
    expected = naive(y == "yes", prob, n_bins)
    assert expected_calibration_error(y, prob, n_bins) == pytest.approx(expected, rel=1e-12)


def test_error_of_several_columns_is_that_of_the_likeliest_class():
    rng = np.random.default_rng(1)
    prob = rng.dirichlet(np.ones(3), size=150)
    y = np.array(["a", "b", "c"])[[rng.choice(3, p=p) for p in prob]]
    hit = np.array(["a", "b", "c"])[prob.argmax(1)] == y
    expected = naive(hit, prob.max(1), 15)
    assert expected_calibration_error(y, prob) == pytest.approx(expected, rel=1e-12)


def test_error_agrees_with_the_curve_of_scikit_learn():
    rng = np.random.default_rng(2)
    prob = rng.uniform(size=300)
    y = (rng.uniform(size=300) < prob).astype(int)
    true, predicted = calibration_curve(y, prob, n_bins=10)
    share = np.histogram(prob, bins=10, range=(0, 1))[0] / 300
    expected = (share * np.abs(true - predicted)).sum()
    assert expected_calibration_error(y, prob, n_bins=10) == pytest.approx(expected, rel=1e-9)


def test_error_measures_a_constant_excess():
    rng = np.random.default_rng(3)
    prob = rng.uniform(0.3, 0.7, 40_000)
    y = rng.uniform(size=40_000) < prob
    assert expected_calibration_error(y, prob) < 0.02
    assert expected_calibration_error(y, prob + 0.2) == pytest.approx(0.2, abs=0.01)


def test_bins_are_closed_on_the_right():
    # 0.25 shares the first of four bins with 0.2: their errors, +0.75 and -0.2, offset in part.
    assert expected_calibration_error([1, 0], [0.25, 0.2], n_bins=4) == pytest.approx(0.55 / 2)


def test_error_of_certainty():
    prob = np.eye(2)[[0, 1, 1]]
    assert expected_calibration_error([0, 1, 1], prob) == 0
    assert expected_calibration_error([1, 0, 0], prob) == 1
    assert expected_calibration_error([1, 1], [1.0, 1.0], labels=[0, 1]) == 0


@pytest.mark.parametrize(
    ("y", "prob", "params", "message"),
    [
        ([0, 1], [0.1, 0.2], {"n_bins": 0}, "n_bins must be a positive integer; got 0"),
        ([0, 1], [0.1, 0.2], {"n_bins": 2.5}, "n_bins must be"),
        ([0, 1], [0.1], {}, r"got \(2,\) and \(1,\)"),
        ([], [], {}, "n > 0"),
        ([0, 1], [0.1, 1.2], {}, "from 0.1 to 1.2"),
        ([0, 1], [0.1, np.nan], {}, "must lie in"),
        ([1, 1], [0.1, 0.2], {}, r"2 labels; y_true holds \[1\]. Give labels=estimator.classes_"),
        ([0, 1], np.full((2, 3), 1 / 3), {}, r"3 labels; y_true holds \[0, 1\]"),
        ([0, 1], [0.1, 0.2], {"labels": [0, 1, 2]}, r"labels has \[0, 1, 2\]"),
        ([0, 5], [0.1, 0.2], {"labels": [0, 1]}, r"holds \[5\], not among labels=\[0, 1\]"),
    ],
)
def test_error_refuses_what_does_not_fit(y, prob, params, message):
    with pytest.raises(ValueError, match=message):
        expected_calibration_error(y, prob, **params)


def test_reliability_diagram_of_scikit_learn_draws_a_classifier():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    X, codes = make_moons(120, noise=0.3, random_state=0)
    y = np.array(["down", "up"])[codes]
    estimator = QSGPClassifier(random_state=0).fit(X[:60], y[:60])
    display = CalibrationDisplay.from_estimator(estimator, X[60:], y[60:], n_bins=5)
    assert_same(display.y_prob, estimator.predict_proba(X[60:])[:, 1])
    assert display.pos_label == "up" and display.estimator_name == "QSGPClassifier"
    matplotlib.pyplot.close("all")
